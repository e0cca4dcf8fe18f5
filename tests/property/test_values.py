"""Values that a column can hold are stored, others are refused: one rule for every way into a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from deepspeed_gear import Column, DatasetWriter, Replay, Schema, TransitionBuffer
from deepspeed_gear.data.ingest import ingest
from deepspeed_gear.data.trajectory_checks import as_numbers, as_stored
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import DTYPES

GIVEN = (
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
)
EDGES = [
    float(edge) for bits in (7, 8, 15, 16, 31, 32, 63, 64) for edge in (2**bits, -(2**bits), 2**bits - 1)
]


def fits(value: float, dtype: str) -> bool:
    """Return whether a column can hold a number: the rule, in Python's exact arithmetic."""
    if DTYPES[dtype].is_floating_point:
        rounded = torch.tensor(value, dtype=torch.float64).to(DTYPES[dtype]).item()
        return math.isfinite(rounded) or not math.isfinite(value)
    if not math.isfinite(value) or value != int(value):
        return False
    low, high = (
        (0, 1) if dtype == "bool" else (torch.iinfo(DTYPES[dtype]).min, torch.iinfo(DTYPES[dtype]).max)
    )
    return low <= int(value) <= high


@given(
    st.sampled_from(list(DTYPES)),
    st.sampled_from([*GIVEN, "float64", "list"]),
    st.lists(
        st.one_of(st.sampled_from([0, 1, 0.5, math.nan, math.inf, *EDGES]), st.integers(-300, 300)),
        min_size=1,
    ),
)
@example("int64", "float64", [2.0**63])
@example("int64", "uint64", [2**63])
@example("bool", "float32", [0.0, 1.0])
def test_values_are_stored_if_the_column_can_hold_them(dtype: str, form: str, values: list[float]) -> None:
    column = Column("x", dtype, allow_nan=DTYPES[dtype].is_floating_point)
    with np.errstate(all="ignore"):
        array = np.asarray(values) if form == "list" else np.asarray(values, np.float64).astype(form)
    if form == "uint16" and dtype == "bfloat16":
        return  # these are bits of bfloat16
    exact = [item.item() if isinstance(item, np.generic) else item for item in array]
    given = values if form == "list" else array
    if all(fits(value, dtype) for value in exact):
        stored = as_numbers(as_stored(given, column, "t"), column)
        wanted = torch.tensor(np.asarray(exact)).to(DTYPES[dtype])
        wanted = wanted.float() if dtype == "bfloat16" else wanted
        assert np.array_equal(stored, wanted.numpy(), equal_nan=DTYPES[dtype].is_floating_point)
    else:
        with pytest.raises(
            DataError, match=f"column x must hold values that {dtype} can hold, got .*correct it"
        ):
            as_stored(given, column, "t")


SCHEMA = Schema(
    [
        Column("observation", "uint8", (2,), "observation", "T+1"),
        Column("action", "int32"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
        Column("task", "int16", rows="1"),
        Column("score", "int8", rows="1", late=True),
    ]
)
Step = dict[str, Any]


def whole(step: Step) -> Step:
    """Return a trajectory of one step."""
    steps = {
        name: np.asarray(value)[None] for name, value in step.items() if name not in ("observation", "task")
    }
    return {**steps, "observation": np.asarray([step["observation"]] * 2), "task": step["task"]}


def add(replay: Replay, step: Step, folder: Path) -> None:
    replay.fill(replay.add(whole(step)), score=np.int64(5))


def append(replay: Replay, step: Step, folder: Path) -> None:
    with replay.writer() as writer, writer.trajectory(task=step["task"]) as opened:
        opened.append(**{name: value for name, value in step.items() if name != "task"})
        opened.append(observation=step["observation"])


def vector(replay: Replay, step: Step, folder: Path) -> None:
    steps = replay.vector_writer(1, "disabled")
    rows = {name: np.asarray(value)[None] for name, value in step.items()}
    steps.reset(observation=rows["observation"], task=rows.pop("task"))
    steps.step(**rows)


def write(replay: Replay, step: Step, folder: Path) -> None:
    with DatasetWriter(folder / "set", SCHEMA, overwrite=True) as writer:
        writer.add({**whole(step), "score": 1})


def read(replay: Replay, step: Step, folder: Path) -> None:
    names = {"observations": "observation", "actions": "action", "rewards": "reward",
             "terminals": "terminated", "timeouts": "truncated"}  # fmt: skip
    with h5py.File(folder / "source.hdf5", "w") as file:
        for key, name in names.items():
            file[key] = np.asarray([step[name]])
    ingest([folder / "source.hdf5"], folder / "ingested", overwrite=True)


def buffer(replay: Replay, step: Step, folder: Path) -> None:
    spaces = gym.spaces.Box(0, 255, (2,), np.uint8), gym.spaces.Discrete(9)
    with TransitionBuffer(50, *spaces, autoreset="disabled") as held:
        seen = step["observation"]
        held.add(seen, seen, *(step[name] for name in ("action", "reward", "terminated", "truncated")))


@contextmanager
def replay_of_one() -> Iterator[Replay]:
    table = {"capacity_steps": 100, "max_length": 10}
    with Replay({"batch_size": 1, "tables": {"main": table}}, schemas={"main": SCHEMA}) as replay:
        yield replay


@pytest.mark.parametrize("way", [add, append, vector, write, read, buffer])
def test_every_way_into_a_table_takes_values_that_fit(way: Callable[..., None], tmp_path: Path) -> None:
    good = {"observation": np.array([0, 255]), "action": np.int64(7), "reward": np.int32(1),
            "terminated": np.float32(1), "truncated": np.int64(0), "task": np.uint64(3)}  # fmt: skip
    wrong = {"observation": np.array([0, 256]), "action": np.float64(0.5), "terminated": np.int64(2)}
    ingested = {"observation", "action"}  # a source's columns have its dtypes
    with replay_of_one() as replay:
        way(replay, good, tmp_path)
        for name, value in wrong.items():
            if way is read and name in ingested:
                continue
            with pytest.raises(DataError, match=r"must hold values that .* can hold, got .*; correct it"):
                way(replay, {**good, name: value}, tmp_path)


def test_float64_data_sets_train_float32_models(tmp_path: Path) -> None:
    """As of Minari; normalised in float64 and rounded once. `as` keeps float64."""
    schema = Schema([Column("observation", "float64", (2,), "observation", "T+1"), Column("action", "int64")])
    observations = 1e6 + np.random.default_rng(0).random((9, 2))
    with DatasetWriter(tmp_path / "set", schema) as writer:
        writer.add({"observation": observations, "action": np.zeros(8)})
    fields = {
        "observation": {"normalize": "mean_std"},
        "plain": {"column": "observation"},
        "kept": {"column": "observation", "as": "float64"},
    }
    section = {"data": str(tmp_path / "set"), "batch_size": 4, "sampler": {"unit": "step"}, "fields": fields}
    with Replay(section) as replay:
        batch = replay.sample()
        assert torch.nn.Linear(2, 1)(batch["observation"]).shape == (4, 1)
        exact = torch.from_numpy(observations)[batch.anchor]
        assert torch.equal(batch["plain"], exact.float())
        assert torch.equal(batch["kept"], exact)
        mean, std = observations.mean(0), observations.std(0)
        assert torch.allclose(batch["observation"].double(), (exact - mean) / std, atol=1e-6)
