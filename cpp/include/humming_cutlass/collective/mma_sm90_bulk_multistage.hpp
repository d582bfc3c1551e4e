/// Mainloop for SM90 and few tokens: the weight streams through rings of bulk copies, one ring a warp; mma.sync.
///
/// A CTA owns whole atom rows (16 weight rows) over the full k and never shares one, so nothing is summed between CTAs.
/// Its warps split k: warp w takes columns [w * WarpK, (w + 1) * WarpK) of every `TileShape::K`, keeps its slice of A in
/// registers for all atom rows, and leaves partial sums in shared memory, which the CTA adds in the order of k. Until
/// then no warp waits for another.
///
/// As in the SM80 mainloop the weight, the user's B, is the instruction's operand A, and scales multiply fp32
/// accumulators. A slab is what a warp multiplies at a time: one atom row x WarpK columns.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm80.hpp>

#include "humming_cutlass/arch/sm90.hpp"
#include "humming_cutlass/collective/mma_atom_sm80.hpp"
#include "humming_cutlass/dequant/code_book.hpp"
#include "humming_cutlass/dequant/floating.hpp"
#include "humming_cutlass/dequant/integer.hpp"
#include "humming_cutlass/device/arguments.hpp"
#include "humming_cutlass/layout/group_map.hpp"

namespace humming_cutlass::collective {

template <class Config>
struct MmaSm90BulkMultistage {
  using ElementA = typename Config::ElementA;
  using ElementB = typename Config::ElementB;
  using ElementScale = typename Config::ElementScale;
  using ElementZero = typename Config::ElementZero;
  using TileShape = typename Config::TileShape;
  using Dequant = Dequantizer<ElementB, ElementA>;
  using Atom = typename Dequant::Atom;
  using Scale = ToFloat<ElementScale>;

  static constexpr bool HasZero = !std::is_same_v<ElementZero, NoZero>;
  static constexpr bool HasIntegerZero = std::is_same_v<ElementZero, IntegerZero>;
  static constexpr bool HasFloatingZero = HasZero && !HasIntegerZero;
  using Zero = ToFloat<std::conditional_t<HasZero, ElementZero, float>>;

  static constexpr int StageCount = Config::StageCount;
  static constexpr int Warps = 16;
  static constexpr int Threads = 32 * Warps;
  static constexpr int WarpK = TileShape::K / Warps;
  static constexpr int AtomColumns = WarpK / 64;
  static constexpr int TokenTiles = TileShape::M / 8;  ///< MMA tiles along m

  using Groups = GroupMap<Config::GroupSize, WarpK>;
  static constexpr bool Grouped = Groups::Grouped;
  /// What an unsigned code is centred on when floating zero points are corrected in fp32.
  static constexpr int Center = HasFloatingZero ? 1 << (Dequant::Bits - 1) : Dequant::Center;

  static constexpr int BytesAtom = Atom::Words * 4;
  static constexpr int BytesB = AtomColumns * BytesAtom;
  static constexpr int BytesGroupScale = 16 * int(sizeof(typename Scale::Storage));
  static constexpr int BytesGroupZero = 16 * int(sizeof(typename Zero::Storage));
  static constexpr int BytesScale = Groups::TileGroups * BytesGroupScale;
  static constexpr int ZeroGroups = !HasZero ? 0 : Grouped ? Groups::TileGroups : 1;
  static constexpr int BytesZero = ZeroGroups * BytesGroupZero;
  static constexpr int StageBytes = BytesB + BytesScale + BytesZero;
  static constexpr int RingBytes = StageCount * StageBytes;  ///< of one warp
  /// Warps whose first slab is requested before A: what memory keeps in flight. More would delay A, less the weight.
  static constexpr int EarlyWarps = 4;
  /// Partial sums of an atom row: a tile of 16 x 8 floats for each warp and MMA tile.
  static constexpr int BytesSums = Warps * TokenTiles * 512;
  /// Atom rows that are summed at a time: what shared memory holds beside the rings; more than 8 gain nothing.
  static constexpr int RowBlock = [] {
    constexpr int rest = 227 * 1024 - Warps * (RingBytes + 8 * StageCount) - 128;
    return rest / BytesSums > 8 ? 8 : rest / BytesSums;
  }();

