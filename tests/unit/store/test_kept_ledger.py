"""Stores that outlive their jobs: what a next job finds, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import prefix, run_command, shared_files
from ledger_support import (
    SIZE,
    check_books,
    ledger_section,
    responses,
    train_prompts,
    write_prompts,
)
from media_tables import image, with_media
from rollout_support import micros

from deepspeed_gear import (
    ConfigError,
    FillWorker,
    LeaseExpiredError,
    Replay,
    RolloutWorker,
    StoreError,
)
from deepspeed_gear.cli import clean, inspect
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.replay import node_stores
from deepspeed_gear.store.live_stores import living_stores
from deepspeed_gear.store.memory_layout import RunIdentity
from deepspeed_gear.store.prompt_ledger import LeaseRecord
from deepspeed_gear.store.records import Control, MediaPage
from deepspeed_gear.store.shared_memory import remove_garbage


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts", 50)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    remove_garbage(prefix(), kept=True)


def kept(data: Path, max_lag: int = 1, keep: bool = True, **options: Any) -> dict[str, Any]:
    """Return a gear section with a store that is kept; batches of 3 groups."""
    found = ledger_section(data, {"max_lag": max_lag, "lease_s": 60.0}, timeout_s=5.0, **options)
    found["shared_memory"]["keep"] = keep
    return found


def commit(leases: Any) -> list[int]:
    return [lease.number for lease in leases if lease.commit(responses(lease))]


def test_the_next_job_holds_what_was_committed(data: Path, tmp_path: Path) -> None:
    config = kept(data)
    with Replay(config) as replay, RolloutWorker.attach(config) as worker:
        run = replay.run
        leases = worker.lease(6)
        table = replay.tables["main"]
        other = LeaseRecord(0, 1, 6)  # of a store of the run that was lost
        assert table.ledger is not None
        expected = pytest.raises(LeaseExpiredError, match="the lease of prompt 6 must be held by")
        with table.lock, expected:
            table.ledger.fail(other, "failed", True)
        commit(leases[:4])  # leases of 4 and 5 are open
        assert train_prompts(replay) == [0, 1, 2]
        replay.save(tmp_path / "saved")
        last = worker.lease(3)
        commit(last[:2])
        books = check_books(replay)
        assert books["leased"] == 3
    with Replay(config) as replay, RolloutWorker.attach(config) as worker:
        assert replay.run == run
        assert worker.lease(timeout_s=0) == []  # until a rank asks
        replay.load(tmp_path / "saved")
        assert check_books(replay)["waiting"] == 1
        leases = worker.lease(9)
        books = check_books(replay)
        assert (books["issued"], books["waiting"], books["trained"]) == (9, 3, 3)
        assert sorted(commit(leases)) == [4, 5, 8]
        assert [train_prompts(replay), train_prompts(replay)] == [[3, 4, 5], [6, 7, 8]]
        assert check_books(replay)["largest_lag"] == 1
    with Replay(config) as replay:  # without a checkpoint: 0 to 2 were drawn before it
        table = replay.tables["main"]
        worker = replay.rollout_worker()
        for number in table.slots[table.extents.retired(), Slot.ID].tolist():
            with pytest.raises(StoreError, match="must be stored"):
                replay.read([number])  # of the job before, whose ids may be given again
        assert commit(worker.lease(9)) == [0, 1, 2]
        assert train_prompts(replay) == [0, 1, 2]
        assert check_books(replay)["largest_lag"] == 0
        assert worker.lease(timeout_s=0) == []
        assert [train_prompts(replay), check_books(replay)["waiting"]] == [[3, 4, 5], 3]


def test_commits_of_leases_from_before(data: Path, tmp_path: Path) -> None:
    config = kept(data, max_lag=0)
    with Replay(config) as replay:
        worker = RolloutWorker.attach(config)
        replay.save(tmp_path / "saved")
        first = worker.lease(3)
        commit(first[1:2])
        filler = FillWorker.attach(config, "reward")
        replay.tables["main"].control[Control.SELECTING] = (
            1  # as where all ranks of a node are killed
        )
    filler.lease(1)[0].fill(1.0)
    assert worker.lease(timeout_s=0.01) == []  # waits for the next job
    commit(first[2:])  # while none lives
    with Replay(config) as replay:
        assert replay.tables["main"].control[Control.SELECTING] == 0
        first[0].heartbeat()
        commit(first[:1])  # before its number is leased
        with pytest.raises(LeaseExpiredError):
            commit(first[:1])
        replay.load(tmp_path / "saved")
        books = check_books(replay)
        assert (books["issued"], books["waiting"], books["leased"]) == (3, 3, 0)
        assert train_prompts(replay) == [0, 1, 2]
        late, failed, other = worker.lease(3)
        commit([other])
    with Replay(config) as replay:
        assert train_prompts(replay) == [0, 1, 2]
        again = worker.lease(9)
        assert [lease.number for lease in again] == [3, 4]
        for change in (partial(commit, [late]), partial(failed.fail, "late")):
            with pytest.raises(LeaseExpiredError):
                change()
        again[0].fail("no answer")
        commit([late])  # its number came back
        assert [lease.number for lease in worker.lease(9, timeout_s=0)] == []
        assert check_books(replay)["waiting"] == 2
        worker.close()
        filler.close()


def test_groups_that_would_be_too_old_are_generated_again(data: Path) -> None:
    config = kept(data, max_lag=0)
    with Replay(config) as replay:
        worker = replay.rollout_worker()
        worker.lease(3)[0].fail("too long", retry=False)
        commit(worker.lease(1))  # 3, in the batch of 1 and 2
        assert check_books(replay)["dropped"] == {"too long": 1}
    with Replay(config) as replay:
        worker = replay.rollout_worker()
        commit(worker.lease(9))
        assert train_prompts(replay) == [0, 1, 2]
        assert commit(worker.lease(9)) == [3, 4, 5]  # its version is 0
        assert train_prompts(replay) == [3, 4, 5]


def test_rows_of_groups_that_were_drawn_are_freed_as_writers_need_them(
    data: Path, tmp_path: Path
) -> None:
    config = kept(data, max_lag=0, capacity_trajectories=6 * SIZE, remove="none")
    with Replay(config) as replay:
        worker = replay.rollout_worker()
        for batch in range(5):
            assert commit(worker.lease(9)) == [3 * batch + place for place in range(3)]
            train_prompts(replay)
            if batch == 2:
                replay.save(tmp_path / "saved")
                assert len(list((tmp_path / "saved").rglob("slots.npy"))) == 1
    for load in (True, False):  # it has room for two batches
        with Replay(config) as replay:
            worker = replay.rollout_worker()
            if load:
                replay.load(tmp_path / "saved")
                assert worker.lease(timeout_s=0) == []
                assert [train_prompts(replay), train_prompts(replay)] == [[9, 10, 11], [12, 13, 14]]
            else:
                assert commit(worker.lease(9)) == [0, 1, 2]
            assert check_books(replay)["dropped"] == {}


def test_groups_of_the_job_before_stay_while_rows_are_free_far_away(data: Path) -> None:
    """The first job's 24 trajectories of 1 to 3 rows lie one after the other, and all free rows
    after them: farther from the beginning, where a new job searches, than a near search looks.
    """
    config = kept(data)
    with Replay(config) as replay:
        worker = replay.rollout_worker()
        failed, *others = worker.lease(9)
        failed.fail("too long", retry=False)
        commit([*others, *worker.lease(9)])
        for _ in range(2):
            train_prompts(replay)
            commit(worker.lease(9))
        assert check_books(replay)["issued"] == 13
    with Replay(config) as replay:
        worker = replay.rollout_worker()
        table = replay.tables["main"]
        leases = worker.lease(1)
        assert [lease.number for lease in leases] == [0]
        retired = table.extents.retired().tolist()
        assert len(retired) == 7 * SIZE  # of the numbers 6 to 12, whose turn comes later
        tokens = np.zeros(4, np.int32)
        leases[0].commit([{**one, "tokens": tokens} for one in responses(leases[0])])
        assert table.extents.retired().tolist() == retired
        assert train_prompts(replay) == [0, 1, 2]
        again = worker.lease(9)  # 6 was generated for an earlier batch and is too old; 7 and 8 stay
        assert [lease.number for lease in again] == [6]


def test_a_load_frees_pages_of_media_that_retired_groups_name(data: Path, tmp_path: Path) -> None:
    """All pages are in use, and what the checkpoint names is in none of them."""
    config = with_media(kept(data, max_lag=0))
    config["tables"]["main"]["media"]["capacity_bytes"] = 4 * 512
    with Replay(config) as replay:
        worker = replay.rollout_worker()
        for batch in range(3):
            for lease in worker.lease(9):
                named = {"image": {0: image(lease.number, 40)}}  # a page
                lease.commit([{**one, **named} for one in responses(lease)])
            rollout = replay.rollout()
            if batch == 0:
                replay.save(tmp_path / "saved")  # with the batch in training
            micros(rollout)
    with Replay(config) as replay:
        media = replay.tables["main"].media
        assert media is not None
        assert media.words[:, MediaPage.STATE].all()
        replay.load(tmp_path / "saved")
        seen = [micro.media.columns["grid"] for step in replay.rollout() for micro in step]
        assert sorted(torch.cat(seen)[:, 0].tolist()) == [0, 1, 2]


def test_stores_of_other_configs_are_refused(data: Path, tmp_path: Path) -> None:
    other = write_prompts(tmp_path / "other", 8)
    with Replay(kept(data)) as replay:
        run = replay.run
        with pytest.raises(
            StoreError, match=r"in use by a running rank.*a shared_memory\.run of its own"
        ):
            Replay(kept(data))
    wrong = [
        (
            kept(data, capacity_trajectories=100),
            rf"num_slots: 100 here, 200 there.*`gear clean --kept --prefix {prefix()}`",
        ),
        (kept(other), r"store\.sizes\.prompts\.fingerprint: "),
        (kept(data, max_lag=2), r"store\.sizes\.prompts\.max_lag: 2 here, 1 there"),
        (kept(data, seed=3), r"store\.seed: 3 here, 0 there"),
    ]
    for config, match in wrong:
        with pytest.raises(ConfigError, match=match):
            Replay(config)
    named = kept(data)
    named["shared_memory"]["run"] = "second"
    with Replay(named) as replay:
        assert replay.run != run
    with Replay(kept(data)) as replay:
        assert replay.run == run
    plain = kept(data)
    del plain["tables"]["main"]["prompts"]
    with pytest.raises(
        ConfigError, match=r"shared_memory\.keep must not be true without a table with prompts"
    ):
        Replay(plain)
    runs = [RunIdentity(one, "", "") for one in ("b", "a")]
    control_plane = SimpleNamespace(
        attempt=lambda what, action: "", all_results=lambda what, action: runs, rank=0
    )
    config: Any = SimpleNamespace(
        shared_memory=SimpleNamespace(prefix="g", run=None), timeout_s=1.0
    )
    plan: Any = SimpleNamespace(config=config, control_plane=control_plane, topology=None, ops=None)
    with pytest.raises(
        StoreError,
        match=r"kept stores of g must belong to one run on all .*\['a', 'b'\].* --kept --prefix g`",
    ):
        node_stores.open_stores(plan)


def test_a_kept_store_is_listed_and_removed(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = kept(data)
    with Replay(config) as replay:
        worker = RolloutWorker.attach(config)
        run = replay.run
        commit(worker.lease(2))
    with Replay(kept(data, keep=False)) as replay:  # another job leaves it alone
        assert replay.run != run
    (name,) = shared_files(prefix())
    assert run_command(clean, "--prefix", prefix()) == 0
    assert "0 removed, 1 in use" in capsys.readouterr().out
    assert worker.lease(timeout_s=0) == []
    worker.close()
    run_command(clean, "--prefix", prefix())
    assert f"kept /dev/shm/{name}, " in capsys.readouterr().out
    found = [store for store in living_stores() if store.run.id == run]
    monkeypatch.setattr(inspect, "living_stores", lambda process: found)  # none of another test
    assert run_command(inspect, "--living") == 0
    text = capsys.readouterr().out
    assert "table main kept without a process: " in text
    assert "2 issued: 0 trained, 0 in training, 2 complete" in text
    with Replay(config):
        run_command(clean, "--prefix", prefix(), "--kept")
    assert shared_files(prefix()) == [name]
    run_command(clean, "--prefix", prefix(), "--kept")
    assert shared_files(prefix()) == []
