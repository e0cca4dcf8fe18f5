"""Prompts that a lease's group has once in the store: which columns decide, and the notice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from gear_support import prefix
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_support import write_prompts
from media_tables import MEDIA, image

from deepspeed_gear import ConfigError, Replay, RolloutWorker
from deepspeed_gear.store.records import SharedPrompt

SIZE = 4
PROMPT = 6
COLUMNS: dict[str, Any] = {
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "logp": {"dtype": "float32"},
    "experts": {"dtype": "uint8", "shape": [2]},
    "value": {"dtype": "float32", "rows": "T+1"},
    "ref": {"dtype": "float32", "late": True},
    "image": {"dtype": "int64", "role": "media"},
    "reward": {"dtype": "float32", "rows": "1"},
    "prompt": {"dtype": "int64", "rows": "1"},
}
OTHERS = ("logp", "experts", "value", "ref")  # columns of steps that make no other prompt


def section(data: Path, shared: list[str], media: bool = False, **options: Any) -> dict[str, Any]:
    """Return a gear section whose table declares the columns `shared`."""
    columns = {name: one for name, one in COLUMNS.items() if media or name != "image"}
    table = {
        "capacity_steps": 4000,
        "capacity_trajectories": 80,
        "max_length": 40,
        "writers": 1,
        "max_times_sampled": 1,
        "schema": {"columns": columns},
        "group": {"column": "prompt", "size": SIZE},
        "prompts": {"data": str(data), "max_lag": 4, "shared_columns": shared},
        **({"media": MEDIA} if media else {}),
    }
    return {
        "tables": {"main": table},
        "fields": {"tokens": {}, "logp": {}, "value": {"offset": 0}},
        "sampler": {"kind": "fifo", "unit": "group"},
        "pack": {"tokens": 256},
        "rollout": {"groups": 1},
        "shared_memory": {"prefix": prefix()},
        **options,
    }


def group(differing: list[list[str]], length: int = PROMPT) -> list[dict[str, Any]]:
    """Return a group whose members begin with one prompt, except in the columns named for each."""
    words = np.random.default_rng(length)
    members = []
    for member, columns in enumerate(differing):
        steps = length + 3 + member
        one = {
            "tokens": np.arange(steps, dtype=np.int32),
            "loss_mask": np.arange(steps) >= length,
            "logp": np.zeros(steps, np.float32),
            "experts": np.zeros((steps, 2), np.uint8),
            "value": np.zeros(steps + 1, np.float32),
            "ref": np.zeros(steps, np.float32),
            "reward": np.float32(member),
        }
        for name in (*OTHERS, "tokens"):
            one[name][length:] = words.integers(1, 9, one[name][length:].shape)
        for name in columns:
            one[name][int(words.integers(length)) if length else 0] += member + 1
        members.append(one)
    return members


#: Members that one native call reads and writes, and those that are written in Python.
FORMS: tuple[Callable[[dict[str, Any]], Any], ...] = (dict, MappingProxyType)


@contextmanager
def both(config: dict[str, Any]) -> Iterator[list[Replay]]:
    """Two replays: one for members of each of `FORMS`."""
    with ExitStack() as stack:
        named = [{**config, "shared_memory": {"prefix": prefix()}} for _ in FORMS]
        yield [stack.enter_context(Replay(one)) for one in named]


def stored(replay: Replay) -> dict[str, bytes]:
    """Return the rows and shared steps of all slots."""
    table = replay.tables["main"]
    assert table.shared_prompts is not None
    found = {"shared": table.shared_prompts.tobytes(), "slots": table.slots.tobytes()}
    for slot in range(table.num_trajectories):
        for name, rows in table.rows(slot).items():
            found[f"{slot} {name}"] = rows.tobytes()
    return found


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [one.getMessage() for one in caplog.records if "are stored in" in one.getMessage()]
    caplog.clear()
    return found


MEMBERS = st.lists(
    st.lists(st.sampled_from([*OTHERS, "tokens"]), max_size=3, unique=True),
    min_size=SIZE,
    max_size=SIZE,
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    groups=st.lists(st.tuples(MEMBERS, st.integers(0, PROMPT)), min_size=1, max_size=3),
    shared=st.lists(st.sampled_from(OTHERS), max_size=3, unique=True),
)
def test_native_and_python_share_and_warn_alike(
    groups: list[tuple[list[list[str]], int]],
    shared: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Against what each member differs in; other tokens make another prompt."""
    data = write_prompts(tmp_path_factory.mktemp("prompts") / "prompts", 3)
    made = [group(differing, length) for differing, length in groups]
    caplog.clear()
    with both(section(data, shared)) as replays, caplog.at_level(logging.WARNING, "deepspeed_gear"):
        texts = []
        for replay, form in zip(replays, FORMS, strict=True):
            with replay.rollout_worker() as worker:
                for lease, members in zip(worker.lease(len(made)), made, strict=True):
                    lease.commit([form(member) for member in members])
            texts.append(notices(caplog))
        assert stored(replays[0]) == stored(replays[1])
        assert texts[0] == texts[1]
        words = replays[0].tables["main"].shared_prompts
        assert words is not None
        expected = []
        for (_, length), members in zip(groups, made, strict=True):
            steps = [0] * SIZE
            names = set[str]()
            again = 0
            for member in range(1, SIZE if length > 1 else 1):
                apart = {
                    name
                    for name in (*OTHERS, "tokens")
                    if members[0][name][:length].tobytes()
                    != members[member][name][:length].tobytes()
                }
                if "tokens" in apart:
                    continue
                if apart - set(shared):
                    names |= apart - set(shared)
                    again += length - 1
                else:
                    steps[member] = length - 1
            at = len(expected) * SIZE
            assert words[at : at + SIZE, SharedPrompt.STEPS].tolist() == steps
            rows = sum(len(one["tokens"]) + 1 for one in members) - sum(steps)
            expected.append((rows, again, [name for name in COLUMNS if name in names]))
        warned = [one for one in expected if one[1]]
        assert len(texts[0]) == bool(warned)
        for text, (rows, again, names) in zip(texts[0], warned, strict=False):
            assert f"stored in {rows:,} rows, where {rows - again:,} suffice" in text
            assert f"differ in {', '.join(names)} at its tokens" in text


