"""`batch_invariant=True`: a row of the output has the same bits however many rows the input has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from humming_cutlass import layout, ops, support, testing
from humming_cutlass.errors import ArgumentError
from humming_cutlass.layer import HummingLayer

CPU_M = (1, 4, 16, 64, 257)
GPU_M = (1, 4, 16, 64, 257, 1024)


def _bits(x: Any) -> Any:
    return x.view(torch.int16) if isinstance(x, torch.Tensor) else x.view(np.uint16)


@settings(max_examples=25, deadline=None)
@given(
    m=st.sampled_from(CPU_M),
    n=st.integers(1, 200),
    k=st.integers(1, 40).map(lambda x: 16 * x),
    group_size=st.sampled_from([-1, 16]),
    dtype=st.sampled_from(["int4", "uint4", "float6_e3m2"]),
    element=st.sampled_from(["float16", "bfloat16"]),
    offset=st.integers(0, 3),
    extras=st.booleans(),
)
@example(m=1, n=5, k=80, group_size=16, dtype="uint4", element="bfloat16", offset=0, extras=False)  # near half units
def test_rows_on_the_cpu(
    m: int, n: int, k: int, group_size: int, dtype: str, element: str, offset: int, extras: bool
) -> None:
    types = testing.make_types(dtype, k=k, element_a=element, element_d=element, group_size=group_size)
    problem = testing.random_problem(types, m, n, k, bias=extras, global_scale=extras)
    packed = problem.packed
    memory = torch.zeros(m, k + 3, dtype=problem.a.dtype)
    a = memory[:, offset : offset + k].copy_(problem.a)
    y = ops.gemm(a, packed, batch_invariant=True)
    problem.check(y)
    rows = torch.cat([ops.gemm(a[i : i + 1], packed, batch_invariant=True) for i in range(m)])
    assert torch.equal(_bits(y), _bits(rows))
    half = ops.gemm(problem.a[m // 2 :], packed, batch_invariant=True)  # other alignment, other place in the batch
    assert torch.equal(_bits(y[m // 2 :]), _bits(half))


@pytest.mark.parametrize("m", CPU_M)
def test_large_k_on_the_cpu(m: int) -> None:
    """Long sums and several blocks of the weight, where a product of matrices is not invariant."""
    types = testing.make_types("int4", k=8192, group_size=128, element_d="float32")
    problem = testing.random_problem(types, m, 1040, 8192)
    y = ops.gemm(problem.a, problem.packed, batch_invariant=True)
    problem.check(y)
    for i in {0, m // 2, m - 1}:
        testing.check_equal(y[i], ops.gemm(problem.a[i], problem.packed, batch_invariant=True))


def test_the_other_rows_do_not_matter() -> None:
    problem = testing.random_problem(testing.make_types("int4", k=512), 33, 40, 512)
    y = ops.gemm(problem.a, problem.packed, batch_invariant=True)
    a = torch.full_like(problem.a, torch.nan)
    a[7] = problem.a[7]
    testing.check_equal(ops.gemm(a, problem.packed, batch_invariant=True)[7], y[7])


def test_numpy() -> None:
    types = testing.make_types("int4", k=512, group_size=32)
    problem = testing.random_problem(types, 64, 77, 512)
    packed = layout.pack(problem.codes.numpy(), problem.scale.float().numpy(), types=types)
    a = problem.a.numpy()
    y = ops.gemm(a, packed, batch_invariant=True)
    problem.check(torch.from_numpy(y))
    rows = np.concatenate([ops.gemm(a[i : i + 1], packed, batch_invariant=True) for i in range(64)])
    assert (_bits(y) == _bits(rows)).all()


def test_a_layer() -> None:
    words: dict[str, Any] = {"bias": True, "torch_dtype": torch.bfloat16}
    config = {"dtype": "uint4", "group_size": 32}
    layer = HummingLayer(40, 96, config, batch_invariant=True, **words)
    generator = torch.Generator().manual_seed(0)
    layer.load_from_unquantized(torch.randn(40, 96, generator=generator), torch.ones(40))
    layer.transform()
    x = torch.randn(2, 9, 96, generator=generator).bfloat16()
    y = layer(x)
    for row, expected in zip(x.reshape(-1, 96), y.reshape(-1, 40), strict=True):
        testing.check_equal(layer(row), expected)
    assert layer(x[:, :0]).shape == (2, 0, 40)
    out = torch.empty_like(y)
    testing.check_equal(layer(x, out=out), y)
    # It is a way to compute, no format.
    other = HummingLayer(40, 96, config, **words)
    other.load_state_dict(layer.state_dict())
    assert not other.batch_invariant
    assert testing.relative_error(other(x), y.double().numpy()) < 5e-3


# --- On a GPU ---

N, K = 768, 4096

_WEIGHTS: dict[str, Any] = {
    "int4-g128": {"dtype": "int4", "group_size": 128},
    "int8-channel": "int8",
    "uint4-zero": {"dtype": "uint4", "group_size": 128},
    "float4_e2m1-e8m0-g32": {"dtype": "float4_e2m1", "group_size": 32, "scale_dtype": "float8_e8m0"},
}
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def _gpu_layer(config: Any, dtype: torch.dtype, n: int = N, k: int = K) -> HummingLayer:
    layer = HummingLayer(n, k, config, torch_dtype=dtype, batch_invariant=True, device="cuda")
    layer.load_from_unquantized(torch.randn(n, k, generator=torch.Generator().manual_seed(0)))
    layer.transform(progress=False)
    return layer


def _gpu_inputs(m: int, dtype: torch.dtype, k: int = K) -> torch.Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("name", _WEIGHTS)
def test_rows_on_a_gpu(name: str, dtype: str) -> None:
    layer = _gpu_layer(_WEIGHTS[name], _DTYPES[dtype])
    x = _gpu_inputs(max(GPU_M), _DTYPES[dtype])
    rows = torch.cat([layer(x[i : i + 1]) for i in range(x.shape[0])])
    assert rows.isfinite().all()
    for m in GPU_M:
        y = layer(x[:m])
        assert torch.equal(_bits(y), _bits(rows[:m])), f"m = {m}"
        assert torch.equal(_bits(layer(x[-m:])), _bits(rows[-m:])), f"the last {m} rows"
        testing.check_equal(layer(x[:m]), y)
    # The same numbers as without, up to rounding.
    usual = ops.gemm(x, layer._packed)  # type: ignore[arg-type]
    assert testing.relative_error(rows, usual.double().cpu().numpy()) < testing.relative_bound(
        dtype, scaled_weights=dtype
    )


@pytest.mark.gpu
def test_one_kernel_is_compiled() -> None:
    layer = _gpu_layer("int8", torch.float16)
    packed = layer._packed
    assert packed is not None
    kernels = ops.kernels(packed, batch_invariant=True)
    choices = {ops.choose(packed, m, batch_invariant=True) for m in GPU_M}
    assert [choice.config for choice in choices] == kernels
    for m in GPU_M:
        layer(_gpu_inputs(m, torch.float16))
    assert [key for key in packed.plans if key in ops.kernels(packed)] == kernels


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1004, 1001])
def test_k_that_aligns_no_rows_on_a_gpu(k: int) -> None:
    layer = _gpu_layer("int8", torch.float16, k=k)
    x = _gpu_inputs(257, torch.float16, k)
    rows = torch.cat([layer(x[i : i + 1]) for i in range(x.shape[0])])
    for m in (1, 4, 64, 257):
        testing.check_equal(layer(x[:m]), rows[:m])


@pytest.mark.gpu
def test_rows_that_are_not_aligned_on_a_gpu() -> None:
    layer = _gpu_layer("int8", torch.float16)
    x = _gpu_inputs(17, torch.float16)
    wide = torch.zeros(17, K + 8, dtype=torch.float16, device="cuda")
    testing.check_equal(layer(wide[:, 8:].copy_(x)), layer(x))
    view = wide[:, 1 : K + 1].copy_(x)
    if ops.choose(layer._packed, 1, batch_invariant=True).config.schedule.mainloop == support.SM80:  # type: ignore[arg-type]
        testing.check_equal(layer(view), layer(x))
    else:
        with pytest.raises(ArgumentError, match=r"a: got rows that do not start at 16-byte boundaries"):
            layer(view)
        testing.check_equal(layer(view.clone(memory_format=torch.contiguous_format)), layer(x))


@pytest.mark.gpu
def test_it_compiles_and_stays_invariant_on_a_gpu() -> None:
    layer = _gpu_layer("int8", torch.float16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    x = _gpu_inputs(257, torch.float16)
    for m in (257, 16):
        testing.check_equal(compiled(x[:m]), layer(x)[:m])
