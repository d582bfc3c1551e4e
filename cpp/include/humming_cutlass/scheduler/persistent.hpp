/// Work of a persistent grid: every CTA walks over (output tile, split of its k range) units.
#pragma once

#include "humming_cutlass/device/arguments.hpp"
#include "humming_cutlass/scheduler/raster.hpp"

namespace humming_cutlass {

/// One unit of work.
struct WorkUnit {
  int32_t split;   ///< which part of its k range
  int32_t tile_m;  ///< coordinate of the tile
  int32_t tile_n;
  int32_t k_begin;  ///< k tiles [k_begin, k_end)
  int32_t k_end;
};

/// `MaxSharing` CTAs of a cluster take neighbouring tiles along n at the same time, unless the cluster splits k.
template <class TileShape, int MaxSharing>
struct PersistentScheduler {
  int32_t tiles_m;
  int32_t tiles_n;  ///< where CTAs share: of groups of tiles
  int32_t k_tiles;
  int32_t split_k;

  __device__ explicit PersistentScheduler(GemmArguments const& args)
      : tiles_m((args.m + TileShape::M - 1) / TileShape::M),
        tiles_n((args.n + TileShape::N * sharing(args) - 1) / (TileShape::N * sharing(args))),
        k_tiles((args.k + TileShape::K - 1) / TileShape::K),
        split_k(args.split_k) {}

  __device__ static int sharing(GemmArguments const& args) {
    return MaxSharing == 1 || args.split_k > 1 ? 1 : MaxSharing;
  }
  __device__ int sharing() const { return MaxSharing == 1 || split_k > 1 ? 1 : MaxSharing; }

  __device__ int32_t units() const { return tiles_m * tiles_n * split_k; }
  __device__ int32_t first() const { return int32_t(blockIdx.x) / sharing(); }
  __device__ int32_t step() const { return int32_t(gridDim.x) / sharing(); }

  /// Unit `index` of `units()`. Neighbours are the splits of one tile: they are a cluster.
  __device__ WorkUnit unit(int32_t index) const {
    int32_t const split = index % split_k;
    TileCoordinate const at = raster(index / split_k, tiles_m, tiles_n);
    return {split, at.m, at.n * sharing() + int32_t(blockIdx.x) % sharing(),
            int32_t(int64_t(k_tiles) * split / split_k), int32_t(int64_t(k_tiles) * (split + 1) / split_k)};
  }
};

}  // namespace humming_cutlass
