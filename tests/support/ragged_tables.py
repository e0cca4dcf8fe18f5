"""Tables of tokens with ragged columns, as of a teacher's top-p support, and their trajectories."""

from __future__ import annotations

from typing import Any

import numpy as np
from rollout_support import COLUMNS, MOST, responses, section

from deepspeed_gear import Ragged

MAX = 40  # values of a step
RAGGED = {
    "ids": {"dtype": "int32", "max_values": MAX},
    "logs": {"dtype": "bfloat16", "max_values": MAX},
}
MEMORY = {"capacity_bytes": 1 << 20, "page_bytes": 512}


def ragged_section(
    late: bool = False, table: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Return a gear section of packs with ragged columns.

    Args:
        late: Whether they are filled after their trajectory was added.
        table: Options of the table.
        **options: Options of the section.
    """
    columns = {name: {**one, **({"late": True} if late else {})} for name, one in RAGGED.items()}
    main = {
        "capacity_steps": 9000,
        "max_length": MOST,
        "schema": {"columns": {**COLUMNS, **columns}},
        "ragged": dict(MEMORY),
        **(table or {}),
    }
    return section(tables={"main": main}, **options)


def support(length: int, seed: int) -> dict[str, Ragged]:
    """Return ids and logs of a trajectory: few values at most steps, up to MAX at some."""
    words = np.random.default_rng(seed)
    counts = np.minimum(words.geometric(0.2, length) - 1, MAX)
    counts[words.random(length) < 0.1] = MAX
    offsets = np.concatenate([[0], np.cumsum(counts)])
    ids = words.integers(0, 150_000, int(offsets[-1]), np.int32)
    logs = -words.integers(0, 256, int(offsets[-1])) / 16  # bfloat16 has them exactly
    return {"ids": Ragged(ids, offsets), "logs": Ragged(logs.astype(np.float32), offsets)}


def supported(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return trajectories with ragged columns."""
    every = enumerate(responses(count, seed))
    return [{**one, **support(len(one["tokens"]), 1000 * seed + n)} for n, one in every]
