"""Kernels for every GPU, compiled by a real compiler and read back: instructions, registers, spills, time.

CuTe's atoms compile without an error for a GPU that lacks them and leave traps, so the machine code is what is tested.
"""

from __future__ import annotations

import dataclasses
import resource
from pathlib import Path

import pytest

import sass
from humming_cutlass import build, emitter, errors, planner, support
from humming_cutlass.config import GemmConfig, TypeConfig

pytestmark = pytest.mark.compile

ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
MOST_SECONDS = 8.0
"""Of one core, for any kernel."""


def _types(element_a: str, element_b: str, group_size: int = -1, **changes: str) -> TypeConfig:
    return TypeConfig(
        element_a=element_a,
        element_b=element_b,
        element_d=changes.pop("element_d", element_a),
        element_scale=changes.pop("element_scale", element_a),
        group_size=group_size,
        **changes,
    )


#: Each kind of dequantizer, group map, scale, zero point and output at least once.
TYPES = (
    _types("bfloat16", "int4", 128),
    _types("float16", "int4", 128),
    _types("float16", "int3", 32),
    _types("bfloat16", "int3", 32),
    _types("float16", "uint4", 48, element_zero="integer"),
    _types("bfloat16", "uint4", 48, element_zero="integer"),
    _types("bfloat16", "uint8", element_zero="bfloat16"),
    _types("float16", "uint3", 96, element_zero="float32", element_scale="float32"),
    _types("float16", "float4_e2m1", 16, element_scale="float8_e4m3"),
    _types("bfloat16", "float6_e3m2"),
    _types("float16", "nf4", 64),
    _types("float16", "float7_e5m1", 32),
    _types("float16", "int1"),
    _types("bfloat16", "int8", element_d="float32"),
    _types("bfloat16", "int5", 64, element_scale="float8_e8m0"),
    _types("float16", "float8_e4m3", 128, element_d="float32"),
)

BASE = planner.schedules(TYPES[1], planner.Device(arch="sm_80", sm_count=108))[-1]
"""The largest SM80 tile, int4 with groups."""


def _configs(arch: str) -> list[GemmConfig]:
    """All schedules of one type, two of each other one, others on each GPU; of each mainloop where there are several.

    The kernel for few tokens is one a type.
    """
    device = planner.Device(arch=arch, sm_count=132)
    found: list[GemmConfig] = []
    for i, types in enumerate(TYPES):
        schedules = planner.schedules(types, device)
        first = i + ARCHES.index(arch)
        chosen = (
            schedules
            if i == ARCHES.index(arch) % 2
            else [schedules[(first + j * 3) % len(schedules)] for j in range(2)]
        )
        if chosen[0].schedule.mainloop != support.SM80:
            fallback = planner.schedules(types, device, mainloops=[support.SM80])
            chosen = [*chosen, fallback[first % len(fallback)]]
        if arch == "sm_90a":
            chosen = [*chosen, *planner.schedules(types, device, mainloops=[support.SM90_DECODE])]
        found += chosen
    return list(dict.fromkeys(found))


class _Table:
    """Prints what was compiled below the results of the session."""

    def __init__(self) -> None:
        self.rows: dict[str, str] = {}

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.rows:
            terminalreporter.section("compiled kernels")
            terminalreporter.write_line(sass.TABLE_HEADER)
            for name in sorted(self.rows):
                terminalreporter.write_line(self.rows[name])


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> _Table:
    found = request.config.pluginmanager.get_plugin("compiled-kernels")
    if found is None:
        found = _Table()
        request.config.pluginmanager.register(found, "compiled-kernels")
    return found


def _check(configs: list[GemmConfig], table: _Table) -> None:
    """Compiles and reads each; fails with all that is wrong."""
    cubins = build.compile_kernels([emitter.emit(c) for c in configs])
    wrong: list[str] = []
    for config in configs:
        machine = sass.read(cubins[config.name])
        table.rows[config.name] = sass.table_row(machine, config)
        wrong += [f"{config.name}: {problem}" for problem in sass.problems(machine, config)]
    assert not wrong, "\n" + "\n".join(wrong)


