"""Nsight Compute over single launches: what a kernel waits for, and how near it comes to the peaks of the GPU.

    python bench/counters.py --points 8192x8192:1,8192x8192:256 [--json bench/results/h200-counters.jsonl]

Needs `ncu` (in PATH or $CUDA_HOME/bin) and the right to read performance counters. Caches are flushed before each
launch and the clock is left alone. bfloat16 activations, int4 weights in groups of 128; kernels by the planner. A row
holds the time, the achieved memory bandwidth, shares of the peaks in percent (of the tensor cores by the
counter's name), and stall reasons as warps stalled for
each issued instruction, the largest first.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats", "Occupancy")
SHARES = {
    "memory_pct": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_pct": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_pct": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_active_pct": "sm__instruction_throughput.avg.pct_of_peak_sustained_active",
}
STALL = "smsp__average_warps_issue_stalled_"
TIME = "gpu__time_duration.sum"
DRAM_RATE = "dram__bytes_read.sum.per_second"
UNITS = {
    "ns": 1e-3, "us": 1.0, "ms": 1e3, "nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3,
    "byte/s": 1e-9, "Kbyte/s": 1e-6, "Mbyte/s": 1e-3, "Gbyte/s": 1.0, "Tbyte/s": 1e3,
}  # fmt: skip
"""Factors to microseconds and to gigabytes per second."""


def parse_points(text: str) -> list[tuple[int, int, int]]:
    """Returns (n, k, m) of each `NxK:M`."""
    points = []
    for word in text.split(","):
        shape, _, m = word.partition(":")
        n, _, k = shape.partition("x")
        if not (n.isdigit() and k.isdigit() and m.isdigit()):
            raise SystemExit(f"--points: got {word!r}; allowed: NxK:M, such as 8192x8192:1")
        points.append((int(n), int(k), int(m)))
    return points


def launch(points: Sequence[tuple[int, int, int]]) -> None:
    """Launches one GEMM for each point, and prints its kernel: what runs under the profiler."""
    import torch

    from humming_cutlass import ops
    from humming_cutlass.benchmark.problem import Problem, RandomWeight

    device = torch.device("cuda", 0)
    for n, k, m in points:
        problem = Problem.create(n=n, k=k, element_a="bfloat16", weight="int4", group_size=128)
        weight = RandomWeight.draw(problem, device, seed=0).packed
        a = torch.randn(m, k, device=device).to(torch.bfloat16)
        ops.gemm(a, weight)
        torch.cuda.synchronize()
        choice = ops.choose(weight, m)
        print("point", json.dumps({"kernel": choice.config.name, "split_k": choice.split_k}), flush=True)


def find_ncu() -> str:
    """Returns the profiler."""
    found = shutil.which("ncu")
    for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if found is None and root is not None and (pathlib.Path(root) / "bin" / "ncu").exists():
            found = str(pathlib.Path(root) / "bin" / "ncu")
    if found is None:
        raise SystemExit("ncu: found nowhere; allowed: in PATH, CUDA_HOME/bin or /usr/local/cuda/bin")
    return found


def command(ncu: str, points: str) -> list[str]:
    """Returns the profiler's command line."""
    words = [ncu, "--target-processes", "all", "--clock-control", "none", "--cache-control", "all", "--csv"]
    words += ["--page", "raw", "--kernel-name", "humming_cutlass_gemm"]
    for section in SECTIONS:
        words += ["--section", section]
    words += ["--metrics", f"{TIME},{DRAM_RATE},regex:{STALL}.*_per_issue_active.ratio"]
    return [*words, sys.executable, str(pathlib.Path(__file__).resolve()), "--points", points, "--launch"]


def parse(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns what the launches printed of their kernels, and a dict of metrics for each profiled launch."""
    kernels = [json.loads(line[len("point ") :]) for line in text.splitlines() if line.startswith("point ")]
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.reader(io.StringIO("\n".join(lines))))
    if len(table) < 2:
        return kernels, []
    names, units = table[0], table[1]
    return kernels, [metrics(names, units, row) for row in table[2:]]


def metrics(names: Sequence[str], units: Sequence[str], row: Sequence[str]) -> dict[str, Any]:
    """Returns the figures of one launch."""
    values: dict[str, float] = {}
    for name, unit, text in zip(names, units, row, strict=False):
        try:
            values[name] = float(text.replace(",", "")) * UNITS.get(unit, 1.0)
        except ValueError:
            continue
    stalls = {
        name.removeprefix(STALL).removesuffix("_per_issue_active.ratio"): round(value, 2)
        for name, value in sorted(values.items(), key=lambda item: -item[1])
        if name.startswith(STALL) and name.endswith("_per_issue_active.ratio") and value >= 0.05
    }
    tensor = {
        name: round(value, 1)
        for name, value in values.items()
        if "pipe_tensor" in name and name.endswith(".avg.pct_of_peak_sustained_active") and value > 0
    }
    return {
        "us": values.get(TIME),
        "dram_gbps": round(values[DRAM_RATE], 1) if DRAM_RATE in values else None,
        **{key: values.get(name) for key, name in SHARES.items()},
        "tensor_pct": tensor,
        "stalled_per_issue": stalls,
    }


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", default="8192x8192:1,8192x8192:16,8192x8192:256,8192x8192:4096")
    parser.add_argument("--json", type=pathlib.Path, help="append rows to this file")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    points = parse_points(arguments.points)
    if arguments.launch:
        launch(points)
        return 0
    done = subprocess.run(command(find_ncu(), arguments.points), capture_output=True, text=True, check=False)
    kernels, measured = parse(done.stdout)
    if done.returncode or len(measured) != len(points) or len(kernels) != len(points):
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
        raise SystemExit(f"ncu: exit status {done.returncode}, {len(measured)} launches profiled of {len(points)}")
    import torch

    common = {
        "suite": "counters",
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": f"python bench/counters.py --points {arguments.points}",
    }
    for (n, k, m), kernel, figures in zip(points, kernels, measured, strict=True):
        line = json.dumps(common | {"n": n, "k": k, "m": m} | kernel | figures)
        print(line)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
