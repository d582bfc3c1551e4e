"""What is in a cubin: its machine code, its constants, and what the compiler said; and what ought to be.

Reads with `cuobjdump` and `nvdisasm` of the pip packages `nvidia-cuda-cuobjdump` and `nvidia-cuda-nvdisasm`. A tool
that is missing is an error, never a reason to skip.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import os
import re
import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from humming_cutlass import build, emitter, support
from humming_cutlass.config import ATOM_K, GemmConfig

__all__ = ["TABLE_HEADER", "Machine", "constant", "problems", "read", "table_row", "tool", "traits_fields"]

#: Traps that a kernel may hold, by kernel template; none needs one.
ALLOWED_TRAPS: Mapping[str, int] = dict.fromkeys(support.MAINLOOPS, 0)

_MMA = re.compile(r"MMA\b|MMA\.")
#: Everything that copies from global to shared memory without registers, back, or reduces so.
_COPIES = ("LDGSTS", "UTMALDG", "UTMASTG", "UTMAREDG", "UTMAPF", "UBLKCP", "UBLKPF", "UBLKRED", "LDTM", "STTM")
_EXPECTED_COPIES = {
    support.SM80: {"LDGSTS"},
    support.SM90: {"UTMALDG"},
    support.SM90_DECODE: {"UBLKCP", "UTMALDG"},
}
#: griddepcontrol.wait and .launch_dependents.
_DEPENDENT_LAUNCH = {"ACQBULK", "PREEXIT"}
#: What else the mainloop is made of: ldmatrix; transaction barriers, the register hand-over, the barrier of a cluster.
_EXPECTED_OTHERS = {
    support.SM80: {"LDSM", "LDGDEPBAR"},
    support.SM90: {"SYNCS", "USETMAXREG", "WARPGROUP", "UCGABAR_ARV", "UCGABAR_WAIT", *_DEPENDENT_LAUNCH},
    support.SM90_DECODE: {"LDSM", "SYNCS", *_DEPENDENT_LAUNCH},
}
_LOCAL = ("STL", "LDL")
#: Opcode lines: address, perhaps a predicate, opcode.
_LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)", re.MULTILINE)
#: ptxas: wgmma serialized (C7510 and its kin), and any other warning.
_WARNING = re.compile(r"C75\d\d|serializ|warning", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A compiled kernel, read.

    Attributes:
        target: the GPU the machine code is for, by `cuobjdump`.
        opcodes: how often each opcode occurs, modifiers included.
        traits: the exported `KernelTraits`, by field.
        info: what the cache recorded.
        log: the compiler's output.
    """

    target: str
    opcodes: Mapping[str, int]
    traits: Mapping[str, int]
    info: build.KernelInfo
    log: str

    def count(self, *bases: str) -> int:
        """How many instructions have one of these opcodes, whatever the modifiers."""
        return sum(count for opcode, count in self.opcodes.items() if opcode.split(".")[0] in bases)


def tool(name: str) -> Path:
    """The program `name` of the pip packages."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    for found in (path for folder in folders for path in sorted(folder.glob(f"*/bin/{name}"), reverse=True)):
        return found
    raise FileNotFoundError(f"{name} is not installed: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")


def _disassemble(cubin: Path) -> str:
    program = tool("cuobjdump")
    environment = os.environ | {"PATH": f"{tool('nvdisasm').parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [program, "-sass", cubin], capture_output=True, text=True, check=True, env=environment, timeout=300
    )
    return done.stdout


def constant(cubin: bytes, symbol: str) -> bytes:
    """The bytes of an initialized symbol of an ELF file of 64 bits."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not an ELF file of 64 bits")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    for _, kind, _, _, offset, length, link, _, _, entry in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        strings = sections[link][4]
        for at in range(offset, offset + length, entry):
            name, _, _, section, value, extent = struct.unpack_from("<IBBHQQ", cubin, at)
            if cubin[strings + name : cubin.index(b"\0", strings + name)] == symbol.encode():
                start = sections[section][4] + value
                return cubin[start : start + extent]
    raise KeyError(symbol)


def traits_fields() -> list[str]:
    """The fields of `KernelTraits`, in order."""
    for folder in build.include_directories():
        header = folder / "humming_cutlass" / "device" / "arguments.hpp"
        if header.exists():
            text = header.read_text()
            body = text[text.index("struct KernelTraits {") :]
            return re.findall(r"^\s*int32_t (\w+)(?:\s*=\s*\d+)?;", body[: body.index("};")], re.MULTILINE)
    raise FileNotFoundError("device/arguments.hpp")


def read(cubin: Path) -> Machine:
    """Reads a cubin of the cache."""
    text = _disassemble(cubin)
    (target,) = set(re.findall(r"code for (sm_\w+)", text))
    fields = traits_fields()
    data = constant(cubin.read_bytes(), emitter.TRAITS_SYMBOL)
    return Machine(
        target=target,
        opcodes=collections.Counter(_LINE.findall(text)),
        traits=dict(zip(fields, struct.unpack(f"<{len(fields)}i", data), strict=True)),
        info=build.kernel_info(cubin),
        log=(cubin.parent / "log.txt").read_text(),
    )


