"""From kernel sources to cubins: look in memory, ahead-of-time folder and cache, compile what is missing."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from humming_cutlass import errors
from humming_cutlass._version import __version__
from humming_cutlass.build import project
from humming_cutlass.build.cache import LOCK_TIMEOUT, KernelCache, cache_directory, read_entry
from humming_cutlass.build.settings import Settings
from humming_cutlass.build.source import KernelSource
from humming_cutlass.build.toolchain import (
    Compiler,
    Toolchain,
    cmake_directory,
    find_compiler,
    find_toolchain,
    include_directories,
)
from humming_cutlass.config import integer

__all__ = ["compile_kernels", "export_kernels", "kernel_key"]


class _AbandonedError(Exception):
    """The thread that compiled was interrupted; whoever waited for it starts over."""


class _State:
    """What this process remembers under one set of environment variables."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.lock = threading.Lock()
        self.done: dict[KernelSource, Path] = {}
        self.pending: dict[KernelSource, concurrent.futures.Future[Path]] = {}
        self.compilers: dict[str, Compiler] = {}
        self._cache: KernelCache | None = None

    def cache(self) -> KernelCache:
        """Returns the cache; the directory is created by the first compilation of the process, not before."""
        with self.lock:
            if self._cache is None:
                self._cache = KernelCache(cache_directory(create=True, settings=self.settings))
            return self._cache

    def compiler(self, arch: str) -> Compiler:
        """Returns the compiler for a GPU, looked for once a process."""
        if arch not in self.compilers:
            memo = self.cache().directory / "compilers.json"
            self.compilers[arch] = find_compiler(arch, settings=self.settings, memo=memo)
        return self.compilers[arch]

    def toolchain(self, arch: str) -> Toolchain:
        """Returns the tools for a GPU."""
        return find_toolchain(arch, settings=self.settings, memo=self.cache().directory / "compilers.json")


_states: dict[Settings, _State] = {}
_states_lock = threading.Lock()


def _forget() -> None:
    """In the child of a fork: locks and futures there belong to threads that do not exist."""
    global _states_lock
    _states_lock = threading.Lock()
    for settings, state in list(_states.items()):
        fresh = _State(settings)
        fresh.done = dict(state.done)
        _states[settings] = fresh


os.register_at_fork(after_in_child=_forget)


def _state() -> _State:
    settings = Settings.from_environment()
    with _states_lock:
        return _states.setdefault(settings, _State(settings))


# --- Keys ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _headers(directories: tuple[Path, ...]) -> tuple[dict[str, bytes], str]:
    """This library's headers by the name they are included by, and a hash of all of CUTLASS; read once a process."""
    own: dict[str, bytes] = {}
    digest = hashlib.sha256()
    for directory in directories:
        files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*")}
        for name in sorted(files):
            # Only what belongs to the two libraries: an explicit directory may hold other files too.
            library = name.split("/")[0]
            if files[name].suffix not in _SUFFIXES or library not in ("humming_cutlass", "cute", "cutlass"):
                continue
            content = files[name].read_bytes()
            if library == "humming_cutlass":
                own.setdefault(name, content)
            else:
                digest.update(f"{name}\0{len(content)}\0".encode())
                digest.update(content)
    digest.update((cmake_directory() / "HummingCutlassKernels.cmake").read_bytes())  # the flags of every kernel
    return own, digest.hexdigest()


_SUFFIXES = frozenset((".h", ".hpp", ".inl", ".cuh"))
_INCLUDE = re.compile(rb'^\s*#\s*include\s*["<](humming_cutlass/[^">]+)[">]', re.MULTILINE)


def _header_digest(text: str, directories: tuple[Path, ...]) -> str:
    """A hash of the headers that a source includes, by name and content.

    All of CUTLASS, and of this library what is reached from the source: work on one mainloop leaves the kernels of the
    others in the cache.
    """
    own, cutlass = _headers(directories)
    reached: set[str] = set()
    pending = [text.encode()]
    while pending:
        names = {name.decode() for name in _INCLUDE.findall(pending.pop())}
        pending += [own[name] for name in names - reached if name in own]
        reached |= names
    digest = hashlib.sha256(cutlass.encode())
    for name in sorted(reached):
        content = own.get(name, b"")
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(f"{len(encoded)}\0".encode())
        digest.update(encoded)
    return digest.hexdigest()


