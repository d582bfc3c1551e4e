"""The one description of a kernel: `GemmConfig` = `TypeConfig` + `ScheduleConfig` + target GPU.

`TypeConfig` fixes the maths and the packed bytes, `ScheduleConfig` changes speed only. Everything else is
derived from them: the kernel's name (and back), the emitted C++, the cache key. Each field is the snake_case
of the C++ alias that the emitter writes for it. n, k, m, strides, bias and global scale are run-time
arguments of a kernel and therefore not here.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from typing import Any

from humming_cutlass import dtypes
from humming_cutlass.errors import ArgumentError, ArgumentTypeError, UnsupportedError, explain

__all__ = [
    "ATOM_K",
    "ATOM_N",
    "INT32_MAX",
    "MAX_EXTENT",
    "GemmConfig",
    "ScheduleConfig",
    "TypeConfig",
    "WeightConfig",
    "check_group_size",
    "extent",
    "integer",
]

ATOM_N = 16
"""Rows of a packed atom; n is padded to it."""
ATOM_K = 64
"""Columns of a packed atom; k is padded to it."""
GROUP_QUANTUM = 16
"""A group is a multiple of this many columns: the k extent of one 16-bit MMA."""

INT32_MAX = (1 << 31) - 1
"""The largest int32: kernels take m, and whatever else they count, as one."""
MAX_EXTENT = (1 << 30) - (1 << 16)
"""The largest n and k: kMaxExtent of runtime/gemm_plan.cpp, since kernels round them up in 32 bits."""

_DIVISOR_TRIALS = 1 << 16
"""Divisors tried for the hint of an error: all of them for k < 2^36."""


def integer(value: Any, parameter: str, allowed: str = "an integer >= 1") -> int:
    """Returns an int, or whatever else is an index such as `np.int64`, as int.

    Raises:
        ArgumentTypeError: `value` is no integer, or a bool.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ArgumentTypeError(explain(parameter, f"{type(value).__name__} {value!r}", allowed))


def extent(value: Any, parameter: str) -> int:
    """Returns a weight's n or k as int.

    Raises:
        ArgumentTypeError: `value` is no integer.
        ArgumentError: it is below 1 or above `MAX_EXTENT`.
    """
    number = integer(value, parameter, f"an integer from 1 to {MAX_EXTENT}")
    if not 1 <= number <= MAX_EXTENT:
        nearest = 1 if number < 1 else MAX_EXTENT
        raise ArgumentError(explain(parameter, value, f"an integer from 1 to {MAX_EXTENT}", nearest))
    return number


