"""The CUDA kernels, compiled once for all tests that need their objects."""

import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gear_support import ROOT

from deepspeed_gear.ops import toolchain
from deepspeed_gear.ops.op_builders import GearCudaBuilder, nvcc_flags

HOME = toolchain.cuda_home()
CSRC = toolchain.csrc_root()
KERNELS = sorted(CSRC.glob("*/*.cu"))
JUDGED = (13, 0)  # the release whose registers and warnings are held to; others are only printed


def release() -> tuple[int, int]:
    """The toolkit's."""
    found = re.search(r"release (\d+)\.(\d+)", toolchain.nvcc_version(HOME))
    assert found is not None
    return int(found[1]), int(found[2])


def nvcc(*arguments: str) -> str:
    """Run nvcc, which must succeed; give what it and its tools reported."""
    run = subprocess.run([f"{HOME}/bin/nvcc", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stderr


def flags_for(architectures: str) -> list[str]:
    """Return the flags of a compilation by nvcc alone, for TORCH_CUDA_ARCH_LIST."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
        return nvcc_flags()


def folder_of(flags: Sequence[str]) -> str:
    """Return the name of the folder of these flags' objects, here and in a build of a wheel."""
    parts = {"flags": list(flags), "sources": GearCudaBuilder().source_digest()}
    return f"kernels-{toolchain.short_key(parts)}"


def compiled_kernels(architectures: str) -> tuple[Path, str]:
    """Compile every kernel with the builder's flags; give the folder of the objects and what ptxas
    reported.

    The folder is that of a dry run of launch/test_gpu.sh, which finds them there. An object is
    compiled again unless its report is of this toolkit and of the flags that warn.
    """
    flags = flags_for(architectures)
    warn = ["-Xptxas=-v,-warn-spills,-warn-lmem-usage"]
    if release() == JUDGED:
        warn.append("-Werror=all-warnings")
    head = f"{toolchain.nvcc_version(HOME)} {' '.join(warn)}\n"
    folder = ROOT / "build" / "gpu" / folder_of(flags)
    folder.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.cuda.o"
        report = target.with_suffix(".report")
        known = report.read_text() if target.is_file() and report.is_file() else ""
        if not known.startswith(head):
            part = target.with_suffix(f".{os.getpid()}.part")
            known = head + nvcc(*flags, *warn, "-c", str(source), "-o", str(part))
            part.replace(target)
            report.write_text(known)
        return known

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return folder, "".join(pool.map(compile_one, KERNELS))
