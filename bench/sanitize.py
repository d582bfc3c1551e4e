"""What bench/sanitize.sh runs under compute-sanitizer: every kind of kernel on a few small ragged problems.

    python bench/sanitize.py [--compile-only] [--list]

Results are checked, so that a run that computes nothing is no clean run. The last line says how many launches there
were. Kernels are compiled before, by a run with --compile-only: the compiler need not be watched.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math

import torch

from humming_cutlass import ops, planner, support, testing
from humming_cutlass.config import GemmConfig, TypeConfig
from humming_cutlass.errors import UnsupportedError

N = 200  # neither whole atoms nor whole tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One launch."""

    config: GemmConfig
    split_k: int
    m: int
    n: int
    k: int
    bias: bool


def _formats() -> list[tuple[TypeConfig, int, bool]]:
    """Returns types, k, and whether all kernels of the types are run; k is no multiple of a k tile."""
    made = testing.make_types
    words = {"element_a": "bfloat16"}
    return [
        (made("int4", k=896, group_size=128, **words), 896, True),
        (made("uint4", k=576, group_size=64, **words), 576, False),  # with integer zero points
        (made("float4_e2m1", k=592, group_size=16, scale_dtype="float8_e4m3", **words), 592, False),
        (made("int6", k=616, **words), 616, False),  # scales of channels, k within an atom
        (made("uint4", k=320, group_size=32, zero_point="floating", **words), 320, False),  # SM80 only
    ]


def cases(device: planner.Device) -> list[Case]:
    """Returns the launches for a GPU: each kernel with fewer tokens than its tile and with a tile and a bit."""
    found = []
    for types, k, every in _formats():
        for mainloop in support.MAINLOOPS:
            try:
                configs = planner.schedules(types, device, mainloops=[mainloop])
            except UnsupportedError:
                continue
            if mainloop == support.SM80 or not every:
                configs = list(dict.fromkeys([configs[0], configs[-1]]))
            for config in configs:
                tile_m, _, tile_k = config.schedule.tile_shape
                splits = sorted({1, min(3, math.ceil(k / tile_k))})
                tokens = (
                    (tile_m - 7, tile_m - 3) if mainloop == support.SM90_DECODE else (max(1, tile_m - 3), tile_m + 1)
                )
                launches = list(zip(tokens, splits[::-1] * 2, strict=False))
                if mainloop == support.SM90 and every:
                    launches.append((tokens[0], 2))  # two CTAs exchange their sums
                if support.streams(config.schedule):
                    launches.append((tokens[0], 0))
                for m, split_k in launches:
                    found.append(Case(config=config, split_k=split_k, m=m, n=N, k=k, bias=split_k < 2))
    return found


def run(case: Case) -> None:
    """Runs and checks one launch."""
    problem = testing.random_problem(case.config.types, case.m, case.n, case.k, device="cuda", bias=case.bias)
    out = torch.empty(case.m, case.n, dtype=getattr(torch, case.config.types.element_d), device="cuda")
    out.fill_(math.nan)
    ops.gemm(problem.a, problem.packed, out=out, config=case.config, split_k=case.split_k)
    folds = case.config.schedule.mainloop == support.SM90
    with testing.scaled_weights() if folds else contextlib.nullcontext():
        problem.check(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--list", action="store_true", help="print the launches for an H200; needs no GPU")
    args = parser.parse_args()
    if args.list:
        for case in cases(planner.Device(arch="sm_90a", sm_count=132)):
            print(f"m={case.m} n={case.n} k={case.k} split_k={case.split_k} {case.config.name}")
        return 0
    every = cases(ops.planner_device(0))
    ops.prepare(list(dict.fromkeys(case.config for case in every)))
    if args.compile_only:
        # The kernel that packs is compiled on its first use: one problem of every format.
        for case in {case.config.types: case for case in every}.values():
            testing.random_problem(case.config.types, 1, case.n, case.k, device="cuda")
        return 0
    for case in every:
        try:
            run(case)
        except Exception as error:
            raise RuntimeError(f"{case.config.name} split_k={case.split_k} m={case.m}: {error}") from error
    torch.cuda.synchronize()
    print(f"{len(every)} launches of {len({case.config for case in every})} kernels, all results in bounds")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
