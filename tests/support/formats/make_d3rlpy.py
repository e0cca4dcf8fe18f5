"""Write small d3rlpy data sets with d3rlpy, and the transitions that it reads from them.

    python tests/support/formats/make_d3rlpy.py FOLDER

It needs an environment with d3rlpy 2. The folder `mini_d3rlpy` beside this file was made by it,
with d3rlpy 2.8.1: `arrays.h5` and `tuples.h5`, with observations of one array and of two, are
written by `ReplayBuffer.dump`; `first.h5` has the keys of `MDPDataset.dump` of version 1, which is
no longer there, as `ReplayBuffer.from_episode_generator` and `load_v1` read them.
`transitions.npz` has each array of the transitions as `FILE/EPISODE/KEY`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import d3rlpy
import h5py
import numpy as np
from d3rlpy.dataset import components, io

LENGTHS = {3: True, 1: True, 5: False, 2: False}  # of episodes, and whether they terminate


def episode(rng: Any, length: int, is_terminal: bool, has_parts: bool) -> Any:
    state = rng.standard_normal((length, 3)).astype(np.float32)
    image = rng.integers(0, 256, (length, 1, 4, 4), dtype=np.uint8)
    return components.Episode(
        observations=(state, image) if has_parts else state,
        actions=rng.standard_normal((length, 2)).astype(np.float32),
        rewards=rng.standard_normal((length, 1)).astype(np.float32),
        terminated=is_terminal,
    )


def write_first(path: Path, episodes: list[Any]) -> None:
    ends = [[0] * (one.size() - 1) + [1] for one in episodes]
    causes = [[0] * (one.size() - 1) + [int(one.terminated)] for one in episodes]
    with h5py.File(path, "w") as file:
        for key in ("observations", "actions", "rewards"):
            file[key] = np.concatenate([getattr(one, key) for one in episodes])
        file["terminals"] = np.concatenate(causes).astype(np.float32)
        file["episode_terminals"] = np.concatenate(ends).astype(np.float32)
        file["discrete_action"] = False
        file["version"] = "1.0"


def main(folder: str) -> None:
    read = {}
    picker = d3rlpy.dataset.BasicTransitionPicker()
    for name in ("arrays", "tuples", "first"):
        rng = np.random.default_rng(0)
        episodes = [episode(rng, *length, name == "tuples") for length in LENGTHS.items()]
        path = Path(folder, f"{name}.h5")
        if name == "first":
            write_first(path, episodes)
        else:
            with path.open("w+b") as file:
                d3rlpy.dataset.create_infinite_replay_buffer(episodes).dump(file)
        load: Any = io.load_v1 if name == "first" else partial(io.load, components.Episode)
        with path.open("rb") as file:
            read_episodes = load(file)
        for number, one in enumerate(read_episodes):
            count = one.transition_count
            transitions = [picker(one, at) for at in range(count)]
            for key in ("observation", "action", "reward", "next_observation", "terminal"):
                values = [getattr(transition, key) for transition in transitions]
                if isinstance(values[0], (list, tuple)):
                    for part, rows in enumerate(zip(*values, strict=True)):
                        read[f"{name}/{number}/{key}.{part}"] = np.stack(rows)
                else:
                    read[f"{name}/{number}/{key}"] = np.stack(values)
    np.savez_compressed(Path(folder, "transitions.npz"), **read)


if __name__ == "__main__":
    main(sys.argv[1])
