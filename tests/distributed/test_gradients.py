"""Gradients of ranks: what frameworks divide them by, and those of packs beside one process without
packs.

GEAR_LONG_TESTS=1 trains every loss with every budget.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention
from process_support import call_on_ranks
from torch import Tensor, nn
from trainers import EngineTrainer, ModuleTrainer, Weights

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.frameworks.gradient_divisor import gradient_divisor

pytest.importorskip("transformers", reason="the model of packed gradients is transformers' Qwen2")
from packed_gradients import LOSSES, attend, outcomes

BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def zero(stage: int, divisor: float | str, **options: Any) -> dict[str, Any]:
    """Return a case of a DeepSpeed engine; a combination that is refused has a name of its error as
    divisor.

    Options: `section`, of the ZeRO section; `config`, of the DeepSpeed config; `sequence`,
    `tensor`, ranks of a replica; `mesh`, as (replicas, sequence ranks); `error`, relative.
    """
    return {"kind": "deepspeed", "zero": stage, "divisor": divisor, **options}


def torch_case(kind: str, divisor: float | str, **options: Any) -> dict[str, Any]:
    """Return a case of a torch module; `options` are those of the program's function
    for the kind.
    """
    return {"kind": kind, "divisor": divisor, "options": options}


WHOLE = {"reduce_scatter": False}
SMALL = {"reduce_scatter": False, "reduce_bucket_size": 150}  # smaller than the largest parameter
CPU = {"offload_optimizer": {"device": "cpu"}}
PREDIVIDE = {"gradient_predivide_factor": 2.0}


def of_stages(name: str, divisors: dict[int, float], **options: Any) -> dict[str, dict[str, Any]]:
    """Return a case for each stage with its divisor; the stage is put into the name."""
    return {
        name.format(stage): zero(stage, divisor, **options) for stage, divisor in divisors.items()
    }


#: By world and name, beside those of KINDS. Engines of one kind follow each other: DeepSpeed keeps
#: groups in globals.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"ddp": torch_case("ddp", 1.0), "plain": torch_case("plain", 1.0)},
    2: {
        **of_stages("zero{} offload", dict.fromkeys((1, 2, 3), 2.0), section=CPU),
        **of_stages(
            "zero{} sum", dict.fromkeys((0, 1, 2), 1.0), config={"gradient_allreduce_op": "sum"}
        ),
        **of_stages(
            "zero{} predivide 2", {0: 2.0, 1: 2.0, 2: 2.0, 3: 4.0}, section=WHOLE, config=PREDIVIDE
        ),
        **of_stages(
            "zero{} prescale",
            dict.fromkeys(range(4), 2.0),
            section=WHOLE,
            config={"prescale_gradients": True},
        ),
        **of_stages(
            "zero{} accumulation 4", {0: 8.0, 3: 8.0}, config={"gradient_accumulation_steps": 4}
        ),
        **of_stages("zero{} bf16", dict.fromkeys((1, 2, 3), 2.0), config=BF16, error=0.03),
        "zero2 overlap": zero(2, 2.0, section={"overlap_comm": True}),
        "ddp": torch_case("ddp", 2.0),
        "ddp other hook": torch_case("ddp", "noop_hook", hook=True),
        "fsdp1 no shard": torch_case("fsdp1", 2.0, strategy="NO_SHARD"),
        "fsdp2 divide factor": torch_case("fsdp2", 8.0, factor=8.0),
        "fsdp2 a part": torch_case("fsdp2", "must be wrapped as a whole", whole=False),
        "ulysses zero3 all-reduce": zero(3, 1.0, sequence=2, section=WHOLE),
        "ulysses zero3 small buckets": zero(
            3, "zero_optimization.reduce_bucket_size", sequence=2, section=SMALL
        ),
        "ulysses zero2 predivide 2": zero(2, 2.0, sequence=2, section=WHOLE, config=PREDIVIDE),
        "ulysses zero1 bf16": zero(1, "zero_optimization.stage", sequence=2, config=BF16),
        "mesh zero2": zero(2, "mesh_param", mesh=(1, 2)),
        "mesh zero3": zero(3, 2.0, mesh=(1, 2)),
    },
    4: {
        "fsdp1 hybrid": torch_case("fsdp1", 4.0, strategy="HYBRID_SHARD"),
        "fsdp2 hybrid": torch_case("fsdp2", 4.0, hybrid=True),
        **of_stages("tensor zero{}", dict.fromkeys(range(4), 2.0), tensor=2),
    },
}

EVERY = os.environ.get("GEAR_LONG_TESTS") == "1"
BUDGETS = (48, 120, 400)  # tokens of a pack; the longest trajectory has 40

ALL = [(loss, tokens) for tokens in BUDGETS for loss in LOSSES]
#: Every loss once, every budget two or three times. "token" with the least budget has the most
#: packs.
SHORT = [(loss, BUDGETS[number % len(BUDGETS)]) for number, loss in enumerate(LOSSES)]

STAGES = [f"zero{stage}" for stage in range(4)]
ULYSSES = [f"{name} sequence 2" for name in STAGES]
#: By number of ranks: what each kind divides by.
KINDS: dict[int, dict[str, float]] = {
    1: dict.fromkeys(STAGES, 1.0),
    2: {
        **dict.fromkeys([*STAGES, "ddp", "fsdp1", "fsdp2"], 2.0),
        **dict(zip(ULYSSES, (1.0, 1.0, 1.0, 2.0), strict=True)),
    },
    # ULYSSES: two replicas of two sequence ranks
    4: {"zero2": 4.0, "fsdp2": 4.0, **dict(zip(ULYSSES, (2.0, 2.0, 2.0, 4.0), strict=True))},
}


def cases_of(world: int, every: bool) -> dict[str, list[tuple[str, int]]]:
    """Return the cases of each kind: all, or every fourth one of `SHORT`, those of neighbours the
    others.
    """
    return {
        kind: ALL if every else SHORT[number % 4 :: 4] for number, kind in enumerate(KINDS[world])
    }


FLOAT32 = 1e-6  # of rounding, in sums of up to 12 gradients and in the weights; eps is 1.2e-7
# Of the largest gradient: float32 sums of about 700 tokens in another order, 7e-7 at most in all
# long cases.
BOUND = 2e-6

pytestmark = pytest.mark.timeout(900)  # of the launch
Gradients = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def gradients() -> Gradients:
    """Return a function: what each rank of a world has found, in one launch for each number of
    ranks.
    """
    known: dict[int, list[dict[str, Any]]] = {}

    def found(world: int) -> list[dict[str, Any]]:
        if world not in known:
            known[world] = []  # a launch that fails is not repeated
            given = cases_of(world, EVERY), CASES[world]
            quiet = {
                "PYTHONWARNINGS": "ignore::FutureWarning"
            }  # of each of DeepSpeed's collectives
            known[world] = call_on_ranks(world, measured, *given, timeout_s=800.0, **quiet)
        assert len(known[world]) == world, "the launch failed"
        return known[world]

    return found


@pytest.mark.parametrize(
    ("world", "name"), [(world, name) for world in CASES for name in CASES[world]]
)
def test_the_sum_of_all_losses_is_trained(world: int, name: str, gradients: Gradients) -> None:
    """Each rank calls backward three times with losses of unequal numbers of weighted tokens."""
    case = CASES[world][name]
    for rank, of_rank in enumerate(gradients(world)):
        found = of_rank["divisors"][name]
        if isinstance(case["divisor"], str):
            assert case["divisor"] in found.get("refused", ""), (rank, found)
        else:
            assert found.get("divisor") == case["divisor"], (rank, found)
            assert found["error"] <= case.get("error", FLOAT32), (rank, found)


def test_every_loss_and_budget_is_among_the_cases() -> None:
    for world in KINDS:
        cases = [case for of_kind in cases_of(world, EVERY).values() for case in of_kind]
        assert {loss for loss, _ in cases} == set(LOSSES)
        assert {tokens for _, tokens in cases} == set(BUDGETS)


@pytest.mark.parametrize(
    ("world", "kind"), [(world, kind) for world in KINDS for kind in KINDS[world]]
)
def test_packed_steps_are_those_of_one_process(world: int, kind: str, gradients: Gradients) -> None:
    """Weights change by the gradient of the intended mean, so the divisor is right, too."""
    by_case = zip(*(found["packed"][kind] for found in gradients(world)), strict=True)
    for case, of_case in zip(cases_of(world, EVERY)[kind], by_case, strict=True):
        assert [(one["loss"], one["tokens"]) for one in of_case] == [case] * world
        assert {one["divisor"] for one in of_case} == {KINDS[world][kind]}
        assert all(one["deviation"] < BOUND for one in of_case), of_case
        counts = np.array([one["counts"] for one in of_case])  # [ranks, K]: equally many on each
        if case == ("token", min(BUDGETS)):
            # What each token would weigh in a mean of means of micro batches: another gradient.
            of_means = counts.sum() / (counts.size * counts[counts > 0])
            assert of_means.max() / of_means.min() > 1.2


# ---- on each rank --------------------------------------------------------------------------------

NUM_MICRO = 3  # of a rank, with unequal, weighted losses
WORDS = 11
WIDTH = 8
HEADS = 2


def measured(packed: dict[str, Any], divisors: dict[str, Any]) -> dict[str, Any]:
    """Return what this rank finds in the cases of packs, and in those of divisors."""
    torch.set_num_threads(1)
    found = outcomes(packed)
    return {"packed": found, "divisors": {name: outcome(case) for name, case in divisors.items()}}


class Model(nn.Module):
    """Token logits from tokens, [N] -> [N, WORDS]; about 750 parameters.

    Args:
        group: The sequence ranks of whose N a rank has a slice; None: it has all.
    """

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 24)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.down = nn.Linear(16, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.attention: Any = attend
        if group is not None:
            whole = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)
            self.attention = lambda *qkv: whole(*qkv, 0)  # 0: the axis of samples

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        query, key, value = self.qkv(x).view(1, len(x), 3, HEADS, WIDTH // HEADS).unbind(2)
        x = x + self.mix(self.attention(query, key, value).reshape(len(x), WIDTH))
        return self.head(x + self.down(torch.tanh(self.up(x))))


def micro_batch(
    replica: int, micro: int, part: slice = slice(None)
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and loss weights; the length differs between replicas and micro
    batches.
    """
    words = torch.Generator().manual_seed(1000 * replica + micro)
    count = 4 * (1 + (2 * replica + micro) % 3)
    tokens, targets = torch.randint(0, WORDS, (2, count), generator=words)
    return tokens[part], targets[part], torch.rand(count, generator=words)[part]