def _versions_of_slab(config: GemmConfig, atoms: int) -> int:
    """Two where slabs of this width begin at a group's border and in the middle of a group by turns."""
    columns, group = atoms * ATOM_K, config.types.group_size
    return 2 if group > 0 and columns % group == group // 2 and columns > group // 2 else 1


def expected_mma(config: GemmConfig) -> tuple[str, int]:
    """The only MMA opcode that the kernel may hold, and how many of it a k tile, or a slab of each width, takes."""
    (tile_m, _, tile_k), (warp_m, warp_n) = config.schedule.tile_shape, config.schedule.warp_shape
    suffix = ".F32.BF16" if config.types.element_a == "bfloat16" else ".F32"
    if config.schedule.mainloop == support.SM80:
        return f"HMMA.16816{suffix}", (warp_m // 8) * (warp_n // 16) * (tile_k // 16)
    if config.schedule.mainloop == support.SM90_DECODE:
        atoms = sum(width * _versions_of_slab(config, width) for width in support.decode_slabs(config.schedule))
        return f"HMMA.16816{suffix}", tile_m // 8 * atoms * (ATOM_K // 16)
    return f"HGMMA.64x{tile_m}x16{suffix}", tile_k // 16


def _expected_copies(config: GemmConfig) -> set[str]:
    """What copies; the factors of groups, and zero points, of the kernel for few tokens come by cp.async."""
    factors = config.types.group_size != -1 or config.types.element_zero != "none"
    decode = config.schedule.mainloop == support.SM90_DECODE
    return _EXPECTED_COPIES[config.schedule.mainloop] | ({"LDGSTS"} if decode and factors else set())


def _shares_a(config: GemmConfig) -> bool:
    """Whether A comes by multicast to the CTAs of a cluster: for the most tokens."""
    return config.schedule.mainloop == support.SM90 and config.schedule.tile_shape[0] >= 256


def _expected_traits(config: GemmConfig) -> dict[str, int]:
    """What a launcher is told besides sizes."""
    mainloop = config.schedule.mainloop
    return {
        "cluster_size": 2 if _shares_a(config) else 1,
        "cluster_split_k": int(mainloop == support.SM90),
        "persistent": int(mainloop != support.SM80),
        "max_m": config.schedule.tile_shape[0] if mainloop == support.SM90_DECODE else 0,
        "dependent_launch": int(mainloop != support.SM80),
    }


def _difference(found: Iterable[str], expected: set[str], what: str) -> list[str]:
    found = set(found)
    return [f"missing {what} {x}" for x in sorted(expected - found)] + [
        f"unexpected {what} {x}" for x in sorted(found - expected)
    ]


def problems(machine: Machine, config: GemmConfig) -> list[str]:
    """What is wrong with the machine code of `config`, in words; nothing if it is as it should be."""
    mainloop = config.schedule.mainloop
    opcodes, bases = machine.opcodes, {opcode.split(".")[0] for opcode in machine.opcodes}
    mma, per_tile = expected_mma(config)
    found = _difference([x for x in opcodes if _MMA.search(x.split(".")[0])], {mma}, "MMA")
    if not found and opcodes[mma] % per_tile:
        found.append(f"{opcodes[mma]} times {mma}, not a multiple of {per_tile}")
    found += _difference(bases & set(_COPIES), _expected_copies(config), "copy")
    found += [f"missing {x}" for x in sorted(_EXPECTED_OTHERS[mainloop] - bases)]
    if any("MULTICAST" in opcode for opcode in opcodes) != _shares_a(config):
        found.append("missing multicast" if _shares_a(config) else "unexpected multicast")
    if local := machine.count(*_LOCAL):
        found.append(f"{local} accesses to local memory")
    traps = machine.count("BPT", "BRKPT")
    if traps > ALLOWED_TRAPS[mainloop]:
        found.append(f"{traps} traps, {ALLOWED_TRAPS[mainloop]} allowed")
    info, traits = machine.info, machine.traits
    if info.spill_bytes or info.stack_bytes:
        found.append(f"{info.spill_bytes} bytes spilled, {info.stack_bytes} bytes of stack")
    if warning := next((line for line in machine.log.splitlines()[1:] if _WARNING.search(line)), None):
        found.append(f"the compiler says: {warning.strip()}")
    if info.registers * traits["threads"] > 65536:
        found.append(f"{info.registers} registers for {traits['threads']} threads")
    if machine.target.rstrip("af") != config.arch.rstrip("af"):
        found.append(f"machine code for {machine.target}")
    if traits["smem_bytes"] != (size := support.smem_bytes(config)):
        found.append(f"{traits['smem_bytes']} bytes of shared memory, support.smem_bytes says {size}")
    if (tile := (traits["tile_m"], traits["tile_n"], traits["tile_k"])) != config.schedule.tile_shape:
        found.append(f"tile {tile}")
    found += [f"{name} {traits[name]}, not {x}" for name, x in _expected_traits(config).items() if traits[name] != x]
    return found


TABLE_HEADER = "regs spills  smem seconds  kernel"


def table_row(machine: Machine, config: GemmConfig) -> str:
    """A line of the table: registers a thread, bytes spilled, bytes of shared memory, seconds of nvcc, name."""
    info = machine.info
    smem = machine.traits["smem_bytes"] + info.static_smem_bytes
    return f"{info.registers:4} {info.spill_bytes:6} {smem:6} {info.seconds:7.1f}  {config.name}"
