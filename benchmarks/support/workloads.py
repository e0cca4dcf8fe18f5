"""The workloads that every benchmark of the field is measured on.

W1: 2,000 trajectories x 1,000 steps, observation f32[11], action f32[3], reward f32, done bool: 61
B a step. W2: 1,000 trajectories x 1,000 steps of W1 with the next observation in a column of its
own: 105 B a step. W3: 20,000 frames uint8[84, 84] in trajectories of 500; a sample is 4 consecutive
frames.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist

from deepspeed_gear import Column, Replay, Schema

SIZES = {"W1": (32, 128, 512, 1024), "W3": (32, 256)}
WINDOWS = {"W1": ("whole", "100", "20"), "W3": ("frames",)}
FRAMES = 4
PRIORITIZED = {"kind": "prioritized", "alpha": 0.6, "beta": 0.4}


@dataclass(frozen=True)
class Workload:
    """What is stored.

    Args:
        name: As in the tables.
        schema: Of its trajectories.
        num_trajectories, num_steps: How many there are, and how long each is.
        make: Returns the trajectory of a number.
    """

    name: str
    schema: Schema
    num_trajectories: int
    num_steps: int
    make: Callable[[int], dict[str, np.ndarray]]

    @property
    def num_items(self) -> int:
        """Steps of all trajectories."""
        return self.num_trajectories * self.num_steps

    def trajectories(self) -> Iterator[dict[str, np.ndarray]]:
        """Yield all trajectories in order."""
        return (self.make(number) for number in range(self.num_trajectories))

    def window(self, name: str) -> tuple[int, int]:
        """Return offset and length of a window of this workload."""
        if name == "whole":
            return 0, self.num_steps
        length = FRAMES if name == "frames" else int(name)
        return 1 - length, length

    def section(self, window: str, batch_size: int, **options: Any) -> dict[str, Any]:
        """Return the gear section that samples a window of every column, without padding."""
        offset, length = self.window(window)
        whole = window == "whole"
        return {
            "tables": {
                "main": {
                    "capacity_steps": self.num_items,
                    "capacity_trajectories": self.num_trajectories,
                }
            },
            "sampler": {
                "unit": "trajectory" if whole else "step",
                "anchors": "start" if whole else "fits",
            },
            "fields": {column.name: {"offset": offset, "length": length} for column in self.schema},
            "batch_size": batch_size,
            **options,
        }

    def steps_section(
        self, batch_size: int, sampler: dict[str, Any], **options: Any
    ) -> dict[str, Any]:
        """Return the gear section that samples single steps of every column."""
        section = self.section("1", batch_size, **options)
        section["sampler"] = {"unit": "step", **sampler}
        section["fields"] = {column.name: {"offset": 0} for column in self.schema}
        return section

    def replay(self, window: str, batch_size: int, **options: Any) -> Replay:
        """Make a Replay that holds the workload. Collective; rank 0 adds the trajectories."""
        return self.filled(self.section(window, batch_size, **options))

    def filled(self, section: dict[str, Any]) -> Replay:
        """Make the Replay of a gear section, and add the trajectories. Collective."""
        replay = Replay(section, schemas={"main": self.schema})
        if replay.topology.rank == 0:
            for trajectory in self.trajectories():
                replay.add(trajectory)
        if dist.is_initialized():
            dist.barrier()
        return replay


def workload(name: str, scale: float = 1.0) -> Workload:
    """Return W1, W2 or W3.

    Args:
        name: "W1", "W2" or "W3".
        scale: Part of the trajectories to hold, for quick runs.
    """
    if name in ("W1", "W2"):
        columns = [
            Column("observation", "float32", (11,), "observation"),
            Column("action", "float32", (3,), "action"),
            Column("reward", "float32", (), "reward"),
            Column("done", "bool", (), "terminated"),
        ]
        if name == "W1":
            return Workload(name, Schema(columns), max(8, int(2000 * scale)), 1000, _steps)
        columns.insert(1, Column("next_observation", "float32", (11,)))
        return Workload(name, Schema(columns), max(8, int(1000 * scale)), 1000, _transitions)
    columns = [Column("frame", "uint8", (84, 84), "observation")]
    return Workload(name, Schema(columns), max(4, int(40 * scale)), 500, _frames)


def _steps(number: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    return {
        "observation": random.standard_normal((1000, 11), np.float32),
        "action": random.standard_normal((1000, 3), np.float32),
        "reward": random.standard_normal(1000, np.float32),
        "done": np.arange(1000) == 999,
    }


def _transitions(number: int) -> dict[str, np.ndarray]:
    steps = _steps(number)
    return {**steps, "next_observation": np.roll(steps["observation"], -1, axis=0)}


def _frames(number: int) -> dict[str, np.ndarray]:
    return {"frame": np.random.default_rng(number).integers(0, 256, (500, 84, 84), np.uint8)}
