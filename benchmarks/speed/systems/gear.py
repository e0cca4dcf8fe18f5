"""This project: Replay for transitions, windows and frames, TransitionBuffer for steps of environments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box

from deepspeed_gear import Batch, Column, DatasetWriter, Replay, Schema, TransitionBuffer, __version__
from speed import derived, work
from speed.systems.gear_rollouts import GearRollouts
from speed.work import Adding, Array, Batches, Rows

COLUMNS = {
    "observation": {"dtype": "float32", "shape": [work.OBSERVATION], "rows": "T+1"},
    "action": {"dtype": "float32", "shape": [work.ACTION]},
    "reward": {"dtype": "float32", "role": "reward"},
    "done": {"dtype": "bool", "role": "terminated"},
}
PRIORITIZED = {"kind": "prioritized", "unit": "step", "alpha": 0.6, "beta": 0.4}


def version() -> str:
    return __version__


class GearBatches(Batches):
    def __init__(self, columns: dict[str, Any], count: int, longest: int, **section: Any) -> None:
        table = {"capacity_steps": count, "max_length": longest, "schema": {"columns": columns}}
        self._open({"tables": {"main": table}, **section}, section.get("fields", columns))

    def _open(self, section: dict[str, Any], fields: Iterable[str]) -> None:
        self.names = {name: name for name in fields}  # in the data: in a batch
        self.replay = Replay(section)

    def sample(self) -> Any:
        return self.replay.sample()

    def update(self, found: Any, priorities: Array) -> None:
        self.replay.update_priorities(found, torch.from_numpy(priorities))

    def rows(self, found: Any) -> Rows:
        return {name: found[own].clone().numpy() for name, own in self.names.items()}

    def save(self, folder: Path) -> None:
        self.replay.save(folder / "replay")

    def load(self, folder: Path) -> None:
        self.replay.load(folder / "replay")

    def close(self) -> None:
        self.replay.close()


def transition_options(prioritized: bool) -> dict[str, Any]:
    """Return columns and section of single transitions."""
    fields = {
        "observation": {},
        "next_observation": {"column": "observation", "offset": 1},
        "action": {},
        "reward": {},
        "done": {},
    }
    sampler = PRIORITIZED if prioritized else {"kind": "uniform", "unit": "step"}
    return {"columns": COLUMNS, "longest": work.EPISODE, "sampler": sampler, "fields": fields}


def n_step(count: int, batch: int) -> Batches:
    options = transition_options(False)
    options["fields"]["next_observation"] = {"column": "observation", "offset": "n_step"}
    options["n_step"] = {"n": derived.N, "gamma": derived.GAMMA}
    made = GearBatches(count=count, batch_size=batch, **options)
    made.names = {name: name for name in ("observation", "action", "discount", "next_observation")}
    made.names["return"] = "return_n"
    add_transitions(made.replay, count)
    return made


def goal_reward(batch: Batch) -> torch.Tensor:
    """Return the rewards of relabelled samples, as the option `hindsight.reward` wants them."""
    distance = (batch["next_achieved"] - batch["goal"]).norm(dim=-1)
    return -(distance > 0.05).float()


def hindsight(count: int, batch: int) -> Batches:
    columns = {
        "observation": COLUMNS["observation"],
        "achieved": {"dtype": "float32", "shape": [derived.GOAL], "rows": "T+1"},
        "pursued": {"dtype": "float32", "shape": [derived.GOAL], "rows": "1"},
        "action": COLUMNS["action"],
        "reward": COLUMNS["reward"],
        "done": COLUMNS["done"],
    }
    fields = {
        "observation": {},
        "next_observation": {"column": "observation", "offset": 1},
        "next_achieved": {"column": "achieved", "offset": 1},
        "goal": {"column": "pursued", "hindsight": "achieved"},
        "action": {},
        "reward": {},
        "done": {},
    }
    relabel = {"strategy": "future", "fraction": derived.RATIO, "reward": f"{__name__}:goal_reward"}
    sampler = {"kind": "uniform", "unit": "step"}
    made = GearBatches(
        columns, count, derived.HORIZON, sampler=sampler, fields=fields, hindsight=relabel, batch_size=batch
    )
    for rows in derived.episodes(count):
        made.replay.add({**rows, "reward": derived.reward(rows["achieved"][1:], rows["pursued"])})
    return made


def add_transitions(replay: Replay, count: int) -> None:
    for rows in work.trajectories(count // work.EPISODE):
        last = work.observation(rows["reward"][-1:].astype(np.int64) + 1)
        replay.add({**rows, "observation": np.concatenate([rows["observation"], last])})


def transitions(count: int, batch: int, prioritized: bool, fill: int | None = None) -> Batches:
    made = GearBatches(count=count, batch_size=batch, **transition_options(prioritized))
    add_transitions(made.replay, fill or count)
    return made


def windows(count: int, batch: int, length: int) -> Batches:
    columns = {**COLUMNS, "observation": {**COLUMNS["observation"], "rows": "T"}}
    made = GearBatches(columns, count, work.EPISODE, **_of_windows(length, batch))
    for rows in work.trajectories(count // work.EPISODE):
        made.replay.add(rows)
    return made


def _of_windows(length: int, batch: int) -> dict[str, Any]:
    whole = length == work.EPISODE
    sampler = {
        "kind": "uniform",
        "unit": "trajectory" if whole else "step",
        "anchors": "start" if whole else "fits",
    }
    fields = {name: {"offset": 0 if whole else 1 - length, "length": length} for name in COLUMNS}
    return {"sampler": sampler, "fields": fields, "batch_size": batch}


def write(count: int, folder: Path) -> None:
    columns = [
        Column("observation", "float32", (work.OBSERVATION,)),
        Column("action", "float32", (work.ACTION,)),
        Column("reward", "float32"),
        Column("done", "bool", role="terminated"),
    ]
    with DatasetWriter(folder / "data", Schema(columns)) as writer:
        for rows in work.trajectories(count // work.EPISODE):
            writer.add(rows)


class GearStored(GearBatches):
    """A data set on disk, which is mapped: it may be larger than memory."""

    def __init__(self, count: int, batch: int, length: int, folder: Path) -> None:
        section = {"data": str(folder / "data"), **_of_windows(length, batch)}
        self._open(section, section["fields"])


stored = GearStored


def frames(count: int, batch: int, length: int) -> Batches:
    columns = {"frame": {"dtype": "uint8", "shape": list(work.FRAME)}}
    sampler = {"kind": "uniform", "unit": "step", "anchors": "fits"}
    fields = {"frame": {"offset": 1 - length, "length": length}}
    made = GearBatches(columns, count, 500, sampler=sampler, fields=fields, batch_size=batch)
    for rows in work.frames(count // 500, 500):
        made.replay.add(rows)
    return made


def numbered(count: int, batch: int) -> tuple[Callable[[], Array], Callable[[], None]]:
    columns = {"number": {"dtype": "int32"}}
    sampler = {**PRIORITIZED, "alpha": 1.0}
    made = GearBatches(columns, count, 1 << 16, sampler=sampler, batch_size=batch)
    for first in range(0, count, 1 << 16):
        made.replay.add({"number": np.arange(first, min(first + (1 << 16), count), dtype=np.int32)})
    return lambda: made.sample()["number"].flatten().numpy(), made.close


class GearAdding(Adding):
    def __init__(self, num_envs: int, capacity: int) -> None:
        space, action = Box(-np.inf, np.inf, (work.OBSERVATION,)), Box(-1, 1, (work.ACTION,))
        self._buffer = TransitionBuffer(
            capacity, space, action, n_envs=num_envs, batch_size=256, autoreset="same_step"
        )

    def add(self, step: Rows) -> None:
        self._buffer.add(
            step["observation"],
            step["next_observation"],
            step["action"],
            step["reward"],
            step["terminated"],
            step["truncated"],
        )

    def sample(self) -> Any:
        return self._buffer.sample()

    def held(self) -> int:
        return len(self._buffer)

    def close(self) -> None:
        self._buffer.close()


adding = GearAdding
rollouts = GearRollouts


def whole(capacity: int) -> tuple[Callable[[Rows], Any], Callable[[], None]]:
    columns = {**COLUMNS, "observation": {**COLUMNS["observation"], "rows": "T"}}
    table = {
        "capacity_steps": capacity,
        "max_length": work.EPISODE,
        "remove": "fifo",
        "schema": {"columns": columns},
    }
    replay = Replay({"tables": {"main": table}, "batch_size": 1})
    return replay.add, replay.close
