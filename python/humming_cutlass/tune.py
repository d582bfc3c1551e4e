"""Choices of kernels that were measured: the file that `python -m humming_cutlass tune` writes and calls read.

A stored choice replaces the cost model's. It can change a call's time and nothing else: what is read counts only where
it is one of the kernels and splits that the planner considers for that very call, whatever the file says. The file is
read once per process, so that results do not change their last bits under a running program.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import os
import secrets
import stat
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from humming_cutlass import planner, support
from humming_cutlass._version import __version__
from humming_cutlass.build.cache import FileLock
from humming_cutlass.config import INT32_MAX, GemmConfig, TypeConfig
from humming_cutlass.errors import CacheError, HummingError, explain

__all__ = ["TOKEN_STEP", "Gpu", "Outcome", "check_file", "gpu", "path", "save", "stored", "token_steps"]

TOKEN_STEP = 8
"""A choice measured at m holds up to the next multiple of this, and down to the one before. The token tile of every
kernel is a multiple of it, so that each kernel launches as many tiles as were measured."""

_VARIABLE = "HUMMING_CUTLASS_TUNING_FILE"
_FORMAT = 1
_MAX_BYTES = 4 << 20
"""Some ten thousand choices. A larger file is not ours."""
_LOCK_TIMEOUT = 60.0

_Key = tuple[str, int, TypeConfig, int, int, int]
"""GPU, multiprocessors, types, n, k, token steps."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """What choices are stored under, and what the planner must know.

    Attributes:
        name: as the driver spells it.
        device: its description for the planner.
    """

    name: str
    device: planner.Device


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was measured for one call.

    Attributes:
        gpu: where.
        m: tokens.
        n: rows of the weight.
        k: columns of the weight.
        model: the cost model's choice.
        model_us: microseconds that it takes.
        best: the fastest choice, of the same types.
        best_us: microseconds that it takes.
        keep: whether `best` is to be stored; else the model's choice stands, and an older stored one goes.
    """

    gpu: Gpu
    m: int
    n: int
    k: int
    model: planner.Choice
    model_us: float
    best: planner.Choice
    best_us: float
    keep: bool


class _Table:
    """The choices of a file that count for this version of the library."""

    def __init__(self, entries: dict[_Key, planner.Choice]) -> None:
        self.entries = entries
        self.legal: dict[tuple[_Key, tuple[str, ...] | None], bool] = {}


_tables: dict[tuple[str | None, ...], _Table] = {}


@functools.cache
def gpu(index: int) -> Gpu:
    """Returns CUDA device `index` as choices are stored for it; read once per process.

    Raises:
        LaunchError, ArgumentError: see `_C.device_properties`.
    """
    from humming_cutlass import _C

    properties = dict[str, Any](_C.device_properties(index))
    return Gpu(name=str(properties["name"]), device=planner.Device.from_properties(properties))


def path() -> Path | None:
    """Returns where choices are stored; None where there is neither a variable that says so nor a home."""
    if name := os.environ.get(_VARIABLE):
        return Path(os.path.expanduser(name))
    config = os.environ.get("XDG_CONFIG_HOME", "")
    home = os.path.expanduser("~")
    if not os.path.isabs(config):
        if not os.path.isabs(home):
            return None
        config = os.path.join(home, ".config")
    return Path(config) / "humming_cutlass" / "tuning.json"


