/// Packing of a weight on a device; see kernel/pack.hpp.
#pragma once

#include <cstdint>

#include "kernel.hpp"

namespace humming_cutlass {

/// Puts the packing of codes (n, k) on `stream`: one launch, no synchronization. Pointers are device pointers, `packed`
/// has room for ceil(n/16) * ceil(k/64) * 32 * bits words.
void launch_pack(Kernel& kernel, int device, uint8_t const* codes, uint32_t* packed, int64_t n, int64_t k,
                 driver::Stream stream);

}  // namespace humming_cutlass
