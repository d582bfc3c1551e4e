"""Clusters that share A: parts of its rows, and a last wave that would be less than half full, split along k."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("humming_cutlass._C", reason="the extension is not built")

from gpu_tools import NEEDS_HOPPER, bounds  # noqa: E402
from humming_cutlass import ops, planner, support, testing  # noqa: E402
from humming_cutlass.config import GemmConfig, TypeConfig  # noqa: E402

pytestmark = NEEDS_HOPPER

GROUPED = testing.make_types("int4", k=1024, element_a="bfloat16", group_size=128)
CHANNEL = testing.make_types("uint6", k=1024, element_a="float16", group_size=-1, zero_point="integer")


def _sharing(types: TypeConfig) -> GemmConfig:
    (config,) = [c for c in planner.schedules(types, ops.planner_device(0)) if support.shares_tokens(c.schedule)]
    return config


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    ops.prepare([_sharing(GROUPED), _sharing(CHANNEL)])
    with bounds():
        yield


def _clusters() -> int:
    return ops.planner_device(0).sm_count // 2


@pytest.mark.parametrize(
    ("types", "k", "rest", "missing"),
    [
        (GROUPED, 896, "half", 24),  # too short to split
        (GROUPED, 1024, "one", 0),
        (GROUPED, 1024, "half", 128 + 40),
        (GROUPED, 1152, "half", 24),
        (GROUPED, 1152, "more than half", 24),
        (CHANNEL, 1000, "none", 0),
        (CHANNEL, 1000, "half", 128 + 40),
        (CHANNEL, 1000, "one", 24),
    ],
)
def test_result(types: TypeConfig, k: int, rest: str, missing: int) -> None:
    """Every number of pairs in the last wave, with a ragged last tile and with a last pair of one tile."""
    clusters = _clusters()
    pairs = clusters + {"one": 1, "half": clusters // 2, "more than half": clusters // 2 + 1, "none": 0}[rest]
    config = _sharing(types)
    tile_m, tile_n, _ = config.schedule.tile_shape
    problem = testing.random_problem(types, pairs * tile_m - 9, 2 * tile_n - missing, k, device="cuda")
    y = ops.gemm(problem.a, problem.packed, config=config)
    problem.check(y)
    testing.check_equal(ops.gemm(problem.a, problem.packed, config=config), y)


def test_several_waves() -> None:
    """Shared stages first, then the cluster's last unit without sharing; several columns of tiles."""
    config = _sharing(GROUPED)
    tile_m, tile_n, _ = config.schedule.tile_shape
    pairs_m = (2 * _clusters() + 6) // 3
    problem = testing.random_problem(GROUPED, pairs_m * tile_m, 3 * 2 * tile_n, 1024, device="cuda")
    problem.check(ops.gemm(problem.a, problem.packed, config=config))


@pytest.mark.parametrize("m", [1, 100, 128, 129, 256, 257, 384, 385, 511])
@pytest.mark.parametrize("types", [GROUPED, CHANNEL], ids=str)
def test_last_rows(types: TypeConfig, m: int) -> None:
    """Each CTA of a cluster fetches a part of the tokens: whole, cut, or none at all."""
    problem = testing.random_problem(types, m, 2 * 128 * 3 + 40, 1024, device="cuda")
    y = ops.gemm(problem.a, problem.packed, config=_sharing(types))
    problem.check(y)
    assert not torch.isnan(y).any()
