"""Ingest by flags of rows (`is_first`, `is_last`, `is_terminal`), and by names of the user."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from gear_support import run_command

from deepspeed_gear import Dataset
from deepspeed_gear.cli import ingest as command
from deepspeed_gear.data.ingest import ingest, open_source
from deepspeed_gear.errors import ConfigError, DataError

LENGTHS = (4, 1, 5, 3)  # rows of the episodes; the third one terminates
FIRST = np.array([0, 4, 5, 10])
LAST = np.array([3, 4, 9, 12])
BOUNDS = [*zip(FIRST, LAST, strict=True)]
NUM_ROWS = 13


def rows_of(place: str) -> dict[str, Any]:
    """Return the arrays of all rows; those with rewards at `place` other than 0: "", "last" or
    "all".
    """
    row = np.arange(NUM_ROWS)
    rewards = np.where(np.isin(row, FIRST), 0, row) if place == "last" else row + 1.0
    rewards = np.where(np.isin(row, LAST), 0, rewards) if not place else rewards
    return {
        "observation": row[:, None] * 1.0,
        "action": -row,
        "reward": rewards * 1.0,
        "extra": row * 2,
        "discount": row + 0.5,
        "is_first": np.isin(row, FIRST),
        "is_last": np.isin(row, LAST),
        "is_terminal": row == LAST[2],
    }


def as_npz(folder: Path, rows: dict[str, Any]) -> Path:
    np.savez(folder / "a.npz", **rows)
    return folder / "a.npz"


def as_steps(folder: Path, rows: dict[str, Any], **more: Any) -> Path:
    columns = {name: array.tolist() for name, array in {**rows, **more}.items()}
    lines = [
        json.dumps(dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder / "a.jsonl"


def as_steps_with_ids(folder: Path, rows: dict[str, Any]) -> Path:
    return as_steps(folder, rows, episode_id=np.repeat([7, 3, 9, 1], LENGTHS))


def as_episodes(folder: Path, rows: dict[str, Any]) -> Path:
    cut = [{name: a[f : z + 1].tolist() for name, a in rows.items()} for f, z in BOUNDS]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, cut)))
    return folder / "a.jsonl"


FORMS = [as_npz, as_steps, as_steps_with_ids, as_episodes]


@pytest.mark.parametrize("write", FORMS)
@pytest.mark.parametrize(
    ("place", "option", "kind"),
    [
        ("", None, "observation"),
        ("all", None, "transition"),
        ("last", "observation", "observation"),
        ("last", "transition", "transition"),
        ("last", "reward", "reward"),
        ("last", "action", "action"),
    ],
)
def test_the_last_row_of_an_episode(
    tmp_path: Path, write: Callable[..., Path], place: str, option: str | None, kind: str
) -> None:
    rows = rows_of(place)
    source = write(tmp_path, rows)
    given = ["--last-step", option] if option else []
    assert run_command(command, str(source), str(tmp_path / "out"), *given) == 0
    dataset = Dataset.open(tmp_path / "out")
    number = 0
    for first, last in zip(FIRST, LAST, strict=True):
        is_terminal = last == LAST[2]
        steps = last - first if kind != "transition" else last + 1 - first
        if kind == "transition" and write is as_npz and not is_terminal:
            steps -= 1  # arrays have T+1 observations, so that the last step is left out
        if not steps:
            continue
        stored = dataset.trajectory(number)
        number += 1
        own = slice(first, first + steps)
        states = rows["observation"][first : last + 1]
        if kind == "transition" and is_terminal and write is as_npz:
            states = np.append(states, states[-1:], axis=0)
        np.testing.assert_array_equal(stored["observation"], states)
        np.testing.assert_array_equal(stored["extra"], rows["extra"][own])
        moved = slice(first + 1, first + 1 + steps)
        acted = moved if kind == "action" else own
        rewarded = moved if kind in ("reward", "action") else own
        np.testing.assert_array_equal(stored["action"], rows["action"][acted])
        np.testing.assert_array_equal(stored["reward"], rows["reward"][rewarded])
        np.testing.assert_array_equal(stored["discount"], rows["discount"][rewarded])
        ends = np.arange(steps) == steps - 1
        np.testing.assert_array_equal(stored["terminated"], ends & is_terminal)
        np.testing.assert_array_equal(stored["truncated"], ends & (not is_terminal))
    assert number == len(dataset)
    notes = dataset.source["sources"][0]["notes"]
    assert any(note.startswith(("the last row", "each row")) for note in notes)
    has_note = any("1 episodes of one row have no step" in note for note in notes)
    assert has_note == (kind != "transition")


@pytest.mark.parametrize("write", FORMS)
def test_rewards_that_allow_two_meanings_are_refused(
    tmp_path: Path, write: Callable[..., Path]
) -> None:
    source = write(tmp_path, rows_of("last"))
    with pytest.raises(DataError, match=r"reward must be 0 in rows with is_last.*--last-step tr"):
        run_command(command, str(source), str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="last_step must be one of transition, observation, rewa"):
        open_source(source, last_step="last")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["a.npz", "a.hdf5"])
def test_rows_of_the_step_before_them_without_flags(tmp_path: Path, name: str) -> None:
    """ExORL and V-D4RL: 5 rows for each episode of 4 steps, and nothing divides them."""
    row = np.arange(10)
    arrays = {"observation": row[:, None] * 1.0, "action": -row[:, None], "reward": row * 1.0}
    source = tmp_path / name
    if name == "a.npz":
        np.savez(source, **arrays, physics=row * 3)
    else:
        with h5py.File(source, "w") as file:
            for key, array in {**arrays, "physics": row * 3}.items():
                file[key] = array
    given = ["--episode-length", "4"]
    with pytest.raises(DataError, match=r"must come with --last-step where .* 5 rows for each epi"):
        run_command(command, str(source), str(tmp_path / "out"), *given)
    given += ["--last-step", "action"]
    assert run_command(command, str(source), str(tmp_path / "out"), *given) == 0
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.lengths.tolist() == [4, 4]
    for number, first in enumerate((0, 5)):
        stored = dataset.trajectory(number)
        assert stored["observation"][:, 0].tolist() == [*range(first, first + 5)]
        assert stored["action"][:, 0].tolist() == [*range(-first - 1, -first - 5, -1)]
        assert stored["reward"].tolist() == [*range(first + 1, first + 5)]
        assert stored["physics"].tolist() == [3 * i for i in range(first, first + 4)]
        assert stored["truncated"].tolist() == [False] * 3 + [True]
        assert not stored["terminated"].any()


def test_flags_of_a_program_without_some_of_them(tmp_path: Path) -> None:
    """`is_first` alone divides rows, and an end without `is_terminal` is of unknown cause."""
    rows = rows_of("")
    for names, terminal in ((("is_first",), []), (("is_first", "is_terminal"), [1])):
        kept = {name: a for name, a in rows.items() if name[:3] != "is_" or name in names}
        steps = [dict(zip(kept, one, strict=True)) for one in zip(*kept.values(), strict=True)]
        data = Dataset.from_iterable(iter(steps), tmp_path / "out", overwrite=True)
        assert data.lengths.tolist() == [3, 4, 2]
        ends = [i for i in range(3) if data.trajectory(i)["terminated"].any()]
        assert ends == terminal


def test_malformed_row_flags(tmp_path: Path) -> None:
    rows = rows_of("")
    source = as_steps_with_ids(tmp_path, {**rows, "is_last": np.isin(np.arange(13), [2, 7, 12])})
    with pytest.raises(DataError, match=r"episode 7: is_last must be set .* got 'row 2 of 4'"):
        open_source(source)
    odd = {**rows, "is_terminal": np.arange(13) == 7}
    with pytest.raises(DataError, match="is_terminal must be set at the last row of an episode"):
        open_source(as_npz(tmp_path, odd))
    with pytest.raises(DataError, match="is_terminal must not be in the source with --episode-len"):
        open_source(as_npz(tmp_path, rows), episode_length=3)
    plain = {name: array for name, array in rows.items() if name[:3] != "is_"}
    ids = np.repeat([7, 3, 9, 1], LENGTHS)
    with pytest.raises(DataError, match="--last-step must be for a source with one of is_first"):
        open_source(as_steps(tmp_path, plain, episode_id=ids), last_step="reward")


ODD = {"observation": "robot_state", "action": "command", "reward": "score", "is_last": "stop"}


@pytest.mark.parametrize("write", FORMS[:2])
def test_names_are_given_before_they_are_judged(tmp_path: Path, write: Callable[..., Path]) -> None:
    """Also by a role, which keeps the column's name, and where names are those of a program."""
    rows = {name: array for name, array in rows_of("all").items() if name != "is_first"}
    expected = ingest([write(tmp_path, rows)], tmp_path / "plain")
    odd = {ODD.get(name, name): array for name, array in rows.items()}
    source = write(tmp_path, odd)
    with pytest.raises(DataError):
        ingest([source], tmp_path / "out")
    renamed = [f"--rename={old}={new}" for new, old in ODD.items()]
    assert run_command(command, str(source), str(tmp_path / "out"), *renamed) == 0
    assert Dataset.open(tmp_path / "out").fingerprint == expected.fingerprint
    roles = {"robot_state": "observation", "command": "action", "score": "reward"}
    flags = {"stop": "is_last"}
    data = ingest([source], tmp_path / "out", rename=flags, role=roles, overwrite=True)
    for new, old in list(ODD.items())[:3]:
        np.testing.assert_array_equal(data.columns[old], expected.columns[new])
        assert data.schema[old].role == new
    assert data.lengths.tolist() == expected.lengths.tolist()


