"""Model families of transformers: packs give the logits that each trajectory has alone, or are
refused.
"""

import re
import sys
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from packed_families import alone, difference, kernels, pack, tiny  # noqa: E402

from deepspeed_gear.batching import packed_models  # noqa: E402
from deepspeed_gear.batching.pack_masks import attention_mask  # noqa: E402
from deepspeed_gear.batching.packed_models import BY_KERNELS, BY_MASKS, BY_POSITIONS, PackedModel  # noqa: E402
from deepspeed_gear.batching.prefixes import Prefixes  # noqa: E402
from deepspeed_gear.errors import ConfigError  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "packed-models.md"
ATTENTIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2")
REFUSED = ("bloom", "falcon_mamba", "jamba", "mamba", "mamba2", "minimax", "mpt", "openai-gpt")
# longer and shorter than windows and chunks of 16
LENGTHS = [23, 7, 40, 1, 18]
ROWS = 96
STARTS = [0, 23, 30, 70, 71]
WHOLE = pack(LENGTHS, ROWS)
PREFIXES = Prefixes(np.array([0, 9, 12, 0, 1]), np.array([0, 0, 1, 3, 3]))
SHARED = pack([23, 16, 52, 2, 19], ROWS, None, PREFIXES)  # with places as in WHOLE, but for one


def layers(model: Any) -> str:
    """Return the kinds of layers that see other places."""
    config = model.config
    window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = {
        kind
        for kind in getattr(config, "layer_types", None) or [window]
        if kind not in ("mlp", "moe")
    }
    return ", ".join(sorted(kind.removesuffix("_attention") for kind in kinds))


@cache
def alone_of(family: str, attention: str) -> list[torch.Tensor]:
    """Return the logits of each trajectory alone, which every attention but flash gives alike."""
    model = tiny(family, attention)
    with kernels(model):
        return alone(model, WHOLE)


def cell(family: str, attention: str) -> str:
    """Return what happens to packs of a family with an attention; raise if it is wrong."""
    try:
        model = tiny(family, attention)
    except ValueError:
        return "-"
    if family in REFUSED or (attention.startswith("flash") and family in ("falcon", "nemotron")):
        with pytest.raises(
            ConfigError, match=rf"{type(model).__name__} \({family}\) must be exact: .+; .+"
        ):
            WHOLE.model_inputs(model)
        return "refused"
    if family == "gpt_oss" and attention == "flex_attention":
        return "-"  # not on a CPU, for its attention sinks
    with kernels(model), torch.compiler.set_stance("force_eager"):  # compiling masks takes long
        wanted = alone_of(family, attention if attention.startswith("flash") else "eager")
        assert difference(model, WHOLE, WHOLE.model_inputs(model), wanted) < 1e-4, (
            family,
            attention,
        )
    return "with kernels" if family in BY_KERNELS else "yes"


def table(families: list[str]) -> str:
    """Return the table of the docs: families with the same cells are one row."""
    rows = []
    for family in families:
        cells = [cell(family, attention) for attention in ATTENTIONS]
        rows.append((layers(tiny(family)), *cells, family))
    rows.sort(key=lambda row: ("refused" in row, "with kernels" in row, row))
    lines = [f"| `model_type` | layers | {' | '.join(ATTENTIONS)} |", "|" + "---|" * 6]
    for key, of_key in groupby(rows, key=lambda row: row[:-1]):
        names = ", ".join(f"`{row[-1]}`" for row in of_key)
        lines.append(f"| {names} | {' | '.join(key)} |")
    return "\n".join(lines)


