"""Kills processes that save over one checkpoint, load it, and go on: what a state names must always
load.

    python tests/crash/programs/save_kills.py replay --folder DIR --kills 400 [--flips] python
    tests/crash/programs/save_kills.py engine --folder DIR --kills 200 [--world 2 --ranks 0,1]

`replay`: one process, `Replay.save`. The state that each save returns is kept in a file of its own;
both that and the folder's own position must load after each kill. With `--flips` a bit of a random
file of the saves on the disk changes before most saves, and not its time: a save that was published
later must load; one that has the damage is refused, and loads once the bit is as it was. `engine`:
ranks that train and call `engine.save_checkpoint` over one tag; the next ranks load it. Where
DeepSpeed's own file of the tag is torn nothing can be loaded, and they begin anew. Over nodes this
runs once on each of them, with its ranks; the one with rank 0 decides when to kill. All forks share
the imports of this process. Prints a line of JSON; exits with 1 if a checkpoint was lost.
"""

import argparse
import functools
import hashlib
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from deepspeed import comm as dist
from engine_parts import Model
from gear_support import SCHEMA, SHM, prefix, trajectory, wait_until
from process_support import end_with, exit_status, free_port, in_child, kill

import deepspeed_gear
from deepspeed_gear import CheckpointError, Replay
from deepspeed_gear.checkpoint import save_folders, table_files
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import Slot, SlotState

TAG = "tag"
MODEL = "mp_rank_00_model_states.pt"
SECTION: dict[str, Any] = {
    "tables": {
        "main": {
            "capacity_steps": 40_000,
            "capacity_trajectories": 4000,
            "max_length": 30,
            "remove": "fifo",
        }
    },
    "sampler": {"kind": "prioritized", "unit": "step"},
    "fields": {"observation": {"offset": -3, "length": 4}, "action": {}, "code": {}},
    "prefetch": 1,
    "timeout_s": 60.0,
}


def digest_of(replay: Replay) -> str:
    """Return a digest of the ids that all stores of the run hold. Collective."""
    slots = replay.tables["main"].slots
    held = slots[slots[:, Slot.STATE] == SlotState.COMMITTED, Slot.ID].tolist()
    ids = held if replay.is_node_leader else []
    gathered = [ids]
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size()
        torch.distributed.all_gather_object(gathered, ids)
    return hashlib.sha256(
        repr(sorted(i for of_rank in gathered for i in of_rank)).encode()
    ).hexdigest()


def write(path: Path, content: Any) -> None:
    """Write JSON; atomic."""
    partial = path.with_name(path.name + ".new")
    partial.write_text(json.dumps(content))
    os.replace(partial, path)


class Moments:
    """Moments for kills: in the load or in one of the saves behind it, however fast the
    machine is.
    """

    def __init__(self, seed: int, most_saves: int = 2) -> None:
        self._chance = random.Random(seed)
        self._pace_s = 0.1
        self._most_saves = most_saves

    def wait(self, ready: Path, ended: Callable[[], Any]) -> None:
        """Wait for the next moment or the end; `ready` is made before the load and grows with each
        save.
        """
        wait_until(lambda: ready.exists() or ended(), "a launch", 300.0)
        start = time.monotonic()
        saves = self._chance.randint(0, self._most_saves)
        wait_until(lambda: ended() or ready.stat().st_size >= saves, "saves", 300.0)
        if saves:
            self._pace_s = (time.monotonic() - start) / saves
        time.sleep(self._chance.random() * self._pace_s)


def grow(path: Path) -> None:
    """Append a byte to a file."""
    with path.open("ab") as file:
        file.write(b"x")


def add(replay: Replay, random_: np.random.Generator) -> None:
    """Add a trajectory of any length."""
    replay.add(
        trajectory(int(random_.integers(1000)), int(random_.integers(1, 25)), terminated=True)
    )


