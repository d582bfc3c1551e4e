"""bench/counters.py without a profiler: its command line, and what it makes of a table."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bench_tools

ROOT = Path(__file__).parents[1]
TABLE = """==PROF== Connected to process 1
point {"kernel": "k1", "split_k": 1}
point {"kernel": "k2", "split_k": 2}
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum.per_second","gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio","smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio","smsp__average_warps_issue_stalled_wait_per_issue_active.ratio"
"","","ns","Tbyte/s","%","%","inst","inst","inst"
"0","humming_cutlass_gemm","9,500","4.2","91.5","12.5","0.01","3.5","0.75"
"1","humming_cutlass_gemm","45,000","0.5","10","88.25","1.25","0.5","0.06"
"""  # noqa: E501 - a table as the profiler prints it


@pytest.fixture(scope="module")
def counters() -> Any:
    return bench_tools.load("counters")


def test_table(counters: Any) -> None:
    kernels, (first, second) = counters.parse(TABLE)
    assert [kernel["kernel"] for kernel in kernels] == ["k1", "k2"]
    assert first["us"] == pytest.approx(9.5)
    assert first["dram_gbps"] == pytest.approx(4200)
    assert first["dram_pct"] == 91.5
    assert first["tensor_pct"] == {"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": 12.5}
    assert list(first["stalled_per_issue"].items()) == [("long_scoreboard", 3.5), ("wait", 0.75)]
    assert second["us"] == pytest.approx(45)
    assert list(second["stalled_per_issue"]) == ["barrier", "long_scoreboard", "wait"]


def test_points(counters: Any) -> None:
    assert counters.parse_points("8192x4096:1,64x32:7") == [(8192, 4096, 1), (64, 32, 7)]
    with pytest.raises(SystemExit, match=r"--points: got '8192x8192'; allowed: NxK:M"):
        counters.parse_points("8192x8192")


def test_a_profiler_that_fails(tmp_path: Path) -> None:
    """Its words are shown; nothing is written."""
    fake = tmp_path / "ncu"
    fake.write_text("#!/bin/sh\necho '==ERROR== no permission to read counters'\nexit 9\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    rows = tmp_path / "rows.jsonl"
    done = subprocess.run(
        [sys.executable, ROOT / "bench" / "counters.py", "--points", "64x64:1", "--json", rows],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
    )
    assert done.returncode == 1
    assert "no permission" in done.stderr
    assert "exit status 9, 0 launches profiled of 1" in done.stderr
    assert not rows.exists()
