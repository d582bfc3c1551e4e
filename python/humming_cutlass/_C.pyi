"""The compiled extension: host functions and the CUDA runtime. Importing it opens no library and touches no GPU."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

class _DLPack(Protocol):
    """Anything with the DLPack protocol: a torch.Tensor, a numpy.ndarray, a cupy.ndarray."""

    # The parameters differ between libraries and DLPack versions.
    __dlpack__: Any
    __dlpack_device__: Any

_HostArray: TypeAlias = _DLPack
_CudaTensor: TypeAlias = _DLPack
_Tensor = TypeVar("_Tensor", bound=_DLPack)

class _DeviceProperties(TypedDict):
    name: str
    major: int
    minor: int
    sm_count: int
    l2_bytes: int
    smem_per_block_optin: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int
    total_memory: int

class _KernelTraits(TypedDict):
    version: int
    threads: int
    smem_bytes: int
    tile_m: int
    tile_n: int
    tile_k: int
    cluster_size: int
    persistent: int
    box_m: int
    slab_atoms: int
    box_n: int
    box_b: int
    box_scale: int
    box_zero: int

def pack_codes(codes: _HostArray, dtype: str, operand_bits: int = 16, threads: int = 0) -> npt.NDArray[np.uint32]:
    """Packs codes, uint8 (n, k), into uint32 (ceil(n/16), ceil(k/64), 32 * bits)."""

def unpack_codes(
    data: _HostArray, dtype: str, n: int, k: int, operand_bits: int = 16, threads: int = 0
) -> npt.NDArray[np.uint8]:
    """Inverse of `pack_codes`: uint8 (n, k)."""

def convert_atoms(
    data: _HostArray, dtype: str, element_a: str, scale: float | None = None, zero: float | None = None
) -> tuple[npt.NDArray[np.uint16], int]:
    """Runs the device dequantizer on packed atoms, uint32 (atoms, 32 * bits).

    Returns operand bit patterns, uint16 (atoms, 16, 64), and the exponent e: value = operand * 2^-e. With `scale`, and
    `zero` for unsigned weights, they are folded in as the SM90 mainloop does: (value - zero) * scale = operand * 2^-e,
    rounded to the operand type.

    Raises:
        ValueError: a dtype, element_a, zero or shape that does not fit.
    """

def dequantize(
    data: _HostArray,
    scale: _HostArray,
    zero: _HostArray | None,
    group_size: int,
    dtype: str,
    n: int,
    k: int,
    out: _HostArray,
    threads: int = 0,
) -> None:
    """Writes (value - zero) * scale in float32 to out, float32 (n, k)."""

def driver_available() -> bool:
    """Whether the NVIDIA driver can be opened and initialised. The first call does the work, an import does not."""

def device_properties(device: int) -> _DeviceProperties:
    """Properties of a CUDA device; sizes in bytes, clocks in kHz. Makes no context.

    Raises:
        LaunchError: no usable driver.
        ArgumentError: a device that does not exist.
    """

class Kernel:
    """A compiled kernel: an entry point of a cubin file.

    The file is read when a device first needs it, once per device, from any thread and also under stream capture.
    """

    def __init__(self, cubin_path: str, entry: str) -> None: ...
    @property
    def cubin_path(self) -> str:
        """The path of the cubin."""

    @property
    def entry(self) -> str:
        """The name of the kernel in the cubin."""

    def traits(self, device: int) -> _KernelTraits:
        """Loads the kernel on a device and returns what a launcher must know of it.

        Raises:
            LaunchError: the file cannot be read, or the device cannot run it.
            ArgumentError: a device that does not exist.
        """

def pack(kernel: Kernel, codes: _CudaTensor, packed: _CudaTensor, stream: int) -> None:
    """Puts the packing of codes into `packed` on a stream: one launch, no synchronization.

    Args:
        kernel: the kernel that `emitter.emit_pack` writes for the weight's type.
        codes: uint8 (n, k), contiguous.
        packed: int32 or uint32 (ceil(n/16), ceil(k/64), 32 * bits), contiguous.
        stream: a CUstream as an integer.

    Raises:
        ArgumentError: a wrong shape, stride, alignment or device.
        ArgumentTypeError: a wrong dtype, or no tensor.
        LaunchError: the driver refused to load or launch the kernel.
    """

class GemmPlan:
    """A kernel and a packed weight on one device: D[m, n] = A[m, k] * W[n, k]^T. Holds the weight's tensors."""

    def __init__(
        self,
        kernel: Kernel,
        *,
        n: int,
        k: int,
        groups: int,
        element_a: str,
        element_d: str,
        b: _CudaTensor,
        scale: _CudaTensor,
        zero: _CudaTensor | None = None,
        bias: _CudaTensor | None = None,
        global_scale: _CudaTensor | None = None,
    ) -> None:
        """Checks the weight; nothing is loaded or launched.

        Args:
            kernel: the kernel to launch.
            n: rows of the weight, columns of D.
            k: columns of the weight and of A.
            groups: scale groups along k; 1 for channel scales.
            element_a: `float16` or `bfloat16`.
            element_d: `float16`, `bfloat16` or `float32`.
            b: int32 or uint32 (ceil(n/16), ceil(k/64), 32 * bits).
            scale: (ceil(n/16), groups, 16), of the kernel's scale type; 8-bit floats also as uint8.
            zero: like `scale`.
            bias: float32 (n,).
            global_scale: float32 (1,).

        Raises:
            ArgumentError: a wrong shape, stride, alignment or device.
            ArgumentTypeError: a wrong dtype, or no tensor.
        """

    @property
    def device(self) -> int:
        """The CUDA device of the weight."""

    @property
    def n(self) -> int:
        """Columns of D."""

    @property
    def k(self) -> int:
        """Columns of A."""

    @property
    def kernel(self) -> Kernel:
        """The kernel that is launched."""

    def run(self, a: _CudaTensor, d: _CudaTensor, stream: int, split_k: int = 1) -> None:
        """Puts D = A * W^T on a stream: one launch, no synchronization. Without rows nothing is launched.

        Args:
            a: (..., k) of `element_a`, inner stride 1, leading axes evenly spaced.
            d: (..., n) of `element_d`, likewise, with as many rows as `a`.
            stream: a CUstream as an integer; 0 is the default stream. Ordering on it is the caller's.
            split_k: CTAs that share the k range of one output tile, 1 to ceil(k / tile_k).

        Raises:
            ArgumentError: a wrong shape, stride, alignment or device, a split_k out of range, too many rows.
            ArgumentTypeError: a wrong dtype, or no tensor.
            LaunchError: the driver refused to load or launch the kernel, or to allocate the split-k workspace.
        """

    def call(self, a: _Tensor, split_k: int = 1) -> _Tensor:
        """Like `run`, on the framework's current stream and into a new tensor (..., n), which is returned.

        Needs a tensor type with `__dlpack_c_exchange_api__`. `Tensor.record_stream` has no effect on the result: use
        `run` for an output that other streams will read.
        """

