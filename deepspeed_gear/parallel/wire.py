"""What travels between nodes, in words of 8 bytes. Pure.

A resolution takes 32 bytes, and 8 more where windows follow n-step steps; a report 24. Slots, generations,
step numbers and lengths have 32 bits there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepspeed_gear.errors import GearError
from deepspeed_gear.ops.constants import (
    R_ANCHOR,
    R_GENERATION,
    R_ID,
    R_MASS,
    R_NUM_STEPS,
    R_SLOT,
    REPORT_BATCH,
    REPORT_NUMBER,
    REPORT_WORDS,
    RESOLUTION_WORDS,
    U_ANCHOR,
    U_GENERATION,
    U_PRIORITY,
    U_SLOT,
)
from deepspeed_gear.selection import reports as logs
from deepspeed_gear.selection.reports import BY_ID

UNKNOWN = -1  # id of a sample that this node knows nothing of
MOST = (1 << 62) - 1
PACKED_REPORT_WORDS = 3
SHARD_BITS = logs.SHARD_BITS
ANY_SLOT = _LOW = (1 << 32) - 1  # in place of the slot in a report by id
_NUMBER_BITS, _MOST_BACK = 48, (1 << 16) - 1
_MOST_NUMBER = (1 << _NUMBER_BITS) - 1  # stands for BY_ID


def text_of(error: Exception) -> str:
    """Return what other nodes are told of an error."""
    return str(error) if isinstance(error, GearError) else f"{type(error).__name__}: {error}"


def pack_text(text: str, words: int) -> np.ndarray:
    """Return the beginning of a text. [words], int64."""
    encoded = text.encode()[: 8 * words]
    return np.frombuffer(encoded.ljust(8 * words, b"\0"), np.int64)


def unpack_text(words: np.ndarray) -> str:
    """Return the text of `pack_text`."""
    return np.ascontiguousarray(words).tobytes().rstrip(b"\0").decode(errors="replace")


def _join(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return np.asarray(high << 32 | (low & _LOW))


def _split(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return words >> 32 & _LOW, words & _LOW


def resolution_words(has_steps: bool) -> int:
    """Return the words of a packed resolution."""
    return 5 if has_steps else 4


def pack_resolutions(records: np.ndarray, steps: np.ndarray | None) -> np.ndarray:
    """Pack resolutions; their sample numbers are known where they go.

    Args:
        records: [n, 8], int64.
        steps: Steps of their n-step returns, where windows follow them. [n], int64.
    Returns:
        [n, 4 or 5], int64.
    """
    packed = np.empty((len(records), resolution_words(steps is not None)), np.int64)
    packed[:, 0], packed[:, 1] = records[:, R_ID], records[:, R_MASS]
    packed[:, 2] = _join(records[:, R_GENERATION], records[:, R_SLOT])
    packed[:, 3] = _join(records[:, R_NUM_STEPS], records[:, R_ANCHOR])
    if steps is not None:
        packed[:, 4] = steps
    return packed


def unpack_resolutions(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return what `pack_resolutions` was given; first rows and sample numbers are 0."""
    records = np.zeros((len(packed), RESOLUTION_WORDS), np.int64)
    records[:, R_ID], records[:, R_MASS] = packed[:, 0], packed[:, 1]
    records[:, R_GENERATION], records[:, R_SLOT] = _split(packed[:, 2])
    records[:, R_NUM_STEPS], records[:, R_ANCHOR] = _split(packed[:, 3])
    return records, (packed[:, 4] if packed.shape[1] > 4 else None)


def by_shard(reports: np.ndarray, num_shards: int) -> list[np.ndarray]:
    """Return the reports of each shard, whose number is in the upper half of their slots. [n, 6] each."""
    shard = reports[:, U_SLOT] >> SHARD_BITS
    return [reports[shard == index] for index in range(num_shards)]


def local_reports(reports: np.ndarray) -> np.ndarray:
    """Return reports with the slots of the store that they are of, -1 for those by id. [n, 6]."""
    local: np.ndarray = reports.copy()
    slots = reports[:, U_SLOT] & _LOW
    local[:, U_SLOT] = np.where(slots == ANY_SLOT, -1, slots)
    return local


def pack_reports(reports: np.ndarray, latest: int) -> np.ndarray:
    """Pack reports. [n, 6] -> [n, 3], int64.

    A report by id carries the id, since its slot is known to the store alone. Batches that lie further back
    than 65,534 are not told apart.

    Args:
        reports: As in a log. [n, 6], int64.
        latest: A batch that none of them is newer than.
    """
    packed = np.empty((len(reports), PACKED_REPORT_WORDS), np.int64)
    by_id = reports[:, REPORT_NUMBER] == BY_ID
    handle = _join(reports[:, U_GENERATION], reports[:, U_SLOT])
    packed[:, 0] = np.where(by_id, reports[:, U_GENERATION], handle)
    packed[:, 1] = _join(reports[:, U_PRIORITY] & _LOW, reports[:, U_ANCHOR])
    back = np.clip(latest - reports[:, REPORT_BATCH], 0, _MOST_BACK)
    number = np.where(by_id, _MOST_NUMBER, reports[:, REPORT_NUMBER] & _MOST_NUMBER)
    packed[:, 2] = (back << _NUMBER_BITS).astype(np.int64) | number
    return packed


def unpack_reports(packed: np.ndarray, latest: int) -> np.ndarray:
    """Return what `pack_reports` was given, with the slots of the store; by id: slot -1, id as generation."""
    reports = np.zeros((len(packed), REPORT_WORDS), np.int64)
    number = packed[:, 2] & _MOST_NUMBER
    by_id = number == _MOST_NUMBER
    generation, slot = _split(packed[:, 0])
    reports[:, U_SLOT] = np.where(by_id, -1, slot)
    reports[:, U_GENERATION] = np.where(by_id, packed[:, 0], generation)
    reports[:, U_PRIORITY], reports[:, U_ANCHOR] = _split(packed[:, 1])
    reports[:, REPORT_BATCH] = latest - (packed[:, 2] >> _NUMBER_BITS & _MOST_BACK)
    reports[:, REPORT_NUMBER] = np.where(by_id, BY_ID, number)
    return reports


def merge_by_id(
    priorities: Sequence[np.ndarray], ids: Sequence[np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of highest priority over shards, equal ones by trajectory and as they stand.

    Args:
        priorities: Of each shard's candidates. [n_s] each.
        ids: Their trajectories. [n_s] each, int64.
        count: How many are wanted.
    Returns:
        Shard and index among its candidates. [n] each, int64.
    """
    shards = np.repeat(np.arange(len(ids)), [len(of_shard) for of_shard in ids])
    index = np.concatenate([np.arange(len(of_shard)) for of_shard in ids])
    values, every = np.concatenate(priorities).astype(np.float64), np.concatenate(ids)
    order = np.lexsort((index, every, -values))[:count]
    return shards[order], index[order]
