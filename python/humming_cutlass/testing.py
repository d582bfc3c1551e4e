"""What a GEMM must satisfy: error bounds, and probe inputs that tell which (n, k) is wrong.

Every probe takes a `gemm` with the signature of `ops.gemm` (the `out` keyword included) and a torch device, makes its
own inputs, and raises AssertionError with the place and both values when an output is wrong. The same probes test the
CPU path, every kernel, and kernels of your own. torch is needed.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from humming_cutlass import _tensors, dtypes, layout, reference
from humming_cutlass.config import ATOM_K, ATOM_N, TypeConfig, WeightConfig

__all__ = [
    "Problem",
    "check_close",
    "check_equal",
    "element_bound",
    "make_types",
    "p_big",
    "p_col",
    "p_dirty",
    "p_grp",
    "p_guard",
    "p_id",
    "p_nan",
    "random_problem",
    "relative_bound",
    "relative_error",
    "scaled_weights",
    "weight_types",
]

Gemm = Callable[..., torch.Tensor]

_UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}
_RELATIVE_BOUND = {"float16": 5e-4, "bfloat16": 3e-3, "float32": 2e-5}
_TINY = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150}
_FEW = 64
"""Outputs below which they may all be rounded by nearly half a unit in the last place, by chance."""
_EPILOGUE_ROUNDINGS = 3
"""Roundings to float32 after the sum: scale, global scale, bias. They matter beside k only where k is tiny."""


def relative_error(y: Any, expected: npt.NDArray[np.float64]) -> float:
    """Returns ||y - expected|| / ||expected||; the numerator where the expected result is zero."""
    norm = float(np.linalg.norm(expected))
    difference = float(np.linalg.norm(reference.to_float64(y) - expected))
    return difference / norm if norm else difference


def relative_bound(element_d: str, *, scaled_weights: str | None = None) -> float:
    """Returns the greatest `relative_error` that a GEMM on random normal data may have.

    Args:
        element_d: output type.
        scaled_weights: type in which weights are multiplied by scales; None where scales multiply accumulators.
    """
    if scaled_weights is None:
        return _RELATIVE_BOUND[element_d]
    return max(_RELATIVE_BOUND[element_d], {"float16": 1e-3, "bfloat16": 4e-3}[scaled_weights])


_scaled_weights = contextvars.ContextVar("scaled_weights", default=False)


@contextlib.contextmanager
def scaled_weights() -> Iterator[None]:
    """Inside, the bounds are those of kernels that multiply weights by group scales, in the activations' type.

    Such a product is rounded once to that type. Channel scales multiply accumulators in float32 in every kernel, and
    their bounds do not change.
    """
    token = _scaled_weights.set(True)
    try:
        yield
    finally:
        _scaled_weights.reset(token)


def element_bound(
    expected: npt.NDArray[np.float64],
    magnitude: npt.NDArray[np.float64],
    k: int,
    element_d: str,
    *,
    u_weight: float = 0.0,
) -> npt.NDArray[np.float64]:
    """Returns how far each output may be off: u_out * |expected| + c * sum |a * w|, c = u_weight + k * 2^-24.

    Args:
        expected: the result in float64.
        magnitude: sum over k of |a| * |w|, plus |bias|.
        k: length of the sum.
        element_d: output type.
        u_weight: unit roundoff of a rounded scaled weight; 0 where scales multiply accumulators in float32.
    """
    c = u_weight + (k + _EPILOGUE_ROUNDINGS) * 2.0**-24
    return (
        _UNIT_ROUNDOFF[element_d] * np.abs(expected)
        + c * (1 + _UNIT_ROUNDOFF[element_d]) * magnitude
        + _TINY[element_d]
    )


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """Inputs of one GEMM with their meaning.

    Attributes:
        a: activations (m, k).
        packed: the packed weight.
        codes, scale, zero, global_scale, bias: what was packed, on the CPU.
    """

    a: torch.Tensor
    packed: layout.PackedWeight
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def weight(self, *, round_code_book: bool = False) -> npt.NDArray[np.float64]:
        """Returns the dequantized weight (n, k), in float64; a code book's entries as they are or as operands."""
        types = self.packed.types
        return reference.dequantize(
            self.codes,
            self.scale,
            dtype=types.element_b,
            group_size=types.group_size,
            zero=self.zero,
            global_scale=self.global_scale,
            operand=types.element_a if round_code_book else None,
        )

    def expected(self, *, round_code_book: bool = False) -> npt.NDArray[np.float64]:
        """Returns the result (m, n), in float64."""
        return reference.gemm(self.a, self.weight(round_code_book=round_code_book), self.bias)

    def check(self, y: torch.Tensor) -> None:
        """Raises AssertionError unless `y` is within both bounds of numerics."""
        check_close(
            y,
            self.expected(),
            self.a,
            self.weight(),
            self.bias,
            self.packed.types.element_d,
            u_weight=_UNIT_ROUNDOFF[self.packed.types.element_a] * (self._has_code_book + self._is_scaled),
            relative=relative_bound(
                self.packed.types.element_d,
                scaled_weights=self.packed.types.element_a if self._is_scaled or self._has_code_book else None,
            ),
        )

    def check_equal(self, y: torch.Tensor, ulps: int = 0) -> None:
        """Raises AssertionError unless `y` is the exact result, rounded to float32 and then to its type.

        A kernel rounds the entries of a code book to its operand type, the CPU does not: either will do, but not a mix.
        """
        element_a, element_d = self.packed.types.element_a, self.packed.types.element_d
        if self._is_scaled:
            if _UNIT_ROUNDOFF[element_d] < _UNIT_ROUNDOFF[element_a]:
                self.check(y)
                return
            ulps = max(ulps, 1)
        try:
            check_equal(y, _rounded(self.expected(), element_d), ulps)
        except AssertionError:
            if not self._has_code_book:
                raise
            check_equal(y, _rounded(self.expected(round_code_book=True), element_d), ulps)

    @property
    def _is_scaled(self) -> bool:
        return _scaled_weights.get() and self.packed.types.group_size != -1

    @property
    def _has_code_book(self) -> bool:
        return dtypes.parse(self.packed.types.element_b).kind is dtypes.Kind.CODE_BOOK


