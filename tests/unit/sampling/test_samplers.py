"""Every sampler's rule: weights, windows, anchors, ages, highest priorities, epochs
without a tail.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, config_of, trajectory, wait_until
from hypothesis import given
from hypothesis import strategies as st
from replay_support import filled, same, streams_of, take
from store_support import check_whole, priority_rule, stream_spec

from deepspeed_gear import Column, DatasetWriter, Replay, Schema
from deepspeed_gear.config import parse
from deepspeed_gear.errors import ConfigError, DataError, StoreError, StoreFullError
from deepspeed_gear.ops.reference.select import anchor_at, num_anchors
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.mass_rules import (
    MOST_BITS,
    AgeWindow,
    AnchorRule,
    masses_of_weights,
    weight_bits,
)
from deepspeed_gear.sampling.samplers.base import SamplerScope, SamplerSpec
from deepspeed_gear.sampling.samplers.kinds import SAMPLERS

LENGTHS = [1, 2, 7, 33, 5, 12]
Item = tuple[int, int]


def taken(stream: Any, number: int) -> list[Item]:
    stream.state.ask(number)
    found = [(int(r[0]), int(r[5])) for r in stream.get(number).resolutions]
    stream.release(number)
    return found


# ---- anchors -------------------------------------------------------------------------------------

RULES = st.builds(
    AnchorRule,
    first=st.integers(0, 6),
    trim=st.integers(0, 6),
    stride=st.integers(1, 5),
    most=st.sampled_from([1, 3, 2**62]),
    from_end=st.integers(0, 1),
)
WINDOWS = st.tuples(st.integers(-12, 12), st.integers(1, 12), st.integers(0, 1))


def places(rule: AnchorRule, num_steps: int) -> list[int]:
    """Return every anchor that the ops can choose."""
    count = int(rule.num_anchors(np.array([num_steps]))[0])
    assert num_anchors(rule.as_list(), torch.tensor([num_steps])).tolist() == [count]
    return anchor_at(rule.as_list(), torch.full((count,), num_steps), torch.arange(count)).tolist()


@given(RULES, st.integers(1, 30))
def test_admits_is_what_the_ops_choose(rule: AnchorRule, num_steps: int) -> None:
    steps = np.arange(num_steps + 3)
    found = rule.admits(steps, np.full(len(steps), num_steps))
    assert steps[found].tolist() == sorted(places(rule, num_steps))


@given(st.lists(WINDOWS, min_size=1, max_size=4), st.integers(1, 40))
def test_fits_is_exact(reaches: list[tuple[int, int, int]], num_steps: int) -> None:
    """Admit an anchor if and only if no window has a step outside its trajectory."""
    exact = [
        anchor
        for anchor in range(num_steps)
        if all(
            0 <= anchor + offset <= num_steps + extra - length for offset, length, extra in reaches
        )
    ]
    assert places(AnchorRule.bounded(reaches, 0, 0), num_steps) == exact


# ---- weights -------------------------------------------------------------------------------------


def test_small_weights_keep_their_distribution() -> None:
    """10^6 weights that sum to 1: the mass of each is its share to 1e-6, and the total has room."""
    weights = np.random.default_rng(0).exponential(size=1_000_000)
    weights /= weights.sum()
    bits = weight_bits(float(weights @ np.ones(len(weights))))
    masses = masses_of_weights(weights, bits)
    assert 2 ** (MOST_BITS - 1) <= masses.sum() < 2**62
    large = weights > 1e-8
    assert large.mean() > 0.98
    assert np.abs(masses[large] / masses.sum() / weights[large] - 1).max() < 1e-6
    assert masses.min() >= 1


@pytest.mark.parametrize("scale", [1e-280, 1e-30, 1.0, 1e30, 1e300])
def test_the_scale_of_weights_does_not_matter(scale: float) -> None:
    weights = np.array([1.0, 2.0, 0.0, 0.5]) * scale
    counts = np.array([3, 1, 4, 1])
    masses = masses_of_weights(weights, weight_bits(float(weights @ counts)))
    assert (masses[[1, 3]] * [1, 4] == masses[0] * 2).all()
    assert masses[2] == 0
    assert masses @ counts < 2**62


SCHEMA_OF_WEIGHTS = Schema(
    [Column("reward", "float32", (), "reward"), Column("w", "float32", (), "other", "1")]
)
WEIGHTS = [0.5, 0.0, 2.0, 1.5]


def weighted(number: int) -> dict[str, Any]:
    return {"reward": np.zeros(3 + number, np.float32), "w": np.array(WEIGHTS[number], np.float32)}


@pytest.mark.parametrize("unit", ["step", "trajectory"])
@pytest.mark.parametrize("stored", [True, False])
def test_probabilities_of_weighted_items(unit: str, stored: bool, tmp_path: Path) -> None:
    options = {"batch_size": 500, "sampler": {"kind": "weighted", "unit": unit, "weight": "w"}}
    schemas = None if stored else {"main": SCHEMA_OF_WEIGHTS}
    if stored:
        with DatasetWriter(tmp_path / "d", SCHEMA_OF_WEIGHTS) as writer:
            for number in range(4):
                writer.add(weighted(number))
    with Replay(
        config_of(tmp_path / "d" if stored else None, **options), schemas=schemas
    ) as replay:
        for number in range(0 if stored else 4):
            replay.add(weighted(number))
        batch = replay.sample()
        lengths = np.arange(4) + 3
        total = sum(np.array(WEIGHTS) * (lengths if unit == "step" else 1))
        assert set(batch.trajectory_id.tolist()) == {0, 2, 3}
        assert batch.probability.tolist() == pytest.approx(
            [WEIGHTS[n] / total for n in batch.trajectory_id.tolist()]
        )
        if not stored:
            for bad in (-1.0, np.nan, np.inf, -np.inf):
                wrong = {**weighted(0), "w": np.array(bad, np.float32)}
                text = f"column w: weight 0 must be finite and at least 0, got {bad}"
                with pytest.raises(DataError, match=text):
                    replay.add(wrong)
            assert len(replay) == 4


def test_a_total_of_large_weights_is_an_error() -> None:
    """Also where it is 2^64, so that the sums of the tree are 0."""
    options = {
        "batch_size": 5,
        "sampler": {"kind": "weighted", "unit": "trajectory", "weight": "w"},
    }
    tables = {"main": {"capacity_steps": 2000, "capacity_trajectories": 2000}}
    with Replay(config_of(tables=tables, **options), schemas={"main": SCHEMA_OF_WEIGHTS}) as replay:
        for _ in range(256):
            replay.add({"reward": np.zeros(1, np.float32), "w": np.array(1e10, np.float32)})
        with pytest.raises(StoreError, match=r"the total mass must be below 2\^62"):
            replay.sample()


# ---- windows -------------------------------------------------------------------------------------


@given(
    items=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 255) | st.none()), min_size=1, max_size=12
    ),
    newest=st.none() | st.integers(1, 30),
    distance=st.none() | st.integers(0, 300) | st.floats(0, 300),
    dtype=st.sampled_from(["uint8", "int16", "int64", "float32"]),
    seed=st.integers(0, 99),
)
def test_windows(items: Any, newest: Any, distance: Any, dtype: str, seed: int) -> None:
    """From the newest on until they hold so many items, and by their column, in which NaN is never
    new.
    """
    ids = np.random.default_rng(seed).permutation(100)[: len(items)]
    none = np.nan if dtype == "float32" else 0
    counts = np.array([n for n, _ in items])
    values = np.array([none if v is None else v for _, v in items], dtype)
    window = AgeWindow(newest, None if distance is None else "age", distance or 0)
    content = ids, counts, None if distance is None else values
    found = window.admits(window.edge(*content), *content)
    best = max(values[(counts > 0) & (values == values)].tolist(), default=0.0)
    for i, (count, value) in enumerate(zip(counts, values.tolist(), strict=True)):
        newer = counts[ids > ids[i]].sum()
        wanted = count > 0 and (newest is None or newer < newest)
        if distance is not None:
            wanted = wanted and value >= best - distance
        assert bool(found[i]) == bool(wanted)


# ---- age -----------------------------------------------------------------------------------------


FEW = (
    r"must hold as many items as a global batch \(7\), each with a mass, got 6; lower the "
    r"batch size"
)
NO_EPOCH = (
    r"stream train: an epoch must hold a global batch \(7 items\) where its tail is dropped, got 6"
)
NOTHING = (
    r"stream train: table main must hold at least one item that the sampler admits, got "
    r"'0 trajectories"
)


@pytest.mark.parametrize(
    ("kind", "options", "held", "text"),
    [
        ("fifo", {}, 6, FEW),
        ("lifo", {}, 6, FEW),
        ("top_k", {"priorities": priority_rule()}, 6, FEW),
        ("epoch", {"drop": True}, 6, NO_EPOCH),
        ("random", {}, 0, NOTHING),
    ],
)
def test_too_few_items_are_an_error_that_passes(
    scenes: Any, kind: str, options: dict[str, Any], held: int, text: str
) -> None:
    scene = scenes(stream_spec(kind, batch=7, **options), lengths=LENGTHS[:held])
    for _ in range(2):
        with pytest.raises(StoreError, match=text):
            taken(scene.streams[0], 0)
    scene.add(1)
    assert {number for number, _ in taken(scene.streams[0], 0)} == set(range(held + 1))


@pytest.mark.parametrize("unit", ["step", "trajectory"])
@pytest.mark.parametrize("kind", ["fifo", "lifo", "recent"])
def test_ages_while_trajectories_come_and_go(scenes: Any, kind: str, unit: str) -> None:
    """Also where slots are used again, so that a newer trajectory lies before an older one."""
    by_step = unit == "step"
    newest = 9 if unit == "step" else 3
    recent = stream_spec("random", unit, 600, window=AgeWindow(newest))
    spec = recent if kind == "recent" else stream_spec(kind, unit, 4)
    scene = scenes(spec, lengths=LENGTHS, num_slots=7)
    stored = dict(enumerate(LENGTHS))
    stream = scene.streams[0]
    chance = np.random.default_rng(0)
    for batch in range(25):
        gone = [int(n) for n in chance.choice(sorted(stored), 2, replace=False)]
        table_access.remove(scene.table, gone)
        for number in gone:
            del stored[number]
        for steps in chance.integers(1, 9, 2).tolist():
            stored[scene.add(steps)] = steps
        items = [(n, step) for n in sorted(stored) for step in range(stored[n] if by_step else 1)]
        found = [item if by_step else (item[0], 0) for item in taken(stream, batch)]
        if kind == "recent":
            assert {number for number, _ in found} == {number for number, _ in items[-newest:]}
        else:
            assert found == (items[:4] if kind == "fifo" else items[::-1][:4])
        check_whole(scene.table, scene.streams)


def test_an_add_without_room_moves_the_window(scenes: Any) -> None:
    """It takes up what waits, so as to free rows; the next selection must still know of the
    removal.
    """
    scene = scenes(
        stream_spec(batch=50, window=AgeWindow(1)), lengths=[4, 4], num_rows=10, num_slots=4
    )
    assert {number for number, _ in taken(scene.streams[0], 0)} == {1}
    table_access.remove(scene.table, [1])
    with pytest.raises(StoreFullError):
        scene.add(9)
    assert {number for number, _ in taken(scene.streams[0], 1)} == {0}


# ---- epochs without a tail -----------------------------------------------------------------------


@pytest.mark.parametrize("batch", [7, 20, 60])
def test_a_dropped_tail(scenes: Any, batch: int) -> None:
    """60 items: no batch spans two epochs, and none visits an item twice."""
    stream = scenes(stream_spec("epoch", "step", batch, drop=True), lengths=LENGTHS).streams[0]
    orders = []
    numbers = []
    for epoch in range(3):
        visited: list[Item] = []
        for _ in range(60 // batch):
            made = stream.get(len(numbers))
            assert set(made.epochs.tolist()) == {epoch}
            numbers.append(int(made.resolutions[0, 7]))
            visited += taken(stream, len(numbers) - 1)
        assert len(set(visited)) == len(visited) == 60 // batch * batch
        orders.append(visited)
    assert orders[0] != orders[1] != orders[2]
    assert numbers == sorted(set(numbers))


# ---- through a Replay ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "text"),
    [
        ({"kind": "recent"}, "gear.sampler.newest or gear.sampler.within must be given"),
        ({"kind": "weighted"}, "gear.sampler.weight"),
        ({"kind": "weighted", "weight": "absent"}, "gear.sampler.weight must .*absent"),
        (
            {"kind": "recent", "within": {"column": "absent", "distance": 1}},
            "gear.sampler.within.column",
        ),
        ({"kind": "prioritized", "initial": 0}, "gear.sampler.initial"),
        ({"kind": "prioritized", "alpha": 1.1}, "gear.sampler.alpha"),
        ({"kind": "top_k", "stratified": True}, "gear.sampler.stratified"),
        ({"kind": "epoch", "tail": "cut"}, "gear.sampler.tail"),
    ],
)
def test_refusals(sampler: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Replay(config_of(batch_size=4, sampler=sampler), schemas={"main": SCHEMA})


@pytest.mark.parametrize(
    ("unit", "kind"),
    [("step", "prioritized"), ("trajectory", "prioritized"), ("step", "top_k"), ("step", "epoch")],
)
def test_a_saved_table_goes_on_alike(unit: str, kind: str, tmp_path: Path) -> None:
    """Also where slots and rows are used again, so that they are not in one order."""
    tail = {"tail": "drop"} if kind == "epoch" else {}
    options = {
        "batch_size": 7 if unit == "step" else 4,
        "sampler": {"kind": kind, "unit": unit, **tail},
    }
    tables = {"main": {"capacity_steps": 60, "capacity_trajectories": 4}}
    with filled([5] * 4, **options, tables=tables) as replay:
        replay.sample()
        replay.remove([0])
        replay.sample()
        replay.add(trajectory(4, 9))
        batch = replay.sample()
        if kind != "epoch":
            replay.update_priorities(batch, batch.sample_number + 1.0)
        state = replay.save(tmp_path)
        wanted = take(replay, 3)
        replay.load(tmp_path, state)
        assert all(same(a, b) for a, b in zip(wanted, take(replay, 3), strict=True))
        check_whole(replay.tables["main"], list(streams_of(replay).values()))


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_prepared_batches_of_what_is_gone_are_not_saved(kind: str, tmp_path: Path) -> None:
    """They cannot come any more; others do, and hold whole rows."""
    options = {"batch_size": 8, "prefetch": 2, "sampler": {"kind": kind, "unit": "step"}}
    tables = {"main": {"capacity_steps": 40, "capacity_trajectories": 4}}
    with filled([5] * 4, **options, tables=tables) as replay:
        replay.sample()
        ahead = 4 if kind == "uniform" else 3
        wait_until(lambda: streams_of(replay)["train"].state.consumed[0] == ahead, "preparing")
        replay.remove([0, 1, 2, 3])
        for number in (4, 5):
            replay.add(trajectory(number, 5))
        state = replay.save(tmp_path)
        replay.load(tmp_path, state)
        for _ in range(3):
            batch = replay.sample()
            assert torch.equal(batch["code"], batch.trajectory_id * 1000 + batch.anchor)
            assert torch.equal(batch["task"], batch.trajectory_id)


def test_a_long_pause_of_training_is_no_fault() -> None:
    """Evaluation may take longer than ranks wait for each other; meanwhile batches are prepared."""
    with filled([5] * 5, prefetch=1, timeout_s=0.3, sampler={"kind": "prioritized"}) as replay:
        for _ in range(2):
            replay.update_priorities(replay.sample(), torch.ones(8))
            time.sleep(0.7)
        replay.sample()


# ---- native draws --------------------------------------------------------------------------------

NATIVE: dict[str, dict[str, Any]] = {
    "uniform": {"kind": "uniform"},
    "stratified": {"kind": "uniform", "stratified": True},
    "steps": {"kind": "uniform", "unit": "step"},
    "length": {"kind": "length"},
    "weighted": {"kind": "weighted", "weight": "task"},
    "recent": {"kind": "recent", "newest": 20},
    "prioritized": {"kind": "prioritized"},
    "prioritized steps": {"kind": "prioritized", "unit": "step", "stratified": True},
}


@pytest.mark.parametrize("name", NATIVE)
def test_sample_gives_the_bits_of_the_native_draw(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"sampler": NATIVE[name], "seed": 3}
    sampler = SAMPLERS[
        type(parse({"tables": {"main": {"capacity_steps": 9}}, **options}).item_sampler)
    ]
    own_spec = sampler.spec
    asked = []
    sample = sampler.sample

    def without_native(self: Any, scope: SamplerScope) -> SamplerSpec:
        spec = own_spec(self, scope)
        assert spec.native is not None
        return replace(spec, native=None)

    def noted(self: Any, draw: Any) -> Any:
        asked.append(draw.count)
        return sample(self, draw)

    native = batches_of(options)
    monkeypatch.setattr(sampler, "spec", without_native)
    monkeypatch.setattr(sampler, "sample", noted)
    assert batches_of(options) == native
    assert asked == [8] * 20


def batches_of(options: dict[str, Any]) -> list[tuple[list[Any], ...]]:
    with filled([1 + 7 * number % 11 for number in range(40)], **options) as replay:
        return [
            (batch.trajectory_id.tolist(), batch.anchor.tolist(), batch.is_weight.tolist())
            for batch in take(replay, 20)
        ]
