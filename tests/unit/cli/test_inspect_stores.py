"""`gear inspect` of saved stores, and of the stores of a real second process."""

import json
import os
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import (
    SCHEMA,
    config_of,
    prefix,
    run_command,
    shared_files,
    trajectory,
    write_dataset,
)
from group_support import GROUP, add, add_groups, check_groups, section, train
from process_support import environment
from replay_support import streams_of
from saved_shards import into_shards
from warm_python import PIPE, WarmProcess

from deepspeed_gear import DeviceReplay, Replay
from deepspeed_gear.cli import inspect
from deepspeed_gear.cli.inspect import find_saves
from deepspeed_gear.cli.table_contents import drawing, of_living, of_saved
from deepspeed_gear.errors import CheckpointError, ConfigError, StoreError, show_bytes
from deepspeed_gear.store.group_spec import COUNTED, GroupCount
from deepspeed_gear.store.live_stores import LiveStore, living_stores

LENGTHS = (1, 2, 5, 9, 14, 3)
SAMPLERS: dict[str, dict[str, Any]] = {
    "steps": {"kind": "prioritized", "unit": "step", "alpha": 0.5},
    "trajectories": {"kind": "prioritized", "alpha": 0.7},
    "uniform": {"unit": "step", "anchors": {"every": 2}},
    "length": {"kind": "length"},
}

PROGRAM = """
import json, sys
from gear_support import SCHEMA, trajectory
from deepspeed_gear import Replay

section, lengths = map(json.loads, sys.argv[1:])
with Replay(section, schemas={"main": SCHEMA}) as replay:
    for number, steps in enumerate(lengths):
        replay.add(trajectory(number, steps))
    for _ in sys.stdin:
        replay.sample()
        print(json.dumps(replay.statistics()["drawn"]["main"]["draws"]), flush=True)
"""


def section_of(name: str, **options: Any) -> dict[str, Any]:
    return config_of(
        sampler=SAMPLERS[name], batch_size=16, fields={"code": {}}, count_draws=True, **options
    )


run = partial(run_command, inspect)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(*arguments) == 0
    return capsys.readouterr().out


def store_of(replay: Replay) -> LiveStore:
    (found,) = (store for store in living_stores(os.getpid()) if store.run.id == replay.run)
    return found


def check(
    found: dict[str, Any], masses: np.ndarray, priorities: np.ndarray | None, draws: Any
) -> None:
    """Compare with what the process itself knows."""
    wanted = drawing(masses[masses > 0].astype(np.float64), priorities, None)
    assert {name: found[name] for name in wanted} == {**wanted, "draws": pytest.approx(draws)}
    assert (found["drawable"], found["waiting"]) == ((masses > 0).sum(), 0)


