"""The command line: every command, as text and as JSON, and its exit codes."""

import json
import pathlib
import subprocess
import sys

import pytest

from humming_cutlass import cli, emitter, planner, support
from humming_cutlass.config import GemmConfig, WeightConfig
from humming_cutlass.errors import ArgumentError, ArgumentTypeError


def _kernel_name():
    types = WeightConfig(dtype="int4", group_size=128).resolve(k=256, element_a="float16")
    return planner.schedules(types, planner.Device(arch="sm_80", sm_count=108))[0].name


@pytest.fixture
def call(capsys):
    def run(*words):
        code = cli.run(words)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_help_lists_the_commands(call):
    code, out, _ = call("--help")
    assert code == 0
    for name in ("demo", "bench", "info", "support", "cache", "emit", "precompile"):
        assert name in out


def test_unknown_command_is_refused(call):
    code, _, err = call("frobnicate")
    assert code == 2
    assert "frobnicate" in err


def test_demo_is_within_bounds_on_the_cpu(call):
    pytest.importorskip("torch")
    code, out, _ = call("demo", "--device", "cpu", "--m", "5", "--n", "96", "--k", "160", "--json")
    result = json.loads(out)
    assert code == 0
    assert result["ok"]
    assert 0 < result["relative_error"] <= result["bound"] == 5e-4
    # int6 rounds visibly, or the reference would be the unquantized product.
    assert result["rounding_error"] > 10 * result["relative_error"]
    assert result["first"] == pytest.approx(result["expected"], rel=1e-2, abs=1e-2)


@pytest.mark.parametrize("size", ["--m", "--n", "--k"])
def test_demo_refuses_what_no_kernel_can_take(call, size):
    pytest.importorskip("torch")
    words = {"--m": "1", "--n": "16", "--k": "64", size: "999999999999999999"}
    code, _, err = call("demo", "--device", "cpu", *(word for pair in words.items() for word in pair))
    assert code == 2
    assert size in err
    assert ("2147483647" if size == "--m" else "1073676288") in err


@pytest.mark.parametrize("weight", ["uint4", "float6_e3m2"])
def test_demo_takes_other_types(call, weight):
    pytest.importorskip("torch")
    code, out, _ = call("demo", "--device", "cpu", "--m", "4", "--n", "33", "--k", "100", "--weight", weight)
    assert code == 0, out
    assert "relative error" in out
    assert "kernel:" in out


def test_demo_fails_on_a_wrong_result(call, monkeypatch):
    torch = pytest.importorskip("torch")
    from humming_cutlass import layer

    right = layer.HummingLayer.forward

    def wrong(self, x, out=None):
        result = right(self, x, out=out)
        result[0, 0] += 1000 * torch.finfo(torch.float16).eps * result.abs().max()
        return result

    monkeypatch.setattr(layer.HummingLayer, "forward", wrong)
    code, out, _ = call("demo", "--device", "cpu", "--m", "2", "--n", "32", "--k", "64")
    assert code == 1
    assert "OUT OF BOUNDS" in out


def test_demo_says_how_to_get_a_compiler(monkeypatch):
    torch = pytest.importorskip("torch")
    from humming_cutlass import _C, build, demo, ops
    from humming_cutlass.errors import ToolchainError

    def missing(arch=None):
        raise ToolchainError("no nvcc")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_C, "driver_available", lambda: True)
    monkeypatch.setattr(ops, "planner_device", lambda index: planner.Device(arch="sm_90a", sm_count=132))
    monkeypatch.setattr(build, "find_toolchain", missing)
    device, reason = demo.choose_device()
    assert device.type == "cpu"
    assert 'pip install "humming-cutlass[cuda]"' in reason


