"""LeRobot data sets whose metadata are wrong, or junk: each error names its file and key."""

import contextlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lerobot_sets import FRONT, LENGTHS, TASKS, change_metadata, some_columns, write_set

from deepspeed_gear.cli.main import main
from deepspeed_gear.data.ingest import open_source
from deepspeed_gear.errors import DataError

WRONG_PATH = (
    "info.json: data_path must be a path below the folder, with episode_chunk, episode_index in "
    "braces"
)
ACTION = "features/action"
MISTYPED: list[tuple[Callable[[Path], Any], str]] = [
    *(
        (change_metadata("data_path", value), WRONG_PATH)
        for value in (None, 3, "", "\0", "\ud800", "d" * 5000, "d" * 300)
    ),
    *(
        (change_metadata("data_path", value), WRONG_PATH)
        for value in ("{}", "{0}", "{video_key}", "/etc/passwd", ["x"])
    ),
    *(
        (
            change_metadata("chunks_size", value),
            "info.json: chunks_size must be a whole number of at least 1",
        )
        for value in ("abc", [1], {}, float("nan"), 1e-300, 0, -1, True, 10**400)
    ),
    *(
        (
            change_metadata("total_episodes", value),
            "info.json: total_episodes must be a whole number of at least 0",
        )
        for value in (None, True, "5", 5.0, float("inf"), -5)
    ),
    *(
        (change_metadata("fps", value), "info.json: fps must be a number above 0, or null")
        for value in (float("nan"), float("inf"), 10**400, "10", 0, -1, [])
    ),
    *(
        (change_metadata("robot_type", value), "info.json: robot_type must be a text, or null")
        for value in (3, [], "\0")
    ),
    *(
        (change_metadata("codebase_version", value), "info.json: codebase_version must be one of")
        for value in (None, 2, ["v2.1"], {}, "v2.1\0")
    ),
    (
        change_metadata("features", None),
        "info.json: features must be an object of values by key, got 'NoneType'",
    ),
    (change_metadata("features", [1]), "info.json: features must be an object"),
    (change_metadata("action", 3, "features"), "info.json: features: action must be an object"),
    (
        change_metadata("", {"dtype": "int64", "shape": [1]}, "features"),
        "info.json: features must be names of",
    ),
    (
        change_metadata("..", {"dtype": "int64", "shape": [1]}, "features"),
        "info.json: features: .. must be a feature that",
    ),
    (
        change_metadata("a\0", {"dtype": "int64", "shape": [1]}, "features"),
        "info.json: features must be names of",
    ),
    (
        change_metadata("terminated", {"dtype": "bool", "shape": [1]}, "features"),
        "terminated, 2 times",
    ),
    *(
        (
            change_metadata("shape", value, ACTION),
            "info.json: features: action: shape must be a list of whole numbers",
        )
        for value in (None, "12", 4, [10**30], [float("inf")], [-1], [1.5], [[4]], {})
    ),
    *(
        (change_metadata("dtype", value, ACTION), "info.json: features: action")
        for value in (None, 3, "S1000000000", "f4,f4", "object", "floaty", ["f4"], "(2,)f4")
    ),
    (
        change_metadata("names", 3, ACTION),
        "info.json: features: action: names must be a list or an object",
    ),
    (
        lambda root: (
            change_metadata("v", {"dtype": "video", "shape": [8, 8, 3]}, "features")(root),
            change_metadata("video_path", "v/{video_key:03d}.mp4")(root),
        ),
        "info.json: video_path must be a path below the folder, with video_key, episode_chunk",
    ),
]
EPISODE = {"episode_index": 0, "length": 1, "tasks": TASKS}


def _first_line(name: str, row: Any) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        path = root / "meta" / name
        path.write_text("\n".join([json.dumps(row), *path.read_text().splitlines()[1:]]))

    return edit


