"""`gear preview` against what a Replay hands out: the micro batches of ranks, and packs."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import prefix
from rollout_support import TABLE, ranks_of, rolled_out, seen_by
from rollout_support import section as packed_section

from deepspeed_gear import Replay
from deepspeed_gear.cli.main import main
from deepspeed_gear.config import parse
from deepspeed_gear.errors import ConfigError, DataError, show_bytes
from deepspeed_gear.replay.packed.pack_preview import pack_preview, read_lengths
from deepspeed_gear.replay.preview import preview

FIELDS = {
    "observation": {"offset": -3, "length": 4},
    "action": {"offset": -3, "length": 4, "align": "right"},
    "reward": {},
    "timestep": {"offset": -3, "length": 4},
}
ENDS = {"inputs": ["observation", "mask.action"], "labels": ["action", "reward"]}
BYTES = {"observation": 12, "action": 8, "reward": 4, "timestep": 8}


@pytest.fixture
def shown_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what `gear preview` writes for a config."""

    def run(config: dict[str, Any], *options: str, status: int = 0) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        assert main(["preview", str(path), *options]) == status
        shown = capsys.readouterr()
        return shown.err if status else shown.out

    return run


def section(data: Path, **options: Any) -> dict[str, Any]:
    return {
        "data": str(data),
        "seed": 5,
        "fields": FIELDS,
        "pipeline": ENDS,
        "sampler": {"kind": "uniform", "unit": "step"},
        "shared_memory": {"prefix": prefix()},
        **options,
    }


def test_ranks_get_what_a_replay_gives(data: Path) -> None:
    """Ids, bytes and padding of the first micro batch; digests of global batches."""
    gear = section(data)
    found = preview(parse(gear), 4, 3, {"data": 2, "sequence": 2}, 1, 3)
    assert found.info.global_batch == 24
    with Replay({**gear, "batch_size": 24, "verify_every": 1}) as replay:
        batch = replay.sample().clone()
        digests = [replay.statistics()["digest"][1]]
        for _ in range(2):
            replay.sample()
            digests.append(replay.statistics()["digest"][1])
    assert found.digests == digests
    assert len(set(digests)) == 3
    for rank in found.ranks:
        place = rank.place
        mine = batch.trajectory_id[place.data_rank :: 6][:4]
        assert rank.ids == mine.tolist()
        assert rank.shapes["observation"] == (4, 2, 3)
        assert rank.num_bytes == 4 * (2 * (12 + 8 + 8) + 4)
        part = slice(2 * place.sequence_rank, 2 * place.sequence_rank + 2)
        masks = [batch.mask[name][place.data_rank :: 6] for name in FIELDS]
        shown = np.concatenate([m[:, part].flatten() if m.dim() == 2 else m for m in masks])
        assert rank.padding == pytest.approx(1 - shown.mean())


def test_stages_and_traffic(data: Path) -> None:
    """A row goes to a node once, of the fields that the node's stages read; inner nodes hold and
    get none.
    """
    gear = section(data)
    found = preview(parse(gear), 4, 1, {"pipe": 3, "data": 2, "tensor": 2}, 3, 1)
    shapes = [sorted(rank.shapes) for rank in found.ranks]
    assert shapes == [["mask.action", "observation"]] * 4 + [[]] * 4 + [["action", "reward"]] * 4
    with Replay({**gear, "batch_size": 8}) as replay:
        batch = replay.sample()
        lengths = replay.datasets["main"].lengths
        size = lengths * replay.datasets["main"].schema.row_bytes
    before = np.concatenate([[0], np.cumsum(size)])
    middle = np.searchsorted(before, before[-1] / 2)
    second = batch.trajectory_id.numpy() >= middle
    real = {name: batch.mask[name].reshape(8, -1).sum(1).numpy() * BYTES[name] for name in FIELDS}
    wanted = np.zeros((3, 3), np.int64)
    wanted[2, 0] = real["observation"][second].sum()
    wanted[0, 2] = (real["action"] + real["reward"])[~second].sum()
    assert (found.traffic == wanted).all()


