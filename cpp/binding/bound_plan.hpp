/// A GEMM plan as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/gemm_plan.hpp"
#include "runtime/kernel.hpp"
#include "tensor.hpp"

namespace humming_cutlass {

/// A GemmPlan and the weight tensors that it points into.
class BoundPlan {
 public:
  BoundPlan(std::shared_ptr<Kernel> kernel, int64_t n, int64_t k, int64_t groups, std::string const& element_a,
            std::string const& element_d, nb::handle b, nb::handle scale, nb::handle zero, nb::handle bias,
            nb::handle global_scale)
      : plan_(make(std::move(kernel), n, k, groups, element_a, element_d, b, scale, zero, bias, global_scale)) {}

  void run(nb::handle a, nb::handle d, uintptr_t stream, int split_k) {
    TensorArgument const source(a, "a", TensorArgument::Hold::kBorrow);
    TensorArgument const target(d, "d", TensorArgument::Hold::kBorrow);
    GemmWeight const& weight = plan_->weight();
    Matrix const matrix_a = as_matrix(source, "a", plan_->element_a(), weight.device, weight.k, false);
    Matrix const matrix_d = as_matrix(target, "d", plan_->element_d(), weight.device, weight.n, true);
    launch(matrix_a, matrix_d, reinterpret_cast<driver::Stream>(stream), split_k);
  }

  nb::object call(nb::handle a, int split_k) {
    dlpack::ExchangeApi const* const api = exchange_api(a);
    if (api == nullptr) {
      throw ArgumentTypeError(
          "a", qualified_name(a),
          "a tensor whose type has __dlpack_c_exchange_api__, such as torch.Tensor of torch 2.10 or "
          "newer; `run` takes any other");
    }
    TensorArgument const source(a, "a", TensorArgument::Hold::kBorrow);
    GemmWeight const& weight = plan_->weight();
    Matrix const matrix_a = as_matrix(source, "a", plan_->element_a(), weight.device, weight.k, false);

    dlpack::Tensor const& view = source.view();
    int64_t shape[kMaxRank];
    for (int i = 0; i < view.ndim - 1; ++i) {
      shape[i] = view.shape[i];
    }
    shape[view.ndim - 1] = weight.n;
    dlpack::Tensor prototype{};
    prototype.device = view.device;
    prototype.ndim = view.ndim;
    prototype.dtype = dtype_of(plan_->element_d());
    prototype.shape = shape;
    Managed result(api, prototype);
    void* stream = nullptr;
    if (api->current_stream(dlpack::kCuda, weight.device, &stream) != 0) {
      throw nb::python_error();
    }
    Matrix const matrix_d{result.data(), matrix_a.rows, weight.n};
    launch(matrix_a, matrix_d, static_cast<driver::Stream>(stream), split_k);
    return result.to_object(api);
  }

  /// `run` without its checks of tensors.
  void launch(Matrix const& a, Matrix const& d, driver::Stream stream, int split_k) {
    if (a.rows != 0 && !plan_->prepared()) {
      nb::gil_scoped_release release;  // reads a file and loads it; once per plan
      plan_->prepare();
    }
    plan_->run(a, d, stream, split_k);
  }

  GemmPlan const& plan() const { return *plan_; }
  int device() const { return plan_->weight().device; }
  int64_t n() const { return plan_->weight().n; }
  int64_t k() const { return plan_->weight().k; }
  std::shared_ptr<Kernel> kernel() const { return plan_->kernel(); }

 private:
  /// A tensor that the framework allocated and that is not yet a Python object.
  class Managed {
   public:
    Managed(dlpack::ExchangeApi const* api, dlpack::Tensor& prototype) {
      std::string error;
      auto const set_error = [](void* context, char const* kind, char const* message) {
        std::string const text = message;
        *static_cast<std::string*>(context) = std::string(kind) + ": " + text.substr(0, text.find('\n'));
      };
      if (api->allocate(&prototype, &tensor_, &error, set_error) != 0 || tensor_ == nullptr) {
        throw LaunchError("allocating the output failed: " + error);
      }
    }
    ~Managed() {
      if (tensor_ != nullptr && tensor_->deleter != nullptr) {
        tensor_->deleter(tensor_);
      }
    }
    Managed(Managed const&) = delete;
    Managed& operator=(Managed const&) = delete;

    void* data() const { return static_cast<char*>(tensor_->tensor.data) + tensor_->tensor.byte_offset; }

    nb::object to_object(dlpack::ExchangeApi const* api) {
      void* object = nullptr;
      if (api->to_object(std::exchange(tensor_, nullptr), &object) != 0) {
        throw nb::python_error();
      }
      return nb::steal(static_cast<PyObject*>(object));
    }

   private:
    dlpack::ManagedTensorVersioned* tensor_ = nullptr;
  };

  TensorArgument const& keep(nb::handle object, char const* parameter) {
    tensors_.push_back(TensorArgument(object, parameter, TensorArgument::Hold::kOwn));
    return tensors_.back();
  }

