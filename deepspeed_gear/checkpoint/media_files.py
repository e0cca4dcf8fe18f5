"""Media of a checkpoint: the pages of items that trajectories name, in segments.

A save has the words of all pages of the store, which are 0 for pages that are not saved; and for
each segment of pages the bytes of the saved ones, linked if unchanged. A load adds the items that
its trajectories name, from any saved shard that has them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.checkpoint import checked_files, save_folders
from deepspeed_gear.data.media_digests import MediaItem
from deepspeed_gear.errors import CheckpointError, StoreFullError
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.media_pages import MediaPages, chain, inside
from deepspeed_gear.store.records import MediaPage, PageState

WORDS = "media_pages.npy"
KIND = "media"
_SEGMENTS = 256
_LEAST_BYTES = 4 << 20
_MOST_BYTES = 64 << 20  # of the items that a load adds at once


def saved(
    media: MediaPages,
) -> tuple[np.ndarray, dict[str, Any], dict[str, list[np.ndarray]]]:
    """Describe the media of a store for a save. The caller holds the lock.

    Returns:
        Words of all pages, [pages, words], int64; their entry in the manifest; and the bytes of
        each segment in runs of pages, as views.
    """
    heads = media.find(media.needed(with_arrivals=False))
    heads = heads[heads >= 0]
    owner = np.full(len(media.words), -1)
    order = np.zeros(len(media.words), np.int64)
    owner[heads] = heads
    for place, pages in enumerate(chain(media.words, heads)):
        order[pages] = place
        following = media.words[pages, MediaPage.NEXT]
        owner[following[following > 0] - 1] = owner[pages[following > 0]]
    used = np.flatnonzero(owner >= 0)
    words = np.zeros_like(media.words)
    words[used] = media.words[used]
    words[:, [MediaPage.OWNER, MediaPage.AGE]] = 0
    # The bytes of a page follow from its item and its place in it; equal keys mean equal bytes.
    keys = np.column_stack([used, words[owner[used], MediaPage.DIGEST :], order[used]])
    size = max(-(-len(words) // _SEGMENTS), _LEAST_BYTES // media.spec.page_bytes, 1)
    numbers, begins = np.unique(used // size, return_index=True)
    segments = dict[str, str]()
    parts = dict[str, list[np.ndarray]]()
    for number, first, end in zip(numbers.tolist(), begins, [*begins[1:], len(used)], strict=False):
        key = keys[first:end].astype("<i8").tobytes() + str(media.spec.page_bytes).encode()
        pages = used[first:end]
        runs = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1)
        segments[f"{number:06d}"] = hashlib.sha256(key).hexdigest()
        parts[f"{number:06d}"] = [media.bytes[run[0] : run[-1] + 1] for run in runs]
    columns = Schema(media.spec.columns).to_json()["columns"]
    return words, {"columns": columns, "pages": size, "segments": segments}, parts


def file_of(segment: str) -> str:
    """Return the file name of a segment of pages."""
    return f"{KIND}.{segment}.npy"


class SavedMedia:
    """The media items of a checkpoint that the trajectories of one store name.

    Args:
        media: Pages of the store, which get the items.
        folders: Folders of the saved table's shards.
        manifests: Manifest of each folder.
        named: Numbers of the items. [n], int64.
    Raises:
        CheckpointError: An item or a file is missing or damaged.
        StoreFullError: The items do not fit.
    """

    def __init__(
        self,
        media: MediaPages,
        folders: list[Path],
        manifests: list[dict[str, Any]],
        named: np.ndarray,
    ) -> None:
        self._media = media
        self._folders = folders
        self._manifests = manifests
        self._named = named
        self._at = str(folders[0])
        self._words = list[np.ndarray]()
        self._places: dict[int, tuple[int, int]] = {}  # item -> shard and first page
        # (shard, segment) -> numbers of its pages, and their bytes.
        self._opened: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        for shard, (folder, manifest) in enumerate(zip(folders, manifests, strict=True)):
            at = str(folder / save_folders.MANIFEST)
            given = checked_files.entry(manifest, KIND, dict, at)
            if given.get("columns") != Schema(media.spec.columns).to_json()["columns"]:
                raise CheckpointError(
                    at,
                    f"must have the media {media.spec.columns}",
                    given.get("columns"),
                    checked_files.ANOTHER,
                )
            words = _map(folder, manifest, WORDS)
            self._words.append(words)
            heads = np.flatnonzero(words[:, MediaPage.STATE] == PageState.WHOLE)
            self._places.update(
                (int(words[head, MediaPage.NUMBER]), (shard, int(head))) for head in heads
            )
        missing = [number for number in named.tolist() if number not in self._places]
        if missing:
            rule = "must hold the media that its trajectories name"
            raise CheckpointError(self._at, rule, missing[0], checked_files.ANOTHER)
        size = media.spec.page_bytes
        places = [self._places[number] for number in named.tolist()]
        sizes = [self._words[shard][head, MediaPage.NUM_BYTES] for shard, head in places]
        pages = int(sum(-(-int(one) // size) for one in sizes))
        if pages > len(media.words):
            rule = f"must have room for the {pages} pages of the checkpoint"
            raise StoreFullError(media.name, rule, len(media.words), f"raise {media.spec.capacity}")
        for shard, head in places:
            for (page,) in chain(self._words[shard], np.array([head])):
                self._open(shard, page)

    def _open(self, shard: int, page: int) -> tuple[np.ndarray, np.ndarray]:
        """Open the segment of a page; return the numbers of its pages and their bytes.

        The file is checked when it is opened first, and stays mapped.
        """
        segment = page // checked_files.entry(
            self._manifests[shard][KIND], "pages", int, self._at, 1
        )
        if (shard, segment) not in self._opened:
            size = int(self._manifests[shard][KIND]["pages"])
            pages = np.flatnonzero(self._words[shard][:, MediaPage.STATE] != PageState.FREE)
            name = file_of(f"{segment:06d}")
            data = _map(self._folders[shard], self._manifests[shard], name)
            self._opened[shard, segment] = pages[pages // size == segment], data
        return self._opened[shard, segment]

    def restore(self, release: Callable[[], bool]) -> None:
        """Add the items, before the slots of their trajectories are committed. Requires the lock.

        `release` frees evicted slots whose items take the room.
        """
        self._media.clear_arrivals()
        items = dict[int, MediaItem]()
        num_bytes = 0
        for number in self._named.tolist():
            shard, head = self._places[number]
            words = self._words[shard]
            parts = list[np.ndarray]()
            for (page,) in chain(words, np.array([head])):
                pages, data = self._open(shard, page)
                parts.append(data[np.searchsorted(pages, page)])
            content = np.concatenate(parts)[: int(words[head, MediaPage.NUM_BYTES])]
            items[number] = MediaItem(number, words[head, MediaPage.DIGEST :], content)
            num_bytes += len(content)
            if num_bytes > _MOST_BYTES or number == self._named[-1]:
                self._media.add(
                    items, np.array(list(items)), nullcontext(), release, keep=self._named
                )
                items = {}
                num_bytes = 0


def named_by(files: list[np.ndarray], records: np.ndarray) -> np.ndarray:
    """Return the numbers of media items that trajectories name. [n], int64.

    Args:
        files: Files of the column that names items; rows are numbered file after file.
        records: Slot records of the trajectories. [m, 8], int64.
    """
    rows = np.concatenate([np.zeros(0, np.int64), *files])
    named = np.flatnonzero(rows)
    return np.unique(rows[named[inside(named, records[:, [Slot.FIRST_ROW, Slot.NUM_ROWS]])]])


def _map(folder: Path, manifest: Mapping[str, Any], name: str) -> np.ndarray:
    at = str(folder / save_folders.MANIFEST)
    digest = checked_files.entry(manifest["files"], name, str, at)
    return checked_files.map_array(folder / name, digest)
