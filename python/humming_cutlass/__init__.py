"""GEMMs with weights of 1 to 8 bits, on the CPU and on NVIDIA GPUs.

    from humming_cutlass.layer import HummingLayer     # needs torch
    from humming_cutlass import layout, ops, quantize  # the parts it is made of; torch is optional

Importing this package touches no GPU, builds nothing and creates no file; its modules load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from humming_cutlass.config import GemmConfig, ScheduleConfig, TypeConfig, WeightConfig
    from humming_cutlass.errors import HummingError
    from humming_cutlass.layer import HummingLayer
    from humming_cutlass.layout import PackedWeight, pack, unpack
    from humming_cutlass.ops import gemm
    from humming_cutlass.quantize import QuantizedWeight

    __version__: str

__all__ = [
    "GemmConfig",
    "HummingError",
    "HummingLayer",
    "PackedWeight",
    "QuantizedWeight",
    "ScheduleConfig",
    "TypeConfig",
    "WeightConfig",
    "__version__",
    "gemm",
    "pack",
    "show_config",
    "unpack",
]

_HOME = {
    "GemmConfig": "config",
    "HummingError": "errors",
    "HummingLayer": "layer",
    "PackedWeight": "layout",
    "QuantizedWeight": "quantize",
    "ScheduleConfig": "config",
    "TypeConfig": "config",
    "WeightConfig": "config",
    "gemm": "ops",
    "pack": "layout",
    "unpack": "layout",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _read_version()
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _read_version() -> str:
    from importlib import metadata

    try:
        return metadata.version("humming-cutlass")
    except metadata.PackageNotFoundError:
        # Straight from a source tree, not installed.
        from humming_cutlass import _version as source

        return source.__version__


def show_config() -> dict[str, str]:
    """Prints and returns what a bug report needs: versions, paths, compiler and GPUs.

    Looks for the CUDA driver and the compiler, which importing the package does not do; a part that is missing is
    reported, never raised.
    """
    import platform
    import sys

    facts = {
        "humming_cutlass": _read_version(),
        "python": f"{sys.version.split()[0]} on {platform.platform()}",
    }
    for package in ("numpy", "ml_dtypes", "torch"):
        facts[package] = _package_version(package)
    from humming_cutlass import errors

    try:
        from humming_cutlass import _C

        facts["extension"] = str(_C.__file__)
        facts["CUDA driver"] = "found" if _C.driver_available() else "none"
        if _C.driver_available():
            facts |= _describe_gpus()
    except (ImportError, AttributeError, errors.HummingError) as error:
        facts["extension"] = f"unusable: {error}"
    try:
        from humming_cutlass import build

        facts["kernel cache"] = str(build.cache_directory())
        toolchain = build.find_toolchain()
        facts["compiler"] = f"{toolchain.nvcc} {toolchain.version}"
    except (ImportError, errors.HummingError) as error:
        facts.setdefault("kernel cache", "unusable")
        facts["compiler"] = str(error)
    for name, value in facts.items():
        print(f"{name}: {value}")
    return facts


def _describe_gpus() -> dict[str, str]:
    from humming_cutlass import _C
    from humming_cutlass.errors import HummingError

    gpus: dict[str, str] = {}
    while True:
        try:
            p = _C.device_properties(len(gpus))
        except (HummingError, ValueError, RuntimeError):
            return gpus
        gpus[f"GPU {len(gpus)}"] = f"{p['name']}, compute capability {p['major']}.{p['minor']}, {p['sm_count']} SMs"


def _package_version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