def loss_sum(
    model: Any, replica: int, micro: int, divisor: float, part: slice = slice(None)
) -> Tensor:
    """Return a micro batch's part of the summed loss."""
    tokens, targets, weights = micro_batch(replica, micro, part)
    losses = nn.functional.cross_entropy(model(tokens).float(), targets, reduction="none")
    return (losses * weights).sum() * divisor


def wanted_gradients(replicas: int, dtype: torch.dtype) -> Weights:
    """Return the gradient of the sum of all losses, by one process. The summands are added in
    float64.
    """
    model = Model().to(dtype)
    sums = {
        name: torch.zeros_like(one, dtype=torch.float64) for name, one in model.named_parameters()
    }
    for replica in range(replicas):
        for micro in range(NUM_MICRO):
            model.zero_grad()
            loss_sum(model, replica, micro, 1.0).backward()
            for name, parameter in model.named_parameters():
                sums[name] += parameter.grad.double()
    return sums


def largest_error(before: Weights, after: Weights, wanted: Weights) -> float:
    """Return the largest error of a change by SGD with rate 1, as part of a parameter's largest
    gradient.
    """
    assert before.keys() == wanted.keys()
    errors = {
        name: float(
            (start.double() - after[name].double() - wanted[name]).abs().max()
            / wanted[name].abs().max()
        )
        for name, start in before.items()
    }
    return max(errors.values())


