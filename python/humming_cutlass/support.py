"""The only statement of what is legal.

`check` answers for a whole kernel, `check_types` for the maths alone. Both return None, or a sentence that names
the failed rule and the nearest supported choice. The docs' support matrix is generated from `check_types`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

from humming_cutlass import dtypes
from humming_cutlass.config import ATOM_K, ATOM_N, GemmConfig, ScheduleConfig, TypeConfig
from humming_cutlass.errors import ArgumentTypeError, explain

__all__ = [
    "ACTIVATION_TYPES",
    "ARCHS",
    "MAINLOOPS",
    "OUTPUT_TYPES",
    "SCALE_TYPES",
    "ZERO_TYPES",
    "check",
    "check_arch",
    "check_types",
    "compute_capability",
    "decode_block_rows",
    "decode_slab_atoms",
    "decode_slabs",
    "represents",
    "scale_range",
    "shares_tokens",
    "smem_bytes",
    "streams",
]

ACTIVATION_TYPES = dtypes.ACTIVATION_TYPES
OUTPUT_TYPES = dtypes.OUTPUT_TYPES
SCALE_TYPES = dtypes.SCALE_TYPES
ZERO_TYPES = ("none", "integer", *dtypes.OUTPUT_TYPES)
SM80 = "sm80_cpasync_multistage"
SM90 = "sm90_tma_gmma_rs_warpspecialized"
SM90_DECODE = "sm90_bulk_multistage"
MAINLOOPS = (SM80, SM90, SM90_DECODE)
"""Mainloops, by the header under collective/. The SM80 one computes every type on every later GPU; SM90_DECODE computes
every type for few tokens."""

MAINLOOPS_FOR_ANY_TENSORS = (SM80, SM90_DECODE)
"""Those that take rows of A at any address, and group scales of any size."""

DECODE_WARPS = 16
"""Warps of a CTA of SM90_DECODE, which split k; kDecodeWarps of device/arguments.hpp."""
_DECODE_MANY_ROWS = 10
"""Atom rows of a CTA from which on slabs are as wide as they can be; kDecodeManyRows there."""
_DECODE_BYTES_SUMS = DECODE_WARPS * 512
"""Shared memory for the sums of an atom row and eight tokens."""

ARCHS = (
    *("sm_75", "sm_80", "sm_86", "sm_87", "sm_88", "sm_89", "sm_90a"),
    *("sm_100a", "sm_100f", "sm_103a", "sm_110a", "sm_120a", "sm_120f", "sm_121a"),
)
"""Targets of nvcc that are the GPUs of today, by compute capability; `check_types` says which have a mainloop."""

SMEM_LIMIT = {SM80: 99 * 1024, SM90: 227 * 1024, SM90_DECODE: 227 * 1024}
"""Shared memory a CTA may have: for SM80 what SM86, SM89 and SM120 have, the smallest."""


def compute_capability(arch: str) -> int:
    """Returns 80 for `sm_80`, 90 for `sm_90a`, 120 for `sm_120a`; 0 if `arch` is none."""
    found = re.fullmatch(r"sm_([1-9][0-9]{1,5})[af]?", arch)
    return int(found[1]) if found else 0


def check_arch(arch: str, parameter: str = "arch") -> str | None:
    """Returns why `arch` is no GPU that kernels can be compiled for beforehand, or None.

    A GPU that is present needs no such check: the compiler knows it or says so. A target named by hand is more often
    misspelt than new. SM75 is known here and refused by `check_types`, which says why.

    Args:
        arch: target as nvcc spells it, e.g. `sm_90a`.
        parameter: the name of `arch` for the user.

    Raises:
        ArgumentTypeError: `arch` is no str.
    """
    if not isinstance(arch, str):
        raise ArgumentTypeError(explain(parameter, type(arch).__name__, "a str, e.g. 'sm_90a'"))
    if arch in ARCHS:
        return None
    usable = [known for known in ARCHS if compute_capability(known) >= 80]
    found = re.search(r"\d{1,6}", arch)
    nearest = min(usable, key=lambda known: abs(compute_capability(known) - int(found[0]))) if found else None
    return explain(parameter, arch, ", ".join(usable), nearest)


@functools.cache
def represents(operand: str, weight: str) -> bool:
    """Whether every finite value of `weight` is exact in `operand`, up to one power of two per tensor.

    An unsigned integer of B bits counts with any integer zero point in 0 .. 2^B: the values -2^B .. 2^B - 1. A code
    book's entries are rounded to the operand type by definition and always pass for 16-bit operands.
    """
    weight_type = dtypes.parse(weight)
    operand_type = dtypes.parse(operand)
    if weight_type.kind is dtypes.Kind.CODE_BOOK:
        return operand_type.bits == 16
    if weight_type.kind is dtypes.Kind.UINT:
        values = np.arange(-(1 << weight_type.bits), 1 << weight_type.bits, dtype=np.float64)
    else:
        values = weight_type.values()
    values = np.unique(np.abs(values[np.isfinite(values)]))
    negative_only = weight_type.kind in (dtypes.Kind.INT, dtypes.Kind.UINT)  # -2^b has no positive twin
    operands = operand_type.values()
    operands = operands[np.isfinite(operands)]
    for shift in range(-24, 25):
        scaled = np.ldexp(values, shift)
        positive = scaled[:-1] if negative_only else scaled
        if np.isin(-scaled, operands).all() and np.isin(positive, operands).all():
            return True
    return False


def check_types(types: TypeConfig, arch: str = "sm_80") -> str | None:
    """Returns why no kernel can compute `types` on `arch`, or None.

    The sentence names the field, what it is, what is allowed and the nearest supported choice.

    Raises:
        ArgumentTypeError: `types` is no `TypeConfig`, or `arch` no str.
    """
    for parameter, value, kind in (("types", types, TypeConfig), ("arch", arch, str)):
        if not isinstance(value, kind):
            raise ArgumentTypeError(explain(parameter, type(value).__name__, f"a {kind.__name__}"))
    capability = compute_capability(arch)
    if types.element_a not in ACTIVATION_TYPES:
        return explain("element_a", types.element_a, ", ".join(ACTIVATION_TYPES), "float16")
    if capability < 75:
        return explain("arch", arch, "sm_80 or later")
    if capability < 80:
        no_type = ", and SM75 has no bfloat16" if types.element_a == "bfloat16" else ""
        return explain("arch", arch, f"sm_80 or later; there is no SM75 mainloop yet{no_type}", "sm_80")
    if types.element_b not in dtypes.WEIGHT_TYPES:
        return explain("element_b", types.element_b, "int1-8, uint1-8, floatB_eXmY of at most 8 bits, nf4")
    if not represents(types.element_a, types.element_b):
        return explain(
            "element_b",
            types.element_b,
            f"a type whose values are exact in {types.element_a}",
            "element_a bfloat16" if represents("bfloat16", types.element_b) else None,
        )
    if types.element_d not in OUTPUT_TYPES:
        return explain("element_d", types.element_d, ", ".join(OUTPUT_TYPES), types.element_a)
    if types.element_scale not in SCALE_TYPES:
        return explain("element_scale", types.element_scale, ", ".join(SCALE_TYPES), types.element_a)
    if types.element_zero not in ZERO_TYPES:
        return explain("element_zero", types.element_zero, ", ".join(ZERO_TYPES))
    if types.element_zero != "none" and dtypes.parse(types.element_b).kind is not dtypes.Kind.UINT:
        bits = dtypes.parse(types.element_b).bits
        return explain(
            "element_zero", types.element_zero, f"none with weights of type {types.element_b}", f"uint{bits}"
        )
    if types.group_size != -1 and (types.group_size <= 0 or types.group_size % 16):
        nearest = max(16, (types.group_size + 8) // 16 * 16)
        return explain("group_size", types.group_size, "-1 or a positive multiple of 16", nearest)
    return None


def scale_range(types: TypeConfig) -> tuple[float, float]:
    """Returns the group scales (least, greatest magnitude but 0) that the SM90 mainloop multiplies weights by exactly.

    Scales outside are for the SM80 mainloop, which multiplies fp32 accumulators. The bounds keep the dequantizer's
    multiplier finite and its products normal; they mirror GroupScaledDequantizer (dequant/group_scaled.hpp).
    """
    weight = dtypes.parse(types.element_b)
    values = np.abs(weight.values())
    least = float(np.min(values[np.isfinite(values) & (values > 0)]))
    integer = weight.kind in (dtypes.Kind.INT, dtypes.Kind.UINT)
    if types.element_a == "bfloat16":
        return max(2.0**-90, 2.0 ** (-126 + (17 if integer else 11)) / least), 2.0**11
    exponent_max = 3
    base_exponent = -9 if integer else 0
    if weight.kind is dtypes.Kind.FLOAT:
        value_exponent = (1 << weight.exponent_bits) - weight.bias
        if weight.exponent_bits == 5 and weight.specials == "none":
            base_exponent = -1
    else:
        value_exponent = math.ceil(math.log2(weight.max)) if weight.kind is dtypes.Kind.CODE_BOOK else weight.bits
    exponent = min(15 - exponent_max - value_exponent, 15 - exponent_max + base_exponent)
    return max(2.0 ** (-14 - exponent) / least, 2.0**-14 / 2.0 ** (exponent - base_exponent)), 2.0**exponent_max


def _group_count(group_size: int, tile_k: int) -> int:
    """Returns how many groups a k tile can touch; GroupMap::TileGroups of layout/group_map.hpp."""
    if group_size == -1:
        return 0
    if group_size % tile_k == 0:
        return 1
    if tile_k % group_size == 0:
        return tile_k // group_size
    return (group_size - 16 + tile_k - 1) // group_size + 1


def smem_bytes(config: GemmConfig) -> int:
    """Returns the dynamic shared memory of a CTA, as the kernel's traits state it."""
    types, (tile_m, tile_n, tile_k) = config.types, config.schedule.tile_shape
    a = tile_m * tile_k * 2
    b = tile_n * tile_k * types.bits // 8
    if config.schedule.mainloop == SM90_DECODE:
        return max(_smem_bytes_decode(config, atoms) for atoms in decode_slabs(config.schedule))
    groups = tile_n * _group_count(types.group_size, tile_k)
    scales = groups * _scale_bytes(types)
    zeros = groups * _zero_bytes(types)
    d = dtypes.parse(types.element_d).bits // 8
    if config.schedule.mainloop == SM80:
        return max(config.schedule.stage_count * (a + b + scales + zeros), tile_m * (tile_n * d + 16))
    stages = config.schedule.stage_count * _round_up(a + b + _round_up(scales, 128) + zeros, 1024)
    stages = max(stages, tile_m * tile_n * 4)  # the partial sums of split-k take their place
    barriers = 16 * config.schedule.stage_count
    epilogue = tile_n * min(tile_m, 16) * d
    return _round_up(_round_up(stages + barriers, 1024) + epilogue, 1024)


