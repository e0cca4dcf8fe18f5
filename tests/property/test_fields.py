"""Fields, windows, derived fields and n-step returns of `Replay.sample` against plain Python."""

import math
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gear_support import config_of
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear import Batch, Column, DatasetWriter, DeviceReplay, Replay, Schema
from deepspeed_gear.config.field_names import N_STEP_NAMES
from deepspeed_gear.config.field_resolution import DERIVED, ESTIMATED
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.schema import DTYPES, FLOATING

BATCH = 24
NEXT = ("after", "next_observation.a")  # a column of next observations, by its role or by its name


class Scene(NamedTuple):
    """A schema, trajectories of it as tensors, and the options of a replay over them."""

    schema: Schema
    trajectories: list[dict[str, torch.Tensor]]
    options: dict[str, Any]


def values(dtype: str, shape: tuple[int, ...], random: np.random.Generator) -> torch.Tensor:
    """Return random values of a dtype, among them its limits."""
    if dtype == "bool":
        return torch.as_tensor(np.asarray(random.random(shape) < 0.5))
    if dtype in FLOATING:
        return torch.as_tensor(random.normal(scale=100, size=shape)).to(DTYPES[dtype])
    limits = torch.iinfo(DTYPES[dtype])
    low, high = (limits.min, limits.max) if limits.bits < 64 else (-(2**52), 2**52)
    found = random.integers(low, high, shape, endpoint=True)
    return torch.as_tensor(np.where(random.random(shape) < 0.2, high, found)).to(DTYPES[dtype])


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    columns = [
        Column("reward", draw(st.sampled_from(["float32", "float64", "int32"])), (), "reward")
    ]
    columns += [Column(flag, "bool", (), flag) for flag in ("terminated", "truncated")]
    for i in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(list(DTYPES)))
        shape = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
        columns.append(
            Column(f"c{i}", dtype, shape, "other", draw(st.sampled_from(["T", "T+1", "1"])))
        )
    if draw(st.booleans()):
        name = draw(st.sampled_from(NEXT))
        dtype = draw(st.sampled_from(list(DTYPES)))
        role = "next_observation" if name == "after" else "observation"
        columns.append(Column(name, dtype, (2,), role))
    schema = Schema(columns)
    trajectories = []
    for steps in draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)):
        rows = {"T": (steps,), "T+1": (steps + 1,), "1": ()}
        found = {c.name: values(c.dtype, (*rows[c.rows], *c.shape), random) for c in schema}
        last = np.arange(steps) == steps - 1
        found["terminated"] = torch.from_numpy(last & (random.random(steps) < 0.4))
        found["truncated"] = torch.from_numpy(last & (random.random(steps) < 0.4))
        trajectories.append(found)
    options: dict[str, Any] = {"sampler": {"unit": draw(st.sampled_from(["step", "trajectory"]))}}
    options["seed"] = draw(st.integers(0, 100))
    if draw(st.booleans()):
        gamma = draw(st.sampled_from([1.0, 0.99, 0.5, 0.0]))
        options["n_step"] = {"n": draw(st.integers(1, 5)), "gamma": gamma}
    options["fields"] = draw_fields(draw, schema, "n_step" in options)
    return Scene(schema, trajectories, options)


def draw_fields(draw: st.DrawFn, schema: Schema, has_n_step: bool) -> dict[str, dict[str, Any]]:
    fields: dict[str, dict[str, Any]] = {}
    for i in range(draw(st.integers(1, 6))):
        # Those that are estimated have tests of their own (tests/unit/batching/test_advantages.py).
        derived = [name for name in DERIVED if name not in ESTIMATED]
        source = draw(st.sampled_from([*schema.names, *derived]))
        field: dict[str, Any] = {"derived" if source in DERIVED else "column": source}
        column = None if source not in schema else schema[source]  # noqa: SIM401 - a Schema has no get
        own = DERIVED.get(source) or schema[source].dtype
        computed = source in ("timestep", "position")
        if column is None or column.rows != "1":
            follows = has_n_step and (column is None or column.rows == "T+1" or source in NEXT)
            field["offset"] = draw(
                st.integers(-12, 12) | st.sampled_from(["n_step"] * follows or [0])
            )
            if source == "position" or draw(st.booleans()):
                field["length"] = draw(st.integers(1, 12))
                field["align"] = draw(st.sampled_from(["in_place", "left", "right"]))
            pads: list[Any] = ["zero", "edge", 1] if own == "bool" else ["zero", "edge", 7]
            if source != "position":
                field["pad"] = draw(st.sampled_from(pads + [-0.5] * (own in FLOATING)))
        if own != "bool" and not computed and draw(st.integers(0, 3)) == 0:
            field["scale"] = draw(st.sampled_from([0.001, -2.0, 3.0]))
        if not computed and draw(st.integers(0, 3)) == 0:
            field["as"] = draw(st.sampled_from(["float32", "float64"]))
        fields[f"f{i}"] = {"scale": 1.0, **field}
    # Two fields that hold the same are refused by the config.
    held = {
        (f.get("column", f.get("derived")), f.get("offset", 0), f.get("length")): name
        for name, f in fields.items()
    }
    return {name: fields[name] for name in held.values()}


