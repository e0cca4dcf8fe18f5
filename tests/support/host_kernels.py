"""The CUDA kernels and their binding, built for the CPU (`tests/host/cuda_runtime.h`)."""

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gear_support import ROOT
from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

from deepspeed_gear.ops import toolchain
from deepspeed_gear.ops.jit import build_lock

HOST = ROOT / "tests" / "host"
# Found by the compiler, reported by cuda_runtime.h: accesses that are not aligned to their type.
SANITIZERS = ("-fsanitize=alignment", "-fsanitize-recover=alignment")
CSRC = toolchain.csrc_root()

SHARED = re.compile(r"__shared__ [\w:]+ ([^;=]+);")


def shared(declaration: re.Match[str]) -> str:
    """Return the declaration of variables that a block shares, and a call that registers them."""
    names = re.sub(r"\[[^\]]*\]", "", declaration[1])
    return f"{declaration[0]} gear_host::Share({names});"


def library(folders: pytest.TempPathFactory) -> Path:
    """Return the library, which is kept as long as the sources and what builds them are
    the same.
    """
    sources = [
        file for folder in (CSRC, HOST) for file in sorted(folder.rglob("*")) if file.is_file()
    ]
    parts = [repr((toolchain.compiler_version(), torch.__version__)).encode()]
    parts += [file.read_bytes() for file in (*sources, Path(__file__))]
    kept = ROOT / "build" / f"kernels_on_host-{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"
    kept.parent.mkdir(exist_ok=True)
    with build_lock(kept.with_suffix(".lock"), 3600.0):  # lanes of tests run beside each other
        if not kept.exists():
            made = build(folders.mktemp("kernels_on_host"))
            part = kept.with_suffix(f".{os.getpid()}")
            shutil.copyfile(made, part)
            part.replace(kept)
    return kept


def build(folder: Path) -> Path:
    """Compile the kernels with the host's compiler; only launches and the names of ops are
    rewritten.
    """
    launch = re.compile(
        r"([\w:]+(?:<[^<>;]*(?:<[^<>;]*>)?[^<>;]*>)?)\s*<<<(.+?), (\w+), 0, .+?>>>\((.*?)\);",
        re.DOTALL,
    )
    for file in [*CSRC.glob("*/*.cu"), *CSRC.glob("*/*_cuda.h")]:
        text, launches = launch.subn(
            r"gear_host::Launch(\2, \3, [&] { \1(\4); });", file.read_text()
        )
        assert launches == file.read_text().count("<<<")
        text, variables = SHARED.subn(shared, text)
        assert variables == text.count("__shared__ ")
        copy = folder / file.relative_to(CSRC).with_suffix(".h" if file.suffix == ".h" else ".cpp")
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(text)
    stream = (
        'extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t, void**) { return 0; }\n'
    )
    schemas = (
        "TORCH_LIBRARY(gear_on_host, m) { GEAR_OPS(GEAR_DEFINE) GEAR_RING_OPS(GEAR_DEFINE) }\n"
    )
    for file in (CSRC / "bindings").glob("library_cuda*.cpp"):
        binding = file.read_text()
        assert "TORCH_LIBRARY_IMPL(gear, CUDA, m)" in binding
        (folder / file.name).write_text(
            binding.replace("(gear, CUDA, m)", "(gear_on_host, CPU, m)")
            + (schemas + stream if file.name == "library_cuda.cpp" else "")
        )
    flags = [
        "-std=c++20",
        "-O1",
        "-ffp-contract=off",
        "-fPIC",
        *SANITIZERS,
        "-U_FORTIFY_SOURCE",  # its longjmp refuses to go to another fiber
        "-DTORCH_EXTENSION_NAME=gear_on_host",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    flags += [f"-I{folder}", f"-I{HOST}", f"-I{CSRC}", f"-I{sysconfig.get_path('include')}"]
    flags += [f"-isystem{path}" for path in include_paths("cpu")]
    sources = [*sorted(folder.glob("*.cpp")), *sorted(folder.glob("*/*.cpp"))]

    def run(*arguments: str) -> None:
        found = subprocess.run([*toolchain.compiler(), *arguments], capture_output=True, text=True)
        assert found.returncode == 0, found.stderr

    def compile_one(source: Path) -> str:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        run(*flags, "-c", str(source), "-o", str(target))
        return str(target)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    out = folder / "kernels_on_host.so"
    run(
        "-shared",
        *objects,
        f"-L{TORCH_LIB_PATH}",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
        "-o",
        str(out),
    )
    return out
