"""Sets of points: those with a name, what has to be shown on Hopper, and those of a user's words."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from humming_cutlass.benchmark.contenders import EXAMPLE, FLOOR, default_contenders
from humming_cutlass.benchmark.problem import Problem
from humming_cutlass.benchmark.runner import Plan
from humming_cutlass.errors import ArgumentError, explain

__all__ = ["SUITES", "Filter", "plans", "product"]

Shape = tuple[int, int]

_SHAPES: list[Shape] = [
    (28672, 8192),
    (8192, 28672),
    (8192, 8192),
    (10240, 8192),
    (4096, 14336),
    (6144, 4096),
    (4096, 4096),
]
_TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Filter:
    """What of a suite to run; an empty field keeps everything.

    Attributes:
        shapes: (n, k).
        tokens: values of m.
        contenders: names of `CONTENDERS`.
        weights: types of the weight, as `Problem.label` has them.
        groups: group sizes.
        activations: types of the activations.
        scales: types of the scales.
    """

    shapes: Sequence[Shape] = ()
    tokens: Sequence[int] = ()
    contenders: Sequence[str] = ()
    weights: Sequence[str] = ()
    groups: Sequence[int] = ()
    activations: Sequence[str] = ()
    scales: Sequence[str] = ()

    def keeps(self, problem: Problem) -> bool:
        """Whether `problem` is to be run."""
        types = problem.types
        return all(
            not wanted or found in wanted
            for found, wanted in (
                ((problem.n, problem.k), self.shapes),
                (problem.label, self.weights),
                (types.group_size, self.groups),
                (types.element_a, self.activations),
                (types.element_scale, self.scales),
            )
        )


def _int4(shapes: Iterable[Shape]) -> list[Problem]:
    return [Problem.create(n=n, k=k, element_a="bfloat16", weight="int4", group_size=128) for n, k in shapes]


def _hopper(device: torch.device) -> list[Plan]:
    contenders = default_contenders(leave_out=["dequantize+torch.matmul"])
    return [
        Plan(
            suite="hopper",
            problems=_int4(_SHAPES),
            tokens=_TOKENS,
            contenders=contenders,
            limits={EXAMPLE: range(16, 257)},
            device=device,
        )
    ]


def _hopper_types(device: torch.device) -> list[Plan]:
    """Every other type with channel scales and groups of 32; 4-bit floats with the scales they come with."""
    weights = ("int2", "int3", "int5", "int6", "int8", "uint4", "float6_e3m2", "float8_e4m3")
    problems = []
    for n, k in ((8192, 8192), (28672, 8192)):
        for a in ("bfloat16", "float16"):
            for weight in weights:
                for group in (-1, 32):
                    problems.append(Problem.create(n=n, k=k, element_a=a, weight=weight, group_size=group))
            for group, scale in ((32, "float8_e8m0"), (16, "float8_e4m3")):
                problems.append(
                    Problem.create(
                        n=n,
                        k=k,
                        element_a=a,
                        weight="float4_e2m1",
                        group_size=group,
                        scale=scale,
                        global_scale=scale == "float8_e4m3",
                    )
                )
    contenders = default_contenders(leave_out=["dequantize+torch.matmul", "torch.matmul", EXAMPLE, FLOOR])
    return [
        Plan(
            suite="hopper-types",
            problems=problems,
            tokens=[1, 16, 64, 256, 4096],
            contenders=contenders,
            device=device,
        )
    ]


def _hopper_edges(device: torch.device) -> list[Plan]:
    """Every size of m beside cuBLAS; few rows with a long k; one token more than a tile holds."""
    every_m = [1, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 4096, 16384]
    steps = [16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512]
    few_rows = [1, 16, 64, 256]
    ours = default_contenders(leave_out=["dequantize+torch.matmul", "torch.matmul", "humming", EXAMPLE, FLOOR])
    peers = [*ours, "humming", "torch.matmul"]
    return [
        Plan(
            suite="hopper-edges/every-m",
            problems=_int4([(4096, 4096)]),
            tokens=every_m,
            contenders=[*ours, "torch.matmul"],
            device=device,
        ),
        Plan(
            suite="hopper-edges/few-rows",
            problems=_int4([(576, 7168), (512, 7168)]),
            tokens=few_rows,
            contenders=peers,
            device=device,
        ),
        Plan(suite="hopper-edges/steps", problems=_int4([(8192, 8192)]), tokens=steps, contenders=ours, device=device),
    ]


SUITES: dict[str, Callable[[torch.device], list[Plan]]] = {
    "hopper": _hopper,
    "hopper-types": _hopper_types,
    "hopper-edges": _hopper_edges,
}
"""The suites by name."""


def product(device: torch.device, words: Filter) -> Plan:
    """Returns every combination of `words`; what they leave open is int4 in groups of 128 on the usual sizes.

    Raises:
        ArgumentError, UnsupportedError: words do not make a format, see `WeightConfig.resolve`.
    """
    gpu = device.type == "cuda"
    problems = [
        Problem.create(n=n, k=k, element_a=a, weight=weight, group_size=group, scale=scale)
        for a in words.activations or ("bfloat16",)
        for n, k in words.shapes or ((8192, 8192) if gpu else (4096, 4096),)
        for weight in words.weights or ("int4",)
        for group in words.groups or (128,)
        for scale in words.scales or (None,)
    ]
    usual = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192) if gpu else (1, 16, 128)
    return Plan(
        problems=problems,
        tokens=words.tokens or usual,
        contenders=words.contenders or default_contenders(),
        device=device,
    )


def _nearest(word: str, words: Iterable[str]) -> str:
    return difflib.get_close_matches(word, list(words), n=1, cutoff=0.0)[0]


def _check(name: str, every: Sequence[Plan], only: Filter) -> None:
    """Refuses a filter with a value that no point of the suite has."""
    problems = [problem for plan in every for problem in plan.problems]
    filters: list[tuple[str, Sequence[Any], list[Any]]] = [
        ("--shapes", [f"{n}x{k}" for n, k in only.shapes], [f"{p.n}x{p.k}" for p in problems]),
        ("--m", only.tokens, sorted(m for plan in every for m in plan.tokens)),
        ("--weights", only.weights, [p.label for p in problems]),
        ("--groups", only.groups, sorted(p.types.group_size for p in problems)),
        ("--activations", only.activations, [p.types.element_a for p in problems]),
        ("--scale", only.scales, [p.types.element_scale for p in problems]),
    ]
    for parameter, wanted, found in filters:
        allowed = list(dict.fromkeys(found))
        for value in wanted:
            if value in allowed:
                continue
            if isinstance(value, int):
                nearest = min(allowed, key=lambda known: abs(known - value))
            else:
                nearest = _nearest(value, allowed)
            words = f"{', '.join(map(str, allowed))} in suite {name}"
            raise ArgumentError(explain(parameter, value, words, nearest))


def plans(name: str, device: torch.device, only: Filter) -> list[Plan]:
    """Returns what to run of a suite.

    Raises:
        ArgumentError: there is no such suite, a filter names what the suite has not, or nothing of it is left.
    """
    if name not in SUITES:
        raise ArgumentError(explain("--suite", repr(name), ", ".join(SUITES), _nearest(name, SUITES)))
    chosen = []
    every = SUITES[name](device)
    _check(name, every, only)
    for plan in every:
        narrowed = dataclasses.replace(
            plan,
            problems=[problem for problem in plan.problems if only.keeps(problem)],
            tokens=[m for m in plan.tokens if not only.tokens or m in only.tokens],
            contenders=list(only.contenders) or plan.contenders,
        )
        if narrowed.points:
            chosen.append(narrowed)
    if not chosen:
        raise ArgumentError(explain("--suite", f"{name} and filters that leave nothing of it", "fewer filters"))
    return chosen
