#include "gemm_plan.hpp"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "workspace.hpp"

namespace humming_cutlass {

/// Tensor maps of activations and all that they were made from. They describe memory, not what the memory holds.
struct EncodedA {
  void* data;
  int64_t rows;
  int64_t stride;
  int32_t k;
  int32_t box_m;
  int32_t box_atoms;
  Element element;
  driver::TensorMap map;   ///< in whole boxes
  driver::TensorMap rest;  ///< in boxes of the rows that remain
};

namespace {

constexpr int64_t kMaxGrid = 2147483647;  // CTAs along x of a grid; kernels count tiles in an int32
/// The largest n and k: kernels round them up to tiles, and count the 64-bit words of an atom row, in an int32.
constexpr int32_t kMaxExtent = (1 << 30) - (1 << 16);
constexpr int64_t kBoxBytes = 128;  // a box row: the span of the 128-byte swizzle
constexpr int64_t kTensorMapAlignment = 16;
constexpr int64_t kAtomRows = 16;
constexpr int kPortableClusterSize = 8;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
constexpr int64_t round_up(int64_t a, int64_t b) {
  return ceil_div(a, b) * b;
}

/// Whether HUMMING_CUTLASS_PDL asks for programmatic dependent launch. Read on every call: a caller that knows that no
/// kernel before it in the stream writes the weight may switch it on around its calls.
bool dependent_launch_wanted() {
  char const* const value = std::getenv("HUMMING_CUTLASS_PDL");
  return value != nullptr && value[0] == '1' && value[1] == '\0';
}

/// The place in this thread of the map for activations at an address. An allocator hands out few addresses again and
/// again, and encoding takes several times what a look takes.
EncodedA& encoded_a(void const* data) {
  constexpr size_t count = 32;
  static thread_local EncodedA known[count];
  auto const address = reinterpret_cast<uintptr_t>(data);
  return known[(address >> 4 ^ address >> 9 ^ address >> 14) % count];
}

void require_tensor_maps() {
  if (driver::functions().cuTensorMapEncodeTiled == nullptr) {
    throw LaunchError("this kernel copies through tensor maps, which need an NVIDIA driver of CUDA 12.0 or newer");
  }
}

}  // namespace

char const* name_of(Element element) {
  switch (element) {
    case Element::kFloat16:
      return "float16";
    case Element::kBFloat16:
      return "bfloat16";
    default:
      return "float32";
  }
}

int bytes_of(Element element) {
  return element == Element::kFloat32 ? 4 : 2;
}

GemmPlan::GemmPlan(std::shared_ptr<Kernel> kernel, GemmWeight const& weight, Element element_a, Element element_d)
    : kernel_(std::move(kernel)), weight_(weight), element_a_(element_a), element_d_(element_d) {
  if (element_a == Element::kFloat32) {
    throw ArgumentTypeError("element_a", "float32", "float16 or bfloat16");
  }
  if (weight.n < 1 || weight.k < 1 || weight.groups < 1 || weight.n > kMaxExtent || weight.k > kMaxExtent) {
    throw ArgumentError(
        "n, k, groups",
        std::to_string(weight.n) + ", " + std::to_string(weight.k) + ", " + std::to_string(weight.groups),
        "positive integers, n and k at most " + std::to_string(kMaxExtent));
  }
}

void GemmPlan::prepare() {
  driver::DeviceState const& device = driver::device_state(weight_.device);
  LoadedKernel const& loaded = kernel_->on(device);
  std::lock_guard<std::mutex> const lock(prepare_mutex_);
  if (prepared()) {
    return;
  }
  encode_weight(loaded.traits);
  device_.store(&device, std::memory_order_relaxed);
  loaded_.store(&loaded, std::memory_order_release);
}

driver::TensorMap GemmPlan::encode_packed(void const* pointer, int64_t row_bytes, int box_words,
                                          KernelTraits const& traits) const {
  constexpr int64_t word_bytes = 8;
  uint64_t const extents[2] = {uint64_t(row_bytes / word_bytes), uint64_t(ceil_div(weight_.n, kAtomRows))};
  uint64_t const strides[1] = {uint64_t(row_bytes)};
  uint32_t const box[2] = {uint32_t(box_words), uint32_t(traits.box_n)};
  uint32_t const element_strides[2] = {1, 1};
  driver::TensorMap map;
  driver::check(driver::functions().cuTensorMapEncodeTiled(
                    &map, driver::kTensorMapFloat64, 2, const_cast<void*>(pointer), extents, strides, box,
                    element_strides, driver::kTensorMapInterleaveNone, driver::kTensorMapSwizzleNone,
                    driver::kTensorMapPromotionL2_256B, driver::kTensorMapFillZero),
                "cuTensorMapEncodeTiled");
  return map;
}

void GemmPlan::encode_weight(KernelTraits const& traits) {
  if (traits.box_b > 0) {
    require_tensor_maps();
    map_b_ = encode_packed(weight_.b, weight_.row_bytes_b, traits.box_b, traits);
  }
  if (traits.box_scale > 0) {
    map_scale_ = encode_packed(weight_.scale, weight_.row_bytes_scale, traits.box_scale, traits);
  }
  if (traits.box_zero > 0) {
    map_zero_ = encode_packed(weight_.zero, weight_.row_bytes_zero, traits.box_zero, traits);
  }
}

EncodedA const& GemmPlan::maps_of_a(Matrix const& a, KernelTraits const& traits, int slab_atoms) const {
  EncodedA& known = encoded_a(a.data);
  auto const m = int32_t(a.rows);
  int const box_atoms = slab_atoms > 0 ? decode_box_atoms(m, slab_atoms, traits.slab_atoms) : 0;
  if (known.data != a.data || known.rows != a.rows || known.stride != a.stride || known.k != weight_.k ||
      known.box_m != traits.box_m || known.box_atoms != box_atoms || known.element != element_a_) {
    known.data = nullptr;  // while it is being changed: encoding may throw
    int const box_m = box_atoms > 0 ? m : traits.box_m;
    if (m >= box_m) {
      known.map = encode_a(a, box_m, box_atoms);
    }
    if (m % box_m != 0) {
      known.rest = encode_a(a, m % box_m, box_atoms);
    }
    known = {a.data, a.rows, a.stride, weight_.k, traits.box_m, box_atoms, element_a_, known.map, known.rest};
  }
  return known;
}

driver::TensorMap GemmPlan::encode_a(Matrix const& a, int box_m, int box_atoms) const {
  driver::Functions const& f = driver::functions();
  require_tensor_maps();
  int64_t const element_bytes = bytes_of(element_a_);
  if (reinterpret_cast<uintptr_t>(a.data) % kTensorMapAlignment != 0) {
    throw ArgumentError("a", "a data pointer that is not 16-byte aligned", "16-byte aligned rows for this kernel");
  }
  if (a.stride * element_bytes % kTensorMapAlignment != 0 || a.stride < 1) {
    throw ArgumentError(
        "a", "a row stride of " + std::to_string(a.stride) + " elements",
        "a positive multiple of " + std::to_string(kTensorMapAlignment / element_bytes) + " for this kernel");
  }
  // In boxes of one atom's columns (columns, rows), or of several (columns of an atom, rows, atoms).
  uint64_t const columns = box_atoms > 0 ? kAtomColumns : weight_.k;
  uint64_t const extents[3] = {columns, uint64_t(a.rows), uint64_t(weight_.k / kAtomColumns)};
  uint64_t const strides[2] = {uint64_t(a.stride * element_bytes), uint64_t(kBoxBytes)};
  uint32_t const box[3] = {uint32_t(kAtomColumns), uint32_t(box_m), uint32_t(box_atoms)};
  uint32_t const element_strides[3] = {1, 1, 1};
  driver::TensorMap map;
  driver::check(
      f.cuTensorMapEncodeTiled(
          &map, element_a_ == Element::kBFloat16 ? driver::kTensorMapBFloat16 : driver::kTensorMapFloat16,
          box_atoms > 0 ? 3 : 2, a.data, extents, strides, box, element_strides, driver::kTensorMapInterleaveNone,
          driver::kTensorMapSwizzle128B, driver::kTensorMapPromotionL2_256B, driver::kTensorMapFillZero),
      "cuTensorMapEncodeTiled");
  return map;
}

void GemmPlan::run(Matrix const& a, Matrix const& d, driver::Stream stream, int split_k) {
  if (a.rows != d.rows) {
    throw ArgumentError("d", std::to_string(d.rows) + " rows", std::to_string(a.rows) + " rows, as a has");
  }
  if (a.rows == 0) {
    return;
  }
  if (!prepared()) {
    prepare();
  }
  driver::DeviceState const& device = *device_.load(std::memory_order_relaxed);
  LoadedKernel const& kernel = *loaded_.load(std::memory_order_acquire);
  KernelTraits const& traits = kernel.traits;
  int64_t const m = a.rows;

  if (traits.max_m > 0 && m > traits.max_m) {
    throw ArgumentError("m", std::to_string(m), "at most " + std::to_string(traits.max_m) + " for this kernel");
  }
  if (traits.max_m > 0 && split_k != 1) {
    throw ArgumentError("split_k", std::to_string(split_k), "1: this kernel, for few rows, takes the whole of k");
  }
  int64_t const k_tiles = ceil_div(weight_.k, traits.tile_k);
  bool const can_stream = traits.persistent != 0 && traits.cluster_split_k != 0 && traits.cluster_size == 1;
  bool const streams = split_k == 0 && can_stream;
  if (!streams && (split_k < 1 || split_k > k_tiles)) {
    throw ArgumentError("split_k", std::to_string(split_k),
                        "1 to " + std::to_string(k_tiles) + ", the tiles of " + std::to_string(traits.tile_k) +
                            " along k " + std::to_string(weight_.k) + (can_stream ? ", or 0, stream-k" : ""));
  }
  bool const in_cluster = traits.cluster_split_k != 0 && split_k > 1;
  int64_t const cluster_size = in_cluster ? split_k : traits.cluster_size;
  if (in_cluster && split_k > kPortableClusterSize) {
    throw ArgumentError("split_k", std::to_string(split_k),
                        "1 to " + std::to_string(kPortableClusterSize) + ", the CTAs of a cluster");
  }
  // CTAs that walk over tiles in clusters take neighbours along n together.
  bool const by_cluster = traits.persistent != 0 && !in_cluster;
  int64_t const n_tiles = round_up(ceil_div(weight_.n, traits.tile_n), by_cluster ? traits.cluster_size : 1);
  int64_t const m_tiles_max = (kMaxGrid - cluster_size + 1) / (n_tiles * (streams ? k_tiles : split_k));
  int64_t const m_tiles = ceil_div(m, traits.tile_m);
  int64_t const m_max = std::min(m_tiles_max * traits.tile_m, kMaxGrid - traits.tile_m + 1);  // kernels round m up
  if (m_tiles > m_tiles_max || m > m_max) {
    throw ArgumentError("m", std::to_string(m),
                        "at most " + std::to_string(m_max) + " for n " + std::to_string(weight_.n) + " and split_k " +
                            std::to_string(split_k));
  }
  int64_t const tiles = m_tiles * n_tiles;
  int64_t grid = round_up(tiles * (streams ? k_tiles : split_k), cluster_size);
  if (traits.persistent != 0 && !in_cluster) {
    // One CTA per SM at most; clusters are whole, so the SMs that do not fill one stay idle.
    int64_t const resident = device.sm_count / traits.cluster_size * traits.cluster_size;
    grid = std::min(grid, std::max<int64_t>(resident, traits.cluster_size));
  }

  GemmArguments arguments;
  arguments.ptr_a = a.data;
  arguments.ptr_b = weight_.b;
  arguments.ptr_scale = weight_.scale;
  arguments.ptr_zero = weight_.zero;
  arguments.ptr_global_scale = weight_.global_scale;
  arguments.ptr_bias = weight_.bias;
  arguments.ptr_d = d.data;
  arguments.ptr_partial = nullptr;
  arguments.ptr_counter = nullptr;
  arguments.stride_a = a.stride;
  arguments.stride_d = d.stride;
  arguments.m = int32_t(m);
  arguments.n = weight_.n;
  arguments.k = weight_.k;
  arguments.groups = weight_.groups;
  arguments.split_k = split_k;
  arguments.slab_atoms = 0;
  arguments.box_bytes_a = 0;
  if (traits.slab_atoms == 0) {
    arguments.shares = streams ? deal(tiles * k_tiles, grid) : deal(k_tiles, split_k);
  } else {
    int64_t const atom_rows = ceil_div(weight_.n, kAtomRows);
    arguments.shares = deal(atom_rows, grid);
    auto const most = int32_t(ceil_div(atom_rows, grid));
    arguments.slab_atoms = decode_slab_atoms(int32_t(m), weight_.k, most, traits.slab_atoms);
  }
  arguments.short_slab_warp = decode_short_slab_warp(weight_.k, arguments.slab_atoms);

  driver::ContextScope scope(device);
  if (streams || (split_k > 1 && !in_cluster)) {
    int64_t const parts = streams ? grid : tiles * split_k;
    int64_t const floats = parts * traits.tile_m * traits.tile_n;
    Workspace const scratch = workspace(device, stream, size_t(floats), size_t(streams ? grid : tiles));
    arguments.ptr_partial = scratch.partial;
    arguments.ptr_counter = scratch.counters;
  }

  struct {  // TensorMaps of device/arguments.hpp
    driver::TensorMap a;
    driver::TensorMap a_rest;
    driver::TensorMap b;
    driver::TensorMap scale;
    driver::TensorMap zero;
  } maps{};
  static_assert(sizeof(maps) == sizeof(TensorMaps));
  void* parameters[2] = {&arguments, nullptr};
  if (traits.box_m > 0) {
    auto const address = reinterpret_cast<uint64_t>(a.data);
    if (traits.slab_atoms == 0 || decode_maps_a(address, a.stride * bytes_of(element_a_), int32_t(m), weight_.k)) {
      EncodedA const& encoded = maps_of_a(a, traits, arguments.slab_atoms);
      arguments.box_bytes_a = int32_t(m * encoded.box_atoms * kBoxBytes);
      maps.a = encoded.map;
      maps.a_rest = encoded.rest;
    }
    maps.b = map_b_;
    maps.scale = map_scale_;
    maps.zero = map_zero_;
    parameters[1] = &maps;
  }

  driver::LaunchAttribute attributes[2] = {};
  driver::LaunchConfig config{};
  config.grid_x = unsigned(grid);
  config.grid_y = 1;
  config.grid_z = 1;
  config.block_x = unsigned(traits.threads);
  config.block_y = 1;
  config.block_z = 1;
  config.shared_memory_bytes = unsigned(traits.smem_bytes);
  config.stream = stream;
  config.attributes = attributes;
  if (cluster_size > 1) {
    driver::LaunchAttribute& cluster = attributes[config.attribute_count++];
    cluster.id = driver::kAttributeClusterDimension;
    cluster.value.cluster = {unsigned(cluster_size), 1, 1};
  }
  if (traits.dependent_launch != 0 && dependent_launch_wanted()) {
    driver::LaunchAttribute& dependent = attributes[config.attribute_count++];
    dependent.id = driver::kAttributeProgrammaticStreamSerialization;
    dependent.value.programmatic_stream_serialization = 1;
  }
  driver::Result const result = driver::functions().cuLaunchKernelEx(&config, kernel.function, parameters, nullptr);
  if (result != driver::kSuccess) {
    driver::fail(result, "launching '" + kernel_->path() + "' with " + std::to_string(grid) + " CTAs of " +
                             std::to_string(traits.threads) + " threads and " + std::to_string(traits.smem_bytes) +
                             " bytes of shared memory on " + device.name);
  }
}

}  // namespace humming_cutlass
