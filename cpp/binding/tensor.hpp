/// Tensors from Python, without copies and without a framework: through the C exchange API of the tensor's type where it
/// has one (torch does: about 70 ns a tensor), else through `__dlpack__`.
///
/// Nothing here synchronizes: ordering on the stream is the caller's. Errors are ArgumentError for a wrong device, shape
/// or stride and ArgumentTypeError for a wrong type or dtype.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "dlpack.hpp"
#include "runtime/error.hpp"
#include "runtime/gemm_plan.hpp"

namespace humming_cutlass {

namespace nb = nanobind;

inline constexpr char const* kTensorAllowed = "a CUDA tensor: a torch.Tensor or another object with __dlpack__";
inline constexpr int kMaxRank = 8;

/// The first line of the Python exception that is set, which is cleared. torch appends a C++ backtrace.
inline std::string take_python_error() {
  nb::python_error error;
  std::string text = nb::cast<std::string>(nb::str(error.value()));
  return text.substr(0, text.find('\n'));
}

inline std::string qualified_name(nb::handle object) {
  return nb::cast<std::string>(
      nb::str(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(object.ptr()))).attr("__qualname__")));
}

/// The exchange API of a type of tensors, or null where the type has none that this library reads.
inline dlpack::ExchangeApi const* exchange_api_of(PyTypeObject* type) {
  struct Known {
    PyTypeObject* type;
    dlpack::ExchangeApi const* api;
  };
  // A few types pass through here (torch.Tensor, Parameter). Per thread: no lock. The types are kept alive, so that a new
  // type cannot come to lie at a remembered address.
  static thread_local std::array<Known, 4> cache{};
  static thread_local unsigned next = 0;
  for (Known const& known : cache) {
    if (known.type == type) {
      return known.api;
    }
  }
  static PyObject* const name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
  PyObject* const capsule = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name);
  if (capsule == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  auto const* header = static_cast<dlpack::ExchangeHeader const*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);  // the table is static: it outlives the capsule
  if (header == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  while (header != nullptr && header->version.major != dlpack::kMajor) {
    header = header->previous;
  }
  if (header == nullptr) {
    return nullptr;
  }
  auto const* const api = reinterpret_cast<dlpack::ExchangeApi const*>(header);
  Known& slot = cache[next++ % cache.size()];
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  Py_XDECREF(reinterpret_cast<PyObject*>(slot.type));
  slot = {type, api};
  return api;
}

inline dlpack::ExchangeApi const* exchange_api(nb::handle object) {
  return exchange_api_of(Py_TYPE(object.ptr()));
}

/// A tensor argument: a view that is borrowed for the length of a call, or owned for longer.
class TensorArgument {
 public:
  enum class Hold { kBorrow, kOwn };

  TensorArgument() = default;

  /// `parameter` is the name that errors use. With kBorrow the view is good until control returns to Python.
  TensorArgument(nb::handle object, char const* parameter, Hold hold) {
    if (dlpack::ExchangeApi const* const api = exchange_api(object)) {
      if (hold == Hold::kBorrow && api->borrow != nullptr) {
        if (api->borrow(object.ptr(), &view_) != 0) {
          refuse_export(parameter);
        }
        return;
      }
      if (api->from_object(object.ptr(), &versioned_) != 0) {
        versioned_ = nullptr;
        refuse_export(parameter);
      }
      view_ = versioned_->tensor;
      read_only_ = (versioned_->flags & dlpack::kReadOnly) != 0;
      return;
    }
    import_capsule(object, parameter);
  }

  TensorArgument(TensorArgument&& other) noexcept { swap(other); }
  TensorArgument& operator=(TensorArgument&& other) noexcept {
    swap(other);
    return *this;
  }
  ~TensorArgument() {
    if (versioned_ != nullptr && versioned_->deleter != nullptr) {
      versioned_->deleter(versioned_);
    }
    if (legacy_ != nullptr && legacy_->deleter != nullptr) {
      legacy_->deleter(legacy_);
    }
  }

  dlpack::Tensor const& view() const { return view_; }
  bool read_only() const { return read_only_; }
  void* data() const { return static_cast<char*>(view_.data) + view_.byte_offset; }
  int64_t extent(int axis) const { return view_.shape[axis]; }

 private:
  void swap(TensorArgument& other) noexcept {
    std::swap(view_, other.view_);
    std::swap(versioned_, other.versioned_);
    std::swap(legacy_, other.legacy_);
    std::swap(read_only_, other.read_only_);
  }

  [[noreturn]] static void refuse_export(char const* parameter) {
    throw ArgumentError(parameter, "a tensor that cannot be exported (" + take_python_error() + ")", kTensorAllowed);
  }

