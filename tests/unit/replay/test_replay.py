"""A Replay in one process: its config, its content, its metrics and its end."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gear_support import SCHEMA, SHM, config_of, trajectory
from process_support import environment
from replay_support import FIELDS, LENGTHS, offline, online, same, split, take
from warm_python import run_warm

from deepspeed_gear import Replay
from deepspeed_gear.errors import ConfigError, DataError, StoreError, StoreFullError
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.replay.metrics import Progress, ProgressMeter

# ---- configs -------------------------------------------------------------------------------------


def test_a_config_is_a_mapping_or_a_file(data: Path, tmp_path: Path) -> None:
    inner = config_of(data, fields=FIELDS)
    section = {**inner, "batch_size": 16}
    ds_config = {"train_batch_size": 16, "optimizer": {"type": "Adam"}, "gear": inner}
    (tmp_path / "gear.json").write_text(json.dumps(section))
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    found = []
    for config in (section, tmp_path / "gear.json", ds_config, str(tmp_path / "ds.json")):
        with Replay(config) as replay:
            found.append(replay.sample().clone())
    assert all(same(found[0], other) for other in found[1:])


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda t: Replay(t / "absent.json"), ConfigError, "must be a readable file, got .*absent.json"),
        (lambda t: Replay(t / "broken.json"), ConfigError, "broken.json must be JSON; Expecting"),
        (lambda t: Replay(config_of(t / "absent", batch_size=2)), DataError, "absent"),
        (
            lambda t: Replay({"train_batch_size": 8, "gear": config_of(batch_size=8)}),
            ConfigError,
            "gear.batch_size must not be given with an engine or a ds_config, got 8; use train_batch_size",
        ),
        (
            lambda t: Replay({"train_batch_size": 8, "optimizer": {}}),
            ConfigError,
            'the config must have a section "gear", got .*; add "gear": {"data": ',
        ),
        (
            lambda t: Replay({"train_batch_size": "auto", "gear": config_of()}),
            ConfigError,
            "train_batch_size must be an integer >= 1 where there is no engine, got 'auto'",
        ),
        (lambda t: Replay(config_of(batch_size=2)), ConfigError, "main must have a schema; give it here or"),
        (
            lambda t: Replay(config_of(batch_size=2), schemas={"main": SCHEMA, "x": SCHEMA}),
            ConfigError,
            "schemas must be of tables in the config, got 'x'",
        ),
    ],
)
def test_refusals(tmp_path: Path, make: Callable[[Path], Replay], error: type, text: str) -> None:
    (tmp_path / "broken.json").write_text("{broken")
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=text):
        make(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == files


def test_no_room_is_an_error_that_leaves_nothing() -> None:
    status, files = os.statvfs(SHM), len(os.listdir("/proc/self/fd"))
    capacity = status.f_bavail * status.f_frsize // 20
    tables = {"main": {"capacity_steps": capacity, "capacity_trajectories": 10}}
    text = r"/dev/shm must have [\d.]+ \w+ free, got .*; lower the table's capacity"
    with pytest.raises(StoreFullError, match=text):
        online(tables=tables)
    assert len(os.listdir("/proc/self/fd")) == files


# ---- content -------------------------------------------------------------------------------------


def test_read_gives_whole_trajectories(data: Path) -> None:
    with offline(data) as replay:
        assert len(replay) == len(LENGTHS)
        assert replay.num_steps == sum(LENGTHS)
        for number, found in zip([3, 0, 3], replay.read(torch.tensor([3, 0, 3])), strict=True):
            wanted = trajectory(number, LENGTHS[number], number % 2 == 0, number % 2 == 1)
            assert all(torch.equal(found[name], torch.as_tensor(wanted[name])) for name in wanted)
        with pytest.raises(StoreError, match="table main: id must be stored, got 40"):
            replay.read([1, 40])
        assert replay.read([]) == []


def test_a_data_set_is_not_changed(data: Path) -> None:
    with offline(data) as replay:
        for change in (lambda: replay.add(trajectory(0, 3)), lambda: replay.remove([0]), replay.clear):
            with pytest.raises(StoreError, match="it holds a read-only data set"):
                change()
        assert len(replay) == len(LENGTHS)


def test_several_tables(data: Path) -> None:
    tables = {"demo": {"data": str(data)}, "online": {"capacity_steps": 100}}
    options = {"tables": tables, "sampler": {"table": "online"}, "batch_size": 4}
    with Replay(config_of(**options), schemas={"online": SCHEMA}) as replay:
        assert len(replay) == 0
        assert replay.add(trajectory(7, 3)) == 0
        assert replay.sample()["task"].tolist() == [7] * 4
        assert len(replay.read([39], table="demo")[0]["code"]) == LENGTHS[39]
        with pytest.raises(StoreError, match="table demo must have a capacity"):
            replay.add(trajectory(0, 3), table="demo")
        with pytest.raises(ConfigError, match="table must be one of demo, online, got 'offline'"):
            replay.read([0], table="offline")
    with pytest.raises(ConfigError, match=r"gear.sampler.table must be given where there are several"):
        Replay(config_of(**{**options, "sampler": {}}), schemas={"online": SCHEMA})


@pytest.mark.parametrize(
    ("condition", "admitted"),
    [({"min": 10, "max": 12}, {10, 11, 12}), ({"in": [3, 5, 99]}, {3, 5}), ({"min": 1000}, set())],
)
@pytest.mark.parametrize("kind", ["uniform", "epoch", "length"])
def test_where(data: Path, condition: dict[str, Any], admitted: set[int], kind: str) -> None:
    with offline(data, sampler={"kind": kind, "where": {"task": condition}}, batch_size=60) as replay:
        if admitted:
            assert set(replay.sample()["task"].tolist()) == admitted
            return
        text = r"40 trajectories \(\d+ steps\) outside of sampler.where.\w+'; check sampler.where"
        with pytest.raises(StoreError, match=text):
            replay.sample()


# ---- the end -------------------------------------------------------------------------------------


def test_after_close(data: Path) -> None:
    replay = split(data)
    batch, passing = replay.sample(), replay.iterator("eval")
    next(passing)
    kept = batch.clone()
    replay.close()
    replay.close()
    uses: list[Callable[[], Any]] = [
        replay.sample,
        lambda: replay.transform,
        lambda: replay.fingerprint,
        lambda: len(replay),
        lambda: replay.read([0]),
        replay.state_dict,
        replay.statistics,
        lambda: replay.add(trajectory(0, 2)),
        lambda: next(replay.iterator("eval")),
        lambda: next(passing),
        lambda: next(iter(replay)),
    ]
    for use in uses:
        with pytest.raises(StoreError, match="the Replay must be open; it was closed"):
            use()
    assert same(batch, kept)


def test_dropping_the_last_reference_closes(data: Path) -> None:
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        offline(data, data={"path": str(data), "load": "memory"}).sample()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files + 1


@pytest.mark.parametrize("prefetch", [0, 2])
def test_several_replays_at_once(data: Path, prefetch: int) -> None:
    with contextlib.ExitStack() as stack:
        replays = [stack.enter_context(offline(data, seed=s, prefetch=prefetch)) for s in (0, 0, 1)]
        for _ in range(5):
            first, second, third = (replay.sample() for replay in replays)
            assert same(first, second)
            assert not torch.equal(first.trajectory_id, third.trajectory_id)


def test_statistics(data: Path) -> None:
    with offline(data) as replay:
        take(replay, 3)
        found = replay.statistics()
    assert found["trajectories"] == 40
    assert found["steps"] == sum(LENGTHS)
    assert found["batches"] == 3
    assert 0 < found["sample_ms"] <= found["wait_ms"] < 1000
    assert 0 < found["padding"] < 0.5
    assert found["store_bytes"] >= 40 * 64
    assert set(found) >= {"huge_bytes", "payload_bytes", "bytes", "epoch"}


def test_a_meter_measures_from_reading_to_reading() -> None:
    meter = ProgressMeter(Progress(100, 10.0, 1.0, None))
    first = meter.read(Progress(48100, 14.0, 1.5, 2.25))
    assert first == Progress(48000, 4.0, 0.5, 2.25)
    assert (first.samples_per_s, first.wait_share) == (12000.0, 0.125)
    assert str(first) == "12,000 samples/s, 12.5% of the time waiting for data, policy lag 2.2"
    second = meter.read(Progress(48101, 14.5, None, None))
    assert second == Progress(1, 0.5, None, None)
    assert str(second) == "2 samples/s"
    assert str(meter.read(Progress(48101, 14.5, 1.5, None))) == "0 samples/s"


def test_progress_is_that_since_the_last_call(data: Path) -> None:
    with offline(data, gradient_accumulation_steps=4) as replay:
        take(replay, 5)
        found = replay.progress()
        assert found.num_samples == 5 * 4
        assert 0 < found.wait_s == replay.metrics.wait_s < found.elapsed_s
        assert found.lag is None
        take(replay, 1)
        assert replay.progress().num_samples == 4
        assert replay.progress().num_samples == 0
    with pytest.raises(StoreError, match="must be open"):
        replay.progress()


def test_closing_tells_what_ends_it(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not an error that is handled around it."""
    section, told = config_of(data, batch_size=16), list[BaseException]()
    monkeypatch.setattr(ReplayParts, "explain", lambda self, error: told.append(error))
    inner = ValueError("inner")
    try:
        raise KeyError("outer")
    except KeyError:
        Replay(section).close()
        with pytest.raises(ValueError, match="inner"), contextlib.closing(Replay(section)):
            raise inner from None
    assert told == [inner]
    with pytest.raises(ValueError, match="inner"), Replay(section):
        raise inner
    assert set(told) == {inner}


@pytest.mark.parametrize(
    "ending", ["pass", "sys.exit(3)", "raise ValueError('mine')", "replay.close()", "del replay"]
)
def test_ending_a_process_while_batches_are_prepared(data: Path, ending: str) -> None:
    section = config_of(data, batch_size=16, prefetch=4)
    program = f"import sys; from deepspeed_gear import Replay; replay = Replay({section!r}); "
    program += f"replay.sample(); {ending}"
    begin = time.monotonic()
    done = run_warm("-c", program, env=environment(), timeout_s=60.0)
    assert done.returncode == {"sys.exit(3)": 3, "raise ValueError('mine')": 1}.get(ending, 0), done.stderr
    assert ("ValueError: mine" in done.stderr) == ("mine" in ending)
    assert "Fatal" not in done.stderr
    assert time.monotonic() - begin < 50
