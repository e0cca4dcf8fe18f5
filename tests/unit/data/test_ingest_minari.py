"""Ingest of what the minari package writes: HDF5, Arrow, Parquet; dict, tuple and image spaces."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from deepspeed_gear.data.ingest import ingest
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column

Maker = Callable[..., Any]
FORMS = ("hdf5", "arrow", "parquet")


@pytest.mark.parametrize("form", FORMS)
def test_every_value_is_kept(tmp_path: Path, minari: Maker, form: str) -> None:
    """In numerical order: episode 10 comes after episode 9."""
    buffers = minari(tmp_path / "set" / "data", form, lengths=range(1, 13))
    dataset = ingest([tmp_path / "set"], tmp_path / "out")
    assert [(c.name, c.dtype, c.shape, c.rows) for c in dataset.schema] == [
        ("observation", "float64", (2,), "T+1"),
        ("action", "int64", (), "T"),
        ("reward", "float64", (), "T"),
        ("terminated", "bool", (), "T"),
        ("truncated", "bool", (), "T"),
        ("episode_id", "int64", (), "1"),
        ("seed", "int64", (), "1"),
        ("return", "float64", (), "1"),
        ("length", "int64", (), "1"),
    ]
    assert dataset.lengths.tolist() == list(range(1, 13))
    columns = {"observation": "observations", "action": "actions", "reward": "rewards"}
    columns |= {"terminated": "terminations", "truncated": "truncations"}
    for i, buffer in enumerate(buffers):
        trajectory = dataset.trajectory(i)
        for column, part in columns.items():
            np.testing.assert_array_equal(trajectory[column], getattr(buffer, part))
        assert trajectory["return"] == np.sum(buffer.rewards)
        assert (trajectory["episode_id"], trajectory["seed"], trajectory["length"]) == (
            i,
            7 + i,
            len(buffer),
        )


def nested_spaces() -> tuple[Any, Any]:
    from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

    inner = Tuple((Discrete(4), *(Box(-1, 1, (n,), np.float32) for n in range(1, 11))))
    observation = Dict(
        {"pos": Box(-1, 1, (2, 3), np.float32), "pair": inner, "bits": MultiBinary([2, 2])}
    )
    return observation, Tuple((Discrete(3), MultiDiscrete([3, 4])))


def nested(length: int) -> dict[str, Any]:
    random = np.random.default_rng(length)
    rows = length + 1
    vectors = (random.random((rows, n), np.float32) for n in range(1, 11))
    return {
        "pos": random.random((rows, 2, 3), np.float32),
        "pair": (random.integers(0, 4, rows), *vectors),
        "bits": random.integers(0, 2, (rows, 2, 2)).astype(np.int8),
    }


def nested_actions(length: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(length)
    return random.integers(0, 3, length), random.integers(0, 3, (length, 2))


@pytest.mark.parametrize("form", FORMS)
def test_nested_spaces_become_columns(tmp_path: Path, minari: Maker, form: str) -> None:
    minari(
        tmp_path / "set", form, spaces=nested_spaces(), observations=nested, actions=nested_actions
    )
    dataset = ingest([tmp_path / "set"], tmp_path / "out")
    observations = [c for c in dataset.schema if c.role == "observation"]
    assert [(c.name, c.dtype, c.shape) for c in observations] == [
        ("observation.bits", "int8", (2, 2)),
        ("observation.pair.0", "int64", ()),
        *((f"observation.pair.{n}", "float32", (n,)) for n in range(1, 11)),
        ("observation.pos", "float32", (2, 3)),
    ]
    assert {c.rows for c in observations} == {"T+1"}
    actions = [c for c in dataset.schema if c.role == "action"]
    assert [(c.name, c.dtype, c.shape) for c in actions] == [
        ("action.0", "int64", ()),
        ("action.1", "int64", (2,)),
    ]
    for i, length in enumerate((3, 1, 4)):
        trajectory = dataset.trajectory(i)
        wanted = nested(length)
        np.testing.assert_array_equal(trajectory["observation.pos"], wanted["pos"])
        np.testing.assert_array_equal(trajectory["observation.bits"], wanted["bits"])
        for n, values in enumerate(wanted["pair"]):
            np.testing.assert_array_equal(trajectory[f"observation.pair.{n}"], values)
        for n, values in enumerate(nested_actions(length)):
            np.testing.assert_array_equal(trajectory[f"action.{n}"], values)


def test_columns_are_chosen_by_group(tmp_path: Path, minari: Maker) -> None:
    def infos(length: int) -> dict[str, Any]:
        return {"a": np.arange(length + 1.0), "b": {"c": np.ones(length + 1)}}

    parts = {"observations": nested, "actions": nested_actions, "infos": infos}
    minari(tmp_path / "set", spaces=nested_spaces(), **parts)

    def names(*columns: str) -> list[str]:
        dataset = ingest([tmp_path / "set"], tmp_path / "out", columns=columns, overwrite=True)
        kept = (c.name for c in dataset.schema if c.role in ("observation", "action", "other"))
        return [name for name in kept if not name.startswith("observation.pair")]

    actions = ["action.0", "action.1"]
    observations = ["observation.bits", "observation.pos"]
    assert names("observation.pos") == ["observation.pos", *actions]
    assert names("infos.b.*", "seed") == [*observations, *actions, "infos.b.c", "seed"]
    assert names("action.0", "observation.bits") == ["observation.bits", "action.0"]
    assert names() == [*observations, *actions]


@pytest.mark.parametrize("form", FORMS)
def test_infos_have_their_own_length(tmp_path: Path, minari: Maker, form: str) -> None:
    def make(length: int) -> dict[str, Any]:
        rows = length + 1
        return {"x": np.arange(float(rows)), "y": {"z": np.arange(2 * rows).reshape(rows, 2)}}

    minari(tmp_path / "set", form, infos=make)
    dataset = ingest([tmp_path / "set"], tmp_path / "out")
    assert dataset.schema["infos.x"] == Column("infos.x", "float64", (), "other", "T+1")
    assert dataset.schema["infos.y.z"] == Column("infos.y.z", "int64", (2,), "other", "T+1")
    np.testing.assert_array_equal(dataset.trajectory(2)["infos.y.z"], np.arange(10).reshape(5, 2))
    if form == "hdf5":
        with h5py.File(tmp_path / "set" / "main_data.hdf5", "a") as file:
            for number in range(3):
                values = file[f"episode_{number}/infos/x"][:-1]
                del file[f"episode_{number}/infos/x"]
                file[f"episode_{number}/infos/x"] = values
        dataset = ingest([tmp_path / "set"], tmp_path / "out", overwrite=True)
        assert dataset.schema["infos.x"].rows == "T"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(32, 40, 3), (33, 32)])
def test_images_are_decoded(
    tmp_path: Path, minari: Maker, form: str, shape: tuple[int, ...]
) -> None:
    import gymnasium

    def frames(length: int) -> np.ndarray:
        ramp = np.linspace(0, 200, int(np.prod(shape))).reshape(shape)
        return np.stack([ramp + 5 * i for i in range(length + 1)]).astype(np.uint8)

    spaces = (gymnasium.spaces.Box(0, 255, shape, np.uint8), gymnasium.spaces.Discrete(3))
    minari(tmp_path / "set", form, spaces=spaces, observations=frames)
    dataset = ingest([tmp_path / "set"], tmp_path / "out")
    assert dataset.schema["observation"] == Column(
        "observation", "uint8", shape, "observation", "T+1"
    )
    found = dataset.trajectory(2)["observation"].astype(int)
    assert np.abs(found - frames(4)).max() < 16  # JPEG loses a little


def test_seeds_keep_64_bits_and_go_where_some_are_missing(tmp_path: Path, minari: Maker) -> None:
    seeds = iter([2**64 - 1, 2**63, 5])
    minari(tmp_path / "set", seed=lambda _: next(seeds))
    dataset = ingest([tmp_path / "set"], tmp_path / "out")
    assert dataset.columns["seed"].view(np.uint64).tolist() == [2**64 - 1, 2**63, 5]
    with h5py.File(tmp_path / "set" / "main_data.hdf5", "a") as file:
        del file["episode_1"].attrs["seed"]
    dataset = ingest([tmp_path / "set"], tmp_path / "out", overwrite=True)
    assert "seed" not in dataset.schema
    assert dataset.source["sources"][0]["notes"] == [
        "seed is known for 2 of 3 episodes only: left out"
    ]


def test_a_file_alone_is_enough_and_an_episode_without_a_flag_is_truncated(
    tmp_path: Path, minari: Maker
) -> None:
    minari(tmp_path / "set", terminations=lambda n: [False] * n, truncations=lambda n: [False] * n)
    shutil.copy(tmp_path / "set" / "main_data.hdf5", tmp_path / "alone.hdf5")
    (tmp_path / "metadata.json").write_text(json.dumps({"of": "something else"}))
    alone = ingest([tmp_path / "alone.hdf5"], tmp_path / "alone")
    assert alone.fingerprint == ingest([tmp_path / "set"], tmp_path / "whole").fingerprint
    assert not alone.columns["terminated"].any()
    assert [bool(alone.trajectory(i)["truncated"][-1]) for i in range(3)] == [True] * 3
    assert alone.columns["truncated"].sum() == 3


def test_text_observations_must_be_left_out(tmp_path: Path, minari: Maker) -> None:
    from gymnasium.spaces import Box, Dict, Discrete, Text

    spaces = (Dict({"mission": Text(9), "pos": Box(-1, 1, (2,), np.float32)}), Discrete(3))

    def make(length: int) -> dict[str, Any]:
        return {"mission": ["go"] * (length + 1), "pos": np.zeros((length + 1, 2), np.float32)}

    for form in FORMS:
        minari(tmp_path / form, form, spaces=spaces, observations=make)
        with pytest.raises(
            DataError, match=r"observations/mission must be numeric .*; leave it out"
        ):
            ingest([tmp_path / form], tmp_path / "out")
        dataset = ingest([tmp_path / form], tmp_path / f"{form}_out", columns=["observation.pos"])
        assert [c.name for c in dataset.schema if c.role == "observation"] == ["observation.pos"]
