"""What happens to a training over nodes when ranks or nodes die, stand still, are cut off or
differ.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster_support import Cluster, NodeRanks
from gear_support import (
    SCHEMA,
    config_of,
    lengths_of,
    prefix,
    shared_files,
    trajectory,
    wait_until,
    write_dataset,
)
from process_support import CALL, write_call
from simulators import hold_names

from deepspeed_gear import GearError, Replay
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.checkpoint import table_files, table_loader
from deepspeed_gear.sampling.batch_sizes import BatchInfo

FIELDS = {"observation": {"length": 2}, "action": {"length": 2}}
NODES = 2
RANKS = 2
TIMEOUT_S = 4.0
END_S = 280.0  # nearly as long as a test may take


class TrainingRanks(NodeRanks):
    """Ranks that train until something happens: RANKS on each of NODES."""

    def __init__(
        self, cluster: Cluster, folder: Path, section: dict[str, Any], **plan: Any
    ) -> None:
        self.folder = folder
        super().__init__(
            cluster,
            CALL,
            write_call(folder, trained, folder, section, plan),
            nodes=NODES,
            ranks=RANKS,
        )

    def pid(self, rank: int) -> int:
        """Return the process of a rank as this machine numbers it; the rank has written its own
        number.
        """
        own = (self.folder / f"step-{rank}").read_text()
        for pid in self.cluster.pids(rank // RANKS, "warm_python"):
            if f"\t{own}\n" in Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2]:
                return pid
        raise AssertionError(f"rank {rank} does not run")

    def results(self, count: int) -> list[tuple[int, str]]:
        """Wait for the first ranks, one after the other; return exit status and output of each."""
        outputs = [process.communicate(timeout=END_S)[0] for process in self.processes[:count]]
        return [
            (process.returncode, out) for process, out in zip(self.processes, outputs, strict=False)
        ]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "set", lengths_of(40))


@pytest.fixture
def train(cluster: Cluster, tmp_path: Path, data: Path) -> Iterator[Callable[..., TrainingRanks]]:
    """Start a training and wait for its first steps."""
    started: list[TrainingRanks] = []

    def start(plan: dict[str, int] | None = None, **options: Any) -> TrainingRanks:
        section = config_of(data, timeout_s=TIMEOUT_S, **options)
        ranks = TrainingRanks(cluster, tmp_path, section, **(plan or {}))
        started.append(ranks)
        steps = [tmp_path / f"step-{rank}" for rank in range(NODES * RANKS)]

        def begun() -> bool:
            return all(step.exists() for step in steps)

        wait_until(lambda: begun() or ranks.ended(), "the first steps")
        assert begun(), "\n".join(output for _, output in ranks.wait(5.0))
        return ranks

    yield start
    for ranks in started:
        ranks.kill()


def check_clean(cluster: Cluster) -> None:
    """Check that nothing of the run is left on any node, and that `gear clean` finds nothing."""
    for node in range(NODES):
        assert cluster.pids(node, "warm_python") == []
        assert shared_files(prefix(), cluster.shm(node)) == []
        found = cluster.exec(node, sys.executable, "-m", "deepspeed_gear.cli.main", "clean")
        assert "removed" not in found.lower() or "0" in found or "nothing" in found.lower(), found


def check_named(
    results: list[tuple[int, str]],
    others: list[int],
    lost: str,
    or_node: str = "node 1 \\(node1\\), ranks 2, 3",
) -> None:
    """Check that ranks ended with an error that names what was lost: a rank or its node."""
    names = [f"Error: {lost}", f"gear: error on rank [0-3]: {lost}", *filter(None, [or_node])]
    for rank in others:
        status, output = results[rank]
        assert status != 0, output
        assert any(re.search(name, output) for name in names), (
            f"rank {rank} [{status}]:\n{output[-3000:]}"
        )


PACKS = {
    "pack": {"tokens": 128},
    "batch": {"trajectories": 12},
    "sampler": {"kind": "uniform", "unit": "trajectory"},
}


@pytest.mark.parametrize(
    ("lost", "options"),
    [(3, {"prefetch": 0}), (2, {"prefetch": 2}), (2, PACKS)],
    ids=["rank", "leader", "leader, packs"],
)
def test_a_killed_rank_is_named(
    lost: int, options: dict[str, Any], train: Callable[..., TrainingRanks], cluster: Cluster
) -> None:
    ranks = train(**options)
    os.kill(ranks.pid(lost), signal.SIGKILL)
    others = [rank for rank in range(4) if rank != lost]
    check_named(ranks.wait(END_S), others, f"rank {lost} ")
    check_clean(cluster)


@pytest.mark.parametrize(
    ("fails", "prefetch"), [(3, 1), (2, 0), (0, 2)], ids=["rank", "leader", "first"]
)
def test_a_rank_that_fails_is_named(
    fails: int, prefetch: int, train: Callable[..., TrainingRanks], cluster: Cluster
) -> None:
    """By its error, on all others, though it has closed its replay as one does that has ended."""
    ranks = train({"fails": fails, "closes": fails == 0}, prefetch=prefetch)
    others = [rank for rank in range(4) if rank != fails]
    results = ranks.wait(END_S)
    lost = rf"rank {fails} \(.*\), which has failed with ValueError: of this test"
    check_named(results, others, lost, or_node="")
    assert "ValueError: of this test" in results[fails][1]
    check_clean(cluster)


def test_a_rank_that_ends_early_is_named(
    train: Callable[..., TrainingRanks], cluster: Cluster
) -> None:
    """It has prepared the turn that the others take, and they wait in a collective that it does not
    enter.

    If its batch was late they are told before they go on.
    """
    ranks = train({"ends": 3}, prefetch=2)
    results = ranks.results(3)
    lost = r".*rank 3.* ended after 6 of 7 batch barriers"
    check_named(results, [0, 1, 2], lost, or_node="")
    os.kill(ranks.pid(3), signal.SIGKILL)
    ranks.wait(5.0)
    check_clean(cluster)


def test_a_rank_that_stands_still_is_named(
    train: Callable[..., TrainingRanks], cluster: Cluster
) -> None:
    ranks = train(prefetch=1)
    pid = ranks.pid(3)
    os.kill(pid, signal.SIGSTOP)
    results = ranks.results(3)
    check_named(results, [0, 1, 2], "rank 3 ")
    os.kill(pid, signal.SIGKILL)
    ranks.wait(5.0)
    check_clean(cluster)


@pytest.mark.parametrize("how", ["stopped", "killed", "cut off"])
def test_a_node_that_is_lost_is_named(
    how: str, train: Callable[..., TrainingRanks], cluster: Cluster
) -> None:
    ranks = train(prefetch=1)
    pids = [ranks.pid(2), ranks.pid(3)]
    if how == "cut off":
        cluster.link(1, "down")
    else:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    results = ranks.results(2)
    check_named(results, [0, 1], "node 1 ")
    if how == "stopped":
        # They find themselves alone, and end. What has started a rank stops and goes on with it.
        for pid in [*pids, *(process.pid for process in ranks.processes[2:])]:
            os.kill(pid, signal.SIGCONT)
    rest = ranks.wait(END_S)[2:]
    if how != "killed":
        for status, output in rest:
            assert status != 0
            assert "killed: timed out" not in output, output[-3000:]
    check_clean(cluster)


@pytest.mark.parametrize("lingers", [0, 2], ids=["of the first node", "of another"])
def test_a_rank_may_go_on_when_the_others_have_ended(
    lingers: int, cluster: Cluster, tmp_path: Path, data: Path
) -> None:
    """As the one that evaluates: no rank is lost or ended, also where the rendezvous store has
    gone.

    The next batch is prepared late there, so the other node has held its own early, and the thread
    of that node waits in a selection that this one does not come to.
    """
    section = config_of(data, timeout_s=TIMEOUT_S, prefetch=2)
    for status, output in TrainingRanks(cluster, tmp_path, section, steps=5, lingers=lingers).wait(
        180.0
    ):
        assert status == 0, output
        assert "error" not in output.lower(), output
    check_clean(cluster)


def test_what_differs_or_does_not_fit_is_refused_on_every_node(
    cluster: Cluster, tmp_path: Path, data: Path
) -> None:
    """Other data, another seed, an unknown sampler, and a /dev/shm that is full, on one node or
    rank.
    """
    right = config_of(data, timeout_s=TIMEOUT_S)
    other = {**right, "data": str(write_dataset(tmp_path / "other", lengths_of(41)))}
    attempts = {
        "must be the same data set on all ranks": [right, right, other, other],
        "gear.seed": [right, right, right, {**right, "seed": 99}],
        "gear.sampler": [right, right, right, {**right, "sampler": {"kind": "unheard"}}],
        "/dev/shm must have": [right] * 4,
    }
    filler = cluster.shm(1) / "filler"
    try:
        for index, size in enumerate(
            ["1G", *["100M"] * 10, *["10M"] * 10, *["1M"] * 10, *["100K"] * 10]
        ):
            subprocess.run(
                ["fallocate", "-l", size, f"{filler}{index}"], check=False, capture_output=True
            )
        given = refused, [*attempts.values()]
        results = cluster.call_ranks(*given, nodes=NODES, ranks=RANKS, timeout_s=180.0)
    finally:
        for path in cluster.shm(1).glob("filler*"):
            path.unlink()
    for said in results:
        assert [text in error for text, error in zip(attempts, said, strict=True)] == [True] * 4, (
            said
        )
    check_clean(cluster)


def test_nodes_whose_processes_are_all_killed_keep_no_store(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A table with writers, a board and a loader on each node, under DeepSpeed's launcher."""
    table = {"capacity_steps": 500, "remove": "fifo", "writers": 1}
    section = {"tables": {"main": table}, "batch_size": 4, "shared_memory": {"prefix": prefix()}}
    launch = cluster.start(CALL, write_call(tmp_path, hold_names, tmp_path, section))
    for rank in range(2):
        wait_until((tmp_path / f"ready-{rank}").exists, f"the start of rank {rank}")
    for node in range(2):
        assert (
            len(shared_files(prefix(), cluster.shm(node)))
            == len(cluster.pids(node, "reaper.py"))
            == 3
        )
        for pid in launch.pids(node):
            os.kill(pid, signal.SIGKILL)
    for node in range(2):
        wait_until(lambda node=node: not shared_files(prefix(), cluster.shm(node)), "the reapers")  # type: ignore[misc]
        wait_until(lambda node=node: not cluster.pids(node, "reaper.py"), "their end")  # type: ignore[misc]
    launch.kill()


