"""What a table for OpenRLHF's policy follows from: options by name, without the package."""

import importlib
import importlib.metadata
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_gear.config import parse
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.integrations.framework_options import check_version
from deepspeed_gear.integrations.openrlhf_options import (
    action_columns,
    check_options,
    fill_ds_config,
    fill_section,
)

TABLE = {"capacity_trajectories": 100, "capacity_steps": 10_000, "max_length": 200}


def options(**changed: Any) -> SimpleNamespace:
    """Return options of OpenRLHF by group; `changed` has some by their name with underscores."""
    groups: dict[str, dict[str, Any]] = {
        "train": {
            "dynamic_batch_enable": True,
            "max_tokens_per_gpu": 256,
            "batch_size": 32,
            "max_epochs": 3,
        },
        "rollout": {"batch_size": 16, "n_samples_per_prompt": 4},
        "ds": {"ring_attn_size": 1, "tensor_parallel_size": 1, "deepcompile": False},
        "kl": {"use_loss": False, "init_coef": 0.0},
        "advantage": {"is_correction_level": "off"},
    }
    for name, value in changed.items():
        group, _, option = name.partition("__")
        groups[group][option] = value
    spaces = {name: SimpleNamespace(**given) for name, given in groups.items()}
    algo = SimpleNamespace(kl=spaces.pop("kl"), advantage=spaces.pop("advantage"))
    return SimpleNamespace(algo=algo, **spaces)


def section(**more: Any) -> dict[str, Any]:
    return {"tables": {"rollouts": dict(TABLE)}, **more}


def test_a_section_follows_from_openrlhfs_options() -> None:
    given = section()
    whole = fill_section(given, options())
    assert given == section()  # the caller's is not changed
    assert whole["rollout"] == {
        "trajectories": 64,
        "minibatches": 2,
        "epochs": 3,
        "shuffle": False,
    }
    assert whole["pack"] == {"tokens": 256, "pad": {"multiple": 1}, "prefix": "own"}
    assert whole["tables"]["rollouts"]["max_times_sampled"] == 1
    config = parse(whole)
    assert config.rollout is not None
    assert config.rollout.trajectories == 64


def test_what_the_user_gives_stays() -> None:
    given = section(
        sampler={"kind": "uniform"}, rollout={"trajectories": 128}, pack={"tokens": 512}
    )
    given["tables"]["rollouts"]["max_times_sampled"] = 2
    whole = fill_section(given, options())
    assert whole["rollout"]["minibatches"] == 4
    assert whole["pack"]["tokens"] == 512
    assert whole["sampler"] == {"kind": "uniform"}
    assert whole["tables"]["rollouts"]["max_times_sampled"] == 2
    parse(whole)


def test_columns_are_those_that_the_loss_reads() -> None:
    assert set(action_columns(options())) == {"old_logp", "advantage"}
    assert "ref_logp" not in action_columns(options(kl__use_loss=True))
    used = action_columns(
        options(kl__use_loss=True, kl__init_coef=0.1, advantage__is_correction_level="token")
    )
    assert set(used) == {"old_logp", "advantage", "ref_logp", "sampling_logp"}


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"train__dynamic_batch_enable": False}, r"--train\.dynamic_batch_enable must be on"),
        ({"ds__ring_attn_size": 2}, r"--ds\.ring_attn_size must be 1.*got 2"),
        ({"ds__tensor_parallel_size": 4}, r"--ds\.tensor_parallel_size must be 1.*got 4"),
        ({"ds__deepcompile": True}, r"--ds\.deepcompile must be off"),
    ],
)
def test_an_option_without_a_table_is_refused(changed: dict[str, Any], match: str) -> None:
    check_options(options())
    with pytest.raises(ConfigError, match=match):
        fill_section(section(), options(**changed))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"tables": {}}, r"gear\.tables must have one table, rollouts"),
        (section(rollout={"trajectories": 100}), r"gear\.rollout\.trajectories must be a multiple"),
        (section(rollout={"epochs": 2}), r"gear\.rollout\.epochs must be 3, got 2"),
        (section(pack={"prefix": "share"}), r"gear\.pack\.prefix must be 'own'"),
        (section(fields={"tokens": {}}), r"gear\.fields must be"),
    ],
)
def test_a_section_that_contradicts_openrlhf_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        fill_section(given, options())


def test_gradients_of_16_bit_weights_are_summed_in_float32() -> None:
    plain: dict[str, Any] = {"data_types": {"grad_accum_dtype": None}, "bf16": {"enabled": True}}
    config = fill_ds_config(plain, {"tables": {}})
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["managed_gradient_accumulation"] is False
    assert "gear" not in plain
    chosen = fill_ds_config({"data_types": {"grad_accum_dtype": "bf16"}}, {})
    assert chosen["data_types"] == {"grad_accum_dtype": "bf16"}


@pytest.mark.skipif(
    importlib.util.find_spec("openrlhf") is not None, reason="openrlhf is installed"
)
def test_without_openrlhf_the_error_names_the_versions() -> None:
    with pytest.raises(ConfigError, match=r"openrlhf must be installed, >=0\.11,<0\.12"):
        importlib.import_module("deepspeed_gear.integrations.openrlhf")


@pytest.mark.skipif(importlib.util.find_spec("openrlhf") is None, reason="needs openrlhf")
@pytest.mark.parametrize("version", ["0.10.9", "0.12.0", "1.0"])
def test_another_version_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = importlib.import_module("deepspeed_gear.integrations.openrlhf")
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(ConfigError, match=rf"openrlhf must have a version .*got '{version}'"):
        check_version("openrlhf", adapter.VERSIONS, "")
