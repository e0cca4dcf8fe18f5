"""`gear inspect`: show the content of a data set, a checkpoint or a running process.

Of a data set: trajectories, steps, returns, columns, bytes and statistics. Of a checkpoint: its
position and its tables. Of running processes: their tables, and the items that they draw from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from deepspeed_gear.checkpoint import position, save_folders
from deepspeed_gear.checkpoint.table_files import open_rows, read_table
from deepspeed_gear.cli import Options, check_one_source, dataset_plots, grid_of
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import SCHEMA_FILE
from deepspeed_gear.data.dataset_statistics import ColumnStatistics
from deepspeed_gear.data.splits import split_of
from deepspeed_gear.data.trajectory_checks import as_numbers
from deepspeed_gear.errors import CheckpointError, ConfigError, DataError, show_bytes
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.sampling.exclusions import count_exclusions
from deepspeed_gear.sampling.mass_rules import MassRule
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.group_spec import COUNTED, GroupSpec
from deepspeed_gear.store.groups import forecast_groups
from deepspeed_gear.store.live_stores import LiveStore, living_stores
from deepspeed_gear.store.prompt_account import PromptAccount
from deepspeed_gear.store.prompt_spec import PromptSpec
from deepspeed_gear.store.records import SharedPrompt
from deepspeed_gear.store.row_allocator import rows_of

TRAIN = "stream/train/"
_GEAR = "gear"  # folder of an engine's checkpoint, in that of its tag
_LATEST = "latest"  # file beside the tags, with the name of the newest
_SHARES = (0.01, 0.1)
LEVELS = (0.1, 0.5, 0.9)  # quantiles of values of trajectories
ANOTHER = "  contents      cannot be read: it is a store of another version of the package"
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
    if args.verify and (folder is None or held_in is not None or tables):
        raise ConfigError(
            "--verify",
            "must be given for a data set only",
            None,
            "leave it out: a checkpoint is always verified",
        )
    if args.plot is not None:
        if folder is None or held_in is not None or tables:
            remedy = "gear export writes the trajectories of a table, which gear ingest takes"
            raise ConfigError("--plot", "must be of a data set", args.plot, remedy)
        dataset_plots.check_file(Path(args.plot))
    if folder is None:
        document, lines = describe_living(args.living or None)
    elif held_in is not None or tables:
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


@np.errstate(over="ignore", invalid="ignore")
def distribution(values: NDArray[Any]) -> dict[str, float | None]:
    """Describe one value per trajectory by quantiles, mean and deviation.

    They are None without finite values, and where float64 overflows.
    """
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return dict.fromkeys(("min", *map(str, LEVELS), "max", "mean", "std"))
    quantiles = np.quantile(numbers, LEVELS, method="inverted_cdf")  # which are values themselves
    described = {
        "min": numbers.min(),
        **{str(level): value for level, value in zip(LEVELS, quantiles, strict=True)},
        "max": numbers.max(),
        "mean": numbers.mean(),
        "std": numbers.std(),
    }
    return {name: float(value) if np.isfinite(value) else None for name, value in described.items()}


def _contents(
    table: str, train: Mapping[str, Any], lengths: np.ndarray, **more: Any
) -> dict[str, Any]:
    """Describe the content of a table.

    Args:
        train: Description of its training stream; empty if the table is not sampled.
        lengths: Steps of each trajectory. [n], int64.
        **more: `groups` (`TableGroups.statistics`) and `prompts` (`PromptAccount.report`), or
            replacements.
    """
    return {
        "table": table,
        "kind": train.get("kind"),
        "unit": train.get("unit"),
        "trajectories": len(lengths),
        "steps": int(lengths.sum()),
        "length": distribution(lengths),
        "groups": None,
        "prompts": None,
        **more,
    }


def of_living(store: LiveStore) -> dict[str, Any]:
    """Describe the store of a running process and, if it is sampled, the items it draws from."""
    views = store.views
    meaning = store.layout.meaning
    train = meaning.get("train")
    sizes = meaning.get("sizes", {})
    schema = Schema.from_json(meaning["schema"])
    groups = prompts = None
    if sizes.get("group") is not None:  # groups are formed on copies
        group = TypeAdapter(GroupSpec).validate_python(sizes["group"])
        views, groups = forecast_groups(store.table, group, schema, views)
    if sizes.get("prompts") is not None:
        numbers = views["column/" + sizes["group"]["column"]]
        prompts = PromptAccount(PromptSpec(**sizes["prompts"]), views, numbers).report()
    slots = np.array(views["slots"])
    lengths = slots[:, Slot.NUM_STEPS]
    is_held = slots[:, Slot.STATE] == SlotState.COMMITTED
    if "shared_prompts" in views:
        lengths = lengths + views["shared_prompts"][:, SharedPrompt.STEPS]
    lengths = lengths[is_held]
    contents = _contents(store.table, train or {}, lengths, groups=groups, prompts=prompts)
    if train is None:
        return contents

    def values(name: str, slots: np.ndarray) -> np.ndarray:
        return as_numbers(views[f"column/{name}"][slots], schema[name])

    # The columns of a data set that is mapped are in its files, not in the store.
    is_readable = all(f"column/{column.name}" in views for column in schema)
    rule = TypeAdapter(MassRule).validate_python(train)
    excluded, waiting = count_exclusions(
        rule, schema, TRAIN, views, values if is_readable else None
    )
    priorities = views.get(TRAIN + "priorities")
    draws = views.get(TRAIN + "draws")
    leaves = np.array(views[TRAIN + "sums"][: len(slots if priorities is None else priorities)])
    drawable = np.nonzero(leaves > 0)[0]
    counted = drawable
    # Steps without priorities are drawn by the masses of their trajectories, but counted singly.
    if priorities is None and rule.unit == "step":
        rows, steps, owner = rows_of(slots[drawable])
        counted = rows[rule.anchors.admits(steps, slots[drawable[owner], Slot.NUM_STEPS])]
    of_items = None if priorities is None else np.array(priorities[drawable])
    of_draws = None if draws is None else np.array(draws[counted])
    return {
        **contents,
        "drawable": len(drawable) + waiting,
        "waiting": waiting,  # those that the next selection adds
        "excluded": [asdict(one) for one in excluded],
        **drawing(leaves[drawable].astype(np.float64), of_items, of_draws),
    }


def drawing(
    masses: np.ndarray, priorities: np.ndarray | None, draws: np.ndarray | None
) -> dict[str, Any]:
    """Describe the items that can be drawn.

    Args:
        masses: Masses by which the tree draws items or their trajectories. [n], float64, above 0.
        priorities: Priorities of the items. [n], float32.
        draws: How often each item was drawn, if counted. [m], int32.
    """
    total = float(masses.sum())
    falling = np.sort(masses)[::-1]
    description: dict[str, Any] = {
        "effective": None,
        "share_of_top": {},
        "priorities": None,
        "draws": None,
    }
    if len(falling):
        counts = {share: max(1, round(share * len(falling))) for share in _SHARES}
        description["share_of_top"] = {
            str(share): float(falling[:n].sum() / total) for share, n in counts.items()
        }
        # Effective sample size by Kish, as a share of the items: 1 if all masses are equal, 1/n if
        # one item has all the mass.
        description["effective"] = float(total**2 / (masses**2).sum() / len(falling))
    if priorities is not None and len(priorities):
        low, middle, high = np.quantile(priorities, (0, 0.5, 1)).tolist()
        description["priorities"] = {
            "min": low,
            "median": middle,
            "max": high,
            "mean": float(priorities.mean()),
        }
    if draws is not None and len(draws):
        mean = float(draws.mean())
        never = float((draws == 0).mean())
        description["draws"] = {"mean": mean, "max": int(draws.max()), "never": never}
    return description


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


def of_saved(folder: Path) -> dict[str, Any]:
    """Check the files of a saved table, and describe its content over all shards."""
    saved_table = read_table(folder)
    open_rows(saved_table)
    manifest = saved_table.manifests[0]
    slots = saved_table.whole.slots
    saved = saved_table.whole.groups
    name = save_folders.table_in(folder)
    train = manifest.get("train", {})
    groups = None
    if slots is None:  # only its data set has lengths
        count = saved_table.whole.num_slots
        return _contents(name, train, np.zeros(0), trajectories=count, steps=None, length=None)
    is_held = slots[:, Slot.STATE] == SlotState.COMMITTED
    if saved is not None:
        column = manifest["group"]["column"]
        leaders = saved.records[is_held, 0]
        numbers = np.concatenate([columns[column][0] for columns in saved_table.columns])[is_held]
        groups = {
            "complete": len(np.unique(leaders[leaders > 0])),
            "incomplete": len(np.unique(numbers[leaders == 0])),
            **{name: int(saved.counts[word]) for name, word in COUNTED.items()},
        }
    lengths = slots[:, Slot.NUM_STEPS]
    if saved_table.whole.shared_prompts is not None:
        lengths = lengths + saved_table.whole.shared_prompts
    return _contents(name, train, lengths[is_held], groups=groups)


def returns_of(dataset: Dataset) -> NDArray[Any] | None:
    """Return each trajectory's return: stored, or the sum of its rewards; None without either."""
    stored = dataset.schema.role("return")
    reward = dataset.schema.role("reward")
    if stored is not None:
        return as_numbers(dataset.columns[stored.name], stored)
    if reward is None:
        return None
    rewards = as_numbers(dataset.columns[reward.name], reward)  # 0 in the row after a last step
    with np.errstate(over="ignore", invalid="ignore"):
        return np.add.reduceat(rewards, dataset.first_rows, dtype=np.float64)


