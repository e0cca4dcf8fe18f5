"""What continues a stream elsewhere: masses, position, and the cuts that nobody has used yet."""

from __future__ import annotations

import numpy as np

from deepspeed_gear.ops.constants import R_FIRST_ROW, R_GENERATION, R_SLOT
from deepspeed_gear.selection.cut import AHEAD, COUNT, CUT_WORDS, KEY, NOTHING
from deepspeed_gear.selection.stream import Stream
from deepspeed_gear.store.table import FIRST_ROW, GENERATION


def export(stream: Stream, slots: np.ndarray, since: int) -> dict[str, np.ndarray]:
    """Return what continues this stream elsewhere. Wants the lock.

    Args:
        stream: Of a table whose lock is held.
        slots: Those that are saved, ascending. [n], int64.
        since: Cuts from this global batch on have not been used.
    """
    unused = np.nonzero(stream.heads[:, KEY] >= since)[0]
    if not _is_stored(stream, unused, slots):
        unused = unused[:0]  # prepared from rows that are gone: these batches cannot come any more
    ring = stream.ring.numpy()[unused].copy()
    ring[np.arange(stream.spec.batch) >= stream.heads[unused, COUNT, None]] = 0
    ring[..., R_SLOT] = np.searchsorted(slots, ring[..., R_SLOT])
    return {
        **stream.masses.export(slots),
        **({} if stream.draws is None else stream.draws.export(slots)),
        "position": stream.position[:CUT_WORDS].copy(),
        "heads": stream.heads[unused],
        "ring": ring,
        "epochs": stream.epochs.numpy()[unused],
    }


def _is_stored(stream: Stream, entries: np.ndarray, slots: np.ndarray) -> bool:
    """Tell whether the trajectories of all samples of ring entries lie in these slots."""
    drawn = np.arange(stream.spec.batch) < stream.heads[entries, COUNT, None]
    records = stream.ring.numpy()[entries][drawn]
    current = stream.table.slots[records[:, R_SLOT], GENERATION] == records[:, R_GENERATION]
    return bool((current & np.isin(records[:, R_SLOT], slots)).all())


def restore(stream: Stream, slots: np.ndarray, content: dict[str, np.ndarray]) -> None:
    """Continue what `export` has saved; the table's slots are in place. Wants the lock.

    Cuts that were not used are kept if the global batch has still the same size and the ring the room.
    """
    stream.masses.restore(slots, content)
    if stream.draws is not None:
        stream.draws.restore(slots, content)
    stream.position[AHEAD] = NOTHING
    heads, ring = content["heads"], content["ring"]
    if ring.shape[1] != stream.spec.batch or len(heads) > stream.spec.depth or len(heads) == 0:
        return
    ring[..., R_SLOT] = slots[ring[..., R_SLOT]]
    ring[..., R_FIRST_ROW] = stream.table.slots[ring[..., R_SLOT], FIRST_ROW]
    entries = heads[:, KEY] % stream.spec.depth
    stream.heads[entries] = heads
    stream.ring.numpy()[entries], stream.epochs.numpy()[entries] = ring, content["epochs"]
    stream.position[:CUT_WORDS] = content["position"]
