#!/usr/bin/env bash
# Runs a training script on every host of a hostfile, by DeepSpeed's launcher; ends all of its processes afterwards.
#
#   launch/multi_node.sh [OPTIONS] HOSTFILE SCRIPT [ARGS...]
#
#   --launcher NAME     pdsh (default), openmpi or slurm
#   --launcher_args S   more arguments for pdsh, mpirun or srun, in one string
#   --master_addr A     address of the first host that all others reach (default: what the last host resolves it to)
#   --master_port P     a port that is free there (default: one that is); for pdsh only
#   --grace S           seconds for the other hosts to end without a signal once one has failed (default: 90)
#
# A file .deepspeed_env (home or this folder; DS_ENV_FILE renames it) is used if there is one; otherwise the variables
# below that are set here are sent. docs/how-to/hosts-and-launchers.md explains each one.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# Neither ssh nor pdsh forwards these. DeepSpeed itself sends PYTHON*, MLFLOW*, MV2*, UCX* and, for CUDA, NCCL*.
needed=(DS_ACCELERATOR OMP_NUM_THREADS GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME TORCH_EXTENSIONS_DIR GEAR_RUN
  PATH LD_LIBRARY_PATH CUDA_HOME CXX MUJOCO_GL)
ssh=(ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=2)

say() { printf 'multi_node: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 2; }
usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }

parse_options() {
  launcher=pdsh launcher_args='' address='' port='' grace=90
  while [[ "${1:-}" == --* ]]; do
    [ "$#" -ge 2 ] || usage
    case "$1" in
      --launcher) launcher="$2" ;;
      --launcher_args) launcher_args="$2" ;;
      --master_addr) address="$2" ;;
      --master_port) port="$2" ;;
      --grace) grace="$2" ;;
      *) usage ;;
    esac
    shift 2
  done
  [ "$#" -ge 2 ] || usage
  case "$launcher" in
    pdsh | openmpi | slurm) ;;
    *) die "--launcher must be pdsh, openmpi or slurm, got $launcher" ;;
  esac
  # More than gear.timeout_s, so that ranks that wait for the failed one can report it.
  [[ "$grace" =~ ^[0-9]+$ ]] || die "--grace must be a number of seconds, got $grace"
  hostfile="$1" script="$2"
  arguments=("${@:3}")
}

# The rules are DeepSpeed's own; without the file it would run on this machine only.
read_hostfile() {
  local line number=0
  hosts=()
  [ -f "$hostfile" ] || die "$hostfile must be a file; copy configs/hostfile.example and name your hosts"
  while IFS= read -r line || [ -n "$line" ]; do
    number=$((number + 1))
    [[ "$line" =~ ^[[:space:]]*(#.*)?$ ]] && continue
    [[ "$line" =~ ^[[:space:]]*([^[:space:]]+)[[:space:]]+slots=([0-9]+) ]] ||
      die "$hostfile, line $number must be 'HOST slots=NUMBER', got '$line'"
    [[ " ${hosts[*]} " != *" ${BASH_REMATCH[1]} "* ]] ||
      die "$hostfile, line $number must name a host once, got ${BASH_REMATCH[1]} again; add up its slots"
    # DeepSpeed would start no rank there, and wait for that host where it is the first one.
    [ "$((10#${BASH_REMATCH[2]}))" -gt 0 ] ||
      die "$hostfile, line $number must have at least one slot, got '$line'; remove the line"
    hosts+=("${BASH_REMATCH[1]}")
  done <"$hostfile"
  [ "${#hosts[@]}" -gt 0 ] || die "$hostfile must name a host; add a line 'HOST slots=NUMBER'"
}

find_programs() {
  local venv="${VIRTUAL_ENV:-$root/.venv}"
  if [ -x "$venv/bin/deepspeed" ]; then PATH="$venv/bin:$PATH"; fi
  command -v deepspeed >/dev/null || die "deepspeed must be on the PATH; run launch/setup.sh, or activate its environment"
  python="$(python -c 'import sys; print(sys.executable)')"
  case "$launcher" in
    pdsh) command -v pdsh >/dev/null || die "pdsh must be installed here; apt-get install pdsh" ;;
    openmpi)
      command -v ompi_info >/dev/null || die "ompi_info must be on the PATH; install Open MPI (openmpi-bin) on all hosts"
      need_mpi4py
      ;;
    slurm)
      command -v srun >/dev/null || die "srun must be on the PATH; start this where jobs are submitted"
      need_mpi4py
      ;;
  esac
}

# Under mpirun and srun, ranks get their number from MPI: DeepSpeed sets nothing but the environment's exports.
need_mpi4py() {
  "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("mpi4py") is None)' ||
    die "mpi4py must be installed for --launcher $launcher; pip install mpi4py on all hosts, against the same MPI"
}

