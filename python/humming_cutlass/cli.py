"""The command line: `python -m humming_cutlass demo | bench | tune | info | support | cache | emit | precompile`.

Every command prints for people; with `--json` it prints the same for programs. Exit codes: 0 fine, 1 the result is
out of bounds, 2 the command could not be carried out (the message says what is allowed).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import math
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from humming_cutlass.config import INT32_MAX, MAX_EXTENT
from humming_cutlass.errors import ArgumentError, HummingError, UnsupportedError, explain

if TYPE_CHECKING:
    import torch

__all__ = ["app", "run"]

app = typer.Typer(
    name="humming_cutlass",
    help="GEMMs with weights of 1 to 8 bits, on the CPU and on NVIDIA GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_OUT_OF_MEMORY = re.compile("out of memory|allocate memory|[Ss]torage size calculation overflowed")
"""What torch says when a tensor is too large."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; errors of this package become one line on stderr.

    Args:
        arguments: the words after the program's name; None takes them from `sys.argv`.
    """
    try:
        app(args=None if arguments is None else list(arguments))
    except SystemExit as leave:  # click's way of ending a command, also after a wrong option
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except HummingError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        sizes = "sizes (--n, --k, --m, --shapes) that fit the memory"
        print(f"MemoryError: {explain('memory', str(error).splitlines()[0], sizes)}", file=sys.stderr)
        return 2
    return 0


def _require(ok: bool) -> None:
    """Ends the command with exit code 1 unless its result is in bounds."""
    if not ok:
        raise typer.Exit(1)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def _words(text: str, parameter: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ArgumentError(explain(parameter, repr(text), "words separated by commas"))
    return words


def _numbers(text: str, parameter: str, least: int) -> list[int]:
    try:
        numbers = [int(word) for word in _words(text, parameter)]
    except ValueError:
        raise ArgumentError(explain(parameter, repr(text), "whole numbers separated by commas")) from None
    if min(numbers) < least:
        raise ArgumentError(explain(parameter, min(numbers), f"numbers from {least} on", least))
    if max(numbers) > INT32_MAX:
        raise ArgumentError(explain(parameter, max(numbers), f"numbers up to {INT32_MAX}", INT32_MAX))
    return numbers


def _ceiling(value: float, parameter: str) -> float | None:
    """Returns a ceiling of the roofline; None for 0, which stands for a known or measured one."""
    if not 0 <= value < math.inf:
        raise ArgumentError(explain(parameter, value, "a finite positive number, or 0 for a known or measured one", 0))
    return value or None


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ArgumentError(
            explain("torch", "not installed", "torch", 'pip install "humming-cutlass[torch]"')
        ) from None


def _device(name: str) -> tuple[torch.device, str]:
    """Returns the device called `name`, or the best one for `auto`, and why that is not a GPU."""
    import torch

    from humming_cutlass.demo import choose_device

    if name == "auto":
        return choose_device()
    if name not in ("cpu", "cuda"):
        raise ArgumentError(explain("--device", repr(name), "auto, cpu or cuda"))
    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(explain("--device", "cuda without a GPU that torch sees", "cpu", "cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device("cpu"), ""


@app.command()
def demo(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    m: Annotated[int, typer.Option(min=1, max=INT32_MAX, help="Tokens.")] = 128,
    n: Annotated[int, typer.Option(min=1, max=MAX_EXTENT, help="Rows of the weight.")] = 8192,
    k: Annotated[int, typer.Option(min=1, max=MAX_EXTENT, help="Columns of the weight.")] = 8192,
    weight: Annotated[str, typer.Option(help="Type of the weight.")] = "int6",
    as_json: Json = False,
) -> None:
    """The main job on random weights: quantize, pack, compile, multiply, compare with float64."""
    _require_torch()
    from humming_cutlass.demo import run_demo

    where, reason = _device(device)
    if not as_json:
        print(f"device: {where}{f', because {reason}' if reason else ''}", flush=True)
    result = run_demo(device=where, reason=reason, m=m, n=n, k=k, weight_type=weight)
    if as_json:
        _print_json(dataclasses.asdict(result) | {"ok": result.ok})
    else:
        numbers = "  ".join(f"{x:9.5f}" for x in result.first)
        expected = "  ".join(f"{x:9.5f}" for x in result.expected)
        print(
            f"({m}, {k}) float16 x ({n}, {k}) {weight}, prepared in {result.prepare_seconds:.1f} s\n"
            f"first values:    {numbers}\n"
            f"float64:         {expected}\n"
            f"relative error:  {result.relative_error:.2e} (bound {result.bound:.0e}: "
            f"{'ok' if result.ok else 'OUT OF BOUNDS'}); "
            f"rounding to {weight} itself: {result.rounding_error:.2e}\n"
            f"time:            {result.us:.1f} µs, {result.tflops:.2f} TFLOP/s, {result.gbps:.1f} GB/s of weights\n"
            f"kernel:          {result.kernel}"
        )
    _require(result.ok)


bench_app = typer.Typer(help="Measurements, and the pages that are made of them.")
app.add_typer(bench_app, name="bench")

JsonPath = Annotated[str, typer.Option("--json", help="Append JSON lines to this file; - is stdout.")]


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    suite: Annotated[
        str | None, typer.Option(help="hopper, hopper-types or hopper-edges; what follows narrows it.")
    ] = None,
    shapes: Annotated[str, typer.Option(help="NxK,... Default: 8192x8192, on a CPU 4096x4096.")] = "",
    m: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "",
    weights: Annotated[str, typer.Option(help="Types, e.g. int4,uint4,uint4:floating. Default: int4.")] = "",
    groups: Annotated[str, typer.Option(help="Group sizes; -1 is one scale a row. Default: 128.")] = "",
    activations: Annotated[str, typer.Option(help="float16, bfloat16. Default: bfloat16.")] = "",
    scale: Annotated[str, typer.Option(help="Type of the scales; default: the activations'.")] = "",
    impl: Annotated[str, typer.Option(help="Who is timed; default: all that are installed.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, max=10_000, help="Measurements a point; the median counts.")] = 5,
    bandwidth: Annotated[float, typer.Option(help="GB/s for the roofline; 0: known or measured.")] = 0,
    peak: Annotated[float, typer.Option(help="TFLOP/s for the roofline; 0: known or measured.")] = 0,
    json_path: JsonPath = "",
) -> None:
    """Times this library and its peers, each result checked against a reference in the same run."""
    if context.invoked_subcommand is not None:
        return
    _require_torch()
    from humming_cutlass import benchmark

    where = _bench_device(device)
    names = _words(impl, "--impl") if impl else []
    if unknown := sorted(set(names) - set(benchmark.CONTENDERS)):
        raise ArgumentError(explain("--impl", repr(unknown[0]), ", ".join(benchmark.CONTENDERS)))
    only = benchmark.Filter(
        shapes=[benchmark.parse_shape(word) for word in _words(shapes, "--shapes")] if shapes else (),
        tokens=_numbers(m, "--m", 1) if m else (),
        contenders=names,
        weights=_words(weights, "--weights") if weights else (),
        groups=_numbers(groups, "--groups", -1) if groups else (),
        activations=_words(activations, "--activations") if activations else (),
        scales=[scale] if scale else (),
    )
    plans = [benchmark.product(where, only)] if suite is None else benchmark.plans(suite, where, only)
    bandwidth_gbps, peak_tflops = _ceiling(bandwidth, "--bandwidth"), _ceiling(peak, "--peak")
    plans = [
        dataclasses.replace(plan, repeats=repeats, bandwidth_gbps=bandwidth_gbps, peak_tflops=peak_tflops)
        for plan in plans
    ]
    _run_bench(plans, json_path)


@bench_app.command("host")
def bench_host(
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    batches: Annotated[int, typer.Option(min=1, max=10_000, help="Batches of calls; the median counts.")] = 15,
    calls: Annotated[int, typer.Option(min=1, max=1000, help="Calls in a batch.")] = 1000,
    json_path: JsonPath = "",
) -> None:
    """Times how long an eager call of a layer keeps the host."""
    _require_torch()
    from humming_cutlass.benchmark import host

    where = _bench_device(device)
    with _Sink(json_path) as sink:
        for row in host.run(where, batches=batches, calls=calls):
            sink.write(row)
            if not sink.is_stdout:
                print(f"{row['impl']:<24}{row['n']}x{row['k']}{row['host_us']:>10.2f} µs a call")


@bench_app.command("report")
def bench_report(
    results: Annotated[list[str], typer.Argument(help="Files that bench --json wrote.")],
    out: Annotated[
        pathlib.Path | None, typer.Option(help="A folder with performance.md; default: print the tables.")
    ] = None,
    readme: Annotated[pathlib.Path | None, typer.Option(help="A README.md whose table to rewrite too.")] = None,
    shapes: Annotated[str, typer.Option(help="Only these, NxK,...")] = "",
) -> None:
    """Makes tables and pictures of results: what stands between two markers of docs/performance.md and README.md."""
    _require_torch()
    from humming_cutlass.benchmark import parse_shape, report

    rows = [row for path in results for row in report.read_rows(pathlib.Path(path))]
    if len(gpus := dict.fromkeys(row["gpu"] for row in rows)) > 1:
        raise ArgumentError(explain("results", f"rows of {' and of '.join(gpus)}", "rows of one GPU, or of none"))
    if shapes:
        wanted = [parse_shape(word) for word in _words(shapes, "--shapes")]
        found = dict.fromkeys(f"{row['n']}x{row['k']}" for row in rows)
        rows = [row for row in rows if (row["n"], row["k"]) in wanted]
        if not rows:
            raise ArgumentError(explain("--shapes", f"{shapes}, of which there is no row", ", ".join(found)))
    pages: dict[pathlib.Path, str] = {}  # all of them are made before the first is written
    if out is None:
        print(report.summary(rows))
    else:
        # As one types it in the repository's root, wherever the pages are.
        command = ["python", "-m", "humming_cutlass", "bench", "report", *results, "--out", "docs"]
        command += ["--readme", "README.md", *(["--shapes", shapes] if shapes else [])]
        path = out / "performance.md"
        pages[path] = report.insert(_read(path, "report"), report.page(rows, shlex.join(command)), str(path))
    if readme is not None:
        pages[readme] = report.insert(_read(readme, "report"), report.readme_table(rows, results), str(readme))
    for path in report.pictures(rows, out / "images") if out is not None else ():
        print(path)
    for path, text in pages.items():
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ArgumentError(explain("report", f"{path} ({error.strerror})", "a file that can be written")) from None
        print(path)


def _read(path: pathlib.Path, parameter: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(explain(parameter, f"{path} ({error.strerror})", "a readable file")) from None
    except UnicodeDecodeError:
        raise ArgumentError(explain(parameter, f"{path}, which is not UTF-8", "a text file")) from None


def _bench_device(name: str) -> torch.device:
    where, reason = _device(name)
    if reason:
        print(f"on the CPU, because {reason}", file=sys.stderr)
    return where


class _Sink:
    """Where rows go: nowhere, stdout, or the end of a file, each at once and whole."""

    def __init__(self, json_path: str) -> None:
        self.path = json_path
        self.is_stdout = json_path == "-"
        self.file: io.FileIO | None = None

    def __enter__(self) -> _Sink:
        if self.path and not self.is_stdout:
            try:
                self.file = io.FileIO(self.path, "a+")
                if self.file.seekable() and self.file.tell():
                    self.file.seek(-1, os.SEEK_END)
                    if self.file.read(1) != b"\n":  # an interrupted run left a part of a line
                        self.file.write(b"\n")
            except OSError as error:
                raise self._refused(error) from None
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()

    def write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row) + "\n"
        if self.is_stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
        elif self.file is not None:
            rest = line.encode()
            try:
                while rest:  # a disk that fills up takes a part, and refuses the next
                    rest = rest[self.file.write(rest) :]
            except OSError as error:
                raise self._refused(error) from None

    def _refused(self, error: OSError) -> ArgumentError:
        return ArgumentError(explain("--json", f"{self.path} ({error.strerror})", "a writable file"))


def _run_bench(plans: list[Any], json_path: str) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from humming_cutlass import benchmark

    failed = measured = 0
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(_Sink(json_path))
        progress = stack.enter_context(
            Progress(console=Console(stderr=True), transient=True, redirect_stdout=sys.stdout.isatty())
        )
        task = progress.add_task("timing", total=sum(plan.points for plan in plans))
        seen: set[object] = set()
        for row in benchmark.run(plans):
            progress.advance(task)
            measured += "error" not in row
            if "error" in row:
                # Who cannot run here is no failure, except whom all of this is about.
                failed += not row["unavailable"] or row["impl"] == "humming_cutlass"
            else:
                failed += not row["within"]
            sink.write(row)
            if sink.is_stdout:
                continue
            heading = f"{row['n']}x{row['k']} {row['a']} x {row['b']}, group {row['group']}, zero {row['zero']}"
            if heading not in seen:
                seen.add(heading)
                print(
                    f"\n{heading} on {row['gpu']}\n{'impl':<24}{'m':>6}{'µs':>11}{'TFLOP/s':>10}{'GB/s':>8}"
                    f"{'roofline':>10}{'rel_err':>10}  mode"
                )
            if "error" in row:
                if (row["impl"], heading) not in seen:
                    seen.add((row["impl"], heading))
                    print(f"{row['impl']:<24}{row['error']}")
                continue
            print(
                f"{row['impl']:<24}{row['m']:>6}{row['us']:>11.1f}{row['tflops']:>10.2f}{row['gbps']:>8.0f}"
                f"{row['roofline']:>10.1%}{row['rel_err']:>10.1e}  {row['mode']}"
                f"{'' if row['within'] else '  OUT OF BOUNDS'}",
                flush=True,
            )
    if not measured:
        print("Nothing was measured: no contender can run here.", file=sys.stderr)
    _require(measured > 0 and not failed)


@app.command()
def tune(
    shapes: Annotated[str, typer.Option(help="NxK,...")],
    m: Annotated[str, typer.Option(help="Tokens, separated by commas.")],
    types: Annotated[str, typer.Option(help="Formats, e.g. int4:g128,uint4:floating:g64,float4_e2m1:g32:float8_e8m0.")],
    dtype: Annotated[str, typer.Option(help="Type of the activations: float16, bfloat16.")] = "bfloat16",
    device: Annotated[int, typer.Option(help="The CUDA device.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of the fastest; the median counts.")] = 5,
    as_json: Json = False,
) -> None:
    """Times every kernel that a call could take, and stores the fastest where it beats the planner's choice by 2 %."""
    _require_torch()
    from rich.console import Console
    from rich.progress import Progress

    from humming_cutlass import benchmark, dtypes, support
    from humming_cutlass import tune as store
    from humming_cutlass.benchmark import tuner

    if dtypes.parse(dtype, "--dtype").name not in support.ACTIVATION_TYPES:
        raise UnsupportedError(explain("--dtype", dtype, ", ".join(support.ACTIVATION_TYPES), "bfloat16"))
    problems = [
        tuner.parse_types(word, n=n, k=k, element_a=dtype)
        for n, k in map(benchmark.parse_shape, _words(shapes, "--shapes"))
        for word in _words(types, "--types")
    ]
    tokens = _numbers(m, "--m", 1)
    where, gpu = tuner.open_device(device)
    path = store.check_file()
    plan = tuner.Plan(problems=problems, tokens=tokens, device=where, gpu=gpu, repeats=repeats)
    rows: list[dict[str, Any]] = []
    heading = ""
    with Progress(
        console=Console(stderr=True), transient=True, redirect_stdout=not as_json and sys.stdout.isatty()
    ) as progress:
        task = progress.add_task("tuning", total=plan.points)
        for outcome, row in tuner.run(plan):
            store.save([outcome])  # now, so that an interruption loses one point at most
            progress.advance(task)
            rows.append(row)
            if as_json:
                continue
            if heading != (heading := f"{row['n']}x{row['k']} {row['a']} x {row['types']} on {row['gpu']}"):
                print(f"\n{heading}\n{'m':>6}  {'model':<28}{'µs':>9}  {'best':<28}{'µs':>9}{'gain':>8}")
            print(_tune_line(outcome, row), flush=True)
    kept, failed = sum(row["stored"] for row in rows), sum(row["failed"] for row in rows)
    if as_json:
        _print_json({"file": str(path), "rows": rows})
    else:
        print(f"\n{kept} of {len(rows)} choices stored in {path}")
    _require(not failed)


