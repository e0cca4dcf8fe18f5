"""A Replay over several tables: shares, epochs of each, priorities, evaluation, checkpoints."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_gear import Batch, Column, Replay, Schema
from deepspeed_gear.errors import ConfigError, DataError, StoreError

SCHEMA = Schema(
    [Column("observation", "float32", (2,), "observation"), Column("reward", "float32", (), "reward")]
)
STEPS = {"kind": "prioritized", "unit": "step"}
ROOM = {"capacity_steps": 1000, "capacity_trajectories": 50}


def section(of: dict[str, Any], shares: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    sampler = {"kind": "mixture", "shares": shares or {"a": 0.25, "b": 0.75}, "of": of}
    return {"tables": {"a": ROOM, "b": ROOM}, "sampler": sampler, "batch_size": 16, **options}


def filled(section: dict[str, Any], num_trajectories: int = 10) -> Replay:
    replay = Replay(section, schemas={"a": SCHEMA, "b": SCHEMA})
    for offset, table in ((0, "a"), (100, "b")):
        for number in range(num_trajectories):
            steps = 1 + number
            observation = np.full((steps, 2), offset + number, np.float32)
            replay.add({"observation": observation, "reward": np.ones(steps, np.float32)}, table)
    return replay


def test_rows_come_from_the_named_table() -> None:
    with filled(section({"unit": "step"})) as replay:
        assert len(replay) == 20
        for _ in range(5):
            batch = replay.sample()
            assert batch.source.tolist() == [0] * 4 + [1] * 12
            assert (batch["observation"][:, 0] == batch.trajectory_id + 100 * batch.source).all()
            assert batch.probability.tolist() == pytest.approx([0.25 / 55] * 4 + [0.75 / 55] * 12)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_share_below_one_sample_is_drawn(scheduled: bool) -> None:
    """Also after another number of batches was prefetched; probabilities are those of the share."""
    of_a: Any = {"linear": [0.0, 0.05, 40]} if scheduled else 0.02
    of_b: Any = {"linear": [1.0, 0.95, 40]} if scheduled else 0.98
    counts = []
    for prefetch in (0, 3):
        with filled(section({"unit": "step"}, {"a": of_a, "b": of_b}, prefetch=prefetch)) as replay:
            batches = [replay.sample().clone() for _ in range(60)]
        counts.append([int((batch.source == 0).sum()) for batch in batches])
        share = 0.05 * min(30 / 40, 1.0) if scheduled else 0.02
        of_table = torch.tensor([share, 1 - share], dtype=torch.float64)
        assert torch.allclose(batches[30].probability, of_table[batches[30].source] / 55)
    drawn = np.cumsum(counts[0])
    shares = [0.05 * min(n / 40, 1.0) if scheduled else 0.02 for n in range(60)]
    assert counts[0] == counts[1]
    assert (np.abs(drawn - 16 * np.cumsum(shares)) < 1).all()
    assert drawn[-1] > 10


def test_epochs_visit_each_item_of_each_table_once() -> None:
    with filled(section({"kind": "epoch"})) as replay:
        seen: Counter[tuple[int, int, int]] = Counter()
        for _ in range(25):
            batch = replay.sample()
            seen.update(map(tuple, torch.stack([batch.source, batch.epoch, batch.trajectory_id], 1).tolist()))
    assert set(seen.values()) == {1}
    for place in ((0, 0), (1, 28)):
        assert sum((source, epoch) == place for source, epoch, _ in seen) == 10


@pytest.mark.parametrize("in_parts", [False, True])
def test_priorities_go_to_the_tables_they_are_of(in_parts: bool) -> None:
    with filled(section(STEPS)) as replay:
        batch = replay.sample()
        values = 1 + batch.source + batch.trajectory_id.float()
        parts = [batch[batch.source == 1], Batch.cat([batch[2:4], batch[:2]])] if in_parts else [batch]
        for part in parts:
            replay.update_priorities(part, values[part.sample_index])
        replay.sample()
        for table, name in enumerate("ab"):
            mine = batch[batch.source == table]
            found = replay.priorities(mine.trajectory_id, mine.anchor, name)
            assert (found == values[batch.source == table]).all()
        assert replay.statistics()["priorities_applied"] == 16
        with pytest.raises(ConfigError, match="table must be given where there are several"):
            replay.priorities([0], [0])


def test_a_bad_priority_of_one_table_changes_none() -> None:
    with filled(section(STEPS)) as replay:
        bad = torch.ones(16)
        bad[-1] = -1
        with pytest.raises(DataError, match="must be finite and at least 0"):
            replay.update_priorities(replay.sample(), bad)
        replay.sample()
        assert replay.statistics()["priorities_applied"] == 0


def test_an_empty_table_matters_when_it_has_a_share() -> None:
    shares = {"a": lambda number: 0.5 * (number >= 2), "b": lambda number: 1 - 0.5 * (number >= 2)}
    three = {"observation": np.zeros((3, 2), np.float32), "reward": np.ones(3, np.float32)}
    with filled(section({}, shares), 0) as replay:
        replay.add(three, "b")
        for _ in range(2):
            assert replay.sample().source.unique().tolist() == [1]
        with pytest.raises(StoreError, match="table a must hold at least one item that the sampler admits"):
            replay.sample()
        replay.add(three, "a")
        assert replay.sample().source.tolist() == [0] * 8 + [1] * 8


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_checkpoint_continues_all_tables(tmp_path: Path, prefetch: int) -> None:
    def follow(replay: Replay, count: int) -> list[list[int]]:
        found = []
        for _ in range(count):
            batch = replay.sample()
            found.append((1000 * batch.source + 100 * batch.trajectory_id + batch.anchor).tolist())
            replay.update_priorities(batch, 1 + (batch.trajectory_id * 7 + batch.anchor) % 5)
        return found

    config = section(STEPS, {"a": 0.05, "b": 0.95}, prefetch=prefetch)
    with filled(config) as replay, filled(config, 0) as loaded:
        follow(replay, 5)
        loaded.load(tmp_path, replay.save(tmp_path))
        assert follow(loaded, 6) == follow(replay, 6)


def test_tables_must_agree_in_what_is_read() -> None:
    other = Schema([Column("observation", "float64", (2,), "observation"), SCHEMA["reward"]])
    with pytest.raises(ConfigError, match=r"fields\.observation must have the same column in tables a and b"):
        Replay(section({}), schemas={"a": SCHEMA, "b": other})
    with Replay(section({}, fields={"reward": {}}), schemas={"a": SCHEMA, "b": other}) as replay:
        assert [field.name for field in replay.fields] == ["reward"]


def test_a_long_training_step_is_no_timeout() -> None:
    """The thread that prepares ahead waits for its own rank to ask, however long that takes."""
    with filled(section(STEPS, prefetch=1, timeout_s=0.3)) as replay:
        for _ in range(2):
            replay.update_priorities(replay.sample(), torch.ones(16))
            time.sleep(0.5)
        assert replay.sample().num_samples == 16


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_failed_transform_comes_again_within_a_global_batch(prefetch: int) -> None:
    calls = [0]

    def transform(batch: Batch, _: torch.Tensor) -> Batch:
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("not this time")
        return batch

    with filled(section(STEPS, prefetch=prefetch, gradient_accumulation_steps=4, timeout_s=5.0)) as replay:
        replay.transform = transform
        first = replay.sample().sample_number.tolist()
        with pytest.raises(ValueError, match="not this time"):
            replay.sample()
        again = [replay.sample() for _ in range(3)]
        numbers = [list(zip(b.source.tolist(), b.sample_number.tolist(), strict=True)) for b in again]
        assert len({pair for batch in numbers for pair in batch}) == 12
        assert not {n for batch in numbers for s, n in batch if s == 0} & {first[0]}
        replay.update_priorities(again[-1], torch.ones(4))
        assert replay.sample().num_samples == 4
