"""Hopper as three agents, one for each joint: "3x1" of MaMuJoCo. Run, it divides a data set among
them.

    python examples/mamujoco.py data/hopper data/hopper_3x1

An agent observes angle and velocity of its joint, the angles of the joints beside it, and the
torso, by the indices of gymnasium-robotics 1.4: `mamujoco_v1.parallel_env("Hopper",
"3x1").create_observation_mapping()`.

Source: Peng et al., "FACMAC: Factored Multi-Agent Centralised Policy Gradients", NeurIPS 2021.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from deepspeed_gear import Dataset, DatasetWriter, Schema

# An observation of Hopper: height, angles of torso, thigh, leg, foot; velocities of x, the height,
# these.
TORSO = [0, 1, 5, 6, 7]
PARTS = [[2, 8, 3, *TORSO], [3, 9, 4, 2, *TORSO], [4, 10, 3, *TORSO]]  # thigh, leg, foot
AGENTS = len(PARTS)
SIZE = max(len(part) for part in PARTS)


def local_observations(observation: np.ndarray) -> np.ndarray:
    """Return what each agent observes, with a 0 at the end where it is less. [.., 11] to [.., 3,
    9].
    """
    local = np.zeros((*observation.shape[:-1], AGENTS, SIZE), observation.dtype)
    for agent, part in enumerate(PARTS):
        local[..., agent, : len(part)] = observation[..., part]
    return local


def divide(source: str, dest: str) -> Dataset:
    """Write a data set of Hopper with observations [T+1, 3, 9] and actions [T, 3, 1]."""
    data = Dataset.open(source)
    shapes = {"observation": (AGENTS, SIZE), "action": (AGENTS, 1)}
    schema = Schema(
        replace(column, shape=shapes.get(column.name, column.shape)) for column in data.schema
    )
    with DatasetWriter(dest, schema, split=data.split) as writer:
        for trajectory in map(data.trajectory, range(len(data))):
            local = local_observations(trajectory["observation"])
            writer.add(
                {**trajectory, "observation": local, "action": trajectory["action"][..., None]}
            )
    return Dataset.open(dest)


if __name__ == "__main__":
    print(divide(*sys.argv[1:]))
