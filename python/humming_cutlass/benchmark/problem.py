"""What is timed: a quantized weight drawn at random, and its exact float32 value, computed without any kernel."""

from __future__ import annotations

import dataclasses
import functools
import re

import torch

from humming_cutlass import _tensors, dtypes, layout
from humming_cutlass.config import MAX_EXTENT, TypeConfig, WeightConfig
from humming_cutlass.errors import ArgumentError, explain

__all__ = ["Problem", "RandomWeight", "error_bound", "parse_shape"]


def parse_shape(text: str) -> tuple[int, int]:
    """Returns (n, k) of `NxK`.

    Raises:
        ArgumentError: `text` is not of that form.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,9})x([1-9][0-9]{0,9})", text)
    shape = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 0 < max(shape) <= MAX_EXTENT:
        allowed = f"NxK with numbers from 1 to {MAX_EXTENT}, such as 8192x8192"
        raise ArgumentError(explain("shapes", repr(text), allowed))
    return shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One weight: its shape, its format and the activations that meet it.

    Attributes:
        n: rows of the weight.
        k: columns of the weight.
        types: the maths.
        label: the weight's type as the user wrote it, e.g. `uint4` or `uint4:floating`.
        global_scale: whether a factor for the whole weight exists beside the scales.
    """

    n: int
    k: int
    types: TypeConfig
    label: str
    global_scale: bool = False

    @classmethod
    def create(
        cls,
        *,
        n: int,
        k: int,
        element_a: str,
        weight: str,
        group_size: int,
        scale: str | None = None,
        global_scale: bool = False,
    ) -> Problem:
        """Returns the problem for user words; `weight` is a type, with `:floating` for a floating zero point.

        Raises:
            ArgumentError, UnsupportedError: the words do not make a format, see `WeightConfig.resolve`.
        """
        dtype, _, zero_point = weight.partition(":")
        config = WeightConfig(dtype=dtype, group_size=group_size, scale_dtype=scale, zero_point=zero_point or None)
        types = config.resolve(k=k, element_a=element_a)
        return cls(n=n, k=k, types=types, label=weight, global_scale=global_scale)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations and of the output."""
        dtype: torch.dtype = getattr(torch, self.types.element_a)
        return dtype


def error_bound(types: TypeConfig) -> float:
    """Returns the largest relative error (Frobenius) that an output of `types` may have against the reference."""
    return {"float16": 1e-3, "bfloat16": 4e-3, "float32": 4e-3 if types.element_a == "bfloat16" else 1e-3}[
        types.element_d
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RandomWeight:
    """Random codes, scales and zero points of a problem.

    Attributes:
        problem: what they are for.
        codes: bit patterns, uint8 (n, k): integers from a clipped normal distribution, other types uniform over the
            finite codes.
        scale: (n, G) in the scale's type, such that weights have a root mean square of about 0.02.
        zero: (n, G) float32, or None.
        global_scale: float32 (1,), or None.
    """

    problem: Problem
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    global_scale: torch.Tensor | None

    @classmethod
    def draw(cls, problem: Problem, device: torch.device, *, seed: int) -> RandomWeight:
        """Returns a weight on `device`."""
        generator = torch.Generator(device=device)
        generator.manual_seed(seed)
        n, k, types = problem.n, problem.k, problem.types
        weight = dtypes.parse(types.element_b)
        groups = layout.group_count(types, k)
        shape = (n, groups)
        zero = None
        if weight.kind in (dtypes.Kind.INT, dtypes.Kind.UINT):
            levels = 1 << weight.bits
            middle = 0 if weight.kind is dtypes.Kind.INT else levels // 2
            low = middle - levels // 2
            normal = torch.randn(n, k, device=device, generator=generator)
            normal.mul_(levels / 6).add_(middle).round_().clamp_(low, low + levels - 1)
            codes = (normal.to(torch.int16) & (levels - 1)).to(torch.uint8)
            del normal
            size = max(levels / 6, 0.5)
            if types.element_zero != "none":
                zero = torch.randint(
                    max(0, middle - 1), min(levels, middle + 1) + 1, shape, device=device, generator=generator
                ).float()
                if types.element_zero != "integer":
                    zero += 0.25
        else:
            values, finite = _tensors.finite_codes(weight)
            table = torch.from_numpy(finite.copy()).to(device, torch.uint8)
            picks = torch.randint(0, len(finite), (n, k), device=device, generator=generator, dtype=torch.int16)
            codes = table[picks.int()]
            del picks
            size = float((values.astype("float64") ** 2).mean() ** 0.5)
        # 8-bit scales have few small values: a larger weight keeps their mantissas in play.
        rms = 0.02 if dtypes.parse(types.element_scale).bits > 8 else 1.0
        uniform = torch.rand(shape, device=device, generator=generator) + 0.5
        if types.element_scale == "float8_e8m0":
            uniform = torch.exp2(torch.floor(torch.log2(uniform * (rms / size))))
        else:
            uniform *= rms / size
        return cls(
            problem=problem,
            codes=codes,
            scale=_tensors.encode(uniform, types.element_scale),
            zero=zero,
            global_scale=torch.tensor([0.75], device=device) if problem.global_scale else None,
        )

    @functools.cached_property
    def packed(self) -> layout.PackedWeight:
        """The packed weight, on the device of the codes."""
        return layout.pack(
            self.codes, self.scale, types=self.problem.types, zero=self.zero, global_scale=self.global_scale
        )

    @functools.cached_property
    def reference(self) -> torch.Tensor:
        """What `dequantize` returns, computed once."""
        return self.dequantize()

    def table(self) -> torch.Tensor:
        """Returns the value of every code, float32 (2^bits,); a code book's entries as the operand type has them."""
        weight = dtypes.parse(self.problem.types.element_b)
        table = torch.from_numpy(weight.values().copy()).float().to(self.codes.device)
        return table.to(self.problem.dtype).float() if weight.kind is dtypes.Kind.CODE_BOOK else table

    def dequantize(self) -> torch.Tensor:
        """Returns scale * (value(code) - zero) * global_scale, float32 (n, k), with torch operations only."""
        problem, table = self.problem, self.table()
        groups = self.scale.shape[1]
        scale = _tensors.decode(self.scale, problem.types.element_scale)
        if self.global_scale is not None:
            scale = scale * self.global_scale
        out = torch.empty(problem.n, problem.k, dtype=torch.float32, device=self.codes.device)
        for start in range(0, problem.n, 2048):
            rows = slice(start, start + 2048)
            block = table[self.codes[rows].int()].view(-1, groups, problem.k // groups)
            if self.zero is not None:
                block -= self.zero[rows, :, None]
            block *= scale[rows, :, None]
            out[rows] = block.view(-1, problem.k)
        return out
