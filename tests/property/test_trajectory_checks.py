"""What every way into a table takes and refuses: values that a column can hold, flags that end an
episode.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from deepspeed_gear import (
    Column,
    Dataset,
    DatasetWriter,
    DeviceReplay,
    Replay,
    Schema,
    TransitionBuffer,
)
from deepspeed_gear.data.episode_split import split_episodes
from deepspeed_gear.data.ingest import ingest
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.stored_values import as_numbers, as_stored
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import DTYPES

Rows = dict[str, Any]

INTEGERS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
EDGES = [
    float(edge)
    for bits in (7, 8, 15, 16, 31, 32, 63, 64)
    for edge in (2**bits, -(2**bits), 2**bits - 1)
]


def fits(value: float, dtype: str) -> bool:
    """Return whether a column can hold a number: the rule, in Python's exact arithmetic."""
    if DTYPES[dtype].is_floating_point:
        rounded = torch.tensor(value, dtype=torch.float64).to(DTYPES[dtype]).item()
        return math.isfinite(rounded) or not math.isfinite(value)
    if not math.isfinite(value) or value != int(value):
        return False
    if dtype == "bool":
        return value in (0, 1)
    limits = torch.iinfo(DTYPES[dtype])
    return limits.min <= int(value) <= limits.max


@given(
    st.sampled_from(list(DTYPES)),
    st.sampled_from(["bool", *INTEGERS, "float16", "float32", "float64", "list"]),
    st.lists(
        st.one_of(st.sampled_from([0, 1, 0.5, math.nan, math.inf, *EDGES]), st.integers(-300, 300)),
        min_size=1,
    ),
)
@example("int64", "float64", [2.0**63])
@example("int64", "uint64", [2**63])
@example("bool", "float32", [0.0, 1.0])
def test_values_are_stored_if_the_column_can_hold_them(
    dtype: str, form: str, values: list[float]
) -> None:
    column = Column("x", dtype, allow_nan=DTYPES[dtype].is_floating_point)
    with np.errstate(all="ignore"):
        array = (
            np.asarray(values) if form == "list" else np.asarray(values, np.float64).astype(form)
        )
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
        text = f"column x must hold values that {dtype} can hold, got .*correct it"
        with pytest.raises(DataError, match=text):
            as_stored(given, column, "t")


# ---- flags that end an episode -------------------------------------------------------------------

EPISODES = Schema(
    [
        Column("observation", "float32", (), "observation", "T+1"),
        Column("action", "int64", (), "action"),
        Column("reward", "bfloat16", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "uint8", (), "truncated"),
        Column("task", "json", rows="1", max_bytes=30),
        Column("return", "float64", (), "return", "1"),
        Column("steps", "int32", (), "length", "1"),
        Column("advantage", "float32", late=True),
    ]
)


def rollout(terminated: list[bool], truncated: list[bool]) -> dict[str, Any]:
    """Return steps with resets inside: state n before step n, and n + 0.5 after a step
    that ends.
    """
    steps = len(terminated)
    return {
        "observation": np.arange(steps + 1.0),
        "action": np.arange(steps),
        "reward": torch.ones(steps, dtype=torch.bfloat16),
        "terminated": np.array(terminated),
        "truncated": np.array(truncated, np.int64),
        "task": {"goal": [1, 2]},
        "return": steps,
        "steps": steps,
    }


flags = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=9)


