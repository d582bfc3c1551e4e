"""Scenarios of test_concurrency_gpu.py that need a process of their own: one that may hang, and one that forks.

Usage: python gpu_scenarios.py NAME
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

N, K = 1024, 8192


@contextlib.contextmanager
def bounds() -> Iterator[None]:
    """The bounds of the GPU's mainloop: SM90 multiplies weights by group scales."""
    from humming_cutlass import ops, testing

    with testing.scaled_weights() if ops.planner_device(0).arch == "sm_90a" else contextlib.nullcontext():
        yield


def two_streams() -> None:
    """G1: one weight, two streams, 5000 calls on each, few tokens on one and many on the other; bit-exact, no hang."""
    import torch

    from humming_cutlass import ops, testing

    types = testing.make_types("int4", k=K, element_a="bfloat16", group_size=128)
    problem = testing.random_problem(types, 4096, N, K, device="cuda")
    weight = problem.packed
    assert ops.choose(weight, 1).split_k > 1, "the case is about sharing the workspace of split k"
    few, other, many = problem.a[:1], problem.a[1:2], problem.a
    small = testing.random_problem(types, 4, N, K, device="cuda")
    with bounds():
        small.check(ops.gemm(small.a, small.packed))
    for left, right in ((few, many), (few, other)):
        inputs = [left.clone(), right.clone()]
        expected = [ops.gemm(a, weight) for a in inputs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in inputs]
        wrong = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in inputs]
        torch.cuda.synchronize()
        for _ in range(5000):
            for stream, a, want, count in zip(streams, inputs, expected, wrong, strict=True):
                with torch.cuda.stream(stream):
                    count += (ops.gemm(a, weight) != want).any()
        torch.cuda.synchronize()
        assert [int(count) for count in wrong] == [0, 0], [int(count) for count in wrong]
    # Rows of the large product against a float64 one.
    rows = torch.arange(0, 4096, 64, device="cuda")
    exact = many[rows].double() @ torch.from_numpy(problem.weight()).cuda().T
    error = float((ops.gemm(many, weight)[rows].double() - exact).norm() / exact.norm())
    assert error < 4e-3, error


def fork() -> None:
    """G7: everything is imported before the fork, and the GPU is used first in the child, then in the parent."""
    import importlib

    import torch

    for name in ("_C", "benchmark", "build", "cli", "layer", "tune"):
        importlib.import_module(f"humming_cutlass.{name}")
    from humming_cutlass import ops, testing

    assert not torch.cuda.is_initialized()

    def work() -> None:
        types = testing.make_types("int4", k=256, element_a="bfloat16", group_size=128)
        problem = testing.random_problem(types, 16, 256, 256, device="cuda")
        with bounds():
            problem.check(ops.gemm(problem.a, problem.packed))

    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            try:
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    work()


if __name__ == "__main__":
    {"two_streams": two_streams, "fork": fork}[sys.argv[1]]()
