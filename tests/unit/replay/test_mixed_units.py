"""Packed mixtures of tables with and without groups, whose columns differ."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ledger_support import write_prompts
from rollout_support import COLUMNS, TABLE, micros, ranks_of, responses, section, seen_by

from deepspeed_gear import ConfigError, DatasetWriter, Replay, Rollout, Schema, ShapeError
from deepspeed_gear.batching.group_advantages import group_advantages
from deepspeed_gear.config import parse
from deepspeed_gear.replay.packed.pack_preview import format_rollout_preview, rollout_preview

SIZE = 4
GROUPS = 6
ALONE = 10  # supervised trajectories of a batch
RL: dict[str, Any] = {
    **COLUMNS,
    "value": {"dtype": "float32", "rows": "T+1"},
    "experts": {"dtype": "uint8", "shape": [2]},
    "tool": {"dtype": "bool"},
    "level": {"dtype": "int64", "rows": "1"},
}
SFT = {
    "tokens": COLUMNS["tokens"],
    "loss_mask": COLUMNS["loss_mask"],
    "scale": {"dtype": "float32"},
}
FIELDS: dict[str, Any] = {
    "tokens": {},
    "logp": {"absent": -0.5},
    "half": {"column": "logp", "as": "bfloat16", "absent": 1, "pad": 3},
    "value": {"absent": 9, "offset": 0},
    "experts": {"absent": 255, "offset": 0},
    "tool": {"absent": 1},
    "level": {"absent": -7},
    "scale": {"absent": 1},
}
#: The fields of each table that it does not have.
ABSENT = {"rl": ["scale"], "sft": ["logp", "half", "value", "experts", "tool", "level"]}


def mixed(first: str = "rl", **options: Any) -> dict[str, Any]:
    """Return a section of two tables, one of groups; the sampler names the table `first` first."""
    groups = {**TABLE, "schema": {"columns": RL}, "group": {"column": "prompt", "size": SIZE}}
    tables = {"rl": groups, "sft": {**TABLE, "schema": {"columns": SFT}}}
    shares = {"rl": GROUPS / (GROUPS + ALONE), "sft": ALONE / (GROUPS + ALONE)}
    sampler = {
        "kind": "mixture",
        "shares": {name: shares[name] for name in sorted(shares, reverse=first == "sft")},
        "of": {"kind": "fifo", "unit": "group"},
        "by_table": {"sft": {"kind": "epoch", "unit": "trajectory"}},
    }
    given = {"tables": tables, "sampler": sampler, "fields": FIELDS}
    given["rollout"] = {"groups": GROUPS + ALONE}
    return section(**copy.deepcopy({**given, **options}))


def rl_rows() -> list[dict[str, Any]]:
    words = np.random.default_rng(3)
    rows = responses(SIZE * 2 * GROUPS)
    for one in rows:
        steps = len(one["tokens"])
        one["value"] = words.random(steps + 1).astype(np.float32)
        one["experts"] = words.integers(0, 9, (steps, 2)).astype(np.uint8)
        one["tool"] = words.random(steps) < 0.5
        one["level"] = np.int64(words.integers(0, 9))
    return rows


def sft_rows() -> list[dict[str, Any]]:
    rows = responses(2 * ALONE, seed=8)
    kept = [{name: one[name] for name in ("tokens", "loss_mask")} for one in rows]
    return [{**one, "scale": one["tokens"].astype(np.float32)} for one in kept]


def fill(replay: Replay) -> None:
    for one in rl_rows():
        replay.add(one, table="rl")
    for one in sft_rows():
        replay.add(one, table="sft")


@contextmanager
def rolled_out(first: str = "rl", **options: Any) -> Iterator[Rollout]:
    with Replay(mixed(first, **options)) as replay:
        fill(replay)
        yield replay.rollout()


def stored(rollout: Rollout, first: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the table and the rows of each trajectory of a batch."""
    rows = {"rl": rl_rows(), "sft": sft_rows()}
    names = sorted(rows, reverse=first == "sft")
    table = rollout.table[rollout.group].tolist()
    pairs = zip(table, rollout.trajectory_id.tolist(), strict=True)
    return [(names[at], rows[names[at]][number]) for at, number in pairs]


