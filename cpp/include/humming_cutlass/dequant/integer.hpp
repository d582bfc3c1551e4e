/// Integers: the subnormal fma.
///
/// A masked field at bit p of a 16-bit float *is* the number q * 2^(p - S), S = 24 (binary16) or 133 (bfloat16), and stays
/// so while the field reaches no further than the lowest exponent bit, because the border between subnormals and
/// normals is continuous. One packed fma by 2^(S - p + Exponent) and -zero * 2^Exponent gives (q - zero) * 2^Exponent
/// exactly. The multiplier must be finite, which sets Exponent.
#pragma once

#include "humming_cutlass/dequant/dequantizer.hpp"

namespace humming_cutlass {

/// Shared by `Int` and `UInt`: both store an unsigned code.
template <int Bits_, class Operand>
struct IntegerDequantizer {
  using Atom = PackedAtom<Bits_, 16>;
  static constexpr int Bits = Bits_;
  static constexpr int Subnormal = Operand::Bias - 1 + Operand::MantissaBits;  ///< S: one unit is 2^-S
  static constexpr int MaxExponent = (1 << Operand::ExponentBits) - 2 - Operand::Bias;
  static constexpr int Exponent = MaxExponent - Subnormal;
  static constexpr int LinearBits = Operand::MantissaBits + 1;  ///< fields that end here are linear
  static constexpr bool TakesZero = true;

  /// Bit at which field F is brought to rest. Fields of one word share a shift as long as they stay linear.
  static constexpr int position(int f) {
    Field const field = Atom::field(f);
    if (field.count > 1) {
      return 0;
    }
    int shift = 0;
    for (int bit = 0; bit <= field.segment[0].bit; bit += Bits) {
      if (bit + Bits - shift > LinearBits) {
        shift = bit;
      }
    }
    return field.segment[0].bit - shift;
  }

  /// Distinct resting places, and the exponent that undoes each: value = raw * 2^multiplier_exponent - zero.
  static constexpr int Multipliers = LinearBits / Bits;
  static constexpr int multiplier(int f) { return position(f) / Bits; }
  static constexpr int multiplier_exponent(int i) { return Subnormal - i * Bits; }

  template <int F>
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t raw(uint32_t const (&words)[Bits]) {
    return extract<Atom, F, 0, Bits, position(F)>(words);
  }

  template <int F>
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t convert(uint32_t const (&words)[Bits], uint32_t minus_zero) {
    constexpr uint32_t scale = power_of_two_pair<Operand>(multiplier_exponent(multiplier(F)) + Exponent);
    return fma_pair<Operand>(raw<F>(words), scale, minus_zero);
  }
};

/// Two's complement, stored with its sign bit flipped: code + 2^(B-1).
template <int B, class Operand>
struct Dequantizer<Int<B>, Operand> : IntegerDequantizer<B, Operand> {
  static constexpr int Center = 1 << (B - 1);
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t store(uint32_t code) { return code ^ (1u << (B - 1)); }
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t load(uint32_t stored) { return stored ^ (1u << (B - 1)); }
};

template <int B, class Operand>
struct Dequantizer<UInt<B>, Operand> : IntegerDequantizer<B, Operand> {
  static constexpr int Center = 0;
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t store(uint32_t code) { return code; }
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t load(uint32_t stored) { return stored; }
};

}  // namespace humming_cutlass