  static_assert(TileShape::N == 16, "MmaSm90Bulk: TileShape::N must be 16, an atom row");
  static_assert(TileShape::K % (64 * Warps) == 0, "MmaSm90Bulk: TileShape::K must be a multiple of 1024");
  static_assert(!HasZero || Dequant::TakesZero, "MmaSm90Bulk: only integer weights take a zero point");

  using Accumulator = float[TokenTiles][4];
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;

  static_assert(RowBlock >= 1, "MmaSm90Bulk: more shared memory than SM90 has; choose fewer stages");

  struct SharedStorage {
    alignas(128) uint8_t rings[Warps][RingBytes];
    alignas(16) float4 sums[RowBlock * Warps * TokenTiles * 32];  // (atom rows, k slices, MMA tiles, lanes)
    uint64_t full[Warps][StageCount];
  };

  /// The slabs of a warp in the order in which it multiplies them: atom rows, inside columns, inside blocks of atom rows.
  struct Sequence {
    int32_t row_end;
    int32_t columns;  ///< of WarpK weights, in all of k
    int32_t first_column;
    int32_t block_rows;
    int32_t block;  ///< first atom row of the block
    int32_t row;
    int32_t column;

    __device__ Sequence(int32_t begin, int32_t end, int32_t k_columns, int32_t warp, int32_t rows)
        : row_end(end),
          columns(k_columns),
          first_column(warp),
          block_rows(rows),
          block(begin),
          row(begin),
          column(warp) {}

    __device__ bool valid() const { return block < row_end && first_column < columns; }

    __device__ void advance() {
      if (++row < block_end()) {
        return;
      }
      column += Warps;
      if (column >= columns) {
        column = first_column;
        block = block_end();
      }
      row = block;
    }

    __device__ int32_t block_end() const { return min(block + block_rows, row_end); }
  };

  GemmArguments const& args;
  uint8_t* ring;
  uint64_t* full;
  int lane;
  Sequence ahead;  ///< the slab that is copied next

  __device__ MmaSm90BulkMultistage(GemmArguments const& arguments, uint8_t* warp_ring, uint64_t* warp_full,
                                   Sequence const& sequence)
      : args(arguments), ring(warp_ring), full(warp_full), lane(threadIdx.x % 32), ahead(sequence) {}

  __device__ int32_t atoms_k() const { return (args.k + 63) / 64; }

  /// Makes the ring ready: no warp but this one touches it.
  __device__ void initialize() {
    if (lane == 0) {
      for (int s = 0; s < StageCount; ++s) {
        FullBarrier::init(full + s, 1);
      }
      cutlass::arch::fence_barrier_init();
    }
    if (atoms_k() % AtomColumns != 0) {
      // The last slab of a row is short. Where it ends, the bits of another slab, or these zeros, meet zeros of A: they
      // must be finite weights.
      for (int i = lane; i < RingBytes / 16; i += 32) {
        reinterpret_cast<uint4*>(ring)[i] = make_uint4(0, 0, 0, 0);
      }
      cutlass::arch::fence_view_async_shared();
    }
    __syncwarp();
  }

  /// Issues the copies of the next slab into `stage`: B by one bulk copy, scales and zero points by cp.async.
  __device__ void load(int stage) {
    if (ahead.valid()) {
      uint8_t* const target = ring + stage * StageBytes;
      if (lane == 0) {
        int32_t const atom = ahead.column * AtomColumns;
        uint32_t const bytes = min(AtomColumns, atoms_k() - atom) * BytesAtom;
        auto const* const b = static_cast<uint8_t const*>(args.ptr_b);
        FullBarrier::arrive_and_expect_tx(full + stage, bytes);
        arch::bulk_copy_evict_first(b + (int64_t(ahead.row) * atoms_k() + atom) * BytesAtom, target, full + stage,
                                    bytes);
      }
      if constexpr (Grouped) {
        load_groups<Groups::TileGroups, BytesGroupScale>(args.ptr_scale, target + BytesB);
      }
      if constexpr (HasZero) {
        load_groups<ZeroGroups, BytesGroupZero>(args.ptr_zero, target + BytesB + BytesScale);
      }
      ahead.advance();
    }
    if constexpr (Grouped || HasZero) {
      cute::cp_async_fence();
    }
  }

