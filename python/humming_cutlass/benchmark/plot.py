"""Pictures and tables from a results file: speed against m beside the roofline, and ratios between implementations."""

from __future__ import annotations

import json
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from humming_cutlass.errors import ArgumentError, explain

__all__ = ["plot", "ratio_table", "read_rows"]

Row = dict[str, Any]


def read_rows(path: pathlib.Path) -> list[Row]:
    """Returns the rows of a JSON-lines file that hold a measurement.

    Raises:
        ArgumentError: the file is missing, a line is not JSON, or no line is a measurement.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ArgumentError(explain("results", str(path), f"a readable file ({error.strerror})")) from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except ValueError:
            raise ArgumentError(
                explain("results", f"{path}:{number}: {line[:40]!r}", "one JSON object a line")
            ) from None
        if "us" in row:
            rows.append(row)
    if not rows:
        raise ArgumentError(explain("results", f"{path} without a measurement", "lines written by bench --json"))
    return rows


def _problem(row: Row) -> str:
    group = "channel" if row["group"] == -1 else f"g{row['group']}"
    zero = "" if row.get("zero", "none") == "none" else f" z={row['zero']}"
    return f"{row['n']}x{row['k']} {row['a']} x {row['b']} {group}{zero}"


def _series(rows: Iterable[Row]) -> dict[str, dict[str, dict[int, Row]]]:
    """Returns problem -> impl -> m -> row; of equal points the last one counts."""
    series: dict[str, dict[str, dict[int, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        series[_problem(row)][row["impl"]][row["m"]] = row
    return series


def ratio_table(rows: Sequence[Row], *, ours: str = "humming_cutlass") -> str:
    """Returns a Markdown table a problem: microseconds of `ours`, and how many times faster it is than each other."""
    text = []
    for problem, implementations in _series(rows).items():
        if ours not in implementations:
            continue
        own = implementations[ours]
        others = [name for name in implementations if name != ours]
        text += [f"### {problem}", ""]
        text.append("| " + " | ".join(["m", "µs", "roofline", *(f"÷ {name}" for name in others)]) + " |")
        text.append("|" + "---|" * (3 + len(others)))
        for m in sorted(own):
            cells = [str(m), f"{own[m]['us']:.1f}", f"{own[m]['roofline']:.0%}"]
            for name in others:
                other = implementations[name].get(m)
                cells.append("" if other is None else f"{other['us'] / own[m]['us']:.2f}")
            text.append("| " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text)


def plot(rows: Sequence[Row], directory: pathlib.Path) -> list[pathlib.Path]:
    """Writes one SVG a problem: TFLOP/s against m, both logarithmic, with the roofline of `humming_cutlass`.

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
            explain("plot", "no matplotlib", "matplotlib", 'pip install "humming-cutlass[bench]"')
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for problem, implementations in _series(rows).items():
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        for name, points in sorted(implementations.items()):
            tokens = sorted(points)
            axes.plot(tokens, [points[m]["tflops"] for m in tokens], marker="o", label=name)
        bound = implementations.get("humming_cutlass") or next(iter(implementations.values()))
        tokens = sorted(bound)
        limit = [bound[m]["tflops"] * bound[m]["us"] / bound[m]["roofline_us"] for m in tokens]
        axes.plot(tokens, limit, color="black", linestyle="--", label="roofline")
        axes.set(xscale="log", yscale="log", xlabel="m (tokens)", ylabel="TFLOP/s", title=problem)
        axes.set_title(f"{problem}\n{next(iter(bound.values()))['gpu']}", fontsize=10)
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
        figure.tight_layout()
        path = directory / f"{problem.replace(' ', '_').replace('=', '')}.svg"
        figure.savefig(path)
        pyplot.close(figure)
        paths.append(path)
    return paths
