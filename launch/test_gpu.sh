#!/usr/bin/env bash
# All checks that need a GPU: every op on the GPU against the reference, bit for bit; the Hopper job in both placements,
# with its batches, its return and gear_sample()'s share of a step; then every kernel under compute-sanitizer, which
# finds accesses outside of memory and lanes that miss a collective. With arguments: pytest with them.
#
# A torch that sees a CUDA device is used where it is: in the active environment, in .venv, or in that of the python3
# or python on the PATH, over whose packages .venv-gpu is made. Otherwise one is installed into .venv.
# On a machine without a network: PIP_NO_INDEX=1 PIP_FIND_LINKS=<a folder of wheels> bash launch/test_gpu.sh
# (docs/how-to/gpu.md describes how to fill the folder)
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

say() { printf 'test_gpu.sh: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

sees_cuda() {
  [ -x "$1" ] && "$1" -c 'import sys, torch
sys.exit(sys.version_info < (3, 10) or not torch.cuda.is_available())' 2>/dev/null
}

# The first interpreter whose torch sees a CUDA device.
find_python() {
  local candidate
  for candidate in "${VIRTUAL_ENV:-$root/.venv}/bin/python" "$root/.venv-gpu/bin/python" \
    "$(command -v python3)" "$(command -v python)"; do
    if sees_cuda "$candidate"; then
      printf '%s' "$candidate"
      return
    fi
  done
  return 1
}

# Before anything is installed. The places are those that torch searches: CUDA_HOME, the PATH, /usr/local/cuda.
need_nvcc() {
  local home="${CUDA_HOME:-${CUDA_PATH:-}}" version
  if [ -n "$home" ]; then
    [ -x "$home/bin/nvcc" ] || die "CUDA_HOME is $home, which has no bin/nvcc; set it to a CUDA toolkit, or unset it"
  elif ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
    version="$("${1:-false}" -c 'import torch; print("", torch.version.cuda)' 2>/dev/null || true)"
    die "there is no nvcc to build the kernels with; install the CUDA$version toolkit that torch is built for, and set" \
      "CUDA_HOME to it"
  fi
}

set_up() {
  local machine
  if machine="$(find_python)"; then
    need_nvcc "$machine"
    case "$machine" in
      "${VIRTUAL_ENV:-$root/.venv}"/*) bash launch/setup.sh --for-gpu ;;
      *)
        export VIRTUAL_ENV="$root/.venv-gpu"
        bash launch/setup.sh --for-gpu "$machine"
        ;;
    esac
  else
    nvidia-smi -L >/dev/null 2>&1 ||
      die "no CUDA device: nvidia-smi names none, and no torch that is here sees one; launch/test.sh has the checks" \
        "that need none"
    need_nvcc
    bash launch/setup.sh --for-gpu
  fi
}

# The tool lies beside nvcc, or beside the nvcc that a wrapper script calls.
find_sanitizer() {
  local home
  home="$(python -c 'from deepspeed_gear.ops.toolchain import cuda_home; print(cuda_home() or "")')"
  if [ -n "$home" ] && [ -x "$home/bin/compute-sanitizer" ]; then
    printf '%s' "$home/bin/compute-sanitizer"
  else
    command -v compute-sanitizer
  fi
}

# In some containers the tool refuses the device, and fails with any program. Prints why; fails where it works.
refusal() {
  local output
  if output="$("$1" --tool memcheck --error-exitcode 9 --report-api-errors no \
    python -c 'import torch; assert int(torch.arange(9, device="cuda").sum()) == 36' 2>&1)" &&
    [[ "$output" != *"Device not supported"* ]]; then
    return 1
  fi
  output="$(grep -m 1 -E 'Device not supported|Internal Sanitizer Error|rror:' <<<"$output" || tail -n 1 <<<"$output")"
  printf '%s' "${output#========= }"
}

# Runs every kernel once, and copies between all alignments. Without torch's cache each tensor has its own allocation,
# so that accesses beside it are found. API errors are not reported: torch makes calls that a driver may refuse.
sanitize() {
  say "compute-sanitizer --tool $2"
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$1" --tool "$2" --error-exitcode 9 --report-api-errors no \
    python -m pytest -q -p no:cacheprovider tests/gpu -m sanitize
}

set_up
source launch/env.sh
sees_cuda "$(command -v python)" || die "the torch of $(command -v python) sees no CUDA device; install a CUDA build" \
  "there, or remove that environment"
# The build runs here, outside of the tests' time limits.
python -c 'import sys
from deepspeed_gear.errors import GearError
from deepspeed_gear.ops import load_backend
try:
    load_backend("cuda")
except GearError as error:
    sys.exit(f"test_gpu.sh: error: {error}")'
if [ "$#" -gt 0 ]; then exec python -m pytest "$@"; fi

failed=()
python -m pytest tests/gpu tests/equivalence tests/unit/test_cuda_compile.py || failed+=(pytest)
if ! sanitizer="$(find_sanitizer)"; then
  say "no compute-sanitizer beside nvcc or on the PATH: memory and races are not checked (the CUDA toolkit has it)"
elif why="$(refusal "$sanitizer")"; then
  say "compute-sanitizer does not work here ($why): memory and races are not checked"
else
  # racecheck covers only shared memory: that of the one kernel that uses some, which places rows in a ring.
  for tool in memcheck racecheck synccheck; do
    sanitize "$sanitizer" "$tool" || failed+=("$tool")
  done
fi
[ "${#failed[@]}" -eq 0 ] || say "failed: ${failed[*]}"
exit "${#failed[@]}"
