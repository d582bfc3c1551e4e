/// Device entry point of the packer: one warp packs one atom.
#pragma once

#include "humming_cutlass/dequant/code_book.hpp"
#include "humming_cutlass/dequant/floating.hpp"
#include "humming_cutlass/dequant/integer.hpp"
#include "humming_cutlass/device/arguments.hpp"

namespace humming_cutlass::kernel {

inline constexpr int PackThreads = 256;

/// The tile is an atom.
constexpr KernelTraits pack_traits() {
  return {kKernelTraitsVersion, PackThreads, 0, 1, 16, 64};
}

/// Packs codes (n, k) into words [ceil(n/16)][ceil(k/64)][32 * Bits]; padding holds code 0. Grid: one warp an atom.
template <class Element>
__device__ void pack(PackArguments const& args) {
  using Dequant = Dequantizer<Element, BFloat16>;
  using Atom = typename Dequant::Atom;
  int64_t const atoms_k = (args.k + Atom::Columns - 1) / Atom::Columns;
  int64_t const atoms = (args.n + Atom::Rows - 1) / Atom::Rows * atoms_k;
  int64_t const atom = (int64_t(blockIdx.x) * PackThreads + threadIdx.x) / Atom::Lanes;
  int const lane = threadIdx.x % Atom::Lanes;
  if (atom >= atoms) {
    return;
  }
  int64_t const first_row = atom / atoms_k * Atom::Rows;
  int64_t const first_column = atom % atoms_k * Atom::Columns;
  uint32_t words[Atom::WordsPerLane];
  pack_lane<Atom>(
      lane,
      [&](int row, int column) {
        int64_t const r = first_row + row;
        int64_t const c = first_column + column;
        return Dequant::store(r < args.n && c < args.k ? args.ptr_codes[r * args.k + c] : 0u);
      },
      words);
  for (int w = 0; w < Atom::WordsPerLane; ++w) {
    args.ptr_packed[atom * Atom::Words + Atom::word_index(lane, w)] = words[w];
  }
}

}  // namespace humming_cutlass::kernel
