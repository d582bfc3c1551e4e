/// Mainloop for SM80 and later: cp.async into a ring of stages, weights dequantized in registers, mma.sync.
///
/// The tensor core computes D^T[n, m] = B[n, k] * A^T[k, m]: the weight, the user's B, is the instruction's operand A and
/// comes from registers; the activations, the user's A, are its operand B and come from shared memory. Scales multiply
/// fp32 accumulators, never weights, so a weight enters the MMA exactly and every scale type keeps its full range.
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>

#include "humming_cutlass/collective/mma_atom_sm80.hpp"
#include "humming_cutlass/dequant/code_book.hpp"
#include "humming_cutlass/dequant/floating.hpp"
#include "humming_cutlass/dequant/integer.hpp"
#include "humming_cutlass/device/arguments.hpp"
#include "humming_cutlass/layout/group_map.hpp"
#include "humming_cutlass/numeric/static_for.hpp"

namespace humming_cutlass::collective {

template <class Config>
struct MmaSm80CpAsyncMultistage {
  using ElementA = typename Config::ElementA;
  using ElementB = typename Config::ElementB;
  using ElementScale = typename Config::ElementScale;
  using ElementZero = typename Config::ElementZero;
  using TileShape = typename Config::TileShape;
  using WarpShape = typename Config::WarpShape;
  using Dequant = Dequantizer<ElementB, ElementA>;
  using Atom = typename Dequant::Atom;
  using Scale = ToFloat<ElementScale>;

  static constexpr int GroupSize = Config::GroupSize;
  static constexpr int StageCount = Config::StageCount;
  using Groups = GroupMap<GroupSize, TileShape::K>;
  static constexpr bool Grouped = Groups::Grouped;
  static constexpr bool HasZero = !std::is_same_v<ElementZero, NoZero>;
  static constexpr bool HasIntegerZero = std::is_same_v<ElementZero, IntegerZero>;
  static constexpr bool HasFloatingZero = HasZero && !HasIntegerZero;
  using Zero = ToFloat<std::conditional_t<HasZero, ElementZero, float>>;

  static constexpr int WarpsM = TileShape::M / WarpShape::M;
  static constexpr int WarpsN = TileShape::N / WarpShape::N;
  static constexpr int Threads = 32 * WarpsM * WarpsN;
  static constexpr int AtomRows = TileShape::N / 16;  ///< of the CTA tile
  static constexpr int AtomColumns = TileShape::K / 64;
  static constexpr int WarpRows = WarpShape::N / 16;   ///< atom rows of a warp
  static constexpr int TokenTiles = WarpShape::M / 8;  ///< MMA tiles along m of a warp

  static constexpr int StageGroups = Groups::TileGroups;
  static constexpr int Granule = Groups::Granule;

  static constexpr int BytesA = TileShape::M * TileShape::K * 2;
  static constexpr int BytesB = AtomRows * AtomColumns * Atom::Words * 4;
  static constexpr int BytesScale = AtomRows * StageGroups * 16 * int(sizeof(typename Scale::Storage));
  static constexpr int BytesZero = HasZero ? AtomRows * StageGroups * 16 * int(sizeof(typename Zero::Storage)) : 0;
  static constexpr int StageBytes = BytesA + BytesB + BytesScale + BytesZero;
  static constexpr int SmemBytes = StageCount * StageBytes;

  static_assert(TileShape::M % WarpShape::M == 0 && TileShape::N % WarpShape::N == 0,
                "MmaSm80: WarpShape must divide TileShape");
  static_assert(WarpShape::M % 8 == 0 && WarpShape::N % 16 == 0, "MmaSm80: WarpShape must be a multiple of 8 x 16");
  static_assert(TileShape::K % 64 == 0, "MmaSm80: TileShape::K must be a multiple of 64, the atom's columns");
  static_assert(StageCount >= 2, "MmaSm80: choose at least two stages");
  static_assert(!HasZero || Dequant::TakesZero, "MmaSm80: only integer weights take a zero point");

  static constexpr int Fragments = WarpRows * TokenTiles;
  using Accumulator = float[Fragments][4];  ///< fragment r * TokenTiles + j: atom row r, token tile j of the warp

  GemmArguments const& args;
  uint8_t* smem;
  int thread;
  int lane;
  int warp_m;       ///< first token of the warp inside the tile
  int warp_n;       ///< first atom row of the warp inside the tile
  int64_t tile_m;   ///< first token of the tile
  int32_t tile_n;   ///< first atom row of the tile
  int32_t atoms_n;  ///< atom rows of the weight
  int32_t atoms_k;  ///< atom columns of the weight
  bool aligned_a;   ///< rows of A start at 16-byte boundaries

