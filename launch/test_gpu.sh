#!/usr/bin/env bash
# All checks that need a GPU: every op on the card against the reference, bit for bit. With arguments: pytest with them.
# On a machine without a network: PIP_NO_INDEX=1 PIP_FIND_LINKS=<a folder of wheels> bash launch/test_gpu.sh
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash launch/setup.sh
source launch/env.sh

if ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  printf 'test_gpu.sh: error: torch sees no CUDA device; launch/test.sh has the checks that need none\n' >&2
  exit 1
fi
if [ "$#" -gt 0 ]; then exec python -m pytest "$@"; fi
exec python -m pytest tests/gpu tests/equivalence tests/unit/test_cuda_compile.py
