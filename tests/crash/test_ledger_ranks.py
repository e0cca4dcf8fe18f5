"""Two ranks train what two rollout workers generate; workers and then all of them are killed with
SIGKILL.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from ledger_support import SIZE, check_books, ledger_section, responses, write_prompts
from media_tables import image, with_media
from process_support import exit_status, free_port, in_child
from remote_support import TOKEN

from deepspeed_gear import (
    FillWorker,
    LeaseExpiredError,
    RemoteRolloutWorker,
    Replay,
    RolloutWorker,
    TrajectoryWriter,
)
from deepspeed_gear.remote.gateway import Gateway
from deepspeed_gear.sampling.batch_sizes import BatchInfo
from deepspeed_gear.store.shared_memory import remove_garbage

LONG = bool(os.environ.get("GEAR_LONG_TESTS"))
# batches before all are killed at least, and after it
GROUPS = 4
PROMPTS = 11
BEFORE = 6
AFTER = 8
IMAGES = 60  # more than there is memory for


def generate(config: dict[str, Any], seed: int) -> None:
    """Lease, generate for a random time, and commit in any order, until the ranks end."""
    words = random.Random(seed)
    with RolloutWorker.attach(config) as worker:
        held: list[Any] = []
        while True:
            held += worker.lease(3, timeout_s=0.0 if held else 0.1)
            words.shuffle(held)
            time.sleep(
                words.expovariate(1 / 0.02)
            )  # longer than a batch trains: most die holding one
            if held:
                lease = held.pop()
                with contextlib.suppress(LeaseExpiredError):  # in a kept store, of the job before
                    lease.commit(seen(lease))


def seen(lease: Any) -> list[dict[str, Any]]:
    """Return the group of a lease: prompts of equal tokens, with an image; others' images leave for
    it.
    """
    found = responses(lease)
    for one in found:
        one["image"] = {0: image(lease.number % IMAGES)}
        one["loss_mask"] = np.arange(len(one["tokens"])) == len(one["tokens"]) - 1
    return found


def config_of(data: Path, prompts: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return a section whose groups store images and prompts once."""
    config = with_media(ledger_section(data, prompts, GROUPS, timeout_s=30.0, **options))
    config["tables"]["main"]["schema"]["columns"]["loss_mask"] = {
        "dtype": "bool",
        "role": "loss_mask",
    }
    config["pack"]["pad"]["multiple"] = 4
    return config


def check_rows(micro: Any) -> None:
    """Check that each trajectory of a pack has the tokens and the whole image of its group."""
    for number in range(micro.num_trajectories):
        assert len(set(micro["tokens"][micro.sequence == number].tolist())) == 1
    numbers = [number % IMAGES for number in micro["prompt"].tolist()]
    rows = micro.media.per_place()["patches"]
    grids = micro.media.per_place()["grid"].tolist()
    assert grids == [[number, len(image(number).columns["patches"])] for number in numbers]
    wanted = np.concatenate(
        [np.zeros((0, 3)), *(image(number).columns["patches"] for number in numbers)]
    )
    np.testing.assert_array_equal(rows.numpy(), wanted)


def lines_of(folder: Path, life: int) -> list[dict[str, Any]]:
    path = folder / f"log-{life}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train(folder: Path, rank: int, config: dict[str, Any], life: int, batches: int = 10**6) -> None:
    """Train from the latest save on, saving now and then; log each batch once it is trained."""
    name = f"rendezvous-{life}"
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)
    with Replay(config, info=BatchInfo(1, 1, 2)) as replay:
        if (folder / "saved").exists():
            replay.load(folder / "saved")
        for _ in range(batches):
            rollout = replay.rollout()
            numbers = rollout.values("prompt")[::SIZE].tolist()
            lags = [
                (rollout.number + 1 - length) % 20 for length in rollout.lengths[::SIZE].tolist()
            ]
            if rollout.number % 3 == 1:
                replay.save(folder / "saved")  # while a batch is in training
            for step in rollout:
                for micro in step:
                    check_rows(micro)
            if rank == 0:
                books = check_books(replay)
                line = {"batch": rollout.number, "numbers": numbers, "lags": lags, "books": books}
                with (folder / f"log-{life}").open("a") as log:
                    log.write(json.dumps(line) + "\n")
        dist.barrier()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [0, 1])
