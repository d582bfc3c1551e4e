"""The rule of what is legal, against the table it stands for; the names of configurations."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from humming_cutlass import dtypes, emitter, errors, support, testing
from humming_cutlass.build import toolchain
from humming_cutlass.config import GemmConfig, ScheduleConfig, TypeConfig

TYPES = TypeConfig(element_a="float16", element_b="int4", element_d="float16", element_scale="float16", group_size=128)
SM80 = ScheduleConfig(mainloop=support.SM80, tile_shape=(16, 64, 128), warp_shape=(16, 16), stage_count=4)
SM90 = ScheduleConfig(mainloop=support.SM90, tile_shape=(64, 128, 128), warp_shape=(64, 64), stage_count=4)
DECODE = ScheduleConfig(mainloop=support.SM90_DECODE, tile_shape=(8, 16, 8192), warp_shape=(8, 16), stage_count=2)

#: Least that each operand type admits: bits of intB, bits of uintB with any zero point, X and Y of eXmY.
TABLE = {
    "float16": (8, 8, 5, 7),
    "bfloat16": (8, 8, 7, 7),
    "float8_e4m3": (5, 4, 4, 3),
    "float8_e5m2": (4, 3, 5, 2),
    "float4_e2m1": (3, 2, 2, 1),
    "int8": (8, 7, 0, 0),
    "int4": (4, 3, 0, 0),
}
FLOATS = [t for t in dtypes.WEIGHT_TYPES.values() if t.kind is dtypes.Kind.FLOAT]


@pytest.mark.parametrize("operand", TABLE)
def test_the_rule_admits_the_table(operand: str) -> None:
    int_bits, uint_bits, x, y = TABLE[operand]
    table = {f"int{b}" for b in range(1, int_bits + 1)} | {f"uint{b}" for b in range(1, uint_bits + 1)}
    table |= {t.name for t in FLOATS if t.exponent_bits <= x and t.mantissa_bits <= y}
    missing = {name for name in table if not support.represents(operand, name)}
    assert not missing


@pytest.mark.parametrize("operand", TABLE)
def test_the_rule_refuses_the_next_integer(operand: str) -> None:
    """One bit more than the table has: refused, and so is every wider one."""
    int_bits, uint_bits, _, _ = TABLE[operand]
    admitted = {name for name in dtypes.WEIGHT_TYPES if support.represents(operand, name)}
    assert {n for n in admitted if n.startswith("int")} == {f"int{b}" for b in range(1, int_bits + 1)}
    assert {n for n in admitted if n.startswith("uint")} == {f"uint{b}" for b in range(1, uint_bits + 1)}


@pytest.mark.parametrize(
    ("operand", "weight"),
    [
        ("float16", "float7_e6m0"),
        ("float16", "float8_e7m0"),
        ("float8_e4m3", "float6_e5m0"),
        ("float8_e4m3", "float8_e3m4"),
        ("float8_e5m2", "float8_e4m3"),
        ("float8_e5m2", "float7_e6m0"),
        ("float4_e2m1", "float4_e1m2"),
        ("float4_e2m1", "float4_e3m0"),
        ("int8", "float6_e3m2"),
        ("int8", "float5_e4m0"),
        ("int4", "float5_e2m2"),
        ("int8", "nf4"),
        ("float8_e4m3", "nf4"),
    ],
)
def test_the_rule_refuses_what_does_not_fit(operand: str, weight: str) -> None:
    assert not support.represents(operand, weight)


@pytest.mark.parametrize(
    ("operand", "weights"),
    [
        (
            "int8",
            [*(f"float{2 + y}_e1m{y}" for y in range(7)), *(f"float{3 + y}_e2m{y}" for y in range(5)), "float4_e3m0"],
        ),
        ("float16", ["nf4"]),
        ("bfloat16", ["nf4", "float8_e7m0"]),
    ],
)
def test_the_rule_admits_more_than_the_table(operand: str, weights: list[str]) -> None:
    assert all(support.represents(operand, w) for w in weights)


def test_operands_without_a_mainloop_are_refused() -> None:
    for operand in set(TABLE) - set(support.ACTIVATION_TYPES):
        reason = support.check_types(dataclasses.replace(TYPES, element_a=operand))
        assert reason == f"element_a: got {operand}; allowed: float16, bfloat16; nearest supported: float16"


# --- Sentences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "arch", "sentence"),
    [
        ({"element_b": "float16"}, "sm_80", "element_b: got float16; allowed: int1-8, uint1-8, floatB_eXmY of at most"),
        (
            {"element_b": "float8_e6m1"},
            "sm_80",
            "element_b: got float8_e6m1; allowed: a type whose values are exact in float16; nearest supported: "
            "element_a bfloat16",
        ),
        (
            {"element_d": "int8"},
            "sm_80",
            "element_d: got int8; allowed: float16, bfloat16, float32; nearest supported: f",
        ),
        (
            {"element_scale": "int8"},
            "sm_80",
            "element_scale: got int8; allowed: float16, bfloat16, float32, float8_e4m3",
        ),
        (
            {"element_zero": "int4"},
            "sm_80",
            "element_zero: got int4; allowed: none, integer, float16, bfloat16, float32",
        ),
        (
            {"element_zero": "integer"},
            "sm_80",
            "element_zero: got integer; allowed: none with weights of type int4; nearest supported: uint4",
        ),
        (
            {"group_size": 40},
            "sm_80",
            "group_size: got 40; allowed: -1 or a positive multiple of 16; nearest supported: 48",
        ),
        (
            {"group_size": 0},
            "sm_80",
            "group_size: got 0; allowed: -1 or a positive multiple of 16; nearest supported: 16",
        ),
        ({"group_size": -2}, "sm_80", "group_size: got -2; allowed: -1 or a positive"),
        ({}, "sm_70", "arch: got sm_70; allowed: sm_80 or later"),
        ({}, "gfx942", "arch: got gfx942; allowed: sm_80 or later"),
    ],
)
def test_check_types(changes: dict[str, object], arch: str, sentence: str) -> None:
    types = dataclasses.replace(TYPES, **changes)  # type: ignore[arg-type]
    reason = support.check_types(types, arch)
    assert reason is not None
    assert reason.startswith(sentence)
    # The same sentence for a whole kernel.
    assert support.check(GemmConfig(types=types, schedule=SM80, arch=arch)) == reason


@pytest.mark.parametrize("element_a", support.ACTIVATION_TYPES)
def test_sm75_has_no_mainloop(element_a: str) -> None:
    reason = support.check_types(dataclasses.replace(TYPES, element_a=element_a), "sm_75")
    assert reason is not None
    assert reason.startswith("arch: got sm_75; allowed: sm_80 or later; ")
    assert "no SM75 mainloop" in reason
    assert reason.endswith("nearest supported: sm_80")


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_every_admitted_type_has_an_sm80_kernel(arch: str) -> None:
    for element_a in support.ACTIVATION_TYPES:
        for name in dtypes.WEIGHT_TYPES:
            config = GemmConfig(
                types=dataclasses.replace(TYPES, element_a=element_a, element_b=name, group_size=32),
                schedule=SM80,
                arch=arch,
            )
            assert (support.check(config) is None) == support.represents(element_a, name)


@pytest.mark.parametrize(
    ("schedule", "arch", "sentence"),
    [
        ({"mainloop": "sm70"}, "sm_80", "mainloop: got sm70; allowed: sm80_cpasync_multistage, sm90_tma"),
        ({"tile_shape": (16, 64, 96)}, "sm_80", r"tile_shape: got (16, 64, 96); allowed: k a positive multiple of 64"),
        ({"tile_shape": (16, 64, 0)}, "sm_80", r"tile_shape: got (16, 64, 0); allowed: k a positive multiple of 64"),
        ({"tile_shape": (0, 64, 64)}, "sm_80", "tile_shape: got (0, 64, 64); allowed: m a positive multiple of 8, n a"),
        ({"tile_shape": (16, -64, 64)}, "sm_80", "tile_shape: got (16, -64, 64); allowed: m a positive"),
        ({"tile_shape": (16, 64, -64)}, "sm_80", "tile_shape: got (16, 64, -64); allowed: k a positive multiple of"),
        (
            {"tile_shape": (64, 128, 512), "warp_shape": (64, 16)},
            "sm_80",
            "tile_shape: got (64, 128, 512); allowed: tiles of which 2 stages fit 101376 bytes",
        ),
        ({"warp_shape": (4, 16)}, "sm_80", "warp_shape: got (4, 16); allowed: m a multiple of 8, n a multiple of 16"),
        ({"warp_shape": (16, 8)}, "sm_80", "warp_shape: got (16, 8); allowed: m a multiple of 8, n a multiple of 16"),
        ({"warp_shape": (16, 48)}, "sm_80", "warp_shape: got (16, 48); allowed: a divisor of the tile (16, 64, 128)"),
        ({"stage_count": 1}, "sm_80", "stage_count: got 1; allowed: at least 2; nearest supported: 2"),
        ({"stage_count": 40}, "sm_80", "stage_count: got 40; allowed: stages that fit 101376 bytes of shared memory"),
        (
            {"tile_shape": (128, 1024, 64), "warp_shape": (8, 16)},
            "sm_80",
            "warp_shape: got (8, 16); allowed: at most 32",
        ),
    ],
)
def test_check_of_an_sm80_schedule(schedule: dict[str, object], arch: str, sentence: str) -> None:
    config = GemmConfig(types=TYPES, schedule=dataclasses.replace(SM80, **schedule), arch=arch)  # type: ignore[arg-type]
    assert (support.check(config) or "None").startswith(sentence)


@pytest.mark.parametrize("schedule", [SM90, DECODE])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100a", "sm_120a"])
def test_the_sm90_mainloops_are_only_for_sm90a(arch: str, schedule: ScheduleConfig) -> None:
    assert support.check(GemmConfig(types=TYPES, schedule=schedule, arch="sm_90a")) is None
    reason = support.check(GemmConfig(types=TYPES, schedule=schedule, arch=arch))
    name = schedule.mainloop
    assert reason == f"mainloop: got {name}; allowed: one that {arch} has; nearest supported: {support.SM80}"


@pytest.mark.parametrize(
    ("types", "schedule", "parameter"),
    [
        ({"element_b": "uint4", "element_zero": "float16"}, {}, "element_zero"),
        ({"element_scale": "float32"}, {}, "element_scale"),
        ({}, {"tile_shape": (24, 128, 128), "warp_shape": (24, 64)}, "tile_shape"),
        ({}, {"tile_shape": (64, 96, 128)}, "tile_shape"),
        ({}, {"tile_shape": (256, 256, 64), "warp_shape": (256, 64)}, "tile_shape"),
        ({}, {"tile_shape": (0, 128, 128)}, "tile_shape"),
        ({}, {"tile_shape": (64, -128, 128)}, "tile_shape"),
        ({}, {"tile_shape": (256, 128, 256), "warp_shape": (256, 64)}, "tile_shape"),
        ({}, {"warp_shape": (32, 64)}, "warp_shape"),
        ({}, {"stage_count": 1}, "stage_count"),
        ({}, {"stage_count": 100}, "stage_count"),
    ],
)
def test_check_of_an_sm90_schedule(types: dict[str, object], schedule: dict[str, object], parameter: str) -> None:
    config = GemmConfig(
        types=dataclasses.replace(TYPES, **types),  # type: ignore[arg-type]
        schedule=dataclasses.replace(SM90, **schedule),  # type: ignore[arg-type]
        arch="sm_90a",
    )
    assert (support.check(config) or "None").startswith(f"{parameter}: got ")


@pytest.mark.parametrize(
    ("schedule", "parameter"),
    [
        ({"tile_shape": (16, 16, 8192), "warp_shape": (16, 16)}, "tile_shape"),  # more of A than the registers hold
        ({"tile_shape": (32, 16, 2048), "warp_shape": (32, 16)}, "tile_shape"),
        ({"tile_shape": (0, 16, 4096)}, "tile_shape"),
        ({"tile_shape": (8, 32, 4096)}, "tile_shape"),
        ({"tile_shape": (8, 16, 1024)}, "tile_shape"),
        ({"tile_shape": (8, 16, 16384)}, "tile_shape"),
        ({"warp_shape": (8, 64)}, "warp_shape"),
        ({"warp_shape": (16, 16)}, "warp_shape"),
        ({"stage_count": 1}, "stage_count"),
        ({"stage_count": 4}, "stage_count"),
    ],
)
def test_check_of_a_decode_schedule(schedule: dict[str, object], parameter: str) -> None:
    replaced = dataclasses.replace(DECODE, **schedule)  # type: ignore[arg-type]
    config = GemmConfig(types=TYPES, schedule=replaced, arch="sm_90a")
    assert (support.check(config) or "None").startswith(f"{parameter}: got ")


@pytest.mark.parametrize(
    ("schedule", "arch", "tile_k"),
    [
        *((schedule, arch, k) for schedule, arch in ((SM80, "sm_80"), (SM90, "sm_90a")) for k in (64, 128, 256)),
        *((DECODE, "sm_90a", k) for k in (2048, 4096, 8192)),
    ],
)
@pytest.mark.parametrize("stage_count", [40, 10**12])
def test_the_nearest_number_of_stages_is_the_most_that_fit(
    schedule: ScheduleConfig, arch: str, tile_k: int, stage_count: int
) -> None:
    tile = (*schedule.tile_shape[:2], tile_k)

    def check(stages: int) -> str | None:
        replaced = dataclasses.replace(schedule, tile_shape=tile, stage_count=stages)
        return support.check(GemmConfig(types=TYPES, schedule=replaced, arch=arch))

    reason = check(stage_count) or ""
    assert reason.startswith(f"stage_count: got {stage_count}; ")
    nearest = int(reason.rsplit(": ", 1)[1])
    assert check(nearest) is None
    assert (check(nearest + 1) or "").startswith("stage_count")


@pytest.mark.parametrize(
    ("arch", "nearest"),
    [
        ("sm_99", "sm_100a"),
        ("sm_85", "sm_86"),
        ("sm_999", "sm_121a"),
        ("sm_090", "sm_90a"),
        ("sm_90", "sm_90a"),
        ("90a", "sm_90a"),
        ("sm_70", "sm_80"),
        ("sm_" + "9" * 5000, "sm_121a"),
        ("hopper", None),
    ],
)
def test_an_unknown_arch_is_refused_with_the_known_ones(arch: str, nearest: str | None) -> None:
    known = ", ".join(x for x in support.ARCHS if x != "sm_75")
    reason = f"arch: got {arch}; allowed: {known}"
    assert support.check_arch(arch) == (reason if nearest is None else f"{reason}; nearest supported: {nearest}")


@pytest.mark.parametrize("arch", support.ARCHS)
def test_a_known_arch_is_known_everywhere(arch: str) -> None:
    assert support.check_arch(arch) is None
    assert toolchain.MINIMUM_VERSION[arch] >= (11, 0)
    assert (support.check_types(TYPES, arch) is None) == (arch != "sm_75")


def test_an_arch_has_one_spelling() -> None:
    assert support.compute_capability("sm_90a") == 90
    for arch in ("sm_090", "sm_0090a", "sm_" + "9" * 5000, "sm_90b"):
        assert support.compute_capability(arch) == 0


# --- Names ------------------------------------------------------------------------------------------------------------


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


@pytest.mark.parametrize("schedule", [SM80, SM90, DECODE])
def test_a_config_field_is_the_snake_case_of_its_alias(schedule: ScheduleConfig) -> None:
    """Every field but the mainloop, which is the kernel's template, has one alias; there is no other alias."""
    text = emitter.emit(GemmConfig(types=TYPES, schedule=schedule, arch="sm_90a")).text
    struct = text[text.index("struct Config {") : text.index("};")]
    aliases = re.findall(r"using (\w+) = |static constexpr int (\w+) = ", struct)
    names = [_snake_case(a or b) for a, b in aliases]
    fields = [f.name for part in (TypeConfig, ScheduleConfig) for f in dataclasses.fields(part)]
    assert sorted([*names, "mainloop"]) == sorted(fields)
    assert len(aliases) == struct.count(";"), "a statement that is no alias"


