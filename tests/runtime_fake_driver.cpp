// A stand-in for libcuda.so.1 for the tests of the runtime on a machine without a GPU. Device memory is host memory; a
// "cubin" is the text FAKE followed by the bytes of a KernelTraits. It enforces the rules that are easy to break: a
// context must be current, and what a capture forbids fails unless the thread's capture mode is relaxed.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "binding/dlpack.hpp"
#include "humming_cutlass/device/arguments.hpp"
#include "runtime/driver.hpp"

using namespace humming_cutlass;
using namespace humming_cutlass::driver;

namespace {

constexpr Result kInvalidContext = 201;
constexpr Result kCaptureUnsupported = 900;
constexpr int kDevices = 2;

struct FakeModule {
  KernelTraits traits;
  uint32_t traits_bytes;
};

// One launch as the tests read it: see `Launch` in runtime_scenarios.py.
struct Launch {
  GemmArguments arguments;
  uint32_t grid, block, shared_memory, cluster, dependent;
  uint64_t stream;
  uint64_t context;
  int32_t has_map;
};

struct Map {
  uint64_t address, extent0, extent1, stride, extent2, stride2;
  uint32_t box0, box1, box2;  // box2 is 0 with two dimensions
  int32_t type, swizzle;
};

thread_local std::vector<Context> stack;
thread_local CaptureMode mode = kCaptureGlobal;
std::set<Stream> capturing;
std::vector<Launch> launches;
std::vector<Map> maps;
int loads = 0;
int allocations = 0;
int static_shared = 0;
int load_result = 0;
uint64_t next_stream = 0x5000;
std::map<uint64_t, unsigned long long> generations;  // of handles: how many streams had them before

// Two threads have different numbers.
unsigned long long thread_number() {
  static std::atomic<unsigned long long> next{1};
  thread_local unsigned long long const number = next++;
  return number;
}

dlpack::ExchangeApi const* torch_api = nullptr;

int borrow(void* object, dlpack::Tensor* out) {
  int const status = torch_api->borrow(object, out);
  out->device.type = dlpack::kCuda;
  return status;
}
int from_object(void* object, dlpack::ManagedTensorVersioned** out) {
  int const status = torch_api->from_object(object, out);
  if (status == 0) {
    (*out)->tensor.device.type = dlpack::kCuda;
  }
  return status;
}
int allocate(dlpack::Tensor* prototype, dlpack::ManagedTensorVersioned** out, void* context,
             void (*set_error)(void*, char const*, char const*)) {
  if (prototype->shape[0] == 13) {
    set_error(context, "MemoryError", "no memory\nbacktrace");
    return -1;
  }
  dlpack::Tensor on_host = *prototype;
  on_host.device.type = dlpack::kCpu;
  return torch_api->allocate(&on_host, out, context, set_error);
}
int current_stream(dlpack::DeviceType, int32_t id, void** out) {
  *out = reinterpret_cast<void*>(uint64_t(0xABC0 + id));
  return 0;
}
dlpack::ExchangeApi fake_api;

bool forbidden() {
  return !capturing.empty() && mode != kCaptureRelaxed;
}

Result need_context() {
  return stack.empty() ? kInvalidContext : kSuccess;
}

}  // namespace