def _content_key(source: KernelSource, settings: Settings) -> str:
    """What is compiled, whatever compiles it: the key of kernels compiled ahead of time, which need no compiler."""
    headers = _header_digest(source.text, tuple(include_directories(settings=settings)))
    return _digest(__version__, source.name, source.text, source.arch, headers)


def _flags(settings: Settings) -> list[str]:
    return sorted((*settings.extra_flags, *settings.nvcc_flags))


def kernel_key(source: KernelSource, compiler: Compiler, *, settings: Settings | None = None) -> str:
    """Returns the key of a kernel in the cache.

    It covers the library's version, the source, the contents of the headers, the compiler's version, the flags and the
    GPU with its suffix; no path, time or driver.
    """
    settings = settings or Settings.from_environment()
    return _digest(_content_key(source, settings), compiler.version_text, json.dumps(_flags(settings)), source.arch)


# --- Compiling -------------------------------------------------------------------------------------------------------


def compile_kernels(
    sources: Sequence[KernelSource], *, progress: bool | None = None, jobs: int | None = None
) -> dict[str, Path]:
    """Returns the cubin of each kernel, compiling those that no cache holds.

    Kernels are compiled in parallel, each by one process on the machine and one thread of it; the others wait. A call
    for kernels that this process has seen runs no program and reads no file.

    Args:
        sources: kernels of distinct names.
        progress: show a bar on stderr while compiling; default: when that is a terminal.
        jobs: compilers at once; default: `HUMMING_CUTLASS_NUM_JOBS`, else one a core.

    Returns:
        The path of the cubin by kernel name.

    Raises:
        ArgumentError: two kernels of one name, or `jobs` below 1.
        ToolchainError: something must be compiled and no compiler is there, or it is too old for the GPU.
        CompileError: nvcc refused a kernel; the message has command, output and the path of the log. The other kernels
            of the call are kept.
        CacheError: the cache cannot be used.
        MissingKernelError: something must be compiled and `HUMMING_CUTLASS_DISABLE_JIT` is set.
    """
    if jobs is not None and jobs < 1:
        raise errors.ArgumentError(errors.explain("jobs", jobs, "a number of at least 1", 1))
    by_name: dict[str, KernelSource] = {}
    for source in sources:
        if by_name.setdefault(source.name, source) != source:
            raise errors.ArgumentError(errors.explain("sources", f"two kernels named {source.name}", "distinct names"))
    state = _state()
    found: dict[KernelSource, Path] = {}
    while missing := [source for source in by_name.values() if source not in found]:
        for source in missing:
            path = state.done.get(source)
            # Whoever empties the cache under a running process gets his kernels compiled again.
            if path is not None and path.exists():
                found[source] = path
        missing = [source for source in missing if source not in found]
        if missing:
            _share(state, missing, found, progress, jobs)
    return {name: found[source] for name, source in by_name.items()}


def _share(
    state: _State, sources: list[KernelSource], found: dict[KernelSource, Path], progress: bool | None, jobs: int | None
) -> None:
    """Resolves what no other thread is at, then waits for those that are; adds to `found`."""
    mine: dict[KernelSource, concurrent.futures.Future[Path]] = {}
    theirs: dict[KernelSource, concurrent.futures.Future[Path]] = {}
    with state.lock:
        for source in sources:
            if source in state.pending:
                theirs[source] = state.pending[source]
            else:
                mine[source] = state.pending[source] = concurrent.futures.Future()
    try:
        if mine:
            paths, failures = _resolve(state, list(mine), progress, jobs)
            state.done.update(paths)
            found.update(paths)
            for source, path in paths.items():
                mine[source].set_result(path)
            for source, failure in failures.items():
                mine[source].set_exception(failure)
            if failures:
                first, *others = failures.items()
                if others:
                    first[1].args = (f"{first[1]}\nand {len(others)} more: {', '.join(s.name for s, _ in others)}",)
                raise first[1]
    except BaseException as error:
        for future in mine.values():
            if not future.done():
                future.set_exception(error if isinstance(error, errors.HummingError) else _AbandonedError())
        raise
    finally:
        with state.lock:
            for source in mine:
                state.pending.pop(source, None)
    for source, future in theirs.items():
        try:
            found[source] = future.result()
        except _AbandonedError:
            continue


