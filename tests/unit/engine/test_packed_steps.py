"""Optimizer steps of packed batches. Engine and replay only count: real ones are in
test_packed_engine.py.
"""

from collections.abc import Callable
from typing import Any, cast

import pytest

from deepspeed_gear.engine.packed_steps import attach_packed
from deepspeed_gear.errors import ConfigError, StoreError
from deepspeed_gear.replay.metrics import Metrics


class Step:
    """A train step: an iterable of as many micro batches as its number."""

    def __init__(self, number: int, observers: list[Callable[[Any], None]]) -> None:
        self.number = number
        self.observers = observers
        self.num_trajectories = 100 + number
        self.name = f"train step {number}"

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Any:
        for begun in self.observers:
            begun(self)
        yield from range(self.number)


class Source:
    """A replay with packed batches of 1, 2, 3, ... micro batches."""

    def __init__(self) -> None:
        self.number = 0
        self.metrics = Metrics()
        self.observers = cast(list[Callable[[Any], None]], [])
        self.observe_steps = self.observers.append

    def step(self) -> Step:
        self.number += 1
        return Step(self.number, self.observers)

    def rollout(self) -> list[Step]:
        return [self.step(), self.step()]

    def iterator(self, stream: str) -> Any:
        return iter([stream])

    @property
    def skipped(self) -> float:
        return self.metrics.take_trained()["skipped_steps"]


class Engine:
    """Counts as DeepSpeed does: `global_samples` by backwards."""

    def __init__(self) -> None:
        self._unmanaged_backward_count = 0
        self.global_samples = 0
        self.overflows = False
        self.seen: list[int] = []  # global_samples where monitors read it

    def backward(self) -> None:
        self._unmanaged_backward_count += 1

    def step(self) -> None:
        self._take_model_step(None)
        self.seen.append(self.global_samples)

    def _take_model_step(self, lr_kwargs: Any) -> None:
        self.global_samples += 8 * self._unmanaged_backward_count
        self._unmanaged_backward_count = 0

    def was_step_applied(self) -> bool:
        return not self.overflows


def attached(source: Source | None = None, owns: bool = True) -> tuple[Any, Source]:
    engine = Engine()
    source = source or Source()
    attach_packed(engine, cast(Any, source), owns)
    return engine, source


def train(engine: Any, step: Any) -> None:
    for _ in step:
        engine.backward()
    engine.step()


def test_samples_are_the_trajectories_that_were_trained() -> None:
    engine, _ = attached()
    train(engine, engine.gear_step())
    for step in engine.gear_rollout():
        train(engine, step)
    assert engine.seen == [101, 203, 306], "before monitors read it"
    engine.backward()
    engine.step()  # other data
    assert engine.global_samples == 306 + 8
    other = Engine()  # what is bound is the instance only
    other.backward()
    other.step()
    assert other.global_samples == 8


def test_the_next_step_must_not_begin_before_the_optimizer_step() -> None:
    engine, _ = attached()
    assert list(engine.gear_step()) == [0]  # a step without gradients may be left
    for _ in engine.gear_step():
        engine.backward()
    later = engine.gear_step()
    text = r"train step 3 must not begin before engine.step\(\) was called for"
    with pytest.raises(StoreError, match=text):
        next(iter(later))
    engine.step()
    train(engine, later)
    assert engine.global_samples == 102 + 103


def test_two_engines_share_a_replay() -> None:
    actor, source = attached()
    critic, _ = attached(source, owns=False)
    critic.overflows = True
    for _ in actor.gear_step():
        actor.backward()
        critic.backward()
    actor.step()
    critic.step()
    assert (actor.global_samples, critic.global_samples, source.skipped) == (101, 0, 0)
    train(critic, critic.gear_step())  # the actor is left as it is
    train(actor, actor.gear_step())
    assert actor.global_samples == 101 + 103


def test_windows_are_not_sampled_and_iterators_give_steps() -> None:
    engine, _ = attached()
    text = r"engine.gear_sample must not be called with gear.pack; call engine.g"
    with pytest.raises(ConfigError, match=text):
        engine.gear_sample()
    steps = engine.gear_iterator()
    assert [next(steps).number, next(steps).number] == [1, 2]
    assert list(engine.gear_iterator("eval")) == ["eval"]
