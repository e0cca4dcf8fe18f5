"""Sums of three numbers and a calculator, as a language of 15 tokens; a small GPT-2, its samples.

A question is "12+34+56?", a call of the calculator "12+34!", its result "046=", an answer "102.".
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

from deepspeed_gear import Column, DatasetWriter, Schema

WORDS = "0123456789+?!=."
MOST_OUTPUT = 7  # tokens of a turn
WIDTH = 64


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text]


def text_of(tokens: Iterable[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def draw_question(words: random.Random) -> str:
    return "+".join(f"{words.randrange(100):02}" for _ in range(3)) + "?"


def calculate(output: str) -> str | None:
    """Return the result of a call; None if the output is none."""
    call = re.fullmatch(r"(\d{2,3})\+(\d\d)!", output)
    return f"{int(call[1]) + int(call[2]):03}=" if call else None


def answer(question: str) -> str:
    return f"{sum(map(int, question[:-1].split('+'))):03}."


def right_outputs(question: str) -> list[str]:
    """Return the outputs of an agent that calls the calculator twice, then answers."""
    first, second, third = question[:-1].split("+")
    return [f"{first}+{second}!", f"{int(first) + int(second):03}+{third}!", answer(question)]


def write_questions(folder: str, words: random.Random, number: int) -> None:
    """Write a data set of questions, one trajectory each."""
    columns = [Column("tokens", "int32", role="token")]
    with DatasetWriter(folder, Schema(columns), overwrite=True) as writer:
        for _ in range(number):
            writer.add({"tokens": ids(draw_question(words))})


def policy() -> GPT2LMHeadModel:
    """Return a GPT-2 of 100,000 weights, which begin larger than those of a deep one."""
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"vocab_size": len(WORDS), "n_positions": 40, "n_embd": WIDTH, "n_layer": 2}
    first = {"n_head": 4, "initializer_range": 0.07, "tie_word_embeddings": False}
    ends = {"bos_token_id": None, "eos_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drop, **first, **ends))
    for embedding in (model.transformer.wte, model.transformer.wpe):
        nn.init.normal_(embedding.weight)
    return model


@torch.no_grad()
def generate(model: nn.Module, prompts: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Sample an output for each prompt, up to "!" or ".": ids and log-probabilities."""
    starts = torch.tensor([len(prompt) for prompt in prompts])
    tokens = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    tokens = F.pad(tokens, (0, MOST_OUTPUT))
    logps = torch.zeros(tokens.shape)
    for step in range(MOST_OUTPUT):
        place = (starts + step)[:, None]
        # What is right of a place has no effect on it, so prompts of any lengths fit together.
        logits = model(tokens[:, : int(place.max())], use_cache=False).logits
        before = (place - 1)[:, :, None].expand(-1, -1, logits.shape[2])
        logp = torch.log_softmax(logits.gather(1, before)[:, 0].float(), dim=1)
        drawn = torch.multinomial(logp.exp(), 1)
        tokens.scatter_(1, place, drawn)
        logps.scatter_(1, place, logp.gather(1, drawn))
    outputs = []
    for row, start in enumerate(starts.tolist()):
        text = text_of(tokens[row, start : start + MOST_OUTPUT].tolist())
        own = slice(start, start + len(re.split(r"(?<=[!.])", text)[0]))
        outputs.append((tokens[row, own].numpy(), logps[row, own].numpy()))
    return outputs


def imitate(model: nn.Module, optimizer: Any, rows: list[Mapping[str, Any]]) -> None:
    """Make a step of supervised learning on the tokens of trajectories that have loss."""
    tokens = pad_sequence([torch.from_numpy(row["tokens"]).long() for row in rows], True)
    mask = pad_sequence([torch.from_numpy(row["loss_mask"]) for row in rows], True)[:, 1:]
    logits = model(tokens[:, :-1], use_cache=False).logits
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    losses[mask.flatten()].mean().backward()
    optimizer.step()
    optimizer.zero_grad()