ARCHES = st.sampled_from(["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_100f", "sm_120a", "sm_121a"])
SIZES = st.integers(1, 1 << 20)
CONFIGS = st.builds(
    GemmConfig,
    types=st.builds(
        TypeConfig,
        element_a=st.sampled_from(support.ACTIVATION_TYPES),
        element_b=st.sampled_from(sorted(dtypes.WEIGHT_TYPES)),
        element_d=st.sampled_from(support.OUTPUT_TYPES),
        element_scale=st.sampled_from(support.SCALE_TYPES),
        element_zero=st.sampled_from(support.ZERO_TYPES),
        group_size=st.just(-1) | SIZES,
    ),
    schedule=st.builds(
        ScheduleConfig,
        mainloop=st.sampled_from(support.MAINLOOPS),
        tile_shape=st.tuples(SIZES, SIZES, SIZES),
        warp_shape=st.tuples(SIZES, SIZES),
        stage_count=SIZES,
    ),
    arch=ARCHES,
)


@settings(max_examples=300, deadline=None)
@given(CONFIGS)
def test_names_round_trip(config: GemmConfig) -> None:
    assert GemmConfig.from_name(config.name) == config


@settings(max_examples=300, deadline=None)
@given(CONFIGS, CONFIGS)
def test_different_configs_have_different_names(one: GemmConfig, other: GemmConfig) -> None:
    assert (one.name == other.name) == (one == other)


