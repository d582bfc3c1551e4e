"""The reference in float64: dequantization and GEMM, written from the definition of the types alone.

Nothing here knows the packed layout or calls compiled code: it reads a code's value from `DataType.values()` and does
the arithmetic in float64, so that a mistake in packing, conversion or scaling cannot be in both.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from humming_cutlass import dtypes
from humming_cutlass.errors import ArgumentError, explain

__all__ = ["dequantize", "gemm", "to_float64"]


def to_float64(x: Any) -> npt.NDArray[np.float64]:
    """Returns a torch tensor (any device, any floating dtype), numpy array or number as a float64 numpy array."""
    if hasattr(x, "detach"):
        # float8 has no float64 cast everywhere; float32 holds every type here exactly but float64.
        x = x.detach().cpu()
        return np.asarray((x if str(x.dtype) == "torch.float64" else x.float()).numpy(), dtype=np.float64)
    return np.asarray(x).astype(np.float64)


def dequantize(
    codes: Any,
    scale: Any,
    *,
    dtype: str,
    group_size: int = -1,
    zero: Any = None,
    global_scale: Any = None,
    operand: str | None = None,
) -> npt.NDArray[np.float64]:
    """Returns scale * (value(code) - zero) * global_scale in float64, shape (n, k).

    Args:
        codes: bit patterns of the weight, (n, k) uint8.
        scale: (n, G), or one number for the whole weight.
        dtype: the weight's type.
        group_size: columns that share a scale; -1 is all of them.
        zero: zero points shaped like `scale`, or None.
        global_scale: one number, or None for 1.
        operand: 16-bit type to which a kernel rounds the entries of a code book; None leaves them exact.

    Raises:
        ArgumentError: the groups of `scale` do not cover k.
    """
    pattern = np.asarray(codes.cpu() if hasattr(codes, "cpu") else codes).astype(np.int64)
    table = dtypes.parse(dtype).values()
    if operand is not None and dtypes.parse(dtype).kind is dtypes.Kind.CODE_BOOK:
        table = table.astype(ml_dtypes.bfloat16 if operand == "bfloat16" else operand).astype(np.float64)
    weight: npt.NDArray[np.float64] = table[pattern]
    k = weight.shape[1]
    group_of_column = np.zeros(k, dtype=np.int64) if group_size in (-1, k) else np.arange(k) // group_size

    def spread(x: Any, parameter: str) -> Any:
        values = to_float64(x)
        if values.size == 1:
            return values.reshape(1, 1)
        if values.shape != (weight.shape[0], group_of_column[-1] + 1):
            raise ArgumentError(
                explain(parameter, f"shape {values.shape}", f"({weight.shape[0]}, {group_of_column[-1] + 1})")
            )
        return values[:, group_of_column]

    if zero is not None:
        weight = weight - spread(zero, "zero")
    weight = weight * spread(scale, "scale")
    factor = 1.0 if global_scale is None else float(to_float64(global_scale).reshape(()))
    return np.asarray(weight * factor, dtype=np.float64)


def gemm(a: Any, weight: npt.NDArray[np.float64], bias: Any = None) -> npt.NDArray[np.float64]:
    """Returns a @ weight^T + bias in float64.

    Args:
        a: activations (..., k).
        weight: dequantized weight (n, k).
        bias: (n,), or None.
    """
    product: npt.NDArray[np.float64] = to_float64(a) @ weight.T
    return product if bias is None else product + to_float64(bias)
