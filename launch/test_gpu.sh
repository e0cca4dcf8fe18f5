#!/usr/bin/env bash
# All checks that need a GPU, in stages of less than nine minutes.
#
#   bash launch/test_gpu.sh A|B|C|D|F|M... [--out DIR] [--cache DIR] [--dry-run]
#
#   A  facts of the machine, both builds, ops against the reference, figures, captured and compiled steps
#   B  equivalence in 4 processes, host placement, transfer ways, two ranks on one card, examples
#   C  compute-sanitizer, profiles by ncu, the figures once more, the Hopper job
#   D  tables of other systems and captured agents of LeanRL and CleanRL beside this project's
#   F  wrong indices: each ends a process of its own, whose errors name op and index
#   M  order of memory: draws replayed 100,000 times beside a busy kernel, compared with the CPU
#
# Results are JSON in the folder that --out names, written after every step. Those that the docs are generated from are
# in its folder results/; `python benchmarks/gpu_results.py DIR` takes them into the checkout. A step that fails does not end a stage;
# the exit code is 1 then. --dry-run needs no GPU. Python is the first one whose torch sees a CUDA device: that of the
# active environment, of .venv, python3, python. It is not changed: packages that it lacks go into the folder of
# --cache, from the network or with PIP_NO_INDEX=1 PIP_FIND_LINKS=<a folder of wheels> (docs/how-to/gpu-checks.md).
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

die() { printf 'test_gpu.sh: error: %s\n' "$*" >&2; exit 1; }

sees='import sys, torch
sys.exit(sys.version_info < (3, 10) or not torch.cuda.is_available())'
found='no CUDA device: no torch that is here sees one; launch/setup.sh makes .venv with one, --dry-run needs no device'
for argument in "$@"; do
  if [ "$argument" = --dry-run ]; then
    sees='import sys, torch
sys.exit(sys.version_info < (3, 10))'
    found='no Python >= 3.10 with torch; launch/setup.sh makes one'
  fi
done

for python in "${VIRTUAL_ENV:-$root/.venv}/bin/python" "$root/.venv/bin/python" "$(command -v python3 || true)" \
  "$(command -v python || true)"; do
  if [ -x "$python" ] && "$python" -c "$sees" 2>/dev/null; then
    exec "$python" "$root/launch/gpu_stages.py" "$@"
  fi
done
die "$found"
