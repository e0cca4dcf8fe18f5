"""Control plane between ranks: collectives that raise a rank's error on all, and process groups."""

from __future__ import annotations

import atexit
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from deepspeed_gear.errors import GearError, PeerError
from deepspeed_gear.outcome import Outcome
from deepspeed_gear.timeouts import WaitLog, wait_until

T = TypeVar("T")
SETUP_TIMEOUT_S = 900.0  # building the op, loading a data set
# Gloo's threads drop the tensors of a collective after it has returned, and take the interpreter's
# lock for that. If the interpreter ends meanwhile, as after an error that all ranks raise, the
# process aborts.
EXIT_PAUSE_S = 0.1
_LISTEN_S = 0.1  # between two looks for lost ranks
# A rank may send its part of a collective and end: if the collective is not over after so long, it
# never is.
LOST_S = 5.0
VERDICT_S = 12.0  # longest time until it is known which loss has broken a connection


class ControlPlane:
    """Collectives over a gloo group of its own (of `process_group`; None: all ranks), or this
    process alone.

    Main thread only. Every method is collective: all ranks call it, in the same order.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = process_group
        self.rank = 0
        self.world_size = 1
        self._group: Any = None
        self._ranks: tuple[int, ...] = ()
        self._lost: Callable[[], GearError | None] | None = None
        self._note_broken: Callable[[], None] | None = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        if self.world_size > 1:
            # torch 2.4 does not accept None in get_process_group_ranks.
            group = dist.group.WORLD if process_group is None else process_group
            self._ranks = tuple(dist.get_process_group_ranks(group))
            self.allow(SETUP_TIMEOUT_S)

    def allow(self, timeout_s: float) -> None:
        """Let later calls wait for other ranks for so long, at least for `SETUP_TIMEOUT_S`.
        Collective.
        """
        if self.world_size > 1:
            self._group = purpose_group(self._ranks, "control", max(timeout_s, SETUP_TIMEOUT_S))

    def watch(
        self, lost: Callable[[], GearError | None], note_broken: Callable[[], None] | None = None
    ) -> None:
        """Look for lost ranks while this one waits for others, until `close`: `lost` returns their
        error, and `note_broken` is called where a connection has broken.
        """
        self._lost = lost
        self._note_broken = note_broken

    def run(self, start: Callable[[], Any]) -> None:
        """Run the gloo collective that `start` begins; raise PeerError, with its name, if a rank is
        lost.
        """
        try:
            work = start()
        except RuntimeError as error:
            raise self._failure(error) from error
        log = WaitLog(f"rank {self.rank}")
        lost_s = 0.0
        while True:
            is_over = work.is_completed()
            try:
                work.wait(timedelta(seconds=_LISTEN_S))
                return
            except RuntimeError as error:  # also of a wait that is over before the collective
                if is_over:
                    raise self._failure(error) from error
            loss = None if self._lost is None else self._lost()
            lost_s = 0.0 if loss is None else lost_s + _LISTEN_S
            if loss is not None and lost_s > LOST_S:
                raise loss
            log.note(lambda: "the other ranks, in a collective of all")

    def _failure(self, error: RuntimeError) -> GearError:
        """Return the error of a collective that has failed: that of a lost rank, if it is known in
        time.
        """
        if self._note_broken is not None:
            self._note_broken()
        if (
            self._lost is not None
            and (loss := wait_until(self._lost, VERDICT_S, _LISTEN_S / 2)) is not None
        ):
            return loss
        text = str(error).splitlines()[0]
        remedy = "look for the first error in the other ranks' logs"
        return PeerError("a rank", "must answer", text, remedy)

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks."""
        group = self._group
        if group is None:
            return [value]
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = torch.zeros(self.world_size, 1, dtype=torch.int64)
        each = list(sizes.unbind())
        self.run(lambda: dist.all_gather(each, torch.tensor([len(mine)]), group, async_op=True))
        sent = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        sent[: len(mine)] = mine
        rows = list(torch.zeros(self.world_size, len(sent), dtype=torch.uint8).unbind())
        self.run(lambda: dist.all_gather(rows, sent, group, async_op=True))
        pairs = zip(rows, sizes[:, 0].tolist(), strict=True)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in pairs]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return self.all_gather(value if self.rank == source else None)[source]

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor in host memory over all ranks; the argument may be
        overwritten.
        """
        group = self._group
        if group is not None:
            self.run(lambda: dist.all_reduce(tensor, group=group, async_op=True))
        return tensor

    def barrier(self) -> None:
        self.all_gather(None)

    def attempt(self, what: str, action: Callable[[], T]) -> T:
        """Run an action without collectives on every rank; if it fails on one, raise on all.

        Raises:
            PeerError: It failed on another rank, with that rank's error; `what` names the action.
            NotReadyError: That rank is not ready: the same call may succeed later.
        """
        own: list[T] = []
        self.all_results(what, lambda: own.append(action()))
        return own[0]

    def all_results(self, what: str, action: Callable[[], T]) -> list[T]:
        """Run an action as `attempt`, and return the results of all ranks, in their order."""
        try:
            answer: T | Outcome = action()
        except Exception as error:  # of any type: all of them are raised on the other ranks
            self.all_gather(Outcome.of(error))
            raise
        answers = self.all_gather(answer)
        for rank, other in enumerate(answers):
            if isinstance(other, Outcome):
                raise other.error(f"rank {rank}: {what}")
        return answers

    def compare(self, what: str, value: Any) -> None:
        """Raise a PeerError on every rank unless all of them give an equal value; `what` names it
        there.
        """
        values = self.all_gather(value)
        other = next((rank for rank, one in enumerate(values) if one != values[0]), None)
        if other is not None:
            shown = f"{values[0]} on rank 0, {values[other]} on rank {other}"
            remedy = "call it on every rank, in the same order and with the same arguments"
            raise PeerError(what, "must be the same on every rank", shown, remedy)

    def close(self) -> None:
        """Drop the process group; the next ControlPlane over the same ranks uses it again."""
        self._group = self._lost = self._note_broken = None


# A group that is made again over the same ranks can find the addresses of the one before it in the
# rendezvous store. So there is one per set of ranks, until the default group is destroyed.
_groups: dict[tuple[Any, ...], tuple[Any, Any]] = {}


def purpose_group(
    ranks: tuple[int, ...],
    purpose: str,
    timeout_s: float,
    backend: str = "gloo",
    parts: Sequence[tuple[int, ...]] = (),
) -> Any:
    """Return the process group over ranks for one purpose (purposes never wait for each other).

    Collective the first time over these ranks, or where `parts`, disjoint sets with `ranks` among
    them, are the whole world, over all of it. `timeout_s` is that of its operations.
    """
    parts = parts or (ranks,)
    known = ranks, tuple(parts), purpose, timeout_s, backend
    world, group = _groups.get(known, (None, None))
    if not _groups:
        atexit.register(time.sleep, EXIT_PAUSE_S)
    if group is None or world is not dist.group.WORLD:
        timeout = timedelta(seconds=timeout_s)
        if sum(map(len, parts)) < dist.get_world_size():
            # Only the members of a part of the world call this, so they must not wait for the
            # others.
            group = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
        else:
            # By all ranks, since a group that only its members make is named by how many groups
            # each of them is in, and the leader of a node is in more than its other ranks.
            made = [dist.new_group(list(part), timeout, backend) for part in parts]
            group = made[list(parts).index(ranks)]
        _groups[known] = dist.group.WORLD, group
    return group


def rendezvous(timeout_s: float) -> Any:
    """Return a new connection to the rendezvous store of the default process group.

    A call that waits in the store blocks its connection; so each thread needs its own. Its keys
    have the prefixes of the default group's, by which launchers that keep the store distinguish one
    start of the ranks from the next. (torch before `Store.clone` does not show them.)
    """
    default = store = dist.distributed_c10d._get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    timeout = timedelta(seconds=timeout_s)
    if not isinstance(store, TCPStore):
        return default
    if not hasattr(default, "clone"):
        return TCPStore(store.host, store.port, None, False, timeout)
    connection = default.clone()
    connection.set_timeout(timeout)
    return connection
