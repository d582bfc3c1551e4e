/// Mainloop for SM90: TMA and bulk copies by a producer warp, weights dequantized in registers, wgmma.
///
/// As everywhere, the instruction's operand A is the weight, the user's B, and comes from registers; its operand B is the
/// user's A, in shared memory as TMA writes it. Each consumer warpgroup owns 64 weight rows and all tokens of the tile.
///
/// Fragments are double-buffered in batches of `BatchSteps` k16 steps: batch i is in flight while batch i + 1 is
/// dequantized, across stages and across units of work. Group scales are folded into the conversion
/// (dequant/group_scaled.hpp): a second set of accumulators would not fit.
#pragma once

#include <cute/arch/copy_sm90_tma.hpp>
#include <cutlass/arch/barrier.h>

#include "humming_cutlass/collective/gmma_rs_sm90.hpp"
#include "humming_cutlass/dequant/group_scaled.hpp"
#include "humming_cutlass/device/arguments.hpp"
#include "humming_cutlass/layout/group_map.hpp"
#include "humming_cutlass/scheduler/persistent.hpp"

namespace humming_cutlass::collective {

template <class Config>
struct MmaSm90TmaGmmaRsWarpSpecialized {
  using ElementA = typename Config::ElementA;
  using ElementB = typename Config::ElementB;
  using ElementScale = typename Config::ElementScale;
  using ElementZero = typename Config::ElementZero;
  using TileShape = typename Config::TileShape;
  using Groups = GroupMap<Config::GroupSize, TileShape::K>;
  using Scheduler = PersistentScheduler<TileShape>;

  static constexpr bool Grouped = Groups::Grouped;
  static constexpr bool HasIntegerZero = std::is_same_v<ElementZero, IntegerZero>;
  static_assert(HasIntegerZero || std::is_same_v<ElementZero, NoZero>,
                "MmaSm90: floating zero points need the SM80 mainloop, which corrects them in fp32");

  using Dequant = std::conditional_t<Grouped, GroupScaledDequantizer<ElementB, ElementA, HasIntegerZero>,
                                     UnscaledDequantizer<ElementB, ElementA, HasIntegerZero>>;
  using Atom = typename Dequant::Atom;
  using Scale = ToFloat<ElementScale>;
  using Zero = ToFloat<IntegerZero>;

  static constexpr int StageCount = Config::StageCount;
  static constexpr int Warpgroups = TileShape::N / 64;
  static constexpr int ConsumerThreads = 128 * Warpgroups;
  static constexpr int Fragments = TileShape::M / 8;
  static constexpr int AtomRows = TileShape::N / 16;
  static constexpr int AtomColumns = TileShape::K / 64;
  static constexpr int Steps = TileShape::K / 16;      ///< k16 steps of a tile
  static constexpr int BatchSteps = TileShape::M * Warpgroups <= 256 && TileShape::K >= 128 ? 4 : 2;
  static constexpr int Batches = Steps / BatchSteps;   ///< even, so that the buffers alternate across stages

  static constexpr int BytesBlockA = TileShape::M * 128;  ///< 64 columns of A: one TMA box
  static constexpr int BytesA = AtomColumns * BytesBlockA;
  static constexpr int BytesAtom = Atom::Words * 4;
  static constexpr int BytesB = AtomRows * AtomColumns * BytesAtom;
  static constexpr int RowBytesScale = Groups::TileGroups * 16 * int(sizeof(typename Scale::Storage));
  static constexpr int RowBytesZero = HasIntegerZero ? Groups::TileGroups * 16 * 2 : 0;
  static constexpr int BytesFlat = BytesB + AtomRows * (RowBytesScale + RowBytesZero);
  static constexpr int StageBytes = BytesA + (BytesFlat + 1023) / 1024 * 1024;  ///< A needs 1024-byte alignment
  static constexpr int SmemBytes = StageCount * StageBytes;

