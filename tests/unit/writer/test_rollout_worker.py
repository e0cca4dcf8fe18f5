"""Rollout workers: leases, commits, failures, and the configs that admit them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import run_command
from ledger_support import (
    check_books,
    ledger_section,
    recipe_responses,
    recipe_section,
    responses,
    write_prompts,
)
from process_support import exit_status, in_child
from replay_support import streams_of

from deepspeed_gear import (
    CheckpointError,
    ConfigError,
    DataError,
    FillWorker,
    Lease,
    Replay,
    RolloutWorker,
    StoreError,
    TrajectoryWriter,
)
from deepspeed_gear.cli import inspect
from deepspeed_gear.cli.table_contents import of_living
from deepspeed_gear.data.ingest import ingested
from deepspeed_gear.plan.prompt_resolution import prompt_spec_of
from deepspeed_gear.store.live_stores import living_stores
from deepspeed_gear.store.prompt_ledger import PromptLedger
from deepspeed_gear.store.prompt_spec import Entry, EntryState, Left, PromptCount
from deepspeed_gear.store.table_spec import Shard


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts", 7)


def test_groups_of_prompts_come_by_their_leases(data: Path) -> None:
    config = ledger_section(data, {"max_lag": 0})
    with Replay(config) as replay, RolloutWorker.attach(config) as worker:
        lease = worker.lease()[0]
        group = responses(lease)
        lease.commit(group)
        other = {**group[0], "prompt": np.int64(9)}
        with pytest.raises(StoreError, match=r"must come by `lease\.commit`"):
            replay.add(other)
        with (
            TrajectoryWriter.attach(config) as writer,
            pytest.raises(StoreError, match=r"lease\.commit"),
        ):
            writer.add(other)
        replay.remove([0])
        assert check_books(replay)["dropped"] == {"removed": 1}
        worker.lease(2)
        replay.clear()
        assert check_books(replay)["leased"] == 2


def test_the_books_of_a_running_process_are_shown(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ledger_section(data)
    with Replay(config) as replay, RolloutWorker.attach(config) as worker:
        leases = worker.lease(4)
        leases[1].commit(responses(leases[1]))
        leases[0].fail("too_long", retry=False)
        found = next(store for store in living_stores(os.getpid()) if store.run.id == replay.run)
        contents = of_living(found)
        assert contents["prompts"] == check_books(replay)
        assert run_command(inspect, "--living", str(os.getpid())) == 0
        text = capsys.readouterr().out
        now = "1 complete, 2 leased, 0 returned, 0 incomplete; 1 dropped: too_lo"
        assert f"4 issued: 0 trained, 0 in training, {now}" in text
        assert (
            "epoch 0       4 issued: 0 drawn, 1 complete, 2 leased, 0 returned, 0 incomplete, 1 "
            "dropped" in text
        )
        json.dumps(contents)
        monkeypatch.setattr("deepspeed_gear.cli.table_contents.PromptSpec", lambda words: None)
        assert run_command(inspect, "--living", str(os.getpid())) == 0
        assert "cannot be read: it is a store of another version" in capsys.readouterr().out


def test_prompts_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that come at once ingest it once; a file that has changed is another data set."""
    file = tmp_path / "prompts.jsonl"
    hidden = f".prompts.jsonl.gear-{'[0-9a-f]' * 12}"
    rows = [{"tokens": [index] * 3, "index": index} for index in range(6)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    take = fcntl.flock

    def flock(
        lock: Any, operation: int
    ) -> None:  # as NFS: an exclusive lock needs a file open for writing
        if operation & fcntl.LOCK_EX and not fcntl.fcntl(lock, fcntl.F_GETFL) & os.O_ACCMODE:
            raise OSError(errno.EBADF, "as NFS")
        take(lock, operation)

    monkeypatch.setattr("fcntl.flock", flock)
    children = [in_child(lambda: ingested(file)) for _ in range(3)]
    assert [exit_status(child) for child in children] == [0] * 3
    (made,) = tmp_path.glob(hidden)
    before = made.stat().st_mtime_ns
    with Replay(ledger_section(file)) as replay, replay.rollout_worker() as worker:
        leases = worker.lease(6, timeout_s=0)
        assert sorted(int(lease.prompt["index"]) for lease in leases) == list(range(6))
        assert all(
            lease.prompt["tokens"].tolist() == [lease.prompt["index"]] * 3 for lease in leases
        )
        replay.save(tmp_path / "saved")
    assert made.stat().st_mtime_ns == before
    file.write_text(json.dumps(rows[0]) + "\n")
    with Replay(ledger_section(file)) as replay:
        assert len([*tmp_path.glob(hidden)]) == 2
        with pytest.raises(CheckpointError, match="prompts"):
            replay.load(tmp_path / "saved")
    file.write_text('{"prompt": "what?"}\n')
    with pytest.raises(DataError, match="--tokenize"):
        Replay(ledger_section(file))


def test_a_checkpoint_of_other_prompts_is_refused(data: Path, tmp_path: Path) -> None:
    with Replay(ledger_section(data, {"max_lag": 2})) as replay:
        replay.rollout_worker().lease(9)
        state = replay.save(tmp_path / "saved")
        with pytest.raises(CheckpointError, match="with its tables"):
            replay.load_state_dict(state)
    other = write_prompts(tmp_path / "other", 8)
    without = ledger_section(data)
    del without["tables"]["main"]["prompts"]
    wrong = [
        (ledger_section(other, {"max_lag": 2}), "the ledger of the prompts of"),
        (ledger_section(data, {"max_lag": 0}), "at most 3 prompts under way"),
    ]
    for config, match in wrong:
        with Replay(config) as replay, pytest.raises(CheckpointError, match=match):
            replay.load(tmp_path / "saved")
    with Replay(without) as replay:
        replay.save(tmp_path / "plain")
    with (
        Replay(ledger_section(data)) as replay,
        pytest.raises(CheckpointError, match="must hold the ledger"),
    ):
        replay.load(tmp_path / "plain")


def test_configs_that_prompts_do_not_suit(data: Path) -> None:
    changed = partial(ledger_section, data)
    narrow = json.loads(json.dumps(ledger_section(data)))
    narrow["tables"]["main"]["schema"]["columns"]["prompt"]["dtype"] = "int32"
    wrong: list[tuple[dict[str, Any], str]] = [
        (changed(max_times_sampled=0), "main.max_times_sampled must be 1 with"),
        (changed(sampler={"kind": "lifo"}), "main.prompts must not be given unless its sampler is"),
        (changed(group={"after_s": 1.0, "min_size": 1}), "group.after_s must not be given with"),
        (changed(rate_limiter={"queue": 8}), "rate_limiter.queue must not be given with"),
        (changed(batch={"groups": 3, "tokens": 99}), "gear.batch.tokens must not be given with"),
        (changed(capacity_trajectories=23), "capacity_trajectories must be at least 24"),
        (changed(prompts={"max_lag": -1}), "max_lag"),
        (changed(prompts={"lease_s": 1e12}), r"lease_s must be a finite number in \(0, 604800\]"),
        (changed(prompts={"late": "drop"}), 'prompts.late must be "wait" with the order "lease"'),
        (narrow, "columns.prompt must have the dtype int64"),
    ]
    for config, match in wrong:
        with pytest.raises(ConfigError, match=match):
            Replay(config)
    with Replay(changed({"max_lag": 1})) as replay:  # of three nodes
        known = replay.tables["main"].spec
        config = replay.config
        at = Shard(1, 3, 0, 0)
        assert known.group is not None
        with pytest.raises(
            ConfigError, match=r"must be at least 18, .* each of 3 nodes those of a batch"
        ):
            prompt_spec_of(config, "main", known.group, known.schema, 5, at)
        spec = prompt_spec_of(config, "main", known.group, known.schema, 6, at)
        assert (spec.num_stores, spec.store, [spec.issued_below(n) for n in (1, 2, 4, 5)]) == (
            3,
            1,
            [0, 1, 1, 2],
        )
    with pytest.raises(DataError, match="must be the folder of a data set"):
        Replay(ledger_section(data.with_name("none")))
    plain = ledger_section(data)
    del plain["tables"]["main"]["prompts"]
    with Replay(plain), pytest.raises(ConfigError, match="must be given for rollout workers"):
        RolloutWorker.attach(plain)


def test_prompts_that_cannot_be_read_are_no_leases(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Replay(ledger_section(data)) as replay, replay.rollout_worker() as worker:
        monkeypatch.setattr(worker.prompts, "columns", {})
        with pytest.raises(KeyError):
            worker.lease(3)
        monkeypatch.undo()
        assert (check_books(replay)["leased"], check_books(replay)["returned"]) == (0, 3)
        assert [lease.attempt for lease in worker.lease(3)] == [2, 2, 2]


def entry_of(ledger: PromptLedger, lease: Lease) -> np.ndarray:
    """Return the words of the entry that has a lease's number."""
    (entry,) = np.flatnonzero(ledger.entries[:, Entry.NUMBER] == lease.number)[:1]
    words: np.ndarray = ledger.entries[entry]
    return words


@pytest.mark.parametrize("words", range(6))
def test_a_death_while_a_number_is_counted(data: Path, words: int) -> None:
    """The counters are written once, however many words of the record were written."""
    with Replay(ledger_section(data)) as replay, replay.rollout_worker() as worker:
        (lease, _) = worker.lease(2)
        ledger = replay.tables["main"].ledger
        assert ledger is not None
        left = ledger.views["prompt_left"]
        epochs = ledger.views["prompt_epochs"]
        entry_of(ledger, lease)[Entry.STATE] = EntryState.LEFT + Left.EXPIRED
        if words > 0:
            left[1, Left.EXPIRED] = 1
        if words > 1:
            epochs[1, 0, [0, 1 + Left.EXPIRED]] = 1
        if words > 2:
            ledger.counts[PromptCount.SWEEPING] = 1
        if words > 3:
            left[0] = left[1]
        if words > 4:
            epochs[0] = epochs[1]
        ledger.recover(lambda _: None)
        books = check_books(replay)
        assert (books["issued"], books["leased"], books["dropped"]) == (2, 1, {"lease expired": 1})


def test_a_worker_that_dies_in_a_commit_leaves_no_unfilled_group(data: Path) -> None:
    """Late columns that came with the group are marked after its trajectories are there."""
    config = ledger_section(data, group={"needs": ["reward"]})
    with Replay(config) as replay, replay.rollout_worker() as worker:
        (lease,) = worker.lease()
        table = replay.tables["main"]
        ledger = table.ledger
        group = [one | {"reward": np.float32(0)} for one in responses(lease)]
        assert ledger is not None
        lease.commit(group)
        entry_of(ledger, lease)[Entry.STATE] = EntryState.LEASED
        with table.lock:
            ledger.recover(table.extents.retire)
        assert (len(replay), check_books(replay)["leased"]) == (0, 1)


def test_every_process_attaches_with_the_recipe_of_the_ranks(data: Path, tmp_path: Path) -> None:
    """With the section, a ds_config or its file; and without a config to a named run, whatever its
    prefix.
    """
    section = recipe_section(data)
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8, "gear": section}))
    with Replay(section) as replay:
        given: list[tuple[Any, dict[str, Any]]] = [
            (section, {}),
            ({"gear": section}, {}),
            (path, {}),
        ]
        given += [(None, {"run": replay.run})]
        for config, options in given:
            for door in (TrajectoryWriter.attach, RolloutWorker.attach):
                door(config, wait_s=5.0, **options).close()
            FillWorker.attach(config, "reward", wait_s=5.0, **options).close()
        other = {**section, "rollout": {"groups": 2}}  # from which the capacity follows
        with pytest.raises(
            StoreError, match=r"gear.tables.main.capacity_steps: 768 here, 384 there"
        ):
            RolloutWorker.attach(other, wait_s=0.0)
        for wrong, text in (
            (
                {**section, "recipe": "grop"},
                "gear.recipe must be \"grpo\" or null, got 'grop'; did you mean",
            ),
            ({**section, "tables": {"main": {}}}, "max_length must be given with a recipe"),
        ):
            with pytest.raises(ConfigError, match=text):
                TrajectoryWriter.attach(wrong, wait_s=0.0)
        with RolloutWorker.attach(path) as worker, FillWorker.attach(path, "reward") as filler:
            (lease,) = worker.lease()
            lease.commit(recipe_responses(lease, reward=False))
            for one in filler.lease(2):
                one.fill(1.0)
        assert replay.rollout().num_items == 1