def test_several_observations_by_role_and_flags_by_rename(tmp_path: Path) -> None:
    """A flag of any end is told by its name in the source or by the name that it would have."""
    row = np.arange(6)
    arrays = {"qpos": row * 1.0, "qvel": row * 2.0, "acts": row, "terminals": row % 3 == 2}
    np.savez(tmp_path / "a.npz", **arrays)
    roles = {"q*": "observation"}
    for old in ("terminals", "terminated"):
        data = ingest(
            [tmp_path / "a.npz"],
            tmp_path / "out",
            role=roles,
            rename={old: "truncated"},
            reward="none",
            overwrite=True,
        )
        assert {c.name: c.role for c in data.schema}["qvel"] == "observation"
        assert [data.trajectory(i)["qvel"].tolist() for i in (0, 1)] == [[0, 2, 4], [6, 8, 10]]
        assert data.columns["terminated"].sum() == 0
        assert data.lengths.tolist() == [2, 2]


@pytest.mark.parametrize("write", [as_steps_with_ids, as_episodes])
@pytest.mark.parametrize("flag", ["dones", "is_last"])
def test_the_time_limit_of_a_table(
    tmp_path: Path, write: Callable[..., Path], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags of both causes are terminated with a note, or truncated after N steps."""
    rows = {name: array for name, array in rows_of("all").items() if name[:3] != "is_"}
    rows[flag] = np.isin(np.arange(NUM_ROWS), LAST)
    source = write(tmp_path, rows)
    out = str(tmp_path / "out")
    assert run_command(command, str(source), out) == 0
    assert Dataset.open(out).columns["terminated"].sum() == 4
    assert "do not distinguish a terminal state from a time limit" in capsys.readouterr().err
    given = ["--episode-length", "5", "--overwrite"]
    assert run_command(command, str(source), out, *given) == 0
    dataset = Dataset.open(out)
    assert dataset.lengths.tolist() == list(LENGTHS)
    ends = [dataset.trajectory(i) for i in range(4)]
    assert [bool(one["terminated"][-1]) for one in ends] == [True, True, False, True]
    assert [bool(one["truncated"][-1]) for one in ends] == [False, False, True, False]
    assert "do not distinguish" not in capsys.readouterr().err
    with pytest.raises(DataError, match=r"--episode-length 4 must be at least the steps .* got 5"):
        run_command(command, str(source), out, "--episode-length", "4", "--overwrite")
    named = write(tmp_path, {**rows, "timeouts": rows[flag]})
    with pytest.raises(DataError, match="--episode-length must be for episodes whose only end fl"):
        run_command(command, str(named), out, "--episode-length", "5", "--overwrite")


def test_a_table_without_usual_names_has_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JAT's files: their observations and actions would be columns without a role."""
    row = {"continuous_observations": [[0.0], [1.0]], "continuous_actions": [[2.0], [3.0]]}
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({**row, "rewards": [1.0, 0.5]}))
    assert run_command(command, str(source), str(tmp_path / "out")) == 0
    assert "no column is an observation or an action: --rename" in capsys.readouterr().err
    renamed = [f"--rename=continuous_{name}s={name}" for name in ("observation", "action")]
    roles = [f"--role=continuous_{name}s={name}" for name in ("observation", "action")]
    for given in (renamed, roles):
        target = str(tmp_path / given[0][2:6])
        assert run_command(command, str(source), target, *given) == 0
        assert "no column is" not in capsys.readouterr().err
        used = {column.role for column in Dataset.open(target).schema}
        assert {"observation", "action", "reward"} <= used
