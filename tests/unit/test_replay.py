"""A Replay in one process: content, streams, state, prefetch, transform, closing, interrupts."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import (
    SCHEMA,
    SHM,
    check_whole,
    config_of,
    environment,
    lengths_of,
    prefix,
    shared_files,
    trajectory,
    write_dataset,
)

from deepspeed_gear import Batch, Replay
from deepspeed_gear.errors import CheckpointError, ConfigError, DataError, StoreError, StoreFullError
from deepspeed_gear.store.split import split_of

LENGTHS = lengths_of(40)
FIELDS = {"code": {"offset": -2, "length": 4}, "observation": {"normalize": "mean_std"}, "task": {}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "d", LENGTHS)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    threads = threading.active_count()
    yield
    gc.collect()
    assert shared_files(prefix()) == []
    assert threading.active_count() <= threads  # others may have ended meanwhile


def offline(data: Path, /, **options: Any) -> Replay:
    return Replay(config_of(data, **{"batch_size": 16, "fields": FIELDS, **options}))


def online(**options: Any) -> Replay:
    return Replay(config_of(**{"batch_size": 8, **options}), schemas={"main": SCHEMA})


def take(replay: Replay, count: int) -> list[Batch]:
    return [replay.sample().clone() for _ in range(count)]


def same(a: Batch, b: Batch) -> bool:
    parts = ("id", "anchor", "number", "probability", "weight", "epoch", "valid")
    fields = list(a) == list(b) and all(torch.equal(a[n], b[n]) for n in a)
    return fields and all(torch.equal(getattr(a, p), getattr(b, p)) for p in parts)


# ---- configs -------------------------------------------------------------------------------------


def test_a_config_is_a_mapping_or_a_file(data: Path, tmp_path: Path) -> None:
    section = config_of(data, batch_size=16, fields=FIELDS)
    (tmp_path / "gear.json").write_text(json.dumps(section))
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 99, "gear": section}))
    found = []
    for config in (section, tmp_path / "gear.json", str(tmp_path / "ds.json")):
        with Replay(config) as replay:
            found.append(replay.sample().clone())
    assert same(found[0], found[1])
    assert same(found[0], found[2])


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda t: Replay(t / "absent.json"),
            ConfigError,
            "config must be a readable file, got .*absent.json",
        ),
        (lambda t: Replay(t / "broken.json"), ConfigError, "broken.json must be JSON; Expecting"),
        (lambda t: Replay(config_of(t / "absent", batch_size=2)), DataError, "absent"),
        (
            lambda t: Replay(config_of()),
            ConfigError,
            "gear.batch_size must be given where there is no engine",
        ),
        (lambda t: online(batch_size=8, micro_batch_size=3), ConfigError, "gear.batch_size must be"),
        (
            lambda t: Replay(config_of(batch_size=2)),
            ConfigError,
            r"gear.tables.main must have a schema; give it here or",
        ),
        (
            lambda t: online(sampler={"where": {"absent": {"min": 1}}}),
            ConfigError,
            "must name a column, got 'absent'",
        ),
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
    with pytest.raises(
        StoreFullError, match=r"/dev/shm must have \d+ bytes free, got .*; lower the table's capacity"
    ):
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
    ("where", "admits"),
    [
        ({"task": {"min": 10, "max": 12}}, lambda n: 10 <= n <= 12),
        ({"task": {"in": [3, 5, 99]}}, lambda n: n in (3, 5)),
        ({"task": {"min": 38}}, lambda n: n >= 38),
    ],
)
@pytest.mark.parametrize("kind", ["uniform", "epoch", "length"])
def test_where(data: Path, where: dict[str, Any], admits: Callable[[int], bool], kind: str) -> None:
    with offline(data, sampler={"kind": kind, "where": where}, batch_size=60) as replay:
        found = set(replay.sample()["task"].tolist())
        assert found == {n for n in range(40) if admits(n)}


def test_where_nothing_is_admitted(data: Path) -> None:
    with (
        offline(data, sampler={"where": {"task": {"min": 1000}}}) as replay,
        pytest.raises(StoreError, match=r"got '40 trajectories, none admitted'; check sampler.where"),
    ):
        replay.sample()


# ---- streams -------------------------------------------------------------------------------------

SPLIT = {"eval": 0.2, "test": 0.1}


def split(data: Path, /, **options: Any) -> Replay:
    return offline(data, data={"path": str(data), "split": SPLIT}, batch_size=8, **options)


def visited(replay: Replay, stream: str) -> list[tuple[int, int]]:
    found = []
    for batch in replay.iterator(stream):
        assert batch.weight.tolist() == batch.valid.float().tolist()
        found += list(zip(batch.id[batch.valid].tolist(), batch.anchor[batch.valid].tolist(), strict=True))
    return found


@pytest.mark.parametrize("unit", ["step", "trajectory"])
@pytest.mark.parametrize("kind", ["uniform", "epoch", "length"])
def test_a_split_is_visited_once(data: Path, unit: str, kind: str) -> None:
    if kind == "length" and unit == "step":
        return
    members = split_of(np.arange(40), SPLIT)
    with split(data, sampler={"kind": kind, "unit": unit}) as replay:
        for index, name in enumerate(sorted(SPLIT)):
            ids = np.nonzero(members == index + 1)[0].tolist()
            first, second = visited(replay, name), visited(replay, name)
            assert first == second
            if unit == "step":
                assert first == [(i, s) for i in ids for s in range(LENGTHS[i])]
            else:
                assert [i for i, _ in first] == ids
        trained = {i for batch in take(replay, 40) for i in batch.id.tolist()}
        assert trained
        assert trained <= set(np.nonzero(members == 0)[0].tolist())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_evaluation_does_not_disturb_training(data: Path, prefetch: int) -> None:
    with split(data) as replay:
        wanted = take(replay, 12)
    with split(data, prefetch=prefetch, gradient_accumulation_steps=1) as replay:
        found = take(replay, 3)
        visited(replay, "eval")
        found += take(replay, 3)
        left = replay.iterator("eval")
        next(left)
        found += take(replay, 3)
        visited(replay, "test")
        visited(replay, "eval")
        found += take(replay, 3)
        assert all(same(a, b) for a, b in zip(wanted, found, strict=True))


def test_streams_of_a_config(data: Path) -> None:
    with (
        split(data) as replay,
        pytest.raises(ConfigError, match="stream must be one of train, eval, test, got 'evil'"),
    ):
        replay.iterator("evil")
    with split(data) as first, split(data) as second:
        found = [batch.clone() for _, batch in zip(range(3), first.iterator(), strict=False)]
        assert all(same(a, b) for a, b in zip(found, take(second, 3), strict=True))


def test_epochs_over_accumulated_batches(data: Path) -> None:
    options = {"sampler": {"kind": "epoch", "unit": "step"}, "micro_batch_size": 5, "batch_size": 15}
    with offline(data, **options, gradient_accumulation_steps=3) as replay:
        found: dict[int, Counter[tuple[int, int]]] = {}
        for batch in take(replay, 3 * sum(LENGTHS) // 5):
            for i, a, e in zip(batch.id.tolist(), batch.anchor.tolist(), batch.epoch.tolist(), strict=True):
                found.setdefault(e, Counter())[i, a] += 1
        items = {(i, s) for i, steps in enumerate(LENGTHS) for s in range(steps)}
        assert found[0] == found[1] == Counter(items)
        assert replay.take_metrics()["epoch"] in (2.0, 3.0)


# ---- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("kind", ["uniform", "epoch"])
def test_a_state_continues(data: Path, kind: str, prefetch: int) -> None:
    options = {"sampler": {"kind": kind, "unit": "step"}, "seed": 5}
    with offline(data, **options) as replay:
        wanted = take(replay, 30)
    with offline(data, prefetch=prefetch, **options) as replay:
        take(replay, 20)
        state = json.loads(json.dumps(replay.state_dict()))
        take(replay, 4)
        replay.load_state_dict(state)
        assert all(same(a, b) for a, b in zip(wanted[20:24], take(replay, 4), strict=True))
    with offline(data, **options, prefetch=3 - prefetch) as replay:
        replay.load_state_dict(state)
        assert replay.state_dict() == state
        assert all(same(a, b) for a, b in zip(wanted[20:], take(replay, 10), strict=True))


def test_a_state_counts_whole_global_batches(data: Path) -> None:
    options = {"micro_batch_size": 4, "batch_size": 12, "gradient_accumulation_steps": 3}
    with offline(data, **options) as replay:
        wanted = take(replay, 9)
        assert replay.state_dict()["train"]["main"]["batches"] == 3
        replay.sample()
        state = replay.state_dict()
        words = {"batches": 3, "samples": 36, "epoch": 0, "epoch_first": 0, "epoch_size": 0}
        assert state["train"] == {"main": words}
        again = replay.sample().clone()
        replay.load_state_dict(state)
        assert same(take(replay, 2)[1], again)
    with offline(data, batch_size=12) as replay:  # the same global batches in one piece
        replay.load_state_dict(state)
        take(replay, 1)
        assert replay.state_dict()["train"]["main"]["batches"] == 4
    assert [n for b in wanted for n in b.number.tolist()] == [
        j for k in range(3) for m in range(3) for j in range(12 * k + m, 12 * k + 12, 3)
    ]


def test_passes_after_loading(data: Path) -> None:
    with split(data) as replay:
        state = replay.state_dict()
        wanted = visited(replay, "eval")
        visited(replay, "eval")
        replay.load_state_dict(state)
        assert visited(replay, "eval") == wanted


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 1}, "the gear state must be of the same seed, tables, sampler, fields and n_step"),
        ({"sampler": {"kind": "length"}}, "must be of the same seed, tables, sampler"),
        ({"fields": {"code": {}}}, "must be of the same seed, tables, sampler"),
        ({"format": 99}, "the gear state must have format 1, got 99"),
        ({"data": {"main": "0123"}}, "the gear state must be of the data that this run reads"),
    ],
)
def test_states_of_other_runs_are_refused(data: Path, change: dict[str, Any], text: str) -> None:
    with offline(data) as replay:
        state = replay.state_dict()
        before = take(replay, 1)
    if "format" in change or "data" in change:
        state, change = {**state, **change}, {}
    with offline(data, **change) as replay:
        with pytest.raises(CheckpointError, match=text):
            replay.load_state_dict(state)
        if not change:
            assert same(take(replay, 1)[0], before[0])  # nothing has changed


def test_other_data_are_refused(data: Path, tmp_path: Path) -> None:
    with offline(data) as replay:
        state = replay.state_dict()
    other = write_dataset(tmp_path / "other", LENGTHS[:-1])
    with (
        offline(other) as replay,
        pytest.raises(CheckpointError, match="use the data set that the checkpoint was trained on"),
    ):
        replay.load_state_dict(state)


# ---- prefetch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 3])
def test_prefetched_batches_are_the_same(data: Path, accumulation: int) -> None:
    options = {
        "micro_batch_size": 4,
        "batch_size": 4 * accumulation,
        "gradient_accumulation_steps": accumulation,
    }
    with offline(data, **options) as plain, offline(data, **options, prefetch=3) as ahead:
        for _ in range(30):
            assert same(plain.sample(), ahead.sample())
            assert plain.state_dict()["train"] == ahead.state_dict()["train"]


def test_an_error_of_the_thread_reaches_sample() -> None:
    with online(prefetch=2) as replay:
        for _ in range(2):
            with pytest.raises(StoreError, match="must hold at least one item"):
                replay.sample()
        replay.add(trajectory(0, 5))
        found = take(replay, 3)
    with online() as replay:
        replay.add(trajectory(0, 5))
        assert all(same(a, b) for a, b in zip(found, take(replay, 3), strict=True))


def test_an_error_of_a_transform_is_not_swallowed(data: Path) -> None:
    def transform(batch: Batch, keys: torch.Tensor) -> Batch:
        if 48 <= int(batch.number[0]) < 64 and not failed:
            failed.append(1)
            raise ZeroDivisionError("the fourth batch")
        return batch

    failed: list[int] = []
    with offline(data) as replay:
        wanted = take(replay, 6)
    with offline(data, prefetch=2) as replay:
        replay.transform = transform
        found = take(replay, 3)
        with pytest.raises(ZeroDivisionError, match="the fourth batch"):
            replay.sample()
        found += take(replay, 3)
        assert all(same(a, b) for a, b in zip(wanted, found, strict=True))


def test_adding_while_batches_are_prepared() -> None:
    with online(prefetch=4, tables={"main": {"capacity_steps": 400, "capacity_trajectories": 20}}) as replay:
        for number in range(200):
            if len(replay) == 15:
                replay.remove([number - 15])
            replay.add(trajectory(number, 1 + number % 9))
            batch = replay.sample()
            assert torch.equal(batch["task"], batch.id)
            assert torch.equal(batch["code"] // 1000, batch.id)
        check_whole(replay.tables["main"], list(replay.streams.values()))


# ---- transform -----------------------------------------------------------------------------------


def test_a_transform_sees_keys_of_samples(data: Path) -> None:
    seen: list[torch.Tensor] = []

    def transform(batch: Batch, keys: torch.Tensor) -> Batch:
        seen.append(keys.clone())
        batch["noisy"] = batch["code"] + (keys % 7)[:, None]
        return batch

    with split(data) as replay:
        replay.transform = transform
        first = replay.sample()
        assert torch.equal(first["noisy"] - first["code"], (seen[0] % 7)[:, None].expand(-1, 4))
        replay.sample()
        next(replay.iterator("eval"))
        assert seen[0].dtype == torch.int64
        keys = torch.cat(seen)
        assert len(keys.unique()) == len(keys)
    with split(data, seed=1) as replay:
        replay.transform = transform
        replay.sample()
        assert not torch.equal(seen[-1], seen[0])


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
    replays = [offline(data, seed=seed, prefetch=prefetch) for seed in (0, 0, 1)]
    for _ in range(5):
        first, second, third = (replay.sample() for replay in replays)
        assert same(first, second)
        assert not torch.equal(first.id, third.id)
    for replay in replays:
        replay.close()


def test_metrics(data: Path) -> None:
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


@pytest.mark.parametrize(
    "ending", ["pass", "sys.exit(3)", "raise ValueError('mine')", "replay.close()", "del replay"]
)
def test_ending_a_process_while_batches_are_prepared(data: Path, ending: str, run_python: Any) -> None:
    section = config_of(data, batch_size=16, prefetch=4)
    program = f"import sys; from deepspeed_gear import Replay; replay = Replay({section!r}); "
    program += f"replay.sample(); {ending}"
    begin = time.monotonic()
    done = run_python("-c", program, env=environment(), timeout_s=60.0)
    assert done.returncode == {"sys.exit(3)": 3, "raise ValueError('mine')": 1}.get(ending, 0), done.stderr
    assert ("ValueError: mine" in done.stderr) == ("mine" in ending)
    assert "Fatal" not in done.stderr
    assert time.monotonic() - begin < 50
