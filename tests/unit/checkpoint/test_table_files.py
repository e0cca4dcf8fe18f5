"""Tables that were added to continue from a checkpoint with the batches that would have come."""

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, config_of, lengths_of, trajectory, wait_until
from replay_support import same, streams_of, take
from saved_shards import into_shards

from deepspeed_gear import Batch, Column, Replay, Schema
from deepspeed_gear.checkpoint.rollout_file import write_rollout
from deepspeed_gear.checkpoint.table_files import read_table
from deepspeed_gear.checkpoint.table_loader import _copy_rows
from deepspeed_gear.errors import CheckpointError, StoreFullError

LENGTHS = lengths_of(30)


def make(
    kind: str, unit: str, prefetch: int, capacity: int = 2000, seed: int = 0, batch: int = 8
) -> Replay:
    tables = {"main": {"capacity_steps": capacity, "capacity_trajectories": 60}}
    sampler = {"kind": kind, "unit": unit}
    section = config_of(
        seed=seed, tables=tables, sampler=sampler, batch_size=batch, prefetch=prefetch
    )
    return Replay(section, schemas={"main": Schema([*SCHEMA, Column("half", "bfloat16", (3,))])})


def add(replay: Replay, *numbers: int) -> None:
    """Add trajectories whose task is their number."""
    for number in numbers:
        half = torch.full((LENGTHS[number], 3), number, dtype=torch.bfloat16)
        replay.add({**trajectory(number, LENGTHS[number]), "half": half})


def assert_equal(one: list[Batch], other: list[Batch]) -> None:
    assert len(one) == len(other)
    assert all(map(same, one, other))


@pytest.mark.parametrize(
    ("kind", "unit", "prefetch"),
    [
        ("uniform", "step", 3),
        ("uniform", "trajectory", 0),
        ("epoch", "trajectory", 0),
        ("epoch", "step", 2),
    ],
)
def test_the_next_batches_are_those_that_would_have_come(
    kind: str, unit: str, prefetch: int, tmp_path: Path
) -> None:
    with make(kind, unit, prefetch) as replay:
        add(replay, *range(20))
        take(replay, 7)
        add(replay, *range(20, 25))
        assert replay.remove([3, 4]) == 2
        take(replay, 2)
        state = replay.save(tmp_path)
        expected = take(replay, 12)
        held = len(replay)
        with make(kind, unit, prefetch) as other:
            other.load(tmp_path, state)
            assert len(other) == held
            assert_equal(expected, take(other, 12))
            add(other, 25)
            assert int(other.read([25])[0]["task"]) == 25, "ids go on where they were"
        replay.load(tmp_path, state)
        assert_equal(expected, take(replay, 12))


def test_a_load_at_the_same_batch_evicts_what_is_too_old_for_it(tmp_path: Path) -> None:
    options = config_of(tables={"main": {"capacity_steps": 2000, "max_age": 2}}, batch_size=4)
    with Replay(options, schemas={"main": SCHEMA}) as replay:
        for number in range(8):
            replay.add(trajectory(number, 5))
            replay.sample()
        state = replay.save(tmp_path)
        wanted = replay.sample().clone()
        held = len(replay)
        replay.load(tmp_path, state)
        assert same(replay.sample(), wanted)
        assert len(replay) == held


def test_a_load_into_another_epoch_than_that_of_the_masses_begins_one(tmp_path: Path) -> None:
    def check(replay: Replay, batches: int) -> None:
        ids = [batch.trajectory_id for batch in take(replay, batches)]
        assert sorted(torch.cat(ids).tolist()) == [6, 7, 8, 9, 10, 11, 12, 13]

    with make("epoch", "trajectory", 2) as replay, make("epoch", "trajectory", 0, batch=4) as other:
        add(replay, *range(10))
        replay.sample()  # of the first epoch; the next batches begin others
        state = replay.state_dict()
        wait_until(lambda: streams_of(replay)["train"].state.consumed[0] == 4, "preparing")
        replay.remove([0, 1, 2, 3, 4, 5])
        add(replay, *range(10, 14))
        other.load(tmp_path, replay.save(tmp_path))  # keeps no selection that was prepared
        check(other, 2)
        take(replay, 6)
        replay.load_state_dict(state)
        check(replay, 1)


