"""Preview of packed batches: packs of given lengths, and sizes of rollout batches and tables."""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.batching.packing_plan import PlannedPacks
from deepspeed_gear.config import GearConfig
from deepspeed_gear.config.cross_checks import check_ranks
from deepspeed_gear.config.sampler_options import SHARES_TOLERANCE
from deepspeed_gear.config.table_options import TableConfig
from deepspeed_gear.data.dataset_files import check_no_pointer
from deepspeed_gear.errors import ConfigError, DataError, show_bytes
from deepspeed_gear.ops import load_backend
from deepspeed_gear.plan.table_sizes import capacity_of


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
