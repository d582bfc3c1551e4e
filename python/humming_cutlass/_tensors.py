"""What torch tensors and numpy arrays have in common here: element names, bit patterns and exact conversion.

An element is *stored* in the library's own dtype: torch's, or for numpy those of ml_dtypes. Only in a torch that lacks
float8_e8m0 that type is stored as its bit patterns, uint8.
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np

from humming_cutlass import dtypes
from humming_cutlass.errors import ArgumentError, ArgumentTypeError, explain

__all__ = [
    "FLOATS",
    "Array",
    "bits",
    "check_array",
    "check_finite",
    "convert",
    "decode",
    "device_of",
    "element_of",
    "encode",
    "finite_codes",
    "first_index",
    "is_torch",
    "library",
    "round_to_table",
    "stored_dtype",
    "to_numpy",
]

Array = Any
"""A torch tensor or a numpy array: neither library is needed to import this module's callers."""

FLOATS = ("float16", "bfloat16", "float32", "float8_e4m3", "float8_e5m2", "float8_e8m0")
"""Element types of scales and floating zero points."""

_TORCH_NAMES = {
    "float8_e4m3": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "float8_e8m0": "float8_e8m0fnu",
}
_CANONICAL = {v: k for k, v in _TORCH_NAMES.items()}
# All of these bits set: not finite.
_SPECIAL = {
    "float16": 0x7C00,
    "bfloat16": 0x7F80,
    "float32": 0x7F800000,
    "float8_e4m3": 0x7F,
    "float8_e5m2": 0x7C,
    "float8_e8m0": 0xFF,
}


def is_torch(x: object) -> bool:
    """Returns whether `x` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def library(x: Array) -> Any:
    """Returns the module whose functions take `x`: torch or numpy. Callers use the spelling that both accept."""
    return sys.modules["torch"] if is_torch(x) else np


def check_array(x: object, parameter: str) -> None:
    """Raises ArgumentTypeError unless `x` is a torch tensor or a plain array, ArgumentError unless it is dense."""
    if not is_torch(x) and not isinstance(x, np.ndarray):
        raise ArgumentTypeError(explain(parameter, type(x).__name__, "a torch tensor or a numpy array"))
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentTypeError(explain(parameter, "a masked array", "an array without a mask", "x.filled(value)"))
    if isinstance(x, np.matrix):
        raise ArgumentTypeError(explain(parameter, "a numpy.matrix", "a numpy array", "numpy.asarray(x)"))
    if is_torch(x) and (x.is_sparse or x.is_nested or str(x.layout) != "torch.strided"):  # type: ignore[attr-defined]
        layout = "nested" if x.is_nested else str(x.layout)  # type: ignore[attr-defined]
        raise ArgumentError(explain(parameter, f"layout {layout}", "a dense tensor", "to_dense()"))


def check_elements(x: Array, parameter: str) -> None:
    """Raises ArgumentError where a dense tensor's memory does not hold its elements."""
    if is_torch(x) and x.device.type == "meta":
        raise ArgumentError(explain(parameter, "device meta, where tensors have no elements", "cpu or cuda", "cpu"))
    if is_torch(x) and x.is_neg():
        raise ArgumentError(explain(parameter, "a view with the negative bit", "plain elements", "x.resolve_neg()"))


def check_device(device: Any, parameter: str) -> None:
    """Raises ArgumentError unless torch has `device`, however it is spelled; None is the current one."""
    try:
        sys.modules["torch"].empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        why = str(error).splitlines()[0].split(". ")[0]
        raise ArgumentError(explain(parameter, f"{device!r} ({why})", "a device that torch has", "cpu")) from None


def element_of(x: Array) -> str:
    """Returns the name of the elements of `x`: this package's name where it has one, else the library's."""
    name = str(x.dtype).removeprefix("torch.") if is_torch(x) else x.dtype.name
    return _CANONICAL.get(name, name)


def device_of(x: Array) -> str:
    """Returns where `x` lives, e.g. `cpu` or `cuda:0`."""
    return str(x.device) if is_torch(x) else "cpu"


def stored_dtype(element: str, like: Array) -> Any:
    """Returns the dtype in which `element` is stored in the library of `like`."""
    if is_torch(like):
        torch = sys.modules["torch"]
        return getattr(torch, _TORCH_NAMES.get(element, element), torch.uint8)
    return np.dtype(getattr(ml_dtypes, _TORCH_NAMES.get(element, element), element))


