"""The gradient of packed micro batches of a tiny Qwen2 on many ranks, beside that of one process.

The cases of each kind are pairs of a loss and a budget (tests/support/gradient_cases.py). The change of the
weights by SGD with a rate of 1 is the gradient. The first rank computes the gradient of one process from one
sequence at a time; every rank compares its weights with it.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from gear_support import prefix
from gradient_cases import LOSSES
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

from deepspeed_gear import MicroBatch, Replay
from deepspeed_gear.distributed.deepspeed_compat import place_of
from deepspeed_gear.distributed.gradient_divisor import gradient_divisor
from deepspeed_gear.distributed.topology import RankCoordinates

VOCABULARY, WIDTH, MOST = 50, 16, 40
GROUPS, SIZE = 10, 4
COLUMNS = {
    "tokens": {"dtype": "uint8", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "prompt": {"dtype": "int64", "rows": "1"},
    "member": {"dtype": "int64", "rows": "1"},
}
Weights = dict[str, Tensor]


def responses() -> list[dict[str, Any]]:
    """Return groups of four trajectories of two members; some and one whole group are masked."""
    words, found = np.random.default_rng(5), []
    for number in range(GROUPS * SIZE):
        length = int(words.integers(2, MOST + 1))
        prompt = int(words.integers(0, length + 1))
        group, member = number // SIZE, number % SIZE // 2
        if number % 7 == 0 or group == 3:
            prompt = length
        tokens = words.integers(1, VOCABULARY, length).astype(np.uint8)
        own = {"prompt": np.int64(group), "member": np.int64(member)}
        found.append({"tokens": tokens, "loss_mask": np.arange(length) >= prompt, **own})
    return found


# ---- the model -------------------------------------------------------------------------------------


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attend where a mask is True. [1, N, heads, width] each."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    found = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return found.transpose(1, 2)


def ulysses(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    block_mask: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers over the slices of sequence ranks. [1, heads, N / P, width] each.

    DeepSpeed's exchange gives each rank some heads of the whole pack, of which the mask is.
    """
    del module, attention_mask
    whole = DistributedAttention(attend, parallel_state_sp.get_sequence_parallel_group(), 2, 1)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return whole(query, key, value, 0, mask=block_mask, scale=scaling), None


AttentionInterface.register("ulysses", ulysses)


def model_of(attention: str = "sdpa") -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=VOCABULARY, attn_implementation=attention, **sizes, **heads)
    return Qwen2ForCausalLM(config)


# ---- one process -----------------------------------------------------------------------------------


def unpacked(model: nn.Module, stored: list[dict[str, Any]], loss: dict[str, Any]) -> Weights:
    """Return the gradient of the intended mean, from one sequence at a time."""
    sums, counts = [], []
    for response in stored:
        tokens = torch.from_numpy(response["tokens"]).long()[None]
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        mask = torch.from_numpy(response["loss_mask"][1:])
        values = F.cross_entropy(logits, tokens[0, 1:], reduction="none")
        sums.append((values * mask).sum())
        counts.append(int(mask.sum()))
    normalize = loss["normalize"]
    by_member, by_group = loss.get("by") == "member", normalize == "group"
    units: dict[Any, list[int]] = {}  # the trajectories of each sequence or group
    for number, response in enumerate(stored):
        group, member = int(response["prompt"]), int(response["member"])
        unit = group if by_group else (group, member) if by_member else number
        units.setdefault(unit, []).append(number)
    means, num_units = [], 0
    for numbers in units.values():
        count = sum(counts[number] for number in numbers)
        num_units += bool(count or loss.get("count_masked"))
        total = torch.stack([sums[number] for number in numbers]).sum()
        means.append(total / (normalize["constant"] if isinstance(normalize, dict) else max(count, 1)))
    whole = torch.stack(sums).sum() / sum(counts) if normalize == "token" else sum(means) / num_units
    model.zero_grad()
    whole.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def deviation(before: Weights, after: Weights, wanted: Weights) -> float:
    """Return the largest error of an element's gradient, as part of the largest gradient.

    Less half a unit in the last place of the weight, to which an exact update is rounded.
    """
    most = 0.0
    for name, start in before.items():
        error = (start.double() - after[name].double() - wanted[name].double()).abs()
        rounding = 2.0**-24 * torch.maximum(start.abs(), after[name].abs()).double()
        most = max(most, float((error - rounding).max()))
    return most / max(float(values.abs().max()) for values in wanted.values())


# ---- ways of training ------------------------------------------------------------------------------


class EngineTrainer:
    """A DeepSpeed engine: "zero2", or "zero2 sequence 2" with slices of two sequence ranks."""

    def __init__(self, kind: str) -> None:
        groups.mpu = groups.mesh_device = None  # DeepSpeed keeps the mpu that it was given last
        mpu, attention = None, "sdpa"
        if kind.endswith("sequence 2"):
            mpu, attention = parallel_state_sp, "ulysses"
            if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
                parallel_state_sp.initialize_sequence_parallel(2)
        self.model = model_of(attention)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": int(kind.removeprefix("zero")[0]),
                "stage3_param_persistence_threshold": 0,
            },
            "data_types": {"grad_accum_dtype": "fp32"},
        }
        parameters = self.model.parameters()
        self.trained = deepspeed.initialize(
            model=self.model, model_parameters=parameters, config=config, mpu=mpu
        )[0]
        assert self.trained.zero_optimization_stage() == int(kind.removeprefix("zero")[0])
        self.place: RankCoordinates | None = place_of(self.trained)

    def weights(self) -> Weights:
        found = {}
        for name, parameter in self.model.named_parameters():
            is_part = hasattr(parameter, "ds_id")
            with deepspeed.zero.GatheredParameters([parameter], enabled=is_part):
                found[name] = parameter.detach().clone()
        return found

    def backward(self, loss: Tensor, is_last: bool) -> None:
        del is_last
        self.trained.backward(loss)

    def step(self) -> None:
        self.trained.step()

    def close(self) -> None:
        self.trained.destroy()


