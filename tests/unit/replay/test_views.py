"""Views of a store outlive its Replay; without any, its memory is free when the Replay is closed."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from gear_support import SCHEMA, STEP, config_of, prefix, shared_files, trajectory
from process_support import environment
from warm_python import run_warm

from deepspeed_gear import Replay
from deepspeed_gear.errors import StoreError

LARGE = {"main": {"capacity_bytes": 2 << 20, "max_length": 100}}


def replay_of(kind: str = "prioritized", **options: object) -> Replay:
    options = {"fields": {"code": {}}, "batch_size": 4, "prefetch": 2, **options}
    section = config_of(sampler={"kind": kind, "unit": "step"}, **options)
    replay = Replay(section, schemas={"main": SCHEMA})
    for number in range(3):
        replay.add(trajectory(number, 7))
    replay.sample()
    return replay


def maps() -> list[str]:
    """The memory of stores that this process maps, with or without a name."""
    gc.collect()  # what former tests have left
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]


def read_all() -> None:
    """What the test below runs in a process of its own, which a view without memory would end."""
    replay = replay_of()
    table = replay.tables["main"]
    codes = table.tensor("code")
    views = [codes, table.columns["observation"], table.slots, table.gather_source("action"), codes[3:5]]
    before = [np.asarray(view).copy() for view in views]
    replay.close()
    assert shared_files(prefix()) == []
    for view, kept in zip(views, before, strict=True):
        assert np.array_equal(np.asarray(view), kept)
    assert codes[:7].tolist() == list(range(7))
    assert codes[8:15].tolist() == list(range(STEP, STEP + 7)), "behind the row of the last observation"
    codes.zero_()


def test_views_can_be_read_after_close() -> None:
    program = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); "
    program += "import test_views; test_views.read_all()"
    done = run_warm("-c", program, env=environment(), timeout_s=60.0)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_a_closed_replay_keeps_no_memory(kind: str) -> None:
    before = maps()
    replay = replay_of(kind, tables=LARGE)
    kept = replay.sample()
    assert maps() != before
    replay.close()
    assert maps() == before
    assert kept["code"].shape == (4,)
    with pytest.raises(StoreError, match="it was closed"):
        replay.sample()


def test_a_view_keeps_the_memory_until_it_is_dropped() -> None:
    before = maps()
    replay = replay_of(tables=LARGE)
    codes = replay.tables["main"].tensor("code")
    replay.close()
    assert len(maps()) == len(before) + 1
    del codes
    assert maps() == before
