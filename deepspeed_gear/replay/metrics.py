"""Metrics, progress and statistics of a Replay, for its batches and its stores."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch

from deepspeed_gear.ops.records import Resolution, Slot
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.sample_counts import (
    recent_selections,
    sample_ages,
    stored_samples,
)
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.sampling.staleness import dropped
from deepspeed_gear.store.group_spec import GroupCount
from deepspeed_gear.store.late_columns import absent
from deepspeed_gear.store.records import Control, Head, RankProgress, SlotRetention
from deepspeed_gear.store.row_allocator import distinct
from deepspeed_gear.store.table import Table

# Of an optimizer step of packed batches: trajectories and tokens of all ranks, tokens that shared
# prefixes save, micro batches of this rank, the part of its places that hold a trajectory's step,
# and the cost of the slowest rank in each micro step / the mean, minus 1.
TRAINED = ("trajectories", "tokens", "shared_tokens", "micro_batches", "fill", "imbalance")
# Sums of `add` that the store has, too.
_PUBLISHED = {
    "wait_s": RankProgress.WAIT_S,
    "steps": RankProgress.STEPS,
    "trajectories": RankProgress.TRAJECTORIES,
    "tokens": RankProgress.TOKENS,
}


class Metrics:
    """Counters of a replay's batches and steps: sums that only increase.

    Some are published in the store, where `gear watch` reads them.

    Thread safety: a prefetch thread adds, the main thread adds and reads.

    Args:
        progress: This rank's words of `RankProgress` in the store; None: nothing is published.
        rank: This rank's number in the job.
    """

    def __init__(self, progress: np.ndarray | None = None, rank: int = 0) -> None:
        # A memoryview: an element of an array takes three times as long.
        self._progress: Any = None if progress is None else progress.data
        if progress is not None:
            progress[:] = 0
            progress[RankProgress.RANK] = rank
            progress[RankProgress.BEGUN_S] = time.monotonic()
        self.epoch = 0
        self.digest: tuple[int, int] | None = None  # the last verified global batch, and its digest
        # `wait_s`: in all calls of `sample`, or for rollout batches and their packs; `made`,
        # `sample_s`: micro batches that were gathered; the others are of optimizer steps of packed
        # batches, and `skipped` those whose update was, for an overflow.
        names = (
            "batches",
            "wait_s",
            "made",
            "sample_s",
            "real",
            "rows",
            "bytes",
            "steps",
            "skipped",
        )
        self.sums = dict.fromkeys((*names, *TRAINED), 0.0)
        self._taken = dict(self.sums)  # at the last `take`
        self._taken_s = time.perf_counter()
        self._means = dict[str, float]()  # as they were last returned
        self._num_new = 0.0  # batches, or optimizer steps, between the last two calls of `take`
        self._elapsed_s = 0.0  # between these calls
        self._counted: Mapping[str, float] = {}  # counts of the tables and ranks at the last one

    def end_publishing(self) -> None:
        """Release the words in the store, whose memory they would keep."""
        self._progress = None

    def add(self, **sums: float) -> None:
        """Add to sums by name."""
        words = self._progress
        for name, value in sums.items():
            self.sums[name] += value
            if words is not None and name in _PUBLISHED:
                words[_PUBLISHED[name]] = self.sums[name]

    def made(self, taken_s: float) -> None:
        """Count a micro batch that was gathered."""
        sums = self.sums
        sums["sample_s"] += taken_s
        sums["made"] += 1
        words = self._progress
        if words is not None:
            words[RankProgress.MADE] = sums["made"]
            words[RankProgress.GATHER_S] = sums["sample_s"]

    def used(self, epoch: int, waited_s: float, now_s: float) -> None:
        """Count a batch that was returned, of an epoch, at a time of `time.monotonic`."""
        self.epoch = epoch
        sums = self.sums
        sums["wait_s"] += waited_s
        sums["batches"] += 1
        words = self._progress
        if words is not None:
            words[RankProgress.WAIT_S] = sums["wait_s"]
            words[RankProgress.BATCHES] = sums["batches"]
            words[RankProgress.RETURNED_S] = now_s

    def take_rates(
        self, counts: Mapping[str, float], late_s: Mapping[int, float]
    ) -> dict[str, float]:
        """Return counts per second, and how late ranks were per batch, after `take`.

        Args:
            counts: What was ever counted, by the name of its rate.
            late_s: Seconds by which each rank was late at the batch barriers, in all.
        """
        sums = {name: (count, self._elapsed_s) for name, count in counts.items()}
        for rank, total_s in late_s.items():
            sums[f"late_ms.rank{rank}"] = (1e3 * total_s, self._num_new)
        found = {}
        for name, (total, divisor) in sums.items():
            of_period = max(total - self._counted.get(name, 0.0), 0.0)  # a load sets counts back
            found[name] = self._mean(name, of_period, divisor if self._num_new else 0.0)
        if self._num_new:
            self._counted = {name: total for name, (total, _) in sums.items()}
        return found

    def _new(self, counted: str) -> dict[str, float]:
        """Return what was added since the last call; a period is one with something `counted`."""
        now = dict(self.sums)
        before = self._taken
        self._taken = now
        new = {name: value - before[name] for name, value in now.items()}
        self._num_new = new[counted]
        if self._num_new:
            now_s = time.perf_counter()
            self._elapsed_s = now_s - self._taken_s
            self._taken_s = now_s
        return new

    def _wait_share(self, wait_s: float) -> float:
        """Return the part of the period that this rank waited for batches, in [0, 1]."""
        elapsed_s = self._elapsed_s if self._num_new else 0.0
        return min(self._mean("wait_share", wait_s, elapsed_s), 1.0)

    def _mean(self, name: str, total: float, count: float) -> float:
        """Return a mean since the last call, or of the period before if nothing was counted."""
        if count:
            self._means[name] = total / count
        return self._means.get(name, 0.0)

    def take_trained(self) -> dict[str, float]:
        """Return means per optimizer step since the last call, and the number of skipped steps."""
        new = self._new("steps")
        means = {f"step_{name}": self._mean(name, new[name], new["steps"]) for name in TRAINED}
        return {
            **means,
            "wait_share": self._wait_share(new["wait_s"]),
            "train_steps": new["steps"],
            "skipped_steps": self.sums["skipped"],
        }

    def take(self, counters: torch.Tensor) -> dict[str, float]:
        """Return means per micro batch since the last call.

        Args:
            counters: Real rows, all rows and bytes, ever. [3].
        """
        self.sums |= zip(("real", "rows", "bytes"), counters.tolist(), strict=True)
        new = self._new("batches")
        return {
            "sample_ms": self._mean("sample_ms", 1e3 * new["sample_s"], new["made"]),
            "wait_ms": self._mean("wait_ms", 1e3 * new["wait_s"], new["batches"]),
            "wait_share": self._wait_share(new["wait_s"]),
            "bytes": self._mean("bytes", new["bytes"], new["made"]),
            # A fraction of the rows.
            "padding": self._mean("padding", new["rows"] - new["real"], new["rows"]),
            "epoch": float(self.epoch),
        }


@dataclass(frozen=True)
class Progress:
    """Progress of the training stream in a period; `str` is one line for a log.

    Args:
        num_samples: Samples of all replicas together; of packed batches, trajectories that were
            trained.
        elapsed_s: Length of the period, with all that the program does in it.
        wait_s: Time that this rank spent in `sample`, or on rollout batches and their packs:
            gathering, or waiting for a prefetch thread, for items or for other ranks. None: the
            table lies in a device's memory, and `sample` waits for nothing.
        lag: Mean policy lag of those samples of the newest global batch that this node stores.
            None: no table has versions, or there is no such sample.
    """

    num_samples: int
    elapsed_s: float
    wait_s: float | None
    lag: float | None

    @property
    def samples_per_s(self) -> float:
        """Samples per second, of all replicas together."""
        return self.num_samples / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def wait_share(self) -> float | None:
        """Part of the time that this rank spent in `sample`, in [0, 1]."""
        if self.wait_s is None:
            return None
        return self.wait_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def __sub__(self, before: Progress) -> Progress:
        """Return the progress from one period's end to this one's, which began together."""
        wait_s = None if self.wait_s is None else self.wait_s - (before.wait_s or 0.0)
        samples = self.num_samples - before.num_samples
        elapsed_s = self.elapsed_s - before.elapsed_s
        return Progress(samples, elapsed_s, wait_s, self.lag)

    def __str__(self) -> str:
        rate = self.samples_per_s
        share = self.wait_share
        parts = [f"{rate:,.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s"]
        if share is not None:
            parts.append(f"{share:.1%} of the time waiting for data")
        if self.lag is not None:
            parts.append(f"policy lag {self.lag:.1f}")
        return ", ".join(parts)


def metrics_of(parts: ReplayParts, sums: Metrics) -> dict[str, float]:
    """Return the metrics of a replay since the last call; see `Replay.take_metrics`."""
    is_packed = parts.plan.config.pack is not None
    taken = sums.take_trained() if is_packed else sums.take(parts.assembler.counters)
    states = [stream.state for stream in parts.train]
    tables = [stream.table for stream in parts.train]
    if any(state.may_wait for state in states):
        taken["rate_wait_s"] = sum(state.limiter_wait.total_s for state in states)
    return {
        **taken,
        **sums.take_rates(counts_of(parts.train), _late_s(parts)),
        **of_tables(tables),
        **of_groups(tables),
        **parts.links.take_metrics(),
        **of_last_batch(parts.train),
    }


def _late_s(parts: ReplayParts) -> dict[int, float]:
    """Return how late each rank of the node was in all, on its leader; empty for a rank alone."""
    topology = parts.plan.topology
    if parts.barrier is None or not topology.leads_node or topology.num_peers == 1:
        return {}
    return parts.barrier.late_s()


def progress_of(parts: ReplayParts, sums: Metrics, begin_s: float) -> Progress:
    """Return the progress of a replay's training since `begin_s` of `time.perf_counter`."""
    info = parts.plan.info
    num_samples = int(sums.sums["batches"]) * info.micro * info.data_world
    if parts.plan.config.pack is not None:
        num_samples = int(sums.sums["trajectories"])
    elapsed_s = time.perf_counter() - begin_s
    return Progress(num_samples, elapsed_s, sums.sums["wait_s"], policy_lag(parts.train))


