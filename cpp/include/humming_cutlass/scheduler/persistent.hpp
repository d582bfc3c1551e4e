/// Work of a persistent grid: every CTA walks over (output tile, split of its k range) units.
#pragma once

#include "humming_cutlass/device/arguments.hpp"
#include "humming_cutlass/scheduler/raster.hpp"

namespace humming_cutlass {

/// One unit of work.
struct WorkUnit {
  int32_t tile;    ///< index of the output tile
  int32_t split;   ///< which part of its k range
  int32_t tile_m;  ///< coordinate of the tile
  int32_t tile_n;
  int32_t k_begin;  ///< k tiles [k_begin, k_end)
  int32_t k_end;
};

template <class TileShape>
struct PersistentScheduler {
  int32_t tiles_m;
  int32_t tiles_n;
  int32_t k_tiles;
  int32_t split_k;

  __device__ explicit PersistentScheduler(GemmArguments const& args)
      : tiles_m((args.m + TileShape::M - 1) / TileShape::M),
        tiles_n((args.n + TileShape::N - 1) / TileShape::N),
        k_tiles((args.k + TileShape::K - 1) / TileShape::K),
        split_k(args.split_k) {}

  __device__ int32_t tiles() const { return tiles_m * tiles_n; }
  __device__ int32_t units() const { return tiles() * split_k; }

  /// Unit `index` of `units()`. Neighbours are the splits of one tile: they are a cluster.
  __device__ WorkUnit unit(int32_t index) const {
    int32_t const tile = index / split_k;
    int32_t const split = index % split_k;
    TileCoordinate const at = raster(tile, tiles_m, tiles_n);
    return {tile,
            split,
            at.m,
            at.n,
            int32_t(int64_t(k_tiles) * split / split_k),
            int32_t(int64_t(k_tiles) * (split + 1) / split_k)};
  }
};

}  // namespace humming_cutlass
