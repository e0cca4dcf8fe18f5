"""A wheel installs into another environment and works there, outside the checkout."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch
from compiled_kernels import compiled_kernels, flags_for, folder_of

from deepspeed_gear.ops import jit, toolchain
from deepspeed_gear.ops.backends import load_native
from deepspeed_gear.ops.native_op import CudaOp, covers
from deepspeed_gear.ops.op_builders import GearBuilder, GearCudaBuilder

SHOW = """
import deepspeed_gear, torch
from deepspeed_gear.ops.backends import load_native
print(deepspeed_gear.__file__)
print(load_native().__file__)
print(len([n for n in torch._C._dispatch_get_all_op_names() if n.startswith('gear::')]))
table = {"capacity_steps": 9, "schema": {"columns": {"x": {"dtype": "float32"}}}}
with deepspeed_gear.Replay({"batch_size": 2, "tables": {"main": table}}) as replay:
    replay.add({"x": [1.0]})
    assert replay.sample()["x"].tolist() == [1.0, 1.0]
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, checkout: Path) -> Path:
    """Copy what a wheel is made from, so that nothing of its build is left in the checkout."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(checkout / name, copy)
    leave_out = shutil.ignore_patterns("__pycache__", "*.so", "gear_*op.json")
    for name in ("deepspeed_gear", "ops"):
        shutil.copytree(checkout / name, copy / name, ignore=leave_out)
    return copy


# Copies the objects that the just-in-time build has; what it compiles is not optimised.
QUICK_COMPILER = """#!{python} -SE
import os, pathlib, shutil, sys
arguments = sys.argv[1:]
if "-c" in arguments:  # SOURCE -o OBJECT
    at = arguments.index("-o")
    source = pathlib.Path(arguments[at - 1])
    known = pathlib.Path({built!r}, source.stem + ".o")
    if known.is_file() and source.stem != "entry":  # which has the module's name
        shutil.copyfile(known, arguments[at + 1])
        sys.exit()
os.execvp({command}[0], [*{command}, *arguments, "-O0", "-g0"])
"""


def build_wheel(source: Path, target: Path, **env: str) -> Path:
    """Build without a network: in this environment, with what it has."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    command += ["-w", str(target), str(source)]
    if not toolchain.missing_tools():
        compiler = source / "quick-c++"
        built = str(jit.build_folder(GearBuilder().jit_name()))
        command_line = toolchain.compiler()
        compiler.write_text(
            QUICK_COMPILER.format(python=sys.executable, built=built, command=command_line)
        )
        compiler.chmod(0o755)
        env["CXX"] = str(compiler)
    run = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def native_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with the prebuilt op."""
    if toolchain.missing_tools():
        pytest.skip(", ".join(toolchain.missing_tools()))
    shutil.rmtree(source / "build", ignore_errors=True)  # it holds the ops of the wheel before
    return build_wheel(source, tmp_path_factory.mktemp("native"), DS_BUILD_GEAR="1")


@pytest.fixture(scope="module")
def plain_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with the sources only."""
    shutil.rmtree(source / "build", ignore_errors=True)
    return build_wheel(source, tmp_path_factory.mktemp("plain"), DS_BUILD_GEAR="0")


class Environment:
    """An environment of its own that sees this one's packages, but not the editable checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = folder / "bin" / "python"
        site = Path(self.output("import sysconfig; print(sysconfig.get_path('purelib'))"))
        # A path named in a .pth file is searched, but its own .pth files, the editable ones, are
        # not read.
        (site / "outer.pth").write_text(
            f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n"
        )
        assert (
            self.output("import importlib.util as u; print(u.find_spec('deepspeed_gear'))")
            == "None"
        )

    def install(self, wheel: Path) -> None:
        """Install a wheel, in place of the one before."""
        options = ["-q", "--no-deps", "--no-index", "--force-reinstall"]
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.python),
            "install",
            *options,
            str(wheel),
        ]
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment, from a folder where nothing of ours lies."""
        merged = {k: v for k, v in {**os.environ, **env}.items() if k != "PYTHONPATH"}
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            env=merged,
            cwd="/",
            capture_output=True,
            text=True,
        )

    def output(self, code: str, **env: str) -> str:
        """Run Python code; give what it printed."""
        run = self.run("python", "-c", code, **env)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


