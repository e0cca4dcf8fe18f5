"""Checks of burn-in: the steps of a sequence that only warm up a recurrent state."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed_gear.config.cross_checks import dotted
from deepspeed_gear.config.options import FieldConfig, GearOptions
from deepspeed_gear.config.resolved_field import ResolvedField
from deepspeed_gear.errors import ConfigError


def first_step(fields: Sequence[FieldConfig] | Sequence[ResolvedField]) -> int:
    """Return the first step of a sample's sequence relative to its anchor: that of the earliest window."""
    return min(int(field.offset or 0) for field in fields if field.length is not None)


def check_burn_in(config: GearOptions) -> None:
    """Reject a burn-in that leaves a sample without a step that learns.

    Raises:
        ConfigError: There is no window, one of warm-up only, or a sample may have no step that learns.
    """
    if config.burn_in == 0:
        return
    windows = {name: field for name, field in config.fields.items() if field.length is not None}
    if not windows:
        rule = "must not be given where no field has a length"
        raise ConfigError("gear.burn_in", rule, config.burn_in, "give fields a length")
    for name, field in windows.items():
        if field.offset == "n_step":
            rule = "must be a number in a window where there is gear.burn_in"
            raise ConfigError(f"{dotted('gear', 'fields', name)}.offset", rule, field.offset)
    first = first_step(list(windows.values()))
    for name, field in windows.items():
        assert field.length is not None
        last = int(field.offset or 0) + field.length - 1
        if last < first + config.burn_in:
            rule = f"must be less than the steps up to the end of field {name} ({last + 1 - first})"
            raise ConfigError("gear.burn_in", rule, config.burn_in, "lengthen the field")
    if first + config.burn_in > 0 and config.item_sampler.anchors != "fits":
        rule = f"must be at most {max(0, -first)}, the steps of the windows in front of the anchor"
        remedy = 'else a sample may have no step that learns: lower the offsets, or use "anchors": "fits"'
        raise ConfigError("gear.burn_in", rule, config.burn_in, remedy)
