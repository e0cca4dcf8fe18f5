"""Who needs what. Pure: every rank, and a preview without ranks, computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.config.checks import N_STEP_NAMES, dotted
from deepspeed_gear.config.fields import LEARNS, MASK
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.parallel.topology import Place

EXAMPLE = '"pipeline": {"inputs": ["observation"], "labels": ["action", "mask.action"]}'


@dataclass(frozen=True)
class Needs:
    """What a rank's place in its replica needs of a batch.

    Args:
        fields: Those that it collects, each with its part of the time axis.
        n_step: Whether it needs n-step returns.
    """

    fields: tuple[ResolvedField, ...]
    n_step: bool


def needs_of(place: Place, config: GearConfig, fields: Sequence[ResolvedField]) -> Needs:
    """Return what a place needs.

    A first stage needs the inputs, a last stage the labels, an inner one nothing; a sequence rank its part
    of every window; tensor ranks need the same.

    Raises:
        ConfigError: The config does not name what the ends of a pipeline read, or a window does not divide
            by the sequence ranks.
    """
    wanted = _names_at(place, config)
    prefixes = ("", MASK, LEARNS)
    chosen = [f for f in fields if wanted is None or {prefix + f.name for prefix in prefixes} & wanted]
    follows = any(field.offset == "n_step" for field in chosen)
    n_step = wanted is None or follows or bool(wanted.intersection(N_STEP_NAMES))
    parts = tuple(_part(field, place) for field in chosen)
    return Needs(parts, n_step and config.n_step is not None)


def _names_at(place: Place, config: GearConfig) -> set[str] | None:
    """Return the names that a stage reads; None for all."""
    if place.pipe_world == 1:
        return None
    if config.pipeline is None:
        raise ConfigError("gear.pipeline", "must be given where the model is a pipeline", None, EXAMPLE)
    inputs = config.pipeline.inputs if place.is_first_stage else []
    labels = config.pipeline.labels if place.is_last_stage else []
    return {*inputs, *labels}


def _part(field: ResolvedField, place: Place) -> ResolvedField:
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
