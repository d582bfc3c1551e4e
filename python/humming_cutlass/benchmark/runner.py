"""Runs the benchmark: every contender on every problem and m, checked against a reference in the same run."""

from __future__ import annotations

import dataclasses
import datetime
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from humming_cutlass import ops, planner
from humming_cutlass._version import __version__
from humming_cutlass.benchmark import humming
from humming_cutlass.benchmark.contenders import CONTENDERS, FLOOR, PDL, Contender, UnavailableError
from humming_cutlass.benchmark.problem import Problem, RandomWeight, error_bound
from humming_cutlass.benchmark.roofline import Roofline, roofline
from humming_cutlass.benchmark.timing import (
    SUSTAINED_FROM,
    Recording,
    Timing,
    record,
    rotation_bytes,
    time_together,
)

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
        limits: the values of m for which a contender is timed, for those that are not timed at all of them.
        suite: what the rows are for, see `suites`; empty where the user chose the points.
        repeats: measurements a point; the median is reported.
        bandwidth_gbps: memory bandwidth for the roofline; None takes a known one or measures it.
        peak_tflops: arithmetic peak likewise.
    """

    problems: Sequence[Problem]
    tokens: Sequence[int]
    contenders: Sequence[str]
    device: torch.device
    limits: Mapping[str, range] = dataclasses.field(default_factory=dict)
    suite: str = ""
    repeats: int = 5
    bandwidth_gbps: float | None = None
    peak_tflops: float | None = None

    def contenders_at(self, m: int) -> list[str]:
        """Returns who is timed for m tokens: where arithmetic limits, reading the weight and launching say nothing."""
        return [
            name
            for name in self.contenders
            if (name not in (FLOOR, PDL) or m < SUSTAINED_FROM) and (name not in self.limits or m in self.limits[name])
        ]

    @property
    def points(self) -> int:
        """How many rows the run produces."""
        return len(self.problems) * sum(len(self.contenders_at(m)) for m in self.tokens)


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


def run(plans: Sequence[Plan]) -> Iterator[dict[str, Any]]:
    """Yields one row a point, in the order plan, problem, m, contender, as soon as it is measured.

    The contenders of one problem and m are timed together. One that cannot compute a problem, or fails, yields rows
    with `error` instead of times, and `unavailable`: whether it was never meant to run here. `within` says whether the
    relative error is inside `error_bound`.
    """
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.no_grad():
            _compile(plans)
            ceilings: dict[torch.dtype, Roofline] = {}
            for common, plan in [(environment(plan.device), plan) for plan in plans]:
                for row in _run(plan, ceilings):
                    yield common | row
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


def _compile(plans: Sequence[Plan]) -> None:
    """Compiles in parallel, before the first measurement, what would be compiled at the first call of each type."""
    for plan in plans:
        if plan.device.type != "cuda":
            continue
        if any(name.startswith("humming_cutlass") for name in plan.contenders):
            device = ops.planner_device(plan.device.index or 0)
            ops.prepare([c for p in plan.problems for c in planner.schedules(p.types, device)])
        if "humming" in plan.contenders:
            humming.precompile(plan.problems, plan.tokens, plan.device)


def _run(plan: Plan, ceilings: dict[torch.dtype, Roofline]) -> Iterator[dict[str, Any]]:
    for index, problem in enumerate(plan.problems):
        if problem.dtype not in ceilings:
            ceilings[problem.dtype] = roofline(
                plan.device, problem.dtype, bandwidth_gbps=plan.bandwidth_gbps, peak_tflops=plan.peak_tflops
            )
        weight = RandomWeight.draw(problem, plan.device, seed=index)
        ready: dict[str, Contender | Exception] = {}
        for name in plan.contenders:
            try:
                ready[name] = CONTENDERS[name](weight, rotation_bytes(plan.device))
            except Exception as error:  # a peer's failure, of whatever kind, is no reason to time nobody
                ready[name] = error
        for m in plan.tokens:
            for row in _point(plan, weight, ready, m, ceilings[problem.dtype]):
                yield {"suite": plan.suite} | _words(problem) | row


def _words(problem: Problem) -> dict[str, Any]:
    types = problem.types
    return {
        "a": types.element_a,
        "b": types.element_b,
        "d": types.element_d,
        "scale": types.element_scale,
        "zero": types.element_zero,
        "group": types.group_size,
        "global_scale": problem.global_scale,
        "n": problem.n,
        "k": problem.k,
    }


def _point(
    plan: Plan, weight: RandomWeight, ready: dict[str, Contender | Exception], m: int, ceiling: Roofline
) -> Iterator[dict[str, Any]]:
    problem, device = weight.problem, plan.device
    generator = torch.Generator(device=device)
    generator.manual_seed(m)
    a = torch.randn(m, problem.k, device=device, generator=generator).to(problem.dtype)
    rows = torch.unique(torch.linspace(0, m - 1, min(m, _CHECKED_ROWS), device=device).round().long())
    expected = a[rows].float() @ weight.reference.t()
    lined_up: list[tuple[Contender, Recording, float]] = []
    for name in plan.contenders_at(m):
        contender = ready[name]
        if not isinstance(contender, Contender):
            yield {"impl": name, "m": m} | _failure(contender)
            continue
        try:
            out = torch.empty(m, problem.n, device=device, dtype=contender.output_dtype(weight))
            calls = contender.calls(a.to(contender.input_dtype(weight)), out)
            # A rotation over wrong copies would measure nothing: the last copy is checked too.
            error = max(contender.error(call, out, rows, expected) for call in (calls[-1], calls[0]))
            lined_up.append((contender, record(calls, device), error))
        except Exception as failure:
            yield {"impl": contender.impl, "m": m} | _failure(failure)
    timings = time_together(
        [recording for _, recording, _ in lined_up],
        device=device,
        sustained=m >= SUSTAINED_FROM,
        repeats=plan.repeats,
    )
    for (contender, _, error), timing in zip(lined_up, timings, strict=True):
        yield {"impl": contender.impl, "m": m} | _measured(contender, weight, m, error, timing, ceiling)


def _failure(error: Exception) -> dict[str, Any]:
    unavailable = isinstance(error, UnavailableError)
    return {"error": str(error) if unavailable else f"{type(error).__name__}: {error}", "unavailable": unavailable}


def _digits(value: float) -> float:
    """Returns a number with as many digits as a measurement has; a small one does not become zero."""
    return float(f"{value:.5g}")


def _measured(
    contender: Contender, weight: RandomWeight, m: int, error: float, timing: Timing, ceiling: Roofline
) -> dict[str, Any]:
    problem = weight.problem
    operations = 2 * m * problem.n * problem.k
    activations = m * problem.k * contender.input_dtype(weight).itemsize
    moved = contender.weight_bytes + activations + m * problem.n * contender.output_dtype(weight).itemsize
    bound_us = ceiling.us(moved_bytes=moved, operations=operations)
    return {
        "us": round(timing.us, 3),
        "us_min": round(timing.us_min, 3),
        "tflops": _digits(operations / timing.us / 1e6),
        "gbps": _digits(moved / timing.us / 1e3),
        "rel_err": float(f"{error:.3g}"),
        "within": error <= contender.tolerance * error_bound(problem.types),
        "bytes": moved,
        "weight_bytes": contender.weight_bytes,
        "roofline_us": _digits(bound_us),
        "roofline": _digits(bound_us / timing.us),
        "bandwidth_gbps": round(ceiling.bandwidth_gbps, 1),
        "peak_tflops": round(ceiling.peak_tflops, 2),
        "ceilings": ceiling.source,
        "mode": timing.mode,
        "repeats": timing.repeats,
        "calls": timing.calls,
        "copies": len(contender.copies),
        "clock_mhz": timing.clock_mhz,
        "kernel": contender.kernel(m),
    }
