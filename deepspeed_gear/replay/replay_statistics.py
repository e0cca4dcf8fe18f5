"""Statistics and metrics of a Replay, computed from its counters, stores and selections."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch

from deepspeed_gear.ops.records import Resolution, Slot
from deepspeed_gear.replay.metrics import Metrics, Progress
from deepspeed_gear.replay.replay_parts import ReplayParts
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.sample_counts import (
    effective_share,
    recent_selections,
    sample_ages,
    stored_samples,
)
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.sampling.staleness import dropped
from deepspeed_gear.store.group_spec import GroupCount
from deepspeed_gear.store.late_columns import absent
from deepspeed_gear.store.records import Control, Head, SlotRetention
from deepspeed_gear.store.row_allocator import distinct
from deepspeed_gear.store.table import Table


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
        **sums.take_rates(_rate_counts(parts.train), _late_s(parts)),
        **_table_states(tables),
        **_group_counts(tables),
        **parts.links.take_metrics(),
        **_newest_batch(parts.train),
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
    return Progress(num_samples, elapsed_s, sums.sums["wait_s"], _policy_lag(parts.train))


def statistics_of(parts: ReplayParts, sums: Metrics) -> dict[str, Any]:
    """Return the statistics of a replay; see `Replay.statistics`."""
    transfer = parts.assembler.transfer
    return {
        **_store_sizes([stream.table for stream in parts.train]),
        "batches": int(sums.sums["batches"]),
        "digest": sums.digest,
        **_stream_counts(parts.train),
        **metrics_of(parts, sums),
        **_recent_draws(parts.train),
        **({} if transfer is None else {"transfer": transfer.describe()}),
    }


Selections = list[tuple[BatchStream, Selection]]  # of one global batch: one a table


def _store_sizes(tables: Sequence[Table]) -> dict[str, Any]:
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


def _group_counts(tables: Sequence[Table]) -> dict[str, float]:
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


def _table_states(tables: Sequence[Table]) -> dict[str, float]:
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


def _rate_counts(streams: Sequence[BatchStream]) -> dict[str, float]:
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


def _stream_counts(streams: Sequence[BatchStream]) -> dict[str, int]:
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


def _newest_batch(streams: Sequence[BatchStream]) -> dict[str, float]:
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


def _policy_lag(streams: Sequence[BatchStream]) -> float | None:
    """Return the mean policy lag of the newest global batch's samples on this node.

    None if the table has no policy versions, or the node none of the samples.
    """
    if all(stream.table.spec.retention.version_column is None for stream in streams):
        return None
    return next((_lag(batch) for batch in _batches(streams, 1)), None)


def _recent_draws(streams: Sequence[BatchStream]) -> dict[str, Any]:
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
    """Return the effective sample size of a global batch, as a fraction of its samples."""
    weights = [stream.weights(selection.head, selection.resolutions) for stream, selection in batch]
    return effective_share(torch.cat(weights).double().numpy())


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