def test_the_prebuilt_op_is_loaded_without_a_compiler(
    environment: Environment, native_wheel: Path, tmp_path: Path
) -> None:
    environment.install(native_wheel)
    (tmp_path / "ext").mkdir()
    env = {"CXX": "/nowhere/c++", "TORCH_EXTENSIONS_DIR": str(tmp_path / "ext")}
    package, op, num_ops = environment.output(SHOW, **env).splitlines()
    assert package.startswith(str(environment.folder))
    assert Path(op).parent == Path(package).parent / "ops"
    assert int(num_ops) > 0
    assert list((tmp_path / "ext").iterdir()) == []
    report = environment.run("gear", "report", "--load", "--quiet", **env)
    assert report.returncode == 0, report.stderr
    in_op_table, in_own_section = (
        line for line in report.stdout.splitlines() if line.startswith("gear .")
    )
    assert "YES" in in_op_table
    assert op in in_own_section
    # Under another torch it gives way to the just-in-time build.
    facts = next(environment.folder.rglob("gear_op.json"))
    found = json.loads(facts.read_text())
    assert found["torch"] == toolchain.release(torch.__version__)
    facts.write_text(json.dumps({**found, "torch": "2.4.99"}))
    run = environment.run("python", "-c", SHOW)
    assert run.returncode == 0, run.stderr
    package, op, _ = run.stdout.splitlines()
    assert not op.startswith(str(Path(package).parent))
    release = toolchain.release(torch.__version__)
    assert run.stderr.count(f"prebuilt for torch 2.4.99 instead of {release}; a build") == 1


def test_the_plain_wheel_builds_from_its_own_sources(
    environment: Environment, plain_wheel: Path
) -> None:
    if toolchain.missing_tools():
        pytest.skip(", ".join(toolchain.missing_tools()))
    environment.install(plain_wheel)
    package, _, num_ops = environment.output(SHOW).splitlines()
    assert package.startswith(str(environment.folder))
    assert int(num_ops) > 0
    where = environment.output(
        "from deepspeed_gear.ops import toolchain; print(toolchain.csrc_root())"
    )
    assert Path(where) == Path(package).parent / "ops" / "csrc"


def test_the_plain_wheel_holds_sources_types_and_license(plain_wheel: Path, checkout: Path) -> None:
    assert plain_wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(plain_wheel).namelist()
    csrc = checkout / "ops" / "csrc"
    for file in csrc.rglob("*"):
        if file.suffix in (".h", ".cpp", ".cu"):
            assert f"deepspeed_gear/ops/csrc/{file.relative_to(csrc)}" in names
    assert {"deepspeed_gear/py.typed", "deepspeed_gear/cli/train.py.template"} <= set(names)
    assert any(name.endswith("/LICENSE") for name in names)
    assert not [name for name in names if name.endswith(".so")]
    outside = {name.split("/")[0] for name in names}
    assert {name.split("-")[0] for name in outside} == {"deepspeed_gear"}


def test_a_prebuilt_wheel_is_for_this_python_only(native_wheel: Path) -> None:
    assert not native_wheel.name.endswith("-any.whl")
    names = zipfile.ZipFile(native_wheel).namelist()
    assert f"deepspeed_gear/ops/gear_op{sysconfig.get_config_var('EXT_SUFFIX')}" in names
    assert "deepspeed_gear/ops/gear_op.json" in names


def test_type_checkers_find_an_editable_install(
    environment: Environment, source: Path, tmp_path: Path
) -> None:
    """mypy searches folders, and runs no import hook. It finds the package and skips it, for the
    time.
    """
    build = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    (tmp_path / "script.py").write_text("from deepspeed_gear import Replay\n")
    command = [sys.executable, "-m", "mypy", "--follow-imports=skip", "--cache-dir", os.devnull]
    command += ["--python-executable", str(environment.python), "script.py"]
    before = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "import-not-found" in before.stdout, before.stderr
    environment.install(wheel)
    after = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert after.returncode == 0, after.stdout + after.stderr
    where = environment.output(
        "from deepspeed_gear.ops import toolchain; print(toolchain.csrc_root())"
    )
    assert Path(where) == source / "ops" / "csrc"


# ---- the kernels ---------------------------------------------------------------------------------

LONG = os.environ.get("GEAR_LONG_TESTS") == "1"
ARCHITECTURES = "8.0;9.0;10.0+PTX" if LONG else "9.0"
LEFT_OUT = "scatter.cuda.o"
LOAD_KERNELS = """
import shutil, sys
import torch
from deepspeed_gear.errors import GearError
from deepspeed_gear.ops import load_backend
assert shutil.which("nvcc") is None
try:
    load_backend("cuda")
except GearError as error:
    print(error.name, error.rule, error.value, error.remedy, sep="\\n")
print(torch._C._dispatch_has_kernel_for_dispatch_key("gear::ring_add_", "CUDA"), "deepspeed" in sys.modules)
"""


