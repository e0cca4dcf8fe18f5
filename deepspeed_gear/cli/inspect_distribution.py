"""The distribution that a table's training stream draws from, of a saved store or a running one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.checkpoint import save_folders
from deepspeed_gear.checkpoint.table_files import SavedTable, open_rows, read_table
from deepspeed_gear.data.trajectory_checks import as_numbers
from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.ops.constants import MASS_BITS, ONE_Q62
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.sampling.exclusions import Exclusion, count_exclusions, rule_of_json
from deepspeed_gear.sampling.mass_rules import AnchorRule
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


@dataclass(frozen=True)
class Distribution:
    """The drawable items of a table, with their masses and priorities."""

    table: str
    kind: str  # of the sampler in the config, and what an item is; "" where it is not known
    unit: str
    num_trajectories: int
    num_steps: int | None  # None, as `lengths`: only the data set records them
    masses: np.ndarray  # of what the tree draws: items, or their trajectories. [n], float64, above 0
    priorities: np.ndarray | None  # of the items. [n], float32
    draws: np.ndarray | None  # how often each item was drawn, if counted. [m], int32
    excluded: list[Exclusion] | None = None  # what cannot be drawn, by reason; None: not counted
    waiting: int = 0  # items written since the latest selection, which the next one adds
    lengths: np.ndarray | None = None  # steps of each stored trajectory. [n], int64
    prompts: dict[str, Any] | None = None  # the account of a ledger, as `books_of`
    groups: dict[str, int | None] | None = None  # their numbers, as `TableGroups.statistics`

    def summary(self) -> dict[str, Any]:
        """Return the numbers that `gear inspect` prints; JSON-able."""
        total = float(self.masses.sum())
        falling = np.sort(self.masses)[::-1]
        shares = {}
        if len(falling):
            counts = {share: max(1, round(share * len(falling))) for share in _SHARES}
            shares = {str(share): float(falling[:n].sum() / total) for share, n in counts.items()}
        spread = drawn = None
        if self.priorities is not None and len(self.priorities):
            low, middle, high = np.quantile(self.priorities, (0, 0.5, 1)).tolist()
            spread = {"min": low, "median": middle, "max": high, "mean": float(self.priorities.mean())}
        if self.draws is not None and len(self.draws):
            mean, never = float(self.draws.mean()), float((self.draws == 0).mean())
            drawn = {"mean": mean, "max": int(self.draws.max()), "never": never}
        return {
            "table": self.table,
            "kind": self.kind,
            "unit": self.unit,
            "trajectories": self.num_trajectories,
            "steps": self.num_steps,
            "length": None if self.lengths is None else distribution(self.lengths),
            "groups": self.groups,
            "prompts": self.prompts,
            "drawable": len(self.masses) + self.waiting,
            "waiting": self.waiting,
            "effective": float(total**2 / (self.masses**2).sum() / len(falling)) if len(falling) else None,
            "share_of_top": shares,
            "priorities": spread,
            "draws": drawn,
            "excluded": None if self.excluded is None else [asdict(one) for one in self.excluded],
        }


def distribution(values: NDArray[Any]) -> dict[str, float | None]:
    """Describe one value per trajectory: least, quantiles, most, mean and deviation; None without values."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return dict.fromkeys(("min", *map(str, LEVELS), "max", "mean", "std"))
    # Between two whole numbers lies no value of a column that has whole numbers only.
    is_whole = bool((numbers == np.rint(numbers)).all())
    method: Literal["inverted_cdf", "linear"] = "inverted_cdf" if is_whole else "linear"
    quantiles = np.quantile(numbers, LEVELS, method=method)
    return {
        "min": float(numbers.min()),
        **{str(level): float(value) for level, value in zip(LEVELS, quantiles, strict=True)},
        "max": float(numbers.max()),
        "mean": float(numbers.mean()),
        "std": float(numbers.std()),
    }


# ---- living --------------------------------------------------------------------------------------