def test_kills_of_workers_and_of_all_lose_no_prompt(seed: int, tmp_path: Path) -> None:
    data = write_prompts(tmp_path / "prompts", PROMPTS)
    words = random.Random(seed)
    config = config_of(data, {"max_lag": 1, "attempts": 99}, writers=8)
    seeds = itertools.count(100 * seed)

    def worker() -> int:
        own = next(seeds)
        return in_child(lambda: generate(config, own))

    for life, most in ((0, 10**6), (1, AFTER)):
        ranks = [
            in_child(lambda r=rank, at=life, n=most: train(tmp_path, r, config, at, n))
            for rank in range(2)
        ]
        workers = [worker() for _ in range(2)]
        # since a batch was trained
        kills = 0
        done = 0
        while len(lines_of(tmp_path, life)) < (AFTER if life else BEFORE):
            for rank in ranks:
                ended = os.waitid(os.P_PID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                assert ended is None or ended.si_status == 0
            kills = kills + 1 if len(lines_of(tmp_path, life)) == done else 0
            done = len(lines_of(tmp_path, life))
            time.sleep(words.random() * 0.1 * (1 + kills / 4))  # at last a worker lives long enough
            victim = workers.pop(0)
            os.kill(victim, signal.SIGKILL)
            exit_status(victim)
            workers.append(worker())
        for child in (*workers, *([] if life else ranks)):
            os.kill(child, signal.SIGKILL)
            exit_status(child)
        if life:
            assert [exit_status(rank) for rank in ranks] == [0, 0]
    before = lines_of(tmp_path, 0)
    after = lines_of(tmp_path, 1)
    kept = [line for line in before if line["batch"] < after[0]["batch"]]
    assert kept
    numbers = [number for line in (*kept, *after) for number in line["numbers"]]
    assert numbers == list(range(GROUPS * (after[-1]["batch"] + 1)))
    assert max(lag for line in (*before, *after) for lag in line["lags"]) <= 1
    assert after[-1]["books"]["dropped"] == {}
    assert after[-1]["books"]["leases_returned"] > 0


def generate_remotely(url: str, seed: int) -> None:
    """Generate through the gateway, which is killed and started again."""
    words = random.Random(seed)
    with RemoteRolloutWorker.connect(url, token=TOKEN, timeout_s=30.0) as worker:
        while True:
            for lease in worker.lease(2, timeout_s=0.1):
                time.sleep(words.expovariate(1 / 0.02))
                with contextlib.suppress(LeaseExpiredError):
                    lease.commit(seen(lease))


def serve(config: dict[str, Any], port: int) -> None:
    Gateway(TrajectoryWriter.attach(config, wait_s=30.0), TOKEN, port=port).run()


def give_rewards(config: dict[str, Any], seed: int) -> None:
    """Fill the column `reward` of what is committed; most lose their leases, as they die."""
    words = random.Random(seed)
    with FillWorker.attach(config, "reward", lease_s=0.5, wait_s=30.0) as worker:
        while True:
            for lease in worker.lease(3, timeout_s=0.1):
                time.sleep(words.expovariate(1 / 0.005))
                lease.fill(float(len(lease.columns["tokens"])))


@pytest.mark.skipif(not LONG, reason="long: GEAR_LONG_TESTS=1")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "keeps", [False, True], ids=["with rewards in a second stage", "in a kept store"]
)
def test_three_hundred_kills(keeps: bool, tmp_path: Path) -> None:
    """Of workers, remote ones, their gateway, fill workers, a rank, and all, while they start,
    attach, lease, commit, fill, train and save: the books stay right. In a kept store remote
    workers outlive all others.
    """
    words = random.Random(7)
    seeds = itertools.count()
    kills = Counter[str]()
    data = write_prompts(tmp_path / "prompts", PROMPTS)
    port = free_port()
    prompts = {"max_lag": 1, "attempts": 10**6}
    group = {"needs": ["reward"]}
    config = config_of(data, prompts, writers=16, group=group)
    config["shared_memory"]["keep"] = keeps
    kept = list[dict[str, Any]]()
    url = f"grpc://127.0.0.1:{port}"
    living = list[tuple[str, int]]()
    starts: dict[str, Any] = {
        "worker": lambda: generate(config, next(seeds)),
        "remote worker": lambda: generate_remotely(url, next(seeds)),
        "gateway": lambda: serve(config, port),
        "fill worker": lambda: give_rewards(config, next(seeds)),
    }
    kinds = ["worker"] * 2 + ["remote worker"] * 2 + ["gateway"] + ["fill worker"] * 2

    def kill(kind: str, *children: int) -> None:
        for child in children:
            os.kill(child, signal.SIGKILL)
            exit_status(child)
            kills[kind] += 1

    def start(kind: str) -> tuple[str, int]:
        next(seeds)
        return kind, in_child(starts[kind])

    for life in itertools.count():
        is_last = kills.total() >= 300
        ranks = [
            in_child(lambda r=rank, at=life: train(tmp_path, r, config, at)) for rank in range(2)
        ]
        helpers = living + [start(kind) for kind in kinds if not living or kind != "remote worker"]
        until = time.monotonic() + words.uniform(0.5, 6.0)
        while (
            (time.monotonic() < until) if not is_last else (len(lines_of(tmp_path, life)) < AFTER)
        ):
            time.sleep(words.random() * 0.3)
            kind, victim = helpers.pop(words.randrange(len(helpers)))
            kill(kind, victim)
            helpers.append(start(kind))
        if words.random() < 0.5:  # of one rank: the other one ends with an error
            lost, other = words.sample(ranks, 2)
            kill("rank", lost)
            assert exit_status(other) == 1
            ranks = []
        kill("rank", *ranks)
        living = [one for one in helpers if keeps and one[0] == "remote worker" and not is_last]
        for kind, child in helpers:
            if (kind, child) not in living:
                kill(kind, child)
        lines = lines_of(tmp_path, life)
        if lines:
            assert lines[0]["batch"] <= len(kept)
            kept = kept[: lines[0]["batch"]] + lines
        if is_last:
            break
    remove_garbage(config["shared_memory"]["prefix"], kept=keeps)
    numbers = [number for line in kept for number in line["numbers"]]
    assert numbers == list(range(GROUPS * len(kept)))
    lags = [
        (lag + 10) % 20 - 10 for line in kept for lag in line["lags"]
    ]  # a kept group may be newer
    assert max(lags) <= 1
    print(f"{dict(kills)} killed in {life + 1} lives; {len(kept)} batches; {kept[-1]['books']}")
