"""The runtime on a GPU, driven by small kernels that follow the contract of device/arguments.hpp."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from build_tools import traits_version

torch = pytest.importorskip("torch")
pytest.importorskip("humming_cutlass._C", reason="the extension is not built")

from humming_cutlass import _C, build  # noqa: E402
from humming_cutlass.errors import ArgumentError, ArgumentTypeError, LaunchError  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.compile,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

N, K, GROUPS = 72, 200, 4
SPLITS = 4  # tiles along K

# The weight of these kernels is 4-bit unsigned, eight to a word in order of k, rows of an atom in order: the plainest
# layout that fits the packed tensors' shapes. Partial sums go through the workspace; the last CTA of a tile adds them
# up and puts the counter back to zero.
SOURCE = """
#include <cuda_fp16.h>

#include "humming_cutlass/device/arguments.hpp"

using namespace humming_cutlass;

constexpr int kTileM = 16, kTileN = 32, kTileK = 64, kThreads = 128;

extern "C" __constant__ KernelTraits const humming_cutlass_traits = {
    kKernelTraitsVersion, kThreads, SMEM, kTileM, kTileN, kTileK, CLUSTER, 0, PERSISTENT, 0, 0, BOX};

__device__ float weight(GemmArguments const& g, int n, int k) {
  int const atom = (n / 16) * ((g.k + 63) / 64) + k / 64;
  unsigned const word = static_cast<unsigned const*>(g.ptr_b)[atom * 128 + (n % 16) * 8 + (k % 64) / 8];
  int const size = (g.k + g.groups - 1) / g.groups;
  half const scale = static_cast<half const*>(g.ptr_scale)[((n / 16) * g.groups + k / size) * 16 + n % 16];
  return float(word >> (4 * (k % 8)) & 15) * __half2float(scale);
}

__device__ void store(GemmArguments const& g, int m, int n, float sum) {
  if (m < g.m && n < g.n) {
    sum = sum * (g.ptr_global_scale ? *g.ptr_global_scale : 1.0f) + (g.ptr_bias ? g.ptr_bias[n] : 0.0f);
    static_cast<half*>(g.ptr_d)[m * g.stride_d + n] = __float2half(sum);
  }
}

#if BOX
extern "C" __global__ void __launch_bounds__(kThreads)
    humming_cutlass_gemm(GemmArguments const g, TensorMaps const __grid_constant__ maps) {
#else
extern "C" __global__ void __launch_bounds__(kThreads) humming_cutlass_gemm(GemmArguments const g) {
#endif
  extern __shared__ __align__(1024) unsigned char shared[];
  __shared__ int last;
  int const tiles_n = (g.n + kTileN - 1) / kTileN;
  int const tiles = tiles_n * ((g.m + kTileM - 1) / kTileM);
  int const k_tiles = (g.k + kTileK - 1) / kTileK;
#if BOX
  __shared__ __align__(8) unsigned long long barrier;
  unsigned const barrier_address = unsigned(__cvta_generic_to_shared(&barrier));
  unsigned const shared_address = unsigned(__cvta_generic_to_shared(shared));
  unsigned phase = 0;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_address));
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
#endif
  for (int work = blockIdx.x; work < tiles * g.split_k; work += gridDim.x) {
    int const tile = work / g.split_k;
    int const split = work % g.split_k;
    int const m0 = tile / tiles_n * kTileM;
    int const n0 = tile % tiles_n * kTileN;
    float sums[kTileM * kTileN / kThreads] = {};
    for (int k_tile = split; k_tile < k_tiles; k_tile += g.split_k) {
#if BOX
      if (threadIdx.x == 0) {
        int const rows = g.m - m0 < BOX ? g.m - m0 : BOX;
        TensorMap const* const map = rows == BOX ? &maps.a : &maps.a_rest;  // the last rows have one of their own
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_address), "r"(rows * 128));
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3}], [%4];"
            ::"r"(shared_address), "l"(map), "r"(k_tile * kTileK), "r"(m0), "r"(barrier_address) : "memory");
      }
      unsigned done = 0;
      while (done == 0) {
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done) : "r"(barrier_address), "r"(phase) : "memory");
      }
      phase ^= 1;
