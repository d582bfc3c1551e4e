/// The CUDA runtime in Python: device properties, kernels, GEMM plans.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "runtime/driver.hpp"
#include "runtime/gemm_plan.hpp"
#include "runtime/kernel.hpp"
#include "runtime/pack.hpp"
#include "tensor.hpp"

namespace humming_cutlass {
namespace {

using Hold = TensorArgument::Hold;

/// Sets the Python exception of a class in errors.py. Looked up on use: importing the extension imports nothing.
void raise(char const* class_name, char const* message) {
  PyObject* const module = PyImport_ImportModule("humming_cutlass.errors");
  if (module == nullptr) {
    return;  // the ImportError is set
  }
  PyObject* const type = PyObject_GetAttrString(module, class_name);
  Py_DECREF(module);
  if (type == nullptr) {
    return;
  }
  PyErr_SetString(type, message);
  Py_DECREF(type);
}

void translate(std::exception_ptr const& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (ArgumentError const& error) {
    raise("ArgumentError", error.what());
  } catch (ArgumentTypeError const& error) {
    raise("ArgumentTypeError", error.what());
  } catch (LaunchError const& error) {
    raise("LaunchError", error.what());
  }
}

bool driver_available() {
  nb::gil_scoped_release release;  // the first call initialises the driver, which can take a second
  return driver::available();
}

nb::dict device_properties(int device) {
  driver::Device handle = 0;
  char name[256] = {};
  size_t memory = 0;
  {
    nb::gil_scoped_release release;
    driver::Functions const& f = driver::functions();
    handle = driver::device_handle(device);
    driver::check(f.cuDeviceGetName(name, int(sizeof(name)) - 1, handle), "cuDeviceGetName");
    driver::check(f.cuDeviceTotalMem(&memory, handle), "cuDeviceTotalMem");
  }
  nb::dict properties;
  properties["name"] = nb::str(name);
  properties["major"] = driver::attribute(driver::kComputeCapabilityMajor, handle);
  properties["minor"] = driver::attribute(driver::kComputeCapabilityMinor, handle);
  properties["sm_count"] = driver::attribute(driver::kMultiprocessorCount, handle);
  properties["l2_bytes"] = driver::attribute(driver::kL2CacheSize, handle);
  properties["smem_per_block_optin"] = driver::attribute(driver::kMaxSharedMemoryPerBlockOptin, handle);
  properties["clock_khz"] = driver::attribute(driver::kClockRate, handle);
  properties["memory_clock_khz"] = driver::attribute(driver::kMemoryClockRate, handle);
  properties["memory_bus_bits"] = driver::attribute(driver::kMemoryBusWidth, handle);
  properties["total_memory"] = memory;
  return properties;
}

nb::dict kernel_traits(Kernel& kernel, int device) {
  KernelTraits traits;
  {
    nb::gil_scoped_release release;
    traits = kernel.on(driver::device_state(device)).traits;
  }
  nb::dict result;
  result["version"] = traits.version;
  result["threads"] = traits.threads;
  result["smem_bytes"] = traits.smem_bytes;
  result["tile_m"] = traits.tile_m;
  result["tile_n"] = traits.tile_n;
  result["tile_k"] = traits.tile_k;
  result["cluster_size"] = traits.cluster_size;
  result["cluster_split_k"] = traits.cluster_split_k;
  result["persistent"] = traits.persistent;
  result["max_m"] = traits.max_m;
  result["dependent_launch"] = traits.dependent_launch;
  result["box_m"] = traits.box_m;
  result["box_n"] = traits.box_n;
  result["box_b"] = traits.box_b;
  result["box_scale"] = traits.box_scale;
  result["box_zero"] = traits.box_zero;
  return result;
}

/// Checks the tensors of a packing call and launches it.
void pack(Kernel& kernel, nb::handle codes, nb::handle packed, uintptr_t stream) {
  TensorArgument const source(codes, "codes", Hold::kBorrow);
  TensorArgument const target(packed, "packed", Hold::kBorrow);
  check_device(source, "codes", -1);
  int const device = source.view().device.id;
  check_device(target, "packed", device);
  if (!is_type(source.view().dtype, dlpack::kUInt, 8)) {
    throw ArgumentTypeError("codes", describe_type(source.view().dtype), "uint8");
  }
  if (!is_type(target.view().dtype, dlpack::kInt, 32) && !is_type(target.view().dtype, dlpack::kUInt, 32)) {
    throw ArgumentTypeError("packed", describe_type(target.view().dtype), "int32 or uint32");
  }
  if (source.view().ndim != 2 || target.view().ndim != 3) {
    throw ArgumentError("codes", describe_shape(source.view()), "shape (n, k), with packed (n/16, k/64, 32 * bits)");
  }
  int64_t const n = source.extent(0);
  int64_t const k = source.extent(1);
  check_dense(source, "codes", {n, k}, 1);
  check_dense(target, "packed", {(n + 15) / 16, (k + 63) / 64, target.extent(2)}, 16);
  launch_pack(kernel, device, static_cast<uint8_t const*>(source.data()), static_cast<uint32_t*>(target.data()), n, k,
              reinterpret_cast<driver::Stream>(stream));
}

/// A GemmPlan and the weight tensors that it points into.
class BoundPlan {
 public:
  BoundPlan(std::shared_ptr<Kernel> kernel, int64_t n, int64_t k, int64_t groups, std::string const& element_a,
            std::string const& element_d, nb::handle b, nb::handle scale, nb::handle zero, nb::handle bias,
            nb::handle global_scale)
      : plan_(make(std::move(kernel), n, k, groups, element_a, element_d, b, scale, zero, bias, global_scale)) {}

