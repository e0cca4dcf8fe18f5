"""Rollout workers of two nodes generate what all ranks train: the batches of one node, within the
lag.
"""

import contextlib
import json
import re
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist
from cluster_support import Cluster, NodeRanks
from gear_support import ROOT, prefix, wait_until
from ledger_support import SIZE, ledger_section, responses, write_prompts
from process_support import CALL, exit_status, in_child, kill, run_ranks, write_call
from rollout_support import micros

from deepspeed_gear import (
    ConfigError,
    FillWorker,
    Lease,
    LeaseExpiredError,
    PeerError,
    Replay,
    Rollout,
    RolloutWorker,
    StoreError,
)
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.sampling.batch_sizes import BatchInfo

GROUPS = 6
BATCHES = 8
SAVED = 3
RANKS = 2
LAG = 2
PARTS = ("trained", "training", "waiting", "incomplete", "leased", "returned")


def is_dropped(number: int) -> bool:
    return number % 5 == 0 or number % 7 == 3


def write(path: Path | None, line: Any) -> None:
    if path is not None:
        with path.open("a") as log:
            log.write(json.dumps(line) + "\n")


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def generate(config: dict[str, Any], number: int, log: Path | None = None) -> None:
    """Lease and commit, the newest first, until the ranks end; some prompts are rejected, and some
    fail.
    """
    with RolloutWorker.attach(config) as worker:
        try:
            while True:
                for lease in worker.lease(1 + number, timeout_s=10.0)[::-1]:
                    time.sleep(0.003)
                    with contextlib.suppress(LeaseExpiredError):  # the ranks have loaded
                        if lease.number % 7 == 3:
                            lease.fail("too long", retry=False)
                        else:
                            lease.commit(responses(lease))
                            write(log, lease.number)
        except StoreError:
            pass


def score(config: dict[str, Any], number: int, log: Path | None = None) -> None:
    """Fill the rewards of what the workers of this node commit, until the ranks end; some are too
    small.
    """
    with FillWorker.attach(config, "reward") as worker:
        try:
            while True:
                for lease in worker.lease(2 + number, timeout_s=10.0)[::-1]:
                    lease.fill(-1.0 if lease.columns["prompt"] % 5 == 0 else 1.0)
                    write(log, [int(lease.columns[name]) for name in ("prompt", "sample")])
        except StoreError:
            pass


def opened(config: dict[str, Any]) -> Replay:
    """Open the replay of this rank, which is a replica of its own."""
    world = dist.get_world_size()
    place = RankCoordinates(data_rank=dist.get_rank(), data_world=world)
    return Replay(config, info=BatchInfo(1, 1, world), place=place)


def trained(rollout: Rollout) -> list[int]:
    """Train a rollout batch; return its prompts."""
    prompts: list[int] = rollout.values("prompt")[::SIZE].tolist()
    micros(rollout)
    return prompts


