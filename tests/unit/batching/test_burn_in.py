"""Burn-in: which steps learn, priorities over them, and stored states, against a plain loop."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from replay_support import filled
from torch.utils import _pytree as pytree

from deepspeed_gear import Replay
from deepspeed_gear.batching.burn_in import BurnIn
from deepspeed_gear.batching.gather import Gatherer, GatherOptions
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.row_exchange.exchange_plan import needs_of

LENGTHS = (1, 2, 5, 9, 14)
FIELDS = {
    "code": {"offset": -3, "length": 8},
    "observation": {"offset": -2, "length": 8},
    "late": {"column": "reward", "offset": 0, "length": 4},
    "left": {"column": "code", "offset": -3, "length": 8, "align": "left"},
    "right": {"column": "observation", "offset": -3, "length": 8, "align": "right"},
    "place": {"derived": "timestep", "offset": -3, "length": 8, "pad": "edge"},
    "state": {"column": "code", "offset": -3, "pad": "edge"},
}
PER = {"kind": "prioritized", "unit": "step", "reduce": "mean"}


def replay_of(**options: Any) -> Replay:
    section = {
        "batch_size": 32,
        "sampler": {"unit": "step"},
        "burn_in": 3,
        "fields": FIELDS,
        **options,
    }
    return filled(LENGTHS, **section)


def learning(
    anchor: int, steps: int, field: dict[str, Any], burn_in: int, first: int
) -> list[bool]:
    """Return which places of a window learn, step by step."""
    rows = steps + (field.get("column") == "observation")
    begin = anchor + field["offset"]
    window = list(range(begin, begin + field["length"]))
    real = [step for step in window if 0 <= step < rows]
    none: list[int | None] = [None] * (len(window) - len(real))
    placed: list[int | None] = [step if step in real else None for step in window]
    if field.get("align") == "left":
        placed = [*real, *none]
    if field.get("align") == "right":
        placed = [*none, *real]
    return [step is not None and step >= anchor + first + burn_in for step in placed]


@pytest.mark.parametrize("burn_in", [1, 3])
def test_against_a_loop(burn_in: int) -> None:
    with replay_of(burn_in=burn_in) as replay:
        for _ in range(4):
            batch = replay.sample()
            part = batch[[3, 1]]
            halved = pytree.tree_map(lambda tensor: tensor[:16], batch)
            for name, field in FIELDS.items():
                if name == "state":
                    assert batch.learns(name) is batch.mask[name]
                    continue
                column = {**field, "column": field.get("column", name)}
                wanted = [
                    learning(anchor, steps, column, burn_in, -3)
                    for anchor, steps in zip(
                        batch.anchor.tolist(), batch.num_steps.tolist(), strict=True
                    )
                ]
                assert batch.learns(name).tolist() == wanted, name
                assert halved.learns(name).tolist() == wanted[:16]
                assert part.learns(name).tolist() == [wanted[3], wanted[1]]
                assert torch.equal(batch.part(f"learns.{name}"), batch.clone().learns(name))
            assert batch.learns("late").all(1).any()
            assert (batch.learns("code").sum(1) > 0).all()
            first = batch["code"][torch.arange(32), batch.mask["code"].int().argmax(1)]  # real step
            assert torch.equal(batch["state"], first)
            assert torch.equal(batch["left"][:, 0], first)


@pytest.mark.parametrize("how", ["max", "mean", "mix"])
def test_priorities_are_reduced_over_steps_that_learn(how: str) -> None:
    fields = {name: FIELDS[name] for name in ("code", "late")} | {
        "reward": {"offset": -3, "length": 8}
    }
    with replay_of(
        sampler={**PER, "reduce": how, "anchors": {"every": 4}}, fields=fields
    ) as replay:
        batch = replay.sample().clone()
        assert (batch.anchor % 4 == 0).all()
        values = torch.rand(32, 8)
        values[~batch.learns("code")] = torch.nan
        replay.update_priorities(batch, values)
        replay.sample()
        found = replay.priorities(batch.trajectory_id, batch.anchor)
        items = [(int(a), int(b)) for a, b in zip(batch.trajectory_id, batch.anchor, strict=True)]
        for i, item in enumerate(items):
            if item in items[i + 1 :]:
                continue
            learnt = values[i][batch.learns("code")[i]].numpy()
            wanted = {"max": learnt.max(), "mean": learnt.mean()}
            wanted["mix"] = np.float32(0.9 * wanted["max"] + 0.1 * wanted["mean"])
            assert abs(float(found[i]) - wanted[how]) < 1e-6


def test_an_explicit_mask_is_taken_as_it_is() -> None:
    with replay_of(sampler={**PER, "reduce": "max"}, fields={"code": FIELDS["code"]}) as replay:
        batch = replay.sample().clone()
        values = torch.arange(8.0, 0, -1).repeat(32, 1)
        replay.update_priorities(batch, values, batch.mask["code"])
        replay.sample()
        first = batch.mask["code"].float().argmax(1)
        assert torch.equal(replay.priorities(batch.trajectory_id, batch.anchor), 8.0 - first)


def test_parts_of_sequence_ranks() -> None:
    with replay_of() as replay:
        batch = replay.sample()
        fields = {field.name: field for field in replay.fields}
        for name in ("code", "left", "right"):
            whole = batch.learns(name)
            parts = []
            for first in (0, 4):
                field = replace(fields[name], part_first=first, part_length=4)
                burn_in = BurnIn.of(replay.config.burn_in, replay.fields, [field])
                assert burn_in is not None
                mask = batch.mask[name][:, first : first + 4]
                parts.append(burn_in.learns(name, mask, batch.host_resolutions))
            assert torch.equal(torch.cat(parts, 1), whole)


def test_a_stage_may_read_steps_that_learn() -> None:
    pipeline = {"inputs": ["observation"], "labels": ["learns.code"]}
    with replay_of(pipeline=pipeline) as replay:
        needs = needs_of(RankCoordinates(pipe_rank=1, pipe_world=2), replay.config, replay.fields)
        assert [(field.name, field.mask_only) for field in needs.fields] == [("code", True)]
        batch = replay.sample()
        table = replay.tables["main"]
        fields = [replace(field, mask_only=True) for field in replay.fields]
        gatherer = Gatherer(GatherOptions(fields, {}, None, 32, torch.float32, 1), table, 2)
        tensors, mask = gatherer.gather(batch.host_resolutions)
        assert not tensors
        assert all(torch.equal(mask[name], batch.mask[name]) for name in FIELDS)
    with pytest.raises(ConfigError, match=r"gear.pipeline.labels\[0\] must name a field, its mask"):
        replay_of(pipeline={"inputs": ["observation"], "labels": ["learns.absent"]})


def test_whole_windows_may_burn_in_beyond_the_anchor_and_all_steps_learn_without() -> None:
    with replay_of(sampler={"unit": "step", "anchors": "fits"}, burn_in=5) as replay:
        assert (replay.sample().learns("code").sum(1) == 3).all()
    with replay_of(burn_in=0) as replay:
        batch = replay.sample()
        assert all(batch.learns(name) is batch.mask[name] for name in FIELDS)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"burn_in": -1}, r"gear.burn_in must be an integer in \[0, 2\^31\), got -1"),
    ({"fields": {"code": {}}}, "gear.burn_in must not be given where no field has a length, got 3"),
    (
        {"fields": {**FIELDS, "short": {"column": "reward", "offset": -3, "length": 3}}},
        r"gear.burn_in must be less than the steps up to the end of field short \(3\), got 3; "
        r"lengthen",
    ),
    (
        {"burn_in": 4},
        r"must be at most the steps of the windows in front of the anchor \(3\), got 4",
    ),
    (
        {"fields": {"code": {"length": 8}}},
        r"must be at most .* \(0\), got 3; else a sample may have no",
    ),
    (
        {"n_step": {"n": 2, "gamma": 0.9}, "fields": {"code": {"offset": "n_step", "length": 8}}},
        "gear.fields.code.offset must be a number in a window where there is gear.burn_in, got "
        "'n_step'",
    ),
]


@pytest.mark.parametrize(("options", "text"), WRONG, ids=range(len(WRONG)))
def test_refusals(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        replay_of(**options)
