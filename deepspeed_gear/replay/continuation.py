"""Where a Replay goes on: its position and the content of its tables, in a checkpoint and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_gear.replay import position, snapshot
from deepspeed_gear.replay.feed import Feed
from deepspeed_gear.replay.loading import Loading
from deepspeed_gear.replay.over_nodes import share_out
from deepspeed_gear.replay.parts import Parts
from deepspeed_gear.replay.sizes import TRAIN
from deepspeed_gear.selection.cut import PASS_SHIFT
from deepspeed_gear.store.table import Table

Passes = dict[str, int]  # passes over each split that have begun


def fingerprint(parts: Parts) -> dict[str, str]:
    """Return the fingerprint of each table's whole data set."""
    return {name: dataset.whole_fingerprint for name, dataset in parts.plan.datasets.items()}


def state_of(parts: Parts, feed: Feed, passes: Passes) -> dict[str, Any]:
    """Return the position, equal on all ranks; see `Replay.state_dict`. Collective."""
    plan, where = parts.plan, feed.where
    if plan.topology.place.pipe_world > 2:  # inner stages do not know
        known = (where, passes) if plan.topology.place.reads else None
        where, passes = next(one for one in plan.exchange.gather(known) if one is not None)
    return position.state_of(plan.config, fingerprint(parts), passes, where)


# ---- saving --------------------------------------------------------------------------------------


def save(parts: Parts, feed: Feed, folder: Path) -> None:
    """Write the tables that a data set alone does not tell. Collective.

    One node writes what all have, and each node its shard of the rest. The files of a table get their name
    when all are complete.
    """
    plan, exchange = parts.plan, parts.plan.exchange
    spread, topology = plan.placement.spread, plan.topology
    exchange.barrier()  # what all ranks have added and reported before is in it
    known = feed.where if topology.place.reads else None
    used = position.batches(next(one for one in exchange.gather(known) if one is not None))
    if spread:
        _pause(parts, feed)
    tables, leads, first = _changing(parts), parts.leads_shard, parts.leads_first_shard
    shards = [name for name in tables if name in spread]

    def begin() -> None:
        for name in shards if first else []:
            snapshot.begin(folder / name)

    def write() -> None:
        for name, table in tables.items():
            streams = list(parts.streams.get(name, {}).values())
            if leads and name in spread:
                with table.lock:
                    snapshot.save_shard(table, streams, folder / name, used)
            elif first and name not in spread:
                with table.lock:
                    snapshot.save_table(table, streams, folder / name, used)

    def publish() -> None:
        for name in shards if first else []:
            snapshot.publish(folder / name)

    if shards:
        exchange.agree("saving the tables", begin)
    exchange.agree("saving the tables", write)
    if shards:
        exchange.agree("saving the tables", publish)


def _changing(parts: Parts) -> dict[str, Table]:
    """Return the tables whose content or priorities are not in the data set."""
    kept = {stream.table.spec.name for stream in parts.train if stream.spec.priorities is not None}
    return {name: table for name, table in parts.tables.items() if table.spec.dataset is None or name in kept}


def _pause(parts: Parts, feed: Feed) -> None:
    """Stop the threads that prepare batches, all nodes behind the same cut. Collective.

    A thread may wait for those of other nodes in the middle of a cut: their leaving ends its wait.
    """
    feed.stop()
    parts.links.leave()
    parts.plan.exchange.barrier()
    for stream in parts.all_streams:
        if stream.notice is not None:
            stream.notice.forget()  # of the cut that was given up


# ---- loading -------------------------------------------------------------------------------------


def load(parts: Parts, folder: Path) -> None:
    """Replace the content of these tables by what was saved, behind `go_on`. Collective."""
    exchange = parts.plan.exchange
    loading = Loading(parts, _changing(parts))
    exchange.agree("loading the tables", lambda: loading.read(folder))
    exchange.agree("loading the tables", loading.replace)
    if parts.plan.placement.spread:
        exchange.agree("loading the batches that were not used", loading.deliver)
        loading.tell()
    share_out(exchange, parts.leads_shard, parts.train)
    parts.leave_inner_stage()


def go_on(parts: Parts, feed: Feed, state: Mapping[str, Any]) -> Passes:
    """Continue at a state; return the passes over splits that have begun. Collective.

    Raises:
        CheckpointError: It is of another format, of other data or of options that select other samples.
    """
    plan, exchange = parts.plan, parts.plan.exchange
    exchange.agree("loading the state", lambda: position.check(state, plan.config, fingerprint(parts)))
    if parts.status is not None:
        parts.status.drain()
    _pause(parts, feed)
    if parts.status is not None:
        parts.status.restart()
    at = position.of(state, plan.config.sampled_tables)
    passes = {name: int(count) for name, count in state["passes"].items()}
    if plan.topology.leads_node:
        for stream in parts.all_streams:
            name, table = stream.spec.name, stream.table
            start = (passes.get(name, 0) << PASS_SHIFT, 0, 0, 0, 0)
            with table.lock:
                stream.seek(*(at[table.spec.name].values() if name == TRAIN else start))
    exchange.barrier()
    share_out(exchange, parts.leads_shard, parts.train)
    parts.leave_inner_stage()
    feed.go_on_at(at)
    return passes