  uint32_t minus_zero[WarpRows][2];                      ///< pair -zero * 2^Exponent of rows (lane/4, lane/4 + 8)
  float channel_zero[WarpRows][2];                       ///< floating zero points of channel scales
  float token_sum[HasFloatingZero ? TokenTiles : 1][4];  ///< sum of A over the group, where D^T has its columns

  /// What an unsigned code is centred on when floating zero points are corrected in fp32.
  static constexpr int Center = HasFloatingZero ? 1 << (Dequant::Bits - 1) : Dequant::Center;

  HUMMING_CUTLASS_HOST_DEVICE static constexpr float two_to(int exponent) {
    return bit_cast<float>(uint32_t(127 + exponent) << 23);
  }

  __device__ MmaSm80CpAsyncMultistage(GemmArguments const& arguments, uint8_t* shared, int32_t m_index, int32_t n_index)
      : args(arguments), smem(shared) {
    thread = threadIdx.x;
    lane = thread % 32;
    int const warp = thread / 32;
    warp_m = warp / WarpsN * WarpShape::M;
    warp_n = warp % WarpsN * WarpRows;
    tile_m = int64_t(m_index) * TileShape::M;
    tile_n = n_index * AtomRows;
    atoms_n = (args.n + 15) / 16;
    atoms_k = (args.k + 63) / 64;
    aligned_a = reinterpret_cast<uintptr_t>(args.ptr_a) % 16 == 0 && args.stride_a % 8 == 0;
#pragma unroll
    for (int r = 0; r < WarpRows; ++r) {
      minus_zero[r][0] = minus_zero[r][1] = broadcast_pair<ElementA>(-float(Center) * two_to(Dequant::Exponent));
      channel_zero[r][0] = channel_zero[r][1] = 0.f;
      if constexpr (HasZero && !Grouped) {
        auto const* zero =
            static_cast<typename Zero::Storage const*>(args.ptr_zero) + packed_row(r) * 16 + lane / 4 * 2;
        set_zero(r, Zero::convert(zero[0]), Zero::convert(zero[1]));
      }
    }
  }

  /// Atom row `r` of this warp in the weight, clamped to it.
  __device__ int64_t packed_row(int r) const { return min(tile_n + warp_n + r, atoms_n - 1); }

  __device__ void set_zero(int r, float zero0, float zero1) {
    if constexpr (HasIntegerZero) {
      minus_zero[r][0] = broadcast_pair<ElementA>(-zero0 * two_to(Dequant::Exponent));
      minus_zero[r][1] = broadcast_pair<ElementA>(-zero1 * two_to(Dequant::Exponent));
    } else {
      channel_zero[r][0] = zero0;
      channel_zero[r][1] = zero1;
    }
  }

  /// Copies `Chunks` 16-byte pieces: chunk(c) returns {source, offset in shared memory, valid}.
  template <int Chunks, class Chunk>
  __device__ void copy_chunks(Chunk&& chunk) const {
    static_for<(Chunks + Threads - 1) / Threads>([&](auto i) {
      int const c = i * Threads + thread;
      if (Chunks % Threads == 0 || c < Chunks) {
        chunk(c);
      }
    });
  }

  /// One 16-byte piece; zeros when `valid` is false.
  __device__ void copy_16_bytes(void const* source, uint8_t* target, bool valid, void const* fallback) const {
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
        *static_cast<cute::uint128_t const*>(valid ? source : fallback), *reinterpret_cast<cute::uint128_t*>(target),
        valid);
  }

  /// Issues the copies of tile `k_tile` into `stage`.
  __device__ void load(int stage, int32_t k_tile) const {
    uint8_t* const base = smem + stage * StageBytes;
    load_a(base, k_tile);
    load_b(base + BytesA, k_tile);
    if constexpr (Grouped) {
      load_groups<typename Scale::Storage>(args.ptr_scale, base + BytesA + BytesB, k_tile);
      if constexpr (HasZero) {
        load_groups<typename Zero::Storage>(args.ptr_zero, base + BytesA + BytesB + BytesScale, k_tile);
      }
    }
  }

