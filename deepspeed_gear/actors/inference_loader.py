"""The inference loader: collects simulators' requests for actions into batches for a policy."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.actors.inference_mailbox import InferenceMailbox, MailboxPlaces, PlaceState
from deepspeed_gear.errors import ConfigError, DataError, StoreError
from deepspeed_gear.replay.replay import Replay
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.native_rows import as_tensor
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.timeouts import check_timeout
from deepspeed_gear.writer.inserter import refuse_read_only
from deepspeed_gear.writer.open_rows import ColumnRows
from deepspeed_gear.writer.step_columns import StepColumns

_LENGTH = 256
# Roles of columns that only a simulator fills.
_MEASURED = ("reward", "terminated", "truncated")


class InferenceRequest:
    """A batch of requests: the inputs of n simulators, and `reply` for the answers.

    `len()` is n; an empty batch is false.
    """

    def __init__(self, loader: InferenceLoader, places: np.ndarray) -> None:
        mailbox = loader.mailbox
        self._loader = loader
        self._places = places
        self._open = True
        self._rows = mailbox.rows[places]
        self._stamps = mailbox.stamps[places]
        #: Numbers of the simulators, fixed while they are attached. [n], int64.
        self.simulators = torch.from_numpy(places)
        rows = torch.from_numpy(self._rows)
        self._columns = {
            name: torch.index_select(column, 0, self.simulators if single else rows).to(
                loader.device
            )
            for name, (column, single) in loader._asked.items()
        }
        #: Time step of each episode; 0: it begins. [n], int64.
        self.timestep = torch.from_numpy(mailbox.timesteps[places])

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, column: str) -> torch.Tensor:
        """Return an input column, on the loader's device. [n, *shape], a copy."""
        return self._columns[column]

    def keys(self) -> tuple[str, ...]:
        """Return the names of the input columns."""
        return tuple(self._columns)

    def reply(self, **columns: Any) -> None:
        """Write the answers and release the simulators, except those that have died.

        Args:
            **columns: Each column that the policy computes. [n, *shape], on any device.

        Raises:
            DataError: A column is missing, unknown or does not fit; nothing has changed.
            StoreError: The request was answered before, or the loader is closed.
        """
        mailbox = self._loader.mailbox
        answers = self._loader._answers
        places = self._places
        if not self._loader._finalizer.alive:
            raise StoreError(mailbox.name, "must be open", None, "it was closed")
        if not self._open:
            raise StoreError(
                "a request",
                "must be answered only once",
                remedy="take the next request from the loader",
            )
        wrong = sorted({column.name for column in answers.columns} ^ set(columns))
        if wrong:
            wanted = [column.name for column in answers.columns]
            rule = f"must be one of the answers, all of which must be given: {wanted}"
            raise DataError(
                f"{mailbox.name}: column {wrong[0]}",
                rule,
                remedy="give every answer column, and no others",
            )
        # Places of processes that have ended meanwhile may be used again.
        valid = (mailbox.states[places] == PlaceState.TAKEN) & (
            mailbox.stamps[places] == self._stamps
        )
        values = []
        for value in (columns[column.name] for column in answers.columns):
            if isinstance(value, torch.Tensor):  # an array over the same memory where possible
                value = value.detach().cpu()
                if value.dtype != torch.bfloat16:  # numpy has none
                    value = np.ascontiguousarray(value.numpy())
            values.append(value)
        answers.put(values, np.where(valid, self._rows, -1))
        mailbox.answered(places[valid])
        self._open = False


