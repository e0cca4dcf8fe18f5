"""Engines on several ranks: the ways to one with a replay, what it hands out, its end, its
checkpoints.
"""

import contextlib
import csv
import io
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import batch_records
import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from batch_records import SAMPLES, Arrays, assert_same, in_order, joined, record, stacked
from engine_parts import BATCH, Lines, Model, ds_config
from gear_support import SCHEMA, STEP, config_of, lengths_of, shared_files, trajectory
from process_support import call_with_engines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import deepspeed_gear
from deepspeed_gear.cli.main import main
from deepspeed_gear.data.splits import split_of
from deepspeed_gear.errors import ConfigError, GearError, StoreError
from deepspeed_gear.replay.run_reading import find_run

NAMES = (*SAMPLES, "epoch", "valid")  # that are recorded of a batch


def train(engine: Any, global_batches: int) -> tuple[Arrays, list[float]]:
    """Train; return what this rank saw, a row per global batch, and the losses."""
    rows = []
    losses = []
    for _ in range(global_batches):
        seen = []
        for _ in range(engine.gradient_accumulation_steps()):
            batch = engine.gear_sample()
            seen.append(record(batch, NAMES))
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        rows.append(joined(seen))
    return stacked(rows), losses


# global batches before and after a save; micro batches
BEFORE = 3
AFTER = 5
ACCUMULATION = 3
FIELDS = {
    "observation": {"offset": -1, "length": 4},
    "action": {},
    "reward": {},
    "code": {},
    "task": {},
}
plain_initialize = deepspeed.initialize


def section(data: Path, **options: Any) -> dict[str, Any]:
    fields = {**FIELDS, "scaled": {"column": "observation", "normalize": "mean_std"}}
    return config_of(data, fields=fields, seed=3, timeout_s=60.0, **options)


def alone(config: dict[str, Any], batches: int) -> Arrays:
    return batch_records.alone({**config, "batch_size": BATCH}, batches, NAMES)


def check_rows(seen: Arrays) -> None:
    """Check that the batches hold the rows of the trajectories and steps that they name."""
    assert (seen["code"] == seen["trajectory_id"] * STEP + seen["anchor"]).all()
    assert (seen["action"][..., 0] == seen["code"]).all()
    assert (
        seen["observation"][..., 1, 0] == seen["code"]
    ).all()  # the window begins one step before
    assert (seen["mask.observation"][..., 0] == (seen["anchor"] > 0)).all()


def engine_of(
    config: dict[str, Any] | str, initialize: Any = deepspeed_gear.initialize, **options: Any
) -> tuple[Any, ...]:
    model = Model(12)
    return tuple(
        initialize(model=model, model_parameters=model.parameters(), config=config, **options)
    )


def refused(kind: type[Exception], text: str, function: Any, **call: Any) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        function(**call)


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(
    dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path, Any]:
    """A run of 2 ranks that has saved in the middle of an epoch and gone on: its gear, saves, and
    results.

    Engine "data" reads a data set; engine "table" has a table that rank 0 adds to, under way as
    well.
    """
    folder = tmp_path_factory.mktemp("saved")
    sampler = {"kind": "epoch", "unit": "trajectory"}
    table = config_of(fields=FIELDS, seed=3, timeout_s=60.0, prefetch=2, sampler=sampler)
    gear = {"data": section(dataset, sampler=sampler, prefetch=2), "table": table}
    return gear, folder, call_with_engines(2, save, gear, folder)


def test_a_run_that_saves_goes_on_undisturbed(saved: tuple[dict[str, Any], Path, Any]) -> None:
    gear, _, ran = saved
    wanted = alone(gear["data"], BEFORE + AFTER)
    found = joined([in_order([rank["data"][part] for rank in ran]) for part in (0, 1)])
    assert_same(found, wanted, "data")
    first_epoch = wanted["trajectory_id"].ravel()[wanted["epoch"].ravel() == 0]
    assert BEFORE * BATCH % len(first_epoch), "the test must save in the middle of an epoch"
    assert len(first_epoch) == len(np.unique(first_epoch)), "an epoch visits each item once"
    table = in_order([rank["table"][1] for rank in ran])
    check_rows(table)
    assert table["trajectory_id"].max() >= 20, "what was added under way is sampled"


@pytest.mark.parametrize(("ranks", "late"), [(1, False), (4, False), (2, True)])
def test_a_checkpoint_continues_on_another_number_of_ranks(
    ranks: int, late: bool, saved: tuple[dict[str, Any], Path, Any]
) -> None:
    """Exactly the batches that would have come, with the table's content as it was.

    `test_how_to_pages.py` continues universal checkpoints.
    """
    gear, folder, ran = saved
    found = call_with_engines(ranks, attach_late if late else load, gear, folder)
    for name in gear:
        wanted = in_order([rank[name][1] for rank in ran])
        assert_same(in_order([rank[name] for rank in found]), wanted, name)


