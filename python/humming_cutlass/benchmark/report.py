"""Tables and pictures from result files: docs/performance.md, docs/images and the table of README.md.

Pages keep their hand-written text: what is generated stands between two markers. Every ratio is one of rows of the same
run; of several runs of a point the last one with this library counts. A wrong result has no speed: it counts as 0.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from humming_cutlass.benchmark.contenders import EXAMPLE, FLOOR, PDL
from humming_cutlass.config import INT32_MAX
from humming_cutlass.errors import ArgumentError, explain

__all__ = ["BEGIN", "END", "insert", "page", "pictures", "read_rows", "readme_table", "summary"]

Row = dict[str, Any]
Point = dict[str, Row]
"""The rows of one problem and m, by contender; all of one run."""

_HOST_FIELDS = frozenset({"impl", "n", "k", "host_us", "host_us_min", "date", "command", "gpu"})
_FIELDS = frozenset(
    {"impl", "m", "n", "k", "a", "b", "scale", "zero", "group", "date", "command", "gpu"}
    | {"us", "within", "weight_bytes", "roofline", "roofline_us", "tflops", "clock_mhz"}
)
_FAILURE_FIELDS = frozenset({"impl", "m", "n", "k", "date", "command", "gpu"})
"""What the tables need of a row."""
_WORD = re.compile(r"[\w.+-]{1,60}")
_LONGEST_TEXT = 2000

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"

OURS, HUMMING, CUBLAS = "humming_cutlass", "humming", "torch.matmul"
_ORDER = (OURS, PDL, HUMMING, CUBLAS, EXAMPLE, "dequantize+torch.matmul", FLOOR)
_LABELS = {
    CUBLAS: "cuBLAS on 16-bit weights",
    EXAMPLE: "CUTLASS example 55",
    "dequantize+torch.matmul": "dequantize, then cuBLAS",
    FLOOR: "reading the weight",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Goal:
    """What has to be reached in a range of m, as ratios of speed.

    Attributes:
        name: the range, for people.
        first: the least m of it.
        last: the largest.
        mean_of: whom the geometric mean compares with: with the faster of them, at each point.
        mean: what it must be.
        aim: what it should be.
        least_of: whom the least ratio compares with, likewise; `EXAMPLE` where it was timed.
        least: what it must be.
    """

    name: str
    first: int
    last: int
    mean_of: tuple[str, ...]
    mean: float
    aim: float
    least_of: tuple[str, ...]
    least: float


_BOTH = (HUMMING, CUBLAS)
_PEERS = (*_BOTH, EXAMPLE)
GOALS = (
    Goal(name="m ≤ 8", first=1, last=8, mean_of=(HUMMING,), mean=1.3, aim=1.6, least_of=(HUMMING,), least=1.1),
    Goal(name="m = 16", first=16, last=16, mean_of=(HUMMING,), mean=1.1, aim=1.35, least_of=(HUMMING,), least=1.0),
    Goal(name="32 ≤ m ≤ 256", first=32, last=256, mean_of=(HUMMING,), mean=1.2, aim=1.5, least_of=_PEERS, least=1.0),
    Goal(
        name="m ≥ 512, sustained",
        first=512,
        last=1 << 62,
        mean_of=_BOTH,
        mean=1.05,
        aim=1.12,
        least_of=_BOTH,
        least=0.99,
    ),
)
FLOOR_GOAL, FLOOR_AIM, FLOOR_BYTES = 1.25, 1.1, 16_000_000
"""At one token: how many times the time to read the weight, where it has so many bytes."""
TYPES_GOAL, EVERY_M_GOAL = 1.1, 0.95
HOST_GOAL_US = 6


def _is_sound(field: str, value: object) -> bool:
    """Whether a row's field has a value that the tables, pages and pictures can be made of."""
    if field in ("m", "n", "k"):
        return type(value) is int and 0 < value <= INT32_MAX
    if field == "group":
        return type(value) is int and -1 <= value <= INT32_MAX
    if field in ("us", "host_us", "host_us_min", "roofline", "roofline_us", "tflops", "clock_mhz", "weight_bytes"):
        if value is None:
            return field == "clock_mhz"
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and _LEAST < value < _MOST  # type: ignore[operator]
    if field == "within":
        return isinstance(value, bool)
    if not isinstance(value, str):
        return False
    if field in ("a", "b", "scale", "zero", "impl"):
        return _WORD.fullmatch(value) is not None
    if field == "date":
        return _moment(value) is not None
    return value.isprintable() and len(value) <= _LONGEST_TEXT and not {"`", "|", "<", "$"} & set(value)


