"""Whatever happens to a rank: nothing hangs, all ranks raise the error, nothing stays in shared
memory.

GEAR_LONG_TESTS=1 kills 20 times instead of 4.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
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
from gear_support import SHM, STEP, lengths_of, shared_files, wait_until, write_dataset
from process_support import (
    CALL,
    Ranks,
    call_on_ranks,
    environment,
    in_child,
    kill,
    launcher,
    reapers,
    run_ranks,
    write_call,
)
from simulators import hold_names
from warm_python import WarmProcess

import deepspeed_gear
from deepspeed_gear import Replay, TrajectoryWriter
from deepspeed_gear.errors import GearError, PeerError, StoreError
from deepspeed_gear.store.shared_memory import SharedMemory

ROUNDS = 20 if os.environ.get("GEAR_LONG_TESTS") == "1" else 4
START_S = 120.0  # of two ranks on a busy machine
_numbers = itertools.count()
left: list[Replay] = []  # of a process that does not close it


@pytest.fixture
def name() -> Iterator[str]:
    """A prefix in /dev/shm of this test alone; what is left of it is the test's failure, and
    removed.
    """
    prefix = f"gfault{os.getpid()}x{next(_numbers)}"
    yield prefix
    left = shared_files(prefix)
    for file in left:
        (SHM / file).unlink(missing_ok=True)
    assert left == []


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", lengths_of(40))


def section_of(data: Path | str, name: str, **options: Any) -> dict[str, Any]:
    """Return a section whose store lies in shared memory."""
    return {
        "data": {"path": str(data), "load": "memory"},
        "sampler": {"kind": "uniform", "unit": "step"},
        "fields": {"observation": {"length": 2}, "action": {"length": 1}, "code": {"length": 1}},
        "shared_memory": {"prefix": name},
        "timeout_s": 20.0,
        **options,
    }


def train(
    folder: Path, sections: list[Any], steps: int | None = None, raise_on: int | None = None
) -> None:
    """Train a small model until something happens to a rank.

    Every rank writes FOLDER/pid-RANK when it starts, and FOLDER/step-RANK after its first step.

    Args:
        sections: The gear section of each rank, or the path of a config.
        steps: None: without end.
        raise_on: The rank whose fourth step raises.
    """
    rank = dist.get_rank()
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    config = sections[rank]
    if isinstance(config, dict):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
            "gear": config,
        }
    model = torch.nn.Linear(3, 2)
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    for step in itertools.count() if steps is None else range(steps):
        batch = engine.gear_sample()
        loss = (engine(batch["observation"][:, 0]) - batch["action"][:, 0]).square().mean()
        engine.backward(loss)
        engine.step()
        if step == 0:
            (folder / f"step-{rank}").touch()
        if step == 3 and rank == raise_on:
            raise RuntimeError("a fault in the user's training loop")
    engine.destroy()


def run_training(folder: Path, sections: list[Any], *options: int | None) -> Ranks:
    """Start ranks that train, without the launcher."""
    folder.mkdir(exist_ok=True)
    return Ranks(CALL, len(sections), write_call(folder, train, folder, sections, *options))


class Run:
    """Ranks that train under the real launcher, in a session of its own."""

    def __init__(self, folder: Path, sections: list[Any]) -> None:
        self.folder = folder
        self.num_ranks = len(sections)
        folder.mkdir()
        command = launcher(CALL, self.num_ranks, write_call(folder, train, folder, sections))
        self._port = command[command.index("--master_port") + 1]
        self._log = (folder / "log").open("w")
        both = subprocess.STDOUT
        self.process = WarmProcess(command, environment(), self._log, both, start_new_session=True)

    @property
    def output(self) -> str:
        return (self.folder / "log").read_text()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._log.close()
        for file in SHM.glob(
            f"deepspeed_*_{self._port}_*"
        ):  # DeepSpeed's own, which it leaves when killed
            file.unlink(missing_ok=True)

    def wait_for(self, what: str, rank: int | None = None) -> None:
        """Wait for a file of some or all ranks."""
        ranks = range(self.num_ranks) if rank is None else [rank]
        paths = [self.folder / f"{what}-{r}" for r in ranks]
        wait_until(lambda: self._ended() or all(p.exists() for p in paths), what, START_S)
        assert not self._ended(), self.output

    def _ended(self) -> bool:
        return self.process.poll() is not None

    def pid(self, rank: int) -> int:
        return int((self.folder / f"pid-{rank}").read_text())

    def end(self, timeout_s: float) -> int:
        """Wait until the launcher and all ranks have ended by themselves; return the
        exit status.
        """
        status = self.process.wait(timeout_s)
        wait_until(lambda: not group_lives(self.process.pid), "the end of the ranks", timeout_s)
        return status

    def kill(self) -> None:
        """End the launcher and all ranks at once with SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        wait_until(lambda: not group_lives(self.process.pid), "the end of the ranks")


