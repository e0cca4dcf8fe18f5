"""The sending thread of a remote writer: sends batches, resumes after lost connections, collects refusals."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_gear.errors import GearError, LostNodeError, PeerError
from deepspeed_gear.remote import gateway_messages
from deepspeed_gear.remote.connection import Connection, ConnectionLost, raise_error
from deepspeed_gear.remote.send_queue import QueuedTrajectory, SendQueue
from deepspeed_gear.schema import Schema

LOG = logging.getLogger("deepspeed_gear")
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
_STOP_S = 2.0  # longest that the end of a process waits for a call


@dataclass(frozen=True)
class SendOptions:
    """Options of sending trajectories.

    Args:
        batch_bytes: A batch is sent when it has so many bytes.
        linger_s: Or when its first trajectory has waited so long.
        buffer_bytes: Buffer of unacknowledged trajectories; `add` waits when it is full.
    """

    batch_bytes: int = 2 << 20
    linger_s: float = 0.05
    buffer_bytes: int = 64 << 20


class RetryPolicy:
    """Retries of lost calls: with ever longer pauses, until there was no answer for `timeout_s`.

    Args:
        what: Name of the server in the error.
        timeout_s: Longest time without an answer.
    """

    def __init__(self, what: str, timeout_s: float) -> None:
        self._what, self._timeout_s = what, timeout_s
        self._pause_s = _FIRST_PAUSE_S
        self._until: float | None = None

    def reset(self) -> None:
        """Reset pause and deadline after an answer."""
        self._pause_s, self._until = _FIRST_PAUSE_S, None

    def wait(self, error: ConnectionLost, stopped: threading.Event) -> None:
        """Wait before the next attempt.

        Raises:
            LostNodeError: There was no answer for too long.
        """
        now = time.monotonic()
        self._until = now + self._timeout_s if self._until is None else self._until
        if now > self._until:
            rule = f"must answer within {self._timeout_s:g} s"
            raise LostNodeError(self._what, rule, None, f"does it run, and is the url right? {error}")
        stopped.wait(self._pause_s * random.uniform(0.5, 1.0))  # so that many writers do not retry at once
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)


def end_session(line: Connection, who: Mapping[str, str]) -> None:
    """Close a writer's session with its gateway, if the gateway answers."""
    try:
        line.call("bye", who, _STOP_S)
    except (ConnectionLost, GearError):
        LOG.debug("a writer's session stays open until it expires: its last call had no answer")


class Sender:
    """Sends the trajectories of a queue, in a thread of its own.

    One batch is under way at a time: the next is sent when the gateway has added or refused it. So a table
    that blocks fills the queue, and a resumed connection sends at most one batch again.

    Args:
        line: Connection to the gateway.
        who: Gateway and client, in the header of every call.
        options: Sizes and delays of batches.
        timeout_s: Longest time without any answer, in seconds.
    """

    def __init__(
        self,
        line: Connection,
        schema: Schema,
        who: Mapping[str, str],
        outbox: SendQueue,
        options: SendOptions,
        timeout_s: float,
    ) -> None:
        self._line, self._schema, self._who, self._outbox = line, schema, who, outbox
        self._options, self._timeout_s = options, timeout_s
        self._patience = RetryPolicy(f"gateway {line.url}", timeout_s)
        self._asks = False  # the last batch is pending, or its state unknown: ask before the next is sent
        self._upto = -1
        self.refused: list[tuple[int, GearError]] = []
        self.num_lost = 0  # calls
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gear-send", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Send nothing any more; safe to call twice."""
        self._stopped.set()
        self._outbox.close()
        self._thread.join(_STOP_S)

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                items = self._outbox.batch(
                    self._options.batch_bytes, self._options.linger_s, gateway_messages.IDLE_S
                )
                if items is None:
                    break
                if items:
                    self._send(items)
                else:
                    self._keep_session()
            end_session(self._line, self._who)
        except GearError as error:
            self._outbox.fail(self._with_loss(error))
        except Exception as error:
            LOG.exception("a remote writer's thread failed")
            self._outbox.fail(PeerError(f"gateway {self._line.url}", "must be reachable", None, repr(error)))
        finally:
            self._line.hang_up()

    def _send(self, items: list[QueuedTrajectory]) -> None:
        """Send a batch, or request the state of the last one."""
        header = {**self._who, "known": self._upto}
        try:
            if self._asks:
                answer = self._line.call("ask", header, self._timeout_s)
            else:
                answer = self._line.call("put", header, self._timeout_s, self._schema, items)
        except ConnectionLost as lost:
            self._asks = True
            self.num_lost += 1
            self._outbox.settle(-1, is_busy=False)
            self._patience.wait(lost, self._stopped)
            return
        self._patience.reset()
        self._take(answer)
        self._stopped.wait(answer["wait_s"])

    def _keep_session(self) -> None:
        """Call the gateway without anything to send, so that the session does not expire.

        Raises:
            GearError: The gateway ends, or is another.
        """
        try:
            self._take(self._line.call("ask", {**self._who, "known": self._upto}, self._timeout_s))
        except ConnectionLost:
            LOG.debug("an idle remote writer got no answer")  # the next batch retries

    def _take(self, answer: Mapping[str, Any]) -> None:
        """Process an answer: collect refusals, and release acknowledged trajectories.

        Raises:
            GearError: The gateway ends, or is another.
        """
        if "upto" in answer:
            new = [entry for entry in answer["refused"] if entry[0] > self._upto]
            self.refused += [(number, gateway_messages.error_from_json(parts)) for number, parts in new]
            self._upto, self._asks = answer["upto"], answer["busy"]
            self._outbox.settle(self._upto, answer["busy"])
        raise_error(answer)

    def _with_loss(self, error: GearError) -> GearError:
        """Return an error with the numbers of unacknowledged trajectories in its remedy."""
        left = self._outbox.unacknowledged
        if not left:
            return error
        text = f"trajectories {left.start} to {left.stop - 1} of this writer are not acknowledged"
        remedy = f"{error.remedy}; {text}" if error.remedy else text
        return type(error)(error.name, error.rule, error.value, remedy)
