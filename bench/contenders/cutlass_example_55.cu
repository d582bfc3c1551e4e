// A peer for the benchmark: CUTLASS's own mixed-input GEMM for Hopper, in the form of its example 55. Activations are
// bfloat16, weights int4 with a bfloat16 scale for each group of k, D is bfloat16.
//
// As in the example, CUTLASS's A is the weight (its rows are GEMM M, the tokens GEMM N), so that D is written
// transposed, and the weight may be stored in the order in which threads read it. Many tiles are built, since the
// benchmark times all of them and takes the fastest.
//
// What a caller passes, all on the device and 16-byte aligned:
//   activations  bfloat16 (m, k), k contiguous
//   weight       int4 (n, k), k contiguous, two's complement, an even k in the low half of its byte; what
//                example55_store made of it
//   scales       bfloat16 (k / group, n), n contiguous
//   d            bfloat16 (m, n), n contiguous
// n and k are multiples of 128.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/kernel_hardware_info.h"
#include "cutlass/util/packed_stride.hpp"
#include "cutlass/version.h"

namespace {

using cute::Int;
using cute::Layout;
using cute::Shape;
using cute::Stride;

using Activation = cutlass::bfloat16_t;
using Weight = cutlass::int4b_t;
using Output = cutlass::bfloat16_t;

// 16 rows x 16 columns, as a warp reads them for one wgmma: lane (row % 8, column / 2 % 4) has eight values next to each
// other, in the order 0, 2, 4, 6, 1, 3, 5, 7, from which CUTLASS converts int4 to bfloat16 fastest.
using Atom = Layout<Shape<Shape<Int<8>, Int<2>>, Shape<Int<2>, Int<4>, Int<2>>>,
                    Stride<Stride<Int<32>, Int<1>>, Stride<Int<4>, Int<8>, Int<2>>>>;
using Reordered = decltype(cute::tile_to_shape(Atom{}, Shape<int, int, int>{}));

Reordered reordered_layout(int n, int k) {
  return cute::tile_to_shape(Atom{}, cute::make_shape(n, k, 1));
}

struct Call {
  void const* activations;
  void const* weight;
  void const* scales;
  void* d;
  int m, n, k, group;
};

enum class Store { kPlain, kReordered };

struct Cooperative {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};

struct Pingpong {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};

// Number of SMs, asked for once: a call that is captured into a graph should do little else than launch.
cutlass::KernelHardwareInfo hardware() {
  cutlass::KernelHardwareInfo info;
  cudaGetDevice(&info.device_id);
  static int const sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(info.device_id);
  info.sm_count = sm_count;
  return info;
}

template <class Schedule, Store store, int Rows, int Tokens, int K, int ClusterRows, class Scheduler = void>
struct Gemm {
  static constexpr Store kStore = store;

  using TileShape = Shape<Int<Rows>, Int<Tokens>, Int<K>>;
  using ClusterShape = Shape<Int<ClusterRows>, Int<1>, Int<1>>;

  // D^T is column-major; there is no C, so that no shared memory is set aside for it.
  using CollectiveEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, cutlass::layout::ColumnMajor, 8, Output,
      cutlass::layout::ColumnMajor, 8, typename Schedule::Epilogue>::CollectiveOp;

  using WeightLayout = cute::conditional_t<store == Store::kReordered, Reordered, cutlass::layout::RowMajor>;
  using CollectiveMainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, cute::tuple<Weight, Activation>, WeightLayout, 32,
      Activation, cutlass::layout::ColumnMajor, 8, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<int(sizeof(typename CollectiveEpilogue::SharedStorage))>,
      typename Schedule::Mainloop>::CollectiveOp;

