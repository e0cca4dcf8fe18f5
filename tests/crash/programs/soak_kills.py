"""A long run under random kills: a rank that samples and saves, a writer, and a process that loads.

    PYTHONPATH=$PWD:tests/support python tests/crash/programs/soak_kills.py --minutes 20 --seed 0

Any of the three is killed every few seconds, at a random instant, and started again; now and then
it leaves a forked child, which must keep nothing of it alive. The rank loads the newest save when
it starts, samples with priorities, and saves over it; the writer attaches and adds trajectories of
random lengths, so that the table evicts and compacts; the loader loads the folder again and again,
and sometimes saves into it, which is refused while the rank holds it. Every row says whose it is
and is checked wherever it is read. Prints a line of JSON; exits with 1 after any other error than
those that a kill explains.
"""

import os
import random
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from gear_support import prefix, shared_files, wait_until
from process_support import command_options, end_with, in_child, kill
from torn import COLUMNS, FIELDS, rows, wrong

from deepspeed_gear import Replay, TrajectoryWriter
from deepspeed_gear.errors import CheckpointError, GearError, StoreError
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import Slot, SlotState

MOST_STEPS = 300
TABLE = {
    "capacity_steps": 2000,
    "capacity_trajectories": 200,
    "max_length": MOST_STEPS,
    "remove": "uniform",
    "writers": 3,
}
SECTION: dict[str, Any] = {
    "tables": {"main": {**TABLE, "schema": {"columns": COLUMNS}}},
    "sampler": {"kind": "prioritized", "unit": "step"},
    "fields": FIELDS,
    "batch_size": 32,
    "prefetch": 1,
    "timeout_s": 30.0,
}
# What a process may get because another was killed: the run has ended, or is not there yet.
EXPECTED = {
    "writer": ("StoreError", "StoreGoneError", "PeerError", "LostNodeError", "NotReadyError")
}


def section(part: str) -> dict[str, Any]:
    """Return the config of a part: `main`, or that of the loader, whose store is another one."""
    return {**SECTION, "shared_memory": {"prefix": f"{prefix()}{part}"}}


def check_content(replay: Replay) -> None:
    """Read all trajectories of a table and check them; the writer may evict some meanwhile."""
    slots = replay.tables["main"].slots
    for number in slots[slots[:, Slot.STATE] == SlotState.COMMITTED, Slot.ID].tolist():
        try:
            (one,) = replay.read([number])
        except StoreError:
            continue
        wanted = rows(int(one["key"]), len(one["again"]))
        assert all((one[name].numpy() == wanted[name]).all() for name in wanted), (
            "a torn trajectory"
        )


