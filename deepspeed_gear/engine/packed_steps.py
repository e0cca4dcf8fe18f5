"""Packed steps: checks that each optimizer step of an engine trains exactly one train step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed_gear.config.options import PackConfig
from deepspeed_gear.errors import ConfigError, StoreError
from deepspeed_gear.frameworks import deepspeed_compat
from deepspeed_gear.frameworks.gradient_divisor import check_accumulation, engine_divisor
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.replay.packed.rollout import TrainStep
from deepspeed_gear.replay.replay import Replay
from deepspeed_gear.sampling.batch_sizes import TRAIN


def check_gradients(engine: Any, pack: PackConfig) -> list[str]:
    """Check that an engine's gradients of packs are exact: that they have one divisor.

    Returns:
        Notes for the log on settings that round or clip.
    Raises:
        ConfigError: A setting of the engine makes the gradients differ.
    """
    settings = deepspeed_compat.gradient_settings(engine)
    engine_divisor(settings)
    return check_accumulation(settings, pack.pad.to)


class PackedSteps:
    """Check that each optimizer step of an engine trains exactly one train step.

    A train step's gradients are those of one optimizer step: the next train step must not begin
    before `engine.step()`, and `engine.step()` must not run before all micro batches went through
    `backward`. Afterwards `global_samples` counts the trajectories of the step. A step that is
    skipped for an overflow is not counted, and its trajectories are not sampled again.

    Args:
        engine: The engine of DeepSpeed.
        metrics: Metrics that count skipped steps; None if the replay was not made for the engine.
    """

    def __init__(self, engine: Any, metrics: Metrics | None) -> None:
        self._engine = engine
        self._metrics = metrics
        self._step: TrainStep | None = None  # begun; `engine.step()` has not updated for it yet

    def begin(self, step: TrainStep) -> None:
        """Begin a train step, after `engine.step()` if `backward` was called in the one before."""
        if self._step is not None and deepspeed_compat.pending_backwards(self._engine):
            rule = f"must not begin before engine.step() was called for {self._step.name}"
            remedy = "call engine.step() after the loop over a step's micro batches"
            raise StoreError(step.name, rule, None, remedy)
        self._step = step

    def step(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the engine's `step`; raise a StoreError if a micro batch had no `backward`."""
        step = self._step
        done = deepspeed_compat.pending_backwards(self._engine)
        if step is not None and done < len(step):
            calls = f"engine.backward() for all {len(step)} micro batches"
            remedy = "a micro batch without loss tokens has the loss micro.sum(...) of 0"
            raise StoreError(
                step.name, f"must have called {calls} before engine.step()", done, remedy
            )
        return original(*arguments, **options)

    def update(self, original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the engine's update of weights, and count the trajectories of the step.

        DeepSpeed calls it inside `step`, before it writes `global_samples` to its monitors.
        """
        before = self._engine.global_samples
        result = original(*arguments, **options)
        step, self._step = self._step, None
        if step is not None:  # else gradients of other data: DeepSpeed's count stays
            is_applied = bool(self._engine.was_step_applied())
            self._engine.global_samples = before + (step.num_trajectories if is_applied else 0)
            if not is_applied and self._metrics is not None:
                self._metrics.add(skipped=1)
        return result


def attach_packed(engine: Any, replay: Replay, owns: bool) -> None:
    """Give an engine `gear_step` and `gear_rollout`, and check its optimizer steps.

    Args:
        engine: An engine that `check_gradients` accepts.
        replay: Its replay.
        owns: Whether the replay was made for the engine: then it counts skipped steps.
    """

    def refuse_sample() -> None:
        remedy = "call engine.gear_step(), or engine.gear_rollout() for several optimizer steps"
        raise ConfigError("engine.gear_sample", "must not be called with gear.pack", None, remedy)

    steps = PackedSteps(engine, replay.metrics if owns else None)
    deepspeed_compat.wrap(engine, "step", steps.step)
    deepspeed_compat.wrap(engine, deepspeed_compat.STEPPING, steps.update)
    engine.gear_step = replay.step
    engine.gear_rollout = replay.rollout
    engine.gear_sample = refuse_sample
    engine.gear_iterator = lambda stream=TRAIN: (  # endless for training
        iter(replay.step, None) if stream == TRAIN else replay.iterator(stream)
    )
    replay.observe_steps(steps.begin)
