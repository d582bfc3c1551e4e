/// Mainloop for SM90: TMA copies by one or two producer threads, weights dequantized in registers, wgmma.
///
/// As everywhere, the instruction's operand A is the weight, the user's B, and comes from registers; its operand B is the
/// user's A, in shared memory as TMA writes it. Each consumer warpgroup owns 64 weight rows and all tokens of the tile.
///
/// Fragments are double-buffered in batches of `BatchSteps` k16 steps: batch i is in flight while batch i + 1 is
/// dequantized, across stages and across units of work. Group scales are folded into the conversion
/// (dequant/group_scaled.hpp): a second set of accumulators would not fit.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "humming_cutlass/arch/sm90.hpp"
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
  static constexpr int Steps = TileShape::K / 16;  ///< k16 steps of a tile
  static constexpr int BatchSteps = TileShape::K >= 128 ? 4 : 2;
  static constexpr int Batches = Steps / BatchSteps;  ///< even, so that the buffers alternate across stages

  /// CTAs of a cluster that work on neighbouring tiles along n and receive A together, each fetching a part of it: for
  /// many tokens, where A is most of the traffic.
  static constexpr int MaxSharing = TileShape::M >= 256 ? 2 : 1;
  static constexpr int BoxTokens = TileShape::M / MaxSharing;  ///< rows of a TMA box of A
  using Scheduler = PersistentScheduler<TileShape, MaxSharing>;

  /// Threads that issue copies. With few tokens a stage is over sooner than one thread issues the next one's.
  static constexpr int Producers = TileShape::M <= 64 ? 2 : 1;

  static constexpr int BytesBlockA = TileShape::M * 128;  ///< 64 columns of A: one TMA box
  static constexpr int BytesA = AtomColumns * BytesBlockA;
  static constexpr int BytesAtom = Atom::Words * 4;
  /// Atoms of an atom row in one TMA box, whose rows hold at most 2048 bytes.
  static constexpr int BoxColumns = AtomColumns * BytesAtom <= 2048         ? AtomColumns
                                    : AtomColumns >= 4 && BytesAtom <= 1024 ? 2
                                                                            : 1;
  static constexpr int BytesBoxB = AtomRows * BoxColumns * BytesAtom;
  static constexpr int BytesB = AtomRows * AtomColumns * BytesAtom;
  static constexpr int BytesGroupScale = 16 * int(sizeof(typename Scale::Storage));
  static constexpr int BytesGroupZero = HasIntegerZero ? 16 * int(sizeof(typename Zero::Storage)) : 0;
  static constexpr int BytesScale = AtomRows * Groups::TileGroups * BytesGroupScale;
  static constexpr int BytesZero = AtomRows * Groups::TileGroups * BytesGroupZero;
  static constexpr int OffsetScale = BytesA + BytesB;
  static constexpr int OffsetZero = OffsetScale + (BytesScale + 127) / 128 * 128;   ///< TMA writes at multiples of 128
  static constexpr int StageBytes = (OffsetZero + BytesZero + 1023) / 1024 * 1024;  ///< A needs multiples of 1024
  static constexpr int BytesSums = TileShape::M * TileShape::N * 4;  ///< split-k puts them where the stages were
  static constexpr int SmemBytes = StageCount * StageBytes > BytesSums ? StageCount * StageBytes : BytesSums;

  static_assert(TileShape::N % 64 == 0 && Warpgroups <= 4, "MmaSm90: TileShape::N must be 64, 128, 192 or 256");
  static_assert(TileShape::K % 64 == 0 && Batches % 2 == 0,
                "MmaSm90: TileShape::K must be 64, 128 or 256, an even number of batches");

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

  __device__ static void initialize(SharedStorage& shared, int sharing) {
    for (int s = 0; s < StageCount; ++s) {
      FullBarrier::init(&shared.full[s], Producers);
      EmptyBarrier::init(&shared.empty[s], Warpgroups * 4 * sharing);
    }
    cutlass::arch::fence_barrier_init();
  }

  /// A k tile of a unit of work and its stage, in the order of the work.
  struct Position {
    int32_t index;  ///< of the next unit of work
    WorkUnit work;
    int32_t k_tile;
    PipelineState state;

    /// Before the first k tile.
    __device__ explicit Position(Scheduler const& scheduler) : index(scheduler.first), work{}, k_tile(0) {
      state.stage = StageCount - 1;
      state.phase = 1;
    }

    /// Goes on to the next k tile; false when there is none.
    __device__ bool advance(Scheduler const& scheduler) {
      state.advance();
      if (++k_tile >= work.k_end) {
        if (index >= scheduler.end) {
          return false;
        }
        work = scheduler.unit(index);
        index += scheduler.step;
        k_tile = work.k_begin;
      }
      return true;
    }
  };

  static constexpr uint32_t BytesWeight = BytesB + BytesScale + BytesZero;  ///< of a stage

  /// Fetches the tensor maps, each by a thread of another warp; the producer of B, thread 0, needs its own at once.
  __device__ static void prefetch(GemmArguments const& args, TensorMaps const& maps, int thread) {
    TensorMap const* const map = thread == 32              ? (args.m < BoxTokens ? &maps.a_rest : &maps.a)
                                 : thread == 64 && Grouped ? &maps.scale
                                                           : nullptr;
    if (map != nullptr) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(map));
    }
  }

  /// The producer of B, before other threads know the barriers: starts the copies of B for the first k tile. A launch
  /// fetches its instructions from memory, so that everything that is not needed for these copies comes after them.
  __device__ static void start(TensorMaps const& maps, SharedStorage& shared, Position const& first) {
    FullBarrier::expect_transaction(&shared.full[first.state.stage], BytesWeight);
    load_b(maps, shared, first);
  }

  /// A producer thread: fills its part of the stages from k tile `write` on, until the work is done; `start` has begun
  /// with it. What lies beyond an edge arrives as zeros.
  ///
  /// A waits for the kernels that this one depends on. B is a constant: its first copy goes out before they are complete,
  /// and all of them where A has a thread of its own.
  template <bool TakesA, bool TakesB>
  __device__ static void load(GemmArguments const& args, TensorMaps const& maps, SharedStorage& shared,
                              Scheduler const& scheduler, Position write) {
    bool first = true;
    do {
      EmptyBarrier::wait(&shared.empty[write.state.stage], write.state.phase ^ 1);
      FullBarrier::arrive_and_expect_tx(&shared.full[write.state.stage],
                                        (TakesA ? bytes_a(args, write) : 0) + (TakesB && !first ? BytesWeight : 0));
      if (TakesB && !first) {
        load_b(maps, shared, write);
      }
      if constexpr (TakesA) {
        if (first) {
          arch::wait_on_dependent_grids();
        }
        load_a(args, maps, shared, write, write.work.split_k > 1 ? 1 : scheduler.sharing());
      }
      first = false;
    } while (write.advance(scheduler));
  }

  /// Starts the copies of B, scales and zero points.
  __device__ static void load_b(TensorMaps const& maps, SharedStorage& shared, Position const& at) {
    // A weight that one token tile covers is read once.
    constexpr auto Pass =
        uint64_t(TileShape::M <= 64 ? cute::TMA::CacheHintSm90::EVICT_FIRST : cute::TMA::CacheHintSm90::EVICT_NORMAL);
    uint8_t* const stage = shared.stages + at.state.stage * StageBytes;
    uint64_t* const full = &shared.full[at.state.stage];
    int32_t const atom_row = at.work.tile_n * AtomRows;
    static_for<AtomColumns / BoxColumns>([&](auto c) {
      cute::SM90_TMA_LOAD_2D::copy(&maps.b, full, Pass, stage + BytesA + c * BytesBoxB,
                                   (at.k_tile * AtomColumns + c * BoxColumns) * (BytesAtom / 8), atom_row);
    });
    if constexpr (Grouped) {
      int32_t const group = Groups::first(at.k_tile);
      cute::SM90_TMA_LOAD_2D::copy(&maps.scale, full, Pass, stage + OffsetScale, group * (BytesGroupScale / 8),
                                   atom_row);
      if constexpr (HasIntegerZero) {
        cute::SM90_TMA_LOAD_2D::copy(&maps.zero, full, Pass, stage + OffsetZero, group * (BytesGroupZero / 8),
                                     atom_row);
      }
    }
  }

  /// Bytes of A in a stage: of the rows that exist. Rows that a copy would fill with zeros take longer than those, so that
  /// a tile's last rows have a tensor map of their own; what else a stage holds only reaches sums of tokens beyond m.
  __device__ static uint32_t bytes_a(GemmArguments const& args, Position const& at) {
    int32_t const rows = min(args.m - at.work.tile_m * TileShape::M, int32_t(TileShape::M));
    return uint32_t(rows) * (AtomColumns * 128);
  }

  /// Starts the copies of A, or of this CTA's part of it for all CTAs that share it.
  __device__ static void load_a(GemmArguments const& args, TensorMaps const& maps, SharedStorage& shared,
                                Position const& at, int sharing) {
    constexpr auto Keep = uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST);
    uint8_t* const stage = shared.stages + at.state.stage * StageBytes;
    uint64_t* const full = &shared.full[at.state.stage];
    static_for<AtomColumns * MaxSharing>([&](auto i) {
      constexpr int column = i / MaxSharing;
      constexpr int part = i % MaxSharing;
      uint8_t* const target = stage + column * BytesBlockA + part * (BoxTokens * 128);
      int32_t const k = at.k_tile * TileShape::K + column * 64;
      int32_t const token = at.work.tile_m * TileShape::M + part * BoxTokens;
      TensorMap const* const map = args.m - token >= BoxTokens ? &maps.a : &maps.a_rest;
      if (token >= args.m) {
        return;  // a part without rows
      }
      if (sharing == 1) {
        cute::SM90_TMA_LOAD_2D::copy(map, full, Keep, target, k, token);
      } else if (part == cute::block_rank_in_cluster()) {
        constexpr uint16_t All = (1 << MaxSharing) - 1;
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(map, full, All, Keep, target, k, token);
      }
    });
  }

  /// The side of a consumer warp that runs one batch ahead of the tensor core: waits for stages and dequantizes.
  struct Dequantizing {
    GemmArguments const& args;
    SharedStorage& shared;
    Scheduler scheduler;
    Position at;
    int lane;
    int warp_row;  ///< atom row of this warp inside the tile
    uint32_t words[Atom::WordsPerLane];
    typename Dequant::Registers registers[2];  ///< rows lane/4 and lane/4 + 8

    __device__ Dequantizing(GemmArguments const& arguments, SharedStorage& storage)
        : args(arguments), shared(storage), scheduler(arguments), at(scheduler) {
      // Volatile, or the compiler reads the register again, slowly, wherever it needs the lane.
      uint32_t thread;
      asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
      lane = int(thread % 32);
      warp_row = int(thread / 32);
      if constexpr (!Grouped) {
        registers[0] = registers[1] = Dequant::prepare(1.f, 0.f);
      }
    }

    __device__ uint8_t const* stage() const { return shared.stages + at.state.stage * StageBytes; }

    /// Waits for its stage and takes its first atom.
    __device__ void begin_stage() {
      FullBarrier::wait(&shared.full[at.state.stage], at.state.phase);
      if constexpr (!Grouped && HasIntegerZero) {
        if (at.k_tile == at.work.k_begin) {
          int64_t const row = min(at.work.tile_n * AtomRows + warp_row, (args.n + 15) / 16 - 1);
          float zero0, zero1;
          load_scale_pair<Zero>(args.ptr_zero, row, lane, zero0, zero1);
          registers[0] = Dequant::prepare(1.f, zero0);
          registers[1] = Dequant::prepare(1.f, zero1);
        }
      }
    }

    __device__ void load_words(int column) {
      int const box = column / BoxColumns * BytesBoxB + (warp_row * BoxColumns + column % BoxColumns) * BytesAtom;
      load_lane<Atom>(stage() + BytesA + box, lane, words);
    }

    /// Takes the scales of the group that column `column` belongs to.
    __device__ void load_scales(int column) {
      int const group = warp_row * Groups::TileGroups + Groups::in_tile(at.k_tile, column);
      float scale0, scale1, zero0 = 0.f, zero1 = 0.f;
      load_scale_pair<Scale>(stage() + OffsetScale, group, lane, scale0, scale1);
      if constexpr (HasIntegerZero) {
        load_scale_pair<Zero>(stage() + OffsetZero, group, lane, zero0, zero1);
      }
      registers[0] = Dequant::prepare(scale0, zero0);
      registers[1] = Dequant::prepare(scale1, zero1);
    }

    /// Reads what batch `Batch` of the current stage begins with, early enough to be there for `convert`.
    template <int Batch>
    __device__ void fetch() {
      fetch_step<Batch * BatchSteps>();
    }

    /// Takes the words and scales that change with k16 step `Step`.
    template <int Step>
    __device__ void fetch_step() {
      if constexpr (Step % 4 == 0) {
        load_words(Step / 4);
      }
      if constexpr (Grouped && Step * 16 % Groups::Granule == 0) {
        if (Step == 0 ? (!Groups::TileDividesGroup || at.k_tile == at.work.k_begin || Groups::border(at.k_tile, 0))
                      : Groups::border(at.k_tile, Step * 16)) {
          load_scales(Step * 16);
        }
      }
    }

    /// Converts batch `Batch` of the current stage, after `fetch`.
    template <int Batch>
    __device__ void convert(uint32_t (&fragments)[BatchSteps][4]) {
      static_for<BatchSteps>([&](auto s) {
        constexpr int step = Batch * BatchSteps + s;
        if constexpr (s > 0) {
          fetch_step<step>();
        }
        static_for<4>(
            [&](auto i) { fragments[s][i] = Dequant::template convert<(step % 4) * 4 + i>(words, registers[i % 2]); });
      });
      // Pins the fragments: the conversion must not sink below the wgmma that is issued next.
      static_for<BatchSteps>(
          [&](auto s) { static_for<4>([&](auto i) { cute::warpgroup_fence_operand(fragments[s][i]); }); });
    }

    /// Goes on to the next stage; false when there is none.
    __device__ bool advance() { return at.advance(scheduler); }
  };

  /// A consumer warpgroup: `epilogue(work, accumulators)` receives the sums of every unit.
  template <class Epilogue>
  __device__ static void mma(GemmArguments const& args, SharedStorage& shared, Epilogue&& epilogue) {
    Dequantizing ahead(args, shared);
    if (!ahead.advance()) {
      return;
    }
    uint32_t tCrB[2][BatchSteps][4];  // (buffer, k16 steps, registers)
    Accumulator accumulators;
    PipelineState read;
    int const lane = threadIdx.x % 32;
    int const sharing = ahead.scheduler.sharing();
    // To every CTA that writes the stage; where these are fewer than in other units, as many times to this one.
    auto const release = [&](int stage, WorkUnit const& work) {
      __syncwarp();
      if (sharing == 1) {
        if (lane == 0) {
          EmptyBarrier::arrive(&shared.empty[stage]);
        }
      } else if (lane < MaxSharing) {
        EmptyBarrier::arrive(&shared.empty[stage], work.split_k > 1 ? uint32_t(work.split) : uint32_t(lane), 1);
      }
    };
    ahead.begin_stage();
    ahead.template fetch<0>();
    ahead.template convert<0>(tCrB[0]);
    bool more = true;
    while (more) {
      WorkUnit const work = ahead.at.work;
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
            more = ahead.advance();
            if (more) {
              ahead.begin_stage();
            }
          }
          ahead.template fetch<next>();
          cute::warpgroup_wait<1>();
          if constexpr (batch == 0) {
            if (previous >= 0) {
              release(previous, work);
            }
          }
          ahead.template convert<next>(tCrB[(batch + 1) % 2]);
        });
        previous = read.stage;
        read.advance();
      }
      cute::warpgroup_wait<0>();
      static_for<Fragments>(
          [&](auto f) { static_for<4>([&](auto i) { cute::warpgroup_fence_operand(accumulators[f][i]); }); });
      release(previous, work);
      epilogue(work, accumulators);
    }
  }
};

}  // namespace humming_cutlass::collective
