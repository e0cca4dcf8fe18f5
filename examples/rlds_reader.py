"""RLDS: data sets of TensorFlow Datasets whose examples are episodes of steps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.ingest.reader import (
    FLAGS,
    LEAVE_OUT,
    Reader,
    column_name,
    convert,
    end_episode,
    make_column,
)
from deepspeed_gear.data.ingest.source_checks import DAMAGED, optional, read_source_json
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Rows

_FEATURES = "features.json"
_INFO = "dataset_info.json"
_FLAGS = ("is_first", "is_last", "is_terminal")
_BLOCK_STEPS = 256


class RldsReader(Reader):
    """Reads RLDS by the iterator of tensorflow-datasets: the splits after each other, in the files'
    order.

    As RLDS defines it, the last step of an episode holds the observation after the last action, and
    its own action and reward mean nothing: N steps become N-1 with T+1 observations. `is_terminal`
    of the last step becomes `terminated`, any other episode is truncated. Other features of steps
    become columns of T rows.
    """

    format = "rlds"
    ends_with_observation: ClassVar[bool] = True

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if not (path / _FEATURES).is_file() or not (path / _INFO).is_file():
            return False
        known = read_source_json(path / _FEATURES).get("featuresDict")
        return isinstance(known, dict) and "steps" in known.get("features", ())

    def open(self) -> None:
        """Check the features, and describe the columns by the first episode."""
        for name in re.findall(
            r'"pythonClassName": "([^"]*)"', json.dumps(read_source_json(self.path / _FEATURES))
        ):
            if not name.startswith("tensorflow_datasets."):  # which would be imported
                where = f"{self.path / _FEATURES}: pythonClassName"
                raise DataError(where, "must be a class of tensorflow_datasets", name)
        self._file_bytes = sum(
            file.stat().st_size for file in self.path.rglob("*") if file.is_file()
        )
        episodes = self._read()
        first = next(episodes, None)
        if first is None:
            raise DataError(
                str(self.path), "must hold at least one episode", 0, "the data set is empty"
            )
        self._episodes = chain([first], episodes)
        (name, steps) = first
        groups = {key: key.split(".")[0] for key in steps}
        for key in sorted({"observation", *_FLAGS} - set(groups.values())):
            raise DataError(f"{self.path}: {name}: {key}", "must be in every step", sorted(steps))
        columns = []
        for key, rows in steps.items():
            if key in _FLAGS or (key != "reward" and not self.select(key)):
                continue
            if rows.dtype.kind in "OSU":
                self.notes.append(f"{key} is text per step, which no column holds: left out")
                continue
            where = f"{self.path}: {name}: {key}"
            role = groups[key]
            role = role if role in ("observation", "action", "reward") else "other"
            count: Rows = "T+1" if role == "observation" and self.ends_with_observation else "T"
            columns.append(make_column(where, key, rows.dtype, rows.shape[1:], role, count))
        self.columns = (*columns, *FLAGS)

    def _read(self) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
        """Yield the name of each episode, and its steps: [N, ...] by the name of the column."""
        rule = "must be read with tensorflow-datasets"
        packages = "tensorflow tensorflow-datasets"
        tf, tfds = (
            optional(str(self.path), rule, packages, m)
            for m in ("tensorflow", "tensorflow_datasets")
        )
        kinds = (tf.errors.OpError, tfds.core.DatasetNotFoundError, OSError)
        num_bytes = 0
        with DataError.on(
            str(self.path), "must be a readable data set of TFDS", *kinds, remedy=DAMAGED
        ):
            builder = tfds.builder_from_directory(str(self.path))
            self.description.update(
                dataset=builder.info.full_name, splits=list(builder.info.splits)
            )
            config = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
            for split in builder.info.splits:
                data = builder.as_dataset(split=split, shuffle_files=False, read_config=config)
                data = data.map(lambda episode: {"steps": episode["steps"].batch(_BLOCK_STEPS)})
                for number, episode in enumerate(tfds.as_numpy(data)):
                    name = f"{split} episode {number}"
                    parts: dict[str, list[NDArray[Any]]] = {}
                    for block in episode["steps"]:
                        for key, rows in _leaves(block):
                            num_bytes += rows.nbytes
                            parts.setdefault(key, []).append(rows)
                        self.expansion.check(str(self.path), num_bytes, self._file_bytes)
                    yield name, {key: np.concatenate(rows) for key, rows in parts.items()}

    def episodes(self) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
        for name, steps in self._episodes:
            first, last, terminal = (steps[key].astype(np.bool_) for key in _FLAGS)
            if first[1:].any() or last[:-1].any():
                at = int(np.argmax(first[1:] | last[:-1]))
                rule = "must be set at the first and the last step of an episode only"
                raise DataError(
                    f"{self.path}: {name}: is_first, is_last", rule, f"an end at step {at}"
                )
            rewards = steps.get("reward", np.zeros(1))
            if self.ends_with_observation and len(first) and rewards[-1].any():
                rule = "must be 0 at the last step, which has only an observation in RLDS"
                remedy = (
                    "RldsStepsReader takes every step for a transition, and has no last observation"
                )
                raise DataError(f"{self.path}: {name}: reward", rule, rewards[-1].item(), remedy)
            length = len(first) - int(self.ends_with_observation)
            if length < 1:
                self.notes.append(f"{name} has no action: left out")
                continue
            arrays: dict[str, Any] = {}
            for column in self.columns[:-2]:
                where = f"{self.path}: {name}: {column.name}"
                if column.name not in steps:
                    raise DataError(where, "must be in every step", sorted(steps), LEAVE_OUT)
                rows = steps[column.name][: len(first) if column.rows == "T+1" else length]
                arrays[column.name] = convert(where, rows, column)
            arrays["terminated"], arrays["truncated"] = np.zeros((2, length), np.bool_)
            arrays["terminated"][-1] = terminal[-1]
            end_episode(arrays)
            yield name, arrays


class RldsStepsReader(RldsReader):
    """Reads RLDS whose last steps have an action and a reward, as many robot data sets: N steps are
    N.
    """

    format = "rlds-steps"
    ends_with_observation = False

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return False  # it looks as RLDS


def _leaves(block: dict[str, Any], *parts: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays of nested dicts by the names of their columns."""
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _leaves(value, *parts, key)
        else:
            yield column_name(*parts, key), np.asarray(value)
