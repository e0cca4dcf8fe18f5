#!/usr/bin/env bash
# Everything that must hold before a change is merged: lint, types, and all tests. With arguments: pytest with them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash launch/setup.sh
source launch/env.sh

if [ "$#" -gt 0 ]; then exec python -m pytest "$@"; fi

failed=()
ruff check . || failed+=(ruff)
mypy || failed+=(mypy)
[ "${#failed[@]}" -eq 0 ] || printf 'test.sh: failed: %s; the tests run all the same\n' "${failed[*]}" >&2
# pytest's closing line is the last one, and the exit status is of everything.
python -m pytest
exit "${#failed[@]}"
