"""Scenarios of test_runtime_cpu.py: each runs in a process of its own, on the driver of runtime_fake_driver.cpp.

Usage: python runtime_scenarios.py FAKE_LIBRARY NAME
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import pathlib
import struct
import sys
import tempfile
import threading
from typing import ClassVar

import numpy as np
import pytest

from build_tools import traits_version
from humming_cutlass import _C, support
from humming_cutlass.config import MAX_EXTENT, ScheduleConfig
from humming_cutlass.errors import ArgumentError, ArgumentTypeError, LaunchError

N, K, GROUPS = 48, 200, 4  # 3 atoms along n, 4 along k
FLOAT16, BFLOAT16, FLOAT32, INT32, UINT8 = (2, 16), (4, 16), (2, 32), (0, 32), (1, 8)


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
callbacks: list[object] = []


class Legacy(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class FakeTensor:
    """A DLPack exporter that claims its host memory to be a GPU's."""

    exported: ClassVar[dict[int, tuple[object, ...]]] = {}  # what was handed out and not yet deleted, by its address

    def __init__(self, shape, element, *, strides=None, device=(2, 0), offset=0, versioned=True, flags=0, null=False):
        if strides is None:
            strides = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
        self.shape, self.strides, self.element, self.device = tuple(shape), tuple(strides), element, device
        self.versioned, self.flags = versioned, flags
        span = 1 + sum(max(e - 1, 0) * abs(s) for e, s in zip(shape, strides, strict=True))
        memory = np.zeros(span * element[1] // 8 + 64, np.uint8)
        self.memory = memory
        self.base = (memory.ctypes.data + 15) // 16 * 16
        self.offset, self.null = offset, null

    @property
    def pointer(self):
        return self.base + self.offset

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **options):
        assert stream == -1, "the runtime must ask for no synchronization"
        if not self.versioned and options:
            raise TypeError("unexpected keyword argument 'max_version'")
        ndim = len(self.shape)
        tensor = DLTensor(
            None if self.null else self.base,
            *self.device,
            ndim,
            *self.element,
            1,
            (ctypes.c_int64 * ndim)(*self.shape),
            (ctypes.c_int64 * ndim)(*self.strides),
            self.offset,
        )

        # A ctypes callback must outlive its own call, so only what it stood for goes.
        def delete(address):
            FakeTensor.exported.pop(address)

        deleter = DELETER(delete)
        managed = (
            Versioned(1, 0, None, deleter, self.flags, tensor) if self.versioned else Legacy(tensor, None, deleter)
        )
        callbacks.append(deleter)
        FakeTensor.exported[ctypes.addressof(managed)] = (managed, self.memory)
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return new_capsule(ctypes.addressof(managed), name, None)


class Arguments(ctypes.Structure):
    _fields_ = (
        ("b", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("share", "more", "m", "n", "k", "split_k")),
        *((name, ctypes.c_int32) for name in ("slab_atoms", "short_slab_warp", "box_bytes_a", "groups")),
        *((name, ctypes.c_uint64) for name in ("scale", "zero", "a")),
        ("stride_a", ctypes.c_int64),
        ("d", ctypes.c_uint64),
        ("stride_d", ctypes.c_int64),
        *((name, ctypes.c_uint64) for name in ("global_scale", "bias", "partial", "counter")),
    )


class Launch(ctypes.Structure):
    _fields_ = (
        ("arguments", Arguments),
        *((name, ctypes.c_uint32) for name in ("grid", "block", "shared_memory", "cluster", "dependent")),
        ("stream", ctypes.c_uint64),
        ("context", ctypes.c_uint64),
        ("has_map", ctypes.c_int32),
    )


class Map(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("address", "extent0", "extent1", "stride", "extent2", "stride2")),
        *((name, ctypes.c_uint32) for name in ("box0", "box1", "box2")),
        *((name, ctypes.c_int32) for name in ("type", "swizzle")),
    )


fake: ctypes.PyDLL
folder = pathlib.Path(tempfile.mkdtemp())


def shares_of_last_launch() -> tuple[int, int, int]:
    arguments = last_launch().arguments
    return arguments.share, arguments.more, arguments.slab_atoms


def last_launch() -> Launch:
    launch = Launch()
    fake.fake_launch(fake.fake_launches() - 1, ctypes.byref(launch))
    return launch


def last_map() -> Map:
    result = Map()
    fake.fake_map(ctypes.byref(result))
    return result


def map_back(back: int) -> Map:
    """Returns the tensor map that was encoded `back` before the last one."""
    result = Map()
    fake.fake_map_back(ctypes.byref(result), back)
    return result


def cubin(**changes) -> str:
    traits = {
        "version": traits_version(),
        "threads": 128,
        "smem_bytes": 1024,
        "tile_m": 16,
        "tile_n": 32,
        "tile_k": 64,
        "cluster_size": 1,
        "cluster_split_k": 0,
        "persistent": 0,
        "max_m": 0,
        "dependent_launch": 0,
        "box_m": 0,
        "slab_atoms": 0,
        "box_n": 0,
        "box_b": 0,
        "box_scale": 0,
        "box_zero": 0,
    }
    assert changes.keys() <= traits.keys()
    traits.update(changes)
    path = folder / f"{len(list(folder.iterdir()))}.cubin"
    path.write_bytes(b"FAKE" + struct.pack("17i", *traits.values()))
    return str(path)


def kernel(**changes) -> _C.Kernel:
    return _C.Kernel(cubin(**changes), "humming_cutlass_gemm")


def plan(kernel_=None, **changes):
    device = changes.pop("device", (2, 0))
    options = {
        "n": N,
        "k": K,
        "groups": GROUPS,
        "element_a": "float16",
        "element_d": "float16",
        "b": FakeTensor((3, 4, 128), INT32, device=device),
        "scale": FakeTensor((3, GROUPS, 16), FLOAT16, device=device),
    }
    options.update(changes)
    return _C.GemmPlan(kernel_ if kernel_ is not None else kernel(), **options)


def a_of(m, **options):
    return FakeTensor((m, K), FLOAT16, **options)


def d_of(m, **options):
    return FakeTensor((m, N), FLOAT16, **options)


