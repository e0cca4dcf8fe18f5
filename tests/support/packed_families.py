"""Tiny models of families of transformers, kernels that are not there, and packs for them."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from deepspeed_gear.batching.micro_batch import MicroBatch, pack_of_tokens
from deepspeed_gear.batching.pack_rows import PackShape
from deepspeed_gear.batching.prefixes import Prefixes

VOCABULARY = 64
WIDTHS = "hidden_size n_embd d_model word_embed_proj_dim"
SIZES: dict[str, Any] = {
    **dict.fromkeys(WIDTHS.split(), 32),
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers".split(), 4),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads mamba_n_heads mamba_num_heads".split(), 4
    ),
    **dict.fromkeys(
        "intermediate_size n_inner ffn_dim max_position_embeddings n_positions".split(), 48
    ),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts qk_nope_head_dim".split(), 4),
    **dict.fromkeys("head_dim qk_rope_head_dim v_head_dim mamba_head_dim mamba_d_state".split(), 8),
    **dict.fromkeys(
        "linear_key_head_dim linear_value_head_dim state_size ssm_state_size".split(), 8
    ),
    **dict.fromkeys(
        "num_key_value_heads num_experts_per_tok linear_num_key_heads mamba_expand".split(), 2
    ),
    **dict.fromkeys("n_group topk_group mamba_n_groups n_groups".split(), 1),
    **dict.fromkeys("sliding_window attention_chunk_size mamba_chunk_size chunk_size".split(), 16),
    **dict.fromkeys(
        "moe_intermediate_size shared_expert_intermediate_size kv_lora_rank".split(), 16
    ),
    "mamba_d_head": 16,
    **dict.fromkeys("pad_token_id bos_token_id eos_token_id q_lora_rank".split(), None),
    "vocab_size": VOCABULARY,
    "linear_num_value_heads": 4,
    "rotary_dim": 4,
    "mamba_d_ssm": 64,
    "max_position_embeddings": 256,
    "n_positions": 256,
}
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"num_key_value_heads": 4},
    "deepseek_v3": {"num_key_value_heads": 4},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16, "expand": 2},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
}
CLASSES = {"qwen3_5_text": "Qwen3_5ForCausalLM"}


def tiny(family: str, attention: str = "eager", **more: Any) -> Any:
    """Return a model of a `model_type` with random weights, in evaluation mode.

    Raises:
        ValueError: The model does not offer the attention.
    """
    made = CONFIG_MAPPING[family]
    names = inspect.signature(made.__init__).parameters
    options = {
        name: value
        for name, value in SIZES.items()
        if name in names or (hasattr(made, name) and not isinstance(getattr(made, name), property))
    }
    config = made(**{**options, **MORE.get(family, {}), **more})
    is_flash = attention.startswith("flash")
    if not is_flash:  # which cannot be loaded here
        config._attn_implementation = attention
    torch.manual_seed(0)
    name = CLASSES.get(family) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    model = getattr(transformers, name)(config).eval()
    if is_flash and not model._supports_flash_attn:
        raise ValueError(attention)
    if is_flash:
        model.config._attn_implementation = attention
    amplify(model)
    return model


@torch.no_grad()
def amplify(model: torch.nn.Module) -> None:
    """Enlarge random weights, so that what a token attends to shows in its logits."""
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.mul_(4)


def pack(
    lengths: list[int], rows: int, part: slice | None = None, prefixes: Prefixes | None = None
) -> MicroBatch:
    """Return a pack of random tokens; `part`: the places of a sequence rank."""
    part = part or slice(0, rows)
    tokens = torch.randint(3, VOCABULARY - 1, (1, rows), generator=torch.Generator().manual_seed(0))
    shape = PackShape(np.array(lengths, np.int64), rows, part.start, part.stop, prefixes)
    return pack_of_tokens(tokens[:, part], shape, "tokens", torch.device("cpu"))


def places(micro: MicroBatch) -> list[Tensor]:
    """Return the places of each trajectory of a pack: those that its last one attends to."""
    ends = micro.cu_seqlens[1 : micro.num_trajectories + 1].tolist()
    return [micro.block_mask[0, 0, end - 1].nonzero()[:, 0] for end in ends]


def alone(model: Any, micro: MicroBatch) -> list[Tensor]:
    """Return the logits of each trajectory of a pack alone."""
    tokens = [micro["tokens"][:, at] for at in places(micro)]
    with (
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
    ):  # compiling flex attention takes long
        return [model(input_ids=part, use_cache=False).logits[0] for part in tokens]


def difference(
    model: Any, micro: MicroBatch, inputs: dict[str, Any], wanted: list[Tensor] | None = None
) -> float:
    """Return how far logits of the pack are from those of each trajectory alone, relative to the
    largest.

    `wanted` is what `alone` returned for the same weights; else it is called.
    """
    wanted = wanted or alone(model, micro)
    most = 0.0
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        packed = model(**inputs).logits[0]
    for at, expected in zip(places(micro), wanted, strict=True):
        logits = packed[at]
        most = max(most, float((logits - expected).abs().max() / expected.abs().max()))
    return most


# ---- kernels that are not there: their meaning, in PyTorch ---------------------------------------


def flash(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend as `flash_attention_2` does, with sequences by their bounds, or else by their
    positions.
    """
    count = query.shape[2]
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, 1)
    value = value.repeat_interleave(repeats, 1)
    scores = (
        query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    )
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    at = torch.arange(count)
    allowed = at[:, None] >= at
    if sliding_window:
        allowed &= at[:, None] - at < sliding_window
    if attention_mask is not None:
        allowed = allowed & attention_mask[:, None, None].bool()
    elif more.get("cu_seq_lens_q") is not None:
        assert more.keys() >= {"cu_seq_lens_k", "max_length_q", "max_length_k"}
        owner = torch.bucketize(at, more["cu_seq_lens_q"][1:], right=True)
        allowed &= owner[:, None] == owner
    elif more.get("position_ids") is not None:
        owner = (more["position_ids"][0] == 0).cumsum(0)
        allowed &= owner[:, None] == owner
    scores = scores.masked_fill(~allowed, float("-inf"))
    if s_aux is not None:
        sinks = s_aux.reshape(1, -1, 1, 1).expand(len(scores), -1, count, 1)
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., :count] @ value).transpose(1, 2).contiguous(), None


