"""Numbers of steps that decrease within an episode: rows in another order, or an unmarked end."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from deepspeed_gear import Dataset
from deepspeed_gear.data.ingest import ingest, open_source, step_order
from deepspeed_gear.errors import DataError

COUNT = 12
ENDS = np.isin(np.arange(COUNT), (5, 11))
IN_ORDER = [*range(6), *range(6)]
SHUFFLED = [0, 1, 2, 3, 4, 5, 0, 1, 3, 2, 4, 5]


def steps(**more: Any) -> dict[str, np.ndarray]:
    """Return two episodes of six steps, without flags."""
    return {
        "observation": np.arange(2.0 * COUNT).reshape(COUNT, 2),
        "action": np.arange(COUNT, dtype=np.float64)[:, None],
        "reward": np.ones(COUNT),
        **{name: np.asarray(values) for name, values in more.items()},
    }


def table(path: Path, **more: Any) -> Path:
    """Write a row for each step."""
    rows = [
        {name: values[i].tolist() for name, values in steps(**more).items()} for i in range(COUNT)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def hdf5(path: Path, **more: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in steps(**more).items():
            file[name] = values
    return path


def made(path: Path, **options: Any) -> Dataset:
    return ingest([open_source(path, **options)], path.with_suffix(".out"), overwrite=True)


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        made(path, **options)
    return str(caught.value).replace(str(path), "FILE")


@pytest.mark.parametrize("name", step_order.NAMES)
def test_rows_in_another_order_are_refused(tmp_path: Path, name: str) -> None:
    ids = np.arange(COUNT) // 6
    path = table(tmp_path / "a.jsonl", episode_id=ids, truncated=ENDS, **{name: SHUFFLED})
    assert refusal(path).startswith(
        f"FILE: episode 1: {name} must not decrease within an episode, got '2 after 3 at row 3'; "
        f"sort the rows of each episode by {name}; if an episode begins there, mark it: with "
        "--episode-id"
    )
    flags = {"terminals": np.zeros(COUNT, bool), "timeouts": ENDS}
    path = hdf5(tmp_path / "a.hdf5", **flags, **{name: SHUFFLED})
    assert refusal(path).startswith(f"FILE: {name} must not decrease")
    assert "'2 after 3 at row 9'" in refusal(path)


@pytest.mark.parametrize(
    "numbers", [IN_ORDER, [3] * COUNT, list(range(COUNT)), np.arange(COUNT) / 50], ids=str
)
def test_numbers_that_do_not_decrease_are_a_column(tmp_path: Path, numbers: Any) -> None:
    path = table(tmp_path / "a.jsonl", truncated=ENDS, step=numbers)
    assert made(path).columns["step"].tolist() == np.asarray(numbers).tolist()
    flags = {"terminals": np.zeros(COUNT, bool), "timeouts": ENDS}
    dataset = made(hdf5(tmp_path / "a.hdf5", **flags, step=numbers))
    assert dataset.lengths.tolist() == [5, 5]


def test_an_end_without_a_flag_is_refused_and_the_remedies_help(tmp_path: Path) -> None:
    """Time limits often have none; two episodes would be one."""
    last = np.arange(COUNT) == COUNT - 1
    path = table(tmp_path / "a.jsonl", done=last, timestep=IN_ORDER)
    assert "'0 after 5 at row 6'" in refusal(path)
    path = table(tmp_path / "b.jsonl", done=last, timestep=IN_ORDER, run=np.arange(COUNT) // 6)
    assert made(path, episode_id="run").lengths.tolist() == [6, 6]
    first = np.asarray(IN_ORDER) == 0
    path = table(tmp_path / "c.jsonl", is_last=ENDS, is_first=first, timestep=IN_ORDER)
    assert made(path, last_step="transition").lengths.tolist() == [6, 6]
    path = hdf5(tmp_path / "a.hdf5", terminals=last, timestep=IN_ORDER)
    assert made(path, episode_length=6).lengths.tolist() == [5, 6]
    flags = {"terminals": last, "timeouts": np.zeros(COUNT, bool)}
    assert "'0 after 5 at row 6'" in refusal(hdf5(tmp_path / "b.hdf5", **flags, step=IN_ORDER))


@pytest.mark.parametrize(
    "options", [{"columns": ["!step"]}, {"rename": {"step": "count"}}], ids=["left out", "renamed"]
)
def test_a_column_that_is_something_else(tmp_path: Path, options: dict[str, Any]) -> None:
    ids = np.arange(COUNT) // 6
    path = table(tmp_path / "a.jsonl", episode_id=ids, truncated=ENDS, step=SHUFFLED)
    flags = {"terminals": np.zeros(COUNT, bool), "timeouts": ENDS}
    for source in (path, hdf5(tmp_path / "a.hdf5", **flags, step=SHUFFLED)):
        dataset = made(source, **options)
        assert "step" not in dataset.schema
        assert ("count" in dataset.schema) == ("rename" in options)


@pytest.mark.parametrize(
    "numbers", [["a"] * 6 + ["b"] * 6, [[i % 5, 0] for i in range(COUNT)]], ids=["texts", "rows"]
)
def test_other_values_are_not_compared(tmp_path: Path, numbers: Any) -> None:
    assert len(made(table(tmp_path / "a.jsonl", truncated=ENDS, step=numbers))) == 2