@pytest.mark.parametrize("where", ["save", "load"])
def test_a_rank_that_is_killed_in_a_save_or_a_load_is_named(
    where: str, cluster: Cluster, tmp_path: Path
) -> None:
    """It is the one that sends the heartbeats of its node; by the timeout that is found after 10
    minutes.
    """
    ranks = NodeRanks(
        cluster, CALL, write_call(tmp_path, checkpointed, tmp_path, where), nodes=NODES, ranks=RANKS
    )
    results = ranks.wait(240.0)
    for rank in (0, 1, 3):
        text = (tmp_path / f"error-{rank}").read_text()
        assert re.search(r"rank 2 \(|node 1 \(node1\)", text), (text, results[rank])
        assert "must answer" not in text


# ---- on each rank, without DeepSpeed -------------------------------------------------------------


def refused(attempts: list[list[dict[str, Any]]]) -> list[str]:
    """Return the errors of this rank's sections."""
    found = []
    info = BatchInfo(4, 1, dist.get_world_size())
    for sections in attempts:
        with pytest.raises(GearError) as error:
            Replay(sections[dist.get_rank()], info=info)
        found.append(str(error.value))
    return found


def checkpointed(folder: Path, where: str) -> None:
    """Save on each node's own disk, which is refused, and where all share it; rank 2 dies in that
    or in the load. The others write their error into FOLDER/error-RANK.
    """
    rank = dist.get_rank()
    table = {"capacity_steps": 500, "remove": "fifo"}
    section = {
        "tables": {"main": table},
        "fields": {"code": {}},
        "shared_memory": {"prefix": prefix()},
    }
    replay = Replay(section, schemas={"main": SCHEMA}, info=BatchInfo(4, 1, dist.get_world_size()))
    replay.add(trajectory(rank, 5))
    with pytest.raises(GearError, match="must be one folder that all nodes share"):
        replay.save(f"/dev/shm/{prefix()}-save")
    shutil.rmtree(f"/dev/shm/{prefix()}-save", ignore_errors=True)

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "load":
        replay.save(folder / "save")
    if rank == 2:
        if where == "save":
            table_files.save_table = die
        else:
            table_loader.read_table = die
    try:
        replay.save(folder / "save") if where == "save" else replay.load(folder / "save")
    except GearError as error:
        (folder / f"error-{rank}").write_text(str(error))
    os._exit(0)


