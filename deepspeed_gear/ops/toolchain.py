"""Build tools of this machine: sources, compiler, ninja, CUDA toolkit, and a key of all of them."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_PACKAGE = Path(__file__).resolve().parent


def csrc_root() -> Path:
    """Return the folder of the C++ and CUDA sources, in a wheel or beside a checkout's package."""
    installed = _PACKAGE / "csrc"
    return installed if installed.is_dir() else _PACKAGE.parents[1] / "ops" / "csrc"


def compiler() -> list[str]:
    """Return the command of the C++ compiler, which torch uses too ($CXX, else c++)."""
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def missing_tools() -> dict[str, str]:
    """List the missing requirements of a build of the CPU op, each with its remedy."""
    missing = {}
    if shutil.which(compiler()[0]) is None:
        missing[f"no C++ compiler ({compiler()[0]})"] = "install g++"
    if _ninja_folder() is None:
        missing["no ninja"] = "install ninja (pip install ninja)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing["no Python.h"] = f"install python{platform.python_version_tuple()[0]}-dev"
    return missing


def _ninja_folder() -> str | None:
    """Find ninja on the PATH, or beside this interpreter (a venv that is not activated)."""
    scripts = (sysconfig.get_path("scripts"), sysconfig.get_path("scripts", "posix_user"))
    ninja = shutil.which("ninja") or shutil.which("ninja", path=os.pathsep.join(scripts))
    return os.path.dirname(ninja) if ninja else None


@contextmanager
def ninja_on_path() -> Iterator[None]:
    """Put ninja's folder on the PATH while torch builds, because torch searches only the PATH."""
    before = os.environ.get("PATH", os.defpath)
    folder = _ninja_folder()
    if folder is not None and shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join((before, folder))
    try:
        yield
    finally:
        os.environ["PATH"] = before


def output(command: list[str]) -> list[str]:
    """Run a command; return the lines that it prints, none where it cannot run."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return run.stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return []


def compiler_version() -> str:
    """Return the first line that the compiler prints about itself; "" where there is none."""
    return next(iter(output([*compiler(), "--version"])), "")


def installed_version(package: str) -> str:
    """Return the version of an installed package without an import; "" if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def nvcc_version(home: Path | None) -> str:
    """Return the CUDA compiler's release, or "" where there is no toolkit."""
    lines = output([str(home / "bin" / "nvcc"), "--version"]) if home else []
    return next((line for line in lines if "release" in line), "")


@functools.cache
def cpu_features() -> str:
    """Return the CPU features that `-march=native` may use: unlike machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.processor()
    )
    return f"{platform.machine()} {features.partition(':')[2].strip() or features}"


def cuda_home() -> Path | None:
    """Find the CUDA toolkit: CUDA_HOME, else the path that nvcc prints, else torch's guess.

    torch guesses from the place of the nvcc on the PATH, which is wrong where that is a wrapper
    script.
    """
    given = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if given:
        return Path(given) if Path(given, "bin", "nvcc").is_file() else None
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        command = [nvcc, "-v", "--dryrun", "-x", "cu", "-c", os.devnull]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        tops = (line.partition("TOP=")[2] for line in run.stderr.splitlines() if " TOP=" in line)
        top = next(tops, "")
        if top:
            return Path(top).resolve()
    import torch.utils.cpp_extension as extension

    home = extension.CUDA_HOME
    return Path(home) if home and Path(home, "bin", "nvcc").is_file() else None


def hook_cuda_home() -> Path | None:
    """Make torch and DeepSpeed use the toolkit that `cuda_home` finds; None where there is none."""
    import torch.utils.cpp_extension as extension

    home = cuda_home()
    if home is not None:
        os.environ["CUDA_HOME"] = extension.CUDA_HOME = str(home)
    return home


def abi() -> dict[str, str]:
    """Return the versions that a built op must share with the process that loads it."""
    return {"torch": str(torch.__version__), "python": str(sysconfig.get_config_var("SOABI"))}


def release(version: str) -> str:
    """Return the release of torch that a version is a build of.

    "2.13.0+cpu" and "2.13.0+cu130" have one source and one compiler, so an op that fits one fits
    the other. Other labels may mean anything, and stay.
    """
    return re.sub(r"^([\d.]+)\+(cpu|cu\d+)$", r"\1", version)


def short_key(parts: Mapping[str, Any]) -> str:
    """Return a hash of everything that a build depends on; 16 hex digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
