/// Which scale group a column of a k tile belongs to, resolved at compile time wherever the sizes allow it.
#pragma once

#include <cstdint>
#include <numeric>

#include "humming_cutlass/numeric/types.hpp"

namespace humming_cutlass {

/// `GroupSize` columns share a scale (-1: all of them); a k tile has `TileK` columns.
template <int GroupSize, int TileK>
struct GroupMap {
  static_assert(GroupSize == -1 || (GroupSize > 0 && GroupSize % 16 == 0),
                "GroupMap: GroupSize must be -1 or a positive multiple of 16");

  static constexpr bool Grouped = GroupSize > 0;
  static constexpr bool TileDividesGroup = Grouped && GroupSize % TileK == 0;
  static constexpr bool GroupDividesTile = Grouped && TileK % GroupSize == 0;

  /// Groups that a tile can touch, wherever it starts.
  static constexpr int TileGroups = !Grouped           ? 0
                                    : TileDividesGroup ? 1
                                    : GroupDividesTile ? TileK / GroupSize
                                                       : (GroupSize - 16 + TileK - 1) / GroupSize + 1;
  /// Between two possible group borders: 16, 32 or 64 columns.
  static constexpr int Granule = !Grouped ? 64 : GroupSize % 64 == 0 ? 64 : GroupSize % 32 == 0 ? 32 : 16;

  /// At how many columns into a group a tile can begin, evenly spaced from 0 on.
  static constexpr int Starts = Grouped ? GroupSize / std::gcd(TileK, GroupSize) : 1;

  /// The first group that tile `k_tile` touches.
  HUMMING_CUTLASS_HOST_DEVICE static int32_t first(int32_t k_tile) { return k_tile * TileK / GroupSize; }

  /// Group of column `column` of tile `k_tile`, counted from `first(k_tile)`.
  HUMMING_CUTLASS_HOST_DEVICE static int in_tile(int32_t k_tile, int column) {
    if constexpr (TileDividesGroup) {
      return 0;
    } else if constexpr (GroupDividesTile) {
      return column / GroupSize;
    } else {
      return (k_tile * TileK + column) / GroupSize - first(k_tile);
    }
  }

  /// Whether a group ends before (and the next one begins at) column `column` of tile `k_tile`.
  HUMMING_CUTLASS_HOST_DEVICE static bool border(int32_t k_tile, int column) {
    if constexpr (GroupDividesTile) {
      return column % GroupSize == 0;
    } else {
      return (k_tile * TileK + column) % GroupSize == 0;
    }
  }
};

}  // namespace humming_cutlass
