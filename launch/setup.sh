#!/usr/bin/env bash
# Makes this checkout ready to run: a virtual environment with everything in it. It can be repeated at any time: an
# existing environment is reused, a torch that imports is never replaced, and a second run needs no network.
#
#   launch/setup.sh
#
#   VIRTUAL_ENV      an active environment is used instead of .venv
#   PYTHON           the interpreter that makes .venv (default: the first python >= 3.10 on the PATH)
#   GEAR_TORCH_SPEC  the torch to install where it is missing, in pip's syntax ("torch==2.13.0+cpu")
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${VIRTUAL_ENV:-$root/.venv}"
stamp="$venv/.gear-setup"

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# System packages, only those that are missing and only where this user may install them.
install_system() {
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    sudo -n true 2>/dev/null || die "missing: $*; install with: sudo apt-get install $*"
    as_root=(sudo -n)
  fi
  command -v apt-get >/dev/null || die "missing: $*; install them with this system's package manager"
  say "installing $*"
  "${as_root[@]}" apt-get update -qq || say "apt-get update failed; going on with the lists that are there"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2 ||
    die "apt-get could not install $*"
}

# Debian's package for a part of the interpreter: python3.12-venv.
apt_name() { printf 'python%s-%s' "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" "$2"; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  return 1
}

make_venv() {
  local base
  if ! base="$(find_python)"; then
    install_system python3 python3-venv
    base="$(find_python)" || die "no python >= 3.10; install one and set PYTHON to it"
  fi
  # Debian and Ubuntu ship venv without ensurepip unless python3-venv is installed.
  "$base" -c 'import ensurepip, venv' 2>/dev/null || install_system "$(apt_name "$base" venv)"
  say "making $venv with $("$base" --version)"
  "$base" -m venv "$venv" || die "could not make $venv"
}

# The just-in-time build of the native op: a C++ compiler and Python's headers (ninja comes from pip).
need_compiler() {
  local missing=() cxx="${CXX:-c++}"
  command -v "${cxx%% *}" >/dev/null || missing+=(g++)
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing+=("$(apt_name "$python" dev)")
  if [ "${#missing[@]}" -gt 0 ]; then install_system "${missing[@]}"; fi
}

# Without torch, other packages would pull the newest one, which is a CUDA build of several GB. A machine without
# a GPU tries the CPU build of a version first, from the indexes that pip is configured for; then that version from
# any index; then any version that fits.
install_torch() {
  local spec specs=()
  if [ -n "${GEAR_TORCH_SPEC:-}" ]; then
    specs=("$GEAR_TORCH_SPEC")
  elif nvidia-smi -L >/dev/null 2>&1; then
    specs=("torch>=2.4")
  else
    specs=("torch==2.13.0+cpu" "torch==2.13.0" "torch>=2.4")
  fi
  for spec in "${specs[@]}"; do
    say "installing $spec"
    # shellcheck disable=SC2086  # a spec may hold options, as in "--index-url ... torch"
    if "$python" -m pip install -q $spec "numpy>=1.24"; then return; fi
  done
  die "pip found no torch (tried: ${specs[*]}); install one into $venv, or set GEAR_TORCH_SPEC"
}

wanted_stamp() { cat "$root/pyproject.toml" "$root/setup.py" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1; }

# True if everything can be imported and deepspeed_gear is this checkout's. From /, so that no folder shadows it.
# PathFinder looks where type checkers look: at folders, and not at import hooks.
all_there() {
  (cd / && "$python" - "$root" <<'PYTHON'
import importlib.util
import os
import sys
from importlib.machinery import PathFinder

import torch

names = "deepspeed numpy pydantic h5py tqdm pytest hypothesis IPython"
names += " gymnasium imageio mujoco matplotlib tensorboard minari grpc pyarrow scipy tensordict transformers accelerate ruff mypy"
missing = [name for name in names.split() if importlib.util.find_spec(name) is None]
ours = PathFinder.find_spec("deepspeed_gear")
here = ours is not None and os.path.realpath(ours.origin or "") == os.path.realpath(
    os.path.join(sys.argv[1], "deepspeed_gear", "__init__.py"))
sys.exit(bool(missing) or not here)
PYTHON
  ) >/dev/null 2>&1
}

install_all() {
  local version pin
  # The package's version for pip: torch.__version__ may end in +cu130 where the package's does not.
  local ask='import torch, importlib.metadata as m; print(m.version("torch"))'
  if ! version="$("$python" -c "$ask" 2>/dev/null)"; then
    install_torch
    version="$("$python" -c "$ask")" || die "torch is installed but does not import"
  fi
  "$python" -c 'import sys, torch
sys.exit(tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 4))' ||
    die "torch $version is there and stays there, but gear needs >= 2.4: upgrade it, or use another environment"
  # The pin makes pip fail rather than replace the installed torch.
  pin="$(mktemp)"
  printf 'torch==%s\n' "$version" >"$pin"
  say "installing deepspeed_gear and what it needs, beside torch $version"
  if ! "$python" -m pip install -q --constraint "$pin" -e "${root}[dev,examples]"; then
    rm -f "$pin"
    die "pip could not install the dependencies"
  fi
  rm -f "$pin"
}

[ -x "$venv/bin/python" ] || make_venv
python="$venv/bin/python"
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip -q || die "$venv has no pip"
need_compiler
if [ "$(cat "$stamp" 2>/dev/null)" != "$(wanted_stamp)" ] || ! all_there; then
  install_all
  all_there || die "the packages are installed but cannot be imported; remove $venv and run this again"
  wanted_stamp >"$stamp"
fi
say "ready: source $venv/bin/activate"
