/// The packed weight: the single description of its bytes.
///
/// An atom is 16 rows (n) x 64 columns (k): 32 weights for each of 32 lanes, in the order of operand A of the tensor
/// core (`mma.m16n8k16` and its 8- and 4-bit siblings, and each warp's rows of `wgmma.m64`). At `Bits` bits a lane's 32
/// weights fill exactly `Bits` words. Viewed as slots of `OperandBits` bits, the words of one lane form `32/OperandBits`
/// columns of slots; each column holds `OperandBits` *fields* of `Bits` bits, and field f of all columns together is one
/// register of operands, f = 4 * k_step + register:
///
///   - `floor(OperandBits / Bits)` whole fields in each slot of each word, from the low bits up;
///   - the bits left over at the top of the slots, word after word, form the remaining fields.
///
/// So one masked shift of a word yields a whole register of raw operands, for every width.
#pragma once

#include <cstdint>

#include "humming_cutlass/numeric/static_for.hpp"

namespace humming_cutlass {

/// A run of bits of a field inside one word: `width` bits at `bit` of every slot of `word` are the field's bits
/// `field_bit` and up.
struct Segment {
  int word;
  int bit;
  int width;
  int field_bit;
};

/// Where the bits of a field are: one segment for a whole field, several for one made of left-over bits.
struct Field {
  int count;
  Segment segment[8];
};

/// Place of a weight inside an atom.
struct AtomCoordinate {
  int row;     ///< 0 .. 15
  int column;  ///< 0 .. 63
};

template <int Bits_, int OperandBits_ = 16>
struct PackedAtom {
  static_assert(Bits_ >= 1 && Bits_ <= 8, "PackedAtom: weights have 1 to 8 bits");
  static_assert(OperandBits_ == 16 || OperandBits_ == 8 || OperandBits_ == 4,
                "PackedAtom: operands have 16, 8 or 4 bits");
  static_assert(Bits_ <= OperandBits_, "PackedAtom: a weight must not be wider than the operand");

  static constexpr int Bits = Bits_;
  static constexpr int OperandBits = OperandBits_;
  static constexpr int Rows = 16;
  static constexpr int Columns = 64;
  static constexpr int Lanes = 32;
  static constexpr int WordsPerLane = Bits;
  static constexpr int Words = WordsPerLane * Lanes;
  static constexpr int Slots = 32 / OperandBits;  ///< operands of a register
  static constexpr int Fields = OperandBits;      ///< registers of a lane
  static constexpr int KStep = 8 * Slots;         ///< k extent of one MMA
  static constexpr int FieldsPerSlot = OperandBits / Bits;
  static constexpr int LeftOver = OperandBits % Bits;
  /// Words of a lane that one vector access reads: the widest of 4, 2, 1 that divides Bits.
  static constexpr int Vector = Bits % 4 == 0 ? 4 : Bits % 2 == 0 ? 2 : 1;

  /// Where field `f` is.
  static constexpr Field field(int f) {
    Field result{};
    if (f < FieldsPerSlot * Bits) {
      result.count = 1;
      result.segment[0] = {f / FieldsPerSlot, (f % FieldsPerSlot) * Bits, Bits, 0};
      return result;
    }
    constexpr int left_over = LeftOver == 0 ? 1 : LeftOver;  // 0 never comes here
    int const first = (f - FieldsPerSlot * Bits) * Bits;     // in the stream of left-over bits
    for (int done = 0; done < Bits;) {
      int const word = (first + done) / left_over;
      int const offset = (first + done) % left_over;
      int const width = left_over - offset < Bits - done ? left_over - offset : Bits - done;
      result.segment[result.count++] = {word, FieldsPerSlot * Bits + offset, width, done};
      done += width;
    }
    return result;
  }

  /// Which weight slot `slot` of field `f` of `lane` is: the fragment of MMA operand A.
  static constexpr AtomCoordinate coordinate(int lane, int f, int slot) {
    int const k_step = f / 4;
    int const reg = f % 4;
    return {lane / 4 + 8 * (reg & 1), k_step * KStep + Slots * (lane % 4) + slot + 4 * Slots * (reg >> 1)};
  }

  /// Index of a lane's word inside the atom: a warp reads `Vector` words per lane, coalesced.
  static constexpr int word_index(int lane, int word) {
    return (word / Vector) * (Vector * Lanes) + lane * Vector + word % Vector;
  }

