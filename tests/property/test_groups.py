"""Groups under any sequence of additions, late columns, removals and selections."""

from typing import Any

import numpy as np
from group_support import Model, Row, add, check_groups, section, stored, take, train
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear import DataError, NotReadyError, Replay, StoreError

MOST_PER_GROUP = 5
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.integers(0, 4)),
        st.tuples(st.just("add"), st.integers(0, 3), st.integers(0, 4)),
        st.tuples(st.just("fill"), st.integers(0, 40), st.integers(0, 1)),
        st.tuples(st.just("fill"), st.integers(0, 40), st.integers(0, 1)),
        st.tuples(st.just("remove"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("select"), st.just(0), st.just(0)),
    ),
    min_size=10,
    max_size=60,
)


@given(
    size=st.integers(1, 3),
    by_member=st.booleans(),
    needs_reward=st.booleans(),
    has_condition=st.booleans(),
    remember=st.sampled_from([0, 2, 9]),
    once=st.booleans(),
    steps=STEPS,
)
def test_groups_follow_the_rules(
    size: int,
    by_member: bool,
    needs_reward: bool,
    has_condition: bool,
    remember: int,
    once: bool,
    steps: list[Any],
) -> None:
    group: dict[str, Any] = {"column": "prompt", "size": size, "remember": remember}
    options = {"max_times_sampled": 1} if once else {}
    if by_member:
        group.update(member="sample", max_trajectories=MOST_PER_GROUP)
    if needs_reward:
        group["needs"] = ["reward"]
    if has_condition:
        group["where"] = {"reward": {"std": {"min": 0.1}}}
    least = 0.1 if has_condition else None
    model = Model(size, by_member, needs_reward or has_condition, least, remember)
    key = 0
    with Replay(section(group, batch={"groups": 1}, **options)) as replay:
        stream = train(replay)
        for name, first, second in steps:
            if name == "add":
                count = sum(row.prompt == first for row in model.rows.values())
                try:
                    number = add(replay, first, second)
                except DataError:
                    assert by_member
                    assert count == MOST_PER_GROUP
                    continue
                assert not by_member or count < MOST_PER_GROUP
                model.rows[number] = Row(number, first, second)
            elif name == "fill":
                row = model.rows.get(first)
                try:
                    replay.fill(first, reward=float(second))
                except (DataError, StoreError):
                    assert row is None or row.reward is not None
                    continue
                assert row is not None
                row.reward = float(second)
            elif name == "remove":
                before = len(model.rows)
                model.remove([first])
                assert replay.remove([first]) == before - len(model.rows)
            else:
                model.update()
                check_groups(replay)
                if model.groups:  # fifo: that of the lowest highest id
                    oldest = min(model.groups.values(), key=max)
                    assert take(stream, key) == [oldest]
                    if once:
                        model.consume(oldest)
                    key += 1
                else:
                    assert not replay.can_sample()
                assert stored(replay) == set(model.rows)
        model.update()
        found = replay.statistics()["groups"]["main"]
        incomplete = {row.prompt for row in model.rows.values()} - set(model.groups)
        wanted = {"complete": len(model.groups), "incomplete": len(incomplete)}
        assert found == {**wanted, **model.counts}
        assert train(replay).table.groups.consumed.tolist() == model.left


@settings(max_examples=30)
@given(
    remove=st.sampled_from(["fifo", "lifo", "uniform", "keep_best", "lowest_priority"]),
    kind=st.sampled_from(["uniform", "epoch", "fifo", "length"]),
    sizes=st.lists(st.integers(1, 9), min_size=30, max_size=60),
    seed=st.integers(0, 9),
)
def test_groups_are_evicted_whole(remove: str, kind: str, sizes: list[int], seed: int) -> None:
    """Writers of three groups at a time fill a small table many times; selections read it in
    between.
    """
    kind = "prioritized" if remove == "lowest_priority" else kind
    options: dict[str, Any] = {"remove": remove}
    if remove == "keep_best":
        options["keep_best"] = "weight"
    words = np.random.default_rng(seed)
    config = section(
        {"column": "prompt", "size": 3}, {"kind": kind}, batch={"groups": 2}, **options
    )
    config["tables"]["main"].update(capacity_steps=90, capacity_trajectories=24, max_length=9)
    with Replay(config) as replay:
        stream = train(replay)
        key = 0
        held = dict[int, set[int]]()
        order = np.repeat(np.arange(len(sizes)), 3)
        order = order[
            np.argsort(order * 3 + words.integers(0, 9, len(order)), kind="stable")
        ].tolist()
        for prompt in order:
            try:
                number = add(replay, prompt, steps=sizes[prompt], weight=prompt % 5)
            except NotReadyError:  # the epoch that is under way holds all rows
                assert kind == "epoch"
                break
            here = stored(replay)
            assert all(ids <= here or not ids & here for ids in held.values())
            held = {group: ids for group, ids in held.items() if ids & here}
            held.setdefault(prompt, set()).add(number)
            if words.integers(0, 4) == 0 and replay.can_sample() and replay.missing_groups() == 0:
                for ids in take(stream, key):
                    assert len(ids) == 3
                    assert (
                        set(ids) in held.values() or kind == "epoch"
                    )  # which keeps what was evicted
                key += 1
            check_groups(replay)
        assert key > 0 or kind == "epoch"
