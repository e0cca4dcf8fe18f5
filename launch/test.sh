#!/usr/bin/env bash
# Everything that must hold before a change is merged: lint, types, and all tests.
#
#   launch/test.sh           all of it
#   launch/test.sh --quick   lint, types, and the tests of single processes that take little: about three minutes on two cores
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

reports="$(mktemp -d)"
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$reports"' EXIT
slowest=(--durations=25 --durations-min=5)  # what to shorten first
# Lanes share two cores, as a good part of some groups is waiting for ranks and nodes: a lane that is free takes the next group, the
# longest first, so that all end at about the same time. Tests that are in no group that is named are a group, too.
if [ "$quick" = 1 ]; then
  lanes=2
  folders=(batching config data engine replay sampling store writer)
  groups=("$(printf 'tests/unit/%s ' "${folders[@]:0:4}") tests/unit/test_"{docs,layering,public_names,structure}.py)
  groups=(
    "tests/unit/replay tests/unit/writer $(echo tests/unit/test_{arguments,docs,layering,public_names,structure}.py)"
    "$(echo tests/unit/{batching,config,data,engine,sampling,store})"
  )
else
  lanes=4
  groups=(
    tests/cluster
    tests/distributed
    "tests/crash tests/examples"
    tests/equivalence
    tests/unit/ops
    tests/property
    "$(echo tests/unit/{actors,batching,checkpoint,cli,config,data,device,distributed})"
  )
  read -ra named <<<"${groups[*]}"
  groups=("${groups[@]:0:3}" "tests ${named[*]/#/--ignore=}" "${groups[@]:3}")
fi

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

# One process imports torch and DeepSpeed for all that are started by the tests: tests/support/warm_python.py.
export GEAR_WARM_SERVER="$reports/warm"
python -u tests/support/warm_python.py "$GEAR_WARM_SERVER" </dev/null >/dev/null 2>"$reports/warm.log" &
server=$!
until [ -e "$GEAR_WARM_SERVER" ]; do
  kill -0 "$server" || { cat "$reports/warm.log"; exit 1; }
  sleep 0.1
done
{ ruff check . && mypy && touch "$reports/lint.passed"; } >"$reports/lint" 2>&1 </dev/null &
running=("$!")
for ((lane = 2; lane <= lanes; lane++)); do
  take_groups >"$reports/lane$lane" 2>&1 </dev/null &
  running+=("$!")
done
take_groups
for process in "${running[@]}"; do wait "$process" || true; done  # what has not passed has failed, however it ended

cat "$reports/lint" "$reports"/lane*
failed=()
if [ ! -e "$reports/lint.passed" ]; then failed+=("ruff or mypy"); fi
for number in "${!groups[@]}"; do
  if [ ! -e "$reports/$number/passed" ]; then failed+=("pytest ${groups[number]}"); fi
done

printf '\n'
if [ "$quick" = 1 ]; then printf 'test.sh: --quick left out: %s\n' "${left_out[*]}"; fi
for number in "${!groups[@]}"; do
  grep -hE '^(FAILED|ERROR) ' "$reports/$number/report" 2>/dev/null || true
done
printf 'test.sh: failed: %s\n' "${failed[@]:-nothing}"
for number in "${!groups[@]}"; do  # pytest's own last lines; a group without one has not come to its end
  grep -hE '^=+ .* in [0-9.]+s.* =+$' "$reports/$number/report" 2>/dev/null | tail -n 1 || true
done
[ "${#failed[@]}" -eq 0 ]
