"""The `gear` section of ds_config.json: its options, checked against each other, and compared with
others.

Configs are compared between the ranks of a run, and between a checkpoint and the run that loads it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import model_validator

from deepspeed_gear.config.cross_checks import check_options
from deepspeed_gear.config.options import GearOptions
from deepspeed_gear.errors import differences

# Options that may differ between nodes: they change speed and place, but no batch.
_OF_THE_NODE = ("recipe", "backend", "data", "threads", "transfer", "timeout_s", "metrics")
# How a global batch is divided and when it is made; the samples in it stay the same.
_OF_THE_RUN = (
    "prefetch batch_size micro_batch_size gradient_accumulation_steps pack batch rollout loss "
    "pipeline "
    "verify_every count_draws exchange shared_memory"
).split()

_ROOM = ("capacity_steps", "capacity_trajectories", "max_length", "num_envs", "rows", "media")


class GearConfig(GearOptions):
    """The `gear` section of ds_config.json."""

    @model_validator(mode="after")
    def _check_options(self) -> GearConfig:
        check_options(self)
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of what must be the same on all ranks of a run, hex."""
        return _sha256(shared_options(self))

    @property
    def resume_digest(self) -> str:
        """SHA-256 of what decides the samples of a global batch, hex: equal where a checkpoint
        fits.
        """
        return _sha256(batch_options(self))


def shared_options(config: GearOptions) -> dict[str, Any]:
    """Return the options that must be the same on all ranks.

    Where the data lie and how they are loaded is left out: each node may have its own copy, and the
    data set's fingerprint shows whether the copies are the same.
    """
    section = {name: value for name, value in config.to_json().items() if name not in _OF_THE_NODE}
    tables = config.resolved_tables.items()
    section["tables"] = {
        name: table.model_dump(mode="json", by_alias=True) for name, table in tables
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
    if section["advantage"] is None:  # as before there was this option
        del section["advantage"]
    for field in section["fields"].values():
        if field["offset"] is None and config.pack is None:
            field["offset"] = 0
    for table in section["tables"].values():
        for option in _ROOM:
            del table[option]
        del table["prompts"]  # their data set is compared by its fingerprint
        if table["group"] is None:  # as before there were groups
            del table["group"]
        else:
            del table["group"]["remember"]
        if table["data"] is not None:
            del table["data"]["replicate"]
    return section


def _sha256(options: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(options, sort_keys=True, allow_nan=False).encode()).hexdigest()


def difference(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return in which of their `shared_options` two configs differ: "gear.seed: 0 and 1"."""
    return differences(a, b, "gear", "{}: {} and {}")
