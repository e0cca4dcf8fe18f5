"""`Replay.check_packing`: models that keep the trajectories of a pack apart, and others."""

from typing import Any

import pytest
from rollout_support import filled, micros, section

from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.errors import ConfigError

pytest.importorskip("transformers")

from packed_families import tiny

PACK = {"tokens": 96, "pad": {"multiple": 16}}


@pytest.fixture
def replay() -> Any:
    with filled(section(pack=PACK)) as made:
        yield made


def test_models_that_are_right(replay: Any) -> None:
    model = tiny("mistral", "sdpa")
    model.model.layers[1].train()
    modes = [module.training for module in model.modules()]
    assert replay.check_packing(model) < 1e-5
    assert replay.check_packing(model, "sdpa") < 1e-5
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert replay.check_packing(tiny("qwen2").bfloat16()) < 0.03


def test_models_that_are_wrong(replay: Any) -> None:
    model = tiny("mamba2").train()
    with pytest.raises(
        ConfigError, match=r"packs with the model Mamba2ForCausalLM \(mamba2\) must be exact"
    ):
        replay.check_packing(model)
    text = (
        r"a pack of Mamba2ForCausalLM \(mamba2\) must give the \d+ tokens from place \d+ on "
        r""
        r"their logits"
    )
    with pytest.raises(ConfigError, match=text):
        replay.check_packing(model, "eager")
    assert all(module.training for module in model.modules())
    assert replay.check_packing(model, "eager", tolerance=9.0) > 0.01


def test_with_its_default_cache_transformers_takes_a_pack_for_one_sequence(
    replay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why `model_inputs` sets `use_cache`: nothing but it differs here, and transformers raises
    nothing.
    """
    inputs = MicroBatch.model_inputs

    def without(micro: MicroBatch, attention: Any) -> dict[str, Any]:
        return {
            name: value for name, value in inputs(micro, attention).items() if name != "use_cache"
        }

    monkeypatch.setattr(MicroBatch, "model_inputs", without)
    with pytest.raises(ConfigError, match="on their logits alone"):
        replay.check_packing(tiny("qwen2"))


def test_a_balancing_loss_is_refused_where_micro_batches_have_padding(replay: Any) -> None:
    model = tiny("qwen3_moe", "sdpa", output_router_logits=True)
    with pytest.raises(
        ConfigError, match=r"Qwen3MoeForCausalLM .* would count the places of padding"
    ):
        replay.check_packing(model)
    with filled(section(pack={"tokens": 96, "pad": {"multiple": 1}})) as unpadded:
        assert unpadded.check_packing(model) < 1e-5
        inputs = [micro.model_inputs(model) for micro in micros(unpadded.rollout())]
    assert inputs


def test_one_trajectory_per_pack_suits_what_is_wrong_else() -> None:
    with filled(section(pack={**PACK, "max_trajectories": 1})) as made:
        assert made.check_packing(tiny("mamba2")) < 1e-5
        assert all(micro.num_trajectories <= 1 for micro in micros(made.rollout()))