def _resolve(
    state: _State, sources: list[KernelSource], progress: bool | None, jobs: int | None
) -> tuple[dict[KernelSource, Path], dict[KernelSource, errors.CompileError]]:
    """Finds or compiles each source; returns cubins and failures."""
    paths: dict[KernelSource, Path] = {}
    for source in sources:
        cubin = _ahead_of_time(source, state.settings)
        if cubin is not None:
            paths[source] = cubin
    missing = [source for source in sources if source not in paths]
    if not missing:
        return paths, {}

    if state.settings.disable_jit:
        try:
            keys = {
                source: kernel_key(source, state.compiler(source.arch), settings=state.settings) for source in missing
            }
        except (errors.ToolchainError, errors.CacheError):
            keys = {}
        for source, key in keys.items():
            cubin, _ = state.cache().lookup(key)
            if cubin is not None:
                paths[source] = cubin
        absent = [source.name for source in missing if source not in paths]
        if absent:
            raise errors.MissingKernelError(
                errors.explain(
                    "HUMMING_CUTLASS_DISABLE_JIT",
                    f"1, but not compiled yet: {', '.join(absent)}",
                    f"kernels in HUMMING_CUTLASS_AOT_DIR ({state.settings.aot_dir or 'unset'}) or in the cache",
                    "build.export_kernels, on a machine that may compile",
                )
            )
        return paths, {}

    cache = state.cache()
    keys = {source: kernel_key(source, state.compiler(source.arch), settings=state.settings) for source in missing}
    for source in missing:
        cubin, _ = cache.lookup(keys[source])
        if cubin is not None:
            paths[source] = cubin
    missing = [source for source in missing if source not in paths]
    failures: dict[KernelSource, errors.CompileError] = {}
    if missing:
        cache.prepare()
    end = time.monotonic() + LOCK_TIMEOUT
    while missing:
        built, failed = _build_unlocked(state, cache, {source: keys[source] for source in missing}, end, progress, jobs)
        paths.update(built)
        failures.update(failed)
        missing = [source for source in missing if source not in paths and source not in failures]
    return paths, failures


def _ahead_of_time(source: KernelSource, settings: Settings) -> Path | None:
    """The cubin in `HUMMING_CUTLASS_AOT_DIR`, if there is one."""
    if settings.aot_dir is None:
        return None
    directory = Path(settings.aot_dir).expanduser().absolute()
    if not directory.is_dir():
        raise errors.CacheError(
            errors.explain(
                "HUMMING_CUTLASS_AOT_DIR", f"{directory}, which is no directory", "a folder of export_kernels"
            )
        )
    entry = KernelCache(directory).entry(_content_key(source, settings))
    cubin, reason = read_entry(entry)
    if reason is not None:
        _warn_damaged(entry, reason, "it is not used")
    return cubin


def _warn_damaged(entry: Path, reason: str, consequence: str) -> None:
    warnings.warn(f"Damaged kernel {entry}: {reason}; {consequence}.", RuntimeWarning, stacklevel=2)


def _build_unlocked(
    state: _State,
    cache: KernelCache,
    keys: dict[KernelSource, str],
    end: float,
    progress: bool | None,
    jobs: int | None,
) -> tuple[dict[KernelSource, Path], dict[KernelSource, errors.CompileError]]:
    """Builds those kernels that no other process is at; with none left, waits for the first.

    Locks are only waited for while holding none, so that processes with overlapping lists cannot block each other.
    """
    paths: dict[KernelSource, Path] = {}
    locks = {source: cache.lock(key) for source, key in keys.items()}
    held = [source for source, lock in locks.items() if lock.try_acquire()]
    try:
        if not held:
            first = next(iter(locks))
            locks[first].acquire(max(0.0, end - time.monotonic()))
            held = [first]
        # Another process may have finished between our look and our lock.
        to_build = []
        for source in held:
            cubin, reason = cache.lookup(keys[source])
            if reason is not None:
                _warn_damaged(cache.entry(keys[source]), reason, "it is compiled again")
                cache.discard(keys[source])
            if cubin is None:
                to_build.append(source)
            else:
                paths[source] = cubin
        if not to_build:
            return paths, {}
        built, failures = _build(state, cache, {source: keys[source] for source in to_build}, progress, jobs)
        return paths | built, failures
    finally:
        for lock in locks.values():
            lock.release()


