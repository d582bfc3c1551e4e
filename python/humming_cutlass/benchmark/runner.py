"""Runs the benchmark: every contender on every problem and m, checked against a reference in the same run."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from humming_cutlass import ops, planner
from humming_cutlass._version import __version__
from humming_cutlass.benchmark.contenders import CONTENDERS, Contender, UnavailableError
from humming_cutlass.benchmark.problem import Problem, RandomWeight, error_bound
from humming_cutlass.benchmark.roofline import Roofline, roofline
from humming_cutlass.benchmark.timing import SUSTAINED_FROM, rotation_bytes, time_calls

__all__ = ["Plan", "environment", "run"]

_CHECKED_ROWS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a benchmark run covers.

    Attributes:
        problems: the weights.
        tokens: the values of m.
        contenders: names from `CONTENDERS`.
        device: where to run.
        repeats: measurements a point; the median is reported.
        bandwidth_gbps: memory bandwidth for the roofline; None takes a known one or measures it.
        peak_tflops: arithmetic peak likewise.
    """

    problems: Sequence[Problem]
    tokens: Sequence[int]
    contenders: Sequence[str]
    device: torch.device
    repeats: int = 5
    bandwidth_gbps: float | None = None
    peak_tflops: float | None = None

    @property
    def points(self) -> int:
        """How many rows the run produces."""
        return len(self.problems) * len(self.tokens) * len(self.contenders)


def environment(device: torch.device) -> dict[str, Any]:
    """Returns what every row says about the run: GPU, versions, date and command."""
    cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if cuda else f"none ({platform.machine()} CPU)",
        "version": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "humming_cutlass", *sys.argv[1:]]),
    }


def run(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yields one row a point, in the order problem, contender, m.

    A contender that cannot compute a problem yields rows with `error` instead of times. `within` says whether the
    relative error is inside `error_bound`.
    """
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.no_grad():
            yield from _run(plan)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def _run(plan: Plan) -> Iterator[dict[str, Any]]:
    common = environment(plan.device)
    ceilings: dict[torch.dtype, Roofline] = {}
    if plan.device.type == "cuda" and "humming_cutlass" in plan.contenders:
        # One parallel build before the first measurement, instead of one build per type.
        device = ops.planner_device(plan.device.index or 0)
        ops.prepare([c for p in plan.problems for c in planner.schedules(p.types, device)])
    for index, problem in enumerate(plan.problems):
        if problem.dtype not in ceilings:
            ceilings[problem.dtype] = roofline(
                plan.device, problem.dtype, bandwidth_gbps=plan.bandwidth_gbps, peak_tflops=plan.peak_tflops
            )
        weight = RandomWeight.draw(problem, plan.device, seed=index)
        reference = weight.dequantize().t()
        for name in plan.contenders:
            base = common | _words(problem) | {"impl": name}
            try:
                contender = CONTENDERS[name](weight, rotation_bytes(plan.device))
            except UnavailableError as error:
                yield from (base | {"m": m, "error": str(error)} for m in plan.tokens)
                continue
            base["impl"] = contender.impl
            for m in plan.tokens:
                row = _point(plan, contender, weight, reference, m, ceilings[problem.dtype])
                yield base | row
            del contender


def _words(problem: Problem) -> dict[str, Any]:
    types = problem.types
    return {
        "a": types.element_a,
        "b": types.element_b,
        "d": types.element_d,
        "scale": types.element_scale,
        "zero": types.element_zero,
        "group": types.group_size,
        "n": problem.n,
        "k": problem.k,
    }


def _point(
    plan: Plan, contender: Contender, weight: RandomWeight, reference: torch.Tensor, m: int, ceiling: Roofline
) -> dict[str, Any]:
    problem, device = weight.problem, plan.device
    generator = torch.Generator(device=device)
    generator.manual_seed(m)
    a = torch.randn(m, problem.k, device=device, generator=generator).to(problem.dtype)
    a = a.to(contender.input_dtype(weight))
    out = torch.full((m, problem.n), float("nan"), device=device, dtype=contender.output_dtype(weight))
    calls = contender.calls(a, out)
    # A rotation over wrong copies would measure nothing: the last copy is checked too.
    for call in (calls[-1], calls[0]):
        out.fill_(float("nan"))
        call()
        error = _relative_error(a, out, reference)
        if not error <= error_bound(problem.types):
            break
    timing = time_calls(calls, device=device, sustained=m >= SUSTAINED_FROM, repeats=plan.repeats)
    operations = 2 * m * problem.n * problem.k
    moved = contender.weight_bytes + a.numel() * a.element_size() + out.numel() * out.element_size()
    bound_us = ceiling.us(moved_bytes=moved, operations=operations)
    return {
        "m": m,
        "us": round(timing.us, 3),
        "us_min": round(timing.us_min, 3),
        "tflops": round(operations / timing.us / 1e6, 2),
        "gbps": round(moved / timing.us / 1e3, 1),
        "rel_err": float(f"{error:.3g}"),
        "within": error <= error_bound(problem.types),
        "bytes": moved,
        "roofline_us": round(bound_us, 3),
        "roofline": round(bound_us / timing.us, 4),
        "bandwidth_gbps": round(ceiling.bandwidth_gbps, 1),
        "peak_tflops": round(ceiling.peak_tflops, 2),
        "ceilings": ceiling.source,
        "mode": timing.mode,
        "repeats": timing.repeats,
        "calls": timing.calls,
        "copies": len(calls),
        "clock_mhz": timing.clock_mhz,
        "kernel": contender.kernel(m),
    }


def _relative_error(a: torch.Tensor, out: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns |out - a @ reference| / |a @ reference| over up to 256 rows; infinite where a value is not finite."""
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    m = a.shape[0]
    if m == 0:
        return 0.0
    rows = torch.unique(torch.linspace(0, m - 1, min(m, _CHECKED_ROWS), device=a.device).round().long())
    expected = a[rows].float() @ reference
    return float((out[rows].float() - expected).norm() / expected.norm().clamp_min(1e-30))
