"""rsl_rl: the rollout storage of its PPO, with a step of `added` environments in each add.

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

from device_peers.interface import Case
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
        # As many steps as make whole minibatches.
        unit = case.batch // math.gcd(case.batch, case.added)
        steps = case.items // case.added // unit * unit
        self.period = steps * case.added // case.batch
        self.note = "without replacement: a permutation of the rollout in each epoch"
        policy = TensorDict(
            {"policy": torch.zeros(case.added, OBSERVATION, device=case.device)}, [case.added]
        )
        self._storage = RolloutStorage(
            "rl",
            num_envs=case.added,
            num_transitions_per_env=steps,
            obs=policy,
            actions_shape=(work.ACTION,),
            device=case.device,
        )
        self._step = self._transition(self.given)
        self._batches: Iterator[Any] = iter(())
        self._last: Any = None
        for first in range(0, steps * case.added, case.added):
            self.offer(work.steps(first, case.added))
            self.add()
        self.offer(work.steps(steps * case.added, case.added))

    def _transition(self, given: dict[str, torch.Tensor]) -> Any:
        """Return the step of all environments, whose tensors are those that were given."""
        step = RolloutStorage.Transition()
        padding = (0, OBSERVATION - work.OBSERVATION)
        given["observation"] = torch.nn.functional.pad(given["observation"], padding)
        count = self.case.added
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
        if self._storage.step == self._storage.num_transitions_per_env:
            self._storage.clear()
        self._storage.add_transition(self._step)

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
