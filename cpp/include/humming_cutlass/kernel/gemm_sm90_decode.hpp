/// Device entry point of the SM90 GEMM for few tokens: a CTA owns a range of atom rows over the full k.
#pragma once

#include "humming_cutlass/collective/mma_sm90_bulk_multistage.hpp"
#include "humming_cutlass/epilogue/output.hpp"

namespace humming_cutlass::kernel {

template <class Config>
struct GemmSm90Decode {
  template <int SlabAtoms>
  using Mainloop = collective::MmaSm90BulkMultistage<Config, SlabAtoms>;
  using TileShape = typename Config::TileShape;
  using Output = epilogue::Output<typename Config::ElementD>;

  static constexpr int MaxSlab = TileShape::K / (64 * kDecodeWarps);  ///< atoms
  static constexpr int MinSlab = MaxSlab / 2;
  static constexpr int Threads = Mainloop<MaxSlab>::Threads;
  static constexpr int Warps = kDecodeWarps;

  /// Of the slabs of up to `Slab` atoms, the most.
  template <int Slab>
  static constexpr int smem_bytes() {
    constexpr auto bytes = int(sizeof(typename Mainloop<Slab>::SharedStorage));
    if constexpr (Slab > MinSlab) {
      return bytes > smem_bytes<Slab - 1>() ? bytes : smem_bytes<Slab - 1>();
    }
    return bytes;
  }
  static constexpr int SmemBytes = smem_bytes<MaxSlab>();

  static constexpr KernelTraits traits() {
    KernelTraits traits{kKernelTraitsVersion, Threads, SmemBytes, TileShape::M, TileShape::N, TileShape::K};
    traits.persistent = 1;
    traits.max_m = TileShape::M;
    traits.dependent_launch = 1;
    traits.box_m = TileShape::M;
    traits.slab_atoms = MaxSlab;
    return traits;
  }

  __device__ static void run(GemmArguments const& args, TensorMaps const& maps, uint8_t* smem) {
    arch::launch_dependent_grids();
    if (threadIdx.x == 0) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&maps.a));
    }
    dispatch<MaxSlab>(args.slab_atoms, args, maps, smem);
  }

  template <int Slab>
  __device__ static void dispatch(int slab, GemmArguments const& args, TensorMaps const& maps, uint8_t* smem) {
    if constexpr (Slab > MinSlab) {
      if (slab != Slab) {
        return dispatch<Slab - 1>(slab, args, maps, smem);
      }
    }
    run_slabs<Slab>(args, maps, smem);
  }

  template <int SlabAtoms>
  __device__ static void run_slabs(GemmArguments const& args, TensorMaps const& maps, uint8_t* smem) {
    using Mainloop = Mainloop<SlabAtoms>;
    auto& shared = *reinterpret_cast<typename Mainloop::SharedStorage*>(smem);
    int const warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));  // kept: it would be read again in every slab
    Mainloop mainloop(args, maps.a, shared, warp, lane);
    int32_t const begin = args.shares.begin(int32_t(blockIdx.x));
    int32_t const end = args.shares.begin(int32_t(blockIdx.x) + 1);
    // Of a lane's 2 x 2 sums, those of tokens beyond m are not kept: fewer tokens, more atom rows at a time.
    int const quad_shift = args.m > 4 ? 2 : args.m > 2 ? 1 : 0;
    int const tile_shift = quad_shift + 3;  // of the sums of an atom row (8 rows, quads of tokens)
    typename Mainloop::Sequence const sequence(begin, end, args.k, warp, Mainloop::RowBlock * 4 >> quad_shift);
    float4* const own = shared.sums[warp];  // (atom rows, 8 rows, quads of tokens)

    auto const keep = [&](int row, bool first, typename Mainloop::Accumulator const& sums) {
      if (lane % 4 >> quad_shift == 0) {
        float4* const target = own + (row << tile_shift) + (lane / 4 << quad_shift) + lane % 4;
        float4 x = make_float4(sums[0], sums[1], sums[2], sums[3]);
        if (!first) {
          float4 const y = *target;
          x = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
        }
        *target = x;
      }
    };
    auto const finish = [&](int32_t block, int32_t block_end) {
      __syncthreads();
      for (int i = threadIdx.x; i < (block_end - block) << (tile_shift + 2); i += Threads) {
        int const row = i >> (tile_shift + 2);
        store<Mainloop>(args, block + row, i - (row << (tile_shift + 2)), quad_shift,
                        reinterpret_cast<float const*>(shared.sums) + i);
      }
      if (block_end < end) {
        __syncthreads();  // the sums may be written again
      }
    };
    mainloop(sequence, keep, finish);
  }

  /// Adds the partial sums of an element of D, of which `sums` is the first, in the order of k, and stores it.
  ///
  /// `place` counts the 8 rows of an MMA tile, quads of tokens, and the lane's 2 rows x 2 tokens.
  template <class Mainloop>
  __device__ static void store(GemmArguments const& args, int32_t atom_row, int place, int quad_shift,
                               float const* sums) {
    int const row = place >> (quad_shift + 2);
    int const quad = place >> 2 & ((1 << quad_shift) - 1);
    int const half = place >> 1 & 1;
    epilogue::RowFactors const factors =
        epilogue::row_factors<typename Mainloop::Scale, Mainloop::Grouped, Mainloop::Dequant::Exponent>(
            args, atom_row * 16, row * 4);
    float x = 0.f;
#pragma unroll
    for (int w = 0; w < Warps; ++w) {
      x += sums[w * Mainloop::RowBlock * 128];
    }
    int32_t const token = quad * 2 + place % 2;
    int32_t const n = atom_row * 16 + row + 8 * half;
    if (token < args.m && n < args.n) {
      auto* const d = static_cast<typename Output::Storage*>(args.ptr_d);
      d[token * args.stride_d + n] = Output::round(half == 0 ? factors.apply(x, 0) : factors.apply(x, 1));
    }
  }
};

}  // namespace humming_cutlass::kernel