# Runs on each host, by sh -s; prints the problems of the host. What its login prints beside them is none.
host_check() {
  cat <<'SH'
[ -x "$2" ] || { echo "problem: must have the interpreter $2; install the same environment at the same path"; exit; }
cd "$1" 2>/dev/null || { echo "problem: must have the folder $1; share it, or copy it to the same path"; exit; }
[ -r "$3" ] || { echo "problem: must have the script $3 in $1; copy it there"; exit; }
[ "$4" = 1 ] || case "$(getent ahostsv4 "$(hostname)" | head -n 1)" in
  127.*) echo "problem: must not resolve its own name ($(hostname)) to a loopback address, which gloo would send to the other hosts;" \
    "correct its /etc/hosts, or set GLOO_SOCKET_IFNAME to its network interface" ;;
esac
SH
}

# Checks all hosts at once, and prints the problems of all.
check_hosts() {
  local host answer wrong=0 named=0
  if [ "${#hosts[@]}" -eq 1 ] || [ -n "$(value_of GLOO_SOCKET_IFNAME)" ]; then named=1; fi
  for host in "${hosts[@]}"; do
    { host_check | "${ssh[@]}" "$host" sh -s -- "$(quoted "$PWD" "$python" "$script")" "$named" >"$work/check-$host" 2>&1 ||
      echo "problem: must be reached by ssh without a password, got '$(tail -n 1 "$work/check-$host")';" \
        "try: ssh -o BatchMode=yes $host true" >"$work/check-$host"; } &
  done
  wait
  for host in "${hosts[@]}"; do
    answer="$(sed -n 's/^problem: //p' "$work/check-$host")"
    [ -z "$answer" ] || { say "error: host $host $answer"; wrong=1; }
  done
  [ "$wrong" -eq 0 ] || exit 2
}

quoted() { printf '%q ' "$@"; }

# The address that other hosts resolve: a host may resolve its own name to 127.0.1.1, or to a network that others lack.
find_master() {
  local asked="${hosts[${#hosts[@]} - 1]}" first="${hosts[0]#*@}"
  if [ -z "$address" ]; then
    address="$("${ssh[@]}" "$asked" getent ahostsv4 "$first" | awk 'NR == 1 { print $1 }')"
    [ -n "$address" ] || die "host $asked must resolve $first; correct its name service, or give --master_addr"
    [[ "$address" != 127.* || "${#hosts[@]}" -eq 1 ]] ||
      die "host $asked must not resolve $first to itself, got $address; correct its /etc/hosts, or give --master_addr"
  fi
  # Ranks that get their number from MPI use DeepSpeed's default port, regardless of the launcher's option.
  if [ "$launcher" = openmpi ]; then port=29500; fi
  [ -n "$port" ] || port="$("${ssh[@]}" "${hosts[0]}" "$(quoted "$python")" - <<'PYTHON'
import socket

with socket.socket() as probe:
    probe.bind(("", 0))
    print(probe.getsockname()[1])
PYTHON
  )" || die "host ${hosts[0]} did not name a free port; give --master_port"
}

# The variable's value in the ranks: from the user's file if there is one, else from this shell.
value_of() {
  if [ -s "$work/user_env" ]; then sed -n "s/^$1=//p" "$work/user_env" | tail -n 1; else printf '%s' "${!1:-}"; fi
}

