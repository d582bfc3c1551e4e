"""Finding the compiler, and compiling with a real one, from the system and from pip."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from build_tools import calls, fake_nvcc, kernel, run_python
from humming_cutlass import build, errors
from humming_cutlass.build import toolchain

#: Every GPU that this library names.
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any CUDA compiler, but with a host compiler, cmake and ninja in PATH."""
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "CXX"):
        monkeypatch.delenv(name, raising=False)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("gcc", "cmake", "ninja"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    original = toolchain._package_directory
    hidden = ("nvidia", "cmake", "ninja")
    monkeypatch.setattr(toolchain, "_package_directory", lambda name: [] if name in hidden else original(name))
    return tmp_path


def test_without_a_compiler_the_error_says_where_it_looked_and_what_to_do(bare: Path) -> None:
    with pytest.raises(errors.ToolchainError) as caught:
        build.find_toolchain()
    message = str(caught.value)
    for part in ("CUDACXX=unset", "CUDA_HOME=unset", f"PATH={bare}/tools", "nvidia/cu*/bin", build.INSTALL_COMMAND):
        assert part in message
    assert build.INSTALL_COMMAND == 'pip install "humming-cutlass[cuda]" (in a checkout: pip install ".[cuda]")'


def test_compiling_without_a_compiler(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUMMING_CUTLASS_CACHE_DIR", str(bare / "cache"))
    with pytest.raises(errors.ToolchainError, match="CUDA compiler: got none"):
        build.compile_kernels([kernel()])
    # The next call works, once there is one.
    monkeypatch.setenv("CUDACXX", str(fake_nvcc(bare)))
    assert build.find_compiler().version == (13, 0)


def test_order_of_preference(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the last to the first: each is found once it is there, before all that were."""
    wheel = bare / "site" / "nvidia"
    monkeypatch.setattr(toolchain, "_package_directory", lambda name: [wheel] if name == "nvidia" else [])
    fake_nvcc(wheel / "cuda_nvcc", version="12.9")
    assert build.find_compiler().version_text == "release 12.9, V12.9.1"
    fake_nvcc(wheel / "cu12", version="12.8")
    fake_nvcc(wheel / "cu13", version="13.0")
    assert build.find_compiler().origin == "pip"
    assert build.find_compiler().version == (13, 0)
    on_path = fake_nvcc(bare / "on_path", version="13.1")
    monkeypatch.setenv("PATH", f"{bare}/tools:{on_path.parent}")
    assert (build.find_compiler().nvcc, build.find_compiler().origin) == (on_path, "PATH")
    fake_nvcc(bare / "cuda_path", version="13.2")
    monkeypatch.setenv("CUDA_PATH", str(bare / "cuda_path"))
    assert build.find_compiler().version == (13, 2)
    fake_nvcc(bare / "cuda_home", version="13.3")
    monkeypatch.setenv("CUDA_HOME", str(bare / "cuda_home"))
    assert (build.find_compiler().version, build.find_compiler().origin) == ((13, 3), "CUDA_HOME")
    named = fake_nvcc(bare / "named", version="13.4")
    monkeypatch.setenv("CUDACXX", str(named))
    assert (build.find_compiler().nvcc, build.find_compiler().origin) == (named, "CUDACXX")


def test_a_compiler_named_by_the_user_is_binding(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{bare}/tools:{fake_nvcc(bare).parent}")
    monkeypatch.setenv("CUDACXX", str(bare / "nothing"))
    with pytest.raises(errors.ToolchainError, match=r"nothing \(CUDACXX\): not a program"):
        build.find_toolchain()
    monkeypatch.setenv("CUDACXX", "nvcc")  # a name is looked up
    assert build.find_toolchain().nvcc == bare / "bin" / "nvcc"


@pytest.mark.parametrize(
    ("arch", "version", "needed"),
    [("sm_120a", "12.4", "12.8"), ("sm_100a", "12.6", "12.8"), ("sm_90a", "11.8", "12.0"), ("sm_89", "11.7", "11.8")],
)
def test_a_compiler_too_old_for_the_gpu(
    bare: Path, monkeypatch: pytest.MonkeyPatch, arch: str, version: str, needed: str
) -> None:
    monkeypatch.setenv("CUDACXX", str(fake_nvcc(bare, version=version)))
    with pytest.raises(errors.ToolchainError) as caught:
        build.find_toolchain(arch)
    message = str(caught.value)
    assert f"CUDA {version} is too old" in message
    assert f"CUDA {needed} or newer, which {arch} needs" in message
    assert build.INSTALL_COMMAND in message
    fake_nvcc(bare, version=needed)
    assert build.find_toolchain(arch).version_text == f"release {needed}, V{needed}.1"


def test_a_compiler_too_old_is_passed_over_for_a_newer_one(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = fake_nvcc(bare / "old", version="12.4"), fake_nvcc(bare / "new", version="13.0")
    monkeypatch.setenv("PATH", f"{bare}/tools:{old.parent}:{new.parent}")
    assert build.find_compiler("sm_80").nvcc == old
    assert build.find_compiler("sm_120a").nvcc == new


def test_a_program_that_is_no_compiler(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = fake_nvcc(bare)
    nvcc.write_text("#!/bin/sh\necho something else\n")
    monkeypatch.setenv("CUDACXX", str(nvcc))
    with pytest.raises(errors.ToolchainError, match="does not tell its version: something else"):
        build.find_toolchain()


@pytest.mark.parametrize("name", ["cmake", "ninja"])
def test_missing_build_programs(bare: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("CUDACXX", str(fake_nvcc(bare)))
    (bare / "tools" / name).unlink()
    with pytest.raises(errors.ToolchainError, match=f"^{name}: got none") as caught:
        build.find_toolchain()
    assert build.INSTALL_COMMAND in str(caught.value)
    build.find_compiler()  # enough for what is in the cache


def test_host_compiler(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDACXX", str(fake_nvcc(bare)))
    assert build.find_toolchain().options == ()
    gcc = bare / "tools" / "gcc"
    gcc.rename(bare / "tools" / "clang++")
    assert build.find_toolchain().options == ("-ccbin", str(bare / "tools" / "clang++"))
    (bare / "tools" / "clang++").unlink()
    with pytest.raises(errors.ToolchainError, match=r"host C\+\+ compiler: got none"):
        build.find_toolchain()
    monkeypatch.setenv("NVCC_CCBIN", "/somewhere/g++")
    assert build.find_toolchain().options == ()


def test_the_version_is_asked_for_once_and_again_after_a_change(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = fake_nvcc(bare)
    monkeypatch.setenv("CUDACXX", str(nvcc))
    memo = bare / "compilers.json"
    for _ in range(3):
        toolchain._known_versions.clear()
        assert build.find_compiler(memo=memo).version == (13, 0)
    assert calls(bare) == ["version"]
    fake_nvcc(bare, version="13.1", delay=0.25)  # another size
    assert build.find_compiler(memo=memo).version == (13, 1)
    memo.write_text("[1, {")
    assert build.find_compiler(memo=memo).version == (13, 1)
    memo.write_text(json.dumps({str(nvcc): {"stamps": [], "version": "release 1.0"}}))
    assert build.find_compiler(memo=memo).version == (13, 1)


def test_a_wrapper_script_does_not_hide_an_upgrade(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fake_nvcc(bare / "toolkit")
    wrapper = bare / "wrapper"
    wrapper.write_text(
        f"#!/bin/sh\ncase $1 in --dryrun) echo '#$ _HERE_={real.parent}' >&2; exit 0;; esac\nexec {real} \"$@\"\n"
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(wrapper))
    memo = bare / "compilers.json"
    assert build.find_compiler(memo=memo).version == (13, 0)
    fake_nvcc(bare / "toolkit", version="13.1", delay=0.25)
    assert build.find_compiler(memo=memo).version == (13, 1)


def test_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HUMMING_CUTLASS_CUTLASS_DIR", raising=False)
    ours, cutlass = build.include_directories()
    assert (ours / "humming_cutlass" / "device" / "arguments.hpp").is_file()
    assert (cutlass / "cute" / "tensor.hpp").is_file()
    for name in ("cutlass/cutlass.h", "cute/tensor.hpp"):
        (tmp_path / "include" / name).parent.mkdir(parents=True)
        (tmp_path / "include" / name).touch()
    monkeypatch.setenv("HUMMING_CUTLASS_CUTLASS_DIR", str(tmp_path))
    assert build.include_directories() == [ours, tmp_path / "include"]
    monkeypatch.setenv("HUMMING_CUTLASS_CUTLASS_DIR", str(tmp_path / "nothing"))
    with pytest.raises(errors.ToolchainError, match=r"HUMMING_CUTLASS_CUTLASS_DIR: got no cutlass/cutlass\.h"):
        build.include_directories()


def test_our_headers_know_no_framework() -> None:
    ours = build.include_directories()[0] / "humming_cutlass"
    headers = list(ours.rglob("*.hpp"))
    assert headers
    for header in headers:
        for word in ("torch", "Python.h", "nanobind", "pybind"):
            assert f"#include <{word}" not in header.read_text(), header


# --- Real compilers --------------------------------------------------------------------------------------------------

_KERNEL = """
#include <cutlass/bfloat16.h>

#include "humming_cutlass/device/arguments.hpp"

extern "C" __global__ void scale(humming_cutlass::GemmArguments arguments, float factor) {
  auto* values = static_cast<cutlass::bfloat16_t*>(arguments.ptr_d);
  values[threadIdx.x] = cutlass::bfloat16_t(float(values[threadIdx.x]) * factor);
}
"""

_COMPILE_ALL = f"""
import json, sys
from humming_cutlass import build
sources = [build.KernelSource(f"scale_{{arch}}", {_KERNEL!r}, arch) for arch in {ARCHS!r}]
found = build.compile_kernels(sources)
tools = build.find_toolchain()
print(json.dumps({{
    "origin": tools.origin, "nvcc": str(tools.nvcc), "cmake": str(tools.cmake), "ninja": str(tools.ninja),
    "version": tools.version_text, "cubins": {{name: str(path) for name, path in found.items()}}}}))
"""


def _check_cubins(found: dict[str, Path]) -> None:
    contents = {name: path.read_bytes() for name, path in found.items()}
    assert len(contents) == len(ARCHS)
    for name, content in contents.items():
        assert content.startswith(b"\x7fELF"), name
        info = build.kernel_info(found[name])
        assert info.registers > 0
        assert info.spill_bytes == 0
        print(f"{name}: {info.registers} registers, {info.seconds:.1f} s")
    assert len(set(contents.values())) == len(ARCHS)  # one GPU each


@pytest.mark.slow
@pytest.mark.compile
def test_real_compiler_for_every_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUMMING_CUTLASS_CACHE_DIR", str(tmp_path / "cache"))
    sources = [build.KernelSource(f"scale_{arch}", _KERNEL, arch) for arch in ARCHS]
    _check_cubins(build.compile_kernels(sources))


@pytest.mark.slow
@pytest.mark.compile
def test_real_compiler_refuses_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUMMING_CUTLASS_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(errors.CompileError, match=r'broken\.cu\(1\): error: identifier "nothing" is undefined'):
        build.compile_kernels([build.KernelSource("broken", "__global__ void broken() { nothing(); }", "sm_80")])


def _pip_toolchain(tmp_path: Path) -> dict[str, str]:
    """The extra `[cuda]`: this environment's if it is installed, else installed into a folder of the test."""
    spec = importlib.util.find_spec("nvidia")
    for entry in [] if spec is None else spec.submodule_search_locations or []:
        if (Path(entry) / "cu13" / "bin" / "nvcc").is_file() and importlib.util.find_spec("ninja") is not None:
            return {}
    parts = ["nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-nvvm"]
    packages = [*(f"{part}==13.0.*" for part in parts), "cmake>=3.26", "ninja>=1.11"]
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"the compiler's packages cannot be installed here: {done.stderr.strip()[-300:]}")
    return {"PYTHONPATH": os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])}


@pytest.mark.slow
@pytest.mark.compile
def test_compiler_from_pip_with_the_system_toolkit_hidden(tmp_path: Path) -> None:
    """A machine with a host compiler and the extra `[cuda]`, and nothing else: cubins for every GPU."""
    environment = _pip_toolchain(tmp_path)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "gcc", "g++", "as", "ld", "cat", "rm"):
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    hidden = dict.fromkeys(("CUDACXX", "CUDA_HOME", "CUDA_PATH"), "")
    cache = str(tmp_path / "cache")
    process = run_python(_COMPILE_ALL, PATH=str(tools), HUMMING_CUTLASS_CACHE_DIR=cache, **hidden, **environment)
    output, error = process.communicate()
    assert process.returncode == 0, error
    result = json.loads(output)
    print(result["nvcc"], result["version"], result["cmake"], result["ninja"])
    assert result["origin"] == "pip"
    assert result["version"].startswith("release 13.0")
    for name in ("nvcc", "cmake", "ninja"):
        assert not result[name].startswith(("/usr/bin", "/usr/local/bin", str(tools)))
    _check_cubins({name: Path(path) for name, path in result["cubins"].items()})
