"""The rules for slow groups of this package, of TRL and of AReaL, over equal leases in virtual
time.

    pip download --no-deps -d wheels areal==1.0.4 trl==1.16.0
    python benchmarks/lag_peers.py --wheels wheels --json F

This package's rule is its ledger, as `gear simulate` drives it. TRL's is its `RolloutQueueDataset`,
which drops what is too old when a batch asks for it; AReaL's its `StalenessManager`, which admits
by a count. Both are read out of their wheels at run time; around them stand only their limits of
what runs, and their order of consumption. Lengths are log-normal (sigma 1.2), equal for all; a
group takes as long as its longest response.
"""

from __future__ import annotations

import contextvars
import heapq
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from support.report import Report, Row, print_rows
from lag import GROUPS, MAX_LAG, PACE, SIZE, config_of, lengths_by_number
from packing_peers import load_names

from deepspeed_gear.cli.simulate import Lengths, Scene, read_spec
from deepspeed_gear.config import parse

Advance = Callable[[], None]  # to the end of the next group that is generated
ALPHA_1_PERCENT = 1.628  # c(0.01) of the two-sample Kolmogorov-Smirnov test


class Rule(Protocol):
    """What is generated, and what is trained of it; a group is its number."""

    dropped: list[int]

    def lease(self, free: int) -> list[tuple[int, int]]:
        """Begin up to so many groups; return their numbers and policy versions."""

    def complete(self, number: int) -> None:
        """Take a group that is generated."""

    def batch(self, advance: Advance) -> list[int]:
        """Return the groups of the next batch; wait by `advance`."""

    def stepped(self) -> None:
        """Take note that a batch is trained."""


class Ledger:
    """This package: in the order of leases; a lease waits until its group cannot become too old."""

    def __init__(self) -> None:
        self._scene = Scene(read_spec(parse(config_of(Path("prompts"), "lease", "wait")))[0])
        self._leases: dict[int, Any] = {}
        self.dropped = self._scene.dropped

    def lease(self, free: int) -> list[tuple[int, int]]:
        leases = self._scene.ledger.lease(free)
        self._leases |= {lease.number: lease for lease in leases}
        return [(lease.number, lease.version) for lease in leases]

    def complete(self, number: int) -> None:
        self._scene.commit(self._leases.pop(number))

    def batch(self, advance: Advance) -> list[int]:
        while not (numbers := self._scene.select()):
            advance()
        return numbers

    def stepped(self) -> None:
        self._scene.consumed[0] += 1


class _Numbered:
    """Groups by their number, and the version of a policy that is published after each batch."""

    def __init__(self) -> None:
        self.version = 0
        self.versions = list[int]()
        self.running = 0
        self.dropped: list[int] = []

    def begin(self, count: int) -> list[tuple[int, int]]:
        first = len(self.versions)
        self.versions += [self.version] * count
        self.running += count
        return [(number, self.version) for number in range(first, len(self.versions))]

    def stepped(self) -> None:
        self.version += 1


class Trl(_Numbered):
    """TRL: as many responses run as it infers; in the order of completion, old ones are dropped."""

    def __init__(self, wheel: Path) -> None:
        super().__init__()
        silent = SimpleNamespace(info=lambda _: None)
        given: dict[str, Any] = {
            "queue": queue,
            "threading": threading,
            "time": time,
            "torch": torch,
        }
        given |= {
            "contextvars": contextvars,
            "logger": silent,
            "log_rollout_traces": lambda *_, **__: None,
        }
        loaded = load_names(
            wheel, "async_grpo/async_grpo_trainer.py", ["RolloutQueueDataset"], **given
        )
        self._ready = deque[Any]()
        self._got = list[int]()
        self._advance: Advance = lambda: None
        dataset = loaded.RolloutQueueDataset(
            SimpleNamespace(get=self._get, qsize=lambda: len(self._ready)),
            lambda: self.version,
            lambda _: self._advance(),  # where nothing comes
            0.0,
            defaultdict(list),
            max_staleness=MAX_LAG,
        )
        self._samples: Iterator[dict[str, Any]] = iter(dataset)

    def _get(self, timeout: float) -> Any:
        del timeout
        if not self._ready:
            raise queue.Empty
        self._got.append(self._ready[0].group_id)
        return self._ready.popleft()

    def lease(self, free: int) -> list[tuple[int, int]]:
        return self.begin(
            min(free, max(MAX_LAG, 1) * GROUPS - self.running)
        )  # its max_inflight_tasks

    def complete(self, number: int) -> None:
        self.running -= 1
        nothing = dict.fromkeys(
            ("input_ids", "completion_mask", "old_log_probs", "advantage", "metrics")
        )
        place = {"group_id": number, "model_version": self.versions[number], "enqueued_at": None}
        self._ready += [SimpleNamespace(**nothing, **place) for _ in range(SIZE)]

    def batch(self, advance: Advance) -> list[int]:
        self._advance = advance
        taken = {next(self._samples)["group_id"]: None for _ in range(GROUPS * SIZE)}
        self.dropped += [number for number in dict.fromkeys(self._got) if number not in taken]
        self._got.clear()
        return list(taken)