  /// The factors of `Count` groups of an atom row; zeros for groups beyond k.
  template <int Count, int BytesGroup>
  __device__ void load_groups(void const* pointer, uint8_t* target) const {
    constexpr int GroupChunks = BytesGroup / 16;
    int32_t first = 0;
    if constexpr (Grouped) {
      first = Groups::first(ahead.column);
    }
    auto const* const source =
        static_cast<uint8_t const*>(pointer) + (int64_t(ahead.row) * args.groups + first) * BytesGroup;
    for (int c = lane; c < Count * GroupChunks; c += 32) {
      bool const valid = first + c / GroupChunks < args.groups;
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
          *reinterpret_cast<cute::uint128_t const*>(valid ? source + c * 16 : static_cast<uint8_t const*>(pointer)),
          *reinterpret_cast<cute::uint128_t*>(target + c * 16), valid);
    }
  }

  using Fragment =
      uint32_t[TokenTiles][AtomColumns][2][4];  // (MMA tiles, atoms, k32 halves, registers of two k16 steps)

  /// Whether rows of A start at 16-byte boundaries.
  __device__ bool aligned_a() const {
    return reinterpret_cast<uintptr_t>(args.ptr_a) % 16 == 0 && args.stride_a % 8 == 0;
  }

  /// Eight columns of one token: what a lane holds of 32 columns of A before `transpose_quad`.
  __device__ uint16_t const* chunk_a(int32_t column, int tile, int half) const {
    int64_t const token = tile * 8 + lane / 4;
    return static_cast<uint16_t const*>(args.ptr_a) + token * args.stride_a + column * WarpK + half * 32 + lane % 4 * 8;
  }

  /// Whether all of A that meets column `column` of B can be read 16 bytes at a time.
  __device__ bool whole_a(int32_t column) const { return aligned_a() && (column + 1) * WarpK <= args.k; }

  /// One atom's columns of A, eight of a token in a lane, where `whole_a`. Registers of tokens beyond m are left alone.
  /// No branch: it would make each load wait for the one before.
  template <int AtomColumn>
  __device__ void load_whole_a(int32_t column, Fragment& tCrA) const {
    static_for<TokenTiles>([&](auto j) {
      static_for<2>([&](auto half) {
        uint32_t (&words)[4] = tCrA[j][AtomColumn][half];
        if (j * 8 + lane / 4 < args.m) {
          uint4 const x = __ldcg(reinterpret_cast<uint4 const*>(chunk_a(column, j, AtomColumn * 2 + half)));
          words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
        }
      });
    });
  }

  /// The slice of A that meets column `column` of B, eight columns of a token in a lane; zeros beyond m and k.
  __device__ void load_a(int32_t column, Fragment& tCrA) const {
    clear(tCrA);
    if (whole_a(column)) {
      static_for<AtomColumns>([&](auto atom) { load_whole_a<atom>(column, tCrA); });
      return;
    }
    static_for<TokenTiles>([&](auto j) {
      static_for<AtomColumns * 2>([&](auto i) {
        int32_t const begin = column * WarpK + i * 32 + lane % 4 * 8;
        int const valid = j * 8 + lane / 4 < args.m ? min(8, args.k - begin) : 0;
        load_elements(chunk_a(column, j, i), valid, tCrA[j][i / 2][i % 2]);
      });
    });
  }

  /// Up to eight elements of A, one by one: at the edge of k, or where rows are not aligned.
  __device__ static void load_elements(uint16_t const* source, int valid, uint32_t (&words)[4]) {
#pragma unroll 1
    for (int e = valid - 1; e >= 0; --e) {  // from the last: every step shifts by one element
      words[3] = words[3] << 16 | words[2] >> 16;
      words[2] = words[2] << 16 | words[1] >> 16;
      words[1] = words[1] << 16 | words[0] >> 16;
      words[0] = words[0] << 16 | source[e];
    }
  }

