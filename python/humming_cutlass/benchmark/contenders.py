"""Who is timed: this library, torch on an unquantized weight, dequantization followed by torch, peers, a stream."""

from __future__ import annotations

import abc
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from humming_cutlass import _tensors, ops
from humming_cutlass.benchmark.problem import RandomWeight
from humming_cutlass.errors import HummingError

__all__ = [
    "CONTENDERS",
    "EXAMPLE",
    "FLOOR",
    "PDL",
    "Contender",
    "UnavailableError",
    "bytes_of",
    "copies_needed",
    "default_contenders",
]

Call = Callable[[], object]

PDL_VARIABLE = "HUMMING_CUTLASS_PDL"
FLOOR = "streaming_floor"
"""The contender that computes nothing: it reads the bytes of the packed weight."""
PDL = "humming_cutlass+pdl"
"""The contender that uses programmatic dependent launch."""
EXAMPLE = "cutlass_example_55"
"""CUTLASS's own mixed-input GEMM for Hopper."""


class UnavailableError(HummingError):
    """A contender cannot compute this problem; the message says why."""


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Returns how many bytes `tensors` hold."""
    return sum(t.numel() * t.element_size() for t in tensors)


def copies_needed(weight_bytes: int, rotation_bytes: int) -> int:
    """Returns over how many copies of a weight to rotate: at least 2, at most 64."""
    return max(2, min(64, math.ceil(rotation_bytes / max(1, weight_bytes))))


class Contender(abc.ABC):
    """One implementation, ready to compute one problem.

    Args:
        weight: the weight, also on the device.
        rotation_bytes: how many bytes of copies of it to keep.

    Attributes:
        impl: the name in the results.
        weight_bytes: what has to be read of the weight in a call, scales and zero points included.
        copies: the weights that calls rotate over.
        tolerance: how many times the bound on the error it may reach.

    Raises:
        UnavailableError: the problem is not one that it can compute.
    """

    impl: str
    weight_bytes: int
    copies: Sequence[Any]
    tolerance: float = 1.0

    @abc.abstractmethod
    def __init__(self, weight: RandomWeight, rotation_bytes: int) -> None: ...

    @abc.abstractmethod
    def calls(self, a: torch.Tensor, out: torch.Tensor) -> list[Call]:
        """Returns calls that write `a` (m, k) times the weight to `out` (m, n), each from its own copy."""

    def kernel(self, m: int) -> str:
        """Returns which kernel runs for m tokens, as far as it is known."""
        del m
        return ""

    def error(self, call: Call, out: torch.Tensor, rows: torch.Tensor, expected: torch.Tensor) -> float:
        """Returns |out - expected| / |expected| after a call, over `rows`; infinite where a value is not finite.

        Args:
            call: one of `calls`.
            out: what it writes, poisoned here first.
            rows: indices of the rows to compare.
            expected: what they should be, float32.
        """
        out.fill_(float("nan"))
        call()
        if not bool(torch.isfinite(out).all()):
            return float("inf")
        difference = (out[rows].float() - expected).norm()
        return float(difference / expected.norm().clamp_min(1e-30)) if len(rows) else 0.0

    def output_dtype(self, weight: RandomWeight) -> torch.dtype:
        """Returns the type of `out`."""
        return weight.problem.dtype

    def input_dtype(self, weight: RandomWeight) -> torch.dtype:
        """Returns the type of `a`."""
        return weight.problem.dtype


class HummingCutlass(Contender):
    """`ops.gemm` with the planner's choice of kernel."""

    impl = "humming_cutlass"

    def __init__(self, weight: RandomWeight, rotation_bytes: int) -> None:
        first = weight.packed
        self.weight_bytes = bytes_of(first.state_dict().values())
        self.copies = [first]
        for _ in range(copies_needed(self.weight_bytes, rotation_bytes) - 1):
            tensors = {name: t.clone() for name, t in first.state_dict().items()}
            self.copies.append(dataclasses.replace(first, **tensors))

    def calls(self, a: torch.Tensor, out: torch.Tensor) -> list[Call]:
        """See `Contender.calls`."""
        return [lambda w=w: ops.gemm(a, w, out=out) for w in self.copies]  # type: ignore[misc]

    def kernel(self, m: int) -> str:
        """See `Contender.kernel`."""
        first = self.copies[0]
        if first.data.device.type != "cuda":
            return "host"
        choice = ops.choose(first, m)
        return f"{choice.config.name} split_k={choice.split_k}"


class HummingCutlassPdl(HummingCutlass):
    """The same with programmatic dependent launch: a kernel starts while the one before it ends."""

    impl = PDL

    def __init__(self, weight: RandomWeight, rotation_bytes: int) -> None:
        if weight.codes.device.type != "cuda":
            raise UnavailableError(f"{self.impl}: needs a GPU")
        super().__init__(weight, rotation_bytes)

    def calls(self, a: torch.Tensor, out: torch.Tensor) -> list[Call]:
        """See `Contender.calls`; the runtime reads the variable at each launch, so a graph keeps what it said."""

        def launch(call: Call) -> None:
            before = os.environ.get(PDL_VARIABLE)
            os.environ[PDL_VARIABLE] = "1"
            try:
                call()
            finally:
                if before is None:
                    del os.environ[PDL_VARIABLE]
                else:
                    os.environ[PDL_VARIABLE] = before

        return [lambda call=call: launch(call) for call in super().calls(a, out)]  # type: ignore[misc]


