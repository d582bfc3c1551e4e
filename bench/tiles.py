"""Times tiles and splits that the planner could choose, to fit the cost model, and says how much its choices lose.

    python bench/tiles.py --shapes 8192x8192,4096x14336 --m 1,8,16,64 --json tiles.jsonl
    python bench/tiles.py --tiles 8x128x256:5,16x256x256:4 --shapes 28672x8192 --m 8,16 --json tiles.jsonl
    python bench/tiles.py --judge tiles.jsonl

`--tiles` are tiles of the SM90 mainloop, each with the most stages it may have, instead of the planner's; the kernel
for few tokens is the planner's. Caches are cold and calls are in a CUDA graph, as in the benchmark; from m = 512 on, or
from `--sustained` on, a point runs at the power limit. Candidates that the model finds more than `--slack` times slower
than its choice are left out. Every result is checked before it is timed. Rows are written as they are measured.

`--judge` needs no GPU: for each point of a table it compares the planner's choice with the fastest row.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

from humming_cutlass import planner
from humming_cutlass.config import GemmConfig

_LOSS = 0.02
"""A choice that loses more is named."""


def parse_tiles(text: str) -> tuple[tuple[tuple[int, int, int], int], ...]:
    """Returns ((m, n, k), stages) of each `MxNxK:STAGES`."""
    found = []
    for word in text.split(","):
        shape, _, stages = word.partition(":")
        extents = shape.split("x")
        if len(extents) != 3 or not all(x.isdigit() for x in [*extents, stages]):
            raise SystemExit(f"--tiles: got {word!r}; allowed: MxNxK:STAGES, such as 16x128x256:4")
        found.append(((int(extents[0]), int(extents[1]), int(extents[2])), int(stages)))
    return tuple(found)


def judge(rows: Iterable[dict[str, Any]], device: planner.Device) -> tuple[list[str], list[float]]:
    """Returns a sentence for each point at which the planner's choice is not in the table or loses, and all losses."""
    points: dict[tuple[Any, ...], dict[tuple[str, int], float]] = collections.defaultdict(dict)
    for row in rows:
        config = GemmConfig.from_name(row["kernel"])
        key = (config.types, row["n"], row["k"], row["m"])
        place = (row["kernel"], row["split_k"])
        points[key][place] = min(row["us"], points[key].get(place, float("inf")))
    sentences, losses = [], []
    for (types, n, k, m), times in points.items():
        choice = planner.choose(types, m, n, k, device)
        place = (choice.config.name, choice.split_k)
        best = min(times, key=lambda other: times[other])
        point = f"{n}x{k} {types.element_a} x {types.element_b} g{types.group_size}, m = {m}"
        if place not in times:
            sentences.append(f"{point}: {place[0]} split_k={place[1]} was not measured")
            continue
        loss = times[place] / times[best] - 1
        losses.append(loss)
        if loss > _LOSS:
            sentences.append(
                f"{point}: {place[0]} split_k={place[1]} takes {times[place]:.2f} us, {best[0]} split_k={best[1]} "
                f"{times[best]:.2f}: {loss:.1%} lost"
            )
    return sentences, losses


def measure(args: argparse.Namespace) -> int:
    """Writes a row for each candidate at each point; returns how many results were wrong."""
    import torch

    import humming_cutlass
    from humming_cutlass import ops
    from humming_cutlass.benchmark.contenders import HummingCutlass
    from humming_cutlass.benchmark.problem import Problem, RandomWeight, error_bound, parse_shape
    from humming_cutlass.benchmark.timing import rotation_bytes, time_calls

    if args.tiles:
        planner._SM90_TILES = parse_tiles(args.tiles)
    place, device = torch.device("cuda", 0), ops.planner_device(0)
    head = {
        "impl": "humming_cutlass",
        "gpu": torch.cuda.get_device_name(place),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "humming_cutlass": humming_cutlass.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": "python bench/tiles.py " + " ".join(sys.argv[1:]),
    }
    wrong = 0
    for n, k in map(parse_shape, args.shapes.split(",")):
        problem = Problem.create(n=n, k=k, element_a=args.activations, weight=args.weight, group_size=args.group)
        ops.prepare(planner.schedules(problem.types, device))
        with torch.no_grad(), args.json.open("a") as stream:
            weight = RandomWeight.draw(problem, place, seed=0)
            contender, reference = HummingCutlass(weight, rotation_bytes(place)), weight.dequantize().t()
            for m in map(int, args.m.split(",")):
                a = torch.randn(m, k, device=place).to(problem.dtype)
                out, expected = torch.empty(m, n, device=place, dtype=problem.dtype), a.float() @ reference
                found = planner.candidates(problem.types, m, n, k, device)
                model = {choice: planner.microseconds(choice, m, n, k, device) for choice in found}
                for choice in [c for c in found if model[c] <= args.slack * min(model.values())]:
                    calls = [
                        functools.partial(ops.gemm, a, w, out=out, config=choice.config, split_k=choice.split_k)
                        for w in contender.copies
                    ]
                    out.fill_(float("nan"))
                    calls[0]()
                    error = float((out.float() - expected).norm() / expected.norm())
                    if not error <= error_bound(problem.types):
                        print(f"wrong: {choice.config.name} split_k={choice.split_k} at m = {m}: {error:.3g}")
                        wrong += 1
                        continue
                    timing = time_calls(calls, device=place, sustained=m >= args.sustained, repeats=args.repeats)
                    row = {
                        "n": n, "k": k, "m": m, "kernel": choice.config.name, "split_k": choice.split_k,
                        "us": round(timing.us, 3), "model_us": round(model[choice], 3), "mode": timing.mode,
                        "clock_mhz": timing.clock_mhz, "rel_err": error,
                    }  # fmt: skip
                    stream.write(json.dumps(head | row) + "\n")
                    stream.flush()
        print(f"{n}x{k} done", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="8192x8192", help="NxK, ...")
    parser.add_argument("--m", default="1,2,4,8,16,32,64,128,256", help="tokens")
    parser.add_argument("--tiles", default="", help="MxNxK:STAGES, ...; default: the planner's")
    parser.add_argument("--weight", default="int4")
    parser.add_argument("--activations", default="bfloat16")
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--slack", type=float, default=1.5)
    parser.add_argument("--sustained", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("tiles.jsonl"))
    parser.add_argument("--judge", type=pathlib.Path, nargs="+", metavar="FILE", help="compare the planner with tables")
    args = parser.parse_args()
    if args.tiles:
        parse_tiles(args.tiles)
    if not args.judge:
        return 1 if measure(args) else 0
    rows = [json.loads(line) for path in args.judge for line in path.read_text().splitlines()]
    sentences, losses = judge(rows, planner.Device(arch="sm_90a", sm_count=132))
    for sentence in sentences:
        print(sentence)
    if losses:
        print(f"{len(losses)} points, {sum(losses) / len(losses):.2%} lost on average, {max(losses):.1%} at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
