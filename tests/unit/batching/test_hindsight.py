"""Hindsight relabelling: draws, rows, rewards, mixtures and refusals, against a plain loop."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import config_of

from deepspeed_gear import Batch, Column, DatasetWriter, Replay, Schema
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import ConfigError, ShapeError
from deepspeed_gear.ops.constants import ONE_Q62
from deepspeed_gear.ops.philox import philox_words
from deepspeed_gear.ops.records import RandomPurpose
from deepspeed_gear.row_exchange.exchange_plan import needs_of
from deepspeed_gear.sampling.mass_rules import random_key_of

COLUMNS = [
    Column("observation", "float32", (2,), "observation", "T+1"),
    Column("achieved", "float32", (2,), "other", "T+1"),
    Column("next_achieved", "float32", (2,)),
    Column("desired", "float32", (2,), "other", "1"),
    Column("desired_steps", "float32", (2,), "other", "T+1"),
    Column("reward", "float32", (), "reward"),
    Column("small", "float32", (1,)),
]
SCHEMA = Schema(COLUMNS)
GOAL = {"column": "desired", "hindsight": "achieved"}


def trajectory(number: int, steps: int) -> dict[str, Any]:
    codes = 1000.0 * number + np.arange(steps + 1, dtype=np.float32)
    both = np.stack([codes, -codes], axis=1)
    return {
        "observation": both,
        "achieved": both + 0.5,
        "next_achieved": both[1:] + 0.5,
        "desired": np.full(2, -1.0 - number, np.float32),
        "desired_steps": both + 0.25,
        "reward": np.zeros(steps, np.float32),
        "small": np.zeros((steps, 1), np.float32),
    }


LENGTHS = (1, 2, 3, 7, 12)


def replay_of(
    schema: Schema = SCHEMA, lengths: tuple[int, ...] = LENGTHS, **options: Any
) -> Replay:
    section = {"batch_size": 64, "hindsight": {}, "fields": {"goal": GOAL}, **options}
    replay = Replay(config_of(**{"sampler": {"unit": "step"}, **section}), schemas={"main": schema})
    for number, steps in enumerate(lengths):
        replay.add(trajectory(number, steps))
    return replay


def oracle(batch: Batch, index: int, section: dict[str, Any], final_row: int, key: int) -> int:
    """Draw one sample's goal with the plain op and Python's integers."""
    number = torch.tensor([int(batch.sample_number[index])])
    purposes = RandomPurpose.RELABELLING, RandomPurpose.GOAL
    words = [philox_words(0, number, key, purpose) for purpose in purposes]
    high, low = ([int(half) % 2**64 for half in word] for word in zip(*words, strict=True))
    anchor = int(batch.anchor[index])
    rows = int(batch.num_steps[index]) + final_row
    strategy = section.get("strategy", "future")
    fraction = section.get("fraction", 0.8)
    later = {
        "future": range(anchor + 1, rows),
        "final": range(rows - 1, rows),
        "episode": range(rows),
    }
    known = later[strategy]
    if high[0] >> 2 >= int(fraction * ONE_Q62) or not known:
        return -1
    return known[((high[1] << 64 | low[1]) * len(known)) >> 128]


@pytest.mark.parametrize(("column", "final_row"), [("achieved", 1), ("next_achieved", 0)])
@pytest.mark.parametrize(
    "section",
    [
        {},
        {"strategy": "final"},
        {"strategy": "episode", "fraction": 0.5},
        {"fraction": 1.0},
        {"fraction": 0},
    ],
    ids=str,
)
def test_against_a_loop(column: str, final_row: int, section: dict[str, Any]) -> None:
    fields = {
        "goal": {"column": "desired", "hindsight": column},
        "next_goal": {"column": "desired_steps", "offset": 1, "hindsight": column, "scale": 2.0},
        "own": {"column": "desired_steps", "offset": 1},
        "observation": {},
    }
    key = random_key_of("main", "train")
    seen = set()
    with replay_of(hindsight=section, fields=fields) as replay:
        for _ in range(4):
            batch = replay.sample()
            for i in range(batch.num_samples):
                number = int(batch.trajectory_id[i])
                anchor = int(batch.anchor[i])
                step = oracle(batch, i, section, final_row, key)
                assert batch.goal_step[i] == step
                assert batch.relabelled[i] == (step >= 0)
                seen.add(step >= 0)
                stored = trajectory(number, LENGTHS[number])
                wanted = stored["desired"] if step < 0 else stored[column][step]
                assert batch["goal"][i].tolist() == wanted.tolist()
                behind = 2 * (
                    stored["desired_steps"][anchor + 1] if step < 0 else stored[column][step]
                )
                assert batch["next_goal"][i].tolist() == behind.tolist()
                assert batch["own"][i].tolist() == stored["desired_steps"][anchor + 1].tolist()
                assert batch["observation"][i].tolist() == stored["observation"][anchor].tolist()
            assert batch.mask["goal"].all()
    fraction = section.get("fraction", 0.8)
    assert {fraction > 0, fraction == 1} <= seen, "both kinds of samples, unless all are of one"


def test_a_relabelled_goal_is_real_where_its_own_would_be_padding() -> None:
    fields = {
        "goal": {"column": "small", "offset": 50, "hindsight": "small"},
        "other": {"column": "small"},
    }
    with replay_of(fields={**fields, "far": {"column": "reward", "offset": 50}}) as replay:
        batch = replay.sample()
        assert torch.equal(batch.mask["goal"], batch.relabelled)
        assert not batch.mask["far"].any()
        assert 0 < int(batch.relabelled.sum()) < 64


# ---- rewards -------------------------------------------------------------------------------------


def reached(batch: Batch) -> torch.Tensor:
    distance = (batch["next_achieved_goal"] - batch["goal"]).norm(dim=-1)
    return torch.where(distance < 0.1, 0.0, -1.0).double()


def wrong(batch: Batch) -> torch.Tensor:
    return batch["goal"]


FIELDS = {"goal": GOAL, "next_achieved_goal": {"column": "achieved", "offset": 1}, "reward": {}}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_program_s_reward(prefetch: int) -> None:
    section = {"reward": f"{__name__}:reached"}
    with replay_of(hindsight=section, fields=FIELDS, prefetch=prefetch) as replay:
        replay.transform = lambda batch, words: batch  # comes behind the rewards
        batch = replay.sample()
        reached = batch.relabelled & (batch.goal_step == batch.anchor + 1)
        assert reached.any()
        assert torch.equal(batch["reward"], torch.where(reached, 0.0, -1.0))
        assert batch["reward"].dtype == torch.float32


def test_refused_rewards() -> None:
    with (
        replay_of(hindsight={"reward": f"{__name__}:wrong"}, fields=FIELDS) as replay,
        pytest.raises(
            ShapeError, match=r"gear.hindsight.reward must return .* field reward \(\[64\]\), got"
        ),
    ):
        replay.sample()
    with pytest.raises(ConfigError, match=r"gear.hindsight.reward must name what can be imported"):
        replay_of(hindsight={"reward": f"{__name__}:absent"}, fields=FIELDS)
    with pytest.raises(
        ConfigError, match="must have one field of the reward column to replace, got 'none'"
    ):
        replay_of(hindsight={"reward": f"{__name__}:reached"})


# ---- with the rest -------------------------------------------------------------------------------


def test_evaluation_passes_relabel_alike(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "d", SCHEMA, split={"eval": 0.5}) as writer:
        for number in range(20):
            writer.add(trajectory(number, 1 + number))
    section = config_of(tmp_path / "d", batch_size=8, hindsight={}, fields={"goal": GOAL})
    with Replay({**section, "sampler": {"unit": "step"}}) as replay:
        first, second = ([batch.clone() for batch in replay.iterator("eval")] for _ in range(2))
        assert len(first) == len(second) > 3
        assert sum(int(batch.relabelled.sum()) for batch in first) > 8
        key = random_key_of("main", "eval")
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one.goal_step, other.goal_step)
            assert torch.equal(one["goal"], other["goal"])
            assert one.goal_step.tolist() == [oracle(one, i, {}, 1, key) for i in range(8)]


def test_mixtures() -> None:
    tables = {name: {"capacity_steps": 100, "capacity_trajectories": 8} for name in "ab"}
    of = {"kind": "uniform", "unit": "step"}
    sampler = {"kind": "mixture", "shares": {"a": 0.5, "b": 0.5}, "of": of}
    section = config_of(
        tables=tables, sampler=sampler, hindsight={}, fields={"goal": GOAL}, batch_size=40
    )
    with Replay(section, schemas=dict.fromkeys("ab", SCHEMA)) as replay:
        for number, steps in enumerate(LENGTHS):
            replay.add(trajectory(number, steps), "a")
            replay.add(trajectory(number, steps), "b")
        for _ in range(3):
            batch = replay.sample()
            for i in range(40):
                key = random_key_of("ab"[int(batch.source[i])], "train")
                step = oracle(batch, i, {}, 1, key)
                assert batch.goal_step[i] == step
                stored = trajectory(
                    int(batch.trajectory_id[i]), LENGTHS[int(batch.trajectory_id[i])]
                )
                wanted = stored["desired"] if step < 0 else stored["achieved"][step]
                assert batch["goal"][i].tolist() == wanted.tolist()


def test_stages_of_a_pipeline_choose_goals_by_name() -> None:
    pipeline = {"inputs": ["observation", "goal"], "labels": ["reward", "relabelled", "goal_step"]}
    fields = {"observation": {}, "goal": GOAL, "reward": {}}
    with replay_of(fields=fields, pipeline=pipeline) as replay:
        for rank, names in enumerate((["observation", "goal"], ["reward"])):
            place = RankCoordinates(pipe_rank=rank, pipe_world=2)
            needs = needs_of(place, replay.config, replay.fields)
            assert [field.name for field in needs.fields] == names


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"hindsight": {"strategy": "past"}},
        'gear.hindsight.strategy must be "future", "final" or "episode"',
    ),
    (
        {"hindsight": {"fraction": 1.5}},
        r"hindsight.fraction must be a finite number in \[0, 1\], got 1.5",
    ),
    ({"hindsight": None}, "gear.fields.goal.hindsight must not be given without gear.hindsight"),
    (
        {"fields": {"observation": {}}},
        'gear.hindsight must have a field with the option hindsight; "goal"',
    ),
    (
        {"fields": {"goal": {**GOAL, "length": 3}}},
        "goal.length must not be given for a goal, got 3",
    ),
    (
        {"fields": {"goal": {"derived": "timestep", "hindsight": "achieved"}}},
        "derived must not be given",
    ),
    (
        {"n_step": {"n": 2, "gamma": 0.9}},
        "gear.hindsight must not be given together with gear.n_step",
    ),
    (
        {"fields": {"goal": {**GOAL, "hindsight": "desired"}}},
        "must be a column with a row per step, got",
    ),
    (
        {"fields": {"goal": {**GOAL, "hindsight": "small"}}},
        r"must have dtype and shape of column desired \(float32\[2\]\), got 'small: float32\[1\]'",
    ),
    (
        {"fields": {"goal": GOAL, "b": {"column": "desired", "hindsight": "next_achieved"}}},
        r"gear.fields.b.hindsight must have as many rows as column achieved \(T\+1\), got "
        r"'next_achieved: T'",
    ),
    (
        {"fields": {"goal": GOAL, "return_to_go": {}}},
        "return_to_go must not be given with gear.hindsight",
    ),
]


@pytest.mark.parametrize(("options", "text"), WRONG, ids=range(len(WRONG)))
def test_refusals(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        replay_of(**options)