_LEAST, _MOST = 1e-30, 1e30
"""Of what is measured, far beyond all of it: ratios are finite."""


def _moment(date: str) -> datetime.datetime | None:
    """Returns when a row was measured, UTC where it does not say; None for what is no date."""
    try:
        moment = datetime.datetime.fromisoformat(date)
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=datetime.timezone.utc)


def read_rows(path: pathlib.Path) -> list[Row]:
    """Returns the rows of a JSON-lines file that hold a measurement, or say that one failed.

    Raises:
        ArgumentError: the file is missing or no text, a line is not JSON, lacks a field or has a wrong
            value in one, or no line is a measurement.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ArgumentError(explain("results", str(path), f"a readable file ({error.strerror})")) from None
    except UnicodeDecodeError:
        raise ArgumentError(
            explain("results", f"{path}, which is not UTF-8", "lines written by bench --json")
        ) from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ArgumentError(explain("results", f"{path}:{number}: {line[:40]!r}", "one JSON object a line"))
        failed = "error" in row and not row.get("unavailable")
        fields = (
            _FIELDS if "us" in row else _HOST_FIELDS if "host_us" in row else _FAILURE_FIELDS if failed else frozenset()
        )
        if missing := sorted(fields - set(row)):
            got = f"{path}:{number} without {missing[0]!r}"
            raise ArgumentError(explain("results", got, "lines written by bench --json"))
        for field in sorted(fields):
            if not _is_sound(field, row[field]):
                got = f"{path}:{number}, {field} {row[field]!r:.40}"
                raise ArgumentError(explain("results", got, "lines written by bench --json"))
        if fields:
            rows.append(row)
    if not any("error" not in row for row in rows):
        raise ArgumentError(explain("results", f"{path} without a measurement", "lines written by bench --json"))
    return rows


def problem_name(row: Row) -> str:
    """Returns shape and types of a row, for people."""
    group = "channel" if row["group"] == -1 else f"g{row['group']}"
    words = [f"{row['n']}x{row['k']}", row["a"], "x", row["b"], group]
    if row["scale"] != row["a"]:
        words.append(f"scale {row['scale']}")
    if row["zero"] != "none":
        words.append(f"zero {row['zero']}")
    if row.get("global_scale"):
        words.append("global scale")
    return " ".join(words)


def _when(date: str) -> datetime.datetime:
    moment = _moment(date)
    assert moment is not None, "read_rows refuses what is no date"
    return moment


def _on_cpu(row: Row) -> bool:
    return str(row["gpu"]).startswith("none")  # as `runner.environment` writes it


def _impl(row: Row) -> str:
    return HUMMING if row["impl"].startswith("humming-") else str(row["impl"])


class Results:
    """The rows of one suite: by problem, then m, then contender."""

    def __init__(self, rows: Iterable[Row], suites: Sequence[str]) -> None:
        runs: dict[str, dict[int, dict[str, Point]]] = {}
        for row in rows:
            if row.get("suite", "") in suites and "us" in row:
                of_problem = runs.setdefault(problem_name(row), {})
                of_problem.setdefault(row["m"], {}).setdefault(row["date"], {})[_impl(row)] = row
        self.problems: dict[str, dict[int, Point]] = {}
        for problem, tokens in runs.items():
            for m in sorted(tokens):
                ours = [point for _, point in sorted(tokens[m].items(), key=lambda run: _when(run[0])) if OURS in point]
                if ours:
                    self.problems.setdefault(problem, {})[m] = ours[-1]

    def __bool__(self) -> bool:
        return bool(self.problems)

    def points(self) -> Iterator[tuple[str, int, Point]]:
        """Yields problem, m and point."""
        for problem, tokens in self.problems.items():
            for m, point in tokens.items():
                yield problem, m, point

    def contenders(self) -> list[str]:
        """Returns who was timed."""
        found = {impl for _, _, point in self.points() for impl in point}
        return [*(impl for impl in _ORDER if impl in found), *sorted(found - set(_ORDER))]

    def label(self, impl: str) -> str:
        """Returns a contender's name, with the version where the rows have it."""
        if impl == HUMMING:
            for _, _, point in self.points():
                if impl in point:
                    return f"Humming {point[impl]['impl'].removeprefix('humming-')}"
        return impl if self.on_cpu else _LABELS.get(impl, impl)

    @property
    def on_cpu(self) -> bool:
        """Whether every row is of a CPU, where neither cuBLAS nor CUDA graphs are."""
        return all(_on_cpu(row) for _, _, point in self.points() for row in point.values())


