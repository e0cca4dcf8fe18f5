"""Write small shards with webdataset, and the samples that it reads from them.

    python tests/support/formats/make_webdataset.py FOLDER

It needs an environment with webdataset and pillow. The folder `mini_webdataset` beside this file
was made by it, with webdataset 1.0.2: `steps/*.tar` has a step per sample, of episodes that go on
in the next shard; `episodes.tar.gz` an episode per sample. `expected.npz` has each value as
`NAME/SAMPLE/FIELD`, read and decoded by webdataset.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import webdataset

LENGTHS = (3, 5, 4)
PER_SHARD = 5


def steps(rng: Any) -> list[dict[str, Any]]:
    samples = []
    for episode, length in enumerate(LENGTHS):
        for at in range(length):
            samples.append(
                {
                    "__key__": f"robot/{episode:03d}-{at:03d}",
                    "observation.state.npy": rng.random(3).astype(np.float32),
                    "observation.image.png": rng.random((4, 5, 3)),
                    "action.npy": rng.random(2),
                    "reward.npy": np.float32(at),
                    "json": {"episode_index": episode, "terminated": at == length - 1},
                    "txt": f"task {episode}",
                    "cls": episode % 2,
                }
            )
    return samples


def episodes(rng: Any) -> list[dict[str, Any]]:
    return [
        {
            "__key__": f"episode{number}",
            "npz": {
                "obs": rng.random((length + 1, 3)).astype(np.float32),
                "actions": rng.integers(0, 4, length),
                "rewards": rng.random(length),
                "dones": np.arange(length) == length - 1,
            },
            "json": {"seed": number},
        }
        for number, length in enumerate(LENGTHS)
    ]


def main(folder: str) -> None:
    rng = np.random.default_rng(0)
    Path(folder, "steps").mkdir(parents=True, exist_ok=True)
    samples = steps(rng)
    shards = []
    for low in range(0, len(samples), PER_SHARD):
        shards.append(str(Path(folder, "steps", f"part-{len(shards):06d}.tar")))
        with webdataset.TarWriter(shards[-1]) as sink:
            for sample in samples[low : low + PER_SHARD]:
                sink.write(sample)
    whole = str(Path(folder, "episodes.tar.gz"))
    with webdataset.TarWriter(whole, compress=True) as sink:
        for sample in episodes(rng):
            sink.write(sample)
    expected: dict[str, Any] = {}
    for name, urls in {"steps": shards, "episodes": [whole]}.items():
        read = webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8")
        for number, sample in enumerate(read):
            for field, value in sample.items():
                if field.startswith("__"):
                    continue
                values = value.items() if hasattr(value, "items") else [("", value)]
                for part, one in values:
                    key = f"{name}/{number}/{field}.{part}" if part else f"{name}/{number}/{field}"
                    expected[key] = np.asarray(one)
    np.savez_compressed(Path(folder, "expected.npz"), **expected)


if __name__ == "__main__":
    main(sys.argv[1])
