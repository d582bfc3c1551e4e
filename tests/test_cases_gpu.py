"""The cases of gemm_cases.py on a GPU, through the kernels that the planner chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gemm_cases import CASES
from humming_cutlass import ops, planner, testing

pytestmark = pytest.mark.gpu


class _Recorded(Exception):  # noqa: N818 - a signal, not an error
    pass


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Compiles all kernels of this module at once, in parallel: each case is run up to its first GEMM to learn them."""
    device = ops.planner_device(0)
    configs = []

    def record(a: torch.Tensor, weight: Any, **_: Any) -> torch.Tensor:
        m = a.reshape(-1, weight.k).shape[0]
        if m:
            configs.append(planner.choose(weight.types, m, weight.n, weight.k, device).config)
        raise _Recorded

    for case in CASES:
        with pytest.raises(_Recorded):
            case.values[0](gemm=record, device="cpu")
    ops.prepare(configs)


@pytest.mark.parametrize("case", CASES)
def test_case(case: Callable[..., None]) -> None:
    folds = ops.planner_device(0).arch == "sm_90a"  # the SM90 mainloop multiplies weights by group scales
    with testing.scaled_weights() if folds else contextlib.nullcontext():
        case(gemm=ops.gemm, device="cuda")


@pytest.mark.parametrize(
    ("dtype", "scale", "group_size"), [("float4_e2m1", "float8_e4m3", 16), ("int4", "float8_e8m0", 32)]
)
def test_k5_small_floats_where_dlpack_lacks_them(
    dtype: str, scale: str, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every torch exports 8-bit floats through DLPack: scales of these types go over as bytes."""
    types = testing.make_types(dtype, k=512, element_a="bfloat16", group_size=group_size, scale_dtype=scale)
    export = torch.Tensor.__dlpack__

    def old_dlpack(self: torch.Tensor, *args: Any, **words: Any) -> Any:
        if self.dtype.is_floating_point and self.element_size() == 1:
            raise BufferError(f"{self.dtype} is not supported by DLPack")
        return export(self, *args, **words)

    monkeypatch.setattr(torch.Tensor, "__dlpack__", old_dlpack)
    problem = testing.random_problem(types, 5, 96, 512, device="cuda")
    with pytest.raises(BufferError):
        problem.packed.scale.__dlpack__()
    folds = ops.planner_device(0).arch == "sm_90a"
    with testing.scaled_weights() if folds else contextlib.nullcontext():
        problem.check(ops.gemm(problem.a, problem.packed))
