"""Gradients that are measured: what frameworks divide them by, and those of packs beside one
process.
"""

import os
from typing import Any

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
LOSSES: dict[str, dict[str, Any]] = {
    "token": {"normalize": "token"},
    "sequence": {"normalize": "sequence"},
    "sequence, masked ones count": {"normalize": "sequence", "count_masked": True},
    "sequence of a member": {"normalize": "sequence", "by": "member"},
    "group": {"normalize": "group"},
    "group, masked ones count": {"normalize": "group", "count_masked": True},
    "constant": {"normalize": {"constant": 50.0}},
    "constant, masked ones count": {"normalize": {"constant": 50.0}, "count_masked": True},
}
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