def test_bad_words_name_what_is_allowed(call):
    pytest.importorskip("torch")
    code, _, err = call("demo", "--weight", "int9")
    assert code == 2
    assert "nearest supported: int8" in err
    code, _, err = call("demo", "--device", "tpu")
    assert code == 2
    assert "auto, cpu or cuda" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--types", "int4:g64:g128"], "--types: got 'int4:g64:g128' with g64 and g128; allowed: each of group"),
        (["--types", "int4:channel:g64"], "with channel and g64"),
        (["--types", "int4:float16:float32"], "with float16 and float32"),
        (["--types", "int4:floating"], "allowed: none with weights of type int4; nearest supported: uint4"),
        (["--types", "int4", "--dtype", "float32"], "--dtype: got float32; allowed: float16, bfloat16"),
    ],
)
def test_tune_refuses_types_before_it_looks_for_a_gpu(call, words, sentence):
    pytest.importorskip("torch")
    code, _, err = call("tune", "--shapes", "64x128", "--m", "1", *words)
    assert code == 2
    assert sentence in err


def test_info_as_json(call):
    code, out, _ = call("info", "--json")
    report = json.loads(out)
    assert code == 0
    assert {"humming_cutlass", "python", "kernel cache", "compiler"} <= set(report["facts"])
    assert "HUMMING_CUTLASS_CACHE_DIR" in report["environment"]
    assert call("info")[1].startswith("humming_cutlass: ")


def test_emit_prints_the_kernel(call):
    name = _kernel_name()
    code, out, _ = call("emit", name)
    assert code == 0
    assert out == emitter.emit(GemmConfig.from_name(name)).text
    assert json.loads(call("emit", name, "--json")[1])["name"] == name
    assert call("emit", "nonsense")[0] == 2


def test_support_check(call, tmp_path):
    page = call("support", "--markdown")[1]
    path = tmp_path / "support_matrix.md"
    path.write_text(page)
    assert call("support", "--check", str(path))[0] == 0
    path.write_text(page.replace("`nf4`", "`nf5`"))
    code, out, _ = call("support", "--check", str(path))
    assert code == 1
    assert "-| code books | `nf5` |" in out
    assert call("support", "--check", str(tmp_path / "none.md"))[0] == 2
    path.write_bytes(b"\x7fELF\xd0\x01")
    code, _, err = call("support", "--check", str(path))
    assert code == 2
    assert f"--check: got {path}, which is not UTF-8" in err
    rows = json.loads(call("support", "--json")[1])
    assert {"what": "pair", "a": "float16", "b": "int4", "reason": None} in rows
    assert any(r["b"] == "float8_e7m0" and r["a"] == "float16" and r["reason"] for r in rows)


