"""Write a small RLDS data set with tensorflow-datasets, and what its own reader returns.

    python tests/support/formats/make_rlds.py FOLDER

It needs an environment with tensorflow and tensorflow-datasets. FOLDER gets the files of the data
set, and `expected.npz`: each array of the steps as `SPLIT/EPISODE/KEY`, read by
tensorflow-datasets. The folder beside this file was made by it, with tensorflow-datasets 4.9.10.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

STEP = {
    "observation": {
        "state": tfds.features.Tensor(shape=(3,), dtype=np.float32),
        "image": tfds.features.Image(shape=(4, 5, 3), dtype=np.uint8, encoding_format="png"),
        "map": tfds.features.Tensor(shape=(2, 2), dtype=np.uint8),
    },
    "action": tfds.features.Tensor(shape=(2,), dtype=np.float64),
    "reward": tfds.features.Scalar(dtype=np.float32),
    "discount": np.float32,
    "count": np.int64,
    "packed": tfds.features.Tensor(shape=(2,), dtype=np.int32, encoding="zlib"),
    "is_first": np.bool_,
    "is_last": np.bool_,
    "is_terminal": np.bool_,
    "language_instruction": tfds.features.Text(),
}
LENGTHS = {"train": (3, 1, 6), "val": (4,)}


class MiniRobot(tfds.core.GeneratorBasedBuilder):
    """A data set of four episodes."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        features = tfds.features.FeaturesDict(
            {
                "steps": tfds.features.Dataset(STEP),
                "episode_metadata": {"file_path": tfds.features.Text()},
            }
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager: Any) -> Any:
        return {split: self._generate_examples(split) for split in LENGTHS}

    def _generate_examples(self, split: str) -> Any:
        for number, length in enumerate(LENGTHS[split]):
            rng = np.random.default_rng(10 * number + len(split))
            steps = [_step(rng, at, length, number) for at in range(length)]
            yield number, {"steps": steps, "episode_metadata": {"file_path": f"{split}{number}"}}


def _step(rng: Any, at: int, length: int, number: int) -> dict[str, Any]:
    is_last = at == length - 1
    return {
        "observation": {
            "state": rng.standard_normal(3).astype(np.float32),
            "image": rng.integers(0, 256, (4, 5, 3), dtype=np.uint8),
            "map": rng.integers(0, 256, (2, 2), dtype=np.uint8),
        },
        "action": rng.standard_normal(2),
        "reward": np.float32(0 if is_last else rng.standard_normal()),
        "discount": np.float32(1),
        "count": -at * 2**40,
        "packed": np.array([at, -at], np.int32),
        "is_first": at == 0,
        "is_last": is_last,
        "is_terminal": is_last and number % 2 == 0,
        "language_instruction": "lift the block",
    }


def _leaves(value: Any, *names: str) -> Any:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, *names, name)
    else:
        yield ".".join(names), value


def main(folder: str) -> None:
    arrays = {}
    with tempfile.TemporaryDirectory() as work:
        builder = MiniRobot(data_dir=work, file_format="tfrecord")
        builder.download_and_prepare()
        shutil.copytree(builder.data_dir, folder, dirs_exist_ok=True)
        config = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
        for split in LENGTHS:
            read = builder.as_dataset(split=split, shuffle_files=False, read_config=config)
            for number, episode in enumerate(read):
                steps = [dict(_leaves(step)) for step in tfds.as_numpy(episode["steps"])]
                for key in steps[0]:
                    if key != "language_instruction":
                        arrays[f"{split}/{number}/{key}"] = np.stack([step[key] for step in steps])
    np.savez_compressed(Path(folder, "expected.npz"), **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