  void import_capsule(nb::handle object, char const* parameter) {
    if (!nb::hasattr(object, "__dlpack__")) {
      throw ArgumentTypeError(parameter, qualified_name(object), kTensorAllowed);
    }
    nb::object capsule;
    try {
      // Asked first, because a producer on the CPU refuses the stream argument with words that mislead.
      if (nb::hasattr(object, "__dlpack_device__")) {
        nb::tuple const device = nb::cast<nb::tuple>(object.attr("__dlpack_device__")());
        check_type(dlpack::DeviceType(nb::cast<int>(device[0])), parameter);
      }
      nb::object const method = object.attr("__dlpack__");
      try {
        // stream=-1: no synchronization, which would also break graph capture.
        capsule = method(nb::arg("stream") = -1, nb::arg("max_version") = nb::make_tuple(dlpack::kMajor, 0));
      } catch (nb::python_error& error) {
        if (!error.matches(PyExc_TypeError)) {
          throw;
        }
        capsule = method(nb::arg("stream") = -1);  // a producer from before DLPack 1.0
      }
    } catch (nb::python_error& error) {
      std::string const text = nb::cast<std::string>(nb::str(error.value()));
      throw ArgumentError(parameter, "a tensor that cannot be exported (" + text.substr(0, text.find('\n')) + ")",
                          kTensorAllowed);
    }
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
      auto* const managed =
          static_cast<dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
      PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
      versioned_ = managed;
      if (managed->version.major != dlpack::kMajor) {
        release();
        throw ArgumentError(parameter, "a tensor of another DLPack major version", "DLPack 1");
      }
      view_ = managed->tensor;
      read_only_ = (managed->flags & dlpack::kReadOnly) != 0;
    } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
      legacy_ = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
      PyCapsule_SetName(capsule.ptr(), "used_dltensor");
      view_ = legacy_->tensor;
    } else {
      throw ArgumentTypeError(parameter, "an object whose __dlpack__ returns no DLPack capsule", kTensorAllowed);
    }
  }

  /// A constructor that throws runs no destructor.
  void release() {
    if (versioned_->deleter != nullptr) {
      versioned_->deleter(versioned_);
    }
    versioned_ = nullptr;
  }

 public:
  /// Throws ArgumentError unless the device is a CUDA device.
  static void check_type(dlpack::DeviceType type, char const* parameter) {
    if (type == dlpack::kCuda) {
      return;
    }
    std::string const got = type == dlpack::kCpu           ? "a tensor on the CPU"
                            : type == dlpack::kCudaHost    ? "a tensor in pinned host memory"
                            : type == dlpack::kCudaManaged ? "a tensor in managed memory"
                                                           : "a tensor on DLPack device type " + std::to_string(type);
    throw ArgumentError(parameter, got, "a tensor on a CUDA device");
  }

 private:
  dlpack::Tensor view_{};
  dlpack::ManagedTensorVersioned* versioned_ = nullptr;
  dlpack::ManagedTensor* legacy_ = nullptr;
  bool read_only_ = false;
};

inline std::string describe_shape(dlpack::Tensor const& tensor) {
  std::string text = "shape (";
  for (int i = 0; i < tensor.ndim; ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(tensor.shape[i]);
  }
  return text + (tensor.ndim == 1 ? ",)" : ")");
}

inline std::string describe_type(dlpack::DataType type) {
  std::string const bits = std::to_string(type.bits);
  std::string const lanes = type.lanes == 1 ? "" : " of " + std::to_string(type.lanes) + " lanes";
  switch (type.code) {
    case dlpack::kInt:
      return "int" + bits + lanes;
    case dlpack::kUInt:
      return "uint" + bits + lanes;
    case dlpack::kFloat:
      return "float" + bits + lanes;
    case dlpack::kBFloat:
      return "bfloat" + bits + lanes;
    case dlpack::kFloat8E4M3:
      return "float8_e4m3" + lanes;
    case dlpack::kFloat8E5M2:
      return "float8_e5m2" + lanes;
    case dlpack::kFloat8E8M0:
      return "float8_e8m0" + lanes;
    default:
      return "DLPack type code " + std::to_string(type.code) + " of " + bits + " bits" + lanes;
  }
}

inline bool is_type(dlpack::DataType type, uint8_t code, uint8_t bits) {
  return type.code == code && type.bits == bits && type.lanes == 1;
}

inline bool is_element(dlpack::DataType type, Element element) {
  switch (element) {
    case Element::kFloat16:
      return is_type(type, dlpack::kFloat, 16);
    case Element::kBFloat16:
      return is_type(type, dlpack::kBFloat, 16);
    default:
      return is_type(type, dlpack::kFloat, 32);
  }
}

inline dlpack::DataType dtype_of(Element element) {
  switch (element) {
    case Element::kFloat16:
      return {dlpack::kFloat, 16, 1};
    case Element::kBFloat16:
      return {dlpack::kBFloat, 16, 1};
    default:
      return {dlpack::kFloat, 32, 1};
  }
}

inline Element parse_element(std::string const& name, char const* parameter) {
  if (name == "float16") {
    return Element::kFloat16;
  }
  if (name == "bfloat16") {
    return Element::kBFloat16;
  }
  if (name == "float32") {
    return Element::kFloat32;
  }
  throw ArgumentTypeError(parameter, "'" + name + "'", "'float16', 'bfloat16' or 'float32'");
}