def test_cache_list_and_clear(call, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("HUMMING_CUTLASS_CACHE_DIR", str(cache))
    assert json.loads(call("cache", "list", "--json")[1]) == {"directory": str(cache), "kernels": []}
    for folder in ("tmp", "locks", "failed"):
        (cache / "v1" / folder).mkdir(parents=True)
    entry = cache / "v1" / "ab" / ("ab" + "0" * 62)
    entry.mkdir(parents=True)
    (entry / "kernel.cubin").write_bytes(b"1234")
    meta = {
        "name": "kernel",
        "arch": "sm_80",
        "sha256": "00",
        "size": 4,
        "compiler": "13.0",
        "seconds": 1.5,
        "registers": 96,
        "spill_bytes": 0,
        "stack_bytes": 0,
        "static_smem_bytes": 0,
    }
    (entry / "meta.json").write_text(json.dumps(meta))
    assert json.loads(call("cache", "list", "--json")[1])["kernels"] == [meta]
    assert "96 registers" in call("cache", "list")[1]
    assert json.loads(call("cache", "clear", "--json")[1]) == {"directory": str(cache), "removed": 1}
    assert not entry.exists()
    assert call("cache", "list")[1].startswith(f"{cache}: 0 kernels")


def test_precompile_asks_for_every_kernel_of_the_planner(call, tmp_path, monkeypatch):
    from humming_cutlass import build

    asked = []

    def export(sources, directory, *, progress=None, jobs=None):
        asked.extend(sources)
        return {s.name: pathlib.Path(directory) / s.name for s in asked}

    monkeypatch.setattr(build, "export_kernels", export)
    code, out, _ = call(
        "precompile", str(tmp_path), "--arch", "sm_80,sm_90a", "--weights", "int4,uint4:floating", "--groups", "-1,32"
    )
    assert code == 0, out
    wanted = set()
    for arch in ("sm_80", "sm_90a"):
        for words in ({"dtype": "int4"}, {"dtype": "uint4", "zero_point": "floating"}):
            for group in (-1, 32):
                types = WeightConfig(**words, group_size=group).resolve(k=4096, element_a="float16")
                device = planner.Device(arch=arch, sm_count=100)
                wanted |= {c.name for c in planner.schedules(types, device)}
                # Unaligned activations and scales beyond float16's range take the SM80 mainloop, on every GPU.
                wanted |= {c.name for c in planner.schedules(types, device, mainloops=[support.SM80])}
                wanted.add(emitter.emit_pack(types.element_b, arch).name)
    assert {s.name for s in asked} == wanted
    assert {s.arch for s in asked} == {"sm_80", "sm_90a"}


@pytest.mark.parametrize(
    ("option", "word", "sentence"),
    [
        ("--arch", "sm_99", "--arch: got sm_99; allowed: sm_80, sm_86, "),
        ("--arch", "sm_90a,sm_85", "--arch: got sm_85; allowed: sm_80, sm_86, "),
        ("--arch", "sm_75", "arch: got sm_75; allowed: sm_80 or later"),
        ("--groups", "17", "--groups: got 17; allowed: -1 or positive multiples of 16; nearest supported: 16"),
        ("--groups", "128,0", "--groups: got 0; allowed: -1 or positive multiples of 16; nearest supported: 16"),
        ("--groups", "2147483632", "--groups: got 2147483632; allowed: at most 1073676288, the largest k"),
    ],
)
def test_precompile_refuses_in_the_words_of_its_options(call, tmp_path, option, word, sentence):
    options = {"--arch": "sm_80", "--weights": "int4", option: word}
    code, _, err = call("precompile", str(tmp_path / "out"), *(x for pair in options.items() for x in pair))
    assert code == 2
    assert sentence in err
    assert "k =" not in err
    assert not (tmp_path / "out").exists()


def test_precompile_refuses_before_it_creates_anything(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call("precompile", "out", "--arch", "sm_90a", "--weights", "int4", "--jobs", "-1")
    assert code == 2
    assert "--jobs" in err
    code, _, err = call("precompile", "", "--arch", "sm_90a", "--weights", "int4")
    assert code == 2
    assert "OUTPUT: got an empty path; allowed: the path of a folder" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "error", "sentence"),
    [
        ({"jobs": "x"}, ArgumentTypeError, "jobs: got str 'x'"),
        ({"jobs": True}, ArgumentTypeError, "jobs: got bool True"),
        ({"jobs": 0}, ArgumentError, "jobs: got 0"),
        ({"directory": ""}, ArgumentError, "directory: got an empty path"),
        ({"directory": 5}, ArgumentTypeError, "directory: got int 5"),
    ],
)
def test_export_refuses_before_it_creates_anything(tmp_path, monkeypatch, words, error, sentence):
    from humming_cutlass import build

    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=sentence):
        build.export_kernels([], **({"directory": "out"} | words))
    assert list(tmp_path.iterdir()) == []


def test_precompile_into_a_folder_that_cannot_be_written_compiles_nothing(call, tmp_path, monkeypatch):
    from humming_cutlass.build import compile as compiling

    def compile_kernels(*_, **__):
        pytest.fail("compiled first")

    monkeypatch.setattr(compiling, "compile_kernels", compile_kernels)
    (tmp_path / "file").write_text("")
    code, _, err = call("precompile", str(tmp_path / "file" / "out"), "--arch", "sm_80", "--weights", "int4")
    assert code == 2
    assert "CacheError: directory: got " in err
    assert "allowed: a folder that can be written" in err


def test_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "humming_cutlass", "support", "--json"], capture_output=True, text=True, check=True
    )
    assert len(json.loads(done.stdout)) > 50


@pytest.mark.parametrize(
    "words", [["demo", "--n", "1073676288", "--k", "1073676288", "--device", "cpu"]], ids=lambda words: words[0]
)
def test_sizes_beyond_the_memory(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("MemoryError: memory: got ")
    assert "allowed: sizes (--n, --k, --m, --shapes) that fit the memory" in error
    assert len(error.splitlines()) == 1


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(support, "check_types", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.run(["support"])