def test_values_of_a_declared_column_are_those_of_the_first_trajectory(tmp_path: Path) -> None:
    """At the shared steps; everywhere else, and in all other columns, each keeps its own."""
    data = write_prompts(tmp_path / "prompts", 3)
    members = group([["logp"]] * SIZE)
    given = [np.copy(one["logp"]) for one in members]
    with both(section(data, ["logp"])) as replays:
        for replay, form in zip(replays, FORMS, strict=True):
            with replay.rollout_worker() as worker:
                worker.lease()[0].commit([form(member) for member in members])
            for member, one in enumerate(replay.read(range(SIZE))):
                expected = np.concatenate([given[0][: PROMPT - 1], given[member][PROMPT - 1 :]])
                assert one["logp"].tolist() == expected.tolist()
                assert one["tokens"].tolist() == members[member]["tokens"].tolist()
            for micro in (micro for step in replay.rollout() for micro in step):
                counted = micro["logp"][0][micro.loss_mask[0]].tolist()
                assert counted == np.concatenate([one[PROMPT:] for one in given]).tolist()


def test_an_attached_worker_shares_by_the_option_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It learns of the columns from the store."""
    data = write_prompts(tmp_path / "prompts", 9)
    every = group([["logp", "experts"]] * SIZE)
    config = section(data, ["logp"], rollout={"groups": 2})
    with Replay(config) as replay, caplog.at_level(logging.WARNING, "deepspeed_gear"):
        with RolloutWorker.attach(config, run=replay.run) as worker:
            for lease in worker.lease(3):
                lease.commit(every)
        (text,) = notices(caplog)
    rows = sum(len(one["tokens"]) + 1 for one in every)
    again = (SIZE - 1) * (PROMPT - 1)
    assert text == (
        f"gear: table main: the {SIZE} trajectories of a group are stored in {rows} rows, where "
        f"{rows - again} suffice: trajectories begin with the same prompt, but differ in experts "
        'at its tokens. If nothing reads these values, add "shared_columns": ["experts"] to '
        "gear.tables.main.prompts, or store zeros there"
    )


def test_other_images_are_another_prompt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write_prompts(tmp_path / "prompts", 3)
    members = group([["logp"], ["logp"], [], ["logp"]])
    for member, one in enumerate(members):
        one["image"] = {1: image(member == 3)}
    with Replay(section(data, ["logp"], media=True)) as replay:
        with replay.rollout_worker() as worker, caplog.at_level(logging.WARNING, "deepspeed_gear"):
            worker.lease()[0].commit(members)
        words = replay.tables["main"].shared_prompts
        assert words is not None
        steps = PROMPT - 1
        assert words[:SIZE, SharedPrompt.STEPS].tolist() == [0, steps, steps, 0]
    assert not notices(caplog)


@pytest.mark.parametrize("column", ["tokens", "loss_mask", "image", "reward", "unknown"])
def test_columns_that_cannot_be_declared_are_refused(column: str, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "prompts", 3)
    with pytest.raises(ConfigError, match=rf"prompts\.shared_columns must name .*got '{column}'"):
        Replay(section(data, [column], media=True))


def test_the_option_is_refused_where_prompts_are_stored_whole(tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "prompts", 3)
    fields = {"tokens": {}, "logp": {"offset": -1}}
    with pytest.raises(ConfigError, match=r"stored whole: field logp is derived, or has an offset"):
        Replay(section(data, ["logp"], fields=fields))
    with Replay(section(data, [], fields=fields)) as replay:
        assert not replay.tables["main"].spec.shares_prompts