def check_close(
    y: torch.Tensor,
    expected: npt.NDArray[np.float64],
    a: torch.Tensor,
    weight: npt.NDArray[np.float64],
    bias: torch.Tensor | None,
    element_d: str,
    *,
    u_weight: float = 0.0,
    relative: float | None = None,
) -> None:
    """Raises AssertionError unless `y` is within the element-wise and the relative bound.

    Args:
        y: the result (m, n).
        expected: the result in float64.
        a: activations (m, k).
        weight: dequantized weight (n, k), in float64.
        bias: (n,), or None.
        element_d: output type.
        u_weight: see `element_bound`.
        relative: bound of the relative error; None is `relative_bound(element_d)`.
    """
    if y.shape != expected.shape:
        raise AssertionError(f"shape {tuple(y.shape)} instead of {expected.shape}")
    if _tensors.element_of(y) != element_d:
        raise AssertionError(f"dtype {y.dtype} instead of {element_d}")
    got = reference.to_float64(y)
    magnitude = np.abs(reference.to_float64(a)) @ np.abs(weight).T
    if bias is not None:
        magnitude = magnitude + np.abs(reference.to_float64(bias))
    bound = element_bound(expected, magnitude, a.shape[-1], element_d, u_weight=u_weight)
    # Negated, so that NaN is an error.
    bad = ~(np.abs(got - expected) <= bound)
    if bad.any():
        worst = np.unravel_index(
            int(np.nanargmax(np.where(bad, np.nan_to_num(np.abs(got - expected), nan=np.inf), -1))), bad.shape
        )
        raise AssertionError(
            f"{int(bad.sum())} of {bad.size} outputs are out of bounds; at {tuple(int(i) for i in worst)}: "
            f"{got[worst]!r} instead of {expected[worst]!r} +- {bound[worst]:.3g}"
        )
    error = relative_error(y, expected)
    limit = relative_bound(element_d) if relative is None else relative
    if expected.size < _FEW:
        limit = max(limit, 1.1 * _UNIT_ROUNDOFF[element_d])
    if not error <= limit:
        raise AssertionError(f"relative error {error:.3g}, bound {limit:.3g}")


