"""The kernel cache: what is kept, who may see it, and what survives crashes, races and damage."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from build_tools import calls, empty_cache, expected_cubin, fake_nvcc, kernel, run_python
from humming_cutlass import build, errors
from humming_cutlass.build import cache as cache_module
from humming_cutlass.build import compile as compile_module
from humming_cutlass.build import project

# What a process of its own does: compile the kernels named on its command line, print the cubins' contents.
COMPILE = """
import json, sys
from humming_cutlass import build
sources = [build.KernelSource(name, f"// {name} \\n", "sm_80") for name in sys.argv[1:]]
print("ready", flush=True)
found = build.compile_kernels(sources)
print(json.dumps({name: path.read_text() for name, path in found.items()}))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache and a fake compiler; nothing of the machine's own is found."""
    return empty_cache(tmp_path, monkeypatch)


def forget() -> None:
    """Makes the next call look at the disk, as a new process would."""
    compile_module._states.clear()


def compiled(tmp_path: Path) -> list[str]:
    return [call for call in calls(tmp_path) if call != "version"]


def test_compiles_once_and_finds_it_again(cache: Path, tmp_path: Path) -> None:
    sources = [kernel("one"), kernel("two")]
    found = build.compile_kernels(sources)
    assert list(found) == ["one", "two"]
    assert [path.read_bytes() for path in found.values()] == [expected_cubin(source) for source in sources]
    assert sorted(compiled(tmp_path)) == ["one.cu", "two.cu"]
    forget()
    assert build.compile_kernels(sources) == found
    assert len(compiled(tmp_path)) == 2


def test_layout_and_record(cache: Path) -> None:
    source = kernel()
    path = build.compile_kernels([source])["scale"]
    key = build.kernel_key(source, build.find_compiler())
    assert path == cache / "v1" / key[:2] / key / "kernel.cubin"
    assert {entry.name for entry in path.parent.iterdir()} == {"kernel.cubin", "kernel.cu", "log.txt", "meta.json"}
    assert (path.parent / "kernel.cu").read_text() == source.text
    info = build.kernel_info(path)
    assert (info.name, info.arch, info.compiler) == ("scale", "sm_80", "release 13.0, V13.0.1")
    assert (info.registers, info.spill_bytes, info.stack_bytes, info.static_smem_bytes) == (40, 12, 16, 128)
    assert info.size == len(expected_cubin(source))
    assert "Used 40 registers" in (path.parent / "log.txt").read_text()
    assert list((cache / "v1" / "tmp").iterdir()) == []


def test_private_folders(cache: Path) -> None:
    path = build.compile_kernels([kernel()])["scale"]
    for folder in (cache, cache / "v1", cache / "v1" / "tmp", cache / "v1" / "locks", path.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0, folder


def test_a_warm_process_runs_no_program(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = kernel()
    first = build.compile_kernels([source])
    forget()
    compile_module._headers.cache_clear()
    build.toolchain._known_versions.clear()
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail(f"ran {a}"))
    assert build.compile_kernels([source]) == first


def test_the_headers_are_hashed_once_a_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.compile_kernels([kernel("one")])
    forget()
    monkeypatch.setattr(Path, "rglob", lambda *a: pytest.fail("read the headers again"))
    build.compile_kernels([kernel("one"), kernel("two")])


def test_a_known_kernel_reads_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = kernel()
    first = build.compile_kernels([source])
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"read {self}"))
    assert build.compile_kernels([source]) == first


def test_nothing_happens_at_import(tmp_path: Path) -> None:
    code = "import humming_cutlass.build, sys; print('torch' in sys.modules)"
    process = run_python(code, HOME=str(tmp_path / "home"), HUMMING_CUTLASS_CACHE_DIR=str(tmp_path / "cache"))
    output, error = process.communicate()
    assert (output.strip(), error) == ("False", "")
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "home").exists()


