"""Readings of a running job from outside: which job is meant, its stores, its ranks' progress.

The stores are mapped read-only and no lock is taken, so that a reading neither delays nor changes
the job. Counters are read one by one: a reading is not of one moment. What a reader must not mix,
the newest selection and its head, is copied and then checked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from deepspeed_gear.distributed.batch_barrier import BarrierWord
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.sampling.batch_sizes import TRAIN
from deepspeed_gear.sampling.sample_counts import effective_share, sample_ages, stored_samples
from deepspeed_gear.store.group_spec import GroupCount
from deepspeed_gear.store.live_stores import LiveStore, living_stores
from deepspeed_gear.store.memory_layout import RunIdentity
from deepspeed_gear.store.prompt_account import PromptAccount
from deepspeed_gear.store.prompt_spec import PromptSpec
from deepspeed_gear.store.records import PROGRESS, Control, Head, Peer, RankProgress, SlotRetention
from deepspeed_gear.store.row_allocator import distinct

_AT = f"stream/{TRAIN}/"
_ONE_Q62 = float(1 << 62)  # of the exponent of PER weights in a head
_MOST_PRIORITIES = 1 << 14  # items whose priorities a reading looks at, evenly spaced
_MOST_TRIES = 4  # copies of a selection that another one may replace meanwhile
_LEAST_DIGITS = 4  # of the beginning of an id that stands for the run
_GROUPS = {"complete": GroupCount.HELD, "evicted_unsampled": GroupCount.EVICTED_UNSAMPLED}
_REJECTED = (GroupCount.REJECTED, GroupCount.OVERSIZED)
_NO_VALUES = np.empty(0, np.float64)


@dataclass(frozen=True)
class BatchReading:
    """The newest global batch of a table.

    Attributes:
        effective: Effective sample size by Kish, as a part of the batch, in (0, 1].
        duplicates: Part of the samples whose item is already in the batch.
        ages: How much newer this node's newest trajectory is than that of each sample, in
            trajectories; over several nodes of the samples that this node stores. [n], float64.
        lags: Policy lag of the samples that this node stores; empty without versions. [n], float64.
    """

    effective: float
    duplicates: float
    ages: np.ndarray
    lags: np.ndarray


@dataclass(frozen=True)
class TableReading:
    """A table's store on this node. Counts are those since the run began, or a checkpoint's load.

    Attributes:
        table: Its name.
        kind: Kind of its sampler; None: it is not sampled.
        unit: What its items are.
        num_bytes: Bytes of shared memory.
        trajectories: Trajectories that it holds.
        steps: Steps that it holds.
        rows: Rows that these take, with those of columns of T+1 rows; None: it is a data set.
        most_trajectories: Trajectories that it can hold, likewise.
        most_rows: Rows that trajectories can fill, likewise.
        fill: The part of its rows or of its slots that is used, whichever is larger, in [0, 1].
        added: Trajectories that were ever added.
        steps_added: Their steps.
        batches: Global batches that were ever selected.
        samples: Samples that were ever drawn.
        version: Version of the newest policy; None: it has no versions.
        writers: Processes that are attached and only write.
        groups: Counts of its groups; empty: it has none.
        prompts: Numbers of its prompt ledger by state; empty: it has none.
        priorities: Priorities of items that can be drawn, of a large table evenly spaced ones; None
            without priorities. [n], float64.
        batch: The newest global batch; None: there is none yet.
    """

    table: str
    kind: str | None
    unit: str | None
    num_bytes: int
    trajectories: int
    steps: int
    rows: int | None
    most_trajectories: int | None
    most_rows: int | None
    fill: float | None
    added: int
    steps_added: int
    batches: int
    samples: int
    version: int | None
    writers: int
    groups: Mapping[str, int] = field(default_factory=dict)
    prompts: Mapping[str, int] = field(default_factory=dict)
    priorities: np.ndarray | None = None
    batch: BatchReading | None = None


@dataclass(frozen=True)
class RankReading:
    """A rank of this node. Times are of the monotonic clock.

    Attributes:
        rank: Its number in the job.
        process: Its process id, as it sees it itself.
        lives: Whether it is attached.
        begun_s: When its replay was made.
        returned_s: When it took its latest batch; None: it has not.
        batches: Micro batches, or rollout batches with packs, that it took.
        wait_s: Seconds that it waited for them.
        steps: Optimizer steps of packed batches.
        tokens: Tokens of these, of all ranks together.
        late_s: Seconds that the first rank to ask for each batch waited for this one; None: ranks
            do not wait for each other.
        waited_for_s: Seconds since another rank of the node asked for a batch, or had it ready,
            that this one has not; None: none waits for it.
    """

    rank: int
    process: int
    lives: bool
    begun_s: float
    returned_s: float | None
    batches: int
    wait_s: float
    steps: int
    tokens: int
    late_s: float | None
    waited_for_s: float | None


@dataclass(frozen=True)
class RunReading:
    """What the stores of a run on this node said at a time.

    Attributes:
        run: The run.
        at_s: When it was read, by the monotonic clock.
        tables: Its tables, the sampled ones first.
        ranks: Its ranks on this node.
    """

    run: RunIdentity
    at_s: float
    tables: Sequence[TableReading]
    ranks: Sequence[RankReading]

    @property
    def lives(self) -> bool:
        """Whether a rank of it is attached."""
        return any(rank.lives for rank in self.ranks)


class LiveRun:
    """The stores of one run on this node, mapped read-only until this object is deleted.

    Args:
        stores: Those of one run, among them that of its first sampled table.
    """

    def __init__(self, stores: Sequence[LiveStore]) -> None:
        self.run = stores[0].run
        self._stores = sorted(stores, key=lambda store: (_train(store) is None, store.table))
        self._first = next(store for store in stores if PROGRESS in store.views)

    @property
    def name(self) -> str:
        """What a user calls the run: its name or, without one, its id."""
        return self.run.name or self.run.id

    @property
    def num_ranks(self) -> int:
        """Number of its ranks on this node, living or not."""
        return len(self._first.views[PROGRESS])

    @property
    def lives(self) -> bool:
        """Whether a rank of the run is attached."""
        return any(map(self._first.is_attached, range(self.num_ranks)))

    @cached_property
    def processes(self) -> list[int]:
        """Ids of the processes that were attached when the stores were found."""
        return sorted({process for store in self._stores for process in store.processes})

    def describe(self) -> str:
        """Return the run, its ranks and tables in a line for a list."""
        processes = ", ".join(map(str, self.processes))
        tables = ", ".join(store.table for store in self._stores)
        return f"{self.run}: tables {tables}; processes {processes}"

    def read(self) -> RunReading:
        """Read the run once. Cost: some words a rank, the newest selection, some priorities."""
        tables = [_table(store, self.num_ranks) for store in self._stores]
        return RunReading(self.run, time.monotonic(), tables, self._ranks())

    def _ranks(self) -> list[RankReading]:
        store = self._first
        progress = store.views[PROGRESS].tolist()
        barrier = store.views["status/words"].tolist()
        # Ranks that train alone reach no barrier.
        waits = any(words[BarrierWord.REACHED] for words in barrier)
        ranks = []
        for peer, (words, arrival) in enumerate(zip(progress, barrier, strict=True)):
            late_ns = arrival[BarrierWord.LATE_NS]
            ranks.append(
                RankReading(
                    rank=int(words[RankProgress.RANK]),
                    process=int(store.views["peers"][peer, Peer.PID]),
                    lives=store.is_attached(peer),
                    begun_s=words[RankProgress.BEGUN_S],
                    returned_s=words[RankProgress.RETURNED_S] or None,
                    batches=int(words[RankProgress.BATCHES]),
                    wait_s=words[RankProgress.WAIT_S],
                    steps=int(words[RankProgress.STEPS]),
                    tokens=int(words[RankProgress.TOKENS]),
                    late_s=late_ns / 1e9 if waits and len(barrier) > 1 else None,
                    waited_for_s=_waited_for_s(arrival, barrier),
                )
            )
        return sorted(ranks, key=lambda rank: rank.rank)


def living_runs() -> list[LiveRun]:
    """Return the runs of this user on this node that have a living rank, by name and id.

    Runs of another version of the package are left out. Cost: a look at the open files of each
    process of the user.
    """
    by_run: dict[str, list[LiveStore]] = {}
    for store in living_stores():
        by_run.setdefault(store.run.id, []).append(store)
    runs = [
        LiveRun(stores)
        for stores in by_run.values()
        if any(PROGRESS in store.views for store in stores)
    ]
    return sorted((run for run in runs if run.lives), key=lambda run: (run.run.name, run.run.id))


def find_run(name: str | None) -> LiveRun:
    """Return the running job of a name.

    Args:
        name: Name or id of the run, at least the first four digits of its id, or the id of one of
            its processes; None: the only run.
    Raises:
        ConfigError: There is none, or there are several.
    """
    known = living_runs()
    listed = "; ".join(run.describe() for run in known) or "no job of this user runs here"
    if name is None:
        if len(known) == 1:
            return known[0]
        rule = "must be named where several run" if known else "must be running on this machine"
        raise ConfigError("RUN", rule, None, listed)
    exact = [run for run in known if name in (run.run.name, run.run.id)]
    begun = [run for run in known if len(name) >= _LEAST_DIGITS and run.run.id.startswith(name)]
    owning = [run for run in known if name.isdecimal() and int(name) in run.processes]
    for matching in (exact, begun, owning):
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise ConfigError("RUN", "must be one run", name, listed)
    rule = "must be the name or id of a running job of this user, or of one of its processes"
    raise ConfigError("RUN", rule, name, listed)


def _waited_for_s(words: Sequence[int], of_ranks: Sequence[Sequence[int]]) -> float | None:
    """Return for how long another rank has waited for the one of these words; None: none does."""
    stages = (
        (BarrierWord.REQUESTED, BarrierWord.REQUESTED_NS),
        (BarrierWord.REACHED, BarrierWord.ARRIVED_NS),
    )
    for number, at_ns in stages:
        furthest = max(others[number] for others in of_ranks)
        if 0 < words[number] < furthest:  # 0: it takes no batches, or loads a checkpoint
            first_ns = min(others[at_ns] for others in of_ranks if others[number] == furthest)
            return max(time.monotonic_ns() - first_ns, 0) / 1e9
    return None


def _train(store: LiveStore) -> Mapping[str, Any] | None:
    """Return the description of a store's training stream; None: it is not sampled."""
    described: Mapping[str, Any] | None = store.layout.meaning.get(TRAIN)
    return described


