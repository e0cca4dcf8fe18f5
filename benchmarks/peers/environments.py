"""One environment per peer, below build/peers, so that no pins meet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "peers"
TORCH = [
    "torch==2.13.0+cpu",
    "torch==2.13.0",
]  # the first one that pip finds: without a GPU the small build


class Peer(NamedTuple):
    """A peer's module here, its packages, and the newest Python that they work with."""

    module: str
    name: str
    packages: tuple[str, ...]
    needs_torch: bool = False
    newest: tuple[int, int] = (3, 99)
    has_cases: bool = True  # of `conformance/`


PEERS = (
    Peer(
        "torchrl", "TorchRL", ("torchrl>=0.14", "ray")
    ),  # its kernels need the torch that it names
    Peer("reverb", "Reverb", ("dm-reverb[tensorflow]==0.14.0",), needs_torch=True, newest=(3, 11)),
    Peer("cpprb", "cpprb", ("cpprb>=11",)),
    Peer("flashbax", "flashbax", ("flashbax>=0.1.3", "jax")),
    Peer("sb3", "Stable-Baselines3", ("stable-baselines3>=2.7",), needs_torch=True),
    Peer("tianshou", "Tianshou", ("tianshou>=2",), needs_torch=True),
    Peer("tq", "TransferQueue", ("TransferQueue>=0.1.11",), needs_torch=True, has_cases=False),
    Peer("datasets", "HF datasets", ("datasets>=4",), has_cases=False),
    Peer(
        "streaming", "MosaicML Streaming", ("mosaicml-streaming>=0.13",)
    ),  # torchvision needs its own torch
)


OWN = ("gear", "limit", "numpy_ring")  # they run in this project's environment


def interpreters(wanted: Collection[str]) -> tuple[dict[str, Path | str], dict[str, str]]:
    """Return the interpreters of systems by their modules, and why others have none."""
    pythons: dict[str, Path | str] = {name: sys.executable for name in OWN if name in wanted}
    absent = {}
    for peer in PEERS:
        if peer.module in wanted:
            python = python_of(peer)
            (absent if isinstance(python, str) else pythons)[peer.module] = python
    return pythons, absent


def python_of(peer: Peer) -> Path | str:
    """Return the interpreter of a peer's environment, made on first use; or why there is none."""
    if sys.version_info[:2] > peer.newest:
        return f"needs Python {peer.newest[0]}.{peer.newest[1]} or older"
    folder = FOLDER / peer.module
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for torch in TORCH if peer.needs_torch else [""]:
        wanted = [*peer.packages, *([torch] if torch else [])]
        done = subprocess.run(
            [python, "-m", "pip", "install", "-q", *wanted], capture_output=True, text=True
        )
        if done.returncode == 0:
            (folder / "ready").touch()
            return python
    return f"pip could not install it: {done.stderr.strip().splitlines()[-1][:200]}"
