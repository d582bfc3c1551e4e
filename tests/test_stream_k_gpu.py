"""Stream-k: the k ranges of all tiles, one after the other, dealt out evenly; sums of cut tiles pass through memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("humming_cutlass._C", reason="the extension is not built")

from gpu_tools import NEEDS_HOPPER, bounds  # noqa: E402
from humming_cutlass import ops, planner, support, testing  # noqa: E402
from humming_cutlass.config import GemmConfig, TypeConfig  # noqa: E402
from humming_cutlass.errors import ArgumentError  # noqa: E402

pytestmark = NEEDS_HOPPER

K = 4096
GROUPED = testing.make_types("int4", k=K, element_a="bfloat16", group_size=128)
LONG_GROUPS = testing.make_types("uint4", k=K, element_a="float16", group_size=512, zero_point="integer")
CHANNEL = testing.make_types("int6", k=K, element_a="float16", group_size=-1)


def _streaming(types: TypeConfig) -> list[GemmConfig]:
    return [c for c in planner.schedules(types, ops.planner_device(0)) if support.streams(c.schedule)]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    ops.prepare([config for types in (GROUPED, LONG_GROUPS, CHANNEL) for config in _streaming(types)])
    with bounds():
        yield


def _stream(problem: testing.Problem, config: GemmConfig) -> torch.Tensor:
    y: torch.Tensor = ops.gemm(problem.a, problem.packed, config=config, split_k=0)
    return y


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize(
    ("types", "n", "k"),
    [
        (GROUPED, 24, 256),  # fewer k tiles than SMs: one for each CTA, tiles of many CTAs
        (GROUPED, 1000, K),  # a tile has several CTAs, some of them only its middle
        (GROUPED, 128 * 100, 1024),  # cut once at most
        (GROUPED, 128 * 132, 512),  # nothing to cut
        (LONG_GROUPS, 5000, 2048),  # cuts inside groups
        (CHANNEL, 3000, 1000),
    ],
    ids=str,
)
def test_result(types: TypeConfig, n: int, k: int, index: int) -> None:
    """Ragged tiles of every kernel, cut in every way; the same bits each time."""
    configs = _streaming(types)
    if index >= len(configs):
        pytest.skip(f"{types} has {len(configs)} kernels with stream-k")
    config = configs[index]
    problem = testing.random_problem(types, config.schedule.tile_shape[0] + 5, n, k, device="cuda")
    y = _stream(problem, config)
    problem.check(y)
    for _ in range(5):
        testing.check_equal(_stream(problem, config), y)


def test_tiles_of_one_row_of_ctas() -> None:
    """One output tile: all CTAs but the last leave their sums, in the order of k."""
    config = _streaming(GROUPED)[0]
    problem = testing.random_problem(GROUPED, 3, 100, K * 8, device="cuda")
    y = _stream(problem, config)
    problem.check(y)
    for _ in range(20):
        testing.check_equal(_stream(problem, config), y)


def test_problems_by_turns() -> None:
    """A launch leaves nothing behind that the next one, with other cuts, could take for its own; nor do graphs."""
    configs = _streaming(GROUPED)[:3]
    problems = [testing.random_problem(GROUPED, 16 * (i + 1), 700 * (i + 1), K, device="cuda") for i in range(3)]
    expected = [[_stream(problem, config) for config in configs] for problem in problems]
    for turn in range(10):
        for i, problem in enumerate(problems):
            for j, config in enumerate(configs):
                testing.check_equal(_stream(problem, config), expected[i][j])
        if turn == 5:
            torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [_stream(problem, config) for problem in problems for config in configs]
    for _ in range(3):
        for y in captured:
            y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for y, known in zip(captured, [y for row in expected for y in row], strict=True):
            testing.check_equal(y, known)


def test_streams_at_the_same_time() -> None:
    """Sums of one stream's launches are never another's."""
    config = _streaming(GROUPED)[0]
    problems = [testing.random_problem(GROUPED, 16, 2000, K, device="cuda", seed=i) for i in range(2)]
    expected = [_stream(problem, config) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(100):
        for problem, stream, results in zip(problems, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(_stream(problem, config))
    torch.cuda.synchronize()
    for y, results in zip(expected, found, strict=True):
        for result in results:
            testing.check_equal(result, y)


def test_kernels_without_it() -> None:
    """Kernels whose clusters share tokens, and those of the other mainloops, name what they take."""
    problem = testing.random_problem(GROUPED, 4, 256, K, device="cuda")
    device = ops.planner_device(0)
    for mainloop in support.MAINLOOPS:
        config = planner.schedules(GROUPED, device, mainloops=[mainloop])[-1]
        if support.streams(config.schedule):
            continue
        with pytest.raises(ArgumentError, match="split_k: got 0; allowed: 1"):
            _stream(problem, config)