  using Kernel = cutlass::gemm::kernel::GemmUniversal<Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue,
                                                      Scheduler>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  static typename Device::Arguments arguments(Call const& call) {
    auto [activations, weight, scales, d, m, n, k, group] = call;
    typename CollectiveMainloop::StrideA weight_layout;
    if constexpr (store == Store::kReordered) {
      weight_layout = reordered_layout(n, k);
    } else {
      weight_layout =
          cutlass::make_cute_packed_stride(typename CollectiveMainloop::StrideA{}, cute::make_shape(n, k, 1));
    }
    using StrideB = typename CollectiveMainloop::StrideB;
    using StrideScale = typename CollectiveMainloop::StrideScale;
    auto const scale_stride = cutlass::make_cute_packed_stride(StrideScale{}, cute::make_shape(n, k / group, 1));
    auto const d_stride = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, cute::make_shape(n, m, 1));
    typename Device::Arguments arguments{
        cutlass::gemm::GemmUniversalMode::kGemm,
        {n, m, k, 1},
        {static_cast<Weight const*>(weight), weight_layout, static_cast<Activation const*>(activations),
         cutlass::make_cute_packed_stride(StrideB{}, cute::make_shape(m, k, 1)), static_cast<Activation const*>(scales),
         scale_stride, group},
        {{1.0f, 0.0f}, nullptr, d_stride, static_cast<Output*>(d), d_stride}};
    arguments.hw_info = hardware();
    return arguments;
  }

  static std::size_t workspace(Call const& call) { return Device::get_workspace_size(arguments(call)); }

  static int run(Call const& call, void* workspace, cudaStream_t stream) {
    auto const all = arguments(call);
    auto status = Device::can_implement(all);
    if (status == cutlass::Status::kSuccess) {
      status = Device{}.run(all, workspace, stream);
    }
    return int(status);
  }
};

struct Variant {
  char const* name;
  Store store;
  std::size_t (*workspace)(Call const&);
  int (*run)(Call const&, void*, cudaStream_t);
};

template <class G>
constexpr Variant variant(char const* name) {
  return {name, G::kStore, G::workspace, G::run};
}

using StreamK = cutlass::gemm::StreamKScheduler;
constexpr auto kReordered = Store::kReordered;

// Rows x tokens x k, CTAs of a cluster along the rows.
constexpr Variant kVariants[] = {
    variant<Gemm<Cooperative, kReordered, 128, 16, 64, 1>>("128x16x64 cooperative"),
    variant<Gemm<Cooperative, kReordered, 128, 32, 64, 1>>("128x32x64 cooperative"),
    variant<Gemm<Cooperative, kReordered, 128, 64, 64, 1>>("128x64x64 cooperative"),
    variant<Gemm<Cooperative, kReordered, 128, 128, 64, 1>>("128x128x64 cooperative"),
    variant<Gemm<Cooperative, kReordered, 128, 256, 64, 1>>("128x256x64 cooperative"),
    variant<Gemm<Cooperative, kReordered, 128, 64, 64, 2>>("128x64x64 cooperative cluster 2"),
    variant<Gemm<Cooperative, kReordered, 128, 128, 64, 2>>("128x128x64 cooperative cluster 2"),
    variant<Gemm<Cooperative, kReordered, 128, 256, 64, 2>>("128x256x64 cooperative cluster 2"),
    variant<Gemm<Cooperative, kReordered, 128, 16, 128, 1>>("128x16x128 cooperative"),
    variant<Gemm<Cooperative, kReordered, 128, 32, 128, 1>>("128x32x128 cooperative"),
    variant<Gemm<Cooperative, kReordered, 128, 64, 128, 1>>("128x64x128 cooperative"),
    variant<Gemm<Pingpong, kReordered, 64, 16, 64, 1>>("64x16x64 pingpong"),
    variant<Gemm<Pingpong, kReordered, 64, 32, 64, 1>>("64x32x64 pingpong"),
    variant<Gemm<Pingpong, kReordered, 64, 64, 64, 1>>("64x64x64 pingpong"),
    variant<Gemm<Pingpong, kReordered, 64, 128, 64, 1>>("64x128x64 pingpong"),
    variant<Gemm<Cooperative, kReordered, 128, 16, 64, 1, StreamK>>("128x16x64 cooperative stream-k"),
    variant<Gemm<Cooperative, kReordered, 128, 32, 64, 1, StreamK>>("128x32x64 cooperative stream-k"),
    variant<Gemm<Cooperative, kReordered, 128, 64, 64, 1, StreamK>>("128x64x64 cooperative stream-k"),
    variant<Gemm<Cooperative, kReordered, 128, 128, 64, 1, StreamK>>("128x128x64 cooperative stream-k"),
    variant<Gemm<Cooperative, Store::kPlain, 128, 32, 64, 1>>("128x32x64 cooperative plain"),
};
constexpr int kCount = sizeof(kVariants) / sizeof(Variant);

