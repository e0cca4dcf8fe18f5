"""Groups as items: every sampler draws whole ones; late members, conditions, limits, statistics."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from group_support import (
    COLUMNS,
    GROUP,
    add,
    add_groups,
    check_groups,
    section,
    stored,
    take,
    train,
    trained,
)
from scipy.stats import chisquare

from deepspeed_gear import (
    ConfigError,
    DataError,
    NotReadyError,
    Replay,
    StoreError,
)
from deepspeed_gear.sampling.exclusions import summary_of
from deepspeed_gear.schema import DTYPES
from deepspeed_gear.store import groups
from deepspeed_gear.store.group_spec import COUNTED, GroupCount
from deepspeed_gear.store.table import Table
from deepspeed_gear.writer.inserter import Inserter

MEMBERS = {**GROUP, "member": "sample", "max_trajectories": 8}
SAMPLERS: dict[str, dict[str, Any]] = {
    "uniform": {"kind": "uniform"},
    "stratified": {"kind": "uniform", "stratified": True},
    "length": {"kind": "length"},
    "weighted": {"kind": "weighted", "weight": "weight"},
    "prioritized": {"kind": "prioritized"},
    "of_table": {"kind": "prioritized", "normalize": "table"},
    "top_k": {"kind": "top_k"},
    "epoch": {"kind": "epoch"},
    "fifo": {"kind": "fifo"},
    "lifo": {"kind": "lifo"},
    "recent": {"kind": "recent", "newest": 6},
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_draws_whole_groups(name: str) -> None:
    """Groups of members with one or two trajectories, in the order of the members, whatever came
    first.
    """
    with Replay(section(MEMBERS, SAMPLERS[name])) as replay:
        wanted: dict[int, list[tuple[int, int]]] = {}
        words = np.random.default_rng(0)
        for prompt in range(8):
            samples = [
                int(m) for m in words.permutation([0, 1, 2, *words.integers(0, 2, prompt % 3)])
            ]
            for sample in samples:
                number = add(replay, prompt, sample, steps=int(words.integers(1, 9)))
                wanted.setdefault(prompt, []).append((sample, number))
        add(replay, 99, 0)  # incomplete
        found = [ids for number in range(4) for ids in take(train(replay), number)]
        whole = [[number for _, number in sorted(members)] for members in wanted.values()]
        assert all(ids in whole for ids in found)
        in_age = sorted(whole, key=max)
        if name == "fifo":
            assert found[:4] == in_age[:4]
        elif name == "lifo":
            assert found[:4] == in_age[:-5:-1]
        elif name == "recent":
            assert all(ids in in_age[-6:] for ids in found)
        elif name == "epoch":
            assert sorted(found) == sorted([*whole, *whole])
        elif name == "top_k":
            assert sorted(found[:4]) == sorted(in_age[:4])
        check_groups(replay)


@pytest.mark.parametrize(
    ("sampler", "masses"),
    [
        ({"kind": "uniform"}, lambda n: 1),
        ({"kind": "length"}, lambda n: n + 2 + n % 3),
        ({"kind": "weighted", "weight": "weight"}, lambda n: 1 + n),
        ({"kind": "prioritized", "alpha": 1.0}, lambda n: 1 + n % 4),
    ],
)
def test_frequencies_follow_the_masses_of_groups(sampler: dict[str, Any], masses: Any) -> None:
    """A group of n trajectories is as likely as its own mass says, not as those of its
    trajectories.
    """
    group = {**MEMBERS, "size": 2, "max_trajectories": 4}
    with Replay(section(group, sampler, batch={"groups": 500})) as replay:
        firsts = []
        for prompt in range(12):  # prompt + 2 + prompt % 3 steps
            firsts.append(add(replay, prompt, 0, steps=prompt + 1, weight=1.0 + prompt))
            for _ in range(1 + prompt % 3):
                add(replay, prompt, 1, steps=1, weight=1.0 + prompt)
        stream = train(replay)
        first = 0
        if sampler["kind"] == "prioritized":
            take(stream, 0)
            # A group is named by any of its trajectories: here by the first one, which is not its
            # leader.
            assert replay.set_priorities(firsts, [1.0 + prompt % 4 for prompt in range(12)]) == 12
            first = 1
        counts = np.zeros(12)
        for number in range(first, first + 8):
            for ids in take(stream, number):
                counts[replay.read(ids[:1])[0]["prompt"]] += 1
        if sampler["kind"] == "prioritized":
            assert replay.priorities(firsts).tolist() == [1.0 + prompt % 4 for prompt in range(12)]
        expected = np.array([masses(prompt) for prompt in range(12)], float)
    assert chisquare(counts, expected / expected.sum() * counts.sum()).pvalue > 1e-3


def test_a_number_that_is_used_again_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """New responses under the number of a stored group are late: the log says so."""
    with Replay(section(GROUP, {"kind": "uniform"}, batch={"groups": 1})) as replay:
        for number in range(3):
            add_groups(replay, [7, 8 + number])
            replay.rollout()
        lines = [one.getMessage() for one in caplog.records if "were dropped" in one.getMessage()]
        assert len(lines) == 1
        assert lines[0].startswith(
            "gear: table main: 3 trajectories came when their group was complete"
        )
        assert "column prompt is the number of a group" in lines[0]
    with Replay(section({**GROUP, "after_s": 9.0, "min_size": 1}, batch={"groups": 1})) as replay:
        caplog.clear()
        add_groups(replay, [7], size=4)
        replay.rollout()
        assert replay.statistics()["groups"]["main"]["surplus"] == 1
        assert not caplog.records


def test_recovery_counts_the_groups_again() -> None:
    """A process that dies while it forms groups leaves their leaders, and counts of before."""
    with Replay(section()) as replay:
        add_groups(replay, range(4))
        add(replay, 9)  # of an incomplete group
        table = replay.store()
        assert table.groups is not None
        with table.lock:
            table.groups.update()
            whole = table.groups.counts.copy()
            table.groups.counts[[GroupCount.HELD, GroupCount.INSERTED]] = 1
            table.groups.recover()
        assert whole[GroupCount.HELD] == 4
        assert table.groups.counts.tolist() == whole.tolist()


def test_a_full_group_refuses_more_trajectories() -> None:
    with Replay(section({**MEMBERS, "max_trajectories": 3, "needs": ["reward"]})) as replay:
        for sample in range(3):
            add(replay, 1, sample)
        rows = replay.statistics()["steps"]
        with pytest.raises(
            DataError, match=r"group 1 of column prompt must have at most .* = 3 traj"
        ):
            add(replay, 1, 0)
        assert replay.statistics()["steps"] == rows
        add(replay, 2, 0)
        check_groups(replay)


@pytest.mark.parametrize(
    ("statistic", "bounds", "passing"),
    [
        ("std", {"min": 1e-6}, [1, 2, 3]),
        ("std", {"max": 0.1}, [0]),
        ("mean", {"min": 0.3, "max": 0.34}, [1]),
        ("min", {"min": 0.5}, [3]),
        ("max", {"max": 0.5}, [0]),
        ("sum", {"min": 1.5}, [2, 3]),
    ],
)
def test_groups_that_fail_a_condition_leave(
    statistic: str, bounds: Any, passing: list[int]
) -> None:
    rewards = [[0.1, 0.1, 0.1], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 0.5, 1.0]]
    group = {**GROUP, "where": {"reward": {statistic: bounds}}}
    with Replay(section(group, batch={"groups": len(passing)})) as replay:
        groups = add_groups(replay, range(4))
        for number, ids in groups.items():
            for reward, one in zip(rewards[number], ids, strict=True):
                replay.fill(one, reward=reward)
        assert take(train(replay), 0) == [groups[number] for number in passing]
        assert replay.statistics()["groups"]["main"]["rejected"] == 4 - len(passing)
        assert replay.take_metrics()["groups_rejected"] == 4 - len(passing)
        assert stored(replay) == {one for number in passing for one in groups[number]}


FLOATING = ["float16", "bfloat16", "float32", "float64"]
BOUNDS: list[
    tuple[dict[str, Any], list[list[float]], list[list[float]]]
] = [  # passing and failing groups
    (
        {"mean": {"min": 0.2, "max": 0.8}},
        [[0.8] * 5, [0.2] * 5, [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]],
        [[0.1] * 5, [0.9] * 5, [0] * 5, [1] * 5],
    ),
    ({"mean": {"min": 0.1, "max": 0.1}}, [[0.1] * 5], [[0.1, 0.1, 0.1, 0.1, 0.2]]),
    (
        {"min": {"min": 0.1}, "max": {"max": 0.8}},
        [[0.1, 0.2, 0.3, 0.4, 0.8]],
        [[0.0] * 5, [0.9] * 5],
    ),
    ({"sum": {"min": 0.8, "max": 4}}, [[0.8, 0, 0, 0, 0], [0.8] * 5], [[0.7, 0, 0, 0, 0], [1] * 5]),
    ({"std": {"min": 1e-50}}, [[1, 0, 0, 0, 0]], [[0.1] * 5, [0.3] * 5]),  # float16 has no 1e-50
]


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(
    ("where", "passing", "failing"), BOUNDS, ids=[",".join(one[0]) for one in BOUNDS]
)
def test_bounds_are_closed_as_the_column_stores_them(
    where: dict[str, Any], passing: list[list[float]], failing: list[list[float]], dtype: str
) -> None:
    """A stored 0.8 of float32 is 0.800000012."""
    group = {"column": "prompt", "size": 5, "where": {"score": where}}
    config = section(group, batch={"groups": len(passing)})
    columns = {**COLUMNS, "score": {"dtype": dtype, "rows": "1"}}
    config["tables"]["main"]["schema"] = {"columns": columns}
    with Replay(config) as replay:
        row = {"tokens": np.zeros(3, np.int32), "sample": 0, "weight": 1.0}
        for number, scores in enumerate([*passing, *failing]):
            for score in scores:
                replay.add(
                    {**row, "prompt": number, "score": torch.tensor(score, dtype=DTYPES[dtype])}
                )
        assert len(take(train(replay), 0)) == len(passing)
        assert replay.statistics()["groups"]["main"]["rejected"] == len(failing)
        assert sorted(stored(replay)) == list(range(5 * len(passing)))


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize(
    ("where", "passing"),
    [({"min": 0.1, "max": 0.8}, {0, 1}), ({"in": [0.1, 0.8]}, {0, 1}), ({"in": [1]}, {3})],
)
def test_conditions_of_the_sampler_hold_as_the_column_stores_values(
    where: dict[str, Any], passing: set[int], dtype: str
) -> None:
    config = section(
        sampler={"unit": "trajectory", "where": {"score": where}}, batch={"trajectories": 8}
    )
    config["sampler"]["kind"] = "uniform"
    table = config["tables"]["main"]
    del table["group"]
    table["schema"] = {"columns": {**COLUMNS, "score": {"dtype": dtype, "rows": "1"}}}
    with Replay(config) as replay:
        row = {"tokens": np.zeros(3, np.int32), "prompt": 0, "sample": 0, "weight": 1.0}
        scores = torch.tensor([0.1, 0.8, 0.05, 1.0], dtype=DTYPES[dtype])
        ids = [replay.add({**row, "score": score}) for score in scores]
        stream = train(replay)
        stream.get(0)
        assert {one for one in ids if stream.masses.leaves[one] > 0} == passing


# ---- stragglers ----------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of groups, in seconds: it stands still between the lines of a test."""
    made = SimpleNamespace(now=100.0)
    commit = Table.commit

    def commit_now(table: Table, slot: int, *given: int) -> int:
        """Commit by this clock: the native store reads that of the machine."""
        number = commit(table, slot, *given)
        if table.groups is not None:
            table.groups.note_time(slot)
        return number

    monkeypatch.setattr(Inserter, "_add_natively", lambda *_: None)
    monkeypatch.setattr(Table, "commit", commit_now)
    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic_ns=lambda: int(made.now * 1e9)))
    return made


