"""Rates, queues and limits of draws hold for all nodes together."""

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batch_records import priorities
from cluster_support import Cluster
from gear_support import SCHEMA, config_of, lengths_of, trajectory
from process_support import in_child, kill
from replay_cases import digests

from deepspeed_gear import Replay, TrajectoryWriter
from deepspeed_gear.errors import GearError, StoreError
from deepspeed_gear.store.rate_limiter import RateLimiter

BATCH = 12
COUNT = 40
RATE = {"min_size": 100, "samples_per_insert": 0.2, "error_buffer": 120.0}
SELDOM = {"min_size": 20, "samples_per_insert": 5.0, "error_buffer": 100.0}


def prioritized(normalize: str | None) -> dict[str, Any]:
    options = {"kind": "prioritized", "unit": "trajectory", "alpha": 0.7, "beta": 0.5}
    return {**options, "normalize": normalize}


def section_of(
    kind: str | dict[str, Any], unit: str = "trajectory", **table: Any
) -> dict[str, Any]:
    """Return a gear section with a table of 60 trajectories of at most 30 steps, and more options
    of it.
    """
    sampler = {"kind": kind, "unit": unit} if isinstance(kind, str) else kind
    sizes = {"capacity_steps": 900, "capacity_trajectories": 60, "max_length": 30}
    fields = {"code": {"length": 3}, "task": {}, "observation": {"offset": -1, "length": 2}}
    section = config_of(None, sampler=sampler, fields=fields, batch_size=BATCH, seed=3)
    return {**section, "tables": {"main": {**sizes, **table}}}


def sections() -> dict[str, dict[str, Any]]:
    """Return the gear section of each case by name."""

    return {
        "times": section_of("uniform", max_times_sampled=3),
        "once": section_of("length", max_times_sampled=1),
        "seldom": section_of("uniform", max_times_sampled=30, rate_limiter=SELDOM),
        "priorities": section_of(prioritized("batch"), max_times_sampled=4),
        "least_of_table": section_of(prioritized("table"), max_times_sampled=4),
        "number_of_items": section_of(prioritized(None), max_times_sampled=4),
        "ahead": {**section_of("uniform", max_times_sampled=3), "prefetch": 1},
        "newest": section_of("lifo", max_times_sampled=2),
        "queue": section_of("fifo", rate_limiter={"queue": 60}),
        "rate_limiter": section_of("uniform", "step", rate_limiter=RATE),
    }


