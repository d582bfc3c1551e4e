"""Humming (the package `humming-kernels`) as a contender, through its public functions and its own choice of kernel."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from humming_cutlass import dtypes
from humming_cutlass.benchmark.contenders import Contender, UnavailableError, bytes_of, copies_needed
from humming_cutlass.benchmark.problem import Problem, RandomWeight
from humming_cutlass.config import TypeConfig

__all__ = ["Humming", "pack_bits", "precompile"]


_SCALES = {"float8_e8m0": "float8_e8m0fnu", "float8_e4m3": "float8_e4m3fn"}
"""Types of scales, beside the activations' own, that Humming has for small floats, as torch names them."""


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
    own_scale = types.element_scale == types.element_a
    if weight.kind is dtypes.Kind.FLOAT and (own_scale or types.element_scale in _SCALES):
        return weight.name.replace("_", "")
    if types.element_zero not in ("none", "integer") or not own_scale:
        raise UnavailableError(f"humming: no peer for zero points {types.element_zero}, scales {types.element_scale}")
    if weight.kind is dtypes.Kind.INT and weight.bits >= 2:
        return f"uint{weight.bits}"
    if weight.kind is dtypes.Kind.UINT and weight.bits >= 2 and types.element_zero == "integer":
        return weight.name
    raise UnavailableError(f"humming: no peer for {weight.name} with zero points {types.element_zero}")


def precompile(problems: Sequence[Problem], tokens: Sequence[int], device: torch.device) -> None:
    """Compiles, on all cores, the kernels that `Humming` will ask for one by one.

    A small weight of each format makes Humming compile what repacks weights and tells its description of a layer; from
    that follow the GEMMs of all shapes. What fails here is left to fail, and to be reported, where it is needed.
    """
    if device.type != "cuda":
        return
    try:
        from humming.kernel.humming import HummingKernel
    except ImportError:
        return
    formats: dict[TypeConfig, list[Problem]] = {}
    for problem in problems:
        formats.setdefault(problem.types, []).append(problem)

    def describe(problem: Problem) -> Any:
        with contextlib.suppress(Exception), torch.cuda.device(device), torch.no_grad():
            small = dataclasses.replace(problem, n=256, k=1024)
            return Humming(RandomWeight.draw(small, device, seed=0), 0).config
        return None

    def build(arguments: dict[str, Any]) -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device):
            HummingKernel(**arguments)

    first, *others = (each[0] for each in formats.values())
    configs = [describe(first)]  # alone: it initializes what the others share
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        configs += pool.map(describe, others)
        kernels: dict[str, dict[str, Any]] = {}
        for config, same in zip(configs, formats.values(), strict=True):
            for problem in same if config is not None else ():
                shaped = dataclasses.replace(config, shape_n=problem.n, shape_k=problem.k)
                for m in tokens:
                    with contextlib.suppress(Exception):
                        arguments, _ = _kernel(shaped, m)
                        kernels[json.dumps(arguments, sort_keys=True, default=str)] = arguments
        list(pool.map(build, kernels.values()))


def _tune(config: Any, m: int) -> dict[str, Any]:
    from humming.tune import get_heuristics_config

    return dict(get_heuristics_config(config, shape_m=m, gemm_type="dense", use_f16_accum=False, device=0))


def _kernel(config: Any, m: int) -> tuple[dict[str, Any], int]:
    """Returns the arguments of the kernel that Humming chooses for m tokens, and its number of SMs."""
    arguments = json.loads(config.to_str()) | {"gemm_type": "dense", "use_f16_accum": False}
    arguments |= _tune(config, m)
    arguments.pop("sublayer_name", None)
    sm_count = arguments.pop("num_sms", 0)
    return arguments, sm_count


class Humming(Contender):
    """Humming's dense GEMM; weights are packed and kernels chosen and compiled by its own code."""

    tolerance = 4.0  # where it splits k, it rounds partial sums to the output's type

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
        words: dict[str, Any] = {}
        if types.element_scale != types.element_a:
            words["bs_dtype"] = types.element_scale.replace("_", "")
            tensors["weight_scale"] = weight.scale.view(getattr(torch, _SCALES[types.element_scale]))
        if weight.global_scale is not None:
            words["weight_scale_2_type"] = "tensor"
            tensors["weight_scale_2"] = weight.global_scale
        schema = HummingWeightSchema(
            b_dtype=str(humming_dtypes.DataType.from_str(name)),
            weight_scale_group_size=max(types.group_size, 0),
            has_zero_point=weight.zero is not None,
            **words,
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

    def calls(self, a: torch.Tensor, out: torch.Tensor) -> list[Callable[[], object]]:
        """See `Contender.calls`."""
        from humming import ops
        from humming.kernel.humming import HummingKernel

        arguments, sm_count = _kernel(self.config, a.shape[0])
        kernel = HummingKernel(**arguments)
        configs = torch.tensor([0, 1 << 30, kernel.kernel_id, sm_count], dtype=torch.int64)

        def launch(copy: dict[str, torch.Tensor]) -> Callable[[], object]:
            return lambda: ops.launch_kernel(
                configs=configs, inputs=a, outputs=out, input_scale=None, locks=self.locks, **copy
            )

        return [launch(copy) for copy in self.copies]

    def kernel(self, m: int) -> str:
        """See `Contender.kernel`."""
        tuned = _tune(self.config, m)
        shapes = ("x".join(map(str, tuned[key])) for key in ("block_shape", "warp_shape"))
        return f"{'/'.join(shapes)} {tuned.get('mma_type')} stages={tuned.get('num_stages')}"
