"""Quantization by plain rounding: no calibration, every weight type, every scale type.

The scale is computed in float32, rounded to its type, and the weight is then rounded against the *rounded* scale, so
that the codes are the nearest ones for the scale that is stored. The weight is read in blocks of rows: no float32
copy of it exists at any time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from humming_cutlass import _tensors, dtypes, support
from humming_cutlass._tensors import Array
from humming_cutlass.config import TypeConfig, WeightConfig, check_group_size
from humming_cutlass.errors import ArgumentError, ArgumentTypeError, UnsupportedError, explain

__all__ = ["QuantizedWeight", "quantize"]

_BLOCK_ELEMENTS = 1 << 22
"""Weights that are in float32 at one time."""


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A quantized weight, not packed yet: value = scale * (codes - zero) * global_scale.

    Attributes:
        codes: bit patterns, uint8 (n, k).
        scale: (n, G) in the scale's own dtype (for numpy, ml_dtypes has those that numpy lacks), or (1,) with strategy
            `tensor`.
        zero: like `scale`: integers 0 .. 2^bits as int16, floating ones in their type; None without zero points.
        global_scale: float32 (1,), or None.
        types: the configuration that it was quantized for.
    """

    codes: Array
    scale: Array
    zero: Array | None
    global_scale: Array | None
    types: TypeConfig


