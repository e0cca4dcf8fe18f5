"""What `gear inspect` shows of a table, living or saved: sizes, groups, prompts, items to draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from deepspeed_gear.checkpoint import save_folders
from deepspeed_gear.checkpoint.table_files import open_rows, read_table
from deepspeed_gear.cli.dataset_summary import LEVELS, distribution
from deepspeed_gear.data.stored_values import as_numbers
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.sampling.exclusions import count_exclusions
from deepspeed_gear.sampling.mass_rules import MassRule
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.group_spec import COUNTED, GroupSpec
from deepspeed_gear.store.groups import forecast_groups
from deepspeed_gear.store.live_stores import LiveStore
from deepspeed_gear.store.prompt_account import PromptAccount
from deepspeed_gear.store.prompt_spec import PromptSpec
from deepspeed_gear.store.records import SharedPrompt
from deepspeed_gear.store.row_allocator import rows_of

_STREAM = "stream/train/"  # regions of the training stream in a store
_SHARES = (0.01, 0.1)  # of the items with the largest masses
_GROUPS = (
    "  groups        {complete:,} complete, {incomplete:,} incomplete",
    "  left out      {rejected:,} groups rejected, {oversized:,} too large, {evicted_unsampled:,} "
    "evicted unsampled",
    "  trajectories  {late:,} late, {late_consumed:,} of groups that had left, {unfilled:,} "
    "unfilled, {surplus:,} surplus",
)
_PROMPTS = (
    "  prompts       {issued:,} issued: {trained:,} trained, {training:,} in training, "
    "{waiting:,} complete, {leased:,} leased, {returned:,} returned, {incomplete:,} incomplete"
)
_PRIORITIES = (
    "    priorities    sum {sum:.6g} of {prompts:,} prompts, from {smallest:.6g} to "
    "{largest:.6g}, {zero:,} of them 0"
)
_EPOCH = (
    "    epoch {at:<8}{issued:,} issued: {drawn:,} drawn, {waiting:,} complete, {leased:,} leased, "
    "{returned:,} returned, {incomplete:,} incomplete, {num_dropped:,} dropped"
)


def _contents(
    table: str, train: Mapping[str, Any], lengths: np.ndarray, **more: Any
) -> dict[str, Any]:
    """Describe the content of a table.

    Args:
        train: Description of its training stream; empty if the table is not sampled.
        lengths: Steps of each trajectory. [n], int64.
        **more: `groups` (`TableGroups.statistics`) and `prompts` (`PromptAccount.report`), or
            replacements.
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
    """Describe the store of a running process and, if it is sampled, the items it draws from."""
    views = store.views
    meaning = store.layout.meaning
    train = meaning.get("train")
    sizes = meaning.get("sizes", {})
    schema = Schema.from_json(meaning["schema"])
    groups = prompts = None
    if sizes.get("group") is not None:  # groups are formed on copies
        group = TypeAdapter(GroupSpec).validate_python(sizes["group"])
        views, groups = forecast_groups(store.table, group, schema, views)
    if sizes.get("prompts") is not None:
        numbers = views["column/" + sizes["group"]["column"]]
        prompts = PromptAccount(PromptSpec(**sizes["prompts"]), views, numbers).report()
    slots = np.array(views["slots"])
    lengths = slots[:, Slot.NUM_STEPS]
    is_held = slots[:, Slot.STATE] == SlotState.COMMITTED
    if "shared_prompts" in views:
        lengths = lengths + views["shared_prompts"][:, SharedPrompt.STEPS]
    lengths = lengths[is_held]
    contents = _contents(store.table, train or {}, lengths, groups=groups, prompts=prompts)
    if train is None:
        return contents

    def values(name: str, slots: np.ndarray) -> np.ndarray:
        return as_numbers(views[f"column/{name}"][slots], schema[name])

    # The columns of a data set that is mapped are in its files, not in the store.
    is_readable = all(f"column/{column.name}" in views for column in schema)
    rule = TypeAdapter(MassRule).validate_python(train)
    excluded, waiting = count_exclusions(
        rule, schema, _STREAM, views, values if is_readable else None
    )
    priorities = views.get(_STREAM + "priorities")
    draws = views.get(_STREAM + "draws")
    leaves = np.array(views[_STREAM + "sums"][: len(slots if priorities is None else priorities)])
    drawable = np.nonzero(leaves > 0)[0]
    counted = drawable
    # Steps without priorities are drawn by the masses of their trajectories, but counted singly.
    if priorities is None and rule.unit == "step":
        rows, steps, owner = rows_of(slots[drawable])
        counted = rows[rule.anchors.admits(steps, slots[drawable[owner], Slot.NUM_STEPS])]
    of_items = None if priorities is None else np.array(priorities[drawable])
    of_draws = None if draws is None else np.array(draws[counted])
    return {
        **contents,
        "drawable": len(drawable) + waiting,
        "waiting": waiting,  # those that the next selection adds
        "excluded": [asdict(one) for one in excluded],
        **drawing(leaves[drawable].astype(np.float64), of_items, of_draws),
    }