  /// From the order of the copy to operand B of the MMAs: the four lanes of a token hold the 4 x 4 words of 32 columns by
  /// column, the MMA wants them by pair of columns.
  __device__ void transpose(Fragment& tCrA) const {
    static_for<TokenTiles>([&](auto j) {
      static_for<AtomColumns>(
          [&](auto atom) { static_for<2>([&](auto half) { transpose_quad(tCrA[j][atom][half]); }); });
    });
  }

  /// Word i of lane t of a quad becomes word t of lane i.
  __device__ void transpose_quad(uint32_t (&words)[4]) const {
    static_for<2>([&](auto stage) {
      constexpr int distance = 1 << stage;
      bool const upper = lane & distance;
      static_for<2>([&](auto pair) {
        constexpr int low = stage == 0 ? 2 * pair : int(pair);
        constexpr int high = low + distance;
        uint32_t const received = __shfl_xor_sync(0xFFFFFFFFu, upper ? words[low] : words[high], distance);
        (upper ? words[low] : words[high]) = received;
      });
    });
  }

  /// What a warp keeps while it multiplies a slab.
  struct Sums {
    Accumulator total;
    Accumulator partial;                                   ///< of the current group
    float token_sum[HasFloatingZero ? TokenTiles : 1][4];  ///< sum of A over the group, where D^T has its columns
    uint32_t minus_zero[2];                                ///< pair -zero * 2^Exponent of rows lane/4, lane/4 + 8
  };

  __device__ static constexpr float two_to(int exponent) { return bit_cast<float>(uint32_t(127 + exponent) << 23); }

  template <class T, int Extent>
  __device__ static void clear(T (&array)[Extent]) {
    static_for<Extent>([&](auto i) {
      if constexpr (std::is_array_v<T>) {
        clear(array[i]);
      } else {
        array[i] = T(0);
      }
    });
  }

  __device__ void set_integer_zero(uint8_t const* stage, int group, Sums& sums) const {
    float zero0, zero1;
    load_scale_pair<Zero>(stage + BytesB + BytesScale, group, lane, zero0, zero1);
    sums.minus_zero[0] = broadcast_pair<ElementA>(-zero0 * two_to(Dequant::Exponent));
    sums.minus_zero[1] = broadcast_pair<ElementA>(-zero1 * two_to(Dequant::Exponent));
  }

  /// total += scale * (partial + (Center - zero) * token_sum), and clears what is added.
  __device__ void promote(uint8_t const* stage, int group, Sums& sums) const {
    float scale[2] = {1.f, 1.f};
    if constexpr (Grouped) {
      load_scale_pair<Scale>(stage + BytesB, group, lane, scale[0], scale[1]);
    }
    if constexpr (HasFloatingZero) {
      float zero[2];
      load_scale_pair<Zero>(stage + BytesB + BytesScale, group, lane, zero[0], zero[1]);
      static_for<TokenTiles>([&](auto j) {
        static_for<4>([&](auto i) {
          sums.partial[j][i] += (float(Center) - zero[i / 2]) * two_to(Dequant::Exponent) * sums.token_sum[j][i];
        });
      });
      clear(sums.token_sum);
    }
    static_for<TokenTiles>(
        [&](auto j) { static_for<4>([&](auto i) { sums.total[j][i] += scale[i / 2] * sums.partial[j][i]; }); });
    clear(sums.partial);
  }

