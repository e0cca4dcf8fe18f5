"""What a selection over many nodes costs: the time of one node's plan.

    python benchmarks/scale.py [--nodes 1 2 4 ...] [--json F] [--quick]

The plan is pure: every node computes all coordinates, resolves those of its own part, and works out
which resolutions and rows go where. So one process plans as one node of a thousand does. What the
others would say is made beforehand and nothing is sent: what the transport takes for each message
is not in the times. Before each plan the caches are filled with something else, as by a training
step; `warm_ms` is without that.

Every node holds trajectories of 1,000 steps, which are equally likely; a sample is a window of the
latest 20 steps of observation, action and reward; each rank is a replica, and the first of a node
plans for all of its ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from support.report import Report, Row, print_rows
from support.workloads import workload
from fixed_cost import Timers

from deepspeed_gear.config import check_against, parse
from deepspeed_gear.config.sampler_options import UniformSampler
from deepspeed_gear.distributed.topology import Topology, rank_grid
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.constants import FAN_OUT, tree_size
from deepspeed_gear.ops.records import Resolution, RowSample, Slot
from deepspeed_gear.row_exchange.exchange_plan import ExchangePlan, plan_exchange
from deepspeed_gear.row_exchange.resolution_exchange import ResolutionExchange
from deepspeed_gear.row_exchange.row_messages import RowExchange, layout_of
from deepspeed_gear.sampling.mass_rules import UNIT_CODES, AnchorRule, MassRule
from deepspeed_gear.sampling.samplers.base import NativeDraw, SamplerSpec
from deepspeed_gear.sampling.samplers.kinds import sampler_for
from deepspeed_gear.sampling.selection_rounds import SelectionRounds, StatusMessage
from deepspeed_gear.sampling.selector import Selector
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.sampling.sum_tree import ItemMasses, TreeChanges
from deepspeed_gear.store.records import NOTHING, Control, Head

NODES = [2**i for i in range(11)]
BOUND_MS = 50.0
REST = "rest"
LINK = "link (stand-in)"
DRAW = "draw all coordinates: draw_"
WARM = 2  # plans that are not timed
CACHE_BYTES = 128 << 20  # more than the caches hold
SEED = 1
KEY = 7
# of a trajectory; of a node
STEPS = 1000
TRAJECTORIES = 1000
WINDOW = 20
SCHEMA = workload("W1").schema
FIELDS = {
    name: {"offset": 1 - WINDOW, "length": WINDOW} for name in ("observation", "action", "reward")
}
ROW_BYTES = {"observation": 44, "action": 12, "reward": 4}


# ---- a node that sends nothing -------------------------------------------------------------------


def _tree(masses: torch.Tensor) -> torch.Tensor:
    sums = torch.zeros(tree_size(len(masses)), dtype=torch.int64)
    sums[: len(masses)] = masses
    load_backend().tree_build_(sums, len(masses))
    return sums


class Items(ItemMasses):
    """A node's steps, equally likely, with a tree and slots in plain memory."""

    def __init__(self, spec: StreamSpec, index: int) -> None:
        self.spec = spec
        self.ops = load_backend()
        self.num_items = TRAJECTORIES
        slots = torch.zeros(TRAJECTORIES, 8, dtype=torch.int64)
        slots[:, 0] = 2
        slots[:, 1] = 1
        slots[:, 4] = STEPS
        slots[:, 2] = index * TRAJECTORIES + torch.arange(TRAJECTORIES)
        slots[:, 3] = torch.arange(TRAJECTORIES) * STEPS
        self._slots = slots
        self.sums = _tree(torch.full((TRAJECTORIES,), STEPS))
        self._top = self.sums[-FAN_OUT:].numpy().data
        self.words = memoryview(np.zeros(TreeChanges.NUM_WORDS, np.int64))
        self._control = memoryview(np.zeros(Control.NUM_WORDS, np.int64))  # nothing ever changes
        self._plain_unit = self._log = self._groups = None
        self._may_wrap = False
        self.draws_anchor = spec.rule.draws_anchor
        self._on_change: list[Any] = []
        self._how = (spec.rule.anchors.as_list(), UNIT_CODES["step"], spec.seed, spec.random_key)