def ratio(point: Point, peers: Sequence[str], ours: str = OURS) -> float | None:
    """Returns how many times as fast as the fastest of `peers` `ours` is; None where a peer is missing or was wrong.

    0 where `ours` was wrong. Among others `EXAMPLE` counts only where it was timed: it is built by hand, and not for
    every m.
    """
    if len(peers) > 1 and not point.get(EXAMPLE, {}).get("within"):
        peers = [peer for peer in peers if peer != EXAMPLE]
    times = [row["us"] for row in (point.get(peer) for peer in peers) if row is not None and row["within"]]
    if ours not in point or len(times) < len(peers):
        return None
    return float(min(times) / point[ours]["us"]) if point[ours]["within"] else 0.0


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios))) if min(ratios) > 0 else 0.0


def _us(row: Row | None) -> str:
    if row is None:
        return ""
    if not row["within"]:
        return "wrong"
    us = row["us"]
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _verdict(reached: bool) -> str:
    return "yes" if reached else "**no**"


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    rows = [header, ["---"] * len(header), *lines]
    return ["| " + " | ".join(row) + " |" for row in rows] + [""]


def _main(rows: Sequence[Row]) -> Results:
    return Results(rows, ("", "hopper"))


def _goals(results: Results) -> list[str]:
    lines = []
    points = [each for each in results.points() if each[0].endswith(" bfloat16 x int4 g128")]
    for goal in GOALS:
        for ours in (OURS, PDL):
            means: list[float] = []
            leasts: list[tuple[float, str]] = []
            timed: set[str] = set()
            for problem, m, point in points:
                if not goal.first <= m <= goal.last:
                    continue
                mean, least = ratio(point, goal.mean_of, ours), ratio(point, goal.least_of, ours)
                timed |= set(goal.least_of) & set(point)
                means += [] if mean is None else [mean]
                leasts += [] if least is None else [(least, f"{problem.split()[0]}, m = {m}")]
            if not means or not leasts:
                continue
            mean, (least, where) = _mean(means), min(leasts)
            names = [
                results.label(peers[0])
                if len(peers) == 1
                else "the fastest of Humming, cuBLAS and CUTLASS example 55"
                if EXAMPLE in peers and EXAMPLE in timed
                else "the faster of Humming and cuBLAS"
                for peers in (goal.mean_of, goal.least_of)
            ]
            lines.append(
                [
                    goal.name,
                    ours,
                    str(len(means)),
                    f"{mean:.3f} x {names[0]}",
                    f"{goal.mean:.2f}, aim {goal.aim:.2f}",
                    _verdict(mean >= goal.mean),
                    f"{least:.3f} x {names[1]} ({where})",
                    f"{goal.least:.2f}",
                    _verdict(least >= goal.least),
                ]
            )
    header = ["range", "contender", "points", "geometric mean", "goal", "met", "least", "goal", "met"]
    return _table(header, lines) if lines else []


def _relative(results: Results) -> dict[str, dict[int, float]]:
    """Returns, by problem and m, the speed relative to the fastest peer, where Humming and cuBLAS were timed."""
    found: dict[str, dict[int, float]] = {}
    for problem, m, point in results.points():
        if (value := ratio(point, _PEERS)) is not None:
            found.setdefault(problem, {})[m] = value
    return found


