"""Whatever happens to a rank: nothing hangs, all ranks raise the error, nothing stays in shared memory.

GEAR_LONG_TESTS=1 kills 20 times instead of 4.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gear_support import SHM, lengths_of, shared_files, wait_until, write_dataset
from process_support import Ranks, environment, in_child, kill, launcher, reapers, run_ranks
from warm_python import WarmProcess

from deepspeed_gear import TrajectoryWriter
from deepspeed_gear.errors import StoreError

ROUNDS = 20 if os.environ.get("GEAR_LONG_TESTS") == "1" else 4
START_S = 120.0  # of two ranks on a busy machine
_numbers = itertools.count()


@pytest.fixture
def name() -> Iterator[str]:
    """A prefix in /dev/shm of this test alone; what is left of it is the test's failure, and removed."""
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


def write_plan(folder: Path, sections: list[Any], **plan: Any) -> None:
    """Write what `faults_train.py` does: `steps` and `raise_on`."""
    folder.mkdir(exist_ok=True)
    whole = {"sections": sections, "steps": None, "raise_on": None, **plan}
    (folder / "plan.json").write_text(json.dumps(whole))


def run_training(folder: Path, sections: list[Any], **plan: Any) -> Ranks:
    """Start `faults_train.py` without the launcher."""
    write_plan(folder, sections, **plan)
    return Ranks("faults_train.py", len(sections), str(folder))


class Run:
    """`faults_train.py` under the real launcher, in a session of its own."""

    def __init__(self, folder: Path, sections: list[Any], **plan: Any) -> None:
        self.folder, self.num_ranks = folder, len(sections)
        write_plan(folder, sections, **plan)
        command = launcher("faults_train.py", self.num_ranks, str(folder))
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
        for file in SHM.glob(f"deepspeed_*_{self._port}_*"):  # DeepSpeed's own, which it leaves when killed
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
        """Wait until the launcher and all ranks have ended by themselves; return the exit status."""
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


def run_samples(mode: str, folder: Path, section: dict[str, Any], rounds: int = 1) -> Ranks:
    folder.mkdir(exist_ok=True)
    return Ranks("faults_sample.py", 2, mode, str(folder), json.dumps(section), str(rounds))


def check_success(ranks: Ranks) -> None:
    for status, output in ranks.wait(START_S):
        assert status == 0, output


# ---- death ---------------------------------------------------------------------------------------


