#include "kernel.hpp"

#include <fstream>
#include <iterator>
#include <utility>

namespace humming_cutlass {
namespace {

constexpr char const* kTraitsSymbol = "humming_cutlass_traits";
constexpr int kPortableClusterSize = 8;  // larger ones exist on some GPUs only and must be allowed per function

std::vector<char> read_file(std::string const& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file || bytes.empty()) {
    throw LaunchError("cubin_path", "'" + path + "', which cannot be read", "a cubin that was compiled for this GPU");
  }
  return bytes;
}

/// Unloads the module unless it is released: a load that fails half-way leaves nothing behind.
class ModuleGuard {
 public:
  explicit ModuleGuard(driver::Module module) : module_(module) {}
  ~ModuleGuard() {
    if (module_ != nullptr) {
      driver::functions().cuModuleUnload(module_);
    }
  }
  ModuleGuard(ModuleGuard const&) = delete;
  ModuleGuard& operator=(ModuleGuard const&) = delete;
  driver::Module get() const { return module_; }
  driver::Module release() { return std::exchange(module_, nullptr); }

 private:
  driver::Module module_;
};

KernelTraits read_traits(driver::Module module, driver::DeviceState const& device, std::string const& path) {
  driver::Functions const& f = driver::functions();
  driver::DevicePointer address = 0;
  size_t bytes = 0;
  driver::Result const result = f.cuModuleGetGlobal(&address, &bytes, module, kTraitsSymbol);
  if (result == driver::kNotFound) {
    throw LaunchError("cubin_path", "'" + path + "' without the symbol " + kTraitsSymbol, "a kernel of this library");
  }
  driver::check(result, "cuModuleGetGlobal");
  KernelTraits traits{};
  // A copy on the default stream would wait for, or be refused because of, a capture: the private stream joins nothing.
  size_t const readable = bytes < sizeof(traits) ? bytes : sizeof(traits);
  driver::check(f.cuMemcpyDtoHAsync(&traits, address, readable, device.private_stream), "cuMemcpyDtoHAsync");
  driver::check(f.cuStreamSynchronize(device.private_stream), "cuStreamSynchronize");
  if (bytes < sizeof(int32_t) || traits.version != kKernelTraitsVersion || bytes != sizeof(traits)) {
    throw LaunchError("cubin_path",
                      "'" + path + "' with kernel traits of version " + std::to_string(traits.version) + ", " +
                          std::to_string(bytes) + " bytes",
                      "version " + std::to_string(kKernelTraitsVersion) + ", " + std::to_string(sizeof(traits)) +
                          " bytes: compile the kernel again with the headers of this library");
  }
  if (traits.threads < 1 || traits.smem_bytes < 0 || traits.tile_m < 1 || traits.tile_n < 1 || traits.tile_k < 1 ||
      traits.cluster_size < 1 || traits.max_m < 0 || traits.box_m < 0 || traits.box_m > 256 || traits.slab_atoms < 0 ||
      (traits.slab_atoms > 0 && (traits.max_m < 1 || traits.max_m > decode_blocks_a(1, traits.slab_atoms))) ||
      traits.slab_atoms > 256 || traits.box_n < 0 || traits.box_n > 256 || traits.box_b < 0 || traits.box_b > 256 ||
      traits.box_scale < 0 || traits.box_scale > 256 || traits.box_zero < 0 || traits.box_zero > 256) {
    throw LaunchError("cubin_path", "'" + path + "' with impossible kernel traits",
                      "positive threads, tiles and cluster size, and boxes of at most 256 x 256");
  }
  return traits;
}

}  // namespace

Kernel::Kernel(std::string path, std::string entry) : path_(std::move(path)), entry_(std::move(entry)) {}

LoadedKernel const& Kernel::on(driver::DeviceState const& device) {
  if (LoadedKernel const* const known = find(device.ordinal)) {
    return *known;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (LoadedKernel const* const known = find(device.ordinal)) {
    return *known;
  }
  owned_.push_back(load(device));
  LoadedKernel const* const made = owned_.back().get();
  loaded_[device.ordinal].store(made, std::memory_order_release);
  return *made;
}

std::unique_ptr<LoadedKernel> Kernel::load(driver::DeviceState const& device) const {
  driver::Functions const& f = driver::functions();
  std::vector<char> const image = read_file(path_);
  driver::ContextScope scope(device);
  driver::RelaxedCaptureScope relaxed;

  driver::Module handle = nullptr;
  driver::Result const result = f.cuModuleLoadData(&handle, image.data());
  if (result == driver::kNoBinaryForGpu || result == driver::kInvalidImage) {
    throw LaunchError("cubin_path", "'" + path_ + "'",
                      "a cubin that was compiled for " + device.name + ", compute capability " +
                          std::to_string(device.major) + "." + std::to_string(device.minor));
  }
  if (result != driver::kSuccess) {
    driver::fail(result, "loading '" + path_ + "' on " + device.name);
  }
  ModuleGuard module(handle);

  auto kernel = std::make_unique<LoadedKernel>();
  driver::Result const found = f.cuModuleGetFunction(&kernel->function, module.get(), entry_.c_str());
  if (found == driver::kNotFound) {
    throw LaunchError("entry", "'" + entry_ + "'", "the name of a kernel in '" + path_ + "'");
  }
  driver::check(found, "cuModuleGetFunction");
  kernel->traits = read_traits(module.get(), device, path_);

  KernelTraits const& traits = kernel->traits;
  int static_bytes = 0;
  driver::check(f.cuFuncGetAttribute(&static_bytes, driver::kSharedSizeBytes, kernel->function), "cuFuncGetAttribute");
  if (traits.smem_bytes > device.shared_memory_optin - static_bytes) {
    throw LaunchError("smem_bytes",
                      std::to_string(traits.smem_bytes) + " bytes of dynamic and " + std::to_string(static_bytes) +
                          " of static shared memory, needed by '" + path_ + "'",
                      "at most " + std::to_string(device.shared_memory_optin) + " bytes together on " + device.name);
  }
  driver::check(f.cuFuncSetAttribute(kernel->function, driver::kMaxDynamicSharedSizeBytes, traits.smem_bytes),
                "cuFuncSetAttribute(max dynamic shared memory)");
  if (traits.cluster_size > kPortableClusterSize) {
    driver::check(f.cuFuncSetAttribute(kernel->function, driver::kNonPortableClusterSizeAllowed, 1),
                  "cuFuncSetAttribute(non-portable cluster size)");
  }
  kernel->module = module.release();
  return kernel;
}

}  // namespace humming_cutlass
