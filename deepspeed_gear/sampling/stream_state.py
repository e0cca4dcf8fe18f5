"""State of a batch stream in shared memory: position, ring of selections, repair, checkpoint.

Every process of a node has a `StreamState` over the same memory.
"""

from __future__ import annotations

import threading

import numpy as np
import torch

from deepspeed_gear.data.statistics.running_moments import Moment, moments_size
from deepspeed_gear.ops.constants import SHARD_BITS, UNKNOWN
from deepspeed_gear.ops.records import Resolution, Slot, SlotState
from deepspeed_gear.sampling.batch_admission import LimiterWait, SelectionLimiter
from deepspeed_gear.sampling.batch_sizes import TRAIN
from deepspeed_gear.sampling.priority_masses import PriorityMasses
from deepspeed_gear.sampling.sample_counts import SampleCounts
from deepspeed_gear.sampling.selection import SelectionFailure
from deepspeed_gear.sampling.staleness import Staleness
from deepspeed_gear.sampling.stream_spec import FAILURE_WORDS, StreamSpec
from deepspeed_gear.sampling.sum_tree import AgeMasses, ItemMasses
from deepspeed_gear.store.groups import TableGroups
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.records import NOTHING, Control, Head, Position, SharedPrompt
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import TableSpec

# Words of a resolution that are those of its slot.
_RESOLVED = Resolution.ID, Resolution.GENERATION, Resolution.FIRST_ROW, Resolution.NUM_STEPS
_OF_SLOT = Slot.ID, Slot.GENERATION, Slot.FIRST_ROW, Slot.NUM_STEPS


def masses_type(spec: StreamSpec) -> type[ItemMasses]:
    if spec.priorities is not None:
        return PriorityMasses
    return AgeMasses if spec.by_age else ItemMasses


def stream_regions(spec: StreamSpec, table: TableSpec) -> list[Region]:
    """Return a stream's regions in the store of a table."""
    at = spec.at
    depth = spec.depth
    batch = spec.batch
    most = spec.most_resolutions
    numbers = Moment.NUM_WORDS, moments_size(table.normalized_columns)
    trains = spec.name == TRAIN
    # An epoch whose items may be evicted.
    skips = spec.sampler.walks and not spec.sampler.is_pass and table.dataset is None
    drawn = [
        Region(at + "drawn", "int64", (depth, batch, Resolution.NUM_WORDS)),
        Region(at + "drawn_epochs", "int64", (depth, batch)),
    ]
    return [
        *(drawn if spec.by_group else []),
        *([Region(at + "origins", "int64", (depth, most))] if spec.num_shards > 1 else []),
        *([Region(at + "notice", "int64", (FAILURE_WORDS,))] if spec.together else []),
        Region(at + "position", "int64", (Head.NUM_WORDS,)),
        Region(at + "consumed", "int64", (table.num_peers,)),
        Region(at + "heads", "int64", (depth, Head.NUM_WORDS)),
        Region(at + "ring", "int64", (depth, most, Resolution.NUM_WORDS)),
        Region(at + "epochs", "int64", (depth, most)),
        *(
            [Region(at + "numbers", "float64", (depth + 1, *numbers))]
            if numbers[1] and trains
            else []
        ),
        *masses_type(spec).regions(spec, table),
        *SampleCounts.regions(spec, table),
        *(
            []
            if table.dataset is not None
            else [Region(at + "last_drawn", "int64", (table.num_slots,))]
        ),
        *([Region(at + "walked", "int64", (table.num_slots,))] if skips else []),
    ]


