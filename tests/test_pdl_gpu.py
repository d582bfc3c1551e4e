"""Programmatic dependent launch: a kernel that starts early must not read what is not written, nor write what is read.

Each iteration puts these on one stream, without a pause: a torch kernel that writes x; a GEMM on x, its result compared
on the device; a GEMM whose output lies where that comparison has just read; and four split-k GEMMs in a row that feed
each other through one buffer and share the workspace of the stream. x differs from the iteration before by a power of
two, so that a stale value anywhere changes the result. Another stream keeps the GPU busy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("humming_cutlass._C", reason="the extension is not built")

from humming_cutlass import ops, planner, testing  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compile,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ITERATIONS = 100_000
M, N, K = 64, 512, 4096
TYPES = testing.make_types("int4", k=K, element_a="bfloat16", group_size=128)
FACTORS = [2.0**e for e in (-3, 2, -1, 3, 0, -2, 1, -4)]
assert len(set(FACTORS)) == 8


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    device = ops.planner_device(0)
    ops.prepare(planner.schedules(TYPES, device))
    with testing.scaled_weights() if device.arch == "sm_90a" else contextlib.nullcontext():
        yield


class Launch:
    """One GEMM between fixed buffers: nothing but the launch, so that the host is fast enough to keep the GPU busy."""

    def __init__(self, problem: testing.Problem, a: Any, d: Any, *, least_split: int = 1) -> None:
        weight = problem.packed
        choice = ops.choose(weight, a.shape[0])
        self.split_k = max(least_split, choice.split_k)
        self.plan = ops._plan(weight, choice.config)
        self.a, self.d = a, d

    def __call__(self) -> None:
        self.plan.run(self.a, self.d, torch.cuda.current_stream().cuda_stream, self.split_k)


class Chain:
    """The buffers and launches of an iteration; `wrong` collects every element that was ever different."""

    def __init__(self) -> None:
        wide = [testing.random_problem(TYPES, M, N, K, device="cuda", seed=seed) for seed in range(2)]
        up = testing.random_problem(TYPES, M, K, K, device="cuda", seed=2)
        for problem in (*wide, up):
            problem.check(ops.gemm(problem.a, problem.packed))
        self.base = wide[0].a
        self.x = torch.empty_like(self.base)
        self.d = torch.empty(M, N, dtype=torch.bfloat16, device="cuda")
        self.hidden = torch.empty(1, K, dtype=torch.bfloat16, device="cuda")
        self.tail = torch.empty(2, N, dtype=torch.bfloat16, device="cuda")
        self.parts = (self.d, self.d[:1], self.tail)
        self.steps: list[list[Launch]] = [
            [Launch(wide[0], self.x, self.d)],
            [Launch(wide[1], self.x[1:2], self.d[:1], least_split=2)],
            [
                Launch(up, self.x[0:1], self.hidden, least_split=2),
                Launch(wide[0], self.hidden, self.tail[0:1], least_split=2),
                Launch(up, self.x[1:2], self.hidden, least_split=2),
                Launch(wide[0], self.hidden, self.tail[1:2], least_split=2),
            ],
        ]
        self.flags = [torch.empty_like(part, dtype=torch.bool) for part in self.parts]
        self.wrong = [torch.zeros_like(part, dtype=torch.bool) for part in self.parts]
        self.expected: list[list[Any]] = []
        for factor in FACTORS:
            torch.mul(self.base, factor, out=self.x)
            results = []
            for step, part in zip(self.steps, self.parts, strict=True):
                for launch in step:
                    torch.cuda.synchronize()  # nothing overlaps here
                    launch()
                torch.cuda.synchronize()
                results.append(part.clone())
            self.expected.append(results)
        for first, second in zip(self.expected, self.expected[1:], strict=False):
            for left, right in zip(first, second, strict=True):
                assert bool((left != right).float().mean() > 0.9), "a stale input must show"

    def iteration(self, index: int) -> None:
        index %= len(FACTORS)
        torch.mul(self.base, FACTORS[index], out=self.x)
        expected = self.expected[index]
        for step, part, want, flag, wrong in zip(self.steps, self.parts, expected, self.flags, self.wrong, strict=True):
            for launch in step:
                launch()
            torch.ne(part, want, out=flag)
            wrong.logical_or_(flag)

    def check(self) -> None:
        torch.cuda.synchronize()
        counts = [int(wrong.sum()) for wrong in self.wrong]
        assert counts == [0, 0, 0], f"elements that were wrong at least once, by step: {counts}"


class Load:
    """Matrix products on a stream of their own: 128 large CTAs at a time, on the SMs that the chain wants."""

    def __init__(self) -> None:
        a, b = (torch.randn(2048, 512, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        out = torch.empty(2048, 2048, dtype=torch.bfloat16, device="cuda")
        self.stream = torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        torch.matmul(a, b.T, out=out)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for _ in range(200):
                torch.matmul(a, b.T, out=out)
        self.ends = [torch.cuda.Event(), torch.cuda.Event()]
        self.replays = 0

    def top_up(self) -> None:
        """Keeps two replays in the queue."""
        end = self.ends[self.replays % 2]
        if self.replays < 2 or end.query():
            with torch.cuda.stream(self.stream):
                self.graph.replay()
                end.record()
            self.replays += 1


@pytest.fixture
def chain(monkeypatch: pytest.MonkeyPatch) -> Chain:
    """Expected results without early launches; then they are switched on. The variable is read at every launch."""
    monkeypatch.setenv("HUMMING_CUTLASS_PDL", "0")
    made = Chain()
    monkeypatch.setenv("HUMMING_CUTLASS_PDL", "1")
    return made


def _run(chain: Chain, batch: Callable[[], None], batches: int) -> None:
    """Enqueues the batches on a stream that goes first, at most two ahead of the GPU, beside the load."""
    load = Load()
    stream = torch.cuda.Stream(priority=-1)
    ends = [torch.cuda.Event(), torch.cuda.Event()]
    torch.cuda.synchronize()
    for index in range(batches):
        load.top_up()
        end = ends[index % 2]
        if index >= 2:
            while not end.query():
                load.top_up()
        with torch.cuda.stream(stream):
            batch()
            end.record()
    chain.check()
    assert load.replays > batches // 100, "there was no load"


def test_no_stale_value_in_a_graph(chain: Chain) -> None:
    size = 200
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=-1)):
        for index in range(size):
            chain.iteration(index)
    assert size % len(FACTORS) == 0, "the last factor of a replay must differ from the first of the next"
    _run(chain, graph.replay, ITERATIONS // size)


def test_no_stale_value_in_eager_calls(chain: Chain) -> None:
    size = 200

    def batch() -> None:
        for index in range(size):
            chain.iteration(index)

    _run(chain, batch, ITERATIONS // size)


def test_the_comparison_finds_a_stale_value(chain: Chain) -> None:
    """The tests above can fail: a single iteration on the input of the one before is seen."""
    chain.iteration(0)
    chain.iteration(1)
    chain.check()
    right, chain.base = chain.base, chain.base * 2
    chain.iteration(2)
    chain.base = right
    for index in range(3, 9):
        chain.iteration(index)
    with pytest.raises(AssertionError, match="wrong at least once"):
        chain.check()