  static_assert(TileShape::N % 64 == 0 && Warpgroups <= 4, "MmaSm90: TileShape::N must be 64, 128, 192 or 256");
  static_assert(TileShape::K % 64 == 0 && Batches % 2 == 0, "MmaSm90: TileShape::K must be a multiple of 64");
  static_assert(AtomRows <= 32, "MmaSm90: one producer lane copies one atom row");

  using Accumulator = float[Fragments][4];
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;

  struct SharedStorage {
    alignas(1024) uint8_t stages[SmemBytes];
    alignas(8) uint64_t full[StageCount];
    uint64_t empty[StageCount];
  };

  /// Position in the ring of stages.
  struct PipelineState {
    int stage = 0;
    uint32_t phase = 0;
    __device__ void advance() {
      if (++stage == StageCount) {
        stage = 0;
        phase ^= 1;
      }
    }
  };

  __device__ static void initialize(SharedStorage& shared) {
    for (int s = 0; s < StageCount; ++s) {
      FullBarrier::init(&shared.full[s], 1);
      EmptyBarrier::init(&shared.empty[s], Warpgroups * 4);
    }
    cutlass::arch::fence_barrier_init();
  }

  /// The producer warp: fills stages until the work is done.
  __device__ static void load(GemmArguments const& args, void const* tensor_map_a, SharedStorage& shared) {
    Scheduler const scheduler(args);
    int const lane = threadIdx.x % 32;
    int32_t const atoms_n = (args.n + 15) / 16;
    int32_t const atoms_k = (args.k + 63) / 64;
    PipelineState write;
    for (int32_t index = blockIdx.x; index < scheduler.units(); index += gridDim.x) {
      WorkUnit const work = scheduler.unit(index);
      int64_t const atom_row = min(work.tile_n * AtomRows + lane, atoms_n - 1);
#pragma unroll 1
      for (int32_t k_tile = work.k_begin; k_tile < work.k_end; ++k_tile) {
        EmptyBarrier::wait(&shared.empty[write.stage], write.phase ^ 1);
        uint8_t* const stage = shared.stages + write.stage * StageBytes;
        uint64_t* const full = &shared.full[write.stage];
        if (lane == 0) {
          FullBarrier::arrive_and_expect_tx(full, BytesA + BytesFlat);
          static_for<AtomColumns>([&](auto c) {
            cute::SM90_TMA_LOAD_2D::copy(tensor_map_a, full, uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST),
                                         stage + c * BytesBlockA, k_tile * TileShape::K + c * 64,
                                         work.tile_m * TileShape::M);
          });
        }
        __syncwarp();
        if (lane < AtomRows) {
          load_weight(args, atom_row, atoms_k, k_tile, lane, stage + BytesA, full);
        }
        write.advance();
      }
    }
  }

  /// One lane copies the atoms, scales and zero points of one atom row. Beyond the edge it repeats the last atom or group:
  /// finite numbers, multiplied by the zeros that TMA fills in for A.
  __device__ static void load_weight(GemmArguments const& args, int64_t atom_row, int32_t atoms_k, int32_t k_tile, int lane,
                                     uint8_t* flat, uint64_t* full) {
    auto const* const b = static_cast<uint8_t const*>(args.ptr_b) + atom_row * atoms_k * BytesAtom;
    uint8_t* const target = flat + lane * (AtomColumns * BytesAtom);
    int32_t const atom_k = k_tile * AtomColumns;
    if (atom_k + AtomColumns <= atoms_k) {
      cute::SM90_BULK_COPY_G2S::copy(b + int64_t(atom_k) * BytesAtom, full, target, AtomColumns * BytesAtom);
    } else {
      static_for<AtomColumns>([&](auto c) {
        int64_t const source = min(atom_k + c, atoms_k - 1);
        cute::SM90_BULK_COPY_G2S::copy(b + source * BytesAtom, full, target + c * BytesAtom, BytesAtom);
      });
    }
    if constexpr (Grouped) {
      load_groups<RowBytesScale>(args.ptr_scale, args.groups, atom_row, k_tile, flat + BytesB + lane * RowBytesScale, full);
      if constexpr (HasIntegerZero) {
        load_groups<RowBytesZero>(args.ptr_zero, args.groups, atom_row, k_tile,
                                  flat + BytesB + AtomRows * RowBytesScale + lane * RowBytesZero, full);
      }
    }
  }

