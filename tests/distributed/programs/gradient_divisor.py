"""Train one step in each framework with unequal, weighted losses; compare the weights with one process.

Of each case (tests/support/gradient_cases.py): the divisor and the largest error relative to the largest
gradient of its parameter, or the refusal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.sequence.layer import DistributedAttention
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from deepspeed_gear.distributed.gradient_divisor import gradient_divisor
from deepspeed_gear.errors import ConfigError

NUM_MICRO = 3
WORDS, WIDTH, HEADS = 11, 8, 2
SPLIT = {"use_default_specs": False, "layer_specs": [
    {"patterns": [".*up.weight$"], "partition_type": "column"},
    {"patterns": [".*down.weight$"], "partition_type": "row"},
]}  # fmt: skip


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to all places. [1, N, heads, width] each."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def ulysses(group: Any) -> Any:
    """Return an attention over the slices of sequence ranks."""
    attention = DistributedAttention(attend, group, scatter_idx=2, gather_idx=1)
    return lambda *qkv: attention(*qkv, 0)  # 0: the axis of samples


class Model(nn.Module):
    """Token logits from tokens, [N] -> [N, WORDS]; about 750 parameters.

    Args:
        attention: Of [1, N, heads, width]; over sequence ranks, N is their slice.
    """

    def __init__(self, attention: Any = attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.mix = (
            nn.Embedding(WORDS, WIDTH),
            nn.Linear(WIDTH, 24),
            nn.Linear(WIDTH, WIDTH),
        )
        self.up, self.down, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, WORDS)
        self.attention = attention

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        query, key, value = self.qkv(x).view(1, len(x), 3, HEADS, WIDTH // HEADS).unbind(2)
        x = x + self.mix(self.attention(query, key, value).reshape(len(x), WIDTH))
        return self.head(x + self.down(torch.tanh(self.up(x))))


def micro_batch(replica: int, micro: int, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, targets and loss weights; the length differs between replicas and micro batches."""
    words = torch.Generator().manual_seed(1000 * replica + micro)
    count = 4 * (1 + (2 * replica + micro) % 3)
    tokens, targets = torch.randint(0, WORDS, (2, count), generator=words)
    return tokens[part], targets[part], torch.rand(count, generator=words)[part]


def loss_sum(model: Any, replica: int, micro: int, divisor: float, part: slice = slice(None)) -> Tensor:
    """Return a micro batch's part of the summed loss."""
    tokens, targets, weights = micro_batch(replica, micro, part)
    losses = nn.functional.cross_entropy(model(tokens).float(), targets, reduction="none")
    return (losses * weights).sum() * divisor


def wanted_gradients(replicas: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradient of the sum of all losses, by one process. The summands are added in float64."""
    model = Model().to(dtype)
    sums = {name: torch.zeros_like(one, dtype=torch.float64) for name, one in model.named_parameters()}
    for replica in range(replicas):
        for micro in range(NUM_MICRO):
            model.zero_grad()
            loss_sum(model, replica, micro, 1.0).backward()
            for name, parameter in model.named_parameters():
                sums[name] += parameter.grad.double()
    return sums


def largest_error(before: dict[str, Tensor], after: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Return the largest error of a change by SGD with rate 1, as part of a parameter's largest gradient."""
    assert before.keys() == wanted.keys()
    errors = {
        name: float(
            (start.double() - after[name].double() - wanted[name]).abs().max() / wanted[name].abs().max()
        )
        for name, start in before.items()
    }
    return max(errors.values())


# ---- DeepSpeed -------------------------------------------------------------------------------------


def engine_of(case: dict[str, Any]) -> Any:
    # As in a process of its own: DeepSpeed keeps the mpu and the mesh that it was given last.
    groups.mpu = groups.mesh_device = None
    section = {"stage": case["zero"], "stage3_param_persistence_threshold": 0, **case.get("section", {})}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": section,
        **case.get("config", {}),
    }
    options: dict[str, Any] = {}
    group = None
    if case.get("sequence", 1) > 1:
        if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
            parallel_state_sp.initialize_sequence_parallel(case["sequence"])
        options["mpu"] = parallel_state_sp
        group = parallel_state_sp.get_sequence_parallel_group()
    if "mesh" in case:
        options["mesh_param"], group = tuple(case["mesh"]), dist.group.WORLD  # one replica
    if case.get("tensor", 1) > 1:
        config["tensor_parallel"] = {"autotp_size": case["tensor"], "partition_config": SPLIT}
    model = Model() if group is None else Model(ulysses(group))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, **options)[0]


