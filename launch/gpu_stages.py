"""The stages of launch/test_gpu.sh: steps under time limits, each recorded as soon as it has ended.

A stage takes less than nine minutes on 16 cores without a network. A step that fails or runs out of
time does not end the stage. `--dry-run` runs what a machine without a GPU can: compilers, and the
steps' CPU lanes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STAGE_S = 530.0
LEAST_S = 10.0  # a step that would have less is not begun
TAIL = 4000  # characters of a step's output in the record
# Processes of a step: 16 cores run the steps of a wave, and one card takes turns between them.
SHARDS = 4
EXAMPLE_SHARDS = 8
GRAPH_SHARDS = 4
PYTHON = sys.executable
# Modules that builds and tests import, and what DeepSpeed depends on. The second ones are installed
# without what they depend on, which is torch or numpy.
PACKAGES = "setuptools pydantic tqdm ninja einops hjson msgpack packaging psutil cpuinfo".split()
PACKAGES += "rich pytest pytest_timeout hypothesis".split()
ALONE = "numpy h5py deepspeed".split()
PIP_NAMES = {"cpuinfo": "py-cpuinfo", "pytest_timeout": "pytest-timeout"}


@dataclass(frozen=True)
class Step:
    """A command of a stage.

    Args:
        name: Names its record and the file of its output.
        command: Runs in the checkout.
        limit_s: When it is ended.
        needs: What of `Machine.missing` it needs.
        dry: The command of a machine without a GPU.
        elsewhere: Why there is none: what covers the step on a CPU.
        dry_needs: What `dry` needs.
        env: Laid over the environment.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    needs: Sequence[str] = ("gpu",)
    dry: Sequence[str] | None = None
    elsewhere: str = ""
    dry_needs: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """What is missing here, by name, and why; and where builds and results lie."""

    missing: Mapping[str, str]
    toolkit: Path | None
    cache: Path
    out: Path

    def tool(self, name: str) -> str:
        """Return a program of the CUDA toolkit."""
        return tool_of(self.toolkit, name) or name


Wave = list[Step]  # steps that run at once


def tool_of(toolkit: Path | None, name: str) -> str | None:
    """Find a program beside nvcc or on the PATH."""
    beside = shutil.which(name, path=str(toolkit / "bin")) if toolkit is not None else None
    return beside or shutil.which(name)


# ---- steps ---------------------------------------------------------------------------------------


def pytest_step(name: str, *arguments: str, limit_s: float, **options: Any) -> Step:
    return Step(name, tests(*arguments), limit_s, **options)


def shards(
    name: str,
    count: int,
    *arguments: str,
    limit_s: float,
    dry: Sequence[str] | None = None,
    elsewhere: str,
) -> Wave:
    """Split the tests of a step over processes; a dry run has the first one."""
    return [
        pytest_step(
            f"{name} {i} of {count}",
            *arguments,
            limit_s=limit_s,
            dry=dry if i == 1 else None,
            elsewhere=elsewhere,
            env={"GEAR_TEST_SHARD": f"{i}/{count}"},
        )
        for i in range(1, count + 1)
    ]


