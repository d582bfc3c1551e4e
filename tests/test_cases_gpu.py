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
