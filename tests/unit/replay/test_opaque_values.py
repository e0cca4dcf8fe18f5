"""Byte strings and JSON values in tables: writers, batches, reads, saves, and what is refused."""

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import config_of
from torch.utils import _pytree as pytree

from deepspeed_gear import Batch, Column, DatasetWriter, DeviceReplay, Normalizer, Replay, Schema
from deepspeed_gear.errors import ConfigError, DataError, FieldError, ShapeError, StaleBatchError

SCHEMA = Schema(
    [
        Column("observation", "float32", (2,), "observation", "T+1"),
        Column("terminated", "bool", (), "terminated"),
        Column("which", "int64"),
        Column("raw", "bytes", rows="1", max_bytes=12),
        Column("note", "json", rows="1", max_bytes=60),
        Column("judge", "json", rows="1", max_bytes=30, late=True),
    ]
)
FIELDS = {"which": {}, "raw": {}, "text": {"column": "note"}}


def note_of(number: int) -> dict[str, Any]:
    return {"id": number, "tags": ["ä", None], "empty": not number}


def trajectory(number: int, steps: int = 3) -> dict[str, Any]:
    return {
        "observation": np.full((steps + 1, 2), number, np.float32),
        "terminated": np.arange(steps) == steps - 1,
        "which": np.full(steps, number),
        "raw": b"\x00%d\x00" % number,
        "note": note_of(number),
    }


