"""Save in the middle of an epoch and go on, or load on another number of ranks and go on.

Engine "data" reads a data set; engine "table" has a table that rank 0 adds to, under way as well.
"""

from __future__ import annotations

import re
from typing import Any

import deepspeed
import pytest
from deepspeed import comm as dist
from engine_parts import BATCH, Model, ds_config, dump, rank, task, train
from gear_support import SCHEMA, trajectory

import deepspeed_gear
from deepspeed_gear.errors import ConfigError, GearError

BEFORE, AFTER, ACCUMULATION = 3, 5, 3


def main(wanted: dict[str, Any]) -> None:
    actions = {"save": save, "load": load, "attach late": attach_late}
    for name in wanted["names"]:
        engine = actions[wanted["action"]](name, wanted)
        seen, _ = train(engine, AFTER)
        dump(wanted["out"], f"{name}.after", seen)
        engine.destroy()


def config_of(name: str, wanted: dict[str, Any]) -> dict[str, Any]:
    return ds_config(wanted["gear"][name], ACCUMULATION, zero_optimization={"stage": 0})


def schemas_of(name: str) -> dict[str, Any] | None:
    return {"main": SCHEMA} if name == "table" else None


def made(name: str, wanted: dict[str, Any]) -> Any:
    model = Model(12)
    return deepspeed_gear.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config_of(name, wanted),
        schemas=schemas_of(name),
    )[0]


def add(engine: Any, numbers: range) -> None:
    if rank() == 0:
        for number in numbers:
            engine.gear.add(trajectory(number, 2 + number % 5))
    dist.barrier()


def save(name: str, wanted: dict[str, Any]) -> Any:
    engine = made(name, wanted)
    if name == "table":
        add(engine, range(20))
    seen, _ = train(engine, BEFORE)
    dump(wanted["out"], f"{name}.before", seen)
    if name == "table":
        add(engine, range(20, 30))
        if rank() == 0:
            engine.gear.remove([3, 4])
        dist.barrier()
    engine.save_checkpoint(f"{wanted['checkpoints']}/{name}", client_state={"mine": 5})
    return engine


def load(name: str, wanted: dict[str, Any]) -> Any:
    engine = made(name, wanted)
    if name == "table":
        add(engine, range(50, 53))  # is replaced
    train(engine, 1)  # prefetching is under way
    path, client_state = load_into(engine, name, wanted)
    assert path is not None
    assert client_state["mine"] == 5
    assert "deepspeed_gear" not in client_state
    assert engine.global_steps == BEFORE
    if name == "table":
        assert len(engine.gear) == 28
        assert engine.gear.read([29])[0]["code"].tolist() == trajectory(29, 6)["code"].tolist()
    return engine


def load_into(engine: Any, name: str, wanted: dict[str, Any]) -> tuple[Any, Any]:
    folder = f"{wanted['checkpoints']}/{name}"
    found: tuple[Any, Any] = engine.load_checkpoint(
        folder, load_optimizer_states=False
    )  # those are of two ranks
    return found


def attach_late(name: str, wanted: dict[str, Any]) -> Any:
    """Load before the engine is attached, as Trainers do: that is refused unless the checkpoint is named."""
    model = Model(12)
    config, folder = config_of(name, wanted), f"{wanted['checkpoints']}/{name}"
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    assert load_into(engine, name, wanted)[0] is not None

    def refused(kind: type[GearError], text: str, **options: Any) -> None:
        with pytest.raises(kind, match=re.escape(text)):
            deepspeed_gear.attach(engine, schemas=schemas_of(name), **options)
        assert "gear" not in engine.__dict__

    refused(
        ConfigError,
        "checkpoint must be given: this engine has trained or loaded a checkpoint (global step 3)",
    )
    refused(GearError, "must name the checkpoint's tag", checkpoint=wanted["out"])
    refused(ConfigError, "must be the same on all ranks", checkpoint=f"{folder}{'/' * rank()}")
    engine.global_steps += 1
    refused(GearError, "that the engine has loaded, of global step 4, got 3", checkpoint=folder)
    engine.global_steps -= 1
    if name == "data":
        deepspeed_gear.attach(engine, checkpoint=False)
        assert int(engine.gear_sample().sample_number.min()) < BATCH
        engine.destroy()
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        load_into(engine, name, wanted)
    deepspeed_gear.attach(engine, schemas=schemas_of(name), checkpoint=folder)
    return engine


if __name__ == "__main__":
    main(task())
