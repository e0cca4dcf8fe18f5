"""Replay.update_priorities, set_priorities and priorities: shapes, dtypes, masks, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, config_of, lengths_of, trajectory, write_dataset
from replay_support import streams_of
from store_support import check_whole

from deepspeed_gear import Batch, Replay
from deepspeed_gear.errors import ConfigError, DataError, GearError, ShapeError, StoreError

LENGTHS = lengths_of(12, most=9)
FIELDS = {
    "code": {"offset": -1, "length": 4},
    "reward": {"offset": -1, "length": 4},
    "observation": {"length": 3},
}


@pytest.fixture
def replays() -> Iterator[Callable[..., Replay]]:
    made: list[Replay] = []

    def make(unit: str = "step", data: Path | None = None, /, **options: Any) -> Replay:
        sampler = {"kind": "prioritized", "unit": unit, **options.pop("sampler", {})}
        given = {"batch_size": 8, "fields": FIELDS, "sampler": sampler, **options}
        if data is not None:
            made.append(Replay(config_of(data, **given)))
            return made[-1]
        made.append(Replay(config_of(**given), schemas={"main": SCHEMA}))
        for number, steps in enumerate(LENGTHS):
            made[-1].add(trajectory(number, steps))
        return made[-1]

    yield make
    for replay in made:
        replay.close()


def everything(replay: Replay) -> torch.Tensor:
    """Return the priorities of all items."""
    if replay.config.sampler.unit == "trajectory":
        return replay.priorities(range(len(LENGTHS)))
    ids = [number for number, steps in enumerate(LENGTHS) for _ in range(steps)]
    return replay.priorities(ids, [step for steps in LENGTHS for step in range(steps)])


def of(replay: Replay, batch: Batch) -> torch.Tensor:
    """Return the priorities of a batch's items."""
    by_step = replay.config.sampler.unit == "step"
    return replay.priorities(batch.trajectory_id, batch.anchor if by_step else None)


