/// Arithmetic on pairs of 16-bit floats and conversions of scalars, with host versions that give the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "humming_cutlass/numeric/types.hpp"

namespace humming_cutlass {

/// The bits of a value as another type of the same size.
template <class To, class From>
HUMMING_CUTLASS_HOST_DEVICE To bit_cast(From const& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast: the two types must have the same size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

/// Value of a code of a scale or zero-point type, exact in binary32.
template <class Element>
struct ToFloat;

template <>
struct ToFloat<float> {
  using Storage = float;
  HUMMING_CUTLASS_HOST_DEVICE static float convert(float x) { return x; }
};

template <>
struct ToFloat<BFloat16> {
  using Storage = uint16_t;
  HUMMING_CUTLASS_HOST_DEVICE static float convert(uint16_t x) { return bit_cast<float>(uint32_t(x) << 16); }
};

/// Places sign, exponent and mantissa as a binary32 with the field's own exponent, then multiplies by the power of two
/// between the two biases: subnormals need no case of their own. Infinities and NaN of a type with such codes are not
/// kept (packed scales are finite).
template <int X, int Y>
HUMMING_CUTLASS_HOST_DEVICE float float_from_fields(uint32_t x) {
  uint32_t const sign = (x >> (X + Y)) << 31;
  uint32_t const magnitude = (x & ((1u << (X + Y)) - 1)) << (23 - Y);
  constexpr uint32_t rebias = uint32_t(254 - ((1 << (X - 1)) - 1)) << 23;  // 2^(127 - bias)
  return bit_cast<float>(sign | magnitude) * bit_cast<float>(rebias);
}

template <>
struct ToFloat<Half> {
  using Storage = uint16_t;
  HUMMING_CUTLASS_HOST_DEVICE static float convert(uint16_t x) { return float_from_fields<5, 10>(x); }
};

template <>
struct ToFloat<Float8E4M3> {
  using Storage = uint8_t;
  HUMMING_CUTLASS_HOST_DEVICE static float convert(uint8_t x) { return float_from_fields<4, 3>(x); }
};

template <>
struct ToFloat<Float8E5M2> {
  using Storage = uint8_t;
  HUMMING_CUTLASS_HOST_DEVICE static float convert(uint8_t x) { return float_from_fields<5, 2>(x); }
};

template <>
struct ToFloat<Float8E8M0> {
  using Storage = uint8_t;
  HUMMING_CUTLASS_HOST_DEVICE static float convert(uint8_t x) {
    // Code 0 is 2^-127, a binary32 subnormal.
    return bit_cast<float>(x == 0 ? 0x00400000u : uint32_t(x) << 23);
  }
};

template <>
struct ToFloat<IntegerZero> : ToFloat<Half> {};

/// Rounds a binary32 to nearest even and returns the 16 bits.
template <class Element>
HUMMING_CUTLASS_HOST_DEVICE uint16_t round_to(float x);

template <>
HUMMING_CUTLASS_HOST_DEVICE uint16_t round_to<BFloat16>(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  uint32_t const u = bit_cast<uint32_t>(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) {
    return uint16_t((u >> 16) | 0x40u);
  }
  return uint16_t((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
#endif
}

template <>
HUMMING_CUTLASS_HOST_DEVICE uint16_t round_to<Half>(float x) {
#if defined(__CUDA_ARCH__)
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
#else
  uint32_t const u = bit_cast<uint32_t>(x);
  uint32_t const sign = (u >> 16) & 0x8000u;
  uint32_t const magnitude = u & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) {
    return uint16_t(sign | 0x7E00u);
  }
  if (magnitude >= 0x477FF000u) {  // 65520, halfway between the largest half and 2^16
    return uint16_t(sign | 0x7C00u);
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: let the binary32 adder round at 2^-24
    float const shifted = bit_cast<float>(magnitude) + 0.5f;
    return uint16_t(sign | (bit_cast<uint32_t>(shifted) - 0x3F000000u));
  }
  uint32_t const rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
#endif
}

/// Two equal 16-bit floats in one register.
template <class Element>
HUMMING_CUTLASS_HOST_DEVICE uint32_t broadcast_pair(float x) {
  uint32_t const y = round_to<Element>(x);
  return y | (y << 16);
}

/// Two binary32, rounded to nearest even, packed: `lo` in the low half.
template <class Element>
HUMMING_CUTLASS_HOST_DEVICE uint32_t round_pair(float lo, float hi) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
  if constexpr (Element::ExponentBits == 5) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  }
  return d;
#else
  return uint32_t(round_to<Element>(lo)) | (uint32_t(round_to<Element>(hi)) << 16);
#endif
}

/// a * b + c on pairs, one rounding, subnormals kept. The host version rounds to binary32 on the way, which changes nothing
/// where a * b + c has at most 24 significant bits, as in every conversion: products of 8 and 11 bits, sums on one grid.
template <class Element>
HUMMING_CUTLASS_HOST_DEVICE uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t d;
  if constexpr (Element::ExponentBits == 5) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
#else
  uint32_t d = 0;
  for (int half = 0; half < 2; ++half) {
    auto const value = [half](uint32_t x) { return double(ToFloat<Element>::convert(uint16_t(x >> (16 * half)))); };
    d |= uint32_t(round_to<Element>(float(value(a) * value(b) + value(c)))) << (16 * half);
  }
  return d;
#endif
}

/// Byte permute: byte i of the result is byte `selector[4i+2:4i]` of the eight bytes {a, b}.
HUMMING_CUTLASS_HOST_DEVICE uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, selector);
#else
  uint64_t const bytes = (uint64_t(b) << 32) | a;
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    d |= uint32_t((bytes >> (8 * ((selector >> (4 * i)) & 7u))) & 0xFFu) << (8 * i);
  }
  return d;
#endif
}

/// Bit pattern of 2^exponent in a 16-bit float type, for exponents of normal numbers.
template <class Element>
constexpr uint32_t power_of_two_pair(int exponent) {
  uint32_t const bits = uint32_t(exponent + Element::Bias) << Element::MantissaBits;
  return bits | (bits << 16);
}

}  // namespace humming_cutlass