def _table(store: LiveStore, num_ranks: int) -> TableReading:
    views = store.views
    control = views["control"].tolist()
    meaning = store.layout.meaning
    train = meaning.get(TRAIN)
    sizes = meaning.get("sizes")
    position = [0] * Head.NUM_WORDS if train is None else views[_AT + "position"].tolist()
    rows = most_trajectories = most_rows = fill = version = None
    if sizes is not None:
        most_trajectories = int(sizes["num_slots"])
        most_rows = int(sizes["num_rows"]) - int(sizes["spare_rows"])
        rows = control[Control.ROWS_HELD]
        of_slots = control[Control.NUM_COMMITTED] / most_trajectories
        fill = min(max(rows / max(most_rows, 1), of_slots), 1.0)
        if sizes["retention"]["version_column"] is not None:
            version = control[Control.POLICY_VERSION]
    prompts: dict[str, int] = {}
    if sizes is not None and sizes.get("prompts") is not None:
        numbers = views["column/" + sizes["group"]["column"]]
        prompts = PromptAccount(PromptSpec(**sizes["prompts"]), views, numbers).by_state()
    groups: dict[str, int] = {}
    if "group_counts" in views and sizes is not None:
        counts = views["group_counts"].tolist()
        groups = {name: counts[word] for name, word in _GROUPS.items()}
        groups["rejected"] = sum(counts[word] for word in _REJECTED)
    writers = range(num_ranks, len(views["peers"]))
    return TableReading(
        table=store.table,
        kind=None if train is None else train["kind"],
        unit=None if train is None else train["unit"],
        num_bytes=store.layout.total_bytes,
        trajectories=control[Control.NUM_COMMITTED],
        steps=control[Control.STEPS_COMMITTED],
        rows=rows,
        most_trajectories=most_trajectories,
        most_rows=most_rows,
        fill=fill,
        added=control[Control.INSERTED],
        steps_added=control[Control.STEPS_INSERTED],
        batches=position[Head.NUMBER],
        samples=position[Head.SAMPLES],
        version=version,
        writers=sum(map(store.is_attached, writers)),
        groups=groups,
        prompts=prompts,
        priorities=_priorities(views) if train is not None else None,
        batch=None if train is None else _newest_batch(store, train["unit"], version),
    )


