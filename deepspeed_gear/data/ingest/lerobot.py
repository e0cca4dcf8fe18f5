"""LeRobot v2 and v3: frames in Parquet files, cameras in videos, metadata of episodes and tasks."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.dataset_files import read_json
from deepspeed_gear.data.ingest.reader import (
    FLAGS,
    LEAVE_OUT,
    Reader,
    column_name,
    convert,
    decode_images,
    end_episode,
    make_column,
)
from deepspeed_gear.data.ingest.source_checks import DAMAGED, Expansion, check_no_pointer, optional
from deepspeed_gear.data.ingest.table_rows import arrow_block, read_table
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column

_INFO = Path("meta", "info.json")
_VERSIONS = ("v2.0", "v2.1", "v3.0")
_NEXT = {"next.reward": "reward", "next.done": "terminated", "next.truncated": "truncated"}
_COUNTERS = ("episode_index", "frame_index", "index")  # compared with the metadata, or implied by the order
_TEMPLATE = re.compile(r"(?:[^{}]|\{\w+(?::0?\d{1,2}d)?\})+")
_TOLERANCE_S = 1e-4  # LeRobot's, between a frame of a video and its row
_LOSSY = 20  # video compresses this much more than other files
_TEXT = ("string", "language")  # per frame, which no column holds
_AGAIN = "the data set is incomplete; download it again"
_AHEAD_BYTES = 256 << 20  # of results that are computed or wait
_MOST_THREADS = 8
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Episode:
    """Where an episode is: its number of frames, its data file, and each camera's file and start in it."""

    index: int
    length: int
    file: Path
    videos: Mapping[str, tuple[Path, float]]