# A line without '=' ends DeepSpeed's launcher with a ValueError, and the remote shell ignores the rest after a '#'.
read_user_env() {
  local file line number files name="${DS_ENV_FILE:-.deepspeed_env}"
  : >"$work/user_env"
  if [[ "$name" == /* ]]; then files=("$name"); else files=("$HOME/$name" "$PWD/$name"); fi
  for file in "${files[@]}"; do
    [ -f "$file" ] || continue
    number=0
    while IFS= read -r line || [ -n "$line" ]; do
      number=$((number + 1))
      [[ "$line" =~ ^[A-Za-z_][A-Za-z_0-9]*= ]] ||
        die "$file, line $number must be NAME=VALUE, got '$line'; remove blank lines and comments"
      printf '%s\n' "$line" >>"$work/user_env"
    done <"$file"
    say "sending the variables of $file"
  done
}

write_env() {
  local name
  cp "$work/user_env" "$work/env"
  for name in "${needed[@]}"; do
    [ -n "${!name:-}" ] || continue
    if [ ! -s "$work/user_env" ]; then
      printf '%s=%s\n' "$name" "${!name}" >>"$work/env"
    elif [ "$name" != PATH ] && ! grep -q "^$name=" "$work/user_env"; then
      say "warning: $name is set here, but not in .deepspeed_env: ranks will not see it; add $name=${!name}"
    fi
  done
  printf 'GEAR_LAUNCH=%s\n' "$run" >>"$work/env"
}

# pdsh passes one string to the remote shell, and DeepSpeed quotes only arguments with a space, in double quotes.
quote_arguments() {
  local i argument
  [ "$launcher" = pdsh ] || return 0
  for i in "${!arguments[@]}"; do
    argument="${arguments[$i]}"
    if [[ "$argument" =~ [[:space:]] ]]; then
      # shellcheck disable=SC2016,SC1003  # the characters themselves
      [[ ! "$argument" =~ [$'\n\t'] && "$argument" != *['$`\']* ]] ||
        die "argument '$argument' must not have spaces together with tabs, newlines, \$, \` or \\; put it into a file"
    elif [[ ! "$argument" =~ ^[A-Za-z0-9_@+=:,./-]+$ ]]; then
      arguments[i]="'${argument//\'/\'\\\'\'}'"
    fi
    arguments[i]="${arguments[i]//%/%%}" # pdsh replaces %h, %n and %u
  done
}

# In a session of its own: on Ctrl-C DeepSpeed's runner would end every DeepSpeed launch of this user on the hosts.
start() {
  local options=(--hostfile "$hostfile" --launcher "$launcher" --force_multi --no_ssh_check
    --master_addr "$address" --master_port "$port")
  [ -z "$launcher_args" ] || options+=(--launcher_args="$launcher_args")
  say "launch $run: ${#hosts[@]} hosts, master $address:$port"
  # sed passes everything on and saves pdsh's lines about hosts whose launcher has failed.
  DS_ENV_FILE="$work/env" setsid deepspeed "${options[@]}" "$script" ${arguments[@]+"${arguments[@]}"} \
    2> >(exec sed -u "/^pdsh@[^ ]*: [^ ]*: ssh exited with exit code/w $work/failed" >&2) &
  runner=$!
}

# A dead rank ends its own host's processes; those of the other hosts wait for it, some of them forever.
watch() {
  local until=''
  while kill -0 "$runner" 2>/dev/null; do
    sleep 0.2
    if [ -z "$until" ] && [ -s "$work/failed" ]; then
      until=$((SECONDS + grace))
    elif [ -n "$until" ] && [ "$SECONDS" -ge "$until" ]; then
      say "ending the other hosts, $grace s after: $(head -n 1 "$work/failed")"
      status="$(sed -n '1s/.* //p' "$work/failed")"
      return
    fi
  done
  wait "$runner" && status=0 || status=$?
}

# Runs on each host, by sh -s: ends the processes of this run and of no other, first by SIGTERM.
# shellcheck disable=SC2329  # end_all calls it
host_end() {
  cat <<'SH'
mine() { grep -lszxF "GEAR_LAUNCH=$1" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }
pids=$(mine "$1")
if [ -n "$pids" ]; then
  echo "ended $(echo "$pids" | wc -l) processes"
  kill -TERM $pids 2>/dev/null
  for _ in $(seq 50); do
    sleep 0.2
    [ -n "$(mine "$1")" ] || break
  done
  pids=$(mine "$1")
  [ -z "$pids" ] || kill -KILL $pids 2>/dev/null
fi
rm -f /dev/shm/deepspeed_allreduce_buffer_"$(id -u)_$2_$3"_*
SH
}

# shellcheck disable=SC2329  # the trap of EXIT
end_all() {
  local host answer
  trap '' INT TERM HUP
  if [ -n "${runner:-}" ] && kill -0 "$runner" 2>/dev/null; then
    # mpirun and srun end their ranks on SIGTERM; DeepSpeed's runner for pdsh would end other runs as well.
    if [ "$launcher" != pdsh ]; then
      kill -TERM -- "-$runner" 2>/dev/null || true
      timeout 10 tail --pid="$runner" -f /dev/null || true
    fi
    kill -KILL -- "-$runner" 2>/dev/null || true
  fi
  if [ -n "${runner:-}" ] && [ "$launcher" != slurm ]; then
    for host in "${hosts[@]}"; do
      { host_end | timeout 40 "${ssh[@]}" "$host" sh -s -- "$run" "$address" "$port" >"$work/end-$host" 2>&1 ||
        echo "did not answer; look there for processes with GEAR_LAUNCH=$run in /proc/*/environ" >>"$work/end-$host"; } &
    done
    wait
    for host in "${hosts[@]}"; do
      answer="$(cat "$work/end-$host")"
      [ -z "$answer" ] || say "host $host: $answer"
    done
  fi
  rm -rf "$work"
}

parse_options "$@"
read_hostfile
find_programs
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks share a host's cores
run="$(od -An -N8 -tx1 /dev/urandom | tr -d ' \n')"
work="$(mktemp -d)"
runner=''
trap end_all EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
read_user_env
write_env
quote_arguments
if [ "$launcher" = slurm ]; then
  # Hosts of an allocation need no ssh; ranks get everything from MPI, so that these two only satisfy the launcher.
  address="${address:-${hosts[0]}}" port="${port:-29500}"
else
  check_hosts
  find_master
fi
start
watch
exit "$status"