# ---- the oracle ----------------------------------------------------------------------------------


class Oracle:
    """One step at a time, in Python."""

    def __init__(self, scene: Scene, statistics: Any = None) -> None:
        self.scene = scene
        self.statistics = statistics
        self.n_step = scene.options.get("n_step")

    def returns(self, number: int, anchor: int) -> tuple[float, float, int]:
        """Return n-step return, discount and number of steps of a sample."""
        t = self.scene.trajectories[number]
        total = 0.0
        steps = 0
        for step in range(anchor, min(anchor + self.n_step["n"], len(t["reward"]))):
            total += self.power(steps) * float(t["reward"][step])
            steps += 1
            if t["terminated"][step]:
                return total, 0.0, steps
            if t["truncated"][step]:
                break
        return total, self.power(steps), steps

    def power(self, steps: int) -> float:
        return math.prod([self.n_step["gamma"]] * steps, start=1.0)  # rounded after each factor

    def rows(self, number: int, field: dict[str, Any]) -> torch.Tensor:
        """Return all values of a field's source. [rows, *shape]."""
        t = self.scene.trajectories[number]
        derived = field.get("derived")
        steps = len(t["reward"])
        if derived in ("timestep", "position"):
            return torch.arange(steps)
        if derived == "return_to_go":
            total = 0.0
            found = []
            for reward in reversed(t["reward"].tolist()):
                total += reward
                found.append(total)
            return torch.tensor(found[::-1], dtype=torch.float64).float()
        return t[field["column"]]

    def window(
        self, number: int, anchor: int, field: dict[str, Any]
    ) -> tuple[list[torch.Tensor | None], list[bool]]:
        """Return the value (None: the constant pad) and the mask of every place."""
        rows = self.rows(number, field)
        edge = field.get("pad") == "edge"
        if field.get("column") and self.scene.schema[field["column"]].rows == "1":
            return [rows], [True]
        offset = field["offset"]
        if offset == "n_step":  # row t of next observations is the state after step t
            offset = self.returns(number, anchor)[2] - (field.get("column") in NEXT)
        wanted = [anchor + offset + i for i in range(field.get("length") or 1)]
        real = [row for row in wanted if 0 <= row < len(rows)]
        if not real:
            nearest = rows[0 if wanted[0] < 0 else -1]
            return [nearest if edge else None] * len(wanted), [False] * len(wanted)
        before = {
            "in_place": sum(row < 0 for row in wanted),
            "left": 0,
            "right": len(wanted) - len(real),
        }
        front = before[field.get("align", "in_place")]
        behind = len(wanted) - len(real) - front
        pads = (
            [rows[real[0]] if edge else None] * front,
            [rows[real[-1]] if edge else None] * behind,
        )
        mask = [False] * front + [True] * len(real) + [False] * behind
        return [*pads[0], *(rows[row] for row in real), *pads[1]], mask

    def convert(
        self, value: torch.Tensor, field: dict[str, Any], target: torch.dtype
    ) -> torch.Tensor:
        if field["scale"] == 1.0 and not field.get("normalize"):
            return value.to(target)
        shift, gain = (torch.as_tensor(x, dtype=torch.float64) for x in self.affine(field))
        found = (value.double() - shift) * gain
        return (
            found.float().to(target)
            if target in (torch.float16, torch.bfloat16)
            else found.to(target)
        )

    def affine(self, field: dict[str, Any]) -> tuple[Any, Any]:
        if not field.get("normalize"):
            return 0.0, field["scale"]
        known = self.statistics[field["column"]]
        if field["normalize"] == "mean_std":
            middle = np.asarray(known.mean)
            spread = np.asarray(known.std)
        else:
            middle = known.min + (known.max - known.min) / 2
            spread = (known.max - known.min) / 2
        return middle, field["scale"] / np.where(known.max > known.min, spread, 1.0)

    def check(self, batch: Batch) -> None:
        """Check every field and mask of a batch, bit for bit, and what is of n steps."""
        samples = list(zip(batch.trajectory_id.tolist(), batch.anchor.tolist(), strict=True))
        for name, field in self.scene.options["fields"].items():
            target = batch[name].dtype
            assert target == self.dtype(field)
            for i, (number, anchor) in enumerate(samples):
                found = batch[name][i]
                mask = batch.mask[name][i]
                wanted, real = self.window(number, anchor, field)
                if field.get("length") is None:
                    found = found[None]
                    mask = mask[None]
                assert mask.tolist() == real
                pad = field.get("pad", "zero")
                constant = torch.zeros_like(found[0]) + (0 if isinstance(pad, str) else pad)
                parts = [constant if v is None else self.convert(v, field, target) for v in wanted]
                if field.get("derived") == "position":
                    parts = list(torch.arange(len(wanted)))
                assert torch.equal(found, torch.stack([p.to(target) for p in parts])), (
                    name,
                    field,
                    i,
                )
        self.check_n_step(batch)

    def dtype(self, field: dict[str, Any]) -> torch.dtype:
        if "as" in field:
            return DTYPES[field["as"]]
        derived = DERIVED.get(str(field.get("derived")))
        own = derived or self.scene.schema[field["column"]].dtype
        converted = field["scale"] != 1.0 or field.get("normalize")
        return (
            torch.float32
            if own == "float64" or (converted and own not in FLOATING)
            else DTYPES[own]
        )

    def check_n_step(self, batch: Batch) -> None:
        """Check n-step returns, discounts and steps."""
        if self.n_step is None:
            assert not set(N_STEP_NAMES) & set(batch)
            return
        wanted = [
            self.returns(n, a)
            for n, a in zip(batch.trajectory_id.tolist(), batch.anchor.tolist(), strict=True)
        ]
        for name, column in zip(N_STEP_NAMES, zip(*wanted, strict=True), strict=True):
            exact = torch.tensor(column, dtype=torch.float64)
            assert torch.equal(batch[name], exact.to(batch[name].dtype)), name
        assert batch["return_n"].dtype == batch["discount"].dtype == torch.float32