class Wire:
    """Stands in for a NodeChannel: takes what is sent, and hands out what has been made
    beforehand.
    """

    def __init__(self, index: int, count: int) -> None:
        self.index = index
        self.count = count
        self.last_wait_s = 0.0
        self.left = False
        self.received: list[np.ndarray] = []
        self._begins_cut = False

    def begin(self, messages: Sequence[np.ndarray]) -> Callable[[], list[np.ndarray]]:
        """Answer the record, and then what follows it."""
        self._begins_cut = not self._begins_cut
        if not self._begins_cut:
            return lambda: self.received
        said = messages[0][1:].copy()
        assert said.shape == (StatusMessage.NUM_WORDS,)
        said[StatusMessage.TOTAL] = TRAJECTORIES * STEPS
        return lambda: [said] * self.count

    abandoned_on_error = contextlib.nullcontext  # no other node waits


class Planner(RowExchange):
    """A row exchange that plans the rows and copies none."""

    def __init__(self, channel: Any, routes: ExchangePlan, timers: Timers) -> None:
        layout = layout_of(routes.needs, ROW_BYTES)
        ops = load_backend()
        self.channel = channel
        self._transport = None
        self.takes_own = self.has_steps = False
        self._layout = layout.windows, layout.members, layout.columns
        self._encode, self._decode = (
            timers.wrap("plan_rows, twice", op) for op in (ops.encode_rows_, ops.decode_rows_)
        )
        self._slots_held = torch.zeros(TRAJECTORIES, Slot.NUM_WORDS, dtype=torch.int64)
        self._nowhere = [torch.empty(0, dtype=torch.uint8)] * len(layout.names)
        self._sizes = torch.zeros(routes.num_nodes, dtype=torch.int64)
        self._needed = torch.zeros(2).long()
        heads = np.zeros(routes.num_nodes, np.int64)
        self._heads = torch.from_numpy(heads)
        self._head_words = heads.data

    def steps_of(self, records: torch.Tensor) -> None:
        """No window follows n-step steps."""

    def encode(self, outgoing: torch.Tensor, heads: Sequence[int]) -> list[np.ndarray]:
        """Plan what would be sent; return messages of heads alone."""
        for node, head in enumerate(heads):
            self._head_words[node] = 8 * head
        given = self._nowhere, outgoing, *self._layout, self._heads, self._slots_held
        self._encode(
            torch.empty(0, dtype=torch.int64), self._sizes, *given
        )  # no room, so none is copied
        return [np.empty(head, np.int64) for head in heads]

    def fill(
        self,
        entry: int,
        ring: torch.Tensor,
        which: torch.Tensor,
        incoming: torch.Tensor,
        received: Sequence[np.ndarray],
        heads: Sequence[int],
        used: tuple[int, int] = (0, 0),
    ) -> None:
        """Plan what would be received, and where it would lie."""
        for node, head in enumerate(heads):
            self._head_words[node] = 8 * head
        said = [torch.from_numpy(message) for message in received]
        given = said, which, incoming, *self._layout, self._heads
        self._decode(self._nowhere, ring, self._sizes, self._needed, *given, (0, 0, 0, 0, 0, 0))