def _tune_line(outcome: Any, row: dict[str, Any]) -> str:
    def words(choice: Any) -> str:
        schedule = choice.config.schedule
        return f"{'x'.join(map(str, schedule.tile_shape))} p{schedule.stage_count} split {choice.split_k}"

    line = f"{row['m']:>6}  {words(outcome.model):<28}"
    if row["model_us"] is None:
        return f"{line}  OUT OF BOUNDS"
    line += f"{row['model_us']:>9.2f}  {words(outcome.best):<28}{row['best_us']:>9.2f}{row['gain']:>8.1%}  "
    line += "stored" if row["stored"] else "model stays"
    return line if not row["failed"] else f"{line}  {row['failed']} OF {row['candidates']} OUT OF BOUNDS"


@app.command()
def info(as_json: Json = False) -> None:
    """Versions, paths, compiler, GPUs and environment variables: what a bug report needs."""
    import os

    import humming_cutlass
    from humming_cutlass.build import ENVIRONMENT

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        facts = humming_cutlass.show_config()
    variables = {name: os.environ.get(name) for name in ENVIRONMENT}
    if as_json:
        _print_json({"facts": facts, "environment": variables})
        return
    print(printed.getvalue(), end="")
    for name, meaning in ENVIRONMENT.items():
        value = variables[name]
        print(f"{name}={value}" if value is not None else f"{name} is not set: {meaning}")


