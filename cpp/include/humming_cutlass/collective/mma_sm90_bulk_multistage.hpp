/// Mainloop for SM90 and few tokens: the weight streams through rings of bulk copies, one ring a warp; mma.sync.
///
/// A CTA owns whole atom rows (16 weight rows) over the full k and never shares one, so nothing is summed between CTAs.
/// Its warps split k: warp w takes columns [w * WarpK, (w + 1) * WarpK) of every 16 * WarpK, keeps its slice of A in
/// registers for a block of atom rows, and leaves partial sums in shared memory, which the CTA adds in the order of k.
/// Until then no warp waits for another. The width of a slice, `SlabAtoms` atoms, is a constant, so that the code of a
/// slab has no branches; the kernel holds this mainloop for several widths and takes that of `decode_slab_atoms`.
///
/// A slice of A comes by one TMA copy into shared memory of the warp, and the next one as soon as this one is in
/// registers; a slice that is larger than that comes in two halves. Where a tensor map cannot be, the warp's lanes read it.
///
/// As in the SM80 mainloop the weight, the user's B, is the instruction's operand A, and scales multiply fp32
/// accumulators. A slab is what a warp multiplies at a time: one atom row x WarpK columns.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "humming_cutlass/arch/sm90.hpp"
#include "humming_cutlass/collective/mma_atom_sm80.hpp"
#include "humming_cutlass/dequant/code_book.hpp"
#include "humming_cutlass/dequant/floating.hpp"
#include "humming_cutlass/dequant/integer.hpp"
#include "humming_cutlass/device/arguments.hpp"
#include "humming_cutlass/layout/group_map.hpp"

namespace humming_cutlass::collective {

template <class Config, int SlabAtoms>
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

  static constexpr int Warps = kDecodeWarps;
  static constexpr int Threads = 32 * Warps;
  static constexpr int AtomColumns = SlabAtoms;
  static constexpr int WarpK = 64 * AtomColumns;
  static constexpr int MaxAtoms = TileShape::K / (64 * Warps);

  using Groups = GroupMap<Config::GroupSize, WarpK>;
  static constexpr bool Grouped = Groups::Grouped;
  /// What an unsigned code is centred on when floating zero points are corrected in fp32.
  static constexpr int Center = HasFloatingZero ? 1 << (Dequant::Bits - 1) : Dequant::Center;

  static constexpr int BytesAtom = Atom::Words * 4;
  static constexpr int BytesGroupScale = 16 * int(sizeof(typename Scale::Storage));
  static constexpr int BytesGroupZero = 16 * int(sizeof(typename Zero::Storage));
  static constexpr int ZeroGroups = !HasZero ? 0 : Grouped ? Groups::TileGroups : 1;
  static constexpr int OffsetScale = AtomColumns * BytesAtom;
  static constexpr int OffsetZero = OffsetScale + Groups::TileGroups * BytesGroupScale;
  /// Rows of shared memory, 128 bytes, begin where stages do: other copies and loads are slower.
  static constexpr int StageBytes = (OffsetZero + ZeroGroups * BytesGroupZero + 127) / 128 * 128;

  static constexpr int StageCount = Config::StageCount;
  static constexpr int RingBytes = StageCount * StageBytes;  ///< of one warp
  /// Whether a slice of A can be larger than what a warp holds of it.
  static constexpr bool TakesHalves = AtomColumns * TileShape::M > decode_blocks_a(AtomColumns, MaxAtoms);
  static constexpr int BytesA = decode_blocks_a(AtomColumns, MaxAtoms) * 128;
  /// Partial sums of an atom row: a tile of 16 x 8 floats for each warp.
  static constexpr int BytesSums = Warps * 512;
  /// Atom rows of a block, with up to 4 or 2 tokens twice or four times as many: what shared memory holds beside the rings
  /// and A; more than 8 gain nothing.
  static constexpr int RowBlock = [] {
    constexpr int rest = 227 * 1024 - Warps * (RingBytes + BytesA + 8 * (StageCount + 1)) - 1024;
    return rest / BytesSums > 8 ? 8 : rest / BytesSums;
  }();

