"""Tiny models of text and images of transformers, and groups of prompts with images."""

from typing import Any

import numpy as np
import torch
import transformers
from packed_families import amplify
from rollout_support import section
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES,
)

from deepspeed_gear import Media, Replay

IMAGE = 60
VIDEO = 61
BEGIN = 62
END = 63
PATCH = 3 * 2 * 4 * 4  # channels, frames, height and width of a patch
MERGED = 4  # patches of a place
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 100.0},
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "depth": 2}
SIZES = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    },
}
SIZES["qwen3_vl_moe"] = SIZES["qwen3_vl"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def tiny(family: str, attention: str = "sdpa", **text: Any) -> Any:
    """Return a model with random weights, in evaluation mode, with options of layers of text."""
    is_flash = attention.startswith("flash")
    config = CONFIG_MAPPING[family](
        text_config={**TEXT, **(EXPERTS if family.endswith("moe") else {}), **text},
        vision_config={**VISION, **SIZES[family]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        attn_implementation="sdpa" if is_flash else attention,
    )
    torch.manual_seed(0)
    model = getattr(transformers, NAMES[family])(config).eval()
    if is_flash:  # which cannot be loaded here; the layers of images keep the other
        model.config._attn_implementation = attention
        model.config.text_config._attn_implementation = attention
    amplify(model)
    return model


def media(number: int, height: int, width: int, name: str = "image") -> Media:
    """Return an image, or a video of two frames, of so many patches."""
    frames = 1 if name == "image" else 2
    count = frames * height * width
    rows = np.random.default_rng(number).normal(size=(count, PATCH)).astype(np.float32)
    pixels = "pixel_values" if name == "image" else "pixel_values_videos"
    return Media(**{pixels: rows, f"{name}_grid_thw": [[frames, height, width]]})


def prompt(images: list[tuple[int, int]], number: int) -> tuple[list[int], dict[int, Media]]:
    """Return the tokens of a prompt with images, and its images by step."""
    tokens = [5, 6 + number]
    named = {}
    for each, (height, width) in enumerate(images):
        tokens.append(BEGIN)
        named[len(tokens)] = media(10 * number + each, height, width)
        tokens += [IMAGE] * (height * width // MERGED)
        tokens += [END, 7]
    return tokens, named


def gear_section(prefix: str = "own", groups: int = 1) -> dict[str, Any]:
    """Return a section whose rollout batch is all groups, of two members."""
    columns = {
        "tokens": {"dtype": "int32", "role": "token"},
        "loss_mask": {"dtype": "bool", "role": "loss_mask"},
        "image": {"dtype": "int64", "role": "media"},
        "prompt": {"dtype": "int64", "rows": "1"},
    }
    kept = {
        "pixel_values": {"dtype": "float32", "shape": [PATCH]},
        "image_grid_thw": {"dtype": "int64", "shape": [3]},
        "pixel_values_videos": {"dtype": "float32", "shape": [PATCH]},
        "video_grid_thw": {"dtype": "int64", "shape": [3]},
        "second_per_grid_ts": {"dtype": "float32"},
    }
    table = {
        "capacity_steps": 4000,
        "max_length": 100,
        "remove": "fifo",
        "group": {"column": "prompt", "size": 2},
        "media": {"capacity_bytes": 1 << 20, "columns": kept},
        "schema": {"columns": columns},
    }
    return section(
        tables={"main": table},
        fields={"tokens": {}, "image": {}},
        sampler={"kind": "fifo", "unit": "group"},
        pack={"tokens": 256, "pad": {"multiple": 16}, "prefix": prefix},
        rollout={"groups": groups},
    )


def add_group(replay: Replay, number: int, tokens: list[int], named: dict[int, Media]) -> None:
    """Add two responses to a prompt."""
    for member in range(2):
        answer = list(range(10 + member, 13 + 3 * member))
        mask = [False] * len(tokens) + [True] * len(answer)
        replay.add(
            {"tokens": [*tokens, *answer], "loss_mask": mask, "prompt": number, "image": named}
        )
