/// The parts of the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace humming_cutlass {

/// Packing, unpacking and dequantization on the host (host.cpp).
void bind_host(nanobind::module_& module);

/// Loading and launching kernels (cuda.cpp), and the translation of C++ errors to the classes of errors.py.
void bind_cuda(nanobind::module_& module);

/// Calls that were made before, repeated with nothing but the launch (launches.cpp). After `bind_cuda`.
void bind_launches(nanobind::module_& module);

}  // namespace humming_cutlass
