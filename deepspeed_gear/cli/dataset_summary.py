"""What `gear inspect` shows of a data set: sizes, splits, returns, columns and their statistics."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.cli import grid_of
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.splits import split_of
from deepspeed_gear.data.statistics.dataset_statistics import ColumnStatistics
from deepspeed_gear.data.stored_values import as_numbers
from deepspeed_gear.errors import show_bytes

LEVELS = (0.1, 0.5, 0.9)  # quantiles of values of trajectories


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
