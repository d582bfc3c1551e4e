"""Compiles kernels on first use and keeps them: toolchain, CMake project, cache.

Nothing here runs, and no directory is created, before the first kernel is asked for.
"""

from humming_cutlass.build.cache import KernelInfo, cache_directory, kernel_info
from humming_cutlass.build.compile import compile_kernels, export_kernels, kernel_key
from humming_cutlass.build.settings import ENVIRONMENT
from humming_cutlass.build.source import KernelSource
from humming_cutlass.build.toolchain import (
    INSTALL_COMMAND,
    Compiler,
    Toolchain,
    cmake_directory,
    find_compiler,
    find_toolchain,
    include_directories,
)

__all__ = [
    "ENVIRONMENT",
    "INSTALL_COMMAND",
    "Compiler",
    "KernelInfo",
    "KernelSource",
    "Toolchain",
    "cache_directory",
    "cmake_directory",
    "compile_kernels",
    "export_kernels",
    "find_compiler",
    "find_toolchain",
    "include_directories",
    "kernel_info",
    "kernel_key",
]