  static_assert(TileShape::M == 8 && TileShape::N == 16, "MmaSm90Bulk: TileShape must be 8 x 16, an atom row");
  static_assert(TileShape::K % (64 * Warps) == 0 && SlabAtoms <= MaxAtoms,
                "MmaSm90Bulk: TileShape::K must be a multiple of 1024, and hold a slab for each warp");
  static_assert(!HasZero || Dequant::TakesZero, "MmaSm90Bulk: only integer weights take a zero point");

  using Accumulator = float[4];
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;

  static_assert(RowBlock >= 1, "MmaSm90Bulk: more shared memory than SM90 has; choose fewer stages");

  struct SharedStorage {
    alignas(1024) uint8_t a[Warps][BytesA];
    uint8_t rings[Warps][RingBytes];
    float4 sums[Warps][RowBlock * 32];     // (k slices, atom rows x 8 rows x quads of tokens)
    uint64_t full[Warps][StageCount + 1];  // of the stages, and of A
  };

  /// The slabs of a warp in the order in which it multiplies them: atom rows, inside columns, inside blocks of atom rows.
  struct Sequence {
    int32_t k;
    int32_t row_end;
    int32_t first_column;  ///< of WarpK weights
    int32_t block_rows;
    int32_t block;  ///< first atom row of the block
    int32_t row;
    int32_t column;

    __device__ Sequence(int32_t begin, int32_t end, int32_t all_k, int32_t warp, int32_t rows)
        : k(all_k), row_end(end), first_column(warp), block_rows(rows), block(begin), row(begin), column(warp) {}

    __device__ bool exists() const { return column * WarpK < k; }
    __device__ bool valid() const { return block < row_end && exists(); }

    __device__ void advance() {
      if (++row < block_end()) {
        return;
      }
      column += Warps;
      if (!exists()) {
        column = first_column;
        block = block_end();
      }
      row = block;
    }

    __device__ int32_t block_end() const { return min(block + block_rows, row_end); }

    /// The column after this one; negative where none follows, or no other.
    __device__ int32_t next_column() const {
      Sequence next = *this;
      next.row = block_end() - 1;
      next.advance();
      return next.valid() && next.column != column ? next.column : -1;
    }
  };

  GemmArguments const& args;
  TensorMap const& map_a;
  uint8_t* slice;  ///< of A
  uint8_t* ring;
  uint64_t* full;  ///< of each stage, then of A
  int lane;
  uint32_t phases = 0;  ///< bit 0 of the ring, bit 1 of A

  __device__ MmaSm90BulkMultistage(GemmArguments const& arguments, TensorMap const& map, SharedStorage& shared,
                                   int warp, int lane_index)
      : args(arguments),
        map_a(map),
        slice(shared.a[warp]),
        ring(shared.rings[warp]),
        full(shared.full[warp]),
        lane(lane_index) {}

  /// Unsigned, so that the division is a shift.
  __device__ int32_t atoms_k() const { return int32_t(uint32_t(args.k + 63) / 64); }

