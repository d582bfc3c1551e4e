"""The package as a whole: what an import does not do, and what it offers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import humming_cutlass


def _python(script: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_needs_and_does_nothing(tmp_path: Path) -> None:
    """I4, G7: no torch, no CUDA, no subprocess, no file; with a home that does not exist."""
    script = """
import os, subprocess, sys
def refuse(*a, **k): raise AssertionError("a subprocess at import")
subprocess.Popen.__init__ = refuse
os.fork = refuse
import humming_cutlass
assert "torch" not in sys.modules and "numpy" not in sys.modules
import humming_cutlass.layout, humming_cutlass.ops, humming_cutlass.quantize, humming_cutlass.build
import humming_cutlass.planner, humming_cutlass.emitter, humming_cutlass._C
assert "torch" not in sys.modules
assert "libcuda.so" not in open("/proc/self/maps").read()
import humming_cutlass.layer
assert not sys.modules["torch"].cuda.is_initialized()
"""
    cache = tmp_path / "cache"
    _python(script, HOME="/nonexistent", HUMMING_CUTLASS_CACHE_DIR=str(cache), XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert list(tmp_path.iterdir()) == []


def test_every_export_exists() -> None:
    for name in humming_cutlass.__all__:
        assert getattr(humming_cutlass, name) is not None
    assert set(humming_cutlass.__all__) <= set(dir(humming_cutlass))
    with pytest.raises(AttributeError, match="no attribute 'gem'"):
        _ = humming_cutlass.gem


def test_version_is_the_distributions() -> None:
    from humming_cutlass import _version

    assert humming_cutlass.__version__ == _version.__version__


def test_show_config_never_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    facts = humming_cutlass.show_config()
    printed = capsys.readouterr().out
    for name in ("humming_cutlass", "python", "torch", "extension", "kernel cache", "compiler"):
        assert facts[name]
        assert f"{name}: " in printed
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    assert humming_cutlass.show_config()["compiler"]
