"""Put ops/csrc into the wheel, and native ops that are built for the torch of this environment.

DS_BUILD_GEAR=1 adds the CPU op, DS_BUILD_GEAR_CUDA=1 the CUDA kernels for the architectures of
TORCH_CUDA_ARCH_LIST ("8.0;9.0;10.0+PTX"): nvcc is needed, a GPU is not.

Everything else is in pyproject.toml.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "ops" / "csrc"


class BuildPy(build_py):
    """Copies the sources to deepspeed_gear/ops/csrc; an editable install finds them in the
    checkout.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            # A build folder of an earlier version may hold sources that are no longer there.
            shutil.rmtree(self._base(), ignore_errors=True)
            for source, target in self._sources():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        copied = [] if self.editable_mode else [str(target) for _, target in self._sources()]
        return [*super().get_outputs(include_bytecode), *copied]

    def _base(self) -> Path:
        return Path(self.build_lib, "deepspeed_gear", "ops", "csrc")

    def _sources(self) -> list[tuple[Path, Path]]:
        base = self._base()
        files = [
            file for file in sorted(CSRC.rglob("*")) if file.suffix in (".h", ".cpp", ".cu", ".cuh")
        ]
        return [(file, base / file.relative_to(CSRC)) for file in files]


def environment_of(variable: str) -> None:
    """Make torch and DeepSpeed of the environment that is installed into importable, or end."""
    # pip's isolated build environment hides the packages of the environment that it installs into;
    # torch's headers must be that one's, so it is looked up again, behind the build environment's
    # own packages.
    site.addsitedir(sysconfig.get_path("purelib"))
    sys.path.insert(0, str(ROOT))
    try:
        from deepspeed_gear.ops import op_builders, toolchain  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"{variable}=1 builds against the torch and DeepSpeed that are installed, but: "
            f"{error}. "
            "Install them first; with other installers than pip, build with --no-build-isolation."
        )
    missing = toolchain.missing_tools()
    if missing:
        sys.exit(
            f"{variable}=1: {', '.join(missing)}; {' and '.join(missing.values())}, or leave it "
            f""
            f"out."
        )


def native_ops(wanted: list[str]) -> dict[str, Any]:
    """Describe prebuilt ops to setuptools, by the variables that ask for them."""
    environment_of(wanted[0])
    from torch.utils.cpp_extension import BuildExtension

    from deepspeed_gear.errors import GearError
    from deepspeed_gear.ops import toolchain
    from deepspeed_gear.ops.op_builders import (
        GearBuilder,
        GearCudaBuilder,
        compile_kernels,
        nvcc_flags,
    )

    ops = [op for op in (GearBuilder(), GearCudaBuilder()) if op.BUILD_VAR in wanted]
    try:
        extensions = {op.NAME: op.builder() for op in ops}
    except GearError as error:
        sys.exit(f"{wanted[-1]}=1: {error}")
    for extension in extensions.values():
        # setuptools wants paths below the project.
        extension.sources = [os.path.relpath(source, ROOT) for source in extension.sources]

    class BuildNative(BuildExtension):
        """Compiles kernels, and records beside each op what it was built for."""

        def run(self) -> None:
            with toolchain.ninja_on_path():
                super().run()

        def copy_extensions_to_source(self) -> None:
            super().copy_extensions_to_source()
            self._record(
                Path(self.get_finalized_command("build_py").get_package_dir("deepspeed_gear.ops"))
            )

        def build_extensions(self) -> None:
            if GearCudaBuilder.NAME in extensions:
                flags = nvcc_flags()
                parts = {"flags": flags, "sources": GearCudaBuilder().source_digest()}
                folder = Path(self.build_temp, f"kernels-{toolchain.short_key(parts)}")
                extensions[GearCudaBuilder.NAME].extra_objects[:0] = compile_kernels(folder, flags)
            super().build_extensions()
            self._record(Path(self.get_ext_fullpath(ops[0].absolute_name())).parent)

        def get_outputs(self) -> list[str]:
            folder = Path(self.build_lib, "deepspeed_gear", "ops")
            return [
                *super().get_outputs(),
                *(str(folder / f"{name}_op.json") for name in extensions),
            ]

        def _record(self, folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            for op in ops:
                facts = op.prebuilt_facts()
                if op.NAME == GearCudaBuilder.NAME:
                    facts["architectures"] = os.environ["TORCH_CUDA_ARCH_LIST"]
                (folder / f"{op.NAME}_op.json").write_text(json.dumps(facts, indent=1) + "\n")

    commands = {"build_py": BuildPy, "build_ext": BuildNative}
    return {"ext_modules": [*extensions.values()], "cmdclass": commands}


os.chdir(ROOT)
WANTED = [name for name in ("DS_BUILD_GEAR", "DS_BUILD_GEAR_CUDA") if os.environ.get(name) == "1"]
setup(**(native_ops(WANTED) if WANTED else {"cmdclass": {"build_py": BuildPy}}))