def test_rows_of_equal_gaps_are_not_one_run() -> None:
    to = np.zeros(8, np.int64)
    file = np.arange(1, 9)
    _copy_rows(to, [file], np.array([[0, 0, 2], [5, 5, 2]]))
    assert to.tolist() == [1, 2, 0, 0, 0, 6, 7, 0]


def test_columns_of_earlier_saves_go_only_when_the_kept_one_is_known(tmp_path: Path) -> None:
    def write(number: int, kept: Any) -> set[str]:
        write_rollout(tmp_path, str(number) * 32, {"advantage": torch.zeros(3)}, kept)
        return {path.name for path in tmp_path.iterdir()}

    (first,) = write(1, None)
    assert first in write(
        2, None
    )  # a run that has loaded nothing may end before its own save is whole
    assert len(write(3, {"rollout": {"columns": {"file": first}}}) - {first}) == 1


@pytest.mark.parametrize(("kind", "prefetch", "count"), [("uniform", 2, 2), ("prioritized", 1, 4)])
def test_shards_are_loaded_into_one_store(
    kind: str, prefetch: int, count: int, tmp_path: Path
) -> None:
    def take_and_report(replay: Replay, batches: int) -> list[Batch]:
        found = []
        for _ in range(batches):
            found.append(replay.sample().clone())
            if kind == "prioritized":
                replay.update_priorities(
                    found[-1], 0.1 + (found[-1].trajectory_id * 7 + found[-1].anchor) % 11
                )
        return found

    with make(kind, "step", prefetch) as replay:
        add(replay, *range(20))
        take_and_report(replay, 3)
        replay.remove([2, 3, 11])
        take_and_report(replay, 2)
        add(replay, *range(20, 25))
        take_and_report(replay, 2)
        state = replay.save(tmp_path)
        expected = take_and_report(replay, 6)
        state = into_shards(tmp_path / "main", count, kind == "prioritized")
        replay.load(tmp_path, state)
        assert_equal(expected, take_and_report(replay, 6))
        add(replay, 25)
        assert int(replay.read([25])[0]["task"]) == 25, "ids go on above those of all shards"


def test_a_shard_that_is_missing_or_of_another_table_is_named(saved: tuple[Path, dict]) -> None:
    folder, _ = saved
    state = into_shards(folder / "main", 3, False)
    with make("uniform", "step", 0) as replay:
        (folder / "main" / "shard-1").rename(folder / "aside")
        with pytest.raises(CheckpointError, match=r"main/shard-1/manifest\.json must be readable"):
            replay.load(folder, state)
        (folder / "main" / "shard-2").rename(folder / "main" / "shard-1")
        (folder / "aside").rename(folder / "main" / "shard-2")
        with pytest.raises(
            CheckpointError, match=r"shard-1/manifest\.json must be as it was saved"
        ):
            replay.load(folder, state)
        assert len(replay) == 0


def test_shards_do_not_outlive_a_table_that_is_saved_in_one_store(saved: tuple[Path, dict]) -> None:
    folder, _ = saved
    into_shards(folder / "main", 2, False)
    with make("uniform", "step", 0) as replay:
        add(replay, 0, 1, 2)
        take(replay, 1)
        replay.load(folder, replay.save(folder))
        assert len(replay) == 3
        assert not list((folder / "main").glob("shard-*"))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict]:
    with make("uniform", "step", 0) as replay:
        add(replay, *range(20))
        take(replay, 1)
        return tmp_path, replay.save(tmp_path)


def flip(path: Path) -> None:
    *content, last = path.read_bytes()
    path.write_bytes(bytes([*content, last ^ 1]))


def edit(path: Path) -> None:
    """Set the counter of ids to what a flipped digit would give."""
    path.write_text(json.dumps({**json.loads(path.read_text()), "next_id": 0}, indent=1))


