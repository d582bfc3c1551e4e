#include "driver.hpp"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace humming_cutlass::driver {
namespace {

struct Library {
  Functions functions{};
  std::string error;  ///< why the driver cannot be used; empty where it can
};

/// Finds one function. The first one that is missing is what the user is told.
template <class F>
void resolve(void* handle, char const* name, F*& function, std::string& error) {
  function = reinterpret_cast<F*>(dlsym(handle, name));
  if (function == nullptr && error.empty()) {
    error = std::string("libcuda.so.1 has no ") + name + ": the NVIDIA driver is too old, 11.8 or newer is needed";
  }
}

Library open() {
  Library library;
  // The library is never closed: contexts, modules and streams live as long as the process.
  void* const handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    char const* const reason = dlerror();
    library.error = std::string("no usable NVIDIA driver: ") + (reason != nullptr ? reason : "libcuda.so.1 not found");
    return library;
  }
  Functions& f = library.functions;
  std::string& error = library.error;
  resolve(handle, "cuGetErrorName", f.cuGetErrorName, error);
  resolve(handle, "cuGetErrorString", f.cuGetErrorString, error);
  resolve(handle, "cuInit", f.cuInit, error);
  resolve(handle, "cuDriverGetVersion", f.cuDriverGetVersion, error);
  resolve(handle, "cuDeviceGetCount", f.cuDeviceGetCount, error);
  resolve(handle, "cuDeviceGet", f.cuDeviceGet, error);
  resolve(handle, "cuDeviceGetName", f.cuDeviceGetName, error);
  resolve(handle, "cuDeviceTotalMem_v2", f.cuDeviceTotalMem, error);
  resolve(handle, "cuDeviceGetAttribute", f.cuDeviceGetAttribute, error);
  resolve(handle, "cuDevicePrimaryCtxRetain", f.cuDevicePrimaryCtxRetain, error);
  resolve(handle, "cuCtxGetCurrent", f.cuCtxGetCurrent, error);
  resolve(handle, "cuCtxPushCurrent_v2", f.cuCtxPushCurrent, error);
  resolve(handle, "cuCtxPopCurrent_v2", f.cuCtxPopCurrent, error);
  resolve(handle, "cuModuleLoadData", f.cuModuleLoadData, error);
  resolve(handle, "cuModuleUnload", f.cuModuleUnload, error);
  resolve(handle, "cuModuleGetFunction", f.cuModuleGetFunction, error);
  resolve(handle, "cuModuleGetGlobal_v2", f.cuModuleGetGlobal, error);
  resolve(handle, "cuFuncGetAttribute", f.cuFuncGetAttribute, error);
  resolve(handle, "cuFuncSetAttribute", f.cuFuncSetAttribute, error);
  resolve(handle, "cuLaunchKernelEx", f.cuLaunchKernelEx, error);
  resolve(handle, "cuMemAlloc_v2", f.cuMemAlloc, error);
  resolve(handle, "cuMemFree_v2", f.cuMemFree, error);
  resolve(handle, "cuMemsetD8Async", f.cuMemsetD8Async, error);
  resolve(handle, "cuMemcpyDtoHAsync_v2", f.cuMemcpyDtoHAsync, error);
  resolve(handle, "cuStreamCreate", f.cuStreamCreate, error);
  resolve(handle, "cuStreamSynchronize", f.cuStreamSynchronize, error);
  resolve(handle, "cuStreamIsCapturing", f.cuStreamIsCapturing, error);
  resolve(handle, "cuThreadExchangeStreamCaptureMode", f.cuThreadExchangeStreamCaptureMode, error);
  std::string optional;
  resolve(handle, "cuStreamGetId", f.cuStreamGetId, optional);
  resolve(handle, "cuTensorMapEncodeTiled", f.cuTensorMapEncodeTiled, optional);
  if (!error.empty()) {
    return library;
  }
  Result const result = f.cuInit(0);
  if (result != kSuccess) {
    char const* name = nullptr;
    char const* text = nullptr;
    f.cuGetErrorName(result, &name);
    f.cuGetErrorString(result, &text);
    error = std::string("no usable NVIDIA driver: cuInit failed with ") +
            (name != nullptr ? name : "an unknown error") + " (" + (text != nullptr ? text : std::to_string(result)) +
            ")";
  }
  return library;
}

