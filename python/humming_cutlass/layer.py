"""`HummingLayer`: a drop-in for `torch.nn.Linear` with a quantized weight, for inference.

Importing this module imports torch; nothing else in the package does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from humming_cutlass import _C, _tensors, dtypes, layout, ops, quantize, torch_ops
from humming_cutlass.config import TypeConfig, WeightConfig, extent
from humming_cutlass.errors import ArgumentError, ArgumentTypeError, StateError, UnsupportedError, explain

__all__ = ["HummingLayer"]

_PACKED = ("data", "scale", "zero", "bias", "global_scale")
_LOADED = ("codes", "scale", "zero", "bias", "global_scale")

# Looked up once: a call takes microseconds.
_is_compiling = torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_tracing_state = torch._C._get_tracing_state  # of torch.jit.trace
_gemm_eager = ops.gemm_eager


class HummingLayer(torch.nn.Module):
    """y = x @ dequantize(weight)^T + bias.

    The life of a layer: construct, move to a device whenever you like, load (`load_from_unquantized` or
    `load_quantized`), `transform()`, call. After `transform()` the weight is in buffers, so that `to`, `state_dict` and
    `load_state_dict` work as ever; a fresh layer takes such a state dict instead of a load. Casts such as `half()` move
    the layer but leave its buffers' types alone: they are the format. No gradients: call it under `torch.no_grad()`, an
    input that requires a gradient is refused otherwise. torch.compile and torch.export make a call one node of a graph;
    with `out` it is made between two graphs.

    Args:
        shape_n: rows of the weight, the outputs.
        shape_k: columns of the weight, the inputs.
        weight_config: a `WeightConfig`, a dict of its fields, or a type's name.
        torch_dtype: type of the activations, torch.float16 or torch.bfloat16.
        output_dtype: type of the outputs; None is the activations'. torch.float32 is possible too.
        bias: whether a bias is added.
        device: where the layer starts; None is torch's default device.
        batch_invariant: whether a row of the output must have the same bits however many rows the input has; see
            `ops.gemm`. Not part of the state dict.

    Raises:
        ArgumentTypeError: an argument has the wrong Python type.
        ArgumentError: a size is below 1, or the group size does not divide `shape_k`.
        UnsupportedError: no kernel implements the types.
    """

    def __init__(
        self,
        shape_n: int,
        shape_k: int,
        weight_config: WeightConfig | dict[str, Any] | str = "int6",
        *,
        torch_dtype: torch.dtype = torch.float16,
        output_dtype: torch.dtype | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        shape_n, shape_k = extent(shape_n, "shape_n"), extent(shape_k, "shape_k")
        for parameter, dtype, types in (
            ("torch_dtype", torch_dtype, dtypes.ACTIVATION_TYPES),
            ("output_dtype", output_dtype, dtypes.OUTPUT_TYPES),
        ):
            if dtype is None and parameter == "output_dtype":
                continue
            if not isinstance(dtype, torch.dtype):
                raise ArgumentTypeError(explain(parameter, repr(dtype), "a torch.dtype such as torch.float16"))
            if str(dtype).removeprefix("torch.") not in types:
                names = [f"torch.{name}" for name in types]
                raise UnsupportedError(explain(parameter, dtype, ", ".join(names), names[0]))
        if not isinstance(bias, bool):
            raise ArgumentTypeError(explain("bias", type(bias).__name__, "True or False; load_... take the bias"))
        if not isinstance(batch_invariant, bool):
            raise ArgumentTypeError(explain("batch_invariant", type(batch_invariant).__name__, "True or False"))
        self.shape_n = shape_n
        self.shape_k = shape_k
        self.weight_config = WeightConfig.from_any(weight_config)
        self.torch_dtype = torch_dtype
        self.output_dtype = output_dtype or torch_dtype
        self.has_bias = bias
        self.batch_invariant = batch_invariant
        self.types: TypeConfig = self.weight_config.resolve(
            k=shape_k, element_a=str(torch_dtype), element_d=str(self.output_dtype)
        )
        layout.check_types(self.types, shape_k)
        _tensors.check_device(device, "device")
        self._packed: layout.PackedWeight | None = None
        # Follows `to` and `cuda` while there is nothing else to move.
        self.register_buffer("_anchor", torch.empty(0, device=device), persistent=False)
        for name in _PACKED:
            self.register_buffer(name, None)
        for name in _LOADED:
            self.register_buffer(f"_loaded_{name}", None, persistent=False)
        self.register_buffer("format", None)

    @property
    def device(self) -> torch.device:
        """Where the layer is."""
        return self._buffers["_anchor"].device  # type: ignore[union-attr]

    @property
    def is_loaded(self) -> bool:
        """Whether a weight is loaded but not transformed yet."""
        return self._buffers["_loaded_codes"] is not None

    @property
    def is_transformed(self) -> bool:
        """Whether the layer can be called."""
        return self._buffers["data"] is not None

    def load_from_unquantized(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Quantizes a weight to the layer's format by rounding.

        Args:
            weight: (shape_n, shape_k) float16, bfloat16, float32 or float64; any device.
            bias: (shape_n,), where the layer has one.

        Raises:
            ArgumentTypeError: a dtype is wrong.
            ArgumentError: a shape is wrong, or a value is not finite.
            StateError: the layer is transformed already.
        """
        self._check_loadable("load_from_unquantized")
        self._check_tensor("weight", weight, (self.shape_n, self.shape_k))
        result = quantize.quantize(
            weight.to(self.device) if self.device.type == "cuda" else weight,
            self.types,
            strategy=self.weight_config.strategy,
            global_scale=self.weight_config.global_scale,
        )
        self._store(result.codes, result.scale, result.zero, result.global_scale, bias)

    def load_quantized(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        global_scale: torch.Tensor | float | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Takes a weight that is quantized already, without requantizing: scale * (codes - zero) * global_scale.

        Args:
            codes: bit patterns, uint8 (shape_n, shape_k).
            scale: (shape_n, groups), in a type that converts to the layer's scale type without a change of value; (1,)
                for strategy `tensor`.
            zero: zero points shaped like `scale`; None with integer zero points means the middle, 2^(bits-1).
            global_scale: one number.
            bias: (shape_n,), where the layer has one.

        Raises:
            ArgumentTypeError: an argument has the wrong Python type or dtype.
            ArgumentError: a shape is wrong, or a value is out of range, not finite or not convertible.
            StateError: the layer is transformed already.
        """
        self._check_loadable("load_quantized")
        self._check_tensor("codes", codes, (self.shape_n, self.shape_k))
        self._check_tensor("scale", scale, None)
        if zero is not None:
            self._check_tensor("zero", zero, None)
        self._store(codes, scale, zero, global_scale, bias)

    def transform(self, *, progress: bool | None = None) -> None:
        """Packs the loaded weight and, on a CUDA device, compiles the default kernels that the cache lacks.

        When it raises, the layer is as before and can be transformed again.

        Args:
            progress: whether to show a progress bar while kernels compile; None shows one on a terminal.

        Raises:
            StateError: nothing is loaded, or the layer is transformed already.
            ToolchainError, CompileError, CacheError: a kernel cannot be built.
        """
        if self.is_transformed:
            raise StateError(explain("transform", "a layer that is transformed already", "one call after a load"))
        if not self.is_loaded:
            raise StateError(
                explain("transform", "a layer without a weight", "a loaded layer", "load_from_unquantized(weight)")
            )
        loaded = {name: self._buffers[f"_loaded_{name}"] for name in _LOADED}
        packed = layout.pack(loaded.pop("codes"), loaded.pop("scale"), types=self.types, **loaded)
        if self.device.type == "cuda":
            ops.prepare(ops.kernels(packed, batch_invariant=self.batch_invariant), progress=progress)
        self._adopt(packed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward` as every module does, hooks included; with none of them around it, the launch alone."""
        # Python and torch's own way from here to the launch would take as long as the launch.
        if not kwargs and _tracing_state() is None and not _is_dynamo_compiling():
            result = _call_launch(self, args)
            if result is not None:
                return result
        return super().__call__(*args, **kwargs)

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns x @ weight^T + bias, (..., shape_n) in `output_dtype`.

        Args:
            x: (..., shape_k) in `torch_dtype` on the layer's device.
            out: where to write the result; returned.

        Raises:
            StateError: the layer is not transformed.
            ArgumentTypeError, ArgumentError: `x` or `out` does not fit; see `ops.gemm`.
        """
        if _is_compiling() or _tracing_state() is not None:
            return self._trace(x, out)
        packed = self._packed
        buffers = self._buffers
        if (  # any of them may have been replaced, by a move, by hand or for one call by torch.func.functional_call
            packed is None
            or packed.data is not buffers["data"]
            or packed.scale is not buffers["scale"]
            or packed.zero is not buffers["zero"]
            or packed.bias is not buffers["bias"]
            or packed.global_scale is not buffers["global_scale"]
        ):
            packed = self._refresh()
        return _gemm_eager(x, packed, out, None, None, self.batch_invariant)  # type: ignore[no-any-return]

    def _trace(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Does what `forward` does while a graph is traced; reads the buffers, which torch may have replaced."""
        if not self.is_transformed:
            self._refresh()  # raises
        if out is not None:
            return torch_ops.outside_graph("out", self.forward, x, out)  # type: ignore[no-any-return]
        buffers: dict[str, Any] = self._buffers
        return torch_ops.gemm(
            x,
            *[buffers[name] for name in _PACKED],
            n=self.shape_n,
            k=self.shape_k,
            types=self.types,
            batch_invariant=self.batch_invariant,
        )

    def extra_repr(self) -> str:
        """Returns what torch prints between the parentheses."""
        state = "transformed" if self.is_transformed else "loaded" if self.is_loaded else "empty"
        words = [f"shape_n={self.shape_n}", f"shape_k={self.shape_k}", f"dtype={self.types.element_b}"]
        if self.types.group_size != -1:
            words.append(f"group_size={self.types.group_size}")
        words += [f"torch_dtype={self.torch_dtype}", f"bias={self.has_bias}"]
        if self.batch_invariant:
            words.append("batch_invariant=True")
        words.append(state)
        return ", ".join(words)

    def _check_loadable(self, call: str) -> None:
        if self.is_transformed:
            raise StateError(explain(call, "a layer that is transformed already", "a layer before transform()"))

    def _check_tensor(self, parameter: str, tensor: object, shape: tuple[int, ...] | None) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(explain(parameter, type(tensor).__name__, "a torch.Tensor"))
        _tensors.check_array(tensor, parameter)
        _tensors.check_elements(tensor, parameter)
        if shape is not None and tuple(tensor.shape) != shape:
            raise ArgumentError(explain(parameter, f"shape {tuple(tensor.shape)}", str(shape), shape))

    def _store(self, codes: Any, scale: Any, zero: Any, global_scale: Any, bias: torch.Tensor | None) -> None:
        """Keeps a checked weight until `transform`. Nothing is kept when a check fails."""
        if self.has_bias != (bias is not None):
            got = "None" if bias is None else "a tensor"
            allowed = f"{'a tensor' if self.has_bias else 'None'}: the layer was made with bias={self.has_bias}"
            raise ArgumentError(explain("bias", got, allowed))
        if bias is not None:
            self._check_tensor("bias", bias, (self.shape_n,))
        if global_scale is not None and not isinstance(global_scale, torch.Tensor):
            if not layout.is_number(global_scale):
                raise ArgumentTypeError(explain("global_scale", type(global_scale).__name__, "a number or a tensor"))
            number = layout.float_of(global_scale, "global_scale")
            layout.check_global_scale(number)
            global_scale = torch.tensor([number], dtype=torch.float32, device="cpu")
        elif global_scale is not None:
            self._check_tensor("global_scale", global_scale, None)
        given = {"codes": codes, "scale": scale, "zero": zero, "bias": bias, "global_scale": global_scale}
        loaded = {name: x.detach().to(self.device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        layout.check_inputs(**loaded, types=self.types)
        for name, tensor in loaded.items():
            self._buffers[f"_loaded_{name}"] = tensor

    def _adopt(self, packed: layout.PackedWeight) -> None:
        """Makes a packed weight the layer's, and drops what was loaded."""
        for name in _PACKED:
            self._buffers[name] = getattr(packed, name)
        text = json.dumps(packed.metadata(), sort_keys=True).encode()
        self._buffers["format"] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device)
        for name in _LOADED:
            self._buffers[f"_loaded_{name}"] = None
        # Those without a tensor last: torch.export numbers the buffers of a root module as if it had none of these.
        for name in [name for name, buffer in self._buffers.items() if buffer is None]:
            self._buffers[name] = self._buffers.pop(name)
        self._packed = packed
        torch_ops.remember(packed)

    def _refresh(self) -> layout.PackedWeight:
        """Returns the packed weight for the buffers as they are now, after a move."""
        if not self.is_transformed:
            step = "transform()" if self.is_loaded else "load_from_unquantized(weight), then transform()"
            raise StateError(explain("forward", "a layer that is not transformed", "a transformed layer", step))
        tensors = {name: self._buffers[name] for name in _PACKED}
        self._packed = layout.PackedWeight(types=self.types, n=self.shape_n, k=self.shape_k, **tensors)
        torch_ops.remember(self._packed)
        return self._packed

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> HummingLayer:
        # `half()`, `float()` and `to(dtype)` cast every floating-point buffer. Here the types are the format: follow
        # the device and keep the type.
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        if any(self._buffers[name] is not old for name, old in before.items()):
            self._packed = None  # it would keep the memory that the buffers have left
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self.is_loaded:
            raise StateError(
                explain("state_dict", "a loaded layer before transform()", "a transformed layer", "transform()")
            )
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        names = (*_PACKED, "format")
        found = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        known = {prefix + name for name in names}
        rest = {key: value for key, value in state_dict.items() if key not in known}
        self._load_rest(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if not found:
            if strict:
                missing_keys += [prefix + name for name in self._expected_names()]
            return
        try:
            if missing := [name for name in ("data", "scale", "format") if name not in found]:
                missing_keys += [prefix + name for name in missing]
                return
            assign = bool(local_metadata.get("assign_to_params_buffers", False))
            packed = self._parse_state(found, assign=assign)
        except (ArgumentError, ArgumentTypeError) as error:
            error_msgs.append(f"{prefix}{error}")
            return
        if packed.data.device != self.device:
            self._buffers["_anchor"] = torch.empty(0, device=packed.data.device)
        self._adopt(packed)

    def _load_rest(self, state_dict: dict[str, Any], *arguments: Any) -> None:
        """Loads what a subclass or a user has added, as every module does; the hooks have been called."""
        buffers, hooks = self._buffers, self._load_state_dict_pre_hooks
        self._buffers = {name: buffer for name, buffer in buffers.items() if name not in (*_PACKED, "format")}
        self._load_state_dict_pre_hooks = type(hooks)()
        try:
            super()._load_from_state_dict(state_dict, *arguments)
        finally:
            loaded = self._buffers
            self._buffers = {name: loaded.get(name, buffer) for name, buffer in buffers.items()}
            self._load_state_dict_pre_hooks = hooks

    def _expected_names(self) -> list[str]:
        """Returns the names that a state dict of this layer has; a global scale is optional before one is loaded."""
        has = {"bias": self.has_bias, "zero": self.types.element_zero != "none"}
        has["global_scale"] = self._buffers["global_scale"] is not None
        return [name for name in (*_PACKED, "format") if has.get(name, True)]

    def _parse_state(self, found: dict[str, Any], *, assign: bool) -> layout.PackedWeight:
        """Returns the packed weight of a state dict, checked against the layer.

        Args:
            found: the entries of the state dict.
            assign: whether to take the tensors as they are and where they are, instead of copies on the layer's device.
        """
        for name, tensor in found.items():
            if not isinstance(tensor, torch.Tensor):
                raise ArgumentTypeError(explain(name, type(tensor).__name__, "a torch.Tensor"))
            if tensor.device.type == "meta":
                raise ArgumentError(explain(name, "device meta", "a tensor with values"))
        if not assign and self.device.type == "meta":
            allowed = "a device with memory to copy to"
            raise ArgumentError(explain("device", "a layer on meta", allowed, "load_state_dict(..., assign=True)"))
        text = found.pop("format")
        if text.dtype != torch.uint8 or text.ndim != 1 or text.layout != torch.strided or text.numel() > 4096:
            raise ArgumentError(explain("format", "another tensor", "uint8 text of at most 4096 bytes"))
        try:
            metadata = json.loads(bytes(text.cpu().tolist()))
        except (ValueError, RecursionError):
            raise ArgumentError(explain("format", "text that is no JSON", "what state_dict() wrote")) from None
        mine = layout.metadata(self.types, self.shape_n, self.shape_k)
        if metadata != mine:
            different = sorted(k for k in mine if not isinstance(metadata, dict) or metadata.get(k) != mine[k])
            key = different[0] if different else "format"
            got = metadata.get(key) if isinstance(metadata, dict) else metadata
            raise ArgumentError(explain(key, repr(got), f"{mine.get(key)!r}, as this layer was made"))
        if self.has_bias != ("bias" in found):
            raise ArgumentError(explain("bias", "present" if "bias" in found else "absent", f"bias={self.has_bias}"))
        if assign:
            tensors = {name: tensor.detach() for name, tensor in found.items()}
        else:
            tensors = {name: tensor.detach().to(self.device, copy=True) for name, tensor in found.items()}
        packed = layout.PackedWeight(types=self.types, n=self.shape_n, k=self.shape_k, **tensors)
        packed.check_values()
        return packed


_hooks = torch.nn.modules.module
# What `torch.nn.Module.__call__` looks at before it calls `forward`.
_call_launch = _C.ModuleCall(
    forward=HummingLayer.forward,
    absent=("forward", "_compiled_call_impl"),
    empty=("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    hooks=(
        _hooks._global_forward_hooks,
        _hooks._global_forward_pre_hooks,
        _hooks._global_backward_hooks,
        _hooks._global_backward_pre_hooks,
    ),
    buffers=_PACKED,
).call
