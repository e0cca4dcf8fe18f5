"""Reader of LeRobot v2 and v3: frames in Parquet, cameras in videos, tasks in the metadata."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.dataset_files import check_no_pointer
from deepspeed_gear.data.ingest.decoding.image_decoding import decode_images
from deepspeed_gear.data.ingest.decoding.lerobot_metadata import (
    IMAGES,
    INFO,
    CheckedValues,
    Feature,
    fits_file_system,
    is_text,
    read_info,
    read_lines,
)
from deepspeed_gear.data.ingest.decoding.video_frames import video_frames
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.row_values import null_place
from deepspeed_gear.data.ingest.source_checks import DAMAGED, Expansion
from deepspeed_gear.data.ingest.source_columns import (
    FLAGS,
    LEAVE_OUT,
    column_name,
    convert,
    end_episode,
    make_column,
)
from deepspeed_gear.data.ingest.source_names import KINDS
from deepspeed_gear.data.ingest.table_blocks import arrow_block, read_table
from deepspeed_gear.data.sources.opened_files import is_below
from deepspeed_gear.errors import DataError, SchemaError
from deepspeed_gear.schema import Column

_NEXT = {"next.reward": "reward", "next.done": "terminated", "next.truncated": "truncated"}
_STATES = ("state", "states")  # as a feature of its own
# No columns: they are compared with the metadata, or follow from the order.
_COUNTERS = ("episode_index", "frame_index", "index")
_LOSSY = 20  # factor by which video may compress more than other files
_FILL = "fill it in, or leave the column out with --columns"
_AGAIN = "the data set is incomplete; download it again"
AHEAD_BYTES = 256 << 20  # of results that are computed or wait
_MOST_THREADS = 8
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Episode:
    """The place of an episode: its frames, its data file, and each camera's file and start time."""

    index: int
    length: int
    file: Path
    videos: Mapping[str, tuple[Path, float]]


