"""The benchmark: what it times is checked, what it reports adds up."""

import json
import math
import os
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from humming_cutlass import cli, reference  # noqa: E402
from humming_cutlass.benchmark import (  # noqa: E402
    CONTENDERS,
    SUITES,
    Filter,
    Plan,
    Problem,
    contenders,
    parse_shape,
    plans,
    report,
    run,
    timing,
)
from humming_cutlass.benchmark import humming as peer  # noqa: E402
from humming_cutlass.benchmark.problem import RandomWeight  # noqa: E402
from humming_cutlass.benchmark.roofline import Roofline, roofline  # noqa: E402
from humming_cutlass.benchmark.runner import _digits  # noqa: E402
from humming_cutlass.benchmark.timing import record, rotation_bytes, time_calls, time_together  # noqa: E402
from humming_cutlass.errors import ArgumentError  # noqa: E402

CPU = torch.device("cpu")
FORMATS = [
    ("int4", 128, None),
    ("int1", -1, None),
    ("uint3", 64, "float8_e4m3"),
    ("uint4:floating", 32, "float16"),
    ("float6_e3m2", -1, "float8_e8m0"),
    ("float8_e5m2", 16, "float32"),
    ("nf4", 64, None),
]


def _problem(weight="int4", group=128, scale=None, a="float16", n=48, k=256, **words):
    return Problem.create(n=n, k=k, element_a=a, weight=weight, group_size=group, scale=scale, **words)


def _plan(**words):
    defaults = {"problems": [_problem()], "tokens": [3], "contenders": ["humming_cutlass"], "device": CPU}
    return Plan(**(defaults | {"repeats": 2, "bandwidth_gbps": 10.0, "peak_tflops": 0.1} | words))


@pytest.fixture(autouse=True)
def _little_rotation(monkeypatch):
    monkeypatch.setattr("humming_cutlass.benchmark.runner.rotation_bytes", lambda device: 1)


@pytest.mark.parametrize(("weight", "group", "scale"), FORMATS)
@pytest.mark.parametrize("a", ["float16", "bfloat16"])
def test_random_weight_is_what_the_float64_reference_says(weight, group, scale, a):
    drawn = RandomWeight.draw(_problem(weight, group, scale, a), CPU, seed=1)
    types = drawn.problem.types
    expected = reference.dequantize(
        drawn.codes, drawn.scale, dtype=types.element_b, group_size=types.group_size, zero=drawn.zero
    )
    got = drawn.dequantize().double().numpy()
    limit = 2.0**-8 if weight == "nf4" else 1e-6  # a code book is rounded to the operand's type
    assert abs(got - expected).max() <= limit * abs(expected).max()
    assert len(torch.unique(drawn.codes)) > (1 << types.bits) // 3


@pytest.mark.parametrize(("weight", "group", "scale"), FORMATS)
def test_every_contender_is_right_on_the_cpu(weight, group, scale):
    names = ["humming_cutlass", "torch.matmul", "dequantize+torch.matmul"]
    for global_scale in (False, True):
        plan = _plan(
            problems=[_problem(weight, group, scale, global_scale=global_scale)],
            tokens=[1, 7],
            contenders=names,
            suite="mine",
        )
        rows = list(run([plan]))
        assert [(row["m"], row["impl"]) for row in rows] == [(m, name) for m in (1, 7) for name in names]
        assert len(rows) == plan.points
        for row in rows:
            assert row["within"], row
            assert row["rel_err"] <= 1e-3
            assert row["us"] > 0
            assert row["tflops"] == pytest.approx(2 * row["m"] * 48 * 256 / row["us"] / 1e6, abs=0.006)
            assert {"gpu", "torch", "version", "date", "command", "clock_mhz", "kernel", "mode"} <= set(row)
            assert (row["suite"], row["global_scale"]) == ("mine", global_scale)


def test_a_wrong_result_is_reported(monkeypatch):
    from humming_cutlass import ops

    right = ops.gemm

    def wrong(a, weight, *, out=None):
        right(a, weight, out=out)
        out[:, :16] = 0
        return out

    monkeypatch.setattr(ops, "gemm", wrong)
    (row,) = run([_plan()])
    assert not row["within"]
    assert row["rel_err"] > 0.1


def test_an_output_that_is_not_written_is_reported(monkeypatch):
    from humming_cutlass import ops

    monkeypatch.setattr(ops, "gemm", lambda a, weight, *, out=None: out)
    (row,) = run([_plan()])
    assert math.isinf(row["rel_err"])
    assert not row["within"]


