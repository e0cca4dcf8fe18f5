"""Tables of tokens with media, and the trajectories that name them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from rollout_support import COLUMNS, MOST, section

from deepspeed_gear import Media, Replay
from deepspeed_gear.store.media_pages import MediaPages

MEDIA = {
    "columns": {
        "patches": {"dtype": "float32", "shape": [3]},
        "grid": {"dtype": "int64", "shape": [2]},
    },
    "capacity_bytes": 16 << 10,
    "page_bytes": 512,
}
SCHEMA = {"columns": {**COLUMNS, "image": {"dtype": "int64", "role": "media"}}}
SIZE = 4  # members of a group


def media_section(media: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Return a gear section of packs of groups with media; `options` of the section, or of its
    table.
    """
    group = {"column": "prompt", "size": SIZE}
    table = {
        "capacity_steps": 2000,
        "max_length": MOST,
        "remove": "fifo",
        "schema": SCHEMA,
        "group": group,
    }
    table |= {
        name: options.pop(name)
        for name in ("writers", "capacity_steps", "remove")
        if name in options
    }
    table["media"] = {**MEDIA, **(media or {})}
    table = copy.deepcopy(table)
    sampler = {"kind": "fifo", "unit": "group"}
    given = {
        "fields": {"tokens": {}, "image": {}},
        "rollout": {"groups": 4},
        "sampler": sampler,
        **options,
    }
    return section(tables={"main": table}, **given)


def image(number: int, rows: int | None = None) -> Media:
    """Return an image of its own for each number, of 1 to 60 patches."""
    count = number * 7 % 60 + 1 if rows is None else rows
    patches = np.arange(count * 3, dtype=np.float32).reshape(count, 3) + 1000 * number
    return Media(patches=patches, grid=[[number, count]])


def group(prompt: int, images: dict[int, Media], steps: int = 8) -> list[dict[str, Any]]:
    """Return the trajectories of a group that all name the images, at these steps."""
    tokens = (np.arange(steps) + 1).astype(np.int32)
    own = {
        "tokens": tokens,
        "loss_mask": np.arange(steps) >= 5,
        "logp": np.zeros(steps, np.float32),
    }
    other = {"reward": np.float32(0), "prompt": np.int64(prompt), "image": images}
    return [{**own, **other, "tokens": tokens * (1 if m == 0 else m)} for m in range(SIZE)]


def pages_of(replay: Replay) -> MediaPages:
    media = replay.tables["main"].media
    assert media is not None
    return media


def evict_all(pages: MediaPages) -> None:
    """Evict all items that nothing needs. Wants the lock."""
    pages._evict(1 << 20, np.zeros(0, np.int64))


def with_media(config: dict[str, Any]) -> dict[str, Any]:
    """Return a section whose table has media; without a schema the program gives the column."""
    config = copy.deepcopy(config)
    config["tables"]["main"]["media"] = copy.deepcopy(MEDIA)
    if "schema" in config["tables"]["main"]:
        config["tables"]["main"]["schema"]["columns"]["image"] = {"dtype": "int64", "role": "media"}
        config["fields"]["image"] = {}
    return config
