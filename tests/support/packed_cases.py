"""Cases of packed training that are compared with one process without packs: kinds, losses, budgets."""

from __future__ import annotations

import os
from typing import Any

EVERY = os.environ.get("GEAR_LONG_TESTS") == "1"
LOSSES: dict[str, dict[str, Any]] = {
    "token": {"normalize": "token"},
    "sequence": {"normalize": "sequence"},
    "sequence, masked ones count": {"normalize": "sequence", "count_masked": True},
    "sequence of a member": {"normalize": "sequence", "by": "member"},
    "group": {"normalize": "group"},
    "group, masked ones count": {"normalize": "group", "count_masked": True},
    "constant": {"normalize": {"constant": 50.0}},
    "constant, masked ones count": {"normalize": {"constant": 50.0}, "count_masked": True},
}
BUDGETS = (48, 120, 400)  # tokens of a pack; the longest trajectory has 40

ALL = [(loss, tokens) for tokens in BUDGETS for loss in LOSSES]
#: Every loss once, every budget two or three times. "token" with the least budget has the most packs.
SHORT = [(loss, BUDGETS[number % len(BUDGETS)]) for number, loss in enumerate(LOSSES)]

STAGES = [f"zero{stage}" for stage in range(4)]
ULYSSES = [f"{name} sequence 2" for name in STAGES]
#: Of each number of ranks. Engines of one kind follow each other: DeepSpeed keeps groups in globals.
KINDS = {
    1: STAGES,
    2: [*STAGES, "ddp", "fsdp1", "fsdp2", *ULYSSES],
    4: [*STAGES, "ddp", "fsdp2", *ULYSSES],
}


def cases_of(world: int, every: bool) -> dict[str, list[tuple[str, int]]]:
    """Return the cases of each kind: all, or every second one of `SHORT`, those of neighbours the others."""
    kinds = KINDS[world]
    return {kind: ALL if every else SHORT[number % 2 :: 2] for number, kind in enumerate(kinds)}