def expected(name: str, table: str, row: dict[str, Any], steps: int) -> torch.Tensor:
    """Return the values of a field at the places of a trajectory, or of the trajectory."""
    field = FIELDS[name]
    column = field.get("column", name)
    if name in ABSENT[table]:
        shape = [] if name == "level" else [steps, 2] if name == "experts" else [steps]
        return torch.full(shape, float(field["absent"]))
    values = torch.as_tensor(row[column]).float()
    if name == "level":
        return values
    if name in ("tokens", "value", "experts"):
        return values[:steps]
    pad = torch.full((1,), float(field.get("pad", 0)))
    return torch.cat([values[1:], pad])  # where the token is predicted


@pytest.mark.parametrize("first", ["rl", "sft"])
@pytest.mark.parametrize(("world", "sequence"), [(1, 1), (2, 1), (2, 2)])
def test_columns_that_a_table_lacks_have_the_absent_value(
    first: str, world: int, sequence: int
) -> None:
    with rolled_out(first) as rollout:
        rows = stored(rollout, first)
        assert sorted(rollout.table.tolist()) == [0] * (GROUPS if first == "rl" else ALONE) + [
            1
        ] * (ALONE if first == "rl" else GROUPS)
        assert len(rows) == GROUPS * SIZE + ALONE == rollout.num_trajectories
        seen = set[int]()
        for place in ranks_of(world, sequence):
            for micro in micros(seen_by(rollout, place)):
                numbers = micro.index.tolist()
                seen.update(numbers)
                own = micro.sequence[0].tolist()
                positions = micro.position_ids[0].tolist()
                for name in FIELDS:
                    values = micro[name].float()
                    whole = [
                        expected(name, *rows[number], len(rows[number][1]["tokens"]))
                        for number in numbers
                    ]
                    if name == "level":
                        assert values.tolist() == [float(one) for one in whole], name
                        continue
                    pad = torch.tensor(float(FIELDS[name].get("pad", 0)))
                    for place_of, (trajectory, step) in enumerate(zip(own, positions, strict=True)):
                        want = pad if trajectory < 0 else whole[trajectory][step]
                        got = values[0, place_of]
                        want = want.bfloat16().float() if name == "half" else want
                        assert torch.equal(got, want.expand_as(got)), (name, trajectory, step)
        assert seen == set(range(len(rows)))
        column = rollout.column("logp").split(rollout.lengths.tolist())
        for values, (table, row) in zip(column, rows, strict=True):
            assert values.float().tolist() == expected("logp", table, row, len(values)).tolist()


@pytest.mark.parametrize("first", ["rl", "sft"])
def test_supervised_trajectories_have_the_given_advantage_and_count_in_no_baseline(
    first: str,
) -> None:
    with rolled_out(first) as rollout:
        rows = stored(rollout, first)
        is_rl = np.array([table == "rl" for table, _ in rows])
        rewards = np.array([row["reward"] for table, row in rows if table == "rl"])
        groups = np.array([row["prompt"] for table, row in rows if table == "rl"])
        for kind in ("grpo", "dr_grpo", "rloo"):
            for named in (None, "prompt"):
                found = rollout.advantages(kind, absent=1.0, count_masked=True, group=named).numpy()
                alone = np.arange(len(groups))
                assert (
                    found[is_rl].tolist() == group_advantages(kind, rewards, groups, alone).tolist()
                )
                assert (found[~is_rl] == 1.0).all()
        with pytest.raises(ConfigError, match="'reward' must be a column of table sft"):
            rollout.advantages("grpo")
        with pytest.raises(ConfigError, match="'return' must be a column of table"):
            rollout.advantages("grpo", reward="return", absent=1.0)
        with pytest.raises(ConfigError, match="absent must be a finite number, got nan"):
            rollout.advantages("grpo", absent=float("nan"))
        with pytest.raises(ConfigError, match=r"rollout\.advantages\.absent is not an option"):
            rollout.advantages("gae", value="value", absent=1.0)
        rollout.set("return", np.zeros(rollout.num_trajectories))
        with pytest.raises(ConfigError, match="'value' must be a column of table sft, too"):
            rollout.advantages("gae", value="value", reward="return")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_correction_leaves_supervised_tokens_as_they_are(level: str) -> None:
    with rolled_out() as mixture:
        rows = stored(mixture, "rl")
        steps = [len(row["tokens"]) for _, row in rows]
        current = np.random.default_rng(1).normal(-1, 1, sum(steps)).astype(np.float32)
        mixture.set("old_logp", current)
        mask = np.concatenate([np.append(row["loss_mask"][1:], False) for _, row in rows])
        is_rl = np.repeat([table == "rl" for table, _ in rows], steps)
        summary = mixture.correct("mis", cap=1.5, level=level)
        weights = mixture.column("correction").numpy()
        kept = mixture.batch_columns.mask
    alone = {"kind": "fifo", "unit": "group", "table": "rl"}
    config = mixed(sampler=alone, rollout={"groups": GROUPS}, fields={"tokens": {}, "logp": {}})
    with Replay(config) as replay:
        fill(replay)
        rollout = replay.rollout()
        rollout.set("old_logp", current[is_rl])
        assert rollout.correct("mis", cap=1.5, level=level) == summary
        assert np.array_equal(rollout.column("correction").numpy(), weights[is_rl])
        assert np.array_equal(rollout.batch_columns.mask, kept[is_rl])
    assert 0 < summary["rejected"] < 1
    assert np.array_equal(weights[~is_rl], mask[~is_rl])
    assert np.array_equal(kept[~is_rl], mask[~is_rl])


