"""The tables of docs/comparison.md, from results/peers.json.

PYTHONPATH=benchmarks python -m speed.table        writes them, the figures and the summary
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support import pages
from peers.environments import PEERS, ROOT

from speed import figures, summary
from speed.rollouts import PARTS

BEGIN = "<!-- the tables of results/peers.json -->\n"
END = "<!-- end of the tables -->\n"
NAMES = {
    "gear": "deepspeed_gear",
    "limit": "C loop",
    "numpy_ring": "NumPy arrays",
    **{peer.module: peer.name for peer in PEERS},
    "fio": "fio",
}
FIRST = "uniform transitions, B = 256"
FEWER = ("reverb", "tianshou")  # they hold fewer items
Row = dict[str, Any]


def _cell(row: Row | None, text: str) -> str:
    return "-" if row is None or "left out" in row else text.format(**row)


def _matrix(rows: list[Row], systems: list[str], key: str, text: str) -> Iterator[str]:
    """Yield a table with a row for each kind of work that has times under a key, a column for each
    system.
    """
    kinds = list(dict.fromkeys(row["work"] for row in rows if key in row))
    found = {(row["work"], row["system"]): row for row in rows if key in row}
    body = [[kind, *(_cell(found.get((kind, one)), text) for one in systems)] for kind in kinds]
    used = [any(row[1 + at] != "-" for row in body) for at in range(len(systems))]
    head = ["", *(NAMES[one] for one, is_used in zip(systems, used, strict=True) if is_used)]
    yield from pages.table(
        head, [[row[0], *(c for c, u in zip(row[1:], used, strict=True) if u)] for row in body]
    )


def _rollouts(rows: list[Row], systems: list[str]) -> Iterator[str]:
    if any("parts_ms" in row for row in rows):
        yield (
            "\nMilliseconds to add, select, pack, fill, and pack again with what was filled; "
            "tokens/s.\n\n"
        )
        parts = ", ".join(f"{{parts_ms[{part}]:,.0f}}" for part in PARTS)
        yield from _matrix(rows, systems, "parts_ms", parts + "; {tokens_s:,}")


def _notes(rows: list[Row]) -> Iterator[str]:
    """Yield a line on returns at the ends of trajectories."""
    wrong = [
        f"{NAMES[row['system']]} {row['wrong_ends']:.0%}" for row in rows if row.get("wrong_ends")
    ]
    if wrong:
        yield (
            f"\nWrong n-step returns among those that an end of a trajectory cuts: "
            f"{', '.join(wrong)}.\n"
        )


def _trainers(rows: list[Row]) -> Iterator[str]:
    """Yield the table of trainers on one buffer: a row for each way of sharing."""
    found = [row for row in rows if "trainers" in row]
    if not found:
        return
    yield "\nTrainers on one buffer, both cores: batches a second of all trainers together.\n\n"
    cases = list(dict.fromkeys((row["trainers"], row["batch"]) for row in found))
    head = [f"{trainers} trainers, B = {batch:,}" for trainers, batch in cases]
    body = []
    for system, way in dict.fromkeys((row["system"], row["way"]) for row in found):
        own = {(row["trainers"], row["batch"]): row for row in found if row["way"] == way}
        checked = [row for row in own.values() if "deviation" in row]
        right = "yes" if all(row["exact"] for row in checked) else "**no**"
        most, least = (
            f([row[key] for row in checked]) for f, key in ((max, "deviation"), (min, "seen"))
        )
        rates = [_cell(own.get(case), "{batches_s:,.0f}") for case in cases]
        shown = [f"{right} ({most:+.1f})", f"{least:.0%}"] if checked else ["-", "-"]
        body.append([f"{NAMES[system]}: {way}", *rates, *shown])
    yield from pages.table(["", *head, "exact (deviations)", "updates seen"], body)


def _on_disk(rows: list[Row], systems: list[str]) -> Iterator[str]:
    if any("write_s" in row for row in rows):
        yield (
            "\nSeconds to write trajectories in the system's own format, and the bytes of "
            "the "
            "files.\n\n"
        )
        yield from _matrix(rows, systems, "write_s", "{write_s:.1f}, {bytes:,}")
    larger = [row for row in rows if "read_mb" in row]
    if larger:
        ahead = larger[0]["read_ahead"]
        yield (
            "\nData larger than memory: batches a second, and MB that one batch had read from disk "
        )
        yield f"(the device reads {ahead} ahead).\n\n"
        yield from _matrix(larger, systems, "batches_s", "{batches_s:,.3g}, {read_mb:,.1f}")
    for row in (row for row in rows if row["system"] == "fio" and "pages_s" in row):
        shares = [
            f"{NAMES[one['system']]} {one['pages_s']:,} ({one['of_fio']:.2f})"
            for one in larger
            if "of_fio" in one and one["system"] in ("gear", "limit")
        ]
        yield (
            "\nPages of 4 KiB a second from this disk: fio with {queue_depth} requests at a time "
            "({engine}) {pages_s:,}, ".format(**row)
        )
        yield f"{', '.join(shares)}; in brackets the share of fio's.\n"


def tables(content: Row) -> str:
    """Return the tables of a result file."""
    rows = content["rows"]
    machine = content["machine"]
    # Only the first content of a process: later ones are put where earlier ones were.
    filled = [r for r in rows if r["work"] == FIRST and r["system"] not in FEWER]
    systems = [one for one in NAMES if one in content["systems"]]
    versions = ", ".join(
        f"{NAMES[one]} {content['systems'][one]}" for one in systems if one not in ("gear", "limit")
    )
    timed = [r for r in rows if not {"parts_ms", "batches_s"} & r.keys()]
    count = content.get("items", 1_000_000)

    def section(heading: str, rows: list[Row], key: str, text: str) -> Iterator[str]:
        if any(key in row for row in rows):
            yield f"{heading}\n\n"
            yield from _matrix(rows, systems, key, text)

    texts = [
        *section(
            "Microseconds of one batch, or of one step that is added: median of the turns.",
            timed,
            "us",
            "{us:,.0f}",
        ),
        *_notes(rows),
        *_trainers(rows),
        *section(
            f"\nMemory that a process uses after {count:,} transitions of 105 bytes were added: "
            "additional bytes per transition.",
            filled,
            "bytes_per_transition",
            "{bytes_per_transition:.0f}",
        ),
        *section(
            "\nSeconds from the start of a process until its first batch of 100,000 transitions.",
            rows,
            "s",
            "{s:.1f}",
        ),
        *_rollouts(rows, systems),
        *_on_disk(rows, systems),
        *section(
            "\nSeconds to save and to restore, and the bytes that were written.",
            rows,
            "save_s",
            "{save_s:.2f}, {load_s:.2f}, {bytes:,}",
        ),
        *section(
            "\nThe share of equal items that was never drawn in as many draws; 0.3679 is right.",
            rows,
            "never",
            "{never:.4f}",
        ),
    ]
    out = [
        f"- {NAMES[row['system']]}, {row['work']}: {row['left out']}\n"
        for row in rows
        if row.get("left out", "not offered") != "not offered"
    ]
    measured = (
        f"\nMachine: {machine['cpu']}, {machine['cores']} cores, one of them used; commit "
        f"{content['commit'][:12]}; `bash benchmarks/peers.sh`. Versions: {versions}.\n"
    )
    return "".join([*texts, *(["\nLeft out:\n\n", *out] if out else []), measured])


def write(result: Path) -> None:
    """Write the tables and figures of a result file into the page, and its summary."""
    content = json.loads(result.read_text())
    for name, svg in figures.figures(content["rows"], NAMES):
        (ROOT / "docs" / "figures" / name).write_text(svg)
    summary.write()
    pages.replace("docs/comparison.md", BEGIN, END, tables(content))


if __name__ == "__main__":
    write(ROOT / "benchmarks" / "results" / "peers.json")
