"""Rollout batches: what packs hold, loss weights on any number of ranks, columns, steps, errors."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_support import (
    COLUMNS,
    STORED,
    TABLE,
    filled,
    mean_of,
    micros,
    ranks_of,
    responses,
    rolled_out,
    section,
    seen_by,
)
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_gear import DatasetWriter, Replay, Schema
from deepspeed_gear.batching.group_advantages import group_advantages
from deepspeed_gear.batching.loss_weights import loss_weights
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.config.options import LossConfig
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    FieldError,
    PeerError,
    ShapeError,
    StoreError,
)


@pytest.fixture
def rollout() -> Any:
    with rolled_out() as made:
        yield made


class Reads(TorchDispatchMode):
    """Counts the values that are read one by one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sequence", [1, 2])
@pytest.mark.parametrize("pad", ["multiple", "step", "budget"])
def test_packs_hold_whole_trajectories(sequence: int, pad: str) -> None:
    rows: dict[int, list[int]] = {}
    ids: list[int] = []
    with rolled_out(pack={"tokens": 128, "pad": {"to": pad, "multiple": 16}}) as rollout:
        for place in ranks_of(3, sequence):
            for number, micro in enumerate(micros(seen_by(rollout, place))):
                rows.setdefault(number, []).append(micro["tokens"].numel())
                assert micro["tokens"].numel() * sequence % 16 == 0
                assert micro["tokens"].numel() * sequence <= 128
                assert micro.cu_seqlens.dtype == torch.int32
                assert int(micro.cu_seqlens[-1]) == micro["tokens"].numel() * sequence
                assert micro.max_seqlen == int(micro.cu_seqlens.diff().max())
                assert type(micro.max_seqlen) is int  # as flash attention takes it
                if place.sequence_rank == 0:
                    ids += micro.trajectory_id.tolist()
                check_fields(micro, place.sequence_rank * micro["tokens"].numel())
        assert sorted(ids) == sorted(rollout.trajectory_id.tolist())
        assert len({len(found) for found in rows.values()}) == 1
        if pad == "step":
            assert all(len(set(found)) == 1 for found in rows.values())
        if pad == "budget":
            assert {n * sequence for found in rows.values() for n in found} == {128}


def check_fields(micro: MicroBatch, first: int) -> None:
    """Compare every place with the trajectory that it belongs to."""
    owner = micro.sequence[0]
    position = micro.position_ids[0]
    bounds = micro.cu_seqlens.tolist()
    longest = int(micro.lengths.max())
    for place in range(len(owner)):
        which = int(np.searchsorted(bounds, first + place, side="right")) - 1
        # Padding has no position that no trajectory has: a model may have none.
        assert position[place] == (first + place - bounds[which]) % longest
        if owner[place] < 0:
            assert which == micro.num_trajectories
            assert not micro.loss_mask[0, place]
            assert (
                micro["tokens"][0, place] == micro.targets[0, place] == micro["logp"][0, place] == 0
            )
            continue
        assert owner[place] == which
        held = STORED[int(micro.trajectory_id[which])]
        t = int(position[place])
        ends = t + 1 == len(held["tokens"])
        assert micro["tokens"][0, place] == held["tokens"][t]
        assert micro.targets[0, place] == (0 if ends else held["tokens"][t + 1])
        assert micro["logp"][0, place] == (0 if ends else held["logp"][t + 1])
        assert micro.loss_mask[0, place] == (not ends and held["loss_mask"][t + 1])
    for which, number in enumerate(micro.trajectory_id.tolist()):
        assert micro["reward"][which] == STORED[number]["reward"]
        assert micro.lengths[which] == len(STORED[number]["tokens"])


