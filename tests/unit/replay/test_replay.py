"""A Replay in one process: its config, its content, its metrics, its end, and views that outlive
it.
"""

import contextlib
import gc
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, SHM, STEP, config_of, prefix, shared_files, trajectory
from process_support import environment
from replay_support import FIELDS, LENGTHS, filled, offline, online, same, split, take
from warm_python import run_warm

from deepspeed_gear import Replay
from deepspeed_gear.errors import ConfigError, DataError, StoreError, StoreFullError
from deepspeed_gear.replay import node_stores
from deepspeed_gear.replay.metrics import Progress
from deepspeed_gear.replay.replay_parts import ReplayParts
from deepspeed_gear.store.cgroup_limits import MemoryLimit


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


@pytest.mark.parametrize("left", [1, 1 << 40])
def test_data_larger_than_memory_are_read_page_by_page(
    data: Path, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        node_stores, "tightest", lambda read: MemoryLimit("memory.max", left, "of a test")
    )
    with Replay(config_of(data, batch_size=2)) as replay:
        dataset = replay.tables["main"].spec.dataset
        assert dataset is not None
        dataset.statistics_for({"test": 0.5})  # one pass, in order
        maps = Path("/proc/self/smaps").read_text().split("VmFlags:")
        flags = {
            before.rpartition(".npy")[0][-6:]: after.split() for before, after in pairwise(maps)
        }
        assert ("rr" in flags["reward"]) == (left == 1)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("absent.json", "must be a readable file, got .*absent.json"),
        ("broken.json", "broken.json must be JSON, got 'Expecting"),
        (config_of(Path("absent"), batch_size=2), "absent"),
        (
            {"train_batch_size": 8},
            'the config must have a section "gear", got .*; add "gear": {"data": ',
        ),
        (
            {"train_batch_size": "auto", "gear": config_of()},
            "an integer >= 1 where there is no engine, got 'auto'",
        ),
        (config_of(batch_size=2), "main must have a schema; give it here or"),
    ],
)
def test_refusals(tmp_path: Path, config: Any, text: str) -> None:
    (tmp_path / "broken.json").write_text("{broken")
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises((ConfigError, DataError), match=text):
        Replay(tmp_path / config if isinstance(config, str) else config)
    with pytest.raises(ConfigError, match="schemas must name tables of the config, got 'x'"):
        Replay(config_of(batch_size=2), schemas={"main": SCHEMA, "x": SCHEMA})
    assert len(os.listdir("/proc/self/fd")) == files


def test_no_room_is_an_error_that_leaves_nothing() -> None:
    status = os.statvfs(SHM)
    files = len(os.listdir("/proc/self/fd"))
    capacity = status.f_bavail * status.f_frsize // 20
    tables = {"main": {"capacity_steps": capacity, "capacity_trajectories": 10}}
    text = r"/dev/shm must have [\d.]+ \w+ free, got .*; lower the table's capacity"
    with pytest.raises(StoreFullError, match=text):
        online(tables=tables)
    assert len(os.listdir("/proc/self/fd")) == files


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
        for change in (
            lambda: replay.add(trajectory(0, 3)),
            lambda: replay.remove([0]),
            replay.clear,
        ):
            with pytest.raises(StoreError, match="it holds a read-only data set"):
                change()
        assert len(replay) == len(LENGTHS)


def test_several_tables(data: Path) -> None:
    tables = {"demo": {"data": str(data)}, "online": {"capacity_steps": 100}}
    config = config_of(tables=tables, sampler={"table": "online"}, batch_size=4)
    with Replay(config, schemas={"online": SCHEMA}) as replay:
        assert len(replay) == 0
        assert replay.add(trajectory(7, 3)) == 0
        assert replay.sample()["task"].tolist() == [7] * 4
        assert len(replay.read([39], table="demo")[0]["code"]) == LENGTHS[39]
        with pytest.raises(StoreError, match="table demo must have a capacity"):
            replay.add(trajectory(0, 3), table="demo")
        with pytest.raises(ConfigError, match="table must be one of demo, online, got 'offline'"):
            replay.read([0], table="offline")


