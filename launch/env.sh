# Sourced by the other scripts after setup.sh: the environment's programs, and settings of the machine.
# shellcheck shell=bash
PATH="${VIRTUAL_ENV:-$root/.venv}/bin:$PATH"
export PATH
# Ranks share the machine's cores; thread pools of busy ranks starve each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ -z "${DS_ACCELERATOR:-}" ] && [ "$(python -c 'import torch; print(torch.cuda.device_count())')" -lt "${ranks:-1}" ]; then
  export DS_ACCELERATOR=cpu
fi
