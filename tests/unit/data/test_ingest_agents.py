"""Ingest of several agents' arrays, of PettingZoo and in the forms in which others write them."""

from __future__ import annotations

import gc
import json
import pickle
import weakref
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from deepspeed_gear.cli.main import main
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.ingest import ingest, open_source
from deepspeed_gear.data.ingest.agents import last_ends
from deepspeed_gear.errors import DataError

MINI = Path(__file__).parents[2] / "support" / "formats" / "mini_agents.npz"
AGENTS = ("a_1", "a_2", "a_10")


def steps(num_steps: int = 6, agents: tuple[str, ...] = AGENTS) -> dict[str, Any]:
    """Return arrays by key of agents that observe alike; all end in the last step."""
    arrays: dict[str, Any] = {}
    for index, agent in enumerate(agents):
        rows = np.arange(num_steps, dtype=np.float32)
        arrays[f"obs/{agent}"] = np.stack([rows, rows + 100 * index], axis=1)
        arrays[f"actions/{agent}"] = np.full((num_steps, 2), index, np.float32)
        arrays[f"rewards/{agent}"] = rows * index
        arrays[f"terminations/{agent}"] = rows == num_steps - 1
        arrays[f"truncations/{agent}"] = np.zeros(num_steps, bool)
    return arrays


def read(path: Path, arrays: Mapping[str, Any], *options: str) -> Dataset:
    """Ingest arrays from an npz file, by the command line."""
    np.savez(path / "steps.npz", **arrays)
    dest = path / "out"
    assert main(["ingest", str(path / "steps.npz"), str(dest), "--quiet", *options]) == 0
    return Dataset.open(dest)


def test_an_environment_of_pettingzoo(tmp_path: Path) -> None:
    """Agents observe other sizes, so observations stay columns of each; the rest is joined."""
    assert main(["ingest", str(MINI), str(tmp_path / "out"), "--quiet"]) == 0
    data = Dataset.open(tmp_path / "out")
    assert [len(data.trajectory(number)["reward"]) for number in range(2)] == [12, 12]
    names = ["adversary_0", "adversary_1", "agent_0"]
    assert data.source["sources"][0]["agents"] == names
    with np.load(MINI) as arrays:
        for number, rows in enumerate((slice(0, 12), slice(12, 24))):
            trajectory = data.trajectory(number)
            for kind, column in (("actions", "action"), ("rewards", "agent_reward")):
                expected = np.stack([arrays[f"{kind}/{name}"][rows] for name in names], axis=1)
                np.testing.assert_array_equal(trajectory[column], expected)
            mean = np.mean([arrays[f"rewards/{name}"][rows] for name in names], axis=0)
            np.testing.assert_allclose(trajectory["reward"], mean, rtol=1e-15)
            for name in names:
                seen = trajectory[f"observation.{name}"]
                np.testing.assert_array_equal(seen[:-1], arrays[f"observations/{name}"][rows])
                last = arrays[f"next_observations/{name}"][rows][-1]
                np.testing.assert_array_equal(seen[-1], last)
            assert trajectory["truncated"].tolist() == [False] * 11 + [True]
            assert not trajectory["terminated"].any()
            assert trajectory["agent_truncated"].shape == (12, 3)


def test_agents_that_observe_alike_are_one_column(tmp_path: Path) -> None:
    """In the order of their numbers, with the next observations as the last rows."""
    arrays = steps()
    for agent in AGENTS:
        arrays[f"next_obs/{agent}"] = arrays[f"obs/{agent}"] + 1
    data = read(tmp_path, arrays)
    trajectory = data.trajectory(0)
    assert data.source["sources"][0]["agents"] == list(AGENTS)
    assert trajectory["action"][0].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert trajectory["observation"].shape == (7, 3, 2)
    assert trajectory["observation"][2].tolist() == [[2, 2], [2, 102], [2, 202]]
    assert trajectory["observation"][6].tolist() == [[6, 6], [6, 106], [6, 206]]
    assert trajectory["reward"].dtype == np.float32
    assert trajectory["reward"].tolist() == [0, 1, 2, 3, 4, 5]  # the mean of 0, r and 2 r
    assert trajectory["terminated"].tolist() == [False] * 5 + [True]


