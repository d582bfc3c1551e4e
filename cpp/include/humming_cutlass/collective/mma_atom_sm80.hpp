/// The mma.sync atom of an activation type.
#pragma once

#include <cute/arch/mma_sm80.hpp>

#include "humming_cutlass/numeric/types.hpp"

namespace humming_cutlass::collective {

template <class ElementA>
struct MmaAtom;
template <>
struct MmaAtom<Half> : cute::SM80_16x8x16_F32F16F16F32_TN {};
template <>
struct MmaAtom<BFloat16> : cute::SM80_16x8x16_F32BF16BF16F32_TN {};

/// d += a * b: `a` four registers of weights (16 x 16), `b0` and `b1` of activations (16 x 8).
template <class ElementA>
__device__ __forceinline__ void mma_sync(float (&d)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  MmaAtom<ElementA>::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]);
}

}  // namespace humming_cutlass::collective