def token_steps(m: int) -> int:
    """Returns which choices m shares: those of all m that round up to the same multiple of `TOKEN_STEP`."""
    return -(-m // TOKEN_STEP)


def stored(
    types: TypeConfig, m: int, n: int, k: int, device: int, *, mainloops: tuple[str, ...] | None = None
) -> planner.Choice | None:
    """Returns the choice that is stored for a call, or None. A file that cannot be used is a warning, once.

    Args:
        types: the maths.
        m: rows of the activations.
        n: rows of the weight.
        k: columns of the weight.
        device: the CUDA device's index.
        mainloops: those that can take the tensors; None is all.
    """
    table = _table()
    if not table.entries:
        return None
    try:
        where = gpu(device)
        key = (where.name, where.device.sm_count, types, n, k, token_steps(m))
        choice = table.entries.get(key)
        if choice is None:
            return None
        legal = table.legal.get((key, mainloops))
        if legal is None:
            legal = choice in planner.candidates(types, m, n, k, where.device, mainloops=mainloops)
            # A choice for aligned activations only, or for others only, is no damage.
            usable = legal or any(
                choice in planner.candidates(types, m, n, k, where.device, mainloops=other)
                for other in (None, support.MAINLOOPS_FOR_ANY_TENSORS)
            )
            table.legal[key, mainloops] = legal
            if not usable:
                what = f"{choice.config.name} split_k={choice.split_k} for m={m}, n={n}, k={k}"
                _warn(path(), f"{what} is not among the planner's choices")
    except HummingError:  # no driver, or types that no kernel computes: the planner has the better words
        return None
    return choice if legal else None


def check_file() -> Path:
    """Returns `path()` after making sure that `save` can write there, which is worth knowing before measuring.

    Raises:
        CacheError: there is no such place, it cannot be written, or what is there was not written by `save`.
    """
    target = _target()
    lock = _locked(target)
    try:
        _read_for_update(target)
    finally:
        lock.release()
    return target


def save(outcomes: Iterable[Outcome]) -> Path:
    """Merges what was measured into the file and returns its path; this process sees it from now on.

    The file appears whole or not at all. Entries of other GPUs, versions and calls stay as they are. Where nothing is
    to be stored and nothing to be removed, the file is left alone.

    Raises:
        CacheError: as `check_file`.
    """
    fresh: dict[_Key, Any] = {}
    for outcome in outcomes:
        fresh[_key_of(outcome)] = _entry_of(outcome) if outcome.keep else None
    target = _target()
    lock = _locked(target)
    try:
        old = _read_for_update(target)
        entries = [entry for entry in old if not (_is_current(entry) and _key_or_none(entry) in fresh)]
        entries += [entry for entry in fresh.values() if entry is not None]
        if entries != old:
            _write(target, entries)
    finally:
        lock.release()
    _tables.clear()
    return target


# --- Entries ---------------------------------------------------------------------------------------------------------


def _key_of(outcome: Outcome) -> _Key:
    where = outcome.gpu
    types = outcome.best.config.types
    return (where.name, where.device.sm_count, types, outcome.n, outcome.k, token_steps(outcome.m))


def _entry_of(outcome: Outcome) -> dict[str, Any]:
    """Returns an outcome as the file has it. The types are part of the kernel's name and not repeated."""
    return {
        "gpu": outcome.gpu.name,
        "sm_count": outcome.gpu.device.sm_count,
        "version": __version__,
        "n": outcome.n,
        "k": outcome.k,
        "m": outcome.m,
        "kernel": outcome.best.config.name,
        "split_k": outcome.best.split_k,
        "us": round(outcome.best_us, 3),
        "model_kernel": outcome.model.config.name,
        "model_split_k": outcome.model.split_k,
        "model_us": round(outcome.model_us, 3),
        "date": datetime.date.today().isoformat(),
    }


def _is_current(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("version") == __version__


def _parse(entry: dict[str, Any]) -> tuple[_Key, planner.Choice]:
    """Returns the key and choice of an entry.

    Raises:
        ValueError, HummingError: a field is missing or impossible.
    """
    for field in ("gpu", "kernel"):
        if not isinstance(entry.get(field), str):
            raise ValueError(f"{field} is no string")
    for field in ("sm_count", "n", "k", "m", "split_k"):
        value = entry.get(field)
        least = 0 if field == "split_k" else 1  # 0 is stream-k
        if type(value) is not int or not least <= value <= INT32_MAX:
            raise ValueError(f"{field} is no number from {least} to {INT32_MAX}")
    if len(entry["kernel"]) > 500:
        raise ValueError("kernel is no name")
    config = GemmConfig.from_name(entry["kernel"])
    if config.name != entry["kernel"]:
        raise ValueError("kernel is no name")
    key = (entry["gpu"], entry["sm_count"], config.types, entry["n"], entry["k"], token_steps(entry["m"]))
    return key, planner.Choice(config=config, split_k=entry["split_k"])


def _key_or_none(entry: dict[str, Any]) -> _Key | None:
    try:
        return _parse(entry)[0]
    except (ValueError, HummingError):
        return None


# --- The file --------------------------------------------------------------------------------------------------------


def _warn(where: Path | None, reason: str) -> None:
    warnings.warn(f"Stored choices in {where} are ignored: {reason}.", RuntimeWarning, stacklevel=3)


def _table() -> _Table:
    """Returns the choices of the file that the environment names, read once per process."""
    name = (os.environ.get(_VARIABLE), os.environ.get("XDG_CONFIG_HOME"), os.environ.get("HOME"))
    table = _tables.get(name)
    if table is None:
        table, where, reason = _load()
        # Kept before the warning: with warnings as errors the next call must not read again.
        table = _tables.setdefault(name, table)
        if reason is not None:
            _warn(where, reason)
    return table


def _load() -> tuple[_Table, Path | None, str | None]:
    """Returns the choices of the file, its path, and why some of them are not there."""
    where = path()
    entries: dict[_Key, planner.Choice] = {}
    bad: list[str] = []
    if where is None or str(where) == os.devnull:
        return _Table(entries), where, None
    try:
        for entry in _read(where):
            if not isinstance(entry, dict) or not isinstance(entry.get("version"), str):
                bad.append("an entry without a version")
            elif _is_current(entry):
                try:
                    key, choice = _parse(entry)
                except (ValueError, HummingError) as error:
                    bad.append(str(error)[:200])
                else:
                    entries[key] = choice
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        bad.append(str(error)[:200])
    reason = bad[0] if bad else None
    return _Table(entries), where, f"{reason} ({len(bad) - 1} more)" if len(bad) > 1 else reason


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _read(where: Path) -> list[Any]:
    """Returns the entries of a file, which may hold anything.

    Raises:
        OSError: it cannot be read; FileNotFoundError where there is none.
        ValueError: it was not written by `save`.
    """
    descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"larger than {_MAX_BYTES >> 20} MB")
    try:
        content = json.loads(text, parse_float=_number, parse_constant=_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    if (
        not isinstance(content, dict)
        or content.get("format") != _FORMAT
        or not isinstance(content.get("entries"), list)
    ):
        raise ValueError(f"not a file of format {_FORMAT}")
    entries: list[Any] = content["entries"]
    return entries


def _refuse(where: object, reason: str) -> CacheError:
    allowed = f"a file that `tune` wrote, or a new one in a folder that can be written; {_VARIABLE} names another"
    return CacheError(explain("tuning file", f"{where} ({reason})", allowed))


def _target() -> Path:
    where = path()
    if where is None:
        raise _refuse(where, "no home directory")
    return Path(os.path.realpath(where))  # a link stays a link


def _locked(target: Path) -> FileLock:
    """Returns the lock of whoever changes the file, taken; its folder exists then."""
    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(_LOCK_TIMEOUT)
    except OSError as error:
        raise _refuse(target, error.strerror or str(error)) from None
    except CacheError:
        raise _refuse(target, f"no lock on {lock.path}") from None
    return lock


def _read_for_update(target: Path) -> list[Any]:
    try:
        return _read(target)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _refuse(target, error.strerror or str(error)) from None
    except ValueError as error:
        raise _refuse(target, str(error)[:200]) from None


def _write(target: Path, entries: list[Any]) -> None:
    """Replaces the file in one step; an entry a line."""
    try:
        lines = ",\n".join(f"  {json.dumps(entry, allow_nan=False)}" for entry in entries)
    except RecursionError:  # an entry that is kept and was just not too deep to be read
        raise _refuse(target, "nested too deeply") from None
    text = f'{{\n "format": {_FORMAT},\n "entries": [\n{lines}\n ]\n}}\n'.encode()
    if len(text) > _MAX_BYTES:
        raise _refuse(target, f"would be larger than {_MAX_BYTES >> 20} MB")
    staged = target.parent / f".{target.name}-{secrets.token_hex(8)}"
    try:
        try:
            with open(staged, "xb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(staged, target)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise _refuse(target, error.strerror or str(error)) from None
