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

# Tests of ranks and nodes mostly wait, and the others mostly compute: two cores run both at once, each for about as long.
# The report of the others is printed after that of the ranks.
slowest=(--durations=25 --durations-min=5)  # what to shorten first
ranks=(tests/cluster tests/distributed tests/crash)
report="$(mktemp)"
python -m pytest "${slowest[@]}" "${ranks[@]/#/--ignore=}" >"$report" 2>&1 </dev/null &
others=$!
trap 'kill "$others" 2>/dev/null || true; rm -f "$report"' EXIT
python -m pytest "${slowest[@]}" "${ranks[@]}" || failed+=("${ranks[@]}")
wait "$others" || failed+=("the other tests")
cat "$report"
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'test.sh: failed: %s\n' "${failed[*]}"
  exit 1
fi
printf 'test.sh: all passed\n'