class LerobotReader(Reader):
    """Reads LeRobot's layout, versions 2.0, 2.1 and 3.0, in the metadata's order of episodes.

    A frame is a step, and columns have the names of the features: `observation.state`, `action`.
    There is no observation after the last action, so all columns have T rows. `next.reward` becomes
    `reward`. `next.done` becomes `terminated`, but `truncated` where `next.truncated` is set or
    `next.success` is not. An episode whose last frame has neither flag is truncated. Videos and
    images become uint8 columns [height, width, channels]. `task` holds the texts of an episode's
    tasks, one per line, as bytes.
    """

    format = "lerobot"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return (path / INFO).is_file()

    def open(self) -> None:
        self._info = read_info(self.path)
        self._has_many = self._info.has_many  # a file holds many episodes
        # Columns by kind and feature; the kind "" is that of numbers.
        self._columns: dict[str, dict[str, Column]] = {"": {}, "image": {}, "video": {}}
        features = self._info.features
        groups = {column_name(*key.split(".")): _group(key, of) for key, of in features.items()}
        self.select.assign_groups(groups)
        for key, feature in features.items():
            name = _NEXT.get(key) or column_name(*key.split("."))
            if key not in _COUNTERS and (key in _NEXT or self.select(name)):
                self._add_column(key, name, feature)
        places = (
            ("chunk_index", "file_index") if self._has_many else ("episode_chunk", "episode_index")
        )
        self._templates = {"data_path": self._info.template("data_path", places)}
        if self._columns["video"]:
            self._templates["video_path"] = self._info.template(
                "video_path", ("video_key", *places)
            )
        listed = self._metadata("episodes")
        self._episodes = [self._episode(row) for row in listed]
        if not listed or len(listed) != self._info.num_episodes:
            raise DataError(
                f"{self.path / 'meta'}: episodes",
                f"must list total_episodes = {self._info.num_episodes} episodes, and at least one",
                len(listed),
                _AGAIN,
            )
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
        for name, count in Counter(column.name for column in self.columns).items():
            if count > 1:
                raise DataError(
                    f"{self._info.where}: features",
                    "must have one column for each",
                    f"{name}, {count} times",
                    LEAVE_OUT,
                )
        self.num_steps = sum(episode.length for episode in self._episodes)
        self.description.update(self._info.described, episodes=len(listed), steps=self.num_steps)
        if "next.done" not in features:
            self.notes.append("there is no next.done: every episode is truncated at its last frame")
        elif not {"next.truncated", "next.success"} & features.keys():
            self.notes.append(
                "next.done is taken for a terminal state, as no feature marks time limits"
            )

    def _add_column(self, key: str, name: str, feature: Feature) -> None:
        if feature.kind == "text":
            self.notes.append(f"{key} is text per frame, which no column holds: left out")
            return
        group = _group(key, feature)
        role = _NEXT.get(key) or (group if group in ("observation", "action") else "other")
        shape = () if role == "other" and feature.shape == (1,) else feature.shape
        where = f"{self._info.where}: features: {key}"
        with DataError.on(
            where, "must be a feature that a column can hold", SchemaError, remedy=LEAVE_OUT
        ):
            column = make_column(where, name, feature.dtype, shape, role)
        self._columns[feature.kind][key] = column

    def _metadata(self, name: str) -> list[CheckedValues]:
        """Return the rows of meta/<name>: JSON lines, or Parquet without statistics from v3.0."""
        whole = self.path / "meta" / name
        if not self._has_many:
            return read_lines(_present(whole.with_suffix(".jsonl")))
        files = sorted(whole.glob("*/*.parquet")) or [whole.with_suffix(".parquet")]
        return [
            CheckedValues(f"{file}: row {number}", row)
            for file in files
            for number, row in enumerate(self._table(_present(file), None, True).to_pylist())
        ]

    def _episode(self, row: CheckedValues) -> Episode:
        index = row.whole("episode_index")
        names = ("chunk_index", "file_index")
        place = {"episode_chunk": index // self._info.chunks_size, "episode_index": index}
        if self._has_many:
            place = {name: row.whole(f"data/{name}") for name in names}
        file = self._file("data_path", **place)
        videos = {}
        for key in self._columns["video"]:
            start = row.seconds(f"videos/{key}/from_timestamp") if self._has_many else 0.0
            at = (
                {name: row.whole(f"videos/{key}/{name}") for name in names}
                if self._has_many
                else place
            )
            videos[key] = self._file("video_path", video_key=key, **at), start
        return Episode(index, row.whole("length"), file, videos)

    def _file(self, template: str, **values: Any) -> Path:
        path = self.path / self._templates[template].format(**values)
        if not fits_file_system(path) or not is_below(path, self.path):
            raise DataError(
                f"{self._info.where}: {template}",
                f"must be a path below the folder, with {', '.join(values)} in braces",
                f"{self._templates[template]:.200}",
                DAMAGED,
            )
        return path

    def _trajectory_columns(self, listed: list[CheckedValues]) -> list[Column]:
        """Return the columns of one value per episode: its index, and the texts of its tasks."""
        columns = []
        if self.select("episode_index"):
            columns.append(Column("episode_index", "int64", rows="1"))
        self._tasks: dict[int, str] = {}
        has_numbers = "task_index" in self._columns[""]
        has_task = "task_index" in self._info.features and self.select("task")
        if has_numbers or has_task:
            for row in self._metadata("tasks"):
                texts = [value for value in row.values() if isinstance(value, str)]
                if len(texts) != 1 or not is_text(texts[0], None):
                    raise DataError(row.where, "must have a task_index and a text", None, DAMAGED)
                self._tasks[row.whole("task_index")] = texts[0]
            joined = ("\n".join(row.texts("tasks")) for row in listed)
            most = max(len(text.encode()) for text in (" ", *self._tasks.values(), *joined))
            if has_task and self._tasks:
                columns.append(Column("task", "bytes", rows="1", max_bytes=most))
        if has_numbers and self._tasks:
            self.texts["task_index"] = dict(self._tasks)
        numbers = [c.name for c in self._columns[""].values() if c.name.endswith("_index")]
        self.counted = tuple(c.name for c in columns if c.name == "episode_index")
        self.counted += tuple(name for name in numbers if name not in self.texts)
        return columns

    def episodes(self) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
        row_bytes = sum(column.row_bytes for column in self.columns if column.rows == "T")
        files = [
            (file, list(group)) for file, group in groupby(self._episodes, key=lambda e: e.file)
        ]
        tables = read_ahead(self._read_file, files, lambda file: 2 * file[0].stat().st_size)
        pairs = chain.from_iterable(tables)
        return read_ahead(self._decode, pairs, lambda pair: pair[0].length * row_bytes)

    def _read_file(self, file: tuple[Path, list[Episode]]) -> list[tuple[Episode, Any]]:
        path, episodes = file
        keys = {"episode_index", "frame_index", *self._columns[""], *self._columns["image"]}
        keys |= {"timestamp"} if self._columns["video"] else set()
        keys |= {"task_index"} if self._tasks else set()
        keys |= {"next.success"} & self._info.features.keys()
        table = self._table(path, sorted(keys))
        num_rows = sum(e.length for e in episodes)
        if len(table) != num_rows:
            raise DataError(
                str(path),
                f"must have the {num_rows} rows of its episodes in the metadata",
                len(table),
                _AGAIN,
            )
        ends = accumulate(episode.length for episode in episodes)
        return [
            (e, table.slice(end - e.length, e.length))
            for e, end in zip(episodes, ends, strict=True)
        ]

    def _table(self, path: Path, keys: list[str] | None, are_objects: bool = False) -> Any:
        """Read columns of a Parquet file, within the bound of the source's memory.

        Args:
            keys: Columns to read; None reads all but statistics.
            are_objects: Whether the rows will become Python objects.
        """

        def chosen(names: list[str]) -> list[str]:
            for key in keys or ():
                if key not in names:
                    raise DataError(
                        f"{path}: {key}", "must be a column of the file", names, LEAVE_OUT
                    )
            return keys or [name for name in names if not name.startswith("stats/")]

        return read_table(path, self.expansion, chosen, lambda _: are_objects)

    def _decode(self, pair: tuple[Episode, Any]) -> tuple[str, dict[str, NDArray[Any]]]:
        episode, table = pair
        name = f"episode {episode.index}"
        counters = {"frame_index": np.arange(episode.length)}
        counters["episode_index"] = np.full(episode.length, episode.index)
        batches = table.combine_chunks().to_batches()
        empty = dict.fromkeys(table.column_names, np.empty(0))  # of an episode without frames
        block = arrow_block(batches[0], False, str(episode.file)) if batches else empty

        def numbers(key: str, column: Column) -> NDArray[Any]:
            where = f"{episode.file}: {key}, {name}"
            rows = block[key]
            shape = (episode.length, *column.shape)
            if (place := null_place(rows)) is not None:
                raise DataError(
                    f"{episode.file}: {key}{place}, {name}", "must not be null", None, _FILL
                )
            if not isinstance(rows, np.ndarray) or rows.shape not in (shape, (math.prod(shape),)):
                raise DataError(
                    where,
                    f"must have rows of shape {list(column.shape)}, in every row",
                    str(table.column(key).type),
                    LEAVE_OUT,
                )
            return convert(where, rows.reshape(shape), column)

        for key, expected in counters.items():
            given = numbers(key, Column(key, "int64"))
            for step in np.flatnonzero(given != expected):
                where = f"{episode.file}: {key}, {name}"
                raise DataError(
                    where,
                    f"must be {expected[step]} at step {step}",
                    int(given[step]),
                    "the rows are not those of the metadata",
                )
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
                raise DataError(
                    where,
                    f"must have the shape of {INFO}, {list(column.shape)}",
                    list(images.shape[1:]),
                    LEAVE_OUT,
                )
            arrays[column.name] = images
        for key, column in self._columns["video"].items():
            times = numbers("timestamp", Column("timestamp", "float64"))
            file, start = episode.videos[key]
            arrays[column.name] = video_frames(
                file, name, start, times, column.shape, may_go_on=self._has_many
            )
        none = np.zeros(episode.length, np.bool_)
        done = arrays.get("terminated", none)
        truncated = arrays.get("truncated", none)
        if "next.success" in self._info.features:
            truncated = truncated | (done & ~numbers("next.success", Column("success", "bool")))
        arrays["terminated"] = done & ~truncated
        arrays["truncated"] = truncated
        end_episode(arrays)
        values: dict[str, Any] = {"episode_index": np.asarray(episode.index)}
        if self._tasks:
            indices = dict.fromkeys(numbers("task_index", Column("task_index", "int64")).tolist())
            for index in indices.keys() - self._tasks.keys():
                raise DataError(
                    f"{episode.file}: task_index, {name}",
                    "must be a task of the metadata",
                    index,
                    _AGAIN,
                )
            values["task"] = "\n".join(self._tasks[index] for index in indices)
        arrays.update((c.name, values[c.name]) for c in self.columns if c.rows == "1")
        return name, arrays


def _group(key: str, feature: Feature) -> str:
    """Return the group of a feature, by which --columns keeps it.

    It is "observation" or "action" where the feature is one, else the part before the first dot.
    """
    head = key.split(".")[0]
    is_camera = feature.kind in IMAGES and KINDS.get(head) != "action"
    return "observation" if is_camera or head in _STATES else KINDS.get(head, head)


def _present(path: Path, remedy: str = _AGAIN) -> Path:
    if not path.is_file():
        raise DataError(str(path), "must exist", None, remedy)
    check_no_pointer(path)
    return path


def read_ahead(
    read: Callable[[Item], Result], items: Iterable[Item], num_bytes: Callable[[Item], int]
) -> Iterator[Result]:
    """Yield `read(item)` for each item in order, while threads read the items that follow.

    For readers whose work releases the interpreter's lock, as decompression in pyarrow and decoding
    in PyAV do.

    Args:
        num_bytes: Memory of an item's result, about.
    Cost: one thread per core, at most 8; memory of 256 MiB of results, or of one larger result.
    """
    waiting: deque[tuple[Future[Result], int]] = deque()
    with ThreadPoolExecutor(
        min(_MOST_THREADS, len(os.sched_getaffinity(0))), "gear-ingest"
    ) as pool:
        try:
            for item in items:
                size = num_bytes(item)
                while waiting and size + sum(ahead for _, ahead in waiting) > AHEAD_BYTES:
                    yield waiting.popleft()[0].result()
                waiting.append((pool.submit(read, item), size))
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            pool.shutdown(cancel_futures=True)
