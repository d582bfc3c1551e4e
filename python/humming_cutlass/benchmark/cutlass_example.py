"""CUTLASS's example 55, a mixed-input GEMM for Hopper, as a contender; bench/contenders/build.sh builds it."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Callable

import torch

from humming_cutlass.benchmark.contenders import (
    EXAMPLE,
    Contender,
    UnavailableError,
    bytes_of,
    copies_needed,
)
from humming_cutlass.benchmark.problem import RandomWeight, error_bound
from humming_cutlass.benchmark.timing import time_calls

__all__ = ["VARIABLE", "CutlassExample", "Library", "pack_nibbles"]

VARIABLE = "HUMMING_CUTLASS_EXAMPLE_55"
"""The environment variable that names the library."""
_REPEATS = 3
_CHECKED_ROWS = 64
_GROUP, _STEP = 128, 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One kernel of the library.

    Attributes:
        index: its number there.
        name: tile and schedule.
        form: how it wants the weight stored.
    """

    index: int
    name: str
    form: int


class Library:
    """The functions of the library; bench/contenders/cutlass_example_55.cu says what they take.

    Attributes:
        version: the version of CUTLASS that it is built of.
        variants: its kernels.

    Raises:
        UnavailableError: the library cannot be loaded, or lacks a function.
    """

    def __init__(self, path: str) -> None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        signatures = {
            "version": (ctypes.c_char_p, []),
            "count": (integer, []),
            "name": (ctypes.c_char_p, [integer]),
            "form": (integer, [integer]),
            "store": (integer, [integer, pointer, pointer, integer, integer, pointer]),
            "workspace": (ctypes.c_size_t, [integer] * 5),
            "run": (integer, [integer, *[pointer] * 5, *[integer] * 4, pointer]),
        }
        try:
            loaded = ctypes.CDLL(path)
            functions = {name: getattr(loaded, f"example55_{name}") for name in signatures}
        except (OSError, AttributeError) as error:
            raise UnavailableError(f"{EXAMPLE}: {VARIABLE} names no such library ({error})") from None
        for name, (result, arguments) in signatures.items():
            functions[name].restype, functions[name].argtypes = result, arguments
        self.store: Callable[..., int] = functions["store"]
        self.workspace: Callable[..., int] = functions["workspace"]
        self.run: Callable[..., int] = functions["run"]
        self.version = str(functions["version"]().decode())
        self.variants = [
            Variant(index=i, name=functions["name"](i).decode(), form=functions["form"](i))
            for i in range(functions["count"]())
        ]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Returns 4-bit codes (n, k) two a byte, uint8 (n, k / 2); an even k is in the low half."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Copy:
    """A weight on the device: what a variant reads of it by form, and the scales (k / 128, n)."""

    stored: dict[int, torch.Tensor]
    scale: torch.Tensor


class CutlassExample(Contender):
    """The fastest of the library's kernels at each m: those that are wrong or refuse are left out, and named."""

    impl = EXAMPLE

    def __init__(self, weight: RandomWeight, rotation_bytes: int) -> None:
        problem, types = weight.problem, weight.problem.types
        supported = (
            (types.element_a, types.element_b, types.element_scale) == ("bfloat16", "int4", "bfloat16")
            and (types.element_zero, types.group_size, problem.global_scale) == ("none", _GROUP, False)
            and problem.n % _STEP == 0
            and problem.k % _STEP == 0
        )
        if not supported:
            raise UnavailableError(
                f"{EXAMPLE}: for bfloat16 x int4 with bfloat16 scales in groups of {_GROUP}, "
                f"n and k in multiples of {_STEP}"
            )
        path = os.environ.get(VARIABLE)
        if not path:
            raise UnavailableError(f"{EXAMPLE}: {VARIABLE} is not set; bench/contenders/build.sh makes what it names")
        self.library = Library(path)
        self.weight = weight
        packed, scale = pack_nibbles(weight.codes), weight.scale.t().contiguous()
        first = _Copy(
            stored={form: self._store(form, packed) for form in sorted({v.form for v in self.library.variants})},
            scale=scale,
        )
        self.weight_bytes = bytes_of([packed, scale])
        self.copies = [first]
        for _ in range(copies_needed(self.weight_bytes, rotation_bytes) - 1):
            stored = {form: t.clone() for form, t in first.stored.items()}
            self.copies.append(_Copy(stored=stored, scale=scale.clone()))
        self.kernels: dict[int, str] = {}

    def _stream(self) -> int:
        device = self.weight.codes.device
        return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0

    def _store(self, form: int, packed: torch.Tensor) -> torch.Tensor:
        problem, stored = self.weight.problem, torch.empty_like(packed)
        error = self.library.store(form, packed.data_ptr(), stored.data_ptr(), problem.n, problem.k, self._stream())
        if error:
            raise RuntimeError(f"{EXAMPLE}: storing the weight in form {form} failed with {error}")
        return stored

    def _calls(self, variant: Variant, a: torch.Tensor, out: torch.Tensor) -> list[Callable[[], object]]:
        """Returns the calls of one variant. They share a workspace: they run one after the other.

        It is kept until the next such calls are made: a graph of these outlives them.
        """
        problem, m = self.weight.problem, a.shape[0]
        sizes = (m, problem.n, problem.k, problem.types.group_size)
        size = self.library.workspace(variant.index, *sizes)
        self.workspace = workspace = torch.empty(size, dtype=torch.uint8, device=a.device)

        def launch(copy: _Copy) -> None:
            tensors = (a, copy.stored[variant.form], copy.scale, out, workspace)
            pointers = (t.data_ptr() for t in tensors)
            error = self.library.run(variant.index, *pointers, *sizes, self._stream())
            if error:
                raise RuntimeError(f"refused with {error}")

        return [lambda copy=copy: launch(copy) for copy in self.copies]  # type: ignore[misc]

    def calls(self, a: torch.Tensor, out: torch.Tensor) -> list[Callable[[], object]]:
        """See `Contender.calls`; the variants are checked and timed here.

        Raises:
            RuntimeError: none of them is right.
        """
        m = a.shape[0]
        rows = torch.unique(torch.linspace(0, m - 1, min(m, _CHECKED_ROWS), device=a.device).round().long())
        expected = a[rows].float() @ self.weight.reference.t()
        bound = error_bound(self.weight.problem.types)
        times: dict[Variant, float] = {}
        dropped = []
        for variant in self.library.variants:
            calls = self._calls(variant, a, out)
            try:
                error = max(self.error(call, out, rows, expected) for call in (calls[0], calls[-1]))
            except RuntimeError as failure:
                dropped.append(f"{variant.name} ({failure})")
                continue
            if error <= bound:
                times[variant] = time_calls(calls, device=a.device, repeats=_REPEATS).us
            else:
                dropped.append(f"{variant.name} (relative error {error:.3g})")
        without = f"; without {', '.join(dropped)}" if dropped else ""
        if not times:
            raise RuntimeError(f"{EXAMPLE}: no variant is right{without}")
        best = min(times, key=lambda variant: times[variant])
        self.kernels[m] = f"CUTLASS {self.library.version} {best.name}, the fastest of {len(times)}{without}"
        return self._calls(best, a, out)

    def kernel(self, m: int) -> str:
        """See `Contender.kernel`."""
        return self.kernels.get(m, "")
