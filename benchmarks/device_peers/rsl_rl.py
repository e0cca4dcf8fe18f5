"""rsl_rl: the rollout storage of its PPO, with a step of `added` environments in each add; of
roll-outs, an add has all steps of one.

Its minibatches are a permutation of the whole rollout: each transition once an epoch, without
priorities. Its fields are those of PPO: 104 bytes of a transition go into a minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from peers.interface import Array, NotOfferedError, Rows
from rsl_rl.storage import RolloutStorage
from speed import work
from tensordict import TensorDict

from device_peers.interface import NUM_EPOCHS, NUM_MINIBATCHES, Case
from device_peers.torch_forms import TorchTable, as_arrays

PACKAGE = "rsl-rl-lib"
OBSERVATION = 13  # 104 bytes with PPO's other fields


class RslRl(TorchTable):
    """`add_transition`, and the next minibatch of `mini_batch_generator`."""

    is_permutation = True

    def __init__(self, case: Case, compiler: str) -> None:
        if case.length > 1 or case.prioritized:
            raise NotOfferedError
        super().__init__(case, compiler)
        envs = case.num_envs if case.rollout else case.added
        # As many steps as make whole minibatches.
        unit = case.batch // math.gcd(case.batch, envs)
        steps = case.items // envs // unit * unit
        self.period = steps * envs // case.batch
        self.note = "without replacement: a permutation of the rollout in each epoch"
        if case.rollout:
            self.note = "one permutation: the epochs of a roll-out have the same minibatches"
        policy = TensorDict({"policy": torch.zeros(envs, OBSERVATION, device=case.device)}, [envs])
        self._storage = RolloutStorage(
            "rl",
            num_envs=envs,
            num_transitions_per_env=steps,
            obs=policy,
            actions_shape=(work.ACTION,),
            device=case.device,
        )
        padding = (0, OBSERVATION - work.OBSERVATION)
        self.given["observation"] = torch.nn.functional.pad(self.given["observation"], padding)
        by_step = zip(*(values.split(envs) for values in self.given.values()), strict=True)
        self._steps = [
            self._transition(dict(zip(self.given, values, strict=True))) for values in by_step
        ]
        self._batches: Iterator[Any] = iter(())
        self._last: Any = None
        for first in range(0, steps * envs, case.added):
            self.offer(work.steps(first, case.added))
            self.add()
        self.offer(work.steps(steps * envs, case.added))

    def _transition(self, given: dict[str, torch.Tensor]) -> Any:
        """Return the step of all environments, whose tensors are those that were given."""
        step = RolloutStorage.Transition()
        count = len(given["reward"])
        zero = torch.zeros(count, 1, device=self.case.device)
        step.observations = TensorDict({"policy": given["observation"]}, [count])
        step.actions = given["action"]
        step.rewards = given["reward"]
        step.dones = given["done"]
        step.values = zero
        step.actions_log_prob = zero[:, 0].clone()
        step.distribution_params = (
            torch.zeros_like(step.actions),
            torch.ones_like(step.actions),
        )
        return step

    def add(self) -> None:
        for step in self._steps:
            if self._storage.step == self._storage.num_transitions_per_env:
                self._storage.clear()
            self._storage.add_transition(step)

    def minibatches(self) -> Iterator[None]:
        for batch in self._storage.mini_batch_generator(NUM_MINIBATCHES, NUM_EPOCHS):
            self._last = batch
            yield

    def sample(self) -> None:
        self._last = next(self._batches, None)
        if self._last is None:
            self._batches = self._storage.mini_batch_generator(self.period, num_epochs=1)
            self._last = next(self._batches)

    def offer(self, rows: Rows) -> None:
        padding = ((0, 0), (0, OBSERVATION - work.OBSERVATION))
        super().offer({**rows, "observation": np.pad(rows["observation"], padding)})

    def batch(self) -> Rows:
        observation = self._last.observations["policy"][:, : work.OBSERVATION]
        return as_arrays({"observation": observation, "action": self._last.actions})

    def stored(self) -> Array:
        return self._storage.rewards.flatten().cpu().numpy().astype(np.int64)


make = RslRl