def check_equal(y: torch.Tensor, expected: torch.Tensor, ulps: int = 0) -> None:
    """Raises AssertionError unless `y` equals `expected` in every bit (but the sign of 0), or within ulps."""
    if y.shape != expected.shape or y.dtype != expected.dtype:
        raise AssertionError(f"{tuple(y.shape)} {y.dtype} instead of {tuple(expected.shape)} {expected.dtype}")
    got, want = y.detach().cpu(), expected.detach().cpu()
    bad = ~(got == want)
    if ulps:
        bad &= ~((_ordered(got) - _ordered(want)).abs() <= ulps)
    if bool(bad.any()):
        index = _tensors.first_index(bad)
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} outputs differ; first at {index}: "
            f"{float(got[index])!r} instead of {float(want[index])!r}"
        )


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Returns integers that order like the floats `x`, neighbours one apart."""
    pattern = _tensors.bits(x).to(torch.int64)
    width = 8 * x.element_size()
    return torch.where(pattern < 0, -(pattern & ((1 << (width - 1)) - 1)), pattern)


def weight_types(element_a: str) -> list[str]:
    """Returns the names of every weight type that activations of `element_a` admit."""
    from humming_cutlass import support

    names = []
    for name, weight in dtypes.WEIGHT_TYPES.items():
        zero = "integer" if weight.kind is dtypes.Kind.UINT else "none"
        types = TypeConfig(
            element_a=element_a, element_b=name, element_d=element_a, element_scale="float32", element_zero=zero
        )
        if support.check_types(types) is None:
            names.append(name)
    return names


def make_types(
    dtype: str, *, k: int, element_a: str = "float16", element_d: str | None = None, **words: Any
) -> TypeConfig:
    """Returns the `TypeConfig` of `WeightConfig(dtype=dtype, **words)`."""
    return WeightConfig(dtype=dtype, **words).resolve(k=k, element_a=element_a, element_d=element_d)


def _generator(*key: object) -> torch.Generator:
    """Returns a generator that depends on the case and nothing else."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def _finite_codes(dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(np.isfinite(dtypes.parse(dtype).values())).astype(np.uint8))


def _encode(values: torch.Tensor, element: str) -> torch.Tensor:
    stored: torch.Tensor = _tensors.encode(values, element)
    return stored


