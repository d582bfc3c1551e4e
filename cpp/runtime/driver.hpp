/// The CUDA driver, opened at run time: the library builds without a CUDA toolkit and is imported without a GPU.
///
/// Only the declarations that are used are here, under short names in `driver`; layouts and values are those of cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "error.hpp"

namespace humming_cutlass::driver {

using Result = int;  // CUresult; 0 is success
using Device = int;
using DevicePointer = unsigned long long;
using Context = struct CUctx_st*;
using Module = struct CUmod_st*;
using Function = struct CUfunc_st*;
using Stream = struct CUstream_st*;

enum ResultCode : Result {
  kSuccess = 0,
  kOutOfMemory = 2,
  kInvalidImage = 200,
  kNoBinaryForGpu = 209,
  kNotFound = 500,
};

enum DeviceAttribute : int {
  kClockRate = 13,
  kMultiprocessorCount = 16,
  kMemoryClockRate = 36,
  kMemoryBusWidth = 37,
  kL2CacheSize = 38,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerBlockOptin = 97,
};

enum FunctionAttribute : int {
  kSharedSizeBytes = 1,
  kMaxDynamicSharedSizeBytes = 8,
  kNonPortableClusterSizeAllowed = 14,
};

enum CaptureMode : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };
enum CaptureStatus : int { kNotCapturing = 0, kCapturing = 1, kCaptureInvalidated = 2 };

inline constexpr unsigned kStreamNonBlocking = 1;

struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int programmatic_stream_serialization;
  } value;
};
inline constexpr int kAttributeClusterDimension = 4;
inline constexpr int kAttributeProgrammaticStreamSerialization = 6;

struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_memory_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct alignas(128) TensorMap {
  uint64_t opaque[16];
};
inline constexpr int kTensorMapFloat16 = 6;
inline constexpr int kTensorMapFloat64 = 8;
inline constexpr int kTensorMapBFloat16 = 9;
inline constexpr int kTensorMapInterleaveNone = 0;
inline constexpr int kTensorMapSwizzleNone = 0;
inline constexpr int kTensorMapSwizzle128B = 3;
inline constexpr int kTensorMapPromotionL2_256B = 3;
inline constexpr int kTensorMapFillZero = 0;

/// The functions of libcuda.so.1 that are used, under their names in cuda.h.
struct Functions {
  Result (*cuGetErrorName)(Result, char const**);
  Result (*cuGetErrorString)(Result, char const**);
  Result (*cuInit)(unsigned);
  Result (*cuDriverGetVersion)(int*);
  Result (*cuDeviceGetCount)(int*);
  Result (*cuDeviceGet)(Device*, int);
  Result (*cuDeviceGetName)(char*, int, Device);
  Result (*cuDeviceTotalMem)(size_t*, Device);
  Result (*cuDeviceGetAttribute)(int*, DeviceAttribute, Device);
  Result (*cuDevicePrimaryCtxRetain)(Context*, Device);
  Result (*cuCtxGetCurrent)(Context*);
  Result (*cuCtxPushCurrent)(Context);
  Result (*cuCtxPopCurrent)(Context*);
  Result (*cuModuleLoadData)(Module*, void const*);
  Result (*cuModuleUnload)(Module);
  Result (*cuModuleGetFunction)(Function*, Module, char const*);
  Result (*cuModuleGetGlobal)(DevicePointer*, size_t*, Module, char const*);
  Result (*cuFuncGetAttribute)(int*, FunctionAttribute, Function);
  Result (*cuFuncSetAttribute)(Function, FunctionAttribute, int);
  Result (*cuLaunchKernelEx)(LaunchConfig const*, Function, void**, void**);
  Result (*cuMemAlloc)(DevicePointer*, size_t);
  Result (*cuMemFree)(DevicePointer);
  Result (*cuMemsetD8Async)(DevicePointer, unsigned char, size_t, Stream);
  Result (*cuMemcpyDtoHAsync)(void*, DevicePointer, size_t, Stream);
  Result (*cuStreamCreate)(Stream*, unsigned);
  Result (*cuStreamSynchronize)(Stream);
  Result (*cuStreamIsCapturing)(Stream, CaptureStatus*);
  Result (*cuThreadExchangeStreamCaptureMode)(CaptureMode*);
  /// Null on drivers older than 12.0: the handle then stands for the stream.
  Result (*cuStreamGetId)(Stream, unsigned long long*);
  /// Null on drivers older than 12.0: only kernels that take a tensor map need it.
  Result (*cuTensorMapEncodeTiled)(TensorMap*, int type, uint32_t rank, void* address, uint64_t const* extents,
                                   uint64_t const* strides, uint32_t const* box, uint32_t const* element_strides,
                                   int interleave, int swizzle, int promotion, int fill);
};

/// Whether libcuda.so.1 can be opened and initialised. Never throws; the first call does the work.
bool available();

/// The driver's functions. Throws LaunchError, which says why, where `available()` is false.
Functions const& functions();

/// Throws LaunchError with the driver's own words unless `result` is success. `what` names the call and its object.
void fail(Result result, std::string const& what);
inline void check(Result result, char const* what) {
  if (result != kSuccess) {
    fail(result, what);
  }
}

/// One GPU: its primary context, retained for the life of the process, and what a launch must know of it.
struct DeviceState {
  int ordinal;
  Device device;
  Context context;
  Stream private_stream;  ///< non-blocking: for work that must not join the caller's stream or its capture
  int major;
  int minor;
  int sm_count;
  int shared_memory_optin;  ///< bytes of shared memory that a CTA may ask for
  std::string name;
};

inline constexpr int kMaxDevices = 64;

/// The state of a device, made on first use. Thread-safe. Throws ArgumentError for an ordinal that does not exist.
DeviceState const& device_state(int ordinal);

/// Whether the primary context of a device is current: what this thread allocates without saying where lies there.
bool is_current(DeviceState const& state);

int attribute(DeviceAttribute which, Device device);

/// The driver's handle of a device. Throws ArgumentError for an ordinal that does not exist. Makes no context.
Device device_handle(int ordinal);

/// Makes a device's primary context current, and puts the previous one back. A new thread has none.
class ContextScope {
 public:
  explicit ContextScope(DeviceState const& state);
  ~ContextScope();
  ContextScope(ContextScope const&) = delete;
  ContextScope& operator=(ContextScope const&) = delete;

 private:
  bool pushed_ = false;
};

/// Lets this thread load modules, allocate and wait for the private stream while a stream is being captured. None of
/// that work is put on the captured stream, so it does not become a part of the graph.
class RelaxedCaptureScope {
 public:
  RelaxedCaptureScope();
  ~RelaxedCaptureScope();
  RelaxedCaptureScope(RelaxedCaptureScope const&) = delete;
  RelaxedCaptureScope& operator=(RelaxedCaptureScope const&) = delete;

 private:
  CaptureMode previous_ = kCaptureRelaxed;
};

}  // namespace humming_cutlass::driver
