"""Preview of batches of windows: each rank's first micro batch, and the bytes between nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.gather import N_STEP_DTYPES
from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.config.field_names import N_STEP_NAMES
from deepspeed_gear.config.resolved_field import read_fields
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.shard_placement import shards_of
from deepspeed_gear.distributed.topology import RankCoordinates, rank_grid
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.replay.replay import Replay
from deepspeed_gear.row_exchange import exchange_plan
from deepspeed_gear.row_exchange.exchange_plan import ReadNeeds
from deepspeed_gear.sampling.batch_sizes import BatchInfo

FIRST_IDS = 4
T = TypeVar("T")


@dataclass(frozen=True)
class RankPreview:
    """The first micro batch of a rank."""

    rank: int
    node: int
    place: RankCoordinates
    shapes: dict[str, tuple[int, ...]]
    num_bytes: int  # with padding
    padding: float  # fraction of its rows
    ids: list[int]  # trajectories of its first samples


@dataclass(frozen=True)
class Preview:
    """The first micro batches of all ranks."""

    info: BatchInfo
    ranks: list[RankPreview]
    #: Bytes of rows sent from a node (first axis) to another one for the first global batch.
    traffic: np.ndarray  # [nodes, nodes], int64
    digests: list[int]  # of the first global batches; those of `gear.verify_every` in a run
    steps: list[str]  # of the construction of the replay, in their order


class NamedSteps(ControlPlane):
    """A control plane that keeps the names of the steps that run over it."""

    def __init__(self) -> None:
        super().__init__()
        self._names: list[str] = []

    def all_results(self, what: str, action: Callable[[], T]) -> list[T]:
        self._names.append(what)
        return super().all_results(what, action)

    def names(self) -> list[str]:
        """Return the names in the order of the steps; equal neighbours are one."""
        return [name for name, _ in groupby(self._names)]


def preview(
    config: GearConfig,
    micro: int,
    accumulation: int,
    worlds: Mapping[str, int],
    num_nodes: int,
    batches: int,
) -> Preview:
    """Compute the first micro batch of every rank; nodes have equal numbers of ranks, in order."""
    places = rank_grid(worlds)
    if len(places) % num_nodes:
        raise ConfigError(
            "nodes", f"must divide the {len(places)} ranks", num_nodes, "change nodes or ranks"
        )
    nodes = [rank * num_nodes // len(places) for rank in range(len(places))]
    for table in config.sampled_tables:
        if config.resolved_tables[table].data is None:
            remedy = "there is nothing to draw"
            raise ConfigError(
                f"gear.tables.{table}", "must hold a data set for a preview", None, remedy
            )
    info = BatchInfo.at(places[0], micro, accumulation)
    alone = {
        "batch_size": info.global_batch,
        "micro_batch_size": None,
        "gradient_accumulation_steps": 1,
    }
    section = {**config.to_json(), **alone, "prefetch": 0, "verify_every": 1}
    given = {name: value for name, value in section.items() if value is not None}
    control_plane = NamedSteps()
    with Replay(given, control_plane) as replay:
        steps = control_plane.names()
        needs = {p: exchange_plan.needs_of(p, replay.config, replay.fields) for p in places}
        digests: list[int] = []
        for number in range(batches):
            batch = replay.sample()
            if number == 0:
                ranks = [_rank(r, nodes[r], p, needs[p], batch, info) for r, p in enumerate(places)]
                traffic = _traffic(needs, nodes, replay, batch, info)
            assert replay.metrics.digest is not None
            digests.append(replay.metrics.digest[1])
    return Preview(info, ranks, traffic, digests, steps)


def _rank(
    rank: int, node: int, place: RankCoordinates, needs: ReadNeeds, batch: Batch, info: BatchInfo
) -> RankPreview:
    part = slice(place.data_rank, None, info.num_micro_batches)
    shapes = {}
    num_bytes = 0
    real = 0
    rows = 0
    for field in needs.fields:
        mask = _mask(batch, field)[part]
        tensor = batch[field.name]
        time = () if field.length is None else (mask.shape[1],)
        shape = (info.micro, *time, *tensor.shape[1 + len(time) :])
        real += int(mask.sum())
        rows += mask.numel()
        if field.mask_only:
            shapes[f"mask.{field.name}"] = shape[: 1 + len(time)]
        else:
            shapes[field.name] = shape
            num_bytes += math.prod(shape) * tensor.element_size()
    if needs.n_step:
        shapes |= dict.fromkeys(N_STEP_NAMES, (info.micro,))
        num_bytes += sum(dtype.itemsize for dtype in N_STEP_DTYPES) * info.micro
    ids = batch.trajectory_id[part][:FIRST_IDS].tolist() if place.reads else []
    return RankPreview(rank, node, place, shapes, num_bytes, 1 - real / rows if rows else 0.0, ids)


def _mask(batch: Batch, field: ResolvedField) -> torch.Tensor:
    """Return which rows of a field's part are real. [B, rows], bool."""
    mask = batch.mask[field.name].reshape(batch.num_samples, -1)
    count = mask.shape[1] if field.part_length is None else field.part_length
    return mask[:, field.part_first : field.part_first + count]


def _traffic(
    needs: Mapping[RankCoordinates, ReadNeeds],
    nodes: Sequence[int],
    replay: Replay,
    batch: Batch,
    info: BatchInfo,
) -> np.ndarray:
    """Count the bytes of rows that nodes receive; a node gets a row once for all its readers."""
    places = list(needs)
    num_nodes = nodes[-1] + 1
    consuming = sorted({n for n, place in zip(nodes, places, strict=True) if place.reads})
    source = batch.source.numpy()
    ids = batch.trajectory_id.numpy()
    # Index, among the nodes that read, of the one that holds each trajectory; then the node.
    held = np.zeros(len(ids), np.int64)
    for index, table in enumerate(replay.config.sampled_tables):
        dataset = replay.datasets[table]
        mine = source == index
        bounds = shards_of(dataset.lengths * dataset.schema.row_bytes, len(consuming))
        held[mine] = np.searchsorted(bounds, ids[mine], side="right") - 1
    held = np.array(consuming)[np.minimum(held, len(consuming) - 1)]
    sent = np.zeros((num_nodes, num_nodes), np.int64)
    # With 2 replicas and 4 micro batches, sample 7 belongs to micro batch 3 and so to replica 1.
    replica = np.arange(batch.num_samples) % info.num_micro_batches % info.data_world
    readers: dict[tuple[int, int], list[ReadNeeds]] = {}  # of each replica on each node
    for place, node in zip(places, nodes, strict=True):
        if place.reads:
            readers.setdefault((place.data_rank, node), []).append(needs[place])
    for (index, node), read in readers.items():
        fields = {field for each in read for field in each.fields}
        opaque = {field for each in read for field in each.opaque}
        size = np.full(batch.num_samples, sum(map(_row_bytes, opaque)), np.int64)
        for field in fields:
            size += _mask(batch, field).sum(1).numpy() * _row_bytes(field)
        lacking = (replica == index) & (held != node)
        np.add.at(sent[:, node], held[lacking], size[lacking])
    return sent


def _row_bytes(field: ResolvedField) -> int:
    """Return the bytes of a stored row; values derived from the slot alone are not sent."""
    if field.mask_only:
        return 0
    if field.inputs:
        return sum(map(_row_bytes, read_fields([field])))
    if field.column is not None:
        return field.column.row_bytes
    return 4 if field.derived == "return_to_go" else 0
