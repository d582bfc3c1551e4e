"""The contender cutlass_example_55: on a stand-in for its library on the CPU, and the library itself where it is."""

import os
import pathlib
import shutil
import subprocess

import pytest

torch = pytest.importorskip("torch")

from humming_cutlass import cli  # noqa: E402
from humming_cutlass.benchmark import CONTENDERS, Filter, Plan, Problem, plans, report, run  # noqa: E402
from humming_cutlass.benchmark.contenders import EXAMPLE, UnavailableError  # noqa: E402
from humming_cutlass.benchmark.cutlass_example import VARIABLE, CutlassExample, Library, pack_nibbles  # noqa: E402
from humming_cutlass.benchmark.problem import RandomWeight  # noqa: E402

TESTS = pathlib.Path(__file__).parent
CPU = torch.device("cpu")


def _build(folder, *flags):
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = folder / "example.so"
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", "-o", str(library), *flags]
    subprocess.run([*command, str(TESTS / "fake_cutlass_example_55.cpp")], check=True)
    return str(library)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return _build(tmp_path_factory.mktemp("example"))


def _problem(n=128, k=256, a="bfloat16", weight="int4", group=128, **words):
    return Problem.create(n=n, k=k, element_a=a, weight=weight, group_size=group, **words)


def _plan(**words):
    defaults = {"problems": [_problem()], "tokens": [3], "contenders": [EXAMPLE], "device": CPU}
    return Plan(**(defaults | {"repeats": 1, "bandwidth_gbps": 10.0, "peak_tflops": 0.1} | words))


@pytest.fixture
def _on_the_cpu(monkeypatch, library):
    monkeypatch.setenv(VARIABLE, library)
    monkeypatch.setitem(CONTENDERS, EXAMPLE, CutlassExample)
    monkeypatch.setattr("humming_cutlass.benchmark.runner.rotation_bytes", lambda device: 1)
    monkeypatch.setattr("humming_cutlass.benchmark.timing.COLD_SECONDS", 1e-4)


def test_nibbles():
    codes = torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x8F]]


@pytest.mark.usefixtures("_on_the_cpu")
def test_the_fastest_right_variant_is_timed_and_the_others_are_named():
    rows = list(run([_plan(tokens=[1, 5])]))
    assert [(row["impl"], row["m"]) for row in rows] == [(EXAMPLE, 1), (EXAMPLE, 5)]
    for row in rows:
        assert row["within"], row
        assert row["copies"] >= 2
        assert row["weight_bytes"] == 128 * 256 // 2 + 2 * 128 * 2
        kernel = "CUTLASS 1.2.3 works, the fastest of 2; without doubles (relative error 1), refuses (refused with 7)"
        assert row["kernel"] == kernel


@pytest.mark.usefixtures("_on_the_cpu")
def test_without_a_right_variant_it_fails(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, _build(tmp_path, "-DWITHOUT_A_RIGHT_ONE"))
    (row,) = run([_plan()])
    assert "no variant is right; without doubles (relative error 1)" in row["error"]
    assert not row["unavailable"]


@pytest.mark.usefixtures("_on_the_cpu")
@pytest.mark.parametrize(
    "words",
    [
        {"a": "float16"},
        {"weight": "int8"},
        {"weight": "uint4"},
        {"group": 64},
        {"group": -1},
        {"n": 192},
        {"k": 128 * 2 + 16, "group": -1},
        {"scale": "float16"},
        {"global_scale": True},
    ],
)
def test_what_it_does_not_compute_is_not_timed(words):
    with pytest.raises(UnavailableError, match="for bfloat16 x int4 with bfloat16 scales in groups of 128"):
        CutlassExample(RandomWeight.draw(_problem(**words), CPU, seed=0), 1)


