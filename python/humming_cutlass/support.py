"""The only statement of what is legal.

`check` answers for a whole kernel, `check_types` for the maths alone. Both return None, or a sentence that names
the failed rule and the nearest supported choice. The docs' support matrix is generated from `check_types`.
"""

from __future__ import annotations

import functools
import re

import numpy as np

from humming_cutlass import dtypes
from humming_cutlass.config import GemmConfig, TypeConfig
from humming_cutlass.errors import explain

__all__ = [
    "ACTIVATION_TYPES",
    "MAINLOOPS",
    "OUTPUT_TYPES",
    "SCALE_TYPES",
    "ZERO_TYPES",
    "check",
    "check_types",
    "compute_capability",
    "represents",
]

ACTIVATION_TYPES = ("float16", "bfloat16")
OUTPUT_TYPES = ("float16", "bfloat16", "float32")
SCALE_TYPES = ("float16", "bfloat16", "float32", "float8_e4m3", "float8_e5m2", "float8_e8m0")
ZERO_TYPES = ("none", "integer", "float16", "bfloat16", "float32")
MAINLOOPS = {"sm80_cpasync_multistage": 80}
"""Mainloops and the least compute capability each needs (ten times major plus minor)."""

SMEM_LIMIT = 99 * 1024
"""Shared memory a CTA may have on every GPU from SM80 on (SM86, SM89 and SM120 are the smallest)."""


def compute_capability(arch: str) -> int:
    """Returns 80 for `sm_80`, 90 for `sm_90a`, 120 for `sm_120a`; 0 if `arch` is none."""
    found = re.fullmatch(r"sm_(\d+)[af]?", arch)
    return int(found[1]) if found else 0


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
    """
    capability = compute_capability(arch)
    if types.element_a not in ACTIVATION_TYPES:
        return explain("element_a", types.element_a, ", ".join(ACTIVATION_TYPES), "float16")
    if capability < 75:
        return explain("arch", arch, "sm_80 or later")
    if capability < 80:
        fallback = " and float16 activations" if types.element_a == "bfloat16" else ""
        return explain("arch", arch, f"sm_80 or later; there is no SM75 mainloop{fallback}", "sm_80")
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
        return explain("element_zero", types.element_zero, f"none with weights of type {types.element_b}", f"uint{bits}")
    if types.group_size != -1 and (types.group_size <= 0 or types.group_size % 16):
        nearest = max(16, (types.group_size + 8) // 16 * 16)
        return explain("group_size", types.group_size, "-1 or a positive multiple of 16", nearest)
    return None


def check(config: GemmConfig) -> str | None:
    """Returns why `config` is not legal, or None."""
    if (reason := check_types(config.types, config.arch)) is not None:
        return reason
    schedule = config.schedule
    if schedule.mainloop not in MAINLOOPS:
        return explain("mainloop", schedule.mainloop, ", ".join(MAINLOOPS))
    if compute_capability(config.arch) < MAINLOOPS[schedule.mainloop]:
        return explain("mainloop", schedule.mainloop, f"one that {config.arch} has", "sm80_cpasync_multistage")
    return _check_sm80(config)


def _check_sm80(config: GemmConfig) -> str | None:
    schedule = config.schedule
    (tile_m, tile_n, tile_k), (warp_m, warp_n) = schedule.tile_shape, schedule.warp_shape
    if tile_k % 64 or tile_k <= 0:
        return explain("tile_shape", schedule.tile_shape, "k a positive multiple of 64")
    if warp_m <= 0 or warp_n <= 0 or warp_m % 8 or warp_n % 16:
        return explain("warp_shape", schedule.warp_shape, "m a multiple of 8, n a multiple of 16", (8, 16))
    if tile_m % warp_m or tile_n % warp_n:
        return explain("warp_shape", schedule.warp_shape, f"a divisor of the tile {schedule.tile_shape}")
    if not 32 <= (tile_m // warp_m) * (tile_n // warp_n) * 32 <= 1024:
        return explain("warp_shape", schedule.warp_shape, "at most 32 warps a tile")
    if schedule.stage_count < 2:
        return explain("stage_count", schedule.stage_count, "at least 2", 2)
    stage = tile_m * tile_k * 2 + tile_n * tile_k * config.types.bits // 8
    stages = SMEM_LIMIT // stage
    if stages < schedule.stage_count:
        return explain("stage_count", schedule.stage_count, f"what fits {SMEM_LIMIT} bytes of shared memory", stages)
    return None
