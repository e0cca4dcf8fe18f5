"""Ingest of RLDS, with a stand-in for tensorflow-datasets that has the parts of its interface in
use.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepspeed_gear.data.ingest import ingest
from deepspeed_gear.errors import DataError

Maker = Callable[..., Path]
FORMAT = "rlds_reader:RldsReader"
STEPS = "rlds_reader:RldsStepsReader"


class Steps(list[dict[str, Any]]):
    """Steps of an episode, which come in blocks."""

    def batch(self, size: int) -> list[dict[str, Any]]:
        def stack(values: list[Any]) -> Any:
            if isinstance(values[0], dict):
                return {key: stack([value[key] for value in values]) for key in values[0]}
            return np.stack(values)

        return [stack(self[at : at + size]) for at in range(0, len(self), size)]


class Examples(list[Any]):
    def map(self, function: Callable[[Any], Any]) -> Examples:
        return Examples(map(function, self))


@pytest.fixture
def rlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Make a folder whose splits the stand-in reads; see `make`."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "examples")

    def make(
        kind: str = "tensorflow_datasets.core.features.FeaturesDict", **splits: list[Steps]
    ) -> Path:
        (folder := tmp_path / "set").mkdir()
        features = {"pythonClassName": kind, "featuresDict": {"features": {"steps": {}}}}
        (folder / "features.json").write_text(json.dumps(features))
        (folder / "dataset_info.json").write_text("{}")
        builder = SimpleNamespace(
            info=SimpleNamespace(full_name="mini/1.0.0", splits=dict.fromkeys(splits)),
            as_dataset=lambda split, **_: Examples({"steps": episode} for episode in splits[split]),
        )
        tf = ModuleType("tensorflow")
        tfds = ModuleType("tensorflow_datasets")
        names = {
            "builder_from_directory": lambda path: builder,
            "as_numpy": iter,
            "ReadConfig": dict,
        }
        vars(tfds).update(names, core=SimpleNamespace(DatasetNotFoundError=KeyError))
        vars(tf).update(errors=SimpleNamespace(OpError=RuntimeError))
        monkeypatch.setitem(sys.modules, "tensorflow", tf)
        monkeypatch.setitem(sys.modules, "tensorflow_datasets", tfds)
        return folder

    return make


def steps_of(length: int, is_terminal: bool = True, last_reward: float = 0.0) -> Steps:
    rng = np.random.default_rng(length)
    last = length - 1
    return Steps(
        {
            "observation": {
                "state": rng.standard_normal(3).astype(np.float32),
                "map": rng.integers(9, size=(2, 2)),
            },
            "action": rng.standard_normal(2),
            "reward": np.float32(last_reward if step == last else rng.standard_normal()),
            "is_first": np.bool_(step == 0),
            "is_last": np.bool_(step == last),
            "is_terminal": np.bool_(is_terminal and step == last),
            "language_instruction": np.array(b"lift", object),
        }
        for step in range(length)
    )


def test_the_last_step_is_the_last_observation(
    rlds: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlds_reader._BLOCK_STEPS", 7)
    episodes = [steps_of(length, length % 2 == 0) for length in (2, 33, 1, 8, 7)]
    dataset = ingest([rlds(train=episodes[:3], val=episodes[3:])], tmp_path / "out", format=FORMAT)
    assert dataset.lengths.tolist() == [1, 32, 7, 6]
    for number, steps in enumerate(episodes[:2] + episodes[3:]):
        read = dataset.trajectory(number)
        last = len(steps) - 2
        for key in ("state", "map"):
            expected = np.stack([step["observation"][key] for step in steps])
            np.testing.assert_array_equal(read[f"observation.{key}"], expected)
        for key in ("action", "reward"):
            np.testing.assert_array_equal(read[key], np.stack([step[key] for step in steps[:-1]]))
        assert np.flatnonzero(read["terminated"]).tolist() == [last] * (len(steps) % 2 == 0)
        assert np.flatnonzero(read["truncated"]).tolist() == [last] * (len(steps) % 2)
    assert dataset.source["sources"][0]["notes"] == [
        "language_instruction is text per step, which no column holds: left out",
        "train episode 2 has no action: left out",
    ]


def test_a_reward_at_the_last_step(rlds: Maker, tmp_path: Path) -> None:
    """RLDS gives it no meaning, but many robot data sets do: it is never dropped unseen."""
    source = rlds(train=[steps_of(5, last_reward=1.0)])
    with pytest.raises(
        DataError, match=r"train episode 0: reward must be 0 at the last step.*RldsStepsReader"
    ):
        ingest([source], tmp_path / "out", format=FORMAT)
    dataset = ingest([source], tmp_path / "out", format=STEPS)
    assert dataset.schema["observation.state"].rows == "T"
    assert dataset.columns["reward"][-1] == 1.0
    assert dataset.columns["terminated"].tolist() == [False] * 4 + [True]


NO_LAST = Steps(
    {key: value for key, value in step.items() if key != "is_last"} for step in steps_of(3)
)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"train": [Steps(steps_of(3) + steps_of(4))]},
            "is_first, is_last must be set at the first and",
        ),
        ({"train": [NO_LAST]}, "is_last must be in every step"),
        ({"train": []}, "must hold at least one episode, got 0"),
        ({"kind": "antigravity.X"}, "must be a class of tensorflow_datasets, got 'antigravity.X'"),
    ],
)
def test_broken_sets_are_refused(
    rlds: Maker, tmp_path: Path, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(DataError) as caught:
        ingest([rlds(**given)], tmp_path / "out", format=FORMAT)
    assert text in str(caught.value)
