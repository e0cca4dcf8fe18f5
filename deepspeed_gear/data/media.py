"""Media such as images: their rows are stored once, and steps name them by their content.

The values of a trajectory in a ragged column are an item like them, which the column's row names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepspeed_gear.data.media_digests import (
    WORD_BYTES,
    MediaItem,
    encoded_item,
    item_of_content,
    padded_bytes,
)
from deepspeed_gear.data.ragged import (
    Ragged,
    check_item,
    count_column,
    encode_ragged,
    item_columns,
)
from deepspeed_gear.data.stored_values import as_stored, check_finite
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Schema

# Key of the items that a remote writer sends beside the columns, whose names begin with no dot.
SENT = ".media"


class Media:
    """An item that a trajectory names at one step, such as an image: rows of media columns.

    `{"image": {17: Media(pixel_values=patches, image_grid_thw=[[1, 14, 14]])}}` takes the place of
    a column of the role media: the token at step 17 stands for the image. A store keeps equal
    content once. An object may be used in many trajectories; it is encoded once, so its arrays must
    not change after that.

    Args:
        **columns: Column -> [rows, *shape], any number of rows; columns that are left out have no
            rows.
    """

    def __init__(self, **columns: Any) -> None:
        self.columns = columns
        self._encoded: dict[tuple[Column, ...], MediaItem] = {}

    def __repr__(self) -> str:
        shapes = (f"{name}: {list(np.shape(rows))}" for name, rows in self.columns.items())
        return f"Media({', '.join(shapes)})"

    def __eq__(self, other: object) -> bool:
        """Return whether both have equal columns, rows and values."""
        if not isinstance(other, Media) or self.columns.keys() != other.columns.keys():
            return False
        return all(
            torch.equal(_numbers(rows), _numbers(other.columns[name]))
            for name, rows in self.columns.items()
        )

    def item(self, name: str, columns: tuple[Column, ...]) -> MediaItem:
        """Encode the content for a table's media columns; DataError if it does not fit them."""
        if columns not in self._encoded:
            known = {column.name: column for column in columns}
            for odd in sorted(self.columns.keys() - known.keys()):
                raise DataError(
                    f"{name}: {odd}",
                    f"must be one of the media columns {', '.join(known)}",
                    remedy="name a column of gear.tables.<name>.media",
                )
            rows = {one: as_stored(value, known[one], name) for one, value in self.columns.items()}
            check_finite(name, columns, rows, "row {}".format)
            if not any(map(len, rows.values())):
                raise DataError(
                    name,
                    "must have at least one row",
                    remedy="leave the item out where a step has no media",
                )
            self._encoded[columns] = encoded_item([rows.get(column.name, ()) for column in columns])
        return self._encoded[columns]


