"""Frameworks and settings whose gradient divisor is measured: what each divides by, as a number."""

from __future__ import annotations

from typing import Any

BF16 = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def zero(stage: int, divisor: float | str, **options: Any) -> dict[str, Any]:
    """Return a case of a DeepSpeed engine.

    Args:
        stage: Of ZeRO.
        divisor: What it divides by; a name in the error of a combination that is refused.
        **options: `section`, of the ZeRO section; `config`, of the DeepSpeed config; `sequence`, `tensor`,
            ranks of a replica; `mesh`, as (replicas, sequence ranks); `error`, relative.
    """
    return {"kind": "deepspeed", "zero": stage, "divisor": divisor, **options}


def torch_case(kind: str, divisor: float | str, **options: Any) -> dict[str, Any]:
    """Return a case of a torch module; `options` are those of the program's function for the kind."""
    return {"kind": kind, "divisor": divisor, "options": options}


WHOLE = {"reduce_scatter": False}
SMALL = {"reduce_scatter": False, "reduce_bucket_size": 150}  # smaller than the largest parameter
CPU = {"offload_optimizer": {"device": "cpu"}}

#: By world and name. DeepSpeed keeps an engine's groups in globals, so those of one kind follow each other.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        **{f"zero{stage}": zero(stage, 1.0) for stage in range(4)},
        "ddp": torch_case("ddp", 1.0),
        "plain": torch_case("plain", 1.0),
    },
    2: {
        **{f"zero{stage}": zero(stage, 2.0) for stage in range(4)},
        **{f"zero{stage} offload": zero(stage, 2.0, section=CPU) for stage in (1, 2, 3)},
        **{
            f"zero{stage} sum": zero(stage, 1.0, config={"gradient_allreduce_op": "sum"})
            for stage in (0, 1, 2)
        },
        **{
            f"zero{stage} predivide 2": zero(
                stage, divisor, section=WHOLE, config={"gradient_predivide_factor": 2.0}
            )
            for stage, divisor in ((0, 2.0), (1, 2.0), (2, 2.0), (3, 4.0))
        },
        **{
            f"zero{stage} prescale": zero(stage, 2.0, section=WHOLE, config={"prescale_gradients": True})
            for stage in range(4)
        },
        **{
            f"zero{stage} accumulation 4": zero(stage, 8.0, config={"gradient_accumulation_steps": 4})
            for stage in (0, 3)
        },
        **{f"zero{stage} bf16": zero(stage, 2.0, config=BF16, error=0.03) for stage in (1, 2, 3)},
        "zero2 overlap": zero(2, 2.0, section={"overlap_comm": True}),
        "ddp": torch_case("ddp", 2.0),
        "ddp no_sync": torch_case("ddp", 2.0, no_sync=True),
        "ddp other hook": torch_case("ddp", "noop_hook", hook=True),
        "fsdp1": torch_case("fsdp1", 2.0, strategy="FULL_SHARD"),
        "fsdp1 no shard": torch_case("fsdp1", 2.0, strategy="NO_SHARD"),
        "fsdp2": torch_case("fsdp2", 2.0),
        "fsdp2 divide factor": torch_case("fsdp2", 8.0, factor=8.0),
        "fsdp2 a part": torch_case("fsdp2", "must be wrapped as a whole", whole=False),
        **{
            f"ulysses zero{stage}": zero(stage, divisor, sequence=2)
            for stage, divisor in enumerate((1.0, 1.0, 1.0, 2.0))
        },
        "ulysses zero3 all-reduce": zero(3, 1.0, sequence=2, section=WHOLE),
        "ulysses zero3 small buckets": zero(
            3, "zero_optimization.reduce_bucket_size", sequence=2, section=SMALL
        ),
        "ulysses zero2 predivide 2": zero(
            2, 2.0, sequence=2, section=WHOLE, config={"gradient_predivide_factor": 2.0}
        ),
        "ulysses zero1 bf16": zero(1, "zero_optimization.stage", sequence=2, config=BF16),
        "mesh zero2": zero(2, "mesh_param", mesh=(1, 2)),
        "mesh zero3": zero(3, 2.0, mesh=(1, 2)),
    },
    4: {
        **{f"zero{stage}": zero(stage, 4.0) for stage in range(4)},
        "fsdp1 hybrid": torch_case("fsdp1", 4.0, strategy="HYBRID_SHARD"),
        "fsdp2 hybrid": torch_case("fsdp2", 4.0, hybrid=True),
        **{
            f"ulysses zero{stage}": zero(stage, divisor, sequence=2)
            for stage, divisor in enumerate((2.0, 2.0, 2.0, 4.0))
        },
        **{f"tensor zero{stage}": zero(stage, 2.0, tensor=2) for stage in (0, 1, 2, 3)},
    },
}