def decode_slabs(schedule: ScheduleConfig) -> range:
    """Returns the widths of a slab, in atoms, that the kernel for few tokens holds code for, see GemmSm90Decode."""
    most = schedule.tile_shape[2] // (DECODE_WARPS * ATOM_K)
    return range(most // 2, most + 1)


def decode_slab_atoms(schedule: ScheduleConfig, m: int, k: int, rows: int) -> int:
    """Returns the width of a slab for m tokens, k columns and `rows` atom rows of a CTA, see device/arguments.hpp."""
    least, most = decode_slabs(schedule)[0], decode_slabs(schedule)[-1]
    atoms = -(-k // ATOM_K)
    limit = most
    while rows < _DECODE_MANY_ROWS and limit * m > _decode_blocks_a(schedule, limit):
        limit -= 1
    rounds = -(-atoms // (DECODE_WARPS * limit))
    per_warp = -(-atoms // DECODE_WARPS)
    return max(-(-per_warp // rounds), least)


def _decode_blocks_a(schedule: ScheduleConfig, atoms: int) -> int:
    """Returns the tokens x atoms of A that a warp holds beside slabs of `atoms` atoms, see device/arguments.hpp."""
    return 40 if decode_slabs(schedule)[-1] == 8 and atoms in (5, 6) else 32


def decode_block_rows(config: GemmConfig, m: int, atoms: int) -> int:
    """Returns the atom rows that the kernel for few tokens sums at a time, for m tokens and slabs of `atoms` atoms."""
    return max(1, _decode_rows(config, atoms)) * 4 // (4 if m > 4 else 2 if m > 2 else 1)


def _decode_rows(config: GemmConfig, atoms: int) -> int:
    """Returns RowBlock of the mainloop; not positive where the rings leave no room, and the kernel does not compile."""
    rest = SMEM_LIMIT[SM90_DECODE] - _smem_bytes_decode_rings(config, atoms) - 1024
    return min(8, rest // _DECODE_BYTES_SUMS)


def _smem_bytes_decode(config: GemmConfig, atoms: int) -> int:
    """Returns the shared memory for slabs of `atoms` atoms; more than there is where not even one row of sums fits."""
    rows = _decode_rows(config, atoms)
    rings = _smem_bytes_decode_rings(config, atoms)
    return _round_up(rings + rows * _DECODE_BYTES_SUMS if rows > 0 else rings + _DECODE_BYTES_SUMS + 1024, 1024)


def _smem_bytes_decode_rings(config: GemmConfig, atoms: int) -> int:
    """Returns the shared memory of the rings of slabs, of A and of the barriers, without that of the sums."""
    types, schedule = config.types, config.schedule
    groups = ATOM_N * _group_count(types.group_size, atoms * ATOM_K)
    zeros = (groups if types.group_size != -1 else ATOM_N) * _zero_bytes(types)
    slab = _round_up(ATOM_N * atoms * ATOM_K * types.bits // 8 + groups * _scale_bytes(types) + zeros, 128)
    barriers = 8 * (schedule.stage_count + 1)
    return DECODE_WARPS * (slab * schedule.stage_count + _decode_blocks_a(schedule, atoms) * 128 + barriers)


def _scale_bytes(types: TypeConfig) -> int:
    return dtypes.parse(types.element_scale).bits // 8


def _zero_bytes(types: TypeConfig) -> int:
    stored = {"none": None, "integer": "float16"}.get(types.element_zero, types.element_zero)
    return dtypes.parse(stored).bits // 8 if stored else 0


def shares_tokens(schedule: ScheduleConfig) -> bool:
    """Returns whether CTAs of a cluster receive the tokens of a tile together: MaxSharing of the SM90 mainloop.

    Such a launch may split k for the tiles of its last wave, even without `split_k`.
    """
    return schedule.mainloop == SM90 and schedule.tile_shape[0] >= 256


def streams(schedule: ScheduleConfig) -> bool:
    """Returns whether a kernel has stream-k, `split_k` 0."""
    return schedule.mainloop == SM90 and not shares_tokens(schedule)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def check(config: GemmConfig) -> str | None:
    """Returns why `config` is not legal, or None.

    Raises:
        ArgumentTypeError: `config` is no `GemmConfig`.
    """
    if not isinstance(config, GemmConfig):
        raise ArgumentTypeError(explain("config", type(config).__name__, "a GemmConfig"))
    if (reason := check_types(config.types, config.arch)) is not None:
        return reason
    schedule = config.schedule
    if schedule.mainloop not in MAINLOOPS:
        return explain("mainloop", schedule.mainloop, ", ".join(MAINLOOPS), SM80)
    rules = {SM80: _check_sm80, SM90: _check_sm90, SM90_DECODE: _check_sm90_decode}
    reason = rules[schedule.mainloop](config)
    if reason is None and (size := smem_bytes(config)) > (limit := SMEM_LIMIT[schedule.mainloop]):
        fitting = _fitting_stages(config)
        if fitting < 2:
            allowed = f"tiles of which 2 stages fit {limit} bytes of shared memory"
            return explain("tile_shape", schedule.tile_shape, allowed)
        allowed = f"stages that fit {limit} bytes of shared memory; these need {size}"
        return explain("stage_count", schedule.stage_count, allowed, fitting)
    return reason


def _fitting_stages(config: GemmConfig) -> int:
    """Returns the most stages, of at least 2, of which the shared memory holds this tile; 1 where it does not."""

    def fits(stage_count: int) -> bool:
        schedule = dataclasses.replace(config.schedule, stage_count=stage_count)
        return smem_bytes(dataclasses.replace(config, schedule=schedule)) <= SMEM_LIMIT[schedule.mainloop]

    stage_count = 1
    while fits(stage_count + 1):
        stage_count += 1
    return stage_count


def _check_sm80(config: GemmConfig) -> str | None:
    schedule = config.schedule
    (tile_m, tile_n, tile_k), (warp_m, warp_n) = schedule.tile_shape, schedule.warp_shape
    if tile_k % 64 or tile_k <= 0:
        return explain("tile_shape", schedule.tile_shape, "k a positive multiple of 64")
    if tile_m <= 0 or tile_n <= 0:
        return explain("tile_shape", schedule.tile_shape, "m a positive multiple of 8, n a positive multiple of 16")
    if warp_m <= 0 or warp_n <= 0 or warp_m % 8 or warp_n % 16:
        return explain("warp_shape", schedule.warp_shape, "m a multiple of 8, n a multiple of 16", (8, 16))
    if tile_m % warp_m or tile_n % warp_n:
        return explain("warp_shape", schedule.warp_shape, f"a divisor of the tile {schedule.tile_shape}")
    if not 32 <= (tile_m // warp_m) * (tile_n // warp_n) * 32 <= 1024:
        return explain("warp_shape", schedule.warp_shape, "at most 32 warps a tile")
    if schedule.stage_count < 2:
        return explain("stage_count", schedule.stage_count, "at least 2", 2)
    return None


def _check_sm90(config: GemmConfig) -> str | None:
    types, schedule = config.types, config.schedule
    (tile_m, tile_n, tile_k) = schedule.tile_shape
    if config.arch != "sm_90a":
        return explain("mainloop", schedule.mainloop, f"one that {config.arch} has", SM80)
    if types.element_zero not in ("none", "integer"):
        return explain("element_zero", types.element_zero, f"none or integer with mainloop {SM90}", SM80)
    exact = (types.element_a, "float8_e4m3", "float8_e5m2", "float8_e8m0")
    if types.group_size != -1 and types.element_scale not in exact:
        return explain("element_scale", types.element_scale, f"{', '.join(exact)} with mainloop {SM90}", SM80)
    if tile_m not in (8, 16, 32, 64, 128, 256):
        return explain("tile_shape", schedule.tile_shape, "m one of 8, 16, 32, 64, 128, 256")
    if tile_n not in (64, 128, 192, 256) or tile_k not in (64, 128, 256):
        return explain("tile_shape", schedule.tile_shape, "n one of 64, 128, 192, 256; k one of 64, 128, 256")
    if tile_m * tile_n > 256 * 128:
        return explain("tile_shape", schedule.tile_shape, "m * n at most 32768, what the registers hold")
    if schedule.warp_shape != (tile_m, 64):
        return explain(
            "warp_shape", schedule.warp_shape, "(tile m, 64): a warpgroup owns 64 rows and all tokens", (tile_m, 64)
        )
    if schedule.stage_count < 2:
        return explain("stage_count", schedule.stage_count, "at least 2", 2)
    return None


def _check_sm90_decode(config: GemmConfig) -> str | None:
    schedule = config.schedule
    (tile_m, tile_n, tile_k) = schedule.tile_shape
    if config.arch != "sm_90a":
        return explain("mainloop", schedule.mainloop, f"one that {config.arch} has", SM80)
    if (tile_m, tile_n) != (8, 16) or tile_k not in (2048, 4096, 6144, 8192):
        allowed = "m 8, n 16, k one of 2048, 4096, 6144, 8192"
        return explain("tile_shape", schedule.tile_shape, allowed, (8, 16, 4096))
    if schedule.warp_shape != (tile_m, 16):
        allowed = "(tile m, 16): a warp multiplies an atom row by all tokens"
        return explain("warp_shape", schedule.warp_shape, allowed, (tile_m, 16))
    if schedule.stage_count < 2:
        return explain("stage_count", schedule.stage_count, "at least 2", 2)
    return None