  /// A: rows of 64 columns = 128 bytes, 16-byte chunks permuted by the row (CuTe's Swizzle<3, 4, 3>).
  __device__ void load_a(uint8_t* base, int32_t k_tile) const {
    constexpr int RowChunks = TileShape::K / 8;
    auto const* const a = static_cast<uint16_t const*>(args.ptr_a);
    copy_chunks<TileShape::M * RowChunks>([&](int c) {
      int const row = c / RowChunks;
      int const chunk = c % RowChunks;
      int64_t const token = tile_m + row;
      int32_t const column = k_tile * TileShape::K + chunk * 8;
      uint8_t* const target = base + chunk / 8 * (TileShape::M * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
      int const valid = token < args.m ? max(0, min(8, args.k - column)) : 0;
      uint16_t const* const source = a + token * args.stride_a + column;
      if (aligned_a && (valid == 8 || valid == 0)) {
        copy_16_bytes(source, target, valid == 8, a);
      } else {
        uint32_t words[4];
        static_for<4>([&](auto w) {
          uint32_t const low = 2 * w < valid ? source[2 * w] : 0;
          uint32_t const high = 2 * w + 1 < valid ? source[2 * w + 1] : 0;
          words[w] = low | (high << 16);
        });
        *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    });
  }

  /// B: for each atom row, the tile's atoms are one contiguous run.
  __device__ void load_b(uint8_t* base, int32_t k_tile) const {
    constexpr int AtomChunks = Atom::Words / 4;
    constexpr int RowChunks = AtomColumns * AtomChunks;
    auto const* const b = static_cast<uint8_t const*>(args.ptr_b);
    copy_chunks<AtomRows * RowChunks>([&](int c) {
      int const row = c / RowChunks;
      int const chunk = c % RowChunks;
      int32_t const atom_n = tile_n + row;
      int32_t const atom_k = k_tile * AtomColumns + chunk / AtomChunks;
      bool const valid = atom_n < atoms_n && atom_k < atoms_k;
      int64_t const offset =
          (int64_t(atom_n) * atoms_k + int64_t(k_tile) * AtomColumns) * (Atom::Words * 4) + chunk * 16;
      copy_16_bytes(b + offset, base + c * 16, valid, b);
    });
  }

  /// Scales or zero points: for each atom row, 16 of them for every group that the tile touches.
  template <class Storage>
  __device__ void load_groups(void const* pointer, uint8_t* base, int32_t k_tile) const {
    constexpr int GroupChunks = int(sizeof(Storage));
    constexpr int RowChunks = StageGroups * GroupChunks;
    auto const* const source = static_cast<uint8_t const*>(pointer);
    int32_t const first = Groups::first(k_tile);
    copy_chunks<AtomRows * RowChunks>([&](int c) {
      int const row = c / RowChunks;
      int const chunk = c % RowChunks;
      int32_t const atom_n = tile_n + row;
      bool const valid = atom_n < atoms_n && first + chunk / GroupChunks < args.groups;
      int64_t const offset = ((int64_t(atom_n) * args.groups + first) * GroupChunks + chunk) * 16;
      copy_16_bytes(source + offset, base + c * 16, valid, source);
    });
  }

  /// The packed words of atom (r, column) of this warp.
  __device__ void load_words(uint8_t const* base, int r, int column, uint32_t (&words)[Atom::WordsPerLane]) const {
    load_lane<Atom>(base + BytesA + ((warp_n + r) * AtomColumns + column) * (Atom::Words * 4), lane, words);
  }

  /// The two scales (or zero points) of this lane's rows in group `group` of the stage.
  template <class Converter>
  __device__ static void load_pair(uint8_t const* base, int row, int group, int lane, float& x0, float& x1) {
    load_scale_pair<Converter>(base, row * StageGroups + group, lane, x0, x1);
  }

  /// accumulators += scale * (partial + (Center - zero) * token_sum); clears the partial sums.
  __device__ void promote(uint8_t const* base, int group, Accumulator& partial, Accumulator& accumulators) {
#pragma unroll
    for (int r = 0; r < WarpRows; ++r) {
      float scale[2];
      load_pair<Scale>(base + BytesA + BytesB, warp_n + r, group, lane, scale[0], scale[1]);
      float correction[2] = {0.f, 0.f};
      if constexpr (HasFloatingZero) {
        load_pair<Zero>(base + BytesA + BytesB + BytesScale, warp_n + r, group, lane, correction[0], correction[1]);
#pragma unroll
        for (float& c : correction) {
          c = (float(Center) - c) * two_to(Dequant::Exponent);
        }
      }
#pragma unroll
      for (int j = 0; j < TokenTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (HasFloatingZero) {
            partial[r * TokenTiles + j][i] += correction[i / 2] * token_sum[j][i];
          }
          accumulators[r * TokenTiles + j][i] += scale[i / 2] * partial[r * TokenTiles + j][i];
          partial[r * TokenTiles + j][i] = 0.f;
        }
      }
    }
    if constexpr (HasFloatingZero) {
      clear_token_sum();
    }
  }

  __device__ void clear_token_sum() {
#pragma unroll
    for (auto& sums : token_sum) {
#pragma unroll
      for (float& sum : sums) {
        sum = 0.f;
      }
    }
  }

  /// Multiplies the tile in `stage` into `sums` (the partial sums of a group, or the accumulators themselves).
  __device__ void mma(int stage, int32_t k_tile, Accumulator& sums, Accumulator& accumulators) {
    uint8_t* const base = smem + stage * StageBytes;
    static_for<AtomColumns>([&](auto column) {
      uint32_t words[WarpRows][Atom::WordsPerLane];  // (atom rows, lane's words)
#pragma unroll
      for (int r = 0; r < WarpRows; ++r) {
        load_words(base, r, column, words[r]);
      }
      static_for<2>([&](auto half) {
        uint32_t tCrA[TokenTiles][4];  // (token tiles, registers of two k16 steps)
#pragma unroll
        for (int j = 0; j < TokenTiles; ++j) {
          int const row = warp_m + j * 8 + lane % 8;
          int const chunk = half * 4 + lane / 8;
          uint8_t* const source = base + column * (TileShape::M * 128) + row * 128 + (chunk ^ (row % 8)) * 16;
          cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t*>(source), tCrA[j][0], tCrA[j][1], tCrA[j][2],
                                        tCrA[j][3]);
        }
        static_for<2>([&](auto step) {
          constexpr int k_step = half * 2 + step;
          constexpr int begin = column * 64 + k_step * 16;
          if constexpr (Grouped && HasIntegerZero && begin % Granule == 0) {
#pragma unroll
            for (int r = 0; r < WarpRows; ++r) {
              float zero[2];
              load_pair<Zero>(base + BytesA + BytesB + BytesScale, warp_n + r, Groups::in_tile(k_tile, begin), lane,
                              zero[0], zero[1]);
              set_zero(r, zero[0], zero[1]);
            }
          }
#pragma unroll
          for (int r = 0; r < WarpRows; ++r) {
            uint32_t tCrB[4];  // (registers of a k16 step)
            static_for<4>(
                [&](auto i) { tCrB[i] = Dequant::template convert<k_step * 4 + i>(words[r], minus_zero[r][i % 2]); });
#pragma unroll
            for (int j = 0; j < TokenTiles; ++j) {
              mma_sync<ElementA>(sums[r * TokenTiles + j], tCrB, tCrA[j][2 * step], tCrA[j][2 * step + 1]);
            }
          }
          if constexpr (HasFloatingZero) {
            uint32_t const one = broadcast_pair<ElementA>(1.f);
            uint32_t const ones[4] = {one, one, one, one};
#pragma unroll
            for (int j = 0; j < TokenTiles; ++j) {
              mma_sync<ElementA>(token_sum[j], ones, tCrA[j][2 * step], tCrA[j][2 * step + 1]);
            }
          }
          if constexpr (Grouped && (begin + 16) % Granule == 0) {
            if (Groups::border(k_tile, begin + 16)) {
              promote(base, Groups::in_tile(k_tile, begin), sums, accumulators);
            }
          }
        });
      });
    });
  }

