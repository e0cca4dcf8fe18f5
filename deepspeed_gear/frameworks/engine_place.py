"""Place of a rank in an engine: replica, tensor, sequence, pipeline rank; when ranks wait.

Also of an engine beside another one. When ranks wait for each other follows from their places.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from deepspeed.utils import groups
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)

from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.sampling.batch_sizes import Turns

PIPELINE = "PipelineEngine"  # engines of a subclass have schedules of their own


def is_pipeline(engine: Any) -> bool:
    return type(engine).__name__ == PIPELINE


def place_of(engine: Any) -> RankCoordinates:
    """Return the coordinates of this rank of an engine.

    An engine without mpu or mesh gets the last one from a module's globals: such an engine is the
    same whole model on all ranks of the other engine's replica.

    Raises:
        ConfigError: The engine's own number of replicas differs from that of its groups.
    """
    if is_pipeline(engine):
        grid = engine.grid
        return RankCoordinates(
            data_rank=grid.get_data_parallel_rank(),
            data_world=grid.get_data_parallel_world_size(),
            tensor_rank=grid.get_slice_parallel_rank(),
            tensor_world=grid.get_slice_parallel_world_size(),
            pipe_rank=grid.get_pipe_parallel_rank(),
            pipe_world=grid.get_pipe_parallel_world_size(),
        )
    mpu = groups.mpu if engine.mpu is None else engine.mpu
    mesh = groups.mesh_device if engine.mesh_device is None else engine.mesh_device
    place = _place_in(mpu, mesh, inherited=engine.mpu is None)
    if engine.autotp_size() > 1:
        given = engine.tensor_parallel_config().tensor_parallel.tp_group
        known = groups.get_tensor_model_parallel_group()
        ranks = None if given is None or given is known else dist.get_process_group_ranks(given)
        if ranks not in (None, wanted := dist.get_process_group_ranks(known)):
            rule = f"must be the tensor group of DeepSpeed's own groups ({wanted})"
            raise ConfigError("tp_group", rule, ranks, "leave it out")
    if engine.dp_world_size not in (None, place.data_world):
        rule = f"must have as many replicas as its process groups have ({place.data_world})"
        remedy = "give initialize the mpu or mesh_param that the model was built for"
        raise ConfigError("engine", rule, engine.dp_world_size, remedy)
    return place


def turns_of(engine: Any) -> Turns:
    """Return when the ranks of an engine wait for each other.

    After each micro batch, after the last one of a global batch, or before a pipeline's schedule.
    """
    if is_pipeline(engine):
        return "schedule"
    place = place_of(engine)
    alone = place.worlds == (1, place.data_world, 1, 1)
    return "global" if alone and engine.zero_optimization_stage() <= 1 else "micro"


def _place_in(mpu: Any, mesh: Any, inherited: bool) -> RankCoordinates:
    """Return the coordinates of this rank by an mpu, a mesh, both or none.

    With `inherited` they are those of an engine that has neither: a whole model on each rank,
    beside the stages of the engine that the mpu belongs to.
    """
    place = RankCoordinates(data_rank=dist.get_rank(), data_world=dist.get_world_size())
    if mesh is not None:
        data = mesh.get_group("data_parallel")
        sequence = mesh.get_group("sequence_parallel")
        place = RankCoordinates(
            data_rank=dist.get_rank(data),
            data_world=dist.get_world_size(data),
            sequence_rank=dist.get_rank(sequence),
            sequence_world=dist.get_world_size(sequence),
        )
    elif hasattr(mpu, "get_sequence_parallel_world_size"):
        sequence_world = mpu.get_sequence_parallel_world_size()
        place = RankCoordinates(
            data_rank=place.data_rank // sequence_world,
            data_world=place.data_world // sequence_world,
            sequence_rank=mpu.get_sequence_parallel_rank(),
            sequence_world=sequence_world,
        )
    is_ulysses = hasattr(mpu, "initialize_sequence_parallel")  # it has no data axis
    if mpu is None or is_ulysses:
        return place
    if mesh is None:
        place = replace(
            place,
            data_rank=mpu.get_data_parallel_rank(),
            data_world=mpu.get_data_parallel_world_size(),
        )
    tensor_rank = bwc_tensor_model_parallel_rank(mpu)
    tensor_world = bwc_tensor_model_parallel_world_size(mpu)
    pipe_rank = 0
    pipe_world = bwc_pipeline_parallel_world_size(mpu)
    for name in ("get_pipe_parallel_rank", "get_pipeline_model_parallel_rank"):
        if pipe_world > 1 and hasattr(mpu, name):
            pipe_rank = getattr(mpu, name)()
    if inherited:  # the stages of the other engine count as tensor ranks
        return replace(
            place,
            tensor_rank=pipe_rank * tensor_world + tensor_rank,
            tensor_world=pipe_world * tensor_world,
        )
    return replace(
        place,
        tensor_rank=tensor_rank,
        tensor_world=tensor_world,
        pipe_rank=pipe_rank,
        pipe_world=pipe_world,
    )
