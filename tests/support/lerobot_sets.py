"""LeRobot data sets of any version, written by the tests."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FRONT = "observation.images.front"
LENGTHS = (1, 7, 33, 4, 12)
TASKS = ["lift", "place it", "wait"]
FIRST = "data/000/000.parquet"  # of a set of version 2


def write_set(
    root: Path,
    version: str,
    lengths: Sequence[int],
    per_file: int = 1,
    tasks: Sequence[str] = TASKS,
    **columns: Any,
) -> None:
    """Write a set with the columns of all frames; tasks change in the middle of episodes."""
    total = sum(lengths)
    ends = np.cumsum(lengths)
    many = version == "v3.0"
    frame = np.arange(total) - np.repeat(ends - lengths, lengths)
    arrays = {**columns, "timestamp": (frame / 10).astype(np.float32), "frame_index": frame}
    arrays["episode_index"] = np.repeat(np.arange(len(lengths)), lengths)
    arrays["task_index"] = np.arange(total) // 3 % len(tasks)
    features: dict[str, Any] = {"note": {"dtype": "string", "shape": [1]}}
    features |= {
        key: {"dtype": str(a.dtype), "shape": a.shape[1:] or (1,)} for key, a in arrays.items()
    }
    path = (
        "data/{chunk_index:03d}/{file_index:03d}"
        if many
        else "data/{episode_chunk:03d}/{episode_index:03d}"
    )
    info = {
        "codebase_version": version,
        "features": features,
        "chunks_size": 2,
        "total_episodes": len(lengths),
    }
    table = pa.table({key: pa.array(a.tolist(), _type(a)) for key, a in arrays.items()})
    rows = []
    for number, steps in enumerate(lengths):
        place = {"chunk_index": 0, "file_index": number // per_file}
        rows.append({"episode_index": number, "length": steps, "tasks": [*tasks]})
        rows[-1] |= {f"data/{key}": value for key, value in place.items()} if many else {}
        if number % per_file == 0:
            place |= {"episode_chunk": number // 2, "episode_index": number}
            low = int(ends[number]) - steps
            high = int(ends[min(number + per_file, len(lengths)) - 1])
            file = root / f"{path}.parquet".format(**place)
            file.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table.slice(low, high - low), file, row_group_size=5)
    (root / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
    (root / "meta" / "info.json").write_text(json.dumps({**info, "data_path": f"{path}.parquet"}))
    texts = [{"task_index": i, "task": text} for i, text in enumerate(tasks)]
    for name, entries in (
        ("episodes/chunk-000/file-000" if many else "episodes", rows),
        ("tasks", texts),
    ):
        if many:
            pq.write_table(pa.Table.from_pylist(entries), root / "meta" / f"{name}.parquet")
        else:
            lines = "".join(json.dumps(entry) + "\n" for entry in entries)
            (root / "meta" / f"{name}.jsonl").write_text(lines)


def _type(array: np.ndarray) -> Any:
    kind = pa.from_numpy_dtype(array.dtype)
    for size in reversed(array.shape[1:]):
        kind = pa.list_(kind, size) if size % 2 else pa.list_(kind)
    return kind


def some_columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    ends = np.zeros(sum(LENGTHS), bool)
    ends[np.cumsum(LENGTHS) - 1] = True
    return {
        "observation.state": rng.standard_normal((len(ends), 3)).astype(np.float32),
        "observation.map": rng.integers(0, 9, (len(ends), 2, 3)),
        "action": rng.standard_normal((len(ends), 4)),
        "next.reward": rng.standard_normal(len(ends)).astype(np.float32),
        "next.done": ends,
        "next.truncated": ends & (np.arange(len(ends)) % 2 == 0),
    }


def change_metadata(key: str, value: Any, place: str = "") -> Callable[[Path], None]:
    """Change a value of info.json; `place` is the key of the object that it is in."""

    def edit(root: Path) -> None:
        path = root / "meta" / "info.json"
        info = json.loads(path.read_text())
        holder = info
        for part in place.split("/") if place else ():
            holder = holder[part]
        holder[key] = value
        path.write_text(json.dumps(info))

    return edit
