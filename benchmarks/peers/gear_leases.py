"""This project's leases: a table of groups with a ledger of its prompts, and a rollout worker."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from speed.leases import MEMBERS, PROMPT, TOKENS, Leases

from deepspeed_gear import Column, DatasetWriter, Replay, Schema
from peers.gear_rollouts import COLUMNS

NUM_PROMPTS = 1000


class GearLeases(Leases):
    def __init__(self, groups: int) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="leases-"))
        prompts = self._folder / "prompts"
        with DatasetWriter(prompts, Schema([Column("tokens", "int32", role="token")])) as writer:
            for number in range(NUM_PROMPTS):
                writer.add({"tokens": np.full(PROMPT, number, np.int32)})
        responses = groups * MEMBERS
        columns = {**COLUMNS, "reward": {"dtype": "float32", "rows": "1"}}
        table = {
            "capacity_trajectories": 4 * responses,
            "capacity_steps": 4 * responses * TOKENS,
            "max_length": TOKENS,
            "max_times_sampled": 1,
            "group": {"column": "prompt_id", "size": MEMBERS},
            "prompts": {"data": str(prompts), "max_lag": 2},
            "schema": {"columns": columns},
        }
        self._replay = Replay(
            {
                "tables": {"main": table},
                "sampler": {"kind": "fifo", "unit": "group"},
                "pack": {"tokens": 16384},
                "rollout": {"groups": groups},
            }
        )
        self._worker = self._replay.rollout_worker()
        self._committed = 0

    def lease(self, count: int) -> list[Any]:
        leases: list[Any] = []
        while len(leases) < count:
            leases += self._worker.lease(count - len(leases), timeout_s=10)
        return leases

    def commit(self, lease: Any, responses: list[dict[str, Any]]) -> None:
        lease.commit(responses)
        self._committed += 1

    def consume(self) -> None:
        if self._committed:
            for step in self._replay.rollout():
                for _ in step:
                    pass
            self._committed = 0

    def check(self, responses: list[dict[str, Any]]) -> None:
        assert self._committed, "no group is held"
        for step in self._replay.rollout():
            for micro in step:
                for at in range(len(micro.lengths)):
                    rows = (micro.sequence[0] == at).numpy()
                    tokens = micro["tokens"][0].numpy()[rows]
                    logp = micro["logp"][0].numpy()[rows][:-1]  # beside the token before it
                    assert any(
                        np.array_equal(tokens, one["tokens"])
                        and np.array_equal(logp, np.array(one["logp"][1:], np.float32))
                        for one in responses
                    ), "a response that was never committed"
        self._committed = 0

    def close(self) -> None:
        self._worker.close()
        self._replay.close()
        shutil.rmtree(self._folder)