#endif
      for (int i = 0; i < kTileM * kTileN / kThreads; ++i) {
        int const element = i * kThreads + threadIdx.x;
        int const m = element / kTileN;
        int const n = element % kTileN;
        for (int k = 0; k < kTileK && k_tile * kTileK + k < g.k; ++k) {
          if (m0 + m >= g.m || n0 + n >= g.n) {
            break;
          }
#if BOX
          half const a = *reinterpret_cast<half const*>(shared + m * 128 + ((k / 8) ^ (m % 8)) * 16 + k % 8 * 2);
#else
          half const a = static_cast<half const*>(g.ptr_a)[(m0 + m) * g.stride_a + k_tile * kTileK + k];
#endif
          sums[i] += __half2float(a) * weight(g, n0 + n, k_tile * kTileK + k);
        }
      }
      __syncthreads();
    }
    if (g.split_k == 1) {
      for (int i = 0; i < kTileM * kTileN / kThreads; ++i) {
        int const element = i * kThreads + threadIdx.x;
        store(g, m0 + element / kTileN, n0 + element % kTileN, sums[i]);
      }
      continue;
    }
    float* const partial = g.ptr_partial + (int64_t(split) * tiles + tile) * kTileM * kTileN;
    for (int i = 0; i < kTileM * kTileN / kThreads; ++i) {
      partial[i * kThreads + threadIdx.x] = sums[i];
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      last = atomicAdd(g.ptr_counter + tile, 1u) == unsigned(g.split_k - 1);
    }
    __syncthreads();
    if (last) {
      __threadfence();
      for (int i = 0; i < kTileM * kTileN / kThreads; ++i) {
        int const element = i * kThreads + threadIdx.x;
        float sum = 0;
        for (int s = 0; s < g.split_k; ++s) {
          sum += __ldcg(g.ptr_partial + (int64_t(s) * tiles + tile) * kTileM * kTileN + element);
        }
        store(g, m0 + element / kTileN, n0 + element % kTileN, sum);
      }
      if (threadIdx.x == 0) {
        g.ptr_counter[tile] = 0;
      }
    }
    __syncthreads();
  }
}
"""


def source(name: str, arch: str, **traits: int) -> build.KernelSource:
    values = {"SMEM": 0, "CLUSTER": 1, "PERSISTENT": 0, "BOX": 0, **traits}
    defines = "".join(f"#define {key} {value}\n" for key, value in values.items())
    return build.KernelSource(name=f"runtime_test_{name}", text=defines + SOURCE, arch=arch)


def sources(major: int, minor: int) -> dict[str, build.KernelSource]:
    """The kernels of this file for a GPU."""
    arch = f"sm_{major}{minor}"
    found = {
        "plain": source("plain", arch),
        "persistent": source("persistent", arch, PERSISTENT=1, SMEM=60000),
        "greedy": source("greedy", arch, SMEM=1 << 20),
    }
    if major >= 9:
        found["cluster"] = source("cluster", arch, CLUSTER=2)
        found["walking_cluster"] = source("walking_cluster", arch, CLUSTER=2, PERSISTENT=1)
        found["tensor_map"] = source("tensor_map", arch, BOX=16, SMEM=4096)
    return found


@pytest.fixture(scope="module")
def paths() -> dict[str, str]:
    wanted = sources(*torch.cuda.get_device_capability(0))
    compiled = build.compile_kernels(list(wanted.values()), progress=False)
    return {key: str(compiled[value.name]) for key, value in wanted.items()}


class Weight:
    """A random weight, its packed tensors and its float64 values."""

    def __init__(self, device: int = 0) -> None:
        generator = torch.Generator().manual_seed(1)
        atoms_n, atoms_k = (N + 15) // 16, (K + 63) // 64
        codes = torch.randint(0, 16, (atoms_n * 16, atoms_k * 64), generator=generator)
        shifts = torch.arange(8) * 4
        words = (codes.reshape(-1, atoms_k * 8, 8) << shifts).sum(-1)
        words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
        packed = words.reshape(atoms_n, 16, atoms_k, 8).permute(0, 2, 1, 3).reshape(atoms_n, atoms_k, 128)
        scale = torch.rand(atoms_n, GROUPS, 16, generator=generator).to(torch.float16)
        per_row = scale.permute(0, 2, 1).reshape(-1, GROUPS)[:N].double()
        self.values = codes[:N, :K].double() * per_row.repeat_interleave(K // GROUPS, 1)
        self.bias = torch.randn(N, generator=generator)
        self.b = packed.contiguous().cuda(device)
        self.scale = scale.cuda(device)

    def plan(self, kernel: _C.Kernel, **options: Any) -> _C.GemmPlan:
        return _C.GemmPlan(
            kernel,
            n=N,
            k=K,
            groups=GROUPS,
            element_a="float16",
            element_d="float16",
            b=self.b,
            scale=self.scale,
            **options,
        )

    def check(self, a: Any, d: Any) -> None:
        expected = a.detach().double().cpu() @ self.values.T
        error = (d.double().cpu() - expected).abs().max().item()
        assert error <= 2e-3 * expected.abs().max().item(), error


@pytest.fixture(scope="module")
def weight() -> Weight:
    return Weight()


@pytest.fixture
def plan(paths: dict[str, str], weight: Weight) -> _C.GemmPlan:
    """A plan whose kernel is not loaded yet."""
    return weight.plan(_C.Kernel(paths["plain"], "humming_cutlass_gemm"))


def activations(m: int, seed: int = 0) -> Any:
    return torch.randn(m, K, generator=torch.Generator().manual_seed(seed)).to(torch.float16).cuda()


def empty(m: int) -> Any:
    return torch.full((m, N), float("nan"), dtype=torch.float16, device="cuda")


def current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def test_device_properties() -> None:
    expected = torch.cuda.get_device_properties(0)
    found = _C.device_properties(0)
    assert (found["name"], found["major"], found["minor"]) == (expected.name, expected.major, expected.minor)
    assert found["sm_count"] == expected.multi_processor_count
    assert found["total_memory"] == pytest.approx(expected.total_memory, rel=0.05)
    assert found["l2_bytes"] == expected.L2_cache_size
    with pytest.raises(ArgumentError, match=f"device: got {torch.cuda.device_count()}; allowed: 0"):
        _C.device_properties(torch.cuda.device_count())


def test_traits(paths: dict[str, str]) -> None:
    traits = _C.Kernel(paths["persistent"], "humming_cutlass_gemm").traits(0)
    assert traits == {
        "version": traits_version(),
        "threads": 128,
        "smem_bytes": 60000,
        "tile_m": 16,
        "tile_n": 32,
        "tile_k": 64,
        "cluster_size": 1,
        "cluster_split_k": 0,
        "persistent": 1,
        "max_m": 0,
        "dependent_launch": 0,
        "box_m": 0,
        "slab_atoms": 0,
        "box_n": 0,
        "box_b": 0,
        "box_scale": 0,
        "box_zero": 0,
    }


def test_refused_kernels(paths: dict[str, str], tmp_path: Any) -> None:
    with pytest.raises(LaunchError, match="smem_bytes: got 1048576 bytes"):
        _C.Kernel(paths["greedy"], "humming_cutlass_gemm").traits(0)
    with pytest.raises(LaunchError, match="entry: got 'nothing'"):
        _C.Kernel(paths["plain"], "nothing").traits(0)
    junk = tmp_path / "junk.cubin"
    junk.write_bytes(bytes(4096))
    with pytest.raises(LaunchError, match=r"junk\.cubin"):
        _C.Kernel(str(junk), "humming_cutlass_gemm").traits(0)


@pytest.mark.parametrize("name", ["plain", "persistent", "cluster", "walking_cluster", "tensor_map"])
@pytest.mark.parametrize("split_k", [1, 3, SPLITS])
@pytest.mark.parametrize("m", [1, 33, 3000])
def test_result(paths: dict[str, str], weight: Weight, name: str, split_k: int, m: int) -> None:
    if name not in paths:
        pytest.skip("needs compute capability 9.0")
    a, d = activations(m), empty(m)
    bound = weight.plan(_C.Kernel(paths[name], "humming_cutlass_gemm"))
    for _ in range(2):  # the second finds the counters as the first left them
        d.fill_(float("nan"))
        bound.run(a, d, current_stream(), split_k)
        weight.check(a, d)


def test_bias_and_global_scale(paths: dict[str, str], weight: Weight) -> None:
    factor = torch.full((1,), 0.5, device="cuda")
    bias = weight.bias.cuda()
    bound = weight.plan(_C.Kernel(paths["plain"], "humming_cutlass_gemm"), bias=bias, global_scale=factor)
    a = activations(5)
    weight.check(a, (bound.call(a).double() - bias) * 2)


@pytest.mark.parametrize("name", ["plain", "tensor_map"])
def test_strided(paths: dict[str, str], weight: Weight, name: str) -> None:
    """Rows that are further apart than they are long, and memory beside them that must stay."""
    if name not in paths:
        pytest.skip("needs compute capability 9.0")
    bound = weight.plan(_C.Kernel(paths[name], "humming_cutlass_gemm"))
    wide_a = activations(33).repeat(1, 2)
    wide_a[:, :8] = float("nan")
    wide_d = torch.full((33, 2 * N), 7.0, dtype=torch.float16, device="cuda")
    a = wide_a[:, 8 : 8 + K]
    bound.run(a, wide_d[:, :N], current_stream(), 1)
    weight.check(a, wide_d[:, :N])
    assert (wide_d[:, N:] == 7).all()


def test_tensor_map_needs_alignment(paths: dict[str, str], weight: Weight) -> None:
    if "tensor_map" not in paths:
        pytest.skip("needs compute capability 9.0")
    bound = weight.plan(_C.Kernel(paths["tensor_map"], "humming_cutlass_gemm"))
    wide = torch.zeros(4, K + 9, dtype=torch.float16, device="cuda")
    with pytest.raises(ArgumentError, match="a: got a data pointer that is not 16-byte aligned"):
        bound.call(wide[:, 1 : K + 1])
    with pytest.raises(ArgumentError, match="a: got a row stride of 209 elements"):
        bound.call(wide[:, :K])


def test_no_rows(plan: _C.GemmPlan) -> None:
    plan.run(activations(0), empty(0), current_stream(), 1)
    assert tuple(plan.call(activations(0)).shape) == (0, N)


def test_call(plan: _C.GemmPlan, weight: Weight) -> None:
    a = activations(6)
    d = plan.call(a.requires_grad_())
    assert (d.shape, d.dtype, d.device, d.is_contiguous()) == ((6, N), torch.float16, a.device, True)
    weight.check(a, d)
    folded = plan.call(torch.nn.Parameter(a.detach().reshape(2, 3, K)), 2)
    assert folded.shape == (2, 3, N)
    weight.check(a, folded.reshape(6, N))


def test_refused_tensors(plan: _C.GemmPlan) -> None:
    a, d = activations(4), empty(4)
    with pytest.raises(ArgumentError, match="a: got a tensor on the CPU"):
        plan.run(a.cpu(), d, 0, 1)
    with pytest.raises(ArgumentTypeError, match="a: got bfloat16; allowed: float16"):
        plan.run(a.bfloat16(), d, 0, 1)
    with pytest.raises(ArgumentError, match="a: got inner stride 4"):
        plan.run(a.t().contiguous().t(), d, 0, 1)
    with pytest.raises(ArgumentError, match="d: got 3 rows; allowed: 4 rows"):
        plan.run(a, d[:3], 0, 1)
    with pytest.raises(ArgumentError, match="split_k: got 5; allowed: 1 to 4"):
        plan.run(a, d, 0, 5)


@pytest.mark.parametrize("split_k", [1, 3])
def test_streams(plan: _C.GemmPlan, weight: Weight, split_k: int) -> None:
    """Launches on several streams overlap and do not mix; `call` follows torch's current stream."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [activations(500, seed) for seed in range(4)]
    outputs: list[list[Any]] = [[] for _ in streams]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, a, kept in zip(streams, inputs, outputs, strict=True):
            with torch.cuda.stream(stream):
                kept.append(plan.call(a, split_k))
    torch.cuda.synchronize()
    for a, kept in zip(inputs, outputs, strict=True):
        for d in kept:
            weight.check(a, d)


