"""Save in the middle of an epoch and go on, or load on another number of ranks and go on.

Engine "data" reads a data set; engine "table" has a table that rank 0 adds to, under way as well.
"""

from __future__ import annotations

from typing import Any

from deepspeed import comm as dist
from engine_parts import Model, ds_config, dump, rank, task, train
from gear_support import SCHEMA, trajectory

import deepspeed_gear

BEFORE, AFTER, ACCUMULATION = 3, 5, 3


def main(wanted: dict[str, Any]) -> None:
    for name, gear in wanted["gear"].items():
        model = Model(12)
        engine, *_ = deepspeed_gear.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=ds_config(gear, ACCUMULATION, zero_optimization={"stage": 0}),
            schemas={"main": SCHEMA} if name == "table" else None,
        )
        save(engine, name, wanted) if wanted["save"] else load(engine, name, wanted)
        seen, _ = train(engine, AFTER)
        dump(wanted["out"], f"{name}.after", seen)
        engine.destroy()


def add(engine: Any, numbers: range) -> None:
    if rank() == 0:
        for number in numbers:
            engine.gear.add(trajectory(number, 2 + number % 5))
    dist.barrier()


def save(engine: Any, name: str, wanted: dict[str, Any]) -> None:
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


def load(engine: Any, name: str, wanted: dict[str, Any]) -> None:
    if name == "table":
        add(engine, range(50, 53))  # is replaced
    train(engine, 1)  # prefetching is under way
    path, client_state = engine.load_checkpoint(
        f"{wanted['checkpoints']}/{name}", load_optimizer_states=False
    )
    assert path is not None
    assert client_state["mine"] == 5
    assert "deepspeed_gear" not in client_state
    assert engine.global_steps == BEFORE
    if name == "table":
        assert len(engine.gear) == 28
        assert engine.gear.read([29])[0]["code"].tolist() == trajectory(29, 6)["code"].tolist()


if __name__ == "__main__":
    main(task())
