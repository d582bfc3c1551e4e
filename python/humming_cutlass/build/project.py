"""Runs one build: writes a CMake project of custom commands, runs cmake and ninja, reads what they said."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from pathlib import Path

from humming_cutlass import errors
from humming_cutlass.build.source import KernelSource
from humming_cutlass.build.toolchain import Toolchain, cmake_directory

__all__ = ["BuildResult", "PtxasReport", "build_project", "compile_error", "default_jobs", "parse_ptxas"]

_STATUS = re.compile(r"^\[\d+/\d+\] ")  # as NINJA_STATUS below


@dataclasses.dataclass(frozen=True)
class PtxasReport:
    """What `ptxas -v` says, the most of all entry points (spills: their sum); bytes but for the registers."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem_bytes: int


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """One compiled kernel, or its failure.

    Attributes:
        cubin: the compiled kernel; None when nvcc failed.
        log: what nvcc printed, after the command.
        seconds: wall time of nvcc.
    """

    cubin: Path | None
    log: str
    seconds: float


def default_jobs() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def parse_ptxas(log: str) -> PtxasReport:
    """Reads registers, spills, stack and static shared memory from nvcc's output."""

    def numbers(pattern: str) -> list[int]:
        return [int(found) for found in re.findall(pattern, log)]

    return PtxasReport(
        registers=max(numbers(r"Used (\d+) registers"), default=0),
        spill_bytes=sum(numbers(r"(\d+) bytes spill (?:stores|loads)")),
        stack_bytes=max(numbers(r"(\d+) bytes stack frame"), default=0),
        static_smem_bytes=max(numbers(r"(\d+) bytes smem"), default=0),
    )


def _quote(value: object) -> str:
    """A CMake bracket argument: taken literally, whatever it holds."""
    return f"[==[{value}]==]"


def _cmake_lists(toolchains: Mapping[KernelSource, Toolchain], options: Sequence[str]) -> str:
    lines = [
        "cmake_minimum_required(VERSION 3.21)",
        "project(humming_cutlass_kernels LANGUAGES NONE)",
        f"include({_quote(cmake_directory() / 'HummingCutlassKernels.cmake')})",
    ]
    for index, (source, toolchain) in enumerate(toolchains.items()):
        lines.append(f"humming_cutlass_add_kernels(kernel_{index} ARCH {source.arch} NVCC {_quote(toolchain.nvcc)}")
        lines.append(f"  SOURCES {_quote(source.name + '.cu')}")
        lines.append(f"  INCLUDE_DIRECTORIES {' '.join(map(_quote, toolchain.include_directories))}")
        lines.append(f"  OPTIONS {' '.join(map(_quote, (*toolchain.options, *options)))})")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def _progress(total: int, enabled: bool) -> Iterator[Callable[[str], None]]:
    """A bar on stderr; the function it gives is called with the name of each kernel that is done."""
    if not enabled:
        yield lambda name: None
        return
    import rich.console
    import rich.progress

    columns = (
        rich.progress.TextColumn("Compiling kernels"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.description}"),
    )
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(*columns, console=console, transient=console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, advance=1, description=name)


