"""Ragged columns in packs: the values of each place, over ranks, slices and shared prefixes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_support import check_books, write_prompts
from ragged_tables import RAGGED, ragged_section, support, supported
from rollout_support import COLUMNS, holding, micros, ranks_of, seen_by

from deepspeed_gear import MicroBatch, Ragged, Replay
from deepspeed_gear.batching.pack_rows import PADDING

NAMES = ("ids", "logs")
SIZE = 4


def check(micro: MicroBatch, stored: dict[int, dict[str, Any]]) -> int:
    """Check the values of each place of a pack; return their number."""
    owner = micro.sequence[0].tolist()
    position = micro.position_ids[0].tolist()
    numbers = micro.trajectory_id.tolist()
    lengths = micro.lengths.tolist()
    count = 0
    for name in NAMES:
        found = micro.ragged(name)
        assert len(found) == len(owner)
        for place, (one, step) in enumerate(zip(owner, position, strict=True)):
            wanted: list[float] = []
            if one != PADDING and step + 1 < lengths[one]:
                wanted = stored[numbers[one]][name][step + 1].double().tolist()
            assert found[place].double().tolist() == wanted
            count += len(wanted)
    return count


@pytest.mark.parametrize(("world", "sequence"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 4)])
def test_every_rank_has_the_values_of_its_places(world: int, sequence: int) -> None:
    stored = dict(enumerate(supported(40)))
    with holding(ragged_section(), stored.values()) as replay:
        rollout = replay.rollout()
        trained = rollout.trajectory_id.tolist()
        views = [seen_by(rollout, place) for place in ranks_of(world, sequence)]
        total = sum(check(micro, stored) for view in views for micro in micros(view))
        firsts = sum(len(stored[number][name][0]) for number in trained for name in NAMES)
        every = sum(len(stored[number][name].values) for number in trained for name in NAMES)
        assert total == every - firsts, "all values but those of the first tokens, each once"


def test_a_trajectory_that_is_cut_has_the_values_of_its_first_steps() -> None:
    stored = dict(enumerate(supported(40)))
    with holding(
        ragged_section(pack={"tokens": 32, "too_long": "truncate", "pad": {"multiple": 8}}),
        stored.values(),
    ) as replay:
        rollout = replay.rollout()
        assert sum(check(micro, stored) for micro in micros(rollout))


def grouped(**options: Any) -> dict[str, Any]:
    config = ragged_section(rollout={"groups": 3}, **options)
    config["sampler"] = {"kind": "fifo", "unit": "group"}
    config["pack"] = {"tokens": 128, "pad": {"multiple": 16}, "prefix": "share"}
    main = config["tables"]["main"]
    main |= {"group": {"column": "prompt", "size": SIZE}, "writers": 2}
    return config


def group_of(number: int) -> list[dict[str, Any]]:
    """Return the members of a group: one prompt, whose steps have no values, and responses."""
    words = np.random.default_rng(number)
    prompt = words.integers(1, 50, 3 + number * 5).astype(np.int32)
    members = []
    for member in range(SIZE):
        length = len(prompt) + int(words.integers(1, 20))
        own = words.integers(1, 50, length - len(prompt))
        values = support(length, number * SIZE + member)
        cut = {}
        for name, one in values.items():
            rows = [*one]
            rows[: len(prompt)] = [torch.zeros(0)] * len(prompt)
            cut[name] = Ragged.of_rows(rows)
        mask = np.arange(length) >= len(prompt)
        members.append(
            {
                "tokens": np.append(prompt, own).astype(np.int32),
                "loss_mask": mask,
                "logp": np.where(mask, -words.random(length), 0).astype(np.float32),
                "reward": np.float32(member),
                "prompt": np.int64(number),
                **cut,
            }
        )
    return members


@pytest.mark.parametrize("world", [1, 2])
def test_values_in_packs_with_shared_prefixes(world: int) -> None:
    with Replay(grouped()) as replay:
        stored = {}
        for number in range(3):
            for one in group_of(number):
                stored[replay.add(one)] = one
        rollout = replay.rollout()
        views = [seen_by(rollout, place) for place in ranks_of(world)]
        every = [micro for view in views for micro in micros(view)]
        assert any(micro.num_tokens < int(micro.lengths.sum()) for micro in every)
        total = sum(check(micro, stored) for micro in every)
        assert total == sum(len(one[name].values) for one in stored.values() for name in NAMES)


def test_prompts_of_a_ledger_are_stored_once_beside_ragged_columns(tmp_path: Path) -> None:
    config = grouped()
    main = config["tables"]["main"]
    data = str(write_prompts(tmp_path / "prompts", 3))
    main |= {"prompts": {"data": data, "max_lag": 1}, "max_times_sampled": 1}
    with Replay(config) as replay:
        stored = {}
        with replay.rollout_worker() as worker:
            for lease in worker.lease(3):
                members = group_of(lease.number)
                stored.update(zip(lease.commit(members), members, strict=True))
        table = replay.tables["main"]
        assert table.shared_prompts is not None
        assert table.shared_prompts.any()
        for one, found in zip(stored.values(), replay.read(list(stored)), strict=True):
            for name in NAMES:
                assert found[name].values.double().equal(one[name].values.double())
        rollout = replay.rollout()
        total = sum(check(micro, stored) for micro in micros(rollout))
        assert total == sum(len(one[name].values) for one in stored.values() for name in NAMES)
        check_books(replay)


def test_a_pass_reads_the_values_of_stored_trajectories() -> None:
    columns = {**COLUMNS, **RAGGED, "score": {"dtype": "float32", "rows": "1", "late": True}}
    config = ragged_section(fields={"tokens": {}, "ids": {}, "logs": {}, "logp": {}})
    config["tables"]["main"]["schema"] = {"columns": columns}
    stored = dict(enumerate(supported(40)))
    with holding(config, stored.values()) as replay:
        seen = 0
        for micro in replay.forward("score"):
            if not seen:
                replay.remove([int(micro.trajectory_id[0])])  # it has been read
            seen += check(micro, stored)
            micro.fill(score=torch.ones(micro.num_trajectories))
        assert seen


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**20), tokens=st.sampled_from([64, 80, 256]), world=st.integers(1, 3))
def test_any_packs_have_the_same_values(seed: int, tokens: int, world: int) -> None:
    options = {"pack": {"tokens": tokens, "pad": {"multiple": 8}}, "rollout": {"trajectories": 12}}
    stored = dict(enumerate(supported(12, seed)))
    with holding(ragged_section(**options), stored.values()) as replay:
        rollout = replay.rollout()
        for place in ranks_of(world):
            for micro in micros(seen_by(rollout, place)):
                check(micro, stored)