def import_all() -> None:
    """Import what a rank imports late, so that its forks need not."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    load_backend("auto")
    getattr(deepspeed.ops, "__compatible_ops__", None)


# ---- one process ---------------------------------------------------------------------------------


def made() -> Replay:
    """Return a Replay of one process."""
    config = {**SECTION, "batch_size": 16, "shared_memory": {"prefix": prefix()}}
    return Replay(config, schemas={"main": SCHEMA})


class Flips:
    """Bits of the files of rows that change on the disk, each recorded before it does, and changed
    back.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._record = folder.with_name("flip.json")

    def make(self, random_: np.random.Generator) -> None:
        """Change a bit of a random file of the folder's saves, or of none; the earlier
        one stays.
        """
        files = sorted(self._folder.glob("main*/rows-*.npy"))
        if not files or random_.random() < 0.3:
            return
        path = files[int(random_.integers(len(files)))]
        content = path.read_bytes()
        at = int(random_.integers(len(content)))
        newest = save_folders.read_position(self._folder)["save"]["id"]
        digest = hashlib.sha256(content).hexdigest()
        flip = {
            "name": path.name,
            "digest": digest,
            "at": at,
            "byte": content[at],
            "newest": newest,
        }
        write(self._record, [*self.known(), flip])
        self._put(path, at, content[at] ^ (1 << int(random_.integers(8))))
        grow(self._folder.with_name("flips"))

    def known(self) -> list[dict[str, Any]]:
        """Return the bits that were changed and not changed back."""
        return json.loads(self._record.read_text()) if self._record.exists() else []

    def heal(self) -> None:
        """Change all bits back, where their files still exist."""
        for flip in reversed(self.known()):
            for path in self._folder.glob(f"main*/{flip['name']}"):
                content = bytearray(path.read_bytes())
                content[flip["at"] : flip["at"] + 1] = [flip["byte"]]
                if (
                    hashlib.sha256(content).hexdigest() == flip["digest"]
                ):  # else it is a file of another save
                    self._put(path, flip["at"], flip["byte"])
        self._record.unlink(missing_ok=True)

    @staticmethod
    def _put(path: Path, at: int, byte: int) -> None:
        status = path.stat()
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def save_for_ever(folder: Path, ready: Path, flips: Flips | None) -> None:
    """Continue from the state that was kept, then save again and again."""
    random_ = np.random.default_rng(os.getpid())
    with made() as replay:
        ready.touch()
        kept = folder.with_name("kept.json")
        if kept.exists():
            replay.load(folder, json.loads(kept.read_text())["state"])
        else:
            for _ in range(6 if flips is None else 100):
                add(replay, random_)
        while True:
            if flips is not None:
                flips.make(random_)
            replay.update_priorities(
                batch := replay.sample(), torch.rand(len(batch.trajectory_id)) + 0.1
            )
            for _ in range(2):
                add(replay, random_)
            write(folder.with_name("next.json"), digest_of(replay))
            state = replay.save(folder)
            write(kept, {"state": state, "digest": digest_of(replay)})
            grow(ready)


def check_flipped(folder: Path, flips: Flips) -> None:
    """Load the newest save: it is refused only where a bit has changed since; then change all bits
    back.
    """
    newest = save_folders.read_position(folder)["save"]["id"]
    with made() as replay:
        try:
            replay.load(folder)
        except CheckpointError as error:
            is_later = newest not in [flip["newest"] for flip in flips.known()]
            if is_later or "must be as it was saved" not in str(error):
                raise
            grow(folder.with_name("refused"))
    flips.heal()


def check_both(folder: Path, flips: Flips | None) -> None:
    """Load by the kept state, and without one."""
    kept = folder.with_name("kept.json")
    following = folder.with_name("next.json")
    if not kept.exists():
        return
    if flips is not None:
        check_flipped(folder, flips)
    known = json.loads(kept.read_text())
    with made() as replay:
        replay.load(folder, known["state"])
        assert digest_of(replay) == known["digest"], "another content than that of the state"
        replay.sample()
        replay.load(folder)
        assert digest_of(replay) in (known["digest"], json.loads(following.read_text()))
        replay.sample()


def kill_replays(options: argparse.Namespace) -> dict[str, int]:
    """Kill processes that save; count what cannot be loaded."""
    folder = options.folder / "saved"
    lost = 0
    moments = Moments(options.seed, most_saves=6 if options.flips else 2)
    flips = Flips(folder) if options.flips else None
    if flips is not None:
        table_files._LEAST_SEGMENT_BYTES = 0  # many segments, so that a save links most of them
    counted = [options.folder / name for name in ("flips", "refused")]
    import_all()
    for number in range(options.kills):
        ready = options.folder / f"ready-{number}"
        child = in_child(lambda ready=ready: save_for_ever(folder, ready, flips))
        moments.wait(
            ready,
            lambda child=child: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT),
        )
        kill(child)
        lost += exit_status(in_child(lambda: check_both(folder, flips))) != 0
    names = sorted(path.name for path in folder.iterdir())
    counts = {path.name: path.stat().st_size for path in counted if path.exists()}
    return {"kills": options.kills, "lost": lost, "names": len(names), **counts}


# ---- ranks ---------------------------------------------------------------------------------------