  template <int RowBytes>
  __device__ static void load_groups(void const* pointer, int32_t groups, int64_t atom_row, int32_t k_tile, uint8_t* target,
                                     uint64_t* full) {
    constexpr int bytes = RowBytes / Groups::TileGroups;
    auto const* const source = static_cast<uint8_t const*>(pointer) + atom_row * groups * bytes;
    int32_t const first = Groups::first(k_tile);
    if (first + Groups::TileGroups <= groups) {
      cute::SM90_BULK_COPY_G2S::copy(source + int64_t(first) * bytes, full, target, RowBytes);
    } else {
      static_for<Groups::TileGroups>([&](auto i) {
        int64_t const group = min(first + i, groups - 1);
        cute::SM90_BULK_COPY_G2S::copy(source + group * bytes, full, target + i * bytes, bytes);
      });
    }
  }

  /// The side of a consumer warp that runs one batch ahead of the tensor core: waits for stages and dequantizes.
  struct Dequantizing {
    GemmArguments const& args;
    SharedStorage& shared;
    Scheduler scheduler;
    int32_t index;   ///< of the unit of work
    WorkUnit work;
    int32_t k_tile;
    PipelineState read;
    int lane;
    int warp_row;    ///< atom row of this warp inside the tile
    uint32_t words[Atom::WordsPerLane];
    typename Dequant::Registers registers[2];  ///< rows lane/4 and lane/4 + 8

    __device__ Dequantizing(GemmArguments const& arguments, SharedStorage& storage)
        : args(arguments), shared(storage), scheduler(arguments), index(blockIdx.x), work(scheduler.unit(index)),
          k_tile(work.k_begin), lane(threadIdx.x % 32), warp_row(threadIdx.x / 32) {
      if constexpr (!Grouped) {
        registers[0] = registers[1] = Dequant::prepare(1.f, 0.f);
      }
    }

    __device__ bool valid() const { return index < scheduler.units(); }

    __device__ uint8_t const* flat() const { return shared.stages + read.stage * StageBytes + BytesA; }

    /// Waits for the stage that `read` points at and takes its first atom.
    __device__ void begin_stage() {
      FullBarrier::wait(&shared.full[read.stage], read.phase);
      if constexpr (!Grouped && HasIntegerZero) {
        if (k_tile == work.k_begin) {
          int64_t const row = min(work.tile_n * AtomRows + warp_row, (args.n + 15) / 16 - 1);
          float zero0, zero1;
          load_scale_pair<Zero>(args.ptr_zero, row, lane, zero0, zero1);
          registers[0] = Dequant::prepare(1.f, zero0);
          registers[1] = Dequant::prepare(1.f, zero1);
        }
      }
    }

    __device__ void load_words(int column) {
      load_lane<Atom>(flat() + (warp_row * AtomColumns + column) * BytesAtom, lane, words);
    }

    /// Takes the scales of the group that column `column` belongs to.
    __device__ void load_scales(int column) {
      uint8_t const* const groups = flat() + BytesB;
      int const group = Groups::in_tile(k_tile, column);
      float scale0, scale1, zero0 = 0.f, zero1 = 0.f;
      load_scale_pair<Scale>(groups, warp_row * Groups::TileGroups + group, lane, scale0, scale1);
      if constexpr (HasIntegerZero) {
        load_scale_pair<Zero>(groups + AtomRows * RowBytesScale, warp_row * Groups::TileGroups + group, lane, zero0, zero1);
      }
      registers[0] = Dequant::prepare(scale0, zero0);
      registers[1] = Dequant::prepare(scale1, zero1);
    }

