"""How an actor finds the store of its own run, where several runs of one user share a node."""

import copy
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gear_support import SCHEMA, prefix, shared_files, trajectory, wait_until
from process_support import in_child, kill, reapers

from deepspeed_gear import Replay, TrajectoryWriter
from deepspeed_gear.actors.start_actors import start_actors
from deepspeed_gear.cli.main import main
from deepspeed_gear.errors import ConfigError, GearError, StoreError, StoreGoneError
from deepspeed_gear.store.live_stores import living_stores
from deepspeed_gear.store.memory_layout import HEADER
from deepspeed_gear.writer import store_search

COLUMNS: dict[str, dict[str, Any]] = {
    "observation": {"dtype": "float32", "shape": [2], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "int64", "role": "action"},
    "reward": {"dtype": "float32", "role": "reward"},
    "terminated": {"dtype": "bool", "role": "terminated"},
    "truncated": {"dtype": "bool", "role": "truncated"},
}


def section(**options: Any) -> dict[str, Any]:
    table = {"capacity_steps": 5000, "max_length": 50, "remove": "fifo", "writers": 3}
    table["schema"] = {"columns": copy.deepcopy(COLUMNS)}
    shared = {"prefix": prefix(), **options.pop("shared_memory", {})}
    return {"tables": {"main": table}, "batch_size": 4, "shared_memory": shared, **options}


def episode() -> dict[str, Any]:
    shapes = {name: (4, 2) if name == "observation" else (3,) for name in COLUMNS}
    return {name: np.zeros(shape, COLUMNS[name]["dtype"]) for name, shape in shapes.items()}


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GEAR_RUN", raising=False)
    yield
    wait_until(lambda: not reapers(prefix()), "the end of the reapers")
    assert shared_files(prefix()) == []


def test_two_runs_of_one_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = section()
    with Replay(config) as one, Replay(section(shared_memory={"run": "second"})) as two:
        with pytest.raises(StoreError, match="must be named where there are several") as caught:
            TrajectoryWriter.attach(config, wait_s=5.0)
        for word in (one.run, f"second ({two.run})", "GEAR_RUN"):
            assert word in str(caught.value)
        for run, of in ((one.run, one), (two.run, two), ("second", two)):
            before = len(of)
            with TrajectoryWriter.attach(config, run=run) as writer:
                assert writer.run == of.run
                writer.add(episode())
            monkeypatch.setenv("GEAR_RUN", run)
            with TrajectoryWriter.attach(config) as writer:
                writer.add(episode())
            monkeypatch.delenv("GEAR_RUN")
            assert len(of) == before + 2
        with TrajectoryWriter.attach(section(shared_memory={"run": "second"})) as writer:
            assert writer.run == two.run
        with pytest.raises(
            StoreError, match=r"got 'its run is not third'; give .* found within 0 s"
        ):
            TrajectoryWriter.attach(config, run="third", wait_s=0.0)
        assert main(["inspect", "--living", str(os.getpid()), "--json"]) == 0
        inspected = json.loads(capsys.readouterr().out)["stores"]
        found = {entry["run"]["id"]: entry["run"]["name"] for entry in inspected}
        assert found.items() >= {one.run: None, two.run: "second"}.items()
        assert main(["inspect", "--living", str(os.getpid())]) == 0
        assert f"  run           second ({two.run})\n" in capsys.readouterr().out


def test_started_actors_add_to_their_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium", reason="actors act in its environments")
    config = section()
    with Replay(config) as one, Replay(config) as two:
        env = "actor_policies:counting"
        policy = "actor_policies:at_once"
        monkeypatch.setenv("GEAR_RUN", two.run)
        with start_actors(env, policy, two), start_actors(env, policy, config):
            wait_until(lambda: len(two) > 4, "items")
        assert len(one) == 0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 7}, "gear.seed: 7 here, 0 there"),
        ({"capacity_steps": 6000}, "gear.tables.main.capacity_steps: 6000 here, 5000 there"),
        ({"remove": "uniform"}, 'gear.tables.main.remove: "uniform" here, "fifo" there'),
        (
            {"rate_limiter": {"min_size": 4}},
            r"gear.tables.main.rate_limiter: \{.*\} here, null there",
        ),
        (
            {"more": {"dtype": "int8"}},
            r"gear.tables.main.schema.columns.more: \{.*\} here, absent there",
        ),
        (
            {"reward": {"dtype": "float64"}},
            'gear.tables.main.schema.columns.reward.dtype: "float64" here, "float32" there',
        ),
    ],
)
def test_a_run_of_another_config_is_no_candidate(change: dict[str, Any], text: str) -> None:
    other = section()
    table = other["tables"]["main"]
    for option, value in change.items():
        if option == "seed":
            other["seed"] = value
        elif isinstance(value, dict) and "dtype" in value:
            table["schema"]["columns"].setdefault(option, {}).update(value)
        else:
            table[option] = value
    with Replay(section()) as replay:
        begin = (
            rf"^the run's store must match the config, run and table of this process, got .{text}"
        )
        with pytest.raises(StoreError, match=begin) as caught:
            TrajectoryWriter.attach(other, wait_s=0.0)
        caught.match(f"found within 0 s: run {replay.run}, table main .*: {text}")
        name = replay.tables["main"].memory.path.name
        with pytest.raises(StoreError, match=begin):
            TrajectoryWriter.attach(other, name=name)
        assert len(replay) == 0