@pytest.mark.parametrize("first", ["rl", "sft"])
def test_means_by_table_are_weighted_sums(first: str) -> None:
    """Against sums over each table's tokens, on one rank and on two."""
    loss = {
        "normalize": "group",
        "by_table": {"rl": 0.75, "sft": {"weight": 0.5, "normalize": "token"}},
    }
    with rolled_out(first, loss=loss) as rollout:
        rows = stored(rollout, first)
        masks = [np.append(row["loss_mask"][1:], False) for _, row in rows]
        groups: dict[int, list[int]] = {}
        for number, (table, row) in enumerate(rows):
            if table == "rl":
                groups.setdefault(int(row["prompt"]), []).append(number)
        counts = [mask.sum() for mask in masks]
        sums = [sum(counts[n] for n in numbers) for numbers in groups.values()]
        weight = np.zeros(len(rows))
        for numbers, total in zip(groups.values(), sums, strict=True):
            weight[numbers] = 0.75 / max(total, 1) / sum(one > 0 for one in sums)
        sft = [number for number, (table, _) in enumerate(rows) if table == "sft"]
        weight[sft] = 0.5 / sum(counts[number] for number in sft)
        for world in (1, 2):
            total = 0.0
            for place in ranks_of(world):
                for micro in micros(seen_by(rollout, place)):
                    own = micro.sequence[0].numpy()
                    numbers = micro.index.numpy()[np.maximum(own, 0)]
                    wanted = np.where(micro.loss_mask[0].numpy(), weight[numbers], 0) * world
                    assert np.allclose(micro.weight[0].numpy(), wanted, rtol=1e-6, atol=0)
                    total += float(micro.weight.sum()) / world
            assert total == pytest.approx(1.25, rel=1e-5)


def test_a_resumed_run_continues_in_the_rollout_batch(tmp_path: Path) -> None:
    size = {"groups": GROUPS + ALONE, "minibatches": 3, "epochs": 2}

    def facts(step: Any) -> list[tuple[Any, ...]]:
        return [
            (m.trajectory_id.tolist(), m.table.tolist(), m["logp"].tolist(), m.weight.tolist())
            for m in step
        ]

    with Replay(mixed(rollout=size)) as replay:
        fill(replay)
        steps = iter(rollout := replay.rollout())
        rollout.advantages("grpo", absent=1.0)
        list(next(steps))
        replay.save(tmp_path / "saved")
        wanted = [facts(step) for step in steps]
    with Replay(mixed(rollout=size)) as replay:
        replay.load(tmp_path / "saved")
        rollout = replay.rollout()
        assert [facts(step) for step in rollout] == wanted
        assert len(wanted) == 5
        assert replay.rollout().table.tolist().count(1) == ALONE