extern "C" {

// What the tests steer and read.

// torch's exchange API, except that its CPU tensors claim to be on a GPU.
dlpack::ExchangeApi const* fake_exchange(dlpack::ExchangeApi const* api) {
  torch_api = api;
  fake_api = *api;
  fake_api.allocate = allocate;
  fake_api.from_object = from_object;
  fake_api.borrow = borrow;
  fake_api.current_stream = current_stream;
  return &fake_api;
}
// Without `borrow`, which a framework may leave out; behind a table of a later major version, which must be skipped.
dlpack::ExchangeApi const* fake_later_exchange() {
  static dlpack::ExchangeApi older = fake_api;
  static dlpack::ExchangeApi later{};
  older.borrow = nullptr;
  later.header = {{2, 0}, &older.header};
  return &later;
}
void fake_capture(uint64_t stream, int on) {
  if (on != 0) {
    capturing.insert(reinterpret_cast<Stream>(stream));
  } else {
    capturing.erase(reinterpret_cast<Stream>(stream));
  }
}
// The stream is destroyed and a new one gets its handle.
void fake_reuse_handle(uint64_t stream) {
  ++generations[stream];
}
void fake_static_shared(int bytes) {
  static_shared = bytes;
}
void fake_load_result(int result) {
  load_result = result;
}
int fake_loads() {
  return loads;
}
int fake_maps() {
  return int(maps.size());
}
void fake_map_back(Map* out, int back) {
  *out = maps[maps.size() - 1 - size_t(back)];
}
int fake_allocations() {
  return allocations;
}
int fake_launches() {
  return int(launches.size());
}
int fake_stack() {
  return int(stack.size());
}
int fake_mode() {
  return mode;
}
void fake_launch(int index, Launch* out) {
  *out = launches.at(size_t(index));
}
void fake_map(Map* out) {
  *out = maps.back();
}

Result cuGetErrorName(Result result, char const** text) {
  *text = result == kInvalidContext ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_OF_THE_FAKE";
  return kSuccess;
}
Result cuGetErrorString(Result, char const** text) {
  *text = "words of the driver";
  return kSuccess;
}
Result cuInit(unsigned) {
  return kSuccess;
}
Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return kSuccess;
}
Result cuDeviceGetCount(int* count) {
  *count = kDevices;
  return kSuccess;
}
Result cuDeviceGet(Device* device, int ordinal) {
  *device = ordinal;
  return kSuccess;
}
Result cuDeviceGetName(char* name, int length, Device) {
  std::strncpy(name, "Fake GPU", size_t(length));
  return kSuccess;
}
Result cuDeviceTotalMem_v2(size_t* bytes, Device) {
  *bytes = size_t(80) << 30;
  return kSuccess;
}
Result cuDeviceGetAttribute(int* value, DeviceAttribute which, Device) {
  switch (which) {
    case kMultiprocessorCount:
      *value = 10;
      break;
    case kComputeCapabilityMajor:
      *value = 9;
      break;
    case kMaxSharedMemoryPerBlockOptin:
      *value = 232448;
      break;
    default:
      *value = int(which) * 1000;
  }
  return kSuccess;
}
Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  *context = reinterpret_cast<Context>(uint64_t(0xC0 + device));
  return kSuccess;
}
Result cuCtxGetCurrent(Context* context) {
  *context = stack.empty() ? nullptr : stack.back();
  return kSuccess;
}
Result cuCtxPushCurrent_v2(Context context) {
  stack.push_back(context);
  return kSuccess;
}
Result cuCtxPopCurrent_v2(Context* context) {
  *context = stack.back();
  stack.pop_back();
  return kSuccess;
}
Result cuModuleLoadData(Module* module, void const* image) {
  if (need_context() != kSuccess) {
    return kInvalidContext;
  }
  if (forbidden()) {
    return kCaptureUnsupported;
  }
  if (load_result != 0) {
    return load_result;
  }
  if (std::memcmp(image, "FAKE", 4) != 0) {
    return kInvalidImage;
  }
  auto* const fake = new FakeModule;
  std::memcpy(&fake->traits, static_cast<char const*>(image) + 4, sizeof(KernelTraits));
  fake->traits_bytes = sizeof(KernelTraits);
  *module = reinterpret_cast<Module>(fake);
  ++loads;
  return kSuccess;
}
Result cuModuleUnload(Module module) {
  delete reinterpret_cast<FakeModule*>(module);
  --loads;
  return kSuccess;
}
Result cuModuleGetFunction(Function* function, Module module, char const* name) {
  *function = reinterpret_cast<Function>(module);
  return std::string(name) == "humming_cutlass_gemm" ? kSuccess : kNotFound;
}
Result cuModuleGetGlobal_v2(DevicePointer* address, size_t* bytes, Module module, char const* name) {
  auto* const fake = reinterpret_cast<FakeModule*>(module);
  *address = reinterpret_cast<DevicePointer>(&fake->traits);
  *bytes = fake->traits_bytes;
  return std::string(name) == "humming_cutlass_traits" ? kSuccess : kNotFound;
}
Result cuFuncGetAttribute(int* value, FunctionAttribute, Function) {
  *value = static_shared;
  return kSuccess;
}
Result cuFuncSetAttribute(Function, FunctionAttribute, int) {
  return need_context();
}
Result cuLaunchKernelEx(LaunchConfig const* config, Function, void** parameters, void**) {
  if (need_context() != kSuccess) {
    return kInvalidContext;
  }
  Launch launch{};
  launch.arguments = *static_cast<GemmArguments const*>(parameters[0]);
  launch.has_map = parameters[1] != nullptr ? 1 : 0;
  launch.grid = config->grid_x * config->grid_y * config->grid_z;
  launch.block = config->block_x;
  launch.shared_memory = config->shared_memory_bytes;
  launch.stream = reinterpret_cast<uint64_t>(config->stream);
  launch.context = reinterpret_cast<uint64_t>(stack.back());
  launch.cluster = 1;
  launch.dependent = 0;
  for (unsigned i = 0; i < config->attribute_count; ++i) {
    if (config->attributes[i].id == kAttributeClusterDimension) {
      launch.cluster = config->attributes[i].value.cluster.x;
    } else if (config->attributes[i].id == kAttributeProgrammaticStreamSerialization) {
      launch.dependent = uint32_t(config->attributes[i].value.programmatic_stream_serialization);
    }
  }
  launches.push_back(launch);
  return kSuccess;
}
Result cuMemAlloc_v2(DevicePointer* address, size_t bytes) {
  if (need_context() != kSuccess) {
    return kInvalidContext;
  }
  if (forbidden()) {
    return kCaptureUnsupported;
  }
  if (bytes > (size_t(1) << 28)) {
    return kOutOfMemory;
  }
  void* const memory = std::malloc(bytes);
  std::memset(memory, 0xFF, bytes);  // fresh memory is not zero
  *address = reinterpret_cast<DevicePointer>(memory);
  ++allocations;
  return kSuccess;
}
Result cuMemFree_v2(DevicePointer address) {
  std::free(reinterpret_cast<void*>(address));
  return kSuccess;
}
Result cuMemsetD8Async(DevicePointer address, unsigned char value, size_t bytes, Stream stream) {
  if (capturing.count(stream) != 0) {
    return kCaptureUnsupported;  // the zeroing would become a node of the graph
  }
  std::memset(reinterpret_cast<void*>(address), value, bytes);
  return need_context();
}
Result cuMemcpyDtoHAsync_v2(void* target, DevicePointer source, size_t bytes, Stream stream) {
  if (stream == nullptr || capturing.count(stream) != 0) {
    return kCaptureUnsupported;
  }
  std::memcpy(target, reinterpret_cast<void const*>(source), bytes);
  return need_context();
}
Result cuStreamCreate(Stream* stream, unsigned flags) {
  if (need_context() != kSuccess || flags != kStreamNonBlocking) {
    return kInvalidContext;
  }
  *stream = reinterpret_cast<Stream>(++next_stream);
  return kSuccess;
}
Result cuStreamSynchronize(Stream stream) {
  return capturing.count(stream) != 0 ? kCaptureUnsupported : kSuccess;
}
Result cuStreamIsCapturing(Stream stream, CaptureStatus* status) {
  *status = capturing.count(stream) != 0 ? kCapturing : kNotCapturing;
  return kSuccess;
}
#ifndef WITHOUT_STREAM_IDS  // as drivers older than 12.0 are
Result cuStreamGetId(Stream stream, unsigned long long* id) {
  if (capturing.count(stream) != 0) {
    return kCaptureUnsupported;
  }
  constexpr uint64_t per_thread_default = 2;
  auto const handle = reinterpret_cast<uint64_t>(stream);
  auto const generation = generations.find(handle);
  *id = handle << 16 | (handle == per_thread_default      ? thread_number()
                        : generation == generations.end() ? 0ull
                                                          : generation->second);
  return need_context();
}
#endif
Result cuThreadExchangeStreamCaptureMode(CaptureMode* exchanged) {
  CaptureMode const old = mode;
  mode = *exchanged;
  *exchanged = old;
  return kSuccess;
}
Result cuTensorMapEncodeTiled(driver::TensorMap*, int type, uint32_t rank, void* address, uint64_t const* extents,
                              uint64_t const* strides, uint32_t const* box, uint32_t const*, int, int swizzle, int,
                              int) {
  bool const deep = rank == 3;
  maps.push_back({reinterpret_cast<uint64_t>(address), extents[0], extents[1], strides[0], deep ? extents[2] : 0,
                  deep ? strides[1] : 0, box[0], box[1], deep ? box[2] : 0, type, swizzle});
  return rank == 2 || deep ? kSuccess : 1;
}
}
