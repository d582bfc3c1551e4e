"""What tests of compilation share, first of all a CUDA compiler made of a shell script, for what goes on around one.

Its "cubin" is the source it was given, so that a test can tell whether it got the right one, whole. It writes the
first half, waits, then writes the rest: whoever reads a half-written file is found out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from humming_cutlass import build

__all__ = ["calls", "empty_cache", "expected_cubin", "fake_nvcc", "kernel", "run_python", "traits_version"]

_SCRIPT = """#!/bin/sh
case "$*" in
  *--version*) echo "nvcc: NVIDIA (R) Cuda compiler driver"
    echo "Cuda compilation tools, release {version}, V{version}.1"; echo version >> {log}; exit 0;;
  *--dryrun*) exit 0;;
esac
while [ $# -gt 0 ]; do
  case "$1" in
    -o) out=$2; shift;;
    -MF) dep=$2; shift;;
  esac
  src=$1; shift
done
echo "$src $$" >> {log}
{fail}
printf 'first half of ' > "$out"
sleep {delay}
cat "$src" >> "$out"
echo "ptxas info    : Used 40 registers, used 1 barriers, 128 bytes smem"
echo "    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads"
echo "$out: $src" > "$dep"
"""


def fake_nvcc(folder: Path, *, version: str = "13.0", delay: float = 0.0, error: str | None = None) -> Path:
    """Writes the script to `folder/bin/nvcc`; it notes each call in `folder/calls`."""
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True, exist_ok=True)
    fail = "" if error is None else f"echo '{error}' >&2; exit 2"
    nvcc.write_text(_SCRIPT.format(version=version, delay=delay, log=folder / "calls", fail=fail))
    nvcc.chmod(0o755)
    return nvcc


def calls(folder: Path) -> list[str]:
    """The sources that the script of `fake_nvcc` compiled, in order; `version` where it was asked for that."""
    log = folder / "calls"
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


def kernel(name: str = "scale", *, arch: str = "sm_80", text: str = "") -> build.KernelSource:
    """A source whose text tells it from all others."""
    return build.KernelSource(name, f"// {name} {text}\n", arch)


def expected_cubin(source: build.KernelSource) -> bytes:
    """What `fake_nvcc` makes of a source."""
    return b"first half of " + source.text.encode()


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Starts Python on `code`, with this environment and the given variables."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder of an empty cache; the compiler is a fake, and nothing of the machine's own is found."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("HUMMING_CUTLASS_CACHE_DIR", str(directory))
    monkeypatch.setenv("CUDACXX", str(fake_nvcc(tmp_path)))
    for name in ("HUMMING_CUTLASS_AOT_DIR", "HUMMING_CUTLASS_DISABLE_JIT", "HUMMING_CUTLASS_EXTRA_CUDA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return directory


def traits_version() -> int:
    """The version of KernelTraits and GemmArguments that the header states."""
    header = build.include_directories()[0] / "humming_cutlass" / "device" / "arguments.hpp"
    (version,) = re.findall(r"kKernelTraitsVersion = (\d+);", header.read_text())
    return int(version)
