"""Whole trajectories as programs give them: the native call stores and refuses what Python does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_support import write_prompts
from replay_support import add_in_python

from deepspeed_gear import DataError, GearError, Replay, StoreFullError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.group_spec import SlotGroup
from deepspeed_gear.store.records import Control, SharedPrompt, SlotRetention
from deepspeed_gear.writer.inserter import Inserter

LATE = {"reward": {"late": True}, "ref": {"late": True}}
GROUP = {"column": "prompt", "size": 3}
SIZE = GROUP["size"]
#: Tables: their group, and which columns are late.
TABLES: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "late": (None, LATE),
    "groups": (GROUP, {}),
    "groups, late": ({**GROUP, "needs": ["reward"]}, LATE),
    "groups with members": ({**GROUP, "member": "member", "max_trajectories": 4}, LATE),
}
COLUMNS: dict[str, Any] = {
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "logp": {"dtype": "float32"},
    "ref": {"dtype": "float32"},
    "value": {"dtype": "float64", "rows": "T+1"},
    "state": {"dtype": "float32", "shape": [2]},
    "terminated": {"dtype": "bool", "role": "terminated"},
    "reward": {"dtype": "float32", "rows": "1"},
    "prompt": {"dtype": "int64", "rows": "1"},
    "member": {"dtype": "int16", "rows": "1"},
}


def section(name: str, prompts: Path | None = None, **options: Any) -> dict[str, Any]:
    """Return a gear section with one of TABLES."""
    group, late = TABLES[name]
    columns = {column: {**words, **late.get(column, {})} for column, words in COLUMNS.items()}
    table = {"capacity_trajectories": 40, "capacity_steps": 800, "max_length": 20}
    table |= {"schema": {"columns": columns}, **options}
    if group is not None:
        table["group"] = dict(group)
    if prompts is not None:
        table |= {"prompts": {"data": str(prompts), "max_lag": 2}, "max_times_sampled": 1}
    return {
        "tables": {"main": table},
        "sampler": {"kind": "fifo", "unit": "trajectory" if group is None else "group"},
        "pack": {"tokens": 128},
        "rollout": {"trajectories" if group is None else "groups": 2},
        "shared_memory": {"prefix": prefix()},
    }


def response(number: int, steps: int = 7, masked: int = 3, **columns: Any) -> dict[str, Any]:
    """Return a trajectory of arrays in the stored form; `columns` replace its own, None removes."""
    words = np.random.default_rng(number)
    made = {
        "tokens": words.integers(0, 99, steps).astype(np.int32),
        "loss_mask": np.arange(steps) >= masked,
        "logp": -words.random(steps, np.float32),
        "ref": -words.random(steps, np.float32),
        "value": words.random(steps + 1),
        "state": words.random((steps, 2), np.float32),
        "terminated": np.arange(steps) == steps - 1,
        "reward": np.float32(number),
        "prompt": np.int64(number // SIZE),
        "member": np.int16(number % SIZE),
    }
    return {name: value for name, value in {**made, **columns}.items() if value is not None}


def as_server(one: dict[str, Any]) -> dict[str, Any]:
    """Return a trajectory as a rollout server has it: lists and Python numbers."""
    return {name: value.tolist() for name, value in one.items() if name != "state"} | {
        "state": one["state"]
    }


def as_tensors(one: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.as_tensor(value) for name, value in one.items()}


def as_wide(one: dict[str, Any]) -> dict[str, Any]:
    """Return a trajectory with the types that tokenizers and losses give."""
    wide = {"tokens": np.int64, "loss_mask": np.int64, "logp": np.float64, "state": np.float64}
    wide |= {"reward": np.float64, "prompt": np.int32}
    return {name: value.astype(wide.get(name, value.dtype)) for name, value in one.items()}


def as_tuples(one: dict[str, Any]) -> dict[str, Any]:
    return {**one, "tokens": tuple(one["tokens"].tolist()), "member": np.int64(one["member"])}


GIVEN: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "arrays": dict,
    "lists and numbers": as_server,
    "tensors": as_tensors,
    "wider types": as_wide,
    "tuples": as_tuples,
}


@contextmanager
def both(config: Callable[[], dict[str, Any]]) -> Iterator[list[Replay]]:
    """A replay that adds natively, and one that adds in Python."""
    with ExitStack() as stack:
        made = [stack.enter_context(Replay(config())) for _ in range(2)]
        add_in_python(made[1])
        yield made


def state(replay: Replay) -> dict[str, Any]:
    """Return what a table holds, without the time at which it came."""
    table = replay.tables["main"]
    with table.lock:
        slots = np.nonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        found: dict[str, Any] = {
            "slots": table.slots[slots].tolist(),
            "control": table.control[: Control.MOVING].tolist(),
            "retention": table.views["retention"][slots].tolist(),
        }
        if table.groups is not None:
            words = np.delete(table.groups.words[slots], SlotGroup.TIME, axis=1)
            found["groups"] = words.tolist()
            found["counts"] = table.groups.counts.tolist()
        if table.shared_prompts is not None:
            found["shared"] = table.shared_prompts[slots].tolist()
        for slot in slots.tolist():
            for name, rows in table.rows(slot).items():
                found[f"{slot} {name}"] = (rows.dtype.str, rows.shape, rows.tobytes())
    return found


@contextmanager
def natively(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where a trajectory is left to Python."""

    def left(*_: object) -> None:
        raise AssertionError("it was left to Python")

    with monkeypatch.context() as patch:
        patch.setattr(Inserter, "checked", left)
        yield


