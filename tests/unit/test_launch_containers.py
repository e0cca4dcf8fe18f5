"""The Dockerfile by launch/check_image.py; launch/slurm.sbatch and the Kubernetes jobs by running
them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest
import yaml
from gear_support import load_script
from process_support import free_port


@pytest.fixture(scope="module")
def image(checkout: Path) -> ModuleType:
    """The module of the check, which is a script."""
    return load_script(checkout / "launch" / "check_image.py")


# ---- the Dockerfile ------------------------------------------------------------------------------


def problems(image: ModuleType, checkout: Path, *change: str) -> list[str]:
    """Check the Dockerfile, with one of its texts replaced."""
    text = (checkout / "Dockerfile").read_text()
    if change:
        assert text.count(change[0]) == 1, change
        text = text.replace(*change)
    found: list[str] = image.problems_of(text, image.context_files(checkout))
    return found


def test_the_dockerfile_names_what_is_there(image: ModuleType, checkout: Path) -> None:
    assert problems(image, checkout) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("debian:12.11-slim", "debian", "FROM debian: must be an earlier stage, or an image " "with a tag"),
        ("debian:12.11-slim", "debian:latest", "FROM debian:latest: must be"),
        ("COPY ops/csrc ops/csrc", "COPY ops/src ops/src", "COPY: ops/src is not in the context"),
        ("COPY LICENSE", "COPY CHANGELOG.md LICENSE", "COPY: CHANGELOG.md is not in the context"),
        ("from=build,", "from=built,", "RUN: must name an earlier stage, got built"),
        ("ARG DEEPSPEED=0.19.8\n", "", "RUN: $DEEPSPEED is not declared"),
        ('"torch==$TORCH+cpu"', '"torch==$TORCH+cpu" &&', "RUN: sh: 1: Syntax error"),
        ("python3-dev && \\", "python3-dev && no-such-program && \\", "there is no program " "no-such-program"),
        ('CMD ["gear", "doctor"]', 'CMD ["gears", "doctor"]', "CMD: there is no program gears"),
        ("WORKDIR /src", "VOLUME /src", "VOLUME: is not known to this check"),
    ],
)  # fmt: skip
def test_each_fault_is_named(
    image: ModuleType, checkout: Path, old: str, new: str, message: str
) -> None:
    (found,) = problems(image, checkout, old, new)
    assert message in found


MINIATURE = """\
FROM debian:12.11-slim AS base
ENV GREETING=hello
WORKDIR /gear-work
CMD ["true"]

FROM base AS build
ARG WHO=you
ENV TEXT="$GREETING $WHO"
WORKDIR /gear-src
COPY README.md ./
COPY deepspeed_gear to
RUN test "$TEXT" = "hello me" && cat README.md to/ops/a.py > sum && \\
    # what .dockerignore names is not copied
    test ! -e to/ops/a.so && ! touch /etc/hosts

FROM base AS cpu
RUN --mount=type=bind,from=build,source=/gear-src,target=/in test "$(pwd)" = /gear-work && cat /in/sum > sum
"""


@pytest.fixture
def work() -> Iterator[Path]:
    """A folder on another file system than that of the base, which an overlay needs."""
    with TemporaryDirectory(prefix="gear_image", dir="/dev/shm") as folder:
        yield Path(folder)


def test_steps_run_in_overlays_of_the_base(checkout: Path, tmp_path: Path, work: Path) -> None:
    """The long form, with this system as the base image."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("namespaces need root")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    texts = {
        name: (checkout / name).read_text() for name in (".dockerignore", "launch/check_image.py")
    }
    texts |= {"README.md": "1", "deepspeed_gear/ops/a.py": "2", "deepspeed_gear/ops/a.so": "3"}
    for name, text in {**texts, "Dockerfile": MINIATURE}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "launch/check_image.py",
            "--run=cpu",
            "--base=/",
            f"--work={work / name}",
        ]
        return subprocess.run([*command, *options], cwd=tmp_path, capture_output=True, text=True)

    done = run("good", "--build-arg", "WHO=me")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (work / "good" / "cpu" / "upper" / "gear-work" / "sum").read_text() == "12"
    assert not Path("/gear-work").exists()
    failed = run("bad")
    assert failed.returncode == 1
    assert "check_image: exit status 1 of: test" in failed.stderr


# ---- Slurm ---------------------------------------------------------------------------------------

