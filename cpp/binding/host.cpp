/// Host functions: packing, unpacking, dequantization. No CUDA toolkit or driver is touched here.
#include "humming_cutlass/reference/host_weight.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "bindings.hpp"

namespace nb = nanobind;

namespace humming_cutlass {
namespace {

template <class T, size_t Rank>
using Input = nb::ndarray<T const, nb::ndim<Rank>, nb::c_contig, nb::device::cpu>;

template <class T>
using Output = nb::ndarray<nb::numpy, T>;

/// A new NumPy array that owns its memory.
template <class T>
Output<T> make_array(std::initializer_list<size_t> shape) {
  size_t count = 1;
  for (size_t extent : shape) {
    count *= extent;
  }
  T* const data = new T[count];
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return Output<T>(data, shape.size(), shape.begin(), owner);
}

[[noreturn]] void refuse(std::string const& parameter, std::string const& got, std::string const& allowed) {
  throw nb::value_error((parameter + ": got " + got + "; allowed: " + allowed).c_str());
}

void check_operand_bits(int operand_bits) {
  if (operand_bits != 16) {
    refuse("operand_bits", std::to_string(operand_bits), "16");
  }
}

int weight_bits(std::string const& dtype) {
  int bits = 0;
  reference::visit_weight_type(dtype, [&](auto tag) { bits = decltype(tag)::type::Bits; });
  return bits;
}

void check_packed(Input<uint32_t, 3> const& data, std::string const& dtype, int64_t n, int64_t k) {
  int64_t const expected[] = {reference::ceil_div(n, 16), reference::ceil_div(k, 64), 32 * weight_bits(dtype)};
  for (size_t i = 0; i < 3; ++i) {
    if (int64_t(data.shape(i)) != expected[i]) {
      refuse("data", "extent " + std::to_string(data.shape(i)) + " along axis " + std::to_string(i),
             std::to_string(expected[i]) + " for dtype " + dtype + ", n " + std::to_string(n) + ", k " +
                 std::to_string(k));
    }
  }
}

Output<uint32_t> pack_codes(Input<uint8_t, 2> codes, std::string const& dtype, int operand_bits, int threads) {
  check_operand_bits(operand_bits);
  int64_t const n = int64_t(codes.shape(0));
  int64_t const k = int64_t(codes.shape(1));
  size_t const rows = size_t(reference::ceil_div(n, 16));
  size_t const columns = size_t(reference::ceil_div(k, 64));
  Output<uint32_t> packed = make_array<uint32_t>({rows, columns, size_t(32 * weight_bits(dtype))});
  uint8_t const* const source = codes.data();
  uint32_t* const target = packed.data();
  nb::gil_scoped_release release;
  reference::visit_weight_type(
      dtype, [&](auto tag) { reference::pack_codes<typename decltype(tag)::type>(source, n, k, target, threads); });
  return packed;
}

Output<uint8_t> unpack_codes(Input<uint32_t, 3> data, std::string const& dtype, int64_t n, int64_t k, int operand_bits,
                             int threads) {
  check_operand_bits(operand_bits);
  check_packed(data, dtype, n, k);
  Output<uint8_t> codes = make_array<uint8_t>({size_t(n), size_t(k)});
  uint32_t const* const source = data.data();
  uint8_t* const target = codes.data();
  nb::gil_scoped_release release;
  reference::visit_weight_type(
      dtype, [&](auto tag) { reference::unpack_codes<typename decltype(tag)::type>(source, n, k, target, threads); });
  return codes;
}

/// A scale and an optional integer zero point to fold into the conversion.
struct Folded {
  float scale;
  std::optional<float> zero;
};

template <class Operand>
std::pair<Output<uint16_t>, int> convert_atoms_to(Input<uint32_t, 2> const& data, std::string const& dtype,
                                                  std::optional<Folded> const& folded) {
  size_t const atoms = data.shape(0);
  Output<uint16_t> operands = make_array<uint16_t>({atoms, 16, 64});
  int exponent = 0;
  reference::visit_weight_type(dtype, [&](auto tag) {
    using Element = typename decltype(tag)::type;
    if (data.shape(1) != size_t(32 * Element::Bits)) {
      refuse("data", std::to_string(data.shape(1)) + " words an atom", std::to_string(32 * Element::Bits));
    }
    if constexpr (!reference::converts<Element, Operand>) {
      refuse("dtype", dtype, "a type whose values the operand type can represent");
    } else if (!folded) {
      reference::convert_atoms<Element, Operand>(data.data(), int64_t(atoms), operands.data());
      exponent = Dequantizer<Element, Operand>::Exponent;
    } else if (!folded->zero) {
      reference::convert_scaled_atoms<Element, Operand, false>(data.data(), int64_t(atoms), folded->scale, 0.f,
                                                               operands.data());
      exponent = GroupScaledDequantizer<Element, Operand, false>::Exponent;
    } else if constexpr (Dequantizer<Element, Operand>::TakesZero) {
      reference::convert_scaled_atoms<Element, Operand, true>(data.data(), int64_t(atoms), folded->scale, *folded->zero,
                                                              operands.data());
      exponent = GroupScaledDequantizer<Element, Operand, true>::Exponent;
    } else {
      refuse("zero", "a zero point", "None with weights of type " + dtype);
    }
  });
  return {std::move(operands), exponent};
}

std::pair<Output<uint16_t>, int> convert_atoms(Input<uint32_t, 2> data, std::string const& dtype,
                                               std::string const& element_a, std::optional<float> scale,
                                               std::optional<float> zero) {
  std::optional<Folded> folded;
  if (scale) {
    folded = Folded{*scale, zero};
  } else if (zero) {
    refuse("zero", "a zero point without a scale", "None without scale");
  }
  if (element_a == "float16") {
    return convert_atoms_to<Half>(data, dtype, folded);
  }
  if (element_a == "bfloat16") {
    return convert_atoms_to<BFloat16>(data, dtype, folded);
  }
  refuse("element_a", "'" + element_a + "'", "'float16' or 'bfloat16'");
}

void dequantize(Input<uint32_t, 3> data, Input<float, 3> scale, std::optional<Input<float, 3>> zero, int64_t group_size,
                std::string const& dtype, int64_t n, int64_t k,
                nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> out, int threads) {
  check_packed(data, dtype, n, k);
  int64_t const groups = int64_t(scale.shape(1));
  int64_t const needed = group_size < 0 ? 1 : reference::ceil_div(k, group_size);
  if (int64_t(scale.shape(0)) != reference::ceil_div(n, 16) || groups < needed || scale.shape(2) != 16) {
    refuse("scale",
           "(" + std::to_string(scale.shape(0)) + ", " + std::to_string(groups) + ", " +
               std::to_string(scale.shape(2)) + ")",
           "(" + std::to_string(reference::ceil_div(n, 16)) + ", >= " + std::to_string(needed) + ", 16)");
  }
  if (zero && (zero->shape(0) != scale.shape(0) || zero->shape(1) != scale.shape(1) || zero->shape(2) != 16)) {
    refuse("zero", "another shape than the scale's", "the scale's shape");
  }
  if (int64_t(out.shape(0)) != n || int64_t(out.shape(1)) != k) {
    refuse("out", "(" + std::to_string(out.shape(0)) + ", " + std::to_string(out.shape(1)) + ")",
           "(" + std::to_string(n) + ", " + std::to_string(k) + ")");
  }
  uint32_t const* const source = data.data();
  float const* const scales = scale.data();
  float const* const zeros = zero ? zero->data() : nullptr;
  float* const target = out.data();
  nb::gil_scoped_release release;
  reference::visit_weight_type(dtype, [&](auto tag) {
    reference::dequantize<typename decltype(tag)::type>(source, scales, zeros, groups, group_size, n, k, target,
                                                        threads);
  });
}

}  // namespace

void bind_host(nb::module_& module) {
  using namespace nb::literals;
  module.def("pack_codes", &pack_codes, "codes"_a.noconvert(), "dtype"_a, "operand_bits"_a = 16, "threads"_a = 0,
             "Packs codes, uint8 (n, k), into uint32 (ceil(n/16), ceil(k/64), 32 * bits).");
  module.def("unpack_codes", &unpack_codes, "data"_a.noconvert(), "dtype"_a, "n"_a, "k"_a, "operand_bits"_a = 16,
             "threads"_a = 0, "Inverse of pack_codes: uint8 (n, k).");
  module.def(
      "convert_atoms", &convert_atoms, "data"_a.noconvert(), "dtype"_a, "element_a"_a, "scale"_a = nb::none(),
      "zero"_a = nb::none(),
      "Runs the device dequantizer on packed atoms, uint32 (atoms, 32 * bits). Returns operand bit patterns, "
      "uint16 (atoms, 16, 64), and the exponent e: value = operand * 2^-e. With `scale`, and `zero` for unsigned "
      "weights, they are folded in as the SM90 mainloop does: (value - zero) * scale = operand * 2^-e, rounded.");
  module.def("dequantize", &dequantize, "data"_a.noconvert(), "scale"_a.noconvert(), "zero"_a.noconvert().none(),
             "group_size"_a, "dtype"_a, "n"_a, "k"_a, "out"_a.noconvert(), "threads"_a = 0,
             "Writes (value - zero) * scale in float32 to out, float32 (n, k).");
}

}  // namespace humming_cutlass
