"""RemotePolicyBoard: the policy board of a run on another machine, through a gateway."""

from __future__ import annotations

import hashlib
import time
import uuid
import zlib
from typing import Any

import numpy as np
from torch import nn

import deepspeed_gear.arguments as arguments
from deepspeed_gear.actors.board_search import CREATE
from deepspeed_gear.actors.board_tensors import BoardTensors, copy_tensors
from deepspeed_gear.actors.policy_board import BoardReader
from deepspeed_gear.errors import DataError, NotReadyError, StoreError, undo_on_error
from deepspeed_gear.remote import gateway_messages
from deepspeed_gear.remote.connection import Connection
from deepspeed_gear.remote.gateway_messages import SAME_VERSION
from deepspeed_gear.timeouts import check_timeout, wait_until

_SEARCH_S = 0.2  # between two calls while the run has no board
_MOST_FAULTS = 3  # times that a chunk may arrive with another checksum
_MOST_RESTARTS = 3  # times that the gateway may give up a version before it has arrived


class Download:
    """A version of which some chunks have arrived."""

    def __init__(self, board: str, answer: dict[str, Any]) -> None:
        self.board = board
        self.version = int(answer["version"])
        self._checksum = int(answer["checksum"])
        self.values = np.empty(int(answer["num_bytes"]), np.uint8)
        self._chunk_bytes = arguments.count("chunk_bytes", answer["chunk_bytes"])
        self.next = 0  # the first chunk that has not arrived
        self._num_faults = 0

    @property
    def is_complete(self) -> bool:
        """Whether all chunks have arrived."""
        return self.next * self._chunk_bytes >= len(self.values)

    @property
    def next_bytes(self) -> int:
        """Size of the next chunk."""
        return min(self._chunk_bytes, len(self.values) - self.next * self._chunk_bytes)

    def take(self, answer: dict[str, Any]) -> None:
        """Store the next chunk, unless its checksum is wrong: then it must be called for again.

        Raises:
            StoreError: The checksum was wrong too often.
        """
        content = np.frombuffer(answer["content"], np.uint8)
        digest = hashlib.sha256(content.data).hexdigest()
        if len(content) == self.next_bytes and digest == answer["sha256"]:
            begin = self.next * self._chunk_bytes
            self.values[begin : begin + len(content)] = content
            self.next += 1
            self._num_faults = 0
            return
        self._num_faults += 1
        if self._num_faults >= _MOST_FAULTS:
            rule = f"must arrive with its checksum within {_MOST_FAULTS} calls"
            remedy = "the connection or a machine's memory changes bytes: look for a faulty device"
            raise StoreError(f"chunk {self.next} of version {self.version}", rule, None, remedy)

    def check(self) -> None:
        """Compare the checksum of the whole version with the publisher's."""
        if zlib.crc32(self.values.data) != self._checksum:
            rule = "must have the checksum of its publisher"
            remedy = "a machine's memory changes bytes: look for a faulty device"
            raise StoreError(f"version {self.version} of the policy board", rule, None, remedy)