def train_for_ever(folder: Path, number: int, is_last: bool) -> None:
    """Load what is there, then train and save over one tag until this rank is killed."""
    deepspeed.init_distributed("gloo", verbose=False)
    rank = dist.get_rank()
    model = Model(12)
    gear = {**SECTION, "shared_memory": {"prefix": prefix()}}
    engine, *_ = deepspeed_gear.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 1e-3),
        config={"train_batch_size": 16, "gear": gear},
        schemas={"main": SCHEMA},
    )
    if rank == 0:
        (folder / f"ready-{number}").touch()
    random_ = np.random.default_rng(1000 * number + rank)
    outcome = load(engine, folder)
    if rank == 0:
        (folder / f"{outcome}-{number}").touch()
    dist.barrier()
    for _ in range(0 if outcome == "loaded" else 6):
        add(engine.gear, random_)
    dist.barrier()
    while not is_last:
        batch = engine.gear_sample()
        engine.backward(engine(batch))
        engine.step()
        engine.gear_update_priorities(batch, torch.rand(len(batch.trajectory_id)) + 0.1)
        add(engine.gear, random_)
        dist.barrier()
        mine = {"digest": digest_of(engine.gear), "batches": engine.global_steps}
        engine.save_checkpoint(str(folder), tag=TAG, client_state=mine, save_latest=False)
        if rank == 0:
            grow(folder / f"ready-{number}")
    engine.destroy()


def load(engine: Any, folder: Path) -> str:
    """Load the tag where DeepSpeed can; say what came of that. All ranks see the same files."""
    try:
        torch.load(folder / TAG / MODEL, weights_only=False)
        outcome = "loaded"
    except FileNotFoundError:
        return "nothing"
    except Exception:  # whatever a torn file makes of it
        outcome = "torn"
    dist.barrier()
    if outcome == "torn":
        (folder / TAG / MODEL).unlink(missing_ok=True)
        return outcome
    _, client = engine.load_checkpoint(str(folder), tag=TAG)
    assert client["digest"] == digest_of(engine.gear), (
        "another content than that of the client state"
    )
    position = engine.gear.state_dict()["train"]["main"]["batches"]
    assert client["batches"] == engine.global_steps == position, (
        "another position than that of the engine"
    )
    return outcome


def run_rank(
    rank: int, options: argparse.Namespace, port: int, told: Path, action: Callable[[], None]
) -> None:
    """Be a rank; what ends it goes into a file, unless the kill of the others does."""
    place = {"RANK": rank, "LOCAL_RANK": options.ranks.index(rank), "WORLD_SIZE": options.world}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR=options.master, MASTER_PORT=str(port))
    log = os.open(options.folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        action()
    except BaseException:
        if told.exists():
            time.sleep(600)  # this one is killed next
        (options.folder / f"failed-{rank}").write_text(traceback.format_exc())
        raise


def kill_ranks(options: argparse.Namespace) -> dict[str, int]:
    """Kill the ranks of this node together with those of the others; count what came of each
    launch.
    """
    folder = options.folder
    moments = Moments(options.seed)
    leads = 0 in options.ranks
    import_all()
    for number in range(options.kills + 1):
        is_last = number == options.kills
        port = options.port + number if options.port else free_port()
        ready = folder / f"ready-{number}"
        told = folder / f"kill-{number}"
        train = functools.partial(train_for_ever, folder, number, is_last)
        launched = [
            functools.partial(run_rank, rank, options, port, told, train) for rank in options.ranks
        ]
        children = [in_child(action) for action in launched]
        if is_last:
            lost = [child for child in children if exit_status(child) != 0]
        else:
            if leads:
                moments.wait(ready, lambda: failures(folder))
                told.touch()
            wait_until(lambda told=told: told.exists() or failures(folder), "a kill", 600.0)
            for child in children:
                os.kill(child, 9)
            lost = [child for child in children if exit_status(child) != -9]
        for left in SHM.glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink(missing_ok=True)
        if lost or failures(folder):
            sys.stderr.write("".join(failures(folder)))
            return {"kills": number, "lost": 1}
    outcomes = {name: len(list(folder.glob(f"{name}-*"))) for name in ("loaded", "torn", "nothing")}
    return {"kills": options.kills, "lost": 0, **outcomes}


def failures(folder: Path) -> list[str]:
    """Return what has ended ranks."""
    return [path.read_text() for path in folder.glob("failed-*")]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["replay", "engine"])
    parser.add_argument("--folder", type=Path, required=True, help="empty; common to all nodes")
    parser.add_argument("--kills", type=int, default=400)
    parser.add_argument("--flips", action="store_true", help="change bits of saves on the disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument(
        "--ranks", type=lambda text: [int(rank) for rank in text.split(",")], default=[0, 1]
    )
    parser.add_argument("--master", default="127.0.0.1")
    parser.add_argument(
        "--port", type=int, default=0, help="the first of one for each launch; 0: free ones"
    )
    options = parser.parse_args()
    os.environ.setdefault("GEAR_TEST_PREFIX", prefix())  # the same in all forks
    end_with(kill_replays(options) if options.what == "replay" else kill_ranks(options), "lost")


if __name__ == "__main__":
    main()
