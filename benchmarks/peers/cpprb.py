"""cpprb: ReplayBuffer, PrioritizedReplayBuffer and HindsightReplayBuffer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import cpprb
import numpy as np

from peers.interface import Array, Moment, NotOfferedError, Sampled, StepBuffer, Steps, System


class CpprbSteps(StepBuffer):
    def __init__(self, need: Steps) -> None:
        if need.normalize == "table" and need.prioritized:
            self._scale = "table"
        columns: dict[str, Any] = {
            "obs": {},
            "act": {},
            "rew": {},
            "next_obs": {},
            "done": {},
            "truncated": {},
        }
        options: dict[str, Any] = {}
        if need.n_step > 1:
            options["Nstep"] = {"size": need.n_step, "gamma": need.gamma, "rew": "rew", "next": "next_obs"}
        self._need = need
        if need.n_step > 1 and need.num_envs > 1:
            raise NotOfferedError("one local buffer of n-step returns")
        if need.prioritized:
            self._buffer = cpprb.PrioritizedReplayBuffer(need.capacity, columns, alpha=need.alpha, **options)
        else:
            self._buffer = cpprb.ReplayBuffer(need.capacity, columns, **options)
        np.random.seed(need.seed)

    def add(self, moment: Moment) -> None:
        self._buffer.add(
            obs=moment.obs,
            act=np.zeros(len(moment.obs)),
            rew=moment.reward,
            next_obs=moment.next_obs,
            done=moment.terminated,
            truncated=moment.truncated,
        )
        if moment.truncated.any() or moment.terminated.any():
            self._buffer.on_episode_end()

    def sample(self) -> Sampled:
        need = self._need
        found = (
            self._buffer.sample(need.batch, beta=need.beta)
            if need.prioritized
            else self._buffer.sample(need.batch)
        )
        arrays = {name: values.reshape(len(values)) for name, values in found.items()}
        discount = (
            arrays["discounts"] if "discounts" in arrays else np.full(need.batch, need.gamma**need.n_step)
        )
        weights = arrays.get("weights", np.ones(need.batch))
        return Sampled(
            arrays["obs"],
            arrays["next_obs"],
            arrays["rew"],
            discount * (1 - arrays["done"]),
            weights,
            arrays.get("indexes"),
        )

    def update(self, sampled: Sampled, priorities: Array) -> None:
        self._buffer.update_priorities(sampled.handle, priorities)

    def __len__(self) -> int:
        return int(self._buffer.get_stored_size())

    def save(self, folder: Path) -> None:
        self._buffer.save_transitions(str(folder / "buffer"), safe=False)

    def load(self, folder: Path) -> None:
        self._buffer.load_transitions(str(folder / "buffer.npz"))


class Cpprb(System):
    name = "cpprb"

    def version(self) -> str:
        return version("cpprb")

    def steps(self, need: Steps) -> StepBuffer:
        return CpprbSteps(need)

    def goals(self, episodes: list[Array], batch: int) -> Mapping[str, Array]:
        columns = {"obs": {}, "act": {}, "next_obs": {}}
        buffer = cpprb.HindsightReplayBuffer(
            1000,
            columns,
            max_episode_len=100,
            reward_func=lambda state, _, goal: -np.abs(state - goal).sum(1),
            prioritized=False,
        )
        for obs in episodes:
            for number in obs:
                buffer.add(obs=number, act=0, next_obs=number + 1)
            buffer.on_episode_end(obs[-1])
        found = buffer.sample(batch)
        return {"obs": found["obs"][:, 0], "goal": found["goal"][:, 0]}


SYSTEM = Cpprb()
