"""Stored choices of kernels: the file, what may come out of it, and the command that fills it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from humming_cutlass import __version__, cli, planner, support, tune
from humming_cutlass.config import GemmConfig, TypeConfig, WeightConfig
from humming_cutlass.errors import CacheError, LaunchError

H200 = tune.Gpu(name="NVIDIA H200", device=planner.Device(arch="sm_90a", sm_count=132))
N, K = 4096, 4096


def _types(dtype: str = "int4", group_size: int = 128, **words: Any) -> TypeConfig:
    return WeightConfig(dtype=dtype, group_size=group_size, **words).resolve(k=K, element_a="bfloat16")


TYPES = _types()


def _other(m: int, types: TypeConfig = TYPES, n: int = N, k: int = K) -> planner.Choice:
    """A legal choice that is not the model's."""
    model = planner.choose(types, m, n, k, H200.device)
    return next(choice for choice in planner.candidates(types, m, n, k, H200.device) if choice != model)


def _outcome(m: int, *, n: int = N, keep: bool = True, gpu: tune.Gpu = H200, **changes: Any) -> tune.Outcome:
    values = {
        "gpu": gpu,
        "m": m,
        "n": n,
        "k": K,
        "model": planner.choose(TYPES, m, n, K, gpu.device),
        "model_us": 20.0,
        "best": _other(m, n=n),
        "best_us": 10.0,
        "keep": keep,
    }
    return tune.Outcome(**values | changes)


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a test; device 0 is an H200, and what was read before is forgotten."""
    path = tmp_path / "folder" / "tuning.json"
    monkeypatch.setenv("HUMMING_CUTLASS_TUNING_FILE", str(path))
    monkeypatch.setattr(tune, "gpu", lambda index: H200)
    monkeypatch.setattr(tune, "_tables", {})
    return path


def _forget() -> None:
    """What a new process starts with."""
    tune._tables.clear()


def _stored(m: int, **words: Any) -> planner.Choice | None:
    return tune.stored(words.pop("types", TYPES), m, words.pop("n", N), words.pop("k", K), 0, **words)


def _entry(**changes: Any) -> dict[str, Any]:
    entry = {"gpu": H200.name, "sm_count": 132, "version": __version__, "n": N, "k": K, "m": 16}
    choice = _other(16)
    return entry | {"kernel": choice.config.name, "split_k": choice.split_k} | changes


def _write(file: Path, *entries: Any, text: str | bytes | None = None) -> None:
    file.parent.mkdir(exist_ok=True)
    content = json.dumps({"format": 1, "entries": entries}) if text is None else text
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    _forget()


# --- Round trip ---


def test_what_is_saved_is_found_by_this_process_and_the_next(file: Path) -> None:
    assert _stored(16) is None
    assert tune.save([_outcome(16), _outcome(300, best_us=12.0)]) == file
    for _ in range(2):
        assert _stored(16) == _other(16)
        assert _stored(300) == _other(300)
        _forget()
    assert [path.name for path in file.parent.iterdir() if not path.name.endswith(".lock")] == ["tuning.json"]
    (first, second) = json.loads(file.read_text())["entries"]
    assert first == _entry(**{name: first[name] for name in first.keys() - _entry().keys()})
    assert (first["us"], first["model_us"], second["us"]) == (10.0, 20.0, 12.0)
    assert first["model_kernel"] == planner.choose(TYPES, 16, N, K, H200.device).config.name
    assert len(file.read_text().splitlines()) == 2 + 2 + 3, "an entry a line"


def test_it_holds_for_the_same_token_tiles_only() -> None:
    tune.save([_outcome(16)])
    found = [m for m in range(40) if _stored(m) is not None]
    assert found == list(range(9, 17))
    # The reason for 8: on no kernel does a step change how many tiles there are.
    for config in planner.candidates(TYPES, 16, N, K, H200.device):
        assert config.config.schedule.tile_shape[0] % tune.TOKEN_STEP == 0


def test_another_call_has_no_choice() -> None:
    tune.save([_outcome(16)])
    assert _stored(16, n=N + 16) is None
    assert _stored(16, k=K + 128) is None
    assert _stored(16, types=_types(group_size=64)) is None
    assert _stored(16, types=_types("int5")) is None


def test_types_that_do_not_exist_are_no_call(file: Path) -> None:
    _write(file, _entry(kernel=_entry()["kernel"].replace("_int4_", "_int99_")), _entry(m=64))
    assert _stored(16) is None


@pytest.mark.parametrize("changes", [{"gpu": "NVIDIA H100"}, {"sm_count": 78}, {"version": "0.0.9"}])
def test_other_gpus_and_versions_are_ignored_and_kept(file: Path, changes: dict[str, Any]) -> None:
    _write(file, _entry(**changes))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _stored(16) is None
    tune.save([_outcome(16)])
    assert _stored(16) == _other(16)
    assert _entry(**changes) in json.loads(file.read_text())["entries"]


def test_a_gpu_finds_its_own_choices_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tune.save([_outcome(16)])
    for name, sm_count in ((H200.name, 78), ("NVIDIA H100", 132)):
        other = tune.Gpu(name=name, device=planner.Device(arch="sm_90a", sm_count=sm_count))
        monkeypatch.setattr(tune, "gpu", lambda index, other=other: other)
        assert _stored(16) is None


def test_a_new_measurement_replaces_the_old_one(file: Path) -> None:
    tune.save([_outcome(16), _outcome(64)])
    third = planner.candidates(TYPES, 12, N, K, H200.device)[-1]
    assert third != _other(16)
    tune.save([_outcome(12, best=third)])
    assert len(json.loads(file.read_text())["entries"]) == 2
    assert _stored(16) == third
    tune.save([_outcome(16, keep=False)])
    assert _stored(16) is None
    assert _stored(64) == _other(64)


def test_nothing_to_store_makes_no_file(file: Path) -> None:
    tune.save([_outcome(16, keep=False)])
    assert not file.exists()


def test_a_running_process_keeps_its_choices(file: Path) -> None:
    """H3: results do not change their last bits under a running program."""
    tune.save([_outcome(16)])
    assert _stored(16) == _other(16)
    file.unlink()
    assert _stored(16) == _other(16)
    _forget()
    assert _stored(16) is None


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUMMING_CUTLASS_TUNING_FILE", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tune.path() == tmp_path / "config" / "humming_cutlass" / "tuning.json"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert tune.path() == tmp_path / "home" / ".config" / "humming_cutlass" / "tuning.json"
    tune.save([_outcome(16)])
    assert _stored(16) is not None
    monkeypatch.setenv("HUMMING_CUTLASS_TUNING_FILE", os.devnull)
    assert _stored(16) is None
    with pytest.raises(CacheError, match="not a regular file"):
        tune.save([_outcome(16)])
    monkeypatch.setenv("HUMMING_CUTLASS_TUNING_FILE", "~nobody-is-called-this/tuning.json")
    assert _stored(16) is None


def test_a_link_stays_a_link(file: Path, tmp_path: Path) -> None:
    file.parent.mkdir()
    file.symlink_to(tmp_path / "real.json")
    tune.save([_outcome(16)])
    assert file.is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["entries"]
    assert _stored(16) == _other(16)


def test_a_miss_costs_microseconds(file: Path) -> None:
    def microseconds() -> float:
        best = float("inf")
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(1000):
                tune.stored(TYPES, 16, N + 16, K, 0)
            best = min(best, time.perf_counter() - start)
        return best * 1e3

    assert microseconds() < 10, "nothing stored"
    tune.save([_outcome(16)])
    assert microseconds() < 50, "something else stored"


def test_no_gpu_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(index: int) -> tune.Gpu:
        raise LaunchError("no driver")

    tune.save([_outcome(16)])
    monkeypatch.setattr(tune, "gpu", missing)
    assert _stored(16) is None


# --- What is in the file is not to be trusted ---


def test_a_choice_must_be_one_of_the_planners(file: Path) -> None:
    """Nothing in the file can select a kernel or split that the planner would not consider for that very call."""
    entry = _entry()
    config = GemmConfig.from_name(entry["kernel"])
    name = config.name
    bad = [
        {"split_k": 17},
        {"split_k": 2**31 - 1},
        {"kernel": name.replace("_p", "_p1")},  # more stages than fit
        {"kernel": name.replace("x128x", "x64x", 1) if "x128x" in name else name.replace("x256x", "x64x", 1)},
        {"kernel": name.replace("sm_90a", "sm_80")},
        {"kernel": name.replace(support.SM90, "sm90_something_else")},
        {"kernel": name.replace(support.SM90, support.SM80)},
        {"kernel": name.replace("__16x", f"__{'9' * 300}x").replace("__8x", f"__{'9' * 300}x")},
    ]
    for changes in bad:
        assert entry | changes != entry, changes
        _write(file, entry | changes)
        with pytest.warns(RuntimeWarning, match="not among the planner's choices"):
            assert _stored(16) is None, changes
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert _stored(16) is None, "the second time without a warning"


def test_a_choice_must_suit_the_tensors(file: Path) -> None:
    """Unaligned activations and scales out of range can only go to one mainloop, whatever was measured."""
    _write(file, _entry())
    assert _other(16).config.schedule.mainloop == support.SM90
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _stored(16, mainloops=support.MAINLOOPS_FOR_ANY_TENSORS) is None
        assert _stored(16) == _stored(16, mainloops=None) == _other(16)
        sm80 = planner.candidates(TYPES, 16, N, K, H200.device, mainloops=(support.SM80,))[1]
        _write(file, _entry(kernel=sm80.config.name, split_k=sm80.split_k))
        assert _stored(16, mainloops=support.MAINLOOPS_FOR_ANY_TENSORS) == sm80
        assert _stored(16) is None


GARBAGE = {
    "empty": "",
    "text": "not json",
    "list": "[]",
    "number": "3",
    "no-entries": '{"format": 1}',
    "another-format": '{"format": 2, "entries": []}',
    "entries-of-another-type": '{"format": 1, "entries": {"a": 1}}',
    "truncated": json.dumps({"format": 1, "entries": [{"gpu": "x"}]})[:-5],
    "nan": '{"format": 1, "entries": [{"us": NaN}]}',
    "infinite": '{"format": 1, "entries": [{"us": 1e999}]}',
    "huge-number": '{"format": 1, "entries": [{"n": ' + "9" * 5000 + "}]}",
    "deep": "[" * 100_000 + "]" * 100_000,
    "deep-objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "not-utf-8": b"\xff\xfe\x00{",
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_damage_is_a_warning_once_and_is_not_overwritten(file: Path, name: str) -> None:
    _write(file, text=GARBAGE[name])
    with pytest.warns(RuntimeWarning, match=r"Stored choices in .*tuning\.json are ignored"):
        assert _stored(16) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _stored(16) is None
    before = file.read_bytes()
    for call in (tune.check_file, lambda: tune.save([_outcome(16)])):
        with pytest.raises(CacheError, match="HUMMING_CUTLASS_TUNING_FILE names another"):
            call()
    assert file.read_bytes() == before


def test_a_huge_file_is_not_read(file: Path) -> None:
    file.parent.mkdir()
    with file.open("wb") as stream:
        stream.write(b'{"format": 1, "entries": [')
        stream.truncate(100_000_000)
    start = time.perf_counter()
    with pytest.warns(RuntimeWarning, match="larger than 4 MB"):
        assert _stored(16) is None
    assert time.perf_counter() - start < 1


def test_a_pipe_and_a_folder_are_not_read(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.mkdir()
    os.mkfifo(file)
    with pytest.warns(RuntimeWarning, match="not a regular file"):
        assert _stored(16) is None
    monkeypatch.setenv("HUMMING_CUTLASS_TUNING_FILE", str(tmp_path))
    with pytest.warns(RuntimeWarning, match="ignored"):
        assert _stored(16) is None
    with pytest.raises(CacheError, match="tuning file"):
        tune.save([_outcome(16)])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_no_permission(file: Path) -> None:
    tune.save([_outcome(16)])
    _forget()
    file.chmod(0)
    with pytest.warns(RuntimeWarning, match="denied"):
        assert _stored(16) is None
    file.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(CacheError, match="denied"):
        tune.save([_outcome(16)])
    file.parent.chmod(0o700)


BAD_FIELDS = [
    *({"n": value} for value in (0, -1, 2**31, 10**100, 4096.0, "4096", None, True, [4096], {})),
    *({"m": value} for value in (0, -8, "16", 16.0, False, 2**40)),
    *({"split_k": value} for value in (-1, "1", 1.5, None, False, 2**63)),
    *({"sm_count": value} for value in (0, "132", [], 132.0)),
    *({"gpu": value} for value in (None, 5, ["NVIDIA H200"], {"name": "NVIDIA H200"})),
    *({"kernel": value} for value in (None, 7, "", "kernel", "../../etc/passwd", "sm_90a__" + "x" * 10_000, "\ud800")),
]


@pytest.mark.parametrize("changes", BAD_FIELDS, ids=lambda changes: str(changes)[:40])
def test_an_impossible_entry_is_passed_over(file: Path, changes: dict[str, Any]) -> None:
    """The entries beside it count; nothing raises, at load or at any lookup; saving keeps what it cannot read."""
    good = _entry(m=64, kernel=_other(64).config.name, split_k=_other(64).split_k)
    _write(file, _entry(**changes), good)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _stored(64) == _other(64)
        for m in (1, 8, 16, 24):
            assert _stored(m) is None
            assert _stored(m) is None
    assert len(caught) == 1
    tune.save([_outcome(16)])
    assert json.loads(file.read_text())["entries"][:2] == [_entry(**changes), good]
    assert _stored(16) == _other(16)


@pytest.mark.parametrize("entry", [None, 1, "x", [], [[]], {}, {"version": 3}, {"version": __version__}], ids=repr)
def test_an_entry_of_another_shape_is_passed_over(file: Path, entry: Any) -> None:
    _write(file, entry, _entry())
    with pytest.warns(RuntimeWarning, match="ignored"):
        assert _stored(16) == _other(16)
    tune.save([_outcome(64)])
    assert json.loads(file.read_text())["entries"][:2] == [entry, _entry()]


def test_fields_that_are_not_needed_may_be_anything(file: Path) -> None:
    """Deep values that were just not too deep to be read are refused on writing, not written half."""
    _write(file, _entry(us="fast", note={"a": [1, 2]}, date=None))
    assert _stored(16) == _other(16)
    deep = json.loads("[" * 500 + "]" * 500)
    _write(file, _entry(note=deep))
    assert _stored(16) == _other(16)
    tune.save([_outcome(64)])
    assert _entry(note=deep) in json.loads(file.read_text())["entries"]


def test_the_file_does_not_outgrow_what_is_read(file: Path) -> None:
    _write(file, _entry(note="x" * ((4 << 20) - 1000)))
    before = file.read_bytes()
    with pytest.raises(CacheError, match="would be larger than 4 MB"):
        tune.save([_outcome(m) for m in range(64, 128, 8)])
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir() if "json-" in path.name] == []


# --- Writers ---

_WRITER = """
import sys
from humming_cutlass import planner, tune
from humming_cutlass.config import WeightConfig
first, count = int(sys.argv[1]), int(sys.argv[2])
gpu = tune.Gpu(name="NVIDIA H200", device=planner.Device(arch="sm_90a", sm_count=132))
types = WeightConfig(dtype="int4", group_size=128).resolve(k=4096, element_a="bfloat16")
choice = planner.choose(types, 16, 4096, 4096, gpu.device)
for i in range(first, first + count):
    outcome = dict(gpu=gpu, m=16, n=16 * i, k=4096, model=choice, model_us=2.0, best=choice, best_us=1.0, keep=True)
    tune.save([tune.Outcome(**outcome)])
