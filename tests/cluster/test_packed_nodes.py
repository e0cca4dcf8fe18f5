"""Packed rollouts over nodes: packs, columns and gradients are those of one process."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rollout_support
import torch
import torch.distributed as dist
from batch_records import PLAN_WIDTH, in_plan_order
from cluster_support import Cluster
from packed_engines import COUNT as RESPONSES
from packed_engines import save
from packed_rollouts import (
    GROUP,
    NODES,
    OF_GROUPS,
    Case,
    cases,
    response,
    run_case,
    write_data,
)

from deepspeed_gear import MicroBatch, Replay

RANKS = 2
WORLD = NODES * RANKS
BOUND = 2e-6  # of the largest gradient, as in tests/distributed/test_gradients.py
NAMES = list(cases("", "", ""))
Found = dict[str, Any]


@dataclass
class Outcomes:
    """What one process has seen of each case, and each rank of the nodes; their saves are in
    `saves`.
    """

    cases: dict[str, Case]
    alone: dict[str, Found]
    ranks: dict[str, list[Found]]
    saves: Path


@pytest.fixture(scope="module")
def outcomes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Run each case in this process, and in one launch over nodes."""
    folder = tmp_path_factory.mktemp("alone")
    out = tmp_path_factory.mktemp("nodes")
    known = cases(
        write_data(folder / "set"),
        write_data(folder / "other", 20, 100),
        write_data(folder / "supervised", 20, 200, OF_GROUPS),
    )
    alone = {name: run_case(case, 0, 1, folder / name) for name, case in known.items()}
    seen = cluster.call_ranks(
        run_cases, known, out, folder, nodes=NODES, ranks=RANKS, timeout_s=200.0
    )
    return Outcomes(known, alone, {name: [rank[name] for rank in seen] for name in known}, out)


