"""Forward passes over a table: late columns that the ranks compute."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rollout_support import COLUMNS, STORED, filled, ranks_of, section

from deepspeed_gear import Replay
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.batching.packing_plan import PlannedPacks
from deepspeed_gear.config.options import PackConfig, PackPadConfig
from deepspeed_gear.distributed.topology import RankCoordinates, Topology
from deepspeed_gear.errors import ConfigError, DataError, FieldError, ShapeError, StoreError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.packed.table_forward import fill_place
from deepspeed_gear.store.late_columns import absent, fill_each
from deepspeed_gear.store.records import Control, SlotRetention
from deepspeed_gear.store.table_spec import Shard

LATE = {
    "ref": {"dtype": "float32", "late": True},
    "value": {"dtype": "bfloat16", "late": True},
    "score": {"dtype": "float32", "rows": "1", "late": True},
}
FIELDS = {name: {} for name in COLUMNS} | {"value": {"offset": 0}}


@pytest.fixture
def made() -> Iterator[Replay]:
    with filled(section(COLUMNS | LATE, fields=FIELDS)) as replay:
        yield replay


def check(replay: Replay, name: str, numbers: Any) -> None:
    for number in numbers:
        (found,) = replay.read([number])
        expected = {"ref": STORED[number]["logp"] * (np.arange(len(STORED[number]["logp"])) > 0)}
        expected["value"] = np.arange(len(expected["ref"]))
        expected["score"] = np.float32(len(expected["ref"]))
        np.testing.assert_array_equal(found[name].float(), expected[name])


def test_columns_are_where_their_steps_are(made: Replay) -> None:
    seen: list[int] = []
    weight = 0.0
    assert not made.can_sample()  # the field "value" is absent
    for micro in made.forward("ref", "value", "score", tokens=256):
        weight += float(micro.weight.sum())
        assert (
            micro.group.tolist() == micro.trajectory_id.tolist()
        )  # also where packs are in another order
        assert "ref" not in micro
        assert "value" not in micro
        masks = [np.append(STORED[i]["loss_mask"][1:], False) for i in micro.trajectory_id.tolist()]
        assert micro.loss_mask[0, : micro.num_tokens].tolist() == np.concatenate(masks).tolist()
        assert not micro.loss_mask[0, micro.num_tokens :].any()
        micro.fill(ref=micro["logp"], score=micro.lengths.float())
        micro.fill(value=micro.position_ids.float())
        seen += micro.trajectory_id.tolist()
    assert sorted(seen) == list(range(len(STORED)))
    assert weight == pytest.approx(1)
    for name in LATE:
        check(made, name, seen)
    assert made.can_sample()
    assert list(made.forward("ref")) == []
    more = made.add(STORED[5])
    micro = next(made.forward("ref", "score"))
    assert micro.trajectory_id.tolist() == [more]


def passes_of(
    replay: Replay, places: list[RankCoordinates], *names: str
) -> list[Iterator[MicroBatch]]:
    """Return the micro batches of each rank, which all begin before any is filled.

    Of two sequence ranks the one that writes comes last, with what the other one has summed.
    """
    loader = replay._loader
    assert loader is not None
    context = loader.context
    slices = list[Any]()

    def total(part: Any) -> Any:
        slices.append(part)
        return part if len(slices) % 2 else part + slices[-2]

    passes = []
    for place in places:
        others: Any = SimpleNamespace(sum=total) if place.sequence_world > 1 else None
        where = replace(place, sequence_rank=place.sequence_world - 1 - place.sequence_rank)
        settings = replace(context.settings, place=where, ranks=others)
        loader.context = replace(context, settings=settings)
        micros = replay.forward(*names, tokens=128)
        passes.append(itertools.chain([next(micros)], micros))
    loader.context = context
    return passes


@pytest.mark.parametrize("sequence", [1, 2])
def test_ranks_fill_each_trajectory_once_in_as_many_micro_batches(
    made: Replay, sequence: int
) -> None:
    seen: list[int] = []
    for step in zip(*passes_of(made, ranks_of(3, sequence), "ref", "score"), strict=True):
        for index, micro in enumerate(step):
            micro.fill(ref=micro["logp"], score=micro.lengths.float())
            seen += micro.trajectory_id.tolist() if index % sequence == 0 else []
    assert sorted(seen) == list(range(len(STORED)))
    check(made, "ref", seen)
    check(made, "score", seen)
    assert made.statistics()["late"]["responses"]["ref"] == {"absent": 0, "repeated": 0}


@pytest.mark.parametrize("sequence", [1, 2])
def test_rows_with_a_shape_are_where_their_steps_are(sequence: int) -> None:
    """The most likely tokens of a teacher and their log-probabilities, and a value of each head."""
    wide = {
        "ids": {"dtype": "int32", "shape": [3], "late": True},
        "teacher": {"dtype": "bfloat16", "shape": [3], "late": True},
        "heads": {"dtype": "float32", "shape": [2, 2], "rows": "1", "late": True},
    }
    fields = {name: {} for name in (*COLUMNS, *wide) if name != "heads"}
    with filled(section(COLUMNS | wide, fields=fields)) as replay:
        for step in zip(*passes_of(replay, ranks_of(1, sequence), *wide), strict=True):
            for name in ("ids", "teacher", "heads"):
                for micro in step:
                    number = micro["tokens"][..., None] * 10 + torch.arange(3)
                    heads = micro.lengths.float()[:, None, None].expand(-1, 2, 2)
                    values = {"ids": number, "teacher": -number.bfloat16(), "heads": heads}
                    with pytest.raises(ShapeError, match="must have shape"):
                        micro.fill(**{name: values[name][..., 0]})
                    micro.fill(**{name: values[name]})
        for trajectory_id, stored in enumerate(STORED):
            (read,) = replay.read([trajectory_id])
            before = np.append(0, stored["tokens"][:-1])[:, None]  # the place that predicts
            expected = (before * 10 + np.arange(3)) * (np.arange(len(before)) > 0)[:, None]
            assert read["ids"].tolist() == expected.tolist()
            np.testing.assert_array_equal(
                read["teacher"].float(), -torch.from_numpy(expected).bfloat16().float()
            )
            assert read["heads"].tolist() == [[len(before)] * 2] * 2
        for micro in itertools.chain.from_iterable(replay.rollout()):
            at = micro.loss_mask[0]
            number = micro["tokens"][0, :, None] * 10 + torch.arange(3)
            assert micro["ids"][0, at].tolist() == number[at].tolist()


def test_what_is_refused_or_left_out(made: Replay) -> None:
    wrong: list[tuple[Any, Any, type[Exception], str]] = [
        (("logp",), {}, ConfigError, "must be late, with numbers per step"),
        (("ref",), {"tokens": 32}, ConfigError, "must hold the longest trajectory"),
        (("ref",), {"tokens": 1 << 31}, ConfigError, "tokens must be at most 2147483647"),
    ]
    for names, options, kind, match in wrong:
        with pytest.raises(kind, match=match):
            next(made.forward(*names, **options))
    with pytest.raises(StoreError, match="column 'ref' must be filled in each of the"):
        list(made.forward("ref"))
    micros = made.forward("ref", "score")
    micro = next(micros)
    gone, kept, *_ = micro.trajectory_id.tolist()
    not_a_number = micro["logp"].clone()
    start = int(micro.cu_seqlens[1])
    not_a_number[0, [start - 1, start + 1]] = torch.nan  # the first one is the place of no step
    for columns, error, match in (
        ({"logp": micro["logp"]}, FieldError, "must be one of those that forward names"),
        ({"score": micro["logp"]}, ShapeError, "must have shape"),
        ({"ref": not_a_number}, DataError, f"must be finite, got .nan at step 2 of id {kept}"),
    ):
        with pytest.raises(error, match=match):
            micro.fill(**columns)
    others = micro.trajectory_id.tolist()[1:]
    made.remove([gone])
    made.fill(kept, score=np.float32(-1))
    micro.fill(ref=micro["logp"], score=micro.lengths.float())
    check(made, "ref", others)
    check(made, "score", others[1:])
    assert made.read([kept])[0]["score"] == -1
    assert made.statistics()["late"]["responses"]["score"]["repeated"] == 1
    later = next(micros).trajectory_id.tolist()
    made.remove(later)
    made.add(STORED[0])  # into rows of theirs
    micros.close()
    left = [
        number
        for micro in made.forward("ref")
        for number in micro.trajectory_id.tolist()
        if fills(micro)
    ]
    assert not {gone, *others, *later}.intersection(left)


def test_what_is_evicted_before_its_pack_has_no_loss(made: Replay) -> None:
    micros = made.forward("ref", tokens=256)
    first = next(micros)
    gone = [number for number in range(len(STORED)) if number not in first.trajectory_id][::2]
    made.remove(gone)
    weight = float(first.weight.sum())  # of the loss masks of all
    assert fills(first)
    for micro in micros:
        owner = micro.trajectory_id.repeat_interleave(micro.lengths)
        assert not micro.loss_mask[0, : micro.num_tokens][
            torch.isin(owner, torch.tensor(gone))
        ].any()
        weight += float(micro.weight.sum())
        fills(micro)
    assert weight == pytest.approx(1)


def fills(micro: Any) -> bool:
    micro.fill(ref=micro["logp"])
    return True


def test_replicas_fill_what_their_node_holds() -> None:
    table: Any = SimpleNamespace(spec=SimpleNamespace(name="main", shard=Shard(0, 2)))

    def places(nodes: tuple[int, ...], sequence: int = 1) -> list[RankCoordinates]:
        known = tuple(ranks_of(len(nodes) // sequence, sequence))
        return [
            fill_place(table, known[rank], Topology(rank, known, nodes))
            for rank in range(len(nodes))
        ]

    found = [(place.data_rank, place.data_world) for place in places((0, 0, 1, 0))]
    assert found == [(0, 3), (1, 3), (0, 1), (2, 3)]
    found = [(place.data_rank, place.sequence_rank) for place in places((0, 0, 1, 1, 1, 1), 2)]
    assert found == [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1)]
    with pytest.raises(
        ConfigError, match=r"of each replica on one node .*, got 'replica 0 on the nodes 0 and 1'"
    ):
        places((0, 1, 0, 1), 2)


@pytest.mark.parametrize("to", ["multiple", "step", "budget"])
def test_nodes_have_as_many_packs(to: Any, made: Replay) -> None:
    """One without trajectories, with one, and with some of a length."""
    pack = PackConfig(tokens=128, pad=PackPadConfig(to=to, multiple=16))
    ops = made.tables["responses"].ops
    plans = [PlannedPacks(np.full(n, 60), pack, 2, ops) for n in (0, 1, 7)]
    before = [plan.rows.tolist() for plan in plans]
    longest = [plan.rows.max(axis=1).tolist() for plan in plans]
    assert [len(rows) for rows in longest] == [0, 1, 2]
    for plan, rows in zip(plans, before, strict=True):
        plan.extend(longest, pack)
        assert [len(plan.plan.packs(rank)) for rank in range(2)] == [2, 2]
        empty = {"multiple": 16, "budget": 128}
        wanted = (
            [[n, n] for n in longest[2]]
            if to == "step"
            else [*rows, *[[empty[to]] * 2] * (2 - len(rows))]
        )
        assert plan.rows.tolist() == wanted


@pytest.mark.parametrize("offset", [-40, -2, -1, 0, 1, 2, 40])
def test_rows_take_the_values_of_other_places(made: Replay, offset: int) -> None:
    table = made.tables["responses"]
    column = table.schema["ref"]
    present = table.views["retention"][:, SlotRetention.PRESENT]
    with table.lock:
        records = absent(table, "ref")[::2].copy()
    lengths = records[:, Resolution.NUM_STEPS]
    values = np.arange(1, lengths.sum() + 1, dtype=np.float32)
    has_place = []
    for steps, part in zip(
        lengths.tolist(), np.split(values, np.cumsum(lengths)[:-1]), strict=True
    ):
        expected = np.zeros(steps, np.float32)
        for step in range(steps):
            if 0 <= step - offset < steps:
                expected[step] = part[step - offset]
        has_place.append(expected)
    table.columns["ref"][:] = -1
    fill_each(table, column, records, values, "another lineage", offset)
    assert (table.columns["ref"] == -1).all()
    changed = int(table.control[Control.CHANGED])
    for _ in range(2):  # the second time they are there
        fill_each(table, column, records, values, table.lineage, offset)
        assert table.control[Control.CHANGED] == changed + len(records)
    for record, expected in zip(records, has_place, strict=True):
        np.testing.assert_array_equal(table.rows(record[Resolution.SLOT])["ref"], expected)
    filled = np.flatnonzero(present == table.schema.late_bits(["ref"]))
    assert sorted(filled.tolist()) == sorted(records[:, Resolution.SLOT].tolist())
    others = len(table.columns["ref"]) - int(lengths.sum())
    assert np.count_nonzero(table.columns["ref"] == -1) == others  # no other row has changed


def test_native_rows_must_fit(made: Replay) -> None:
    table = made.tables["responses"]
    write = table.ops.native.late_rows_write
    store = table.extents.handle.address
    with table.lock:
        records = absent(table, "ref")
    index = table.schema.names.index("ref")
    rows = int(records[:, Resolution.NUM_STEPS].sum())
    good = np.zeros(rows, np.float32)
    slots = np.zeros(len(records), np.int64)
    for wrong, match in (
        ((records, good[1:], 0, slots), f"expects {rows} rows of the column"),
        ((records, good.astype(np.float64), 0, slots), "rows of the column"),
        ((records, good, 0, slots[1:].copy()), "contiguous buffer of int64"),
        ((records[::2], good, 0, slots), "contiguous buffer of int64"),
    ):
        with pytest.raises(TypeError, match=match):
            write(store, index, 1, *wrong)
    assert made.statistics()["late"]["responses"]["ref"]["absent"] == len(records)
