"""The key of a kernel in the cache: what it covers, and what it does not."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from build_tools import empty_cache, fake_nvcc, kernel
from humming_cutlass import build, emitter, planner, support
from humming_cutlass.build import compile as compile_module
from humming_cutlass.config import TypeConfig


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and a fake compiler; nothing of the machine's own is found."""
    return empty_cache(tmp_path, monkeypatch)


def test_key_covers_what_decides_the_result(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = build.find_compiler()
    keys = {
        "base": build.kernel_key(kernel(), compiler),
        "text": build.kernel_key(kernel(text="other"), compiler),
        "arch": build.kernel_key(kernel(arch="sm_90"), compiler),
        "suffix": build.kernel_key(kernel(arch="sm_90a"), compiler),
    }
    fake_nvcc(tmp_path, version="13.1")
    keys["compiler"] = build.kernel_key(kernel(), build.find_compiler())
    monkeypatch.setenv("HUMMING_CUTLASS_EXTRA_CUDA_FLAGS", "-lineinfo")
    keys["flags"] = build.kernel_key(kernel(), compiler)
    monkeypatch.delenv("HUMMING_CUTLASS_EXTRA_CUDA_FLAGS")
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    keys["nvcc's own flags"] = build.kernel_key(kernel(), compiler)
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    monkeypatch.setattr(compile_module, "__version__", "0.0.0")
    keys["library"] = build.kernel_key(kernel(), compiler)
    assert len(set(keys.values())) == len(keys), keys


def test_key_covers_header_contents_and_no_paths_or_times(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = build.find_compiler()

    def key_with(folder: str, text: str) -> str:
        include = tmp_path / folder
        for name in ("cutlass/cutlass.h", "cute/tensor.hpp"):
            (include / name).parent.mkdir(parents=True)
            (include / name).write_text(text)
        monkeypatch.setenv("HUMMING_CUTLASS_CUTLASS_DIR", str(include))
        return build.kernel_key(kernel(), compiler)

    base = key_with("a", "same")
    time.sleep(0.01)
    assert key_with("b", "same") == base
    assert key_with("c", "else") != base  # as long as the other


def _real_kernels() -> dict[str, build.KernelSource]:
    """A kernel of each mainloop, and the one that packs."""
    types = TypeConfig(
        element_a="float16", element_b="int4", element_d="float16", element_scale="float16", group_size=128
    )
    device = planner.Device(arch="sm_90a", sm_count=132)
    kernels = {
        mainloop: emitter.emit(planner.schedules(types, device, mainloops=[mainloop])[0])
        for mainloop in support.MAINLOOPS
    }
    return kernels | {"pack": emitter.emit_pack("int4", "sm_90a")}


@pytest.fixture
def own_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of this library's headers that may be edited, read again by every key."""
    copy = tmp_path / "include"
    shutil.copytree(build.include_directories()[0] / "humming_cutlass", copy / "humming_cutlass")
    monkeypatch.setattr(compile_module, "include_directories", lambda *, settings: [copy])
    compile_module._headers.cache_clear()
    yield copy / "humming_cutlass"
    compile_module._headers.cache_clear()


@pytest.mark.parametrize(
    ("header", "changed"),
    [
        ("kernel/gemm_sm80.hpp", {support.SM80}),
        ("collective/mma_sm80_cpasync_multistage.hpp", {support.SM80}),
        ("epilogue/split_k.hpp", {support.SM80}),
        ("collective/mma_sm90_tma_gmma_rs_warpspecialized.hpp", {support.SM90}),
        ("dequant/group_scaled.hpp", {support.SM90}),
        ("epilogue/cluster_split_k.hpp", {support.SM90}),
        ("collective/mma_sm90_bulk_multistage.hpp", {support.SM90_DECODE}),
        ("arch/sm90.hpp", {support.SM90, support.SM90_DECODE}),
        ("collective/mma_atom_sm80.hpp", {support.SM80, support.SM90_DECODE}),
        ("dequant/integer.hpp", {*support.MAINLOOPS, "pack"}),
        ("layout/group_map.hpp", {*support.MAINLOOPS}),
        ("device/arguments.hpp", {*support.MAINLOOPS, "pack"}),
        ("kernel/pack.hpp", {"pack"}),
        ("reference/host_weight.hpp", set()),
    ],
)
def test_key_covers_the_headers_that_a_kernel_includes(
    header: str, changed: set[str], cache: Path, own_headers: Path
) -> None:
    """Directly or through another header; work on one mainloop leaves the kernels of the others in the cache."""
    compiler = build.find_compiler()
    kernels = _real_kernels()
    before = {name: build.kernel_key(source, compiler) for name, source in kernels.items()}
    compile_module._headers.cache_clear()
    assert {name: build.kernel_key(source, compiler) for name, source in kernels.items()} == before
    with (own_headers / header).open("a") as file:
        file.write("// edited\n")
    compile_module._headers.cache_clear()
    after = {name: build.kernel_key(source, compiler) for name, source in kernels.items()}
    assert {name for name in kernels if after[name] != before[name]} == changed


def test_our_headers_are_included_by_their_full_name() -> None:
    """So that the key, which follows includes by name, misses none."""
    ours = build.include_directories()[0]
    found = 0
    for header in (ours / "humming_cutlass").rglob("*.hpp"):
        for directive in re.findall(r"^\s*#\s*include\b\s*(.*)$", header.read_text(), re.MULTILINE):
            assert re.fullmatch(r'<[\w./]+>|"humming_cutlass/[\w./]+"', directive.split("//")[0].strip()), header
            if directive.startswith('"'):
                assert (ours / directive.split('"')[1]).is_file(), f"{header}: {directive}"
                found += 1
    assert found > 30
