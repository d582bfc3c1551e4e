"""Scenarios of test_concurrency_gpu.py that need a process of their own: one that may hang, and one that forks.

Usage: python gpu_scenarios.py NAME. Everything that they launch is in the cache of kernels: see `kernels`.
"""

from __future__ import annotations

import os
import sys
import time
import traceback

from humming_cutlass import planner
from humming_cutlass.config import GemmConfig, TypeConfig

N, K = 1024, 8192
CALLS = 5000
MANY = 1024
_start = time.monotonic()


def say(what: str) -> None:
    """Prints a step that is done: the last one printed tells where a scenario hangs."""
    print(f"{time.monotonic() - _start:6.2f} s, process {os.getpid()}: {what}", flush=True)


def _types() -> TypeConfig:
    from humming_cutlass import testing

    return testing.make_types("int4", k=K, element_a="bfloat16", group_size=128)


def kernels(device: planner.Device) -> list[GemmConfig]:
    """Returns every kernel that a scenario launches, for the caller to compile."""
    from gpu_tools import workspace_choice

    types = _types()
    return [*planner.schedules(types, device), workspace_choice(types, 1, N, K, device).config]


def two_streams() -> None:
    """G1: one weight, two streams, 5000 calls on each; bit-exact, no hang.

    First few tokens on one and many on the other, with the planner's kernels; then few on both, with a kernel that sums
    in a workspace.
    """
    import torch

    from gpu_tools import workspace_choice
    from humming_cutlass import ops, testing

    types = _types()
    problem = testing.random_problem(types, MANY, N, K, device="cuda")
    weight = problem.packed
    few, other, many = problem.a[:1], problem.a[1:2], problem.a
    split = workspace_choice(types, 1, N, K, ops.planner_device(0))
    planned, shared = {}, {"config": split.config, "split_k": split.split_k}
    say("the weight is packed")
    for left, right, options in ((few, many, planned), (few, other, shared)):
        inputs = [left.clone(), right.clone()]
        expected = [ops.gemm(a, weight, **options) for a in inputs]
        streams = [torch.cuda.Stream() for _ in inputs]
        wrong = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in inputs]
        torch.cuda.synchronize()
        say("the expected results are there")
        for _ in range(CALLS):
            for stream, a, want, count in zip(streams, inputs, expected, wrong, strict=True):
                with torch.cuda.stream(stream):
                    count += (ops.gemm(a, weight, **options) != want).any()
        say("all calls are enqueued")
        torch.cuda.synchronize()
        say("all calls are done")
        counts = [int(count) for count in wrong]
        assert counts == [0, 0], f"calls with a wrong result, by stream: {counts} of {CALLS}"
        # What every call was compared with is right.
        rows = slice(None, None, 64)
        values = torch.from_numpy(problem.weight()).cuda()
        for a, y in zip(inputs, expected, strict=True):
            exact = a[rows].double() @ values.T
            error = float((y[rows].double() - exact).norm() / exact.norm())
            assert error < testing.relative_bound("bfloat16", scaled_weights="bfloat16"), error


def fork() -> None:
    """G7: everything is imported before the fork, and the GPU is used first in the children, then in the parent."""
    import importlib

    import torch

    for name in ("_C", "benchmark", "build", "cli", "layer", "tune"):
        importlib.import_module(f"humming_cutlass.{name}")
    from gpu_tools import bounds
    from humming_cutlass import ops, testing

    assert not torch.cuda.is_initialized()
    say("all is imported")

    def work() -> None:
        torch.cuda.init()
        say("CUDA is initialised")
        problem = testing.random_problem(_types(), 16, 256, 256, device="cuda")
        say("the weight is packed")
        y = ops.gemm(problem.a, problem.packed)
        say("the kernel is launched")
        torch.cuda.synchronize()
        say("the kernel is done")
        with bounds():
            problem.check(y)

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
    say("the children are done")
    work()


if __name__ == "__main__":
    {"two_streams": two_streams, "fork": fork}[sys.argv[1]]()
