"""The just-in-time build by the real compiler, of a small op: its name, its lock, and what can go
wrong.
"""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import deepspeed
import pytest
import torch
from process_support import exit_status, in_child, kill

from deepspeed_gear.errors import BuildError
from deepspeed_gear.ops import backends, jit, load_backend, op_builders, toolchain
from deepspeed_gear.ops.native_op import CpuOp, NativeOp
from deepspeed_gear.ops.op_builders import GearBuilder, GearCudaBuilder
from deepspeed_gear.timeouts import wait_until

BINDING = """
#include <Python.h>
#include "common/answer.h"
int Compute();
static PyObject* Answer(PyObject*, PyObject*) { return PyLong_FromLong(Compute()); }
static PyMethodDef methods[] = {{"answer", Answer, METH_NOARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "small", nullptr, -1, methods};
#define JOIN(a, b) a##b
#define INIT(name) JOIN(PyInit_, name)
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""
# Loads the op of the sources in argv[1], waits argv[2] seconds at most.
DRIVER = """
import pathlib, sys
from deepspeed_gear.ops.op_builders import GearBuilder
builder = GearBuilder()
builder.csrc = pathlib.Path(sys.argv[1])
builder.load(timeout_s=float(sys.argv[2]))
"""
# A compiler that notes each compilation with its process id, and waits for the file $GATE before
# it.
COMPILER = """#!/bin/sh
case " $* " in *" -c "*)
  echo "$$ $*" >>"$LOG"
  while [ -n "$GATE" ] && [ ! -e "$GATE" ]; do sleep 0.02; done ;;
esac
exec c++ "$@"
"""


class Workshop:
    """A small op's sources, an empty extensions folder, and processes that load the op."""

    def __init__(self, folder: Path, checkout: Path) -> None:
        self.csrc, self.extensions, self.log, self.gate = (
            folder / n for n in ("csrc", "ext", "log", "gate")
        )
        for name in ("bindings", "common", "cpu"):
            (self.csrc / name).mkdir(parents=True)
        (self.csrc / "bindings" / "module.cpp").write_text(BINDING)
        (self.csrc / "bindings" / "library.cpp").write_text(
            '#include "common/answer.h"\nint Compute() { return kAnswer; }\n'
        )
        self.answer(1)
        compiler = folder / "cxx"
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        self.log.touch()
        self.checkout = checkout
        self.env = {
            "TORCH_EXTENSIONS_DIR": str(self.extensions),
            "CXX": str(compiler),
            "LOG": str(self.log),
            "GATE": "",
            "CCACHE_DISABLE": "1",  # torch puts an installed ccache in front of the compiler
        }
        self.folder = folder

    def answer(self, value: object) -> None:
        """Change the header, and with it what the op returns."""
        (self.csrc / "common" / "answer.h").write_text(f"constexpr int kAnswer = {value};\n")

    def start(
        self, timeout_s: float = 60, beside: Callable[[], None] | None = None, **env: str
    ) -> int:
        """Load the op in a child of this process, which has imported torch and DeepSpeed."""

        def action() -> None:
            os.environ.update({**self.env, **env})
            jit._loaded.clear()
            torch._C._dispatch_get_all_op_names = list  # the tests' own op is another
            builder = GearBuilder()
            builder.csrc = self.csrc
            try:
                text = f"answer {builder.load(timeout_s=timeout_s, beside=beside).answer()}"
            except BuildError as error:
                text = f"error {error}"
            (self.folder / f"printed-{os.getpid()}").write_text(text)

        return in_child(action)

    def finish(self, child: int) -> str:
        """Wait for a child, which must not crash; give what it printed."""
        assert exit_status(child) == 0, "it crashed"
        return (self.folder / f"printed-{child}").read_text()

    def load(self, timeout_s: float = 60, **env: str) -> str:
        """Load the op in a child, and give what that printed."""
        return self.finish(self.start(timeout_s, **env))

    def compilations(self) -> list[str]:
        """The commands that compiled something."""
        return [line for line in self.log.read_text().splitlines() if line]

    def files(self) -> dict[str, tuple[int, int]]:
        """Inode and time of change of every file of the build."""
        return {f.name: (f.stat().st_ino, f.stat().st_mtime_ns) for f in self.built().iterdir()}

    def built(self) -> Path:
        """The folder of the one build there is."""
        (folder,) = (path for path in self.extensions.iterdir() if path.is_dir())
        return folder


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other processes bring about, for nearly as long as a test
    may take.
    """
    assert wait_until(condition, 280, 0.02), "waited in vain"


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that ended and was not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def workshop(tmp_path: Path, checkout: Path) -> Iterator[Workshop]:
    shop = Workshop(tmp_path, checkout)
    yield shop
    shop.gate.touch()


# The key


def test_the_name_changes_with_everything_that_changes_the_build(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CpuOp().jit_name() == GearBuilder().jit_name()
    assert toolchain.installed_version("deepspeed") == deepspeed.__version__
    builder = GearBuilder()
    second = workshop.csrc / "cpu" / "second.cpp"
    builder.csrc = workshop.csrc
    changes: list[Callable[[], object]] = [
        lambda: workshop.answer(2),
        lambda: second.write_text("int Second() { return 2; }\n"),
        lambda: second.rename(second.with_name("third.cpp")),
        lambda: monkeypatch.setattr(torch, "__version__", "2.99.0+cpu"),
        lambda: monkeypatch.setattr(builder, "jit_flags", lambda: ["-O1"]),
        lambda: monkeypatch.setattr(toolchain, "cpu_features", lambda: "x86_64 sse2"),
        lambda: monkeypatch.setattr(toolchain, "compiler_version", lambda: "c++ 99"),
        lambda: monkeypatch.setattr(toolchain, "installed_version", lambda _: "0.99"),
    ]
    names = [builder.jit_name()]
    for change in changes:
        change()
        names.append(builder.jit_name())
    assert len(set(names)) == len(names)
    # A change of the kernels must not rebuild the CPU op.
    (workshop.csrc / "cuda").mkdir()
    (workshop.csrc / "cuda" / "kernel.cu").write_text("\n")
    assert builder.jit_name() == names[-1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> GearCudaBuilder:
    """The kernels' builder on a machine with a GPU and a toolkit, as far as its key goes."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(toolchain, "cuda_home", lambda: Path("/cuda"))
    monkeypatch.setattr(toolchain, "hook_cuda_home", lambda: toolchain.cuda_home())
    monkeypatch.setattr(toolchain, "nvcc_version", lambda home: "release 13.0" if home else "")
    return GearCudaBuilder()