def group_lives(group: int) -> bool:
    """Return whether a process of the group runs; zombies do not."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = entry.read_text().rpartition(")")[2].split()
            if int(words[2]) == group and words[0] != "Z":
                return True
    return False


def run_samples(
    action: Callable[..., None], folder: Path, section: dict[str, Any], *more: int
) -> Ranks:
    """Start two ranks that sample without an engine."""
    folder.mkdir(exist_ok=True)
    return Ranks(CALL, 2, write_call(folder, action, folder, section, *more))


def check_success(ranks: Ranks) -> None:
    for status, output in ranks.wait(START_S):
        assert status == 0, output


def wait_for(path: Path) -> None:
    wait_until(path.exists, path.name, START_S)


def sample(replay: Replay, count: int) -> None:
    """Take batches, and check that every row is the one that the batch says."""
    for _ in range(count):
        batch = replay.sample()
        codes = batch.trajectory_id * STEP + batch.anchor
        assert batch["code"][:, 0].equal(codes), (batch["code"], codes)
        assert batch["observation"][:, 0, 1].equal(codes.float() + 0.25)


def rounds(folder: Path, section: dict[str, Any], count: int) -> None:
    """Build a Replay, take ten batches and close, again and again."""
    for _ in range(count):
        with Replay(section) as replay:
            sample(replay, 10)


def paused(folder: Path, section: dict[str, Any], count: int = 1) -> None:
    """As `rounds`, but wait for FOLDER/go while the store has a name."""
    unlink = SharedMemory.unlink

    def wait_and_unlink(memory: SharedMemory) -> None:
        (folder / "linked").write_text(memory.path.name)
        wait_for(folder / "go")
        unlink(memory)

    SharedMemory.unlink = wait_and_unlink  # type: ignore[method-assign]
    rounds(folder, section, count)


def leave(folder: Path, section: dict[str, Any]) -> None:
    """End without close."""
    left.append(Replay(section))
    sample(left[0], 3)
    sys.exit()


def lag(folder: Path, section: dict[str, Any]) -> None:
    """The second rank stops after two batches."""
    replay = Replay(section)
    sample(replay, 2)
    if dist.get_rank() == 1:
        (folder / "stopped").touch()
        time.sleep(600)
    wait_for(folder / "stopped")
    with pytest.raises(PeerError) as error:
        sample(replay, 100)
    (folder / "reported").write_text(str(error.value))
    wait_for(folder / "killed")
    sample(replay, 100)  # who is dead is not waited for
    os._exit(0)  # the group has a dead rank


# ---- death ---------------------------------------------------------------------------------------


@pytest.mark.timeout(300 * ROUNDS)
def test_kill_at_any_time_leaves_nothing_after_the_next_start(
    name: str, data: Path, tmp_path: Path
) -> None:
    """While stores have names, while an engine trains under the launcher, while replays start and
    end.
    """
    chance = random.Random(0)
    for number in range(ROUNDS):
        folder = tmp_path / f"run{number}"
        when = ["named", "one rank", "all", "start"][number % 4]
        section = section_of(data, name, prefetch=number % 3)
        if when == "one rank":
            with Run(folder, [section] * 2) as run:
                run.wait_for("step")
                assert shared_files(name) == []  # neither its own nor those of the rounds before
                time.sleep(chance.uniform(0, 0.5))
                os.kill(run.pid(number // 4 % 2), signal.SIGKILL)
                assert run.end(START_S) != 0
                assert shared_files(name) == []
            continue
        if when == "all":
            ranks = run_training(folder, [section] * 2)
            wait_until(lambda: len(list(folder.glob("step-*"))) == 2, "the first steps", START_S)  # noqa: B023
            time.sleep(chance.uniform(0, 0.5))
        else:
            action = paused if when == "named" else rounds
            ranks = run_samples(action, folder, {**section, "batch_size": 8}, 1000)
            if when == "named":
                wait_for(folder / "linked")
            else:
                time.sleep(chance.uniform(0.5, 3))
        ranks.kill()
        left = shared_files(name)
        assert len(left) == {"named": 1, "all": 0}.get(when, len(left))
    check_success(run_samples(rounds, tmp_path / "next", section_of(data, name, batch_size=8), 1))
    assert shared_files(name) == []


def test_sigterm_ends_the_launcher_and_all_ranks(name: str, data: Path, tmp_path: Path) -> None:
    with Run(tmp_path / "run", [section_of(data, name, prefetch=2)] * 2) as run:
        run.wait_for("step")
        status = Path(f"/proc/{run.pid(0)}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(status[1]), signal.SIGTERM)  # the process that has started the ranks
        assert run.end(START_S) != 0
        assert shared_files(name) == []


def test_an_exception_on_one_rank_ends_the_other(name: str, data: Path, tmp_path: Path) -> None:
    results = run_training(tmp_path, [section_of(data, name, prefetch=1)] * 2, None, 1).wait(
        START_S
    )
    assert [status for status, _ in results] == [1, 1], results
    assert "RuntimeError: a fault in the user's training loop" in results[1][1]
    assert shared_files(name) == []


# ---- errors on one rank --------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["option", "file"])
def test_a_wrong_config_on_one_rank_ends_all(
    wrong: str, name: str, data: Path, tmp_path: Path
) -> None:
    """Without the launcher no process ends the other rank: it must hear of the error by itself."""
    path = tmp_path / "ds_config.json"
    text = "gear.prefetchh"
    bad: Any = section_of(data, name, prefetchh=2)
    if wrong == "file":
        path.write_text('{"gear": {')
        bad = str(path)
        text = f"config {path} must be JSON"
    results = run_training(tmp_path, [section_of(data, name), bad], 1).wait(START_S)
    for (status, output), kind in zip(results, ("PeerError", "ConfigError"), strict=True):
        assert status == 1, output
        assert kind in output
        assert text in output
    assert list(tmp_path.glob("step-*")) == []


def refused_cases(name: str) -> list[dict[str, Any]]:
    """Return sections and folders of both ranks, the kind of error of each, and parts of both
    texts.
    """
    fine = section_of("data", name, batch_size=8)
    divide = (
        "gear.batch_size must be gear.micro_batch_size * gear.gradient_accumulation_steps "
        "* replicas"
    )
    same = "must be the same on all ranks"

    def other(**options: Any) -> dict[str, Any]:
        return {**fine, **options}

    def source(**options: Any) -> dict[str, Any]:
        return other(data={"path": "data", "load": "memory", **options})

    def case(
        first: Any, second: Any, *parts: str, kinds: str = "ConfigError ConfigError", **more: Any
    ) -> Any:
        sections = [first, second]
        folders = more.get("folders", "a a").split()
        return {"sections": sections, "folders": folders, "kinds": kinds.split(), "parts": parts}

    first = "ConfigError PeerError"
    second = "PeerError ConfigError"
    lost = "PeerError DataError"
    unequal = "must be the same data set on all ranks"
    nowhere = other(sampler={"where": {"task": {"min": 1e9}}})
    vast = capacity(name, 1 << 44)
    return [
        case(fine, other(sampler={"kindd": 1}), "gear.sampler.kindd", kinds=second),
        case([1], fine, "gear must be", kinds=first),
        case(fine, other(batch_size=16), same, "batch_size", "8", "16"),
        case(other(seed=5), other(seed=77), "rank 0 and rank 1", "gear.seed", "5", "77"),
        case(fine, other(shared_memory={"prefix": f"{name}b"}), f"{name}b", "shared_memory.prefix"),
        case(fine, source(split={"eval": 0.5}), same, "split"),
        case(fine, {**capacity(name, 100), "data": None}, same),
        case(fine, fine, "data", "must be", kinds=lost, folders="a empty"),
        case(fine, fine, "code.npy", kinds=lost, folders="a broken"),
        case(fine, fine, unequal, "rank 0", "rank 1", kinds="DataError DataError", folders="a b"),
        case(fine, source(load="mmap"), "gear.tables.main.data.load", "mmap"),
        case(other(batch_size=7), other(batch_size=7), divide, "7"),
        case(
            *[other(gradient_accumulation_steps=3)] * 2, "gear.batch_size must be a multiple", "8"
        ),
        case(*[other(micro_batch_size=2)] * 2, divide, "8"),
        case(*[other(batch_size=None)] * 2, "gear.batch_size must be given"),
        case(nowhere, nowhere, "outside of sampler.where.task", kinds="StoreError StoreError"),
        case(vast, vast, "/dev/shm", "TiB free", kinds="StoreFullError PeerError"),
        case(fine, fine, "[", kinds="none none"),
    ]


def capacity(name: str, steps: int) -> dict[str, Any]:
    columns = {"action": {"shape": [2], "dtype": "float32", "role": "action"}}
    table = {"capacity_steps": steps, "capacity_trajectories": 8, "schema": {"columns": columns}}
    return {"tables": {"main": table}, "shared_memory": {"prefix": name}, "batch_size": 8}


def test_every_rank_refuses_what_one_rank_cannot_do(name: str, tmp_path: Path) -> None:
    """All cases in one process group: after each error the ranks still agree, and the last case
    works.
    """
    for folder in ("a", "broken"):
        write_dataset(tmp_path / folder / "data", lengths_of(20))
    write_dataset(tmp_path / "b" / "data", lengths_of(20, seed=1))
    (tmp_path / "empty").mkdir()
    os.truncate(tmp_path / "broken" / "data" / "columns" / "code.npy", 200)
    cases = refused_cases(name)
    for rank, found in enumerate(call_on_ranks(2, refuse, cases, tmp_path, timeout_s=START_S)):
        for case, (kind, text) in zip(cases, found, strict=True):
            assert kind == case["kinds"][rank], (case, rank, text)
            assert all(part in text for part in case["parts"]), (case, rank, text)
    assert shared_files(name) == []


def refuse(cases: list[dict[str, Any]], folder: Path) -> list[tuple[str, str]]:
    """Build a replay for each case; return kind and text of this rank's errors, or what it has
    sampled.
    """
    rank = dist.get_rank()
    found = []
    for case in cases:
        os.chdir(folder / case["folders"][rank])
        try:
            with Replay(case["sections"][rank]) as replay:
                found.append(("none", str(replay.sample().trajectory_id.tolist())))
        except GearError as error:
            found.append((type(error).__name__, str(error)))
    return found


# ---- ranks that do not keep up, other runs, the end ----------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_rank_that_stops_is_named_and_its_death_lets_the_others_go_on(
    prefetch: int, name: str, data: Path, tmp_path: Path
) -> None:
    section = section_of(data, name, batch_size=8, timeout_s=3.0, prefetch=prefetch)
    ranks = run_samples(lag, tmp_path, section)
    reported = tmp_path / "reported"
    wait_until(lambda: reported.exists() and reported.read_text(), "the error", START_S)
    stopped = ranks.processes[1]
    stopped.kill()
    stopped.wait()
    (tmp_path / "killed").touch()
    status, output = ranks.wait(START_S)[0]
    assert status == 0, output
    text = reported.read_text()
    assert f"local rank 1 (process {stopped.pid})" in text
    assert "gear.timeout_s = 3.0 s" in text


def test_runs_with_the_same_prefix_leave_each_other_alone(
    name: str, data: Path, tmp_path: Path
) -> None:
    """One run waits while its store has a name; another starts, works and ends meanwhile, many
    times.
    """
    section = section_of(data, name, batch_size=8)
    waiting = run_samples(paused, tmp_path / "paused", section)
    linked = tmp_path / "paused" / "linked"
    wait_until(lambda: linked.exists() and linked.read_text(), "a store with a name", START_S)
    file = linked.read_text()
    check_success(run_samples(rounds, tmp_path / "other", section, 20))
    assert shared_files(name) == [file]
    at_once = run_samples(rounds, tmp_path / "at_once", section, 30)
    (tmp_path / "paused" / "go").touch()
    check_success(waiting)
    check_success(at_once)


def test_exit_without_close(name: str, data: Path, tmp_path: Path) -> None:
    section = section_of(data, name, batch_size=8, prefetch=3)
    check_success(run_samples(leave, tmp_path, section))


def test_the_lock_of_a_killed_build_stops_no_launch(data: Path, tmp_path: Path, name: str) -> None:
    """DeepSpeed's init_distributed would wait for the lock of its own op without end."""
    builds = tmp_path / "builds"
    shutil.copytree(os.environ["TORCH_EXTENSIONS_DIR"], builds)
    lock = builds / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(exist_ok=True)
    lock.touch()
    os.utime(lock, (time.time() - 60,) * 2)
    call = write_call(tmp_path, train, tmp_path, [section_of(data, name)] * 2, 1)
    outputs = run_ranks(CALL, 2, call, TORCH_EXTENSIONS_DIR=str(builds))
    assert not lock.exists()
    assert [text.count(f"removed {lock}") for text in outputs] in ([0, 1], [1, 0])


