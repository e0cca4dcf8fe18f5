"""Options of TRL's GRPOConfig: every one is classified, and what has no packed form is refused."""

import importlib.util
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_gear.config import parse
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.integrations.grpo_losses import NORMALIZE, GRPOLoss
from deepspeed_gear.integrations.trl_options import (
    APPLIED,
    LIMITED,
    UNCHANGED,
    check_options,
    config_fields,
    fill_ds_config,
)

needs_trl = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="trl is not installed")
# Options of a run with two ranks, and the defaults of those that are limited.
OPTIONS: dict[str, Any] = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "router_aux_loss_coef": None,
    "neftune_noise_alpha": None,
    "gradient_accumulation_steps": 1,
    "parallelism_config": None,
    "num_generations": 8,
    "generation_batch_size": 64,
    "steps_per_generation": 2,
    "num_iterations": 3,
    "per_device_train_batch_size": 16,
    "max_completion_length": 100,
    "bf16": False,
    "fp16": False,
    "use_cpu": False,
    "world_size": 2,
}


def config_with(**options: Any) -> SimpleNamespace:
    loss = vars(GRPOLoss())
    return SimpleNamespace(**loss | OPTIONS | options)


def ds_config(**options: Any) -> dict[str, Any]:
    table = {"capacity_trajectories": 100, "capacity_steps": 10_000, "max_length": 200}
    gear = {"tables": {"rollouts": table}, "pack": {"tokens": 256}}
    return {"zero_optimization": {"stage": 2}, "gear": gear, **options}


def filled(args: SimpleNamespace, **options: Any) -> dict[str, Any]:
    config = ds_config(**options)
    fill_ds_config(config, args, GRPOLoss.of(args))
    return config


@needs_trl
def test_every_option_of_the_installed_version_is_classified() -> None:
    """A new one of TRL or transformers fails here: what does the packed step do with it?"""
    from trl import GRPOConfig

    installed = {field.name for field in config_fields(GRPOConfig)}
    classified = Counter([*LIMITED, *APPLIED, *UNCHANGED])
    # The rest of `LIMITED` and the defaults of every loss are options of GRPOConfig as well.
    assert installed - {*classified} == set(), "not classified: see trl_options.py"
    assert {*classified} - installed == set(), "no longer options"
    assert [name for name, count in classified.items() if count > 1] == []
    assert {*GRPOLoss.__dataclass_fields__} <= {*LIMITED, *APPLIED}


@needs_trl
def test_defaults_are_those_of_trl() -> None:
    from trl import GRPOConfig

    fields = GRPOConfig.__dataclass_fields__
    args = SimpleNamespace(**{name: fields[name].default for name in vars(GRPOLoss())})
    assert GRPOLoss.of(args) == GRPOLoss()


@needs_trl
def test_an_unknown_option_is_refused_unless_it_has_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trl import GRPOConfig

    class Later(GRPOConfig):  # type: ignore[misc]
        """A config of a user: fields of its own are none of ours."""

    args = object.__new__(Later)
    values = {field.name: field.default for field in config_fields(Later)} | vars(config_with())
    del values["world_size"]  # a property
    vars(args).update(values)
    monkeypatch.delitem(LIMITED, "neftune_noise_alpha")
    check_options(args)
    args.neftune_noise_alpha = 5.0
    with pytest.raises(ConfigError, match=r"GRPOConfig.neftune_noise_alpha must have its default"):
        check_options(args)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("loss_type", "bnpo", '"dapo"'),
        ("loss_type", "another", '"dapo"'),
        ("importance_sampling_level", "sequence_token", "use one of them"),
        ("top_entropy_quantile", 0.2, "leave it out"),
        ("entropy_coef", 0.01, "leave it out"),
        ("use_adaptive_entropy", True, "leave it out"),
        ("router_aux_loss_coef", 0.001, "set it to 0.0"),
        ("neftune_noise_alpha", 5.0, "leave it out"),
        ("gradient_accumulation_steps", 4, "multiply per_device_train_batch_size"),
        ("parallelism_config", object(), "leave it out"),
        ("steps_per_generation", 3, "change it"),
        ("use_cpu", True, "leave it out"),
    ],
)
def test_what_has_no_packed_form_is_refused(name: str, value: Any, remedy: str) -> None:
    assert name in {*LIMITED, *APPLIED}
    check_options(config_with())
    with pytest.raises(ConfigError, match=rf"GRPOConfig\.{name} must .*{remedy}"):
        check_options(config_with(**{name: value}))


def test_every_limit_has_a_case() -> None:
    (mark,) = test_what_has_no_packed_form_is_refused.pytestmark
    assert {case[0] for case in mark.args[1]} >= {*LIMITED}


@pytest.mark.parametrize("loss_type", NORMALIZE)
def test_the_gear_section_follows_from_the_options(loss_type: str) -> None:
    config = filled(config_with(loss_type=loss_type, beta=0.1, off_policy_mask_threshold=0.5))
    section = parse(config["gear"])
    assert section.rollout.groups == 8
    assert (section.rollout.minibatches, section.rollout.epochs) == (2, 3)
    assert config["managed_gradient_accumulation"] is False
    assert config["train_micro_batch_size_per_gpu"] == 16
    names = {*config["gear"]["tables"]["rollouts"]["schema"]["columns"]}
    assert names >= {"tokens", "loss_mask", "old_logp", "ref_logp", "sampling_logp", "group"}
    # The same config is accepted a second time, as where a notebook makes a second trainer.
    fill_ds_config(
        config,
        config_with(beta=0.1, off_policy_mask_threshold=0.5, loss_type=loss_type),
        GRPOLoss(loss_type, beta=0.1, off_policy_mask_threshold=0.5),
    )


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"managed_gradient_accumulation": True}, "managed_gradient_accumulation"),
        ({"gear": {"sampler": {"kind": "uniform"}}}, "gear.sampler"),
        ({"gear": {"loss": {"normalize": "group"}}}, "gear.loss"),
    ],
)
def test_an_option_that_follows_has_no_other_value(section: dict[str, Any], name: str) -> None:
    config = ds_config()
    gear = config["gear"] | section.pop("gear", {})
    with pytest.raises(ConfigError, match=rf"{name} must be .* follows from the GRPOConfig"):
        filled(config_with(), **{"gear": gear, **section})


@pytest.mark.parametrize("gear", [None, {}, {"pack": {"tokens": 100}}])
def test_a_config_without_a_table_is_refused(gear: Any) -> None:
    with pytest.raises(ConfigError, match=r"GRPOConfig\.deepspeed must have gear\.pack and"):
        filled(config_with(), gear=gear)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_gradients_of_16_bit_weights_are_summed_in_float32(dtype: str) -> None:
    args = config_with(**{dtype: True})
    assert filled(args)["data_types"] == {"grad_accum_dtype": "fp32"}
    own = {"grad_accum_dtype": dtype}
    assert filled(args, data_types=dict(own))["data_types"] == own
    for config in ({}, {"data_types": {"grad_accum_dtype": "fp32"}}):
        with pytest.raises(ConfigError, match=r"zero_optimization\.stage must be 1, 2 or 3 with"):
            filled(args, zero_optimization={"stage": 0}, **config)
    assert filled(args, zero_optimization={}, data_types=dict(own))["data_types"] == own
    assert "data_types" not in filled(config_with(), zero_optimization={})