@pytest.mark.parametrize("is_given", [True, False])
@pytest.mark.parametrize(
    ("damage", "options", "text"),
    [
        (
            lambda main: flip(main / "rows-000000.reward.npy"),
            {},
            r"reward\.npy must be as it was saved",
        ),
        (
            lambda main: edit(main / "manifest.json"),
            {},
            r"main/manifest\.json must be as it was saved",
        ),
        (shutil.rmtree, {}, r"manifest\.json must be readable"),
        (None, {"capacity": 100}, "must hold the 20"),
        (None, {"seed": 1}, "same seed"),
    ],
)
def test_a_save_that_does_not_fit_is_refused_and_nothing_changes(
    damage: Any, options: dict[str, int], text: str, is_given: bool, saved: tuple[Path, dict]
) -> None:
    folder, state = saved
    if damage is not None:
        damage(folder / "main")
    with make("uniform", "step", 0, **options) as replay:
        with pytest.raises((CheckpointError, StoreFullError), match=text):
            replay.load(folder, state if is_given else None)
        assert len(replay) == 0


def test_a_state_loads_the_tables_of_its_own_save(tmp_path: Path) -> None:
    """The save before the newest lies in `.old`; without a state the newest is loaded."""
    with make("uniform", "step", 0) as replay:
        add(replay, *range(10))
        take(replay, 3)
        before = replay.save(tmp_path)
        expected = take(replay, 2)
        add(replay, *range(10, 15))
        newest = replay.save(tmp_path)
        then = take(replay, 2)
        replay.load(tmp_path, before)
        assert len(replay) == 10
        assert_equal(expected, take(replay, 2))
        replay.load(tmp_path)
        assert len(replay) == 15
        assert_equal(then, take(replay, 2))
        replay.load(tmp_path, before)
        replay.save(tmp_path)
        assert_equal(expected, take(replay, 2))
        with pytest.raises(
            CheckpointError, match=f"main must hold the save {newest['save']['id']} of the"
        ):
            replay.load(tmp_path, newest)
        at = replay.state_dict()
        with pytest.raises(
            CheckpointError, match="state must name a save; load the state that `save`"
        ):
            replay.load(tmp_path, at)
        assert replay.state_dict() == at, "what is refused changes nothing"


def test_an_id_that_is_stored_is_never_given_again(saved: tuple[Path, dict]) -> None:
    """Also where a manifest with a wrong counter has the checksum that the state names."""
    folder, state = saved
    path = folder / "main" / "manifest.json"
    edit(path)
    state["save"]["tables"]["main"]["manifest.json"] = hashlib.sha256(path.read_bytes()).hexdigest()
    with make("uniform", "step", 0) as replay:
        replay.load(folder, state)
        add(replay, 20)
        assert int(replay.read([20])[0]["task"]) == 20


LACKS = {
    "train": r"the gear state must have the entry 'train' \(dict\)",
    "train.main": "the gear state: train must have the entry 'main'",
    "train.main.samples": "the gear state: train.main must have the entry 'samples'",
    "passes": "the gear state must have the entry 'passes'",
    "options": "the gear state must have the entry 'options'",
    "save": "the gear state must name a save",
    "save.id": "the save of the gear state must have the entry 'id'",
    "save.tables.main": "the gear state must name a save of table main",
}


def test_what_a_state_or_a_manifest_lacks_is_named(saved: tuple[Path, dict]) -> None:
    folder, state = saved
    with make("uniform", "step", 0) as replay:
        for key, text in LACKS.items():
            *way, last = key.split(".")
            wrong = inner = copy.deepcopy(state)
            for name in way:
                inner = inner[name]
            del inner[last]
            with pytest.raises(CheckpointError, match=text):
                replay.load(folder, wrong)
    path = folder / "main" / "manifest.json"
    manifest = json.loads(path.read_text())
    for key in ("save", "schema", "next_id", "inserted", "files"):
        path.write_text(
            json.dumps({name: value for name, value in manifest.items() if name != key})
        )
        with pytest.raises(
            CheckpointError, match=rf"main/manifest\.json must have the entry '{key}'"
        ):
            read_table(path.parent)
