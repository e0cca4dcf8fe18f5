"""Trajectories from turns: each generated token has loss once, after its own context."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gear_support import prefix
from hypothesis import example, given
from hypothesis import strategies as st
from ledger_support import write_prompts
from packed_families import tiny

from deepspeed_gear import DataError, Replay, Turn, trajectories_from_turns

Made = tuple[list[int], list[int]]  # ids of a prompt, and of its output


@st.composite
def trees(draw: Any) -> list[Made]:
    """Return turns that continue earlier ones, cut their contexts, or begin anew.

    There are three ids, so contexts are often equal by chance.
    """
    ids = st.integers(0, 2)
    made: list[Made] = []
    for _ in range(draw(st.integers(1, 12))):
        before: list[int] = []
        if made:
            prompt, output = draw(st.sampled_from(made))
            before = (prompt + output)[: draw(st.sampled_from([0, 1, 3, None, None, None]))]
        more = draw(st.lists(ids, min_size=0 if before else 1, max_size=3))
        made.append((before + more, draw(st.lists(ids, min_size=1, max_size=3))))
    return made


def as_turns(made: list[Made]) -> list[Turn]:
    """Return turns in which no two generated tokens share log-probability and version."""
    turns = []
    for number, (prompt, output) in enumerate(made):
        places = np.arange(len(output))
        turns.append(
            Turn(prompt, output, -(number + places / 10), number + places, {"place": places})
        )
    return turns


def naive(made: list[Made]) -> list[list[int]]:
    """Return the turns of each trajectory: the definition, by lists."""
    found: list[tuple[list[int], list[int]]] = []
    for number, (prompt, output) in enumerate(made):
        fitting = [one for one in found if prompt[: len(one[0])] == one[0]]
        if fitting:
            longest = max(len(one[0]) for one in fitting)
            tokens, turns = [one for one in fitting if len(one[0]) == longest][-1]
            tokens[:] = prompt + output
            turns.append(number)
        else:
            found.append((prompt + output, [number]))
    return [turns for _, turns in found]


@given(trees())
# Of two equal trajectories the later one goes on, and then the other one.
@example([([1], [2]), ([1], [2]), ([1, 2], [0]), ([1, 2], [0, 0])])
# A rollback generates again what is there and more: the longest trajectory goes on.
@example([([1], [2]), ([1, 2, 0], [1]), ([1], [2, 0, 1, 2]), ([1, 2, 0, 1, 2, 0], [1])])
def test_each_generated_token_has_loss_once_after_its_context(made: list[Made]) -> None:
    trajectories = trajectories_from_turns(as_turns(made), names={"turn": "turn"})
    assert [sorted({*one["turn"].tolist()} - {-1}) for one in trajectories] == naive(made)
    for one in trajectories:
        assert {name: column.dtype for name, column in one.items() if name != "place"} == {
            "tokens": np.int32,
            "loss_mask": np.bool_,
            "logp": np.float32,
            "version": np.int32,
            "turn": np.int32,
        }
        mask = one["loss_mask"]
        assert (mask == (one["turn"] >= 0)).all()
        for name in ("logp", "version", "place"):
            assert not one[name][~mask].any()
    assert sum(int(one["loss_mask"].sum()) for one in trajectories) == sum(
        len(output) for _, output in made
    )
    for number, (prompt, output) in enumerate(made):
        (own,) = [one for one in trajectories if (one["turn"] == number).any()]
        places = np.flatnonzero(own["turn"] == number)
        end = len(prompt) + len(output)
        assert places.tolist() == list(range(len(prompt), end))
        assert own["tokens"][:end].tolist() == prompt + output
        own_turn = as_turns(made)[number]
        assert (own["logp"][places] == own_turn.logprobs.astype(np.float32)).all()
        assert (own["version"][places] == own_turn.version).all()
        assert (own["place"][places] == own_turn.columns["place"]).all()


def test_many_long_turns_continue_one_trajectory() -> None:
    """One agent appends to its context, and another one begins anew at every turn."""
    words = np.random.default_rng(0)
    context = words.integers(0, 99, 500)
    turns = []
    for number in range(200):
        output = words.integers(0, 99, 5)
        turns.append(Turn(context, output, version=number))
        context = np.concatenate([context, output, words.integers(0, 99, 20)])
        turns.append(Turn([number, 0], [1], version=number))
    first, *others = trajectories_from_turns(turns)
    assert (len(first["tokens"]), int(first["loss_mask"].sum())) == (500 + 199 * 25 + 5, 1000)
    assert len(others) == 200
    assert first["version"][first["loss_mask"]].tolist() == np.repeat(np.arange(200), 5).tolist()


def test_mappings_lists_and_tensors_are_taken_and_columns_renamed() -> None:
    values = {"reward": 0.5, "prompt_id": 3}
    turns: list[Any] = [
        {"prompt_ids": (4, 5), "output_ids": torch.tensor([6]), "logprobs": [-1], "version": 7},
        {
            "prompt_ids": np.array([4, 5, 6, 8], np.uint16),
            "output_ids": [9, 9],
            "logprobs": torch.tensor([-0.5, -0.25], dtype=torch.bfloat16),
            "version": torch.tensor(8),
        },
    ]
    names = {"tokens": "ids", "logprobs": "old", "version": None}
    (one,) = trajectories_from_turns(turns, values, names)
    assert {name: np.asarray(column).tolist() for name, column in one.items()} == {
        "ids": [4, 5, 6, 8, 9, 9],
        "loss_mask": [False, False, True, False, True, True],
        "old": [0, 0, -1, 0, -0.5, -0.25],
        **values,
    }
    (plain,) = trajectories_from_turns([Turn([1], [2])])
    assert list(plain) == ["tokens", "loss_mask"]


GOOD = {"prompt_ids": [1], "output_ids": [2, 3], "logprobs": [-1.0, -2.0], "version": 1}


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"output_ids": []}, "turn 1: output_ids must have at least one token, got 0; leave out"),
        ({"prompt_ids": []}, "turn 1: prompt_ids must have at least one token, got 0; a model"),
        ({"prompt_ids": [[1]]}, "turn 1: prompt_ids must be one-dimensional, got (1, 1); give"),
        ({"prompt_ids": [1.0]}, "turn 1: prompt_ids must be integers, got 'float64'; token ids"),
        ({"prompt_ids": [True]}, "turn 1: prompt_ids must be integers, got 'bool'"),
        ({"prompt_ids": "text"}, "turn 1: prompt_ids must hold real numbers, got 'str of <U4'"),
        ({"prompt_ids": None}, "turn 1: prompt_ids must hold real numbers"),
        ({"output_ids": [2, -3]}, "turn 1: output_ids[1] must be in [0, 2147483647], got -3"),
        ({"output_ids": [2**31, 0]}, "turn 1: output_ids[0] must be in [0, 2147483647], got 21474"),
        ({"logprobs": [-1.0]}, "turn 1: logprobs must have one value for each of 2 output_ids, go"),
        (
            {"logprobs": -1.0},
            "turn 1: logprobs must have one value for each of 2 output_ids, got '",
        ),
        ({"logprobs": [[-1], [-2]]}, "turn 1: logprobs must be one-dimensional, got (2, 1)"),
        ({"logprobs": [-1, np.nan]}, "turn 1: logprobs[1] must be finite, got nan; a token that"),
        ({"logprobs": [-np.inf, -1]}, "turn 1: logprobs[0] must be finite, got -inf"),
        ({"logprobs": None}, "turn 1: logp must be given with every turn, or with none; leave"),
        ({"version": None}, "turn 1: version must be given with every turn, or with none; leave"),
        ({"version": [1]}, "turn 1: version must have one value for each of 2 output_ids, got 1"),
        ({"version": 1.5}, "turn 1: version must be integers, got 'float64'; versions are integer"),
        ({"version": [1, -1]}, "turn 1: version[1] must be in [0, 2147483647], got -1"),
        ({"version": [[1], [2]]}, "turn 1: version must be one number, or one for each generated"),
        ({"columns": {"x": [1]}}, "turn 1: columns: x must have one value for each of 2 output_id"),
        ({"columns": {"x": [1, 2]}}, "turn 0: x must be given with every turn, or with none"),
        ({"columns": {"logp": [1, 2]}}, "turn 1: columns: logp must have another name; names of"),
        ({"columns": [1]}, "turn 1: columns must be a mapping by name, got 'list'"),
        ({"logprob": [1]}, "turn 1: logprob must be a name that turns have; did you mean 'logpro"),
    ],
)
def test_wrong_turns_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(text)}"):
        trajectories_from_turns([GOOD, {**GOOD, **wrong}])


@pytest.mark.parametrize(
    ("turns", "options", "text"),
    [
        ([], {}, "turns must have at least one turn, got 0; fail a rollout"),
        ([3], {}, "turn 0 must be a Turn, or a mapping with its names, got 'int'; give Turn("),
        ([{"prompt_ids": [1]}], {}, "turn 0: output_ids must be given; give the token ids"),
        ([GOOD], {"values": {"logp": 1}}, "values: logp must not be a column that the turns fill"),
        ([GOOD], {"values": 3}, "values must be a mapping by name, got 'int'"),
        (
            [GOOD],
            {"names": {"logp": "x"}},
            "names: logp must be a column of turns; known are tokens",
        ),
        ([GOOD], {"names": {"logprobs": ""}}, "names: logprobs must be the name of a column, or"),
        ([GOOD], {"names": {"tokens": None}}, "names: tokens must not be left out; trajectories"),
        ([GOOD], {"names": {"version": "logp"}}, "names must differ from each other, got 'logp'"),
        (
            [Turn([1], [2], columns={"x": [[1, 2]]}), Turn([1], [2], columns={"x": [[1]]})],
            {},
            "turn 1: x must have rows of the shape of turn 0, (2,), got (1,)",
        ),
    ],
)
def test_wrong_calls_are_refused(turns: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=f"^{re.escape(text)}"):
        trajectories_from_turns(turns, **options)


# ---- in a table, and trained ---------------------------------------------------------------------

SIZE = 3
COLUMNS = {
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "logp": {"dtype": "float32"},
    "version": {"dtype": "int32"},
    "reward": {"dtype": "float32", "rows": "1", "late": True},
    "prompt_id": {"dtype": "int64", "rows": "1"},
    "member": {"dtype": "int64", "rows": "1"},
}


def section(prompts: Path | None = None) -> dict[str, Any]:
    """Return a gear section of members; with `prompts`, groups are committed by leases."""
    columns = dict(COLUMNS)
    group = {"column": "prompt_id", "size": SIZE, "needs": ["reward"]}
    group |= {"member": "member", "max_trajectories": 4 * SIZE}
    table: dict[str, Any] = {"capacity_steps": 4000, "max_length": 64, "group": group}
    if prompts is not None:
        table |= {"prompts": {"data": str(prompts)}, "max_times_sampled": 1}
        table["capacity_trajectories"] = 200
        columns["reward"] = {"dtype": "float32", "rows": "1"}
        group["needs"] = []
    return {
        "tables": {"rollouts": {**table, "schema": {"columns": columns}}},
        "sampler": {"kind": "fifo", "unit": "group"},
        "pack": {"tokens": 128, "pad": {"multiple": 8}},
        "rollout": {"groups": 2},
        "shared_memory": {"prefix": prefix()},
    }


def rollout_of_an_agent(words: np.random.Generator) -> list[Turn]:
    """Return turns that append tool results; the context is edited once, and a sub-agent runs."""

    def ids(count: int) -> list[int]:
        return [*map(int, words.integers(0, 64, count))]

    context = ids(int(words.integers(3, 9)))
    turns = []
    for number in range(5):
        if number == 3:
            context = context[:2] + ids(3)
        output = ids(int(words.integers(1, 6)))
        turns.append(Turn(context, output, -words.random(len(output)), number))
        context = context + output + ids(2)
        if number == 1:
            turns.append(Turn(ids(4), ids(3), -words.random(3), number))
    return turns


def test_the_loss_of_merged_turns_is_that_of_each_turn_alone() -> None:
    """Loss and gradient over packs of members, with the mean over tokens; log-probabilities lie at
    the places that predict their tokens.
    """
    model = tiny("llama", "sdpa")
    words = np.random.default_rng(0)
    alone = torch.zeros(())
    stored = 0.0
    count = 0
    with Replay(section()) as replay:
        for member in range(2 * SIZE):
            turns = rollout_of_an_agent(words)
            for turn in turns:
                tokens = torch.tensor([turn.prompt_ids + turn.output_ids])
                logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
                losses = F.cross_entropy(logits, tokens[0, 1:], reduction="none")
                alone = alone + losses[len(turn.prompt_ids) - 1 :].sum()
                count += len(turn.output_ids)
                stored += float(turn.logprobs.sum())
            values = {"prompt_id": member // SIZE, "member": member % SIZE}
            rows = trajectories_from_turns(turns, values)
            assert len(rows) == 3
            numbers = [replay.add(row) for row in rows]
            for number in numbers:
                replay.fill(number, reward=float(member))
        (alone / count).backward()
        wanted = {name: one.grad.clone() for name, one in model.named_parameters()}
        model.zero_grad()
        rollout = replay.rollout()
        rollout.advantages("dr_grpo")
        merged = 0.0
        packed = 0.0
        assert len(rollout) == 1
        for micro in (micro for step in rollout for micro in step):
            logits = model(**micro.model_inputs(model)).logits[0]
            loss = micro.sum(F.cross_entropy(logits, micro.targets[0], reduction="none")[None])
            loss.backward()
            merged += float(loss.detach())
            packed += float(micro["logp"][micro.loss_mask].sum())
            assert {*micro["advantage"][micro.loss_mask].tolist()} <= {-1.0, 0.0, 1.0}
    assert merged == pytest.approx(float(alone.detach()) / count, rel=2e-6)
    assert packed == pytest.approx(stored, rel=1e-5)
    most = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, parameter in model.named_parameters():
        assert float((parameter.grad - wanted[name]).abs().max()) < 2e-6 * most, name


def test_a_lease_commits_members_of_turns(tmp_path: Path) -> None:
    """The table holds the trajectories of each member as they were made, in their order."""
    words = np.random.default_rng(1)
    with Replay(section(write_prompts(tmp_path / "prompts", 4))) as replay:
        worker = replay.rollout_worker()
        wanted = []
        for lease in worker.lease(2, timeout_s=0):
            members = [
                trajectories_from_turns(rollout_of_an_agent(words), {"reward": float(place)})
                for place in range(SIZE)
            ]
            numbers = iter(lease.commit(members))
            for place, member in enumerate(members):
                own = {"prompt_id": lease.number, "member": place}
                wanted += [(next(numbers), {**one, **own}) for one in member]
        assert len(wanted) == 2 * SIZE * 3
        for number, one in wanted:
            (stored,) = replay.read([number])
            for name, column in one.items():
                assert np.array_equal(stored[name], column), name
        rollout = replay.rollout()
        rollout.advantages("dr_grpo")
        for step in rollout:
            for micro in step:
                own = micro["advantage"][micro.loss_mask]
                assert {*own.tolist()} == {-1.0, 0.0, 1.0}


def rollout_without_reasoning(words: np.random.Generator) -> list[Turn]:
    """Return turns that start from a prompt of 8 tokens; each context lacks the reasoning of the
    turns before. The last one edits the second context, in the middle of its answer.
    """

    def ids(count: int) -> list[int]:
        return [*map(int, words.integers(0, 64, count))]

    context = [*range(8)]
    turns = []
    for number in range(3):
        answer = ids(4)
        output = ids(6) + answer
        turns.append(Turn(context, output, -words.random(len(output)), number))
        context = context + answer + ids(3)
    output = ids(5)
    edited = turns[1].prompt_ids + turns[1].output_ids[:8] + ids(2)
    turns.append(Turn(edited, output, -words.random(len(output)), 3))
    return turns


def test_members_that_leases_commit_share_contexts(tmp_path: Path) -> None:
    """The store has the prompt of a group once, and packs have all that trajectories share: also
    more than the store does.
    """
    model = tiny("llama", "sdpa")
    data = write_prompts(tmp_path / "prompts", 4)
    found: list[tuple[dict[Any, Any], dict[str, torch.Tensor]]] = []
    for sharing in ("own", "share"):
        config = section(data)
        config["pack"]["prefix"] = sharing
        words = np.random.default_rng(2)
        with Replay(config) as replay:
            worker = replay.rollout_worker()
            for lease in worker.lease(2, timeout_s=0):
                turns = [rollout_without_reasoning(words) for _ in range(SIZE)]
                lease.commit([trajectories_from_turns(one, {"reward": 1.0}) for one in turns])
            shared = replay.tables["rollouts"].shared_prompts
            assert shared is not None
            assert shared[:, 0].max() == 7
            places = {}
            model.zero_grad()
            for step in replay.rollout():
                # The second turn shares 7 of the 8 tokens of the first context, the third one 14 of
                # the second one's 15, and the last one all but one of these and 8 more.
                least = 2 * SIZE * (7 + 14 + 22)
                assert step.shared_tokens >= least if sharing == "share" else not step.shared_tokens
                for micro in step:
                    inputs = micro.model_inputs(model)
                    losses = F.cross_entropy(
                        model(**inputs).logits[0], micro.targets[0], reduction="none"
                    )
                    micro.sum(losses).backward()
                    at = micro.loss_mask[0].nonzero()[:, 0]
                    ids = micro.trajectory_id[micro.sequence[0, at]].tolist()
                    columns = (micro["tokens"], micro.targets, micro["logp"], micro["version"])
                    rows = torch.stack([one[0, at].double() for one in (*columns, micro.weight)])
                    keys = zip(ids, micro.position_ids[0, at].tolist(), strict=True)
                    places.update(zip(keys, rows.T.tolist(), strict=True))
            gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
            found.append((places, gradients))
    assert found[0][0] == found[1][0]
    assert len(found[0][0]) == 2 * SIZE * (3 * 10 + 5)
    most = max(float(gradient.abs().max()) for gradient in found[0][1].values())
    for name, wanted in found[0][1].items():
        assert float((found[1][1][name] - wanted).abs().max()) < 2e-6 * most, name
