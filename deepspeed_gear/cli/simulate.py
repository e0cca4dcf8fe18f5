"""`gear simulate`: predict the throughput, lag, dropped work and length bias of rollout workers.

Compares the config's rule of order and slow groups with the other rules. The simulation runs the
ledger of a table with prompts, which admits, orders and drops groups; only time, lengths and
trajectories are simulated. The members of a prompt are generated at the same time.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from deepspeed_gear.cli import Options, grid_of
from deepspeed_gear.config import gear_config, parse
from deepspeed_gear.config.gear_config import GearConfig
from deepspeed_gear.errors import ConfigError, LeaseExpiredError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.replay.packed.pack_preview import read_lengths
from deepspeed_gear.store.group_spec import SlotGroup
from deepspeed_gear.store.prompt_ledger import LeaseRecord, PromptLedger
from deepspeed_gear.store.prompt_spec import Left, PromptSpec
from deepspeed_gear.store.records import Head

OPTIONS: Options = {
    "CONFIG": "a ds_config with a gear section that has prompts, or the section",
    "--lengths L": (
        "tokens of responses: a file, one a line or .npy; or lognormal:MEDIAN,SIGMA",
        {"required": True},
    ),
    "--latency S": (
        "seconds a token, of all prompts of a worker",
        {"type": float, "default": 0.02},
    ),
    "--workers N": ("rollout workers", {"type": int, "default": 1}),
    "--concurrency N": ("prompts that a worker generates at once", {"type": int, "default": 16}),
    "--train S": ("seconds in which all ranks train 1,000 tokens", {"type": float, "default": 0.1}),
    "--batches N": ("rollout batches to train", {"type": int, "default": 100}),
    "--json": "print JSON",
}
RULES = (("lease", "wait"), ("completion", "wait"), ("completion", "drop"))
Lengths = Callable[[int], np.ndarray]  # of the responses to a prompt, by its number


@dataclass(frozen=True)
class Pace:
    """The speed of a run: seconds per generated and per trained token, and places of workers."""

    latency_s: float
    train_s: float
    workers: int
    concurrency: int


@dataclass(frozen=True)
class Prediction:
    """The predicted results of one rule of order and slow groups."""

    order: str
    late: str
    tokens_per_s: float  # trained
    learner_idle: float  # share of the time
    workers_idle: float
    mean_lag: float  # rollout batches
    largest_lag: int
    dropped: float  # share of the generated tokens
    # Mean length of the trained responses, divided by that of all leased ones, minus 1.
    length_bias: float


def run(args: argparse.Namespace) -> int:
    """Print the predictions for every rule."""
    spec, size = read_spec(parse(gear_config.read(args.config)[0]))
    pace = Pace(args.latency, args.train / 1000, args.workers, args.concurrency)
    for name, value in (
        ("--batches", args.batches),
        *((f"--{k}", v) for k, v in asdict(pace).items()),
    ):
        if not 0 < value < np.inf:
            raise ConfigError(
                name.removesuffix("_s"),
                "must be positive and finite",
                value,
                "choose a positive number",
            )
    lengths = lengths_of(args.lengths, spec.seed, size)
    rules = [replace(spec, order=order, late=late) for order, late in RULES]
    predictions = [simulate(rule, lengths, pace, args.batches) for rule in rules]
    if args.json:
        print(json.dumps([asdict(one) for one in predictions], indent=1))
        return 0
    heads = [
        "order",
        "late",
        "tokens/s",
        "learner idle",
        "workers idle",
        "lag",
        "largest",
        "dropped",
        "bias",
    ]
    rows = []
    for one in predictions:
        late = one.late + (" (config)" if (one.order, one.late) == (spec.order, spec.late) else "")
        idle = [f"{one.learner_idle:.0%}", f"{one.workers_idle:.0%}"]
        lag = [f"{one.mean_lag:.2f}", str(one.largest_lag)]
        speed = f"{one.tokens_per_s:,.0f}"
        lost = [f"{one.dropped:.1%}", f"{one.length_bias:+.1%}"]
        rows.append([one.order, late, speed, *idle, *lag, *lost])
    print("\n".join(grid_of(heads, rows, num_left=2)))
    return 0


def read_spec(config: GearConfig) -> tuple[PromptSpec, int]:
    """Return the prompts of a config's table, without their data set, and a group's members."""
    for name, table in config.resolved_tables.items():
        if (
            table.prompts is not None
            and table.group is not None
            and config.rollout_size is not None
        ):
            options = table.prompts.model_dump(exclude={"data", "where", "column", "sampler"})
            options |= {
                "groups": config.rollout_size.size,
                "size": table.group.size,
                "seed": config.seed,
            }
            return PromptSpec(
                name, "", num_prompts=1 << 40, random_key=0, **options
            ), table.group.size
    raise ConfigError(
        "gear.tables", "must have a table with prompts", None, "give its prompts.data"
    )


def lengths_of(given: str, seed: int, size: int) -> Lengths:
    """Return the lengths of a prompt's responses, sampled from a file or log-normal."""
    if not given.startswith("lognormal:"):
        known = read_lengths(Path(given))
        return functools.cache(
            lambda number: np.random.default_rng([seed, number]).choice(known, size)
        )
    with ConfigError.on(
        "--lengths",
        "must have two numbers after lognormal:",
        ValueError,
        value=given,
        remedy="for example lognormal:600,0.8",
    ):
        median, sigma = (float(part) for part in given.removeprefix("lognormal:").split(","))
        if not (0 < median < np.inf and 0 <= sigma < np.inf):
            raise ValueError("a median above 0, and a deviation of at least 0")

    @functools.cache
    def draw(number: int) -> np.ndarray:
        lengths = np.random.default_rng([seed, number]).lognormal(np.log(median), sigma, size)
        return lengths.clip(1, 1 << 31).astype(np.int64)

    return draw