  /// Makes the ring ready, which no warp but this one touches, and fills it with the slabs from `at` on; starts the copy
  /// of the slice of A that meets the first. Returns the slab after those.
  ///
  /// Instructions come from memory in a kernel's first microsecond, so as few as can be precede the first copies. Once
  /// rings are full whatever is asked for comes microseconds later: factors, which are few bytes, come before B of other
  /// slabs than the first.
  __device__ Sequence start(Sequence at) {
    if (at.first_column == args.short_slab_warp) {
      clear_ring();
    }
    if (lane == 0) {
      for (int s = 0; s <= StageCount; ++s) {
        FullBarrier::init(full + s, 1);
      }
      cutlass::arch::fence_barrier_init();
      // B is a constant: it need not wait for the kernels that this one depends on. B before A is faster than A before B.
      load_b(0, at);
      first_a(at);
    }
    __syncwarp();
    arch::wait_on_dependent_grids();
    Sequence of_factors = at;
#pragma unroll
    for (int s = 0; s < StageCount; ++s) {
      load_factors(s, of_factors);
      of_factors.advance();
    }
    at.advance();
#pragma unroll
    for (int s = 1; s < StageCount; ++s) {
      if (lane == 0) {
        load_b(s, at);
      }
      at.advance();
    }
    return at;
  }

  /// Starts the copy of the first slice of A; called by one lane.
  __device__ void first_a(Sequence const& at) const {
    arch::wait_on_dependent_grids();
    if (maps_a() && at.valid()) {
      start_a(at.column * AtomColumns);
    }
  }

  /// Where a short slab ends, the bits of another slab, or these zeros, meet zeros of A: they must be finite weights.
  __device__ void clear_ring() const {
#pragma unroll 1
    for (int i = lane; i < RingBytes / 16; i += 32) {
      reinterpret_cast<uint4*>(ring)[i] = make_uint4(0, 0, 0, 0);
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
  }

  /// Issues the copies of slab `at` into `stage`.
  __device__ void load(int stage, Sequence const& at) const {
    if (lane == 0) {
      load_b(stage, at);
    }
    load_factors(stage, at);
  }

  /// Copies B, of slab `at`; called by one lane.
  __device__ void load_b(int stage, Sequence const& at) const {
    if (at.valid()) {
      int32_t const atom = at.column * AtomColumns;
      uint32_t const bytes = min(AtomColumns, atoms_k() - atom) * BytesAtom;
      auto const* const b = static_cast<uint8_t const*>(args.ptr_b);
      FullBarrier::arrive_and_expect_tx(full + stage, bytes);
      arch::bulk_copy_evict_first(b + (int64_t(at.row) * atoms_k() + atom) * BytesAtom, ring + stage * StageBytes,
                                  full + stage, bytes);
    }
  }

  /// Copies scales and zero points by cp.async.
  __device__ void load_factors(int stage, Sequence const& at) const {
    if constexpr (Grouped || HasZero) {
      if (at.valid()) {
        uint8_t* const target = ring + stage * StageBytes;
        if constexpr (Grouped) {
          load_groups<Groups::TileGroups, BytesGroupScale>(at, args.ptr_scale, target + OffsetScale);
        }
        if constexpr (HasZero) {
          load_groups<ZeroGroups, BytesGroupZero>(at, args.ptr_zero, target + OffsetZero);
        }
      }
      cute::cp_async_fence();
    }
  }

  /// The factors of `Count` groups of an atom row; zeros for groups beyond k.
  template <int Count, int BytesGroup>
  __device__ void load_groups(Sequence const& at, void const* pointer, uint8_t* target) const {
    constexpr int GroupChunks = BytesGroup / 16;
    int32_t first = 0;
    if constexpr (Grouped) {
      first = Groups::first(at.column);
    }
    auto const* const source =
        static_cast<uint8_t const*>(pointer) + (int64_t(at.row) * args.groups + first) * BytesGroup;
    constexpr int Chunks = Count * GroupChunks;
#pragma unroll
    for (int i = 0; i < (Chunks + 31) / 32; ++i) {
      int const c = i * 32 + lane;
      if (c < Chunks) {
        bool const valid = first + c / GroupChunks < args.groups;
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
            *reinterpret_cast<cute::uint128_t const*>(valid ? source + c * 16 : static_cast<uint8_t const*>(pointer)),
            *reinterpret_cast<cute::uint128_t*>(target + c * 16), valid);
      }
    }
  }

  using Fragment = uint32_t[AtomColumns][2][4];  // (atoms, k32 halves, registers of two k16 steps)

