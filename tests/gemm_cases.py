"""Cases that hold on every device: probes over types and shapes, and bug reports of other libraries restated as calls.

An id names the probe (P-ID, ...) or the case (B2, C3, ...). Each case is a function of a `gemm` like `ops.gemm` and a
device; test_cases_cpu.py and test_cases_gpu.py run them all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from humming_cutlass import dtypes, layout, quantize, reference, testing
from humming_cutlass.config import TypeConfig

Gemm = Callable[..., torch.Tensor]

_CASES: list[Any] = []


def _case(name: str, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    _CASES.append(pytest.param(functools.partial(function, *args, **kwargs), id=name))


def _random(gemm: Gemm, types: TypeConfig, m: int, n: int, k: int, *, device: str, **options: Any) -> None:
    problem = testing.random_problem(types, m, n, k, device=device, **options)
    problem.check(gemm(problem.a, problem.packed))


def _probe(probe: Callable[..., None]) -> Callable[..., None]:
    """Returns a probe with the arguments in the order of a case: what is fixed first, then gemm."""

    def run(types: TypeConfig, *shape: int, gemm: Gemm, device: str, **options: Any) -> None:
        probe(gemm, types, *shape, device=device, **options)

    return run


def _on(function: Callable[..., None]) -> Callable[..., None]:
    def run(*args: Any, gemm: Gemm, device: str, **options: Any) -> None:
        function(gemm, *args, device=device, **options)

    return run


# --- The probes, over every weight type, scale type and zero point ---

for _a in ("float16", "bfloat16"):
    for _w in testing.weight_types(_a):
        _case(f"P-ID-{_w}-{_a}-channel", _probe(testing.p_id), testing.make_types(_w, k=80, element_a=_a), 37, 80)
        _case(
            f"P-ID-{_w}-{_a}-g32",
            _probe(testing.p_id),
            testing.make_types(_w, k=160, element_a=_a, group_size=32),
            24,
            160,
        )

for _s in ("float16", "bfloat16", "float32", "float8_e4m3", "float8_e5m2", "float8_e8m0"):
    for _g in (-1, 16, 48, 96):
        _words = {"group_size": _g, "scale_dtype": _s}
        _name = f"{_s}-g{_g}"
        _case(f"P-ID-int5-{_name}", _probe(testing.p_id), testing.make_types("int5", k=192, **_words), 20, 192)
        _case(
            f"P-ID-uint3-{_name}-float32-out",
            _probe(testing.p_id),
            testing.make_types("uint3", k=192, element_a="bfloat16", element_d="float32", **_words),
            20,
            192,
        )
        _case(f"P-GRP-int4-{_name}", _probe(testing.p_grp), testing.make_types("int4", k=384, **_words), 5, 72, 384)
for _z in ("integer", "float16", "bfloat16", "float32"):
    _zero = {"zero_point": "integer"} if _z == "integer" else {"zero_point": "floating", "zero_dtype": _z}
    for _b in (1, 4, 8):
        for _g in (-1, 16):
            _types = testing.make_types(f"uint{_b}", k=96, group_size=_g, **_zero)
            _case(f"P-ID-uint{_b}-zero-{_z}-g{_g}", _probe(testing.p_id), _types, 40, 96)
_case("P-ID-global-scale", _probe(testing.p_id), testing.make_types("int4", k=64), 16, 64, global_scale=True)

for _w in ("int2", "int4", "uint4", "int6", "float8_e4m3", "nf4"):
    for _g in (-1, 16, 32, 64, 96):
        _case(f"P-GRP-{_w}-g{_g}", _probe(testing.p_grp), testing.make_types(_w, k=960, group_size=_g), 3, 40, 960)
    for _n in (16, 97, 300):
        _case(f"P-COL-{_w}-n{_n}", _probe(testing.p_col), testing.make_types(_w, k=64), 9, _n, 64)
for _w in ("int8", "uint4", "float6_e3m2"):
    for _m in (1, 7, 32, 130):
        for _g in (-1, 32):
            _types = testing.make_types(_w, k=96, group_size=_g)
            _case(f"P-NAN-{_w}-m{_m}-g{_g}", _probe(testing.p_nan), _types, _m, 27, 96)
    _case(f"P-DIRTY-D9-{_w}", _probe(testing.p_dirty), testing.make_types(_w, k=96), 33, 27, 96)
    for _n in (1, 27, 64, 200):
        _case(f"P-GUARD-{_w}-n{_n}", _probe(testing.p_guard), testing.make_types(_w, k=96), 19, _n, 96)

# --- B: numerics and range ---

for _w, _g in (("int4", -1), ("int4", 128), ("uint4", 128), ("float8_e5m2", -1)):
    for _m in (1, 64):
        _case(
            f"B2-P-BIG-{_w}-g{_g}-m{_m}",
            _probe(testing.p_big),
            testing.make_types(_w, k=4096, group_size=_g),
            _m,
            24,
            4096,
        )


def every_scale_code(gemm: Gemm, element_scale: str, element_a: str, element_d: str, *, device: str) -> None:
    """B3: every finite code of an 8-bit scale type, subnormals included, is applied exactly."""
    values = dtypes.parse(element_scale).values()
    codes = [c for c in range(256) if math.isfinite(values[c])]
    types = testing.make_types("int4", k=64, element_a=element_a, element_d=element_d, scale_dtype=element_scale)
    pattern = torch.tensor(codes, dtype=torch.uint8).reshape(-1, 1)
    name = {"float8_e4m3": "float8_e4m3fn", "float8_e8m0": "float8_e8m0fnu"}.get(element_scale, element_scale)
    scale = pattern.view(getattr(torch, name))
    weight = (torch.arange(len(codes))[:, None] + torch.arange(64)[None, :]).remainder(16).to(torch.uint8)
    # 8 * 2^127 is beyond float32: weights of 1 beside the largest scales.
    weight[torch.from_numpy(values[codes] > 2.0**123)] = 1
    packed = layout.pack(weight.to(device), scale.to(device), types=types, global_scale=1.0)
    y = gemm(torch.eye(64, dtype=getattr(torch, element_a), device=device), packed)
    exact = dtypes.parse("int4").values()[weight.numpy()] * values[codes][:, None]
    expected = torch.from_numpy(exact.T.copy()).float().to(getattr(torch, element_d))
    testing.check_equal(y, expected)


for _s in ("float8_e4m3", "float8_e5m2", "float8_e8m0"):
    for _a, _d in (("bfloat16", "bfloat16"), ("float16", "float32")):
        _case(f"B3-{_s}-{_a}-{_d}", _on(every_scale_code), _s, _a, _d)

for _g in (-1, 128):
    _types = testing.make_types("int4", k=28672, group_size=_g)
    _case(f"B10-long-k-g{_g}", _on(_random), _types, 4, 64, 28672)
_case("B12-nf4-channel", _on(_random), testing.make_types("nf4", k=1000), 8, 65, 1000)


def zero_rows(gemm: Gemm, dtype: str, *, device: str) -> None:
    """B6: rows of zeros and of magnitudes that no scale resolves come out as zeros, not as NaN."""
    weight = torch.zeros(4, 64, dtype=torch.float32)
    weight[1, 5] = 1e-30
    weight[2] = 2.0**-24
    q = quantize.quantize(weight.to(device), {"dtype": dtype, "scale_dtype": "float16"})
    packed = layout.pack(q.codes, q.scale, types=q.types, zero=q.zero)
    y = gemm(torch.ones(3, 64, dtype=torch.float16, device=device), packed)
    assert not bool(y.isnan().any())
    assert bool((y[:, [0, 1, 3]] == 0).all())


for _w in ("int1", "int4", "uint4", "float4_e2m1", "float8_e4m3", "nf4"):
    _case(f"B6-zeros-{_w}", _on(zero_rows), _w)

# --- C: group sizes and zero points ---

for _g in (-1, 3072, 16, 32, 64, 96, 128, 256, 512, 1024):
    _case(f"C1-g{_g}", _on(_random), testing.make_types("int4", k=3072, group_size=_g), 5, 40, 3072)


def same_bits(gemm: Gemm, *, device: str) -> None:
    """C1: group sizes -1 and k are one configuration, and give the same bits."""
    results = []
    for group_size in (-1, 192):
        types = testing.make_types("uint5", k=192, group_size=group_size)
        problem = testing.random_problem(types, 17, 40, 192, device=device)
        results.append(gemm(problem.a, problem.packed))
    testing.check_equal(results[1], results[0])


_case("C1-same-bits", _on(same_bits))
for _g in (16, 32, 48, 64, 80, 96, 160, 192, 240, 320, 480):
    for _w in ("int4", "uint6"):
        _case(f"C3-{_w}-g{_g}", _on(_random), testing.make_types(_w, k=960, group_size=_g), 33, 40, 960)


def awq_without_zero(gemm: Gemm, *, device: str) -> None:
    """C8: uint4 without zero points means 8."""
    types = testing.make_types("uint4", k=64, group_size=32)
    codes = torch.arange(16 * 64).remainder(16).reshape(16, 64).to(torch.uint8)
    scale = torch.full((16, 2), 0.5, dtype=torch.float16)
    packed = layout.pack(codes.to(device), scale.to(device), types=types)
    y = gemm(torch.eye(64, dtype=torch.float16, device=device), packed)
    testing.check_equal(y, ((codes.float() - 8) * 0.5).T.half())


_case("C8-awq-without-zero", _on(awq_without_zero))
for _z in ("float16", "float32"):
    _types = testing.make_types("uint4", k=256, group_size=64, zero_point="floating", zero_dtype=_z)
    _case(f"C15-floating-zero-{_z}", _on(_random), _types, 9, 40, 256)

# --- D: shapes and strides ---

for _n in (1, 7, 8, 15, 16, 24, 40, 48, 72, 96, 100, 120, 136, 200, 1440, 2880, 4304, 11008 // 7):
    _case(f"D2-n{_n}", _probe(testing.p_guard), testing.make_types("int4", k=64), 3, _n, 64)
for _k in (16, 32, 48, 64, 80, 96, 112, 160, 192, 480, 576, 1344, 1440, 2880, 7392, 10944, 1728):
    _case(f"D3-k{_k}-channel", _on(_random), testing.make_types("int4", k=_k), 5, 24, _k)
    _case(f"D3-k{_k}-g16", _on(_random), testing.make_types("uint4", k=_k, group_size=16), 5, 24, _k)
for _k in (1, 2, 3, 7, 15, 17, 63, 65, 100, 1001):
    _case(f"D3-k{_k}-odd", _on(_random), testing.make_types("int3", k=_k), 5, 24, _k)
for _g in (64, 96, 144, 192):
    _case(f"D4-k1728-g{_g}", _on(_random), testing.make_types("int4", k=1728, group_size=_g), 7, 40, 1728)
_case("D11-large-n", _on(_random), testing.make_types("int4", k=64), 3, 128256, 64)
for _m in (0, 1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 129, 257, 1000):
    for _a in ("float16", "bfloat16"):
        _types = testing.make_types("int6", k=256, element_a=_a, group_size=64)
        _case(f"m{_m}-{_a}", _on(_random), _types, _m, 72, 256, bias=True, global_scale=True)
for _d in ("float16", "bfloat16", "float32"):
    for _a in ("float16", "bfloat16"):
        _types = testing.make_types("uint4", k=256, element_a=_a, element_d=_d, group_size=32)
        _case(f"output-{_a}-{_d}", _on(_random), _types, 20, 72, 256, bias=True)


def _wide(problem: testing.Problem, offset: int) -> torch.Tensor:
    m, k = problem.a.shape
    # A stride of whole 16 bytes: whether rows are aligned is up to the offset.
    big = torch.full((m, (k + 55) // 8 * 8), math.nan, dtype=problem.a.dtype, device=problem.a.device)
    big[:, offset : offset + k] = problem.a
    return big[:, offset : offset + k]


_STRIDED: dict[str, Callable[[testing.Problem], torch.Tensor]] = {
    "row-stride": lambda p: _wide(p, 8),
    "odd-offset": lambda p: _wide(p, 3),
    "transposed": lambda p: p.a.t().contiguous().t(),
    "every-second-column": lambda p: p.a.repeat_interleave(2, dim=1)[:, ::2],
    "every-second-row": lambda p: p.a.repeat_interleave(2, dim=0)[::2],
    "one-row": lambda p: p.a[:1],
}


def strided(gemm: Gemm, how: str, k: int, *, device: str) -> None:
    """D6: activations of any strides give the bits that contiguous ones give."""
    problem = testing.random_problem(testing.make_types("int4", k=k), 19, 40, k, device=device)
    a = _STRIDED[how](problem)
    rows = a.shape[0]
    testing.check_equal(gemm(a, problem.packed), gemm(a.contiguous(), problem.packed))
    expected = problem.expected()[:rows]
    testing.check_close(gemm(a, problem.packed), expected, a, problem.weight(), None, "float16")


for _how in _STRIDED:
    for _k in (96, 67):
        _case(f"D6-{_how}-k{_k}", _on(strided), _how, _k)


def expanded(gemm: Gemm, *, device: str) -> None:
    """D6: one row expanded with stride 0."""
    problem = testing.random_problem(testing.make_types("int4", k=96), 19, 40, 96, device=device)
    a = problem.a[:1].expand(19, 96)
    expected = reference.gemm(a, problem.weight())
    testing.check_close(gemm(a, problem.packed), expected, a, problem.weight(), None, "float16")


def outputs(gemm: Gemm, how: str, *, device: str) -> None:
    """D6: outputs of any strides are written in place."""
    problem = testing.random_problem(testing.make_types("int4", k=96), 18, 40, 96, device=device)
    wide = torch.zeros(40, 200, dtype=torch.float16, device=device)
    views = {
        "slice": wide[:18, 30:70],
        "odd-slice": wide[:18, 3:43],
        "transposed": wide[:, :18].t(),
        "rows": wide[:36:2, :40],
        "columns": wide[:18, :80:2],
    }
    out = views[how]
    y = gemm(problem.a, problem.packed, out=out)
    assert y is out
    problem.check(out)
    assert int((wide != 0).sum()) <= 18 * 40


_case("D6-expanded", _on(expanded))
for _how in ("slice", "odd-slice", "transposed", "rows", "columns"):
    _case(f"D6-out-{_how}", _on(outputs), _how)


def scales_transposed(gemm: Gemm, *, device: str) -> None:
    """D6: scales and codes that are transposed views pack like contiguous ones."""
    problem = testing.random_problem(testing.make_types("uint4", k=96, group_size=32), 5, 40, 96, device=device)
    views = [x.to(device).t().contiguous().t() for x in (problem.codes, problem.scale, problem.zero)]
    assert not any(view.is_contiguous() for view in views)
    packed = layout.pack(views[0], views[1], types=problem.packed.types, zero=views[2])
    testing.check_equal(gemm(problem.a, packed), gemm(problem.a, problem.packed))


_case("D6-transposed-scales", _on(scales_transposed))


def leading(gemm: Gemm, shape: tuple[int, ...], *, device: str) -> None:
    """Leading dimensions are kept, also none, and empty ones."""
    m = math.prod(shape)
    problem = testing.random_problem(testing.make_types("int4", k=96), m, 40, 96, device=device, bias=True)
    y = gemm(problem.a.reshape(*shape, 96), problem.packed)
    assert tuple(y.shape) == (*shape, 40)
    problem.check(y.reshape(m, 40))
    out = torch.full((*shape, 40), math.nan, dtype=y.dtype, device=device)
    assert gemm(problem.a.reshape(*shape, 96), problem.packed, out=out) is out
    testing.check_equal(out, y)


for _shape in ((), (1,), (3, 5), (2, 1, 7), (0,), (2, 0, 3)):
    _case(f"leading-{'x'.join(map(str, _shape)) or 'none'}", _on(leading), _shape)


def nan_stays(gemm: Gemm, *, device: str) -> None:
    """Infinities and NaN in activations stay in their row."""
    problem = testing.random_problem(testing.make_types("int4", k=96), 9, 40, 96, device=device)
    clean = gemm(problem.a, problem.packed)
    a = problem.a.clone()
    a[2, 5], a[7, 90] = math.nan, math.inf
    y = gemm(a, problem.packed)
    assert bool(y[2].isnan().all())
    assert not bool(y[7].isfinite().all())
    rows = [0, 1, 3, 4, 5, 6, 8]
    testing.check_equal(y[rows], clean[rows])


_case("nan-stays-in-its-row", _on(nan_stays))

# --- J: shapes that others refuse ---

_case("J3-n3456-k5120", _on(_random), testing.make_types("int4", k=5120, group_size=128), 1, 3456, 5120)

CASES = tuple(_CASES)