    /// Converts batch `Batch` of the current stage.
    template <int Batch>
    __device__ void convert(uint32_t (&fragments)[BatchSteps][4]) {
      static_for<BatchSteps>([&](auto s) {
        constexpr int step = Batch * BatchSteps + s;
        if constexpr (step % 4 == 0) {
          load_words(step / 4);
        }
        if constexpr (Grouped && step * 16 % Groups::Granule == 0) {
          if (step == 0 ? (!Groups::TileDividesGroup || k_tile == work.k_begin || Groups::border(k_tile, 0))
                        : Groups::border(k_tile, step * 16)) {
            load_scales(step * 16);
          }
        }
        static_for<4>([&](auto i) {
          fragments[s][i] = Dequant::template convert<(step % 4) * 4 + i>(words, registers[i % 2]);
        });
      });
      // Pins the fragments: the conversion must not sink below the wgmma that is issued next.
      static_for<BatchSteps>([&](auto s) { static_for<4>([&](auto i) { cute::warpgroup_fence_operand(fragments[s][i]); }); });
    }

    /// Goes on to the next stage; false when there is none.
    __device__ bool advance() {
      read.advance();
      if (++k_tile == work.k_end) {
        index += gridDim.x;
        if (!valid()) {
          return false;
        }
        work = scheduler.unit(index);
        k_tile = work.k_begin;
      }
      return true;
    }
  };

  /// A consumer warpgroup: `epilogue(work, accumulators)` receives the sums of every unit.
  template <class Epilogue>
  __device__ static void mma(GemmArguments const& args, SharedStorage& shared, Epilogue&& epilogue) {
    Dequantizing ahead(args, shared);
    if (!ahead.valid()) {
      return;
    }
    uint32_t tCrB[2][BatchSteps][4];  // (buffer, k16 steps, registers)
    Accumulator accumulators;
    PipelineState read;
    bool const elected = threadIdx.x % 32 == 0;
    auto const release = [&](int stage) {
      __syncwarp();
      if (elected) {
        EmptyBarrier::arrive(&shared.empty[stage]);
      }
    };
    ahead.begin_stage();
    ahead.template convert<0>(tCrB[0]);
    for (int32_t index = blockIdx.x; index < ahead.scheduler.units(); index += gridDim.x) {
      WorkUnit const work = ahead.work;
      int previous = -1;
      gmma::ScaleOut scale_d = gmma::ScaleOut::Zero;
#pragma unroll 1
      for (int32_t k_tile = work.k_begin; k_tile < work.k_end; ++k_tile) {
        uint64_t const tCsA = gmma_descriptor(shared.stages + read.stage * StageBytes);  // (tokens, 64 columns)
        static_for<Batches>([&](auto batch) {
          constexpr int next = (batch + 1) % Batches;
          cute::warpgroup_arrive();
          static_for<BatchSteps>([&](auto s) {
            constexpr int step = batch * BatchSteps + s;
            gmma_rs<ElementA>(accumulators, tCrB[batch % 2][s],
                              tCsA + uint64_t((step / 4) * (BytesBlockA >> 4) + (step % 4) * 2), scale_d);
            scale_d = gmma::ScaleOut::One;
          });
          cute::warpgroup_commit_batch();
          if constexpr (next == 0) {
            if (ahead.advance()) {
              ahead.begin_stage();
            }
          }
          cute::warpgroup_wait<1>();
          if constexpr (batch == 0) {
            if (previous >= 0) {
              release(previous);
            }
          }
          ahead.template convert<next>(tCrB[(batch + 1) % 2]);
        });
        previous = read.stage;
        read.advance();
      }
      cute::warpgroup_wait<0>();
      static_for<Fragments>([&](auto f) { static_for<4>([&](auto i) { cute::warpgroup_fence_operand(accumulators[f][i]); }); });
      release(previous);
      epilogue(work, accumulators);
    }
  }
};

}  // namespace humming_cutlass::collective