@settings(max_examples=200, deadline=None)
@given(CONFIGS, st.data())
def test_every_field_is_part_of_the_name(config: GemmConfig, data: st.DataObject) -> None:
    """A change of any one field changes the name: two kernels must not share a cubin."""
    other = data.draw(CONFIGS)
    part = data.draw(st.sampled_from(["types", "schedule", "arch"]))
    if part == "arch":
        changed = dataclasses.replace(config, arch=other.arch)
    else:
        whole = getattr(config, part)
        field = data.draw(st.sampled_from([f.name for f in dataclasses.fields(whole)]))
        changed = dataclasses.replace(
            config, **{part: dataclasses.replace(whole, **{field: getattr(getattr(other, part), field)})}
        )
    assert (changed.name == config.name) == (changed == config)


@pytest.mark.parametrize("group_size", [-1, 16, 32, 128])
@pytest.mark.parametrize("name", ["int1", "int2", "int3", "int4", "int5", "int6", "int7", "int8"])
@pytest.mark.parametrize("tile_k", [2048, 4096, 6144, 8192])
def test_decode_schedules_leave_room_for_a_row_of_sums(tile_k: int, name: str, group_size: int) -> None:
    """What the kernel asserts when it is compiled: RowBlock, by its own formula, is at least 1 for every width."""
    types = testing.make_types(name, k=8192, group_size=group_size)
    atoms = range(tile_k // 2048, tile_k // 1024 + 1)
    refused = []
    for stages in range(2, 33):
        schedule = ScheduleConfig(
            mainloop=support.SM90_DECODE, tile_shape=(8, 16, tile_k), warp_shape=(8, 16), stage_count=stages
        )
        reason = support.check(GemmConfig(types=types, schedule=schedule, arch="sm_90a"))
        rows = []
        for width in atoms:
            columns = 64 * width
            groups = 0 if group_size == -1 else -(-columns // group_size) + (columns % group_size > 0)
            slab = 16 * columns * types.bits // 8 + groups * 16 * 2
            ring = stages * (-(-slab // 128) * 128)
            rows.append(
                (
                    227 * 1024
                    - 16 * (ring + (40 if max(atoms) == 8 and width in (5, 6) else 32) * 128 + 8 * (stages + 1))
                    - 1024
                )
                // 8192
            )
        assert (reason is None) == (min(rows) >= 1), (stages, reason)
        refused.append(reason is not None)
    assert refused == sorted(refused), "more stages never fit better"
    assert not refused[0] or (tile_k, types.bits) >= (6144, 5)


def _refuses(config: TypeConfig | ScheduleConfig | GemmConfig, field: str, value: object, sentence: str) -> None:
    with pytest.raises(errors.ArgumentTypeError) as caught:
        dataclasses.replace(config, **{field: value})  # type: ignore[arg-type]
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("mainloop", None, "mainloop: got None; allowed: a str"),
        ("tile_shape", (8, 16), "tile_shape: got (8, 16); allowed: a tuple of 3 ints"),
        ("tile_shape", None, "tile_shape: got None; allowed: a tuple of 3 ints"),
        ("tile_shape", [16, 64, 128], "tile_shape: got [16, 64, 128]; allowed: a tuple of 3 ints"),
        ("tile_shape", (16.0, 64, 128), "tile_shape: got (16.0, 64, 128); allowed: a tuple of 3 ints"),
        ("warp_shape", (16, 16, 16), "warp_shape: got (16, 16, 16); allowed: a tuple of 2 ints"),
        ("stage_count", 2.5, "stage_count: got 2.5; allowed: an int"),
        ("stage_count", "4", "stage_count: got '4'; allowed: an int"),
        ("stage_count", None, "stage_count: got None; allowed: an int"),
        ("stage_count", True, "stage_count: got True; allowed: an int"),
    ],
)
def test_schedules_of_other_types_are_refused(field: str, value: object, sentence: str) -> None:
    _refuses(SM80, field, value, sentence)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("element_a", None, "element_a: got None; allowed: the name of a type"),
        ("element_b", ["int4"], "element_b: got ['int4']; allowed: the name of a type"),
        ("element_d", 16, "element_d: got 16; allowed: the name of a type"),
        ("element_scale", b"float16", "element_scale: got b'float16'; allowed: the name of a type"),
        ("element_zero", None, "element_zero: got None; allowed: the name of a type"),
        ("group_size", "128", "group_size: got '128'; allowed: an int"),
        ("group_size", None, "group_size: got None; allowed: an int"),
        ("group_size", 128.0, "group_size: got 128.0; allowed: an int"),
    ],
)
def test_types_of_other_types_are_refused(field: str, value: object, sentence: str) -> None:
    _refuses(TYPES, field, value, sentence)


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("types", None, "types: got None; allowed: a TypeConfig"),
        ("schedule", (16, 64, 128), "schedule: got (16, 64, 128); allowed: a ScheduleConfig"),
        ("arch", None, "arch: got None; allowed: a str"),
        ("arch", 90, "arch: got 90; allowed: a str"),
    ],
)
def test_configs_of_other_types_are_refused(field: str, value: object, sentence: str) -> None:
    _refuses(GemmConfig(types=TYPES, schedule=SM80, arch="sm_80"), field, value, sentence)


