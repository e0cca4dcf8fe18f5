"""Metadata of LeRobot data sets: info.json, the episodes and the tasks, each value checked."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.ingest.source_checks import DAMAGED, read_source_json
from deepspeed_gear.errors import DataError

INFO = Path("meta", "info.json")
# dtypes of features that are no numbers
IMAGES = ("image", "video")
TEXTS = ("string", "language")
_VERSIONS = ("v2.0", "v2.1", "v3.0")
_FIELD = re.compile(r"\{(\w+)((?::0?\d{1,2}d)?)\}")  # {episode_index:06d}
_TEMPLATE = re.compile(rf"(?:[^{{}}]|{_FIELD.pattern})+")
# of a file and a path, in Linux
_MOST_NAME_BYTES = 255
_MOST_PATH_BYTES = 4095
_MOST_INTEGER = 1 << 53
_MOST_VALUES = 1 << 31  # in a row of a feature
_MOST_TEXT_BYTES = 1 << 16


class CheckedValues:
    """Values of a JSON object or a row, checked when they are read; errors name file and key."""

    def __init__(self, where: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise DataError(
                where, "must be an object of values by key", type(values).__name__, DAMAGED
            )
        self.where = where
        self._values = values

    def raw(self, key: str) -> Any:
        return self._values.get(key)

    @property
    def keys(self) -> list[str]:
        return list(self._values)

    def values(self) -> list[Any]:
        return list(self._values.values())

    def whole(self, key: str, least: int = 0, default: int | None = None) -> int:
        """Return a whole number; the default where it is absent or null."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not least <= value < _MOST_INTEGER:
            self.refuse(key, f"must be a whole number of at least {least}")
        return int(value)

    def seconds(self, key: str) -> float:
        value = self.raw(key)
        if type(value) not in (int, float) or not 0 <= value < _MOST_INTEGER:
            self.refuse(key, "must be a number of at least 0")
        return float(value)

    def rate(self, key: str) -> float | int | None:
        """Return a number above 0, or None where it is absent."""
        value = self.raw(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < _MOST_INTEGER):
            self.refuse(key, "must be a number above 0, or null")
        rate: float | int | None = value
        return rate

    def text(self, key: str) -> str | None:
        """Return a text, or None where it is absent."""
        value = self.raw(key)
        if value is not None and not is_text(value, _MOST_TEXT_BYTES):
            self.refuse(key, "must be a text, or null")
        text: str | None = value
        return text

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, which is empty where it is absent."""
        value = self.raw(key)
        if value is not None and not (
            isinstance(value, list) and all(is_text(t, None) for t in value)
        ):
            self.refuse(key, "must be a list of texts")
        return value or []

    def refuse(self, key: str, rule: str, remedy: str = DAMAGED) -> None:
        value = self.raw(key)
        shown: Any = value
        if not isinstance(value, (bool, float, type(None))) and not (
            type(value) is int and abs(value) < _MOST_INTEGER
        ):
            shown = (
                value[:80] if isinstance(value, str) else f"{type(value).__name__} {value!r:.80}"
            )
        raise DataError(f"{self.where}: {key}", rule, shown, remedy)


@dataclass(frozen=True)
class Feature:
    """A feature of frames: `kind` is "image", "video", "text", or "" for numbers of a dtype."""

    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Info:
    """The checked content of meta/info.json; `described` is recorded with the data set."""

    where: str
    features: Mapping[str, Feature]
    has_many: bool
    num_episodes: int
    chunks_size: int
    templates: Mapping[str, Any]
    described: Mapping[str, Any]

    def template(self, key: str, names: Sequence[str]) -> str:
        """Return a path template whose fields in braces have only these names."""
        text = self.templates[key]
        rule = f"must be a path below the folder, with {', '.join(names)} in braces"
        fields = (
            _FIELD.findall(text)
            if is_text(text, _MOST_PATH_BYTES) and _TEMPLATE.fullmatch(text)
            else [("", "")]
        )
        for name, form in fields:
            if name not in names or (form and name == "video_key"):
                raise DataError(f"{self.where}: {key}", rule, f"{text!s:.200}", DAMAGED)
        return str(text)


def read_info(folder: Path) -> Info:
    """Read and check meta/info.json of a data set."""
    where = str(folder / INFO)
    values = CheckedValues(where, read_source_json(folder / INFO))
    version = values.raw("codebase_version")
    if version not in _VERSIONS:
        values.refuse(
            "codebase_version",
            f"must be one of {', '.join(_VERSIONS)}",
            "convert the data set with LeRobot's scripts",
        )
    features = CheckedValues(f"{where}: features", values.raw("features"))
    described = {
        "codebase_version": version,
        "robot_type": values.text("robot_type"),
        "fps": values.rate("fps"),
    }
    return Info(
        where=where,
        features={key: _feature(features, key) for key in features.keys},
        has_many=version == "v3.0",
        num_episodes=values.whole("total_episodes"),
        chunks_size=values.whole("chunks_size", 1, 1000),
        templates={key: values.raw(key) for key in ("data_path", "video_path")},
        described=described,
    )


def _feature(features: CheckedValues, key: str) -> Feature:
    if not is_text(key, _MOST_NAME_BYTES):
        raise DataError(
            features.where,
            f"must be names of at most {_MOST_NAME_BYTES} bytes",
            f"{key!r:.80}",
            DAMAGED,
        )
    where = f"{features.where}: {key}"
    values = CheckedValues(where, features.raw(key))
    dtype, shape, names = (values.raw(name) for name in ("dtype", "shape", "names"))
    if dtype in TEXTS:
        return Feature("text", np.dtype(np.uint8), ())
    kind = dtype if dtype in IMAGES else ""
    if not isinstance(dtype, str) or not (kind or re.fullmatch(r"[a-z]+\d{0,3}", dtype)):
        values.refuse("dtype", "must be a dtype of numbers, or one of image, video, string")
    with DataError.on(
        f"{where}: dtype",
        "must be a dtype of numbers",
        TypeError,
        ValueError,
        value=dtype,
        remedy=DAMAGED,
    ):
        stored = np.dtype(np.uint8 if kind else dtype)
    is_list = isinstance(shape, (list, tuple)) and all(
        type(size) is int and size >= 0 for size in shape
    )
    if not is_list or (kind and len(shape) != 3) or math.prod(shape) > _MOST_VALUES:
        values.refuse(
            "shape",
            f"must be a list of {'three ' if kind else ''}whole numbers, of at most "
            f"{_MOST_VALUES} values",
        )
    if names is not None and not isinstance(names, (list, dict)):
        values.refuse("names", "must be a list or an object of names, or null")
    size = tuple(shape)
    if kind and "channel" in f"{next(iter(names or ()), '')}":
        size = (*size[1:], *size[:1])  # to height, width, channels
    return Feature(kind, stored, size)


def read_lines(path: Path) -> list[CheckedValues]:
    """Return the objects of a file of JSON lines."""
    rows = []
    with DataError.on(str(path), "must be readable", OSError, UnicodeDecodeError, remedy=DAMAGED):
        lines = path.read_text("utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            with DataError.on(
                f"{path}: line {number}", "must hold a JSON object", ValueError, remedy=DAMAGED
            ):
                rows.append(CheckedValues(f"{path}: line {number}", parse_json(line)))
    return rows


def is_text(value: Any, most_bytes: int | None) -> bool:
    """Return whether a value is a text that UTF-8 can hold, without NUL characters.

    With `most_bytes` it must also have between 1 and that many bytes.
    """
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        return False
    return most_bytes is None or 0 < size <= most_bytes


def fits_file_system(path: Path) -> bool:
    """Return whether Linux admits a path: the lengths of its names, and of the whole."""
    parts = (len(os.fsencode(part)) for part in path.parts)
    return (
        max(parts, default=0) <= _MOST_NAME_BYTES
        and len(os.fsencode(str(path))) <= _MOST_PATH_BYTES
    )
