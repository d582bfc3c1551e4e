/// Stream-k: a CTA that stops inside the k range of an output tile leaves its fp32 sums in the workspace; the one that
/// reaches the end of the tile adds to its own those of all before it, which is a fixed order.
#pragma once

#include "humming_cutlass/device/arguments.hpp"
#include "humming_cutlass/numeric/static_for.hpp"

namespace humming_cutlass::epilogue {

/// `Fragments` accumulator fragments of four floats in each of `Threads` threads. The workspace has a tile and a flag,
/// zero before and after every launch, for each CTA of the grid.
template <int Fragments, int Threads>
struct StreamK {
  using Accumulator = float[Fragments][4];

  __device__ static float4* at(GemmArguments const& args, int32_t cta, int thread) {
    return reinterpret_cast<float4*>(args.ptr_partial) + int64_t(cta) * (Fragments * Threads) + thread;
  }

  /// Leaves the sums for the CTA that finishes the tile. `thread` counts the threads that take part, `sync` is their
  /// barrier.
  template <class Sync>
  __device__ static void leave(GemmArguments const& args, int thread, Accumulator const& accumulators, Sync&& sync) {
    float4* const target = at(args, int32_t(blockIdx.x), thread);
    static_for<Fragments>([&](auto f) {
      float const(&x)[4] = accumulators[f];
      __stcg(target + f * Threads, make_float4(x[0], x[1], x[2], x[3]));
    });
    __threadfence();
    sync();
    if (thread == 0) {
      asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(args.ptr_counter + blockIdx.x) : "memory");
    }
  }

  /// Adds what the CTAs from `first` up to this one have left, and takes their flags back.
  template <class Sync>
  __device__ static void collect(GemmArguments const& args, int thread, int32_t first, Accumulator& accumulators,
                                 Sync&& sync) {
    auto const cta = int32_t(blockIdx.x);
    for (int32_t source = first + thread; source < cta; source += Threads) {
      uint32_t* const flag = args.ptr_counter + source;
      uint32_t left = 0;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(left) : "l"(flag) : "memory");
      } while (left == 0);
      *flag = 0;
    }
    sync();
    constexpr int Batch = Fragments < 4 ? Fragments : 4;  // loads in flight a thread, bounded by its registers
    static_for<Fragments / Batch>([&](auto b) {
#pragma unroll 1
      for (int32_t source = first; source < cta; ++source) {
        float4 y[Batch];
        static_for<Batch>([&](auto i) { y[i] = __ldcg(at(args, source, thread) + (b * Batch + i) * Threads); });
        static_for<Batch>([&](auto i) {
          float (&x)[4] = accumulators[b * Batch + i];
          x[0] += y[i].x, x[1] += y[i].y, x[2] += y[i].z, x[3] += y[i].w;
        });
      }
    });
  }
};

}  // namespace humming_cutlass::epilogue