class Areal(_Numbered):
    """AReaL: as many groups run as its manager admits; a batch has the oldest of what
    is complete.
    """

    def __init__(self, wheel: Path) -> None:
        super().__init__()
        stat = load_names(
            wheel, "areal/api/io_struct.py", ["RolloutStat"], dataclass=dataclass
        ).RolloutStat
        given = {"Lock": threading.Lock, "RolloutStat": stat, "VersionProvider": object}
        name = "StalenessManager"
        manager = getattr(
            load_names(wheel, "areal/infra/staleness_manager.py", [name], **given), name
        )
        self._manager = manager(
            SimpleNamespace(get_version=lambda: self.version),
            PACE.workers * PACE.concurrency,
            GROUPS,
            MAX_LAG,
        )
        self._ready: list[int] = []

    def lease(self, free: int) -> list[tuple[int, int]]:
        leased: list[tuple[int, int]] = []
        while len(leased) < free and self._manager.get_capacity() > 0:
            self._manager.on_rollout_enqueued()
            self._manager.on_rollout_submitted()
            leased += self.begin(1)
        return leased

    def complete(self, number: int) -> None:
        self._manager.on_rollout_accepted()
        self._ready.append(number)

    def batch(self, advance: Advance) -> list[int]:
        while len(self._ready) < GROUPS:
            advance()
        self._ready.sort()
        taken = self._ready[:GROUPS]
        self._ready = self._ready[GROUPS:]
        return taken


class Run:
    """Some batches under a rule, in virtual time.

    Args:
        rule: Of this package or a peer.
        lengths: Of the responses of a group.
        batches: To train.
    """

    def __init__(self, rule: Rule, lengths: Lengths, batches: int) -> None:
        self._rule = rule
        self._lengths = lengths
        self._now = 0.0
        self._ends: list[tuple[float, int]] = []
        self.versions = dict[int, int]()
        self.trained = list[int]()
        self.lags = list[int]()
        self._generating_s = training_s = 0.0
        self._refill()
        for version in range(batches):
            numbers = rule.batch(self._advance)
            self.lags += [version - self.versions[number] for number in numbers]
            self.trained += numbers
            took = sum(int(lengths(number).sum()) for number in numbers) * PACE.train_s
            training_s += took
            end = self._now + took
            while self._ends and self._ends[0][0] <= end:
                self._advance()
            self._move(end)
            rule.stepped()
            self._refill()
        self.learner_idle = 1 - training_s / self._now
        self.workers_idle = 1 - self._generating_s / (PACE.workers * PACE.concurrency * self._now)
        self.tokens_per_s = float(self.lengths_of(self.trained).sum()) / self._now

    def lengths_of(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the lengths of all responses of some groups."""
        return np.concatenate(
            [self._lengths(number) for number in numbers] or [np.zeros(0, np.int64)]
        )

    @property
    def first_open(self) -> int:
        """The first group that is neither trained nor dropped."""
        return min(self.versions.keys() - {*self.trained, *self._rule.dropped})

    def row(self, system: str, prefix: int) -> Row:
        """Describe the run; dropped work and lengths over the first `prefix` leases."""
        trained = self.lengths_of([number for number in self.trained if number < prefix])
        every = self.lengths_of(range(prefix))
        distance, bound = kolmogorov_smirnov(trained, every)
        return {
            "system": system,
            "tokens_per_s": self.tokens_per_s,
            "learner_idle": self.learner_idle,
            "workers_idle": self.workers_idle,
            "mean_lag": float(np.mean(self.lags)),
            "largest_lag": max(self.lags),
            "older_than_bound": float(np.mean(np.array(self.lags) > MAX_LAG)),
            "prefix": prefix,
            "dropped": 1 - float(trained.sum() / every.sum()),
            "length_bias": float(trained.mean() / every.mean()) - 1,
            "ks_distance": distance,
            "ks_bound": bound,
        }

    def _refill(self) -> None:
        for number, version in self._rule.lease(PACE.workers * PACE.concurrency - len(self._ends)):
            self.versions[number] = version
            end = self._now + float(self._lengths(number).max()) * PACE.latency_s
            heapq.heappush(self._ends, (end, number))

    def _move(self, end: float) -> None:
        self._generating_s += len(self._ends) * (end - self._now)
        self._now = end

    def _advance(self) -> None:
        self._move(self._ends[0][0])
        self._rule.complete(heapq.heappop(self._ends)[1])
        self._refill()


def kolmogorov_smirnov(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return the largest distance of two samples' distributions, and what it exceeds with a chance
    of 1%.
    """
    at = np.sort(np.concatenate((one, other)))
    shares = [
        np.searchsorted(np.sort(sample), at, side="right") / len(sample) for sample in (one, other)
    ]
    bound = ALPHA_1_PERCENT * ((len(one) + len(other)) / (len(one) * len(other))) ** 0.5
    return float(np.abs(shares[0] - shares[1]).max()), bound


def main() -> None:
    """Run from the command line."""
    report = Report(
        __doc__,
        wheels=(Path, "folder with wheels of TRL and AReaL"),
        batches=(300, "rollout batches of each run"),
    )
    if report.options.wheels is None:
        report.parser.error("--wheels must be a folder with wheels of TRL and AReaL")
    rules: dict[str, Rule] = {"deepspeed_gear": Ledger()}
    peers: dict[str, Callable[[Path], Rule]] = {"TRL": Trl, "AReaL": Areal}
    for name, peer in peers.items():
        wheel = next(report.options.wheels.glob(f"{name.lower()}-*.whl"))
        rules[f"{name} {wheel.name.split('-')[1]}"] = peer(wheel)
    lengths = lengths_by_number()
    runs = {name: Run(rule, lengths, report.options.batches) for name, rule in rules.items()}
    prefix = min(run.first_open for run in runs.values())
    rows = [run.row(name, prefix) for name, run in runs.items()]
    print_rows(rows)
    report.write(rows)


if __name__ == "__main__":
    main()
