"""Streams, devices, graphs, threads and processes on a GPU, with the kernels of ordinary calls."""

from __future__ import annotations

import functools
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("humming_cutlass._C", reason="the extension is not built")

import gpu_scenarios  # noqa: E402
from gpu_tools import bounds, workspace_choice  # noqa: E402
from humming_cutlass import _C, build, emitter, ops, planner, support, testing  # noqa: E402
from humming_cutlass.errors import ArgumentError, ArgumentTypeError  # noqa: E402
from humming_cutlass.layer import HummingLayer  # noqa: E402
from processes import run_script  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compile,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

# One format for all tests here: the planner's kernels and one that sums in the workspace are compiled.
N, K = 512, 4096
TYPES = testing.make_types("int4", k=K, element_a="bfloat16", group_size=128)
FIFTY_MS_CYCLES = 100_000_000  # at 2 GHz


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    device = ops.planner_device(0)
    ops.prepare([*planner.schedules(TYPES, device), _split().config, *gpu_scenarios.kernels(device)])
    _problem(1)  # and the kernel that packs
    with bounds():
        yield


def _problem(m: int, *, seed: int = 0, device: str = "cuda", n: int = N, k: int = K) -> testing.Problem:
    return testing.random_problem(TYPES, m, n, k, device=device, seed=seed)


@functools.cache
def _split() -> planner.Choice:
    """A kernel that splits k and sums in its stream's workspace; the planner may have none for these shapes."""
    return workspace_choice(TYPES, 1, N, K, ops.planner_device(0))


def _gemm_split(a: torch.Tensor, weight: Any, **options: Any) -> torch.Tensor:
    split = _split()
    result: torch.Tensor = ops.gemm(a, weight, config=split.config, split_k=split.split_k, **options)
    return result


@pytest.mark.parametrize("name", ["two_streams", "fork"], ids=["g1_two_streams_share_a_weight", "g7_fork_before_use"])
def test_scenario(name: str) -> None:
    """In a process of its own, which may hang and, since all kernels are there, compiles nothing.

    Numbers of threads of libraries do not matter here, and a pool of them is what a fork may not have.
    """
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    script = pathlib.Path(__file__).with_name("gpu_scenarios.py")
    print(run_script(str(script), name, HUMMING_CUTLASS_DISABLE_JIT="1", **one))


# --- Streams ---


def _late(stream: Any, a: torch.Tensor, fresh: torch.Tensor, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Writes `a` on a stream behind a kernel of 50 ms, calls at once, and returns the result."""
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        call()  # what has to be made for the stream is made
        torch.cuda._sleep(FIFTY_MS_CYCLES)
        a.copy_(fresh)
        result = call()
    assert not stream.query(), "the call waited for the GPU"
    stream.synchronize()
    return result


def test_results_are_kept_for_a_recorded_stream() -> None:
    """A result that another stream still reads must not be given to the next call, on the short way either."""
    problem = _problem(1)
    side = torch.cuda.Stream()
    for _ in range(2):  # the second call is a launch and nothing more
        result = ops.gemm(problem.a, problem.packed)
    expected = result.clone()
    copy = torch.empty_like(result)  # here, since what is allocated for the first time may wait for the GPU
    zeros = torch.zeros_like(problem.a)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10 * FIFTY_MS_CYCLES)
        copy.copy_(result)
    address = result.data_ptr()
    result.record_stream(side)
    del result
    later = [ops.gemm(zeros, problem.packed) for _ in range(8)]
    assert not side.query(), "too late to tell"
    assert address not in [x.data_ptr() for x in later]
    torch.cuda.synchronize()
    testing.check_equal(copy, expected)


def test_layers_on_a_device_that_is_not_current() -> None:
    """The result is made where the weight is, not on the current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    problem = _problem(1, device="cuda:1")
    results = [ops.gemm(problem.a, problem.packed) for _ in range(3)]
    with torch.cuda.device(1):
        results += [ops.gemm(problem.a, problem.packed) for _ in range(2)]
    assert [x.device.index for x in results] == [1] * 5
    for x in results[1:]:
        testing.check_equal(x, results[0])


@pytest.mark.parametrize("m", [1, 64, 300])
def test_g3b_the_call_is_on_the_current_stream(m: int) -> None:
    """A launch on any other stream would read the activations before they are written."""
    problem = _problem(m)
    weight = problem.packed
    expected = ops.gemm(problem.a, weight)
    problem.check(expected)
    a, out = torch.zeros_like(problem.a), torch.empty_like(expected)
    ops.gemm(a, weight)  # the launch of this shape is remembered
    # The handle of the per-thread default stream is the number 2, by definition.
    for stream in (torch.cuda.Stream(), torch.cuda.ExternalStream(2)):
        for call in (lambda: ops.gemm(a, weight), lambda: ops.gemm(a, weight, out=out)):
            testing.check_equal(_late(stream, a.zero_(), problem.a, call), expected)


def _threads(*work: Callable[[], None]) -> None:
    errors: list[BaseException] = []
    ready = threading.Barrier(len(work))

    def guarded(one: Callable[[], None]) -> None:
        try:
            ready.wait(timeout=60)
            one()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in work]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("per_thread_default", [False, True], ids=["streams", "per-thread-default-streams"])
