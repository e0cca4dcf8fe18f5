"""Base of remote sources: their files, and fetching byte ranges with retries."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, TypeAlias, TypeVar

from tqdm import tqdm

from deepspeed_gear.data.sources.block_cache import BlockCache
from deepspeed_gear.errors import DataError, show_bytes

# Yields the bytes [start, stop) of a file in order; it may end early where a connection is cut.
ReadRange: TypeAlias = Callable[[int, int], Iterator[bytes]]
Result = TypeVar("Result")
WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # before each attempt that follows one without any progress
_MOST_WAIT_S = 60.0  # of what a server asks for


class TransientFault(OSError):
    """A fault of a connection or server, after which the same request may succeed.

    Its text contains no address, because addresses may contain credentials.
    """

    def __init__(self, text: str, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.wait_s = wait_s


@dataclass(frozen=True)
class RemoteEntry:
    """A file of a source: its size, and what identifies its content where the server has that."""

    size: int
    version: str = ""


class RemoteSource(ABC):
    """One file or folder on another machine.

    Attributes:
        url: Its address, without user, password, query and revision.
        revision: What identifies the content that is read; "" where the server has nothing.
        files: Its files by name, relative to `url`. A source of one file has the name "".
        has_ranges: Whether the server returns byte ranges; without them a file is fetched whole.
        num_bytes: Bytes that have been fetched.
        num_requests: Requests for bytes, including repeated ones.
        num_retries: Repeated requests.
        cache: The blocks that have been fetched.

    Thread-safe: threads may read different files at the same time.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.revision = ""
        self.files: dict[str, RemoteEntry] = {}
        self.has_ranges = True
        self.num_bytes = 0
        self.num_requests = 0
        self.num_retries = 0
        self.cache = BlockCache()
        self._is_shown = False
        self._bar: tqdm[Any] | None = None
        self._lock = threading.Lock()

    @abstractmethod
    def range_reader(self, name: str) -> ReadRange:
        """Return what fetches byte ranges of a file.

        It raises TransientFault for what may succeed later, and DataError for anything else.
        """

    def show_bar(self) -> None:
        """Show the bytes that are fetched from now on, on stderr."""
        self._is_shown = True

    @property
    def num_listed_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    @property
    def traffic(self) -> str:
        """Return what has been fetched, as text."""
        parts = f"fetched {show_bytes(self.num_bytes)} of {show_bytes(self.num_listed_bytes)}"
        return f"{parts} in {self.num_requests} requests, {self.num_retries} of them repeated"

    def shown(self, name: str) -> str:
        """Return the address of a file or folder for messages."""
        return f"{self.url}/{name}" if name else self.url

    def add_file(self, name: str, size: Any, version: Any) -> None:
        """Add a file of a listing; DataError for a name that no local folder could have."""
        is_plain = str(PurePosixPath(name)) == name and not name.startswith("/")
        if name and (not is_plain or ".." in name.split("/")):
            raise DataError(
                self.shown(name), "must have a name without empty parts and '..'", None, "rename it"
            )
        if not isinstance(size, int) or size < 0:
            raise DataError(self.shown(name), "must have a known size", size, "copy it first")
        self.files[name] = RemoteEntry(size, str(version or ""))

    def fetch(self, name: str, read: ReadRange, start: int, stop: int) -> Iterator[bytes]:
        """Yield the bytes [start, stop) of a file; a cut connection continues where it ended.

        Raises:
            DataError: No byte arrived in several attempts in a row, or another attempt is useless.
        """
        at = start
        failures = 0
        while at < stop:
            self.num_requests += 1
            try:
                for part in read(at, stop):
                    at += len(part)
                    failures = 0
                    self._count(len(part))
                    yield part
                if at < stop:
                    raise TransientFault(f"the connection ended {stop - at} bytes early")
            except TransientFault as fault:
                self.wait(self.shown(name), fault, failures)
                failures += 1

    def repeat(self, where: str, request: Callable[[], Result]) -> Result:
        """Return the result of a request that is repeated after transient faults."""
        failures = 0
        while True:
            try:
                return request()
            except TransientFault as fault:
                self.wait(where, fault, failures)
                failures += 1

    def wait(self, where: str, fault: TransientFault, failures: int) -> None:
        """Wait before the next attempt; DataError after the last one."""
        if failures >= len(WAITS_S):
            raise DataError(
                where,
                f"must answer in one of {failures + 1} attempts",
                str(fault),
                "check the network and the server, and ingest again",
            ) from None
        self.num_retries += 1
        time.sleep(max(WAITS_S[failures], min(fault.wait_s, _MOST_WAIT_S)))

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes
            if self._is_shown and self._bar is None:
                most = show_bytes(self.num_listed_bytes)
                self._bar = tqdm(
                    desc=f"fetch (at most {most})", unit="B", unit_scale=True, dynamic_ncols=True
                )
            if self._bar is not None:
                self._bar.update(num_bytes)

    def close(self) -> None:
        """Remove the fetched blocks."""
        self.cache.close()
        if self._bar is not None:
            self._bar.close()
            self._bar = None
