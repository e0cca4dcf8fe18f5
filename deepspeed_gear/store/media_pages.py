"""Pages of a store for media items and ragged values: add, find, evict; equal items once.

An item is held under the number of its content. It is a chain of pages; the state of its first
page, written last, is the commit point. What is needed follows from the rows: those of slots that
are not free, and those from other nodes, name it, so there is no count that a death could leave
wrong. A trajectory's rows are written first, into a reserved slot, then its media are added, and it
is committed last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from deepspeed_gear.data.media import Media, MediaSpec
from deepspeed_gear.data.media_digests import MediaItem
from deepspeed_gear.data.ragged import Ragged
from deepspeed_gear.errors import DataError, StoreFullError, undo_on_error
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.schema import Column
from deepspeed_gear.store.native_rows import as_tensor
from deepspeed_gear.store.records import MediaPage, PageState
from deepspeed_gear.store.row_allocator import distinct, have_ended, look_up
from deepspeed_gear.store.shared_memory import SharedMemory

_PARTS = 8  # so many parts of the pages are made free at once, at least one


class ItemNumbers(NamedTuple):
    """A column whose rows have numbers of items, in the store and among its arrivals."""

    rows: np.ndarray  # of the store, by row or by slot. int64
    arrivals: np.ndarray  # rows from other nodes, 0 while not in use. int64
    by_slot: bool  # one row per trajectory


class MediaPages:
    """The items of a store. Methods require the lock unless stated."""

    def __init__(
        self,
        name: str,
        spec: MediaSpec,
        memory: SharedMemory,
        views: Mapping[str, np.ndarray],
        numbers: Mapping[str, ItemNumbers],
    ) -> None:
        self.spec = spec
        self.name = f"table {name}: media"
        self._memory = memory
        self.words = views["media_pages"]
        self.bytes = views["media"]
        self._slots = views["slots"]
        #: By the columns of `MediaSpec.names`.
        self.numbers = numbers

    def needed(self, pinned: np.ndarray | None = None, with_arrivals: bool = True) -> np.ndarray:
        """Return the numbers of items that rows name, also rows from other nodes. [n], int64.

        `pinned`: only of reserved slots and these count, [slots], bool. Cost: a pass over the rows.
        """
        states = self._slots[:, Slot.STATE]
        used = (states if pinned is None else states * pinned) != SlotState.FREE
        used |= states == SlotState.RESERVED
        needed = [np.zeros(0, np.int64)]
        for rows, arrivals, by_slot in self.numbers.values():
            if by_slot:
                needed.append(rows[used])
            else:
                named = np.flatnonzero(rows)
                extents = self._slots[used][:, [Slot.FIRST_ROW, Slot.NUM_ROWS]]
                needed.append(rows[named[inside(named, extents)]])
            if with_arrivals:
                needed.append(arrivals)
        every = np.concatenate(needed)
        return distinct(every[every != 0])

    def clear_arrivals(self) -> None:
        """Let rows from other nodes name no items any more."""
        for numbers in self.numbers.values():
            numbers.arrivals[:] = 0

    def find(self, numbers: np.ndarray) -> np.ndarray:
        """Return the first page of each item, -1 where the store lacks it. [n] -> [n], int64."""
        heads = np.flatnonzero(self.words[:, MediaPage.STATE] == PageState.WHOLE)
        heads = heads[np.argsort(self.words[heads, MediaPage.NUMBER])]
        return look_up(self.words[heads, MediaPage.NUMBER], numbers, heads)

    def contents(self, numbers: np.ndarray, lock: Any) -> dict[int, np.ndarray]:
        """Return copies of the items that the store holds, by number. [n] -> [bytes] each.

        Takes the lock itself; the trajectories must be pinned.
        """
        with lock:
            heads = self.find(numbers)
        found = {}
        for number, head in zip(
            numbers[heads >= 0].tolist(), heads[heads >= 0].tolist(), strict=True
        ):
            whole = self.bytes[np.concatenate([*chain(self.words, np.array([head]))])].reshape(-1)
            found[number] = whole[: int(self.words[head, MediaPage.NUM_BYTES])]
        return found

    def named(self, numbers: np.ndarray, lock: Any) -> dict[int, Media]:
        """Return a pinned trajectory's media by step, from the numbers of its steps. [T], int64."""
        steps = np.flatnonzero(numbers)
        found = dict[int, Media]()
        for number, content in self.contents(distinct(numbers[steps]), lock).items():
            rows = zip(self.spec.columns, self.spec.rows(content).values(), strict=True)
            found[number] = Media(**{c.name: _value(c, part) for c, part in rows if len(part)})
        return {step: found[int(numbers[step])] for step in steps.tolist()}

    def ragged(self, column: Column, numbers: np.ndarray, lock: Any) -> dict[int, Ragged]:
        """Return the values of pinned trajectories in a ragged column, by the number of the item.

        Those that the store does not hold are left out.

        Args:
            column: The column.
            numbers: Numbers of the items. [n], int64.
            lock: The table's lock; a null context if it is held.
        """
        contents = self.contents(distinct(numbers[numbers != 0]), lock)
        return {one: self.spec.ragged_value(column, content) for one, content in contents.items()}

    def add(
        self,
        items: Mapping[int, MediaItem],
        named: np.ndarray,
        lock: Any,
        release: Callable[[], bool] = lambda: False,
        pinned: Callable[[], np.ndarray] | None = None,
        keep: np.ndarray | None = None,
    ) -> None:
        """Add items that the store lacks; takes the lock itself.

        `named` are all numbers that the rows name, [n]: these rows are written, so nothing of them
        is evicted.

        `release` frees slots or evicts a trajectory, and returns whether it has; `pinned` returns
        which slots it cannot free, [slots], bool. `keep` are numbers that stay, beside what rows
        name. [n].

        Raises:
            DataError: An item is neither given nor held, or its number is that of another content.
            StoreFullError: What is named by slots that stay leaves too few pages; nothing was
                evicted.
        """
        named = distinct(named)
        is_given = np.array([number in items for number in named.tolist()], bool)
        given = [items[number] for number in named[is_given].tolist()]
        digests = np.zeros((len(named), 4), np.int64)
        lengths = np.zeros(len(named), np.int64)
        digests[is_given] = np.array([one.digest for one in given], np.int64).reshape(-1, 4)
        lengths[is_given] = [len(one.content) for one in given]
        with lock:  # which other processes wait for, so there are no loops over items
            known = self.find(named)
            is_new = known < 0
            is_other = (
                is_given & ~is_new & (self.words[known, MediaPage.DIGEST :] != digests).any(axis=1)
            )
            for number in named[is_other].tolist():
                raise DataError(
                    self.name,
                    "must have a number that no other item has",
                    number,
                    "change its content slightly",
                )
            for number in named[is_new & ~is_given].tolist():
                rule = "must be held by the store"
                remedy = "give the Media in place of its number"
                raise DataError(self.name, rule, number, remedy)
            new = named[is_new]
            sizes = self._num_pages(lengths[is_new])
            if len(new):
                stays = named if keep is None else keep
                self._make_room(int(sizes.sum()), stays, release, pinned)
            pages = self._reserve(new, lengths[is_new], digests[is_new])
            ends = np.cumsum(sizes)
        heads = pages[ends - sizes]
        page_bytes = self.spec.page_bytes

        def free() -> None:
            with lock:
                self._free(heads[self.words[heads, MediaPage.STATE] == PageState.WRITING])

        with undo_on_error(free):
            for number, size, end in zip(new.tolist(), sizes.tolist(), ends.tolist(), strict=True):
                content = items[number].content
                whole = len(items[number].content) // page_bytes
                split = whole * page_bytes
                own = pages[end - size : end]
                self.bytes[own[:whole]] = content[:split].reshape(whole, page_bytes)
                self.bytes[own[-1], : len(content) - split] = content[split:]
            with lock:
                is_held = self.find(new) >= 0  # another process may have added it meanwhile
                self.words[heads[~is_held], MediaPage.STATE] = PageState.WHOLE
                self._free(heads[is_held])

    def _num_pages(self, lengths: np.ndarray) -> np.ndarray:
        return np.asarray(-(-lengths // self.spec.page_bytes))

    def _num_free(self) -> int:
        return int(np.count_nonzero(self.words[:, MediaPage.STATE] == PageState.FREE))

    def _make_room(
        self,
        wanted: int,
        named: np.ndarray,
        release: Callable[[], bool],
        pinned: Callable[[], np.ndarray] | None,
    ) -> None:
        """Free so many pages: of dead processes, then of unnamed items, then of trajectories."""
        if self._num_free() >= wanted:
            return
        self.recover()
        if pinned is not None:
            stays = self.find(distinct(np.concatenate([self.needed(pinned()), named])))
            held = sum(map(len, chain(self.words, stays[stays >= 0])))
            self._check_free(wanted, len(self.words) - held)
        count = 1
        going_on = True
        while going_on:
            self._evict(max(wanted, len(self.words) // _PARTS), named)
            if self._num_free() >= wanted:
                return
            going_on = sum(release() for _ in range(count)) > 0
            count *= 2  # fewer passes over the rows
        self._check_free(wanted, self._num_free())

    def _check_free(self, wanted: int, free: int) -> None:
        if free < wanted:
            rule = f"must have {wanted} free pages of {self.spec.page_bytes} bytes"
            remedy = (
                f"raise {self.spec.capacity}, or lower the number of trajectories that are held"
            )
            raise StoreFullError(self.name, rule, f"{free} of {len(self.words)}", remedy)

    def _evict(self, wanted: int, named: np.ndarray) -> None:
        """Evict the oldest items that nothing needs, but those `named`, until so many are free."""
        needed = distinct(np.concatenate([self.needed(), named]))
        free = self._num_free()
        heads = np.flatnonzero(self.words[:, MediaPage.STATE] == PageState.WHOLE)
        heads = heads[look_up(needed, self.words[heads, MediaPage.NUMBER], needed) < 0]
        heads = heads[np.argsort(self.words[heads, MediaPage.AGE])]
        sizes = self._num_pages(self.words[heads, MediaPage.NUM_BYTES])
        self._free(heads[free + np.cumsum(sizes) - sizes < wanted])

    def _free(self, heads: np.ndarray) -> None:
        """Free items, by their first pages: what follows is free with these. [n]."""
        for pages in chain(self.words, heads):
            self.words[pages, MediaPage.STATE] = PageState.FREE

    def _reserve(self, numbers: np.ndarray, lengths: np.ndarray, digests: np.ndarray) -> np.ndarray:
        """Return pages for items, one item after the other, marked as being written. [pages]."""
        sizes = self._num_pages(lengths)
        words = self.words
        ends = np.cumsum(sizes)
        age = int(words[:, MediaPage.AGE].max()) + 1
        pages = np.flatnonzero(words[:, MediaPage.STATE] == PageState.FREE)[: sizes.sum()]
        heads = pages[ends - sizes]
        following = np.append(pages[1:] + 1, 0)[: len(pages)]
        following[ends - 1] = 0
        words[pages, MediaPage.NEXT] = following
        words[pages, MediaPage.STATE] = PageState.FOLLOWING
        words[heads, MediaPage.NUMBER] = numbers
        words[heads, MediaPage.NUM_BYTES] = lengths
        words[heads, MediaPage.OWNER] = self._memory.peer
        words[heads, MediaPage.AGE] = age
        words[heads, MediaPage.DIGEST :] = digests
        words[heads, MediaPage.STATE] = PageState.WRITING
        return np.asarray(pages)

    def abandon(self) -> None:
        """Free what an earlier process with this one's index was writing."""
        is_own = self.words[:, MediaPage.OWNER] == self._memory.peer
        self._free(np.flatnonzero(is_own & (self.words[:, MediaPage.STATE] == PageState.WRITING)))

    def recover(self) -> None:
        """Free the pages that no item of the store or of a living process has."""
        states = self.words[:, MediaPage.STATE]
        held = np.zeros(len(self.words), bool)
        whole, begun = (
            np.flatnonzero(states == one) for one in (PageState.WHOLE, PageState.WRITING)
        )
        is_dead = have_ended(self.words[begun, MediaPage.OWNER], self._memory)
        for pages in chain(self.words, np.append(whole, begun[~is_dead])):
            held[pages] = True
        states[~held] = PageState.FREE

    def statistics(self) -> dict[str, int]:
        """Return how many items are held, and the bytes of their pages and of all."""
        states = self.words[:, MediaPage.STATE]
        size = self.spec.page_bytes
        used = np.count_nonzero(states != PageState.FREE)
        items = int(np.count_nonzero(states == PageState.WHOLE))
        return {"items": items, "bytes": int(used) * size, "capacity_bytes": len(states) * size}


def chain(words: np.ndarray, heads: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the first pages of items, then their second ones, and so on. [n] each."""
    while len(heads):
        yield heads
        following = words[heads, MediaPage.NEXT]
        heads = following[following > 0] - 1


def inside(rows: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """Return which rows lie in extents, by first row and number: [n], [m, 2] -> [n], bool."""
    extents = extents[extents[:, 1] > 0]  # others may begin where one of these does
    extents = np.concatenate([[[-1, 0]], extents[np.argsort(extents[:, 0])]])
    return np.asarray(
        rows < extents[np.searchsorted(extents[:, 0], rows, side="right") - 1].sum(-1)
    )


def _value(column: Column, rows: np.ndarray) -> Any:
    """Return rows as a program gives them: bfloat16 as a tensor."""
    return as_tensor(rows, column.dtype) if column.dtype == "bfloat16" else rows
