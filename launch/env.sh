# Sourced by bash or zsh after setup.sh, from any folder: the environment's programs, and settings of the machine.
# shellcheck shell=bash
if [ -n "${ZSH_VERSION:-}" ]; then
  eval 'gear_root="${(%):-%x}"' # this file, in a form that bash does not parse
else
  gear_root="${BASH_SOURCE[0]}"
fi
gear_root="$(CDPATH='' cd -- "$(dirname -- "$gear_root")/.." && pwd)"
if ! [ -x "${VIRTUAL_ENV:-$gear_root/.venv}/bin/python" ]; then
  printf 'env.sh: error: %s must have an environment; run: bash %s/launch/setup.sh\n' \
    "${VIRTUAL_ENV:-$gear_root/.venv}" "$gear_root" >&2
  return 1
fi
PATH="${VIRTUAL_ENV:-$gear_root/.venv}/bin:$PATH"
export PATH
unset gear_root
# Ranks share the machine's cores; thread pools of busy ranks starve each other.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ -z "${DS_ACCELERATOR:-}" ] && [ "$(python -c 'import torch; print(torch.cuda.device_count())')" -lt "${ranks:-1}" ]; then
  export DS_ACCELERATOR=cpu
fi
