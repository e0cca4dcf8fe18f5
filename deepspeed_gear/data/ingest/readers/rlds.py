"""Reader of RLDS, TensorFlow Datasets whose examples are episodes, without TensorFlow."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import deepspeed_gear.data.ingest.last_rows as last_rows
from deepspeed_gear.data.dataset_files import check_no_pointer
from deepspeed_gear.data.ingest.decoding.image_decoding import decode_images
from deepspeed_gear.data.ingest.decoding.tfrecord import parse_example, records
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.source_checks import DAMAGED, read_source_json
from deepspeed_gear.data.ingest.source_columns import (
    FLAGS,
    LEAVE_OUT,
    column_name,
    convert,
    end_episode,
    in_order_of_roles,
    make_column,
)
from deepspeed_gear.data.ingest.source_names import ROW_FLAGS, meaning
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Rows

FEATURES = "features.json"
INFO = "dataset_info.json"
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_ROLES = ("observation", "action", "reward")
_COMPLETE = "take the whole folder of the version, with features.json, dataset_info.json and shards"
_AGAIN = "the data set is incomplete; download it again"


@dataclass(frozen=True)
class _Feature:
    """A feature of the steps: its key in the records, and what its values are.

    The kind is "numbers", "image", "bytes" or "zlib" (numbers as byte strings), "text", or "" for
    a feature that no column holds. A dimension is -1 where the description leaves it open.
    """

    key: str
    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Shard:
    file: Path
    split: str
    num_records: int


class RldsReader(Reader):
    """Reads a version folder of TFDS in the file format TFRecord: split by split, shard by shard.

    A record is an episode. What its last step holds is decided as for all flags of rows
    (`last_rows`). Nested features become `observation.image`, `action.gripper` and so on; a text
    that all steps of an episode have becomes a column of one value per episode.
    """

    format = "rlds"
    takes = ("last_step",)
    early_roles = ("observation", "action", "reward")

    @classmethod
    def recognises(cls, path: Path) -> bool:
        if not path.is_dir():
            return False
        if any(".tfrecord" in file.name for file in path.iterdir()):
            return True
        return (path / INFO).is_file() and (path / FEATURES).is_file()

    def open(self) -> None:
        """Read the description, and find the last steps, the texts and the number of steps.

        Cost: one pass over the shards, which checks them; no image is decoded.
        """
        shards = self._described_shards()
        self._features = self._described_features()
        flags = {feature.name for feature in self._features} & {*ROW_FLAGS}
        if not flags:
            names = ", ".join(feature.name for feature in self._features)
            raise DataError(
                f"{self.path / FEATURES}: steps",
                f"must have one of {', '.join(ROW_FLAGS)}",
                names,
                "give a feature one of these names with --rename",
            )
        self._shards = shards
        self._file_bytes = sum(shard.file.stat().st_size for shard in shards)
        self._texts: dict[str, int] = {}  # bytes of the longest one, by name
        self._varying: set[str] = set()  # texts that differ within an episode
        self._read_ends()
        if self._num_episodes == 0:
            raise DataError(
                str(self.path), "must hold at least one step", 0, "the data set is empty"
            )
        self.columns = self._columns()
        self.description.update(
            dataset=self._info.get("name"),
            version=self._info.get("version"),
            splits=[*dict.fromkeys(shard.split for shard in shards)],
            episodes=self._num_episodes,
            steps=self.num_steps,
        )
        self.notes.append(last_rows.NOTES[self._last_step])
        self.note("{} episodes of one row have no step: left out", self._num_empty)

    def _described_shards(self) -> list[_Shard]:
        """Return the shards that dataset_info.json lists; DataError for one that is missing."""
        for name in (INFO, FEATURES):
            if not (self.path / name).is_file():
                raise DataError(str(self.path / name), "must exist", None, _COMPLETE)
        info = self._info = read_source_json(self.path / INFO)
        where = str(self.path / INFO)
        if info.get("fileFormat", "tfrecord") != "tfrecord":
            raise DataError(
                f"{where}: fileFormat",
                "must be tfrecord",
                info["fileFormat"],
                "tfds convert_format --out_file_format=tfrecord writes it so",
            )
        shards = []
        with DataError.on(
            f"{where}: splits",
            "must list the shards of each split",
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            remedy=DAMAGED,
        ):
            for split in info["splits"]:
                counts = [int(count) for count in split.get("shardLengths", ())]
                for number, count in enumerate(counts):
                    values = {
                        "DATASET": str(info["name"]),
                        "SPLIT": str(split["name"]),
                        "FILEFORMAT": "tfrecord",
                        "SHARD_INDEX": f"{number:05d}",
                        "NUM_SHARDS": f"{len(counts):05d}",
                        "SHARD_X_OF_Y": f"{number:05d}-of-{len(counts):05d}",
                    }
                    name = str(split.get("filepathTemplate") or _TEMPLATE)
                    for key, value in values.items():
                        name = name.replace("{" + key + "}", value)
                    if Path(name).name != name:
                        raise ValueError(f"a shard with the name {name:.200}")
                    shards.append(_Shard(self.path / name, str(split["name"]), count))
        for shard in shards:
            if not shard.file.is_file():
                raise DataError(str(shard.file), "must exist", None, _AGAIN)
            check_no_pointer(shard.file)
        return shards

    def _described_features(self) -> list[_Feature]:
        where = f"{self.path / FEATURES}: steps"
        description = read_source_json(self.path / FEATURES)
        try:
            features = description["featuresDict"]["features"]
            steps = features["steps"]
            inner = steps.get("sequence", steps.get("dataset"))["feature"]
            found = [*_leaves(inner, ())]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DataError(
                where,
                "must be a Dataset feature of steps, as RLDS has it",
                f"{error!r:.200}",
                "convert the data set to RLDS, or write a reader (docs/how-to/"
                "add-an-ingest-format.md)",
            ) from error
        self.names.compare(".".join(parts) for parts, _ in found)
        kept = []
        for parts, content in found:
            given = self.names.name(".".join(parts))
            name = given if given in ROW_FLAGS else column_name(*meaning(given))
            if name in (*ROW_FLAGS, "reward") or self.select(name):
                kept.append(_feature("/".join(("steps", *parts)), name, content))
        self.note("features of the episode, left out: {}", sorted(features.keys() - {"steps"}))
        for feature in [one for one in kept if not one.kind]:
            self.notes.append(f"{feature.name} is of a kind that no column holds: left out")
        return [feature for feature in kept if feature.kind]

    def _records(self) -> Iterator[tuple[_Shard, str, dict[str, Any]]]:
        """Yield the shard, the place for errors and the lists of each record."""
        for shard in self._shards:
            number = -1
            for number, content in records(shard.file):
                where = f"{shard.file}: record {number}"
                yield shard, where, parse_example(where, content)
            if number + 1 != shard.num_records:
                raise DataError(
                    str(shard.file),
                    f"must hold the {shard.num_records} records that {INFO} states",
                    number + 1,
                    _AGAIN,
                )

    def _read_ends(self) -> None:
        """Read flags, rewards and texts of all episodes."""
        small = [
            feature
            for feature in self._features
            if feature.name in (*ROW_FLAGS, "reward") or feature.kind == "text"
        ]
        at_first = at_last = False
        lengths = []
        for _, where, example in self._records():
            rows = self._num_rows(where, example)
            if not rows:
                lengths.append(0)
                continue
            self._find_shapes(where, example)
            values = {f.name: self._decoded(where, example, f, rows) for f in small}
            first, last = last_rows.end_rewards(values)
            at_first |= first
            at_last |= last
            for feature in small:
                if feature.kind == "text":
                    texts = values[feature.name]
                    longest = max(map(len, texts))
                    known = self._texts.get(feature.name, 1)
                    self._texts[feature.name] = max(known, longest)
                    if len({*texts}) > 1:
                        self._varying.add(feature.name)
            lengths.append(rows)
        if (given := self.options.get("last_step")) is not None:
            self._last_step = last_rows.check_last_step(given)
        else:
            self._last_step = last_rows.last_step(self.path, at_first, at_last)
        less = 0 if self._last_step == last_rows.TRANSITION else 1
        kept = [rows - less for rows in lengths if rows > less]
        self._num_episodes = len(kept)
        self._num_empty = len(lengths) - len(kept)
        self.num_steps = sum(kept)

    def _num_rows(self, where: str, example: Mapping[str, Any]) -> int:
        flag = next(feature for feature in self._features if feature.name in ROW_FLAGS)
        values = example.get(flag.key)
        return 0 if values is None else len(values)

    def _find_shapes(self, where: str, example: Mapping[str, Any]) -> None:
        """Take the shapes of images that the description leaves open from the first episode."""
        for place, feature in enumerate(self._features):
            if feature.kind == "image" and min(feature.shape, default=-1) < 0:
                images = self._images(f"{where}: {feature.key}", example, feature.key, 1)
                self._features[place] = replace(feature, shape=images.shape[1:])

    def _images(
        self, where: str, example: Mapping[str, Any], key: str, most: int | None = None
    ) -> NDArray[np.uint8]:
        frames = example.get(key) or []
        images = decode_images(where, list(frames[:most]), self.expansion, self._file_bytes)
        return images if images.ndim == 4 else images[..., None]

    def _columns(self) -> tuple[Column, ...]:
        has_last_row = self._last_step != last_rows.TRANSITION
        texts = []
        others = []
        for feature in self._features:
            where = f"{self.path / FEATURES}: {feature.key}"
            if feature.name in ROW_FLAGS:
                continue
            if feature.kind == "text":
                if feature.name in self._varying:
                    self.notes.append(
                        f"{feature.name} is text that differs between steps, which no column "
                        "holds: left out"
                    )
                else:
                    most = self._texts[feature.name]
                    texts.append(Column(feature.name, "bytes", rows="1", max_bytes=most))
                continue
            head = feature.name.split(".")[0]
            role = head if head in _ROLES else "other"
            rows: Rows = "T+1" if role == "observation" and has_last_row else "T"
            dtype = np.dtype(feature.dtype)
            others.append(make_column(where, feature.name, dtype, feature.shape, role, rows))
        return in_order_of_roles([*others, *FLAGS, *texts])

    def _decoded(self, where: str, example: Mapping[str, Any], feature: _Feature, rows: int) -> Any:
        """Return the values of a feature in an episode: [rows, ...], or a list of byte strings."""
        where = f"{where}: {feature.key}"
        values = example.get(feature.key)
        size = math.prod(feature.shape) if feature.kind == "numbers" else 1
        is_list = isinstance(values, list)
        if values is None or is_list == (feature.kind == "numbers") or len(values) != rows * size:
            given = "none" if values is None else f"{len(values)} {_kind_of(values)}"
            wanted = "numbers" if feature.kind == "numbers" else "byte strings"
            rule = f"must be {rows * size} {wanted}, as {FEATURES} and {rows} steps need"
            raise DataError(where, rule, given, f"the record is incomplete, or {LEAVE_OUT}")
        if feature.kind == "text":
            return values
        shape = (rows, *feature.shape)
        if feature.kind == "image":
            images = self._images(where, example, feature.key)
            if images.shape != shape:
                rule = f"must have the shape of {FEATURES}, {list(feature.shape)}"
                raise DataError(where, rule, list(images.shape[1:]), LEAVE_OUT)
            return images
        dtype = np.dtype(feature.dtype)
        if feature.kind == "numbers":
            array = values.view(np.uint64) if dtype == np.uint64 else values
            return array.reshape(shape)
        num_bytes = math.prod(feature.shape) * dtype.itemsize
        self.expansion.check(where, rows * num_bytes, self._file_bytes)
        parts = [_inflated(one, num_bytes) if feature.kind == "zlib" else one for one in values]
        for step, part in enumerate(parts):
            if len(part) != num_bytes:
                rule = f"must have {num_bytes} bytes at step {step}"
                raise DataError(where, rule, len(part), f"{DAMAGED}, or {LEAVE_OUT}")
        return np.frombuffer(b"".join(parts), dtype.newbyteorder("<")).reshape(shape)

    def episodes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        columns = {column.name: column for column in self.columns}
        features = [
            feature
            for feature in self._features
            if feature.name in columns or feature.name in ROW_FLAGS
        ]
        per_row = {f.name for f in features if f.kind != "text"}
        for shard, where, example in self._records():
            rows = self._num_rows(where, example)
            if not rows:
                continue
            row = {f.name: self._decoded(where, example, f, rows) for f in features}
            texts = {f.name: row.pop(f.name)[0] for f in features if f.kind == "text"}
            steps = last_rows.steps_of_rows(where, row, self._last_step, per_row)
            if steps is None:
                continue
            arrays: dict[str, Any] = {
                name: convert(f"{where}: {name}", np.asarray(values), columns[name])
                for name, values in steps.items()
            }
            arrays["truncated"] = np.zeros(len(arrays["terminated"]), np.bool_)
            end_episode(arrays)
            place = where.removeprefix(f"{self.path}/")
            yield f"{shard.split}, {place}", {**arrays, **texts}


def _leaves(feature: Any, parts: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the description of each feature that is no dict of features."""
    if "featuresDict" in feature:
        for name, part in feature["featuresDict"]["features"].items():
            yield from _leaves(part, (*parts, name))
    else:
        yield parts, feature