def test_a_store_of_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Two looks at one run, which goes on between them, and nothing of it is writable; then it
    ends.
    """
    section = section_of("steps", shared_memory={"prefix": prefix(), "run": "steps"})
    arguments = ["-c", PROGRAM, json.dumps(section), json.dumps(LENGTHS)]
    process = WarmProcess(arguments, environment(), stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    print(file=process.stdin, flush=True)
    known = json.loads(process.stdout.readline())
    (store,) = living_stores(process.pid)
    assert shared_files(prefix()) == []  # it has no name any more
    assert all(not view.flags.writeable for view in store.views.values())
    found = of_living(store)
    assert (found["table"], found["trajectories"], found["steps"]) == ("main", 6, sum(LENGTHS))
    assert found["draws"] == pytest.approx(known)
    print(file=process.stdin, flush=True)
    known = json.loads(process.stdout.readline())
    found = of_living(store)
    assert found["draws"] == pytest.approx(known)
    assert shown(capsys, "--living", str(process.pid)).splitlines()[:5] == [
        f"table main of process {process.pid}: {show_bytes(store.layout.total_bytes)}",
        f"  run           {store.run}",
        "  sampler       prioritized, unit step",
        "  trajectories  6",
        f"  steps         {sum(LENGTHS)}",
    ]
    (entry,) = json.loads(shown(capsys, "--living", str(process.pid), "--json"))["stores"]
    assert (entry["processes"], entry["run"]["name"]) == ([process.pid], "steps")
    assert {name: entry[name] for name in found} == found
    process.kill()
    process.communicate()
    assert of_living(store) == found  # a look outlives the run: it is a map of its own
    with pytest.raises(
        StoreError, match=rf"process {process.pid} must be a running process of user"
    ):
        run("--living", str(process.pid))


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_store_of_each_sampler(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Living, saved, in shards and damaged."""
    has_priorities = "alpha" in SAMPLERS[name]
    by_steps = has_priorities and SAMPLERS[name].get("unit") == "step"
    gear = tmp_path / "tag" / "gear"
    with Replay(section_of(name), schemas={"main": SCHEMA}) as replay:
        for number, steps in enumerate(LENGTHS):
            replay.add(trajectory(number, steps))
        replay.remove([1])
        for _ in range(3):
            batch = replay.sample()
            if has_priorities:
                replay.update_priorities(batch, 0.1 + 8 * torch.rand(16))
        masses = streams_of(replay)["train"].masses
        leaves = masses.leaves.copy()
        priorities = masses.values[leaves > 0] if has_priorities else None  # type: ignore[attr-defined]
        draws = replay.statistics()["drawn"]["main"]["draws"]
        living = of_living(store_of(replay))
        check(living, leaves, priorities, draws)
        replay.save(gear)
    for folder in (tmp_path / "tag", gear, gear / "main"):
        assert find_saves(folder)[1] == [gear / "main"]
    found = of_saved(gear / "main")
    assert (found["trajectories"], found["steps"]) == (5, sum(LENGTHS) - 2)
    assert found == {name: living[name] for name in found}
    assert "  trajectories  5\n" in shown(capsys, str(tmp_path / "tag"))
    assert json.loads(shown(capsys, str(tmp_path / "tag"), "--json"))["tables"] == [found]
    shards = tmp_path / "shards" / "gear" / "main"
    shutil.copytree(gear / "main", shards)
    into_shards(shards, 3, by_steps)
    for folder in (tmp_path / "shards", shards.parent, shards):
        assert find_saves(folder)[1] == [shards]
    assert of_saved(shards) == found
    assert "  trajectories  5\n" in shown(capsys, str(tmp_path / "shards"))
    with (gear / "main" / "stream.train.draws.npy").open("r+b") as file:
        file.seek(130)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match=r"stream.train.draws.npy must be as it was saved"):
        run(str(tmp_path / "tag"))


@pytest.mark.parametrize(
    ("sampler", "drawable"),
    [
        (SAMPLERS["steps"], (8, 14, 14)),
        ({**SAMPLERS["steps"], "anchors": {"every": 2}}, (4, 8, 8)),
        (SAMPLERS["trajectories"], (2, 2, 2)),
        (SAMPLERS["uniform"], (2, 2, 2)),
        ({"kind": "recent", "newest": 2}, (2, 2, 2)),
    ],
    ids=str,
)
def test_steps_since_the_latest_selection_can_be_drawn(
    sampler: dict[str, Any], drawable: tuple[int, ...], tmp_path: Path
) -> None:
    """Before a selection, after steps of open trajectories, and after the selection
    that adds them.
    """
    section = config_of(sampler=sampler, batch_size=4, fields={"code": {}})
    section["tables"]["main"]["max_length"] = 50
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        writer = replay.vector_writer(2, "next_step")

        def step(count: int) -> None:
            for _ in range(count):
                rows = {
                    c.name: np.ones((2, *c.shape))
                    for c in SCHEMA.step_columns
                    if c.role != "observation"
                }
                ends = {"terminated": np.zeros(2, bool), "truncated": np.zeros(2, bool)}
                writer.step(**{**rows, **ends}, observation=np.ones((2, 3)), publish=True)

        def seen() -> dict[str, Any]:
            replay.save(tmp_path)
            found = of_living(store_of(replay))
            saved = of_saved(tmp_path / "main")
            assert saved == {name: found[name] for name in saved}
            return found

        writer.reset(observation=np.zeros((2, 3)), task=np.zeros(2))
        step(4)
        first = seen()
        replay.sample()
        step(3)
        then = seen()
        replay.sample()
        last = seen()
    before = (0, drawable[0], drawable[2])
    for found, wanted, held, length in zip(
        (first, then, last), drawable, before, (4, 7, 7), strict=True
    ):
        assert (found["drawable"], found["waiting"]) == (wanted, wanted - held)
        assert (found["excluded"], found["groups"]) == ([], None)
        assert (found["trajectories"], found["length"]["min"]) == (2, length)


