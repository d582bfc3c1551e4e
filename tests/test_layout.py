"""Packing: round trips, the place of every scale, the container and its files."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from humming_cutlass import dtypes, layout, testing
from humming_cutlass.config import TypeConfig
from humming_cutlass.errors import (
    ArgumentError,
    ArgumentTypeError,
    MissingKernelError,
    ToolchainError,
    UnsupportedError,
)
from humming_cutlass.layer import HummingLayer


def _same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or bool((torch.as_tensor(a.float()) == b.float()).all())


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(testing.weight_types("bfloat16")),
    st.integers(1, 70),
    st.integers(1, 200),
    st.integers(0, 2**32 - 1),
)
def test_codes_round_trip(dtype: str, n: int, k: int, seed: int) -> None:
    types = testing.make_types(dtype, k=k, element_a="bfloat16")
    finite = np.flatnonzero(np.isfinite(dtypes.parse(dtype).values())).astype(np.uint8)
    codes = np.random.default_rng(seed).choice(finite, (n, k))
    packed = layout.pack(codes, np.ones((n, 1), np.float32), types=types)
    assert packed.data.shape == (-(-n // 16), -(-k // 64), 32 * types.bits)
    assert packed.data.dtype == np.uint32
    back = layout.unpack(packed)
    assert back["codes"].dtype == np.uint8
    assert (back["codes"] == codes).all()
    same = layout.pack(torch.from_numpy(codes), torch.ones(n, 1), types=types)
    assert (same.data.numpy().view(np.uint32) == packed.data).all()
    assert (layout.unpack(same)["codes"].numpy() == codes).all()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["float16", "bfloat16", "float32", "float8_e4m3", "float8_e5m2", "float8_e8m0"]),
    st.sampled_from(["none", "integer", "float16", "bfloat16", "float32"]),
    st.integers(1, 50),
    st.sampled_from([(64, -1), (96, 16), (96, 48), (240, 80), (33, -1), (192, 96)]),
)
def test_scales_round_trip(scale: str, zero: str, n: int, columns: tuple[int, int]) -> None:
    k, group_size = columns
    types = TypeConfig(
        element_a="float16",
        element_b="int4" if zero == "none" else "uint4",
        element_d="float16",
        element_scale=scale,
        element_zero=zero,
        group_size=group_size,
    )
    problem = testing.random_problem(types, 1, n, k)
    back = layout.unpack(problem.packed)
    assert back["scale"].dtype == problem.scale.dtype
    assert _same(back["scale"], problem.scale)
    assert (back["zero"] is None) == (zero == "none")
    if problem.zero is not None:
        assert _same(back["zero"], problem.zero)


def test_places_of_scales() -> None:
    """Position p of an atom row holds row 0, 8, 1, 9, ...; padding holds scale 1 and zero point 0."""
    types = testing.make_types("uint4", k=80, group_size=16, scale_dtype="float32", zero_point="integer")
    n, groups = 20, 5
    scale = (torch.arange(n * groups).reshape(n, groups).float() + 2) / 16
    zero = (torch.arange(n * groups).reshape(n, groups) % 15) + 1
    packed = layout.pack(torch.zeros(n, 80, dtype=torch.uint8), scale, types=types, zero=zero)
    assert packed.scale.shape == (2, 8, 16)
    assert packed.zero.dtype == torch.float16
    order = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    assert list(layout.SCALE_ROW_ORDER) == order
    for atom in range(2):
        for group in range(8):
            for position, row in enumerate(order):
                inside = 16 * atom + row < n and group < groups
                where = (16 * atom + row, group)
                assert packed.scale[atom, group, position] == (scale[where] if inside else 1)
                assert packed.zero[atom, group, position] == (zero[where] if inside else 0)


def test_padding_of_codes_is_finite() -> None:
    """0 * NaN is NaN: columns beyond k must hold finite codes."""
    for dtype in ("float8_e4m3", "float8_e5m2", "nf4", "int3"):
        types = testing.make_types(dtype, k=65)
        packed = layout.pack(torch.zeros(3, 65, dtype=torch.uint8), torch.ones(3, 1), types=types)
        whole = layout.unpack(dataclasses.replace(packed, n=16, k=128))["codes"]
        assert np.isfinite(dtypes.parse(dtype).values()[whole.numpy()]).all()


def test_zero_point_reaches_two_to_the_bits() -> None:
    for bits in range(1, 9):
        types = testing.make_types(f"uint{bits}", k=32)
        zero = torch.full((4, 1), 1 << bits, dtype=torch.int32)
        packed = layout.pack(torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1), types=types, zero=zero)
        assert float(packed.zero.max()) == 1 << bits


def test_one_number_scales_the_whole_weight() -> None:
    codes = torch.zeros(20, 64, dtype=torch.uint8)
    types = testing.make_types("int4", k=64)
    wanted = layout.pack(codes, torch.full((20, 1), 0.5), types=types)
    for scale in (0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([0.5], dtype=torch.bfloat16)):
        assert _same(layout.pack(codes, scale, types=types).scale, wanted.scale)
    grouped = testing.make_types("int4", k=64, group_size=16)
    with pytest.raises(ArgumentError, match=r"scale: got shape \(1,\); allowed: \(n, groups\) = \(20, 4\)"):
        layout.pack(codes, torch.tensor([0.5]), types=grouped)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, "number", "0-d"])
def test_b7_global_scale_of_any_type(dtype: Any) -> None:
    value: Any = (
        0.375 if dtype == "number" else torch.tensor(0.375) if dtype == "0-d" else torch.tensor([0.375], dtype=dtype)
    )
    types = testing.make_types("int4", k=16)
    packed = layout.pack(torch.zeros(1, 16, dtype=torch.uint8), torch.ones(1, 1), types=types, global_scale=value)
    assert packed.global_scale.dtype == torch.float32
    assert packed.global_scale.tolist() == [0.375]


def test_b7_integers_are_no_scale() -> None:
    types = testing.make_types("int4", k=16)
    codes = torch.zeros(1, 16, dtype=torch.uint8)
    with pytest.raises(ArgumentTypeError, match=r"global_scale: got dtype int32"):
        layout.pack(codes, torch.ones(1, 1), types=types, global_scale=torch.tensor([1], dtype=torch.int32))
    with pytest.raises(ArgumentTypeError, match=r"scale: got dtype uint8"):
        layout.pack(codes, torch.ones(1, 1, dtype=torch.uint8), types=types)
    with pytest.raises(ArgumentTypeError, match=r"scale: got str"):
        layout.pack(codes, "1", types=types)


@pytest.mark.parametrize("source", ["float8_e8m0fnu", "float8_e4m3fn", "float16", "bfloat16", "float64"])
def test_b8_lossless_scales_are_converted(source: str) -> None:
    values = torch.tensor([[0.25], [0.5], [1.0], [2.0]])
    for target in ("float32", "float16", "float8_e8m0", "float8_e4m3"):
        types = testing.make_types("int4", k=16, scale_dtype=target)
        packed = layout.pack(torch.zeros(4, 16, dtype=torch.uint8), values.to(getattr(torch, source)), types=types)
        assert _same(layout.unpack(packed)["scale"], values)


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (1.5, torch.float32, "float8_e8m0"),
        (-1.0, torch.float32, "float8_e8m0"),
        (0.0, torch.float32, "float8_e8m0"),
        (0.1, torch.float32, "float16"),
        (1e6, torch.float32, "float16"),
        (1e-9, torch.float32, "float16"),
        (1 / 3, torch.float64, "float32"),
        (1e300, torch.float64, "float32"),
        (1.0009765625, torch.float16, "bfloat16"),
        (500.0, torch.float32, "float8_e4m3"),
        (1.0625, torch.float16, "float8_e4m3"),
    ],
)
def test_b8_lossy_scales_are_refused(value: float, source: torch.dtype, target: str) -> None:
    scale = torch.ones(4, 1, dtype=source)
    scale[2] = value
    types = testing.make_types("int4", k=16, scale_dtype=target)
    with pytest.raises(ArgumentError, match=rf"scale: got .* at \(2, 0\); allowed: finite values that {target} holds"):
        layout.pack(torch.zeros(4, 16, dtype=torch.uint8), scale, types=types)


@pytest.mark.parametrize(
    "element", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
)
def test_not_finite_scales_are_refused(element: str) -> None:
    bits = 8 * getattr(torch, element).itemsize
    nan = {8: 0xFF, 16: 0x7FFF, 32: 0x7FFFFFFF}[bits]
    pattern = torch.zeros(3, 1, dtype={8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits])
    pattern[:] = {"float8_e8m0fnu": 127}.get(element, 0)
    pattern[1] = nan
    types = testing.make_types("int4", k=16, scale_dtype=element)
    with pytest.raises(ArgumentError, match=r"scale: got a value that is not finite at \(1, 0\)"):
        layout.pack(torch.zeros(3, 16, dtype=torch.uint8), pattern.view(getattr(torch, element)), types=types)


def test_c11_group_size_is_never_derived() -> None:
    """Scales of the unsharded weight (k = 1024) beside a shard of it (k = 512)."""
    types = testing.make_types("int4", k=512, group_size=128)
    with pytest.raises(ArgumentError, match=r"scale: got shape \(16, 8\); allowed: \(n, groups\) = \(16, 4\)"):
        layout.pack(torch.zeros(16, 512, dtype=torch.uint8), torch.ones(16, 8), types=types)


def test_c6_zero_points_of_a_symmetric_weight_are_refused() -> None:
    types = testing.make_types("int4", k=64)
    with pytest.raises(ArgumentError, match=r"zero: got zero points; allowed: None"):
        layout.pack(torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 1), types=types, zero=torch.ones(16, 1))


_BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "global_scale-too-small": (
        {"global_scale": 1e-46},
        ArgumentError,
        r"global_scale: got 1e-46; allowed: 0, or a number from 1\.4e-45",
    ),
    "global_scale-too-large": ({"global_scale": -1e300}, ArgumentError, r"global_scale: got -1e\+300; .*3\.4e38"),
    "scale-meta": ({"scale": torch.ones(1, device="meta")}, ArgumentError, r"scale: got device meta.*: cpu$"),
    "scale-negative-bit": (
        {"scale": torch.ones(16, 1, dtype=torch.complex64).conj().imag},
        ArgumentError,
        r"scale: got a view with the negative bit.*resolve_neg",
    ),
    "bias-masked": (
        {"codes": np.zeros((16, 64), np.uint8), "scale": np.ones((16, 1)), "bias": np.ma.ones(16)},
        ArgumentTypeError,
        r"bias: got a masked array; .*: x\.filled\(value\)$",
    ),
    "codes-matrix": (
        {"codes": np.matrix(np.zeros((16, 64), np.uint8)), "scale": np.ones((16, 1))},
        ArgumentTypeError,
        r"codes: got a numpy\.matrix",
    ),
    "codes-list": ({"codes": [[0]]}, ArgumentTypeError, r"codes: got list"),
    "codes-dtype": ({"codes": torch.zeros(16, 64)}, ArgumentTypeError, r"codes: got dtype float32.*of int4$"),
    "codes-int32": (
        {"codes": torch.zeros(16, 64, dtype=torch.int32)},
        ArgumentTypeError,
        r"codes: got dtype int32; .*: \(codes & 0x0F\)\.to\(torch\.uint8\)$",
    ),
    "codes-int8": (
        {"codes": torch.zeros(16, 64, dtype=torch.int8)},
        ArgumentTypeError,
        r"codes: got dtype int8; .* int4 \(two's complement\); .*: codes\.view\(torch\.uint8\) & 0x0F$",
    ),
    "codes-int8-numpy": (
        {"codes": np.zeros((16, 64), np.int8)},
        ArgumentTypeError,
        r"codes: got dtype int8; .*: codes\.view\(np\.uint8\) & 0x0F$",
    ),
    "codes-shape": ({"codes": torch.zeros(64, dtype=torch.uint8)}, ArgumentError, r"codes: got shape \(64,\)"),
    "codes-empty": ({"codes": torch.zeros(0, 64, dtype=torch.uint8)}, ArgumentError, r"codes: got shape \(0, 64\)"),
    "codes-device": (
        {"codes": torch.zeros(16, 64, dtype=torch.uint8, device="meta")},
        ArgumentError,
        r"codes: got device meta; allowed: cpu or cuda",
    ),
    "scale-shape": ({"scale": torch.ones(1, 16)}, ArgumentError, r"scale: got shape \(1, 16\)"),
    "scale-device": ({"scale": torch.ones(16, 1, device="meta")}, ArgumentError, r"scale: got device meta"),
    "scale-library": ({"scale": np.ones((16, 1), np.float32)}, ArgumentTypeError, r"scale: got ndarray"),
    "bias-shape": ({"bias": torch.ones(15)}, ArgumentError, r"bias: got shape \(15,\); allowed: \(16,\)"),
    "bias-dtype": ({"bias": torch.ones(16, dtype=torch.int64)}, ArgumentTypeError, r"bias: got dtype int64"),
    "bias-nan": ({"bias": torch.full((16,), torch.nan)}, ArgumentError, r"bias: got a value that is not finite"),
    "global-scale-shape": ({"global_scale": torch.ones(2)}, ArgumentError, r"global_scale: got shape \(2,\)"),
    "global-scale-nan": (
        {"global_scale": float("nan")},
        ArgumentError,
        r"global_scale: got a value that is not finite",
    ),
    "types-dict": ({"types": {"dtype": "int4"}}, ArgumentTypeError, r"types: got dict; allowed: a TypeConfig"),
}


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.int64(2)])
def test_numbers_of_numpy(number: Any) -> None:
    codes, types = torch.zeros(16, 64, dtype=torch.uint8), testing.make_types("uint4", k=64, zero_point="integer")
    packed = layout.pack(codes, number, types=types, zero=np.int64(3), global_scale=number)
    assert float(packed.global_scale) == float(number)
    assert bool((packed.scale == float(number)).all())


@pytest.mark.parametrize("dtype", ["M8[s]", object, bool, np.complex64])
def test_zero_points_are_numbers(dtype: Any) -> None:
    codes, types = np.zeros((16, 64), np.uint8), testing.make_types("uint4", k=64, zero_point="integer")
    with pytest.raises(ArgumentTypeError, match=r"zero: got dtype .*; allowed: integers"):
        layout.pack(codes, np.ones((16, 1), np.float16), types=types, zero=np.ones((16, 1)).astype(dtype))


@pytest.mark.parametrize("name", _BAD)
def test_bad_input(name: str) -> None:
    changes, error, message = _BAD[name]
    inputs: dict[str, Any] = {
        "codes": torch.zeros(16, 64, dtype=torch.uint8),
        "scale": torch.ones(16, 1),
        "types": testing.make_types("int4", k=64),
    }
    layout.pack(**inputs)
    with pytest.raises(error, match=message):
        layout.pack(**(inputs | changes))


@pytest.mark.parametrize("dtype", [w for w in dtypes.WEIGHT_TYPES if dtypes.parse(w).bits < 8])
def test_codes_out_of_range(dtype: str) -> None:
    types = testing.make_types(dtype, k=64, element_a="bfloat16")
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[3, 9] = 1 << types.bits
    with pytest.raises(
        ArgumentError, match=rf"codes: got {1 << types.bits} at \(3, 9\); allowed: 0 .. {(1 << types.bits) - 1}"
    ):
        layout.pack(codes, torch.ones(16, 1), types=types)


@pytest.mark.parametrize(("dtype", "code"), [("float8_e4m3", 0x7F), ("float8_e4m3", 0xFF), ("float8_e5m2", 0xFD)])
def test_codes_that_are_not_finite(dtype: str, code: int) -> None:
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[15, 63] = code
    with pytest.raises(ArgumentError, match=rf"codes: got 0x{code:02X} \(not finite\) at \(15, 63\)"):
        layout.pack(codes, torch.ones(16, 1), types=testing.make_types(dtype, k=64))


@pytest.mark.parametrize(("zero", "nearest"), [(-1.0, 0), (17.0, 16), (2.5, 2)])
def test_integer_zero_points_out_of_range(zero: float, nearest: int) -> None:
    types = testing.make_types("uint4", k=64)
    zeros = torch.zeros(16, 1)
    zeros[4] = zero
    with pytest.raises(ArgumentError, match=rf"zero: got {zero:g} at \(4, 0\).*nearest supported: {nearest}"):
        layout.pack(torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 1), types=types, zero=zeros)
    zeros[4] = torch.nan
    with pytest.raises(ArgumentError, match=r"zero: got nan at \(4, 0\)"):
        layout.pack(torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 1), types=types, zero=zeros)


def test_floating_zero_points_must_be_given() -> None:
    types = testing.make_types("uint4", k=64, zero_point="floating")
    with pytest.raises(ArgumentError, match=r"zero: got None"):
        layout.pack(torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 1), types=types)


@pytest.mark.parametrize(
    ("group_size", "k", "nearest"),
    [
        (24, 96, "16|32"),
        (128, 1728, "144"),
        (64, 1000, "-1"),
        (0, 64, "16"),
        (-2, 64, "-1"),
        (128, 64, "-1"),
    ],
)
def test_group_sizes_that_do_not_divide(group_size: int, k: int, nearest: str) -> None:
    types = dataclasses.replace(testing.make_types("nf4", k=k), group_size=group_size)
    with pytest.raises(ArgumentError, match=rf"group_size: got {group_size};.*nearest supported: ({nearest})$"):
        layout.pack(torch.zeros(16, k, dtype=torch.uint8), torch.ones(16, 1), types=types)


def test_types_without_a_kernel() -> None:
    types = TypeConfig(element_a="float16", element_b="float8_e7m0", element_d="float16", element_scale="float16")
    with pytest.raises(UnsupportedError, match=r"element_b: got float8_e7m0"):
        layout.pack(torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 1), types=types)


# --- The container ---


def _packed() -> layout.PackedWeight:
    types = testing.make_types("uint4", k=96, group_size=32, scale_dtype="float8_e4m3")
    return testing.random_problem(types, 1, 40, 96, bias=True, global_scale=True).packed


def test_it_is_frozen_and_independent_of_its_inputs() -> None:
    packed = _packed()
    with pytest.raises(dataclasses.FrozenInstanceError):
        packed.n = 3  # type: ignore[misc]
    bias = torch.ones(16)
    types = testing.make_types("int4", k=64)
    other = layout.pack(torch.zeros(16, 64, dtype=torch.uint8), torch.ones(16, 1), types=types, bias=bias)
    bias[0] = 7
    assert other.bias[0] == 1


def test_safetensors_round_trip(tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    packed = _packed()
    path = str(tmp_path / "weight.safetensors")
    save_file(packed.state_dict(), path, metadata=packed.metadata())
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        back = layout.PackedWeight.from_state_dict(tensors, file.metadata())
    assert (back.types, back.n, back.k) == (packed.types, 40, 96)
    for name, tensor in packed.state_dict().items():
        assert _same(getattr(back, name), tensor)


def test_copy_and_save() -> None:
    packed = _packed()
    packed.plans["a"] = object()
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    for other in (copy.deepcopy(packed), torch.load(file, weights_only=False)):
        assert other.plans == {}
        assert other.types == packed.types
        assert (other.data == packed.data).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t, m: t.update(data=t["data"][:1]), ArgumentError, r"data: got shape"),
        (lambda t, m: t.update(data=t["data"].float()), ArgumentTypeError, r"data: got dtype float32"),
        (lambda t, m: t.update(scale=t["scale"][:, :1]), ArgumentError, r"scale: got shape"),
        (lambda t, m: t.update(scale=t["scale"].half()), ArgumentTypeError, r"scale: got dtype float16"),
        (
            lambda t, m: t.update(data=t["data"].transpose(0, 1).contiguous().transpose(0, 1)),
            ArgumentError,
            r"contiguous",
        ),
        (lambda t, m: t.pop("zero"), ArgumentTypeError, r"zero: got NoneType"),
        (lambda t, m: t.pop("scale"), ArgumentError, r"tensors: got no 'scale'"),
        (lambda t, m: t.update(code=t["data"]), ArgumentError, r"tensors: got unknown 'code'"),
        (lambda t, m: t.update(bias=t["bias"].to("meta")), ArgumentError, r"bias: got device meta"),
        (lambda t, m: m.pop("format"), ArgumentError, r"metadata\['format'\]"),
        (lambda t, m: m.pop("n"), ArgumentError, r"metadata: got no 'n'"),
        (lambda t, m: m.update(n="4 0"), ArgumentError, r"metadata\['n'\]"),
        (lambda t, m: m.update(n="-40"), ArgumentError, r"n: got -40"),
        (lambda t, m: m.update(n="41000"), ArgumentError, r"data: got shape"),
        (lambda t, m: m.update(k="192"), ArgumentError, r"data: got shape"),
        (lambda t, m: m.update({"types.group_size": "17"}), ArgumentError, r"group_size: got 17"),
        (lambda t, m: m.update(k="999999999999999999"), ArgumentError, r"k: got 9+; allowed: an integer from 1 to"),
        (lambda t, m: m.update(k="9" * 4000), ArgumentError, r"k: got 9+; allowed: an integer from 1 to"),
        (lambda t, m: m.update(n="64" + "0" * 4000), ArgumentError, r"n: got 640+; allowed: an integer from 1 to"),
        (lambda t, m: m.update(n=None), ArgumentTypeError, r"metadata\['n'\]: got None"),
        (lambda t, m: m.update(n=40), ArgumentTypeError, r"metadata\['n'\]: got 40 \(int\)"),
        (lambda t, m: m.update({"types.element_a": []}), ArgumentTypeError, r"metadata\['types.element_a'\]: got \[\]"),
        (lambda t, m: t.update(data=[1]), ArgumentTypeError, r"data: got list"),
        (lambda t, m: t.update(data=t["data"].numpy()), ArgumentTypeError, r"data|scale: got"),
        (lambda t, m: t.update({1: t["data"]}), ArgumentError, r"tensors: got unknown 1"),
        (lambda t, m: t.update({k: v.to("meta") for k, v in t.items()}), ArgumentError, r"data: got device meta"),
        (lambda t, m: t.update(data=t["data"].to_sparse()), ArgumentError, r"data: got layout torch.sparse_coo"),
        (lambda t, m: t["scale"][0, 0].fill_(math.nan), ArgumentError, r"scale: got a value that is not finite at "),
        (lambda t, m: t["zero"][1, 1].fill_(math.inf), ArgumentError, r"zero: got a value that is not finite at "),
        (lambda t, m: t["bias"][3].fill_(math.nan), ArgumentError, r"bias: got a value that is not finite at \(3,\)"),
        (lambda t, m: m.update({"types.element_b": "int99"}), UnsupportedError, r"int99"),
        (lambda t, m: m.update({"types.element_zero": "none"}), ArgumentError, r"zero: got a tensor"),
    ],
)
def test_a_file_is_not_trusted(change: Any, error: type[Exception], message: str) -> None:
    packed = _packed()
    tensors, metadata = packed.state_dict(), packed.metadata()
    layout.PackedWeight.from_state_dict(tensors, metadata)
    change(tensors, metadata)
    with pytest.raises(error, match=message):
        layout.PackedWeight.from_state_dict(tensors, metadata)


def test_a_file_that_is_no_dict() -> None:
    packed = _packed()
    with pytest.raises(ArgumentTypeError, match=r"metadata: got NoneType; allowed: a dict"):
        layout.PackedWeight.from_state_dict(packed.state_dict(), None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"tensors: got list; allowed: a dict"):
        layout.PackedWeight.from_state_dict([], packed.metadata())  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"n: got NoneType None; allowed: an integer from 1 to"):
        dataclasses.replace(packed, n=None)
    assert type(dataclasses.replace(packed, n=np.int64(packed.n)).n) is int


@pytest.mark.parametrize("error", [ToolchainError, MissingKernelError])
def test_gpu_packing_without_a_kernel_goes_through_the_host(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    from humming_cutlass import _C, build, planner

    def fail(*_: Any, **__: Any) -> None:
        raise error("no kernel")

    monkeypatch.setattr(_C, "device_properties", lambda index: {})
    device = planner.Device(arch="sm_80", sm_count=108)
    monkeypatch.setattr(planner.Device, "from_properties", classmethod(lambda cls, properties: device))
    monkeypatch.setattr(build, "compile_kernels", fail)
    types = testing.make_types("int4", k=64)
    codes = torch.arange(64, dtype=torch.uint8).remainder(16).expand(16, 64).contiguous()
    assert (layout._pack_codes_cuda(codes, types) == layout.pack_codes(codes, types)).all()


def test_to_needs_torch() -> None:
    packed = _packed()
    assert packed.to("cpu") is packed
    assert packed.device == "cpu"
    types = testing.make_types("int4", k=64)
    numpy_packed = layout.pack(np.zeros((16, 64), np.uint8), np.ones((16, 1), np.float16), types=types)
    with pytest.raises(ArgumentTypeError, match="weight: got numpy arrays"):
        numpy_packed.to("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int3", "uint8", "float8_e4m3", "nf4"])
def test_gpu_packing_gives_the_same_bits(dtype: str) -> None:
    problem = testing.random_problem(testing.make_types(dtype, k=200), 1, 75, 200)
    zero = None if problem.zero is None else problem.zero.cuda()
    packed = layout.pack(problem.codes.cuda(), problem.scale.cuda(), types=problem.packed.types, zero=zero)
    assert packed.device.startswith("cuda")
    for name, tensor in problem.packed.state_dict().items():
        assert _same(getattr(packed, name).cpu(), tensor)
    assert (layout.unpack(packed)["codes"].cpu() == problem.codes).all()
    assert (problem.packed.to("cuda").data == packed.data).all()


@pytest.mark.parametrize(("value", "fits"), [(1.0, True), (0.0, True), (2.0**110, False), (2.0**-110, False)])
def test_scales_that_fit_are_those_of_rows_that_exist(value: float, fits: bool) -> None:
    """The SM90 mainloop folds group scales into bfloat16 weights; padding rows must not count."""
    types = testing.make_types("int4", k=64, element_a="bfloat16", group_size=32)
    scale = torch.ones(19, 2, dtype=torch.bfloat16)
    scale[18, 1] = value
    packed = layout.pack(torch.zeros(19, 64, dtype=torch.uint8), scale, types=types)
    assert packed.scales_fit is fits
    padded = packed.scale.clone()
    padded[-1, :, layout.SCALE_ROW_ORDER.index(3)] = math.nan
    assert dataclasses.replace(packed, scale=padded).scales_fit is fits


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("given", [None, 3.0, -0.5])
@pytest.mark.parametrize(
    ("dtype", "element", "factor", "moves"),
    [
        ("float8_e4m3", "float16", 2.0**-12, True),  # as weights of models have them
        ("int4", "float16", 2.0**9, True),  # too large
        ("int4", "float16", 2.0**-10, False),  # in range as they are
        ("float8_e4m3", "bfloat16", 2.0**-100, True),
    ],
)
def test_scales_out_of_range_give_a_power_of_two(
    dtype: str, element: str, factor: float, moves: bool, given: float | None, numpy: bool
) -> None:
    """So that the SM90 mainloop takes them: the weight is the same, bit by bit, and so is every product on the CPU."""
    types = testing.make_types(dtype, k=128, element_a=element, group_size=32)
    random = np.random.default_rng(1)
    scale = (random.integers(8, 16, (19, 4)) * np.float32(factor)).astype(np.float32)
    codes = random.integers(0, 8, (19, 128), dtype=np.uint8)
    tensors: list[Any] = [codes, scale] if numpy else [torch.from_numpy(codes), torch.from_numpy(scale)]
    packed = layout.pack(*tensors, types=types, global_scale=given)
    assert packed.scales_fit
    assert (packed.global_scale is not None) == (moves or given is not None)
    found = layout.unpack(packed)["scale"]
    found = np.asarray(found, np.float64) if numpy else found.double().numpy()
    total = found * (1.0 if packed.global_scale is None else float(packed.global_scale[0]))
    assert (total == scale.astype(np.float64) * (1.0 if given is None else given)).all()
    mantissas = np.frexp(found)[0]
    assert (mantissas == np.frexp(scale.astype(np.float64))[0]).all()


@pytest.mark.parametrize("exponents", [(-14, 10), (-24, 0), (-14, 0)])
def test_scales_too_far_apart_stay_as_they_are(exponents: tuple[int, int]) -> None:
    types = testing.make_types("float8_e4m3", k=64, element_a="float16", group_size=32)
    scale = 2.0 ** torch.tensor([exponents] * 16, dtype=torch.float32)
    packed = layout.pack(torch.zeros(16, 64, dtype=torch.uint8), scale, types=types)
    assert not packed.scales_fit
    assert packed.global_scale is None
    assert (layout.unpack(packed)["scale"] == scale.half()).all()


@pytest.mark.parametrize("parameter", ["scale", "global_scale"])
@pytest.mark.parametrize("value", [True, 10**400])
def test_numbers_that_are_none(parameter: str, value: Any) -> None:
    words: dict[str, Any] = {"scale": 1.0, parameter: value}
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"{parameter}: got"):
        layout.pack(codes, words.pop("scale"), types=testing.make_types("int4", k=64), **words)
    layer = HummingLayer(16, 64, "int4")
    words = {"scale": torch.ones(16, 1).half(), "global_scale": 1.0, parameter: value}
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"{parameter}: got"):
        layer.load_quantized(codes, **words)