def schemas_of(name: str) -> dict[str, Any] | None:
    return {"main": SCHEMA} if name == "table" else None


def made(name: str, gear: dict[str, Any]) -> Any:
    config = ds_config(gear[name], ACCUMULATION, zero_optimization={"stage": 0})
    return engine_of(config, schemas=schemas_of(name))[0]


def add(engine: Any, numbers: range) -> None:
    if dist.get_rank() == 0:
        for number in numbers:
            engine.gear.add(trajectory(number, 2 + number % 5))
    dist.barrier()


def save(gear: dict[str, Any], folder: Path) -> dict[str, list[Arrays]]:
    """Train, save and train on; return what this rank has seen before and after, by engine."""
    found = {}
    for name in gear:
        engine = made(name, gear)
        if name == "table":
            add(engine, range(20))
        found[name] = [train(engine, BEFORE)[0]]
        if name == "table":
            add(engine, range(20, 30))
            if dist.get_rank() == 0:
                engine.gear.remove([3, 4])
            dist.barrier()
        engine.save_checkpoint(str(folder / name), client_state={"mine": 5})
        found[name].append(train(engine, AFTER)[0])
        engine.destroy()
    return found


def load(gear: dict[str, Any], folder: Path) -> dict[str, Arrays]:
    found = {}
    for name in gear:
        engine = made(name, gear)
        if name == "table":
            add(engine, range(50, 53))  # is replaced
        train(engine, 1)  # prefetching is under way
        path, client_state = load_into(engine, folder / name)
        assert path is not None
        assert client_state["mine"] == 5
        assert "deepspeed_gear" not in client_state
        assert engine.global_steps == BEFORE
        if name == "table":
            assert len(engine.gear) == 28
            assert engine.gear.read([29])[0]["code"].tolist() == trajectory(29, 6)["code"].tolist()
        found[name] = train(engine, AFTER)[0]
        engine.destroy()
    return found


def load_into(engine: Any, folder: Path) -> tuple[Any, Any]:
    found: tuple[Any, Any] = engine.load_checkpoint(str(folder), load_optimizer_states=False)
    return found  # optimizer states are of two ranks


def attach_late(gear: dict[str, Any], folder: Path) -> dict[str, Arrays]:
    """Load before the engine is attached, as Trainers do: that is refused unless the checkpoint is
    named.
    """
    found = {}
    for name in gear:
        config = ds_config(gear[name], ACCUMULATION, zero_optimization={"stage": 0})
        engine = engine_of(config, plain_initialize)[0]
        at = str(folder / name)
        schemas = schemas_of(name)
        assert load_into(engine, folder / name)[0] is not None
        call = {"function": deepspeed_gear.attach, "engine": engine, "schemas": schemas}
        text = (
            "checkpoint must be given: this engine has trained or loaded a checkpoint "
            "(global step 3)"
        )
        refused(ConfigError, text, **call)
        refused(GearError, "must name the checkpoint's tag", **call, checkpoint=str(folder))
        differ = f"{at}{'/' * dist.get_rank()}"
        refused(ConfigError, "must be the same on all ranks", **call, checkpoint=differ)
        engine.global_steps += 1
        refused(
            GearError, "that the engine has loaded, of global step 4, got 3", **call, checkpoint=at
        )
        engine.global_steps -= 1
        assert "gear" not in engine.__dict__
        if name == "data":
            deepspeed_gear.attach(engine, checkpoint=False)
            assert int(engine.gear_sample().sample_number.min()) < BATCH
            engine.destroy()
            engine = engine_of(config, plain_initialize)[0]
            load_into(engine, folder / name)
        deepspeed_gear.attach(engine, schemas=schemas, checkpoint=at)
        found[name] = train(engine, AFTER)[0]
        engine.destroy()
    return found


# ---- a life with an engine -----------------------------------------------------------------------


def test_attach_enable_evaluate_report_and_end(dataset: Path, tmp_path: Path) -> None:
    """One launch that ends with exit code 0 although its last engine is not destroyed."""
    gear = section(dataset)
    ran = call_with_engines(2, live, gear, tmp_path)
    assert shared_files(gear["shared_memory"]["prefix"]) == []
    check_evaluation(gear, ran)
    check_metrics(tmp_path / "csv")
    check_tensorboard(tmp_path / "tensorboard")


