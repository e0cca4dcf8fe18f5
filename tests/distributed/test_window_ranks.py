"""Full layers and sliding windows over shared prefixes, trained by engines on one and two ranks."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from process_support import call_with_engines
from rollout_support import section

pytest.importorskip("transformers", reason="the models are transformers'")

from packed_families import VOCABULARY, tiny
from trainers import EngineTrainer, ModuleTrainer

from deepspeed_gear import Replay
from deepspeed_gear.frameworks.engine_place import place_of
from deepspeed_gear.frameworks.gradient_divisor import gradient_divisor

GROUPS = 3
SIZE = 4
PROMPT = 21  # windows of 16 steps begin in the prompt, in the response, or before both
COLUMNS = {
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "prompt": {"dtype": "int64", "rows": "1"},
}
TABLE = {
    "capacity_steps": 2000,
    "max_length": 60,
    "schema": {"columns": COLUMNS},
    "group": {"column": "prompt", "size": SIZE},
}
CASES = [("gemma3_text", "sdpa"), ("gpt_oss", "eager"), ("mistral", "sdpa"), ("llama", "sdpa")]


def responses() -> list[dict[str, Any]]:
    """Return groups of two responses to a prompt; the third trajectory leaves the first one after 3
    tokens of its response, and the fourth one the third after 4 of its own.
    """
    random = np.random.default_rng(0)
    stored: list[dict[str, Any]] = []
    for number in range(GROUPS * SIZE):
        kind = number % SIZE
        if kind == 0:
            context = random.integers(1, VOCABULARY, PROMPT)
        elif kind == 2:
            before = stored[-2]["tokens"][: PROMPT + 3]
            context = np.append(before, random.integers(1, VOCABULARY, 4))
        elif kind == 3:
            context = stored[-1]["tokens"][: PROMPT + 3 + 4 + 4]
        own = random.integers(1, VOCABULARY, 5 + 3 * (number % 7))
        tokens = np.append(context, own).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(context)
        stored.append({"tokens": tokens, "loss_mask": mask, "prompt": number // SIZE})
    return stored


def error(kind: str, family: str, attention: str) -> float:
    """Train one step by SGD with rate 1; return the error of the gradient.

    As part of the largest gradient, beside that of one trajectory at a time.
    """
    if kind == "ddp":
        trainer: Any = ModuleTrainer(lambda _: tiny(family, attention), ("model", []), kind)
    else:
        config = {"data_types": {"grad_accum_dtype": "fp32"}}
        case = {"zero": int(kind[4]), "config": config}
        trainer = EngineTrainer(lambda _: tiny(family, attention), case)
    before = trainer.weights()
    reference = tiny(family, attention)
    reference.load_state_dict({**reference.state_dict(), **before})
    place = place_of(trainer.trained) if isinstance(trainer, EngineTrainer) else None
    pack = {"tokens": 160, "pad": {"multiple": 8}, "prefix": "share"}
    gear = section(
        tables={"main": TABLE},
        sampler={"kind": "fifo", "unit": "group"},
        fields={"tokens": {}},
        rollout={"groups": GROUPS},
        pack=pack,
        timeout_s=60.0,
    )
    stored = responses()
    with Replay(gear, place=place) as replay:
        if dist.get_rank() == 0:
            for response in stored:
                replay.add(response)
        dist.barrier()
        replay.gradient_divisor = gradient_divisor(trainer.trained)
        for step in replay.rollout():
            assert step.shared_tokens > 2 * PROMPT
            for number, micro in enumerate(step):
                inputs = micro.model_inputs(trainer.trained)

                def value(micro: Any = micro, inputs: dict[str, Any] = inputs) -> torch.Tensor:
                    logits = trainer.trained(**inputs).logits[0]
                    return micro.sum(F.cross_entropy(logits, micro.targets[0], reduction="none"))

                trainer.backward(value, number == len(step) - 1)
            trainer.step()
    after = trainer.weights()
    trainer.close()
    sums = torch.zeros(())
    for response in stored:
        tokens = torch.from_numpy(response["tokens"]).long()[None]
        logits = reference(input_ids=tokens, use_cache=False).logits[0, :-1]
        losses = F.cross_entropy(logits, tokens[0, 1:], reduction="none")
        sums = sums + losses[torch.from_numpy(response["loss_mask"][1:])].sum()
    (sums / sum(int(response["loss_mask"].sum()) for response in stored)).backward()
    most = 0.0
    largest = 0.0
    for name, parameter in reference.named_parameters():
        deviation = before[name] - after[name] - parameter.grad
        # Less half a unit in the last place of the weight, to which the update is rounded.
        rounding = 2.0**-24 * torch.maximum(before[name].abs(), after[name].abs())
        most = max(most, float((deviation.abs() - rounding).max()))
        largest = max(largest, float(parameter.grad.abs().max()))
    return most / largest


def errors(kind: str) -> list[float]:
    return [error(kind, *case) for case in CASES]


@pytest.mark.parametrize(("kind", "ranks"), [("zero2", 1), ("zero2", 2), ("zero3", 2), ("ddp", 2)])
def test_shared_prefixes_give_the_gradient_of_one_process(kind: str, ranks: int) -> None:
    for found in call_with_engines(ranks, errors, kind):
        assert max(found) < 2e-6, dict(zip(CASES, found, strict=True))
