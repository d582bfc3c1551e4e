#!/usr/bin/env bash
# Builds the peer cutlass_example_55 for the benchmark; takes a few minutes.
#
#   bench/contenders/build.sh <CUTLASS source folder> <output .so>
#
# The folder has include/ and tools/util/include/, as a checkout of CUTLASS 4.2 or the nvidia-cutlass wheel's
# cutlass_library/source. NVCC names the compiler. Then: export HUMMING_CUTLASS_EXAMPLE_55=<output .so>
set -euo pipefail
if [ $# -ne 2 ] || [ ! -d "$1/include/cutlass" ] || [ ! -d "$1/tools/util/include" ]; then
  echo "usage: $0 <CUTLASS source folder, with include/ and tools/util/include/> <output .so>" >&2
  exit 2
fi
exec "${NVCC:-nvcc}" -std=c++17 -O3 -DNDEBUG -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr \
  -Xcompiler=-fPIC,-fvisibility=hidden -shared -I"$1/include" -I"$1/tools/util/include" \
  -o "$2" "$(dirname "$0")/cutlass_example_55.cu"