@pytest.mark.timeout(300 * ROUNDS)
def test_kill_at_any_time_leaves_nothing_after_the_next_start(name: str, data: Path, tmp_path: Path) -> None:
    """While stores have names, while an engine trains under the launcher, while replays start and end."""
    chance = random.Random(0)
    for number in range(ROUNDS):
        folder, when = tmp_path / f"run{number}", ["named", "one rank", "all", "start"][number % 4]
        section = section_of(data, name, prefetch=number % 3)
        if when == "one rank":
            with Run(folder, [section] * 2) as run:
                run.wait_for("step")
                assert shared_files(name) == []  # neither its own nor those of the rounds before
                time.sleep(chance.uniform(0, 0.5))
                os.kill(run.pid(number // 4 % 2), signal.SIGKILL)
                assert run.end(60) != 0
                assert shared_files(name) == []
            continue
        if when == "all":
            ranks = run_training(folder, [section] * 2)
            wait_until(lambda: len(list(folder.glob("step-*"))) == 2, "the first steps", START_S)  # noqa: B023
            time.sleep(chance.uniform(0, 0.5))
        else:
            mode = "paused" if when == "named" else "rounds"
            ranks = run_samples(mode, folder, {**section, "batch_size": 8}, 1000)
            if when == "named":
                wait_until((folder / "linked").exists, "a store with a name", START_S)
            else:
                time.sleep(chance.uniform(0.5, 3))
        ranks.kill()
        left = shared_files(name)
        assert len(left) == {"named": 1, "all": 0}.get(when, len(left))
    check_success(run_samples("rounds", tmp_path / "next", section_of(data, name, batch_size=8)))
    assert shared_files(name) == []


def test_sigterm_ends_the_launcher_and_all_ranks(name: str, data: Path, tmp_path: Path) -> None:
    with Run(tmp_path / "run", [section_of(data, name, prefetch=2)] * 2) as run:
        run.wait_for("step")
        status = Path(f"/proc/{run.pid(0)}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(status[1]), signal.SIGTERM)  # the process that has started the ranks
        assert run.end(30) != 0  # the README says 10, on a machine that does nothing else
        assert shared_files(name) == []


def test_an_exception_on_one_rank_ends_the_other(name: str, data: Path, tmp_path: Path) -> None:
    results = run_training(tmp_path, [section_of(data, name, prefetch=1)] * 2, raise_on=1).wait(START_S)
    assert [status for status, _ in results] == [1, 1], results
    assert "RuntimeError: a fault in the user's training loop" in results[1][1]
    assert shared_files(name) == []


# ---- errors on one rank --------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["option", "file"])
def test_a_wrong_config_on_one_rank_ends_all(wrong: str, name: str, data: Path, tmp_path: Path) -> None:
    """Without the launcher no process ends the other rank: it must hear of the error by itself."""
    path, text = tmp_path / "ds_config.json", "gear.prefetchh"
    bad: Any = section_of(data, name, prefetchh=2)
    if wrong == "file":
        path.write_text('{"gear": {')
        bad, text = str(path), f"config {path} must be JSON"
    results = run_training(tmp_path, [section_of(data, name), bad], steps=1).wait(START_S)
    for (status, output), kind in zip(results, ("PeerError", "ConfigError"), strict=True):
        assert status == 1, output
        assert kind in output
        assert text in output
    assert list(tmp_path.glob("step-*")) == []


def refused_cases(name: str) -> list[dict[str, Any]]:
    """Return sections and folders of both ranks, the kind of error of each, and parts of both texts."""
    fine = section_of("data", name, batch_size=8)
    divide = "gear.batch_size must be micro_batch_size * gradient_accumulation_steps * ranks"
    same = "must be the same on all ranks"

    def other(**options: Any) -> dict[str, Any]:
        return {**fine, **options}

    def source(**options: Any) -> dict[str, Any]:
        return other(data={"path": "data", "load": "memory", **options})

    def case(
        first: Any, second: Any, *parts: str, kinds: str = "ConfigError ConfigError", **more: Any
    ) -> Any:
        sections, folders = [first, second], more.get("folders", "a a").split()
        return {"sections": sections, "folders": folders, "kinds": kinds.split(), "parts": parts}

    first, second, lost = "ConfigError PeerError", "PeerError ConfigError", "PeerError DataError"
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
        case(*[other(gradient_accumulation_steps=3)] * 2, "gear.batch_size must be a multiple", "8"),
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
    """All cases in one process group: after each error the ranks still agree, and the last case works."""
    for folder in ("a", "broken"):
        write_dataset(tmp_path / folder / "data", lengths_of(20))
    write_dataset(tmp_path / "b" / "data", lengths_of(20, seed=1))
    (tmp_path / "empty").mkdir()
    os.truncate(tmp_path / "broken" / "data" / "columns" / "code.npy", 200)
    cases = refused_cases(name)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    results = Ranks("faults_refused.py", 2, str(tmp_path)).wait(START_S)
    for rank, (status, output) in enumerate(results):
        assert status == 0, output
        found = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("FOUND ")]
        assert len(found) == len(cases), output
        for case, got in zip(cases, found, strict=True):
            assert got["kind"] == case["kinds"][rank], (case, rank, got)
            assert all(part in got["text"] for part in case["parts"]), (case, rank, got)
    assert shared_files(name) == []


# ---- ranks that do not keep up, other runs, the end ----------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_rank_that_stops_is_named_and_its_death_lets_the_others_go_on(
    prefetch: int, name: str, data: Path, tmp_path: Path
) -> None:
    section = section_of(data, name, batch_size=8, timeout_s=3.0, prefetch=prefetch)
    ranks = run_samples("lag", tmp_path / "lag", section)
    wait_until((tmp_path / "lag" / "reported").exists, "the error", START_S)
    stopped = ranks.processes[1]
    stopped.kill()
    stopped.wait()
    (tmp_path / "lag" / "killed").touch()
    status, output = ranks.wait(START_S)[0]
    assert status == 0, output
    assert "GOES ON" in output
    text = json.loads(next(line[5:] for line in output.splitlines() if line.startswith("PEER ")))
    assert f"local rank 1 (process {stopped.pid})" in text
    assert "gear.timeout_s = 3.0 s" in text


def test_runs_with_the_same_prefix_leave_each_other_alone(name: str, data: Path, tmp_path: Path) -> None:
    """One run waits while its store has a name; another starts, works and ends meanwhile, many times."""
    section = section_of(data, name, batch_size=8)
    paused = run_samples("paused", tmp_path / "paused", section)
    linked = tmp_path / "paused" / "linked"
    wait_until(lambda: linked.exists() and linked.read_text(), "a store with a name", START_S)
    file = linked.read_text()
    check_success(run_samples("rounds", tmp_path / "other", section, 20))
    assert shared_files(name) == [file]
    at_once = run_samples("rounds", tmp_path / "at_once", section, 30)
    (tmp_path / "paused" / "go").touch()
    check_success(paused)
    check_success(at_once)


def test_exit_without_close(name: str, data: Path, tmp_path: Path) -> None:
    section = section_of(data, name, batch_size=8, prefetch=3)
    check_success(run_samples("leave", tmp_path / "leave", section))


def test_the_lock_of_a_killed_build_stops_no_launch(data: Path, tmp_path: Path, name: str) -> None:
    """DeepSpeed's init_distributed would wait for the lock of its own op without end."""
    builds = tmp_path / "builds"
    shutil.copytree(os.environ["TORCH_EXTENSIONS_DIR"], builds)
    lock = builds / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(exist_ok=True)
    lock.touch()
    os.utime(lock, (time.time() - 60,) * 2)
    write_plan(tmp_path, [section_of(data, name)] * 2, steps=1)
    outputs = run_ranks("faults_train.py", 2, str(tmp_path), TORCH_EXTENSIONS_DIR=str(builds))
    assert not lock.exists()
    assert [text.count(f"removed {lock}") for text in outputs] in ([0, 1], [1, 0])


@pytest.mark.parametrize("numbers", [(signal.SIGKILL, signal.SIGKILL), (signal.SIGSEGV, signal.SIGTERM)])
def test_ranks_of_a_table_with_writers_are_killed(
    numbers: tuple[int, int], name: str, tmp_path: Path
) -> None:
    """At once, or one after the other; a writer is killed last. Files go with the last process of each."""
    table = {"capacity_steps": 500, "remove": "fifo", "writers": 1}
    section = {"tables": {"main": table}, "batch_size": 4, "shared_memory": {"prefix": name}}
    (tmp_path / "section.json").write_text(json.dumps(section))
    ranks = Ranks("faults_writers.py", 2, str(tmp_path))

    def write() -> None:
        with TrajectoryWriter.attach(section, wait_s=START_S):
            (tmp_path / "ready-writer").touch()
            signal.pause()

    writer = in_child(write)
    try:
        for who in ("0", "1", "writer"):
            wait_until((tmp_path / f"ready-{who}").exists, f"the start of {who}", START_S)
        assert len(shared_files(name)) == len(reapers(name)) == 5  # a store, two boards, two loaders
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