def drawing(
    masses: np.ndarray, priorities: np.ndarray | None, draws: np.ndarray | None
) -> dict[str, Any]:
    """Describe the items that can be drawn.

    Args:
        masses: Masses by which the tree draws items or their trajectories. [n], float64, above 0.
        priorities: Priorities of the items. [n], float32.
        draws: How often each item was drawn, if counted. [m], int32.
    """
    total = float(masses.sum())
    falling = np.sort(masses)[::-1]
    description: dict[str, Any] = {
        "effective": None,
        "share_of_top": {},
        "priorities": None,
        "draws": None,
    }
    if len(falling):
        counts = {share: max(1, round(share * len(falling))) for share in _SHARES}
        description["share_of_top"] = {
            str(share): float(falling[:n].sum() / total) for share, n in counts.items()
        }
        # Effective sample size by Kish, as a share of the items: 1 if all masses are equal, 1/n if
        # one item has all the mass.
        description["effective"] = float(total**2 / (masses**2).sum() / len(falling))
    if priorities is not None and len(priorities):
        low, middle, high = np.quantile(priorities, (0, 0.5, 1)).tolist()
        description["priorities"] = {
            "min": low,
            "median": middle,
            "max": high,
            "mean": float(priorities.mean()),
        }
    if draws is not None and len(draws):
        mean = float(draws.mean())
        never = float((draws == 0).mean())
        description["draws"] = {"mean": mean, "max": int(draws.max()), "never": never}
    return description


def of_saved(folder: Path) -> dict[str, Any]:
    """Check the files of a saved table, and describe its content over all shards."""
    saved_table = read_table(folder)
    open_rows(saved_table)
    manifest = saved_table.manifests[0]
    slots = saved_table.whole.slots
    saved = saved_table.whole.groups
    name = save_folders.table_in(folder)
    train = manifest.get("train", {})
    groups = None
    if slots is None:  # only its data set has lengths
        count = saved_table.whole.num_slots
        return _contents(name, train, np.zeros(0), trajectories=count, steps=None, length=None)
    is_held = slots[:, Slot.STATE] == SlotState.COMMITTED
    if saved is not None:
        column = manifest["group"]["column"]
        leaders = saved.records[is_held, 0]
        numbers = np.concatenate([columns[column][0] for columns in saved_table.columns])[is_held]
        groups = {
            "complete": len(np.unique(leaders[leaders > 0])),
            "incomplete": len(np.unique(numbers[leaders == 0])),
            **{name: int(saved.counts[word]) for name, word in COUNTED.items()},
        }
    lengths = slots[:, Slot.NUM_STEPS]
    if saved_table.whole.shared_prompts is not None:
        lengths = lengths + saved_table.whole.shared_prompts
    return _contents(name, train, lengths[is_held], groups=groups)


def table_lines(summary: dict[str, Any]) -> list[str]:
    """Format the description of a table's content, as lines."""
    what = (
        f"{summary['kind']}, unit {summary['unit']}"
        if summary["kind"]
        else "none: it is not sampled"
    )
    lines = [f"  sampler       {what}", f"  trajectories  {summary['trajectories']:,}"]
    if summary["steps"] is not None:
        lines.append(f"  steps         {summary['steps']:,}")
    if summary["length"] is not None and summary["trajectories"]:
        length = summary["length"]
        levels = ", ".join(f"{level:.0%} {length[str(level)]:,.0f}" for level in LEVELS)
        ends = f"min {length['min']:,.0f}, {levels}, max {length['max']:,.0f}"
        lines.append(f"  lengths       {ends}, mean {length['mean']:,.1f}")
    if summary["groups"] is not None:
        lines += [line.format(**summary["groups"]) for line in _GROUPS]
    if summary["prompts"] is not None:
        prompts = summary["prompts"]
        dropped = prompts["dropped"].items()
        reasons = "".join(f"; {count:,} dropped: {reason}" for reason, count in dropped)
        lines.append(_PROMPTS.format(**prompts) + reasons)
        if "priorities" in prompts:
            lines.append(_PRIORITIES.format(**prompts["priorities"]))
        for epoch, books in prompts["epochs"].items():
            num_dropped = sum(books["dropped"].values())
            lines.append(_EPOCH.format(at=epoch, num_dropped=num_dropped, **books))
    if "drawable" not in summary:
        return lines
    waiting = (
        f" ({summary['waiting']:,} added since the latest selection)" if summary["waiting"] else ""
    )
    lines.append(f"  drawable      {summary['drawable']:,}{waiting}")
    for one in summary["excluded"]:
        what = f"{one['trajectories']:,} trajectories ({one['steps']:,} steps) {one['reason']}"
        lines.append(f"  excluded      {what}; {one['remedy']}")
    if summary["effective"] is not None:
        tops = summary["share_of_top"].items()
        shares = ", ".join(f"top {float(part):.0%}: {share:.1%}" for part, share in tops)
        lines.append(f"  mass          {shares}; effective items {summary['effective']:.1%}")
    if summary["priorities"] is not None:
        lines.append(
            "  priorities    " + ", ".join(f"{k} {v:.4g}" for k, v in summary["priorities"].items())
        )
    if summary["draws"] is not None:
        drawn = "  drawn         mean {mean:.4g}, max {max:,}, never {never:.1%}"
        lines.append(drawn.format(**summary["draws"]))
    return lines
