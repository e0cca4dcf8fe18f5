"""Specification of a field for `gather_`: names here, lowered to integers at the call of the op."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields

from deepspeed_gear.ops.records import Align, Pad


@dataclass(frozen=True)
class GatherSpec:
    """Specification of one field of a gather, in the order of the words of `struct Field` in gather/gather.h.

    Args:
        source: Where its rows come from (Source).
        offset: First step of the window, relative to the anchor.
        length: Steps of the window.
        align: Where the real steps of a window stand (Align).
        after_n_step: 1: the op's vector of steps is added to the offset; else 0.
        pad: Padding of the rest (Pad).
        mask: Index of the mask that it writes; -1: another field writes it, or none.
        part_first, part_count: The rows of the window that are gathered.
    """

    source: int
    offset: int = 0
    length: int = 1
    align: int = Align.IN_PLACE
    after_n_step: int = 0
    pad: int = Pad.VALUE
    elements: int = 1
    mask: int = -1
    part_first: int = 0
    part_count: int = 1


NUM_WORDS = len(fields(GatherSpec))


def lower(specs: Iterable[GatherSpec]) -> list[int]:
    """Return the integers of the op's `spec`: `NUM_WORDS` for each field."""
    return [int(word) for spec in specs for word in astuple(spec)]


def raised(words: Sequence[int]) -> list[GatherSpec]:
    """Return the fields that lowered integers describe."""
    return [GatherSpec(*words[at : at + NUM_WORDS]) for at in range(0, len(words), NUM_WORDS)]