@pytest.mark.parametrize("how", GIVEN)
@pytest.mark.parametrize("name", TABLES)
def test_both_store_the_same(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second trajectory lacks its late columns."""
    with both(lambda: section(name)) as (native, plain):
        for number in range(2 * SIZE):
            missing = dict.fromkeys(TABLES[name][1]) if number % 2 else {}
            one = GIVEN[how](response(number))
            row = {column: value for column, value in one.items() if column not in missing}
            with natively(monkeypatch):
                added = native.add(row)
            assert added == plain.add(row) == number
        assert state(native) == state(plain)
        assert native.can_sample() == plain.can_sample()
        for number in range(1, 2 * SIZE, 2):
            for replay in (native, plain):
                columns = {column: response(number)[column] for column in TABLES[name][1]}
                replay.fill(number, **columns)
        assert native.can_sample() == plain.can_sample()
        assert state(native) == state(plain)


def test_groups_that_are_full_evict_and_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table evicts whole groups for new ones; a group of members has its most trajectories."""
    options = {"capacity_trajectories": 9, "remove": "fifo"}
    with both(lambda: section("groups with members", **options)) as replays:
        for replay in replays:
            for number in range(5 * SIZE):
                replay.add(as_server(response(number, 5)))
            replay.add(response(12, member=9))
            with pytest.raises(DataError, match=r"group 4 .*max_trajectories = 4.*got 5"):
                replay.add(response(12, member=9))
        assert state(replays[0]) == state(replays[1])


@pytest.mark.parametrize("name", ["plain", "groups, late"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [1, 2, 2**31, 4, 5, 6, 7]},
        {"tokens": [1, 2.5, 3, 4, 5, 6, 7]},
        {"tokens": [1, "2", 3, 4, 5, 6, 7]},
        {"tokens": [1, None, 3, 4, 5, 6, 7]},
        {"tokens": b"1234567"},
        {"tokens": [1, 2, 3]},
        {"tokens": []},
        {"tokens": None},
        {"tokens": np.zeros((7, 1), np.int32)},
        {"tokens": np.array([1, 2, 3, 4, 5, 6, 1 << 40])},
        {"loss_mask": [0, 0, 0, 2, 1, 1, 1]},
        {"logp": [0.0, 1.0, float("nan"), 0.0, 0.0, 0.0, 0.0]},
        {"logp": [0.0, 1.0, 1e39, 0.0, 0.0, 0.0, 0.0]},
        {"logp": np.full(7, np.inf, np.float32)},
        {"value": np.zeros(7)},
        {"state": [[1.0, 2.0]] * 6},
        {"terminated": [0, 0, 1, 0, 0, 0, 1]},
        {"reward": 1e39},
        {"reward": float("inf")},
        {"reward": [1.0]},
        {"reward": "1"},
        {"prompt": 2**63},
        {"prompt": 0.5},
        {"member": 2**15},
        {"other": 1},
    ],
)
def test_both_refuse_the_same(name: str, wrong: dict[str, Any]) -> None:
    with both(lambda: section(name)) as replays:
        errors = []
        for replay in replays:
            replay.add(response(0))
            before = state(replay)
            with pytest.raises(DataError) as raised:
                replay.add(response(1, **wrong))
            errors.append(str(raised.value))
            # Rows are checked while they are copied, to a slot that is free again.
            after = state(replay)
            rover = (Control.ROVER, Control.FREE_SLOT, Control.SHORT_ROVER)
            assert [word for at, word in enumerate(after["control"]) if at not in rover] == [
                word for at, word in enumerate(before["control"]) if at not in rover
            ]
            assert {**after, "control": 0} == {**before, "control": 0}
            replay.add(response(2))
        assert errors[0] == errors[1]


