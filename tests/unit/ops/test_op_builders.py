"""The op builders under the real DeepSpeed and compiler; a small op stands in where a build is
tested.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import deepspeed.ops.op_builder as op_builder
import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.ops.op_builder.all_ops import ALL_OPS

from deepspeed_gear.errors import BuildError
from deepspeed_gear.ops import toolchain
from deepspeed_gear.ops.backends import load_native
from deepspeed_gear.ops.op_builders import GearBuilder, GearCudaBuilder, nvcc_flags, register

# What DeepSpeed sees


def test_register_tells_each_accelerator_once_and_other_ops_stay() -> None:
    register()
    accelerator = get_accelerator()
    assert accelerator.get_op_builder("GearBuilder") is GearBuilder
    assert isinstance(accelerator.create_op_builder("GearBuilder"), GearBuilder)
    assert isinstance(accelerator.create_op_builder("GearCudaBuilder"), GearCudaBuilder)
    assert op_builder.GearBuilder is GearBuilder
    assert isinstance(ALL_OPS["gear"], GearBuilder)
    assert isinstance(ALL_OPS["gear_cuda"], GearCudaBuilder)
    assert isinstance(ALL_OPS["gear"], op_builder.builder.OpBuilder)
    ops = dict(ALL_OPS)
    lookups = accelerator.get_op_builder, accelerator.create_op_builder
    register()
    assert (accelerator.get_op_builder, accelerator.create_op_builder) == lookups
    assert dict(ALL_OPS) == ops
    fresh = type(accelerator)()
    for name in ("CPUAdamBuilder", "AsyncIOBuilder", "NoSuchBuilder"):
        assert accelerator.get_op_builder(name) is fresh.get_op_builder(name)
    try:
        set_accelerator(fresh)
        register()
        assert isinstance(fresh.create_op_builder("GearBuilder"), GearBuilder)
    finally:
        set_accelerator(accelerator)


def test_the_op_is_loaded_through_deepspeed_and_once() -> None:
    register()
    module = get_accelerator().create_op_builder("GearBuilder").load()
    assert module is load_native()
    assert module is GearBuilder().load(verbose=True)
    assert any(name.startswith("gear::") for name in torch._C._dispatch_get_all_op_names())


SECOND_COPY = """
import os, shutil, sys
from deepspeed_gear.errors import BuildError
from deepspeed_gear.ops import backends, jit, op_builders
backends.load_native()
name = op_builders.GearBuilder().jit_name()
shutil.copytree(jit.build_folder(name), os.path.join(sys.argv[1], name))
os.environ["TORCH_EXTENSIONS_DIR"] = sys.argv[1]
jit._loaded.clear()
try:
    backends.load_native()
except BuildError as error:
    print(error)
"""


def test_a_second_copy_is_refused_where_torch_would_abort(
    run_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    if GearBuilder().prebuilt()[0] is not None:
        pytest.skip("the op is prebuilt in this checkout")
    run = run_python("-c", SECOND_COPY, str(tmp_path))
    assert run.returncode == 0, run.stderr
    assert "registered already by another copy" in run.stdout


# The flags and the sources


def test_the_wheel_is_portable_and_the_jit_build_exact() -> None:
    builder = GearBuilder()
    assert not [flag for flag in builder.cxx_args() if flag.startswith("-march")]
    for flags in (builder.cxx_args(), builder.jit_flags()):
        assert "-ffp-contract=off" in flags
        assert not {"-g", "-ffast-math", "-Ofast"} & set(flags)


def test_sources_have_unlike_stems() -> None:
    """Objects are named by the stem of their source, so two files of one name would overwrite each
    other.
    """
    for builder in (GearBuilder(), GearCudaBuilder()):
        stems = [Path(source).stem for source in builder.sources()]
        assert len(stems) == len(set(stems))


@pytest.mark.parametrize(
    ("given", "read"),
    [("7.5 8.0 9.0a", "7.5;8.0;9.0"), ("10.0f+PTX;9.0a", "9.0;10.0+PTX"), ("9.0+PTX;", "9.0+PTX")],
)
def test_architectures_of_images(given: str, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of CUDA list those with instructions of one device, "9.0a", which DeepSpeed cannot
    read.
    """
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given)
    assert "arch=compute_90,code=sm_90" in " ".join(nvcc_flags())
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == read
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(BuildError, match="must list compute capabilities, got 'Hopper'; unset it"):
        nvcc_flags()


def test_the_shared_runtime_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a compiler that would link its own, with which an exception for torch ends the
    process.
    """
    monkeypatch.setenv("CXX", "c++ -static-libstdc++ -static-libgcc")
    source = tmp_path / "small.cpp"
    made = tmp_path / "small.so"
    source.write_text('#include <stdexcept>\nvoid refuse() { throw std::runtime_error("it"); }\n')
    command = [
        *toolchain.compiler(),
        "-shared",
        "-fPIC",
        str(source),
        *GearBuilder().extra_ldflags(),
    ]
    subprocess.run([*command, "-o", str(made)], check=True)
    assert (
        "libstdc++.so.6"
        in subprocess.run(["ldd", str(made)], capture_output=True, text=True).stdout
    )


# The prebuilt op


def test_a_prebuilt_op_of_another_torch_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = GearBuilder()
    monkeypatch.setattr("deepspeed_gear.ops.native_op.__file__", str(tmp_path / "native_op.py"))
    assert builder.prebuilt() == (None, "not prebuilt")
    (tmp_path / "gear_op.so").touch()
    path, why = builder.prebuilt()
    assert path is None
    assert "gear_op.json" in why
    facts = builder.prebuilt_facts()
    (tmp_path / "gear_op.json").write_text(json.dumps(facts))
    assert builder.prebuilt() == (tmp_path / "gear_op.so", "prebuilt")
    for key in facts:
        (tmp_path / "gear_op.json").write_text(json.dumps({**facts, key: "other"}))
        path, why = builder.prebuilt()
        assert path is None
        assert f"{key} other instead of" in why