def _feature(key: str, name: str, content: Any) -> _Feature:
    """Return a feature by its description; of the kind "" where no column holds it."""
    unknown = _Feature(key, name, "", "", ())
    outer: tuple[int, ...] = ()
    while "sequence" in content:  # a Sequence of fixed length is a further axis
        length = int(content["sequence"].get("length", -1))
        if length < 0:
            return unknown
        outer = (*outer, length)
        content = content["sequence"]["feature"]
    if "text" in content:
        return unknown if outer else _Feature(key, name, "text", "", ())
    if "classLabel" in content:
        return _Feature(key, name, "numbers", "int64", outer)
    tensor = content.get("image", content.get("tensor"))
    if tensor is None:
        return unknown
    dims = tensor.get("shape", {}).get("dimensions", ())
    shape = tuple(int(one) for one in dims)
    dtype = str(tensor.get("dtype", "uint8"))
    if "image" in content:
        is_known = dtype == "uint8" and not outer
        return _Feature(key, name, "image", dtype, shape) if is_known else unknown
    if dtype == "string":
        return unknown if outer or shape else _Feature(key, name, "text", "", ())
    try:
        np.dtype(dtype)
    except TypeError:  # bfloat16, which NumPy lacks
        return unknown
    kind = {"none": "numbers", "bytes": "bytes", "zlib": "zlib"}.get(
        tensor.get("encoding") or "none", ""
    )
    is_open = any(one < 0 for one in shape)
    if is_open or (outer and kind != "numbers"):
        return unknown
    return _Feature(key, name, kind, dtype, (*outer, *shape))


def _inflated(content: bytes, num_bytes: int) -> bytes:
    """Decompress at most a byte more than wanted; b"" where the content is damaged."""
    try:
        return zlib.decompressobj().decompress(content, num_bytes + 1)
    except zlib.error:
        return b""


def _kind_of(values: Any) -> str:
    return "byte strings" if isinstance(values, list) else str(values.dtype)