def _floor(results: Results) -> list[str]:
    lines = []
    for problem, tokens in results.problems.items():
        point = tokens.get(1, {})
        if FLOOR not in point:
            continue
        size = point[FLOOR]["weight_bytes"]
        cells = [problem.split()[0], f"{size / 1e6:.1f}", _us(point[FLOOR])]
        for ours in (OURS, PDL):
            over = ratio(point, (FLOOR,), ours)
            cells += [_us(point.get(ours)), f"{1 / over:.2f}" if over else ""]
            if ours == OURS:
                within = bool(over) and 1 / over <= FLOOR_GOAL  # type: ignore[operator]
                cells.append("-" if size < FLOOR_BYTES else _verdict(within))
        lines.append(cells)
    if not lines:
        return []
    header = ["nxk", "MB", "floor µs", f"{OURS} µs", "÷ floor", f"≤ {FLOOR_GOAL}", f"{PDL} µs", "÷ floor"]
    text = (
        f"One token, against a kernel that only reads the weight (goal {FLOOR_GOAL}, aim {FLOOR_AIM}, from 16 MB on):"
    )
    return [text, "", *_table(header, lines)]


def _speeds(results: Results, images: str | None) -> list[str]:
    text = []
    for problem, tokens in results.problems.items():
        everyone = [impl for impl in results.contenders() if any(impl in point for point in tokens.values())]
        peers = [impl for impl in everyone if impl in _PEERS]
        header = [
            "m",
            *(results.label(impl) for impl in everyone),
            "roofline",
            *(f"vs {results.label(p)}" for p in peers),
        ]
        header += ["vs fastest peer"] if len(peers) > 1 else []
        lines = []
        for m, point in tokens.items():
            ours = point[OURS]
            cells = [str(m), *(_us(point.get(impl)) for impl in everyone), f"{ours['roofline']:.0%}"]
            cells += [_number(ratio(point, (peer,)) or None) for peer in peers]
            cells += [_number(ratio(point, peers) or None)] if len(peers) > 1 else []
            lines.append([*cells, str(ours["clock_mhz"] or "")])
        text += [f"#### {problem}", ""]
        if images is not None:
            text += [f"![Speed against m, {problem}]({images}/{_file_name(problem)})", ""]
        text += _table([*header, "SM MHz"], lines)
    return text


def _types(results: Results) -> list[str]:
    kinds: dict[str, list[float]] = {}
    lines = []
    tokens = sorted({m for _, m, _ in results.points()})
    for problem, of_problem in results.problems.items():
        cells = [problem]
        for m in tokens:
            point = of_problem.get(m, {})
            found = ratio(point, (HUMMING,))
            if found is not None:
                kinds.setdefault(problem.split(maxsplit=1)[1], []).append(found)
            cells.append(_us(point.get(OURS)) + (f" ({found:.2f})" if found else ""))
        lines.append(cells)
    text = [f"µs, and in brackets how many times as fast as {results.label(HUMMING)}:", ""]
    text += _table(["problem", *(f"m = {m}" for m in tokens)], lines)
    every = [each for ratios in kinds.values() for each in ratios]
    if every:
        means = [[kind, _number(_mean(ratios)), _number(min(ratios))] for kind, ratios in kinds.items()]
        means.append(["all", _number(_mean(every)), _number(min(every))])
        text += [
            f"Geometric means over shapes and m; goal {TYPES_GOAL} over all: {_verdict(_mean(every) >= TYPES_GOAL)}."
        ]
        text += ["", *_table(["types", "geometric mean", "least"], means)]
    return text


def _every_m(results: Results) -> list[str]:
    """L1: nowhere slower than an unquantized product."""
    lines = []
    for problem, m, point in results.points():
        found = ratio(point, (CUBLAS,))
        verdict = "" if found is None else _verdict(found >= EVERY_M_GOAL)
        lines.append([problem, str(m), _us(point[OURS]), _us(point.get(CUBLAS)), _number(found), verdict])
    return _table(["problem", "m", f"{OURS} µs", "cuBLAS µs", "ratio", f"≥ {EVERY_M_GOAL}"], lines)


def _steps(results: Results) -> list[str]:
    """One token more than a power of two costs no more than the next one does."""
    lines = []
    for problem, tokens in results.problems.items():
        for m in sorted(tokens):
            step = 1 << (m - 1).bit_length()
            if m != step // 2 + 1 or m - 1 not in tokens or step not in tokens:
                continue
            rows = [tokens[at][OURS] for at in (m - 1, m, step)]
            met = rows[1]["us"] <= rows[2]["us"] * 1.02  # two measurements of the same tile differ that much
            lines.append([problem, str(m), *map(_us, rows), _verdict(met and all(row["within"] for row in rows))])
    return _table(["problem", "m", "µs at m - 1", "µs at m", "µs at the next power of two", "no more than it"], lines)


