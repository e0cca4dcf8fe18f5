"""A group's prompt is stored once: by the first of its trajectories, and all else is as
if by each.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import prefix, run_command
from ledger_support import check_books, write_prompts
from media_tables import MEDIA, image
from pyarrow import parquet
from rollout_support import COLUMNS, micros, ranks_of, section, seen_by

from deepspeed_gear import CheckpointError, DataError, FillWorker, Replay, StoreError
from deepspeed_gear.cli import export
from deepspeed_gear.cli.table_contents import of_living
from deepspeed_gear.store.live_stores import living_stores
from deepspeed_gear.store.records import SharedPrompt
from deepspeed_gear.store.shared_memory import remove_garbage

SIZE = 4
MOST = 60
GROUPS = 6
LATE = {
    "ref": {"dtype": "float32", "late": True},
    "score": {"dtype": "float32", "rows": "1", "late": True},
}
SCHEMA = {
    "columns": {
        **COLUMNS,
        **LATE,
        "value": {"dtype": "float32", "rows": "T+1"},
        "image": {"dtype": "int64", "role": "media"},
    }
}
FIELDS: dict[str, Any] = {
    "tokens": {},
    "logp": {},
    "reward": {},
    "value": {"offset": 0},
    "image": {},
}
EVERY = ("tokens", "logp", "value", "reward", "image")


def groups(seed: int = 0) -> list[list[dict[str, Any]]]:
    """Return groups; one trajectory of the third begins in another way, the fifth has no loss
    place, the sixth no prompt.
    """
    words = np.random.default_rng(seed)
    found = []
    for number in range(GROUPS):
        prompt = words.integers(1, 50, (20, 2, 20, 30, 20, 0)[number]).astype(np.int32)
        found.append([])
        for member in range(SIZE):
            length = len(prompt) + int(words.integers(1, 31))
            counts = (np.arange(length) >= len(prompt)) & (number != 4)
            tokens = np.append(prompt, words.integers(1, 50, length - len(prompt))).astype(np.int32)
            tokens[0] += number == 2 and member == 2
            found[-1].append(
                {
                    "tokens": tokens,
                    "loss_mask": counts,
                    "logp": np.where(counts, -words.random(length), 0).astype(np.float32),
                    "value": np.where(np.append(counts, True), words.random(length + 1), 0),
                    "reward": np.float32(words.random()),
                    "image": {len(prompt) // 2: image(number)},
                }
            )
    return found


def gear(prompts: Path | None, **options: Any) -> dict[str, Any]:
    table = {
        "capacity_steps": 4000,
        "max_length": MOST,
        "schema": SCHEMA,
        "media": MEDIA,
        "writers": 2,
    }
    table |= {"group": {"column": "prompt", "size": SIZE}, "max_times_sampled": 1}
    if prompts is not None:
        table["prompts"] = {"data": str(prompts), "max_lag": 3}
    pack = {"tokens": 128, "pad": {"multiple": 16}, **options.pop("pack", {})}
    given = {
        "fields": FIELDS,
        "rollout": {"groups": 3},
        "sampler": {"kind": "fifo", "unit": "group"},
    }
    return section(**copy.deepcopy({"tables": {"main": table}, "pack": pack, **given, **options}))


def add(replay: Replay, seed: int = 0) -> None:
    """Add all groups, by leases where the table has prompts."""
    table = replay.tables["main"]
    if table.ledger is None:
        for number, members in enumerate(groups(seed)):
            for member in members:
                replay.add({**member, "prompt": np.int64(number)})
        return
    with replay.rollout_worker() as worker:
        for lease in worker.lease(GROUPS):
            lease.commit(groups(seed)[lease.number])


@contextmanager
def both(tmp_path: Path, **options: Any) -> Iterator[list[Replay]]:
    """A replay whose workers lease prompts, and one to which the same trajectories are added one by
    one.
    """
    data = write_prompts(tmp_path / "prompts", 7)
    with Replay(gear(data, **options)) as shared, Replay(gear(None, **options)) as whole:
        for replay in (shared, whole):
            add(replay)
        yield [shared, whole]


def fill(replay: Replay) -> None:
    for micro in replay.forward("ref", "score", tokens=256):
        micro.fill(
            ref=(micro["tokens"] * 100 + micro.position_ids).float(), score=micro.lengths.float()
        )


def same(one: Any, other: Any) -> None:
    """Compare what `Replay.read` returns."""
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == b[name] if name == "image" else torch.equal(a[name], b[name]), name


def everything(micro: Any) -> list[torch.Tensor]:
    numbers = [micro.loss_mask, micro.weight, micro.targets, micro.position_ids, micro.sequence]
    return [
        *(micro[name] for name in EVERY),
        *numbers,
        micro.trajectory_id,
        *micro.media.columns.values(),
    ]


@pytest.mark.parametrize(
    ("prefix", "tokens"), [("own", 128), ("share", 128), ("own", 16), ("share", 32)]
)
def test_packs_and_columns_are_those_of_whole_trajectories(
    tmp_path: Path, prefix: str, tokens: int
) -> None:
    """On any ranks; a budget of 16 or 32 cuts trajectories, those of 16 within their prompts."""
    pack = {
        "prefix": prefix,
        "tokens": tokens,
        "too_long": "refuse" if tokens > MOST else "truncate",
    }
    with both(tmp_path, pack=pack) as replays:
        table = replays[0].tables["main"]
        assert table.shared_prompts is not None
        shared = table.shared_prompts[: GROUPS * SIZE, SharedPrompt.STEPS]
        assert shared[::SIZE].tolist() == [0] * GROUPS
        for m in range(1, SIZE):
            assert shared[m::SIZE].tolist() == [19, 1, 0 if m == 2 else 19, 29, 0, 0]
        assert table.num_steps == replays[1].tables["main"].num_steps - shared.sum()
        same(*(replay.read(range(GROUPS * SIZE)) for replay in replays))
        for _ in range(2):
            rollouts = [replay.rollout() for replay in replays]
            for rollout in rollouts:
                for micro in rollout.forward("x", tokens=2 * tokens):
                    micro.fill(
                        x=(micro["tokens"] * 1000 + micro.targets).float() + micro.position_ids
                    )
                rollout.advantages("gae", value="value", reward="reward")
            for name in rollouts[0].columns:
                assert torch.equal(*(rollout.column(name) for rollout in rollouts)), name
            for place in ranks_of(2, 1 if prefix == "share" else 2):
                seen = [micros(seen_by(rollout, place)) for rollout in rollouts]
                for one, other in zip(*seen, strict=True):
                    assert all(map(torch.equal, everything(one), everything(other)))
        assert check_books(replays[0])["issued"] == GROUPS


def test_late_columns_are_filled_and_read_as_of_whole_trajectories(tmp_path: Path) -> None:
    with both(tmp_path) as replays:
        for replay, config in zip(replays, (gear(tmp_path / "prompts"), gear(None)), strict=True):
            lengths = [len(one["tokens"]) for one in replay.read([1, 13])]
            with pytest.raises(DataError, match=f"must have the rows of {lengths[1]} steps"):
                replay.fill(13, ref=np.zeros(lengths[1] - 1, np.float32))
            replay.fill(13, ref=np.arange(lengths[1], dtype=np.float32))
            with FillWorker.attach(config, "score", run=replay.run) as worker:
                (lease,) = worker.lease()
                assert len(lease.columns["tokens"]) == len(groups()[0][0]["tokens"])
                lease.fill(7.0)
            fill(replay)
        reads = [replay.read(range(GROUPS * SIZE)) for replay in replays]
        assert replays[0].statistics()["late"] == replays[1].statistics()["late"]
        # Of a prompt that another trajectory holds, the values are those of that one.
        steps, holder = replays[0].tables["main"].shared_prompt(13)
        assert (steps, holder) == (29, 12)
        reads[1][13]["ref"][:steps] = reads[1][holder]["ref"][:steps]
        same(*reads)


def test_a_checkpoint_and_an_export_hold_whole_trajectories(tmp_path: Path) -> None:
    """Saved in the middle of a rollout batch, and loaded into other slots by a job of
    other sizes.
    """
    plain = {name: column for name, column in SCHEMA["columns"].items() if name != "image"}
    fields = {name: {} for name in ("tokens", "logp")}
    data = write_prompts(tmp_path / "prompts", 7)
    exported = [str(tmp_path / f"{name}.parquet") for name in ("living", "saved")]

    def config(**options: Any) -> dict[str, Any]:
        made = gear(
            data, **{"fields": fields, "rollout": {"groups": 3, "minibatches": 3}, **options}
        )
        del made["tables"]["main"]["media"]
        made["tables"]["main"]["schema"] = {"columns": plain}
        return made

    with Replay(config()) as replay:
        with replay.rollout_worker() as worker:
            for lease in worker.lease(GROUPS)[::-1]:  # so that a load gives other slots
                members = groups()[lease.number]
                lease.commit(
                    [{name: one[name] for name in one if name != "image"} for one in members]
                )
        fill(replay)
        expected = replay.read(range(GROUPS * SIZE))
        packs = []
        pid = str(os.getpid())
        store = next(one for one in living_stores(os.getpid()) if one.run.id == replay.run)
        lengths = [len(one["tokens"]) for one in expected]
        assert of_living(store)["length"]["max"] == max(lengths)
        assert of_living(store)["steps"] == sum(lengths)
        assert run_command(export, "--living", pid, exported[0], "--format=parquet") == 0
        for step in replay.rollout():
            packs.append([micro["tokens"] for micro in step])
            if step.number == 0:
                replay.save(tmp_path / "save")
    assert (
        run_command(
            export, str(tmp_path / "save"), str(tmp_path / "saved.parquet"), "--format=parquet"
        )
        == 0
    )
    without = config()
    del without["tables"]["main"]["prompts"]
    with (
        Replay(without) as other,
        pytest.raises(CheckpointError, match="into a table with prompts"),
    ):
        other.load(tmp_path / "save")
    larger = config()
    larger["tables"]["main"] |= {"capacity_steps": 5000, "capacity_trajectories": 300}
    with Replay(larger) as other:
        other.load(tmp_path / "save")
        for left, step in zip(packs[1:], other.rollout(), strict=True):
            assert all(map(torch.equal, left, [micro["tokens"] for micro in step]))
        same(other.read(range(3 * SIZE)), expected[: 3 * SIZE])  # the next batch: the last leases
    for file in exported:
        # A batch in training is not exported: that of the first leases, which were committed last.
        for trajectory, tokens in zip(
            expected, parquet.read_table(file)["tokens"].to_pylist(), strict=False
        ):
            assert trajectory["tokens"].tolist() == tokens


def test_trajectories_that_are_dropped_count_with_their_prompts(tmp_path: Path) -> None:
    config = gear(write_prompts(tmp_path / "prompts", 8), rollout={"groups": 2})
    config["tables"]["main"]["prompts"] |= {"max_lag": 1, "order": "completion", "late": "drop"}
    members = [groups()[number % GROUPS] for number in range(8)]
    with Replay(config) as replay, replay.rollout_worker() as worker:
        slow = worker.lease(4)
        for leases in (slow[:2], None):
            for lease in leases or worker.lease(2):
                lease.commit(members[lease.number])
            list(replay.rollout().step(0))
        for lease in (*slow[2:], *worker.lease(2)):
            lease.commit(members[lease.number])
        list(replay.rollout().step(0))
        stale = replay.statistics()["stale"]["main"]
        assert stale["steps"] == sum(
            len(one["tokens"]) for number in (2, 3) for one in members[number]
        )


def test_what_was_trained_is_read_only_with_its_prompt(tmp_path: Path) -> None:
    """A store that is kept frees trajectories of a group one by one."""
    config = gear(write_prompts(tmp_path / "prompts", 50))
    config["shared_memory"]["keep"] = True
    config["tables"]["main"] |= {"capacity_steps": 1000, "capacity_trajectories": 60}
    known = dict[int, Any]()
    read = 0
    try:
        with Replay(config) as replay, replay.rollout_worker() as worker:
            for _ in range(8):
                for lease in worker.lease(3):
                    members = groups(lease.number)[3]
                    known.update(zip(lease.commit(members), members, strict=True))
                for number, one in known.items():
                    with suppress(StoreError):
                        assert replay.read([number])[0]["tokens"].tolist() == one["tokens"].tolist()
                        read += 1
                list(replay.rollout().step(0))
            assert read > 8 * 3 * SIZE
    finally:
        remove_garbage(prefix(), kept=True)