@pytest.mark.parametrize("value", [None, 90, "int4"])
def test_other_objects_are_named(value: object) -> None:
    with pytest.raises(errors.ArgumentTypeError, match=r"config: got .*; allowed: a GemmConfig"):
        support.check(value)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentTypeError, match=r"types: got .*; allowed: a TypeConfig"):
        support.check_types(value)  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentTypeError, match=r"arch: got int; allowed: a str"):
        support.check_arch(90)  # type: ignore[arg-type]


def test_errors_offer_types_that_fit() -> None:
    """A weight is offered weights, scales are offered scales."""
    with pytest.raises(errors.UnsupportedError, match=r"allowed: int1-8.*nf4; nearest supported: int\d$"):
        testing.make_types("int9", k=64)
    with pytest.raises(errors.UnsupportedError) as caught:
        testing.make_types("int4", k=64, scale_dtype="float64")
    allowed = ", ".join(support.SCALE_TYPES)
    assert str(caught.value).startswith(f"scale_dtype: got 'float64'; allowed: {allowed}; nearest supported: float")


def test_the_values_of_a_type_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        dtypes.parse("int4").values()[1] = 100.0


@pytest.mark.parametrize("group", ["g0128", "g" + "9" * 6000])
def test_only_names_that_a_config_has_are_read(group: str) -> None:
    name = f"sm_90a__bf16_int4_bf16_sbf16_{group}__sm90_tma_gmma_rs_warpspecialized__64x128x128_w64x64_p4"
    assert GemmConfig.from_name(name.replace(group, "g128")).name == name.replace(group, "g128")
    with pytest.raises(errors.UnsupportedError, match=r"name: got .*; allowed: a name made by GemmConfig\.name"):
        GemmConfig.from_name(name)