@pytest.fixture(scope="module")
def kernel_wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel with the kernels, compiled without a GPU; the torch here may be built without CUDA.

    It compiles one kernel and finds the objects of the others, unless GEAR_LONG_TESTS=1.
    """
    if toolchain.missing_tools() or toolchain.cuda_home() is None:
        pytest.skip(", ".join([*toolchain.missing_tools(), "no nvcc"]))
    shutil.rmtree(source / "build", ignore_errors=True)
    target = tmp_path_factory.mktemp("kernels")
    env = {"DS_BUILD_GEAR_CUDA": "1", "TORCH_CUDA_ARCH_LIST": ARCHITECTURES}
    if LONG:
        return build_wheel(source, target, **env)
    flags = [
        flag.replace(str(toolchain.csrc_root()), str(source / "ops" / "csrc"))
        for flag in flags_for(ARCHITECTURES)
    ]
    temporary = source / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    folder = temporary / folder_of(flags)
    folder.mkdir(parents=True)
    for file in compiled_kernels(ARCHITECTURES)[0].glob("*.o"):
        if file.name != LEFT_OUT:
            shutil.copy2(file, folder)
    wheel = build_wheel(source, target, **env)
    assert [found.parent for found in temporary.glob(f"kernels-*/{LEFT_OUT}")] == [folder]
    return wheel


@pytest.fixture(scope="module")
def kernel_folder(kernel_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed into, as into an image."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(folder), str(kernel_wheel)], check=True, capture_output=True)
    return folder


def only_a_compiler(folder: Path) -> str:
    """A PATH with the C++ compiler, whose version is part of the CPU op's key, and nothing else."""
    folder.mkdir()
    compiler = toolchain.compiler()[0]
    (folder / Path(compiler).name).symlink_to(str(shutil.which(compiler)))
    return str(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_prebuilt_kernels_load_without_nvcc_up_to_the_missing_driver(
    kernel_folder: Path, tmp_path: Path
) -> None:
    load_native()  # builds the CPU op, which the wheel does not hold
    env = {k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDA_PATH")}
    env |= {"PATH": only_a_compiler(tmp_path / "bin"), "PYTHONPATH": str(kernel_folder)}
    run = subprocess.run(
        [sys.executable, "-c", LOAD_KERNELS], env=env, cwd="/", capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    name, rule, value, remedy, loaded = run.stdout.splitlines()
    assert name == "gear.backend"
    assert "there is no driver (libcuda.so.1: " in rule
    assert f"kernels loaded from {kernel_folder}/deepspeed_gear/ops/gear_cuda_op" in value
    assert "install NVIDIA's driver" in remedy
    assert loaded == "True False"


def test_a_wheel_of_kernels_records_what_they_are_for(kernel_wheel: Path) -> None:
    files = zipfile.ZipFile(kernel_wheel)
    facts = json.loads(files.read("deepspeed_gear/ops/gear_cuda_op.json"))
    assert facts["architectures"] == ARCHITECTURES
    assert facts["sources"] == GearCudaBuilder().source_digest()
    assert "deepspeed_gear/ops/gear_op.json" not in files.namelist()


def test_kernels_of_other_architectures_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = CudaOp()
    monkeypatch.setattr("deepspeed_gear.ops.native_op.__file__", str(tmp_path / "native_op.py"))
    (tmp_path / "gear_cuda_op.so").touch()
    facts = {**op.prebuilt_facts(), "architectures": "9.0"}
    (tmp_path / "gear_cuda_op.json").write_text(json.dumps(facts))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)
    assert op.prebuilt()[0] is not None, "which does not initialise CUDA"
    for capability, fits in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        path, why = op.fitting()
        assert (path is not None) == fits
        assert (
            fits
            or why == f"prebuilt for the architectures 9.0, not for {capability[0]}.{capability[1]}"
        )


def test_which_devices_kernels_run_on() -> None:
    assert covers("8.0", (8, 0))
    assert covers("8.0", (8, 6))
    assert not covers("8.6", (8, 0))
    assert not covers("8.0", (9, 0))
    assert covers("8.0;9.0+PTX", (12, 0))
    assert covers("8.0+PTX;9.0", (10, 0))
    assert not covers("9.0+PTX", (8, 0))


def test_builds_of_one_release_of_torch_fit_each_other() -> None:
    assert toolchain.release("2.13.0+cpu") == toolchain.release("2.13.0+cu130") == "2.13.0"
    for other in ("2.13.0a0+git1234", "2.11.0a0+eb65b36914.nv25.10", "2.13.0+cpu.cxx11.abi"):
        assert toolchain.release(other) == other