@app.command()
def support(
    markdown: Annotated[bool, typer.Option(help="Print docs/support_matrix.md.")] = False,
    check: Annotated[pathlib.Path | None, typer.Option(help="Compare this file; exit 1 if it differs.")] = None,
    as_json: Json = False,
) -> None:
    """What is supported, as `support.check` answers."""
    from humming_cutlass import support_matrix

    page = support_matrix.markdown()
    if check is not None:
        found = _read(check, "--check")
        if found != page:
            lines = difflib.unified_diff(found.splitlines(), page.splitlines(), str(check), "generated", lineterm="")
            print("\n".join(lines))
            print(f"\nRun: python -m humming_cutlass support --markdown > {check}", file=sys.stderr)
            raise typer.Exit(1)
        return
    if as_json:
        _print_json(support_matrix.rows())
    elif markdown:
        print(page, end="")
    else:
        for row in support_matrix.rows():
            print(f"{row['a']} x {row['b']}, {row['what']}: {row['reason'] or 'yes'}")


cache_app = typer.Typer(help="The cache of compiled kernels.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


@cache_app.command("list")
def cache_list(as_json: Json = False) -> None:
    """Every compiled kernel: size, registers, compile time."""
    from humming_cutlass import build
    from humming_cutlass.build.cache import KernelCache

    directory = build.cache_directory()
    kernels = []
    for cubin in sorted(KernelCache(directory).root.glob("??/*/kernel.cubin")):
        with contextlib.suppress(HummingError):  # a damaged entry is rebuilt when it is needed
            kernels.append(dataclasses.asdict(build.kernel_info(cubin)))
    if as_json:
        _print_json({"directory": str(directory), "kernels": kernels})
        return
    print(f"{directory}: {len(kernels)} kernels, {sum(x['size'] for x in kernels) / 1e6:.1f} MB")
    for x in kernels:
        print(f"{x['name']}: {x['size']} B, {x['registers']} registers, {x['seconds']:.1f} s")


@cache_app.command("clear")
def cache_clear(as_json: Json = False) -> None:
    """Removes every compiled kernel; running processes compile again what they need."""
    from humming_cutlass import build
    from humming_cutlass.build.cache import KernelCache

    directory = build.cache_directory()
    cache = KernelCache(directory)
    entries = [path for path in cache.root.glob("??/*") if path.is_dir() and not path.name.startswith(".")]
    for entry in entries:
        cache.discard(entry.name)
    if as_json:
        _print_json({"directory": str(directory), "removed": len(entries)})
    else:
        print(f"{directory}: {len(entries)} kernels removed")


@app.command()
def emit(
    name: Annotated[str, typer.Argument(help="A kernel's name, as GemmConfig.name spells it.")],
    as_json: Json = False,
) -> None:
    """Prints the C++ of one kernel."""
    from humming_cutlass import emitter
    from humming_cutlass.config import GemmConfig

    source = emitter.emit(GemmConfig.from_name(name))
    if as_json:
        _print_json(dataclasses.asdict(source))
    else:
        print(source.text, end="")


@app.command()
def precompile(
    output: Annotated[str, typer.Argument(help="The folder, for HUMMING_CUTLASS_AOT_DIR.")],
    arch: Annotated[str, typer.Option(help="GPUs, e.g. sm_80,sm_90a.")],
    weights: Annotated[str, typer.Option(help="Types, e.g. int4,uint4:floating.")],
    groups: Annotated[str, typer.Option(help="Group sizes; -1 is one scale a row.")] = "-1",
    activations: Annotated[str, typer.Option(help="float16, bfloat16.")] = "float16",
    scale: Annotated[str, typer.Option(help="Type of the scales; default: the activations'.")] = "",
    jobs: Annotated[
        int, typer.Option(min=0, help="Kernels at once; 0: HUMMING_CUTLASS_NUM_JOBS, else one a core.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Compiles every kernel that calls on these types can need, into a folder that needs no compiler."""
    from humming_cutlass import build, emitter, planner, support
    from humming_cutlass.config import GROUP_QUANTUM, WeightConfig

    if not output:  # a pathlib.Path would make the working directory of it
        raise ArgumentError(explain("OUTPUT", "an empty path", "the path of a folder", "."))
    targets = _words(arch, "--arch")
    for target in targets:
        if (reason := support.check_arch(target, "--arch")) is not None:
            raise ArgumentError(reason)
    group_sizes = _numbers(groups, "--groups", -1)
    for group in group_sizes:
        if group != -1 and (group == 0 or group % GROUP_QUANTUM):
            nearest = max(GROUP_QUANTUM, (group + GROUP_QUANTUM // 2) // GROUP_QUANTUM * GROUP_QUANTUM)
            raise ArgumentError(explain("--groups", group, f"-1 or positive multiples of {GROUP_QUANTUM}", nearest))
        if group > MAX_EXTENT:
            raise ArgumentError(explain("--groups", group, f"at most {MAX_EXTENT}, the largest k", MAX_EXTENT))
    sources: dict[str, build.KernelSource] = {}
    for a in _words(activations, "--activations"):
        for word in _words(weights, "--weights"):
            dtype, _, zero_point = word.partition(":")
            for group in group_sizes:
                config = WeightConfig(
                    dtype=dtype, group_size=group, scale_dtype=scale or None, zero_point=zero_point or None
                )
                # Kernels do not depend on k: a k of two groups keeps the group size as it is.
                types = config.resolve(k=2 * group if group > 0 else 64, element_a=a)
                for target in targets:
                    # Nor do they depend on the number of SMs, which only splits k.
                    device = planner.Device(arch=target, sm_count=1)
                    # Unaligned activations and scales outside `support.scale_range` fall back to the SM80 mainloop.
                    kernels = planner.schedules(types, device)
                    kernels += planner.schedules(types, device, mainloops=support.MAINLOOPS_FOR_ANY_TENSORS)
                    found = [emitter.emit(kernel) for kernel in kernels]
                    found.append(emitter.emit_pack(types.element_b, target))
                    sources |= {source.name: source for source in found}
    paths = build.export_kernels(sources.values(), output, jobs=jobs or None)
    if as_json:
        _print_json({name: str(path) for name, path in paths.items()})
    else:
        print(f"{len(paths)} kernels in {output}; use them with HUMMING_CUTLASS_AOT_DIR={output}")
