"""Groups under any sequence of additions, late columns, removals and selections."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from group_support import add, check_groups, section, stored, take, train
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear import DataError, NotReadyError, Replay, StoreError
from deepspeed_gear.store.group_spec import COUNTED


@dataclass
class Row:
    """A stored trajectory."""

    id: int
    prompt: int
    sample: int
    reward: float | None = None


@dataclass
class Model:
    """The rules of groups, evaluated from scratch."""

    size: int
    by_member: bool = False
    needs_reward: bool = False
    least_std: float | None = None
    remember: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    groups: dict[int, list[int]] = field(default_factory=dict)  # complete ones, in their order
    left: list[int] = field(default_factory=list)  # prompts of groups that have left the table
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))

    def update(self) -> None:
        for prompt in sorted({row.prompt for row in self.rows.values()}):
            of_it = [row for row in self.rows.values() if row.prompt == prompt]
            if prompt in self.groups:
                self._drop([row for row in of_it if row.id not in self.groups[prompt]], "late")
                continue
            if prompt in self.left:
                self._drop(of_it, "late_consumed")
                continue
            members: dict[int, list[Row]] = {}
            for row in sorted(of_it, key=lambda row: row.id):
                members.setdefault(row.sample if self.by_member else row.id, []).append(row)
            ready = [
                name
                for name, rows in members.items()
                if not self.needs_reward or all(row.reward is not None for row in rows)
            ]
            if len(ready) < self.size:
                continue
            chosen = sorted(sorted(ready, key=lambda name: members[name][0].id)[: self.size])
            for name, rows in members.items():
                if name not in chosen:
                    self._drop(rows, "surplus" if name in ready else "unfilled")
            values = [members[name][-1].reward or 0.0 for name in chosen]
            if (
                self.least_std is not None
                and np.std(values, ddof=int(len(values) > 1)) < self.least_std
            ):
                self.counts["rejected"] += 1
                self.remove([row.id for name in chosen for row in members[name]])
                self._remember(prompt)
                continue
            self.groups[prompt] = [row.id for name in chosen for row in members[name]]

    def _remember(self, prompt: int) -> None:
        self.left = [*self.left, *([] if prompt in self.left else [prompt])][-self.remember :]
        self.left = self.left if self.remember else []

    def consume(self, ids: list[int]) -> None:
        """Evict a group that was drawn for the last time."""
        prompt = self.rows[ids[0]].prompt
        self.remove(ids)
        self._remember(prompt)

    def _drop(self, rows: list[Row], why: str) -> None:
        self.counts[why] += len(rows)
        for row in rows:
            del self.rows[row.id]

    def remove(self, ids: list[int]) -> None:
        """Evict whole groups."""
        prompts = {self.rows[number].prompt for number in ids if number in self.rows}
        self.rows = {number: row for number, row in self.rows.items() if row.prompt not in prompts}
        self.groups = {
            prompt: members for prompt, members in self.groups.items() if prompt not in prompts
        }


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
                    assert not stream.can_select(key)  # the loader is at its first batch
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
