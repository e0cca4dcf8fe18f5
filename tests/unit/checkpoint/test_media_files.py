"""Media in checkpoints: what trajectories name is saved with them, and found again by any number of
nodes.
"""

from pathlib import Path

import numpy as np
import pytest
from media_tables import evict_all, group, image, media_section, pages_of
from rollout_support import micros

from deepspeed_gear import CheckpointError, Replay, StoreFullError
from deepspeed_gear.store.eviction import Evictor
from deepspeed_gear.store.media_pages import chain
from deepspeed_gear.store.records import MediaPage, PageState
from deepspeed_gear.timeouts import Context

BIG = {"capacity_bytes": 64 << 20, "page_bytes": 1 << 16}


def add(replay: Replay, numbers: range, rows: int | None = None) -> list[int]:
    return [
        replay.add(one)
        for n in numbers
        for one in group(n, {0: image(n, rows), 5: image(n % 3, rows)})
    ]


def test_a_load_has_what_trajectories_name_and_no_more(tmp_path: Path) -> None:
    config = media_section()
    with Replay(config) as replay:
        ids = add(replay, range(8))
        replay.remove(ids[:8])
        read = replay.read(ids[8:])
        state = replay.save(tmp_path)
        first = [micro.media.columns["patches"].clone() for micro in micros(replay.rollout())]
    with Replay(config) as resumed:
        add(resumed, range(50, 80))  # all pages are in use
        resumed.load(tmp_path, state)
        for one, other in zip(resumed.read(ids[8:]), read, strict=True):
            assert one["image"] == other["image"]
        again = [micro.media.columns["patches"] for micro in micros(resumed.rollout())]
        assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
        pages = pages_of(resumed)
        heads = np.flatnonzero(pages.words[:, MediaPage.STATE] == PageState.WHOLE)
        assert sum(map(len, chain(pages.words, heads))) <= len(pages.words)
        add(resumed, range(70, 75))  # and it goes on
    with Replay(media_section({"capacity_bytes": 2 << 10})) as small:
        with pytest.raises(StoreFullError, match=r"room for the \d+ pages of the checkpoint"):
            small.load(tmp_path, state)
        assert small.tables["main"].num_trajectories == 0
    other = media_section({"columns": {"patches": {"dtype": "float32", "shape": [3]}}})
    with Replay(other) as replay, pytest.raises(CheckpointError, match="must have the media"):
        replay.load(tmp_path, state)
    with Replay(
        media_section({"page_bytes": 1024, "capacity_bytes": 32 << 10})
    ) as replay:  # of other pages
        replay.load(tmp_path, state)
        assert all(
            a["image"] == b["image"] for a, b in zip(replay.read(ids[8:]), read, strict=True)
        )


def test_a_save_links_the_segments_that_have_not_changed(tmp_path: Path) -> None:
    with Replay(media_section(BIG, remove="none")) as replay:
        add(replay, range(9), 6000)  # 2 pages each; a segment has 64
        for n in range(9, 40):
            add(replay, range(n, n + 1), 6000)
        replay.save(tmp_path)
        inodes = {path.name: path.stat().st_ino for path in (tmp_path / "main").glob("media.*.npy")}
        assert len(inodes) == 2
        add(replay, range(40, 42), 6000)
        replay.save(tmp_path)
        found = {path.name: path.stat().st_ino for path in (tmp_path / "main").glob("media.*.npy")}
        assert [name for name in inodes if found[name] == inodes[name]] == ["media.000000.npy"]
        last = replay.read([41 * 4])[0]["image"]
        replay.remove(range(40 * 4, 42 * 4))
        Evictor(replay.tables["main"], Context()).free_retired()
        with replay.tables["main"].lock:
            evict_all(pages_of(replay))
        add(replay, range(42, 44), 6000)  # into the pages of those that have left
        images = [one["image"] for one in replay.read([*range(0, 40 * 4, 4), 42 * 4, 43 * 4])]
        assert images[-1] != last
        state = replay.save(tmp_path)
    path = tmp_path / "main" / "media.000001.npy"
    with Replay(media_section(BIG, remove="none")) as replay:
        replay.load(tmp_path, state)
        held = replay.read([*range(0, 40 * 4, 4), 42 * 4, 43 * 4])
        assert [one["image"] for one in held] == images
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with Replay(media_section(BIG, remove="none")) as replay:
        with pytest.raises(CheckpointError, match=r"media\.000001\.npy"):
            replay.load(tmp_path, state)
        assert replay.tables["main"].num_trajectories == 0, "nothing has changed"
