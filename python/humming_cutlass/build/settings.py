"""The environment variables of the kernel build, read in one place."""

from __future__ import annotations

import dataclasses
import os
import shlex

from humming_cutlass import errors

__all__ = ["ENVIRONMENT", "Settings"]

#: Every environment variable of this package, with what it does; the documentation's table is made from this.
ENVIRONMENT: dict[str, str] = {
    "HUMMING_CUTLASS_CACHE_DIR": "where compiled kernels are kept; default `$XDG_CACHE_HOME/humming_cutlass`, "
    "`~/.cache/humming_cutlass`, a private folder in the temporary directory",
    "HUMMING_CUTLASS_AOT_DIR": "a folder of kernels compiled ahead of time; searched first, never written",
    "HUMMING_CUTLASS_DISABLE_JIT": "1: never compile; a kernel that is not there raises `MissingKernelError`",
    "HUMMING_CUTLASS_NUM_JOBS": "how many kernels are compiled at once; default: one a core",
    "HUMMING_CUTLASS_EXTRA_CUDA_FLAGS": "more flags for nvcc, separated as in a shell; part of the cache key",
    "HUMMING_CUTLASS_CUTLASS_DIR": "a CUTLASS directory instead of the headers inside the package",
    "HUMMING_CUTLASS_TUNING_FILE": "where `tune` stores choices and calls find them; default "
    "`$XDG_CONFIG_HOME/humming_cutlass/tuning.json`, `~/.config/humming_cutlass/tuning.json`; `/dev/null`: none",
    "HUMMING_CUTLASS_PDL": "1: programmatic dependent launch on Hopper; only where no kernel before a call in its "
    "stream writes the weight; default: off",
    "HUMMING_CUTLASS_EXAMPLE_55": "for `bench`: the library that `bench/contenders/build.sh` makes of a CUTLASS peer; "
    "default: that peer is left out",
    "CUDACXX": "the CUDA compiler; nothing else is searched",
    "CUDA_HOME": "the CUDA toolkit whose `bin/nvcc` is tried before `PATH`; `CUDA_PATH` is the same",
    "NVCC_CCBIN": "the host C++ compiler that nvcc uses, as nvcc reads it itself",
}

# nvcc reads these itself. They change what is compiled, so they are part of the key.
_COMPILER_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The environment as one call sees it. Hashable: what a process remembers is remembered per settings."""

    cache_dir: str | None
    aot_dir: str | None
    disable_jit: bool
    num_jobs: int | None
    extra_flags: tuple[str, ...]
    cutlass_dir: str | None
    cudacxx: str | None
    cuda_home: str | None
    nvcc_flags: tuple[str, ...]
    path: str
    home: str
    xdg_cache_home: str | None

    @classmethod
    def from_environment(cls) -> Settings:
        """Returns the settings that the environment variables ask for.

        Raises:
            ArgumentError: a variable holds what it cannot.
        """
        get = os.environ.get
        jobs = get("HUMMING_CUTLASS_NUM_JOBS") or None
        if jobs is not None and not (jobs.isdecimal() and int(jobs) > 0):
            raise errors.ArgumentError(errors.explain("HUMMING_CUTLASS_NUM_JOBS", repr(jobs), "a number of at least 1"))
        disable = get("HUMMING_CUTLASS_DISABLE_JIT", "")
        if disable not in ("", "0", "1"):
            raise errors.ArgumentError(errors.explain("HUMMING_CUTLASS_DISABLE_JIT", repr(disable), "0 or 1"))
        flags = get("HUMMING_CUTLASS_EXTRA_CUDA_FLAGS", "")
        try:
            extra_flags = tuple(shlex.split(flags))
        except ValueError as error:
            raise errors.ArgumentError(
                errors.explain(
                    "HUMMING_CUTLASS_EXTRA_CUDA_FLAGS", f"{flags!r} ({error})", "flags as a shell splits them"
                )
            ) from None
        return cls(
            cache_dir=get("HUMMING_CUTLASS_CACHE_DIR") or None,
            aot_dir=get("HUMMING_CUTLASS_AOT_DIR") or None,
            disable_jit=disable == "1",
            num_jobs=None if jobs is None else int(jobs),
            extra_flags=extra_flags,
            cutlass_dir=get("HUMMING_CUTLASS_CUTLASS_DIR") or None,
            cudacxx=get("CUDACXX") or None,
            cuda_home=get("CUDA_HOME") or get("CUDA_PATH") or None,
            nvcc_flags=tuple(f"{name}={get(name)}" for name in _COMPILER_VARIABLES if get(name)),
            path=get("PATH", os.defpath),
            home=os.path.expanduser("~"),
            xdg_cache_home=get("XDG_CACHE_HOME") or None,
        )