class LerobotReader(Reader):
    """Reads LeRobot's layout, versions 2.0, 2.1 and 3.0. Episodes come in the order of the metadata.

    A frame is a step, and columns have the names of the features: `observation.state`, `action`. There is no
    observation after the last action, so all columns have T rows. `next.reward` becomes `reward`. `next.done`
    is `terminated`, but `truncated` where `next.truncated` is set or `next.success` is not. An episode whose
    last frame has neither flag is truncated. Videos and images become uint8 columns [height, width,
    channels]. `task` holds the texts of an episode's tasks, one a line, as bytes.
    """

    format = "lerobot"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / _INFO).is_file()

    def open(self) -> None:
        self._info = read_json(self.path / _INFO)
        version, features = (self._info.get(key) for key in ("codebase_version", "features"))
        if version not in _VERSIONS or not isinstance(features, dict):
            where, rule = f"{self.path / _INFO}: codebase_version", f"must be one of {', '.join(_VERSIONS)}"
            raise DataError(where, rule, version, "convert the data set with LeRobot's scripts")
        self._features, self._has_many = features, version == "v3.0"  # episodes in a file
        # By kind and feature.
        self._columns: dict[str, dict[str, Column]] = {"": {}, "image": {}, "video": {}}
        for key, feature in features.items():
            name = _NEXT.get(key) or column_name(*key.split("."))
            if key not in _COUNTERS and (key in _NEXT or self.select(name)):
                self._add_column(key, name, feature)
        listed = self._metadata("episodes")
        self._episodes = [self._episode(row) for row in listed]
        if not listed or len(listed) != self._info.get("total_episodes"):
            rule = f"must list total_episodes = {self._info.get('total_episodes')} episodes, and at least one"
            raise DataError(f"{self.path / 'meta'}: episodes", rule, len(listed), _AGAIN)
        videos: Counter[Path] = Counter()  # bytes of their frames
        for episode in self._episodes:
            _present(episode.file)
            for key, (file, _) in episode.videos.items():
                _present(file, "download the videos, or leave their columns out with --columns")
                videos[file] += episode.length * self._columns["video"][key].row_bytes
        for file, num_bytes in videos.items():
            Expansion(_LOSSY * self.expansion.most).check(str(file), num_bytes, file.stat().st_size)
        columns = [column for kind in self._columns.values() for column in kind.values()]
        columns += [flag for flag in FLAGS if flag not in columns]
        self.columns = (*columns, *self._trajectory_columns(listed))
        self.num_steps = sum(episode.length for episode in self._episodes)
        kept = {key: self._info.get(key) for key in ("codebase_version", "robot_type", "fps")}
        self.description.update(**kept, episodes=len(listed), steps=self.num_steps)
        if "next.done" not in features:
            self.notes.append("there is no next.done: every episode is truncated at its last frame")
        elif not {"next.truncated", "next.success"} & features.keys():
            self.notes.append("next.done is taken for a terminal state, as no feature tells a time limit")

    def _add_column(self, key: str, name: str, feature: Any) -> None:
        where = f"{self.path / _INFO}: features: {key}"
        kinds = TypeError, KeyError, ValueError, AttributeError
        with DataError.on(where, "must have a dtype and a shape", *kinds, value=repr(feature)):
            kind, shape = feature["dtype"], tuple(int(n) for n in feature["shape"])
            if kind in _TEXT:
                self.notes.append(f"{key} is text per frame, which no column holds: left out")
                return
            kind, dtype = (kind, np.dtype(np.uint8)) if kind in self._columns else ("", np.dtype(kind))
            if kind and "channel" in str([*(feature.get("names") or ()), ""][0]):
                shape = (*shape[1:], *shape[:1])  # to height, width, channels
            if kind and len(shape) != 3:
                raise ValueError("an image has three dimensions")
        group = key.split(".")[0]
        role = _NEXT.get(key) or (group if group in ("observation", "action") else "other")
        shape = () if role == "other" and shape == (1,) else shape
        self._columns[kind][key] = make_column(where, name, dtype, shape, role)

    def _metadata(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of meta/<name>: JSON lines, or Parquet from v3.0 on, without the statistics."""
        whole = self.path / "meta" / name
        if self._has_many:
            files = sorted(whole.glob("*/*.parquet")) or [whole.with_suffix(".parquet")]
            tables = (self._table(_present(file), None, True) for file in files)
            return [row for table in tables for row in table.to_pylist()]
        path = _present(whole.with_suffix(".jsonl"))
        with DataError.on(str(path), "must hold a JSON object a line", TypeError, ValueError):
            rows = [parse_json(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
            return [dict(row) for row in rows]

    def _episode(self, row: dict[str, Any]) -> Episode:
        def value(key: str, kinds: tuple[type, ...] = (int,)) -> Any:
            if type(row.get(key)) not in kinds or not 0 <= row[key] < 1 << 53:
                where = f"{self.path / 'meta'}: episodes: {key}"
                raise DataError(where, "must be a number of at least 0", row.get(key), DAMAGED)
            return row[key]

        index, names = value("episode_index"), ("chunk_index", "file_index")
        place = {"episode_chunk": index // (self._info.get("chunks_size") or 1000), "episode_index": index}
        if self._has_many:
            place = {name: value(f"data/{name}") for name in names}
        file, videos = self._file("data_path", **place), {}
        for key in self._columns["video"]:
            start = value(f"videos/{key}/from_timestamp", (int, float)) if self._has_many else 0
            at = {name: value(f"videos/{key}/{name}") for name in names} if self._has_many else place
            videos[key] = self._file("video_path", video_key=key, **at), float(start)
        return Episode(index, value("length"), file, videos)

    def _file(self, template: str, **values: Any) -> Path:
        text = str(self._info.get(template))
        try:
            path = self.path / (text.format(**values) if _TEMPLATE.fullmatch(text) else "..")
        except KeyError:
            path = self.path / ".."
        if not path.resolve().is_relative_to(self.path.resolve()):
            rule = f"must be a path below the folder, with {', '.join(values)} in braces"
            raise DataError(f"{self.path / _INFO}: {template}", rule, text)
        return path

    def _trajectory_columns(self, listed: list[dict[str, Any]]) -> list[Column]:
        """Return the columns of a value per episode: its index, and the texts of its tasks."""
        columns = [Column("episode_index", "int64", rows="1")] if self.select("episode_index") else []
        self._tasks: dict[int, str] = {}
        if "task_index" in self._features and self.select("task"):
            for row in self._metadata("tasks"):
                texts = [value for value in row.values() if isinstance(value, str)]
                if type(row.get("task_index")) is not int or len(texts) != 1:
                    where = f"{self.path / 'meta'}: tasks"
                    raise DataError(where, "must have a task_index and a text each", row, DAMAGED)
                self._tasks[row["task_index"]] = texts[0]
            joined = ("\n".join(map(str, row.get("tasks") or ())) for row in listed)
            most = max(len(text.encode()) for text in (" ", *self._tasks.values(), *joined))
            columns += [Column("task", "bytes", rows="1", max_bytes=most)] if self._tasks else []
        return columns

    def episodes(self) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
        row_bytes = sum(column.row_bytes for column in self.columns if column.rows == "T")
        files = [(file, list(group)) for file, group in groupby(self._episodes, key=lambda e: e.file)]
        tables = read_ahead(self._read_file, files, lambda file: 2 * file[0].stat().st_size)
        pairs = (pair for file in tables for pair in file)
        return read_ahead(self._decode, pairs, lambda pair: pair[0].length * row_bytes)

    def _read_file(self, file: tuple[Path, list[Episode]]) -> list[tuple[Episode, Any]]:
        path, episodes = file
        keys = {"episode_index", "frame_index", *self._columns[""], *self._columns["image"]}
        keys |= {"timestamp"} if self._columns["video"] else set()
        keys |= {"next.success"} & self._features.keys() | ({"task_index"} if self._tasks else set())
        table, num_rows = self._table(path, sorted(keys)), sum(e.length for e in episodes)
        if len(table) != num_rows:
            rule = f"must have the {num_rows} rows of its episodes in the metadata"
            raise DataError(str(path), rule, len(table), _AGAIN)
        ends = accumulate(episode.length for episode in episodes)
        return [(e, table.slice(end - e.length, e.length)) for e, end in zip(episodes, ends, strict=True)]

    def _table(self, path: Path, keys: list[str] | None, are_objects: bool = False) -> Any:
        """Read columns of a Parquet file, or all but the statistics, if they are worth what they take.

        `are_objects`: their rows are to become Python objects.
        """

        def chosen(names: list[str]) -> list[str]:
            for key in keys or ():
                if key not in names:
                    raise DataError(f"{path}: {key}", "must be a column of the file", names, LEAVE_OUT)
            return keys or [name for name in names if not name.startswith("stats/")]

        return read_table(path, self.expansion, chosen, lambda _: are_objects)

    def _decode(self, pair: tuple[Episode, Any]) -> tuple[str, dict[str, NDArray[Any]]]:
        episode, table = pair
        name, counters = f"episode {episode.index}", {"frame_index": np.arange(episode.length)}
        counters["episode_index"] = np.full(episode.length, episode.index)
        batches = table.combine_chunks().to_batches()
        empty = dict.fromkeys(table.column_names, np.empty(0))  # of an episode without frames
        block = arrow_block(batches[0], False, str(episode.file)) if batches else empty

        def numbers(key: str, column: Column) -> NDArray[Any]:
            where, rows = f"{episode.file}: {key}, {name}", block[key]
            shape = (episode.length, *column.shape)
            if not isinstance(rows, np.ndarray) or rows.shape not in (shape, (math.prod(shape),)):
                rule = f"must have rows of shape {list(column.shape)}, without empty values"
                raise DataError(where, rule, str(table.column(key).type), LEAVE_OUT)
            return convert(where, rows.reshape(shape), column)

        for key, expected in counters.items():
            given = numbers(key, Column(key, "int64"))
            for step in np.flatnonzero(given != expected):
                where, rule = f"{episode.file}: {key}, {name}", f"must be {expected[step]} at step {step}"
                raise DataError(where, rule, int(given[step]), "the rows are not those of the metadata")
        arrays: dict[str, Any] = {c.name: numbers(key, c) for key, c in self._columns[""].items()}
        for key, column in self._columns["image"].items():
            where = f"{episode.file}: {key}, {name}"
            frames = [*block.get(f"{key}.bytes", ())]
            if None in frames:
                raise DataError(where, "must hold the images, not their paths", None, LEAVE_OUT)
            images: NDArray[Any] = np.empty((0, *column.shape))
            if frames:
                images = decode_images(where, frames, self.expansion, episode.file.stat().st_size)
            images = images.reshape(*images.shape, *(() if images.ndim == 4 else (1,)))
            if images.shape[1:] != column.shape:
                rule = f"must have the shape of {_INFO}, {list(column.shape)}"
                raise DataError(where, rule, list(images.shape[1:]), LEAVE_OUT)
            arrays[column.name] = images
        for key, column in self._columns["video"].items():
            times = numbers("timestamp", Column("timestamp", "float64"))
            arrays[column.name] = self._frames(*episode.videos[key], name, column, times)
        none = np.zeros(episode.length, np.bool_)
        done, truncated = arrays.get("terminated", none), arrays.get("truncated", none)
        if "next.success" in self._features:
            truncated = truncated | (done & ~numbers("next.success", Column("success", "bool")))
        arrays["terminated"], arrays["truncated"] = done & ~truncated, truncated
        end_episode(arrays)
        values: dict[str, Any] = {"episode_index": np.asarray(episode.index)}
        if self._tasks:
            indices = dict.fromkeys(numbers("task_index", Column("task_index", "int64")).tolist())
            for index in indices.keys() - self._tasks.keys():
                rule = "must be a task of the metadata"
                raise DataError(f"{episode.file}: task_index, {name}", rule, index, _AGAIN)
            values["task"] = "\n".join(self._tasks[index] for index in indices)
        arrays.update((c.name, values[c.name]) for c in self.columns if c.rows == "1")
        return name, arrays

    def _frames(
        self, path: Path, start: float, name: str, column: Column, times: NDArray[Any]
    ) -> NDArray[np.uint8]:
        """Decode the frames at `start + times` seconds, which must be all between the first and the last."""
        av = optional(str(path), "must be decoded with PyAV", f"av, or {LEAVE_OUT}", "av")
        where, times, number = f"{path}: {name}", start + times, 0
        frames = np.empty((len(times), *column.shape), np.uint8)
        is_readable = DataError.on(where, "must be a readable video", av.FFmpegError, remedy=DAMAGED)
        # Demuxers other than mp4's read files that a video names.
        with is_readable, av.open(str(path), format="mp4") as container:
            stream = container.streams.best("video")
            if stream is None or stream.time_base is None:
                raise DataError(str(path), "must hold a video", None, DAMAGED)
            shape = (stream.height, stream.width, 3)
            bits = max((part.bits for part in stream.format.components), default=0)
            if shape != column.shape or bits > 8:
                rule = f"must have frames of shape {list(column.shape)}, with 8 bits a channel"
                raise DataError(str(path), rule, f"{list(shape)} with {bits} bits", LEAVE_OUT)
            stream.thread_type = "AUTO"
            if start:
                container.seek(max(0, math.floor(start / stream.time_base) - 1), stream=stream)
            for frame in container.decode(stream):
                at = -1.0 if frame.pts is None else float(frame.pts * stream.time_base)
                if number == 0 and at < times[0] - _TOLERANCE_S:
                    continue  # from the key frame on, before the episode
                if number == len(times) and self._has_many:
                    break
                if number < len(times) and abs(at - times[number]) > _TOLERANCE_S:
                    rule = f"must have frame {number} at {times[number]:.6f} s"
                    raise DataError(where, rule, f"{at:.6f} s", LEAVE_OUT)
                if number < len(times):
                    frames[number] = frame.to_ndarray(format="rgb24")
                number += 1
        if number != len(times):
            rule = f"must have {len(times)} frames, one for each row"
            raise DataError(where, rule, number, f"download the video again, or {LEAVE_OUT}")
        return frames


def _present(path: Path, remedy: str = _AGAIN) -> Path:
    if not path.is_file():
        raise DataError(str(path), "must exist", None, remedy)
    check_no_pointer(path)
    return path


def read_ahead(
    read: Callable[[Item], Result], items: Iterable[Item], num_bytes: Callable[[Item], int]
) -> Iterator[Result]:
    """Yield `read(item)` of each item in order, while threads read the items that follow; `num_bytes` is the
    memory of its result, about.

    For readers whose work releases the interpreter's lock, as decompression in pyarrow and decoding in PyAV
    do. Cost: a thread per core, at most 8; memory of 256 MiB of results, or of one that is larger.
    """
    waiting: deque[tuple[Future[Result], int]] = deque()
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "gear-ingest") as pool:
        try:
            for item in items:
                size = num_bytes(item)
                while waiting and size + sum(ahead for _, ahead in waiting) > _AHEAD_BYTES:
                    yield waiting.popleft()[0].result()
                waiting.append((pool.submit(read, item), size))
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            pool.shutdown(cancel_futures=True)
