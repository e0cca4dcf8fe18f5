"""Names of fields: which ones a batch has for other things, and their check."""

from __future__ import annotations

from deepspeed_gear.config.types import dotted
from deepspeed_gear.errors import ConfigError

# Names of the parts that every batch has for its samples; fields must not have them.
SAMPLE_NAMES = tuple(
    "is_weight trajectory_id anchor sample_number sample_index probability epoch valid "
    "relabelled goal_step".split()
)
BATCH_NAMES = (*SAMPLE_NAMES, "mask", "handle", "source")
N_STEP_NAMES = ("return_n", "discount", "steps_n")


def check_field_names(names: list[str], n_step: bool) -> None:
    """Reject field names that have another meaning in a batch.

    Also those that have no nested form: `a` beside `a.b`.
    """
    for name in names:
        at = dotted("gear", "fields", name)
        remedy = f'give it another name: {{"my_{name}": {{"column": "{name}"}}}}'
        if name in BATCH_NAMES:
            raise ConfigError(at, "must not be named like a part of every batch", name, remedy)
        if n_step and name in N_STEP_NAMES:
            raise ConfigError(
                at, "must not be named like what gear.n_step adds to the batch", name, remedy
            )
        inner = next((other for other in names if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise ConfigError(
                at, f"must not be a field and a group (of {inner})", None, "rename one"
            )
