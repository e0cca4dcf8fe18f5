"""Replay the experts that a generator chose for each token in the trainer's forward pass.

    python examples/router_replay.py --steps 20

The generator is the trainer's model in bfloat16, so its routers choose other experts for some
tokens. Its choices are a column, packed as the tokens are.
"""

from __future__ import annotations

import argparse
import copy
import json
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

import deepspeed_gear

VOCABULARY = 32
LAYERS = 4
EXPERTS = 16
CHOSEN = 2  # experts of a token in a layer
RESPONSES = 32
PROMPT = 4  # tokens, of all LENGTH
LENGTH = 24
COLUMNS: dict[str, Any] = {
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "logp": {"dtype": "float32"},
    "experts": {"dtype": "uint8", "shape": [LAYERS, CHOSEN]},
    "advantage": {"dtype": "float32", "rows": "1"},
}
ROOM = {"capacity_trajectories": 4 * RESPONSES, "capacity_steps": 4 * RESPONSES * LENGTH}
LIFE = {"max_length": LENGTH, "remove": "fifo", "max_times_sampled": 1}
GEAR = {
    "tables": {"rollouts": {**ROOM, **LIFE, "schema": {"columns": COLUMNS}}},
    "sampler": {"kind": "fifo"},
    # The experts of a place are those that read its token.
    "fields": {"tokens": {}, "logp": {}, "advantage": {}, "experts": {"offset": 0}},
    "pack": {"tokens": 256},
    "batch": {"trajectories": RESPONSES},
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}
STEP = {"train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False}
CONFIG = {**STEP, "gradient_clipping": 1.0, "optimizer": OPTIMIZER, "gear": GEAR}


class Routers:
    """The routers of a model: their choices are recorded, or replaced by given ones."""

    def __init__(self, model: nn.Module) -> None:
        self.chosen: dict[int, Tensor] = {}  # of the last forward pass, by layer. [N, CHOSEN] each
        self.replayed: Tensor | None = None  # None: the routers' own. [N, LAYERS, CHOSEN]
        gates = [one for one in model.modules() if isinstance(one, Qwen3MoeTopKRouter)]
        for layer, gate in enumerate(gates):
            gate.register_forward_hook(partial(self._choose, layer))

    def _choose(self, layer: int, gate: Any, _: Any, made: Any) -> Any:
        logits, _, ids = made
        self.chosen[layer] = ids
        if self.replayed is None:
            return made
        ids = self.replayed[:, layer].long()
        # The experts' weights are the trainer's, so that its router has a gradient.
        weights = logits.float().softmax(-1).gather(-1, ids)
        if gate.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), ids


@torch.no_grad()
def generate(model: Any, routers: Routers) -> dict[str, Tensor]:
    """Sample responses; return the columns of all. [RESPONSES, LENGTH, ...] each."""
    tokens = torch.randint(VOCABULARY, (RESPONSES, PROMPT))
    for _ in range(LENGTH - PROMPT):
        chances = model(input_ids=tokens, use_cache=False).logits[:, -1].float().softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)], dim=1)
    logits = model(input_ids=tokens, use_cache=False).logits.float()
    logp = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    # Row t: the experts that read token t. A server has none for the last token, which it has not
    # read; any will do there, since nothing is predicted from it.
    chosen = torch.stack([routers.chosen[layer] for layer in range(LAYERS)], dim=1)
    experts = chosen.view(RESPONSES, LENGTH, LAYERS, CHOSEN)
    return {"tokens": tokens, "logp": F.pad(logp, (1, 0)), "experts": experts}


def logp_of(engine: Any, micro: Any) -> Tensor:
    """Return the log-probability of the token that each place predicts. [N]."""
    logp = engine(**micro.model_inputs(engine)).logits[0].float().log_softmax(-1)
    return logp.gather(-1, micro.targets[0][:, None])[:, 0]


def train(engine: Any, routers: Routers) -> dict[str, float]:
    """Make an optimizer step; return how the trainer differs from the generator, with means."""
    step = engine.gear_step()
    sums: dict[str, list[Tensor]] = {"other_experts": [], "own_choices": [], "replayed": []}
    for micro in step:
        with torch.no_grad():  # a comparison: the choices of the trainer's own routers
            routers.replayed = None
            own = (logp_of(engine, micro) - micro["logp"][0]).abs()
        chosen = torch.stack([routers.chosen[layer] for layer in range(LAYERS)], dim=1)
        routers.replayed = micro["experts"][0]  # until after backward, which may repeat layers
        differs = chosen.sort(-1).values != routers.replayed.long().sort(-1).values
        change = logp_of(engine, micro) - micro["logp"][0]
        advantage = micro["advantage"][micro.sequence[0].clamp(min=0)]
        engine.backward(micro.sum(-change.exp() * advantage))
        sums["other_experts"].append(micro.sum(differs.any(-1).float().mean(-1)))
        sums["own_choices"].append(micro.sum(own))
        sums["replayed"].append(micro.sum(change.detach().abs()))
    engine.step()
    return dict(step.mean(**sums))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    mixture = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 32}
    shape = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS, "initializer_range": 0.2}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **mixture, **shape, norm_topk_prob=True))
    generator = copy.deepcopy(model).bfloat16().eval()
    recorded = Routers(generator)
    routers = Routers(model)
    weights = model.parameters()
    engine, *_ = deepspeed_gear.initialize(model=model, model_parameters=weights, config=CONFIG)
    curve = []
    for _ in range(parser.parse_args().steps):
        generator.load_state_dict(model.state_dict())
        rows = generate(generator, recorded)
        rewards = (rows["tokens"][:, PROMPT:] % 2 == 0).float().mean(1)  # for even tokens
        rows["advantage"] = (rewards - rewards.mean()) / rewards.std()
        rows["loss_mask"] = (torch.arange(LENGTH) >= PROMPT).expand(RESPONSES, LENGTH)
        for values in zip(*rows.values(), strict=True):
            engine.gear.add(dict(zip(rows, values, strict=True)))
        curve.append({**train(engine, routers), "reward": float(rewards.mean())})
    print(json.dumps({"first": curve[0], "last": curve[-1]}))


if __name__ == "__main__":
    main()
