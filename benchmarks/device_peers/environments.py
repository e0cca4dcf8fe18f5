"""Interpreters of the systems of `gpu_peers.py`: environments below build/peers.

On a CPU they are those of `peers.sh`. On a GPU each is an environment of its own that sees this
environment's torch, so that all systems of torch run on the same one; a package whose kernels do
not load with it gets the torch that pip finds for it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from peers.environments import FOLDER, Peer, python_of

PATIENCE = ("--retries", "1", "--timeout", "15")  # a GPU is waiting
OWN = ("gear", "columns")  # they run in this project's environment


class DevicePeer(NamedTuple):
    """A peer.

    Args:
        module: Its adapter.
        name: Of the system.
        environment: Its environment, which several may share.
        packages: With the device of `gpu_packages` for a GPU.
        gpu_packages: Instead of `packages` where there is a GPU.
        probe: Fails where the environment's torch does not fit.
        needs_torch: Whether a CPU environment must name its torch.
    """

    module: str
    name: str
    environment: str
    packages: tuple[str, ...]
    gpu_packages: tuple[str, ...] = ()
    probe: str = ""
    needs_torch: bool = False


_TREES = "from torchrl._torchrl import SumSegmentTreeFp32"
PEERS = (
    DevicePeer("torchrl", "TorchRL", "torchrl", ("torchrl>=0.14", "ray"), ("torchrl",), _TREES),
    DevicePeer("leanrl", "LeanRL", "torchrl", ("torchrl>=0.14", "ray"), ("torchrl",), _TREES),
    DevicePeer(
        "flashbax",
        "flashbax",
        "flashbax",
        ("flashbax>=0.1.3", "jax"),
        ("flashbax>=0.1.3", "jax[cuda13]"),
    ),
    DevicePeer(
        "rsl_rl",
        "rsl_rl",
        "rsl_rl",
        ("rsl-rl-lib>=5",),
        ("rsl-rl-lib>=5",),
        "import rsl_rl.storage",
        needs_torch=True,
    ),
)
NAMES = {"gear": "deepspeed_gear", "columns": "torch columns"} | {p.module: p.name for p in PEERS}


def interpreters(
    wanted: Collection[str], is_cuda: bool
) -> tuple[dict[str, Path | str], dict[str, str]]:
    """Return the interpreters of systems by their modules, and why others have none."""
    pythons: dict[str, Path | str] = {name: sys.executable for name in OWN if name in wanted}
    absent: dict[str, str] = {}
    for peer in PEERS:
        if peer.module not in wanted:
            continue
        python = _gpu_python(peer) if is_cuda else _cpu_python(peer)
        (absent if isinstance(python, str) else pythons)[peer.module] = python
    return pythons, absent


def _cpu_python(peer: DevicePeer) -> Path | str:
    return python_of(Peer(peer.environment, peer.name, peer.packages, peer.needs_torch))


def _gpu_python(peer: DevicePeer) -> Path | str:
    """Return the interpreter of an environment, made on first use; or why there is none."""
    folder = FOLDER / f"cuda-{peer.environment}"
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    if not peer.probe:
        done = _pip(python, *peer.gpu_packages)
    else:
        _share_packages(python)
        done = _pip(python, *peer.gpu_packages)
        if not _passes(python, peer.probe):
            done = _pip(python, "--ignore-installed", *peer.gpu_packages, "torch")
    if done.returncode:
        return f"pip could not install it: {done.stderr.strip().splitlines()[-1][:200]}"
    if peer.probe and not _passes(python, peer.probe):
        return f"its kernels do not load: {peer.probe!r} fails"
    (folder / "ready").touch()
    return python


def _share_packages(python: Path) -> None:
    """Let an environment import what this one has; its own packages come first."""
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    shared |= {path for path in sys.path if Path(path, "torch", "__init__.py").exists()}
    Path(own, "shared.pth").write_text("\n".join(sorted(shared)) + "\n")


def _pip(python: Path, *wanted: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "install", "-q", *PATIENCE, *wanted]
    return subprocess.run(command, capture_output=True, text=True)


def _passes(python: Path, code: str) -> bool:
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0