MISTYPED += [
    (
        _first_line("episodes.jsonl", row),
        f"episodes.jsonl: line 1{text}",
    )
    for row, text in [
        ([], " must be an object of values by key, got 'list'"),
        ({**EPISODE, "episode_index": "0"}, ": episode_index must be a whole number"),
        ({**EPISODE, "episode_index": None}, ": episode_index must be a whole number"),
        ({**EPISODE, "length": float("inf")}, ": length must be a whole number"),
        ({**EPISODE, "length": -1}, ": length must be a whole number"),
        ({**EPISODE, "tasks": 5}, ": tasks must be a list of texts"),
        ({**EPISODE, "tasks": [5]}, ": tasks must be a list of texts"),
        ({**EPISODE, "tasks": ["\ud800"]}, ": tasks must be a list of texts"),
    ]
]
MISTYPED += [
    (
        _first_line("tasks.jsonl", row),
        f"tasks.jsonl: line 1{text}",
    )
    for row, text in [
        ({"task_index": "0", "task": 3}, ": task_index must be a whole number"),
        ({"task_index": 0}, " must have a task_index and a text"),
        ({"task_index": 0, "task": "\ud800"}, " must have a task_index and a text"),
        (3, " must be an object"),
    ]
]


def test_mistyped_metadata_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each names its file and key, also from the command line."""
    write_set(tmp_path / "good", "v2.1", LENGTHS, **some_columns())
    shutil.copytree(tmp_path / "good", tmp_path / "set")
    for number, (edit, text) in enumerate(MISTYPED):
        shutil.copytree(tmp_path / "good" / "meta", tmp_path / "set" / "meta", dirs_exist_ok=True)
        edit(tmp_path / "set")
        with pytest.raises(DataError) as caught:
            open_source(tmp_path / "set")
        assert text in str(caught.value), number
        assert len(str(caught.value)) < 1000
        if number % 8 == 0:
            assert main(["ingest", str(tmp_path / "set"), str(tmp_path / "out"), "--quiet"]) == 2
            assert text in capsys.readouterr().err


JUNK = [
    None,
    True,
    -1,
    0,
    3,
    2**63,
    10**400,
    0.5,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "abc",
    "\0",
    "\ud800",
]
JUNK += [
    "x" * 5000,
    "{video_key:03d}",
    "{episode_index}",
    "../x",
    [],
    [1],
    [[[]]],
    [None],
    {},
    {"a": 1},
    {"": [1]},
]


def _places(value: Any, *path: Any) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(place for key, one in items for place in _places(one, *path, key))]


def _replaced(value: Any, path: Sequence[Any], junk: Any) -> Any:
    if not path:
        return junk
    items = value.items() if isinstance(value, dict) else enumerate(value)
    changed = {key: _replaced(one, path[1:], junk) if key == path[0] else one for key, one in items}
    return changed if isinstance(value, dict) else list(changed.values())


@pytest.fixture(scope="module")
def whole_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lerobot") / "set"
    write_set(root, "v2.1", LENGTHS[:2], **{key: rows[:8] for key, rows in some_columns().items()})
    change_metadata(
        FRONT,
        {"dtype": "video", "shape": [8, 8, 3], "names": ["height", "width", "channels"]},
        "features",
    )(root)
    change_metadata("video_path", "videos/{video_key}/{episode_index:06d}.mp4")(root)
    change_metadata("fps", 10)(root)
    return root


@given(data=st.data())
def test_any_junk_in_the_metadata_is_a_data_error(whole_set: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["info.json", "episodes.jsonl", "tasks.jsonl"]))
    columns = data.draw(
        st.sampled_from([["observation.state", "task"], None])
    )  # None: with the video
    path = whole_set / "meta" / name
    text = path.read_text()
    first, *others = [text] if name == "info.json" else text.splitlines()
    value = json.loads(first)
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(_places(value)))
        value = _replaced(value, place, data.draw(st.sampled_from(JUNK)))
    try:
        path.write_text("\n".join([json.dumps(value), *others]) + "\n")
        with contextlib.suppress(DataError), open_source(whole_set, columns=columns) as found:
            assert len(list(found.episodes())) == 2
    finally:
        path.write_text(text)
