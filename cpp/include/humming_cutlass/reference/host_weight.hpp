/// Packing, unpacking and dequantization on the host: the executable specification of the packed weight.
///
/// Everything goes through the same `PackedAtom` and `Dequantizer` that the kernels use. `visit_weight_type` is the only
/// place that maps a type's name to its tag.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "humming_cutlass/dequant/code_book.hpp"
#include "humming_cutlass/dequant/floating.hpp"
#include "humming_cutlass/dequant/group_scaled.hpp"
#include "humming_cutlass/dequant/integer.hpp"

namespace humming_cutlass::reference {

inline constexpr int64_t kAtomRows = 16;
inline constexpr int64_t kAtomColumns = 64;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

/// Calls `body(begin, end)` over [0, count) on up to `threads` threads (0: one per core).
template <class Body>
void parallel_for(int64_t count, int threads, Body&& body) {
  int64_t const cores = std::max(1u, std::thread::hardware_concurrency());
  int64_t const workers = std::min<int64_t>(count, threads > 0 ? threads : cores);
  if (workers <= 1) {
    body(int64_t(0), count);
    return;
  }
  std::vector<std::thread> pool;
  for (int64_t w = 1; w < workers; ++w) {
    pool.emplace_back([&, w] { body(count * w / workers, count * (w + 1) / workers); });
  }
  body(int64_t(0), count / workers);
  for (std::thread& thread : pool) {
    thread.join();
  }
}

template <class Element>
struct TypeTag {
  using type = Element;
};

namespace detail {

template <class Visitor, int B>
bool visit_integer(std::string_view name, Visitor& visitor) {
  if (name == "int" + std::to_string(B)) {
    visitor(TypeTag<Int<B>>{});
    return true;
  }
  if (name == "uint" + std::to_string(B)) {
    visitor(TypeTag<UInt<B>>{});
    return true;
  }
  return false;
}

template <class Visitor, int X, int Y>
bool visit_float(std::string_view name, Visitor& visitor) {
  std::string const own = "float" + std::to_string(1 + X + Y) + "_e" + std::to_string(X) + "m" + std::to_string(Y);
  if (name != own) {
    return false;
  }
  if constexpr (X == 4 && Y == 3) {
    visitor(TypeTag<Float8E4M3>{});
  } else if constexpr (X == 5 && Y == 2) {
    visitor(TypeTag<Float8E5M2>{});
  } else {
    visitor(TypeTag<Float<X, Y>>{});
  }
  return true;
}

template <class Visitor, int X, int... Y>
bool visit_mantissas(std::string_view name, Visitor& visitor, std::integer_sequence<int, Y...>) {
  return (visit_float<Visitor, X, Y>(name, visitor) || ...);
}

template <class Visitor, int... I>
bool visit_all(std::string_view name, Visitor& visitor, std::integer_sequence<int, I...>) {
  return (visit_integer<Visitor, I + 1>(name, visitor) || ...) ||
         (visit_mantissas<Visitor, I>(name, visitor, std::make_integer_sequence<int, I == 0 ? 0 : 8 - I>{}) || ...);
}

}  // namespace detail

/// Calls `visitor(TypeTag<Element>{})` for the weight type called `name`.
/// Throws std::invalid_argument for an unknown name.
template <class Visitor>
void visit_weight_type(std::string_view name, Visitor&& visitor) {
  if (name == "nf4") {
    visitor(TypeTag<NF4>{});
    return;
  }
  if (!detail::visit_all(name, visitor, std::make_integer_sequence<int, 8>{})) {
    throw std::invalid_argument("dtype: got '" + std::string(name) + "'; allowed: int1-8, uint1-8, floatB_eXmY, nf4");
  }
}

/// Whether every code of Element can be converted to Operand; see support.py for the rule.
template <class Element, class Operand>
inline constexpr bool converts = [] {
  if constexpr (is_float<Element>) {
    return Element::ExponentBits <= Operand::ExponentBits && Element::MantissaBits <= Operand::MantissaBits;
  } else {
    return true;
  }
}();

/// codes [n][k], one per byte -> packed words [ceil(n/16)][ceil(k/64)][32 * Bits]. Padding holds code 0.
template <class Element>
void pack_codes(uint8_t const* codes, int64_t n, int64_t k, uint32_t* packed, int threads) {
  using Dequant = Dequantizer<Element, BFloat16>;
  using Atom = typename Dequant::Atom;
  int64_t const atoms_k = ceil_div(k, kAtomColumns);
  parallel_for(ceil_div(n, kAtomRows), threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t j = 0; j < atoms_k; ++j) {
        uint32_t* const atom = packed + (i * atoms_k + j) * Atom::Words;
        for (int lane = 0; lane < Atom::Lanes; ++lane) {
          uint32_t words[Atom::WordsPerLane];
          pack_lane<Atom>(
              lane,
              [=](int row, int column) {
                int64_t const r = i * kAtomRows + row;
                int64_t const c = j * kAtomColumns + column;
                return Dequant::store(r < n && c < k ? codes[r * k + c] : 0u);
              },
              words);
          for (int w = 0; w < Atom::WordsPerLane; ++w) {
            atom[Atom::word_index(lane, w)] = words[w];
          }
        }
      }
    }
  });
}