class Launches:
    """What calls with one packed weight came to, by the shape of a: the next one like them is nothing but a launch."""

    def __init__(
        self,
        tensor_type: type,
        weight: tuple[Any, ...],
        grad_enabled: Callable[[], bool],
        empty: Callable[..., Any],
        empty_on_current_device: Callable[..., Any] | None,
    ) -> None:
        """Keeps what the extension must know of the framework.

        Args:
            tensor_type: the type of activations and results, torch.Tensor; any other goes the long way.
            weight: the weight's tensors, for `ModuleCall`.
            grad_enabled: torch.is_grad_enabled.
            empty: torch.empty; called with a shape and the `options` of `remember`.
            empty_on_current_device: allocates on the current CUDA device, from shape, strides and dtype; None where the
                framework has no such function.

        Raises:
            ArgumentTypeError: `tensor_type` has no `__dlpack_c_exchange_api__` that lends tensors.
        """

    def __len__(self) -> int: ...
    def remember(
        self,
        a: _CudaTensor,
        batch_invariant: bool,
        plan: GemmPlan,
        split_k: int,
        layout: tuple[tuple[int, ...], tuple[int, ...], Any],
        options: dict[str, Any],
    ) -> None:
        """Keeps the launch of a call, unless one for its shape is known.

        Args:
            a: the activations.
            batch_invariant: whether the call was; such calls have launches of their own.
            plan: what was launched.
            split_k: as `GemmPlan.run` was given it.
            layout: shape, strides and dtype of the result.
            options: its dtype and device.
        """

    def call(self, a: _Tensor, batch_invariant: bool) -> _Tensor | None:
        """Returns the result of a call like one before, or None.

        None is for an a of another shape, type or device, and one that is not contiguous and 16-byte aligned or that
        requires a gradient.

        Raises:
            ArgumentError, LaunchError: as `GemmPlan.run`. What the allocation raises is passed on.
        """

class ModuleCall:
    """Calls of a torch.nn.Module that holds a packed weight as `_packed`."""

    def __init__(
        self,
        forward: Callable[..., Any],
        absent: tuple[str, ...],
        empty: tuple[str, ...],
        hooks: tuple[dict[Any, Any], ...],
        buffers: tuple[str, ...],
    ) -> None:
        """Keeps what tells that a call comes to nothing but `forward`, and `forward` to nothing but a launch.

        Args:
            forward: the class's own `forward`; a subclass or a patch may have another.
            absent: attributes that the module itself must not have.
            empty: its dicts that must be empty.
            hooks: other dicts that must be empty.
            buffers: the names of the weight's tensors, which must be those of the launches.
        """

    def call(self, module: Any, arguments: tuple[Any, ...], /) -> Any:
        """Returns the result of `module(*arguments)` where that is a known launch and nothing else, or None.

        Raises:
            ArgumentError, LaunchError: as `Launches.call`.
        """