@pytest.mark.parametrize(
    ("installed", "fits"), [((13, 0), True), ((13, 7), True), ((12, 9), False)]
)
def test_a_toolkit_of_torchs_major_version_fits(
    gpu: GearCudaBuilder, monkeypatch: pytest.MonkeyPatch, installed: tuple[int, int], fits: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(op_builders, "installed_cuda_version", lambda name: installed)
    found = [(what, remedy) for what, remedy in gpu.missing().items() if "toolkit" in what]
    refused = ("toolkit 12.9 is not for torch's CUDA 13.0", "install the CUDA 13.0 toolkit")
    assert found == ([] if fits else [refused])


def test_a_finished_build_of_the_kernels_is_taken_where_all_that_it_depends_on_agrees(
    gpu: GearCudaBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = gpu.jit_name()
    library = jit.build_folder(name) / f"{name}.so"

    def build() -> ModuleType:
        library.write_text("no library")
        return ModuleType(name)

    assert gpu.finished() is None
    jit.build_or_import(name, build, 9.0)
    assert gpu.finished() == gpu.jit_name() == name
    with pytest.raises(BuildError, match=f"{name}.so cannot be loaded"):
        gpu.load()
    others = {
        "get_device_capability": (torch.cuda, lambda index: (8, 0)),
        "is_available": (torch.cuda, lambda: False),
        "__version__": (torch, "2.99.0+cu130"),
        "cpu_features": (toolchain, lambda: "x86_64 sse2"),
        "compiler_version": (toolchain, lambda: "c++ 99"),
        "installed_version": (toolchain, lambda _: "0.99"),
        "cuda_home": (toolchain, lambda: None),
        "_NVCC_FLAGS": (op_builders, ["--fmad=true"]),
        "_DROPPED_FLAGS": (op_builders, ()),
    }
    for what, (module, value) in others.items():
        with monkeypatch.context() as patch:
            patch.setattr(module, what, value)
            assert gpu.finished() is None, what
            assert what == "is_available" or gpu.jit_name() != name
    for variable in (
        "TORCH_CUDA_ARCH_LIST",
        "NVCC_PREPEND_FLAGS",
        "NVCC_APPEND_FLAGS",
    ):  # which nvcc reads
        with monkeypatch.context() as patch:
            patch.setenv(variable, "8.0")
            assert gpu.jit_name() != name, variable
    library.write_text("half")
    assert gpu.finished() is None


# The build


def test_a_build_is_reused_as_long_as_it_is_whole_and_its_sources_are_the_same(
    workshop: Workshop,
) -> None:
    assert workshop.load() == "answer 1"
    assert len(workshop.compilations()) == 2
    assert workshop.load() == "answer 1"
    assert len(workshop.compilations()) == 2
    library = workshop.built() / f"{workshop.built().name}.so"
    library.write_bytes(library.read_bytes()[:1000])
    assert workshop.load() == "answer 1", "a truncated library is built again"
    assert len(workshop.compilations()) == 4
    workshop.answer(2)
    assert workshop.load() == "answer 2"


def test_processes_that_start_together_build_once(workshop: Workshop) -> None:
    processes = [workshop.start(GATE=str(workshop.gate)) for _ in range(3)]
    until(lambda: len(workshop.compilations()) >= 1)
    workshop.gate.touch()
    assert [workshop.finish(process) for process in processes] == ["answer 1"] * 3
    assert len(workshop.compilations()) == 2


def test_the_kernels_are_built_beside_the_cpu_op(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first op's compiler waits for a file, which the second op's process writes when it is
    built.
    """
    (tmp_path / "second").mkdir()
    second = Workshop(tmp_path / "second", workshop.checkout)
    second.answer(2)
    opens_gate = f"{DRIVER}\npathlib.Path({str(workshop.gate)!r}).touch()\n"
    command = ["env", "GATE=", sys.executable, "-c", opens_gate, str(second.csrc), "60"]
    monkeypatch.setattr(backends, "_BUILD_KERNELS", command)

    def start_kernels() -> None:
        (tmp_path / "started").touch()
        backends.start_kernels()

    env = {"PYTHONPATH": str(workshop.checkout), "GATE": str(workshop.gate)}
    assert workshop.finish(workshop.start(beside=start_kernels, **env)) == "answer 1"
    until(lambda: len(workshop.compilations()) == 4)  # of both: a log is shared
    (tmp_path / "started").unlink()
    assert workshop.finish(workshop.start(beside=start_kernels, **env)) == "answer 1"
    assert not (tmp_path / "started").exists(), "a finished build starts nothing"


@pytest.mark.parametrize(
    ("backend", "has_gpu", "expected"),
    [("auto", True, True), ("auto", False, False), ("cpu", True, False)],
)
def test_the_kernels_are_built_where_they_will_be_used(
    monkeypatch: pytest.MonkeyPatch, backend: str, has_gpu: bool, expected: bool
) -> None:
    module = backends.load_native()
    beside = []

    def build(self: CpuOp, **options: Any) -> ModuleType:
        beside.append(options["beside"])
        return module

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(CpuOp, "load", build)
    load_backend(backend)
    assert beside == [backends.start_kernels if expected else None]


def test_building_kernels_where_they_cannot_be_built_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GearCudaBuilder, "missing", lambda self: {"no CUDA toolkit": "install it"})
    monkeypatch.setattr(GearCudaBuilder, "load", lambda self: pytest.fail("it was built"))
    backends.build_kernels()


def test_a_killed_build_does_not_block_the_next(workshop: Workshop) -> None:
    killed = workshop.start(GATE=str(workshop.gate))
    until(lambda: len(workshop.compilations()) >= 1)
    assert (workshop.built() / "lock").exists(), "torch's own lock, on which it would wait for ever"
    kill(killed)
    orphans = [int(line.split()[0]) for line in workshop.compilations()]
    assert any(map(alive, orphans)), "the compiler outlives its parent"
    assert workshop.load() == "answer 1"
    # What the orphans write when they go on must not reach the finished build.
    before = workshop.files()
    workshop.gate.touch()
    until(lambda: not any(map(alive, orphans)))
    assert workshop.files() == before
    assert workshop.load() == "answer 1"
    assert [path.name for path in workshop.extensions.iterdir() if ".dead" in path.name] == []


def test_the_wait_for_another_build_is_bounded(workshop: Workshop) -> None:
    builder = workshop.start(GATE=str(workshop.gate))
    until(lambda: len(workshop.compilations()) >= 1)
    printed = workshop.load(timeout_s=0.3)
    assert printed.startswith("error ")
    assert f"{workshop.built()}.lock is still held by pid {builder} on " in printed
    assert "after 0.3 s" in printed
    workshop.gate.touch()
    assert workshop.finish(builder) == "answer 1"


def has_open(pid: int, path: Path) -> bool:
    """Tell whether a process has a file open. It opens and closes others meanwhile."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(link) == str(path.resolve()):
                return True
    return False


def test_a_compile_error_is_raised_here_and_where_that_build_is_waited_for(
    workshop: Workshop,
) -> None:
    workshop.answer("no_such_name")
    first = workshop.start(GATE=str(workshop.gate))
    until(lambda: len(workshop.compilations()) >= 1)
    second = workshop.start(GATE=str(workshop.gate))
    # The second has opened the lock file, so it waits.
    lock = Path(f"{workshop.built()}.lock")
    until(lambda: has_open(second, lock))
    workshop.gate.touch()
    printed = workshop.finish(first)
    assert printed.startswith(f"error the native op gear failed to compile in {workshop.built()}")
    assert "answer.h:1:" in printed
    assert "no_such_name" in printed
    compilations = len(workshop.compilations())
    printed = workshop.finish(second)
    assert "failed to build in another process" in printed
    assert "no_such_name" in printed
    assert len(workshop.compilations()) == compilations
    workshop.answer(3)
    assert workshop.load() == "answer 3"


def test_what_a_build_lacks_is_named_with_its_remedy(workshop: Workshop, tmp_path: Path) -> None:
    assert workshop.load(CXX="/nowhere/c++") == (
        "error the native op gear is not prebuilt, and cannot be built: no C++ compiler "
        "(/nowhere/c++); install g++, or install a wheel that has the op"
    )
    (tmp_path / "file").touch()
    printed = workshop.load(TORCH_EXTENSIONS_DIR=str(tmp_path / "file" / "below"))
    assert printed.startswith("error ")
    assert "set TORCH_EXTENSIONS_DIR to a folder" in printed


def test_ninja_is_found_beside_the_interpreter(workshop: Workshop, tmp_path: Path) -> None:
    """A venv that is used by its path, without being activated, has its scripts not on the PATH."""
    if shutil.which("ninja", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("this environment has no ninja of its own")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in "sh c++ g++ as ld which sleep".split():
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    assert shutil.which("ninja", path=str(tools)) is None
    assert workshop.load(PATH=str(tools)) == "answer 1"


def test_a_build_that_others_can_write_is_not_loaded(workshop: Workshop) -> None:
    before = os.umask(0o000)
    try:
        workshop.extensions.mkdir(mode=0o755)
        assert workshop.load() == "answer 1"
    finally:
        os.umask(before)
    (library,) = workshop.built().glob("*.so")
    assert [oct(path.stat().st_mode & 0o777) for path in (library, library.parent)] == [
        "0o755",
        "0o755",
    ]
    library.chmod(0o777)
    assert f"error {library} must not be writable by group or others" in workshop.load()


# Libraries and folders that another user could write are not loaded from

OTHER = 54_321  # a user and a group that no machine has
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def chain(folder: Path) -> Path:
    """Make an extensions folder with a build; return the library."""
    library = folder / "extensions" / "gear_0" / "gear_0.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    for path in (library, library.parent, library.parent.parent):
        path.chmod(0o755)
    return library


def test_what_only_this_user_and_root_can_write_is_loaded(tmp_path: Path) -> None:
    library = chain(tmp_path)
    jit.check_library(library)
    library.parent.parent.chmod(0o1777)  # as /tmp: nothing of this user can be replaced in it
    jit.check_library(library)
    jit.check_folders(library.parent.parent / "not_there")


@pytest.mark.parametrize("up", [0, 1, 2], ids=["library", "build folder", "extensions folder"])
def test_what_another_user_could_write_or_has_is_refused(tmp_path: Path, up: int) -> None:
    library = chain(tmp_path)
    path = [library, *library.parents][up]
    for mode in (0o757, 0o777, 0o722):
        path.chmod(mode)
        text = rf"{path} must not be writable by group or others: .*, got '{oct(mode)}'; "
        text += rf"chmod go-w {path}, or"
        with pytest.raises(BuildError, match=text):
            jit.import_file("gear_0", library)
    path.chmod(0o755)
    if os.geteuid() == 0:  # only root can give files away
        os.chown(path, OTHER, -1)
        with pytest.raises(
            BuildError, match=rf"{path} must belong to user 0 or root: .*, got 'user {OTHER}'"
        ):
            jit.import_file("gear_0", library)


@AS_ROOT
def test_only_a_private_group_may_write(tmp_path: Path) -> None:
    library = chain(tmp_path)
    library.chmod(0o775)
    jit.check_library(library)  # the group root of user root
    os.chown(library, -1, OTHER)
    with pytest.raises(BuildError, match=r"must not be writable by group or others"):
        jit.check_library(library)


@AS_ROOT
def test_a_prebuilt_library_belongs_to_who_installed_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "_PACKAGE", tmp_path)
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "trust.py"))
    for name in ("trust.py", "gear_op.so"):
        (tmp_path / name).touch(0o644)
        os.chown(tmp_path / name, OTHER, OTHER)
    jit.check_library(tmp_path / "gear_op.so")
    os.chown(tmp_path / "trust.py", 0, 0)
    with pytest.raises(BuildError, match="must belong to user 0 or root"):
        jit.check_library(tmp_path / "gear_op.so")
    os.chown(tmp_path / "gear_op.so", 0, 0)
    (tmp_path / "gear_op.so").chmod(0o666)
    with pytest.raises(BuildError, match="must not be writable by group or others"):
        jit.check_library(tmp_path / "gear_op.so")


# Which library is loaded


class WheelOp(NativeOp):
    """An op that exists in a wheel only."""

    NAME = "small"

    def sources(self) -> list[str]:
        return []


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"torch": "2.4.99"}, "prebuilt for torch 2.4.99 instead of "),
        ({"python": "cpython-38-x86_64-linux-gnu"}, "prebuilt for python cpython-38"),
        ({"sources": "of another version"}, "prebuilt for sources of another version instead of "),
        ({}, "prebuilt, but cannot be loaded: "),
        (None, "prebuilt, but small_op.json beside it cannot be read"),
    ],
    ids=["torch", "python", "sources", "linker", "no-record"],
)
def test_an_op_of_a_wheel_that_does_not_fit_gives_way_and_the_log_says_why(
    other: dict[str, str] | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("deepspeed_gear.ops.native_op.__file__", str(tmp_path / "native_op.py"))
    op = WheelOp()
    assert op.load_finished() is None
    assert caplog.text == ""
    (tmp_path / "small_op.so").write_text("no library")
    if other is not None:
        record = {**op.prebuilt_facts(), **other}
        (tmp_path / "small_op.json").write_text(json.dumps(record))
    assert op.load_finished() is None
    (line,) = caplog.messages
    assert line.startswith(f"the native op small is {why}")
    assert line.endswith("; a build for this process is used")


def test_a_finished_build_is_found_where_torch_builds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both with a folder of the user's choice and in torch's own below the user's caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for given in (None, str(tmp_path / "chosen")):
        if given is None:
            monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
        else:
            monkeypatch.setenv("TORCH_EXTENSIONS_DIR", given)
        assert jit.built_library("small_1") is None
        folder = jit.build_folder("small_1")
        folder.mkdir(parents=True)
        (folder / "small_1.so").write_bytes(b"12")
        assert jit.built_library("small_1") is None, "it is not finished"
        (folder / "gear_finished.json").write_text('{"bytes": 2}')
        assert jit.built_library("small_1") == folder / "small_1.so"
