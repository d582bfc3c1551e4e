"""`ops.gemm` on the CPU beyond the cases of gemm_cases.py: numpy, errors, determinism, speed."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import time
import types
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from gemm_cases import CASES
from humming_cutlass import layout, ops, planner, quantize, support, testing
from humming_cutlass.errors import ArgumentError, ArgumentTypeError, UnsupportedError


@pytest.mark.parametrize("element_a", ["float16", "bfloat16"])
@pytest.mark.parametrize("element_d", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scale", ["float16", "bfloat16", "float32", "float8_e4m3", "float8_e8m0"])
def test_numpy_gives_what_torch_gives(element_a: str, element_d: str, scale: str) -> None:
    types = testing.make_types(
        "uint5", k=96, element_a=element_a, element_d=element_d, group_size=32, scale_dtype=scale
    )
    problem = testing.random_problem(types, 7, 40, 96, bias=True, global_scale=True)
    numpy_types = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}

    def convert(x: torch.Tensor) -> Any:
        return x.float().numpy()

    packed = layout.pack(
        problem.codes.numpy(),
        convert(problem.scale),
        types=types,
        zero=convert(problem.zero),
        bias=convert(problem.bias),
        global_scale=convert(problem.global_scale),
    )
    a = convert(problem.a).astype(numpy_types[element_a])
    y = ops.gemm(a, packed)
    assert y.dtype == numpy_types[element_d]
    problem.check(torch.from_numpy(y.astype(np.float32)).to(getattr(torch, element_d)))
    out = np.zeros((7, 50), y.dtype)[:, 3:43]
    assert ops.gemm(a, packed, out=out) is out
    assert (out == y).all()
    assert ops.gemm(a[0], packed).shape == (40,)
    assert ops.gemm(a[:0], packed).shape == (0, 40)


def test_without_torch() -> None:
    """The whole CPU path works where torch cannot be imported."""
    script = """
import sys
sys.modules["torch"] = None
import numpy as np
import humming_cutlass
from humming_cutlass import layout, ops, quantize
w = np.random.default_rng(0).standard_normal((40, 96)).astype(np.float32)
q = quantize.quantize(w, {"dtype": "int8", "group_size": 32})
packed = humming_cutlass.pack(q.codes, q.scale, types=q.types)
x = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float16)
y = humming_cutlass.gemm(x, packed)
r = x.astype(np.float64) @ w.T.astype(np.float64)
assert np.linalg.norm(y - r) < 0.02 * np.linalg.norm(r)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_the_same_call_gives_the_same_bits_in_every_thread() -> None:
    problem = testing.random_problem(testing.make_types("int4", k=512, group_size=64), 33, 700, 512)
    first = ops.gemm(problem.a, problem.packed)
    with ThreadPoolExecutor(4) as pool:
        for other in pool.map(lambda _: ops.gemm(problem.a, problem.packed), range(16)):
            testing.check_equal(other, first)


def test_blocks_of_rows_meet() -> None:
    """k so long that n is computed in several blocks, the last one partial."""
    problem = testing.random_problem(testing.make_types("int3", k=65536), 2, 77, 65536, bias=True)
    problem.check(ops.gemm(problem.a, problem.packed))


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
def test_scratch_is_aligned(size: int) -> None:
    for _ in range(4):
        memory = ops._aligned(size)
        assert (memory.size, memory.ctypes.data % 64) == (size, 0)


def _inputs() -> tuple[torch.Tensor, layout.PackedWeight]:
    problem = testing.random_problem(testing.make_types("int4", k=64), 3, 24, 64)
    return problem.a, problem.packed


_BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a-list": ({"a": [1.0]}, ArgumentTypeError, r"a: got list"),
    "a-dtype": ({"a": torch.zeros(3, 64)}, ArgumentTypeError, r"a: got dtype float32; allowed: float16"),
    "a-dtype-bfloat16": ({"a": torch.zeros(3, 64).bfloat16()}, ArgumentTypeError, r"a: got dtype bfloat16"),
    "a-library": ({"a": np.zeros((3, 64), np.float16)}, ArgumentTypeError, r"a: got ndarray; allowed: Tensor"),
    "a-shape": ({"a": torch.zeros(3, 63).half()}, ArgumentError, r"a: got shape \(3, 63\).*k = 64"),
    "a-0d": ({"a": torch.zeros(()).half()}, ArgumentError, r"a: got shape \(\)"),
    "a-device": ({"a": torch.zeros(3, 64, device="meta").half()}, ArgumentError, r"a: got device meta; allowed: cpu"),
    "a-gradient": ({"a": torch.zeros(3, 64).half().requires_grad_()}, ArgumentError, r"gradient.*torch.no_grad"),
    "weight": ({"weight": torch.zeros(24, 64)}, ArgumentTypeError, r"weight: got Tensor; allowed: a PackedWeight"),
    "out-type": ({"out": np.zeros((3, 24), np.float16)}, ArgumentTypeError, r"out: got ndarray"),
    "out-dtype": ({"out": torch.zeros(3, 24)}, ArgumentTypeError, r"out: got dtype float32; allowed: float16"),
    "out-shape": ({"out": torch.zeros(3, 25).half()}, ArgumentError, r"out: got shape \(3, 25\); allowed: \(3, 24\)"),
    "out-device": ({"out": torch.zeros(3, 24, device="meta").half()}, ArgumentError, r"out: got device meta"),
    "out-expanded": ({"out": torch.zeros(1, 24).half().expand(3, 24)}, ArgumentError, r"out: got an expanded tensor"),
    "out-overlap": (
        {"out": torch.zeros(200).half().as_strided((3, 24), (8, 1))},
        ArgumentError,
        r"out: got shape \(3, 24\) with strides \(8, 1\), which overlap; allowed: memory of its own",
    ),
    "out-overlap-by-one": ({"out": torch.zeros(200).half().as_strided((3, 24), (23, 1))}, ArgumentError, r"overlap"),
    "out-overlap-columns": ({"out": torch.zeros(200).half().as_strided((3, 24), (1, 2))}, ArgumentError, r"overlap"),
    "config": ({"split_k": 2}, ArgumentError, r"split_k: got a kernel's choice for activations on the CPU"),
    "batch-invariant": ({"batch_invariant": 1}, ArgumentTypeError, r"batch_invariant: got int; allowed: True or False"),
    "batch-invariant-split": (
        {"batch_invariant": True, "split_k": 1},
        ArgumentError,
        r"split_k: got a kernel's choice; allowed: None with batch_invariant",
    ),
    "batch-invariant-config": (
        {"batch_invariant": True, "config": object()},
        ArgumentError,
        r"config: got a kernel's choice; allowed: None with batch_invariant",
    ),
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_input(name: str) -> None:
    changes, error, message = _BAD[name]
    a, packed = _inputs()
    good = ops.gemm(a, packed)
    with pytest.raises(error, match=message):
        ops.gemm(**({"a": a, "weight": packed} | changes))
    testing.check_equal(ops.gemm(a, packed), good)


def test_out_may_be_beside_the_activations_but_not_in_them() -> None:
    problem = testing.random_problem(testing.make_types("int4", k=64), 3, 64, 64)
    good = ops.gemm(problem.a, problem.packed)
    buffer = torch.zeros(3, 200, dtype=torch.float16)
    a = buffer[:, :64].copy_(problem.a)
    for column in (0, 1, 63):
        with pytest.raises(ArgumentError, match=r"out: got memory that a is in; allowed: memory of its own"):
            ops.gemm(a, problem.packed, out=buffer[:, column : column + 64])
    with pytest.raises(ArgumentError, match=r"out: got memory that a is in"):
        ops.gemm(a, problem.packed, out=a)
    assert (a == problem.a).all()
    # Every way of being apart: interleaved rows, columns beside the activations, after them, and strided columns.
    for out in (
        buffer[:, 64:128],
        buffer[:, 65::2][:, :64],
        torch.zeros(3, 64).half(),
        torch.zeros(64, 3).half().t(),
        torch.zeros(5, 64).half()[::2],
    ):
        testing.check_equal(ops.gemm(a, problem.packed, out=out).contiguous(), good)
    assert (a == problem.a).all()


def test_numpy_out_may_not_be_in_the_activations() -> None:
    types = testing.make_types("int4", k=16, element_d="float32")
    packed = layout.pack(np.ones((16, 16), np.uint8), np.ones((16, 1), np.float32), types=types)
    memory = np.ones(4000, np.uint8)
    a = memory[: 4 * 32].view(np.float16).reshape(4, 16)
    inside = memory[64 : 64 + 4 * 64].view(np.float32).reshape(4, 16)
    with pytest.raises(ArgumentError, match=r"out: got memory that a is in"):
        ops.gemm(a, packed, out=inside)
    rows = np.lib.stride_tricks.as_strided(np.zeros(100, np.float32), (4, 16), (60, 4))
    with pytest.raises(ArgumentError, match=r"out: got shape \(4, 16\) with strides \(60, 4\), which overlap"):
        ops.gemm(a, packed, out=rows)
    backwards = np.zeros((4, 16), np.float32)[::-1]
    assert (ops.gemm(a, packed, out=backwards) == ops.gemm(a, packed)).all()


