"""Ingest of arrays of steps: robomimic, and D4RL without all flags."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from deepspeed_gear.data.ingest import ingest, open_source
from deepspeed_gear.errors import DataError

Arrays = dict[str, Any]


def read(path: Path, **options: Any) -> list[Arrays]:
    """Return the episodes that a source is read as."""
    with open_source(path, **options) as reader:
        return [arrays for _, arrays in reader.episodes()]


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        open_source(path, **options)
    return str(caught.value).replace(f"{path}", "FILE")


def test_d4rl_without_timeouts(tmp_path: Path, d4rl: Callable[..., Any]) -> None:
    d4rl(tmp_path / "a.hdf5", (5, 2, 3), ("terminals", "terminals", ""), timeouts=None)
    flags = [
        (len(e["reward"]), e["terminated"][-1], e["truncated"][-1])
        for e in read(tmp_path / "a.hdf5", episode_length=2)
    ]
    assert flags == [(2, 0, 1), (2, 0, 1), (1, 1, 0), (2, 1, 0), (2, 0, 1), (1, 0, 1)]
    assert (
        refusal(tmp_path / "a.hdf5", mask="x") == "FILE: --mask must be for the format robomimic, got 'd4rl'"
    )


def test_robomimic(tmp_path: Path) -> None:
    """Demonstrations in numerical order; `dones` inside end nothing; observations of several parts."""
    path, rng = tmp_path / "a.hdf5", np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file.create_group("data").attrs["env_args"] = json.dumps({"env_name": "Lift"})
        for number, length in ((0, 4), (2, 1), (10, 7)):
            states, dones = rng.normal(size=(length + 1, 3)), np.arange(length) >= length - 2
            parts = {
                "actions": rng.normal(size=(length, 2)),
                "dones": dones.astype(int),
                "rewards": dones * 1.0,
            }
            parts |= {"obs/pos": states[:-1], "next_obs/pos": states[1:], "states": states[:-1]}
            parts |= {f"{key}/image": np.full((length, 4, 4, 3), 9, np.uint8) for key in ("obs", "next_obs")}
            for key, array in parts.items():
                file[f"data/demo_{number}/{key}"] = array
        file["mask/train"], file["mask/gone"] = np.array([b"demo_10", b"demo_0"]), np.array([b"demo_7"])
    for mask, numbers in ((None, (0, 2, 10)), ("train", (0, 10))):
        dataset = ingest([open_source(path, mask=mask)], tmp_path / f"{mask}")
        source = dataset.source["sources"][0]
        assert [source[key] for key in ("env_args", "masks", "mask")] == [
            {"env_name": "Lift"},
            ["gone", "train"],
            mask,
        ]
        assert "dones before the last step of 2 demonstrations end nothing" in source["notes"]
        with h5py.File(path) as file:
            for i, number in enumerate(numbers):
                stored, group = dataset.trajectory(i), file[f"data/demo_{number}"]
                rows = [*group["obs/pos"], group["next_obs/pos"][-1]]
                np.testing.assert_array_equal(stored["observation.pos"], rows)
                np.testing.assert_array_equal(stored["action"], group["actions"])
                assert stored["observation.image"].shape == (len(rows), 4, 4, 3)
                assert stored["terminated"].tolist() == [False] * (len(rows) - 2) + [True]
    assert "--mask must be a filter of the file, got 'trian'; did you mean" in refusal(path, mask="trian")
    assert "mask/gone must name demonstrations of the file, got ['demo_7']" in refusal(path, mask="gone")