"""


def test_writers_at_the_same_time_lose_nothing(file: Path) -> None:
    counts = 12
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(1 + i * counts), str(counts)], stderr=subprocess.PIPE)
        for i in range(3)
    ]
    reads = 0
    while any(writer.poll() is None for writer in writers):
        if file.exists():
            assert json.loads(file.read_text())["format"] == 1, "a reader sees whole files"
            reads += 1
        time.sleep(0.001)
    for writer in writers:
        _, err = writer.communicate()
        assert writer.returncode == 0, err.decode()
    entries = json.loads(file.read_text())["entries"]
    assert sorted(entry["n"] for entry in entries) == [16 * i for i in range(1, 1 + 3 * counts)]
    assert reads > 0


def test_a_writer_that_fails_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tune.save([_outcome(16)])
    before = file.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CacheError, match="No space left"):
        tune.save([_outcome(64)])
    assert file.read_bytes() == before
    assert sorted(path.name for path in file.parent.iterdir()) == [".tuning.json.lock", "tuning.json"]


def test_a_lock_that_is_held_ends_with_a_sentence(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from humming_cutlass.build.cache import FileLock

    tune.save([_outcome(16)])
    monkeypatch.setattr(tune, "_LOCK_TIMEOUT", 0.1)
    lock = FileLock(file.parent / ".tuning.json.lock")
    assert lock.try_acquire()
    try:
        with pytest.raises(CacheError, match=r"no lock on .*\.tuning\.json\.lock"):
            tune.save([_outcome(64)])
    finally:
        lock.release()
    tune.save([_outcome(64)])


# --- The command, with a clock of its own ---

torch = pytest.importorskip("torch")

from humming_cutlass import ops  # noqa: E402
from humming_cutlass.benchmark import tuner  # noqa: E402
from humming_cutlass.errors import ArgumentError, UnsupportedError  # noqa: E402

SHAPE = (256, 512)


class Clock:
    """`ops.gemm` and `time_calls` without a GPU: a choice takes the time that `microseconds` says."""

    def __init__(self) -> None:
        self.last: planner.Choice | None = None
        self.wrong: set[planner.Choice] = set()
        self.timed: list[planner.Choice] = []
        self.sustained: list[bool] = []
        self.microseconds = lambda choice, round_: 10.0

    def gemm(self, a: Any, weight: Any, *, out: Any, config: GemmConfig, split_k: int) -> Any:
        self.last = planner.Choice(config=config, split_k=split_k)
        ops.gemm_host(a, weight, out=out)
        if self.last in self.wrong:
            out[-1, -1] += 1000
        return out

    def time_calls(self, calls: Any, *, device: Any, sustained: bool = False, repeats: int = 5) -> Any:
        calls[0]()
        assert self.last is not None
        self.timed.append(self.last)
        self.sustained.append(sustained)
        us = self.microseconds(self.last, self.timed.count(self.last))
        return type("Timing", (), {"us": us})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(tuner, "open_device", lambda index: (torch.device("cpu"), H200))
    monkeypatch.setattr(tuner, "rotation_bytes", lambda device: 1)
    monkeypatch.setattr(tuner, "time_calls", clock.time_calls)
    monkeypatch.setattr(ops, "gemm", clock.gemm)
    return clock


def _tune(capsys: pytest.CaptureFixture[str], *words: str, m: str = "16") -> tuple[int, str, str]:
    shape = "x".join(map(str, SHAPE))
    code = cli.run(["tune", "--shapes", shape, "--m", m, "--types", "int4:g128", *words])
    out, err = capsys.readouterr()
    return code, out, err


def _all(m: int) -> tuple[planner.Choice, list[planner.Choice]]:
    n, k = SHAPE
    types = WeightConfig(dtype="int4", group_size=128).resolve(k=k, element_a="bfloat16")
    model = planner.choose(types, m, n, k, H200.device)
    others = [choice for choice in planner.candidates(types, m, n, k, H200.device) if choice != model]
    assert len(others) >= 5
    return model, others


def _lookup(m: int) -> planner.Choice | None:
    n, k = SHAPE
    return tune.stored(WeightConfig(dtype="int4", group_size=128).resolve(k=k, element_a="bfloat16"), m, n, k, 0)


def test_command_stores_what_beats_the_model(clock: Clock, capsys: pytest.CaptureFixture[str], file: Path) -> None:
    model, others = _all(16)
    clock.microseconds = lambda choice, _: {model: 10.0, others[3]: 8.0}.get(choice, 12.0)
    code, out, _ = _tune(capsys, "--json")
    assert code == 0
    report = json.loads(out)
    (row,) = report["rows"]
    assert report["file"] == str(file)
    assert set(clock.timed) == {model, *others}, "every kernel and split"
    assert row["candidates"] == len(others) + 1
    assert (row["model"], row["best"]) == (model.config.name, others[3].config.name)
    assert (row["model_us"], row["best_us"], row["gain"], row["stored"]) == (10.0, 8.0, 0.25, True)
    assert _lookup(16) == others[3]
    # Now a table: the model is the best, and the stored choice goes.
    clock.microseconds = lambda choice, _: 10.0 if choice == model else 12.0
    code, out, _ = _tune(capsys)
    assert code == 0
    assert "256x512 bfloat16 x int4:g128 on NVIDIA H200" in out
    assert "model stays" in out
    assert f"0 of 1 choices stored in {file}" in out
    assert _lookup(16) is None


@pytest.mark.parametrize(("best", "kept"), [(9.9, False), (9.79, True)])
def test_command_wants_two_percent(clock: Clock, capsys: pytest.CaptureFixture[str], best: float, kept: bool) -> None:
    model, others = _all(16)
    clock.microseconds = lambda choice, _: {model: 10.0, others[0]: best}.get(choice, 20.0)
    assert _tune(capsys)[0] == 0
    assert (_lookup(16) is not None) == kept


def test_command_measures_the_fastest_twice(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """A first time that was luck stores nothing."""
    model, others = _all(16)
    lucky, steady = others[0], others[1]
    times = {(lucky, 1): 7.0, (lucky, 2): 11.0, (steady, 1): 7.2, (steady, 2): 9.0, (model, 1): 10.0, (model, 2): 10.0}
    clock.microseconds = lambda choice, count: times.get((choice, count), 15.0)
    assert _tune(capsys)[0] == 0
    assert _lookup(16) == steady
    assert len(clock.timed) == 1 + len(others) + 3


def test_command_sustains_large_m(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert _tune(capsys, m="512")[0] == 0
    assert any(clock.sustained)
    assert not clock.sustained[0]


def test_command_never_stores_a_wrong_kernel(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    model, others = _all(16)
    clock.microseconds = lambda choice, _: 1.0 if choice == others[0] else 10.0
    clock.wrong = {others[0]}
    code, out, _ = _tune(capsys)
    assert code == 1
    assert f"1 OF {len(others) + 1} OUT OF BOUNDS" in out
    assert others[0] not in clock.timed
    assert _lookup(16) is None
    clock.wrong = {model}
    code, out, _ = _tune(capsys, "--json")
    assert code == 1
    (row,) = json.loads(out)["rows"]
    assert (row["model_us"], row["gain"], row["stored"]) == (None, None, False)


def test_command_measures_one_m_of_those_that_share_a_choice(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _tune(capsys, "--json", m="4,1,8,9,16,2")
    assert code == 0
    assert [row["m"] for row in json.loads(out)["rows"]] == [8, 16]


def test_an_interruption_keeps_what_was_measured(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    _, others = _all(16)

    def microseconds(choice: planner.Choice, _: int) -> float:
        if len(clock.timed) > 2 * (len(others) + 1) - 1 and _lookup(16) is not None:
            raise KeyboardInterrupt
        return 8.0 if choice == others[0] else 10.0

    clock.microseconds = microseconds
    assert _tune(capsys, m="16,64")[0] != 0
    assert _lookup(16) == others[0]


def test_activations_that_tma_cannot_read_are_tuned_on_their_mainloop(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    n, k = 96, 204  # rows of 408 bytes
    types = WeightConfig(dtype="int4").resolve(k=k, element_a="bfloat16")
    model = planner.choose(types, 16, n, k, H200.device, mainloops=support.MAINLOOPS_FOR_ANY_TENSORS)
    clock.microseconds = lambda choice, _: 10.0 if choice == model else 5.0
    assert cli.run(["tune", "--shapes", f"{n}x{k}", "--m", "16", "--types", "int4"]) == 0
    assert {choice.config.schedule.mainloop for choice in clock.timed} == {support.SM80}
    assert tune.stored(types, 16, n, k, 0) is None
    assert tune.stored(types, 16, n, k, 0, mainloops=support.MAINLOOPS_FOR_ANY_TENSORS) is not None


def test_command_refuses_before_it_measures(
    clock: Clock, capsys: pytest.CaptureFixture[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(file, text="precious")
    code, _, err = _tune(capsys)
    assert code == 2
    assert "tuning file: got" in err
    assert clock.timed == []
    assert file.read_text() == "precious"
    file.unlink()
    for words in (["--m", "0"], ["--shapes", "64"], ["--types", "int4:g99"], ["--types", "int4:loud"]):
        assert cli.run(["tune", "--shapes", "64x128", "--m", "1", "--types", "int4", *words]) == 2, words
    assert "--types: got 'int4:loud'" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.run(["tune", "--shapes", "64x128", "--m", "1", "--types", "int4"]) == 2
    assert "--device: got 0; allowed: a CUDA device, and torch sees none" in capsys.readouterr().err


def test_format_words() -> None:
    problem = tuner.parse_types("uint4:floating:g64:float32", n=64, k=128, element_a="float16")
    types = problem.types
    assert (types.element_b, types.element_zero, types.group_size) == ("uint4", "float16", 64)
    assert (types.element_scale, types.element_a) == ("float32", "float16")
    assert problem.label == "uint4:floating:g64:float32"
    assert tuner.parse_types("int4:channel", n=64, k=128, element_a="float16").types.group_size == -1
    for text in ("int4:g", "int4:g-1", "int4:", "int4:g12345678901", ":g128"):
        with pytest.raises((ArgumentError, UnsupportedError)):
            tuner.parse_types(text, n=64, k=128, element_a="float16")


# --- On a GPU ---

GPU_TYPES, GPU_N, GPU_K = "int4:g128", 1024, 4096


def _gpu_problem() -> Any:
    return tuner.parse_types(GPU_TYPES, n=GPU_N, k=GPU_K, element_a="bfloat16")


@pytest.mark.gpu
@pytest.mark.compile
def test_tuning_leaves_weights_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """G9: more tokens than anything before, and not a bit of any weight or neighbour changes."""
    monkeypatch.undo()  # the GPU that is there
    where, gpu = tuner.open_device(0)
    kept: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    made = tuner.HummingCutlass

    class Watched(made):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            kept.extend(t for copy in self.copies for t in copy.state_dict().values())
            sums.extend(t.view(torch.uint8).long().sum() for t in kept)

    bystander = torch.randint(0, 255, (1 << 24,), dtype=torch.uint8, device=where)
    before = bystander.clone()
    monkeypatch.setattr(tuner, "HummingCutlass", Watched)
    monkeypatch.setattr(tuner, "rotation_bytes", lambda device: 1)
    plan = tuner.Plan(problems=[_gpu_problem()], tokens=[1, 64, 2048], device=where, gpu=gpu, repeats=3)
    found = list(tuner.run(plan))
    assert [row["failed"] for _, row in found] == [0, 0, 0]
    assert all(outcome.best_us > 0 for outcome, _ in found)
    assert kept
    for tensor, total in zip(kept, sums, strict=True):
        assert bool(tensor.view(torch.uint8).long().sum() == total)
    assert torch.equal(bystander, before)


_ONE_CALL = """
import sys
import torch
from humming_cutlass import ops, testing, tune
types = testing.make_types("int4", k=4096, element_a="bfloat16", group_size=128)
problem = testing.random_problem(types, 16, 1024, 4096, device="cuda")
choice = tune.stored(types, 16, 1024, 4096, 0)
y = ops.gemm(problem.a, problem.packed, config=choice.config, split_k=choice.split_k)
with testing.scaled_weights():
    problem.check(y)