def raises(error, call, *words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


def properties():
    assert _C.driver_available()
    found = _C.device_properties(1)
    assert found["name"] == "Fake GPU"
    assert (found["major"], found["sm_count"], found["smem_per_block_optin"]) == (9, 10, 232448)
    assert (found["l2_bytes"], found["clock_khz"], found["memory_clock_khz"]) == (38000, 13000, 36000)
    assert (found["memory_bus_bits"], found["total_memory"]) == (37000, 80 << 30)
    raises(ArgumentError, lambda: _C.device_properties(2), "device: got 2; allowed: 0 to 1")
    raises(ArgumentError, lambda: _C.device_properties(-1), "device: got -1")


def loading():
    loaded = kernel(tile_n=64)
    assert fake.fake_loads() == 0, "constructing a kernel must load nothing"
    assert loaded.traits(0)["tile_n"] == 64
    assert loaded.traits(0)["threads"] == 128
    assert fake.fake_loads() == 1
    loaded.traits(1)
    assert fake.fake_loads() == 2, "once per device"
    assert fake.fake_stack() == 0, "the context stack must be as before"
    raises(LaunchError, lambda: _C.Kernel("/nowhere/x.cubin", "f").traits(0), "/nowhere/x.cubin", "cannot be read")
    raises(LaunchError, lambda: _C.Kernel(cubin(), "f").traits(0), "entry: got 'f'")
    for other in (traits_version() - 1, traits_version() + 1):
        path = kernel(version=other)
        raises(LaunchError, lambda path=path: path.traits(0), f"version {other}", f"version {traits_version()}")
    raises(LaunchError, lambda: kernel(slab_atoms=8, box_m=8).traits(0), "impossible kernel traits")
    raises(LaunchError, lambda: kernel(slab_atoms=8, box_m=8, max_m=33).traits(0), "impossible kernel traits")
    raises(LaunchError, lambda: kernel(tile_n=0).traits(0), "impossible")
    raises(LaunchError, lambda: kernel(smem_bytes=300000).traits(0), "smem_bytes: got 300000", "232448")
    fake.fake_static_shared(1024)
    raises(LaunchError, lambda: kernel(smem_bytes=232448).traits(0), "1024 of static", "232448")
    kernel(smem_bytes=232448 - 1024).traits(0)
    assert fake.fake_loads() == 3, "a load that fails must unload"
    fake.fake_load_result(209)
    raises(LaunchError, lambda: kernel().traits(0), "compute capability 9.", "Fake GPU")
    fake.fake_load_result(719)
    raises(LaunchError, lambda: kernel().traits(0), "CUDA_ERROR_OF_THE_FAKE", "words of the driver")
    junk = folder / "junk.cubin"
    junk.write_bytes(b"junk")
    fake.fake_load_result(0)
    raises(LaunchError, lambda: _C.Kernel(str(junk), "humming_cutlass_gemm").traits(0), "junk.cubin")


def arguments():
    first_line = 64 - 16  # what the first 64 bytes of a launch's parameters hold of these on SM90
    early = {name for name, _ in Arguments._fields_ if getattr(Arguments, name).offset < first_line}
    shape = {"m", "n", "k", "groups", "split_k"}
    assert early == shape | {"b", "share", "more", "slab_atoms", "short_slab_warp", "box_bytes_a"}
    assert Arguments.scale.offset == first_line, "what SM90 kernels need before they ask for B comes first"
    bias, factor = FakeTensor((N,), FLOAT32), FakeTensor((1,), FLOAT32)
    zero = FakeTensor((3, GROUPS, 16), FLOAT16)
    bound = plan(bias=bias, global_scale=factor, zero=zero)
    assert (bound.n, bound.k, bound.device) == (N, K, 0)
    a, d = a_of(33, strides=(K + 8, 1), offset=16), d_of(33, strides=(N + 3, 1))
    bound.run(a, d, 0x77, 1)
    launch = last_launch()
    found = launch.arguments
    assert (found.a, found.d, found.bias, found.zero) == (a.pointer, d.pointer, bias.pointer, zero.pointer)
    assert found.global_scale == factor.pointer
    assert (found.m, found.n, found.k, found.groups, found.split_k) == (33, N, K, GROUPS, 1)
    assert (found.stride_a, found.stride_d) == (K + 8, N + 3)
    assert (found.partial, found.counter) == (0, 0)
    assert (found.slab_atoms, found.short_slab_warp, found.box_bytes_a) == (0, -1, 0), "no kernel of slabs"
    assert (launch.grid, launch.block, launch.shared_memory) == (3 * 2, 128, 1024)
    assert (launch.stream, launch.context, launch.cluster, launch.has_map) == (0x77, 0xC0, 1, 0)
    other = plan(device=(2, 1))
    other.run(a_of(1, device=(2, 1)), d_of(1, device=(2, 1)), 0)
    assert last_launch().context == 0xC1, "the launch must be on the tensors' device"
    assert fake.fake_stack() == 0
    bare = last_launch().arguments
    assert (bare.zero, bare.bias, bare.global_scale) == (0, 0, 0)


def shapes():
    bound = plan()
    bound.run(a_of(0), d_of(0), 0)
    bound.run(FakeTensor((2, 0, K), FLOAT16, null=True), FakeTensor((0, N), FLOAT16, null=True), 0)
    assert fake.fake_launches() == 0, "no rows, no launch"
    assert fake.fake_loads() == 0
    bound.run(FakeTensor((2, 3, K), FLOAT16), FakeTensor((6, N), FLOAT16), 0)
    assert (last_launch().arguments.m, last_launch().arguments.stride_a) == (6, K)
    bound.run(FakeTensor((2, 1, 3, K), FLOAT16, strides=(3 * 208, 5, 208, 1)), d_of(6), 0)
    assert (last_launch().arguments.m, last_launch().arguments.stride_a) == (6, 208)
    bound.run(FakeTensor((K,), FLOAT16), FakeTensor((N,), FLOAT16), 0)
    assert last_launch().arguments.m == 1
    bound.run(a_of(1, strides=(7, 1)), d_of(1, strides=(3, 1)), 0)
    assert last_launch().arguments.stride_a == 200, "a single row has no stride of its own"
    bound.run(a_of(5, strides=(0, 1)), d_of(5), 0)
    assert last_launch().arguments.stride_a == 0, "rows of an input may coincide"
    done = fake.fake_launches()

    def refused(a, d, *words, error=ArgumentError):
        raises(error, lambda: bound.run(a, d, 0), *words)

    refused(FakeTensor((2, 3, K), FLOAT16, strides=(4 * K, K, 1)), d_of(6), "a: got shape (2, 3, 200)", "evenly spaced")
    refused(a_of(4, strides=(1, 4)), d_of(4), "a: got inner stride 4; allowed: inner stride 1")
    refused(a_of(4), d_of(4, strides=(N - 1, 1)), "d: got a row stride of 47", "at least 48")
    refused(a_of(4), d_of(4, strides=(0, 1)), "d: got a row stride of 0")
    refused(a_of(4, strides=(-K, 1)), d_of(4), "a: got a row stride of -200")
    refused(a_of(4), d_of(5), "d: got 5 rows; allowed: 4 rows")
    refused(FakeTensor((4, K + 1), FLOAT16), d_of(4), "a: got shape (4, 201); allowed: shape (..., 200)")
    refused(a_of(4), FakeTensor((4, N, 1), FLOAT16), "d: got shape (4, 48, 1)")
    refused(FakeTensor((), FLOAT16), d_of(1), "a: got shape ()")
    refused(FakeTensor((1,) * 8 + (K,), FLOAT16), d_of(1), "at most 8 axes")
    refused(FakeTensor((4, K), BFLOAT16), d_of(4), "a: got bfloat16; allowed: float16", error=ArgumentTypeError)
    refused(a_of(4), FakeTensor((4, N), FLOAT32), "d: got float32; allowed: float16", error=ArgumentTypeError)
    refused(a_of(4, device=(1, 0)), d_of(4), "a: got a tensor on the CPU; allowed: a tensor on a CUDA device")
    refused(a_of(4, device=(3, 0)), d_of(4), "pinned host memory")
    refused(a_of(4, device=(2, 1)), d_of(4), "a: got a tensor on cuda:1; allowed: cuda:0")
    refused(a_of(4), d_of(4, flags=1), "d: got a read-only tensor")
    refused(a_of(4, null=True), d_of(4), "a: got a tensor without memory")
    refused(3, d_of(4), "a: got int; allowed: a CUDA tensor", error=ArgumentTypeError)
    refused(np.zeros((4, K), np.float16), d_of(4), "a: got a tensor on the CPU")
    bound.run(a_of(4, flags=1), d_of(4), 0)  # an input may be read-only
    raises(ArgumentTypeError, lambda: bound.call(a_of(4)), "__dlpack_c_exchange_api__")
    assert fake.fake_launches() == done + 1
    gc.collect()
    assert len(FakeTensor.exported) == 2, "run must give back what it borrowed; the plan holds b and scale"
    bound = None
    gc.collect()
    assert not FakeTensor.exported, "a plan must give its weight back"


def legacy_capsules():
    old = {"versioned": False}
    bound = plan(b=FakeTensor((3, 4, 128), INT32, **old), scale=FakeTensor((3, GROUPS, 16), UINT8, **old))
    a, d = a_of(2, **old), d_of(2, **old)
    bound.run(a, d, 0)
    assert last_launch().arguments.a == a.pointer
    del bound
    gc.collect()
    assert not FakeTensor.exported


def weights():
    def refused(*words, error=ArgumentError, **changes):
        raises(error, lambda: plan(**changes), *words)

    refused("b: got float32; allowed: int32 or uint32", b=FakeTensor((3, 4, 128), FLOAT32), error=ArgumentTypeError)
    refused("b: got shape (3, 4, 100)", "32 * bits", b=FakeTensor((3, 4, 100), INT32))
    refused("b: got shape (3, 4, 288)", b=FakeTensor((3, 4, 288), INT32))
    refused("b: got shape (2, 4, 128); allowed: shape (3, 4, 128)", b=FakeTensor((2, 4, 128), INT32))
    refused("b: got shape (3, 512)", b=FakeTensor((3, 512), INT32))
    refused("b: got a tensor that is not contiguous", b=FakeTensor((3, 4, 128), INT32, strides=(512, 128, 2)))
    refused("b: got a data pointer", "multiple of 16", b=FakeTensor((3, 4, 128), INT32, offset=4))
    refused("b: got a tensor on the CPU", b=np.zeros((3, 4, 128), np.int32))
    refused("scale: got shape (3, 5, 16); allowed: shape (3, 4, 16)", scale=FakeTensor((3, 5, 16), FLOAT16))
    refused("scale: got int32", scale=FakeTensor((3, 4, 16), INT32), error=ArgumentTypeError)
    refused("scale: got a tensor on cuda:1", scale=FakeTensor((3, 4, 16), FLOAT16, device=(2, 1)))
    refused("zero: got shape (3, 1, 16)", zero=FakeTensor((3, 1, 16), FLOAT16))
    refused("bias: got float16; allowed: float32", bias=FakeTensor((N,), FLOAT16), error=ArgumentTypeError)
    refused("bias: got shape (47,); allowed: shape (48,)", bias=FakeTensor((N - 1,), FLOAT32))
    refused("global_scale: got shape (2,)", global_scale=FakeTensor((2,), FLOAT32))
    refused("element_a: got float32", element_a="float32", error=ArgumentTypeError)
    refused("element_d: got 'half'", element_d="half", error=ArgumentTypeError)
    refused("n: got 0", n=0)
    refused("k: got 2147483648", k=1 << 31)
    refused("groups: got 0", groups=0)
    gc.collect()
    assert not FakeTensor.exported, "a plan that is refused must give its weight back"


def grids():
    bound = plan(kernel(cluster_size=4))
    bound.run(a_of(33), d_of(33), 0)
    assert (last_launch().grid, last_launch().cluster) == (8, 4), "6 tiles are 2 clusters of 4"
    walking = plan(kernel(persistent=1))
    walking.run(a_of(33), d_of(33), 0)
    assert last_launch().grid == 6
    walking.run(a_of(330), d_of(330), 0)
    assert last_launch().grid == 10, "one CTA per SM"
    clustered = plan(kernel(persistent=1, cluster_size=4))
    clustered.run(a_of(330), d_of(330), 0)
    assert last_launch().grid == 8, "whole clusters only"
    odd = plan(kernel(persistent=1, cluster_size=2, tile_n=16))  # three tiles along n: two pairs
    odd.run(a_of(17), d_of(17), 0)
    assert last_launch().grid == 2 * 4, "pairs along n, in every row of tiles"
    shared = plan(kernel(cluster_split_k=1, persistent=1))
    shared.run(a_of(330), d_of(330), 0)
    assert (last_launch().grid, last_launch().cluster) == (10, 1)
    shared.run(a_of(330), d_of(330), 0, 3)
    assert (last_launch().grid, last_launch().cluster) == (63 * 2, 3), "every tile's splits are a cluster"
    assert shares_of_last_launch() == (1, 1, 0), "of four k tiles the first CTA takes two"
    assert (last_launch().arguments.partial, last_launch().arguments.counter) == (0, 0), "no workspace"
    shared.run(a_of(33), d_of(33), 0, 0)
    assert (last_launch().grid, last_launch().cluster) == (10, 1), "stream-k: at most one CTA per SM"
    assert last_launch().arguments.split_k == 0
    assert shares_of_last_launch() == (2, 4, 0), "24 k tiles of six tiles, by 10 CTAs"
    assert last_launch().arguments.partial != 0, "a tile of sums for each CTA"
    assert ctypes.string_at(last_launch().arguments.counter, 10 * 4) == bytes(40)
    shared.run(a_of(1), d_of(1), 0, 0)
    assert last_launch().grid == 2 * 4, "no CTA without a k tile"
    raises(
        ArgumentError, lambda: shared.run(a_of(1), d_of(1), 0, -1), "split_k: got -1; allowed: 1 to 4", "or 0, stream-k"
    )
    sharing = plan(kernel(cluster_split_k=1, persistent=1, cluster_size=2))
    raises(ArgumentError, lambda: sharing.run(a_of(1), d_of(1), 0, 0), "split_k: got 0; allowed: 1 to 4")
    many = plan(kernel(cluster_split_k=1, tile_k=16))
    raises(ArgumentError, lambda: many.run(a_of(1), d_of(1), 0, 9), "split_k: got 9; allowed: 1 to 8")
    few = plan(kernel(max_m=16, persistent=1))
    few.run(a_of(16), d_of(16), 0)
    raises(ArgumentError, lambda: few.run(a_of(17), d_of(17), 0), "m: got 17; allowed: at most 16 for this kernel")
    raises(ArgumentError, lambda: few.run(a_of(1), d_of(1), 0, 2), "split_k: got 2; allowed: 1: this kernel")
    wide = FakeTensor((3 << 30, K), FLOAT16, strides=(0, 1))
    done = fake.fake_launches()
    tall = FakeTensor((1 << 30, K), FLOAT16, strides=(0, 1))
    narrow = plan(kernel(tile_m=1, tile_n=16))
    target = d_of(1)
    target.shape, target.strides = (1 << 30, N), (N, 1)
    raises(ArgumentError, lambda: narrow.run(tall, target, 0), "m: got 1073741824; allowed: at most 715827882")
    target.shape = (3 << 30, N)
    raises(ArgumentError, lambda: bound.run(wide, target, 0), "m: got 3221225472; allowed: at most 2147483632")
    raises(ArgumentError, lambda: bound.run(a_of(1), d_of(1), 0, 0), "split_k: got 0; allowed: 1 to 4")
    raises(ArgumentError, lambda: bound.run(a_of(1), d_of(1), 0, 5), "split_k: got 5; allowed: 1 to 4")
    assert fake.fake_launches() == done


def dependent_launches():
    waiting, others = plan(kernel(dependent_launch=1, cluster_size=2)), plan()
    for value, wanted in (("1", 1), ("0", 0), ("", 0), ("10", 0), (None, 0)):
        if value is None:
            del os.environ["HUMMING_CUTLASS_PDL"]
        else:
            os.environ["HUMMING_CUTLASS_PDL"] = value
        waiting.run(a_of(33), d_of(33), 0)
        assert (last_launch().dependent, last_launch().cluster) == (wanted, 2)
        others.run(a_of(33), d_of(33), 0)
        assert last_launch().dependent == 0, "a kernel that does not wait itself must not start early"


def tensor_maps():
    bound = plan(kernel(box_m=32))
    a = a_of(33, strides=(208, 1))
    bound.run(a, d_of(33), 0)
    assert last_launch().has_map == 1
    for found, rows in ((map_back(1), 32), (last_map(), 1)):  # whole boxes, and the row that remains
        assert (found.address, found.extent0, found.extent1, found.stride) == (a.pointer, K, 33, 416)
        assert (found.box0, found.box1, found.type, found.swizzle) == (64, rows, 6, 3)
    count = fake.fake_maps()
    bound.run(a_of(64), d_of(64), 0)
    assert (fake.fake_maps(), last_map().box1) == (count + 1, 32), "nothing remains"
    bound.run(a_of(1, strides=(3, 1)), d_of(1), 0)
    assert (fake.fake_maps(), last_map().stride, last_map().box1) == (count + 2, 400, 1), "no row that does not exist"
    bound.run(a_of(31), d_of(31), 0)
    assert last_map().box1 == 31
    plan(kernel(box_m=8), element_a="bfloat16").run(FakeTensor((8, K), BFLOAT16), d_of(8), 0)
    assert (last_map().type, last_map().box1) == (9, 8)
    for _ in range(2):  # a map that cannot be is not kept
        raises(
            ArgumentError,
            lambda: bound.run(a_of(2, strides=(201, 1)), d_of(2), 0),
            "row stride of 201",
            "multiple of 8",
        )
    raises(ArgumentError, lambda: bound.run(a_of(2, strides=(0, 1)), d_of(2), 0), "row stride of 0")
    raises(ArgumentError, lambda: bound.run(a_of(2, offset=2), d_of(2), 0), "a: got a data pointer", "16-byte aligned")


def tensor_maps_of_slabs():
    """The kernel for few tokens takes all atoms of a slab of A at once, where a map can be."""
    traits = kernel(max_m=8, persistent=1, box_m=8, slab_atoms=8)
    few = plan(traits)  # k 200 ends inside an atom
    count = fake.fake_maps()
    few.run(a_of(2), d_of(2), 0)
    assert fake.fake_maps() == count
    assert last_launch().arguments.box_bytes_a == 0, "threads read A"
    b, scale = FakeTensor((3, 90, 128), INT32), FakeTensor((3, 1, 16), FLOAT16)
    many = plan(traits, k=90 * 64, groups=1, b=b, scale=scale)

    def box_of(m, **words):
        before = fake.fake_maps()
        many.run(FakeTensor((m, 90 * 64), FLOAT16, **words), d_of(m), 0)
        made = fake.fake_maps() - before
        assert last_launch().arguments.box_bytes_a == (last_map().box2 * m * 128 if made else 0)
        return made, last_map().box2

    a = FakeTensor((3, 90 * 64), FLOAT16, strides=(6000, 1))
    many.run(a, d_of(3), 0)
    found = last_map()
    assert (found.address, found.extent0, found.extent1, found.extent2) == (a.pointer, 64, 3, 90)
    assert (found.stride, found.stride2, found.box0, found.box1, found.swizzle) == (12000, 128, 64, 3, 3)
    # 90 atoms for 16 warps: 6 each. A warp can hold 6 of 6 rows, of 7 rows only 5: then two slabs of 3, at least 4.
    assert (found.box2, box_of(6), box_of(7), box_of(8)) == (6, (1, 6), (1, 4), (1, 4))
    assert box_of(2, strides=(6001, 1))[0] == 0, "rows that are not aligned"
    assert box_of(2, offset=2)[0] == 0, "an address that is not"
    assert box_of(1, strides=(7, 1)) == (1, 6), "the stride of one row means nothing"
    # What the planner counts with is what the launcher does.
    kept = []  # a map of A is kept for its address
    for most in (2, 4, 6, 8):
        schedule = ScheduleConfig(
            mainloop=support.SM90_DECODE, tile_shape=(8, 16, 1024 * most), warp_shape=(8, 16), stage_count=2
        )
        for atoms, n in itertools.product((1, 16, 33, 90, 129, 459), (16, 1440, 1441)):
            k, rows = atoms * 64, -(-n // 16)
            b, scale = FakeTensor((rows, atoms, 128), INT32), FakeTensor((rows, 1, 16), FLOAT16)
            traits = kernel(max_m=8, persistent=1, box_m=8, slab_atoms=most)
            bound = plan(traits, n=n, k=k, groups=1, b=b, scale=scale)
            for m in range(1, 9):
                kept.append(FakeTensor((m, k), FLOAT16))
                bound.run(kept[-1], FakeTensor((m, n), FLOAT16), 0)
                own = -(-rows // min(rows, 10))  # the fake GPU has 10 SMs
                slab = support.decode_slab_atoms(schedule, m, k, own)
                assert own in (1, 9, 10)
                room = 40 if most == 8 and slab in (5, 6) else 32
                assert last_map().box2 == (slab if slab * m <= room else -(-slab // 2)), (most, atoms, n, m)
                grid = min(rows, 10)
                assert shares_of_last_launch() == (rows // grid, rows % grid, slab), (most, atoms, n, m)
                *whole, last = range(0, atoms, slab)  # the slabs of an atom row are dealt out to 16 warps in turn
                short = len(whole) % 16 if atoms - last < slab else -1
                assert last_launch().arguments.short_slab_warp == short, (most, atoms, n, m)


def tensor_maps_of_the_weight():
    # B (3, 4, 128) words: atom rows of 2048 bytes; scales (3, GROUPS, 16) float16.
    bound = plan(kernel(box_m=32, box_n=8, box_b=64, box_scale=GROUPS * 4))
    count = fake.fake_maps()
    bound.run(a_of(64), d_of(64), 0)
    assert fake.fake_maps() == count + 3
    other = FakeTensor((64, K), FLOAT16, offset=16)
    bound.run(other, d_of(64), 0)
    assert fake.fake_maps() == count + 4, "the weight's maps are made once"
    scales = map_back(2)
    assert (scales.extent0, scales.extent1, scales.stride) == (GROUPS * 4, 3, GROUPS * 32)
    assert (scales.box0, scales.box1, scales.type, scales.swizzle) == (GROUPS * 4, 8, 8, 0)
    words = map_back(3)
    assert (words.extent0, words.extent1, words.stride, words.box0) == (256, 3, 2048, 64)


def extents_beyond_a_kernel():
    """Kernels round n and k up, and count an atom row's words, in 32 bits."""
    most = MAX_EXTENT
    scale = FakeTensor((1, 1, 16), FLOAT16)
    for k in (most, most + 64):
        b = FakeTensor((1, k // 64, 32), INT32)  # one bit a weight; memory that is never touched
        if k == most:
            plan(n=16, k=k, groups=1, b=b, scale=scale)
            continue
        allowed = f"got 16, {k}, 1; allowed: positive integers, n and k at most {most}"
        raises(ArgumentError, lambda b=b, k=k: plan(n=16, k=k, groups=1, b=b, scale=scale), allowed)


def tensor_maps_that_are_known():
    """A map is made anew where anything that it says has changed, and only there."""
    bound, same = plan(kernel(box_m=32)), plan(kernel(box_m=32))
    other_box, other_type = plan(kernel(box_m=8)), plan(kernel(box_m=32), element_a="bfloat16")
    a, d = a_of(64), d_of(64)
    bound.run(a, d, 0)
    count = fake.fake_maps()

    def maps_of(plan_, a):
        before = fake.fake_maps()
        plan_.run(a, d_of(a.shape[0]), 0)
        assert last_launch().arguments.a == a.pointer
        return fake.fake_maps() - before

    assert (maps_of(bound, a), maps_of(same, a)) == (0, 0)
    assert fake.fake_maps() == count
    assert maps_of(other_box, a) == 1
    assert last_map().box1 == 8
    assert maps_of(bound, a) == 1
    fewer, wider, short = (FakeTensor((1, K), FLOAT16) for _ in range(3))
    for view, shape, strides in ((fewer, (32, K), (K, 1)), (wider, (64, K), (208, 1)), (short, (64, K), (K, 1))):
        view.base, view.shape, view.strides = a.base, shape, strides
    assert (maps_of(bound, fewer), last_map().extent1) == (1, 32)
    bound.run(a, d, 0)  # what is known before each differs in one thing
    assert (maps_of(bound, wider), last_map().stride) == (1, 416)
    bound.run(a, d, 0)
    short.element = BFLOAT16
    assert (maps_of(other_type, short), last_map().type) == (1, 9)
    narrow = plan(
        kernel(box_m=32), k=192, groups=3, b=FakeTensor((3, 3, 128), INT32), scale=FakeTensor((3, 3, 16), FLOAT16)
    )
    wider.shape, wider.strides = (64, 192), (K, 1)
    bound.run(a, d, 0)
    assert (maps_of(narrow, wider), last_map().extent0) == (1, 192)
    counts = []
    thread = threading.Thread(target=lambda: counts.extend((maps_of(narrow, wider), maps_of(narrow, wider))))
    thread.start()
    thread.join()
    assert counts == [1, 0], "threads share none"


def workspaces():
    bound = plan()

    def pointers(m, stream, split_k=2):
        bound.run(a_of(m), d_of(m), stream, split_k)
        found = last_launch().arguments
        assert found.split_k == split_k
        assert last_launch().grid == (m + 15) // 16 * 2 * split_k
        return found.partial, found.counter

    first = pointers(33, 1)
    assert ctypes.string_at(first[1], 6 * 4) == bytes(24), "counters must start at zero"
    assert pointers(33, 1) == first, "a stream keeps its workspace"
    other = pointers(33, 2)
    assert not set(other) & set(first), "streams do not share"
    count = fake.fake_allocations()
    assert pointers(16 * 4096, 1)[0] != first[0], "more tiles need more room"
    assert fake.fake_allocations() == count + 2
    assert ctypes.string_at(last_launch().arguments.counter, 2 * 4096 * 4) == bytes(2 * 4096 * 4)
    grown = last_launch().arguments.partial
    assert pointers(33, 1)[0] == grown, "a workspace does not shrink"
    assert ctypes.string_at(first[1], 24) == bytes(24), "an outgrown buffer stays valid"
    fake.fake_capture(1, 1)
    captured = pointers(33, 1)
    assert captured[0] != grown, "a graph does not share with eager launches"
    assert pointers(33, 1) == captured
    fake.fake_capture(1, 0)
    assert pointers(33, 1)[0] == grown
    raises(LaunchError, lambda: pointers(16 * 65536, 1, 4), "workspace", "bytes")
    assert fake.fake_mode() == 0


def _workspace_of_per_thread_default_stream(bound):
    """Returns where a launch of this thread on the stream of handle 2 has its partial sums and counters."""
    bound.run(a_of(33), d_of(33), 2, 2)
    found = last_launch().arguments
    return found.partial, found.counter


def workspaces_of_streams_with_one_handle():
    """Two threads' default streams, and a stream that was destroyed and the one that got its handle, do not share."""
    bound = plan()
    mine = _workspace_of_per_thread_default_stream(bound)
    theirs = []
    thread = threading.Thread(target=lambda: theirs.append(_workspace_of_per_thread_default_stream(bound)))
    thread.start()
    thread.join()
    assert not set(theirs[0]) & set(mine)
    assert _workspace_of_per_thread_default_stream(bound) == mine, "a thread keeps its workspace"

    bound.run(a_of(33), d_of(33), 0x77, 2)
    before = last_launch().arguments
    fake.fake_reuse_handle(0x77)
    bound.run(a_of(33), d_of(33), 0x77, 2)
    after = last_launch().arguments
    assert not {after.partial, after.counter} & {before.partial, before.counter}
    assert ctypes.string_at(after.counter, 24) == bytes(24)
    fake.fake_capture(2, 1)
    captured = _workspace_of_per_thread_default_stream(bound)
    assert not {captured[0], captured[1]} & set(mine), "a graph does not share with eager launches"


def workspaces_by_handle():
    """Without numbers of streams, which drivers older than 12.0 lack, handles tell them apart."""
    workspaces()
    bound = plan()
    assert _workspace_of_per_thread_default_stream(bound) == _workspace_of_per_thread_default_stream(bound)


def capture():
    """The first call of all happens while a stream is being captured."""
    fake.fake_capture(9, 1)
    bound = plan()
    bound.run(a_of(33), d_of(33), 9, 2)
    assert fake.fake_launches() == 1
    assert last_launch().stream == 9
    assert fake.fake_mode() == 0, "the thread's capture mode must be restored"
    assert ctypes.string_at(last_launch().arguments.counter, 24) == bytes(24)


def threads():
    """Many threads, none with a context, launch for the first time at once."""
    shared = kernel()
    bound = [plan(shared) for _ in range(4)]
    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def work(index):
        try:
            barrier.wait()
            for _ in range(50):
                bound[index % 4].run(a_of(3), d_of(3), index, 1 + index % 2)
            assert fake.fake_stack() == 0
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors, errors
    assert fake.fake_loads() == 1
    assert fake.fake_launches() == 400


def exchange_api():
    """Returns the address of torch's own functions, but with host memory that claims to be a GPU's."""
    import torch

    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    fake.fake_exchange.restype = fake.fake_later_exchange.restype = ctypes.c_void_p
    fake.fake_exchange.argtypes = (ctypes.c_void_p,)
    return fake.fake_exchange(get_pointer(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api"))


def call():
    """Tensors of a type with the C exchange API."""
    import torch

    name = b"dlpack_exchange_api"
    api = exchange_api()

    class Cuda(torch.Tensor):
        __dlpack_c_exchange_api__ = new_capsule(api, name, None)

    class Later(torch.Tensor):
        __dlpack_c_exchange_api__ = new_capsule(fake.fake_later_exchange(), name, None)

    for kind in (Cuda, Later):
        done = fake.fake_launches()
        weight = torch.zeros(3, 4, 128, dtype=torch.int32).as_subclass(kind)
        scale = torch.zeros(3, GROUPS, 16, dtype=torch.float16).as_subclass(kind)
        bound = plan(b=weight, scale=scale, element_d="float32")
        pointer = weight.data_ptr()
        before = sys.getrefcount(kind)
        a = torch.zeros(2, 5, K, dtype=torch.float16, requires_grad=True).as_subclass(kind)
        d = bound.call(a, 2)
        assert (tuple(d.shape), d.dtype, d.is_contiguous()) == ((2, 5, N), torch.float32, True)
        assert not d.requires_grad
        found = last_launch()
        assert found.stream == 0xABC0, "the launch must be on the framework's current stream"
        assert (found.arguments.a, found.arguments.b) == (a.data_ptr(), pointer)
        assert (found.arguments.d, found.arguments.m) == (d.data_ptr(), 10)
        assert (found.arguments.stride_d, found.arguments.split_k) == (N, 2)
        assert tuple(bound.call(a[:, :0]).shape) == (2, 0, N)
        assert tuple(bound.call(a[0, 0]).shape) == (N,)
        assert fake.fake_launches() == done + 2
        out = torch.zeros(10, N).as_subclass(kind)
        bound.run(a, out, 0x5)
        assert (last_launch().arguments.d, last_launch().stream) == (out.data_ptr(), 5)
        raises(
            ArgumentTypeError, lambda bound=bound, a=a: bound.call(a.bfloat16()), "a: got bfloat16; allowed: float16"
        )
        raises(ArgumentError, lambda bound=bound, a=a: bound.call(a[..., :-1]), "a: got shape (2, 5, 199)")
        raises(ArgumentError, lambda bound=bound, a=a: bound.call(a, 9), "split_k: got 9")
        raises(ArgumentError, lambda bound=bound, a=a: bound.call(a.to("meta")), "cannot be exported")
        many = torch.zeros(13, K, dtype=torch.float16).as_subclass(kind)
        raises(LaunchError, lambda bound=bound, many=many: bound.call(many), "MemoryError: no memory")
        del a, d, out, many
        for _ in range(100):
            bound.call(torch.zeros(1, K, dtype=torch.float16).as_subclass(kind))
        assert sys.getrefcount(kind) - before < 10, "a call must not keep references"
        del weight
        bound.call(torch.zeros(1, K, dtype=torch.float16).as_subclass(kind))
        assert last_launch().arguments.b == pointer


def launches():
    """A call like one before is nothing but a launch; whatever differs from it is left to others."""
    import torch

    class Subclass(torch.Tensor):
        pass

    torch.Tensor.__dlpack_c_exchange_api__ = new_capsule(exchange_api(), b"dlpack_exchange_api", None)
    b, scale = torch.zeros(3, 4, 128, dtype=torch.int32), torch.zeros(3, GROUPS, 16, dtype=torch.float16)
    bound = plan(kernel(box_m=16), b=b, scale=scale, element_d="float32")
    allocated = []

    def anywhere(shape, **options):
        allocated.append("anywhere")
        if shape[0] == 13:
            raise MemoryError("no memory")
        return torch.empty(shape, **options)

    def on_current_device(shape, strides, dtype):
        allocated.append("current")
        return torch.empty_strided(shape, strides, dtype=dtype)

    def make(on_current_device):
        return _C.Launches(
            tensor_type=torch.Tensor,
            weight=(b, scale, None),
            grad_enabled=torch.is_grad_enabled,
            empty=anywhere,
            empty_on_current_device=on_current_device,
        )

    def remember(known, a, split_k=1, invariant=False):
        shape = (*a.shape[:-1], N)
        layout = (shape, torch.empty(shape).stride(), torch.float32)
        known.remember(a, invariant, bound, split_k, layout, {"dtype": torch.float32, "device": a.device})

    known = make(on_current_device)
    a = torch.zeros(2, 5, K, dtype=torch.float16)
    assert known.call(a, False) is None
    remember(known, a, 2)
    remember(known, a, 3)
    assert len(known) == 1
    references = [sys.getrefcount(x) for x in (a, b, bound, torch.float32, known)]
    for current in (False, True, True):
        if current:
            fake.cuCtxPushCurrent_v2(0xC0)
        d = known.call(a, False)
        assert (tuple(d.shape), d.dtype, d.is_contiguous(), type(d)) == ((2, 5, N), torch.float32, True, torch.Tensor)
        found = last_launch()
        assert (found.stream, found.context) == (0xABC0, 0xC0)
        assert (found.arguments.a, found.arguments.d) == (a.data_ptr(), d.data_ptr())
        assert (found.arguments.m, found.arguments.stride_a, found.arguments.stride_d) == (10, K, N)
        assert found.arguments.split_k == 2, "a launch that is known stays as it is"
        if current:
            fake.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    assert allocated == ["anywhere", "current", "current"]
    for tensor in (b, scale):
        memory = tensor.data
        tensor.data = torch.zeros_like(memory)
        assert known.call(a, False) is None, "the same tensor, elsewhere"
        tensor.data = memory
        assert known.call(a, False) is not None
    del allocated[3:]
    fake.cuCtxPushCurrent_v2(0xC1)
    known.call(a, False)
    assert allocated[-1] == "anywhere", "another device is current"
    fake.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    without = make(None)
    remember(without, a)
    without.call(a, False)
    assert allocated[-1] == "anywhere"
    del d

    done, counted = fake.fake_launches(), len(allocated)
    memory = torch.zeros(10 * K + 1, dtype=torch.float16)
    for other in (
        a[:1],
        a.view(10, K),
        a.bfloat16(),
        a.to("meta"),
        torch.zeros(5, 2, K, dtype=torch.float16).transpose(0, 1),
        memory[1:].view(2, 5, K),
        a.clone().requires_grad_(),
        torch.nn.Parameter(a, requires_grad=False),
        a.as_subclass(Subclass),
        a.numpy(),
        torch.zeros((), dtype=torch.float16),
        torch.zeros((1,) * 8 + (K,), dtype=torch.float16),
        None,
        3,
    ):
        assert known.call(other, False) is None, other
    assert known.call(a, True) is None, "a launch that need not be invariant"
    assert (fake.fake_launches(), len(allocated)) == (done, counted)
    with torch.no_grad():
        assert known.call(a.clone().requires_grad_(), False) is not None
    with torch.inference_mode():
        assert known.call(a, False).is_inference()
    remember(known, a, 1, invariant=True)
    known.call(a, True)
    assert last_launch().arguments.split_k == 1

    remember(known, a[0, :1], 9)
    raises(ArgumentError, lambda: known.call(a[0, :1], False), "split_k: got 9")
    many = torch.zeros(13, K, dtype=torch.float16)
    remember(known, many)
    raises(MemoryError, lambda: known.call(many, False), "no memory")
    remember(known, torch.zeros((1,) * 8 + (K,), dtype=torch.float16))  # more axes than a launch may have
    assert len(known) == 4
    raises(ArgumentTypeError, lambda: _C.Launches(int, (), print, print, None), "__dlpack_c_exchange_api__")

    for _ in range(100):
        known.call(a, False)
    # `bound` is held once more by each shape.
    after = [sys.getrefcount(x) for x in (a, b, bound, torch.float32, known)]
    assert after[0] == references[0]
    assert after[2] - references[2] == 4
    assert max(abs(after[i] - references[i]) for i in (1, 3, 4)) < 20, "a call must not keep references"

    # A single row whose length is no multiple of 8 still has a stride that tensor maps can take.
    odd = plan(
        kernel(box_m=16),
        k=17,
        groups=1,
        b=torch.zeros(3, 1, 128, dtype=torch.int32),
        scale=torch.zeros(3, 1, 16, dtype=torch.float16),
    )
    row = torch.zeros(1, 17, dtype=torch.float16)
    known.remember(row, False, odd, 1, ((1, N), (N, 1), torch.float16), {})
    known.call(row, False)
    assert last_launch().arguments.stride_a == 24


def module_calls():
    """A layer that is called launches and nothing more, unless something is to happen before, after or instead."""
    import copy
    import pickle

    import torch

    from humming_cutlass import ops
    from humming_cutlass.layer import HummingLayer

    torch.Tensor.__dlpack_c_exchange_api__ = new_capsule(exchange_api(), b"dlpack_exchange_api", None)
    torch.set_grad_enabled(False)
    through_forward = []
    original = HummingLayer.forward

    class Subclass(HummingLayer):
        def forward(self, x, out=None):
            through_forward.append("subclass")
            return super().forward(x, out)

    x = torch.randn(2, K).half()

    def make(kind=HummingLayer):
        layer = kind(N, K, "int4", torch_dtype=torch.float16)
        layer.load_from_unquantized(torch.randn(N, K))
        layer.transform()
        bound = plan(groups=layer.scale.shape[1], b=layer.data, scale=layer.scale)
        options = {"dtype": torch.float16, "device": x.device}
        ops._launches(layer._packed).remember(x, False, bound, 1, ((2, N), (N, 1), torch.float16), options)
        return layer

    def launched(call, *arguments, **options):
        before = fake.fake_launches()
        through_forward.clear()
        result = call(*arguments, **options)
        assert tuple(result.shape) == (2, N)
        return fake.fake_launches() - before

    layer = make()
    profiled = []
    sys.setprofile(lambda frame, event, _: profiled.append(frame.f_code.co_name) if event == "call" else None)
    layer(x)
    sys.setprofile(None)
    assert "__call__" in profiled
    assert not {"_call_impl", "forward"} & set(profiled), "the short way must be gone"
    assert launched(layer, x) == launched(layer.forward, x) == launched(layer, x=x) == launched(layer, x, None) == 1
    assert launched(ops.gemm, x, layer._packed) == 1
    raises(TypeError, layer)
    raises(TypeError, lambda: layer(x, None, None))
    raises(ArgumentTypeError, lambda: layer(None), "a: got NoneType")

    seen = []
    modules = torch.nn.modules.module
    for register in (
        layer.register_forward_hook,
        layer.register_forward_pre_hook,
        modules.register_module_forward_hook,
        modules.register_module_forward_pre_hook,
    ):
        handle = register(lambda module, *_: seen.append(module))
        assert launched(layer, x) == 1
        assert seen == [layer], register
        handle.remove()
        seen.clear()
    other = torch.ones(2, N)
    with_kwargs = layer.register_forward_hook(
        lambda module, args, kwargs, result: (seen.append((args, kwargs)), other)[1], with_kwargs=True
    )
    assert layer(x=x) is other
    assert seen == [((), {"x": x})]
    with_kwargs.remove()
    with torch.enable_grad():
        for register in (layer.register_full_backward_hook, modules.register_module_full_backward_hook):
            handle = register(lambda *_: None)
            sys.setprofile(lambda frame, event, _: seen.append(frame.f_code.co_name))
            layer(x)
            sys.setprofile(None)
            assert "setup_output_hook" in seen or "_call_impl" in seen, register
            handle.remove()
            seen.clear()

    layer.forward = lambda *_: other
    assert layer(x) is other
    del layer.forward
    layer._compiled_call_impl = lambda *_: other
    assert layer(x) is other
    layer._compiled_call_impl = None
    assert launched(layer, x) == 1
    HummingLayer.forward = lambda *_: other
    assert layer(x) is other
    HummingLayer.forward = original
    child = make(Subclass)
    assert (launched(child, x), through_forward) == (1, ["subclass"])

    # Other tensors than those of the launch, or another way to multiply: none of them is on a GPU.
    replaced = {"data": layer.data.clone()}
    assert launched(torch.func.functional_call, layer, replaced, (x,)) == 0
    assert launched(layer, x) == 0, "the buffers have changed once more"
    layer = make()
    assert launched(layer, x) == 1
    layer.batch_invariant = True
    assert launched(layer, x) == 0
    layer.batch_invariant = False
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert launched(twin, x) == 0
        assert torch.equal(twin(x), ops.gemm_host(x, layer._packed))
    assert launched(layer, x) == 1
    limit, ops._PLAN_LIMIT = ops._PLAN_LIMIT, 0
    assert len(ops._launches(layer._packed)) == 0, "shapes without end must not fill the memory"
    ops._PLAN_LIMIT = limit
    layer = make()
    layer.scale = layer.scale.clone()
    assert launched(layer, x) == 0
    raises(Exception, lambda: HummingLayer(N, K, "int4")(x), "a layer that is not transformed")


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        properties,
        loading,
        arguments,
        shapes,
        legacy_capsules,
        weights,
        grids,
        tensor_maps,
        tensor_maps_of_the_weight,
        tensor_maps_that_are_known,
        tensor_maps_of_slabs,
        extents_beyond_a_kernel,
        dependent_launches,
        workspaces,
        workspaces_of_streams_with_one_handle,
        workspaces_by_handle,
        capture,
        threads,
        call,
        launches,
        module_calls,
    )
}

if __name__ == "__main__":
    # Loaded first under the driver's soname, so that the runtime's dlopen finds this one.
    fake = ctypes.PyDLL(sys.argv[1])
    for query in ("fake_capture", "fake_launch", "fake_map", "fake_map_back"):
        getattr(fake, query).restype = None
    fake.fake_capture.argtypes = (ctypes.c_uint64, ctypes.c_int)
    fake.fake_reuse_handle.restype = None
    fake.fake_reuse_handle.argtypes = (ctypes.c_uint64,)
    SCENARIOS[sys.argv[2]]()