def _nearest_group_size(group_size: int, k: int) -> int:
    """Returns the legal group size nearest to one that is not; k itself counts, and is spelled -1."""
    if group_size < 0 or k % GROUP_QUANTUM:
        return -1
    quanta = k // GROUP_QUANTUM
    small = [d for d in range(1, min(math.isqrt(quanta), _DIVISOR_TRIALS) + 1) if quanta % d == 0]
    candidates = sorted(GROUP_QUANTUM * d for d in {*small, *(quanta // d for d in small)})
    nearest = min(candidates, key=lambda g: abs(g - group_size))
    return -1 if nearest == k else nearest


def check_group_size(group_size: int, k: int) -> int:
    """Returns the normalized group size for k columns: -1 when one group covers them all.

    Raises:
        ArgumentTypeError: the group size or k is no integer.
        ArgumentError: the group size is not -1, k, or a multiple of 16 that divides k.
    """
    k = integer(k, "k")
    group_size = integer(group_size, "group_size", f"-1, k = {k}, or a multiple of {GROUP_QUANTUM} that divides k")
    if group_size in (-1, k):
        return -1
    if group_size > 0 and group_size % GROUP_QUANTUM == 0 and k % group_size == 0:
        return group_size
    raise ArgumentError(
        explain(
            "group_size",
            group_size,
            f"-1, k = {k}, or a multiple of {GROUP_QUANTUM} that divides k",
            _nearest_group_size(group_size, k),
        )
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightConfig:
    """How a weight is quantized, in the user's words.

    Attributes:
        dtype: the weight's type, e.g. `int6`, `uint4`, `float6_e3m2`.
        group_size: columns that share a scale; -1 is one group a row (channel scales).
        strategy: `group`, `channel` or `tensor`; None follows from `group_size`.
        scale_dtype: type of the scales; None is the activation's type.
        zero_point: `none`, `integer` (0 .. 2^bits) or `floating`; None is `integer` for `uintB`, else `none`.
        zero_dtype: type of floating zero points; None is the activation's type.
        global_scale: whether a float32 factor for the whole tensor exists beside the scales.

    Raises:
        ArgumentTypeError: a field has the wrong Python type.
    """

    dtype: str
    group_size: int = -1
    strategy: str | None = None
    scale_dtype: str | None = None
    zero_point: str | None = None
    zero_dtype: str | None = None
    global_scale: bool = False

    def __post_init__(self) -> None:
        """Checks Python types; `resolve` checks what the words mean."""
        dtype: object = self.dtype
        if not isinstance(dtype, str):
            got = f"{dtype!r} ({type(dtype).__name__})"
            raise ArgumentTypeError(explain("weight_config['dtype']", got, "the name of a type"))
        for field in ("strategy", "scale_dtype", "zero_point", "zero_dtype"):
            value = getattr(self, field)
            if value is not None and not isinstance(value, str):
                got = f"{value!r} ({type(value).__name__})"
                raise ArgumentTypeError(explain(field, got, "a string or None"))
        global_scale: object = self.global_scale
        if not isinstance(global_scale, bool):
            got = f"{global_scale!r} ({type(global_scale).__name__})"
            raise ArgumentTypeError(explain("global_scale", got, "True or False; the factor comes with the weight"))

    @classmethod
    def from_any(cls, config: WeightConfig | dict[str, Any] | str) -> WeightConfig:
        """Returns a `WeightConfig` from one, from a dict of its fields, or from a type's name.

        Raises:
            ArgumentTypeError: `config` is something else, or a key or value of it has the wrong Python type.
            ArgumentError: a key is unknown, or 'dtype' is missing.
        """
        if isinstance(config, WeightConfig):
            return config
        if isinstance(config, str):
            return cls(dtype=config)
        if not isinstance(config, dict):
            raise ArgumentTypeError(
                explain("weight_config", type(config).__name__, "a WeightConfig, a dict or a type's name")
            )
        fields = {f.name for f in dataclasses.fields(cls)}
        for key in config:
            if not isinstance(key, str):
                raise ArgumentTypeError(
                    explain("weight_config", f"key {key!r} ({type(key).__name__})", ", ".join(sorted(fields)))
                )
        if unknown := sorted(set(config) - fields):
            raise ArgumentError(explain("weight_config", f"unknown key {unknown[0]!r}", ", ".join(sorted(fields))))
        if "dtype" not in config:
            raise ArgumentError(explain("weight_config", "no 'dtype'", "a dict with at least 'dtype'"))
        return cls(**config)

    def resolve(self, *, k: int, element_a: str, element_d: str | None = None) -> TypeConfig:
        """Returns the `TypeConfig` for k columns and an activation type, with every default filled in.

        Raises:
            ArgumentError: the group size, strategy or zero point is impossible.
            UnsupportedError: a type's name is unknown.
        """
        element_a = dtypes.parse(element_a, "element_a", dtypes.ACTIVATION_TYPES).name
        weight = dtypes.parse(self.dtype, "weight_config['dtype']", list(dtypes.WEIGHT_TYPES))
        if self.strategy not in (None, "group", "channel", "tensor"):
            raise ArgumentError(explain("strategy", repr(self.strategy), "'group', 'channel', 'tensor' or None"))
        group_size = check_group_size(self.group_size, k)
        if self.strategy in ("channel", "tensor") and group_size != -1:
            raise ArgumentError(explain("group_size", group_size, f"-1 with strategy {self.strategy!r}", -1))
        zero_point = self.zero_point
        if zero_point is None:
            zero_point = "integer" if weight.kind is dtypes.Kind.UINT else "none"
        if zero_point not in ("none", "integer", "floating"):
            raise ArgumentError(explain("zero_point", repr(zero_point), "'none', 'integer', 'floating' or None"))
        if self.zero_dtype is not None and weight.kind is not dtypes.Kind.UINT:
            allowed = f"None: weights of type {weight.name} have no zero points"
            raise ArgumentError(explain("zero_dtype", repr(self.zero_dtype), allowed))
        if self.zero_dtype is not None and zero_point != "floating":
            allowed = f"None with zero_point {zero_point!r}"
            raise ArgumentError(explain("zero_dtype", repr(self.zero_dtype), allowed, "zero_point 'floating'"))
        element_zero = {
            "none": "none",
            "integer": "integer",
            "floating": dtypes.parse(self.zero_dtype or element_a, "zero_dtype", dtypes.OUTPUT_TYPES).name,
        }[zero_point]
        return TypeConfig(
            element_a=element_a,
            element_b=weight.name,
            element_d=dtypes.parse(element_d or element_a, "element_d", dtypes.OUTPUT_TYPES).name,
            element_scale=dtypes.parse(self.scale_dtype or element_a, "scale_dtype", dtypes.SCALE_TYPES).name,
            element_zero=element_zero,
            group_size=group_size,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TypeConfig:
    """The maths of a kernel: D = A * (scale * (B - zero))^T.

    Attributes:
        element_a: activation type.
        element_b: weight type.
        element_d: output type.
        element_scale: type of the scales.
        element_zero: `none`, `integer` (0 .. 2^bits, exact), or the type of floating zero points.
        group_size: columns a scale covers; -1 is one scale a row, applied in the epilogue.
    """

    element_a: str
    element_b: str
    element_d: str
    element_scale: str
    element_zero: str = "none"
    group_size: int = -1

    def __post_init__(self) -> None:
        """Refuses what is of another type; `support.check_types` says what is legal."""
        for field in ("element_a", "element_b", "element_d", "element_scale", "element_zero"):
            value = getattr(self, field)
            if not isinstance(value, str):
                raise ArgumentTypeError(explain(field, repr(value), "the name of a type"))
        if type(self.group_size) is not int:
            raise ArgumentTypeError(explain("group_size", repr(self.group_size), "an int"))

    @property
    def bits(self) -> int:
        """Width of a weight code."""
        return dtypes.parse(self.element_b).bits

    @property
    def operand_bits(self) -> int:
        """Width of an MMA operand; with `bits` it decides the packed bytes."""
        return dtypes.parse(self.element_a).bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How a kernel goes about it. Nothing here changes the packed bytes.

    Attributes:
        mainloop: the collective, named after its header under collective/ without the prefix `mma_`.
        tile_shape: (m, n, k) that a CTA computes, in the user's orientation.
        warp_shape: (m, n) that a warp (sm80) or a warpgroup (sm90) computes.
        stage_count: depth of the shared-memory pipeline.
    """

    mainloop: str
    tile_shape: tuple[int, int, int]
    warp_shape: tuple[int, int]
    stage_count: int

    def __post_init__(self) -> None:
        """Refuses what is of another type; whether the numbers make a kernel is for `support.check`."""
        if not isinstance(self.mainloop, str):
            raise ArgumentTypeError(explain("mainloop", repr(self.mainloop), "a str"))
        for field, length in (("tile_shape", 3), ("warp_shape", 2)):
            value = getattr(self, field)
            if not isinstance(value, tuple) or len(value) != length or not all(type(x) is int for x in value):
                raise ArgumentTypeError(explain(field, repr(value), f"a tuple of {length} ints"))
        if type(self.stage_count) is not int:
            raise ArgumentTypeError(explain("stage_count", repr(self.stage_count), "an int"))


_SHORT = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float8_e4m3": "e4m3",
    "float8_e5m2": "e5m2",
    "float8_e8m0": "e8m0",
}
_LONG = {short: long for long, short in _SHORT.items()}


def _shorten(element: str) -> str:
    return _SHORT.get(element, element.replace("_", "-"))


def _lengthen(short: str) -> str:
    return _LONG.get(short, short.replace("-", "_"))


_NAME = re.compile(
    r"(?P<arch>sm_\d+[af]?)__(?P<a>[^_]+)_(?P<b>[^_]+)_(?P<d>[^_]+)_s(?P<scale>[^_]+)(?:_z(?P<zero>[^_]+))?"
    r"(?:_g(?P<group>\d+))?__(?P<mainloop>\w+?)__(?P<tile>\d+x\d+x\d+)_w(?P<warp>\d+x\d+)_p(?P<stages>\d+)"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmConfig:
    """One kernel: its types, its schedule and the GPU it is compiled for.

    Attributes:
        types: the maths.
        schedule: the tiling.
        arch: the target as nvcc spells it, e.g. `sm_80` or `sm_90a`.
    """

    types: TypeConfig
    schedule: ScheduleConfig
    arch: str

    def __post_init__(self) -> None:
        """Refuses what is of another type; `support.check` says what is legal."""
        for field, kind in (("types", TypeConfig), ("schedule", ScheduleConfig), ("arch", str)):
            value = getattr(self, field)
            if not isinstance(value, kind):
                raise ArgumentTypeError(explain(field, repr(value), f"a {kind.__name__}"))

    @property
    def name(self) -> str:
        """A unique name; `GemmConfig.from_name` reads it back."""
        t, s = self.types, self.schedule
        zero = "" if t.element_zero == "none" else f"_z{_shorten(t.element_zero)}"
        group = "" if t.group_size == -1 else f"_g{t.group_size}"
        return (
            f"{self.arch}__{_shorten(t.element_a)}_{_shorten(t.element_b)}_{_shorten(t.element_d)}"
            f"_s{_shorten(t.element_scale)}{zero}{group}__{s.mainloop}__{'x'.join(map(str, s.tile_shape))}"
            f"_w{'x'.join(map(str, s.warp_shape))}_p{s.stage_count}"
        )

    @classmethod
    def from_name(cls, name: str) -> GemmConfig:
        """Returns the config called `name`.

        Raises:
            ArgumentTypeError: `name` is no string.
            UnsupportedError: `name` was not made by `GemmConfig.name`.
        """
        if not isinstance(name, str):
            raise ArgumentTypeError(explain("name", type(name).__name__, "a str"))
        found = _NAME.fullmatch(name)
        if found is None:
            raise UnsupportedError(explain("name", repr(name), "a name made by GemmConfig.name"))
        if any(len(digits) > 1000 for digits in re.findall(r"\d+", name)):  # Python refuses to read much longer ones
            raise UnsupportedError(explain("name", repr(name)[:100], "a name made by GemmConfig.name"))
        m, n, k = (int(x) for x in found["tile"].split("x"))
        warp_m, warp_n = (int(x) for x in found["warp"].split("x"))
        config = cls(
            types=TypeConfig(
                element_a=_lengthen(found["a"]),
                element_b=_lengthen(found["b"]),
                element_d=_lengthen(found["d"]),
                element_scale=_lengthen(found["scale"]),
                element_zero=_lengthen(found["zero"] or "none"),
                group_size=int(found["group"] or -1),
            ),
            schedule=ScheduleConfig(
                mainloop=found["mainloop"],
                tile_shape=(m, n, k),
                warp_shape=(warp_m, warp_n),
                stage_count=int(found["stages"]),
            ),
            arch=found["arch"],
        )
        if config.name != name:
            raise UnsupportedError(explain("name", repr(name), "a name made by GemmConfig.name", config.name))
        return config
