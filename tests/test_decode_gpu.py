"""The kernel for few tokens: k is cut into slices, as many for every warp, of as many atoms as that takes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("humming_cutlass._C", reason="the extension is not built")

from gpu_tools import NEEDS_HOPPER, bounds  # noqa: E402
from humming_cutlass import ops, planner, support, testing  # noqa: E402
from humming_cutlass.config import GemmConfig, ScheduleConfig, TypeConfig  # noqa: E402

pytestmark = NEEDS_HOPPER

GROUP_SIZES = (-1, 16, 32, 48, 64, 96, 128, 192, 256)


def _types(group_size: int, zero_point: str | None) -> TypeConfig:
    name = "int4" if zero_point is None else "uint4"
    return testing.make_types(name, k=4608, element_a="float16", group_size=group_size, zero_point=zero_point)


def _kernels(types: TypeConfig) -> list[GemmConfig]:
    return planner.schedules(types, ops.planner_device(0), mainloops=[support.SM90_DECODE])


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> Iterator[None]:
    every = [_types(size, zero) for size in GROUP_SIZES for zero in (None, "integer", "floating")]
    ops.prepare([config for types in every for config in _kernels(types)])
    with bounds():
        yield


@pytest.mark.parametrize("zero_point", [None, "integer", "floating"])
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("atoms", [1, 16, 45, 63, 99, 129, 225, 459])
def test_slices(atoms: int, group_size: int, zero_point: str | None) -> None:
    """Slices of one to eight atoms, one to four a warp, the last one shorter; cut inside groups and at borders."""
    k = atoms * 64
    if group_size > 0:
        k = max(k // group_size, 2) * group_size  # one group would be channel scales
    types = _types(group_size, zero_point)
    for config in _kernels(types):
        problem = testing.random_problem(types, 1 + atoms % 8, 40, k, device="cuda")
        y = ops.gemm(problem.a, problem.packed, config=config)
        problem.check(y)
        testing.check_equal(ops.gemm(problem.a, problem.packed, config=config), y)


@pytest.mark.parametrize("k", [1000, 5124, 14340, 28676])
def test_unaligned_rows(k: int) -> None:
    """Rows of A that cannot be read 16 bytes at a time, and a k that ends inside an atom."""
    types = testing.make_types("int4", k=k, element_a="float16", group_size=-1)
    config = _kernels(types)[-1]
    storage = torch.randn(8, k + 3, dtype=torch.float16, device="cuda")
    problem = testing.random_problem(types, 8, 300, k, device="cuda")
    rows = storage[:, 1 : k + 1]
    rows.copy_(problem.a)
    y = ops.gemm(rows, problem.packed, config=config)
    problem.check(y)
    testing.check_equal(y, ops.gemm(problem.a, problem.packed, config=config))


def test_many_atom_rows() -> None:
    """More atom rows a CTA than are summed at a time, with one and with several slices a warp."""
    types = _types(-1, None)
    n = ops.planner_device(0).sm_count * 16 * 9 + 5
    for config in _kernels(types):
        for k in (1088, config.schedule.tile_shape[2] + 64):
            problem = testing.random_problem(types, 8, n, k, device="cuda")
            problem.check(ops.gemm(problem.a, problem.packed, config=config))


@pytest.mark.parametrize(
    ("atoms", "m", "group_size", "zero_point"),
    [
        (84, 7, 128, None),
        (108, 5, 128, None),  # slabs that begin inside a group by turns
        (108, 8, 128, "integer"),
        (108, 8, 96, "floating"),
        (126, 8, -1, "integer"),
        (240, 8, 128, None),  # two slices a warp
    ],
)
def test_slices_in_two_halves(atoms: int, m: int, group_size: int, zero_point: str | None) -> None:
    """CTAs of so many atom rows that slabs are wider than what a warp can hold of A for eight tokens."""
    types = _types(group_size, zero_point)
    (config,) = _kernels(types)
    width = support.decode_slab_atoms(config.schedule, m, atoms * 64, 10)
    assert width == {84: 6, 108: 7, 126: 8, 240: 8}[atoms]
    _check_many_rows(config, m, atoms * 64)


@pytest.mark.parametrize(("group_size", "atoms", "m"), [(-1, 96, 6), (128, 70, 8)])
def test_slices_in_two_halves_of_wide_weights(group_size: int, atoms: int, m: int) -> None:
    """The same where the rings leave room for slabs of six atoms at most."""
    types = testing.make_types("int5", k=4608, element_a="float16", group_size=group_size)
    (config,) = _kernels(types)
    assert support.decode_slab_atoms(config.schedule, m, atoms * 64, 10) == {70: 5, 96: 6}[atoms]
    _check_many_rows(config, m, atoms * 64)


def _check_many_rows(config: GemmConfig, m: int, k: int) -> None:
    """Ten atom rows a CTA; A with a tensor map, and without one: the same bits."""
    n = ops.planner_device(0).sm_count * 16 * 9 + 1
    problem = testing.random_problem(config.types, m, n, k, device="cuda")
    y = ops.gemm(problem.a, problem.packed, config=config)
    problem.check(y)
    storage = torch.empty(m, k + 1, dtype=problem.a.dtype, device="cuda")
    storage[:, 1:] = problem.a
    testing.check_equal(ops.gemm(storage[:, 1:], problem.packed, config=config), y)


@pytest.mark.parametrize("atoms", [1, 16, 31, 70])
@pytest.mark.parametrize("m", [1, 8])
def test_slabs_of_one_and_two_atoms(atoms: int, m: int) -> None:
    """Where factors of 4 bytes for every 16 weights leave room for no more: legal, though the planner does without."""
    types = testing.make_types(
        "uint8", k=64 * 16, element_a="float16", group_size=16, zero_point="floating", scale_dtype="float32"
    )
    schedule = ScheduleConfig(mainloop=support.SM90_DECODE, tile_shape=(8, 16, 2048), warp_shape=(8, 16), stage_count=2)
    config = GemmConfig(types=types, schedule=schedule, arch="sm_90a")
    problem = testing.random_problem(types, m, 40, 64 * atoms, device="cuda")
    problem.check(ops.gemm(problem.a, problem.packed, config=config))
