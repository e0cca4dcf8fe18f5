"""Common code of the examples: arguments, the loss, evaluation on held-out data, messages, the
result.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_gear import Batch

# elements, in Hopper
OBSERVATION = 11
ACTION = 3
Errors = Callable[
    [Batch], tuple[Tensor, Tensor]
]  # squared error of each step [B, T], which are real [B, T]


def arguments(description: str, config: str) -> argparse.Namespace:
    """Read the command line of an example of parallelism."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=config, help="a ds_config with a gear section")
    parser.add_argument("--data", help="data set (default: the config's)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of replay")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the schedule's)")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    return parser.parse_args()


def config_of(args: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """Return the ds_config and the number of steps; seeds torch, so that all ranks make the same
    weights.
    """
    config = json.loads(Path(args.config).read_text())
    config["gear"]["seed"] = args.seed
    if args.data is not None:
        config["gear"]["data"]["path"] = args.data
    torch.manual_seed(args.seed)
    return config, args.steps or config["scheduler"]["params"]["total_num_steps"]


@contextmanager
def quiet_start() -> Iterator[None]:
    """Make an engine without the messages that no program can avoid; all other warnings and errors
    stay.

    Two warnings are of DeepSpeed's own calls, and are hidden for the whole run: of a function that
    torch has renamed, and of the learning rate that it asks for before the first step. DeepSpeed
    prints on every rank which ops it has built; here only the first rank prints it.
    """
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    early = "Attempting to get learning rate from scheduler before it has started"
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.msg != early)
    if int(os.environ.get("RANK", 0)) == 0:
        yield
        return
    with redirect_stdout(io.StringIO()):
        yield


def context_of(config: dict[str, Any]) -> int:
    """Return the steps of a window."""
    return config["gear"]["fields"]["action"]["length"]


def shorten_history(batch: Batch, keys: Tensor) -> Batch:
    """Hide a random number of leading steps, so that the model can act without a history.

    Without it the model copies its own previous actions, and one bad step leads to the next. The
    number follows from the sample's key, so it is the same on every rank that has the sample, for
    any number of ranks. Only the mask of the actions changes, which both ends of a pipeline have.
    """
    real = batch.mask["action"]
    steps = real.shape[1]
    kept = torch.arange(steps, device=keys.device) >= keys.remainder(steps)[:, None]
    batch.mask["action"] = real & kept
    return batch


def squared_error(predicted: Tensor, action: Tensor) -> Tensor:
    """Return the squared error of each step. [B, T]."""
    return (predicted - action).square().mean(-1)


def masked_mean(error: Tensor, real: Tensor) -> Tensor:
    """Return the mean error of the steps that are real."""
    return (error * real).sum() / real.sum().clamp(min=1)


@torch.no_grad()
def held_out_loss(engine: Any, errors: Errors) -> float:
    """Return the mean squared error over the steps of the held-out trajectories, on every rank.

    Where several ranks have the same samples, each counts them in both sums.
    """
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    engine.eval()
    for batch in engine.gear_iterator("eval"):
        error, real = errors(batch)
        real = real & batch.valid[:, None]  # the last batch is filled up
        total += torch.stack([(error * real).sum(), real.sum()]).double()
    engine.train()
    dist.all_reduce(total)
    return float(total[0] / total[1])


def report(evaluate: Callable[[], float], train: Callable[[], None], **known: Any) -> None:
    """Evaluate, train and evaluate again; rank 0 prints the result as JSON."""
    before = evaluate()
    begin = time.perf_counter()
    train()
    seconds = time.perf_counter() - begin
    result = {
        "loss_before": round(before, 5),
        "loss_after": round(evaluate(), 5),
        "ranks": dist.get_world_size(),
        "seconds": round(seconds, 1),
        **known,
    }
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
