"""Host time: how long an eager call keeps the calling thread, of a layer with the allocation of its output."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from humming_cutlass.benchmark.runner import environment
from humming_cutlass.layer import HummingLayer

__all__ = ["SHAPES", "run"]

SHAPES = ((256, 256), (4096, 4096))
"""(n, k): one that the GPU computes faster than it is called, and one of a usual size."""


def run(device: torch.device, *, batches: int = 15, calls: int = 1000) -> Iterator[dict[str, Any]]:
    """Yields rows for each shape of `SHAPES` at m = 1: `HummingLayer` (int4, g128), `torch.nn.Linear`, `add_`.

    Hosts differ by far more than layers, hence `torch.Tensor.add_` of two single elements, whatever the shape: a launch
    without an allocation.

    A batch is not synchronized inside, so that nothing but the host is timed, and is shorter than the queue of a GPU
    (1024 launches), so that it never waits for one. On a CPU a call computes before it returns.

    Args:
        device: where the layers are.
        batches: how many batches to take the median of; they alternate between the contenders.
        calls: calls in a batch.
    """
    common = environment(device)
    for n, k in SHAPES:
        ours = HummingLayer(n, k, {"dtype": "int4", "group_size": 128}, torch_dtype=torch.bfloat16, device=device)
        weight = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        ours.load_from_unquantized(weight)
        ours.transform()
        linear = torch.nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
        x = torch.randn(1, k, device=device, dtype=torch.bfloat16)
        one, other = torch.zeros(2, 1, device=device, dtype=torch.bfloat16)
        contenders: dict[str, tuple[Callable[[torch.Tensor], object], torch.Tensor]] = {
            "humming_cutlass": (ours, x),
            "torch.nn.Linear": (linear, x),
            "torch.Tensor.add_": (one.add_, other),
        }
        seconds: dict[str, list[float]] = {impl: [] for impl in contenders}
        with torch.no_grad():
            for batch in range(batches + 1):  # the first one compiles and fills the allocator
                for impl, (function, argument) in contenders.items():
                    _synchronize(device)
                    begin = time.perf_counter()
                    for _ in range(calls):
                        function(argument)
                    if batch:
                        seconds[impl].append((time.perf_counter() - begin) / calls)
            _synchronize(device)
        for impl in contenders:
            yield common | {
                "suite": "host",
                "impl": impl,
                "a": "bfloat16",
                "b": "int4" if impl == "humming_cutlass" else "bfloat16",
                "group": 128 if impl == "humming_cutlass" else -1,
                "n": n,
                "k": k,
                "m": 1,
                "host_us": round(statistics.median(seconds[impl]) * 1e6, 3),
                "host_us_min": round(min(seconds[impl]) * 1e6, 3),
                "batches": batches,
                "calls": calls,
            }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
