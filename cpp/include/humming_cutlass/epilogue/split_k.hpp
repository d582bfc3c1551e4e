/// Split-k inside one launch: every CTA of an output tile leaves its fp32 sums in the workspace; the last one to arrive
/// adds them in the order of k, so the result does not depend on who was last.
#pragma once

#include "humming_cutlass/device/arguments.hpp"
#include "humming_cutlass/numeric/static_for.hpp"

namespace humming_cutlass::epilogue {

/// `Fragments` accumulator fragments of four floats in each of `Threads` threads.
template <int Fragments, int Threads>
struct SplitK {
  using Accumulator = float[Fragments][4];
  static_assert(Fragments < 4 || Fragments % 4 == 0, "SplitK: fragments are summed four at a time");

  /// Returns whether this CTA holds the sum over all splits and must run the epilogue. Leaves the counter at zero.
  ///
  /// `thread` counts the threads that take part, `sync` is their barrier, `flag` a word of shared memory that nothing
  /// else uses during the call.
  template <class Sync>
  __device__ static bool reduce(GemmArguments const& args, int thread, int32_t tile, int32_t tiles, int32_t split,
                                Accumulator& accumulators, uint32_t* flag, Sync&& sync) {
    auto* const workspace = reinterpret_cast<float4*>(args.ptr_partial);
    auto const at = [&](int32_t s, int fragment) {
      return workspace + ((int64_t(s) * tiles + tile) * Fragments + fragment) * Threads + thread;
    };
#pragma unroll
    for (int f = 0; f < Fragments; ++f) {
      float const(&x)[4] = accumulators[f];
      __stcg(at(split, f), make_float4(x[0], x[1], x[2], x[3]));
    }
    __threadfence();
    sync();
    if (thread == 0) {
      *flag = atomicAdd(args.ptr_counter + tile, 1u);
    }
    sync();
    bool const last = *flag == uint32_t(args.split_k - 1);
    sync();  // the flag may be written again
    if (!last) {
      return false;
    }
    if (thread == 0) {
      args.ptr_counter[tile] = 0;
    }
    __threadfence();
    constexpr int Batch = Fragments < 4 ? Fragments : 4;  // loads in flight a thread, bounded by its registers
    static_for<(Fragments + Batch - 1) / Batch>([&](auto first) {
#pragma unroll 1
      for (int32_t s = 0; s < args.split_k; ++s) {
        float4 y[Batch];
        static_for<Batch>([&](auto i) { y[i] = __ldcg(at(s, first * Batch + i)); });
        static_for<Batch>([&](auto i) {
          float (&x)[4] = accumulators[first * Batch + i];
          x[0] = s == 0 ? y[i].x : x[0] + y[i].x;
          x[1] = s == 0 ? y[i].y : x[1] + y[i].y;
          x[2] = s == 0 ? y[i].z : x[2] + y[i].z;
          x[3] = s == 0 ? y[i].w : x[3] + y[i].w;
        });
      }
    });
    return true;
  }
};

}  // namespace humming_cutlass::epilogue
