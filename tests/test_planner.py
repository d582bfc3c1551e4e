"""What the planner chooses: legal everywhere, prepared beforehand, bounded."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from humming_cutlass import dtypes, errors, planner, support
from humming_cutlass.config import MAX_EXTENT, GemmConfig, ScheduleConfig, TypeConfig

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
DEVICES = st.builds(planner.Device, arch=st.sampled_from(ARCHES), sm_count=st.integers(1, 200))
H200 = planner.Device(arch="sm_90a", sm_count=132)
TYPES = TypeConfig(element_a="float16", element_b="int4", element_d="float16", element_scale="float16", group_size=128)


@st.composite
def legal_types(draw: st.DrawFn) -> TypeConfig:
    element_a = draw(st.sampled_from(support.ACTIVATION_TYPES))
    element_b = draw(st.sampled_from([n for n in sorted(dtypes.WEIGHT_TYPES) if support.represents(element_a, n)]))
    zeros = support.ZERO_TYPES if element_b.startswith("uint") else ("none",)
    return TypeConfig(
        element_a=element_a,
        element_b=element_b,
        element_d=draw(st.sampled_from(support.OUTPUT_TYPES)),
        element_scale=draw(st.sampled_from(support.SCALE_TYPES)),
        element_zero=draw(st.sampled_from(zeros)),
        group_size=draw(st.sampled_from([-1, 16, 32, 48, 64, 80, 96, 112, 128, 256, 272, 512, 1024])),
    )


#: Sizes of real layers and the edges around tiles, with anything between.
EXTENTS = st.sampled_from([1, 7, 8, 9, 16, 17, 64, 65, 128, 129, 4096, 28672, 65537, 1048577]) | st.integers(1, 1 << 21)


@settings(max_examples=500, deadline=None)
@given(legal_types(), EXTENTS, EXTENTS, EXTENTS, DEVICES)
@example(TYPES, 16384, 28672, 8192, H200)  # case E3
@example(TYPES, 1, 28672, 8192, H200)
@example(TYPES, 1, 1, 1 << 21, H200)
def test_every_choice(types: TypeConfig, m: int, n: int, k: int, device: planner.Device) -> None:
    choice = planner.choose(types, m, n, k, device)
    schedule = choice.config.schedule
    tile_m, tile_n, tile_k = schedule.tile_shape
    assert support.check(choice.config) is None
    assert choice.config.types == types
    assert choice.config.arch == device.arch
    assert choice.config in planner.schedules(types, device)
    # No split without a tile of k to do.
    assert (0 if support.streams(schedule) else 1) <= choice.split_k <= max(1, -(-k // tile_k))
    # The grid is one-dimensional and its index 32-bit.
    tiles = -(-m // tile_m) * -(-n // tile_n)
    # Split only what leaves SMs idle, so the partial sums are bounded by the device, not by m * n.
    if choice.split_k > 1:
        assert choice.split_k * tiles <= 4 * device.sm_count
        assert choice.split_k * tiles * tile_m * tile_n * 4 <= 64 << 20
    if choice.split_k == 0:
        assert tiles <= 3 * device.sm_count
        assert tiles * -(-k // tile_k) >= device.sm_count


@settings(max_examples=200, deadline=None)
@given(legal_types(), DEVICES)
def test_schedules(types: TypeConfig, device: planner.Device) -> None:
    """Few, distinct, legal, by number of tokens; every mainloop that is named is honoured."""
    configs = planner.schedules(types, device)
    assert 1 <= len(configs) <= 8
    assert len({c.name for c in configs}) == len(configs)
    assert all(support.check(c) is None for c in configs)
    rows = [c.schedule.tile_shape[0] for c in configs]
    assert rows == sorted(rows)
    sm80 = planner.schedules(types, device, mainloops=[support.SM80])
    assert sm80
    assert all(c.schedule.mainloop == support.SM80 and support.check(c) is None for c in sm80)
    try:
        sm90 = planner.schedules(types, device, mainloops=[support.SM90])
    except errors.UnsupportedError:
        sm90 = []
    assert all(c.schedule.mainloop == support.SM90 and support.check(c) is None for c in sm90)
    try:
        decode = planner.schedules(types, device, mainloops=[support.SM90_DECODE])
    except errors.UnsupportedError:
        decode = []
    assert all(c.schedule.mainloop == support.SM90_DECODE and support.check(c) is None for c in decode)
    assert configs == decode + (sm90 or sm80)
    if not decode and device.arch == "sm_90a":  # the factors of the weights leave no room
        schedule = ScheduleConfig(
            mainloop=support.SM90_DECODE, tile_shape=(8, 16, 4096), warp_shape=(8, 16), stage_count=2
        )
        reason = support.check(GemmConfig(types=types, schedule=schedule, arch=device.arch))
        assert reason is not None
        assert "shared memory" in reason
    assert not decode or device.arch == "sm_90a"
    if device.arch != "sm_90a":
        assert not sm90


@settings(max_examples=200, deadline=None)
@given(legal_types(), st.integers(0, 20) | EXTENTS, EXTENTS, EXTENTS, DEVICES)
@example(TYPES, 8, 4096, 16384, H200)
@example(TYPES, 9, 4096, 16384, H200)
def test_candidates(types: TypeConfig, m: int, n: int, k: int, device: planner.Device) -> None:
    """Each once, each a launch that the runtime takes; the one that the model finds fastest is chosen."""
    found = planner.candidates(types, m, n, k, device)
    assert len(set(found)) == len(found)
    configs = [c for c in planner.schedules(types, device) if c.schedule.mainloop != support.SM90_DECODE or m <= 8]
    assert list(dict.fromkeys(choice.config for choice in found)) == configs
    assert [choice.config for choice in found if choice.split_k == 1] == configs
    for choice in found:
        tile_m, tile_n, tile_k = choice.config.schedule.tile_shape
        least = 0 if support.streams(choice.config.schedule) else 1
        assert least <= choice.split_k <= max(1, -(-k // tile_k))
        if choice.config.schedule.mainloop == support.SM90_DECODE:
            assert choice.split_k == 1
        if choice.config.schedule.mainloop == support.SM90 and choice.split_k > 1:
            # The splits are a cluster of a size that every Hopper GPU launches, and all clusters are resident.
            assert choice.split_k <= 8
            assert -(-m // tile_m) * -(-n // tile_n) * choice.split_k <= device.sm_count
    times = [planner.microseconds(choice, m, n, k, device) for choice in found]
    assert all(time > 0 for time in times)
    assert planner.choose(types, m, n, k, device) == found[times.index(min(times))]


def test_candidates_of_named_mainloops() -> None:
    for mainloop in support.MAINLOOPS:
        found = planner.candidates(TYPES, 8, 8192, 8192, H200, mainloops=[mainloop])
        assert {choice.config.schedule.mainloop for choice in found} == {mainloop}
    splits = {m: {choice.split_k for choice in planner.candidates(TYPES, m, 1024, 8192, H200)} for m in (16, 4096)}
    assert max(splits[16]) > 4
    assert splits[4096] == {0, 1}
    both = planner.candidates(TYPES, 8, 8192, 8192, H200, mainloops={support.SM80, support.SM90_DECODE})
    assert {choice.config.schedule.mainloop for choice in both} == {support.SM80, support.SM90_DECODE}
    with pytest.raises(errors.UnsupportedError, match="mainloops: got 'sm70'"):
        planner.candidates(TYPES, 8, 8192, 8192, H200, mainloops=["sm70"])
    with pytest.raises(errors.ArgumentError, match="m: got -1"):
        planner.candidates(TYPES, -1, 8192, 8192, H200)


@settings(max_examples=200, deadline=None)
@given(legal_types(), DEVICES, st.integers(0, 1 << 20))
def test_the_named_mainloop_is_chosen(types: TypeConfig, device: planner.Device, m: int) -> None:
    choice = planner.choose(types, m, 4096, 4096, device, mainloops=[support.SM80])
    assert choice.config.schedule.mainloop == support.SM80
    assert choice.config in planner.schedules(types, device, mainloops=[support.SM80])


@pytest.mark.parametrize("device", [H200, planner.Device(arch="sm_80", sm_count=108)], ids=lambda d: d.arch)
def test_every_schedule_is_chosen_for_some_shape(device: planner.Device) -> None:
    """What `transform` prepares is used: no kernel is compiled for nothing."""
    chosen = {
        planner.choose(TYPES, m, n, k, device).config.name
        for m in (*range(1, 257, 5), 512, 1024, 4096, 16384)
        for n, k in ((1024, 4096), (4096, 4096), (8192, 8192), (28672, 4096), (12288, 2048))
    }
    assert chosen == {c.name for c in planner.schedules(TYPES, device)}


def test_hopper_uses_wgmma() -> None:
    for m in (16, 128, 4096):
        assert planner.choose(TYPES, m, 8192, 8192, H200).config.schedule.mainloop == support.SM90
    floating = dataclasses.replace(TYPES, element_b="uint4", element_zero="float16")
    assert planner.choose(floating, 4096, 8192, 8192, H200).config.schedule.mainloop == support.SM80


def test_few_tokens_are_not_split() -> None:
    """Whole atom rows over the full k, where there is one for every SM and the tokens fit a tile."""
    for m, n in ((1, 8192), (2, 8192), (4, 28672), (8, 8192)):
        choice = planner.choose(TYPES, m, n, 8192, H200)
        assert (choice.config.schedule.mainloop, choice.split_k) == (support.SM90_DECODE, 1)
    decode = [c for c in planner.candidates(TYPES, 9, 8192, 8192, H200) if c.config.schedule.tile_shape[0] == 8]
    assert not decode
    floating = dataclasses.replace(TYPES, element_b="uint4", element_zero="float16", element_scale="float32")
    assert planner.choose(floating, 1, 8192, 8192, H200).config.schedule.mainloop == support.SM90_DECODE


@settings(max_examples=100, deadline=None)
@given(legal_types(), EXTENTS, EXTENTS, DEVICES)
def test_a_batch_invariant_choice_does_not_depend_on_m(
    types: TypeConfig, n: int, k: int, device: planner.Device
) -> None:
    choices = {planner.choose(types, m, n, k, device, batch_invariant=True) for m in (0, 1, 8, 9, 64, 257, 1 << 20)}
    (choice,) = choices
    assert choice.split_k == 1
    assert support.check(choice.config) is None


def test_few_tokens_split_k_to_fill_the_gpu() -> None:
    choice = planner.choose(TYPES, 16, 1024, 8192, H200)
    tiles = -(-1024 // choice.config.schedule.tile_shape[1])
    assert choice.split_k > 1
    assert choice.split_k * tiles >= H200.sm_count // 3
    assert planner.choose(TYPES, 16384, 28672, 8192, H200).split_k == 1  # case E3


def test_uneven_waves_are_streamed() -> None:
    """80 tiles of 128 rows leave 52 of 132 SMs idle and no cluster divides them; 64 tiles in two parts fill the GPU."""
    assert planner.choose(TYPES, 32, 10240, 8192, H200).split_k == 0
    assert planner.choose(TYPES, 32, 8192, 8192, H200).split_k == 2


def test_devices_from_properties() -> None:
    """Everything it needs is an attribute of the device; unknown clocks and bus widths (case A10) play no part."""
    for (major, minor), arch in {
        (8, 0): "sm_80",
        (8, 6): "sm_86",
        (8, 9): "sm_89",
        (9, 0): "sm_90a",
        (10, 0): "sm_100a",
        (12, 1): "sm_121a",
    }.items():
        properties = {"major": major, "minor": minor, "sm_count": 48, "memory_clock_khz": 0, "memory_bus_bits": 0}
        device = planner.Device.from_properties(properties)
        assert device == planner.Device(arch=arch, sm_count=48)
        assert support.check(planner.choose(TYPES, 1, 4096, 4096, device).config) is None


@pytest.mark.parametrize("arch", ["sm_75", "sm_70", "sm_52"])
def test_old_gpus_are_refused(arch: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=f"arch: got {arch}; allowed: sm_80 or later"):
        planner.choose(TYPES, 1, 4096, 4096, planner.Device(arch=arch, sm_count=40))


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"m": -1}, errors.ArgumentError, "m: got -1; allowed: at least 0; nearest supported: 0"),
        ({"n": 0}, errors.ArgumentError, "n: got 0; allowed: at least 1; nearest supported: 1"),
        ({"k": 0}, errors.ArgumentError, "k: got 0; allowed: at least 1; nearest supported: 1"),
        ({"m": 1 << 31}, errors.ArgumentError, "m: got 2147483648; allowed: at most 2147483647"),
        ({"n": MAX_EXTENT + 1}, errors.ArgumentError, f"n: got {MAX_EXTENT + 1}; allowed: at most {MAX_EXTENT}"),
        ({"k": MAX_EXTENT + 1}, errors.ArgumentError, f"k: got {MAX_EXTENT + 1}; allowed: at most {MAX_EXTENT}"),
        ({"k": -64}, errors.ArgumentError, "k: got -64; allowed: at least 1; nearest supported: 1"),
        ({"m": 1.0}, errors.ArgumentTypeError, "m: got float 1.0; allowed: an int"),
        ({"n": "64"}, errors.ArgumentTypeError, "n: got str '64'; allowed: an int"),
        ({"k": None}, errors.ArgumentTypeError, "k: got NoneType None; allowed: an int"),
        ({"m": True}, errors.ArgumentTypeError, "m: got bool True; allowed: an int"),
        ({"types": None}, errors.ArgumentTypeError, "types: got NoneType; allowed: a TypeConfig"),
        ({"device": "sm_90a"}, errors.ArgumentTypeError, "device: got str; allowed: a Device"),
        ({"mainloops": ["sm70"]}, errors.UnsupportedError, "mainloops: got 'sm70'; allowed: sm80_cpasync"),
        (
            {"mainloops": [support.SM90_DECODE], "m": 9},
            errors.UnsupportedError,
            "mainloops: got sm90_bulk_multistage; allowed: a mainloop that takes 9 tokens; nearest supported: 'sm80_",
        ),
        ({"mainloops": "sm80"}, errors.ArgumentTypeError, "mainloops: got 'sm80'; allowed: a list of names, or None"),
        ({"batch_invariant": "no"}, errors.ArgumentTypeError, "batch_invariant: got str; allowed: True or False"),
        ({"mainloops": []}, errors.UnsupportedError, "mainloops: got none; allowed: a mainloop that computes"),
    ],
)
def test_impossible_problems_are_refused(changes: dict[str, object], error: type[Exception], sentence: str) -> None:
    arguments = {"types": TYPES, "m": 1, "n": 64, "k": 64, "device": H200} | changes
    with pytest.raises(error) as caught:
        planner.choose(**arguments)  # type: ignore[arg-type]
    assert str(caught.value).startswith(sentence)


def test_impossible_devices_are_refused() -> None:
    for sm_count in (0, -1):
        with pytest.raises(errors.ArgumentError, match=f"sm_count: got {sm_count}; allowed: at least 1"):
            planner.Device(arch="sm_80", sm_count=sm_count)
    with pytest.raises(errors.ArgumentTypeError, match=r"sm_count: got float 1\.5; allowed: an int"):
        planner.Device(arch="sm_80", sm_count=1.5)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentTypeError, match="arch: got NoneType; allowed: a str"):
        planner.Device(arch=None, sm_count=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHES)
def test_no_tokens_and_numpy_integers(arch: str) -> None:
    device = planner.Device(arch=arch, sm_count=np.int32(132))  # type: ignore[arg-type]
    assert planner.choose(TYPES, 0, 4096, 4096, device).split_k >= 0
    numbers = (np.int64(16), np.int32(4096), np.int64(4096))
    assert planner.choose(TYPES, *numbers, device) == planner.choose(TYPES, 16, 4096, 4096, device)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_numpy_integers_of_every_width(kind: type[np.integer[Any]]) -> None:
    """They are taken for what they stand for, not computed with in their width."""
    m, n, k = 100, min(16384, int(np.iinfo(kind).max)), min(16384, int(np.iinfo(kind).max))
    for device in (H200, planner.Device(arch="sm_80", sm_count=kind(100))):  # type: ignore[arg-type]
        found = planner.choose(TYPES, kind(m), kind(n), kind(k), device)  # type: ignore[arg-type]
        assert found == planner.choose(TYPES, m, n, k, device)
        assert planner.microseconds(found, kind(m), kind(n), kind(k), device) == planner.microseconds(  # type: ignore[arg-type]
            found, m, n, k, device
        )


def test_time_of_a_kernel_that_does_not_take_the_tokens() -> None:
    (config,) = planner.schedules(TYPES, H200, mainloops=[support.SM90_DECODE])
    choice = planner.Choice(config=config, split_k=1)
    assert math.isfinite(planner.microseconds(choice, 8, 4096, 4096, H200))
    for m in (9, 32, 33, 1000):
        assert planner.microseconds(choice, m, 4096, 4096, H200) == math.inf


def test_any_legal_tile_has_a_time() -> None:
    """Also those that the planner itself does not use."""
    types = TypeConfig(element_a="float16", element_b="int4", element_d="float16", element_scale="float16")
    times = []
    for tile_m, warp_m in ((8, 8), (24, 24), (48, 48), (128, 64)):
        schedule = ScheduleConfig(
            mainloop=support.SM80, tile_shape=(tile_m, 64, 64), warp_shape=(warp_m, 16), stage_count=3
        )
        config = GemmConfig(types=types, schedule=schedule, arch="sm_90a")
        assert support.check(config) is None
        times.append(planner.microseconds(planner.Choice(config=config, split_k=1), tile_m, 4096, 4096, H200))
    assert all(0 < time < 1000 for time in times)


def test_the_power_limit_only_adds_time() -> None:
    """From 512 tokens on: more than at full clock, most for the smaller tiles."""
    types = TypeConfig(element_a="bfloat16", element_b="int4", element_d="bfloat16", element_scale="bfloat16")
    found = [c for c in planner.candidates(types, 512, 8192, 8192, H200) if c.split_k == 1]
    by_tile = {}
    for choice in found:
        if choice.config.schedule.mainloop != support.SM90:
            continue
        free, limited = (planner.microseconds(choice, m, 8192, 8192, H200) for m in (511, 512))
        assert limited > (1.01 if choice.config.schedule.tile_shape[0] >= 128 else 1.0) * free
        flops = 2 * 512 * 8192 * 8192
        by_tile[choice.config.schedule.tile_shape] = limited
        assert flops / limited < 0.76e9, "an H200 reaches 750 TFLOP/s at most"
    assert by_tile[256, 128, 128] == min(by_tile.values())


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"choice": None}, errors.ArgumentTypeError, "choice: got NoneType; allowed: a Choice"),
        ({"device": None}, errors.ArgumentTypeError, "device: got NoneType; allowed: a Device"),
        ({"split_k": -1}, errors.ArgumentError, "split_k: got -1; allowed: at least 0"),
        ({"split_k": 1.5}, errors.ArgumentTypeError, "split_k: got float 1.5; allowed: an int"),
        ({"m": 10**5000}, errors.ArgumentError, "m: got an integer of 16610 bits; allowed: at most 2147483647"),
    ],
)
def test_impossible_arguments_of_the_cost_model(changes: dict[str, Any], error: type[Exception], sentence: str) -> None:
    device = planner.Device(arch="sm_90a", sm_count=132)
    choice = planner.choose(TYPES, 64, 4096, 4096, device)
    if "split_k" in changes:
        choice = dataclasses.replace(choice, split_k=changes.pop("split_k"))
    arguments = {"choice": choice, "m": 64, "n": 4096, "k": 4096, "device": device} | changes
    with pytest.raises(error) as raised:
        planner.microseconds(**arguments)
    assert sentence in str(raised.value)
