/// Epilogue: D = accumulators * channel scale * global scale + bias, rounded once, stored through shared memory.
#pragma once

#include "humming_cutlass/epilogue/output.hpp"

namespace humming_cutlass::epilogue {

template <class Mainloop, class ElementD>
struct LinearSm80 {
  using TileShape = typename Mainloop::TileShape;
  using Storage = typename Output<ElementD>::Storage;
  using Accumulator = typename Mainloop::Accumulator;

  static constexpr int RowElements = TileShape::N + 16 / int(sizeof(Storage));  ///< padded against bank conflicts
  static constexpr int SmemBytes = TileShape::M * RowElements * int(sizeof(Storage));

  __device__ static int place(int row, int column) { return row * RowElements + column; }

  __device__ static void store(Mainloop const& loop, Accumulator const& accumulators) {
    auto* const tile = reinterpret_cast<Storage*>(loop.smem);  // (TileM, TileN + padding)
#pragma unroll
    for (int r = 0; r < Mainloop::WarpRows; ++r) {
      int32_t const first_row = (loop.tile_n + loop.warp_n + r) * 16;
      RowFactors const rows = row_factors<typename Mainloop::Scale, Mainloop::Grouped, Mainloop::Dequant::Exponent>(
          loop.args, first_row, loop.lane);
#pragma unroll
      for (int j = 0; j < Mainloop::TokenTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int const token = loop.warp_m + j * 8 + loop.lane % 4 * 2 + i % 2;
          int const column = (loop.warp_n + r) * 16 + loop.lane / 4 + 8 * (i / 2);
          float const value = rows.apply(accumulators[r * Mainloop::TokenTiles + j][i], i / 2);
          tile[place(token, column)] = Output<ElementD>::round(value);
        }
      }
    }
    __syncthreads();
    copy_out<Storage, Mainloop::Threads, TileShape::M, TileShape::N>(loop.args, tile, place, loop.thread, loop.tile_m,
                                                                     loop.tile_n * 16);
  }
};

}  // namespace humming_cutlass::epilogue
