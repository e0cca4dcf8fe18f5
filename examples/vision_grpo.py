"""Teach a tiny Qwen2-VL to answer questions about pictures with GRPO.

    python examples/vision_grpo.py --seed 0

A picture of 16 x 16 pixels has one coloured quarter. A prompt is the picture with one of two
questions, for the colour (3 answers) or for the quarter (4 answers); a response is one token, and
its reward 1 if the answer is right. The weights are random at the beginning. In every iteration, 8
responses to each of 24 prompts are sampled and added as groups, then trained in packed batches: the
store holds a picture once for its group, and the pack too, as the members share their prompt
(`"prefix": "share"`). `micro.model_inputs` gives the pixels, grids and positions of a pack. The
last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import quiet_start
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import deepspeed_gear
from deepspeed_gear import Media

COLOURS = 3
QUARTERS = 4
COLOUR = 7  # tokens 0 to 6 are the answers: three colours, four quarters
QUARTER = 8
BEGIN = 9
IMAGE = 10
END = 11
PROMPTS = 24
RESPONSES = 8
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, **HEADS}
VISION = {"patch_size": 4, "depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4}


def policy() -> Qwen2VLForConditionalGeneration:
    """Return a Qwen2-VL with random weights."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    text = {**TEXT, "vocab_size": 12, "rope_parameters": rope, "max_position_embeddings": 64}
    config = Qwen2VLConfig(
        text_config={**text, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
        vision_config=VISION,
        image_token_id=IMAGE,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    return Qwen2VLForConditionalGeneration(config)


class Pictures:
    """Prompts about pictures, and their right answers."""

    def __init__(self) -> None:
        size = {"shortest_edge": 256, "longest_edge": 256}  # pixels: 16 x 16
        self._processor = Qwen2VLImageProcessorPil(patch_size=4, size=size)

    def draw(self, random: np.random.Generator, count: int) -> tuple[np.ndarray, dict, np.ndarray]:
        """Return tokens, [count, 8], what the processor makes of the pictures, and the answers."""
        colour = random.integers(0, COLOURS, count)
        quarter = random.integers(0, QUARTERS, count)
        pictures = random.integers(0, 60, (count, 16, 16, 3)).astype(np.uint8)
        for picture, c, q in zip(pictures, colour, quarter, strict=True):
            picture[8 * (q // 2) : 8 * (q // 2) + 8, 8 * (q % 2) : 8 * (q % 2) + 8, c] = 255
        made = self._processor([*pictures], return_tensors="pt")
        asks_colour = random.random(count) < 0.5
        question = np.where(asks_colour, COLOUR, QUARTER)[:, None]
        places = np.broadcast_to(np.array([BEGIN, *[IMAGE] * 4, END]), (count, 6))
        tokens = np.concatenate([places, question], axis=1)
        return tokens, made, np.where(asks_colour, colour, COLOURS + quarter)


def logits_of(model: Any, tokens: np.ndarray, made: Any) -> torch.Tensor:
    """Return the logits of the answer to each prompt. [count, vocabulary]."""
    ids = torch.from_numpy(tokens)
    kinds = (ids == IMAGE).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **made).logits[:, -1]
    logits[:, IMAGE] = -torch.inf  # a response with the token of a picture would need a picture
    return logits


def add_groups(engine: Any, pictures: Pictures, random: np.random.Generator, first: int) -> float:
    """Sample responses to new prompts and add them; return their mean reward."""
    tokens, made, answers = pictures.draw(random, PROMPTS)
    probabilities = logits_of(engine.module, tokens, made).softmax(-1)
    responses = torch.multinomial(probabilities, RESPONSES, replacement=True).numpy()
    pixels = made["pixel_values"].reshape(PROMPTS, 16, 96)
    for number in range(PROMPTS):
        grid = made["image_grid_thw"][number : number + 1]
        picture = Media(pixel_values=pixels[number], image_grid_thw=grid)
        for response in responses[number]:
            row = {"tokens": [*tokens[number], response], "loss_mask": [False] * 7 + [True]}
            row |= {"image": {1: picture}, "prompt_id": first + number}
            engine.gear.add({**row, "reward": float(response == answers[number])})
    return float((responses == answers[:, None]).mean())


def train(engine: Any) -> None:
    """Train one rollout batch."""
    rollout = engine.gear_rollout()
    rollout.advantages("grpo")
    for step in rollout:
        for micro in step:
            logits = engine(**micro.model_inputs(engine)).logits[0]
            loss = F.cross_entropy(logits, micro.targets[0], reduction="none")[None]
            engine.backward(micro.sum(loss * micro["advantage"]))
        engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="configs/vision_grpo.json", help="a ds_config")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=300)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    model = policy()
    weights = model.parameters()
    with quiet_start():
        engine, *_ = deepspeed_gear.initialize(
            model=model, model_parameters=weights, config=args.config
        )
    pictures = Pictures()
    random = np.random.default_rng(args.seed)
    rewards = []
    for iteration in range(args.iterations):
        rewards.append(add_groups(engine, pictures, random, iteration * PROMPTS))
        train(engine)
        if iteration % 20 == 19:
            print(f"iteration {iteration + 1}: mean reward {np.mean(rewards[-20:]):.3f}")
    tokens, made, answers = pictures.draw(np.random.default_rng(7), 400)
    right = logits_of(engine.module, tokens, made).argmax(-1).numpy() == answers
    first, last = (float(np.mean(part)) for part in (rewards[:5], rewards[-5:]))
    result = {"reward_first": first, "reward_last": last, "accuracy": float(right.mean())}
    print(json.dumps({**result, "iterations": args.iterations}))
    engine.gear.close()


if __name__ == "__main__":
    main()