@pytest.mark.parametrize("form", ["hdf5", "pickle", "pickled episodes"])
def test_other_files(tmp_path: Path, form: str) -> None:
    expected = read(tmp_path, steps()).trajectory(0)
    if form == "hdf5":
        path = tmp_path / "steps.hdf5"
        with h5py.File(path, "w") as file:
            for key, rows in steps().items():
                file[key] = rows
    else:
        path = tmp_path / "steps.pkl"
        nested: dict[str, dict[str, Any]] = {}
        for key, rows in steps().items():
            kind, agent = key.split("/")
            nested.setdefault(kind, {})[agent] = rows
        path.write_bytes(pickle.dumps(nested if form == "pickle" else [nested, nested]))
    options = [] if form == "hdf5" else ["--allow-pickle"]
    assert main(["ingest", str(path), str(tmp_path / form), "--quiet", *options]) == 0
    data = Dataset.open(tmp_path / form)
    assert len(data) == (2 if form == "pickled episodes" else 1)
    for name, rows in expected.items():
        np.testing.assert_array_equal(data.trajectory(len(data) - 1)[name], rows)


def test_an_episode_ends_with_its_last_agent(tmp_path: Path) -> None:
    """Agents end in rows 1, 3 and 2 of the first episode; one of the second is cut off."""
    arrays = steps(7)
    ends = {"a_1": ([1, 5], []), "a_2": ([3, 5], []), "a_10": ([2, 3], [6])}
    for agent, (terminal, cut) in ends.items():
        for kind, rows in (("terminations", terminal), ("truncations", cut)):
            arrays[f"{kind}/{agent}"] = np.isin(np.arange(7), rows)
    data = read(tmp_path, arrays)
    first, second = map(data.trajectory, range(2))
    assert first["terminated"].tolist() == [False, False, False, True]
    assert not first["truncated"].any()
    # The observation after a cut is not known, so its step is left out.
    assert second["terminated"].tolist() == [False, False]
    assert second["truncated"].tolist() == [False, True]
    flags = np.stack([arrays[f"terminations/{agent}"] for agent in AGENTS], axis=1)
    np.testing.assert_array_equal(first["agent_terminated"], flags[:4])


def test_flags_of_the_episode_count_before_those_of_agents(tmp_path: Path) -> None:
    for at, key in enumerate(("terminations/__all__", "dones", "rewards")):
        arrays = steps()
        arrays[key] = np.arange(6) % 3 == 2 if key != "rewards" else np.full(6, 7.0)
        (tmp_path / str(at)).mkdir()
        data = read(tmp_path / str(at), arrays)
        if key == "rewards":
            assert data.trajectory(0)["reward"].tolist() == [7.0] * 6
        else:
            assert len(data) == 2
        assert data.trajectory(0)["agent_reward"].shape[1] == 3


def test_equal_rewards_are_kept_bit_for_bit(tmp_path: Path) -> None:
    arrays = steps()
    for agent in AGENTS:
        arrays[f"rewards/{agent}"] = np.full(6, 0.1, np.float32)
    assert read(tmp_path, arrays).trajectory(0)["reward"].tolist() == [np.float32(0.1)] * 6