def test_options_that_a_writer_does_not_need_may_differ() -> None:
    """Also defaults that are written out, and a schema that the run's program has given."""
    table = {"capacity_steps": 5000, "writers": 3}
    theirs = {"tables": {"main": table}, "batch_size": 4, "shared_memory": {"prefix": prefix()}}
    mine = copy.deepcopy(theirs)
    mine["tables"]["main"] |= {"remove": "none", "max_age": 0, "rate_limiter": None}
    mine |= {"batch_size": 9, "threads": 2, "fields": {"reward": {}}, "timeout_s": 5.0}
    with Replay(theirs, schemas={"main": SCHEMA}) as replay:
        for config in (mine, {"gear": mine, "train_batch_size": 1}):
            with TrajectoryWriter.attach(config, wait_s=0.0) as writer:
                assert writer.schema == SCHEMA
                writer.add(trajectory(1, 3))
        assert len(replay) == 2


def test_an_actor_waits_for_its_own_run() -> None:
    """It comes first, beside a living run of another config."""
    rate = {"min_size": 4, "samples_per_insert": 2, "error_buffer": 400}
    own = section()
    other = section(seed=1)
    own["tables"]["main"]["rate_limiter"] = rate
    found: list[Any] = []

    def act() -> None:
        with TrajectoryWriter.attach(own, wait_s=60.0) as writer:
            found.append(writer.run)

    actor = threading.Thread(target=act)
    with Replay(other) as stranger:
        actor.start()
        actor.join(0.3)
        assert found == []
        with Replay(own) as replay:
            actor.join()
            assert found == [replay.run] != [stranger.run]


def test_a_run_that_ends_while_it_is_attached_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between finding and opening the store, and with it still there: a writer is attached."""
    runs: list[Replay] = []
    look = store_search.named_stores
    ends = 0

    def find(prefix: str) -> Any:
        nonlocal ends
        found = look(prefix)
        if ends < 2:
            ends += 1
            runs[-1].close()
            runs.append(Replay(section()))
        return found

    runs.append(Replay(section()))
    lingers = TrajectoryWriter.attach(section())
    monkeypatch.setattr(store_search, "named_stores", find)
    with TrajectoryWriter.attach(section(), wait_s=30.0) as writer:
        assert ends == 2
        assert writer.run == runs[-1].run != lingers.run
        with pytest.raises(StoreError, match="must belong to a living run; its ranks have ended"):
            wait_until(lambda: lingers.add(episode()) < 0, "the error")
    lingers.close()
    runs[-1].close()


def test_a_writer_that_outlives_its_run() -> None:
    """The ranks are killed: the writer's next additions raise, no actor attaches, and its end
    removes all.
    """

    config = section()

    def rank() -> None:
        with Replay(config) as replay:
            wait_until(lambda: len(replay) == 10**6, "nothing", 1e6)

    child = in_child(rank)
    writer = TrajectoryWriter.attach(config)
    writer.add(episode())
    kill(child)
    with pytest.raises(
        StoreGoneError, match="table main must belong to a living run; its ranks have ended"
    ):
        wait_until(lambda: writer.add(episode()) < 0, "the error")
    assert len(shared_files(prefix())) == 1
    with pytest.raises(
        StoreError, match="must be a store that takes writers, of this config, within 0 s;"
    ):
        TrajectoryWriter.attach(section(), wait_s=0.0)
    writer.close()


def test_a_run_of_another_version_is_named() -> None:
    with Replay(section()) as replay:
        memory = replay.tables["main"].memory
        header = np.ndarray((), HEADER, buffer=memory.buffer)
        header["format"] -= 1
        with pytest.raises(StoreError, match=f"got '{memory.path} must have store format 3, got 2"):
            TrajectoryWriter.attach(section(), wait_s=0.0)
        header["format"] += 1


def test_names_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(text: str, **shared: Any) -> None:
        with pytest.raises(ConfigError, match=text):
            Replay(section(shared_memory=shared))
        with pytest.raises(GearError, match=text):
            TrajectoryWriter.attach(section(shared_memory=shared), wait_s=0.0)

    for name in ("a.b", "a/b", "x" * 65):
        refused("run must ", run=name)
        monkeypatch.setenv("GEAR_RUN", name)
        refused("GEAR_RUN must be a name of at most 64 letters")
    monkeypatch.setenv("GEAR_RUN", "one")
    with pytest.raises(
        ConfigError, match=r"run must be the run that GEAR_RUN names, .*got 'one and two'"
    ):
        Replay(section(shared_memory={"run": "two"}))
    with Replay(section()) as replay, TrajectoryWriter.attach(section(), run=replay.run) as writer:
        assert replay.tables["main"].run.name == "one"
        monkeypatch.setenv("GEAR_RUN", replay.run)  # as in actors of `start_actors`
        TrajectoryWriter.attach(section(shared_memory={"run": "one"}), wait_s=0.0).close()
        with pytest.raises(StoreError, match="its run is not two"):
            TrajectoryWriter.attach(section(shared_memory={"run": "two"}), wait_s=0.0)
        with pytest.raises(ConfigError, match="name and run must not both be given"):
            TrajectoryWriter.attach(name="some", run="one")
        assert writer.run == replay.run
        assert "one" in {store.run.name for store in living_stores(os.getpid())}


def test_an_actor_without_a_config() -> None:
    """It takes the default prefix; the schema comes from the store."""
    own = section(shared_memory={"prefix": "gear", "run": f"test{os.getpid()}"})
    with Replay(own) as replay, TrajectoryWriter.attach(run=f"test{os.getpid()}") as writer:
        assert set(writer.schema.names) == set(COLUMNS)
        writer.add(episode())
        assert len(replay) == 1