def test_a_checkpoint_of_a_position_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uniform samples of a data set: nothing but the position is saved, and the output says so."""
    write_dataset(tmp_path / "data", [5, 9, 7, 4, 4], {"eval": 0.4})
    options = {
        "batch_size": 4,
        "sampler": {"kind": "epoch", "unit": "step"},
        "fields": {"code": {}},
    }
    gear = tmp_path / "run" / "global_step7" / "gear"
    with Replay(config_of(tmp_path / "data", **options)) as replay:
        for _ in range(7):
            replay.sample()
        list(replay.iterator("eval"))
        items = replay.statistics()["steps"]
        fingerprint = replay.fingerprint["main"]
        items -= sum(batch.valid.sum().item() for batch in replay.iterator("eval"))
        replay.save(gear)
    (tmp_path / "run" / "latest").write_text("global_step7\n")
    epoch, used = divmod(28, items)
    known = {"epoch": epoch, "epoch_samples": used, "epoch_items": items}
    for folder in (gear, gear.parent, tmp_path / "run"):
        assert run(str(folder)) == 0
        text = f"7 global batches, 28 samples of table main; epoch {epoch}: {used} of {items} items"
        assert capsys.readouterr().out.splitlines() == [
            f"position in {gear}, without tables: data sets hold their contents",
            f"  used          {text}",
            "  passes        2 over eval",
            f"  data set      main: {fingerprint}",
        ]
    assert json.loads(shown(capsys, str(tmp_path / "run"), "--json")) == {
        "position": {
            "train": {"main": {"global_batches": 7, "samples": 28, **known}},
            "passes": {"eval": 2},
            "data": {"main": fingerprint},
        },
        "tables": [],
    }
    with pytest.raises(ConfigError, match="--verify must be given for a data set only"):
        run(str(gear), "--verify")
    (tmp_path / "run" / "latest").write_text("global_step8")
    with pytest.raises(
        CheckpointError, match=r"latest must name a folder beside it, got 'global_step8'"
    ):
        run(str(tmp_path / "run"))
    position = gear / "position.json"
    position.write_text(position.read_text().replace('"eval": 2', '"eval": 3'))
    with pytest.raises(CheckpointError, match=r"position.json must be as it was saved"):
        run(str(gear))


def test_priorities_of_a_data_set_and_a_table_that_is_not_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dataset(tmp_path / "data", [5, 9, 7])
    section = config_of(
        tmp_path / "data",
        sampler={**SAMPLERS["steps"], "table": "main"},
        batch_size=4,
        fields={"code": {}},
    )
    section["tables"] = {
        "main": {"data": section.pop("data")},
        "other": {"capacity_steps": 50, "remove": "fifo"},
    }
    with Replay(section, schemas={"other": SCHEMA}) as replay:
        replay.add(trajectory(0, 5), table="other")
        replay.save(tmp_path / "gear")
        (store,) = (
            one
            for one in living_stores(os.getpid())
            if (one.run.id, one.table) == (replay.run, "other")
        )
        assert (of_living(store)["kind"], of_living(store)["steps"]) == (None, 5)
    lines = shown(capsys, str(tmp_path / "gear")).splitlines()
    at = lines.index(f"table main in {tmp_path / 'gear' / 'main'}")
    assert lines[at + 1 : at + 3] == ["  sampler       prioritized, unit step", "  trajectories  3"]
    assert lines[at + 4 : at + 6] == [
        "  sampler       none: it is not sampled",
        "  trajectories  1",
    ]


def test_a_checkpoint_of_a_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = config_of(batch_size=4, fields={"code": {}})
    section["tables"]["main"] = {
        "capacity_steps": 64,
        "max_length": 8,
        "remove": "fifo",
        "placement": "device",
    }
    with DeviceReplay(section, "cpu", schemas={"main": SCHEMA}) as replay:
        replay.save(tmp_path / "gear")
    assert shown(capsys, str(tmp_path / "gear")).splitlines() == [
        f"position in {tmp_path / 'gear'}",
        "  used          0 global batches, 0 samples of table main",
        f"table main in {tmp_path / 'gear' / 'main'}",
        "  replicas      1, each with a table in its device's memory",
    ]
    assert json.loads(shown(capsys, str(tmp_path), "--json"))["tables"] == [
        {"table": "main", "replicas": 1}
    ]


OWN_SAMPLER = """
from deepspeed_gear.config import DrawingOptions
from deepspeed_gear.sampling.samplers.base import Sampler, SamplerSpec

