"""Inputs of transformers' language models for packs, and the models that are refused.

Masks follow from positions that restart, but not every model passes its positions on; recurrent
layers take sequences only with other packages' kernels; some factors depend on the place. So a
model is accepted where its family is known to give the logits that each trajectory has alone.
"""

from __future__ import annotations

import inspect
import sys
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Final, Protocol

import torch

from deepspeed_gear.batching.pack_masks import (
    MaskMod,
    attention_mask,
    within_chunk,
    within_window,
)
from deepspeed_gear.errors import ConfigError

FLASH: Final = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
ATTENTIONS: Final = ("sdpa", "eager", "flex_attention", *FLASH)
ONE_EACH: Final = 'train one trajectory per pack: "pack": {"max_trajectories": 1}'
_NO_MASKS: Final = (
    "its load balancing loss (config.output_router_logits) takes no masks of pairs of places"
)
_OWN_BALANCING: Final = (
    "set config.output_router_logits = False and compute the loss from router_logits over "
    'micro.sequence >= 0, as docs/how-to/packed-models.md shows in "Experts"'
)
_MODELS: Final = "transformers.models."
#: Version of transformers with which the table in docs/how-to/packed-models.md was checked.
_CHECKED: Final = (5, 24)
_CONVOLUTION: Final = ("causal_conv1d",)
_MAMBA_2: Final = ("causal_conv1d", "mamba_ssm")
_DELTA_RULE: Final = ("causal_conv1d", "fla")

