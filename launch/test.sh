#!/usr/bin/env bash
# Everything that must hold before a change is merged: lint, types, and all tests. With arguments: pytest with them.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash launch/setup.sh
source launch/env.sh

if [ "$#" -gt 0 ]; then exec python -m pytest "$@"; fi

reports="$(mktemp -d)"
slowest=(--durations=25 --durations-min=5)  # what to shorten first
# Two cores run two groups at once: whichever is free takes the next one, the longest first, so that both end at about the same
# time. The first one mostly waits (ranks and nodes), the others mostly compute; the second has every test that is in none of those
# that are named. Reports of the second core are printed at the end.
units="$(echo tests/unit/{actors,batching,checkpoint,cli,config,data,device,distributed})"
groups=("tests/cluster tests/distributed tests/crash tests/examples/test_examples.py" "$units" tests/equivalence tests/unit/ops tests/property)
read -ra named <<<"${groups[*]}"
groups=("${groups[0]}" "tests ${named[*]/#/--ignore=}" "${groups[@]:1}")

take_groups() {
  local number words
  for number in "${!groups[@]}"; do
    mkdir "$reports/$number" 2>/dev/null || continue  # the other core has it
    read -ra words <<<"${groups[number]}"
    python -m pytest "${slowest[@]}" "${words[@]}" || printf '%s\n' "${groups[number]}" >>"$reports/failed"
  done
}

{ ruff check . && mypy || printf 'ruff or mypy\n' >>"$reports/failed"; } >"$reports/lint" 2>&1 </dev/null &
lint=$!
take_groups >"$reports/others" 2>&1 </dev/null &
others=$!
trap 'kill "$lint" "$others" 2>/dev/null || true; rm -rf "$reports"' EXIT
take_groups
wait
cat "$reports/lint" "$reports/others"
if [ -e "$reports/failed" ]; then
  printf 'test.sh: failed: %s\n' "$(tr '\n' ' ' <"$reports/failed")"
  exit 1
fi
printf 'test.sh: all passed\n'
