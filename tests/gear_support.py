"""What the tests of stores, replays and launches share: encoded trajectories, data sets, ranks as processes.

Every stored row says which trajectory and step it is, so a test sees from a batch alone whether it holds the
rows that it should.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.schema import Column, Schema

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).resolve().parent / "distributed" / "programs"
SHM = Path("/dev/shm")
STEP = 1000  # a row's code is trajectory * STEP + step

SCHEMA = Schema(
    [
        Column("observation", "float32", (3,), "observation", "T+1"),
        Column("action", "float32", (2,), "action"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
        Column("code", "int64"),
        Column("task", "int64", (), "other", "1"),
    ]
)


def trajectory(
    number: int, num_steps: int, terminated: bool = False, truncated: bool = False
) -> dict[str, Any]:
    """Make the trajectory of a number; its rows hold their codes."""
    codes = number * STEP + np.arange(num_steps + 1)
    ends = np.arange(num_steps) == num_steps - 1
    return {
        "observation": np.stack([codes, codes + 0.25, -codes], axis=1).astype(np.float32),
        "action": np.stack([codes[:-1], -codes[:-1]], axis=1).astype(np.float32),
        "reward": (np.arange(num_steps) % 7 + 1).astype(np.float32),
        "terminated": ends & terminated,
        "truncated": ends & truncated,
        "code": codes[:-1],
        "task": np.array(number, np.int64),
    }


def write_dataset(path: Path, lengths: Sequence[int], split: Mapping[str, float] | None = None) -> Path:
    """Write a data set whose i-th trajectory is `trajectory(i, lengths[i])`."""
    from deepspeed_gear import DatasetWriter

    with DatasetWriter(path, SCHEMA, split=split or {}) as writer:
        for number, steps in enumerate(lengths):
            writer.add(trajectory(number, steps, terminated=number % 2 == 0, truncated=number % 2 == 1))
    return path


def lengths_of(count: int, seed: int = 0, most: int = 30) -> list[int]:
    """Return some lengths, the first of them 1."""
    return [1, *np.random.default_rng(seed).integers(1, most, count - 1).tolist()]


def config_of(data: Path | None = None, /, **options: Any) -> dict[str, Any]:
    """Return a gear section: of a data set, or of a table with a capacity."""
    section: dict[str, Any] = {"timeout_s": 20.0, "shared_memory": {"prefix": prefix()}}
    if data is not None:
        section["data"] = str(data)
    else:
        section["tables"] = {"main": {"capacity_steps": 2000, "capacity_trajectories": 60}}
    return {**section, **options}


def prefix() -> str:
    """Return a prefix of names in /dev/shm that no other test process uses."""
    return os.environ.get("GEAR_TEST_PREFIX", f"gtest{os.getpid()}")


def shared_files(prefix: str, folder: Path = SHM) -> list[str]:
    """List what lies in a node's /dev/shm under a prefix."""
    return sorted(path.name for path in folder.glob(f"{prefix}-*"))


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
    """Wait for something that another process does."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.01)


def in_child(action: Callable[[], Any]) -> int:
    """Run an action in a forked child; return its process id. `exit_status` collects it.

    The child does not outlive this process.
    """
    child = os.fork()
    if child:
        return child
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    try:
        action()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)


def exit_status(child: int) -> int:
    """Wait for a child: its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(child: int) -> None:
    """Kill a child with SIGKILL and wait for its end."""
    os.kill(child, signal.SIGKILL)
    assert exit_status(child) == -signal.SIGKILL


def free_port() -> int:
    """Return a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of ranks: CPU, one thread, the checkout and this module importable."""
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return {**os.environ, **fixed, "GEAR_TEST_PREFIX": prefix(), **extra}


