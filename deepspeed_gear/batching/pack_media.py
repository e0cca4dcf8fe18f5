"""Media of a pack, read on demand from the stores of this node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.errors import StoreError
from deepspeed_gear.store.native_rows import as_tensor
from deepspeed_gear.store.table import Table


@dataclass(frozen=True)
class PackMedia:
    """The media that the places of a pack name, each item once.

    Attributes:
        columns: Rows of each media column, item after item. [rows, *shape], on the device.
        counts: Rows of each item, by column. [items], int64, in host memory.
        place: The places of this rank that name an item, ascending. [names], int64, on the device.
        item: The item that each of them names. [names], int64, in host memory.
    """

    columns: dict[str, torch.Tensor]
    counts: dict[str, torch.Tensor]
    place: torch.Tensor
    item: torch.Tensor

    def per_place(self) -> dict[str, torch.Tensor]:
        """Return the rows of items place after place. [rows, *shape].

        An item that two places name is there twice, as in the output of transformers' processors.
        """
        per_place = {}
        for name, rows in self.columns.items():
            parts = torch.split(rows, self.counts[name].tolist())
            per_place[name] = torch.cat([rows[:0], *(parts[item] for item in self.item.tolist())])
        return per_place


@dataclass(frozen=True)
class MediaReader:
    """Reads the media of a pack, while the rows of its rollout batch are there."""

    tables: Sequence[Table]
    numbers: np.ndarray  # item that each of this rank's places names; 0: none. [places], int64
    device: torch.device

    def read(self) -> PackMedia:
        """Read each item once.

        Raises:
            StoreError: The rollout batch has ended, and an item has left the stores.
        """
        place = np.flatnonzero(self.numbers)
        every, item = np.unique(self.numbers[place], return_inverse=True)
        spec = next(table.media.spec for table in self.tables if table.media is not None)
        rows: dict[int, dict[str, np.ndarray]] = {}
        for table in self.tables:
            if table.media is None:
                continue
            missing = every[~np.isin(every, list(rows))]
            for number, content in table.media.contents(missing, table.lock).items():
                rows[number] = spec.rows(content)
        if len(rows) < len(every):
            rule = "must be read while its rollout batch is trained"
            remedy = "read micro.media in the loop"
            raise StoreError("micro.media", rule, None, remedy)
        columns: dict[str, torch.Tensor] = {}
        counts: dict[str, torch.Tensor] = {}
        for column in spec.columns:
            parts = [rows[number][column.name] for number in every.tolist()]
            counts[column.name] = torch.tensor([len(part) for part in parts], dtype=torch.int64)
            whole = np.concatenate([np.empty((0, *column.shape), column.numpy_dtype), *parts])
            columns[column.name] = as_tensor(whole, column.dtype).to(self.device, non_blocking=True)
        at = torch.from_numpy(place).to(self.device)
        return PackMedia(columns, counts, at, torch.from_numpy(item.reshape(-1)))
