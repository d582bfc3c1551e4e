/// Split-k inside a cluster: the CTAs of an output tile are one cluster, leave fp32 sums that others need in their own
/// shared memory, and each adds its share of the tile over all of them, in the order of k (the sum of two has no order).
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "humming_cutlass/numeric/static_for.hpp"

namespace humming_cutlass::epilogue {

/// `Chunks` parts of a tile, each of `ChunkFragments` accumulator fragments of four floats in each of `Threads` threads.
/// Chunk c is the share of CTA c % size of the cluster.
///
/// In a cluster of two a CTA keeps its own sums in registers, and the other's come while chunks are stored: distributed
/// shared memory is slower than all else here.
template <int Chunks, int ChunkFragments, int Threads>
struct ClusterSplitK {
  using Accumulator = float[Chunks * ChunkFragments][4];
  static constexpr int BufferBytes = Chunks * ChunkFragments * Threads * 16;
  static constexpr int MaxShare = (Chunks + 1) / 2;  ///< chunks of a CTA in a cluster of two
  static constexpr int ShareFragments = MaxShare * ChunkFragments;
  /// Chunks of the other CTA that are under way: one where accumulators leave few registers.
  static constexpr int Ahead = MaxShare == 1 || MaxShare > 4 ? 1 : 2;

  bool pending = false;  ///< whether the other CTA's sums have to be added
  bool second = false;   ///< of the two: its chunks are the odd ones
  uint32_t remote = 0;   ///< where the other CTA's sums are
  float others[Ahead][ChunkFragments][4];

  /// Leaves the sums of this CTA's chunks first, first + size, ... in `accumulators[0 ...]`, less what `add` adds.
  ///
  /// `thread` counts the threads that take part, `sync` is their barrier; `buffer` is shared memory that nothing else uses
  /// once they have passed it. A CTA must not end before all of its cluster are done with their sums.
  template <class Sync>
  __device__ void reduce(float4* buffer, int thread, Accumulator& accumulators, Sync&& sync) {
    auto const size = int(cute::cluster_shape().x);
    auto const first = int(cute::block_rank_in_cluster());
    uint32_t const local = cute::cast_smem_ptr_to_uint(buffer + thread);
    pending = size == 2;
    second = first == 1;
    sync();
    if (pending) {
      give_half(buffer + thread, accumulators);
    } else {
      static_for<Chunks * ChunkFragments>([&](auto f) {
        float const(&x)[4] = accumulators[f];
        buffer[f * Threads + thread] = make_float4(x[0], x[1], x[2], x[3]);
      });
    }
    // The barrier of the CTA's threads orders their stores to shared memory, which is all that the others read: the arrival
    // needs no release, whose fence would wait for global memory.
    sync();
    asm volatile("" ::: "memory");
    cute::cluster_arrive_relaxed();
    cute::cluster_wait();
    if (pending) {
      remote = cute::set_block_rank(local, uint32_t(first ^ 1));
      static_for<Ahead>([&](auto c) { load_chunk<c>(); });
    } else {
      add_all(local, size, first, accumulators);
    }
  }

  /// Adds to the sums of this CTA's chunk `Chunk` what is missing; called for its chunks in order.
  template <int Chunk>
  __device__ void add(Accumulator& accumulators) {
    if constexpr (Chunk < MaxShare) {
      if (pending) {
        static_for<ChunkFragments>([&](auto f) {
          static_for<4>([&](auto i) { accumulators[Chunk * ChunkFragments + f][i] += others[Chunk % Ahead][f][i]; });
        });
        if constexpr (Chunk + Ahead < MaxShare) {
          load_chunk<Chunk + Ahead>();
        }
      }
    }
  }

 private:
  /// Stores the sums of the other CTA's chunks for it, and moves those of this one's together.
  __device__ void give_half(float4* target, Accumulator& accumulators) const {
    static_for<ShareFragments>([&](auto f) {
      constexpr int even = f / ChunkFragments * 2 * ChunkFragments + f % ChunkFragments;
      constexpr int odd = even + ChunkFragments;
      float (&x)[4] = accumulators[even];
      if constexpr (odd < Chunks * ChunkFragments) {
        float (&y)[4] = accumulators[odd];
        target[f * Threads] = second ? make_float4(x[0], x[1], x[2], x[3]) : make_float4(y[0], y[1], y[2], y[3]);
        static_for<4>([&](auto i) { accumulators[f][i] = second ? y[i] : x[i]; });
      } else {
        target[f * Threads] = make_float4(x[0], x[1], x[2], x[3]);
        static_for<4>([&](auto i) { accumulators[f][i] = x[i]; });
      }
    });
  }

  /// Starts the loads of this CTA's chunk `Chunk`, if there is one: what is not added is not waited for either, and the
  /// other CTA could end before the loads do.
  template <int Chunk>
  __device__ void load_chunk() {
    if constexpr (2 * Chunk + 1 >= Chunks) {
      if (second) {
        return;
      }
    }
    static_for<ChunkFragments>(
        [&](auto f) { load(remote + (Chunk * ChunkFragments + f) * (Threads * 16), others[Chunk % Ahead][f]); });
  }

  /// accumulators = the sums of all `size` CTAs of this one's chunks.
  __device__ static void add_all(uint32_t local, int size, int first, Accumulator& accumulators) {
    static_for<ShareFragments>([&](auto f) { static_for<4>([&](auto i) { accumulators[f][i] = 0.f; }); });
#pragma unroll 1
    for (int source = 0; source < size; ++source) {
      uint32_t const address = cute::set_block_rank(local, uint32_t(source));
      float y[ShareFragments][4];
      static_for<ShareFragments>([&](auto f) {
        int const chunk = first + f / ChunkFragments * size;
        static_for<4>([&](auto i) { y[f][i] = 0.f; });
        if (chunk < Chunks) {
          load(address + (chunk * ChunkFragments + f % ChunkFragments) * (Threads * 16), y[f]);
        }
      });
      static_for<ShareFragments>([&](auto f) { static_for<4>([&](auto i) { accumulators[f][i] += y[f][i]; }); });
    }
  }

  /// Reads four floats of a CTA of the cluster.
  __device__ static void load(uint32_t address, float (&x)[4]) {
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(address));
  }
};

}  // namespace humming_cutlass::epilogue
