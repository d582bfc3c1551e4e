"""Picks the kernel for a call from (types, m, n, k) and a description of the GPU, by a cost model.

A launch is a grid of units of work, one output tile or one split of its k range each, that the SMs take in waves. A
unit takes, for each column of k, the longest of three times: copying its slice of B and A, multiplying, dequantizing;
and a fixed time to fill the pipeline and store the tile. Splitting k adds the traffic of the partial sums. The rates
below are per SM, measured on an H200 (bench/NOTES.md says how); only their ratios matter for the choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping

from humming_cutlass import support
from humming_cutlass.config import (
    ATOM_K,
    ATOM_N,
    INT32_MAX,
    MAX_EXTENT,
    GemmConfig,
    ScheduleConfig,
    TypeConfig,
    integer,
)
from humming_cutlass.errors import ArgumentError, ArgumentTypeError, UnsupportedError, explain

__all__ = ["Choice", "Device", "candidates", "choose", "microseconds", "schedules"]


def _extent(parameter: str, value: object, least: int, most: int = INT32_MAX) -> int:
    """Returns an integer, NumPy's too, as Python's, which do not overflow; refuses others and what is out of bounds."""
    number = integer(value, parameter, "an int")
    if number < least:
        raise ArgumentError(explain(parameter, value, f"at least {least}", least))
    if number > most:
        raise ArgumentError(explain(parameter, value, f"at most {most}", most))
    return number


def _extents(m: object, n: object, k: object) -> tuple[int, int, int]:
    """Returns the extents of a GEMM, checked; n and k are those that kernels can count with."""
    return _extent("m", m, 0), _extent("n", n, 1, MAX_EXTENT), _extent("k", k, 1, MAX_EXTENT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What the planner must know of a GPU: a value, not a query.

    Attributes:
        arch: target as nvcc spells it, e.g. `sm_90a`.
        sm_count: multiprocessors, at least 1.

    Raises:
        ArgumentTypeError: a field has another type.
        ArgumentError: there are no multiprocessors.
    """

    arch: str
    sm_count: int

    def __post_init__(self) -> None:
        if not isinstance(self.arch, str):
            raise ArgumentTypeError(explain("arch", type(self.arch).__name__, "a str, e.g. 'sm_90a'"))
        object.__setattr__(self, "sm_count", _extent("sm_count", self.sm_count, 1))

    @classmethod
    def from_properties(cls, properties: Mapping[str, int | str]) -> Device:
        """Returns the description of a GPU from `_C.device_properties`."""
        capability = int(properties["major"]) * 10 + int(properties["minor"])
        suffix = "a" if capability >= 90 else ""
        return cls(arch=f"sm_{capability}{suffix}", sm_count=int(properties["sm_count"]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A kernel and how many CTAs share the k range of an output tile; 0 is stream-k, see `ops.gemm`."""

    config: GemmConfig
    split_k: int


# A tile of few tokens streams the weight: small CTAs, several to an SM. A warp dequantizes a weight once for all tokens
# of its tile; more than 64 of them would spill, since group scales need a second set of accumulators.
_SM80_SCHEDULES = (
    ScheduleConfig(mainloop=support.SM80, tile_shape=(8, 64, 128), warp_shape=(8, 16), stage_count=4),
    ScheduleConfig(mainloop=support.SM80, tile_shape=(16, 64, 128), warp_shape=(16, 16), stage_count=4),
    ScheduleConfig(mainloop=support.SM80, tile_shape=(32, 64, 128), warp_shape=(32, 16), stage_count=4),
    ScheduleConfig(mainloop=support.SM80, tile_shape=(64, 64, 64), warp_shape=(64, 16), stage_count=4),
    ScheduleConfig(mainloop=support.SM80, tile_shape=(64, 128, 64), warp_shape=(64, 16), stage_count=4),
)

# Tile shapes and the most stages, few tokens first. Few tokens: long k tiles, so that a stage is worth its barriers.
# 192 rows deal out evenly where 128 leave a half-empty wave. Many tokens: the largest tile that the accumulators allow.
# With those for few tokens, they are at most 8 kernels.
_SM90_TILES = (
    ((16, 128, 256), 4),
    ((16, 256, 256), 4),
    ((32, 128, 256), 5),
    ((64, 128, 256), 4),
    ((128, 128, 128), 5),
    ((128, 192, 128), 4),
    ((256, 128, 128), 3),
)
_SM90_MIN_STAGES = 3

# The widest slab first, 512 columns; the rings of wide weights leave room for fewer.
_DECODE_TILES = ((8, 16, 8192), (8, 16, 6144), (8, 16, 4096))
_DECODE_RING_BYTES = 1 << 16
"""Bytes of B in flight or waiting on an SM: more only delays the copies of A."""
_DECODE_MAX_STAGES = 3

_MAX_SPLIT_K = 16
_CLUSTER_SHARE = {2: 1.0, 3: 0.88, 4: 0.9, 5: 0.83, 6: 0.77, 7: 0.79, 8: 0.9}
"""Share of the SMs that clusters of a size fill at a time: a cluster lies within a GPC."""
_MIN_TAIL_TILES = 8
"""Shortest k range whose tiles of a last wave are split; MinTailTiles of scheduler/persistent.hpp."""
_MIN_K_TILES = 4
"""Shortest k range of a split, in tiles: below it the pipeline never fills."""
_MAX_PARTIAL_BYTES = 1 << 28
"""Split-k partial sums a launch may need."""

_WEIGHT_BYTES = 34.0
"""Bytes of B an SM receives per nanosecond when all stream from memory."""
_ACTIVATION_BYTES = 100.0
"""Bytes of A an SM receives per nanosecond, from L2."""
_DEQUANTIZED_WEIGHTS = {1: 40.0, 2: 60.0, 3: 66.0, 4: 70.0}
"""Weights an SM dequantizes per nanosecond, in the shadow of which the tensor cores work, by its warpgroups."""
_FLOPS = 7000.0
"""Floating-point operations of the tensor cores of an SM per nanosecond, 16-bit operands."""
_EFFICIENCY = {8: 0.25, 16: 0.35, 32: 0.5, 64: 0.74, 128: 0.9, 256: 0.93}
"""What of it wgmma reaches, by the tokens of a tile."""
_SM80_EFFICIENCY = {8: 0.05, 16: 0.1, 32: 0.14, 64: 0.23}
"""What of it mma.sync reaches with weights dequantized in registers."""
_SM80_CTAS = {8: 4, 16: 4, 32: 2, 64: 2}
"""CTAs of an SM80 schedule that share an SM, by the tokens of a tile."""
_POWER_TOKENS = 512
"""Tokens from which on the power limit decides."""
_POWER_FLOPS = {(256, 2): 5450.0, (128, 3): 5330.0, (128, 2): 5000.0}
"""Floating-point operations of an SM per nanosecond at the power limit, by the tokens and warpgroups of a tile."""
_POWER_FLOPS_OTHERS = 4500.0
"""Those of other tiles: they dequantize, and read shared memory, more often."""
_POWER_NORM = 6
"""How a time at full clock and one at the power limit make one: nearly the longer, as SMs that wait save power."""
_LAUNCH_NS = 1600.0
"""A launch, up to the first copies."""
_UNIT_NS = 1000.0
"""Storing a tile."""
_DECODE_NS = 3400.0
"""A launch, filling the rings, and the sums at the end, of the kernel for few tokens."""
_DECODE_WEIGHTS = 100.0
"""Weights an SM dequantizes and multiplies per nanosecond there."""
_DECODE_ACTIVATION_BYTES = 110.0
"""Bytes of A an SM receives per nanosecond there."""
_DECODE_RELOAD_NS = 1800.0
"""What it takes the warps to take a slice of A again, for another block of atom rows."""
_SPLIT_NS = {support.SM80: 3000.0, support.SM90: 500.0}
"""Waiting for the other CTAs of a tile: through memory, or within a cluster."""
_CLUSTER_NS = 150.0
"""What each CTA of a cluster adds to that."""
_STREAM_NS = 900.0
"""Waiting for the sums of others in stream-k."""
_STREAM_BYTES = 20.0
"""Bytes of partial sums an SM writes and reads per nanosecond there."""
_FEW_CTAS = 1.12
"""How much faster than its share of memory an SM can be where others have nothing to do."""
_STREAM_WAVES = 3
"""Waves of tiles from which on stream-k is not looked at: the last one matters little."""
_PARTIAL_BYTES = {support.SM80: 20.0, support.SM90: 120.0}
"""Bytes of partial sums an SM writes and reads per nanosecond."""


def _fitting(
    types: TypeConfig, arch: str, mainloop: str, tile: tuple[int, int, int], warp: tuple[int, int], stages: range
) -> GemmConfig | None:
    """Returns the kernel with the most of these stages that fit; None where the mainloop lacks the types."""
    for stage_count in stages:
        schedule = ScheduleConfig(mainloop=mainloop, tile_shape=tile, warp_shape=warp, stage_count=stage_count)
        config = GemmConfig(types=types, schedule=schedule, arch=arch)
        if support.check(config) is None:
            return config
    return None


def _sm90_schedules(types: TypeConfig, arch: str) -> list[GemmConfig]:
    """Returns the SM90 kernels for these types, each with as many stages as fit; none where the mainloop lacks them."""

    def fitting(tile: tuple[int, int, int], most: int) -> GemmConfig | None:
        stages = range(most, _SM90_MIN_STAGES - 1, -1)
        return _fitting(types, arch, support.SM90, tile, (tile[0], 64), stages)

    found = (fitting(t, most) or fitting((t[0], t[1], t[2] // 2), most) for t, most in _SM90_TILES)
    return [config for config in found if config is not None]


def _decode_schedules(types: TypeConfig, arch: str) -> list[GemmConfig]:
    """Returns the kernel for few tokens, the one with the widest slabs whose rings fit.

    There is none before SM90, nor where factors of 4 bytes for every 16 wide weights leave no room.
    """

    def fitting(tile: tuple[int, int, int]) -> GemmConfig | None:
        wanted = _DECODE_RING_BYTES * 8 // (tile[1] * tile[2] * types.bits)
        stages = range(min(max(wanted, 2), _DECODE_MAX_STAGES), 1, -1)
        return _fitting(types, arch, support.SM90_DECODE, tile, (tile[0], tile[1]), stages)

    return [config for config in map(fitting, _DECODE_TILES) if config is not None][:1]


def schedules(types: TypeConfig, device: Device, *, mainloops: Collection[str] | None = None) -> list[GemmConfig]:
    """Returns every kernel that `choose` can return for these types, few tokens first.

    Args:
        types: the maths.
        device: the GPU.
        mainloops: only kernels of these mainloops; None is all. The SM80 one is used only where the SM90 one is not.

    Raises:
        ArgumentTypeError: `types` is no `TypeConfig`, or `device` no `Device`.
        UnsupportedError: no kernel computes `types` on this device, or there is no such mainloop.
    """
    for parameter, value, kind in (("types", types, TypeConfig), ("device", device, Device)):
        if not isinstance(value, kind):
            raise ArgumentTypeError(explain(parameter, type(value).__name__, f"a {kind.__name__}"))
    if isinstance(mainloops, str) or not isinstance(mainloops, (Collection, type(None))):
        raise ArgumentTypeError(explain("mainloops", repr(mainloops), "a list of names, or None"))
    for name in mainloops or ():
        if name not in support.MAINLOOPS:
            raise UnsupportedError(explain("mainloops", repr(name), ", ".join(support.MAINLOOPS)))
    if (reason := support.check_types(types, device.arch)) is not None:
        raise UnsupportedError(reason)
    allowed = support.MAINLOOPS if mainloops is None else mainloops
    found = _decode_schedules(types, device.arch) if support.SM90_DECODE in allowed else []
    sm90 = _sm90_schedules(types, device.arch) if support.SM90 in allowed else []
    found += sm90
    if not sm90 and support.SM80 in allowed:
        found += [GemmConfig(types=types, schedule=s, arch=device.arch) for s in _SM80_SCHEDULES]
    if not found:
        can = f"a mainloop that computes {types} on {device.arch}"
        raise UnsupportedError(explain("mainloops", ", ".join(allowed) or "none", can, repr(support.SM80)))
    return found


def candidates(
    types: TypeConfig, m: int, n: int, k: int, device: Device, *, mainloops: Collection[str] | None = None
) -> list[Choice]:
    """Returns what `choose` chooses from: every kernel with every split of k worth looking at.

    Args and errors: as `choose`.
    """
    m, n, k = _extents(m, n, k)
    return [
        Choice(config=config, split_k=split_k)
        for config in schedules(types, device, mainloops=mainloops)
        for split_k in _splits(config, m, n, k, device)
    ]


def choose(
    types: TypeConfig,
    m: int,
    n: int,
    k: int,
    device: Device,
    *,
    mainloops: Collection[str] | None = None,
    batch_invariant: bool = False,
) -> Choice:
    """Returns the kernel and split for D (m, n) = A (m, k) * B (n, k)^T that the cost model finds fastest.

    Args:
        types: the maths.
        m: rows of A and D, the tokens; may be 0.
        n: rows of B, columns of D; at least 1.
        k: columns of A and B; at least 1.
        device: the GPU.
        mainloops: as in `schedules`.
        batch_invariant: whether the choice must not depend on m, so that a row of D does not either: the kernel that
            is fastest for 64 tokens without a split of k.

    Raises:
        ArgumentTypeError: m, n or k is no integer; as `schedules`.
        ArgumentError: m, n or k is too small or too large.
        UnsupportedError: as `schedules`.
    """
    m, n, k = _extents(m, n, k)
    if not isinstance(batch_invariant, bool):
        raise ArgumentTypeError(explain("batch_invariant", type(batch_invariant).__name__, "True or False"))
    tokens = _INVARIANT_TOKENS if batch_invariant else m
    found = candidates(types, tokens, n, k, device, mainloops=mainloops)
    if batch_invariant:
        found = [c for c in found if c.split_k == 1 and not support.shares_tokens(c.config.schedule)]
    if not found:
        takes = f"a mainloop that takes {tokens} tokens"
        raise UnsupportedError(explain("mainloops", ", ".join(mainloops or ()), takes, repr(support.SM80)))
    return min(found, key=lambda choice: microseconds(choice, tokens, n, k, device))


_INVARIANT_TOKENS = 64
"""Tokens of the batch-invariant kernel: enough for the tensor cores, few enough to decode with."""


def _splits(config: GemmConfig, m: int, n: int, k: int, device: Device) -> Iterable[int]:
    """Returns the splits of k worth looking at; none where the kernel does not take m tokens.

    Those of the SM90 mainloop are clusters, which all must be resident: more would wait for a second wave.
    """
    tile_m, tile_n, tile_k = config.schedule.tile_shape
    if config.schedule.mainloop == support.SM90_DECODE:
        return range(1, 2 if m <= tile_m else 1)
    tiles = max(1, -(-m // tile_m) * -(-n // tile_n))
    partial = tiles * tile_m * tile_n * 4
    most = min(-(-k // tile_k) // _MIN_K_TILES, _MAX_SPLIT_K, _MAX_PARTIAL_BYTES // partial)
    if config.schedule.mainloop == support.SM90:
        fitting = {size: int(device.sm_count * share) // size for size, share in _CLUSTER_SHARE.items()}
        found = [1] + [size for size, count in fitting.items() if size <= most and tiles <= count]
        evenly = support.streams(config.schedule) and tiles < _STREAM_WAVES * device.sm_count
        return [*found, 0] if evenly and tiles * -(-k // tile_k) >= _MIN_K_TILES * device.sm_count else found
    return range(1, max(1, min(most, device.sm_count * _ctas_per_sm(config) // tiles)) + 1)


def _ctas_per_sm(config: GemmConfig) -> int:
    if config.schedule.mainloop != support.SM80:
        return 1
    return int(_of_tokens(_SM80_CTAS, config.schedule.tile_shape[0]))


def _of_tokens(table: Mapping[int, float], tile_m: int) -> float:
    """Returns the entry of the largest tile that is not larger than `tile_m`, or of the smallest."""
    return table[max((tokens for tokens in table if tokens <= tile_m), default=min(table))]


def microseconds(choice: Choice, m: int, n: int, k: int, device: Device) -> float:
    """Returns the time that the cost model gives a launch; for comparing choices, not for promises.

    It is infinite where the kernel does not take m tokens.

    Raises:
        ArgumentTypeError: `choice` is no `Choice`, `device` no `Device`, or m, n, k or the split is no integer.
        ArgumentError: m, n or k is too small or too large, or the split is negative.
    """
    if not isinstance(choice, Choice):
        raise ArgumentTypeError(explain("choice", type(choice).__name__, "a Choice"))
    if not isinstance(device, Device):
        raise ArgumentTypeError(explain("device", type(device).__name__, "a Device"))
    _extent("split_k", choice.split_k, 0)
    config = choice.config
    tile_m, tile_n, tile_k = config.schedule.tile_shape
    m, n, k = _extents(m, n, k)
    if config.schedule.mainloop == support.SM90_DECODE:
        if m > tile_m:
            return math.inf
        return _decode_nanoseconds(config, m, n, k, device) / 1000
    if choice.split_k == 0:
        return _power_limited(_stream_nanoseconds(config, m, n, k, device), config, m, n, k, device) / 1000
    resident = _ctas_per_sm(config)
    units = -(-m // tile_m) * -(-n // tile_n) * choice.split_k
    waves, tail = _waves(choice, m, n, k, device)
    sharing = min(resident, -(-units // device.sm_count))  # CTAs that share the SM's rates
    column = _column_nanoseconds(config, min(_FEW_CTAS, max(1.0, device.sm_count / max(units, 1))))
    k_tiles = -(-k // tile_k)
    columns = -(-k_tiles // choice.split_k) * tile_k
    nanoseconds = _launch_nanoseconds(config) + waves * (columns * column * sharing + _UNIT_NS)
    if choice.split_k > 1 or tail:
        mainloop = config.schedule.mainloop
        nanoseconds += (choice.split_k if mainloop == support.SM90 else 0) * _CLUSTER_NS
        nanoseconds += _SPLIT_NS[mainloop] + sharing * 2 * tile_m * tile_n * 4 / _PARTIAL_BYTES[mainloop]
    if config.schedule.mainloop == support.SM90:
        nanoseconds = _power_limited(nanoseconds, config, m, n, k, device)
    return nanoseconds / 1000


def _launch_nanoseconds(config: GemmConfig) -> float:
    """Returns what a launch takes until the first k tile is there: all SMs ask memory for theirs at once."""
    _, tile_n, tile_k = config.schedule.tile_shape
    return _LAUNCH_NS + tile_n * tile_k * config.types.bits / 8 / _WEIGHT_BYTES


def _column_nanoseconds(config: GemmConfig, share: float = 1.0) -> float:
    """Returns what a tile takes for each column of k: the longest of copying, multiplying and dequantizing.

    `share` is an SM's share of memory, in units of what it has where all SMs work.
    """
    tile_m, tile_n, _ = config.schedule.tile_shape
    copy = tile_n * config.types.bits / 8 / (share * _WEIGHT_BYTES) + tile_m * 2 / _ACTIVATION_BYTES
    table = _SM80_EFFICIENCY if config.schedule.mainloop == support.SM80 else _EFFICIENCY
    efficiency = _of_tokens(table, tile_m)
    if config.schedule.mainloop == support.SM80:
        return max(copy, 2 * tile_m * tile_n / (_FLOPS * efficiency), tile_n / _DEQUANTIZED_WEIGHTS[2])
    multiply = 2 * tile_m * tile_n / (_FLOPS * efficiency)
    return max(copy, multiply, tile_n / _DEQUANTIZED_WEIGHTS[tile_n // 64])


def _power_limited(nanoseconds: float, config: GemmConfig, m: int, n: int, k: int, device: Device) -> float:
    """Returns what a launch of the SM90 mainloop takes where many tokens bring the GPU to its power limit."""
    if m < _POWER_TOKENS:
        return nanoseconds
    tile_m, tile_n, _ = config.schedule.tile_shape
    limit = 2 * m * n * k / (device.sm_count * _POWER_FLOPS.get((tile_m, tile_n // 64), _POWER_FLOPS_OTHERS))
    return float((nanoseconds**_POWER_NORM + limit**_POWER_NORM) ** (1 / _POWER_NORM))


def _stream_nanoseconds(config: GemmConfig, m: int, n: int, k: int, device: Device) -> float:
    """All CTAs take the same number of k tiles; a tile's sums pass through memory where its k range is cut."""
    tile_m, tile_n, tile_k = config.schedule.tile_shape
    tiles = -(-m // tile_m) * -(-n // tile_n)
    own = -(-(tiles * -(-k // tile_k)) // device.sm_count)
    stored = -(-tiles // device.sm_count) + 1
    partial = 2 * tile_m * tile_n * 4 / _STREAM_BYTES
    columns = own * tile_k * _column_nanoseconds(config)
    return _launch_nanoseconds(config) + columns + stored * _UNIT_NS + _STREAM_NS + partial


def _waves(choice: Choice, m: int, n: int, k: int, device: Device) -> tuple[float, bool]:
    """Returns the waves of a launch, and whether the last one is half of one.

    Clusters that share A take pairs of tiles; pairs that would fill at most half of a last wave are split along k, as
    scheduler/persistent.hpp has it.
    """
    config = choice.config
    tile_m, tile_n, tile_k = config.schedule.tile_shape
    tiles_m, tiles_n = -(-m // tile_m), -(-n // tile_n)
    if config.schedule.mainloop != support.SM90 or choice.split_k > 1 or not support.shares_tokens(config.schedule):
        units = tiles_m * tiles_n * choice.split_k
        return float(-(-units // (device.sm_count * _ctas_per_sm(config)))), False
    clusters = max(1, device.sm_count // 2)
    pairs = tiles_m * -(-tiles_n // 2)
    whole, rest = divmod(pairs, clusters)
    tail = whole > 0 and 0 < 2 * rest <= clusters and -(-k // tile_k) >= _MIN_TAIL_TILES
    return whole + (0.5 if tail else float(rest > 0)), tail


def _decode_nanoseconds(config: GemmConfig, m: int, n: int, k: int, device: Device) -> float:
    """A CTA copies its atom rows at the memory's rate, and A for each block of them where a warp has several slices."""
    rows = -(-n // ATOM_N)
    own = -(-rows // device.sm_count)
    atoms = -(-k // ATOM_K)
    slab = support.decode_slab_atoms(config.schedule, m, k, own)
    rounds = -(-atoms // (slab * support.DECODE_WARPS))
    copy = own * ATOM_N * k * config.types.bits / 8 / _WEIGHT_BYTES
    multiply = own * ATOM_N * rounds * slab * support.DECODE_WARPS * ATOM_K / _DECODE_WEIGHTS
    blocks = 1 if rounds == 1 else -(-own // support.decode_block_rows(config, m, slab))
    activations = blocks * m * k * 2 / _DECODE_ACTIVATION_BYTES
    return _DECODE_NS + max(copy, multiply) + activations + (blocks - 1) * rounds * _DECODE_RELOAD_NS
