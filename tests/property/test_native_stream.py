"""Native calls of selections and writers do the same as Python, in any sequence of events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_support import add_in_python, streams_of
from store_support import note_death

from deepspeed_gear import Batch, Column, Replay, Schema, TransitionBuffer
from deepspeed_gear.errors import GearError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.sampling import batch_stream
from deepspeed_gear.store.records import Control
from deepspeed_gear.writer.trajectory_writer import WriterBase
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
        Column("score", "float32", (), late=True),
    ]
)
LONGEST = 5


@contextmanager
def in_python() -> Iterator[None]:
    """Streams and vector writers that are made inside do without native calls."""

    def vector_writer(self: WriterBase, *arguments: Any) -> VectorWriter:
        self.native = None
        return native_writer(self, *arguments)

    native_writer = WriterBase.vector_writer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WriterBase, "vector_writer", vector_writer)
        patch.setattr(batch_stream, "is_plain", lambda state: False)
        yield


class CountedNative:
    """The native module of a writer, which counts the vector steps that it has taken."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.num_taken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def vector_step(self, *arguments: Any) -> int:
        events: int = self.native.vector_step(*arguments)
        self.num_taken += events >= 0
        return events


def stored(replay: Replay) -> list[Any]:
    """Return what batches may hold: id, steps and rows of each trajectory, by id."""
    table = replay.tables["main"]
    found = []
    for slot in np.flatnonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED).tolist():
        rows = {name: values.tolist() for name, values in table.rows(slot).items()}
        found.append((*table.slots[slot, [Slot.ID, Slot.NUM_STEPS]].tolist(), rows))
    return sorted(found, key=lambda one: one[0])


def outcome(work: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return work(*arguments, **named)
    except GearError as error:
        return type(error).__name__, str(error)


# ---- a replay: selections, and steps of environments ---------------------------------------------


@st.composite
def configs(draw: st.DrawFn, num_envs: int) -> dict[str, Any]:
    unit = draw(st.sampled_from(["trajectory", "step"]))
    sampler: dict[str, Any] = {
        "kind": draw(st.sampled_from(["uniform", "prioritized"])),
        "unit": unit,
    }
    if sampler["kind"] == "prioritized":
        sampler["normalize"] = draw(st.sampled_from(["batch", "table", None]))
        sampler["initial"] = draw(st.sampled_from([None, 0.5]))
        sampler["alpha"] = draw(st.sampled_from([0.6, {"linear": [0.2, 1, 5]}]))
        sampler["beta"] = draw(st.sampled_from([0.4, {"linear": [0.2, 1, 5]}]))
    else:
        sampler["stratified"] = draw(st.sampled_from([False, False, True]))
    if draw(st.sampled_from([False, False, True])):
        sampler["where"] = {"info.task": {"max": 5}}
    capacity = draw(st.sampled_from([20 * num_envs, 300]))
    policies = ["fifo", "fifo", "lifo", "uniform", "keep_best"]
    if sampler["kind"] == "prioritized":
        policies.append("lowest_priority")
    table: dict[str, Any] = {"capacity_steps": capacity, "max_length": LONGEST}
    table["remove"] = draw(st.sampled_from(policies))
    if table["remove"] == "keep_best":
        table["keep_best"] = "info.task"
    limited = unit == "trajectory" and not sampler.get("stratified")
    if limited and draw(st.sampled_from([False, False, False, True])):
        table["max_times_sampled"] = 6
    if draw(st.sampled_from([False, False, False, True])):
        table["rate_limiter"] = {"samples_per_insert": 1.0, "min_size": 20, "error_buffer": 40}
    fields: dict[str, Any] = {"observation.place": {"offset": 0, "length": 2}, "reward": {}}
    if draw(st.sampled_from([False, False, True])):
        fields["score"] = {}
    return {
        "tables": {"main": table},
        "sampler": sampler,
        "fields": fields,
        "batch_size": draw(st.sampled_from([1, 4])),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "timeout_s": 0.05,
    }


FORMS = ("plain",) * 30 + ("lists", "wide", "nan", "missing", "short", "task", "flags")
ACTIONS = ("add", "add", "sample", "sample", "sample", "update", "update", "remove")
ACTIONS += ("fill", "set", "seek", "died")


@st.composite
def scenes(draw: st.DrawFn) -> tuple[dict[str, Any], int, str, list[tuple[str, Any]]]:
    """Draw a config, environments, their autoreset mode, and actions with a number or what is
    stepped.
    """
    num_envs = draw(st.integers(1, 3))
    flags = st.lists(st.sampled_from([False] * 9 + [True]), min_size=num_envs, max_size=num_envs)
    step = st.fixed_dictionaries(
        {
            "form": st.sampled_from(FORMS),
            "terminated": flags,
            "truncated": flags,
            "publish": st.sampled_from([True, True, True, False]),
            "nested": st.booleans(),
            "some": st.sampled_from([None] * 9 + [num_envs - 1]),
            "resets": st.sampled_from([False] * 5 + [True]),
        }
    )
    action = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 99)) | st.tuples(
        st.just("step"), step
    )
    mode = draw(st.sampled_from(["next_step", "same_step", "disabled"]))
    return draw(configs(num_envs)), num_envs, mode, draw(st.lists(action, min_size=12, max_size=50))


