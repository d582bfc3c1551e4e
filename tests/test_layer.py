"""`HummingLayer`: its life, its buffers, its state dict, its errors."""

from __future__ import annotations

import copy
import gc
import io
import json
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from humming_cutlass import layout, ops, quantize, reference, testing
from humming_cutlass.errors import ArgumentError, ArgumentTypeError, StateError, UnsupportedError
from humming_cutlass.layer import HummingLayer

N, K = 40, 96


def _weight(n: int = N, k: int = K) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0))


def _inputs(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*(shape or (5, K)), generator=torch.Generator().manual_seed(1)).to(dtype)


def _ready(config: Any = "int6", **words: Any) -> HummingLayer:
    layer = HummingLayer(N, K, config, **words)
    layer.load_from_unquantized(_weight(), torch.ones(N) if words.get("bias") else None)
    layer.transform()
    return layer


def test_the_example() -> None:
    layer = HummingLayer(shape_n=256, shape_k=512, weight_config={"dtype": "int6"}, torch_dtype=torch.float16)
    weight = _weight(256, 512).half()
    layer.load_from_unquantized(weight)
    layer.transform()
    inputs = _inputs(128, 512)
    output = layer(inputs)
    assert output.shape == (128, 256)
    assert output.dtype == torch.float16
    assert testing.relative_error(output, reference.gemm(inputs, reference.to_float64(weight))) < 0.05


@pytest.mark.parametrize("torch_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("output_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        "int8",
        {"dtype": "uint4", "group_size": 32},
        {"dtype": "uint4", "group_size": 32, "zero_point": "floating", "zero_dtype": "float32"},
        {"dtype": "float4_e2m1", "group_size": 16, "scale_dtype": "float8_e4m3", "global_scale": True},
        {"dtype": "float4_e2m1", "group_size": 32, "scale_dtype": "float8_e8m0"},
        {"dtype": "int8", "strategy": "tensor"},
        {"dtype": "nf4", "group_size": 48},
    ],
)
def test_configurations(torch_dtype: torch.dtype, output_dtype: torch.dtype | None, config: Any) -> None:
    layer = _ready(config, torch_dtype=torch_dtype, output_dtype=output_dtype, bias=True)
    x = _inputs(3, 7, K, dtype=torch_dtype)
    y = layer(x)
    assert y.shape == (3, 7, N)
    assert y.dtype == (output_dtype or torch_dtype)
    q = quantize.quantize(
        _weight(),
        layer.types,
        strategy=layer.weight_config.strategy,
        global_scale=layer.weight_config.global_scale,
    )
    weight = reference.dequantize(
        q.codes,
        q.scale,
        dtype=layer.types.element_b,
        group_size=layer.types.group_size,
        zero=q.zero,
        global_scale=q.global_scale,
    )
    expected = reference.gemm(x, weight, torch.ones(N)).reshape(21, N)
    bias = torch.ones(N)
    testing.check_close(y.reshape(21, N), expected, x.reshape(21, K), weight, bias, layer.types.element_d)


def test_load_quantized_does_not_requantize() -> None:
    types = testing.make_types("uint4", k=K, group_size=32, zero_point="floating", zero_dtype="float32")
    problem = testing.random_problem(types, 5, N, K, bias=True, global_scale=True)
    config = {"dtype": "uint4", "group_size": 32, "zero_point": "floating", "zero_dtype": "float32"}
    layer = HummingLayer(N, K, config, bias=True)
    layer.load_quantized(problem.codes, problem.scale, problem.zero, problem.global_scale, problem.bias)
    layer.transform()
    testing.check_equal(layer(problem.a), ops.gemm(problem.a, problem.packed))
    layer = HummingLayer(N, K, "int4")
    layer.load_quantized(torch.zeros(N, K, dtype=torch.uint8), torch.ones(N, 1), global_scale=0.5)
    layer.transform()
    assert layer.state_dict()["global_scale"].tolist() == [0.5]


def test_out_and_leading_dimensions() -> None:
    layer = _ready()
    x = _inputs(2, 3, K)
    out = torch.empty(2, 3, N, dtype=torch.float16)
    assert layer(x, out=out) is out
    testing.check_equal(out, layer(x))
    assert layer(x[0, 0]).shape == (N,)
    assert layer(x[:0]).shape == (0, 3, N)