def test_a_slow_first_generation_does_not_end_the_run(data: Path) -> None:
    """Without a rate limiter the wait for groups, and for room, is longer than that for another
    rank.
    """
    config = recipe_section(data, timeout_s=0.5)
    with Replay(config) as replay, RolloutWorker.attach(config) as worker:

        def generate() -> None:
            time.sleep(1.5)
            (lease,) = worker.lease()
            lease.commit(recipe_responses(lease))

        thread = threading.Thread(target=generate)
        thread.start()
        assert replay.rollout().num_items == 1
        thread.join()


@pytest.mark.parametrize(
    ("options", "table", "limit"),
    [
        ({}, {}, 600.0),
        ({"timeout_s": 700.0}, {}, 700.0),
        ({}, {"rate_limiter": {"timeout_s": 5.0}}, 5.0),
    ],
    ids=str,
)
def test_the_longest_wait_for_items_is_one_of_all_sides(
    data: Path, options: dict[str, Any], table: dict[str, Any], limit: float
) -> None:
    config = recipe_section(data, **options)
    config["tables"]["main"].update(table)
    with Replay(config) as replay, TrajectoryWriter.attach(config) as writer:
        assert [one.parts[1].timeout_s for one in (writer, replay.writer())] == [limit, limit]
        assert streams_of(replay)["train"].spec.rate_timeout_s == limit
