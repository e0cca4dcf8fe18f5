"""Ingest the miniatures of public data sets, and compare every value with an independent read.

bash benchmarks/datasets.sh            results/datasets.json and docs/how-to/public-data-sets.md
bash benchmarks/datasets.sh --page     the tables of that page only, from the committed results
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from support.report import Disturbance, Row, document, write_json

from deepspeed_gear import Dataset
from deepspeed_gear.cli.main import main as gear
from deepspeed_gear.data.encoded_images import image_files
from public_data import readers
from public_data.catalogue import SETS, PublicSet
from public_data.make_miniatures import MINIATURES
from public_data.page import RESULT, write
from public_data.readers import Trajectories

COMMAND = "bash benchmarks/datasets.sh"


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def ingested(one: PublicSet, target: Path) -> Dataset:
    """Run the command line of a set in the folder of the miniatures; return what it made."""
    words = shlex.split(one.line(str(target)))[1:]
    with _folder(MINIATURES), contextlib.redirect_stdout(io.StringIO()):
        status = gear([*words, "--quiet"])
    if status != 0:
        raise RuntimeError(f"{one.name}: {one.line('DEST')} must succeed, got {status}")
    return Dataset.open(target)


def _stored(dataset: Dataset, number: int, names: Iterator[str]) -> dict[str, Any]:
    trajectory = dataset.trajectory(number)
    found = {name: trajectory[name] for name in names}
    if "images" in found:
        found["images"] = image_files(found["images"])
    return found


def compare(one: PublicSet, dataset: Dataset, expected: Trajectories) -> int:
    """Return how many columns were compared; AssertionError where a value differs."""
    assert len(dataset) == len(expected), f"{one.name}: {len(dataset)} of {len(expected)}"
    for number, wanted in enumerate(expected):
        stored = _stored(dataset, number, iter(wanted))
        for name, value in wanted.items():
            where = f"{one.name}: {name} of trajectory {number}"
            if isinstance(value, list):
                assert stored[name] == value, where
            else:
                np.testing.assert_array_equal(stored[name], value, where, strict=False)
                assert np.shape(stored[name]) == np.shape(value), where
    return len(expected[0])


def _counts(one: PublicSet, trajectories: Trajectories) -> Row:
    """Return the numbers of the table."""
    measure = next(name for name in ("tokens", "action", "truncated") if name in trajectories[0])
    steps = sum(len(trajectory[measure]) for trajectory in trajectories)
    returns = [
        float(np.sum(part["reward"], dtype=float)) for part in trajectories if "reward" in part
    ]
    mean = round(sum(returns) / len(returns), 4) if returns else None
    row: Row = {"episodes": len(trajectories), "steps": steps, "return": mean}
    for name in ("loss_mask",) if one.is_text else ("terminated", "truncated"):
        flags = [trajectory[name] for trajectory in trajectories if name in trajectory]
        row[name] = int(sum(map(np.sum, flags))) if flags else None
    return row


def _bytes(one: PublicSet) -> int:
    paths = [MINIATURES / source for source in one.sources]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    files = [file for file in files if file.is_file() and file.name != readers.EXPECTED]
    return sum(file.stat().st_size for file in files)


def run(one: PublicSet, target: Path) -> Row:
    """Return the row of a set: the numbers of its data set, which equal those of its files."""
    dataset = ingested(one, target)
    expected = one.read([MINIATURES / source for source in one.sources])
    columns = compare(one, dataset, expected)
    names = expected[0].keys() - {"images"}
    stored = [_stored(dataset, number, iter(names)) for number in range(len(dataset))]
    row = _counts(one, stored)
    assert row == _counts(one, expected), one.name
    assert row["steps"] == dataset.num_steps, one.name
    line = one.line("DEST").replace("../../../", "")
    return {
        "set": one.name,
        "line": line,
        "origin": one.origin,
        "file_bytes": _bytes(one),
        **row,
        "compared_columns": columns,
    }


def main() -> None:
    """Run all sets; print and write their numbers."""
    if sys.argv[1:] != ["--page"]:
        disturbance = Disturbance()
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for number, one in enumerate(SETS):
                rows.append(run(one, Path(folder) / str(number)))
                shown = ("set", "episodes", "steps", "return")
                print("  ".join(str(rows[-1][name]) for name in shown), flush=True)
        write_json(RESULT, document(disturbance, rows, command=COMMAND))
    write()


if __name__ == "__main__":
    main()
