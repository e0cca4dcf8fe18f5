"""Short published trajectories of a full table move out of the rows that were reserved for them."""

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from process_support import in_child, kill
from store_support import check_whole

from deepspeed_gear import Column, Replay, Schema, TrajectoryWriter
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.records import Control

WIDE = 128  # numbers of a row: most of the time of a move is copying
LONGEST = 60
ENVIRONMENTS = 4
FIRST = [Slot.FIRST_ROW, Slot.GENERATION]
SCHEMA = Schema(
    [Column("code", "int64", (WIDE,), "observation", "T+1"), Column("again", "int64", (WIDE,))]
)


def section_of(remove: str) -> dict[str, Any]:
    table = {"capacity_steps": 8000, "capacity_trajectories": 1600, "max_length": LONGEST}
    table |= {"remove": remove, "writers": 3}
    return {
        "tables": {"main": table},
        "sampler": {"kind": "uniform", "unit": "step"},
        "fields": {"again": {}},
        "batch_size": 8,
        "shared_memory": {"prefix": f"gearmoveout{os.getpid()}"},
    }


class Episodes:
    """Steps of environments whose rows say of which episode and step they are; every 20th episode
    is long.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._next = seed * 1_000_000
        self.code = np.zeros(ENVIRONMENTS, np.int64)
        self.left = np.zeros(ENVIRONMENTS, np.int64)

    def begin(self, ended: np.ndarray) -> None:
        for env in np.flatnonzero(ended).tolist():
            self._next += 1
            bounds = (LONGEST - 9, LONGEST + 1) if self._next % 20 == 0 else (1, 9)
            self.left[env] = self._random.integers(*bounds)
            self.code[env] = self._next * 1000

    def rows(self) -> np.ndarray:
        return np.repeat(self.code[:, None], WIDE, 1)


def steps(vector: Any, seed: int) -> Iterator[None]:
    """Publish steps of all environments, for ever."""
    episodes = Episodes(seed)
    ended = np.ones(ENVIRONMENTS, bool)
    while True:
        if ended.any():
            episodes.begin(ended)
            vector.reset(ended, code=episodes.rows())
        before = episodes.rows()
        episodes.code += 1
        episodes.left -= 1
        ended = episodes.left == 0
        vector.step(publish=True, code=episodes.rows(), again=before, terminated=ended)
        yield


def check_rows(table: Any) -> None:
    """Check that all rows are those of their trajectory."""
    for record in table.slots[table.slots[:, Slot.STATE] == SlotState.COMMITTED].tolist():
        first = record[Slot.FIRST_ROW]
        count = record[Slot.NUM_STEPS]
        code = table.columns["code"][first : first + count + 1]
        begin = int(code[0, 0])
        assert begin % 1000 == 0
        assert (code == np.arange(begin, begin + count + 1)[:, None]).all()
        assert (table.columns["again"][first : first + count] == code[:-1]).all()


@pytest.mark.parametrize("remove", ["fifo", "lifo"])
def test_trajectories_are_whole_wherever_they_lie(remove: str) -> None:
    with Replay(section_of(remove), schemas={"main": SCHEMA}) as replay:
        table = replay.tables["main"]
        vector = replay.writer().vector_writer(ENVIRONMENTS, "disabled")
        places = table.slots[:, FIRST].copy()
        moved_up = 0
        for count, _ in zip(range(4000), steps(vector, 1), strict=False):
            before, places = places, table.slots[:, FIRST].copy()
            is_same = before[:, 1] == places[:, 1]
            moved_up += int((is_same & (places[:, 0] > before[:, 0])).sum())
            if count % 40 == 0:
                check_rows(table)
                check_whole(table, [])
            if count % 60 == 0:  # what it has drawn is read, and stays where it is
                code = replay.sample()["again"].numpy()
                assert (code == code[..., :1]).all()
        assert moved_up > 10, "compaction moves down, and none would move out"
        vector.close()
        least = 0.75 * 8000 if remove == "fifo" else 0
        assert replay.num_steps > least


def test_death_while_a_trajectory_moves_out() -> None:
    """Nothing is torn and no row is lost."""
    section = section_of("fifo")

    def attach(seed: int) -> None:
        with TrajectoryWriter.attach(section, wait_s=60) as writer:
            for _ in steps(writer.vector_writer(ENVIRONMENTS, "disabled"), seed):
                pass

    with Replay(section, schemas={"main": SCHEMA}) as replay:
        table = replay.tables["main"]
        random = np.random.default_rng(0)
        for seed in range(1, 41):
            inserted = int(table.control[Control.INSERTED])
            child = in_child(lambda seed=seed: attach(seed))
            while table.control[Control.INSERTED] < inserted + 300:
                time.sleep(0.002)
            time.sleep(random.uniform(0, 0.005))
            kill(child)
            with table.lock:
                pass
            check_rows(table)
            check_whole(table, [])
        replay.clear()
        replay.add(
            {name: np.zeros((rows, WIDE), np.int64) for name, rows in (("code", 3), ("again", 2))}
        )
        replay.clear()
        with table.lock:
            assert table.control[Control.FREE_ROWS] == table.spec.capacity_rows