def _random_scale(types: TypeConfig, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Returns scales in their own type, around 1 over the largest code, so that outputs stay in range."""
    b = dtypes.parse(types.element_b)
    base = 2.0 ** -math.ceil(math.log2(max(b.max, 1.0)))
    if b.kind is dtypes.Kind.INT:
        base = 2.0 ** (1 - b.bits)
    if types.element_scale == "float8_e8m0":
        exponent = round(math.log2(base)) + torch.randint(-3, 2, shape, generator=generator)
        return _encode(torch.ldexp(torch.ones(shape), exponent), "float8_e8m0")
    smallest = {"float8_e4m3": 2.0**-6, "float8_e5m2": 2.0**-14, "float16": 2.0**-14}.get(types.element_scale, 0.0)
    values = (torch.rand(shape, generator=generator) + 0.5) * max(base, smallest)
    return _encode(values, types.element_scale)


def _random_zero(types: TypeConfig, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor | None:
    if types.element_zero == "none":
        return None
    top = 1 << types.bits
    if types.element_zero == "integer":
        return torch.randint(0, top + 1, shape, generator=generator, dtype=torch.int16)
    return _encode(torch.rand(shape, generator=generator) * top, types.element_zero)


def _problem(types: TypeConfig, a: torch.Tensor, device: str, **tensors: Any) -> Problem:
    packed = layout.pack(types=types, **{k: v if v is None else v.to(device) for k, v in tensors.items()})
    return Problem(a=a.to(device), packed=packed, **tensors)


def _activation(types: TypeConfig) -> torch.dtype:
    return getattr(torch, types.element_a)  # type: ignore[no-any-return]


def random_problem(
    types: TypeConfig,
    m: int,
    n: int,
    k: int,
    *,
    device: str = "cpu",
    bias: bool = False,
    global_scale: bool = False,
    seed: int = 0,
) -> Problem:
    """Returns standard normal activations and a random weight over all finite codes."""
    generator = _generator(types, m, n, k, seed)
    groups = layout.group_count(types, k)
    codes = _finite_codes(types.element_b)
    return _problem(
        types,
        torch.randn(m, k, generator=generator).to(_activation(types)),
        device,
        codes=codes[torch.randint(0, len(codes), (n, k), generator=generator)],
        scale=_random_scale(types, (n, groups), generator),
        zero=_random_zero(types, (n, groups), generator),
        bias=torch.randn(n, generator=generator) if bias else None,
        global_scale=torch.rand(1, generator=generator) + 0.5 if global_scale else None,
    )


def _rounded(values: npt.NDArray[np.float64], element_d: str) -> torch.Tensor:
    """Returns exact results as a GEMM may give them: through float32."""
    single = torch.from_numpy(np.ascontiguousarray(values)).to(torch.float32)
    return single.to(getattr(torch, element_d))


def p_id(gemm: Gemm, types: TypeConfig, n: int, k: int, *, device: str = "cpu", global_scale: bool = False) -> None:
    """P-ID: with the identity as activations the result is the dequantized weight, bit for bit.

    One product per output and exact zeros beside it: finds wrong packing, permutations, zero points, scale indices and
    tails. With a floating zero point or a global scale two roundings are apart, and one ulp is allowed.
    """
    generator = _generator("P-ID", types, n, k)
    groups = layout.group_count(types, k)
    finite = _finite_codes(types.element_b)
    # Every code occurs in every position of an atom's row sooner or later, and neighbours differ.
    place = torch.arange(n)[:, None] * 7 + torch.arange(k)[None, :] * 5 + torch.arange(k)[None, :] // 64
    problem = _problem(
        types,
        torch.eye(k, dtype=_activation(types)),
        device,
        codes=finite[place % len(finite)],
        scale=_random_scale(types, (n, groups), generator),
        zero=_random_zero(types, (n, groups), generator),
        global_scale=torch.tensor([0.8125]) if global_scale else None,
    )
    exact = types.element_zero in ("none", "integer") and not global_scale
    problem.check_equal(gemm(problem.a, problem.packed), ulps=0 if exact else 1)


def _one(types: TypeConfig) -> tuple[int, float]:
    """Returns the code, and its value, that is nearest to 1 and not 0."""
    values = dtypes.parse(types.element_b).values()
    distance = np.where(np.isfinite(values) & (values != 0), np.abs(values - 1), np.inf)
    code = int(np.argmin(distance))
    return code, float(values[code])


def p_grp(gemm: Gemm, types: TypeConfig, m: int, n: int, k: int, *, device: str = "cpu") -> None:
    """P-GRP: with activations 1 and weights 1 the result is the sum of the scales times the group size.

    Scale i is (i + 1) / 64, rounded to the scale's type. Finds a wrong group index and scales read out of bounds.
    """
    groups = layout.group_count(types, k)
    code, _ = _one(types)
    row = _tensors.encode((torch.arange(groups) + 1.0) / 64, types.element_scale)
    if types.element_scale == "float8_e8m0":
        row = _tensors.encode(torch.ldexp(torch.ones(groups), torch.arange(groups) % 8 - 6), "float8_e8m0")
    zero = None if types.element_zero == "none" else torch.zeros(n, groups)
    problem = _problem(
        types,
        torch.ones(m, k, dtype=_activation(types)),
        device,
        codes=torch.full((n, k), code, dtype=torch.uint8),
        scale=row.expand(n, groups).clone()
        if row.dtype.itemsize > 1
        else row.view(torch.uint8).repeat(n, 1).view(row.dtype),
        zero=zero,
    )
    # Sums of few bits: exact in float32 where the scale has few bits, whatever the order.
    problem.check_equal(gemm(problem.a, problem.packed))


def p_col(gemm: Gemm, types: TypeConfig, m: int, n: int, k: int, *, device: str = "cpu") -> None:
    """P-COL: row n of the weight is n mod 97 (mod the number of codes) at k = 0 and 0 elsewhere.

    Finds errors of an n tile and of the interleaving of rows.
    """
    values = dtypes.parse(types.element_b).values()
    finite = np.flatnonzero(np.isfinite(values))
    zeros = [c for c in finite if values[c] == 0]
    if not zeros:
        raise ValueError(f"P-COL needs a code for 0; {types.element_b} has none")
    codes = torch.full((n, k), int(zeros[0]), dtype=torch.uint8)
    codes[:, 0] = torch.from_numpy(finite[np.arange(n) % 97 % len(finite)].astype(np.uint8))
    groups = layout.group_count(types, k)
    problem = _problem(
        types,
        torch.ones(m, k, dtype=_activation(types)),
        device,
        codes=codes,
        scale=_tensors.encode(torch.ones(n, groups), types.element_scale),
        zero=None if types.element_zero == "none" else torch.zeros(n, groups),
    )
    problem.check_equal(gemm(problem.a, problem.packed))


def p_big(
    gemm: Gemm, types: TypeConfig, m: int, n: int, k: int, *, amplitude: float = 100.0, device: str = "cpu"
) -> None:
    """P-BIG: activations +amplitude in the first half of k and -amplitude in the second; the result is exactly 0.

    Half sums leave the range of float16. Finds partial sums in less than float32.
    """
    code, _ = _one(types)
    a = torch.full((m, k), amplitude, dtype=_activation(types))
    a[:, k // 2 :] = -amplitude
    groups = layout.group_count(types, k)
    problem = _problem(
        types,
        a,
        device,
        codes=torch.full((n, k), code, dtype=torch.uint8),
        scale=_tensors.encode(torch.ones(n, groups), types.element_scale),
        zero=None if types.element_zero == "none" else torch.zeros(n, groups),
    )
    check_equal(gemm(problem.a, problem.packed), torch.zeros(m, n, dtype=getattr(torch, types.element_d)))


def p_nan(gemm: Gemm, types: TypeConfig, m: int, n: int, k: int, *, device: str = "cpu") -> None:
    """P-NAN: with every byte outside the logical tensors poisoned, no output changes by a bit.

    Poisoned are: the memory around the activations and between their rows, the output before the call, and the rows of
    the packed weight beyond n (codes all ones, which is NaN in float8_e4m3; scales and zero points NaN). Columns beyond
    k are part of the format: their codes are finite and their scales 1, activations there count as 0.
    """
    problem = random_problem(types, m, n, k, device=device)
    clean = gemm(problem.a, problem.packed)
    problem.check(clean)

    padded = torch.full((m + 2, k + 24), math.nan, dtype=problem.a.dtype, device=device)
    a = padded[1 : m + 1, 8 : k + 8]
    a.copy_(problem.a)
    out = torch.full((m, n), math.nan, dtype=clean.dtype, device=device)
    y = gemm(a, _poison_rows(problem), out=out)
    if y.data_ptr() != out.data_ptr():
        raise AssertionError("the result is not in `out`")
    check_equal(out, clean)


def _poison_rows(problem: Problem) -> layout.PackedWeight:
    """Returns the packed weight with every row beyond n poisoned."""
    packed = problem.packed
    types, n, k = packed.types, packed.n, packed.k
    rows, columns = math.ceil(n / ATOM_N) * ATOM_N, math.ceil(k / ATOM_K) * ATOM_K
    codes = torch.zeros(rows, columns, dtype=torch.uint8)
    codes[:n, :k] = problem.codes
    codes[n:] = (1 << types.bits) - 1
    # The padding of the packed scales, in the order in which the rows lie there.
    beyond = torch.arange(rows).reshape(-1, ATOM_N)[:, list(layout.SCALE_ROW_ORDER)] >= n

    def poison(x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return None
        pattern = _tensors.bits(x).clone()
        nan = {1: 0xFF, 2: 0x7FFF, 4: 0x7FFFFFFF}[x.element_size()]
        pattern[beyond[:, None, :].expand(pattern.shape).to(pattern.device)] = nan
        poisoned: torch.Tensor = pattern.view(x.dtype)
        return poisoned

    return dataclasses.replace(
        packed,
        data=layout.pack_codes(codes.to(packed.data.device), types),
        scale=poison(packed.scale),
        zero=poison(packed.zero),
    )


def p_dirty(gemm: Gemm, types: TypeConfig, m: int, n: int, k: int, *, device: str = "cpu") -> None:
    """P-DIRTY: after a call on NaN, whose memory the allocator then gives back, the result is as before."""
    problem = random_problem(types, m, n, k, device=device)
    clean = gemm(problem.a, problem.packed).clone()
    dirty = gemm(torch.full_like(problem.a, math.nan), problem.packed)
    if not bool(dirty.isnan().all()):
        raise AssertionError("NaN activations did not give NaN")
    del dirty
    again = gemm(problem.a, problem.packed)
    check_equal(again, clean)
    problem.check(again)


def p_guard(gemm: Gemm, types: TypeConfig, m: int, n: int, k: int, *, device: str = "cpu", margin: int = 40) -> None:
    """P-GUARD: an output inside a bigger buffer is written, and the sentinels on every side of it are not."""
    problem = random_problem(types, m, n, k, device=device)
    sentinel = 1234.0
    buffer = torch.full(
        (m + 2, n + 2 * margin), sentinel, dtype=getattr(torch, types.element_d), device=problem.a.device
    )
    gemm(problem.a, problem.packed, out=buffer[1 : m + 1, margin : margin + n])
    problem.check(buffer[1 : m + 1, margin : margin + n])
    outside = torch.ones(buffer.shape, dtype=torch.bool)
    outside[1 : m + 1, margin : margin + n] = False
    touched = outside & (buffer.cpu() != sentinel)
    if bool(touched.any()):
        row, column = _tensors.first_index(touched)
        raise AssertionError(
            f"{int(touched.sum())} sentinels overwritten; first at ({row - 1}, {column - margin}) of the output"
        )
