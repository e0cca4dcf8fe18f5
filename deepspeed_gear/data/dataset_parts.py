"""Parts of a data set, for nodes whose disks do not hold all of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import DatasetPart
from deepspeed_gear.data.dataset_writer import DatasetWriter, check_copied
from deepspeed_gear.data.partial_folder import (
    PartialFolder,
    check_destination,
    is_dataset,
    writing,
)
from deepspeed_gear.errors import DataError
from deepspeed_gear.file_system import sync


def write_parts(
    dataset: Dataset, folder: str | Path, bounds: NDArray[np.int64], overwrite: bool = False
) -> list[Dataset]:
    """Write a data set as parts FOLDER/part-0, FOLDER/part-1, ...

    FOLDER appears when all parts are complete and all bytes that were read match the digests of the
    data set; after a failure everything is as before.

    Args:
        bounds: First trajectory of each part, then the number of all. [parts + 1], int64, strictly
            increasing.
        overwrite: Replace a FOLDER that holds parts, and nothing else.
    Cost: all bytes read and written once, a few MiB at a time.
    """
    folder = Path(os.path.abspath(folder))
    if dataset.part is not None:
        raise DataError(
            str(dataset.path), "must be a whole data set", str(dataset.part), "split the whole"
        )
    are_ends = len(bounds) > 1 and bounds[0] == 0 and bounds[-1] == len(dataset)
    if not are_ends or (np.diff(bounds) < 1).any():
        raise DataError(
            str(dataset.path),
            f"must divide its {len(dataset)} trajectories into parts of at least one",
            np.asarray(bounds).tolist(),
            "ask for fewer parts",
        )
    instead = "or overwrite it (--overwrite)"
    check_destination(folder, overwrite, _holds_parts, "must hold parts only", instead)
    digests = {column.name: hashlib.sha256() for column in dataset.schema}
    of_whole: dict[str, Any] = {
        "trajectories": len(dataset),
        "rows": dataset.num_rows,
        "steps": dataset.num_steps,
        "longest": dataset.longest,
        "whole": dataset.fingerprint,
    }
    partial = PartialFolder(folder)
    with contextlib.ExitStack() as stack, writing(folder):
        stack.callback(partial.discard)
        partial.made.mkdir()
        for index, (first, end) in enumerate(pairwise(np.asarray(bounds).tolist())):
            part = DatasetPart(index=index, count=len(bounds) - 1, first=first, end=end, **of_whole)
            with DatasetWriter(
                partial.made / f"part-{index}",
                dataset.schema,
                split=dataset.split,
                source=dataset.source,
            ) as writer:
                writer.copy_part(dataset, part, digests)
        check_copied(dataset, digests)
        sync(partial.made)
        partial.publish()
    return [Dataset.open(folder / f"part-{index}") for index in range(len(bounds) - 1)]


def _holds_parts(folder: Path) -> bool:
    entries = [*folder.iterdir()] if folder.is_dir() else [folder]
    is_part = re.compile(r"part-\d+").fullmatch
    return all(is_part(one.name) and is_dataset(one) and not one.is_symlink() for one in entries)
