"""Options that must be equal: on all ranks of a run, and at a resume with the checkpoint's."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from deepspeed_gear.config.options import GearOptions
from deepspeed_gear.errors import differences

# Options that may differ between nodes: they change speed and places, but no batch.
_OF_THE_NODE = ("recipe", "backend", "data", "threads", "transfer", "timeout_s", "metrics")
# Options that divide a global batch or say when it is made; the samples in it stay the same.
_OF_THE_RUN = (
    "prefetch batch_size micro_batch_size gradient_accumulation_steps pack batch rollout loss "
    "pipeline verify_every count_draws exchange shared_memory"
).split()
# Options of a table that give its room: a checkpoint can be loaded into a larger table.
_ROOM = (
    "capacity_steps",
    "capacity_trajectories",
    "max_length",
    "num_envs",
    "rows",
    "media",
    "ragged",
)


def shared_options(config: GearOptions) -> dict[str, Any]:
    """Return the options that must be the same on all ranks.

    Where the data lie and how they are loaded is left out: each node may have its own copy, and the
    fingerprint of the data set shows whether the copies are equal.
    """
    section = {name: value for name, value in config.to_json().items() if name not in _OF_THE_NODE}
    section["tables"] = {
        name: table.model_dump(mode="json", by_alias=True)
        for name, table in config.resolved_tables.items()
    }
    for table in section["tables"].values():
        if table["data"] is not None:
            table["data"] = {option: table["data"][option] for option in ("split", "replicate")}
    if "table" in section["sampler"]:
        section["sampler"]["table"] = config.sampled_tables[0]
    section["shared_memory"] = {
        name: section["shared_memory"][name] for name in ("prefix", "run", "keep")
    }
    return section


def batch_options(config: GearOptions) -> dict[str, Any]:
    """Return the options that decide the samples of global batches of a given size."""
    section = {
        name: value for name, value in shared_options(config).items() if name not in _OF_THE_RUN
    }
    # Digests of configs without later options equal those of versions before the options existed.
    if section["advantage"] is None:
        del section["advantage"]
    for field in section["fields"].values():
        del field["absent"]  # it changes values of a batch, and no sample
        if field["offset"] is None and config.pack is None:
            field["offset"] = 0
    for table in section["tables"].values():
        for option in _ROOM:
            del table[option]
        del table["prompts"]  # their data set is compared by its fingerprint
        if table["group"] is None:
            del table["group"]
        else:
            del table["group"]["remember"]
        if table["data"] is not None:
            del table["data"]["replicate"]
    return section


def resume_digest(config: GearOptions) -> str:
    """Return the SHA-256 of `batch_options`, in hex; a checkpoint fits a run with an equal one."""
    text = json.dumps(batch_options(config), sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def difference(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """List where the `shared_options` of two configs differ: "gear.seed: 0 and 1"."""
    return differences(a, b, "gear", "{}: {} and {}")
