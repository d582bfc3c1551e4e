/// Small floats: sign and magnitude moved to their places in the operand, then one multiplication by the power of two
/// between the two biases. Subnormal codes are subnormal operands before it and need no case of their own.
#pragma once

#include "humming_cutlass/dequant/dequantizer.hpp"

namespace humming_cutlass {

template <class Element, class Operand>
struct FloatDequantizer {
  using Atom = PackedAtom<Element::Bits, 16>;
  static constexpr int Bits = Element::Bits;
  static constexpr int Rebias = Operand::Bias - Element::Bias;
  /// The top exponent of such a type is a number, where the operand has infinities: take the way through binary32 and
  /// halve.
  static constexpr bool TopExponentIsFinite = Element::ExponentBits == Operand::ExponentBits && Element::AllFinite;
  static constexpr int Exponent = TopExponentIsFinite ? -1 : 0;
  static constexpr int Center = 0;
  static constexpr bool TakesZero = false;

  static_assert(Element::ExponentBits <= Operand::ExponentBits && Element::MantissaBits <= Operand::MantissaBits,
                "Dequantizer: the operand type must have at least the weight's exponent and mantissa bits");

  HUMMING_CUTLASS_HOST_DEVICE static uint32_t store(uint32_t code) { return code; }
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t load(uint32_t stored) { return stored; }

  /// Sign at bit 15 and magnitude at the exponent's and mantissa's place of a 16-bit float with `MantissaBits`.
  template <int F, int MantissaBits>
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t place(uint32_t const (&words)[Bits]) {
    return extract<Atom, F, Bits - 1, 1, 15>(words) |
           extract<Atom, F, 0, Bits - 1, MantissaBits - Element::MantissaBits>(words);
  }

  static constexpr int Multipliers = 1;
  static constexpr int multiplier(int) { return 0; }
  static constexpr int multiplier_exponent(int) { return Rebias; }

  template <int F>
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t raw(uint32_t const (&words)[Bits]) {
    return place<F, Operand::MantissaBits>(words);
  }

  template <int F>
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t convert(uint32_t const (&words)[Bits], uint32_t) {
    if constexpr (TopExponentIsFinite) {
      uint32_t const raw = place<F, BFloat16::MantissaBits>(words);  // the upper half of a binary32
      float const rebias = bit_cast<float>(uint32_t(254 - Element::Bias + Exponent) << 23);
      return round_pair<Operand>(bit_cast<float>(raw << 16) * rebias, bit_cast<float>(raw & 0xFFFF0000u) * rebias);
    } else if constexpr (Rebias == 0) {
      return raw<F>(words);
    } else {
      constexpr uint32_t minus_zero = 0x80008000u;  // keeps the sign of a zero
      return fma_pair<Operand>(raw<F>(words), power_of_two_pair<Operand>(Rebias), minus_zero);
    }
  }
};

template <int X, int Y, class Operand>
struct Dequantizer<Float<X, Y>, Operand> : FloatDequantizer<Float<X, Y>, Operand> {};

template <class Operand>
struct Dequantizer<Float8E4M3, Operand> : FloatDequantizer<Float8E4M3, Operand> {};

template <class Operand>
struct Dequantizer<Float8E5M2, Operand> : FloatDequantizer<Float8E5M2, Operand> {};

}  // namespace humming_cutlass
