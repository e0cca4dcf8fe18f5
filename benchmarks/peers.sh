#!/usr/bin/env bash
# How fast: the same work for this project and its peers, in turns on one core.
#   bash benchmarks/peers.sh [--quick] [SYSTEM...]      results/peers.json and docs/comparison.md; --quick prints its tables only
# Each system lives in an environment of its own below build/peers; none of them is needed by the package.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${GEAR_PYTHON:-.venv/bin/python}"
[[ -x "$python" ]] || { bash launch/setup.sh && python=.venv/bin/python; }
exec "$python" benchmarks/speed/run.py "$@"
