"""The runtime without a GPU: without a driver, with torch tensors on the CPU, and on a stand-in for the driver."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("humming_cutlass._C", reason="the extension is not built")

from runtime_scenarios import SCENARIOS

ROOT = pathlib.Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False)


def build_fake_driver(folder: pathlib.Path, *flags: str) -> pathlib.Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = folder / "libcuda.so.1"
    command = [compiler, "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    includes = [f"-I{ROOT / 'cpp'}", f"-I{ROOT / 'cpp' / 'include'}"]
    subprocess.run([*command, *includes, *flags, str(TESTS / "runtime_fake_driver.cpp")], check=True)
    return library


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return build_fake_driver(tmp_path_factory.mktemp("driver"))


@pytest.mark.parametrize("name", sorted(SCENARIOS.keys() - {"workspaces_by_handle"}))
def test_on_fake_driver(fake_driver: pathlib.Path, name: str) -> None:
    lent = name in ("call", "launches", "module_calls")
    if lent and not hasattr(pytest.importorskip("torch").Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("needs a torch with the C exchange API")
    result = run_python(str(TESTS / "runtime_scenarios.py"), str(fake_driver), name)
    assert result.returncode == 0, result.stderr


def test_on_an_old_driver(tmp_path: pathlib.Path) -> None:
    library = build_fake_driver(tmp_path, "-DWITHOUT_STREAM_IDS")
    result = run_python(str(TESTS / "runtime_scenarios.py"), str(library), "workspaces_by_handle")
    assert result.returncode == 0, result.stderr


def test_import_opens_no_driver() -> None:
    """Importing the extension must not map libcuda, even where it exists."""
    code = "import humming_cutlass._C; assert 'libcuda' not in open('/proc/self/maps').read()"
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr


def test_without_driver(tmp_path: pathlib.Path) -> None:
    """A libcuda.so.1 that is no CUDA driver stands for every reason why there is none."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run(command, input='extern "C" int cuGetErrorName() { return 0; }', text=True, check=True)
    code = f"""
import ctypes
library = ctypes.CDLL({str(library)!r})
from humming_cutlass import _C
from humming_cutlass.errors import LaunchError
assert _C.driver_available() is False
for call in (lambda: _C.device_properties(0), lambda: _C.Kernel("x", "y").traits(0)):
    try:
        call()
    except LaunchError as error:
        assert "has no cuGetErrorString" in str(error), error
        assert "driver is too old" in str(error), error
    else:
        raise AssertionError("no LaunchError")
"""
    result = run_python("-c", code)
    assert result.returncode == 0, result.stderr


def test_kernel_is_described() -> None:
    from humming_cutlass import _C

    kernel = _C.Kernel("a.cubin", "entry")
    assert (kernel.cubin_path, kernel.entry) == ("a.cubin", "entry")


def _plan(**changes: Any) -> Any:
    import torch

    from humming_cutlass import _C

    options: dict[str, Any] = {
        "n": 16,
        "k": 64,
        "groups": 1,
        "element_a": "float16",
        "element_d": "float16",
        "b": torch.zeros(1, 1, 128, dtype=torch.int32),
        "scale": torch.zeros(1, 1, 16, dtype=torch.float16),
    }
    options.update(changes)
    return _C.GemmPlan(_C.Kernel("a.cubin", "entry"), **options)


def test_torch_tensors_on_the_cpu_are_refused() -> None:
    torch = pytest.importorskip("torch")
    from humming_cutlass.errors import ArgumentError

    on_cpu = "b: got a tensor on the CPU; allowed: a tensor on a CUDA device"
    with pytest.raises(ArgumentError, match=re.escape(on_cpu)):
        _plan()
    # A Parameter requires grad; the sentence must still be about the device.
    with pytest.raises(ArgumentError, match=re.escape(on_cpu)):
        _plan(b=torch.nn.Parameter(torch.zeros(1, 1, 128)))
    with pytest.raises(ArgumentError, match="b: got a tensor that cannot be exported"):
        _plan(b=torch.zeros(1, 1, 128, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize("wrong", [None, 3, "b", [1, 2]])
def test_what_is_no_tensor_is_refused(wrong: object) -> None:
    pytest.importorskip("torch")
    from humming_cutlass.errors import ArgumentTypeError

    with pytest.raises(ArgumentTypeError, match=f"b: got {type(wrong).__name__}; allowed: a CUDA tensor"):
        _plan(b=wrong)
