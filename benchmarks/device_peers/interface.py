"""What `gpu_peers.py` asks of a system whose table is on a device. NumPy only.

One adapter per system (`gear.py`, `torchrl.py`, ...) derives from `Table` with the code that its
user would write. It runs in an environment of its own, so this file imports no system and no torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from peers.interface import Array, NotOfferedError, Rows
from speed import work

ALPHA = 0.6
BETA = 0.4
ROW = 16  # float32 values of a step of a window: 64 bytes
CHUNK = 50_000  # transitions of a call that fills a table
Call = Callable[[], object]
EAGER = "eager"
COMPILED = "compiled"
CAPTURED = "captured"
BOTH = "compiled and captured"
FORMS = (EAGER, COMPILED, CAPTURED, BOTH)
ADD = "add"
SAMPLE = "sample"
UPDATE = "update"
ADD_AND_SAMPLE = "add and sample"
ALL = "add, sample and update"
# Of a PPO: a roll-out is read in so many epochs of so many minibatches.
NUM_EPOCHS = 5
NUM_MINIBATCHES = 4
EPOCHS = f"{NUM_EPOCHS} epochs of {NUM_MINIBATCHES} minibatches"


@dataclass(frozen=True)
class Case:
    """A table, and the calls on it.

    Args:
        device: "cuda", or "cpu".
        items: Transitions of 105 bytes that fill the table; steps of 64 bytes for windows.
        batch: B.
        prioritized: Whether items have priorities.
        added: Transitions that one call adds.
        length: Steps of a window; 1: transitions.
        rollout: Steps of each environment in a roll-out, which is all that the table holds, and
            what a call adds. 0: no roll-outs.
    """

    device: str
    items: int
    batch: int
    prioritized: bool = False
    added: int = 256
    length: int = 1
    rollout: int = 0

    @property
    def num_envs(self) -> int:
        """Return the environments of a roll-out."""
        return self.items // self.rollout

    @property
    def name(self) -> str:
        """Name it as the tables of the pages do."""
        if self.length > 1:
            return f"windows of {self.length}, B = {self.batch:,}"
        if self.rollout:
            return f"roll-outs of {self.num_envs:,} x {self.rollout}, B = {self.batch:,}"
        kind = "prioritized" if self.prioritized else "uniform"
        return f"{kind}, B = {self.batch:,}"

    @property
    def works(self) -> tuple[str, ...]:
        """Return what is timed."""
        if self.length > 1:
            return (SAMPLE,)
        if self.rollout:
            return (ADD, EPOCHS)
        if self.prioritized:
            return (ADD, SAMPLE, UPDATE, ALL)
        return (ADD, SAMPLE, ADD_AND_SAMPLE)

    def content(self) -> Iterator[Rows]:
        """Yield the transitions that fill the table, by number, or its trajectories of EPISODE
        steps.
        """
        if self.length > 1:
            for first in range(0, self.items, work.EPISODE):
                yield {"row": window_rows(np.arange(first, first + work.EPISODE))}
            return
        chunk = self.items if self.rollout else CHUNK
        for first in range(0, self.items, chunk):
            yield work.steps(first, min(chunk, self.items - first))


class Table(ABC):
    """A system's table on a device, full of `case.content()`.

    Its calls read fixed inputs: the transitions of `offer`, the priorities of `report`.

    Attributes:
        period: A block holds a multiple of so many calls.
        is_permutation: Whether `period` samples are each item once.
        plain: The form in which checks draw and update.
        note: What a reader of its rows must know.
    """

    period = 1
    is_permutation = False
    plain = EAGER
    note = ""

    @abstractmethod
    def made(self, form: str, work: str) -> Call:
        """Return the call of a work in a form; NotOfferedError where the system has none."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for the device."""

    def host_waits(self, call: Call) -> int | None:
        """Count the times that the host waits for the device in a call; None: not known here."""
        return None

    def graph_breaks(self) -> int | None:
        """Count where the compiler left the last compiled call; None: it reports nothing."""
        return None

    @abstractmethod
    def offer(self, rows: Rows) -> None:
        """Set the transitions that the next adds add. [added, ...] each."""

    def minibatches(self) -> Iterator[None]:
        """Read the roll-out in NUM_EPOCHS epochs; `batch` returns each minibatch in turn."""
        raise NotOfferedError

    def report(self, priorities: Array) -> None:
        """Set the priorities that the next updates set. [B], float32."""
        raise NotOfferedError

    @abstractmethod
    def batch(self) -> Rows:
        """Return columns of the last batch: `observation` and others, or `row` of windows."""

    @abstractmethod
    def stored(self) -> Array:
        """Return the numbers of the transitions in the table. [items]."""

    def close(self) -> None:  # noqa: B027  (most need none)
        """Free it."""


def window_rows(number: Array) -> Array:
    """Return steps of windows, made from their numbers. [...] -> [..., ROW], float32."""
    return (number[..., None] + np.arange(ROW) / 64).astype(np.float32)


def numbers(batch: Rows) -> Array:
    """Return the number of each sample of a batch: of its transition, or of its first step. [B]."""
    first = batch["row"][:, 0, 0] if "row" in batch else batch["observation"][:, 0]
    return np.asarray(first).astype(np.int64)


def wrong_rows(case: Case, batch: Rows) -> str:
    """Return what is wrong with a batch's content; "" if nothing is."""
    number = numbers(batch)
    if len(number) != case.batch:
        return f"a batch has {len(number)} samples instead of {case.batch}"
    if case.length > 1:
        whole = number[:, None] + np.arange(case.length)
        if not np.array_equal(batch["row"], window_rows(whole)):
            return "windows hold other steps"
        if (number % work.EPISODE + case.length > work.EPISODE).any():
            return "windows cross the end of a trajectory"
        return ""
    expected = work.transitions(number)
    wrong = [name for name in batch if not np.array_equal(batch[name], expected[name])]
    return f"rows are mixed up in {', '.join(wrong)}" if wrong else ""
