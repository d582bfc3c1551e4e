"""How calls are timed: cold caches, many calls in one CUDA graph, the median of repeats, contenders side by side.

A kernel that reads a weight which the previous call left in the L2 cache measures the cache. So every contender
rotates over copies of its weight that together exceed the L2 several times over. Launch overhead is kept out by
recording the calls into a CUDA graph of about 2 ms. Repeats of the contenders of one point alternate. From m = 512 on
the GPU runs at its power limit, and a burst of a few milliseconds flatters: there each contender runs back to back
for at least 0.3 s, after 0.1 s that do not count (`sustained`), one after the other without a pause.
"""

from __future__ import annotations

import abc
import ctypes
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

__all__ = [
    "SUSTAINED_FROM",
    "Recording",
    "Timing",
    "record",
    "rotation_bytes",
    "sm_clock_mhz",
    "time_calls",
    "time_together",
]

SUSTAINED_FROM = 512
"""From this m on a point is timed for `SUSTAINED_SECONDS`, at the clock that the power limit allows."""
SUSTAINED_SECONDS = 0.3
SETTLE_SECONDS = 0.1
COLD_SECONDS = 4e-3
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
        clock_mhz: the SM clock while it ran, the median of what was read; None where it cannot be read.
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


@functools.cache
def _nvml(uuid: str) -> tuple[ctypes.CDLL, ctypes.c_void_p] | None:
    """Returns NVML and its handle of a GPU; None where there is no NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    return nvml, handle


def sm_clock_mhz(device: torch.device) -> int | None:
    """Returns the SM clock in MHz, read through NVML; None where there is no NVML."""
    if device.type != "cuda":
        return None
    found = _nvml(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    if found is None:
        return None
    nvml, handle = found
    clock = ctypes.c_uint()
    sm_clock = 1  # NVML_CLOCK_SM
    return None if nvml.nvmlDeviceGetClockInfo(handle, sm_clock, ctypes.byref(clock)) else clock.value


class Measured(NamedTuple):
    """What a recording says of its repeats: seconds a call of each, calls in one of them, and the SM clock."""

    seconds: list[float]
    calls: int
    clock_mhz: int | None


class Recording(abc.ABC):
    """Calls that are ready to be timed."""

    @abc.abstractmethod
    def measure(self, seconds: float, *, repeats: int, settle: float, clock: bool) -> Measured:
        """Runs `repeats` times for at least `seconds`, without a pause, after `settle` seconds that do not count."""


def record(calls: Sequence[Call], device: torch.device) -> Recording:
    """Returns `calls`, equal work on different copies of a weight, ready to be timed in turn on `device`.

    Each is called here first: what a call compiles or allocates once is not timed.
    """
    for call in calls:
        call()
    return _Graph(calls, device) if device.type == "cuda" else _Loop(calls)


def time_together(
    recordings: Sequence[Recording], *, device: torch.device, sustained: bool = False, repeats: int = 5
) -> list[Timing]:
    """Times contenders at one point side by side.

    Args:
        recordings: a recording for each of them.
        device: where they run.
        sustained: whether each runs for at least `SUSTAINED_SECONDS`; has no meaning on a CPU.
        repeats: how many measurements to take the median of.

    Returns:
        A timing for each of them.
    """
    sustained = sustained and device.type == "cuda"
    if sustained:
        seconds = SUSTAINED_SECONDS / repeats
        measured = [each.measure(seconds, repeats=repeats, settle=SETTLE_SECONDS, clock=True) for each in recordings]
    else:
        rounds = [
            [each.measure(COLD_SECONDS, repeats=1, settle=0, clock=i + 1 == repeats) for each in recordings]
            for i in range(repeats)
        ]
        measured = [
            Measured([one.seconds[0] for one in ones], ones[-1].calls, ones[-1].clock_mhz)
            for ones in zip(*rounds, strict=True)
        ]
    return [
        Timing(
            us=statistics.median(each.seconds) * 1e6,
            us_min=min(each.seconds) * 1e6,
            mode="sustained" if sustained else "cold",
            repeats=repeats,
            calls=each.calls,
            clock_mhz=each.clock_mhz,
        )
        for each in measured
    ]


def time_calls(calls: Sequence[Call], *, device: torch.device, sustained: bool = False, repeats: int = 5) -> Timing:
    """Times one contender alone; arguments as for `record` and `time_together`."""
    return time_together([record(calls, device)], device=device, sustained=sustained, repeats=repeats)[0]


class _Graph(Recording):
    """Calls in a CUDA graph."""

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stream.wait_stream(torch.cuda.current_stream(device))
        start, end = self._event(), self._event()
        some = calls[:8]
        # `torch.cuda.graph` would collect garbage and empty the allocator's cache, for every point.
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            # Behind a millisecond of waiting the host is ahead of the GPU, and the estimate is the GPU's time.
            torch.cuda._sleep(2_000_000)  # type: ignore[no-untyped-call]
            start.record()
            for call in some:
                call()
            end.record()
            torch.cuda.synchronize(device)
            estimate = max(start.elapsed_time(end) / 1e3 / len(some), 1e-6)
            nodes = min(MAX_NODES, max(len(calls), math.ceil(GRAPH_SECONDS / estimate)))
            self.nodes = math.ceil(nodes / len(calls)) * len(calls)
            self.graph.capture_begin()
            try:
                for i in range(self.nodes):
                    calls[i % len(calls)]()
            finally:
                self.graph.capture_end()
        self.once = 1e-6
        self.once = max(self.measure(0, repeats=1, settle=0, clock=False).seconds[0] * self.nodes, 1e-6)

    @staticmethod
    def _event() -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def measure(self, seconds: float, *, repeats: int, settle: float, clock: bool) -> Measured:
        """See `Recording.measure`. All is queued at once, so that the GPU never waits for the host.

        Replays that settle are at least one: it hides the start. `once` was measured alone, at a clock that many
        replays do not keep, so that the time asked for is reached.
        """
        before, inner = (max(1, math.ceil(each / self.once)) for each in (settle, seconds))
        events = [self._event() for _ in range(repeats + 1)]
        with torch.cuda.stream(self.stream):
            for event, count in zip(events, [before, *[inner] * repeats], strict=True):
                for _ in range(count):
                    self.graph.replay()
                event.record()
        clocks = []
        if clock:
            while not events[0].query():  # type: ignore[no-untyped-call]
                time.sleep(1e-3)
            clocks.append(sm_clock_mhz(self.device))
            while not events[-1].query():  # type: ignore[no-untyped-call]
                time.sleep(2e-2)
                clocks.append(sm_clock_mhz(self.device))
        torch.cuda.synchronize(self.device)
        known = [each for each in clocks if each is not None]
        milliseconds = [first.elapsed_time(second) for first, second in itertools.pairwise(events)]
        return Measured(
            seconds=[each / 1e3 / (inner * self.nodes) for each in milliseconds],
            calls=inner * self.nodes,
            clock_mhz=round(statistics.median(known)) if known else None,
        )


class _Loop(Recording):
    """Calls on the CPU, one after the other."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.next = 0
        begin = time.perf_counter()
        self._run(1)
        self.once = max(time.perf_counter() - begin, 1e-6)

    def _run(self, count: int) -> None:
        for i in range(self.next, self.next + count):
            self.calls[i % len(self.calls)]()
        self.next += count

    def measure(self, seconds: float, *, repeats: int, settle: float, clock: bool) -> Measured:
        """See `Recording.measure`; a CPU does not settle, and its clock is not read."""
        del settle, clock
        count = max(1, min(MAX_NODES, math.ceil(seconds / self.once)))
        measured = []
        for _ in range(repeats):
            begin = time.perf_counter()
            self._run(count)
            measured.append((time.perf_counter() - begin) / count)
        return Measured(seconds=measured, calls=count, clock_mhz=None)
