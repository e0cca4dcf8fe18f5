"""Tables in the memory of each rank's device, with several replicas: of a CPU, or two
of one GPU.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_parts import BATCH, Model, ds_config
from gear_support import SCHEMA, config_of, lengths_of, write_dataset
from process_support import call_on_ranks

import deepspeed_gear
from deepspeed_gear import DeviceReplay, Replay
from deepspeed_gear.errors import GearError
from deepspeed_gear.ops.records import Resolution

TABLE = {"capacity_steps": 100, "max_length": 4, "remove": "fifo", "placement": "device"}
ON_GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.timeout(900)])


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_replicas_draw_from_their_own_tables(device: str, tmp_path: Path) -> None:
    """And an engine trains from them, and goes on from a checkpoint."""
    data = write_dataset(tmp_path / "set", lengths_of(30))
    fields = {"observation": {"offset": -3, "length": 4}, "task": {}}
    options = {"fields": fields, "batch_size": 24, "gradient_accumulation_steps": 2}
    prioritized = {"kind": "prioritized", "unit": "step"}
    added = {**config_of(**options, sampler=prioritized), "tables": {"main": TABLE}}
    shared = config_of(data, sampler={"kind": "uniform", "unit": "step"}, **options)
    own = {"observation": {"offset": -1, "length": 4}, "action": {}, "reward": {}, "code": {}}
    engine = {**config_of(fields=own, sampler=prioritized), "tables": {"main": TABLE}}
    place = {} if device == "cpu" else {"LOCAL_RANK": "0"}
    given = device, shared, added, engine if device == "cpu" else None, tmp_path
    call_on_ranks(2, replicas, *given, timeout_s=400, **place)


def replicas(device: str, shared: Any, added: Any, engine: Any, out: Path) -> None:
    batches_of_a_data_set(device, shared)
    tables_of_their_own(device, added, out)
    if engine is not None:
        training(engine, out)


def columns(codes: torch.Tensor, device: str) -> dict[str, torch.Tensor]:
    """Return trajectories of this rank. [n, T + 1] -> [n, T or T + 1, ...] each."""
    count = len(codes)
    steps = codes.shape[1] - 1
    flags = torch.zeros(count, steps, dtype=torch.bool)
    action = codes[:, :steps, None].float()
    made = {
        "observation": codes[..., None].float().expand(-1, -1, 3),
        "action": action.expand(-1, -1, 2),
        "reward": codes[:, :steps].float(),
        "terminated": flags,
        "truncated": flags,
        "code": codes[:, :steps],
        "task": torch.full((count,), dist.get_rank()),
    }
    return {name: values.contiguous().to(device) for name, values in made.items()}


def gathered(value: Any) -> list[Any]:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def batches_of_a_data_set(device: str, shared: dict[str, Any]) -> None:
    """They are those of a table in shared memory."""
    rest = {key: value for key, value in shared.items() if key != "data"}
    on_device = {**rest, "tables": {"main": {"data": shared["data"], "placement": "device"}}}
    with Replay(shared) as host, DeviceReplay(on_device, device) as own:
        for _ in range(12):
            expected = host.sample()
            got = own.sample()
            assert torch.equal(got.trajectory_id.cpu(), expected.trajectory_id)
            assert torch.equal(got.sample_number.cpu(), expected.sample_number)
            assert torch.equal(got["observation"].cpu(), expected["observation"])


def tables_of_their_own(device: str, added: dict[str, Any], out: Path) -> None:
    """Each rank adds, and draws alone; what all have saved is loaded on one replica."""
    numbers: list[int] = []
    rank = dist.get_rank()
    world = dist.get_world_size()
    with DeviceReplay(added, device, schemas={"main": SCHEMA}) as replay:
        replay.add_(columns(rank * 1000 + torch.arange(20).view(4, 5), device))
        for _ in range(6):
            batch = replay.sample()
            assert set(batch["task"].tolist()) == {rank}
            numbers += batch.resolutions[:, Resolution.SAMPLE_NUMBER].tolist()
            replay.update_priorities_(batch, torch.rand(batch.num_samples, device=device) + rank)
        replay.save(out / "saved")
        held = sum(gathered(replay.num_steps))
    every = sorted(number for part in gathered(numbers) for number in part)
    assert every == list(range(len(every))), "the ranks' samples have numbers of their own"
    alone = [dist.new_group([i]) for i in range(world)][rank]
    with DeviceReplay(added, device, process_group=alone, schemas={"main": SCHEMA}) as one:
        one.load(out / "saved")
        assert one.num_steps == held
        assert min(one.sample().resolutions[:, Resolution.SAMPLE_NUMBER].tolist()) == len(every)
    dist.barrier()


def engine_of(section: dict[str, Any]) -> Any:
    model = Model(12)
    options = {
        "model": model,
        "model_parameters": model.parameters(),
        "config": ds_config(section, 2),
    }
    return deepspeed_gear.initialize(**options, schemas={"main": SCHEMA})[0]


def train(engine: Any, batches: int) -> np.ndarray:
    seen = []
    for _ in range(batches * 2):
        batch = engine.gear_sample()
        engine.backward(engine(batch))
        engine.step()
        engine.gear_update_priorities(batch, batch["reward"] + 1)
        seen.append(batch["code"].numpy().copy())
    return np.stack(seen)


def training(section: dict[str, Any], out: Path) -> None:
    """An engine trains from its devices, and goes on from a checkpoint."""
    engine = engine_of(section)
    folder = str(out / "checkpoints")
    rank = dist.get_rank()
    assert isinstance(engine.gear, DeviceReplay)
    assert engine.gear_sample == engine.gear.sample
    for number in range(6):
        engine.gear.add_(columns(rank * 1000 + number * 10 + torch.arange(5).view(1, 5), "cpu"))
    first = train(engine, 3)
    assert first.shape == (6, BATCH // 4)
    assert set((first // 1000).flatten().tolist()) == {rank}
    engine.save_checkpoint(folder)
    expected = train(engine, 3)
    engine.destroy()
    other = engine_of(section)
    other.load_checkpoint(folder)
    assert np.array_equal(train(other, 3), expected)
    dist.barrier()
    if rank == 0:
        file = next(Path(folder).glob("*/gear/main/shard-1/content.pt"))
        with file.open("rb+") as handle:
            handle.seek(file.stat().st_size // 2)
            handle.write(b"\xff\x00\xff\x00")
    dist.barrier()
    with pytest.raises(GearError, match=r"shard-1/content\.pt must be as it was saved"):
        other.load_checkpoint(folder)
    other.destroy()
