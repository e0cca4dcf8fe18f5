"""Preview: micro batches and packs of every rank, computed by one process from a run's plan."""

from __future__ import annotations

import math
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.gather import N_STEP_DTYPES
from deepspeed_gear.batching.packing_plan import PlannedPacks
from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.config.cross_checks import check_ranks
from deepspeed_gear.config.field_names import N_STEP_NAMES
from deepspeed_gear.config.resolved_field import read_fields
from deepspeed_gear.config.sampler_options import SHARES_TOLERANCE
from deepspeed_gear.config.table_options import TableConfig
from deepspeed_gear.data.dataset_files import check_no_pointer
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.shard_placement import shards_of
from deepspeed_gear.distributed.topology import RankCoordinates, rank_grid
from deepspeed_gear.errors import ConfigError, DataError, show_bytes
from deepspeed_gear.ops import load_backend
from deepspeed_gear.plan.table_sizes import capacity_of
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


def read_lengths(path: Path) -> np.ndarray:
    """Read lengths from an .npy file of integers, or a text file of one a line; else DataError."""
    kinds = OSError, ValueError, OverflowError
    with DataError.on(
        f"lengths {path}",
        "must be a file of whole numbers",
        *kinds,
        remedy="write one integer a line, or save an integer array as .npy",
    ):
        if path.exists() and not path.is_file():
            raise DataError(
                f"lengths {path}",
                "must be a file",
                stat.filemode(path.stat().st_mode),
                "give a text file or an .npy file",
            )
        check_no_pointer(path)
        if path.suffix == ".npy":
            lengths: np.ndarray = np.lib.format.open_memmap(path, mode="r")
        else:
            with path.open("rb") as file:  # by its name, NumPy would decompress it to any size
                lengths = np.loadtxt(file, ndmin=1)  # as an integer, 1.5 is 1 with older NumPy
            lengths = lengths.astype(np.int64) if (lengths % 1 == 0).all() else lengths
    is_whole = lengths.ndim == 1 and lengths.dtype.kind in "iu"
    if not is_whole or not len(lengths) or lengths.min() < 1:
        form = f"{lengths.dtype} {lengths.shape}"
        raise DataError(
            f"lengths {path}",
            "must be whole numbers of at least 1",
            form,
            "write one integer a line, or save an integer array as .npy",
        )
    return lengths.astype(np.int64)


