#!/usr/bin/env bash
# What is right: small cases with a known answer, after public bug reports, against each system that can be installed.
#   bash benchmarks/conformance.sh [SYSTEM...]      default: all; results/conformance.json and docs/comparison-behaviour.md
#   bash benchmarks/conformance.sh --page           the tables of that page only, from the committed results
# Each system lives in an environment of its own below build/peers; none of them is needed by the package.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${GEAR_PYTHON:-.venv/bin/python}"
[[ -x "$python" ]] || { bash launch/setup.sh && python=.venv/bin/python; }
exec "$python" benchmarks/conformance/table.py "$@"