Library const& library() {
  static Library const* const instance = new Library(open());  // not destroyed: used by destructors at exit
  return *instance;
}

std::atomic<DeviceState const*> states[kMaxDevices];
std::mutex states_mutex;

}  // namespace

bool available() {
  return library().error.empty();
}

Functions const& functions() {
  Library const& instance = library();
  if (!instance.error.empty()) {
    throw LaunchError(instance.error);
  }
  return instance.functions;
}

void fail(Result result, std::string const& what) {
  Functions const& f = functions();
  char const* name = nullptr;
  char const* text = nullptr;
  f.cuGetErrorName(result, &name);
  f.cuGetErrorString(result, &text);
  throw LaunchError(what + ": the CUDA driver reports " + (name != nullptr ? name : std::to_string(result)) + " (" +
                    (text != nullptr ? text : "unknown error") + ")");
}

int attribute(DeviceAttribute which, Device device) {
  int value = 0;
  check(functions().cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

Device device_handle(int ordinal) {
  Functions const& f = functions();
  int count = 0;
  check(f.cuDeviceGetCount(&count), "cuDeviceGetCount");
  count = count < kMaxDevices ? count : kMaxDevices;
  if (ordinal < 0 || ordinal >= count) {
    throw ArgumentError("device", std::to_string(ordinal),
                        count == 0 ? "nothing: no GPU is visible" : "0 to " + std::to_string(count - 1));
  }
  Device device = 0;
  check(f.cuDeviceGet(&device, ordinal), "cuDeviceGet");
  return device;
}

DeviceState const& device_state(int ordinal) {
  if (ordinal >= 0 && ordinal < kMaxDevices) {
    if (DeviceState const* const known = states[ordinal].load(std::memory_order_acquire)) {
      return *known;
    }
  }
  Device const device = device_handle(ordinal);
  std::lock_guard<std::mutex> lock(states_mutex);
  if (DeviceState const* const known = states[ordinal].load(std::memory_order_acquire)) {
    return *known;
  }
  Functions const& f = functions();
  auto state = std::make_unique<DeviceState>();
  state->ordinal = ordinal;
  state->device = device;
  state->major = attribute(kComputeCapabilityMajor, device);
  state->minor = attribute(kComputeCapabilityMinor, device);
  state->sm_count = attribute(kMultiprocessorCount, device);
  state->shared_memory_optin = attribute(kMaxSharedMemoryPerBlockOptin, device);
  char name[256] = {};
  check(f.cuDeviceGetName(name, int(sizeof(name)) - 1, device), "cuDeviceGetName");
  state->name = name;
  RelaxedCaptureScope relaxed;
  check(f.cuDevicePrimaryCtxRetain(&state->context, device), "cuDevicePrimaryCtxRetain");
  {
    ContextScope scope(*state);
    check(f.cuStreamCreate(&state->private_stream, kStreamNonBlocking), "cuStreamCreate");
  }
  DeviceState const* const made = state.release();  // lives as long as the process
  states[ordinal].store(made, std::memory_order_release);
  return *made;
}

bool is_current(DeviceState const& state) {
  Context current = nullptr;
  check(functions().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  return current == state.context;
}

ContextScope::ContextScope(DeviceState const& state) {
  if (!is_current(state)) {
    check(functions().cuCtxPushCurrent(state.context), "cuCtxPushCurrent");
    pushed_ = true;
  }
}

ContextScope::~ContextScope() {
  if (pushed_) {
    Context popped = nullptr;
    functions().cuCtxPopCurrent(&popped);
  }
}

RelaxedCaptureScope::RelaxedCaptureScope() {
  check(functions().cuThreadExchangeStreamCaptureMode(&previous_), "cuThreadExchangeStreamCaptureMode");
}

RelaxedCaptureScope::~RelaxedCaptureScope() {
  functions().cuThreadExchangeStreamCaptureMode(&previous_);
}

}  // namespace humming_cutlass::driver
