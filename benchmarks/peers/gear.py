"""This project: TransitionBuffer for single transitions, Replay for all else and for
several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from speed import derived, work

from deepspeed_gear import (
    Batch,
    Column,
    DatasetWriter,
    Replay,
    Schema,
    TransitionBuffer,
    __version__,
)
from peers import gear_language, gear_ranks
from peers.gear_leases import GearLeases
from peers.gear_rollouts import GearRollouts
from peers.interface import Array, Buffer, Rows, Steps, System, Windows

COLUMNS = {
    "observation": {"dtype": "float32", "shape": [work.OBSERVATION], "rows": "T+1"},
    "action": {"dtype": "float32", "shape": [work.ACTION]},
    "reward": {"dtype": "float32", "role": "reward"},
    "done": {"dtype": "bool", "role": "terminated"},
}
PRIORITIZED = {"kind": "prioritized", "unit": "step", "alpha": 0.6, "beta": 0.4}


class GearSteps(Buffer):
    def __init__(self, need: Steps) -> None:
        rows = need.columns["observation"]
        action = need.columns["action"].shape[1:]
        low, high = (0, 255) if rows.dtype == np.uint8 else (-np.inf, np.inf)
        spaces = Box(low, high, rows.shape[1:], rows.dtype.type), Box(-1, 1, action)
        options: dict[str, Any] = {"batch_size": need.batch, "autoreset": need.autoreset}
        if need.prioritized:
            options["sampler"] = {
                "kind": "prioritized",
                "alpha": lambda _: self._alpha,
                "alpha_every": 1,
                "beta": need.beta,
                "normalize": need.normalize,
            }
        if need.n_step > 1:
            options["n_step"] = {"n": need.n_step, "gamma": need.gamma}
        if need.seed is not None:
            options["seed"] = need.seed
        if need.capacity < 1000:
            options["table"] = {"max_length": 8}
        self._need = need
        self._alpha = need.alpha
        self._buffer = TransitionBuffer(need.capacity, *spaces, n_envs=need.num_envs, **options)

    def add(self, rows: Rows) -> None:
        states = rows["observation"], rows["next_observation"]
        ends = rows["done"], rows["truncated"]
        self._buffer.add(*states, rows["action"], rows["reward"], *ends)

    def sample(self) -> Any:
        return self._buffer.sample()

    def rows(self, found: Any) -> Rows:
        columns = {
            "observation": found.observations,
            "next_observation": found.next_observations,
            "reward": found.rewards,
            "done": found.dones,
            "weight": found.batch.is_weight,
        }
        if found.discounts is not None:
            columns |= {"return": found.rewards, "discount": found.discounts}
        return {name: column.clone().numpy() for name, column in columns.items()}

    def keep(self, found: Any) -> Any:
        return found.batch.clone()

    def update(self, found: Any, priorities: Array) -> None:
        self._buffer.replay.update_priorities(found, torch.from_numpy(priorities))

    def set_alpha(self, alpha: float) -> None:
        self._alpha = alpha

    def __len__(self) -> int:
        return len(self._buffer)

    def save(self, folder: Path) -> None:
        self._buffer.replay.save(folder)

    def load(self, folder: Path) -> None:
        self._buffer.replay.load(folder)

    def close(self) -> None:
        self._buffer.close()


class GearCalls(GearSteps):
    """One gymnasium environment, whose steps are added as it returns them."""

    def __init__(self, capacity: int) -> None:
        env = gymnasium.make("CartPole-v1")
        spaces = env.observation_space, env.action_space
        self._buffer = TransitionBuffer(capacity, *spaces, n_envs=env, batch_size=256)
        self.add_call = self._buffer.add  # type: ignore[method-assign]


class GearBatches(Buffer):
    def __init__(self, columns: dict[str, Any], count: int, longest: int, **section: Any) -> None:
        table = {"capacity_steps": count, "max_length": longest, "schema": {"columns": columns}}
        self._open({"tables": {"main": table}, **section}, section.get("fields", columns))

    def _open(self, section: dict[str, Any], fields: Iterable[str]) -> None:
        self.names = {name: name for name in fields}  # in the data: in a batch
        self.replay = Replay(section)

    @classmethod
    def of(cls, replay: Replay) -> GearBatches:
        """Take batches of a replay that is there."""
        made = cls.__new__(cls)
        made.names = {}
        made.replay = replay
        return made

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


class GearWindows(GearBatches):
    def __init__(self, need: Windows) -> None:
        columns = {"observation": {"dtype": "float32"}, "terminated": COLUMNS["done"]}
        table = {"capacity_steps": need.capacity, "max_length": need.capacity, "remove": "fifo"}
        section = {
            "tables": {"main": {**table, "schema": {"columns": columns}}},
            "sampler": {
                "kind": "uniform",
                "unit": "step",
                "anchors": "fits" if need.whole else "all",
            },
            "fields": {"observation": {"length": need.length}},
            "batch_size": need.batch,
            "seed": need.seed,
        }
        self._open(section, section["fields"])

    def add(self, rows: Rows) -> None:
        count = len(rows["observation"])
        self.replay.add({**rows, "terminated": np.arange(count) == count - 1})

    def rows(self, found: Any) -> Rows:
        return {**super().rows(found), "mask": found.mask["observation"].clone().numpy()}


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


def n_step(count: int, batch: int) -> Buffer:
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


def goals(episodes: Iterable[Rows], count: int, batch: int) -> Buffer:
    parts = list(episodes)
    columns = {
        name: {"dtype": "float32", "shape": list(parts[0][name].shape[1:])}
        for name in ("observation", "achieved", "action")
    }
    for name in ("observation", "achieved"):
        columns[name]["rows"] = "T+1"
    columns["pursued"] = {"dtype": "float32", "shape": list(parts[0]["pursued"].shape), "rows": "1"}
    columns |= {name: COLUMNS[name] for name in ("reward", "done")}
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
    options = {
        "sampler": {"kind": "uniform", "unit": "step"},
        "fields": fields,
        "hindsight": relabel,
    }
    made = GearBatches(columns, count, len(parts[0]["done"]), **options, batch_size=batch)
    for rows in parts:
        made.replay.add({**rows, "reward": derived.reward(rows["achieved"][1:], rows["pursued"])})
    return made


def add_transitions(replay: Replay, count: int) -> None:
    for rows in work.trajectories(count // work.EPISODE):
        last = work.observation(rows["reward"][-1:].astype(np.int64) + 1)
        replay.add({**rows, "observation": np.concatenate([rows["observation"], last])})


def transitions(count: int, batch: int, prioritized: bool, fill: int | None = None) -> Buffer:
    made = GearBatches(count=count, batch_size=batch, **transition_options(prioritized))
    add_transitions(made.replay, fill or count)
    return made


def windows(count: int, batch: int, length: int) -> Buffer:
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


def frames(count: int, batch: int, length: int) -> Buffer:
    columns = {"frame": {"dtype": "uint8", "shape": list(work.FRAME)}}
    sampler = {"kind": "uniform", "unit": "step", "anchors": "fits"}
    fields = {"frame": {"offset": 1 - length, "length": length}}
    made = GearBatches(columns, count, 500, sampler=sampler, fields=fields, batch_size=batch)
    for rows in work.frames(count // 500, 500):
        made.replay.add(rows)
    return made


def numbered(count: int, batch: int) -> Buffer:
    columns = {"number": {"dtype": "int32"}}
    made = GearBatches(
        columns, count, 1 << 16, sampler={**PRIORITIZED, "alpha": 1.0}, batch_size=batch
    )
    for first in range(0, count, 1 << 16):
        made.replay.add({"number": np.arange(first, min(first + (1 << 16), count), dtype=np.int32)})
    return made


class GearWhole(GearBatches):
    """Trajectories that come into a full table."""

    def __init__(self, capacity: int) -> None:
        columns = {**COLUMNS, "observation": {**COLUMNS["observation"], "rows": "T"}}
        table = {"capacity_steps": capacity, "max_length": work.EPISODE, "remove": "fifo"}
        table["schema"] = {"columns": columns}
        self._open({"tables": {"main": table}, "batch_size": 1}, columns)
        self.add = self.replay.add


class Gear(System):
    kinds = frozenset(("hindsight", "adding"))
    steps = vector_steps = GearSteps
    windows = GearWindows
    goals = staticmethod(goals)
    epoch = staticmethod(gear_ranks.epoch)
    shared = staticmethod(gear_ranks.shared)
    restart = staticmethod(gear_ranks.restart)
    packs = staticmethod(gear_ranks.packs)
    token_weights = staticmethod(gear_language.token_weights)
    advantages = staticmethod(gear_language.advantages)
    incomplete_group = staticmethod(gear_language.incomplete_group)

    def version(self) -> str:
        return __version__


SYSTEM = Gear(
    "deepspeed_gear",
    transitions=transitions,
    windows=windows,
    frames=frames,
    n_step=n_step,
    calls=GearCalls,
    whole=GearWhole,
    numbered=numbered,
    rollouts=GearRollouts,
    leases=GearLeases,
    write=write,
    stored=GearStored,
)
