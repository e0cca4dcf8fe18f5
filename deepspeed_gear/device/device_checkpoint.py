"""Checkpoints of a DeviceReplay: its position and content, in memory and in a checkpoint's folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from deepspeed_gear.checkpoint import save_folders
from deepspeed_gear.device import reshard_rings
from deepspeed_gear.device.ring_table import RingTable
from deepspeed_gear.distributed.replay_plan import ReplayPlan
from deepspeed_gear.errors import CheckpointError, DataError
from deepspeed_gear.ops.records import OpenTrajectory, RingState, UpdateCount

LOG = logging.getLogger("deepspeed_gear")
FORMAT = 2
CONTENT = "content.pt"
_POSITION = {"global_batches": RingState.BATCH, "samples": RingState.SAMPLES}
T = TypeVar("T")


def statistics_of(table: RingTable, has_priorities: bool) -> dict[str, int]:
    """Return the sizes of a table, and the counts of its updates. Waits for the device."""
    state = table.state.tolist()
    counts = state[RingState.COUNTS :]
    found = {
        "steps": state[RingState.STEPS],
        "trajectories": state[RingState.NEXT] - state[RingState.TAIL],
        "added": state[RingState.NEXT],
        "global_batches": state[RingState.BATCH],
        "empty_batches": state[RingState.EMPTY],
        "refused": state[RingState.REFUSED],
        **({"dropped": state[RingState.DROPPED]} if table.num_envs else {}),
        "bytes": table.num_bytes,
    }
    if has_priorities:
        words = {"applied": UpdateCount.APPLIED, "ignored": UpdateCount.STALE, "clamped": UpdateCount.CLAMPED}
        found |= {f"priorities_{name}": counts[word] for name, word in words.items()}
        found["items"] = counts[UpdateCount.DRAWABLE]
    return found


class Reported:
    """Counts of applied and of clamped priority updates of a table. Every method waits for the device.

    Args:
        table: With priorities.
    """

    def __init__(self, table: RingTable) -> None:
        self._table = table
        self._before = self._counts()

    def _counts(self) -> tuple[int, int]:
        counts = self._table.state[RingState.COUNTS :].tolist()
        return counts[UpdateCount.APPLIED], counts[UpdateCount.CLAMPED]

    def num_clamped(self) -> int:
        """Return the number of updates that were ever clamped."""
        return self._counts()[1]

    def recent(self) -> tuple[int, int]:
        """Return the numbers of updates since the last call that were applied, and that were clamped."""
        before, self._before = self._before, self._counts()
        return self._before[0] - before[0], self._before[1] - before[1]


def check_drawn(table: RingTable) -> None:
    """Raise if a global batch without samples was drawn from a table. Waits for the device.

    Raises:
        DataError: There was one.
    """
    empty = int(table.state[RingState.EMPTY])
    if empty:
        rule = "must have an item with a mass whenever a batch is drawn"
        remedy = (
            "add trajectories that have an anchor before sample_, and report priorities above 0; "
            "batch.valid and batch.is_weight mark the samples that exist"
        )
        raise DataError("the table on the device", rule, f"{empty} global batches without samples", remedy)


def position_of(plan: ReplayPlan, table: RingTable) -> dict[str, Any]:
    """Return the position: numbers of selected global batches and samples, and the config. JSON-able."""
    state = table.state.tolist()
    return {**_facts(plan), **{name: state[word] for name, word in _POSITION.items()}}


def seek(plan: ReplayPlan, table: RingTable, state: Mapping[str, Any]) -> None:
    """Continue at a position.

    Raises:
        CheckpointError: It is of another format, config or data set; nothing has changed.
    """
    _check_facts(plan, state)
    position = {word: save_folders.entry(state, name, int, "the state") for name, word in _POSITION.items()}
    for word, value in position.items():
        table.state[word] = value


def state_of(plan: ReplayPlan, table: RingTable) -> dict[str, Any]:
    """Return the content of a table, with the facts that `restore` checks, in host memory."""
    content = {name: tensor.to("cpu", copy=True) for name, tensor in _content(plan, table).items()}
    return {**_facts(plan), "content": content}


def restore(plan: ReplayPlan, table: RingTable, state: Mapping[str, Any]) -> None:
    """Copy a state into the tensors of a table.

    Raises:
        CheckpointError: It is of another format, config, size or data set; nothing has changed.
    """
    _check_facts(plan, state)
    wanted, content = set(_content(plan, table)), save_folders.entry(state, "content", dict, "the state")
    if set(content) != wanted:
        differ = sorted(wanted ^ set(content))
        raise CheckpointError("the state's content", "must be that of a table of this config", differ[0])
    for name, values in content.items():
        if name not in table.content or table.content[name].shape != values.shape:
            size = list(values.shape)
            raise CheckpointError(f"the state's {name}", "must be of a table of this size", size)
    for name, values in content.items():
        table.content[name].copy_(values)
    for word in (OpenTrajectory.NUM_STEPS, OpenTrajectory.ENDED):
        table.opened[:, word] = 0  # the environments are at other steps


def save(plan: ReplayPlan, table: RingTable, folder: Path, kept: save_folders.State | None) -> dict[str, Any]:
    """Write each replica's table into a folder; return the state for `load`, equal on all ranks. Collective.

    Args:
        plan: Of the replay.
        table: This rank's.
        folder: Of the checkpoint.
        kept: State of the save that this replay has loaded or made last in this folder; None: there is none.
    Raises:
        CheckpointError: A file cannot be written; on every rank, as its own error or as a PeerError.
    """
    exchange, name, first = plan.exchange, plan.config.sampled_tables[0], plan.topology.rank == 0
    save_id = exchange.broadcast(save_folders.new_id())

    def write() -> dict[str, str]:
        if not _leads(plan):
            return {}
        part = save_folders.partial_of(folder, name) / _shard(plan)
        part.mkdir()
        torch.save(state_of(plan, table), part / CONTENT)
        manifest = {"format": FORMAT, "save": save_id, "replicas": plan.info.data_world}
        return {f"{part.name}/{save_folders.MANIFEST}": save_folders.complete(part, manifest)}

    def agree(action: Callable[[], T]) -> T:
        def checked() -> T:
            with save_folders.writing(folder):
                return action()

        return exchange.agree("saving the table on the device", checked)

    agree(lambda: save_folders.begin(folder, [name], kept) if first else None)
    manifests = {path: digest for part in exchange.gather(agree(write)) for path, digest in part.items()}
    agree(lambda: save_folders.publish(folder, [name]) if first else None)
    state = {**position_of(plan, table), "save": {"id": save_id, "tables": {name: manifests}}}
    agree(lambda: save_folders.write_position(folder, state) if first else None)
    return state


def load(
    plan: ReplayPlan, table: RingTable, folder: Path, state: save_folders.State | None
) -> dict[str, Any]:
    """Continue where `save` was called, on any number of replicas; return the state of that save. Collective.

    On another number the trajectories are dealt anew (`reshard_rings`); of a data set's priorities, replica r
    gets those of saved replica r modulo their number. The oldest trajectories that do not fit are left out,
    which rank 0 logs.

    Args:
        plan: Of the replay.
        table: This rank's.
        folder: Of the checkpoint.
        state: What the save has returned; None: that of the newest save of the folder.
    Raises:
        CheckpointError: A file is missing, changed or of another save, or does not fit; on every rank.
    """
    name = plan.config.sampled_tables[0]

    def known_state() -> dict[str, Any]:
        known = save_folders.read_position(folder) if state is None else dict(state)
        _check_facts(plan, known)
        return known

    def shard(of: Path, number: int) -> Mapping[str, Any]:
        part = of / f"shard-{number}"
        manifest = save_folders.read_json(part / save_folders.MANIFEST)
        files = save_folders.entry(manifest, "files", dict, str(part / save_folders.MANIFEST))
        save_folders.check_file(part / CONTENT, files.get(CONTENT))
        found: Mapping[str, Any] = torch.load(part / CONTENT, weights_only=True, mmap=True)
        return found

    def content() -> tuple[Mapping[str, Any], int]:
        save = save_folders.save_of(known)
        count, replica, replicas = (
            len(save["tables"].get(name, {})),
            plan.topology.data_rank,
            plan.info.data_world,
        )
        if count == 0:
            raise CheckpointError(str(folder), f"must hold the table {name}", None)
        saved = save_folders.find(folder, name, save)
        if count == replicas:
            return shard(saved, replica), 0
        own_numbers = plan.config.resolved_tables[name].scope == "shard"
        if plan.datasets:
            found = shard(saved, replica % count)
            if own_numbers:
                of = found["content"]["state"]
                of[RingState.SAMPLES] = -(-of[RingState.SAMPLES] * count // replicas)
            return found, 0
        every = [shard(saved, number) for number in range(count)]
        for one in every:
            _check_facts(plan, one)
        contents = [save_folders.entry(one, "content", dict, "the state") for one in every]
        dealt = reshard_rings.deal(table, contents, replica, replicas, own_numbers)
        return {**_facts(plan), "content": dealt.content}, dealt.num_left_out

    known = plan.exchange.agree("loading the table on the device", known_state)
    save_folders.compare(plan.exchange.gather(known))
    found, num_left_out = plan.exchange.agree("loading the table on the device", content)
    left_out = sum(plan.exchange.gather(num_left_out if _leads(plan) else 0))
    if left_out and plan.topology.rank == 0:
        LOG.warning(
            "gear.tables.%s: %d of the oldest trajectories of %s do not fit into %d replicas and were left "
            "out; raise capacity_steps to keep them", name, left_out, folder, plan.info.data_world,
        )  # fmt: skip
    plan.exchange.agree("loading the table on the device", lambda: restore(plan, table, found))
    return known


def _check_facts(plan: ReplayPlan, state: Mapping[str, Any]) -> None:
    for name, here in _facts(plan).items():
        if state.get(name) != here:
            raise CheckpointError(f"the state's {name}", "must be that of this config", state.get(name))


def _content(plan: ReplayPlan, table: RingTable) -> dict[str, torch.Tensor]:
    """Return the tensors of a table that are saved; a data set's columns are on disk."""
    stays = "column/" if plan.datasets else "\0"
    return {name: tensor for name, tensor in table.content.items() if not name.startswith(stays)}


def _facts(plan: ReplayPlan) -> dict[str, Any]:
    prints = {name: dataset.fingerprint for name, dataset in plan.datasets.items()}
    return {"format": FORMAT, "digest": plan.config.resume_digest, "fingerprints": prints}


def _leads(plan: ReplayPlan) -> bool:
    place = plan.topology.place
    return place.tensor_rank == place.sequence_rank == place.pipe_rank == 0


def _shard(plan: ReplayPlan) -> str:
    """Return the name of the folder of this rank's replica in that of the table."""
    return f"shard-{plan.topology.place.data_rank}"
