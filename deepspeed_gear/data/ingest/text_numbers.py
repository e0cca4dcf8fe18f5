"""Numbers that stand for texts, such as tasks, over all sources of an ingest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.ingest.column_options import OutputColumns
from deepspeed_gear.data.ingest.group_scope import DistinctNumbers
from deepspeed_gear.errors import DataError

TEXTS = "texts"  # in the source of a data set: the numbers of texts, by column


class TextNumbers:
    """Columns of numbers that stand for texts, such as LeRobot's `task_index`, over all sources.

    Equal texts get equal numbers. The first source keeps its numbers. The numbers are recorded in
    the data set's `source` (`TEXTS`), because appending needs them.
    """

    def __init__(self, outputs: Sequence[OutputColumns], known: Dataset | None) -> None:
        #: Number of each text, by column of the data set.
        self.texts: dict[str, dict[str, int]] = {}
        self._changed: dict[tuple[int, str], dict[int, int]] = {}  # by output and column
        recorded: Mapping[str, Any] = {} if known is None else known.source.get(TEXTS, {})
        numbers: dict[str, DistinctNumbers] = {}
        for output in outputs:
            for key, texts in output.reader.texts.items():
                column = output.names.get(key, key)
                if known is not None and column in known.schema and column not in recorded:
                    raise DataError(
                        f"{known.path}: column {column}",
                        "must have recorded the texts of its numbers to be appended to",
                        None,
                        "ingest all sources again into one data set",
                    )
                of_column = self.texts.setdefault(column, dict(recorded.get(column, {})))
                taken = numbers.setdefault(column, DistinctNumbers(of_column.values()))
                changed = self._changed[id(output), column] = {}
                for number, text in sorted(texts.items()):
                    if text not in of_column:
                        of_column[text] = taken.take(number)
                    changed[number] = of_column[text]

    def set_in(self, output: OutputColumns, arrays: dict[str, Any]) -> None:
        """Replace the numbers in a trajectory's columns by those of the data set."""
        for (owner, column), changed in self._changed.items():
            if owner == id(output) and column in arrays:
                given, places = np.unique(arrays[column], return_inverse=True)
                new = np.array([changed[int(number)] for number in given], dtype=np.int64)
                arrays[column] = new[places].reshape(np.shape(arrays[column]))