@pytest.mark.parametrize(
    "numbers", [(signal.SIGKILL, signal.SIGKILL), (signal.SIGSEGV, signal.SIGTERM)]
)
def test_ranks_of_a_table_with_writers_are_killed(
    numbers: tuple[int, int], name: str, tmp_path: Path
) -> None:
    """At once, or one after the other; a writer is killed last. Files go with the last process of
    each.
    """
    table = {"capacity_steps": 500, "remove": "fifo", "writers": 1}
    section = {"tables": {"main": table}, "batch_size": 4, "shared_memory": {"prefix": name}}
    ranks = Ranks(CALL, 2, write_call(tmp_path, hold_names, tmp_path, section))

    def write() -> None:
        with TrajectoryWriter.attach(section, wait_s=START_S):
            (tmp_path / "ready-writer").touch()
            signal.pause()

    writer = in_child(write)
    try:
        for who in ("0", "1", "writer"):
            wait_until((tmp_path / f"ready-{who}").exists, f"the start of {who}", START_S)
        assert (
            len(shared_files(name)) == len(reapers(name)) == 5
        )  # a store, two boards, two loaders
        for process, number in zip(ranks.processes, numbers, strict=True):
            process.send_signal(number)
            if number != numbers[-1]:
                process.wait()
                assert len(shared_files(name)) >= 3
        for process in ranks.processes:
            process.wait()
        wait_until(lambda: len(shared_files(name)) == 1, "the end of boards and loaders")
        with pytest.raises(StoreError, match="within 0 s"):
            TrajectoryWriter.attach(section, wait_s=0.0)
    finally:
        ranks.kill()
        kill(writer)
    wait_until(lambda: not reapers(name), "the end of the reapers")
    assert shared_files(name) == []