def test_a_renamed_kind(tmp_path: Path) -> None:
    arrays = {key.replace("obs/", "seen/"): rows for key, rows in steps().items()}
    data = read(tmp_path, arrays, "--rename", "seen=observation")
    assert data.trajectory(0)["observation"].shape == (7, 3, 2)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("obs/a_2", None, "obs/a_2 must be in the source, as the arrays of its other agents are"),
        ("actions/a_1", None, "actions/a_1 must be in the source"),
        ("terminations/a_10", None, "terminations/a_10 must be in the source"),
        ("rewards/a_2", np.zeros((6, 3)), "rewards/a_2 must be one value per step"),
        ("rewards/a_1", np.zeros(5), "must have as many rows as those of the other agents"),
        ("terminations/a_1", np.full(6, 2.5), "terminations"),
    ],
)
def test_what_is_missing_or_wrong_is_refused(
    tmp_path: Path, key: str, value: Any, text: str
) -> None:
    arrays = steps()
    arrays[key] = value
    if value is None:
        del arrays[key]
    np.savez(tmp_path / "steps.npz", **arrays)
    with pytest.raises(DataError, match=text):
        ingest(tmp_path / "steps.npz", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_trajectories_of_other_agents_are_refused(tmp_path: Path) -> None:
    nested = []
    for agents in (AGENTS, ("a_1", "b", "a_10")):
        one: dict[str, dict[str, Any]] = {}
        for key, rows in steps(agents=agents).items():
            kind, agent = key.split("/")
            one.setdefault(kind, {})[agent] = rows
        nested.append(one)
    path = tmp_path / "steps.pkl"
    path.write_bytes(pickle.dumps(nested))
    with pytest.raises(DataError, match="trajectory 1 must have the agents a_1, a_2, a_10"):
        open_source(path, allow_pickle=True)


def test_flags_that_stay_set_end_an_agent_once() -> None:
    flags = np.array([[1, 0], [1, 0], [1, 1], [0, 0], [0, 1], [1, 1]], bool)
    ends = last_ends({"terminated": flags, "truncated": np.zeros_like(flags)})
    assert np.flatnonzero(ends["terminated"]).tolist() == [2, 5]
    assert not ends["truncated"].any()


def test_an_end_of_the_episode_is_one_of_every_agent(tmp_path: Path) -> None:
    """Agent a_1 ends before a time limit of the episode, and must end again in the next one."""
    arrays = steps(8)
    for agent in AGENTS:
        del arrays[f"truncations/{agent}"]
        arrays[f"terminations/{agent}"] = np.zeros(8, bool)
    arrays["terminations/a_1"][[1, 7]] = True
    arrays["terminations/a_2"][[6]] = True
    arrays["terminations/a_10"][[5]] = True
    arrays["truncations"] = np.arange(8) == 3
    data = read(tmp_path, {**arrays, **{f"next_obs/{a}": arrays[f"obs/{a}"] + 1 for a in AGENTS}})
    assert data.lengths.tolist() == [4, 4]
    assert data.trajectory(1)["terminated"].tolist() == [False] * 3 + [True]


def table(num_steps: int, ends: Mapping[str, list[int]]) -> dict[str, Any]:
    """Return columns of steps by agent, for two values that each one observes."""
    columns: dict[str, Any] = {}
    for index, (agent, rows) in enumerate(ends.items()):
        numbers = np.arange(num_steps)
        columns[f"observations/{agent}"] = [[float(n), float(index)] for n in numbers]
        columns[f"actions/{agent}"] = (numbers % 3 + index).tolist()
        columns[f"rewards/{agent}"] = (numbers * float(index)).tolist()
        columns[f"terminations/{agent}"] = np.isin(numbers, rows).tolist()
        columns[f"note/{agent}"] = [f"{agent} at {n}" for n in numbers]
    return columns


def write_table(path: Path, columns: dict[str, Any]) -> Path:
    """Write a table by the suffix of its name."""
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    arrow = pytest.importorskip("pyarrow")
    if path.name.startswith("nested"):
        rows = [_nested(row) for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".csv":
        import_module("pyarrow.csv").write_csv(arrow.Table.from_pylist(rows), path)
    elif path.suffix == ".arrow":
        with arrow.ipc.new_file(str(path), arrow.Table.from_pylist(rows).schema) as writer:
            writer.write_table(arrow.Table.from_pylist(rows))
    else:
        import_module("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    return path


def _nested(row: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in row.items():
        head, _, agent = name.partition("/")
        if agent:
            nested.setdefault(head, {})[agent] = value
        else:
            nested[head] = value
    return nested


def all_end(row: int) -> dict[str, list[int]]:
    return {agent: [row] for agent in AGENTS}


ENDS = {"a_1": [3, 30, 41], "a_2": [20, 31, 45], "a_10": [8, 25, 40]}  # episodes end at 20, 31, 45
TABLES = ["t.parquet", "t.arrow", "t.jsonl", "t.csv", "nested.parquet", "nested.jsonl"]


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize("name", TABLES)
def test_steps_of_agents_in_tables(tmp_path: Path, name: str, has_ids: bool) -> None:
    """The first block of a table has 16 rows, so an episode goes on in the next one."""
    columns = table(46, ENDS)
    if name == "t.csv":
        columns = {key: of for key, of in columns.items() if "observations" not in key}
    if has_ids:
        columns["episode"] = [0] * 21 + [1] * 11 + [2] * 14
    source = write_table(tmp_path / name, columns)
    assert main(["ingest", str(source), str(tmp_path / "out")]) == 0
    data = Dataset.open(tmp_path / "out")
    assert data.lengths.tolist() == [21, 11, 14]
    assert data.source["sources"][0]["agents"] == list(AGENTS)
    low = 0
    for number, length in enumerate(data.lengths.tolist()):
        one = data.trajectory(number)
        rows = slice(low, low + length)
        flags = np.stack([columns[f"terminations/{agent}"][rows] for agent in AGENTS], axis=1)
        np.testing.assert_array_equal(one["agent_terminated"], flags)
        rewards = np.stack([columns[f"rewards/{agent}"][rows] for agent in AGENTS], axis=1)
        np.testing.assert_array_equal(one["agent_reward"], rewards)
        np.testing.assert_allclose(one["reward"], rewards.mean(axis=1), rtol=1e-15)
        assert one["terminated"].tolist() == [False] * (length - 1) + [True]
        actions = np.stack([columns[f"actions/{agent}"][rows] for agent in AGENTS], axis=1)
        np.testing.assert_array_equal(one["action"], actions)
        if name != "t.csv":
            assert one["observation"].shape == (length, 3, 2)
            assert one["observation"][1].tolist() == [[low + 1.0, index] for index in range(3)]
        assert one["note.a_2"][1] == f"a_2 at {low + 1}"
        low += length


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "t.jsonl", "nested.jsonl"])
def test_episodes_of_agents_in_tables(tmp_path: Path, name: str) -> None:
    """A row is an episode; agents that observe other sizes keep columns of their own."""
    rows = [table(5, all_end(4)), table(3, all_end(2))]
    for row in rows:
        row["observations/a_2"] = [[*one, 0.0] for one in row["observations/a_2"]]
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    source = write_table(tmp_path / name, columns)
    data = ingest([source], tmp_path / "out", columns=["agent_*"])
    assert data.lengths.tolist() == [5, 3]
    assert data.trajectory(1)["action"].tolist() == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert data.trajectory(1)["observation.a_2"].shape == (3, 3)
    assert data.trajectory(1)["observation.a_10"].shape == (3, 2)
    assert data.trajectory(0)["terminated"].tolist() == [False] * 4 + [True]
    names = {"agent_reward", "agent_terminated", "reward", "terminated", "truncated", "action"}
    assert {*data.schema.names} - {"length", "return"} >= names
    assert not any(name.startswith("note") for name in data.schema.names)


def test_tables_of_agents_that_are_refused_or_have_none(tmp_path: Path) -> None:
    columns = table(6, all_end(5))
    columns["rewards/a_2"][2] = None
    with pytest.raises(DataError, match=r"rewards\.a_2\[2\] must not be null; store 0, or false"):
        ingest([write_table(tmp_path / "t.jsonl", columns)], tmp_path / "out")
    del columns["rewards/a_2"]
    with pytest.raises(DataError, match="rewards/a_2 must be in the source, as the arrays of its"):
        ingest([write_table(tmp_path / "t.jsonl", columns)], tmp_path / "out")
    terms = {"reward": [1.0, 2.0], "reward.speed": [3.0, 4.0], "action": [0, 1], "done": [0, 1]}
    data = ingest([write_table(tmp_path / "t.parquet", terms)], tmp_path / "out")
    assert data.trajectory(0)["reward"].tolist() == [1.0, 2.0]
    assert data.trajectory(0)["reward.speed"].tolist() == [3.0, 4.0]
    assert "agent_reward" not in data.schema


def test_a_reader_that_is_dropped_closes_its_file(tmp_path: Path) -> None:
    """By reference count: a cycle of objects would keep the file open until a collection."""
    with h5py.File(tmp_path / "steps.hdf5", "w") as file:
        for key, rows in steps().items():
            file[key] = rows
    gc.disable()
    try:
        reader = weakref.ref(open_source(tmp_path / "steps.hdf5"))
        assert reader() is None
    finally:
        gc.enable()
