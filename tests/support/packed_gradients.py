"""The gradient of packed micro batches of a tiny Qwen2 on many ranks, beside that of one process.

The cases of each kind are pairs of a loss and a budget. The change of the weights by SGD with a
rate of 1 is the gradient. The first rank computes the gradient of one process from one sequence at
a time; every rank compares its weights with it.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from gear_support import prefix
from torch import Tensor, nn
from trainers import EngineTrainer, ModuleTrainer, Weights
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM

from deepspeed_gear import MicroBatch, Replay, Rollout
from deepspeed_gear.errors import PeerError
from deepspeed_gear.frameworks.engine_place import place_of
from deepspeed_gear.frameworks.gradient_divisor import gradient_divisor
from deepspeed_gear.replay.packed.rollout import TrainStep

VOCABULARY = 50
WIDTH = 16
MOST = 40
GROUPS = 10
SIZE = 4
#: Options of `gear.loss`. With "narrowed" the program takes tokens out of the loss mask.
LOSSES: dict[str, dict[str, Any]] = {
    "token": {"normalize": "token"},
    "sequence": {"normalize": "sequence", "narrowed": True},
    "sequence, masked ones count": {"normalize": "sequence", "count_masked": True},
    "sequence of a member": {"normalize": "sequence", "by": "member", "narrowed": True},
    "group": {"normalize": "group"},
    "group, masked ones count": {"normalize": "group", "count_masked": True, "narrowed": True},
    "constant": {"normalize": {"constant": 50.0}},
    "constant, masked ones count": {"normalize": {"constant": 50.0}, "count_masked": True},
    "groups and supervised": {"normalize": "token", "mixture": True},
    "groups and supervised, by table": {
        "normalize": "group",
        "narrowed": True,
        "mixture": True,
        "by_table": {"responses": 0.75, "supervised": {"weight": 0.5, "normalize": "token"}},
    },
    "groups of members and supervised, by table": {
        "normalize": "sequence",
        "by": "member",
        "mixture": True,
        "by_table": {"responses": 2.0, "supervised": 0.25},
    },
}
#: Options of the program in LOSSES, and not of `gear.loss`.
OF_PROGRAM = ("narrowed", "mixture")
IN_GROUPS = 6  # groups of a mixture that stay groups; the others are supervised trajectories
COLUMNS = {
    "tokens": {"dtype": "uint8", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "prompt": {"dtype": "int64", "rows": "1"},
    "member": {"dtype": "int64", "rows": "1"},
    "advantage": {"dtype": "float32"},
}
SUPERVISED = {
    "tokens": COLUMNS["tokens"],
    "loss_mask": COLUMNS["loss_mask"],
    "scale": {"dtype": "float32"},
}


def responses() -> list[dict[str, Any]]:
    """Return groups of four trajectories of two members; some and one whole group are masked.

    In the even groups three have a prompt of 12 tokens, or less where they are shorter.
    """
    words = np.random.default_rng(5)
    found = []
    for number in range(GROUPS * SIZE):
        length = int(words.integers(2, MOST + 1))
        prompt = int(words.integers(0, length + 1))
        group = number // SIZE
        member = number % SIZE // 2
        is_shared = group % 2 == 0 and number % SIZE < 3
        if is_shared:
            prompt = min(12, length)
        if number % 7 == 0 or group == 3:
            prompt = length
        tokens = words.integers(1, VOCABULARY, length).astype(np.uint8)
        if is_shared:
            tokens[:prompt] = group + np.arange(prompt)
        own = {"prompt": np.int64(group), "member": np.int64(member)}
        own |= {name: words.random(length, np.float32) for name in ("advantage", "scale")}
        found.append({"tokens": tokens, "loss_mask": np.arange(length) >= prompt, **own})
    return found


def is_supervised(response: dict[str, Any], loss: dict[str, Any]) -> bool:
    return bool(loss.get("mixture")) and response["prompt"] >= IN_GROUPS


def kept(number: int, length: int) -> np.ndarray:
    """Return which tokens of a response stay when a loss is narrowed: none of some. [length]."""
    return (np.arange(length) + number) % 3 < number % 4


# ---- the model -----------------------------------------------------------------------------------


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend where a mask is True, or everywhere. [1, N, heads, width] each."""
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


def model_of(group: Any = None) -> Any:
    """Return the model; with a group of sequence ranks, for their slices."""
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        attn_implementation="sdpa" if group is None else "ulysses",
        **sizes,
        **heads,
    )
    return Qwen2ForCausalLM(config)


# ---- one process ---------------------------------------------------------------------------------


