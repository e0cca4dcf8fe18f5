"""The replay's part of a DeepSpeed checkpoint: where its tables are found. With engines: test_engine.py."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from gear_support import write_dataset
from replay_support import filled

from deepspeed_gear import Replay
from deepspeed_gear.engine import engine_checkpoint
from deepspeed_gear.errors import CheckpointError


def made(lengths: Sequence[int] = ()) -> Replay:
    sampler, fields = {"kind": "uniform", "unit": "step"}, {"observation": {}, "code": {}}
    return filled(lengths, fields=fields, seed=3, sampler=sampler, batch_size=4)


Saved = tuple[Path, dict[str, object], list[int]]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """The folder of a tag, what its client state holds, and the ids of the batch that comes next."""
    folder = tmp_path / "run" / "t5"
    with made(range(3, 12)) as replay:
        replay.sample()
        state = engine_checkpoint.save(replay, folder)
        return folder, state, replay.sample().trajectory_id.tolist()


@pytest.mark.parametrize("where", ["the tag", "a tag beside it", "another folder", "moved together"])
def test_tables_are_found(where: str, saved: Saved, tmp_path: Path) -> None:
    folder, state, ids = saved
    if where == "a tag beside it":
        folder = folder.parent / "t5_universal"
    elif where == "another folder":
        folder = tmp_path / "elsewhere"
    elif where == "moved together":
        folder = shutil.move(tmp_path / "run", tmp_path / "moved") / "t5_universal"
    with made() as replay:
        engine_checkpoint.load(replay, folder, state)
        assert len(replay) == 9
        assert replay.sample().trajectory_id.tolist() == ids


def test_tables_that_are_gone_are_named_with_the_copy_that_helps(saved: Saved, tmp_path: Path) -> None:
    folder, state, ids = saved
    shutil.move(folder, tmp_path / "kept")
    universal = folder.parent / "t5_universal"
    with made() as replay:
        with pytest.raises(CheckpointError) as caught:
            engine_checkpoint.load(replay, universal, state)
        assert str(caught.value) == (
            f"{universal}/gear must hold the replay's tables, which were saved in {folder}/gear and are not "
            f"there any more; copy them from where that tag lies now: cp -r .../t5/gear {universal}/gear"
        )
        shutil.copytree(tmp_path / "kept" / "gear", universal / "gear")
        engine_checkpoint.load(replay, universal, state)
        assert replay.sample().trajectory_id.tolist() == ids


def test_a_position_without_tables_needs_no_folder(tmp_path: Path) -> None:
    """Uniform samples of a data set: the client state alone continues them."""
    write_dataset(tmp_path / "data", [5, 9, 7])
    section = {"data": str(tmp_path / "data"), "batch_size": 4, "sampler": {"unit": "step"}}
    with Replay(section) as replay:
        replay.sample()
        state = engine_checkpoint.save(replay, tmp_path / "run" / "t5")
        ids = replay.sample().trajectory_id.tolist()
    shutil.rmtree(tmp_path / "run")
    with Replay(section) as replay:
        assert engine_checkpoint.load(replay, tmp_path / "elsewhere" / "t5", state)
        assert replay.sample().trajectory_id.tolist() == ids


def test_what_another_version_has_saved_is_refused(tmp_path: Path) -> None:
    with made() as replay, pytest.raises(CheckpointError, match="must hold a position and the folder"):
        engine_checkpoint.load(replay, tmp_path, {"seed": 3})
