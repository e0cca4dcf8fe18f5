"""`gear preview --lengths` beside the packs that ranks train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_support import ranks_of, rolled_out, section, seen_by

from deepspeed_gear.cli.main import main
from deepspeed_gear.config import parse
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.replay.preview import pack_preview, read_lengths

COST = [30, 1]


def packed(**pack: Any) -> dict[str, Any]:
    return section(pack={"tokens": 128, "cost": COST, "pad": {"multiple": 16}, **pack})


@pytest.mark.parametrize("plan_width", [None, 12])
@pytest.mark.parametrize("pad", ["multiple", "step", "budget"])
@pytest.mark.parametrize(("replicas", "sequence"), [(1, 1), (3, 1), (4, 2)])
def test_numbers_are_those_of_the_trained_packs(
    pad: str, plan_width: int | None, replicas: int, sequence: int
) -> None:
    """K, fill and imbalance, from the micro batches of every rank."""
    config = packed(pad={"to": pad, "multiple": 16}, plan_width=plan_width)
    with rolled_out(pack=config["pack"]) as (rollout, _):
        found = pack_preview(parse(config), rollout.lengths.numpy(), replicas, sequence)
        places, costs = 0, []  # of all ranks; of each rank's micro batches
        loops = [iter(seen_by(rollout, place)) for place in ranks_of(replicas, sequence)]  # kept open
        steps = [next(loop) for loop in loops]
        imbalance = steps[0].packs.imbalance
        for number, step in enumerate(steps):
            assert len(step) == found.micro_batches
            micros = list(step)
            places += sum(micro["tokens"].numel() for micro in micros)
            if number % sequence == 0:
                lengths = [micro.lengths.numpy() for micro in micros]
                costs.append([int((COST[0] * own + COST[1] * own * own).sum()) for own in lengths])
    by_rank = np.array(costs)
    assert (found.trajectories, found.tokens) == (rollout.num_trajectories, rollout.num_tokens)
    assert (found.longest, found.truncated) == (int(rollout.lengths.max()), 0)
    assert found.rows == places
    assert found.fill == pytest.approx(rollout.num_tokens / places)
    slowest = by_rank.max(axis=0).sum() * replicas / by_rank.sum() - 1
    assert found.step_imbalance == pytest.approx(slowest)
    assert imbalance == pytest.approx(slowest)
    assert found.rank_imbalance == pytest.approx(by_rank.sum(axis=1).max() * replicas / by_rank.sum() - 1)
    assert found.bound <= found.micro_batches
    assert found.bound >= rollout.num_tokens / (128 * replicas)


def test_truncated_trajectories_have_the_budget() -> None:
    config = parse(packed(tokens=40, too_long="truncate"))  # 32, the multiple below
    found = pack_preview(config, np.array([10, 32, 33, 500]), 2)
    assert (found.tokens, found.longest, found.truncated) == (10 + 3 * 32, 500, 2)
    assert (found.micro_batches, found.rows, found.bound) == (2, 16 + 3 * 32, 2)


def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, text, array = tmp_path / "gear.json", tmp_path / "lengths.txt", tmp_path / "lengths.npy"
    config.write_text(json.dumps({"gear": packed()}))
    text.write_text("60\n60\n8\n")
    np.save(array, np.array([60, 60, 8], np.int32))
    for file in (text, array):
        assert main(["preview", str(config), "--dp", "2", "--lengths", str(file)]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "3 trajectories, 128 tokens, longest 60",
            "micro batches of each of 2 replicas: 1 (at least 1)",
            "fill: 88.9% of 144 places",  # 64 of 60, 80 of 60 + 8
            "imbalance: 2.74% over micro steps, 2.74% over ranks",  # (5400 + 304) / ((10800 + 304) / 2)
        ]
    assert main(["preview", str(config), "--dp", "2", "--lengths", str(text), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["micro_batches"], shown["rows"], shown["fill"]) == (1, 144, pytest.approx(128 / 144))
    assert shown["step_imbalance"] == pytest.approx(5704 / 5552 - 1)


@pytest.mark.filterwarnings("ignore:loadtxt")
def test_what_is_refused(tmp_path: Path) -> None:
    for name, content in (("a", "1\nx\n"), ("b", "0\n"), ("c", "1 2\n3 4\n"), ("d", "1.5\n"), ("e", "")):
        file = tmp_path / f"{name}.txt"
        file.write_text(content)
        with pytest.raises(DataError, match="whole numbers"):
            read_lengths(file)
    np.save(tmp_path / "f.npy", np.array([1.0, 2.0]))
    with pytest.raises(DataError, match="must be whole numbers of at least 1, got 'float64"):
        read_lengths(tmp_path / "f.npy")
    with pytest.raises(DataError, match="must be a file of whole numbers"):
        read_lengths(tmp_path / "none.txt")
    with pytest.raises(ConfigError, match=r"must hold the longest trajectory \(129 steps\)"):
        pack_preview(parse(packed()), np.array([5, 129]), 1)
    with pytest.raises(ConfigError, match=r"gear\.pack\.plan_width must be a multiple of the replicas \(3\)"):
        pack_preview(parse(packed(plan_width=4)), np.array([5]), 3)
    plain = {key: value for key, value in section().items() if key not in ("pack", "rollout")}
    with pytest.raises(ConfigError, match=r"gear\.pack must be given for a preview of lengths"):
        pack_preview(parse({**plain, "batch_size": 4}), np.array([5]), 1)
    config = tmp_path / "gear.json"
    config.write_text(json.dumps(packed()))
    assert main(["preview", str(config)]) != 0
