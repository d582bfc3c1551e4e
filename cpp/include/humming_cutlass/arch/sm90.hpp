/// Instructions of SM90 that CuTe has no atom for in the form that is needed here.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/util.hpp>

namespace humming_cutlass::arch {

/// Copies `bytes` (a multiple of 16) from global to shared memory, for data that is read once: L2 evicts it first.
/// Completion is counted in bytes by the transaction barrier.
__device__ __forceinline__ void bulk_copy_evict_first(void const* source, void* target, uint64_t* barrier,
                                                      uint32_t bytes) {
  constexpr auto EvictFirst = uint64_t(cute::TMA::CacheHintSm90::EVICT_FIRST);
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(cute::cast_smem_ptr_to_uint(target)),
      "l"(source), "r"(bytes), "r"(cute::cast_smem_ptr_to_uint(barrier)), "l"(EvictFirst)
      : "memory");
}

/// Lets the next kernel of the stream start, where it was launched with programmatic dependent launch; else nothing.
__device__ __forceinline__ void launch_dependent_grids() {
  asm volatile("griddepcontrol.launch_dependents;");
}

/// Waits until the kernels before this one are complete and their writes visible, where this one was launched with
/// programmatic dependent launch; else nothing. Before it, only what no kernel of the stream writes may be read.
__device__ __forceinline__ void wait_on_dependent_grids() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace humming_cutlass::arch
