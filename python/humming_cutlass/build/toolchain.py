"""Finds what compiles kernels: nvcc, cmake, ninja, a host compiler and the headers."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import humming_cutlass
from humming_cutlass import errors
from humming_cutlass.build.settings import Settings

__all__ = [
    "INSTALL_COMMAND",
    "MINIMUM_VERSION",
    "Compiler",
    "Toolchain",
    "cmake_directory",
    "find_compiler",
    "find_toolchain",
    "include_directories",
]

#: The one command that adds a CUDA compiler to a Python environment, and its form for a source tree.
INSTALL_COMMAND = 'pip install "humming-cutlass[cuda]" (in a checkout: pip install ".[cuda]")'

#: The first CUDA release whose compiler knows a GPU.
MINIMUM_VERSION: dict[str, tuple[int, int]] = {
    "sm_75": (11, 0),  # C++17 in device code
    "sm_80": (11, 0),
    "sm_86": (11, 1),
    "sm_87": (11, 4),
    "sm_88": (13, 0),
    "sm_89": (11, 8),
    "sm_90": (11, 8),
    "sm_90a": (12, 0),
    "sm_100": (12, 8),
    "sm_100a": (12, 8),
    "sm_100f": (12, 9),
    "sm_103": (12, 9),
    "sm_103a": (12, 9),
    "sm_103f": (12, 9),
    "sm_110": (13, 0),
    "sm_110a": (13, 0),
    "sm_110f": (13, 0),
    "sm_120": (12, 8),
    "sm_120a": (12, 8),
    "sm_120f": (12, 9),
    "sm_121": (12, 9),
    "sm_121a": (12, 9),
    "sm_121f": (12, 9),
}


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A CUDA compiler.

    Attributes:
        nvcc: its path.
        version: its release, such as (13, 0).
        version_text: its release and build, such as `release 13.0, V13.0.88`; part of the cache key.
        origin: how it was found: `CUDACXX`, `CUDA_HOME`, `PATH` or `pip`.
    """

    nvcc: Path
    version: tuple[int, int]
    version_text: str
    origin: str


@dataclasses.dataclass(frozen=True)
class Toolchain(Compiler):
    """A compiler and what it takes to run it.

    Attributes:
        cmake: the cmake program.
        ninja: the ninja program.
        include_directories: our headers, then CUTLASS's.
        options: flags that this machine's compiler needs, such as `-ccbin`.
    """

    cmake: Path
    ninja: Path
    include_directories: tuple[Path, ...]
    options: tuple[str, ...] = ()


# --- Where our own files lie -----------------------------------------------------------------------------------------


def _source_roots() -> list[Path]:
    """Repositories whose `python/` folder the package is imported from."""
    roots = [Path(entry).parents[1] for entry in humming_cutlass.__path__]
    return [root for root in roots if (root / "cpp" / "include" / "humming_cutlass").is_dir()]


def _is_cutlass(directory: Path) -> bool:
    return (directory / "cutlass" / "cutlass.h").is_file() and (directory / "cute" / "tensor.hpp").is_file()


