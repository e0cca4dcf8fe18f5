"""Write buffers of Stable-Baselines3 as npz files, by the program of docs/how-to/formats.md.

    python tests/support/formats/make_sb3.py FOLDER

It needs an environment with stable-baselines3. The folder `mini_sb3` beside this file was made by
it, with stable-baselines3 2.9.0: `ring.npz` (two environments, dict observations, a ring that has
been overwritten), `ring.pkl` (the start of its pickle), `rollout.npz`, and `expected.npz`: the
steps that were added last, as `FILE/KEY`, [T, environment, ...].
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import DictReplayBuffer, RolloutBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

NUM_ENVS = 2
SIZE = 9  # steps of each environment that the ring holds
ADDED = 14
BOX = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTION = spaces.Box(-1, 1, (2,), np.float32)


def export(buffer: Any) -> dict[str, Any]:
    arrays = {}
    for name, value in vars(buffer).items():
        parts = value.items() if isinstance(value, dict) else [("", value)]
        for part, rows in parts:
            if isinstance(rows, np.ndarray):
                key = f"{name}/{part}" if part else name
                arrays[key] = np.roll(rows, -buffer.pos, axis=0)[-buffer.size() :]
    return arrays


def ring(rng: Any) -> tuple[Any, dict[str, Any]]:
    space = spaces.Dict({"position": BOX, "target": spaces.Box(-9, 9, (1,), np.float32)})
    buffer = DictReplayBuffer(SIZE * NUM_ENVS, space, ACTION, n_envs=NUM_ENVS)
    steps: dict[str, list[Any]] = {}
    names = {"position": 3, "target": 1}
    state = {key: rng.random((NUM_ENVS, n), np.float32) for key, n in names.items()}
    for at in range(ADDED):
        after = {key: rng.random((NUM_ENVS, n), np.float32) for key, n in names.items()}
        done = np.array([at % 5 == 4, at % 4 == 3])
        is_limit = np.array([at % 10 == 9, True]) & done
        step = {
            **{f"observation.{key}": rows for key, rows in state.items()},
            **{f"next_observation.{key}": rows for key, rows in after.items()},
            "action": rng.random((NUM_ENVS, 2), np.float32),
            "reward": rng.random(NUM_ENVS, np.float32),
            "terminated": done & ~is_limit,
            "truncated": is_limit,
        }
        for key, rows in step.items():
            steps.setdefault(key, []).append(rows)
        infos = [{"TimeLimit.truncated": bool(one)} for one in is_limit]
        buffer.add(state, after, step["action"], step["reward"], done, infos)
        # At an end the environment has reset itself; SB3 adds the last observation of the episode.
        fresh = {key: rng.random((NUM_ENVS, n), np.float32) for key, n in names.items()}
        state = {key: np.where(done[:, None], fresh[key], rows) for key, rows in after.items()}
    return buffer, {key: np.stack(rows[-SIZE:]) for key, rows in steps.items()}


def rollout(rng: Any) -> tuple[Any, dict[str, Any]]:
    buffer = RolloutBuffer(6, BOX, ACTION, n_envs=NUM_ENVS)
    steps: dict[str, list[Any]] = {}
    for at in range(6):
        step = {
            "observation": rng.random((NUM_ENVS, 3), np.float32),
            "action": rng.random((NUM_ENVS, 2), np.float32),
            "reward": rng.random(NUM_ENVS, np.float32),
            "start": np.array([at in (0, 4), at in (0, 2, 3)]),
        }
        for key, rows in step.items():
            steps.setdefault(key, []).append(rows)
        zeros = torch.zeros(NUM_ENVS)
        given = (step[key] for key in ("observation", "action", "reward", "start"))
        buffer.add(*given, zeros, zeros)
    return buffer, {key: np.stack(rows) for key, rows in steps.items()}


def main(folder: str) -> None:
    rng = np.random.default_rng(0)
    expected = {}
    for name, make in {"ring": ring, "rollout": rollout}.items():
        buffer, steps = make(rng)
        path = Path(folder, f"{name}.pkl")
        save_to_pkl(path, buffer)
        np.savez_compressed(path.with_suffix(".npz"), **export(load_from_pkl(path)))
        content = path.read_bytes()[:256]
        path.write_bytes(content) if name == "ring" else path.unlink()
        expected.update({f"{name}/{key}": rows for key, rows in steps.items()})
    np.savez_compressed(Path(folder, "expected.npz"), **expected)


if __name__ == "__main__":
    main(sys.argv[1])
