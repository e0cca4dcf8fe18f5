"""Leases whose members have any number of trajectories, and groups with fewer members."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import prefix
from ledger_support import check_books, ledger_section, recipe_section, responses, write_prompts
from remote_support import attached, serving
from rollout_support import COLUMNS, micros, ranks_of, section, seen_by

from deepspeed_gear import (
    ConfigError,
    DataError,
    FillWorker,
    GearError,
    Lease,
    Replay,
    RolloutWorker,
    StoreError,
    Turn,
    trajectories_from_turns,
)
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.records import SharedPrompt
from deepspeed_gear.store.shared_memory import remove_garbage
from deepspeed_gear.writer.rollout_worker import LeaseWorker

Group = list[list[dict[str, Any]]]  # trajectories by member
DOORS = ["node", "gateway"]
AFTER_S = 0.01
#: Trajectories of each member, by group: groups of one to three members, of 4 at most.
COUNTS = [[1, 3, 2], [2], [1, 1, 1], [4, 1], [1, 2, 1], [3, 3]]
SCHEMA = {"columns": {**COLUMNS, "member": {"dtype": "int8", "rows": "1"}}}
GROUP = {"column": "prompt", "size": 3, "min_size": 1, "member": "member", "max_trajectories": 12}


def groups(seed: int = 0) -> list[Group]:
    """Return groups of `COUNTS`, as agents give them: most trajectories begin with the prompt.

    The second trajectory of a member is of another agent, which has a prompt of its own.
    """
    words = np.random.default_rng(seed)
    made = []
    for counts in COUNTS:
        prompt = words.integers(1, 50, 9)
        members: Group = []
        for count in counts:
            members.append([])
            for index in range(count):
                own = words.integers(50, 99, 3) if index == 1 else prompt
                context = np.append(own, words.integers(1, 50, 4 * index))
                length = len(context) + int(words.integers(1, 9))
                has_loss = np.arange(length) >= len(context)
                tokens = np.append(context, words.integers(1, 50, length - len(context)))
                one: dict[str, Any] = {
                    "tokens": tokens.astype(np.int32),
                    "loss_mask": has_loss,
                    "logp": np.where(has_loss, -words.random(length), 0).astype(np.float32),
                    "reward": np.float32(words.integers(0, 4)),
                }
                members[-1].append(one)
        made.append(members)
    return made


def gear(prompts: Path | None, **options: Any) -> dict[str, Any]:
    """Return a gear section with groups of up to three members; two groups a batch."""
    table = {"capacity_steps": 4000, "max_length": 60, "schema": SCHEMA, "writers": 2}
    table |= {"group": GROUP, "max_times_sampled": 1}
    if prompts is not None:
        table["prompts"] = {"data": str(prompts), "max_lag": 2}
    else:
        table["group"] = {**GROUP, "after_s": AFTER_S}  # as with fewer members in a ledger
    given = {
        "fields": {name: {} for name in ("tokens", "logp", "reward")},
        "rollout": {"groups": 2},
        "sampler": {"kind": "fifo", "unit": "group"},
        "pack": {"tokens": 128, "pad": {"multiple": 16}},
    }
    return section(**copy.deepcopy({"tables": {"main": table}, **given, **options}))


def with_members(config: dict[str, Any], **group: Any) -> dict[str, Any]:
    """Return a section of `ledger_section` whose groups have members."""
    added = {"member": "sample", "max_trajectories": 5, **group}
    config["tables"]["main"]["group"] |= {n: v for n, v in added.items() if v is not None}
    return config


def attached_by(door: str, config: dict[str, Any], stack: ExitStack) -> LeaseWorker:
    """Return a worker that comes in by a door, closed at the end."""
    url = stack.enter_context(serving(config)).url if door == "gateway" else None
    return attached(url, config, stack)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts", 6)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    remove_garbage(prefix(), kept=True)


def given(members: Group) -> list[Any]:
    """Return the members of a group as a program may give them: one trajectory without a list."""
    return [own[0] if len(own) == 1 else own for own in members]


def add_each(replay: Replay, made: Sequence[Group]) -> None:
    """Add the trajectories of groups one by one, to a table without a ledger."""
    for number, members in enumerate(made):
        for place, own in enumerate(members):
            for one in own:
                replay.add({**one, "prompt": np.int64(number), "member": np.int8(place)})


def shared_steps(replay: Replay) -> list[int]:
    """Return how many steps of each trajectory another one holds, by id."""
    table = replay.tables["main"]
    slots = np.flatnonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)
    slots = slots[np.argsort(table.slots[slots, Slot.ID])]
    assert table.shared_prompts is not None
    return table.shared_prompts[slots, SharedPrompt.STEPS].tolist()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("loss", ["token", "sequence", "group", "members"])
def test_a_rollout_of_several_trajectories_trains_as_if_each_was_added_without_the_ledger(
    door: str, loss: str, data: Path
) -> None:
    """Batches, advantages and loss weights are equal, on any ranks.

    An agent's rollout gives one sequence for each turn whose context was edited, so groups differ
    in their number of sequences. A member counts once in its group all the same, and each of its
    sequences is trained with the member's advantage.
    """
    options: dict[str, Any] = {"loss": {"normalize": "sequence" if loss == "members" else loss}}
    if loss == "members":
        options["loss"]["by"] = "member"
    config = gear(data, **options)
    made = groups()
    with ExitStack() as stack:
        leased = stack.enter_context(Replay(config))
        plain = stack.enter_context(Replay(gear(None, **options)))
        worker = attached_by(door, config, stack)
        leases = worker.lease(len(made))
        ids = [lease.commit(given(made[lease.number])) for lease in leases]
        add_each(plain, made)
        time.sleep(2 * AFTER_S)  # all of its groups are complete at once: they come in their order
        sizes = [sum(counts) for counts in COUNTS]
        assert [len(own) for own in ids] == sizes
        assert [one for own in ids for one in own] == list(range(sum(sizes)))
        shared = [
            8 * (index != 1 and (place, index) != (0, 0))
            for counts in COUNTS
            for place, count in enumerate(counts)
            for index in range(count)
        ]
        assert shared_steps(leased) == shared
        reads = [replay.read(range(sum(sizes))) for replay in (leased, plain)]
        for one, other in zip(*reads, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in SCHEMA["columns"])
        for number in range(3):
            rollouts = [replay.rollout() for replay in (leased, plain)]
            for kind in ("grpo", "dr_grpo", "rloo"):
                for rollout in rollouts:
                    rollout.advantages(kind, reward="reward", name=kind)
                assert torch.equal(*(rollout.column(kind) for rollout in rollouts)), kind
            values = [rollout.values("prompt").tolist() for rollout in rollouts]
            numbers = [2 * number, 2 * number + 1]
            expected = np.repeat(numbers, [sizes[at] for at in numbers]).tolist()
            assert values == [expected, expected]
            for place in ranks_of(2, 2):
                packs = [micros(seen_by(rollout, place)) for rollout in rollouts]
                for mine, theirs in zip(*packs, strict=True):
                    assert torch.equal(mine["tokens"], theirs["tokens"])
                    assert torch.equal(mine.weight, theirs.weight)
                    assert torch.equal(mine.trajectory_id, theirs.trajectory_id)
            for rollout in rollouts:
                micros(rollout)
        assert check_books(leased)["trained"] == 6


def test_advantages_are_those_of_the_members_that_are_there(data: Path) -> None:
    """Two of three members: the mean, the deviation and the others are of two."""
    with Replay(gear(data, rollout={"groups": 1})) as replay, replay.rollout_worker() as worker:
        (lease,) = worker.lease()
        one, two = ({**groups()[0][0][0], "reward": np.float32(r)} for r in (1.0, 0.0))
        lease.commit([one, [{**two, "reward": np.float32(9)}, two]])  # the last one's counts
        rollout = replay.rollout()
        for kind, value in (("dr_grpo", 0.5), ("rloo", 1.0), ("grpo", 0.5**0.5)):
            rollout.advantages(kind, reward="reward", name=kind)
            parts = rollout.column(kind)[rollout.batch_columns.mask].reshape(3, -1).numpy()
            for part, sign in zip(parts, (1.0, -1.0, -1.0), strict=True):
                assert part == pytest.approx(sign * value, abs=1e-5)


# ---- what is refused ----


def of(*counts: int, **columns: Any) -> Callable[[Lease], Any]:
    """Return what commits members with so many trajectories, which have further columns."""

    def commit(lease: Lease) -> Any:
        one = responses(lease)[0]
        del one["sample"]
        one |= columns
        return lease.commit([[dict(one) for _ in range(count)] for count in counts])

    return commit


REFUSED: list[tuple[dict[str, Any], Callable[[Lease], Any], type[GearError], str]] = [
    ({}, of(1), DataError, "must have 2 members, got 1; give group.min_size to commit fewer, or f"),
    ({}, of(1, 1, 1), DataError, "must have 2 members, got 3; commit as many as group.size"),
    ({}, of(), DataError, "must have 2 members, got 0"),
    ({"min_size": 1}, of(), DataError, r"must have 1 \(group.min_size\) to 2 members, got 0"),
    ({}, of(3, 3), DataError, "must have at most group.max_trajectories = 5 trajectories, got 6"),
    (
        {},
        of(1, 0),
        DataError,
        "member 1 must be a trajectory, or a list with at least one, got 'an",
    ),
    ({}, of(1, 1, sample=0), DataError, "member 1 must have its place in the group in sample"),
    ({}, of(1, 1, prompt=np.int64(7)), DataError, "must have the prompt's number in prompt, got 7"),
    ({}, lambda lease: lease.commit(5), ConfigError, "members must be a list of a group's"),  # type: ignore
    ({}, lambda lease: lease.commit([5, 5]), DataError, "member 0 must be a trajectory, or a"),  # type: ignore
    ({}, lambda lease: lease.commit([[5], [5]]), DataError, "trajectory must be a mapping by na"),  # type: ignore
    ({}, lambda lease: lease.commit(["ab", "c"]), DataError, "trajectory must be a mapping by"),  # type: ignore
    (
        {},
        lambda lease: lease.commit(2 * [[Turn([1], [2])]]),  # type: ignore[list-item]
        DataError,
        "got 'Turn'; give rows by column; trajectories_from_turns makes trajectories of turns",
    ),
    (
        {},
        lambda lease: lease.commit(2 * [[{"tokens": np.arange(3)}]]),
        DataError,
        "must be in every trajectory; give it with the trajectory, or take the column out of the",
    ),
    (
        {"member": None, "max_trajectories": None},
        lambda lease: lease.commit(responses(lease)[:1]),
        DataError,
        "must have 2 members, got 1",
    ),
    (
        {"member": None, "max_trajectories": None},
        of(1, 2, sample=0),
        DataError,
        "member 0 must be one trajectory: the table's groups have no member column, .*group.member",
    ),
]


@pytest.mark.parametrize("door", DOORS)
def test_what_is_refused_changes_nothing(door: str, data: Path) -> None:
    for change in ({}, {"min_size": 1}, {"member": None, "max_trajectories": None}):
        with ExitStack() as stack:
            config = with_members(ledger_section(data), **change)
            replay = stack.enter_context(Replay(config))
            worker = attached_by(door, config, stack)
            (lease,) = worker.lease()
            for options, call, error, text in REFUSED:
                if options != change:
                    continue
                with pytest.raises(error, match=text):
                    call(lease)
                books = check_books(replay)
                assert (len(replay), books["leased"], books["issued"]) == (0, 1, 1), text
            if change.get("member", "sample"):
                of(2, 3)(lease)
                assert (len(replay), check_books(replay)["waiting"]) == (5, 1)


def test_counts_that_no_worker_sends_are_an_error_of_the_call(data: Path) -> None:
    wrong: list[Any] = [None, [], [1], [3], [2, 0], [1.5, 0.5], ["x"], "2", {"0": 2}]
    config = with_members(ledger_section(data))
    with Replay(config) as replay, serving(config) as gateway:
        sessions: Any = gateway.sessions
        sessions.open("a")
        take = {"number": 1, "do": "lease", "count": 1, "wait_s": 0.0}
        lease = [*sessions.work("a", take, [])["leases"][0][:5], None, sessions.hello["run"]]
        commit = {"do": "commit", "lease": lease, "absent": [["reward"]] * 2}
        one = {"tokens": np.ones(2, np.int32), "prompt": 0, "weight": 1.0, "reward": 0.0}
        group = [(0, one), (1, one)]
        for number, counts in enumerate(wrong, 2):
            call = {**commit, "number": number, "counts": counts}
            with pytest.raises(DataError, match="the trajectories of members must"):
                sessions.work("a", call, group)
        assert (len(replay), check_books(replay)["leased"]) == (0, 1)
        call = {**commit, "number": 99, "counts": [1, 1]}
        assert sessions.work("a", call, group)["ids"] == [0, 1]


@pytest.mark.parametrize("door", DOORS)
def test_a_group_without_the_responses_that_failed(door: str, data: Path) -> None:
    """With a minimum, a response that failed costs no group: it is committed, and trained."""
    config = ledger_section(data, {"max_lag": 0}, group={"size": 4, "min_size": 2})
    with ExitStack() as stack:
        replay = stack.enter_context(Replay(config))
        worker = attached_by(door, config, stack)
        leases = worker.lease(3)
        for lease, size in zip(leases, (2, 4, 3), strict=True):
            lease.commit([responses(lease)[0]] * size)
        books = check_books(replay)
        assert (books["waiting"], books["dropped"]) == (3, {})
        rollout = replay.rollout()
        assert rollout.values("prompt").tolist() == [0] * 2 + [1] * 4 + [2] * 3
        micros(rollout)


def test_a_short_group_waits_for_the_late_columns_of_all_that_it_has(data: Path) -> None:
    """The members that are there must all have their reward: none is left out as a straggler."""
    options = {"size": 3, "min_size": 1, "needs": ["reward"]}
    config = with_members(ledger_section(data, {"max_lag": 0}, groups=1), **options)
    with Replay(config) as replay, replay.rollout_worker() as worker:
        (lease,) = worker.lease()
        one = responses(lease)[0]
        del one["sample"]
        lease.commit([one, [one, one]])
        with FillWorker.attach(config, "reward", run=replay.run) as filler:
            for index, fill in enumerate(filler.lease(3)):
                assert check_books(replay)["incomplete"] == 1
                fill.fill(float(index))
        assert check_books(replay)["waiting"] == 1
        assert len(replay.read([0, 1, 2])) == 3
        micros(replay.rollout())


def test_a_group_is_evicted_with_all_of_its_trajectories(data: Path) -> None:
    config = with_members(ledger_section(data), max_trajectories=3)
    sizes = {"capacity_steps": 60, "capacity_trajectories": 36, "remove": "fifo"}
    config["tables"]["main"] |= sizes
    with Replay(config) as replay, replay.rollout_worker() as worker:
        one = {"tokens": np.arange(12), "weight": 1.0}
        first, second = (lease.commit([one, [one, one]]) for lease in worker.lease(2))
        assert (len(replay), check_books(replay)["dropped"]) == (3, {"evicted": 1})
        assert len(replay.read(second)) == 3
        with pytest.raises(StoreError, match="must be stored"):
            replay.read(first[-1:])


def test_an_agents_turns_are_members(data: Path) -> None:
    """A turn with an edited context begins a trajectory, with the reward of its rollout."""
    turns = [Turn([1, 2, 3], [7], [-0.5]), Turn([1, 2, 3, 7, 4], [8], [-1.0])]
    edited = Turn([1, 2, 9], [6, 5], [-0.1, -0.2])
    made = [trajectories_from_turns(own, {"reward": 1.0}) for own in (turns, [*turns, edited])]
    with Replay(gear(data, rollout={"groups": 1})) as replay, replay.rollout_worker() as worker:
        (lease,) = worker.lease()
        ids = lease.commit(made)
        stored = replay.read(ids)
        assert [one["tokens"].tolist() for one in stored] == [
            [1, 2, 3, 7, 4, 8],
            [1, 2, 3, 7, 4, 8],
            [1, 2, 9, 6, 5],
        ]
        assert [int(one["member"]) for one in stored] == [0, 1, 1]
        assert shared_steps(replay) == [0, 2, 0]


# ---- checkpoints, and stores that outlive their job ----


def test_groups_of_any_size_are_saved_and_loaded(data: Path, tmp_path: Path) -> None:
    """In the middle of a rollout batch, into another number of slots; also their books."""
    config = gear(data, rollout={"groups": 2, "minibatches": 2})
    made = groups()
    packs = []
    with Replay(config) as replay, replay.rollout_worker() as worker:
        for lease in worker.lease(6)[::-1]:  # so that a load gives other slots
            lease.commit(given(made[lease.number]))
        for step in replay.rollout():
            packs.append([micro["tokens"].clone() for micro in step])
            if step.number == 0:
                replay.save(tmp_path / "saved")
        expected = replay.read(range(sum(sum(counts) for counts in COUNTS[2:])))
        last = [micro["tokens"].clone() for micro in micros(replay.rollout())]
    for keep in (False, True):
        other = copy.deepcopy(config)
        other["tables"]["main"]["capacity_trajectories"] = 300
        other["shared_memory"]["keep"] = keep
        with Replay(other) as replay:
            replay.load(tmp_path / "saved")
            books = check_books(replay)
            assert (books["training"], books["waiting"]) == (2, 4)
            for one, known in zip(replay.read(range(len(expected))), expected, strict=True):
                assert all(torch.equal(one[name], known[name]) for name in one)
            found = [micro["tokens"] for micro in micros(replay.rollout())]
            assert all(map(torch.equal, packs[1], found))
            assert all(map(torch.equal, last, [m["tokens"] for m in micros(replay.rollout())]))
            replay.load(tmp_path / "saved")
    with Replay(other) as replay:  # the next job in the store finds what was loaded
        assert replay.can_sample()
        assert check_books(replay)["waiting"] == len(COUNTS)


def test_the_next_job_holds_groups_of_any_size_that_are_whole(data: Path) -> None:
    """Rows are freed one trajectory at a time: a group that has lost one is generated again."""
    config = gear(data)
    config["shared_memory"]["keep"] = True
    made = groups()
    with Replay(config) as replay, RolloutWorker.attach(config) as worker:
        leases = worker.lease(6)
        for lease in leases[:5]:
            lease.commit(given(made[lease.number]))
    with Replay(config) as replay, RolloutWorker.attach(config) as worker:
        assert replay.can_sample()
        (again,) = worker.lease(9)
        assert (again.number, check_books(replay)["waiting"]) == (5, 5)
        again.commit(given(made[5]))
        assert len(replay) == sum(sum(counts) for counts in COUNTS)
    with Replay(config) as replay, RolloutWorker.attach(config) as worker:
        table = replay.tables["main"]
        with table.lock:
            retired = table.extents.retired()
            numbers = table.columns["prompt"][retired]
            table.extents.free(int(retired[numbers == 0][-1]))
            table.extents.free(int(retired[numbers == 3][0]))
        assert not replay.can_sample()
        leases = worker.lease(9)
        assert [lease.number for lease in leases] == [0, 3]
        for lease in leases:
            lease.commit(given(made[lease.number]))
        assert check_books(replay)["waiting"] == 6
        for number in range(3):
            rollout = replay.rollout()
            sizes = [sum(counts) for counts in COUNTS[2 * number : 2 * number + 2]]
            expected = np.repeat([2 * number, 2 * number + 1], sizes)
            assert rollout.values("prompt").tolist() == expected.tolist()
            micros(rollout)


# ---- configs ----


def test_configs_with_members_and_prompts(data: Path) -> None:
    wrong = [
        ({"max_trajectories": 1}, "max_trajectories must be at least"),
        ({"min_size": 3}, "group.min_size must be at most"),
        ({"after_s": 1.0, "min_size": 1}, "group.after_s must not be given with"),
        ({"max_trajectories": None}, "max_trajectories must be given together with"),
        ({"max_trajectories": 60}, "capacity_trajectories must be at least 720"),
    ]
    for group, match in wrong:
        with pytest.raises(ConfigError, match=match):
            Replay(with_members(ledger_section(data), **group))
    plain = with_members(ledger_section(data), min_size=1)
    del plain["tables"]["main"]["prompts"]
    with pytest.raises(ConfigError, match=r"group.after_s, and only then, without prompts"):
        Replay(plain)
    recipe = recipe_section(data)
    table = recipe["tables"]["main"]
    table["group"] |= {"member": "member", "max_trajectories": 6}
    table["schema"]["columns"]["member"] = {"dtype": "int32", "rows": "1"}
    with Replay(recipe) as replay:  # room for three batches of a group
        assert replay.tables["main"].spec.num_slots == 3 * 6
    narrow = gear(data)
    narrow["tables"]["main"]["group"] |= {"size": 129, "max_trajectories": 129}
    narrow["tables"]["main"]["capacity_trajectories"] = 2000
    with pytest.raises(ConfigError, match=r"columns\.member must hold the places of 129 members"):
        Replay(narrow)
