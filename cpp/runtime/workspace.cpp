#include "workspace.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

namespace humming_cutlass {
namespace {

/// One growing piece of device memory.
struct Buffer {
  driver::DevicePointer address = 0;
  size_t bytes = 0;

  /// Makes room for `needed` bytes; new memory is zeroed when `zeroed`.
  void reserve(driver::DeviceState const& device, size_t needed, bool zeroed) {
    if (needed <= bytes) {
      return;
    }
    driver::Functions const& f = driver::functions();
    // Growing by half at least keeps all outgrown buffers together below twice the size of the last one.
    size_t const target = std::max(needed, bytes + bytes / 2);
    driver::RelaxedCaptureScope relaxed;
    driver::DevicePointer fresh = 0;
    driver::Result const result = f.cuMemAlloc(&fresh, target);
    if (result != driver::kSuccess) {
      driver::fail(result, "workspace: allocating " + std::to_string(target) + " bytes for split-k on " + device.name);
    }
    if (zeroed) {
      // On the private stream and waited for: the caller's stream may be capturing, and the memory must be zero before
      // any launch, not as a node of one graph.
      driver::Result status = f.cuMemsetD8Async(fresh, 0, target, device.private_stream);
      if (status == driver::kSuccess) {
        status = f.cuStreamSynchronize(device.private_stream);
      }
      if (status != driver::kSuccess) {
        f.cuMemFree(fresh);
        driver::fail(status, "workspace: zeroing counters");
      }
    }
    address = fresh;  // the outgrown buffer is kept alive on purpose, see workspace.hpp
    bytes = target;
  }
};

struct Entry {
  Buffer partial;
  Buffer counters;
};

using Key = std::tuple<int, unsigned long long, bool>;  // device, stream, whether it is capturing

struct Registry {
  std::mutex mutex;
  std::map<Key, Entry> entries;
};

Registry& registry() {
  static Registry* const instance = new Registry;  // not destroyed: the driver may be gone by then
  return *instance;
}

/// What tells a stream from all others, see workspace.hpp. The device's context must be current: 0 is a stream of each.
/// The driver does not name a stream that is capturing: the question would end the capture.
unsigned long long identity(driver::Stream stream, bool capturing) {
  driver::Functions const& f = driver::functions();
  if (capturing || f.cuStreamGetId == nullptr) {
    return reinterpret_cast<uintptr_t>(stream);
  }
  unsigned long long id = 0;
  driver::check(f.cuStreamGetId(stream, &id), "cuStreamGetId");
  return id;
}

constexpr size_t kInitialPartialBytes = size_t(1) << 20;
constexpr size_t kInitialCounterBytes = size_t(1) << 14;

}  // namespace

Workspace workspace(driver::DeviceState const& device, driver::Stream stream, size_t floats, size_t counters) {
  driver::CaptureStatus status = driver::kNotCapturing;
  driver::check(driver::functions().cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  bool const capturing = status != driver::kNotCapturing;
  Key const key(device.ordinal, identity(stream, capturing), capturing);
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  Entry& entry = all.entries[key];
  entry.partial.reserve(device, std::max(floats * sizeof(float), kInitialPartialBytes), false);
  entry.counters.reserve(device, std::max(counters * sizeof(uint32_t), kInitialCounterBytes), true);
  return {reinterpret_cast<float*>(entry.partial.address), reinterpret_cast<uint32_t*>(entry.counters.address)};
}

}  // namespace humming_cutlass