def test_g1_two_threads_share_a_weight(per_thread_default: bool) -> None:
    """Both streams of the second case have the same handle, but are two: split k must not share its memory."""
    problem = _problem(2)
    weight = problem.packed
    wrong = torch.zeros(2, 1, N, dtype=torch.bool, device="cuda")
    inputs = [problem.a[row : row + 1].clone() for row in range(2)]
    expected = [_gemm_split(a, weight) for a in inputs]
    # Nothing is allocated by the threads: torch's allocator takes equal handles for one stream, too.
    outputs, flags = [torch.empty_like(x) for x in expected], [torch.empty_like(x, dtype=torch.bool) for x in expected]
    torch.cuda.synchronize()

    def work(index: int) -> Callable[[], None]:
        def loop() -> None:
            stream = torch.cuda.ExternalStream(2) if per_thread_default else torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(2000):
                    _gemm_split(inputs[index], weight, out=outputs[index])
                    torch.ne(outputs[index], expected[index], out=flags[index])
                    wrong[index].logical_or_(flags[index])
            stream.synchronize()

        return loop

    _threads(work(0), work(1))
    torch.cuda.synchronize()
    assert not bool(wrong.any())


# --- Devices ---


def _needs_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if ops.planner_device(0) != ops.planner_device(1):
        pytest.skip("needs two GPUs of one kind")


def test_g3_devices_alternate_in_one_thread() -> None:
    """The current device is 0 throughout, as the tensors' device changes from call to call."""
    _needs_two_devices()
    problems = [_problem(17, device=f"cuda:{index}", seed=index) for index in range(2)]
    for _ in range(3):
        for index, problem in enumerate(problems):
            y = ops.gemm(problem.a, problem.packed)
            assert y.device == problem.a.device
            assert torch.cuda.current_device() == 0
            problem.check(y)
            other = problems[1 - index]
            with pytest.raises(ArgumentError, match=f"a: got .*cuda:{index}"):
                ops.gemm(problem.a, other.packed)
    with torch.cuda.device(1):
        problems[0].check(ops.gemm(problems[0].a, problems[0].packed))
        assert torch.cuda.current_device() == 1


def test_g3_devices_in_two_threads() -> None:
    _needs_two_devices()
    problems = [_problem(1, device=f"cuda:{index}", seed=index) for index in range(2)]
    expected = [ops.gemm(problem.a, problem.packed) for problem in problems]

    def work(index: int) -> Callable[[], None]:
        def loop() -> None:
            problem = problems[index]
            for _ in range(500):
                testing.check_equal(ops.gemm(problem.a, problem.packed), expected[index])

        return loop

    _threads(work(0), work(1))


def test_g3_a_layer_moves_between_devices() -> None:
    _needs_two_devices()
    layer = HummingLayer(N, K, {"dtype": "int4", "group_size": 128}, torch_dtype=torch.bfloat16).cuda(0)
    layer.load_from_unquantized(torch.randn(N, K))
    layer.transform(progress=False)
    x = torch.randn(5, K, dtype=torch.bfloat16)
    first = layer(x.cuda(0)).cpu()
    testing.check_equal(layer.cuda(1)(x.cuda(1)).cpu(), first)
    testing.check_equal(layer.cuda(0)(x.cuda(0)).cpu(), first)


# --- Graphs ---


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("m", [1, 64])
def test_g5_g6_a_first_call_is_captured(mode: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel load, launch plan, tensor imports and workspace of split k, all for the first time, in a capture."""
    monkeypatch.setattr(ops, "_kernels", {})
    problem = _problem(m, seed=1)
    weight, a = problem.packed, problem.a.clone()
    out = torch.empty(m, N, dtype=a.dtype, device="cuda")
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        first = ops.gemm(a, weight)
        again = ops.gemm(a, weight)  # by the plan that the first one left
        ops.gemm(a, weight, out=out)
        split = _gemm_split(a, weight)
    problem.check(_gemm_split(problem.a, weight))
    for seed in range(3):
        fresh = _problem(m, seed=seed).a
        a.copy_(fresh)
        for result in (first, again, out, split):
            result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = ops.gemm(fresh, weight)
        for result in (first, again, out):
            testing.check_equal(result, expected)
        testing.check_equal(split, _gemm_split(fresh, weight))
    problem.check(ops.gemm(problem.a, weight))


def test_g5_a_layers_first_call_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_kernels", {})
    layer = HummingLayer(N, K, {"dtype": "int4", "group_size": 128}, torch_dtype=torch.bfloat16).cuda()
    layer.load_from_unquantized(torch.randn(N, K))
    layer.transform(progress=False)
    x = torch.randn(3, K, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    testing.check_equal(y, layer(x))


def test_g5_an_error_in_a_capture_leaves_the_stream_usable() -> None:
    problem = _problem(4)
    stream = torch.cuda.Stream()

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
            ops.gemm(problem.a, problem.packed)
            ops.gemm(problem.a.float(), problem.packed)

    with pytest.raises(ArgumentTypeError, match=r"a: got (dtype )?float32"):
        capture()
    with torch.cuda.stream(stream):
        y = ops.gemm(problem.a, problem.packed)
    stream.synchronize()
    problem.check(y)


def test_graphs_replay_beside_eager_calls() -> None:
    """A graph of split-k launches on one stream, eager ones on another: neither touches the other's partial sums."""
    problem = _problem(2)
    weight = problem.packed
    left, right = (problem.a[row : row + 1].clone() for row in range(2))
    expected = [_gemm_split(a, weight) for a in (left, right)]
    graph, capture, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.Stream()
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=capture):
        for _ in range(100):
            wrong[0] += (_gemm_split(left, weight) != expected[0]).any()
    for _ in range(20):
        with torch.cuda.stream(capture):
            graph.replay()
        for _ in range(50):
            with torch.cuda.stream(side):
                wrong[1] += (_gemm_split(right, weight) != expected[1]).any()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