def test_a_kernel_of_each_kind_of_gpu(table: _Table) -> None:
    """The fast tier: one kernel a mainloop and generation, of different types and tiles."""
    configs = [BASE]
    for types, arch, mainloop in (
        (TYPES[3], "sm_90a", support.SM80),
        (TYPES[4], "sm_90a", support.SM90),
        (TYPES[4], "sm_90a", support.SM90_DECODE),
        (TYPES[7], "sm_120a", support.SM80),
    ):
        schedules = planner.schedules(types, planner.Device(arch=arch, sm_count=132), mainloops=[mainloop])
        configs.append(schedules[len(schedules) // 2])
    _check(configs, table)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
def test_every_kind_of_kernel(arch: str, table: _Table) -> None:
    configs = _configs(arch)
    assert len(configs) >= 30
    assert {c.types for c in configs} == set(TYPES)
    mainloops = {c.schedule.mainloop for c in configs}
    assert mainloops == (set(support.MAINLOOPS) if arch == "sm_90a" else {support.SM80})
    for mainloop in mainloops:
        tiles = {c.schedule.tile_shape for c in configs if c.schedule.mainloop == mainloop}
        assert len(tiles) >= (2 if mainloop == support.SM90_DECODE else 5)
        if mainloop == support.SM90_DECODE:
            assert {c.types for c in configs if c.schedule.mainloop == mainloop} == set(TYPES)
    _check(configs, table)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("HUMMING_CUTLASS_CACHE_DIR", str(cache))
    return cache


def _slowest(arch: str, mainloop: str) -> GemmConfig:
    """What takes longest: the largest tile, a group scale a k step, a width with left-over bits."""
    types = _types("float16", "uint7", 16, element_zero="integer")
    return planner.schedules(types, planner.Device(arch=arch, sm_count=132), mainloops=[mainloop])[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "mainloop"),
    [("sm_80", support.SM80), ("sm_120a", support.SM80), ("sm_90a", support.SM90), ("sm_90a", support.SM90_DECODE)],
)
def test_a_kernel_compiles_in_time(arch: str, mainloop: str, empty_cache: Path, table: _Table) -> None:
    """On one core, by the processor's time, so that a busy machine does not decide; CMake and ninja included."""
    config = _slowest(arch, mainloop)
    before = _cpu_seconds()
    cubins = build.compile_kernels([emitter.emit(config)], jobs=1)
    seconds = _cpu_seconds() - before
    table.rows[config.name] = sass.table_row(sass.read(cubins[config.name]), config)
    print(f"{seconds:.1f} s of one core for {config.name}")
    assert 0.3 < seconds <= MOST_SECONDS


# --- Each check can fail ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base() -> sass.Machine:
    return sass.read(build.compile_kernels([emitter.emit(BASE)])[BASE.name])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"HMMA.16816.F32": 0}, ["missing MMA HMMA.16816.F32"]),
        ({"IMMA.16832.S8.S8": 4}, ["unexpected MMA IMMA.16832.S8.S8"]),
        ({"UTCHMMA": 1}, ["unexpected MMA UTCHMMA"]),
        ({"HMMA.16816.F32": 31}, ["31 times HMMA.16816.F32, not a multiple of 32"]),
        ({"LDGSTS.*": 0}, ["missing copy LDGSTS"]),
        ({"UTMALDG.2D": 1}, ["unexpected copy UTMALDG"]),
        ({"UBLKCP.S.G": 1}, ["unexpected copy UBLKCP"]),
        ({"LDSM.*": 0}, ["missing LDSM"]),
        ({"STL.64": 2, "LDL": 1}, ["3 accesses to local memory"]),
        ({"BPT.TRAP": 1}, ["1 traps, 0 allowed"]),
    ],
)
def test_wrong_opcodes_are_found(changes: dict[str, int], expected: list[str], base: sass.Machine) -> None:
    assert sass.problems(base, BASE) == []
    opcodes = dict(base.opcodes)
    for opcode, count in changes.items():
        for name in [o for o in opcodes if opcode.endswith("*") and o.startswith(opcode[:-2])] or [opcode]:
            opcodes[name] = count
    opcodes = {opcode: count for opcode, count in opcodes.items() if count}
    assert sass.problems(dataclasses.replace(base, opcodes=opcodes), BASE) == expected


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...",
        "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...",
        "ptxas warning : Value of threads per SM for entry humming_cutlass_gemm is out of range.",
        "kernel.cu(3): warning #177-D: variable was declared but never referenced",
    ],
)
def test_what_the_compiler_says_is_found(line: str, base: sass.Machine) -> None:
    noted = dataclasses.replace(base, log=f"{base.log}\n{line}\n")
    assert sass.problems(noted, BASE) == [f"the compiler says: {line}"]


def test_wrong_traits_and_types_are_found(base: sass.Machine) -> None:
    fewer = dataclasses.replace(BASE, schedule=dataclasses.replace(BASE.schedule, stage_count=3))
    assert any("support.smem_bytes says" in p for p in sass.problems(base, fewer))
    smem = dict(base.traits) | {"smem_bytes": base.traits["smem_bytes"] + 16}
    assert len(sass.problems(dataclasses.replace(base, traits=smem), BASE)) == 1
    early = dict(base.traits) | {"dependent_launch": 1, "max_m": 8}
    found = sass.problems(dataclasses.replace(base, traits=early), BASE)
    assert found == ["max_m 8, not 0", "dependent_launch 1, not 0"]
    bfloat16 = dataclasses.replace(BASE, types=TYPES[0])
    assert sass.problems(base, bfloat16) == ["missing MMA HMMA.16816.F32.BF16", "unexpected MMA HMMA.16816.F32"]
    assert sass.problems(base, dataclasses.replace(BASE, arch="sm_89")) == ["machine code for sm_80"]
    many = dataclasses.replace(base, info=dataclasses.replace(base.info, registers=255, spill_bytes=8))
    assert "8 bytes spilled, 0 bytes of stack" in sass.problems(many, BASE)


