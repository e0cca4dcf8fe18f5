"""The first table of docs/comparison.md, from results/peers.json."""

from __future__ import annotations

import json
from typing import Any

from support import pages
from peers.environments import PEERS, ROOT

from speed.figures import SHOWN

BEGIN = "<!-- the table of benchmarks/results -->\n"
END = "<!-- end of the table -->\n"
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def table(peers: Row) -> str:
    """Return the table: times of this project, the C loop, and the fastest two of the others."""
    rows = peers["rows"]
    cpu = peers["machine"]["cpu"]
    count = len(peers["systems"].keys() - {"gear", "limit", "numpy_ring"})
    names = {peer.module: peer.name for peer in PEERS} | {"numpy_ring": "NumPy arrays"}
    text = (
        f"Microseconds of a batch, or of a step that is added, on one core ({cpu}). This project "
        f'("gear"), a C loop, NumPy arrays and {count} other systems take turns at the same work, '
        "each at the kinds of work that it supports.\n\n"
    )
    text += "| us | gear | C loop | fastest of the others | next |\n"
    text += "|---|---|---|---|---|\n"
    for kind in SHOWN:
        us = {row["system"]: row["us"] for row in rows if row["work"] == kind and "us" in row}
        others = sorted((us[one], names[one]) for one in names if one in us)
        cells = [f"{us[one]:,.0f}" if one in us else "-" for one in ("gear", "limit")]
        cells += [f"{name} {time:,.0f}" for time, name in others[:2]]
        if "gear" in us:
            text += "| " + " | ".join([kind, *cells, *["-"] * (4 - len(cells))]) + " |\n"
    return text


def committed() -> str:
    """Return the table of the results that lie in the checkout."""
    return table(json.loads((RESULTS / "peers.json").read_text()))


def write() -> None:
    """Write the table into the page."""
    pages.replace("docs/comparison.md", BEGIN, END, committed())
