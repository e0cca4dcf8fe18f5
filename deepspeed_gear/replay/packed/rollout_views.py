"""HTML views of rollout batches and their train steps for notebooks."""

from __future__ import annotations

import numpy as np

from deepspeed_gear.batching.tensor_views import tensor_table
from deepspeed_gear.errors import DataError
from deepspeed_gear.notebook_views import histogram_svg, view_html
from deepspeed_gear.replay.packed.rollout_columns import RolloutColumns


def rollout_view(number: int, columns: RolloutColumns, steps_done: str, is_closed: bool) -> str:
    """Return a table of the filled columns, with pictures of the trajectories.

    Args:
        number: Number of the rollout batch.
        columns: Its columns.
        steps_done: How many of its optimizer steps are done, as text.
        is_closed: Whether it has ended.
    """
    trajectories = columns.trajectories
    facts = {
        "items": f"{trajectories.num_items:,}",
        "trajectories": f"{len(trajectories):,}",
        "tokens": f"{trajectories.num_tokens:,}",
        "optimizer steps done": steps_done,
    }
    if is_closed:
        facts["state"] = "ended"
    pictures = [histogram_svg("steps of a trajectory", trajectories.lengths)]
    if len(trajectories) > trajectories.num_items:
        sizes = np.bincount(trajectories.item)
        pictures.append(histogram_svg("trajectories of a group", sizes))
    rewards = None if is_closed else _readable_rewards(columns)
    if rewards is not None:
        pictures.append(histogram_svg("reward of a trajectory", rewards))
    filled = [(name, values, None) for name, values in columns.filled.items()]
    table = tensor_table("filled column", filled) if filled else ""
    return view_html(f"Rollout {number}", facts, pictures, table)


def _readable_rewards(columns: RolloutColumns) -> np.ndarray | None:
    """Return the rewards of trajectories; None if this rank cannot read them all by itself."""
    if columns.context.is_spread or not len(columns.trajectories):
        return None
    schemas = [rows.table.schema for rows in columns.tables]
    if not all("reward" in schema and schema["reward"].rows == "1" for schema in schemas):
        return None
    if not all(schema["reward"].is_tensor for schema in schemas):
        return None
    try:
        return columns.values("reward")
    except DataError:  # late, and not all are filled
        return None


def step_view(title: str, lengths: np.ndarray, num_loss_tokens: int, num_micro_batches: int) -> str:
    """Return counts of a train step, with a picture of its trajectories' lengths."""
    facts = {
        "trajectories": f"{len(lengths):,}",
        "tokens": f"{int(lengths.sum()):,}",
        "loss tokens": f"{num_loss_tokens:,}",
        "micro batches of this rank": f"{num_micro_batches:,}",
    }
    return view_html(title, facts, [histogram_svg("steps of a trajectory", lengths)])
