"""What continues a stream elsewhere: masses, position, and the cuts that nobody has used yet.

Where several nodes hold the table, each saves the samples that are its own of every cut; the others have the
id -1. Reports are saved as they stand, with their shard, since they may be of any.
"""

from __future__ import annotations

import numpy as np

from deepspeed_gear.ops.constants import SHARD_BITS, UNKNOWN
from deepspeed_gear.ops.records import Resolution, Slot
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.store.stream_records import NOTHING, Head, Position
from deepspeed_gear.store.table import Table


def export(stream: BatchStream, slots: np.ndarray, since: int) -> dict[str, np.ndarray]:
    """Return what continues this stream elsewhere. Wants the lock.

    Args:
        stream: Of a table whose lock is held.
        slots: Those that are saved, ascending. [n], int64.
        since: Cuts from this global batch on have not been used.
    """
    stream.catch_up()
    unused = np.nonzero(stream.heads[:, Head.KEY] >= since)[0]
    if stream.origins is not None and stream.spec.kind == "pass":
        unused = unused[:0]  # a pass begins anew
    ring, own = _own_samples(stream, unused)
    if not _is_stored(stream.table, ring[own], slots):
        unused, ring = unused[:0], ring[:0]  # from rows that are gone: these batches cannot come any more
    ring[..., Resolution.SLOT] = np.searchsorted(slots, ring[..., Resolution.SLOT])
    return {
        **stream.masses.export(slots),
        **({} if stream.draws is None else stream.draws.export(slots)),
        "position": stream.position[: Head.NUM_SET].copy(),
        "heads": stream.heads[unused],
        "ring": ring,
        "epochs": stream.epochs.numpy()[unused],
    }


def _own_samples(stream: BatchStream, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ring entries with what this store holds of them, and which samples these are."""
    ring = stream.ring.numpy()[entries].copy()
    drawn = np.arange(stream.spec.batch) < stream.heads[entries, Head.COUNT, None]
    ring[~drawn] = 0
    if stream.origins is None:
        return ring, drawn
    shard, origins = stream.table.spec.shard, stream.origins.numpy()[entries]
    assert shard is not None
    own = drawn & (ring[..., Resolution.ID] != UNKNOWN) & (origins >> SHARD_BITS == shard.index)
    ring[own, Resolution.SLOT] = origins[own] & ((1 << SHARD_BITS) - 1)
    ring[drawn & ~own] = 0
    ring[drawn & ~own, Resolution.ID] = UNKNOWN
    return ring, own


def _is_stored(table: Table, records: np.ndarray, slots: np.ndarray) -> bool:
    """Tell whether the trajectories of all samples lie in these slots."""
    current = table.slots[records[:, Resolution.SLOT], Slot.GENERATION] == records[:, Resolution.GENERATION]
    return bool((current & np.isin(records[:, Resolution.SLOT], slots)).all())


def restore(stream: BatchStream, slots: np.ndarray, content: dict[str, np.ndarray]) -> None:
    """Continue what `export` has saved; the table's slots are in place. Wants the lock.

    Cuts that were not used are kept if the global batch has still the same size and the ring the room. Where
    several nodes hold the table, they must be put into the ring first: `keep_cuts` comes behind that.
    """
    stream.masses.restore(slots, content)
    if stream.draws is not None:
        stream.draws.restore(slots, content)
    stream.position[Position.AHEAD] = NOTHING
    if stream.origins is not None or not keeps_cuts(stream, content):
        return
    ring = content["ring"]
    ring[..., Resolution.SLOT] = slots[ring[..., Resolution.SLOT]]
    ring[..., Resolution.FIRST_ROW] = stream.table.slots[ring[..., Resolution.SLOT], Slot.FIRST_ROW]
    stream.ring.numpy()[content["heads"][:, Head.KEY] % stream.spec.depth] = ring
    keep_cuts(stream, content)


def keeps_cuts(stream: BatchStream, content: dict[str, np.ndarray]) -> bool:
    """Whether the stream takes up the cuts that were not used."""
    heads, ring = content["heads"], content["ring"]
    return ring.shape[1] == stream.spec.batch and 0 < len(heads) <= stream.spec.depth


def keep_cuts(stream: BatchStream, content: dict[str, np.ndarray]) -> None:
    """Continue behind cuts whose samples are in the ring. Wants the lock."""
    heads = content["heads"]
    entries = heads[:, Head.KEY] % stream.spec.depth
    stream.heads[entries], stream.epochs.numpy()[entries] = heads, content["epochs"]
    stream.position[: Head.NUM_SET] = content["position"]
    if stream.origins is None:
        for entry, head in zip(entries.tolist(), heads, strict=True):
            stream.pin(int(head[Head.KEY]), stream.ring[entry, : int(head[Head.COUNT])])
