"""Pipeline engines: all ranks fetch a schedule's micro batches before the schedule starts.

Stages pull micro batches in the middle of a schedule of sends and receives. A stage that waited
there for another rank would never continue, so waits and errors come before the schedule.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.config import GearConfig
from deepspeed_gear.config.options import PipelineConfig
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.frameworks.deepspeed_compat import wrap
from deepspeed_gear.replay.replay import Replay
from deepspeed_gear.row_exchange.exchange_plan import EXAMPLE
from deepspeed_gear.sampling.batch_sizes import TRAIN

Part = torch.Tensor | tuple[torch.Tensor, ...] | None


class PipelineIterator(Iterator[tuple[Part, Part]]):
    """Endless iterator over micro batches as (inputs, labels) of `gear.pipeline`.

    The first stage has inputs, the last one labels, an inner stage neither. After a pass over a
    split the next pass begins.

    Attributes:
        batches: Batches of the latest schedule, on ranks that read.
    """

    def __init__(self, replay: Replay, stream: str) -> None:
        self._replay = replay
        self._stream = stream
        self._place = replay.topology.place
        pipeline = check_section(replay.config)
        self._inputs: Sequence[str] = pipeline.inputs if self._place.is_first_stage else ()
        self._labels: Sequence[str] = pipeline.labels if self._place.is_last_stage else ()
        self._length = None if stream == TRAIN else replay.num_batches(stream)
        self._pass: Iterator[Batch] = iter(())
        self._ready: deque[Batch | None] = deque()
        self._is_over = True  # False: an error has interrupted `fetch`, and `_ready` is kept
        self.batches: list[Batch] = []

    def __len__(self) -> int:
        """Return the number of micro batches of one pass over a split."""
        if self._length is None:
            raise TypeError("the training stream has no end")
        return self._length

    def fetch(self, count: int) -> None:
        """Fetch `count` micro batches for a schedule; after an error, call again. Collective."""

        def fill() -> None:
            while len(self._ready) < count:
                self._ready.append(self._fetched())

        if self._is_over:
            self._ready.clear()  # an inner stage pulls nothing
        self._is_over = False
        self._replay.take_turn(fill)
        self._is_over = True
        self.batches = [batch for batch in self._ready if batch is not None]

    def __next__(self) -> tuple[Part, Part]:
        if not self._ready:
            self._ready.append(self._fetched())
        batch = self._ready.popleft()
        if batch is None:
            return None, None
        inputs, labels = (tuple(map(batch.part, names)) for names in (self._inputs, self._labels))
        return _one_or_all(inputs), _one_or_all(labels)

    def _fetched(self) -> Batch | None:
        if not self._place.reads:
            return None
        if self._stream == TRAIN:
            return self._replay.sample()
        batch = next(self._pass, None)
        if batch is None:
            self._pass = self._replay.iterator(self._stream)
            batch = next(self._pass)
        return batch.clone()  # a pass keeps two batches, a schedule any number


def check_section(config: GearConfig) -> PipelineConfig:
    """Return the section `gear.pipeline`; raise a ConfigError without one."""
    if config.pipeline is None:
        raise ConfigError(
            "gear.pipeline", "must be given where the model is a pipeline", None, EXAMPLE
        )
    return config.pipeline


def _one_or_all(parts: tuple[torch.Tensor, ...]) -> Part:
    return parts[0] if len(parts) == 1 else parts or None


def attach_pipeline(engine: Any, replay: Replay) -> None:
    """Make the `train_batch` and `eval_batch` of one engine fetch before their schedules."""
    train = PipelineIterator(replay, TRAIN)
    signature = inspect.signature(engine.eval_batch)

    def train_batch(original: Callable[..., Any], data_iter: Any = None) -> Any:
        data_iter = train if data_iter is None else data_iter
        if isinstance(data_iter, PipelineIterator):
            data_iter.fetch(engine.micro_batches)
        return original(data_iter)

    def eval_batch(original: Callable[..., Any], data_iter: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(data_iter, PipelineIterator):
            given = signature.bind(data_iter, *rest, **options).arguments.get("num_micro_batches")
            data_iter.fetch(engine.micro_batches if given is None else given)
        return original(data_iter, *rest, **options)

    wrap(engine, "train_batch", train_batch)
    wrap(engine, "eval_batch", eval_batch)
    engine.gear_iterator = lambda stream=TRAIN: (
        train if stream == TRAIN else PipelineIterator(replay, stream)
    )
    engine.gear_batches = lambda: list(train.batches)