class StreamState:
    """A stream's part of a store. Every method requires the lock, but `initialise` memory not
    linked yet.
    """

    def __init__(self, spec: StreamSpec, table: Table) -> None:
        self.spec = spec
        self.table = table
        self.ops = table.ops
        views = table.views
        at = spec.at
        self.position: np.ndarray = views[at + "position"]
        self.consumed: np.ndarray = views[at + "consumed"]
        self.heads: np.ndarray = views[at + "heads"]
        self.ring_words: np.ndarray = views[at + "ring"]
        self.ring = torch.from_numpy(self.ring_words)
        self.epochs = torch.from_numpy(views[at + "epochs"])
        self.origins = torch.from_numpy(views[at + "origins"]) if spec.num_shards > 1 else None
        #: Running moments that each selection is normalised with, by ring entry, and last those of
        #: the newest one before the ring was emptied; None: no field is. [depth + 1, 6, elements],
        #: float64.
        self.numbers: np.ndarray | None = views.get(at + "numbers")
        # Newest selection of each slot.
        self.last_drawn: np.ndarray | None = views.get(at + "last_drawn")
        #: Generation of each slot when the epoch began; None: its items stay until the end.
        #: [slots], int64.
        self.walked: np.ndarray | None = views.get(at + "walked")
        # Words one by one: with cold caches, as after a batch, a NumPy call takes 10 us and more.
        self.words: memoryview = self.position.data
        self.control: memoryview = table.control.data
        self.head_words: list[memoryview] = [head.data for head in self.heads]
        self.entries = list(zip(self.ring, self.epochs, strict=True))
        # The drawn items of each entry: of groups the leaders, apart from the trajectories in the
        # ring.
        self.drawn_words = self.ring_words
        self.drawn = self.entries
        if spec.by_group:
            self.drawn_words = views[at + "drawn"]
            epochs = torch.from_numpy(views[at + "drawn_epochs"])
            self.drawn = list(zip(torch.from_numpy(self.drawn_words), epochs, strict=True))
        self.stop = threading.Event()  # set by another thread: ends a wait for a selection
        self.failure = SelectionFailure(spec, table) if spec.together else None

        trains_online = spec.name == TRAIN and table.spec.dataset is None
        self.counts = SampleCounts(spec, table) if spec.count_draws else None
        limits_age = (
            table.spec.retention.max_age > 0 or table.spec.retention.version_column is not None
        )
        limits_age |= table.spec.prompts is not None and table.spec.prompts.late == "drop"
        self.staleness = Staleness(table) if trains_online and limits_age else None
        noting = [] if self.counts is None else [self.counts.forget]
        if self.staleness is not None:
            noting.append(self.staleness.note_versions)
        made = masses_type(spec)(spec, table, noting)
        self.masses: ItemMasses = made
        self.priorities = made if isinstance(made, PriorityMasses) else None
        self.reports = None if self.priorities is None else self.priorities.reports
        has_item_masses = spec.priorities is not None or spec.rule.has_weights
        self.has_unit_masses = spec.rule.unit == "step" and not has_item_masses

        self.limiter_wait = wait = LimiterWait(spec.rate_timeout_s)
        self.limiter = (
            SelectionLimiter(spec, table, made, self.position, wait) if trains_online else None
        )
        self.is_limited = self.limiter is not None and not self.limiter.is_plain
        #: Whether a selection may have to wait for items.
        self.may_wait = self.is_limited or table.spec.num_writers > 0
        #: The limiter where all nodes that hold the table decide together.
        asks = self.may_wait or spec.is_optional
        self.joint_limiter = self.limiter if asks and spec.num_shards > 1 else None
        table.recoveries.append(self.recover)

    @property
    def with_priorities(self) -> PriorityMasses:
        assert self.priorities is not None
        return self.priorities

    @property
    def with_ages(self) -> AgeMasses:
        assert isinstance(self.masses, AgeMasses)
        return self.masses

    def ask(self, number: int) -> None:
        """Record that this process requests a global batch: its later priorities belong to that
        one.
        """
        if self.reports is not None:
            self.reports.ask(number)

    def initialise(self) -> None:
        """Set masses and position in new memory, before it is linked."""
        self.heads[:, Head.NUMBER] = self.position[Position.AHEAD] = NOTHING
        if self.last_drawn is not None:
            self.last_drawn[:] = NOTHING
        self.masses.initialise()

    def recover(self) -> None:
        """Repair the stream after a process died inside the store."""
        self.position[Position.AHEAD] = NOTHING
        self.position[Position.RECOVERED] = self.table.control[Control.RECOVERIES]
        if self.limiter is not None and self.limiter.most:
            self.limiter.evict_used_up()
        self.masses.recover()
        newest = int(self.heads[:, Head.NUMBER].argmax())
        number = self.heads[newest, Head.NUMBER]
        if number >= self.position[Head.NUMBER] and number != NOTHING:
            self.advance(newest)

    def catch_up(self) -> None:
        """Repair the stream if a process without streams has recovered the store after a death."""
        if self.words[Position.RECOVERED] != self.control[Control.RECOVERIES]:
            self.recover()

    def advance(self, entry: int) -> None:
        """Move the position after a committed selection."""
        head = self.head_words[entry]
        words = self.words
        words[1 : Head.NUM_SET] = head[1 : Head.NUM_SET]
        words[Position.DONE] = 0
        words[Head.NUMBER] = head[Head.NUMBER] + 1

    @property
    def newest_numbers(self) -> np.ndarray:
        """The running moments that the newest selection is normalised with, a view. [6,
        elements].
        """
        assert self.numbers is not None
        number = self.words[Head.NUMBER] - 1
        entry = number % self.spec.depth
        return np.asarray(
            self.numbers[entry if self.head_words[entry][Head.NUMBER] == number >= 0 else -1]
        )

    def pin(self, number: int, resolutions: torch.Tensor) -> None:
        """Keep the rows of sampled items (of leaders: their groups, [n, 8]) until all have released
        them.
        """
        if self.last_drawn is not None:
            slots = resolutions[:, Resolution.SLOT].numpy()
            if self.spec.by_group:
                self.groups.note_drawn(slots)
                slots, _ = self.groups.trajectories(slots)
            self.last_drawn[slots] = number

    def evicted(self, slots: np.ndarray) -> np.ndarray:
        """Return which slots' items of the epoch were evicted since it began. [n] -> [n], bool."""
        if self.walked is None:
            return np.zeros(len(slots), bool)
        records = self.table.slots[slots]
        is_same = records[:, Slot.GENERATION] == self.walked[slots]
        return np.asarray(~is_same | (records[:, Slot.STATE] != SlotState.COMMITTED))

    def members(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return resolutions of the groups of leaders, [n, 8] -> [m, 8], and each one's group."""
        slots, item = self.groups.trajectories(drawn[:, Resolution.SLOT])
        resolutions = np.zeros((len(slots), Resolution.NUM_WORDS), np.int64)
        resolutions[:, Resolution.SLOT] = slots
        resolutions[:, _RESOLVED] = self.table.slots[slots][:, _OF_SLOT]
        for word in (Resolution.MASS, Resolution.SAMPLE_NUMBER):
            resolutions[:, word] = drawn[item, word]
        # Steps of the whole trajectory, and the shared ones.
        if self.table.shared_prompts is not None:
            resolutions[:, Resolution.ANCHOR] = shared = self.table.shared_prompts[
                slots, SharedPrompt.STEPS
            ]
            resolutions[:, Resolution.NUM_STEPS] += shared
        return resolutions, item

    def expand(self, entry: int, count: int) -> int:
        """Write the trajectories of the `count` drawn groups to a ring entry; return
        their number.
        """
        resolutions, item = self.members(self.drawn_words[entry, :count])
        self.ring_words[entry, : len(resolutions)] = resolutions
        self.entries[entry][1][: len(resolutions)] = self.drawn[entry][1][torch.from_numpy(item)]
        return len(resolutions)

    @property
    def groups(self) -> TableGroups:
        assert self.table.groups is not None
        return self.table.groups

    @property
    def skipped_slots(self) -> np.ndarray:
        """Slots that hold no trajectory, but whose evicted items the epoch still counts. [n],
        int64.
        """
        if self.walked is None:
            return np.empty(0, np.int64)
        is_held = np.isin(self.table.slots[:, Slot.STATE], (SlotState.COMMITTED, SlotState.EVICTED))
        return np.nonzero((self.masses.leaves > 0) & ~is_held)[0]

    def end_epoch(self) -> None:
        """End the epoch: changes that wait for its end take effect at the next selection."""
        sampler = self.spec.sampler
        position = self.position
        if sampler.walks and not sampler.is_pass and position[Head.EPOCH_SIZE]:
            position[Head.EPOCH] += 1
            position[Position.DONE] = 0
            position[Head.EPOCH_FIRST] = position[Head.SAMPLES]
            position[Head.EPOCH_SIZE] = 0

    def seek(
        self, number: int, samples: int, epoch: int, first: int, size: int, *, fresh: bool = False
    ) -> None:
        """Set the position to a global batch; its epoch ends if masses stay (not `fresh`) of
        another.
        """
        ends = not fresh and self.walked is not None and epoch != self.position[Head.EPOCH]
        if self.numbers is not None:
            self.numbers[-1] = self.newest_numbers
        self.control[Control.QUOTA] = 0  # until the nodes have had a round for new quotas
        self.heads[:, Head.NUMBER] = NOTHING
        if self.last_drawn is not None:
            self.last_drawn[:] = NOTHING
        self.consumed[:] = number
        if self.priorities is not None:
            self.priorities.restart(number)
        self.position[Position.DONE] = 0
        self.position[Position.AHEAD] = NOTHING
        words = [
            Head.NUMBER,
            Head.SAMPLES,
            Head.EPOCH,
            Head.EPOCH_FIRST,
            Head.EPOCH_SIZE,
            Head.TOTAL,
        ]
        self.position[words] = (number, samples, epoch, first, size, size)
        if ends:
            self.end_epoch()

    # ---- in a checkpoint -------------------------------------------------------------------------
    #
    # Where several nodes hold the table, each saves its own samples of every selection; the others
    # have the id -1. Priority updates are saved unchanged, with their shard, since they may be of
    # any.

    def export(self, slots: np.ndarray, since: int) -> dict[str, np.ndarray]:
        """Return masses of ascending slots, position, and unused selections, of batches from
        `since` on.
        """
        self.catch_up()
        unused = np.nonzero(self.heads[:, Head.NUMBER] >= since)[0]
        if self.origins is not None and self.spec.sampler.is_pass:
            unused = unused[:0]  # a pass begins again
        ring = self.ring_words[unused].copy()
        own = drawn = np.arange(self.spec.most_resolutions) < self.heads[unused, Head.COUNT, None]
        ring[~drawn] = 0
        # This store's samples keep their words, those of others the id UNKNOWN.
        if self.origins is not None:
            origins = self.origins.numpy()[unused]
            index = self.table.spec.own_shard.index
            own = drawn & (ring[..., Resolution.ID] != UNKNOWN) & (origins >> SHARD_BITS == index)
            ring[own, Resolution.SLOT] = origins[own] & ((1 << SHARD_BITS) - 1)
            ring[drawn & ~own] = 0
            ring[drawn & ~own, Resolution.ID] = UNKNOWN
        sampled = ring[own][:, Resolution.SLOT]
        is_held = self.table.slots[sampled, Slot.GENERATION] == ring[own][:, Resolution.GENERATION]
        if not (is_held & np.isin(sampled, slots)).all():
            # their rows were freed: these batches cannot be gathered
            unused = unused[:0]
            ring = ring[:0]
        ring[..., Resolution.SLOT] = np.searchsorted(slots, ring[..., Resolution.SLOT])
        return {
            **self.masses.export(slots),
            **({} if self.counts is None else self.counts.export(slots)),
            **({} if self.walked is None else {"walked": self.walked[slots]}),
            "position": self.position[: Head.NUM_SET].copy(),
            "heads": self.heads[unused],
            "ring": ring,
            "epochs": self.epochs.numpy()[unused],
            **({} if self.numbers is None else {"numbers": self.numbers[unused]}),
            **({} if self.numbers is None else {"newest_numbers": self.newest_numbers}),
        }

    def restore(self, slots: np.ndarray, content: dict[str, np.ndarray]) -> None:
        """Restore what `export` returned; the table's slots are restored already.

        Unused selections are kept if the batch size is the same and the ring large enough; over
        several nodes the caller writes them (`keep_selections`). Trajectories of a data set after
        `slots` are new.
        """
        self.masses.restore(slots, content)
        if self.table.spec.dataset is not None:
            new = np.arange(len(slots), len(self.table.slots))
            self.masses.queue(new, self.masses.of(new))
        if self.counts is not None:
            self.counts.restore(slots, content)
        if self.walked is not None:
            self.walked[slots] = content["walked"]
            if content["position"][Head.EPOCH] != self.position[Head.EPOCH]:  # has other masses
                self.end_epoch()
        self.position[Position.AHEAD] = NOTHING
        if self.numbers is not None:
            self.numbers[-1] = content["newest_numbers"]
        if self.origins is not None or not self.keeps_selections(content):
            return
        ring = content["ring"]
        ring[..., Resolution.SLOT] = slots[ring[..., Resolution.SLOT]]
        ring[..., Resolution.FIRST_ROW] = self.table.slots[
            ring[..., Resolution.SLOT], Slot.FIRST_ROW
        ]
        self.ring_words[content["heads"][:, Head.NUMBER] % self.spec.depth] = ring
        self.keep_selections(content)

    def keeps_selections(self, content: dict[str, np.ndarray]) -> bool:
        """Return whether the stream keeps the unused selections of a checkpoint."""
        heads = content["heads"]
        ring = content["ring"]
        return ring.shape[1] == self.spec.most_resolutions and 0 < len(heads) <= self.spec.depth

    def keep_selections(self, content: dict[str, np.ndarray]) -> None:
        """Set the position after restored selections, whose samples are in the ring."""
        heads = content["heads"]
        entries = heads[:, Head.NUMBER] % self.spec.depth
        self.heads[entries] = heads
        self.epochs.numpy()[entries] = content["epochs"]
        if self.numbers is not None:
            self.numbers[entries] = content["numbers"]
        self.position[: Head.NUM_SET] = content["position"]
        if self.origins is not None or self.last_drawn is None:
            return
        for entry, head in zip(entries.tolist(), heads, strict=True):
            pinned = self.ring_words[entry, : int(head[Head.COUNT]), Resolution.SLOT]
            self.last_drawn[pinned] = int(head[Head.NUMBER])