def test_a_wrong_last_copy_is_reported(monkeypatch):
    from humming_cutlass import ops

    right = ops.gemm

    def wrong(a, weight, *, out=None):
        right(a, weight, out=out)
        return out.mul_(1 if weight is first else 2)

    made = contenders.HummingCutlass(RandomWeight.draw(_problem(), CPU, seed=0), 1)
    first = made.copies[0]
    monkeypatch.setattr(ops, "gemm", wrong)
    monkeypatch.setitem(CONTENDERS, "humming_cutlass", lambda weight, rotation: made)
    (row,) = run([_plan()])
    assert len(made.copies) >= 2
    assert not row["within"]


def test_who_fails_is_a_row_and_the_others_are_timed(monkeypatch):
    def broken(weight, rotation):
        raise RuntimeError("no such kernel")

    class Breaks(contenders.TorchMatmul):
        impl = "breaks"

        def calls(self, a, out):
            raise AssertionError("not for this m")

    monkeypatch.setitem(CONTENDERS, "broken", broken)
    monkeypatch.setitem(CONTENDERS, "breaks", Breaks)
    rows = list(run([_plan(contenders=["broken", "breaks", "humming_cutlass"])]))
    errors = {row["impl"]: row["error"] for row in rows if "error" in row}
    assert errors == {"broken": "RuntimeError: no such kernel", "breaks": "AssertionError: not for this m"}
    assert [row["impl"] for row in rows if "us" in row] == ["humming_cutlass"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("humming", "not importable"),
        ("streaming_floor", "needs a GPU"),
        ("cutlass_example_55", "needs a GPU"),
        ("humming_cutlass+pdl", "needs a GPU"),
    ],
)
def test_who_cannot_run_here_is_a_row_with_an_error(name, reason):
    if name == "humming" and peer_installed():
        pytest.skip("humming-kernels is installed")
    rows = list(run([_plan(tokens=[1, 2], contenders=[name])]))
    assert [row["m"] for row in rows] == [1, 2]
    assert all(reason in row["error"] for row in rows)


def peer_installed():
    import importlib.util

    return importlib.util.find_spec("humming") is not None


@pytest.mark.parametrize("bits", range(2, 9))
def test_bit_stream_of_the_peer(bits):
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (3, 96), generator=generator, dtype=torch.int16).to(torch.uint8)
    packed = peer.pack_bits(codes, bits)
    assert packed.shape == (3, 3 * bits)
    for row in range(3):
        stream = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(packed[row].tolist()))
        assert [(stream >> (bits * i)) & ((1 << bits) - 1) for i in range(96)] == codes[row].tolist()


def test_roofline_is_the_slower_of_two():
    ceiling = Roofline(bandwidth_gbps=1000.0, peak_tflops=100.0, source="given")
    assert ceiling.us(moved_bytes=1e9, operations=1.0) == pytest.approx(1000.0)
    assert ceiling.us(moved_bytes=1.0, operations=1e14) == pytest.approx(1e6)
    given = roofline(CPU, torch.float16, bandwidth_gbps=5.0, peak_tflops=6.0)
    assert (given.bandwidth_gbps, given.peak_tflops, given.source) == (5.0, 6.0, "bandwidth given, peak given")


def test_rotation_covers_what_it_should():
    assert contenders.copies_needed(50_000_000, 240_000_000) == 5
    assert contenders.copies_needed(10**10, 240_000_000) == 2
    assert contenders.copies_needed(1, 240_000_000) == 64
    assert rotation_bytes(CPU) > 0


def test_timing_runs_every_copy():
    ran = []
    timing = time_calls([lambda i=i: ran.append(i) for i in range(3)], device=CPU, repeats=3)
    assert ran[:3] == [0, 1, 2]
    assert timing.us_min <= timing.us
    assert timing.repeats == 3


def test_repeats_of_contenders_alternate(monkeypatch):
    monkeypatch.setattr(timing, "MAX_NODES", 1)
    ran = []
    recordings = [record([lambda name=name: ran.append(name)], CPU) for name in "ab"]
    ran.clear()
    time_together(recordings, device=CPU, repeats=3)
    assert ran == ["a", "b"] * 3


