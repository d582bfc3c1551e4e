"""Accuracy grid on a GPU: every weight type x activation type x group size x m, against float64.

    python bench/grid.py --out bench/results/h200-grid.jsonl [--types int4,uint4] [--m 1,7,16,33,128,1000]

The kernel is the one with the smallest tile that holds m, or the largest tile; k is split in one to three parts by
turns. Every row holds the relative error, and the largest element-wise error as a fraction of its bound
(u_out * |R| + k * 2^-24 * sum |a * w|, docs/architecture.md). The exit status is 1 when a row is out of bounds.
Outputs are poisoned with NaN first; inputs are drawn afresh for every row.
"""

from __future__ import annotations

import argparse
import datetime
import json
import pathlib
import sys
import time

import torch

import humming_cutlass
from humming_cutlass import build, dtypes, emitter, ops, planner, reference, support, testing
from humming_cutlass.config import GemmConfig, TypeConfig

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
SHAPE_N, SHAPE_K = 264, 1152
_SCALED_BOUND = {"float16": 1e-3, "bfloat16": 4e-3}


def type_grid(names: list[str] | None, groups: list[int]) -> list[TypeConfig]:
    """Returns every legal combination; uint types with integer and, for all types, with floating zero points."""
    grid = []
    floating = ("integer", "float32")
    for name, weight in dtypes.WEIGHT_TYPES.items():
        if names and name not in names:
            continue
        zeros = floating if weight.kind is dtypes.Kind.UINT else ("none",)
        for element_a in support.ACTIVATION_TYPES:
            for group_size in groups:
                for zero in zeros:
                    types = TypeConfig(
                        element_a=element_a,
                        element_b=name,
                        element_d=element_a,
                        element_scale=element_a,
                        element_zero=zero,
                        group_size=group_size,
                    )
                    if support.check_types(types) is None:
                        grid.append(types)
    return grid


def choose(kernels: list[GemmConfig], m: int, seed: int) -> planner.Choice:
    """Returns the kernel with the smallest tile that holds m tokens, and a split of k that depends on the seed."""
    by_tile = sorted(kernels, key=lambda config: config.schedule.tile_shape)
    config = next((config for config in by_tile if config.schedule.tile_shape[0] >= m), by_tile[-1])
    splits = (
        1 if config.schedule.mainloop == support.SM90_DECODE else min(3, -(-SHAPE_K // config.schedule.tile_shape[2]))
    )
    return planner.Choice(config=config, split_k=1 + seed % splits)


def check(types: TypeConfig, m: int, choice: planner.Choice, seed: int) -> dict[str, object]:
    """Runs one point and returns its row."""
    problem = testing.random_problem(types, m, SHAPE_N, SHAPE_K, device="cuda", seed=seed)
    if choice.config.schedule.mainloop == support.SM90 and not problem.packed.scales_fit:
        others = planner.schedules(types, ops.planner_device(0), mainloops=support.MAINLOOPS_FOR_ANY_TENSORS)
        choice = choose(others, m, seed)
    out = torch.full((m, SHAPE_N), float("nan"), dtype=getattr(torch, types.element_d), device="cuda")
    ops.gemm(problem.a, problem.packed, out=out, config=choice.config, split_k=choice.split_k)
    weight = torch.from_numpy(
        reference.dequantize(
            problem.codes,
            problem.scale,
            dtype=types.element_b,
            group_size=types.group_size,
            zero=problem.zero,
            operand=types.element_a,
        )
    ).to("cuda", torch.float64)
    a = problem.a.double()
    expected = a @ weight.T
    # The SM90 mainloop rounds a weight once when it multiplies it by its group scale.
    scaled = choice.config.schedule.mainloop == support.SM90 and types.group_size != -1
    u_weight = UNIT_ROUNDOFF[types.element_a] if scaled else 0.0
    magnitude = a.abs() @ weight.abs().T
    bound = UNIT_ROUNDOFF[types.element_d] * expected.abs() + (u_weight + SHAPE_K * 2.0**-24) * magnitude
    difference = (out.double() - expected).abs()
    relative = float((out.double() - expected).norm() / expected.norm())
    worst = float((difference / bound.clamp_min(1e-300)).nan_to_num(nan=float("inf")).max())
    limit = _SCALED_BOUND[types.element_d] if scaled else testing.relative_bound(types.element_d)
    return {
        "impl": "humming_cutlass",
        "kernel": choice.config.name,
        "split_k": choice.split_k,
        "a": types.element_a,
        "b": types.element_b,
        "zero": types.element_zero,
        "group": types.group_size,
        "m": m,
        "n": SHAPE_N,
        "k": SHAPE_K,
        "rel_err": relative,
        "worst_element": worst,
        "ok": relative <= limit and worst <= 1.0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("grid.jsonl"))
    parser.add_argument("--types", default="")
    parser.add_argument("--groups", default="-1,32,128")
    parser.add_argument("--m", default="1,7,16,33,128,1000")
    parser.add_argument("--mainloop", default="", help="only kernels of this mainloop")
    parser.add_argument("--compile-only", default="", metavar="ARCH", help="fill the cache for a GPU such as sm_90a")
    args = parser.parse_args()
    tokens = [int(m) for m in args.m.split(",")]
    grid = type_grid(args.types.split(",") if args.types else None, [int(g) for g in args.groups.split(",")])
    device = planner.Device(arch=args.compile_only, sm_count=132) if args.compile_only else ops.planner_device(0)

    mainloops = [args.mainloop] if args.mainloop else None
    kernels = {types: planner.schedules(types, device, mainloops=mainloops) for types in grid}
    points = [(types, m, choose(kernels[types], m, seed)) for seed, types in enumerate(grid) for m in tokens]

    start = time.perf_counter()
    configs = dict.fromkeys(choice.config for _, _, choice in points)
    packing = dict.fromkeys(emitter.emit_pack(types.element_b, device.arch) for types in grid)
    build.compile_kernels([*packing, *(emitter.emit(config) for config in configs)], progress=True)
    if args.compile_only:
        print(f"{len(configs)} kernels compiled in {time.perf_counter() - start:.0f} s")
        return 0
    ops.prepare(configs)
    compile_seconds = time.perf_counter() - start
    head = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "humming_cutlass": humming_cutlass.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "command": "python bench/grid.py " + " ".join(sys.argv[1:]),
    }
    failed = 0
    with args.out.open("w") as stream:
        for seed, (types, m, choice) in enumerate(points):
            row = check(types, m, choice, seed) | head
            failed += not row["ok"]
            if not row["ok"]:
                print(json.dumps(row), flush=True)
            stream.write(json.dumps(row) + "\n")
    print(f"compiled in {compile_seconds:.0f} s; {len(points) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
