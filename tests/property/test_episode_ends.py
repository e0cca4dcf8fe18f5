"""End flags inside a trajectory: refused on every way into a table, or divided into the episodes they end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear import Column, Dataset, DatasetWriter, DeviceReplay, Replay, Schema
from deepspeed_gear.data.ingest import ingest
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.trajectory_checks import split_episodes
from deepspeed_gear.errors import DataError

SCHEMA = Schema(
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
    """Return steps with resets inside: state n before step n, and n + 0.5 after a step that ends."""
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
    given, inner = rollout(terminated, truncated), [i for i, end in enumerate(ends[:-1]) if any(end)]
    states = [step + 0.5 if step in inner or not is_sparse else None for step in range(len(ends))]
    final = {"observation": states} if has_final else None
    cut = [step for step in inner if not terminated[step]]
    if cut and not has_final:
        with pytest.raises(
            DataError, match=f"column observation must have the state after step {cut[0]}, .*final="
        ):
            split_episodes("t", SCHEMA, given, final)
        return
    parts = split_episodes("t", SCHEMA, given, final)
    bounds = [0, *(step + 1 for step in inner), len(ends)]
    assert len(parts) == len(bounds) - 1
    for part, first, end in zip(parts, bounds[:-1], bounds[1:], strict=True):
        assert "advantage" not in part
        assert part["task"] == {"goal": [1, 2]}
        assert np.asarray(part["action"]).tolist() == list(range(first, end))
        last = float(end) if end == len(ends) else states[end - 1] if has_final else end - 1.0
        assert np.asarray(part["observation"]).tolist() == [*range(first, end), last]
        assert int(part["return"]) == int(part["steps"]) == end - first
        assert not (np.asarray(part["terminated"]).astype(bool) | np.asarray(part["truncated"]).astype(bool))[
            :-1
        ].any()


def replay_of(schema: Schema = SCHEMA) -> Replay:
    table = {"capacity_steps": 200, "max_length": 20}
    return Replay({"batch_size": 4, "tables": {"main": table}}, schemas={"main": schema})


def test_what_is_split_is_stored_as_several_trajectories() -> None:
    given = rollout([False, True, False, False], [False, False, False, True])
    with replay_of() as replay, replay.writer() as writer:
        for add in (replay.add, writer.add):
            with pytest.raises(
                DataError, match=r"column terminated must be set at the last step .* at step 1 of 4"
            ):
                add(given)
            assert replay.num_steps == 0
            ids = add(given, split_by_flags=True)  # type: ignore[operator]
            stored = replay.read(ids)
            assert [one["observation"].tolist() for one in stored] == [[0, 1, 1], [2, 3, 4]]
            assert [one["return"].item() for one in stored] == [2, 2]
            replay.fill(ids[1], advantage=[1, 2])
            with pytest.raises(DataError, match="part must have at most max_length = 20 steps, got 21"):
                add(rollout([True] + [False] * 21, [False] * 22), split_by_flags=True)  # type: ignore[operator]
            with pytest.raises(
                DataError, match=r"final: column action must be one of the columns of T\+1 rows"
            ):
                add(given, split_by_flags=True, final={"action": [0] * 4})  # type: ignore[operator]
            with pytest.raises(
                DataError, match="final: column observation must have a row after each of the 4"
            ):
                add(given, split_by_flags=True, final={"observation": [0] * 2})  # type: ignore[operator]
            replay.clear()


NUMBERS = Schema(
    [
        replace(column, dtype="float32") if column.role == "reward" else column
        for column in SCHEMA
        if not column.late and not column.is_opaque
    ]
)
Rows = dict[str, Any]


def stepwise(given: Rows, folder: Path) -> None:
    """Append step by step; what is published before the flag stays."""
    names = ("action", "reward", "terminated", "truncated")
    with (
        replay_of(NUMBERS) as replay,
        replay.writer() as writer,
        writer.trajectory(steps=4, **{"return": 4}) as opened,
    ):
        for step in range(4):
            row = {name: given[name][step] for name in names}
            opened.append(observation=given["observation"][step], publish=step == 1, **row)


def one_by_one(given: Rows, folder: Path) -> None:
    with DatasetWriter(folder / "set", NUMBERS) as writer:
        writer.add(given)


def on_device(given: Rows, folder: Path) -> None:
    columns = {c.name: torch.as_tensor(given[c.name]).to(c.torch_dtype)[None] for c in NUMBERS}
    table = {"capacity_steps": 200, "max_length": 4, "remove": "fifo", "placement": "device"}
    section = {"batch_size": 4, "tables": {"main": table}}
    with DeviceReplay(section, "cpu", schemas={"main": NUMBERS}) as replay:
        ended = columns["terminated"] | columns["truncated"].bool()
        if bool(ended[0, 2]) and not ended[0, :2].any():  # the steps before it, and the last one flagged
            replay.add_(columns, torch.tensor([3]))
            assert replay.statistics()["trajectories"] == 1
        replay.add_(columns, torch.tensor([4]))


class OneEpisode(Reader):
    """Yields one episode, of the path's array file."""

    format = "one"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False

    def open(self) -> None:
        self.columns = tuple(column for column in NUMBERS if column.rows != "1")

    def episodes(self) -> Any:
        rows = np.load(self.path)
        yield "episode 0", {column.name: rows[column.name] for column in self.columns}


def read(given: Rows, folder: Path, split: bool = False) -> Dataset:
    rows = {name: torch.as_tensor(value).float().numpy() for name, value in given.items() if name != "task"}
    np.savez(folder / "rows.npz", **rows)
    of = f"{__name__}:OneEpisode"
    return ingest([folder / "rows.npz"], folder / "made", format=of, overwrite=True, split_by_flags=split)


@pytest.mark.parametrize("way", [stepwise, one_by_one, on_device, read])
@pytest.mark.parametrize(("name", "step"), [("terminated", 0), ("truncated", 2), ("terminated", 2)])
def test_a_flag_inside_is_refused_by_every_way(
    way: Callable[..., Any], name: str, step: int, tmp_path: Path
) -> None:
    given = {key: value for key, value in rollout([False] * 4, [False] * 4).items() if key != "task"}
    given[name][step] = True
    with pytest.raises(DataError, match=r"must be set at the last step of a trajectory only.*step"):
        way(given, tmp_path)


def test_readers_split_by_flags(tmp_path: Path) -> None:
    given = rollout([False, True, False, False], [False] * 4)
    found = read(given, tmp_path, split=True)
    assert [found.trajectory(i)["observation"].tolist() for i in range(2)] == [[0, 1, 1], [2, 3, 4]]
    assert [float(found.trajectory(i)["return"]) for i in range(2)] == [2, 2]
    given["truncated"][2] = 1
    with pytest.raises(
        DataError, match="must have the state after step 2, where an episode is truncated inside"
    ):
        read(given, tmp_path, split=True)
