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
# Three lanes share two cores, as a good part of the first groups is waiting for ranks and nodes: a lane that is free takes the next
# group, the longest first, so that all end at about the same time. Tests that are in no group that is named are a group, too.
# Reports of the other lanes are printed at the end.
nodes=tests/cluster
ranks="tests/distributed tests/crash tests/examples/test_examples.py"
units="$(echo tests/unit/{actors,batching,checkpoint,cli,config,data,device,distributed,frameworks})"
groups=("$nodes" "$ranks" "$units" tests/equivalence tests/unit/ops tests/property)
read -ra named <<<"${groups[*]}"
groups=("$nodes" "$ranks" "tests ${named[*]/#/--ignore=}" "${groups[@]:2}")

take_groups() {
  local number words
  for number in "${!groups[@]}"; do
    mkdir "$reports/$number" 2>/dev/null || continue  # another lane has it
    read -ra words <<<"${groups[number]}"
    python -m pytest "${slowest[@]}" "${words[@]}" || printf '%s\n' "${groups[number]}" >>"$reports/failed"
  done
}

{ ruff check . && mypy || printf 'ruff or mypy\n' >>"$reports/failed"; } >"$reports/lint" 2>&1 </dev/null &
for lane in 2 3; do take_groups >"$reports/lane$lane" 2>&1 </dev/null & done
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$reports"' EXIT
take_groups
wait
cat "$reports/lint" "$reports"/lane*
if [ -e "$reports/failed" ]; then
  printf 'test.sh: failed: %s\n' "$(tr '\n' ' ' <"$reports/failed")"
  exit 1
fi
printf 'test.sh: all passed\n'