def check_evaluation(gear: dict[str, Any], ran: list[dict[str, Any]]) -> None:
    lengths = np.array(lengths_of(40))
    kept_back = np.nonzero(split_of(np.arange(40), {"eval": 0.3}))[0]
    assert 0 < len(kept_back) < 40
    assert len(kept_back) % BATCH, "the last batch must have fillers"
    steps = sorted((int(i), step) for i in kept_back for step in range(lengths[i]))
    for unit in ("trajectory", "step"):
        for number in range(2):
            parts = [rank[unit]["passed"][number] for rank in ran]
            seen = in_order([{name: array[None] for name, array in part.items()} for part in parts])
            check_rows(seen)
            ids, anchors = (
                seen[name][seen["valid"]].tolist() for name in ("trajectory_id", "anchor")
            )
            assert not seen["valid"].all()
            if unit == "trajectory":
                assert sorted(ids) == kept_back.tolist()
            else:
                assert sorted(zip(ids, anchors, strict=True)) == steps
        trained = in_order([rank[unit]["trained"] for rank in ran])
        sampler = {"kind": "uniform", "unit": unit}
        assert_same(
            trained, alone({**gear, "sampler": sampler}, 8), f"training beside {unit} evaluation"
        )
        assert not np.isin(trained["trajectory_id"], kept_back).any()


def check_metrics(folder: Path) -> None:
    """One row per optimizer step, written by one rank."""
    for name in ("sample_ms", "wait_ms", "wait_share", "bytes", "padding", "epoch"):
        with (folder / f"Train_Gear_{name}.csv").open() as file:
            head, *rows = list(csv.reader(file))
        assert len(head) == 2
        assert [int(samples) for samples, _ in rows] == [BATCH * step for step in range(1, 5)]
        values = [float(value) for _, value in rows]
        assert np.isfinite(values).all()
        assert name == "epoch" or max(values) > 0, name


def check_tensorboard(folder: Path) -> None:
    events = EventAccumulator(str(folder)).Reload()
    found = [(e.step, e.value) for e in events.Scalars("Train/Gear/sample_ms")]
    assert [step for step, _ in found] == [BATCH * step for step in range(1, 5)]
    assert all(value > 0 for _, value in found)


def live(gear: dict[str, Any], out: Path) -> dict[str, Any]:
    attaching(gear)
    enabling(gear, out)
    computing_in_bf16(gear)
    found = {
        unit: evaluating(gear, ahead, unit) for ahead, unit in ((0, "trajectory"), (2, "step"))
    }
    reporting(gear, str(out))
    # The program ends without destroy while a thread prefetches.
    engine = engine_of(ds_config({**gear, "prefetch": 3}))[0]
    train(engine, 1)
    assert shared_files(gear["shared_memory"]["prefix"]) == []
    assert np.isfinite(engine.gear.take_metrics()["sample_ms"])
    return found


def attaching(gear: dict[str, Any]) -> None:
    attach = deepspeed_gear.attach
    engine = engine_of(ds_config(), plain_initialize)[0]
    refused(ConfigError, "gear must be a section", attach, engine=engine)
    refused(ConfigError, "must be a DeepSpeed engine", attach, engine=Model(12))
    assert "gear" not in engine.__dict__
    assert attach(engine, config=gear) is engine
    replay = engine.gear
    engine_class = type(engine)
    assert attach(engine, config=gear).gear is replay
    assert type(engine) is engine_class
    train(engine, 1)

    of_config = engine_of(ds_config(gear), plain_initialize)[
        0
    ]  # a section not asked for does no harm
    assert "gear" not in of_config.__dict__
    assert attach(of_config).gear_sample().num_samples == BATCH // 2
    of_config.destroy()

    second = engine_of(ds_config(), plain_initialize)[0]
    attach(second, replay=replay)
    assert second.gear is replay
    numbers = [int(e.gear_sample().sample_number.min()) // BATCH for e in (engine, second, engine)]
    assert numbers == [1, 2, 3], f"two engines share one stream, got {numbers}"
    other = engine_of(ds_config(accumulation=2), plain_initialize)[0]
    place = f"(data {dist.get_rank()} of 2; global batch {BATCH} = micro batch 3"
    refused(
        ConfigError,
        f"must belong to an engine like this one {place}",
        attach,
        engine=other,
        replay=replay,
    )
    refused(ConfigError, "must not be called", engine.set_train_batch_size, train_batch_size=24)
    second.destroy()
    assert engine.gear_sample().num_samples == BATCH // 2, (
        "destroying a guest has closed the replay"
    )
    engine.destroy()
    engine.destroy()
    refused(StoreError, "must be open", engine.gear_sample)