def test_a_trajectory_that_is_too_long_is_refused() -> None:
    with Replay(section("groups, late")) as replay:
        with pytest.raises(DataError, match=r"max_length = 20 steps, got 21"):
            replay.add(as_server(response(0, 21)))
        assert replay.tables["main"].num_trajectories == 0


DTYPES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-300, 300),
    st.sampled_from([2**k + d for k in (7, 8, 15, 16, 31, 53, 63, 64) for d in (-1, 0, 1)]),
    st.sampled_from([-(2**k) + d for k in (7, 15, 31, 53, 63) for d in (-1, 0, 1)]),
    st.floats(allow_nan=True, allow_infinity=True, width=64),
    st.sampled_from([0.5, 1.0, -0.0, 2.0, 3.4028235e38, 3.5e38, 65504.0, 65520.0, 9.1e15, 1e-46]),
)


@pytest.fixture(scope="module")
def sides() -> Iterator[dict[str, list[Replay]]]:
    """By dtype, a replay that adds natively, and one that adds in Python."""
    with ExitStack() as stack:
        found = {}
        for dtype in DTYPES:
            columns = {"x": {"dtype": dtype, "allow_nan": "float" in dtype}}
            columns["one"] = {**columns["x"], "rows": "1"}
            table = {"capacity_steps": 400, "remove": "fifo", "schema": {"columns": columns}}
            config = {"tables": {"main": table}, "batch_size": 1}
            config["shared_memory"] = {"prefix": prefix()}
            found[dtype] = stack.enter_context(both(lambda config=config: config))
        yield found


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=60, deadline=None)
@given(rows=st.lists(NUMBERS, min_size=1, max_size=4), one=NUMBERS, as_array=st.booleans())
def test_numbers_become_what_numpy_makes_of_them(
    sides: dict[str, list[Replay]], dtype: str, rows: list[Any], one: Any, as_array: bool
) -> None:
    """Lists and numbers of any size and kind, mixed: the same bits, or the same error."""
    given_rows: Any = np.asarray(rows) if as_array else rows
    outcomes = []
    for replay in sides[dtype]:
        table = replay.tables["main"]
        try:
            number = replay.add({"x": given_rows, "one": one})
        except GearError as error:
            outcomes.append(str(error))
            continue
        slot = int(table.slots_of(np.array([number]))[0])
        outcomes.append({name: rows.tobytes() for name, rows in table.rows(slot).items()})
    assert outcomes[0] == outcomes[1]


def test_the_clock_of_a_group_is_that_of_python() -> None:
    with Replay(section("groups")) as replay:
        table = replay.tables["main"]
        assert table.groups is not None
        before = time.monotonic_ns()
        number = replay.add(response(0))
        slot = int(table.slots_of(np.array([number]))[0])
        assert before <= table.groups.words[slot, SlotGroup.TIME] <= time.monotonic_ns()


# ---- groups of leases ----------------------------------------------------------------------------


def group_of(number: int, prompts: list[int], late: bool = True) -> list[dict[str, Any]]:
    """Return a group whose members begin with as many equal steps as `prompts` has, each."""
    made = []
    for member, prompt in enumerate(prompts):
        one = response(100 * number + member, prompt + 4 + member, prompt)
        same = response(1000 + number, 20)
        for name in ("tokens", "logp", "ref", "value", "state"):
            one[name][:prompt] = same[name][:prompt]
        del one["prompt"]
        if not late and member:
            del one["ref"], one["reward"]
        made.append(one)
    return made


