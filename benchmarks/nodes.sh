#!/usr/bin/env bash
# Training and collecting from one, two and three nodes, this project against Reverb; the nodes are namespaces of this machine.
#   bash benchmarks/nodes.sh [--quick] [--rate 10gbit]      results/nodes.json and docs/comparison-nodes.md; --quick prints only
# Needs root, and iproute2, openssh-server and pdsh; Reverb lives in an environment of its own below build/peers.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${GEAR_PYTHON:-.venv/bin/python}"
[[ -x "$python" ]] || { bash launch/setup.sh && python=.venv/bin/python; }
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1
PYTHONPATH="$PWD/benchmarks:$PWD/examples:$PWD" exec "$python" -m training.run "$@"
