"""Ingest of what Stable-Baselines3 and imitation save."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepspeed_gear.cli.main import main
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.ingest import ingest, open_source
from deepspeed_gear.errors import DataError

MINI = Path(__file__).parents[2] / "support" / "formats" / "mini_sb3"


def expected(name: str) -> dict[str, Any]:
    with np.load(MINI / "expected.npz") as read:
        return {key.split("/")[1]: read[key] for key in read if key.startswith(f"{name}/")}


def test_a_ring_of_several_environments(tmp_path: Path) -> None:
    """The steps are those that were added last; support/formats/make_sb3.py wrote both."""
    assert main(["ingest", str(MINI / "ring.npz"), str(tmp_path / "out"), "--quiet"]) == 0
    dataset = Dataset.open(tmp_path / "out")
    steps = expected("ring")
    number = 0
    for environment in range(2):
        rows = {key: values[:, environment] for key, values in steps.items()}
        ends = np.flatnonzero(rows["terminated"] | rows["truncated"]) + 1
        low = 0
        for high in sorted({*ends.tolist(), len(rows["action"])}):
            trajectory = dataset.trajectory(number)
            part = {key: values[low:high] for key, values in rows.items()}
            for key in ("action", "reward", "terminated"):
                np.testing.assert_array_equal(trajectory[key], part[key])
            for key in ("position", "target"):
                states = trajectory[f"observation.{key}"]
                np.testing.assert_array_equal(states[:-1], part[f"observation.{key}"])
                np.testing.assert_array_equal(states[-1], part[f"next_observation.{key}"][-1])
            assert trajectory["truncated"][-1] == (not part["terminated"][-1])
            low = high
            number += 1
    assert number == len(dataset)


def test_a_rollout_is_divided_before_first_steps(tmp_path: Path) -> None:
    dataset = ingest([MINI / "rollout.npz"], tmp_path / "out")
    steps = expected("rollout")
    # Episodes of 4 and 2 steps, then of 2, 1 and 3; the last one of each environment is open.
    assert dataset.lengths.tolist() == [4, 1, 2, 1, 2]
    np.testing.assert_array_equal(dataset.trajectory(0)["action"], steps["action"][:4, 0])
    np.testing.assert_array_equal(dataset.trajectory(3)["reward"], steps["reward"][2:3, 1])


@pytest.mark.parametrize("options", [{}, {"allow_pickle": True}])
def test_a_pickled_buffer_is_refused_with_the_line_that_writes_its_arrays(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError) as caught:
        open_source(MINI / "ring.pkl", **options)
    text = str(caught.value)
    assert "must not be a buffer pickled by Stable-Baselines3" in text
    line = text[text.index("b = load_from_pkl") : text.index(", with load_from_pkl")]
    rows = np.arange(10.0).reshape(5, 2, 1)
    buffer = SimpleNamespace(pos=2, size=lambda: 5, observations=rows, n_envs=2)
    monkeypatch.chdir(tmp_path)
    exec(line, {"np": np, "load_from_pkl": lambda _: buffer})
    with np.load(tmp_path / "FILE.npz") as written:
        assert list(written) == ["observations"]
        assert written["observations"][:, 0, 0].tolist() == [4, 6, 8, 0, 2]


def test_a_folder_of_imitation(tmp_path: Path) -> None:
    """imitation 1.0 saves a data set of Hugging Face, with a row for each trajectory."""
    arrow = pytest.importorskip("pyarrow")
    rows = [
        {"obs": [[1.0], [2.0], [3.0]], "acts": [0, 1], "infos": ["{}"] * 2, "terminal": True},
        {"obs": [[4.0], [5.0]], "acts": [1], "infos": ["{}"], "terminal": False},
    ]
    table = arrow.Table.from_pylist([{**row, "rews": [0.5] * len(row["acts"])} for row in rows])
    file = "data-00000-of-00001.arrow"
    with arrow.ipc.new_stream(str(tmp_path / file), table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "dataset_info.json").write_text(json.dumps({"features": {}}))
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": file}]}))
    dataset = ingest([tmp_path], tmp_path / "out")
    first, second = (dataset.trajectory(number) for number in range(2))
    assert first["observation"].tolist() == [[1], [2], [3]]
    assert first["terminated"].tolist() == [False, True]
    assert second["truncated"].tolist() == [True]
    assert (first["return"], second["action"].tolist()) == (1.0, [1])
