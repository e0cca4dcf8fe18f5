"""What TRL must have for the packed trainer: a version that moves a name fails here, by it."""

import importlib
import importlib.metadata
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.integrations.framework_options import check_version

HAS_TRL = importlib.util.find_spec("trl") is not None
needs_trl = pytest.mark.skipif(not HAS_TRL, reason="trl is not installed")


@pytest.fixture
def internals() -> Any:
    return importlib.import_module("deepspeed_gear.integrations.trl_internals")


@pytest.mark.skipif(HAS_TRL, reason="trl is installed")
@pytest.mark.parametrize("module", ["trl", "trl_internals", "trl_ledger"])
def test_without_trl_the_error_names_the_extra(module: str) -> None:
    with pytest.raises(ConfigError, match=r"trl must be installed, .*deepspeed_gear\[trl\]"):
        importlib.import_module(f"deepspeed_gear.integrations.{module}")


@needs_trl
def test_the_extra_has_the_versions_that_are_accepted(internals: Any, checkout: Path) -> None:
    assert f'\n  "trl{internals.VERSIONS}",' in (checkout / "pyproject.toml").read_text()


@needs_trl
@pytest.mark.parametrize("version", ["1.15.2", "1.17.0", "1.17.0.dev0", "2.0"])
def test_another_version_is_refused(
    internals: Any, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    match = rf"trl must have a version {internals.VERSIONS}, got '{version}'; pip install"
    with pytest.raises(ConfigError, match=match):
        check_version("trl", internals.VERSIONS, internals.REMEDY)


@needs_trl
def test_the_installed_version_has_what_is_used(internals: Any) -> None:
    from trl import GRPOTrainer
    from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

    internals.check_names(GRPOTrainer, FusedCausalLMOutput)
    source = inspect.getsource(GRPOTrainer.__init__)
    for name in internals.ATTRIBUTES:
        assert f"self.{name} = " in source, f"{name}: see trl_internals.py"
    scored = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    for name in (*internals.SCORED.values(), *internals.READ):
        assert f'output["{name}"]' in scored or f'"{name}": ' in scored, name
    assert "shift_labels" in inspect.getsource(add_fused_lm_head)


@needs_trl
@pytest.mark.parametrize("missing", ["_generate_and_score_completions", "inputs", "entropy"])
def test_a_name_that_is_missing_is_named(internals: Any, missing: str) -> None:
    class Trainer:
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> None: ...
        def _generate_and_score_completions(self, inputs: Any) -> None: ...

    class Output:
        log_probs = entropy = None

    internals.check_names(Trainer, Output)
    if missing == "entropy":
        del Output.entropy
    elif missing == "inputs":
        Trainer.training_step = lambda self, model, num_items_in_batch: None  # type: ignore
    else:
        del Trainer._generate_and_score_completions
    match = rf"trl must be a version {internals.VERSIONS} with .*{missing}"
    with pytest.raises(ConfigError, match=match):
        internals.check_names(Trainer, Output)


@needs_trl
def test_an_attribute_that_is_missing_is_named(internals: Any) -> None:
    attributes = dict.fromkeys(internals.ATTRIBUTES)
    internals.check_attributes(SimpleNamespace(**attributes))
    del attributes["_metrics"]
    with pytest.raises(ConfigError, match=r"the attribute GRPOTrainer\._metrics"):
        internals.check_attributes(SimpleNamespace(**attributes))


@needs_trl
def test_responses_with_images_are_refused(internals: Any) -> None:
    scored = {
        name: torch.ones(2, 3, dtype=torch.int64)
        for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
    }
    scored["advantages"] = torch.zeros(2)
    assert len(internals.scored_columns(scored, ())) == 2
    scored["pixel_values"] = torch.zeros(2, 3)
    scored["mm_token_type_ids"] = torch.zeros(2, 6)
    with pytest.raises(ConfigError, match=r"must be text alone.*mm_token_type_ids, pixel_values"):
        internals.scored_columns(scored, ())