def test_without_tokens_steps_stand_at_their_places() -> None:
    columns = {
        "state": {"dtype": "float32", "shape": [2], "rows": "T+1"},
        "action": {"dtype": "int64"},
    }
    fields = {"state": {}, "next": {"column": "state", "offset": 1}, "action": {}, "timestep": {}}
    with Replay(section(columns, fields=fields, rollout={"trajectories": 5})) as replay:
        for length in (3, 60, 1, 7, 20):
            state = np.arange((length + 1) * 2, dtype=np.float32).reshape(-1, 2)
            replay.add({"state": state, "action": np.arange(length)})
        for micro in micros(replay.rollout()):
            assert micro.targets is None
            real = micro.sequence >= 0
            assert torch.equal(micro.loss_mask, real)
            assert torch.equal(micro["action"][real], micro.position_ids[real])
            assert torch.equal(micro["timestep"][real], micro.position_ids[real])
            assert torch.equal(micro["next"][real], micro["state"][real] + 2)
            with pytest.raises(ConfigError, match='role "token"'):
                micro.model_inputs("sdpa")


def test_opaque_values_are_lists() -> None:
    columns = {
        "tokens": {"dtype": "int32", "role": "token"},
        "prompt": {"dtype": "bytes", "rows": "1", "max_bytes": 20},
        "origin": {"dtype": "json", "rows": "1", "max_bytes": 40},
    }
    fields = {"tokens": {}, "prompt": {}, "origin": {}}
    with Replay(section(columns, fields=fields, rollout={"trajectories": 9})) as replay:
        for number in range(9):
            tokens = np.arange(5 * number + 1, dtype=np.int32)
            replay.add({"tokens": tokens, "prompt": b"p" * number, "origin": {"number": number}})
        seen = 0
        for micro in micros(replay.rollout()):
            ids = micro.trajectory_id.tolist()
            assert micro.opaque("prompt") == [b"p" * number for number in ids]
            assert micro.opaque("origin") == [{"number": number} for number in ids]
            seen += len(ids)
            assert "prompt" not in micro
            with pytest.raises(FieldError, match="it has prompt, origin"):
                micro.opaque("tokens")
        assert seen == 9


def test_long_trajectories_are_refused_or_truncated() -> None:
    with pytest.raises(ConfigError, match="max_length must be at most 48"):
        Replay(section(pack={"tokens": 50, "pad": {"multiple": 16}}))
    pack = {"tokens": 48, "pad": {"multiple": 16}, "too_long": "truncate"}
    fields = {"tokens": {"as": "int32"}, "value": {"column": "logp", "offset": 0, "scale": 2.0}}
    with rolled_out(pack=pack, fields=fields) as rollout:
        assert int(rollout.lengths.max()) == 48
        for micro in micros(rollout):
            assert micro["tokens"].dtype == torch.int64
            for which, number in enumerate(micro.trajectory_id.tolist()):
                own = micro.sequence == which
                held = STORED[number]
                assert micro["tokens"][own].tolist() == held["tokens"][:48].tolist()
                assert torch.equal(micro["value"][own], torch.from_numpy(held["logp"][:48]) * 2)
                assert not micro.loss_mask[own][-1]


def test_fewer_trajectories_than_ranks_leave_packs_of_padding() -> None:
    counts = []
    total = 0.0
    with rolled_out(rollout={"trajectories": 3}) as rollout:
        for place in ranks_of(5):
            for micro in micros(seen_by(rollout, place)):
                counts.append(micro.num_trajectories)
                total += float(micro.sum(torch.ones_like(micro["logp"]))) / 5
                assert micro.num_trajectories or (
                    micro["tokens"].shape == (1, 16) and micro.max_seqlen == 16
                )
                assert micro.reported.shape == (micro.num_trajectories, 8)
        assert sum(counts) == 3
        assert 0 in counts
        assert total == pytest.approx(1)


