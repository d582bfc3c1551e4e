/// The structs of DLPack 1.3 that tensors come in by; layouts and names are those of dlpack.h.
#pragma once

#include <cstdint>

namespace humming_cutlass::dlpack {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBFloat = 4,
  kFloat8E4M3 = 10,
  kFloat8E5M2 = 12,
  kFloat8E8M0 = 14
};

struct Device {
  DeviceType type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  ///< in elements; null means contiguous (before DLPack 1.2)
  uint64_t byte_offset;
};

/// What a capsule named "dltensor" holds.
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

inline constexpr uint32_t kMajor = 1;
inline constexpr uint64_t kReadOnly = 1;

/// What a capsule named "dltensor_versioned" holds.
struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  Tensor tensor;
};

struct ExchangeHeader {
  Version version;
  ExchangeHeader* previous;
};

/// A framework's function table, the content of the capsule `type(tensor).__dlpack_c_exchange_api__`. Functions return
/// 0, or -1 with a Python exception set. None of them synchronizes.
struct ExchangeApi {
  ExchangeHeader header;
  int (*allocate)(Tensor* prototype, ManagedTensorVersioned** out, void* error_context,
                  void (*set_error)(void* error_context, char const* kind, char const* message));
  int (*from_object)(void* object, ManagedTensorVersioned** out);
  int (*to_object)(ManagedTensorVersioned* tensor, void** out);  ///< takes ownership of `tensor`
  int (*borrow)(void* object, Tensor* out);                      ///< valid while `object` lives unchanged; may be null
  int (*current_stream)(DeviceType type, int32_t id, void** out);
};

}  // namespace humming_cutlass::dlpack
