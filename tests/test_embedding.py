"""Other CMake projects: by add_subdirectory, by find_package, and through the installed Python package."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

import humming_cutlass
from build_tools import calls, fake_nvcc, traits_version
from humming_cutlass import build

ROOT = Path(__file__).parents[1]

_USER = """
cmake_minimum_required(VERSION 3.21)
project(user LANGUAGES CXX)
{find}
add_executable(program program.cpp)
target_link_libraries(program PRIVATE humming_cutlass::headers)
humming_cutlass_add_kernels(kernels ARCH sm_90a SOURCES scale.cu OPTIONS -lineinfo {nvcc})
get_target_property(cubins kernels HUMMING_CUTLASS_CUBINS)
file(WRITE "${{CMAKE_BINARY_DIR}}/cubins.txt" "${{cubins}}\\n${{kernels_CUBINS}}")
"""

_PROGRAM = """
#include <humming_cutlass/device/arguments.hpp>

int main() { return humming_cutlass::kKernelTraitsVersion == VERSION ? 0 : 1; }
"""

_KERNEL = """
#include <cutlass/bfloat16.h>

#include "humming_cutlass/device/arguments.hpp"

extern "C" __global__ void scale(humming_cutlass::GemmArguments arguments) {
  static_cast<cutlass::bfloat16_t*>(arguments.ptr_d)[threadIdx.x] = cutlass::bfloat16_t(2.0f);
}
"""


def _cmake(*arguments: object) -> str:
    tools = build.find_toolchain()
    command = [str(tools.cmake), *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def _use(folder: Path, find: str, *options: str, nvcc: Path | None) -> Path:
    """Writes a project, builds it twice, runs its program, and returns its build folder."""
    (folder / "source").mkdir()
    (folder / "source" / "CMakeLists.txt").write_text(_USER.format(find=find, nvcc=f"NVCC {nvcc}" if nvcc else ""))
    (folder / "source" / "program.cpp").write_text(_PROGRAM.replace("VERSION", str(traits_version())))
    (folder / "source" / "scale.cu").write_text(_KERNEL)
    tools = build.find_toolchain()
    configure = ("-S", folder / "source", "-B", folder / "build", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools.ninja}")
    _cmake(*configure, *options, f"-DHUMMING_CUTLASS_NVCC={tools.nvcc}")
    _cmake("--build", folder / "build")
    subprocess.run([folder / "build" / "program"], check=True)
    cubin = folder / "build" / "scale.cubin"
    assert cubin.is_file()
    assert (folder / "build" / "cubins.txt").read_text() == f"{cubin}\n{cubin}"
    # A second build has nothing to do; a touched source is compiled again.
    assert "no work to do" in _cmake("--build", folder / "build")
    (folder / "source" / "scale.cu").touch()
    assert "scale" in _cmake("--build", folder / "build")
    return folder / "build"


@pytest.fixture
def cutlass_option() -> str:
    """Points a source tree to the CUTLASS headers of this environment."""
    return f"-DHUMMING_CUTLASS_CUTLASS_DIR={build.include_directories()[1]}"


def test_add_subdirectory(tmp_path: Path, cutlass_option: str) -> None:
    nvcc = fake_nvcc(tmp_path)
    folder = _use(tmp_path, f'add_subdirectory("{ROOT}" humming_cutlass)', cutlass_option, nvcc=nvcc)
    assert calls(tmp_path) == ["../source/scale.cu"] * 2
    command = (folder / "build.ninja").read_text()
    assert f"-I{ROOT}/cpp/include" in command
    assert f"-I{build.include_directories()[1]}" in command
    assert "-lineinfo" in command
    assert "-gencode=arch=compute_90a,code=sm_90a" in command


def _install(tmp_path: Path, cutlass_option: str) -> Path:
    tools = build.find_toolchain()
    _cmake(
        *("-S", ROOT, "-B", tmp_path / "library", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools.ninja}"),
        *("-DHUMMING_CUTLASS_BUILD_PYTHON=OFF", cutlass_option),
    )
    _cmake("--install", tmp_path / "library", "--prefix", tmp_path / "prefix")
    return tmp_path / "prefix"


def test_find_package(tmp_path: Path, cutlass_option: str) -> None:
    prefix = _install(tmp_path, cutlass_option)
    find = "find_package(humming_cutlass 0.1 CONFIG REQUIRED)"
    folder = _use(tmp_path, find, f"-DCMAKE_PREFIX_PATH={prefix}", nvcc=fake_nvcc(tmp_path))
    command = (folder / "build.ninja").read_text()
    assert f"-I{prefix}/include -I{prefix}/include/humming_cutlass_third_party" in command
    assert str(ROOT) not in command
    assert "BSD-3-Clause" in (prefix / "include" / "humming_cutlass_third_party" / "LICENSE.txt").read_text()


@pytest.mark.slow
@pytest.mark.compile
def test_find_package_with_a_real_compiler(tmp_path: Path, cutlass_option: str) -> None:
    prefix = _install(tmp_path, cutlass_option)
    folder = _use(tmp_path, "find_package(humming_cutlass CONFIG REQUIRED)", f"-DCMAKE_PREFIX_PATH={prefix}", nvcc=None)
    assert (folder / "scale.cubin").read_bytes().startswith(b"\x7fELF")


def _installed() -> Path:
    for entry in humming_cutlass.__path__:
        if (Path(entry) / "share" / "cmake" / "humming_cutlass").is_dir():
            return Path(entry)
    pytest.skip("humming_cutlass is imported from a source tree, not installed")


def test_installed_package(tmp_path: Path) -> None:
    package = _installed()
    find = "find_package(humming_cutlass CONFIG REQUIRED)"
    _use(tmp_path, find, f"-Dhumming_cutlass_ROOT={package}", nvcc=fake_nvcc(tmp_path))
    (entry,) = importlib.metadata.entry_points(group="cmake.root", name="humming_cutlass")
    assert entry.value == "humming_cutlass"


_INCLUDE = re.compile(r"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", re.MULTILINE)


def test_installed_headers_are_complete(tmp_path: Path, cutlass_option: str) -> None:
    """Every header that an installed one includes is installed too."""
    include = _install(tmp_path, cutlass_option) / "include"
    cutlass = include / "humming_cutlass_third_party"
    missing = set()
    headers = [path for path in include.rglob("*") if path.suffix in (".h", ".hpp", ".inl")]
    assert len(headers) > 150
    for header in headers:
        for name in _INCLUDE.findall(header.read_text(errors="replace")):
            if name.split("/")[0] in ("cute", "cutlass", "humming_cutlass"):
                if not any((base / name).is_file() for base in (include, cutlass)):
                    missing.add(f"{header.relative_to(include)}: {name}")
            elif "/" not in name and (header.parent / name).suffix in (".hpp", ".inl"):
                assert (header.parent / name).is_file(), header
    # Included only where a vendor's build defines that it exists.
    allowed = "cutlass/version_extended.h"
    assert sorted(entry for entry in missing if not entry.endswith(allowed)) == []
    sizes = sum(path.stat().st_size for path in headers)
    assert sizes < 16e6, f"{sizes / 1e6:.1f} MB of headers"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("SOURCES a.cu", "ARCH: got ''"),
        ("ARCH sm90 SOURCES a.cu", "ARCH: got 'sm90'; allowed: sm_XX"),
        ("ARCH sm_90a", "SOURCES: got nothing"),
        ("nonsense ARCH sm_90a SOURCES a.cu", "got nonsense; allowed: SOURCES"),
    ],
)
def test_bad_calls_are_explained(tmp_path: Path, call: str, message: str) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(user LANGUAGES NONE)\n"
        f'include("{build.cmake_directory()}/HummingCutlassKernels.cmake")\n'
        f"humming_cutlass_add_kernels(kernels {call} NVCC nvcc)\n"
    )
    tools = build.find_toolchain()
    command = [str(tools.cmake), "-S", str(tmp_path), "-B", str(tmp_path / "build"), "-G", "Ninja"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())