def statistics_of(parts: ReplayParts, sums: Metrics) -> dict[str, Any]:
    """Return the statistics of a replay; see `Replay.statistics`."""
    transfer = parts.assembler.transfer
    return {
        **of_store([stream.table for stream in parts.train]),
        "batches": int(sums.sums["batches"]),
        "digest": sums.digest,
        **of_streams(parts.train),
        **metrics_of(parts, sums),
        **of_selection(parts.train),
        **({} if transfer is None else {"transfer": transfer.describe()}),
    }


Selections = list[tuple[BatchStream, Selection]]  # of one global batch: one a table


def of_store(tables: Sequence[Table]) -> dict[str, Any]:
    """Return the sizes of the sampled tables, and by table the counts of stale trajectories."""
    groups = {}
    prompts = {}
    late = dict[str, dict[str, dict[str, int]]]()
    pages = {table.spec.name: table.media for table in tables if table.media is not None}
    media = {name: one.statistics() for name, one in pages.items() if one.spec.column is not None}
    ragged = {name: one.statistics() for name, one in pages.items() if one.spec.column is None}
    for table in tables:
        columns = table.schema.late_columns if table.spec.dataset is None else ()
        for index, column in enumerate(columns):
            assert table.fills is not None
            with table.lock:
                num_absent = len(absent(table, column.name))
                counts = {"absent": num_absent, "repeated": table.fills.num_repeated(index)}
            late.setdefault(table.spec.name, {})[column.name] = counts
        if table.groups is not None:
            with table.lock:
                table.groups.update()
                groups[table.spec.name] = table.groups.statistics
                if table.ledger is not None:
                    table.ledger.reclaim()
                    prompts[table.spec.name] = table.ledger.account.report()
    sections = {"late": late, "groups": groups, "prompts": prompts, "media": media}
    sections["ragged"] = ragged
    return {
        "trajectories": sum(table.num_trajectories for table in tables),
        "steps": sum(table.num_steps for table in tables),
        "store_bytes": sum(table.memory.num_bytes for table in tables),
        "huge_bytes": sum(table.memory.huge_bytes for table in tables),
        "stale": {table.spec.name: dropped(table) for table in tables},
        **{name: of_tables for name, of_tables in sections.items() if of_tables},
        "payload_bytes": sum(table.num_steps * table.spec.schema.row_bytes for table in tables),
    }