def after(replay: Replay, batch: Batch, values: Any, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Report the values of a batch; return the priorities of its items after the next selection."""
    replay.update_priorities(batch, values, mask)
    replay.sample()
    return of(replay, batch)


def last_of(batch: Batch, values: torch.Tensor, by_step: bool) -> torch.Tensor:
    """Return for each sample the value of the last sample of the same item."""
    items = list(zip(batch.trajectory_id.tolist(), (batch.anchor * by_step).tolist(), strict=True))
    last = {item: float(value) for item, value in zip(items, values, strict=True)}
    return torch.tensor([last[item] for item in items])


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_the_next_batch_is_drawn_with_what_was_reported(replays: Any, unit: str) -> None:
    replay = replays(unit)
    batch = replay.sample().clone()
    values = torch.arange(8) + 2.0
    replay.update_priorities(batch, values)
    assert set(everything(replay).tolist()) == {1.0}, "the latest cut has not seen it"
    replay.sample()
    wanted = last_of(batch, values, unit == "step")
    assert torch.equal(of(replay, batch), wanted)
    assert replay.statistics()["priorities_applied"] == 8
    assert sorted(set(everything(replay).tolist())) == sorted({1.0, *wanted.tolist()})
    check_whole(replay.tables["main"], list(streams_of(replay).values()))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8]
)
def test_any_dtype(replays: Any, dtype: torch.dtype) -> None:
    replay = replays()
    batch = replay.sample().clone()
    values = (torch.arange(8) * 3 + 1).to(dtype)
    found = after(replay, batch, values.requires_grad_() if dtype.is_floating_point else values)
    assert torch.equal(found, last_of(batch, values.detach().float(), True))


def test_float64_is_rounded_but_not_to_zero(replays: Any) -> None:
    replay = replays("trajectory")
    assert replay.set_priorities([0, 1, 2], torch.tensor([1e-60, 0.0, 0.1], dtype=torch.float64)) == 3
    assert replay.set_priorities([3, 4], [1e-60, 0.1]) == 2
    assert replay.set_priorities([5, 6], np.array([1e-60, 0.1])) == 2
    replay.sample()
    tiny = torch.finfo(torch.float32).smallest_normal
    wanted = torch.tensor([tiny, 0.0, 0.1, tiny, 0.1, tiny, 0.1])
    assert torch.equal(replay.priorities(range(7)), wanted)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_all_priorities_zero_is_an_error_that_new_ones_mend(replays: Any, prefetch: int) -> None:
    replay = replays("trajectory", prefetch=prefetch)
    replay.set_priorities(range(len(replay)), np.zeros(len(replay)))
    with pytest.raises(StoreError, match="of priority 0'; report priorities above 0"):
        replay.sample()
    replay.set_priorities([1], [1.0])
    assert replay.sample().trajectory_id.tolist() == [1] * 8


# ---- parts of batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [False, True])
def test_reports_of_parts_are_those_of_the_whole(replays: Any, steps: bool) -> None:
    """Slices with gaps, masks, indices, parts joined again and minibatches."""
    fields = {name: FIELDS[name] for name in ("code", "reward")}
    whole, parts = replays(fields=fields), replays(fields=fields)
    for turn in range(4):
        batch, same = whole.sample(), parts.sample()
        assert batch == same
        values = torch.rand((8, 4) if steps else 8) + 0.1
        whole.update_priorities(batch, values)
        late = same.sample_index % 2 == 1
        chosen = {
            0: [same[:3], same[3:]],
            1: [same[::2], same[late]],
            2: [same[[7, 6, 5, 4]], Batch.cat([same[2:4], same[:2]])],
            3: list(same.minibatches(3)),
        }[turn]
        for part in chosen:
            parts.update_priorities(part, values[part.sample_index])
    whole.sample()
    parts.sample()
    assert torch.equal(everything(whole), everything(parts))
    assert parts.statistics()["priorities_applied"] == whole.statistics()["priorities_applied"] == 32
    with pytest.raises(ShapeError, match=r"priorities must have shape \[3\], or \[3, T\], got \[8\]"):
        parts.update_priorities(parts.sample()[:3], torch.ones(8))
    parts.update_priorities(parts.sample()[:0], torch.ones(0))


# ---- [B, T] --------------------------------------------------------------------------------------

REDUCE: dict[str, Callable[[np.ndarray], float]] = {
    "max": lambda v: v.max(),
    "mean": lambda v: v.mean(),
    "mix": lambda v: 0.9 * v.max() + 0.1 * v.mean(),
}


@pytest.mark.parametrize("how", sorted(REDUCE))
@pytest.mark.parametrize("given", [True, False])
def test_steps_are_reduced_over_the_mask(replays: Any, how: str, given: bool) -> None:
    """The mask of the batch, or one that is given; what lies outside may be anything."""
    fields = {name: FIELDS[name] for name in ("code", "reward")} if not given else FIELDS
    replay = replays(sampler={"reduce": how}, fields=fields)
    batch = replay.sample().clone()
    chance = np.random.default_rng(0)
    mask = batch.mask["reward"].clone()
    if given:
        mask &= torch.from_numpy(chance.random((8, 4)) < 0.7)
        mask[:, 1] = True
    values = torch.from_numpy(chance.uniform(0, 9, (8, 4)).astype(np.float32))
    for bad, column in ((torch.nan, 0), (torch.inf, 2), (-1.0, 3)):
        values[:, column] = torch.where(mask[:, column], values[:, column], bad)
    found = after(replay, batch, values, mask if given else None)
    wanted = torch.tensor([REDUCE[how](v[m].double().numpy()) for v, m in zip(values, mask, strict=True)])
    torch.testing.assert_close(found, last_of(batch, wanted, True), rtol=1e-6, atol=0)


@pytest.mark.parametrize("eta", [None, 0.25])
def test_without_a_mask_of_this_shape_every_step_counts(replays: Any, eta: float | None) -> None:
    replay = replays(sampler={"reduce": "mean"} if eta is None else {"eta": eta})
    batch = replay.sample().clone()
    values = torch.arange(16.0).view(8, 2)
    part = eta or 0.0  # of the maximum
    wanted = part * values[:, 1] + (1 - part) * values.mean(1)
    assert torch.equal(after(replay, batch, values), last_of(batch, wanted, True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_of_half_precision_is_not_one(replays: Any, dtype: torch.dtype) -> None:
    replay = replays(sampler={"reduce": "mean"})
    batch = replay.sample().clone()
    values = torch.full((8, 60), 40_000.0, dtype=dtype)
    values[:, 0] = 39_936.0
    torch.testing.assert_close(after(replay, batch, values), values.float().mean(1), rtol=1e-6, atol=0)


# ---- refusals ------------------------------------------------------------------------------------


def bad(at: int, value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.full(shape or (8,), 2.0, dtype=dtype)
    values[at] = value
    return values


def test_reports_that_are_refused_change_nothing(replays: Any) -> None:
    replay = replays()
    batch, ones = replay.sample().clone(), torch.ones
    wrong: list[tuple[torch.Tensor, torch.Tensor | None, type[GearError], str]] = [
        (bad(3, torch.nan), None, DataError, "priority 3 must be finite"),
        (bad(0, -1.0), None, DataError, "priority 0 must be finite and at"),
        (bad(7, torch.inf), None, DataError, "priority 7 .*, got inf"),
        (bad(7, 1e300, dtype=torch.float64), None, DataError, "priority 7"),
        (bad(1, -1e-60, dtype=torch.float64), None, DataError, "priority 1"),
        (bad(2, torch.nan, 8, 2), None, DataError, "priority 2 must be"),
        (ones(7), None, ShapeError, r"shape \[8\], or .*got \[7\]"),
        (ones(8, 2, 1), None, ShapeError, r"got \[8, 2, 1\]"),
        (ones(7, 2), None, ShapeError, r"got \[7, 2\]"),
        (torch.tensor(1.0), None, ShapeError, r"got \[\]"),
        (ones(8, 2), ones(8, 3).bool(), ShapeError, r"mask must have .* \[8, 2\], got \[8, 3\]"),
        (ones(8, 3), torch.zeros(8, 3).bool(), ShapeError, "mask of sample 0 must have a step that counts"),
    ]
    for values, mask, error, text in wrong:
        with pytest.raises(error, match=text):
            replay.update_priorities(batch, values, mask)
    by_id: list[tuple[list[float], list[int] | None, type[GearError], str]] = [
        ([1.0, torch.nan], [0, 0], DataError, "priority 1"),
        ([1e300, 2.0], [0, 0], DataError, "priority 0"),
        ([-1e-60, 2.0], [0, 0], DataError, "priority 0"),
        ([2.0], [0, 0], ShapeError, r"shape \[2\], got \[1\]"),
        ([2.0, 2.0], [0], ShapeError, r"steps must have shape \[2\]"),
        ([2.0, 2.0], None, ShapeError, "steps must be given, as an item is a step"),
    ]
    for given, steps, error, text in by_id:
        with pytest.raises(error, match=text):
            replay.set_priorities([0, 1], given, steps)
    with pytest.raises(ShapeError, match="steps must be given, as an item is a step"):
        replay.priorities([0])
    replay.sample()
    assert set(everything(replay).tolist()) == {1.0}
    assert replay.statistics()["priorities_applied"] == 0


def test_different_masks_of_one_shape_must_be_chosen(replays: Any) -> None:
    fields = {"code": {"offset": -1, "length": 2}, "reward": {"offset": 0, "length": 2}}
    replay = replays(fields=fields, batch_size=16)
    batch = replay.sample().clone()
    text = r"mask must be given where fields of the same length have different masks.*learns\(.reward.\)"
    with pytest.raises(ShapeError, match=text):
        replay.update_priorities(batch, torch.ones(16, 2))
    found = after(replay, batch, torch.ones(16, 2) * 3, batch.mask["reward"])
    torch.testing.assert_close(found, torch.full((16,), 3.0))


def test_a_trajectory_has_no_steps(replays: Any) -> None:
    replay = replays("trajectory")
    for call in (lambda: replay.priorities([0], [0]), lambda: replay.set_priorities([0], [2.0], [0])):
        with pytest.raises(ShapeError, match="steps must not be given, as an item is a trajectory"):
            call()


@pytest.mark.parametrize("sampler", [{"kind": "uniform"}, {"kind": "epoch"}, {"kind": "recent", "newest": 5}])
def test_a_sampler_without_priorities_and_a_closed_replay_refuse_them(sampler: dict[str, Any]) -> None:
    with Replay(config_of(batch_size=4, sampler=sampler), schemas={"main": SCHEMA}) as replay:
        replay.add(trajectory(0, 3))
        batch = replay.sample().clone()
        calls: list[Callable[[], Any]] = [
            lambda: replay.update_priorities(batch, torch.ones(4)),
            lambda: replay.set_priorities([0], [1.0]),
            lambda: replay.priorities([0]),
        ]
        text = 'gear.sampler.kind must be "prioritized" or "top_k" for priorities to be reported'
        for call in calls:
            with pytest.raises(ConfigError, match=text):
                call()
    for call in calls:
        with pytest.raises(StoreError, match="the Replay must be open"):
            call()


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_an_evaluation_batch_is_refused(replays: Any, unit: str, tmp_path: Path) -> None:
    """Its items would be drawn in training from then on."""
    data = write_dataset(tmp_path / "set", LENGTHS)
    replay = replays(unit, data, data={"path": str(data), "split": {"eval": 0.4}})
    held_out = [batch.clone() for batch in replay.iterator("eval")]
    with pytest.raises(DataError, match="batch must be from the training stream; nothing was changed"):
        replay.update_priorities(held_out[0], torch.ones(8))
    ids = {number for batch in held_out for number in batch.trajectory_id.tolist()}
    trained = [replay.sample().clone() for _ in range(20)]
    replay.update_priorities(trained[0], torch.ones(8))
    assert not ids & {number for batch in trained for number in batch.trajectory_id.tolist()}
    steps = [0] * len(ids) if unit == "step" else None
    assert replay.set_priorities(sorted(ids), [5.0] * len(ids), steps) == 0


# ---- by id ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_by_id(replays: Any, unit: str) -> None:
    replay = replays(unit)
    replay.remove([4])
    ids, steps = [0, 3, 4, 99, 2, -1], [0, LENGTHS[3] - 1, 0, 0, 0, 0]
    given = (steps,) if unit == "step" else ()
    assert replay.set_priorities(torch.tensor(ids), torch.arange(6) + 2.0, *given) == 3
    replay.sample()
    assert replay.priorities(ids, *given).tolist() == [2, 3, 0, 0, 6, 0]
    assert replay.priorities(torch.tensor(ids), *given).dtype == torch.float32
    if unit == "step":
        outside = ([3, 3], [LENGTHS[3], -1])
        assert replay.set_priorities(outside[0], [5.0, 5.0], outside[1]) == 0
        assert replay.priorities(*outside).tolist() == [0, 0]
    assert replay.set_priorities([], [], *([],) * len(given)) == 0
    assert replay.priorities([], *([],) * len(given)).tolist() == []


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_by_id_only_what_the_sampler_admits(replays: Any, unit: str) -> None:
    """Filters and anchors hold; a priority never makes an item of what is none."""
    options = {"where": {"task": {"min": 6}}, "anchors": {"every": 2}}
    replay = replays(unit, sampler=options, batch_size=64)
    replay.sample()
    steps = ([0, 1, 0, 0],) if unit == "step" else ()
    wanted = 2 if unit == "step" else 3
    assert replay.set_priorities([7, 7, 8, 2], [9.0, 9.0, 9.0, 9.0], *steps) == wanted
    batch = replay.sample()
    assert set(batch.trajectory_id.tolist()) <= set(range(6, 12))
    if unit == "step":
        assert not (batch.anchor % 2).any()
    check_whole(replay.tables["main"], list(streams_of(replay).values()))


def test_by_id_wins_against_its_batch(replays: Any) -> None:
    replay = replays("trajectory")
    batch = replay.sample().clone()
    number = int(batch.trajectory_id[0])
    replay.set_priorities([number], [4.0])
    replay.update_priorities(batch, torch.full((8,), 2.0))
    replay.sample()
    assert replay.priorities([number]).tolist() == [4.0]
    replay.update_priorities(batch, torch.full((8,), 3.0))
    replay.sample()
    assert replay.priorities([number]).tolist() == [3.0]


def test_micro_batches_of_one_rank_are_in_the_order_of_samples(replays: Any) -> None:
    """An item that is drawn twice keeps what was reported for the sample of the highest number."""
    for accumulation in (1, 4):
        sizes = {"gradient_accumulation_steps": accumulation, "micro_batch_size": 16 // accumulation}
        replay = replays("trajectory", batch_size=16, **sizes)
        wanted: dict[int, int] = {}  # sample numbers
        for _ in range(accumulation):
            batch = replay.sample().clone()
            replay.update_priorities(batch, batch.sample_number + 1)
            for number, sample in torch.stack([batch.trajectory_id, batch.sample_number], 1).tolist():
                wanted[number] = max(wanted.get(number, -1), sample)
        replay.sample()
        ids = sorted(wanted)
        assert replay.priorities(ids).tolist() == [wanted[number] + 1 for number in ids]
        assert len(ids) < 16, "no item was drawn twice: the test shows nothing"
