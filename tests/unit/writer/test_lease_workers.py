"""Workers of a prompt ledger, on its node and through a gateway: one contract, and its refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from group_support import trained
from ledger_support import check_books, ledger_section, responses, write_prompts
from remote_support import attached, serving

from deepspeed_gear import (
    CheckpointError,
    ConfigError,
    DataError,
    FillWorker,
    GearError,
    Lease,
    LeaseExpiredError,
    NotReadyError,
    Replay,
    StoreError,
)
from deepspeed_gear.store import prompt_ledger


class Scene:
    """A table with prompts, and workers that come in by one door: "node" or "gateway"."""

    def __init__(self, door: str, config: dict[str, Any], stack: ExitStack) -> None:
        self.config = config
        self.replay = stack.enter_context(Replay(config))
        url = stack.enter_context(serving(config)).url if door == "gateway" else None
        self.worker = partial(attached, url, config, stack)  # makes another one
        self.now = 1.0  # of the clock of leases, in seconds

    def books(self) -> dict[str, Any]:
        return check_books(self.replay)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts", 7)


@pytest.fixture(params=["node", "gateway"])
def scenes(
    request: pytest.FixtureRequest, data: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Scene]]:
    """Make a scene with the options of `ledger_section`; its clock of leases stands still."""
    with ExitStack() as stack:

        def make(prompts: dict[str, Any] | None = None, **options: Any) -> Scene:
            scene = Scene(request.param, ledger_section(data, prompts, **options), stack)
            clock = SimpleNamespace(monotonic_ns=lambda: int(scene.now * 1e9))
            monkeypatch.setattr(prompt_ledger, "time", clock)
            return scene

        yield make


Scenes = Callable[..., Scene]


def test_leases_end_in_any_order_and_groups_are_trained_in_that_of_leases(scenes: Scenes) -> None:
    scene = scenes({"max_lag": 1}, rate_limiter={"timeout_s": 0.2})
    worker = scene.worker()
    leases = worker.lease(99, timeout_s=0)
    found = [(lease.number, lease.version, lease.attempt) for lease in leases]
    assert found == [(number, 0, 1) for number in range(6)]
    assert len({int(lease.prompt["index"]) for lease in leases}) == 6
    assert all((lease.prompt["tokens"] == lease.prompt["index"]).all() for lease in leases)
    assert worker.lease(timeout_s=0.05) == []
    for lease in leases[:0:-1]:  # the straggler is the first
        lease.heartbeat()
        lease.commit(responses(lease))
        assert not scene.replay.can_sample()
    with pytest.raises(NotReadyError, match="5 complete, 1 leased, 0 returned, 0 incomplete"):
        scene.replay.rollout()
    first = leases[0].commit(responses(leases[0]))
    assert trained(scene.replay)[0] == first
    more = worker.lease(99)
    assert [lease.number for lease in more] == [6, 7, 8]  # of two epochs
    books = scene.books()
    counts = {name: books[name] for name in ("issued", "trained", "waiting", "leased")}
    assert counts == {"issued": 9, "trained": 3, "waiting": 3, "leased": 3}
    assert scene.replay.statistics()["prompts"]["main"] == books
    more[2].fail("too long", retry=False)
    more[1].fail()
    books = scene.books()
    assert (books["leased"], books["returned"], books["dropped"]) == (1, 1, {"too long": 1})
    again, new = scene.worker().lease(9)
    assert (again.number, again.attempt, new.number) == (7, 2, 9)


def test_a_lease_that_expires_is_leased_again_and_dropped_at_last(scenes: Scenes) -> None:
    scene = scenes({"max_lag": 0, "lease_s": 10.0, "attempts": 2})
    worker = scene.worker()
    first, second, third = worker.lease(9)
    scene.now += 6.0
    second.heartbeat()
    scene.now += 5.0
    again = worker.lease(9, timeout_s=0)  # the third one too
    assert [(lease.number, lease.attempt) for lease in again] == [(0, 2), (2, 2)]
    for change in (
        lambda: first.commit(responses(first)),
        first.heartbeat,
        lambda: third.fail("late"),
    ):
        with pytest.raises(LeaseExpiredError, match="must be held by this worker"):
            change()
    assert len(scene.replay) == 0
    second.commit(responses(second))
    again[0].fail("no answer")  # the last attempt
    scene.now += 19.0
    books = scene.replay.statistics()["prompts"]["main"]
    assert books["dropped"] == {"lease expired": 1, "no answer": 1}
    assert (books["expired_refused"], books["leases_returned"]) == (3, 4)
    more = worker.lease(9, timeout_s=0)
    assert [lease.number for lease in more] == [3, 4]
    more[0].fail("too_long", retry=False)
    worker.close()
    fourth, _ = scene.worker().lease(9)
    assert fourth.number == 4
    fourth.fail("lease expired", retry=False)  # a name that is taken
    dropped = {"too_long": 1, "lease expired": 1, "lease expired (worker)": 1, "no answer": 1}
    assert scene.books()["dropped"] == dropped


def test_a_load_ends_leases(scenes: Scenes, tmp_path: Path) -> None:
    scene = scenes({"max_lag": 0})
    worker = scene.worker()
    scene.replay.save(tmp_path / "empty")
    (first,) = worker.lease()
    scene.replay.save(tmp_path / "leased")
    scene.replay.load(tmp_path / "empty")
    (again,) = worker.lease()
    assert (again.number, again.attempt) == (0, 1)
    with pytest.raises(LeaseExpiredError):
        first.commit(responses(first))
    scene.replay.load(tmp_path / "leased")
    books = scene.books()
    assert (books["issued"], books["leased"], books["returned"]) == (1, 0, 1)
    leases = worker.lease(2)
    assert [(lease.number, lease.attempt) for lease in leases] == [(0, 1), (1, 1)]  # a load is none
    for lease in (first, again):
        with pytest.raises(LeaseExpiredError):
            lease.commit(responses(lease))
    assert [lease.commit(responses(lease)) for lease in leases] == [[0, 1], [2, 3]]
    assert scene.books()["waiting"] == 2


def test_what_a_lease_keeps_goes_to_the_next_one(
    scenes: Scenes, data: Path, tmp_path: Path
) -> None:
    """Of a worker that ends, after a load, and with the version of the first tokens."""
    scene = scenes({"max_lag": 3, "keep_bytes": 600})
    worker = scene.worker()
    lease, *others = worker.lease(3)
    assert lease.kept == {}
    lease.keep(tokens=np.arange(5, dtype=np.int32), versions=np.zeros(5, np.int32))
    for other in others:
        other.commit(responses(other))
    scene.replay.save(tmp_path / "saved")
    worker.close()
    for _ in range(2):
        worker = scene.worker()
        again = worker.lease(1)[0]
        assert (again.number, again.version) == (0, 0)
        assert again.kept["tokens"].tolist() == [0, 1, 2, 3, 4]
        again.keep(tokens=again.kept["tokens"])
        again.keep()
        again.fail("from the beginning")
        assert worker.lease(1)[0].kept == {}
        worker.close()
        scene.replay.load(tmp_path / "saved")
    with (
        Replay(ledger_section(data, {"max_lag": 3})) as replay,
        pytest.raises(CheckpointError, match="0 bytes"),
    ):
        replay.load(tmp_path / "saved")


def test_a_group_is_open_until_its_late_columns_are_filled(scenes: Scenes, tmp_path: Path) -> None:
    wait = {"timeout_s": 0.2}  # for groups
    scene = scenes({"max_lag": 1}, group={"needs": ["reward"]}, rate_limiter=wait)
    replay = scene.replay
    worker = scene.worker()
    leases = worker.lease(9)
    ids = [lease.commit(responses(lease)) for lease in leases]
    books = scene.books()
    assert (books["waiting"], books["incomplete"], replay.can_sample()) == (0, 6, False)
    assert worker.lease(1, timeout_s=0) == []  # they are under way
    rewards = FillWorker.attach(scene.config, "reward")
    taken = rewards.lease(99)
    assert [lease.trajectory_id for lease in taken] == [number for group in ids for number in group]
    for lease in taken[2:]:  # the first group is the straggler
        lease.fill(np.float32(1))
    assert (scene.books()["waiting"], replay.can_sample()) == (5, False)
    with pytest.raises(NotReadyError, match="5 complete, 0 leased, 0 returned, 1 incomplete"):
        replay.rollout()
    replay.save(tmp_path / "saved")
    for lease in taken[:2]:
        lease.fill(np.float32(0))
    assert trained(replay) == ids[:3]
    replay.load(tmp_path / "saved")
    assert (scene.books()["incomplete"], replay.can_sample()) == (1, False)
    taken[0].fill(np.float32(2))  # of the run before the load
    again = rewards.lease(99)
    assert [lease.trajectory_id for lease in again] == ids[0]
    for lease in again:
        lease.fill(np.float32(3))
    assert trained(replay) == ids[:3]
    assert replay.read(ids[3])[0]["reward"] == 1
    rewards.close()


# ---- refusals ------------------------------------------------------------------------------------


def second(**changes: Any) -> Callable[[Lease], Any]:
    """Return what commits a group whose second trajectory has other columns."""

    def commit(lease: Lease) -> Any:
        one, two = responses(lease)
        return lease.commit([one, {**two, **changes}])

    return commit


REFUSALS: list[tuple[Callable[[Lease], Any], type[GearError], str]] = [
    (second(prompt=np.int64(5)), DataError, "must have the prompt's number in prompt"),
    (second(weight=np.float32(np.nan)), DataError, "finite"),
    (second(tokens=np.zeros(99, np.int32)), DataError, "at most max_length"),
    (second(more=1), DataError, "column more must be in the schema"),
    (lambda lease: lease.fail("x" * 33), ConfigError, "1 to 32 bytes"),
    (lambda lease: lease.keep(tokens=np.zeros(99)), DataError, "at most prompts.keep_bytes = 600"),
    (lambda lease: lease.keep(tokens=None), DataError, "array of numbers"),
    (lambda lease: lease.keep(tokens=[[1], [1, 2]]), DataError, "tokens must be an array of num"),
    (lambda lease: lease.keep(allow_pickle=[1]), DataError, "not named file or allow_pickle"),
]


def test_what_is_refused_leaves_the_lease_as_it_is(scenes: Scenes) -> None:
    scene = scenes({"keep_bytes": 600})
    worker = scene.worker()
    (lease,) = worker.lease()
    for call, error, text in REFUSALS:
        with pytest.raises(error, match=text):
            call(lease)
        books = scene.books()
        assert (len(scene.replay), books["leased"], books["issued"]) == (0, 1, 1), text
    with pytest.raises(ConfigError, match="count must be an integer"):
        worker.lease(0)
    second(prompt=np.int64(0))(lease)
    assert scene.books()["waiting"] == 1
    worker.close()
    worker.close()
    with pytest.raises(StoreError, match="must be open"):
        worker.lease()


# ---- how a lease has ended -----------------------------------------------------------------------


def expire(scene: Scene, lease: Lease) -> None:
    scene.now += 11.0
    scene.replay.statistics()


def leased_again(scene: Scene, lease: Lease) -> Lease:
    scene.now += 11.0
    leases = scene.worker().lease(9, timeout_s=0)
    return next(one for one in leases if one.number == lease.number)


def expire_last(scene: Scene, lease: Lease) -> Lease:
    again = leased_again(scene, lease)
    expire(scene, again)
    return again


def commit_again(scene: Scene, lease: Lease) -> None:
    again = leased_again(scene, lease)
    again.commit(responses(again))


def commit_elsewhere(scene: Scene, lease: Lease) -> None:
    """By another object of the same lease, as after an answer that was lost."""
    copy.copy(lease).commit(responses(lease))


def load(scene: Scene, lease: Lease) -> None:
    scene.replay.save(scene.folder)
    scene.replay.load(scene.folder)


def load_of_before(scene: Scene, lease: Lease) -> Lease:
    load(scene, lease)
    later = scene.worker().lease(9)[-1]
    scene.replay.load(scene.folder)
    return later


def train_others(scene: Scene, lease: Lease) -> None:
    worker = scene.worker()
    for _ in range(2):
        (one,) = worker.lease(1)
        one.commit(responses(one))
        trained(scene.replay)
    scene.replay.can_sample()


ENDINGS: list[tuple[Callable[[Scene, Lease], Any], str]] = [
    (lambda _, lease: lease.commit(responses(lease)), "it was committed; end a lease once"),
    (lambda _, lease: lease.fail("bad"), "it was failed as 'bad'; end a lease once"),
    (lambda _, lease: lease.fail("bad", retry=False), "it was failed as 'bad'; end a lease once"),
    (commit_elsewhere, "(it|attempt 1) was committed; commit a group once"),
    (
        expire,
        r"prompts.lease_s = 10 s passed without a heartbeat, .* waits .*; call heartbeat\(\)",
    ),
    (
        lambda scene, lease: leased_again(scene, lease) and None,
        r"it came back, and attempt 2 has its prompt; call heartbeat\(\)",
    ),
    (commit_again, "attempt 2 was committed"),
    (expire_last, "its prompt was trained or dropped, as the last of 2 attempts"),
    (load, r"it was given back, by fail\(\), the end of its worker .*, or a load, .*; lease again"),
    (
        load_of_before,
        "a checkpoint was loaded in which its prompt had not been leased; lease again",
    ),
    (
        train_others,
        "too old: 2 batches are selected, its version is 0 and prompts.max_lag 1; raise max_lag",
    ),
]


@pytest.mark.parametrize(("end", "text"), ENDINGS)
def test_an_error_of_a_lease_names_how_it_ended(
    end: Callable[[Scene, Lease], Any], text: str, scenes: Scenes, tmp_path: Path
) -> None:
    prompts = {"max_lag": 1, "lease_s": 10.0, "attempts": 2, "order": "completion", "late": "drop"}
    scene = scenes(prompts, groups=1)
    scene.folder = tmp_path / "saved"
    (lease,) = scene.worker().lease(1)
    other = end(scene, lease)
    if isinstance(other, Lease):
        lease = other
    held = len(scene.replay)
    for change in (
        lease.heartbeat,
        lambda: lease.commit(responses(lease)),
        lease.keep,
        lease.fail,
    ):
        with pytest.raises(LeaseExpiredError, match=f"must be held by this worker: .*{text}"):
            change()
    assert len(scene.replay) == held
    scene.books()
