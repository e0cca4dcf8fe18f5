"""Ragged columns by writers: step by step, from turns, and beside environments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ragged_tables import MAX, MEMORY, RAGGED, ragged_section, supported

from deepspeed_gear import DataError, Ragged, Replay, Turn, trajectories_from_turns

NAMES = ("ids", "logs")
LATE = {"ids": {"dtype": "int32", "max_values": MAX, "late": True}}


def test_steps_are_appended_with_their_values() -> None:
    with Replay(ragged_section()) as replay, replay.writer() as writer:
        for given in supported(5):
            with writer.trajectory(reward=given["reward"], prompt=given["prompt"]) as growing:
                for step in range(len(given["tokens"])):
                    row = {name: given[name][step] for name in ("tokens", "loss_mask", "logp")}
                    values: dict[str, Any] = {name: given[name][step] for name in NAMES}
                    values["logs"] = values["logs"].to(torch.bfloat16)
                    if step % 2:
                        values["ids"] = values["ids"].tolist()
                    growing.append(**row, **values)
                    values["logs"][:] = 0  # the row was copied
            assert growing.trajectory_id is not None
            found = replay.read([growing.trajectory_id])[0]
            for name in NAMES:
                assert found[name].offsets.equal(given[name].offsets)
                assert found[name].values.double().equal(given[name].values.double())


def test_a_step_that_does_not_fit_is_not_appended() -> None:
    with Replay(ragged_section()) as replay, replay.writer() as writer:
        given = supported(1)[0]
        row = {"tokens": 3, "loss_mask": True, "logp": 0.0, "logs": []}
        with writer.trajectory(reward=0.0, prompt=1) as growing:
            growing.append(**row, ids=[1, 2])
            cases = [
                ([1] * (MAX + 1), rf"step 1: column ids must have at most max_values = {MAX}"),
                ([0.5], r"step 1: column ids must hold values that int32 can hold"),
                (["a"], r"step 1: column ids must have values for each step"),
                (7, r"step 1: column ids must have values for each step"),
            ]
            for wrong, text in cases:
                with pytest.raises(DataError, match=text):
                    growing.append(**row, ids=wrong)
            with pytest.raises(DataError, match="column ids must be in every step"):
                growing.append(**row)
            with pytest.raises(DataError, match=r"no media or ragged columns"):
                growing.append(**row, ids=[], publish=True)
        assert growing.trajectory_id is not None
        found = replay.read([growing.trajectory_id])[0]["ids"]
        assert [part.tolist() for part in found] == [[1, 2], []], "the step itself was appended"
        assert len(given["tokens"])


def test_late_values_may_come_with_the_end() -> None:
    config = ragged_section(late=True)
    with Replay(config) as replay, replay.writer() as writer:
        with writer.trajectory(reward=0.0, prompt=1) as growing:
            growing.append(tokens=3, loss_mask=True, logp=0.0)
            growing.append(tokens=4, loss_mask=True, logp=0.0)
            with pytest.raises(DataError, match="column ids must have at most max_values"):
                growing.set(ids=[[], [1] * (MAX + 1)])
            growing.set(ids=[[], [5, 6]])
        assert growing.trajectory_id is not None
        found = replay.read([growing.trajectory_id])[0]
        assert [part.tolist() for part in found["ids"]] == [[], [5, 6]]
        assert replay.statistics()["late"]["main"]["logs"]["absent"] == 1
        assert replay.statistics()["late"]["main"]["ids"]["absent"] == 0


def environments(columns: dict[str, Any]) -> dict[str, Any]:
    config = ragged_section(sampler={"kind": "uniform", "unit": "step"}, batch_size=4)
    del config["pack"], config["rollout"]
    steps = {
        "observation": {"dtype": "float32", "rows": "T+1", "role": "observation"},
        "action": {"dtype": "int64", "role": "action"},
        "terminated": {"dtype": "bool", "role": "terminated"},
    }
    main = config["tables"]["main"]
    main |= {"schema": {"columns": {**steps, **columns}}, "ragged": dict(MEMORY)}
    return config


def test_environments_have_late_ragged_columns_only() -> None:
    text = "column ids must be late where environments write"
    with Replay(environments(RAGGED)) as replay, pytest.raises(DataError, match=text):
        replay.vector_writer(2, "disabled")
    with Replay(environments(LATE)) as replay:
        writer = replay.vector_writer(2, "disabled")
        writer.reset(observation=np.zeros(2, np.float32))
        for step in range(4):
            writer.step(
                action=np.zeros(2, np.int64),
                observation=np.ones(2, np.float32),
                terminated=np.full(2, step == 3),
            )
        writer.close()
        assert replay.tables["main"].num_trajectories == 2
        replay.fill(1, ids=[[1], [], [2, 3], []])
        found = replay.read([0, 1])
        assert found[0]["ids"] == Ragged(torch.zeros(0, dtype=torch.int32), [0] * 5)
        assert [part.tolist() for part in found[1]["ids"]] == [[1], [], [2, 3], []]


def test_turns_have_ragged_columns() -> None:
    turns = [
        Turn([1, 2], [3, 4], [-0.1, -0.2], columns={"ids": Ragged.of_rows([[3, 9], [4]])}),
        Turn([1, 2, 3, 4, 7], [5], [-0.3], columns={"ids": Ragged.of_rows([[]])}),
        Turn([1, 8], [6], [-0.4], columns={"ids": Ragged.of_rows([[6, 5, 4]])}),
    ]
    first, second = trajectories_from_turns(turns)
    assert [part.tolist() for part in first["ids"]] == [[], [], [3, 9], [4], [], []]
    assert [part.tolist() for part in second["ids"]] == [[], [], [6, 5, 4]]
    wrong = Turn([1, 2], [3, 4], [-0.1, -0.2], columns={"ids": Ragged.of_rows([[3, 9]])})
    with pytest.raises(DataError, match=r"columns: ids must have one value for each of 2 output"):
        trajectories_from_turns([wrong])
    plain = Turn([1, 2], [3, 4], [-0.1, -0.2], columns={"ids": [3, 4]})
    with pytest.raises(DataError, match=r"turn 1: ids must have rows of the shape of turn 0, ragg"):
        trajectories_from_turns([turns[0], plain])