#: Families by `config.model_type`: their attention layers derive masks from positions.
BY_POSITIONS: Final = frozenset(
    "apertus arcee cohere cohere2 deepseek_v2 deepseek_v3 ernie4_5 exaone4 falcon gemma gemma2 "
    "gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gptj granite granitemoe helium "
    "hunyuan_v1_dense llama llama4_text minimax_m2 ministral ministral3 mistral mixtral nemotron "
    "olmo olmo2 olmo3 olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 "
    "stablelm starcoder2".split()
)
#: Families whose models derive no masks from positions, and take them as an argument.
BY_MASKS: Final = frozenset(["afmoe", "gpt_oss", "granitemoehybrid", "opt"])
#: Families that take a mask for each of the kinds of layers that `config.layer_types` has.
BY_LAYERS: Final = frozenset(
    "afmoe cohere2 exaone4 gemma2 gemma3_text gpt_oss llama4_text ministral olmo3 qwen2 "
    "qwen2_5_vl qwen2_moe qwen2_vl qwen3 smollm3".split()
)
#: Families whose layers all have the window `config.sliding_window`, unless it is None.
OF_ONE_WINDOW: Final = frozenset(
    "ministral3 mistral mixtral phi3 phimoe qwen3_moe starcoder2".split()
)
#: Option of a config with the steps of a window or chunk, by kind of layer.
_SIZES: Final = {
    "full_attention": None,
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
#: Families whose flash attention gets neither positions nor bounds, or is chosen when the model is
#: built.
_NOT_BY_FLASH: Final = frozenset(["falcon", "nemotron"])
#: Families with recurrent layers, and the packages whose kernels keep the sequences of these apart.
BY_KERNELS: Final = {
    "bamba": _MAMBA_2,
    "falcon_h1": _MAMBA_2,
    "granitemoehybrid": _MAMBA_2,
    "lfm2": _CONVOLUTION,
    "nemotron_h": _MAMBA_2,
    "olmo_hybrid": _DELTA_RULE,
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_next": _DELTA_RULE,
}
#: Families of text and images, whose positions are computed for each trajectory.
OF_IMAGES: Final = frozenset(["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
#: Ends of the names of classes whose outputs have a row per token.
_PER_TOKEN: Final = ("ForCausalLM", "LMHeadModel", "ForTokenClassification", "Model")


class Pack(Protocol):
    """Sequences of a pack: properties of `MicroBatch`."""

    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def sequence(self) -> torch.Tensor: ...
    @property
    def position_ids(self) -> torch.Tensor: ...
    @property
    def cu_seqlens(self) -> torch.Tensor: ...
    @property
    def max_seqlen(self) -> int: ...
    @property
    def mask_mod(self) -> MaskMod: ...


class PackedModel:
    """Causal language model of transformers, or a wrapper of it, that takes packs.

    Raises:
        ConfigError: The model is no such model, or adds places of its own.
    """

    def __init__(self, model: Any) -> None:
        inner = unwrapped(model)
        config: Any = getattr(inner, "config", None)
        if not isinstance(inner, torch.nn.Module) or not hasattr(config, "model_type"):
            rule = "must be a causal language model of transformers, or the name of its attention"
            remedy = (
                "give a model of your own micro.position_ids with micro.cu_seqlens or "
                "micro.block_mask"
            )
            raise ConfigError("micro.model_inputs: model", rule, type(inner).__name__, remedy)
        self.config: Any = config
        self.family: str = config.model_type
        self.attention: str | None = getattr(config, "_attn_implementation", None)
        self.inner = inner
        #: Config of the layers of text, which a model of text and images has within its own.
        self._text: Any = config.get_text_config() if self.family in OF_IMAGES else config
        self.name = f"{type(inner).__name__} ({self.family})"
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            self.refuse("a prompt of peft adds places to every sequence", "use LoRA")

    def refuse(self, rule: str, remedy: str = ONE_EACH) -> None:
        """Raise a ConfigError: the model, why its packs would not be exact, and the remedy."""
        raise ConfigError(
            f"packs with the model {self.name}", f"must be exact: {rule}", None, remedy
        )

    def inputs(self, micro: Pack, is_slice: bool) -> dict[str, Any]:
        """Return the arguments that keep the sequences of a pack, or of its slice, apart.

        Raises:
            ConfigError: No arguments do, for this model.
        """
        lengths = micro.lengths
        sequence = micro.sequence
        given: dict[str, Any] = {}
        if len(lengths) <= 1 and not is_slice:  # padding after one trajectory suits every model
            is_step = sequence >= 0
            given["attention_mask"] = (is_step | ~is_step.any()).long()
            if "position_ids" in inspect.signature(self.inner.forward).parameters:
                # 0 at padding: rotations may depend on the last position.
                places = torch.arange(is_step.shape[1], device=is_step.device)
                given["position_ids"] = places * is_step
            return given
        self._check_family()
        given["position_ids"] = micro.position_ids
        if is_slice and self.family in OF_IMAGES:
            self.refuse(
                "sequence ranks have a part of its places, and so of its images",
                "use no sequence ranks for models of images",
            )
        if is_slice:  # flash attention gets the bounds of the whole pack
            if self.attention not in FLASH or self.family not in BY_POSITIONS:
                rule = "sequence ranks have a part of its places, from which no mask can be made"
                own = "or one of your own that is given by name"
                self.refuse(rule, f'use attn_implementation="flash_attention_2", {own}')
            self._check_balancing(micro)
            return given | _flash_inputs(micro)
        self._check_positions(lengths, sequence.shape[1])
        if self.attention in FLASH and self.family not in OF_IMAGES:
            # A model of images would hand bounds on to the layers of its images, too.
            given |= _flash_inputs(micro)
        elif self.family in BY_MASKS:
            if self._has_balancing_loss:
                self.refuse(
                    _NO_MASKS, f'use attn_implementation="flash_attention_2", and {_OWN_BALANCING}'
                )
            given["attention_mask"] = self._masks(micro.position_ids)
        self._check_balancing(micro)
        if self.family in BY_KERNELS:
            self._check_kernels(sequence.device)
            given["seq_idx"] = sequence.where(sequence >= 0, len(lengths)).int()
            given["cu_seq_lens_q"] = micro.cu_seqlens
        return given

    def _check_family(self) -> None:
        """Raise unless the logits of this class of models depend on a place and its past alone."""
        if self.family not in BY_POSITIONS | BY_MASKS | BY_KERNELS.keys() | OF_IMAGES:
            kinds = sorted(set(getattr(self.config, "layer_types", None) or ()))
            layers = f" with layers {', '.join(map(str, kinds))}" if kinds else ""
            rule = f"no family known to keep the trajectories of a pack apart{layers}"
            check = "check it by replay.check_packing(model, attention) and give that name"
            self.refuse(rule, f"{ONE_EACH}; or {check}")
        bases = [base for base in type(self.inner).__mro__ if base.__module__.startswith(_MODELS)]
        ends = (*_PER_TOKEN, "ForConditionalGeneration") if self.family in OF_IMAGES else _PER_TOKEN
        if not bases or not bases[0].__name__.endswith(ends):
            self.refuse("its class is not known to have a row of logits per token")
        if not getattr(self.config, "is_causal", True):
            self.refuse("its attention is not causal")
        if self.attention not in ATTENTIONS:
            remedy = 'load it with attn_implementation="sdpa"'
            self.refuse(
                f"attention {self.attention!r} is not one of {', '.join(ATTENTIONS)}", remedy
            )
        if self.attention in FLASH and self.family in _NOT_BY_FLASH:
            self.refuse(
                "its flash attention gets no sequences", 'load it with attn_implementation="sdpa"'
            )

    @property
    def _has_balancing_loss(self) -> bool:
        """Whether the model returns the load balancing loss of its experts."""
        if not getattr(self.config, "output_router_logits", False):
            return False
        modules = {base.__module__ for base in type(self.inner).__mro__}
        families = [sys.modules[name] for name in modules if name.startswith(_MODELS)]
        return any(hasattr(module, "load_balancing_loss_func") for module in families)

    def _check_balancing(self, micro: Pack) -> None:
        """Raise where the load balancing loss would count padding.

        The loss leaves out what an attention mask of [1, N] leaves out; but with such a mask the
        model takes the pack for one sequence.
        """
        has_padding = len(micro.cu_seqlens) > len(micro.lengths) + 1
        if has_padding and self._has_balancing_loss:
            rule = (
                "its load balancing loss (config.output_router_logits) would count the "
                "places of padding"
            )
            self.refuse(
                rule,
                f'{_OWN_BALANCING}; or leave no padding: "pad": {{"multiple": 1}} of gear.pack',
            )

    def shared_masks(self, micro: Pack) -> MaskMod | dict[str, MaskMod]:
        """Return the mask function of a pack that shares prefixes, or one for each kind of layer.

        Raises:
            ConfigError: Masks are not all that the layers need to share prefixes.
        """
        self._check_family()
        self._check_positions(micro.lengths, micro.position_ids.shape[1])
        kinds = self.layer_kinds
        are_alike = kinds == {"full_attention"} or (
            self.family in OF_ONE_WINDOW and kinds == {"sliding_attention"}
        )
        takes_masks = self.family in BY_LAYERS or are_alike
        if not takes_masks or self.family in BY_KERNELS or not kinds <= _SIZES.keys():
            names = ", ".join(sorted(kinds))
            rule = f"no mask is known that lets its layers ({names}) share prefixes"
            self.refuse(rule, 'leave "prefix" of gear.pack out')
        if getattr(self._text, "use_bidirectional_attention", False):
            self.refuse(
                "its attention is not causal (use_bidirectional_attention)",
                'leave "prefix" of gear.pack out',
            )
        if self._has_balancing_loss:
            self.refuse(_NO_MASKS, f'leave "prefix" of gear.pack out, and {_OWN_BALANCING}')
        masks = {kind: self._layer_mask(kind, micro) for kind in sorted(kinds)}
        return masks.popitem()[1] if are_alike else masks

    @property
    def layer_kinds(self) -> set[str]:
        """Return the kinds of its layers, which are alike in families outside of `BY_LAYERS`."""
        kinds = set(getattr(self._text, "layer_types", None) or ())
        if self.family not in BY_LAYERS:
            has_window = getattr(self._text, "sliding_window", None) is not None
            kinds.add("sliding_attention" if has_window else "full_attention")
        return kinds

    def _layer_mask(self, kind: str, micro: Pack) -> MaskMod:
        """Return the mask function of one kind of layer.

        Raises:
            ConfigError: The config lacks the steps of its window or chunk.
        """
        option = _SIZES[kind]
        if option is None:
            return micro.mask_mod
        size: Any = getattr(self._text, option, None)
        if not size:
            self.refuse(f"its config has layers of {kind}, and no {option}", f"set config.{option}")
        narrow = within_window if kind == "sliding_attention" else within_chunk
        return narrow(micro.mask_mod, micro.position_ids, size)

    def _check_positions(self, lengths: torch.Tensor, rows: int) -> None:
        """Raise where a result depends on the place in the pack or on its longest sequence."""
        config = self._text
        if getattr(config, "alibi", False):
            self.refuse("its ALiBi biases are of places in the pack")
        if rows > (getattr(config, "attention_chunk_size", None) or rows):
            self._check_version("its chunks are of places in the pack")
        if getattr(config, "attn_temperature_tuning", False) and rows >= config.floor_scale:
            rule = f"queries are scaled by the place in the pack from {config.floor_scale - 1} on"
            self.refuse(f"{rule} (attn_temperature_tuning)")
        longest = int(lengths.max()) if len(lengths) else 0
        most = max(longest, rows - int(lengths.sum()))
        for kind, trained in _growing_rotations(config):
            if most > trained and (most != longest or int(lengths.min()) != longest):
                rule = (
                    f"rotations of kind {kind!r} are of the longest sequence where it is "
                    f"over {trained}"
                )
                self.refuse(rule, f"keep trajectories and padding below {trained}, or {ONE_EACH}")

    def _check_kernels(self, device: torch.device) -> None:
        packages = BY_KERNELS[self.family]
        missing = [package for package in packages if find_spec(package) is None]
        self._check_version("its recurrent layers ignore sequences")
        if missing or device.type != "cuda":
            where = f"without {' and '.join(missing)}" if missing else f"on {device.type}"
            rule = f"its recurrent layers carry state from one trajectory to the next {where}"
            self.refuse(rule, f"{ONE_EACH}; or install {' and '.join(packages)} for a GPU")

    def _check_version(self, rule: str) -> None:
        """Raise if transformers is older than the checked version, for a limit of older ones."""
        if tuple(int(part) for part in version("transformers").split(".")[:2]) < _CHECKED:
            self.refuse(rule, f"install transformers {'.'.join(map(str, _CHECKED))}")

    def _masks(self, position_ids: torch.Tensor) -> Any:
        """Return the masks for each kind of layer, as transformers makes them from positions."""
        from transformers import masking_utils

        make = masking_utils.create_masks_for_generate
        dtype = next(self.inner.parameters()).dtype
        device = position_ids.device
        shape = torch.empty(*position_ids.shape, 0, dtype=dtype, device=device)
        given = {
            "config": self.config,
            "inputs_embeds": shape,
            "input_embeds": shape,
            "attention_mask": None,
            "cache": None,
            "past_key_values": None,
            "cache_position": torch.arange(position_ids.shape[1], device=device),
            "position_ids": position_ids,
        }
        return make(
            **{name: given[name] for name in inspect.signature(make).parameters if name in given}
        )


def unwrapped(model: Any) -> Any:
    """Return the model inside engines, DDP and FSDP modules, compiled and peft models."""
    while True:
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            base = getattr(model, "get_base_model", None)
            inner = base() if callable(base) else model
        if inner is model:
            return model
        model = inner


def named_inputs(attention: str, micro: Pack) -> dict[str, Any]:
    """Return the arguments for an attention given by its name, without a model to check."""
    if attention not in ATTENTIONS:
        remedy = "give the model, or micro.block_mask to a model of your own"
        rule = f"must be the model or one of {', '.join(ATTENTIONS)}"
        raise ConfigError("micro.model_inputs: attention", rule, attention, remedy)
    return {
        "position_ids": micro.position_ids,
        **(_flash_inputs(micro) if attention in FLASH else {}),
    }


def _flash_inputs(micro: Pack) -> dict[str, Any]:
    bounds = micro.cu_seqlens
    longest = micro.max_seqlen
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def mask_inputs(model: Any, micro: Pack) -> dict[str, Any]:
    """Return the arguments of a model, or of a named attention, where prefixes may be shared."""
    attention = model
    positions = micro.position_ids
    mask_mods: MaskMod | dict[str, MaskMod] = micro.mask_mod
    like = torch.empty(0, device=positions.device)
    if not isinstance(model, str):
        packed = PackedModel(model)
        mask_mods = packed.shared_masks(micro)
        attention = packed.attention
        like = like.to(next(model.parameters()).dtype)
    if attention not in ("flex_attention", "sdpa", "eager"):
        rule = 'must be flex_attention, sdpa or eager with "prefix": "share" of gear.pack'
        raise ConfigError(
            "micro.model_inputs: attention", rule, attention, "load the model with one of them"
        )
    rows = positions.shape[1]
    if isinstance(mask_mods, dict):
        masks: Any = {
            kind: attention_mask(mask_mod, rows, attention, like)
            for kind, mask_mod in mask_mods.items()
        }
    else:
        masks = attention_mask(mask_mods, rows, attention, like)
    return {"position_ids": positions, "attention_mask": masks}


def _growing_rotations(config: Any) -> list[tuple[str, int]]:
    """Return kind and trained length of rotary embeddings that change for longer sequences."""
    growing = []
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in [given, *(value for value in given.values() if isinstance(value, dict))]:
        kind = part.get("rope_type", part.get("type"))
        if kind in ("dynamic", "longrope"):
            trained = part.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            growing.append((str(kind), int(trained or config.max_position_embeddings)))
    return growing
