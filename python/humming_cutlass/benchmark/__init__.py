"""The benchmark command's parts: problems, contenders, timing, rooflines, plots. Needs torch."""

from humming_cutlass.benchmark.contenders import CONTENDERS
from humming_cutlass.benchmark.problem import Problem, parse_shape
from humming_cutlass.benchmark.runner import Plan, run

__all__ = ["CONTENDERS", "Plan", "Problem", "parse_shape", "run"]