def _blocks(n: int, k: int) -> Iterator[slice]:
    rows = max(1, _BLOCK_ELEMENTS // k)
    for start in range(0, n, rows):
        yield slice(start, min(start + rows, n))


def _float32(x: Array) -> Array:
    return x.float() if _tensors.is_torch(x) else x.astype(np.float32)


def _check_weight(weight: Array) -> None:
    _tensors.check_array(weight, "weight")
    _tensors.check_elements(weight, "weight")
    if weight.ndim != 2 or 0 in weight.shape:
        raise ArgumentError(explain("weight", f"shape {tuple(weight.shape)}", "(n, k) with n, k >= 1"))
    element = _tensors.element_of(weight)
    if element not in ("float16", "bfloat16", "float32", "float64"):
        raise ArgumentTypeError(
            explain("weight", f"dtype {element}", "float16, bfloat16, float32 or float64", "float32")
        )


def _ranges(weight: Array, group_size: int) -> tuple[Array, Array]:
    """Returns the least and the greatest weight of each group, float32 (n, G); refuses what is not finite."""
    xp = _tensors.library(weight)
    n, k = weight.shape
    low, high = [], []
    for rows in _blocks(n, k):
        block = _float32(weight[rows])
        groups = block.reshape(block.shape[0], -1, group_size)
        low.append(xp.amin(groups, axis=2))
        high.append(xp.amax(groups, axis=2))
        # NaN wins in amin and amax of both libraries.
        if not bool(xp.isfinite(low[-1]).all() & xp.isfinite(high[-1]).all()):
            row, column = _tensors.first_index(~xp.isfinite(block))
            raise ArgumentError(
                explain(
                    "weight",
                    f"{float(weight[rows][row, column])} at (n, k) = ({rows.start + row}, {column})",
                    "finite values in the range of float32",
                )
            )
    return xp.concatenate(low), xp.concatenate(high)


def _round_scale(ideal: Array, element: str) -> tuple[Array, Array]:
    """Returns `ideal` as stored scales and as float32: nearest, never zero; for float8_e8m0 never below `ideal`."""
    xp = _tensors.library(ideal)
    scale_type = dtypes.parse(element)
    if element == "float8_e8m0":
        fraction, exponent = xp.frexp(ideal)
        exponent = xp.clip(exponent - xp.where(fraction == 0.5, 1, 0), -127, 127)
        pattern = exponent + 127
        stored = pattern.to(xp.uint8) if _tensors.is_torch(ideal) else pattern.astype(np.uint8)
        stored = stored.view(_tensors.stored_dtype(element, ideal))
        return stored, _tensors.decode(stored, element)
    largest = scale_type.max
    if bool((ideal > largest * (1 + 2.0 ** -(scale_type.mantissa_bits + 2))).any()):
        index = _tensors.first_index(ideal == ideal.max())
        raise ArgumentError(
            explain(
                "weight",
                f"values that need a scale of {float(ideal[index]):.6g} at group {index}",
                f"scales up to {largest:.6g} ({element})",
                "scale_dtype 'float32', or global_scale True",
            )
        )
    smallest = float(np.ldexp(1.0, 1 - scale_type.bias - scale_type.mantissa_bits))
    stored = _tensors.encode(xp.clip(ideal, smallest, largest), element)
    return stored, _tensors.decode(stored, element)


def _integer_codes(levels: Array, low: int, high: int, bits: int) -> Array:
    """Returns rounded, clipped levels as bit patterns of `bits` bits."""
    xp = _tensors.library(levels)
    clipped = xp.clip(xp.round(levels), low, high)
    whole = clipped.to(xp.int16) if _tensors.is_torch(levels) else clipped.astype(np.int16)
    pattern = whole & ((1 << bits) - 1)
    return pattern.to(xp.uint8) if _tensors.is_torch(levels) else pattern.astype(np.uint8)


def quantize(
    weight: Array,
    config: TypeConfig | WeightConfig | dict[str, Any] | str,
    *,
    element_a: str | None = None,
    strategy: str | None = None,
    global_scale: bool | None = None,
) -> QuantizedWeight:
    """Quantizes a weight by rounding to the nearest code.

    Signed types, floats and code books take the scale from the largest magnitude of a group; `uintB` takes scale and
    zero point from its least and greatest value, zero included, so that zero is exact with integer zero points.
    float8_e8m0 scales are the least power of two with which nothing clips. Groups of zeros give zeros; magnitudes
    below what the scale's type can resolve are quantized with its smallest scale.

    Args:
        weight: (n, k) float16, bfloat16, float32 or float64; a torch tensor on any device, or a numpy array.
        config: what to quantize to.
        element_a: activation type that a `WeightConfig` is resolved for; None is the weight's type, or float16 where
            that is no activation type.
        strategy: `tensor` for one scale; None follows the `WeightConfig`.
        global_scale: whether to factor out a float32 scale of the tensor, chosen such that the scales fill the range
            of their type (for types wider than 8 bits, such that the largest is 1); None follows the `WeightConfig`.

    Returns:
        A `QuantizedWeight` in the library and on the device of `weight`.

    Raises:
        ArgumentTypeError: `weight` is no array or not floating point.
        ArgumentError: a shape or group size is impossible, a weight is not finite (the message names the first), or a
            scale exceeds the scale's type.
        UnsupportedError: a type's name is unknown, or no kernel takes the types.
    """
    _check_weight(weight)
    if _tensors.is_torch(weight):
        weight = weight.detach()
    xp = _tensors.library(weight)
    n, k = (int(x) for x in weight.shape)
    if isinstance(config, TypeConfig):
        types = config
        if strategy == "channel" and check_group_size(types.group_size, k) != -1:
            raise ArgumentError(explain("group_size", types.group_size, "-1 with strategy 'channel'", -1))
    else:
        words = WeightConfig.from_any(config)
        own = _tensors.element_of(weight)
        types = words.resolve(k=k, element_a=element_a or (own if own in ("float16", "bfloat16") else "float16"))
        strategy = words.strategy if strategy is None else strategy
        global_scale = words.global_scale if global_scale is None else global_scale
    group_size = check_group_size(types.group_size, k)
    if reason := support.check_types(dataclasses.replace(types, group_size=group_size)):
        raise UnsupportedError(reason)
    if global_scale is not None and not isinstance(global_scale, bool):
        raise ArgumentTypeError(explain("global_scale", type(global_scale).__name__, "True, False or None"))
    if strategy not in (None, "group", "channel", "tensor"):
        raise ArgumentError(explain("strategy", repr(strategy), "'group', 'channel', 'tensor' or None"))
    group_size = k if group_size == -1 else group_size
    if strategy == "tensor" and group_size != k:
        raise ArgumentError(explain("group_size", group_size, "-1 with strategy 'tensor'", -1))
    b = dtypes.parse(types.element_b)
    scale_type = dtypes.parse(types.element_scale)

    low, high = _ranges(weight, group_size)
    if strategy == "tensor":
        low, high = low.min().reshape(1, 1), high.max().reshape(1, 1)
    largest = xp.maximum(-low, high)
    ideal = _ideal_scale(types, low, high, largest)
    if not bool(xp.isfinite(ideal).all()):
        raise ArgumentError(explain("weight", "a range that overflows float32", "at most 3.4e38"))

    factor = None
    if global_scale:
        peak = ideal.max().reshape(1)
        if types.element_scale == "float8_e8m0":
            peak = xp.ones_like(peak)  # Its range is float32's: there is nothing to fill.
        elif scale_type.bits == 8:
            peak = peak / scale_type.max
        factor = xp.where(peak > 0, xp.clip(peak, float(np.finfo(np.float32).tiny), None), xp.ones_like(peak))
        ideal = ideal / factor
    # A group of zeros has any scale; 1 keeps it out of the way of subnormals.
    ideal = xp.where(largest > 0, ideal, xp.ones_like(ideal))
    stored, scale = _round_scale(ideal, types.element_scale)
    effective = scale if factor is None else scale * factor
    if b.name == "int1" and scale_type.signed:
        # The codes are 0 and -1: the sign of the scale decides which sign a group can hold.
        flip = xp.where(high > -low, -1.0, 1.0)
        flip = flip.to(effective.dtype) if _tensors.is_torch(flip) else flip.astype(np.float32)
        effective, scale = effective * flip, scale * flip
        stored = _tensors.encode(scale, types.element_scale)

    zero = offset = None
    if types.element_zero != "none":
        top = float((1 << b.bits) - 1)
        offset = -low / effective
        if types.element_zero == "integer":
            offset = xp.clip(xp.round(offset), 0.0, top)
            zero = offset.to(xp.int16) if _tensors.is_torch(offset) else offset.astype(np.int16)
        else:
            zero = _tensors.encode(offset, types.element_zero)
            offset = _tensors.decode(zero, types.element_zero)

    place = {"device": weight.device} if _tensors.is_torch(weight) else {}
    codes = xp.empty((n, k), dtype=xp.uint8, **place)
    for rows in _blocks(n, k):
        scales = slice(None) if strategy == "tensor" else rows
        block = _float32(weight[rows])
        levels = block.reshape(block.shape[0], -1, group_size) / effective[scales][:, :, None]
        if offset is not None:
            levels = levels + offset[scales][:, :, None]
        levels = levels.reshape(block.shape)
        if b.kind is dtypes.Kind.INT:
            codes[rows] = _integer_codes(levels, -(1 << (b.bits - 1)), (1 << (b.bits - 1)) - 1, b.bits)
        elif b.kind is dtypes.Kind.UINT:
            codes[rows] = _integer_codes(levels, 0, (1 << b.bits) - 1, b.bits)
        else:
            codes[rows] = _tensors.round_to_table(levels, *_tensors.finite_codes(b))
    if strategy == "tensor":
        stored, zero = stored.reshape(1), None if zero is None else zero.reshape(1)
    return QuantizedWeight(codes, stored, zero, factor, types)


def _ideal_scale(types: TypeConfig, low: Array, high: Array, largest: Array) -> Array:
    """Returns the scale that maps the range of each group to the range of the codes, float32."""
    xp = _tensors.library(low)
    b = dtypes.parse(types.element_b)
    if b.kind is dtypes.Kind.INT:
        return largest / max((1 << (b.bits - 1)) - 1, 1)
    if b.kind is dtypes.Kind.UINT and types.element_zero != "none":
        top = (1 << b.bits) - 1
        if types.element_zero == "integer":
            return (xp.clip(high, 0.0, None) - xp.clip(low, None, 0.0)) / top
        # A zero point is low/scale in its own type: keep it so small that its rounding costs little.
        reach = 4.0 * (1 << min(dtypes.parse(types.element_zero).mantissa_bits + 1, 20))
        return xp.maximum((high - low) / top, largest / reach)
    return largest / b.max
