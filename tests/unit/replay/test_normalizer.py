"""The normalizer: the bits of a batch for values of the store, their reverse, files, refusals, the
page.
"""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import config_of

from deepspeed_gear import Column, Dataset, DatasetWriter, Normalizer, Replay, Schema
from deepspeed_gear.data.stored_values import as_numbers, as_stored
from deepspeed_gear.errors import CheckpointError, ConfigError, DataError, FieldError, ShapeError

SCHEMA = Schema(
    [
        Column("observation", "float32", (3,), "observation", "T+1"),
        Column("pixels", "uint8", (2, 2), "observation", "T+1"),
        Column("force", "float64", (2,)),
        Column("half", "float16", (2,)),
        Column("brain", "bfloat16", (2,)),
        Column("token", "int64", (), "action"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("return", "float64", (), "return", "1"),
    ]
)
FIELDS: dict[str, dict[str, Any]] = {
    "observation": {"normalize": "mean_std"},
    "window": {
        "column": "observation",
        "offset": -1,
        "length": 4,
        "normalize": "min_max",
        "scale": 3.0,
    },
    "pixels": {"scale": 1 / 255, "as": "float16"},
    "raw": {"column": "pixels"},
    "wide": {"column": "pixels", "as": "int32"},
    "force": {"normalize": "mean_std"},
    "force32": {"column": "force", "as": "float32", "normalize": "min_max"},
    "half": {"normalize": "mean_std", "as": "engine"},
    "brain": {"normalize": "quantile"},
    "token": {},
    "tokens": {"column": "token", "normalize": "mean_std"},
    "reward": {"scale": 0.1},
    "terminated": {"as": "float32"},
    "return": {"scale": 0.001, "as": "float32"},
    "return_to_go": {"scale": 0.01},
    "timestep": {},
}
CONSTANT = 2  # element of the observations


def rows_of(number: int, steps: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(number)
    observation = random.normal(5, 3, (steps + 1, 3)).astype(np.float32)
    observation[:, CONSTANT] = 7.3
    reward = random.normal(size=steps).astype(np.float32)
    return {
        "observation": observation,
        "pixels": random.integers(0, 256, (steps + 1, 2, 2), np.uint8),
        "force": random.normal(-1, 1e-3, (steps, 2)),
        "half": random.normal(size=(steps, 2)).astype(np.float16),
        "brain": random.normal(size=(steps, 2)).astype(np.float32),
        "token": random.integers(-(2**40), 2**40, steps),
        "reward": reward,
        "terminated": np.arange(steps) == steps - 1,
        "return": reward.sum(dtype=np.float64),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("normalizer") / "data"
    with DatasetWriter(path, SCHEMA, split={"eval": 0.25}) as writer:
        for number in range(16):
            writer.add(rows_of(number, 3 + number))
    return path


def section(data: Path, /, **options: Any) -> dict[str, Any]:
    given = {
        "batch_size": 32,
        "fields": FIELDS,
        "sampler": {"kind": "uniform", "unit": "step"},
        **options,
    }
    return config_of(data, **given)


def stored(dataset: Dataset, name: str, batch: Any) -> np.ndarray:
    """Return what the data set holds at the samples' anchors. [B, *shape]."""
    column = SCHEMA[FIELDS[name].get("column", name)]
    rows = [dataset.trajectory(i)[column.name] for i in batch.trajectory_id.tolist()]
    at = batch.anchor.tolist()
    return np.stack([r if column.rows == "1" else r[t] for r, t in zip(rows, at, strict=True)])


def test_values_of_the_store_become_the_bits_of_a_batch(data: Path) -> None:
    given = section(data, n_step={"n": 2, "gamma": 0.9})
    with Replay(given, engine_dtype=torch.bfloat16) as replay:
        batch = replay.sample()
        dataset = Dataset.open(data)
        for name in sorted({*FIELDS} - {"window", "return_to_go", "timestep"}):
            values = stored(dataset, name, batch)
            got = replay.normalize(name, values)
            assert isinstance(got, np.ndarray)
            assert got.tobytes() == _array(batch[name]).tobytes(), name
            numbers = torch.from_numpy(as_numbers(values, SCHEMA[FIELDS[name].get("column", name)]))
            given_tensor = replay.normalize(name, numbers)
            assert given_tensor.dtype == batch[name].dtype
            assert given_tensor.equal(batch[name]), name
        steps = torch.stack([torch.from_numpy(stored(dataset, "observation", batch))] * 4, 1)
        assert replay.normalize("window", steps)[:, 1].equal(batch["window"][:, 1])
        places = zip(batch.trajectory_id.tolist(), batch.anchor.tolist(), strict=True)
        rewards = [dataset.trajectory(i)["reward"][t:] for i, t in places]
        to_go = np.array([np.float32(sum(r[::-1].astype(np.float64))) for r in rewards])
        assert (
            replay.normalize("return_to_go", to_go).tobytes()
            == _array(batch["return_to_go"]).tobytes()
        )
        assert batch["half"].dtype == torch.bfloat16  # what losses are computed from keeps 32 bits
        exact = ("reward", "return", "return_to_go", "return_n", "discount")
        assert {batch[name].dtype for name in exact} == {torch.float32}


def _array(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def test_what_an_environment_returns_is_rounded_as_by_a_writer(data: Path) -> None:
    """The double of an observation is not stored; what the column holds of it is."""
    normalizer = Normalizer.from_config(section(data))
    double = rows_of(3, 5)["observation"].astype(np.float64) * 1.0000000123
    double[0] = (
        1 + 2.0**-11 + 2.0**-30
    )  # of float16 the larger neighbour; by way of float32 the smaller one
    for name in ("observation", "half", "brain"):
        column = SCHEMA[name]
        given = double[:, : column.shape[0]]
        kept = as_stored(given, column, "main", len(given))
        wanted = normalizer.normalize(name, kept)
        assert (normalizer.normalize(name, given) == wanted).all(), name
        assert (normalizer.normalize(name, given.tolist()) == wanted).all(), name


def test_denormalize_reverses(data: Path) -> None:
    normalizer = Normalizer.from_config(section(data))
    given = rows_of(9, 20)
    for name in sorted({*FIELDS} - {"return_to_go", "timestep"}):
        column = SCHEMA[FIELDS[name].get("column", name)]
        values = torch.from_numpy(np.asarray(given[column.name]))
        there = normalizer.normalize(name, values)
        field = normalizer.fields[name]
        back = normalizer.denormalize(name, there)
        assert back.is_floating_point() == (column.is_floating or field.dtype.is_floating_point), (
            name
        )
        if column.is_floating:
            assert back.dtype == field.stored
        if field.gain is None:
            assert back.double().equal(values.to(field.stored).double()), name
        else:
            eps = max(torch.finfo(t.dtype).eps for t in (there, back))
            assert (back.double() - values.double()).abs().max() <= 8 * eps * values.abs().max(), (
                name
            )
    assert (
        normalizer.denormalize("return_to_go", normalizer.normalize("return_to_go", 250.0)) == 250.0
    )


def test_a_constant_element_becomes_zero_and_keeps_its_distances(data: Path) -> None:
    normalizer = Normalizer.from_config(section(data))
    value = np.float32(7.3)
    seen = normalizer.normalize("observation", [[0, 0, value], [0, 0, value + 2]])
    assert np.abs(seen[0, CONSTANT]) < 1e-6
    assert seen[1, CONSTANT] == pytest.approx(2, abs=1e-6)
    assert normalizer.normalize("window", [0, 0, value + 2])[CONSTANT] == pytest.approx(6, abs=1e-5)
    assert normalizer.denormalize("observation", [0, 0, 0.0])[CONSTANT] == pytest.approx(7.3)


def test_statistics_are_those_of_the_training_split_of_the_config(data: Path) -> None:
    other = section(data, data={"path": str(data), "split": {"test": 0.5}})
    wanted = Dataset.open(data).statistics_for({"test": 0.5})["observation"].mean.tolist()
    with Replay(other) as replay:
        for normalizer in (Normalizer.from_config(other), replay.normalizer):
            assert shift_of(normalizer) == wanted
    assert shift_of(Normalizer.from_config(section(data))) != wanted


def shift_of(normalizer: Normalizer) -> list[float]:
    """Return the shift of the observations."""
    shift = normalizer.fields["observation"].shift
    assert shift is not None
    return shift.tolist()


def test_a_mixture_uses_the_first_table_with_a_data_set(data: Path) -> None:
    sampler = {"kind": "mixture", "shares": {"online": 0.5, "main": 0.5}, "of": {"unit": "step"}}
    tables = {"online": {"capacity_steps": 200}, "main": {"data": str(data)}}
    given = section(
        data, sampler=sampler, tables=tables, fields={"observation": FIELDS["observation"]}
    )
    del given["data"]
    with Replay(given, schemas={"online": SCHEMA}) as replay:
        replay.add(rows_of(50, 6), "online")
        batch = replay.sample()
        own = batch.source == 0
        values = rows_of(50, 6)["observation"][batch.anchor[own]]
        assert (replay.normalize("observation", values) == batch["observation"][own].numpy()).all()
    assert shift_of(replay.normalizer) == Dataset.open(data).statistics["observation"].mean.tolist()


def test_any_leading_dimensions_forms_and_gradients(data: Path) -> None:
    normalizer = Normalizer.from_config(section(data, n_step={"n": 3, "gamma": 0.9}))
    row = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    one = normalizer.normalize("observation", row)
    one.sum().backward()
    assert row.grad is not None
    assert row.grad.equal(normalizer.fields["observation"].gain.float())  # type: ignore[union-attr]
    for shape in ((3,), (4, 3), (2, 4, 3), (0, 3)):
        many = normalizer.normalize("observation", row.detach().expand(shape))
        assert many.shape == shape
        assert many.equal(one.detach().expand(shape))
    assert normalizer.denormalize("observation", one).requires_grad
    assert isinstance(normalizer.normalize("reward", 1), np.ndarray)
    assert normalizer.normalize("reward", 1) == np.float32(0.1)
    assert normalizer.normalize("brain", np.zeros((5, 2))).dtype == np.float32
    bits = torch.ones(2, dtype=torch.bfloat16)
    as_stored = bits.view(torch.int16).numpy().view(np.uint16)
    assert (
        normalizer.normalize("brain", as_stored) == normalizer.normalize("brain", [1.0, 1.0])
    ).all()
    for name in ("return_n", "discount", "timestep", "token"):
        assert normalizer.normalize(name, 1) == normalizer.denormalize(name, 1) == 1
    assert normalizer.normalize("tokens", np.array([7], np.uint32)) == normalizer.normalize(
        "tokens", [7]
    )
    again = pickle.loads(pickle.dumps(normalizer))
    assert again.normalize("observation", row).equal(one)
    assert repr(again) == repr(normalizer)
    assert "pixels: uint8 -> float16 (x - shift) * gain, raw: uint8, wide: uint8 -> int32" in repr(
        again
    )


def test_nested_values_go_in_as_writers_take_them() -> None:
    shapes = {"a": (2,), "b.0": (), "b.1": (3,)}
    columns = [Column(f"observation.{name}", "float32", shape) for name, shape in shapes.items()]
    fields = {column.name: {"scale": 2.0 + at} for at, column in enumerate(columns)}
    normalizer = Normalizer.from_config(config_of(fields=fields), schemas={"main": Schema(columns)})
    a = np.ones((4, 2))
    b = torch.arange(4.0)
    c = np.full((4, 3), 3)
    seen = normalizer.normalize("observation", {"a": a, "b": (b, c)})
    assert seen.keys() == {"a", "b"}  # as of `batch.tree()["observation"]`
    assert seen["b"].keys() == {"0", "1"}
    assert (
        seen["a"].tolist() == normalizer.normalize("observation.a", a).tolist() == (2 * a).tolist()
    )
    assert seen["b"]["0"].equal(3 * b)
    assert seen["b"]["1"].tolist() == (4.0 * c).tolist()
    back = normalizer.denormalize("observation", seen)
    assert back["a"].tolist() == a.tolist()
    assert back["b"]["0"].equal(b)
    assert normalizer.normalize("observation.b", (b, c))["0"].equal(3 * b)
    parts = (
        "give its parts as a mapping, or name one: observation.a, observation.b.0, observation.b.1"
    )
    for name, values, field, text in (
        ("observation", {"c": a}, "observation.c", "it has obs"),
        ("observation", a, "observation", parts),
        ("action", {"a": a}, "action", "it has obs"),
    ):
        with pytest.raises(
            FieldError, match=f"field '{field}' must be a field of the batch; {text}"
        ):
            normalizer.normalize(name, values)
    with pytest.raises(ShapeError, match=r"observation.a must have shape \[\.\.\., 2\]"):
        normalizer.normalize("observation", {"a": b})


def facts(one: Normalizer) -> str:
    return json.dumps({name: conversion.to_json() for name, conversion in one.fields.items()})


def test_a_checkpoint_holds_it_without_data_set_or_engine(data: Path, tmp_path: Path) -> None:
    here = shutil.copytree(data, tmp_path / "data")
    with Replay(section(here), engine_dtype=torch.bfloat16) as replay:
        replay.save(tmp_path / "save")
        tag = tmp_path / "engine" / "global_step5"
        replay.save(tag / "gear")  # as an engine does
    (tmp_path / "engine" / "latest").write_text("global_step5")
    shutil.rmtree(here)
    for folder in (tmp_path / "save", tag, tag / "gear", tmp_path / "engine"):
        found = Normalizer.load(folder)
        assert facts(found) == facts(replay.normalizer)  # usable after the replay is closed
    assert found.fields["half"].dtype == torch.bfloat16
    values = rows_of(2, 8)["observation"]
    assert (found.normalize("observation", values) == replay.normalize("observation", values)).all()
    path = tmp_path / "save" / "normalizer.json"
    changed = path.read_text().replace('"float16"', '"float32"', 1)
    for text, rule in ((changed, "be as it was saved; take another"), ("{", "be readable")):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=rf"normalizer\.json must {rule}"):
            Normalizer.load(tmp_path / "save")
    with pytest.raises(
        CheckpointError, match=r"must hold normalizer.json; give the folder of a save"
    ):
        Normalizer.load(tmp_path)


def test_from_config_is_that_of_the_replay(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    elsewhere = section(tmp_path / "elsewhere", batch_size=None)
    file.write_text(json.dumps({"train_batch_size": 8, "gear": elsewhere}))
    with Replay(section(data)) as replay:
        known = facts(replay.normalizer)
    assert facts(Normalizer.from_config(section(data))) == known
    for dataset in (Dataset.open(data), str(data), Path(data)):
        assert facts(Normalizer.from_config(file, dataset)) == known
    with pytest.raises(DataError, match="elsewhere must be the folder of a data set"):
        Normalizer.from_config(file)
    online = config_of(fields={"reward": {"scale": 2.0}})
    assert Normalizer.from_config(online, schemas={"main": SCHEMA}).normalize("reward", 3.0) == 6
    with pytest.raises(
        ConfigError, match="dataset must be given where the config names one data set, got"
    ):
        Normalizer.from_config(online, Dataset.open(data), {"main": SCHEMA})


def test_refusals_name_the_field(data: Path) -> None:
    normalizer = Normalizer.from_config(section(data))
    wrong: list[tuple[str, Any, type[Exception], str]] = [
        (
            "observations",
            [1.0],
            FieldError,
            "field 'observations' must be a field of the batch; it has obs",
        ),
        (
            "observation",
            [1.0, 2.0],
            ShapeError,
            r"must have shape \[\.\.\., 3\], got \[2\]; give the col",
        ),
        (
            "token",
            [1.5],
            DataError,
            "token must be integers, as the field is int64, got 'torch.float64'",
        ),
        ("raw", np.full((2, 2), 256), DataError, "raw must hold values that uint8 can hold"),
        ("observation", torch.ones(3, dtype=torch.complex64), DataError, "must hold real numbers"),
    ]
    for name, values, error, text in wrong:
        with pytest.raises(error, match=text):
            normalizer.normalize(name, values)
    with pytest.raises(ShapeError, match=r"pixels must have shape \[\.\.\., 2, 2\], got \[2\]"):
        normalizer.denormalize("pixels", np.zeros(2))
