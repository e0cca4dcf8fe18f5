"""What a program takes out of the loss of a rollout batch, and how it corrects its tokens."""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rollout_support import STORED, mean_of, micros, ranks_of, rolled_out, seen_by

from deepspeed_gear import ConfigError, StoreError


@pytest.fixture
def rollout() -> Iterator[Any]:
    with rolled_out() as made:
        yield made


@pytest.mark.parametrize("count_masked", [False, True])
@pytest.mark.parametrize("normalize", ["token", "sequence", {"constant": 100.0}], ids=str)
def test_a_narrowed_mask_leaves_numerator_and_denominator(
    normalize: Any, count_masked: bool
) -> None:
    """As if the rejected tokens had never been in the stored loss mask, on any ranks."""
    loss = {"normalize": normalize, "count_masked": count_masked}
    numbers = np.random.default_rng(3)
    with rolled_out(loss=loss) as rollout:
        keep = torch.from_numpy(numbers.random(rollout.num_tokens) < 0.6)
        whole = torch.arange(rollout.num_trajectories) % 5 > 0
        rollout.mask(keep)
        rollout.mask(whole)
        own = keep.split(rollout.lengths.tolist())
        values = []
        for number, flags, stays in zip(rollout.trajectory_id, own, whole, strict=True):
            one = STORED[int(number)]
            counted = one["loss_mask"][1:] & flags[:-1].numpy() & bool(stays)
            values.append(one["logp"][1:][counted])
        wanted = mean_of(values, normalize, count_masked)
        mask = rollout.batch_columns.narrowed
        for world, sequence in ((1, 1), (2, 1), (3, 2)):
            total = 0.0
            for place in ranks_of(world, sequence):
                there = seen_by(rollout, place)
                there.batch_columns.narrowed = mask
                for micro in micros(there):
                    total += float(micro.sum(micro["logp"])) / world
            assert total == pytest.approx(wanted, rel=1e-6)


def test_a_step_that_was_made_keeps_its_mask(rollout: Any) -> None:
    step = rollout.step(0)
    before = step.loss_tokens
    rollout.mask(np.zeros(rollout.num_trajectories, bool))
    assert rollout.step(0).loss_tokens == 0
    assert sum(int(micro.loss_mask.sum()) for micro in step) == before > 0


def ratios_by_numpy(
    level: str, logs: list[np.ndarray]
) -> list[np.ndarray]:  # of the loss tokens of each sequence
    if level == "sequence":
        return [np.full(len(one), np.exp(one.sum())) for one in logs]
    if level == "geometric":
        return [np.full(len(one), np.exp(one.mean() if len(one) else 0)) for one in logs]
    return [np.exp(one) for one in logs]


@pytest.mark.parametrize("count_rejected", [False, True])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["tis", "mis", "icepop"])
def test_corrections_are_those_of_their_formulas(
    kind: str, level: str, count_rejected: bool
) -> None:
    with rolled_out() as rollout:
        numbers = np.random.default_rng(4)
        rollout.set("new", -numbers.random(rollout.num_tokens, dtype=np.float32))
        mask = rollout.batch_columns.mask.copy()
        starts = rollout.batch_columns.trajectories.starts[1:]
        new = rollout.column("new").double().numpy()
        own = [STORED[int(number)] for number in rollout.trajectory_id]
        stored = np.concatenate([np.append(one["logp"][1:], 0) for one in own])
        logs = np.split(new - stored.astype(np.float64), starts)
        flags = np.split(mask, starts)
        ratios = ratios_by_numpy(level, [one[flag] for one, flag in zip(logs, flags, strict=True)])
        flat = np.concatenate(ratios)
        cap = 1.1
        low = 0.9 if kind == "icepop" else 0.0
        rejected = (flat > cap) | (flat < low) if kind != "tis" else np.zeros(len(flat), bool)
        wanted = np.where(rejected, 0, np.minimum(flat, cap))

        options = {"low": low} if kind == "icepop" else {}
        found = rollout.correct(
            kind, cap=cap, level=level, current="new", count_rejected=count_rejected, **options
        )
        assert rollout.column("correction").numpy()[mask] == pytest.approx(wanted, rel=1e-6)
        left = mask.copy()
        if not count_rejected:
            left[left] = ~rejected
        assert (rollout.batch_columns.mask == left).all()
        assert found["rejected"] == pytest.approx(rejected.mean())
        assert found["capped"] == pytest.approx(((flat > cap) & ~rejected).mean())
        assert found["ratio_mean"] == pytest.approx(flat.mean())
        assert found["ess"] == pytest.approx(wanted.sum() ** 2 / len(flat) / (wanted**2).sum())
        assert 0 < found["capped"] + found["rejected"] < 1
        total = sum(float(micro.sum(micro["correction"])) for micro in micros(rollout))
        assert total == pytest.approx(wanted.sum() / left.sum(), rel=1e-6)


def test_warnings_name_the_calls_that_rejected_all_tokens(
    rollout: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a user looks at the rewards and the writers, where nothing is wrong."""
    tokens = int(rollout.batch_columns.mask.sum())
    took = f"rollout.mask and rollout.correct took {tokens} loss tokens out"
    rollout.mask(np.zeros(rollout.num_trajectories, bool))
    with caplog.at_level(logging.WARNING, "deepspeed_gear"):
        rollout.advantages("grpo", group="prompt")
        next(iter(rollout.step(0)))
    of_rewards, of_step = [one.getMessage() for one in caplog.records]
    assert took in of_rewards
    assert "compute the advantages before them" in of_rewards
    assert "harder or easier" not in of_rewards
    assert took in of_step
    assert "where trajectories are written" not in of_step


def test_errors_say_where_a_column_is(rollout: Any) -> None:
    cases: list[tuple[Any, str]] = [
        (lambda: rollout.column("logpp"), r'rollout\.forward\("logpp"\), .*there are: .*logp'),
        (lambda: rollout.column("reward"), r"rollout\.values\('reward'\) has its value"),
        (lambda: rollout.values("logp"), r"rollout\.column\('logp'\) has one number per step"),
        (lambda: rollout.advantages("ppo"), "one of grpo, dr_grpo, rloo, gae, vtrace, got 'ppo'"),
    ]
    for call, text in cases:
        with pytest.raises(ConfigError, match=text):
            call()
    rollout.close()
    with pytest.raises(StoreError, match="read values and columns before it ends"):
        rollout.values("reward")
