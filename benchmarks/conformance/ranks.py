"""Cases of several processes: epochs, one distribution for all of them, workers, and kills."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from peers.interface import Array, NotOfferedError, Steps, moment

from conformance.check import StepBuffer, System, case, fits, refusal


@case(
    "huggingface/accelerate#4195, Lightning-AI/litData#233",
    "10 items over 3 ranks: each item once in an epoch, and no rank waits for ever",
)
def an_epoch_over_three_ranks(system: System) -> None:
    ranks = system.epoch(count=10, batch=1, ranks=3, used=0)
    found = sorted(item for items in ranks for item in items)
    assert found == list(range(10)), f"drew {found}"


@case(
    "huggingface/accelerate#4195",
    "resumed in an epoch, the items that were used are not drawn again",
)
def an_epoch_that_is_resumed(system: System) -> None:
    whole = system.epoch(count=24, batch=2, ranks=2, used=0)
    rest = system.epoch(count=24, batch=2, ranks=2, used=4)
    for before, after in zip(whole, rest, strict=True):
        assert after == before[8:], f"went on with {after}, not {before[8:]}"


@case("pytorch/rl#1397", "4 processes draw from one prioritized buffer with one exact distribution")
def one_distribution_for_all(system: System) -> None:
    priorities = np.array([1.0, 2.0, 4.0, 8.0, 16.0])
    found = system.shared(priorities, processes=4, batches=40)
    assert len(found) == 4, f"{len(found)} processes"
    fits(np.bincount(np.concatenate(found), minlength=5), priorities, "all processes together")
    for own in found:
        fits(np.bincount(own, minlength=5), priorities, "one process")


@case("huggingface/datasets#3423", "two workers of a DataLoader return each item of an epoch once")
def an_epoch_by_two_workers(system: System) -> None:
    found = sorted(
        item
        for items in system.epoch(count=24, batch=2, ranks=1, used=0, workers=2)
        for item in items
    )
    assert found == list(range(24)), f"drew {found}"


def by_workers(buffer: StepBuffer, num_workers: int, num_batches: int) -> list[Array]:
    """Return so many batches of each worker of a DataLoader, which has its own copy of
    the buffer.
    """
    from torch.utils.data import DataLoader, IterableDataset

    class Drawn(IterableDataset[Array]):
        def __iter__(self) -> Iterator[Array]:
            return (buffer.sample().obs for _ in range(num_batches))

    options = {"num_workers": num_workers, "multiprocessing_context": "fork"}
    return list(DataLoader(Drawn(), batch_size=None, **options))


@case(
    "huggingface/datasets#3423",
    "two workers of a DataLoader draw different batches, or are refused",
)
def draws_of_two_workers(system: System) -> None:
    if not system.forks or find_spec("torch") is None:
        raise NotOfferedError
    buffer = system.steps(Steps(capacity=4096, num_envs=64))
    for first in range(0, 2048, 64):
        buffer.add(moment(np.arange(first, first + 64), terminated=np.ones(64, bool)))

    found = [tuple(obs.tolist()) for obs in by_workers(buffer, 2, 4)]
    assert len(set(found)) == 8, (
        f"{len(found) - len(set(found))} of {len(found)} batches came twice"
    )


@case(
    "mosaicml/streaming#781",
    "ranks that were killed start again at once, with what they shared still there",
)
def a_restart_after_a_kill(system: System) -> None:
    found = sorted(item for items in system.restart() for item in items)
    assert found == list(range(10)), f"drew {found}"


SAVED = Steps(capacity=1 << 15, num_envs=1 << 8)


def _save_again_and_again(name: str, folder: str, answers: Any) -> None:
    try:
        buffer = System(name).steps(SAVED)
        for first in range(0, SAVED.capacity, SAVED.num_envs):
            ends = np.ones(SAVED.num_envs, bool)
            buffer.add(moment(np.arange(first, first + SAVED.num_envs), terminated=ends))
        buffer.save(Path(folder))
    except NotOfferedError:
        answers.send(False)
        return
    answers.send(True)
    while True:
        buffer.save(Path(folder))


@case(
    "huggingface/lerobot#2495",
    "whenever a process is killed that saves, the folder has a save that loads",
)
def a_kill_while_saving(system: System) -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        saves = Path(folder, "saves")
        saves.mkdir()
        arguments = (system.name, str(saves), sender)
        child = multiprocessing.get_context("spawn").Process(
            target=_save_again_and_again, args=arguments
        )
        child.start()
        sender.close()
        if not receiver.recv():
            child.join()
            raise NotOfferedError
        for number in range(
            10
        ):  # what lies there while the process is stopped is what a kill would leave
            time.sleep(0.1)
            os.kill(child.pid, signal.SIGSTOP)
            shutil.copytree(saves, Path(folder, str(number)))
            os.kill(child.pid, signal.SIGCONT)
        child.kill()
        child.join()
        for number in range(10):
            other = system.steps(SAVED)
            text = refusal(partial(other.load, Path(folder, str(number))))
            assert text is None, f"save {number} of 10 does not load: {text}"
            sampled = other.sample()
            assert (sampled.next_obs == sampled.obs + 1).all(), f"save {number} of 10 mixes steps"
            other.close()
