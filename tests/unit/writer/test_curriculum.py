"""Curricula: conditions on prompts, and priorities by which prompts are drawn."""

from __future__ import annotations

import copy
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import prefix, run_command
from ledger_support import check_books, ledger_section, responses
from remote_support import TOKEN, served
from rollout_support import micros
from thread_ranks import ThreadPlane, on_ranks

from deepspeed_gear import (
    CheckpointError,
    Column,
    ConfigError,
    DataError,
    DatasetWriter,
    GearError,
    Lease,
    PeerError,
    RemoteRolloutWorker,
    Replay,
    RolloutWorker,
    Schema,
)
from deepspeed_gear.cli import inspect, preview, simulate
from deepspeed_gear.replay.prompt_priorities import PromptPriorities

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
        micros(replay.rollout())
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


def weighted(data: Path, sampler: str = "prioritized", **options: Any) -> dict[str, Any]:
    """A section whose table has a column for the places of prompts in their data set."""
    prompts = {"sampler": sampler, "column": "place", **options.pop("prompts", {})}
    section = copy.deepcopy(ledger_section(data, prompts, **options))  # its columns are shared
    column = {"dtype": "int64", "rows": "1"}
    section["tables"]["main"]["schema"]["columns"]["place"] = column
    return section


def test_prompts_are_drawn_in_proportion_to_their_priorities(data: Path) -> None:
    """Chi-square against the masses; one of priority 0 is never drawn."""
    config = weighted(data, prompts={"where": {"difficulty": {"max": 0.8}}, "attempts": 1})
    priorities = {0: 1.0, 1: 0.25, 2: 0.0, 3: 2.0, 4: 0.5, 6: 3.25}
    with Replay(config) as replay, replay.rollout_worker() as worker:
        assert replay.prompt_priorities().tolist() == [1.0] * 5 + [0.0] + [1.0]
        replay.set_prompt_priorities([*priorities], [*priorities.values()])
        expected = [priorities.get(place, 0.0) for place in range(7)]
        assert replay.prompt_priorities().tolist() == expected
        drawn = Counter[int]()
        for _ in range(700):
            for lease in worker.lease(9, timeout_s=0):
                drawn[lease.index] += 1
                lease.fail(retry=False)
    total = sum(priorities.values())
    assert {place for place, p in priorities.items() if p} == {*drawn}
    wanted = {place: 6300 * p / total for place, p in priorities.items() if p}
    assert sum(drawn.values()) == 6300
    chi = sum((drawn[place] - n) ** 2 / n for place, n in wanted.items())
    assert chi < 18.5, (chi, drawn)  # 4 degrees of freedom: 0.1%


def test_an_epoch_draws_each_prompt_once_by_priority(data: Path) -> None:
    """Of each epoch the first prompts are mostly those of the highest priorities."""
    config = weighted(data, "prioritized_epoch", prompts={"attempts": 1})
    firsts = Counter[int]()
    with Replay(config) as replay, replay.rollout_worker() as worker:
        replay.set_prompt_priorities(np.arange(7), np.array([1, 1, 1, 1, 1, 1, 6.0]))
        for _ in range(400):
            leases = [worker.lease(timeout_s=0)[0] for _ in range(7)]
            assert sorted(lease.index for lease in leases) == [*range(7)]
            firsts[leases[0].index] += 1
            for lease in leases:
                lease.fail(retry=False)
    wanted = [400 / 12] * 6 + [200.0]
    chi = sum((firsts[place] - n) ** 2 / n for place, n in enumerate(wanted))
    assert chi < 22.5, (chi, firsts)  # 6 degrees of freedom: 0.1%