class TorchMatmul(Contender):
    """`torch.matmul` on the dequantized weight: in the activations' type, or in float32 on a CPU."""

    impl = "torch.matmul"

    def __init__(self, weight: RandomWeight, rotation_bytes: int) -> None:
        self.dtype = weight.problem.dtype if weight.codes.device.type == "cuda" else torch.float32
        first = weight.reference.to(self.dtype)
        self.weight_bytes = bytes_of([first])
        self.copies = [first] + [first.clone() for _ in range(copies_needed(self.weight_bytes, rotation_bytes) - 1)]

    def calls(self, a: torch.Tensor, out: torch.Tensor) -> list[Call]:
        """See `Contender.calls`."""
        return [lambda w=w: torch.matmul(a, w.t(), out=out) for w in self.copies]  # type: ignore[misc]

    def kernel(self, m: int) -> str:
        """See `Contender.kernel`."""
        del m
        return str(self.dtype)

    def output_dtype(self, weight: RandomWeight) -> torch.dtype:
        """See `Contender.output_dtype`."""
        return self.dtype

    input_dtype = output_dtype


class DequantizeMatmul(Contender):
    """Dequantization to the activations' type with torch operations, then `torch.matmul`, both in every call.

    The weight is stored as bytes, two codes each where they fit, and read through a table of pairs of values; then zero
    points are subtracted and scales multiplied in the activations' type. On a GPU `torch.compile` makes one kernel of
    that where it works.
    """

    impl = "dequantize+torch.matmul"

    def __init__(self, weight: RandomWeight, rotation_bytes: int) -> None:
        problem = weight.problem
        self.dtype = problem.dtype if weight.codes.device.type == "cuda" else torch.float32
        codes, values = weight.codes, weight.table().to(self.dtype)
        self.pair = values.numel() <= 16 and problem.k % 2 == 0
        if self.pair:
            step = values.numel()
            codes = codes[:, ::2] + codes[:, 1::2] * step
            every = torch.arange(step * step, device=codes.device)
            values = torch.stack([values[every % step], values[every // step]], dim=1).contiguous()
        self.table = values
        scale = _tensors.decode(weight.scale, problem.types.element_scale)
        self.scale = (scale if weight.global_scale is None else scale * weight.global_scale).to(self.dtype)
        self.zero = None if weight.zero is None else weight.zero.to(self.dtype)
        self.weight_bytes = bytes_of([codes, self.scale, *([] if self.zero is None else [self.zero])])
        self.copies = [codes.clone() for _ in range(copies_needed(self.weight_bytes, rotation_bytes))]
        self.shape = (problem.n, problem.k)
        self.dequantize: Callable[[torch.Tensor], torch.Tensor] = self._dequantize
        self.how = "torch operations"
        if codes.device.type == "cuda":
            compiled = torch.compile(self._dequantize, dynamic=False)
            try:
                compiled(self.copies[0])
            except Exception as error:  # no Triton, no host compiler, or a bug there: the plain form is correct too
                self.how += f" (torch.compile: {type(error).__name__})"
            else:
                self.dequantize, self.how = compiled, "torch.compile"

    def kernel(self, m: int) -> str:
        """See `Contender.kernel`."""
        del m
        return self.how

    def _dequantize(self, codes: torch.Tensor) -> torch.Tensor:
        n, k = self.shape
        flat = codes.reshape(-1).int()
        groups = self.scale.shape[1]
        weight: torch.Tensor = torch.index_select(self.table, 0, flat).view(n, groups, k // groups)
        if self.zero is not None:
            weight = weight - self.zero[:, :, None]
        weight = weight * self.scale[:, :, None]
        return weight.view(n, k)

    def calls(self, a: torch.Tensor, out: torch.Tensor) -> list[Call]:
        """See `Contender.calls`."""
        return [lambda w=w: torch.matmul(a, self.dequantize(w).t(), out=out) for w in self.copies]  # type: ignore[misc]

    def output_dtype(self, weight: RandomWeight) -> torch.dtype:
        """See `Contender.output_dtype`."""
        return self.dtype

    input_dtype = output_dtype


def _humming(weight: RandomWeight, rotation_bytes: int) -> Contender:
    from humming_cutlass.benchmark.humming import Humming

    return Humming(weight, rotation_bytes)


def _example(weight: RandomWeight, rotation_bytes: int) -> Contender:
    from humming_cutlass.benchmark.cutlass_example import CutlassExample

    if weight.codes.device.type != "cuda":
        raise UnavailableError(f"{EXAMPLE}: needs a GPU")
    return CutlassExample(weight, rotation_bytes)


def _floor(weight: RandomWeight, rotation_bytes: int) -> Contender:
    if weight.codes.device.type != "cuda":
        raise UnavailableError(f"{FLOOR}: needs a GPU")
    try:
        from humming_cutlass.benchmark.floor import StreamingFloor
    except ImportError as error:
        raise UnavailableError(f"{FLOOR}: not importable ({error})") from None
    return StreamingFloor(weight, rotation_bytes)


CONTENDERS: dict[str, Callable[[RandomWeight, int], Contender]] = {
    HummingCutlass.impl: HummingCutlass,
    HummingCutlassPdl.impl: HummingCutlassPdl,
    "humming": _humming,
    EXAMPLE: _example,
    TorchMatmul.impl: TorchMatmul,
    DequantizeMatmul.impl: DequantizeMatmul,
    FLOOR: _floor,
}
"""Every implementation that can be timed, by name."""


def default_contenders(*, leave_out: Iterable[str] = ()) -> list[str]:
    """Returns who is timed unless the user says otherwise."""
    return [name for name in CONTENDERS if name not in set(leave_out)]