  __device__ bool maps_a() const { return args.box_bytes_a != 0; }

  /// Starts the copy of A from atom `atom` on, as many as a box has, where `maps_a`; called by one lane.
  __device__ void start_a(int32_t atom) const {
    constexpr auto Keep = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
    FullBarrier::arrive_and_expect_tx(full + StageCount, args.box_bytes_a);
    cute::SM90_TMA_LOAD_3D::copy(&map_a, full + StageCount, Keep, slice, 0, 0, atom);
  }

  /// Bytes from the slice's begin to chunk `chunk`, of eight columns, of row `row` (row + m * atom), as TMA swizzles them.
  __device__ static int chunk_a(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

  /// Reads atoms [begin, begin + atoms) of the slice of A of column `column` into shared memory where A has no tensor map;
  /// zeros beyond k.
  __device__ void read_a(int32_t column, int begin, int atoms) const {
    bool const aligned = reinterpret_cast<uintptr_t>(args.ptr_a) % 16 == 0 && args.stride_a % 8 == 0;
#pragma unroll 1
    for (int i = lane; i < args.m * atoms * 8; i += 32) {
      int const row = i / 8;  // m of each atom
      int32_t const k = column * WarpK + (begin + row / args.m) * 64 + i % 8 * 8;
      auto const* const source = static_cast<uint16_t const*>(args.ptr_a) + row % args.m * args.stride_a + k;
      uint32_t words[4] = {};
      if (aligned && k + 8 <= args.k) {
        uint4 const x = __ldcg(reinterpret_cast<uint4 const*>(source));
        words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          words[e / 2] |= k + e < args.k ? uint32_t(source[e]) << e % 2 * 16 : 0u;
        }
      }
      *reinterpret_cast<uint4*>(slice + chunk_a(row, i % 8)) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    __syncwarp();
  }

  /// Waits for atoms [begin, begin + as many as a box has) of the slice of A that meets column `column`, or reads them.
  __device__ void wait_a(int32_t column, int begin) {
    if (maps_a()) {
      FullBarrier::wait(full + StageCount, phases >> 1);
      phases ^= 2;
    } else {
      read_a(column, begin, decode_box_atoms(args.m, AtomColumns, MaxAtoms));
    }
  }

  /// Starts the copy of A from atom `atom` on into the place of what the warp has just loaded; none where that is negative.
  __device__ void replace_a(int32_t atom) const {
    if (maps_a() && atom >= 0) {
      cutlass::arch::fence_view_async_shared();  // loads that are under way come before the copy
      __syncwarp();
      if (lane == 0) {
        start_a(atom);
      }
    } else {
      __syncwarp();
    }
  }

  /// Takes the slice of A that meets the column of slab `at`, of tokens beyond m what other tokens have, and starts the
  /// copy of the next one.
  __device__ void take_a(Sequence const& at, Fragment& tCrA) {
    constexpr int FirstAtoms = TakesHalves ? (AtomColumns + 1) / 2 : AtomColumns;
    int const token = min(lane % 8, args.m - 1);
    auto const load_k32 = [&](int i, int begin) {
      uint32_t (&x)[4] = tCrA[i / 2][i % 2];
      auto const* const chunk = slice + chunk_a((i / 2 - begin) * args.m + token, i % 2 * 4 + lane / 8);
      cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<cute::uint128_t const*>(chunk), x[0], x[1], x[2], x[3]);
    };
    wait_a(at.column, 0);
#pragma unroll
    for (int i = 0; i < FirstAtoms * 2; ++i) {
      load_k32(i, 0);
    }
    if constexpr (TakesHalves) {
      int begin = 0;
      if (decode_box_atoms(args.m, AtomColumns, MaxAtoms) < AtomColumns) {
        begin = FirstAtoms;
        replace_a(at.column * AtomColumns + FirstAtoms);
        wait_a(at.column, FirstAtoms);
      }
#pragma unroll
      for (int i = FirstAtoms * 2; i < AtomColumns * 2; ++i) {
        load_k32(i, begin);
      }
    }
    replace_a(at.next_column() * AtomColumns);
  }

