"""NaN and infinities: one rule wherever values come in, and what is refused has changed nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_gear import Column, Replay, Schema
from deepspeed_gear.data.stored_values import as_numbers
from deepspeed_gear.errors import DataError, SchemaError
from deepspeed_gear.schema import FLOATING
from deepspeed_gear.store.records import Control

BITS = {
    "float16": (np.uint16, 0x7C00, 10),
    "bfloat16": (np.uint16, 0x7F80, 7),
    "float32": (np.uint32, 0x7F800000, 23),
    "float64": (np.uint64, 0x7FF0000000000000, 52),
}


def replay_of(schema: Schema, **more: Any) -> Replay:
    table = {
        "capacity_steps": 20_000,
        "max_length": 10_000,
        "remove": "fifo",
        **more.pop("table", {}),
    }
    section = {"tables": {"main": table}, "sampler": {"unit": "step"}, "batch_size": 4}
    return Replay({**section, **more}, schemas={"main": schema})


def occupied(replay: Replay) -> list[int]:
    table = replay.tables["main"]
    return [
        len(replay),
        *table.control[[Control.FREE_ROWS, Control.PENDING, Control.ROWS_HELD]].tolist(),
    ]


def array_of(bits: np.ndarray, dtype: str) -> np.ndarray:
    return bits if dtype == "bfloat16" else bits.view(dtype)


# ---- whole trajectories --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATING)
def test_add_finds_every_place_and_pattern(dtype: str) -> None:
    """Blocks of 8 KiB are checked as they are copied: the places lie around their borders."""
    kind, ones, fraction = BITS[dtype]
    item = np.dtype(kind).itemsize
    num_rows = 3 * 8192 // item + 5
    edge = 8192 // item
    schema = Schema([Column("n", "int64"), Column("x", dtype)])
    sign = 1 << (8 * item - 1)
    with replay_of(
        schema, table={"capacity_steps": 3 * num_rows, "max_length": num_rows}
    ) as replay:
        good = np.arange(num_rows) % 3
        finite = np.array([0, sign, 1, ones - 1, sign | (ones - 1), 1 << fraction], kind)[
            good
        ]  # and largest
        number = replay.add({"n": good, "x": array_of(finite, dtype)})
        before = occupied(replay)
        for at in (0, 1, edge - 1, edge, 2 * edge + 1, num_rows - 1):
            for pattern in (ones, sign | ones, ones | 1, sign | ones | ((1 << fraction) - 1)):
                bad = finite.copy()
                bad[at] = pattern
                with pytest.raises(
                    DataError, match=f"x must be finite, got '.* at step {at}'; correct"
                ):
                    replay.add({"n": good, "x": array_of(bad, dtype)})
                assert occupied(replay) == before
        assert replay.add({"n": good, "x": array_of(finite, dtype)}) == number + 1
        stored = replay.tables["main"].rows(
            int(replay.tables["main"].slots_of(np.array([number]))[0])
        )["x"]
        assert stored.tobytes() == finite.tobytes()


@pytest.mark.parametrize("rows", ["T", "T+1", "1"])
@pytest.mark.parametrize("given", [np.asarray, torch.tensor, np.ndarray.tolist])
def test_every_form_of_a_column_is_checked(rows: Any, given: Callable[..., Any]) -> None:
    schema = Schema([Column("n", "int64"), Column("x", "float32", (2,), rows=rows)])
    values = np.ones({"T": (3, 2), "T+1": (4, 2), "1": (2,)}[rows], np.float32)
    with replay_of(schema) as replay:
        replay.add({"n": np.arange(3), "x": given(values)})
        before = occupied(replay)
        values.reshape(-1)[-1] = np.inf
        place = "inf" if rows == "1" else "'inf at step"
        with pytest.raises(DataError, match=f"table main: column x must be finite, got {place}"):
            replay.add({"n": np.arange(3), "x": given(values)})
        assert occupied(replay) == before


LATE = Column("late", "float32", late=True)
WAYS: dict[str, tuple[list[Column], dict[str, Any]]] = {
    "priorities of steps": ([], {"sampler": {"kind": "prioritized", "unit": "step"}}),
    "late columns": ([LATE], {"fields": {"n": {}}}),
    "returns": ([], {"fields": {"return_to_go": {}}}),
    "uniform": ([], {"table": {"remove": "uniform"}}),
}


@pytest.mark.parametrize(("late", "more"), WAYS.values(), ids=WAYS)
def test_tables_that_are_not_written_by_one_call(late: list[Column], more: dict[str, Any]) -> None:
    schema = Schema([Column("n", "int64"), Column("reward", "float32", role="reward"), *late])
    with replay_of(schema, **more) as replay:
        rows = {"n": np.arange(3), "reward": np.ones(3, np.float32)}
        number = replay.add(rows)
        before = occupied(replay)
        rows["reward"][1] = np.nan
        with pytest.raises(DataError, match="column reward must be finite, got 'nan at step 1'"):
            replay.add(rows)
        assert occupied(replay) == before
        if late:
            with pytest.raises(DataError, match="column late must be finite, got '-inf at step 2'"):
                replay.fill(number, late=[0, 1, -np.inf])
            replay.fill(number, late=[0, 1, 2])


def test_allow_nan_takes_them_bit_for_bit() -> None:
    schema = Schema([Column(dtype, dtype, allow_nan=True) for dtype in FLOATING])
    for other in (Schema.from_json(schema.to_json()), Schema(list(schema))):
        assert other == schema
        assert other.fingerprint == schema.fingerprint
    strict = Schema([Column(dtype, dtype) for dtype in FLOATING])
    assert strict != schema
    assert strict.fingerprint != schema.fingerprint
    assert strict.allowing_nan() == schema
    patterns = {d: np.array([ones, ones | 1, 0], kind) for d, (kind, ones, _) in BITS.items()}
    with replay_of(schema) as replay:
        number = replay.add({dtype: array_of(bits, dtype) for dtype, bits in patterns.items()})
        stored = replay.tables["main"].rows(
            int(replay.tables["main"].slots_of(np.array([number]))[0])
        )
        for dtype, bits in patterns.items():
            assert stored[dtype].tobytes() == bits.tobytes()
            assert np.isnan(as_numbers(stored[dtype], schema[dtype])[1])
        vector = replay.vector_writer(1, autoreset="disabled")
        vector.reset()
        ended = np.ones(1, bool)
        assert vector.step(terminated=ended, **{d: [np.nan] for d in FLOATING}) == [
            (0, number + 1, 1)
        ]


def test_only_floating_columns_allow_nan() -> None:
    with pytest.raises(
        SchemaError, match="x: allow_nan must be left out unless the dtype is one of float"
    ):
        Column("x", "int64", allow_nan=True)
    columns = {"x": {"dtype": "float32", "allow_nan": True}, "y": {"dtype": "float32"}}
    table = {"capacity_steps": 9, "schema": {"columns": columns}}
    with Replay({"tables": {"main": table}, "batch_size": 1}) as replay:
        assert [column.allow_nan for column in replay.tables["main"].spec.schema] == [True, False]


# ---- steps of environments -----------------------------------------------------------------------

STEPS = Schema(
    [
        Column("observation", "float32", (2,), "observation", "T+1"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
        Column("goal", "float32", rows="1"),
    ]
)
LONGEST = 6


def step_of(t: int, mode: str, *, ends: bool) -> dict[str, Any]:
    """Return step t of two environments, of which the second may end."""
    state = np.array([[t, 0], [t, 1]], np.float32)
    final = {"observation": np.array([None, state[1] + 0.5], object)}
    return {
        "observation": state,
        "reward": np.array([t, -t], np.float32),
        "terminated": np.array([False, ends]),
        "truncated": np.zeros(2, bool),
        "goal": np.array([t, 10 + t], np.float32),
        **({"final": final} if mode == "same_step" and ends else {}),
    }


def spoiled(given: dict[str, Any], column: str, value: float) -> dict[str, Any]:
    """Return a step of which the second environment has a value that is not finite."""
    if column == "final":
        return {**given, "final": {"observation": [None, np.array([value, 0], np.float32)]}}
    array = given[column].copy()
    array.reshape(2, -1)[1, -1] = value
    return {**given, column: array}


@pytest.mark.parametrize("publish", [False, True])
@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_a_refused_step_changes_nothing_and_can_be_taken_again(publish: bool, mode: Any) -> None:
    """Two writers get the same steps; one also gets each of them spoiled, before it."""
    stored = []
    for spoils in (False, True):
        with replay_of(STEPS, table={"max_length": LONGEST, "capacity_steps": 400}) as replay:
            vector = replay.vector_writer(2, autoreset=mode)
            start = {"observation": np.zeros((2, 2), np.float32), "goal": np.ones(2, np.float32)}

            def refuse(
                call: Callable[..., Any], given: dict[str, Any], columns: list[str], **more: Any
            ) -> None:
                for column in columns:
                    kept = replay.num_steps
                    with pytest.raises(
                        DataError, match=r"must be finite, got 'nan at .*environment 1'"
                    ):
                        call(**spoiled(given, column, np.nan), **more)
                    assert replay.num_steps == kept

            if spoils:
                refuse(vector.reset, start, ["observation", "goal"])
            vector.reset(**start)
            waits = False
            for t in range(1, 2 * LONGEST + 3):
                ends = t in (3, 7)
                given = step_of(t, mode, ends=ends)
                if spoils:
                    wrong = ["observation", "goal", *([] if waits else ["reward"])]
                    refuse(vector.step, given, [*wrong, *given.keys() & {"final"}], publish=publish)
                if waits:  # the reward of a step that resets is not looked at
                    given = spoiled(given, "reward", np.inf)
                vector.step(**given, publish=publish)
                waits = ends and mode == "next_step"
                if ends and mode == "disabled":
                    mask = np.array([False, True])
                    if spoils:
                        refuse(vector.reset, start, ["observation", "goal"], mask=mask)
                    vector.reset(mask, **start)
            vector.step(**step_of(99, mode, ends=True))
            stored.append(
                [{k: v.tolist() for k, v in t.items()} for t in replay.read(range(len(replay)))]
            )
    assert stored[0] == stored[1]
    assert len(stored[0]) > 3


# ---- one trajectory step by step -----------------------------------------------------------------


def row(t: int, **more: Any) -> dict[str, Any]:
    return {
        "observation": [t, t],
        "reward": float(t),
        "terminated": False,
        "truncated": False,
        **more,
    }


@pytest.mark.parametrize("publish", [False, True])
def test_a_refused_row_is_not_appended(publish: bool) -> None:
    with replay_of(STEPS, table={"max_length": LONGEST}) as replay:
        writer = replay.writer()
        with pytest.raises(DataError, match="table main: column goal must be finite, got nan"):
            writer.trajectory(goal=np.nan)
        with pytest.raises(DataError, match="table main: column gaol must be in the schema"):
            writer.trajectory(gaol=1.0)
        with writer.trajectory(goal=1) as opened:
            for t in range(4):
                for wrong in ({"reward": -np.inf}, {"observation": torch.tensor([0, torch.nan])}):
                    with pytest.raises(
                        DataError, match=f"main: step {t}: column .* must be finite, got"
                    ):
                        opened.append(**row(t, **wrong), publish=publish)
                with pytest.raises(
                    DataError, match="reward must be convertible to float32, got 'complex"
                ):
                    opened.append(**row(t, reward=1j))
                opened.append(**row(t), publish=publish)
            with pytest.raises(DataError, match="column goal must be finite"):
                opened.set(goal=np.inf)
            opened.append(observation=[4, 4])
        (found,) = replay.read([opened.trajectory_id])
        assert found["reward"].tolist() == [0, 1, 2, 3]
        assert found["observation"][:, 0].tolist() == [0, 1, 2, 3, 4]
        assert found["goal"] == 1


@pytest.mark.parametrize("publish", [False, True])
def test_an_open_trajectory_can_be_discarded(publish: bool) -> None:
    with replay_of(STEPS, table={"max_length": LONGEST, "capacity_steps": 40}) as replay:
        before = occupied(replay)
        with replay.writer().trajectory(goal=1) as opened:
            for t in range(3):
                opened.append(**row(t), publish=publish)
            with pytest.raises(DataError, match="must be finite"):
                opened.append(**row(3, reward=np.nan), publish=publish)
            opened.discard()
            opened.discard()
            for call in (lambda: opened.append(**row(3)), lambda: opened.set(goal=2)):
                with pytest.raises(
                    DataError, match="trajectory must be open; it has ended, begin another"
                ):
                    call()
        if not publish:
            assert occupied(replay) == before
            return
        (found,) = replay.read([opened.trajectory_id])
        assert found["truncated"].tolist() == [False, True]
        replay.remove([opened.trajectory_id])
        ends = np.zeros(LONGEST, bool)
        rows = {"observation": np.zeros((LONGEST + 1, 2)), "reward": np.zeros(LONGEST), "goal": 0.0}
        replay.add({**rows, "terminated": ends, "truncated": ends})
        assert replay.tables["main"].control[Control.PENDING] == 0