def of_groups(tables: Sequence[Table]) -> dict[str, float]:
    """Return the counts of groups left out, over all sampled tables; empty without groups."""
    known = [table.groups for table in tables if table.groups is not None]
    if not known:
        return {}
    words = np.sum([groups.counts for groups in known], axis=0)
    counts = {
        "groups_held": words[GroupCount.HELD],
        "groups_rejected": words[GroupCount.REJECTED] + words[GroupCount.OVERSIZED],
        "groups_evicted_unsampled": words[GroupCount.EVICTED_UNSAMPLED],
        "late_members": words[GroupCount.LATE] + words[GroupCount.LATE_CONSUMED],
        "unfilled_members": words[GroupCount.UNFILLED],
        "surplus_members": words[GroupCount.SURPLUS],
    }
    return {name: float(count) for name, count in counts.items()}


def of_tables(tables: Sequence[Table]) -> dict[str, float]:
    """Return how full each table with a capacity is, and where the prompts of its ledger are."""
    found = {}
    for table in tables:
        spec = table.spec
        if spec.dataset is not None:
            continue
        found[f"table_fill.{spec.name}"] = max(
            int(table.control[Control.ROWS_HELD]) / max(spec.capacity_rows, 1),
            table.num_trajectories / spec.num_slots,
        )
        if table.ledger is not None:
            with table.lock:
                states = table.ledger.account.by_state()
            for state, count in states.items():
                found[f"prompts_{state}.{spec.name}"] = float(count)
    return found


