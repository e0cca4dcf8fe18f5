#!/usr/bin/env bash
# TransferQueue (verl) over this project's storage: its own tests unchanged, kills of its processes, bytes per second.
#   bash benchmarks/transfer_queue.sh [--quick] [--json benchmarks/results/transfer_queue.json]
# TransferQueue and Ray live in an environment of their own below build/peers, which the first run makes.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${GEAR_PYTHON:-.venv/bin/python}"
[[ -x "$python" ]] || { bash launch/setup.sh && python=.venv/bin/python; }
exec "$python" benchmarks/transfer_queue_storage/run.py "$@"
