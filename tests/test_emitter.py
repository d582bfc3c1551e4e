"""The emitted sources: deterministic, short, without logic."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import subprocess
import sys

import pytest

from humming_cutlass import dtypes, emitter, errors, planner, support
from humming_cutlass.config import GemmConfig, ScheduleConfig, TypeConfig


def _configs() -> list[GemmConfig]:
    """Every schedule, every weight type, every scale and zero type, every GPU: not their product."""
    base = TypeConfig(element_a="bfloat16", element_b="uint4", element_d="float32", element_scale="float16")
    variants = [dataclasses.replace(base, element_b=b) for b in dtypes.WEIGHT_TYPES]
    variants += [dataclasses.replace(base, element_scale=s, group_size=32) for s in support.SCALE_TYPES]
    variants += [dataclasses.replace(base, element_zero=z, group_size=16) for z in support.ZERO_TYPES]
    variants += [
        dataclasses.replace(base, element_a=a, element_d=d)
        for a in support.ACTIVATION_TYPES
        for d in support.OUTPUT_TYPES
    ]
    configs = []
    for arch in ("sm_80", "sm_90a", "sm_120a"):
        device = planner.Device(arch=arch, sm_count=132)
        for types in variants:
            configs += planner.schedules(types, device)
    return list(dict.fromkeys(configs))


CONFIGS = _configs()


def _digest() -> str:
    digest = hashlib.sha256()
    for config in CONFIGS:
        source = emitter.emit(config)
        digest.update(f"{source.name}\0{source.arch}\0{source.text}\0".encode())
    for name in dtypes.WEIGHT_TYPES:
        digest.update(emitter.emit_pack(name, "sm_80").text.encode())
    return digest.hexdigest()


def test_sources_are_short_and_hold_no_logic() -> None:
    assert len(CONFIGS) > 500
    sources = [emitter.emit(c).text for c in CONFIGS] + [
        emitter.emit_pack(b, "sm_80").text for b in dtypes.WEIGHT_TYPES
    ]
    for text in sources:
        assert text.count("\n") <= 40
        assert max(map(len, text.splitlines())) <= 120 or text.splitlines()[0].startswith("// ")
        code = re.sub(r"//.*", "", text)
        assert re.findall(r"\b(if|for|while|do|switch|goto|template|constexpr\s+auto)\b|\?|#if|#define", code) == []
        assert code.isascii()


def test_a_source_is_what_its_config_says() -> None:
    for config in CONFIGS:
        source = emitter.emit(config)
        assert (source.name, source.arch) == (config.name, config.arch)
        assert source.text.startswith(f"// {config.name}\n")
    texts = {re.sub(r"^//.*\n", "", emitter.emit(c).text): c for c in CONFIGS}
    # Beside the GPU, what differs between configs differs in the code, not only in its comment.
    assert len(texts) == len({(c.types, c.schedule) for c in CONFIGS})


@pytest.mark.parametrize("entry", [emitter.GEMM_ENTRY, emitter.TRAITS_SYMBOL])
def test_exported_names(entry: str) -> None:
    for config in CONFIGS[::50]:
        assert len(re.findall(rf"\b{entry}\b", emitter.emit(config).text)) == 1


def test_the_same_bytes_in_every_process() -> None:
    program = "import test_emitter; print(test_emitter._digest())"
    digests = {_digest()}
    for seed in ("0", "1", "4711"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.path.dirname(__file__)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_what_is_not_legal_is_not_emitted() -> None:
    legal = CONFIGS[0]
    for config in (
        dataclasses.replace(legal, arch="sm_75"),
        dataclasses.replace(legal, types=dataclasses.replace(legal.types, group_size=17)),
        dataclasses.replace(legal, schedule=dataclasses.replace(legal.schedule, stage_count=1)),
        GemmConfig(
            types=legal.types,
            schedule=ScheduleConfig(
                mainloop=support.SM90, tile_shape=(64, 128, 128), warp_shape=(64, 64), stage_count=4
            ),
            arch="sm_100a",
        ),
    ):
        with pytest.raises(errors.UnsupportedError) as caught:
            emitter.emit(config)
        assert str(caught.value) == support.check(config)
    with pytest.raises(errors.UnsupportedError, match="element_b: got float16; allowed: a weight type"):
        emitter.emit_pack("float16", "sm_80")
    with pytest.raises(errors.UnsupportedError, match="arch: got 'sm_090a'; allowed: a target as nvcc spells it"):
        emitter.emit_pack("int4", "sm_090a")


@pytest.mark.parametrize("config", [None, "sm_80", [], CONFIGS[0].types])
def test_only_a_config_is_emitted(config: object) -> None:
    with pytest.raises(errors.ArgumentTypeError, match=f"config: got {type(config).__name__}; allowed: a GemmConfig"):
        emitter.emit(config)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [None, [], 4])
def test_pack_kernels_are_named_by_strings(value: object) -> None:
    with pytest.raises(errors.ArgumentTypeError, match=f"element_b: got {type(value).__name__}; allowed: a str"):
        emitter.emit_pack(value, "sm_80")  # type: ignore[arg-type]
    with pytest.raises(errors.ArgumentTypeError, match=f"arch: got {type(value).__name__}; allowed: a str"):
        emitter.emit_pack("int4", value)  # type: ignore[arg-type]
