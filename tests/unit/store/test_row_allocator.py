"""Sets of slots, and what a first add imports."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from gear_support import prefix
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.store.row_allocator import distinct, is_among

NUMBERS = st.lists(st.integers(-5, 5), max_size=20)
ADD_UNTIL_FULL = """
import sys
import numpy as np
from deepspeed_gear import Column, Replay, Schema, TrajectoryWriter
section = {
    "tables": {"main": {"capacity_steps": 100, "max_length": 20, "writers": 1}},
    "sampler": {"kind": "uniform", "unit": "step"},
    "fields": {"value": {}},
    "batch_size": 4,
    "shared_memory": {"prefix": sys.argv[1]},
}
schemas = {"main": Schema([Column("value", "int64")])}
for remove in ("fifo", "uniform"):
    section["tables"]["main"]["remove"] = remove
    with Replay(section, schemas=schemas), TrajectoryWriter.attach(section) as writer:
        for _ in range(20):
            writer.add({"value": np.arange(20)})
print("numpy.ma" in sys.modules)
"""


@given(NUMBERS, NUMBERS)
def test_sets_are_those_of_numpy(values: list[int], few: list[int]) -> None:
    array = np.array(values, np.int64)
    assert np.array_equal(distinct(array), np.unique(array))
    assert np.array_equal(is_among(array, few), np.isin(array, few))


def test_a_full_store_takes_trajectories_without_slow_imports() -> None:
    command = [sys.executable, "-c", ADD_UNTIL_FULL, prefix()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["False"]
