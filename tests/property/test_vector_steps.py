"""A VectorWriter stores and publishes the same by its native call as in Python, for plain and other steps.

The native one gets some of its steps nested, as environments with Dict and Tuple spaces return them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear import Column, Replay, Schema, TransitionBuffer
from deepspeed_gear.errors import GearError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.writer.vector_writer import VectorWriter

SCHEMA = Schema(
    [
        Column("observation.place", "float32", (2,), "observation", "T+1"),
        Column("observation.parts.0", "int16", (), "observation", "T+1"),
        Column("action", "int64"),
        Column("reward", "float32", (), "reward"),
        Column("truncated", "bool", (), "truncated"),
        Column("terminated", "bool", (), "terminated"),
        Column("info.task", "int16", rows="1"),
        Column("score", "float32", (), rows="T", late=True),
    ]
)
LONGEST = 6
FORMS = ("plain", "lists", "wide", "nan", "missing", "short", "task", "flags")


def replay_of(num_envs: int, rate: bool) -> Replay:
    table: dict[str, Any] = {
        "capacity_steps": 8 * LONGEST * num_envs,
        "max_length": LONGEST,
        "remove": "fifo",
    }
    if rate:
        table["rate_limiter"] = {"samples_per_insert": 1.0, "min_size": 20, "error_buffer": 40}
    section = {
        "tables": {"main": table},
        "sampler": {"kind": "uniform", "unit": "step"},
        "fields": {"action": {}},
        "batch_size": 4,
        "timeout_s": 0.05,
    }
    return Replay(section, schemas={"main": SCHEMA})


def nested(columns: dict[str, Any]) -> dict[str, Any]:
    """Return columns as environments return them."""
    found = dict(columns)
    if "observation.place" in columns:
        place, part = found.pop("observation.place"), found.pop("observation.parts.0")
        found["observation"] = {"place": place, "parts": (part,)}
    if "info.task" in columns:
        found["info"] = {"task": found.pop("info.task")}
    return found


def in_python(writer: VectorWriter) -> VectorWriter:
    writer._native_steps, writer._stores, writer._publishes = None, False, False
    return writer


def stored(replay: Replay) -> list[Any]:
    """Return what batches may hold: id, steps and rows of each trajectory, by id."""
    table = replay.tables["main"]
    found = []
    for slot, record in enumerate(table.slots):
        if record[Slot.STATE] != SlotState.COMMITTED:
            continue
        first, steps = int(record[Slot.FIRST_ROW]), int(record[Slot.NUM_STEPS])
        rows = {}
        for column in table.spec.schema:
            end = {"T": first + steps, "T+1": first + steps + 1, "1": slot + 1}[column.rows]
            begin = slot if column.rows == "1" else first
            rows[column.name] = np.array(table.columns[column.name][begin:end]).tolist()
        found.append((int(record[Slot.ID]), steps, rows))
    return sorted(found, key=lambda one: one[0])


def outcome(work: Any, **arguments: Any) -> Any:
    try:
        return work(**arguments)
    except GearError as error:
        return type(error).__name__, str(error)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[int, str, bool, list[dict[str, Any]]]:
    num_envs = draw(st.integers(1, 3))
    mode = draw(st.sampled_from(["next_step", "same_step", "disabled"]))
    flags = st.lists(st.sampled_from([False] * 9 + [True]), min_size=num_envs, max_size=num_envs)
    one = st.fixed_dictionaries(
        {
            "form": st.sampled_from(("plain",) * 30 + FORMS),
            "terminated": flags,
            "truncated": flags,
            "publish": st.sampled_from([True, True, True, False]),
            "nested": st.booleans(),
            "some": st.sampled_from([None] * 9 + [num_envs - 1]),
            "after": st.sampled_from(["", "", "", "reset", "remove", "sample"]),
        }
    )
    return num_envs, mode, draw(st.booleans()), draw(st.lists(one, min_size=4, max_size=25))


def columns_of(at: int, num_envs: int, given: dict[str, Any]) -> dict[str, Any]:
    base = np.arange(num_envs) + 10 * at
    columns: dict[str, Any] = {
        "observation.place": np.repeat(base, 2).reshape(num_envs, 2).astype(np.float32),
        "observation.parts.0": base.astype(np.int16),
        "action": base.astype(np.int64),
        "reward": base.astype(np.float32) / 2,
        "truncated": np.array(given["truncated"]),
        "terminated": np.array(given["terminated"]),
    }
    match given["form"]:
        case "lists":
            columns = {name: value.tolist() for name, value in columns.items()}
        case "wide":
            columns["observation.place"] = columns["observation.place"].astype(np.float64)
        case "nan":
            columns["reward"] = np.where(base == base[-1], np.float32("nan"), columns["reward"])
        case "missing":
            del columns["action"]
        case "short":
            columns["observation.place"] = columns["observation.place"][:, :1]
        case "task":
            columns["info.task"] = base.astype(np.int16)
        case "flags":
            columns["terminated"] = columns["terminated"].astype(np.int8)
    return columns


@settings(deadline=None)
@given(scenes())
def test_native_steps_are_those_of_python(scene: tuple[int, str, bool, list[dict[str, Any]]]) -> None:
    num_envs, mode, rate, steps = scene
    with replay_of(num_envs, rate) as one, replay_of(num_envs, rate) as other:
        native = one.writer().vector_writer(num_envs, mode)
        assert native._native_steps is not None
        plain = in_python(other.writer().vector_writer(num_envs, mode))
        zeros = {"place": np.zeros((num_envs, 2), np.float32), "parts": (np.zeros(num_envs, np.int16),)}
        for writer in (native, plain):
            writer.reset(observation=zeros, info={"task": np.arange(num_envs, dtype=np.int16)})
        for at, given in enumerate(steps):
            columns, some = columns_of(at, num_envs, given), given["some"]
            more: dict[str, Any] = {"publish": given["publish"]}
            if some is not None:
                more["envs"] = np.array([some])
                columns = {name: value[some : some + 1] for name, value in columns.items()}
            if mode == "same_step":
                last = np.asarray(columns["observation.place"], np.float32) + 0.5
                part = np.asarray(columns["observation.parts.0"], np.int16)
                more["final"] = {"observation.place": last, "observation.parts.0": part}
                objects = np.array([None] * len(last), object)
                for env, row in enumerate(last):
                    objects[env] = {"place": row, "parts": (part[env],)}
            ends = np.array(given["terminated"]) | np.array(given["truncated"])
            found = []
            for replay, writer in ((one, native), (other, plain)):
                if writer is native and given["nested"]:
                    final = {"final": {"observation": objects}} if mode == "same_step" else {}
                    result = outcome(writer.step, **{**more, **final}, **nested(columns))
                else:
                    result = outcome(writer.step, **more, **columns)
                if mode == "disabled" or given["after"] == "reset":
                    mask = ends if mode == "disabled" else ~ends
                    writer.reset(mask=mask, observation=zeros)
                if given["after"] == "remove" and (ids := [known[0] for known in stored(replay)]):
                    replay.remove(ids[:1])
                if given["after"] == "sample" and stored(replay):
                    outcome(replay.sample)
                rows = stored(replay)
                steps_of = {number: count for number, count, _ in rows}
                for done in [] if isinstance(result, tuple) else result:
                    assert steps_of.get(done.trajectory_id, done.num_steps) == done.num_steps
                found.append((result, writer.num_steps, writer.num_trajectories, rows))
            assert found[0] == found[1], given
        for writer in (native, plain):
            writer.close()
        assert stored(one) == stored(other)


@st.composite
def transitions(draw: st.DrawFn) -> tuple[int, str, int, list[dict[str, Any]]]:
    num_envs = draw(st.integers(1, 3))
    flags = st.lists(st.sampled_from([False] * 6 + [True]), min_size=num_envs, max_size=num_envs)
    one = st.fixed_dictionaries(
        {
            "terminated": flags,
            "truncated": flags,
            "jumps": st.lists(st.sampled_from([False] * 9 + [True]), min_size=num_envs, max_size=num_envs),
            "form": st.sampled_from(("plain",) * 12 + ("lists", "wide", "nan", "column", "negative zero")),
            "sample": st.booleans(),
        }
    )
    mode = draw(st.sampled_from(["next_step", "same_step", "disabled"]))
    return num_envs, mode, draw(st.integers(1, 8)), draw(st.lists(one, min_size=4, max_size=40))


@settings(deadline=None)
@given(transitions())
def test_native_transitions_are_those_of_python(scene: tuple[int, str, int, list[dict[str, Any]]]) -> None:
    """With gaps, ends of both kinds, parts of `max_length`, and a table that evicts and compacts."""
    spaces = pytest.importorskip("gymnasium").spaces
    num_envs, mode, longest, steps = scene
    space, actions = spaces.Box(-1e6, 1e6, (2,), np.float32), spaces.Discrete(5)
    options = {"n_envs": num_envs, "autoreset": mode, "batch_size": 4, "table": {"max_length": longest}}
    buffers = [TransitionBuffer(12, space, actions, **options) for _ in range(2)]
    in_python(buffers[1]._writer)
    obs = np.zeros((num_envs, 2), np.float32)
    for at, step in enumerate(steps):
        base = np.repeat(np.arange(num_envs) * 100 + at + 1, 2).reshape(num_envs, 2).astype(np.float32)
        ended = np.array(step["terminated"]) | step["truncated"]
        rows: dict[str, Any] = {
            "next_obs": base,
            "action": np.full(num_envs, at % 5),
            "reward": np.full(num_envs, at / 2),
            "terminated": np.array(step["terminated"]),
            "truncated": np.array(step["truncated"]),
        }
        match step["form"]:
            case "lists":
                rows = {name: value.tolist() for name, value in rows.items()}
            case "wide":
                rows["next_obs"] = base.astype(np.float64)
            case "nan":
                rows["next_obs"] = np.where(base == base.max(), np.float32("nan"), base)
            case "column":
                rows["reward"], rows["action"] = rows["reward"].reshape(-1, 1), rows["action"].reshape(-1, 1)
            case "negative zero":
                rows["next_obs"] = base * np.float32(-0.0)
        found = [outcome(held.add, obs=obs, **rows) for held in buffers]
        assert found[0] == found[1], step
        if step["sample"] and len(buffers[0]):
            for held in buffers:
                outcome(held.sample)
        assert stored(buffers[0].replay) == stored(buffers[1].replay), step
        if found[0] is None:  # it was added
            obs = np.asarray(rows["next_obs"], np.float32) + np.float32(0)
            new = np.array(step["jumps"])
            if mode != "next_step":
                new |= ended
            obs = np.where(new[:, None], np.float32(1000 + at), obs)
    for held in buffers:
        held.close()