@given(flags, st.booleans(), st.booleans())
def test_parts_are_episodes_with_their_own_last_states(
    ends: list[tuple[bool, bool]], has_final: bool, is_sparse: bool
) -> None:
    terminated, truncated = (list(flag) for flag in zip(*ends, strict=True))
    given = rollout(terminated, truncated)
    inner = [i for i, end in enumerate(ends[:-1]) if any(end)]
    states = [step + 0.5 if step in inner or not is_sparse else None for step in range(len(ends))]
    final = {"observation": states} if has_final else None
    cut = [step for step in inner if not terminated[step]]
    if cut and not has_final:
        text = f"column observation must have the state after step {cut[0]}, .*final="
        with pytest.raises(DataError, match=text):
            split_episodes("t", EPISODES, given, final)
        return
    parts = split_episodes("t", EPISODES, given, final)
    bounds = [0, *(step + 1 for step in inner), len(ends)]
    assert len(parts) == len(bounds) - 1
    for part, first, end in zip(parts, bounds[:-1], bounds[1:], strict=True):
        assert "advantage" not in part
        assert part["task"] == {"goal": [1, 2]}
        assert np.asarray(part["action"]).tolist() == list(range(first, end))
        last = float(end) if end == len(ends) else states[end - 1] if has_final else end - 1.0
        assert np.asarray(part["observation"]).tolist() == [*range(first, end), last]
        assert int(part["return"]) == int(part["steps"]) == end - first
        ended = np.stack([part["terminated"], part["truncated"]]).astype(bool)
        assert not ended[:, :-1].any()


def replay_of(schema: Schema) -> Replay:
    table = {"capacity_steps": 200, "max_length": 20}
    return Replay({"batch_size": 4, "tables": {"main": table}}, schemas={"main": schema})


def test_what_is_split_is_stored_as_several_trajectories() -> None:
    given = rollout([False, True, False, False], [False, False, False, True])
    with replay_of(EPISODES) as replay, replay.writer() as writer:
        for add in (replay.add, writer.add):
            text = r"column terminated must be set at the last step .* at step 1 of 4"
            with pytest.raises(DataError, match=text):
                add(given)
            assert replay.num_steps == 0
            ids = add(given, split_by_flags=True)
            stored = replay.read(ids)
            assert [one["observation"].tolist() for one in stored] == [[0, 1, 1], [2, 3, 4]]
            assert [one["return"].item() for one in stored] == [2, 2]
            replay.fill(ids[1], advantage=[1, 2])
            with pytest.raises(
                DataError, match="part must have at most max_length = 20 steps, got 21"
            ):
                add(rollout([True] + [False] * 21, [False] * 22), split_by_flags=True)
            with pytest.raises(
                DataError, match=r"column action must be one of the columns of T\+1 rows"
            ):
                add(given, split_by_flags=True, final={"action": [0] * 4})
            with pytest.raises(
                DataError, match="column observation must have a row after each of the 4"
            ):
                add(given, split_by_flags=True, final={"observation": [0] * 2})
            replay.clear()


# ---- every way -----------------------------------------------------------------------------------

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
BY_STEP = ("action", "reward", "terminated", "truncated")


def add(rows: Rows, folder: Path) -> None:
    with replay_of(SCHEMA) as replay:
        replay.fill(replay.add(rows), score=np.int64(5))


def append(rows: Rows, folder: Path) -> None:
    """Step by step; what is published before a wrong one stays."""
    observation = rows["observation"]
    with (
        replay_of(SCHEMA) as replay,
        replay.writer() as writer,
        writer.trajectory(task=rows["task"]) as opened,
    ):
        for step, seen in enumerate(observation[:-1]):
            row = {name: rows[name][step] for name in BY_STEP}
            opened.append(observation=seen, publish=step == 1, **row)
        opened.append(observation=observation[-1])


def vector(rows: Rows, folder: Path) -> None:
    with replay_of(SCHEMA) as replay:
        steps = replay.vector_writer(1, "disabled")
        steps.reset(observation=rows["observation"][:1], task=np.asarray(rows["task"])[None])
        for step in range(len(rows["action"])):
            after = rows["observation"][step + 1 : step + 2]
            steps.step(observation=after, **{name: rows[name][step : step + 1] for name in BY_STEP})


def write(rows: Rows, folder: Path) -> None:
    with DatasetWriter(folder / "set", SCHEMA, overwrite=True) as writer:
        writer.add({**rows, "score": 1})