def test_a_thousand_ranks_fit_one_screen(shown_by: Any, data: Path) -> None:
    """Equal ranks and nodes share lines; --json has each rank and each two nodes."""
    options = ["--pp", "4", "--dp", "64", "--tp", "4", "--nodes", "128"]
    config = {**section(data), "micro_batch_size": 1}
    shown = [shown_by(config, *options, *more) for more in ([], ["--json"])]
    lines = shown[0].splitlines()
    known = json.loads(shown[1])
    assert len(lines) < 30
    assert max(map(len, lines)) < 120
    traffic = np.array(known["traffic"])
    ranks = known["ranks"]
    assert "ranks 0-255 (256): pipe 0 of 4, data 0-63 of 64, tensor 0-3 of 4" in lines
    assert "ranks 256-767 (512): pipe 1-2 of 4, data 0-63 of 64, tensor 0-3 of 4" in lines
    padding = [rank["padding"] for rank in ranks[:256]]
    text = (
        f"{show_bytes(ranks[0]['bytes'])} a micro batch; padding {min(padding):.1%} to "
        f"{max(padding):.1%}"
    )
    assert any(text in line for line in lines)
    cells = next(re.split(r"  +", line) for line in lines if line.startswith("0-31 "))
    most = int(traffic[:32].sum(1).argmax())
    sizes = 8 * ranks[0]["bytes"], ranks[0]["bytes"], traffic[:32].sum()
    assert cells[1:5] == ["8", *map(show_bytes, sizes)]
    assert cells[5] == f"{show_bytes(traffic[most].sum())} (node {most})"
    text = (
        f"between all nodes: {show_bytes(traffic.sum())}, at most {show_bytes(traffic.max())} from"
    )
    assert any(text in line for line in lines)
    assert [rank["rank"] for rank in ranks] == [*range(1024)]


def test_the_steps_of_construction_are_a_line(shown_by: Any, data: Path) -> None:
    config = {**section(data), "batch_size": 8}
    steps: list[str] = json.loads(shown_by(config, "--json", "--batches", "1"))["steps"]
    text = " ".join(shown_by(config, "--batches", "1").split())
    assert f"made in {len(steps)} steps: {' -> '.join(steps)} " in text
    line = (
        "reading the config",
        "loading the ops",
        "opening the data sets",
        "the schemas",
        "the fields",
        "the sampler",
        "the sizes of the tables",
        "naming the run",
        "creating the store of table main",
        "attaching to the store of table main",
    )
    assert [step for step in steps if step in line] == [*line, "the fields"]


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"train_batch_size": 24}, (12, 1)),
        ({"train_micro_batch_size_per_gpu": 4, "train_batch_size": 24}, (4, 3)),
        ({"train_micro_batch_size_per_gpu": 4}, (4, 1)),
    ],
)
def test_sizes_of_a_ds_config(
    data: Path, shown_by: Any, sizes: dict[str, int], wanted: Any
) -> None:
    config = {**sizes, "gear": section(data)}
    shown = json.loads(shown_by(config, "--dp", "2", "--json", "--batches", "1"))
    assert (shown["micro"], shown["accumulation"]) == wanted
    assert [rank["data"] for rank in shown["ranks"]] == [0, 1]
    text = shown_by(config, "--dp", "2", "--nodes", "2")
    assert f"digest {shown['digests'][0]}" in text
    assert "Rows between all nodes" in text


@pytest.mark.parametrize(
    ("config", "options", "text"),
    [
        ({"train_batch_size": 7}, ["--dp", "2"], "train_batch_size must be train_micro"),
        ({}, [], "gear.batch_size must be given where there is no engine"),
        ({"gradient_accumulation_steps": 2}, [], "train_batch_size must be given"),
        ({"train_batch_size": 8}, ["--nodes", "3"], "nodes must divide the 1 ranks, got 3"),
        (
            {"train_batch_size": 8},
            ["--sp", "3"],
            "length must be a multiple of the sequence ranks (3)",
        ),
    ],
)
def test_what_is_refused(
    data: Path, shown_by: Any, config: dict[str, int], options: list[str], text: str
) -> None:
    assert text in shown_by({**config, "gear": section(data)}, *options, status=2)