def _package_directory(name: str) -> list[Path]:
    """The folders of an installed package, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(entry) for entry in spec.submodule_search_locations]


def include_directories(*, settings: Settings | None = None) -> list[Path]:
    """Returns the include directories of kernels: our headers, then CUTLASS's.

    A source tree's own headers come before installed copies, so that an editable install compiles what is edited.

    Raises:
        ToolchainError: the headers are not there, which means a damaged installation.
    """
    settings = settings or Settings.from_environment()
    roots = _source_roots()
    installed = [Path(entry) / "include" for entry in humming_cutlass.__path__]

    ours = [root / "cpp" / "include" for root in roots] + installed
    for own in ours:
        if (own / "humming_cutlass" / "device" / "arguments.hpp").is_file():
            break
    else:
        raise errors.ToolchainError(
            errors.explain(
                "humming_cutlass headers",
                "none in " + ", ".join(map(str, ours)),
                "an installed package or a source tree",
                "pip install --force-reinstall humming-cutlass",
            )
        )

    if settings.cutlass_dir is not None:
        candidates = [Path(settings.cutlass_dir) / "include", Path(settings.cutlass_dir)]
    else:
        candidates = [entry / "humming_cutlass_third_party" for entry in installed]
        candidates += [root / "third_party" / "cutlass" / "include" for root in roots]
        candidates += [entry / "source" / "include" for entry in _package_directory("cutlass_library")]
    for cutlass in candidates:
        if _is_cutlass(cutlass):
            return [own, cutlass]
    raise errors.ToolchainError(
        errors.explain(
            "HUMMING_CUTLASS_CUTLASS_DIR" if settings.cutlass_dir is not None else "CUTLASS headers",
            "no cutlass/cutlass.h in " + ", ".join(map(str, candidates)),
            "an installed package, HUMMING_CUTLASS_CUTLASS_DIR set to a CUTLASS directory, a third_party/cutlass",
        )
    )


def cmake_directory() -> Path:
    """Returns the folder of our CMake modules, for `CMAKE_MODULE_PATH` or `humming_cutlass_DIR`.

    Raises:
        ToolchainError: the folder is not there, which means a damaged installation.
    """
    candidates = [root / "cmake" for root in _source_roots()]
    candidates += [Path(entry) / "share" / "cmake" / "humming_cutlass" for entry in humming_cutlass.__path__]
    for candidate in candidates:
        if (candidate / "HummingCutlassKernels.cmake").is_file():
            return candidate
    raise errors.ToolchainError(
        errors.explain(
            "HummingCutlassKernels.cmake",
            "none in " + ", ".join(map(str, candidates)),
            "an installed package or a source tree",
            "pip install --force-reinstall humming-cutlass",
        )
    )


# --- Programs --------------------------------------------------------------------------------------------------------


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _nvcc_candidates(settings: Settings) -> list[tuple[str, Path]]:
    """Every nvcc in the order of preference, with how it was found."""
    if settings.cudacxx is not None:
        # Named by the user: binding, as for CMake.
        found = shutil.which(settings.cudacxx, path=settings.path)
        return [("CUDACXX", Path(found or settings.cudacxx))]
    candidates: list[tuple[str, Path]] = []
    if settings.cuda_home is not None:
        candidates.append(("CUDA_HOME", Path(settings.cuda_home) / "bin" / "nvcc"))
    candidates += [("PATH", Path(entry) / "nvcc") for entry in settings.path.split(os.pathsep) if entry]
    for entry in _package_directory("nvidia"):
        # cu13/bin since CUDA 13, cuda_nvcc/bin before; the newest first.
        folders = sorted(entry.glob("cu[0-9]*"), key=lambda folder: int(re.sub(r"\D", "", folder.name)), reverse=True)
        candidates += [("pip", folder / "bin" / "nvcc") for folder in [*folders, entry / "cuda_nvcc"]]
    unique: dict[Path, str] = {}
    for origin, path in candidates:
        if _is_program(path):
            unique.setdefault(path, origin)
    return [(origin, path) for path, origin in unique.items()]


def _cmake(settings: Settings) -> Path | None:
    for entry in _package_directory("cmake"):
        program = entry / "data" / "bin" / "cmake"
        if _is_program(program):
            return program
    found = shutil.which("cmake", path=settings.path)
    return None if found is None else Path(found)


def _ninja(settings: Settings) -> Path | None:
    folders = [entry.parent / "bin" for entry in _package_directory("ninja")]
    if _package_directory("ninja"):
        folders += [Path(sysconfig.get_path("scripts")), Path(sys.executable).parent]
    for folder in folders:
        if _is_program(folder / "ninja"):
            return folder / "ninja"
    found = shutil.which("ninja", path=settings.path)
    return None if found is None else Path(found)


def _host_compiler_options(settings: Settings) -> tuple[str, ...] | None:
    """The flags that give nvcc a host compiler, or None without one. nvcc itself looks for gcc only."""
    if os.environ.get("NVCC_CCBIN") or shutil.which("gcc", path=settings.path):
        return ()
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        found = shutil.which(name, path=settings.path) if name else None
        if found is not None:
            return ("-ccbin", found)
    return None


# --- The compiler's version ------------------------------------------------------------------------------------------

_VERSION = re.compile(r"release (\d+)\.(\d+)[^\n]*")
_known_versions: dict[tuple[tuple[str, int, int], ...], str] = {}


def _stamp(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return (str(path), status.st_size, status.st_mtime_ns)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{error}"
    return done.stdout.decode(errors="replace")


def _nvcc_version(nvcc: Path, memo: Path | None) -> str:
    """Returns nvcc's release line, such as `release 13.0, V13.0.88`, or what it said instead.

    A warm process must run no program, so the answer is kept in the file `memo`, together with size and time of the
    files it depends on: nvcc itself and, where that is a wrapper script, the program behind it.
    """
    remembered: dict[str, dict[str, object]] = {}
    if memo is not None:
        try:
            loaded = json.loads(memo.read_text())
            remembered = loaded if isinstance(loaded, dict) else {}
        except (OSError, ValueError):
            remembered = {}
    entry = remembered.get(str(nvcc))
    if isinstance(entry, dict):
        try:
            stamps = [[str(path), int(size), int(time)] for path, size, time in entry["stamps"]]  # type: ignore[attr-defined]
            if stamps and all(list(_stamp(Path(str(path)))) == [path, size, time] for path, size, time in stamps):
                return str(entry["version"])
        except (OSError, KeyError, TypeError, ValueError):
            pass

    first = _stamp(nvcc)
    files = [nvcc]
    with nvcc.open("rb") as file:
        is_script = file.read(2) == b"#!"
    if is_script:
        here = re.search(
            r"^#\$ _HERE_=(.+)$", _run([str(nvcc), "--dryrun", "-E", "-x", "cu", os.devnull]), re.MULTILINE
        )
        if here and _is_program(Path(here[1]) / "nvcc"):
            files.append(Path(here[1]) / "nvcc")
    key = (first, *(_stamp(file) for file in files[1:]))
    if key in _known_versions:
        return _known_versions[key]
    output = _run([str(nvcc), "--version"])
    match = _VERSION.search(output)
    if match is None:
        return output.strip()[-500:] or "no output"
    version = _known_versions[key] = match[0].strip()
    if memo is not None:
        remembered[str(nvcc)] = {"stamps": [list(stamp) for stamp in key], "version": version}
        _write_memo(memo, remembered)
    return version


def _write_memo(memo: Path, content: dict[str, dict[str, object]]) -> None:
    """Replaces the memo atomically; losing it only costs time, so a failure is no error."""
    try:
        descriptor, name = tempfile.mkstemp(dir=memo.parent, prefix=memo.name)
    except OSError:
        return
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        os.replace(name, memo)
    except OSError:
        Path(name).unlink(missing_ok=True)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def find_compiler(arch: str | None = None, *, settings: Settings | None = None, memo: Path | None = None) -> Compiler:
    """Finds the CUDA compiler alone, which is all that looking into the cache takes.

    It is taken from `CUDACXX` (binding when set), `CUDA_HOME`, `PATH`, then the pip wheels of the extra `[cuda]`; the
    first one that can compile for `arch` wins.

    Args:
        arch: the GPU to compile for, such as `sm_90a`; None takes the first working compiler.
        settings: default: the environment.
        memo: a file that remembers compiler versions between processes; None asks the compiler each time.

    Raises:
        ToolchainError: there is none, or none that is new enough for `arch`; the message lists what was searched and
            the one command that adds one.
    """
    settings = settings or Settings.from_environment()
    needed = (11, 0) if arch is None else MINIMUM_VERSION.get(arch, (11, 0))
    rejected: list[str] = []
    too_old = False
    for origin, nvcc in _nvcc_candidates(settings):
        if not _is_program(nvcc):
            rejected.append(f"{nvcc} ({origin}): not a program")
            continue
        text = _nvcc_version(nvcc, memo)
        match = _VERSION.search(text)
        if match is None:
            rejected.append(f"{nvcc} ({origin}): does not tell its version: {text}")
            continue
        version = (int(match[1]), int(match[2]))
        if version < needed:
            too_old = True
            rejected.append(f"{nvcc} ({origin}): CUDA {_text(version)} is too old")
            continue
        return Compiler(nvcc=nvcc, version=version, version_text=text, origin=origin)
    if too_old:
        allowed = f"CUDA {_text(needed)} or newer, which {arch or 'every kernel'} needs"
    else:
        allowed = "nvcc in CUDACXX, CUDA_HOME/bin, PATH or the pip wheels"
    got = "; ".join(rejected) or f"none ({_searched(settings)})"
    raise errors.ToolchainError(errors.explain("CUDA compiler", got, allowed, INSTALL_COMMAND))


def find_toolchain(arch: str | None = None, *, settings: Settings | None = None, memo: Path | None = None) -> Toolchain:
    """Finds all that compiling takes: `find_compiler`, cmake and ninja (pip's first, then `PATH`), a host compiler.

    Args:
        arch: the GPU to compile for, such as `sm_90a`; None takes the first working compiler.
        settings: default: the environment.
        memo: a file that remembers compiler versions between processes; None asks the compiler each time.

    Raises:
        ToolchainError: a tool is missing or too old; the message lists what was searched and what adds it.
    """
    settings = settings or Settings.from_environment()
    compiler = find_compiler(arch, settings=settings, memo=memo)
    cmake, ninja = _cmake(settings), _ninja(settings)
    if cmake is None or ninja is None:
        missing = " and ".join(name for name, found in (("cmake", cmake), ("ninja", ninja)) if found is None)
        raise errors.ToolchainError(
            errors.explain(
                missing,
                f"none (searched the Python environment and PATH={settings.path})",
                "cmake 3.21 or newer and ninja, from pip or PATH",
                INSTALL_COMMAND,
            )
        )
    options = _host_compiler_options(settings)
    if options is None:
        raise errors.ToolchainError(
            errors.explain(
                "host C++ compiler",
                f"none (searched NVCC_CCBIN, CXX and gcc, g++, c++, clang++ in PATH={settings.path})",
                "one that nvcc can use",
                "the system's g++ package",
            )
        )
    return Toolchain(
        **dataclasses.asdict(compiler),
        cmake=cmake,
        ninja=ninja,
        include_directories=tuple(include_directories(settings=settings)),
        options=options,
    )


def _searched(settings: Settings) -> str:
    return (
        f"searched CUDACXX={settings.cudacxx or 'unset'}, CUDA_HOME={settings.cuda_home or 'unset'}, "
        f"PATH={settings.path}, the pip packages nvidia/cu*/bin and nvidia/cuda_nvcc/bin"
    )
