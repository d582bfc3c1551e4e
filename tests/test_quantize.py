"""Quantization by rounding: against an independent search for the nearest value, and at the edges."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from humming_cutlass import dtypes, layout, ops, quantize, reference, testing
from humming_cutlass.config import TypeConfig
from humming_cutlass.errors import ArgumentError, ArgumentTypeError, UnsupportedError

SCALES = ("float16", "bfloat16", "float32", "float8_e4m3", "float8_e5m2", "float8_e8m0")


def _dequantized(q: quantize.QuantizedWeight) -> np.ndarray:
    return reference.dequantize(
        q.codes,
        q.scale,
        dtype=q.types.element_b,
        group_size=q.types.group_size,
        zero=q.zero,
        global_scale=q.global_scale,
    )


def _spread(x: np.ndarray, k: int) -> np.ndarray:
    return np.repeat(x, k // x.shape[1], axis=1)


@pytest.mark.parametrize("where", ["torch", "numpy"])
@pytest.mark.parametrize(
    ("dtype", "oracle"),
    [
        ("float8_e4m3", "float8_e4m3fn"),
        ("float8_e5m2", "float8_e5m2"),
        ("float6_e3m2", "float6_e3m2fn"),
        ("float6_e2m3", "float6_e2m3fn"),
        ("float4_e2m1", "float4_e2m1fn"),
    ],
)
def test_ties_go_to_the_even_code(dtype: str, oracle: str, where: str) -> None:
    """Every value, every tie and its float32 neighbours, against ml_dtypes; the scale is 1."""
    values = np.unique(dtypes.parse(dtype).values()[np.isfinite(dtypes.parse(dtype).values())]).astype(np.float32)
    ties = (values[1:] + values[:-1]) / 2
    row = np.concatenate([values, ties, np.nextafter(ties, -np.inf), np.nextafter(ties, np.inf)]).astype(np.float32)
    weight = row[None, :]
    q = quantize.quantize(
        torch.from_numpy(weight) if where == "torch" else weight, {"dtype": dtype, "scale_dtype": "float32"}
    )
    assert float(q.scale[0, 0]) == 1
    expected = weight.astype(getattr(ml_dtypes, oracle)).astype(np.float64)
    assert (_dequantized(q) == expected).all()


@pytest.mark.parametrize("dtype", list(dtypes.WEIGHT_TYPES))
@pytest.mark.parametrize("group_size", [-1, 32])
def test_codes_are_the_nearest(dtype: str, group_size: int) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(1))
    config = {"dtype": dtype, "group_size": group_size, "scale_dtype": "float32"}
    q = quantize.quantize(weight, config, element_a="bfloat16")
    scale = _spread(reference.to_float64(q.scale), 96)
    zero = 0.0 if q.zero is None else _spread(reference.to_float64(q.zero), 96)
    values = dtypes.parse(dtype).values()
    values = values[np.isfinite(values)]
    possible = (values[None, None, :] - (zero[..., None] if q.zero is not None else 0)) * scale[..., None]
    best = np.abs(possible - reference.to_float64(weight)[..., None]).min(axis=2)
    error = np.abs(_dequantized(q) - reference.to_float64(weight))
    # Float32 arithmetic may take the other side of a tie.
    assert (error <= best + 1e-6 * np.abs(scale) * max(np.abs(values).max(), 1)).all()


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.008), ("int6", 0.03), ("int4", 0.13), ("uint4", 0.12)])
@pytest.mark.parametrize("scale", SCALES)
def test_error_is_what_the_width_gives(dtype: str, bound: float, scale: str) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2)) * 0.02
    q = quantize.quantize(weight, {"dtype": dtype, "group_size": 32, "scale_dtype": scale, "global_scale": True})
    error = testing.relative_error(_dequantized(q), reference.to_float64(weight))
    # An 8-bit float scale is off by up to 1/16 (e5m2 1/8), a power of two by up to 2.
    assert error < bound * {"float8_e4m3": 1.6, "float8_e5m2": 2.6, "float8_e8m0": 2}.get(scale, 1)


@pytest.mark.parametrize("scale", SCALES)
def test_codes_follow_the_rounded_scale(scale: str) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    q = quantize.quantize(weight, {"dtype": "int8", "scale_dtype": scale})
    assert str(q.scale.dtype).startswith(f"torch.{scale}")
    rounded = np.clip(np.round(reference.to_float64(weight) / reference.to_float64(q.scale)), -128, 127)
    assert (dtypes.parse("int8").values()[q.codes.numpy()] == rounded).mean() > 0.999


@pytest.mark.parametrize("dtype", ["int2", "int4", "int8", "float4_e2m1", "float8_e4m3", "nf4", "uint4"])
def test_power_of_two_scales_clip_nothing(dtype: str) -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(4))
    q = quantize.quantize(weight, {"dtype": dtype, "group_size": 32, "scale_dtype": "float8_e8m0"})
    w, scale = reference.to_float64(weight), _spread(reference.to_float64(q.scale), 128)
    values = dtypes.parse(dtype).values()
    finite = np.sort(values[np.isfinite(values)])
    step = np.diff(finite).max()
    assert (np.abs(_dequantized(q) - w) <= step * scale * (0.5 if q.zero is None else 1.0) + 1e-6).all()
    assert np.isin(np.log2(scale) % 1, 0).all()
    # And they are the least: half of it would clip.
    if dtype.startswith("int"):
        top = finite.max()
        largest = np.abs(w.reshape(64, -1, 32)).max(axis=2)
        assert (largest > top * reference.to_float64(q.scale) / 2).all()


@pytest.mark.parametrize("scale", ["float8_e4m3", "float8_e5m2"])
@pytest.mark.parametrize("magnitude", [1e-6, 1.0, 1e6])
def test_global_scale_fills_the_range_of_8_bit_scales(scale: str, magnitude: float) -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(5)) * magnitude
    q = quantize.quantize(weight, {"dtype": "int4", "group_size": 16, "scale_dtype": scale, "global_scale": True})
    assert q.global_scale is not None
    assert q.global_scale.shape == (1,)
    assert q.global_scale.dtype == torch.float32
    assert float(q.scale.float().max()) == dtypes.parse(scale).max
    assert testing.relative_error(_dequantized(q), reference.to_float64(weight)) < 0.25


def test_global_scale_keeps_float16_scales_in_range() -> None:
    weight = torch.randn(8, 32) * 1e8
    with pytest.raises(ArgumentError, match=r"weight: got values that need a scale of .*float16.*global_scale True"):
        quantize.quantize(weight, {"dtype": "int4", "scale_dtype": "float16"})
    q = quantize.quantize(weight, {"dtype": "int4", "scale_dtype": "float16", "global_scale": True})
    assert testing.relative_error(_dequantized(q), reference.to_float64(weight)) < 0.2


@pytest.mark.parametrize("dtype", list(dtypes.WEIGHT_TYPES))
@pytest.mark.parametrize("scale", SCALES)
def test_b6_zeros_and_tiny_values(dtype: str, scale: str) -> None:
    weight = torch.zeros(5, 64)
    weight[1, 3] = 1e-30
    weight[2] = 2.0**-24
    weight[3] = 1.0
    weight[4, :2] = torch.tensor([-1e-45, 1e-45])
    for global_scale in (False, True):
        config = {"dtype": dtype, "scale_dtype": scale, "global_scale": global_scale}
        q = quantize.quantize(weight, config, element_a="bfloat16")
        value = _dequantized(q)
        assert np.isfinite(value).all()
        assert (value[0] == 0).all()
        if scale == "float16":
            # 2^-24 is the least scale; only types with huge exponents resolve anything below it.
            assert (np.abs(value[1]) <= 2e-30).all()
            assert (value[1] == 0).all() or dtypes.parse(dtype).exponent_bits == 7
        if dtype not in ("int1", "uint1"):
            assert (np.abs(value[3] - 1) <= 0.51).all()


def test_b6_half_subnormals() -> None:
    weight = (torch.arange(64).float() * 2.0**-24).half().reshape(1, 64)
    q = quantize.quantize(weight, {"dtype": "int8"})
    assert (_dequantized(q) == reference.to_float64(weight)).all()


@pytest.mark.parametrize("zero", ["integer", "floating"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_asymmetric_range(zero: str, bits: int) -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.rand(16, 64, generator=generator) * 3 - 1
    q = quantize.quantize(
        weight, {"dtype": f"uint{bits}", "group_size": 32, "zero_point": zero, "scale_dtype": "float32"}
    )
    assert q.zero is not None
    if zero == "integer":
        assert q.zero.dtype == torch.int16
        assert 0 <= int(q.zero.min()) <= int(q.zero.max()) <= 1 << bits
    scale = _spread(reference.to_float64(q.scale), 64)
    assert (np.abs(_dequantized(q) - reference.to_float64(weight)) <= scale * 1.01).all()
    if bits in (4, 5, 6):
        assert len(q.codes.unique()) == 1 << bits


@pytest.mark.parametrize("value", [5.0, -3.0, 1e-3])
@pytest.mark.parametrize("element", ["float16", "bfloat16", "float32"])
def test_floating_zero_of_a_constant_group(value: float, element: str) -> None:
    config = {"dtype": "uint4", "zero_point": "floating", "zero_dtype": element, "scale_dtype": "float32"}
    q = quantize.quantize(torch.full((2, 32), value), config)
    assert _dequantized(q) == pytest.approx(np.full((2, 32), value), rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["torch", "numpy"])
def test_not_finite_weight_is_named(bad: float, where: str) -> None:
    weight = torch.zeros(3000, 2000)
    weight[2500, 1234] = bad
    weight[2700, 7] = bad
    with pytest.raises(ArgumentError, match=rf"weight: got {bad} at \(n, k\) = \(2500, 1234\)"):
        quantize.quantize(weight if where == "torch" else weight.numpy(), "int4")


@pytest.mark.parametrize("dtype", ["int1", "int4", "uint4", "float6_e3m2", "nf4"])
@pytest.mark.parametrize("scale", SCALES)
def test_numpy_and_torch_agree(dtype: str, scale: str) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(7))
    config = {"dtype": dtype, "group_size": 48, "scale_dtype": scale, "global_scale": True}
    a, b = quantize.quantize(weight, config), quantize.quantize(weight.numpy(), config)
    assert isinstance(b.codes, np.ndarray)
    assert (a.codes.numpy() == b.codes).all()
    assert (reference.to_float64(a.scale) == reference.to_float64(b.scale)).all()
    assert (a.zero is None) == (b.zero is None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_weight_dtypes(dtype: str) -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(8)).to(getattr(torch, dtype))
    q = quantize.quantize(weight, {"dtype": "int8", "scale_dtype": "float32"})
    assert testing.relative_error(_dequantized(q), reference.to_float64(weight)) < 0.01
    if dtype == "bfloat16":
        same = quantize.quantize(
            weight.float().numpy().astype(ml_dtypes.bfloat16), {"dtype": "int8", "scale_dtype": "float32"}
        )
        assert (same.codes == q.codes.numpy()).all()


def test_tensor_strategy_has_one_scale() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(9))
    for dtype in ("int6", "uint6"):
        q = quantize.quantize(weight, {"dtype": dtype, "strategy": "tensor"})
        assert q.scale.shape == (1,)
        assert testing.relative_error(_dequantized(q), reference.to_float64(weight)) < 0.05
        packed = layout.pack(q.codes, q.scale, types=q.types, zero=q.zero)
        y = ops.gemm(torch.eye(32).half(), packed)
        assert testing.relative_error(y, reference.to_float64(weight).T) < 0.05


def test_strides_and_gradients_do_not_matter() -> None:
    weight = torch.randn(32, 8).t().requires_grad_()
    q = quantize.quantize(weight, "int6")
    assert (q.codes == quantize.quantize(weight.detach().contiguous(), "int6").codes).all()
    assert not q.scale.requires_grad


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([w for w in dtypes.WEIGHT_TYPES if w not in ("int1",)]),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16),
)
def test_quantizing_twice_changes_little(dtype: str, row: list[float]) -> None:
    """What is representable stays: the largest value of a group maps onto itself or its zero point's grid."""
    weight = torch.tensor([row], dtype=torch.float32)
    q = quantize.quantize(weight, {"dtype": dtype, "scale_dtype": "float32"}, element_a="bfloat16")
    value = _dequantized(q)
    assert np.isfinite(value).all()
    span = max(max(row), 0.0) - min(min(row), 0.0)
    assert (np.abs(value - reference.to_float64(weight)) <= span * 1.001 + 1e-30).all()


