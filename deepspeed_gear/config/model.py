"""The `gear` section of ds_config.json: its options, checked against each other."""

from __future__ import annotations

from pydantic import model_validator

from deepspeed_gear.config import config_digest
from deepspeed_gear.config.cross_checks import check_options
from deepspeed_gear.config.options import GearOptions


class GearConfig(GearOptions):
    """The `gear` section of ds_config.json."""

    @model_validator(mode="after")
    def _options_agree(self) -> GearConfig:
        check_options(self)
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of what all ranks of a run must agree on, hex."""
        return config_digest.sha256(config_digest.shared_options(self))

    @property
    def resume_digest(self) -> str:
        """SHA-256 of what decides the samples of a global batch, hex: equal where a checkpoint fits."""
        return config_digest.sha256(config_digest.batch_options(self))
