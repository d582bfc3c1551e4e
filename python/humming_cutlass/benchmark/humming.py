"""Humming (the package `humming-kernels`) as a contender, through its public functions and its own choice of kernel."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from humming_cutlass import dtypes
from humming_cutlass.benchmark.contenders import Contender, UnavailableError, bytes_of, copies_needed
from humming_cutlass.benchmark.problem import RandomWeight
from humming_cutlass.config import TypeConfig

__all__ = ["Humming", "pack_bits"]


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns codes (rows, k) as a little-endian bit stream along k, int32 (rows, k * bits / 32); k in whole words."""
    rows, k = codes.shape
    grouped = codes.view(rows, k // 32, 32)
    words = torch.zeros(rows, k // 32, bits, dtype=torch.int64, device=codes.device)
    for i in range(32):
        code = grouped[..., i].long()
        word, offset = divmod(i * bits, 32)
        words[..., word] |= (code << offset) & 0xFFFFFFFF
        if offset + bits > 32:
            words[..., word + 1] |= code >> (32 - offset)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return words.to(torch.int32).view(rows, k * bits // 32)


def _weight_type(types: TypeConfig) -> str:
    """Returns Humming's name of the weight's type; it has unsigned integers only, with a fixed zero in the middle."""
    weight = dtypes.parse(types.element_b)
    if types.element_zero not in ("none", "integer") or types.element_scale != types.element_a:
        raise UnavailableError(f"humming: no peer for zero points {types.element_zero}, scales {types.element_scale}")
    if weight.kind is dtypes.Kind.INT and weight.bits >= 2:
        return f"uint{weight.bits}"
    if weight.kind is dtypes.Kind.UINT and weight.bits >= 2 and types.element_zero == "integer":
        return weight.name
    if weight.kind is dtypes.Kind.FLOAT:
        return weight.name.replace("_", "")
    raise UnavailableError(f"humming: no peer for {weight.name} with zero points {types.element_zero}")


class Humming(Contender):
    """Humming's dense GEMM; weights are packed and kernels chosen and compiled by its own code."""

    def __init__(self, weight: RandomWeight, rotation_bytes: int) -> None:
        try:
            import humming
            from humming import dtypes as humming_dtypes
            from humming.schema import HummingInputSchema, HummingWeightSchema
            from humming.transform import prepare_fp16_e8m0_scale, prepare_layer_config, transform_humming_tensors
        except ImportError as error:
            raise UnavailableError(f"humming: not importable ({error})") from None
        problem, types = weight.problem, weight.problem.types
        if weight.codes.device.type != "cuda":
            raise UnavailableError("humming: needs a GPU")
        self.impl = f"humming-{getattr(humming, '__version__', 'unknown')}"
        name = _weight_type(types)
        codes = weight.codes
        if dtypes.parse(types.element_b).kind is dtypes.Kind.INT:
            codes = codes ^ (1 << (types.bits - 1))  # two's complement to offset binary
        tensors: dict[str, torch.Tensor] = {
            "weight": pack_bits(codes, types.bits),
            "weight_scale": weight.scale.contiguous(),
        }
        if weight.zero is not None:
            if problem.n % 32:
                raise UnavailableError("humming: zero points need n in multiples of 32")
            tensors["zero_point"] = pack_bits(weight.zero.t().contiguous().to(torch.uint8), types.bits).t().contiguous()
        schema = HummingWeightSchema(
            b_dtype=str(humming_dtypes.DataType.from_str(name)),
            weight_scale_group_size=max(types.group_size, 0),
            has_zero_point=weight.zero is not None,
        )
        schema, tensors = schema.convert_symmetric_integer_weight(tensors)
        config = prepare_layer_config(
            problem.n,
            problem.k,
            schema,
            HummingInputSchema(a_dtype=types.element_a, input_scale_group_size=0),
            num_experts=0,
            torch_dtype=problem.dtype,
            device=weight.codes.device.index or 0,
            tensors=tensors,
        )
        config, tensors = prepare_fp16_e8m0_scale(config, tensors)
        first: dict[str, torch.Tensor] = transform_humming_tensors(config, tensors)
        self.config = config
        self.weight_bytes = bytes_of(first.values())
        self.copies = [first]
        for _ in range(copies_needed(self.weight_bytes, rotation_bytes) - 1):
            self.copies.append({name: t.clone() for name, t in first.items()})
        self.locks = torch.zeros(4096, dtype=torch.int32, device=weight.codes.device)

    def _tune(self, m: int) -> dict[str, Any]:
        from humming.tune import get_heuristics_config

        return dict(get_heuristics_config(self.config, shape_m=m, gemm_type="dense", use_f16_accum=False, device=0))

    def calls(self, a: torch.Tensor, out: torch.Tensor) -> list[Callable[[], object]]:
        """See `Contender.calls`."""
        from humming import ops
        from humming.kernel.humming import HummingKernel

        arguments = json.loads(self.config.to_str()) | {"gemm_type": "dense", "use_f16_accum": False}
        arguments |= self._tune(a.shape[0])
        arguments.pop("sublayer_name", None)
        sm_count = arguments.pop("num_sms", 0)
        kernel = HummingKernel(**arguments)
        configs = torch.tensor([0, 1 << 30, kernel.kernel_id, sm_count], dtype=torch.int64)

        def launch(copy: dict[str, torch.Tensor]) -> Callable[[], object]:
            return lambda: ops.launch_kernel(
                configs=configs, inputs=a, outputs=out, input_scale=None, locks=self.locks, **copy
            )

        return [launch(copy) for copy in self.copies]

    def kernel(self, m: int) -> str:
        """See `Contender.kernel`."""
        tuned = self._tune(m)
        shapes = ("x".join(map(str, tuned[key])) for key in ("block_shape", "warp_shape"))
        return f"{'/'.join(shapes)} {tuned.get('mma_type')} stages={tuned.get('num_stages')}"
