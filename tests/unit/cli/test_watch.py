"""`gear watch` and `gear serve --metrics` of runs of this process: frames, pages, metrics, errors.

tests/distributed/test_engine.py watches two ranks under a launcher.
"""

import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, config_of, prefix, run_command, trajectory, wait_until
from group_support import add_groups, section
from prometheus_client.parser import text_string_to_metric_families

from deepspeed_gear import Replay
from deepspeed_gear.cli import metrics_server, serve, watch
from deepspeed_gear.cli.metrics_server import HELP, MetricsServer, RunSource, Sample, exposition
from deepspeed_gear.distributed.batch_barrier import BarrierWord
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.replay import run_reading
from deepspeed_gear.replay.run_reading import LiveRun, find_run
from deepspeed_gear.store.live_stores import living_stores
from deepspeed_gear.store.memory_layout import RunIdentity
from deepspeed_gear.store.records import PROGRESS, RankProgress

LENGTHS = (1, 2, 5, 9, 14, 3)
PRIORITIZED = {"kind": "prioritized", "unit": "step", "alpha": 0.5, "beta": 0.5}

run = partial(run_command, watch)


def replay_of(name: str, **options: Any) -> Replay:
    memory = {"prefix": prefix(), "run": name}
    given = {"batch_size": 16, "fields": {"code": {}}, "sampler": PRIORITIZED, **options}
    return Replay(config_of(shared_memory=memory, **given), schemas={"main": SCHEMA})


def train(replay: Replay, batches: int = 3) -> None:
    for number, steps in enumerate(LENGTHS):
        replay.add(trajectory(number, steps))
    for _ in range(batches):
        batch = replay.sample()
        priorities = torch.arange(1, 17, dtype=torch.float32)
        replay.update_priorities(batch, priorities)


def live_run(replay: Replay) -> LiveRun:
    stores = [store for store in living_stores(os.getpid()) if store.run.id == replay.run]
    return LiveRun(stores)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Replay]]:
    """Return what makes a running job; a look for runs finds those of the test, and no other."""
    with ExitStack() as stack:
        replays: list[Replay] = []

        def runs() -> list[LiveRun]:
            found = [live_run(replay) for replay in replays]
            return [one for one in found if one.lives]

        def make(name: str, **options: Any) -> Replay:
            replays.append(stack.enter_context(replay_of(name, **options)))
            train(replays[-1])
            return replays[-1]

        def runs_of_open() -> list[LiveRun]:
            replays[:] = [replay for replay in replays if "closed" not in repr(replay)]
            return runs()

        monkeypatch.setattr(run_reading, "living_runs", runs_of_open)
        monkeypatch.setattr(metrics_server, "living_runs", runs_of_open)
        yield make


