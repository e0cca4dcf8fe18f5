"""Selection over the nodes that hold a table: each resolves its own draws and sends them to the
others.

Every node computes all coordinates, and resolves those in its own part of the total mass; then each
gets the resolutions of the samples that its ranks train on, and the rows that their windows read
(`ResolutionExchange`). Each selection begins with a round of status messages: all nodes make it, or
none does.

Nodes divide what the table's rate limiter admits: their writers have quotas of items. Selections
renew these; before the first one, after a load, and when `can_sample` asks, `may_select` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Final, NoReturn

import numpy as np
import torch

from deepspeed_gear.data.running_moments import merge
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.node_channel import NO_WORDS, NodeChannel, message_of
from deepspeed_gear.distributed.row_exchange.exchange_plan import ExchangePlan
from deepspeed_gear.distributed.row_exchange.resolution_exchange import (
    NodeSelection,
    ResolutionExchange,
    ResolutionSender,
)
from deepspeed_gear.errors import PeerError, StoreError
from deepspeed_gear.ops.records import LogEntry, Resolution, UpdateCount
from deepspeed_gear.outcome import Outcome
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.rate_limiting import NodeRate
from deepspeed_gear.sampling.selector import LocalSelector
from deepspeed_gear.sampling.stream_state import StreamState
from deepspeed_gear.sampling.sum_tree import items_of
from deepspeed_gear.store.prompt_ledger import Progress
from deepspeed_gear.store.records import Head
from deepspeed_gear.store.retention import UNLIMITED
from deepspeed_gear.store.table import Table

PACKED_REPORT_WORDS = 3
_NO_REPORTS = np.empty((0, LogEntry.NUM_WORDS), np.int64)
MOST_LEAVE_S = (
    10.0  # longest wait of a node that ends until the others have received its last status
)


class StatusMessage:
    """The status message of a node, the first of a joint selection."""

    NUMBER: Final = 0
    STATUS: Final = 1  # 1: it has failed, and an error's text follows
    STOP: Final = 2
    WAITED_US: Final = 3
    WAITING: Final = 4
    TOTAL: Final = 5
    ITEMS: Final = 6
    LEAST: Final = 7
    HIGHEST: Final = 8
    NUM_WORDS: Final = 9


class JointSelector(LocalSelector):
    """A selector whose selections begin with a status message of every node, failures included."""

    def __init__(self, state: StreamState, channel: NodeChannel) -> None:
        super().__init__(state, state.table.lock)
        self.channel = channel
        self._table = state.table
        self._num_nodes = channel.count
        self._index = channel.index
        self._statuses = np.zeros((self._num_nodes, StatusMessage.NUM_WORDS), np.int64)
        self._totals = np.zeros(self._num_nodes, np.int64)
        self._waiting = False
        self._number: int | None = None  # of the selection that is being made
        self.num_selections = 0
        #: How long the others have waited for each node. [S], float64, seconds.
        self.late_s = np.zeros(self._num_nodes)
        self._due: list[tuple[int, np.ndarray]] = []  # priority updates that the selection takes
        self._received: list[
            np.ndarray
        ] = []  # priority updates from each node, packed where it is a shard

    def _status_round(
        self, prepare: Callable[[], list[np.ndarray]], leaves: bool = False
    ) -> list[np.ndarray]:
        """Send and receive status messages; return each node's words of `prepare`.

        They are valid until the next round ends. If `prepare` raises, this node cannot make the
        selection; if it `leaves`, none after it.
        """
        after = [NO_WORDS] * self._num_nodes
        error: Exception | None = None
        try:
            after = prepare()
        except Exception as caught:
            error = caught
        words = self._status(error)
        words[StatusMessage.NUMBER] = -1 if self._number is None else self._number
        words[StatusMessage.STOP] = leaves or self.state.stop.is_set()
        messages = self.channel.begin([message_of(words, part.reshape(-1)) for part in after])()
        statuses = self._statuses = np.stack([part[: StatusMessage.NUM_WORDS] for part in messages])
        waited_us = statuses[:, StatusMessage.WAITED_US]
        # The node that has waited least was the last to arrive.
        self.late_s += (waited_us.max() - waited_us) * 1e-6
        expected = words[StatusMessage.NUMBER], False, False
        if (statuses[:, : StatusMessage.STOP + 1] != expected).any():
            self._raise_refusal(statuses, error)
        self._waiting = bool(statuses[:, StatusMessage.WAITING].any())
        self._totals = statuses[:, StatusMessage.TOTAL].copy()
        return [part[StatusMessage.NUM_WORDS :] for part in messages]

    def _raise_refusal(self, statuses: np.ndarray, error: Exception | None) -> NoReturn:
        """Raise the reason why a node does not make the selection that this one makes."""
        if statuses[:, StatusMessage.STOP].any():
            self.channel.note_left()
            if self.state.stop.is_set() or self._number is None:
                name = f"stream {self.spec.name}"
                raise StoreError(name, "must be open", None, "it was closed while it waited")
            node = int(np.nonzero(statuses[:, StatusMessage.STOP])[0][0])
            self.channel.raise_ended(node, f"it ended before global batch {self._number}")
        self._raise_failure(statuses, error)
        asked = {
            self.channel.name(i): number
            for i, number in enumerate(statuses[:, StatusMessage.NUMBER].tolist())
        }
        rule = "must ask for the same global batch"
        remedy = "all ranks must take the same batches in the same order"
        raise PeerError(f"stream {self.spec.name}: the nodes", rule, asked, remedy)

    def leave(self) -> None:
        """Send the other nodes that this one makes no further selection, unless one of them has
        sent that.
        """
        if not self.channel.left:
            self._number = None
            with self.channel.parting(MOST_LEAVE_S):
                self._status_round(lambda: [NO_WORDS] * self._num_nodes, leaves=True)
        self.channel.note_left(False)

    def _status(self, error: Exception | None = None) -> np.ndarray:
        """Return the status of this node's shard; failed with an error."""
        words = np.zeros(StatusMessage.NUM_WORDS, np.int64)
        words[StatusMessage.STATUS] = error is not None
        masses = self.masses
        priorities = self.state.priorities
        with self._table.lock:
            words[StatusMessage.TOTAL] = masses.total
            if priorities is None:
                words[StatusMessage.WAITING] = masses.waiting
            else:
                words[StatusMessage.ITEMS] = priorities.num_drawable
                words[StatusMessage.HIGHEST] = priorities.counts[UpdateCount.HIGHEST_PRIORITY]
                if priorities.rule.normalize == "table":
                    words[StatusMessage.LEAST] = priorities.least
        words[StatusMessage.WAITED_US] = int(self.channel.last_wait_s * 1e6)
        return words

    def _raise_failure(self, statuses: np.ndarray, error: Exception | None) -> None:
        """Raise if a node has failed: its own error there, an error with its text elsewhere."""
        own = None if error is None else Outcome.of(error)
        there = self.channel.first_failure(statuses[:, StatusMessage.STATUS], own)
        if there is not None:
            raise there if error is None else error

    def _apply_together(self, action: Callable[[], None]) -> None:
        """Change this node's masses, take the priority updates that are due, share the totals."""
        error: Exception | None = None
        try:
            with self._table.lock:
                action()
                if self._due:
                    self.state.with_priorities.reports.take(self._due)
        except Exception as caught:
            error = caught
        statuses = self.channel.all_gather(self._status(error))
        self._raise_failure(statuses, error)
        self._statuses = statuses
        self._totals = statuses[:, StatusMessage.TOTAL].copy()

    def _reports_due(self, number: int) -> np.ndarray:
        """Copy the priority updates of this node that precede a selection. [n, words], int64."""
        with self._table.lock:
            self._due = self.state.with_priorities.reports.due(number)
            return np.concatenate([_NO_REPORTS, *(rows for _, rows in self._due)])


