"""Packed rollouts over nodes: packs, columns and gradients are those of one process."""

import hashlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rollout_support
import torch
import torch.distributed as dist
from batch_records import in_plan_order
from cluster_support import Cluster
from gear_support import prefix
from packed_engines import COUNT as RESPONSES
from packed_engines import save
from ragged_tables import MEMORY, RAGGED, support

from deepspeed_gear import DatasetWriter, FillWorker, Media, MicroBatch, Replay, Schema
from deepspeed_gear.data.media_digests import MediaItem
from deepspeed_gear.data.ragged import item_columns
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.replay.packed.rollout import TrainStep
from deepspeed_gear.sampling.batch_sizes import BatchInfo

# ---- cases, and what a rank of any world sees of them --------------------------------------------

NODES = 2
WIDTH = 4
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
        "pack": {"tokens": 48, "pad": {"multiple": 8}, "plan_width": WIDTH},
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
    """What a rank sees of a rollout.

    Args:
        replay: The replay.
    """

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


def sent_bytes(replay: Replay) -> int:
    links = replay._parts.links
    return 0 if True not in links._channels else links._channels[True].bytes_sent


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
        before = sent_bytes(replay)
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
        found["sent"] = sent_bytes(replay) - before
        barrier()  # every rank has ended the batch
        found["statistics"] = replay.statistics()
    found |= {"packs": seen.packs, "gradients": seen.gradients, "shared_tokens": seen.shared_tokens}
    if folder is not None:
        assert resumed(folder) == seen.packs[1:], "the packs after a resume"
    if other is not None:
        found["resumed"] = resumed(other)
    return found


# ---- the ranks of nodes beside one process -------------------------------------------------------

RANKS = 2
WORLD = NODES * RANKS
BOUND = 2e-6  # of the largest gradient, as in tests/distributed/test_gradients.py
NAMES = list(cases("", "", ""))
Found = dict[str, Any]


@dataclass
class Outcomes:
    """What one process has seen of each case, and each rank of the nodes; their saves are in
    `saves`.
    """

    cases: dict[str, Case]
    alone: dict[str, Found]
    ranks: dict[str, list[Found]]
    saves: Path


@pytest.fixture(scope="module")
def outcomes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Run each case in this process, and in one launch over nodes."""
    folder = tmp_path_factory.mktemp("alone")
    out = tmp_path_factory.mktemp("nodes")
    known = cases(
        write_data(folder / "set"),
        write_data(folder / "other", 20, 100),
        write_data(folder / "supervised", 20, 200, OF_GROUPS),
    )
    alone = {name: run_case(case, 0, 1, folder / name) for name, case in known.items()}
    seen = cluster.call_ranks(
        run_cases, known, out, folder, nodes=NODES, ranks=RANKS, timeout_s=200.0
    )
    return Outcomes(known, alone, {name: [rank[name] for rank in seen] for name in known}, out)


def run_cases(known: dict[str, Case], out: Path, saves: Path) -> dict[str, Found]:
    """Run each case on this rank, and go on from the saves that one process has made."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    world = dist.get_world_size()
    found = {}
    for name, case in known.items():
        folder, other = (out / name, saves / name) if case.get("resumes") else (None, None)
        found[name] = run_case(case, rank, world, folder, other)
    return found


def numbers(steps: list[list[Found]]) -> list[list[Any]]:
    return [[pack["numbers"] for pack in step] for step in steps]