@dataclass(frozen=True)
class MediaSpec:
    """The media and ragged values of a table: their columns, and the memory for them in a store."""

    # The column of the role media: at each step the number of an item, or 0. None: there is none.
    column: str | None
    columns: tuple[Column, ...]  # of items: those of media, then counts and values of ragged ones
    num_pages: int = 0
    page_bytes: int = 0
    ragged: tuple[Column, ...] = ()  # columns whose rows, one per trajectory, have item numbers

    @classmethod
    def of_json(cls, schema: Schema, columns: Mapping[str, Any] | None) -> MediaSpec | None:
        """Return the media of a table on another machine, without memory; None if it has none."""
        column = schema.role("media")
        if not schema.has_items or columns is None:
            return None
        known = Schema.from_json(columns).columns
        return cls(None if column is None else column.name, known, ragged=schema.ragged_columns)

    @property
    def media_columns(self) -> tuple[Column, ...]:
        """The columns of media items."""
        return self.columns[: len(self.columns) - len(item_columns(self.ragged))]

    @property
    def capacity(self) -> str:
        """The option for the memory of items, for errors."""
        return "ragged.capacity_bytes" if self.column is None else "media.capacity_bytes"

    @property
    def names(self) -> tuple[str, ...]:
        """Columns of the table whose rows have item numbers."""
        media = () if self.column is None else (self.column,)
        return (*media, *(column.name for column in self.ragged))

    def take(
        self, name: str, schema: Schema, trajectory: Mapping[str, Any], items: dict[int, MediaItem]
    ) -> dict[str, Any]:
        """Return a flat trajectory with item numbers in place of its media and ragged values.

        Args:
            items: The items by number; those of the trajectory are added.
        Raises:
            DataError: A step or item does not fit.
        """
        taken = dict(trajectory)
        if SENT in taken:
            items.update((item.number, item) for item in self.received(name, taken.pop(SENT)))
        # Neither has rows of its own, so any other step column gives the number of steps.
        lengths = (
            len(taken[c.name]) - (c.rows == "T+1")
            for c in schema.step_columns
            if c.name != self.column and hasattr(taken.get(c.name), "__len__")
        )
        steps = max(0, next(lengths, 0))
        for column in self.ragged:
            if column.name in taken:
                at = f"{name}: column {column.name}"
                taken[column.name] = self._take_ragged(at, column, taken[column.name], steps, items)
        return self._take_media(name, taken, steps, items)

    def _take_ragged(
        self, at: str, column: Column, value: Any, steps: int, items: dict[int, MediaItem]
    ) -> int:
        """Return the number of a trajectory's item in a ragged column; add it to the items."""
        is_array = isinstance(value, np.ndarray | torch.Tensor)
        if isinstance(value, int | np.integer) or (is_array and not value.ndim):
            number = np.asarray(value)  # another machine sends its items beside the columns
            item = items.get(int(number)) if number.dtype.kind in "iu" else None
            if item is None:
                remedy = "give Ragged(values, offsets), or a list with the values of each step"
                raise DataError(at, "must have values for each step", None, remedy)
            check_item(self.rows(item.content), column, at, steps)
            return item.number
        item = self.ragged_item(at, column, value, steps)
        items[item.number] = item
        return item.number

    def ragged_item(self, at: str, column: Column, value: Any, steps: int | None) -> MediaItem:
        """Encode the value of a trajectory in a ragged column.

        Args:
            at: Name of the column, for errors.
            column: The column.
            value: As `encode_ragged`.
            steps: Steps of the trajectory; None: not checked.
        Raises:
            DataError: As `encode_ragged`.
        """
        counts, values = encode_ragged(value, column, at, steps)
        parts = {count_column(column).name: counts, column.name: values}
        return encoded_item([parts.get(one.name, ()) for one in self.columns])

    def ragged_value(self, column: Column, content: np.ndarray) -> Ragged:
        """Return the value of a trajectory in a ragged column, from its item."""
        rows = self.rows(content)
        counts = rows[count_column(column).name]
        offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        values = torch.from_numpy(rows[column.name])
        return Ragged(
            values.view(torch.bfloat16) if column.dtype == "bfloat16" else values, offsets
        )

    def _take_media(
        self, name: str, taken: dict[str, Any], steps: int, items: dict[int, MediaItem]
    ) -> dict[str, Any]:
        """Return a flat trajectory with item numbers in place of its media; as `take`."""
        if self.column is None:
            return taken
        given = taken.get(self.column, {})
        at = f"{name}: column {self.column}"
        if not isinstance(given, Mapping):
            if np.asarray(given).dtype.kind not in "iu":
                raise DataError(
                    at,
                    "must be {step: Media}, or numbers of what is stored",
                    type(given).__name__,
                    "give {step: Media(...)}",
                )
            return taken
        numbers = np.zeros(steps, np.int64)
        for step, media in given.items():
            is_step = isinstance(step, (int, np.integer)) and not isinstance(step, bool)
            if not is_step or not 0 <= step < steps:
                raise DataError(
                    at,
                    f"must have steps in [0, {steps}) as keys",
                    step,
                    f"the trajectory has {steps} steps",
                )
            if not isinstance(media, Media):
                raise DataError(
                    f"{at}: step {step}",
                    "must be a Media",
                    type(media).__name__,
                    "wrap the content in Media(column=value)",
                )
            of_ragged = {one.name for one in item_columns(self.ragged)}
            for odd in media.columns.keys() & of_ragged:
                rule = "must be a column of the media, not a ragged one"
                raise DataError(f"{at}: step {step}", rule, odd, "give it beside the media")
            item = media.item(f"{at}: step {step}", self.columns)
            numbers[step] = item.number
            items[item.number] = item
        taken[self.column] = numbers
        return taken

    def send(self, contents: Iterable[np.ndarray]) -> np.ndarray:
        """Encode items as one array: for each its length in bytes, int64, and its content.

        [bytes], uint8.
        """
        parts = [(np.array([len(content)]).view(np.uint8), content) for content in contents]
        return np.concatenate([np.zeros(0, np.uint8), *(part for both in parts for part in both)])

    def received(self, name: str, sent: np.ndarray) -> Iterator[MediaItem]:
        """Yield the items that `send` encoded.

        Their numbers are computed from the content again, since a remote writer is not trusted.
        DataError if a length does not fit.
        """
        at = 0
        words = WORD_BYTES * len(self.columns)  # bytes of the numbers of rows
        while at < len(sent):
            length = (
                int(sent[at : at + WORD_BYTES].view(np.int64)[0])
                if at + WORD_BYTES <= len(sent)
                else -1
            )
            content = sent[at + WORD_BYTES : at + WORD_BYTES + length]
            at += WORD_BYTES + length
            # -1, which the test below refuses, if the content is cut off.
            is_whole = words <= length == len(content)
            counts = content[:words].view(np.int64) if is_whole else np.array([-1])
            sizes = [int(n) * c.row_bytes for n, c in zip(counts, self.columns, strict=False)]
            if (
                counts.min() < 0
                or counts.max() == 0
                or words + sum(map(padded_bytes, sizes)) != length
            ):
                raise DataError(
                    f"{name}: media",
                    "must be the rows of its columns",
                    f"{length} bytes",
                    "send the media again with the schema of this table",
                )
            check_finite(f"{name}: media", self.columns, self.rows(content), "row {}".format)
            yield item_of_content(content)

    def rows(self, content: np.ndarray) -> dict[str, np.ndarray]:
        """Return the rows of each column of an item's content, as views. [rows, *shape]."""
        at = WORD_BYTES * len(self.columns)
        rows = {}
        for column, count in zip(self.columns, content[:at].view(np.int64).tolist(), strict=True):
            size = count * column.row_bytes
            flat = content[at : at + size].view(column.numpy_dtype)
            rows[column.name] = flat.reshape(count, *column.shape)
            at += padded_bytes(size)
        return rows


def _numbers(rows: Any) -> torch.Tensor:
    given = torch.as_tensor(rows)
    return given.double() if given.is_floating_point() else given.long()