class Ranks:
    """Python programs that form one process group, without DeepSpeed's launcher.

    Args:
        program: Path of the program, or its name in `programs/`.
        count: Number of ranks.
        arguments: Of the program.
        env: Extra environment.
    """

    def __init__(self, program: Path | str, count: int, *arguments: str, **env: str) -> None:
        port, path = str(free_port()), PROGRAMS / program
        self.processes: list[subprocess.Popen[str]] = []
        for rank in range(count):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            rank_env = environment(**{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **place, **env})
            self.processes.append(
                subprocess.Popen(
                    self.command(rank, [sys.executable, "-u", str(path), *arguments]),
                    env=rank_env,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )

    def command(self, rank: int, program: list[str]) -> list[str]:
        """Return what starts a rank: the program as it is."""
        del rank
        return program

    def wait(self, timeout_s: float = 120.0) -> list[tuple[int, str]]:
        """Return exit status and output of every rank; kill what is left after the timeout."""
        until = time.monotonic() + timeout_s
        results = []
        for process in self.processes:
            try:
                output, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.end(process)
                output = process.communicate()[0] + "\n[killed: timed out]"
            results.append((process.returncode, output))
        return results

    def end(self, process: subprocess.Popen[str]) -> None:
        """Kill a rank."""
        process.kill()

    def kill(self) -> None:
        """Kill all ranks with SIGKILL."""
        for process in self.processes:
            self.end(process)
        for process in self.processes:
            process.communicate()


def run_ranks(program: Path | str, count: int, *arguments: str, **env: str) -> list[str]:
    """Run ranks to their end; return their outputs. All must succeed."""
    results = Ranks(program, count, *arguments, **env).wait()
    assert all(status == 0 for status, _ in results), "\n".join(f"[{s}] {out}" for s, out in results)
    return [output for _, output in results]


def launcher(program: Path | str, count: int, *arguments: str) -> list[str]:
    """Return the command of DeepSpeed's launcher for a program."""
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(count)]
    return [*command, "--master_port", str(free_port()), str(PROGRAMS / program), *arguments]


def launch(program: Path | str, count: int, *arguments: str, timeout_s: float = 180.0, **env: str) -> str:
    """Run a program under the real launcher; return its output. It must succeed."""
    status, output = try_launch(program, count, *arguments, timeout_s=timeout_s, **env)
    assert status == 0, output
    return output


