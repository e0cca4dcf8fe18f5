#!/usr/bin/env bash
# Everything that must hold before a change is merged: lint, types, and all tests.
#
#   launch/test.sh           all of it
#   launch/test.sh --quick   lint, types, and the cheap tests of single processes: about three minutes on two cores
#   launch/test.sh ARGS...   pytest with these arguments
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash launch/setup.sh
source launch/env.sh

quick=0
if [ "$*" = --quick ]; then
  quick=1
elif [ "$#" -gt 0 ]; then
  exec python -m pytest "$@"
fi

# Lanes share two cores: a good part of the first groups is waiting for ranks and nodes. A lane that is free takes the next group, the
# longest first, so that all end at about the same time. Of a group, the words are pytest's.
if [ "$quick" = 1 ]; then
  lanes=2
  costly=(tests/unit/{batching/test_packed_models,data/test_export,replay/test_device_transfer}.py)  # a quarter of the time
  groups=(
    "tests/unit/replay tests/unit/writer $(echo tests/unit/test_{arguments,layering,public_names,structure}.py)"
    "$(echo tests/unit/{batching,config,data,engine,sampling,store})"
  )
  groups=("${groups[@]/%/ ${costly[*]/#/--ignore=}}")
else
  lanes=4
  groups=(
    tests/cluster
    tests/distributed
    "tests/crash tests/examples"
    others
    tests/equivalence
    tests/unit/ops
    tests/property
    "$(echo tests/unit/{actors,batching,checkpoint,cli,config,data,device,distributed,frameworks})"
  )
  read -ra named <<<"${groups[*]/others/}"
  groups=("${groups[@]/#others/tests ${named[*]/#/--ignore=}}")  # tests that are in no other group, too
fi

reports="$(mktemp -d)"
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$reports"' EXIT
slowest=(--durations=25 --durations-min=5)  # what to shorten first

take_groups() {
  local number words
  for number in "${!groups[@]}"; do
    mkdir "$reports/$number" 2>/dev/null || continue  # another lane has it
    read -ra words <<<"${groups[number]}"
    if python -m pytest "${slowest[@]}" "${words[@]}" 2>&1 | tee "$reports/$number/report"; then
      touch "$reports/$number/passed"
    fi
  done
}

{ ruff check . && mypy && touch "$reports/lint.passed"; } >"$reports/lint" 2>&1 </dev/null &
running=("$!")
python tests/support/native_builds.py >"$reports/builds" 2>&1 </dev/null || { cat "$reports/builds"; exit 1; }

# One process imports torch and DeepSpeed for all that the tests start: tests/support/warm_python.py.
export GEAR_WARM_SERVER="$reports/warm"
python -u tests/support/warm_python.py "$GEAR_WARM_SERVER" </dev/null >"$reports/warm.log" 2>&1 &
server=$!
until [ -e "$GEAR_WARM_SERVER" ]; do
  kill -0 "$server" 2>/dev/null || { cat "$reports/warm.log"; exit 1; }
  sleep 0.1
done

for ((lane = 2; lane <= lanes; lane++)); do
  take_groups >"$reports/lane$lane" 2>&1 </dev/null &
  running+=("$!")
done
take_groups
for process in "${running[@]}"; do
  wait "$process" || true  # only what has left its mark has passed, however a lane has ended
done

cat "$reports/lint" "$reports"/lane*
failed=()
if [ ! -e "$reports/lint.passed" ]; then failed+=("ruff or mypy"); fi
for number in "${!groups[@]}"; do
  if [ ! -e "$reports/$number/passed" ]; then failed+=("pytest ${groups[number]}"); fi
done

printf '\n'
for number in "${!groups[@]}"; do
  grep -hE '^(FAILED|ERROR) ' "$reports/$number/report" 2>/dev/null || true
done
if [ "$quick" = 1 ]; then
  printf 'test.sh: --quick has run lint, types and pytest %s\n' "${groups[@]}"
  printf 'test.sh: it leaves out all else: ranks, nodes, crashes, examples, the command line, gateways, devices, the ops, properties\n'
fi
if [ "${#failed[@]}" -gt 0 ]; then printf 'test.sh: failed: %s\n' "${failed[@]}"; fi
for number in "${!groups[@]}"; do  # pytest's own last lines; a group without one has not come to its end
  grep -hE '^=+ .* in [0-9.]+s.* =+$' "$reports/$number/report" 2>/dev/null | tail -n 1 || true
done
[ "${#failed[@]}" -eq 0 ]
