"""`gear inspect` of a checkpoint's gear folder, and `gear inspect --living` of running processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_gear.cli.inspect_distribution import Distribution, of_living, of_saved
from deepspeed_gear.errors import StoreError
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
        print(f"table {store.table} of process {held}: {store.layout.total_bytes:,} bytes")
        print(f"  run           {store.run}")
        print("\n".join(_lines(summary)))
    drawn = [one for _, one in found if one is not None]
    if plot and not drawn:
        who = "a process" if process is None else f"process {process}"
        raise StoreError(who, "must hold a store that is sampled to be plotted", None)
    _plot(drawn, plot)


def inspect_saved(folders: Sequence[Path], as_json: bool, plot: str | None) -> None:
    """Show the tables of a checkpoint.

    Raises:
        CheckpointError: A file is missing or changed.
    """
    found = [of_saved(folder) for folder in folders]
    summaries = [one.summary() for one in found]
    if as_json:
        print(json.dumps({"tables": summaries}, indent=1))
    for folder, summary in [] if as_json else zip(folders, summaries, strict=True):
        print(f"table {summary['table']} in {folder}")
        print("\n".join(_lines(summary)))
    _plot(found, plot)


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
    lines.append(f"  drawable      {summary['drawable']:,}")
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
