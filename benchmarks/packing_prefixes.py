"""What a training step gains where packs hold a group's prompt once: `"prefix": "share"` of
`gear.pack`.

    python benchmarks/packing_prefixes.py [--quick]

Groups of 8 responses of 200 tokens to a prompt of 400; a small Qwen2 with sdpa attention, forward
and backward of all micro batches of a step, in turns with and without. `tokens_per_s` counts the
tokens of the trajectories, so that both do the same work; `rows` are the places that the model
computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from support.report import Report, Row, print_rows

from deepspeed_gear import Replay

GROUPS = 4
SIZE = 8
PROMPT = 400
RESPONSE = 200
TOKENS = 2048
TURNS = 5
WORDS = 2048


def section(prefix: str, size: Mapping[str, int]) -> dict[str, Any]:
    """Return a gear section whose batch is all groups."""
    columns = {
        "tokens": {"dtype": "int32", "role": "token"},
        "loss_mask": {"dtype": "bool", "role": "loss_mask"},
        "prompt": {"dtype": "int64", "rows": "1"},
    }
    steps = size["prompt"] + size["response"]
    table = {
        "capacity_steps": GROUPS * SIZE * steps,
        "max_length": steps,
        "schema": {"columns": columns},
        "group": {"column": "prompt", "size": SIZE},
    }
    return {
        "tables": {"main": table},
        "sampler": {"kind": "epoch", "unit": "group"},
        "pack": {"tokens": size["tokens"], "pad": {"multiple": 128}, "prefix": prefix},
        "batch": {"groups": GROUPS},
    }


def measure_prefixes(quick: bool) -> list[Row]:
    """Return a row without and one with shared prefixes: the least time of some steps, taken in
    turns.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    size = dict(zip(("prompt", "response", "tokens"), (PROMPT, RESPONSE, TOKENS), strict=True))
    if quick:
        size = {name: value // 4 for name, value in size.items()}
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1 if quick else 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=WORDS, attn_implementation="sdpa", **sizes, **heads)
    )
    words = np.random.default_rng(0)
    rows: dict[str, Row] = {}
    replays = {prefix: Replay(section(prefix, size)) for prefix in ("own", "share")}
    for group in range(GROUPS):
        prompt = words.integers(1, WORDS, size["prompt"])
        for _ in range(SIZE):
            tokens = np.append(prompt, words.integers(1, WORDS, size["response"])).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            for replay in replays.values():
                replay.add({"tokens": tokens, "loss_mask": mask, "prompt": group})
    for _ in range(1 if quick else TURNS):
        for prefix, replay in replays.items():
            model.zero_grad()
            begin = perf_counter()
            places = 0
            loss = 0.0
            step = replay.step()
            for micro in step:
                logits = model(**micro.model_inputs(model)).logits[0]
                value = micro.sum(F.cross_entropy(logits, micro.targets[0], reduction="none"))
                value.backward()
                places += micro["tokens"].numel()
                loss += value.item()
            seconds = perf_counter() - begin
            row = rows.setdefault(prefix, {"what": "prefix", "prefix": prefix, "seconds": seconds})
            row["seconds"] = min(row["seconds"], seconds)
            row |= {
                "micro_batches": len(step),
                "rows": places,
                "shared": step.shared_tokens,
                "loss": loss,
            }
            row["tokens_per_s"] = step.num_tokens / row["seconds"]
    for replay in replays.values():
        replay.close()
    return list(rows.values())


def main() -> None:
    """Run from the command line."""
    report = Report(__doc__)
    torch.set_num_threads(1)
    rows = measure_prefixes(report.options.quick)
    print_rows(rows, "prefix micro_batches rows shared seconds tokens_per_s loss")
    report.write(rows)


if __name__ == "__main__":
    main()
