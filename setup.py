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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "ops" / "csrc"


class BuildPy(build_py):
    """Copies the sources to deepspeed_gear/ops/csrc; an editable install finds them in the checkout."""

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
        files = [file for file in sorted(CSRC.rglob("*")) if file.suffix in (".h", ".cpp", ".cu", ".cuh")]
        return [(file, base / file.relative_to(CSRC)) for file in files]


def environment_of(variable: str) -> None:
    """Make torch and DeepSpeed of the environment that is installed into importable, or end."""
    # pip's isolated build environment hides the packages of the environment that it installs into; torch's
    # headers must be that one's, so it is looked up again, behind the build environment's own packages.
    site.addsitedir(sysconfig.get_path("purelib"))
    sys.path.insert(0, str(ROOT))
    try:
        from deepspeed_gear.ops import builder, toolchain  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"{variable}=1 builds against the torch and DeepSpeed that are installed, but: {error}. "
            "Install them first; with other installers than pip, build with --no-build-isolation."
        )
    missing = toolchain.missing_tools()
    if missing:
        sys.exit(f"{variable}=1: {', '.join(missing)}; {' and '.join(missing.values())}, or leave it out.")


def cpu_extension() -> Any:
    """Describe the prebuilt CPU op: the just-in-time build's builder, portable flags."""
    from deepspeed_gear.ops.builder import GearBuilder

    return GearBuilder().builder()


def cuda_extension() -> Any:
    """Describe the bindings of the kernels; `BuildNative` adds the kernels, which only nvcc compiles.

    torch may be built without CUDA: the bindings use its headers of the host alone. The runtime is static,
    with hidden names, so that it is not mixed with the one that torch has loaded.
    """
    from torch.utils.cpp_extension import CppExtension

    from deepspeed_gear.errors import GearError
    from deepspeed_gear.ops import builder as builders
    from deepspeed_gear.ops.native_op import CXX_FLAGS

    try:
        runtime = builders.static_runtime()
    except GearError as error:
        sys.exit(f"DS_BUILD_GEAR_CUDA=1: {error}")
    builder = builders.GearCudaBuilder()
    return CppExtension(
        builder.absolute_name(),
        builder.bindings(),
        include_dirs=builder.include_paths(),
        extra_compile_args={"cxx": [*CXX_FLAGS, "-mtune=generic"]},
        extra_objects=[str(runtime)],
        # libtorch.so needs libtorch_cuda.so where torch has CUDA; a function of it is looked up lazily.
        extra_link_args=[
            f"-Wl,--exclude-libs,{runtime.name}",
            "-Wl,-z,lazy",
            "-Wl,--no-as-needed",
            "-ltorch",
            "-lrt",
            "-ldl",
            "-lpthread",
        ],
    )


def native_ops(wanted: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Describe prebuilt ops to setuptools, by the variables that ask for them."""
    environment_of(next(iter(wanted)))
    from torch.utils.cpp_extension import BuildExtension

    from deepspeed_gear.ops import toolchain
    from deepspeed_gear.ops.builder import GearBuilder, GearCudaBuilder, compile_kernels, nvcc_flags

    builders = {op.absolute_name(): op for op in (GearBuilder(), GearCudaBuilder())}
    extensions = [describe() for describe in wanted.values()]
    for extension in extensions:
        # setuptools wants paths below the project.
        extension.sources = [os.path.relpath(source, ROOT) for source in extension.sources]

    class BuildNative(BuildExtension):
        """Compiles kernels, and records beside each op what it was built for."""

        def run(self) -> None:
            with toolchain.ninja_on_path():
                super().run()

        def copy_extensions_to_source(self) -> None:
            super().copy_extensions_to_source()
            self._record(Path(self.get_finalized_command("build_py").get_package_dir("deepspeed_gear.ops")))

        def build_extensions(self) -> None:
            for extension in self.extensions:
                if extension.name == GearCudaBuilder().absolute_name():
                    extension.extra_objects[:0] = self._kernels()
            super().build_extensions()
            self._record(Path(self.get_ext_fullpath(extensions[0].name)).parent)

        def get_outputs(self) -> list[str]:
            folder = Path(self.build_lib, "deepspeed_gear", "ops")
            records = [str(folder / self._record_name(extension.name)) for extension in extensions]
            return [*super().get_outputs(), *records]

        def _kernels(self) -> list[str]:
            flags = nvcc_flags()
            parts = {"flags": flags, "sources": GearCudaBuilder().source_digest()}
            return compile_kernels(Path(self.build_temp, f"kernels-{toolchain.short_key(parts)}"), flags)

        def _record(self, folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            for extension in extensions:
                record = builders[extension.name].prebuilt_record()
                if extension.name == GearCudaBuilder().absolute_name():
                    record["architectures"] = os.environ["TORCH_CUDA_ARCH_LIST"]
                (folder / self._record_name(extension.name)).write_text(json.dumps(record, indent=1) + "\n")

        @staticmethod
        def _record_name(extension: str) -> str:
            return f"{extension.rpartition('.')[2]}.json"

    return {"ext_modules": extensions, "cmdclass": {"build_py": BuildPy, "build_ext": BuildNative}}


os.chdir(ROOT)
OPS = {"DS_BUILD_GEAR": cpu_extension, "DS_BUILD_GEAR_CUDA": cuda_extension}
WANTED = {variable: describe for variable, describe in OPS.items() if os.environ.get(variable) == "1"}
setup(**(native_ops(WANTED) if WANTED else {"cmdclass": {"build_py": BuildPy}}))
