"""Writes the C++ that instantiates one kernel.

The emitted file is what an embedder would write by hand: a struct of aliases, each the PascalCase of a config
field, and one instantiation. It holds no logic; bit extraction, layouts and shared-memory sizes are computed by the
headers. The output is a pure function of the config.
"""

from __future__ import annotations

from humming_cutlass import dtypes, support
from humming_cutlass.build import KernelSource
from humming_cutlass.config import GemmConfig
from humming_cutlass.errors import ArgumentTypeError, UnsupportedError, explain

__all__ = ["GEMM_ENTRY", "PACK_ENTRY", "TRAITS_SYMBOL", "emit", "emit_pack"]

GEMM_ENTRY = "humming_cutlass_gemm"
"""Entry point of every GEMM cubin."""
PACK_ENTRY = "humming_cutlass_pack"
"""Entry point of every packing cubin."""
TRAITS_SYMBOL = "humming_cutlass_traits"
"""The exported `KernelTraits` of every GEMM cubin."""

_KERNELS = {
    support.SM80: ("GemmSm80", "gemm_sm80.hpp", False),
    support.SM90: ("GemmSm90", "gemm_sm90.hpp", True),
    support.SM90_DECODE: ("GemmSm90Decode", "gemm_sm90_decode.hpp", True),
}
"""Mainloop -> the kernel's template, its header under kernel/, and whether it takes tensor maps."""


def _zero(element_zero: str) -> str:
    return {"none": "NoZero", "integer": "IntegerZero"}.get(element_zero) or dtypes.parse(element_zero).cpp


def emit(config: GemmConfig) -> KernelSource:
    """Returns the source of the kernel that `config` describes.

    Raises:
        ArgumentTypeError: `config` is no `GemmConfig`.
        UnsupportedError: `support.check` refuses the config.
    """
    if not isinstance(config, GemmConfig):
        raise ArgumentTypeError(explain("config", type(config).__name__, "a GemmConfig"))
    if (reason := support.check(config)) is not None:
        raise UnsupportedError(reason)
    types, schedule = config.types, config.schedule
    kernel, header, has_tensor_maps = _KERNELS[schedule.mainloop]
    parameters = "__grid_constant__ GemmArguments const arguments"
    arguments = "arguments"
    if has_tensor_maps:
        parameters += ", __grid_constant__ TensorMaps const maps"
        arguments += ", maps"
    text = f"""\
// {config.name}
#include "humming_cutlass/kernel/{header}"

namespace {{

using namespace humming_cutlass;

struct Config {{
  using ElementA = {dtypes.parse(types.element_a).cpp};
  using ElementB = {dtypes.parse(types.element_b).cpp};
  using ElementD = {dtypes.parse(types.element_d).cpp};
  using ElementScale = {dtypes.parse(types.element_scale).cpp};
  using ElementZero = {_zero(types.element_zero)};
  static constexpr int GroupSize = {types.group_size};
  using TileShape = Shape<{", ".join(map(str, schedule.tile_shape))}>;
  using WarpShape = Shape<{", ".join(map(str, schedule.warp_shape))}>;
  static constexpr int StageCount = {schedule.stage_count};
}};

using Kernel = kernel::{kernel}<Config>;

}}  // namespace

extern "C" __constant__ KernelTraits {TRAITS_SYMBOL} = Kernel::traits();

extern "C" __global__ void __launch_bounds__(Kernel::Threads, 1)
    {GEMM_ENTRY}({parameters}) {{
  extern __shared__ __align__(1024) uint8_t smem[];
  Kernel::run({arguments}, smem);
}}
"""
    return KernelSource(name=config.name, text=text, arch=config.arch)


def emit_pack(element_b: str, arch: str) -> KernelSource:
    """Returns the source of the kernel that packs codes of type `element_b` for 16-bit operands.

    Raises:
        ArgumentTypeError: an argument is no string.
        UnsupportedError: `element_b` is not a weight type, or `arch` no target.
    """
    for parameter, value in (("element_b", element_b), ("arch", arch)):
        if not isinstance(value, str):
            raise ArgumentTypeError(explain(parameter, type(value).__name__, "a str"))
    if not support.compute_capability(arch):
        raise UnsupportedError(explain("arch", repr(arch), "a target as nvcc spells it, e.g. sm_90a"))
    if element_b not in dtypes.WEIGHT_TYPES:
        raise UnsupportedError(explain("element_b", element_b, "a weight type of dtypes.WEIGHT_TYPES"))
    name = f"{arch}__pack_{element_b}"
    text = f"""\
// {name}
#include "humming_cutlass/kernel/pack.hpp"

extern "C" __constant__ humming_cutlass::KernelTraits {TRAITS_SYMBOL} = humming_cutlass::kernel::pack_traits();

extern "C" __global__ void __launch_bounds__(humming_cutlass::kernel::PackThreads)
    {PACK_ENTRY}(__grid_constant__ humming_cutlass::PackArguments const arguments) {{
  humming_cutlass::kernel::pack<humming_cutlass::{dtypes.parse(element_b).cpp}>(arguments);
}}
"""
    return KernelSource(name=name, text=text, arch=arch)
