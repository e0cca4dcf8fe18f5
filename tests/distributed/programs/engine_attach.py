"""The ways to an engine with a replay, what it hands out, and its end."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from batch_records import joined, record
from engine_parts import BATCH, NAMES, Lines, Model, ds_config, dump, rank, task, train
from gear_support import shared_files

import deepspeed_gear
from deepspeed_gear.errors import ConfigError, StoreError

plain_initialize = deepspeed.initialize


def refused(kind: type[Exception], *words: str, **call: Any) -> None:
    function, text = call.pop("call"), None
    try:
        function(**call)
    except kind as error:
        text = str(error)
    assert text is not None, f"{words} was not refused"
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in: {text}"


def plain(
    config: dict[str, Any] | str, initialize: Any = plain_initialize, inputs: int = 12
) -> tuple[Any, ...]:
    model = Model(inputs)
    return tuple(initialize(model=model, model_parameters=model.parameters(), config=config))


def attaching(gear: dict[str, Any]) -> None:
    engine = plain(ds_config())[0]
    refused(
        ConfigError, "gear must be a section", '"gear": {"data"', call=deepspeed_gear.attach, engine=engine
    )
    refused(ConfigError, "must be a DeepSpeed engine", call=deepspeed_gear.attach, engine=Model(12))
    assert "gear" not in engine.__dict__
    assert deepspeed_gear.attach(engine, config=gear) is engine
    replay = engine.gear
    engine_class = type(engine)
    assert deepspeed_gear.attach(engine, config=gear).gear is replay
    assert type(engine) is engine_class
    train(engine, 1)

    of_config = plain(ds_config(gear))[0]  # a section that no process asked for does no harm
    assert "gear" not in of_config.__dict__
    assert deepspeed_gear.attach(of_config).gear_sample().num_samples == BATCH // 2
    of_config.destroy()

    second = plain(ds_config())[0]
    deepspeed_gear.attach(second, replay=replay)
    assert second.gear is replay
    numbers = [int(e.gear_sample().sample_number.min()) // BATCH for e in (engine, second, engine)]
    assert numbers == [1, 2, 3], f"two engines share one stream, got {numbers}"
    other = plain(ds_config(accumulation=2))[0]
    text = f"must be of an engine like this one (data {rank()} of 2; global batch {BATCH} = micro batch 3"
    refused(ConfigError, text, call=deepspeed_gear.attach, engine=other, replay=replay)
    refused(ConfigError, "must not be called", call=engine.set_train_batch_size, train_batch_size=24)
    second.destroy()
    assert engine.gear_sample().num_samples == BATCH // 2, "destroying a guest has closed the replay"
    engine.destroy()
    engine.destroy()
    refused(StoreError, "must be open", "closed", call=engine.gear_sample)


def enabling(gear: dict[str, Any], out: str) -> None:
    deepspeed_gear.enable()
    deepspeed_gear.enable()
    path = Path(out) / f"ds_config.{rank()}.json"
    path.write_text(json.dumps(ds_config(gear)))
    engine, _, batches, _ = plain(str(path), deepspeed.initialize)
    without = plain(ds_config(), deepspeed.initialize)[0]
    assert "gear" not in without.__dict__
    deepspeed_gear.disable()
    deepspeed_gear.disable()
    assert deepspeed.initialize is plain_initialize
    for number in range(12):  # more than an epoch of 40 trajectories
        assert int(next(batches).sample_number.min()) // BATCH == number
    engine.destroy()
    refused(StoreError, "must be open", call=lambda: next(batches))
    model = Model(12)
    call = {"call": deepspeed_gear.initialize, "model": model, "model_parameters": model.parameters()}
    refused(ConfigError, "gear must be a section", config=ds_config(), **call)
    data = torch.utils.data.TensorDataset(torch.zeros(4))
    refused(
        ConfigError, "training_data must not be given", config=ds_config(gear), training_data=data, **call
    )
    elastic = {**ds_config(gear), "elasticity": {"enabled": True, "micro_batch_sizes": [6]}}
    refused(ConfigError, "elasticity must not be a section", config=elastic, **call)
    wrong = ds_config({**gear, "batch_size": BATCH})
    refused(ConfigError, "batch_size", config=wrong, **call)


def computing_in_bf16(gear: dict[str, Any]) -> None:
    fields = {name: dict(gear["fields"][name]) for name in gear["fields"]}
    fields["observation"] = {**fields["observation"], "normalize": "mean_std", "as": "engine"}
    engine = plain(ds_config({**gear, "fields": fields}, bf16={"enabled": True}), deepspeed_gear.initialize)[
        0
    ]
    batch = engine.gear_sample()
    assert batch["observation"].dtype == torch.bfloat16
    assert batch["reward"].dtype == torch.float32
    assert batch["action"].dtype == torch.float32
    train(engine, 2)
    engine.destroy()


def evaluating(gear: dict[str, Any], out: str) -> None:
    for prefetch, unit in ((0, "trajectory"), (2, "step")):
        section = {**gear, "prefetch": prefetch, "sampler": {"kind": "uniform", "unit": unit}}
        engine = plain(ds_config(section), deepspeed_gear.initialize)[0]
        seen = [train(engine, 2)[0]]
        for number in range(2):  # two whole passes, training between them
            passed = joined([record(batch, NAMES) for batch in engine.gear_iterator("eval")])
            dump(out, f"eval.{unit}.{number}", passed)
            seen.append(train(engine, 2)[0])
        next(engine.gear_iterator("eval"))  # a pass that is given up
        seen.append(train(engine, 2)[0])
        dump(out, f"train.{unit}", joined(seen))
        engine.destroy()


def reporting(gear: dict[str, Any], out: str) -> None:
    monitor = {"enabled": True, "output_path": out, "job_name": "csv"}
    monitors = {"csv_monitor": monitor, "tensorboard": {**monitor, "job_name": "tensorboard"}}
    config = ds_config({**gear, "prefetch": 1}, 3, **monitors, steps_per_print=2)
    engine, lines = plain(config, deepspeed_gear.initialize)[0], Lines()
    logging.getLogger("deepspeed_gear").addHandler(lines)
    train(engine, 4)
    logging.getLogger("deepspeed_gear").removeHandler(lines)
    starts = ["gear: step 2: ", "gear: step 4: "] if rank() == 0 else []
    assert [text[: len(starts[0])] for text in lines.texts] == starts, lines.texts
    assert all(" samples/s, " in text for text in lines.texts)
    assert engine.gear.progress().num_samples == 4 * BATCH, "of both ranks, and the log's periods are its own"
    engine.destroy()


def main(wanted: dict[str, Any]) -> None:
    gear, out = wanted["gear"], wanted["out"]
    prefix = gear["shared_memory"]["prefix"]
    attaching(gear)
    enabling(gear, out)
    computing_in_bf16(gear)
    evaluating(gear, out)
    reporting(gear, out)
    # The program ends without destroy while a thread prefetches.
    engine = plain(ds_config({**gear, "prefetch": 3}), deepspeed_gear.initialize)[0]
    train(engine, 1)
    assert shared_files(prefix) == []
    assert np.isfinite(engine.gear.take_metrics()["sample_ms"])


if __name__ == "__main__":
    main(task())
