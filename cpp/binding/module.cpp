/// The extension module `humming_cutlass._C`. Importing it opens no library and touches no GPU.
#include "bindings.hpp"

NB_MODULE(_C, module) {
  module.doc() = "Host functions and the CUDA runtime of humming_cutlass.";
  humming_cutlass::bind_host(module);
  humming_cutlass::bind_cuda(module);
  humming_cutlass::bind_launches(module);
}
