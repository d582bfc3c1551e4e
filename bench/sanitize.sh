#!/usr/bin/env bash
# compute-sanitizer over the launches of bench/sanitize.py: out-of-bounds and misaligned accesses, races in shared memory.
#
#   bench/sanitize.sh                    # memcheck racecheck
#   bench/sanitize.sh memcheck synccheck
#
# Logs go to $OUT (default ./out). Exit status: 0 clean, 1 findings, 2 no compute-sanitizer. It is searched in
# $COMPUTE_SANITIZER, PATH, $CUDA_HOME/bin and /usr/local/cuda/bin.
set -euo pipefail
tools=${*:-memcheck racecheck}
for tool in $tools; do
  case $tool in
    memcheck | racecheck | synccheck | initcheck) ;;
    *) echo "sanitize.sh: got tool '$tool'; allowed: memcheck, racecheck, synccheck, initcheck" >&2; exit 2 ;;
  esac
done
cd "$(dirname "$0")/.."
out=${OUT:-$PWD/out}
python=${PYTHON:-python3}
mkdir -p "$out"

sanitizer=
for candidate in "${COMPUTE_SANITIZER:-}" "$(command -v compute-sanitizer || true)" \
  "${CUDA_HOME:+$CUDA_HOME/bin/compute-sanitizer}" /usr/local/cuda/bin/compute-sanitizer; do
  if [ -n "$candidate" ] && [ -x "$candidate" ]; then
    sanitizer=$candidate
    break
  fi
done
if [ -z "$sanitizer" ]; then
  echo "sanitize.sh: got no compute-sanitizer; allowed: COMPUTE_SANITIZER, PATH, CUDA_HOME/bin, /usr/local/cuda/bin" >&2
  exit 2
fi

"$python" bench/sanitize.py --compile-only
# Every tensor is an allocation of its own, so that memcheck sees where it ends.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1
failed=0
for tool in $tools; do
  log=$out/sanitize-$tool.txt
  started=$SECONDS
  status=0
  timeout "${SANITIZE_SECONDS:-300}" "$sanitizer" --tool "$tool" --error-exitcode 1 --print-limit 5 \
    "$python" bench/sanitize.py >"$log" 2>&1 || status=$?
  launches=$(grep -E '^[0-9]+ launches of ' "$log" | tail -1 || true)
  if [ "$status" -eq 0 ] && [ -n "$launches" ]; then
    echo "$tool: clean, $launches, $((SECONDS - started)) s"
  else
    failed=1
    [ "$status" -eq 124 ] && reason="not done in time" || reason="exit status $status"
    echo "$tool: FAILED ($reason, $((SECONDS - started)) s), $log ends with:"
    tail -40 "$log"
  fi
done
exit $failed