def summarize(dataset: Dataset) -> dict[str, Any]:
    """Return the JSON document of `gear inspect` for a data set.

    Cost: reads the extents, and the returns or rewards.
    """
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
        "part": None
        if dataset.part is None
        else {**dataset.part.to_json(), "end": dataset.part.end},
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


@np.errstate(over="ignore", invalid="ignore")
def _overall(statistics: ColumnStatistics | None) -> dict[str, float | None]:
    """Describe a column by one mean, std, min and max over all its elements.

    They are None if no element has a finite value, and where float64 overflows.
    """
    overall: dict[str, float | None] = dict.fromkeys(("mean", "std", "min", "max"))
    if statistics is None or not np.isfinite(statistics.min).any():
        return overall
    overall["min"] = float(np.nanmin(statistics.min))
    overall["max"] = float(np.nanmax(statistics.max))
    known = np.isfinite(statistics.mean) & np.isfinite(statistics.std)
    if not known.any():
        return overall
    mean = statistics.mean[known]
    std = statistics.std[known]
    # Every element has as many rows, so the total variance is the mean of the variances plus the
    # variance of the means.
    center = float(mean.mean())
    spread = float(np.sqrt((std**2 + (mean - center) ** 2).mean()))
    overall["mean"] = center if np.isfinite(center) else None
    overall["std"] = spread if np.isfinite(spread) else None
    return overall