@contextlib.contextmanager
def _process(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A program whose whole process group ends when the block is left early, so that no compiler is left behind."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _seconds(folder: Path) -> dict[str, float]:
    """Wall time of each command, from ninja's own log: start and end in ms, mtime, output, hash."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / ".ninja_log").read_text().splitlines():
            fields = line.split("\t")
            if len(fields) == 5:
                found[Path(fields[3]).name] = (int(fields[1]) - int(fields[0])) / 1000
    return found


def build_project(
    folder: Path,
    toolchains: Mapping[KernelSource, Toolchain],
    *,
    options: Sequence[str] = (),
    jobs: int | None = None,
    progress: bool | None = None,
) -> Generator[tuple[KernelSource, BuildResult], None, None]:
    """Compiles sources in an empty folder, and gives each when the next one is done, by which its output is complete.

    Args:
        folder: a private folder; source and build files go there.
        toolchains: what compiles each kernel, at least one, of distinct names; cmake and ninja are the first's.
        options: more flags for nvcc.
        jobs: compilers at once; default: one a core.
        progress: show a bar on stderr; default: when that is a terminal.

    Yields:
        Each source once, in the order in which they are done, with its result. A failed compilation is a result too.

    Raises:
        CompileError: cmake itself failed.
    """
    (folder / "CMakeLists.txt").write_text(_cmake_lists(toolchains, options))
    for source in toolchains:
        (folder / f"{source.name}.cu").write_text(source.text)
    tools = next(iter(toolchains.values()))
    environment = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "TMPDIR": str(folder)}
    # These change what cmake generates, and the user set them for projects of his own.
    for name in ("CMAKE_GENERATOR", "CMAKE_TOOLCHAIN_FILE", "CMAKE_BUILD_TYPE", "CMAKE_EXPORT_COMPILE_COMMANDS"):
        environment.pop(name, None)

    configure = [str(tools.cmake), "-S", ".", "-B", ".", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools.ninja}"]
    with _process(configure, folder, environment) as process:
        output = process.communicate()[0]
    if process.returncode != 0:
        raise errors.CompileError(
            f"cmake failed (exit code {process.returncode})\ncommand: {' '.join(configure)}\n{_tail(output)}"
        )

    # What each kernel's compiler printed stands after the line that says it is done.
    logs: dict[str, list[str]] = {source.name: [] for source in toolchains}
    waiting = {source.name: source for source in toolchains}
    general: list[str] = []
    current = general
    finished: str | None = None
    jobs = min(jobs or default_jobs(), len(toolchains))
    show = sys.stderr.isatty() if progress is None else progress
    ninja = [str(tools.ninja), "-k", "0", "-j", str(jobs), "--verbose"]
    with _progress(len(toolchains), show) as done, _process(ninja, folder, environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            status = _STATUS.match(line)
            if status is not None:
                if finished is not None:
                    yield waiting.pop(finished), _result(folder, finished, logs[finished])
                finished = _kernel_of(line, waiting)
                current = general if finished is None else logs[finished]
                if finished is not None:
                    done(finished)
            current.append(line)
    for name, source in waiting.items():
        yield source, _result(folder, name, logs[name] or general)


def _result(folder: Path, name: str, log: Sequence[str]) -> BuildResult:
    cubin = folder / f"{name}.cubin"
    built = cubin.is_file() and not any(line.startswith("FAILED: ") for line in log)
    return BuildResult(cubin if built else None, "".join(log), _seconds(folder).get(cubin.name, 0.0))


def _kernel_of(line: str, names: Container[str]) -> str | None:
    """The kernel that a status line of verbose ninja is about: the output of its command."""
    match = re.search(r" -o (?:\S*/)?([^\s/]+)\.cubin ", line)
    return match[1] if match is not None and match[1] in names else None


def _nvcc_command(line: str) -> str:
    """The part of ninja's command line that a person would run: without its count and CMake's own afterwork."""
    return _STATUS.sub("", line).split(" && ", 2)[1] if line.count(" && ") > 1 else _STATUS.sub("", line)


def _tail(text: str, lines: int = 40) -> str:
    found = text.rstrip().splitlines()
    return "\n".join(found if len(found) <= lines else ["...", *found[-lines:]])


def compile_error(source: KernelSource, result: BuildResult, log: Path) -> errors.CompileError:
    """Returns the error of a kernel that nvcc refused: command, end of the output, path of the log."""
    lines = result.log.splitlines() or ["(no output)"]
    command = _nvcc_command(lines[0])
    output = [line for line in lines[1:] if command not in line and not line.startswith(("FAILED: ", "ninja: "))]
    return errors.CompileError(
        f"kernel {source.name} for {source.arch}: nvcc failed\ncommand: {command}\noutput:\n"
        + _indent(_tail("\n".join(output)))
        + f"\nlog: {log}"
    )


def _indent(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