SLURM = {
    "scontrol": 'case "$2" in job) echo "   Command=$JOB_FILE a.py --x" ;; *) printf "n%s\\n" 1 '
    "2 ;; esac",
    "srun": 'echo "SRUN ${SRUN_CPUS_PER_TASK:-all} $*"',
    "deepspeed": 'echo "DEEPSPEED $*"',
    "python": f'exec {sys.executable} "$@"',
}


def run_job(
    checkout: Path, folder: Path, *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run launch/slurm.sbatch in a folder as Slurm does: a copy of it, with the
    variables of a job.
    """
    (folder / "bin").mkdir()
    for name, text in SLURM.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    (folder / "mpi4py").mkdir()
    (folder / "mpi4py" / "__init__.py").touch()
    (folder / "slurm_script").write_text((checkout / "launch" / "slurm.sbatch").read_text())
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "6"}
    job |= {"JOB_FILE": str(checkout / "launch" / "slurm.sbatch")}
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "slurm_script", *arguments],
        cwd=folder,
        env={
            **os.environ,
            **job,
            "VIRTUAL_ENV": str(folder),
            "PATH": path,
            "PYTHONPATH": str(folder),
            **env,
        },
        capture_output=True,
        text=True,
    )


def test_a_slurm_job_checks_its_nodes_and_trains(checkout: Path, tmp_path: Path) -> None:
    done = run_job(checkout, tmp_path, "train.py", "--x", "a b")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hosts-7").read_text() == "n1 slots=4\nn2 slots=4\n"
    doctor, launch = done.stdout.splitlines()
    assert doctor == "SRUN 6 --ntasks=2 --ntasks-per-node=1 --label gear doctor"
    assert launch.startswith(
        f"DEEPSPEED --hostfile {tmp_path / 'hosts-7'} --launcher slurm --force_multi "
    )
    assert "--launcher_args=--mpi=pmix --kill-on-bad-exit=1 train.py --x a b" in launch


def test_each_task_of_a_slurm_job_has_a_gpu(checkout: Path, tmp_path: Path) -> None:
    for at, gpus in enumerate(("0", "4", "h100:8")):
        (tmp_path / str(at)).mkdir()
        done = run_job(checkout, tmp_path / str(at), "train.py", SLURM_GPUS_PER_NODE=gpus)
        assert done.returncode == 0, done.stderr
    (tmp_path / "few").mkdir()
    done = run_job(checkout, tmp_path / "few", "train.py", SLURM_GPUS_PER_NODE="h100:2")
    assert done.returncode == 2
    assert (
        "--ntasks-per-node must be at most --gpus-per-node (2), as a task is a rank, got 4"
        in done.stderr
    )
    assert "sbatch --ntasks-per-node=2" in done.stderr


def test_the_options_of_the_slurm_job(checkout: Path) -> None:
    """Its end: a signal that the process which removes stores ignores, long before the kill of the
    cgroup.
    """
    lines = (checkout / "launch" / "slurm.sbatch").read_text().splitlines()
    named = dict(
        line.removeprefix("#SBATCH --").split("=") for line in lines if line.startswith("#SBATCH ")
    )
    assert named["gpus-per-node"] == named["ntasks-per-node"]
    assert {"nodes", "cpus-per-task", "time"} <= named.keys()
    assert named["output"] == "%x-%j.out"  # one file for each job
    assert named["signal"] == "TERM@120"


def test_a_slurm_job_that_cannot_train_is_refused(checkout: Path, tmp_path: Path) -> None:
    done = run_job(checkout, tmp_path, "train.py", GEAR_LAUNCHER="pbs")
    assert done.returncode == 2
    assert "--launcher must be pdsh, openmpi or slurm, got pbs" in done.stderr
    text = (checkout / "launch" / "slurm.sbatch").read_text()
    for given, variables, message in (
        ((), {"SLURM_JOB_ID": "7"}, "must have a script"),
        (("a.py",), {}, "by Slurm"),
    ):
        env = {"PATH": os.environ["PATH"], **variables}
        done = subprocess.run(
            ["bash", "-c", text, "sbatch", *given], env=env, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert message in done.stderr


# ---- Kubernetes ----------------------------------------------------------------------------------


def pods_of(job: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Return each pod's spec and the variables that the training operator sets.

    Source: setPodEnv of pkg/controller.v1/pytorch of kubeflow/training-operator, 1.7 to 1.9.
    """
    kinds = job["spec"]["pytorchReplicaSpecs"]
    specs = [
        kinds[kind]["template"]["spec"]
        for kind in ("Master", "Worker")
        for _ in range(kinds[kind]["replicas"])
    ]
    ranks = job["spec"]["nprocPerNode"]
    master = {"MASTER_ADDR": f"{job['metadata']['name']}-master-0", "MASTER_PORT": "23456"}
    return [
        (spec, {
            **master, **{f"PET_{name}": value for name, value in master.items()},
            "WORLD_SIZE": str(len(specs) * int(ranks)), "RANK": str(pod), "PET_NODE_RANK": str(pod),
            "PET_NPROC_PER_NODE": ranks, "PET_NNODES": str(len(specs)),
        })
        for pod, spec in enumerate(specs)
    ]  # fmt: skip


@pytest.fixture
def job(checkout: Path) -> dict[str, Any]:
    """The PyTorchJob."""
    found: dict[str, Any] = yaml.safe_load((checkout / "launch" / "kubernetes.yaml").read_text())
    return found


def test_pods_have_shared_memory_within_their_limit(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    for spec, _ in pods_of(job):
        (container,) = spec["containers"]
        assert container["name"] == "pytorch"  # others get no variables
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert mounted.keys() == volumes.keys()
        assert mounted["shm"] == "/dev/shm"
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        limits = container["resources"]["limits"]
        room = int(limits["memory"].removesuffix("Gi")) - int(
            volumes["shm"]["emptyDir"]["sizeLimit"].removesuffix("Gi")
        )
        assert room > 0
        assert limits["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
        assert container["securityContext"]["capabilities"]["add"] == [
            "IPC_LOCK"
        ]  # docker's memlock=-1


def test_the_job_of_kubeflow_trainer_has_the_same_pods(checkout: Path, job: dict[str, Any]) -> None:
    """And the same ranks, whose variables it sets: PET_ ones, as EnforceMLPolicy of its torch
    plugin does.

    Source: pkg/apis/trainer/v1alpha1 and pkg/runtime/framework/plugins of kubeflow/trainer, 2.0 to
    2.3.
    """
    text = (checkout / "launch" / "kubernetes-trainjob.yaml").read_text()
    runtime, train_job = yaml.safe_load_all(text)
    api = "trainer.kubeflow.org/v1alpha1"
    assert [each["apiVersion"] for each in (runtime, train_job)] == [api, api]
    assert train_job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    assert "torch" in runtime["spec"]["mlPolicy"]  # it sets the variables
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    template = replicated["template"]
    assert replicated["name"] == "node"  # part of the master's address
    assert template["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    spec = template["spec"]["template"]["spec"]
    trainer = train_job["spec"]["trainer"]
    (container,) = spec["containers"]
    assert container.pop("name") == "node"
    pods = pods_of(job)
    for other, variables in pods:
        assert spec["volumes"] == other["volumes"]
        same = {**container, "command": trainer["command"], "args": trainer["args"]}
        assert same == {
            key: value for key, value in other["containers"][0].items() if key != "name"
        }
        assert str(trainer["numNodes"]) == variables["PET_NNODES"]
        assert str(trainer["numProcPerNode"]) == variables["PET_NPROC_PER_NODE"]
    # One failure ends all pods, and starts all again.
    assert (template["spec"]["backoffLimit"], spec["restartPolicy"]) == (0, "Never")
    assert runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] > 0


PROGRAM = """
import json, os, sys
place = [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
line = json.dumps([*place, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], sys.argv[1:]])
sys.stdout.write(line + "\\n")  # at once: the ranks of a pod share a pipe
"""


def test_the_commands_of_the_pods_form_one_group(job: dict[str, Any], tmp_path: Path) -> None:
    """As processes on loopback, each with the environment of its pod; `gear doctor` is
    a stand-in.
    """
    job["spec"]["nprocPerNode"] = "2"
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "gear").write_text('#!/bin/sh\n[ "$*" = doctor ]\n')
    (tmp_path / "gear").chmod(0o755)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    here |= {f"PET_{name}": value for name, value in here.items()}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(pod: tuple[dict[str, Any], dict[str, str]]) -> list[Any]:
        (container,) = pod[0]["containers"]
        variables = {**os.environ, **pod[1], **here, "PATH": path}
        command = [*container["command"], *container["args"]]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(2) as pods:
        found = [rank for ranks in pods.map(run, pods_of(job)) for rank in ranks]
    places = [
        [0, 0],
        [1, 1],
        [2, 0],
        [3, 1],
    ]  # what deepspeed_gear.initialize reads, by torch and DeepSpeed
    master = [4, here["MASTER_ADDR"], here["MASTER_PORT"]]
    assert sorted(found) == [[*place, *master, ["--steps", "2000"]] for place in places]
