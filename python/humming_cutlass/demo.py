"""The main job on random weights: quantize, pack, compile, multiply, and compare with a float64 reference."""

from __future__ import annotations

import dataclasses
import time

import torch

from humming_cutlass import dtypes, ops, planner, quantize
from humming_cutlass.build import INSTALL_COMMAND
from humming_cutlass.config import TypeConfig
from humming_cutlass.errors import ToolchainError
from humming_cutlass.layer import HummingLayer

__all__ = ["DemoResult", "choose_device", "run_demo"]

_REFERENCE_ROWS = 1024
_SECONDS_ON_CPU = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What the demo measured.

    Attributes:
        device: where it ran.
        reason: why there and not on a GPU; empty on a GPU.
        kernel: the kernel that ran.
        weight: the weight's type.
        m: tokens.
        n: rows of the weight.
        k: columns of the weight.
        first: the first outputs.
        expected: the reference's.
        relative_error: Frobenius, against float64 on the quantized weight.
        bound: what `relative_error` must not exceed.
        rounding_error: Frobenius, against float64 on the weight before it was quantized.
        prepare_seconds: quantize, pack and, on a GPU, compile or find the kernels.
        us: microseconds a call, the fastest of several; the weight may be in a cache (`bench` keeps it out).
        tflops: 2 m n k / time.
        gbps: bytes of the packed weight / time.
    """

    device: str
    reason: str
    kernel: str
    weight: str
    m: int
    n: int
    k: int
    first: list[float]
    expected: list[float]
    relative_error: float
    bound: float
    rounding_error: float
    prepare_seconds: float
    us: float
    tflops: float
    gbps: float

    @property
    def ok(self) -> bool:
        """Whether the error is within its bound; a NaN is not."""
        return self.relative_error <= self.bound


def choose_device() -> tuple[torch.device, str]:
    """Returns where to run, and why not on a GPU: `cuda` needs a GPU, a torch that sees it and a compiler."""
    from humming_cutlass import _C, build

    if not torch.cuda.is_available():
        if _C.driver_available():
            return torch.device("cpu"), f"there is a CUDA driver, but torch {torch.__version__} sees no GPU"
        return torch.device("cpu"), "there is no NVIDIA GPU"
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        build.find_toolchain(ops.planner_device(device.index or 0).arch)
    except ToolchainError as error:
        return torch.device("cpu"), f"no usable CUDA compiler; one command adds it: {INSTALL_COMMAND}\n({error})"
    return device, ""


def run_demo(
    *, device: torch.device, reason: str = "", m: int = 128, n: int = 8192, k: int = 8192, weight_type: str = "int6"
) -> DemoResult:
    """Runs the example of the README on a random weight (n, k) and m tokens of float16.

    Raises:
        HummingError: whatever the layer raises.
    """
    generator = torch.Generator(device=device)
    generator.manual_seed(0)
    weight = (torch.randn(n, k, device=device, generator=generator) * 0.02).half()
    inputs = torch.randn(m, k, device=device, generator=generator).half()

    begin = time.perf_counter()
    layer = HummingLayer(
        shape_n=n, shape_k=k, weight_config={"dtype": weight_type}, torch_dtype=torch.float16, device=device
    )
    layer.load_from_unquantized(weight)
    layer.transform()
    prepare_seconds = time.perf_counter() - begin

    output = torch.full((m, n), float("nan"), dtype=torch.float16, device=device)
    with torch.no_grad():
        layer(inputs, out=output)
        expected, unquantized = _references(layer.types, weight, inputs)
        got = output.double()
        us = _time(layer, inputs, output)

    kernel = f"host dequantization, torch.matmul in float32 on {torch.get_num_threads()} threads"
    if device.type == "cuda":
        choice = planner.choose(layer.types, m, n, k, ops.planner_device(device.index or 0))
        kernel = f"{choice.config.name}, split_k={choice.split_k}"
    weight_bytes = n * k * dtypes.parse(weight_type).bits / 8
    return DemoResult(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        reason=reason,
        kernel=kernel,
        weight=weight_type,
        m=m,
        n=n,
        k=k,
        first=got[0, :5].tolist(),
        expected=expected[0, :5].tolist(),
        relative_error=float((got - expected).norm() / expected.norm()),
        bound=5e-4,
        rounding_error=float((got - unquantized).norm() / unquantized.norm()),
        prepare_seconds=prepare_seconds,
        us=us,
        tflops=2 * m * n * k / us / 1e6,
        gbps=weight_bytes / us / 1e3,
    )


def _references(types: TypeConfig, weight: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs times the quantized and times the original weight, float64 (m, n): no packing, no kernel."""
    quantized = quantize.quantize(weight, types)
    table = torch.from_numpy(dtypes.parse(types.element_b).values().copy()).to(weight.device)
    a = inputs.double()
    expected, original = [], []
    for start in range(0, weight.shape[0], _REFERENCE_ROWS):
        rows = slice(start, start + _REFERENCE_ROWS)
        block = table[quantized.codes[rows].int()]
        if quantized.zero is not None:
            block -= quantized.zero[rows].double()
        block *= quantized.scale[rows].double()
        expected.append(a @ block.t())
        original.append(a @ weight[rows].double().t())
    return torch.cat(expected, dim=1), torch.cat(original, dim=1)


def _time(layer: HummingLayer, inputs: torch.Tensor, output: torch.Tensor) -> float:
    if inputs.device.type == "cuda":
        from humming_cutlass.benchmark.timing import time_calls

        return time_calls([lambda: layer(inputs, out=output)], device=inputs.device).us_min
    best, until = float("inf"), time.perf_counter() + _SECONDS_ON_CPU
    while time.perf_counter() < until or best == float("inf"):
        begin = time.perf_counter()
        layer(inputs, out=output)
        best = min(best, time.perf_counter() - begin)
    return best * 1e6