def train(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train beside the workers of this node, some of which are killed; save during a batch, and
    load it.
    """
    rank = dist.get_rank()
    found: dict[str, Any] = {"numbers": [], "lags": []}
    workers = []
    with opened(config) as replay:
        if rank % RANKS == 0:
            calls = [partial(work, config, own) for own in range(3) for work in (generate, score)]
            workers = [in_child(call) for call in calls]
        for batch in range(BATCHES):
            rollout = replay.rollout()
            found["lags"] += [batch + 1 - length for length in rollout.lengths[::SIZE].tolist()]
            if workers and batch == 1:
                kill(workers.pop())
                kill(workers.pop())
            if batch == SAVED:
                replay.save(folder)
            found["numbers"].append(trained(rollout))
        replay.load(folder)
        found["again"] = [trained(replay.rollout()) for _ in range(SAVED, BATCHES)]
        while not replay.can_sample():  # the workers go on
            time.sleep(0.01)
        found["books"] = replay.statistics()["prompts"]["main"]
        dist.barrier()
    assert [exit_status(worker) for worker in workers] == [0] * len(workers)
    return found


def train_beside_slow(sections: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Train by completion beside workers, and a lease of each node that lasts until a batch waits
    for it.
    """
    rank = dist.get_rank()
    results = []
    for config in sections:
        waits = config["tables"]["main"]["prompts"]["late"] == "wait"
        found: dict[str, Any] = {"numbers": [], "slow": [], "expired": 0, "early": []}
        workers = list[int]()
        slow = list[Lease]()
        with opened(config) as replay, contextlib.ExitStack() as ends:
            if rank % RANKS == 0:
                slow = ends.enter_context(contextlib.closing(replay.rollout_worker())).lease(1)
                workers = [in_child(partial(generate, config, own)) for own in range(2)]
            for batch in range(LAG + 3):
                if waits and batch == LAG:
                    found["early"] = [replay.can_sample() for _ in range(20)]
                    for lease in slow:
                        lease.commit(responses(lease))
                while not replay.can_sample():
                    time.sleep(0.01)
                rollout = replay.rollout()
                if waits and batch == 1:
                    replay.save(folder)
                found["numbers"].append(trained(rollout))
            for lease in slow:
                found["slow"].append(lease.number)
                try:
                    lease.heartbeat()
                except LeaseExpiredError:
                    found["expired"] += 1
            found["books"] = replay.statistics()["prompts"]["main"]
            dist.barrier()
        assert [exit_status(worker) for worker in workers] == [0] * len(workers)
        results.append(found)
    return results


class Trained(NamedTuple):
    """What two nodes have trained, in one start of their ranks."""

    folder: Path
    config: dict[str, Any]
    by_lease: list[dict[str, Any]]  # of each rank
    sections: list[dict[str, Any]]
    by_completion: list[list[dict[str, Any]]]  # of each rank, by section


def train_both(
    config: dict[str, Any], sections: list[dict[str, Any]], folder: Path
) -> tuple[Any, Any]:
    """Train in the order of leases, and then by completion."""
    return train(config, folder / "by_lease"), train_beside_slow(sections, folder / "by_completion")


@pytest.fixture(scope="module")
def nodes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two nodes of two ranks that have trained with each order."""
    folder = tmp_path_factory.mktemp("nodes")
    data = write_prompts(folder / "prompts", 11)
    where = {"where": {"reward": {"mean": {"min": 0.0}}}}
    config = ledger_section(data, {"max_lag": 1}, GROUPS, group=where, writers=6, timeout_s=60.0)
    config["pack"]["plan_width"] = 4
    rules = [{"max_lag": LAG, "order": "completion", "late": late} for late in ("wait", "drop")]
    sections = [ledger_section(data, rule, GROUPS, writers=6, timeout_s=60.0) for rule in rules]
    call = train_both, config, sections, folder
    ranks = cluster.call_ranks(*call, nodes=2, ranks=RANKS, timeout_s=200.0)
    return Trained(
        folder, config, [one for one, _ in ranks], sections, [other for _, other in ranks]
    )


def test_two_nodes_train_the_batches_of_one_which_goes_on_with_them(nodes: Trained) -> None:
    config = nodes.config
    ranks = nodes.by_lease
    kept = [number for number in range(200) if not is_dropped(number)]
    wanted = [kept[GROUPS * batch : GROUPS * (batch + 1)] for batch in range(BATCHES)]
    assert all((rank["numbers"], rank["again"]) == (wanted, wanted[SAVED:]) for rank in ranks)
    lags = [lag for rank in ranks for lag in rank["lags"]]
    assert (min(lags) >= 0, max(lags)) == (True, 1)
    books = [rank["books"] for rank in ranks[::RANKS]]
    dropped = sum(sum(one["dropped"].values()) for one in books)
    assert sum(one["issued"] for one in books) == dropped + sum(
        one[part] for one in books for part in PARTS
    )
    assert sum(one["trained"] + one["training"] for one in books) == GROUPS * BATCHES
    assert {reason for one in books for reason in one["dropped"]} == {"rejected", "too long"}
    assert sum(one["leases_returned"] for one in books) > 0

    with Replay(config) as replay:  # on one node
        replay.load(nodes.folder / "by_lease")
        children = [in_child(partial(work, config, 2)) for work in (generate, score)]
        assert [trained(replay.rollout()) for _ in range(SAVED, BATCHES)] == wanted[SAVED:]
        books_after = replay.statistics()["prompts"]["main"]
        assert books_after["trained"] == GROUPS * BATCHES
        assert books_after["largest_lag"] <= 1
    assert [exit_status(child) for child in children] == [0, 0]


def test_nodes_train_by_completion_and_wait_for_what_is_slow_or_drop_it(nodes: Trained) -> None:
    ranks = nodes.by_completion
    section = nodes.sections[0]
    for found in zip(*ranks, strict=True):
        assert all(rank["numbers"] == found[0]["numbers"] for rank in found)
        numbers = [number for batch in found[0]["numbers"] for number in batch]
        assert len({*numbers}) == len(numbers) == GROUPS * (LAG + 3)
        assert sorted(number for rank in found for number in rank["slow"]) == [0, 1]
        books = [rank["books"] for rank in found[::RANKS]]
        parts = sum(one[part] for one in books for part in PARTS)
        assert sum(one["issued"] for one in books) == parts + sum(
            sum(one["dropped"].values()) for one in books
        )
        assert max(one["largest_lag"] for one in books) <= LAG
    waited, dropping = ranks[0]
    assert waited["early"] == [False] * 20
    assert {0, 1} <= {*waited["numbers"][LAG]}
    assert any(
        batch != sorted(batch) for batch in waited["numbers"]
    )  # workers end the newest leases first
    assert not {0, 1} & {number for batch in dropping["numbers"] for number in batch}
    for rank in ranks[::RANKS]:
        assert rank[1]["expired"] == 1
        assert rank[1]["books"]["dropped"]["too old"] >= 1

    with Replay(section) as replay:  # on one node: what was slow is leased again
        replay.load(nodes.folder / "by_completion")
        child = in_child(partial(generate, section, 2))
        again = [trained(replay.rollout()) for _ in range(1, LAG + 2)]
        after = replay.statistics()["prompts"]["main"]
    assert exit_status(child) == 0
    assert after["largest_lag"] <= LAG
    assert {*after["dropped"]} == {"too long"}
    assert again[0] == waited["numbers"][1]
    numbers = [number for batch in [waited["numbers"][0], *again] for number in batch]
    assert len({*numbers}) == len(numbers)


def go_on(config: dict[str, Any], folder: Path, loads: bool, batches: int) -> str:
    """Train so many batches beside workers of this node, from the save or the start on; return an
    error.
    """
    rank = dist.get_rank()
    try:
        replay = opened(config)
    except (ConfigError, PeerError) as error:
        return str(error)
    with replay:
        logs = [(generate, folder / "commits"), (score, folder / "fills")]
        workers = [
            in_child(partial(work, config, own, to)) for own in range(2) for work, to in logs
        ]
        if loads:
            replay.load(folder / "saved")
        for _ in range(batches):
            rollout = replay.rollout()
            lags = [rollout.number + 1 - length for length in rollout.lengths[::SIZE].tolist()]
            if rollout.number == 2 and not (folder / "saved").exists():
                dist.barrier()
                replay.save(folder / "saved")
            line = (
                rollout.number,
                trained(rollout),
                max(lags),
                replay.statistics()["prompts"]["main"],
            )
            write(folder / "log" if rank == 0 else None, line)
        dist.barrier()
        for worker in workers:
            kill(worker)
    return ""


@pytest.mark.parametrize("order", ["completion", "lease"])
def test_each_node_goes_on_in_the_store_that_it_has_kept(
    order: str, cluster: Cluster, tmp_path: Path
) -> None:
    """All processes of two nodes are killed; later a node has lost its store; other numbers are
    refused.
    """
    data = write_prompts(tmp_path / "prompts", 11)
    where = {"where": {"reward": {"mean": {"min": 0.0}}}}
    rule = {"max_lag": 1, "order": order}
    config = ledger_section(data, rule, GROUPS, group=where, writers=6, timeout_s=60.0)
    config["pack"]["plan_width"] = 4
    config["shared_memory"]["keep"] = True
    numbers = [number for number in range(200) if not is_dropped(number)]
    names = ("log", "commits", "fills")

    def lines() -> list[list[Any]]:
        found = [read(tmp_path / name) for name in names]
        for name in names:
            (tmp_path / name).unlink(missing_ok=True)
        for number, own, lag, _ in found[0]:
            assert order == "completion" or own == numbers[GROUPS * number : GROUPS * (number + 1)]
            assert lag <= 1
        return found

    (tmp_path / "call").mkdir()
    ranks = NodeRanks(
        cluster, CALL, write_call(tmp_path / "call", go_on, config, tmp_path, False, 99)
    )
    wait_until(lambda: len(read(tmp_path / "log")) > 4, "the batches")
    ranks.kill()
    before, commits, fills = lines()
    assert cluster.call_ranks(go_on, config, tmp_path, True, 4) == ["", ""]
    log, more, filled = lines()
    assert [line[0] for line in log] == [2, 3, 4, 5]
    assert (
        len({*commits} & {*more}) < 4
    )  # that are later than before, as prompts that had failed did not
    assert len({*map(tuple, fills)} & {*map(tuple, filled)}) < 4 * SIZE
    own = [number for line in [*before[:2], *log] for number in line[1]]
    assert len({*own} & {*numbers}) == len(own) == 6 * GROUPS
    if order == "lease":  # what follows is the same with each
        for path in cluster.shm(1).glob(f"{prefix()}-*"):
            path.unlink()
        assert cluster.call_ranks(go_on, config, tmp_path, True, 2) == ["", ""]
        _, again, _ = lines()
        known = {*commits, *more}
        assert sum(number in known and number % 2 == 0 for number in again) < 4
        assert sum(number in known and number % 2 == 1 for number in again) >= GROUPS // 2
        (refused,) = cluster.call_ranks(go_on, config, tmp_path, False, 3, nodes=1)
        assert "num_stores: 1 here, 2 there" in refused
    for node in range(2):
        for path in cluster.shm(node).glob(f"{prefix()}-*"):
            path.unlink()


def test_the_asynchronous_example_goes_on_on_one_node(cluster: Cluster, tmp_path: Path) -> None:
    """Two nodes, by pdsh, train two batches of four groups with a worker each; two ranks of one go
    on.
    """
    config = json.loads((ROOT / "configs" / "grpo_async.json").read_text())
    config["gear"]["rollout"]["groups"] = 4
    config["gear"]["tables"]["rollouts"]["group"].pop(
        "where"
    )  # so few right answers make few such groups
    config["gear"]["shared_memory"] = {"prefix": prefix()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = [
        "--config",
        str(tmp_path / "config.json"),
        "--out",
        str(tmp_path),
        "--warm-accuracy",
        "0",
    ]
    options += ["--goal", "2", "--workers", "1", "--max-lag", "1", "--save-every", "2"]
    program = ROOT / "examples" / "grpo_async.py"
    first = cluster.run(program, *options, "--iterations", "2", timeout_s=280.0)
    last, *_ = run_ranks(program, 2, *options, "--resume", "--iterations", "4")
    results = [json.loads(re.findall(r'{"greedy.*}', output)[-1]) for output in (first, last)]
    assert [(found["ranks"], found["iterations"]) for found in results] == [(2, 2), (2, 4)]
    of_first_node = 2 * 4 // 2
    of_all = 4 * 4
    assert [found["prompts"]["trained"] for found in results] == [of_first_node, of_all]
    assert max(found["largest_lag"] for found in results) <= 1
