"""Write the CartPole trajectories of examples/data as a data set: `cartpole_data.py
data/cartpole`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from deepspeed_gear import Column, DatasetWriter, Schema

SOURCE = Path(__file__).parent / "data" / "cartpole_expert.npz"
# where CartPole-v1 ends an episode
X_LIMIT = 2.4
ANGLE_LIMIT = 12 * np.pi / 180
TIME_LIMIT = 500

SCHEMA = Schema(
    [
        Column("observation", "float32", (4,), role="observation", rows="T+1"),
        Column("action", "int64", role="action"),
        Column("reward", "float32", role="reward"),
        Column("terminated", "bool", role="terminated"),
        Column("truncated", "bool", role="truncated"),
    ]
)


def write(dest: str | Path) -> None:
    """Write all trajectories, replacing a data set that is there.

    The file marks the end of each trajectory but not its cause: the cart or the pole beyond its
    limit is a terminal state, of value 0; the time limit is not, and is bootstrapped through.
    """
    with np.load(SOURCE) as file:
        actions = np.split(file["acts"], file["indices"])
        rewards = np.split(file["rews"], file["indices"])
        first = np.cumsum([0, *(len(a) + 1 for a in actions)])  # one observation more than actions
        observations = np.split(file["obs"], first[1:-1])
    with DatasetWriter(
        dest, SCHEMA, overwrite=True, source={"format": "npz", "file": SOURCE.name}
    ) as writer:
        for observation, action, reward in zip(observations, actions, rewards, strict=True):
            position, _, angle, _ = observation[-1]
            failed = abs(position) > X_LIMIT or abs(angle) > ANGLE_LIMIT
            assert failed == (len(action) < TIME_LIMIT), (
                "an episode ends by failure or by its time limit"
            )
            ends = np.arange(len(action)) == len(action) - 1
            writer.add(
                {
                    "observation": observation,
                    "action": action,
                    "reward": reward.astype(np.float32),
                    "terminated": ends & failed,
                    "truncated": ends & (not failed),
                }
            )


if __name__ == "__main__":
    write(sys.argv[1])
