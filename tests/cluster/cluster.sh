#!/usr/bin/env bash
# Pretend machines on one: each has a network, process ids, mounts, a host name, IPC, /dev/shm and an sshd of its own.
#
#   cluster.sh up N [SLOTS]      start node0 .. node<N-1>; writes a hostfile with SLOTS (default 2) for each
#   cluster.sh exec NODE CMD...  run a command in a node (its number), in this folder, with this environment
#   cluster.sh down              end everything that runs in the nodes, and remove the state
#   cluster.sh status            list the nodes that run
#   cluster.sh link NODE STATE   plug a node's cable in (up) or pull it out (down)
#   cluster.sh check             tell whether this machine can do all this, and if not, why
#
#   GEAR_CLUSTER_DIR  keys, hostfile, logs and process ids; one folder is one cluster (default: $TMPDIR/gear-cluster)
#   GEAR_CLUSTER_SHM  size of a node's /dev/shm (default: 2g)
#
# Needs root, and util-linux, iproute2, openssh-server and pdsh. The namespaces have no names and live as long as the
# processes in them, so that nothing appears in this machine's network or mounts and any number of clusters coexist.
set -euo pipefail

dir="${GEAR_CLUSTER_DIR:-${TMPDIR:-/tmp}/gear-cluster}"
shm="${GEAR_CLUSTER_SHM:-2g}"
net=10.77.0

die() { printf 'cluster.sh: error: %s\n' "$*" >&2; exit 1; }
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '/^set /,$d'; exit 2; }

check_machine() {
  [ "$(id -u)" -eq 0 ] || die "namespaces need root; run this as root"
  local program missing=()
  for program in unshare nsenter ip ssh-keygen /usr/sbin/sshd pdsh; do
    command -v "$program" >/dev/null || missing+=("$program")
  done
  [ "${#missing[@]}" -eq 0 ] ||
    die "missing: ${missing[*]}; install with: apt-get install util-linux iproute2 openssh-server pdsh"
  unshare --net --mount true 2>/dev/null || die "namespaces cannot be made here; CAP_SYS_ADMIN is needed"
}

# The mark of a holder of this cluster, whatever has become of its number. (An sshd writes its title over it.)
is_ours() { grep -qzxF "GEAR_CLUSTER_DIR=$dir" "/proc/$1/environ" 2>/dev/null; }

write_files() {
  local i
  ssh-keygen -q -t ed25519 -N '' -C gear-cluster -f "$dir/id"
  ssh-keygen -q -t ed25519 -N '' -C gear-cluster -f "$dir/hostkey"
  cp "$dir/id.pub" "$dir/authorized_keys"
  echo "127.0.0.1 localhost" >"$dir/hosts"
  for ((i = 0; i < $1; i++)); do
    echo "$net.$((i + 1)) node$i" >>"$dir/hosts"
    echo "node$i slots=$2" >>"$dir/hostfile"
  done
  cat >"$dir/ssh_config" <<CONFIG
Host *
  IdentityFile $dir/id
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
CONFIG
  cat >"$dir/sshd_config" <<CONFIG
Port 22
HostKey $dir/hostkey
AuthorizedKeysFile $dir/authorized_keys
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
MaxStartups 100
PidFile none
CONFIG
  # What each node runs first, as its process 1. Mounts are the node's own: the machine's files stay as they are.
  cat >"$dir/boot.sh" <<BOOT
set -e
hostname "node\$1"
ip link set lo up
mount -t tmpfs -o mode=1777,size=$shm tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
mount --bind "$dir/hosts" /etc/hosts
mount --bind "$dir/ssh_config" /etc/ssh/ssh_config
[ ! -d ~/.ssh ] || mount -t tmpfs -o mode=700 tmpfs ~/.ssh
exec /usr/sbin/sshd -D -e -f "$dir/sshd_config"
BOOT
}

# Waits for a condition, a command, for ten seconds.
await() {
  local _
  for _ in $(seq 200); do
    if "$@"; then return 0; fi # a bare `return` has the status from before the EXIT trap
    sleep 0.05
  done
  return 1
}

has_own_network() { [ "$(readlink "/proc/$1/ns/net")" != "$(readlink /proc/self/ns/net)" ]; }
has_init() { pgrep -P "$(cat "$dir/holder$1")" >"$dir/init$1"; }
answers() { nsenter -t "$(cat "$dir/init0")" -n bash -c "exec 3<>/dev/tcp/$net.$(($1 + 1))/22" 2>/dev/null; }

