/// Work of a persistent grid: every CTA walks over (output tile, split of its k range) units.
#pragma once

#include <cute/arch/cluster_sm90.hpp>

#include "humming_cutlass/device/arguments.hpp"
#include "humming_cutlass/scheduler/raster.hpp"

namespace humming_cutlass {

/// One unit of work.
struct WorkUnit {
  int32_t split;    ///< which part of the tile's k range
  int32_t split_k;  ///< parts of it, each with a CTA of the cluster
  int32_t tile_m;   ///< coordinate of the tile
  int32_t tile_n;
  int32_t k_begin;  ///< k tiles [k_begin, k_end)
  int32_t k_end;
};

/// Clusters of `MaxSharing` CTAs take neighbouring tiles along n at the same time, unless the cluster splits k.
///
/// Tiles that would fill at most half of a last wave are split along k instead, between the CTAs of a cluster: half a
/// wave. They are the last work of their cluster.
///
/// Stream-k, `split_k` 0, where no CTAs share: the k tiles of all output tiles, one after the other, are dealt out evenly.
/// A CTA works through its range from the end. So the part of a tile that it leaves to others to finish is its first work,
/// and the tile that it finishes for others, which have lower indices, its last: nobody waits for what has not begun.
template <class TileShape, int MaxSharing>
struct PersistentScheduler {
  static constexpr int MinTailTiles = 8;  ///< k tiles that are worth the reduction

  int32_t tiles_m;
  int32_t tiles_n;  ///< where CTAs share: of groups of tiles
  int32_t k_tiles;
  int32_t split_k;
  Shares shares;
  int32_t first;  ///< the units of this CTA are first, first + step, ... below end
  int32_t step;
  int32_t end;
  int32_t whole;             ///< from this unit on a last wave's tiles are split along k
  int32_t stream_begin = 0;  ///< this CTA's range of the k tiles of all tiles
  int32_t stream_end = 0;
  int32_t stream_tile = 0;  ///< the last tile in it

  __device__ explicit PersistentScheduler(GemmArguments const& args)
      : tiles_m((args.m + TileShape::M - 1) / TileShape::M),
        tiles_n((args.n + TileShape::N * sharing(args) - 1) / (TileShape::N * sharing(args))),
        k_tiles((args.k + TileShape::K - 1) / TileShape::K),
        split_k(args.split_k),
        shares(args.shares) {
    int32_t const tiles = tiles_m * tiles_n;
    whole = tiles;
    if (streams()) {
      stream_begin = shares.begin(int32_t(blockIdx.x));
      stream_end = shares.begin(int32_t(blockIdx.x) + 1);
      auto const first_tile = int32_t(uint32_t(stream_begin) / uint32_t(k_tiles));
      stream_tile = first_tile;
      for (int32_t next = (first_tile + 1) * k_tiles; next < stream_end; next += k_tiles) {
        ++stream_tile;
      }
      first = 0;
      step = 1;
      end = stream_begin == stream_end ? 0 : stream_tile - first_tile + 1;
    } else if (split_k > 1) {  // a cluster for each tile
      first = int32_t(cute::cluster_id_in_grid().x);
      step = end = tiles;
    } else {
      first = int32_t(blockIdx.x) / sharing();
      step = int32_t(gridDim.x) / sharing();
      end = tiles;
      if (MaxSharing > 1 && k_tiles >= MinTailTiles) {
        int32_t const rest = tiles % step;
        if (rest * sharing() <= step) {
          whole = tiles - rest;
          end = whole + rest * sharing();
        }
      }
    }
  }

  __device__ static int sharing(GemmArguments const& args) {
    return MaxSharing == 1 || args.split_k > 1 ? 1 : MaxSharing;
  }
  __device__ int sharing() const { return MaxSharing == 1 || split_k > 1 ? 1 : MaxSharing; }
  __device__ bool streams() const { return MaxSharing == 1 && split_k == 0; }

  /// The CTA whose range holds the first k tile of the tile that this CTA finishes.
  __device__ int32_t stream_owner() const {
    int32_t const at = stream_begin / k_tiles * k_tiles;
    int32_t const long_end = shares.begin(shares.more);  // of the ranges of a k tile more
    return at < long_end ? at / (shares.each + 1) : shares.more + (at - long_end) / shares.each;
  }

  /// Unit `index` of this CTA. Code before the first copy is time before it: one path to the raster, and none where it
  /// would divide for nothing.
  __device__ WorkUnit unit(int32_t index) const {
    bool const tail = MaxSharing > 1 && index >= whole;
    int32_t const tile = streams() ? stream_tile - index : tail ? whole + (index - whole) / MaxSharing : index;
    TileCoordinate const at = tiles_m == 1 ? TileCoordinate{0, tile} : raster(tile, tiles_m, tiles_n);
    WorkUnit work{0, 1, at.m, at.n, 0, k_tiles};
    if (streams()) {
      work.k_begin = max(stream_begin - tile * k_tiles, 0);
      work.k_end = min(stream_end - tile * k_tiles, k_tiles);
    } else if (tail || split_k > 1) {  // this CTA's part of the k range of a tile that its cluster shares
      work.split = int32_t(cute::block_rank_in_cluster());
      work.split_k = tail ? MaxSharing : split_k;
      Shares const parts = tail ? deal(k_tiles, MaxSharing) : shares;
      work.k_begin = parts.begin(work.split);
      work.k_end = parts.begin(work.split + 1);
      work.tile_n = tail ? at.n * MaxSharing + (index - whole) % MaxSharing : at.n;
    } else {
      work.tile_n = at.n * sharing() + int32_t(blockIdx.x) % sharing();
    }
    return work;
  }
};

}  // namespace humming_cutlass