def unpacked(model: nn.Module, stored: list[dict[str, Any]], loss: dict[str, Any]) -> Weights:
    """Return the gradient of the intended mean, from one sequence at a time."""
    sums = []
    counts = []
    for number, response in enumerate(stored):
        tokens = torch.from_numpy(response["tokens"]).long()[None]
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        counted = response["loss_mask"]
        if loss.get("narrowed"):
            counted = counted & kept(number, len(counted))
        mask = torch.from_numpy(counted[1:])
        values = F.cross_entropy(logits, tokens[0, 1:], reduction="none")
        if loss.get("mixture"):
            column = "scale" if is_supervised(response, loss) else "advantage"
            values = values * torch.from_numpy(response[column][1:])
        sums.append((values * mask).sum())
        counts.append(int(mask.sum()))

    def mean(chosen: list[int], normalize: Any) -> Tensor:
        return mean_of(stored, loss, normalize, {n: (sums[n], counts[n]) for n in chosen})

    every = list(range(len(stored)))
    supervised = [n for n in every if is_supervised(stored[n], loss)]
    tables = {"responses": [n for n in every if n not in supervised], "supervised": supervised}
    whole = torch.zeros(())
    for name, part in loss.get("by_table", {}).items():
        options = part if isinstance(part, dict) else {"weight": part}
        normalize = options.get("normalize", loss["normalize"])
        whole = whole + options["weight"] * mean(tables[name], normalize)
    if "by_table" not in loss:
        whole = mean(every, loss["normalize"])
    model.zero_grad()
    whole.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mean_of(
    stored: list[dict[str, Any]],
    loss: dict[str, Any],
    normalize: Any,
    values: dict[int, tuple[Tensor, int]],
) -> Tensor:
    """Return the intended mean over trajectories, from the sum and count of each one's loss."""
    by_member = loss.get("by") == "member"
    by_group = normalize == "group"
    sums = {number: one[0] for number, one in values.items()}
    counts = {number: one[1] for number, one in values.items()}
    units: dict[Any, list[int]] = {}  # the trajectories of each sequence or group
    for number in values:
        response = stored[number]
        group = int(response["prompt"])
        member = int(response["member"])
        unit = group if by_group else (group, member) if by_member else number
        # A supervised trajectory is a sequence and a group of its own.
        unit = number if is_supervised(response, loss) else unit
        units.setdefault(unit, []).append(number)
    means = []
    num_units = 0
    for numbers in units.values():
        count = sum(counts[number] for number in numbers)
        num_units += bool(count or loss.get("count_masked"))
        total = torch.stack([sums[number] for number in numbers]).sum()
        means.append(
            total / (normalize["constant"] if isinstance(normalize, dict) else max(count, 1))
        )
    if normalize == "token":
        return torch.stack(list(sums.values())).sum() / sum(counts.values())
    return torch.stack(means).sum() / num_units


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


# ---- the comparison ------------------------------------------------------------------------------


def nll(model: Any, micro: MicroBatch, is_slice: bool) -> Tensor:
    inputs = micro.model_inputs("sdpa")
    if is_slice:
        inputs["block_mask"] = micro.block_mask
    logits = model(**inputs).logits
    values = F.cross_entropy(logits[0], micro.targets[0], reduction="none")[None]
    if "scale" in micro:  # a mixture, each of whose tables lacks one of the columns
        values = values * micro["advantage"] * micro["scale"]
    return values


def section(loss: dict[str, Any], tokens: int, is_slice: bool) -> dict[str, Any]:
    """Return a gear section whose batch is all responses; groups share prompts but on sequence
    ranks.
    """
    table: dict[str, Any] = {
        "capacity_steps": 4000,
        "max_length": MOST,
        "schema": {"columns": COLUMNS},
    }
    sampler = {"kind": "fifo"}
    size = {"trajectories": GROUPS * SIZE}
    is_mixture = loss.get("mixture", False)
    if loss["normalize"] == "group" or loss.get("by") == "member" or is_mixture:
        table["group"] = {
            "column": "prompt",
            "size": 2,
            "member": "member",
            "max_trajectories": SIZE,
        }
        sampler, size = {**sampler, "unit": "group"}, {"groups": GROUPS}
    tables = {"responses": table}
    fields: dict[str, Any] = {"tokens": {}}
    given: dict[str, Any] = {"kind": "fifo", **sampler}
    if is_mixture:
        plain = {name: value for name, value in table.items() if name != "group"}
        tables["supervised"] = {**plain, "schema": {"columns": SUPERVISED}}
        alone = (GROUPS - IN_GROUPS) * SIZE
        size = {"groups": IN_GROUPS + alone}
        shares = {"responses": IN_GROUPS / (IN_GROUPS + alone)}
        shares["supervised"] = 1 - shares["responses"]
        by_table = {"supervised": {"kind": "epoch", "unit": "trajectory"}}
        given = {"kind": "mixture", "shares": shares, "of": sampler, "by_table": by_table}
        fields |= {"advantage": {"absent": 1}, "scale": {"absent": 1}}
    pack = {"tokens": tokens, "pad": {"multiple": 8}}
    if "group" in table and not is_slice:
        pack["prefix"] = "share"
    return {
        "tables": tables,
        "sampler": given,
        "fields": fields,
        "pack": pack,
        "rollout" if loss.get("narrowed") else "batch": size,
        "loss": {option: value for option, value in loss.items() if option not in OF_PROGRAM},
        "shared_memory": {"prefix": prefix()},
    }


