"""What is compiled: one CUDA source a kernel."""

from __future__ import annotations

import dataclasses
import re

from humming_cutlass import errors

__all__ = ["KernelSource"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
_ARCH = re.compile(r"sm_[0-9]+[af]?")


@dataclasses.dataclass(frozen=True)
class KernelSource:
    """The source of one kernel, ready to compile.

    Attributes:
        name: the kernel's name, also the name of its files: letters, digits and `_ . + -`, at most 200 of them.
        text: the CUDA C++ source, the same bytes on every run.
        arch: the GPU to compile for, suffix included: `sm_80`, `sm_90a`, `sm_120a`, ...

    Raises:
        ArgumentError: a name that is no file name, or an arch that is not of the form above.
    """

    name: str
    text: str
    arch: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise errors.ArgumentError(
                errors.explain("name", repr(self.name), "1 to 200 letters, digits and _ . + -, not starting with . + -")
            )
        if not _ARCH.fullmatch(self.arch):
            raise errors.ArgumentError(
                errors.explain("arch", repr(self.arch), "sm_XX with its suffix, such as sm_80, sm_90a or sm_120a")
            )