def counts_of(streams: Sequence[BatchStream]) -> dict[str, float]:
    """Return the trajectories ever added to each table, and the samples drawn from it.

    By the names of their rates.
    """
    found = {}
    for stream in streams:
        name = stream.table.spec.name
        if stream.table.spec.dataset is None:
            found[f"added_per_s.{name}"] = float(stream.table.control[Control.INSERTED])
        found[f"drawn_per_s.{name}"] = float(stream.position[Head.SAMPLES])
    return found


def of_streams(streams: Sequence[BatchStream]) -> dict[str, int]:
    """Return the counts of priority updates, and of items evicted before their turn in an epoch."""
    updates: Counter[str] = Counter()
    for stream in streams:
        if stream.state.priorities is not None:
            updates.update(stream.state.priorities.statistics())
    walks = [stream.state for stream in streams if stream.state.walked is not None]
    skipped = (
        {"epoch_items_skipped": sum(state.words[Head.SKIPPED] for state in walks)} if walks else {}
    )
    return {**updates, **skipped}


def of_last_batch(streams: Sequence[BatchStream]) -> dict[str, float]:
    """Return the cheap statistics of the newest global batch; empty before the first one."""
    batches = _batches(streams, 1)
    if not batches:
        return {}
    ages = np.concatenate([_ages(stream, selection) for stream, selection in batches[0]])
    lag = _lag(batches[0])
    priority = _priority(batches[0])
    return {
        "effective_samples": _effective(batches[0]),
        "duplicates": _duplicates(batches[0]),
        **({"age": float(ages.mean())} if len(ages) else {}),
        **({} if lag is None else {"lag": lag}),
        **({} if priority is None else {"priority": priority}),
    }


def policy_lag(streams: Sequence[BatchStream]) -> float | None:
    """Return the mean policy lag of the newest global batch's samples on this node.

    None if the table has no policy versions, or the node none of the samples.
    """
    if all(stream.table.spec.retention.version_column is None for stream in streams):
        return None
    return next((_lag(batch) for batch in _batches(streams, 1)), None)


def of_selection(streams: Sequence[BatchStream]) -> dict[str, Any]:
    """Return statistics of the training stream's draws, over the selections in its ring.

    `effective_samples` is (sum w)^2 / sum w^2 of the PER weights, as a fraction of the global
    batch, `duplicates` the fraction of samples whose item is already in the same global batch:
    means over the latest global batches, None before the first one. `drawn` has, by table, the ages
    of drawn trajectories, the histogram of priorities and how often items were drawn. Cost: one
    pass over the priorities and counters.
    """
    batches = _batches(streams, max(stream.spec.depth for stream in streams))
    drawn = {}
    for index, stream in enumerate(streams):
        masses = stream.state.priorities
        histogram = None
        if masses is not None:  # k counts [2^k, 2^(k+1))
            powers = np.frexp(masses.values[masses.leaves > 0])[1] - 1
            bins, counts = np.unique(powers, return_counts=True)
            histogram = dict(zip(bins.tolist(), counts.tolist(), strict=True))
        age = _age(stream, [batch[index][1] for batch in batches])
        drawn[stream.table.spec.name] = {
            "age": age,
            "priorities": histogram,
            "draws": _draws(stream),
        }
    return {
        "effective_samples": fmean(map(_effective, batches)) if batches else None,
        "duplicates": fmean(map(_duplicates, batches)) if batches else None,
        "drawn": drawn,
    }


def _batches(streams: Sequence[BatchStream], most: int) -> list[Selections]:
    """Return the latest global batches with every table's selection, the newest first."""
    selections = [recent_selections(stream.spec, stream.table, most) for stream in streams]
    keys = set.intersection(*(set(known) for known in selections))
    of_keys = ([known[key] for known in selections] for key in sorted(keys, reverse=True))
    return [list(zip(streams, of_key, strict=True)) for of_key in of_keys]


