"""How fast data sets are written, against a raw write of the same bytes, NumPy and Parquet.

    python benchmarks/disk_writing.py --json F [--quick] [--gb 0.2 2 20] [--threads 2] [--turns 3]
        [--sources 4] [--systems "gear ingest" "raw copy"]

Every system writes the same trajectories in turns, and its files are on the disk when a turn ends
(fsync). "gear ingest" is the command, over HDF5 files of the same rows without compression: with
several sources, links to one file. All files lie in build/ and are removed. They take the size that
is written, and that of one source.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from support import ROOT
from support.report import Report, Row, print_rows

from deepspeed_gear import Column, DatasetWriter, Schema
from deepspeed_gear.cli.main import main as command

Rows = Mapping[str, np.ndarray]
STEPS = 1000  # of a trajectory
_KINDS = 16  # different trajectories, so that a source is not always in the nearest cache
_GB = 1e9
WORK = {
    "steps": Schema(
        [
            Column("observation", "float32", (17,), "observation"),
            Column("action", "float32", (6,), "action"),
            Column("reward", "float32", (), "reward"),
            Column("terminated", "bool", (), "terminated"),
            Column("truncated", "bool", (), "truncated"),
        ]
    ),
    "frames": Schema(
        [
            Column("observation", "uint8", (84, 84, 4), "observation"),
            Column("action", "int64", (), "action"),
            Column("reward", "float32", (), "reward"),
            Column("terminated", "bool", (), "terminated"),
            Column("truncated", "bool", (), "truncated"),
        ]
    ),
}
_D4RL = {
    "observation": "observations",
    "action": "actions",
    "reward": "rewards",
    "terminated": "terminals",
    "truncated": "timeouts",
}


class Job:
    """Trajectories of one schema that are written into a folder."""

    def __init__(
        self, schema: Schema, num_bytes: float, threads: int | None, num_sources: int = 1
    ) -> None:
        self.schema = schema
        self.threads = threads
        self.num_sources = num_sources
        steps = min(STEPS, max(2, int(num_bytes // schema.row_bytes)))
        self._made = [_trajectory(schema, steps, seed) for seed in range(_KINDS)]
        of_source = max(1, round(num_bytes / num_sources / (steps * schema.row_bytes)))
        self.count = of_source * num_sources
        self.num_steps = self.count * steps
        self.num_bytes = self.num_steps * schema.row_bytes
        self.steps = steps

    def __iter__(self) -> Iterator[Rows]:
        for number in range(self.count):
            yield self._made[number % _KINDS]


def _trajectory(schema: Schema, steps: int, seed: int) -> Rows:
    random = np.random.default_rng(seed)
    rows = {}
    for column in schema:
        shape = (steps, *column.shape)
        if column.is_floating:
            rows[column.name] = random.standard_normal(shape, np.float32)
        elif column.dtype == "bool":
            rows[column.name] = np.arange(steps) == (
                steps - 1 if column.name == "truncated" else -1
            )
        else:
            rows[column.name] = random.integers(0, 200, shape).astype(column.numpy_dtype)
    return rows


def _dataset_writer(job: Job, folder: Path) -> None:
    with DatasetWriter(folder / "set", job.schema, threads=job.threads) as writer:
        for rows in job:
            writer.add(rows)


def _ingest(job: Job, folder: Path) -> None:
    options = [] if job.threads is None else ["--threads", str(job.threads)]
    sources = map(str, _sources(job, folder))
    status = command(["ingest", *sources, str(folder / "set"), "--quiet", *options])
    assert status == 0


def _sources(job: Job, folder: Path) -> list[Path]:
    return [folder.parent / f"source-{number}.hdf5" for number in range(job.num_sources)]


def make_sources(job: Job, folder: Path) -> None:
    """Write the sources of `gear ingest`: files of the layout of D4RL, without compression."""
    first, *links = _sources(job, folder / "turn")
    count = job.count // job.num_sources
    with h5py.File(first, "w") as file:
        arrays = {
            column.name: file.create_dataset(
                _D4RL[column.name], (count * job.steps, *column.shape), column.numpy_dtype
            )
            for column in job.schema
        }
        for number, rows in enumerate(islice(job, count)):
            for name, values in rows.items():
                arrays[name][number * job.steps : (number + 1) * job.steps] = values
    for link in links:
        link.hardlink_to(first)


def _raw(job: Job, folder: Path) -> None:
    with ExitStack() as stack:
        names = job.schema.names
        files = {n: stack.enter_context((folder / n).open("wb", buffering=0)) for n in names}
        for rows in job:
            for name, file in files.items():
                file.write(rows[name].data)
        for file in files.values():
            os.fsync(file.fileno())


def _raw_copy(job: Job, folder: Path) -> None:
    for source in _sources(job, folder):
        shutil.copyfile(source, folder / source.name)
    _sync(folder)


def _numpy(job: Job, folder: Path) -> None:
    files = {}
    for column in job.schema:
        shape = (job.num_steps, *column.shape)
        path = folder / f"{column.name}.npy"
        files[column.name] = np.lib.format.open_memmap(path, "w+", column.numpy_dtype, shape)
    for number, rows in enumerate(job):
        for name, file in files.items():
            file[number * job.steps : (number + 1) * job.steps] = rows[name]
    for file in files.values():
        file.flush()


def _parquet(job: Job, folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def array(values: np.ndarray) -> Any:
        flat = pa.array(values.reshape(-1))
        width = values[0].size
        return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, width)

    writer = None
    for rows in job:
        table = pa.table({name: array(values) for name, values in rows.items()})
        if writer is None:
            options = {"compression": "none", "use_dictionary": False}
            writer = pq.ParquetWriter(folder / "rows.parquet", table.schema, **options)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    _sync(folder)


def _datasets(job: Job, folder: Path) -> None:
    from datasets import Dataset

    def one_row() -> Iterator[dict[str, np.ndarray]]:
        yield from ({**rows} for rows in job)

    made = Dataset.from_generator(one_row, cache_dir=str(folder / "cache"))
    made.save_to_disk(str(folder / "set"))
    _sync(folder)


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


SYSTEMS: dict[str, Callable[[Job, Path], None]] = {
    "DatasetWriter": _dataset_writer,
    "gear ingest": _ingest,
    "raw write": _raw,
    "raw copy": _raw_copy,
    "NumPy memmap": _numpy,
    "pyarrow, Parquet": _parquet,
    "HF datasets": _datasets,
}


def turn(job: Job, write: Callable[[Job, Path], None], folder: Path) -> tuple[float, float]:
    """Write once; return seconds of the clock and of CPU."""
    place = folder / "turn"
    place.mkdir()
    begun = time.perf_counter()
    used = time.process_time()
    try:
        write(job, place)
        return time.perf_counter() - begun, time.process_time() - used
    finally:
        shutil.rmtree(place)


def main() -> None:
    """Run from the command line."""
    report = Report(
        __doc__,
        gb=((0.2,), "GB to write"),
        threads=(int, "threads of DatasetWriter and gear ingest (default: all cores)"),
        turns=(3, "turns of each system, of which the median is reported"),
        sources=(1, "sources of gear ingest"),
        work=(tuple(WORK), "schemas to write"),
        systems=(tuple(SYSTEMS), "systems to measure, beside the raw write"),
    )
    sizes = (0.002,) if report.options.quick else report.options.gb
    turns = 1 if report.options.quick else report.options.turns
    systems = {name: SYSTEMS[name] for name in ("raw write", *report.options.systems)}
    rows: list[Row] = []
    for work in report.options.work:
        for size in sizes:
            with tempfile.TemporaryDirectory(prefix="disk-", dir=ROOT / "build") as folder:
                options = report.options
                job = Job(WORK[work], size * _GB, options.threads, options.sources)
                rows += measure(work, job, folder, turns, systems)
    print_rows(rows)
    report.meanwhile()
    report.write(rows)


def measure(
    work: str,
    job: Job,
    folder: str,
    turns: int,
    systems: Mapping[str, Callable[[Job, Path], None]],
) -> Iterator[Row]:
    """Yield a row for each system that is installed."""
    make_sources(job, Path(folder))
    taken: dict[str, list[tuple[float, float]]] = {}
    missing = dict[str, str]()
    for _ in range(turns):
        for name, write in systems.items():
            try:
                taken.setdefault(name, []).append(turn(job, write, Path(folder)))
            except ImportError as error:
                missing[name] = f"not installed: {error.name}"
    raw = float(np.median([seconds for seconds, _ in taken["raw write"]]))
    for name, times in taken.items():
        row: Row = {"what": "disk", "work": work, "gb": round(job.num_bytes / _GB, 3)}
        row |= {"system": name, "threads": job.threads}
        row["sources"] = job.num_sources
        if name in missing:
            yield row | {"left out": missing[name]}
            continue
        seconds, cpu = np.median(times, axis=0).tolist()
        row |= {"s": round(seconds, 3), "cpu_s": round(cpu, 3)}
        yield row | {"mb_per_s": round(job.num_bytes / seconds / 1e6, 1), "of_raw": raw / seconds}


if __name__ == "__main__":
    main()
