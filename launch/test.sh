#!/usr/bin/env bash
# Everything that must hold before a change is merged: lint, types, and all tests. With arguments: pytest with them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash launch/setup.sh
source launch/env.sh

if [ "$#" -gt 0 ]; then exec python -m pytest "$@"; fi

failed=()
reports="$(mktemp -d)"
slowest=(--durations=25 --durations-min=5)  # what to shorten first
# Tests of ranks and nodes mostly wait, and the others mostly compute: two cores run both at once, each for about as long,
# and lint and types beside them. The reports of these are printed after that of the ranks.
examples=(tests/examples/test_{cartpole_example,ddp_example,parallel_examples}.py)
ranks=(tests/cluster tests/distributed tests/crash "${examples[@]}")
{ bad=0; ruff check . || bad=1; mypy || bad=1; exit "$bad"; } >"$reports/lint" 2>&1 </dev/null &
lint=$!
python -m pytest "${slowest[@]}" "${ranks[@]/#/--ignore=}" >"$reports/others" 2>&1 </dev/null &
others=$!
trap 'kill "$lint" "$others" 2>/dev/null || true; rm -rf "$reports"' EXIT
python -m pytest "${slowest[@]}" "${ranks[@]}" || failed+=("${ranks[@]}")
wait "$lint" || failed+=("ruff or mypy")
wait "$others" || failed+=("the other tests")
cat "$reports/lint" "$reports/others"
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'test.sh: failed: %s\n' "${failed[*]}"
  exit 1
fi
printf 'test.sh: all passed\n'