/// Calls `visit(row, column, code)` for every weight of rows [16 * begin, 16 * end) inside (n, k).
template <class Element, class Visit>
void for_each_code(uint32_t const* packed, int64_t n, int64_t k, int64_t begin, int64_t end, Visit&& visit) {
  using Dequant = Dequantizer<Element, BFloat16>;
  using Atom = typename Dequant::Atom;
  int64_t const atoms_k = ceil_div(k, kAtomColumns);
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t j = 0; j < atoms_k; ++j) {
      uint32_t const* const atom = packed + (i * atoms_k + j) * Atom::Words;
      for (int lane = 0; lane < Atom::Lanes; ++lane) {
        uint32_t words[Atom::WordsPerLane];
        for (int w = 0; w < Atom::WordsPerLane; ++w) {
          words[w] = atom[Atom::word_index(lane, w)];
        }
        unpack_lane<Atom>(lane, words, [&](int row, int column, uint32_t stored) {
          int64_t const r = i * kAtomRows + row;
          int64_t const c = j * kAtomColumns + column;
          if (r < n && c < k) {
            visit(r, c, Dequant::load(stored));
          }
        });
      }
    }
  }
}

/// Inverse of `pack_codes`.
template <class Element>
void unpack_codes(uint32_t const* packed, int64_t n, int64_t k, uint8_t* codes, int threads) {
  parallel_for(ceil_div(n, kAtomRows), threads, [=](int64_t begin, int64_t end) {
    for_each_code<Element>(packed, n, k, begin, end,
                           [=](int64_t r, int64_t c, uint32_t code) { codes[r * k + c] = uint8_t(code); });
  });
}

/// Calls `store(row, column, bits)` for every operand that a conversion makes of a packed atom;
/// `convert(std::integral_constant<int, F>, words)` returns register F of a lane.
template <class Atom, class Convert, class Store>
void convert_atom(uint32_t const* atom, Convert&& convert, Store&& store) {
  for (int lane = 0; lane < Atom::Lanes; ++lane) {
    uint32_t words[Atom::WordsPerLane];
    for (int w = 0; w < Atom::WordsPerLane; ++w) {
      words[w] = atom[Atom::word_index(lane, w)];
    }
    static_for<Atom::Fields>([&](auto f) {
      uint32_t const pair = convert(f, words);
      for (int slot = 0; slot < Atom::Slots; ++slot) {
        AtomCoordinate const at = Atom::coordinate(lane, f, slot);
        store(at.row, at.column, uint16_t(pair >> (16 * slot)));
      }
    });
  }
}

/// Runs the device dequantizer on packed atoms: operand bits [atoms][16][64], value = operand * 2^-Exponent.
template <class Element, class Operand>
void convert_atoms(uint32_t const* packed, int64_t atoms, uint16_t* operands) {
  using Dequant = Dequantizer<Element, Operand>;
  using Atom = typename Dequant::Atom;
  uint32_t const minus_zero = broadcast_pair<Operand>(-std::ldexp(float(Dequant::Center), Dequant::Exponent));
  for (int64_t a = 0; a < atoms; ++a) {
    convert_atom<Atom>(
        packed + a * Atom::Words,
        [&](auto f, auto const& words) { return Dequant::template convert<f>(words, minus_zero); },
        [&](int row, int column, uint16_t bits) { operands[(a * Atom::Rows + row) * Atom::Columns + column] = bits; });
  }
}

