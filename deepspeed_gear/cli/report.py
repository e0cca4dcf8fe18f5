"""`gear report`: show the report of `ds_report` with GEAR's ops, and what they are built with."""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
from deepspeed import env_report
from deepspeed.accelerator import get_accelerator

from deepspeed_gear.errors import GearError
from deepspeed_gear.ops import jit, toolchain
from deepspeed_gear.ops.backends import load_native, load_native_cuda
from deepspeed_gear.ops.op_builders import GearBuilder, GearCudaBuilder, register

_WIDTH = 26

OPTIONS = {
    "--load": "load the native ops, building them if need be",
    "--quiet": "leave out why an op is not compatible",
}


def run(options: argparse.Namespace) -> int:
    """Print the report; return 1 if `--load` is given and the CPU op cannot be loaded."""
    register()
    # op_report compares one accelerator name for all ops, and prints [YES] for a prebuilt op only
    # if it matches. The name is empty where DeepSpeed was installed without prebuilt ops; setting
    # it shows GEAR's prebuilt ops, and changes nothing for the others.
    before = env_report.accelerator_name
    env_report.accelerator_name = before or get_accelerator()._name
    try:
        env_report.op_report(verbose=not options.quiet)
    finally:
        env_report.accelerator_name = before
    env_report.debug_report()
    print("-" * 46)
    print("GEAR native ops:")
    home = toolchain.cuda_home()
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    rows = {
        "package": Path(__file__).resolve().parents[1],
        "accelerator": get_accelerator().device_name(),
        "torch, DeepSpeed": f"{torch.__version__}, {deepspeed.__version__}",
        "C++ compiler": toolchain.compiler_version() or "none",
        "CUDA of torch, device": f"{torch.version.cuda or 'none'}, {device}",
        "CUDA toolkit": f"{home} ({toolchain.nvcc_version(home)})" if home else "none",
        "sources": toolchain.csrc_root(),
    }
    status = 0
    for builder, load in ((GearBuilder(), load_native), (GearCudaBuilder(), load_native_cuda)):
        try:
            if options.load:
                load()
            rows[builder.NAME] = state(builder)
        except GearError as error:
            status = status or int(options.load and isinstance(builder, GearBuilder))
            rows[builder.NAME] = f"{env_report.FAIL} {error}"
    for name, value in rows.items():
        print(name, "." * (_WIDTH - len(name)), value)
    return status


def state(builder: GearBuilder | GearCudaBuilder) -> str:
    """Describe an op's build in one line: whether it is prebuilt or built, or why it is not."""
    module = jit.loaded(builder.NAME)
    if module is not None:
        return f"{env_report.OKAY} loaded from {module.__file__}"
    prebuilt, why = builder.prebuilt()
    if prebuilt is not None:
        return f"{env_report.OKAY} prebuilt, {prebuilt}"
    missing = builder.missing()
    is_finished = builder.finished() is not None
    if missing and not is_finished:
        no = f"{env_report.YELLOW}[NO]{env_report.END}"
        return f"{no} {why}; {', '.join(missing)}: {' and '.join(missing.values())}"
    when = "built just in time," if is_finished else "is built on first use, in"
    return f"{env_report.OKAY} {why}; {when} {jit.build_folder(builder.jit_name())}"