def test_order_of_calls() -> None:
    layer = HummingLayer(N, K)
    with pytest.raises(StateError, match=r"forward: got a layer that is not transformed.*load_from_unquantized"):
        layer(_inputs())
    with pytest.raises(StateError, match=r"transform: got a layer without a weight"):
        layer.transform()
    layer.load_from_unquantized(_weight())
    with pytest.raises(StateError, match=r"forward: got a layer that is not transformed.*transform\(\)"):
        layer(_inputs())
    with pytest.raises(StateError, match=r"state_dict: got a loaded layer before transform"):
        layer.state_dict()
    layer.load_from_unquantized(_weight() * 2)  # the last load counts
    layer.transform()
    y = layer(_inputs())
    assert testing.relative_error(y, reference.gemm(_inputs(), reference.to_float64(_weight() * 2))) < 0.05
    for call in (
        lambda: layer.load_from_unquantized(_weight()),
        lambda: layer.load_quantized(torch.zeros(N, K, dtype=torch.uint8), torch.ones(N, 1)),
        layer.transform,
    ):
        with pytest.raises(StateError, match="transformed already"):
            call()
    testing.check_equal(layer(_inputs()), y)


_BAD_LOADS: dict[str, tuple[Any, type[Exception], str]] = {
    "weight-shape": (lambda x: x.load_from_unquantized(_weight(K, N)), ArgumentError, r"weight: got shape \(96, 40\)"),
    "weight-dtype": (lambda x: x.load_from_unquantized(_weight().int()), ArgumentTypeError, r"weight: got dtype int32"),
    "weight-type": (lambda x: x.load_from_unquantized(_weight().numpy()), ArgumentTypeError, r"weight: got ndarray"),
    "weight-nan": (
        lambda x: x.load_from_unquantized(_weight().index_fill(1, torch.tensor(3), torch.nan)),
        ArgumentError,
        r"weight: got nan at \(n, k\) = \(0, 3\)",
    ),
    "bias": (lambda x: x.load_from_unquantized(_weight(), torch.ones(N)), ArgumentError, r"bias: got a tensor.*None"),
    "codes-shape": (
        lambda x: x.load_quantized(torch.zeros(N, K + 1, dtype=torch.uint8), torch.ones(N, 1)),
        ArgumentError,
        r"codes: got shape \(40, 97\)",
    ),
    "codes-dtype": (lambda x: x.load_quantized(_weight(), torch.ones(N, 1)), ArgumentTypeError, r"codes: got dtype"),
    "codes-range": (
        lambda x: x.load_quantized(torch.full((N, K), 64, dtype=torch.uint8), torch.ones(N, 1)),
        ArgumentError,
        r"codes: got 64 at \(0, 0\); allowed: 0 .. 63",
    ),
    "scale-shape": (
        lambda x: x.load_quantized(torch.zeros(N, K, dtype=torch.uint8), torch.ones(N, 2)),
        ArgumentError,
        r"scale: got shape \(40, 2\)",
    ),
    "scale-lossy": (
        lambda x: x.load_quantized(torch.zeros(N, K, dtype=torch.uint8), torch.full((N, 1), 0.1)),
        ArgumentError,
        r"scale: got 0.1.*float16 holds exactly; nearest supported: scales .* of type float32",
    ),
    "zero": (
        lambda x: x.load_quantized(torch.zeros(N, K, dtype=torch.uint8), torch.ones(N, 1), torch.ones(N, 1)),
        ArgumentError,
        r"zero: got zero points; allowed: None",
    ),
    "global-scale": (
        lambda x: x.load_quantized(torch.zeros(N, K, dtype=torch.uint8), torch.ones(N, 1), global_scale="1"),
        ArgumentTypeError,
        r"global_scale: got str",
    ),
}


@pytest.mark.parametrize("name", _BAD_LOADS)
def test_bad_loads_leave_nothing_behind(name: str) -> None:
    call, error, message = _BAD_LOADS[name]
    layer = HummingLayer(N, K)
    with pytest.raises(error, match=message):
        call(layer)
    assert not layer.is_loaded
    layer.load_from_unquantized(_weight())
    layer.transform()
    testing.check_equal(layer(_inputs()), _ready()(_inputs()))


