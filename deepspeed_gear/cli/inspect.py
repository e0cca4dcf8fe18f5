"""`gear inspect`: what is in a data set, a checkpoint or a running process, as a table or JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.checkpoint import position, save_folders
from deepspeed_gear.cli import Options, grid_of
from deepspeed_gear.cli.inspect_distribution import LEVELS, distribution, find_saves, of_living, of_saved
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import SCHEMA_FILE
from deepspeed_gear.data.dataset_statistics import ColumnStatistics
from deepspeed_gear.data.splits import split_of
from deepspeed_gear.errors import ConfigError, DataError, show_bytes
from deepspeed_gear.store.live_stores import living_stores

DESCRIPTION = (
    "Show trajectories, steps, returns, columns, bytes and statistics of a data set; or the position of "
    "a checkpoint and what its tables hold; or also what the tables of running processes draw from."
)
ANOTHER = "  contents      cannot be read: it is a store of another version of the package"
_LIVING = "show stores of a running process, or all of this user and those that are kept; touch none"
OPTIONS: Options = {
    "DEST": ("folder of a data set or checkpoint", {"nargs": "?"}),
    "--living PID": (_LIVING, {"nargs": "?", "type": int, "const": 0}),
    "--json": "print JSON, with statistics of each element",
    "--verify": "compare every byte with what was written",
}


def run(args: argparse.Namespace) -> int:
    if (args.dest is None) == (args.living is None):
        rule = "or --living must be given" if args.dest is None else "and --living must not both be given"
        raise ConfigError("DEST", rule, args.dest, "gear inspect --help shows both")
    folder = None if args.dest is None else Path(args.dest)
    held_in, tables = (None, []) if folder is None else find_saves(folder)
    if args.verify and (folder is None or held_in is not None or tables):
        raise ConfigError("--verify", "must be of a data set", None, "a checkpoint is always verified")
    if folder is None:
        document, lines = describe_living(args.living or None)
    elif held_in is not None or tables:
        document, lines = describe_saved(held_in, tables)
    elif folder.is_dir() and not (folder / SCHEMA_FILE).exists():
        rule = "must be the folder of a data set or of a checkpoint"
        remedy = (
            f"it has neither {SCHEMA_FILE} nor a position or table; gear ingest makes a data set, "
            "engine.save_checkpoint or Replay.save a checkpoint"
        )
        raise DataError(str(folder), rule, None, remedy)
    else:
        dataset = Dataset.open(folder)
        if args.verify:
            dataset.verify()
        document = {**summarize(dataset), "verified": bool(args.verify)}
        lines = dataset_lines(document)
    print(json.dumps(document, indent=1) if args.json else "\n".join(lines))
    return 0


def returns_of(dataset: Dataset) -> NDArray[Any] | None:
    """Return the return of each trajectory: stored, or the sum of its rewards; None without either."""
    stored, reward = dataset.schema.role("return"), dataset.schema.role("reward")
    if stored is not None:
        return dataset.columns[stored.name]
    if reward is None:
        return None
    first_rows = np.cumsum(dataset.lengths) - dataset.lengths
    return np.add.reduceat(dataset.columns[reward.name], first_rows, dtype=np.float64)


def summarize(dataset: Dataset) -> dict[str, Any]:
    """Return what `gear inspect --json` prints; JSON-able. Cost: reads extents, and returns or rewards."""
    returns = returns_of(dataset)
    part = split_of(np.arange(len(dataset), dtype=np.int64) + dataset.first_id, dataset.split)
    shares = {"train": 1.0 - sum(dataset.split.values()), **dict(sorted(dataset.split.items()))}
    split = {}
    for i, (name, share) in enumerate(shares.items()):
        lengths = dataset.lengths[part == i]
        split[name] = {"share": share, "trajectories": len(lengths), "steps": int(lengths.sum())}
    summary: dict[str, Any] = {
        "path": str(dataset.path),
        "fingerprint": dataset.fingerprint,
        "part": None if dataset.part is None else {**dataset.part.to_json(), "end": dataset.part.end},
        "trajectories": len(dataset),
        "steps": dataset.num_steps,
        "bytes": dataset.num_bytes,
        "split": split,
        "source": dataset.source,
        "length": distribution(dataset.lengths),
        "return": None if returns is None else distribution(returns),
        "columns": {},
    }
    for column in dataset.schema:
        statistics = dataset.statistics.get(column.name)
        summary["columns"][column.name] = {
            "dtype": column.dtype,
            "shape": list(column.shape),
            **({"max_bytes": column.max_bytes} if column.is_opaque else {}),
            "rows": column.rows,
            "role": column.role,
            "bytes": dataset.columns[column.name].nbytes,
            "overall": _overall(statistics),
            "statistics": None if statistics is None else statistics.to_json(),
        }
    return summary


def _overall(statistics: ColumnStatistics | None) -> dict[str, float | None]:
    """Describe a column by one mean, std, min and max over all its elements; None without finite values."""
    if statistics is None or not np.isfinite(statistics.mean).any():
        return dict.fromkeys(("mean", "std", "min", "max"))
    known = np.isfinite(statistics.mean)
    mean, std = statistics.mean[known], statistics.std[known]
    center = float(mean.mean())
    spread = float(np.sqrt((std**2 + (mean - center) ** 2).mean()))
    low, high = float(np.nanmin(statistics.min)), float(np.nanmax(statistics.max))
    return {"mean": center, "std": spread, "min": low, "max": high}


def dataset_lines(summary: dict[str, Any]) -> list[str]:
    lines = [
        f"{summary['path']}",
        f"  fingerprint   {summary['fingerprint']}" + ("  (verified)" if summary["verified"] else ""),
        f"  trajectories  {summary['trajectories']:,}",
        f"  steps         {summary['steps']:,}",
        f"  size          {show_bytes(summary['bytes'])}",
    ]
    if (part := summary["part"]) is not None:
        ids = f"ids {part['first']:,} to {part['end'] - 1:,} of {part['trajectories']:,}"
        lines.insert(2, f"  part          {part['index']} of {part['count']}: {ids}")
        lines.insert(3, f"  whole         {part['whole']}, {part['steps']:,} steps")
    for name, part in summary["split"].items():
        text = f"{part['trajectories']:,} trajectories, {part['steps']:,} steps"
        lines.append(f"  {name:<12}  {text} ({part['share']:.1%} asked for)")
    recorded = summary["source"]
    for source in recorded.get("sources", [recorded] if recorded else []):
        lines.append(f"  source        {_source(source)}")
        lines += [f"                note: {note}" for note in source.get("notes", [])]
    heads = ["", "min", *(f"{level:.0%}" for level in LEVELS), "max", "mean", "std"]
    keys = ["min", *map(str, LEVELS), "max", "mean", "std"]
    found = [(name, summary[name]) for name in ("length", "return") if summary[name] is not None]
    rows = [[name, *(_number(values[key]) for key in keys)] for name, values in found]
    lines += ["", *grid_of(heads, rows)]
    heads = ["column", "dtype", "shape", "rows", "size", "mean", "std", "min", "max"]
    rows = []
    for name, c in summary["columns"].items():
        shape = f"max_bytes {c['max_bytes']}" if "max_bytes" in c else str(c["shape"])
        overall = map(_number, c["overall"].values())
        rows.append([name, c["dtype"], shape, c["rows"], show_bytes(c["bytes"]), *overall])
    whole = "" if summary["part"] is None else " of the whole"
    note = f"Statistics of columns: training split{whole}, over all elements of a row (--json has each)."
    return [*lines, "", *grid_of(heads, rows, num_left=4), "", note]


def _source(source: dict[str, Any]) -> str:
    """Describe a source in one line; only ingest's own formats record all of name, format and episodes."""
    if "name" not in source:
        return json.dumps(source)
    known = [str(source["format"])] if "format" in source else []
    known += [f"{source['episodes']} episodes"] if "episodes" in source else []
    return f"{source['name']} ({', '.join(known)})" if known else str(source["name"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def describe_living(process: int | None) -> tuple[dict[str, Any], list[str]]:
    """Return the stores of running processes, JSON-able and as lines."""
    stores: list[dict[str, Any]] = []
    lines: list[str] = []
    for store in living_stores(process):
        size, found, shown = store.layout.total_bytes, {"table": store.table}, [ANOTHER]
        with suppress(KeyError, TypeError):  # it was described by other options
            found = of_living(store)
            shown = _lines(found)
        run = {"id": store.run.id, "name": store.run.name or None}
        stores.append({"processes": list(store.processes), "run": run, "bytes": size, **found})
        processes = ", ".join(map(str, store.processes))
        of = f"of process {processes}" if processes else "kept without a process"
        lines.append(f"table {store.table} {of}: {show_bytes(size)}")
        lines += [f"  run           {store.run}", *shown]
    return {"stores": stores}, lines or ["no process of this user holds a store"]


def describe_saved(folder: Path | None, tables: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
    """Return the position (None: there is none) and the tables in these folders, JSON-able and as lines."""
    lines: list[str] = []
    known = None
    if folder is not None:
        known = position.describe(save_folders.read_position(folder))
        without = "" if tables else ", without tables: data sets hold their contents"
        lines.append(f"position in {folder}{without}")
        for table, words in known["train"].items():
            text = f"{words['global_batches']:,} global batches, {words['samples']:,} samples"
            text += f" of table {table}"
            if "epoch" in words:
                epoch = f"{words['epoch_samples']:,} of {words['epoch_items']:,} items"
                text += f"; epoch {words['epoch']}: {epoch}"
            lines.append(f"  used          {text}")
        lines += [f"  passes        {count:,} over {split}" for split, count in known["passes"].items()]
        lines += [f"  data set      {table}: {mark}" for table, mark in known["data"].items()]
    found: list[dict[str, Any]] = []
    for path in tables:
        name, manifest = save_folders.table_in(path), path / "shard-0" / save_folders.MANIFEST
        lines.append(f"table {name} in {path}")
        replicas = save_folders.read_json(manifest).get("replicas") if manifest.is_file() else None
        if replicas is None:
            found.append(of_saved(path))
            lines += _lines(found[-1])
        else:
            found.append({"table": name, "replicas": replicas})
            lines.append(f"  replicas      {replicas}, each with a table in its device's memory")
    return {"position": known, "tables": found}, lines


def _lines(summary: dict[str, Any]) -> list[str]:
    """Return the lines printed of a table, saved or living."""
    what = f"{summary['kind']}, unit {summary['unit']}" if summary["kind"] else "none: it is not sampled"
    lines = [f"  sampler       {what}", f"  trajectories  {summary['trajectories']:,}"]
    if summary["steps"] is not None:
        lines.append(f"  steps         {summary['steps']:,}")
    if summary["length"] is not None and summary["trajectories"]:
        length = summary["length"]
        levels = ", ".join(f"{level:.0%} {length[str(level)]:,.0f}" for level in LEVELS)
        ends = f"min {length['min']:,.0f}, {levels}, max {length['max']:,.0f}"
        lines.append(f"  lengths       {ends}, mean {length['mean']:,.1f}")
    if summary["groups"] is not None:
        groups = {name: f"{count:,}" for name, count in summary["groups"].items()}
        lines.append("  groups        {complete} complete, {incomplete} incomplete".format(**groups))
        ever = "{rejected} groups rejected, {oversized} too large, {evicted_unsampled} evicted unsampled"
        lines.append("  left out      " + ever.format(**groups))
        ever = "{late} late, {late_consumed} of groups that had left, {unfilled} unfilled, {surplus} surplus"
        lines.append("  trajectories  " + ever.format(**groups))
    if summary["prompts"] is not None:
        dropped = summary["prompts"]["dropped"].items()
        now = "  prompts       {issued:,} issued: {trained:,} trained, {training:,} in training, "
        now += "{waiting:,} complete, {leased:,} leased, {returned:,} returned, {incomplete:,} incomplete"
        reasons = "".join(f"; {count:,} dropped: {reason}" for reason, count in dropped)
        lines.append(now.format(**summary["prompts"]) + reasons)
        for epoch, books in summary["prompts"]["epochs"].items():
            now = "    epoch {at:<8}{issued:,} issued: {drawn:,} drawn, {waiting:,} complete"
            now += ", {leased:,} leased, {returned:,} returned, {incomplete:,} incomplete, {left:,} dropped"
            lines.append(now.format(at=epoch, left=sum(books["dropped"].values()), **books))
    if "drawable" not in summary:
        return lines
    waiting = f" ({summary['waiting']:,} added since the latest selection)" if summary["waiting"] else ""
    lines.append(f"  drawable      {summary['drawable']:,}{waiting}")
    for one in summary["excluded"]:
        what = f"{one['trajectories']:,} trajectories ({one['steps']:,} steps) {one['reason']}"
        lines.append(f"  excluded      {what}; {one['remedy']}")
    if summary["effective"] is not None:
        tops = summary["share_of_top"].items()
        shares = ", ".join(f"top {float(part):.0%}: {share:.1%}" for part, share in tops)
        lines.append(f"  mass          {shares}; effective items {summary['effective']:.1%}")
    if summary["priorities"] is not None:
        lines.append("  priorities    " + ", ".join(f"{k} {v:.4g}" for k, v in summary["priorities"].items()))
    if summary["draws"] is not None:
        drawn = "  drawn         mean {mean:.4g}, max {max:,}, never {never:.1%}"
        lines.append(drawn.format(**summary["draws"]))
    return lines
