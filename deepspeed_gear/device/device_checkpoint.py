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
Tables = Mapping[str, RingTable]
T = TypeVar("T")


def statistics_of(tables: Tables, has_priorities: bool) -> dict[str, Any]:
    """Return the sizes of tables, and the counts of their updates. Waits for the device.

    Of several tables: the sums, and by name under "tables". The global batches are those of the first one.
    """
    every = {name: _statistics(table, has_priorities) for name, table in tables.items()}
    first = next(iter(every.values()))
    if len(every) == 1:
        return first
    sums = {key: sum(found.get(key, 0) for found in every.values()) for key in first}
    return {**sums, "global_batches": first["global_batches"], "tables": every}


def _statistics(table: RingTable, has_priorities: bool) -> dict[str, int]:
    state = table.state.tolist()
    counts = state[RingState.COUNTS :]
    found = {
        "steps": state[RingState.STEPS],
        "trajectories": table.num_trajectories(),
        "added": state[RingState.NEXT],
        "global_batches": state[RingState.BATCH],
        "empty_batches": state[RingState.EMPTY],
        "refused": state[RingState.REFUSED],
        **({"dropped": state[RingState.DROPPED]} if table.num_envs else {}),
        "bytes": table.num_bytes,
        **({"host_bytes": table.host_bytes} if table.host_rows is not None else {}),
    }
    if has_priorities:
        words = {"applied": UpdateCount.APPLIED, "ignored": UpdateCount.STALE, "clamped": UpdateCount.CLAMPED}
        found |= {f"priorities_{name}": counts[word] for name, word in words.items()}
        found["items"] = counts[UpdateCount.DRAWABLE]
    return found


class Reported:
    """Counts of applied and of clamped priority updates of a table. Every method waits for the device."""

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


def position_of(plan: ReplayPlan, tables: Tables) -> dict[str, Any]:
    """Return the position: numbers of selected global batches and samples, and the config. JSON-able.

    Of several tables, `samples` has the number of each by name.
    """
    states = {name: table.state.tolist() for name, table in tables.items()}
    samples: Any = {name: state[RingState.SAMPLES] for name, state in states.items()}
    first = next(iter(states))
    batches = states[first][RingState.BATCH]
    samples = samples if len(tables) > 1 else samples[first]
    return {**_facts(plan), "global_batches": batches, "samples": samples}


def seek(plan: ReplayPlan, tables: Tables, state: Mapping[str, Any]) -> None:
    """Continue at a position.

    Raises:
        CheckpointError: It is of another format, config or data set; nothing has changed.
    """
    _check_facts(plan, state)
    batches = save_folders.entry(state, "global_batches", int, "the state")
    if len(tables) > 1:
        by_name = save_folders.entry(state, "samples", dict, "the state")
        samples = {name: save_folders.entry(by_name, name, int, "the state's samples") for name in tables}
    else:
        samples = dict.fromkeys(tables, save_folders.entry(state, "samples", int, "the state"))
    for name, table in tables.items():
        table.state[RingState.BATCH], table.state[RingState.SAMPLES] = batches, samples[name]


def state_of(plan: ReplayPlan, tables: Tables) -> dict[str, Any]:
    """Return the content of tables, with the facts that `restore` checks, in host memory."""
    kept = _content(plan, tables)
    content: dict[str, torch.Tensor] = {}
    for table_name, table in tables.items():
        names = [name for name in table.content if _key(tables, table_name, name) in kept]
        content |= {_key(tables, table_name, name): rows for name, rows in table.copied(names).items()}
    return {**_facts(plan), "content": content}


def restore(plan: ReplayPlan, tables: Tables, state: Mapping[str, Any]) -> None:
    """Copy a state into the tensors of tables.

    Raises:
        CheckpointError: It is of another format, config, size or data set; nothing has changed.
    """
    _check_facts(plan, state)
    held, content = _content(plan, tables), save_folders.entry(state, "content", dict, "the state")
    if set(content) != set(held):
        differ = sorted(set(held) ^ set(content))
        raise CheckpointError("the state's content", "must be that of a table of this config", differ[0])
    for name, values in content.items():
        if held[name].shape != values.shape:
            size = list(values.shape)
            raise CheckpointError(f"the state's {name}", "must be of a table of this size", size)
    for table_name, table in tables.items():
        for name in table.content:
            if _key(tables, table_name, name) in content:
                table.overwrite(name, content[_key(tables, table_name, name)])
        highest = table.state[RingState.COUNTS + UpdateCount.HIGHEST_PRIORITY]
        if not table.state[RingState.INITIAL]:  # of a release without this word
            table.state[RingState.INITIAL] = highest
        for word in (OpenTrajectory.NUM_STEPS, OpenTrajectory.ENDED):
            table.opened[:, word] = 0  # the environments are at other steps


