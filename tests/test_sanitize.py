"""bench/sanitize.sh and its launches, without a GPU: what is covered, and what the script makes of a tool's answer."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bench_tools

pytest.importorskip("torch")

from humming_cutlass import planner, support

ROOT = Path(__file__).parents[1]
H200 = planner.Device(arch="sm_90a", sm_count=132)


@pytest.fixture(scope="module")
def driver() -> Any:
    return bench_tools.load("sanitize")


@pytest.mark.parametrize("device", [H200, planner.Device(arch="sm_80", sm_count=108)], ids=lambda d: d.arch)
def test_launches_cover_what_can_go_wrong(driver: Any, device: planner.Device) -> None:
    cases = driver.cases(device)
    assert len(cases) <= 80, "a run takes less than a minute"
    for case in cases:
        schedule = case.config.schedule
        assert support.check(case.config) is None
        least = 0 if support.streams(schedule) else 1
        assert least <= case.split_k <= -(-case.k // schedule.tile_shape[2])
        assert case.m % schedule.tile_shape[0], "ragged"
        assert case.n % 16, "ragged"
    of = {case.config.schedule.mainloop for case in cases}
    assert of == (set(support.MAINLOOPS) if device == H200 else {support.SM80})
    for mainloop in of:
        mine = [case for case in cases if case.config.schedule.mainloop == mainloop]
        words = {(c.config.types.element_b, c.config.types.element_zero, c.config.types.group_size) for c in mine}
        for wanted in (
            ("int4", "none", 128),
            ("uint4", "integer", 64),
            ("float4_e2m1", "none", 16),
            ("int6", "none", -1),
        ):
            assert wanted in words
        if mainloop != support.SM90_DECODE:  # which takes no more tokens than its tile and splits nothing
            assert {1, 3} <= {case.split_k for case in mine}
            assert any(case.split_k == 0 for case in mine) == (mainloop == support.SM90)
            assert any(case.split_k == 2 for case in mine) == (mainloop == support.SM90)
            assert {True, False} == {case.bias for case in mine}
            assert any(case.m > case.config.schedule.tile_shape[0] for case in mine)
        assert any(case.k % 64 for case in mine)
    everything = {case.config for case in cases}
    int4 = next(case.config.types for case in cases if case.config.types.element_b == "int4")
    if device == H200:
        assert set(planner.schedules(int4, H200)) <= everything, "every SM90 kernel of one format"


def _run(tmp_path: Path, sanitizer: str | None, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with a sanitizer and a Python that are shell scripts."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {"python3": '#!/bin/sh\necho "python $*" >>"$TRACE"\necho "3 launches of 2 kernels, all in bounds"\n'}
    if sanitizer is not None:
        scripts["compute-sanitizer"] = f'#!/bin/sh\necho "sanitizer $*" >>"$TRACE"\n{sanitizer}\n'
    for name, text in scripts.items():
        path = folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "OUT": str(tmp_path / "out"), "TRACE": str(tmp_path / "trace")}
    return subprocess.run(
        ["bash", str(ROOT / "bench" / "sanitize.sh"), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script")


@pytest.mark.skipif(os.path.exists("/usr/local/cuda/bin/compute-sanitizer"), reason="there is a compute-sanitizer")
def test_no_sanitizer(tmp_path: Path) -> None:
    done = _run(tmp_path, None)
    assert done.returncode == 2
    assert "got no compute-sanitizer; allowed: COMPUTE_SANITIZER, PATH" in done.stderr


def test_unknown_tool(tmp_path: Path) -> None:
    done = _run(tmp_path, "exit 0", "leakcheck")
    assert done.returncode == 2
    assert "got tool 'leakcheck'; allowed: memcheck, racecheck" in done.stderr


def test_clean(tmp_path: Path) -> None:
    done = _run(tmp_path, 'echo "5 launches of 4 kernels, all in bounds"; [ -n "$PYTORCH_NO_CUDA_MEMORY_CACHING" ]')
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("clean, 5 launches of 4 kernels") == 2
    first, memcheck, racecheck = (tmp_path / "trace").read_text().splitlines()
    assert first == "python bench/sanitize.py --compile-only"
    for tool, line in (("memcheck", memcheck), ("racecheck", racecheck)):
        assert line == f"sanitizer --tool {tool} --error-exitcode 1 --print-limit 5 python3 bench/sanitize.py"


@pytest.mark.parametrize("answer", ["echo '5 launches of 4 kernels'; echo HAZARD; exit 1", "echo nothing ran; exit 0"])
def test_findings_and_runs_without_launches_fail(tmp_path: Path, answer: str) -> None:
    done = _run(tmp_path, answer, "racecheck")
    assert done.returncode == 1
    assert "racecheck: FAILED" in done.stdout
    assert ("HAZARD" in done.stdout) == ("HAZARD" in answer)
    assert (tmp_path / "out" / "sanitize-racecheck.txt").exists()
