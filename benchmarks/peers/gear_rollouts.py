"""This project's rollouts: a table of groups, `rollout()`, packed micro batches, `fill`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from speed.rollouts import BUDGET, LONGEST, MEMBERS, PROMPT, Micro, Rollouts

from deepspeed_gear import Replay
from peers.interface import Array, Rows

COLUMNS = {
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "logp": {"dtype": "float32"},
    "reward": {"dtype": "float32", "rows": "1", "late": True},
    "prompt_id": {"dtype": "int64", "rows": "1"},
}


class GearRollouts(Rollouts):
    def __init__(self, num_tokens: int, groups: int, step: int) -> None:
        table = {
            "capacity_trajectories": 2 * groups * MEMBERS,
            "capacity_steps": 2 * num_tokens,  # also of the step in training, and gaps
            "max_length": PROMPT[1] + LONGEST,
            "remove": "fifo",
            "max_times_sampled": 1,
            "group": {"column": "prompt_id", "size": MEMBERS, "needs": ["reward"]},
            "schema": {"columns": COLUMNS},
        }
        self._replay = Replay(
            {
                "tables": {"main": table},
                "sampler": {"kind": "fifo", "unit": "group"},
                "pack": {"tokens": BUDGET},
                "rollout": {"groups": step},
            }
        )

    def add(self, number: int, group: list[Rows]) -> None:
        for response in group:
            self._replay.add({**response, "prompt_id": number})

    def select(self) -> Any:
        return self._replay.rollout()

    def pack(self, step: Any) -> Iterator[Any]:
        return step.forward("ref_logp")

    def tokens(self, micro: Any) -> Array:
        return micro.targets.numpy()

    def fill(self, micro: Any, values: Array) -> None:
        micro.fill(ref_logp=torch.from_numpy(values))

    def train(self, step: Any) -> Iterator[Any]:
        for minibatch in step:
            yield from minibatch

    def micro(self, found: Any) -> Micro:
        sequence = found.sequence[0].numpy()
        is_last = sequence != np.append(sequence[1:], -1)  # it predicts no token
        has_value = (sequence >= 0) & ~is_last
        tokens = found["tokens"][0].numpy()
        begins = found.cu_seqlens.numpy()[: len(found.lengths)]
        values = (found.targets, found.loss_mask, found["logp"], found["ref_logp"])
        return Micro(
            tokens[sequence >= 0],
            tokens[begins],
            found["reward"].numpy(),
            *(one[0].numpy()[has_value] for one in values),
        )

    def close(self) -> None:
        self._replay.close()
