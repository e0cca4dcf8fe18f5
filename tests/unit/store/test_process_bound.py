"""What belongs to one process: no pickles or copies, no use in a forked child, nothing after the
end.
"""

import atexit
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gear_support import SCHEMA, SHM, config_of, prefix, trajectory
from process_support import exit_status, in_child

from deepspeed_gear import DeviceReplay, PolicyBoard, Replay
from deepspeed_gear.errors import StoreError

TABLE = {"capacity_steps": 500, "capacity_trajectories": 60, "max_length": 50, "writers": 2}


@pytest.fixture
def replay() -> Iterator[Replay]:
    with Replay(config_of(batch_size=4, tables={"main": TABLE}), schemas={"main": SCHEMA}) as made:
        made.add(trajectory(0, 9))
        yield made


def bound_objects(replay: Replay) -> list[Any]:
    """One of each class that belongs to its process."""
    device = {"capacity_steps": 50, "max_length": 9, "remove": "fifo", "placement": "device"}
    on_device = DeviceReplay(
        config_of(batch_size=2, tables={"main": device}), "cpu", schemas={"main": SCHEMA}
    )
    board = PolicyBoard.create(torch.nn.Linear(2, 2), prefix=prefix())
    writer = replay.writer()
    return [
        replay,
        on_device,
        board,
        writer,
        writer.vector_writer(2, "next_step"),
        writer.trajectory(task=0),
    ]


def test_neither_pickled_nor_copied(replay: Replay) -> None:
    for made in bound_objects(replay):
        text = rf"a {type(made).__name__} must stay.*pickled or copied; make a "
        for action in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(StoreError, match=text):
                action(made)


def test_a_forked_child_cannot_use_them_and_leaves_them_alone(replay: Replay) -> None:
    sample = replay.sample
    endless = iter(replay)
    before = replay.sample().sample_number.tolist()
    made = bound_objects(replay)
    uses: list[Callable[[], Any]] = [
        sample,
        lambda: next(endless),
        lambda: len(replay),
        lambda: replay.tables,
        lambda: setattr(replay, "transform", None),
        *(lambda each=each: each.schema for each in made),
        *(lambda each=each: each.__enter__() for each in made),
        lambda: made[3].add(trajectory(1, 3)),
    ]

    def use() -> None:
        for action in uses:
            with pytest.raises(
                StoreError, match=r"must be used in the process that made it, got.*forked"
            ):
                action()
        for each in made:
            each.close()  # as a child does that leaves a block of its parent
        atexit._run_exitfuncs()  # which the end of the child below leaves out

    assert exit_status(in_child(use)) == 0
    assert replay.sample().sample_number.tolist() == [number + 4 for number in before]
    assert len(replay) == 1
    assert list(SHM.glob(f"{prefix()}-*-main"))


class Batches(torch.utils.data.IterableDataset[Any]):
    """What two workers once gave twice."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.replay.sample()["code"]


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_data_loader_are_refused(replay: Replay, context: str) -> None:
    loader = torch.utils.data.DataLoader(
        Batches(replay), batch_size=None, num_workers=2, multiprocessing_context=context
    )

    def load() -> None:
        batches: Any = iter(loader)
        try:
            next(batches)
        finally:
            batches._shutdown_workers()  # garbage collection would wait 5 s for each

    with pytest.raises((StoreError, RuntimeError), match="in the process that") as caught:
        load()
    assert "num_workers=0" in str(caught.value) or "make a Replay" in str(caught.value)


def test_nothing_is_written_after_the_end(replay: Replay) -> None:
    writer = replay.writer()
    vector = replay.vector_writer(1, autoreset="next_step")
    vector.reset(observation=[[0.0] * 3], task=[0])
    replay.close()
    step = {
        "action": [[0.0] * 2],
        "reward": [0.0],
        "code": [0],
        "terminated": [True],
        "truncated": [False],
    }
    for action in (
        lambda: writer.add(trajectory(1, 3)),
        lambda: writer.fill(0),
        lambda: vector.step(observation=[[0.0] * 3], **step),
    ):
        with pytest.raises(
            StoreError, match="table main must be open; the writer was closed, by itself or"
        ):
            action()
    writer.close()