def test_gradients_are_refused_only_where_they_would_be_lost() -> None:
    a, packed = _inputs()
    with torch.no_grad():
        assert not ops.gemm(a.clone().requires_grad_(), packed).requires_grad
    with torch.inference_mode():
        ops.gemm(a, packed)


def test_a_config_for_the_cpu_is_refused() -> None:
    a, packed = _inputs()
    config = planner.schedules(packed.types, planner.Device(arch="sm_80", sm_count=108))[0]
    with pytest.raises(ArgumentError, match=r"config: got a kernel's choice"):
        ops.gemm(a, packed, config=config)


def test_gemm_host_is_the_same_on_the_cpu() -> None:
    a, packed = _inputs()
    testing.check_equal(ops.gemm_host(a, packed), ops.gemm(a, packed))
    with pytest.raises(ArgumentError, match=r"a: got device meta"):
        ops.gemm_host(a.to("meta"), packed)


class _FakePlan:
    """Stands for a kernel on a GPU: insists on what kernels insist on, and computes on the CPU."""

    def __init__(self, weight: layout.PackedWeight, aligned: bool) -> None:
        self.weight = weight
        self.aligned = aligned
        self.calls = 0
        self.splits: list[int] = []

    def run(self, a: torch.Tensor, d: torch.Tensor, stream: int, split_k: int) -> None:
        assert a.shape[1] == self.weight.k
        assert a.stride(1) == d.stride(1) == 1
        assert a.stride(0) >= a.shape[1] or a.shape[0] == 1
        assert stream == 7
        self.splits.append(split_k)
        if self.aligned:
            assert a.data_ptr() % 16 == 0
            assert a.shape[0] == 1 or a.stride(0) % 8 == 0  # a single row has no stride
        d.copy_(ops.gemm_host(a, self.weight))

    def call(self, a: torch.Tensor, split_k: int) -> torch.Tensor:
        assert a.is_contiguous()
        assert not self.aligned or (a.data_ptr() % 16 == 0 and (a.numel() == a.shape[-1] or a.shape[-1] % 8 == 0))
        self.calls += 1
        self.splits.append(split_k)
        return ops.gemm_host(a, self.weight)


class _FakeLaunches(dict[tuple[Any, ...], tuple[_FakePlan, int]]):
    """Stands for `_C.Launches`, which runtime_scenarios.py tests: what is unusual goes the long way."""

    def remember(
        self, a: torch.Tensor, invariant: bool, plan: _FakePlan, split_k: int, layout: Any, options: Any
    ) -> None:
        shape, strides, dtype = layout
        result = torch.empty(shape, **options)
        assert shape == (*a.shape[:-1], plan.weight.n)
        assert (result.stride(), result.dtype, result.device) == (strides, dtype, a.device)
        self.setdefault((a.shape, invariant), (plan, split_k))

    def call(self, a: torch.Tensor, invariant: bool) -> torch.Tensor | None:
        found = self.get((a.shape, invariant))
        if found is None or not a.is_contiguous() or a.data_ptr() % 16 != 0 or a.requires_grad:
            return None
        return found[0].call(a, found[1])