def of_living(store: LiveStore) -> Distribution | None:
    """Read the distribution of a store of a running process; None for a table that is not sampled."""
    views, meaning = store.views, store.layout.meaning
    if TRAIN + "sums" not in views:
        return None
    known, schema = meaning.get("train") or {}, Schema.from_json(meaning["schema"])
    groups: dict[str, int | None] | None = None
    prompts = (meaning.get("sizes") or {}).get("prompts")
    books = None if prompts is None else books_of(PromptSpec(**prompts), views)
    spec = (meaning.get("sizes") or {}).get("group")
    if spec is not None:  # groups are formed on copies
        views, counts = forecast_groups(store.table, GroupSpec.from_json(spec), schema, views)
        groups = {**counts}
    slots = np.array(views["slots"])
    lengths = slots[slots[:, Slot.STATE] == SlotState.COMMITTED, Slot.NUM_STEPS]
    priorities = views.get(TRAIN + "priorities")
    leaves = np.array(views[TRAIN + "sums"][: len(slots) if priorities is None else len(priorities)])
    drawable = leaves > 0
    draws = views.get(TRAIN + "draws")
    if draws is not None:
        chosen = np.nonzero(drawable)[0]
        if priorities is None and known["unit"] == "step":
            rows, _, is_admitted = _admitted_steps(slots[chosen], known["anchors"])
            chosen = rows[is_admitted]
        draws = np.array(draws[chosen])
    excluded, waiting = None, 0
    if known:

        def values(name: str, slots: np.ndarray) -> np.ndarray:
            return as_numbers(views[f"column/{name}"][slots], schema[name])

        is_readable = all(f"column/{column.name}" in views for column in schema)  # else they are in files
        rule = rule_of_json(known)
        excluded, waiting = count_exclusions(rule, schema, TRAIN, views, values if is_readable else None)
    return Distribution(
        table=store.table,
        kind=known.get("kind", ""),
        unit=known.get("unit", ""),
        num_trajectories=len(lengths),
        num_steps=int(lengths.sum()),
        masses=leaves[drawable].astype(np.float64),
        priorities=None if priorities is None else np.array(priorities[drawable]),
        draws=draws,
        excluded=excluded,
        waiting=waiting,
        lengths=lengths,
        groups=groups,
        prompts=books,
    )


def _admitted_steps(slots: np.ndarray, anchors: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row and slot of each step of some slots, and whether a window may stand there. [steps] each."""
    rows, steps, owner = rows_of(slots)
    return rows, owner, AnchorRule(*anchors).admits(steps, slots[owner, Slot.NUM_STEPS])


# ---- saved ---------------------------------------------------------------------------------------


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


def of_saved(folder: Path) -> Distribution:
    """Read the distribution of a saved table, of all its shards."""
    found = read_table(folder)
    open_rows(found)
    known = found.manifests[0].get("train") or {}
    slots, content = found.whole.slots, found.whole.streams.get("train", {})
    names = ("priorities", "leaves", "draws", "bases", "alpha", "queued")
    priorities, leaves, draws, bases, alpha, queued = map(content.get, names)
    has_steps = known.get("unit") == "step"
    items, held = (leaves, leaves) if priorities is None else (priorities, bases)
    if items is None or held is None:
        raise CheckpointError(str(folder), "must be of a table that is sampled", None)
    drawable, lengths, groups = items > 0, None, None
    if slots is not None:  # what was evicted since the latest selection is not drawable
        is_held = slots[:, Slot.STATE] == SlotState.COMMITTED
        drawable &= is_held[rows_of(slots)[2]] if has_steps and priorities is not None else is_held
        lengths, groups = slots[is_held, Slot.NUM_STEPS], _saved_groups(found, is_held)
    masses = items[drawable].astype(np.float64)
    if priorities is not None and alpha is not None:
        # priority ** alpha in units of 2^-24, to the precision of float64
        masses = np.rint(masses ** (float(alpha[0]) / ONE_Q62) * 2.0**MASS_BITS)
        masses = np.clip(masses, 1, 2.0 ** known["most_bits"])
    if draws is not None and has_steps and priorities is None:  # they are saved trajectory by trajectory
        assert slots is not None
        _, owner, is_admitted = _admitted_steps(slots, known["anchors"])
        draws = draws[is_admitted & drawable[owner]]
    elif draws is not None:
        draws = draws[drawable]
    waiting = 0
    if queued is not None:
        by_steps = has_steps and priorities is not None
        more = np.maximum(queued - held, 0) if by_steps else (queued > 0) & (held == 0)
        waiting = int(more.sum())
    return Distribution(
        table=save_folders.table_in(folder),
        kind=known.get("kind", ""),
        unit=known.get("unit", ""),
        num_trajectories=len(held) if lengths is None else len(lengths),
        num_steps=None if lengths is None else int(lengths.sum()),
        masses=masses,
        priorities=None if priorities is None else priorities[drawable],
        draws=draws,
        waiting=waiting,
        lengths=lengths,
        groups=groups,
    )


def _saved_groups(found: SavedTable, committed: np.ndarray) -> dict[str, int | None] | None:
    """Count the groups of a saved table, as `TableGroups.statistics`; None without groups."""
    groups = found.whole.groups
    if groups is None:
        return None
    leaders, incomplete = groups.records[committed, 0], None
    spec = found.manifests[0].get("group")  # missing in saves of earlier versions
    if spec is not None:
        numbers = found.columns[0][spec["column"]][0]
        incomplete = len(np.unique(numbers[committed][leaders == 0]))
    return {
        "complete": len(np.unique(leaders[leaders > 0])),
        "incomplete": incomplete,
        **{name: int(groups.counts[word]) for name, word in COUNTED.items()},
    }