def test_missing_or_wrong_bias() -> None:
    layer = HummingLayer(N, K, bias=True)
    with pytest.raises(ArgumentError, match=r"bias: got None; allowed: a tensor"):
        layer.load_from_unquantized(_weight())
    with pytest.raises(ArgumentError, match=r"bias: got shape \(41,\); allowed: \(40,\)"):
        layer.load_from_unquantized(_weight(), torch.ones(N + 1))


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.zeros(5, K), ArgumentTypeError, r"a: got dtype float32; allowed: float16"),
        (torch.zeros(5, K + 1).half(), ArgumentError, r"a: got shape \(5, 97\)"),
        (torch.zeros(5, K, device="meta").half(), ArgumentError, r"a: got device meta"),
        ([1.0], ArgumentTypeError, r"a: got list"),
        (torch.zeros(5, K).half().requires_grad_(), ArgumentError, r"gradient"),
    ],
)
def test_bad_inputs(x: Any, error: type[Exception], message: str) -> None:
    layer = _ready()
    with pytest.raises(error, match=message):
        layer(x)


@pytest.mark.parametrize(
    ("arguments", "words", "error", "message"),
    [
        ((0, K), {}, ArgumentError, r"shape_n: got 0; allowed: an integer from 1 to 1073676288; nearest supported: 1"),
        ((16, 2**30), {}, ArgumentError, r"shape_k: got 1073741824; allowed: .*; nearest supported: 1073676288"),
        ((N, -1), {}, ArgumentError, r"shape_k: got -1"),
        ((N, 1.5), {}, ArgumentTypeError, r"shape_k: got float"),
        ((True, K), {}, ArgumentTypeError, r"shape_n: got bool"),
        ((N, K), {"bias": torch.ones(N)}, ArgumentTypeError, r"bias: got Tensor; allowed: True or False"),
        ((N, K), {"bias": 1}, ArgumentTypeError, r"bias: got int"),
        ((N, K), {"batch_invariant": 1}, ArgumentTypeError, r"batch_invariant: got int; allowed: True or False"),
        ((N, K, {"dtype": "int4", "global_scale": 1.0}), {}, ArgumentTypeError, r"global_scale: got 1.0 \(float\)"),
        ((N, K, {"dtype": "int4", "group_size": "32"}), {}, ArgumentTypeError, r"group_size: got str '32'"),
        ((N, K, "int9"), {}, UnsupportedError, r"int9"),
        (
            (N, K, {"dtype": "int4", "group_size": 40}),
            {},
            ArgumentError,
            r"group_size: got 40.*: (32|48)$",
        ),
        ((N, K, {"dtype": "int4", "bits": 4}), {}, ArgumentError, r"unknown key 'bits'"),
        ((N, K, {}), {}, ArgumentError, r"no 'dtype'"),
        ((N, K, {"dtype": "int4", "scale_dtype": "int8"}), {}, UnsupportedError, r"element_scale: got int8"),
        ((N, K, {"dtype": "int4", "zero_point": "integer"}), {}, UnsupportedError, r"element_zero.*uint4"),
        ((N, K, "float8_e7m0"), {}, UnsupportedError, r"float8_e7m0.*element_a bfloat16"),
        (
            (N, K),
            {"torch_dtype": torch.float32},
            UnsupportedError,
            r"torch_dtype: got torch.float32; .*: torch.float16",
        ),
        ((N, K), {"torch_dtype": "float16"}, ArgumentTypeError, r"torch_dtype: got 'float16'"),
        (
            (N, K),
            {"output_dtype": torch.int8},
            UnsupportedError,
            r"output_dtype: got torch.int8; allowed: torch.float16, .*",
        ),
    ],
)
def test_bad_construction(arguments: Any, words: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HummingLayer(*arguments, **words)


# --- Buffers ---


def test_casts_move_the_layer_and_keep_the_format() -> None:
    for config in ("int6", {"dtype": "float4_e2m1", "group_size": 16, "scale_dtype": "float8_e4m3"}):
        layer = _ready(config, bias=True)
        x, before = _inputs(), {name: tensor.dtype for name, tensor in layer.state_dict().items()}
        y = layer(x)
        for dtype in (torch.float16, torch.float32, torch.bfloat16, torch.float64):
            layer.to(dtype)
            assert {name: tensor.dtype for name, tensor in layer.state_dict().items()} == before
            testing.check_equal(layer(x), y)
    loaded = HummingLayer(N, K)
    loaded.load_from_unquantized(_weight())
    loaded.bfloat16()
    loaded.transform()
    testing.check_equal(loaded(_inputs()), _ready()(_inputs()))


def test_it_moves_before_and_after_loading() -> None:
    layer = HummingLayer(N, K).to("meta")
    assert layer.device.type == "meta"
    assert layer.to_empty(device="cpu").device.type == "cpu"
    layer.load_from_unquantized(_weight())
    layer.transform()
    moved = copy.deepcopy(layer).to("meta")
    assert moved.data.device.type == "meta"
    with pytest.raises(ArgumentError, match=r"a: got device cpu; allowed: meta"):
        moved(_inputs())
    assert layer.device.type == "cpu"


@pytest.mark.gpu
def test_it_works_on_a_gpu() -> None:
    expected = _ready(bias=True)(_inputs())
    before = HummingLayer(N, K, bias=True).cuda()
    before.load_from_unquantized(_weight(), torch.ones(N))
    before.transform(progress=False)
    loaded = HummingLayer(N, K, bias=True)
    loaded.load_from_unquantized(_weight(), torch.ones(N))
    loaded.cuda().transform(progress=False)
    for layer in (before, loaded, _ready(bias=True).cuda()):
        assert layer.device.type == "cuda"
        y = layer(_inputs().cuda())
        assert testing.relative_error(y, reference.to_float64(expected)) < 1e-3
        with pytest.raises(ArgumentError, match=r"a: got .*(cpu|CPU); allowed: "):
            layer(_inputs())
        testing.check_equal(layer.cpu()(_inputs()), expected)


def test_copies_are_independent() -> None:
    layer = _ready()
    y = layer(_inputs())
    other = copy.deepcopy(layer)
    layer.data.zero_()
    testing.check_equal(other(_inputs()), y)
    file = io.BytesIO()
    torch.save(other, file)
    file.seek(0)
    testing.check_equal(torch.load(file, weights_only=False)(_inputs()), y)


def test_it_has_no_parameters_and_prints_itself() -> None:
    layer = HummingLayer(N, K, {"dtype": "int4", "group_size": 32}, bias=True)
    assert list(layer.parameters()) == []
    assert "shape_n=40, shape_k=96, dtype=int4, group_size=32, torch_dtype=torch.float16, bias=True, empty" in repr(
        layer
    )
    assert "transformed" in repr(_ready())
    assert "batch_invariant" not in repr(layer)
    assert "bias=False, batch_invariant=True, empty" in repr(HummingLayer(N, K, batch_invariant=True))


# --- State dicts ---


def test_state_dict_round_trip() -> None:
    model = torch.nn.Sequential(_ready({"dtype": "uint4", "group_size": 32}, bias=True), torch.nn.ReLU())
    y = model(_inputs())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    fresh = torch.nn.Sequential(HummingLayer(N, K, {"dtype": "uint4", "group_size": 32}, bias=True), torch.nn.ReLU())
    assert fresh.state_dict() == {}
    result = fresh.load_state_dict(state)
    assert result.missing_keys == result.unexpected_keys == []
    testing.check_equal(fresh(_inputs()), y)
    state["0.data"].zero_()  # the layer has a copy
    testing.check_equal(fresh(_inputs()), y)
    # Into a layer that has a weight already.
    other = torch.nn.Sequential(_ready({"dtype": "uint4", "group_size": 32}, bias=True), torch.nn.ReLU())
    other[0].data.zero_()
    other.load_state_dict(fresh.state_dict())
    testing.check_equal(other(_inputs()), y)


def test_safetensors(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    layer = _ready({"dtype": "float4_e2m1", "group_size": 16, "scale_dtype": "float8_e4m3", "global_scale": True})
    save_file(layer.state_dict(), str(tmp_path / "layer.safetensors"))
    fresh = HummingLayer(
        N, K, {"dtype": "float4_e2m1", "group_size": 16, "scale_dtype": "float8_e4m3", "global_scale": True}
    )
    fresh.load_state_dict(load_file(str(tmp_path / "layer.safetensors")))
    testing.check_equal(fresh(_inputs()), layer(_inputs()))


def _text(metadata: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(metadata).encode()), dtype=torch.uint8)


def _bytes(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(data=s["data"][:1].clone()), r"data: got shape"),
        (lambda s: s.update(data=s["data"].float()), r"data: got dtype float32"),
        (lambda s: s.update(scale=s["scale"].float()), r"scale: got dtype float32"),
        (lambda s: s.update(format=_text({})), r"format: got None"),
        (lambda s: s.update(format=_text([1])), r"got \[1\]"),
        (lambda s: s.update(format=torch.zeros(4, dtype=torch.uint8)), r"format: got text that is no JSON"),
        (lambda s: s.update(format=torch.zeros(4)), r"format: got another tensor"),
        (lambda s: s.update(format=_bytes(b"[" * 4096)), r"format: got text that is no JSON"),
        (lambda s: s.update(format=_bytes(b"{}").reshape(1, 2)), r"format: got another tensor"),
        (lambda s: s.update(format=s["format"].to("meta")), r"format: got device meta"),
        (lambda s: s.update(format="{}"), r"format: got str; allowed: a torch.Tensor"),
        (lambda s: s.update(data=[1, 2]), r"data: got list; allowed: a torch.Tensor"),
        (lambda s: s.update(data=s["data"].numpy()), r"data: got ndarray; allowed: a torch.Tensor"),
        (lambda s: s.update(scale=None), r"scale: got NoneType"),
        (lambda s: s.update(data=s["data"].to("meta")), r"data: got device meta"),
        (lambda s: s.update(data=s["data"].to_sparse()), r"data: got layout torch.sparse_coo"),
        (lambda s: s.update(scale=s["scale"] * torch.nan), r"scale: got a value that is not finite"),
        (lambda s: s.pop("data"), r"Missing key\(s\).*data"),
        (lambda s: s.pop("format"), r"Missing key\(s\).*format"),
        (lambda s: s.update(other=s["data"]), r"Unexpected key\(s\).*other"),
        (lambda s: s.update(bias=torch.ones(N)), r"bias: got present; allowed: bias=False"),
        (lambda s: s.update(zero=s["scale"]), r"zero: got a tensor"),
    ],
)
def test_a_state_dict_is_not_trusted(change: Any, message: str) -> None:
    state = dict(_ready().state_dict())
    change(state)
    layer = HummingLayer(N, K)
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(state)
    if "Unexpected" not in message:
        assert not layer.is_transformed


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (HummingLayer(N, K, "uint6"), r"types.element_b: got 'int6'; allowed: 'uint6'"),
        (HummingLayer(N, K, {"dtype": "int6", "group_size": 32}), r"types.group_size: got '-1'; allowed: '32'"),
        (HummingLayer(N - 1, K), r"n: got '40'; allowed: '39'"),
        (HummingLayer(N, K, torch_dtype=torch.bfloat16), r"types.element_a: got 'float16'; allowed: 'bfloat16'"),
    ],
)
def test_a_state_dict_of_another_layer(layer: HummingLayer, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        layer.load_state_dict(_ready().state_dict())
    assert not layer.is_transformed


def test_a_strict_load_names_every_missing_key() -> None:
    config = {"dtype": "uint4", "group_size": 32}
    state = torch.nn.Sequential(_ready(config, bias=True)).state_dict()
    for second in (HummingLayer(N, K, config, bias=True), _ready(config, bias=True)):
        model = torch.nn.Sequential(HummingLayer(N, K, config, bias=True), second)
        with pytest.raises(RuntimeError, match=r"Missing key\(s\).*1\.data.*1\.scale.*1\.zero.*1\.bias.*1\.format"):
            model.load_state_dict(state)
        result = torch.nn.Sequential(HummingLayer(N, K, config, bias=True), second).load_state_dict(state, strict=False)
        assert result.unexpected_keys == []
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "data", "scale", "format"\.'):
        HummingLayer(N, K).load_state_dict({})


def test_a_layer_on_meta_takes_the_tensors_where_they_are() -> None:
    source = _ready(bias=True)
    layer = HummingLayer(N, K, bias=True, device="meta")
    with pytest.raises(RuntimeError, match=r"device: got a layer on meta; .*assign=True"):
        layer.load_state_dict(source.state_dict())
    assert not layer.is_transformed
    layer.load_state_dict(source.state_dict(), assign=True)
    assert layer.device.type == layer.data.device.type == layer.format.device.type == "cpu"
    assert layer.data.data_ptr() == source.data.data_ptr()  # taken, not copied
    testing.check_equal(layer(_inputs()), source(_inputs()))


def test_padding_rows_of_a_state_dict_may_hold_anything() -> None:
    source = _ready()
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    state["scale"][-1, :, 1] = torch.nan  # row 40: position 1 holds row 8 of the last atom
    layer = HummingLayer(N, K)
    layer.load_state_dict(state)
    testing.check_equal(layer(_inputs()), source(_inputs()))
    state["scale"][-1, :, 0] = torch.nan  # row 32
    with pytest.raises(RuntimeError, match=r"scale: got a value that is not finite at \(32, 0\)"):
        layer.load_state_dict(state)


@pytest.mark.parametrize("parameter", ["weight", "codes", "scale", "zero", "bias", "global_scale"])
def test_tensors_without_elements(parameter: str) -> None:
    layer = HummingLayer(16, 64, "uint4", bias=True)
    given = {
        "codes": torch.zeros(16, 64, dtype=torch.uint8),
        "scale": torch.ones(16, 1),
        "zero": torch.ones(16, 1),
        "bias": torch.ones(16),
        "global_scale": torch.ones(1),
    }
    if parameter == "weight":
        load, words = layer.load_from_unquantized, {"weight": torch.empty(16, 64, device="meta"), "bias": given["bias"]}
    else:
        load, words = layer.load_quantized, given | {parameter: given[parameter].to("meta")}
    with pytest.raises(ArgumentError, match=f"{parameter}: got device meta"):
        load(**words)
    assert not layer.is_loaded
    layer.load_quantized(**given)


@pytest.mark.parametrize("device", ["foo", 3.5, "cuda:99"])
def test_devices_that_are_none(device: Any) -> None:
    with pytest.raises(ArgumentError, match=r"device: got .*; nearest supported: cpu"):
        HummingLayer(16, 64, device=device)


def test_sizes_of_numpy() -> None:
    layer = HummingLayer(np.int64(N), np.int32(K))  # type: ignore[arg-type]
    layer.load_from_unquantized(_weight())
    layer.transform()
    assert type(layer.shape_n) is type(layer.shape_k) is int
    fresh = HummingLayer(N, K)
    fresh.load_state_dict(layer.state_dict())
    testing.check_equal(fresh(_inputs()), layer(_inputs()))


def test_transform_that_fails_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = HummingLayer(N, K)
    layer.load_from_unquantized(_weight())

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(layout, "pack", fail)
        with pytest.raises(MemoryError):
            layer.transform()
    assert layer.is_loaded
    assert not layer.is_transformed
    layer.transform()
    testing.check_equal(layer(_inputs()), _ready()(_inputs()))


@pytest.mark.parametrize("name", ["scale", "bias", "zero", "global_scale"])
def test_a_buffer_that_is_replaced_counts_from_the_next_call_on(name: str) -> None:
    """By hand, or for one call by functional_call: what a call uses is what `state_dict` would save."""
    torch.manual_seed(0)
    layer = HummingLayer(
        48, 64, {"dtype": "uint4", "group_size": 32, "zero_point": "floating"}, torch_dtype=torch.float16, bias=True
    )
    layer.load_from_unquantized(torch.randn(48, 64, dtype=torch.float16), bias=torch.randn(48))
    layer.transform()
    x = torch.randn(3, 64, dtype=torch.float16)
    before = layer(x)
    old = layer._buffers[name]
    if name == "global_scale":
        old = torch.ones(1)
    new = old + 1 if name != "scale" else old * 2
    once = torch.func.functional_call(layer, {name: new}, (x,))
    assert not torch.equal(once, before)
    assert torch.equal(layer(x), before)
    setattr(layer, name, new)
    assert torch.equal(layer(x), once)
    if name == "scale":
        layer.scale = new[:, :1]
        with pytest.raises(ArgumentError, match="scale: got"):
            layer(x)


def _small(**words: Any) -> HummingLayer:
    layer = HummingLayer(48, 64, {"dtype": "int4", "group_size": 32}, **words)
    layer.load_from_unquantized(torch.randn(48, 64, generator=torch.Generator().manual_seed(1)))
    layer.transform()
    return layer


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_result_is_where_the_input_is(batch_invariant: bool) -> None:
    """Whatever torch's default device is, and under autocast, which is for torch's own products."""
    layer = _small(batch_invariant=batch_invariant)
    x = torch.randn(3, 64).half()
    expected = layer(x)
    with torch.device("meta"):
        y = layer(x)
    assert y.device.type == "cpu"
    assert torch.equal(y, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), expected)