def observations(replay: Replay, packs: bool) -> Iterator[torch.Tensor]:
    """Yield those of each micro batch, of packs or of windows."""
    while packs:
        for micro in replay.step():
            yield micro["observation"]
    while True:
        yield replay.sample()["observation"]


def trained(folder: Path, section: dict[str, Any], plan: dict[str, Any]) -> None:
    """Train until something happens to a rank. Every rank writes FOLDER/step-RANK after its third
    step.

    A plan may have `steps`; the rank that `lingers` after them while its thread prepares the next
    batch late; which rank `fails` at step 6 (`closes`: it closes its replay in the course of that),
    or `ends` then: it closes its replay and lives on.
    """
    rank = dist.get_rank()
    num_prepared = 0

    def last_one_late(batch: Batch, keys: torch.Tensor) -> Batch:
        """Take a second for the batch after the last that is used."""
        nonlocal num_prepared
        num_prepared += 1
        time.sleep(float(num_prepared == plan["steps"] + 1))
        return batch

    with Replay(section, info=BatchInfo(4, 1, dist.get_world_size())) as replay:
        if rank == plan.get("lingers"):
            replay.transform = last_one_late
        step = 0
        taken = observations(replay, "pack" in section)
        while plan.get("steps") is None or step < plan["steps"]:
            gradient = next(taken).sum()
            dist.all_reduce(gradient)
            assert torch.isfinite(gradient)
            if "lingers" in plan or "ends" in plan:
                time.sleep(0.2)  # so that batches wait
            step += 1
            if step == 3:
                started = folder / f"started-{rank}"
                started.write_text(str(os.getpid()))
                started.rename(folder / f"step-{rank}")
            if step == 6 and rank == plan.get("fails"):
                try:
                    raise ValueError("of this test")
                finally:
                    if plan["closes"]:
                        replay.close()
            if step == 6 and rank == plan.get("ends"):
                replay.close()
                time.sleep(600)
        if rank == plan.get("lingers"):
            time.sleep(3 * TIMEOUT_S)  # one call, as a long evaluation may be
    dist.destroy_process_group()
    sys.exit()  # no rank waits for the others
