/// Split-k inside a cluster: the CTAs of an output tile are one cluster, leave their fp32 sums in their own shared memory,
/// and each adds its share of the tile over all of them, in the order of k.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "humming_cutlass/numeric/static_for.hpp"

namespace humming_cutlass::epilogue {

/// `Chunks` parts of a tile, each of `ChunkFragments` accumulator fragments of four floats in each of `Threads` threads.
/// Chunk c is the share of CTA c % size of the cluster.
template <int Chunks, int ChunkFragments, int Threads>
struct ClusterSplitK {
  using Accumulator = float[Chunks * ChunkFragments][4];
  static constexpr int BufferBytes = Chunks * ChunkFragments * Threads * 16;
  static constexpr int MaxShare = (Chunks + 1) / 2;  ///< chunks of a CTA in a cluster of two

  /// Leaves the sums of this CTA's chunks first, first + size, ... in `accumulators[0 ...]`.
  ///
  /// `thread` counts the threads that take part, `sync` is their barrier; `buffer` is shared memory that nothing else uses
  /// once they have passed it. A CTA must not end before all of its cluster are done with their sums.
  template <class Sync>
  __device__ static void reduce(float4* buffer, int thread, Accumulator& accumulators, Sync&& sync) {
    sync();
    static_for<Chunks * ChunkFragments>([&](auto f) {
      float const(&x)[4] = accumulators[f];
      buffer[f * Threads + thread] = make_float4(x[0], x[1], x[2], x[3]);
    });
    // The barrier of the CTA's threads orders their stores to shared memory, which is all that the others read: the arrival
    // needs no release, whose fence would wait for global memory.
    sync();
    asm volatile("" ::: "memory");
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
    int const size = int(cute::cluster_shape().x);
    int const first = int(cute::block_rank_in_cluster());
    static_for<MaxShare * ChunkFragments>([&](auto f) { static_for<4>([&](auto i) { accumulators[f][i] = 0.f; }); });
    uint32_t const local = cute::cast_smem_ptr_to_uint(buffer + thread);
#pragma unroll 1
    for (int source = 0; source < size; ++source) {
      uint32_t const remote = cute::set_block_rank(local, uint32_t(source));
      float4 y[MaxShare * ChunkFragments];
      static_for<MaxShare * ChunkFragments>([&](auto f) {
        int const chunk = first + f / ChunkFragments * size;
        y[f] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (chunk < Chunks) {
          int const fragment = chunk * ChunkFragments + f % ChunkFragments;
          asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                       : "=f"(y[f].x), "=f"(y[f].y), "=f"(y[f].z), "=f"(y[f].w)
                       : "r"(remote + fragment * (Threads * 16)));
        }
      });
      static_for<MaxShare * ChunkFragments>([&](auto f) {
        float (&x)[4] = accumulators[f];
        x[0] += y[f].x, x[1] += y[f].y, x[2] += y[f].z, x[3] += y[f].w;
      });
    }
  }
};

}  // namespace humming_cutlass::epilogue
