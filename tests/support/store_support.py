"""Tables with streams, made without a Replay: what must hold in them, and deaths at any line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import numpy as np
import torch
from gear_support import ROOT, SCHEMA, SHM, prefix, trajectory
from process_support import exit_status, in_child

from deepspeed_gear.config import sampler_options
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import Slot, SlotState, UpdateCount
from deepspeed_gear.ops.reference.priorities import mass_, minima_build_
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.mass_rules import AnchorRule, MassRule, PriorityRule
from deepspeed_gear.sampling.samplers.base import NativeDraw, SamplerSpec
from deepspeed_gear.sampling.samplers.kinds import EvaluationPass, sampler_for
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.sampling.stream_state import StreamState, stream_regions
from deepspeed_gear.sampling.sum_tree import TreeChanges
from deepspeed_gear.store import process_bound
from deepspeed_gear.store.memory_layout import HOLDER_OFFSET, RunIdentity
from deepspeed_gear.store.records import NOTHING, Control, Head
from deepspeed_gear.store.retention import Retention
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec, table_layout
from deepspeed_gear.timeouts import Context


class StoreScene:
    """A table with streams, made without a Replay: this process is peer 0; others attach by
    `attach`.

    `specs` are those of its streams, `lengths` those of the trajectories that it holds at the
    beginning. The rest is of `TableSpec`; `spare_rows` come besides `num_rows`.
    """

    def __init__(
        self,
        specs: Sequence[Any] = (),
        lengths: Sequence[int] = (),
        num_slots: int = 40,
        num_rows: int = 1000,
        num_peers: int = 4,
        timeout_s: float = 20.0,
        retention: Any = None,
        spare_rows: int = 0,
        shard: Any = None,
        group: Any = None,
        prompts: Any = None,
        normalized: tuple[str, ...] = (),
        return_to_go: bool = True,
        schema: Any = SCHEMA,
    ) -> None:
        self.ops = load_backend("cpu")
        self.specs = list(specs)
        self.timeout_s = timeout_s
        self.name = f"{prefix()}-{os.urandom(4).hex()}"
        self.run = RunIdentity("0" * 32)
        sizes = (num_slots, num_rows + spare_rows, None, True, return_to_go, num_peers, shard)
        rules: dict[str, Any] = {
            "retention": retention or Retention(),
            "group": group,
            "prompts": prompts,
            "normalized": normalized,
        }
        self.spec = TableSpec("main", schema, *sizes, spare_rows=spare_rows, **rules)
        extra = [region for spec in self.specs for region in stream_regions(spec, self.spec)]
        meaning = {spec.name: spec.describe() for spec in self.specs}
        self.layout = table_layout(self.spec, extra, meaning)
        self.table = Table.create(self.spec, extra, meaning, self.run, self.ops, timeout_s)
        self.streams = [BatchStream(StreamState(spec, self.table)) for spec in self.specs]
        for stream in self.streams:
            stream.state.initialise()
        self.count = 0
        for steps in lengths:
            self.add(steps)
        self.table.memory.link(self.name)

    def attach(self, peer: int, **changes: Any) -> tuple[Any, list[Any]]:
        """Attach to the store once more; return table and streams."""
        given = {
            "expected": self.layout,
            "run_id": self.run.id,
            "ops": self.ops,
            "timeout_s": self.timeout_s,
        }
        table = Table.attach(self.spec, self.name, peer=peer, **{**given, **changes})
        return table, [BatchStream(StreamState(spec, table)) for spec in self.specs]

    def add(self, num_steps: int, task: int | None = None) -> int:
        """Add the next trajectory; its number is its id, while nothing else adds, and its task by
        default.
        """
        self.count += 1
        row = trajectory(self.count - 1, num_steps)
        given = {} if task is None else {"task": np.int64(task)}
        return store_trajectory(self.table, self.streams, {**row, **given}, None)

    def __enter__(self) -> StoreScene:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the store."""
        (SHM / self.name).unlink(missing_ok=True)
        self.table.close()


