"""Steps per second of the *_device.py examples, beside the programs of LeanRL and CleanRL.

    python benchmarks/lean.py --lean FOLDER --cleanrl FOLDER --peer-python P --json F [--compile]
    [--cudagraphs] [--seeds 0 1 2] [--quick]

The peers run from their own checkouts, unchanged, by an interpreter that has their packages
(gymnasium 0.29, torch, tyro, tqdm, wandb, tensorboard, torchrl, tensordict). Without a folder its
programs are left out. Where torch sees a GPU, LeanRL's and these examples also run with
`--cudagraphs`, alone and compiled; `--cudagraphs` here leaves their other runs out. Each program
runs once with each seed, and the programs of an algorithm take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from support import ROOT
from support.report import Report, Row, print_rows
from gpu_clock import card

from deepspeed_gear.ops.native_op import CudaOp

RANDOM_STEPS = 500
# of PPO
ENVS = 4
ROLLOUT = 128
PEER_PACKAGES = ("torch", "numpy", "gymnasium", "tensordict", "torchrl")


class Speed(NamedTuple):
    """Steps of all environments per second, and per second of CPU time."""

    per_s: float
    per_cpu_s: float


@dataclass(frozen=True)
class Case:
    """An algorithm, and what makes the programs do equal work.

    Args:
        algorithm: Also the name of the example.
        env: The environment.
        ours: Options of the example.
        lean: LeanRL's program and its options; None if it has none.
        clean: CleanRL's program and its options.
        envs: Environments that act at once.
        rollout: Steps of an environment between two updates.
        lean_env: The environment of LeanRL's program, if it is another one.
        note: Where the work is not equal.
    """

    algorithm: str
    env: str
    ours: tuple[str, ...]
    lean: tuple[str, ...] | None
    clean: tuple[str, ...]
    envs: int = 1
    rollout: int = 1
    lean_env: str = ""
    note: str = ""

    def window(self, quick: bool) -> tuple[int, int]:
        """Return the first and the last step that are timed: of learning, of whole roll-outs."""
        if self.rollout > 1:
            return 5 * self.rollout, (7 if quick else 37) * self.rollout
        return RANDOM_STEPS + 100, RANDOM_STEPS + (200 if quick else 1100)


_START = ("--learning-starts", str(RANDOM_STEPS))
_OURS = ("--random-steps", str(RANDOM_STEPS))
_UNIFORM = (*_OURS, "--buffer", "uniform")
_DISCRETE = ("--env-id", "CartPole-v1", *_START, "--train-frequency", "1", "--buffer-size", "10000")
_DISCRETE += (
    "--exploration-fraction",
    "0.1",
)  # a random action costs CleanRL no pass through the network
_DQN = (*_DISCRETE, "--tau", "0.02", "--target-network-frequency", "1")
_CONTINUOUS = ("--env-id", "Pendulum-v1", *_START, "--buffer-size", "100000")
_ROLLOUTS = ("--num-envs", str(ENVS), "--num-steps", str(ROLLOUT), "--num-minibatches", "4")
_ROLLOUTS += ("--update-epochs", "4")
CASES = (
    Case(
        "dqn",
        "CartPole-v1",
        ("--envs", "1", *_UNIFORM),
        ("dqn_torchcompile.py", *_DQN),
        ("dqn.py", *_DQN),
        note="ours is a double DQN: one more pass through the network",
    ),
    Case(
        "c51",
        "CartPole-v1",
        ("--envs", "1", *_OURS),
        None,
        ("c51.py", *_DISCRETE, "--n-atoms", "51", "--v-min", "0", "--v-max", "100"),
        note="ours is double, prioritized and 3-step",
    ),
    Case(
        "td3",
        "Pendulum-v1",
        _UNIFORM,
        ("td3_continuous_action_torchcompile.py", *_CONTINUOUS),
        ("td3_continuous_action.py", *_CONTINUOUS),
    ),
    Case(
        "sac",
        "Pendulum-v1",
        _UNIFORM,
        ("sac_continuous_action_torchcompile.py", *_CONTINUOUS),
        ("sac_continuous_action.py", *_CONTINUOUS),
        note="the peers draw the actor's actions once more for the temperature",
    ),
    Case(
        "ppo",
        "CartPole-v1",
        ("--envs", str(ENVS)),
        ("ppo_continuous_action_torchcompile.py", "--env-id", "Pendulum-v1", *_ROLLOUTS),
        ("ppo.py", "--env-id", "CartPole-v1", *_ROLLOUTS),
        ENVS,
        ROLLOUT,
        "Pendulum-v1",
        "LeanRL's is for continuous actions only, with wrappers of the environment",
    ),
)


def versions(python: str, folders: dict[str, Path]) -> dict[str, str]:
    """Return the versions of the peers' packages, and the commits of their checkouts."""
    code = "import json, sys; from importlib.metadata import distributions; names = sys.argv[1:]; "
    code += "print(json.dumps({d.name: d.version for d in distributions() if d.name in names}))"
    command = [python, "-c", code, *PEER_PACKAGES]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    for name, folder in folders.items():
        git = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        found[name] = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    return dict(found)