  /// Runs k tiles [begin, end); on return `accumulators` holds 2^Exponent times the sums of (B - zero) * A, multiplied by
  /// the group scales where there are groups.
  __device__ void operator()(int32_t begin, int32_t end, Accumulator& accumulators) {
    Accumulator partial;
#pragma unroll
    for (int r = 0; r < WarpRows; ++r) {
#pragma unroll
      for (int j = 0; j < TokenTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          accumulators[r * TokenTiles + j][i] = partial[r * TokenTiles + j][i] = 0.f;
        }
      }
    }
    clear_token_sum();
    static_for<StageCount - 1>([&](auto stage) {
      if (begin + stage < end) {
        load(stage, begin + stage);
      }
      cute::cp_async_fence();
    });
    int read = 0;
    int write = StageCount - 1;
#pragma unroll 1
    for (int32_t k_tile = begin; k_tile < end; ++k_tile) {
      cute::cp_async_wait<StageCount - 2>();
      __syncthreads();  // the tile has landed for every thread, and nobody reads the stage written next
      if (k_tile + StageCount - 1 < end) {
        load(write, k_tile + StageCount - 1);
      }
      cute::cp_async_fence();
      mma(read, k_tile, Grouped ? partial : accumulators, accumulators);
      write = read;
      read = read + 1 == StageCount ? 0 : read + 1;
    }
    if constexpr (Grouped && !Groups::GroupDividesTile) {
      if (begin < end && !Groups::border(end - 1, TileShape::K)) {  // a group that the next CTA along k finishes
        int const last = read == 0 ? StageCount - 1 : read - 1;
        promote(smem + last * StageBytes, Groups::in_tile(end - 1, TileShape::K - 1), partial, accumulators);
      }
    }
    if constexpr (HasFloatingZero && !Grouped) {
#pragma unroll
      for (int r = 0; r < WarpRows; ++r) {
#pragma unroll
        for (int j = 0; j < TokenTiles; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            accumulators[r * TokenTiles + j][i] +=
                (float(Center) - channel_zero[r][i / 2]) * two_to(Dequant::Exponent) * token_sum[j][i];
          }
        }
      }
    }
    cute::cp_async_wait<0>();
    __syncthreads();  // the stages are free for the epilogue
  }
};

}  // namespace humming_cutlass::collective
