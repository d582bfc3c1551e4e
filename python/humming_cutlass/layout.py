"""The packed weight: checks, padding and the container. The order of the bytes is C++'s (layout/packed_atom.hpp).

`pack` takes a `TypeConfig` only: one packed weight serves every kernel and every GPU for an operand width. Everything
that a kernel trusts is checked here, once: kernels check nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from humming_cutlass import _tensors, dtypes, support
from humming_cutlass._tensors import Array
from humming_cutlass.config import ATOM_K, ATOM_N, TypeConfig, check_group_size, extent
from humming_cutlass.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingKernelError,
    ToolchainError,
    UnsupportedError,
    explain,
)

__all__ = ["SCALE_ROW_ORDER", "PackedWeight", "group_count", "pack", "packed_group_count", "unpack"]

SCALE_ROW_ORDER = tuple(half * 8 + i for i in range(8) for half in range(2))
"""Row of an atom whose scale is at each position: 0, 8, 1, 9, .... A lane of the MMA owns rows r and r + 8, so its two
scales are neighbours and come in one load."""

_FORMAT = "humming_cutlass.packed.v1"
_TENSORS = ("data", "scale", "zero", "bias", "global_scale")


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)  # exact, where a quotient of floats is not


def group_count(types: TypeConfig, k: int) -> int:
    """Returns how many scales a row of k columns has."""
    return 1 if types.group_size == -1 else _ceil_div(k, types.group_size)


def packed_group_count(types: TypeConfig, k: int) -> int:
    """Returns how many scales a row of a packed weight has: those of the k columns padded to whole atoms."""
    return 1 if types.group_size == -1 else _ceil_div(_ceil_div(k, ATOM_K) * ATOM_K, types.group_size)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class PackedWeight:
    """A weight in the layout that every kernel and the CPU path read.

    With N = ceil(n / 16) and K = ceil(k / 64):

    Attributes:
        types: the maths, and with it the bytes.
        n: logical rows.
        k: logical columns.
        data: the codes, [N, K, 32 * bits] 32-bit words (torch int32, numpy uint32).
        scale: [N, G, 16] in the scale's type, rows of an atom in `SCALE_ROW_ORDER`; padding holds 1.
        zero: like `scale`, float16 for integer zero points, else their type; padding holds 0. None without.
        bias: float32 [n], or None.
        global_scale: float32 [1], or None.
    """

    types: TypeConfig
    n: int
    k: int
    data: Array
    scale: Array
    zero: Array | None = None
    bias: Array | None = None
    global_scale: Array | None = None
    # Launch plans that `ops` made for this weight; they hold the addresses of the tensors above.
    plans: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Checks every shape, dtype and device: a file that was tampered with must not make a kernel read elsewhere."""
        for parameter in ("n", "k"):
            object.__setattr__(self, parameter, extent(getattr(self, parameter), parameter))
        check_types(self.types, self.k)
        _tensors.check_array(self.data, "data")
        rows, columns = _ceil_div(self.n, ATOM_N), _ceil_div(self.k, ATOM_K)
        scales = (rows, packed_group_count(self.types, self.k), ATOM_N)
        torch_data = _tensors.is_torch(self.data)
        self._check("data", "int32" if torch_data else "uint32", (rows, columns, 32 * self.types.bits))
        self._check("scale", self.types.element_scale, scales)
        if self.types.element_zero != "none":
            self._check("zero", zero_element(self.types), scales)
        elif self.zero is not None:
            raise ArgumentError(explain("zero", "a tensor", "None with element_zero 'none'"))
        if self.bias is not None:
            self._check("bias", "float32", (self.n,))
        if self.global_scale is not None:
            self._check("global_scale", "float32", (1,))
        if _tensors.device_of(self.data).startswith("cuda"):
            _ = self.scales_fit  # now, since a call may come while a stream is being captured

    @functools.cached_property
    def scales_fit(self) -> bool:
        """Whether 16-bit weights may be multiplied by their group scales; see `support.scale_range`."""
        if self.types.group_size == -1:
            return True
        scale = _tensors.decode(self.scale, self.types.element_scale)  # (atom rows, groups, 16)
        least, greatest = support.scale_range(self.types)
        magnitude = abs(scale)
        inside = (magnitude == 0) | ((magnitude >= least) & (magnitude < greatest))
        if rest := self.n % ATOM_N:  # rows beyond n hold whatever they hold
            beyond = [position for position, row in enumerate(SCALE_ROW_ORDER) if row >= rest]
            inside[-1, :, beyond] = True
        return bool(inside.all())

    def _check(self, parameter: str, element: str, shape: tuple[int, ...]) -> None:
        tensor = getattr(self, parameter)
        _tensors.check_array(tensor, parameter)
        if _tensors.is_torch(tensor) != _tensors.is_torch(self.data):
            raise ArgumentTypeError(explain(parameter, type(tensor).__name__, f"{type(self.data).__name__} like data"))
        expected = element
        if element in _tensors.FLOATS:
            expected = _dtype_name(_tensors.stored_dtype(element, tensor))
        if _dtype_name(tensor.dtype) != expected:
            raise ArgumentTypeError(explain(parameter, f"dtype {_dtype_name(tensor.dtype)}", expected))
        if tuple(tensor.shape) != shape:
            raise ArgumentError(explain(parameter, f"shape {tuple(tensor.shape)}", str(shape)))
        if _tensors.device_of(tensor) != _tensors.device_of(self.data):
            raise ArgumentError(
                explain(parameter, f"device {_tensors.device_of(tensor)}", f"{_tensors.device_of(self.data)} like data")
            )
        if _tensors.is_torch(tensor) and str(tensor.layout) != "torch.strided":
            raise ArgumentError(explain(parameter, f"layout {tensor.layout}", "a dense tensor", "to_dense()"))
        if not (tensor.is_contiguous() if _tensors.is_torch(tensor) else tensor.flags.c_contiguous):
            raise ArgumentError(explain(parameter, "a tensor that is not contiguous", "a contiguous one"))

    @property
    def device(self) -> str:
        """Where the weight lives, e.g. `cpu` or `cuda:0`."""
        return _tensors.device_of(self.data)

    def to(self, device: Any) -> PackedWeight:
        """Returns this weight on another torch device; itself where it is there already.

        Raises:
            ArgumentTypeError: the weight consists of numpy arrays.
            ArgumentError: there is no such device.
        """
        if not _tensors.is_torch(self.data):
            raise ArgumentTypeError(explain("weight", "numpy arrays", "torch tensors, to move to a device"))
        _tensors.check_device(device, "device")
        moved = {name: t.to(device) for name, t in self.state_dict().items()}
        return self if moved["data"] is self.data else dataclasses.replace(self, **moved)

    def state_dict(self) -> dict[str, Array]:
        """Returns the tensors by name, without those that are None; fit for safetensors with `metadata()`."""
        tensors = {name: getattr(self, name) for name in _TENSORS}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def metadata(self) -> dict[str, str]:
        """Returns what a file must hold beside the tensors, as strings: n, k and the types."""
        return metadata(self.types, self.n, self.k)

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> PackedWeight:
        """Returns the weight that `state_dict()` and `metadata()` describe; the file need not be trusted.

        Raises:
            ArgumentError: metadata or tensors are missing, unknown, without memory (meta), not finite, or do not fit
                together.
            ArgumentTypeError: something has the wrong Python type, or a tensor the wrong dtype.
            UnsupportedError: the types are unknown.
        """
        arguments: dict[str, object] = {"tensors": tensors, "metadata": metadata}
        for parameter, given in arguments.items():
            if not isinstance(given, Mapping):
                raise ArgumentTypeError(explain(parameter, type(given).__name__, "a dict"))
        if metadata.get("format") != _FORMAT:
            raise ArgumentError(explain("metadata['format']", repr(metadata.get("format")), _FORMAT))
        fields = [f.name for f in dataclasses.fields(TypeConfig)]
        for key in ("n", "k", *(f"types.{f}" for f in fields)):
            if key not in metadata:
                raise ArgumentError(explain("metadata", f"no {key!r}", "what PackedWeight.metadata() wrote"))
            value: object = metadata[key]
            if not isinstance(value, str):
                got = f"{value!r} ({type(value).__name__})"
                raise ArgumentTypeError(explain(f"metadata[{key!r}]", got, "a string"))
        numbers = {}
        for key in ("n", "k", "types.group_size"):
            try:
                numbers[key] = int(metadata[key])
            except ValueError:
                raise ArgumentError(explain(f"metadata[{key!r}]", repr(metadata[key]), "an integer")) from None
        if unknown := sorted(set(tensors) - set(_TENSORS), key=str):
            raise ArgumentError(explain("tensors", f"unknown {unknown[0]!r}", ", ".join(_TENSORS)))
        for name in ("data", "scale"):
            if name not in tensors:
                raise ArgumentError(explain("tensors", f"no {name!r}", ", ".join(_TENSORS)))
        words = {f: metadata[f"types.{f}"] for f in fields if f != "group_size"}
        types = TypeConfig(**words, group_size=numbers["types.group_size"])
        packed = cls(types=types, n=numbers["n"], k=numbers["k"], **tensors)
        packed.check_values()
        return packed

    def check_values(self) -> None:
        """Reads what a file brought: `pack` refuses the same values.

        Raises:
            ArgumentError: there is no memory to read, or a scale or zero point of the n rows, the bias or the global
                scale is not finite. Rows that are padding may hold anything.
        """
        if self.device == "meta":
            raise ArgumentError(explain("data", "device meta", "tensors with values"))
        groups = packed_group_count(self.types, self.k)  # those beyond k too: they meet activations of 0
        for parameter, element in (("scale", self.types.element_scale), ("zero", zero_element(self.types))):
            if (tensor := getattr(self, parameter)) is not None:
                _tensors.check_finite(_unpack_rows(tensor, self.n, groups), element, parameter)
        for parameter in ("bias", "global_scale"):
            if (tensor := getattr(self, parameter)) is not None:
                _tensors.check_finite(tensor, "float32", parameter)

    def __getstate__(self) -> dict[str, Any]:
        # Plans belong to a process and to these very tensors.
        return self.__dict__ | {"plans": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def metadata(types: TypeConfig, n: int, k: int) -> dict[str, str]:
    """Returns what `PackedWeight.metadata` returns, without a weight."""
    return {"format": _FORMAT, "n": str(n), "k": str(k)} | {
        f"types.{key}": str(value) for key, value in dataclasses.asdict(types).items()
    }


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def zero_element(types: TypeConfig) -> str:
    """Returns the type in which packed zero points are stored: integers up to 256 are exact in float16."""
    return "float16" if types.element_zero == "integer" else types.element_zero


def check_types(types: TypeConfig, k: int) -> None:
    """Raises a typed error unless a weight of k columns can be packed for `types`."""
    if not isinstance(types, TypeConfig):
        raise ArgumentTypeError(explain("types", type(types).__name__, "a TypeConfig"))
    # Only -1 and proper divisors are stored, so that k and -1 are one configuration.
    if check_group_size(types.group_size, k) != types.group_size:
        raise ArgumentError(explain("group_size", types.group_size, "-1 for one group of all k columns", -1))
    if reason := support.check_types(types):
        raise UnsupportedError(reason)


def pack_codes(codes: Array, types: TypeConfig) -> Array:
    """Returns checked codes, uint8 (n, k), as packed words [N, K, 32 * bits] on the same device."""
    from humming_cutlass import _C

    if not _tensors.is_torch(codes):
        source: Array = np.ascontiguousarray(codes)
        return _C.pack_codes(source, types.element_b, types.operand_bits)
    if codes.device.type == "cuda":
        return _pack_codes_cuda(codes.contiguous(), types)
    import torch

    words = _C.pack_codes(codes.contiguous().numpy(), types.element_b, types.operand_bits)
    return torch.from_numpy(np.asarray(words).view(np.int32))


def _pack_codes_cuda(codes: Array, types: TypeConfig) -> Array:
    """Packs on the device where its kernel can be had, else through the host: the bytes are the same."""
    import torch

    from humming_cutlass import _C, build, emitter, planner

    device = planner.Device.from_properties(dict[str, Any](_C.device_properties(codes.device.index)))
    try:
        source = emitter.emit_pack(types.element_b, device.arch)
        path = build.compile_kernels([source])[source.name]
    except (ToolchainError, MissingKernelError):
        return pack_codes(codes.cpu(), types).to(codes.device)
    n, k = codes.shape
    packed: Array = torch.empty(
        (math.ceil(n / ATOM_N), math.ceil(k / ATOM_K), 32 * types.bits), dtype=torch.int32, device=codes.device
    )
    kernel = _pack_kernel(str(path))
    _C.pack(kernel, codes, packed, torch.cuda.current_stream(codes.device).cuda_stream)
    return packed


@functools.cache
def _pack_kernel(path: str) -> Any:
    from humming_cutlass import _C, emitter

    return _C.Kernel(path, emitter.PACK_ENTRY)


def _check_codes(codes: Array, types: TypeConfig) -> None:
    _tensors.check_array(codes, "codes")
    element = _tensors.element_of(codes)
    if element != "uint8":
        allowed = f"uint8: the bit patterns of {types.element_b}"
        b, library = dtypes.parse(types.element_b), "torch" if _tensors.is_torch(codes) else "np"
        nearest = None
        if element == "int8" and b.kind is dtypes.Kind.INT:
            allowed += " (two's complement)"
            nearest = f"codes.view({library}.uint8) & 0x{(1 << b.bits) - 1:02X}"
        elif "int" in element:
            nearest = "codes.to(torch.uint8)" if library == "torch" else "codes.astype(np.uint8)"
            if b.kind is dtypes.Kind.INT:
                allowed += " (two's complement)"
                nearest = f"(codes & 0x{(1 << b.bits) - 1:02X}){nearest.removeprefix('codes')}"
        raise ArgumentTypeError(explain("codes", f"dtype {element}", allowed, nearest))
    if codes.ndim != 2 or 0 in codes.shape:
        raise ArgumentError(explain("codes", f"shape {tuple(codes.shape)}", "(n, k) with n, k >= 1"))
    if _tensors.device_of(codes).split(":")[0] not in ("cpu", "cuda"):
        raise ArgumentError(explain("codes", f"device {codes.device}", "cpu or cuda", "cpu"))
    b = dtypes.parse(types.element_b)
    if b.bits < 8 and int(codes.max()) >= 1 << b.bits:
        index = _tensors.first_index(codes >= 1 << b.bits)
        raise ArgumentError(
            explain("codes", f"{int(codes[index])} at {index}", f"0 .. {(1 << b.bits) - 1} for {b.name}")
        )
    if b.specials != "none":
        # 0x7F and 0xFF of float8_e4m3, the top exponent of float8_e5m2.
        magnitude = 0x7F if b.specials == "nan" else 0x7C
        bad = (codes & 0x7F) >= magnitude
        if bool(bad.any()):
            index = _tensors.first_index(bad)
            raise ArgumentError(
                explain("codes", f"0x{int(codes[index]):02X} (not finite) at {index}", f"finite codes of {b.name}")
            )


def _beside(x: Any, codes: Array, parameter: str) -> Array:
    """Returns `x` in the library of `codes`, and on its device where `x` is one number."""
    if isinstance(x, bool):
        raise ArgumentTypeError(explain(parameter, x, "a number or a tensor"))
    if is_number(x):
        x = np.asarray(float_of(x, parameter), dtype=np.float64)
        if _tensors.is_torch(codes):
            import torch

            x = torch.from_numpy(x)
    _tensors.check_array(x, parameter)
    _tensors.check_elements(x, parameter)
    if _tensors.is_torch(x) != _tensors.is_torch(codes):
        raise ArgumentTypeError(explain(parameter, type(x).__name__, f"{type(codes).__name__} like codes"))
    if _tensors.is_torch(x):
        x = x.detach()
        if x.numel() == 1:
            x = x.to(codes.device)
    if _tensors.device_of(x) != _tensors.device_of(codes):
        raise ArgumentError(
            explain(parameter, f"device {_tensors.device_of(x)}", f"{_tensors.device_of(codes)} like codes")
        )
    return x


def is_number(x: object) -> bool:
    """Returns whether `x` is a real number of Python or NumPy, and no bool."""
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def float_of(number: float, parameter: str) -> float:
    """Returns a number as float; integers may be too large for one."""
    try:
        return float(number)
    except OverflowError:
        raise ArgumentError(explain(parameter, f"a number of {len(str(number))} digits", "a finite number")) from None


def check_global_scale(number: float) -> None:
    """Raises ArgumentError where float32 would make a finite number infinite, or another than 0 zero."""
    with np.errstate(over="ignore", under="ignore"):
        single = np.float32(number)
    if math.isfinite(number) and (not np.isfinite(single) or (single == 0) != (number == 0)):
        raise ArgumentError(explain("global_scale", f"{number!r}", "0, or a number from 1.4e-45 to 3.4e38 (float32)"))


def _expand(x: Array, n: int, groups: int, parameter: str) -> Array:
    """Returns scales or zero points as (n, groups); one number serves every row of a weight without groups."""
    shape = tuple(x.shape)
    if shape == (n, groups):
        return x
    if groups == 1 and shape in ((), (1,)):
        return _tensors.library(x).broadcast_to(x.reshape(1, 1), (n, 1))
    allowed = f"(n, groups) = ({n}, {groups})" + (", or (1,) for the whole weight" if groups == 1 else "")
    raise ArgumentError(explain(parameter, f"shape {shape}", allowed, (n, groups)))


def _pack_rows(stored: Array, padding: int, packed_groups: int) -> Array:
    """Returns stored (n, G) elements as [N, G', 16] with the rows of an atom interleaved.

    Args:
        stored: scales or zero points.
        padding: bit pattern for rows and groups beyond the logical ones.
        packed_groups: G'.
    """
    xp = _tensors.library(stored)
    n, groups = stored.shape
    pattern = _tensors.bits(stored.contiguous() if _tensors.is_torch(stored) else np.ascontiguousarray(stored))
    atoms = math.ceil(n / ATOM_N)
    place = {"device": stored.device} if _tensors.is_torch(stored) else {}
    padded = xp.full((atoms * ATOM_N, packed_groups), padding, dtype=pattern.dtype, **place)
    padded[:n, :groups] = pattern
    rows = padded.reshape(atoms, 2, 8, packed_groups)
    # (half, i) -> (i, half): position 2 * i + half, as in SCALE_ROW_ORDER.
    packed = rows.permute(0, 3, 2, 1) if _tensors.is_torch(rows) else rows.transpose(0, 3, 2, 1)
    packed = packed.reshape(atoms, packed_groups, ATOM_N)
    return (packed.contiguous() if _tensors.is_torch(packed) else np.ascontiguousarray(packed)).view(stored.dtype)


def _unpack_rows(packed: Array, n: int, groups: int) -> Array:
    """Undoes `_pack_rows`."""
    pattern = _tensors.bits(packed)
    atoms, packed_groups, _ = pattern.shape
    rows = pattern.reshape(atoms, packed_groups, 8, 2)
    rows = rows.permute(0, 3, 2, 1) if _tensors.is_torch(rows) else rows.transpose(0, 3, 2, 1)
    rows = rows.reshape(atoms * ATOM_N, packed_groups)[:n, :groups]
    return (rows.contiguous() if _tensors.is_torch(rows) else np.ascontiguousarray(rows)).view(packed.dtype)


_ONE = {
    "float16": 0x3C00,
    "bfloat16": 0x3F80,
    "float32": 0x3F800000,
    "float8_e4m3": 0x38,
    "float8_e5m2": 0x3C,
    "float8_e8m0": 0x7F,
}


def _convert_zero(zero: Array, types: TypeConfig) -> Array:
    """Returns zero points in the type in which they are stored, checked."""
    if types.element_zero != "integer":
        return _tensors.convert(zero, types.element_zero, "zero")
    element = _tensors.element_of(zero)
    top = 1 << types.bits
    if element != "float64" and element not in _tensors.FLOATS and not re.fullmatch(r"u?int(8|16|32|64)", element):
        raise ArgumentTypeError(explain("zero", f"dtype {element}", "integers, or floats with integral values"))
    single = zero.float() if _tensors.is_torch(zero) else zero.astype(np.float32)
    bad = ~((single >= 0) & (single <= top) & (single == _tensors.library(zero).floor(single)))
    if bool(bad.any()):
        index = _tensors.first_index(bad)
        raise ArgumentError(
            explain(
                "zero",
                f"{float(single[index]):g} at {index}",
                f"integers 0 .. {top} for {types.element_b}; other zero points are floating ones",
                min(max(round(float(single[index])), 0), top) if math.isfinite(float(single[index])) else None,
            )
        )
    return _tensors.encode(single, "float16")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _Inputs:
    """Checked inputs of `pack`, converted to the types in which they are stored, in logical order."""

    types: TypeConfig
    scale: Array
    zero: Array | None
    bias: Array | None
    global_scale: Array | None


def check_inputs(
    codes: Array, scale: Any, *, types: TypeConfig, zero: Any = None, bias: Any = None, global_scale: Any = None
) -> _Inputs:
    """Makes the checks of `pack`, with its arguments and errors, and packs nothing."""
    if not isinstance(types, TypeConfig):
        raise ArgumentTypeError(explain("types", type(types).__name__, "a TypeConfig; WeightConfig.resolve makes one"))
    dtypes.parse(types.element_b, "element_b")
    _check_codes(codes, types)
    n, k = (int(x) for x in codes.shape)
    types = dataclasses.replace(types, group_size=check_group_size(types.group_size, k))
    check_types(types, k)
    groups = group_count(types, k)

    scale = _expand(_beside(scale, codes, "scale"), n, groups, "scale")
    scale = _tensors.convert(scale, types.element_scale, "scale")
    if types.element_zero == "none":
        if zero is not None:
            raise ArgumentError(explain("zero", "zero points", "None: the weight's type has no zero point"))
    else:
        if zero is None:
            if types.element_zero != "integer":
                raise ArgumentError(explain("zero", "None", f"zero points ({n}, {groups}) of {types.element_zero}"))
            zero = 1 << (types.bits - 1)
            zero = _expand(_beside(zero, codes, "zero"), n, 1, "zero")
            zero = _tensors.library(zero).broadcast_to(zero, (n, groups))
        zero = _convert_zero(_expand(_beside(zero, codes, "zero"), n, groups, "zero"), types)
    if bias is not None:
        bias = _beside(bias, codes, "bias")
        if tuple(bias.shape) != (n,):
            raise ArgumentError(explain("bias", f"shape {tuple(bias.shape)}", f"({n},)", (n,)))
        bias = _tensors.convert(bias, "float32", "bias")
    if global_scale is not None:
        rounds = is_number(global_scale)
        global_scale = _beside(global_scale, codes, "global_scale")
        if math.prod(global_scale.shape) != 1:
            raise ArgumentError(explain("global_scale", f"shape {tuple(global_scale.shape)}", "one element", (1,)))
        if rounds:
            # A Python float has no float32 to be told by: round it.
            check_global_scale(float(global_scale))
            global_scale = global_scale.float() if _tensors.is_torch(global_scale) else global_scale.astype(np.float32)
        global_scale = _tensors.convert(global_scale, "float32", "global_scale").reshape(1)
    return _Inputs(types=types, scale=scale, zero=zero, bias=bias, global_scale=global_scale)


def pack(
    codes: Array,
    scale: Any,
    *,
    types: TypeConfig,
    zero: Any = None,
    bias: Any = None,
    global_scale: Any = None,
) -> PackedWeight:
    """Packs a quantized weight: value = scale * (codes - zero) * global_scale.

    Group scales that are too small or too large for the fastest kernels give a power of two to the global scale, where
    that changes no value.

    Args:
        codes: bit patterns of the weight, uint8 (n, k), in the low bits: two's complement for `intB`. Any strides.
        scale: (n, G) with G = k / group_size, 1 without groups; then also (1,) or one number for the whole weight. Any
            floating dtype from which the conversion to `types.element_scale` changes no value.
        types: what the weight is; `group_size` is taken from here and never from shapes.
        zero: zero points, shaped like `scale`: integers 0 .. 2^bits, or floats converted like `scale`. None with
            integer zero points means the middle, 2^(bits-1).
        bias: (n,), added to every row of the output; converted to float32.
        global_scale: one number, or a tensor of one element; a factor for the whole weight.

    Returns:
        A `PackedWeight` in the library and on the device of `codes`.

    Raises:
        ArgumentTypeError: an argument has the wrong Python type or dtype.
        ArgumentError: a shape, device or group size is wrong, a code or zero point is out of range, a value is not
            finite, or a conversion would change it.
        UnsupportedError: no kernel takes `types`.
    """
    checked = check_inputs(codes, scale, types=types, zero=zero, bias=bias, global_scale=global_scale)
    checked = _centre_scales(checked)
    n, k = (int(x) for x in codes.shape)
    packed_groups = packed_group_count(checked.types, k)
    return PackedWeight(
        types=checked.types,
        n=n,
        k=k,
        data=pack_codes(codes, checked.types),
        scale=_pack_rows(checked.scale, _ONE[types.element_scale], packed_groups),
        zero=None if checked.zero is None else _pack_rows(checked.zero, 0, packed_groups),
        bias=None if checked.bias is None else _own(checked.bias),
        global_scale=None if checked.global_scale is None else _own(checked.global_scale),
    )


def _centre_scales(checked: _Inputs) -> _Inputs:
    """Moves a power of two from the group scales into the global scale where that brings all of them into range.

    The range is `support.scale_range`, in which weights may be multiplied by their scales. Nothing is rounded: where a
    scale or the global scale could not be written exactly, all stay as they are.
    """
    types = checked.types
    if types.group_size == -1 or types.element_zero not in ("none", "integer"):
        return checked
    scale = _tensors.decode(checked.scale, types.element_scale)
    magnitude = abs(scale)
    magnitude = magnitude[magnitude > 0]
    if 0 in magnitude.shape:
        return checked
    least, greatest = support.scale_range(types)
    up = math.ceil(math.log2(least) - math.log2(float(magnitude.min())))  # at least so far
    down = math.ceil(math.log2(greatest) - math.log2(float(magnitude.max()))) - 1  # at most so far
    exponent = up if up > 0 else min(down, 0)
    if exponent == 0 or not up <= exponent <= down:
        return checked
    moved = scale * 2.0**exponent
    stored = _tensors.encode(moved, types.element_scale)
    factor = _tensors.library(scale).ones_like(scale.reshape(-1)[:1]) * 2.0**-exponent
    if checked.global_scale is not None:
        factor = factor * checked.global_scale
    exact = bool((_tensors.decode(stored, types.element_scale) == moved).all())
    usual = 2.0**-126 <= abs(float(factor[0])) < 2.0**127 or float(factor[0]) == 0
    return dataclasses.replace(checked, scale=stored, global_scale=factor) if exact and usual else checked


def _own(x: Array) -> Array:
    """Returns a contiguous copy: a packed weight shares no memory with what it was made from."""
    return x.contiguous().clone() if _tensors.is_torch(x) else np.array(x, order="C")


def unpack(packed: PackedWeight) -> dict[str, Array | None]:
    """Returns what was packed, the inverse of `pack`; strategy `tensor` comes back as channel scales.

    Returns:
        `codes` uint8 (n, k); `scale` and `zero` (n, G) in their stored types, `zero` None without zero points. Where
        `pack` moved a power of two into the global scale, `scale` is what it left.

    Raises:
        ArgumentTypeError: `packed` is no `PackedWeight`.
    """
    from humming_cutlass import _C

    if not isinstance(packed, PackedWeight):
        raise ArgumentTypeError(explain("packed", type(packed).__name__, "a PackedWeight"))
    data = packed.data
    words: Array = np.ascontiguousarray(_tensors.to_numpy(data)).view(np.uint32)
    codes: Array = np.asarray(
        _C.unpack_codes(words, packed.types.element_b, packed.n, packed.k, packed.types.operand_bits)
    )
    if _tensors.is_torch(data):
        import torch

        codes = torch.from_numpy(codes).to(data.device)
    groups = group_count(packed.types, packed.k)
    return {
        "codes": codes,
        "scale": _unpack_rows(packed.scale, packed.n, groups),
        "zero": None if packed.zero is None else _unpack_rows(packed.zero, packed.n, groups),
    }
