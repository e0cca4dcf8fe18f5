"""Specification of a field for `gather_`: names here, lowered to integers at the call of the op."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields

from deepspeed_gear.ops.records import Align, Follows, Pad


@dataclass(frozen=True)
class GatherSpec:
    """Specification of a field of a gather: the words of `struct Field` (gather/gather.h), in their order."""

    source: int  # of `Source`
    offset: int = 0  # of the window's first step, relative to the anchor
    length: int = 1  # of the window, in steps
    align: int = Align.IN_PLACE
    follows: int = Follows.ANCHOR
    pad: int = Pad.VALUE
    elements: int = 1  # of a row
    mask: int = -1  # index of the mask that it writes; -1: another field writes it, or none
    part_first: int = 0  # the rows of the window that are gathered
    part_count: int = 1


NUM_WORDS = len(fields(GatherSpec))


def lower(specs: Iterable[GatherSpec]) -> list[int]:
    """Return the integers of the op's `spec`: `NUM_WORDS` for each field."""
    return [int(word) for spec in specs for word in astuple(spec)]


def raised(words: Sequence[int]) -> list[GatherSpec]:
    """Return the fields that lowered integers describe."""
    return [GatherSpec(*words[at : at + NUM_WORDS]) for at in range(0, len(words), NUM_WORDS)]
