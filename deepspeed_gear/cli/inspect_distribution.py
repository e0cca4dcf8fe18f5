"""What a table holds, saved or in a running process, and what a running one draws from; JSON-able."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from deepspeed_gear.checkpoint import save_folders
from deepspeed_gear.checkpoint.table_files import open_rows, read_table
from deepspeed_gear.data.trajectory_checks import as_numbers
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.sampling.exclusions import count_exclusions, rule_of_json
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.group_spec import COUNTED, GroupSpec
from deepspeed_gear.store.groups import forecast_groups
from deepspeed_gear.store.live_stores import LiveStore
from deepspeed_gear.store.prompt_ledger import PromptSpec, books_of
from deepspeed_gear.store.row_allocator import rows_of

TRAIN = "stream/train/"
_GEAR = "gear"  # folder of an engine's checkpoint, in that of its tag
_LATEST = "latest"  # file beside the tags, with the name of the newest
_SHARES = (0.01, 0.1)
LEVELS = (0.1, 0.5, 0.9)  # quantiles of values of trajectories


def distribution(values: NDArray[Any]) -> dict[str, float | None]:
    """Describe one value per trajectory: least, quantiles, most, mean and deviation; None without values."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return dict.fromkeys(("min", *map(str, LEVELS), "max", "mean", "std"))
    quantiles = np.quantile(numbers, LEVELS, method="inverted_cdf")  # which are values themselves
    return {
        "min": float(numbers.min()),
        **{str(level): float(value) for level, value in zip(LEVELS, quantiles, strict=True)},
        "max": float(numbers.max()),
        "mean": float(numbers.mean()),
        "std": float(numbers.std()),
    }


def _contents(table: str, train: Mapping[str, Any], lengths: np.ndarray, **more: Any) -> dict[str, Any]:
    """Return what a table holds. `train` describes its training stream; empty: it is not sampled.

    `lengths` are steps, [n], int64; `more` is `groups` (`TableGroups.statistics`) and `prompts` (`books_of`).
    """
    return {
        "table": table,
        "kind": train.get("kind"),
        "unit": train.get("unit"),
        "trajectories": len(lengths),
        "steps": int(lengths.sum()),
        "length": distribution(lengths),
        "groups": None,
        "prompts": None,
        **more,
    }


def of_living(store: LiveStore) -> dict[str, Any]:
    """Return what a store of a running process holds and, if it is sampled, draws from."""
    views, meaning = store.views, store.layout.meaning
    train, sizes, schema = meaning.get("train"), meaning.get("sizes", {}), Schema.from_json(meaning["schema"])
    groups = prompts = None
    if sizes.get("group") is not None:  # groups are formed on copies
        group = TypeAdapter(GroupSpec).validate_python(sizes["group"])
        views, groups = forecast_groups(store.table, group, schema, views)
    if sizes.get("prompts") is not None:
        numbers = views["column/" + sizes["group"]["column"]]
        prompts = books_of(PromptSpec(**sizes["prompts"]), views, numbers)
    slots = np.array(views["slots"])
    lengths = slots[slots[:, Slot.STATE] == SlotState.COMMITTED, Slot.NUM_STEPS]
    found = _contents(store.table, train or {}, lengths, groups=groups, prompts=prompts)
    if train is None:
        return found

    def values(name: str, slots: np.ndarray) -> np.ndarray:
        return as_numbers(views[f"column/{name}"][slots], schema[name])

    is_readable = all(f"column/{column.name}" in views for column in schema)  # else they are in files
    rule = rule_of_json(train)
    excluded, waiting = count_exclusions(rule, schema, TRAIN, views, values if is_readable else None)
    priorities, draws = views.get(TRAIN + "priorities"), views.get(TRAIN + "draws")
    leaves = np.array(views[TRAIN + "sums"][: len(slots if priorities is None else priorities)])
    drawable = np.nonzero(leaves > 0)[0]
    counted = drawable
    if priorities is None and rule.unit == "step":  # drawn by trajectory, and counted by step
        rows, steps, owner = rows_of(slots[drawable])
        counted = rows[rule.anchors.admits(steps, slots[drawable[owner], Slot.NUM_STEPS])]
    return {
        **found,
        "drawable": len(drawable) + waiting,
        "waiting": waiting,  # those that the next selection adds
        "excluded": [asdict(one) for one in excluded],
        **drawing(
            leaves[drawable].astype(np.float64),
            None if priorities is None else np.array(priorities[drawable]),
            None if draws is None else np.array(draws[counted]),
        ),
    }


def drawing(masses: np.ndarray, priorities: np.ndarray | None, draws: np.ndarray | None) -> dict[str, Any]:
    """Describe the items that can be drawn.

    The tree draws by `masses` of items or their trajectories, [n], float64, above 0; `priorities` are of the
    items, [n], float32; `draws` how often each was drawn, if counted, [m], int32.
    """
    total, falling = float(masses.sum()), np.sort(masses)[::-1]
    found: dict[str, Any] = {"effective": None, "share_of_top": {}, "priorities": None, "draws": None}
    if len(falling):
        counts = {share: max(1, round(share * len(falling))) for share in _SHARES}
        found["share_of_top"] = {str(share): float(falling[:n].sum() / total) for share, n in counts.items()}
        found["effective"] = float(total**2 / (masses**2).sum() / len(falling))
    if priorities is not None and len(priorities):
        low, middle, high = np.quantile(priorities, (0, 0.5, 1)).tolist()
        found["priorities"] = {"min": low, "median": middle, "max": high, "mean": float(priorities.mean())}
    if draws is not None and len(draws):
        mean, never = float(draws.mean()), float((draws == 0).mean())
        found["draws"] = {"mean": mean, "max": int(draws.max()), "never": never}
    return found


def find_saves(folder: Path) -> tuple[Path | None, list[Path]]:
    """Return the folders of a checkpoint's position, None without one, and of its saved tables.

    The folder is that of an engine's checkpoints, of which the latest tag is taken; or of a tag, its gear
    folder or a table.
    """
    latest = folder / _LATEST
    if latest.is_file():
        folder /= latest.read_text().strip()
        if not folder.is_dir():
            rule, remedy = "must name a folder beside it", "take another checkpoint"
            raise CheckpointError(str(latest), rule, folder.name, remedy)
    if save_folders.manifests_in(folder):
        return None, [folder]
    folders = (folder, folder / _GEAR)
    position = next((one for one in folders if (one / save_folders.POSITION).is_file()), None)
    return position, [table for one in folders for table in save_folders.newest_tables(one)]


def of_saved(folder: Path) -> dict[str, Any]:
    """Check the files of a saved table, and return what it holds in all its shards."""
    found = read_table(folder)
    open_rows(found)
    manifest, slots, saved = found.manifests[0], found.whole.slots, found.whole.groups
    name, train, groups = save_folders.table_in(folder), manifest.get("train", {}), None
    if slots is None:  # only its data set has lengths
        count = found.whole.num_slots
        return _contents(name, train, np.zeros(0), trajectories=count, steps=None, length=None)
    is_held = slots[:, Slot.STATE] == SlotState.COMMITTED
    if saved is not None:
        column, leaders = manifest["group"]["column"], saved.records[is_held, 0]
        numbers = np.concatenate([columns[column][0] for columns in found.columns])[is_held]
        groups = {
            "complete": len(np.unique(leaders[leaders > 0])),
            "incomplete": len(np.unique(numbers[leaders == 0])),
            **{name: int(saved.counts[word]) for name, word in COUNTED.items()},
        }
    return _contents(name, train, slots[is_held, Slot.NUM_STEPS], groups=groups)
