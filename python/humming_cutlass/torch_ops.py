"""The GEMM as an operator of torch, `torch.ops.humming_cutlass.gemm`, which torch.compile and torch.export see.

The operator takes the tensors of a packed weight, so that a graph sees what it depends on. Calls outside of graphs do
not come here: they need no dispatch. Importing this module registers the operator; a process that only loads an
exported program has to import it, or `layer`, first.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from humming_cutlass import ops
from humming_cutlass.config import TypeConfig
from humming_cutlass.errors import ArgumentError, ArgumentTypeError, explain
from humming_cutlass.layout import PackedWeight

__all__ = ["gemm", "outside_graph", "remember", "spell_elements", "trace"]

# Without `torch.library.custom_op`, whose wrappers cost several times what a launch does.
_library = torch.library.Library("humming_cutlass", "DEF")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "gemm(Tensor a, Tensor data, Tensor scale, Tensor? zero, Tensor? bias, Tensor? global_scale, int n, int k, "
    "int group_size, str elements, bool batch_invariant=False) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_weights: weakref.WeakValueDictionary[tuple[Any, ...], PackedWeight] = weakref.WeakValueDictionary()
"""Packed weights by the addresses of their tensors and what identifies their bytes. A weight that is alive owns its
memory, so that no other can have its addresses. Its shapes were checked once and are not looked at again."""


def spell_elements(types: TypeConfig) -> str:
    """Returns the elements of `types` in the order of its fields, as the operator takes them: one string is cheap."""
    return f"{types.element_a},{types.element_b},{types.element_d},{types.element_scale},{types.element_zero}"


@functools.cache
def _types(elements: str, group_size: int) -> TypeConfig:
    """Undoes `spell_elements`."""
    names = elements.split(",")
    if len(names) != 5:
        raise ArgumentError(explain("elements", repr(elements), "what torch_ops.spell_elements returns"))
    a, b, d, scale, zero = names
    return TypeConfig(
        element_a=a, element_b=b, element_d=d, element_scale=scale, element_zero=zero, group_size=group_size
    )


def _key(
    data: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    elements: str,
) -> tuple[Any, ...]:
    return (
        data.data_ptr(),
        scale.data_ptr(),
        None if zero is None else zero.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if global_scale is None else global_scale.data_ptr(),
        n,
        k,
        group_size,
        elements,
    )


def remember(weight: PackedWeight) -> None:
    """Lets graphs use the launch plans of a weight, for as long as it lives."""
    if weight.data.device.type in ("cpu", "cuda"):
        types = weight.types
        tensors = (weight.data, weight.scale, weight.zero, weight.bias, weight.global_scale)
        _weights[_key(*tensors, weight.n, weight.k, types.group_size, spell_elements(types))] = weight


def _rebuild(key: tuple[Any, ...], tensors: tuple[torch.Tensor | None, ...]) -> PackedWeight:
    """Returns a weight made from an operator's tensors, checked, and remembers it while the first of them lives."""
    n, k, group_size, elements = key[-4:]
    names = ("data", "scale", "zero", "bias", "global_scale")
    # Aliases: holding the tensors themselves would keep them alive for ever.
    aliases: dict[str, Any] = {x: None if t is None else t.detach() for x, t in zip(names, tensors, strict=True)}
    weight = PackedWeight(types=_types(elements, group_size), n=n, k=k, **aliases)
    _weights[key] = weight
    # What holds the weight: the arguments of a callback that waits for the end of `data`.
    weakref.finalize(tensors[0], _release, weight).atexit = False
    return weight


def _release(weight: PackedWeight) -> None:
    pass


def _gemm(
    a: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    elements: str,
    batch_invariant: bool = False,
) -> torch.Tensor:
    key = _key(data, scale, zero, bias, global_scale, n, k, group_size, elements)
    weight = _weights.get(key)
    if weight is None:
        weight = _rebuild(key, (data, scale, zero, bias, global_scale))
    return ops.gemm_eager(a, weight, None, None, None, batch_invariant)  # type: ignore[no-any-return]


for _key_of_dispatch in ("CPU", "CUDA"):
    _library.impl("gemm", _gemm, _key_of_dispatch)  # type: ignore[no-untyped-call]


@torch.library.register_fake("humming_cutlass::gemm", lib=_library)  # type: ignore[untyped-decorator]
def _gemm_fake(
    a: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    n: int,
    k: int,
    group_size: int,
    elements: str,
    batch_invariant: bool = False,
) -> torch.Tensor:
    types = _types(elements, group_size)
    ops.check_activations(a, data, types, k)
    return a.new_empty((*a.shape[:-1], n), dtype=getattr(torch, types.element_d))


def gemm(
    a: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    *,
    n: int,
    k: int,
    types: TypeConfig,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Returns `ops.gemm` of activations and the tensors of a `PackedWeight`, through the operator.

    Under torch.compile and torch.export this is one node, for every m. The arguments are those of `PackedWeight`.

    Raises:
        ArgumentTypeError, ArgumentError: as `ops.gemm`; while a graph is traced torch wraps them in its own errors.
    """
    weight = (data, scale, zero, bias, global_scale, n, k, types.group_size, spell_elements(types))
    result: torch.Tensor = torch.ops.humming_cutlass.gemm.default(a, *weight, batch_invariant)
    return result


def trace(a: Any, weight: Any, out: Any, config: Any, split_k: Any, batch_invariant: bool) -> Any:
    """Does what `ops.gemm` does, with the same arguments, while a graph is traced."""
    if not isinstance(weight, PackedWeight) or not isinstance(weight.data, torch.Tensor):
        return outside_graph("weight", ops.gemm_eager, a, weight, out, config, split_k, batch_invariant)
    for parameter, value in (("out", out), ("config", config), ("split_k", split_k)):
        if value is not None:
            return outside_graph(parameter, ops.gemm_eager, a, weight, out, config, split_k, batch_invariant)
    if not isinstance(batch_invariant, bool):
        raise ArgumentTypeError(explain("batch_invariant", type(batch_invariant).__name__, "True or False"))
    return gemm(
        a,
        weight.data,
        weight.scale,
        weight.zero,
        weight.bias,
        weight.global_scale,
        n=weight.n,
        k=weight.k,
        types=weight.types,
        batch_invariant=batch_invariant,
    )


def outside_graph(parameter: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function between two graphs: torch.compile breaks the graph here, or says so with `fullgraph=True`.

    Raises:
        ArgumentError: torch.export, which knows one graph only.
    """
    if not torch.compiler.is_dynamo_compiling():
        allowed = "None while torch.export traces: an exported program holds calls that return their result"
        raise ArgumentError(explain(parameter, "a value", allowed))
    return _call_with_out_config_or_split_k(function, *arguments)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _call_with_out_config_or_split_k(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