def _types(**words: Any) -> TypeConfig:
    return dataclasses.replace(testing.make_types("int4", k=64), **words)


@pytest.mark.parametrize(
    ("weight", "config", "error", "message"),
    [
        ([[1.0]], "int4", ArgumentTypeError, r"weight: got list; allowed: a torch tensor or a numpy array"),
        (torch.ones(4, 4, dtype=torch.int32), "int4", ArgumentTypeError, r"weight: got dtype int32"),
        (torch.ones(4), "int4", ArgumentError, r"weight: got shape \(4,\)"),
        (torch.ones(0, 4), "int4", ArgumentError, r"weight: got shape \(0, 4\)"),
        (torch.ones(4, 64), "int9", UnsupportedError, r"int9.*nearest supported"),
        (
            torch.ones(4, 64),
            {"dtype": "int4", "group_size": 24},
            ArgumentError,
            r"group_size: got 24.*supported: (16|32)",
        ),
        (torch.ones(4, 64), {"dtype": "int4", "scale_dtype": "int8"}, UnsupportedError, r"element_scale: got int8"),
        (torch.ones(4, 64), {"dtype": "int4", "group": 16}, ArgumentError, r"unknown key 'group'"),
        (torch.ones(4, 64), {"dtype": "int4", "strategy": "tensor", "group_size": 16}, ArgumentError, r"group_size"),
        (torch.ones(4, 64), 4, ArgumentTypeError, r"weight_config: got int"),
        (torch.ones(4, 64), "float16", UnsupportedError, r"element_b: got float16"),
        (torch.ones(4, 64), "float8_e8m0", UnsupportedError, r"element_b: got float8_e8m0"),
        (torch.ones(4, 64), "float8_e7m0", UnsupportedError, r"element_b: got float8_e7m0.*element_a bfloat16"),
        (torch.ones(4, 64), _types(element_zero="integer"), UnsupportedError, r"element_zero: got integer.*uint4"),
        (torch.ones(4, 64), _types(element_a="float32"), UnsupportedError, r"element_a: got float32"),
        (torch.ones(4, 64), _types(element_scale="int8"), UnsupportedError, r"element_scale: got int8"),
        (torch.ones(4, 64), _types(group_size=8), ArgumentError, r"group_size: got 8"),
        (torch.full((1, 64), 3e38), {"dtype": "int1", "scale_dtype": "float16"}, ArgumentError, r"scale of 3e\+38"),
    ],
)
def test_bad_input(weight: object, config: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quantize.quantize(weight, config)  # type: ignore[arg-type]


def test_strategy_must_fit_the_types() -> None:
    types = testing.make_types("int4", k=64, group_size=32)
    with pytest.raises(ArgumentError, match=r"group_size: got 32; allowed: -1 with strategy 'channel'"):
        quantize.quantize(torch.ones(16, 64), types, strategy="channel")


def test_what_is_quantized_can_be_packed() -> None:
    """The same types are refused by both, so that no time is lost on a weight that nothing can use."""
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    whole = quantize.quantize(weight, _types(group_size=64))
    assert (whole.codes == quantize.quantize(weight, _types()).codes).all()
    layout.pack(whole.codes, whole.scale, types=whole.types)
    with pytest.raises(ArgumentTypeError, match=r"global_scale: got float; allowed: True, False or None"):
        quantize.quantize(weight, _types(), global_scale=2.0)  # type: ignore[arg-type]