// Moves eight weights of a row, one word, a thread. `to` is zero before: words of it collect weights of many threads.
__global__ void reorder(std::uint32_t const* from, std::uint32_t* to, Reordered layout, int n, int k) {
  auto const word = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  int const words = k / 8;
  if (word >= std::int64_t(n) * words) {
    return;
  }
  int const row = int(word / words);
  int const column = int(word % words) * 8;
  std::uint32_t const codes = from[word];
  for (int i = 0; i < 8; ++i) {
    auto const offset = std::uint32_t(layout(row, column + i, 0));
    atomicOr(&to[offset / 8], (codes >> (4 * i) & 0xfu) << (4 * (offset % 8)));
  }
}

bool supported(int variant, int m, int n, int k, int group) {
  return variant >= 0 && variant < kCount && m > 0 && n > 0 && k > 0 && group > 0 && n % 128 == 0 && k % 128 == 0 &&
         group % 128 == 0 && k % group == 0;
}

bool has_gpu() {
  return hardware().sm_count > 0;
}

constexpr int kUnsupported = -1;

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// The version of CUTLASS that this is built of.
EXPORT char const* example55_version() {
  static std::string const version =
      std::to_string(CUTLASS_MAJOR) + "." + std::to_string(CUTLASS_MINOR) + "." + std::to_string(CUTLASS_PATCH);
  return version.c_str();
}

// Number of variants; they are named by their index.
EXPORT int example55_count() {
  return kCount;
}

// What a variant is, or null where there is none.
EXPORT char const* example55_name(int variant) {
  return variant >= 0 && variant < kCount ? kVariants[variant].name : nullptr;
}

// How a variant wants the weight: 0 as it is, 1 reordered; -1 where there is no such variant.
EXPORT int example55_form(int variant) {
  return variant >= 0 && variant < kCount ? int(kVariants[variant].store) : kUnsupported;
}

// Writes the weight in a form, n * k / 2 bytes, behind what `stream` does before. Returns 0, or else an error.
EXPORT int example55_store(int form, void const* weight, void* stored, int n, int k, cudaStream_t stream) {
  if (!supported(0, 1, n, k, k) || form < 0 || form > 1) {
    return kUnsupported;
  }
  std::size_t const bytes = std::size_t(n) * k / 2;
  if (form == int(Store::kPlain)) {
    return int(cudaMemcpyAsync(stored, weight, bytes, cudaMemcpyDeviceToDevice, stream));
  }
  if (cudaError_t const error = cudaMemsetAsync(stored, 0, bytes, stream)) {
    return int(error);
  }
  int constexpr threads = 256;
  auto const blocks = unsigned((bytes / 4 + threads - 1) / threads);
  reorder<<<blocks, threads, 0, stream>>>(static_cast<std::uint32_t const*>(weight),
                                          static_cast<std::uint32_t*>(stored), reordered_layout(n, k), n, k);
  return int(cudaGetLastError());
}

// Bytes of device memory that a call needs beside its operands; calls in one stream may share them. 0 without a GPU.
EXPORT std::size_t example55_workspace(int variant, int m, int n, int k, int group) {
  if (!supported(variant, m, n, k, group) || !has_gpu()) {
    return 0;
  }
  return kVariants[variant].workspace({nullptr, nullptr, nullptr, nullptr, m, n, k, group});
}

// Queues D = A * (scale * B)^T on `stream`; neither waits nor allocates. Returns 0, or else that it is not supported.
EXPORT int example55_run(int variant, void const* activations, void const* weight, void const* scales, void* d,
                         void* workspace, int m, int n, int k, int group, cudaStream_t stream) {
  if (!supported(variant, m, n, k, group) || !has_gpu()) {
    return kUnsupported;
  }
  return kVariants[variant].run({activations, weight, scales, d, m, n, k, group}, workspace, stream);
}