class InsertGate:
    """The rate test of writers, which the native store makes, at any counts."""

    def __init__(self, rate: Any) -> None:
        self._scene = StoreScene(
            [stream_spec(name="train")], retention=Retention(rate_limiter=rate)
        )
        self._by_step = rate.unit == "step"

    def __enter__(self) -> InsertGate:
        return self

    def __exit__(self, *error: object) -> None:
        self._scene.close()

    def may_insert(self, size: int, inserted: int, sampled: int, count: int = 1) -> bool:
        """Return whether so many items more may be added to those held, ever added, and drawn."""
        table = self._scene.table
        words = [Control.NUM_COMMITTED, Control.INSERTED]
        if self._by_step:
            words = [Control.STEPS_COMMITTED, Control.STEPS_INSERTED]
        # Of trajectories one is added at a time: the others are being written.
        table.control[words] = size, inserted
        table.control[Control.PENDING] = 0 if self._by_step else count - 1
        table.views["stream/train/position"][Head.SAMPLES] = sampled
        return bool(table.extents.handle.may_insert(count))


def store_trajectory(
    table: Table, streams: list[BatchStream], trajectory: Mapping[str, Any], max_length: int | None
) -> int:
    """Store a trajectory. Returns its id."""
    context = Context(timeout_s=table.lock.timeout_s)
    return table_access.inserter_of(table, streams, max_length, context).add(trajectory)


def reserve(table: Any, num_steps: int) -> int:
    """Reserve a slot for a trajectory; nothing is evicted. Wants the lock."""
    slot = int(table.extents.reserve(table.rows_for(num_steps), num_steps))
    if slot < 0:
        raise table.full(slot, num_steps)
    return slot


def note_death(table: Table) -> None:
    """Let the lock look as if its holder has died: who takes it next repairs the table."""
    holder = np.ndarray((1,), np.int64, buffer=table.memory.buffer, offset=HOLDER_OFFSET)
    holder[0] = 1


def priority_rule(alpha: Any = 0.6, beta: Any = 0.4, **options: Any) -> Any:
    """Return how priorities become masses; `alpha` and `beta` are numbers, or functions of the
    batch.
    """
    schedules = [f if callable(f) else (lambda _, value=f: value) for f in (alpha, beta)]
    defaults = {"initial": None, "normalize": "batch", "lag": 0, "log_size": 256}
    return PriorityRule(*schedules, **{**defaults, **options})


def stream_spec(
    kind: str = "random", unit: str = "trajectory", batch: int = 8, **options: Any
) -> Any:
    """Return a stream over all anchors, or with the `anchors`, `by_length`, `where`, ... given.

    Kinds are "random", "stratified", "epoch", "pass", and those of the config that take items in an
    order: "top_k", "fifo", "lifo".
    """

    rule = MassRule(
        unit,  # type: ignore[arg-type]
        options.get("by_length", False),
        options.get("anchors", AnchorRule()),
        options.get("where", ()),
        options.get("split", {}),
        options.get("split_index", 0),
        weight=options.get("weight"),
        window=options.get("window"),
    )
    native = {"random": NativeDraw.RANDOM, "stratified": NativeDraw.STRATIFIED}.get(kind)
    tail = "drop" if options.get("drop") else "wrap"
    models: dict[str, Any] = {
        "random": lambda: sampler_options.UniformSampler(),
        "stratified": lambda: sampler_options.UniformSampler(stratified=True),
        "epoch": lambda: sampler_options.EpochSampler(kind="epoch", tail=tail),
        "top_k": lambda: sampler_options.TopKSampler(kind="top_k"),
        "fifo": lambda: sampler_options.FifoSampler(kind="fifo"),
        "lifo": lambda: sampler_options.LifoSampler(kind="lifo"),
    }
    sampler = EvaluationPass() if kind == "pass" else sampler_for(models[kind]())
    by_age = kind in ("fifo", "lifo")
    sampling = SamplerSpec(rule, native, options.get("priorities"), by_age)
    names = ("num_shards", "count", "count_draws", "most_trajectories")
    extra = {name: options[name] for name in names if name in options}
    seed = options.get("seed", 0)
    depth = options.get("depth", 4)
    return StreamSpec(
        options.get("name", "train"), sampler, sampling, seed, 7, batch, depth, **extra
    )