class Scene:
    """A prompt ledger with the store words that it reads: one slot per group, a rank, a clock."""

    def __init__(self, spec: PromptSpec) -> None:
        self.now = 0.0
        num_slots = spec.num_entries + spec.groups
        views = {region.name: np.zeros(region.shape, region.dtype) for region in spec.regions()}
        self.slots = views["slots"] = np.zeros((num_slots, Slot.NUM_WORDS), np.int64)
        self.words = views["groups"] = np.zeros((num_slots, SlotGroup.NUM_WORDS), np.int64)
        self.position = views["stream/train/position"] = np.zeros(Head.NUM_WORDS, np.int64)
        self.consumed = views["stream/train/consumed"] = np.zeros(1, np.int64)
        self.numbers = np.zeros(num_slots, np.int64)
        memory: Any = SimpleNamespace(peer=0, is_alive=lambda _: True)
        self.ledger = PromptLedger(spec, views, self.numbers, memory, lambda: int(self.now * 1e9))
        self.num_committed = 0
        self.dropped = list[int]()  # numbers of groups that were too old

    @property
    def num_selected(self) -> int:
        return int(self.position[Head.NUMBER])

    def commit(self, lease: LeaseRecord) -> None:
        """Commit the group of a lease, unless the lease has expired."""
        try:
            free = np.nonzero(self.slots[:, Slot.STATE] == SlotState.FREE)[0]
            with self.ledger.committing(lease, free[:1]):
                slot = int(free[0])
                self.num_committed += 1
                self.numbers[slot] = lease.number
                self.words[slot, SlotGroup.NUMBER] = self.num_committed
                self.slots[slot, Slot.STATE] = SlotState.COMMITTED
        except LeaseExpiredError:
            self.dropped.append(lease.number)

    def select(self) -> list[int]:
        """Return the numbers of the next rollout batch; none if it must wait."""
        spec = self.ledger.spec
        held = np.nonzero(self.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        if spec.late == "drop":
            is_old = self.ledger.too_old(held, self.num_selected)
            self.dropped += self.numbers[held[is_old]].tolist()
            self.slots[held[is_old], Slot.STATE] = SlotState.FREE
            held = held[~is_old]
        chosen = self.ledger.in_order(held)[: spec.groups]
        if len(chosen) < spec.groups:
            return []
        self.position[Head.NUMBER] += 1
        self.ledger.leave(self.numbers[chosen], Left.DRAWN)
        self.slots[chosen, Slot.STATE] = SlotState.FREE
        numbers: list[int] = self.numbers[chosen].tolist()
        return numbers


def simulate(spec: PromptSpec, lengths: Lengths, pace: Pace, batches: int) -> Prediction:
    """Predict the results of a rule over a number of rollout batches.

    Workers renew their leases in time, so leases never expire for their age.
    """
    scene = Scene(replace(spec, lease_s=1e9))
    places = free = pace.workers * pace.concurrency
    # A heap of ends: time, token, and the lease that ends; None for the training of a batch.
    events: list[tuple[float, int, LeaseRecord | None]] = []
    versions = dict[int, int]()
    lags = list[int]()
    trained = list[int]()
    generating_s = training_s = 0.0
    is_training = False
    while len(trained) < batches * spec.groups:
        for lease in scene.ledger.lease(free):
            free -= 1
            versions[lease.number] = lease.version
            end = scene.now + lengths(lease.number).max() * pace.latency_s
            heapq.heappush(events, (end, lease.token, lease))
        numbers = [] if is_training else scene.select()
        if numbers:
            lags += [scene.num_selected - 1 - versions[number] for number in numbers]
            trained += numbers
            took = sum(int(lengths(number).sum()) for number in numbers) * pace.train_s
            heapq.heappush(events, (scene.now + took, 0, None))
            training_s += took
            is_training = True
            continue
        # Nothing else can happen before the next end.
        before = scene.now
        scene.now, _, ended = heapq.heappop(events)
        generating_s += (places - free) * (scene.now - before)
        if ended is None:
            scene.consumed[0] += 1
            is_training = False
        else:
            free += 1
            scene.commit(ended)
    # The training of the last batch has only begun; the rest of it counts too.
    seconds = scene.now + sum(end - scene.now for end, _, lease in events if lease is None)
    generated = {number: lengths(number) for number in versions}
    tokens = sum(int(generated[number].sum()) for number in trained)
    dropped = sum(int(generated[number].sum()) for number in scene.dropped)
    of_trained, of_all = (
        float(np.mean([generated[number] for number in numbers])) for numbers in (trained, versions)
    )
    return Prediction(
        spec.order,
        spec.late,
        tokens_per_s=tokens / seconds,
        learner_idle=1 - training_s / seconds,
        workers_idle=1 - generating_s / (places * max(scene.now, 1e-9)),
        mean_lag=float(np.mean(lags)),
        largest_lag=max(lags),
        dropped=dropped / (dropped + tokens),
        length_bias=of_trained / of_all - 1,
    )
