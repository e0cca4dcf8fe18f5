"""Engines that train packed batches: weights, counts, what is refused, and saves in a rollout
batch.
"""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batch_records import in_plan_order
from engine_parts import Lines
from gear_support import shared_files
from packed_engines import COUNT, Scores, engine_of, fill, load, save, scores_of
from process_support import call_with_engines
from rollout_support import responses, section
from torch import Tensor

import deepspeed_gear
from deepspeed_gear.errors import ConfigError, GearError, PeerError, StoreError

WIDTH = 4  # ranks that packs are planned for
EPSILON = torch.finfo(torch.float32).eps


def test_a_rollout_batch_goes_on_on_other_ranks(tmp_path: Path) -> None:
    """Saved by two ranks after one of six steps: one and four ranks train the same packs and
    columns.

    The batch begins in the middle of a selection.
    """
    pack = {"tokens": 128, "pad": {"multiple": 16}, "plan_width": WIDTH}
    size = {"trajectories": 18, "tokens": 450, "minibatches": 3, "epochs": 2}
    gear = section(pack=pack, rollout=size, sampler={"kind": "epoch"}, timeout_s=60.0)
    saved = call_with_engines(2, save, gear, str(tmp_path))
    wanted = in_plan_order([rank["steps"] for rank in saved])
    assert len(wanted) == 5
    assert all(len(packs) >= WIDTH and any(pack["ids"] for pack in packs) for packs in wanted)
    for world in (1, 4):
        found = call_with_engines(world, load, gear, str(tmp_path))
        assert {rank["first"] for rank in found} == {1}
        assert (
            in_plan_order([rank["steps"] for rank in found]) == wanted
        )  # ids and columns, to the bit
        assert {tuple(rank["following"]) for rank in found} == {tuple(saved[0]["following"])}
        for one, other in zip(found[0]["weights"], saved[0]["weights"], strict=True):
            assert np.array(one) == pytest.approx(
                np.array(other), abs=1e-6
            )  # sums in another order
    assert shared_files(gear["shared_memory"]["prefix"]) == []


def test_packed_steps_of_an_engine() -> None:
    """Weights, `global_samples`, skipped steps, steps out of order, settings that are refused or
    named.
    """
    gear = section(timeout_s=60.0)
    del gear["rollout"]
    call_with_engines(2, live, gear)
    assert shared_files(gear["shared_memory"]["prefix"]) == []


def live(gear: dict[str, Any]) -> None:
    """Each rank adds responses of its own."""
    for part in (one_step, several_steps, a_loop_that_ends_early, two_engines, refusals, defaults):
        part(gear)


def wanted(model: Scores) -> dict[str, Tensor]:
    """Return the gradient of the mean over all loss tokens of all ranks' responses, in
    one process.
    """
    sums = torch.zeros(())
    count = 0
    for rank in range(dist.get_world_size()):
        for response in responses(COUNT, seed=rank):
            scores = model(torch.from_numpy(response["tokens"].astype(np.int64)))
            counted = torch.from_numpy(response["loss_mask"])[1:]  # where they are predicted
            sums = sums + scores[:-1][counted].sum()
            count = count + int(counted.sum())
    (sums / count).backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def refused(kind: type[GearError], text: str, action: Callable[[], Any]) -> None:
    """Run an action that every rank must refuse, with its own error or that of another rank."""
    with pytest.raises((kind, PeerError), match=re.escape(text)):
        action()


def train(engine: Any, step: Any, factor: float = 1.0) -> None:
    for micro in step:
        engine.backward(micro.sum(scores_of(engine, micro)) * factor)
    engine.step()


def one_step(gear: dict[str, Any]) -> None:
    """One step over all responses changes the weights by the gradient of the mean."""
    whole = dist.get_world_size() * COUNT
    engine = engine_of({**gear, "batch": {"trajectories": whole}}, zero_optimization={"stage": 2})
    refused(ConfigError, "engine.gear_sample must not be called with gear.pack", engine.gear_sample)
    fill(engine)
    before = {name: one.detach().clone() for name, one in engine.module.named_parameters()}
    step = engine.gear_step()
    assert len(step) > 2
    train(engine, step)
    for name, gradient in wanted(Scores()).items():
        change = before[name] - engine.module.get_parameter(name).detach()
        bound = EPSILON * (
            before[name].abs().max() + 8 * gradient.abs().max()
        )  # of weights and of sums
        assert bound < 1e-2 * gradient.abs().max()
        assert (change - gradient).abs().max() <= bound, name
    assert engine.global_samples == whole
    assert engine.gear.statistics()["skipped_steps"] == 0
    engine.destroy()


