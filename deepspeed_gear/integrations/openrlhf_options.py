"""OpenRLHF's options: which ones a table supports, and the gear section that follows from them.

Nothing here imports OpenRLHF: `args` is the namespace that its command line gives.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.integrations.framework_options import TABLE, Limit, follow, one_of

#: Columns with a number for each action, by the field of OpenRLHF's Experience that they hold.
ACTION_FIELDS = {
    "old_logp": "action_log_probs",
    "advantage": "advantages",
    "ref_logp": "base_action_log_probs",
    "sampling_logp": "rollout_log_probs",
}
#: Column of the loss tokens of a trajectory, and of what OpenRLHF logs of it.
COUNT = "num_actions"
LOGGED = "logged"
_LOGGED_BYTES = 4096
_PAGE = "docs/how-to/openrlhf.md has a section to begin with"
_follow = partial(follow, "OpenRLHF's options")


_ALONE = "must be 1: the ranks of a group would each add the same experience"
LIMITED = {
    "train.dynamic_batch_enable": Limit(
        bool,
        "must be on: micro batches are packs of as many tokens as fit",
        "give --train.dynamic_batch_enable --ds.packing_samples",
    ),
    "ds.ring_attn_size": Limit(one_of(1), _ALONE, "leave it out"),
    "ds.tensor_parallel_size": Limit(one_of(1), _ALONE, "leave it out"),
    "ds.deepcompile": Limit(
        one_of(False, None),
        "must be off: compiled graphs reduce gradients by themselves",
        "leave it out",
    ),
}


def check_options(args: Any) -> None:
    """Raise a ConfigError for an option of OpenRLHF that a table does not support, by its name."""
    for name, limit in LIMITED.items():
        group, option = name.split(".")
        value = getattr(getattr(args, group), option, 1 if option.endswith("_size") else False)
        limit.check(f"--{name}", value)


def action_columns(args: Any) -> dict[str, str]:
    """Return the columns of actions that the policy's loss reads, by their field of Experience."""
    used = {"old_logp", "advantage"}
    if args.algo.kl.use_loss and args.algo.kl.init_coef > 0:
        used.add("ref_logp")
    if args.algo.advantage.is_correction_level != "off":
        used.add("sampling_logp")
    return {name: field for name, field in ACTION_FIELDS.items() if name in used}


def fill_section(section: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Return a gear section, completed by what follows from OpenRLHF's options.

    Args:
        section: It has the table `rollouts` with its capacity and `max_length`. Its sampler, the
            number of trajectories of a rollout batch and `max_times_sampled` may be there as well.
        args: OpenRLHF's options.
    Raises:
        ConfigError: There is no such table, an option follows from OpenRLHF's and has another
            value, or OpenRLHF's option is not supported.
    """
    check_options(args)
    whole: dict[str, Any] = copy.deepcopy(dict(section))
    if set(whole.get("tables", {})) != {TABLE}:
        rule = f"must have one table, {TABLE}, with its capacity and max_length"
        raise ConfigError("gear.tables", rule, sorted(whole.get("tables", {})), _PAGE)
    table = whole["tables"][TABLE]
    table.setdefault("remove", "fifo")
    table.setdefault("max_times_sampled", 1)
    columns = {
        "tokens": {"dtype": "int32", "role": "token"},
        "loss_mask": {"dtype": "bool", "role": "loss_mask"},
        **{name: {"dtype": "float32"} for name in action_columns(args)},
        COUNT: {"dtype": "int64", "rows": "1"},
        LOGGED: {"dtype": "json", "rows": "1", "max_bytes": _LOGGED_BYTES},
    }
    _follow(table.setdefault("schema", {}), f"gear.tables.{TABLE}.schema.", {"columns": columns})
    whole.setdefault("sampler", {"kind": "fifo"})
    whole.setdefault("pack", {}).setdefault("tokens", args.train.max_tokens_per_gpu)
    # OpenRLHF pads micro batches, and removes the padding, by itself.
    _follow(whole["pack"], "gear.pack.", {"pad": {"multiple": 1}, "prefix": "own"})
    rollout = whole.setdefault("rollout", {})
    generated = args.rollout.batch_size * args.rollout.n_samples_per_prompt
    count = rollout.setdefault("trajectories", generated)
    size = args.train.batch_size
    if count % size:
        rule = f"must be a multiple of --train.batch_size ({size})"
        raise ConfigError("gear.rollout.trajectories", rule, count, "change one of them")
    # Without a shuffle every epoch has the same packs, as OpenRLHF's data loader expects.
    given = {"minibatches": count // size, "epochs": args.train.max_epochs, "shuffle": False}
    _follow(rollout, "gear.rollout.", given)
    _follow(whole, "gear.", {"fields": {name: {} for name in columns if name != COUNT}})
    return whole


def fill_ds_config(config: dict[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ds_config of the policy's engine with a gear section.

    Gradients of 16-bit weights are summed in float32, unless --ds.grad_accum_dtype says otherwise.

    Args:
        config: OpenRLHF's ds_config, with dynamic batches.
        section: From `fill_section`.
    """
    config = {**config, "gear": section, "managed_gradient_accumulation": False}
    types = {**config.get("data_types", {})}
    if types.get("grad_accum_dtype") is None:
        types["grad_accum_dtype"] = "fp32"
    return {**config, "data_types": types}