  /// What a warp keeps while it multiplies a slab.
  struct Sums {
    Accumulator total;
    Accumulator partial;     ///< of the current group
    float token_sum[4];      ///< sum of A over the group, where D^T has its columns
    uint32_t minus_zero[2];  ///< pair -zero * 2^Exponent of rows lane/4, lane/4 + 8
  };

  __device__ static constexpr float two_to(int exponent) { return bit_cast<float>(uint32_t(127 + exponent) << 23); }

  __device__ static void clear(float (&array)[4]) {
    static_for<4>([&](auto i) { array[i] = 0.f; });
  }

  __device__ void set_integer_zero(uint8_t const* stage, int group, Sums& sums) const {
    float zero0, zero1;
    load_scale_pair<Zero>(stage + OffsetZero, group, lane, zero0, zero1);
    sums.minus_zero[0] = broadcast_pair<ElementA>(-zero0 * two_to(Dequant::Exponent));
    sums.minus_zero[1] = broadcast_pair<ElementA>(-zero1 * two_to(Dequant::Exponent));
  }

  /// total += scale * (partial + (Center - zero) * token_sum), and clears what is added.
  __device__ void promote(uint8_t const* stage, int group, Sums& sums) const {
    float scale[2] = {1.f, 1.f};
    if constexpr (Grouped) {
      load_scale_pair<Scale>(stage + OffsetScale, group, lane, scale[0], scale[1]);
    }
    if constexpr (HasFloatingZero) {
      float zero[2];
      load_scale_pair<Zero>(stage + OffsetZero, group, lane, zero[0], zero[1]);
      static_for<4>([&](auto i) {
        sums.partial[i] += (float(Center) - zero[i / 2]) * two_to(Dequant::Exponent) * sums.token_sum[i];
      });
      clear(sums.token_sum);
    }
    static_for<4>([&](auto i) { sums.total[i] += scale[i / 2] * sums.partial[i]; });
    clear(sums.partial);
  }

  /// Whether slabs begin at a group's border or in the middle of a group, by turns: each has code of its own then.
  static constexpr bool Alternating = Grouped && !Groups::TileDividesGroup && Groups::Starts == 2;

  /// Whether a scale ends before column `begin` of the slab of column `column`, whose `Start` is column % 2 where slabs
  /// alternate: at the groups' borders where all slabs of a start have the same, else wherever an atom ends, so that no
  /// branch depends on the slab. Only where groups end inside atoms, or zero points take registers, there are such branches.
  template <int Start>
  __device__ static bool border(int32_t column, int begin) {
    if constexpr (Groups::TileDividesGroup) {
      return false;
    } else if constexpr (Alternating) {
      return Groups::border(Start, begin) || begin == WarpK;
    } else if constexpr (Groups::GroupDividesTile || Groups::Granule < 64 || HasIntegerZero) {
      return begin % Groups::Granule == 0 && (Groups::border(column, begin) || begin == WarpK);
    } else {
      return begin % 64 == 0;
    }
  }

  /// The group of column `begin` of the slab of column `column`, counted from the first that the slab touches.
  template <int Start>
  __device__ static int group(int32_t column, int begin) {
    return Groups::in_tile(Alternating ? Start : column, begin);
  }