@pytest.fixture(params=["sm80_cpasync_multistage", "sm90_tma_any"])
def fake_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], _FakePlan]:
    """The CUDA path of `ops` with fake kernels; returns the plan of each weight."""
    plans: dict[tuple[int, str], _FakePlan] = {}

    def choose(
        types: Any,
        m: int,
        n: int,
        k: int,
        device: Any,
        *,
        mainloops: Collection[str] | None = None,
        batch_invariant: bool = False,
    ) -> planner.Choice:
        config = planner.schedules(types, planner.Device(arch="sm_80", sm_count=108))[0]
        mainloop = request.param if mainloops is None or request.param in mainloops else next(iter(mainloops))
        schedule = dataclasses.replace(config.schedule, mainloop=mainloop)
        # Like the planner's: the split follows m, unless it must not.
        split_k = 3 if batch_invariant else 1 + m % 2
        return planner.Choice(config=dataclasses.replace(config, schedule=schedule), split_k=split_k)

    def plan(weight: layout.PackedWeight, config: Any) -> _FakePlan:
        mainloop = config.schedule.mainloop
        return plans.setdefault((id(weight), mainloop), _FakePlan(weight, "_tma_" in mainloop))

    monkeypatch.setattr(planner, "choose", choose)
    monkeypatch.setattr(ops, "planner_device", lambda index: None)
    monkeypatch.setattr(ops, "_plan", plan)
    monkeypatch.setattr(ops, "_launches", lambda weight: weight.plans.setdefault("launches", _FakeLaunches()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7))
    return plans


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.id.startswith(("D6", "leading", "P-GUARD", "P-NAN-int8", "m", "D3-k17-odd"))],
)
def test_cuda_path_around_the_kernel(case: Any, fake_gpu: dict[tuple[int, str], _FakePlan]) -> None:
    """Views, copies, outputs and alignment of the CUDA path, without a GPU."""

    def gemm(a: torch.Tensor, weight: layout.PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
        return ops._gemm_cuda(a, weight, out, None, None)

    case(gemm=gemm, device="cpu")


def test_cuda_calls_after_the_first_only_launch(fake_gpu: dict[tuple[int, str], _FakePlan]) -> None:
    a, packed = _inputs()
    first = ops._gemm_cuda(a, packed, None, None, None)
    (plan,) = fake_gpu.values()
    assert plan.calls == 0
    testing.check_equal(ops.gemm(a, packed), first)
    assert plan.calls == 1
    # Another shape, strides, a misaligned base, an output, a gradient: not that way.
    big = torch.zeros(4, 64, dtype=torch.float16)
    odd = torch.zeros(3 * 64 + 1, dtype=torch.float16)[1:].view(3, 64)
    for other in (big, big.t().contiguous().t()[:3], odd):
        ops.gemm(other, packed)
    ops.gemm(a, packed, out=torch.empty_like(first))
    with pytest.raises(ArgumentError, match="gradient"):
        ops.gemm(a.clone().requires_grad_(), packed)
    assert plan.calls == 1


def test_batch_invariant_cuda_calls_use_one_kernel_and_split(fake_gpu: dict[tuple[int, str], _FakePlan]) -> None:
    a, packed = _inputs()
    for m in (3, 1, 2, 3, 1):
        ops._gemm_cuda(a[:m], packed, None, None, None, True)
    (plan,) = fake_gpu.values()
    assert plan.splits == [3] * 5
    # Afterwards by the short way; calls that need not be invariant have launches of their own.
    for m in (3, 1):
        ops.gemm(a[:m], packed, batch_invariant=True)
    assert (plan.calls, plan.splits[5:]) == (2, [3, 3])
    for m in (3, 1):
        ops._gemm_cuda(a[:m], packed, None, None, None)
        ops.gemm(a[:m], packed)
    assert (plan.calls, plan.splits[7:]) == (4, [2, 2, 2, 2])
    ops.gemm(a, packed, batch_invariant=True)
    assert (plan.calls, plan.splits[11:]) == (5, [3])


def test_batch_invariant_rows_that_are_not_aligned(fake_gpu: dict[tuple[int, str], _FakePlan]) -> None:
    a, packed = _inputs()
    misaligned = torch.zeros(3 * 64 + 1, dtype=torch.float16)[1:].view(3, 64).copy_(a)
    good = ops._gemm_cuda(a, packed, None, None, None, True)
    ((_, mainloop),) = fake_gpu
    wide = torch.zeros(3, 65, dtype=torch.float16)[:, :64].copy_(a)
    for rows in (misaligned, misaligned[:1], wide):
        if "_tma_" in mainloop:
            with pytest.raises(
                ArgumentError, match=r"a: got rows that do not start at 16-byte.*batch_invariant.*clone"
            ):
                ops._gemm_cuda(rows, packed, None, None, None, True)
        else:
            testing.check_equal(ops._gemm_cuda(rows, packed, None, None, None, True), good[: rows.shape[0]])
    testing.check_equal(ops._gemm_cuda(wide[:1], packed, None, None, None, True), good[:1])  # one row has no stride
    assert len(fake_gpu) == 1


def test_batch_invariant_k_that_aligns_no_rows(fake_gpu: dict[tuple[int, str], _FakePlan]) -> None:
    """A single row would be aligned, several are not: the kernel that takes both serves both."""
    problem = testing.random_problem(testing.make_types("int4", k=68), 3, 24, 68)
    for m in (1, 3):
        ops._gemm_cuda(problem.a[:m], problem.packed, None, None, None, True)
    assert [mainloop for _, mainloop in fake_gpu] == ["sm80_cpasync_multistage"]
    (plan,) = fake_gpu.values()
    assert plan.splits == [3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", "uint4", "int6", "float8_e4m3"])
def test_speed_against_matmul(dtype: str) -> None:
    """m = 128, n = k = 4096: at most 3 times torch.matmul on the dequantized float32 weight."""
    n = k = 4096
    types = testing.make_types(dtype, k=k, group_size=128)
    problem = testing.random_problem(types, 128, n, k)
    weight = torch.from_numpy(problem.weight()).float()
    a = problem.a.float()

    def best(call: Any) -> float:
        times = []
        for _ in range(7):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    ours, theirs = best(lambda: ops.gemm(problem.a, problem.packed)), best(lambda: torch.matmul(a, weight.T))
    print(f"{dtype}: {ours * 1e3:.1f} ms, torch.matmul {theirs * 1e3:.1f} ms, ratio {ours / theirs:.2f}")
    assert ours <= 3 * theirs


def test_quantized_result_is_close_to_the_weight() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).half()
    q = quantize.quantize(weight, "int8")
    a = torch.randn(9, 256, generator=torch.Generator().manual_seed(1)).half()
    y = ops.gemm(a, layout.pack(q.codes, q.scale, types=q.types))
    assert testing.relative_error(y, (a.double() @ weight.double().T).numpy()) < 0.02


@pytest.mark.parametrize("name", ["data", "scale", "bias"])
def test_an_output_inside_the_weight_is_refused(name: str) -> None:
    types = testing.make_types("int4", k=4096, element_a="float16", scale_dtype="float32", group_size=32)
    problem = testing.random_problem(types, 1, 16, 4096, seed=1, bias=True)
    tensor = getattr(problem.packed, name)
    before = tensor.clone()
    out = tensor.view(-1).view(torch.float16)[:16].view(1, 16)
    with pytest.raises(ArgumentError, match="out: got memory that the weight is in; allowed: memory of its own"):
        ops.gemm(problem.a, problem.packed, out=out)
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("value", [1, 0, "x", None, 2.5])
def test_batch_invariant_is_true_or_false(value: object) -> None:
    types = testing.make_types("int4", k=64, element_a="float16")
    problem = testing.random_problem(types, 2, 32, 64, seed=1)
    with pytest.raises(ArgumentTypeError, match="batch_invariant: got"):
        ops.gemm(problem.a, problem.packed, batch_invariant=value)  # type: ignore[arg-type]


def test_what_is_no_weight_on_a_gpu_has_no_kernels() -> None:
    types = testing.make_types("int4", k=64, element_a="float16")
    packed = testing.random_problem(types, 2, 32, 64, seed=1).packed
    for call in (lambda w: ops.choose(w, 1), ops.kernels):
        with pytest.raises(ArgumentError, match="device: got cpu; allowed: a CUDA device"):
            call(packed)
        with pytest.raises(ArgumentTypeError, match="weight: got int; allowed: a PackedWeight"):
            call(3)
    with pytest.raises(ArgumentTypeError, match="configs: got int; allowed: GemmConfig objects"):
        ops.prepare([3])  # type: ignore[list-item]
    with pytest.raises(ArgumentTypeError, match="packed: got int; allowed: a PackedWeight"):
        layout.unpack(3)  # type: ignore[arg-type]


def test_a_kernel_that_would_round_the_weights_is_refused() -> None:
    """float8_e5m2 leaves float16 no exponents for group scales: only mainloops that scale accumulators are exact."""
    types = testing.make_types("float8_e5m2", k=64, element_a="float16", group_size=32)
    weight = testing.random_problem(types, 2, 32, 64, seed=1).packed
    device = planner.Device(arch="sm_90a", sm_count=132)
    for config in planner.schedules(types, device, mainloops=[support.SM90]):
        with pytest.raises(UnsupportedError, match=r"config: got a kernel of sm90_tma_.* for scales outside .* sm80_"):
            ops._check_config(config, weight)
    for config in planner.schedules(types, device, mainloops=support.MAINLOOPS_FOR_ANY_TENSORS):
        ops._check_config(config, weight)


@pytest.mark.parametrize("value", ["2", 1.0, True, -1, 1 << 40])
def test_split_k_is_a_small_integer(value: Any) -> None:
    problem = testing.random_problem(testing.make_types("int4", k=64), 3, 48, 64)
    with pytest.raises((ArgumentError, ArgumentTypeError), match="split_k: got"):
        ops.gemm(problem.a, problem.packed, split_k=value)
