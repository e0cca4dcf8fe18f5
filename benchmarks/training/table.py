"""The tables of docs/comparison-nodes.md, from results/nodes.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import pages
from speed.table import NAMES

BEGIN = "<!-- the tables of results/nodes.json -->\n"
END = "<!-- end of the tables -->\n"
Row = dict[str, Any]


def _way(row: Row) -> str:
    return (
        f"{NAMES[row['system']]}: {row['mode']}"
        if row["fresh"]
        else "the model alone, on one batch"
    )


def _best(rows: list[Row], system: str, **key: Any) -> float:
    """Return the highest rate of a system's ways."""
    fits = [row for row in rows if {"system": system, "fresh": True, **key}.items() <= row.items()]
    return float(max(row["mb_per_s"] for row in fits))


def _training(rows: list[Row], point: str, text: str) -> Iterator[str]:
    """Yield a table of a point: a row for each way, a column for each number of nodes."""
    rows = [row for row in rows if row["point"] == point]
    numbers = sorted({row["nodes"] for row in rows})
    cells: dict[str, dict[int, str]] = {}
    for row in sorted(rows, key=lambda row: (not row["fresh"], row["system"])):
        ratio = row["mb_per_s"] / _best(rows, "reverb", nodes=row["nodes"])
        cells.setdefault(_way(row), {})[row["nodes"]] = text.format(**row, ratio=ratio)
    body = ([way, *(found.get(number, "-") for number in numbers)] for way, found in cells.items())
    yield from pages.table(["nodes", *map(str, numbers)], body)


def tables(content: Row) -> str:
    """Return the tables of a result file."""
    rows = content["rows"]
    machine = content["machine"]
    goals = []
    cells = []
    text = "{mb_per_s:,.0f} MB/s between two of {nodes} nodes"
    network = " and ".join(text.format(**row) for row in rows if row["point"] == "network")
    for row in rows:
        if {"system": "gear", "point": "data", "fresh": True}.items() <= row.items():
            ratio = row["mb_per_s"] / _best(rows, "reverb", point="data", nodes=row["nodes"])
            what = f"training, nodes: {row['nodes']}, {row['mode']}"
            goals.append((what, ratio, 3 if row["nodes"] == 1 else 6))
    for batch in sorted({row["B"] for row in rows if row["point"] == "collection"}):
        key = {"point": "collection", "B": batch}
        limit = next(
            row["mb_per_s"] for row in rows if {"system": "limit", **key}.items() <= row.items()
        )
        own, reverb = (_best(rows, system, **key) for system in ("gear", "reverb"))
        values = (
            f"{batch:,} {limit:,.0f} {own:,.0f} {reverb:,.0f} {own / limit:.2f} {own / reverb:.1f}"
        )
        cells.append(values.split())
        goals.append((f"collection, B = {batch:,}", own / reverb, 3))
    judged = (
        [what, f"{least} x", f"{x:.1f} x", "no" if x < least else "yes"] for what, x, least in goals
    )
    first = next(row for row in rows if row.get("system") == "reverb")
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores for all nodes; Reverb {first['version']}; ",
        f"commit {content['commit'][:12]}; {content['command']}. ",
        f"B = {first['B']:,} trajectories a rank.\n",
        f"A node sends at most {content['rate']}; gloo alone reaches {network}.\n",
        "\n**Data are the limit**: MB of trajectories that all ranks train in a second with a ",
        "small model, ",
        "and how many times the best way of Reverb on as many nodes.\n\n",
        *_training(rows, "data", "{mb_per_s:,.0f} ({ratio:.1f} x)"),
        "\nCPU seconds of all ranks and servers for a GB of it; ",
        "trajectories of other nodes' parts.\n\n",
        *_training(rows, "data", "{cpu_s_per_gb:.2f}; {others:.0%}"),
        "\n**Compute is the limit**: as the first table, with a larger model.\n\n",
        *_training(rows, "compute", "{mb_per_s:,.1f} ({ratio:.2f} x)"),
        "\nMB of batches of B trajectories that one node collects in a second, ",
        "without a model.\n\n",
        *pages.table(
            ["B", "`memcpy`", "deepspeed_gear", "Reverb", "of `memcpy`", "times Reverb"], cells
        ),
        "\nWhat was asked for where data are the limit, in times the best way of Reverb.\n\n",
        *pages.table(["", "asked", "measured", "holds"], judged),
    ]
    return "".join(parts)


def write(result: Path) -> None:
    """Write the tables of a result file into the page."""
    text = tables(json.loads(result.read_text()))
    pages.replace("docs/comparison-nodes.md", BEGIN, END, text)
