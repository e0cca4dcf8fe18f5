"""The normalizer: converts inputs and outputs of a model as the fields of a batch are converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.field_rows import affine
from deepspeed_gear.batching.gather import N_STEP_DTYPES
from deepspeed_gear.checkpoint import save_folders
from deepspeed_gear.config import GearConfig, ResolvedField, ds_config, parse
from deepspeed_gear.config.cross_checks import N_STEP_NAMES
from deepspeed_gear.config.field_checks import DERIVED
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_statistics import ColumnStatistics
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.errors import CheckpointError, ConfigError, DataError, FieldError, ShapeError
from deepspeed_gear.ops.conversion import arithmetic_dtype, widen
from deepspeed_gear.plan.resolved_plan import fields_of, schemas_of, statistics_of
from deepspeed_gear.schema import DTYPES, Schema

FILE = "normalizer.json"
_FORMAT = 1
_GEAR = "gear"  # folder of an engine's checkpoint, in that of its tag
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, eq=False)
class FieldConversion:
    """A field's conversion from its column's units to a batch's, (x - shift) * gain with one
    rounding an operation, as in the gather op, and back. Without shift and gain only the dtype
    changes.
    """

    stored: torch.dtype  # of the column
    dtype: torch.dtype  # in the batch
    shape: tuple[int, ...] = ()  # of a row of the column
    shift: torch.Tensor | None = None  # [*shape], or [] for all elements; float64
    gain: torch.Tensor | None = None  # as `shift`; both or none

    def to(self, device: torch.device) -> FieldConversion:
        """Return the conversion on a device; itself if it is already there."""
        if self.shift is None or self.gain is None or self.gain.device == device:
            return self
        with torch.inference_mode(
            False
        ):  # a tensor of inference mode could not be used in training
            return replace(self, shift=self.shift.to(device), gain=self.gain.to(device))

    def apply(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Convert values in the column's units to the field's."""
        if self.stored.is_floating_point:
            values = _rounded(values, self.stored)  # as the store does
        if self.shift is not None and self.gain is not None:
            return _rounded((widen(values, torch.float64) - self.shift) * self.gain, self.dtype)
        return self._cast(name, values, self.dtype)

    def revert(self, name: str, values: torch.Tensor) -> torch.Tensor:
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
                name, f"must be integers, as the field is {_NAMES[dtype]}", str(values.dtype)
            )
        cast = values.to(dtype)
        if values.dtype != dtype and not bool((cast.to(values.dtype) == values).all()):
            raise DataError(name, f"must hold values that {_NAMES[dtype]} can hold")
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
        found = cls(DTYPES[entry["stored"]], DTYPES[entry["dtype"]], tuple(entry["shape"]))
        if entry["gain"] is None:
            return found
        shift, gain = (torch.tensor(entry[name], dtype=torch.float64) for name in ("shift", "gain"))
        return replace(found, shift=shift, gain=gain)


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
            dataset: In place of the data set that the config names, or its folder; None: the
                config's is opened.
            schemas: Schemas of the tables that have a capacity and no schema in the config.
            engine_dtype: The dtype of `"as": "engine"`.
        Raises:
            ConfigError, DataError: The config is wrong, or does not fit the data set.
        Cost: the statistics are read; of another split than the data set's own they are computed in
        one pass
            over the data.
        """
        if isinstance(dataset, (str, Path)):
            dataset = Dataset.open(dataset)
        arguments.one_of("dataset", dataset, (Dataset, type(None)), "a Dataset or a path")
        arguments.one_of("engine_dtype", engine_dtype, torch.dtype, "a torch.dtype")
        checked = parse(ds_config.read(config)[0])
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

        The result has the bits that a batch has where the store holds this value: it is rounded to
        a floating column's dtype first, as writers do (to float16 a float64 tensor, but no array,
        by way of float32). Gradients pass through.

        Args:
            name: A field of the batch: "observation", "observation.camera", "return_to_go" ... With
                nested values, the first part of the names of several.
            values: A tensor, array, number or nested list. [..., *shape of the column's row]. Or
                nested, as writers take them: {"camera": x, "joints": (y, z)} are
                "observation.camera", "observation.joints.0" and "observation.joints.1".
        Returns:
            Of the same shape and of the field's dtype: a tensor on the device of a given tensor,
            else an array (float32 for bfloat16, which NumPy lacks). Of nested values: dictionaries,
            as of `Batch.tree`.
        Raises:
            FieldError: There is no such field.
            ShapeError: The last dimensions are not those of the column's row.
            DataError: They are no real numbers, or a field of integers cannot hold them.
        Cost: no wait for a device, except to check integers of another dtype in a field of
        integers.
        """
        return self._converted(name, values, FieldConversion.apply)

    def denormalize(self, name: str, values: Any) -> Any:
        """Convert values in the units of a batch's field to those of its column; reverses
        `normalize`.

        Args:
            name: As in `normalize`.
            values: As in `normalize`.
        Returns:
            As of `normalize`, of the column's dtype. Where the column holds integers and the field
            is floating: float32 or float64, not rounded to integers.
        Raises:
            FieldError, ShapeError, DataError: As `normalize`.
        """
        return self._converted(name, values, FieldConversion.revert)

    def _converted(self, name: str, values: Any, convert: Convert) -> Any:
        """Convert a field's values, or nested ones of the fields whose names begin with `name` and
        a dot.
        """
        if not isinstance(name, str) or name not in self.fields:
            parts = [
                field
                for field in self.fields
                if isinstance(name, str) and field.startswith(f"{name}.")
            ]
            if parts and isinstance(values, (Mapping, tuple)):
                root: dict[str, Any] = {}
                for field, part in flatten("values", {name: values}, self.fields.keys()).items():
                    *path, leaf = field.removeprefix(f"{name}.").split(".")
                    node = root
                    for key in path:
                        node = node.setdefault(key, {})
                    node[leaf] = self._converted(field, part, convert)
                return root
            has = f"it has {', '.join(self.fields)}"
            if parts:
                has = f"give its parts as a mapping, or name one: {', '.join(parts)}"
            raise FieldError(f"field {name!r}", "must be a field of the batch", None, has)
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
        found = convert(placed, name, given)
        if isinstance(values, torch.Tensor):
            return found
        return (found.float() if found.dtype == torch.bfloat16 else found).numpy()

    def save(self, folder: str | Path) -> None:
        """Write `normalizer.json` into a folder, atomically; `Replay.save` does it.

        Raises:
            CheckpointError: The file cannot be written.
        """
        into = arguments.folder("folder", folder)
        fields = {name: conversion.to_json() for name, conversion in self.fields.items()}
        with save_folders.writing(into):
            into.mkdir(parents=True, exist_ok=True)
            save_folders.write_checked(into / FILE, _FORMAT, "fields", fields)

    @classmethod
    def load(cls, folder: str | Path) -> Normalizer:
        """Read the normalizer of a checkpoint; needs no data set.

        Args:
            folder: What `save` or `Replay.save` got, a tag's folder of an engine's checkpoint, or
                the folder of the tags, of which the latest is taken.
        Raises:
            CheckpointError: There is none, or it was changed.
        """
        path = _find(arguments.folder("folder", folder))
        fields = save_folders.read_checked(path, _FORMAT, "fields")
        try:
            return cls({name: FieldConversion.from_json(entry) for name, entry in fields.items()})
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            rule = "must describe the conversion of each field"
            raise CheckpointError(
                str(path), rule, None, f"{error!r}; {save_folders.ANOTHER}"
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
    """Return the conversion of a resolved field, with the numbers that the gather op gets."""
    column = field.column
    stored = DTYPES[DERIVED[str(field.derived)] if column is None else column.dtype]
    dtype = engine_dtype if field.dtype == "engine" else DTYPES[field.dtype]
    shape = () if column is None else column.shape
    row = replace(field, length=None, part_first=0, part_length=None)
    shift, gain = affine(row, statistics, shape)
    if not len(gain):
        return FieldConversion(stored, dtype, shape)
    form = shape if field.normalize else ()
    return FieldConversion(stored, dtype, shape, shift.view(form), gain.view(form))


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to a floating dtype: to nearest, ties to even; to 16 bits through float32."""
    return (values.float() if dtype.itemsize == 2 else values).to(dtype)


def _as_tensor(name: str, values: Any, stored: torch.dtype) -> torch.Tensor:
    """Return real numbers as a tensor where they are, with its history."""
    if isinstance(values, torch.Tensor):
        arguments.tensor(name, values)
        return values
    found = arguments.array(name, values)
    if stored == torch.bfloat16 and found.dtype == np.uint16:  # as stored
        return torch.from_numpy(found.copy()).view(torch.bfloat16)
    if found.dtype.kind == "u" and found.dtype.itemsize > 1:
        found = arguments.integers(name, found).reshape(found.shape)
    if stored == torch.float16:  # with one rounding, where torch has two
        with np.errstate(over="ignore"):
            found = found.astype(np.float16)
    return torch.from_numpy(np.array(found))


def _find(folder: Path) -> Path:
    """Return the path of the file in a save's folder, a tag's folder, or the folder of the tags."""
    places = [folder / FILE, folder / _GEAR / FILE]
    latest = folder / "latest"
    if latest.is_file():
        places.append(folder / latest.read_text().strip() / _GEAR / FILE)
    found = [place for place in places if place.is_file()]
    if not found:
        remedy = (
            "give the folder of a save or of an engine's checkpoint, or use Normalizer.from_config"
        )
        raise CheckpointError(str(folder), f"must hold {FILE}", None, remedy)
    return found[0]