def nested(columns: dict[str, Any]) -> dict[str, Any]:
    """Return columns as environments with Dict and Tuple spaces return them."""
    found = dict(columns)
    if "observation.place" in columns:
        place = found.pop("observation.place")
        part = found.pop("observation.parts.0")
        found["observation"] = {"place": place, "parts": (part,)}
    if "info.task" in columns:
        found["info"] = {"task": found.pop("info.task")}
    return found


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


class Side:
    """A replay and what happened to it; the native one gets some of its steps nested."""

    def __init__(
        self, config: dict[str, Any], native: bool, num_envs: int = 1, mode: str = "next_step"
    ) -> None:
        with nullcontext() if native else in_python():
            self.replay = Replay(config, schemas={"main": SCHEMA})
            self.stream = streams_of(self.replay)["train"]
            writer = self.replay.writer()
            self.steps = CountedNative(writer.native)
            writer.native = self.steps
            self.writer = writer.vector_writer(num_envs, mode)
        self.mode = mode
        self.native = native
        self.num_envs = num_envs
        if not native:
            add_in_python(self.replay)
        self.zeros = nested(
            {n: np.zeros((num_envs, *SCHEMA[n].shape), SCHEMA[n].dtype) for n in OBSERVED}
        )
        self.writer.reset(**self.zeros, info={"task": np.arange(num_envs, dtype=np.int16)})
        self.ids: list[int] = []
        self.at = 0
        self.batch: Batch | None = None
        self.position = self.replay.state_dict()

    def do(self, action: str, number: Any) -> Any:
        if action == "step":
            return outcome(self.step, number)
        return outcome(self.act, action, np.random.default_rng(number))

    def step(self, given: dict[str, Any]) -> Any:
        """Step the environments, or one of them, and reset those that the program resets."""
        columns = columns_of(self.at, self.num_envs, given)
        some = given["some"]
        self.at += 1
        more: dict[str, Any] = {"publish": given["publish"]}
        if some is not None:
            more["envs"] = np.array([some])
            columns = {name: value[some : some + 1] for name, value in columns.items()}
        is_nested = self.native and given["nested"]
        if self.mode == "same_step":
            last = np.asarray(columns["observation.place"], np.float32) + 0.5
            part = np.asarray(columns["observation.parts.0"], np.int16)
            more["final"] = {"observation.place": last, "observation.parts.0": part}
            if is_nested:
                objects = np.array([None] * len(last), object)
                for env, row in enumerate(last):
                    objects[env] = {"place": row, "parts": (part[env],)}
                more["final"] = {"observation": objects}
        result = outcome(self.writer.step, **more, **(nested(columns) if is_nested else columns))
        ends = np.array(given["terminated"]) | np.array(given["truncated"])
        if self.mode == "disabled" or given["resets"]:
            self.writer.reset(mask=ends if self.mode == "disabled" else ~ends, **self.zeros)
        steps_of = {number: count for number, count, _ in stored(self.replay)}
        for done in [] if isinstance(result, tuple) else result:
            assert steps_of.get(done.trajectory_id, done.num_steps) == done.num_steps
        return result

    def act(self, action: str, rng: np.random.Generator) -> Any:
        replay = self.replay
        if action == "add":
            steps = int(rng.integers(1, LONGEST + 1))
            columns = columns_of(0, steps, {"form": "", **dict.fromkeys(FLAGS, [False] * steps)})
            columns |= {name: np.append(columns[name], columns[name][:1], 0) for name in OBSERVED}
            self.ids.append(replay.add({**columns, "info.task": np.int16(rng.integers(0, 8))}))
        elif action == "sample":
            self.batch = replay.sample().clone()
            return values_of(self.batch)
        elif action == "update" and self.batch is not None:
            replay.update_priorities(
                self.batch, torch.from_numpy(rng.random(self.batch.num_samples) * 3)
            )
        elif action == "remove":
            ids = [known[0] for known in stored(replay)]
            return replay.remove([ids[int(rng.integers(len(ids)))]] if ids else [])
        elif action == "fill" and self.ids:
            chosen = self.ids[int(rng.integers(len(self.ids)))]
            steps = len(replay.read([chosen])[0]["reward"])
            replay.fill(chosen, score=np.ones(steps, np.float32))
        elif action == "set" and self.ids and replay.config.sampler.kind == "prioritized":
            if replay.config.sampler.unit == "trajectory":
                return replay.set_priorities([self.ids[-1]], torch.tensor([float(rng.random())]))
        elif action == "seek":
            replay.load_state_dict(self.position)
        elif action == "died":  # as after the death of a process that held the lock
            note_death(replay.tables["main"])
        return None

    def state(self) -> list[Any]:
        """Return what the store holds of the stream, and its rows; and what the writer
        has counted.
        """
        views = self.replay.tables["main"].views
        names = (
            "position",
            "heads",
            "consumed",
            "sums",
            "priorities",
            "counts",
            "window",
            "last_drawn",
        )
        found = [
            views["stream/train/" + name].tolist()
            for name in names
            if "stream/train/" + name in views
        ]
        # Writers place rows alike: slots, extents, and where the next search begins.
        words = ~np.isin(np.arange(Control.NUM_WORDS), UNLIKE)
        places = [views[name].tolist() for name in ("slots", "links", "log", "retention")]
        found += [*places, views["control"][words].tolist()]
        return [*found, stored(self.replay), self.writer.num_steps, self.writer.num_trajectories]