def test_stragglers(clock: SimpleNamespace) -> None:
    """A group with enough members is complete some time after its latest one; the others are then
    late.
    """
    group = {**MEMBERS, "needs": ["reward"], "after_s": 0.3, "min_size": 2}
    with Replay(section(group, batch={"groups": 1})) as replay:
        ids = [add(replay, 1, sample) for sample in range(2)]
        alone = add(replay, 2, 0)
        for one in (*ids, alone):
            replay.fill(one, reward=0.0)
        waiting = add(replay, 1, 2)  # without its reward
        assert not replay.can_sample()
        assert replay.missing_groups() == 1
        clock.now += 0.2
        add(replay, 2, 1)
        assert not replay.can_sample()
        clock.now += 0.15
        assert take(train(replay), 0) == [ids]
        assert waiting not in stored(replay)
        found = replay.statistics()["groups"]["main"]
        assert found == {**dict.fromkeys(COUNTED, 0), "complete": 1, "incomplete": 1, "unfilled": 1}
        check_groups(replay)


def test_rewards_that_come_one_after_the_other_restart_the_clock(clock: SimpleNamespace) -> None:
    """No member is left out whose reward comes within `after_s` of the one before."""
    group = {**GROUP, "needs": ["reward"], "after_s": 0.4, "min_size": 1}
    with Replay(section(group, batch={"groups": 1})) as replay:
        ids = [add(replay, 1, sample) for sample in range(3)]
        for one in ids:
            clock.now += 0.25
            replay.fill(one, reward=0.0)
        clock.now += 0.5
        assert take(train(replay), 0) == [ids]