@settings(max_examples=120)  # of two batches of 24 samples of up to 6 fields
@given(scene=scenes())
def test_fields(scene: Scene) -> None:
    oracle = Oracle(scene)
    capacity = {"capacity_steps": 100, "capacity_trajectories": 10}
    section = config_of(tables={"main": capacity}, batch_size=BATCH, **scene.options)
    with Replay(section, schemas={"main": scene.schema}) as replay:
        for trajectory in scene.trajectories:
            replay.add(trajectory)
        for _ in range(2):
            oracle.check(replay.sample())


@settings(max_examples=40)
@given(scene=scenes(), in_memory=st.booleans(), normalize=st.sampled_from(["mean_std", "min_max"]))
def test_normalised_fields_of_data_sets(scene: Scene, in_memory: bool, normalize: str) -> None:
    fields: dict[str, Any] = {}
    for i, (name, field) in enumerate(scene.options["fields"].items()):
        suits = "column" in field and scene.schema[field["column"]].dtype != "bool"
        fields[name] = {**field, "normalize": normalize} if suits and i % 2 == 0 else field
    scene = scene._replace(options={**scene.options, "fields": fields})
    with TemporaryDirectory() as folder:
        with DatasetWriter(Path(folder) / "d", scene.schema) as writer:
            for trajectory in scene.trajectories:
                bits = {
                    n: v.view(torch.uint16)
                    for n, v in trajectory.items()
                    if v.dtype == torch.bfloat16
                }
                writer.add({name: value.numpy() for name, value in {**trajectory, **bits}.items()})
        data = {"path": f"{folder}/d", "load": "memory" if in_memory else "mmap"}
        section = {
            k: v for k, v in config_of(batch_size=BATCH, **scene.options).items() if k != "tables"
        }
        with Replay({**section, "data": data}) as replay:
            Oracle(scene, replay.datasets["main"].statistics).check(replay.sample())