GROUPS = {
    "equal prompts": lambda: group_of(0, [6, 6, 6]),
    "prompts of several lengths": lambda: group_of(1, [6, 4, 5]),
    "no prompt": lambda: group_of(2, [0, 0, 0]),
    "one prompt step": lambda: group_of(3, [1, 1, 1]),
    "late columns that some lack": lambda: group_of(4, [6, 6, 6], late=False),
    "no loss step": lambda: [
        {**one, "loss_mask": one["loss_mask"] & False} for one in group_of(5, [5, 5, 5])
    ],
    "prompts that differ": lambda: [
        {**one, "tokens": one["tokens"] + member} for member, one in enumerate(group_of(6, [6] * 3))
    ],
    "a late column of zeros beside one that is missing": lambda: [
        {**one, **({"ref": one["ref"] * 0} if member == 0 else {})}
        for member, one in enumerate(group_of(7, [6] * 3, late=False))
    ],
}


@pytest.mark.parametrize("how", GIVEN)
@pytest.mark.parametrize("kind", GROUPS)
def test_both_commit_the_same_groups(
    kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_prompts(tmp_path / "prompts", 7)
    with both(lambda: section("groups, late", data)) as (native, plain), ExitStack() as stack:
        for replay, patch in ((native, natively(monkeypatch)), (plain, ExitStack())):
            worker = stack.enter_context(replay.rollout_worker())
            for lease in worker.lease(2):
                made = [{**one} for one in GROUPS[kind]()]
                if how == "arrays":
                    rows = made
                else:
                    rows = [GIVEN[how]({**one, "prompt": np.int64(lease.number)}) for one in made]
                with patch if lease.number == 0 else ExitStack():
                    ids = lease.commit(rows)
                assert ids == [SIZE * lease.number + member for member in range(SIZE)]
        assert state(native) == state(plain)
        table = native.tables["main"]
        assert table.shared_prompts is not None
        shared = [0, 3] if kind == "prompts of several lengths" else [0, 5]
        if kind in ("no prompt", "one prompt step", "prompts that differ"):
            shared = [0, 0]
        if kind in ("equal prompts", "late columns that some lack") or shared[1] in (0, 3):
            is_late = kind == "late columns that some lack"  # the first has rows, the others zeros
            shared[1] = 0 if is_late else shared[1]
            assert table.shared_prompts[:2, SharedPrompt.STEPS].tolist() == shared
        versions = table.views["retention"][: 2 * SIZE, SlotRetention.POLICY_VERSION]
        assert not versions.any()


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group[:2],
        lambda group: [*group, group[0]],
        lambda group: [group[0], {**group[1], "prompt": 5}, group[2]],
        lambda group: [group[0], {**group[1], "prompt": 2.5}, group[2]],
        lambda group: [*group[:2], {**group[2], "logp": group[2]["logp"] * np.nan}],
        lambda group: [*group[:2], {**group[2], "tokens": group[2]["tokens"][1:]}],
        lambda group: [*group[:2], {**group[2], "unknown": 1}],
        lambda group: [*group[:2], 7],
        lambda group: {0: group},
    ],
)
def test_a_wrong_group_changes_nothing(change: Callable[[Any], Any], tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "prompts", 7)
    with both(lambda: section("groups, late", data)) as replays, ExitStack() as stack:
        errors = []
        for replay in replays:
            (lease,) = stack.enter_context(replay.rollout_worker()).lease()
            before = state(replay)
            with pytest.raises(GearError) as raised:
                lease.commit(change(group_of(0, [6] * 3)))
            errors.append((type(raised.value), str(raised.value)))
            assert state(replay) == before
            lease.commit(group_of(0, [6] * 3))
            assert replay.tables["main"].num_trajectories == SIZE
        assert errors[0] == errors[1]


def test_a_group_without_room_leaves_no_rows(tmp_path: Path) -> None:
    """Rows of its first members that were reserved before are free again."""
    data = write_prompts(tmp_path / "prompts", 7)
    options = {"capacity_steps": 63, "capacity_trajectories": 24}
    long = [response(m, 20, 0, prompt=None) for m in range(SIZE)]
    with Replay(section("groups, late", data, **options)) as replay:
        with replay.rollout_worker() as worker:
            first, second = worker.lease(2)
            first.commit(long)
            before = state(replay)
            with pytest.raises(StoreFullError):
                second.commit(long)
            assert state(replay) == before
            second.commit(group_of(1, [0] * 3))
        assert replay.tables["main"].num_trajectories == 2 * SIZE
