"""Processes that measure at once."""

from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import time
from collections.abc import Callable
from typing import Any

_START_S = 600.0


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function on every rank of a gloo group of fresh processes.

    Args:
        world_size: Number of processes.
        function: A module's function; called after the group exists.
        *arguments: Its arguments.
    Returns:
        What it returned on each rank.
    Raises:
        RuntimeError: A rank failed; the text is that rank's.
    """
    results: Any = multiprocessing.get_context("spawn").Queue()
    processes = start_ranks(world_size, function, *arguments, results=results)
    found: dict[int, Any] = {}
    try:
        until = time.monotonic() + _START_S
        while len(found) < world_size:
            try:
                rank, error, value = results.get(timeout=1.0)
            except queue.Empty:
                dead = [p for p in processes if p.exitcode not in (None, 0)]
                if dead or time.monotonic() > until:
                    raise RuntimeError(f"a rank ended with {[p.exitcode for p in dead]}") from None
                continue
            if error is not None:
                raise RuntimeError(f"rank {rank}: {error}")
            found[rank] = value
        for process in processes:
            process.join(30.0)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [found[rank] for rank in range(world_size)]


def start_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, results: Any = None
) -> list[multiprocessing.process.BaseProcess]:
    """Start the processes of `run_ranks` and return them; their end is the caller's business."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(rank, world_size, port, results, function, arguments))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return list(processes)


def _rank(
    rank: int,
    world_size: int,
    port: int,
    results: Any,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    import torch.distributed as dist

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    try:
        dist.init_process_group("gloo")
        value = function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        if results is not None:
            results.put((rank, f"{type(error).__name__}: {error}", None))
        raise
    if results is not None:
        results.put((rank, None, value))
