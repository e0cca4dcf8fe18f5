"""Views in notebooks: histograms, tables, and what a data set, schema, batch and rollout show."""

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, config_of, trajectory, write_dataset
from rollout_support import rolled_out

from deepspeed_gear import Batch, Column, Dataset, DatasetWriter, Replay, Schema
from deepspeed_gear.batching.batch_samples import BatchSamples
from deepspeed_gear.batching.tensor_views import MOST_ELEMENTS, sampled_values
from deepspeed_gear.data import dataset_sample
from deepspeed_gear.data.dataset_sample import DatasetSample, sampled_steps
from deepspeed_gear.notebook_views import (
    MOST_TABLE_ROWS,
    evenly,
    histogram,
    histogram_svg,
    safe_view,
    table_html,
)
from deepspeed_gear.ops.records import Resolution

HUGE = np.finfo(np.float64).max
VALUES: dict[str, Any] = {
    "floats": np.random.default_rng(0).normal(size=5000),
    "integers": np.arange(7),
    "many integers": np.arange(1000),
    "negative integers": np.array([-3, -3, 5]),
    "flags": np.array([True, False, True]),
    "unsigned": np.array([0, 255], np.uint8),
    "half": np.array([0.5, 2.0], np.float16),
    "one value": np.array([2.5]),
    "one large value": np.array([1e300, 1e300]),
    "the largest value": np.array([HUGE]),
    "zero": np.zeros(3),
    "extremes": np.array([-HUGE, 0.0, HUGE]),
    "neighbours": np.array([1.0, np.nextafter(1.0, 2.0)]),
    "subnormal": np.array([0.0, 5e-324]),
    "large integers": np.array([2**62, 2**62 + 1]),
    "with NaN": np.array([np.nan, 1.5, np.inf, 0.0]),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_a_histogram_counts_every_finite_value_in_its_bin(values: np.ndarray) -> None:
    counted = histogram(values)
    assert counted is not None
    numbers = values.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    assert counted.counts.sum() == len(finite)
    assert counted.num_left_out == len(numbers) - len(finite)
    assert len(counted.edges) == len(counted.counts) + 1
    assert np.isfinite(counted.edges).all()
    assert (counted.edges[1:] > counted.edges[:-1]).all()
    assert (counted.low, counted.high) == (finite.min(), finite.max())
    assert counted.edges[0] <= counted.low
    assert counted.edges[-1] >= counted.high
    with np.errstate(over="ignore"):
        width = counted.edges[1] / 2 - counted.edges[0] / 2
    for edge, until in zip(counted.edges[1:-1], counted.counts.cumsum(), strict=False):
        close = width * 1e-6  # an edge is rounded
        assert (finite < edge - close).sum() <= until <= (finite <= edge + close).sum()
    assert ElementTree.fromstring(histogram_svg("a < b & c", values)).tag.endswith("svg")


@pytest.mark.parametrize("values", [np.zeros(0), np.array([np.nan, np.inf])])
def test_without_a_finite_value_there_is_no_histogram(values: np.ndarray) -> None:
    assert histogram(values) is None
    assert histogram_svg("none", values) == ""


def test_evenly_and_runs_take_the_same_places_each_time() -> None:
    assert evenly(10, 4).tolist() == [0, 3, 6, 9]
    assert evenly(3, 4).tolist() == [0, 1, 2]
    assert evenly(5, 1).tolist() == [0]
    for total, most in ((1, 1), (1000, 256), (1001, 33), (65537, 65536), (10**9, 65536), (7, 3)):
        steps = sampled_steps(total, most)
        assert 1 <= len(steps) <= most
        assert (np.diff(steps) > 0).all()
        assert steps[0] == 0
        assert steps[-1] == total - 1 or most == 1
    assert len(sampled_steps(10**9, 65536)) == 65536


class Tags(HTMLParser):
    """Checks that every tag is closed in its order; collects the text of cells."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name, value)
        assert tag != "script"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def text_of(view: str) -> str:
    """Return the text of a view, which must be whole HTML without scripts."""
    tags = Tags()
    tags.feed(view)
    assert tags.open == []
    return " ".join(" ".join(tags.text).split())


def test_tables_are_escaped_and_bounded() -> None:
    rows = [[f"<script>{i}", "a & b"] for i in range(MOST_TABLE_ROWS + 5)]
    text = text_of(table_html(["<b>", "y"], rows))
    assert "<script>0" in text
    assert "and 5 more" in text


def test_a_view_that_fails_is_the_text_and_the_error() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise RuntimeError("also odd")

    def build() -> str:
        raise ValueError("<odd>")

    assert "ValueError: <odd>" in text_of(safe_view(Odd(), build))


ODD = Schema(
    [
        Column("half", "bfloat16", (2,), allow_nan=True),
        Column("image", "uint8", (3, 16, 16)),
        Column("reward", "float32", role="reward", allow_nan=True),
        Column("state", "float64", (), "observation", "T+1"),
        Column("note", "json", rows="1", max_bytes=20),
        Column("blob", "bytes", rows="1", max_bytes=3),
    ]
)


def write_odd(folder: Path) -> Dataset:
    """Write a data set of every kind of column, with missing values."""
    with DatasetWriter(folder, ODD) as writer:
        for i, length in enumerate((1, 5, 7)):
            half = torch.arange(2.0 * length).view(length, 2).bfloat16()
            half[0, 0] = torch.nan
            writer.add(
                {
                    "half": half,
                    "image": np.full((length, 3, 16, 16), i, np.uint8),
                    "reward": np.array([np.inf] + [1] * (length - 1), np.float32),
                    "state": np.full(length + 1, i, np.float64),
                    "note": None if i == 0 else {"<b>": i},
                    "blob": b"" if i < 2 else b"abc",
                }
            )
    return Dataset.open(folder)


def test_a_sample_has_the_stored_rows_without_padding(tmp_path: Path) -> None:
    dataset = write_odd(tmp_path / "set")
    sample = DatasetSample(dataset)
    state = sample.column(ODD["state"])
    assert state.is_whole
    assert state.values[:, 0].tolist() == [0] + [1] * 5 + [2] * 7
    half = sample.column(ODD["half"])
    assert np.isnan(half.values[:, 0]).sum() == 3
    assert half.missing == 3 / 26
    assert sample.column(ODD["reward"]).missing == 3 / 13
    assert sample.column(ODD["note"]).missing == 1 / 3
    assert sample.column(ODD["blob"]).missing == 2 / 3
    assert sample.column(ODD["blob"]).values[:, 0].tolist() == [0, 0, 3]
    assert sample.column(ODD["image"]).missing == 0
    small = DatasetSample(dataset, most_rows=2)
    assert len(small.column(ODD["state"]).values) == 2
    assert not small.column(ODD["state"]).is_whole


def test_returns_are_read_within_a_bound(tmp_path: Path) -> None:
    dataset = Dataset.open(write_dataset(tmp_path / "set", [3, 400, 5, 7]))
    sums = [float(dataset.trajectory(i)["reward"].sum()) for i in range(4)]
    assert DatasetSample(dataset).returns().tolist() == sums
    assert DatasetSample(dataset).returns(most_steps=12).tolist() == [sums[0], sums[3]]
    assert DatasetSample(dataset).returns(most_steps=9).tolist() == [sums[0]]
    assert DatasetSample(dataset).returns(most_steps=2) is None


def test_a_sample_reads_few_rows_of_a_large_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = write_odd(tmp_path / "set")
    monkeypatch.setattr(dataset_sample, "MOST_ELEMENTS", 2 * 3 * 16 * 16)
    image = DatasetSample(dataset).column(ODD["image"])
    assert image.values.shape == (2, 3 * 16 * 16)
    assert image.num_rows == 13


def test_view_of_a_data_set_and_a_schema(tmp_path: Path) -> None:
    dataset = write_odd(tmp_path / "set")
    text = text_of(dataset._repr_html_())
    for words in (
        "trajectories 3",
        "steps 13",
        "bfloat16",
        "max_bytes 20",
        "steps of a trajectory",
    ):
        assert words in text
    assert re.search(r"half +bfloat16 +\[2\] +T +other +1 to 13 \S+ 3 ", text)
    text = text_of(ODD._repr_html_())
    assert "allow_nan" in text
    assert "T+1" in text
    (tmp_path / "set" / "columns" / "state.npy").unlink()
    text = text_of(dataset._repr_html_())
    assert "3 trajectories, 13 steps" in text
    assert "must exist while it is used" in text


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_view_of_a_batch(unit: str) -> None:
    section = config_of(
        batch_size=4,
        sampler={"kind": "prioritized", "unit": unit},
        fields={"observation": {"length": 3}, "code": {}, "terminated": {}},
    )
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        for number in range(6):
            replay.add(trajectory(number, 1 + number))
        batch = replay.sample()
        text = text_of(batch._repr_html_())
        share = float(batch.mask["observation"].float().mean())
        assert re.search(rf"observation +float32 +\[4, 3, 3\] .*{share:.1%}", text)
        assert re.search(r"terminated +bool .* 0 true", text)
        assert "PER weight of a sample" in text
        assert "samples 0" in text_of(batch[:0]._repr_html_())
        assert text_of(batch.map(lambda tensor: tensor.clone())._repr_html_())


def of_tensor(tensor: torch.Tensor) -> Batch:
    """Make a batch of one field."""
    count = len(tensor)
    known = BatchSamples(
        torch.zeros(count, Resolution.NUM_WORDS, dtype=torch.int64),
        torch.ones(count, dtype=torch.bool),
        False,
        1,
        torch.zeros(count, dtype=torch.int64),
    )
    return Batch({"x": tensor}, {"x": torch.ones(count, dtype=torch.bool)}, known)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.full((2, 3), torch.nan),
        lambda: torch.tensor([torch.inf, 1.0]),
        lambda: torch.tensor([2**63 - 1, -(2**63)]),
        lambda: torch.ones(2, dtype=torch.bfloat16),
        lambda: torch.ones(2, 0),
        lambda: torch.ones(0, 5),
        lambda: torch.ones(3, requires_grad=True),
    ],
)
def test_odd_values_have_a_view(make: Callable[[], torch.Tensor]) -> None:
    assert text_of(of_tensor(make())._repr_html_())


def test_a_large_field_is_sampled() -> None:
    values = torch.arange(2 * MOST_ELEMENTS).view(-1, 4)
    found, is_whole = sampled_values(values, None)
    assert len(found) == MOST_ELEMENTS
    assert not is_whole
    assert (found.min(), found.max()) == (0, 2 * MOST_ELEMENTS - 1)
    assert "(sampled)" in text_of(of_tensor(values)._repr_html_())


def test_views_of_a_rollout_its_steps_and_micro_batches() -> None:
    with rolled_out() as rollout:
        text = text_of(rollout._repr_html_())
        assert f"tokens {rollout.num_tokens}" in text
        assert "reward of a trajectory" in text
        rollout.advantages("grpo")
        assert re.search(r"advantage +float32", text_of(rollout._repr_html_()))
        for step in rollout:
            assert f"loss tokens {step.loss_tokens}" in text_of(step._repr_html_())
            for micro in step:
                text = text_of(micro._repr_html_())
                assert re.search(rf"tokens +int64 +\[1, {micro['tokens'].numel()}\]", text)
        assert "ended" in text_of(rollout._repr_html_())