class OneEpisode(Reader):
    """Yields one episode, of the path's array file."""

    format = "one"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False

    def open(self) -> None:
        self.columns = tuple(column for column in SCHEMA if column.rows != "1")

    def episodes(self) -> Any:
        rows = np.load(self.path)
        yield "episode 0", {column.name: rows[column.name] for column in self.columns}


def read(rows: Rows, folder: Path, **options: bool) -> Dataset:
    np.savez(folder / "rows.npz", **rows)
    of = f"{__name__}:OneEpisode"
    return ingest([folder / "rows.npz"], folder / "made", format=of, overwrite=True, **options)


def buffer(rows: Rows, folder: Path) -> None:
    spaces = gym.spaces.Box(0, 255, (2,), np.uint8), gym.spaces.Discrete(9)
    with TransitionBuffer(50, *spaces, autoreset="disabled") as held:
        for step in range(len(rows["action"])):
            seen = rows["observation"][step], rows["observation"][step + 1]
            held.add(*seen, *(rows[name][step] for name in BY_STEP))


def on_device(rows: Rows, folder: Path) -> None:
    columns = {
        c.name: torch.from_numpy(np.asarray(rows[c.name], float)).to(c.torch_dtype)[None]
        for c in SCHEMA
        if not c.late
    }
    table = {"capacity_steps": 200, "max_length": 4, "remove": "fifo", "placement": "device"}
    schema = Schema([column for column in SCHEMA if not column.late])
    section = {"batch_size": 4, "tables": {"main": table}}
    with DeviceReplay(section, "cpu", schemas={"main": schema}) as replay:
        ended = columns["terminated"] | columns["truncated"]
        if (
            bool(ended[0, 2]) and not ended[0, :2].any()
        ):  # the steps before it, and the last one flagged
            replay.add_(columns, torch.tensor([3]))
            assert replay.statistics()["trajectories"] == 1
        replay.add_(columns, torch.tensor([4]))


def steps_of(count: int) -> Rows:
    """Return a trajectory of other dtypes than the columns have, with values that fit."""
    return {
        "observation": np.stack([np.arange(count + 1), np.full(count + 1, 255)], axis=1),
        "action": np.arange(count),
        "reward": np.ones(count, np.int32),
        "terminated": np.zeros(count, np.float32),
        "truncated": np.zeros(count, np.int64),
        "task": np.uint64(3),
    }


@pytest.mark.parametrize("way", [add, append, vector, write, read, buffer])
def test_every_way_takes_values_that_fit(way: Callable[..., Any], tmp_path: Path) -> None:
    good = steps_of(1)
    way(good, tmp_path)
    for name, value in {"observation": 256, "action": 0.5, "terminated": 2}.items():
        wrong = good[name] + np.full_like(good[name], value, type(value))
        with pytest.raises(
            DataError, match=r"must hold values that .* can hold, got .*; correct it"
        ):
            way({**good, name: wrong}, tmp_path)


@pytest.mark.parametrize("way", [append, write, on_device, read])
@pytest.mark.parametrize(("name", "step"), [("terminated", 0), ("truncated", 2), ("terminated", 2)])
def test_every_way_refuses_a_flag_inside(
    way: Callable[..., Any], name: str, step: int, tmp_path: Path
) -> None:
    rows = steps_of(4)
    rows[name][step] = 1
    with pytest.raises(DataError, match=r"must be set at the last step of a trajectory only.*step"):
        way(rows, tmp_path)


def test_readers_split_by_flags(tmp_path: Path) -> None:
    rows = steps_of(4)
    rows["terminated"][1] = 1
    found = read(rows, tmp_path, split_by_flags=True)
    assert [found.trajectory(i)["observation"][:, 0].tolist() for i in range(2)] == [
        [0, 1, 1],
        [2, 3, 4],
    ]
    rows["truncated"][2] = 1
    text = "must have the state after step 2, where an episode is truncated inside"
    with pytest.raises(DataError, match=text):
        read(rows, tmp_path, split_by_flags=True)
