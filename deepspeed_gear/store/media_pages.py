"""Pages of a store that hold media: each item once, under the number of its content.

An item is a chain of pages; the state of its first page, written last, is the commit point. What is needed
follows from the rows: those of slots that are not free, and those from other nodes, name it, so there is no
count that a death could leave wrong. Whoever adds a trajectory writes its rows first, into reserved ones,
then its media, and commits last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from deepspeed_gear.data.media import Media, MediaItem, MediaSpec
from deepspeed_gear.errors import DataError, StoreFullError, undo_on_error
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.schema import Column
from deepspeed_gear.store.native_rows import as_tensor
from deepspeed_gear.store.records import MediaPage, PageState
from deepspeed_gear.store.row_allocator import distinct, look_up
from deepspeed_gear.store.shared_memory import SharedMemory

_PARTS = 8  # so many parts of the pages are made free at once, at least one


class MediaPages:
    """The media of a store. Methods require the lock unless stated. `release` frees slots, or evicts a
    trajectory; it returns whether it has.
    """

    def __init__(
        self,
        name: str,
        spec: MediaSpec,
        memory: SharedMemory,
        views: Mapping[str, np.ndarray],
        rows: np.ndarray,
        arrivals: np.ndarray,
    ) -> None:
        self.spec, self.name, self._memory = spec, f"table {name}: media", memory
        self.words, self.bytes, self._slots = views["media_pages"], views["media"], views["slots"]
        self._rows, self._arrivals = rows, arrivals

    def needed(self) -> np.ndarray:
        """Return the numbers of what trajectories name. [n], int64. Cost: a pass over the rows."""
        used, named = self._slots[self._slots[:, Slot.STATE] != SlotState.FREE], np.flatnonzero(self._rows)
        own = self._rows[named[inside(named, used[:, [Slot.FIRST_ROW, Slot.NUM_ROWS]])]]
        arrived = self._arrivals[np.flatnonzero(self._arrivals)]
        return distinct(np.concatenate([own, arrived]))

    def find(self, numbers: np.ndarray) -> np.ndarray:
        """Return the first page of each item, -1 where the store does not hold it. [n] -> [n], int64."""
        heads = np.flatnonzero(self.words[:, MediaPage.STATE] == PageState.WHOLE)
        heads = heads[np.argsort(self.words[heads, MediaPage.NUMBER])]
        return look_up(self.words[heads, MediaPage.NUMBER], numbers, heads)

    def read(self, head: int) -> np.ndarray:
        """Return a copy of an item's content. Without the lock: its trajectory must be pinned. [bytes]."""
        length = int(self.words[head, MediaPage.NUM_BYTES])
        return np.asarray(self.bytes[chain(self.words, head)].reshape(-1)[:length])

    def rows_of(self, numbers: np.ndarray, lock: Any) -> dict[int, dict[str, np.ndarray]]:
        """Return the rows of those items that the store holds, by number and column. Takes the lock itself;
        the trajectories must be pinned. [n], int64.
        """
        with lock:
            heads = self.find(numbers)
        held = zip(numbers[heads >= 0].tolist(), heads[heads >= 0].tolist(), strict=True)
        return {number: self.spec.rows(self.read(head)) for number, head in held}

    def sent(self, numbers: np.ndarray, lock: Any) -> np.ndarray:
        """Return items of pinned trajectories as `MediaSpec.send`. Takes the lock itself. [n] -> [bytes]."""
        with lock:
            heads = self.find(numbers)
        return self.spec.send([self.read(head) for head in heads.tolist()])

    def named(self, numbers: np.ndarray, lock: Any) -> dict[int, Media]:
        """Return the media of a pinned trajectory by step, from the numbers of its steps. [T], int64."""
        steps, known = np.flatnonzero(numbers), {column.name: column for column in self.spec.columns}
        found = {
            number: Media(**{name: _value(known[name], part) for name, part in rows.items() if len(part)})
            for number, rows in self.rows_of(distinct(numbers[steps]), lock).items()
        }
        return {step: found[int(numbers[step])] for step in steps.tolist()}

    def add(
        self,
        items: Mapping[int, MediaItem],
        named: np.ndarray,
        lock: Any,
        release: Callable[[], bool],
    ) -> None:
        """Add what the store lacks; takes the lock itself. `named` are all numbers that the rows name, [n]:
        these rows are written, so nothing of them is evicted.

        Raises:
            DataError: An item is neither given nor held, or its number is that of another content.
            StoreFullError: Trajectories name too much of what is held.
        """
        named = distinct(named)
        with lock:
            heads = self.find(named)
            for number, head in zip(named.tolist(), heads.tolist(), strict=True):
                if head >= 0 and number in items:
                    digest = self.words[head, MediaPage.DIGEST : MediaPage.NUM_WORDS]
                    if not np.array_equal(digest, items[number].digest):
                        raise DataError(self.name, "must have a number of its own", number, "change it a bit")
                elif head < 0 and number not in items:
                    rule, remedy = "must be held by the store", "give the Media in place of its number"
                    raise DataError(self.name, rule, number, remedy)
            missing = [items[number] for number in named[heads < 0].tolist()]
            places = self._reserve(missing, release) if missing else []
        with undo_on_error(lambda: self._free(places, lock)):
            for item, pages in zip(missing, places, strict=True):
                whole, rest = divmod(len(item.content), self.spec.page_bytes)
                split = whole * self.spec.page_bytes
                self.bytes[pages[:whole]] = item.content[:split].reshape(whole, self.spec.page_bytes)
                self.bytes[pages[-1], :rest] = item.content[split:]
        with lock:
            for item, pages in zip(missing, places, strict=True):
                # Another process may have added it meanwhile: then these pages are free again.
                is_new = self.find(np.array([item.number]))[0] < 0
                self._set(pages, PageState.WHOLE if is_new else PageState.FREE)

    def _evict(self, wanted: int) -> None:
        """Evict items that nothing names, the oldest first, until so many pages are free."""
        states, needed = self.words[:, MediaPage.STATE], self.needed()
        heads = np.flatnonzero(states == PageState.WHOLE)
        heads = heads[look_up(needed, self.words[heads, MediaPage.NUMBER], needed) < 0]
        for head in heads[np.argsort(self.words[heads, MediaPage.AGE])].tolist():
            if np.count_nonzero(states == PageState.FREE) >= wanted:
                break
            self._set(chain(self.words, head), PageState.FREE)

    def _free(self, places: list[list[int]], lock: Any) -> None:
        with lock:
            for pages in places:
                self._set(pages, PageState.FREE)

    def _set(self, pages: list[int], state: int) -> None:
        """Set the state of an item, that of its first page; what follows is free with it."""
        self.words[pages[0], MediaPage.STATE] = state
        if state == PageState.FREE:
            self.words[pages[1:], MediaPage.STATE] = state

    def _reserve(self, items: list[MediaItem], release: Callable[[], bool]) -> list[list[int]]:
        """Return pages for each item, marked as being written; evict what nothing names, then `release`."""
        sizes = [-(-len(item.content) // self.spec.page_bytes) for item in items]
        wanted, states = sum(sizes), self.words[:, MediaPage.STATE]
        while np.count_nonzero(states == PageState.FREE) < wanted <= len(states):
            self.recover()  # pages of dead processes
            self._evict(max(wanted, len(states) // _PARTS))
            if np.count_nonzero(states == PageState.FREE) < wanted and not release():
                break
        free = np.flatnonzero(states == PageState.FREE)
        if len(free) < wanted:
            rule = f"must have {wanted} free pages of {self.spec.page_bytes} bytes"
            remedy = "raise media.capacity_bytes, or lower the number of trajectories that are held"
            raise StoreFullError(self.name, rule, f"{len(free)} of {len(states)}", remedy)
        places, age = list[list[int]](), int(self.words[:, MediaPage.AGE].max()) + 1
        for item, end in zip(items, np.cumsum(sizes).tolist(), strict=True):
            pages = free[end - sizes[len(places)] : end]
            self.words[pages, MediaPage.NEXT] = np.append(pages[1:] + 1, 0)
            self.words[pages[1:], MediaPage.STATE] = PageState.FOLLOWING
            head = self.words[pages[0]]
            head[MediaPage.NUMBER], head[MediaPage.NUM_BYTES] = item.number, len(item.content)
            head[MediaPage.OWNER], head[MediaPage.AGE] = self._memory.peer, age
            head[MediaPage.DIGEST :] = item.digest
            head[MediaPage.STATE] = PageState.WRITING
            places.append(pages.tolist())
        return places

    def recover(self) -> None:
        """Free the pages that no item of the store or of a living process has."""
        states, held = self.words[:, MediaPage.STATE], np.zeros(len(self.words), bool)
        for head in np.flatnonzero((states == PageState.WHOLE) | (states == PageState.WRITING)).tolist():
            owner = int(self.words[head, MediaPage.OWNER])
            if states[head] == PageState.WHOLE or self._memory.is_alive(owner):
                held[chain(self.words, head)] = True
        states[~held] = PageState.FREE

    def statistics(self) -> dict[str, int]:
        """Return how many items are held, and the bytes of their pages and of all."""
        states = self.words[:, MediaPage.STATE]
        size, used = self.spec.page_bytes, np.count_nonzero(states != PageState.FREE)
        items = int(np.count_nonzero(states == PageState.WHOLE))
        return {"items": items, "bytes": int(used) * size, "capacity_bytes": len(states) * size}


def chain(words: np.ndarray, head: int) -> list[int]:
    """Return the pages of an item, from the words of all pages."""
    pages = [head]
    while following := int(words[pages[-1], MediaPage.NEXT]):
        pages.append(following - 1)
    return pages


def inside(rows: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """Return which rows lie in extents, by first row and number: [n], [m, 2] -> [n], bool."""
    extents = np.concatenate([[[-1, 0]], extents[np.argsort(extents[:, 0], kind="stable")]])
    at = np.searchsorted(extents[:, 0], rows, side="right") - 1
    return np.asarray(rows < extents[at].sum(-1))


def _value(column: Column, rows: np.ndarray) -> Any:
    """Return rows as a program gives them: bfloat16 as a tensor."""
    return as_tensor(rows, column.dtype) if column.dtype == "bfloat16" else rows
