"""Put ops/csrc into the wheel and, with DS_BUILD_GEAR=1, the CPU op built for the torch of this environment.

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


def native_op() -> dict[str, Any]:
    """Describe the prebuilt CPU op to setuptools: the just-in-time build's builder, portable flags."""
    # pip's isolated build environment hides the packages of the environment that it installs into; torch's
    # headers must be that one's, so it is looked up again, behind the build environment's own packages.
    site.addsitedir(sysconfig.get_path("purelib"))
    sys.path.insert(0, str(ROOT))
    try:
        from torch.utils.cpp_extension import BuildExtension

        from deepspeed_gear.ops import toolchain
        from deepspeed_gear.ops.builder import GearBuilder
    except ImportError as error:
        sys.exit(
            f"DS_BUILD_GEAR=1 builds against the torch and DeepSpeed that are installed, but: {error}. "
            "Install them first; with other installers than pip, build with --no-build-isolation."
        )
    builder = GearBuilder()
    missing = builder.missing()
    if missing:
        sys.exit(f"DS_BUILD_GEAR=1: {', '.join(missing)}; {' and '.join(missing.values())}, or leave it out.")

    class BuildNative(BuildExtension):
        """Records beside the op what it was built for."""

        def run(self) -> None:
            with toolchain.ninja_on_path():
                super().run()

        def copy_extensions_to_source(self) -> None:
            super().copy_extensions_to_source()
            self._record(Path(self.get_finalized_command("build_py").get_package_dir("deepspeed_gear.ops")))

        def build_extensions(self) -> None:
            super().build_extensions()
            self._record(Path(self.get_ext_fullpath(builder.absolute_name())).parent)

        def get_outputs(self) -> list[str]:
            return [
                *super().get_outputs(),
                str(Path(self.build_lib, "deepspeed_gear", "ops", "gear_op.json")),
            ]

        def _record(self, folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "gear_op.json").write_text(json.dumps(builder.prebuilt_record(), indent=1) + "\n")

    extension = builder.builder()
    # setuptools wants paths below the project.
    extension.sources = [os.path.relpath(source, ROOT) for source in extension.sources]
    return {"ext_modules": [extension], "cmdclass": {"build_py": BuildPy, "build_ext": BuildNative}}


os.chdir(ROOT)
setup(**(native_op() if os.environ.get("DS_BUILD_GEAR") == "1" else {"cmdclass": {"build_py": BuildPy}}))
