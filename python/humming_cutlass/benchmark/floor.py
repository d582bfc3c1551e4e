"""The streaming floor: a kernel that reads the bytes of a packed weight and does nothing else. Needs Triton and a GPU.

No kernel that reads the weight can be faster, and at one token little else has to be done. Several ways of reading are
tried on the very buffers, and the fastest is timed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from humming_cutlass.benchmark.contenders import FLOOR, Call, Contender, bytes_of, copies_needed
from humming_cutlass.benchmark.problem import RandomWeight
from humming_cutlass.benchmark.timing import record, time_together

__all__ = ["StreamingFloor"]

_MARK = 0x5EED5EED


def _read(data, sink, count, mark, BLOCK: tl.constexpr, UNROLL: tl.constexpr, STORE: tl.constexpr):  # type: ignore
    """Folds `count` 32-bit words by exclusive or; stores what each lane has, or, without STORE, only if it is `mark`.

    A lane reads 16 bytes at a time, UNROLL times before it folds.
    """
    lane = tl.arange(0, BLOCK)
    folded = tl.zeros((BLOCK,), tl.int32)
    step = tl.num_programs(0) * BLOCK * UNROLL
    for start in range(tl.program_id(0) * BLOCK * UNROLL, count, step):
        for i in tl.static_range(UNROLL):
            at = start + i * BLOCK + lane
            folded ^= tl.load(data + at, mask=at < count, other=0, eviction_policy="evict_first")
    if STORE:
        tl.store(sink + tl.program_id(0) * BLOCK + lane, folded)
    else:
        tl.store(sink + lane, folded, mask=folded == mark)


_kernel = triton.jit(_read)


class _Way(NamedTuple):
    warps: int
    unroll: int
    per_sm: int  # programs; 0: as many as there are blocks to read

    def __str__(self) -> str:
        programs = f"{self.per_sm} programs an SM" if self.per_sm else "one program a block"
        return f"{programs} of {self.warps} warps, {self.unroll} loads in flight"


_WAYS = [
    _Way(*way)
    for way in ((8, 4, 2), (8, 4, 4), (8, 4, 8), (8, 8, 4), (16, 4, 2), (16, 4, 4), (4, 8, 8), (8, 4, 0), (8, 8, 0))
]


class StreamingFloor(Contender):
    """Reads as many bytes as the packed weight has."""

    impl = FLOOR

    def __init__(self, weight: RandomWeight, rotation_bytes: int) -> None:
        device = weight.codes.device
        words = -(-bytes_of(weight.packed.state_dict().values()) // 64) * 16
        self.weight_bytes = 4 * words
        generator = torch.Generator(device=device)
        generator.manual_seed(0)
        low, high = -(1 << 31), (1 << 31) - 1
        self.copies = [
            torch.randint(low, high, (words,), device=device, generator=generator, dtype=torch.int32)
            for _ in range(copies_needed(self.weight_bytes, rotation_bytes))
        ]
        self.sm_count = torch.cuda.get_device_properties(device).multi_processor_count
        self.sink = torch.zeros(1 << 12, dtype=torch.int32, device=device)
        recordings = []
        for way in _WAYS:
            self.way = way
            if not self._reads_everything():
                raise RuntimeError(f"{FLOOR}: {way}: not everything was read")
            recordings.append(record(self._calls(), device))
        timings = time_together(recordings, device=device, repeats=3)
        self.way = min(zip(timings, _WAYS, strict=True), key=lambda pair: pair[0].us)[1]

    def _launch(self, data: torch.Tensor, sink: torch.Tensor | None = None) -> None:
        block = 128 * self.way.warps  # 4 words a lane
        kernel: Any = _kernel
        kernel[(self._programs(),)](
            data,
            self.sink if sink is None else sink,
            data.numel(),
            _MARK,
            BLOCK=block,
            UNROLL=self.way.unroll,
            STORE=sink is not None,
            num_warps=self.way.warps,
        )

    def _programs(self) -> int:
        blocks: int = -(-self.copies[0].numel() // (128 * self.way.warps * self.way.unroll))
        return min(blocks, self.sm_count * self.way.per_sm) if self.way.per_sm else blocks

    def _calls(self) -> list[Call]:
        return [lambda data=data: self._launch(data) for data in self.copies]  # type: ignore[misc]

    def _reads_everything(self) -> bool:
        """Whether what the kernel folds is what torch folds; also compiles the kernel in both its forms."""
        sink = torch.empty(self._programs() * 128 * self.way.warps, dtype=torch.int32, device=self.sink.device)
        self._launch(self.copies[-1], sink)
        for data in self.copies:
            self._launch(data)
        return _fold(sink) == _fold(self.copies[-1])

    def calls(self, a: torch.Tensor, out: torch.Tensor) -> list[Call]:
        """See `Contender.calls`; neither argument is touched."""
        del a, out
        return self._calls()

    def kernel(self, m: int) -> str:
        """See `Contender.kernel`."""
        del m
        return str(self.way)

    def error(self, call: Call, out: torch.Tensor, rows: torch.Tensor, expected: torch.Tensor) -> float:
        """See `Contender.error`; the only thing to be right about is that all bytes were read."""
        del call, out, rows, expected
        return 0.0 if self._reads_everything() else float("inf")


def _fold(words: torch.Tensor) -> int:
    """Returns the exclusive or of all words."""
    while words.numel() > 1:
        half = words.numel() // 2
        folded = words[:half] ^ words[half : 2 * half]
        words = folded if words.numel() % 2 == 0 else torch.cat([folded, words[-1:]])
    return int(words)