def test_the_table_of_families_is_that_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family that is known, and some that are refused, with each attention."""
    monkeypatch.setattr(PackedModel, "_check_kernels", lambda *_: None)
    made = table(sorted({*BY_POSITIONS, *BY_MASKS, *BY_KERNELS, *REFUSED}))
    held = re.search(
        r"<!-- families -->\n(.*?)\n<!-- /families -->", PAGE.read_text(encoding="utf-8"), re.S
    )
    assert held is not None
    assert held[1] == made


@pytest.mark.parametrize("family", sorted({*BY_POSITIONS, *BY_MASKS, *BY_KERNELS}))
def test_shared_prefixes_are_exact_or_refused(family: str) -> None:
    """Windows and chunks of 16 steps reach into prefixes, and end in them; states are refused."""
    wanted: list[torch.Tensor] = []
    for attention in ATTENTIONS:
        try:
            model = tiny(family, attention)
        except ValueError:
            continue
        if family in BY_KERNELS or attention.startswith("flash"):
            with pytest.raises(
                ConfigError,
                match=r"lets its layers .* share|flex_attention, sdpa or eager with|no ",
            ):
                SHARED.model_inputs(model)
            continue
        if family == "gpt_oss" and attention == "flex_attention":
            continue  # not on a CPU, for its attention sinks
        inputs = SHARED.model_inputs(model)
        if not wanted:
            wanted = alone(model, SHARED)
            assert difference(model, SHARED, WHOLE.model_inputs(model), wanted) > 1e-2
            if layers(model) != "full":  # the pack's mask alone has no windows
                causal = attention_mask(SHARED.mask_mod, ROWS, attention, torch.empty(0))
                plain = {**inputs, "attention_mask": causal}
                assert difference(model, SHARED, plain, wanted) > 1e-2
        assert difference(model, SHARED, inputs, wanted) < 2e-6, (family, attention)


@pytest.mark.parametrize(
    ("family", "more", "text"),
    [
        (
            "llama",
            {"sliding_window": 16},
            r"no mask is known that lets its layers \(sliding_attention\) share prefixes; leave",
        ),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention"] * 2},
            r"its layers \(full_attention, sliding_attention\) share prefixes; leave .*prefix",
        ),
        (
            "gemma2",
            {"sliding_window": None},
            "layers of sliding_attention, and no sliding_window; set config.sliding_window",
        ),
        (
            "gemma3_text",
            {"use_bidirectional_attention": True},
            r"not causal \(use_bidirectional_attention\); leave .*prefix.* out",
        ),
    ],
)
def test_layers_whose_masks_are_not_known_do_not_share_prefixes(
    family: str, more: dict[str, Any], text: str
) -> None:
    model = tiny(family)
    for option, value in more.items():  # as a config.json may have it
        setattr(model.config, option, value)
    with pytest.raises(ConfigError, match=text):
        SHARED.model_inputs(model)


@pytest.mark.parametrize("family", REFUSED)
def test_what_is_refused_would_be_wrong_and_one_trajectory_is_right(family: str) -> None:
    model = tiny(family)
    with pytest.raises(
        ConfigError, match=rf"\({family}\) must be exact: .*\"max_trajectories\": 1"
    ):
        WHOLE.model_inputs(model)
    assert difference(model, WHOLE, WHOLE.model_inputs("eager")) > 1e-2
    for lengths in ([ROWS - 5], [7]):
        one = pack(lengths, ROWS)
        assert difference(model, one, one.model_inputs(model)) < 1e-4
    with torch.no_grad():
        assert model(**pack([], ROWS).model_inputs(model)).logits.isfinite().all()


@pytest.mark.parametrize("family", sorted(BY_KERNELS))
def test_recurrent_layers_without_kernels_are_refused(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    with pytest.raises(
        ConfigError, match=r"carry state .* without .*causal_conv1d.*\"max_trajectories\": 1"
    ):
        WHOLE.model_inputs(model)
    monkeypatch.setattr(packed_models, "find_spec", lambda _: True)
    with pytest.raises(ConfigError, match="carry state from one trajectory to the next on cpu"):
        WHOLE.model_inputs(model)
    model.config._attn_implementation = "paged"
    with pytest.raises(ConfigError, match="attention 'paged' is not one of sdpa"):
        WHOLE.model_inputs(model)


LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "rope_theta": 1e4,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
GROWING = {"rope_parameters": DYNAMIC, "head_dim": 8, "max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "more", "text"),
    [
        ("falcon", {"alibi": True}, "ALiBi biases are of places in the pack"),
        ("llama", {"is_causal": False}, "its attention is not causal"),
        (
            "llama4_text",
            {"floor_scale": 60, "attn_temperature_tuning": True},
            "place in the pack from 59 on",
        ),
        ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 32}, "over 32"),
        (
            "llama",
            GROWING,
            "rotations of kind 'dynamic' are of the longest sequence where it is over 32",
        ),
    ],
)
def test_what_depends_on_the_place_is_refused(family: str, more: dict[str, Any], text: str) -> None:
    model = tiny(family, **more)
    with pytest.raises(ConfigError, match=text):
        WHOLE.model_inputs(model)
    if family not in (
        "llama",
        "falcon",
    ):  # bidirectional there; a shift of biases matters in 16 bits only
        assert difference(model, WHOLE, WHOLE.model_inputs("eager")) > 1e-4
    one = pack([7], ROWS)
    assert difference(tiny(family, **more), one, one.model_inputs(model)) < 1e-4
    if "rope_parameters" in more:
        short = pack([20, 7, 30, 1, 18], 80)
        assert difference(tiny(family, **more), short, short.model_inputs(model)) < 1e-4


#: Families with a load balancing loss, which packs may have.
BALANCED = (
    "gpt_oss",
    "granitemoe",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
)
UNPADDED = pack(LENGTHS, sum(LENGTHS))


def balance(model: Any, router_logits: Any, mask: torch.Tensor | None = None) -> float:
    """Return the load balancing loss of transformers over the places of a mask; None: over all."""
    loss: Any = sys.modules[type(model).__module__].load_balancing_loss_func
    return float(loss(router_logits, model.num_experts, model.num_experts_per_tok, mask).detach())


def test_every_family_with_a_balancing_loss_is_tested() -> None:
    names = {
        family
        for family in BY_POSITIONS | BY_MASKS
        if hasattr(sys.modules[type(tiny(family)).__module__], "load_balancing_loss_func")
    }
    assert names - BY_KERNELS.keys() == set(BALANCED)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        (family, attention)
        for family in BALANCED
        for attention in ("sdpa", "eager", "flash_attention_2")
        if (family, attention) != ("gpt_oss", "sdpa")
    ],  # which the model does not offer
)
def test_the_balancing_loss_is_of_the_places_of_trajectories_or_refused(
    family: str, attention: str
) -> None:
    model = tiny(family, attention)
    with kernels(model), torch.no_grad():
        tokens = [
            WHOLE["tokens"][:, begin : begin + n] for begin, n in zip(STARTS, LENGTHS, strict=True)
        ]
        every = [model(input_ids=one, use_cache=False, output_router_logits=True) for one in tokens]
        logits = tuple(map(torch.cat, zip(*(one.router_logits for one in every), strict=True)))
        wanted = balance(model, logits)
        if family == "gpt_oss" and attention == "eager":  # it gets masks of pairs of places
            model.config.output_router_logits = True
            for micro in (WHOLE, UNPADDED):
                with pytest.raises(ConfigError, match=r"no masks of pairs .*; use attn_.*flash"):
                    micro.model_inputs(model)
            return
        outputs = model(**WHOLE.model_inputs(model), output_router_logits=True)
        assert balance(model, outputs.router_logits, WHOLE.sequence >= 0) == pytest.approx(
            wanted, abs=1e-5
        )
        assert abs(float(outputs.aux_loss) - wanted) > 1e-4  # it counts padding

        model.config.output_router_logits = True
        with pytest.raises(
            ConfigError, match=r"count the places of padding; .*micro.sequence >= 0.*multiple"
        ):
            WHOLE.model_inputs(model)
        accepted = [(UNPADDED, wanted)]
        if not attention.startswith("flash"):  # whose meaning here gives NaN at padding
            accepted.append((pack([23], ROWS), balance(model, every[0].router_logits)))
        for micro, expected in accepted:
            outputs = model(**micro.model_inputs(model))
            assert float(outputs.aux_loss) == pytest.approx(expected, abs=1e-5)
        assert difference(model, UNPADDED, UNPADDED.model_inputs(model)) < 1e-4
        if attention == "sdpa":
            with pytest.raises(ConfigError, match=r"takes no masks of .*prefix"):
                SHARED.model_inputs(model)


def test_a_slice_of_a_padded_pack_has_no_balancing_loss() -> None:
    """Also the slices without padding, so that no rank goes on alone."""
    model = tiny("qwen3_moe", "flash_attention_2")
    for part in (slice(0, 48), slice(48, 96)):
        micro = pack(LENGTHS, ROWS, part)
        model.config.output_router_logits = False
        micro.model_inputs(model)
        model.config.output_router_logits = True
        with pytest.raises(ConfigError, match="count the places of padding"):
            micro.model_inputs(model)


def test_other_models_and_attentions_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"must be the model or one of sdpa, .*; give the model, or micro"
    ):
        WHOLE.model_inputs("mask")
    with pytest.raises(
        ConfigError, match=r"model must be a causal language model .*, got 'Linear'; give"
    ):
        WHOLE.model_inputs(torch.nn.Linear(2, 2))
    config = tiny("llama").config
    with pytest.raises(ConfigError, match="not known to have a row of logits per token"):
        WHOLE.model_inputs(transformers.LlamaForSequenceClassification(config))

    class Remote(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = config

    with pytest.raises(
        ConfigError, match=r"Remote \(llama\).*not known to have a row of logits per token"
    ):
        WHOLE.model_inputs(Remote())


def test_wrappers_are_looked_into() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

        def __getattr__(self, name: str) -> Any:  # as DeepSpeed's engine and peft's models do
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("module"), name)

    class Lora(Wrapper):
        def get_base_model(self) -> torch.nn.Module:
            inner = self.module
            assert isinstance(inner, torch.nn.Module)
            return inner

    model = tiny("mistral", "sdpa")
    for wrapped in (
        Wrapper(model),
        Wrapper(Lora(model)),
        torch.compile(model),
        Lora(Wrapper(model)),
    ):
        assert packed_models.unwrapped(wrapped) is model
        assert WHOLE.model_inputs(wrapped).keys() == {"input_ids", "position_ids", "use_cache"}
    prompt = Lora(model)
    prompt.active_peft_config = type("Config", (), {"is_prompt_learning": True})
    for wrapped in (prompt, Wrapper(prompt)):
        with pytest.raises(
            ConfigError, match="a prompt of peft adds places to every sequence; use LoRA"
        ):
            WHOLE.model_inputs(wrapped)


def test_a_sequence_rank_gets_the_bounds_of_the_whole_pack() -> None:
    part = pack(LENGTHS, ROWS, slice(48, 96))
    inputs = part.model_inputs(tiny("llama", "flash_attention_2"))
    assert inputs["cu_seq_lens_q"].tolist() == WHOLE.cu_seqlens.tolist()
    for model in (tiny("llama"), tiny("gpt_oss", "flash_attention_2")):
        with pytest.raises(ConfigError, match="sequence ranks have a part of its places"):
            part.model_inputs(model)
