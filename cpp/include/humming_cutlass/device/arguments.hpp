/// The border between host and device: plain structs that a launcher fills and a kernel reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "humming_cutlass/numeric/types.hpp"

namespace humming_cutlass {

/// Things dealt out evenly: part p gets [begin(p), begin(p + 1)). A kernel that begins with divisions begins late.
struct Shares {
  int32_t each;  ///< what every part gets
  int32_t more;  ///< the first `more` parts get one more

  HUMMING_CUTLASS_HOST_DEVICE constexpr int32_t begin(int32_t part) const {
    return each * part + (part < more ? part : more);
  }
};

/// Deals `count` things, at least 0, out to `parts` parts, at least 1.
HUMMING_CUTLASS_HOST_DEVICE constexpr Shares deal(int64_t count, int64_t parts) {
  return {int32_t(count / parts), int32_t(count % parts)};
}

/// Arguments of one GEMM launch, D[m, n] = epilogue(A[m, k] * dequantize(B[n, k])^T).
///
/// Pointers are device pointers. B, scales and zero points are packed (layout/packed_atom.hpp); `n` and `k` are the
/// logical extents, the packed tensors cover them rounded up to 16 and 64.
///
/// A launch fetches its parameters from memory, a line of 64 bytes at a time. On SM90 the first line holds 48 bytes of these:
/// what its kernels need before they ask for B comes first.
struct GemmArguments {
  void const* ptr_b;  ///< uint32 [ceil(n/16)][ceil(k/64)][32 * bits]
  /// k tiles, dealt out to the `split_k` CTAs of an output tile, or with stream-k those of all tiles to all CTAs; where
  /// KernelTraits::slab_atoms is not 0, atom rows to CTAs.
  Shares shares;
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t split_k;  ///< CTAs that share the k range of an output tile, 1 .. ceil(k / tile_k); 0: stream-k, if there
  /// decode_slab_atoms(m, k, the most atom rows of a CTA, KernelTraits::slab_atoms), where that is not 0.
  int32_t slab_atoms;
  int32_t short_slab_warp;  ///< decode_short_slab_warp(k, slab_atoms)
  int32_t box_bytes_a;      ///< of a box of TensorMaps::a with `slab_atoms`; 0 without such a map
  int32_t groups;           ///< scale groups along k of the packed scales; 1 for channel scales

