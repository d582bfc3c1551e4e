/// Code books of 16 entries: two byte-permute look-ups per byte of the operand and a select.
///
/// An entry is rounded once to the operand type, here, at compile time; nothing else is lost. To add a code book, follow
/// docs/extending.md: its tag, its entries and its dequantizer as below, its name on the host, its row in dtypes.py.
#pragma once

#include "humming_cutlass/dequant/dequantizer.hpp"

namespace humming_cutlass {

/// Bits of a 16-bit float nearest to `value` (ties to even), |value| normal or 0 in that type.
template <class Operand>
constexpr uint32_t nearest_bits(double value) {
  if (value == 0) {
    return 0;
  }
  uint32_t const sign = value < 0 ? 0x8000u : 0u;
  double magnitude = value < 0 ? -value : value;
  int exponent = 0;
  for (; magnitude >= 2; magnitude /= 2) {
    ++exponent;
  }
  for (; magnitude < 1; magnitude *= 2) {
    --exponent;
  }
  double const scaled = magnitude * (1 << Operand::MantissaBits);
  uint32_t significand = uint32_t(scaled);
  double const rest = scaled - significand;
  if (rest > 0.5 || (rest == 0.5 && (significand & 1u))) {
    ++significand;  // a carry into the exponent is right as it stands
  }
  return sign | ((uint32_t(exponent + Operand::Bias - 1) << Operand::MantissaBits) + significand);
}

/// The entries of a code book, in the order of its codes.
template <class Element>
struct CodeBook;

template <>
struct CodeBook<NF4> {
  static constexpr double Entry[16] = {
      -1.0,
      -0.6961928009986877,
      -0.5250730514526367,
      -0.39491748809814453,
      -0.28444138169288635,
      -0.18477343022823334,
      -0.09105003625154495,
      0.0,
      0.07958029955625534,
      0.16093020141124725,
      0.24611230194568634,
      0.33791524171829224,
      0.44070982933044434,
      0.5626170039176941,
      0.7229568362236023,
      1.0,
  };
};

/// ceil(log2(largest magnitude)) of a code book.
template <class Element>
constexpr int code_book_exponent() {
  double largest = 0;
  for (double entry : CodeBook<Element>::Entry) {
    double const magnitude = entry < 0 ? -entry : entry;
    largest = magnitude > largest ? magnitude : largest;
  }
  int exponent = 0;
  for (; largest > 1; largest /= 2) {
    ++exponent;
  }
  for (; largest <= 0.5; largest *= 2) {
    --exponent;
  }
  return exponent;
}

template <class Element, class Operand>
struct CodeBookDequantizer {
  using Atom = PackedAtom<4, 16>;
  static constexpr int Bits = 4;
  static constexpr int Exponent = 0;
  static constexpr int Center = 0;
  static constexpr bool TakesZero = false;

  static constexpr int Multipliers = 0;  ///< a scale cannot be folded into a look-up

  HUMMING_CUTLASS_HOST_DEVICE static uint32_t store(uint32_t code) { return code; }
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t load(uint32_t stored) { return stored; }

  /// Byte `byte` (0 low, 1 high) of entries 4 * quarter .. 4 * quarter + 3.
  static constexpr uint32_t table(int byte, int quarter) {
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) {
      word |= ((nearest_bits<Operand>(CodeBook<Element>::Entry[4 * quarter + i]) >> (8 * byte)) & 0xFFu) << (8 * i);
    }
    return word;
  }

  template <int F>
  HUMMING_CUTLASS_HOST_DEVICE static uint32_t convert(uint32_t const (&words)[Bits], uint32_t) {
    constexpr uint32_t low_a = table(0, 0), low_b = table(0, 1), low_c = table(0, 2), low_d = table(0, 3);
    constexpr uint32_t high_a = table(1, 0), high_b = table(1, 1), high_c = table(1, 2), high_d = table(1, 3);
    uint32_t const codes = extract<Atom, F, 0, 4, 0>(words);
    uint32_t const selector = (codes | (codes >> 12)) & 0x77u;  // the two codes' low three bits, a nibble each
    constexpr uint32_t interleave = 0x5140;                     // low 0, high 0, low 1, high 1
    uint32_t const lower =
        permute_bytes(permute_bytes(low_a, low_b, selector), permute_bytes(high_a, high_b, selector), interleave);
    uint32_t const upper =
        permute_bytes(permute_bytes(low_c, low_d, selector), permute_bytes(high_c, high_d, selector), interleave);
    uint32_t const in_upper = ((codes >> 3) & 0x00010001u) * 0xFFFFu;
    return (upper & in_upper) | (lower & ~in_upper);
  }
};

template <class Operand>
struct Dequantizer<NF4, Operand> : CodeBookDequantizer<NF4, Operand> {};

}  // namespace humming_cutlass