# Control words of the event, which a sampler that waits sets.
UNLIKE = [Control.LISTENING, Control.EVENT]
OBSERVED = ("observation.place", "observation.parts.0")
FLAGS = ("terminated", "truncated")


def values_of(batch: Batch) -> list[Any]:
    tensors = {**dict(batch), **{"mask." + name: mask for name, mask in batch.mask.items()}}
    found = [(name, tensor.tolist()) for name, tensor in tensors.items()]
    return [
        *found,
        batch.host_resolutions.tolist(),
        batch.is_weight.tolist(),
        batch.probability.tolist(),
    ]


@settings(max_examples=80)
@given(scenes())
def test_native_calls_do_what_python_does(
    scene: tuple[dict[str, Any], int, str, list[tuple[str, Any]]],
) -> None:
    config, num_envs, mode, actions = scene
    one, other = (Side(config, native, num_envs, mode) for native in (True, False))
    with one.replay, other.replay:
        for action, given in (("add", 0), *actions, ("sample", 0)):
            assert one.do(action, given) == other.do(action, given), (action, given)
            assert one.state() == other.state(), (action, given)
        for side in (one, other):
            side.writer.close()
        assert stored(one.replay) == stored(other.replay)


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_a_plain_stream_is_native(kind: str) -> None:
    config = {
        "tables": {"main": {"capacity_steps": 300, "max_length": LONGEST}},
        "sampler": {"kind": kind, "unit": "step"},
        "fields": {"reward": {}},
        "batch_size": 4,
    }
    side = Side(config, native=True)
    step = {"form": "", "publish": True, "some": None, "resets": False}
    step |= {"nested": False, "terminated": [False], "truncated": [False]}
    with side.replay:
        side.do("add", 0)
        assert len(side.do("sample", 0)) == 5  # looks for dead writers, as once a second
        side.stream.get = None  # the Python path
        assert len(side.do("sample", 0)) == 5
        side.do("update", 1)
        side.do("step", step)
        side.do("step", step)
        assert side.steps.num_taken == 2
        side.do("add", 4)
        assert len(side.do("sample", 0)) == 5