def _priorities(views: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return the priorities of evenly spaced items that can be drawn. [n], float64."""
    values = views.get(_AT + "priorities")
    if values is None:
        return None
    every = -(-len(values) // _MOST_PRIORITIES)
    is_drawable = views[_AT + "sums"][: len(values) : every] > 0  # the leaves of the sum tree
    return np.asarray(values[::every][is_drawable], np.float64)


def _newest_batch(store: LiveStore, unit: str, version: int | None) -> BatchReading | None:
    copied = _newest_selection(store.views)
    if copied is None or not len(copied[1]):
        return None
    head, resolutions = copied
    ids = resolutions[:, Resolution.ID]
    items = ids
    if unit == "step":
        items = resolutions[:, Resolution.FIRST_ROW] + resolutions[:, Resolution.ANCHOR]
    weights = np.ones(len(ids))
    if store.views.get(_AT + "priorities") is not None:
        # PER weights are proportional to mass^-beta; the effective size needs no more of them.
        masses = np.maximum(resolutions[:, Resolution.MASS], 1).astype(np.float64)
        weights = (masses.min() / masses) ** (head[Head.EXPONENT] / _ONE_Q62)
    shard = store.layout.meaning.get("shard")
    num_shards = 1 if shard is None or "sizes" not in store.layout.meaning else shard["count"]
    slots = store.views["slots"]
    next_id = int(store.views["control"][Control.NEXT_ID])
    ages = sample_ages(resolutions, slots, next_id, num_shards)
    lags = _NO_VALUES
    if version is not None:
        held = stored_samples(resolutions, slots)[:, Resolution.SLOT]
        of_slots = store.views["retention"][held, SlotRetention.POLICY_VERSION]
        lags = np.maximum(version - of_slots, 0).astype(np.float64)
    return BatchReading(
        effective=effective_share(weights),
        duplicates=1 - len(distinct(items)) / len(items),
        ages=np.maximum(ages, 0).astype(np.float64),
        lags=lags,
    )


def _newest_selection(views: Mapping[str, np.ndarray]) -> tuple[list[int], np.ndarray] | None:
    """Copy the newest selection of the training stream without the lock; None: there is none.

    Entries of the ring are written in turn: that of batch n is not written again before batch
    n + depth is selected. So a copy is whole if fewer batches were selected since.
    """
    position = views[_AT + "position"]
    heads = views[_AT + "heads"]
    ring = views[_AT + "ring"]
    depth = len(heads)
    for _ in range(_MOST_TRIES):
        number = int(position[Head.NUMBER]) - 1
        entry = number % depth
        head = heads[entry, : Head.NUM_SET].tolist()
        resolutions = ring[entry, : max(head[Head.COUNT], 0)].copy()
        is_whole = int(position[Head.NUMBER]) - number < depth
        if number >= 0 and head[Head.NUMBER] == number and is_whole:
            return head, resolutions[resolutions[:, Resolution.ID] >= 0]
    return None