  /// The same bit of every slot.
  static constexpr uint32_t replicate(uint32_t slot_bits) {
    uint32_t word = 0;
    for (int slot = 0; slot < Slots; ++slot) {
      word |= slot_bits << (slot * OperandBits);
    }
    return word;
  }
};

/// Position of row `row` of an atom among the 16 packed scales (or zero points) of a group: 0, 8, 1, 9, ..., so that a
/// lane's two rows are adjacent.
HUMMING_CUTLASS_HOST_DEVICE constexpr int packed_scale_position(int row) {
  return 2 * (row % 8) + row / 8;
}

/// Packs the 32 codes of a lane; `code(row, column)` returns the stored code of a weight of the atom.
template <class Atom, class Code>
HUMMING_CUTLASS_HOST_DEVICE void pack_lane(int lane, Code&& code, uint32_t (&words)[Atom::WordsPerLane]) {
  static_for<Atom::WordsPerLane>([&](auto w) { words[w] = 0; });
  static_for<Atom::Fields>([&](auto f) {
    static_for<Atom::Slots>([&](auto slot) {
      constexpr Field field = Atom::field(f);
      AtomCoordinate const at = Atom::coordinate(lane, f, slot);
      uint32_t const value = code(at.row, at.column);
      static_for<field.count>([&](auto s) {
        constexpr Segment segment = Atom::field(f).segment[s];
        uint32_t const part = (value >> segment.field_bit) & ((1u << segment.width) - 1);
        words[segment.word] |= part << (segment.bit + slot * Atom::OperandBits);
      });
    });
  });
}

/// Inverse of `pack_lane`: calls `store(row, column, code)` for the 32 weights of a lane.
template <class Atom, class Store>
HUMMING_CUTLASS_HOST_DEVICE void unpack_lane(int lane, uint32_t const (&words)[Atom::WordsPerLane], Store&& store) {
  static_for<Atom::Fields>([&](auto f) {
    static_for<Atom::Slots>([&](auto slot) {
      constexpr Field field = Atom::field(f);
      uint32_t value = 0;
      static_for<field.count>([&](auto s) {
        constexpr Segment segment = Atom::field(f).segment[s];
        uint32_t const bits = words[segment.word] >> (segment.bit + slot * Atom::OperandBits);
        value |= (bits & ((1u << segment.width) - 1)) << segment.field_bit;
      });
      AtomCoordinate const at = Atom::coordinate(lane, f, slot);
      store(at.row, at.column, value);
    });
  });
}

#if defined(__CUDACC__)

/// Reads the words of a lane from an atom in shared or global memory, `Atom::Vector` at a time.
template <class Atom>
__device__ __forceinline__ void load_lane(uint8_t const* atom, int lane, uint32_t (&words)[Atom::WordsPerLane]) {
  static_for<Atom::WordsPerLane / Atom::Vector>([&](auto v) {
    uint8_t const* const source = atom + (v * 32 + lane) * (4 * Atom::Vector);
    if constexpr (Atom::Vector == 4) {
      uint4 const x = *reinterpret_cast<uint4 const*>(source);
      words[4 * v] = x.x, words[4 * v + 1] = x.y, words[4 * v + 2] = x.z, words[4 * v + 3] = x.w;
    } else if constexpr (Atom::Vector == 2) {
      uint2 const x = *reinterpret_cast<uint2 const*>(source);
      words[2 * v] = x.x, words[2 * v + 1] = x.y;
    } else {
      words[v] = *reinterpret_cast<uint32_t const*>(source);
    }
  });
}

/// Reads the scales (or zero points) of rows lane/4 and lane/4 + 8 from group `group` of packed groups of 16.
template <class Converter>
__device__ __forceinline__ void load_scale_pair(void const* groups, int64_t group, int lane, float& x0, float& x1) {
  using Storage = typename Converter::Storage;
  struct alignas(2 * sizeof(Storage)) Pair {
    Storage x[2];
  };
  Pair const pair = static_cast<Pair const*>(groups)[group * 8 + lane / 4];
  x0 = Converter::convert(pair.x[0]);
  x1 = Converter::convert(pair.x[1]);
}

#endif  // __CUDACC__

}  // namespace humming_cutlass
