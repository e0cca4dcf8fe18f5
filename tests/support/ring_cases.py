"""Sections, trajectories and checks for tables in the memory of one device, here the host's."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_gear import DeviceReplay, Replay
from deepspeed_gear.ops.records import Slot, SlotState

WINDOWS = {
    "observation": {"offset": -3, "length": 5, "normalize": "mean_std"},
    "action": {"offset": -3, "length": 5, "align": "right", "pad": "edge"},
    "following": {"column": "observation", "offset": 1},
    "return_to_go": {},
    "timestep": {"offset": -3, "length": 5},
}
COLUMNS = {
    "observation": {"dtype": "float32", "shape": [3], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "float32", "shape": [2], "role": "action"},
    "reward": {"dtype": "float32", "role": "reward"},
    "terminated": {"dtype": "bool", "role": "terminated"},
    "truncated": {"dtype": "bool", "role": "truncated"},
    "task": {"dtype": "int64", "rows": "1"},
}
PRIORITIZED = {"kind": "prioritized", "unit": "step", "beta": {"linear": [0.2, 1.0, 7]}}
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform steps": {"kind": "uniform", "unit": "step"},
    "trajectories": {"kind": "uniform", "stratified": True},
    "by length": {"kind": "length"},
    "prioritized": PRIORITIZED,
    "by the table": {**PRIORITIZED, "normalize": "table", "anchors": {"every": 2}},
    "not normalized": {**PRIORITIZED, "normalize": None, "stratified": True},
    "prioritized trajectories": {"kind": "prioritized", "initial": 2.5, "normalize": "table"},
}


def on_device(section: dict[str, Any], **table: Any) -> dict[str, Any]:
    """Put the table of a section on devices."""
    (name, options), *_ = section.get("tables", {"main": {"data": section.get("data")}}).items()
    rest = {key: value for key, value in section.items() if key not in ("data", "tables")}
    return {**rest, "tables": {name: {**options, "placement": "device", **table}}}


def on_host(section: dict[str, Any]) -> dict[str, Any]:
    """Put the tables of a section into host memory."""
    made = copy.deepcopy(section)
    for table in made["tables"].values():
        for option in ("placement", "num_envs", "rows"):
            table.pop(option, None)
    return made


def online(sampler: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Make the section of a table to which trajectories, or steps of `num_envs`, are added."""
    table = {"capacity_steps": 60, "max_length": 6, "remove": "fifo", "placement": "device"}
    table |= {"schema": {"columns": COLUMNS}, **options.pop("table", {})}
    fields = {
        "observation": {"offset": -1, "length": 2},
        "following": {"column": "observation", "offset": "n_step"},
        "action": {},
        "reward": {},
        "task": {},
        **({} if table.get("num_envs") else {"return_to_go": {}}),
    }
    section = {
        "tables": {"main": table},
        "sampler": sampler or SAMPLERS["uniform steps"],
        "batch_size": 32,
    }
    return {**section, "fields": fields, "n_step": {"n": 3, "gamma": 0.9}, **options}


def trajectories(count: int, steps: int, first: int = 0) -> dict[str, Tensor]:
    """Trajectories whose values say which they are, and which step."""
    number = torch.arange(first, first + count)
    step = number[:, None] * 100 + torch.arange(steps + 1)
    flags = torch.zeros(count, steps, dtype=torch.bool)
    ends = flags.clone()
    ends[:, -1] = number % 2 == 0
    return {
        "observation": step[..., None].float().expand(-1, -1, 3).contiguous(),
        "action": step[:, :-1, None].float().expand(-1, -1, 2).contiguous(),
        "reward": step[:, :-1].float(),
        "terminated": ends,
        "truncated": flags,
        "task": number,
    }


def step_of(
    columns: dict[str, Tensor], step: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A step of each trajectory, and the states after it."""
    rows = {name: values if name == "task" else values[:, step] for name, values in columns.items()}
    return rows, {"observation": columns["observation"][:, step + 1]}


def add_some(replay: DeviceReplay, columns: dict[str, Tensor]) -> None:
    """Add trajectories, or the first step of each where environments add steps."""
    if replay.table.num_envs:
        replay.add_steps_(*step_of(columns))
    else:
        replay.add_(columns)


def stored_slots(replay: DeviceReplay) -> Tensor:
    """Return the records of the stored trajectories. [n, words], int64."""
    slots = replay.table.slots
    return slots[slots[:, Slot.STATE] == SlotState.COMMITTED]


@dataclass
class Pair:
    """A table on a device and the same one in host memory, whose batches must be equal."""

    device: DeviceReplay
    host: Replay

    def add(self, columns: dict[str, Any], table: str | None = None) -> None:
        """Add a trajectory to both."""
        rows = {name: torch.as_tensor(values)[None] for name, values in columns.items()}
        self.device.add_(rows, table=table)
        self.host.add(columns, *([] if table is None else [table]))

    def sample(self) -> Any:
        """Sample from both, and compare."""
        self.batches = self.device.sample(), self.host.sample()
        assert_same(*self.batches)
        return self.batches[0]

    def report(self, values: Tensor) -> None:
        """Report priorities of the batches that were sampled last."""
        for replay, batch in zip((self.device, self.host), self.batches, strict=True):
            replay.update_priorities(batch, values)


@contextlib.contextmanager
def device_and_host(section: dict[str, Any], schemas: Any = None) -> Iterator[Pair]:
    with (
        DeviceReplay(section, "cpu", schemas=schemas) as device,
        Replay(on_host(section), schemas=schemas) as host,
    ):
        yield Pair(device, host)


def assert_rows(batch: Any, number: Tensor) -> None:
    """The windows of `online` are those of steps: number is 100 * trajectory + step. [B], int64."""
    assert torch.equal(batch["action"][:, 0], number.float())
    assert torch.equal(batch["observation"][:, 1, 0], number.float())
    before = torch.where(batch.anchor > 0, number - 1, 0)
    assert torch.equal(batch["observation"][:, 0, 0], before.float())
    ahead = torch.minimum(torch.tensor(3), batch.num_steps - batch.anchor)
    assert torch.equal(batch["following"][:, 0], (number + ahead).float())


def assert_same(got: Any, expected: Any) -> None:
    for name in ("trajectory_id", "anchor", "sample_number", "is_weight", "probability"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    assert set(got) == set(expected)
    for name in expected:
        assert torch.equal(got[name], expected[name]), name
        if name in expected.mask:
            assert torch.equal(got.mask[name], expected.mask[name]), name


def assert_traced(
    made: dict[str, Any],
    step: Callable[..., Tensor],
    turns: int,
    prepare: Callable[[DeviceReplay], object],
) -> None:
    """A step that adds, draws and trains gives the same with torch.compile, in one graph, as
    without.
    """
    torch._dynamo.reset()
    found = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        with DeviceReplay(made, "cpu") as replay:
            prepare(replay)
            batch = replay.new_batch()
            losses = [run(replay, batch, trajectories(3, 4, 3 * turn)) for turn in range(turns)]
            found.append(
                (torch.stack(losses), batch.trajectory_id.clone(), replay.table.state.clone())
            )
    for plain, traced in zip(*found, strict=True):
        assert torch.equal(plain, traced)