def trainer_of(kind: str) -> EngineTrainer | ModuleTrainer:
    """Return the trainer of a kind, such as "zero2", "zero2 sequence 2" or "ddp"."""
    if not kind.startswith("zero"):
        return ModuleTrainer(model_of, ("model.layers", ["0", "1"]), kind, no_sync=kind == "ddp")
    sequence = 2 if kind.endswith("sequence 2") else 1
    config = {"data_types": {"grad_accum_dtype": "fp32"}}
    return EngineTrainer(model_of, {"zero": int(kind[4]), "sequence": sequence, "config": config})


def narrowed_step(rollout: Rollout) -> TrainStep:
    """Take tokens out of the loss mask of a rollout batch; return its step."""
    places = []
    # Ids count by table: the supervised trajectories come after those of groups.
    first = torch.tensor([0, IN_GROUPS * SIZE])[rollout.table[rollout.group]]
    numbers = (rollout.trajectory_id + first).tolist()
    for number, length in zip(numbers, rollout.lengths.tolist(), strict=True):
        places.append(np.append(kept(number, length)[1:], False))  # at predicting places
    if dist.get_world_size() > 1:  # refused on all ranks, and nothing changes
        with pytest.raises(PeerError, match=r"rollout\.mask: keep"):
            rollout.mask(np.full(rollout.num_tokens, dist.get_rank() == 0))
    rollout.mask(np.concatenate(places))
    return rollout.step(0)


def train(
    trainer: Any, divisor: float, loss: dict[str, Any], tokens: int, stored: list[dict[str, Any]]
) -> list[int]:
    """Train one packed step; return the loss tokens of this rank's micro batches."""
    counts = []
    place = place_of(trainer.trained) if isinstance(trainer, EngineTrainer) else None
    is_slice = place is not None and place.sequence_world > 1
    config = section(loss, tokens, is_slice)
    with Replay(config, place=place) as replay:
        if dist.get_rank() == 0:
            for response in stored:
                table = "supervised" if is_supervised(response, loss) else "responses"
                columns = replay.tables[table].schema.names
                replay.add({name: response[name] for name in columns}, table=table)
        dist.barrier()
        replay.gradient_divisor = divisor
        step = narrowed_step(replay.rollout()) if loss.get("narrowed") else replay.step()
        assert step.num_trajectories == len(stored)
        assert (step.shared_tokens > 0) == ("prefix" in config["pack"])
        for number, micro in enumerate(step):
            counts.append(int(micro.loss_mask.sum()))

            def value(micro: MicroBatch = micro) -> Tensor:
                return micro.sum(nll(trainer.trained, micro, is_slice))

            trainer.backward(value, number == len(step) - 1)
        trainer.step()
    return counts


def compare(
    trainer: Any, reference: nn.Module, loss: dict[str, Any], tokens: int
) -> dict[str, Any]:
    stored = responses()
    before = trainer.weights()
    divisor = gradient_divisor(trainer.trained)
    counts = train(trainer, divisor, loss, tokens, stored)
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
    return {"deviation": deviation(before, after, wanted), "counts": counts, "divisor": divisor}


def outcomes(cases_of_kind: dict[str, Any]) -> dict[str, Any]:
    """Train the cases of each kind; return what this rank has found, by kind."""
    found: dict[str, Any] = {}
    reference = model_of()
    for kind, cases in cases_of_kind.items():
        trainer = trainer_of(kind)
        found[kind] = [
            {"loss": loss, "tokens": tokens, **compare(trainer, reference, LOSSES[loss], tokens)}
            for loss, tokens in cases
        ]
        trainer.close()
    return found
