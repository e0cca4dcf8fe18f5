"""Numbers that stand for texts, such as tasks, over all sources of an ingest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.ingest.column_options import OutputColumns
from deepspeed_gear.data.ingest.group_scope import DistinctNumbers, check_free
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column

TEXTS = "texts"  # in the source of a data set: the numbers of texts, by column


class TextNumbers:
    """Columns of numbers that stand for texts, such as LeRobot's `task_index`, over all sources.

    Equal texts get equal numbers. The first source keeps its numbers. The numbers are recorded in
    the data set's `source` (`TEXTS`), because appending needs them.
    """

    def __init__(self, outputs: Sequence[OutputColumns], known: Dataset | None) -> None:
        #: Number of each text, by column of the data set.
        self.texts: dict[str, dict[str, int]] = {}
        # The new number of each one, by column of each output.
        self._changed: dict[int, list[tuple[Column, dict[int, int]]]] = {}
        recorded: Mapping[str, Any] = {} if known is None else known.source.get(TEXTS, {})
        numbers: dict[str, DistinctNumbers] = {}
        for output in outputs:
            columns = {column.name: column for column in output.columns}
            of_output = self._changed[id(output)] = []
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
                changed = dict[int, int]()
                of_output.append((columns[column], changed))
                for number, text in sorted(texts.items()):
                    if text not in of_column:
                        of_column[text] = taken.take(number)
                    changed[number] = of_column[text]

    def has(self, output: OutputColumns) -> bool:
        """Return whether a source has such a column."""
        return bool(self._changed[id(output)])

    def set_in(self, output: OutputColumns, name: str, arrays: dict[str, Any]) -> None:
        """Replace the numbers in a trajectory's columns by those of the data set.

        Args:
            output: Its source.
            name: Its name, for errors.
            arrays: Its columns, of which those numbers are changed.
        Raises:
            DataError: A column cannot hold the free number of a text.
        """
        for column, changed in self._changed[id(output)]:
            if column.name in arrays:
                given, places = np.unique(arrays[column.name], return_inverse=True)
                for number in given.tolist():
                    check_free(name, column, "text", changed[number], number)
                new = np.array([changed[number] for number in given.tolist()], dtype=np.int64)
                arrays[column.name] = new[places].reshape(np.shape(arrays[column.name]))
