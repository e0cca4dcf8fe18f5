"""The inference client: simulators request actions from a rank's policy via shared memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepspeed_gear.actors.inference_mailbox import SUFFIX, InferenceMailbox, PlaceState
from deepspeed_gear.errors import DataError, StoreError, undo_on_error
from deepspeed_gear.schema import Column
from deepspeed_gear.store.shared_memory import living
from deepspeed_gear.timeouts import check_timeout, wait_until
from deepspeed_gear.writer.autoreset_modes import Autoreset, resolve
from deepspeed_gear.writer.open_rows import OpenRows
from deepspeed_gear.writer.partial_publish import CompletedTrajectory
from deepspeed_gear.writer.step_columns import StepColumns
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter
from deepspeed_gear.writer.vector_writer import VectorWriter

_POLL_S = 0.02


class InferenceClient(VectorWriter):
    """N environments that get actions from an InferenceLoader and add steps to the store.

    Like `VectorWriter`, except that `step` takes no columns that the policy computes: the rank
    that answers a request writes them directly into the rows of the growing trajectory. Each row
    is written once there, and an episode is copied once, into the store.

    To step all environments together, call `reset` once, then repeat `act` and `step`. To step
    those that are ready, call `reset` and `post` once, then repeat `ready`, `answers`,
    `step(envs=...)` and `post(envs)`.

    Thread safety: one thread.

    Args:
        writer: A writer of the table, attached from another process or made by a rank. Closing it
            also closes this client.
        num_envs: Number of environments, N; or a vector environment, from which the number and the
            autoreset mode are read as in `TrajectoryWriter.vector_writer`.
        autoreset: As in `TrajectoryWriter.vector_writer`.
        wait_s: Longest wait for the InferenceLoader of a rank of this node, in seconds.

    Raises:
        DataError: As in `TrajectoryWriter.vector_writer`.
        StoreError: Within `wait_s` there is no loader, or none has N free places.
    """

    def __init__(
        self,
        writer: TrajectoryWriter,
        num_envs: Any,
        autoreset: Autoreset | None = None,
        wait_s: float = 60.0,
    ) -> None:
        count, mode = resolve(num_envs, autoreset)
        schema = writer.schema
        mailbox, places = attach_places(writer.parts[0].memory.path.name, count, wait_s)
        with undo_on_error(lambda: mailbox.leave(places)):
            open_rows = OpenRows(schema.step_columns, mailbox.columns, places, mailbox.native)
            super().__init__(writer, count, mode, open_rows)
        self._mailbox = mailbox
        self._places = places
        # The policy's columns are written by its rank: a step is complete without them.
        self._columns = StepColumns(schema, computed=mailbox.places.answers)
        self._result_rows = open_rows.rows(self._columns.results)
        self._answer_rows = open_rows.rows([schema[name] for name in mailbox.places.answers])
        self._timesteps = np.zeros(len(places), np.int64)  # within the episode
        # Full rows of places, moved here by environment: earlier steps of long episodes.
        self._aside: dict[int, list[dict[str, np.ndarray]]] = {}
        self._finalizer = weakref.finalize(self, mailbox.leave, places)
        writer.clients.add(self)

    def act(self, timeout_s: float = 60.0) -> dict[str, np.ndarray]:
        """Request actions for all environments, wait for the answers, and return them.

        After an error the requests stay posted: the next call waits for the same answers.

        Args:
            timeout_s: Longest wait, in seconds.

        Returns:
            Each column that the policy computes, by name. [N, *shape], copies. Environments whose
            next step only resets them have zeros.

        Raises:
            DataError: `reset` was not called first.
            PeerError: The loader was closed, or its process has died.
            NotReadyError: The loader has not answered within `timeout_s`.
        """
        self.post()
        self._mailbox.wait(self._places, self.num_envs, timeout_s)
        return self.answers()

    def post(self, envs: np.ndarray | Sequence[int] | None = None) -> None:
        """Post requests for environments that have not posted one yet, without waiting.

        Args:
            envs: Numbers of the environments, [n], int64; None: all.

        Raises:
            DataError: `reset` was not called first.
        """
        self._check_open()
        asking = self._all if envs is None else np.asarray(envs, np.int64)
        asking = asking[self._mailbox.states[self._places[asking]] == PlaceState.IDLE]
        if self._waits.any():
            # Environments whose next step ignores the action are ready without the policy.
            resting = asking[self._waits[asking]]
            asking = asking[~self._waits[asking]]
            if (self._next[resting] == self._open_rows.first[resting]).any():
                raise DataError(
                    "reset",
                    "must come first",
                    None,
                    "send the first observation of each environment with reset",
                )
            zeros = [
                np.zeros((len(resting), *c.shape), c.numpy_dtype) for c in self._answer_rows.columns
            ]
            self._answer_rows.put(zeros, self._next[resting] - 1)
            self._mailbox.states[self._places[resting]] = PlaceState.RESTING
        if len(asking):
            self._reserve_rows(asking)
            self._mailbox.post(
                self._places[asking], self._next[asking] - 1, self._timesteps[asking]
            )

    def ready(self, least: int = 1, timeout_s: float = 60.0) -> np.ndarray:
        """Wait until at least `least` environments have an answer or need none.

        Args:
            least: Number of environments to wait for.
            timeout_s: Longest wait, in seconds.

        Returns:
            Numbers of all environments that are ready. [n], int64.

        Raises:
            PeerError: The loader was closed, or its process has died.
            NotReadyError: Fewer environments are ready after `timeout_s`.
        """
        self._check_open()
        return np.flatnonzero(self._mailbox.wait(self._places, least, timeout_s))

    def answers(self, envs: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Return the policy's answers for environments that are ready.

        Args:
            envs: Numbers of the environments, [n], int64; None: all.

        Returns:
            Each column that the policy computes, by name. [n, *shape], copies.
        """
        return self._answer_rows.get(self._next[slice(None) if envs is None else envs] - 1)

    def reset(self, mask: np.ndarray | None = None, **columns: Any) -> list[CompletedTrajectory]:
        """Begin an episode in all or some environments, as `VectorWriter.reset` does.

        Raises:
            StoreError: One of the environments waits for an answer.
        """
        self._check_open()
        mask = None if mask is None else np.asarray(mask, bool)
        which = self._places[slice(None) if mask is None else mask]
        if (self._mailbox.states[which] < PlaceState.IDLE).any():
            raise StoreError(
                "reset", "must not be called while an answer is pending", None, "call act again"
            )
        completed = super().reset(mask, **columns)
        self._timesteps[slice(None) if mask is None else mask] = 0
        self._mailbox.states[which] = PlaceState.IDLE
        return completed

    def step(
        self,
        final: Mapping[str, Any] | None = None,
        envs: np.ndarray | None = None,
        *,
        publish: bool = False,
        **columns: Any,
    ) -> list[CompletedTrajectory]:
        """Add a step of environments that have acted, without the policy's columns.

        Arguments and result are those of `VectorWriter.step`.

        Raises:
            StoreError: One of the environments has no answer yet.
        """
        self._check_open()
        places = self._places if envs is None else self._places[envs]
        if not self._mailbox.are_ready(places).all():
            raise StoreError(
                "step",
                "must be called after the answers have arrived",
                None,
                "call act, or take those of ready",
            )
        given = self._columns.flat("step", columns)
        unwanted = [column.name for column in self._answer_rows.columns if column.name in given]
        if unwanted:
            raise DataError(
                f"column {unwanted[0]}", "must not be given", None, "the policy computes it"
            )
        self._take(final, envs, given)
        self._timesteps[slice(None) if envs is None else envs] += 1
        self._mailbox.states[places] = PlaceState.IDLE
        if publish:
            self._publish()
        return self._take_completed()

    def _set_values(self, values: Mapping[str, np.ndarray], which: Any) -> None:
        super()._set_values(values, which)
        for name, asked in self._mailbox.values.items():
            asked[self._places[which]] = self._values[name][which]

    def _begin(self, envs: np.ndarray) -> None:
        self._timesteps[envs] = -1  # the step that this is part of counts
        for env in envs.tolist() if self._aside else []:
            self._aside.pop(env, None)
            self._steps_before[env] = 0

    def _reserve_rows(self, envs: np.ndarray) -> None:
        """Ensure a free row for the next step of environments, so that `step` finds one."""
        # `_next` is first + 1 after `reset`, before any step, and one more after each step.
        used = self._next[envs] - self._open_rows.first[envs] - 1
        if self._max_length is not None:
            too_long = used + self._steps_before[envs] >= self._max_length
            if too_long.any():
                self._truncate(envs[too_long])
                used[too_long] = 0
        steps = self._open_rows.length
        for env in envs[used >= steps].tolist():
            # Move the full rows of a place into private memory, and continue from the last state.
            rows = {
                name: self._open_rows.of(name, env)[:steps].copy()
                for name in self._open_rows.arrays
            }
            self._aside.setdefault(env, []).append(rows)
            self._steps_before[env] += steps
            self._go_on(env, steps)

    def _steps_of(self, column: Column, env: int, num_steps: int) -> np.ndarray:
        rows = super()._steps_of(column, env, num_steps)
        aside = self._aside.get(env)
        return (
            rows
            if aside is None
            else np.concatenate([*(part[column.name] for part in aside), rows])
        )

    def _commit(self, env: int, num_steps: int, is_truncated: bool = False) -> None:
        super()._commit(env, num_steps, is_truncated)
        if self._aside.pop(env, None) is not None:
            self._steps_before[env] = 0

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise StoreError("the simulators", "must be open", None, "they were closed")

    def close(self) -> list[CompletedTrajectory]:
        """Release the places in the loader's mailbox. Safe to call twice and at exit.

        Of open trajectories only the published steps remain.
        """
        completed = super().close()
        self._finalizer()
        return completed