def tensor_slice(name: str, whole: Tensor, own: Tensor, rank: int, world: int) -> Tensor:
    """Return the part of a gradient that a tensor rank has."""
    if whole.shape == own.shape:
        return whole
    axis = 1 if name.startswith("down") else 0
    return whole.chunk(world, axis)[rank]


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    """Train one step; return its divisor, and the largest error of its weights; or the refusal."""
    trainer: Any
    if case["kind"] == "deepspeed":
        trainer = EngineTrainer(Model, case)
    else:
        trainer = ModuleTrainer(Model, ("", ["up"]), case["kind"], **case["options"])
    try:
        divisor = gradient_divisor(trainer.trained)
        before = trainer.weights()
        sequence = case.get("sequence", 1) * case.get("mesh", [1, 1])[1]
        tensor = case.get("tensor", 1)
        replica, place = divmod(dist.get_rank(), sequence * tensor)
        for micro in range(NUM_MICRO):
            count = len(micro_batch(replica, micro)[0]) // sequence
            part = slice(place * count, (place + 1) * count) if sequence > 1 else slice(None)
            given = trainer.trained, replica, micro, divisor, part
            trainer.backward(lambda given=given: loss_sum(*given), micro == NUM_MICRO - 1)
        trainer.step()
        dtype = next(iter(before.values())).dtype
        wanted = wanted_gradients(dist.get_world_size() // (sequence * tensor), dtype)
        wanted = {
            name: tensor_slice(name, one, before[name], place, tensor)
            for name, one in wanted.items()
        }
        return {"divisor": divisor, "error": largest_error(before, trainer.weights(), wanted)}
    except ConfigError as error:
        return {"refused": str(error)}
    finally:
        trainer.close()
