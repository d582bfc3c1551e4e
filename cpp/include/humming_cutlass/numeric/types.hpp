/// Element types as tags. A tag says how the bits of a code are read; it holds no value.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HUMMING_CUTLASS_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HUMMING_CUTLASS_HOST_DEVICE inline
#endif

namespace humming_cutlass {

/// Two's complement integer of `B` bits.
template <int B>
struct Int {
  static_assert(B >= 1 && B <= 8, "Int<B>: choose 1 to 8 bits");
  static constexpr int Bits = B;
};

/// Unsigned integer of `B` bits, used with a zero point.
template <int B>
struct UInt {
  static_assert(B >= 1 && B <= 8, "UInt<B>: choose 1 to 8 bits");
  static constexpr int Bits = B;
};

/// Sign, `X` exponent bits, `Y` mantissa bits; bias 2^(X-1) - 1; subnormals; every code finite.
template <int X, int Y>
struct Float {
  static_assert(X >= 1 && Y >= 0 && 1 + X + Y <= 8, "Float<X, Y>: choose X >= 1 and 1 + X + Y <= 8");
  static constexpr int Bits = 1 + X + Y;
  static constexpr int ExponentBits = X;
  static constexpr int MantissaBits = Y;
  static constexpr int Bias = (1 << (X - 1)) - 1;
  static constexpr bool AllFinite = true;
};

/// OCP E4M3 ("fn"): magnitude 0x7F is NaN. Packed weights hold finite codes only.
struct Float8E4M3 : Float<4, 3> {
  static constexpr bool AllFinite = false;
};

/// OCP E5M2: IEEE-like infinities and NaN. Packed weights hold finite codes only.
struct Float8E5M2 : Float<5, 2> {
  static constexpr bool AllFinite = false;
};

/// A power of two, 2^(code - 127); code 255 is NaN. A scale, never a weight.
struct Float8E8M0 {
  static constexpr int Bits = 8;
};

/// The 16-entry code book of QLoRA; see dequant/code_book.hpp.
struct NF4 {
  static constexpr int Bits = 4;
};

/// IEEE binary16.
struct Half {
  static constexpr int Bits = 16;
  static constexpr int ExponentBits = 5;
  static constexpr int MantissaBits = 10;
  static constexpr int Bias = 15;
};

/// The upper half of IEEE binary32.
struct BFloat16 {
  static constexpr int Bits = 16;
  static constexpr int ExponentBits = 8;
  static constexpr int MantissaBits = 7;
  static constexpr int Bias = 127;
};

/// ElementZero of a weight without zero points.
struct NoZero {};

/// ElementZero of integer zero points, 0 .. 2^Bits, stored as binary16 and subtracted exactly.
struct IntegerZero {};

template <class Element>
inline constexpr bool is_float = false;
template <int X, int Y>
inline constexpr bool is_float<Float<X, Y>> = true;
template <>
inline constexpr bool is_float<Float8E4M3> = true;
template <>
inline constexpr bool is_float<Float8E5M2> = true;

template <class Element>
inline constexpr bool is_code_book = false;
template <>
inline constexpr bool is_code_book<NF4> = true;

}  // namespace humming_cutlass