class RemotePolicyBoard(BoardReader):
    """Loads the weights of a run on another machine, through the gateway of `gear serve`.

    It works like a PolicyBoard that was attached to. A version arrives in chunks with checksums. A
    lost connection is made again, and the download continues at the chunk that was lost; the module
    changes once the whole version is here.

    Versions that are published during a download are loaded by the next call. While the network is
    slower than the publisher, versions are left out.

    Thread safety: one thread at a time. After a fork, connect again.
    """

    def __init__(self, line: Connection, timeout_s: float, poll_s: float) -> None:
        self.loaded = 0
        self._line = line
        self._timeout_s = timeout_s
        self._poll_s = poll_s
        self._client = uuid.uuid4().hex
        self._board: str | None = None  # name of the board that `loaded` is of
        self._tensors = BoardTensors([])
        self._called_at: float | None = None  # when there was no newer version
        self._download: Download | None = None

    @classmethod
    def connect(
        cls, url: str, *, timeout_s: float = 60.0, poll_s: float = 0.1, **options: Any
    ) -> RemotePolicyBoard:
        """Connect to a gateway, and wait until its run has a board.

        Args:
            url: As in `RemoteWriter.connect`.
            timeout_s: Longest time without an answer, and longest wait for the board, in seconds.
            poll_s: `load_into` does not ask for a newer version for so long after there was none,
                in seconds.
            **options: `token`, `ca` and `insecure`, as in `RemoteWriter.connect`.

        Returns:
            A connected board.

        Raises:
            ConfigError: An argument is wrong.
            StoreError: The token is wrong, or the run has no board within `timeout_s`.
            LostNodeError: No gateway answers within `timeout_s`.
        """
        check_timeout("timeout_s", timeout_s)
        check_timeout("poll_s", poll_s)
        board = cls(Connection(url, **options), timeout_s, poll_s)
        with undo_on_error(board.close):
            if not wait_until(lambda: board._state()["board"], timeout_s, _SEARCH_S):
                rule = f"must have a policy board within {timeout_s:g} s"
                raise StoreError(f"the run of gateway {url}", rule, None, CREATE)
        return board

    @property
    def version(self) -> int:
        """Number of the newest version at the gateway. Cost: a call."""
        return int(self._state().get("newest", 0))

    @property
    def is_published(self) -> bool:
        """Whether the publisher is still attached. Cost: a call."""
        return bool(self._state().get("published", False))

    def load_into(self, module: nn.Module) -> int:
        """Copy the newest version into a module, as `PolicyBoard.load_into`.

        Without a newer version this is one call, and none within `poll_s` of the last.

        Args:
            module: As `PolicyBoard.load_into`.

        Returns:
            The number of the version that the module has now.

        Raises:
            DataError: The module has other parameters. Nothing has changed.
            StoreError: The gateway has ended, or a chunk arrives with a wrong checksum.
            LostNodeError: The gateway does not answer for `timeout_s`. The next call continues the
                download if the gateway still has the version.
            NotReadyError: The network is so slow that the gateway has given up the version.

        Cost: the bytes of the version once over the network, and once more in memory.
        """
        self._tensors.check(module)
        if self._called_at is not None and time.monotonic() < self._called_at + self._poll_s:
            return self.loaded
        for _ in range(_MOST_RESTARTS):
            download = self._begin()
            if download is None and not self.loaded:
                download = self._wait_for_version()
            if download is None:
                self._called_at = time.monotonic()
                return self.loaded
            state = self._tensors.check(module)  # the board may be another one
            if self._fetch(download):
                download.check()
                copy_tensors(state, self._tensors.views(download.values))
                self.loaded = download.version
                self._called_at = None
                return self.loaded
        rule = "must arrive while the gateway has it"
        remedy = "use a faster network, or publish less often"
        raise NotReadyError("a version of the policy board", rule, None, remedy)

    def _state(self) -> dict[str, Any]:
        header = {"version": gateway_messages.VERSION, "known": self._board}
        answer = self._line.call_again("board", header, self._timeout_s)
        self._note(answer)
        return answer

    def _note(self, answer: dict[str, Any]) -> None:
        """Take over the board of an answer, if it is another one."""
        name = answer["board"]
        if name is not None and name != self._board:
            self._tensors = BoardTensors.of_json(answer["tensors"])
            self._board = name
            self.loaded = 0
            self._download = None

    def _begin(self) -> Download | None:
        """Begin a download, or continue the one that was interrupted; None: nothing is newer."""
        partial = None if self._download is None else self._download.version
        header = {"client": self._client, "known": self._board, "loaded": self.loaded}
        answer = self._line.call_again("weights", {**header, "partial": partial}, self._timeout_s)
        self._note(answer)
        if "version" not in answer:
            return None
        if self._download is None or self._download.version != answer["version"]:
            if answer["num_bytes"] != self._tensors.num_bytes:
                rule = f"must have the {self._tensors.num_bytes} bytes of its tensors"
                raise DataError("a version of the board", rule, answer["num_bytes"], SAME_VERSION)
            self._download = Download(str(self._board), answer)
        return self._download

    def _wait_for_version(self) -> Download:
        """Begin a download as soon as there is a version."""
        download = wait_until(self._begin, self._timeout_s, _SEARCH_S)
        if download is None:
            rule = f"must have a version to download within {self._timeout_s:g} s"
            remedy = f"{CREATE}; other workers may still download the versions before"
            raise NotReadyError(f"the run of gateway {self._line.url}", rule, None, remedy)
        return download

    def _fetch(self, download: Download) -> bool:
        """Fetch the chunks that have not arrived; False: the gateway has given up the version."""
        header = {"client": self._client, "board": download.board, "of": download.version}
        while not download.is_complete:
            answer = self._line.call_again(
                "chunk",
                {**header, "chunk": download.next},
                self._timeout_s,
                answer_bytes=download.next_bytes,
            )
            if "gone" in answer:
                self._download = None
                return False
            download.take(answer)
        self._download = None
        return True

    def close(self) -> None:
        """End the connection. Safe to call twice."""
        self._download = None
        self._line.hang_up()