def fill(section: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fill a table on one node, use a batch and save it; return its state."""
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        for number, steps in enumerate(lengths_of(COUNT)):
            replay.add(trajectory(number, steps))
        replay.sample()
        return replay.save(folder)


def rest(section: dict[str, Any], folder: Path, state: dict[str, Any]) -> list[dict[str, str]]:
    """Load a table and take all batches that it is good for: digests by sample number, batch by
    batch.
    """
    found: list[dict[str, str]] = []
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        replay.load(folder, state)
        reports = replay.config.item_sampler.kind == "prioritized"
        while replay.can_sample():
            batch = replay.sample()
            found.append(digests(batch))
            if reports:
                replay.update_priorities(batch, priorities(batch))
    return found


Cases = dict[str, tuple[dict[str, Any], str, dict[str, Any]]]


STEPS = {"min_size": 60, "samples_per_insert": 1.0, "error_buffer": 29.0}  # as little as may be
TRAJECTORIES = {"min_size": 5, "samples_per_insert": 2.0, "error_buffer": 7.0}
QUEUE = {"queue": 14}
PHASES: dict[str, dict[str, Any]] = {
    "both": {"actors": [2, 0, 2, 0], "unit": "step", "rate_limiter": STEPS, "batches": 150},
    "one": {
        "actors": [0, 0, 1, 1],
        "unit": "trajectory",
        "rate_limiter": TRAJECTORIES,
        "batches": 80,
    },
    "lost": {
        "actors": [2, 0, 2, 0],
        "unit": "step",
        "rate_limiter": STEPS,
        "batches": 100,
        "lose": 40,
    },
    "queue": {"actors": [1, 0, 0, 1], "unit": "trajectory", "rate_limiter": QUEUE, "batches": 80},
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    folder = tmp_path_factory.mktemp("rates")
    return {
        name: (one, str(folder / name), fill(one, folder / name))
        for name, one in sections().items()
    }


@dataclass(frozen=True)
class Run:
    """What the ranks of two nodes, two each, have seen, and the folder where their actors have
    written.
    """

    seen: list[dict[str, Any]]
    out: Path


def run(
    cluster: Cluster, out: Path, cases: Cases, phases: dict[str, Any], nodes: int, ranks: int
) -> Run:
    given = drawn, cases, phases, out
    return Run(cluster.call_ranks(*given, nodes=nodes, ranks=ranks, timeout_s=280.0), out)


@pytest.fixture(scope="module")
def found(cluster: Cluster, cases: Cases, tmp_path_factory: pytest.TempPathFactory) -> Run:
    phases = {}
    for name, phase in PHASES.items():
        kind = "fifo" if name == "queue" else "uniform"
        rate = {**phase["rate_limiter"], "timeout_s": 30.0}
        section = section_of(kind, phase["unit"], remove="fifo", writers=2, rate_limiter=rate)
        section["shared_memory"] = {"prefix": f"rates{name}"}
        phases[name] = {"lose": None, **phase, "section": section}
    return run(cluster, tmp_path_factory.mktemp("two"), cases, phases, 2, 2)


# ---- the same batches ----------------------------------------------------------------------------


def check_batches(cases: Cases, of_ranks: list[dict[str, Any]]) -> None:
    """One node has filled a table; others have gone on with it until nothing more may be drawn."""
    for name, (section, folder, state) in cases.items():
        together = [
            {key: digest for part in parts for key, digest in part.items()}
            for parts in zip(*(seen["cases"][name] for seen in of_ranks), strict=True)
        ]
        assert together == rest(section, Path(folder), state), name


def test_two_nodes_draw_what_one_draws(cases: Cases, found: Run) -> None:
    check_batches(cases, found.seen)


def test_three_nodes_draw_what_one_draws(cluster: Cluster, cases: Cases, tmp_path: Path) -> None:
    some = {name: cases[name] for name in ("times", "least_of_table", "queue", "rate_limiter")}
    check_batches(some, run(cluster, tmp_path, some, {}, 3, 1).seen)


# ---- writers of all nodes ------------------------------------------------------------------------


def rate_of(name: str) -> RateLimiter:
    options: Any = PHASES[name]["rate_limiter"]
    if name == "queue":
        return RateLimiter.queue("trajectory", options["queue"])
    return RateLimiter.ratio(PHASES[name]["unit"], *(options[key] for key in STEPS))


def additions(out: Path, name: str) -> np.ndarray:
    """When each addition began and ended, and its items. [n, 3]."""
    found = np.concatenate(
        [np.fromfile(path).reshape(-1, 3) for path in sorted(out.glob(f"{name}.actor*"))]
    )
    if PHASES[name]["unit"] == "trajectory":
        found[:, 2] = 1
    return found


def times(run: Run, name: str, which: int) -> np.ndarray:
    """When each batch was first asked for (0) or there (1) on a rank. [batches]."""
    return np.array([[sample[which] for sample in seen["phases"][name]] for seen in run.seen]).min(
        0
    )


@pytest.mark.parametrize("name", PHASES)
def test_the_rate_is_never_passed(name: str, found: Run) -> None:
    """At the end of each addition: what was added by then, and the samples that were asked for by
    then.
    """
    rate = rate_of(name)
    added = additions(found.out, name)
    added = added[np.argsort(added[:, 1])]
    inserted = np.cumsum(added[:, 2])
    sampled = BATCH * np.searchsorted(times(found, name, 0), added[:, 1])
    ahead = inserted * rate.samples_per_insert - sampled
    assert ahead[inserted > rate.min_size].max() <= rate.most
    assert ahead.max() > rate.most - 30 * rate.samples_per_insert, "or this test says nothing"


@pytest.mark.parametrize("name", ["both", "one", "queue"])
def test_nothing_is_sampled_too_early(name: str, found: Run) -> None:
    rate = rate_of(name)
    added = additions(found.out, name)
    begun = added[np.argsort(added[:, 0])]
    inserted = np.append(0, np.cumsum(begun[:, 2]))[
        np.searchsorted(begun[:, 0], times(found, name, 1))
    ]
    sampled = BATCH * np.arange(1, len(inserted) + 1)
    assert (inserted * rate.samples_per_insert - sampled).min() >= rate.least
    assert inserted[0] >= rate.min_size


def test_a_queue_gives_each_once(found: Run) -> None:
    ids = [
        number for seen in found.seen for _, _, part in seen["phases"]["queue"] for number in part
    ]
    assert len(ids) == len(set(ids)) == PHASES["queue"]["batches"] * BATCH


def test_who_is_left_goes_on(found: Run) -> None:
    """After the death of the actors of one node those of the other bring what all ranks need."""
    died = found.seen[2]["phases"]["lost"][PHASES["lost"]["lose"]][1]
    late = [
        int((np.fromfile(found.out / f"lost.actor{index}")[1::3] > died).sum()) for index in (0, 1)
    ]
    assert sum(late) > 15
    assert any(len(np.fromfile(path)) for path in found.out.glob("lost.actor2*")), (
        "or nobody has died"
    )


# ---- waiting -------------------------------------------------------------------------------------


def test_a_wait_ends_on_all_nodes_at_once(found: Run) -> None:
    for seen in found.seen:
        at_once, what, before, behind, drawn = seen["late"]
        assert "must be filled first, as its rate limiter requires" in at_once, (
            "all ranks wait: none adds"
        )
        assert "NotReadyError" in what
        assert "must be filled within 0.5 s" in what
        assert "0 steps held by all nodes" in what
        assert (before, behind, len(drawn)) == (False, True, 3)


def test_nobody_waits_for_a_rank_that_writes_itself(found: Run) -> None:
    for seen in found.seen:
        what, before, behind, drawn, again = seen["collecting"]
        assert "NotReadyError" in what
        assert "call can_sample() first" in what
        assert (before, behind, len(drawn)) == (False, True, 3)
        assert "NotReadyError" in again, "each was drawn once"
    drawn = [number for seen in found.seen for number in seen["collecting"][3]]
    assert len(set(drawn)) == 12


def test_nobody_waits_for_items_whose_priorities_are_0(found: Run) -> None:
    for seen in found.seen:
        what, drawn = seen["without"]
        assert "must hold what the sampler admits" in what
        assert len(drawn) == 3


def test_ranks_of_all_nodes_act_and_learn(found: Run) -> None:
    acting = [seen["acting"] for seen in found.seen]
    assert [seen["batches"] for seen in acting] == [12] * 4
    assert all(seen["answers"] == acting[0]["answers"] for seen in acting)
    added = sum(seen["added"] for seen in acting)
    assert 12 * BATCH - 20 <= added <= 12 * BATCH + 220


def test_the_end_of_a_node_ends_the_waits_of_others(found: Run) -> None:
    assert all(len(what) == 3 for seen in found.seen for what in seen["ended"][:2])
    for seen in found.seen[:2]:
        assert "PeerError" in seen["ended"][2]
        assert "ended before global batch 2" in seen["ended"][2]


# ---- on each rank: batches, and tables that actors of the nodes fill at full speed ---------------

ENTRY = struct.Struct("=3d")
BATCHES = 12  # of ranks that act
ACTORS: dict[str, list[int]] = {}  # of each phase, on this rank


def drawn(cases: Cases, phases: dict[str, Any], out: Path) -> dict[str, Any]:
    """Return what this rank sees of cases, of phases, and of waits for them.

    A phase has a `section`, numbers of `actors` of each rank and of `batches`, and `lose`: the
    batch after which the actors of rank 2 are killed, or None.
    """
    found: dict[str, Any] = {
        "cases": {
            name: rest(section, Path(at), state) for name, (section, at, state) in cases.items()
        },
        "phases": {
            name: learn(phase["section"], phase["batches"], phase["lose"], ACTORS[name])
            for name, phase in phases.items()
        },
    }
    if phases:
        found |= {"late": late(), "collecting": collecting(), "without": without_priorities()}
        found |= {"acting": acting(out), "ended": ended()}
    return found


def start_actors(cases: Cases, phases: dict[str, Any], out: Path) -> None:
    """Start this rank's; each writes when its additions began and ended, and how many steps they
    had.
    """
    rank = int(os.environ["RANK"])
    for name, phase in phases.items():
        numbers = range(10 * rank, 10 * rank + phase["actors"][rank])
        ACTORS[name] = [
            in_child(lambda n=name, p=phase, i=i: act(p["section"], out / f"{n}.actor{i}", i + 1))
            for i in numbers
        ]


drawn.before_group = start_actors  # type: ignore[attr-defined]


def act(section: dict[str, Any], log: Path, seed: int) -> None:
    """Add trajectories of random lengths until the ranks have ended; every fourth is as long as may
    be.
    """
    random = np.random.default_rng(seed)
    longest = section["tables"]["main"]["max_length"]
    with (
        TrajectoryWriter.attach(section, wait_s=120.0) as writer,
        log.open("wb", buffering=0) as file,
    ):
        for number in range(10**6):
            steps = longest if number % 4 == 0 else int(random.integers(1, longest + 1))
            made = trajectory(seed * 10**6 + number, steps)
            begin = time.monotonic()
            try:
                writer.add(made)
            except StoreError:
                return
            file.write(ENTRY.pack(begin, time.monotonic(), steps))


def learn(section: dict[str, Any], batches: int, lose: int | None, actors: list[int]) -> list[Any]:
    """Take so many global batches."""
    seen = []
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        dist.barrier()
        time.sleep(1.0)  # actors come as far ahead as they may
        for number in range(batches):
            begin = time.monotonic()
            batch = replay.sample()
            seen.append((begin, time.monotonic(), batch.trajectory_id.tolist()))
            for actor in actors if number == lose and dist.get_rank() == 2 else []:
                kill(actor)
        dist.barrier()
    return seen


# ---- waits for a rate limiter, and their ends ----------------------------------------------------


def tried(replay: Replay) -> Any:
    """What comes of a sample: its trajectories, or an error's text."""
    try:
        return sorted(replay.sample().trajectory_id.tolist())
    except GearError as error:
        return f"{type(error).__name__}: {error}"


def late() -> list[Any]:
    """No process adds; then one rank does. At first none may add, then an actor might."""
    rate = {"min_size": 50, "timeout_s": 0.5}
    alone = section_of("uniform", "step", rate_limiter={**rate, "timeout_s": 60.0})
    with Replay(alone, schemas={"main": SCHEMA}) as replay:
        found: list[Any] = [tried(replay)]
    section = section_of("uniform", "step", rate_limiter=rate, writers=1)
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        found += [tried(replay), replay.can_sample()]
        if dist.get_rank() == 3:
            for number in range(2):
                replay.add(trajectory(number, 25))
        return [*found, replay.can_sample(), tried(replay)]


def collecting() -> list[Any]:
    """A rank that writes must not wait for itself, and so no process does."""
    with Replay(section_of("uniform", max_times_sampled=1), schemas={"main": SCHEMA}) as replay:
        if dist.get_rank() == 3:
            writer = replay.writer()
        dist.barrier()
        found = [tried(replay), replay.can_sample()]
        for number in range(12 if dist.get_rank() == 3 else 0):
            writer.add(trajectory(number, 5))
        return [*found, replay.can_sample(), tried(replay), tried(replay)]


def without_priorities() -> list[Any]:
    """The limit admits samples of all items, but none has a priority above 0; then they have."""
    section = section_of("prioritized", max_times_sampled=9)
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        ids = [replay.add(trajectory(number, 5)) for number in range(4)]
        replay.set_priorities(ids, torch.zeros(4))
        found = [tried(replay)]
        replay.set_priorities(ids, torch.ones(4))
        return [*found, tried(replay)]


def acting(folder: Path) -> dict[str, Any]:
    """Every rank adds as long as nothing can be sampled, also after a checkpoint."""
    rate = {"min_size": 100, "samples_per_insert": 1.0, "error_buffer": 120.0}
    found: dict[str, Any] = {"batches": 0, "answers": [], "added": 0}
    with Replay(
        section_of("uniform", "step", remove="fifo", rate_limiter=rate), schemas={"main": SCHEMA}
    ) as replay:
        writer = replay.writer()
        while found["batches"] < BATCHES:
            answer = replay.can_sample()
            found["answers"].append(answer)
            if answer:
                replay.sample()
                found["batches"] += 1
                if found["batches"] == BATCHES // 2:
                    replay.load(folder / "saved", replay.save(folder / "saved"))
            else:
                steps = 30 if dist.get_rank() == 1 else 5 + dist.get_rank()
                found["added"] += steps
                writer.add(trajectory(len(found["answers"]), steps))
        return found


def ended() -> list[Any]:
    """There are items for two batches; one node ends while the threads of both wait for
    the third.
    """
    section = {**section_of("uniform", max_times_sampled=1), "prefetch": 1}
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        for number in range(6):
            replay.add(trajectory(10 * dist.get_rank() + number, 5))
        dist.barrier()
        return [tried(replay) for _ in range(2 if dist.get_rank() >= 2 else 3)]