@pytest.mark.parametrize("count_masked", [False, True])
@pytest.mark.parametrize("normalize", ["token", "sequence", {"constant": 100.0}], ids=str)
def test_sums_are_the_intended_mean_on_any_ranks(normalize: Any, count_masked: bool) -> None:
    loss = {"normalize": normalize, "count_masked": count_masked}
    size = {"trajectories": 21, "minibatches": 2}
    with rolled_out(loss=loss, rollout=size) as rollout:
        items = [rollout.group[rollout.step(step).index].tolist() for step in range(2)]
        ids = rollout.trajectory_id.tolist()
        for world, sequence in ((1, 1), (2, 1), (3, 2)):
            sums = np.zeros(2)
            shares = np.zeros(2)
            for place in ranks_of(world, sequence):
                for step in seen_by(rollout, place):
                    for micro in step:
                        values = torch.where(micro.loss_mask, micro["logp"], torch.nan)
                        sums[step.number] += float(micro.sum(values)) / world
                        shares[step.number] += micro.fraction / world
            for step in range(2):
                own = [STORED[ids[item]] for item in items[step]]
                values = [one["logp"][1:][one["loss_mask"][1:]] for one in own]
                assert sums[step] == pytest.approx(
                    mean_of(values, normalize, count_masked), rel=1e-6
                )
                assert shares[step] == pytest.approx(1)


def test_without_a_loss_token_all_weights_are_zero() -> None:
    none = np.zeros(6, np.int64)
    each = np.arange(6)
    assert loss_weights(LossConfig(normalize="token"), none, each, each).tolist() == [0] * 6


def test_sum_masks_before_it_multiplies(rollout: Any) -> None:
    micro = micros(rollout)[0]
    values = torch.where(micro.loss_mask, 1.0, torch.nan).requires_grad_()
    micro.sum(values * values).backward()
    assert bool(torch.isfinite(values.grad[micro.loss_mask]).all())
    half = micro.sum(torch.ones_like(values, dtype=torch.bfloat16))
    assert half.dtype == torch.float32
    assert float(half) == pytest.approx(float(micro.weight.sum()))
    with pytest.raises(ShapeError, match="must have shape"):
        micro.sum(torch.ones(3))


@pytest.mark.parametrize("how", ["mean", "sum"])
def test_per_sequence(rollout: Any, how: Any) -> None:
    for micro in micros(rollout):
        found = micro.per_sequence(torch.where(micro.loss_mask, micro["logp"], torch.nan), how)
        for which in range(micro.num_trajectories):
            own = micro.sequence == which
            values = micro["logp"][own & micro.loss_mask]
            wanted = values.sum() / (max(len(values), 1) if how == "mean" else 1)
            assert torch.allclose(found[own], wanted)
        assert not found[micro.sequence < 0].any()


# ---- columns and steps ---------------------------------------------------------------------------


def test_filled_columns_are_in_every_step(rollout: Any) -> None:
    for micro in rollout.forward("old_logp", tokens=256):
        assert "old_logp" not in micro
        micro.fill(old_logp=micro["logp"].double() * 2)
    assert list(rollout.forward("old_logp")) == []  # fixed for this rollout batch
    rollout.set("ones", torch.ones(rollout.num_trajectories, dtype=torch.bfloat16))
    for micro in micros(rollout):
        assert torch.equal(micro["old_logp"], micro["logp"] * 2)
        assert torch.equal(micro["ones"], (micro.sequence >= 0).float())


def test_progress_and_statistics_count_what_is_trained() -> None:
    with filled(section(rollout={"trajectories": 24, "minibatches": 4})) as replay:
        replay.progress()
        rollout = replay.rollout()
        selected = replay.progress()
        assert (selected.num_samples, selected.wait_s > 0) == (0, True)
        step = rollout.step(0)
        list(step)
        trained = replay.progress()
        assert trained.num_samples == step.num_trajectories == 6
        assert trained.samples_per_s > 0
        assert 0 < trained.wait_share < 1
        statistics = replay.statistics()
        assert statistics["steps"] == sum(len(one["tokens"]) for one in STORED)
        counts = ("batches", "train_steps", "step_trajectories")
        assert [statistics[name] for name in counts] == [1, 1, 6]


