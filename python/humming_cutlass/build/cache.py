"""The cache of compiled kernels on disk.

    <directory>/v1/<key[:2]>/<key>/   kernel.cubin  meta.json  kernel.cu  log.txt
    <directory>/v1/locks/<key>.lock   held by the one process that builds the key; freed by the kernel when it dies
    <directory>/v1/tmp/<unique>/      builds in progress
    <directory>/v1/failed/<key>/      kernel.cu and log.txt of the last failure

An entry appears whole or not at all: it is written in `tmp`, flushed, and renamed. A reader checks size and hash.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from humming_cutlass import errors
from humming_cutlass.build.settings import Settings

__all__ = ["FileLock", "KernelCache", "KernelInfo", "cache_directory", "kernel_info", "read_entry"]

#: Of the layout below the cache directory; a change of the layout changes the name.
_LAYOUT = "v1"

#: Seconds to wait for the process that builds the same kernel.
LOCK_TIMEOUT = 600.0


# --- The directory ---------------------------------------------------------------------------------------------------


def _refusal(path: Path, *, follow: bool) -> str | None:
    """Why an existing directory must not be used: whoever can write into it can run code as this user."""
    try:
        status = path.stat() if follow else path.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(status.st_mode):
        return "not a directory"
    if status.st_uid != os.geteuid():
        return f"owned by user {status.st_uid}, not by user {os.geteuid()}"
    if status.st_mode & 0o022:
        return f"mode {stat.S_IMODE(status.st_mode):04o} lets others write (chmod 700 {path})"
    return None


def _create(path: Path) -> str | None:
    """Creates a private directory with its parents; returns why it could not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _candidates(settings: Settings) -> list[tuple[Path, bool]]:
    """The default directories, and whether a symbolic link is followed there (not where others can make one)."""
    found: list[tuple[Path, bool]] = []
    if settings.xdg_cache_home is not None and os.path.isabs(settings.xdg_cache_home):
        found.append((Path(settings.xdg_cache_home) / "humming_cutlass", True))
    if os.path.isabs(settings.home):
        found.append((Path(settings.home) / ".cache" / "humming_cutlass", True))
    found.append((Path(tempfile.gettempdir()) / f"humming_cutlass-{os.geteuid()}", False))
    return found


def _nearest_existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def cache_directory(*, create: bool = False, settings: Settings | None = None) -> Path:
    """Returns the directory that holds compiled kernels.

    `HUMMING_CUTLASS_CACHE_DIR` when it is set; else the first usable one of `$XDG_CACHE_HOME/humming_cutlass`,
    `~/.cache/humming_cutlass` and `humming_cutlass-<uid>` in the temporary directory. With `create` and none of them
    usable, a private directory that lives as long as the process. A directory that exists must belong to this user
    and must not be writable by others.

    Args:
        create: create the directory (mode 0700), which the first compilation does; else only say which one it is.
        settings: default: the environment.

    Raises:
        CacheError: `HUMMING_CUTLASS_CACHE_DIR` names a directory that cannot be used, or nothing can be written.
    """
    settings = settings or Settings.from_environment()
    if settings.cache_dir is not None:
        path = Path(settings.cache_dir).expanduser().absolute()
        reason = _create(path) if create else None
        if path.exists() or create:
            reason = reason or _refusal(path, follow=True)
        if reason is not None:
            raise errors.CacheError(
                errors.explain(
                    "HUMMING_CUTLASS_CACHE_DIR",
                    f"{path}: {reason}",
                    "a directory of this user that nobody else can write to",
                )
            )
        return path

    rejected: list[str] = []
    for path, follow in _candidates(settings):
        if os.path.lexists(path) or create:
            reason = (_create(path) if create else None) or _refusal(path, follow=follow)
            if reason is None and not os.access(path, os.W_OK | os.X_OK):
                reason = "not writable"
        else:
            reason = None if os.access(_nearest_existing(path), os.W_OK | os.X_OK) else "cannot be created"
        if reason is None:
            return path
        rejected.append(f"{path}: {reason}")
    try:
        temporary = Path(tempfile.mkdtemp(prefix="humming_cutlass-"))
    except OSError as error:
        raise errors.CacheError(
            errors.explain(
                "kernel cache",
                "; ".join([*rejected, str(error)]),
                "HUMMING_CUTLASS_CACHE_DIR set to a writable directory",
            )
        ) from None
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not a fork of it
            shutil.rmtree(temporary, ignore_errors=True)

    atexit.register(remove)
    warnings.warn(
        f"Compiled kernels last only as long as this process: {'; '.join(rejected)}. Set HUMMING_CUTLASS_CACHE_DIR.",
        RuntimeWarning,
        stacklevel=2,
    )
    return temporary