def check_whole(table: Any, streams: Sequence[Any]) -> None:
    """Check that everything derived in a store agrees with its slot table; takes the lock."""
    with table.lock:
        slots = table.slots
        control = table.control
        committed = np.nonzero(slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        assert control[Control.NUM_COMMITTED] == len(committed)
        assert control[Control.STEPS_COMMITTED] == slots[committed, Slot.NUM_STEPS].sum()
        ids = slots[committed, Slot.ID]
        assert len(np.unique(ids)) == len(ids)
        assert control[Control.NEXT_ID] > ids.max(initial=-1)
        used = slots[slots[:, Slot.STATE] != SlotState.FREE]
        extents = sorted(used[:, [Slot.FIRST_ROW, Slot.NUM_ROWS]].tolist())
        ends = [0, *(first + count for first, count in extents)]
        assert all(first >= end for (first, _), end in zip(extents, ends, strict=False))
        assert max(ends) <= table.spec.capacity_rows
        assert not control[Control.MOVING]
        assert control[Control.FREE_ROWS] == table.spec.capacity_rows - used[:, Slot.NUM_ROWS].sum()
        for stream in streams:
            masses = stream.masses
            masses.take_changes()
            sums = masses.sums.clone()
            stream.table.ops.tree_build_(sums, masses.num_items)
            assert sums.equal(masses.sums), "an inner node is not the sum of its children"
            waiting = np.nonzero(masses.queued != NOTHING)[0]
            dirty = table.views[stream.spec.at + "dirty"]
            dirty = dirty[: masses.words[TreeChanges.NUM_QUEUED]]
            assert sorted(dirty.tolist()) == waiting.tolist()
            effective = np.where(masses.queued != NOTHING, masses.queued, masses.applied)
            wanted = np.zeros(len(slots), np.int64)
            wanted[committed] = masses.of(committed)
            if stream.spec.rule.window is None:
                assert (effective == wanted).all()
            else:
                assert np.isin(effective, [0, *wanted]).all()
                assert (effective <= wanted).all()
            if stream.state.priorities is not None:
                check_priorities_whole(masses)


def check_priorities_whole(masses: Any) -> None:
    """Check that masses, minima and counts are those of the stored priorities. Wants the lock."""
    leaves = torch.empty(masses.num_items, dtype=torch.int64)
    values = torch.from_numpy(masses._decayed(slice(None)))
    mass_(leaves, values, int(masses.words[TreeChanges.ALPHA]), masses.rule.most_bits)
    assert (leaves.numpy() == masses.leaves).all(), "a leaf is not the mass of its priority"
    if len(masses._minima):
        minima = torch.empty_like(masses._minima)
        minima_build_(minima, masses.sums, masses.num_items)
        assert minima.equal(masses._minima), "a node is not the least of its children"
    assert masses.counts[UpdateCount.DRAWABLE] == np.count_nonzero(masses.leaves)
    admitted = np.zeros(masses.num_items, bool)
    # Rows of a slot that is free already may be another trajectory's; where slots are items, they
    # stay.
    there = (masses.table.slots[:, Slot.STATE] != SlotState.FREE) | (not masses.by_step)
    slots = np.nonzero((masses.applied != 0) & there)[0]
    items, drawable = masses._items_of(slots, masses.applied[slots])
    admitted[items] = drawable
    assert not masses.values[~admitted].any(), "an item that is gone has a priority"


def killed_at(
    line: int,
    action: Callable[[], None],
    parts: Sequence[str] = ("store", "sampling", "writer", "replay"),
    code: CodeType | None = None,
) -> bool:
    """Kill a child before its line-th line in these parts of the package; say if it came so far.

    With the `code` of a function, before its line-th line there.
    """
    traced = tuple(str(ROOT / "deepspeed_gear" / part) for part in parts)

    def is_traced(frame: Any) -> bool:
        if code is not None:
            return frame.f_code is code
        return frame.f_code.co_filename.startswith(traced)

    def run() -> None:
        left = line

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if not is_traced(frame):
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        action()

    bound = set(process_bound._living)
    # the child dies in place of this process, with what this one has made
    process_bound._living.clear()
    try:
        status = exit_status(in_child(run))
    finally:
        process_bound._living.update(bound)
    assert status in (0, -signal.SIGKILL)
    return status != 0


def every_death(
    make: Callable[[], StoreScene], act: Callable[[Any, Any], None], stride: int
) -> Iterator[StoreScene]:
    """Yield a store for every stride-th place of death of a peer that attaches and acts."""
    line = 1
    deaths = 0
    while True:
        scene = make()
        died = killed_at(line, lambda scene=scene: act(*scene.attach(1)))  # type: ignore[misc]
        yield scene
        scene.close()
        if not died:
            break
        line = line + stride
        deaths = deaths + 1
    assert deaths * stride > 80, "too few places of death: the trace saw nothing"
