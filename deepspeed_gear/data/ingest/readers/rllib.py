"""Reader of RLlib's JSON: a line per sample batch, with fragments of several episodes."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.ingest.decoding.array_pickles import PICKLED, load_pickle
from deepspeed_gear.data.ingest.source_checks import DAMAGED, first_bytes, optional
from deepspeed_gear.data.ingest.step_arrays import ArrayReader, Streams
from deepspeed_gear.errors import DataError

_TYPES = ("SampleBatch", "MultiAgentBatch")
_HEAD_BYTES = 4096
_PART_BYTES = 1 << 24
_PLACES = ("eps_id", "agent_index", "t", "unroll_id", "env_id")  # columns of a row's origin


class RllibReader(ArrayReader):
    """Reads files of RLlib's JsonWriter, or a folder of them; all arrays are in memory.

    A trajectory has the rows of one policy, `eps_id` and `agent_index`, also from several lines,
    while `t` increases by one; without `eps_id`, those of a line. Compressed columns are base64,
    LZ4 frames and pickles.
    """

    format = "rllib"
    takes = (*ArrayReader.takes, "allow_pickle")

    @classmethod
    def recognises(cls, path: Path) -> bool:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        head = b"".join(first_bytes(file, _HEAD_BYTES) for file in files[:1])
        return (
            re.match(rb'\s*\{.*"type":\s*"(SampleBatch|MultiAgentBatch)"', head, re.S) is not None
        )

    def open(self) -> None:
        files = sorted(self.path.glob("*.json")) if self.path.is_dir() else [self.path]
        self._file_bytes = sum(file.stat().st_size for file in files)
        fragments: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for file in files:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    where = f"{file}: line {number}"
                    for policy, columns in self._batches(where, line).items():
                        for place, rows in self._fragments(where, columns):
                            fragments.setdefault((policy, *place), []).append(rows)
        self._trajectories = [part for parts in fragments.values() for part in self._joined(parts)]
        self._describe()

    def _batches(self, where: str, line: bytes) -> dict[str, dict[str, Any]]:
        if not line.strip():
            return {}
        kinds = (TypeError, KeyError, AttributeError)
        with DataError.on(
            where,
            f"must be the JSON of a {' or '.join(_TYPES)}",
            ValueError,
            *kinds,
            remedy="write the file again with RLlib's JsonWriter",
        ):
            batch = parse_json(line)
            batches = batch["policy_batches"] if batch["type"] == _TYPES[1] else {"": batch}
            columns = {name: dict(part) for name, part in batches.items()}
        if batch["type"] not in _TYPES:
            raise DataError(
                f"{where}: type",
                f"must be one of {', '.join(_TYPES)}",
                batch["type"],
                "write the file again with RLlib's JsonWriter",
            )
        columns.get("", {}).pop("type", None)
        return columns

    def _fragments(
        self, where: str, columns: dict[str, Any]
    ) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield runs of rows of one episode and agent: these two, and the columns of the run."""
        arrays = {}
        for key, value in columns.items():
            value = self._unpack(f"{where}: {key}", value) if isinstance(value, str) else value
            arrays[key] = self._as_array(f"{where}: {key}", value, self._file_bytes)
        lengths = {len(array) for array in arrays.values() if array.ndim}
        if len(lengths) != 1:
            shapes = {key: list(array.shape) for key, array in arrays.items()}
            raise DataError(
                where,
                "must have as many rows in each column",
                shapes,
                "the line is incomplete; write the file again",
            )
        arrays = {key: array for key, array in arrays.items() if array.ndim}
        for key in set(arrays).intersection(_PLACES[:3]):
            if arrays[key].ndim != 1 or arrays[key].dtype.kind not in "iuf":
                raise DataError(
                    f"{where}: {key}",
                    "must be a number per step",
                    list(arrays[key].shape),
                    "store one number for each step",
                )
        if "eps_id" not in arrays:
            yield (where,), arrays
            return
        places = np.stack([arrays[key] for key in _PLACES[:2] if key in arrays], axis=1)
        changes = np.flatnonzero((places[1:] != places[:-1]).any(axis=1)) + 1
        for low, high in pairwise([0, *changes.tolist(), len(places)]):
            yield tuple(places[low].tolist()), {key: a[low:high] for key, a in arrays.items()}

    def _unpack(self, where: str, text: str) -> Any:
        """Decode a compressed column, checking its size as it is decompressed."""
        if not self.options.get("allow_pickle"):
            raise DataError(where, "must not be a pickle, as compressed columns are", None, PICKLED)
        lz4 = optional(where, "must be decompressed by LZ4", "lz4", "lz4.frame")
        with DataError.on(
            where,
            "must be base64 of an LZ4 frame",
            ValueError,
            RuntimeError,
            EOFError,
            remedy=DAMAGED,
        ):
            packed = base64.b64decode(text, validate=True)
            content = io.BytesIO()
            decoder = lz4.LZ4FrameDecompressor()
            while not decoder.eof:
                part = decoder.decompress(packed, max_length=_PART_BYTES)
                if not part and not decoder.eof:
                    raise EOFError("the frame is cut off")
                packed = b""
                self._num_bytes += content.write(part)
                self.expansion.check(where, self._num_bytes, self._file_bytes)
        return load_pickle(where, content.getvalue(), self.expansion, self._file_bytes)

    def _joined(self, parts: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the rows of an episode ordered by `t`, divided wherever `t` skips a step."""
        with DataError.on(
            str(self.path),
            "must have the same columns in all lines",
            ValueError,
            KeyError,
            remedy="ingest files with other columns into a data set of their own",
        ):
            keys = dict.fromkeys(key for part in parts for key in part)
            rows = {key: np.concatenate([part[key] for part in parts]) for key in keys}
        bounds = [0, len(next(iter(rows.values())))]
        if "eps_id" in rows and "t" in rows:
            order = np.argsort(rows["t"], kind="stable")
            rows = {key: array[order] for key, array in rows.items()}
            if len(again := rows["t"][1:][np.diff(rows["t"]) == 0]):
                raise DataError(
                    f"{self.path}: t", "must not repeat", again[0].item(), "give each file once"
                )
            bounds[1:1] = (np.flatnonzero(np.diff(rows["t"]) != 1) + 1).tolist()
        for low, high in pairwise(bounds):
            yield {key: array[low:high] for key, array in rows.items()}

    def _streams(self) -> Streams:
        for i, arrays in enumerate(self._trajectories):
            is_whole = "eps_id" in arrays
            yield (
                f"trajectory {i}",
                {key: a for key, a in arrays.items() if key not in _PLACES},
                is_whole,
            )
