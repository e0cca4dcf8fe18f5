"""`latest` names a checkpoint when all of its files are there; the error of a broken one names a
whole.
"""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from engine_parts import ds_config
from gear_support import SCHEMA, config_of, trajectory
from process_support import CALL, Ranks, call_with_engines, write_call
from torch import nn

import deepspeed_gear
from deepspeed_gear.engine import whole_tags
from deepspeed_gear.errors import GearError

KINDS = ["zero0", "zero1", "zero2", "zero3", "pipeline"]
ENDS = {
    "zero0": 1,
    "zero1": 3,
    "zero2": 3,
    "zero3": 4,
}  # files of DeepSpeed's in a tag of two ranks


def engine_of(kind: str) -> Any:
    """Return an engine of two ranks, whose table rank 0 has filled."""
    gear = config_of(fields={"observation": {}, "action": {}}, timeout_s=60.0)
    if kind == "pipeline":
        gear |= {"pipeline": {"inputs": ["observation"], "labels": ["action"]}}
        layers = [nn.Flatten(), nn.Linear(3, 4), nn.Linear(4, 2)]
        model: nn.Module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
        config = ds_config(gear)
    else:
        model = nn.Linear(3, 2)
        config = ds_config(gear, zero_optimization={"stage": int(kind[-1])})
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config=config, schemas={"main": SCHEMA}
    )
    if dist.get_rank() == 0:
        for number in range(20):
            engine.gear.add(trajectory(number, 5))
    dist.barrier()
    return engine


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def refused(folder: Path, engine: Any, **options: Any) -> str:
    """Return the error of a load, which every rank raises."""
    with pytest.raises(GearError) as caught:
        engine.load_checkpoint(str(folder), **options)
    dist.barrier()
    return str(caught.value)


def checkpoints(folder: Path) -> dict[str, Any]:
    """Save with engines of each kind, damage what they have saved, and load."""
    found: dict[str, Any] = {}
    leads = dist.get_rank() == 0
    for kind in KINDS:
        engine = engine_of(kind)
        at = folder / kind
        engine.save_checkpoint(str(at))  # tag None
        latest = at / "latest"
        assert latest.read_text() == "global_step0"
        engine.save_checkpoint(str(at), "second", None, False)  # save_latest by position
        assert latest.read_text() == "global_step0"
        engine.save_checkpoint(str(at), tag="third", client_state={"mine": 1})
        assert latest.read_text() == "third"
        files = files_in(at / "third")
        listed = json.loads((at / "third" / "gear" / whole_tags.FILE_LIST).read_text())
        assert sorted(listed["files"]) == files
        found[kind] = files
        assert engine.load_checkpoint(str(at))[1]["mine"] == 1
        dist.barrier()
        lost = at / "third" / next(name for name in reversed(files) if "states" in name)
        if leads:
            lost.rename(folder / "away")
        dist.barrier()
        text = refused(at, engine)
        assert str(lost) in text
        assert "no such file" in text
        assert (
            f"the newest whole one in {at} is second: load_checkpoint({str(at)!r}, tag='second')"
            in text
        )
        engine.load_checkpoint(str(at), tag="second")
        if lost.name.endswith("optim_states.pt") and kind != "zero3":
            engine.load_checkpoint(str(at), load_optimizer_states=False)  # the weights are there
        dist.barrier()
        if leads:  # of a replay's table
            (at / "second" / "gear" / "main" / "slots.npy").write_bytes(b"")
            latest.write_text("gone")
        dist.barrier()
        text = refused(at, engine)
        assert re.search(
            f"{at}/gone must be the folder .*`latest` names; .* is global_step0: load", text
        )
        text = refused(at, engine, tag="second")
        assert re.search(
            r"slots.npy must be as it was saved; .*newest whole one .* is global_step0: ", text
        )
        dist.barrier()
        if leads:  # as one that is saved without gear
            (at / "global_step0" / "gear" / whole_tags.FILE_LIST).unlink()
        dist.barrier()
        assert "must be the folder" in refused(at, engine)
        assert "no tag" in refused(at, engine)
        engine.load_checkpoint(str(at), tag="global_step0")
        with pytest.raises(GearError, match="save_dir must"):
            engine.save_checkpoint("")
        engine.destroy()
    return found


def test_latest_names_whole_checkpoints_of_all_kinds_of_engines(tmp_path: Path) -> None:
    for rank in call_with_engines(2, checkpoints, tmp_path):
        assert {kind: len(files) for kind, files in rank.items() if kind in ENDS} == ENDS
        assert sum(name.startswith("layer_") for name in rank["pipeline"]) >= 2


def shared(folder: Path) -> None:
    """A critic shares the replay; its checkpoints hold none."""
    engine = engine_of("zero1")
    model = nn.Linear(3, 2)
    config = ds_config(zero_optimization={"stage": 1})
    critic, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    deepspeed_gear.attach(critic, replay=engine.gear)
    critic.save_checkpoint(str(folder), tag="one")
    assert (folder / "latest").read_text() == "one"
    assert "deepspeed_gear" not in critic.load_checkpoint(str(folder))[1]
    dist.barrier()
    if dist.get_rank() == 0:
        next((folder / "one").glob("*zero_pp_rank_1*")).unlink()
    dist.barrier()
    assert "no such file" in refused(folder, critic)
    engine.destroy()
    critic.save_checkpoint(str(folder), tag="two")  # the replay is closed
    assert (folder / "latest").read_text() == "two"


def test_an_engine_that_shares_a_replay(tmp_path: Path) -> None:
    call_with_engines(2, shared, tmp_path)


def dies_in_its_save(folder: Path) -> None:
    """Rank 1 is killed inside torch.save of the second checkpoint."""
    engine = engine_of("zero1")
    engine.save_checkpoint(str(folder), tag="one")
    plain = torch.save

    def save(content: Any, file: Any, *rest: Any, **options: Any) -> None:
        if dist.get_rank() == 1 and "optim_states" in str(file):
            os.kill(os.getpid(), signal.SIGKILL)
        plain(content, file, *rest, **options)

    torch.save = save
    engine.save_checkpoint(str(folder), tag="two")


def restarts(folder: Path) -> str:
    engine = engine_of("zero1")
    path, _ = engine.load_checkpoint(str(folder))
    text = refused(folder, engine, tag="two")
    engine.destroy()
    return f"{path} {text}"


def test_a_rank_that_dies_in_its_save_leaves_latest_at_a_whole_checkpoint(tmp_path: Path) -> None:
    ranks = Ranks(CALL, 2, write_call(tmp_path, dies_in_its_save, tmp_path / "run"))
    try:
        ended = ranks.processes[1].wait(240)
        assert ended == -signal.SIGKILL
    finally:
        ranks.kill()
    assert (tmp_path / "run" / "two").is_dir()
    assert (tmp_path / "run" / "latest").read_text() == "one"
    for text in call_with_engines(2, restarts, tmp_path / "run"):
        assert "/run/one/" in text
        assert "the newest whole one" in text
