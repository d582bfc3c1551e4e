"""Shared by the tests on a GPU: bounds, and kernels of a certain kind whatever the planner prefers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from humming_cutlass import ops, planner, support, testing
from humming_cutlass.config import TypeConfig


def has_hopper() -> bool:
    """Whether torch sees a GPU of compute capability 9.0; initializes CUDA."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


NEEDS_HOPPER = [
    pytest.mark.gpu,
    # Words, which pytest evaluates when a test is set up: an import must not initialize CUDA.
    pytest.mark.skipif("not __import__('gpu_tools').has_hopper()", reason="needs a Hopper GPU"),
]
"""For `pytestmark`: tests of kernels that only compute capability 9.0 has."""


@contextlib.contextmanager
def bounds() -> Iterator[None]:
    """The bounds of the GPU's mainloops: those of SM90 multiply weights by group scales."""
    with testing.scaled_weights() if ops.planner_device(0).arch == "sm_90a" else contextlib.nullcontext():
        yield


def split_choice(
    types: TypeConfig, m: int, n: int, k: int, device: planner.Device, mainloop: str | None = None
) -> planner.Choice:
    """Returns the fastest kernel, by the planner's model, among those that split k, in at most 8 ranges.

    `mainloop` is the kernel's; the SM80 one runs on every GPU and sums in the workspace of its stream.
    """
    mainloops = None if mainloop is None else (mainloop,)
    found = planner.candidates(types, m, n, k, device, mainloops=mainloops)
    splitting = [choice for choice in found if 1 < choice.split_k <= 8]
    assert splitting, f"nothing splits k {k} for m {m}, n {n}"
    return min(splitting, key=lambda choice: planner.microseconds(choice, m, n, k, device))


def workspace_choice(types: TypeConfig, m: int, n: int, k: int, device: planner.Device) -> planner.Choice:
    """Returns a kernel that shares its stream's workspace of partial sums with every other such launch there."""
    return split_choice(types, m, n, k, device, support.SM80)
