/// The wgmma atoms with operand A in registers, by activation type and token count, and their shared-memory descriptor.
#pragma once

#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>

#include <utility>

#include "humming_cutlass/numeric/types.hpp"

namespace humming_cutlass::collective {

/// `type` is the CuTe atom m64 x Tokens x k16.
template <class ElementA, int Tokens>
struct GmmaAtom;

namespace gmma = cute::SM90::GMMA;
template <>
struct GmmaAtom<Half, 8> {
  using type = gmma::MMA_64x8x16_F32F16F16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct GmmaAtom<Half, 16> {
  using type = gmma::MMA_64x16x16_F32F16F16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct GmmaAtom<Half, 32> {
  using type = gmma::MMA_64x32x16_F32F16F16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct GmmaAtom<Half, 64> {
  using type = gmma::MMA_64x64x16_F32F16F16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct GmmaAtom<Half, 128> {
  using type = gmma::MMA_64x128x16_F32F16F16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct GmmaAtom<Half, 256> {
  using type = gmma::MMA_64x256x16_F32F16F16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct GmmaAtom<BFloat16, 8> {
  using type = gmma::MMA_64x8x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct GmmaAtom<BFloat16, 16> {
  using type = gmma::MMA_64x16x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct GmmaAtom<BFloat16, 32> {
  using type = gmma::MMA_64x32x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct GmmaAtom<BFloat16, 64> {
  using type = gmma::MMA_64x64x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct GmmaAtom<BFloat16, 128> {
  using type = gmma::MMA_64x128x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>;
};
template <>
struct GmmaAtom<BFloat16, 256> {
  using type = gmma::MMA_64x256x16_F32BF16BF16_RS<gmma::Major::K, gmma::Major::K>;
};

namespace detail {

template <class Atom, int Fragments, int... I>
__device__ __forceinline__ void gmma_rs(float (&d)[Fragments][4], uint32_t const (&a)[4], uint64_t b,
                                        gmma::ScaleOut scale_d, std::integer_sequence<int, I...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, d[I / 4][I % 4]..., scale_d);
}

}  // namespace detail

/// d (64 rows x Tokens) = a (64 x 16, registers) * b (Tokens x 16, shared memory) + (scale_d ? d : 0), asynchronously.
template <class ElementA, int Fragments>
__device__ __forceinline__ void gmma_rs(float (&d)[Fragments][4], uint32_t const (&a)[4], uint64_t b,
                                        gmma::ScaleOut scale_d) {
  using Atom = typename GmmaAtom<ElementA, Fragments * 8>::type;
  detail::gmma_rs<Atom>(d, a, b, scale_d, std::make_integer_sequence<int, Fragments * 4>{});
}

/// Descriptor of a K-major operand with 128-byte rows and 128-byte swizzle, as TMA writes it; 8-row groups lie 1024 bytes
/// apart. Advancing by k16 adds 32 bytes, 2 in units of the address field.
__device__ __forceinline__ uint64_t gmma_descriptor(void const* smem) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.layout_type_ = 1;
  descriptor.bitfield.start_address_ = uint16_t(cute::cast_smem_ptr_to_uint(smem) >> 4);
  descriptor.bitfield.leading_byte_offset_ = 1;
  descriptor.bitfield.stride_byte_offset_ = 1024 >> 4;
  descriptor.bitfield.base_offset_ = 0;
  return descriptor.desc_;
}

}  // namespace humming_cutlass::collective