def several_steps(gear: dict[str, Any]) -> None:
    """Steps of a rollout batch: their order, their counts, and one that overflows."""
    options = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    size = {"trajectories": 24, "minibatches": 3}
    engine = engine_of({**gear, "rollout": size}, zero_optimization={"stage": 1}, **options)
    fill(engine)
    trained = 0
    for step in engine.gear_rollout():
        is_bad = step.number == 1
        train(engine, step, float("nan") if is_bad else 1.0)
        assert engine.was_step_applied() != is_bad
        trained += 0 if is_bad else step.num_trajectories
        assert engine.global_samples == trained
    assert trained == 16
    metrics = engine.gear.take_metrics()
    assert (metrics["train_steps"], metrics["skipped_steps"]) == (3, 1)

    steps = iter(engine.gear_rollout())
    for micro in next(steps):
        engine.backward(micro.sum(scores_of(engine, micro)))
    later = next(steps)
    # a failure is raised on all ranks, also on one that has not left the barrier before
    dist.barrier()
    refused(StoreError, "must not begin before engine.step() was called", lambda: next(iter(later)))
    engine.step()
    for step in steps:
        micros = iter(step)
        next(micros)
        refused(StoreError, f"for all {len(step)} micro batches", engine.step)
        break
    engine.destroy()


def a_loop_that_ends_early(gear: dict[str, Any]) -> None:
    """It ends the rollout batch on all ranks; an absent column of one is an error on both."""
    size = {"trajectories": 12, "minibatches": 3}
    sampler = {"kind": "epoch"}
    engine = engine_of(
        {**gear, "rollout": size, "sampler": sampler}, zero_optimization={"stage": 1}
    )
    fill(engine)
    first = engine.gear_rollout()
    for step in first:
        train(engine, step)
        break
    refused(StoreError, "must not be used after its loop has ended", first.advantages)
    second = engine.gear_rollout()
    assert not set(first.trajectory_id.tolist()) & set(second.trajectory_id.tolist())
    # a failure is raised on all ranks, also on one that has not left the barrier before
    dist.barrier()
    name = "reward" if dist.get_rank() else "other"  # of one rank: the other gets its error
    refused(
        ConfigError,
        "column 'other' must be a column of table",
        lambda: second.advantages(reward=name),
    )
    second.advantages("dr_grpo")
    assert sum(step.num_trajectories for step in second) == 12
    progress = engine.gear.progress()
    assert progress.num_samples == 4, progress  # of the step that was trained
    engine.destroy()


def two_engines(gear: dict[str, Any]) -> None:
    """A critic trains the steps of an actor's replay; both count what they have trained."""
    whole = dist.get_world_size() * COUNT
    actor = engine_of({**gear, "batch": {"trajectories": whole}}, zero_optimization={"stage": 1})
    critic = engine_of(None, zero_optimization={"stage": 3})
    deepspeed_gear.attach(critic, replay=actor.gear)
    fill(actor)
    for micro in actor.gear_step():
        for engine in (actor, critic):
            engine.backward(micro.sum(scores_of(engine, micro)))
    actor.step()
    assert (actor.global_samples, critic.global_samples) == (whole, 0)
    critic.step()
    assert critic.global_samples == whole
    critic.destroy()
    actor.destroy()


def refusals(gear: dict[str, Any]) -> None:
    """Settings of DeepSpeed that packed batches do not suit."""
    batch = {**gear, "batch": {"trajectories": 8}}
    bf16 = {"bf16": {"enabled": True}}
    for name, options in (
        ("managed_gradient_accumulation", {"managed_gradient_accumulation": True}),
        ("gradient_accumulation_steps", {"gradient_accumulation_steps": 2}),
        ("data_types.grad_accum_dtype", {"zero_optimization": {"stage": 2}, **bf16}),
    ):
        refused(ConfigError, f"{name} must be", lambda options=options: engine_of(batch, **options))


def defaults(gear: dict[str, Any]) -> None:
    """DeepSpeed's defaults that change gradients are logged on the first rank."""
    kept = Lines()
    logging.getLogger("deepspeed_gear").addHandler(kept)
    engine = engine_of({**gear, "batch": {"trajectories": 8}}, gradient_clipping=None)
    noted = any("gradient_clipping is 1.0, DeepSpeed's default" in line for line in kept.texts)
    assert noted == (dist.get_rank() == 0), kept.texts
    assert not any("train_batch_size" in line for line in kept.texts), kept.texts
    engine.destroy()