def test_call_is_ordered_on_the_current_stream(plan: _C.GemmPlan, weight: Weight) -> None:
    """The input is written late on a side stream: a launch on any other stream would read the old values."""
    a = torch.zeros(33, K, dtype=torch.float16, device="cuda")
    fresh = activations(33)
    plan.call(a)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        a.copy_(fresh)
        d = plan.call(a, 2)
    side.synchronize()
    weight.check(fresh, d)


def in_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_new_thread(plan: _C.GemmPlan, weight: Weight) -> None:
    """The first launch of all in a thread that has no CUDA context."""
    a, d = activations(33), empty(33)
    torch.cuda.synchronize()
    in_thread(lambda: plan.run(a, d, 0, 2))
    torch.cuda.synchronize()
    weight.check(a, d)


@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_graph_without_warm_up(plan: _C.GemmPlan, weight: Weight, split_k: int, mode: str) -> None:
    """Module load and workspace are made while the stream is being captured; the graph is replayed many times."""
    a = activations(33)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # a new one, so that it has no workspace yet
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        d = plan.call(a, split_k)
    for seed in range(3):
        a.copy_(activations(33, seed + 10))
        d.fill_(float("nan"))
        graph.replay()
        weight.check(a, d)
    # Growing the stream's workspace must leave the graph's alone.
    with torch.cuda.stream(stream):
        large = activations(20000)
        weight.check(large, plan.call(large, SPLITS))
    stream.synchronize()
    graph.replay()
    weight.check(a, d)


def test_second_device(paths: dict[str, str]) -> None:
    """The launch goes to the tensors' device, whichever is current; the current one stays."""
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability(1) != torch.cuda.get_device_capability(0):
        pytest.skip("needs two GPUs of one kind")
    kernel = _C.Kernel(paths["plain"], "humming_cutlass_gemm")
    for device in (0, 1):
        weight = Weight(device)
        bound = weight.plan(kernel)
        a = activations(33).to(f"cuda:{device}")
        d = bound.call(a, 2)
        assert d.device == a.device
        assert torch.cuda.current_device() == 0
        weight.check(a, d)
        with pytest.raises(ArgumentError, match=f"a: got a tensor on cuda:{1 - device}; allowed: cuda:{device}"):
            bound.call(a.to(f"cuda:{1 - device}"))
