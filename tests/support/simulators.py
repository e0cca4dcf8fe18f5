"""Simulators, a policy that answers them, and what their steps are in the store."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gear_support import SCHEMA, STEP, config_of, trajectory

from deepspeed_gear import PolicyBoard, Replay, TrajectoryWriter
from deepspeed_gear.actors.inference_client import InferenceClient
from deepspeed_gear.actors.inference_loader import InferenceLoader, InferenceRequest
from deepspeed_gear.ops.records import Slot, SlotState

ANSWERS = ("action", "code")
ASKS = ("observation", "task")


def section(**table: Any) -> dict[str, Any]:
    main = {"capacity_steps": 4000, "capacity_trajectories": 300, "writers": 6, **table}
    return config_of(tables={"main": main}, batch_size=4, fields={"observation": {}})


def loader_of(
    replay: Replay, batch_size: int = 4, timeout: float | None = 0.02, **options: Any
) -> InferenceLoader:
    return InferenceLoader(replay, batch_size, timeout, answers=ANSWERS, **options)


def policy(observation: torch.Tensor) -> dict[str, torch.Tensor]:
    """Answer as `gear_support.trajectory` has its rows: what a row holds follows from its
    observation.
    """
    code = observation[:, 0].long()
    return {"action": torch.stack([code, -code], 1).float(), "code": code}


def serve(loader: InferenceLoader, goes_on: Callable[[], bool]) -> list[InferenceRequest]:
    """Answer until a request is empty and no process goes on."""
    served = []
    for request in loader:
        if request:
            request.reply(**policy(request["observation"]))
            served.append(request)
        elif not goes_on():
            break
    return served


def any_runs(children: list[int]) -> Callable[[], bool]:
    """Return what tells whether a child still runs; all must end well."""
    left = list(children)

    def check() -> bool:
        for child in list(left):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                left.remove(child)
                assert status == 0
        return bool(left)

    return check


def runs(child: int) -> bool:
    """Return whether a child runs, and leave its status to `exit_status`."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


class Envs:
    """Environments whose episode e of number n is `trajectory(n * 20 + e, length(n, e))`, as
    gymnasium's.
    """

    def __init__(self, numbers: range, autoreset: str, length: Callable[[int, int], int]) -> None:
        self.numbers = numbers
        self.mode = autoreset
        self.length = length
        self.episode = np.zeros(len(numbers), int)
        self.t = np.zeros(len(numbers), int)
        self.done = np.zeros(len(numbers), bool)

    @property
    def task(self) -> np.ndarray:
        return np.array(self.numbers) * 20 + self.episode

    def look(self) -> np.ndarray:
        codes = self.task * STEP + self.t
        return np.stack([codes, codes + 0.25, -codes], 1).astype(np.float32)

    def begin(self, which: np.ndarray) -> None:
        self.episode[which] += 1
        self.t[which] = 0
        self.done[which] = False

    def step(self, envs: np.ndarray) -> dict[str, Any]:
        """Step some; return columns of `Simulators.step`, with `task` of what is now."""
        resets = self.done.copy() if self.mode == "next_step" else np.zeros(len(self.done), bool)
        resets &= np.isin(np.arange(len(self.done)), envs)
        reward = (self.t % 7 + 1).astype(np.float32)
        for env in envs:
            self.t[env] += 1
            self.done[env] = self.t[env] == self.length(self.numbers[env], self.episode[env])
        self.begin(resets)
        even = self.task % 2 == 0
        ended = {"terminated": self.done & even, "truncated": self.done & ~even}
        columns: dict[str, Any] = {"reward": reward, **ended}
        final = self.look()
        task = self.task.copy()
        if self.mode == "same_step":
            self.begin(self.done & np.isin(np.arange(len(self.done)), envs))
        columns |= {"observation": self.look(), "task": task}
        columns = {name: column[envs] for name, column in columns.items()}
        return columns | (
            {"final": {"observation": final[envs]}} if self.mode == "same_step" else {}
        )


def simulate(
    config: dict[str, Any],
    envs: Envs,
    num_rounds: int,
    in_parts: bool = False,
    timeout_s: float = 10.0,
) -> None:
    """Run environments as a process of simulators does."""
    with (
        TrajectoryWriter.attach(config) as writer,
        InferenceClient(writer, len(envs.numbers), envs.mode) as simulators,
    ):
        simulators.reset(observation=envs.look(), task=envs.task)
        every = np.arange(len(envs.numbers))
        for _ in range(num_rounds):
            if in_parts:
                simulators.post()
                which: np.ndarray = simulators.ready(1, timeout_s)
                answers = simulators.answers(which)
            else:
                which = every
                answers = simulators.act(timeout_s)
            acts = ~envs.done[which]
            assert (
                answers["code"][acts].tolist() == (envs.task * STEP + envs.t)[which][acts].tolist()
            )
            simulators.step(envs=which if in_parts else None, **envs.step(which))
            if envs.mode == "disabled" and envs.done.any():
                begun = envs.done.copy()
                envs.begin(begun)
                simulators.reset(begun, observation=envs.look(), task=envs.task)


def hold_names(folder: Path, config: dict[str, Any]) -> None:
    """Hold all that keeps a name in shared memory on a rank: a table that takes writers, a board, a
    loader.

    Writes FOLDER/ready-RANK, adds and samples until its end.
    """
    rank = dist.get_rank()
    replay = Replay(config, schemas={"main": SCHEMA})
    board = PolicyBoard.create(torch.nn.Linear(2, 2), prefix=config["shared_memory"]["prefix"])
    loader = InferenceLoader(replay, batch_size=2, timeout=0.0)
    replay.add(trajectory(rank, 9))
    dist.barrier()
    (folder / f"ready-{rank}").touch()
    while board.is_published and loader.num_simulators == 0:
        replay.add(trajectory(rank, 9))
        replay.sample()


def stored(replay: Replay) -> list[dict[str, torch.Tensor]]:
    table = replay.tables["main"]
    return replay.read(
        np.sort(table.slots[table.slots[:, Slot.STATE] == SlotState.COMMITTED, Slot.ID]).tolist()
    )


def check_whole(replay: Replay, length: Callable[[int, int], int]) -> dict[int, int]:
    """Compare every trajectory with what its simulator did; return number of environment ->
    episodes.
    """
    episodes: dict[int, int] = {}
    for found in stored(replay):
        number, episode = check_one(found, length)
        assert episodes.get(number, 0) == episode
        episodes[number] = episode + 1
    return episodes


def check_one(found: dict[str, torch.Tensor], length: Callable[[int, int], int]) -> tuple[int, int]:
    """Compare a trajectory with what its simulator did; return number of environment,
    and episode.
    """
    task = int(found["task"])
    number, episode = divmod(task, 20)
    wanted = trajectory(task, length(number, episode), task % 2 == 0, task % 2 == 1)
    for name, column in found.items():
        np.testing.assert_array_equal(column.numpy(), wanted[name], name)
    return number, episode


def short(number: int, episode: int) -> int:
    return 1 + (number * 7 + episode * 5) % 9