def dataset_lines(summary: dict[str, Any]) -> list[str]:
    """Format the document that `summarize` returns, as lines."""
    lines = [
        f"{summary['path']}",
        f"  fingerprint   {summary['fingerprint']}"
        + ("  (verified)" if summary["verified"] else ""),
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
    described = [
        (name, summary[name]) for name in ("length", "return") if summary[name] is not None
    ]
    rows = [[name, *(_number(values[key]) for key in keys)] for name, values in described]
    lines += ["", *grid_of(heads, rows)]
    heads = ["column", "dtype", "shape", "rows", "size", "mean", "std", "min", "max"]
    rows = []
    for name, c in summary["columns"].items():
        shape = f"max_bytes {c['max_bytes']}" if "max_bytes" in c else str(c["shape"])
        overall = map(_number, c["overall"].values())
        rows.append([name, c["dtype"], shape, c["rows"], show_bytes(c["bytes"]), *overall])
    whole = "" if summary["part"] is None else " of the whole"
    note = (
        f"Statistics of columns: training split{whole}, over all elements of a row (--json has "
        "each)."
    )
    return [*lines, "", *grid_of(heads, rows, num_left=4), "", note]


def _source(source: dict[str, Any]) -> str:
    """Describe a source in one line.

    Only sources that ingest recorded have all of name, format and episodes.
    """
    if "name" not in source:
        return json.dumps(source)
    known = [str(source["format"])] if "format" in source else []
    known += [f"{source['episodes']} episodes"] if "episodes" in source else []
    return f"{source['name']} ({', '.join(known)})" if known else str(source["name"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def describe_living(process: int | None) -> tuple[dict[str, Any], list[str]]:
    """Describe the stores of running processes, as JSON values and as lines."""
    stores: list[dict[str, Any]] = []
    lines: list[str] = []
    for store in living_stores(process):
        size = store.layout.total_bytes
        contents = {"table": store.table}
        shown = [ANOTHER]
        with suppress(KeyError, TypeError):  # it was described by other options
            contents = of_living(store)
            shown = _lines(contents)
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
        replicas = save_folders.read_json(manifest).get("replicas") if manifest.is_file() else None
        if replicas is None:
            described.append(of_saved(path))
            lines += _lines(described[-1])
        else:
            described.append({"table": name, "replicas": replicas})
            lines.append(f"  replicas      {replicas}, each with a table in its device's memory")
    return {"position": known, "tables": described}, lines


def _lines(summary: dict[str, Any]) -> list[str]:
    what = (
        f"{summary['kind']}, unit {summary['unit']}"
        if summary["kind"]
        else "none: it is not sampled"
    )
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
        lines.append(
            "  groups        {complete} complete, {incomplete} incomplete".format(**groups)
        )
        ever = (
            "{rejected} groups rejected, {oversized} too large, {evicted_unsampled} evicted "
            "unsampled"
        )
        lines.append("  left out      " + ever.format(**groups))
        ever = (
            "{late} late, {late_consumed} of groups that had left, {unfilled} unfilled, {surplus} "
            "surplus"
        )
        lines.append("  trajectories  " + ever.format(**groups))
    if summary["prompts"] is not None:
        dropped = summary["prompts"]["dropped"].items()
        now = (
            "  prompts       {issued:,} issued: {trained:,} trained, {training:,} in training, "
            "{waiting:,} complete, {leased:,} leased, {returned:,} returned, {incomplete:,} "
            "incomplete"
        )
        reasons = "".join(f"; {count:,} dropped: {reason}" for reason, count in dropped)
        lines.append(now.format(**summary["prompts"]) + reasons)
        if "priorities" in summary["prompts"]:
            known = (
                "    priorities    sum {sum:.6g} of {prompts:,} prompts, from {smallest:.6g} to "
                "{largest:.6g}, {zero:,} of them 0"
            )
            lines.append(known.format(**summary["prompts"]["priorities"]))
        for epoch, books in summary["prompts"]["epochs"].items():
            now = (
                "    epoch {at:<8}{issued:,} issued: {drawn:,} drawn, {waiting:,} complete, "
                "{leased:,} leased, {returned:,} returned, {incomplete:,} incomplete, {left:,} "
                "dropped"
            )
            lines.append(now.format(at=epoch, left=sum(books["dropped"].values()), **books))
    if "drawable" not in summary:
        return lines
    waiting = (
        f" ({summary['waiting']:,} added since the latest selection)" if summary["waiting"] else ""
    )
    lines.append(f"  drawable      {summary['drawable']:,}{waiting}")
    for one in summary["excluded"]:
        what = f"{one['trajectories']:,} trajectories ({one['steps']:,} steps) {one['reason']}"
        lines.append(f"  excluded      {what}; {one['remedy']}")
    if summary["effective"] is not None:
        tops = summary["share_of_top"].items()
        shares = ", ".join(f"top {float(part):.0%}: {share:.1%}" for part, share in tops)
        lines.append(f"  mass          {shares}; effective items {summary['effective']:.1%}")
    if summary["priorities"] is not None:
        lines.append(
            "  priorities    " + ", ".join(f"{k} {v:.4g}" for k, v in summary["priorities"].items())
        )
    if summary["draws"] is not None:
        drawn = "  drawn         mean {mean:.4g}, max {max:,}, never {never:.1%}"
        lines.append(drawn.format(**summary["draws"]))
    return lines
