"""RemoteRolloutWorker: leases and commits from a machine without a store, through a gateway."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data import opaque_rows
from deepspeed_gear.data.media import MediaSpec
from deepspeed_gear.data.media_digests import MediaItem
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.errors import DataError, GearError, StoreError, show_bytes
from deepspeed_gear.remote import gateway_messages
from deepspeed_gear.remote.connection import Connection, ConnectionLost
from deepspeed_gear.remote.gateway_messages import (
    as_sent,
    decode,
    encode,
    lease_words,
    trajectory_bytes,
)
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.prompt_ledger import LeaseRecord
from deepspeed_gear.timeouts import check_timeout
from deepspeed_gear.writer.group_members import listed_trajectories
from deepspeed_gear.writer.rollout_worker import LeaseLedger, LeaseWorker


class RemoteLedger(LeaseLedger):
    """The prompt ledger of a gateway's table. Each call is executed once, despite lost connections.

    A session ends `timeout_s` (at least 1 s) after the last call; a background thread makes calls
    in between. The next call begins a new session, which may be with another gateway.

    Thread safety: any thread may call; calls are made one after the other.
    """

    def __init__(self, line: Connection, timeout_s: float) -> None:
        self._line = line
        self._timeout_s = timeout_s
        self._number = 0  # number of the last call: the gateway does each number once
        self._grace_s = min(max(timeout_s, 1.0), gateway_messages.SESSION_S)
        self._begin()
        self._lock = threading.Lock()  # around a call
        self._stopped = threading.Event()
        threading.Thread(target=self._keep_session, name="gear-keep", daemon=True).start()

    def _begin(self) -> None:
        """Begin a session; run, schema and prompts of the gateway may have changed."""
        self._hello = self._line.begin_session(self._timeout_s, grace_s=self._grace_s)
        self._schema = Schema.from_json(self._hello["schema"])
        self._prompts = Schema.from_json(self._hello["prompts"])
        self._media = MediaSpec.of_json(self._schema, self._hello["media"])

    @property
    def keep_bytes(self) -> int:
        return int(self._hello["keep_bytes"])

    def lease(self, count: int, timeout_s: float) -> list[tuple[LeaseRecord, dict[str, Any]]]:
        until = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, until - time.monotonic())
            answer = self._call(do="lease", count=count, wait_s=left_s)
            if answer["leases"] or not left_s:
                break
            time.sleep(min(answer["wait_s"], left_s))
        prompts = [prompt for _, prompt in decode(self._prompts, answer["content"])]
        for column in self._prompts:
            for prompt in prompts if column.is_opaque else ():
                prompt[column.name] = opaque_rows.decode(prompt[column.name], column, column.name)
        run = str(self._hello["run"])
        leases = [
            LeaseRecord(
                entry, token, number, version, attempt, base64.b64decode(kept), run, place=place
            )
            for entry, token, number, version, attempt, kept, place in answer["leases"]
        ]
        return list(zip(leases, prompts, strict=True))

    def renew(self, lease: LeaseRecord) -> None:
        self._call(do="renew", lease=lease_words(lease), more=())

    def keep(self, lease: LeaseRecord, data: bytes) -> None:
        self._call(do="keep", lease=lease_words(lease), more=(), batch=data)

    def fail(self, lease: LeaseRecord, reason: str, retry: bool) -> None:
        self._call(do="fail", lease=lease_words(lease), more=(reason, retry))

    def commit(self, lease: LeaseRecord, members: Sequence[Any]) -> list[int]:
        name = f"the group of prompt {lease.number}"
        given, counts = listed_trajectories(name, members, self._hello["member"])
        names = frozenset(self._schema.names)
        number = {str(self._hello["group"]): np.int64(lease.number)}
        for one in given:
            arguments.mapping(f"{name}: trajectory", one, "give rows by column")
        if self._hello["place"] is not None:
            number[str(self._hello["place"])] = np.int64(lease.place)
        flat = [flatten(name, {**number, **one}, names) for one in given]
        items = dict[int, MediaItem]()  # each comes with the first trajectory that names it
        sent = [as_sent(name, self._schema, self._media, one, items) for one in flat]
        num_bytes = sum(map(trajectory_bytes, sent))
        most_bytes = int(self._hello["max_message_bytes"])
        if num_bytes > most_bytes:
            rule = f"must have at most {show_bytes(most_bytes)}, the gateway's --max-message"
            raise DataError(name, rule, show_bytes(num_bytes), "raise --max-message")
        absent = [[c.name for c in self._schema.late_columns if c.name not in one] for one in flat]
        call = {"lease": lease_words(lease), "more": (), "absent": absent, "counts": counts}
        batch = encode(self._schema, list(enumerate(sent)))
        return list(self._call(do="commit", **call, batch=batch)["ids"])

    def _call(self, batch: Any = None, **call: Any) -> dict[str, Any]:
        """Make a call until the gateway answers, in this session or another; raises its error."""
        with self._lock:
            self._number += 1
            sent = batch
            while not self._stopped.is_set():
                header = {**self._hello["who"], **call, "number": self._number}
                answer = self._line.call_again("put", header, self._timeout_s, sent)
                if "unknown" in answer:
                    self._begin()
                elif "busy" not in answer:
                    return answer
                self._stopped.wait(answer.get("wait_s", 0.0))
                # The gateway has the batch of a commit that is still being done.
                sent = None if answer.get("busy") == self._number else batch
        raise StoreError("the rollout worker", "must be open", None, "it was closed")

    def _keep_session(self) -> None:
        """Call before the session ends, where the worker does not."""
        while not self._stopped.wait(self._grace_s / 8):
            with self._lock, suppress(ConnectionLost, GearError):  # the next call raises it
                self._line.call("put", self._hello["who"], self._grace_s / 8)

    def close(self) -> None:
        """End the session, and with it its leases. Safe to call twice."""
        if not self._stopped.is_set():
            self._stopped.set()
            with self._lock:
                self._line.end_session(self._hello["who"])


class RemoteRolloutWorker(LeaseWorker):
    """Leases prompts of a table on another machine, through the gateway of `gear serve`.

    It works like RolloutWorker, with the same leases. Each call is executed once, even if
    connections are lost.

    The leases are returned when the worker closes or when its session ends. A session ends with the
    gateway, or `timeout_s` (at least 1 s) after the worker's last call; a background thread makes
    calls while the worker generates. The next call begins a new session. If the store outlives its
    job, leases of an ended session may still be committed until their prompts are leased again.

    Thread safety: one thread at a time. After a fork, connect again.
    """

    @classmethod
    def connect(cls, url: str, *, timeout_s: float = 60.0, **options: Any) -> RemoteRolloutWorker:
        """Connect to a gateway.

        Args:
            url: As in `RemoteWriter.connect`.
            timeout_s: Longest time without an answer, in seconds; also how long the session lasts
                without a call.
            **options: `token`, `ca` and `insecure`, as in `RemoteWriter.connect`.

        Returns:
            A connected worker.

        Raises:
            ConfigError: An argument is wrong.
            StoreError: The token is wrong.
            LostNodeError: No gateway answers within `timeout_s`.
        """
        line = Connection(url, **options)
        return cls(RemoteLedger(line, check_timeout("timeout_s", timeout_s)))