@pytest.mark.parametrize("name", NAMES)
def test_packs_and_gradients_are_those_of_one_process(name: str, outcomes: Outcomes) -> None:
    alone = outcomes.alone[name]
    ranks = outcomes.ranks[name]
    shares = outcomes.cases[name].get("shares")
    assert all(rank["numbers"] == alone["numbers"] for rank in ranks)
    assert {rank["shared_tokens"] for rank in ranks} == {alone["shared_tokens"]}
    assert (alone["shared_tokens"] > 0) == (
        name in ("groups", "replicated groups", "beside groups")
    )
    one_each = ranks[:: RANKS if shares == "node" else 1][
        : len(ranks) if shares is None else WORLD // 2
    ]
    packs = in_plan_order([rank["packs"] for rank in one_each])
    wanted = in_plan_order([alone["packs"]])
    if shares in (None, "tensor"):
        assert packs == wanted  # all bits
    else:  # two ranks have a slice each of one pack
        assert numbers(packs) == numbers(wanted)
    if shares == "tensor":  # the other one of each replica
        assert [rank["packs"] for rank in ranks[WORLD // 2 :]] == [
            rank["packs"] for rank in one_each
        ]
        ranks = one_each
    for number, gradient in enumerate(alone["gradients"]):
        total = np.sum([rank["gradients"][number] for rank in ranks], axis=0)
        assert np.abs(total - gradient).max() <= BOUND * np.abs(gradient).max()


@pytest.mark.parametrize(
    "name", [name for name, case in cases("", "", "").items() if "shares" not in case]
)
def test_every_trajectory_is_trained_once_an_epoch(name: str, outcomes: Outcomes) -> None:
    section = outcomes.cases[name]["section"]
    ranks = outcomes.ranks[name]
    steps = in_plan_order([numbers(rank["packs"]) for rank in ranks])
    per_batch = len(steps) // 2
    epochs = section["rollout"].get("epochs", 1)
    for batch, every in enumerate(ranks[0]["numbers"]):
        packs = chain.from_iterable(steps[batch * per_batch : (batch + 1) * per_batch])
        trained = list(chain.from_iterable(packs))
        assert sorted(trained) == sorted(every * epochs)
        if section["sampler"].get("unit") == "group":  # each whole
            groups = np.array(every).reshape(section["rollout"]["groups"], GROUP) // GROUP
            assert (groups == groups[:, :1]).all()


@pytest.mark.parametrize(
    "name", [name for name, case in cases("", "", "").items() if case.get("resumes")]
)
def test_a_save_in_a_rollout_batch_goes_on_on_other_nodes(name: str, outcomes: Outcomes) -> None:
    """From one process to two nodes, and back; on the same nodes the program itself compares."""
    wanted = in_plan_order([outcomes.alone[name]["packs"]])[1:]
    assert in_plan_order([rank["resumed"] for rank in outcomes.ranks[name]]) == wanted
    back = run_case(outcomes.cases[name], 0, 1, None, outcomes.saves / name)
    assert in_plan_order([back["resumed"]]) == wanted


@pytest.mark.parametrize("name", ["groups", "tokens"])
def test_a_trajectory_is_sent_at_most_once_to_a_node(name: str, outcomes: Outcomes) -> None:
    ranks = outcomes.ranks[name]
    rows = 0
    for batch in range(2):
        for node in range(NODES):
            own = ranks[node * RANKS : (node + 1) * RANKS]
            gathered = set().union(*(rank["gathered"][batch] for rank in own))
            lacking = [number for number in gathered if number // GROUP % NODES != node]
            rows += sum(row_bytes(len(response(number)["tokens"])) for number in lacking)
    records = 72 * 2 * 20  # of two selections
    assert rows <= sum(rank["sent"] for rank in ranks) <= rows + records + 2000


def test_ranks_share_the_groups_that_are_missing(outcomes: Outcomes) -> None:
    """Those of a batch, then none of any node."""
    assert outcomes.alone["groups"]["missing"] == [5, False, 0, True]
    of_ranks = [rank["missing"] for rank in outcomes.ranks["groups"]]
    assert of_ranks == [[2, False, 0, True], *[[1, False, 0, True]] * 3]


def test_each_node_counts_the_groups_that_it_holds(outcomes: Outcomes) -> None:
    for name in ("groups", "members", "used up", "queue"):
        whole = outcomes.alone[name]["statistics"]["groups"]["main"]
        nodes = [rank["statistics"]["groups"]["main"] for rank in outcomes.ranks[name][::RANKS]]
        assert {key: sum(node[key] for node in nodes) for key in whole} == whole
    draws = [
        rank["statistics"]["drawn"]["main"]["draws"] for rank in outcomes.ranks["members"][::RANKS]
    ]
    assert (
        max(one["max"] for one in draws)
        == outcomes.alone["members"]["statistics"]["drawn"]["main"]["draws"]["max"]
    )


@pytest.mark.parametrize("case", ["prompts", "stages"])
def test_the_books_of_all_nodes_are_one_account(case: str, outcomes: Outcomes) -> None:
    whole = outcomes.alone[case]["statistics"]["prompts"]["main"]
    nodes = [rank["statistics"]["prompts"]["main"] for rank in outcomes.ranks[case][::RANKS]]
    for name in ("issued", "trained", "training", "waiting", "incomplete", "leased", "returned"):
        assert sum(node[name] for node in nodes) == whole[name]
    assert (whole["issued"], [node["trained"] for node in nodes]) == (10, [5, 5])


def test_nodes_fill_their_own_rows_in_as_many_micro_batches(outcomes: Outcomes) -> None:
    """Before each node's groups are there, and after; then rewards of the second batch."""
    alone = outcomes.alone["stages"]["passes"]
    ranks = [rank["passes"] for rank in outcomes.ranks["stages"]]
    assert [len(rank) for rank in ranks] == [NODES + 2] * WORLD
    filled = [[list(chain(*packs)) for packs in rank] for rank in ranks]
    for number in range(NODES + 2):
        assert len({len(rank[number]) for rank in ranks}) == 1
    for rank, of_passes in enumerate(filled):
        assert {n // GROUP % NODES for n in chain(*of_passes)} <= {rank // RANKS}
        assert [bool(one) for one in of_passes] == [False, rank < RANKS, rank >= RANKS, True]
    for number, wanted in ((slice(0, -1), alone[:-1]), (slice(-1, None), alone[-1:])):
        found = chain.from_iterable(chain(*rank[number]) for rank in filled)
        assert sorted(found) == sorted(chain(*chain(*wanted)))


def test_an_engine_trains_rollouts_over_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """A rank on each of two nodes adds its own responses; it saves in a rollout batch, too."""
    pack = {"tokens": 128, "pad": {"multiple": 16}, "plan_width": WIDTH}
    size = {"trajectories": 18, "tokens": 450, "minibatches": 3, "epochs": 2}
    gear = rollout_support.section(
        pack=pack, rollout=size, sampler={"kind": "epoch"}, timeout_s=60.0
    )
    found = cluster.call_ranks(save, gear, str(tmp_path), nodes=NODES, timeout_s=200.0)
    ids = [[[pack["ids"] for pack in step] for step in rank["steps"]] for rank in found]
    with Replay(gear) as replay:
        for seed in range(NODES):
            for one in rollout_support.responses(RESPONSES, seed):
                replay.add(one)
        replay.rollout().close()
        steps = [[ids_on_nodes(micro) for micro in step] for step in replay.rollout()]
    assert in_plan_order(ids) == in_plan_order([steps[1:]])
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["following"] == found[1]["following"]


def ids_on_nodes(micro: MicroBatch) -> list[int]:
    """Return the ids that trajectories of one process have where each node adds
    RESPONSES of them.
    """
    node, number = np.divmod(micro.trajectory_id.numpy(), RESPONSES)
    return [int(one) for one in number * NODES + node]


def row_bytes(steps: int) -> int:
    """Return the bytes of a trajectory: tokens, mask, logp, state, and four values."""
    return steps * (4 + 1 + 4) + (steps + 1) * 8 + 8 + 8 + 4 + 4
