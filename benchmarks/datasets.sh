#!/usr/bin/env bash
# Public data sets through `gear ingest`, each compared value by value with an independent read of its files.
#   bash benchmarks/datasets.sh            results/datasets.json and docs/how-to/public-data-sets.md
#   bash benchmarks/datasets.sh --page     the tables of that page only, from the committed results
# The files are miniatures in benchmarks/public_data/miniatures; nothing is downloaded.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${GEAR_PYTHON:-.venv/bin/python}"
[[ -x "$python" ]] || { bash launch/setup.sh && python=.venv/bin/python; }
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" OMP_NUM_THREADS=1
PYTHONPATH="$PWD/benchmarks:$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "$python" -m public_data.run "$@"
