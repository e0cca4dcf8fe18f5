"""`gear inspect`: show the content of a data set, a checkpoint or a running process.

Of a data set: trajectories, steps, returns, columns, bytes and statistics. Of a checkpoint: its
position and its tables. Of running processes: their tables, and the items that they draw from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepspeed_gear.checkpoint import checked_files, position, save_folders
from deepspeed_gear.cli import Options, check_one_source, dataset_plots
from deepspeed_gear.cli.dataset_summary import dataset_lines, summarize
from deepspeed_gear.cli.table_contents import of_living, of_saved, table_lines
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import SCHEMA_FILE
from deepspeed_gear.errors import CheckpointError, ConfigError, DataError, show_bytes
from deepspeed_gear.store.live_stores import living_stores

_GEAR = "gear"  # folder of an engine's checkpoint, in that of its tag
_LATEST = "latest"  # file beside the tags, with the name of the newest
_ANOTHER = "  contents      cannot be read: it is a store of another version of the package"
_LIVING = (
    "show stores of a running process, or all of this user and those that are kept; touch none"
)
OPTIONS: Options = {
    "DEST": ("folder of a data set or checkpoint", {"nargs": "?"}),
    "--living PID": (_LIVING, {"nargs": "?", "type": int, "const": 0}),
    "--json": "print JSON, with statistics of each element",
    "--verify": "compare every byte with what was written",
    "--plot FILE": "draw a data set's lengths, returns, values and images (.svg, .png or .html)",
}


def run(args: argparse.Namespace) -> int:
    """Print a description of a data set, a checkpoint or the stores of running processes."""
    check_one_source("DEST", args.dest, args.living, "gear inspect")
    folder = None if args.dest is None else Path(args.dest)
    held_in, tables = (None, []) if folder is None else find_saves(folder)
    is_saved = held_in is not None or bool(tables)
    may_be_dataset = folder is not None and not is_saved
    if args.verify and not may_be_dataset:
        raise ConfigError(
            "--verify",
            "must be given for a data set only",
            None,
            "leave it out: a checkpoint is always verified",
        )
    if args.plot is not None:
        if not may_be_dataset:
            remedy = "gear export writes the trajectories of a table, which gear ingest takes"
            raise ConfigError("--plot", "must be of a data set", args.plot, remedy)
        dataset_plots.check_file(Path(args.plot))
    if folder is None:
        document, lines = describe_living(args.living or None)
    elif is_saved:
        document, lines = describe_saved(held_in, tables)
    elif folder.is_dir() and not (folder / SCHEMA_FILE).exists():
        raise DataError(
            str(folder),
            "must be the folder of a data set or of a checkpoint",
            None,
            f"it has neither {SCHEMA_FILE} nor a position or table; gear ingest makes a data set, "
            "engine.save_checkpoint or Replay.save a checkpoint",
        )
    else:
        dataset = Dataset.open(folder)
        if args.verify:
            dataset.verify()
        document = {**summarize(dataset), "verified": bool(args.verify)}
        lines = dataset_lines(document)
        if args.plot is not None:
            document["plot"] = dataset_plots.plot(dataset, Path(args.plot))
            lines += ["", "Plot in {file}: {sampled}".format(**document["plot"])]
    print(json.dumps(document, indent=1) if args.json else "\n".join(lines))
    return 0


def find_saves(folder: Path) -> tuple[Path | None, list[Path]]:
    """Return the folder of a checkpoint's position (None without one) and those of its tables.

    Args:
        folder: An engine's checkpoints, of which the latest tag is taken; or one tag, its gear
            folder, or a table.
    """
    latest = folder / _LATEST
    if latest.is_file():
        folder /= latest.read_text().strip()
        if not folder.is_dir():
            raise CheckpointError(
                str(latest), "must name a folder beside it", folder.name, "take another checkpoint"
            )
    if save_folders.manifests_in(folder):
        return None, [folder]
    folders = (folder, folder / _GEAR)
    position = next((one for one in folders if (one / save_folders.POSITION).is_file()), None)
    return position, [table for one in folders for table in save_folders.newest_tables(one)]


def describe_living(process: int | None) -> tuple[dict[str, Any], list[str]]:
    """Describe the stores of running processes, as JSON values and as lines."""
    stores: list[dict[str, Any]] = []
    lines: list[str] = []
    for store in living_stores(process):
        size = store.layout.total_bytes
        contents = {"table": store.table}
        shown = [_ANOTHER]
        with suppress(KeyError, TypeError):  # it was described by other options
            contents = of_living(store)
            shown = table_lines(contents)
        run = {"id": store.run.id, "name": store.run.name or None}
        stores.append({"processes": list(store.processes), "run": run, "bytes": size, **contents})
        processes = ", ".join(map(str, store.processes))
        of = f"of process {processes}" if processes else "kept without a process"
        lines.append(f"table {store.table} {of}: {show_bytes(size)}")
        lines += [f"  run           {store.run}", *shown]
    return {"stores": stores}, lines or ["no process of this user holds a store"]


def describe_saved(folder: Path | None, tables: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
    """Describe a checkpoint's position, if any, and its tables, as JSON values and as lines."""
    lines: list[str] = []
    known = None
    if folder is not None:
        known = position.describe(save_folders.read_position(folder))
        without = "" if tables else ", without tables: data sets hold their contents"
        lines.append(f"position in {folder}{without}")
        for table, words in known["train"].items():
            text = (
                f"{words['global_batches']:,} global batches, {words['samples']:,} samples of "
                f"table {table}"
            )
            if "epoch" in words:
                epoch = f"{words['epoch_samples']:,} of {words['epoch_items']:,} items"
                text += f"; epoch {words['epoch']}: {epoch}"
            lines.append(f"  used          {text}")
        lines += [
            f"  passes        {count:,} over {split}" for split, count in known["passes"].items()
        ]
        lines += [f"  data set      {table}: {mark}" for table, mark in known["data"].items()]
    described: list[dict[str, Any]] = []
    for path in tables:
        name = save_folders.table_in(path)
        manifest = path / "shard-0" / save_folders.MANIFEST
        lines.append(f"table {name} in {path}")
        replicas = checked_files.read_json(manifest).get("replicas") if manifest.is_file() else None
        if replicas is None:
            described.append(of_saved(path))
            lines += table_lines(described[-1])
        else:
            described.append({"table": name, "replicas": replicas})
            lines.append(f"  replicas      {replicas}, each with a table in its device's memory")
    return {"position": known, "tables": described}, lines