def tests(*arguments: str) -> tuple[str, ...]:
    return (PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def figures_step(
    name: str, here: Machine, *figures: str, limit_s: float, smoke: Sequence[str] = ()
) -> Step:
    """Take figures of the benchmark; on a CPU `smoke` of them with tiny sizes."""
    benchmark = (PYTHON, "benchmarks/gpu.py", "--json", str(here.out / f"{file_name(name)}.json"))
    dry = (*benchmark, "--device", "cpu", "--smoke", *smoke) if smoke else None
    return Step(
        name, (*benchmark, *figures), limit_s, dry=dry, elsewhere="tests/unit/test_benchmarks.py"
    )


def packages(here: Machine) -> list[Wave]:
    """Install what the tests import and this Python lacks into a folder; its torch
    stays as it is.
    """
    lacking, alone = (
        [PIP_NAMES.get(name, name) for name in which if not is_there(name)]
        for which in (PACKAGES, ALONE)
    )
    pip = f"{PYTHON} -m pip install -q --target {here.cache / 'packages'}"
    commands = [f"{pip} {' '.join(lacking)}"] if lacking else []
    commands += [f"{pip} --no-deps {' '.join(alone)}"] if alone else []
    if not commands:
        return []
    return [[Step("packages", ("bash", "-c", " && ".join(commands)), 150, needs=())]]


def is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def builds(here: Machine) -> list[Wave]:
    """Both builds at once; the stages after the first one find them in the cache."""
    load = "from deepspeed_gear.ops.op_builders import {0}; print({0}().load().__file__)"
    cross = (
        "import pathlib, sys; from deepspeed_gear.ops import op_builders, toolchain; "
        "from deepspeed_gear.ops.native_op import CudaOp; flags = op_builders.nvcc_flags(); "
        "key = toolchain.short_key({'flags': flags, 'sources': CudaOp().source_digest()}); "
        "print(*op_builders.compile_kernels(pathlib.Path(sys.argv[1], f'kernels-{key}'), flags), "
        "sep='\\n')"
    )
    cpu = Step("build of the CPU op", (PYTHON, "-c", load.format("GearBuilder")), 300, needs=())
    cuda = Step(
        "build of the kernels",
        (PYTHON, "-c", load.format("GearCudaBuilder")),
        300,
        needs=("gpu", "nvcc"),
        dry=(PYTHON, "-c", cross, str(here.cache)),
        dry_needs=("nvcc",),
        # The kernels are one unit for each source: a dry run needs no more than one architecture of
        # them.
        env={"TORCH_CUDA_ARCH_LIST": "9.0"} if "gpu" in here.missing else {},
    )
    return [[cpu, cuda]]


def stage_a(here: Machine) -> list[Wave]:
    """The machine, every op against the reference, captured steps, figures of device tables."""
    facts = (
        "nvidia-smi; nvidia-smi topo -m; nvidia-smi -q -d CLOCK,PCIE,ECC | head -n 120; nvcc "
        "--version; "
        f"lscpu; free -g; df -h /dev/shm; {PYTHON} -m deepspeed_gear report --quiet"
    )
    both = builds(here)[0]
    support = "tests/unit/test_gpu_support.py"
    ops = pytest_step(
        "ops against the reference",
        "tests/gpu/test_cuda_ops.py",
        limit_s=150,
        dry=tests(support, "-k", "arguments"),
    )
    waits = pytest_step(
        "no hidden waits",
        "tests/gpu/test_sync_debug.py",
        limit_s=60,
        elsewhere="nothing: torch watches for waits of CUDA",
    )
    captured = shards(
        "captured and compiled steps",
        GRAPH_SHARDS,
        "tests/gpu/test_device_graphs.py",
        limit_s=200,
        dry=tests(support, "-k", "repeated and uniform"),
        elsewhere="the first shard",
    )
    taken = figures_step(
        "figures of device tables",
        here,
        "--figures",
        "gather",
        "selection",
        "kernels",
        "steps",
        "online",
        limit_s=150,
        smoke=("--figures", "steps"),
    )
    return [
        [Step("environment", ("bash", "-c", facts), 150, needs=()), *both],
        [ops, waits, *captured],
        [taken],
    ]


def stage_b(here: Machine) -> list[Wave]:
    """Equivalence in processes, tables in host memory, two ranks on one card, the examples."""
    equivalence = shards(
        "equivalence",
        SHARDS,
        "tests/equivalence",
        "-k",
        "not kernels_on_host",  # which a machine without a GPU runs
        limit_s=240,
        dry=tests("--collect-only", "tests/equivalence/test_selection_ops.py"),
        elsewhere="launch/test.sh runs all of them",
    )
    examples = shards(
        "examples",
        EXAMPLE_SHARDS,
        "tests/gpu/test_device_programs.py",
        "-k",
        "example",
        limit_s=200,
        elsewhere="tests/unit/test_learning_examples.py",
    )
    host = pytest_step(
        "host placement",
        "tests/gpu/test_host_placement.py",
        limit_s=150,
        elsewhere="tests/unit/batching has its CPU lane",
    )
    ranks = pytest_step(
        "two ranks on one card",
        "tests/distributed/test_device_ranks.py",
        limit_s=150,
        elsewhere="tests/distributed runs the same programs",
    )
    ways = figures_step(
        "rows that kernels read in host memory",
        here,
        "--figures",
        "host",
        "--tables",
        "small",
        limit_s=120,
        smoke=("--figures", "host", "--tables", "small"),
    )
    return [*builds(here), [*equivalence, *examples, host, ranks], [ways]]


def stage_c(here: Machine) -> list[Wave]:
    """The sanitizers, profiles, the figures once more, and the Hopper job."""
    sanitizer = (
        here.tool("compute-sanitizer"),
        "--error-exitcode",
        "9",
        "--report-api-errors",
        "no",
    )
    command = tests("tests/gpu", "-m", "sanitize")
    # Without torch's cache each tensor has its own allocation, so that accesses beside it are
    # found.
    alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    sanitizers = [
        Step(
            tool,
            (*sanitizer, "--tool", tool, *command),
            280,
            needs=("gpu", "compute-sanitizer"),
            elsewhere="tests/equivalence runs the kernels on the host",
            env=alone,
        )
        for tool in ("memcheck", "racecheck", "synccheck")
    ]
    report = here.out / "kernels.ncu-rep"
    chosen = (
        "--kernel-name-base",
        "demangled",
        "--kernel-name",
        "regex:gear",
        "--launch-count",
        "300",
    )
    profile = (
        here.tool("ncu"),
        "--set",
        "basic",
        *chosen,
        "--force-overwrite",
        "--export",
        str(report),
    )
    profiled = (PYTHON, "benchmarks/gpu.py", "--figures", "steps")
    hopper = pytest_step(
        "Hopper", "tests/gpu/test_hopper.py", limit_s=300, elsewhere="tests/examples"
    )
    profiles = Step(
        "profiles",
        (*profile, *profiled),
        120,
        needs=("gpu", "ncu"),
        elsewhere="tests/unit/ops/test_cuda_compile.py counts registers",
    )
    again = figures_step(
        "figures, once more",
        here,
        "--figures",
        "gather",
        "selection",
        "kernels",
        "steps",
        "online",
        "host",
        "--tables",
        "small",
        limit_s=150,
    )
    return [*builds(here), [*sanitizers, hopper], [profiles], [again]]


def stage_d(here: Machine) -> list[Wave]:
    """Tables of other systems and their programs, beside this project's."""
    tables = (PYTHON, "benchmarks/gpu_peers.py", "--json", str(here.out / PEERS))
    tiny = ("--device", "cpu", "--smoke", "--systems", "gear", "columns", "--kinds", "prioritized")
    beside = Step(
        "tables beside peers",
        tables,
        400,
        dry=(*tables, *tiny, "--forms", "eager", "captured"),
        elsewhere="tests/unit/test_gpu_peers.py",
    )
    options: list[str] = []
    for option, name in PROGRAMS.items():
        options += [option, os.environ[name]] if os.environ.get(name) else []
    captured = (PYTHON, "benchmarks/lean.py", "--cudagraphs", "--seeds", "0", "1", "2")
    agents = Step(
        "captured agents",
        (*captured, "--json", str(here.out / AGENTS), *options),
        300,
        elsewhere="tests/unit/test_benchmarks.py",
    )
    return [*builds(here), [beside], [agents]]


def stage_m(here: Machine) -> list[Wave]:
    """What blocks of a launch pass to each other: draws replayed beside another stream."""
    order = pytest_step(
        "order of memory",
        "tests/gpu/test_memory_order.py",
        limit_s=480,
        dry=tests("tests/unit/test_gpu_support.py", "-k", "digest"),
        elsewhere="nothing: the host has no blocks at once",
    )
    return [*builds(here), [order]]


def stage_f(here: Machine) -> list[Wave]:
    """Wrong indices: each ends the context of a process of its own, and the errors name it."""
    faults = pytest_step(
        "faults of kernels",
        "tests/gpu/test_kernel_faults.py",
        limit_s=400,
        dry=tests("tests/equivalence/test_kernel_faults.py"),
        elsewhere="tests/equivalence/test_kernel_faults.py has the cases on the host",
    )
    return [*builds(here), [faults]]


PEERS = "gpu_peers.json"
AGENTS = "gpu_lean.json"
# Checkouts of LeanRL and CleanRL, and an interpreter that has what they need.
PROGRAMS = {
    "--lean": "GEAR_LEANRL",
    "--cleanrl": "GEAR_CLEANRL",
    "--peer-python": "GEAR_LEAN_PYTHON",
}
STAGES = {"A": stage_a, "B": stage_b, "C": stage_c, "D": stage_d, "F": stage_f, "M": stage_m}


# ---- running -------------------------------------------------------------------------------------


def file_name(name: str) -> str:
    """Return the name of a step as a file's."""
    return "-".join("".join(c if c.isalnum() else " " for c in name).split())


class Stage:
    """One run of a stage, and its record.

    Args:
        name: A, B, C or D.
        here: The machine.
        is_dry: Whether commands are those of a machine without a GPU.
    """

    def __init__(self, name: str, here: Machine, is_dry: bool) -> None:
        self.name = name
        self.here = here
        self.is_dry = is_dry
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self.record: dict[str, Any] = {
            "stage": name,
            "dry_run": is_dry,
            "commit": commit(),
            "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
            "missing": dict(here.missing),
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "steps": [],
        }

    def run(self) -> int:
        """Run all steps; return how many have failed."""
        for wave in [*packages(self.here), *STAGES[self.name](self.here)]:
            with ThreadPoolExecutor(len(wave)) as pool:
                try:
                    list(pool.map(self._step, wave))
                except BaseException:
                    for process in list(self._running):  # for which the pool waits
                        process.terminate()  # `timeout` ends the whole group
                    raise
        return sum(step["rc"] not in (0, None) for step in self.record["steps"])

    def _step(self, step: Step) -> None:
        command, why = self._command(step)
        left_s = STAGE_S - (time.monotonic() - self._begin)
        if command is not None and left_s < LEAST_S:
            command = None
            why = f"no time is left of the {STAGE_S:.0f} s of a stage"
        if command is None:
            self._note({"name": step.name, "rc": None, "skipped": why})
            return
        limit_s = min(step.limit_s, left_s)
        begin = time.monotonic()
        log = self.here.out / f"{self.name}-{file_name(step.name)}.log"
        whole = ["timeout", "--kill-after=10", f"{limit_s:.0f}", *command]
        with log.open("wb") as output:
            process = subprocess.Popen(
                whole,
                cwd=ROOT,
                env=self._environment(step),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            self._running.add(process)
            rc = process.wait()
            self._running.discard(process)
        text = log.read_text(errors="replace")
        found = {"name": step.name, "command": list(command), "rc": rc, "limit_s": round(limit_s)}
        seconds = round(time.monotonic() - begin, 1)
        self._note(
            {**found, "seconds": seconds, "timed_out": rc in (124, 137), "tail": text[-TAIL:]}
        )

    def _command(self, step: Step) -> tuple[Sequence[str] | None, str]:
        """Return the command that runs here, or None and why there is none."""
        missing = [need for need in step.needs if need in self.here.missing]
        if not missing:
            return step.command, ""
        if self.is_dry and step.dry is not None:
            missing = [need for need in step.dry_needs if need in self.here.missing]
            if not missing:
                return step.dry, ""
        why = ", ".join(self.here.missing[need] for need in missing)
        return None, f"{why}; on a CPU: {step.elsewhere}" if step.elsewhere else why

    def _environment(self, step: Step) -> dict[str, str]:
        cache = self.here.cache
        paths = (str(ROOT), str(cache / "packages"), os.environ.get("PYTHONPATH"))
        env = {"TORCH_EXTENSIONS_DIR": str(cache / "extensions"), "OMP_NUM_THREADS": "1"}
        env |= {
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
        env |= {"DS_ACCELERATOR": "cpu"} if self.is_dry else {}
        return {**env, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **step.env}

    def _note(self, found: dict[str, Any]) -> None:
        """Add a step to the record, and write it; a stage that is killed leaves all
        that has ended.
        """
        with self._lock:
            self.record["steps"].append(found)
            self.record["seconds"] = round(time.monotonic() - self._begin, 1)
            target = self.here.out / f"stage-{self.name}.json"
            part = target.with_suffix(".part")
            text = json.dumps(self.record, indent=1).replace(
                str(ROOT), "."
            )  # the record may be published
            part.write_text(text + "\n")
            part.replace(target)
            if found["rc"] is None:
                told = f"skipped: {found['skipped']}"
            else:
                state = "ok" if found["rc"] == 0 else f"FAILED with {found['rc']}"
                told = f"{state}, {found['seconds']} s" + (
                    ", out of time" if found["timed_out"] else ""
                )
            print(f"{self.name} {found['name']}: {told}", flush=True)


def commit() -> str:
    """Return the commit of the checkout, "" where that is not known."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def machine(out: Path, cache: Path, is_dry: bool) -> Machine:
    """Find out what is missing here."""
    sys.path[:0] = [str(ROOT), str(cache / "packages")]
    import torch

    # Not through the package, whose other modules may need what is not installed yet.
    path = ROOT / "deepspeed_gear" / "ops" / "toolchain.py"
    spec = importlib.util.spec_from_file_location("gear_toolchain", path)
    assert spec is not None
    assert spec.loader is not None
    toolchain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(toolchain)
    toolkit = toolchain.cuda_home()
    missing = {}
    if is_dry:
        missing["gpu"] = "needs a GPU, and this is a dry run"
    for tool in ("nvcc", "compute-sanitizer", "ncu"):
        if tool_of(toolkit, tool) is None:
            missing[tool] = f"there is no {tool} beside nvcc or on the PATH"
    if not is_dry and not torch.cuda.is_available():
        sys.exit(
            f"test_gpu.sh: error: torch {torch.__version__} sees no CUDA device; --dry-run "
            f"needs none"
        )
    return Machine(missing, toolkit, cache, out)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="launch/test_gpu.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "stages", nargs="+", choices=[*STAGES], metavar="A|B|C|D|F|M", help="run in this order"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "gpu", help="folder of the results (out/gpu)"
    )
    default = os.environ.get("GEAR_GPU_CACHE") or ROOT / "build" / "gpu"
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(default),
        help="folder of builds and packages, which later runs use again ($GEAR_GPU_CACHE, "
        "build/gpu)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="what a machine without a GPU can run of them"
    )
    options = parser.parse_args()
    out = options.out.resolve()
    cache = options.cache.resolve()
    for folder in (out, cache / "packages"):
        folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    here = machine(out, cache, options.dry_run)
    failed = sum(Stage(name, here, options.dry_run).run() for name in options.stages)
    if not options.dry_run:
        # The checkout stays as it is: `benchmarks/gpu_results.py FOLDER` takes them into it.
        collect = [PYTHON, "benchmarks/gpu_results.py", str(out), "--to", str(out / "results")]
        failed += subprocess.run(collect, cwd=ROOT, check=False).returncode != 0
    print(f"test_gpu.sh: {failed} steps failed; results in {out}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
