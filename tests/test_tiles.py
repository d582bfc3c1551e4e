"""bench/tiles.py without a GPU: its words, and how it judges a table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bench_tools
from humming_cutlass import planner, testing

H200 = planner.Device(arch="sm_90a", sm_count=132)
TYPES = testing.make_types("int4", k=8192, element_a="bfloat16", group_size=128)


@pytest.fixture(scope="module")
def tiles() -> Any:
    return bench_tools.load("tiles")


def _rows(m: int, factor: float) -> list[dict[str, Any]]:
    """All candidates of a point; the planner's choice takes `factor` times as long as the fastest, which is another."""
    chosen = planner.choose(TYPES, m, 8192, 8192, H200)
    found = planner.candidates(TYPES, m, 8192, 8192, H200)
    others = [choice for choice in found if choice != chosen]
    times = {chosen: 10.0 * factor, **{choice: 10.0 + i for i, choice in enumerate(others)}}
    return [
        {"n": 8192, "k": 8192, "m": m, "kernel": c.config.name, "split_k": c.split_k, "us": us}
        for c, us in times.items()
    ]


def test_losses(tiles: Any) -> None:
    sentences, losses = tiles.judge([*_rows(16, 1.01), *_rows(64, 1.25)], H200)
    assert losses == pytest.approx([0.01, 0.25])
    (sentence,) = sentences
    assert "m = 64" in sentence
    assert sentence.endswith("25.0% lost")


def test_a_choice_that_is_not_in_the_table(tiles: Any) -> None:
    chosen = planner.choose(TYPES, 16, 8192, 8192, H200)
    rows = [row for row in _rows(16, 1.0) if (row["kernel"], row["split_k"]) != (chosen.config.name, chosen.split_k)]
    sentences, losses = tiles.judge(rows, H200)
    assert not losses
    assert sentences[0].endswith("was not measured")


def test_words_for_tiles(tiles: Any) -> None:
    assert tiles.parse_tiles("8x128x256:5,16x256x256:4") == (((8, 128, 256), 5), ((16, 256, 256), 4))
    for wrong in ("", "8x128", "8x128x256", "8x128x256:", "8x128x256:a", "8x128x-1:2", "8x128x256:5,"):
        with pytest.raises(SystemExit, match="--tiles: got"):
            tiles.parse_tiles(wrong)


def test_command(tmp_path: Path) -> None:
    table = tmp_path / "tiles.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in _rows(16, 1.5)))
    command = [sys.executable, str(bench_tools.BENCH / "tiles.py"), "--judge", str(table)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "1 points, 50.00% lost on average, 50.0% at most"
