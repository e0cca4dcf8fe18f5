"""Language-model trajectories, and rollout batches of them as any rank of any world sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from gear_support import prefix

from deepspeed_gear import Replay
from deepspeed_gear.batching.loss_weights import GradientDivisor
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.replay.packed.rollout import Rollout
from deepspeed_gear.replay.packed.rollout_columns import RolloutColumns
from deepspeed_gear.replay.packed.rollout_context import RolloutContext

COLUMNS = {
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "logp": {"dtype": "float32"},
    "reward": {"dtype": "float32", "rows": "1"},
    "prompt": {"dtype": "int64", "rows": "1"},
}
MOST = 60
COUNT = 40


def responses(count: int, seed: int = 0, most: int = MOST) -> list[dict[str, Any]]:
    """Return trajectories of tokens: prompts of any length, of two tokens at least in all."""
    words = np.random.default_rng(seed)
    found = []
    for number in range(count):
        length = int(words.integers(2, most + 1))
        prompt = int(words.integers(0, length + 1))
        found.append(
            {
                "tokens": words.integers(1, 1000, length).astype(np.int32),
                "loss_mask": np.arange(length) >= prompt,
                "logp": -words.random(length, dtype=np.float32),
                "reward": np.float32(words.integers(0, 3)),
                "prompt": np.int64(number // 4),
            }
        )
    return found


TABLE = {"capacity_steps": 9000, "max_length": MOST, "schema": {"columns": COLUMNS}}


def section(columns: Mapping[str, Any] = COLUMNS, /, **options: Any) -> dict[str, Any]:
    """Return a gear section of packed batches, of one table with these columns."""
    return {
        "tables": {"responses": {**TABLE, "schema": {"columns": columns}}},
        "sampler": {"kind": "fifo"},
        "pack": {"tokens": 128, "pad": {"multiple": 16}},
        "rollout": {"trajectories": 24},
        "shared_memory": {"prefix": prefix()},
        **options,
    }


STORED = responses(COUNT)


def filled(config: Mapping[str, Any], count: int = COUNT) -> Replay:
    """Return a Replay with responses, whose ids are their indices: the first ones are `STORED`."""
    return holding(config, responses(count))


def holding(config: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]) -> Replay:
    """Return a Replay that holds trajectories, whose ids are their indices."""
    replay = Replay(config)
    for row in rows:
        replay.add(row)
    return replay


@contextmanager
def rolled_out(**options: Any) -> Iterator[Rollout]:
    """The first rollout batch of a section with these options."""
    with filled(section(**options)) as replay:
        yield replay.rollout()


def micros(rollout: Rollout) -> list[MicroBatch]:
    """Train a rollout batch; return its micro batches."""
    return [micro for step in rollout for micro in step]


def seen_by(rollout: Rollout, place: RankCoordinates) -> Rollout:
    """Return a rollout batch as the rank with other coordinates sees it, without collectives."""
    columns = rollout.batch_columns
    settings = replace(columns.context.settings, place=place)
    divisor = GradientDivisor(float(place.data_world))
    context = RolloutContext(settings, ControlPlane(), None, False, divisor)
    there = RolloutColumns(columns.tables, context)
    there.filled.update(columns.filled)
    return Rollout(rollout.number, there, lambda: None)


def ranks_of(world: int, sequence: int = 1) -> list[RankCoordinates]:
    return [
        RankCoordinates(data_rank=d, data_world=world, sequence_rank=s, sequence_world=sequence)
        for d in range(world)
        for s in range(sequence)
    ]


def mean_of(values: list[np.ndarray], normalize: Any, count_masked: bool) -> float:
    """The intended mean, from the loss tokens' values of each sequence."""
    counted = [v for v in values if len(v) or count_masked]
    if normalize == "token":
        return float(np.concatenate(values).mean())
    if normalize == "sequence":
        return sum(v.mean() for v in values if len(v)) / len(counted)
    return sum(v.sum() for v in values) / normalize["constant"] / len(counted)