def attach_places(store: str, num_envs: int, wait_s: float) -> tuple[InferenceMailbox, np.ndarray]:
    """Attach to the store's loader with the most free places and claim places; wait for both."""
    most = -1

    def claim() -> tuple[InferenceMailbox, np.ndarray] | None:
        nonlocal most
        mailboxes = []
        for path in living(store.rpartition("-")[0]):
            if path.name.startswith(store + SUFFIX):
                with contextlib.suppress(StoreError):  # it has just ended, or is full
                    mailboxes.append(InferenceMailbox.attach(path.name))
        if not mailboxes:
            return None
        mailboxes.sort(key=lambda one: one.num_taken - one.places.count)  # most free places first
        places = mailboxes[0].claim(num_envs)
        is_claimed = len(places) == num_envs
        for mailbox in mailboxes[1:] if is_claimed else mailboxes:
            mailbox.close()
        most = max(most, len(places))
        return (mailboxes[0], places) if is_claimed else None

    claimed = wait_until(claim, check_timeout("wait_s", wait_s), _POLL_S)
    if claimed is not None:
        return claimed
    what = f"an inference loader of {store}"
    if most < 0:
        rule = f"must be open within {wait_s:g} s"
        raise StoreError(what, rule, None, "make an InferenceLoader in a rank")
    raise StoreError(what, f"must have {num_envs} free places", most, "raise num_simulators")
