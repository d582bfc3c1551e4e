"""What the command `tune` does: times every kernel and split that the planner considers, beside the one it would take.

First all of them in short bursts, each checked against the reference before it is timed. Then the model's choice and
the fastest others again, longer: the fastest of many noisy times flatters, and what is stored must hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from humming_cutlass import ops, planner, support, tune
from humming_cutlass.benchmark.contenders import Call, HummingCutlass
from humming_cutlass.benchmark.problem import Problem, RandomWeight, error_bound
from humming_cutlass.benchmark.timing import SUSTAINED_FROM, rotation_bytes, time_calls
from humming_cutlass.errors import ArgumentError, UnsupportedError, explain

__all__ = ["LEAST_GAIN", "Plan", "open_device", "parse_types", "run"]

LEAST_GAIN = 0.02
"""What a choice must gain over the model's to be stored: more than two measurements of one kernel differ by."""
_FINALISTS = 4
_NEAR = 1.05
"""A finalist is at most this many times slower than the fastest, in the first round."""
_FIRST_REPEATS = 3
_CHECKED_ROWS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a tuning run covers.

    Attributes:
        problems: the weights.
        tokens: the values of m, at least 1; of those that share what is stored, the greatest is measured.
        device: where to run.
        gpu: what the planner and the file know of it.
        repeats: measurements in the second round; the median counts.
    """

    problems: Sequence[Problem]
    tokens: Sequence[int]
    device: torch.device
    gpu: tune.Gpu
    repeats: int = 5

    @property
    def measured_tokens(self) -> list[int]:
        """The values of m that are measured."""
        return list({tune.token_steps(m): m for m in sorted(self.tokens)}.values())

    @property
    def points(self) -> int:
        """How many calls are tuned."""
        return len(self.problems) * len(self.measured_tokens)


def open_device(index: int) -> tuple[torch.device, tune.Gpu]:
    """Returns a CUDA device for torch and for the file.

    Raises:
        ArgumentError: torch sees no such device.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= index < count:
        allowed = f"a CUDA device from 0 to {count - 1}" if count else "a CUDA device, and torch sees none"
        raise ArgumentError(explain("--device", index, allowed, "0" if count else None))
    torch.cuda.set_device(index)
    return torch.device("cuda", index), tune.gpu(index)


def parse_types(text: str, *, n: int, k: int, element_a: str) -> Problem:
    """Returns the problem for `TYPE[:gSIZE|:channel][:floating][:SCALE]`, e.g. `float4_e2m1:g32:float8_e8m0`.

    Raises:
        ArgumentError, UnsupportedError: the words do not make a format, or make one that no kernel computes.
    """
    dtype, *words = text.split(":")
    group_size, scale = -1, None
    seen: dict[str, str] = {}
    for word in words:
        is_group = word.startswith("g") and word[1:].isdecimal() and len(word) < 10
        kind = "group" if is_group or word == "channel" else "scale" if word in support.SCALE_TYPES else word
        if kind in seen:
            got = f"{text!r} with {seen[kind]} and {word}"
            raise ArgumentError(explain("--types", got, "each of group, scale and floating once"))
        seen[kind] = word
        if is_group:
            group_size = int(word[1:])
        elif word in support.SCALE_TYPES:
            scale = word
        elif word == "floating":
            dtype = f"{dtype}:floating"
        elif word != "channel":
            allowed = (
                f"TYPE, then any of gSIZE, channel, floating, {', '.join(support.SCALE_TYPES)}, each after a colon"
            )
            raise ArgumentError(explain("--types", repr(text), allowed, "int4:g128"))
    problem = Problem.create(n=n, k=k, element_a=element_a, weight=dtype, group_size=group_size, scale=scale)
    # What no GPU computes need not wait for one.
    if (reason := support.check_types(problem.types)) is not None:
        raise UnsupportedError(reason)
    return dataclasses.replace(problem, label=text)