print(choice.config.name, choice.split_k, hash(y.cpu().view(torch.int16).numpy().tobytes()))
"""


@pytest.mark.gpu
@pytest.mark.compile
def test_a_stored_choice_gives_the_same_bits_in_every_process(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """H3: what was tuned once is what every later process computes with."""
    monkeypatch.undo()
    monkeypatch.setenv("HUMMING_CUTLASS_TUNING_FILE", str(file))
    _, gpu = tuner.open_device(0)
    types = _gpu_problem().types
    model = planner.choose(types, 16, GPU_N, GPU_K, gpu.device)
    splits = [choice for choice in planner.candidates(types, 16, GPU_N, GPU_K, gpu.device) if choice != model]
    best = max(splits, key=lambda choice: choice.split_k)
    outcome = {"gpu": gpu, "m": 16, "n": GPU_N, "k": GPU_K, "model": model, "model_us": 2.0, "best_us": 1.0}
    tune.save([tune.Outcome(**outcome, best=best, keep=True)])
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    lines = {
        subprocess.run(
            [sys.executable, "-c", _ONE_CALL], env=environment, capture_output=True, text=True, check=True, timeout=120
        ).stdout
        for _ in range(2)
    }
    assert len(lines) == 1, lines
    assert lines.pop().startswith(f"{best.config.name} {best.split_k} ")
