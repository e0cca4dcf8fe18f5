"""Replay.update_priorities, set_priorities and priorities: shapes, dtypes, masks, refusals, late
values.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import config_of, lengths_of, prefix, wait_until
from replay_support import Elsewhere, filled, parts_of, read_late, streams_of
from store_support import check_whole

from deepspeed_gear import Batch, Replay
from deepspeed_gear.batching.transfer.cuda_streams import HostEvent
from deepspeed_gear.errors import (
    ConfigError,
    DataError,
    GearError,
    NotReadyError,
    ShapeError,
    StoreError,
)
from deepspeed_gear.sampling.priority_log import NEVER, PriorityLog
from deepspeed_gear.sampling.priority_masses import PriorityMasses

LENGTHS = lengths_of(12, most=9)
WINDOWS = {name: {"offset": -1, "length": 4} for name in ("code", "reward")}
FIELDS = {**WINDOWS, "observation": {"length": 3}}


@pytest.fixture
def replays() -> Iterator[Callable[..., Replay]]:
    with ExitStack() as stack:

        def make(unit: str = "step", /, **options: Any) -> Replay:
            sampler = {"kind": "prioritized", "unit": unit, **options.pop("sampler", {})}
            return stack.enter_context(
                filled(LENGTHS, **{"fields": FIELDS, "sampler": sampler, **options})
            )

        yield make


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


def after(
    replay: Replay, batch: Batch, values: Any, mask: torch.Tensor | None = None
) -> torch.Tensor:
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64", "uint8"])
def test_any_dtype(replays: Any, dtype: str) -> None:
    replay = replays()
    batch = replay.sample().clone()
    values = (torch.arange(8) * 3 + 1).to(getattr(torch, dtype))
    found = after(replay, batch, values.requires_grad_() if values.is_floating_point() else values)
    assert torch.equal(found, last_of(batch, values.detach().float(), True))


def test_float64_is_rounded_but_not_to_zero(replays: Any) -> None:
    replay = replays("trajectory")
    assert (
        replay.set_priorities([0, 1, 2], torch.tensor([1e-60, 0.0, 0.1], dtype=torch.float64)) == 3
    )
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


@pytest.mark.parametrize("steps", [False, True])
def test_reports_of_parts_are_those_of_the_whole(replays: Any, steps: bool) -> None:
    """Slices with gaps, masks, indices, parts joined again and minibatches."""
    whole = replays(fields=WINDOWS)
    parts = replays(fields=WINDOWS)
    for turn in range(4):
        batch = whole.sample()
        same = parts.sample()
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
    assert (
        parts.statistics()["priorities_applied"] == whole.statistics()["priorities_applied"] == 32
    )
    with pytest.raises(
        ShapeError, match=r"priorities must have shape \[3\], or \[3, T\], got \[8\]"
    ):
        parts.update_priorities(parts.sample()[:3], torch.ones(8))
    parts.update_priorities(parts.sample()[:0], torch.ones(0))


REDUCE: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], float]]] = {
    "max": ({"reduce": "max"}, lambda v: v.max()),
    "mean": ({"reduce": "mean"}, lambda v: v.mean()),
    "mix": ({"reduce": "mix"}, lambda v: 0.9 * v.max() + 0.1 * v.mean()),
    "eta": ({"eta": 0.25}, lambda v: 0.25 * v.max() + 0.75 * v.mean()),
}


@pytest.mark.parametrize("how", REDUCE)
@pytest.mark.parametrize("given", [True, False])
def test_steps_are_reduced_over_the_mask(replays: Any, how: str, given: bool) -> None:
    """The mask of the batch, or one that is given; what lies outside may be anything."""
    options, reduced = REDUCE[how]
    replay = replays(sampler=options, fields=FIELDS if given else WINDOWS)
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
    wanted = torch.tensor(
        [reduced(v[m].double().numpy()) for v, m in zip(values, mask, strict=True)]
    )
    torch.testing.assert_close(found, last_of(batch, wanted, True), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_of_half_precision_is_not_one(replays: Any, dtype: torch.dtype) -> None:
    """Without a mask of this shape every step counts."""
    replay = replays(sampler={"reduce": "mean"})
    values = torch.full((8, 60), 40_000.0, dtype=dtype)
    values[:, 0] = 39_936.0
    found = after(replay, replay.sample().clone(), values)
    torch.testing.assert_close(found, values.float().mean(1), rtol=1e-6, atol=0)


def bad(at: int, value: float, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.full(shape or (8,), 2.0, dtype=dtype)
    values[at] = value
    return values


def test_reports_that_are_refused_change_nothing(replays: Any) -> None:
    replay = replays()
    batch = replay.sample().clone()
    ones = torch.ones
    wrong: list[tuple[Any, Any, type[GearError], str]] = [
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
        (
            ones(8, 3),
            torch.zeros(8, 3).bool(),
            ShapeError,
            "mask of sample 0 must have a step that counts",
        ),
    ]
    for values, mask, error, text in wrong:
        with pytest.raises(error, match=text):
            replay.update_priorities(batch, values, mask)
    by_id: list[tuple[Any, Any, type[GearError], str]] = [
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
    text = (
        r"mask must be given where fields of the same length have different "
        r"masks.*learns\(.reward.\)"
    )
    with pytest.raises(ShapeError, match=text):
        replay.update_priorities(batch, torch.ones(16, 2))
    found = after(replay, batch, torch.ones(16, 2) * 3, batch.mask["reward"])
    torch.testing.assert_close(found, torch.full((16,), 3.0))


@pytest.mark.parametrize(
    "sampler", [{"kind": "uniform"}, {"kind": "epoch"}, {"kind": "recent", "newest": 5}]
)
def test_a_sampler_without_priorities_and_a_closed_replay_refuse_them(
    sampler: dict[str, Any],
) -> None:
    with filled([3], batch_size=4, sampler=sampler) as replay:
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
def test_an_evaluation_batch_is_refused(data: Path, unit: str) -> None:
    """Its items would be drawn in training from then on."""
    sampler = {"kind": "prioritized", "unit": unit}
    split = {"path": str(data), "split": {"eval": 0.4}}
    with made(data, sampler=sampler, data=split) as replay:
        held_out = [batch.clone() for batch in replay.iterator("eval")]
        with pytest.raises(
            DataError, match="batch must be from the training stream; nothing was changed"
        ):
            replay.update_priorities(held_out[0], torch.ones(16))
        ids = {number for batch in held_out for number in batch.trajectory_id.tolist()}
        trained = [replay.sample().clone() for _ in range(20)]
        replay.update_priorities(trained[0], torch.ones(16))
        assert not ids & {number for batch in trained for number in batch.trajectory_id.tolist()}
        steps = [0] * len(ids) if unit == "step" else None
        assert replay.set_priorities(sorted(ids), [5.0] * len(ids), steps) == 0


@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_by_id(replays: Any, unit: str) -> None:
    replay = replays(unit)
    replay.remove([4])
    ids = [0, 3, 4, 99, 2, -1]
    steps = [0, LENGTHS[3] - 1, 0, 0, 0, 0]
    given = (steps,) if unit == "step" else ()
    assert replay.set_priorities(torch.tensor(ids), torch.arange(6) + 2.0, *given) == 3
    replay.sample()
    assert replay.priorities(ids, *given).tolist() == [2, 3, 0, 0, 6, 0]
    assert replay.priorities(torch.tensor(ids), *given).dtype == torch.float32
    if unit == "step":
        outside = ([3, 3], [LENGTHS[3], -1])
        assert replay.set_priorities(outside[0], [5.0, 5.0], outside[1]) == 0
        assert replay.priorities(*outside).tolist() == [0, 0]
    else:
        calls = (
            lambda: replay.priorities([0], [0]),
            lambda: replay.set_priorities([0], [2.0], [0]),
        )
        for call in calls:
            with pytest.raises(
                ShapeError, match="steps must not be given, as an item is a trajectory"
            ):
                call()
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


# ---- priorities that a device computes later: no process waits but those who need them -----------


SAMPLER = {"kind": "prioritized", "unit": "step", "alpha": 0.7, "beta": 0.5}


class Device:
    """Computes what it was given when it is told to."""

    def __init__(self) -> None:
        self.given: list[HostEvent] = []
        self.num_taken = 0  # blocks of the host's memory
        self.timers: list[threading.Timer] = []

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, HostEvent]:
        self.given.append(HostEvent())
        self.num_taken += 1
        return values.as_subclass(torch.Tensor).clone(), self.given[-1]

    def give_back(self, host: torch.Tensor) -> None:
        self.num_taken -= 1

    def finish(self) -> None:
        for event in self.given:
            event.finish()

    def later(self, delay_s: float, finish: Callable[[], None]) -> None:
        """Finish after a while; the fixture waits for it."""
        self.timers.append(threading.Timer(delay_s, finish))
        self.timers[-1].start()


def there(values: torch.Tensor) -> torch.Tensor:
    return values.as_subclass(Elsewhere)  # type: ignore[return-value]


def priorities(batch: Batch) -> torch.Tensor:
    return (batch.sample_number % 13 + 1).float() * (batch.anchor + 1)


def made(data: Path, device: Device | None = None, /, **options: Any) -> Replay:
    given = {"sampler": SAMPLER, "fields": {"code": {}}, "batch_size": 16, **options}
    replay = Replay(config_of(data, **given))
    if device is not None:
        read_late(replay, device)
    return replay


def reported(replay: Replay) -> Batch:
    """Report the priorities of the next batch, which its device has yet to compute; return the
    batch.
    """
    batch = replay.sample()
    replay.update_priorities(batch, there(priorities(batch)))
    return batch


def log_of(replay: Replay) -> PriorityLog:
    masses = streams_of(replay)["train"].masses
    assert isinstance(masses, PriorityMasses)
    return masses.reports


@pytest.fixture
def device() -> Iterator[Device]:
    device = Device()
    yield device
    device.finish()
    for timer in device.timers:
        timer.join()
    wait_until(lambda: not device.num_taken, "the memory of all values is given back")


def test_neither_a_report_nor_the_batch_that_is_prepared_waits(data: Path, device: Device) -> None:
    with made(data, device, prefetch=2) as replay:
        reported(replay)
        reported(replay)  # who waited would wait for ever
        log = log_of(replay)
        assert log.asked[0] == 0, "others wait for the deferred updates of global batch 0"
        device.given[0].finish()
        wait_until(lambda: log.asked[0] != 0, "the report of global batch 0")
        assert log.asked[0] == 1
        device.finish()
        parts_of(replay).late_updates.drain()
        assert log.asked[0] == 1
        replay.sample()
        assert log.asked[0] == 2


@pytest.mark.parametrize(("call", "delay_s"), [("close", 0.2), ("sample", 1.2)])
def test_what_needs_a_report_waits_for_it(
    data: Path, device: Device, call: str, delay_s: float
) -> None:
    """Closing, and the selection, also where a device takes longer than the timeout."""
    finished = threading.Event()

    def finish() -> None:
        finished.set()
        device.finish()

    with made(data, device, timeout_s=0.5) as replay:
        reported(replay)
        device.later(delay_s, finish)
        getattr(replay, call)()
        assert finished.is_set()


def test_what_is_wrong_is_raised_later_and_holds_nobody_up(data: Path, device: Device) -> None:
    with made(data) as early, made(data, device) as late:
        for replay in (early, late):
            replay.update_priorities(replay.sample(), torch.ones(16))
        batch = late.sample()
        values = priorities(batch)
        values[3] = torch.nan
        late.update_priorities(batch, there(values))
        device.finish()
        with pytest.raises(DataError, match="priority 3 must be finite and at least 0, got nan"):
            parts_of(late).late_updates.drain()
        early.sample()
        assert torch.equal(early.sample().trajectory_id, late.sample().trajectory_id)


def test_more_than_the_log_holds_is_refused_at_once(data: Path, device: Device) -> None:
    with made(data, device, batch_size=4096) as replay:
        batch = replay.sample()
        for _ in range(log_of(replay).rule.log_size // 4096):
            replay.update_priorities(batch, there(priorities(batch)))
        with pytest.raises(StoreError, match="must be at most"):
            replay.update_priorities(batch, there(priorities(batch)))
        device.finish()


def test_a_checkpoint_waits_for_what_was_reported(
    tmp_path: Path, data: Path, device: Device
) -> None:
    with made(data, device) as replay, made(data) as other:
        reported(replay)
        device.later(0.2, device.finish)
        state = replay.save(tmp_path / "saved")
        other.load(tmp_path / "saved", state)
        assert torch.equal(other.sample().trajectory_id, replay.sample().trajectory_id)


def test_masks_are_refused_when_they_are_there(data: Path, device: Device) -> None:
    fields = {"code": {"offset": -3, "length": 4}, "reward": {"offset": 0, "length": 4}}
    with made(data, device, fields=fields) as replay:
        batch = replay.sample()
        values = torch.ones(16, 4)
        replay.update_priorities(batch, there(values), mask=batch.mask["code"])
        device.finish()
        parts_of(replay).late_updates.drain()
        replay.update_priorities(batch, there(values))
        nothing = batch.mask["code"].clone()
        nothing[5] = False
        replay.update_priorities(batch, there(values), mask=nothing)
        device.finish()
        texts = (
            "given where fields of the same length have different",
            "of sample 5 must have a step that",
        )
        for text in texts:
            with pytest.raises(ShapeError, match=f"mask (must be )?{text}"):
                parts_of(replay).late_updates.drain()


def test_reports_that_come_after_a_batch_was_given_up_mend_the_next(
    data: Path, device: Device
) -> None:
    with made(data, device, prefetch=1) as replay:
        batch = reported(replay)
        log_of(replay).give_up()
        device.finish()
        parts_of(replay).late_updates.drain()
        assert log_of(replay).asked[0] == NEVER, "what is reported now is due at once"
        replay.set_priorities(batch.trajectory_id, torch.ones(16), batch.anchor)


def test_a_device_that_hangs_holds_nobody_up_for_ever(data: Path, device: Device) -> None:
    replay = made(data, device, timeout_s=0.3)
    reported(replay)
    replay.close()


def _online(unit: str, prefetch: int) -> Replay:
    columns = {"observation": {"dtype": "float32", "rows": "T+1", "role": "observation"}}
    columns["action"] = {"dtype": "int32", "role": "action"}
    table = {"capacity_steps": 100, "capacity_trajectories": 20, "max_length": 25, "remove": "fifo"}
    limiter = {"min_size": 5 if unit == "trajectory" else 15}
    return Replay(
        {
            "tables": {"main": {**table, "rate_limiter": limiter, "schema": {"columns": columns}}},
            "sampler": {"kind": "prioritized", "unit": unit, "initial": 0.01},
            "fields": {"action": {"length": 1}},
            "batch_size": 4,
            "prefetch": prefetch,
            "timeout_s": 0.05,
            "shared_memory": {"prefix": prefix()},
        }
    )


@pytest.mark.parametrize("unit", ["step", "trajectory"])
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("tries", [(1, 0), (0, 1), (1, 1), (2, 2)], ids=str)
def test_a_batch_that_was_not_ready_counts_what_is_reported_before_it_is_made(
    unit: str, prefetch: int, tries: tuple[int, int]
) -> None:
    """As without the calls that were not ready: what is reported first counts for the
    first batch.
    """
    trajectory = {
        "observation": np.arange(4, dtype=np.float32),
        "action": np.arange(3, dtype=np.int32),
    }
    of_items: dict[str, Any] = {"steps": [0, 1, 2]} if unit == "step" else {}
    with _online(unit, prefetch) as replay:
        ids = [replay.add(trajectory) for _ in range(2)]
        count = 3 if of_items else 1

        def fail(times: int) -> None:
            for _ in range(times):
                with pytest.raises(NotReadyError):
                    replay.sample()

        fail(tries[0])
        replay.set_priorities([ids[1]] * count, torch.full((count,), 7.5), **of_items)
        fail(tries[1])
        for _ in range(7):
            replay.add(trajectory)
        replay.sample()
        assert set(replay.priorities([ids[1]] * count, **of_items).tolist()) == {7.5}
        second = replay.sample().clone()  # and of a batch that was made, for the next ones
        fail(0)
        replay.update_priorities(second, torch.full((4,), 3.0))
        for _ in range(1 + prefetch):
            replay.sample()
        assert set(of(replay, second).tolist()) == {3.0}
