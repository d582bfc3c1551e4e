/// Device entry point of the SM80 GEMM: one output tile (or one split of its k range) per CTA.
#pragma once

#include "humming_cutlass/collective/mma_sm80_cpasync_multistage.hpp"
#include "humming_cutlass/epilogue/linear_sm80.hpp"
#include "humming_cutlass/epilogue/split_k.hpp"
#include "humming_cutlass/scheduler/raster.hpp"

namespace humming_cutlass::kernel {

template <class Config>
struct GemmSm80 {
  using Mainloop = collective::MmaSm80CpAsyncMultistage<Config>;
  using Epilogue = epilogue::LinearSm80<Mainloop, typename Config::ElementD>;
  using Reduction = epilogue::SplitK<Mainloop::Fragments, Mainloop::Threads>;
  using TileShape = typename Config::TileShape;

  static constexpr int Threads = Mainloop::Threads;
  static constexpr int SmemBytes =
      Mainloop::SmemBytes > Epilogue::SmemBytes ? Mainloop::SmemBytes : Epilogue::SmemBytes;
  static_assert(SmemBytes <= 99 * 1024,
                "GemmSm80: more shared memory than SM86, SM89 and SM120 have; choose fewer stages");

  static constexpr KernelTraits traits() {
    return {kKernelTraitsVersion, Threads, SmemBytes, TileShape::M, TileShape::N, TileShape::K};
  }

  __device__ static void run(GemmArguments const& args, uint8_t* smem) {
    int32_t const tiles_m = (args.m + TileShape::M - 1) / TileShape::M;
    int32_t const tiles_n = (args.n + TileShape::N - 1) / TileShape::N;
    int32_t const tiles = tiles_m * tiles_n;
    auto const split = int32_t(blockIdx.x / uint32_t(tiles));
    int32_t const tile = int32_t(blockIdx.x) - split * tiles;
    TileCoordinate const at = raster(tile, tiles_m, tiles_n);

    Mainloop mainloop(args, smem, at.m, at.n);
    typename Mainloop::Accumulator accumulators;
    mainloop(args.shares.begin(split), args.shares.begin(split + 1), accumulators);
    if (args.split_k > 1 && !Reduction::reduce(args, mainloop.thread, tile, tiles, split, accumulators,
                                               reinterpret_cast<uint32_t*>(smem), [] { __syncthreads(); })) {
      return;
    }
    Epilogue::store(mainloop, accumulators);
  }
};

}  // namespace humming_cutlass::kernel
