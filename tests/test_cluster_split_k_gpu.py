"""CTAs of a cluster that split k: two exchange their sums while they store, more read all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("humming_cutlass._C", reason="the extension is not built")

from gpu_tools import NEEDS_HOPPER, bounds  # noqa: E402
from humming_cutlass import ops, planner, support, testing  # noqa: E402
from humming_cutlass.config import GemmConfig, TypeConfig  # noqa: E402

pytestmark = NEEDS_HOPPER

K = 2048
OUTPUTS = ("bfloat16", "float32")


def _types(output: str) -> TypeConfig:
    return testing.make_types("int4", k=K, element_a="bfloat16", group_size=128, element_d=output)


def _kernels(output: str) -> list[GemmConfig]:
    return planner.schedules(_types(output), ops.planner_device(0), mainloops=[support.SM90])


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> Iterator[None]:
    ops.prepare([config for output in OUTPUTS for config in _kernels(output)])
    with bounds():
        yield


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("split_k", [2, 3, 4])
@pytest.mark.parametrize("place", range(7))
def test_sums_of_a_cluster(place: int, split_k: int, output: str) -> None:
    """Every tile, whole and ragged: each chunk of tokens is the share of one of the CTAs."""
    config = _kernels(output)[place]
    tile_m, tile_n, _ = config.schedule.tile_shape
    for m in (tile_m, tile_m - 3, tile_m + 9):
        for n in (tile_n, tile_n + 72):
            problem = testing.random_problem(config.types, m, n, K, device="cuda", bias=True)
            y = ops.gemm(problem.a, problem.packed, config=config, split_k=split_k)
            problem.check(y)
            testing.check_equal(ops.gemm(problem.a, problem.packed, config=config, split_k=split_k), y)


def test_every_tile_is_tested() -> None:
    assert len(_kernels(OUTPUTS[0])) == 7
    assert len(_kernels(OUTPUTS[1])) == 7
