/// Epilogue: D = accumulators * channel scale * global scale + bias, rounded once, stored through shared memory.
#pragma once

#include "humming_cutlass/device/arguments.hpp"
#include "humming_cutlass/numeric/arithmetic.hpp"

namespace humming_cutlass::epilogue {

/// Bits of an output element.
template <class ElementD>
struct OutputStorage {
  using type = uint16_t;
  __device__ static uint16_t round(float x) { return round_to<ElementD>(x); }
};
template <>
struct OutputStorage<float> {
  using type = float;
  __device__ static float round(float x) { return x; }
};

template <class Mainloop, class ElementD>
struct LinearSm80 {
  using TileShape = typename Mainloop::TileShape;
  using Storage = typename OutputStorage<ElementD>::type;
  using Accumulator = typename Mainloop::Accumulator;

  static constexpr int ChunkElements = 16 / int(sizeof(Storage));
  static constexpr int RowElements = TileShape::N + ChunkElements;  ///< padded: tokens of a warp fall into different banks
  static constexpr int SmemBytes = TileShape::M * RowElements * int(sizeof(Storage));

  __device__ static void store(Mainloop const& loop, Accumulator const& accumulators) {
    GemmArguments const& args = loop.args;
    auto* const tile = reinterpret_cast<Storage*>(loop.smem);  // (TileM, TileN + padding)
    float const alpha = Mainloop::two_to(-Mainloop::Dequant::Exponent);
    float const global_scale = args.ptr_global_scale != nullptr ? *args.ptr_global_scale : 1.f;
#pragma unroll
    for (int r = 0; r < Mainloop::WarpRows; ++r) {
      float scale[2] = {1.f, 1.f};
      float bias[2] = {0.f, 0.f};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if constexpr (!Mainloop::Grouped) {
          auto const* const scales = static_cast<typename Mainloop::Scale::Storage const*>(args.ptr_scale);
          scale[h] = Mainloop::Scale::convert(scales[loop.packed_row(r) * 16 + loop.lane / 4 * 2 + h]);
        }
        int32_t const n = (loop.tile_n + loop.warp_n + r) * 16 + loop.lane / 4 + 8 * h;
        if (args.ptr_bias != nullptr && n < args.n) {
          bias[h] = args.ptr_bias[n];
        }
      }
#pragma unroll
      for (int j = 0; j < Mainloop::TokenTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int const token = loop.warp_m + j * 8 + loop.lane % 4 * 2 + i % 2;
          int const column = (loop.warp_n + r) * 16 + loop.lane / 4 + 8 * (i / 2);
          float const value = accumulators[r][j][i] * scale[i / 2] * alpha * global_scale + bias[i / 2];
          tile[token * RowElements + column] = OutputStorage<ElementD>::round(value);
        }
      }
    }
    __syncthreads();
    copy_out(loop, tile);
  }

  __device__ static void copy_out(Mainloop const& loop, Storage const* tile) {
    GemmArguments const& args = loop.args;
    constexpr int row_chunks = TileShape::N / ChunkElements;
    auto* const d = static_cast<Storage*>(args.ptr_d);
    bool const aligned = reinterpret_cast<uintptr_t>(d) % 16 == 0 && args.stride_d % ChunkElements == 0;
    for (int c = loop.thread; c < TileShape::M * row_chunks; c += Mainloop::Threads) {
      int const row = c / row_chunks;
      int const column = c % row_chunks * ChunkElements;
      int64_t const m = loop.tile_m + row;
      int32_t const n = loop.tile_n * 16 + column;
      if (m >= args.m || n >= args.n) {
        continue;
      }
      Storage const* const source = tile + row * RowElements + column;
      Storage* const target = d + m * args.stride_d + n;
      if (aligned && n + ChunkElements <= args.n) {
        *reinterpret_cast<uint4*>(target) = *reinterpret_cast<uint4 const*>(source);
      } else {
        for (int e = 0; e < ChunkElements && n + e < args.n; ++e) {
          target[e] = source[e];
        }
      }
    }
  }
};

}  // namespace humming_cutlass::epilogue