def run(plan: Plan) -> Iterator[tuple[tune.Outcome, dict[str, Any]]]:
    """Yields, for each problem and m, what was measured, and the same as a row for people and programs.

    `failed` in a row counts the choices whose results were out of bounds; they are not timed and cannot be stored.
    """
    device = plan.gpu.device
    if plan.device.type == "cuda":
        # One parallel build before the first measurement.
        ops.prepare(list(dict.fromkeys(c for p in plan.problems for c in planner.schedules(p.types, device))))
    for index, problem in enumerate(plan.problems):
        with torch.no_grad():
            weight = RandomWeight.draw(problem, plan.device, seed=index)
            contender = HummingCutlass(weight, rotation_bytes(plan.device))
            reference = weight.dequantize().t()
            for m in plan.measured_tokens:
                outcome, failed, compared = _point(plan, problem, contender, reference, m)
                yield outcome, _row(problem, outcome) | {"candidates": compared, "failed": failed}
        del weight, contender, reference  # before the next ones are made


def _point(
    plan: Plan, problem: Problem, contender: HummingCutlass, reference: torch.Tensor, m: int
) -> tuple[tune.Outcome, int, int]:
    """Returns the outcome, how many choices were out of bounds, and how many there were."""
    device, n, k = plan.gpu.device, problem.n, problem.k
    generator = torch.Generator(device=plan.device)
    generator.manual_seed(m)
    a = torch.randn(m, k, device=plan.device, generator=generator).to(problem.dtype)
    out = torch.empty(m, n, device=plan.device, dtype=getattr(torch, problem.types.element_d))
    rows = torch.unique(torch.linspace(0, m - 1, min(m, _CHECKED_ROWS), device=plan.device).round().long())
    expected = a[rows].float() @ reference

    def calls(choice: planner.Choice) -> list[Call]:
        return [
            lambda w=w: ops.gemm(a, w, out=out, config=choice.config, split_k=choice.split_k)  # type: ignore[misc]
            for w in contender.copies
        ]

    def right(choice: planner.Choice) -> bool:
        every = calls(choice)
        for call in (every[0], every[-1]):
            out.fill_(float("nan"))
            call()
            found = out[rows].float()
            error = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
            if not (error <= error_bound(problem.types) and bool(torch.isfinite(out).all())):
                return False
        return True

    # As `ops` decides: what TMA cannot read, and scales that weights cannot be multiplied by, are not for SM90.
    free = (m == 1 or k * a.element_size() % 16 == 0) and contender.copies[0].scales_fit
    mainloops = None if free else support.MAINLOOPS_FOR_ANY_TENSORS
    model = planner.choose(problem.types, m, n, k, device, mainloops=mainloops)
    every = planner.candidates(problem.types, m, n, k, device, mainloops=mainloops)
    times: dict[planner.Choice, float] = {}
    for choice in every:
        if right(choice):
            times[choice] = time_calls(calls(choice), device=plan.device, repeats=_FIRST_REPEATS).us
    failed = len(every) - len(times)
    if model not in times:  # a wrong kernel is no measure of the others
        return _outcome(plan, m, problem, model, float("nan"), model, float("nan")), failed, len(every)
    fastest = sorted(times, key=lambda choice: times[choice])
    finalists = [choice for choice in fastest[:_FINALISTS] if times[choice] <= _NEAR * times[fastest[0]]]
    final = {
        choice: time_calls(calls(choice), device=plan.device, sustained=m >= SUSTAINED_FROM, repeats=plan.repeats).us
        for choice in dict.fromkeys([model, *finalists])
    }
    best = min(final, key=lambda choice: final[choice])
    return _outcome(plan, m, problem, model, final[model], best, final[best]), failed, len(every)


def _outcome(
    plan: Plan, m: int, problem: Problem, model: planner.Choice, model_us: float, best: planner.Choice, best_us: float
) -> tune.Outcome:
    return tune.Outcome(
        gpu=plan.gpu,
        m=m,
        n=problem.n,
        k=problem.k,
        model=model,
        model_us=model_us,
        best=best,
        best_us=best_us,
        keep=model_us > (1 + LEAST_GAIN) * best_us,
    )


def _row(problem: Problem, outcome: tune.Outcome) -> dict[str, Any]:
    def us(value: float) -> float | None:
        return None if value != value else round(value, 3)

    return {
        "gpu": outcome.gpu.name,
        "types": problem.label,
        "a": problem.types.element_a,
        "n": outcome.n,
        "k": outcome.k,
        "m": outcome.m,
        "model": outcome.model.config.name,
        "model_split_k": outcome.model.split_k,
        "model_us": us(outcome.model_us),
        "best": outcome.best.config.name,
        "best_split_k": outcome.best.split_k,
        "best_us": us(outcome.best_us),
        "gain": us(outcome.model_us / outcome.best_us - 1),
        "stored": outcome.keep,
    }