@pytest.mark.parametrize("how", ["drawn", "rejected", "evicted"])
def test_stragglers_of_groups_that_have_left_form_no_second_group(
    how: str, tmp_path: Path, clock: SimpleNamespace
) -> None:
    """Also after a save and a load; groups that the program removes may be added again."""
    group = {**GROUP, "after_s": 0.05, "min_size": 1}
    options: dict[str, Any] = {"capacity_trajectories": 6, "remove": "fifo", "max_times_sampled": 1}
    if how == "rejected":
        group["where"] = {"weight": {"min": {"min": 1.0}}}
    config = section(group, batch={"groups": 1}, **options)

    def late(replay: Replay) -> int:
        clock.now += 0.06
        found = replay.statistics()["groups"]["main"]
        assert found["complete"] + found["incomplete"] == len(stored(replay)) // 3
        return int(found["late_consumed"])

    with Replay(config) as replay:
        add(replay, 1, weight=0.0 if how == "rejected" else 1.0)
        clock.now += 0.06
        assert replay.can_sample() == (how != "rejected")
        if how == "drawn":
            trained(replay)
        elif how == "evicted":
            add_groups(replay, [2, 3])
            assert replay.statistics()["groups"]["main"]["evicted_unsampled"] == 1
        add(replay, 1, 1)
        assert late(replay) == 1
        state = replay.save(tmp_path)
        add(replay, 1, 2)
        assert late(replay) == 2
    with Replay(config) as replay:
        replay.load(tmp_path, state)
        add(replay, 1, 2)
        assert late(replay) == 2
        replay.clear()
        again = add(replay, 1)
        clock.now += 0.06
        assert trained(replay) == [[again]]
        replay.remove([add(replay, 4)])
        again = add(replay, 4)
        clock.now += 0.06
        assert trained(replay) == [[again]]