class InferenceLoader(ProcessBound):
    """An iterator over batches of simulators' requests, oldest first; closing it ends it.

    It yields `InferenceRequest`s. A batch is returned as soon as `batch_size` simulators wait, or
    all attached simulators wait, or the oldest one has waited for `timeout` seconds. If no request
    arrives for that long, the batch is empty (false), so that the program can do other work.

    Several batches may be open at the same time and may be answered in any order. The loader is
    closed together with its replay.

    Thread safety: one thread.

    Args:
        replay: The rank's replay, whose table takes writers.
        batch_size: Maximum number of requests in a batch.
        timeout: Longest time to wait for a batch to fill, in seconds; None: wait until every
            simulator has posted a request.
        table: Name of the table to which the simulators add; None: the sampled one.
        num_simulators: Maximum number of simulators that attach to this rank; None: twice
            `batch_size`, so that half of them act while the others wait.
        length: Number of steps for which each simulator has rows; None: the table's `max_length`,
            or 256. The rows of longer trajectories are moved aside, which costs another copy.
        asks: Names of the columns that the policy reads; None: the observations.
        answers: Names of the columns that the policy computes; None: the actions.

    Raises:
        ConfigError: An argument is wrong, or the table takes no writers.
        StoreError: The table holds a data set, or this rank already has a loader for it.
        StoreFullError: Shared memory is full.
    """

    def __init__(
        self,
        replay: Replay,
        batch_size: int,
        timeout: float | None = None,
        table: str | None = None,
        *,
        num_simulators: int | None = None,
        length: int | None = None,
        asks: Sequence[str] | None = None,
        answers: Sequence[str] | None = None,
    ) -> None:
        store = replay.store(table)
        refuse_read_only(store)
        name = store.spec.name
        schema = store.spec.schema
        config = replay.config
        if not store.spec.num_writers:
            raise ConfigError(
                f"gear.tables.{name}.writers",
                "must be positive for simulators to attach",
                0,
                "set it to the number of simulators",
            )
        self.batch_size = arguments.count("batch_size", batch_size)
        self.timeout_s = None if timeout is None else check_timeout("timeout", timeout)
        count = 2 * self.batch_size if num_simulators is None else num_simulators
        count = arguments.count("num_simulators", count)
        limit = config.resolved_tables[name].max_length
        steps = arguments.count("length", (limit or _LENGTH) if length is None else length)
        columns = _columns(schema, asks, answers)
        library = str(store.ops.native.__file__)
        steps = steps if limit is None else min(steps, limit)
        places = MailboxPlaces(name, schema, count, steps, *columns, config.timeout_s, library)
        peer = store.memory.peer
        huge_pages = config.shared_memory.huge_pages
        #: Where simulators post their requests; this rank takes and answers them.
        mailbox = self.mailbox = InferenceMailbox.create(places, store, peer, huge_pages)
        self.device = replay.device
        # Values of the columns that the policy reads, and whether they are by place (a column with
        # one value per trajectory) rather than by row.
        self._asked: dict[str, tuple[torch.Tensor, bool]] = {}
        for column in (schema[name] for name in places.asks):
            single = column.rows == "1"
            values = (mailbox.values if single else mailbox.columns)[column.name].reshape(
                -1, *column.shape
            )
            self._asked[column.name] = as_tensor(values, column.dtype), single
        given = [schema[column] for column in places.answers]
        self._answers = ColumnRows(given, mailbox.columns, mailbox.native)
        self._finalizer = weakref.finalize(self, mailbox.end)
        replay.close_with(self)

    @property
    def num_simulators(self) -> int:
        """Number of simulators that are attached."""
        return self.mailbox.num_taken

    def __iter__(self) -> InferenceLoader:
        return self

    def __next__(self) -> InferenceRequest:
        if not self._finalizer.alive:
            raise StopIteration
        return InferenceRequest(self, self.mailbox.take(self.batch_size, self.timeout_s))

    def close(self) -> None:
        """Close the loader; simulators that wait for it get a PeerError.

        Safe to call twice. It is also closed at exit.
        """
        self._finalizer()


def _columns(
    schema: Schema, asks: Sequence[str] | None, answers: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns that the policy reads and computes, in the schema's order."""
    taken = StepColumns(schema)
    free = [c.name for c in taken.results if c.role not in _MEASURED]
    asked = [c.name for c in taken.state if c.role == "observation"] if asks is None else asks
    given = [c.name for c in taken.results if c.role == "action"] if answers is None else answers
    once = [c for c in schema.trajectory_columns if c.is_tensor]
    seen = [column.name for column in (*taken.state, *once)]
    for what, names, known in (("asks", asked, seen), ("answers", given, free)):
        arguments.one_of(what, names, (list, tuple), "a list of columns")
        wrong = [name for name in names if name not in known]
        if wrong or not names:
            rule = f"must name some of {', '.join(known) or 'no columns: there are none'}"
            raise ConfigError(what, rule, wrong or "nothing", "name columns of the table's schema")
    reads = tuple(c.name for c in schema if c.name in asked)
    return reads, tuple(c.name for c in schema if c.name in given)
