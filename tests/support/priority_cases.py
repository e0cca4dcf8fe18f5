"""Reports of priorities, and what a selection has made of them."""

from typing import Any

import numpy as np

from deepspeed_gear.ops.records import LogEntry, Slot

LENGTHS = [3, 1, 7, 33, 5]
ONE = 1 << 24  # the mass of priority 1
Item = tuple[int, int]


def handles(stream: Any, items: list[Item]) -> np.ndarray:
    """Return slot, generation and anchor of items. [n, 3]."""
    slots = stream.table.slots_of(np.array([number for number, _ in items]))
    return np.stack(
        [slots, stream.table.slots[slots, Slot.GENERATION], [a for _, a in items]], axis=1
    )


def report(stream: Any, items: list[Item], priorities: Any, order: Any = LogEntry.BY_ID) -> None:
    values = np.broadcast_to(np.asarray(priorities, np.float32), len(items))
    stream.masses.reports.add_items(handles(stream, items), values, order)


def stored(stream: Any, items: list[Item]) -> list[float]:
    """Return the priorities that the latest selection has drawn with."""
    slots = stream.table.slots_of(np.array([number for number, _ in items]))
    if not stream.masses.by_step:
        return stream.masses.values[slots].tolist()
    rows = stream.table.slots[slots, 3] + [a for _, a in items]
    return stream.masses.values[rows].tolist()


def cut(stream: Any, key: int, *others: Any) -> Any:
    """Let every process ask for a global batch, and select it."""
    for each in (stream, *others):
        each.state.ask(key)
    made = stream.get(key)
    for each in (stream, *others):
        each.release(key)
    return made
