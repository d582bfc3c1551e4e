"""The GEMM: D = A * dequantize(weight)^T * global_scale + bias, on the CPU and on CUDA devices.

A CUDA call goes planner -> emitter -> build -> cubin once per configuration and then only through a plan that is kept
on the weight. A CPU call dequantizes blocks of rows with the host build of the device code and multiplies them with
torch, or numpy where torch is absent. A call that torch.compile or torch.export traces becomes one node of the graph,
the operator of `torch_ops`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np

from humming_cutlass import _tensors, planner, support, tune
from humming_cutlass._tensors import Array
from humming_cutlass.config import ATOM_N, INT32_MAX, GemmConfig, TypeConfig, integer
from humming_cutlass.errors import ArgumentError, ArgumentTypeError, UnsupportedError, explain
from humming_cutlass.layout import PackedWeight

__all__ = ["choose", "gemm", "gemm_host", "kernels", "planner_device", "prepare"]

_BLOCK_ELEMENTS = 1 << 22
"""Float32 weights that exist at one time on the CPU path, 16 MB a calling thread."""

_PLAN_LIMIT = 1024
"""Shapes of activations whose launch is remembered per weight."""

_kernels: dict[str, Any] = {}
_kernels_lock = threading.Lock()
_buffers = threading.local()


def gemm(
    a: Array,
    weight: PackedWeight,
    *,
    out: Array | None = None,
    config: GemmConfig | None = None,
    split_k: int | None = None,
    batch_invariant: bool = False,
) -> Array:
    """Returns activations times a packed weight, (..., n).

    For inference: no gradient is computed, and an input that asks for one is refused. On a CUDA device the call is put
    on torch's current stream.

    Args:
        a: activations (..., k) in `weight.types.element_a`, on the weight's device. Rows with inner stride 1 are read
            in place, other strides are copied.
        weight: a packed weight.
        out: where to write the result, (..., n) in `weight.types.element_d`; returned. Memory outside it is untouched.
        config: the kernel to use on a CUDA device; None lets the planner choose.
        split_k: CTAs that share the k range of an output tile, with `config`; None lets the planner choose, or 1. 0 is
            stream-k, of the SM90 mainloop: the k ranges of all tiles, one after the other, dealt out evenly.
        batch_invariant: whether a row of the result must have the same bits however many rows `a` has. One kernel then
            serves every number of rows, so that some are slower; the CPU multiplies row by row.

    Raises:
        ArgumentTypeError: an argument has the wrong Python type or dtype.
        ArgumentError: a shape or device does not fit, `a` requires a gradient, elements of `out` share memory with one
            another, with `a` or the weight, or `batch_invariant` comes with `config`, `split_k` or unaligned rows.
        UnsupportedError: no kernel implements `config`.
        ToolchainError, CompileError, CacheError, LaunchError: a kernel cannot be built or run.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        from humming_cutlass import torch_ops

        return torch_ops.trace(a, weight, out, config, split_k, batch_invariant)
    return gemm_eager(a, weight, out, config, split_k, batch_invariant)


def gemm_eager(
    a: Array,
    weight: PackedWeight,
    out: Array | None = None,
    config: GemmConfig | None = None,
    split_k: int | None = None,
    batch_invariant: bool = False,
) -> Array:
    """Does what `gemm` does, at once, and never adds to a graph."""
    if out is None and config is None and split_k is None and isinstance(weight, PackedWeight):
        # The way of every call but the first of its shape: nothing but the launch.
        launches = weight.plans.get(_LAUNCHES)
        if launches is not None and isinstance(batch_invariant, bool):
            result = launches.call(a, batch_invariant)
            if result is not None:
                return result
    _check(a, weight, out)
    if not isinstance(batch_invariant, bool):
        raise ArgumentTypeError(explain("batch_invariant", type(batch_invariant).__name__, "True or False"))
    if split_k is not None and not 0 <= integer(split_k, "split_k", "an integer >= 0, or None") <= INT32_MAX:
        raise ArgumentError(explain("split_k", split_k, "an integer from 0, or None", 1))
    given = "config" if config is not None else "split_k" if split_k is not None else None
    if batch_invariant and given is not None:
        allowed = "None with batch_invariant, which picks one kernel for every number of rows"
        raise ArgumentError(explain(given, "a kernel's choice", allowed))
    if _tensors.is_torch(a) and a.device.type == "cuda":
        return _gemm_cuda(a, weight, out, config, split_k, batch_invariant)
    if given is not None:
        raise ArgumentError(explain(given, "a kernel's choice for activations on the CPU", "None"))
    return _gemm_host(a, weight, out, batch_invariant)


