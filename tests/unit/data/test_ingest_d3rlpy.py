"""Ingest of d3rlpy's HDF5 files, which d3rlpy wrote."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from ingest_refusals import refused

from deepspeed_gear.cli.main import main
from deepspeed_gear.data.dataset import Dataset

MINI = Path(__file__).parents[2] / "support" / "formats" / "mini_d3rlpy"


@pytest.mark.parametrize("name", ["arrays", "tuples", "first"])
def test_the_transitions_are_those_of_d3rlpy(tmp_path: Path, name: str) -> None:
    """d3rlpy read the transitions; support/formats/make_d3rlpy.py wrote both files.

    An episode that does not terminate has a transition less than rows.
    """
    assert main(["ingest", str(MINI / f"{name}.h5"), str(tmp_path / "out"), "--quiet"]) == 0
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.source["sources"][0]["version"] == (1 if name == "first" else "2.1")
    parts = [".0", ".1"] if name == "tuples" else [""]
    with np.load(MINI / "transitions.npz") as expected:
        for number in range(4):
            trajectory = dataset.trajectory(number)
            read = {
                key.split("/")[2]: expected[key]
                for key in expected
                if key.startswith(f"{name}/{number}/")
            }
            terminal = read["terminal"].reshape(-1) != 0
            assert trajectory["terminated"].tolist() == terminal.tolist()
            assert trajectory["truncated"][-1] == (not terminal[-1])
            np.testing.assert_array_equal(trajectory["action"], read["action"])
            np.testing.assert_array_equal(trajectory["reward"], read["reward"].reshape(-1))
            for part in parts:
                rows = trajectory[f"observation{part}"]
                assert rows.dtype == read[f"observation{part}"].dtype
                np.testing.assert_array_equal(rows[:-1], read[f"observation{part}"])
                after = read[f"next_observation{part}"]
                np.testing.assert_array_equal(rows[1:][~terminal], after[~terminal])
    assert len(dataset) == 4


def _set(name: str, value: Any) -> Callable[[h5py.File], None]:
    def apply(file: h5py.File) -> None:
        del file[name]
        if value is not None:
            file[name] = value

    return apply


BROKEN: list[tuple[Callable[[h5py.File], None], str]] = [
    (_set("version", "2.0"), "version must be 2.1 or later"),
    (_set("version", 2.1), "must be names of arrays, a number and a text"),
    (_set("num_episodes", [[1]]), "must be names of arrays, a number and a text"),
    (_set("num_episodes", 5), "observations_4 must be in the file, which states 5 episodes"),
    (_set("num_episodes", 0), "must hold at least one step"),
    (_set("columns", [b"observations", b"actions", b"reward"]), "reward_0 must be in the file"),
    (_set("actions_2", None), "actions_2 must be in the file, which states 4 episodes"),
    (_set("actions_2", np.zeros((4, 2))), "actions must have 5 rows as rewards has"),
]


@pytest.mark.parametrize(("change", "text"), BROKEN)
def test_broken_files_are_refused(
    tmp_path: Path, change: Callable[[h5py.File], None], text: str
) -> None:
    source = tmp_path / "set.h5"
    shutil.copy(MINI / "arrays.h5", source)
    with h5py.File(source, "r+") as file:
        change(file)
    assert text in refused(source, tmp_path / "out")