def test_shapes():
    assert parse_shape("8192x4096") == (8192, 4096)
    assert parse_shape("1073676288x1") == (2**30 - 2**16, 1)
    for text in ("8192", "0x4", "4x-4", "axb", "1x2x3", "1073676289x16", "16x99999999999999999999", "٤x٤"):
        with pytest.raises(ArgumentError, match="NxK"):
            parse_shape(text)


def test_dependent_launch_is_asked_for_in_each_call_and_no_longer(monkeypatch):
    seen = []
    monkeypatch.setattr(contenders.HummingCutlass, "calls", lambda self, a, out: [lambda: seen.append(_pdl())])
    monkeypatch.delenv(contenders.PDL_VARIABLE, raising=False)
    contender = object.__new__(contenders.HummingCutlassPdl)
    (call,) = contender.calls(None, None)
    call()
    assert (seen, _pdl()) == (["1"], None)
    monkeypatch.setenv(contenders.PDL_VARIABLE, "0")
    call()
    assert (seen, _pdl()) == (["1", "1"], "0")


def _pdl():
    return os.environ.get(contenders.PDL_VARIABLE)


def test_the_floor_is_timed_where_reading_limits():
    plan = _plan(tokens=[1, 511, 512, 4096], contenders=["streaming_floor", "humming_cutlass", "humming_cutlass+pdl"])
    assert [len(plan.contenders_at(m)) for m in plan.tokens] == [3, 3, 1, 1]
    assert plan.points == 8


def test_suites_hold_what_has_to_be_shown():
    (hopper,) = plans("hopper", CPU, Filter())
    assert len(hopper.problems) == 7
    assert list(hopper.tokens) == [1 << i for i in range(14)]
    wanted = {
        "humming_cutlass",
        "humming_cutlass+pdl",
        "humming",
        "torch.matmul",
        "cutlass_example_55",
        "streaming_floor",
    }
    assert set(hopper.contenders) == wanted
    assert {(p.types.element_a, p.label, p.types.group_size) for p in hopper.problems} == {("bfloat16", "int4", 128)}
    (types,) = plans("hopper-types", CPU, Filter())
    assert len(types.problems) == len({(p.types, p.n, p.k) for p in types.problems}) == 2 * 2 * (8 * 2 + 2)
    assert {p.label for p in types.problems if p.types.element_zero == "integer"} == {"uint4"}
    scaled = {(p.types.element_scale, p.types.group_size, p.global_scale) for p in types.problems if "e2m1" in p.label}
    assert scaled == {("float8_e8m0", 32, False), ("float8_e4m3", 16, True)}
    edges = {plan.suite: plan for plan in plans("hopper-edges", CPU, Filter())}
    assert 16384 in edges["hopper-edges/every-m"].tokens
    assert {(p.n, p.k) for p in edges["hopper-edges/few-rows"].problems} == {(576, 7168), (512, 7168)}
    assert {16, 17, 32, 33, 64, 65, 128, 129, 256, 257} <= set(edges["hopper-edges/steps"].tokens)