def test_after_close(data: Path) -> None:
    replay = split(data, prefetch=2)
    batch = replay.sample()
    passing = replay.iterator("eval")
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


def test_progress_is_a_difference_of_totals() -> None:
    before = Progress(48100, 14.0, 1.5, 2.25)
    first = before - Progress(100, 10.0, 1.0, None)
    assert first == Progress(48000, 4.0, 0.5, 2.25)
    assert (first.samples_per_s, first.wait_share) == (12000.0, 0.125)
    assert str(first) == "12,000 samples/s, 12.5% of the time waiting for data, policy lag 2.2"
    second = Progress(48101, 14.5, None, None) - before
    assert second == Progress(1, 0.5, None, None)
    assert str(second) == "2 samples/s"


def test_statistics_and_the_progress_since_the_last_call(data: Path) -> None:
    with offline(data, gradient_accumulation_steps=4) as replay:
        take(replay, 5)
        known = replay.statistics()
        assert (known["trajectories"], known["steps"], known["batches"]) == (40, sum(LENGTHS), 5)
        assert 0 < known["sample_ms"] <= known["wait_ms"]
        assert 0 < known["padding"] < 0.5
        assert known["store_bytes"] >= 40 * 64
        assert set(known) >= {"huge_bytes", "payload_bytes", "bytes", "epoch"}
        found = replay.progress()
        assert found.num_samples == 5 * 4
        assert 0 < found.wait_s == replay.metrics.sums["wait_s"] < found.elapsed_s
        assert found.lag is None
        take(replay, 1)
        assert replay.progress().num_samples == 4
        assert replay.progress().num_samples == 0
    with pytest.raises(StoreError, match="must be open"):
        replay.progress()


def test_closing_tells_what_ends_it(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not an error that is handled around it."""
    section = config_of(data, batch_size=16)
    told = list[BaseException]()
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
    done = run_warm("-c", program, env=environment())
    assert done.returncode == {"sys.exit(3)": 3, "raise ValueError('mine')": 1}.get(ending, 0), (
        done.stderr
    )
    assert ("ValueError: mine" in done.stderr) == ("mine" in ending)
    assert "Fatal" not in done.stderr


# ---- views of a store outlive its replay ---------------------------------------------------------


LARGE = {"main": {"capacity_bytes": 2 << 20, "max_length": 100}}


def replay_of(kind: str = "prioritized", **options: object) -> Replay:
    sampler = {"kind": kind, "unit": "step"}
    replay = filled(
        [7] * 3, sampler=sampler, fields={"code": {}}, batch_size=4, prefetch=2, **options
    )
    replay.sample()
    return replay


def maps() -> list[str]:
    """The memory of stores that this process maps, with or without a name."""
    gc.collect()  # what former tests have left
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line
    ]


def read_all() -> None:
    """What the test below runs in a process of its own, which a view without memory would end."""
    replay = replay_of()
    table = replay.tables["main"]
    codes = table.tensor("code")
    views = [
        codes,
        table.columns["observation"],
        table.slots,
        table.gather_source("action"),
        codes[3:5],
    ]
    before = [np.asarray(view).copy() for view in views]
    replay.close()
    assert shared_files(prefix()) == []
    for view, kept in zip(views, before, strict=True):
        assert np.array_equal(np.asarray(view), kept)
    assert codes[:7].tolist() == list(range(7))
    assert codes[8:15].tolist() == list(range(STEP, STEP + 7)), (
        "behind the row of the last observation"
    )
    codes.zero_()


def test_views_can_be_read_after_close() -> None:
    program = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); "
    program += "import test_replay; test_replay.read_all()"
    done = run_warm("-c", program, env=environment())
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"


@pytest.mark.parametrize("kind", ["uniform", "prioritized"])
def test_a_closed_replay_keeps_no_memory_but_that_of_a_view(kind: str) -> None:
    before = maps()
    replay = replay_of(kind, tables=LARGE)
    kept = replay.sample()
    codes = replay.tables["main"].tensor("code")
    replay.close()
    assert len(maps()) == len(before) + 1
    del codes
    assert maps() == before
    assert kept["code"].shape == (4,)