class Mine(Sampler):
    Options = DrawingOptions

    def spec(self, scope):
        return SamplerSpec(scope.admitted)

    def sample(self, draw):
        return draw.random()
"""


@pytest.mark.parametrize(
    ("sampler", "wanted"),
    [
        (
            {"kind": "mixture", "shares": {"main": 1.0}, "of": SAMPLERS["steps"]},
            "mixture of prioritized, unit step",
        ),
        ({"kind": "own_sampler:Mine"}, "own_sampler:Mine, unit trajectory"),
        (SAMPLERS["length"], "length, unit trajectory"),
    ],
)
def test_the_sampler_has_its_name_in_the_config(
    sampler: dict[str, Any],
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own_sampler.py").write_text(OWN_SAMPLER)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Replay(
        config_of(sampler=sampler, batch_size=4, fields={"code": {}}), schemas={"main": SCHEMA}
    ) as replay:
        replay.add(trajectory(0, 5))
        replay.sample()
        replay.save(tmp_path / "gear")
        for where in (["--living", str(os.getpid())], [str(tmp_path / "gear")]):
            assert (
                run(*where) == 0
            )  # living: also tables of earlier tests that are not collected yet
            assert f"  sampler       {wanted}\n" in capsys.readouterr().out


def test_the_numbers_of_a_drawing() -> None:
    masses = np.array([1.0] * 90 + [11.0] * 10)
    found = drawing(masses, masses[:4].astype(np.float32), np.array([0, 0, 1, 5], np.int32))
    assert found["share_of_top"] == {"0.01": 0.055, "0.1": 0.55}
    assert found["effective"] == pytest.approx(200**2 / (90 + 1210) / 100)
    assert found["priorities"] == {"min": 1, "median": 1, "max": 1, "mean": 1}
    assert found["draws"] == {"mean": 1.5, "max": 5, "never": 0.5}
    assert json.dumps(drawing(masses[:0], masses[:0], masses[:0]), allow_nan=False)


def test_what_is_refused_and_what_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert (
            shown(capsys, "--living", str(process.pid)) == "no process of this user holds a store\n"
        )
        process.kill()
    for arguments, text in (
        ([], "DEST or --living must be given; gear inspect"),
        ([str(tmp_path), "--living"], "DEST and --living must not both be given"),
        (["--living", "--verify"], "--verify must be given for a data set only"),
    ):
        with pytest.raises(ConfigError, match=text):
            run(*arguments)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"must have format 6"):
        run(str(tmp_path))


# ---- tables of groups: groups and lengths --------------------------------------------------------


def numbers(complete: int, incomplete: int, **left_out: int) -> dict[str, int]:
    return {"complete": complete, "incomplete": incomplete, **dict.fromkeys(COUNTED, 0), **left_out}


@pytest.mark.parametrize("kind", ["fifo", "uniform", "prioritized"])
def test_groups_that_no_selection_has_seen(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A look at a run changes none of its words; groups that are complete are drawable."""
    with Replay(section(sampler={"kind": kind})) as replay:
        add_groups(replay, range(3), steps=5)
        add(replay, 9, steps=12)
        groups = train(replay).table.groups
        assert groups is not None
        before = groups.words.copy(), groups.counts.copy()
        found = of_living(store_of(replay))
        assert (groups.words == before[0]).all()
        assert (groups.counts == before[1]).all()
        assert groups.counts[GroupCount.HELD] == 0  # the process itself has formed none
        assert found["groups"] == numbers(3, 1)
        assert (found["drawable"], found["waiting"]) == (3, 3)
        (one,) = found["excluded"]
        assert (one["trajectories"], one["reason"]) == (1, "of incomplete groups")
        replay.save(tmp_path)
        saved = of_saved(tmp_path / "main")
        assert saved == {name: found[name] for name in saved}
        text = shown(capsys, str(tmp_path))
        for line in (
            "  lengths       min 5, 10% 5, 50% 5, 90% 5, max 12, mean 5.7",
            "  groups        3 complete, 1 incomplete",
            "  left out      0 groups rejected, 0 too large, 0 evicted unsampled",
            "  trajectories  0 late, 0 of groups that had left, 0 unfilled, 0 surplus",
        ):
            assert line in text.splitlines()
        add_groups(replay, [3])
        replay.rollout()  # of 4 groups
        add_groups(replay, [4, 5])
        found = of_living(store_of(replay))
        assert (found["groups"], found["drawable"], found["waiting"]) == (numbers(6, 1), 6, 2)
        check_groups(replay)


