"""Picks the kernel for a call from (types, m, n, k) and a description of the GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from humming_cutlass import support
from humming_cutlass.config import GemmConfig, ScheduleConfig, TypeConfig
from humming_cutlass.errors import UnsupportedError

__all__ = ["Choice", "Device", "choose", "schedules"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What the planner must know of a GPU: a value, not a query.

    Attributes:
        arch: target as nvcc spells it, e.g. `sm_90a`.
        sm_count: multiprocessors.
    """

    arch: str
    sm_count: int

    @classmethod
    def from_properties(cls, properties: Mapping[str, int | str]) -> Device:
        """Returns the description of a GPU from `_C.device_properties`."""
        capability = int(properties["major"]) * 10 + int(properties["minor"])
        suffix = "a" if capability >= 90 else ""
        return cls(arch=f"sm_{capability}{suffix}", sm_count=int(properties["sm_count"]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A kernel and how many CTAs share the k range of an output tile."""

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

# (tile shape, most stages). Few tokens: many rows, since every row tile reads all activations again. Many tokens: as
# large a tile as the accumulators allow.
_SM90_TILES = (
    ((16, 128, 256), 6),
    ((32, 128, 256), 5),
    ((64, 128, 256), 4),
    ((128, 128, 128), 5),
    ((256, 128, 128), 3),
)

_MAX_SPLIT_K = 16
_CTAS_PER_SM = 3
"""CTAs of the small SM80 schedules that an SM holds at once."""
_MIN_K_TILES = 4
"""Shortest k range of a split, in tiles: below it the pipeline never fills."""


def _sm90_schedules(types: TypeConfig, arch: str) -> list[GemmConfig]:
    """Returns the SM90 kernels for these types, each with as many stages as fit; none where the mainloop lacks them."""
    configs = []
    for tile, most in _SM90_TILES:
        for stage_count in range(most, 1, -1):
            schedule = ScheduleConfig(
                mainloop=support.SM90, tile_shape=tile, warp_shape=(tile[0], 64), stage_count=stage_count
            )
            config = GemmConfig(types=types, schedule=schedule, arch=arch)
            if support.check(config) is None:
                configs.append(config)
                break
    return configs


def schedules(types: TypeConfig, device: Device, *, mainloop: str | None = None) -> list[GemmConfig]:
    """Returns every kernel that `choose` can return for these types, few tokens first.

    Args:
        types: the maths.
        device: the GPU.
        mainloop: only kernels of this mainloop; None is all.

    Raises:
        UnsupportedError: no kernel computes `types` on this device.
    """
    if (reason := support.check_types(types, device.arch)) is not None:
        raise UnsupportedError(reason)
    sm80 = [GemmConfig(types=types, schedule=s, arch=device.arch) for s in _SM80_SCHEDULES]
    sm90 = _sm90_schedules(types, device.arch)
    if mainloop == support.SM80 or (mainloop is None and not sm90):
        return sm80
    return sm90 if mainloop == support.SM90 else [*sm80[:1], *sm90]


def choose(types: TypeConfig, m: int, n: int, k: int, device: Device, *, mainloop: str | None = None) -> Choice:
    """Returns the kernel and split for D (m, n) = A (m, k) * B (n, k)^T, of one mainloop if one is named.

    Raises:
        UnsupportedError: no kernel computes `types` on this device.
    """
    candidates = schedules(types, device, mainloop=mainloop)
    config = next((c for c in candidates if m <= c.schedule.tile_shape[0]), candidates[-1])
    return Choice(config=config, split_k=_split_k(config, m, n, k, device))


def _split_k(config: GemmConfig, m: int, n: int, k: int, device: Device) -> int:
    """Returns the split that fills the SMs, as long as each part keeps the pipeline busy."""
    tile_m, tile_n, tile_k = config.schedule.tile_shape
    tiles = -(-m // tile_m) * -(-n // tile_n)
    k_tiles = -(-k // tile_k)
    per_sm = _CTAS_PER_SM if config.schedule.mainloop == support.SM80 and tile_m <= 64 else 1
    return max(1, min(device.sm_count * per_sm // max(tiles, 1), k_tiles // _MIN_K_TILES, _MAX_SPLIT_K))
