"""Every value of a save's or a data set's JSON is replaced by odd ones: it loads, or a GearError
names it.
"""

import contextlib
import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import prefix

from deepspeed_gear import Column, Dataset, DatasetWriter, Replay, Schema
from deepspeed_gear.data.export import export
from deepspeed_gear.data.ingest import ingest, open_source
from deepspeed_gear.errors import CheckpointError, ConfigError, DataError, GearError
from deepspeed_gear.replay.normalizer import Normalizer
from deepspeed_gear.store import writer_options

ODD: tuple[Any, ...] = (2**63, -1, 1e300, None, True, "a\0b", [], [[]], {"a": 1})
DEEP = "[" * 100_000
SECTION: dict[str, Any] = {
    "batch_size": 2,
    "sampler": {"kind": "prioritized", "unit": "step"},
    "fields": {"x": {}},
    "tables": {"main": {"capacity_steps": 20, "schema": {"columns": {"x": {"dtype": "float32"}}}}},
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Iterate over the paths of all values in a JSON value, outer ones first."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in items:
        yield from places(inner, (*path, key))


def edited(value: Any) -> Iterator[Any]:
    """Iterate over copies of a JSON value with one value replaced."""
    for path in places(value):
        for odd in ODD:
            if not path:
                yield odd
                continue
            changed = copy.deepcopy(value)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = odd
            yield changed


def check_all(original: Any, load: Callable[[Any], Any]) -> None:
    """Load all edited copies; then the original, whole."""
    num_refused = 0
    for changed in edited(original):
        try:
            load(changed)
        except GearError:
            num_refused += 1
    assert num_refused > 20
    load(original)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Replay, Path, dict[str, Any]]]:
    section = {**SECTION, "shared_memory": {"prefix": prefix()}}
    with Replay(section) as replay:
        replay.add({"x": np.zeros(3)})
        replay.update_priorities(replay.sample(), torch.ones(2))
        replay.sample()
        yield replay, tmp_path / "save", replay.save(tmp_path / "save")


def test_states(saved: tuple[Replay, Path, dict[str, Any]]) -> None:
    replay, folder, state = saved
    check_all(state, lambda changed: replay.load(folder, changed))
    for word in state["train"]["main"]:
        changed = copy.deepcopy(state)
        changed["train"]["main"][word] = 2**63
        with pytest.raises(CheckpointError, match=rf"{word} must be in \[(0|-\d+), .*edited"):
            replay.load(folder, changed)
    (folder / "position.json").write_text(DEEP)
    with pytest.raises(
        CheckpointError, match=r"position\.json must be readable, got .it is nested too"
    ):
        replay.load(folder)


def test_manifests(saved: tuple[Replay, Path, dict[str, Any]]) -> None:
    """With a state that has the checksum of the edited one."""
    replay, folder, state = saved
    path = folder / "main" / "manifest.json"
    known = copy.deepcopy(state)

    def load(changed: Any) -> None:
        path.write_text(json.dumps(changed))
        known["save"]["tables"]["main"]["manifest.json"] = hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        replay.load(folder, known)

    check_all(json.loads(path.read_text()), load)


def test_normalizers(saved: tuple[Replay, Path, dict[str, Any]]) -> None:
    path = saved[1] / "normalizer.json"

    def load(changed: Any) -> None:
        with contextlib.suppress(TypeError, KeyError):
            changed["sha256"] = writer_options.digest(changed["fields"])
        path.write_text(json.dumps(changed))
        Normalizer.load(path.parent)

    check_all(json.loads(path.read_text()), load)
    path.write_text(DEEP)
    with pytest.raises(CheckpointError, match="nested too deeply"):
        Normalizer.load(path.parent)


def test_data_sets(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    with DatasetWriter(
        folder, Schema([Column("x", "float32"), Column("n", "int64", rows="1")])
    ) as writer:
        writer.add({"x": np.arange(3.0), "n": 1})
    path = folder / "schema.json"
    original = json.loads(path.read_text())

    def load(changed: Any) -> None:
        path.write_text(json.dumps(changed))
        Dataset.open(folder)

    check_all(original, load)
    path.write_text(DEEP)
    with pytest.raises(DataError, match="nested too deeply"):
        Dataset.open(folder)


@pytest.mark.parametrize(("path", "rule"), [("a\0b", "without NUL"), ("", "must not be empty")])
def test_paths_that_name_nothing(
    path: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Replay({**SECTION, "shared_memory": {"prefix": prefix()}}) as replay:
        writer = partial(DatasetWriter, schema=replay.tables["main"].spec.schema)
        saved = replay.save, replay.load, replay.normalizer.save, Normalizer.load
        made = (
            partial(export, [], writer.keywords["schema"], format="npz"),
            partial(ingest, "source"),
        )
        for action in (*saved, *made, writer, Dataset.open, open_source):
            with pytest.raises(ConfigError, match=rule):
                action(path)
    assert not list(tmp_path.iterdir())