  void const* ptr_scale;          ///< ElementScale [ceil(n/16)][groups][16], rows interleaved 0, 8, 1, 9, ...
  void const* ptr_zero;           ///< ElementZero, laid out as the scales; null without zero points
  void const* ptr_a;              ///< (m, k), row stride `stride_a`, inner stride 1
  int64_t stride_a;               ///< elements between rows of A
  void* ptr_d;                    ///< (m, n), row stride `stride_d`, inner stride 1
  int64_t stride_d;               ///< elements between rows of D
  float const* ptr_global_scale;  ///< one float, or null for 1
  float const* ptr_bias;          ///< float [n], or null
  float* ptr_partial;             ///< partial sums of split-k and stream-k; null when `split_k` is 1, or a cluster
  uint32_t* ptr_counter;          ///< one per output tile, stream-k: per CTA; zero before and after every launch
};
static_assert(offsetof(GemmArguments, ptr_scale) == 48,
              "GemmArguments: the first line of parameters holds something else");

/// Columns of an atom, and warps of the kernel for few tokens, which split k.
inline constexpr int kAtomColumns = 64;
inline constexpr int kDecodeWarps = 16;
/// Rows x atoms of A, 128 bytes each, that a warp of that kernel holds in shared memory beside slabs of `slab` atoms, where
/// the widest have `most`: rings of narrower slabs leave more room.
HUMMING_CUTLASS_HOST_DEVICE constexpr int decode_blocks_a(int slab, int most) {
  return most == 8 && (slab == 5 || slab == 6) ? 40 : 32;
}
/// Atom rows of a CTA from which on slabs are as wide as they can be, although A then comes in two parts.
inline constexpr int kDecodeManyRows = 10;

/// How the kernel for few tokens cuts k: into slabs of so many atoms, as few as keep the number of slabs that a warp has,
/// from `most / 2` to `most`, and, unless CTAs have many atom `rows`, not more than a warp can hold of A for `m` rows, 1 to
/// 8.
constexpr int decode_slab_atoms(int32_t m, int32_t k, int32_t rows, int most) {
  int32_t const atoms = (k + kAtomColumns - 1) / kAtomColumns;
  int32_t limit = most;
  while (rows < kDecodeManyRows && limit * m > decode_blocks_a(limit, most)) {
    --limit;
  }
  int32_t const rounds = (atoms + kDecodeWarps * limit - 1) / (kDecodeWarps * limit);
  int32_t const per_warp = (atoms + kDecodeWarps - 1) / kDecodeWarps;
  int32_t const slab = rounds > 1 ? (per_warp + rounds - 1) / rounds : per_warp;
  return slab > most / 2 ? slab : most / 2;
}

/// The warp of that kernel whose slab is the last of an atom row and has fewer atoms than others; negative: none.
constexpr int32_t decode_short_slab_warp(int32_t k, int slab) {
  int32_t const atoms = (k + kAtomColumns - 1) / kAtomColumns;
  return slab > 0 && atoms % slab != 0 ? atoms / slab % kDecodeWarps : -1;
}

/// Atoms of A that a warp takes at a time: a slab's, or half of them where it cannot hold all.
HUMMING_CUTLASS_HOST_DEVICE constexpr int decode_box_atoms(int32_t m, int slab, int most) {
  return slab * m <= decode_blocks_a(slab, most) ? slab : (slab + 1) / 2;
}

/// Whether that kernel takes A through a tensor map; else its threads read it.
HUMMING_CUTLASS_HOST_DEVICE constexpr bool decode_maps_a(uint64_t address, int64_t stride_bytes, int32_t m, int32_t k) {
  return address % 16 == 0 && (m == 1 || (stride_bytes > 0 && stride_bytes % 16 == 0)) && k % kAtomColumns == 0;
}

/// What a launcher must know of a compiled kernel. Each cubin exports one as `humming_cutlass_traits`.
struct KernelTraits {
  int32_t version;     ///< of this struct, GemmArguments and TensorMaps; a launcher refuses another one
  int32_t threads;     ///< per CTA
  int32_t smem_bytes;  ///< dynamic shared memory per CTA
  int32_t tile_m;
  int32_t tile_n;
  int32_t tile_k;
  int32_t cluster_size = 1;      ///< CTAs of a cluster; 1 without clusters
  int32_t cluster_split_k = 0;   ///< 1: the CTAs that share a tile's k range are a cluster, at most 8; no workspace
  int32_t persistent = 0;        ///< 1: the grid is at most one CTA per SM and each CTA walks over tiles
  int32_t max_m = 0;             ///< the most rows of A; 0: any
  int32_t dependent_launch = 0;  ///< 1: the kernel itself waits for the kernels before it (griddepcontrol.wait)
  /// Rows of the TMA box of A (128-byte rows, 128-byte swizzle); 0: the kernel takes no tensor maps.
  int32_t box_m = 0;
  /// Not 0: there is one map of A where decode_maps_a says so, in boxes of m rows and
  /// decode_box_atoms(m, GemmArguments::slab_atoms, slab_atoms) atoms. The most atoms of a slab.
  int32_t slab_atoms = 0;
  int32_t box_n = 0;      ///< atom rows of the boxes of B, scales and zero points
  int32_t box_b = 0;      ///< 64-bit words of an atom row in a box of B; 0: no map of B
  int32_t box_scale = 0;  ///< the same for scales
  int32_t box_zero = 0;   ///< the same for zero points
};

/// A CUtensorMap, opaque here so that this header needs no CUDA toolkit.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

/// The second parameter of kernels that copy by TMA. B, scales and zero points are seen as matrices of 64-bit words with
/// one row for each atom row.
struct TensorMaps {
  TensorMap a;       ///< in boxes of box_m rows, where there are as many; of m with slab_atoms
  TensorMap a_rest;  ///< in boxes of the m % box_m rows beyond those
  TensorMap b;
  TensorMap scale;
  TensorMap zero;
};

/// Arguments of one packing launch (kernel/pack.hpp).
struct PackArguments {
  uint8_t const* ptr_codes;  ///< (n, k), contiguous
  uint32_t* ptr_packed;      ///< [ceil(n/16)][ceil(k/64)][32 * bits]
  int64_t n;
  int64_t k;
};

inline constexpr int32_t kKernelTraitsVersion = 6;

}  // namespace humming_cutlass
