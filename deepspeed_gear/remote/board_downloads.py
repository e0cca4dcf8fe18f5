"""The gateway's side of a policy board: copies of its versions, their readers, and chunks."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa

import deepspeed_gear.arguments as arguments
from deepspeed_gear.actors.board_search import BoardSearch
from deepspeed_gear.actors.policy_board import PolicyBoard
from deepspeed_gear.errors import DataError, StoreError, StoreGoneError
from deepspeed_gear.remote import gateway_messages
from deepspeed_gear.remote.gateway_messages import CHUNK_BYTES, SAME_VERSION, client_name

MOST_COPIES = 2  # versions that are held at once
READER_S = 30.0  # a reader without a call for so long has ended
HOLD_S = 600.0  # a copy is held for so long while another reader waits for a newer version
_NAME = "remote policy board"  # of clients, in errors
_SEARCH_S = 0.1  # shortest time between two looks for a board
_MOST_READERS = 4096  # of a copy


class VersionCopy:
    """A version of a board in the gateway's own memory, where no publication overwrites it."""

    def __init__(self, board: PolicyBoard) -> None:
        self.board = board.name
        self._values = np.empty(board.tensors.num_bytes, np.uint8)
        self.version, self.checksum = board.copy_newest(self._values)
        self.since = self._called_at = time.monotonic()
        self._readers = dict[str, float]()  # clients that download it, and when they called last
        self.num_bytes = len(self._values)
        self.num_chunks = -(-self.num_bytes // CHUNK_BYTES)
        self._digests: list[str | None] = [None] * self.num_chunks  # made by the first reader

    def admit(self, client: str) -> None:
        """Add a client to the readers."""
        if len(self._readers) >= _MOST_READERS and client not in self._readers:
            rule = f"must be downloaded by at most {_MOST_READERS} processes at once"
            remedy = "let one worker of a machine load the weights, or start another gateway"
            raise StoreError("the policy board", rule, len(self._readers), remedy)
        self._called_at = time.monotonic()
        self._readers[client] = self._called_at

    def end(self, client: str) -> None:
        """Remove a client, which has all chunks, from the readers."""
        self._readers.pop(client, None)

    def has_readers(self) -> bool:
        """Return whether a client downloads it; forget those that have ended."""
        before = time.monotonic() - READER_S
        self._readers = {client: at for client, at in self._readers.items() if at > before}
        return bool(self._readers)

    @property
    def is_idle(self) -> bool:
        """Whether no client has downloaded it for a time."""
        return not self.has_readers() and self._called_at < time.monotonic() - READER_S

    def chunk(self, index: int) -> tuple[str, memoryview]:
        """Return the SHA-256 of a chunk, in hex, and its bytes."""
        part = self._values[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES].data
        digest = self._digests[index] or hashlib.sha256(part).hexdigest()
        self._digests[index] = digest
        return digest, part


class BoardDownloads:
    """Serves the versions of a run's policy board to remote workers, in chunks.

    A download is of one version, which the gateway copies from shared memory: so it can be
    completed although newer versions are published meanwhile. At most `MOST_COPIES` versions are
    held. While readers download all of them, others get the newest of these, if they do not have
    it yet.

    Thread safety: any thread may call any method.

    Args:
        run_id: Id of the run.
        check: Raises if the gateway has ended.
    """

    def __init__(self, run_id: str, check: Callable[[], None]) -> None:
        self._search = BoardSearch(None, [run_id])
        self._check = check
        self._board: PolicyBoard | None = None
        self._looked_at = -_SEARCH_S
        self.copies: list[VersionCopy] = []  # the oldest first
        self._lock = threading.Lock()

    def state(self, header: Mapping[str, Any], _: pa.Buffer) -> dict[str, Any]:
        """Answer a call for the state of the board.

        Returns:
            The answer: `board`, its name (None: the run has none yet); `newest`, the number of its
            newest version; `published`; and `tensors`, unless the client knows this board.
        """
        self._check()
        gateway_messages.check_version(_NAME, header.get("version"))
        with self._lock:
            board = self._current()
            if board is None:
                return {"board": None}
            answer = {"newest": board.version, "published": board.is_published}
            return answer | self._name(board, header)

    def begin(self, header: Mapping[str, Any], _: pa.Buffer) -> dict[str, Any]:
        """Answer a call that begins or continues a download.

        The header has the `client`; `known`, the name of its board; `loaded`, the version of this
        board that it has; and `partial`, the version that it has in part.

        Returns:
            The answer: `board` and `tensors` as for `state`; and where there is a version that the
            client does not have, its `version`, `checksum`, `num_bytes` and `chunk_bytes`.
        """
        self._check()
        client = client_name(_NAME, header)
        with self._lock:
            board = self._current()
            if board is None:
                return {"board": None}
            is_known = header.get("known") == board.name
            loaded = arguments.count("loaded", header.get("loaded"), 0) if is_known else 0
            copy = self._copy(board.name, header.get("partial")) if is_known else None
            copy = copy or self._newer(board, loaded)
            answer = self._name(board, header)
            if copy is not None:
                copy.admit(client)
                answer |= {"version": copy.version, "checksum": copy.checksum}
                answer |= {"num_bytes": copy.num_bytes, "chunk_bytes": CHUNK_BYTES}
            return answer

    def chunk(self, header: Mapping[str, Any], _: pa.Buffer) -> dict[str, Any]:
        """Answer a call for a chunk of a version.

        Returns:
            The answer: `sha256` and `content`; or `gone`, if the version is not held any more.
        """
        self._check()
        client = client_name(_NAME, header)
        index = arguments.count("chunk", header.get("chunk"), 0)
        with self._lock:
            copy = self._copy(header.get("board"), header.get("of"))
            if copy is None:
                return {"gone": True}
            if index >= copy.num_chunks:
                rule = f"must be below {copy.num_chunks}"
                raise DataError("chunk", rule, index, SAME_VERSION)
            copy.admit(client)
            if index == copy.num_chunks - 1:
                copy.end(client)
        digest, content = copy.chunk(index)
        return {"sha256": digest, "content": content}

    def expire(self) -> None:
        """Free the copies that no client downloads any more."""
        with self._lock:
            self.copies = [copy for copy in self.copies if not copy.is_idle]

    def close(self) -> None:
        """Detach from the board, and free all copies. Safe to call twice."""
        with self._lock:
            self.copies.clear()
            if self._board is not None:
                self._board.close()

    def _current(self) -> PolicyBoard | None:
        """Return the run's board: the one that has a publisher, else the last one that had."""
        now = time.monotonic()
        is_published = self._board is not None and self._board.is_published
        if not is_published and now >= self._looked_at + _SEARCH_S:
            self._looked_at = now
            name = self._search.find()
            if name is not None:
                with suppress(StoreGoneError):  # its publisher may have ended since
                    board = PolicyBoard.attach(name=name)
                    if self._board is not None:
                        self._board.close()
                    self._board = board
        return self._board

    @staticmethod
    def _name(board: PolicyBoard, header: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of an answer that name the board."""
        if header.get("known") == board.name:
            return {"board": board.name}
        return {"board": board.name, "tensors": board.tensors.to_json()}

    def _copy(self, board: object, version: object) -> VersionCopy | None:
        """Return the copy of a version, if it is held."""
        known = {(copy.board, copy.version): copy for copy in self.copies}
        return known.get((str(board), version)) if isinstance(version, int) else None

    def _newer(self, board: PolicyBoard, loaded: int) -> VersionCopy | None:
        """Return a copy of the newest version that a client can get; None: it has this version."""
        newest = board.version
        if newest == loaded:
            return None
        copy = self._copy(board.name, newest)
        if copy is None and self._make_place():
            copy = VersionCopy(board)
            self.copies.append(copy)
        if copy is None:
            copy = self.copies[-1]
        return copy if copy.board == board.name and copy.version > loaded else None

    def _make_place(self) -> bool:
        """Make a place for one more copy; False: readers download all that are held."""
        if len(self.copies) < MOST_COPIES:
            return True
        before = time.monotonic() - HOLD_S
        for copy in self.copies:
            if not copy.has_readers() or copy.since < before:
                self.copies.remove(copy)
                return True
        return False