def try_launch(
    program: Path | str, count: int, *arguments: str, timeout_s: float = 180.0, **env: str
) -> tuple[int, str]:
    """Run a program under the real launcher; return exit status and output."""
    process = subprocess.Popen(
        launcher(program, count, *arguments),
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, output


class StoreScene:
    """A table with streams, made without a Replay: this process is peer 0; others attach by `attach`.

    Args:
        backend: Of the ops.
        specs: Streams, see `stream_spec`.
        lengths: Of the trajectories that it holds at the beginning.
        num_slots, num_rows, num_peers: Its sizes.
        timeout_s: Of its lock and streams.
        life: How long trajectories stay, see `Life`.
        spare_rows: Rows besides `num_rows` through which extents are moved.
        shard: Which part of the table it is; None: all of it.
    """

    def __init__(
        self,
        backend: str = "cpu",
        specs: Sequence[Any] = (),
        lengths: Sequence[int] = (),
        num_slots: int = 40,
        num_rows: int = 1000,
        num_peers: int = 4,
        timeout_s: float = 20.0,
        life: Any = None,
        spare_rows: int = 0,
        shard: Any = None,
    ) -> None:
        from deepspeed_gear.ops import load_backend
        from deepspeed_gear.selection.kinds import regions_of
        from deepspeed_gear.selection.stream import Stream
        from deepspeed_gear.store.life import Life
        from deepspeed_gear.store.spec import TableSpec, table_layout
        from deepspeed_gear.store.table import Table

        self.ops, self.specs, self.timeout_s = load_backend(backend), list(specs), timeout_s
        self.name, self.nonce = f"{prefix()}-{os.urandom(4).hex()}", "0" * 32
        self.spec = TableSpec(
            "main",
            SCHEMA,
            num_slots,
            num_rows + spare_rows,
            None,
            True,
            True,
            num_peers,
            shard,
            life=life or Life(),
            spare_rows=spare_rows,
        )
        extra = [region for spec in self.specs for region in regions_of(spec, self.spec)]
        meaning = {spec.name: spec.describe() for spec in self.specs}
        self.layout = table_layout(self.spec, extra, meaning)
        self.table = Table.create(self.spec, extra, meaning, self.nonce, self.ops, timeout_s)
        self.streams = [Stream(spec, self.table) for spec in self.specs]
        for stream in self.streams:
            stream.initialise()
        self.count = 0
        for steps in lengths:
            self.add(steps)
        self.table.memory.link(self.name)

    def attach(self, peer: int, **changes: Any) -> tuple[Any, list[Any]]:
        """Attach to the store once more; return table and streams."""
        from deepspeed_gear.selection.stream import Stream
        from deepspeed_gear.store.table import Table

        given = {"expected": self.layout, "nonce": self.nonce, "ops": self.ops, "timeout_s": self.timeout_s}
        table = Table.attach(self.spec, self.name, peer=peer, **{**given, **changes})
        return table, [Stream(spec, table) for spec in self.specs]

    def add(self, num_steps: int) -> int:
        """Add the next trajectory; its number is its id while nothing else adds."""
        from deepspeed_gear.replay import content

        self.count += 1
        return content.add(self.table, self.streams, trajectory(self.count - 1, num_steps), None)

    def close(self) -> None:
        """Remove the store."""
        (SHM / self.name).unlink(missing_ok=True)
        self.table.close()


def priority_rule(alpha: Any = 0.6, beta: Any = 0.4, **options: Any) -> Any:
    """Return how priorities become masses; `alpha` and `beta` are numbers, or functions of the batch."""
    from deepspeed_gear.selection.rules import PriorityRule

    schedules = [f if callable(f) else (lambda _, value=f: value) for f in (alpha, beta)]
    defaults = {"initial": None, "normalize": "batch", "lag": 0, "log_size": 256}
    return PriorityRule(*schedules, **{**defaults, **options})


def stream_spec(kind: str = "random", unit: str = "trajectory", batch: int = 8, **options: Any) -> Any:
    """Return a stream over all anchors, or with the `anchors`, `by_length`, `where`, ... given."""
    from deepspeed_gear.selection.anchors import AnchorRule
    from deepspeed_gear.selection.cut import StreamSpec
    from deepspeed_gear.selection.rules import MassRule

    rule = MassRule(
        unit,  # type: ignore[arg-type]
        options.get("by_length", False),
        options.get("anchors", AnchorRule.all()),
        options.get("where", ()),
        options.get("split", {}),
        options.get("split_index", 0),
        weight=options.get("weight"),
        window=options.get("window"),
    )
    extra = {name: options[name] for name in ("priorities", "drop", "num_shards") if name in options}
    seed, depth = options.get("seed", 0), options.get("depth", 4)
    return StreamSpec(options.get("name", "train"), kind, rule, seed, 7, batch, depth, **extra)


def check_whole(table: Any, streams: Sequence[Any]) -> None:
    """Check that everything derived in a store agrees with its slot table; takes the lock."""
    from deepspeed_gear.selection.cut import NOTHING
    from deepspeed_gear.selection.masses import NUM_DIRTY
    from deepspeed_gear.selection.priorities import PriorityMasses
    from deepspeed_gear.store.extents import FREE_ROWS
    from deepspeed_gear.store.table import (
        COMMITTED,
        FIRST_ROW,
        FREE,
        ID,
        NEXT_ID,
        NUM_COMMITTED,
        NUM_ROWS,
        NUM_STEPS,
        STATE,
        STEPS_COMMITTED,
    )

    with table.lock:
        slots, control = table.slots, table.control
        committed = np.nonzero(slots[:, STATE] == COMMITTED)[0]
        assert control[NUM_COMMITTED] == len(committed)
        assert control[STEPS_COMMITTED] == slots[committed, NUM_STEPS].sum()
        ids = slots[committed, ID]
        assert len(np.unique(ids)) == len(ids)
        assert control[NEXT_ID] > ids.max(initial=-1)
        used = slots[slots[:, STATE] != FREE]
        extents = sorted(used[:, [FIRST_ROW, NUM_ROWS]].tolist())
        ends = [0, *(first + count for first, count in extents)]
        assert all(first >= end for (first, _), end in zip(extents, ends, strict=False))
        at_home = [
            end
            for (first, _), end in zip(extents, ends[1:], strict=True)
            if first != table.spec.capacity_rows
        ]
        assert max(at_home, default=0) <= table.spec.capacity_rows
        assert control[FREE_ROWS] == table.spec.capacity_rows - used[:, NUM_ROWS].sum()
        for stream in streams:
            masses = stream.masses
            masses.take_changes()
            sums = masses.sums.clone()
            stream.ops.tree_build_(sums, masses.num_items)
            assert sums.equal(masses.sums), "an inner node is not the sum of its children"
            waiting = np.nonzero(masses.queued != NOTHING)[0]
            dirty = masses._dirty[: masses.words[NUM_DIRTY]]
            assert sorted(dirty.tolist()) == waiting.tolist()
            effective = np.where(masses.queued != NOTHING, masses.queued, masses.applied)
            wanted = np.zeros(len(slots), np.int64)
            wanted[committed] = masses.of(committed)
            if stream.spec.rule.window is None:
                assert (effective == wanted).all()
            else:
                assert np.isin(effective, [0, *wanted]).all()
                assert (effective <= wanted).all()
            if isinstance(masses, PriorityMasses):
                check_priorities_whole(masses)


def check_priorities_whole(masses: Any) -> None:
    """Check that masses, minima and counts are those of the stored priorities. Wants the lock."""
    import torch

    from deepspeed_gear.ops import reference
    from deepspeed_gear.ops.constants import DRAWABLE
    from deepspeed_gear.selection.priorities import ALPHA

    leaves = torch.empty(masses.num_items, dtype=torch.int64)
    reference.mass_(leaves, torch.from_numpy(masses.values.copy()), int(masses.words[ALPHA]))
    assert (leaves.numpy() == masses.leaves).all(), "a leaf is not the mass of its priority"
    if len(masses._minima):
        minima = torch.empty_like(masses._minima)
        reference.minima_build_(minima, masses.sums, masses.num_items)
        assert minima.equal(masses._minima), "a node is not the least of its children"
    assert masses.counts[DRAWABLE] == np.count_nonzero(masses.leaves)
    admitted = np.zeros(masses.num_items, bool)
    slots = np.nonzero(masses.applied)[0]
    items, drawable = masses._items_of(slots, masses.applied[slots])
    admitted[items] = drawable
    assert not masses.values[~admitted].any(), "an item that is gone has a priority"


def killed_at(line: int, action: Callable[[], None]) -> bool:
    """Run an action in a child that is killed before its line-th line in store, selection, writer or replay.

    Returns:
        Whether it came so far.
    """
    traced = tuple(str(ROOT / "deepspeed_gear" / part) for part in ("store", "selection", "writer", "replay"))

    def run() -> None:
        left = line

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.startswith(traced):
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        action()

    status = exit_status(in_child(run))
    assert status in (0, -signal.SIGKILL)
    return status != 0


def every_death(
    make: Callable[[], StoreScene], act: Callable[[Any, Any], None], stride: int
) -> Iterator[StoreScene]:
    """Yield a store for every stride-th place of death of a peer that attaches and acts."""
    line, deaths = 1, 0
    while True:
        scene = make()
        died = killed_at(line, lambda scene=scene: act(*scene.attach(1)))  # type: ignore[misc]
        yield scene
        scene.close()
        if not died:
            break
        line, deaths = line + stride, deaths + 1
    assert deaths * stride > 80, "too few places of death: the trace saw nothing"
