"""What some nodes have saved goes on on any number of them, with the batches that would
have come.
"""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replay_cases
import torch.distributed as dist
from cluster_support import PROGRAMS, Cluster, rank_environment
from gear_support import SCHEMA, lengths_of, prefix, trajectory, write_dataset
from replay_cases import BATCH, FOLLOWING, WINDOWS, digests, prioritized
from replay_support import streams_of
from warm_python import PIPE, WarmProcess

from deepspeed_gear import DatasetWriter, Replay
from deepspeed_gear.errors import GearError
from deepspeed_gear.ops.records import Slot

LONG = os.environ.get("GEAR_LONG_TESTS") == "1"
pytestmark = pytest.mark.timeout(
    3600 if LONG else 900
)  # of several launches, each with a limit of its own

KILLS = PROGRAMS.parents[1] / "crash" / "programs" / "save_kills.py"
BEFORE = 5
BEHIND = 5
LOST = ("prioritized_table", "online")
ONLINE = {"capacity_steps": 1600, "capacity_trajectories": 100, "max_length": 30}
Found = dict[str, dict[str, dict[str, Any]]]  # by action and case


@pytest.fixture(scope="module")
def ran(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """One launch for each number of nodes, each with all cases; a shard is lost when all have
    loaded it.
    """
    folder = tmp_path_factory.mktemp("checkpoint")
    data = folder / "data"
    one = folder / "one"
    two = folder / "two"
    write_dataset(data / "a", lengths_of(40), split={"eval": 0.3})
    write_dataset(data / "b", lengths_of(25))

    def on(nodes: int, **actions: Path) -> Found:
        return cluster.call_ranks(act, data, actions, nodes=nodes, timeout_s=300)[0]

    return {
        "one": act(data, {"save": one}),
        "two": on(2, save=two, load=one),
        "again": act(data, {"load": two}),
        "four": on(4, load=two, lose=two),
    }


def test_two_nodes_go_on_as_one_process_does(ran: dict[str, Found]) -> None:
    alone = ran["one"]["save"]
    nodes = ran["two"]["save"]
    assert len(alone) == len(nodes) == 13
    for case, found in nodes.items():
        assert found["again"] == [found["behind"]] * 2, case
        if not case.startswith(
            "changed"
        ):  # where rows are freed and used again, their order is the node's
            assert found == alone[case], case


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("one", "two"), ("two", "four"), ("two", "again")],
    ids="1-2 2-4 2-1".split(),
)
def test_any_number_of_nodes_goes_on(ran: dict[str, Found], saved: str, loaded: str) -> None:
    expected = ran[saved]["save"]
    nodes = ran[loaded]["load"]
    assert len(nodes) == 13
    for case, found in nodes.items():
        assert found["behind"] == expected[case]["behind"], case
        assert found["passed"] == expected[case]["passed"], case


def test_a_shard_that_is_lost_is_named_on_all_ranks(ran: dict[str, Found]) -> None:
    lost = ran["four"]["lose"]
    assert len(lost) == 2
    for found in lost.values():
        changed, removed = found["said"]
        assert len(changed) == len(removed) == 4
        assert all(
            "shard-1/stream.train.queued.npy must be as it was saved" in text for text in changed
        )
        assert all(
            "CheckpointError" in text and "shard-1/manifest.json" in text for text in removed
        )
        assert found["goes_on"] == 2


def test_no_kill_of_two_nodes_loses_a_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    """The ranks save over one tag; the next ones load it, wherever DeepSpeed's own file of it is
    whole.
    """
    kills = 200 if LONG else 3
    env = {**rank_environment(), "GLOO_SOCKET_IFNAME": "eth0"}
    common = ["engine", "--folder", str(tmp_path), "--kills", str(kills), "--master", "10.77.0.1"]
    command = [str(KILLS), *common, "--port", "21000", "--ranks"]
    nodes = [
        WarmProcess([*command, str(node)], env, PIPE, subprocess.STDOUT, inside=cluster.inits[node])
        for node in range(2)
    ]
    outputs = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(outputs)
    found = json.loads(outputs[0].splitlines()[-1])
    assert (found["kills"], found["lost"]) == (kills, 0)
    assert found["loaded"] > 0


