/// Device entry point of the SM90 GEMM: persistent CTAs, one or two producer threads, one to four consumer warpgroups.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include "humming_cutlass/collective/mma_sm90_tma_gmma_rs_warpspecialized.hpp"
#include "humming_cutlass/epilogue/cluster_split_k.hpp"
#include "humming_cutlass/epilogue/linear_sm90.hpp"
#include "humming_cutlass/epilogue/stream_k.hpp"

namespace humming_cutlass::kernel {

template <class Config>
struct GemmSm90 {
  using Mainloop = collective::MmaSm90TmaGmmaRsWarpSpecialized<Config>;
  using Epilogue = epilogue::LinearSm90<Mainloop, typename Config::ElementD>;
  using Reduction = epilogue::ClusterSplitK<Epilogue::Chunks, Epilogue::ChunkFragments, Mainloop::ConsumerThreads>;
  using StreamK = epilogue::StreamK<Mainloop::Fragments, Mainloop::ConsumerThreads>;
  using TileShape = typename Config::TileShape;

  struct SharedStorage {
    typename Mainloop::SharedStorage mainloop;
    typename Epilogue::SharedStorage epilogue;
  };

  static constexpr int Threads = Mainloop::ConsumerThreads + 128;
  static constexpr int SmemBytes = int(sizeof(SharedStorage));
  static_assert(Reduction::BufferBytes == Mainloop::BytesSums, "GemmSm90: the partial sums have another size");
  static_assert(SmemBytes <= 227 * 1024, "GemmSm90: more shared memory than SM90 has; choose fewer stages");

  /// Registers a thread, after the producer has given up most of its own.
  static constexpr int ProducerRegisters = Mainloop::Warpgroups >= 3 ? 32 : 40;
  static constexpr int ConsumerRegisters = Mainloop::Warpgroups == 4   ? 112
                                           : Mainloop::Warpgroups == 3 ? 160
                                           : Mainloop::Warpgroups == 2 ? 232
                                                                       : 240;

  static constexpr KernelTraits traits() {
    KernelTraits traits{kKernelTraitsVersion, Threads, SmemBytes, TileShape::M, TileShape::N, TileShape::K};
    traits.persistent = 1;
    traits.cluster_size = Mainloop::MaxSharing;
    traits.cluster_split_k = 1;
    traits.dependent_launch = 1;
    traits.box_m = Mainloop::BoxTokens;
    traits.box_n = Mainloop::AtomRows;
    traits.box_b = Mainloop::BoxColumns * Mainloop::BytesAtom / 8;
    traits.box_scale = Mainloop::Groups::TileGroups * Mainloop::BytesGroupScale / 8;
    traits.box_zero = Mainloop::Groups::TileGroups * Mainloop::BytesGroupZero / 8;
    return traits;
  }

  __device__ static void run(GemmArguments const& args, TensorMaps const& maps, uint8_t* smem) {
    auto& shared = *reinterpret_cast<SharedStorage*>(smem);
    int const warpgroup = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
    arch::launch_dependent_grids();
    int const sharing = Mainloop::Scheduler::sharing(args);
    if (warpgroup == Mainloop::Warpgroups) {
      typename Mainloop::Scheduler const scheduler(args);
      typename Mainloop::Position first(scheduler);
      bool const any = first.advance(scheduler);
      Mainloop::prefetch(args, maps, int(threadIdx.x) - Mainloop::ConsumerThreads);
      if (threadIdx.x == Mainloop::ConsumerThreads) {
        Mainloop::initialize(shared.mainloop, sharing);
        if (any) {
          Mainloop::start(maps, shared.mainloop, first);
        }
      }
      wait_for_barriers(sharing);
      cutlass::arch::warpgroup_reg_dealloc<ProducerRegisters>();
      if (threadIdx.x == Mainloop::ConsumerThreads && any) {
        Mainloop::template load<Mainloop::Producers == 1, true>(args, maps, shared.mainloop, scheduler, first);
      } else if (Mainloop::Producers == 2 && threadIdx.x == Mainloop::ConsumerThreads + 32 && any) {
        Mainloop::template load<true, false>(args, maps, shared.mainloop, scheduler, first);
      }
    } else {
      wait_for_barriers(sharing);
      cutlass::arch::warpgroup_reg_alloc<ConsumerRegisters>();
      arch::wait_on_dependent_grids();  // D and the workspace may be another kernel's
      Mainloop::mma(args, shared.mainloop, [&](WorkUnit const& work, typename Mainloop::Accumulator& accumulators) {
        auto const sync = [] { cutlass::arch::NamedBarrier::sync(Mainloop::ConsumerThreads, Mainloop::Warpgroups); };
        if constexpr (Mainloop::MaxSharing == 1) {
          if (args.split_k == 0) {
            typename Mainloop::Scheduler const scheduler(args);
            if (work.k_end < scheduler.k_tiles) {
              StreamK::leave(args, threadIdx.x, accumulators, sync);
              return;
            }
            if (work.k_begin > 0) {
              StreamK::collect(args, threadIdx.x, scheduler.stream_owner(), accumulators, sync);
            }
          }
        }
        Reduction reduction;
        if (work.split_k > 1) {  // the CTA's last unit of work: the stages are free
          reduction.reduce(reinterpret_cast<float4*>(shared.mainloop.stages), threadIdx.x, accumulators, sync);
        }
        Epilogue::store(args, work, accumulators, shared.epilogue,
                        [&](auto chunk) { reduction.template add<chunk>(accumulators); });
      });
      if (args.split_k > 1 || sharing > 1) {  // the others read this CTA's shared memory, or arrive at its barriers
        cute::cluster_arrive_relaxed();
        cute::cluster_wait();
      }
    }
  }

  /// Returns when the barriers of this CTA, and of those that it shares A with, are ready.
  __device__ static void wait_for_barriers(int sharing) {
    __syncthreads();
    if (sharing > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    }
  }
};

}  // namespace humming_cutlass::kernel
