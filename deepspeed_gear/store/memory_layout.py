"""Memory layout of a store: its header, format version and run, and the places of its regions."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepspeed_gear.errors import StoreError

MAGIC = b"GEARSTOR"
FORMAT = 3
ALIGNMENT = 128
HEADER_BYTES = 4096
_MOST_TEXT = 1 << 26  # bytes of a description
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("format", "<i8"),
        ("total_bytes", "<i8"),
        ("layout_digest", "S64"),
        ("run_id", "S32"),
        ("run_name", "S64"),
        ("config_digest", "S64"),
        ("description_bytes", "<i8"),
    ]
)
MUTEX_OFFSET = 256
MUTEX_BYTES = 128
HOLDER_OFFSET = MUTEX_OFFSET + MUTEX_BYTES  # int64: process id while the lock is held, 0 otherwise
KEPT_OFFSET = HOLDER_OFFSET + 8  # a byte: 1 if the file stays where no process is attached


@dataclass(frozen=True)
class RunIdentity:
    id: str  # 32 hexadecimal digits, drawn when the run begins; no two runs have the same
    name: str = ""  # the user's name for it; may be empty
    # SHA-256 of the options a writer depends on, hex; empty where no writer attaches by a config.
    digest: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.id})" if self.name else self.id


@dataclass(frozen=True)
class Region:
    """A named array in a store. `dtype` is NumPy's name; bfloat16 columns are uint16."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Layout:
    """Regions one after the other after the header and the description, each 128-byte aligned."""

    regions: tuple[Region, ...]
    # Canonical JSON of what the regions mean; stored, hashed and compared at attach
    description: str

    @classmethod
    def of(cls, regions: Sequence[Region], meaning: dict[str, Any]) -> Layout:
        names = [region.name for region in regions]
        assert len(set(names)) == len(names), names
        entries = [[r.name, r.dtype, list(r.shape)] for r in regions]
        text = json.dumps({"meaning": meaning, "regions": entries}, sort_keys=True)
        return cls(tuple(regions), text)

    @classmethod
    def parse(cls, text: str) -> Layout:
        entries = json.loads(text)["regions"]
        return cls(tuple(Region(name, dtype, tuple(shape)) for name, dtype, shape in entries), text)

    @property
    def meaning(self) -> dict[str, Any]:
        return dict(json.loads(self.description)["meaning"])

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.description.encode()).hexdigest()

    @property
    def total_bytes(self) -> int:
        return self._begins[-1]

    @property
    def _begins(self) -> list[int]:
        """Where the regions begin, and what follows the last one would."""
        first = align(HEADER_BYTES + len(self.description.encode()))
        sizes = (align(region.num_bytes) for region in self.regions)
        return list(itertools.accumulate(sizes, initial=first))

    def views(self, buffer: Any) -> dict[str, np.ndarray]:
        """Return every region as an array over `buffer`, without a copy."""
        placed = zip(self.regions, self._begins, strict=False)
        return {r.name: np.ndarray(r.shape, r.dtype, buffer, begin) for r, begin in placed}


def align(offset: int) -> int:
    return (offset + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def write_header(buffer: Any, layout: Layout, run: RunIdentity) -> None:
    """Write header and description of a store; the magic last."""
    text = layout.description.encode()
    buffer[HEADER_BYTES : HEADER_BYTES + len(text)] = text
    header = np.ndarray((), HEADER, buffer=buffer)
    header["format"] = FORMAT
    header["total_bytes"] = layout.total_bytes
    header["layout_digest"] = layout.digest.encode()
    header["config_digest"] = run.digest.encode()
    header["run_id"] = run.id.encode()
    header["run_name"] = run.name.encode()
    header["description_bytes"] = len(text)
    header["magic"] = MAGIC


def read_header(fd: int, path: str) -> tuple[Layout, RunIdentity]:
    """Return the layout and the run of an open store file.

    Raises:
        StoreError: It is no store, of another format version, or damaged.
    """
    num_bytes = os.fstat(fd).st_size
    head = os.pread(fd, HEADER_BYTES, 0)
    if len(head) < HEADER_BYTES:
        raise StoreError(
            path,
            f"must be a gear store of at least {HEADER_BYTES} bytes",
            len(head),
            f"remove the file if it is a leftover: rm {path}",
        )
    header = np.frombuffer(head, HEADER, 1)[0]
    magic = bytes(header["magic"])
    version = int(header["format"])
    total = int(header["total_bytes"])
    if magic != MAGIC:
        raise StoreError(
            path, "must be a gear store", magic, "remove the file or use its right name"
        )
    if version != FORMAT:
        raise StoreError(
            path, f"must have store format {FORMAT}", version, "use one version everywhere"
        )
    if total != num_bytes:
        raise StoreError(path, f"must have {total} bytes", num_bytes, "it is truncated")
    text = os.pread(fd, min(max(int(header["description_bytes"]), 0), _MOST_TEXT), HEADER_BYTES)
    if hashlib.sha256(text).hexdigest().encode() != bytes(header["layout_digest"]):
        raise StoreError(path, "must have an undamaged layout", None, f"remove it: rm {path}")
    layout = Layout.parse(text.decode())
    if layout.total_bytes != num_bytes:
        raise StoreError(
            path,
            f"must have the {layout.total_bytes} bytes of its layout",
            num_bytes,
            f"it is damaged; remove it: rm {path}",
        )
    words = (
        bytes(header[field]).rstrip(b"\0") for field in ("run_id", "run_name", "config_digest")
    )
    return layout, RunIdentity(*(word.decode(errors="replace") for word in words))