  void run(nb::handle a, nb::handle d, uintptr_t stream, int split_k) {
    TensorArgument const source(a, "a", Hold::kBorrow);
    TensorArgument const target(d, "d", Hold::kBorrow);
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
    TensorArgument const source(a, "a", Hold::kBorrow);
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

  void launch(Matrix const& a, Matrix const& d, driver::Stream stream, int split_k) {
    if (a.rows != 0 && !plan_->prepared()) {
      nb::gil_scoped_release release;  // reads a file and loads it; once per plan
      plan_->prepare();
    }
    plan_->run(a, d, stream, split_k);
  }

  TensorArgument const& keep(nb::handle object, char const* parameter) {
    tensors_.push_back(TensorArgument(object, parameter, Hold::kOwn));
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

}  // namespace

void bind_cuda(nb::module_& module) {
  using namespace nb::literals;
  nb::register_exception_translator(translate, nullptr);

  module.def(
      "driver_available", &driver_available,
      "Whether the NVIDIA driver can be opened and initialised. The first call does the work, an import does not.");
  module.def("device_properties", &device_properties, "device"_a,
             "Properties of a CUDA device: name, major, minor, sm_count, l2_bytes, smem_per_block_optin, clock_khz, "
             "memory_clock_khz, memory_bus_bits, total_memory (bytes). Makes no context. Raises LaunchError without a "
             "driver, ArgumentError for a device that does not exist.");

  nb::class_<Kernel>(
      module, "Kernel",
      "A compiled kernel: an entry point of a cubin file. The file is read when a device first needs it, once "
      "per device, from any thread and also while a stream is being captured.")
      .def(nb::init<std::string, std::string>(), "cubin_path"_a, "entry"_a)
      .def_prop_ro("cubin_path", &Kernel::path, "The path of the cubin.")
      .def_prop_ro("entry", &Kernel::entry, "The name of the kernel in the cubin.")
      .def("traits", &kernel_traits, "device"_a,
           "Loads the kernel on a device and returns its KernelTraits: version, threads, smem_bytes, tile_m, tile_n, "
           "tile_k, cluster_size, cluster_split_k, persistent, max_m, dependent_launch, box_m, box_n, box_b, "
           "box_scale, box_zero. "
           "Raises LaunchError where the device cannot run it.");

  module.def("pack", &pack, "kernel"_a, "codes"_a.none(), "packed"_a.none(), "stream"_a,
             "Puts the packing of codes, uint8 (n, k), into packed, int32 (ceil(n/16), ceil(k/64), 32 * bits), on a "
             "stream. Both are contiguous CUDA tensors on one device; the kernel is emitter.emit_pack's for the type.");

  nb::class_<BoundPlan>(
      module, "GemmPlan",
      "A kernel and a packed weight on one device: D[m, n] = A[m, k] * W[n, k]^T. Holds the weight's tensors.\n\n"
      "b is int32 (ceil(n/16), ceil(k/64), 32 * bits); scale and zero (ceil(n/16), groups, 16); bias float32 (n,); "
      "global_scale float32 (1,); all contiguous, packed ones 16-byte aligned, on one CUDA device.")
      .def(
          "__init__",
          [](BoundPlan* self, std::shared_ptr<Kernel> kernel, int64_t n, int64_t k, int64_t groups,
             std::string const& element_a, std::string const& element_d, nb::handle b, nb::handle scale,
             nb::handle zero, nb::handle bias, nb::handle global_scale) {
            new (self)
                BoundPlan(std::move(kernel), n, k, groups, element_a, element_d, b, scale, zero, bias, global_scale);
          },
          "kernel"_a, nb::kw_only(), "n"_a, "k"_a, "groups"_a, "element_a"_a, "element_d"_a, "b"_a.none(),
          "scale"_a.none(), "zero"_a = nb::none(), "bias"_a = nb::none(), "global_scale"_a = nb::none())
      .def_prop_ro("device", &BoundPlan::device, "The CUDA device of the weight.")
      .def_prop_ro("n", &BoundPlan::n, "Columns of D.")
      .def_prop_ro("k", &BoundPlan::k, "Columns of A.")
      .def_prop_ro("kernel", &BoundPlan::kernel, "The kernel that is launched.")
      .def("run", &BoundPlan::run, "a"_a.none(), "d"_a.none(), "stream"_a, "split_k"_a = 1,
           "Puts D = A * W^T on a stream: one launch, no synchronization, no allocation but that of a split-k "
           "workspace.\n\n"
           "a is (..., k) and d (..., n), of the plan's dtypes and device, inner stride 1, leading axes evenly spaced. "
           "stream is a CUstream as an integer, 0 the default stream. Ordering is the caller's: a's producer must come "
           "before on that stream. Without rows nothing is launched.")
      .def("call", &BoundPlan::call, "a"_a.none(), "split_k"_a = 1,
           "Like `run`, on the framework's current stream and into a new tensor (..., n), which is returned. Needs a "
           "tensor "
           "type with __dlpack_c_exchange_api__ (torch 2.10 or newer). The memory is the framework's, but "
           "`Tensor.record_stream` has no effect on the result: use `run` for an output that other streams will read.");
}

}  // namespace humming_cutlass