def bits(x: Array) -> Array:
    """Returns the bit patterns of `x` as a view of integers of the same width."""
    if is_torch(x):
        torch = sys.modules["torch"]
        return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def to_numpy(x: Array) -> np.ndarray[Any, Any]:
    """Returns `x` as a numpy array on the CPU, without a copy where there need be none."""
    return x.detach().cpu().numpy() if is_torch(x) else x  # type: ignore[no-any-return]


def decode(x: Array, element: str) -> Array:
    """Returns stored elements as float32, exactly."""
    if not is_torch(x):
        return x.astype(np.float32)
    torch = sys.modules["torch"]
    if element == "float8_e8m0" and x.dtype == torch.uint8:
        return torch.ldexp(torch.ones(x.shape, device=x.device), x.to(torch.int32) - 127)
    return x.to(torch.float32)


def round_to_table(x: Array, values: np.ndarray[Any, Any], codes: np.ndarray[Any, Any]) -> Array:
    """Returns the code (uint8) of the value nearest to each element of `x`; ties go to the even code.

    Args:
        x: float32.
        values: ascending distinct values.
        codes: the code of each value.
    """
    middle = ((values[:-1] + values[1:]) / 2).astype(np.float32)
    # `side="left"` sends a tie down; where the code above is the even one, the border moves down by one float32.
    odd_below = (codes[:-1] & 1) == 1
    middle = np.where(odd_below, np.nextafter(middle, np.float32(-np.inf)), middle)
    if is_torch(x):
        torch = sys.modules["torch"]
        borders = torch.from_numpy(middle).to(x.device)
        table = torch.from_numpy(codes.astype(np.uint8)).to(x.device)
        return table[torch.bucketize(x, borders, out_int32=True)]
    return codes.astype(np.uint8)[np.searchsorted(middle, x, side="left")]


def finite_codes(element: dtypes.DataType) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns the distinct finite values of a type of at most 8 bits in ascending order, and their codes."""
    table = element.values()
    codes = np.flatnonzero(np.isfinite(table))
    # The lower code wins between +0 and -0.
    values, first = np.unique(table[codes], return_index=True)
    return values, codes[first]


def encode(x: Array, element: str) -> Array:
    """Returns float32 values rounded to nearest-even and stored as `element`.

    Beyond the type's range 16-bit floats become infinite and 8-bit types saturate: range is the caller's concern.
    """
    if element == "float32":
        return x
    dtype = stored_dtype(element, x)
    if element in ("float16", "bfloat16"):
        with np.errstate(over="ignore"):
            return x.to(dtype) if is_torch(x) else x.astype(dtype)
    return round_to_table(x, *finite_codes(dtypes.parse(element))).view(dtype)


def first_index(mask: Array) -> tuple[int, ...]:
    """Returns the index of the first true element."""
    flat = mask.reshape(-1)
    position = int(flat.to(sys.modules["torch"].uint8).argmax() if is_torch(mask) else flat.argmax())
    return tuple(int(i) for i in np.unravel_index(position, tuple(mask.shape)))


def check_finite(x: Array, element: str, parameter: str) -> None:
    """Raises ArgumentError, naming the first index, where a stored element is NaN or infinite."""
    special = _SPECIAL[element]
    bad = (bits(x) & special) == special
    if bool(bad.any()):
        index = first_index(bad)
        raise ArgumentError(explain(parameter, f"a value that is not finite at {index}", f"finite {element}"))


def convert(x: Array, element: str, parameter: str) -> Array:
    """Returns floating-point `x` stored as `element`, finite and without a change of any value.

    Raises:
        ArgumentTypeError: `x` is not floating point.
        ArgumentError: a value is not finite, or `element` cannot hold it.
    """
    xp = library(x)
    source = element_of(x)
    if source != "float64" and source not in FLOATS:
        raise ArgumentTypeError(
            explain(parameter, f"dtype {source}", f"a floating-point dtype that converts to {element} exactly", element)
        )
    if source == element:
        check_finite(x, element, parameter)
        return x
    if is_torch(x):
        exact = x if source == "float64" else x.to(xp.float32)
        single = exact.to(xp.float32)
    else:
        exact = x if source == "float64" else x.astype(np.float32)
        with np.errstate(over="ignore"):
            single = exact.astype(np.float32)
    bad = ~xp.isfinite(single)
    if not bool(bad.any()):
        stored = encode(single, element)
        bad = decode(stored, element) != exact
        if not bool(bad.any()):
            return stored
    index = first_index(bad)
    value = float(exact[index])
    raise ArgumentError(
        explain(
            parameter,
            f"{value!r} ({source}) at {index}",
            f"finite values that {element} holds exactly",
            f"scales or zero points of type {source}" if source in FLOATS and np.isfinite(value) else None,
        )
    )
