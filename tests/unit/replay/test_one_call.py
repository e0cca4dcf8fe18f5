"""Selecting and gathering in one native call gives the batches that two calls and Python give."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import config_of
from replay_support import filled, parts_of, same, streams_of

from deepspeed_gear import Batch, Column, Replay, Schema
from deepspeed_gear.batching.gather import Gatherer
from deepspeed_gear.errors import DataError, StaleBatchError, StoreError
from deepspeed_gear.sampling import batch_stream
from deepspeed_gear.sampling.batch_sizes import BatchInfo

NUMBERS = {
    "flag": ("bool", ()),
    "pixels": ("uint8", (3, 5)),
    "small": ("int16", ()),
    "word": ("int64", (1,)),
    "half": ("float16", (7,)),
    "brain": ("bfloat16", ()),
    "single": ("float32", (17,)),
    "double": ("float64", (2, 2)),
}
COLUMNS = [Column(name, dtype, shape) for name, (dtype, shape) in NUMBERS.items()]
SCHEMA = Schema(
    [
        *COLUMNS,
        Column("state", "float32", (11,), "observation", "T+1"),
        Column("task", "int32", (), rows="1"),
        Column("nothing", "float32", (4, 2), rows="1"),
    ]
)
PLAIN: dict[str, Any] = {name: {} for name in NUMBERS}
NEXT = {"state": {}, "next": {"column": "state", "offset": 1}, "task": {}, "nothing": {}}
STACKED = {name: {"offset": -3, "length": 4} for name in NUMBERS}
PADDED = {
    "left": {"column": "single", "offset": -2, "length": 5, "align": "left"},
    "edge": {"column": "state", "offset": -3, "length": 6, "pad": "edge"},
    "wide": {"column": "small", "as": "float32", "offset": 0, "length": 40},
    "step": {"derived": "timestep", "offset": -1, "length": 3},
}
STEPS = {"unit": "step"}
PRIORITIZED = {"kind": "prioritized", "normalize": "table", "alpha": 0.7, "beta": 0.5}
CASES = {
    "plain": ({**PLAIN, **NEXT}, STEPS),
    "stacked": (STACKED, STEPS),
    "stacked whole": (STACKED, {"unit": "step", "anchors": "fits"}),
    "padded": (PADDED, STEPS),
    "trajectories": ({**PADDED, **NEXT}, {"unit": "trajectory"}),
    "priorities of steps": ({**PLAIN, **NEXT}, {**PRIORITIZED, "unit": "step"}),
    "priorities of trajectories": (STACKED, {**PRIORITIZED, "unit": "trajectory"}),
}


def rows(number: int, num_steps: int) -> dict[str, Any]:
    random = np.random.default_rng(number)
    lengths = {"T": num_steps, "T+1": num_steps + 1}
    made: dict[str, Any] = {}
    for column in SCHEMA:
        lead = (lengths[column.rows],) if column.rows in lengths else ()
        values = torch.from_numpy(
            random.integers(0, 2 if column.dtype == "bool" else 120, lead + column.shape)
        )
        made[column.name] = values.to(getattr(torch, column.dtype))
    return made


@contextmanager
def ways(way: str) -> Iterator[None]:
    """Replays that are made inside gather in one call, in one of their own, or select in Python."""
    with pytest.MonkeyPatch.context() as patch:
        if way != "one call":
            patch.setattr(Gatherer, "upcoming_call", property(lambda self: 0))
        if way == "Python":
            patch.setattr(batch_stream, "is_plain", lambda state: False)
        yield


def run(fields: Any, sampler: Any, seed: int, parts: int) -> tuple[list[Batch], list[Any], int]:
    """Return batches between additions and reports, the metrics, and calls that gathered."""
    calls = 0
    taken = Gatherer.take_gathered

    def counted(self: Gatherer) -> Any:
        nonlocal calls
        calls += 1
        return taken(self)

    section = {"fields": fields, "sampler": sampler, "seed": seed, "batch_size": 12}
    info = None
    if parts > 1:
        del section["batch_size"]
        info = BatchInfo(micro=12, accumulation=parts, data_world=1)
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gatherer, "take_gathered", counted)
        patch.setattr(batch_stream, "_CLEAN_S", 1e6)  # Python looks for dead writers only once
        with Replay(config_of(**section), schemas={"main": SCHEMA}, info=info) as replay:
            for number in range(18):
                replay.add(rows(number, 1 + number * 7 % 23))
                if number < 2:
                    continue
                batch = replay.sample()
                kept.append(batch.clone())
                if sampler.get("kind") == "prioritized":
                    replay.update_priorities(batch, (batch.trajectory_id % 5).float() + 0.25)
            counts = replay.statistics(), replay.take_metrics()
    numbers = [counts[0].get("priorities_applied"), counts[1]["bytes"], counts[1]["padding"]]
    return kept, numbers, calls


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_one_call_gives_the_batches_of_two_and_of_python(case: str, parts: int) -> None:
    found = {}
    for way in ("one call", "two calls", "Python"):
        with ways(way):
            found[way] = run(*CASES[case], seed=parts, parts=parts)
    batches, counts, calls = found["one call"]
    assert calls == len(batches) - 1 == 15
    for way in ("two calls", "Python"):
        others, other_counts, other_calls = found[way]
        assert other_calls == 0
        assert other_counts == counts
        for batch, other in zip(batches, others, strict=True):
            assert same(batch, other)
            assert torch.equal(batch.handle, other.handle)
            assert torch.equal(batch.sample_index, other.sample_index)
            assert all(batch[name].dtype == other[name].dtype for name in batch)
            assert all(torch.equal(batch.mask[name], other.mask[name]) for name in batch.mask)


def test_a_batch_ends_and_its_versions_rise_where_one_call_overwrites_it() -> None:
    with filled((9, 4), fields={"code": {}, "action": {"length": 3}}) as replay:
        first = replay.sample()
        code = first["code"]
        version = code._version
        replay.sample()
        assert first["code"] is code
        replay.sample()
        with pytest.raises(StaleBatchError):
            first["code"]
        assert code._version == version + 1


def test_tensors_of_a_batch_that_a_program_changes_are_checked_again() -> None:
    with filled((9, 4), fields={"code": {}, "action": {"length": 3}}, seed=3) as replay:
        wanted = [replay.sample().clone() for _ in range(6)]
    with filled((9, 4), fields={"code": {}, "action": {"length": 3}}, seed=3) as replay:
        batches = [replay.sample()]
        batches[0]["code"].set_(torch.zeros(8, dtype=torch.int64))  # other memory
        batches.append(replay.sample())
        tensor = batches[1]["action"]
        assert same(replay.sample(), wanted[2])
        tensor.transpose_(0, 1)
        with pytest.raises(RuntimeError, match="must be contiguous"):
            replay.sample()
        tensor.transpose_(0, 1)
        assert same(replay.sample(), wanted[3])
        tensor.resize_(2, 3, 2)
        replay.sample()
        with pytest.raises(RuntimeError, match="out must hold 8 x 3 x 2 elements"):
            replay.sample()


def test_native_reports_refuse_what_python_refuses() -> None:
    sampler = {"kind": "prioritized", "unit": "step"}
    with filled((9, 4), fields={"code": {}}, sampler=sampler) as replay:
        batch = replay.sample()
        reports = streams_of(replay)["train"].state.with_priorities.reports
        assert reports._append is not None
        with pytest.raises(DataError, match="priority 3 must be finite"):
            replay.update_priorities(batch, torch.tensor([1.0] * 3 + [torch.nan] + [1.0] * 4))
        for _ in range(reports.rule.log_size // 8):
            replay.update_priorities(batch, torch.ones(8))
        with pytest.raises(StoreError, match="between two global batches on a rank"):
            replay.update_priorities(batch, torch.full((8,), torch.nan))
        parts_of(replay).late_updates.check()
        replay.sample()
        assert replay.statistics()["priorities_applied"] == reports.rule.log_size // 8 * 8


def test_priorities_in_any_form_are_reported_as_plain_ones() -> None:
    plain = torch.arange(8.0) + 1
    forms: dict[str, Any] = {
        "plain": plain,
        "strided": torch.stack([plain, plain], 1)[:, 0],
        "with a graph": plain.clone().requires_grad_(),
        "negated": torch.complex(torch.zeros(8), -plain).conj().imag,
        "sparse": plain.to_sparse(),
        "float64": plain.double(),
        "list": plain.tolist(),
    }
    found = {}
    for name, values in forms.items():
        sampler = {"kind": "prioritized", "unit": "step"}
        with filled((9, 4), fields={"code": {}}, sampler=sampler) as replay:
            batch = replay.sample()
            if name == "sparse":
                with pytest.raises(DataError, match="dense"):
                    replay.update_priorities(batch, values)
                values = plain
            replay.update_priorities(batch, values)
            items = batch.trajectory_id.clone(), batch.anchor.clone()
            replay.sample()
            found[name] = replay.priorities(*items).tolist()
    assert all(priorities == found["plain"] for priorities in found.values()), found