def gemm_host(a: Array, weight: PackedWeight, *, out: Array | None = None) -> Array:
    """Returns what `gemm` does, computed on the CPU in float32 and rounded once.

    Args:
        a: activations (..., k) on the CPU; torch, or numpy (bfloat16 as ml_dtypes has it).
        weight: a packed weight on the CPU, in the library of `a`.
        out: where to write the result; returned.

    Raises:
        ArgumentTypeError: an argument has the wrong Python type or dtype.
        ArgumentError: a shape or device does not fit, or `a` requires a gradient.
    """
    _check(a, weight, out)
    if _tensors.device_of(a) != "cpu":
        raise ArgumentError(explain("a", f"device {_tensors.device_of(a)}", "cpu", "ops.gemm"))
    return _gemm_host(a, weight, out)


def _check_packed(weight: PackedWeight) -> None:
    if not isinstance(weight, PackedWeight):
        raise ArgumentTypeError(explain("weight", type(weight).__name__, "a PackedWeight; layout.pack makes one"))


def _check(a: Array, weight: PackedWeight, out: Array | None) -> None:
    _check_packed(weight)
    _tensors.check_array(a, "a")
    types = weight.types
    check_activations(a, weight.data, types, weight.k)
    if _tensors.device_of(a) == "meta":
        raise ArgumentError(explain("a", "device meta, where tensors have no elements", "cpu or cuda", "cpu"))
    if out is None:
        return
    shape = (*a.shape[:-1], weight.n)
    if type(out) is not type(a) and not (_tensors.is_torch(out) and _tensors.is_torch(a)):
        raise ArgumentTypeError(explain("out", type(out).__name__, f"{type(a).__name__} like a"))
    if _tensors.element_of(out) != types.element_d:
        raise ArgumentTypeError(explain("out", f"dtype {_tensors.element_of(out)}", types.element_d))
    if tuple(out.shape) != shape:
        raise ArgumentError(explain("out", f"shape {tuple(out.shape)}", str(shape), shape))
    if _tensors.device_of(out) != _tensors.device_of(a):
        raise ArgumentError(explain("out", f"device {_tensors.device_of(out)}", f"{_tensors.device_of(a)} like a"))
    if any(stride == 0 and size > 1 for stride, size in zip(_strides(out), out.shape, strict=True)):
        raise ArgumentError(explain("out", "an expanded tensor (stride 0)", "memory of its own for every element"))
    if _may_overlap_itself(out):
        got = f"shape {tuple(out.shape)} with strides {_strides(out)}, which overlap"
        raise ArgumentError(explain("out", got, "memory of its own for every element"))
    if _shares_memory(out, a):
        raise ArgumentError(explain("out", "memory that a is in", "memory of its own", "out=None, or a.clone()"))
    for tensor in (weight.data, weight.scale, weight.zero, weight.bias, weight.global_scale):
        if tensor is not None and _shares_memory(out, tensor):
            raise ArgumentError(explain("out", "memory that the weight is in", "memory of its own", "out=None"))
    if _tensors.is_torch(out):
        if out.requires_grad and _grad_enabled():
            raise ArgumentError(explain("out", "a tensor that requires a gradient", "inference only"))
    elif not out.flags.writeable:
        raise ArgumentError(explain("out", "a read-only array", "a writeable one"))


def check_activations(a: Array, data: Array, types: TypeConfig, k: int) -> None:
    """Raises a typed error unless activations (..., k) fit a weight whose packed words are `data`."""
    if _tensors.is_torch(a) != _tensors.is_torch(data):
        raise ArgumentTypeError(explain("a", type(a).__name__, f"{type(data).__name__} like the weight"))
    if _tensors.element_of(a) != types.element_a:
        raise ArgumentTypeError(
            explain("a", f"dtype {_tensors.element_of(a)}", f"{types.element_a}, as the weight was packed for")
        )
    if a.ndim == 0 or a.shape[-1] != k:
        raise ArgumentError(explain("a", f"shape {tuple(a.shape)}", f"(..., k) with k = {k}"))
    device = _tensors.device_of(data)
    if _tensors.device_of(a) != device:
        raise ArgumentError(explain("a", f"device {_tensors.device_of(a)}", f"{device}, where the weight is", device))
    if _tensors.is_torch(a) and a.requires_grad and _grad_enabled():
        raise ArgumentError(
            explain("a", "a tensor that requires a gradient", "inference only", "with torch.no_grad(), or a.detach()")
        )