  /// Multiplies the slab of column `column` in `stage`: sums.total = the sums of (B - zero) * scale * A * 2^Exponent.
  ///
  /// Refills tCrA for column `next` on the way, if that is not negative.
  __device__ void multiply(int stage_index, uint32_t phase, int32_t column, int32_t next, Fragment& tCrA,
                           Sums& sums) const {
    uint8_t const* const stage = ring + stage_index * StageBytes;
    clear(sums.total);
    clear(sums.partial);
    clear(sums.token_sum);
    sums.minus_zero[0] = sums.minus_zero[1] = broadcast_pair<ElementA>(-float(Center) * two_to(Dequant::Exponent));
    FullBarrier::wait(full + stage_index, phase);
    if constexpr (Grouped || HasZero) {
      cute::cp_async_wait<StageCount - 1>();
      __syncwarp();
    }
    if constexpr (HasIntegerZero && !Grouped) {
      set_integer_zero(stage, 0, sums);
    }
    static_for<AtomColumns>([&](auto atom) {
      uint32_t words[Atom::WordsPerLane];
      load_lane<Atom>(stage + atom * BytesAtom, lane, words);
      static_for<4>([&](auto step) {
        constexpr int begin = atom * 64 + step * 16;
        if constexpr (HasIntegerZero && Grouped && begin % Groups::Granule == 0) {
          if (begin == 0 || Groups::border(column, begin)) {
            set_integer_zero(stage, Groups::in_tile(column, begin), sums);
          }
        }
        uint32_t tCrB[4];  // (registers of a k16 step)
        static_for<4>(
            [&](auto i) { tCrB[i] = Dequant::template convert<step * 4 + i>(words, sums.minus_zero[i % 2]); });
        static_for<TokenTiles>([&](auto j) {
          uint32_t const(&x)[4] = tCrA[j][atom][step / 2];
          mma_sync<ElementA>(sums.partial[j], tCrB, x[step % 2 * 2], x[step % 2 * 2 + 1]);
          if constexpr (HasFloatingZero) {
            constexpr uint32_t one = power_of_two_pair<ElementA>(0);
            uint32_t const ones[4] = {one, one, one, one};
            mma_sync<ElementA>(sums.token_sum[j], ones, x[step % 2 * 2], x[step % 2 * 2 + 1]);
          }
        });
        if constexpr (Grouped && (begin + 16) % Groups::Granule == 0) {
          if (Groups::border(column, begin + 16)) {
            promote(stage, Groups::in_tile(column, begin), sums);
          }
        }
      });
      if (next >= 0) {
        load_whole_a<atom>(next, tCrA);
      }
    });
    if constexpr (!Grouped) {
      promote(stage, 0, sums);
    } else if constexpr (!Groups::GroupDividesTile) {
      if (!Groups::border(column, WarpK)) {  // the next slab along k goes on with this group
        promote(stage, Groups::in_tile(column, WarpK - 1), sums);
      }
    }
  }

  /// Runs the slabs of this warp: `keep(row, first, sums)` takes the sums of an atom row, of the warp's first column or
  /// to be added; `finish(begin, end)` follows each block of atom rows, and is called by every warp.
  template <class Keep, class Finish>
  __device__ void operator()(Sequence now, Keep&& keep, Finish&& finish) {
    Fragment tCrA;
    Sums sums;
    int stage = 0;
    uint32_t phase = 0;
    // Some copies of B go out before the kernels that this one depends on are complete, since B is a constant; the others
    // after those of A, which would wait behind them.
    int const early = threadIdx.x / 32 < EarlyWarps ? 1 : 0;
    for (int s = 0; s < early; ++s) {
      load(s);
    }
    arch::wait_on_dependent_grids();
    bool loaded = now.valid();
    if (loaded) {
      load_a(now.column, tCrA);
    }
    for (int s = early; s < StageCount; ++s) {
      load(s);
    }
    bool fresh = true;  // tCrA is not transposed yet
#pragma unroll 1
    while (now.block < now.row_end) {
      Sequence const at = now;
      now.advance();
      if (at.column < at.columns) {
        if (!loaded) {
          load_a(at.column, tCrA);
        }
        if (fresh) {
          transpose(tCrA);
        }
        fresh = now.column != at.column;
        loaded = !fresh || whole_a(now.column);
        multiply(stage, phase, at.column, fresh && loaded && now.valid() ? now.column : -1, tCrA, sums);
        __syncwarp();  // the stage has been read by every lane
        load(stage);
        keep(at.row - at.block, at.column < Warps, sums.total);
        if (++stage == StageCount) {
          stage = 0;
          phase ^= 1;
        }
      }
      if (now.block != at.block) {
        finish(at.block, now.block);
      }
    }
    cute::cp_async_wait<0>();
  }
};

}  // namespace humming_cutlass::collective