def test_why_it_is_missing_is_one_line(monkeypatch, tmp_path, capsys):
    weight = RandomWeight.draw(_problem(), CPU, seed=0)
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UnavailableError, match=r"HUMMING_CUTLASS_EXAMPLE_55 is not set; bench/contenders/build\.sh"):
        CutlassExample(weight, 1)
    other = tmp_path / "other.so"
    other.write_text("no library")
    for path in (str(other), str(tmp_path / "none.so"), "libc.so.6"):
        monkeypatch.setenv(VARIABLE, path)
        with pytest.raises(UnavailableError, match="HUMMING_CUTLASS_EXAMPLE_55 names no such library"):
            CutlassExample(weight, 1)
    monkeypatch.delenv(VARIABLE)
    words = ["bench", "--device", "cpu", "--shapes", "128x128", "--m", "1", "--repeats", "1", "--bandwidth", "10"]
    assert cli.run([*words, "--peak", "1", "--impl", f"humming_cutlass,{EXAMPLE}"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if EXAMPLE in line and "needs a GPU" in line]


def test_it_is_timed_where_it_is_a_peer():
    (hopper,) = plans("hopper", CPU, Filter())
    assert [m for m in hopper.tokens if EXAMPLE in hopper.contenders_at(m)] == [16, 32, 64, 128, 256]
    for suite in ("hopper-types", "hopper-edges"):
        assert all(EXAMPLE not in plan.contenders for plan in plans(suite, CPU, Filter()))
    assert _plan(tokens=[1, 1024]).points == 2


def _row(impl, m, us, **words):
    return {
        "gpu": "a GPU", "version": "1", "torch": "2", "cuda": "13", "python": "3", "date": "2026-01-01",
        "command": "bench", "suite": "hopper", "a": "bfloat16", "b": "int4", "scale": "bfloat16", "zero": "none",
        "group": 128, "n": 8192, "k": 8192, "impl": impl, "m": m, "us": us, "within": True, "tflops": 1.0,
        "roofline_us": us / 2, "roofline": 0.5, "mode": "cold", "clock_mhz": 1980,
    } | words  # fmt: skip


def _cells(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_report_takes_it_as_a_peer_where_it_was_timed():
    rows = []
    for m in (8, 32, 64, 512):
        rows += [_row("humming_cutlass", m, 10.0), _row("humming-9.9", m, 13.0), _row("torch.matmul", m, 20.0)]
    without = report.summary(rows)
    assert _cells(without, "32 ≤ m ≤ 256")[6] == "1.300 x the faster of Humming and cuBLAS (8192x8192, m = 32)"
    assert "example 55" not in without
    rows += [_row(EXAMPLE, 32, 15.0), _row(EXAMPLE, 64, 9.0)]
    text = report.summary(rows)
    goal = _cells(text, "32 ≤ m ≤ 256")
    assert goal[2:4] == ["2", "1.300 x Humming 9.9"]
    assert goal[6:] == [
        "0.900 x the fastest of Humming, cuBLAS and CUTLASS example 55 (8192x8192, m = 64)", "1.00", "**no**"
    ]  # fmt: skip
    assert _cells(text, "m ≥ 512, sustained")[3] == "1.300 x the faster of Humming and cuBLAS"
    assert _cells(text, "m")[1:6] == [
        "humming_cutlass", "Humming 9.9", "cuBLAS on 16-bit weights", "CUTLASS example 55", "roofline"
    ]  # fmt: skip
    assert _cells(text, "m")[6:10] == [
        "vs Humming 9.9", "vs cuBLAS on 16-bit weights", "vs CUTLASS example 55", "vs fastest peer"
    ]  # fmt: skip
    assert _cells(text, "8")[6:10] == ["1.30", "2.00", "", "1.30"]
    assert _cells(text, "32")[6:10] == ["1.30", "2.00", "1.50", "1.30"]
    assert _cells(text, "64")[6:10] == ["1.30", "2.00", "0.90", "0.90"]


def test_report_does_not_count_it_where_it_was_wrong():
    rows = [_row("humming_cutlass", 32, 10.0), _row("humming-9.9", 32, 13.0), _row("torch.matmul", 32, 20.0)]
    text = report.summary([*rows, _row(EXAMPLE, 32, 1.0, within=False)])
    assert _cells(text, "32 ≤ m ≤ 256")[6].startswith("1.300 x")
    assert _cells(text, "32")[4] == "wrong"
    assert _cells(text, "32")[8:10] == ["", "1.30"]


def test_the_library_names_its_variants():
    carried = TESTS.parent / ".carry" / "cutlass_example_55.so"
    path = os.environ.get(VARIABLE) or (str(carried) if carried.exists() else None)
    if path is None:
        pytest.skip(f"{VARIABLE} is not set; bench/contenders/build.sh makes what it names")
    library = Library(path)
    assert library.version.startswith("4.")
    names = [variant.name for variant in library.variants]
    assert len(names) == len(set(names)) >= 8
    assert {"cooperative", "pingpong"} <= {word for name in names for word in name.split()}
    assert {variant.form for variant in library.variants} == {0, 1}
    # Works without a GPU too; what no kernel is for is refused before one is asked.
    assert all(library.workspace(variant.index, 64, 256, 256, 128) < 1 << 30 for variant in library.variants)
    assert library.run(0, 0, 0, 0, 0, 0, 16, 192, 256, 128, 0) != 0
    assert library.run(len(names), 0, 0, 0, 0, 0, 16, 256, 256, 128, 0) != 0
    assert library.store(1, 0, 0, 256, 192, 0) != 0


@pytest.mark.gpu
def test_it_is_right_on_a_gpu(monkeypatch):
    monkeypatch.setattr("humming_cutlass.benchmark.runner.rotation_bytes", lambda device: 1)
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} is not set; bench/contenders/build.sh makes what it names")
    device = torch.device("cuda", 0)
    for row in run([_plan(problems=[_problem(n=512, k=1024)], tokens=[1, 16, 100, 256], device=device)]):
        assert row.get("within"), row
        assert "without" not in row["kernel"], row["kernel"]
