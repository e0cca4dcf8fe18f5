"""`gear inspect` of a checkpoint's gear folder, and `gear inspect --living` of running processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_gear.checkpoint import position, save_folders
from deepspeed_gear.cli.inspect_distribution import Distribution, num_replicas, of_living, of_saved
from deepspeed_gear.cli.value_distribution import LEVELS
from deepspeed_gear.errors import CheckpointError, StoreError, show_bytes
from deepspeed_gear.store.live_stores import living_stores


def inspect_living(process: int | None, as_json: bool, plot: str | None) -> None:
    """Show the stores of running processes.

    Raises:
        StoreError: There is no such process, or nothing to draw.
    """
    found = [(store, of_living(store)) for store in living_stores(process)]
    known = [(store, None if one is None else one.summary()) for store, one in found]
    if as_json:
        entries = [
            {
                "processes": list(store.processes),
                "table": store.table,
                "run": {"id": store.run.id, "name": store.run.name or None},
                "bytes": store.layout.total_bytes,
                "distribution": summary,
            }
            for store, summary in known
        ]
        print(json.dumps({"stores": entries}, indent=1))
    elif not known:
        print("no process of this user holds a store")
    for store, summary in [] if as_json else known:
        held = ", ".join(map(str, store.processes))
        print(f"table {store.table} of process {held}: {show_bytes(store.layout.total_bytes)}")
        print(f"  run           {store.run}")
        print("\n".join(_lines(summary)))
    drawn = [one for _, one in found if one is not None]
    if plot and not drawn:
        who = "a process" if process is None else f"process {process}"
        raise StoreError(who, "must hold a store that is sampled to be plotted", None)
    _plot(drawn, plot)


def inspect_saved(folder: Path | None, tables: Sequence[Path], as_json: bool, plot: str | None) -> None:
    """Show the position and the tables of a checkpoint.

    Args:
        folder: Of the position; None: there is none.
        tables: Folders of the tables.
        as_json: Print JSON.
        plot: Where to write a figure of the tables; None: nowhere.
    Raises:
        CheckpointError: A file is missing or changed, or there is no table to plot.
    """
    known = None if folder is None else position.describe(save_folders.read_position(folder))
    replicas = {table: num_replicas(table) for table in tables}
    found = {table: of_saved(table) for table in tables if replicas[table] is None}
    if plot and not found:
        rule, remedy = "must hold a table of a store to be plotted", "leave --plot out"
        raise CheckpointError(str(folder or tables[0]), rule, None, remedy)
    if as_json:
        of_devices = [{"table": save_folders.table_in(t), "replicas": n} for t, n in replicas.items() if n]
        summaries = [one.summary() for one in found.values()]
        print(json.dumps({"position": known, "tables": [*summaries, *of_devices]}, indent=1))
    else:
        if known is not None:
            print(
                f"position in {folder}"
                + ("" if tables else ", without tables: data sets hold their contents")
            )
            print("\n".join(_position_lines(known)))
        for table in tables:
            print(f"table {save_folders.table_in(table)} in {table}")
            if table in found:
                print("\n".join(_lines(found[table].summary())))
            else:
                print(f"  replicas      {replicas[table]}, each with a table in its device's memory")
    _plot(list(found.values()), plot)


def _position_lines(known: dict[str, Any]) -> list[str]:
    lines = []
    for table, words in known["train"].items():
        text = f"{words['global_batches']:,} global batches, {words['samples']:,} samples of table {table}"
        if "epoch" in words:
            text += f"; epoch {words['epoch']}: {words['epoch_samples']:,} of {words['epoch_items']:,} items"
        lines.append(f"  used          {text}")
    lines += [f"  passes        {count:,} over {split}" for split, count in known["passes"].items()]
    return [*lines, *(f"  data set      {table}: {mark}" for table, mark in known["data"].items())]


def _plot(found: Sequence[Distribution], path: str | None) -> None:
    if path:
        from deepspeed_gear.cli.plot_distribution import plot_distributions

        plot_distributions(found, Path(path))


def _lines(summary: dict[str, Any] | None) -> list[str]:
    """Return the lines printed of a table."""
    if summary is None:
        return ["  not sampled"]
    what = f"{summary['kind']}, unit {summary['unit']}" if summary["kind"] else "not known"
    lines = [f"  sampler       {what}", f"  trajectories  {summary['trajectories']:,}"]
    if summary["steps"] is not None:
        lines.append(f"  steps         {summary['steps']:,}")
    if summary["length"] is not None and summary["trajectories"]:
        length = summary["length"]
        levels = ", ".join(f"{level:.0%} {length[str(level)]:,.0f}" for level in LEVELS)
        ends = f"min {length['min']:,.0f}, {levels}, max {length['max']:,.0f}"
        lines.append(f"  lengths       {ends}, mean {length['mean']:,.1f}")
    if summary["groups"] is not None:
        groups = {name: "not known" if n is None else f"{n:,}" for name, n in summary["groups"].items()}
        lines.append("  groups        {complete} complete, {incomplete} incomplete".format(**groups))
        ever = "{rejected} groups rejected, {oversized} too large, {evicted_unsampled} evicted unsampled"
        lines.append("  left out      " + ever.format(**groups))
        ever = "{late} late, {late_consumed} of groups that had left, {unfilled} unfilled, {surplus} surplus"
        lines.append("  trajectories  " + ever.format(**groups))
    waiting = f" ({summary['waiting']:,} added since the latest selection)" if summary["waiting"] else ""
    lines.append(f"  drawable      {summary['drawable']:,}{waiting}")
    for one in summary["excluded"] or []:
        what = f"{one['trajectories']:,} trajectories ({one['steps']:,} steps) {one['reason']}"
        lines.append(f"  excluded      {what}; {one['remedy']}")
    if summary["effective"] is not None:
        shares = ", ".join(
            f"top {float(part):.0%}: {share:.1%}" for part, share in summary["share_of_top"].items()
        )
        lines.append(f"  mass          {shares}; effective items {summary['effective']:.1%}")
    if summary["priorities"] is not None:
        lines.append("  priorities    " + ", ".join(f"{k} {v:.4g}" for k, v in summary["priorities"].items()))
    if summary["draws"] is not None:
        draws = summary["draws"]
        lines.append(
            f"  drawn         mean {draws['mean']:.4g}, max {draws['max']:,}, never {draws['never']:.1%}"
        )
    return lines