class ReplicatedSelector(JointSelector):
    """Selects, by priorities, from a store that stays equal to those of all other nodes. In one
    thread.
    """

    def begin(self, number: int, entry: int, count: int) -> int | None:
        self._number = number
        received = self._status_round(lambda: [self._reports_due(number)] * self._num_nodes)
        self.num_selections += 1
        self._received = [words.reshape(-1, LogEntry.NUM_WORDS) for words in received if len(words)]
        return count

    def apply(self, number: int) -> int:
        self._apply_together(
            lambda: self.state.with_priorities.apply_reports(number, self._received)
        )
        return self.total


class ShardedSelector(JointSelector):
    """Selects from the items of all nodes, in the one process of each that makes its selections.
    One thread; it takes the table's lock itself, and never holds it while it waits for other nodes.
    """

    def __init__(
        self,
        state: StreamState,
        channel: NodeChannel,
        plan: ExchangePlan,
        exchange: ResolutionExchange | ResolutionSender,
        verify_every: int,
    ) -> None:
        super().__init__(state, channel)
        self._plan = plan
        self._exchange = exchange
        self._verify_every = verify_every
        self._wanted: dict[tuple[int, int], np.ndarray] = {}  # of the latest selection
        self._is_first = True
        self._has_window = self.spec.rule.window is not None
        self._moments = np.empty((0, 0))  # of all shards

    @property
    def total(self) -> int:
        return int(self._totals.sum())

    def begin(self, number: int, entry: int, count: int) -> int | None:
        """Begin a selection together with the other nodes. Returns as `LocalSelector.begin`.

        Raises:
            NotReadyError: The rate limiter does not admit it, and a node waits no longer.
            StoreError, PeerError: The stream is closing; a node failed, ended, or asks for another
                batch.
        """
        self._begin_selection(number, entry, count)
        joint = self.state.joint_limiter
        ledger = self._table.ledger

        def prepare() -> list[np.ndarray]:
            parts = [NO_WORDS] * self._num_nodes
            heads = list[np.ndarray]()
            if self.state.priorities is not None:
                parts = self._packed_reports(number)
            with self._table.lock:
                # Else changes take effect after the round of status messages.
                if (
                    self.state.priorities is None
                    and not self._has_window
                    and not self.spec.sampler.walks
                ):
                    self.masses.apply(number)
                if (
                    joint is not None
                ):  # after the changes were applied, so that it counts what can be drawn
                    heads.append(joint.rate(count) if ledger is None else progress_of(self._table))
                if self.state.numbers is not None:
                    heads.append(self._table.extents.moments.reshape(-1).view(np.int64))
                return (
                    [np.concatenate([*heads, part.reshape(-1)]) for part in parts]
                    if heads
                    else parts
                )

        self._received = self._status_round(prepare)
        if joint is not None:
            num_words = NodeRate.NUM_WORDS if ledger is None else Progress.NUM_WORDS
            rates = np.stack([words[:num_words] for words in self._received])
            self._received = [words[num_words:] for words in self._received]
            if (
                ledger is not None
            ):  # what can be drawn depends on the first open number of all stores
                self._received = [words.copy() for words in self._received]
                with self._table.lock:
                    ledger.take_progress(rates)
                    rate = joint.rate(count)
                rates = self.channel.all_gather(rate)
            with self._table.lock:
                is_open = joint.apply(rates, count)
                waits = not is_open and not self.spec.is_optional
                error = joint.given_up(rates, number, count) if waits or joint.was_empty else None
            if error is not None:
                raise error
            if waits:
                return None
            if not is_open:
                count = 0
                self._begin_selection(number, entry, count)
        if self.state.numbers is not None:
            shape = self.state.numbers.shape[1:]
            of_shards = [
                words[: prod(shape)].view(np.float64).reshape(shape) for words in self._received
            ]
            self._moments = merge(of_shards)
            self._received = [words[prod(shape) :] for words in self._received]
        self.num_selections += 1
        return count

    @property
    def moments(self) -> np.ndarray:
        return self._moments

    def _begin_selection(self, number: int, entry: int, count: int, is_saved: bool = False) -> None:
        offset = 0 if self.spec.offset is None else self.spec.offset(number)
        case = count, offset % self._plan.data_world
        if case not in self._wanted:
            self._wanted = {case: self._plan.wanted(*case)}
        every = 0 if self.spec.sampler.is_pass else self._verify_every
        verifies = every > 0 and number % every == 0
        asked = np.arange(count) if verifies else self._wanted[case]
        self._number = number
        owner = np.zeros_like(asked)
        self._selection = NodeSelection(
            number, entry, count, offset, verifies, asked, owner, is_saved
        )

    def apply(self, number: int) -> int:
        if self.state.priorities is not None:
            self._apply_reports(number)
        elif self._has_window:
            if self._waiting or self._is_first:
                self._apply_window(number)
        elif self.spec.sampler.walks and self._waiting:
            self._apply_together(lambda: self.masses.apply(number))
        self._is_first = False
        return self.total

    def _apply_window(self, number: int) -> None:
        masses = self.state.with_ages
        assert self.spec.rule.window is not None
        with self._table.lock:
            contents = masses.contents()[2:]
        edge = self.spec.rule.window.edge(*contents, self.channel.all_gather)

        def change() -> None:
            masses.queue_window(edge)
            masses.apply(number)

        self._apply_together(change)

    def _packed_reports(self, number: int) -> list[np.ndarray]:
        """Return the reports that are due for each node, packed."""
        masses = self.state.with_priorities
        reports = self._reports_due(number)
        packed = np.empty((len(reports), PACKED_REPORT_WORDS), np.int64)
        ends = np.empty(self._num_nodes, np.int64)
        tensors = [torch.from_numpy(part) for part in (packed, ends, reports)]
        masses.ops.encode_reports_(*tensors, number - masses.rule.lag)
        bounds = [0, *ends.tolist()]
        return [packed[begin:end] for begin, end in pairwise(bounds)]

    def _apply_reports(self, number: int) -> None:
        masses = self.state.with_priorities
        latest = number - masses.rule.lag
        highest = int(self._statuses[:, StatusMessage.HIGHEST].max())

        def change() -> None:
            counts = masses.counts
            counts[UpdateCount.HIGHEST_PRIORITY] = max(
                highest, int(counts[UpdateCount.HIGHEST_PRIORITY])
            )
            packed = np.concatenate(self._received).reshape(-1, PACKED_REPORT_WORDS)
            reports = np.empty((len(packed), LogEntry.NUM_WORDS), np.int64)
            masses.ops.decode_reports_(torch.from_numpy(reports), torch.from_numpy(packed), latest)
            masses.apply_reports(number, [masses.known_reports(reports)] if len(reports) else [])

        self._apply_together(change)

    def resolve(self, rows: torch.Tensor, done: int, coordinates: torch.Tensor, first: int) -> None:
        self._keep(done, first, *self._found(coordinates, first))

    def walk(self, rows: torch.Tensor, done: int, coordinates: torch.Tensor, first: int) -> int:
        owner, own, resolutions = self._found(coordinates, first)
        if self.state.walked is not None:
            with self._table.lock:
                evicted = self.state.evicted(resolutions[:, Resolution.SLOT].numpy())
            skipped = self.channel.all_gather_ragged(own[evicted, None])[0].reshape(-1)
            if len(skipped):
                left = np.ones(len(coordinates), bool)
                left[skipped] = False
                owner, own, resolutions = self._found(coordinates[torch.from_numpy(left)], first)
        self._keep(done, first, owner, own, resolutions)
        return len(owner)

    def drop(self) -> None:
        self._selection.own.clear()
        self._selection.resolutions.clear()

    def _found(
        self, coordinates: torch.Tensor, first: int
    ) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
        """Return the node of each coordinate, the indices of this node's, and their resolutions."""
        owner, mine, points = torch.empty(3, len(coordinates), dtype=torch.int64).unbind()
        found = np.zeros(1, np.int64)
        totals = torch.from_numpy(self._totals)
        assign = self.masses.ops.assign_draws_
        assign(owner, mine, points, torch.from_numpy(found), coordinates, totals, self._index)
        own, points = mine.numpy()[: found[0]], points[: found[0]]
        resolutions = torch.empty(len(own), Resolution.NUM_WORDS, dtype=torch.int64)
        if len(own):
            with self._table.lock:
                self.masses.resolve_numbered(resolutions, points, own + first)
        return owner.numpy(), own, resolutions

    def _keep(
        self, done: int, first: int, owner: np.ndarray, own: np.ndarray, resolutions: torch.Tensor
    ) -> None:
        """Pin draws, and add them to the selection, after the `done` ones in it."""
        if len(own):
            with self._table.lock:
                self.state.pin(self._selection.number, resolutions)
        self._selection.draw(first, own, resolutions, owner, done)

    def resolve_until(
        self,
        rows: torch.Tensor,
        done: int,
        coordinates: torch.Tensor,
        first: int,
        counted: np.ndarray,
    ) -> int:
        joint = self.state.joint_limiter
        num_valid = len(coordinates)
        assert joint is not None
        owner, own, resolutions = self._found(coordinates, first)
        slots = resolutions[:, Resolution.SLOT].numpy()
        if joint.fewest <= len(rows):
            before = joint.num_admitted(slots, counted)
            left = joint.draws_left(counted)
            num_valid = self._valid_of_all(own, slots, num_valid, before, left)
        kept = int(np.searchsorted(own, num_valid))
        np.add.at(counted, slots[:kept], 1)
        self._keep(done, first, owner[:num_valid], own[:kept], resolutions[:kept])
        return num_valid

    def _valid_of_all(
        self, own: np.ndarray, slots: np.ndarray, count: int, before: int, left: int
    ) -> int:
        """Return how many draws are valid; if not all, remove the trajectory that the last uses up.

        The same on all nodes. `before` of this node's draws (`own`) come before its first that
        does; its items admit `left`.
        """
        uses_up = before < len(own)
        masses = self.masses
        at = int(own[before]) if uses_up else count
        mass = int(masses.leaves[slots[before]]) if uses_up else 0
        received = self.channel.all_gather(
            np.array([at, mass, self._status()[StatusMessage.LEAST], left])
        )
        self._statuses[:, StatusMessage.LEAST] = received[:, 2]
        node = int(received[:, 0].argmin())
        num_valid = min(int(received[node, 0]) + 1, count)
        if num_valid < count:
            self._checked(bool(received[:, 3].sum() >= count))  # before a mass is set to 0
            self._totals[node] -= received[node, 1]
            self._statuses[node, StatusMessage.ITEMS] -= 1
            if node == self._index:
                with self._table.lock:
                    masses.take_out(int(slots[before]))
        return num_valid

    def highest(self, count: int) -> torch.Tensor:
        masses = self.state.with_priorities
        with self._table.lock:
            items = masses.highest_items(count)
            values = masses.values[items.numpy()].view(np.int32).astype(np.int64)
            ids = masses.ids_of(items.numpy())
            coordinates = masses.coordinates_of(items).numpy()
            own = np.stack([values, ids, coordinates], axis=1)
        every, shards = self.channel.all_gather_ragged(own)
        # Equal priorities by the age of their trajectories; a data set's are older in the first
        # shards.
        ages = every[:, 1] if self._table.spec.dataset is None else shards
        chosen = np.lexsort((ages, -every[:, 0].astype(np.int32).view(np.float32)))[:count]
        before = np.cumsum(self._totals) - self._totals
        return torch.from_numpy(before[shards[chosen]] + every[chosen, 2])

    def extreme(self, count: int, newest: bool) -> torch.Tensor:
        ledger = self._table.ledger
        is_joint = (
            ledger is not None and ledger.spec.is_joint
        )  # any complete group may have to come now
        with self._table.lock:
            own = np.stack(
                self.state.with_ages.ends(UNLIMITED if is_joint else count, newest), axis=1
            )
            if ledger is not None and is_joint:
                own = np.concatenate([own, ledger.marks(own[:, 0])], axis=1)
        every, shards = self.channel.all_gather_ragged(own)
        every[:, 2] += (np.cumsum(self._totals) - self._totals)[shards]
        order = np.argsort(every[:, 0], kind="stable")
        if ledger is not None and is_joint:
            order = ledger.merged(every[:, 0], every[:, 3:])
        every = every[order[::-1] if newest else order]
        return items_of(every[:, 1], every[:, 2], count, newest)

    def finish(self, number: int, entry: int, count: int) -> tuple[int, np.ndarray]:
        """Exchange the resolutions and the rows of the selection; see `LocalSelector.finish`."""
        return self._exchange.fill(self._selection)

    def deliver(
        self,
        number: int,
        entry: int,
        first: int,
        owner: np.ndarray,
        own: np.ndarray,
        resolutions: torch.Tensor,
    ) -> None:
        """Fill a ring entry with a checkpoint's selection, as `finish` does with a new one.

        Node `owner` holds each resolution, [count], int64; this one those of the indices `own`,
        ascending.
        """
        self._begin_selection(number, entry, len(owner), is_saved=True)
        self._selection.draw(first, own, resolutions, owner, 0)
        self.state.pin(number, resolutions)
        self._exchange.fill(self._selection)

    def restart(self) -> None:
        """Compute the window's edge anew at the next selection: the table's content was
        replaced.
        """
        self._is_first = True

    def weigh(self, number: int, drawn: np.ndarray, total: int) -> tuple[int, int, int]:
        del drawn
        masses = self.state.with_priorities
        beta = masses.beta_at(number)
        if masses.rule.normalize == "batch":
            return self._exchange.least_drawn, 1, beta
        if masses.rule.normalize == "table":
            least = self._statuses[:, StatusMessage.LEAST]
            return int(least[least > 0].min()), 1, beta
        return total, int(self._statuses[:, StatusMessage.ITEMS].sum()), beta