/// Throws ArgumentError unless the tensor is on CUDA device `device` (any CUDA device where that is -1).
inline void check_device(TensorArgument const& tensor, char const* parameter, int device) {
  dlpack::Device const& got = tensor.view().device;
  TensorArgument::check_type(got.type, parameter);
  if (device >= 0 && got.id != device) {
    throw ArgumentError(parameter, "a tensor on cuda:" + std::to_string(got.id),
                        "cuda:" + std::to_string(device) + ", where the weight is");
  }
}

/// Whether the tensor's elements follow each other in memory in row-major order.
inline bool is_contiguous(dlpack::Tensor const& tensor) {
  if (tensor.strides == nullptr) {
    return true;
  }
  int64_t expected = 1;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) {
      return false;
    }
    expected *= tensor.shape[i];
  }
  return true;
}

/// Throws unless the tensor has this shape, is contiguous, has memory and starts at a multiple of `alignment` bytes.
inline void check_dense(TensorArgument const& tensor, char const* parameter, std::initializer_list<int64_t> shape,
                        uintptr_t alignment) {
  dlpack::Tensor const& view = tensor.view();
  bool same = view.ndim == int(shape.size());
  std::string allowed = "shape (";
  int axis = 0;
  for (int64_t const extent : shape) {
    same = same && view.shape[axis] == extent;
    allowed += (axis > 0 ? ", " : "") + std::to_string(extent);
    ++axis;
  }
  if (!same) {
    throw ArgumentError(parameter, describe_shape(view), allowed + (shape.size() == 1 ? ",)" : ")"));
  }
  if (!is_contiguous(view)) {
    throw ArgumentError(parameter, "a tensor that is not contiguous", "a contiguous tensor");
  }
  if (view.data == nullptr) {
    throw ArgumentError(parameter, "a tensor without memory", "a tensor that holds data");
  }
  if (reinterpret_cast<uintptr_t>(tensor.data()) % alignment != 0) {
    throw ArgumentError(parameter, "a data pointer that is not aligned",
                        "a data pointer that is a multiple of " + std::to_string(alignment) + " bytes");
  }
}

/// A single row has no stride; this one satisfies every kernel.
inline int64_t stride_of_single_row(int64_t columns) {
  return (columns + 7) / 8 * 8;
}

/// Reads a tensor (..., columns) as a matrix, inner stride 1. Leading axes are flattened, which needs them evenly spaced;
/// axes of extent 1 may have any stride. Rows of an input may coincide (expand), rows of an output may not overlap.
inline Matrix as_matrix(TensorArgument const& tensor, char const* parameter, Element element, int device,
                        int64_t columns, bool output) {
  dlpack::Tensor const& view = tensor.view();
  check_device(tensor, parameter, device);
  if (!is_element(view.dtype, element)) {
    throw ArgumentTypeError(parameter, describe_type(view.dtype), name_of(element));
  }
  if (view.ndim < 1 || view.ndim > kMaxRank || view.shape[view.ndim - 1] != columns) {
    throw ArgumentError(
        parameter, describe_shape(view),
        "shape (..., " + std::to_string(columns) + ") of at most " + std::to_string(kMaxRank) + " axes");
  }
  if (output && tensor.read_only()) {
    throw ArgumentError(parameter, "a read-only tensor", "a tensor that may be written");
  }
  int64_t rows = 1;
  for (int i = 0; i < view.ndim - 1; ++i) {
    rows *= view.shape[i];
  }
  int64_t stride = stride_of_single_row(columns);
  if (rows == 0) {
    return {nullptr, 0, stride};
  }
  if (view.data == nullptr) {
    throw ArgumentError(parameter, "a tensor without memory", "a tensor that holds data");
  }
  if (view.strides == nullptr) {
    return {tensor.data(), rows, rows > 1 ? columns : stride};
  }
  if (columns != 1 && view.strides[view.ndim - 1] != 1) {
    throw ArgumentError(parameter, "inner stride " + std::to_string(view.strides[view.ndim - 1]), "inner stride 1");
  }
  int64_t flattened = 1;
  for (int i = view.ndim - 2; i >= 0; --i) {
    if (view.shape[i] == 1) {
      continue;
    }
    if (flattened == 1) {
      stride = view.strides[i];
    } else if (view.strides[i] != flattened * stride) {
      throw ArgumentError(parameter, describe_shape(view) + " whose leading axes are not evenly spaced",
                          "leading axes that flatten to rows of one stride");
    }
    flattened *= view.shape[i];
  }
  if (rows > 1 && stride < (output ? columns : 0)) {
    throw ArgumentError(parameter, "a row stride of " + std::to_string(stride) + " elements",
                        output ? "at least " + std::to_string(columns) + ", so that rows do not overlap" : "0 or more");
  }
  return {tensor.data(), rows, stride};
}

}  // namespace humming_cutlass