def _sizes(seq_idx: Tensor) -> list[int]:
    sizes: list[int] = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    return sizes


def _convolution(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apart(
        x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **more: Any
    ) -> Tensor:
        parts = (x,) if more.get("seq_idx") is None else x.split(_sizes(more["seq_idx"]), 2)
        return torch.cat([plain(part, weight, bias, activation=activation) for part in parts], 2)

    return apart


def _scan(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apart(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, **more: Any) -> Tensor:
        seq_idx = more.pop("seq_idx", None)
        sizes = [x.shape[1]] if seq_idx is None else _sizes(seq_idx)
        parts = zip(*(tensor.split(sizes, 1) for tensor in (x, dt, b, c)), strict=True)
        return torch.cat([plain(x, dt, a, b, c, **more) for x, dt, b, c in parts], 1)

    return apart


def _delta_rule(plain: Callable[..., Any]) -> Callable[..., Any]:
    def apart(*inputs: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Any = None, **more: Any) -> Any:
        more.pop("seq_idx", None)
        sizes = [g.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        parts = zip(*(tensor.split(sizes, 1) for tensor in (*inputs, g, beta)), strict=True)
        return torch.cat(
            [plain(*part[:3], g=part[3], beta=part[4], **more)[0] for part in parts], 1
        ), None

    return apart


KERNELS = {
    "causal_conv1d_fn": _convolution,
    "mamba2_chunk_scan": _scan,
    "torch_chunk_gated_delta_rule": _delta_rule,
}


@contextmanager
def kernels(model: Any) -> Iterator[None]:
    """Let flash attention and the recurrent layers of a model's family run with their kernels'
    meaning.
    """
    module = sys.modules[type(model).__module__]
    plain = {name: getattr(module, name) for name in KERNELS if hasattr(module, name)}
    attention = ALL_ATTENTION_FUNCTIONS._global_mapping
    held = attention["flash_attention_2"]
    attention["flash_attention_2"] = flash
    for name, function in plain.items():
        setattr(module, name, KERNELS[name](function))
    try:
        yield
    finally:
        attention["flash_attention_2"] = held
        for name, function in plain.items():
            setattr(module, name, function)
