"""Cut the miniatures of real files, from a folder that has these files.

python benchmarks/public_data/cut_miniatures.py ORIGINALS

Each function names the files below ORIGINALS that it reads; docs/how-to/public-data-sets.md has
where they come from.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet as parquet

MINIATURES = Path(__file__).resolve().parent / "miniatures"


def hopper_random(originals: Path, folder: Path) -> None:
    """The first 16 episodes of roll-outs in Hopper-v4, in D4RL's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    with (
        h5py.File(originals / "hopper_d4rl" / "hopper_random_v4env.hdf5") as whole,
        h5py.File(folder / "hopper-random.hdf5", "w") as part,
    ):
        ends = np.flatnonzero(whole["terminals"][()] | whole["timeouts"][()]) + 1
        rows = int(ends[15])
        for name, array in whole.items():
            part.create_dataset(name, data=array[:rows], compression="gzip")
        # Groups that D4RL's files have, too.
        part.create_dataset("infos/qpos", data=whole["observations"][:rows, :5], compression="gzip")
        part["metadata/algorithm"] = b"random"


def minari_hopper(originals: Path, folder: Path) -> None:
    """The two shortest episodes of a Minari file of Hopper-v4, renumbered."""
    source = originals / "minari" / "hopper" / "medium-v0" / "data"
    (folder / "data").mkdir(parents=True, exist_ok=True)
    with (
        h5py.File(source / "main_data.hdf5") as whole,
        h5py.File(folder / "data" / "main_data.hdf5", "w") as part,
    ):
        names = sorted(whole, key=lambda name: int(whole[name].attrs["total_steps"]))[:2]
        for number, name in enumerate(names):
            episode = part.create_group(f"episode_{number}")
            episode.attrs.update(whole[name].attrs)
            episode.attrs["id"] = number
            for key, node in whole[name].items():
                if isinstance(node, h5py.Dataset):
                    episode.create_dataset(key, data=node[()], compression="gzip")
                else:
                    whole.copy(node, episode, name=key)
        steps = sum(int(episode.attrs["total_steps"]) for episode in part.values())
    metadata = json.loads((source / "metadata.json").read_text())
    metadata.update(total_episodes=2, total_steps=steps)
    (folder / "data" / "metadata.json").write_text(json.dumps(metadata))


def lerobot_g1(originals: Path, folder: Path) -> None:
    """The first 60 frames of two episodes of a LeRobot 2.1 data set, without its videos."""
    source = originals / "lerobot_g1"
    chunk = "data/chunk-000"
    (folder / "meta").mkdir(parents=True, exist_ok=True)
    (folder / chunk).mkdir(parents=True, exist_ok=True)
    for number in range(2):
        name = f"{chunk}/episode_{number:06d}.parquet"
        parquet.write_table(parquet.read_table(source / name).slice(0, 60), folder / name)
    info = json.loads((source / "meta" / "info.json").read_text())
    info.update(total_episodes=2, total_frames=120, total_videos=2, splits={"train": "0:2"})
    (folder / "meta" / "info.json").write_text(json.dumps(info, indent=1))
    lines = (source / "meta" / "episodes.jsonl").read_text().splitlines()[:2]
    episodes = [{**json.loads(line), "length": 60} for line in lines]
    text = "\n".join(json.dumps(episode) for episode in episodes)
    (folder / "meta" / "episodes.jsonl").write_text(text + "\n")
    shutil.copyfile(source / "meta" / "tasks.jsonl", folder / "meta" / "tasks.jsonl")
    shutil.copyfile(source / "LICENSE", folder / "LICENSE")


def _cut(episode: dict[str, Any], steps: int, flag: str = "") -> dict[str, Any]:
    """Return the first steps of an episode's arrays, with the flag of its last step at the end."""
    part = {k: v[:steps] if isinstance(v, np.ndarray) else v for k, v in episode.items()}
    if flag:
        part[flag] = np.arange(steps) == steps - 1
    return part


def cs285_hopper(originals: Path, folder: Path) -> None:
    """The first 150 steps of both expert episodes; `terminal` is set at the last step, as there."""
    folder.mkdir(parents=True, exist_ok=True)
    episodes = pickle.loads((originals / "cs285" / "expert_data_Hopper-v4.pkl").read_bytes())
    parts = [_cut(episode, 150, "terminal") for episode in episodes]
    (folder / "expert_data_Hopper-v4.pkl").write_bytes(pickle.dumps(parts, protocol=4))


def dapg_door(originals: Path, folder: Path) -> None:
    """The first 40 steps of two human demonstrations."""
    folder.mkdir(parents=True, exist_ok=True)
    content = (originals / "dapg_door" / "door-v0_demos.pickle").read_bytes()
    demos = pickle.loads(content, encoding="latin1")[:2]
    parts = [_cut(demo, 40) for demo in demos]
    (folder / "door-v0_demos.pickle").write_bytes(pickle.dumps(parts, protocol=2))


def rllib_cartpole(originals: Path, folder: Path) -> None:
    """Three steps of RLlib's file of CartPole, with the `dones` of the last one set."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(originals / "rllib" / "small_excerpt.json", folder / "small.json")


CUTS = {
    "d4rl": hopper_random,
    "minari/hopper/medium-v0": minari_hopper,
    "lerobot/g1": lerobot_g1,
    "cs285": cs285_hopper,
    "dapg": dapg_door,
    "rllib": rllib_cartpole,
}


if __name__ == "__main__":
    for name, cut in CUTS.items():
        cut(Path(sys.argv[1]), MINIATURES / name)