def frame(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run("--once", "--every", "0.1", *arguments) == 0
    return capsys.readouterr().out


def test_a_frame(running: Callable[..., Replay], capsys: pytest.CaptureFixture[str]) -> None:
    """Of the only run, by its name, its id, the beginning of this and a process."""
    replay = running("watched")
    shown = frame(capsys)
    assert shown.startswith(f"run watched ({replay.run})\n")
    assert "1 of 1 ranks, 0 writers" in shown
    for text in (
        "table main: prioritized, unit step",
        "6 of 60 trajectories",
        f"{sum(LENGTHS) + len(LENGTHS)} of ",  # T+1 rows each
        "6 ever",
        "3 batches ever",
        "effective sample size",
        "newer trajectories",
        "max 16",
        str(os.getpid()),
    ):
        assert text in shown, text
    for name in ("watched", replay.run, replay.run[:6], str(os.getpid())):
        assert f"run watched ({replay.run})" in frame(capsys, name)


def test_a_reading_has_the_statistics_of_the_run(running: Callable[..., Replay]) -> None:
    replay = running("watched", count_draws=True)
    known = replay.statistics()
    taken = replay.take_metrics()
    reading = live_run(replay).read()
    (table,) = reading.tables
    (rank,) = reading.ranks
    assert (table.trajectories, table.steps) == (known["trajectories"], known["steps"])
    assert (table.batches, table.samples, table.added) == (3, 48, len(LENGTHS))
    assert table.fill == taken["table_fill.main"]
    assert table.batch is not None
    assert table.batch.effective == pytest.approx(taken["effective_samples"], rel=1e-6)
    assert table.batch.duplicates == pytest.approx(taken["duplicates"])
    assert table.batch.ages.mean() == taken["age"]
    assert table.priorities is not None
    histogram = known["drawn"]["main"]["priorities"]
    bins, counts = np.unique(np.frexp(table.priorities)[1] - 1, return_counts=True)
    assert dict(zip(bins.tolist(), counts.tolist(), strict=True)) == histogram
    assert (rank.rank, rank.process, rank.batches, rank.lives) == (0, os.getpid(), 3, True)
    assert rank.wait_s == replay.metrics.sums["wait_s"] > 0
    assert rank.late_s is None, "no other rank is there to wait for it"


def test_ages_are_left_out_where_other_nodes_store_all_samples(
    running: Callable[..., Replay], capsys: pytest.CaptureFixture[str]
) -> None:
    reading = live_run(running("watched")).read()
    (table,) = reading.tables
    assert table.batch is not None
    assert "gear_batch_age" in exposition([reading])
    batch = replace(table.batch, ages=np.empty(0, np.float64))
    elsewhere = replace(reading, tables=(replace(table, batch=batch),))
    assert "gear_batch_age" not in exposition([elsewhere])
    node = SimpleNamespace(read=lambda: elsewhere)
    watch.Console(width=120).print(watch.RunView(node).frame())
    shown = capsys.readouterr().out
    assert "effective sample size" in shown
    assert "newer trajectories" not in shown


def test_a_frame_of_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with Replay(section()) as replay:
        add_groups(replay, range(5))
        view = watch.RunView(live_run(replay))
        for number in replay.tables["main"].slots[:15, Slot.ID].tolist():
            replay.fill(number, reward=np.float32(1))
        for _ in replay.step():
            pass
        view.read()
        watch.Console(width=120).print(view.frame())
        text = exposition([live_run(replay).read()])
    shown = capsys.readouterr().out
    assert "table main: fifo, unit group" in shown
    assert "5 complete, 0 evicted unsampled, 0 rejected" in shown
    assert "tokens/s" in shown
    assert 'table="main",state="complete"} 5.0' in text
    assert "gear_rank_tokens_total" in text


def test_a_frame_of_a_data_set(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(dataset, fields={"code": {}}, batch_size=4)
    with Replay(config) as replay:
        view = watch.RunView(live_run(replay))
        replay.sample()
        view.read()
        watch.Console(width=100).print(view.frame())
    shown = capsys.readouterr().out
    assert "a data set: " in shown
    assert "writers  " not in shown
    assert "1 batches ever" in shown


def test_a_page_is_whole_and_for_light_and_dark(
    running: Callable[..., Replay], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running("watched")
    page = tmp_path / "run.html"
    frame(capsys, "--html", str(page))
    text = page.read_text(encoding="utf-8")
    assert text.count("<pre>") == 2
    assert "prefers-color-scheme: dark" in text
    assert re.search(r"<script|<link|src=|refresh", text) is None, "it needs nothing else"
    assert os.listdir(tmp_path) == ["run.html"]


def test_a_run_that_ends_while_it_is_watched(
    running: Callable[..., Replay], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = running("ending")
    page = tmp_path / "run.html"
    statuses: list[int] = []
    given = ("ending", "--html", str(page), "--every", "0.1")
    thread = threading.Thread(target=lambda: statuses.append(run(*given)))
    thread.start()
    wait_until(page.exists, "the first page")
    assert 'http-equiv="refresh"' in page.read_text(encoding="utf-8")
    text = replay.run
    replay.close()
    thread.join()
    assert statuses == [0]
    assert capsys.readouterr().out.endswith(f"run ending ({text}) has ended\n")
    last = page.read_text(encoding="utf-8")
    assert "the run has ended" in last
    assert "refresh" not in last


def test_a_watch_keeps_no_memory_of_an_ended_run(running: Callable[..., Replay]) -> None:
    replay = running("ending")
    watched = live_run(replay)
    replay.close()
    assert not watched.lives
    assert not watched.read().lives
    with pytest.raises(ConfigError, match="no job of this user runs here"):
        find_run("ending")


@pytest.mark.parametrize(
    ("names", "asked", "text"),
    [
        ((), (), "RUN must be running on this machine; no job of this user runs here"),
        (("one",), ("two",), "must be the name or id of a running job of this user"),
        (("one", "two"), (), "RUN must be named where several run; one ("),
        (("one", "one"), ("one",), "RUN must be one run, got 'one'; one ("),
        (("one",), ("one", "--every", "0"), "--every must be in"),
        (("one",), ("one", "--html", "/nowhere/run.html"), "--html must be a file"),
    ],
)
def test_refused(
    names: tuple[str, ...], asked: tuple[str, ...], text: str, running: Callable[..., Replay]
) -> None:
    for name in names:
        running(name)
    with pytest.raises(ConfigError, match=re.escape(text)) as refused:
        run("--once", *asked)
    if len(names) > 1:
        assert str(refused.value).count("tables main; processes") == len(names)


@pytest.mark.parametrize(
    ("asked", "reached", "late"),
    [
        ((5, 5), (4, 4), (None, None)),  # both gather
        ((6, 5), (5, 5), (None, 2.0)),  # rank 1 computes, rank 0 has asked for the next batch
        ((6, 6), (5, 6), (3.0, None)),  # rank 0 gathers, rank 1 is at the barrier
        ((6, 0), (5, 0), (None, None)),  # an inner stage takes no batches
    ],
)
def test_the_rank_that_others_wait_for(
    asked: tuple[int, int],
    reached: tuple[int, int],
    late: tuple[float | None, float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = np.zeros((2, BarrierWord.NUM_WORDS), np.int64)
    words[:, BarrierWord.REQUESTED] = asked
    words[:, BarrierWord.REACHED] = reached
    words[:, BarrierWord.REQUESTED_NS] = 8 * 10**9
    words[:, BarrierWord.ARRIVED_NS] = 7 * 10**9
    progress = np.zeros((2, RankProgress.NUM_WORDS))
    progress[:, RankProgress.RANK] = 0, 1
    progress[:, RankProgress.BEGUN_S] = 1.0
    views = {"status/words": words, PROGRESS: progress, "peers": np.zeros((2, 8), np.int64)}
    store: Any = SimpleNamespace(views=views, run=RunIdentity("ab12"), table="main")
    store.layout = SimpleNamespace(meaning={})
    store.is_attached = lambda peer: True
    monkeypatch.setattr(time, "monotonic_ns", lambda: 10 * 10**9)
    ranks = LiveRun([store])._ranks()
    assert [rank.waited_for_s for rank in ranks] == list(late)
    shown = [str(watch._state(rank, 10.0)) for rank in ranks]
    assert [f"others wait for it, {late_s} s" for late_s in late if late_s] == [
        text for text in shown if "wait" in text
    ]


def test_a_live_view_needs_a_terminal() -> None:
    with pytest.raises(ConfigError, match="must be a terminal for a live view; give --once"):
        run()


def test_metrics_are_prometheus_text(running: Callable[..., Replay]) -> None:
    """Each has HELP and TYPE of the list, and labels of its run and table, or rank."""
    steps = running("steps")
    text = exposition([live_run(steps).read()])
    families = {family.name: family for family in text_string_to_metric_families(text)}
    known = {f"gear_{name.removesuffix('_total')}": (name, text) for name, text in HELP.items()}
    for name, family in families.items():
        full_name, documentation = known[name]
        assert family.documentation == documentation
        assert family.type == ("counter" if full_name.endswith("_total") else "gauge")
        for sample in family.samples:
            assert sample.labels["run"] == "steps"
            assert sample.labels.get("table", "main") == "main"
    assert families["gear_table_steps"].samples[0].value == sum(LENGTHS)
    assert families["gear_table_rows"].samples[0].value == sum(LENGTHS) + len(LENGTHS)
    assert families["gear_table_samples"].samples[0].value == 48
    assert families["gear_rank_up"].samples[0].labels == {"run": "steps", "rank": "0"}
    assert text.endswith("\n")


def test_labels_are_escaped() -> None:
    line = str(Sample("rank_up", {"run": 'a"b\\c\nd'}, 1.0))
    (family,) = text_string_to_metric_families(f"{line}\n")
    assert family.samples[0].labels == {"run": 'a"b\\c\nd'}


def test_a_scrape_sees_runs_that_begin_and_end(
    running: Callable[..., Replay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "_LOOK_S", 0.0)
    server = MetricsServer(RunSource(None), "127.0.0.1", 0, insecure=False)
    try:

        def scrape() -> str:
            with urllib.request.urlopen(server.url, timeout=60) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                return str(answer.read().decode())

        assert scrape() == ""
        replay = running("scraped")
        assert 'gear_table_steps{run="scraped",table="main"} 34.0' in scrape()
        replay.close()
        assert scrape() == ""
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url.replace("metrics", "other"), timeout=60)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((), "--config must be given where trajectories are received"),
        (("--metrics", "--config", "ds_config.json"), "--token-file must be given"),
        (("--metrics", "70000"), "--metrics must be a port in [0, 65535], got 70000"),
        (("--metrics", "--host", "0.0.0.0"), "--host must be a loopback address"),
        (("--metrics", "0", "--run", "nothing-runs"), "RUN must be the name or id of a running"),
    ],
)
def test_metrics_refused(given: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        run_command(serve, *given)


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--metrics {port} must be a port of 127.0.0.1"):
            run_command(serve, "--metrics", str(port))