start_switch() {
  setsid unshare --net sleep infinity </dev/null >/dev/null 2>&1 &
  echo "$!" >"$dir/holder-switch"
  await has_own_network "$!" || die "the switch did not start"
  nsenter -t "$!" -n ip link add bridge type bridge
  nsenter -t "$!" -n ip link set bridge up
}

# Processes of a node die with its process 1, and that one with its holder.
start_node() {
  setsid unshare --net --uts --ipc --mount --pid --fork --kill-child --mount-proc \
    bash "$dir/boot.sh" "$1" </dev/null >"$dir/node$1.log" 2>&1 &
  echo "$!" >"$dir/holder$1"
}

connect_node() {
  local init switch
  await has_init "$1" || die "node$1 did not start: $(cat "$dir/node$1.log")"
  init="$(cat "$dir/init$1")"
  switch="$(cat "$dir/holder-switch")"
  nsenter -t "$switch" -n ip link add "port$1" type veth peer name eth0 netns "$init" ||
    die "node$1 has ended: $(cat "$dir/node$1.log")"
  nsenter -t "$switch" -n ip link set "port$1" master bridge up
  nsenter -t "$init" -n ip addr add "$net.$(($1 + 1))/24" dev eth0
  nsenter -t "$init" -n ip link set eth0 up
}

up() {
  local i count="${1:-}" slots="${2:-2}"
  [[ "$count" =~ ^[1-9][0-9]*$ && "$slots" =~ ^[1-9][0-9]*$ && "$count" -le 250 ]] || usage
  check_machine
  [ ! -e "$dir/hostfile" ] || die "$dir holds a cluster; end it with down, or set GEAR_CLUSTER_DIR"
  mkdir -p "$dir"
  chmod 700 "$dir" # it holds a private key
  dir="$(cd "$dir" && pwd)"
  export GEAR_CLUSTER_DIR="$dir"
  trap down EXIT
  write_files "$count" "$slots"
  start_switch
  for ((i = 0; i < count; i++)); do start_node "$i"; done
  for ((i = 0; i < count; i++)); do connect_node "$i"; done
  for ((i = 0; i < count; i++)); do
    await answers "$i" || die "node$i does not answer: $(cat "$dir/node$i.log")"
  done
  trap - EXIT
  echo "$count nodes, hostfile $dir/hostfile"
}

# Prints process 1 of a node that runs.
init_of() { is_ours "$(cat "$dir/holder$1" 2>/dev/null)" && cat "$dir/init$1"; }

run_in() {
  [[ "${1:-}" =~ ^[0-9]+$ && "$#" -ge 2 ]] || usage
  local init
  init="$(init_of "$1")" || die "node$1 does not run; see status"
  shift
  exec nsenter -t "$init" -n -u -i -m -p --wd="$PWD" -- "$@"
}

down() {
  local file holder
  [ -d "$dir" ] || return 0
  for file in "$dir"/holder*; do
    holder="$(cat "$file" 2>/dev/null)" || continue
    if is_ours "$holder"; then
      kill -KILL "$holder" 2>/dev/null || true
      # A namespace's memory and links are gone only with its last process.
      await not_running "$holder" || die "process $holder does not end"
    fi
    rm -f "$file"
  done
  rm -f "$dir"/{id,id.pub,hostkey,hostkey.pub,authorized_keys,hosts,hostfile,ssh_config,sshd_config,boot.sh}
  rm -f "$dir"/init* "$dir"/node*.log
  rmdir --ignore-fail-on-non-empty "$dir"
}
not_running() { ! is_ours "$1"; }

status() {
  local file node init
  for file in "$dir"/init*; do
    node="${file##*/init}"
    init="$(init_of "$node")" || continue
    echo "node$node init $init, $(($(pgrep -c --ns "$init" --nslist pid '') - 1)) other processes"
  done
}

[ ! -d "$dir" ] || dir="$(cd "$dir" && pwd)"
# At the switch's end: the node keeps its address and routes, and its packets are lost without an answer.
link() {
  [[ "${1:-}" =~ ^[0-9]+$ && "${2:-}" =~ ^(up|down)$ ]] || usage
  init_of "$1" >/dev/null || die "node$1 does not run; see status"
  nsenter -t "$(cat "$dir/holder-switch")" -n ip link set "port$1" "$2"
}

case "${1:-}" in
  up) shift && up "$@" ;;
  exec) shift && run_in "$@" ;;
  down) down ;;
  status) status ;;
  link) shift && link "$@" ;;
  check) check_machine ;;
  *) usage ;;
esac
