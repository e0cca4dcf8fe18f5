"""Reported cases in which asynchronous training of other systems lost, repeated or stalled work."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ledger_support import (
    check_books,
    ledger_section,
    responses,
    train_prompts,
    write_prompts,
)

from deepspeed_gear import Lease, Replay
from deepspeed_gear.store import prompt_ledger

GROUPS = 4


def run_of(folder: Path, **prompts: Any) -> Replay:
    data = folder / "prompts"
    return Replay(
        ledger_section(data if data.exists() else write_prompts(data, 40), prompts, GROUPS)
    )


def commit(*leases: Lease) -> None:
    for lease in leases:
        lease.commit(responses(lease))


def test_prompts_in_flight_at_a_save_are_trained(tmp_path: Path) -> None:
    """NVIDIA-NeMo/RL#3599: the saved position was ahead of the long prompts, which were skipped."""
    with run_of(tmp_path, max_lag=1) as replay, replay.rollout_worker() as worker:
        short = (leases := worker.lease(8))[::2]
        long = leases[1::2]
        commit(*short)
        replay.save(tmp_path / "saved")
        commit(*long)
    with run_of(tmp_path, max_lag=1) as replay, replay.rollout_worker() as worker:
        replay.load(tmp_path / "saved")
        again = worker.lease(8, timeout_s=0)
        assert [lease.number for lease in again] == [lease.number for lease in long]
        commit(*again)
        assert check_books(replay)["waiting"] == 8


def test_complete_groups_are_in_the_checkpoint(tmp_path: Path) -> None:
    """OpenRLHF/OpenRLHF#1322: what was generated in advance was in no checkpoint, and
    was skipped.
    """
    with run_of(tmp_path, max_lag=2) as replay, replay.rollout_worker() as worker:
        commit(*worker.lease(12))
        replay.save(tmp_path / "saved")
    with run_of(tmp_path, max_lag=2) as replay:
        replay.load(tmp_path / "saved")
        assert [train_prompts(replay) for _ in range(3)] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9, 10, 11],
        ]


def test_groups_beyond_a_batch_wait_for_theirs(tmp_path: Path) -> None:
    """THUDM/slime#2238: of the complete groups a batch took those that it needed, and dropped the
    rest.
    """
    with run_of(tmp_path, max_lag=2) as replay, replay.rollout_worker() as worker:
        commit(*reversed(worker.lease(99)))
        for batch in range(6):  # with three batches ahead at every time
            assert check_books(replay)["waiting"] == 12
            assert train_prompts(replay) == [4 * batch + place for place in range(4)]
            replay.can_sample()  # by then the batch is trained
            commit(*worker.lease(99))
        books = check_books(replay)
        assert (books["trained"] + books["training"], books["dropped"]) == (24, {})


def test_a_dropped_group_does_not_hold_the_position(tmp_path: Path) -> None:
    """huggingface/trl#7274: all that was trained after a dropped group was trained again after a
    resume.
    """
    rule = {"max_lag": 1, "order": "completion", "late": "drop"}
    with run_of(tmp_path, **rule) as replay, replay.rollout_worker() as worker:
        slow = worker.lease(1)[0]
        before = list[int]()
        for _ in range(4):
            commit(*worker.lease(GROUPS))
            before += train_prompts(replay)
        assert slow.number not in before
        assert check_books(replay)["dropped"] == {"too old": 1}
        replay.save(tmp_path / "saved")
    with run_of(tmp_path, **rule) as replay, replay.rollout_worker() as worker:
        replay.load(tmp_path / "saved")
        assert min(lease.number for lease in worker.lease(GROUPS)) > max(before)


def test_the_lag_is_bounded_after_a_resume(tmp_path: Path) -> None:
    """inclusionAI/AReaL#1388: 424 prompts were admitted after a recovery, where 24 fit into the
    bound.
    """
    with run_of(tmp_path, max_lag=2) as replay, replay.rollout_worker() as worker:
        for _ in range(5):
            commit(*worker.lease(GROUPS))
            train_prompts(replay)
        admitted = len(leases := worker.lease(999, timeout_s=0))
        commit(*leases[:5])
        replay.save(tmp_path / "saved")
    assert admitted == 3 * GROUPS
    with run_of(tmp_path, max_lag=2) as replay, replay.rollout_worker() as worker:
        replay.load(tmp_path / "saved")
        assert len(worker.lease(999, timeout_s=0)) == admitted - 5
        assert worker.lease(timeout_s=0) == []


def test_a_stuck_rollout_holds_nothing_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA-NeMo/RL#3238: one rollout that never ends stalled the run, and again after each
    resume.
    """
    now = 0.0
    monkeypatch.setattr(prompt_ledger, "time", SimpleNamespace(monotonic_ns=lambda: int(now * 1e9)))
    with (
        run_of(tmp_path, max_lag=0, lease_s=10.0, attempts=2) as replay,
        replay.rollout_worker() as worker,
    ):
        _, *others = worker.lease(GROUPS)
        commit(*others)
        replay.save(tmp_path / "saved")
        replay.load(tmp_path / "saved")
        for _ in range(2):
            assert not replay.can_sample()
            assert [lease.number for lease in worker.lease(9, timeout_s=0)] == [
                0
            ]  # and is stuck again
            now += 11.0
        commit(*worker.lease(9, timeout_s=0))
        assert train_prompts(replay) == [1, 2, 3, 4]
        assert check_books(replay)["dropped"] == {"lease expired": 1}