def test_every_micro_batch_of_a_forward_must_be_filled(rollout: Any) -> None:
    def forward(times: list[int]) -> None:
        for number, micro in enumerate(rollout.forward("x")):
            for _ in range(times[min(number, 2)]):
                micro.fill(x=micro["logp"])

    with pytest.raises(
        StoreError, match=r"'x' must be filled in each of the \d+ micro batches, got \d"
    ):
        forward([2, 0, 1])  # as many fills as micro batches
    forward([2, 2, 2])  # the last one counts


def test_a_late_loss_mask_that_is_absent_is_not_read_as_false() -> None:
    columns = {**COLUMNS, "loss_mask": {**COLUMNS["loss_mask"], "late": True}}
    with Replay(section(columns, fields={"tokens": {}}, rollout={"trajectories": 2})) as replay:
        for response in responses(2):
            mask = response.pop("loss_mask")
            number = replay.add(response)
        replay.fill(number, loss_mask=mask)
        with pytest.raises(DataError, match=r"column loss_mask must be filled .*absent in 1 of 2"):
            list(replay.rollout())


def test_whitened_columns_have_mean_0_and_deviation_1(rollout: Any) -> None:
    found = rollout.advantages("dr_grpo")
    assert found.shape == (rollout.num_trajectories,)
    stored = [np.append(STORED[int(number)]["logp"][1:], 0) for number in rollout.trajectory_id]
    assert torch.equal(rollout.column("logp"), torch.from_numpy(np.concatenate(stored)).double())
    rollout.set("a", np.arange(rollout.num_tokens, dtype=np.float32))
    rollout.whiten("a", over="token")
    counted = rollout.column("a").numpy()[rollout.batch_columns.mask]
    assert counted.mean() == pytest.approx(0, abs=1e-6)
    assert counted.std(ddof=1) == pytest.approx(1, abs=1e-6)
    rollout.set("b", np.arange(rollout.num_trajectories, dtype=np.float32))
    rollout.whiten("b", over="sequence")
    has = rollout.batch_columns.counts > 0
    values = rollout.column("b").numpy()[rollout.batch_columns.trajectories.starts][has]
    assert (values.mean(), values.std(ddof=1)) == pytest.approx((0, 1), abs=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_advantages_are_against_the_group(kind: str) -> None:
    rewards = np.array([1.0, 3.0, 5.0, 2.0, 2.0, 9.0, 4.0])
    groups = np.array([7, 7, 7, 8, 8, 9, 7])
    members = np.array([0, 1, 2, 0, 1, 0, 2])
    found = group_advantages(kind, rewards, groups, members)
    own = np.array([1.0, 3.0, 4.0])  # of the member with two trajectories the last one
    wanted = {
        "grpo": (own - own.mean()) / (own.std(ddof=1) + 1e-6),
        "dr_grpo": own - own.mean(),
        "rloo": np.array([own[i] - np.delete(own, i).mean() for i in range(3)]),
    }[kind]
    assert found[[0, 1, 2]] == pytest.approx(wanted)
    assert found[6] == found[2]
    assert found[[3, 4, 5]].tolist() == [0, 0, 0]
    with pytest.raises(ConfigError, match="must be one of grpo, dr_grpo, rloo"):
        group_advantages("gae", rewards, groups, members)


@given(data=st.data(), kind=st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_members_that_do_not_count_are_no_part_of_the_baseline(data: Any, kind: str) -> None:
    """The others have the advantages that they have alone; a member counts if one trajectory of it
    does.
    """
    rows = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(-4, 4), st.booleans())
    groups, members, rewards, flags = np.array(data.draw(st.lists(rows, min_size=1, max_size=12))).T
    counted = flags.astype(bool)
    own = {(g, m) for g, m, c in zip(groups, members, counted, strict=True) if c}
    is_in = np.array([pair in own for pair in zip(groups, members, strict=True)])
    rewards = np.where(is_in, rewards.astype(float), np.nan)
    found = group_advantages(kind, rewards, groups, members, counted)
    assert (found[~is_in] == 0).all()
    alone = group_advantages(kind, rewards[is_in], groups[is_in], members[is_in])
    assert found[is_in] == pytest.approx(alone)


def test_masked_responses_are_no_part_of_the_baseline() -> None:
    """An overlong response, whose loss is masked, leaves the advantages of its group as
    they are.
    """
    for option, counts, wanted in ((False, None, 0.0), (True, None, 33.0), (False, True, 33.0)):
        config = section(
            rollout={"trajectories": 3}, loss={"normalize": "token", "count_masked": option}
        )
        with Replay(config) as replay:
            for response, reward in zip(responses(3), (1.0, 1.0, 100.0), strict=True):
                mask = np.full(len(response["tokens"]), reward == 1)
                replay.add({**response, "loss_mask": mask, "reward": np.float32(reward)})
            found = replay.rollout().advantages("dr_grpo", group="prompt", count_masked=counts)
            assert found.tolist() == [-wanted, -wanted, 2 * wanted]


@pytest.mark.parametrize(("partial", "sizes"), [("spread", [7, 8, 8]), ("drop", [7, 7, 7])])
def test_every_epoch_shuffles_the_items(partial: str, sizes: list[int]) -> None:
    size = {"trajectories": 23, "minibatches": 3, "epochs": 2, "partial": partial}
    with rolled_out(rollout=size) as rollout:
        assert len(rollout) == 6
        found = [step.index.tolist() for step in rollout]
    epochs = found[:3], found[3:]
    assert [len(step) for step in epochs[0]] == sizes
    for epoch in epochs:
        trained = [i for step in epoch for i in step]
        assert len(set(trained)) == len(trained) == sum(sizes)
    assert epochs[0] != epochs[1]


def test_means_of_metrics(rollout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    values = []
    ones = []
    step = rollout.step(0)
    for micro in step:
        values.append(micro.sum(micro["logp"]))
        ones.append(micro.sum(torch.ones_like(micro["logp"])))
    found = step.mean(logp=values, one=ones)
    assert len(ones) > 1
    assert found["one"] == pytest.approx(1)
    with Reads() as reads:
        step.mean(logp=values, one=ones)
    assert reads.count == 0  # no value by itself: each would wait for a device
    assert found["logp"] == pytest.approx(float(sum(values)))
    with pytest.raises(ShapeError, match="a number for each of the"):
        step.mean(logp=values[1:])

    def total(_: ControlPlane, sums: torch.Tensor) -> torch.Tensor:
        return sums + torch.eye(len(sums), dtype=sums.dtype)[-1]  # another rank has a fault

    monkeypatch.setattr(ControlPlane, "sum", total)
    with pytest.raises(
        PeerError, match=r"logp must have a number for each of the .*, got 'other numbers on 1"
    ):
        step.mean(logp=values)


def test_rollouts_follow_each_other() -> None:
    config = section(batch={"trajectories": 10}, sampler={"kind": "epoch"})
    del config["rollout"]
    with filled(config) as replay:
        seen = [micro.trajectory_id.tolist() for _ in range(4) for micro in replay.step()]
        assert sorted(i for ids in seen for i in ids) == list(range(40))
        metrics = replay.take_metrics()
        assert metrics["train_steps"] == 4
        assert metrics["step_trajectories"] == 10
        assert 0.5 < metrics["step_fill"] <= 1
        assert replay.take_metrics() == {**metrics, "train_steps": 0}, "no step was trained since"
        first = replay.rollout()
        replay.rollout()
        with pytest.raises(StoreError, match="or the next one was requested"):
            next(iter(first.forward("x")))


@pytest.mark.parametrize("after", ["between steps", "inside a step"])
def test_a_loop_that_ends_early_ends_the_rollout_batch(after: str, tmp_path: Path) -> None:
    size = {"trajectories": 12, "minibatches": 4}
    config = section(rollout=size, sampler={"kind": "epoch"})
    with filled(config, count=24) as replay:
        rollout = replay.rollout()
        first = rollout.trajectory_id.tolist()
        for step in rollout:
            if after == "inside a step":
                next(iter(step))
            break
        assert replay.state_dict().get("rollout") is None
        with pytest.raises(
            StoreError, match="rollout batch 0 must not be used after its loop has ended"
        ):
            rollout.advantages()
        replay.save(tmp_path)
        second = replay.rollout().trajectory_id.tolist()
        assert not set(first) & set(second)
    with Replay(config) as other:
        other.load(tmp_path)
        assert other.rollout().trajectory_id.tolist() == second


@pytest.mark.parametrize("what", ["forward", "step", "steps", "steps of a closed replay"])
def test_a_loop_ends_with_its_rollout_batch(what: str) -> None:
    with rolled_out(rollout={"trajectories": 12, "minibatches": 4}) as rollout:
        steps = rollout if what.startswith("steps") else rollout.step(0)
        loop: Any = rollout.forward("old_logp") if what == "forward" else iter(steps)
        first = next(loop)
        if what == "forward":
            first.fill(old_logp=torch.zeros_like(first["logp"]))
        if "replay" not in what:
            rollout.close()
    with pytest.raises(StoreError, match="must not be used after its loop has ended"):
        next(loop)
    with pytest.raises(StoreError, match="use its steps inside the loop over it"):
        next(iter(rollout))


@pytest.mark.parametrize("tables", [1, 2])
def test_priorities_of_a_micro_batch(tables: int) -> None:
    """One for each trajectory; the next selection applies them."""
    names = ["one", "two"][:tables]
    sampler: dict[str, Any] = {"kind": "prioritized", "alpha": 1.0}
    if tables == 2:
        sampler = {"kind": "mixture", "shares": {"one": 0.5, "two": 0.5}, "of": sampler}
    config = section(
        tables=dict.fromkeys(names, TABLE), sampler=sampler, rollout={"trajectories": 12}
    )
    with Replay(config) as replay:
        for response in responses(20):
            for name in names:
                replay.add(response, name)
        wanted: dict[tuple[str, int], float] = {}
        rollout = replay.rollout()
        padding = micros(seen_by(rollout, ranks_of(40)[-1]))[0]
        assert not padding.num_trajectories
        replay.update_priorities(padding, torch.zeros(0))
        for step in rollout:
            for micro in step:
                own = 1.0 + micro.index.double()
                replay.update_priorities(micro, own)
                ids = micro.trajectory_id.tolist()
                sources = micro.table.tolist()
                for source, number, one in zip(sources, ids, own.tolist(), strict=True):
                    wanted[names[source], number] = max(
                        one, wanted.get((names[source], number), 0.0)
                    )
                with pytest.raises(ShapeError, match="one for each trajectory"):
                    replay.update_priorities(micro, own[:, None])
        assert len({name for name, _ in wanted}) == tables
        replay.rollout()
        for name in names:
            ids = [number for one, number in wanted if one == name]
            assert replay.priorities(ids, table=name).tolist() == [
                wanted[name, number] for number in ids
            ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pack": None}, "gear.rollout must not be given without gear.pack"),
        ({"rollout": None}, "gear.batch or gear.rollout, one of them, must be given"),
        ({"batch": {"trajectories": 4}}, "one of them, must be given with gear.pack, got 'both'"),
        ({"rollout": {"groups": 4}}, "gear.rollout must be in trajectories where"),
        ({"rollout": {"trajectories": 4, "groups": 4}}, "must have one of groups and trajectories"),
        ({"rollout": {"tokens": 4000}}, "one of groups and trajectories; they are selected"),
        ({"rollout": {"trajectories": 2, "minibatches": 3}}, "minibatches must be at most"),
        ({"sampler": {"unit": "step"}}, "gear.sampler.unit must be"),
        ({"prefetch": 1}, "gear.prefetch must not be given with gear.pack"),
        ({"verify_every": 1}, "gear.verify_every must not be given with gear.pack"),
        (
            {"tables": {"old": {"data": {"path": "old", "split": {"eval": 0.1}}}}},
            "data.split must not be given",
        ),
        ({"batch_size": 4}, "gear.batch_size must not be given with gear.pack"),
        (
            {"fields": {"logp": {"length": 3}}},
            "gear.fields.logp.length must not be given with gear.pack",
        ),
        ({"loss": {"normalize": "group"}}, 'where gear.sampler.unit is not "group"'),
        ({"pack": {"tokens": 64, "cost": [0, 0]}}, "gear.pack.cost must be two whole numbers"),
        ({"pack": {"tokens": 64, "pad": {"multiple": 65}}}, "must be at least gear.pack.pad"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        Replay(section(**options))


@pytest.mark.parametrize(
    ("column", "changed", "text"),
    [
        (
            "loss_mask",
            None,
            "the column of the role loss_mask of table a, loss_mask (bool), got 'none'",
        ),
        ("loss_mask", {"dtype": "uint8", "role": "loss_mask"}, "got 'loss_mask (uint8)'"),
        ("tokens", {"dtype": "int32"}, "the role token of table a, tokens (int32), got 'none'"),
    ],
)
def test_tables_of_a_mixture_have_equal_tokens_and_masks(
    column: str, changed: Any, text: str
) -> None:
    columns = {name: one for name, one in {**COLUMNS, column: changed}.items() if one is not None}
    tables = {"a": TABLE, "b": {**TABLE, "schema": {"columns": columns}}}
    mixture = {"kind": "mixture", "shares": {"a": 0.5, "b": 0.5}, "of": {"kind": "uniform"}}
    with pytest.raises(ConfigError, match=rf"^gear\.tables\.b .*{re.escape(text)}"):
        Replay(section(tables=tables, sampler=mixture, fields={"logp": {}}))


def test_wrong_calls_are_refused(rollout: Any) -> None:
    rollout.set("bad", np.full(rollout.num_tokens, np.nan))
    first = next(iter(rollout.forward("x")))
    longest = int(rollout.lengths.max())
    assert longest % 16
    step = rollout.step(0)
    micro = next(iter(step))
    short = r"forward: tokens must hold the longest .* in multiples of 16"
    wrong: list[tuple[Any, Any, str]] = [
        (lambda: next(rollout.forward("logp")), FieldError, "must not be named like a field"),
        (
            lambda: first.fill(y=first["logp"]),
            FieldError,
            "must be one of those that forward names",
        ),
        (lambda: rollout.whiten("x"), FieldError, "filled or set before"),
        (lambda: rollout.mask(np.ones(3, bool)), ShapeError, "keep must be bool and have shape"),
        (lambda: rollout.mask(np.ones(rollout.num_tokens)), ShapeError, "must be bool"),
        (lambda: rollout.correct("ppo"), ConfigError, "must be one of tis, mis, icepop"),
        (lambda: rollout.correct("tis", level="word"), ConfigError, "level must be one of token"),
        (lambda: rollout.correct("tis", low=0.5), ConfigError, "low is no option of 'tis'"),
        (lambda: rollout.correct("icepop", cap=0.2), ConfigError, "cap must be above low"),
        (lambda: rollout.correct("tis", cap=float("nan")), ConfigError, "must be a ratio"),
        (lambda: rollout.correct("tis"), ConfigError, "'old_logp' must be filled or set before"),
        (
            lambda: rollout.correct("tis", current="logp", name="logp"),
            FieldError,
            "must not be named like a field",
        ),
        (lambda: rollout.correct("mis", current="bad"), DataError, "must be a finite log-prob"),
        (lambda: rollout.advantages(reward="logp"), ConfigError, "one value per trajectory"),
        (lambda: next(rollout.forward("x", tokens=20)), ConfigError, short),
        (lambda: next(rollout.forward("x", tokens=longest)), ConfigError, short),
        (lambda: next(rollout.forward("x", tokens=0)), ConfigError, "tokens must be an integer"),
        (
            lambda: micro.fill(x=0),
            FieldError,
            r"must be filled in micro batches of Rollout\.forward",
        ),
        (
            lambda: next(iter(step)),
            StoreError,
            "train step 0 of rollout batch 0 must be iterated once",
        ),
    ]
    for call, error, text in wrong:
        with pytest.raises(error, match=text):
            call()


MASKED = [
    {**response, "loss_mask": np.arange(len(response["tokens"])) < 1} for response in STORED[:8]
]


@pytest.mark.parametrize("source", ["rollout", "step", "data set"])
def test_steps_without_loss_tokens_are_logged_once(
    source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """huggingface/trl#6668: a run trained batches in which every token was masked, without a word.

    Marked are first tokens only, which nothing predicts.
    """
    size: dict[str, Any] = {"batch": {"trajectories": 4}}
    if source == "rollout":
        size = {"rollout": {"trajectories": 8, "minibatches": 2}}
    config = {**section(), "rollout": None, **size}
    if source == "data set":
        with DatasetWriter(tmp_path / "set", Schema.from_json({"columns": COLUMNS})) as writer:
            for response in MASKED:
                writer.add(response)
        config["tables"] = {"responses": {"data": str(tmp_path / "set")}}
    with Replay(config) as replay, caplog.at_level(logging.WARNING, "deepspeed_gear"):
        for response in MASKED if source != "data set" else []:
            replay.add(response)
        steps = replay.rollout() if source == "rollout" else (replay.step() for _ in range(2))
        for step in steps:
            assert sum(float(micro.sum(torch.ones_like(micro.targets))) for micro in step) == 0.0
    (text,) = [
        one.getMessage() for one in caplog.records if "counts in the loss" in one.getMessage()
    ]
    tokens = sum(len(response["tokens"]) for response in MASKED[:4])
    if source == "step":
        assert (
            f"train step 0 of rollout batch 0: none of the {tokens} steps of its 4 trajectories"
            in text
        )
    assert "the loss mask is column loss_mask, and the first token" in text
    assert "1 of 1 train steps" in text


def test_rollout_batches_of_equal_rewards_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is learnt from them, which the loss does not show."""
    config = section(rollout={"trajectories": 8})
    with Replay(config) as replay, caplog.at_level(logging.WARNING, "deepspeed_gear"):
        for number, response in enumerate(responses(24)):
            reward = np.float32(number // 4 if number < 16 else number)
            replay.add({**response, "reward": reward})
        for text in ("none of its 2 groups has members whose column reward differs", "", ""):
            caplog.clear()
            replay.rollout().advantages("dr_grpo", group="prompt")
            found = [record.getMessage() for record in caplog.records]
            assert len(found) == bool(text)
            assert text in "".join(found)
            assert not text or '{"reward": {"std": {"min": 1e-6}}}' in found[0]


def test_steps_with_loss_tokens_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with filled(section()) as replay, caplog.at_level(logging.WARNING, "deepspeed_gear"):
        micros(replay.rollout())
    assert not caplog.records


def test_other_batches_are_refused() -> None:
    with filled(section()) as replay:
        with pytest.raises(ConfigError, match=r"gear\.pack must not be given for sample\(\)"):
            replay.sample()
        for read in (replay.iterator, replay.num_batches):
            with pytest.raises(ConfigError, match=r"gear\.pack cannot be combined with"):
                read("eval")
        with pytest.raises(ConfigError, match=r"transform must not be set with gear\.pack"):
            replay.transform = lambda batch, words: batch
        with pytest.raises(ConfigError, match=r"gear\.batch must be given for steps"):
            replay.step()
    config = {key: value for key, value in section().items() if key not in ("pack", "rollout")}
    with filled({**config, "batch_size": 4}, count=4) as plain:
        for call in (plain.rollout, lambda: plain.check_packing(None)):
            with pytest.raises(ConfigError, match=r"gear\.pack must be given for packed batches"):
                call()