class Batch(NamedTuple):
    """A global batch as everybody computes it. [B] each, int64."""

    coordinates: np.ndarray
    owner: np.ndarray
    slot: np.ndarray
    anchor: np.ndarray

    @classmethod
    def of(cls, key: int, count: int, num_nodes: int) -> Batch:
        drawn = np.empty(count, np.int64)
        total = num_nodes * TRAJECTORIES * STEPS
        load_backend().draw_(torch.from_numpy(drawn), SEED, KEY, key * count, total)
        trajectory = drawn // STEPS
        return cls(drawn, trajectory // TRAJECTORIES, trajectory % TRAJECTORIES, drawn % STEPS)


class Node:
    """One node's plan of global batches.

    Args:
        routes: Of this node.
        batch: Samples of a global batch.
        timers: Take the times of its parts.
    """

    def __init__(self, routes: ExchangePlan, batch: int, timers: Timers) -> None:
        rule = MassRule("step", False, AnchorRule())
        sampling = SamplerSpec(rule, NativeDraw.RANDOM)
        sampler = sampler_for(UniformSampler(unit="step"))
        num_nodes = routes.num_nodes
        self.spec = StreamSpec(
            "train",
            sampler,
            sampling,
            SEED,
            KEY,
            batch,
            depth=1,
            num_shards=num_nodes,
            together=num_nodes > 1,
        )
        self.routes = routes
        self.link = Wire(routes.index, routes.num_nodes)
        state: Any = SimpleNamespace(
            pin=lambda key, records: None,
            spec=self.spec,
            masses=Items(self.spec, routes.index),
            table=SimpleNamespace(lock=contextlib.nullcontext(), ledger=None),
            ring=torch.empty(1, batch, 8, dtype=torch.int64),
            origins=torch.empty(1, batch, dtype=torch.int64),
            counts=None,
            priorities=None,
            numbers=None,
            drawn_words=[],
            drawn=[(torch.empty(0, 8, dtype=torch.int64), None)],
            words=memoryview(np.full(Head.NUM_WORDS, NOTHING)),
            head_words=[memoryview(np.zeros(Head.NUM_WORDS, np.int64))],
            advance=lambda entry: None,
            limiter=None,
            is_limited=False,
            joint_limiter=None,
            failure=None,
            ops=load_backend(),
            stop=threading.Event(),
        )
        self.state = state
        link: Any = self.link
        rows = Planner(link, routes, timers)
        exchange = ResolutionExchange(state, routes, rows, lambda *_: None, 0)
        self.selector = Selector(state, SelectionRounds(state, link), exchange)
        self._coordinates = torch.empty(batch, dtype=torch.int64)
        self._draw = timers.wrap(DRAW, load_backend().draw_)

    def prepare(self, batch: Batch) -> None:
        """Make what the other nodes say of a batch."""
        routes = self.routes
        wanted = self.routes.wanted(self.spec.batch, 0)
        owner = batch.owner[wanted]
        others = wanted[np.argsort(owner, kind="stable")]
        records = np.zeros((len(others), 8), np.int64)
        records[:, Resolution.ID] = batch.coordinates[others] // STEPS
        records[:, Resolution.SLOT] = batch.slot[others]
        records[:, Resolution.ANCHOR] = batch.anchor[others]
        records[:, Resolution.NUM_STEPS] = STEPS
        everyone = (
            torch.ones(1, 1, dtype=torch.int64),
            torch.zeros(2, 1, dtype=torch.int16),
        )  # as for node 1
        given = torch.from_numpy(records), torch.arange(len(records))
        samples = torch.empty(len(records), RowSample.NUM_WORDS, dtype=torch.int64)
        resolutions = torch.empty(len(records), 4, dtype=torch.int64)
        ends_ = torch.empty(2, dtype=torch.int64)
        load_backend().encode_draws_(
            samples, resolutions, ends_, *given, None, None, *everyone, 0, 0, 0
        )
        packed = resolutions.numpy()
        ends = np.cumsum(np.bincount(owner, minlength=routes.num_nodes))[:-1]
        parts = [part.reshape(-1) for part in np.split(packed, ends)]
        self.link.received = [np.concatenate([np.ones(1, np.int64), part]) for part in parts]

    def plan(self, key: int) -> None:
        """Make the selection of a global batch up to what is sent."""
        count = self.spec.batch
        # The node's own store makes the selection, as without other nodes.
        if self.routes.num_nodes == 1:
            self._draw(self._coordinates, SEED, KEY, key * count, TRAJECTORIES * STEPS)
            self.state.masses.resolve(self.state.ring[0], self._coordinates, key * count)
            return
        self.state.words[Head.SAMPLES] = key * count
        self.selector.select(key, 0)


def routes_at(num_nodes: int, ranks: int) -> Callable[[int], ExchangePlan]:
    """Return what makes a node's routes; all nodes share the arrays."""
    places = tuple(rank_grid({"data": num_nodes * ranks}))
    section = {"tables": {"main": {"capacity_steps": STEPS * TRAJECTORIES}}, "fields": FIELDS}
    config = parse(section)
    fields = check_against(config, {"main": SCHEMA})
    topology = Topology(0, places, tuple(np.repeat(np.arange(num_nodes), ranks).tolist()))
    first = plan_exchange(topology, range(num_nodes), config, fields, SCHEMA)
    rest = first.data_world, first.readers, first.needs, first.need_of
    return lambda index: ExchangePlan(first.holders, index, *rest)


# ---- times ---------------------------------------------------------------------------------------

PARTS: tuple[tuple[Any, str, str], ...] = (
    (Selector, "_begin", "begin: record, status"),
    (Selector, "_coordinates_of", DRAW),
    (Selector, "_resolve", "own samples, owners"),
    (ItemMasses, "resolve_numbered", "resolve own samples: resolve_"),
    (
        Selector,
        "_finish",
        "own records together; ring, origins, samples whose rows are received",
    ),
    (ResolutionExchange, "_encode", "resolutions by node"),
    (RowExchange, "send", "messages"),
)


def time_plans(
    node: Node, batches: Sequence[Batch], timers: Timers, cold: bool
) -> dict[str, float]:
    """Return the median milliseconds of each part of a plan, and of all of it.

    Args:
        node: Whose plan it is.
        batches: What to plan.
        timers: Of the parts.
        cold: Whether something else has filled the caches before each plan, as a training step
            does.
    """
    found: list[dict[str, float]] = []
    plan = timers.wrap(REST, node.plan)
    other = np.zeros(CACHE_BYTES * cold, np.uint8)
    for key, batch in enumerate(batches):
        node.prepare(batch)
        other += 1
        timers.spent.clear()
        plan(key)
        found.append(
            {name: sum(times) / 1e6 for name, times in timers.spent.items() if name != LINK}
        )
        found[-1]["all"] = sum(found[-1].values())
    return {name: float(np.median([parts[name] for parts in found[WARM:]])) for name in found[0]}


def run_one(num_nodes: int, ranks: int, samples: int, repeats: int) -> Row:
    """Time one node's plan among so many."""
    count = num_nodes * ranks * samples
    timers = Timers()
    batches = [Batch.of(key, count, num_nodes) for key in range(WARM + repeats)]
    begin = perf_counter()
    routes_of_node = routes_at(num_nodes, ranks)
    setup_s = perf_counter() - begin
    with timers.over([*PARTS, (Wire, "begin", LINK)]):
        node = Node(routes_of_node(num_nodes // 2), count, timers)
        warm_ms = time_plans(node, batches, timers, cold=False)["all"]
        parts = time_plans(node, batches, timers, cold=True)
    row: Row = {
        "nodes": num_nodes,
        "ranks": num_nodes * ranks,
        "samples": count,
        "routes_s": setup_s,
    }
    row |= {"plan_ms": parts.pop("all"), "warm_ms": warm_ms}
    row["plan_us_a_rank"] = row["plan_ms"] * 1e3 / ranks
    row["us_a_sample"] = row["plan_ms"] * 1e3 / count
    return {
        **row,
        "parts_ms": {name: parts[name] for name in sorted(parts, key=lambda name: -parts[name])},
    }


def judge(rows: Sequence[Row], ranks: int, samples: int) -> None:
    """Add what is asked for: the largest plan within its bound, no growth beyond that
    of the batch.
    """
    first = next((row for row in rows if row["nodes"] > 1), rows[0])
    for row in rows:
        row.update(growth=row["us_a_sample"] / first["us_a_sample"], growth_bound=1.0)
        row["holds"] = row["growth"] <= 1.0
        if row["nodes"] == NODES[-1] and (ranks, samples) == (8, 32):
            row.update(bound_ms=BOUND_MS, holds=row["holds"] and row["plan_ms"] <= BOUND_MS)


def main() -> None:
    """Run from the command line."""
    report = Report(
        __doc__,
        nodes=(tuple(NODES), "numbers of nodes"),
        ranks=(8, "of a node"),
        samples=(32, "of a rank in a global batch"),
        repeats=(15, "global batches, of which medians are taken"),
    )
    given = report.options
    nodes = given.nodes
    ranks = given.ranks
    samples = given.samples
    repeats = given.repeats
    if given.quick:
        nodes = [1, 2, 4]
        ranks = 2
        samples = 4
        repeats = 3
    rows = [run_one(num_nodes, ranks, samples, repeats) for num_nodes in nodes]
    judge(rows, ranks, samples)
    print_rows(rows, "nodes samples plan_ms warm_ms plan_us_a_rank growth routes_s holds")
    print_rows([{"part": part, "ms": ms} for part, ms in rows[-1]["parts_ms"].items()])
    report.write(rows)


if __name__ == "__main__":
    main()