def _build(
    state: _State, cache: KernelCache, keys: dict[KernelSource, str], progress: bool | None, jobs: int | None
) -> tuple[dict[KernelSource, Path], dict[KernelSource, errors.CompileError]]:
    """Compiles kernels whose locks are held; publishes each when the next is done, so that a killed build keeps it."""
    toolchains = {source: state.toolchain(source.arch) for source in keys}
    paths: dict[KernelSource, Path] = {}
    failures: dict[KernelSource, errors.CompileError] = {}
    try:
        with (
            cache.workspace() as folder,
            contextlib.closing(
                project.build_project(
                    folder,
                    toolchains,
                    options=state.settings.extra_flags,
                    jobs=jobs or state.settings.num_jobs,
                    progress=progress,
                )
            ) as results,
        ):
            for source, result in results:
                key = keys[source]
                if result.cubin is None:
                    log = cache.record_failure(key, source.text, result.log)
                    failures[source] = project.compile_error(source, result, log)
                    continue
                staged = folder / "entries" / key
                staged.mkdir(parents=True)
                _stage(staged, source, toolchains[source], result, state.settings)
                paths[source] = cache.publish(key, staged)
    except OSError as error:
        raise errors.CacheError(
            errors.explain(
                "kernel cache",
                f"{error.filename or cache.root}: {error.strerror}",
                "a directory with room that can be written",
            )
        ) from error
    return paths, {source: failures[source] for source in keys if source in failures}


def _stage(
    folder: Path, source: KernelSource, toolchain: Toolchain, result: project.BuildResult, settings: Settings
) -> None:
    """Writes a complete entry."""
    assert result.cubin is not None
    content = result.cubin.read_bytes()
    meta = {
        "name": source.name,
        "arch": source.arch,
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
        "compiler": toolchain.version_text,
        "flags": _flags(settings),
        "library": __version__,
        "seconds": result.seconds,
        **dataclasses.asdict(project.parse_ptxas(result.log)),
    }
    (folder / "kernel.cubin").write_bytes(content)
    (folder / "kernel.cu").write_text(source.text)
    (folder / "log.txt").write_text(result.log)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


def export_kernels(
    sources: Iterable[KernelSource],
    directory: str | os.PathLike[str],
    *,
    progress: bool | None = None,
    jobs: int | None = None,
) -> dict[str, Path]:
    """Compiles kernels and copies them into a folder for `HUMMING_CUTLASS_AOT_DIR`.

    The folder serves any machine with this version of the package, without a compiler.

    Args:
        sources: kernels of distinct names.
        directory: where they go; created when it is not there, and added to.
        progress: as for `compile_kernels`.
        jobs: as for `compile_kernels`.

    Returns:
        The path of the exported cubin by kernel name.

    Raises:
        ArgumentTypeError: `directory` is no path, or `jobs` no integer.
        ArgumentError: `directory` is empty, or `jobs` below 1.
        CacheError: the folder cannot be written.
        HummingError: as `compile_kernels`.
    """
    given: object = directory
    if not isinstance(given, (str, os.PathLike)):
        got = f"{type(directory).__name__} {directory!r}"
        raise errors.ArgumentTypeError(errors.explain("directory", got, "the path of a folder"))
    if not os.fspath(directory):
        raise errors.ArgumentError(errors.explain("directory", "an empty path", "the path of a folder", "."))
    if jobs is not None and (jobs := integer(jobs, "jobs", "a number of at least 1")) < 1:
        raise errors.ArgumentError(errors.explain("jobs", jobs, "a number of at least 1", 1))
    sources = list(sources)
    target = KernelCache(Path(directory).expanduser().absolute())
    # A folder that cannot be written must not cost minutes of compiling first.
    with _writing(directory):
        target.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.root):
            pass
    compiled = compile_kernels(sources, progress=progress, jobs=jobs)
    settings = Settings.from_environment()
    exported: dict[str, Path] = {}
    with _writing(directory):
        for source in sources:
            entry = target.entry(_content_key(source, settings))
            entry.parent.mkdir(parents=True, exist_ok=True)
            fresh = entry.parent / f".{entry.name}-{secrets.token_hex(8)}"
            shutil.copytree(compiled[source.name].parent, fresh)
            # Readable by whoever runs the kernels, unlike the private cache it comes from.
            fresh.chmod(0o755)
            if read_entry(entry)[0] is None:
                shutil.rmtree(entry, ignore_errors=True)
                os.rename(fresh, entry)
            else:
                shutil.rmtree(fresh)
            exported[source.name] = entry / "kernel.cubin"
    return exported


@contextlib.contextmanager
def _writing(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Turns the failures of writing to the folder of `export_kernels` into the error of this package."""
    try:
        yield
    except OSError as error:
        raise errors.CacheError(
            errors.explain(
                "directory", f"{error.filename or directory}: {error.strerror}", "a folder that can be written"
            )
        ) from None