def section(fields: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    given = {
        "tables": {"main": {"capacity_steps": 120, "capacity_trajectories": 12, "max_length": 10}},
        "sampler": {"kind": "uniform", "unit": "step"},
        "fields": FIELDS if fields is None else fields,
        "batch_size": 16,
    }
    return config_of(**{**given, **options})


def main(**options: Any) -> dict[str, Any]:
    return {"tables": {"main": {"capacity_steps": 60, **options}}}


def made(fields: dict[str, Any] | None = None, **options: Any) -> Replay:
    given = section(fields, **options)
    return Replay(given, schemas=dict.fromkeys(given["tables"], SCHEMA))


def filled(fields: dict[str, Any] | None = None, **options: Any) -> Replay:
    replay = made(fields, **options)
    for at, table in enumerate(replay.tables):
        for number in range(8):
            replay.add(trajectory(10 * at + number), table)
    return replay


def check(batch: Batch) -> None:
    """Check that the values are those of the samples."""
    numbers = batch["which"].tolist()
    assert batch.opaque("raw") == [b"\x00%d\x00" % number for number in numbers]
    assert batch.opaque("text") == [note_of(number) for number in numbers]


MIXTURE = {
    "tables": {
        name: {"capacity_steps": 60, "capacity_trajectories": 12} for name in ("old", "new")
    },
    "sampler": {"kind": "mixture", "shares": {"old": 0.25, "new": 0.75}, "of": {"unit": "step"}},
}


@pytest.mark.parametrize("options", [{}, {"prefetch": 2}, {"transfer": {"way": "staged"}}, MIXTURE])
def test_batches_have_the_values_of_their_samples(options: dict[str, Any]) -> None:
    with filled(**options) as replay:
        for _ in range(4):
            batch = replay.sample()
            check(batch)
            assert set(batch) == {"which"}
            assert len({number // 10 for number in batch["which"].tolist()}) == len(replay.tables)
        assert len(set(batch["which"].tolist())) > 3


def test_values_are_read_before_rows_are_freed() -> None:
    """A queue evicts what is drawn, and its rows are written again at once."""
    tables = main(capacity_trajectories=6, max_length=3, remove="fifo", rate_limiter={"queue": 6})
    with made(sampler={"kind": "fifo"}, batch_size=3, **tables) as replay:
        for first in range(0, 30, 3):
            for number in range(first, first + 3):
                replay.add(trajectory(number))
            batch = replay.sample()
            for number in range(3):
                replay.add(trajectory(100 + number))
            assert batch["which"].tolist() == [first, first + 1, first + 2]
            check(batch)
            check(replay.sample())


def test_parts_and_copies_keep_the_values() -> None:
    with filled() as replay:
        batch = replay.sample()
        parts = [
            batch[3:9],
            batch[::5],
            batch[batch["which"] > 3],
            batch[[7, -1, 0]],
            *batch.minibatches(5),
        ]
        for part in parts:
            check(part)
            assert len(part.opaque("raw")) == part.num_samples
        check(Batch.cat([parts[0], parts[3]]))
        for other in (
            batch.clone(),
            copy.copy(batch),
            pickle.loads(pickle.dumps(batch)),
            batch.to("meta"),
        ):
            assert other.opaque("raw") == batch.opaque("raw")
        moved = pytree.tree_map(torch.clone, batch)
        with pytest.raises(FieldError, match="'raw' must be in the batch; it has none"):
            moved.opaque("raw")
        with pytest.raises(ShapeError, match="field 'raw' of batch 1"):
            Batch.cat([batch, moved])
        with pytest.raises(FieldError, match=r"batch\.opaque\('raw'\)"):
            batch["raw"]
        with pytest.raises(FieldError, match="'note' must be in the batch; it has raw, text"):
            batch.opaque("note")
        for _ in range(2):
            replay.sample()
        with pytest.raises(StaleBatchError):
            batch.opaque("raw")
    with filled({}) as replay:  # fields that are not named
        batch = replay.sample()
        assert set(batch) == {"observation", "terminated", "which"}
        with pytest.raises(FieldError, match=r"it has none; name the column in gear\.fields"):
            batch.opaque("raw")


def test_compiled_code_takes_such_batches() -> None:
    def model(batch: Batch) -> torch.Tensor:
        return batch.map(lambda tensor: tensor)["which"] * 2

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch._dynamo.reset()
    with filled() as replay, torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            batch = replay.sample()
            assert compiled(batch).tolist() == [2 * number for number in batch["which"].tolist()]


def test_late_values_keep_samples_back() -> None:
    with made({"which": {}, "judge": {}}) as replay:
        ids = [replay.add(trajectory(number)) for number in range(4)]
        assert not replay.can_sample()
        with pytest.raises(DataError, match="judge must have at most max_bytes = 30 bytes, got 42"):
            replay.fill(ids[2], judge="x" * 40)
        assert not replay.can_sample()
        replay.fill(ids[2], judge={"score": 0.5})
        batch = replay.sample()
        assert set(batch["which"].tolist()) == {2}
        assert batch.opaque("judge") == [{"score": 0.5}] * 16
        assert [one["judge"] for one in replay.read(ids)] == [None, None, {"score": 0.5}, None]
        with pytest.raises(DataError, match="judge must be written once"):
            replay.fill(ids[2], judge=None)


def test_an_evaluation_pass_of_a_data_set(tmp_path: Path) -> None:
    columns = [column for column in SCHEMA if not column.late]
    with DatasetWriter(tmp_path / "set", Schema(columns), split={"eval": 0.3}) as writer:
        for number in range(20):
            writer.add(trajectory(number))
    for load in ("mmap", "memory"):
        options = section(data={"path": str(tmp_path / "set"), "load": load})
        del options["tables"]
        with Replay(options) as replay:
            check(replay.sample())
            for batch in replay.iterator("eval"):
                check(batch)
            assert set(replay.normalizer.fields) == {"which"}
    assert set(Normalizer.from_config(options).fields) == {"which"}


def test_writers_and_reads() -> None:
    with made() as replay:
        whole = replay.add(trajectory(0))
        with replay.writer().trajectory(raw="é") as one:
            one.append(observation=[0, 0], terminated=True, which=1)
            with pytest.raises(
                DataError, match="raw must have at most max_bytes = 12 bytes, got 13"
            ):
                one.set(raw=bytes(13))
            one.set(note=[1, "two"])
            one.append(observation=[1, 1])
        vector = replay.vector_writer(2, autoreset="disabled")
        vector.reset(observation=np.zeros((2, 2)), raw=[b"a", b"b"], note=[{"n": 0}, {"n": 1}])
        step = {"observation": np.zeros((2, 2)), "which": [2, 3]}
        with pytest.raises(DataError, match="note must be a list of 2 values"):
            vector.step(**step, terminated=[False, True], note={"n": 5})
        vector.step(**step, terminated=[False, True], note=[{"n": 5}, {"n": 6}], publish=True)
        found = replay.read([whole, one.trajectory_id or 0])
        assert (found[0]["raw"], found[0]["note"]) == (b"\x000\x00", note_of(0))
        assert (found[1]["raw"], found[1]["note"]) == ("é".encode(), [1, "two"])
        assert torch.is_tensor(found[0]["which"])
        others = {int(one["which"][0]): (one["raw"], one["note"]) for one in replay.read([2, 3])}
        assert others == {2: (b"a", {"n": 5}), 3: (b"b", {"n": 6})}
        again = replay.add({name: value for name, value in found[1].items() if name != "judge"})
        assert replay.read([again])[0]["note"] == [1, "two"]


def test_what_does_not_fit_changes_nothing() -> None:
    with made() as replay:
        for wrong in ({"raw": bytes(13)}, {"note": {"x": "y" * 60}}, {"note": {1: 2}}, {"raw": 1}):
            with pytest.raises(DataError, match=f"table main: column {next(iter(wrong))} must"):
                replay.add({**trajectory(0), **wrong})
        # An array of the shape of a row is checked, too.
        with pytest.raises(DataError, match="raw must hold a value of at most max_bytes = 12"):
            replay.add({**trajectory(0), "raw": np.full(16, 255, np.uint8)})
        assert len(replay) == 0


def test_saves_hold_them(tmp_path: Path) -> None:
    with filled() as replay, made() as loaded:
        replay.fill(3, judge=["late"])
        replay.sample()
        loaded.load(tmp_path / "saved", replay.save(tmp_path / "saved"))
        assert loaded.sample().opaque("text") == replay.sample().opaque("text")
        assert loaded.read([3])[0]["judge"] == ["late"]
        assert loaded.read([4])[0]["raw"] == b"\x004\x00"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fields": {"raw": {"length": 3}}}, r"fields\.raw\.length must not be given"),
        (
            {"fields": {"raw": {"normalize": "mean_std"}}},
            r"fields\.raw\.normalize must not be given",
        ),
        ({"fields": {"raw": {"scale": 2.0}}}, r"fields\.raw\.scale must not be given"),
        ({"fields": {"raw": {"as": "float32"}}}, r"fields\.raw\.as must not be given"),
        (
            {"sampler": {"kind": "weighted", "weight": "raw"}},
            r"sampler\.weight must name a column with one",
        ),
        (
            {"sampler": {"kind": "uniform", "where": {"note": {"min": 1}}}},
            r"where\.note must name a column",
        ),
        (
            {"pipeline": {"inputs": ["which"], "labels": ["raw"]}},
            r"pipeline\.labels\[0\] must name a field",
        ),
        (
            main(remove="keep_best", keep_best="raw"),
            r"main\.keep_best must name .* one number per tr.*'raw'",
        ),
        (
            main(version={"column": "note", "max_lag": 1}),
            r"version\.column must name .* one integer.*'note'",
        ),
    ],
)
def test_options_that_need_numbers_refuse_them(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        made(**options).close()


def test_tables_on_devices_refuse_them() -> None:
    tables = main(max_length=5, remove="fifo", placement="device")
    with pytest.raises(
        ConfigError, match="must not have a column of dtype bytes on devices, got 'raw'"
    ):
        DeviceReplay(section({"which": {}}, **tables), "cpu", schemas={"main": SCHEMA})
