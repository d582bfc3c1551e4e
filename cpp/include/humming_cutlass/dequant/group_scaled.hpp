/// Dequantization with a group scale folded in: operand = (value - zero) * scale * 2^Exponent, rounded once.
///
/// For mainloops whose accumulators are too many to keep a second set, as `promote` of the SM80 mainloop does. Two forms:
///
///   - fused: the fma that converts takes scale * 2^e as its multiplier, so the scale is free. In bfloat16, whose exponents
///     have the room, for weights without integer zero points (the product zero * scale would be rounded as well);
///   - classic: the exact conversion, then one multiplication.
///
/// A scale must be exact in the operand type and inside the range that support.scale_range states.
#pragma once

#include "humming_cutlass/dequant/code_book.hpp"
#include "humming_cutlass/dequant/floating.hpp"
#include "humming_cutlass/dequant/integer.hpp"

namespace humming_cutlass {

template <class Element, class Operand, bool HasIntegerZero>
struct GroupScaledDequantizer {
  using Base = Dequantizer<Element, Operand>;
  using Atom = typename Base::Atom;
  static constexpr int Bits = Base::Bits;

  static constexpr bool Fused =
      Operand::ExponentBits == 8 && !HasIntegerZero && Base::Multipliers >= 1 && Base::Multipliers <= 4;

  /// Scales up to 2^MaxScaleExponent keep the multiplier finite.
  static constexpr int MaxScaleExponent = Fused ? 11 : 3;

  /// ceil(log2(largest magnitude)) of the weight type.
  static constexpr int ValueExponent = [] {
    if constexpr (is_float<Element>) {
      return (1 << Element::ExponentBits) - Element::Bias;
    } else if constexpr (is_code_book<Element>) {
      return code_book_exponent<Element>();
    } else {
      return Bits;
    }
  }();

  /// operand = (value - zero) * scale * 2^Exponent. In binary16 the exponent is as high as the largest product and the
  /// multiplier allow, to keep small scales out of the subnormals.
  static constexpr int Exponent = [] {
    if constexpr (Fused) {
      return Base::Exponent - MaxScaleExponent;
    } else if constexpr (Operand::ExponentBits == 8) {
      return 0;
    } else {
      constexpr int product = 15 - MaxScaleExponent - ValueExponent;
      constexpr int multiplier = 15 - MaxScaleExponent + Base::Exponent;
      return product < multiplier ? product : multiplier;
    }
  }();

  HUMMING_CUTLASS_HOST_DEVICE static float two_to(int exponent) {
    return bit_cast<float>(uint32_t(127 + exponent) << 23);
  }

  /// What a lane keeps of one row's scale and zero point.
  struct Registers {
    uint32_t multiplier[Fused ? Base::Multipliers : 1];
    uint32_t minus_zero;
  };

  /// `zero` counts only with integer zero points.
  HUMMING_CUTLASS_HOST_DEVICE static Registers prepare(float scale, float zero) {
    Registers registers;
    if constexpr (Fused) {
      static_for<Base::Multipliers>([&](auto i) {
        registers.multiplier[i] = broadcast_pair<Operand>(scale * two_to(Base::multiplier_exponent(i) + Exponent));
      });
      registers.minus_zero = broadcast_pair<Operand>(-float(Base::Center) * scale * two_to(Exponent));
    } else {
      registers.multiplier[0] = broadcast_pair<Operand>(scale * two_to(Exponent - Base::Exponent));
      registers.minus_zero =
          broadcast_pair<Operand>(-(HasIntegerZero ? zero : float(Base::Center)) * two_to(Base::Exponent));
    }
    return registers;
  }

  template <int F>
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t convert(uint32_t const (&words)[Bits], Registers const& registers) {
    if constexpr (Fused) {
      return fma_pair<Operand>(Base::template raw<F>(words), registers.multiplier[Base::multiplier(F)],
                               registers.minus_zero);
    } else {
      constexpr uint32_t minus_zero = 0x80008000u;
      return fma_pair<Operand>(Base::template convert<F>(words, registers.minus_zero), registers.multiplier[0],
                               minus_zero);
    }
  }
};

/// The same interface without group scales: the exact conversion, with a zero point where there is one.
template <class Element, class Operand, bool HasIntegerZero>
struct UnscaledDequantizer {
  using Base = Dequantizer<Element, Operand>;
  using Atom = typename Base::Atom;
  static constexpr int Bits = Base::Bits;
  static constexpr int Exponent = Base::Exponent;

  struct Registers {
    uint32_t minus_zero;
  };

  HUMMING_CUTLASS_HOST_DEVICE static Registers prepare(float, float zero) {
    float const subtracted = HasIntegerZero ? zero : float(Base::Center);
    return {broadcast_pair<Operand>(-subtracted * bit_cast<float>(uint32_t(127 + Exponent) << 23))};
  }

  template <int F>
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t convert(uint32_t const (&words)[Bits], Registers const& registers) {
    return Base::template convert<F>(words, registers.minus_zero);
  }
};

}  // namespace humming_cutlass
