"""The native ops without DeepSpeed: dependencies of a build, the build that fits this process, its import.

`builder` adds the DeepSpeed op builders that compile them. A process that finds a build that fits need not
import DeepSpeed, which warns where it finds no GPU.
"""

from __future__ import annotations

import importlib.machinery
import json
import platform
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch

from ..errors import BuildError
from . import jit, toolchain

# No -ffast-math and no contraction: every backend gives the same bits. No -std: torch's headers decide it.
CXX_FLAGS = ["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread", "-Wno-reorder"]


class NativeOp(ABC):
    """A native op: its sources, the key of its builds, and the builds that fit this process."""

    NAME: ClassVar[str]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # of a DeepSpeed op builder, where it is one
        self.csrc = toolchain.csrc_root()

    def absolute_name(self) -> str:
        """Return the module name of a prebuilt op."""
        return f"deepspeed_gear.ops.{self.NAME}_op"

    @abstractmethod
    def sources(self) -> list[str]:
        """List the files to compile. Their stems must differ: torch names objects by them."""

    def missing(self) -> dict[str, str]:
        """List the missing requirements of a build: what is missing -> how to get it."""
        return toolchain.missing_tools()

    def source_digest(self) -> str:
        """Hash every file that the compiler reads from `csrc`."""
        headers = (h for h in self.csrc.rglob("*.h") if self.reads(h))
        return toolchain.digest_of(self.csrc, {*map(Path, self.sources()), *headers})

    def reads(self, header: Path) -> bool:
        """Return whether a header of `csrc` may be included: a change of it then makes another build."""
        return True

    def key_parts(self) -> dict[str, Any]:
        """Return everything that a JIT build depends on."""
        return {
            **toolchain.abi(),
            "sources": self.source_digest(),
            "compiler": toolchain.compiler_version(),
            "deepspeed": toolchain.deepspeed_version(),  # its builder adds flags
            "flags": self.jit_flags(),
            "cpu": toolchain.cpu_features(),
        }

    def jit_flags(self) -> list[str]:
        """Return the flags of a build for this machine."""
        return [*CXX_FLAGS, *(["-march=native"] if platform.machine() in ("x86_64", "aarch64") else [])]

    def jit_name(self) -> str:
        """Return the name of the JIT build; it differs for every version of anything it depends on."""
        return f"{self.NAME}_{toolchain.short_key(self.key_parts())}"

    def load_finished(self) -> ModuleType | None:
        """Import the prebuilt op, else a finished build; None where there is neither.

        Raises:
            BuildError: It cannot be loaded, or another copy of the package has registered the op.
        """
        op = self.registered_op()
        if op is not None:
            raise BuildError(
                "torch.ops.gear",
                "is registered already by another copy of deepspeed_gear in this process",
                op,
                "start a new process, and import deepspeed_gear from one place only",
            )
        prebuilt, _ = self.prebuilt()
        if prebuilt is not None:
            return jit.import_file(self.absolute_name(), prebuilt)
        name = self.finished()
        return None if name is None else jit.import_built(name)

    def finished(self) -> str | None:
        """Return the name of the JIT build that can be loaded, None where one has to be made."""
        name = self.jit_name()
        return name if jit.is_built(name) else None

    def registered_op(self) -> str | None:
        """Return an op that exists before this builder loaded any; torch aborts if it is registered again."""
        return None

    def require_tools(self) -> None:
        """Check what a build needs.

        Raises:
            BuildError: Something is missing.
        """
        missing = self.missing()
        if missing:
            raise BuildError(
                f"the native op {self.NAME}",
                f"cannot be built: {', '.join(missing)}",
                remedy=f"{' and '.join(missing.values())}, or install a wheel that has the op",
            )

    def prebuilt(self) -> tuple[Path | None, str]:
        """Find the op that was built with the wheel.

        Returns:
            Its file, or None and why there is none or why it is not this process's.
        """
        folder = Path(__file__).resolve().parent
        stem = f"{self.NAME}_op"
        files = (folder / f"{stem}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
        found = next((file for file in files if file.is_file()), None)
        if found is None:
            return None, "not prebuilt"
        try:
            record = json.loads((folder / f"{stem}.json").read_text())
        except (OSError, ValueError):
            return None, f"prebuilt, but {stem}.json beside it cannot be read"
        expected = self.prebuilt_record()
        differing = [
            f"{k} {record.get(k)} instead of {expected[k]}" for k in expected if record.get(k) != expected[k]
        ]
        return (None, f"prebuilt for {', '.join(differing)}") if differing else (found, "prebuilt")

    def prebuilt_record(self) -> dict[str, str]:
        """Return the record beside a prebuilt op, which must be equal where it is loaded."""
        versions = {**toolchain.abi(), "torch": toolchain.release(str(torch.__version__))}
        return {**versions, "sources": self.source_digest()}


class CpuOp(NativeOp):
    """The CPU op: the store, selection and gather in C++."""

    NAME = "gear"

    def reads(self, header: Path) -> bool:
        return not header.stem.endswith("_cuda")

    def sources(self) -> list[str]:
        """List the bindings, and the C++ sources of every op and of the store."""
        folder = self.csrc / "bindings"
        rest = sorted(set(self.csrc.glob("*/*.cpp")) - set(folder.glob("*.cpp")))
        return existing([folder / "library.cpp", folder / "module.cpp", *rest])

    def registered_op(self) -> str | None:
        """Return an op of the namespace `gear`, whose schemas this library defines."""
        return next((n for n in torch._C._dispatch_get_all_op_names() if n.startswith("gear::")), None)


def existing(files: Iterable[Path]) -> list[str]:
    """Check that the sources lie where they are expected.

    Raises:
        BuildError: One is missing: the installation is damaged.
    """
    listed = [*files]
    for file in listed:
        if not file.is_file():
            raise BuildError(str(file), "must exist", remedy="install deepspeed_gear again")
    return [str(file) for file in listed]
