#!/usr/bin/env bash
# Is this checkout slower than another commit? A user's calls, both in turns on one core; about five minutes.
#   bash benchmarks/regressions.sh [COMMIT] [--only TEXT] [--json FILE]
# COMMIT is a commit, branch or tag; by default the last tag, or the commit before this one where there is no tag.
# The exit status is 1 if a row is more than 5% slower in every round, and 2 if COMMIT is unknown.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${GEAR_PYTHON:-.venv/bin/python}"
[[ -x "$python" ]] || { bash launch/setup.sh && python=.venv/bin/python; }
PYTHONPATH="$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m speed.regressions "$@"
