"""Public bug reports about the training of language models, as small cases."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import prefix
from ledger_support import write_prompts
from rollout_support import COLUMNS, micros, ranks_of, rolled_out, section, seen_by

from deepspeed_gear import Replay, Turn, trajectories_from_turns
from deepspeed_gear.replay.packed.rollout import Rollout
from deepspeed_gear.store.shared_memory import remove_garbage

# Three turns, each with a context of its own, against one turn that was answered wrong.
STEPS = [
    Turn([1, 2, 3], [7, 8], [-0.5, -0.1]),
    Turn([4, 5], [6], [-1.0]),
    Turn([9], [3, 2, 1, 5], [-0.2] * 4),
]
ANSWER = [Turn([1, 2, 3], [5, 5, 5], [-0.3] * 3)]


@pytest.fixture
def agents(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rollout]:
    """A rollout batch of one group: a rollout of three turns, and one of a single turn."""
    columns = {**COLUMNS, "member": {"dtype": "int8", "rows": "1"}}
    group = {"column": "prompt", "size": 2, "member": "member", "max_trajectories": 8}
    prompts = {"data": str(write_prompts(tmp_path / "prompts", 2)), "max_lag": 0}
    table = {"capacity_steps": 400, "max_length": 60, "schema": {"columns": columns}, "writers": 2}
    table |= {"group": group, "prompts": prompts, "max_times_sampled": 1}
    options = {"rollout": {"groups": 1}, "sampler": {"kind": "fifo", "unit": "group"}}
    options |= {"pack": {"tokens": 16, "pad": {"multiple": 1}, "too_long": "truncate"}}
    config = section(**options, tables={"main": table}, loss=request.param)
    with Replay(config) as replay, replay.rollout_worker() as worker:
        (lease,) = worker.lease()
        lease.commit(
            [
                trajectories_from_turns(STEPS, {"reward": 1.0}),
                trajectories_from_turns(ANSWER, {"reward": 0.0}),
            ]
        )
        yield replay.rollout()
    remove_garbage(prefix(), kept=True)


@pytest.mark.parametrize("agents", [{"normalize": "token"}], indirect=True)
def test_every_turn_has_the_advantage_of_its_rollout(agents: Rollout) -> None:
    """NovaSky-AI/SkyRL#1278: a rollout counts once against its group, not once for each turn.

    SkyRL#1492: turns before the last one had the advantage at the places of the last one's tokens.
    """
    agents.advantages("dr_grpo")
    found: list[tuple[int, float]] = []
    for micro in micros(agents):
        at = micro.loss_mask[0]
        owner = micro.sequence[0][at].tolist()
        tokens = micro.trajectory_id[owner].tolist()
        found += zip(tokens, micro["advantage"][0][at].tolist(), strict=True)
    # By trajectories the mean reward would be 3/4: advantages of 1/4, and of -3/4.
    wanted = [0.5] * (2 + 1 + 4) + [-0.5] * 3
    assert [value for _, value in sorted(found)] == wanted


@pytest.mark.parametrize("agents", [{"normalize": "sequence", "by": "member"}], indirect=True)
def test_a_rollout_of_many_turns_weighs_as_one_of_a_single_turn(agents: Rollout) -> None:
    """NovaSky-AI/SkyRL#1278: the mean over sequences is one over rollouts, on any ranks."""
    member = agents.values("member").numpy()
    for world in (1, 2, 3):
        weights = np.zeros(2)
        for place in ranks_of(world):
            for micro in micros(seen_by(agents, place)):
                at = micro.loss_mask[0]
                owner = member[micro.index[micro.sequence[0][at]].numpy()]
                np.add.at(weights, owner, (micro.weight[0][at] / world).numpy())
        assert weights == pytest.approx([0.5, 0.5], rel=1e-6)


@pytest.mark.parametrize("normalize", ["token", "sequence"])
def test_rejected_tokens_leave_the_denominator(normalize: str) -> None:
    """huggingface/trl#4772: masked importance sampling took tokens out of the sum alone.

    A loss of 1 at each token that is left has the mean 1; by the number of all tokens it would be
    their share.
    """
    with rolled_out(loss={"normalize": normalize}) as rollout:
        ratio = np.exp(np.random.default_rng(0).normal(0, 0.5, rollout.num_tokens))
        rollout.set("behaviour", np.zeros(rollout.num_tokens, np.float32))
        rollout.set("now", np.log(ratio).astype(np.float32))
        given: Any = {"cap": 1.2, "current": "now", "behaviour": "behaviour"}
        found = rollout.correct("mis", **given)
        assert 0.2 < found["rejected"] < 0.6
        mask = rollout.batch_columns.narrowed
        for world in (1, 2):
            total = 0.0
            for place in ranks_of(world):
                there = seen_by(rollout, place)
                there.batch_columns.narrowed = mask
                parts = (micro.sum((micro["correction"] > 0).float()) for micro in micros(there))
                total += sum(float(part) for part in parts) / world
            assert total == pytest.approx(1.0, rel=1e-6)
