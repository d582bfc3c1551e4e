"""Every error this package raises on purpose.

Each message has four parts: the parameter, what it got, what is allowed, and, where there is one, the
nearest supported choice. `explain` writes that sentence, so that it reads the same everywhere.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CacheError",
    "CompileError",
    "HummingError",
    "LaunchError",
    "MissingKernelError",
    "StateError",
    "ToolchainError",
    "UnsupportedError",
    "explain",
]


class HummingError(Exception):
    """Base of all errors of this package."""


class ArgumentError(HummingError, ValueError):
    """A value, shape, stride, alignment or device that a call cannot take."""


class ArgumentTypeError(HummingError, TypeError):
    """An argument of the wrong Python type or tensor dtype."""


class UnsupportedError(HummingError, ValueError):
    """A configuration that is understood but that no kernel implements; see `support.check`."""


class StateError(HummingError, RuntimeError):
    """A call out of order, such as `forward` before `transform`."""


class ToolchainError(HummingError, RuntimeError):
    """No CUDA compiler, or one that is too old for the GPU."""


class CompileError(HummingError, RuntimeError):
    """The CUDA compiler failed; the message holds the command, the end of its output and the log's path."""


class CacheError(HummingError, RuntimeError):
    """The kernel cache cannot be used: not writable, not private, or locked for too long."""


class MissingKernelError(HummingError, RuntimeError):
    """A kernel that was not compiled ahead of time, where compiling is switched off."""


class LaunchError(HummingError, RuntimeError):
    """The CUDA driver refused to load or launch a kernel."""


def explain(parameter: str, got: object, allowed: str, nearest: object | None = None) -> str:
    """Returns the sentence that every error of this package consists of.

    Args:
        parameter: the argument's name as the user wrote it.
        got: what was passed.
        allowed: what would have been accepted, as a phrase.
        nearest: the nearest supported choice, where there is one.
    """
    try:
        got = str(got)
    except ValueError:  # Python refuses to print an integer of thousands of digits
        got = f"an integer of {got.bit_length()} bits" if isinstance(got, int) else f"a {type(got).__name__}"
    sentence = f"{parameter}: got {got}; allowed: {allowed}"
    return sentence if nearest is None else f"{sentence}; nearest supported: {nearest}"
