"""The gradient of packed micro batches on many ranks, beside that of one process without packs.

For each kind of training: the change of the weights by SGD with a rate of 1, for several budgets and
normalisations; and the weights that tokens would have in means of micro batches, and of a rank's own tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gear_support import prefix
from torch import Tensor, nn

from deepspeed_gear import Replay
from deepspeed_gear.distributed.gradient_divisor import gradient_divisor

VOCABULARY, WIDTH, MOST = 50, 16, 40
COLUMNS = {
    "tokens": {"dtype": "uint8", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "prompt": {"dtype": "int64", "rows": "1"},
}


def model_of() -> nn.Module:
    """Return a tiny Qwen2, or where transformers is missing, a model of one attention."""
    torch.manual_seed(0)
    try:
        from transformers import Qwen2Config, Qwen2ForCausalLM
    except ImportError:
        return Attention()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MOST + 200, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool = False) -> Any:
        x = self.tokens(input_ids) + self.places(position_ids)
        owner = torch.cumsum((position_ids == 0).long(), 1)[0]
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = (owner[:, None] == owner[None, :]).tril()
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], attn_mask=mask[None, None])
        return type("Output", (), {"logits": self.head(x + mixed[:, 0])})()


def responses() -> list[dict[str, Any]]:
    words, found = np.random.default_rng(5), []
    for number in range(40):
        length = int(words.integers(2, MOST + 1))
        prompt = int(words.integers(0, length + 1)) if number % 7 else length  # some are wholly masked
        tokens = words.integers(1, VOCABULARY, length).astype(np.uint8)
        mask = np.arange(length) >= prompt
        found.append({"tokens": tokens, "loss_mask": mask, "prompt": np.int64(number // 4)})
    return found


def unpacked(model: nn.Module, chosen: list[dict[str, Any]], normalize: Any) -> dict[str, Tensor]:
    """Return the gradient of the intended mean, from one sequence at a time in float64 sums."""
    losses, counts = [], []
    for response in chosen:
        tokens = torch.from_numpy(response["tokens"]).long()[None]
        places = torch.arange(tokens.size(1))[None]
        logits = model(input_ids=tokens, position_ids=places, use_cache=False).logits[0, :-1]
        mask = torch.from_numpy(response["loss_mask"][1:])
        values = F.cross_entropy(logits, tokens[0, 1:], reduction="none")
        losses.append((values * mask).sum())
        counts.append(int(mask.sum()))
    sums, numbers = torch.stack(losses), torch.tensor(counts)
    if normalize == "token":
        loss = sums.sum() / numbers.sum()
    elif normalize == "sequence":
        loss = (sums / numbers.clamp(min=1)).sum() / (numbers > 0).sum()
    else:
        loss = sums.sum() / normalize["constant"] / (numbers > 0).sum()
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def nll(model: Any, micro: Any) -> Tensor:
    logits = model(**micro.model_inputs()).logits
    return F.cross_entropy(logits[0], micro.targets[0], reduction="none")[None]


def deviation(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest difference of an element over the largest element."""
    largest = max(float(values.abs().max()) for values in wanted.values())
    return max(float((found[name] - values).abs().max()) for name, values in wanted.items()) / largest


class Trainer:
    """One way of training, whose steps change the weights by the gradient."""

    def __init__(self, kind: str) -> None:
        self.kind, self.model = kind, model_of()
        if kind == "ddp":
            self.trained: Any = nn.parallel.DistributedDataParallel(self.model)
            return
        import deepspeed

        zero = {"stage": int(kind.removeprefix("zero")), "stage3_param_persistence_threshold": 0}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
            "data_types": {"grad_accum_dtype": "fp32"},
        }
        self.trained, *_ = deepspeed.initialize(
            model=self.model, model_parameters=self.model.parameters(), config=config
        )

    def weights(self) -> dict[str, Tensor]:
        if self.kind == "zero3":
            import deepspeed

            with deepspeed.zero.GatheredParameters(list(self.model.parameters())):
                return {name: p.detach().clone() for name, p in self.model.named_parameters()}
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def backward(self, loss: Tensor, is_last: bool) -> None:
        if self.kind != "ddp":
            self.trained.backward(loss)
        elif is_last:
            loss.backward()
        else:
            with self.trained.no_sync():
                loss.backward()

    def step(self) -> None:
        if self.kind != "ddp":
            self.trained.step()
            return
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= parameter.grad
                    parameter.grad = None


def section(normalize: Any, tokens: int) -> dict[str, Any]:
    table = {"capacity_steps": 4000, "max_length": MOST, "schema": {"columns": COLUMNS}}
    return {
        "tables": {"responses": table},
        "sampler": {"kind": "fifo"},
        "fields": {"tokens": {}},
        "pack": {"tokens": tokens, "pad": {"multiple": 8}},
        "batch": {"trajectories": 36},
        "loss": {"normalize": normalize},
        "shared_memory": {"prefix": prefix()},
    }


def main() -> None:
    task = json.loads(sys.argv[-1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, stored, found = dist.get_rank(), responses(), []
    for kind in task["kinds"]:
        trainer, reference = Trainer(kind), model_of()
        for normalize, tokens in task["cases"]:
            with Replay(section(normalize, tokens)) as replay:
                if rank == 0:
                    for response in stored:
                        replay.add(response)
                dist.barrier()
                replay.gradient_divisor = gradient_divisor(trainer.trained)
                step, before, counts = replay.step(), trainer.weights(), []
                number = len(step)
                for index, micro in enumerate(step):
                    counts.append(int(micro.loss_mask.sum()))
                    trainer.backward(micro.sum(nll(trainer.trained, micro)), index == number - 1)
                trainer.step()
            after = trainer.weights()
            reference.load_state_dict({**reference.state_dict(), **before})
            wanted = unpacked(reference, stored[:36], normalize)
            change = {name: before[name] - after[name] for name in wanted}
            found.append(
                {
                    "kind": kind,
                    "normalize": normalize,
                    "tokens": tokens,
                    "deviation": deviation(change, wanted),
                    "counts": counts,  # loss tokens of this rank's micro batches
                }
            )
        if kind != "ddp":
            trainer.trained.destroy()
    (Path(task["out"]) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
