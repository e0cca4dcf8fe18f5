"""Normalizer: converts a model's inputs and outputs as the fields of a batch are converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.gather import N_STEP_DTYPES
from deepspeed_gear.batching.normalisation import shift_and_gain
from deepspeed_gear.checkpoint import checked_files
from deepspeed_gear.config import GearConfig, ResolvedField, gear_config, parse
from deepspeed_gear.config.field_names import N_STEP_NAMES
from deepspeed_gear.config.field_resolution import DERIVED
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.statistics.dataset_statistics import ColumnStatistics, running_statistics
from deepspeed_gear.errors import CheckpointError, ConfigError, DataError, FieldError, ShapeError
from deepspeed_gear.ops.conversion import arithmetic_dtype, widen
from deepspeed_gear.plan.resolved_plan import fields_of, schemas_of, statistics_of
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.schema import DTYPES, Schema

FILE = "normalizer.json"
_FORMAT = 1
_GEAR = "gear"  # folder of an engine's checkpoint, in that of its tag
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class OnlineStatistics:
    """Statistics of the rows ever added, as of the newest selection of a training stream."""

    def __init__(self, stream: BatchStream) -> None:
        self._stream = stream
        # Running moments of a selection, and the statistics that follow from them.
        self._known: tuple[np.ndarray, Mapping[str, ColumnStatistics]] | None = None

    def newest(self) -> Mapping[str, ColumnStatistics]:
        """Return the statistics by column; the same object until they change."""
        table = self._stream.table
        with table.lock:
            moments = self._stream.state.newest_numbers.copy()
        if self._known is None or not np.array_equal(self._known[0], moments):
            self._known = moments, running_statistics(moments, table.spec.normalized_columns)
        return self._known[1]


@dataclass(frozen=True, eq=False)
class FieldConversion:
    """Conversion of a field from its column's units to a batch's, and back.

    A batch holds (x - shift) * gain, with one rounding per operation as in the gather op. Without
    shift and gain only the dtype changes.

    Attributes:
        stored: dtype of the column.
        dtype: dtype in the batch.
        shape: Shape of a row of the column.
        shift: [*shape], or [] for all elements; float64.
        gain: As `shift`; both are given or none.
    """

    stored: torch.dtype
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    shift: torch.Tensor | None = None
    gain: torch.Tensor | None = None

    def to(self, device: torch.device) -> FieldConversion:
        """Return the conversion on a device; itself if it is already there."""
        if self.shift is None or self.gain is None or self.gain.device == device:
            return self
        # A tensor made in inference mode could not be used in training later.
        with torch.inference_mode(False):
            return replace(self, shift=self.shift.to(device), gain=self.gain.to(device))

    def apply(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Convert values in the column's units to the field's."""
        if self.stored.is_floating_point:
            values = _rounded(values, self.stored)  # as the store does
        if self.shift is not None and self.gain is not None:
            return _rounded((widen(values, torch.float64) - self.shift) * self.gain, self.dtype)
        return self._cast(name, values, self.dtype)

    def revert(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Convert values in the field's units to the column's."""
        if self.shift is not None and self.gain is not None:
            values = widen(values, torch.float64) / self.gain + self.shift
        elif not self.dtype.is_floating_point:
            return self._cast(name, values, self.stored)
        is_floating = self.stored.is_floating_point
        return _rounded(
            values, self.stored if is_floating else arithmetic_dtype(self.stored, self.dtype)
        )

    def _cast(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:  # by way of float32, or float64 where float32 would lose bits
            by_way = arithmetic_dtype(self.stored, self.dtype)
            return values if values.dtype == dtype else _rounded(widen(values, by_way), dtype)
        if values.is_floating_point():
            raise DataError(
                name,
                f"must be integers, as the field is {_NAMES[dtype]}",
                str(values.dtype),
                "convert them, or normalize to a floating-point dtype",
            )
        cast = values.to(dtype)
        if values.dtype != dtype and not bool((cast.to(values.dtype) == values).all()):
            raise DataError(
                name,
                f"must hold values that {_NAMES[dtype]} can hold",
                remedy="clip or round them first",
            )
        return cast

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a file; its numbers are exact."""
        parts = {"shift": self.shift, "gain": self.gain}
        numbers = {name: None if part is None else part.tolist() for name, part in parts.items()}
        form = {
            "stored": _NAMES[self.stored],
            "dtype": _NAMES[self.dtype],
            "shape": list(self.shape),
        }
        return {**form, **numbers}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> FieldConversion:
        """Read the entry that `to_json` returned."""
        made = cls(DTYPES[entry["stored"]], DTYPES[entry["dtype"]], tuple(entry["shape"]))
        if entry["gain"] is None:
            return made
        shift = torch.tensor(entry["shift"], dtype=torch.float64)
        gain = torch.tensor(entry["gain"], dtype=torch.float64)
        return replace(made, shift=shift, gain=gain)


Convert = Callable[[FieldConversion, str, torch.Tensor], torch.Tensor]


class Normalizer:
    """Converts values as `gear.fields` defines it: `normalize`, `scale` and `as` of each field.

    `normalize` turns a value in the units of a field's column into the value that a batch holds of
    it, and `denormalize` turns a value in the batch's units, such as an action of the model, back.
    A field without these options keeps its values.

    A Normalizer holds a few numbers for each element of a row. It needs neither store nor data set,
    can be pickled, and may be used by several threads.
    """

    def __init__(self, fields: Mapping[str, FieldConversion]) -> None:
        self.fields = dict(fields)  # by name
        self._placed: dict[tuple[str, torch.device], FieldConversion] = {}

    @classmethod
    def of(
        cls,
        config: GearConfig,
        fields: Sequence[ResolvedField],
        statistics: Mapping[str, ColumnStatistics],
        engine_dtype: torch.dtype,
    ) -> Normalizer:
        """Make the normalizer of the resolved fields of a whole batch."""
        numeric = [field for field in fields if not field.is_opaque]
        made = {field.name: _conversion(field, statistics, engine_dtype) for field in numeric}
        if config.n_step is not None:  # computed from the stored rewards
            made |= {
                n: FieldConversion(d, d) for n, d in zip(N_STEP_NAMES, N_STEP_DTYPES, strict=True)
            }
        return cls(made)

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any] | GearConfig | str | Path,
        dataset: Dataset | str | Path | None = None,
        schemas: Mapping[str, Schema] | None = None,
        *,
        engine_dtype: torch.dtype = torch.float32,
    ) -> Normalizer:
        """Make the normalizer that a Replay of this config has. Not collective.

        Args:
            config: The `gear` section: a mapping, a GearConfig, or the path of a JSON file (a whole
                ds_config or the section alone).
            dataset: Data set, or its folder, that takes the place of the config's; None: the
                config's is opened.
            schemas: Schemas of tables that have a capacity and no schema in the config.
            engine_dtype: The dtype of fields with `"as": "engine"`.
        Raises:
            ConfigError, DataError: The config is wrong, or does not fit the data set.
        Cost: the statistics are read from the data set; those of another split than its own are
            computed in one pass over the data.
        """
        if isinstance(dataset, (str, Path)):
            dataset = Dataset.open(dataset)
        arguments.one_of("dataset", dataset, (Dataset, type(None)), "a Dataset or a path")
        arguments.one_of("engine_dtype", engine_dtype, torch.dtype, "a torch.dtype")
        checked = parse(gear_config.read(config)[0])
        paths = {
            name: t.data.path for name, t in checked.resolved_tables.items() if t.data is not None
        }
        if dataset is not None and len(paths) != 1:
            rule = "must be given where the config names one data set"
            given = f"{len(paths)} in the config"
            raise ConfigError("dataset", rule, given, "correct the paths in the config")
        data = {
            name: Dataset.open(path) if dataset is None else dataset for name, path in paths.items()
        }
        fields = fields_of(checked, schemas_of(checked, data, schemas), data)
        normalised = any(field.normalize for field in fields)
        if normalised and checked.normalizes_online:
            rule = "must not be given: it is normalised with what a run adds"
            remedy = "use Normalizer.load"
            name = next(field.name for field in fields if field.normalize)
            raise ConfigError(
                f"gear.fields.{name}.normalize", rule, None, f"{remedy}, of a checkpoint"
            )
        statistics = statistics_of(checked, data) if normalised else {}
        return cls.of(checked, fields, statistics, engine_dtype)

    def normalize(self, name: str, values: Any) -> Any:
        """Convert values in the units of a field's column to those of the batch.

        The result has the same bits as a batch with this value: values are first rounded to a
        floating column's dtype, as writers do (a float64 tensor, but not an array, to float16 by
        way of float32). Gradients pass through.

        Args:
            name: A field of the batch, such as "observation", "observation.camera" or
                "return_to_go"; with nested values, the first part of several fields' names.
            values: A tensor, array, number or nested list. [..., *shape of the column's row]. Or
                nested, as writers take them: {"camera": x, "joints": (y, z)} is
                "observation.camera", "observation.joints.0" and "observation.joints.1".
        Returns:
            Values of the same shape and of the field's dtype: a tensor on the device of a given
            tensor, else an array (float32 for bfloat16, which NumPy lacks). For nested values
            dictionaries, as `Batch.tree`.
        Raises:
            FieldError: There is no such field.
            ShapeError: The last dimensions are not those of the column's row.
            DataError: Values are no real numbers, or a field of integers cannot hold them.
        Cost: no wait for a device, except to check integers of another dtype in a field of
        integers.
        """
        return self._converted(name, values, FieldConversion.apply)

    def denormalize(self, name: str, values: Any) -> Any:
        """Convert values in the units of a batch's field to those of its column.

        Reverses `normalize`.

        Args:
            name: As `normalize`.
            values: As `normalize`.
        Returns:
            As `normalize`, with the column's dtype. If the column holds integers and the field is
            floating: float32 or float64, not rounded to integers.
        Raises:
            FieldError, ShapeError, DataError: As `normalize`.
        """
        return self._converted(name, values, FieldConversion.revert)

    def _converted(self, name: str, values: Any, convert: Convert) -> Any:
        """Convert a field's values; or nested values of the fields below `name`."""
        if not isinstance(name, str) or name not in self.fields:
            return self._converted_parts(name, values, convert)
        conversion = self.fields[name]
        given = _as_tensor(name, values, conversion.stored)
        rank = len(conversion.shape)
        if given.shape[given.dim() - rank :] != conversion.shape or given.dim() < rank:
            shape = ", ".join(["...", *map(str, conversion.shape)])
            remedy = "give the column's rows, with any dimensions before them"
            raise ShapeError(name, f"must have shape [{shape}]", list(given.shape), remedy)
        placed = self._placed.get((name, given.device))
        if placed is None:
            placed = self._placed[name, given.device] = conversion.to(given.device)
        converted = convert(placed, name, given)
        if isinstance(values, torch.Tensor):
            return converted
        return (converted.float() if converted.dtype == torch.bfloat16 else converted).numpy()

    def _converted_parts(self, name: str, values: Any, convert: Convert) -> dict[str, Any]:
        """Convert the nested values of "a.b" and "a.c", given as {"b": ..., "c": ...} for "a"."""
        parts = [
            field for field in self.fields if isinstance(name, str) and field.startswith(f"{name}.")
        ]
        if not parts or not isinstance(values, (Mapping, tuple)):
            has = f"it has {', '.join(self.fields)}"
            if parts:
                has = f"give its parts as a mapping, or name one: {', '.join(parts)}"
            raise FieldError(f"field {name!r}", "must be a field of the batch", None, has)
        root: dict[str, Any] = {}
        for field, part in flatten("values", {name: values}, self.fields.keys()).items():
            *path, leaf = field.removeprefix(f"{name}.").split(".")
            node = root
            for key in path:
                node = node.setdefault(key, {})
            node[leaf] = self._converted(field, part, convert)
        return root

    def save(self, folder: str | Path) -> None:
        """Write `normalizer.json` into a folder, atomically; `Replay.save` does it.

        Raises:
            CheckpointError: The file cannot be written.
        """
        into = arguments.folder("folder", folder)
        fields = {name: conversion.to_json() for name, conversion in self.fields.items()}
        with checked_files.writing(into):
            into.mkdir(parents=True, exist_ok=True)
            checked_files.write_checked(into / FILE, _FORMAT, "fields", fields)

    @classmethod
    def load(cls, folder: str | Path) -> Normalizer:
        """Read the normalizer of a checkpoint; needs no data set.

        Args:
            folder: Folder that `save` or `Replay.save` got; or a tag's folder of an engine's
                checkpoint; or the folder of the tags, of which the latest is taken.
        Raises:
            CheckpointError: The folder has no normalizer, or its file has changed.
        """
        path = _find(arguments.folder("folder", folder))
        fields = checked_files.read_checked(path, _FORMAT, "fields")
        try:
            return cls({name: FieldConversion.from_json(entry) for name, entry in fields.items()})
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            rule = "must describe the conversion of each field"
            raise CheckpointError(
                str(path), rule, None, f"{error!r}; {checked_files.ANOTHER}"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        return {"fields": self.fields, "_placed": {}}

    def __repr__(self) -> str:
        def form(conversion: FieldConversion) -> str:
            names = list(dict.fromkeys((_NAMES[conversion.stored], _NAMES[conversion.dtype])))
            return " -> ".join(names) + ("" if conversion.gain is None else " (x - shift) * gain")

        return (
            f"Normalizer({', '.join(f'{name}: {form(one)}' for name, one in self.fields.items())})"
        )


def _conversion(
    field: ResolvedField, statistics: Mapping[str, ColumnStatistics], engine_dtype: torch.dtype
) -> FieldConversion:
    """Return the conversion of a resolved field, with the numbers of the gather op."""
    column = field.column
    stored = DTYPES[DERIVED[str(field.derived)] if column is None else column.dtype]
    dtype = engine_dtype if field.dtype == "engine" else DTYPES[field.dtype]
    shape = () if column is None else column.shape
    row = replace(field, length=None, part_first=0, part_length=None)
    shift, gain = shift_and_gain(row, statistics, shape)
    if not len(gain):
        return FieldConversion(stored, dtype, shape)
    form = shape if field.normalize else ()
    return FieldConversion(stored, dtype, shape, shift.view(form), gain.view(form))


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to a floating dtype: to nearest, ties to even; to 16 bits through float32."""
    return (values.float() if dtype.itemsize == 2 else values).to(dtype)


def _as_tensor(name: str, values: Any, stored: torch.dtype) -> torch.Tensor:
    """Return real numbers as a tensor; a tensor stays on its device, with its gradient history."""
    if isinstance(values, torch.Tensor):
        arguments.tensor(name, values)
        return values
    array = arguments.array(name, values)
    if stored == torch.bfloat16 and array.dtype == np.uint16:  # the bits, as in the store
        return torch.from_numpy(array.copy()).view(torch.bfloat16)
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = arguments.integers(name, array).reshape(array.shape)
    if stored == torch.float16:  # NumPy rounds once, torch twice: by way of float32
        with np.errstate(over="ignore"):
            array = array.astype(np.float16)
    return torch.from_numpy(np.array(array))


def _find(folder: Path) -> Path:
    """Return the path of the file in a save's folder, a tag's folder, or the folder of the tags."""
    places = [folder / FILE, folder / _GEAR / FILE]
    latest = folder / "latest"
    if latest.is_file():
        places.append(folder / latest.read_text().strip() / _GEAR / FILE)
    for place in places:
        if place.is_file():
            return place
    remedy = "give the folder of a save or of an engine's checkpoint, or use Normalizer.from_config"
    raise CheckpointError(str(folder), f"must hold {FILE}", None, remedy)
