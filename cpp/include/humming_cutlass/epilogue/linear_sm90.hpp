/// Epilogue of a warpgroup: D = accumulators * channel scale * global scale + bias, rounded once.
///
/// The accumulators hold D^T; a transposing store to shared memory turns them so that a token's 64 outputs are contiguous.
/// Each warpgroup has its own buffer and its own barrier: warpgroups drift apart freely.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm90.hpp>

#include "humming_cutlass/epilogue/output.hpp"
#include "humming_cutlass/scheduler/persistent.hpp"

namespace humming_cutlass::epilogue {

template <class Mainloop, class ElementD>
struct LinearSm90 {
  using TileShape = typename Mainloop::TileShape;
  using Storage = typename Output<ElementD>::Storage;
  using Accumulator = typename Mainloop::Accumulator;

  static constexpr int ChunkTokens = TileShape::M < 16 ? TileShape::M : 16;  ///< few: shared memory is for the stages
  static constexpr int ChunkFragments = ChunkTokens / 8;
  static constexpr int Chunks = TileShape::M / ChunkTokens;
  static constexpr int RowElements = 64 + 16 / int(sizeof(Storage));  ///< padded against bank conflicts
  static constexpr int BytesWarpgroup = ChunkTokens * RowElements * int(sizeof(Storage));

  struct SharedStorage {
    alignas(16) uint8_t buffer[Mainloop::Warpgroups][BytesWarpgroup];
  };

  /// Stores the chunks of the tile that are this CTA's share, every `work.split_k`th; their sums are `accumulators[0 ...]`.
  __device__ static void store(GemmArguments const& args, WorkUnit const& work, Accumulator& accumulators,
                               SharedStorage& shared) {
    int const warpgroup = threadIdx.x / 128;
    int const warp = threadIdx.x / 32 % 4;
    int const lane = threadIdx.x % 32;
    auto* const buffer = reinterpret_cast<Storage*>(shared.buffer[warpgroup]);  // (ChunkTokens, 64 + padding)
    int32_t const n_begin = work.tile_n * TileShape::N + warpgroup * 64;
    scale(args, n_begin + warp * 16, lane, accumulators);
    static_for<Chunks>([&](auto c) {
      int const chunk = work.split + c * work.split_k;
      if (chunk >= Chunks) {
        return;
      }
      sync(warpgroup);  // the chunk before has left the buffer
      if constexpr (sizeof(Storage) == 2 && ChunkTokens == 16) {
        float (&x)[4] = accumulators[2 * c];
        float (&y)[4] = accumulators[2 * c + 1];
        int const token = lane / 16 * 8 + lane % 8;
        int const column = warp * 16 + lane / 8 % 2 * 8;
        cute::SM90_U16x8_STSM_T::copy(round_pair<ElementD>(x[0], x[1]), round_pair<ElementD>(x[2], x[3]),
                                      round_pair<ElementD>(y[0], y[1]), round_pair<ElementD>(y[2], y[3]),
                                      *reinterpret_cast<cute::uint128_t*>(buffer + token * RowElements + column));
      } else {
        static_for<ChunkFragments>([&](auto j) {
          static_for<4>([&](auto i) {
            int const token = j * 8 + lane % 4 * 2 + i % 2;
            int const column = warp * 16 + lane / 4 + 8 * (i / 2);
            buffer[token * RowElements + column] = Output<ElementD>::round(accumulators[c * ChunkFragments + j][i]);
          });
        });
      }
      sync(warpgroup);
      copy_out<Storage, 128, ChunkTokens, 64, RowElements>(
          args, buffer, threadIdx.x % 128, int64_t(work.tile_m) * TileShape::M + chunk * ChunkTokens, n_begin);
    });
  }

  __device__ static void sync(int warpgroup) { cutlass::arch::NamedBarrier::sync(128, warpgroup); }

  /// Multiplies the two rows of this lane by their factors and adds their bias.
  __device__ static void scale(GemmArguments const& args, int32_t first_row, int lane, Accumulator& accumulators) {
    RowFactors const rows =
        row_factors<typename Mainloop::Scale, Mainloop::Grouped, Mainloop::Dequant::Exponent>(args, first_row, lane);
    static_for<Mainloop::Fragments>(
        [&](auto f) { static_for<4>([&](auto i) { accumulators[f][i] = rows.apply(accumulators[f][i], i / 2); }); });
  }
};

}  // namespace humming_cutlass::epilogue