def _grad_enabled() -> bool:
    return bool(sys.modules["torch"].is_grad_enabled())


def _strides(x: Array) -> tuple[int, ...]:
    return tuple(x.stride()) if _tensors.is_torch(x) else tuple(x.strides)


def _may_overlap_itself(x: Array) -> bool:
    """Whether elements may share memory: a dimension steps less than what those with smaller steps span."""
    if 0 in x.shape:
        return False
    span = 1 if _tensors.is_torch(x) else x.itemsize  # strides count elements there, bytes here
    for stride, size in sorted((abs(stride), size) for stride, size in zip(_strides(x), x.shape, strict=True)):
        if size == 1:
            continue
        if stride < span:
            return True
        span += stride * (size - 1)
    return False


class _Bytes:
    """Where the elements of a tensor lie, as numpy wants to hear it. Nothing is read: it may be a GPU's memory."""

    def __init__(self, x: Array) -> None:
        size = x.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (x.data_ptr(), True),
            "typestr": f"|V{size}",
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
        }


def _address_range(x: Array) -> tuple[int, int]:
    """Returns the first byte of a torch tensor that is not empty, and the one after its last."""
    start: int = x.data_ptr()
    last = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    return start, start + (last + 1) * x.element_size()


_OVERLAP_WORK: Any = 10_000
"""What numpy may try for an exact answer: rows of two interleaved views need a handful."""


def _shares_memory(x: Array, y: Array) -> bool:
    """Whether an element of `x` and one of `y` share memory; true where that is too hard to tell."""
    if _tensors.device_of(x) == "meta" or 0 in x.shape or 0 in y.shape:
        return False
    if _tensors.is_torch(x):
        # Ranges first: two views of different memory, which is nearly every call, cost no arrays.
        (x_start, x_stop), (y_start, y_stop) = _address_range(x), _address_range(y)
        if x_stop <= y_start or y_stop <= x_start:
            return False
    left, right = (np.asarray(_Bytes(t)) if _tensors.is_torch(t) else t for t in (x, y))
    try:
        return bool(np.shares_memory(left, right, max_work=_OVERLAP_WORK))
    except RuntimeError:  # TooHardError, which numpy 2 has moved
        return True


def _aligned(size: int) -> Array:
    """Returns uninitialised float32 at a 64-byte boundary: the bits that a BLAS returns may depend on alignment."""
    memory: Array = np.empty(size + 15, np.float32)
    skip = -memory.ctypes.data % 64 // 4
    return memory[skip : skip + size]


def _host_buffer(rows: int, columns: int) -> Array:
    """Returns float32 scratch (rows, columns) that this thread keeps between calls."""
    size = rows * columns
    buffer = getattr(_buffers, "block", None)
    if buffer is None or buffer.size < size:
        buffer = _aligned(size)
        if size <= _BLOCK_ELEMENTS:
            _buffers.block = buffer
    return buffer[:size].reshape(rows, columns)


def _multiply_rows(rows: Array, block: Array) -> Array:
    """Returns rows (m, k) times a block (n, k) transposed, each row by a matrix-vector product of its own.

    A product of matrices sums in an order that depends on m. Here every row goes through the same call on the same
    kind of memory, so that its bits cannot depend on the others.
    """
    xp = _tensors.library(rows)
    vector, product = _aligned(rows.shape[1]), _aligned(block.shape[0])
    result = np.empty((rows.shape[0], block.shape[0]), dtype=np.float32)
    if _tensors.is_torch(rows):
        vector, product, result = xp.from_numpy(vector), xp.from_numpy(product), xp.from_numpy(result)
    for index in range(rows.shape[0]):
        vector[:] = rows[index]
        xp.matmul(block, vector, out=product)
        result[index] = product
    return result


def _multiply(rows: Array, block: Array) -> Array:
    """Returns rows (m, k) times a block (n, k) transposed, float32, whatever autocast says."""
    product: Array
    if not _tensors.is_torch(rows):
        product = rows @ block.T
        return product
    import torch

    with torch.autocast("cpu", enabled=False):
        product = rows @ block.T
    return product


