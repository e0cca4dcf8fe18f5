"""The replay's part of a DeepSpeed checkpoint: where its tables are found. With engines:
test_engine.py.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gear_support import write_dataset
from replay_support import filled

from deepspeed_gear import Replay
from deepspeed_gear.engine import engine_checkpoint, whole_tags
from deepspeed_gear.errors import CheckpointError


def made(lengths: Sequence[int] = ()) -> Replay:
    sampler = {"kind": "uniform", "unit": "step"}
    fields = {"observation": {}, "code": {}}
    return filled(lengths, fields=fields, seed=3, sampler=sampler, batch_size=4)


Saved = tuple[Path, dict[str, object], list[int]]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """The folder of a tag, what its client state holds, and the ids of the batch that
    comes next.
    """
    folder = tmp_path / "run" / "t5"
    with made(range(3, 12)) as replay:
        replay.sample()
        state = engine_checkpoint.save(replay, folder)
        return folder, state, replay.sample().trajectory_id.tolist()


@pytest.mark.parametrize(
    "where", ["the tag", "a tag beside it", "another folder", "moved together"]
)
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


def test_tables_that_are_gone_are_named_with_the_copy_that_helps(
    saved: Saved, tmp_path: Path
) -> None:
    folder, state, ids = saved
    shutil.move(folder, tmp_path / "kept")
    universal = folder.parent / "t5_universal"
    with made() as replay:
        with pytest.raises(CheckpointError) as caught:
            engine_checkpoint.load(replay, universal, state)
        assert str(caught.value) == (
            f"{universal}/gear must hold the replay's tables, which were saved in {folder}/gear "
            "and are no longer there; copy them from where that tag lies now: cp -r "
            f".../t5/gear {universal}/gear"
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
    with (
        made() as replay,
        pytest.raises(CheckpointError, match="must hold a position and the folder"),
    ):
        engine_checkpoint.load(replay, tmp_path, {"seed": 3})


class Engine:
    """An engine whose files are written by the save, or later in the background;
    without `latest`.
    """

    global_steps = 3

    def __init__(self, in_background: bool) -> None:
        self.checkpoint_engine = SimpleNamespace(is_decoupled=lambda: in_background)
        self._to_write: list[Path] = []

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Any = None,
        save_latest: bool = True,
    ) -> bool:
        assert not save_latest, "DeepSpeed would write it before the files of other ranks are there"
        assert (client_state or {}).get("mine") == 1
        self._to_write.append(Path(save_dir) / str(tag) / "mp_rank_00_model_states.pt")
        if not self.checkpoint_engine.is_decoupled():
            self._commit_decoupled_checkpoint()
        return True

    def _commit_decoupled_checkpoint(self) -> None:
        while self._to_write:
            self._to_write.pop().write_bytes(b"12345")

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_optimizer_states: bool = True,
        load_module_only: bool = False,
    ) -> Any:
        raise AssertionError("the check before it must raise")

    def load_universal_checkpoint(self) -> bool:
        return False

    def zero_optimization_stage(self) -> int:
        return 0


@pytest.mark.parametrize("in_background", [False, True])
def test_latest_follows_the_files(in_background: bool, tmp_path: Path) -> None:
    with made(range(3, 12)) as replay:
        engine = Engine(in_background)
        engine_checkpoint.attach_checkpoints(engine, replay, owns=True)
        assert engine.save_checkpoint(str(tmp_path), client_state={"mine": 1})
        latest = tmp_path / "latest"
        if in_background:
            assert not latest.exists()
            engine._commit_decoupled_checkpoint()
        assert latest.read_text() == "global_step3"
        assert whole_tags.newest(tmp_path) == "global_step3"
        engine.save_checkpoint(str(tmp_path), "second", {"mine": 1}, False)
        engine._commit_decoupled_checkpoint()
        assert (latest.read_text(), whole_tags.newest(tmp_path)) == ("global_step3", "second")
        (tmp_path / "global_step3" / "mp_rank_00_model_states.pt").write_bytes(b"1")
        with pytest.raises(
            CheckpointError, match=r"must have 5 bytes, got '1 bytes'; .* is second: "
        ):
            engine.load_checkpoint(str(tmp_path))
