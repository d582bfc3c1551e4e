/// A compiled kernel: a cubin file, loaded on first use into the primary context of each device that runs it.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.hpp"
#include "humming_cutlass/device/arguments.hpp"

namespace humming_cutlass {

/// A kernel that is loaded on one device, ready to launch.
struct LoadedKernel {
  driver::Module module;
  driver::Function function;
  KernelTraits traits;
};

/// Thread-safe. Constructing one opens nothing: the file is read when a device first needs it, also under capture.
class Kernel {
 public:
  /// `entry` is the name of the `extern "C"` __global__ function in the cubin at `path`.
  Kernel(std::string path, std::string entry);
  ~Kernel() = default;  // modules stay loaded: a captured graph may still launch them
  Kernel(Kernel const&) = delete;
  Kernel& operator=(Kernel const&) = delete;

  std::string const& path() const { return path_; }
  std::string const& entry() const { return entry_; }

  /// The kernel on a device if it is loaded there, else null. Costs one atomic load.
  LoadedKernel const* find(int ordinal) const {
    return ordinal >= 0 && ordinal < driver::kMaxDevices ? loaded_[ordinal].load(std::memory_order_acquire) : nullptr;
  }

  /// The kernel on a device, loading it if need be. Throws LaunchError where the file cannot be read, was built for
  /// another GPU or another version of this library, or needs more shared memory than the device has.
  LoadedKernel const& on(driver::DeviceState const& device);

 private:
  std::unique_ptr<LoadedKernel> load(driver::DeviceState const& device) const;

  std::string path_;
  std::string entry_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<LoadedKernel>> owned_;
  std::atomic<LoadedKernel const*> loaded_[driver::kMaxDevices] = {};
};

}  // namespace humming_cutlass
