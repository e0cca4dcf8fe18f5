#!/usr/bin/env bash
# From a fresh clone to a trained Decision Transformer: sets up, ingests the Hopper data of examples/data, trains on
# two ranks and evaluates in MuJoCo. A summary ends stderr; the last line of stdout is the result as JSON. Arguments go
# to the example.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
ranks=2
bash launch/setup.sh
source launch/env.sh

config=configs/hopper.json
# The data set's path in the config, and the splits that it uses.
mapfile -t ingest < <(python - "$config" <<'PYTHON'
import json
import sys

with open(sys.argv[1]) as file:
    data = json.load(file)["gear"]["data"]
data = {"path": data} if isinstance(data, str) else data
print(data["path"])
for name, share in data.get("split", {}).items():
    print(f"--split={name}={share}")
PYTHON
)
gear ingest --overwrite "${ingest[@]:1}" examples/data/hopper_expert.hdf5 "${ingest[0]}"
gear inspect "${ingest[0]}"

log="$(mktemp)"
port="$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
# On a CPU, DeepSpeed does not remove a buffer of 66 MiB for each rank, with the port in its name.
trap 'rm -f "$log" /dev/shm/deepspeed_allreduce_buffer_"$(id -u)"_*_"$port"_*' EXIT
# "error": the launcher's only warning is that there is no hostfile; ranks write their own.
deepspeed --log_level error --num_gpus "$ranks" --master_port "$port" examples/hopper.py --config "$config" "$@" |
  tee "$log"
# Should anything be written after the result, it is printed once more.
result='^\{.*"return_after".*\}$'
tail -n 1 "$log" | grep -qE "$result" || grep -E "$result" "$log" | tail -n 1 | grep . ||
  { echo "quickstart: error: the example printed no result" >&2; exit 1; }