class Programs:
    """The programs of the three systems, as processes in a scratch folder.

    Args:
        python: Interpreter of the peers.
        folders: Checkouts of the peers, by name.
        quick: Few steps.
    """

    def __init__(self, python: str, folders: dict[str, Path], quick: bool, scratch: Path) -> None:
        self._python = python
        self._folders = folders
        self._quick = quick
        self._scratch = scratch

    def speed(self, case: Case, system: str, flags: tuple[str, ...], seed: int) -> Speed:
        """Run a program; return its speed between two steps of its environments.

        Raises:
            RuntimeError: It failed.
        """
        first, last = case.window(self._quick)
        if system == "gear":
            python = sys.executable
            root = ROOT
            program = ROOT / "examples" / f"{case.algorithm}_device.py"
            options = ("--steps", str(last + 1), *case.ours)
            # Packages may lie in folders beside torch, as launch/test_gpu.sh puts them.
            paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        else:
            python = self._python
            root = self._folders[system]
            paths = [str(root)]
            name, *rest = (case.clean if system == "CleanRL" else case.lean) or ("",)
            program = root / system.lower() / name
            options = ("--total-timesteps", str((last + case.rollout) * case.envs), *rest)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "WANDB_MODE": "disabled",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        seeded = ("--seed", str(seed))
        clock = str(Path(__file__).with_name("lean_clock.py"))
        run = subprocess.run(
            [python, clock, str(first), str(last), str(program), *options, *flags, *seeded],
            cwd=self._scratch,
            env=environment,
            capture_output=True,
            text=True,
        )
        if run.returncode != 0:
            raise RuntimeError(
                f"{program.name} of {system} ended with {run.returncode}:\n{run.stderr[-2000:]}"
            )
        taken = json.loads(run.stdout.splitlines()[-1])
        steps = (last - first) * case.envs
        return Speed(steps / taken["seconds"], steps / taken["cpu_seconds"])


def flags_of(is_compiled: bool, only_captured: bool, is_cuda: bool) -> list[tuple[str, ...]]:
    """Return the flags with which LeanRL's programs and the examples run, a run for each.

    Args:
        is_compiled: Whether compiled programs are asked for.
        only_captured: Whether the others are left out.
        is_cuda: Whether there is a device to capture on.
    """
    plain: list[tuple[str, ...]] = [()]
    if is_compiled:
        plain.append(("--compile",))
    captured: list[tuple[str, ...]] = []
    if is_cuda:
        captured.append(("--cudagraphs",))
        if is_compiled or not only_captured:
            captured.append(("--compile", "--cudagraphs"))
    return captured if only_captured else [*plain, *captured]


def measured(
    programs: Programs, systems: Collection[str], options: argparse.Namespace
) -> Iterator[Row]:
    """Yield a row for each program and its flags; the programs of an algorithm run in turns."""
    flags = flags_of(options.compile, options.cudagraphs, torch.cuda.is_available())
    for case in (each for each in CASES if each.algorithm in options.algorithms):
        runs = [("gear", each) for each in flags]
        runs += [("LeanRL", each) for each in flags] if "LeanRL" in systems and case.lean else []
        runs += [("CleanRL", ())] if "CleanRL" in systems else []
        found: dict[tuple[str, tuple[str, ...]], list[Speed]] = {run: [] for run in runs}
        seeds = options.seeds[:1] if options.quick else options.seeds
        for seed in seeds:
            for system, each in runs:
                found[system, each].append(programs.speed(case, system, each, seed))
        for (system, each), speeds in found.items():
            row = {
                "algorithm": case.algorithm,
                "envs": case.envs,
                "system": system,
                "flags": " ".join(each),
            }
            row["env"] = case.lean_env if system == "LeanRL" and case.lean_env else case.env
            cpu = sorted(speed.per_cpu_s for speed in speeds)
            row |= {"steps_per_s": round(statistics.median(speed.per_s for speed in speeds), 1)}
            row |= {"steps_per_cpu_s": round(statistics.median(cpu), 1)}
            row |= {"least": round(cpu[0], 1), "most": round(cpu[-1], 1)}
            per_seed = {
                seed: round(speed.per_s, 1) for seed, speed in zip(seeds, speeds, strict=True)
            }
            row |= {"steps_per_s_by_seed": per_seed, "note": case.note}
            print(json.dumps(row), file=sys.stderr, flush=True)
            yield row


def main() -> None:
    """Run from the command line."""
    report = Report(
        __doc__,
        "few steps, once: numbers mean nothing",
        lean=(Path, "a checkout of pytorch-labs/LeanRL"),
        cleanrl=(Path, "a checkout of vwxyzjn/cleanrl"),
        peer_python=(sys.executable, "an interpreter for both"),
        compile=(False, "measure compiled programs too"),
        cudagraphs=(False, "captured programs only; needs a CUDA device"),
        seeds=((0, 1, 2), "a run of each program for each of them, in turns"),
        algorithms=(tuple(case.algorithm for case in CASES), "some of them"),
    )
    options = report.options
    if options.cudagraphs and not torch.cuda.is_available():
        report.parser.error("--cudagraphs needs a CUDA device: torch sees none")
    given = {"LeanRL": options.lean, "CleanRL": options.cleanrl}
    folders = {name: folder.resolve() for name, folder in given.items() if folder is not None}
    for name, folder in folders.items():
        if not (folder / name.lower()).is_dir():
            report.parser.error(
                f"{folder} must be a checkout of {name}: it has no folder {name.lower()}/"
            )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {
        "peers": versions(options.peer_python, folders) if folders else {},
        "kernel_sources": CudaOp().source_digest(),
        "device": card(device),
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        programs = Programs(options.peer_python, folders, options.quick, Path(scratch))
        for row in measured(programs, folders, options):
            rows.append(row)
            report.write(rows, **facts)  # rows so far stay if a later program fails
    print_rows(rows, "algorithm env envs system flags steps_per_s steps_per_cpu_s")


if __name__ == "__main__":
    main()
