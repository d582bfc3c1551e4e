"""The errors themselves: one sentence, the right Python classes, and typed errors for impossible configurations."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from humming_cutlass import dtypes, errors, planner, support, testing
from humming_cutlass.config import GemmConfig, ScheduleConfig, WeightConfig, check_group_size


def test_the_sentence() -> None:
    assert (
        errors.explain("k", 3, "a multiple of 16", 16) == "k: got 3; allowed: a multiple of 16; nearest supported: 16"
    )
    assert errors.explain("k", 3, "more") == "k: got 3; allowed: more"


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "explain"])
def test_every_error_is_one_of_ours_and_pythons(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.HummingError)
    python = {
        "ArgumentError": ValueError,
        "ArgumentTypeError": TypeError,
        "UnsupportedError": ValueError,
        "HummingError": Exception,
    }.get(name, RuntimeError)
    assert issubclass(error, python)


@pytest.mark.parametrize(
    ("group_size", "k", "nearest"),
    [
        (24, 96, (16, 32)),
        (100, 1024, (128,)),
        (128, 1728, (144,)),
        (17, 16, (-1,)),
        (1 << 20, 64, (-1,)),
        (60, 64, (-1,)),
        (33, 64, (32,)),
        (-5, 64, (-1,)),
        (24, 10**18, (16, 32)),
        (7, 16 * (2**61 - 1), (16,)),
        (0, 32, (16,)),
    ],
)
def test_group_sizes(group_size: int, k: int, nearest: tuple[int, ...]) -> None:
    with pytest.raises(errors.ArgumentError, match=f"group_size: got {group_size};") as caught:
        check_group_size(group_size, k)
    assert any(str(caught.value).endswith(f"nearest supported: {n}") for n in nearest)


def test_group_sizes_that_are_one() -> None:
    assert check_group_size(-1, 100) == check_group_size(100, 100) == -1
    assert check_group_size(48, 96) == 48
    size = check_group_size(np.int64(48), np.int32(96))  # type: ignore[arg-type]
    assert size == 48
    assert type(size) is int


@pytest.mark.parametrize("group_size", ["32", None, 32.0, True, [32]])
def test_group_sizes_that_are_no_integers(group_size: Any) -> None:
    with pytest.raises(errors.ArgumentTypeError, match=r"group_size: got .*; allowed: -1, k = 64, or a multiple of 16"):
        check_group_size(group_size, 64)
    with pytest.raises(errors.ArgumentTypeError, match=r"group_size: got "):
        WeightConfig(dtype="int4", group_size=group_size).resolve(k=64, element_a="float16")


def test_the_nearest_group_size_of_a_huge_k_is_found_at_once() -> None:
    start = time.perf_counter()
    with pytest.raises(errors.ArgumentError, match=r"nearest supported: 1008$"):
        check_group_size(1000, 16 * 63 * (2**40 - 87))
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize(
    ("name", "nearest"), [("int9", "int"), ("float16_e5", "float"), ("uint", "uint"), ("nf5", "nf4")]
)
def test_unknown_types_name_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=rf"dtype: got '{name}'.*nearest supported: {nearest}"):
        dtypes.parse(name)
    with pytest.raises(errors.ArgumentTypeError, match=r"dtype: got 4 \(int\)"):
        dtypes.parse(4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"strategy": "block"}, r"strategy: got 'block'"),
        ({"strategy": "channel", "group_size": 16}, r"group_size: got 16; allowed: -1 with strategy 'channel'"),
        ({"zero_point": "yes"}, r"zero_point: got 'yes'"),
    ],
)
def test_weight_configs(words: dict[str, object], message: str) -> None:
    with pytest.raises(errors.ArgumentError, match=message):
        WeightConfig(dtype="uint4", **words).resolve(k=64, element_a="float16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"dtype": 4}, errors.ArgumentTypeError, r"weight_config\['dtype'\]: got 4 \(int\)"),
        (
            {"dtype": "int4", "global_scale": 2.0},
            errors.ArgumentTypeError,
            r"global_scale: got 2.0 \(float\)",
        ),
        ({"dtype": "int4", "global_scale": "no"}, errors.ArgumentTypeError, r"global_scale: got 'no' \(str\)"),
        ({"dtype": "int4", "scale_dtype": 16}, errors.ArgumentTypeError, r"scale_dtype: got 16 \(int\)"),
        ({"dtype": "int4", "strategy": True}, errors.ArgumentTypeError, r"strategy: got True \(bool\)"),
        ({"dtype": "int4", 3: 4}, errors.ArgumentTypeError, r"weight_config: got key 3 \(int\)"),
        ({"dtype": "int4", None: 4, "x": 1}, errors.ArgumentTypeError, r"weight_config: got key None"),
        ({"dtype": "int4", "zero_dtype": "float16"}, errors.ArgumentError, r"zero_dtype: got 'float16'; .* type int4"),
        (
            {"dtype": "int4", "zero_dtype": "float16", "zero_point": "floating"},
            errors.ArgumentError,
            r"zero_dtype: got 'float16'; .* type int4",
        ),
        ({"dtype": "uint4", "zero_dtype": "float16"}, errors.ArgumentError, r"zero_dtype.*zero_point 'floating'$"),
        (
            {"dtype": "uint4", "zero_dtype": "float16", "zero_point": "none"},
            errors.ArgumentError,
            r"zero_dtype: got 'float16'; allowed: None with zero_point 'none'",
        ),
    ],
)
def test_the_values_of_a_weight_config(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        WeightConfig.from_any(config).resolve(k=64, element_a="float16")


def test_j1_turing_is_refused_by_name() -> None:
    """J1: no SM75 mainloop; bfloat16 does not exist there at all."""
    for element_a in ("float16", "bfloat16"):
        reason = support.check_types(testing.make_types("int4", k=64, element_a=element_a), "sm_75")
        assert reason is not None
        assert "sm_75" in reason
        assert "sm_80" in reason
    with pytest.raises(errors.UnsupportedError, match="sm_75"):
        planner.schedules(testing.make_types("int4", k=64), planner.Device(arch="sm_75", sm_count=40))


def test_j3_a_config_without_a_kernel_says_why() -> None:
    types = testing.make_types("int4", k=64)
    schedule = ScheduleConfig(
        mainloop="sm80_cpasync_multistage", tile_shape=(64, 64, 48), warp_shape=(64, 16), stage_count=4
    )
    reason = support.check(GemmConfig(types=types, schedule=schedule, arch="sm_80"))
    assert reason is not None
    assert "tile_shape: got (64, 64, 48)" in reason


def test_g11_every_schedule_fits_the_shared_memory() -> None:
    """A8, G11: whatever the planner can return is legal, for every weight type and scale."""
    device = planner.Device(arch="sm_80", sm_count=108)
    for element_a in ("float16", "bfloat16"):
        for dtype in testing.weight_types(element_a):
            for group_size in (-1, 16, 32, 128):
                types = testing.make_types(dtype, k=1024, element_a=element_a, group_size=group_size)
                configs = planner.schedules(types, device)
                assert configs
                assert all(support.check(c) is None for c in configs)
                chosen = {planner.choose(types, m, 4096, 1024, device).config for m in (1, 8, 17, 64, 129, 5000)}
                assert chosen <= set(configs)
                assert all(GemmConfig.from_name(c.name) == c for c in configs)


def test_a10_the_planner_needs_no_clock() -> None:
    """A10: clocks and bus width of 0 are no reason to fail."""
    properties = {"major": 12, "minor": 1, "sm_count": 48, "memory_clock_khz": 0, "memory_bus_bits": 0}
    device = planner.Device.from_properties(properties)
    assert device.arch == "sm_121a"
    assert planner.choose(testing.make_types("int4", k=4096), 1, 4096, 4096, device).split_k >= 1
