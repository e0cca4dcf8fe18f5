"""Curricula: conditions on prompts, and priorities by which prompts are drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_support import check_books, ledger_section, responses
from remote_support import TOKEN, served

from deepspeed_gear import (
    CheckpointError,
    Column,
    ConfigError,
    DatasetWriter,
    Lease,
    RemoteRolloutWorker,
    Replay,
    RolloutWorker,
    Schema,
)

PROMPTS = Schema(
    [
        Column("tokens", "int32", (), "token"),
        Column("index", "int64", (), "other", "1"),
        Column("difficulty", "float32", (), "other", "1"),
        Column("is_code", "bool", (), "other", "1"),
        Column("source", "json", (), "other", "1", max_bytes=8),
    ]
)
DIFFICULTIES = (0.1, 0.8, 0.2, 0.7, 0.5, 0.9, 0.2)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data set of seven prompts with difficulties."""
    with DatasetWriter(tmp_path / "prompts", PROMPTS) as writer:
        for index, difficulty in enumerate(DIFFICULTIES):
            one: dict[str, Any] = {"tokens": np.full(2, index, np.int32), "index": np.int64(index)}
            one |= {
                "difficulty": np.float32(difficulty),
                "is_code": np.bool_(index % 2),
                "source": "web",
            }
            writer.add(one)
    return tmp_path / "prompts"


def train(replay: Replay, worker: RolloutWorker, batches: int) -> list[Lease]:
    """Lease, commit and train batches of three groups; return the leases."""
    leases = []
    for _ in range(batches):
        own = worker.lease(3, timeout_s=0)
        for lease in own:
            lease.commit(responses(lease))
        leases += own
        for step in replay.rollout():
            list(step)
    return leases


@pytest.mark.parametrize(
    ("where", "admitted"),
    [
        ({"difficulty": {"min": 0.2, "max": 0.8}}, [1, 2, 3, 4, 6]),  # as float32
        ({"difficulty": {"in": [0.1, 0.9]}}, [0, 5]),
        ({"difficulty": {"max": 0.5}, "is_code": {"in": [False]}}, [0, 2, 4, 6]),
        ({"index": {"min": 6}}, [6]),
    ],
)
def test_only_prompts_in_a_band_are_leased(
    data: Path, where: Mapping[str, Any], admitted: list[int]
) -> None:
    """Bounds are closed, in the dtype of the column; each epoch has every admitted prompt once."""
    config = ledger_section(data, {"where": where, "max_lag": 0})
    with Replay(config) as replay, RolloutWorker.attach(config) as worker:
        leases = train(replay, worker, len(admitted))
        assert Counter(lease.index for lease in leases) == dict.fromkeys(admitted, 3)
        size = len(admitted)
        for epoch in range(3):
            own = leases[epoch * size : (epoch + 1) * size]
            assert sorted(lease.index for lease in own) == admitted
            assert all(lease.prompt["index"] == lease.index for lease in own)
        books = check_books(replay)
        assert (books["issued"], books["epoch"]) == (3 * size, 3)


@pytest.mark.parametrize(
    ("where", "match"),
    [
        ({"difficulty": {"min": 0.91}}, r"where must admit some of the 7 prompts .* \[0.1, 0.9\]"),
        (
            {"hardness": {"min": 0.2}},
            r"where\.hardness must name .*got 'hardness'; there are: index, difficulty, is_code",
        ),
        ({"tokens": {"min": 0.2}}, r"where\.tokens must name"),
        ({"is_code": {"min": 1}}, "must use in, as the column is bool"),
        ({"source": {"in": [1]}}, r"where\.source must name"),  # a column of text
        ({"difficulty": {}}, "difficulty must have min, max or in"),
        ({"difficulty": {"min": 0.8, "max": 0.2}}, "min must be at most"),
    ],
)
def test_conditions_that_do_not_suit_the_prompts(data: Path, where: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Replay(ledger_section(data, {"where": where}))


def test_remote_workers_get_the_prompts_in_a_band(data: Path) -> None:
    config = ledger_section(data, {"where": {"difficulty": {"min": 0.7}}, "max_lag": 0})
    with (
        served(config, schema=None) as (_, gateway),
        RemoteRolloutWorker.connect(gateway.url, token=TOKEN, timeout_s=20.0) as worker,
    ):
        leases = worker.lease(3)
        assert sorted(lease.index for lease in leases) == [1, 3, 5]
        assert all(lease.prompt["index"] == lease.index for lease in leases)


def test_a_run_resumes_with_its_conditions(data: Path, tmp_path: Path) -> None:
    band = {"where": {"difficulty": {"min": 0.2, "max": 0.8}}}
    with Replay(ledger_section(data, band)) as replay, replay.rollout_worker() as worker:
        train(replay, worker, 1)
        replay.save(tmp_path / "saved")
        expected = [lease.index for lease in train(replay, worker, 3)]
    with Replay(ledger_section(data, band)) as replay, replay.rollout_worker() as worker:
        replay.load(tmp_path / "saved")
        assert [lease.index for lease in train(replay, worker, 3)] == expected
    for other in ({}, {"where": {"difficulty": {"min": 0.3, "max": 0.8}}}):
        with (
            Replay(ledger_section(data, other)) as replay,
            pytest.raises(CheckpointError, match=r"with the prompts\.where of this one"),
        ):
            replay.load(tmp_path / "saved")
