"""Shared by all tests: what the markers mean, and a cache of their own for the kernels they compile."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@functools.lru_cache(maxsize=1)
def _gpu_missing() -> str | None:
    """Why there is no GPU to test on; None when there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver (libcuda.so.1)"
    status = driver.cuInit(0)
    if status != 0:
        return f"the NVIDIA driver does not start (cuInit returned {status})"
    count = ctypes.c_int(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return None if count.value > 0 else "no NVIDIA GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") is not None and (reason := _gpu_missing()) is not None:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


@pytest.fixture(scope="session", autouse=True)
def _kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels that tests compile go into a cache of the session, unless the environment names one to keep.

    Choices that somebody tuned on this machine do not count, and launches are ordered unless a test asks otherwise.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HUMMING_CUTLASS_TUNING_FILE", os.devnull)
        patch.delenv("HUMMING_CUTLASS_PDL", raising=False)
        if "HUMMING_CUTLASS_CACHE_DIR" not in os.environ:
            cache: Path = tmp_path_factory.mktemp("kernel_cache", numbered=True)
            cache.chmod(0o700)
            patch.setenv("HUMMING_CUTLASS_CACHE_DIR", str(cache))
        yield
