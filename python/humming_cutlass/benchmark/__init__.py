"""The benchmark command's parts: problems, contenders, timing, rooflines, suites, reports. Needs torch."""

from humming_cutlass.benchmark.contenders import CONTENDERS
from humming_cutlass.benchmark.problem import Problem, parse_shape
from humming_cutlass.benchmark.runner import Plan, run
from humming_cutlass.benchmark.suites import SUITES, Filter, plans, product

__all__ = ["CONTENDERS", "SUITES", "Filter", "Plan", "Problem", "parse_shape", "plans", "product", "run"]
