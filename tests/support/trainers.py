"""Frameworks that train a model on many ranks, behind the same methods; a step is one of SGD with
rate 1.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard

SPLIT = {"use_default_specs": False, "layer_specs": [
    {"patterns": [".*up.weight$"], "partition_type": "column"},
    {"patterns": [".*down.weight$"], "partition_type": "row"},
]}  # fmt: skip
Weights = dict[str, Tensor]


class EngineTrainer:
    """A DeepSpeed engine.

    Args:
        model_of: Makes a model; with a group of sequence ranks, one whose attention is over their
            slices.
        case: Of `zero` in tests/distributed/test_gradients.py.
    """

    def __init__(self, model_of: Callable[[Any], Any], case: dict[str, Any]) -> None:
        # As in a process of its own: DeepSpeed keeps the mpu and the mesh that it was given last.
        groups.mpu = groups.mesh_device = None
        section = {
            "stage": case["zero"],
            "stage3_param_persistence_threshold": 0,
            **case.get("section", {}),
        }
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
            # one replica
            options["mesh_param"] = tuple(case["mesh"])
            group = dist.group.WORLD
        if case.get("tensor", 1) > 1:
            config["tensor_parallel"] = {"autotp_size": case["tensor"], "partition_config": SPLIT}
        model = model_of(group)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        self.trained = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, **options
        )[0]
        assert self.trained.zero_optimization_stage() == case["zero"]

    def weights(self) -> Weights:
        """Return the weights, those that ZeRO-3 has partitioned whole."""
        found = {}
        for name, parameter in self.trained.module.named_parameters():
            is_part = hasattr(parameter, "ds_id")
            with deepspeed.zero.GatheredParameters([parameter], enabled=is_part):
                found[name] = parameter.detach().clone()
        return found

    def backward(self, loss: Callable[[], Tensor], is_last: bool) -> None:
        del is_last
        self.trained.backward(loss())

    def step(self) -> None:
        self.trained.step()

    def close(self) -> None:
        self.trained.destroy()


class ModuleTrainer:
    """A module of torch: "plain", "ddp", "fsdp1" or "fsdp2".

    Args:
        model_of: As of EngineTrainer.
        parts: The name of a module in the model, and names in it: they are units of FSDP of their
            own.
        kind: One of those.
        **options: "ddp": `no_sync`, `hook`; "fsdp1": `strategy`; "fsdp2": `factor`, `hybrid`,
            `whole`.
    """

    def __init__(
        self,
        model_of: Callable[[Any], Any],
        parts: tuple[str, list[str]],
        kind: str,
        **options: Any,
    ) -> None:
        self.kind = kind
        model = model_of(None)
        self.trained: Any = model
        self._syncs_once = options.get("no_sync", False)
        parent = model.get_submodule(parts[0])
        names = parts[1]
        if kind == "ddp":
            self.trained = nn.parallel.DistributedDataParallel(model)
            if options.get("hook"):
                self.trained.register_comm_hook(None, noop_hook)
        elif kind == "fsdp1":
            strategy = options.get("strategy", "FULL_SHARD")
            shard = functools.partial(
                FullyShardedDataParallel,
                sharding_strategy=ShardingStrategy[strategy],
                device_id=torch.device("cpu"),
                device_mesh=init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None,
                use_orig_params=True,
            )
            for name in names:
                setattr(parent, name, shard(getattr(parent, name)))
            self.trained = shard(model)
        elif kind == "fsdp2":
            shape = (dist.get_world_size(),)
            axes = ("shard",)
            if options.get("hybrid"):
                shape = (2, 2)
                axes = ("replicate", "shard")
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
            units = [getattr(parent, name) for name in names]
            for unit in [*units, model] if options.get("whole", True) else units:
                wrapped: Any = fully_shard(unit, mesh=mesh)
                if "factor" in options:
                    wrapped.set_gradient_divide_factor(options["factor"])
                    wrapped.set_force_sum_reduction_for_comms(
                        True
                    )  # gloo cannot scale while it sums
        self._optimizer = torch.optim.SGD(self.trained.parameters(), lr=1.0)

    def weights(self) -> Weights:
        if self.kind == "fsdp1":
            with FullyShardedDataParallel.summon_full_params(self.trained):
                named = list(self.trained.named_parameters())
                return {
                    name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                    for name, p in named
                }
        if self.kind == "fsdp2":
            return {
                name: p.full_tensor().detach().clone()
                for name, p in self.trained.named_parameters()
            }
        module = self.trained.module if self.kind == "ddp" else self.trained
        return {name: p.detach().clone() for name, p in module.named_parameters()}

    def backward(self, loss: Callable[[], Tensor], is_last: bool) -> None:
        waits = self._syncs_once and not is_last
        with self.trained.no_sync() if waits else contextlib.nullcontext():
            loss().backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        del self.trained
