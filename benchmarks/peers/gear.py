"""This project: TransitionBuffer for single transitions, Replay for windows and for several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from deepspeed_gear import Replay, TransitionBuffer, __version__
from peers import gear_language, gear_ranks
from peers.interface import Array, Moment, Sampled, StepBuffer, Steps, System, Window, WindowBuffer, Windows

STEP = {"observation": {"dtype": "float32"}, "terminated": {"dtype": "bool", "role": "terminated"}}


class GearSteps(StepBuffer):
    def __init__(self, need: Steps, autoreset: Any = "disabled") -> None:
        space, action = gymnasium.spaces.Box(-np.inf, np.inf, (1,)), gymnasium.spaces.Discrete(2)
        options: dict[str, Any] = {"batch_size": need.batch, "seed": need.seed}
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
        self._alpha = need.alpha
        self._need, self._action = need, np.zeros(need.num_envs, np.int64)
        table = {"max_length": 8} if need.capacity < 1000 else None
        self._buffer = TransitionBuffer(
            need.capacity, space, action, n_envs=need.num_envs, autoreset=autoreset, table=table, **options
        )

    def add(self, moment: Moment) -> None:
        self._buffer.add(
            moment.obs[:, None],
            moment.next_obs[:, None],
            self._action,
            moment.reward,
            moment.terminated,
            moment.truncated,
        )

    def sample(self) -> Sampled:
        data = self._buffer.sample()
        discount = self._need.gamma * (1 - data.dones) if data.discounts is None else data.discounts
        columns = (data.observations, data.next_observations, data.rewards, discount)
        arrays = [column[:, 0].clone().numpy() for column in columns]
        return Sampled(*arrays, data.batch.is_weight.clone().numpy(), data.batch.clone())

    def update(self, sampled: Sampled, priorities: Array) -> None:
        self._buffer.replay.update_priorities(sampled.handle, priorities)

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


class GearWindows(WindowBuffer):
    def __init__(self, need: Windows) -> None:
        table = {"capacity_steps": need.capacity, "max_length": need.capacity, "remove": "fifo"}
        section = {
            "tables": {"main": {**table, "schema": {"columns": STEP}}},
            "sampler": {"kind": "uniform", "unit": "step", "anchors": "fits" if need.whole else "all"},
            "fields": {"observation": {"length": need.length}},
            "batch_size": need.batch,
            "seed": need.seed,
        }
        self._replay = Replay(section)

    def add(self, obs: Array) -> None:
        ends = np.arange(len(obs)) == len(obs) - 1
        self._replay.add({"observation": obs, "terminated": ends})

    def sample(self) -> Window:
        batch = self._replay.sample()
        return Window(batch["observation"].clone().numpy(), batch.mask["observation"].clone().numpy())

    def close(self) -> None:
        self._replay.close()


class Gear(System):
    name = "deepspeed_gear"

    def version(self) -> str:
        return __version__

    def steps(self, need: Steps) -> StepBuffer:
        return GearSteps(need)

    def vector_steps(self, need: Steps, autoreset: str) -> StepBuffer:
        return GearSteps(need, autoreset)

    def windows(self, need: Windows) -> WindowBuffer:
        return GearWindows(need)

    def goals(self, episodes: list[Array], batch: int) -> Mapping[str, Array]:
        columns = {"achieved": {"dtype": "float32", "rows": "T+1"}, "goal": {"dtype": "float32"}}
        section = {
            "tables": {"main": {"capacity_steps": 1000, "max_length": 100, "schema": {"columns": columns}}},
            "sampler": {"kind": "uniform", "unit": "step"},
            "fields": {"achieved": {}, "goal": {"hindsight": "achieved"}},
            "hindsight": {"fraction": 1.0},
            "batch_size": batch,
        }
        with Replay(section) as replay:
            for obs in episodes:
                replay.add({"achieved": np.append(obs, obs[-1:] + 1), "goal": np.full(len(obs), -1.0)})
            found = replay.sample()
            return {"obs": found["achieved"].numpy().copy(), "goal": found["goal"].numpy().copy()}

    epoch = staticmethod(gear_ranks.epoch)
    shared = staticmethod(gear_ranks.shared)
    restart = staticmethod(gear_ranks.restart)
    packs = staticmethod(gear_ranks.packs)
    token_weights = staticmethod(gear_language.token_weights)
    advantages = staticmethod(gear_language.advantages)
    incomplete_group = staticmethod(gear_language.incomplete_group)


SYSTEM = Gear()
