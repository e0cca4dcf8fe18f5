"""What a table is, before it has memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed_gear.schema import Schema
from deepspeed_gear.store.dataset import Dataset
from deepspeed_gear.store.layout import SLOT_WORDS, Layout, Region

CONTROL_WORDS, PEER_WORDS = 16, 8
RETURN_TO_GO = "return_to_go"  # region of the derived column


@dataclass(frozen=True)
class TableSpec:
    """What a table is, before it has memory.

    Args:
        name: Of the table.
        schema: Of its trajectories.
        num_slots: Trajectories it can hold.
        num_rows: Rows per step column, all trajectories together.
        dataset: Its contents, if it is a data set.
        in_memory: Whether the columns lie in shared memory rather than in the data set's mapped files.
        return_to_go: Whether to keep the derived column of returns-to-go.
        num_peers: Processes of the node that attach.
    """

    name: str
    schema: Schema
    num_slots: int
    num_rows: int
    dataset: Dataset | None
    in_memory: bool
    return_to_go: bool
    num_peers: int

    def regions(self) -> list[Region]:
        """Return what lies in shared memory."""
        regions = [
            Region("control", "int64", (CONTROL_WORDS,)),
            Region("peers", "int64", (self.num_peers, PEER_WORDS)),
            Region("slots", "int64", (self.num_slots, SLOT_WORDS)),
        ]
        if self.in_memory:
            for column in self.schema:
                rows = self.num_slots if column.rows == "1" else self.num_rows
                regions.append(
                    Region(f"column/{column.name}", str(column.numpy_dtype), (rows, *column.shape))
                )
        if self.return_to_go:
            regions.append(Region(RETURN_TO_GO, "float32", (self.num_rows,)))
        return regions


def table_layout(spec: TableSpec, extra: list[Region], meaning: dict[str, Any]) -> Layout:
    """Return where everything of a table lies, and what its processes must agree on."""
    agreed = {"table": spec.name, "schema": spec.schema.to_json(), **meaning}
    return Layout.of([*spec.regions(), *extra], agreed)