def test_a_move_releases_the_old_memory() -> None:
    layer = _small()
    layer(torch.zeros(1, 64).half())
    held = weakref.ref(layer.data)
    layer.to("meta")
    gc.collect()
    assert held() is None


def test_load_state_dict_calls_its_hooks() -> None:
    source, layer = _small(), HummingLayer(48, 64, {"dtype": "int4", "group_size": 32})
    seen = []
    layer.register_load_state_dict_pre_hook(lambda module, state, *_: seen.append((module, sorted(state))))
    layer.load_state_dict(source.state_dict())
    assert seen == [(layer, sorted(source.state_dict()))]
    x = torch.randn(3, 64).half()
    assert torch.equal(layer(x), source(x))


def test_a_trace_holds_a_call_not_its_result() -> None:
    layer, other = _small(), _small()
    other.data.copy_(~other.data)
    x = torch.randn(3, 64).half()
    traced = torch.jit.trace(layer, (x,))
    other(torch.randn(3, 64).half())
    x = torch.randn(3, 64).half()
    assert torch.equal(traced(x), layer(x))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_activations(layout: torch.layout) -> None:
    x = torch.eye(64).half().to_sparse(layout=layout)
    with pytest.raises(ArgumentError, match=r"a: got layout torch\.sparse_.*to_dense"):
        _small()(x)