def test_two_nodes_go_on_with_grown_data_as_one_process_does(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The shards are others than before: old priorities move with their trajectories."""
    data = tmp_path / "data"
    one = tmp_path / "one"
    two = tmp_path / "two"
    # Selections that wait in a save are of the old data: how many there are depends on a thread.
    section = {**cases(tmp_path)["n_step"], "data": str(data), "prefetch": 0}
    write_dataset(data, lengths_of(15))
    save(section, one)
    cluster.call_ranks(save, section, two, nodes=2, timeout_s=100)
    with DatasetWriter(data, SCHEMA, append=True) as writer:
        for number, steps in enumerate(lengths_of(9, seed=1), 15):
            writer.add(trajectory(number, steps))
    alone = load(section, one)
    for folder in (one, two) if LONG else (two,):
        for found in cluster.call_ranks(load, section, folder, nodes=2, timeout_s=100):
            assert found["behind"] == alone["behind"]


# ---- on each rank, or alone ----------------------------------------------------------------------


def act(data: Path, actions: dict[str, Path]) -> Found:
    """Save, load or lose each case in a folder; what ranks had is joined to global batches.

    So it is the same on any number of ranks.
    """
    act_by = {"save": save, "load": load, "lose": lose}
    found = {}
    for action, folder in actions.items():
        of_action = {n: one for n, one in cases(data).items() if action != "lose" or n in LOST}
        found[action] = {
            name: act_by[action](one, folder / name) for name, one in of_action.items()
        }
    return found


def cases(data: Path) -> dict[str, dict[str, Any]]:
    """Return configs by name: of data sets, and of tables that all ranks fill (and change, if so
    named).
    """
    known = replay_cases.cases(data / "a", data / "b")
    names = ("verified", "mapped", "short_epochs", "recent", "prioritized_plain", "mixture")
    steps = {"sampler": prioritized("step"), "prefetch": 1}
    online: dict[str, Any] = {"tables": {"main": ONLINE}, "fields": WINDOWS}
    standard, bounded = (
        {"code": {"normalize": kind}, **WINDOWS} for kind in ("mean_std", "min_max")
    )
    return {
        **{name: known[name] for name in names},
        "prioritized_table": {**known["prioritized_table"], "prefetch": 1, "count_draws": True},
        "n_step": {**known["n_step"], "fields": {**FOLLOWING, "task": {}}, **steps, "prefetch": 2},
        "online": {**online, **steps},
        "online_uniform": {**online, "fields": standard, "prefetch": 2},
        "changed": {**online, **steps},
        "changed_uniform": {**online, "prefetch": 2},
        "changed_epoch": {
            **online,
            "fields": bounded,
            "sampler": {"kind": "epoch", "unit": "step"},
            "prefetch": 1,
        },
    }


class Run:
    """A case on this rank."""

    def __init__(self, section: dict[str, Any]) -> None:
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.online = "main" in section.get("tables", {})
        common = {"timeout_s": 20.0, "shared_memory": {"prefix": prefix()}, "batch_size": BATCH}
        self.replay = Replay(
            {**common, **section}, schemas={"main": SCHEMA} if self.online else None
        )
        self.reports = self.replay.config.item_sampler.kind == "prioritized"

    def add(self, first: int, count: int) -> None:
        """Add trajectories, in parts of the ranks: their stored order is the same on any number of
        these.
        """
        lengths = lengths_of(48, seed=3)
        for rank in range(self.world):
            if rank == self.rank:
                for number in range(
                    first + count * rank // self.world, first + count * (rank + 1) // self.world
                ):
                    self.replay.add(trajectory(number, lengths[number], terminated=True))
            self.wait()

    def change(self) -> None:
        """Remove and add trajectories, so that the orders of slots, of rows and of ids are all
        different.
        """
        if self.rank == 0:
            self.replay.remove(self.replay.tables["main"].slots[[1, 2, 4], Slot.ID].copy())
        self.wait()
        self.take(2)
        self.add(24, 8)

    def evaluate(self) -> str:
        """Return a digest of a pass over the evaluation split."""
        valid: dict[str, str] = {}
        for batch in self.replay.iterator("eval") if "eval" in streams_of(self.replay) else ():
            of_batch = zip(digests(batch).items(), batch.valid.tolist(), strict=True)
            valid.update(item for item, is_valid in of_batch if is_valid)
        return self.joined(valid)

    def take(self, count: int, by_id: bool = False) -> list[str]:
        """Take global batches, report priorities of their items, and return a digest of each."""
        found = []
        for _ in range(count):
            batch = self.replay.sample()
            found.append(
                self.joined(digests(batch, with_ids=not self.online))
            )  # ids show which node has added
            if not self.reports:
                continue
            values = (
                (batch["task"] * 2654435761 + batch.anchor * 40503) % 1000
            ).float() / 100 + 0.01
            if by_id:
                self.replay.set_priorities(batch.trajectory_id, values, batch.anchor)
            else:
                self.replay.update_priorities(batch, values)
        return found

    def joined(self, mine: dict[str, str]) -> str:
        """Return a digest of what all ranks had, in the order of sample numbers."""
        every = sorted(sample for of_rank in self.all_gather(mine) for sample in of_rank.items())
        return hashlib.sha256(repr(every).encode()).hexdigest()[:12]

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier()

    def state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state, if it is equal on all ranks."""
        assert all(other == state for other in self.all_gather(state))
        return state


def save(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Save in the middle; return what comes after that, going on and loaded again."""
    run = Run(section)
    if run.online:
        run.add(0, 24)
    before = run.take(BEFORE)
    if folder.name.startswith("changed"):
        run.change()
    state = run.state(run.replay.save(folder))
    if run.rank == 0:
        (folder / "state.json").write_text(json.dumps(state))
    behind = run.take(BEHIND)
    again = []
    for _ in range(2):
        run.replay.load(folder, state)
        again.append(run.take(BEHIND))
    passed = run.evaluate()
    run.replay.load_state_dict(run.state(run.replay.state_dict()))
    more = run.take(
        2
    )  # where priorities change, how far the tables are depends on how far a thread was
    run.replay.close()
    position = {
        name: value for name, value in state.items() if name != "save"
    }  # each save has its own id
    found = {
        "before": before,
        "state": position,
        "behind": behind,
        "passed": passed,
        "again": again,
    }
    return found if run.reports else {**found, "more": more}


def load(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load; return what comes."""
    run = Run(section)
    run.replay.load(folder, json.loads((folder / "state.json").read_text()))
    found = {"behind": run.take(BEHIND, by_id=run.online), "passed": run.evaluate()}
    run.replay.close()
    return found


def lose(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Change a file of a shard, then lose the shard; return the errors of each rank."""
    run = Run(section)
    if run.online:
        run.add(0, 24)
    state = json.loads((folder / "state.json").read_text())
    said = []
    (table,) = run.replay.tables
    shard = folder / table / "shard-1"
    for damage in (
        lambda: np.save(shard / "stream.train.queued.npy", np.zeros(3)),
        lambda: shutil.rmtree(shard),
    ):
        if run.rank == 0:
            damage()
        run.wait()
        try:
            run.replay.load(folder, state)
            said.append(run.all_gather("nothing"))
        except GearError as error:
            said.append(run.all_gather(f"{type(error).__name__}: {error}"))
    found = {"said": said, "goes_on": len(run.take(2))}
    run.replay.close()
    return found