def _gemm_host(a: Array, weight: PackedWeight, out: Array | None, batch_invariant: bool = False) -> Array:
    from humming_cutlass import _C

    types, n, k = weight.types, weight.n, weight.k
    torch_a = _tensors.is_torch(a)
    rows = a.reshape(-1, k)
    m = rows.shape[0]
    result: Array
    if torch_a:
        import torch

        rows = rows.detach().to(torch.float32)
        result = torch.empty((m, n), dtype=_tensors.stored_dtype(types.element_d, a), device=a.device)
    else:
        rows = rows.astype(np.float32)
        result = np.empty((m, n), dtype=_tensors.stored_dtype(types.element_d, a))
    factor = None if weight.global_scale is None else float(weight.global_scale[0])
    data: Array = _tensors.to_numpy(weight.data).view(np.uint32)
    zero_element = "float16" if types.element_zero == "integer" else types.element_zero
    block_rows = max(1, _BLOCK_ELEMENTS // k // ATOM_N) * ATOM_N
    for start in range(0, n if m else 0, block_rows):
        stop = min(start + block_rows, n)
        atoms = slice(start // ATOM_N, -(-stop // ATOM_N))
        block = _host_buffer(stop - start, k)
        zero = None if weight.zero is None else _float32(weight.zero[atoms], zero_element)
        scale = _float32(weight.scale[atoms], types.element_scale)
        _C.dequantize(data[atoms], scale, zero, types.group_size, types.element_b, stop - start, k, block)
        if torch_a:
            block = torch.from_numpy(block)
        product = _multiply_rows(rows, block) if batch_invariant else _multiply(rows, block)
        if factor is not None:
            product *= factor
        if weight.bias is not None:
            product += weight.bias[start:stop]
        if torch_a:
            result[:, start:stop] = product
        else:
            with np.errstate(over="ignore"):
                result[:, start:stop] = product.astype(result.dtype)
    result = result.reshape((*a.shape[:-1], n))
    if out is None:
        return result
    if torch_a:
        return out.copy_(result)
    out[...] = result
    return out


def _float32(x: Array, element: str) -> Array:
    return np.ascontiguousarray(_tensors.to_numpy(_tensors.decode(x, element)))


def prepare(configs: Iterable[GemmConfig], *, progress: bool | None = None) -> None:
    """Compiles kernels that are not in the cache yet, in parallel, and loads them into this process.

    Args:
        configs: the kernels.
        progress: whether to show a progress bar; None shows one on a terminal.

    Raises:
        ArgumentTypeError: one is no `GemmConfig`.
        ToolchainError, CompileError, CacheError: a kernel cannot be built.
    """
    from humming_cutlass import _C, build, emitter

    if not isinstance(configs, Iterable):
        raise ArgumentTypeError(explain("configs", type(configs).__name__, "GemmConfig objects"))
    configs = list(configs)
    for config in configs:
        if not isinstance(config, GemmConfig):
            raise ArgumentTypeError(explain("configs", type(config).__name__, "GemmConfig objects"))
    missing = [c for c in dict.fromkeys(configs) if c.name not in _kernels]
    if not missing:
        return
    sources = [emitter.emit(c) for c in missing]
    paths = build.compile_kernels(sources, progress=progress)
    with _kernels_lock:
        for config, source in zip(missing, sources, strict=True):
            if config.name not in _kernels:
                _kernels[config.name] = _C.Kernel(str(paths[source.name]), "humming_cutlass_gemm")


_ADDRESSES = "addresses"
"""The key of `PackedWeight.plans` for where its tensors were when the plans were made."""


def _forget_moved(weight: PackedWeight) -> None:
    """Drops plans whose pointers are of memory that a tensor has left: `tensor.data = ...` keeps the tensor itself."""
    tensors = (weight.data, weight.scale, weight.zero, weight.bias, weight.global_scale)
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    if weight.plans.get(_ADDRESSES) != addresses:
        weight.plans.clear()
        weight.plans[_ADDRESSES] = addresses


def _plan(weight: PackedWeight, config: GemmConfig) -> Any:
    """Returns the launch plan of a weight for a kernel, made once."""
    plan = weight.plans.get(config)
    if plan is None:
        from humming_cutlass import _C

        _check_config(config, weight)
        prepare([config])
        plan = weight.plans[config] = _C.GemmPlan(
            _kernels[config.name],
            n=weight.n,
            k=weight.k,
            groups=weight.scale.shape[1],
            element_a=weight.types.element_a,
            element_d=weight.types.element_d,
            b=weight.data,
            scale=_bytes(weight.scale),
            zero=_bytes(weight.zero),
            bias=weight.bias,
            global_scale=weight.global_scale,
        )
    return plan


def _check_config(config: GemmConfig, weight: PackedWeight) -> None:
    types = weight.types
    if not isinstance(config, GemmConfig):
        raise ArgumentTypeError(explain("config", type(config).__name__, "a GemmConfig"))
    if config.types != types:
        raise ArgumentError(explain("config", f"a kernel for {config.types}", f"one for the weight's {types}"))
    if reason := support.check(config):
        raise UnsupportedError(reason)
    if config.schedule.mainloop == support.SM90 and not weight.scales_fit:
        least, most = support.scale_range(types)
        got = f"a kernel of {support.SM90} for scales outside {least:g} ... {most:g}, where its weights are exact"
        raise UnsupportedError(explain("config", got, f"{', '.join(support.MAINLOOPS_FOR_ANY_TENSORS)}", support.SM80))


def _bytes(x: Array) -> Array:
    """Returns 8-bit floats as uint8: not every torch exports them through DLPack."""
    return _tensors.bits(x) if x is not None and x.element_size() == 1 else x


_INVARIANT = "batch_invariant"
"""Marks the key of `PackedWeight.plans` that is for batch-invariant calls."""


_LAUNCHES = "launches"
"""The key of `PackedWeight.plans` for what calls came to; the extension reads it there."""


def _launches(weight: PackedWeight) -> Any:
    """Returns the launches of a weight, or None where torch has no C exchange API, before 2.10."""
    import torch

    from humming_cutlass import _C

    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        return None
    launches = weight.plans.get(_LAUNCHES)
    if launches is not None and len(launches) > _PLAN_LIMIT:
        weight.plans.clear()
        launches = None
    if launches is None:
        # The allocator of the code that torch.compile writes: no dispatch, no parsing of arguments. Not every build of
        # torch has it.
        guards = getattr(torch._C._dynamo, "guards", None)
        launches = weight.plans[_LAUNCHES] = _C.Launches(
            tensor_type=torch.Tensor,
            weight=(weight.data, weight.scale, weight.zero, weight.bias, weight.global_scale),
            grad_enabled=torch.is_grad_enabled,
            empty=torch.empty,
            empty_on_current_device=getattr(guards, "_empty_strided_cuda", None),
        )
    return launches


def _gemm_cuda(
    a: Array,
    weight: PackedWeight,
    out: Array | None,
    config: GemmConfig | None,
    split_k: int | None,
    batch_invariant: bool = False,
) -> Array:
    import torch

    m = a.numel() // weight.k
    target = None if out is None else _rows_in_place(out.detach(), weight.n)
    result = target
    if result is None:
        result = torch.empty((m, weight.n), dtype=_tensors.stored_dtype(weight.types.element_d, a), device=a.device)
    if m:
        _forget_moved(weight)
        planned = config is None and split_k is None
        rows = _rows(a.detach(), weight.k)
        if config is None:
            choice = choose(weight, m, aligned=_is_aligned(rows), batch_invariant=batch_invariant)
            config, split_k = choice.config, choice.split_k if split_k is None else split_k
        split_k = 1 if split_k is None else split_k
        plan = _plan(weight, config)
        with torch.cuda.device(a.device):
            plan.run(rows, result, torch.cuda.current_stream(a.device).cuda_stream, split_k)
        usual = type(a) is torch.Tensor and a.is_contiguous() and a.data_ptr() % 16 == 0
        if planned and usual and (launches := _launches(weight)) is not None:
            shape = (*a.shape[:-1], weight.n)
            strides = torch.empty(shape, device="meta").stride()
            options = {"dtype": result.dtype, "device": result.device}
            launches.remember(a, batch_invariant, plan, split_k, (shape, strides, result.dtype), options)
    if out is None:
        return result.reshape((*a.shape[:-1], weight.n))
    if target is None:
        out.copy_(result.reshape(out.shape))
    return out


def _is_aligned(rows: Array) -> bool:
    """Whether every row of activations (m, k) starts at a 16-byte boundary, as TMA needs."""
    return bool(rows.data_ptr() % 16 == 0 and (rows.shape[0] == 1 or rows.stride(0) * rows.element_size() % 16 == 0))


def _rows(a: Array, k: int) -> Array:
    """Returns activations as (m, k) with inner stride 1: a view where strides allow one, else a copy."""
    rows = a.reshape(-1, k)
    if rows.stride(1) != 1 or (rows.stride(0) < k and rows.shape[0] > 1):
        rows = rows.contiguous()
    return rows


def _rows_in_place(out: Array, n: int) -> Array | None:
    """Returns `out` as (m, n) with inner stride 1 in its own memory, or None where its strides do not allow that."""
    try:
        rows = out.view(-1, n)
    except RuntimeError:
        return None
    return rows if rows.stride(1) == 1 and (rows.stride(0) >= n or rows.shape[0] <= 1) else None


def _mainloops(weight: PackedWeight, *, aligned: bool) -> tuple[str, ...] | None:
    """Returns the mainloops that can take the tensors, or None where the planner is free."""
    return None if aligned and weight.scales_fit else support.MAINLOOPS_FOR_ANY_TENSORS


def choose(weight: PackedWeight, m: int, *, aligned: bool = True, batch_invariant: bool = False) -> planner.Choice:
    """Returns the kernel and split that `gemm` uses for m tokens with a weight on a CUDA device.

    Args:
        weight: a packed weight on a CUDA device.
        m: rows of the activations.
        aligned: whether their rows start at 16-byte boundaries.
        batch_invariant: as in `gemm`; the choice is then the same for every m.

    Raises:
        ArgumentTypeError: `weight` is no `PackedWeight`.
        ArgumentError: the weight is on the CPU, or the kernel that `batch_invariant` prescribes cannot read rows that
            are not aligned.
    """
    _check_packed(weight)
    key = (_INVARIANT, "choice") if batch_invariant else ("choice", m, aligned)
    choice: planner.Choice | None = weight.plans.get(key)
    if choice is None:
        index = _device_index(weight)
        # Rows of dense activations are aligned for every m or, but for a single row, for none: k decides for all.
        mainloops = _mainloops(weight, aligned=weight.k * 2 % 16 == 0 if batch_invariant else aligned)
        problem = (weight.types, m, weight.n, weight.k)
        choice = None if batch_invariant else tune.stored(*problem, index, mainloops=mainloops)
        if choice is None:
            device = planner_device(index)
            choice = planner.choose(*problem, device, mainloops=mainloops, batch_invariant=batch_invariant)
        weight.plans[key] = choice
    if batch_invariant and not aligned and choice.config.schedule.mainloop != support.SM80:
        got = "rows that do not start at 16-byte boundaries"
        allowed = "aligned rows with batch_invariant: other rows need another kernel, whose results differ in bits"
        raise ArgumentError(explain("a", got, allowed, "a.clone(memory_format=torch.contiguous_format)"))
    return choice


def kernels(weight: PackedWeight, *, batch_invariant: bool = False) -> list[GemmConfig]:
    """Returns every kernel that `choose` can return for a weight on a CUDA device and aligned activations.

    Raises:
        ArgumentTypeError, ArgumentError: as `choose`.
    """
    _check_packed(weight)
    if batch_invariant:
        return [choose(weight, 1, batch_invariant=True).config]
    device = planner_device(_device_index(weight))
    return planner.schedules(weight.types, device, mainloops=_mainloops(weight, aligned=True))


@functools.cache
def _device_index(weight: PackedWeight) -> Any:
    """Returns the CUDA device of a weight; None on the CPU."""
    return weight.data.device.index if _tensors.is_torch(weight.data) else None


def planner_device(index: int) -> planner.Device:
    """Returns what the planner must know of CUDA device `index`; read once per process.

    Raises:
        ArgumentError: there is no such device; None, the index of a tensor on the CPU, is none.
        LaunchError: there is no driver.
    """
    if index is None:
        raise ArgumentError(explain("device", "cpu", "a CUDA device, whose kernels these are"))
    index = integer(index, "index", "the index of a CUDA device")
    if not 0 <= index <= INT32_MAX:
        raise ArgumentError(explain("index", index, "the index of a CUDA device", 0))
    from humming_cutlass import _C

    return planner.Device.from_properties(dict[str, Any](_C.device_properties(index)))
