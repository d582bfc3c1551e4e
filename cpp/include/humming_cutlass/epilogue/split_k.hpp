/// Split-k inside one launch: every CTA of an output tile leaves its fp32 sums in the workspace; the last one to arrive
/// adds them in the order of k, so the result does not depend on who was last.
#pragma once

#include "humming_cutlass/device/arguments.hpp"

namespace humming_cutlass::epilogue {

template <class Mainloop>
struct SplitK {
  using Accumulator = typename Mainloop::Accumulator;
  static constexpr int ThreadFloats = int(sizeof(Accumulator) / sizeof(float));
  static constexpr int TileFloats = ThreadFloats * Mainloop::Threads;

  /// Returns whether this CTA holds the sum over all splits and must run the epilogue. Leaves the counter at zero.
  __device__ static bool reduce(Mainloop const& loop, int32_t tile, int32_t tiles, int32_t split,
                                Accumulator& accumulators) {
    GemmArguments const& args = loop.args;
    auto* const workspace = reinterpret_cast<float4*>(args.ptr_partial);
    auto const at = [&](int32_t s, int fragment) {
      return workspace + (int64_t(s) * tiles + tile) * (TileFloats / 4) + fragment * Mainloop::Threads + loop.thread;
    };
#pragma unroll
    for (int r = 0; r < Mainloop::WarpRows; ++r) {
#pragma unroll
      for (int j = 0; j < Mainloop::TokenTiles; ++j) {
        float const(&x)[4] = accumulators[r][j];
        __stcg(at(split, r * Mainloop::TokenTiles + j), make_float4(x[0], x[1], x[2], x[3]));
      }
    }
    __threadfence();
    auto* const arrived = reinterpret_cast<uint32_t*>(loop.smem);
    __syncthreads();
    if (loop.thread == 0) {
      *arrived = atomicAdd(args.ptr_counter + tile, 1u);
    }
    __syncthreads();
    bool const last = *arrived == uint32_t(args.split_k - 1);
    __syncthreads();  // the epilogue writes where `arrived` was
    if (!last) {
      return false;
    }
    if (loop.thread == 0) {
      args.ptr_counter[tile] = 0;
    }
    __threadfence();
    for (int32_t s = 0; s < args.split_k; ++s) {
#pragma unroll
      for (int r = 0; r < Mainloop::WarpRows; ++r) {
#pragma unroll
        for (int j = 0; j < Mainloop::TokenTiles; ++j) {
          float(&x)[4] = accumulators[r][j];
          float4 const y = __ldcg(at(s, r * Mainloop::TokenTiles + j));
          x[0] = s == 0 ? y.x : x[0] + y.x;
          x[1] = s == 0 ? y.y : x[1] + y.y;
          x[2] = s == 0 ? y.z : x[2] + y.z;
          x[3] = s == 0 ? y.w : x[3] + y.w;
        }
      }
    }
    return true;
  }
};

}  // namespace humming_cutlass::epilogue