class ModuleTrainer:
    """A module of torch: "ddp" with no_sync, "fsdp1" and "fsdp2" with every layer a unit of its own."""

    place = None

    def __init__(self, kind: str) -> None:
        self.kind, model = kind, model_of()
        layers = model.model.layers
        if kind == "ddp":
            self.trained: Any = nn.parallel.DistributedDataParallel(model)
        elif kind == "fsdp1":
            options = {"device_id": torch.device("cpu"), "use_orig_params": True}
            for number in range(len(layers)):
                layers[number] = FullyShardedDataParallel(layers[number], **options)
            self.trained = FullyShardedDataParallel(model, **options)
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            self.trained = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.trained.parameters(), lr=1.0)

    def weights(self) -> Weights:
        if self.kind == "fsdp1":
            with FullyShardedDataParallel.summon_full_params(self.trained):
                named = list(self.trained.named_parameters())
                return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in named}
        if self.kind == "fsdp2":
            return {name: p.full_tensor().detach().clone() for name, p in self.trained.named_parameters()}
        return {name: p.detach().clone() for name, p in self.trained.module.named_parameters()}

    def backward(self, loss: Tensor, is_last: bool) -> None:
        waits = self.kind == "ddp" and not is_last
        with self.trained.no_sync() if waits else contextlib.nullcontext():
            loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        del self.trained


def nll(model: Any, micro: MicroBatch, is_slice: bool) -> Tensor:
    inputs = micro.model_inputs("sdpa")
    if is_slice:
        inputs["block_mask"] = micro.block_mask
    logits = model(**inputs).logits
    return F.cross_entropy(logits[0], micro.targets[0], reduction="none")[None]


# ---- the comparison --------------------------------------------------------------------------------


def section(loss: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return a gear section whose batch is all responses."""
    table: dict[str, Any] = {"capacity_steps": 4000, "max_length": MOST, "schema": {"columns": COLUMNS}}
    sampler, batch = {"kind": "fifo"}, {"trajectories": GROUPS * SIZE}
    if loss["normalize"] == "group" or loss.get("by") == "member":
        table["group"] = {"column": "prompt", "size": 2, "member": "member", "max_trajectories": SIZE}
        sampler, batch = {**sampler, "unit": "group"}, {"groups": GROUPS}
    return {
        "tables": {"responses": table},
        "sampler": sampler,
        "fields": {"tokens": {}},
        "pack": {"tokens": tokens, "pad": {"multiple": 8}},
        "batch": batch,
        "loss": loss,
        "shared_memory": {"prefix": prefix()},
    }


def train(trainer: Any, config: dict[str, Any], stored: list[dict[str, Any]]) -> list[int]:
    """Train one packed step; return the loss tokens of this rank's micro batches."""
    counts = []
    with Replay(config, place=trainer.place) as replay:
        if dist.get_rank() == 0:
            for response in stored:
                replay.add(response)
        dist.barrier()
        replay.gradient_divisor = gradient_divisor(trainer.trained)
        step = replay.step()
        assert step.num_trajectories == len(stored)
        is_slice = trainer.place is not None and trainer.place.sequence_world > 1
        for number, micro in enumerate(step):
            counts.append(int(micro.loss_mask.sum()))
            trainer.backward(micro.sum(nll(trainer.trained, micro, is_slice)), number == len(step) - 1)
        trainer.step()
    return counts


def compare(trainer: Any, reference: nn.Module, loss: dict[str, Any], tokens: int) -> dict[str, Any]:
    stored, before = responses(), trainer.weights()
    counts = train(trainer, section(loss, tokens), stored)
    after = trainer.weights()
    reference.load_state_dict({**reference.state_dict(), **before})
    if dist.get_rank() == 0:
        wanted = unpacked(reference, stored, loss)
        flat = torch.cat([wanted[name].flatten() for name in before])
    else:
        flat = torch.empty(sum(values.numel() for values in before.values()))
    dist.broadcast(flat, 0)
    parts = flat.split([values.numel() for values in before.values()])
    wanted = {name: part.view(before[name].shape) for name, part in zip(before, parts, strict=True)}
    return {"deviation": deviation(before, after, wanted), "counts": counts}


def outcomes(cases_of_kind: dict[str, Any]) -> dict[str, Any]:
    """Train the cases of each kind; return what this rank has found, by kind."""
    found: dict[str, Any] = {}
    reference = model_of()
    for kind, cases in cases_of_kind.items():
        began = time.perf_counter()
        trainer = (EngineTrainer if kind.startswith("zero") else ModuleTrainer)(kind)
        of_kind = [
            {"loss": loss, "tokens": tokens, **compare(trainer, reference, LOSSES[loss], tokens)}
            for loss, tokens in cases
        ]
        trainer.close()
        model, seconds = type(reference).__name__, time.perf_counter() - began
        found[kind] = {"model": model, "outcomes": of_kind, "seconds": seconds}
    return found