class Part:
    """A rank, writer or loader: its loop counts what it does in a file, and what it
    gets as errors.
    """

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        self.name = name
        self.folder = folder
        self.chance = random.Random(seed)

    def count(self, what: str) -> None:
        """Count an event, in a file that survives a kill."""
        with (self.folder / f"count-{what}").open("ab") as file:
            file.write(b"x")

    def run(self) -> None:
        """Loop until killed; an error that no kill explains goes into a file."""
        saves = self.folder / "saves"
        try:
            {"rank": self.sample_and_save, "writer": self.write, "loader": self.load}[self.name](
                saves
            )
        except BaseException:
            (self.folder / f"failed-{self.name}-{os.getpid()}").write_text(traceback.format_exc())
            raise

    def leave_child(self) -> None:
        """Fork a child that lives for longer than this process may, and holds copies of what it
        has.
        """
        if os.fork() == 0:
            time.sleep(5.0)
            os._exit(0)

    def sample_and_save(self, saves: Path) -> None:
        """Be the rank."""
        with Replay(section("main")) as replay:
            if (saves / "position.json").exists():
                replay.load(saves)
                check_content(replay)
                self.count("resumed")
            else:
                replay.add(rows(0, 10))
            if self.chance.random() < 0.3:
                self.leave_child()
            while True:
                for _ in range(self.chance.randrange(1, 30)):
                    batch = replay.sample()
                    assert not wrong(batch), "a torn row"
                    replay.update_priorities(batch, torch.rand(len(batch.trajectory_id)) + 0.1)
                    self.count("batches")
                self.save(replay, saves)

    def save(self, replay: Replay, saves: Path) -> None:
        """Save, or be refused since another process saves into the folder."""
        try:
            replay.save(saves)
            self.count(f"saves_of_{self.name}")
        except CheckpointError as error:
            if "must be saved into by one run at a time" not in str(error):
                raise
            self.count(f"refused_saves_of_{self.name}")

    def write(self, _: Path) -> None:
        """Be the writer; attach anew when the rank was killed."""
        while True:
            try:
                with TrajectoryWriter.attach(section("main"), wait_s=30.0) as writer:
                    if self.chance.random() < 0.3:
                        self.leave_child()
                    while True:
                        writer.add(
                            rows(
                                self.chance.randrange(1 << 40),
                                self.chance.randrange(1, MOST_STEPS + 1),
                            )
                        )
                        self.count("added")
                        time.sleep(0.002)
            except GearError as error:
                if type(error).__name__ not in EXPECTED["writer"]:
                    raise
                self.count("writer_attached_anew")

    def load(self, saves: Path) -> None:
        """Be the loader."""
        wait_until((saves / "position.json").exists, "a first save", 120.0)
        while True:
            with Replay(section("load")) as replay:
                for _ in range(self.chance.randrange(1, 20)):
                    try:
                        replay.load(saves)
                    except CheckpointError as error:  # the rank saves dozens of times a second
                        if "were replaced meanwhile" not in str(error):
                            raise
                        self.count("loads_given_up")
                        continue
                    check_content(replay)
                    self.count("loads")
                    batch = replay.sample()
                    assert not wrong(batch), "a torn row"
                if len(replay) and self.chance.random() < 0.3:
                    self.save(replay, saves)


def soak(seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Run the parts, and kill one of them every few seconds; return the counts."""
    chance = random.Random(seed)
    names = ("rank", "writer", "loader")
    load_backend("auto")
    until = time.monotonic() + seconds
    kills = Counter[str]()

    def start(name: str) -> int:
        return in_child(Part(name, folder, chance.randrange(1 << 32)).run)

    children = {name: start(name) for name in names}

    def failures() -> list[str]:
        return [path.read_text() for path in sorted(folder.glob("failed-*"))]

    while time.monotonic() < until and not failures():
        time.sleep(chance.choice((0.05, 0.5, 1.0, 3.0)) * chance.random() + 0.01)
        name = chance.choice(names)
        kill(children[name])
        kills[name] += 1
        if chance.random() < 0.2:
            time.sleep(chance.random())  # the others meet its absence
        children[name] = start(name)
    for child in children.values():
        kill(child)
    counts = {
        path.name.removeprefix("count-"): path.stat().st_size for path in folder.glob("count-*")
    }
    return {"kills": dict(kills), **dict(sorted(counts.items())), "failures": failures()}


def left_over(seconds: float) -> list[str]:
    """Return what stays in /dev/shm although all processes of the soak are dead."""
    deadline = time.monotonic() + seconds
    found = ["?"]
    while found and time.monotonic() < deadline:
        found = [str(path) for path in shared_files(prefix())]
        time.sleep(0.1)
    return found


if __name__ == "__main__":
    options = command_options(__doc__, minutes=20.0, seed=0)
    os.environ.setdefault("GEAR_TEST_PREFIX", prefix())  # the same in all forks
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="soaksaves") as folder:
        found = soak(60 * options.minutes, options.seed, Path(folder))
    end_with(found | {**vars(options), "left_in_shm": left_over(60.0)}, "failures", "left_in_shm")
