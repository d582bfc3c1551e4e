#!/usr/bin/env bash
# Everything that needs a GPU, in one go: build, test, grid, bench. Results go to $OUT (default ./out).
#
#   bench/on_gpu.sh                       # build test grid bench
#   bench/on_gpu.sh build types edges     # some sections, in this order; types and edges are more suites of the benchmark,
#                                         # sanitize runs compute-sanitizer, counters Nsight Compute
#   BENCH_ARGUMENTS="--m 1,16" GRID_ARGUMENTS="--types int4" bench/on_gpu.sh build grid bench
#   TYPES_ARGUMENTS="--weights int2,int3" EDGES_ARGUMENTS="--m 17" COUNTERS_ARGUMENTS="--points 8192x8192:1"
#   TEST_ARGUMENTS="-n 4 --dist loadfile" (needs pytest-xdist) likewise
#
# Run from the repository's root. Works without a network: where .carry/wheels holds wheels, what the machine lacks is
# installed from there; where .carry/cutlass holds a CUTLASS checkout (with include/), it is used instead of the wheel;
# where .carry/cutlass_example_55.so is what contenders/build.sh makes, it is timed too; where .carry/kernels.tar.gz
# holds a cache of kernels (of a machine without a GPU: bench/grid.py --compile-only sm_90a fills one), they are taken.
# build installs into a folder of its own (.carry/site, kept between calls), not into the machine's Python.
set -euo pipefail
sections=${*:-build test grid bench}
for section in $sections; do
  case $section in
    build | test | grid | bench | types | edges | sanitize | counters) ;;
    *)
      allowed="build, test, grid, bench, types, edges, sanitize, counters"
      echo "on_gpu.sh: got section '$section'; allowed: $allowed" >&2
      exit 2
      ;;
  esac
done
cd "$(dirname "$0")/.."
root=$PWD
export OUT=${OUT:-$root/out}
site=$root/.carry/site
mkdir -p "$OUT" "$site"
# Tests run from the repository; what is tested is the installed package.
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
export HUMMING_CUTLASS_CACHE_DIR=${HUMMING_CUTLASS_CACHE_DIR:-$root/.carry/kernels}
if [ -f "$root/.carry/kernels.tar.gz" ] && [ ! -d "$HUMMING_CUTLASS_CACHE_DIR" ]; then
  mkdir -m 700 -p "$HUMMING_CUTLASS_CACHE_DIR"
  tar xzf "$root/.carry/kernels.tar.gz" -C "$HUMMING_CUTLASS_CACHE_DIR"
fi
if [ -d "$root/.carry/cutlass" ]; then
  export HUMMING_CUTLASS_CUTLASS_DIR=$root/.carry/cutlass
fi
if [ -f "$root/.carry/cutlass_example_55.so" ]; then
  export HUMMING_CUTLASS_EXAMPLE_55=$root/.carry/cutlass_example_55.so
fi
python=${PYTHON:-python3}

# Whether the Python package of a wheel is there already: the machine's own torch and numpy stay in place.
installed() {
  "$python" -c "import sys; from importlib import metadata; metadata.version(sys.argv[1])" "$1" 2>/dev/null
}

build() {
  local wheel missing=()
  for wheel in .carry/wheels/*.whl; do
    if [ -e "$wheel" ] && ! installed "$(basename "$wheel" | cut -d- -f1)"; then
      missing+=("$wheel")
    fi
  done
  if [ ${#missing[@]} -gt 0 ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "${missing[@]}"
  fi
  rm -rf "$site"/humming_cutlass "$site"/humming_cutlass-*.dist-info
  "$python" -m pip install -q --no-build-isolation --no-deps --no-index --target "$site" . 2>&1 | tail -20
  "$python" -m humming_cutlass info | tee "$OUT/info.txt"
}

run_test() {
  # shellcheck disable=SC2086  # the arguments are words
  "$python" -m pytest -q -p no:cacheprovider --junitxml="$OUT/pytest.xml" -m gpu ${TEST_ARGUMENTS:-} 2>&1 |
    tee "$OUT/pytest.txt"
}

# The accuracy grid: every weight type, both activations, channel, g32 and g128, six values of m.
run_grid() {
  # shellcheck disable=SC2086  # the arguments are words
  "$python" bench/grid.py --out "$OUT/grid.jsonl" ${GRID_ARGUMENTS:-} 2>&1 | tee "$OUT/grid.txt"
}

# A suite of the benchmark: its name, then arguments. Rows are written one by one: what is interrupted keeps what it has.
suite() {
  local name=$1
  shift
  "$python" -m humming_cutlass bench --suite "$name" --device cuda --json "$OUT/$name.jsonl" "$@" 2>&1 |
    tee "$OUT/$name.txt"
}

run_bench() {
  local status=0
  "$python" -m humming_cutlass demo --device cuda | tee "$OUT/demo.txt" || status=1
  # shellcheck disable=SC2086  # the arguments are words
  suite hopper ${BENCH_ARGUMENTS:-} || status=1
  "$python" -m humming_cutlass bench host --device cuda --json "$OUT/hopper.jsonl" | tee "$OUT/host.txt" || status=1
  return $status
}

# shellcheck disable=SC2086  # the arguments are words
run_types() { suite hopper-types ${TYPES_ARGUMENTS:-}; }

# shellcheck disable=SC2086  # the arguments are words
run_edges() { suite hopper-edges ${EDGES_ARGUMENTS:-}; }

run_sanitize() { bench/sanitize.sh; }

# shellcheck disable=SC2086  # the arguments are words
run_counters() { "$python" bench/counters.py ${COUNTERS_ARGUMENTS:-} --json "$OUT/counters.jsonl"; }

failed=0
for section in $sections; do
  echo "== $section" >&2
  started=$SECONDS
  case $section in
    build) build ;;  # nothing else makes sense after a failed build: set -e ends here
    *) "run_$section" || { failed=1; echo "== $section failed" >&2; } ;;
  esac
  echo "== $section took $((SECONDS - started)) s" >&2
done
exit $failed