def test_rejected_oversized_and_late(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Counts of a look are those that the process finds at its next selection."""
    group = {**GROUP, "needs": ["reward"], "where": {"reward": {"std": {"min": 0.1}}}}
    with Replay(section(group=group)) as replay:
        for prompt in range(4):
            for member in range(3):
                number = add(replay, prompt, member, steps=2 + prompt)
                if prompt != 3:
                    replay.fill(
                        number, reward=float(member) if prompt else 1.0
                    )  # prompt 0: all are equal
        late = add(replay, 1, 3)
        replay.fill(late, reward=0.0)
        found = of_living(store_of(replay))
        assert found["groups"] == numbers(2, 1, rejected=1, surplus=1)
        assert (found["length"]["min"], found["length"]["0.5"], found["length"]["max"]) == (3, 4, 5)
        assert found["groups"] == replay.statistics()["groups"]["main"]  # which forms them
        assert of_living(store_of(replay)) == found
        replay.save(tmp_path)
        (table,) = json.loads(shown(capsys, str(tmp_path), "--json"))["tables"]
        assert table == {name: found[name] for name in table}
        stores = json.loads(shown(capsys, "--living", str(os.getpid()), "--json"))["stores"]
        (store,) = (one for one in stores if one["run"]["id"] == replay.run)
        assert store["groups"] == found["groups"]
        text = shown(capsys, "--living", str(os.getpid()))
        assert "  left out      1 groups rejected, 0 too large, 0 evicted unsampled\n" in text
        assert "  trajectories  0 late, 0 of groups that had left, 0 unfilled, 1 surplus\n" in text


def test_a_group_that_time_completes() -> None:
    group = {**GROUP, "after_s": 0.05, "min_size": 2}
    with Replay(section(group=group)) as replay:
        add_groups(replay, [0], size=2)
        time.sleep(0.06)
        found = of_living(store_of(replay))
        assert (found["groups"], found["waiting"]) == (numbers(1, 0), 1)
