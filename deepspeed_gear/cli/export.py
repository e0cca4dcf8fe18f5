"""`gear export`: write trajectories in formats of other programs.

They are those of a data set, or of a table in a checkpoint or a running process. `gear ingest`
reads them back bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.checkpoint import save_folders
from deepspeed_gear.checkpoint.table_files import open_rows, read_table
from deepspeed_gear.cli import Options, check_one_source, listed
from deepspeed_gear.cli.inspect import find_saves
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.export import FORMATS, export
from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.errors import ConfigError, DataError, known_names
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.live_stores import living_stores
from deepspeed_gear.store.records import SlotRetention
from deepspeed_gear.store.table import holders_of

_COPY = "export the data set itself, which has the same rows"

OPTIONS: Options = {
    "DATA": ("folder of a data set or checkpoint", {"nargs": "?"}),
    "DEST": "file (parquet, npz) or folder (minari, jsonl) to make",
    "--format": ("format to write", {"action": "store", "required": True, "choices": FORMATS}),
    "--living PID": ("export a table of a running process", {"type": int}),
    "--table NAME": "which table, where there are several",
    "--columns PATTERN[,PATTERN]": ("optional columns, as of gear ingest", {"action": "append"}),
    "--overwrite": "replace what is of this format at DEST",
}


def run(args: argparse.Namespace) -> int:
    """Write the trajectories, and print their number."""
    check_one_source("DATA", args.data, args.living, "gear export")
    schema, trajectories, is_table = _open(args)
    columns = listed(args.columns)
    count = export(
        trajectories, schema, args.dest, args.format, columns, args.overwrite, derives=is_table
    )
    print(f"{args.dest}: {count:,} trajectories, {args.format}")
    return 0


def _open(args: argparse.Namespace) -> tuple[Schema, Iterator[dict[str, Any]], bool]:
    """Return the columns, the trajectories, and whether they are those of a table."""
    if args.living is not None:
        stores = {store.table: store for store in living_stores(args.living)}
        store = stores[_chosen(args.table, list(stores))]
        views = store.views
        schema = Schema.from_json(store.layout.meaning["schema"])
        if not all(f"column/{column.name}" in views for column in schema):
            raise DataError(
                f"process {args.living}", "must hold the rows of its table", "a mapped file", _COPY
            )
        columns = {column.name: [views[f"column/{column.name}"]] for column in schema}
        shared = views.get("shared_prompts")
        return (*_stored(schema, views["slots"], views.get("retention"), columns, shared), True)
    position, tables = find_saves(Path(args.data))
    if position is None and not tables:
        dataset = Dataset.open(args.data)
        if args.table is not None:
            raise ConfigError(
                "--table",
                "must be left out for a data set",
                args.table,
                "leave it out: a data set has one table",
            )
        return dataset.schema, map(dataset.trajectory, range(len(dataset))), False
    by_name = {save_folders.table_in(path): path for path in tables}
    saved = read_table(by_name[_chosen(args.table, list(by_name))])
    open_rows(saved)
    schema = Schema.from_json(saved.manifests[0]["schema"])
    whole = saved.whole
    if whole.slots is None:
        raise DataError(str(saved.folders[0]), "must hold rows", "priorities of a data set", _COPY)
    files = {c.name: [*chain.from_iterable(of[c.name] for of in saved.columns)] for c in schema}
    shared = whole.shared_prompts
    if shared is not None:
        numbers = np.concatenate(files[saved.manifests[0]["group"]["column"]])
        shared = np.stack([shared, holders_of(numbers, shared, whole.slots[:, Slot.ID])], axis=1)
    return (*_stored(schema, whole.slots, whole.retention, files, shared), True)


def _chosen(table: str | None, tables: list[str]) -> str:
    if table in tables or (table is None and len(tables) == 1):
        return table or tables[0]
    remedy = known_names(table, tables) if table else f"tables are {', '.join(tables)}"
    raise ConfigError(
        "--table", "must name a table that holds rows", table, remedy if tables else _COPY
    )


def _stored(
    schema: Schema,
    slots: np.ndarray,
    retention: np.ndarray | None,
    files: dict[str, list[np.ndarray]],
    shared_prompts: np.ndarray | None,
) -> tuple[Schema, Iterator[dict[str, Any]]]:
    """Return the trajectories of a table in the order of their ids, and their schema.

    Trajectories that are still open or lack late columns are left out with a note. So are those of
    a living table (`slots`) that are evicted meanwhile: their slots before and after the copy
    differ.

    Args:
        files: Arrays by column, each with the rows of whole trajectories.
        shared_prompts: For each slot, the steps of a prompt that it shares, and the slot that holds
            them; None if the table shares none.
    """
    if schema.has_items:
        raise DataError(
            "--table",
            "must name a table without media and ragged columns",
            None,
            "export formats cannot hold them: use Replay.read",
        )
    late = schema.late_bits(schema.names)
    starts = {name: np.cumsum([0, *map(len, arrays)]) for name, arrays in files.items()}

    def rows(name: str, first: int, count: int) -> np.ndarray:
        # Row `first` of all arrays one after the other: with arrays of 4 and 6 rows, starts is
        # [0, 4, 10], and row 5 is row 1 of the second array.
        index = int(np.searchsorted(starts[name], first, side="right")) - 1
        first -= int(starts[name][index])
        return np.array(files[name][index][first : first + count])

    def read(slot: int) -> dict[str, Any] | None:
        while True:
            steps, holder = (0, slot) if shared_prompts is None else shared_prompts[slot].tolist()
            held = slots[[slot, holder]]
            record = held[0]
            (first, before) = held[:, Slot.FIRST_ROW].tolist()
            words = (
                np.zeros(SlotRetention.NUM_WORDS, np.int64)
                if retention is None
                else retention[slot]
            )
            is_whole = not words[SlotRetention.OPEN] and words[SlotRetention.PRESENT] & late == late
            if record[Slot.STATE] != SlotState.COMMITTED or not is_whole:
                return None
            trajectory: dict[str, Any] = {}
            for c in schema:
                if c.rows == "1":
                    trajectory[c.name] = rows(c.name, slot, 1)[0]
                    continue
                trajectory[c.name] = rows(
                    c.name, first, int(record[Slot.NUM_STEPS]) + int(c.rows == "T+1")
                )
                if steps:
                    prompt = rows(c.name, before, steps)
                    trajectory[c.name] = np.concatenate([prompt, trajectory[c.name]])
            # The rows are those of the trajectory only if its slot, and that of its prompt, did not
            # change while they were copied; else they are read again.
            is_same = shared_prompts is None or shared_prompts[slot].tolist() == [steps, holder]
            if is_same and np.array_equal(held, slots[[slot, holder]]):
                opaque = [c for c in schema if c.is_opaque]
                return trajectory | {c.name: decode(trajectory[c.name], c, c.name) for c in opaque}

    def every() -> Iterator[dict[str, Any]]:
        held = np.nonzero(np.array(slots)[:, Slot.STATE] == SlotState.COMMITTED)[0]
        num_left_out = 0
        for slot in held[np.argsort(slots[held, Slot.ID])].tolist():
            trajectory = read(slot)
            if trajectory is not None:
                yield trajectory
            num_left_out += trajectory is None
        if num_left_out:
            what = (
                "trajectories that grow, lack late columns or were evicted meanwhile are left out"
            )
            print(f"{num_left_out:,} {what}", file=sys.stderr)

    return Schema([replace(c, late=False) for c in schema]), every()