# ---- a buffer of transitions ---------------------------------------------------------------------


@st.composite
def transitions(draw: st.DrawFn) -> tuple[int, str, int, list[dict[str, Any]]]:
    num_envs = draw(st.integers(1, 3))
    flags = st.lists(st.sampled_from([False] * 6 + [True]), min_size=num_envs, max_size=num_envs)
    one = st.fixed_dictionaries(
        {
            "terminated": flags,
            "truncated": flags,
            "jumps": st.lists(
                st.sampled_from([False] * 9 + [True]), min_size=num_envs, max_size=num_envs
            ),
            "form": st.sampled_from(
                ("plain",) * 12 + ("lists", "wide", "nan", "column", "negative zero")
            ),
            "sample": st.booleans(),
        }
    )
    mode = draw(st.sampled_from(["next_step", "same_step", "disabled"]))
    return num_envs, mode, draw(st.integers(1, 8)), draw(st.lists(one, min_size=4, max_size=40))


@given(transitions())
def test_native_transitions_are_those_of_python(
    scene: tuple[int, str, int, list[dict[str, Any]]],
) -> None:
    """With gaps, ends of both kinds, parts of `max_length`, and a table that evicts and
    compacts.
    """
    spaces = pytest.importorskip("gymnasium").spaces
    num_envs, mode, longest, steps = scene
    space = spaces.Box(-1e6, 1e6, (2,), np.float32)
    actions = spaces.Discrete(5)
    options = {
        "n_envs": num_envs,
        "autoreset": mode,
        "batch_size": 4,
        "table": {"max_length": longest},
    }
    buffers = [TransitionBuffer(12, space, actions, **options)]
    with in_python():
        buffers.append(TransitionBuffer(12, space, actions, **options))
    obs = np.zeros((num_envs, 2), np.float32)
    for at, step in enumerate(steps):
        base = (
            np.repeat(np.arange(num_envs) * 100 + at + 1, 2).reshape(num_envs, 2).astype(np.float32)
        )
        ended = np.array(step["terminated"]) | step["truncated"]
        rows: dict[str, Any] = {name: np.array(step[name]) for name in ("terminated", "truncated")}
        rows |= {
            "next_obs": base,
            "action": np.full(num_envs, at % 5),
            "reward": np.full(num_envs, at / 2),
        }
        match step["form"]:
            case "lists":
                rows = {name: value.tolist() for name, value in rows.items()}
            case "wide":
                rows["next_obs"] = base.astype(np.float64)
            case "nan":
                rows["next_obs"] = np.where(base == base.max(), np.float32("nan"), base)
            case "column":
                rows["reward"] = rows["reward"].reshape(-1, 1)
                rows["action"] = rows["action"].reshape(-1, 1)
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
