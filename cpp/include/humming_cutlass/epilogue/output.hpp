/// What every epilogue shares: the factors of a row, rounding, and the copy from shared to global memory.
#pragma once

#include "humming_cutlass/device/arguments.hpp"
#include "humming_cutlass/layout/packed_atom.hpp"
#include "humming_cutlass/numeric/arithmetic.hpp"

namespace humming_cutlass::epilogue {

/// How an output element is stored.
template <class ElementD>
struct Output {
  using Storage = uint16_t;
  __device__ static uint16_t round(float x) { return round_to<ElementD>(x); }
};
template <>
struct Output<float> {
  using Storage = float;
  __device__ static float round(float x) { return x; }
};

/// Channel scale and bias of the two rows (lane/4, lane/4 + 8) that a lane holds of an atom row, and what is common.
struct RowFactors {
  float scale[2];
  float bias[2];
  float alpha;  ///< undoes the dequantizer's power of two
  float global_scale;

  __device__ float apply(float sum, int half) const { return sum * scale[half] * alpha * global_scale + bias[half]; }
};

/// Factors of the atom row whose first weight row is `first_row`. Channel scales are read only when not `Grouped`.
template <class Scale, bool Grouped, int Exponent>
__device__ RowFactors row_factors(GemmArguments const& args, int32_t first_row, int lane) {
  RowFactors rows{{1.f, 1.f}, {0.f, 0.f}, bit_cast<float>(uint32_t(127 - Exponent) << 23), 1.f};
  if (args.ptr_global_scale != nullptr) {
    rows.global_scale = *args.ptr_global_scale;
  }
  if constexpr (!Grouped) {
    int64_t const atom_row = min(first_row / 16, (args.n + 15) / 16 - 1);
    load_scale_pair<Scale>(args.ptr_scale, atom_row, lane, rows.scale[0], rows.scale[1]);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int32_t const n = first_row + lane / 4 + 8 * half;
    if (args.ptr_bias != nullptr && n < args.n) {
      rows.bias[half] = args.ptr_bias[n];
    }
  }
  return rows;
}

/// Copies a tile (Rows, Columns) in shared memory, whose element (row, column) is `tile[place(row, column)]`, to D at
/// (m_begin, n_begin); what lies outside D is left out. 16 bytes at a time where D allows.
template <class Storage, int Threads, int Rows, int Columns, class Place>
__device__ void copy_out(GemmArguments const& args, Storage const* tile, Place&& place, int thread, int64_t m_begin,
                         int32_t n_begin) {
  constexpr int Vector = 16 / int(sizeof(Storage));
  constexpr int RowVectors = Columns / Vector;
  auto* const d = static_cast<Storage*>(args.ptr_d);
  bool const aligned = reinterpret_cast<uintptr_t>(d) % 16 == 0 && args.stride_d % Vector == 0;
  for (int c = thread; c < Rows * RowVectors; c += Threads) {
    int const row = c / RowVectors;
    int const column = c % RowVectors * Vector;
    int64_t const m = m_begin + row;
    int32_t const n = n_begin + column;
    if (m >= args.m || n >= args.n) {
      continue;
    }
    Storage const* const source = tile + place(row, column);
    Storage* const target = d + m * args.stride_d + n;
    if (aligned && n + Vector <= args.n) {
      *reinterpret_cast<uint4*>(target) = *reinterpret_cast<uint4 const*>(source);
    } else {
      for (int e = 0; e < Vector && n + e < args.n; ++e) {
        target[e] = source[e];
      }
    }
  }
}

}  // namespace humming_cutlass::epilogue
