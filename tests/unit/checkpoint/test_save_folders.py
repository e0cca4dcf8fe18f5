"""A save is ended before each of its changes to the file system: what a state on the disk names
stays whole.

Several tables, one of them in shards; the exchange as one system call and by renames; a program
that continues from the state it has kept, from the folder's own, or from neither, and is ended
again.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from thread_ranks import ThreadPlane, on_ranks

from deepspeed_gear.checkpoint import checked_files, save_folders
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.errors import CheckpointError, PeerError

PARTS = {"one": [""], "two": ["shard-0", "shard-1"]}
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir"}
copy = partial(shutil.copytree, copy_function=shutil.copyfile)
KEPT = "kept.json"  # where the program keeps the state that a save has returned
State = dict[str, Any]


class Ended(BaseException):
    """The end of a process: no handler of the package catches it."""


class Steps:
    """Counts changes to the file system, and ends the process before the last that it may make."""

    def __init__(self) -> None:
        self.left: int | None = None
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.left is not None:
            writes = event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax"
            if event in CHANGES or writes:
                self.take()

    def take(self) -> None:
        """Count a change."""
        if self.left is not None:
            if self.left == 0:
                raise Ended
            self.left -= 1

    def end_after(self, count: int, action: Callable[[], Any]) -> bool:
        """Act, and end before change `count`; return whether it came to that."""
        self.left = count
        try:
            action()
        except Ended:
            return True
        finally:
            self.left = None
        return False


STEPS = Steps()


@pytest.fixture(params=["exchange", "renames"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = save_folders.swap_names

    def exchange(one: Path, other: Path) -> bool:
        STEPS.take()
        return request.param == "exchange" and plain(one, other)

    monkeypatch.setattr(save_folders, "swap_names", exchange)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory: fsync costs nothing there."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="gearsaves"))
    yield path / "folder"
    shutil.rmtree(path)


def save(folder: Path, kept: State | None) -> State:
    """Save as a Replay does; the program then keeps the state."""

    def write(save_id: str) -> dict[str, dict[str, str]]:
        tables: dict[str, dict[str, str]] = {}
        for table, parts in PARTS.items():
            for name in parts:
                part = save_folders.partial_of(folder, table) / name
                part.mkdir(exist_ok=True)
                (part / "rows").write_text(save_id + table + name)
                path = str(Path(name) / save_folders.MANIFEST)
                tables.setdefault(table, {})[path] = save_folders.complete(
                    part, {"save": save_id}, {}
                )
        return tables

    state = save_folders.write_save(
        ControlPlane(), folder, list(PARTS), kept, True, write, lambda save: {"save": save}
    )
    partial = folder / "kept.new"
    partial.write_text(json.dumps(state))
    os.replace(partial, folder / KEPT)
    return state


def state_in(folder: Path, source: str | None) -> State | None:
    """Return what a program continues from."""
    if source == "kept":
        return json.loads((folder / KEPT).read_text()) if (folder / KEPT).exists() else None
    known = source == "position" and (folder / save_folders.POSITION).exists()
    return save_folders.read_position(folder) if known else None


def check(folder: Path, sources: Sequence[str] = ("kept", "position")) -> None:
    """The states that the disk holds name whole tables."""
    for state in (state_in(folder, source) for source in sources):
        for table, parts in PARTS.items() if state is not None else []:
            assert state is not None
            path = save_folders.find(folder, table, state["save"])
            for name in parts:
                assert (path / name / "rows").read_text() == state["save"]["id"] + table + name


def places(folder: Path) -> str:
    """Say where which save lies; equal for folders that differ in the random ids alone."""
    ids: dict[str, int] = {}
    lines = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
    manifests = [
        path for path in sorted(folder.rglob(save_folders.MANIFEST)) if path.stat().st_size
    ]
    for path in [*manifests, folder / save_folders.POSITION, folder / KEPT]:
        if path.exists():
            content = json.loads(path.read_text())
            save_id = content["save"] if "save" in content else content["state"]["save"]["id"]
            number = ids.setdefault(
                str(save_id["id"] if isinstance(save_id, dict) else save_id), len(ids)
            )
            lines.append(f"{path.relative_to(folder)} {number}")
    return "\n".join(lines)


def every_end(
    folder: Path, kept: State | None, sources: Sequence[str] = ("kept", "position")
) -> dict[str, Path]:
    """End a save before each of its changes, check, and return a copy of each kind of folder that
    is left.
    """
    start = folder.with_name(f"start-{folder.name}")
    found = {}
    copy(folder, start)
    for count in range(1000):
        ended = STEPS.end_after(count, lambda: save(folder, kept))
        check(folder, sources)
        kind = places(folder)
        if kind not in found:
            found[kind] = folder.with_name(f"{start.name}-{count}")
            copy(folder, found[kind])
        shutil.rmtree(folder)
        if not ended:
            break
        copy(start, folder)
    assert count > 12, "the hook has seen nothing"
    return found


# By renames a save has all states on the disk that an exchange has, and more.
ENDS = [("renames", "kept"), ("renames", "position"), ("renames", None), ("exchange", "kept")]


@pytest.mark.parametrize(("_way", "source"), ENDS, indirect=["_way"])
def test_what_a_state_names_survives_every_end(source: str | None, folder: Path) -> None:
    first = save(folder, None)
    own = folder / "one.txt"
    own.write_text("of the user")
    kinds = every_end(folder, save(folder, first))  # the third save, with one in `.old`
    assert len(kinds) > 10
    # What a program never reads may name a save that is gone.
    sources = ("position",) if source == "position" else ("kept", "position")
    others: dict[str, Path] = {}
    for left in kinds.values():
        others |= every_end(left, state_in(left, source), sources)
    for again in others.values():
        last = save(again, state_in(again, source or "kept"))  # the third process goes on
        check(again)
        assert save_folders.find(again, "two", last["save"]) == again / "two"
        assert (again / own.name).read_text() == "of the user"


def test_the_first_save_may_end_anywhere(folder: Path) -> None:
    folder.mkdir()
    for left in every_end(folder, None).values():
        save(left, state_in(left, "kept"))
        check(left)
        assert sorted(path.name for path in left.glob("one*")) in (["one"], ["one", "one.old"])


def test_what_was_loaded_stays_when_the_next_save_begins(folder: Path) -> None:
    """The state on the disk names the save in `.old`: a kill came before the later one's was
    written.
    """
    first = save(folder, None)
    second = save(folder, first)
    save_folders.begin(folder, list(PARTS), first)
    assert save_folders.find(folder, "one", first["save"]) == folder / "one.old"
    assert save_folders.read_position(folder) == first, "it must not name what is removed"
    with pytest.raises(CheckpointError, match="must hold the save"):
        save_folders.find(folder, "one", second["save"])


def test_damage_is_named(folder: Path) -> None:
    state = save(folder, None)
    path = folder / "two" / "shard-1" / save_folders.MANIFEST
    for damage, text in (
        (lambda: path.write_text(path.read_text() + " "), r"manifest.json must be as it was saved"),
        (path.unlink, r"two/shard-1/manifest.json must be readable"),
        (lambda: shutil.rmtree(path.parents[1]), r"two/shard-0/manifest.json must be readable"),
    ):
        damage()
        with pytest.raises(CheckpointError, match=text):
            save_folders.find(folder, "two", state["save"])


def test_a_position_is_checked(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"position\.json must be readable"):
        save_folders.read_position(folder)
    save(folder, None)
    path = folder / save_folders.POSITION
    content = json.loads(path.read_text())
    content["state"]["save"]["id"] = "0"
    for written, rule in (
        (content, "must be as it was saved"),
        ({**content, "format": 0}, "must have format 1, got 0"),
        ([], "must hold a mapping, got 'list'"),
    ):
        path.write_text(json.dumps(written))
        with pytest.raises(CheckpointError, match=rf"position\.json {rule}"):
            save_folders.read_position(folder)


def test_a_folder_that_nodes_do_not_share_is_named(folder: Path) -> None:
    """Rank 1, on another node, sees a folder of the same name, which may hold a save of its own."""
    own = folder.with_name("own") / folder.name
    shutil.copytree(folder.parent, own.parent)
    save(own, None)

    def write_on(plane: ThreadPlane) -> None:
        here = (folder, own)[plane.rank]

        def write(save_id: str) -> dict[str, dict[str, str]]:
            save_folders.check_shared(here, save_id)
            return {}

        save_folders.write_save(
            plane, here, ["one"], None, plane.rank == 0, write, lambda save: {"save": save}
        )

    first, second = on_ranks(2, write_on)
    assert isinstance(first, PeerError)
    assert isinstance(second, CheckpointError)
    for error in (first, second):
        assert "must be one folder that all nodes share" in str(error)
        assert "save to a file system that all nodes share" in str(error)
        assert "free space" not in str(error)
    with pytest.raises(
        CheckpointError, match=r"must be a folder that every rank can read; .* on host "
    ):
        save_folders.find(folder / "none", "one", {"id": "0", "tables": {"one": {}}})


def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    folder.write_text("a file")
    named = pytest.raises(CheckpointError, match=r"folder must be writable.*stays loadable")
    with named, checked_files.writing(folder):
        save_folders.begin(folder, list(PARTS), None)
