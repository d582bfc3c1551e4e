/// Order of output tiles: blocks of token tiles sweep n, so that a wave of CTAs shares rows of A and of B in L2.
#pragma once

#include <cstdint>

#include "humming_cutlass/numeric/types.hpp"

namespace humming_cutlass {

struct TileCoordinate {
  int32_t m;
  int32_t n;
};

/// Coordinate of tile `index` of a grid of tiles_m x tiles_n.
HUMMING_CUTLASS_HOST_DEVICE TileCoordinate raster(int32_t index, int32_t tiles_m, int32_t tiles_n) {
  constexpr int32_t GroupM = 4;  // a row of A is several times the bytes of a row of B: few of A, many of B
  // Division of unsigned integers takes fewer instructions.
  auto const group = int32_t(uint32_t(index) / uint32_t(GroupM * tiles_n));
  int32_t const first_m = group * GroupM;
  int32_t const height = tiles_m - first_m < GroupM ? tiles_m - first_m : GroupM;
  int32_t const rest = index - first_m * tiles_n;
  auto const n = int32_t(uint32_t(rest) / uint32_t(height));
  return {first_m + rest - n * height, n};
}

}  // namespace humming_cutlass