# --- Entries ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class KernelInfo:
    """What was recorded when a kernel was compiled.

    Attributes:
        name: the kernel's name.
        arch: the GPU it was compiled for.
        sha256: of the cubin.
        size: of the cubin in bytes.
        compiler: the compiler's version text.
        seconds: wall time of nvcc.
        registers: per thread, the most of all entry points.
        spill_bytes: spill stores and loads of all entry points.
        stack_bytes: stack frame, the most of all entry points.
        static_smem_bytes: static shared memory, the most of all entry points.
    """

    name: str
    arch: str
    sha256: str
    size: int
    compiler: str
    seconds: float
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_smem_bytes: int


def kernel_info(cubin: Path) -> KernelInfo:
    """Returns what was recorded about a cubin of `compile_kernels`.

    Raises:
        CacheError: there is no readable record beside it.
    """
    try:
        meta = json.loads((cubin.parent / "meta.json").read_bytes())
        return KernelInfo(**{field.name: meta[field.name] for field in dataclasses.fields(KernelInfo)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.CacheError(
            errors.explain("cubin", f"{cubin} ({error!r})", "a path from compile_kernels")
        ) from None


def read_entry(entry: Path) -> tuple[Path | None, str | None]:
    """Returns (cubin, None) of a sound entry, (None, reason) of a damaged one and (None, None) where there is none."""
    try:
        meta = json.loads((entry / "meta.json").read_bytes())
        cubin = (entry / "kernel.cubin").read_bytes()
    except ValueError:
        return None, "meta.json cannot be parsed"
    except OSError as error:
        return (None, f"{error.strerror}: {error.filename}") if os.path.lexists(entry) else (None, None)
    if not isinstance(meta, dict) or meta.get("size") != len(cubin):
        return None, "kernel.cubin has another size than meta.json says"
    if meta.get("sha256") != hashlib.sha256(cubin).hexdigest():
        return None, "kernel.cubin has another hash than meta.json says"
    return entry / "kernel.cubin", None


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system without it
            raise
    finally:
        os.close(descriptor)


class FileLock:
    """An exclusive lock that the operating system frees when its holder dies, however it dies.

    Not a lock file whose mere existence counts: those stay behind after a kill and block for ever.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def try_acquire(self) -> bool:
        """Takes the lock and returns True; False when another holder has it.

        A file system without locks counts as taken: entries are published atomically, so that two builders are a waste
        of time and nothing worse.
        """
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise errors.CacheError(
                errors.explain(
                    "kernel cache",
                    f"{self.path}: {error.strerror}",
                    "a writable directory, see HUMMING_CUTLASS_CACHE_DIR",
                )
            ) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES):
                os.close(descriptor)
                return False
        self._descriptor = descriptor
        return True

    def acquire(self, timeout: float) -> None:
        """Waits for the lock.

        Raises:
            CacheError: another process still holds it after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while not self.try_acquire():
            if time.monotonic() >= end:
                raise errors.CacheError(
                    errors.explain(
                        "kernel cache",
                        f"{self.path} held by another process for {timeout:.0f} s",
                        "a build that ends; stop that process (its lock goes with it)",
                    )
                )
            time.sleep(0.05)

    def release(self) -> None:
        """Frees the lock. The file stays: removing it would let two processes lock two files of one name."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


class KernelCache:
    """Entries by key below one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.root = directory / _LAYOUT

    def entry(self, key: str) -> Path:
        """Returns the folder of a key, there or not."""
        return self.root / key[:2] / key

    def lookup(self, key: str) -> tuple[Path | None, str | None]:
        """Returns (cubin, None), (None, reason) of a damaged entry or (None, None); see `read_entry`."""
        return read_entry(self.entry(key))

    def prepare(self) -> None:
        """Creates the folders, private ones.

        Raises:
            CacheError: they cannot be created.
        """
        try:
            for folder in (self.root, self.root / "locks", self.root / "tmp", self.root / "failed"):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise errors.CacheError(
                errors.explain(
                    "kernel cache",
                    f"{error.filename}: {error.strerror}",
                    "a writable directory, see HUMMING_CUTLASS_CACHE_DIR",
                )
            ) from None

    def lock(self, key: str) -> FileLock:
        """Returns the lock of whoever builds this key, not yet taken."""
        return FileLock(self.root / "locks" / f"{key}.lock")

    @contextlib.contextmanager
    def workspace(self) -> Iterator[Path]:
        """A private folder for one build, on the same file system, removed afterwards.

        It is locked as long as this process lives, so that the next build can tell what a killed one left behind.
        """
        self._sweep()
        folder = self.root / "tmp" / f"{os.getpid()}-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        alive = FileLock(folder / "alive.lock")
        alive.try_acquire()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            alive.release()

    def _sweep(self) -> None:
        """Removes what killed builds left. A build's first minute is left alone: it may not hold its lock yet."""
        for folder in (self.root / "tmp").iterdir():
            try:
                if time.time() - folder.stat().st_mtime < 60:
                    continue
                lock = FileLock(folder / "alive.lock")
                if lock.try_acquire():
                    shutil.rmtree(folder, ignore_errors=True)
                    lock.release()
            except (OSError, errors.CacheError):
                continue

    def publish(self, key: str, staged: Path) -> Path:
        """Moves a finished entry, a folder of `workspace`, to its place and returns its cubin.

        When another process was faster, its entry is kept and read.

        Raises:
            CacheError: the entry cannot be written, or the winner's cannot be read.
        """
        entry = self.entry(key)
        try:
            entry.parent.mkdir(mode=0o700, exist_ok=True)
            for file in staged.iterdir():
                _flush(file)
            _flush(staged)
            try:
                os.rename(staged, entry)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            else:
                _flush(entry.parent)
                return entry / "kernel.cubin"
        except OSError as error:
            raise errors.CacheError(
                errors.explain(
                    "kernel cache", f"{entry}: {error.strerror}", "a directory with room that can be written"
                )
            ) from None
        # Network file systems show another machine's rename late.
        for _ in range(20):
            cubin, reason = self.lookup(key)
            if cubin is not None:
                return cubin
            time.sleep(0.1)
        raise errors.CacheError(errors.explain("kernel cache", f"{entry}: {reason}", "an entry that can be read"))

    def discard(self, key: str) -> None:
        """Takes a damaged entry away: out of sight first, in one step, then to pieces."""
        away = self.root / "tmp" / f"damaged-{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.entry(key), away)
            if away.is_dir() and not away.is_symlink():
                shutil.rmtree(away, ignore_errors=True)
            else:
                away.unlink()

    def record_failure(self, key: str, source: str, log: str) -> Path:
        """Keeps source and log of a failed build and returns the log's path."""
        folder = self.root / "failed" / key
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, text in (("kernel.cu", source), ("log.txt", log)):
            fresh = folder / f".{name}-{secrets.token_hex(8)}"
            fresh.write_text(text)
            os.replace(fresh, folder / name)
        return folder / "log.txt"
