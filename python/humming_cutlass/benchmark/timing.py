"""How a call is timed: cold caches, many calls in one CUDA graph, the median of repeats.

A kernel that reads a weight which the previous call left in the L2 cache measures the cache. So every contender
rotates over copies of its weight that together exceed the L2 several times over. Launch overhead is kept out by
recording the calls into a CUDA graph of at least 2 ms. From m = 512 on the GPU runs at its power limit, and a
burst of a few milliseconds flatters: those points are replayed for at least 0.3 s (`sustained`).
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

__all__ = ["SUSTAINED_FROM", "Timing", "rotation_bytes", "sm_clock_mhz", "time_calls"]

SUSTAINED_FROM = 512
"""From this m on a point is timed for `SUSTAINED_SECONDS`, at the clock that the power limit allows."""
SUSTAINED_SECONDS = 0.3
GRAPH_SECONDS = 2e-3
MAX_NODES = 512

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """One measured point.

    Attributes:
        us: median microseconds a call.
        us_min: the fastest repeat.
        mode: `cold` (a burst) or `sustained`.
        repeats: how many repeats the median is of.
        calls: calls in a repeat.
        clock_mhz: the SM clock while the last repeat ran; None where it cannot be read.
    """

    us: float
    us_min: float
    mode: str
    repeats: int
    calls: int
    clock_mhz: int | None


def rotation_bytes(device: torch.device) -> int:
    """Returns how many bytes of weights to rotate over: 4 times the L2 and at least 240 MB; 64 MB on a CPU."""
    if device.type != "cuda":
        return 64 << 20
    return max(240_000_000, 4 * int(torch.cuda.get_device_properties(device).L2_cache_size))


def sm_clock_mhz(device: torch.device) -> int | None:
    """Returns the SM clock in MHz, read through NVML; None where there is no NVML."""
    if device.type != "cuda":
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, clock = ctypes.c_void_p(), ctypes.c_uint()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    sm_clock = 1  # NVML_CLOCK_SM
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)):
        return None
    return None if nvml.nvmlDeviceGetClockInfo(handle, sm_clock, ctypes.byref(clock)) else clock.value


def time_calls(calls: Sequence[Call], *, device: torch.device, sustained: bool = False, repeats: int = 5) -> Timing:
    """Times `calls`, executed in turn.

    Args:
        calls: equal work on different copies of the weight.
        device: where they run.
        sustained: whether to run for at least `SUSTAINED_SECONDS`.
        repeats: how many measurements to take the median of.
    """
    return (_time_cuda if device.type == "cuda" else _time_cpu)(calls, device, sustained, repeats)


def _time_cuda(calls: Sequence[Call], device: torch.device, sustained: bool, repeats: int) -> Timing:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
        torch.cuda.synchronize(device)
        start.record()
        for call in calls[:8]:
            call()
        end.record()
        torch.cuda.synchronize(device)
    estimate = max(start.elapsed_time(end) / 1e3 / min(len(calls), 8), 1e-6)
    nodes = min(MAX_NODES, max(len(calls), math.ceil(GRAPH_SECONDS / estimate)))
    nodes = math.ceil(nodes / len(calls)) * len(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(nodes):
            calls[i % len(calls)]()
    torch.cuda.synchronize(device)

    def replay(count: int) -> float:
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end)) / 1e3

    with torch.cuda.stream(stream):
        replay(1)
        once = max(replay(1), 1e-6)
        inner = max(1, math.ceil((SUSTAINED_SECONDS if sustained else 0.024) / repeats / once))
        seconds = [replay(inner) / inner / nodes for _ in range(repeats)]
        # The clock is read while work that nobody times keeps the GPU as busy as it just was.
        for _ in range(inner):
            graph.replay()
        clock = sm_clock_mhz(device)
        torch.cuda.synchronize(device)
    return Timing(
        us=statistics.median(seconds) * 1e6,
        us_min=min(seconds) * 1e6,
        mode="sustained" if sustained else "cold",
        repeats=repeats,
        calls=inner * nodes,
        clock_mhz=clock,
    )


def _time_cpu(calls: Sequence[Call], device: torch.device, sustained: bool, repeats: int) -> Timing:
    del device, sustained  # a CPU has no burst that lasts milliseconds only
    calls[0]()
    begin = time.perf_counter()
    calls[-1]()
    estimate = max(time.perf_counter() - begin, 1e-6)
    count = max(1, min(MAX_NODES, math.ceil(0.02 / estimate)))
    seconds = []
    for repeat in range(repeats):
        begin = time.perf_counter()
        for i in range(count):
            calls[(repeat * count + i) % len(calls)]()
        seconds.append((time.perf_counter() - begin) / count)
    return Timing(
        us=statistics.median(seconds) * 1e6,
        us_min=min(seconds) * 1e6,
        mode="cold",
        repeats=repeats,
        calls=count,
        clock_mhz=None,
    )
