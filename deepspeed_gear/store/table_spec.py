"""Specification of a table: schema, sizes, shard, retention; the regions of its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from deepspeed_gear.data.compressed_rows import CompressedRows
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.media import MediaSpec
from deepspeed_gear.data.statistics.running_moments import Moment, moments_size
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.group_spec import GroupCount, GroupSpec, SlotGroup
from deepspeed_gear.store.memory_layout import Layout, Region
from deepspeed_gear.store.prompt_spec import PromptSpec
from deepspeed_gear.store.records import (
    Control,
    FillClaim,
    MediaPage,
    MomentHead,
    Peer,
    SharedPrompt,
    SlotLink,
    SlotRetention,
)
from deepspeed_gear.store.retention import UNLIMITED, Retention

STALE_BINS = 48  # of lengths of dropped trajectories: powers of two
LEAST_FREE = 32  # a table is compacted while more than one of so many rows is free
MOST_SPARE = 8  # at most one of so many rows is a spare row of compaction
LEAST_LOG = 1024  # changed slots that the log holds, at least
RETURN_TO_GO = "derived/return_to_go"  # region of the derived column; no column can have this name


@dataclass(frozen=True)
class Shard:
    """Shard: the part of a table that a store holds."""

    index: int = 0  # in stored order
    count: int = 1  # shards of the table
    first: int = 0  # ids of the data set's trajectories that it holds: [first, end)
    end: int = 0  # both 0 for a table with a capacity


@dataclass(frozen=True)
class TableSpec:
    name: str
    schema: Schema
    num_slots: int  # trajectories that this store can hold
    # rows per step column of this store: of all its trajectories together, and the spare ones
    num_rows: int
    dataset: Dataset | None  # its contents, if it is a data set
    # Whether the columns lie in shared memory rather than in the data set's mapped files
    in_memory: bool
    return_to_go: bool  # whether to keep the derived column of returns-to-go
    num_peers: int  # processes of the node that attach
    shard: Shard | None = None  # the part of the table that this store holds; None for everything
    # Extra rows of every step column, for rows of trajectories that other nodes hold
    arrival_rows: int = 0
    arrival_slots: int = 0  # extra rows of every column of one row per trajectory, likewise
    num_writers: int = 0  # processes besides these that may attach to write
    retention: Retention = field(default_factory=Retention)  # also the rate limiter
    # The last of the rows, through which extents are moved, longer ones in pieces; no trajectory
    # stays there.
    spare_rows: int = 0  # 0: none is moved
    group: GroupSpec | None = None  # its groups; None: it has none
    # What rollout workers lease; None: processes add any trajectories
    prompts: PromptSpec | None = None
    shares_prompts: bool = False  # whether the prompt of a group is stored once
    # Fields right in whole episodes only: returns-to-go and time steps
    whole_fields: tuple[str, ...] = ()
    normalized: tuple[str, ...] = ()  # columns of which it keeps running moments
    # Items that rows name: media, ragged values; None: there are none
    media: MediaSpec | None = None

    @property
    def own_shard(self) -> Shard:
        """What this store holds; of a table in one store its only shard."""
        return self.shard or Shard()

    @property
    def capacity_rows(self) -> int:
        """Rows that trajectories can fill."""
        return self.num_rows - self.spare_rows

    @property
    def least_free_rows(self) -> int:
        """Rows that must stay free for compaction to cost less than eviction."""
        return self.capacity_rows // LEAST_FREE if self.spare_rows else UNLIMITED

    @property
    def sizes(self) -> dict[str, Any]:
        """Return the sizes, JSON-able, from which `of_capacity` makes it without a config."""
        values = asdict(self)
        for name in ("name", "schema", "dataset", "in_memory"):
            del values[name]
        rate = values["retention"]["rate_limiter"]
        if rate is not None:  # JSON has no infinity
            rate.update(least=repr(rate["least"]), most=repr(rate["most"]))
        return values

    @classmethod
    def of_capacity(cls, name: str, schema: Any, sizes: dict[str, Any]) -> TableSpec:
        kinds = get_type_hints(cls)
        values = {
            part: TypeAdapter(kinds[part]).validate_python(value) for part, value in sizes.items()
        }
        return cls(name, Schema.from_json(schema), dataset=None, in_memory=True, **values)

    @property
    def normalized_columns(self) -> list[Column]:
        return [self.schema[name] for name in self.normalized]

    @property
    def compressed(self) -> Mapping[str, CompressedRows]:
        """Compressed columns of its data set; they stay in the mapped files, and have no region."""
        return {} if self.dataset is None else self.dataset.compressed

    @property
    def has_arrivals(self) -> bool:
        """Whether rows of other nodes are received."""
        return self.arrival_rows > 0 or self.arrival_slots > 0

    @property
    def first_id(self) -> int:
        """Id of the first of the data set's trajectories that the store holds."""
        assert self.dataset is not None
        return self.dataset.first_id if self.shard is None else self.shard.first

    @property
    def held(self) -> slice:
        """The store's trajectories, as a slice of the extents of the data set."""
        assert self.dataset is not None
        first = self.first_id - self.dataset.first_id
        return slice(first, first + self.num_slots)

    def regions(self) -> list[Region]:
        regions = [
            Region("control", "int64", (Control.NUM_WORDS,)),
            Region("peers", "int64", (self.num_peers + self.num_writers, Peer.NUM_WORDS)),
            Region("slots", "int64", (self.num_slots, Slot.NUM_WORDS)),
        ]
        if self.dataset is None:
            regions += [
                Region("links", "int64", (self.num_slots + 2, SlotLink.NUM_WORDS)),
                Region("log", "int64", (max(LEAST_LOG, self.num_slots),)),
                Region("retention", "int64", (self.num_slots, SlotRetention.NUM_WORDS)),
                Region("stale", "int64", (2, STALE_BINS)),
            ]
            late = len(self.schema.late_columns)
            regions.append(
                Region("fill_claims", "int64", (late, self.num_slots + 1, FillClaim.NUM_WORDS))
            )
        if self.normalized:
            shape = 2, Moment.NUM_WORDS, moments_size(self.normalized_columns)
            regions += [
                Region("moments_head", "int64", (MomentHead.NUM_WORDS,)),
                Region("moments", "float64", shape),
            ]
        if self.group is not None:
            regions += [
                Region("groups", "int64", (self.num_slots, SlotGroup.NUM_WORDS)),
                Region("group_counts", "int64", (GroupCount.NUM_WORDS,)),
                Region("consumed_groups", "int64", (self.group.remember,)),
            ]
        if self.prompts is not None:
            regions += self.prompts.regions()
            regions.append(
                Region("shared_prompts", "int64", (self.num_slots, SharedPrompt.NUM_WORDS))
            )
            if self.prompts.is_kept:
                regions.append(Region("group_sizes", "int64", (self.num_slots,)))
        if self.media is not None:
            pages = self.media.num_pages
            size = self.media.page_bytes
            regions.append(Region("media_pages", "int64", (pages, MediaPage.NUM_WORDS)))
            regions.append(Region("media", "uint8", (pages, size)))
        if self.in_memory:
            columns = [column for column in self.schema if column.name not in self.compressed]
            regions += [
                self._region("column", column, self.num_slots, self.num_rows) for column in columns
            ]
        elif self.has_arrivals:
            regions += [self._region("arrival", column, 0, 0) for column in self.schema]
        if self.return_to_go:
            together = self.arrival_rows if self.in_memory else 0
            regions.append(Region(RETURN_TO_GO, "float32", (self.num_rows + together,)))
            if self.has_arrivals and not self.in_memory:
                regions.append(Region(f"arrival/{RETURN_TO_GO}", "float32", (self.arrival_rows,)))
        return regions

    def _region(self, kind: str, column: Column, num_slots: int, num_rows: int) -> Region:
        """Return a column's region: its rows or slots, and after them those for arrivals."""
        rows = (
            num_slots + self.arrival_slots if column.rows == "1" else num_rows + self.arrival_rows
        )
        return Region(f"{kind}/{column.name}", str(column.numpy_dtype), (rows, *column.shape))


def spare_rows_for(retention: Retention, capacity_rows: int, longest_rows: int | None) -> int:
    """Return spare rows: of the longest trajectory, at most 1/MOST_SPARE; 0 without eviction."""
    if retention.eviction == "none":
        return 0
    most = -(-capacity_rows // MOST_SPARE)
    return most if longest_rows is None else min(longest_rows, most)


def table_layout(spec: TableSpec, extra: list[Region], meaning: dict[str, Any]) -> Layout:
    """Return a table's memory layout, with what must be equal in all of its processes."""
    shared = {"table": spec.name, "schema": spec.schema.to_json(), **meaning}
    if spec.shard is not None:
        shared["shard"] = asdict(spec.shard)
    if spec.dataset is None:
        shared["sizes"] = spec.sizes
    return Layout.of([*spec.regions(), *extra], shared)
