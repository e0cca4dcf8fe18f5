"""Train an engine per case, one after the other in the same process, and write what each rank sees."""

from __future__ import annotations

import math

import torch
from engine_parts import Model, ds_config, dump, task, train
from gear_support import shared_files

import deepspeed_gear

wanted = task()
for case in wanted["cases"]:
    gear = {**wanted["gear"], "prefetch": case["prefetch"]}
    zero = {"stage": case["zero"], "stage3_param_persistence_threshold": 0}
    config = ds_config(gear, case["accumulation"], zero_optimization=zero)
    model = Model(12)
    engine, *_ = deepspeed_gear.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert engine.zero_optimization_stage() == case["zero"]
    assert shared_files(gear["shared_memory"]["prefix"]) == [], "the store has a name after attach"
    seen, losses = train(engine, wanted["batches"])
    assert all(map(math.isfinite, losses)), losses
    assert engine.global_steps == wanted["batches"]
    dump(wanted["out"], case["name"], seen)
    engine.destroy()

torch.distributed.destroy_process_group()  # else its threads live on into the end of the interpreter