def _effective(batch: Selections) -> float:
    """Return the effective sample size. Source: Kish, "Survey Sampling", 1965, section 8.2."""
    weights = [stream.weights(selection.head, selection.resolutions) for stream, selection in batch]
    weight = torch.cat(weights).double()
    return float(weight.sum() ** 2 / (weight**2).sum() / max(len(weight), 1))


def _duplicates(batch: Selections) -> float:
    """Return the fraction of samples whose item is already in the batch."""
    total = different = 0
    for stream, selection in batch:
        resolutions = selection.resolutions.numpy()
        items = resolutions[:, Resolution.ID]
        if stream.spec.rule.unit == "step":
            items = resolutions[:, Resolution.FIRST_ROW] + resolutions[:, Resolution.ANCHOR]
        total += len(items)
        different += len(distinct(items))
    return 1 - different / max(total, 1)


def _ages(stream: BatchStream, selection: Selection) -> np.ndarray:
    """Return how many trajectories are newer than each sample's, of those on this node. [n],
    int64.
    """
    spec = stream.table.spec
    counter = int(stream.table.control[Control.NEXT_ID])
    count = spec.own_shard.count if spec.dataset is None else 1
    return sample_ages(selection.resolutions.numpy(), stream.table.slots, counter, count)


def _age(stream: BatchStream, selections: Sequence[Selection]) -> dict[str, Any] | None:
    """Return mean and largest age, in newer trajectories and in global batches."""
    ages = np.concatenate(
        [_ages(stream, selection) for selection in selections] or [np.empty(0, np.int64)]
    )
    if not len(ages):
        return None
    in_batches = None
    if stream.table.spec.dataset is None:
        # Global batches from the commit of each trajectory that is stored to the one that drew it.
        born = stream.table.slots[:, Slot.BORN]
        of_each = [one.head[Head.NUMBER] - born[_slots(stream, one)] for one in selections]
        since = np.maximum(np.concatenate(of_each), 0)
        in_batches = _mean_and_max(since) if len(since) else None
    return {"trajectories": _mean_and_max(ages), "batches": in_batches}


def _lag(batch: Selections) -> float | None:
    """Return the mean policy lag of the samples on this node; None without any."""
    lags = []
    for stream, selection in batch:
        if stream.table.spec.retention.version_column is not None:
            slots = _slots(stream, selection)
            versions = stream.table.views["retention"][slots, SlotRetention.POLICY_VERSION]
            lags.append(int(stream.table.control[Control.POLICY_VERSION]) - versions)
    each = np.concatenate([*lags, np.empty(0, np.int64)])
    return float(each.mean()) if len(each) else None


def _priority(batch: Selections) -> float | None:
    """Return the mean priority that the samples which this node stores have now."""
    found = [np.empty(0, np.float32)]
    for stream, selection in batch:
        masses = stream.state.priorities
        if masses is None or stream.spec.by_group:
            continue
        resolutions = _stored(stream, selection)
        items = resolutions[:, Resolution.SLOT]
        if stream.spec.rule.unit == "step":
            # Compaction may have moved the rows since the draw.
            items = stream.table.slots[items, Slot.FIRST_ROW] + resolutions[:, Resolution.ANCHOR]
        found.append(masses.values[items])
    each = np.concatenate(found)
    return float(each.mean()) if len(each) else None


def _slots(stream: BatchStream, selection: Selection) -> np.ndarray:
    """Return the slots of samples whose trajectories are still in this store. [n], int64."""
    return np.asarray(_stored(stream, selection)[:, Resolution.SLOT])


def _stored(stream: BatchStream, selection: Selection) -> np.ndarray:
    """Return the resolutions of samples whose trajectories are still in this store. [n, 8]."""
    return stored_samples(selection.resolutions.numpy(), stream.table.slots)


def _draws(stream: BatchStream) -> dict[str, float] | None:
    """Return the mean and maximum of draws per item, and the fraction of items never drawn."""
    if stream.state.counts is None:
        return None
    counts = stream.state.counts.drawable(stream.masses)
    if not len(counts):
        return None
    return {**_mean_and_max(counts), "never": float((counts == 0).mean())}


def _mean_and_max(values: np.ndarray) -> dict[str, float]:
    return {"mean": float(values.mean()), "max": float(values.max())}