def test_numbers_of_groups_that_have_left_are_named(caplog: pytest.LogCaptureFixture) -> None:
    group = {**GROUP, "remember": 9}
    options = {"batch": {"groups": 1}, "max_times_sampled": 1}
    with Replay(section(group, **options)) as replay:
        for _ in range(3):
            add_groups(replay, [5])
            if replay.can_sample():
                trained(replay)
        (line,) = [one.getMessage() for one in caplog.records if "has left" in one.getMessage()]
        assert line.startswith(
            "gear: table main: 3 trajectories since the latest batch had the number of a"
        )


def test_a_sampler_waits_for_stragglers() -> None:
    """No process adds, but time completes a group: the selection waits for it."""
    group = {**GROUP, "after_s": 0.2, "min_size": 1}
    with Replay(section(group, batch={"groups": 1})) as replay:
        number = add(replay, 1)
        assert trained(replay) == [[number]]
        replay.remove([number])
        with pytest.raises(StoreError, match="add trajectories first"):
            replay.rollout()


# ---- groups that are generated in vain -----------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "sampler", "text"),
    [
        (
            {"capacity_trajectories": 11},
            {},
            r"capacity_trajectories must be at least .* batch \(12\), got 9",
        ),
        (
            {"capacity_trajectories": 5, "max_times_sampled": 2},
            {"kind": "uniform"},
            r"\(6\), got 3",
        ),
        ({"capacity_trajectories": 11, "max_times_sampled": 2}, {"kind": "uniform"}, None),
        ({"capacity_trajectories": 3}, {"kind": "uniform"}, None),
        ({"group": {**GROUP, "after_s": 1.0, "min_size": 2}, "capacity_trajectories": 8}, {}, None),
    ],
    ids=str,
)
def test_a_table_that_never_holds_a_batch_is_refused(
    table: Any, sampler: Any, text: str | None
) -> None:
    config = section(batch={"groups": 4}, sampler=sampler, **table)
    if text is None:
        Replay(config).close()
        return
    with pytest.raises(ConfigError, match=text):
        Replay(config)