/// The same with a scale and a zero point folded in (dequant/group_scaled.hpp): value = (code - zero) * scale.
template <class Element, class Operand, bool HasIntegerZero>
void convert_scaled_atoms(uint32_t const* packed, int64_t atoms, float scale, float zero, uint16_t* operands) {
  using Dequant = GroupScaledDequantizer<Element, Operand, HasIntegerZero>;
  using Atom = typename Dequant::Atom;
  auto const registers = Dequant::prepare(scale, zero);
  for (int64_t a = 0; a < atoms; ++a) {
    convert_atom<Atom>(
        packed + a * Atom::Words,
        [&](auto f, auto const& words) { return Dequant::template convert<f>(words, registers); },
        [&](int row, int column, uint16_t bits) { operands[(a * Atom::Rows + row) * Atom::Columns + column] = bits; });
  }
}

/// Value of every code in binary32, exact (a code book's entries are rounded to binary32, not to an operand type).
template <class Element>
std::vector<float> code_values() {
  std::vector<float> values(size_t(1) << Element::Bits);
  if constexpr (is_code_book<Element>) {
    std::copy(std::begin(CodeBook<Element>::Entry), std::end(CodeBook<Element>::Entry), values.begin());
  } else {
    using Dequant = Dequantizer<Element, BFloat16>;
    std::vector<uint8_t> codes(kAtomRows * kAtomColumns);
    for (size_t c = 0; c < codes.size(); ++c) {
      codes[c] = uint8_t(c % values.size());
    }
    std::vector<uint32_t> atom(Dequant::Atom::Words);
    pack_codes<Element>(codes.data(), kAtomRows, kAtomColumns, atom.data(), 1);
    std::vector<uint16_t> operands(codes.size());
    convert_atoms<Element, BFloat16>(atom.data(), 1, operands.data());
    for (size_t c = 0; c < values.size(); ++c) {
      values[c] = std::ldexp(ToFloat<BFloat16>::convert(operands[c]), -Dequant::Exponent);
    }
  }
  return values;
}

/// out[n][k] = (value - zero) * scale in binary32.
///
/// `scale` and `zero` are float [ceil(n/16)][groups][16] in packed row order; `group_size` -1 is one group. `zero` may be
/// null.
template <class Element>
void dequantize(uint32_t const* packed, float const* scale, float const* zero, int64_t groups, int64_t group_size,
                int64_t n, int64_t k, float* out, int threads) {
  using Dequant = Dequantizer<Element, BFloat16>;
  using Atom = typename Dequant::Atom;
  constexpr int64_t kBlock = 16;  // columns; a group is a multiple of it
  std::vector<float> const values = code_values<Element>();
  // Indexed by the stored field, so that a weight costs one look-up.
  float value_of[size_t(1) << Element::Bits];
  for (size_t stored = 0; stored < values.size(); ++stored) {
    value_of[stored] = values[Dequant::load(uint32_t(stored))];
  }
  int64_t const atoms_k = ceil_div(k, kAtomColumns);
  parallel_for(ceil_div(n, kAtomRows), threads, [&](int64_t begin, int64_t end) {
    float tile[kAtomRows][kAtomColumns];
    for (int64_t i = begin; i < end; ++i) {
      int64_t const rows = std::min(kAtomRows, n - i * kAtomRows);
      for (int64_t j = 0; j < atoms_k; ++j) {
        uint32_t const* const atom = packed + (i * atoms_k + j) * Atom::Words;
        for (int lane = 0; lane < Atom::Lanes; ++lane) {
          uint32_t words[Atom::WordsPerLane];
          for (int w = 0; w < Atom::WordsPerLane; ++w) {
            words[w] = atom[Atom::word_index(lane, w)];
          }
          unpack_lane<Atom>(lane, words,
                            [&](int row, int column, uint32_t stored) { tile[row][column] = value_of[stored]; });
        }
        for (int64_t block = 0; block < kAtomColumns; block += kBlock) {
          int64_t const column = j * kAtomColumns + block;
          int64_t const columns = std::min(kBlock, k - column);
          if (columns <= 0) {
            break;
          }
          int64_t const group = group_size < 0 ? 0 : column / group_size;
          for (int64_t row = 0; row < rows; ++row) {
            int64_t const at = (i * groups + group) * kAtomRows + packed_scale_position(int(row));
            float const z = zero == nullptr ? 0.0f : zero[at];
            float const s = scale[at];
            float const* const source = tile[row] + block;
            float* const target = out + (i * kAtomRows + row) * k + column;
            if (columns == kBlock) {
              for (int64_t c = 0; c < kBlock; ++c) {
                target[c] = (source[c] - z) * s;
              }
            } else {
              for (int64_t c = 0; c < columns; ++c) {
                target[c] = (source[c] - z) * s;
              }
            }
          }
        }
      }
    }
  });
}

}  // namespace humming_cutlass::reference
