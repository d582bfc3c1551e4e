/// Work of a persistent grid: every CTA walks over (output tile, split of its k range) units.
#pragma once

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
/// Tiles that would fill less than half of a last wave are split along k instead, between the CTAs of a cluster: half a
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
  int32_t tail = 0;          ///< groups of tiles, the last ones, whose k ranges are split
  int32_t stream_begin = 0;  ///< this CTA's range of the k tiles of all tiles
  int32_t stream_end = 0;

  __device__ explicit PersistentScheduler(GemmArguments const& args)
      : tiles_m((args.m + TileShape::M - 1) / TileShape::M),
        tiles_n((args.n + TileShape::N * sharing(args) - 1) / (TileShape::N * sharing(args))),
        k_tiles((args.k + TileShape::K - 1) / TileShape::K),
        split_k(args.split_k) {
    if (sharing() > 1 && k_tiles >= MinTailTiles) {
      int32_t const rest = tiles_m * tiles_n % step();
      tail = rest * sharing() <= step() ? rest : 0;
    }
    if (streams()) {
      stream_begin = stream_of(int32_t(blockIdx.x));
      stream_end = stream_of(int32_t(blockIdx.x) + 1);
    }
  }

  __device__ bool streams() const { return MaxSharing == 1 && split_k == 0; }

  /// Where the range of CTA `cta` begins.
  __device__ int32_t stream_of(int32_t cta) const {
    int32_t const all = tiles_m * tiles_n * k_tiles;
    int32_t const share = all / int32_t(gridDim.x);
    return share * cta + min(cta, all - share * int32_t(gridDim.x));
  }

  /// The CTA whose range holds the first k tile of the tile that this CTA finishes.
  __device__ int32_t stream_owner() const {
    int32_t const all = tiles_m * tiles_n * k_tiles;
    int32_t const share = all / int32_t(gridDim.x);
    int32_t const more = all - share * int32_t(gridDim.x);  // CTAs with a k tile more
    int32_t const at = stream_begin / k_tiles * k_tiles;
    return at < more * (share + 1) ? at / (share + 1) : more + (at - more * (share + 1)) / share;
  }

  __device__ static int sharing(GemmArguments const& args) {
    return MaxSharing == 1 || args.split_k > 1 ? 1 : MaxSharing;
  }
  __device__ int sharing() const { return MaxSharing == 1 || split_k > 1 ? 1 : MaxSharing; }

  __device__ int32_t units() const {
    if (streams()) {
      return stream_begin == stream_end ? 0 : (stream_end - 1) / k_tiles - stream_begin / k_tiles + 1;
    }
    return tiles_m * tiles_n * split_k + tail * (sharing() - 1);
  }
  __device__ int32_t first() const { return streams() ? 0 : int32_t(blockIdx.x) / sharing(); }
  __device__ int32_t step() const { return streams() ? 1 : int32_t(gridDim.x) / sharing(); }

  /// Unit `index` of `units()`. Where a launch splits k, neighbours are the splits of one tile: they are a cluster.
  __device__ WorkUnit unit(int32_t index) const {
    if (streams()) {
      int32_t const tile = (stream_end - 1) / k_tiles - index;
      TileCoordinate const at = raster(tile, tiles_m, tiles_n);
      return {0, 1, at.m, at.n, max(stream_begin - tile * k_tiles, 0), min(stream_end - tile * k_tiles, k_tiles)};
    }
    int32_t const rank = int32_t(blockIdx.x) % sharing();
    int32_t const whole = tiles_m * tiles_n - tail;
    if (MaxSharing > 1 && split_k == 1 && index >= whole) {
      TileCoordinate const at = raster(whole + (index - whole) / MaxSharing, tiles_m, tiles_n);
      return part(at.m, at.n * MaxSharing + (index - whole) % MaxSharing, rank, MaxSharing);
    }
    TileCoordinate const at = raster(index / split_k, tiles_m, tiles_n);
    return part(at.m, at.n * sharing() + rank, index % split_k, split_k);
  }

  __device__ WorkUnit part(int32_t tile_m, int32_t tile_n, int32_t split, int32_t parts) const {
    return {split,
            parts,
            tile_m,
            tile_n,
            int32_t(int64_t(k_tiles) * split / parts),
            int32_t(int64_t(k_tiles) * (split + 1) / parts)};
  }
};

}  // namespace humming_cutlass