  /// Multiplies the slab of column `column` in `stage`: sums.total = the sums of (B - zero) * scale * A * 2^Exponent.
  __device__ void multiply(int stage_index, int32_t column, Fragment const& tCrA, Sums& sums) const {
    uint8_t const* const stage = ring + stage_index * StageBytes;
    clear(sums.total);
    clear(sums.partial);
    clear(sums.token_sum);
    sums.minus_zero[0] = sums.minus_zero[1] = broadcast_pair<ElementA>(-float(Center) * two_to(Dequant::Exponent));
    FullBarrier::wait(full + stage_index, phases & 1);
    if constexpr (Grouped || HasZero) {
      cute::cp_async_wait<StageCount - 1>();
      __syncwarp();
    }
    if constexpr (HasIntegerZero && !Grouped) {
      set_integer_zero(stage, 0, sums);
    }
    if constexpr (Alternating) {
      if (column % 2 != 0) {
        multiply_atoms<1>(stage, column, tCrA, sums);
      } else {
        multiply_atoms<0>(stage, column, tCrA, sums);
      }
    } else {
      multiply_atoms<0>(stage, column, tCrA, sums);
    }
    if constexpr (!Grouped || Groups::TileDividesGroup) {
      promote(stage, 0, sums);
    }
  }

  template <int Start>
  __device__ void multiply_atoms(uint8_t const* stage, int32_t column, Fragment const& tCrA, Sums& sums) const {
#pragma unroll
    for (int atom = 0; atom < AtomColumns; ++atom) {
      uint32_t words[Atom::WordsPerLane];
      load_lane<Atom>(stage + atom * BytesAtom, lane, words);
      static_for<4>([&](auto step) {
        int const begin = atom * 64 + step * 16;
        if constexpr (HasIntegerZero && Grouped) {
          if (begin == 0 || border<Start>(column, begin)) {
            set_integer_zero(stage, group<Start>(column, begin), sums);
          }
        }
        uint32_t tCrB[4];  // (registers of a k16 step)
        static_for<4>(
            [&](auto i) { tCrB[i] = Dequant::template convert<step * 4 + i>(words, sums.minus_zero[i % 2]); });
        uint32_t const(&x)[4] = tCrA[atom][step / 2];
        mma_sync<ElementA>(sums.partial, tCrB, x[step % 2 * 2], x[step % 2 * 2 + 1]);
        if constexpr (HasFloatingZero) {
          constexpr uint32_t one = power_of_two_pair<ElementA>(0);
          uint32_t const ones[4] = {one, one, one, one};
          mma_sync<ElementA>(sums.token_sum, ones, x[step % 2 * 2], x[step % 2 * 2 + 1]);
        }
        if constexpr (Grouped) {
          if (border<Start>(column, begin + 16)) {
            promote(stage, group<Start>(column, begin), sums);
          }
        }
      });
    }
  }

  /// Runs the slabs of this warp: `keep(row, first, sums)` takes the sums of an atom row, of the warp's first column, or
  /// zeros where it has none, or to be added; `finish(begin, end)` follows each block of atom rows, and is called by every
  /// warp.
  template <class Keep, class Finish>
  __device__ void operator()(Sequence now, Keep&& keep, Finish&& finish) {
    Fragment tCrA;
    Sums sums;
    int stage = 0;
    bool fresh = true;  // the column is another than that whose slice of A is in tCrA
    Sequence ahead = start(now);
#pragma unroll 1
    while (now.block < now.row_end) {
      Sequence const at = now;
      now.advance();
      if (at.exists()) {
        if (fresh) {
          take_a(at, tCrA);
        }
        fresh = now.column != at.column;
        multiply(stage, at.column, tCrA, sums);
        __syncwarp();  // the stage has been read by every lane
        load(stage, ahead);
        ahead.advance();
        keep(at.row - at.block, at.column < Warps, sums.total);
        if (++stage == StageCount) {
          stage = 0;
          phases ^= 1;
        }
      } else {  // k has fewer slabs than there are warps
        clear(sums.total);
        keep(at.row - at.block, true, sums.total);
      }
      if (now.block != at.block) {
        finish(at.block, now.block);
      }
    }
    cute::cp_async_wait<0>();
  }
};

}  // namespace humming_cutlass::collective