def pack_preview(
    config: GearConfig, lengths: np.ndarray, replicas: int, sequence: int = 1
) -> dict[str, int | float]:
    """Plan the packs of one optimizer step over all ranks, for trajectories of given lengths.

    Args:
        config: The gear section.
        lengths: Number of steps of each trajectory. [n], int64.
        replicas: Number of replicas.
        sequence: Number of sequence ranks of a replica.
    Returns:
        The document of `gear preview --lengths --json`.
    """
    pack = config.pack
    if pack is None:
        remedy = 'give "pack": {"tokens": ...}, or leave --lengths out'
        raise ConfigError("gear.pack", "must be given for a preview of lengths", None, remedy)
    check_ranks(config, replicas, sequence, 1)
    most = pack.room
    longest = int(lengths.max())
    if pack.too_long == "refuse" and longest > most:
        rule = f"must hold the longest trajectory ({longest} steps)"
        raise ConfigError(
            "gear.pack.tokens", rule, pack.tokens, 'raise it, or set "too_long": "truncate"'
        )
    packed = np.minimum(lengths, most)
    planned = PlannedPacks(packed, pack, replicas, load_backend("auto").on_host())
    of_rank = planned.costs.sum(axis=(0, 2))
    tokens = int(packed.sum())
    rows = int(planned.rows.sum())
    steps = planned.per_rank
    return {
        "trajectories": len(lengths),
        "tokens": tokens,
        "longest": longest,  # steps of the longest trajectory
        # Trajectories of which only the first steps are trained.
        "truncated": int((lengths > most).sum()),
        "micro_batches": planned.plan.num_micro_steps * steps,  # K of every rank
        # The least K that any plan could have.
        "bound": -(-tokens // (most * planned.plan.width)) * steps,
        "rows": rows,  # places of all micro batches, padding included
        # Cost of the slowest rank in each micro step, summed, or in all / the mean, minus 1.
        "step_imbalance": planned.imbalance,
        "rank_imbalance": float(of_rank.max() * replicas / of_rank.sum() - 1),
        "fill": tokens / rows,  # part of the places that hold a trajectory's step
        "knows_prompts": int(pack.prefix == "own"),  # 0: each trajectory has one of its own
    }


def rollout_preview(
    config: GearConfig, replicas: int, sequence: int, stages: int
) -> dict[str, Any]:
    """Describe packed batches without lengths; the document of `gear preview --json`."""
    pack = config.pack
    size = config.rollout_size
    assert pack is not None
    assert size is not None
    check_ranks(config, replicas, sequence, stages)
    tables = {name: config.resolved_tables[name] for name in config.sampled_tables}
    is_mixed = len({config.sampler_of(name).unit for name in tables}) > 1
    return {
        # "items" are groups of some tables and trajectories of others.
        "unit": "items" if is_mixed else size.unit,
        "items": size.size,  # of a rollout batch, the most where it has a number of tokens
        "trajectories": _most_trajectories(config, size.size),
        "tokens": size.tokens,  # most of a rollout batch; null: of any number
        "epochs": size.epochs,
        "minibatches": size.minibatches,
        "optimizer_steps": size.epochs * size.minibatches,  # of a rollout batch
        "replicas": replicas,
        "pack_tokens": pack.room,  # most steps of a micro batch
        "rank_tokens": pack.room // sequence,  # of them each sequence rank has so many
        "tables": {name: _table_preview(config, name, table) for name, table in tables.items()},
    }


def _most_trajectories(config: GearConfig, items: int) -> int:
    """Return the most trajectories that a rollout batch of so many items has."""
    most = {name: config.resolved_tables[name].most_trajectories for name in config.sampled_tables}
    shares = {name: config.share_of(name) for name in most}
    count = 0
    for name, share in shares.items():
        if share is None:  # a schedule
            return items * max(most.values())
        count += math.ceil(share * items - SHARES_TOLERANCE * items) * most[name]
    return count


def _table_preview(config: GearConfig, name: str, table: TableConfig) -> dict[str, Any]:
    if table.data is not None:
        return {"data": table.data.path}
    sizes: dict[str, Any] = {"max_length": table.max_length}
    if table.schema is not None:
        steps, slots = capacity_of(name, table, table.schema, 1)
        sizes |= {"steps": steps, "trajectories": slots, "bytes": steps * table.schema.row_bytes}
    if table.prompts is not None and config.rollout_size is not None:
        share = config.share_of(name) or 0
        sizes["prompts"] = round((table.prompts.max_lag + 1) * config.rollout_size.size * share)
        sizes["prompt_sampler"] = table.prompts.sampler
        sizes["prompt_conditions"] = [*table.prompts.where]
    return sizes


def format_rollout_preview(document: Mapping[str, Any]) -> Sequence[str]:
    """Return the lines that `gear preview` prints of packed batches without lengths."""
    size = "{items:,} {unit}" + (
        ", {trajectories:,} trajectories" if document["unit"] != "trajectories" else ""
    )
    if document["tokens"] is not None:
        size = "at most " + size + " and {tokens:,} tokens"
    each = (
        ""
        if document["rank_tokens"] == document["pack_tokens"]
        else ", {rank_tokens:,} of each sequence rank"
    )
    lines = [
        f"rollout batch: {size}",
        "its optimizer steps: {optimizer_steps} (epochs {epochs}, minibatches {minibatches})",
        f"micro batches of each of {{replicas}} replicas: packs of at most {{pack_tokens:,}} "
        f"tokens{each}",
    ]
    lines = [line.format(**document) for line in lines]
    for name, table in document["tables"].items():
        parts = []
        if "data" in table:
            parts.append(f"the data set {table['data']}")
        if "steps" in table:
            holds = f"{table['trajectories']:,} trajectories and {table['steps']:,} steps"
            parts.append(f"{holds} on all nodes, {show_bytes(table['bytes'])}")
        if table.get("max_length") is not None:
            parts.append(f"at most {table['max_length']:,} steps each")
        if "prompts" in table:
            parts.append(f"{table['prompts']:,} prompts leased or waiting at once")
            if table["prompt_conditions"]:
                parts.append(f"prompts left out by {', '.join(table['prompt_conditions'])}")
            if table["prompt_sampler"] != "epoch":
                once = ", each once an epoch" if table["prompt_sampler"] != "prioritized" else ""
                parts.append(f"drawn by priority{once}")
        lines.append(f"table {name}: {', '.join(parts) or 'its program gives the schema'}")
    return [
        *lines,
        "micro batches, fill and balance depend on lengths: give --lengths FILE, a length a line",
    ]


def format_pack_preview(document: Mapping[str, int | float], replicas: int) -> Sequence[str]:
    """Return the lines that `gear preview --lengths` prints."""
    truncated = ", {truncated} of them truncated" if document["truncated"] else ""
    lines = [
        f"{{trajectories:,}} trajectories, {{tokens:,}} tokens, longest {{longest:,}}{truncated}",
        f"micro batches of each of {replicas} replicas: {{micro_batches}} (at least {{bound}})",
        "fill: {fill:.1%} of {rows:,} places",
        "imbalance: {step_imbalance:.2%} over micro steps, {rank_imbalance:.2%} over ranks",
    ]
    if not document["knows_prompts"]:
        lines.append(
            'planned without shared prefixes ("prefix": "share"), with which there are fewer places'
        )
    return [line.format(**document) for line in lines]
