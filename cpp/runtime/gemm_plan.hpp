/// A GEMM with a fixed weight: everything that does not change between calls, made once.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "kernel.hpp"

namespace humming_cutlass {

/// The 16- and 32-bit element types of A and D.
enum class Element { kFloat16, kBFloat16, kFloat32 };

char const* name_of(Element element);
int bytes_of(Element element);

/// A matrix in device memory, inner stride 1. Rows may be further apart than they are long.
struct Matrix {
  void* data;
  int64_t rows;
  int64_t stride;  ///< elements between rows; without meaning for fewer than two rows
};

/// What does not change between calls. Pointers are device pointers, see GemmArguments; the owner keeps them alive.
struct GemmWeight {
  int device;
  int32_t n;
  int32_t k;
  int32_t groups;
  void const* b;
  void const* scale;
  void const* zero;
  float const* bias;
  float const* global_scale;
  int64_t row_bytes_b;      ///< of one atom row (16 rows of the weight) of B
  int64_t row_bytes_scale;  ///< the same for scales
  int64_t row_bytes_zero;   ///< the same for zero points; 0 without
};

struct EncodedA;

/// Launches one kernel on one weight. Thread-safe: a call changes no state but the kernel's first load.
class GemmPlan {
 public:
  GemmPlan(std::shared_ptr<Kernel> kernel, GemmWeight const& weight, Element element_a, Element element_d);

  /// Puts D = A * W^T on `stream`: one launch, no synchronization. `a.rows` == `d.rows` == m; m == 0 launches nothing.
  /// `split_k` CTAs share the k range of an output tile; 0 is stream-k, for kernels that have it.
  ///
  /// Throws ArgumentError for an m whose grid the GPU cannot take, a split_k outside 0 or 1 .. ceil(k / tile_k), and an A that
  /// the kernel's copy engine cannot address; LaunchError where the driver refuses.
  void run(Matrix const& a, Matrix const& d, driver::Stream stream, int split_k);

  /// Loads the kernel where it is not loaded. Reads a file: callers that hold a lock of their own may want to drop it.
  void prepare();
  bool prepared() const { return loaded_.load(std::memory_order_acquire) != nullptr; }

  GemmWeight const& weight() const { return weight_; }
  Element element_a() const { return element_a_; }
  Element element_d() const { return element_d_; }
  std::shared_ptr<Kernel> const& kernel() const { return kernel_; }

 private:
  EncodedA const& maps_of_a(Matrix const& a, KernelTraits const& traits, int slab_atoms) const;
  driver::TensorMap encode_a(Matrix const& a, int box_m, int box_atoms) const;
  driver::TensorMap encode_packed(void const* pointer, int64_t row_bytes, int box_words,
                                  KernelTraits const& traits) const;
  void encode_weight(KernelTraits const& traits);

  std::shared_ptr<Kernel> kernel_;
  GemmWeight weight_;
  Element element_a_;
  Element element_d_;
  std::mutex prepare_mutex_;
  driver::TensorMap map_b_{};  ///< written before `loaded_` is published
  driver::TensorMap map_scale_{};
  driver::TensorMap map_zero_{};
  std::atomic<driver::DeviceState const*> device_{nullptr};
  std::atomic<LoadedKernel const*> loaded_{nullptr};
};

}  // namespace humming_cutlass