def enabling(gear: dict[str, Any], out: Path) -> None:
    deepspeed_gear.enable()
    deepspeed_gear.enable()
    path = out / f"ds_config.{dist.get_rank()}.json"
    path.write_text(json.dumps(ds_config(gear)))
    engine, _, batches, _ = engine_of(str(path), deepspeed.initialize)
    without = engine_of(ds_config(), deepspeed.initialize)[0]
    assert "gear" not in without.__dict__
    deepspeed_gear.disable()
    deepspeed_gear.disable()
    assert deepspeed.initialize is plain_initialize
    for number in range(12):  # more than an epoch of 40 trajectories
        assert int(next(batches).sample_number.min()) // BATCH == number
    engine.destroy()
    refused(StoreError, "must be open", lambda: next(batches))
    refused(ConfigError, "gear must be a section", engine_of, config=ds_config())
    data = torch.utils.data.TensorDataset(torch.zeros(4))
    text = "training_data must not be given"
    refused(ConfigError, text, engine_of, config=ds_config(gear), training_data=data)
    elastic = {**ds_config(gear), "elasticity": {"enabled": True, "micro_batch_sizes": [6]}}
    refused(ConfigError, "elasticity must not be a section", engine_of, config=elastic)
    wrong = ds_config({**gear, "batch_size": BATCH})
    refused(ConfigError, "batch_size", engine_of, config=wrong)


def computing_in_bf16(gear: dict[str, Any]) -> None:
    fields = {name: dict(gear["fields"][name]) for name in gear["fields"]}
    fields["observation"] = {**fields["observation"], "normalize": "mean_std", "as": "engine"}
    engine = engine_of(ds_config({**gear, "fields": fields}, bf16={"enabled": True}))[0]
    batch = engine.gear_sample()
    assert batch["observation"].dtype == torch.bfloat16
    assert batch["reward"].dtype == torch.float32
    assert batch["action"].dtype == torch.float32
    train(engine, 2)
    engine.destroy()


def evaluating(gear: dict[str, Any], prefetch: int, unit: str) -> dict[str, Any]:
    """Train and evaluate in turns; return two whole passes, and what was trained."""
    config = {**gear, "prefetch": prefetch, "sampler": {"kind": "uniform", "unit": unit}}
    engine = engine_of(ds_config(config))[0]
    trained = [train(engine, 2)[0]]
    passed = []
    for _ in range(2):
        passed.append(joined([record(batch, NAMES) for batch in engine.gear_iterator("eval")]))
        trained.append(train(engine, 2)[0])
    next(engine.gear_iterator("eval"))  # a pass that is given up
    trained.append(train(engine, 2)[0])
    engine.destroy()
    return {"passed": passed, "trained": joined(trained)}


def reporting(gear: dict[str, Any], out: str) -> None:
    monitor = {"enabled": True, "output_path": out, "job_name": "csv"}
    monitors = {"csv_monitor": monitor, "tensorboard": {**monitor, "job_name": "tensorboard"}}
    config = ds_config({**gear, "prefetch": 1}, 3, **monitors, steps_per_print=2)
    engine = engine_of(config)[0]
    lines = Lines()
    logging.getLogger("deepspeed_gear").addHandler(lines)
    train(engine, 4)
    logging.getLogger("deepspeed_gear").removeHandler(lines)
    starts = ["gear: step 2: ", "gear: step 4: "] if dist.get_rank() == 0 else []
    assert [text[: len(starts[0])] for text in lines.texts] == starts, lines.texts
    assert all(" samples/s, " in text for text in lines.texts)
    assert engine.gear.progress().num_samples == 4 * BATCH, (
        "of both ranks, and the log's periods are its own"
    )
    if dist.get_rank() == 0:
        check_watch(engine.gear)
    dist.barrier()
    engine.destroy()


def check_watch(replay: Any) -> None:
    """`gear watch` beside two ranks that train: both by name, with what they took and wait for."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main(["watch", replay.run, "--once", "--every", "0.1"]) == 0
    assert f"run {replay.run}\n" in shown.getvalue()
    assert "2 of 2 ranks, 0 writers" in shown.getvalue()
    reading = find_run(replay.run).read()
    assert [rank.rank for rank in reading.ranks] == [0, 1]
    assert reading.ranks[0].process == os.getpid()
    assert [rank.batches for rank in reading.ranks] == [4 * 3] * 2
    assert all(rank.lives and rank.wait_s > 0 for rank in reading.ranks)
    assert sum(rank.late_s or 0.0 for rank in reading.ranks) > 0, "one came after the other"
    metrics = replay.take_metrics()
    assert {"late_ms.rank0", "late_ms.rank1", "drawn_per_s.main"} <= set(metrics)
