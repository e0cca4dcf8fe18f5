"""Ingest of several agents' arrays, of PettingZoo and in the forms in which others write them."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Mapping
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