  static int32_t positive(int64_t value, char const* parameter) {
    if (value < 1 || value > INT32_MAX) {
      throw ArgumentError(parameter, std::to_string(value), "1 to " + std::to_string(INT32_MAX));
    }
    return int32_t(value);
  }

  std::unique_ptr<GemmPlan> make(std::shared_ptr<Kernel> kernel, int64_t n, int64_t k, int64_t groups,
                                 std::string const& element_a, std::string const& element_d, nb::handle b,
                                 nb::handle scale, nb::handle zero, nb::handle bias, nb::handle global_scale) {
    constexpr uintptr_t kVector = 16;  // kernels copy packed tensors 16 bytes at a time
    GemmWeight weight{};
    weight.n = positive(n, "n");
    weight.k = positive(k, "k");
    weight.groups = positive(groups, "groups");
    int64_t const atoms_n = (n + 15) / 16;
    int64_t const atoms_k = (k + 63) / 64;
    tensors_.reserve(5);

    TensorArgument const& packed = keep(b, "b");
    check_device(packed, "b", -1);
    weight.device = packed.view().device.id;
    dlpack::DataType const word = packed.view().dtype;
    if (!is_type(word, dlpack::kInt, 32) && !is_type(word, dlpack::kUInt, 32)) {
      throw ArgumentTypeError("b", describe_type(word), "int32 or uint32");
    }
    int64_t const words = packed.view().ndim == 3 ? packed.extent(2) : 0;
    if (words < 32 || words > 256 || words % 32 != 0) {
      throw ArgumentError(
          "b", describe_shape(packed.view()),
          "shape (" + std::to_string(atoms_n) + ", " + std::to_string(atoms_k) + ", 32 * bits) with bits 1 to 8");
    }
    check_dense(packed, "b", {atoms_n, atoms_k, words}, kVector);
    weight.b = packed.data();
    weight.row_bytes_b = atoms_k * words * 4;

    TensorArgument const& scales = keep(scale, "scale");
    check_factors(scales, "scale", weight.device, {atoms_n, groups, 16}, kVector);
    weight.scale = scales.data();
    weight.row_bytes_scale = row_bytes(scales);
    if (!zero.is_none()) {
      TensorArgument const& zeros = keep(zero, "zero");
      check_factors(zeros, "zero", weight.device, {atoms_n, groups, 16}, kVector);
      weight.zero = zeros.data();
      weight.row_bytes_zero = row_bytes(zeros);
    }
    if (!bias.is_none()) {
      weight.bias = floats(keep(bias, "bias"), "bias", weight.device, n);
    }
    if (!global_scale.is_none()) {
      weight.global_scale = floats(keep(global_scale, "global_scale"), "global_scale", weight.device, 1);
    }
    return std::make_unique<GemmPlan>(std::move(kernel), weight, parse_element(element_a, "element_a"),
                                      parse_element(element_d, "element_d"));
  }

  /// Scales and zero points. Their type is the kernel's; 8-bit floats may also come as uint8.
  static void check_factors(TensorArgument const& tensor, char const* parameter, int device,
                            std::initializer_list<int64_t> shape, uintptr_t alignment) {
    check_device(tensor, parameter, device);
    dlpack::DataType const type = tensor.view().dtype;
    bool const floating = is_element(type, Element::kFloat16) || is_element(type, Element::kBFloat16) ||
                          is_element(type, Element::kFloat32);
    bool const byte = is_type(type, dlpack::kUInt, 8) || is_type(type, dlpack::kFloat8E4M3, 8) ||
                      is_type(type, dlpack::kFloat8E5M2, 8) || is_type(type, dlpack::kFloat8E8M0, 8);
    if (!floating && !byte) {
      throw ArgumentTypeError(parameter, describe_type(type),
                              "float16, bfloat16, float32, float8_e4m3, float8_e5m2, float8_e8m0, or uint8 for the "
                              "bits of an 8-bit float");
    }
    check_dense(tensor, parameter, shape, alignment);
  }

  /// Bytes of one atom row of scales or zero points, (atom rows, groups, 16).
  static int64_t row_bytes(TensorArgument const& tensor) {
    return tensor.extent(1) * tensor.extent(2) * tensor.view().dtype.bits / 8;
  }

  static float const* floats(TensorArgument const& tensor, char const* parameter, int device, int64_t count) {
    check_device(tensor, parameter, device);
    if (!is_element(tensor.view().dtype, Element::kFloat32)) {
      throw ArgumentTypeError(parameter, describe_type(tensor.view().dtype), "float32");
    }
    check_dense(tensor, parameter, {count}, alignof(float));
    return static_cast<float const*>(tensor.data());
  }

  std::vector<TensorArgument> tensors_;  // before plan_: `make` fills it
  std::unique_ptr<GemmPlan> plan_;
};

}  // namespace humming_cutlass