@pytest.mark.slow
def test_a_kernel_for_few_tokens_that_is_not_as_it_should_be_is_found() -> None:
    """One that waits for no kernel before it, one whose groups' factors come some other way."""
    device = planner.Device(arch="sm_90a", sm_count=132)
    config = planner.schedules(TYPES[4], device, mainloops=[support.SM90_DECODE])[-1]
    machine = sass.read(build.compile_kernels([emitter.emit(config)])[config.name])
    assert sass.problems(machine, config) == []
    for opcode, problem in (
        ("ACQBULK", "missing ACQBULK"),
        ("UBLKCP", "missing copy UBLKCP"),
        ("LDGSTS", "missing copy LDGSTS"),
    ):
        opcodes = {name: count for name, count in machine.opcodes.items() if name.split(".")[0] != opcode}
        assert sass.problems(dataclasses.replace(machine, opcodes=opcodes), config) == [problem]


@pytest.mark.slow
def test_a_multicast_that_is_missing_or_too_much_is_found() -> None:
    """A cluster of two receives A in the kernel for the most tokens, and in no other."""
    device = planner.Device(arch="sm_90a", sm_count=132)
    *_, fewer, most = planner.schedules(TYPES[4], device, mainloops=[support.SM90])
    cubins = build.compile_kernels([emitter.emit(fewer), emitter.emit(most)])
    for config, other in ((fewer, most), (most, fewer)):
        machine = sass.read(cubins[config.name])
        assert sass.problems(machine, config) == []
        opcodes = dict(machine.opcodes)
        for name in [name for name in opcodes if "MULTICAST" in name]:
            opcodes["UTMALDG.2D"] += opcodes.pop(name)
        if config == fewer:
            opcodes["UTMALDG.2D.MULTICAST"] = 1
        size = sass.read(cubins[other.name]).traits["cluster_size"]
        wrong = dataclasses.replace(
            machine, opcodes=opcodes, traits=dict(machine.traits) | {"cluster_size": size, "persistent": 0}
        )
        assert sass.problems(wrong, config) == [
            "missing multicast" if config == most else "unexpected multicast",
            f"cluster_size {size}, not {3 - size}",
            "persistent 0, not 1",
        ]


@pytest.mark.slow
def test_spills_and_traps_of_real_kernels_are_found() -> None:
    """A kernel that may not have the registers it needs; the SM80 mainloop on a GPU before it."""
    source = emitter.emit(BASE)
    squeezed = dataclasses.replace(
        source, name="squeezed", text=source.text.replace("(Kernel::Threads, 1)", "(Kernel::Threads, 6)")
    )
    assert squeezed.text != source.text
    turing = dataclasses.replace(source, name="turing", arch="sm_75")
    cubins = build.compile_kernels([squeezed, turing])

    found = sass.problems(sass.read(cubins["squeezed"]), BASE)
    assert any("accesses to local memory" in p for p in found)
    assert any("bytes spilled" in p for p in found)

    found = sass.problems(sass.read(cubins["turing"]), BASE)
    assert "missing MMA HMMA.16816.F32" in found
    assert any(p.endswith("traps, 0 allowed") for p in found)
    assert "machine code for sm_75" in found


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120a"])
def test_the_sm90_mainloop_elsewhere_is_found(arch: str) -> None:
    """Refused in words; and where someone compiles it all the same, the compiler or the machine code tells."""
    hopper = planner.schedules(TYPES[1], planner.Device(arch="sm_90a", sm_count=132), mainloops=[support.SM90])[-1]
    wrong = dataclasses.replace(hopper, arch=arch)
    with pytest.raises(errors.UnsupportedError, match=f"mainloop: got {support.SM90}; allowed: one that {arch} has"):
        emitter.emit(wrong)
    source = dataclasses.replace(emitter.emit(hopper), name=f"hopper_on_{arch}", arch=arch)
    try:
        cubin = build.compile_kernels([source])[source.name]
    except errors.CompileError:
        return
    found = sass.problems(sass.read(cubin), wrong)
    assert any("missing MMA" in p for p in found)
    assert any("traps" in p for p in found)


def test_a_constant_of_a_cubin(base: sass.Machine, tmp_path: Path) -> None:
    """The reader of constants itself, on a file made by hand of one section, one symbol."""
    assert base.traits["version"] >= 1
    assert base.traits["threads"] == 32 * 8
    cubin = build.compile_kernels([emitter.emit(BASE)])[BASE.name].read_bytes()
    assert len(sass.constant(cubin, emitter.TRAITS_SYMBOL)) == 4 * len(base.traits)
    with pytest.raises(KeyError, match="no_such_symbol"):
        sass.constant(cubin, "no_such_symbol")
    with pytest.raises(ValueError, match="not an ELF file"):
        sass.constant(b"text", emitter.TRAITS_SYMBOL)
