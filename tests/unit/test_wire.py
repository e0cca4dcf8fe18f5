"""What travels between nodes comes out as it went in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.constants import (
    R_ANCHOR,
    R_FIRST_ROW,
    R_GENERATION,
    R_ID,
    R_MASS,
    R_NUM_STEPS,
    R_NUMBER,
    R_SLOT,
    REPORT_BATCH,
    REPORT_NUMBER,
    U_ANCHOR,
    U_GENERATION,
    U_PRIORITY,
    U_SLOT,
)
from deepspeed_gear.parallel import wire
from deepspeed_gear.selection.reports import BY_ID, NEVER

MOST_32, MOST_BACK = (1 << 32) - 1, (1 << 16) - 1
words_32 = st.integers(0, MOST_32) | st.sampled_from([0, 1 << 31, MOST_32])
words_62 = st.integers(0, 1 << 62) | st.sampled_from([0, wire.MOST])


@st.composite
def resolutions(draw: st.DrawFn) -> np.ndarray:
    found = np.zeros((draw(st.integers(0, 4)), 8), np.int64)
    for row in found:
        row[[R_ID, R_MASS]] = draw(words_62), draw(words_62)
        row[[R_SLOT, R_GENERATION, R_NUM_STEPS, R_ANCHOR]] = [draw(words_32) for _ in range(4)]
        row[[R_FIRST_ROW, R_NUMBER]] = draw(words_62), draw(words_62)
    return found


@given(resolutions(), st.booleans())
def test_resolutions(records: np.ndarray, has_steps: bool) -> None:
    steps = np.arange(len(records)) * 7 if has_steps else None
    packed = wire.pack_resolutions(records, steps)
    assert packed.shape == (len(records), wire.resolution_words(has_steps))
    found, found_steps = wire.unpack_resolutions(packed)
    expected = records.copy()
    expected[:, [R_FIRST_ROW, R_NUMBER]] = 0  # known where they go
    assert np.array_equal(found, expected)
    assert (found_steps is None) == (steps is None)
    if steps is not None:
        assert np.array_equal(found_steps, steps)


@st.composite
def reports(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Draw reports of several shards, and the newest batch that they may be of."""
    latest = draw(st.integers(0, 1 << 40) | st.integers(0, 3))
    found = np.zeros((draw(st.integers(0, 5)), 6), np.int64)
    for row in found:
        by_id = draw(st.booleans())
        slot = draw(st.integers(0, wire.ANY_SLOT - 1))
        row[U_SLOT] = draw(st.integers(0, 3)) << wire.SHARD_BITS | (wire.ANY_SLOT if by_id else slot)
        row[U_GENERATION] = draw(words_62 if by_id else words_32)
        row[[U_ANCHOR, U_PRIORITY]] = draw(words_32), draw(words_32)
        back = st.integers(0, MOST_BACK - 1) | st.sampled_from([0, MOST_BACK - 1])
        row[REPORT_BATCH] = latest - draw(back)
        row[REPORT_NUMBER] = BY_ID if by_id else draw(st.integers(0, (1 << 48) - 2))
    return found, latest


@given(reports())
def test_reports(drawn: tuple[np.ndarray, int]) -> None:
    given_reports, latest = drawn
    packed = wire.pack_reports(given_reports, latest)
    assert packed.shape == (len(given_reports), wire.PACKED_REPORT_WORDS)
    expected = wire.local_reports(given_reports)
    expected[expected[:, REPORT_NUMBER] == BY_ID, U_SLOT] = -1
    assert np.array_equal(wire.unpack_reports(packed, latest), expected)
    for shard, rows in enumerate(wire.by_shard(given_reports, 4)):
        mine = given_reports[given_reports[:, U_SLOT] >> wire.SHARD_BITS == shard]
        assert np.array_equal(rows, mine), "of one shard, in their order"


@pytest.mark.parametrize("batch", [NEVER, -1, 0, 1_000_000 - MOST_BACK - 1, 1_000_000 - MOST_BACK])
def test_batches_that_lie_far_back_are_not_told_apart(batch: int) -> None:
    latest = 1_000_000
    report = np.array([[3, 1, 2, 4, batch, 9]])
    found = wire.unpack_reports(wire.pack_reports(report, latest), latest)
    assert found[0, REPORT_BATCH] == latest - MOST_BACK
    assert np.array_equal(np.delete(found, REPORT_BATCH, 1), np.delete(report, REPORT_BATCH, 1))


def test_the_priority_of_a_report_keeps_its_bits() -> None:
    values = np.array([0.0, 1e-45, 1.0, np.finfo(np.float32).max], np.float32)
    report = np.zeros((4, 6), np.int64)
    report[:, U_PRIORITY] = values.view(np.int32)
    found = wire.unpack_reports(wire.pack_reports(report, 0), 0)
    assert np.array_equal(found[:, U_PRIORITY].astype(np.int32).view(np.float32), values)


@given(st.text(max_size=40), st.integers(1, 12))
def test_texts(text: str, words: int) -> None:
    packed = wire.pack_text(text, words)
    assert packed.shape == (words,)
    found = wire.unpack_text(packed)
    if len(text.encode()) <= 8 * words:
        assert found == text.rstrip("\0")
    else:
        whole = text.encode()[: 8 * words].decode(errors="ignore")
        assert found.startswith(whole.rstrip("\0"))
        assert len(found) <= len(whole) + 1, "at most half a character is lost"


def test_what_others_are_told_of_an_error() -> None:
    assert wire.text_of(ValueError("no")) == "ValueError: no"
    error = ConfigError("gear.seed", "must be given", None)
    assert wire.text_of(error) == str(error)


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=6), max_size=4), st.data())
def test_the_highest_priorities_of_all_shards(
    shards: list[list[tuple[int, int]]], data: st.DataObject
) -> None:
    """Shards hold different trajectories, each of them with any number of items."""
    items = [(-p, len(shards) * t + s, i, s) for s, own in enumerate(shards) for i, (p, t) in enumerate(own)]
    count = data.draw(st.integers(0, len(items) + 2))
    priorities = [np.array([p for p, _ in own], np.float32) for own in shards]
    ids = [np.array([len(shards) * t + s for _, t in own], np.int64) for s, own in enumerate(shards)]
    if not shards:
        return
    shard, index = wire.merge_by_id(priorities, ids, count)
    expected = [(s, i) for _, _, i, s in sorted(items)[:count]]
    assert list(zip(shard.tolist(), index.tolist(), strict=True)) == expected
