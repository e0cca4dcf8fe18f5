"""`"prefix": "share"` of `gear.pack`: prompts of groups and contexts of branches once in a pack,
all else as without.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_families import tiny
from rollout_support import COLUMNS, holding, micros, ranks_of, section, seen_by

from deepspeed_gear import Replay
from deepspeed_gear.batching import micro_batch, packed_models
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.batching.packing_plan import PlannedPacks
from deepspeed_gear.batching.prefixes import CommonPrefixes
from deepspeed_gear.config.cross_checks import check_ranks
from deepspeed_gear.config.options import PackConfig
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops import load_backend
from deepspeed_gear.replay.packed.rollout import Rollout

WORDS = 50
SIZE = 4
BRANCHES = 12  # trajectories of a group of branches
MOST = 60
SCHEMA = {"columns": {**COLUMNS, "value": {"dtype": "float32", "rows": "T+1"}}}
TABLE = {"capacity_steps": 9000, "max_length": MOST, "schema": SCHEMA}
FIELDS = {"tokens": {}, "logp": {}, "reward": {}, "value": {"offset": 0}}
OPS = load_backend("cpu").on_host()


def responses(groups: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return groups with prompts of 1 to 30 tokens; some members have another prompt, or are
    masked.
    """
    words = np.random.default_rng(seed)
    found = []
    for number in range(groups * SIZE):
        if number % SIZE == 0:
            prompt = words.integers(1, WORDS, int(words.choice([1, 2, 3, 20, 30])))
        own = prompt.copy()
        kind = int(words.integers(0, 12))
        if kind == 0:
            own = own[: len(own) // 2 + 1]
        elif kind == 1:
            own[words.integers(len(own))] += 1
        length = len(own) + int(words.integers(0, 31))
        mask = np.arange(length) >= len(own)
        if kind == 2 or number // SIZE == 3:
            mask[:] = False
        tokens = np.append(own, words.integers(1, WORDS, length - len(own)))
        found.append(trajectory(tokens, mask, number // SIZE, words))
    return found


def trajectory(
    tokens: np.ndarray, mask: np.ndarray, group: int, words: np.random.Generator
) -> dict[str, Any]:
    return {
        "tokens": tokens.astype(np.int32),
        "loss_mask": mask,
        "logp": -words.random(len(tokens), dtype=np.float32),
        "value": words.random(len(tokens) + 1, dtype=np.float32),
        "reward": np.float32(words.random()),
        "prompt": np.int64(group),
    }


def branches(groups: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return groups of trees, in any order: a trajectory leaves an earlier one anywhere, also among
    its loss tokens, goes on with context and loss tokens in turns, and may repeat what others have.
    """
    words = np.random.default_rng(seed)
    found = []
    for group in range(groups):
        made = [words.integers(1, WORDS, int(words.integers(1, 20)))]
        tree = []
        for _ in range(BRANCHES):
            before = made[words.integers(len(made))]
            before = before[: words.integers(1, min(len(before), MOST - 20) + 1)]
            more = words.integers(1, 4, int(words.integers(1, 20)))
            tokens = np.append(before, more)
            mask = np.append(np.zeros(len(before), bool), np.sort(words.random(len(more))) < 0.5)
            mask = (
                mask if words.integers(2) else np.append(mask[: len(before)], ~mask[len(before) :])
            )
            made.append(tokens)
            tree.append(trajectory(tokens, mask, group, words))
        found += [tree[i] for i in words.permutation(BRANCHES)]
    return found


def gear(prefix: str, tokens: int = 128, size: int = SIZE, **options: Any) -> dict[str, Any]:
    pack = {"tokens": tokens, "pad": {"multiple": 16}, "prefix": prefix, **options.pop("pack", {})}
    sampler = {"kind": "fifo", "unit": "group"}
    given = {"fields": FIELDS, "rollout": {"groups": 6, "minibatches": 2}, **options}
    table = {**TABLE, "group": {"column": "prompt", "size": size}}
    return section(tables={"main": table}, sampler=sampler, pack=pack, **given)


@contextmanager
def rolled_out(config: dict[str, Any], stored: list[dict[str, Any]]) -> Iterator[Rollout]:
    with holding(config, stored) as replay:
        yield replay.rollout()


def loss_places(micro: MicroBatch) -> dict[tuple[int, int], tuple[float, ...]]:
    """Return what stands at each loss place, by trajectory and step."""
    at = micro.loss_mask[0].nonzero()[:, 0]
    ids = micro.trajectory_id[micro.sequence[0, at]].tolist()
    keys = zip(ids, micro.position_ids[0, at].tolist(), strict=True)
    columns = [
        micro["tokens"],
        micro.targets,
        micro["logp"],
        micro["value"],
        micro["x"],
        micro.weight,
    ]
    assert all(column is not None for column in columns)
    return dict(
        zip(keys, torch.stack([c[0, at].double() for c in columns], 1).tolist(), strict=True)
    )


def check_trajectories(micro: MicroBatch, stored: list[dict[str, Any]], most: int) -> None:
    """Compare what the last place of each trajectory attends to with its steps."""
    mask = micro.block_mask[0, 0]
    ends = micro.cu_seqlens[1:].tolist()
    for number, end in zip(micro.trajectory_id.tolist(), ends, strict=False):
        steps = mask[end - 1]
        assert micro["tokens"][0, steps].tolist() == stored[number]["tokens"][:most].tolist()
        assert micro.position_ids[0, steps].tolist() == list(range(int(steps.sum())))
    assert torch.equal(mask, mask.tril())
    assert (
        mask.sum(1)[: micro.num_tokens].tolist()
        == (micro.position_ids[0, : micro.num_tokens] + 1).tolist()
    )


@pytest.mark.parametrize(("tokens", "seed"), [(64, 0), (64, 1), (256, 2), (48, 3)])
@pytest.mark.parametrize("kind", ["prompts", "branches"])
def test_loss_places_columns_and_weights_are_those_without(
    kind: str, tokens: int, seed: int
) -> None:
    """On any ranks; a budget of 48 cuts trajectories."""
    size = SIZE if kind == "prompts" else BRANCHES
    stored = responses(6, seed) if kind == "prompts" else branches(6, seed)
    seen = []
    cut = {"too_long": "truncate" if tokens < MOST else "refuse"}
    for prefix in ("own", "share"):
        with rolled_out(gear(prefix, tokens, size, pack=cut), stored) as rollout:
            for micro in rollout.forward("x", tokens=2 * tokens):
                micro.fill(
                    x=(micro["tokens"] * 1000 + micro.position_ids + micro.targets / 64).float()
                )
            found: dict[str, Any] = {
                "column": rollout.column("x").tolist(),
                "places": {},
                "ids": [],
            }
            for world in (1, 3):
                places = 0
                for place in ranks_of(world):
                    shared = sum(step.shared_tokens for step in seen_by(rollout, place))
                    for micro in micros(seen_by(rollout, place)):
                        assert micro["tokens"].numel() <= tokens
                        check_trajectories(micro, stored, tokens)
                        own = loss_places(micro)
                        assert not own.keys() & found["places"].get(world, {}).keys()
                        found["places"].setdefault(world, {}).update(own)
                        found["ids"] += micro.trajectory_id.tolist()
                        places += micro.num_tokens
                assert places == rollout.num_tokens - shared
                assert (shared > 0) == (prefix == "share")
            seen.append({**found, "ids": sorted(found["ids"])})
    assert seen[0] == seen[1]
    assert seen[0]["ids"] == sorted([*range(len(stored))] * 2)


@given(st.data())
@settings(max_examples=100)
def test_plans(data: Any) -> None:
    """Every trajectory once, budgets hold, and the plan that is chosen costs no more than without
    sharing.
    """
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    prompt = np.repeat(np.cumsum(sizes) - sizes, sizes)
    steps = np.repeat([data.draw(st.integers(0, 40)) for _ in sizes], sizes)
    lengths = steps + np.array([data.draw(st.integers(1, 24)) for _ in steps])
    most = data.draw(st.integers(64, 300))
    size = data.draw(st.integers(1, 9))
    order = np.arange(len(steps))
    found = CommonPrefixes(order, np.where(prompt == order, 0, steps + 1), steps)
    found = found.share(lengths, size, most)
    assert (prompt[found.leader] == prompt).all()
    assert (found.leader <= np.arange(len(lengths))).all()
    assert (found.steps == np.where(found.leader == np.arange(len(lengths)), 0, steps)).all()
    places = np.bincount(found.leader, lengths - found.steps)
    assert places.max() <= most
    assert np.bincount(found.leader).max() <= size
    pack = PackConfig(tokens=most, cost=[9, 1], pad={"multiple": 1})
    planned = PlannedPacks(lengths, pack, 3, OPS, found)
    plan = planned.plan
    assert (plan.micro_step[found.leader] == plan.micro_step).all()
    assert (plan.rank[found.leader] == plan.rank).all()
    assert planned.rows.max() <= most
    pairs = np.concatenate(
        [np.arange(first, length) for first, length in zip(found.steps, lengths, strict=True)]
    )
    assert planned.costs.sum() == 9 * places.sum() + (2 * pairs + 1).sum()
    for rank in range(3):
        for own in plan.packs(rank):
            assert (found.of(own).leader <= np.arange(len(own))).all()


def groups_of(prompts: list[list[int]], response: int) -> list[dict[str, Any]]:
    """Return a trajectory for each prompt, in groups of four."""
    found = []
    for number, prompt in enumerate(prompts):
        tokens = np.append(prompt, np.full(response, 30)).astype(np.int32)
        rows = {"logp": np.zeros(len(tokens)), "value": np.zeros(len(tokens) + 1), "reward": 0.0}
        mask = np.arange(len(tokens)) >= len(prompt)
        found.append({"tokens": tokens, "loss_mask": mask, "prompt": number // SIZE, **rows})
    return found


def test_the_plan_of_least_cost_is_chosen() -> None:
    """All members together where packs are many, apart where ranks would have none, for any
    replicas.
    """
    stored = groups_of([[number // SIZE] * 20 for number in range(2 * SIZE)], 20)
    config = gear("share", rollout={"groups": 2})
    with rolled_out(config, stored) as rollout:
        for world, saved in ((1, 6 * 19), (2, 6 * 19), (4, 4 * 19), (8, 0)):
            step = seen_by(rollout, ranks_of(world)[0]).step(0)
            assert (step.shared_tokens, len(step)) == (saved, 1 + (world == 1))
    with rolled_out({**config, "pack": {**config["pack"], "plan_width": 8}}, stored) as rollout:
        assert [seen_by(rollout, ranks_of(n)[0]).step(0).shared_tokens for n in (1, 2, 4, 8)] == [
            0
        ] * 4
    stored = groups_of([[number // SIZE] * 10 for number in range(3 * SIZE)], 15)
    for pad, seen in (
        ("multiple", (9 * 9, 3)),
        ("budget", (6 * 9, 2)),
    ):  # 3 of 73 places, or 6 of 41
        pack = {"pad": {"to": pad, "multiple": 16}}
        with rolled_out(gear("share", rollout={"groups": 3}, pack=pack), stored) as rollout:
            step = rollout.step(0)
            assert (step.shared_tokens, len(step)) == seen


def test_prompts_are_compared_token_by_token() -> None:
    """With equal sums of 1 and 9 times their tokens, by which candidates are found."""
    stored = groups_of([[10, 1, 5], [10, 1, 5], [1, 2, 5], [10, 1, 5]], 6)
    with rolled_out(gear("share", rollout={"groups": 1}), stored) as rollout:
        step = rollout.step(0)
        assert step.shared_tokens == 2 * 2
        for micro in step:
            check_trajectories(micro, stored, MOST)


def test_a_branch_shares_the_outputs_before_it() -> None:
    """An agent's context is edited after its first output, and again after its second one."""
    prompt, output, edited = ([1, 2, 3], [10, 11, 12, 13], [20, 21])
    trees = [
        (prompt, [*output, 30, 31]),  # shares nothing: it is the first one
        ([*prompt, *output, *edited], [14, 15]),  # 6: the next token after these differs
        ([*prompt, *output, *edited, 14, 5], [16]),  # 9, of the one above
        ([*prompt[:2], 9], output),  # 1
    ]
    words = np.random.default_rng(0)
    stored = []
    for context, own in trees:
        tokens = np.array([*context, *own])
        stored.append(trajectory(tokens, np.arange(len(tokens)) >= len(context), 0, words))
    # Of the first and the last one, with equal bounds, the first one that was added has no prefix.
    for order, packed in (([0, 1, 2, 3], [0, 1, 2, 3]), ([2, 3, 0, 1], [3, 0, 1, 2])):
        members = [stored[i] for i in order]
        with rolled_out(gear("share", rollout={"groups": 1}), members) as rollout:
            step = rollout.step(0)
            assert step.shared_tokens == 6 + 9 + 1
            (micro,) = step
            check_trajectories(micro, members, MOST)
            assert [order[number] for number in micro.trajectory_id.tolist()] == packed


def test_a_step_continues_after_a_load(tmp_path: Path) -> None:
    config = gear("share", rollout={"groups": 6, "minibatches": 3})
    seen = []
    with holding(config, responses(6)) as replay:
        rollout = replay.rollout()
        for micro in rollout.forward("x"):
            micro.fill(x=micro["logp"])
        for step in rollout:
            seen.append([loss_places(micro) for micro in step])
            if step.number == 0:
                replay.save(tmp_path)
        assert replay.take_metrics()["step_shared_tokens"] > 0
    with Replay(config) as other:
        other.load(tmp_path)
        left = [[loss_places(micro) for micro in step] for step in other.rollout()]
    assert left == seen[1:]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pack": {"max_trajectories": 4}}, "gear.pack.max_trajectories must not be given with"),
        (
            {"sampler": {"kind": "fifo"}, "rollout": {"trajectories": 4}},
            "gear.sampler.unit must be",
        ),
        (
            {"fields": {"logp": {"offset": -1}}},
            "gear.fields.logp must be of the same or a later step",
        ),
        ({"fields": {"timestep": {}}}, "gear.fields.timestep must be of the same or a later step"),
        (
            {"tables": {"main": {"loss_mask": None}}},
            "gear.pack.prefix must have a loss_mask column",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    config = gear(
        "share", **{name: value for name, value in options.items() if name in ("pack", "fields")}
    )
    if "tables" in options:
        columns = {
            name: column for name, column in SCHEMA["columns"].items() if name != "loss_mask"
        }
        config["tables"]["main"]["schema"] = {"columns": columns}
    elif "sampler" in options:
        config |= {**options, "tables": {"main": TABLE}}
    with pytest.raises(ConfigError, match=re.escape(text)):
        Replay(config)


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("gpt2", "sdpa"),
        ("llama", "eager"),
        ("qwen3", "sdpa"),
        ("gemma", "eager"),
        # windows and chunks of 16 steps, in all layers or in some
        ("mistral", "sdpa"),
        ("mixtral", "eager"),
        ("qwen2", "sdpa"),
        ("gemma2", "eager"),
        ("gemma3_text", "sdpa"),
        ("gpt_oss", "eager"),
        ("cohere2", "sdpa"),
        ("llama4_text", "sdpa"),
    ],
)
@pytest.mark.parametrize("kind", ["prompts", "branches"])
def test_gradients_are_those_of_one_trajectory_at_a_time(
    family: str, attention: str, kind: str
) -> None:
    """In float32, as part of the largest gradient. Flex attention has none on a CPU."""
    model = tiny(family, attention)
    size = SIZE if kind == "prompts" else BRANCHES
    stored = responses(6) if kind == "prompts" else branches(6)
    for response in stored:
        tokens = torch.from_numpy(response["tokens"]).long()
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        losses = F.cross_entropy(logits, tokens[1:], reduction="none")
        (losses * torch.from_numpy(response["loss_mask"][1:])).sum().backward()
    wanted = {name: one.grad.clone() for name, one in model.named_parameters()}
    count = sum(int(response["loss_mask"][1:].sum()) for response in stored)
    most = max(float(gradient.abs().max()) for gradient in wanted.values())
    model.zero_grad()
    with rolled_out(gear("share", 256, size, rollout={"groups": 6}), stored) as rollout:
        for step in rollout:
            assert step.shared_tokens > 100
            for micro in step:
                logits = model(**micro.model_inputs(model)).logits[0]
                losses = F.cross_entropy(logits, micro.targets[0], reduction="none")
                micro.sum(losses).backward()
    for name, parameter in model.named_parameters():
        assert float((parameter.grad * count - wanted[name]).abs().max()) < 2e-6 * most, name


def test_models_are_checked_with_shared_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    with Replay(gear("share")) as replay:
        assert replay.check_packing(tiny("llama", "sdpa")) < 1e-5
        assert replay.check_packing(tiny("opt"), "eager") < 1e-5
        assert replay.check_packing(tiny("gemma3_text", "sdpa")) < 1e-5
        for model, text in (
            (
                tiny("lfm2", "sdpa"),
                r"\(lfm2\) must be exact: no mask .* layers \(conv, full_attention\) share",
            ),
            (
                tiny("llama", "flash_attention_2"),
                "sdpa or eager with .*, got 'flash_attention_2'; load the",
            ),
        ):
            with pytest.raises(ConfigError, match=text):
                replay.check_packing(model)
        text = r"\(gemma3_text\) .* layers \(sliding_attention\) need masks .*; give the model, or"
        with pytest.raises(ConfigError, match=text):
            replay.check_packing(tiny("gemma3_text", "sdpa"), "sdpa")
        own = packed_models.mask_inputs

        def ignored(model: Any, micro: Any) -> dict[str, Any]:
            return {**own(model, micro), "attention_mask": None}

        monkeypatch.setattr(micro_batch, "mask_inputs", ignored)
        with pytest.raises(
            ConfigError, match=r"a pack of LlamaForCausalLM .* on their logits alone"
        ):
            replay.check_packing(tiny("llama", "sdpa"))
        with pytest.raises(
            ConfigError, match=r'gear\.pack\.prefix must be "own" with sequence ranks'
        ):
            check_ranks(replay.config, 1, 2, 1)
