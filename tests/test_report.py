"""Reports of the benchmark: what the tables say of rows, and which rows are refused."""

import json
import math
import pathlib
import re
import shlex

import pytest

pytest.importorskip("torch")

from humming_cutlass import cli
from humming_cutlass.benchmark import report
from humming_cutlass.errors import ArgumentError

ROOT = pathlib.Path(__file__).parents[1]


def _row(impl, m, us, *, suite="hopper", date="2026-01-01", n=8192, **words):
    return {
        "gpu": "a GPU", "version": "1", "torch": "2", "cuda": "13", "python": "3", "date": date, "command": "bench",
        "suite": suite, "a": "bfloat16", "b": "int4", "scale": "bfloat16", "zero": "none", "group": 128, "n": n,
        "k": 8192, "impl": impl, "m": m, "us": us, "within": True, "weight_bytes": 35_000_000, "tflops": 1.0,
        "roofline_us": us / 2, "roofline": 0.5, "mode": "cold", "clock_mhz": 1980,
    } | words  # fmt: skip


def _cells(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_report_judges_by_the_goals():
    rows = []
    for n, factor in ((8192, 1.2), (4096, 1.5)):
        for m in (1, 8, 16, 512):
            rows += [_row("humming_cutlass", m, 10.0, n=n), _row("humming-9.9", m, 10.0 * factor, n=n)]
            rows.append(_row("torch.matmul", m, 9.8, n=n))
    rows.append(_row("streaming_floor", 1, 8.1))
    text = report.summary(rows)
    few, half, many = (_cells(text, name) for name in ("m ≤ 8", "m = 16", "m ≥ 512, sustained"))
    assert few[2:6] == ["4", f"{math.sqrt(1.2 * 1.5):.3f} x Humming 9.9", "1.30, aim 1.60", "yes"]
    assert few[6:] == ["1.200 x Humming 9.9 (8192x8192, m = 1)", "1.10", "yes"]
    assert half[2] == "2"
    assert many[3] == "0.980 x the faster of Humming and cuBLAS"
    assert (many[5], many[8]) == ("**no**", "**no**")
    assert _cells(text, "8192x8192")[1:6] == ["35.0", "8.10", "10.0", "1.23", "yes"]


def test_report_compares_within_a_run_only():
    rows = [_row("humming_cutlass", 1, 10.0), _row("humming-9.9", 1, 20.0), _row("torch.matmul", 1, 30.0)]
    rows += [_row("humming_cutlass", 1, 5.0, date="2026-01-02"), _row("humming-9.9", 1, 15.0, date="2026-01-02")]
    rows += [_row("humming-9.9", 1, 1.0, date="2026-01-03")]  # a run without this library
    assert _cells(report.summary(rows), "1") == ["1", "5.00", "15.0", "50%", "3.00", "1980"]


def test_report_does_not_count_what_is_wrong():
    rows = [_row("humming_cutlass", 1, 1.0, within=False), _row("humming-9.9", 1, 20.0)]
    text = report.summary(rows)
    assert _cells(text, "m ≤ 8")[3:6] == ["0.000 x Humming 9.9", "1.30, aim 1.60", "**no**"]
    assert _cells(text, "1")[1:5] == ["wrong", "20.0", "50%", ""]


def test_report_of_other_types_and_edges():
    rows = []
    for m, us in ((1, 10.0), (16, 20.0)):
        for a, factor in (("bfloat16", 1.0), ("float16", 1.5)):
            words = {"suite": "hopper-types", "b": "int3", "a": a, "scale": a, "group": -1}
            rows += [_row("humming_cutlass", m, us, **words), _row("humming-9.9", m, us * factor, **words)]
    for m, us in ((16, 10.0), (17, 11.9), (32, 12.0), (33, 14.0), (64, 13.0)):
        rows.append(_row("humming_cutlass", m, us, suite="hopper-edges/steps"))
    rows += [_row("humming_cutlass", 96, 10.0, suite="hopper-edges/every-m")]
    rows += [_row("torch.matmul", 96, 9.4, suite="hopper-edges/every-m")]
    text = report.summary(rows)
    assert _cells(text, "8192x8192 float16 x int3 channel") == [
        "8192x8192 float16 x int3 channel", "10.0 (1.50)", "20.0 (1.50)"
    ]  # fmt: skip
    assert _cells(text, "all") == ["all", f"{math.sqrt(1.5):.2f}", "1.00"]
    assert f"goal {report.TYPES_GOAL} over all: yes" in text
    steps = [line.split("|")[2:-1] for line in text.splitlines() if line.count("|") == 7 and "int4" in line]
    assert [[cell.strip() for cell in line] for line in steps] == [
        ["96", "10.0", "9.40", "0.94", "**no**"],
        ["17", "10.0", "11.9", "12.0", "yes"],
        ["33", "12.0", "14.0", "13.0", "**no**"],
    ]
    assert "### Goals" not in text


def test_readme_of_cpu_rows_names_no_gpu_library(tmp_path):
    words = {"gpu": "none (x86_64 CPU)", "cuda": None, "threads": 2}
    names = ["humming_cutlass", "torch.matmul", "dequantize+torch.matmul"]
    path, readme = tmp_path / "results.jsonl", tmp_path / "README.md"
    readme.write_text(report.BEGIN + report.END)
    path.write_text("".join(json.dumps(_row(name, 1, 9.0, **words)) + "\n" for name in names))
    assert cli.run(["bench", "report", str(path), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert "No GPU but x86_64 CPU, 2 threads, 2026-01-01, 8192x8192" in text
    assert "CUDA" not in text
    assert "cuBLAS" not in text
    assert _cells(text, "torch.matmul") == ["torch.matmul", "9.00"]
    path.write_text("".join(json.dumps(_row(name, 1, 9.0)) + "\n" for name in names))
    assert cli.run(["bench", "report", str(path), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert "One a GPU, 2026-01-01, 8192x8192, bfloat16 x int4 in groups of 128, cold L2, CUDA graphs" in text
    assert "cuBLAS on 16-bit weights" in text


def test_markers_are_needed_once_each():
    assert report.insert(f"a{report.BEGIN}b{report.END}c", "x\n", "page") == f"a{report.BEGIN}\nx\n{report.END}c"
    for text in ("", report.BEGIN, report.END + report.BEGIN, 2 * (report.BEGIN + report.END)):
        with pytest.raises(ArgumentError, match=r"page\.md"):
            report.insert(text, "x", "page.md")


def test_committed_pages_are_what_the_results_say(tmp_path, monkeypatch):
    """Docs and README hold what the command that they name writes."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(ROOT)
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("docs/performance.md", "README.md")}
    (command,) = re.findall(r"^Generated by `python -m humming_cutlass (.*)`\.$", pages["docs/performance.md"], re.M)
    (tmp_path / "docs").mkdir()
    for name, text in pages.items():
        head, _, rest = text.partition(report.BEGIN)
        (tmp_path / name).write_text(head + report.BEGIN + report.END + rest.partition(report.END)[2], encoding="utf-8")
    words = [str(tmp_path / word) if word in ("docs", "README.md") else word for word in shlex.split(command)]
    assert cli.run(words) == 0
    for name, text in pages.items():
        assert (tmp_path / name).read_text(encoding="utf-8") == text, f"run: python -m humming_cutlass {command}"
    made = {path.name for path in (tmp_path / "docs" / "images").iterdir()}
    assert made == {path.name for path in (ROOT / "docs" / "images").glob("*.svg")}


def test_report_refuses_what_is_no_result(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    path.write_text("not json\n")
    assert cli.run(["bench", "report", str(path)]) == 2
    assert "results.jsonl:1" in capsys.readouterr().err
    assert cli.run(["bench", "report", str(tmp_path / "none")]) == 2
    path.write_text(json.dumps(_row("humming_cutlass", 1, 1.0, n=64)) + "\n")
    assert cli.run(["bench", "report", str(path), "--readme", str(ROOT / "README.md")]) == 2
    assert cli.run(["bench", "report", str(path), "--out", str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\x7fELF\xd0\x01", "which is not UTF-8"),
        (b"5\n", "one JSON object a line"),
        (b'{"us": 1}\n', "without 'a'"),
        (b'{"host_us": 1}\n', "without 'command'"),
    ],
)
def test_report_refuses_a_file_of_another_kind(tmp_path, capsys, content, sentence):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert cli.run(["bench", "report", str(path)]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("us", "fast"),
        ("us", 10**400),
        ("roofline", 10**400),
        ("within", 1),
        ("within", None),
        ("roofline", None),
        ("roofline_us", 0),
        ("tflops", math.inf),
        ("weight_bytes", None),
        ("us", 1e308),
        ("m", 10**400),
        ("group", 10**400),
        ("a", "a/b"),
        ("a", "\ud800"),
        ("impl", "x" * 5000),
        ("gpu", "$x^{$"),
        ("command", "<!-- bench:end -->"),
        ("date", "yesterday"),
        ("us", 0),
        ("us", None),
        ("us", math.nan),
        ("us", True),
        ("m", None),
        ("m", 0),
        ("m", 1.5),
        ("n", "64"),
        ("group", None),
        ("impl", 7),
        ("a", []),
        ("roofline", "high"),
        ("within", {}),
    ],
)
def test_report_refuses_a_row_with_a_wrong_value(tmp_path, capsys, field, value):
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(_row("humming_cutlass", 1, 1.0, n=64) | {field: value}) + "\n")
    assert cli.run(["bench", "report", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"results.jsonl:1, {field} " in error
    assert len(error.splitlines()) == 1


def test_report_refuses_a_line_that_is_too_deep(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    path.write_text("[" * 200_000)
    assert cli.run(["bench", "report", str(path)]) == 2
    assert "one JSON object a line" in capsys.readouterr().err


def test_a_wrong_result_misses_every_goal():
    """A point that is wrong must not be left out of a mean: it has no speed."""
    peers = [_row(impl, m, 20.0) for impl in ("humming-9.9", "torch.matmul") for m in (32, 64)]
    good, wrong = _row("humming_cutlass", 32, 10.0), _row("humming_cutlass", 64, 10.0, within=False)
    goals = _cells(report.summary([*peers, good, wrong]), "32 ≤ m ≤ 256")
    assert goals[2:6] == ["2", "0.000 x Humming 9.9", "1.20, aim 1.50", "**no**"]
    assert goals[6].startswith("0.000 x")
    assert "m = 64" in goals[6]
    assert goals[8] == "**no**"
    types = [row | {"suite": "hopper-types"} for row in (*peers, good, wrong)]
    assert "goal 1.1 over all: **no**" in report.summary(types)
    steps = [_row("humming_cutlass", m, 10.0, suite="hopper-edges/steps", within=m != 17) for m in (16, 17, 32)]
    assert _cells(report.summary(steps), "8192x8192 bfloat16 x int4 g128")[-1] == "**no**"
    floor = [_row("humming_cutlass", 1, 8.0, within=False), _row("streaming_floor", 1, 8.1)]
    assert _cells(report.summary(floor), "8192x8192")[3:6] == ["wrong", "", "**no**"]


def test_points_that_failed_are_named(tmp_path):
    path = tmp_path / "results.jsonl"
    rows = [_row("humming_cutlass", 1, 10.0), _row("humming-9.9", 1, 11.0)]
    failed = {"impl": "humming_cutlass", "m": 2, "error": "LaunchError: no", "unavailable": False}
    absent = failed | {"impl": "humming-9.9", "unavailable": True}
    common = {key: rows[0][key] for key in ("gpu", "date", "command", "n", "k", "suite")}
    path.write_text("".join(json.dumps(row) + "\n" for row in (*rows, failed | common, absent | common)))
    text = report.page(report.read_rows(path), "command")
    assert "- 2 of 2 points within their bound of accuracy\n- 1 points without a result: humming_cutlass at" in text


def test_report_keeps_gpus_apart(tmp_path, capsys):
    path = tmp_path / "results.jsonl"
    rows = [_row("humming_cutlass", 1, 10.0), _row("humming_cutlass", 2, 10.0, gpu="another GPU")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.run(["bench", "report", str(path)]) == 2
    assert "results: got rows of a GPU and of another GPU; allowed: rows of one GPU" in capsys.readouterr().err


def test_the_latest_row_counts_whatever_its_place_and_time_zone():
    early, late = "2026-01-01T05:00:00+09:00", "2026-01-01T04:24:00+00:00"
    rows = [_row("humming_cutlass", 1, 5.0, date=late), _row("humming_cutlass", 1, 7.0, date=early)]
    assert _cells(report.summary(rows), "1")[1] == "5.00"
    host = {"impl": "humming_cutlass", "n": 64, "k": 64, "host_us_min": 1.0, "command": "bench host", "gpu": "a GPU"}
    rows = [host | {"host_us": 5.0, "date": late}, host | {"host_us": 99.0, "date": early}]
    assert _cells(report.summary(rows), "humming_cutlass")[2:] == ["5.00", "1.00", "yes"]
    rows = [row | {"gpu": "none (x86_64 CPU)"} for row in rows]
    assert _cells(report.summary(rows), "humming_cutlass")[-1] == ""


def test_report_of_nothing_writes_nothing(tmp_path, capsys):
    path, page, readme = (tmp_path / name for name in ("results.jsonl", "performance.md", "README.md"))
    path.write_text(json.dumps(_row("humming_cutlass", 1, 1.0, n=64)) + "\n")
    text = f"{report.BEGIN}kept{report.END}"
    page.write_text(text)
    readme.write_text(text)
    words = ["bench", "report", str(path), "--out", str(tmp_path)]
    assert cli.run([*words, "--shapes", "1x1"]) == 2
    assert "--shapes: got 1x1, of which there is no row; allowed: 64x8192" in capsys.readouterr().err
    assert cli.run([*words, "--readme", str(readme)]) == 2  # no row of the README's shape
    assert page.read_text() == readme.read_text() == text
    assert not (tmp_path / "images").exists()