def weights_of(engine: Any) -> dict[str, Tensor]:
    """Return the weights, those that ZeRO-3 has partitioned whole."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        whole = deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id"))
        with whole:
            found[name] = parameter.detach().clone()
    return found


def tensor_slice(name: str, whole: Tensor, own: Tensor, rank: int, world: int) -> Tensor:
    """Return the part of a gradient that a tensor rank has."""
    if whole.shape == own.shape:
        return whole
    axis = 1 if name.startswith("down") else 0
    return whole.chunk(world, axis)[rank]


def with_deepspeed(case: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(case)
    try:
        divisor = gradient_divisor(engine)
        sequence, tensor = case.get("sequence", 1) * case.get("mesh", [1, 1])[1], case.get("tensor", 1)
        rank, world = dist.get_rank(), dist.get_world_size()
        replica, place = divmod(rank, sequence * tensor)
        before = weights_of(engine)
        for micro in range(NUM_MICRO):
            count = len(micro_batch(replica, micro)[0]) // sequence
            part = slice(place * count, (place + 1) * count) if sequence > 1 else slice(None)
            engine.backward(loss_sum(engine, replica, micro, divisor, part))
        engine.step()
        after = weights_of(engine)
        dtype = next(engine.module.parameters()).dtype
        wanted = wanted_gradients(world // (sequence * tensor), dtype)
        wanted = {name: tensor_slice(name, one, before[name], place, tensor) for name, one in wanted.items()}
        return {"divisor": divisor, "error": largest_error(before, after, wanted)}
    finally:
        engine.destroy()


# ---- torch -----------------------------------------------------------------------------------------


def train_module(module: Any, sync: Any = None) -> dict[str, Any]:
    """Train one step; return the divisor. `sync(last)` is the context of a micro batch."""
    divisor, rank = gradient_divisor(module), dist.get_rank()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for micro in range(NUM_MICRO):
        with contextlib.nullcontext() if sync is None else sync(micro == NUM_MICRO - 1):
            loss_sum(module, rank, micro, divisor).backward()
    optimizer.step()
    return {"divisor": divisor}


def outcome(trained: dict[str, Any], after: dict[str, Tensor]) -> dict[str, Any]:
    before = {name: one.detach().clone() for name, one in Model().named_parameters()}
    wanted = wanted_gradients(dist.get_world_size(), torch.float32)
    return {**trained, "error": largest_error(before, after, wanted)}


def with_plain() -> dict[str, Any]:
    module = Model()
    trained = train_module(module)
    return outcome(trained, {name: one.detach() for name, one in module.named_parameters()})


def with_ddp(no_sync: bool = False, hook: bool = False) -> dict[str, Any]:
    module = DistributedDataParallel(Model())
    if hook:
        module.register_comm_hook(None, noop_hook)
    sync = (lambda last: contextlib.nullcontext() if last else module.no_sync()) if no_sync else None
    trained = train_module(module, sync)
    return outcome(trained, {name: one.detach() for name, one in module.module.named_parameters()})


def with_fsdp1(strategy: str) -> dict[str, Any]:
    kind, cpu = ShardingStrategy[strategy], torch.device("cpu")
    mesh = init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None
    options = {"sharding_strategy": kind, "device_id": cpu, "device_mesh": mesh, "use_orig_params": True}
    module = Model()
    module.up = FullyShardedDataParallel(module.up, **options)
    whole = FullyShardedDataParallel(module, **options)
    trained = train_module(whole)
    with FullyShardedDataParallel.summon_full_params(whole):
        named = whole.named_parameters()
        after = {name.replace("_fsdp_wrapped_module.", ""): one.detach().clone() for name, one in named}
    return outcome(trained, after)


def with_fsdp2(factor: float | None = None, hybrid: bool = False, whole: bool = True) -> dict[str, Any]:
    shape, names = ((2, 2), ("replicate", "shard")) if hybrid else ((dist.get_world_size(),), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    module = Model()
    for part in (module.up, module) if whole else (module.up,):
        wrapped: Any = fully_shard(part, mesh=mesh)
        if factor is not None:
            wrapped.set_gradient_divide_factor(factor)
            wrapped.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    trained = train_module(module)
    return outcome(trained, {name: one.full_tensor().detach() for name, one in module.named_parameters()})


KINDS = {"plain": with_plain, "ddp": with_ddp, "fsdp1": with_fsdp1, "fsdp2": with_fsdp2}


def outcomes(cases: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, case in cases.items():
        try:
            if case["kind"] == "deepspeed":
                yield name, with_deepspeed(case)
            else:
                yield name, KINDS[case["kind"]](**case["options"])
        except ConfigError as error:
            yield name, {"refused": str(error)}
