"""Priorities beyond what a mass can be: they are clamped and counted, and no sum of masses
overflows.

GEAR_LONG_TESTS=1: 2^24 items instead of 2^18, whose frequencies are compared with their masses.
"""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import config_of
from replay_support import streams_of
from ring_cases import PRIORITIZED, trajectories
from ring_cases import online as on_device
from scipy import stats

from deepspeed_gear import DeviceReplay, Replay
from deepspeed_gear.ops.constants import MOST_TOTAL_BITS

LONG = os.environ.get("GEAR_LONG_TESTS") == "1"
COLUMN = {"columns": {"x": {"dtype": "uint8"}}}


def replay_of(num_steps: int, batch: int, sampler: dict[str, Any], **options: Any) -> Replay:
    table = {"capacity_steps": num_steps, "capacity_trajectories": 1024, "schema": COLUMN}
    sampler = {"kind": "prioritized", "unit": "step", **sampler}
    return Replay(config_of(batch_size=batch, sampler=sampler, tables={"main": table}, **options))


@pytest.fixture(autouse=True)
def propagating(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in this process may have turned it off."""
    monkeypatch.setattr(logging.getLogger("deepspeed_gear"), "propagate", True)


def test_outliers_end_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with replay_of(4000, 256, {"alpha": 0.6}) as replay:
        for _ in range(40):
            replay.add({"x": np.arange(100, dtype=np.uint8)})
        for k in range(40):
            batch = replay.sample()
            priorities = torch.rand(256)
            priorities[0] = 1e12 if k % 3 == 0 else priorities[0]
            replay.update_priorities(batch, priorities)
        replay.sample()
        found = replay.statistics()
        assert (found["priorities_applied"], found["priorities_clamped"]) == (40 * 256, 14)
        assert (found["priorities_applied_recent"], found["priorities_clamped_recent"]) == (
            40 * 256,
            14,
        )
        state = replay.save(tmp_path)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 1, "one warning for many cuts"
    assert r"table main: priority ** alpha should be in [2^-18, 2^16]" in warned[0]
    assert "lower sampler.alpha" in warned[0]
    with replay_of(4000, 256, {"alpha": 0.6}) as replay:
        replay.load(tmp_path, state)
        for _ in range(3):
            replay.update_priorities(replay.sample(), torch.full((256,), 3e38))
        replay.sample()
        found = replay.statistics()
        assert (found["priorities_clamped"], found["priorities_clamped_recent"]) == (14 + 768, 768)


def test_a_table_on_a_device_warns_as_well(caplog: pytest.LogCaptureFixture) -> None:
    with DeviceReplay(on_device(PRIORITIZED), "cpu") as replay:
        replay.add_(trajectories(6, 5))
        for _ in range(3):
            replay.update_priorities_(replay.sample(), torch.full((32,), 3e38))
            replay.sample()
            replay.check()
        assert replay.statistics()["priorities_clamped"] == 96
    assert (
        len(
            [
                record
                for record in caplog.records
                if "should be in [2^-18, 2^" in record.getMessage()
            ]
        )
        == 1
    )


@pytest.mark.parametrize("device", [False, True])
def test_small_scales_are_warned_of(device: bool, caplog: pytest.LogCaptureFixture) -> None:
    """1e-7 and 3e-7 are drawn 2 : 5; a thousand times as much is drawn 1 : 3, without a warning."""
    for scale, num_clamped in ((1e-7, 2), (1e-4, 0)):
        caplog.clear()
        of = {"kind": "prioritized", "unit": "trajectory", "alpha": 1.0, "normalize": None}
        table = {"capacity_steps": 8, "max_length": 1, "remove": "fifo", "schema": COLUMN}
        section = config_of(batch_size=64, sampler=of, tables={"main": table})
        if device:
            table["placement"] = "device"
        with DeviceReplay(section, "cpu") if device else Replay(section) as replay:
            for number in range(2):
                x = torch.full((1, 1) if device else (1,), number, dtype=torch.uint8)
                replay.add_({"x": x}) if isinstance(replay, DeviceReplay) else replay.add(
                    {"x": x.numpy()}
                )
            batch = replay.sample()
            replay.update_priorities(batch, scale * (1 + 2 * batch.trajectory_id.float()))
            batch = replay.sample()
            if isinstance(replay, DeviceReplay):
                replay.check()
            found = replay.statistics()["priorities_clamped"]
            of_first = batch.probability[batch.trajectory_id == 0][0].item()
        messages = [
            r.getMessage() for r in caplog.records if "smaller ones are rounded" in r.getMessage()
        ]
        assert (found > 0, len(messages)) == ((True, 1) if num_clamped else (False, 0))
        assert of_first == pytest.approx(2 / 7 if num_clamped else 0.25, abs=1e-3)


def test_a_full_table_of_the_largest_masses_does_not_overflow() -> None:
    size = 1 << 22  # items, of which 2^40 each would sum to 2^62
    with replay_of(size, 64, {"alpha": 1.0, "initial": 1e30}) as replay:
        for _ in range(32):
            replay.add({"x": np.zeros(size >> 5, np.uint8)})
        batch = replay.sample()
        masses = streams_of(replay)["train"].masses
        assert size << 36 < masses.total < 1 << MOST_TOTAL_BITS
        assert (masses.leaves[masses.leaves > 0] == masses.total >> 22).all()
        assert (batch.probability * size == 1).all()
        assert len(batch.trajectory_id.unique()) > 20


def test_frequencies_follow_masses_over_all_magnitudes() -> None:
    """Also where half of the items have the largest mass, and with all magnitudes drawn (alpha
    0.05).
    """
    size, chunk = (1 << 24, 1 << 16) if LONG else (1 << 18, 1 << 16)
    exponents = np.random.default_rng(3).uniform(-30, 30, size)
    priorities = torch.from_numpy((10.0**exponents).astype(np.float32))
    for alpha in (0.05, 0.6):
        with replay_of(size, chunk, {"alpha": alpha}) as replay:
            for _ in range(size // chunk):
                replay.add({"x": np.zeros(chunk, np.uint8)})
            steps = torch.arange(chunk)
            for i in range(size // chunk):
                taken = priorities[i * chunk : (i + 1) * chunk]
                assert replay.set_priorities(torch.full((chunk,), i), taken, steps) == chunk
                replay.sample()
            replay.sample()
            masses = streams_of(replay)["train"].masses
            leaves = masses.leaves[masses.leaves > 0].copy()
            assert len(leaves) == size, "an item of positive priority has no mass"
            assert masses.total == sum(map(int, np.add.reduceat(leaves, np.arange(0, size, chunk))))
            assert masses.total < 1 << MOST_TOTAL_BITS
            found = []
            for _ in range(256 if LONG else 32):
                batch = replay.sample()
                slots = masses.table.slots_of(batch.trajectory_id.numpy())
                found.append(masses.leaves[masses.table.slots[slots, 3] + batch.anchor.numpy()])
            edges = 2.0 ** np.arange(0, MOST_TOTAL_BITS + 1, 0.5)
            expected = np.histogram(leaves, edges, weights=leaves.astype(np.float64))[0]
            counts = np.histogram(np.concatenate(found), edges)[0]
            expected *= counts.sum() / expected.sum()
            often = expected >= 10
            assert not counts[expected == 0].any()
            statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
            p_value = stats.chi2.sf(statistic, max(int(often.sum()) - 1, 1))
            assert p_value > 1e-3
            assert often.sum() > (15 if alpha == 0.05 else 1)