def set_quotas(control_plane: ControlPlane, leads: bool, streams: Sequence[BatchStream]) -> None:
    """Set the quotas of each node's writers. Collective; arguments as in `may_select`."""
    for stream in streams:
        if stream.state.joint_limiter is not None:
            may_select(control_plane, leads, stream, int(stream.position[Head.NUMBER]))


def may_select(
    control_plane: ControlPlane, leads: bool, stream: BatchStream, number: int, fixed: bool = False
) -> bool:
    """Return whether a global batch was selected already, or could be by all nodes together now.

    Collective over all ranks (the same result), outside of a selection; if another thread may be in
    one (`fixed`), quotas do not change. `leads`: this rank changes its node's shards.
    """
    limiter = stream.state.joint_limiter
    count = stream.spec.num_samples(number)
    assert limiter is not None
    share_progress(control_plane, leads, stream)

    def rate() -> tuple[int, bool, np.ndarray] | None:
        if not leads:
            return None
        with stream.table.lock:
            return limiter.index, stream.prepare(number), limiter.rate(count, fixed, exact=True)

    rates = control_plane.all_results("the rate of its limiter", rate)
    found = sorted((one for one in rates if one is not None), key=lambda one: one[0])
    messages = np.stack([words for _, _, words in found])
    changes = (
        leads and not messages[:, NodeRate.IS_FIXED].any()
    )  # a fixed rate: no node may `apply`
    with stream.table.lock:
        is_open = limiter.apply(messages, count) if changes else limiter.are_open(messages, count)
    control_plane.barrier()  # after it ranks may write, by the new quotas
    return is_open or any(was_selected for _, was_selected, _ in found)


def share_progress(control_plane: ControlPlane, leads: bool, stream: BatchStream) -> None:
    """Share the progress of the stores of a ledger, if there is one. As `may_select`."""
    ledger = stream.table.ledger
    lock = stream.table.lock
    if ledger is None:
        return

    def progress() -> np.ndarray | None:
        with lock:
            return progress_of(stream.table) if leads else None

    of_ranks = control_plane.all_results("the progress of its prompts", progress)
    with lock:
        ledger.take_progress(np.stack([one for one in of_ranks if one is not None]))


def progress_of(table: Table) -> np.ndarray:
    """Return `PromptLedger.progress` with the groups that are complete by now. Requires
    the lock.
    """
    assert table.ledger is not None
    assert table.groups is not None
    table.groups.update()  # a group whose last column was filled has no leader before, and is open
    return table.ledger.progress()