def save(plan: ReplayPlan, tables: Tables, folder: Path, kept: save_folders.State | None) -> dict[str, Any]:
    """Write each replica's tables into a folder; return the state for `load`, equal on all ranks. Collective.

    Args:
        kept: State of the save that this replay has loaded or made last in this folder; None: there is none.
    Raises:
        CheckpointError: A file cannot be written; on every rank, as its own error or as a PeerError.
    """
    exchange, first = plan.exchange, plan.topology.rank == 0
    save_id = exchange.broadcast(save_folders.new_id())

    def write(name: str) -> dict[str, str]:
        if not _leads(plan):
            return {}
        part = save_folders.partial_of(folder, name) / _shard(plan)
        part.mkdir()
        torch.save(state_of(plan, {name: tables[name]}), part / CONTENT)
        manifest = {"format": FORMAT, "save": save_id, "replicas": plan.info.data_world}
        return {f"{part.name}/{save_folders.MANIFEST}": save_folders.complete(part, manifest)}

    def agree(action: Callable[[], T]) -> T:
        def checked() -> T:
            with save_folders.writing(folder):
                return action()

        return exchange.agree("saving the table on the device", checked)

    agree(lambda: save_folders.begin(folder, [*tables], kept) if first else None)
    written = exchange.gather(agree(lambda: {name: write(name) for name in tables}))
    manifests = {
        name: {path: digest for part in written for path, digest in part[name].items()} for name in tables
    }
    agree(lambda: save_folders.publish(folder, [*tables]) if first else None)
    state = {**position_of(plan, tables), "save": {"id": save_id, "tables": manifests}}
    agree(lambda: save_folders.write_position(folder, state) if first else None)
    return state


def load(plan: ReplayPlan, tables: Tables, folder: Path, state: save_folders.State) -> dict[str, Any]:
    """Continue where `save` was called, on any number of replicas; return the state of that save. Collective.

    On another number the trajectories are dealt anew (`reshard_rings`); of a data set's priorities, replica r
    gets those of saved replica r modulo their number. The oldest trajectories that do not fit are left out,
    which rank 0 logs.

    Args:
        state: What the save has returned.
    Raises:
        CheckpointError: A file is missing, changed or of another save, or does not fit; on every rank.
    """

    def known_state() -> dict[str, Any]:
        _check_facts(plan, state)
        return dict(state)

    def shard(of: Path, number: int) -> Mapping[str, Any]:
        part = of / f"shard-{number}"
        manifest = save_folders.read_json(part / save_folders.MANIFEST)
        files = save_folders.entry(manifest, "files", dict, str(part / save_folders.MANIFEST))
        with save_folders.open_checked(part / CONTENT, files.get(CONTENT)) as file:
            found: Mapping[str, Any] = torch.load(save_folders.link_of(file), weights_only=True, mmap=True)
        return found

    def content(name: str) -> tuple[Mapping[str, Any], int]:
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
        if name in plan.datasets:
            found = shard(saved, replica % count)
            of = found["content"]["state"]
            of[RingState.SAMPLES] = -(-of[RingState.SAMPLES] * count // replicas)
            return found, 0
        every = [shard(saved, number) for number in range(count)]
        for one in every:
            _check_facts(plan, one)
        contents = [save_folders.entry(one, "content", dict, "the state") for one in every]
        dealt = reshard_rings.deal(tables[name], contents, replica, replicas)
        return {**_facts(plan), "content": dealt.content}, dealt.num_left_out

    def contents_of_all() -> tuple[dict[str, Any], dict[str, int]]:
        together: dict[str, Any] = {}
        left: dict[str, int] = {}
        for name in tables:
            found, left[name] = content(name)
            _check_facts(plan, found)
            of_table = save_folders.entry(found, "content", dict, "the state")
            together |= {_key(tables, name, key): values for key, values in of_table.items()}
        return {**_facts(plan), "content": together}, left

    known = plan.exchange.agree("loading the table on the device", known_state)
    save_folders.compare(plan.exchange.gather(known))
    found, num_left_out = plan.exchange.agree("loading the table on the device", contents_of_all)
    every = plan.exchange.gather(num_left_out if _leads(plan) else {})
    for name in tables:
        left_out = sum(of_rank.get(name, 0) for of_rank in every)
        if left_out and plan.topology.rank == 0:
            LOG.warning(
                "gear.tables.%s: %d of the oldest trajectories of %s do not fit into %d replicas and were "
                "left out; raise capacity_steps to keep them",
                name,
                left_out,
                folder,
                plan.info.data_world,
            )
    plan.exchange.agree("loading the table on the device", lambda: restore(plan, tables, found))
    return known


def _check_facts(plan: ReplayPlan, state: Mapping[str, Any]) -> None:
    for name, here in _facts(plan).items():
        if state.get(name) != here:
            raise CheckpointError(f"the state's {name}", "must be that of this config", state.get(name))


def _content(plan: ReplayPlan, tables: Tables) -> dict[str, torch.Tensor]:
    """Return the tensors of tables that are saved; a data set's columns are on disk."""
    found: dict[str, torch.Tensor] = {}
    for table_name, table in tables.items():
        stays = "column/" if table_name in plan.datasets else "\0"
        found |= {
            _key(tables, table_name, name): tensor
            for name, tensor in table.content.items()
            if not name.startswith(stays)
        }
    return found


def _key(tables: Tables, table: str, name: str) -> str:
    """Return the name of a tensor in the content of tables."""
    return name if len(tables) == 1 else f"{table}/{name}"


def _facts(plan: ReplayPlan) -> dict[str, Any]:
    prints = {name: dataset.fingerprint for name, dataset in plan.datasets.items()}
    return {"format": FORMAT, "digest": plan.config.resume_digest, "fingerprints": prints}


def _leads(plan: ReplayPlan) -> bool:
    place = plan.topology.place
    return place.tensor_rank == place.sequence_rank == place.pipe_rank == 0


def _shard(plan: ReplayPlan) -> str:
    """Return the name of the folder of this rank's replica in that of the table."""
    return f"shard-{plan.topology.place.data_rank}"
