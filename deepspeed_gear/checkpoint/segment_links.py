"""Hard links to the unchanged segments of an earlier save, which are checked for damage first.

A link shares the bytes of its file, so damage to one save is damage to all saves that link it. The
process that saves records size, time of modification and SHA-256 of each file that it writes.
Before the next save it reads the files again whose size or time differ, and some of the others in
turn, as a disk may change bits without changing either. A damaged file is not linked: its rows are
written again from the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed_gear.log import LOG

# A save reads 1 / _PARTS of the bytes of a table's segments again, but at least this many bytes.
_PARTS = 64
_LEAST_CHECKED_BYTES = 4 << 20
_BLOCK_BYTES = 1 << 20
_READERS = 4


@dataclass(frozen=True)
class WrittenFile:
    """Record of a segment's file, made when it was complete on the disk."""

    num_bytes: int
    modified_ns: int
    digest: str  # SHA-256
    age: int = 0  # saves since it was last written or read

    def is_unchanged(self, path: Path) -> bool:
        """Return whether a file has this size and time of modification."""
        with contextlib.suppress(OSError):
            return _stamp(path) == (self.num_bytes, self.modified_ns)
        return False

    def read_again(self, path: Path) -> WrittenFile | str:
        """Read the file and return its new record, or how it differs from what was written."""
        try:
            num_bytes, modified_ns = _stamp(path)
            if num_bytes != self.num_bytes:
                return f"it has {num_bytes} bytes of {self.num_bytes}"
            if _digest_on_disk(path) != self.digest:
                return "it has another SHA-256"
        except OSError as error:
            return error.strerror or str(error)
        return replace(self, modified_ns=modified_ns, age=-1)  # `link` makes it 0


Written = Mapping[str, WrittenFile]


class SegmentLinks:
    """The files of one table or shard that a save links to those of the save before. Main thread.

    Args:
        before: Folder of the table or shard in the save before; None: there is none.
        written: The files of that folder that this process has recorded.
    """

    def __init__(self, before: Path | None, written: Written) -> None:
        self.before = before
        self._known = {} if before is None else dict(written)
        self._new: dict[str, WrittenFile] = {}

    def check(self) -> None:
        """Read files again: those that have changed, and those whose turn it is.

        Damaged files are not linked, and a warning names them. Needs no lock of the table.
        """
        before = self.before
        if before is None:
            return
        due = self._due(before)
        with ThreadPoolExecutor(_READERS) as pool:
            read = pool.map(lambda name: self._known[name].read_again(before / name), due)
            results = dict(zip(due, read, strict=True))
        damaged: dict[str, str] = {}
        for name, result in results.items():
            if isinstance(result, WrittenFile):
                self._known[name] = result
            else:
                damaged[name] = result
                del self._known[name]
        if damaged:
            first = min(damaged)
            more = f" and {len(damaged) - 1} more of its files" if len(damaged) > 1 else ""
            LOG.warning(
                "gear: %s%s must be as saved: %s; this save writes their rows anew from the store, "
                "but earlier saves that have such a file, or a link to it, cannot be loaded: look "
                "at the disk",
                before / first,
                more,
                damaged[first],
            )

    def _due(self, before: Path) -> list[str]:
        """Return the files that have changed, and those of the others read longest ago."""
        changed = [
            name for name, known in self._known.items() if not known.is_unchanged(before / name)
        ]
        rest = sorted(
            self._known.keys() - set(changed), key=lambda name: (-self._known[name].age, name)
        )
        total = sum(known.num_bytes for known in self._known.values())
        room = max(_LEAST_CHECKED_BYTES, total // _PARTS)
        due = changed
        for name in rest:
            if room <= 0:
                break
            room -= self._known[name].num_bytes
            due.append(name)
        return due

    def link(self, to: Path, names: Iterable[str]) -> dict[str, str]:
        """Link files until the file system refuses; return the SHA-256 of those that are linked."""
        linked: dict[str, str] = {}
        with contextlib.suppress(OSError):  # no links, or too many
            for name in names:
                if self.before is None or name not in self._known:
                    continue
                known = self._known[name]
                os.link(self.before / name, to / name)
                # Compare the link, not the source: the file may have changed since the check.
                if not known.is_unchanged(to / name):
                    (to / name).unlink()
                    continue
                linked[name] = known.digest
                self._new[name] = replace(known, age=known.age + 1)
        return linked

    def record(self, folder: Path, digests: Mapping[str, str]) -> None:
        """Record the files of a folder that are complete on the disk, with their SHA-256."""
        for name, digest in digests.items():
            if name not in self._new:
                self._new[name] = WrittenFile(*_stamp(folder / name), digest)

    @property
    def written(self) -> Written:
        """The files of this save, which the next one may link."""
        return self._new


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _digest_on_disk(path: Path) -> str:
    """Return the SHA-256 of a file on the disk; its cached pages, all written, are dropped."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