@pytest.mark.parametrize("anchors", ["fits", "start", "end", {"every": 3}])
def test_anchors_of_a_config(anchors: Any) -> None:
    """No window of an anchor that fits is padded; the others stand where they say."""
    places: dict[str, Callable[[int], set[int]]] = {
        "fits": lambda steps: set(
            range(2, steps - 1)
        ),  # x: [-2, +2), observation: [0, +3) of T + 1 rows
        "start": lambda _: {0},
        "end": lambda steps: {steps - 1},
        "every": lambda steps: set(range(0, steps, 3)),
    }
    fields = {"x": {"offset": -2, "length": 4}, "observation": {"length": 3}}
    sampler = {"unit": "step", "anchors": anchors}
    section = config_of(fields=fields, sampler=sampler, batch_size=400)
    schema = Schema(
        [Column("observation", "float32", (2,), "observation", "T+1"), Column("x", "int64")]
    )
    with Replay(section, schemas={"main": schema}) as replay:
        lengths = [1, 3, 4, 7, 12]
        for steps in lengths:
            replay.add({"observation": np.zeros((steps + 1, 2), np.float32), "x": np.arange(steps)})
        batch = replay.sample()
        rule = places[anchors if isinstance(anchors, str) else "every"]
        wanted = {(number, a) for number, steps in enumerate(lengths) for a in rule(steps)}
        assert set(zip(batch.trajectory_id.tolist(), batch.anchor.tolist(), strict=True)) == wanted
        if anchors == "fits":
            assert batch.mask["x"].all()
            assert batch.mask["observation"].all()


# ---- the state that an n-step return bootstraps from ---------------------------------------------

FLAGS = [
    Column(name, dtype, (), name)
    for name, dtype in (("reward", "float32"), ("terminated", "bool"), ("truncated", "bool"))
]
FORMS = {
    "T+1": [Column("observation", "float32", (2,), "observation", "T+1")],
    "role": [Column("after", "float32", (2,), "next_observation")],
    "name": [Column("next_observation.a", "float32", (2,), "observation")],
    "none": [Column("observation", "float32", (2,), "observation")],
}


def n_step_replay(form: str, placement: str, **sampler: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a replay and an episode of 5 steps whose state t is t."""
    schema = Schema([*FLAGS, *FORMS[form]])
    table = {"capacity_steps": 200, "max_length": 7, "remove": "fifo", "placement": placement}
    section = {
        "batch_size": 16,
        "tables": {"main": table},
        "sampler": {"unit": "step", **sampler},
        "n_step": {"n": 3, "gamma": 0.5},
        "fields": {"next": {"column": FORMS[form][0].name, "offset": "n_step"}, "reward": {}},
    }
    states = torch.arange(6.0)[:, None].repeat(1, 2)
    ends = torch.arange(5) == 4
    rows = {"observation": states, "after": states[1:], "next_observation.a": states[1:]}
    episode = {**rows, "reward": torch.ones(5), "terminated": ends, "truncated": ends & False}
    options = {"schemas": {"main": schema}}
    made = (
        Replay(section, **options)
        if placement == "host"
        else DeviceReplay(section, "cpu", **options)
    )
    return made, {name: episode[name] for name in schema.names}


@pytest.mark.parametrize("form", ["T+1", "role", "name"])
def test_the_state_after_the_steps_that_are_summed_on_a_device(form: str) -> None:
    replay, episode = n_step_replay(form, "device")
    with replay:
        replay.add_({name: value[None] for name, value in episode.items()})
        batch = replay.sample()
        after = (batch.anchor + 3).clamp(max=5)
        assert torch.equal(batch["next"], after[:, None].float().repeat(1, 2))
        assert batch.mask["next"].all()
        assert torch.equal(batch["discount"], torch.where(after == 5, 0, torch.tensor(0.125)))


@pytest.mark.parametrize("placement", ["host", "device"])
def test_a_column_without_that_state_is_refused(placement: str) -> None:
    text = r"next\.column must have a row after the last step .*role next_observation"
    with pytest.raises(ConfigError, match=text):
        n_step_replay("none", placement)


def test_anchors_that_fit_have_that_state() -> None:
    """Of a column of next observations every step fits that has n steps from it on."""
    replay, episode = n_step_replay("role", "host", anchors="fits")
    with replay:
        replay.add(episode)
        assert np.unique(replay.sample().anchor).tolist() == [0, 1, 2]
