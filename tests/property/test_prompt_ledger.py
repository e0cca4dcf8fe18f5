"""The prompt ledger under random lengths, deaths and resumes: each prompt once, in order, within
the lag.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gear_support import prefix
from group_support import check_groups
from ledger_support import SIZE, check_books, ledger_section, responses, write_prompts
from rollout_support import micros

from deepspeed_gear import (
    FillWorker,
    Lease,
    LeaseExpiredError,
    Replay,
    RolloutWorker,
    TrajectoryWriter,
)
from deepspeed_gear.sampling import batch_stream
from deepspeed_gear.store import prompt_ledger
from deepspeed_gear.store.kept_ledger import KeptLedger
from deepspeed_gear.store.prompt_spec import Entry, EntryState, PromptSpec
from deepspeed_gear.store.records import Head
from deepspeed_gear.store.shared_memory import remove_garbage
from deepspeed_gear.store.table import Table

LEASE_S = 6.0
PROMPTS = 23


class Run:
    """A run of a model: what it has trained follows from the checkpoint that is loaded."""

    def __init__(
        self, seed: int, folder: Path, groups: int, max_lag: int, order: str, late: str, stages: str
    ) -> None:
        needs = "needs" in stages
        self.keeps = "keeps" in stages
        self.words = random.Random(seed)
        self.folder = folder
        self.groups = groups
        self.max_lag = max_lag
        data = folder / "prompts"
        options = {
            "max_lag": max_lag,
            "lease_s": LEASE_S,
            "attempts": 3,
            "order": order,
            "late": late,
        }
        options["keep_bytes"] = 500
        if not data.exists():
            write_prompts(data, PROMPTS)
        where = {"weight": {"mean": {"min": 0.0}}}
        group = {"where": where, "needs": ["reward"] if needs else []}
        self.config = ledger_section(data, options, groups, group=group, writers=4)
        self.config["shared_memory"]["keep"] = self.keeps
        self.draws = "draws" in stages  # each prompt once an epoch, by priority
        if self.draws:
            self.config["tables"]["main"]["prompts"]["sampler"] = "prioritized_epoch"
        self.replay = Replay(self.config)
        self.now = 0.0
        self.workers: list[RolloutWorker] = []
        self.tables: dict[RolloutWorker, Table] = {}  # of each worker
        self.ends: list[tuple[float, Lease, RolloutWorker]] = []  # when each lease ends
        self.trained: list[int] = []  # numbers, in order
        self.rejected: set[int] = set()
        self.saved: Any = None
        self.lags: list[int] = []
        self.made: set[float] = set()  # weights of groups, which tell them apart
        self.filled: set[tuple[float, int]] = set()  # of a weight and a member
        self.counts = dict.fromkeys(("events", "expired", "deaths", "resumes", "found"), 0)
        self.index: dict[int, int] = {}  # prompt of each number
        self.kept: dict[int, int] = {}  # of each number, by the lease before

    def check(self) -> None:
        self.counts["events"] += 1
        books = check_books(self.replay)
        assert books["trained"] + books["training"] == len(self.trained)

    def worker(self) -> RolloutWorker:
        while len(self.workers) < 3:
            writer = TrajectoryWriter.attach(self.config)
            self.workers.append(RolloutWorker(writer))
            self.tables[self.workers[-1]] = writer.parts[0]
        return self.words.choice(self.workers)

    def lease(self) -> None:
        worker = self.worker()
        issued = self.issued
        leases = worker.lease(self.words.randint(1, 4), timeout_s=0)
        self.counts["found"] += self.issued - issued > len(leases)
        for lease in leases:
            self.note(lease)
            assert lease.kept.get("turn") == self.kept.get(lease.number)
            self.rejected.discard(lease.number)
            if self.words.random() < 0.3:
                self.kept[lease.number] = self.words.randrange(1 << 30)
                lease.keep(turn=np.int64(self.kept[lease.number]))
            length = min(self.words.lognormvariate(1.0, 1.2), 200.0)  # some are longer than a lease
            self.ends.append((self.now + length, lease, worker))

    def note(self, lease: Lease) -> None:
        assert (
            self.index.setdefault(lease.number, int(lease.prompt["index"])) == lease.prompt["index"]
        )

    def reprioritise(self) -> None:
        chosen = self.words.sample(range(PROMPTS), self.words.randint(0, PROMPTS))
        self.replay.set_prompt_priorities(chosen, [self.words.uniform(0.01, 9.0) for _ in chosen])

    @property
    def issued(self) -> int:
        return int(check_books(self.replay)["issued"])

    def work(self) -> None:
        """Go on to the end of a lease."""
        if not self.ends:
            return
        end = min(self.ends, key=lambda one: one[0])
        self.ends.remove(end)
        self.now = max(self.now, end[0])
        lease = end[1]
        _ = end[2]
        chance = self.words.random()
        try:
            if chance < 0.05:
                lease.fail("no answer", retry=chance < 0.04)
                return
            self.commit(lease, is_good=self.words.random() >= 0.1)
        except LeaseExpiredError:
            self.counts["expired"] += 1

    def commit(self, lease: Lease, is_good: bool = True) -> None:
        weight = (1.0 if is_good else -1.0) * (len(self.made) + 1)
        lease.commit(responses(lease, weight))
        self.made.add(weight)
        if not is_good:
            self.rejected.add(lease.number)

    def fill(self, count: int = 0, part: float = 0.9) -> None:
        """Give a reward to some trajectories that wait for it, and lease others in vain."""
        with FillWorker.attach(self.config, "reward") as worker:
            for lease in worker.lease(count or self.words.randint(1, 6), timeout_s=0):
                one = float(lease.columns["weight"]), int(lease.columns["sample"])
                assert one not in self.filled, "a column was computed twice"
                if self.words.random() < part:
                    lease.fill(np.float32(lease.trajectory_id))
                    self.filled.add(one)

    def die(self) -> None:
        """Detach a worker as the kernel does, without returning its leases."""
        if self.workers:
            worker = self.words.choice(self.workers)
            self.workers.remove(worker)
            self.ends = [one for one in self.ends if one[2] is not worker]
            self.tables[worker].close()
            self.counts["deaths"] += 1

    def train(self) -> None:
        """Train a rollout batch; sometimes save between its selection and its end."""
        if not self.replay.can_sample():
            return
        batch = len(self.trained) // self.groups
        rollout = self.replay.rollout()
        numbers = rollout.values("prompt")[::SIZE].tolist()
        assert rollout.values("sample").tolist() == [*range(SIZE)] * self.groups
        lengths = rollout.lengths[::SIZE].tolist()  # their versions, plus 1
        self.lags += [
            (batch - length + 11) % 20 - 10 for length in lengths
        ]  # a kept group may be newer
        assert max(self.lags) <= self.max_lag
        self.trained += numbers
        self.check()
        if self.words.random() < 0.2:
            self.save(under_way=True)
        for _ in range(self.words.randint(0, 3)):
            self.lease()
            self.check()
        micros(rollout)

    def finish(self) -> None:
        """Train three more batches without a failure: the learner is never stuck."""
        for _ in range(3):
            trained = len(self.trained)
            for _ in range(6):
                self.now += 1000.0
                for lease in self.worker().lease(99, timeout_s=0):
                    self.note(lease)
                    self.commit(lease)
                self.fill(999, 1.0)
                self.train()
                self.check()
            assert len(self.trained) > trained

    def save(self, under_way: bool = False) -> None:
        self.replay.save(self.folder / "saved")
        self.saved = list(self.trained), set(self.rejected), under_way, dict(self.kept)
        self.saved = *self.saved, set(self.made), set(self.filled), dict(self.index)

    def resume(self, elsewhere: bool = False) -> None:
        """Lose all that came after the checkpoint; load it into this run, or into another one.

        In a store that is kept groups and late columns stay, except late columns of groups in the
        checkpoint.
        """
        if self.saved is None:
            return
        if elsewhere:
            if not self.keeps:
                for worker in self.workers:
                    self.tables[worker].close()
                self.workers = []
                self.ends = []
            self.replay.close()
            self.replay = Replay(self.config)
        if elsewhere and self.keeps and self.words.random() < 0.3:  # from the start
            self.trained = []
            self.rejected = set()
            self.kept = {}
            self.check()
            return
        self.replay.load(self.folder / "saved")
        self.trained = list(self.saved[0])
        self.rejected = set(self.saved[1])
        self.kept = dict(self.saved[3])
        made, filled, index = self.saved[4:]
        if self.draws:  # later numbers draw again, by the priorities of their time
            self.index = dict(index)
        self.filled = {one for one in self.filled if self.keeps and one[0] not in made} | filled
        check_groups(self.replay)
        self.check()
        self.counts["resumes"] += 1
        if self.saved[2]:  # the batch that was in training goes on
            rollout = self.replay.rollout()
            assert rollout.values("prompt")[::SIZE].tolist() == self.trained[-self.groups :]
            micros(rollout)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.replay.close()


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    remove_garbage(prefix(), kept=True)


@pytest.mark.parametrize(
    ("seed", "groups", "max_lag", "order", "late", "stages"),
    [
        (0, 3, 0, "lease", "wait", ""),
        (1, 4, 1, "lease", "wait", "needs"),
        (2, 3, 3, "lease", "wait", ""),
        (3, 3, 2, "completion", "wait", ""),
        (4, 2, 4, "completion", "wait", "needs"),
        (5, 3, 1, "completion", "drop", ""),
        (214, 4, 2, "lease", "wait", "needs keeps"),
        (344, 3, 2, "completion", "wait", "needs keeps"),
        (345, 3, 2, "completion", "drop", "keeps"),
        (2, 3, 3, "lease", "wait", "draws"),
        (4, 2, 4, "completion", "wait", "needs draws"),
    ],
)
def test_each_prompt_once_within_the_lag(
    seed: int,
    groups: int,
    max_lag: int,
    order: str,
    late: str,
    stages: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(seed, tmp_path, groups, max_lag, order, late, stages)
    clock = SimpleNamespace(monotonic_ns=lambda: int(run.now * 1e9))
    monkeypatch.setattr(prompt_ledger, "time", clock)
    # A rank looks for ended leases once a second of real time. Whether an overdue lease still
    # commits, and so all that follows, would depend on the machine's speed.
    monkeypatch.setattr(batch_stream, "_CLEAN_S", 1e9)
    events = (
        [run.lease] * 6 + [run.work] * 12 + [run.train] * 4 + [run.fill] * 8 * ("needs" in stages)
    )
    events += [run.reprioritise] * 2 * run.draws
    for turn in range(400):
        run.words.choice(events)()
        run.check()
        if turn % 20 == 19:
            rare = [run.die, run.die, run.save, run.resume, lambda: run.resume(elsewhere=True)]
            run.words.choice(rare)()
            run.check()
    run.finish()
    books = check_books(run.replay)
    assert len(run.trained) == len(set(run.trained)), "a prompt was trained twice"
    assert (run.trained == sorted(run.trained)) == (order == "lease")
    assert ("too old" in books["dropped"]) == (late == "drop")
    last = max(run.trained)
    skipped = set(range(last + 1)) - set(run.trained)
    if order == "lease":
        assert len(skipped) <= sum(books["dropped"].values())
    assert {number for number in run.rejected if number <= last} <= skipped
    assert max(run.lags) == max_lag or run.counts["events"] < 100
    assert books["largest_lag"] <= max_lag
    assert run.counts["deaths"] > 0
    assert run.counts["resumes"] > 0
    assert run.counts["expired"] > 0 or max_lag == 0
    assert (run.counts["found"] > 0) == run.keeps
    for epoch in range(last // PROMPTS):  # whole epochs: each prompt has one number
        numbers = range(epoch * PROMPTS, (epoch + 1) * PROMPTS)
        assert len({run.index[number] for number in numbers if number in run.index}) == PROMPTS
    run.close()


def test_admission_is_exact() -> None:
    """As many are admitted as can be consumed within the lag, and one more could not."""
    for groups in (1, 3, 8):
        for max_lag in range(4):
            spec = PromptSpec("", "", 99, groups, 1, 1.0, 1, max_lag, 0, 0)
            for trained in range(3):
                for selected in (trained, trained + 1):  # the last batch is in training, or done
                    busy = 0
                    while spec.may_lease(selected * groups + busy, trained):
                        busy += 1
                    batches = (
                        selected + (np.arange(busy + 1)) // groups
                    )  # of each number, if none is dropped
                    assert (batches[:-1] - trained).max(initial=0) <= max_lag
                    assert batches[-1] - trained > max_lag


def test_a_kept_group_is_held_exactly_if_every_group_stays_within_the_lag() -> None:
    """In the order of completion, beside entries of any versions, by the earliest of their last
    batches.
    """
    words = random.Random(0)
    answers = Counter[bool]()
    for _ in range(2000):
        groups = words.randint(1, 3)
        max_lag = words.randint(0, 3)
        trained = words.randint(0, 3)
        key = trained + words.randint(0, min(1, max_lag))  # one batch is in training, or none
        given = (groups, 1, 1.0, 1, max_lag, 0, 0, "completion")
        spec = PromptSpec("", "", 99, *given, is_kept=True)
        views = {one.name: np.zeros(one.shape, one.dtype) for one in spec.regions()}
        views |= {"stream/train/position": np.full(Head.NUM_WORDS, key)}
        views |= {"stream/train/consumed": np.array([trained])}
        views |= {name: np.zeros((1, 16), np.int64) for name in ("slots", "groups")}
        views |= {"group_sizes": np.zeros(1, np.int64)}
        ledger = KeptLedger(
            spec, views, np.zeros(1, np.int64), SimpleNamespace(), SimpleNamespace()
        )  # type: ignore[arg-type]
        most = min((trained + max_lag - key + 1) * groups, spec.num_entries)
        entries = ledger.entries[: words.randint(1, most)]
        entries[:, Entry.NUMBER] = (
            words.sample(range(9), len(entries)) if len(entries) < 9 else range(len(entries))
        )
        for entry in entries:
            entry[Entry.STATE] = words.choice(
                [EntryState.LEASED, EntryState.RETURNED, EntryState.HELD]
            )
            entry[Entry.VERSION] = words.randint(max(trained - max_lag, 0), trained)
        last = (
            np.where(
                entries[:, Entry.STATE] == EntryState.RETURNED, trained, entries[:, Entry.VERSION]
            )
            + max_lag
        )

        batches = key + np.arange(len(last)) // groups
        entries[0, Entry.STATE] = EntryState.RETURNED
        last[0] = trained + max_lag
        version = words.randint(0, trained + 1)
        if (batches <= np.sort(last)).all():
            last[0] = version + max_lag
            is_in_time = bool((batches <= np.sort(last)).all())
            assert ledger.is_in_time(int(entries[0, Entry.NUMBER]), version) == is_in_time
            answers[is_in_time] += 1
    assert min(answers[True], answers[False]) > 100
