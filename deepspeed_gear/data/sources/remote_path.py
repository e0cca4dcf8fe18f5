"""A path of a remote source, which is used like a path of this machine."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Generator, Iterator
from pathlib import PosixPath, PurePosixPath
from typing import IO, Any, NoReturn

from deepspeed_gear.data.sources.ranged_file import RangedFile
from deepspeed_gear.data.sources.remote_source import RemoteSource
from deepspeed_gear.errors import DataError


class RemotePath(PosixPath):
    """A file or folder of a remote source, by the listing that was made when it was opened.

    Files are opened for reading only. The path has no name on this machine: a library that would
    open it by name gets a DataError.

    Attributes:
        source: The source.
        inner: The name in the source; "" for the source itself.
    """

    def __new__(cls, source: RemoteSource, inner: str) -> RemotePath:
        return super().__new__(cls, source.shown(inner))

    def __init__(self, source: RemoteSource, inner: str) -> None:
        if sys.version_info >= (3, 12):
            super().__init__(source.shown(inner))
        self.source = source
        self.inner = inner

    def __str__(self) -> str:
        return self.source.shown(self.inner)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __fspath__(self) -> NoReturn:
        raise DataError(
            str(self),
            "must be opened with path.open(), as it is not on this machine",
            None,
            "copy the source to this machine, or correct the reader",
        )

    def __hash__(self) -> int:
        return hash((id(self.source), self.inner))

    def __eq__(self, other: object) -> bool:
        is_same = isinstance(other, RemotePath) and other.source is self.source
        return is_same and other.inner == self.inner  # type: ignore[attr-defined]

    def _at(self, inner: str) -> RemotePath:
        return type(self)(self.source, "" if inner == "." else inner)

    def __truediv__(self, name: str | os.PathLike[str]) -> RemotePath:
        return self._at(str(PurePosixPath(self.inner, os.fspath(name))))

    def joinpath(self, *names: str | os.PathLike[str]) -> RemotePath:
        return self._at(str(PurePosixPath(self.inner, *names)))

    @property
    def parent(self) -> RemotePath:
        return self._at(str(PurePosixPath(self.inner).parent))

    def with_name(self, name: str) -> RemotePath:
        """Return the path of a file beside this one; the source itself has none beside it."""
        if not self.inner:
            return _Unlisted(self.source, str(PurePosixPath(self.name).with_name(name)))
        return self._at(str(PurePosixPath(self.inner).with_name(name)))

    def with_suffix(self, suffix: str) -> RemotePath:
        return self.with_name(PurePosixPath(self.name).with_suffix(suffix).name)

    def relative_to(self, *other: Any, **_: Any) -> PurePosixPath:  # type: ignore[override]
        base = other[0].inner if isinstance(other[0], RemotePath) else str(other[0])
        return PurePosixPath(self.inner).relative_to(base)

    def is_relative_to(self, *other: Any) -> bool:
        is_same = isinstance(other[0], RemotePath) and other[0].source is self.source
        return is_same and PurePosixPath(self.inner).is_relative_to(other[0].inner)

    def resolve(self, strict: bool = False) -> RemotePath:
        return self

    def absolute(self) -> RemotePath:
        return self

    def is_file(self, **_: Any) -> bool:
        return self.inner in self.source.files

    def is_dir(self, **_: Any) -> bool:
        head = f"{self.inner}/" if self.inner else ""
        return not self.is_file() and any(name.startswith(head) for name in self.source.files)

    def exists(self, **_: Any) -> bool:
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        if self.is_file():
            size = self.source.files[self.inner].size
            return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, size, 0, 0, 0))
        if self.is_dir():
            return os.stat_result((stat.S_IFDIR | 0o555, 0, 0, 1, 0, 0, 0, 0, 0, 0))
        raise FileNotFoundError(f"{self} does not exist")

    def _below(self) -> Iterator[PurePosixPath]:
        """Yield the names of the files and folders in this folder, relative to it, sorted."""
        head = f"{self.inner}/" if self.inner else ""
        inside = [n.removeprefix(head) for n in self.source.files if n and n.startswith(head)]
        files = [PurePosixPath(name) for name in inside]
        folders = {folder for file in files for folder in file.parents if folder.name}
        yield from sorted({*files, *folders})

    def iterdir(self) -> Generator[RemotePath, None, None]:
        return (self / name for name in self._below() if len(name.parts) == 1)

    def glob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        """Yield what matches a pattern of names; `**` is not supported."""
        depth = len(PurePosixPath(pattern).parts)
        names = (name for name in self._below() if len(name.parts) == depth)
        return (self / name for name in names if name.match(pattern))

    def rglob(self, pattern: str, **_: Any) -> Iterator[RemotePath]:  # type: ignore[override]
        return (self / name for name in self._below() if name.match(pattern))

    def files_below(self) -> Iterator[RemotePath]:
        """Yield this file, or all files of this folder, sorted by name."""
        if self.is_file():
            yield self
        yield from (path for path in self.rglob("*") if path.is_file())

    def open(  # type: ignore[override]
        self,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
    ) -> IO[Any]:
        if mode not in ("r", "rt", "rb"):
            raise DataError(str(self), "must be opened for reading", mode, "write to a local file")
        if not self.is_file():
            raise FileNotFoundError(f"{self} does not exist")
        file = io.BufferedReader(RangedFile(self.source, self.inner))
        if mode == "rb":
            return file
        return io.TextIOWrapper(file, encoding, errors, newline)

    def read_bytes(self) -> bytes:
        with self.open("rb") as file:
            content: bytes = file.read()
        return content

    def read_text(
        self, encoding: str | None = None, errors: str | None = None, newline: str | None = None
    ) -> str:
        with self.open("r", -1, encoding, errors, newline) as file:
            text: str = file.read()
        return text


class _Unlisted(RemotePath):
    """A path outside the source, of which only the name is used: nothing exists there."""

    def is_file(self, **_: Any) -> bool:
        return False

    def is_dir(self, **_: Any) -> bool:
        return False