def test_without_data_there_is_nothing_to_draw() -> None:
    tables = {
        "main": {"capacity_steps": 9, "schema": {"columns": {"reward": {"dtype": "float32"}}}}
    }
    with pytest.raises(ConfigError, match="must hold a data set"):
        preview(parse({"tables": tables}), 2, 1, {}, 1, 1)


COST = [30, 1]


def packed(**pack: Any) -> dict[str, Any]:
    return packed_section(pack={"tokens": 128, "cost": COST, "pad": {"multiple": 16}, **pack})


@pytest.mark.parametrize("plan_width", [None, 12])
@pytest.mark.parametrize("pad", ["multiple", "step", "budget"])
@pytest.mark.parametrize(("replicas", "sequence"), [(1, 1), (3, 1), (4, 2)])
def test_numbers_are_those_of_the_trained_packs(
    pad: str, plan_width: int | None, replicas: int, sequence: int
) -> None:
    """K, fill and imbalance, from the micro batches of every rank."""
    config = packed(pad={"to": pad, "multiple": 16}, plan_width=plan_width)
    with rolled_out(pack=config["pack"]) as rollout:
        found = pack_preview(parse(config), rollout.lengths.numpy(), replicas, sequence)
        # of all ranks; of each rank's micro batches
        places = 0
        costs = []
        loops = [
            iter(seen_by(rollout, place)) for place in ranks_of(replicas, sequence)
        ]  # kept open
        steps = [next(loop) for loop in loops]
        imbalance = steps[0].packs.planned.imbalance
        for number, step in enumerate(steps):
            assert len(step) == found["micro_batches"]
            micros = list(step)
            places += sum(micro["tokens"].numel() for micro in micros)
            if number % sequence == 0:
                lengths = [micro.lengths.numpy() for micro in micros]
                costs.append([int((COST[0] * own + COST[1] * own * own).sum()) for own in lengths])
    by_rank = np.array(costs)
    assert (found["trajectories"], found["tokens"]) == (
        rollout.num_trajectories,
        rollout.num_tokens,
    )
    assert (found["longest"], found["truncated"]) == (int(rollout.lengths.max()), 0)
    assert found["rows"] == places
    assert found["fill"] == pytest.approx(rollout.num_tokens / places)
    slowest = by_rank.max(axis=0).sum() * replicas / by_rank.sum() - 1
    assert found["step_imbalance"] == pytest.approx(slowest)
    assert imbalance == pytest.approx(slowest)
    assert found["rank_imbalance"] == pytest.approx(
        by_rank.sum(axis=1).max() * replicas / by_rank.sum() - 1
    )
    assert found["bound"] <= found["micro_batches"]
    assert found["bound"] >= rollout.num_tokens / (128 * replicas)


def test_truncated_trajectories_have_the_budget() -> None:
    config = parse(packed(tokens=40, too_long="truncate"))  # 32, the multiple below
    found = pack_preview(config, np.array([10, 32, 33, 500]), 2)
    assert (found["tokens"], found["longest"], found["truncated"]) == (10 + 3 * 32, 500, 2)
    assert (found["micro_batches"], found["rows"], found["bound"]) == (2, 16 + 3 * 32, 2)


