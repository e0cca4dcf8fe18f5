"""Where a Replay goes on: its position and the content of its tables, in a checkpoint and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_gear.replay import position, snapshot
from deepspeed_gear.replay.feed import Feed
from deepspeed_gear.replay.parts import Parts
from deepspeed_gear.replay.sizes import TRAIN
from deepspeed_gear.selection.cut import PASS_SHIFT
from deepspeed_gear.store.table import Table

Passes = dict[str, int]  # passes over each split that have begun


def fingerprint(parts: Parts) -> dict[str, str]:
    """Return the fingerprint of each table's data set."""
    return {name: dataset.fingerprint for name, dataset in parts.plan.datasets.items()}


def state_of(parts: Parts, feed: Feed, passes: Passes) -> dict[str, Any]:
    """Return the position, equal on all ranks; see `Replay.state_dict`. Collective."""
    plan, where = parts.plan, feed.where
    if plan.topology.place.pipe_world > 2:  # inner stages do not know
        known = (where, passes) if plan.topology.place.reads else None
        where, passes = next(one for one in plan.exchange.gather(known) if one is not None)
    return position.state_of(plan.config, fingerprint(parts), passes, where)


def save(parts: Parts, feed: Feed, folder: Path) -> None:
    """Write the tables that a data set alone does not tell. Collective."""
    used = position.batches(feed.where)  # right on the rank that writes, which is a first stage

    def write() -> None:
        for name, table in _changing(parts).items():
            with table.lock:
                snapshot.save_table(table, list(parts.streams[name].values()), folder / name, used)

    exchange = parts.plan.exchange
    exchange.barrier()  # what all ranks have added and reported before is in it
    exchange.agree("saving the tables", write if parts.plan.topology.leads_node else lambda: None)


def load(parts: Parts, folder: Path) -> None:
    """Replace the content of these tables by what was saved, behind `go_on`. Collective."""

    def read() -> None:
        for name, table in _changing(parts).items():
            with table.lock:
                snapshot.load_table(table, list(parts.streams[name].values()), folder / name)

    leads = parts.plan.topology.leads_node
    parts.plan.exchange.agree("loading the tables", read if leads else lambda: None)
    parts.leave_inner_stage()


def _changing(parts: Parts) -> dict[str, Table]:
    """Return the tables whose content or priorities are not in the data set."""
    kept = {stream.table.spec.name for stream in parts.train if stream.spec.priorities is not None}
    return {name: table for name, table in parts.tables.items() if table.spec.dataset is None or name in kept}


def go_on(parts: Parts, feed: Feed, state: Mapping[str, Any]) -> Passes:
    """Continue at a state; return the passes over splits that have begun. Collective.

    Raises:
        CheckpointError: It is of another format, of other data or of options that select other samples.
    """
    plan, exchange = parts.plan, parts.plan.exchange
    exchange.agree("loading the state", lambda: position.check(state, plan.config, fingerprint(parts)))
    feed.stop()
    exchange.barrier()
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
    parts.leave_inner_stage()
    feed.go_on_at(at)
    return passes