def run_cases(known: dict[str, Case], out: Path, saves: Path) -> dict[str, Found]:
    """Run each case on this rank, and go on from the saves that one process has made."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    world = dist.get_world_size()
    found = {}
    for name, case in known.items():
        folder, other = (out / name, saves / name) if case.get("resumes") else (None, None)
        found[name] = run_case(case, rank, world, folder, other)
    return found


def numbers(steps: list[list[Found]]) -> list[list[Any]]:
    return [[pack["numbers"] for pack in step] for step in steps]


@pytest.mark.parametrize("name", NAMES)
def test_packs_and_gradients_are_those_of_one_process(name: str, outcomes: Outcomes) -> None:
    alone = outcomes.alone[name]
    ranks = outcomes.ranks[name]
    shares = outcomes.cases[name].get("shares")
    assert all(rank["numbers"] == alone["numbers"] for rank in ranks)
    assert {rank["shared_tokens"] for rank in ranks} == {alone["shared_tokens"]}
    assert (alone["shared_tokens"] > 0) == (
        name in ("groups", "replicated groups", "beside groups")
    )
    one_each = ranks[:: RANKS if shares == "node" else 1][
        : len(ranks) if shares is None else WORLD // 2
    ]
    packs = in_plan_order([rank["packs"] for rank in one_each])
    wanted = in_plan_order([alone["packs"]])
    if shares in (None, "tensor"):
        assert packs == wanted  # all bits
    else:  # two ranks have a slice each of one pack
        assert numbers(packs) == numbers(wanted)
    if shares == "tensor":  # the other one of each replica
        assert [rank["packs"] for rank in ranks[WORLD // 2 :]] == [
            rank["packs"] for rank in one_each
        ]
        ranks = one_each
    for number, gradient in enumerate(alone["gradients"]):
        total = np.sum([rank["gradients"][number] for rank in ranks], axis=0)
        assert np.abs(total - gradient).max() <= BOUND * np.abs(gradient).max()


@pytest.mark.parametrize(
    "name", [name for name, case in cases("", "", "").items() if "shares" not in case]
)
def test_every_trajectory_is_trained_once_an_epoch(name: str, outcomes: Outcomes) -> None:
    section = outcomes.cases[name]["section"]
    ranks = outcomes.ranks[name]
    steps = in_plan_order([numbers(rank["packs"]) for rank in ranks])
    per_batch = len(steps) // 2
    epochs = section["rollout"].get("epochs", 1)
    for batch, every in enumerate(ranks[0]["numbers"]):
        packs = chain.from_iterable(steps[batch * per_batch : (batch + 1) * per_batch])
        trained = list(chain.from_iterable(packs))
        assert sorted(trained) == sorted(every * epochs)
        if section["sampler"].get("unit") == "group":  # each whole
            groups = np.array(every).reshape(section["rollout"]["groups"], GROUP) // GROUP
            assert (groups == groups[:, :1]).all()


@pytest.mark.parametrize(
    "name", [name for name, case in cases("", "", "").items() if case.get("resumes")]
)
def test_a_save_in_a_rollout_batch_goes_on_on_other_nodes(name: str, outcomes: Outcomes) -> None:
    """From one process to two nodes, and back; on the same nodes the program itself compares."""
    wanted = in_plan_order([outcomes.alone[name]["packs"]])[1:]
    assert in_plan_order([rank["resumed"] for rank in outcomes.ranks[name]]) == wanted
    back = run_case(outcomes.cases[name], 0, 1, None, outcomes.saves / name)
    assert in_plan_order([back["resumed"]]) == wanted


@pytest.mark.parametrize("name", ["groups", "tokens"])
def test_a_trajectory_is_sent_at_most_once_to_a_node(name: str, outcomes: Outcomes) -> None:
    ranks = outcomes.ranks[name]
    rows = 0
    for batch in range(2):
        for node in range(NODES):
            own = ranks[node * RANKS : (node + 1) * RANKS]
            gathered = set().union(*(rank["gathered"][batch] for rank in own))
            lacking = [number for number in gathered if number // GROUP % NODES != node]
            rows += sum(row_bytes(len(response(number)["tokens"])) for number in lacking)
    records = 72 * 2 * 20  # of two selections
    per_selection = sum(rank["statistics"].get("sent_bytes", 0.0) for rank in ranks)
    assert rows <= 2 * per_selection <= rows + records + 2000


def test_ranks_share_the_groups_that_are_missing(outcomes: Outcomes) -> None:
    """Those of a batch, then none of any node."""
    assert outcomes.alone["groups"]["missing"] == [5, False, 0, True]
    of_ranks = [rank["missing"] for rank in outcomes.ranks["groups"]]
    assert of_ranks == [[2, False, 0, True], *[[1, False, 0, True]] * 3]


def test_each_node_counts_the_groups_that_it_holds(outcomes: Outcomes) -> None:
    for name in ("groups", "members", "used up", "queue"):
        whole = outcomes.alone[name]["statistics"]["groups"]["main"]
        nodes = [rank["statistics"]["groups"]["main"] for rank in outcomes.ranks[name][::RANKS]]
        assert {key: sum(node[key] for node in nodes) for key in whole} == whole
    draws = [
        rank["statistics"]["drawn"]["main"]["draws"] for rank in outcomes.ranks["members"][::RANKS]
    ]
    assert (
        max(one["max"] for one in draws)
        == outcomes.alone["members"]["statistics"]["drawn"]["main"]["draws"]["max"]
    )


@pytest.mark.parametrize("case", ["prompts", "stages"])
def test_the_books_of_all_nodes_are_one_account(case: str, outcomes: Outcomes) -> None:
    whole = outcomes.alone[case]["statistics"]["prompts"]["main"]
    nodes = [rank["statistics"]["prompts"]["main"] for rank in outcomes.ranks[case][::RANKS]]
    for name in ("issued", "trained", "training", "waiting", "incomplete", "leased", "returned"):
        assert sum(node[name] for node in nodes) == whole[name]
    assert (whole["issued"], [node["trained"] for node in nodes]) == (10, [5, 5])


def test_nodes_fill_their_own_rows_in_as_many_micro_batches(outcomes: Outcomes) -> None:
    """Before each node's groups are there, and after; then rewards of the second batch."""
    alone = outcomes.alone["stages"]["passes"]
    ranks = [rank["passes"] for rank in outcomes.ranks["stages"]]
    assert [len(rank) for rank in ranks] == [NODES + 2] * WORLD
    filled = [[list(chain(*packs)) for packs in rank] for rank in ranks]
    for number in range(NODES + 2):
        assert len({len(rank[number]) for rank in ranks}) == 1
    for rank, of_passes in enumerate(filled):
        assert {n // GROUP % NODES for n in chain(*of_passes)} <= {rank // RANKS}
        assert [bool(one) for one in of_passes] == [False, rank < RANKS, rank >= RANKS, True]
    for number, wanted in ((slice(0, -1), alone[:-1]), (slice(-1, None), alone[-1:])):
        found = chain.from_iterable(chain(*rank[number]) for rank in filled)
        assert sorted(found) == sorted(chain(*chain(*wanted)))


def test_an_engine_trains_rollouts_over_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """A rank on each of two nodes adds its own responses; it saves in a rollout batch, too."""
    pack = {"tokens": 128, "pad": {"multiple": 16}, "plan_width": PLAN_WIDTH}
    size = {"trajectories": 18, "tokens": 450, "minibatches": 3, "epochs": 2}
    gear = rollout_support.section(
        pack=pack, rollout=size, sampler={"kind": "epoch"}, timeout_s=60.0
    )
    found = cluster.call_ranks(save, gear, str(tmp_path), nodes=NODES, timeout_s=200.0)
    ids = [[[pack["ids"] for pack in step] for step in rank["steps"]] for rank in found]
    with Replay(gear) as replay:
        for seed in range(NODES):
            for one in rollout_support.responses(RESPONSES, seed):
                replay.add(one)
        replay.rollout().close()
        steps = [[ids_on_nodes(micro) for micro in step] for step in replay.rollout()]
    assert in_plan_order(ids) == in_plan_order([steps[1:]])
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["following"] == found[1]["following"]


def ids_on_nodes(micro: MicroBatch) -> list[int]:
    """Return the ids that trajectories of one process have where each node adds
    RESPONSES of them.
    """
    node, number = np.divmod(micro.trajectory_id.numpy(), RESPONSES)
    return [int(one) for one in number * NODES + node]


def row_bytes(steps: int) -> int:
    """Return the bytes of a trajectory: tokens, mask, logp, state, and four values."""
    return steps * (4 + 1 + 4) + (steps + 1) * 8 + 8 + 8 + 4 + 4