def test_what_is_printed_of_packs(tmp_path: Path, shown_by: Any) -> None:
    config = {"gear": packed()}
    text = tmp_path / "lengths.txt"
    array = tmp_path / "lengths.npy"
    text.write_text("60\n60\n8\n")
    np.save(array, np.array([60, 60, 8], np.int32))
    for file in (text, array):
        assert shown_by(config, "--dp", "2", "--lengths", str(file)).splitlines() == [
            "3 trajectories, 128 tokens, longest 60",
            "micro batches of each of 2 replicas: 1 (at least 1)",
            "fill: 88.9% of 144 places",  # 64 of 60, 80 of 60 + 8
            # (5400 + 304) / ((10800 + 304) / 2)
            "imbalance: 2.74% over micro steps, 2.74% over ranks",
        ]
    shown = json.loads(shown_by(config, "--dp", "2", "--lengths", str(text), "--json"))
    assert (shown["micro_batches"], shown["rows"], shown["fill"]) == (
        1,
        144,
        pytest.approx(128 / 144),
    )
    assert shown["step_imbalance"] == pytest.approx(5704 / 5552 - 1)
    table = {**TABLE, "group": {"column": "prompt", "size": 2}}
    shared = packed_section(
        tables={"main": table},
        sampler={"kind": "fifo", "unit": "group"},
        pack={**config["gear"]["pack"], "prefix": "share"},
        rollout={"groups": 2},
    )
    shown = shown_by({"gear": shared}, "--lengths", str(text)).splitlines()[-1]
    assert shown.startswith('planned without shared prefixes ("prefix": "share")')


@pytest.mark.filterwarnings("ignore:loadtxt")
def test_lengths_and_packs_that_are_refused(tmp_path: Path, shown_by: Any) -> None:
    for name, content in (
        ("a", "1\nx\n"),
        ("b", "0\n"),
        ("c", "1 2\n3 4\n"),
        ("d", "1.5\n"),
        ("e", ""),
    ):
        file = tmp_path / f"{name}.txt"
        file.write_text(content)
        with pytest.raises(DataError, match="whole numbers"):
            read_lengths(file)
    np.save(tmp_path / "f.npy", np.array([1.0, 2.0]))
    with pytest.raises(DataError, match="must be whole numbers of at least 1, got 'float64"):
        read_lengths(tmp_path / "f.npy")
    with pytest.raises(DataError, match="must be a file of whole numbers"):
        read_lengths(tmp_path / "none.txt")
    plain = {**packed_section(), "pack": None, "rollout": None, "batch_size": 4}
    for config, lengths, text in (
        (packed(), [5, 129], r"must hold the longest trajectory \(129 steps\)"),
        (
            packed(plan_width=4),
            [5],
            r"gear\.pack\.plan_width must be a multiple of the replicas \(3\)",
        ),
        (plain, [5], r"gear\.pack must be given for a preview of lengths"),
    ):
        with pytest.raises(ConfigError, match=text):
            pack_preview(parse(config), np.array(lengths), 3)


def test_a_rollout_is_described_without_lengths(shown_by: Any) -> None:
    table = {"max_length": 512, "prompts": {"data": "prompts", "max_lag": 1}, "group": {"size": 4}}
    grpo = {
        "recipe": "grpo",
        "tables": {"rollouts": table},
        "rollout": {"groups": 8, "minibatches": 2},
    }
    text = shown_by({"train_batch_size": 8, "gear": grpo}, "--dp", "2", "--sp", "2")
    assert text.startswith("With the recipe grpo the section is")
    assert text[text.index("rollout batch") :].splitlines() == [
        "rollout batch: 8 groups, 32 trajectories",
        "its optimizer steps: 2 (epochs 1, minibatches 2)",
        "micro batches of each of 2 replicas: packs of at most 4,096 tokens, 2,048 of each "
        "sequence rank",
        "table rollouts: 96 trajectories and 49,152 steps on all nodes, 432 KiB, at most 512 "
        "steps each, 16 prompts leased or waiting at once",
        "micro batches, fill and balance depend on lengths: give --lengths FILE, a length a line",
    ]
    shown = json.loads(shown_by(grpo, "--json"))
    assert (shown["items"], shown["trajectories"], shown["optimizer_steps"]) == (8, 32, 2)
    assert (shown["tables"]["rollouts"]["steps"], shown["rank_tokens"]) == (49152, 4096)
    text = shown_by(packed_section(rollout={"trajectories": 10, "tokens": 250}))
    assert text.startswith("rollout batch: at most 10 trajectories and 250 tokens\n")
    assert "must be a multiple of the replicas (3)" in shown_by(
        packed(plan_width=4), "--dp", "3", status=2
    )
    assert "where the model is a pipeline" in shown_by(packed(), "--pp", "2", status=2)