def test_pass_rates_of_a_batch_decide_what_is_leased_next(data: Path) -> None:
    """Training reads which prompts its groups answer, and new priorities count at once."""
    config = weighted(data, prompts={"max_lag": 0})
    with Replay(config) as replay, RolloutWorker.attach(config) as worker:
        leases = worker.lease(3)
        for lease in leases:
            lease.commit(responses(lease))
        rollout = replay.rollout()
        places = [lease.index for lease in leases for _ in range(2)]
        assert rollout.values("place").tolist() == places
        micros(rollout)
        replay.set_prompt_priorities(np.arange(7), [0, 0, 0, 0, 0, 1, 0])
        assert not replay.can_sample()
        own = worker.lease(3)
        assert [lease.index for lease in own] == [5, 5, 5]
        # A lease that comes back keeps its prompt, also if priorities have changed.
        replay.set_prompt_priorities([5, 2], [0, 1])
        own[0].fail()
        again = worker.lease()[0]
        assert (again.number, again.index, again.attempt) == (own[0].number, 5, 2)
        books = check_books(replay)["priorities"]
        assert books == {"prompts": 7, "zero": 6, "sum": 1.0, "smallest": 0.0, "largest": 1.0}


@pytest.mark.parametrize("sampler", ["prioritized", "prioritized_epoch"])
def test_a_resumed_run_draws_the_same_prompts(data: Path, tmp_path: Path, sampler: str) -> None:
    """In the middle of an epoch, with priorities that were set before the save and after it."""
    config = weighted(data, sampler, prompts={"max_lag": 1})
    priorities = [5, 1, 2, 1, 4, 1, 3]

    def after(replay: Replay, worker: RolloutWorker) -> list[tuple[int, int]]:
        found = train(replay, worker, 2)
        replay.set_prompt_priorities([0, 6], [1, 9])
        return [(lease.number, lease.index) for lease in found + train(replay, worker, 4)]

    with Replay(config) as replay, replay.rollout_worker() as worker:
        train(replay, worker, 1)
        replay.set_prompt_priorities(np.arange(7), priorities)
        train(replay, worker, 2)
        open_leases = worker.lease(2)
        replay.save(tmp_path / "saved")
        for lease in open_leases:
            lease.fail()  # as a load does
        expected = after(replay, worker)
        after(replay, worker)
    with Replay(config) as replay, replay.rollout_worker() as worker:
        replay.load(tmp_path / "saved")
        assert replay.prompt_priorities().tolist() == priorities
        assert after(replay, worker) == expected
        check_books(replay)
    other = "prioritized" if sampler == "prioritized_epoch" else "epoch"
    with (
        Replay(weighted(data, other, prompts={"max_lag": 1})) as replay,
        pytest.raises(CheckpointError, match=r"with the prompts\.sampler of this one"),
    ):
        replay.load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("prompts", "priorities", "match"),
    [
        ([0, 7], [1, 1], "prompts must be places in the data set of 7 prompts, got 7"),
        ([-1], [1], "must be places in the data set"),
        ([5], [1], r"prompts must pass prompts\.where: others are never drawn, got 5"),
        ([0.5], [1], "prompts must be integers"),
        ([0, 1], [1], r"priorities must have shape \[2\]"),
        ([0], [float("nan")], "must be finite and at least 0"),
        ([0], [-1], "must be finite and at least 0"),
        ([0], [1e40], "must be finite and at least 0"),
        ([0], [65537], "priorities must be at most 65536 for 6 prompts"),
        ([0, 1, 2, 3, 4, 6], [0] * 6, "must leave a prompt with a priority above 0"),
    ],
)
def test_priorities_that_are_refused_change_nothing(
    data: Path, prompts: Any, priorities: Any, match: str
) -> None:
    config = weighted(data, prompts={"where": {"difficulty": {"max": 0.8}}})
    with Replay(config) as replay:
        replay.set_prompt_priorities([0, 0], [3, 2])  # the last one
        with pytest.raises(GearError, match=match):
            replay.set_prompt_priorities(prompts, priorities)
        assert replay.prompt_priorities().tolist() == [2, 1, 1, 1, 1, 0, 1]