# --- Limits, determinism, host time ---


@pytest.mark.parametrize("dtype", ["int4", "uint8", "float6_e3m2"])
@pytest.mark.parametrize("group_size", [-1, 16, 128])
def test_g11_every_kernel_fits_the_device(dtype: str, group_size: int) -> None:
    """What the planner can choose asks for no more shared memory than this GPU grants."""
    limit = _C.device_properties(0)["smem_per_block_optin"]
    types = testing.make_types(dtype, k=K, element_a="bfloat16", group_size=group_size)
    for mainloops in (None, (support.SM80,)):
        for config in planner.schedules(types, ops.planner_device(0), mainloops=mainloops):
            assert support.smem_bytes(config) <= limit, config.name


def test_g11_kernels_take_what_support_says() -> None:
    """`support.check` computes the shared memory of a kernel; the kernel's traits state it."""
    configs = planner.schedules(TYPES, ops.planner_device(0))
    sources = [emitter.emit(config) for config in configs]
    paths = build.compile_kernels(sources, progress=False)
    for config, source in zip(configs, sources, strict=True):
        traits = _C.Kernel(str(paths[source.name]), "humming_cutlass_gemm").traits(0)
        assert traits["smem_bytes"] == support.smem_bytes(config), config.name


@pytest.mark.parametrize("m", [1, 3, 16, 64, 257, 1024])
def test_h1_the_same_bits_every_time(m: int) -> None:
    """100 calls in a row while other work disturbs their timing."""
    problem = _problem(m)
    expected = ops.gemm(problem.a, problem.packed)
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    noise = torch.randn(2048, 2048, dtype=torch.bfloat16, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for index in range(100):
        if index % 4 == 0:
            with torch.cuda.stream(side):
                torch.matmul(noise, noise)
        wrong += (ops.gemm(problem.a, problem.packed) != expected).any()
    torch.cuda.synchronize()
    assert int(wrong) == 0
    problem.check(expected)


def test_h1_every_kernel_and_split_is_deterministic() -> None:
    device = ops.planner_device(0)
    for config in [*planner.schedules(TYPES, device), _split().config]:
        tile_m, _, tile_k = config.schedule.tile_shape
        problem = _problem(tile_m if config.schedule.mainloop == support.SM90_DECODE else 16)
        for split_k in (1, 2, 3, 4):
            if split_k > -(-K // tile_k):
                continue
            results = [ops.gemm(problem.a, problem.packed, config=config, split_k=split_k) for _ in range(10)]
            for result in results[1:]:
                testing.check_equal(result, results[0])
            problem.check(results[0])


HOST_MICROSECONDS = 12.0
"""Far above what a call takes on an idle machine, far below what a second import of the weight or a sync would."""


def test_k7_host_time(record_property: Callable[[str, object], None], capsys: pytest.CaptureFixture[str]) -> None:
    """m = 1, n = k = 256: what a call of a layer costs the host, the new output included."""
    layer = HummingLayer(256, 256, {"dtype": "int4", "group_size": 128}, torch_dtype=torch.bfloat16).cuda()
    layer.load_from_unquantized(torch.randn(256, 256))
    layer.transform(progress=False)
    x = torch.randn(1, 256, dtype=torch.bfloat16, device="cuda")
    measured = {}
    for name, call in {"layer": lambda: layer(x), "ops.gemm": lambda: ops.gemm(x, layer._packed)}.items():
        with torch.no_grad():
            for _ in range(100):
                call()
            batches = []
            for _ in range(20):
                torch.cuda.synchronize()  # so that the queue of launches never fills
                start = time.perf_counter()
                for _ in range(200):
                    call()
                batches.append((time.perf_counter() - start) / 200 * 1e6)
        torch.cuda.synchronize()
        measured[name] = min(batches)
        record_property(f"host microseconds of {name}", round(measured[name], 2))
    with capsys.disabled():
        print(f"\nhost time a call, m=1, n=k=256: {', '.join(f'{k} {v:.2f} µs' for k, v in measured.items())}")
    assert max(measured.values()) <= HOST_MICROSECONDS, (measured, os.getloadavg())