class _Extended(HummingLayer):
    """A layer with state of its own beside the packed weight."""

    def __init__(self) -> None:
        super().__init__(48, 64, {"dtype": "int4", "group_size": 32})
        self.gain = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.zeros(2))
        self.extra = torch.nn.Linear(2, 2)
        self.extra_state: Any = None

    def get_extra_state(self) -> Any:
        return self.extra_state

    def set_extra_state(self, state: Any) -> None:
        self.extra_state = state


@pytest.mark.parametrize("strict", [False, True])
def test_state_of_a_subclass_is_loaded_too(strict: bool) -> None:
    source, layer = _Extended(), _Extended()
    source.load_from_unquantized(torch.randn(48, 64))
    source.transform()
    with torch.no_grad():
        source.gain.fill_(7)
    source.seen.fill_(5)
    source.extra_state = {"steps": 3}
    names = list(layer._buffers)
    assert layer.load_state_dict(source.state_dict(), strict=strict) == ([], [])
    assert set(layer._buffers) == set(names)
    for name, value in source.state_dict().items():
        other = layer.state_dict()[name]
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
    x = torch.randn(3, 64).half()
    assert torch.equal(layer(x), source(x))
    state = source.state_dict()
    del state["gain"]
    state["extra.more"] = state["other"] = torch.zeros(1)
    missing, unexpected = layer.load_state_dict(state, strict=False)
    assert (missing, sorted(unexpected)) == (["gain"], ["extra.more", "other"])
    with pytest.raises(RuntimeError, match="gain"):
        layer.load_state_dict(state)
