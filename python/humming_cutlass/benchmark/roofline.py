"""The shortest time that the hardware allows: max(bytes / bandwidth, operations / peak)."""

from __future__ import annotations

import dataclasses

import torch

from humming_cutlass.benchmark.timing import time_calls

__all__ = ["CEILINGS", "Roofline", "roofline"]

CEILINGS: dict[str, tuple[float, dict[str, float]]] = {
    "NVIDIA H200": (4590.0, {"bfloat16": 845.0, "float16": 810.0}),
}
"""Per GPU: read-only bandwidth in GB/s (bulk copies, 4 GB) and, per activation type, sustained TFLOP/s of the
tensor cores at the power limit, both measured with micro-benchmarks; bench/NOTES.md says how."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Two ceilings and where they come from.

    Attributes:
        bandwidth_gbps: memory bandwidth in GB/s.
        peak_tflops: arithmetic peak in TFLOP/s.
        source: for each of the two `given`, `table` or `measured`.
    """

    bandwidth_gbps: float
    peak_tflops: float
    source: str

    def us(self, *, moved_bytes: float, operations: float) -> float:
        """Returns the bound in microseconds for `moved_bytes` and `operations` (2 m n k)."""
        return max(moved_bytes / (self.bandwidth_gbps * 1e3), operations / (self.peak_tflops * 1e6))


def roofline(
    device: torch.device, dtype: torch.dtype, *, bandwidth_gbps: float | None = None, peak_tflops: float | None = None
) -> Roofline:
    """Returns the ceilings of `device` for activations of `dtype`: those given, else of `CEILINGS`, else measured."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    known = CEILINGS.get(name)
    element = str(dtype).removeprefix("torch.")
    bandwidth_source = peak_source = "given"
    if bandwidth_gbps is None and known is not None:
        bandwidth_gbps, bandwidth_source = known[0], "table"
    if bandwidth_gbps is None:
        bandwidth_gbps, bandwidth_source = _measure_bandwidth(device), "measured (sum of a large tensor)"
    if peak_tflops is None and known is not None and element in known[1]:
        peak_tflops, peak_source = known[1][element], "table"
    if peak_tflops is None:
        peak_tflops, peak_source = _measure_peak(device, dtype), "measured (torch.matmul)"
    return Roofline(
        bandwidth_gbps=bandwidth_gbps,
        peak_tflops=peak_tflops,
        source=f"bandwidth {bandwidth_source}, peak {peak_source}",
    )


def _measure_bandwidth(device: torch.device) -> float:
    count = (1 << 29) if device.type == "cuda" else (1 << 26)
    x = torch.ones(count, dtype=torch.float32, device=device)
    return 4 * count / (time_calls([x.sum], device=device).us * 1e3)


def _measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 1024
    dtype = dtype if device.type == "cuda" else torch.float32
    x = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(x)
    timing = time_calls([lambda: torch.matmul(x, x.t(), out=out)], device=device, sustained=True)
    return 2 * size**3 / (timing.us * 1e6)