def test_trajectories_and_steps_of_a_batch_must_fit_as_well() -> None:
    config = section(batch={"trajectories": 7}, capacity_trajectories=6)
    del config["tables"]["main"]["group"]
    with pytest.raises(ConfigError, match=r"trajectories of a batch \(7\), got 6"):
        Replay({**config, "sampler": {"kind": "fifo"}})
    steps = {name: config[name] for name in ("tables", "fields")}
    steps["tables"]["main"]["capacity_steps"] = 30
    with pytest.raises(
        ConfigError, match=r"steps must be at least the steps of a batch \(31\), got 30"
    ):
        Replay({**steps, "sampler": {"kind": "fifo", "unit": "step"}, "batch_size": 31})


def test_complete_groups_that_are_evicted_unsampled_are_named(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As of a table that holds the trajectories of a batch, but not their steps."""
    sizes = {"capacity_steps": 100, "capacity_trajectories": 30, "remove": "fifo"}
    config = section(batch={"groups": 4}, max_times_sampled=1, **sizes)
    with Replay(config) as replay:
        add_groups(replay, range(4))
        trained(replay)
        for turn in range(3):
            add_groups(replay, range(4 + 4 * turn, 8 + 4 * turn), steps=15)
            assert not replay.can_sample()
            assert replay.missing_groups() == 2
        assert replay.statistics()["groups"]["main"]["evicted_unsampled"] == 10
        (line,) = [
            one.getMessage() for one in caplog.records if "before any batch" in one.getMessage()
        ]
        assert "complete groups were evicted" in line
    with Replay(section(sampler={"kind": "uniform"}, **sizes)) as replay:
        add_groups(replay, [0], steps=15)
        trained(replay)
        state = replay.save(tmp_path)
        replay.load(tmp_path, state)
        add_groups(replay, range(1, 4), steps=15)
        assert (
            replay.statistics()["groups"]["main"]["evicted_unsampled"] == 1
        )  # the first one was drawn


@pytest.mark.parametrize("kind", ["plain", "queue"])
def test_a_condition_that_few_groups_pass(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """`missing_groups` asks for more by the rate at which they pass, and the log has the rate."""
    group = {**GROUP, "size": 1, "where": {"weight": {"min": {"min": 1.0}}}}
    limit = {"rate_limiter": {"queue": 6}} if kind == "queue" else {"max_times_sampled": 1}
    with Replay(section(group, batch={"groups": 4}, **limit)) as replay:
        number = 0
        asked = []
        for turn in range(12):
            asked.append(replay.missing_groups())
            for _ in range(asked[-1]):
                add(replay, number, weight=float(turn == 11))  # until then all of them fail
                number += 1
        assert asked[:4] == [4, 6, 6, 6] if kind == "queue" else asked[:4] == [4, 20, 32, 32]
        assert replay.can_sample()
        (line,) = [one.getMessage() for one in caplog.records if "group.where" in one.getMessage()]
        assert "(0.0% passed)" in line
        trained(replay)
        for _ in range(40):
            while missing := replay.missing_groups():
                for _ in range(missing):
                    add(replay, number, weight=float(number % 2))
                    number += 1
            trained(replay)
        assert replay.missing_groups() <= 10  # half of the latest ones passed


# ---- limits --------------------------------------------------------------------------------------


def test_an_empty_table_names_what_is_missing() -> None:
    with Replay(section({**GROUP, "needs": ["reward"]})) as replay:
        first = add_groups(replay, [1])[1]
        replay.fill(first[0], reward=1.0)
        add(replay, 2)
        with pytest.raises((StoreError, NotReadyError), match="without the late column reward"):
            train(replay).get(0)
        for one in first[1:]:
            replay.fill(one, reward=1.0)
        replay.fill(add(replay, 3), reward=0.0)
        replay.can_sample()
        with train(replay).table.lock:
            held, _ = summary_of(train(replay).masses)
        found = re.findall(r"(\d+) trajectories \(\d+ steps\) ([^;]+)", held)
        assert found == [("1", "without the late column reward"), ("1", "of incomplete groups")]


def test_a_loop_that_ends_early_asks_for_the_next_groups() -> None:
    config = section(GROUP, rollout={"groups": 2, "minibatches": 2}, max_times_sampled=1)
    del config["batch"]
    with Replay(config) as replay:
        add_groups(replay, range(2))
        for _ in replay.rollout():
            break
        assert not replay.can_sample()
        assert replay.missing_groups() == 2
        groups = add_groups(replay, range(2, 4))
        assert trained(replay) == list(groups.values())


def test_a_queue_of_groups() -> None:
    """Complete groups that wait are at most those of the queue; each is drawn once, and leaves
    whole.
    """
    rate = {"queue": 4, "timeout_s": 1.0}
    config = section(GROUP, batch={"groups": 2}, rate_limiter=rate, timeout_s=1.0)
    with Replay(config) as replay:
        assert replay.missing_groups() == 2
        groups = add_groups(replay, range(3))
        assert replay.missing_groups() == 0
        other = [add(replay, 3, 0), add(replay, 3, 1)]
        other.append(add(replay, 3, 2))  # the fourth group
        with pytest.raises(NotReadyError, match="rate limiter"):
            add(replay, 4)
        assert trained(replay) == [groups[0], groups[1]]
        assert not stored(replay) & {*groups[0], *groups[1]}
        assert [t["prompt"].item() for t in replay.read(groups[1])] == [1, 1, 1]
        add(replay, 4)
        assert replay.missing_groups() == 0
        assert trained(replay) == [groups[2], other]
        assert replay.missing_groups() == 2
        with pytest.raises(NotReadyError):
            replay.rollout()
        check_groups(replay)


@pytest.mark.parametrize("kind", ["uniform", "fifo"])
def test_groups_leave_whole_after_their_last_draw(kind: str) -> None:
    with Replay(section(GROUP, {"kind": kind}, batch={"groups": 3}, max_times_sampled=2)) as replay:
        groups = add_groups(replay, range(6))
        draws = list[list[int]]()
        for number in range(4):
            draws += trained(replay)
            gone = {one for ids in groups.values() if draws.count(ids) == 2 for one in ids}
            assert stored(replay) == {one for ids in groups.values() for one in ids} - gone
            assert replay.missing_groups() == max(3 - (12 - 3 * (number + 1)), 0)
            check_groups(replay)
        assert all(draws.count(ids) == 2 for ids in groups.values())


def test_old_groups_leave_whole() -> None:
    with Replay(section(GROUP, batch={"groups": 1}, max_age=2)) as replay:
        groups = add_groups(replay, [0])
        add(replay, 5, 0)
        take(train(replay), 0)
        newer = add_groups(replay, [1])
        add(replay, 5, 1)
        take(train(replay), 1)
        take(train(replay), 2)
        assert take(train(replay), 3) == [newer[1]]
        assert not stored(replay) & set(groups[0])
        assert stored(replay) == set(newer[1])  # the incomplete group had an old member
        assert replay.statistics()["stale"]["main"]["trajectories"] == 5


# ---- other tables --------------------------------------------------------------------------------