def _host(rows: Sequence[Row]) -> list[str]:
    last: dict[tuple[str, int, int], Row] = {}
    for row in sorted((row for row in rows if "host_us" in row), key=lambda row: _when(row["date"])):
        last[row["impl"], row["n"], row["k"]] = row
    lines = []
    for (impl, n, k), row in last.items():
        judged = impl == OURS and not _on_cpu(row)
        verdict = _verdict(row["host_us"] <= HOST_GOAL_US) if judged else ""
        lines.append([impl, f"{n}x{k}", f"{row['host_us']:.2f}", f"{row['host_us_min']:.2f}", verdict])
    return _table(["call", "nxk", "µs a call", "fastest batch", f"≤ {HOST_GOAL_US}"], lines) if lines else []


def _provenance(rows: Sequence[Row], command: str) -> list[str]:
    """Says where the numbers are from, and which command wrote this."""

    def every(key: str) -> str:
        return ", ".join(dict.fromkeys(str(row[key]) for row in rows if row.get(key) is not None))

    clocks = [row["clock_mhz"] for row in rows if row.get("mode") == "sustained" and row.get("clock_mhz")]
    versions = {"humming_cutlass": "version", "torch": "torch", "CUDA": "cuda", "Python": "python"}
    peers = dict.fromkeys(
        row["impl"].replace("humming-", "Humming ") for row in rows if row["impl"].startswith("humming-")
    )
    checked = [row["within"] for row in rows if "within" in row]
    failures = dict.fromkeys(f"{row['impl']} at {row['n']}x{row['k']}" for row in rows if "error" in row)
    failed = sum("error" in row for row in rows)
    lines = [
        f"Generated by `{command}`.",
        "",
        f"- GPU: {every('gpu')}"
        + (f"; SM clock of the sustained points {min(clocks)} … {max(clocks)} MHz" if clocks else ""),
        f"- versions: {', '.join([*(f'{name} {every(key)}' for name, key in versions.items()), *peers])}",
        f"- date: {', '.join(sorted({row['date'] for row in rows}))}",
        *(f"- measured by `{each}`" for each in dict.fromkeys(row["command"] for row in rows)),
        f"- {sum(checked)} of {len(checked)} points within their bound of accuracy",
        *([f"- {failed} points without a result: {', '.join(failures)}"] if failed else []),
    ]
    return [*lines, ""]


def summary(rows: Sequence[Row], *, images: str | None = None) -> str:
    """Returns every table that the rows fill, as Markdown.

    Args:
        rows: as `read_rows` returns them.
        images: the folder of `pictures`, as a page sees it; None leaves them out.
    """
    sections: list[tuple[str, Callable[[Results], list[str]], tuple[str, ...]]] = [
        ("Goals", lambda results: _goals(results) + _floor(results), ("", "hopper")),
        ("Speed by shape", lambda results: _speeds(results, images), ("", "hopper")),
        ("Other types", _types, ("hopper-types",)),
        ("Every m beside cuBLAS", _every_m, ("hopper-edges/every-m",)),
        ("Few rows, long k", lambda results: _speeds(results, None), ("hopper-edges/few-rows",)),
        ("One token more than a tile", _steps, ("hopper-edges/steps",)),
    ]
    text = []
    for title, write, suites in sections:
        results = Results(rows, suites)
        lines = write(results) if results else []
        if lines:
            text += [f"### {title}", "", *lines]
        if title == "Goals" and images is not None and _relative(results):
            text += [f"![Speed relative to the fastest peer]({images}/ratio.svg)", ""]
    host = _host(rows)
    if host:
        text += ["### Host time of an eager call", "", *host]
    return "\n".join(text)


def page(rows: Sequence[Row], command: str) -> str:
    """Returns what stands between the markers of docs/performance.md.

    Args:
        rows: as `read_rows` returns them.
        command: what writes the page.
    """
    return "\n".join(_provenance(rows, command)) + "\n" + summary(rows, images="images")


