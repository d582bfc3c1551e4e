/// Epilogue of a warp: D = accumulators * channel scale * global scale + bias, rounded once.
///
/// The accumulators hold D^T; a transposing store to shared memory turns them so that a token's 16 outputs are contiguous,
/// one sector of memory or two. Each warp has its own buffer: warps drift apart freely, and wait for no barrier.
#pragma once

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
  static constexpr int BytesWarp = ChunkTokens * 16 * int(sizeof(Storage));

  /// Where element (token, column) of a chunk lies: the 16-byte pieces of a token change places with its 128 bytes of shared
  /// memory, against bank conflicts.
  __device__ static int place(int token, int column) {
    constexpr int Vector = 16 / int(sizeof(Storage));
    constexpr int Pieces = 16 / Vector;
    return token * 16 + ((column / Vector) ^ (token * Pieces / 8 % Pieces)) * Vector + column % Vector;
  }

  struct SharedStorage {
    alignas(16) uint8_t buffer[Mainloop::Warpgroups * 4][BytesWarp];
  };

  /// Stores the chunks of the tile that are this CTA's share, every `work.split_k`th; their sums are `accumulators[0 ...]`,
  /// and what `add(c)` adds to those of the c-th.
  template <class Add>
  __device__ static void store(GemmArguments const& args, WorkUnit const& work, Accumulator& accumulators,
                               SharedStorage& shared, Add&& add) {
    int const warp = threadIdx.x / 32;
    int const lane = threadIdx.x % 32;
    auto* const buffer = reinterpret_cast<Storage*>(shared.buffer[warp]);  // (ChunkTokens, 16)
    int32_t const n_begin = work.tile_n * TileShape::N + warp * 16;
    RowFactors const rows =
        row_factors<typename Mainloop::Scale, Mainloop::Grouped, Mainloop::Dequant::Exponent>(args, n_begin, lane);
    static_for<Chunks>([&](auto c) {
      int const chunk = work.split + c * work.split_k;
      if (chunk >= Chunks) {
        return;
      }
      add(c);
      static_for<ChunkFragments>([&](auto f) {
        float (&x)[4] = accumulators[c * ChunkFragments + f];
        static_for<4>([&](auto i) { x[i] = rows.apply(x[i], i / 2); });
      });
      __syncwarp();  // the chunk before has left the buffer
      if constexpr (sizeof(Storage) == 2 && ChunkTokens == 16) {
        float (&x)[4] = accumulators[2 * c];
        float (&y)[4] = accumulators[2 * c + 1];
        int const token = lane / 16 * 8 + lane % 8;
        int const column = lane / 8 % 2 * 8;
        cute::SM90_U16x8_STSM_T::copy(round_pair<ElementD>(x[0], x[1]), round_pair<ElementD>(x[2], x[3]),
                                      round_pair<ElementD>(y[0], y[1]), round_pair<ElementD>(y[2], y[3]),
                                      *reinterpret_cast<cute::uint128_t*>(buffer + place(token, column)));
      } else {
        static_for<ChunkFragments>([&](auto j) {
          static_for<4>([&](auto i) {
            int const token = j * 8 + lane % 4 * 2 + i % 2;
            int const column = lane / 4 + 8 * (i / 2);
            buffer[place(token, column)] = Output<ElementD>::round(accumulators[c * ChunkFragments + j][i]);
          });
        });
      }
      __syncwarp();
      copy_out<Storage, 32, ChunkTokens, 16>(args, buffer, place, lane,
                                             int64_t(work.tile_m) * TileShape::M + chunk * ChunkTokens, n_begin);
    });
  }
};

}  // namespace humming_cutlass::epilogue
