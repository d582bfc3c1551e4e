"""The benchmark: what it times is checked, what it reports adds up."""

import json
import math

import pytest

torch = pytest.importorskip("torch")

from humming_cutlass import cli, reference  # noqa: E402
from humming_cutlass.benchmark import CONTENDERS, Plan, Problem, contenders, parse_shape, run  # noqa: E402
from humming_cutlass.benchmark import humming as peer  # noqa: E402
from humming_cutlass.benchmark.problem import RandomWeight  # noqa: E402
from humming_cutlass.benchmark.roofline import Roofline, roofline  # noqa: E402
from humming_cutlass.benchmark.timing import rotation_bytes, time_calls  # noqa: E402
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


def _problem(weight="int4", group=128, scale=None, a="float16", n=48, k=256):
    return Problem.create(n=n, k=k, element_a=a, weight=weight, group_size=group, scale=scale)


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
    plan = Plan(
        problems=[_problem(weight, group, scale)],
        tokens=[1, 7],
        contenders=["humming_cutlass", "torch.matmul", "dequantize+torch.matmul"],
        device=CPU,
        repeats=2,
        bandwidth_gbps=10.0,
        peak_tflops=0.1,
    )
    rows = list(run(plan))
    assert len(rows) == plan.points == 6
    for row in rows:
        assert row["within"], row
        assert row["rel_err"] <= 1e-3
        assert row["us"] > 0
        assert row["tflops"] == pytest.approx(2 * row["m"] * 48 * 256 / row["us"] / 1e6, abs=0.006)
        assert {"gpu", "torch", "version", "date", "command", "clock_mhz", "kernel", "mode"} <= set(row)


def test_a_wrong_result_is_reported(monkeypatch):
    from humming_cutlass import ops

    right = ops.gemm

    def wrong(a, weight, *, out=None):
        right(a, weight, out=out)
        out[:, :16] = 0
        return out

    monkeypatch.setattr(ops, "gemm", wrong)
    plan = Plan(
        problems=[_problem()],
        tokens=[3],
        contenders=["humming_cutlass"],
        device=CPU,
        bandwidth_gbps=1.0,
        peak_tflops=1.0,
    )
    (row,) = run(plan)
    assert not row["within"]
    assert row["rel_err"] > 0.1


def test_an_output_that_is_not_written_is_reported(monkeypatch):
    from humming_cutlass import ops

    monkeypatch.setattr(ops, "gemm", lambda a, weight, *, out=None: out)
    plan = Plan(
        problems=[_problem()],
        tokens=[3],
        contenders=["humming_cutlass"],
        device=CPU,
        bandwidth_gbps=1.0,
        peak_tflops=1.0,
    )
    (row,) = run(plan)
    assert math.isinf(row["rel_err"])
    assert not row["within"]


def test_a_missing_peer_is_a_row_with_an_error():
    if peer_installed():
        pytest.skip("humming-kernels is installed")
    plan = Plan(
        problems=[_problem()], tokens=[1, 2], contenders=["humming"], device=CPU, bandwidth_gbps=1, peak_tflops=1
    )
    rows = list(run(plan))
    assert [row["m"] for row in rows] == [1, 2]
    assert all("not importable" in row["error"] for row in rows)


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
    assert set(ran) == {0, 1, 2}
    assert timing.us_min <= timing.us
    assert timing.repeats == 3


def test_shapes():
    assert parse_shape("8192x4096") == (8192, 4096)
    for text in ("8192", "0x4", "4x-4", "axb", "1x2x3"):
        with pytest.raises(ArgumentError, match="NxK"):
            parse_shape(text)


def test_command_writes_json_lines_and_draws_them(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.jsonl"
    words = ["bench", "--device", "cpu", "--shapes", "64x128", "--m", "1,4", "--groups", "64", "--repeats", "2"]
    words += ["--bandwidth", "10", "--peak", "0.1", "--impl", "humming_cutlass,torch.matmul", "--json", str(path)]
    assert cli.run(words) == 0
    assert "humming_cutlass" in capsys.readouterr().out
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["impl"], r["m"]) for r in rows] == [
        ("humming_cutlass", 1),
        ("humming_cutlass", 4),
        ("torch.matmul", 1),
        ("torch.matmul", 4),
    ]
    assert cli.run(["bench", "--plot", str(path), "--output", str(tmp_path / "plots")]) == 0
    out = capsys.readouterr().out
    ratio = rows[2]["us"] / rows[0]["us"]
    assert f"| 1 | {rows[0]['us']:.1f} | {rows[0]['roofline']:.0%} | {ratio:.2f} |" in out
    (picture,) = (tmp_path / "plots").iterdir()
    assert "<svg" in picture.read_text()


def test_plot_refuses_what_is_no_result(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    path.write_text("not json\n")
    assert cli.run(["bench", "--plot", str(path)]) == 2
    assert "results.jsonl:1" in capsys.readouterr().err
    assert cli.run(["bench", "--plot", str(tmp_path / "none")]) == 2


def test_command_names_the_contenders(capsys):
    assert cli.run(["bench", "--device", "cpu", "--impl", "cublas"]) == 2
    err = capsys.readouterr().err
    assert all(name in err for name in CONTENDERS)