def readme_table(rows: Sequence[Row], sources: Sequence[str], *, shape: str = "8192x8192") -> str:
    """Returns what stands between the markers of README.md: the times of one shape.

    Raises:
        ArgumentError: the rows hold nothing of that shape.
    """
    results = _main(rows)
    problem = next((name for name in results.problems if name.split()[0] == shape), None)
    if problem is None:
        raise ArgumentError(explain("results", "no row of it", f"rows of {shape} by {OURS}"))
    tokens = results.problems[problem]
    row = next(iter(tokens.values()))[OURS]
    links = [f"[rows]({source})" for source in sources]
    group = "one scale a row" if row["group"] == -1 else f"groups of {row['group']}"
    where, how = f"One {row['gpu']}", "cold L2, CUDA graphs"
    if _on_cpu(row):
        name = row["gpu"].removeprefix("none").strip(" ()")
        where, how = f"No GPU but {name}, {row.get('threads', '?')} threads", "cold caches"
    title = (
        f"{where}, {row['date'][:10]}, {shape}, {row['a']} x {row['b']} in {group}, {how}, µs "
        f"({', '.join(links)}, [notes](bench/NOTES.md)):"
    )
    lines = [
        [results.label(impl), *(_us(point.get(impl)) for point in tokens.values())]
        for impl in results.contenders()
        if any(impl in point for point in tokens.values())
    ]
    return "\n".join([title, "", *_table(["m", *map(str, tokens)], lines)])


def insert(text: str, block: str, name: str) -> str:
    """Returns `text` with `block` between the two markers.

    Args:
        text: a page.
        block: Markdown.
        name: what to call the page in an error.

    Raises:
        ArgumentError: the page has not both markers, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ArgumentError(explain(name, "a page without the two markers", f"one {BEGIN} and one {END} after it"))
    return f"{before}{BEGIN}\n{block.strip()}\n{END}{after}"


def _file_name(problem: str) -> str:
    return problem.replace(" x ", "_").replace(" ", "_") + ".svg"


def pictures(rows: Sequence[Row], directory: pathlib.Path) -> list[pathlib.Path]:
    """Writes an SVG for each problem, TFLOP/s against m with the roofline, and one of ratios, `ratio.svg`.

    Args:
        rows: as `read_rows` returns them.
        directory: where to write; created where it is missing.

    Returns:
        The files.

    Raises:
        ArgumentError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ArgumentError(
            explain("report", "no matplotlib", "matplotlib", 'pip install "humming-cutlass[bench]"')
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    results = _main(rows)
    paths = []

    def draw(
        name: str, title: str, y: str, scale: str, curves: Iterable[tuple[str, dict[int, float], dict[str, Any]]]
    ) -> None:
        # The same rows make the same file: no date and no random identifiers in it.
        with pyplot.rc_context({"svg.hashsalt": "humming_cutlass", "svg.fonttype": "none"}):
            figure, axes = pyplot.subplots(figsize=(7, 4.5))
            for label, values, style in curves:
                axes.plot(list(values), list(values.values()), label=label, **style)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set(yscale=scale, xlabel="m (tokens)", ylabel=y)
            axes.set_title(title, fontsize=10)
            axes.grid(visible=True, which="both", alpha=0.3)
            axes.legend(fontsize=8)
            figure.tight_layout()
            figure.savefig(directory / name, metadata={"Date": None})
            pyplot.close(figure)
        paths.append(directory / name)

    for problem, tokens in results.problems.items():
        curves: list[tuple[str, dict[int, float], dict[str, Any]]] = []
        for impl in results.contenders():
            speeds = {m: point[impl]["tflops"] for m, point in tokens.items() if impl in point}
            style = {"linestyle": ":", "color": "gray"} if impl == FLOOR else {"marker": "o", "markersize": 4}
            curves.append((results.label(impl), speeds, style))
        bound = {
            m: point[OURS]["tflops"] * point[OURS]["us"] / point[OURS]["roofline_us"] for m, point in tokens.items()
        }
        curves.append(("roofline", bound, {"linestyle": "--", "color": "black"}))
        gpu = next(iter(tokens.values()))[OURS]["gpu"]
        draw(_file_name(problem), f"{problem}\n{gpu}", "TFLOP/s", "log", curves)
    if relative := _relative(results):
        title = "Speed relative to the fastest peer"
        marks = {"marker": "o", "markersize": 4}
        draw("ratio.svg", title, "ratio", "linear", [(name, ratios, marks) for name, ratios in relative.items()])
    return paths
