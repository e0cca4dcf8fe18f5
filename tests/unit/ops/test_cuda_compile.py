"""Without a GPU: what a GPU machine builds is compiled, linked and loaded; for all architectures if
long.
"""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compiled_kernels import CSRC, HOME, JUDGED, KERNELS, compiled_kernels, nvcc, release
from op_arguments import ON_DEVICE
from torch.torch_version import TorchVersion
from torch.utils.cpp_extension import include_paths

from deepspeed_gear.ops import toolchain
from deepspeed_gear.ops.op_builders import GearCudaBuilder

SUPPORTED = (80, 90, 100)


def known_architectures() -> list[int]:
    """Those of the supported ones that the toolkit can compile for; an older one lacks
    the newest.
    """
    command = [f"{HOME}/bin/nvcc", "--list-gpu-arch"]
    listed = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout if HOME else ""
    )
    return [a for a in SUPPORTED if f"compute_{a}" in listed.split()]


KNOWN = known_architectures()
LONG = os.environ.get("GEAR_LONG_TESTS") == "1"
ARCHITECTURES = KNOWN if LONG else [a for a in KNOWN if a == 90]  # all of them take twice as long
LISTED = ";".join(f"{a // 10}.{a % 10}" for a in ARCHITECTURES)
BINDINGS = sorted((CSRC / "bindings").glob("library_cuda*.cpp"))

pytestmark = pytest.mark.skipif(not KERNELS, reason="no kernels in ops/csrc")
needs_nvcc = pytest.mark.skipif(HOME is None, reason="no nvcc found")


def builder_flags() -> list[str]:
    """The flags that the builder gives nvcc for all architectures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CUDA_ARCH_LIST", LISTED)
        toolchain.hook_cuda_home()
        return GearCudaBuilder().nvcc_args()


@pytest.fixture(scope="module")
def objects() -> tuple[Path, str]:
    """Every kernel's object, and what ptxas reported."""
    return compiled_kernels(LISTED)


@needs_nvcc
def test_kernels_of_every_architecture_neither_spill_nor_use_a_stack_frame(
    objects: tuple[Path, str],
) -> None:
    sizes = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    properties = re.findall(rf"Function properties for (\S+)\n\s+{sizes}", objects[1])
    assert len(properties) >= len(KERNELS) * len(ARCHITECTURES)
    assert {int(a) for a in re.findall(r"for 'sm_(\d+)", objects[1])} == set(ARCHITECTURES)
    spilled = [found for found in properties if found[1:] != ("0", "0", "0")]
    if spilled and release() != JUDGED:
        pytest.skip(
            f"nvcc {release()} is not judged; stack frame, stores and loads of its kernels: "
            f"{spilled}"
        )
    assert spilled == []


@needs_nvcc
def test_the_toolkit_compiles_all_that_is_supported() -> None:
    if release() < (12, 8):
        pytest.skip(f"CUDA {release()} compiles for {KNOWN} alone, 12.8 for {SUPPORTED}")
    assert tuple(KNOWN) == SUPPORTED


@needs_nvcc
def test_the_kernels_link_and_load_without_a_driver(
    objects: tuple[Path, str], tmp_path: Path
) -> None:
    library = tmp_path / "libgear_cuda.so"
    nvcc("-shared", "-cudart=static", *map(str, objects[0].glob("*.o")), "-o", str(library))
    # Every symbol resolves; no driver is touched until a call.
    ctypes.CDLL(str(library), os.RTLD_NOW)


@needs_nvcc
def test_the_flags_do_not_fuse_or_approximate(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    ptx = tmp_path / "kernel.ptx"
    source.write_text(
        "__global__ void K(float* x) { x[0] = x[1] * x[2] + x[3]; x[4] = x[5] / x[6]; }"
    )
    flags = [flag for flag in builder_flags() if not flag.startswith("-gencode")]
    nvcc(*flags, "-arch=sm_80", "-ptx", str(source), "-o", str(ptx))
    assert re.search(r"mul(\.rn)?\.f32", ptx.read_text())
    assert "fma" not in ptx.read_text()
    assert "div.rn.f32" in ptx.read_text()


# Loads and stores of 16 bytes, in the device's memory or through a pointer that does not say which.
VECTOR_ACCESSES = {
    "ptx": (r"ld(?:\.global[.\w]*)?\.v4\.\w+", r"st(?:\.global[.\w]*)?\.v4\.\w+"),
    "cubin": (r"LDG?\.E[.\w]*\.128", r"STG?\.E[.\w]*\.128"),
}


@pytest.fixture(scope="module")
def assembly(
    objects: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], str]:
    """Return the code of a kernel's source: what the compiler makes ("ptx"), or the device runs
    ("cubin").
    """
    flags = [flag for flag in builder_flags() if not flag.startswith("-gencode")]

    @functools.cache
    def of(kernel: str, form: str) -> str:
        if form == "cubin":
            tool = shutil.which("cuobjdump", path=f"{HOME}/bin:{os.environ['PATH']}")
            if tool is None:  # nvcc's own package has no disassembler
                pytest.skip("no cuobjdump found; the PTX is checked without it")
            command = [
                tool,
                "-sass",
                "-arch",
                "sm_90",
                str(objects[0] / f"{Path(kernel).stem}.cuda.o"),
            ]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout
        out = tmp_path_factory.mktemp("ptx") / "kernel.ptx"
        nvcc(*flags, f"-I{CSRC}", "-arch=sm_90", "-ptx", str(CSRC / kernel), "-o", str(out))
        return out.read_text()

    return of


