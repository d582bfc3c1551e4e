/// The CUDA runtime in Python: device properties, kernels, GEMM plans.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "bound_plan.hpp"
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
  result["slab_atoms"] = traits.slab_atoms;
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
           "tile_k, cluster_size, cluster_split_k, persistent, max_m, dependent_launch, box_m, slab_atoms, box_n, "
           "box_b, box_scale, box_zero. "
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
