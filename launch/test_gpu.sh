#!/usr/bin/env bash
# All checks that need a GPU: every op on the card against the reference, bit for bit; the Hopper job in both placements,
# with its batches, its return and what gear_sample() takes of a step; then every kernel under compute-sanitizer, which
# finds accesses outside of memory and lanes that miss a collective. With arguments: pytest with them.
# On a machine without a network: PIP_NO_INDEX=1 PIP_FIND_LINKS=<a folder of wheels> bash launch/test_gpu.sh
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash launch/setup.sh
source launch/env.sh

say() { printf 'test_gpu.sh: %s\n' "$*" >&2; }

# The tool lies beside nvcc; where nvcc is a wrapper script, beside the one that it calls.
find_sanitizer() {
  local home
  home="$(python -c 'from deepspeed_gear.ops.toolchain import cuda_home; print(cuda_home() or "")')"
  if [ -n "$home" ] && [ -x "$home/bin/compute-sanitizer" ]; then
    printf '%s' "$home/bin/compute-sanitizer"
  else
    command -v compute-sanitizer
  fi
}

# Runs every kernel once, and copies between all alignments. Without torch's cache an allocation is what a tensor
# has, so that what lies beside it is outside. Torch asks for much that a driver refuses: its errors are its own.
sanitize() {
  say "compute-sanitizer --tool $2"
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$1" --tool "$2" --error-exitcode 9 --report-api-errors no \
    python -m pytest -q -p no:cacheprovider tests/gpu -k "equals_the_reference or rows_at_any_address"
}

if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  say "error: torch sees no CUDA device; launch/test.sh has the checks that need none"
  exit 1
fi
if [ "$#" -gt 0 ]; then exec python -m pytest "$@"; fi

failed=()
python -m pytest tests/gpu tests/equivalence tests/unit/test_cuda_compile.py || failed+=(pytest)
if sanitizer="$(find_sanitizer)"; then
  # racecheck sees shared memory alone: it watches over the one kernel that uses some, which places rows in a ring.
  for tool in memcheck racecheck synccheck; do
    sanitize "$sanitizer" "$tool" || failed+=("$tool")
  done
else
  say "no compute-sanitizer beside nvcc or on the PATH: memory and races are not checked (the CUDA toolkit has it)"
fi
[ "${#failed[@]}" -eq 0 ] || say "failed: ${failed[*]}"
exit "${#failed[@]}"