def test_extra_flags_reach_the_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUMMING_CUTLASS_EXTRA_CUDA_FLAGS", "-lineinfo '-DNAME=two words'")
    log = (build.compile_kernels([kernel()])["scale"].parent / "log.txt").read_text()
    assert "-lineinfo" in log
    assert "-DNAME=two words" in log
    assert "-gencode=arch=compute_80,code=sm_80" in log


# --- Crashes and races -----------------------------------------------------------------------------------------------


def test_sixteen_processes_three_killed(cache: Path, tmp_path: Path) -> None:
    fake_nvcc(tmp_path, delay=0.4)
    names = [f"kernel{index}" for index in range(6)]
    seed = random.randrange(2**32)
    print("seed", seed)  # shown when the test fails
    chance = random.Random(seed)
    processes = []
    for _ in range(16):
        chance.shuffle(names)
        processes.append(run_python(COMPILE, *names))
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    killed = chance.sample(processes, 3)
    # The first to start is among them: it is the likeliest to hold locks.
    killed[0] = processes[0] if processes[0] not in killed[1:] else killed[0]
    for process in killed:
        time.sleep(chance.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
    expected = {name: expected_cubin(kernel(name)).decode() for name in names}
    for process in processes:
        # Not communicate(): it would miss what readline() has buffered.
        output, error = process.stdout.read(), process.stderr.read()  # type: ignore[union-attr]
        code = process.wait(timeout=60)
        if process in killed:
            continue
        assert code == 0, error
        assert json.loads(output) == expected
        assert error == ""
    # Each kernel was compiled once, and once more at most for each process that was killed.
    assert len(compiled(tmp_path)) <= len(names) * (1 + len(killed))

    before = len(compiled(tmp_path))
    output, error = run_python(COMPILE, *names).communicate()
    assert json.loads(output.splitlines()[-1]) == expected, error
    assert len(compiled(tmp_path)) == before
    for entry in (cache / "v1").glob("??/*"):
        assert cache_module.read_entry(entry)[1] is None


def test_one_process_compiles_and_the_others_wait(cache: Path, tmp_path: Path) -> None:
    fake_nvcc(tmp_path, delay=1.5)
    processes = [run_python(COMPILE, "one") for _ in range(4)]
    for process in processes:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
    assert compiled(tmp_path) == ["one.cu"]


def test_a_killed_build_leaves_nothing_that_counts(cache: Path, tmp_path: Path) -> None:
    fake_nvcc(tmp_path, delay=60)
    process = run_python(COMPILE, "one")
    try:
        deadline = time.monotonic() + 30
        while not compiled(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert compiled(tmp_path) == ["one.cu"]
    finally:
        process.kill()
        process.communicate()
        # The compiler itself outlives its master; end it, by the number it noted.
        compiler = int((tmp_path / "calls").read_text().splitlines()[-1].split()[1])
        with contextlib.suppress(ProcessLookupError):
            os.kill(compiler, signal.SIGKILL)
    left = list((cache / "v1" / "tmp").iterdir())
    assert len(left) == 1

    fake_nvcc(tmp_path, delay=0)
    start = time.monotonic()
    assert build.compile_kernels([kernel("one")])["one"].read_bytes() == expected_cubin(kernel("one"))
    assert time.monotonic() - start < 20
    # What it left is removed once it is certainly nobody's.
    assert left[0].exists()
    os.utime(left[0], (0, 0))
    build.compile_kernels([kernel("two")])
    assert not left[0].exists()


def test_a_killed_build_keeps_what_was_done(cache: Path, tmp_path: Path) -> None:
    """Each kernel is published when the next one is done, not when all are."""
    nvcc = fake_nvcc(tmp_path)
    nvcc.write_text(nvcc.read_text().replace("printf ", 'case "$src" in slow*) sleep 60;; esac\nprintf ', 1))
    names = ["slow", "one", "two", "three"]
    process = run_python(COMPILE, *names, HUMMING_CUTLASS_NUM_JOBS="4")
    try:
        deadline = time.monotonic() + 30
        while len(list((cache / "v1").glob("??/*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()
        for line in (tmp_path / "calls").read_text().splitlines():
            if line.startswith("slow"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(line.split()[1]), signal.SIGKILL)
    fake_nvcc(tmp_path)
    before = compiled(tmp_path)
    found = build.compile_kernels([kernel(name) for name in names])
    assert {name: path.read_bytes() for name, path in found.items()} == {
        name: expected_cubin(kernel(name)) for name in names
    }
    again = compiled(tmp_path)[len(before) :]
    assert "slow.cu" in again
    assert len(again) == 2


def test_a_running_build_is_not_swept(cache: Path) -> None:
    store = cache_module.KernelCache(cache)
    cache.mkdir(mode=0o700)
    store.prepare()
    with store.workspace() as mine:
        os.utime(mine, (0, 0))
        with store.workspace() as other:
            assert mine.is_dir()
            assert other != mine
    assert not mine.exists()


def test_threads_share_one_compilation(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvcc(tmp_path, delay=0.5)
    asked: list[object] = []
    original = compile_module._resolve

    def resolve(state: object, sources: list[build.KernelSource], *rest: object) -> object:
        asked.extend(sources)
        return original(state, sources, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(compile_module, "_resolve", resolve)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: build.compile_kernels([kernel("one"), kernel("two")]), range(8)))
    assert all(result == found[0] for result in found)
    assert len(asked) == 2  # the others waited in memory, not at a lock file
    assert sorted(compiled(tmp_path)) == ["one.cu", "two.cu"]


def test_threads_share_one_failure_and_can_try_again(cache: Path, tmp_path: Path) -> None:
    fake_nvcc(tmp_path, error="no such thing")

    def attempt(_: int) -> str:
        with pytest.raises(errors.CompileError) as caught:
            build.compile_kernels([kernel()])
        return str(caught.value)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all("no such thing" in message for message in pool.map(attempt, range(4)))
    fake_nvcc(tmp_path)
    assert build.compile_kernels([kernel()])["scale"].read_bytes() == expected_cubin(kernel())


def test_an_interrupted_thread_does_not_fail_the_others(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = project.build_project
    started = multiprocessing.Event()
    interrupted = []

    def interrupt_first(*arguments: object, **options: object) -> object:
        if not interrupted:
            interrupted.append(True)
            started.set()
            time.sleep(0.3)  # the other thread is waiting by then
            raise KeyboardInterrupt
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(project, "build_project", interrupt_first)

    def first() -> str:
        try:
            build.compile_kernels([kernel()])
        except KeyboardInterrupt:
            return "interrupted"
        return "finished"

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        assert started.wait(10)
        two = pool.submit(build.compile_kernels, [kernel()])
        assert one.result(timeout=30) == "interrupted"
        assert two.result(timeout=30)["scale"].read_bytes() == expected_cubin(kernel())


def test_a_forked_child_can_compile(cache: Path, tmp_path: Path) -> None:
    build.compile_kernels([kernel("one")])
    state = next(iter(compile_module._states.values()))
    read, write = os.pipe()
    with state.lock, compile_module._states_lock:  # as another thread might hold them at that moment
        child = os.fork()
        if child == 0:
            try:
                content = build.compile_kernels([kernel("two")])["two"].read_bytes()
            except BaseException as error:
                content = repr(error).encode()
            os.write(write, content)
            os._exit(0)
    os.close(write)
    try:
        finished, _, _ = select.select([read], [], [], 30)
        assert finished, "the child waits for a lock that nobody holds there"
        with os.fdopen(read, "rb") as pipe:
            assert pipe.read() == expected_cubin(kernel("two"))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_lock_wait_ends_with_a_message(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = kernel()
    key = build.kernel_key(source, build.find_compiler())
    cache.mkdir(mode=0o700)
    store = cache_module.KernelCache(cache)
    store.prepare()
    lock = store.lock(key)
    assert lock.try_acquire()
    monkeypatch.setattr(compile_module, "LOCK_TIMEOUT", 0.2)
    with pytest.raises(errors.CacheError, match=rf"{key}\.lock held by another process"):
        build.compile_kernels([source])
    lock.release()
    build.compile_kernels([source])


def test_without_file_locks_it_builds_anyway(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cache_module.fcntl, "flock", no_locks)
    assert build.compile_kernels([kernel()])["scale"].read_bytes() == expected_cubin(kernel())


def test_an_entry_appears_whole(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one rename of a folder that is complete and was not visible before."""
    moves = []
    original = os.rename

    def rename(source: Path, target: Path) -> None:
        moves.append((cache_module.read_entry(source)[0] is not None, target.exists()))
        original(source, target)

    monkeypatch.setattr(os, "rename", rename)
    build.compile_kernels([kernel("one"), kernel("two")])
    assert moves == [(True, False), (True, False)]


def test_the_loser_of_a_race_takes_the_winners_entry(cache: Path, tmp_path: Path) -> None:
    path = build.compile_kernels([kernel()])["scale"]
    staged = tmp_path / "staged"
    shutil.copytree(path.parent, staged)
    (staged / "log.txt").write_text("the loser's")
    assert cache_module.KernelCache(cache).publish(path.parent.name, staged) == path
    assert (path.parent / "log.txt").read_text() != "the loser's"


# --- Damage ----------------------------------------------------------------------------------------------------------


def _truncate(entry: Path) -> None:
    os.truncate(entry / "kernel.cubin", 5)


def _flip_a_bit(entry: Path) -> None:
    content = bytearray((entry / "kernel.cubin").read_bytes())
    content[-3] ^= 1
    (entry / "kernel.cubin").write_bytes(content)


def _a_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("no folder")


def _a_link(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.symlink_to("nowhere")


def _remove_cubin(entry: Path) -> None:
    (entry / "kernel.cubin").unlink()


def _remove_record(entry: Path) -> None:
    (entry / "meta.json").unlink()


def _garble_record(entry: Path) -> None:
    (entry / "meta.json").write_text("{")


@pytest.mark.parametrize(
    "damage", [_truncate, _flip_a_bit, _remove_cubin, _remove_record, _garble_record, _a_file, _a_link]
)
def test_a_damaged_entry_is_compiled_again_with_one_warning(cache: Path, tmp_path: Path, damage: object) -> None:
    path = build.compile_kernels([kernel()])["scale"]
    damage(path.parent)  # type: ignore[operator]
    forget()
    with pytest.warns(RuntimeWarning, match="compiled again") as caught:
        assert build.compile_kernels([kernel()])["scale"].read_bytes() == expected_cubin(kernel())
    assert len(caught) == 1
    assert compiled(tmp_path) == ["scale.cu"] * 2
    forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build.compile_kernels([kernel()])
    assert len(compiled(tmp_path)) == 2


def test_an_emptied_cache_is_filled_again(cache: Path) -> None:
    build.compile_kernels([kernel()])
    shutil.rmtree(cache / "v1")
    assert build.compile_kernels([kernel()])["scale"].read_bytes() == expected_cubin(kernel())


# --- The directory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No directory of its own, HOME and the temporary directory below `tmp_path`."""
    monkeypatch.delenv("HUMMING_CUTLASS_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "temporary").mkdir(mode=0o700)
    monkeypatch.setattr(cache_module.tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path


def test_choice_of_directory(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (homes / "home").mkdir()
    assert build.cache_directory() == homes / "home" / ".cache" / "humming_cutlass"
    monkeypatch.setenv("XDG_CACHE_HOME", str(homes / "xdg"))
    assert build.cache_directory() == homes / "xdg" / "humming_cutlass"
    monkeypatch.setenv("HUMMING_CUTLASS_CACHE_DIR", str(homes / "own"))
    assert build.cache_directory() == homes / "own"
    assert not (homes / "own").exists()
    assert not (homes / "xdg").exists()
    assert build.cache_directory(create=True) == homes / "own"
    assert stat.S_IMODE((homes / "own").stat().st_mode) == 0o700


@pytest.mark.parametrize("home", ["/proc/1/nothing", "/dev/null"])  # root cannot write there either
def test_a_home_that_cannot_be_written_falls_back(homes: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    expected = homes / "temporary" / f"humming_cutlass-{os.geteuid()}"
    assert build.cache_directory(create=True) == expected
    assert stat.S_IMODE(expected.stat().st_mode) == 0o700


def _obey_modes() -> None:
    """In a child before it starts its program: root is held to file modes as any user is."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2, 3):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER
        libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def test_a_read_only_home_works(homes: Path) -> None:
    """In a home that cannot be written to: compiles, and finds it again."""
    (homes / "home").mkdir(mode=0o555)
    nvcc = fake_nvcc(homes)
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", COMPILE, "one"],
            env={**os.environ, "CUDACXX": str(nvcc), "TMPDIR": str(homes / "temporary"), "HOME": str(homes / "home")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_obey_modes,
        )
        output, error = process.communicate()
        assert process.returncode == 0, error
        assert json.loads(output.splitlines()[-1]) == {"one": expected_cubin(kernel("one")).decode()}
    assert compiled(homes) == ["one.cu"]
    assert (homes / "temporary" / f"humming_cutlass-{os.geteuid()}" / "v1").is_dir()


def test_a_read_only_directory_still_serves_what_it_holds(cache: Path) -> None:
    process = run_python(COMPILE, "one")
    assert process.communicate()[1] == ""
    folders = [cache, *(path for path in cache.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o500)
    for name, found in (("one", True), ("two", False)):
        process = subprocess.Popen(
            [sys.executable, "-c", COMPILE, name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_obey_modes,
        )
        output, error = process.communicate()
        if found:
            assert json.loads(output.splitlines()[-1]) == {"one": expected_cubin(kernel("one")).decode()}, error
        else:
            assert "CacheError: kernel cache: got " in error
            assert "Permission denied" in error
            assert "HUMMING_CUTLASS_CACHE_DIR" in error
    for folder in folders:
        folder.chmod(0o700)


def test_with_nothing_to_write_to_kernels_last_as_long_as_the_process(homes: Path) -> None:
    code = (
        "import tempfile, os\n"
        "from humming_cutlass.build import cache\n"
        "cache._create = lambda path: 'Read-only file system'\n" + COMPILE + "print(found['one'])\n"
    )
    process = run_python(code, "one", CUDACXX=str(fake_nvcc(homes)), TMPDIR=str(homes / "temporary"))
    output, error = process.communicate()
    assert process.returncode == 0, error
    assert error.count("last only as long as this process") == 1
    path = Path(output.splitlines()[-1])
    assert path.is_relative_to(homes / "temporary")
    assert not path.exists()
    assert list((homes / "temporary").iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_directory_others_can_write_is_refused(cache: Path, mode: int) -> None:
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(errors.CacheError, match=r"HUMMING_CUTLASS_CACHE_DIR: .*lets others write \(chmod 700"):
        build.compile_kernels([kernel()])
    assert list(cache.iterdir()) == []
    cache.chmod(0o700)
    build.compile_kernels([kernel()])


def test_a_directory_of_another_user_is_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir(mode=0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(errors.CacheError, match=f"owned by user {user}, not by user {user + 1}"):
        build.compile_kernels([kernel()])


def test_an_unsafe_default_directory_is_passed_over(homes: Path) -> None:
    unsafe = homes / "home" / ".cache" / "humming_cutlass"
    unsafe.mkdir(parents=True)
    unsafe.chmod(0o777)
    assert build.cache_directory(create=True) == homes / "temporary" / f"humming_cutlass-{os.geteuid()}"


def test_a_link_in_the_temporary_directory_is_not_followed(homes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    (homes / "elsewhere").mkdir(mode=0o700)
    link = homes / "temporary" / f"humming_cutlass-{os.geteuid()}"
    link.symlink_to(homes / "elsewhere")
    with pytest.warns(RuntimeWarning, match="not a directory"):
        directory = build.cache_directory(create=True)
    assert directory != link
    assert list((homes / "elsewhere").iterdir()) == []
    shutil.rmtree(directory)


def test_a_file_in_place_of_the_directory(cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(errors.CacheError, match="HUMMING_CUTLASS_CACHE_DIR"):
        build.compile_kernels([kernel()])


def test_a_full_disk_leaves_nothing_half_written(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "_flush", full)
        with pytest.raises(errors.CacheError, match="No space left on device"):
            build.compile_kernels([kernel()])
    assert list((cache / "v1").glob("??/*")) == []
    assert build.compile_kernels([kernel()])["scale"].read_bytes() == expected_cubin(kernel())


# --- Failing compilers and bad arguments -----------------------------------------------------------------------------


def test_a_failing_compiler_shows_command_output_and_log(cache: Path, tmp_path: Path) -> None:
    fake_nvcc(tmp_path, error='scale.cu(1): error: identifier "x" is undefined')
    with pytest.raises(errors.CompileError) as caught:
        build.compile_kernels([kernel()])
    message = str(caught.value)
    assert message.startswith("kernel scale for sm_80: nvcc failed\ncommand: " + str(tmp_path / "bin" / "nvcc"))
    assert '\n  scale.cu(1): error: identifier "x" is undefined\n' in message
    assert "cmake_transform_depfile" not in message
    log = Path(message.rsplit("log: ", 1)[1])
    assert 'identifier "x" is undefined' in log.read_text()
    assert (log.parent / "kernel.cu").read_text() == kernel().text
    assert list((cache / "v1").glob("??/*")) == []
    assert list((cache / "v1" / "tmp").iterdir()) == []


def test_one_failure_does_not_cost_the_other_kernels(cache: Path, tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path)
    script = nvcc.read_text().replace("printf ", 'case "$src" in bad*) echo refused; exit 1;; esac\nprintf ', 1)
    nvcc.write_text(script)
    with pytest.raises(errors.CompileError, match=r"kernel bad1 [^$]*and 1 more: bad2"):
        build.compile_kernels([kernel("good"), kernel("bad1"), kernel("bad2")])
    before = len(compiled(tmp_path))
    assert build.compile_kernels([kernel("good")])["good"].read_bytes() == expected_cubin(kernel("good"))
    assert len(compiled(tmp_path)) == before


def test_a_compiler_that_writes_nothing_is_a_failure(cache: Path, tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path)
    nvcc.write_text(nvcc.read_text().replace("printf 'first", "exit 0\nprintf 'first"))
    with pytest.raises(errors.CompileError, match="kernel scale"):
        build.compile_kernels([kernel()])


def test_what_a_failing_compiler_leaves_is_not_kept(cache: Path, tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path)
    nvcc.write_text(nvcc.read_text() + "exit 3\n")
    with pytest.raises(errors.CompileError, match="kernel scale"):
        build.compile_kernels([kernel()])
    assert list((cache / "v1").glob("??/*")) == []


def test_the_compilers_own_temporary_files_go_where_they_are_swept(cache: Path, tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path)
    nvcc.write_text(nvcc.read_text() + 'echo "temporary files: $TMPDIR"\n')
    log = (build.compile_kernels([kernel()])["scale"].parent / "log.txt").read_text()
    assert f"temporary files: {cache}/v1/tmp/" in log


@pytest.mark.parametrize("name", ["", "a b", "a/b", "../a", "-o", ".hidden", "a;b", "x" * 201])
def test_names_that_are_no_file_names(name: str) -> None:
    with pytest.raises(errors.ArgumentError, match="name: got"):
        build.KernelSource(name, "", "sm_80")


@pytest.mark.parametrize("arch", ["", "80", "sm80", "sm_90b", "compute_80"])
def test_arch_is_checked(arch: str) -> None:
    with pytest.raises(errors.ArgumentError, match="arch: got"):
        build.KernelSource("name", "", arch)


def test_arguments_are_checked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.ArgumentError, match="two kernels named scale"):
        build.compile_kernels([kernel(), kernel(text="other")])
    with pytest.raises(errors.ArgumentError, match="jobs: got 0"):
        build.compile_kernels([kernel()], jobs=0)
    for name, value in [("NUM_JOBS", "many"), ("NUM_JOBS", "0"), ("DISABLE_JIT", "yes"), ("EXTRA_CUDA_FLAGS", "'")]:
        with monkeypatch.context() as patch:
            patch.setenv(f"HUMMING_CUTLASS_{name}", value)
            with pytest.raises(errors.ArgumentError, match=f"HUMMING_CUTLASS_{name}: got"):
                build.compile_kernels([kernel()])
    assert build.compile_kernels([]) == {}
    assert not cache.exists()


def test_names_with_dots_and_many_kernels_at_once(cache: Path) -> None:
    sources = [kernel(f"sm_80.v1.{index}", arch="sm_90a" if index % 2 else "sm_80") for index in range(5)]
    found = build.compile_kernels(sources, jobs=2)
    assert [found[source.name].read_bytes() for source in sources] == [expected_cubin(source) for source in sources]
    assert [build.kernel_info(found[source.name]).arch for source in sources] == [source.arch for source in sources]


def test_progress_goes_to_stderr_only_when_asked(cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    build.compile_kernels([kernel("quiet")])
    assert capfd.readouterr() == ("", "")
    build.compile_kernels([kernel("loud")], progress=True)
    output, error = capfd.readouterr()
    assert output == ""
    assert "Compiling kernels" in error
    assert "1/1" in error


# --- Ahead of time ---------------------------------------------------------------------------------------------------


def test_exported_kernels_need_no_compiler(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "ahead"
    exported = build.export_kernels([kernel("one"), kernel("two")], target)
    assert build.export_kernels([kernel("one")], target) == {"one": exported["one"]}
    for path in [target, *target.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    monkeypatch.setenv("CUDACXX", str(tmp_path / "nothing"))
    monkeypatch.setenv("HUMMING_CUTLASS_CACHE_DIR", str(tmp_path / "unused"))
    monkeypatch.setenv("HUMMING_CUTLASS_AOT_DIR", str(target))
    found = build.compile_kernels([kernel("one"), kernel("two")])
    assert found == exported
    assert found["one"].read_bytes() == expected_cubin(kernel("one"))
    assert not (tmp_path / "unused").exists()
    with pytest.raises(errors.ToolchainError):
        build.compile_kernels([kernel("three")])


def test_a_damaged_exported_kernel_is_compiled(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = build.export_kernels([kernel()], tmp_path / "ahead")["scale"]
    _truncate(exported.parent)
    monkeypatch.setenv("HUMMING_CUTLASS_AOT_DIR", str(tmp_path / "ahead"))
    with pytest.warns(RuntimeWarning, match="it is not used"):
        assert build.compile_kernels([kernel()])["scale"].is_relative_to(cache)


def test_a_wrong_aot_directory_is_an_error(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUMMING_CUTLASS_AOT_DIR", str(tmp_path / "nothing"))
    with pytest.raises(errors.CacheError, match="HUMMING_CUTLASS_AOT_DIR"):
        build.compile_kernels([kernel()])


def test_with_compiling_switched_off(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.compile_kernels([kernel("one")])
    monkeypatch.setenv("HUMMING_CUTLASS_DISABLE_JIT", "1")
    assert build.compile_kernels([kernel("one")]) == first
    with pytest.raises(errors.MissingKernelError, match="not compiled yet: two"):
        build.compile_kernels([kernel("one"), kernel("two")])
    assert compiled(tmp_path) == ["one.cu"]
    monkeypatch.setenv("CUDACXX", str(tmp_path / "nothing"))
    with pytest.raises(errors.MissingKernelError, match="not compiled yet: one"):
        build.compile_kernels([kernel("one")])
