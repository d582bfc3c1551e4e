"""The cases of gemm_cases.py on the CPU path."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gemm_cases import CASES
from humming_cutlass import ops


@pytest.mark.parametrize("case", CASES)
def test_case(case: Callable[..., None]) -> None:
    case(gemm=ops.gemm, device="cpu")
