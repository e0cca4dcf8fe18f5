"""Fields that each rank reads of a batch. Pure: ranks, and a preview without ranks, compute the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.config.cross_checks import N_STEP_NAMES
from deepspeed_gear.config.field_checks import LEARNS, MASK
from deepspeed_gear.config.types import dotted
from deepspeed_gear.distributed.topology import AXES, RankCoordinates
from deepspeed_gear.errors import ConfigError

EXAMPLE = '"pipeline": {"inputs": ["observation"], "labels": ["action", "mask.action"]}'


@dataclass(frozen=True)
class ReadNeeds:
    """The fields that a rank needs of a batch, by its place in its replica.

    Args:
        fields: The fields that it gathers, each with its part of the time axis.
        n_step: Whether it needs n-step returns.
        opaque: The fields of opaque columns, of which it reads the values of its samples.
    """

    fields: tuple[ResolvedField, ...]
    n_step: bool
    opaque: tuple[ResolvedField, ...] = ()


def needs_of(place: RankCoordinates, config: GearConfig, fields: Sequence[ResolvedField]) -> ReadNeeds:
    """Return the fields that a rank with these coordinates needs.

    A first stage needs the inputs, a last stage the labels, an inner one nothing, and none of them opaque
    values; a sequence rank its part of every window; tensor ranks need the same.

    Raises:
        ConfigError: The config does not name what the ends of a pipeline read, or a window does not divide
            by the sequence ranks.
    """
    wanted = _names_at(place, config)
    opaque = tuple(field for field in fields if field.is_opaque and wanted is None)
    fields = [field for field in fields if not field.is_opaque]
    chosen = [field for field in fields if wanted is None or field.name in wanted]
    if wanted is not None:
        masks = {f.name: f for f in fields if {MASK + f.name, LEARNS + f.name} & wanted}
        chosen += [_mask_of(field) for name, field in masks.items() if name not in wanted]
    follows = any(field.offset == "n_step" for field in chosen)
    n_step = wanted is None or follows or bool(wanted.intersection(N_STEP_NAMES))
    parts = tuple(_part(field, place) for field in chosen)
    return ReadNeeds(parts, n_step and config.n_step is not None, opaque)


def _mask_of(field: ResolvedField) -> ResolvedField:
    """Return the field reduced to its mask."""
    return replace(field, mask_only=True, normalize=None, scale=1.0)


def _names_at(place: RankCoordinates, config: GearConfig) -> set[str] | None:
    """Return the names of the fields that a stage reads; None for all."""
    if place.pipe_world == 1:
        return None
    if config.pipeline is None:
        raise ConfigError("gear.pipeline", "must be given where the model is a pipeline", None, EXAMPLE)
    inputs = config.pipeline.inputs if place.is_first_stage else []
    labels = config.pipeline.labels if place.is_last_stage else []
    return {*inputs, *labels}


def _part(field: ResolvedField, place: RankCoordinates) -> ResolvedField:
    """Return a field with the part of its window that a sequence rank reads."""
    if field.length is None or place.sequence_world == 1:
        return field
    if field.length % place.sequence_world:
        raise ConfigError(
            f"{dotted('gear', 'fields', field.name)}.length",
            f"must be a multiple of the sequence ranks ({place.sequence_world})",
            field.length,
            "change it, or the number of ranks",
        )
    length = field.length // place.sequence_world
    return replace(field, part_first=place.sequence_rank * length, part_length=length)


def grid(worlds: Mapping[str, int]) -> list[RankCoordinates]:
    """Return the coordinates of a grid in the order of ranks: pipeline axis slowest, tensor axis fastest.

    Args:
        worlds: Size of each of AXES; 1 where it is missing.
    """
    sizes = {axis: worlds.get(axis, 1) for axis in AXES}
    named = {f"{axis}_world": size for axis, size in sizes.items()}
    ranks = itertools.product(*(range(size) for size in sizes.values()))
    return [
        RankCoordinates(**named, **{f"{axis}_rank": at for axis, at in zip(AXES, where, strict=True)})
        for where in ranks
    ]


def shards_of(sizes: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the bounds of the nodes' shards of a data set: contiguous, balanced in bytes.

    Args:
        sizes: Bytes of each trajectory. [N], int64.
    Returns:
        The first trajectory of each node, and N. [S + 1], int64.
    """
    before = np.concatenate([[0], np.cumsum(sizes)])
    wanted = before[-1] * np.arange(1, num_nodes) / num_nodes
    inner = np.clip(np.searchsorted(before, wanted), 0, len(sizes))
    return np.concatenate([[0], inner, [len(sizes)]]).astype(np.int64)


def readers_of(
    places: Sequence[RankCoordinates], nodes: Sequence[int], replica: int
) -> dict[int, list[RankCoordinates]]:
    """Return the ranks of a replica that read, by node."""
    found: dict[int, list[RankCoordinates]] = {}
    for place, node in zip(places, nodes, strict=True):
        if place.data_rank == replica and place.reads:
            found.setdefault(node, []).append(place)
    return found
