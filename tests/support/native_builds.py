"""The just-in-time builds that tests load: `python tests/support/native_builds.py` makes them,
once.

A build that begins inside of a test counts in its time limit, and is killed with it; other tests
that wait for it then find no library.
"""

import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
#: The checkout's own: a lock that a killed launch leaves in the user's folder stops no test, and a
#: killed test stops no launch. They are kept, and runs of tests may share them.
BUILDS = (
    ROOT
    / "build"
    / f"extensions-py{sys.version_info.major}{sys.version_info.minor}-{torch.__version__}"
)


def use_builds() -> None:
    """Make torch build extensions in the folder of the checkout, unless the environment names
    another.
    """
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(BUILDS))


def main() -> None:
    """Build the op of the package, and the one by which DeepSpeed's ranks on CPUs communicate."""
    use_builds()
    from deepspeed_gear.ops import load_backend, stale_locks

    stale_locks.remove()
    load_backend()
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

        ShareMemCommBuilder().load(verbose=False)


if __name__ == "__main__":
    main()