def test_filters_narrow_a_suite_down():
    only = Filter(shapes=[(8192, 8192)], tokens=[16], weights=["uint4"], activations=["float16"], groups=[32])
    (plan,) = plans("hopper-types", CPU, only)
    (problem,) = plan.problems
    assert (problem.label, problem.n, problem.types.group_size, list(plan.tokens)) == ("uint4", 8192, 32, [16])
    (scaled,) = plans("hopper-types", CPU, Filter(scales=["float8_e8m0"], contenders=["torch.matmul"]))
    assert {p.label for p in scaled.problems} == {"float4_e2m1"}
    assert list(scaled.contenders) == ["torch.matmul"]
    assert [plan.suite for plan in plans("hopper-edges", CPU, Filter(tokens=[17]))] == ["hopper-edges/steps"]
    with pytest.raises(ArgumentError, match="leave nothing"):
        plans("hopper-edges", CPU, Filter(shapes=[(576, 7168)], tokens=[17]))
    with pytest.raises(ArgumentError, match=", ".join(SUITES)):
        plans("ampere", CPU, Filter())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--weights", "int9"], "--weights: got int9; allowed: int4 in suite hopper; nearest supported: int4"),
        (["--activations", "foo"], "--activations: got foo; allowed: bfloat16 in suite hopper; nearest supported: bf"),
        (["--m", "3"], "--m: got 3; allowed: 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192 in suite"),
        (["--m", "1,7000"], "in suite hopper; nearest supported: 8192"),
        (["--groups", "64"], "--groups: got 64; allowed: 128 in suite hopper; nearest supported: 128"),
        (["--shapes", "8192x8193"], "nearest supported: 8192x8192"),
        (["--scale", "float16"], "--scale: got float16; allowed: bfloat16 in suite hopper; nearest supported: bfloat"),
        (["--suite", ""], "--suite: got ''; allowed: hopper, hopper-types, hopper-edges"),
        (["--suite", "hoper"], "nearest supported: hopper"),
    ],
)
def test_a_wrong_filter_of_a_suite_is_named(capsys, words, sentence):
    assert cli.run(["bench", "--device", "cpu", "--suite", "hopper", *words]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--bandwidth", "-5"], "--bandwidth: got -5.0; allowed: a finite positive number"),
        (["--bandwidth", "inf"], "--bandwidth: got inf; allowed: a finite positive number"),
        (["--peak", "nan"], "--peak: got nan; allowed: a finite positive number"),
        (["--peak", "inf"], "--peak: got inf; allowed: a finite positive number"),
        (["--shapes", "99999999999999999999x16"], "allowed: NxK with numbers from 1 to 1073676288"),
        (["--m", "99999999999999999999"], "--m: got 99999999999999999999; allowed: numbers up to 2147483647"),
    ],
)
def test_numbers_that_are_none_are_refused(capsys, words, sentence):
    usual = ["--shapes", "64x128", "--m", "1", "--repeats", "1", "--impl", "humming_cutlass"]
    assert cli.run(["bench", "--device", "cpu", *usual, *words]) == 2
    assert sentence in capsys.readouterr().err


WORDS = ["--device", "cpu", "--shapes", "64x128", "--m", "1,4", "--groups", "64", "--repeats", "2"]


def test_command_writes_json_lines_and_reports_them(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.jsonl"
    words = ["bench", *WORDS, "--bandwidth", "10", "--peak", "0.1", "--json", str(path)]
    assert cli.run([*words, "--impl", "humming_cutlass,torch.matmul"]) == 0
    assert "humming_cutlass" in capsys.readouterr().out
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["m"], r["impl"]) for r in rows] == [
        (1, "humming_cutlass"),
        (1, "torch.matmul"),
        (4, "humming_cutlass"),
        (4, "torch.matmul"),
    ]
    assert cli.run(["bench", "report", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"| {rows[0]['roofline']:.0%} | {rows[1]['us'] / rows[0]['us']:.2f} |" in out
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "performance.md").write_text(f"kept\n{report.BEGIN}\nreplaced\n{report.END}\nkept too\n")
    assert cli.run(["bench", "report", str(path), "--out", str(docs)]) == 0
    text = (docs / "performance.md").read_text()
    assert text.startswith("kept\n")
    assert text.endswith("kept too\n")
    assert "replaced" not in text
    (picture,) = re.findall(r"\]\((images/.*?\.svg)\)", text)
    assert "<svg" in (docs / picture).read_text()


def test_command_runs_a_narrowed_suite(tmp_path, monkeypatch):
    monkeypatch.setattr("humming_cutlass.benchmark.suites._SHAPES", [(64, 128)])
    path = tmp_path / "results.jsonl"
    words = ["bench", "--device", "cpu", "--suite", "hopper", "--m", "2", "--bandwidth", "10", "--peak", "0.1"]
    assert cli.run([*words, "--impl", "humming_cutlass", "--json", str(path)]) == 0
    (row,) = map(json.loads, path.read_text().splitlines())
    assert (row["suite"], row["m"], row["n"]) == ("hopper", 2, 64)


def test_who_is_not_for_this_device_is_no_failure(tmp_path):
    path = tmp_path / "results.jsonl"
    words = ["bench", "--device", "cpu", "--shapes", "64x128", "--m", "1", "--repeats", "1", "--bandwidth", "10"]
    impl = ["--impl", "humming_cutlass,humming_cutlass+pdl,streaming_floor"]
    assert cli.run([*words, *impl, "--peak", "1", "--json", str(path)]) == 0
    rows = {row["impl"]: row for row in map(json.loads, path.read_text().splitlines())}
    assert rows["humming_cutlass"]["within"]
    assert rows["humming_cutlass+pdl"]["unavailable"]
    assert rows["streaming_floor"]["unavailable"]


@pytest.mark.parametrize(
    ("name", "error", "code"),
    [
        ("humming_cutlass", contenders.UnavailableError("no"), 1),
        ("humming_cutlass", RuntimeError("no"), 1),
        ("humming_cutlass+pdl", contenders.UnavailableError("no"), 0),
        ("humming_cutlass+pdl", RuntimeError("no"), 1),
        ("streaming_floor", RuntimeError("no"), 1),
    ],
)
def test_who_fails_decides_the_exit_code(monkeypatch, name, error, code):
    def broken(weight, rotation):
        raise error

    monkeypatch.setitem(CONTENDERS, name, broken)
    words = ["bench", "--device", "cpu", "--shapes", "64x128", "--m", "1", "--repeats", "1", "--bandwidth", "10"]
    assert cli.run([*words, "--peak", "1", "--impl", f"{name},torch.matmul"]) == code


def test_a_run_that_measured_nothing_fails(capsys):
    words = ["bench", "--device", "cpu", "--shapes", "64x128", "--m", "1", "--bandwidth", "10", "--peak", "1"]
    assert cli.run([*words, "--impl", "streaming_floor"]) == 1
    assert "Nothing was measured" in capsys.readouterr().err


def test_host_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("humming_cutlass.benchmark.host.SHAPES", ((64, 128),))
    path = tmp_path / "host.jsonl"
    words = ["bench", "host", "--device", "cpu", "--batches", "3", "--calls", "4", "--json", str(path)]
    assert cli.run(words) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["impl"] for row in rows] == ["humming_cutlass", "torch.nn.Linear", "torch.Tensor.add_"]
    for row in rows:
        assert 0 < row["host_us_min"] <= row["host_us"]
        assert (row["m"], row["n"], row["k"], row["calls"]) == (1, 64, 128, 4)
    assert "µs a call" in capsys.readouterr().out
    text = report.summary(rows)
    for row in rows:
        assert f"| {row['impl']} | 64x128 | {row['host_us']:.2f} |" in text


