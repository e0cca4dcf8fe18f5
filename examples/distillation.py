"""Distil two teachers into a student, by the top-p log-probabilities of each token.

    python examples/distillation.py --steps 60

The student generates responses. Each teacher has two late, ragged columns: its likely next tokens
up to the mass P, and their log-probabilities. Ranks fill one teacher's, a worker the other's.
"""

from __future__ import annotations

import argparse
import copy
import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

import deepspeed_gear
from deepspeed_gear import FillWorker, Ragged, Replay

TEACHERS = ("math", "code")
VOCABULARY = 16
P = 0.8
RESPONSES = 64
PROMPT = 4  # tokens, of all LENGTH
LENGTH = 16
VALUES: dict[str, Any] = {"max_values": VOCABULARY, "late": True}
COLUMNS: dict[str, Any] = {
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    **{f"{name}_ids": {"dtype": "int32", **VALUES} for name in TEACHERS},
    **{f"{name}_logp": {"dtype": "float16", **VALUES} for name in TEACHERS},
}
ROOM = {"capacity_steps": 4 * RESPONSES * LENGTH, "ragged": {"capacity_bytes": 8 << 20}}
LIFE = {"max_length": LENGTH, "remove": "fifo", "max_times_sampled": 1, "writers": 2}
GEAR = {
    "tables": {"rollouts": {**ROOM, **LIFE, "schema": {"columns": COLUMNS}}},
    "sampler": {"kind": "fifo"},
    "pack": {"tokens": 512},
    "batch": {"trajectories": RESPONSES},
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
STEP = {"train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False}
CONFIG = {**STEP, "gradient_clipping": 1.0, "optimizer": OPTIMIZER, "gear": GEAR}


def language_model(seed: int, width: int, spread: float) -> Qwen2ForCausalLM:
    """Return a tiny model; a larger `spread` of its weights makes its distributions sharper."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": spread}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads)).eval()


@torch.no_grad()
def generate(student: Any, words: torch.Generator) -> Tensor:
    """Return prompts with sampled responses. [RESPONSES, LENGTH], int64."""
    tokens = torch.randint(VOCABULARY, (RESPONSES, PROMPT), generator=words)
    for _ in range(LENGTH - PROMPT):
        chances = student(input_ids=tokens, use_cache=False).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=words)], dim=1)
    return tokens


def top_p(logits: Tensor, empty: int = 0) -> tuple[Ragged, Ragged]:
    """Return ids and log-probabilities up to the mass P, after so many `empty` steps. [N, V]."""
    logp, ids = torch.log_softmax(logits.float(), dim=-1).sort(descending=True)
    kept = logp.exp().cumsum(-1) - logp.exp() < P  # the tokens before it have less
    offsets = F.pad(kept.sum(-1).cumsum(0), (1 + empty, 0))
    return Ragged(ids[kept], offsets), Ragged(logp[kept], offsets)


@torch.no_grad()
def fill_on_ranks(replay: Replay, name: str, teacher: Any) -> None:
    """Fill the columns of a teacher in packs. Collective."""
    for micro in replay.forward(f"{name}_ids", f"{name}_logp"):
        ids, logp = top_p(teacher(**micro.model_inputs(teacher)).logits[0])
        micro.fill(**{f"{name}_ids": ids, f"{name}_logp": logp})


@torch.no_grad()
def fill_by_worker(run: str, name: str, teacher: Any) -> None:
    """Fill the columns of a teacher: in your run, the loop of another process."""
    with FillWorker.attach(CONFIG, (f"{name}_ids", f"{name}_logp"), run=run) as worker:
        while leases := worker.lease(16, timeout_s=0):
            tokens = torch.stack([torch.as_tensor(one.columns["tokens"]) for one in leases]).long()
            logits = teacher(input_ids=tokens, use_cache=False).logits[:, :-1]
            for lease, own in zip(leases, logits, strict=True):
                ids, logp = top_p(own, empty=1)  # values of step t describe token t
                lease.fill(**{f"{name}_ids": ids, f"{name}_logp": logp})


def divergence(student: Tensor, ids: Ragged, logp: Ragged) -> Tensor:
    """Return KL(teacher || student) of each place, with all other tokens as one. [N, V] to [N]."""
    teacher = logp.values.float()
    own = student[ids.steps, ids.values.long()]
    rest = (1 - ids.sum(teacher.exp())).clamp(min=1e-6)
    own_rest = (1 - ids.sum(own.exp())).clamp(min=1e-6)
    return ids.sum(teacher.exp() * (teacher - own)) + rest * (rest.log() - own_rest.log())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    math = language_model(100, 64, 0.1)
    code = copy.deepcopy(math)  # as if both were fine-tuned from one model
    for weight in code.parameters():
        weight.data += 0.02 * torch.randn_like(weight)
    student = language_model(args.seed, 32, 0.1)
    weights = student.parameters()
    engine, *_ = deepspeed_gear.initialize(model=student, model_parameters=weights, config=CONFIG)
    words = torch.Generator().manual_seed(args.seed)
    curve = []
    error = 0.0
    for _ in range(args.steps):
        for tokens in generate(student, words):
            engine.gear.add({"tokens": tokens, "loss_mask": torch.arange(LENGTH) >= PROMPT})
        fill_on_ranks(engine.gear, "math", math)
        fill_by_worker(engine.gear.run, "code", code)
        step = engine.gear_step()
        losses = []
        wholes = []
        for micro in step:
            logp = torch.log_softmax(engine(**micro.model_inputs(engine)).logits[0].float(), -1)
            loss = whole = torch.zeros(len(logp))
            for name, teacher in (("math", math), ("code", code)):
                ids = micro.ragged(f"{name}_ids")
                stored = micro.ragged(f"{name}_logp")
                loss = loss + divergence(logp, ids, stored) / len(TEACHERS)
                with torch.no_grad():  # a check: training needs the stored columns only
                    exact = teacher(**micro.model_inputs(teacher)).logits[0].log_softmax(-1)
                    whole = whole + (exact.exp() * (exact - logp)).sum(-1) / len(TEACHERS)
                    wrong = exact[ids.steps, ids.values.long()] - stored.values
                    error = max(error, float(wrong.abs().max()))
            losses.append(micro.sum(loss))
            wholes.append(micro.sum(whole))
            engine.backward(losses[-1])
        engine.step()
        curve.append(step.mean(loss=losses, whole=wholes))
    result = {"first": curve[0], "last": curve[-1], "largest_error": error}
    print(json.dumps({**result, "values": ids.counts[micro.loss_mask[0]].aminmax()}, default=int))


if __name__ == "__main__":
    main()
