"""Numbers and times of steps, which show whether the rows of an episode are in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.errors import DataError

#: Usual names of columns that never decrease within an episode.
NAMES = (
    "frame_index",
    "step",
    "step_id",
    "step_index",
    "time_step",
    "timestamp",
    "timestep",
    "timesteps",
)


def check_order(
    reader: Reader, where: str, arrays: Mapping[str, Any], ends: NDArray[np.int64] | None = None
) -> None:
    """Raise DataError where the number or the time of a step is below that of the row before it.

    Columns that the user excludes or renames are something else.

    Args:
        reader: The reader of the source.
        where: Start of the name in the error.
        arrays: By column; those with one number for each row are compared.
        ends: Row after the last one of each episode, in ascending order; None: all rows are one.
    """
    renamed = reader.options.get("rename") or {}
    for name in NAMES:
        if name not in arrays or name in renamed or reader.select.excludes(name):
            continue
        rows = np.asarray(arrays[name][()]) if hasattr(arrays[name], "dtype") else None
        if rows is None or rows.ndim != 1 or rows.dtype.kind not in "iuf":
            continue
        falls = rows[1:] < rows[:-1]
        if ends is not None:
            falls[ends[ends < len(rows)] - 1] = False
        if falls.any():
            row = int(np.argmax(falls)) + 1
            raise DataError(
                f"{where}{name}",
                "must not decrease within an episode",
                f"{rows[row]} after {rows[row - 1]} at row {row}",
                f"sort the rows of each episode by {name}; if an episode begins there, mark it: "
                "with --episode-id for rows of tables, or with a flag such as is_first or "
                f"truncated; if {name} is something else, leave it out with --columns '!{name}' or "
                "rename it",
            )
