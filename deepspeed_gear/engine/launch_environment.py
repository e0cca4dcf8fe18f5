"""Rank variables of a process without a launcher: a notebook, or plain python, is rank 0 of 1."""

from __future__ import annotations

import importlib.util
import os
import socket

import torch.distributed as dist

from deepspeed_gear.errors import ConfigError

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Numbers of processes that MPI or srun has started. Of Slurm the number of the job step: a batch
# script is one process of a larger job.
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

# Clouds whose variables DeepSpeed reads without mpi4py.
_CLOUDS = ("AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV")

# Marks the rank variables as set by `be_single_rank_unless_launched`: it has their MASTER_PORT.
_ALONE = "GEAR_SINGLE_RANK_PORT"

_START = "start with deepspeed or torchrun (one rank: deepspeed --num_gpus 1 train.py)"


def be_single_rank_unless_launched() -> None:
    """Set the rank variables of a process without a launcher: a notebook, or plain python.

    Without them DeepSpeed would look for MPI by mpi4py. Where MPI or srun has started several
    processes, this is left to DeepSpeed.

    Raises:
        ConfigError: Only some of the variables are set, or mpi4py is needed and not installed.
    """
    if dist.is_initialized():
        return
    if _ALONE in os.environ and os.environ[_ALONE] == os.environ.get("MASTER_PORT"):
        # Inherited from a parent such as a notebook's kernel: this process is a run of its own.
        for name in _LAUNCHED:
            os.environ.pop(name, None)
    missing = [name for name in _LAUNCHED if name not in os.environ]
    if not missing or any(name in os.environ for name in _CLOUDS):
        return
    started = next((name for name in _COUNTS if os.environ.get(name, "1") != "1"), None)
    if started is not None:
        if importlib.util.find_spec("mpi4py") is None:
            rule = f"must be installed where {started} is set and {', '.join(missing)} are not"
            raise ConfigError("mpi4py", rule, None, f"pip install mpi4py, or {_START}")
        return
    some = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ]
    if some:
        rule = f"must be set where {', '.join(some)} {'is' if len(some) == 1 else 'are'}"
        raise ConfigError(
            ", ".join(missing), rule, None, f"{_START}, or unset the variables for one rank"
        )
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    os.environ[_ALONE] = os.environ["MASTER_PORT"]
