"""Tables with rates and limits of draws, on any number of nodes: their batches until
none is left.
"""

from pathlib import Path
from typing import Any

from batch_records import priorities
from gear_support import SCHEMA, config_of, lengths_of, trajectory
from replay_cases import digests

from deepspeed_gear import Replay

BATCH = 12
COUNT = 40
RATE = {"min_size": 100, "samples_per_insert": 0.2, "error_buffer": 120.0}
SELDOM = {"min_size": 20, "samples_per_insert": 5.0, "error_buffer": 100.0}


def prioritized(normalize: str | None) -> dict[str, Any]:
    options = {"kind": "prioritized", "unit": "trajectory", "alpha": 0.7, "beta": 0.5}
    return {**options, "normalize": normalize}


def section_of(
    kind: str | dict[str, Any], unit: str = "trajectory", **table: Any
) -> dict[str, Any]:
    """Return a gear section with a table of 60 trajectories of at most 30 steps, and more options
    of it.
    """
    sampler = {"kind": kind, "unit": unit} if isinstance(kind, str) else kind
    sizes = {"capacity_steps": 900, "capacity_trajectories": 60, "max_length": 30}
    fields = {"code": {"length": 3}, "task": {}, "observation": {"offset": -1, "length": 2}}
    section = config_of(None, sampler=sampler, fields=fields, batch_size=BATCH, seed=3)
    return {**section, "tables": {"main": {**sizes, **table}}}


def sections() -> dict[str, dict[str, Any]]:
    """Return the gear section of each case by name."""

    return {
        "times": section_of("uniform", max_times_sampled=3),
        "once": section_of("length", max_times_sampled=1),
        "seldom": section_of("uniform", max_times_sampled=30, rate_limiter=SELDOM),
        "priorities": section_of(prioritized("batch"), max_times_sampled=4),
        "least_of_table": section_of(prioritized("table"), max_times_sampled=4),
        "number_of_items": section_of(prioritized(None), max_times_sampled=4),
        "ahead": {**section_of("uniform", max_times_sampled=3), "prefetch": 1},
        "newest": section_of("lifo", max_times_sampled=2),
        "queue": section_of("fifo", rate_limiter={"queue": 60}),
        "rate_limiter": section_of("uniform", "step", rate_limiter=RATE),
    }


def fill(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill a table on one node, use a batch and save it; return its state."""
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        for number, steps in enumerate(lengths_of(COUNT)):
            replay.add(trajectory(number, steps))
        replay.sample()
        return replay.save(folder)


def rest(section: dict[str, Any], folder: Path, state: dict[str, Any]) -> list[dict[str, str]]:
    """Load a table and take all batches that it is good for: digests by sample number, batch by
    batch.
    """
    found: list[dict[str, str]] = []
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        replay.load(folder, state)
        reports = replay.config.item_sampler.kind == "prioritized"
        while replay.can_sample():
            batch = replay.sample()
            found.append(digests(batch))
            if reports:
                replay.update_priorities(batch, priorities(batch))
    return found
