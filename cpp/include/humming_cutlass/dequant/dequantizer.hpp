/// The dequantizer contract, and the bit extraction that every family shares.
///
/// A dequantizer turns the packed words of a lane into MMA operand registers, exactly. It is a type, selected by
/// (weight element, operand element), with
///
///   - `using Atom`                 the packed layout it reads;
///   - `static constexpr int Exponent`   operand = value * 2^Exponent; the epilogue takes the factor out;
///   - `static constexpr int Center`     what `convert` subtracts from an unsigned code when no zero point is given;
///   - `static constexpr bool TakesZero` whether `convert` uses its `minus_zero` argument;
///   - `static uint32_t store(uint32_t code)` and `load`: between the user's code and the stored one, both ways;
///   - `template <int F> static uint32_t convert(words, minus_zero)`: register F of the lane, F = 4 * k_step + register;
///     `minus_zero` is the pair -zero * 2^Exponent in the operand type (ignored unless TakesZero);
///   - `Multipliers`, `multiplier(f)`, `multiplier_exponent(i)` and `raw<F>(words)`, where conversion is one packed fma:
///     value = raw<F> * 2^multiplier_exponent(multiplier(F)) - zero. `Multipliers` is 0 where it is not.
///
/// A new weight type adds a tag, a specialization of this contract in its family's file, a name on the host and a row in
/// dtypes.py (docs/extending.md); no kernel changes.
#pragma once

#include "humming_cutlass/layout/packed_atom.hpp"
#include "humming_cutlass/numeric/arithmetic.hpp"

namespace humming_cutlass {

template <class Element, class Operand>
struct Dequantizer;

/// Shifts right by a signed distance.
template <int Distance>
HUMMING_CUTLASS_HOST_DEVICE uint32_t shift_right(uint32_t x) {
  if constexpr (Distance > 0) {
    return x >> Distance;
  } else {
    return x << -Distance;
  }
}

namespace detail {

template <class Atom, int F, int Low, int Width, int Position, int S>
HUMMING_CUTLASS_HOST_DEVICE uint32_t extract_segments(uint32_t const (&words)[Atom::WordsPerLane]) {
  constexpr Field field = Atom::field(F);
  constexpr Segment segment = field.segment[S];
  constexpr int begin = segment.field_bit > Low ? segment.field_bit : Low;
  constexpr int segment_end = segment.field_bit + segment.width;
  constexpr int end = segment_end < Low + Width ? segment_end : Low + Width;
  uint32_t bits = 0;
  if constexpr (begin < end) {
    constexpr int source = segment.bit + begin - segment.field_bit;
    constexpr int target = Position + begin - Low;
    constexpr uint32_t mask = Atom::replicate(((1u << (end - begin)) - 1) << target);
    bits = shift_right<source - target>(words[segment.word]) & mask;
  }
  if constexpr (S + 1 < field.count) {
    bits |= extract_segments<Atom, F, Low, Width, Position, S + 1>(words);
  }
  return bits;
}

}  // namespace detail

/// Bits [Low, Low + Width) of field F at bit `Position` of every slot, zeros elsewhere.
template <class Atom, int F, int Low, int Width, int Position>
HUMMING_CUTLASS_HOST_DEVICE uint32_t extract(uint32_t const (&words)[Atom::WordsPerLane]) {
  return detail::extract_segments<Atom, F, Low, Width, Position, 0>(words);
}

}  // namespace humming_cutlass
