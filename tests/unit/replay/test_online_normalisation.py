"""Tables that rows are added to, normalised with what was ever added: numbers, ranks, deaths,
checkpoints.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gear_support import SHM, config_of, prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from process_support import call_on_ranks, exit_status, in_child, kill

from deepspeed_gear import Column, Normalizer, Replay, Schema, TrajectoryWriter
from deepspeed_gear.batching.gather import Gatherer
from deepspeed_gear.data.statistics import running_moments
from deepspeed_gear.data.statistics.dataset_statistics import running_statistics
from deepspeed_gear.data.statistics.running_moments import Moment
from deepspeed_gear.errors import ConfigError, StoreError
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.store.records import Control, MomentHead

SCHEMA = Schema(
    [
        Column("observation", "float32", (3,), "observation", "T+1"),
        Column("half", "float16", (2,)),
        Column("brain", "bfloat16"),
        Column("force", "float64", (2, 2), allow_nan=True),
        Column("pixel", "uint8", (2,)),
        Column("token", "int64", (), "action"),
        Column("truncated", "bool", (), "truncated"),
        Column("task", "int32", (), "other", "1"),
        Column("advantage", "float32", late=True),
    ]
)
FIELDS: dict[str, dict[str, Any]] = {
    "observation": {"normalize": "mean_std"},
    "window": {
        "column": "observation",
        "offset": -1,
        "length": 3,
        "normalize": "min_max",
        "scale": 2.0,
    },
    "half": {"normalize": "mean_std"},
    "brain": {"normalize": "mean_std"},
    "force": {"normalize": "mean_std"},
    "pixel": {"normalize": "min_max"},
    "token": {"normalize": "mean_std"},
    "task": {"normalize": "mean_std"},
}
COUNTED = ("observation", "half", "brain", "force", "pixel", "token", "task")
CONSTANT = 2  # element of the observations


def rows_of(number: int, steps: int) -> dict[str, Any]:
    random = np.random.default_rng(number)
    observation = (random.normal(5, 3, (steps + 1, 3)) * [1, 100, 0] + [0, 1e6, 7.25]).astype(
        np.float32
    )
    force = random.normal(-1, 1e-3, (steps, 2, 2))
    force[random.random(force.shape) < 0.2] = np.nan
    force[:, 1, 1] = np.inf
    return {
        "observation": observation,
        "half": random.normal(size=(steps, 2)).astype(np.float16),
        "brain": random.normal(size=steps).astype(np.float16).astype(np.float32),
        "force": force,
        "pixel": random.integers(0, 256, (steps, 2), np.uint8),
        "token": random.integers(-(2**40), 2**40, steps),
        "truncated": np.zeros(steps, bool),
        "task": np.int32(number % 5),
    }


def section(**options: Any) -> dict[str, Any]:
    table = {"capacity_steps": 300, "remove": "fifo", "max_length": 40, **options.pop("table", {})}
    given = {
        "batch_size": 16,
        "fields": FIELDS,
        "sampler": {"kind": "uniform", "unit": "step"},
        **options,
    }
    return {**config_of(**given), "tables": {"main": table}}


def replay_of(**options: Any) -> Replay:
    return Replay(section(**options), schemas={"main": SCHEMA})


def check(replay: Replay, rows: list[dict[str, Any]]) -> None:
    """Check the moments of a store against all rows that were added."""
    moments = replay.tables["main"].extents.moments
    first = 0
    for name in COUNTED:
        column = SCHEMA[name]
        every = [np.asarray(one[name], np.float64).reshape(-1, column.num_elements) for one in rows]
        values = np.concatenate(every)
        if column.dtype == "bfloat16":
            values = torch.from_numpy(values).bfloat16().double().numpy()
        own = moments[:, first : first + column.num_elements]
        first += column.num_elements
        for element in range(column.num_elements):
            x = values[np.isfinite(values[:, element]), element]
            assert own[Moment.COUNT, element] == len(x), name
            if not len(x):
                assert not own[:, element].any()
                continue
            assert own[Moment.LEAST, element] == x.min()
            assert own[Moment.GREATEST, element] == x.max()
            mean = own[Moment.FIRST, element] + own[Moment.MEAN, element]
            np.testing.assert_allclose(
                mean, x.mean(), rtol=1e-12, atol=1e-12 * np.abs(x).max(), err_msg=name
            )
            np.testing.assert_allclose(
                own[Moment.SQUARES, element] / len(x), x.var(), rtol=1e-9, atol=1e-30
            )
    assert first == moments.shape[1]


def check_batch(replay: Replay, batch: Any) -> None:
    """Check that `normalize` gives the bits of the newest batch for what the store holds."""
    table = replay.tables["main"]
    slots = torch.as_tensor(
        [int(table.slots_of(np.array([i]))[0]) for i in batch.trajectory_id.tolist()]
    )
    rows = torch.from_numpy(table.slots[slots, Slot.FIRST_ROW]) + batch.anchor
    for name in COUNTED:
        stored = table.tensor(name)[slots if SCHEMA[name].rows == "1" else rows]
        expected = replay.normalize(name, stored)
        assert torch.equal(torch.nan_to_num(expected), torch.nan_to_num(batch[name])), name
    assert torch.equal(
        replay.normalize("window", table.tensor("observation")[rows]), batch["window"][:, 1]
    )


def test_numbers_are_of_all_rows_that_were_ever_added() -> None:
    """Of trajectories that are added, and of steps that are published, also when they
    were evicted.
    """
    with replay_of() as replay:
        rows = [rows_of(0, 1)]
        replay.add(rows[0])
        batch = replay.sample()
        check(replay, rows)
        check_batch(replay, batch)
        assert batch["token"].unique().tolist() == pytest.approx(
            [float(rows[0]["token"][0])]
        )  # one row
        for number in range(1, 60):
            rows.append(rows_of(number, 1 + number % 23))
            replay.add(rows[-1])
            if number % 9 == 0:
                check_batch(replay, replay.sample())
        assert replay.tables["main"].control[Control.INSERTED] > 2 * len(replay)
        check(replay, rows)
        assert not replay.sample()["observation"][:, CONSTANT].any()

        writer = replay.writer()
        episode = rows_of(100, 30)
        steps = [name for name in COUNTED if SCHEMA[name].rows == "T"] + ["truncated"]
        for native in (True, False):
            vector = writer.vector_writer(1, "disabled")
            vector.reset(observation=episode["observation"][:1], task=episode["task"][None])
            for step in range(30):
                given = {name: np.asarray(episode[name])[step : step + 1] for name in steps}
                envs = None if native else np.array([0])
                following = episode["observation"][step + 1 : step + 2]
                terminated = {"terminated": np.zeros(1, bool)}
                vector.step(
                    observation=following, envs=envs, publish=step % 7 > 3, **given, **terminated
                )
            vector.step(
                observation=episode["observation"][:1],
                **{
                    **{name: np.asarray(episode[name])[:1] for name in steps},
                    "truncated": np.ones(1, bool),
                },
                terminated=np.zeros(1, bool),
            )
            last = {name: np.concatenate([episode[name], episode[name][:1]]) for name in steps}
            observations = np.concatenate([episode["observation"], episode["observation"][:1]])
            rows.append({**last, "observation": observations, "task": episode["task"]})
            check(replay, rows)
        check_batch(replay, replay.sample())


def moments_of(rows: np.ndarray) -> np.ndarray:
    """Return the moments of a block by NumPy. [n, elements]."""
    found = np.zeros((Moment.NUM_WORDS, rows.shape[1]))
    for element, values in enumerate(rows.T):
        x = values[np.isfinite(values)]
        if len(x):
            words = len(x), x[0], (x - x[0]).mean(), ((x - x.mean()) ** 2).sum(), x.min(), x.max()
            found[:, element] = words
    return found


@settings(max_examples=50)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8), seed=st.integers(0, 2**32))
def test_merged_moments_are_those_of_all_rows(sizes: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(sum(sizes), 4)) * [1, 1e-3, 1e5, 0] + [0, 1.7e9, -3, 0.1]
    rows[random.random(rows.shape) < 0.2] = np.nan
    parts = [moments_of(part) for part in np.split(rows, np.cumsum(sizes)[:-1])]
    merged = running_moments.merge(parts)
    whole = moments_of(rows)
    for word in (Moment.COUNT, Moment.LEAST, Moment.GREATEST):
        assert np.array_equal(merged[word], whole[word])
    for word in (Moment.FIRST, Moment.SQUARES):
        np.testing.assert_allclose(merged[word], whole[word], rtol=1e-6, atol=1e-25)
    np.testing.assert_allclose(merged[Moment.MEAN], whole[Moment.MEAN], rtol=1e-9, atol=1e-9)
    none = np.zeros_like(merged)  # as a resharded table has it
    assert running_moments.merge([merged, none, none]).tobytes() == merged.tobytes()
    column = Column("x", "float64", (2, 2))
    known = running_statistics(merged, [column])["x"]
    used = np.isfinite(rows).sum(0) >= 2
    expected = np.where(
        used, np.nanmean(np.vstack([rows, rows[:0], np.zeros(4)]), 0) * 0 + known.mean.ravel(), 0
    )
    assert np.array_equal(known.mean.ravel(), expected)
    assert (known.std > 0).all()
    assert known.std.ravel()[3] == 1  # constant


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_resumed_run_has_the_same_batches(tmp_path: Path, prefetch: int) -> None:
    def go_on(replay: Replay) -> list[bytes]:
        found = []
        for number in range(40, 48):
            batch = replay.sample()
            found.append(b"".join(batch[name].float().numpy().tobytes() for name in FIELDS))
            if not prefetch:  # else additions come at another time
                replay.add(rows_of(number, 9))
        return found

    # Selections in Python, where draws are counted, and in the native call.
    found = []
    for counts in (True, False):
        options = {"count_draws": counts, "table": {"capacity_steps": 3000}}
        with replay_of(prefetch=prefetch, **options) as replay:
            for number in range(40):
                replay.add(rows_of(number, 1 + number % 23))
            for _ in range(3):
                batch = replay.sample()
            replay.add(rows_of(90, 9))  # selections that are waiting keep the numbers from before
            state = replay.save(tmp_path)
            loaded = Normalizer.load(tmp_path)
            for name in FIELDS:
                ours = replay.normalizer.fields[name]
                theirs = loaded.fields[name]
                assert torch.equal(ours.gain, theirs.gain), name
                assert torch.equal(ours.shift, theirs.shift), name
            if not prefetch:
                table = replay.tables["main"]
                rows = [int(record[3] + record[5]) for record in batch.host_resolutions]
                stored = table.tensor("observation")[rows]
                assert torch.equal(loaded.normalize("observation", stored), batch["observation"])
            expected = go_on(replay)
        with replay_of(prefetch=prefetch, **options) as replay:
            replay.add(rows_of(99, 5))
            replay.load(tmp_path, state)
            if not prefetch:  # else the thread that selects ahead may have made one more selection
                assert torch.equal(
                    replay.normalizer.fields["force"].gain, loaded.fields["force"].gain
                )
            assert go_on(replay) == expected
        found.append(expected)
    assert (
        found[0] == found[1] or prefetch
    )  # else the thread that selects ahead meets the last addition


def test_every_way_to_a_device_has_the_same_batches() -> None:
    """Also of goals of hindsight, which are normalised as their field."""
    goal = {"column": "observation", "normalize": "mean_std", "hindsight": "achieved"}
    schema = Schema([*SCHEMA, Column("achieved", "float32", (3,), rows="T+1")])
    options = {"hindsight": {}}
    found = []
    for transfer in ({}, *({"transfer": {"way": way}} for way in ("direct", "staged"))):
        given = section(fields={**FIELDS, "goal": goal}, **options, **transfer)
        with Replay(given, schemas={"main": schema}) as replay:
            batches = []
            for number in range(4):
                rows = rows_of(number, 20)
                replay.add({**rows, "achieved": rows["observation"] + 1})
                batch = replay.sample()
                batches.append(b"".join(batch[name].float().numpy().tobytes() for name in batch))
            found.append(batches)
    assert found == [found[0]] * 3
    assert len(set(found[0])) == 4


# ---- several processes ---------------------------------------------------------------------------


def sample_on_a_rank(given: dict[str, Any]) -> list[bytes]:
    """Sample while another process adds; return what each batch was normalised with."""
    found: list[bytes] = []
    with Replay(given, schemas={"main": SCHEMA}) as replay:
        normalize_with = Gatherer.normalize_with
        both = [0, 0]

        def note(gatherer: Gatherer, moments: np.ndarray, columns: Any) -> None:
            found.append(moments.tobytes())
            normalize_with(gatherer, moments, columns)

        while not replay.can_sample():
            time.sleep(0.01)
        with patch.object(Gatherer, "normalize_with", note):
            while min(both) < 8:
                replay.sample()
                dist.all_gather_object(both, len(set(found)))
    return found


def test_ranks_use_the_same_numbers_while_another_process_adds() -> None:
    name = f"{prefix()}-{os.getpid()}"
    given = section(batch_size=8, table={"writers": 1}, shared_memory={"prefix": name}, prefetch=1)

    def act() -> None:
        # The ranks wait for rows without end, and may take minutes to start on a busy machine.
        with contextlib.suppress(StoreError), TrajectoryWriter.attach(given, wait_s=240) as writer:
            for number in range(10**6):  # until the ranks end
                writer.add({**rows_of(number, 7), "advantage": np.zeros(7, np.float32)})
                time.sleep(0.002)

    actor = in_child(act)
    first, second = call_on_ranks(2, sample_on_a_rank, given)
    assert exit_status(actor) == 0
    common = min(len(first), len(second))  # one rank may be ahead
    assert first[:common] == second[:common]
    assert len(set(first)) >= 8


def test_no_death_of_a_writer_tears_them() -> None:
    """A writer is killed at random, and in the middle of a commit; what counts is what was
    committed.
    """
    given = section(table={"capacity_steps": 40000, "remove": "none", "writers": 1}, batch_size=1)
    with Replay(given, schemas={"main": SCHEMA}) as replay:
        table = replay.tables["main"]
        random = np.random.default_rng(0)
        replay.add(rows_of(0, 7))

        def add() -> None:
            with TrajectoryWriter.attach(given) as writer:
                while True:
                    writer.add({**rows_of(1, 7), "advantage": np.zeros(7, np.float32)})

        for _ in range(6):
            before = int(table.control[Control.INSERTED])
            child = in_child(add)
            while table.control[Control.INSERTED] < before + 3:
                time.sleep(1e-3)
            time.sleep(random.random() * 0.01)
            kill(child)
            with table.lock:
                count = int(table.control[Control.NUM_COMMITTED])
                check(replay, [rows_of(0, 7)] + [rows_of(1, 7)] * (count - 1))
        extents = table.extents
        slot = 0
        with table.lock:
            counted = extents.moments.copy()
            moments_head = table.views["moments_head"]
            steps = int(table.slots[slot, Slot.NUM_STEPS])
            for committed in (steps - 1, steps):  # died before, and after the commit point
                extents.handle.stage_moments(slot, 0, committed)
                table.slots[slot, Slot.NUM_STEPS] = steps
                moments_head[MomentHead.STEPS] = steps if committed == steps else steps + 1
                extents.recover()
                assert not moments_head[MomentHead.STAGED]
                more = extents.moments[Moment.COUNT] - counted[Moment.COUNT]
                assert more[0] == (steps + 1 if committed == steps else 0)
                extents.recover()  # a second death changes nothing
                assert np.array_equal(extents.moments[Moment.COUNT] - counted[Moment.COUNT], more)
    assert not [path for path in SHM.iterdir() if path.name.startswith(prefix())]


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"fields": {"advantage": {"normalize": "mean_std"}}},
            "gear.fields.advantage.normalize must not be given as column advantage has no "
            "statistics",
        ),
        (
            {
                "tables": {"a": {"capacity_steps": 300}, "b": {"capacity_steps": 300}},
                "sampler": {"kind": "mixture", "shares": {"a": 0.5, "b": 0.5}},
            },
            "gear.fields.observation.normalize must not be given for a mixture of tables "
            "without a data set",
        ),
        (
            {
                "tables": {
                    "main": {
                        "capacity_steps": 300,
                        "placement": "device",
                        "max_length": 30,
                        "remove": "fifo",
                    }
                }
            },
            "gear.fields.observation.normalize must not be given for a table on devices to "
            "which rows",
        ),
    ],
)
def test_refusals(options: dict[str, Any], text: str) -> None:
    given = {**section(), **options}
    names = given["tables"]
    with pytest.raises(ConfigError) as caught:
        Replay(given, schemas=dict.fromkeys(names, SCHEMA))
    assert str(caught.value).startswith(text)
    with pytest.raises(
        ConfigError, match=r"it is normalised with what a run adds, got None|use Normalizer.load"
    ):
        Normalizer.from_config(section(), schemas={"main": SCHEMA})


def test_quantiles_need_a_data_set() -> None:
    fields = {"observation": {"normalize": "quantile"}}
    with pytest.raises(
        ConfigError, match="must not be given for a quantile of a table to which row"
    ):
        replay_of(fields=fields)
