"""Shared prompts of groups: a notice where columns prevent that a prompt is stored once."""

from __future__ import annotations

import json

import numpy as np

from deepspeed_gear.log import LOG
from deepspeed_gear.store.table_spec import TableSpec


def warn_of_repeated_prompts(spec: TableSpec, apart: np.ndarray, num_rows: np.ndarray) -> None:
    """Log that equal prompts of a group are stored again, and which columns differ there.

    Which steps are shared is decided in `TrajectoryReader.SharedSteps` of
    bindings/trajectory_reader.h.

    Args:
        spec: Specification of a table with prompts.
        apart: Steps that are stored again although the prompt is the same, and how many
            trajectories differ there by column. [1 + columns], int64.
        num_rows: Rows of each trajectory of the group in the store. [n], int64.
    """
    names = np.array(spec.schema.names)[apart[1:] > 0].tolist()
    total = int(num_rows.sum())
    LOG.warning(
        f"gear: table {spec.name}: the {len(num_rows)} trajectories of a group are stored "
        f"in {total:,} rows, where {total - int(apart[0]):,} suffice: trajectories begin with "
        f"the same prompt, but differ in {', '.join(names)} at its tokens. If nothing reads "
        f'these values, add "shared_columns": {json.dumps(names)} to '
        f"gear.tables.{spec.name}.prompts, or store zeros there"
    )
