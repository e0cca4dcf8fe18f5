"""Broken sources: each is refused with a text that names file, key and remedy, and DEST is not
made.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from ingest_refusals import refused

from deepspeed_gear.data.ingest import READERS

Maker = Callable[..., Any]
NAN = np.zeros((8, 3), np.float32)
NAN[6, 1] = np.nan
TEXT = np.array([b"up", b"down"] * 4)
LEAVE_OUT = "leave it out with --columns"
NUMERIC = "must be numeric (bool, integer or float up to 64 bits), got"
ALLOW_NAN = 'correct it, or set "allow_nan" of the column (gear ingest: --allow-nan)'
CONVERT = "store it as numbers, in rows of one shape"
AGAIN = "the data set is incomplete; download it again"
TOO_FEW = f"must hold the 3 episodes that metadata.json counts, got 2; {AGAIN}"
ARRAY = "must be an array with a row per step; store one value for each step"
AS_MANY = "must have 8 rows as rewards has, got"
DAMAGED = "the file is damaged or incomplete; copy it again"
EMPTY = {key: np.zeros((0, 2)) for key in ("observations", "actions")}
EMPTY |= {key: np.zeros(0) for key in ("rewards", "terminals", "timeouts")}

# changes of a good D4RL file, and the error behind the file's name
BROKEN_D4RL: list[tuple[dict[str, Any], str]] = [
    (
        {"actions": None},
        " must have observations and actions, got ['next_observations', 'observations', "
        "'rewards', 'terminals', 'timeouts']; docs/how-to/formats.md has the known names; "
        "name arrays of other names with --rename KEY=observation and --rename KEY=action",
    ),
    (
        {"timeouts": None, "next_observations": None},
        ": timeouts must be in the source, got ['terminated']; --episode-length N ends an episode "
        "after N steps; --rename KEY=dones names a flag of any end; add an array of zeros if no episode ends by a time limit; --format ogbench "
        "reads an npz file whose terminals mark the last row of a trajectory, which holds only an "
        "observation",
    ),
    ({"actions": np.zeros((7, 3))}, f": actions {AS_MANY} 7; the source is incomplete"),
    (
        {"rewards": np.zeros((8, 2))},
        ": rewards must be one value per step, got [8, 2]; store one number for each step",
    ),
    ({"actions": np.float32(1)}, f": actions {ARRAY}"),
    (
        {"observations": None, "observations__x": np.zeros((8, 2))},
        " must have next and final observations of the parts ['observation.x'], got "
        "['next_observation']; give them for all parts of the observation, or for none",
    ),
    (
        {"next_observations": np.zeros((8, 1), np.float32)},
        ": next_observations must have the shape of observations, [8, 2], got [8, 1]; store "
        "them with the shape of the observations",
    ),
    (
        {**EMPTY, "next_observations": None},
        " must hold at least one step, got 0; the data set is empty",
    ),
    ({"actions": TEXT}, f": actions {NUMERIC} '|S4'; {CONVERT}"),
    ({"infos__word": TEXT}, f": infos/word {NUMERIC} '|S4'; {LEAVE_OUT}"),
    (
        {"actions": np.zeros((8, 0))},
        f": actions must have rows with at least one value, got [0]; {CONVERT}",
    ),
    ({"infos__qpos": np.zeros((5, 2))}, f": infos/qpos {AS_MANY} 5; {LEAVE_OUT}"),
    (
        {"actions": NAN},
        f": episode 2: column action must be finite, got 'nan at step 2'; {ALLOW_NAN}",
    ),
    (
        {"terminals": np.full(8, 2, np.uint8)},
        ": terminals must hold values that bool can hold, got 2; "
        "correct it, or give the column a dtype that holds it",
    ),
    (
        {"infos__id": np.full(8, 2**63, np.uint64)},
        f": infos/id, episode 0 must hold values that int64 can hold, got 9223372036854775808; "
        f"{LEAVE_OUT}",
    ),
    (
        {"length": np.zeros(8)},
        f": length must not have the name of another column, or of a derived one; {LEAVE_OUT}, or "
        "give it another name with --rename",
    ),
    (
        {"infos__a b": np.zeros(8), "infos__a_b": np.zeros(8)},
        f": column infos.a_b must come from one key only; {LEAVE_OUT}",
    ),
]


@pytest.mark.parametrize(("changes", "text"), BROKEN_D4RL, ids=range(len(BROKEN_D4RL)))
def test_broken_d4rl_is_refused(
    tmp_path: Path, d4rl: Maker, changes: dict[str, Any], text: str
) -> None:
    source = tmp_path / "a.hdf5"
    d4rl(source, **changes)
    assert refused(source, tmp_path / "out") == f"{source}{text}"


def test_a_pattern_must_match(tmp_path: Path, d4rl: Maker) -> None:
    source = tmp_path / "a.hdf5"
    d4rl(source, infos__qpos=np.zeros(8), infos__qvel=np.zeros(8))
    assert refused(source, tmp_path / "out", columns=["infos.qpso"]) == (
        f"{source}: --columns must match an optional column, got 'infos.qpso'; "
        "optional columns are infos.qpos, infos.qvel"
    )


def test_what_is_no_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = f"known are {', '.join(READERS)}, and module:Class, a class of your own (--format); "
    known += "docs/how-to/formats.md has what each looks like"
    missing, text, folder, other = (
        tmp_path / name for name in ("missing", "text", "folder", "other.hdf5")
    )
    text.write_text("hello")
    folder.mkdir()
    (folder / "episode.npz").touch()
    with h5py.File(other, "w") as file:
        file["images"] = np.zeros(3)
    dest = tmp_path / "out"
    assert refused(missing, dest) == f"{missing} must exist; check the path of the source"
    for source, content in (
        (text, "a file that is neither HDF5 nor a table, text"),
        (folder, "a folder with episode.npz"),
        (other, "HDF5 with images"),
    ):
        assert (
            refused(source, dest) == f"{source} must have a known layout, got '{content}'; {known}"
        )
    (made := tmp_path / "made").mkdir()
    (made / "schema.json").write_text("{}")
    assert refused(made, dest) == f"{made} must not be a data set already; train from it as it is"
    assert refused(other, dest, format="rosbag") == (
        f"format must be one of auto, {', '.join(READERS)}, or module:Class, got 'rosbag'; "
        "docs/how-to/add-an-ingest-format.md adds one"
    )
    assert refused(other, dest, format="d4lr").endswith(", got 'd4lr'; did you mean 'd4rl'?")
    assert refused(other, dest, format="minari") == (
        f"{other} must hold at least one episode, got 0; the data set is empty, or not in "
        f"Minari's layout"
    )
    assert refused(text, dest, format="d4rl").startswith(
        f"{text} must be a readable HDF5 file, got "
    )

    def locked(*_: Any) -> bytes:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("deepspeed_gear.data.ingest.format_detection.check_source", locked)
        assert refused(text, dest) == (
            f"{text} must be readable, got '[Errno 13] Permission denied'; check the path and its "
            "permissions"
        )


def test_a_truncated_file_and_a_damaged_chunk_are_refused(tmp_path: Path, d4rl: Maker) -> None:
    source = tmp_path / "a.hdf5"
    d4rl(source)
    source.write_bytes(source.read_bytes()[:-100])
    error = refused(source, tmp_path / "out")
    assert error.startswith(f"{source} must be a readable HDF5 file, got ")
    assert "truncated file" in error
    assert error.endswith(DAMAGED)
    actions = d4rl(source)["actions"]
    with h5py.File(source, "a") as file:
        del file["actions"]
        file.create_dataset("actions", data=actions, chunks=(4, 3), fletcher32=True)
        at = file["actions"].id.get_chunk_info(1).byte_offset
    with source.open("r+b") as raw:
        raw.seek(at)
        raw.write(b"\xff")
    error = refused(source, tmp_path / "out")
    assert error.startswith(f"{source}: actions must be readable in rows 0 to 7, got ")
    assert error.endswith(DAMAGED)


def edit(file: Path, key: str, value: Any) -> None:
    """Replace an array of an HDF5 file; None drops it."""
    with h5py.File(file, "a") as opened:
        if key in opened:
            del opened[key]
        if value is not None:
            opened[key] = value


FIRST = "episode_0/actions"
SECOND = "episode_1/observations"
INFOS = "episode_0/infos/x"
CUT_OFF = "the episode is incomplete; download the data set again"
LAST_NAN = np.pad(np.zeros((4, 2)), ((0, 1), (0, 0)), constant_values=np.nan)
# what is changed in a good Minari file of episodes of 3, 1 and 4 steps, and the error behind the
# file's name
BROKEN_MINARI: list[tuple[str, Any, str]] = [
    (
        "episode_2/rewards",
        None,
        "episode_2/rewards must be in the episode, got ['actions', 'observations', "
        f"'terminations', 'truncations']; {AGAIN}",
    ),
    (SECOND, np.zeros((1, 2)), f"{SECOND} must have 2 rows for 1 rewards, got 1; {CUT_OFF}"),
    (FIRST, np.zeros(2, np.int64), f"{FIRST} must have 3 rows for 3 rewards, got 2; {CUT_OFF}"),
    (
        SECOND,
        np.zeros((2, 5)),
        "episode 1: column observation must have shape ['T+1', 2], got [2, 5]; the schema has "
        "float64[2], rows T+1",
    ),
    (SECOND, np.zeros((2, 2), np.complex64), f"{SECOND} {NUMERIC} 'complex64'; {LEAVE_OUT}"),
    (
        "episode_0/rewards",
        np.zeros((3, 2)),
        "episode_0/rewards must be one value per step, got [3, 2]; store one number for each step",
    ),
    (
        "episode_2/observations",
        LAST_NAN,
        f"episode 2: column observation must be finite, got 'nan at step 4'; {ALLOW_NAN}",
    ),
    (INFOS, 3.0, f"{INFOS} must have a row per step; {LEAVE_OUT}"),
    (INFOS, np.zeros(9), f"{INFOS} must have 3 or 4 rows for 3 rewards, got 9; {CUT_OFF}"),
    (INFOS, np.zeros(4), f"episode_1/infos/x must be in every episode; {LEAVE_OUT}"),
    ("episode_2/infos/x", np.zeros(4), f"episode_2/infos/x must be in every episode; {LEAVE_OUT}"),
]


@pytest.mark.parametrize(("key", "value", "text"), BROKEN_MINARI, ids=range(len(BROKEN_MINARI)))
def test_broken_minari_is_refused(
    tmp_path: Path, minari: Maker, key: str, value: Any, text: str
) -> None:
    minari(tmp_path / "set" / "data")
    file = tmp_path / "set" / "data" / "main_data.hdf5"
    edit(file, key, value)
    assert refused(file, tmp_path / "out") == f"{file}: {text}"


def test_an_episode_without_steps_is_refused(tmp_path: Path, minari: Maker) -> None:
    minari(tmp_path / "set")
    file = tmp_path / "set" / "main_data.hdf5"
    none = np.zeros(0, bool)
    parts = {
        "actions": none.astype(int),
        "rewards": none * 1.0,
        "terminations": none,
        "truncations": none,
    }
    for key, value in {"observations": np.zeros((1, 2)), **parts}.items():
        edit(file, f"episode_1/{key}", value)
    error = refused(file, tmp_path / "out")
    assert error == (
        f"{file}: episode 1: trajectory must have at least one step, got 0; leave empty "
        "trajectories out"
    )


def test_an_incomplete_minari_set_is_refused(tmp_path: Path, minari: Maker) -> None:
    folder = tmp_path / "set"
    dest = tmp_path / "out"
    minari(folder)
    with h5py.File(folder / "main_data.hdf5", "a") as file:
        del file["episode_2"]
    assert refused(folder, dest) == f"{folder} {TOO_FEW}"
    (folder / "main_data.hdf5").unlink()
    assert refused(folder, dest) == f"{folder / 'main_data.hdf5'} must exist; {AGAIN}"
    minari(tmp_path / "empty", lengths=())
    assert refused(tmp_path / "empty", dest) == (
        f"{tmp_path / 'empty'} must hold at least one episode, got 0; the data set is empty"
    )


def test_a_broken_arrow_set_is_refused(tmp_path: Path, minari: Maker) -> None:
    good = tmp_path / "set"
    dest = tmp_path / "out"
    minari(good, "arrow")

    def broken(change: Callable[[Path], object]) -> str:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(good, tmp_path / "bad")
        change(tmp_path / "bad")
        return refused(tmp_path / "bad", dest).replace(str(tmp_path), "")

    def relabel(folder: Path, **changes: Any) -> None:
        metadata = json.loads((folder / "metadata.json").read_text())
        (folder / "metadata.json").write_text(json.dumps({**metadata, **changes}))

    def truncate(file: Path) -> None:
        file.write_bytes(file.read_bytes()[:600])

    assert broken(lambda bad: (bad / "1" / "part-0.arrow").unlink()) == (
        "/bad/1 must hold a .arrow file; download the data set again"
    )
    assert (
        broken(lambda bad: (bad / "1" / "metadata.json").write_text('{"id": 1, "total_steps": 5}'))
        == f"/bad/1 must have 6 rows for 5 steps, got 2; {AGAIN}"
    )
    assert broken(lambda bad: relabel(bad, data_format="lance")) == (
        "/bad/metadata.json: data_format must be one of hdf5, arrow, parquet, got 'lance'; "
        "convert it with Minari, or download it in one of these formats"
    )
    assert broken(lambda bad: shutil.rmtree(bad / "0")) == f"/bad {TOO_FEW}"
    error = broken(lambda bad: truncate(bad / "2" / "part-0.arrow"))
    assert error.startswith("/bad/2/part-0.arrow must be a readable arrow file, got ")
    space = '{"type": "Box", "dtype": "float64", "shape": [3], "low": [0, 0, 0], "high": [1, 1, 1]}'
    assert broken(lambda bad: relabel(bad, observation_space=space)) == (
        "/bad/0: observations must have rows of shape [3] as in the space, got [2]; leave it out "
        "with --columns"
    )
