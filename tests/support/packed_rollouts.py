"""Packed rollouts as one rank of any world sees them: the cases, their data, and a run of one."""

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from batch_records import PLAN_WIDTH
from gear_support import prefix
from ragged_tables import MEMORY, RAGGED, support

from deepspeed_gear import DatasetWriter, FillWorker, Media, MicroBatch, Replay, Schema
from deepspeed_gear.data.media_digests import MediaItem
from deepspeed_gear.data.ragged import item_columns
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.replay.packed.rollout import TrainStep
from deepspeed_gear.sampling.batch_sizes import BatchInfo

NODES = 2
MOST = 40
COUNT = 48
GROUP = 4
COLUMNS = {
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "logp": {"dtype": "float32"},
    "state": {"dtype": "float32", "shape": [2], "rows": "T+1"},
    "number": {"dtype": "int64", "rows": "1"},
    "prompt": {"dtype": "int64", "rows": "1"},
    "sample": {"dtype": "int32", "rows": "1"},
    "reward": {"dtype": "float32", "rows": "1"},
}
NOTE = {"note": {"dtype": "json", "rows": "1", "max_bytes": 32}}
LATE = {"reward": {"dtype": "float32", "rows": "1", "late": True}}
Case = dict[str, Any]


def response(number: int) -> dict[str, Any]:
    """Return the trajectory of a number; all but the first of a group have a prompt of 15 tokens,
    or less.
    """
    words = np.random.default_rng(number)
    length = int(words.integers(2, MOST + 1))
    tokens = words.integers(1, 500, length).astype(np.int32)
    prompt = int(words.integers(0, length))
    if number % GROUP:
        prompt = min(15, length - 1)
        tokens[:prompt] = 1 + (number // GROUP + np.arange(prompt)) % 499
    return {
        "tokens": tokens,
        "loss_mask": np.arange(length) >= prompt,
        "logp": -words.random(length, dtype=np.float32),
        "state": words.random((length + 1, 2), dtype=np.float32),
        "number": np.int64(number),
        "prompt": np.int64(number // GROUP),
        "sample": np.int32(number % GROUP // 2),
        "reward": np.float32(words.integers(0, 3)),
    }


def with_prompt(number: int, response: dict[str, Any]) -> dict[str, Any]:
    """Return a response with a longer prompt, which is that of all members of a group."""
    steps = number % 7 + 2
    found = dict(response)
    for name in ("tokens", "loss_mask", "logp", "state"):
        own = response[name][: MOST - steps]
        found[name] = np.concatenate([np.full((steps, *own.shape[1:]), number % 5, own.dtype), own])
    found["loss_mask"] = np.arange(len(found["loss_mask"])) >= steps
    found["state"] = np.concatenate([found["state"], found["state"][-1:]])[
        : len(found["tokens"]) + 1
    ]
    return found


MEDIA = {"columns": {"patches": {"dtype": "float32", "shape": [2]}}, "capacity_bytes": 64 << 10}
MEDIA["page_bytes"] = 512


def images(group: int, length: int) -> dict[int, Media]:
    """Return the media of a trajectory of a group: one of the group, and one of every
    third group.
    """
    first, second = (
        Media(patches=np.full((n % 5 * 30 + 1, 2), n, np.float32)) for n in (group, 100 + group % 3)
    )
    return {0: first, length - 1: second}


def items(group: int, length: int) -> list[MediaItem]:
    ragged = Schema.from_json({"columns": {**COLUMNS, **RAGGED}}).ragged_columns
    columns = (*Schema.from_json(MEDIA).columns, *item_columns(ragged))
    return [media.item("", columns) for media in images(group, length).values()]


def write_data(
    path: Path, count: int = COUNT, first: int = 0, without: tuple[str, ...] = ()
) -> str:
    columns = {name: one for name, one in {**COLUMNS, **NOTE}.items() if name not in without}
    with DatasetWriter(path, Schema.from_json({"columns": columns})) as writer:
        for number in range(first, first + count):
            row = {**response(number), "note": {"number": number}}
            writer.add({name: row[name] for name in columns})
    return str(path)


def section(**options: Any) -> dict[str, Any]:
    return {
        "sampler": {"kind": "epoch", "unit": "trajectory"},
        "pack": {"tokens": 48, "pad": {"multiple": 8}, "plan_width": PLAN_WIDTH},
        "rollout": {"trajectories": 20, "minibatches": 2, "epochs": 2},
        "timeout_s": 20.0,
        "shared_memory": {"prefix": prefix()},
        **options,
    }


def table(columns: Mapping[str, Any] = COLUMNS, **options: Any) -> dict[str, Any]:
    sizes = {"capacity_steps": 6000, "capacity_trajectories": 120, "max_length": MOST}
    return {**sizes, "schema": {"columns": dict(columns)}, **options}


#: Columns that the data set of supervised trajectories does not have.
OF_GROUPS = ("state", "sample", "note")


def cases(data: str, other: str, supervised: str) -> dict[str, Case]:
    """Return sections by name, with what else a case needs."""
    group = {"column": "prompt", "size": GROUP}
    rewarded = {**group, "needs": ["reward"]}
    members = {**rewarded, "size": 2, "member": "sample", "max_trajectories": GROUP}
    members["where"] = {"reward": {"std": {"min": 0.1}}}
    token, sequence, by_group = ({"normalize": name} for name in ("token", "sequence", "group"))
    uniform = {"kind": "uniform", "unit": "trajectory"}
    memory = {"data": {"path": data, "load": "memory"}}
    capacity = {"tables": {"main": table()}}

    def groups(
        kind: str,
        loss: Any,
        group: Mapping[str, Any] = rewarded,
        prefix: str = "own",
        **options: Any,
    ) -> dict[str, Any]:
        main = options.pop("main", None) or table({**COLUMNS, **LATE}, group=dict(group), **options)
        rollout = {"groups": 5, "minibatches": 2, "epochs": 2}
        sampler = {"kind": kind, "unit": "group"}
        found = section(tables={"main": main}, rollout=rollout, sampler=sampler, loss=loss)
        found["pack"]["prefix"] = prefix
        return found

    tables = {
        "first": memory,
        "second": {"data": {"path": other, "load": "memory", "replicate": True}},
        "third": {"data": {"path": other, "load": "mmap"}},
    }
    mixture = {
        "kind": "mixture",
        "shares": {"first": 0.5, "second": 0.25, "third": 0.25},
        "of": uniform,
    }
    by_tokens = {"trajectories": 20, "tokens": 300, "minibatches": 2}
    prioritized = {"kind": "prioritized", "unit": "trajectory", "beta": 0.5, "decay": 1.0}
    replicated = {"data": {"path": data, "replicate": True}, "group": group}
    by_member = {**sequence, "by": "member"}
    again = groups("fifo", token)
    again["sampler"] = {
        "kind": "mixture",
        "shares": {"main": 0.8, "again": 0.2},
        "of": {"kind": "fifo", "unit": "group"},
        "by_table": {"again": {"kind": "top_k", "unit": "group"}},
    }
    fields: dict[str, Any] = {name: {} for name in COLUMNS if name not in OF_GROUPS}
    beside = groups("epoch", by_group, main=table(group=group), prefix="share")
    beside["fields"] = {**fields, "state": {"absent": 2}, "sample": {"absent": -1}}
    beside["tables"]["beside"] = {"data": {"path": supervised, "load": "mmap"}}
    beside["rollout"]["groups"] = 20
    beside["sampler"] = {
        "kind": "mixture",
        "shares": {"main": 0.4, "beside": 0.6},
        "of": beside["sampler"],
        "by_table": {"beside": {"kind": "epoch", "unit": "trajectory"}},
    }
    beside["loss"] = {"normalize": "group", "by_table": {"main": 0.5, "beside": 2.0}}
    prompts = table(
        group=group, max_times_sampled=1, writers=1, prompts={"data": data, "max_lag": 1}
    )
    columns = {"image": {"dtype": "int64", "role": "media"}, **RAGGED}
    seen = {
        "media": MEDIA,
        "ragged": MEMORY,
        "schema": {"columns": {**COLUMNS, **columns}},
    }
    late = {**COLUMNS, **LATE, "ref": {"dtype": "float32", "late": True}}
    staged = {"group": {**group, "needs": ["reward", "ref"]}, "writers": 2}
    staged |= {name: prompts[name] for name in ("max_times_sampled", "prompts")}
    return {
        "data": {"section": section(**memory, sampler=uniform)},
        "mapped": {"section": section(data={"path": data, "load": "mmap"}, loss=sequence)},
        "groups": {"section": groups("epoch", by_group, prefix="share"), "resumes": True},
        "members": {"section": {**groups("uniform", by_member, members), "count_draws": True}},
        "used up": {"section": groups("uniform", token, max_times_sampled=2)},
        "group priorities": {"section": groups("prioritized", by_group)},
        "replicated groups": {
            "section": groups("prioritized", by_group, prefix="share", main=replicated)
        },
        "queue": {"section": groups("fifo", token, max_times_sampled=1)},
        "prompts": {"section": groups("fifo", token, main=prompts), "resumes": True},
        "stages": {"section": groups("fifo", token, main=table(late, **staged)), "resumes": True},
        "again": {
            "section": {
                **again,
                "tables": {"main": {**prompts, **seen}, "again": {**table(group=group), **seen}},
            },
            "resumes": True,
        },
        "tokens": {"section": section(**capacity, rollout=by_tokens), "resumes": True},
        "prioritized": {"section": section(**capacity, sampler=prioritized), "resumes": True},
        "mixture": {"section": section(tables=tables, sampler=mixture)},
        "beside groups": {"section": beside, "resumes": True},
        "sequence": {"section": section(**memory), "shares": "node"},
        "sequence over nodes": {"section": section(**memory), "shares": "nodes"},
        "tensor over nodes": {"section": section(**memory), "shares": "tensor"},
        "device": {"section": section(**memory, exchange="device")},
        "no barrier": {"section": section(**memory), "barrier": False},
    }


def place_of(case: Case, rank: int, world: int) -> RankCoordinates:
    """Return the place of a rank; two ranks share a replica on a node, or each with one of the
    other node.
    """
    how = case.get("shares")
    if how is None or world == 1:
        return RankCoordinates(data_rank=rank, data_world=world)
    half = world // 2
    if how == "tensor":
        return RankCoordinates(
            data_rank=rank % half, data_world=half, tensor_rank=rank // half, tensor_world=2
        )
    data, sequence = divmod(rank, half) if how == "node" else (rank % half, rank // half)
    return RankCoordinates(
        data_rank=data, data_world=half, sequence_rank=sequence, sequence_world=2
    )


def fill(replay: Replay) -> None:
    """Add this node's trajectories to a table with a capacity: every other group; with one node
    all.

    So nodes have the ids 0, 2, ... and 1, 3, ...; one node has them in the order of shards, or that
    of ids.
    """
    store = replay.tables.get("main")
    topology = replay.topology
    if store is None or store.spec.dataset is not None or not topology.leads_node:
        return
    late = bool(store.schema.late_columns)
    if store.ledger is not None:  # each node has the leases of its numbers
        with replay.rollout_worker() as worker:
            for lease in worker.lease(COUNT, timeout_s=0)[::-1]:
                members = [response(lease.number * GROUP + member) for member in range(GROUP)]
                if lease.number % 3:  # others are stored whole
                    members = [with_prompt(lease.number, one) for one in members]
                for one in members if store.media is not None else []:
                    one["image"] = images(lease.number, len(one["tokens"]))
                    one |= support(len(one["tokens"]), int(one["number"]))
                for one in members if late else []:
                    del one["reward"]
                lease.commit(members)
        assert store.shared_prompts is not None
        assert store.shared_prompts.any()
        return
    of_nodes = [[n for n in range(COUNT) if n // GROUP % NODES == node] for node in range(NODES)]
    if topology.num_nodes > 1:
        order = of_nodes[topology.node]
    elif replay.config.item_sampler.kind == "fifo":
        order = [number for pair in zip(*of_nodes, strict=True) for number in pair]
    else:
        order = [number for numbers in of_nodes for number in numbers]
    for number in order:
        values = response(number)
        reward = values.pop("reward") if late else None
        added = replay.add(values, table="main")
        if late:
            replay.fill(added, reward=reward)


def fill_column(replay: Replay, name: str) -> list[list[int]]:
    """Fill a late column in micro batches; return the trajectories of each of this rank."""
    packs = []
    for micro in replay.forward(name, tokens=96):
        packs.append(micro["number"].tolist())
        micro.fill(**{name: micro["logp"] * 2 if name == "ref" else micro["number"].float() % 3})
    return packs


def fill_stages(replay: Replay, config: dict[str, Any]) -> list[list[list[int]]]:
    """Add this node's groups after those of the nodes before it, and fill "ref" before and after
    each; then the rewards of six groups, the first one last. Return the trajectories of each micro
    batch of each pass.
    """
    topology = replay.topology
    passes = []
    for node in range(topology.num_nodes):
        passes.append(fill_column(replay, "ref"))
        if topology.node == node:
            fill(replay)
        barrier()
    passes.append(fill_column(replay, "ref"))
    with ExitStack() as stack:
        leases = []
        if topology.leads_node:
            worker = stack.enter_context(FillWorker.attach(config, "reward"))
            leases = worker.lease(6 * GROUP // topology.num_nodes, timeout_s=0)
        for is_first in (False, True):
            for lease in leases:
                if (lease.columns["prompt"] == 0) == is_first:
                    lease.fill(lease.columns["number"] % 3)
            barrier()
            assert (
                replay.can_sample() == is_first
            )  # five groups that follow an open one are no batch
    return passes


class Seen:
    """What a rank sees of a rollout."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self.packs = []
        self.gradients = []
        self.shared_tokens = 0
        self._embedding = torch.linspace(-1, 1, 500)

    def train(self, step: TrainStep) -> None:
        """Train a step: note its packs, and the gradient of a model with one weight for
        each token.
        """
        replay = self._replay
        packs = []
        self.shared_tokens += step.shared_tokens
        weights = self._embedding.clone().requires_grad_()
        for micro in step:
            packs.append(described(micro, replay.gradient_divisor))
            x = weights[micro["tokens"].long()] * micro["advantage"]
            (micro.sum(x) / replay.gradient_divisor).backward()  # type: ignore[no-untyped-call]
            sampler = replay.config.item_sampler
            if sampler.kind == "prioritized" and sampler.unit == "trajectory":
                replay.update_priorities(micro, 1.0 + micro["number"].float() % 7)
        self.packs.append(packs)
        self.gradients.append([0.0] * 500 if weights.grad is None else weights.grad.tolist())


def described(micro: MicroBatch, divisor: float) -> dict[str, Any]:
    """Return a pack: its trajectories, and a digest of every value in it."""
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(micro):
        digest.update(micro[name].contiguous().numpy().tobytes())
    for tensor in (micro.targets, micro.loss_mask, micro.weight / divisor, micro.is_weight):
        assert tensor is not None
        digest.update(tensor.contiguous().numpy().tobytes())
    if "image" in micro:
        for rows in micro.media.per_place().values():
            digest.update(rows.numpy().tobytes())
        for group, step in zip(micro["prompt"].tolist(), micro.lengths.tolist(), strict=True):
            assert set(micro["image"][0].tolist()) >= {one.number for one in items(group, step)}
    for name in micro.sources.ragged:
        ragged = micro.ragged(name)
        digest.update(ragged.offsets.numpy().tobytes())
        digest.update(ragged.values.double().numpy().tobytes())
        assert len(ragged) == micro["tokens"].shape[1]
        assert len(ragged.values)
    opaque = micro.opaque("note") if "note" in micro.sources.opaque else None
    assert opaque is None or [one["number"] for one in opaque] == micro["number"].tolist()
    numbers = micro["number"].tolist()
    rows = [int(micro["tokens"].numel()), int(micro.loss_mask.sum())]
    return {
        "numbers": numbers,
        "group": micro.group.tolist(),
        "rows": rows,
        "digest": digest.hexdigest(),
    }


def prepare(replay: Replay) -> tuple[Any, list[int]]:
    """Return the next rollout batch with its columns, and the trajectories that this rank has
    filled.

    One rank reports the priorities of groups.
    """
    rollout = replay.rollout()
    filled = []
    reports = replay.topology.rank == 0
    for micro in rollout.forward("old"):
        filled += micro["number"].tolist()
        micro.fill(old=micro["logp"] * 2 + micro["tokens"] / 100)
    if "advantage" not in rollout.columns:  # else the batch is resumed
        by_item = replay.config.item_sampler.unit == "group"
        prompts = rollout.values("prompt")
        if by_item and replay.config.item_sampler.kind == "prioritized" and reports:
            replay.set_priorities(rollout.trajectory_id[::GROUP], 1.0 + prompts[::GROUP] * 5 % 11)
        if "again" in replay.tables:
            priorities = 1.0 + prompts[::GROUP] * 5 % 11
            replay.copy_items(rollout, "again", rollout.table == 0, priorities)
        rollout.advantages("grpo", group=None if by_item else "prompt")
        rollout.set("white", rollout.column("old"))
        rollout.whiten("white")
    return rollout, filled


def barrier() -> None:
    """Wait for the other ranks; one process has none."""
    if dist.is_initialized():
        dist.barrier()


def run_case(
    case: Case, rank: int, world: int, folder: Path | None = None, other: Path | None = None
) -> dict[str, Any]:
    """Train two rollout batches; save after the first step, and go on from there with another
    replay.

    Args:
        case: Of `cases`.
        rank: Of this process.
        world: Processes.
        folder: For a save; None: none is made.
        other: A save of other ranks after the same step, from which a further replay goes on; None:
            none.
    """
    place = place_of(case, rank, world)
    info = BatchInfo(1, 1, world) if case.get("barrier", True) else None

    def made() -> Replay:
        return Replay(case["section"], info=info, place=place)

    def resumed(saved: Path) -> list[list[dict[str, Any]]]:
        with made() as replay:
            replay.load(saved)
            seen = Seen(replay)
            for _ in range(2):
                if is_staged and not replay.can_sample():
                    fill_column(replay, "reward")
                for step in prepare(replay)[0]:
                    seen.train(step)
        return seen.packs

    found: dict[str, Any] = {"numbers": [], "gathered": [], "missing": []}
    main = case["section"].get("tables", {}).get("main", {})
    asks = "needs" in main.get("group", {})
    is_staged = asks and "prompts" in main
    with made() as replay:
        if asks:
            found["missing"] += [replay.missing_groups(), replay.can_sample()]
        if is_staged:
            found["passes"] = fill_stages(replay, case["section"])
        else:
            fill(replay)
        if asks:
            found["missing"] += [replay.missing_groups(), replay.can_sample()]
        barrier()
        seen = Seen(replay)
        for _ in range(2):
            if is_staged and not replay.can_sample():
                found["passes"].append(fill_column(replay, "reward"))
            (rollout, filled) = prepare(replay)
            first = len(seen.packs)
            found["numbers"].append(rollout.values("number").tolist())
            assert torch.equal(
                rollout.values("prompt"), torch.tensor(found["numbers"][-1]) // GROUP
            )
            for step in rollout:
                seen.train(step)
                if folder is not None and rollout.number == 0 and step.number == 0:
                    replay.save(folder)
            trained = [n for packs in seen.packs[first:] for pack in packs for n in pack["numbers"]]
            found["gathered"].append(sorted({*filled, *trained}))
        barrier()  # every rank has ended the batch
        found["statistics"] = replay.statistics()
    found |= {"packs": seen.packs, "gradients": seen.gradients, "shared_tokens": seen.shared_tokens}
    if folder is not None:
        assert resumed(folder) == seen.packs[1:], "the packs after a resume"
    if other is not None:
        found["resumed"] = resumed(other)
    return found