def test_configs_that_priorities_do_not_suit(data: Path) -> None:
    once = weighted(data, "prioritized_epoch")
    kept = weighted(data)
    kept["shared_memory"]["keep"] = True
    missing = weighted(data, prompts={"column": "spot"})
    taken = weighted(data, prompts={"column": "prompt"})
    for config, match in [
        (kept, 'prompts.sampler must be "epoch" with gear.shared_memory.keep'),
        (missing, r"prompts\.column must name .*there are: place"),
        (taken, r"prompts\.column must name .*not a group's"),
    ]:
        with pytest.raises(ConfigError, match=match):
            Replay(config)
    with (
        Replay(once) as replay,
        pytest.raises(DataError, match='must be above 0 with "prioritized_epoch"'),
    ):
        replay.set_prompt_priorities([1], [0])
    with (
        Replay(ledger_section(data)) as replay,
        pytest.raises(ConfigError, match='sampler must be "prioritized" or "prioritized_epoch"'),
    ):
        replay.set_prompt_priorities([1], [1])


def test_remote_workers_draw_and_name_the_prompt(data: Path) -> None:
    config = weighted(data, prompts={"max_lag": 0})
    with (
        served(config, schema=None) as (replay, gateway),
        RemoteRolloutWorker.connect(gateway.url, token=TOKEN, timeout_s=20.0) as worker,
    ):
        replay.set_prompt_priorities(np.arange(7), np.arange(7) == 3)
        leases = worker.lease(3)
        for lease in leases:
            assert (lease.index, int(lease.prompt["index"])) == (3, 3)
        wrong = [{**one, "place": np.int64(2)} for one in responses(leases[0])]
        with pytest.raises(DataError, match="must have the prompt's place in its data set"):
            leases[0].commit(wrong)
        for lease in leases:
            lease.commit(responses(lease))
        assert replay.rollout().values("place").tolist() == [3] * 6


def test_the_command_line_shows_priorities_and_conditions(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = weighted(data, prompts={"where": {"difficulty": {"max": 0.8}}})
    with Replay(config) as replay, replay.rollout_worker() as worker:
        replay.set_prompt_priorities([0, 1], [0, 0.5])
        worker.lease(2)
        assert run_command(inspect, "--living", str(os.getpid())) == 0
        text = capsys.readouterr().out
        assert "2 issued: 0 trained" in text
        assert "priorities    sum 4.5 of 6 prompts, from 0 to 1, 1 of them 0" in text
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"gear": config}))
    assert run_command(preview, str(file)) == 0
    text = capsys.readouterr().out
    assert "9 prompts leased or waiting at once, prompts left out by difficulty, drawn by" in text
    assert run_command(simulate, str(file), "--lengths", "lognormal:4,1", "--batches", "3") == 0


def test_ranks_of_two_nodes_set_the_same_priorities(data: Path) -> None:
    """Each rank gives a part; the last rank's value counts, and an error is raised on all."""
    configs = [weighted(data, shared_memory={"prefix": f"{prefix()}-{node}"}) for node in range(2)]
    with Replay(configs[0]) as one, Replay(configs[1]) as other:
        tables = [replay.tables["main"] for replay in (one, other)]

        def act(plane: ThreadPlane) -> list[float]:  # ranks 0 and 2 lead their nodes
            leads = plane.rank % 2 == 0
            priorities = PromptPriorities(tables[plane.rank // 2], plane, leads)
            parts: list[tuple[list[int], list[float]]]
            parts = [([0, 1], [2, 3]), ([], []), ([1, 6, 6], [5, 8, 7]), ([3], [4])]
            priorities.set(*parts[plane.rank])
            return priorities.values().tolist()

        assert on_ranks(4, act) == [[2, 5, 1, 4, 1, 1, 7]] * 4

        def fail(plane: ThreadPlane) -> None:
            priorities = PromptPriorities(tables[plane.rank], plane, True)
            priorities.set([0], [1.0 if plane.rank else -1.0])

        first, second = on_ranks(2, fail)
        assert isinstance(first, DataError)
        assert isinstance(second, PeerError)
        assert "rank 0: set_prompt_priorities" in str(second)
        assert one.prompt_priorities().tolist() == other.prompt_priorities().tolist()
        assert one.prompt_priorities()[0] == 2
