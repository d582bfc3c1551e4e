"""Data types: what a code of each type is worth.

`DataType.values()` is the exhaustive table that every conversion in this package is tested against. The
families follow the OCP 8-bit floating point and microscaling specifications where those define a type:

- `intB`, 1 <= B <= 8: two's complement.
- `uintB`, 1 <= B <= 8: 0 .. 2^B - 1, used with a zero point.
- `floatB_eXmY`, B = 1 + X + Y <= 8, X >= 1: bias 2^(X-1) - 1, subnormals honoured, every code finite,
  except `float8_e4m3` (OCP "fn": 0x7F and 0xFF are NaN) and `float8_e5m2` (IEEE-like: infinities and NaN).
- `nf4`: the 16-entry code book of QLoRA (Dettmers et al. 2023, appendix E).
- `float8_e8m0`: a power of two, 0xFF is NaN; only for scales.
- `float16`, `bfloat16`, `float32`: activations, outputs, scales, floating zero points.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from humming_cutlass.errors import ArgumentTypeError, UnsupportedError, explain

__all__ = [
    "ACTIVATION_TYPES",
    "ALIASES",
    "NF4_CODE_BOOK",
    "OUTPUT_TYPES",
    "SCALE_TYPES",
    "WEIGHT_TYPES",
    "DataType",
    "Kind",
    "parse",
]


class Kind(enum.Enum):
    """How the bits of a code are read."""

    INT = "int"
    UINT = "uint"
    FLOAT = "float"
    CODE_BOOK = "code_book"


NF4_CODE_BOOK = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclasses.dataclass(frozen=True)
class DataType:
    """One element type.

    Attributes:
        name: the canonical name, e.g. `int4` or `float6_e3m2`.
        kind: how a code is read.
        bits: width of a code.
        exponent_bits: X of `eXmY`; 0 for integers and code books.
        mantissa_bits: Y of `eXmY`; 0 for integers and code books.
        specials: which codes are not finite: `none`, `nan` (all-ones magnitude only), or `ieee`.
        signed: whether a float has a sign bit (only `float8_e8m0` has none).
        code_book: the value of each code of a code book, else empty.
        tag: the C++ tag where it does not follow from the kind and widths.
    """

    name: str
    kind: Kind
    bits: int
    exponent_bits: int = 0
    mantissa_bits: int = 0
    specials: str = "none"
    signed: bool = True
    code_book: tuple[float, ...] = ()
    tag: str = ""

    @property
    def bias(self) -> int:
        """Exponent bias of a float type."""
        return 127 if self.name == "float8_e8m0" else (1 << (self.exponent_bits - 1)) - 1

    @property
    def cpp(self) -> str:
        """The C++ type in namespace `humming_cutlass` (numeric/types.hpp)."""
        named = {
            "float8_e4m3": "Float8E4M3",
            "float8_e5m2": "Float8E5M2",
            "float8_e8m0": "Float8E8M0",
            "float16": "Half",
            "bfloat16": "BFloat16",
            "float32": "float",
        }
        if self.tag or self.name in named:
            return self.tag or named[self.name]
        if self.kind is Kind.FLOAT:
            return f"Float<{self.exponent_bits}, {self.mantissa_bits}>"
        return f"{'Int' if self.kind is Kind.INT else 'UInt'}<{self.bits}>"

    @functools.cached_property
    def _values(self) -> npt.NDArray[np.float64]:
        codes = np.arange(1 << self.bits, dtype=np.int64)
        if self.kind is Kind.UINT:
            return codes.astype(np.float64)
        if self.kind is Kind.INT:
            half = 1 << (self.bits - 1)
            return ((codes ^ half) - half).astype(np.float64)
        if self.kind is Kind.CODE_BOOK:
            return np.array(self.code_book, dtype=np.float64)
        if self.name == "float8_e8m0":
            scales = np.ldexp(1.0, codes - 127)
            scales[255] = np.nan
            return scales
        mantissa = codes & ((1 << self.mantissa_bits) - 1)
        exponent = (codes >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        sign = np.where(codes >> (self.bits - 1), -1.0, 1.0)
        significand = np.where(exponent == 0, 0, 1 << self.mantissa_bits) + mantissa
        magnitude = np.ldexp(
            significand.astype(np.float64),
            np.maximum(exponent, 1) - self.bias - self.mantissa_bits,
        )
        if self.specials == "nan":
            magnitude[(codes & ((1 << (self.bits - 1)) - 1)) == (1 << (self.bits - 1)) - 1] = np.nan
        elif self.specials == "ieee":
            top = exponent == (1 << self.exponent_bits) - 1
            magnitude = np.where(top, np.where(mantissa == 0, np.inf, np.nan), magnitude)
        return np.asarray(sign * magnitude, dtype=np.float64)

    def values(self) -> npt.NDArray[np.float64]:
        """Returns the value of every code, shape (2**bits,), float64, read-only; only for types of up to 16 bits."""
        if self.bits > 16:
            raise UnsupportedError(explain("dtype", self.name, "a type of at most 16 bits"))
        self._values.flags.writeable = False  # it is shared by all callers
        return self._values

    @property
    def max(self) -> float:
        """Largest finite value."""
        if self.name == "float32":
            return float(np.finfo(np.float32).max)
        return float(np.nanmax(np.where(np.isfinite(self._values), self._values, np.nan)))

    def __str__(self) -> str:
        return self.name


def _float(exponent_bits: int, mantissa_bits: int) -> DataType:
    bits = 1 + exponent_bits + mantissa_bits
    specials = {(4, 3): "nan", (5, 2): "ieee"}.get((exponent_bits, mantissa_bits), "none")
    name = f"float{bits}_e{exponent_bits}m{mantissa_bits}"
    return DataType(name, Kind.FLOAT, bits, exponent_bits, mantissa_bits, specials)


WEIGHT_TYPES: dict[str, DataType] = {
    t.name: t
    for t in (
        *(DataType(f"int{b}", Kind.INT, b) for b in range(1, 9)),
        *(DataType(f"uint{b}", Kind.UINT, b) for b in range(1, 9)),
        *(_float(x, b - 1 - x) for b in range(2, 9) for x in range(1, b)),
        DataType("nf4", Kind.CODE_BOOK, 4, code_book=NF4_CODE_BOOK, tag="NF4"),
    )
}
"""Every type a weight can have, by name."""

_OTHER_TYPES = {
    "float8_e8m0": DataType("float8_e8m0", Kind.FLOAT, 8, 8, 0, "nan", signed=False),
    "float16": DataType("float16", Kind.FLOAT, 16, 5, 10, "ieee"),
    "bfloat16": DataType("bfloat16", Kind.FLOAT, 16, 8, 7, "ieee"),
    "float32": DataType("float32", Kind.FLOAT, 32, 8, 23, "ieee"),
}

ACTIVATION_TYPES = ("float16", "bfloat16")
OUTPUT_TYPES = ("float16", "bfloat16", "float32")
SCALE_TYPES = ("float16", "bfloat16", "float32", "float8_e4m3", "float8_e5m2", "float8_e8m0")
"""The types of the activations, of the output and of floating zero points, and of the scales."""

ALIASES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "float8_e4m3fn": "float8_e4m3",
    "float8_e8m0fnu": "float8_e8m0",
    "fp8": "float8_e4m3",
    "fp4": "float4_e2m1",
    "float4_nf4": "nf4",
}
"""Other spellings that `parse` accepts."""


_WEIGHTS = "int1-8, uint1-8, floatB_eXmY with B = 1 + X + Y <= 8 and X >= 1, nf4"


def parse(name: str | DataType, parameter: str = "dtype", among: Sequence[str] | None = None) -> DataType:
    """Returns the `DataType` called `name`.

    Args:
        name: a canonical name, an alias, a bare `eXmY`, or a `torch.float16`-like string.
        parameter: the argument to name in an error.
        among: the types that an error offers; None is all.

    Raises:
        ArgumentTypeError: `name` is not a string.
        UnsupportedError: there is no such type; the message names the nearest one.
    """
    if isinstance(name, DataType):
        return name
    if not isinstance(name, str):
        raise ArgumentTypeError(explain(parameter, f"{name!r} ({type(name).__name__})", "the name of a type"))
    key = name.lower().removeprefix("torch.")
    if bare := re.fullmatch(r"e(\d)m(\d)", key):
        key = f"float{1 + int(bare[1]) + int(bare[2])}_{key}"
    key = ALIASES.get(key, key)
    known = WEIGHT_TYPES | _OTHER_TYPES
    if key not in known:
        offered = list(known) if among is None else list(among)
        close = difflib.get_close_matches(key, offered, n=1)
        if among is None or offered == list(WEIGHT_TYPES):
            allowed = _WEIGHTS if among else f"{_WEIGHTS}, float8_e8m0, float16, bfloat16, float32"
        else:
            allowed = ", ".join(offered)
        raise UnsupportedError(explain(parameter, repr(name), allowed, close[0] if close else None))
    return known[key]