def test_leased_groups_beside_a_supervised_data_set(tmp_path: Path) -> None:
    """Books count the groups alone; an epoch of the data set has each trajectory once."""
    columns = {**SFT, "tokens": {"dtype": "int32", "role": "token"}}
    with DatasetWriter(tmp_path / "sft", Schema.from_json({"columns": columns})) as writer:
        for one in sft_rows():
            writer.add(one)
    config = mixed()
    config["tables"]["rl"] |= {
        "max_times_sampled": 1,
        "writers": 1,
        "capacity_trajectories": 200,
        "prompts": {"data": str(write_prompts(tmp_path / "prompts", 50)), "max_lag": 1},
    }
    config["tables"]["sft"] = {"data": str(tmp_path / "sft")}
    seen = []
    with Replay(config) as replay, closing(replay.rollout_worker()) as worker:
        for _ in range(4):
            for lease in worker.lease(GROUPS, timeout_s=0):
                rows = rl_rows()[:SIZE]
                lease.commit([{n: v for n, v in one.items() if n != "prompt"} for one in rows])
            assert replay.can_sample()
            rollout = replay.rollout()
            assert rollout.table.tolist() == [0] * GROUPS + [1] * ALONE
            is_alone = rollout.table[rollout.group] == 1
            seen.extend(rollout.trajectory_id[is_alone].tolist())
            for step in rollout:
                for micro in step:
                    is_sft = micro.per_place(micro.table) == 1
                    count = int(micro.lengths[(micro.table == 1).cpu()].sum())
                    assert int(is_sft.sum()) == count
                    assert (micro["logp"][is_sft] == -0.5).all()
                    with pytest.raises(ShapeError, match="one for each trajectory"):
                        micro.per_place(micro.targets)
        assert replay.statistics()["prompts"]["rl"]["trained"] == 4 * GROUPS
    assert sorted(seen) == sorted([*range(2 * ALONE)] * 2)


def test_a_preview_counts_groups_and_trajectories() -> None:
    found = rollout_preview(parse(mixed()), 2, 1, 1)
    count = GROUPS * SIZE + ALONE
    assert (found["unit"], found["items"], found["trajectories"]) == ("items", 16, count)
    assert format_rollout_preview(found)[0] == f"rollout batch: 16 items, {count} trajectories"


OTHER_SCALE = {**SFT, "scale": {"dtype": "float64"}}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"fields": {"tokens": {}, "logp": {}}}, r"fields\.logp must be a column of the table"),
        ({"fields": {"tokens": {}, "other": {"absent": 0}}}, "must be a column of one of the tab"),
        ({"fields": {"tokens": {}, "tool": {"absent": 2}}}, r"tool\.absent must be 0 or 1"),
        ({"fields": {"experts": {"absent": 256}}}, r"absent must be an integer that uint8"),
        ({"fields": {"logp": {"absent": 0.0, "derived": "timestep"}}}, "for a derived field"),
        ({"fields": None}, 'gear.fields must be given .*one with "absent"'),
        (
            {"sampler": {"kind": "fifo", "unit": "group", "table": "rl"}},
            r"absent must not be given unless gear\.pack has batches of several tables",
        ),
        ({"loss": {"by_table": {"rl": 1}}}, r"must name all tables of a mixture \(rl, sft\)"),
        ({"loss": {"by_table": {"rl": 1, "sft": -1}}}, r"sft\.weight must be a finite number >= 0"),
        ({"loss": {"by_table": {"rl": 1, "sft": {"normalize": "mean"}}}}, "normalize must be"),
        ({"rollout": {"trajectories": 16}}, 'must be in groups where gear.sampler.unit is "group"'),
    ],
)
def test_wrong_mixtures_are_refused(change: dict[str, Any], text: str) -> None:
    config = mixed(**change)
    if config["fields"] is None:
        del config["fields"]
    with pytest.raises(ConfigError, match=text):
        Replay(config)


def test_tables_with_the_column_must_agree() -> None:
    config = mixed()
    config["tables"]["third"] = {**config["tables"]["sft"], "schema": {"columns": OTHER_SCALE}}
    config["sampler"]["shares"] = {"rl": 0.5, "sft": 0.25, "third": 0.25}
    config["sampler"]["by_table"]["third"] = config["sampler"]["by_table"]["sft"]
    with pytest.raises(ConfigError, match="scale must have the same column in tables sft and thi"):
        Replay(config)


def test_units_of_windows_are_equal() -> None:
    config = mixed(pack=None, rollout=None)
    config["sampler"]["of"] = {"kind": "uniform", "unit": "step"}
    with pytest.raises(ConfigError, match=r"must have in table sft the unit of .*of \(step\)"):
        Replay(config)


def test_groups_are_copied_from_beside_supervised_trajectories() -> None:
    config = mixed()
    config["tables"]["again"] = {**config["tables"]["rl"]}
    del config["tables"]["again"]["group"]
    with Replay(config) as replay:
        fill(replay)
        rollout = replay.rollout()
        with pytest.raises(ConfigError, match="must be a column of table sft, whose items are co"):
            replay.copy_items(rollout, "again")
        assert replay.copy_items(rollout, "again", rollout.table == 0) == GROUPS * SIZE
        assert replay.tables["again"].num_trajectories == GROUPS * SIZE