def _host_words(path, monkeypatch):
    monkeypatch.setattr("humming_cutlass.benchmark.host.SHAPES", ((64, 128),))
    return ["bench", "host", "--device", "cpu", "--batches", "1", "--calls", "1", "--json", str(path)]


def test_rows_go_on_after_an_interrupted_run(tmp_path, monkeypatch):
    """What a killed run left of a line must not swallow the first row of the next one."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"gpu": "x')
    assert cli.run(_host_words(path, monkeypatch)) == 0
    part, *rows = path.read_text().splitlines()
    assert part == '{"gpu": "x'
    assert json.loads(rows[0])["impl"] == "humming_cutlass"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is full: /dev/full")
def test_a_full_disk_is_said(monkeypatch, capsys):
    assert cli.run(_host_words("/dev/full", monkeypatch)) == 2
    assert "--json: got /dev/full (No space left on device); allowed: a writable file" in capsys.readouterr().err


def test_small_figures_do_not_become_zero():
    assert [_digits(x) for x in (1.23456789e-7, 98.7654321, 0.0)] == [1.2346e-7, 98.765, 0.0]


@pytest.mark.gpu
def test_suite_on_a_gpu(tmp_path):
    """Every contender of the suite, cold and sustained, in a process of its own: it leaves graphs and weights."""
    path = tmp_path / "results.jsonl"
    words = ["bench", "--suite", "hopper", "--shapes", "4096x4096", "--m", "1,512", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "humming_cutlass", *words], capture_output=True, text=True, check=False
    )
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    timed = {(row["impl"], row["m"]): row for row in rows if "us" in row}
    assert {("humming_cutlass", 1), ("humming_cutlass", 512), ("torch.matmul", 512)} <= set(timed)
    assert timed["humming_cutlass", 1]["mode"] == "cold"
    long = timed["humming_cutlass", 512]
    assert long["mode"] == "sustained"
    assert long["us"] * long["calls"] * long["repeats"] > 0.25e6
    assert all(row["within"] for row in timed.values())
    if ("streaming_floor", 1) in timed:
        assert timed["streaming_floor", 1]["us"] <= timed["humming_cutlass", 1]["us"]
    else:
        assert any("importable" in row["error"] for row in rows if row["impl"] == "streaming_floor")


def test_command_names_the_contenders(capsys):
    assert cli.run(["bench", "--device", "cpu", "--impl", "cublas"]) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in CONTENDERS)