# Registers of a thread, of 65,536 of a multiprocessor: so many that the blocks that a design counts
# on fit.
MOST_REGISTERS = {
    "GatherKernelILb0": 65_536 // (4 * 256),  # copies: four blocks
    "GatherKernelILb1": 65_536 // (3 * 256),  # conversions: three
    "AddKernel": 65_536 // 1024,  # one block of 1,024 threads
    "UpdateKernel": 65_536 // 1024,
    "LimitedKernel": 65_536 // 512,  # one block of 16 warps
}


@needs_nvcc
def test_kernels_have_registers_for_their_blocks(objects: tuple[Path, str]) -> None:
    if release() != JUDGED:
        pytest.skip(f"nvcc {release()} is not judged")
    used = re.findall(
        r"Compiling entry function '(\S+)'[^\n]*\n(?:.*\n)*?.*Used (\d+) registers", objects[1]
    )
    for kernel, most in MOST_REGISTERS.items():
        found = [int(registers) for name, registers in used if kernel in name]
        assert len(found) == len(ARCHITECTURES), kernel
        assert max(found) <= most, (kernel, found)


@needs_nvcc
def test_the_kernel_of_copies_converts_nothing(assembly: Callable[[str, str], str]) -> None:
    """So its registers are those of copies alone."""
    bodies = re.split(r"\.entry ", assembly("gather/gather.cu", "ptx"))
    copies, converts = (next(b for b in bodies if f"GatherKernelILb{i}" in b[:200]) for i in (0, 1))
    floating = r"cvt[.\w]*\.(?:f16|bf16|f32|f64)|(?:mul|sub)[.\w]*\.f(?:32|64)"
    assert re.search(floating, converts)
    assert not re.search(floating, copies)


@needs_nvcc
@pytest.mark.parametrize("form", ["ptx", "cubin"])
@pytest.mark.parametrize("kernel", ["gather/gather.cu", "ring/scatter.cu"])
def test_copies_issue_all_loads_of_a_lane_before_its_first_store(
    assembly: Callable[[str, str], str], kernel: str, form: str
) -> None:
    """Copies of 16 bytes a lane: a store waits for its load, and would hold back the loads after
    it.
    """
    load, store = VECTOR_ACCESSES[form]
    found = re.finditer(rf"\b(?P<L>{load})\b|\b(?P<S>{store})\b", assembly(kernel, form))
    accesses = "".join(str(match.lastgroup) for match in found)
    assert "LLLLSSSS" in accesses  # equal alignments
    assert not re.search("(?<!L)LS", accesses), accesses  # other alignments as well


LOAD_BINDINGS = """
import os, pathlib, sys, torch
from deepspeed_gear.ops import jit
from deepspeed_gear.ops.backends import OP_NAMES, load_native
load_native()
sys.setdlopenflags(os.RTLD_LAZY)  # what a CUDA build of torch has is missing
jit.import_file("gear_cuda", pathlib.Path(sys.argv[1]))
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(*sorted(op for op in OP_NAMES if has(f"gear::{op}", "CUDA")))
"""


def test_the_bindings_of_the_kernels_register_beside_the_cpu_op(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    """Also with a CPU build of torch, without headers of c10/cuda; torch aborts if signatures
    differ.
    """
    if toolchain.missing_tools():
        pytest.skip(", ".join(toolchain.missing_tools()))
    together = tmp_path / "bindings.cpp"  # torch's headers are read once
    together.write_text("".join(f'#include "{binding}"\n' for binding in BINDINGS))
    compiled = tmp_path / "bindings.o"
    library = tmp_path / "libbindings.so"
    system = [f"-isystem{path}" for path in [*include_paths("cpu"), sysconfig.get_path("include")]]
    standard = (
        "c++17" if TorchVersion(torch.__version__) < "2.14" else "c++20"
    )  # 2.15's headers want it
    flags = [
        f"-std={standard}",
        "-O0",
        "-fPIC",
        "-Wall",
        "-DTORCH_EXTENSION_NAME=gear_cuda",
        f"-I{CSRC}",
    ]
    cxx = toolchain.compiler()
    run = subprocess.run(
        [*cxx, *flags, *system, "-c", str(together), "-o", str(compiled)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    missing = subprocess.run(
        ["nm", "-u", str(compiled)], capture_output=True, text=True, check=True
    ).stdout
    kernels = re.findall(r"\b_ZN4gear4cuda\w+", missing)  # no op is called: any address does
    flags = ["-shared", "-Wl,-z,lazy", *(f"-Wl,--defsym={kernel}=0" for kernel in kernels)]
    torch_libraries = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu"]
    run = subprocess.run(
        [*cxx, *flags, str(compiled), *torch_libraries, "-o", str(library)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    run = run_python("-c", LOAD_BINDINGS, str(library))
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == sorted(ON_DEVICE)


def test_no_source_names_torch() -> None:
    """Kernels take raw pointers, so that a machine without a CUDA torch can compile them."""
    for kernel in KERNELS:
        assert not re.search(r"#include *[<\"](torch|ATen|c10)/", kernel.read_text()), kernel
