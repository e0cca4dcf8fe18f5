"""Lag, idle time and lost work where generation takes simulated time, beside what `gear simulate`
predicts.

python benchmarks/lag.py --predict benchmarks/results/lag_predicted.json
python benchmarks/lag.py --predicted benchmarks/results/lag_predicted.json [--json F]

Lengths are log-normal (sigma 1.2), the same for each rule. Workers and the rank are real processes
on a real table that wait instead of generating and training.
"""

from __future__ import annotations

import heapq
import json
import multiprocessing
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from support.report import Report, print_rows
from leases import section

from deepspeed_gear import (
    Column,
    DatasetWriter,
    LeaseExpiredError,
    Replay,
    RolloutWorker,
    Schema,
    StoreError,
)
from deepspeed_gear.cli.simulate import (
    RULES,
    Lengths,
    Pace,
    Prediction,
    lengths_of,
    read_spec,
    simulate,
)
from deepspeed_gear.config import parse

SIZE = 4
GROUPS = 16
MAX_LAG = 2
LONGEST = 16384
PACE = Pace(latency_s=2e-4, train_s=4e-6, workers=2, concurrency=16)
POLL_S = 2e-3


def config_of(data: Path, order: str, late: str) -> dict[str, Any]:
    """Return a gear section for groups of long responses."""
    config = section(data, SIZE, GROUPS, keep=False)
    table = config["tables"]["rollouts"]
    table |= {"max_length": LONGEST, "capacity_steps": 2048 * table["capacity_trajectories"]}
    table["prompts"] |= {"max_lag": MAX_LAG, "order": order, "late": late}
    config["pack"] = {"tokens": LONGEST}
    return config


def lengths_by_number() -> Lengths:
    drawn = lengths_of("lognormal:300,1.2", 0, SIZE)
    return lambda number: np.minimum(drawn(number), LONGEST)


def work(config: dict[str, Any], lengths: Lengths, held_s: Any, lost: Any) -> None:
    """Hold up to `PACE.concurrency` leases, each until its longest response is there, until the run
    ends.
    """
    with RolloutWorker.attach(config) as worker:
        held = list[tuple[float, int, Any]]()
        before = time.monotonic()
        while True:
            room = PACE.concurrency - len(held)
            try:
                for lease in worker.lease(room, timeout_s=0 if held else 0.05) if room else ():
                    end = time.monotonic() + lengths(lease.number).max() * PACE.latency_s
                    heapq.heappush(held, (end, lease.number, lease))
                while held and held[0][0] <= time.monotonic():
                    lease = heapq.heappop(held)[2]
                    tokens = [np.ones(length, np.int32) for length in lengths(lease.number)]
                    try:
                        lease.commit(
                            [{"tokens": one, "reward": np.float32(lease.version)} for one in tokens]
                        )
                    except LeaseExpiredError:  # too old
                        lost.value += int(lengths(lease.number).sum())
            except StoreError:  # the ranks have ended
                return
            time.sleep(POLL_S)
            now = time.monotonic()
            held_s.value += len(held) * (now - before)
            before = now


def run(order: str, late: str, batches: int, lengths: Lengths) -> Prediction:
    """Wait for so many rollout batches as long as generating and training takes; return what was
    seen.
    """
    start = multiprocessing.get_context("fork")
    shared = [(start.Value("d", 0.0), start.Value("q", 0)) for _ in range(PACE.workers)]
    lags = list[float]()
    trained = list[int]()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts"
        with DatasetWriter(data, Schema([Column("tokens", "int32", role="token")])) as writer:
            for number in range(1000):
                writer.add({"tokens": np.full(4, number)})
        config = config_of(data, order, late)
        with Replay(config) as replay:
            children = [start.Process(target=work, args=(config, lengths, *one)) for one in shared]
            for child in children:
                child.start()
            begin = time.monotonic()
            training_s = 0.0
            for batch in range(batches):
                rollout = replay.rollout()
                at = time.monotonic()
                numbers = rollout.values("prompt")[::SIZE].tolist()
                trained += numbers
                lags += (batch - rollout.values("reward")[::SIZE]).tolist()
                time.sleep(sum(int(lengths(number).sum()) for number in numbers) * PACE.train_s)
                for _ in rollout:  # ends the batch
                    pass
                training_s += time.monotonic() - at
            seconds = time.monotonic() - begin
            counts = replay.statistics()
            books = counts["prompts"]["rollouts"]
            lost = counts["stale"]["rollouts"]["steps"]
            generating_s = sum(seconds.value for seconds, _ in shared)
            lost += sum(tokens.value for _, tokens in shared)
        for child in children:
            child.join()
    of_trained, of_all = (
        np.concatenate([lengths(number) for number in numbers])
        for numbers in (trained, range(books["issued"]))
    )
    return Prediction(
        order,
        late,
        tokens_per_s=int(of_trained.sum()) / seconds,
        learner_idle=1 - training_s / seconds,
        workers_idle=1 - generating_s / (PACE.workers * PACE.concurrency * seconds),
        mean_lag=float(np.mean(lags)),
        largest_lag=books["largest_lag"],
        dropped=lost / (lost + int(of_trained.sum())),
        length_bias=float(of_trained.mean() / of_all.mean()) - 1,
    )


def main() -> None:
    """Run from the command line."""
    report = Report(
        __doc__,
        predict=(Path, "write the predictions to this file, and run nothing"),
        predicted=(Path, "file of predictions to compare the runs with"),
        batches=(60, "rollout batches of each run"),
    )
    lengths = lengths_by_number()
    given = report.options
    if given.predicted is not None:
        rows = json.loads(given.predicted.read_text())["rows"]
    else:
        spec = read_spec(parse(config_of(Path("prompts"), "lease", "wait")))[0]
        rules = [replace(spec, order=order, late=late) for order, late in RULES]
        made = [simulate(rule, lengths, PACE, given.batches) for rule in rules]
        rows = [asdict(prediction) | {"kind": "predicted"} for prediction in made]
    if given.predict is None:
        rows += [asdict(run(*rule, given.batches, lengths)) | {"kind": "run"} for rule in RULES]
    print_rows(rows)
    report.write(rows, path=given.predict)


if __name__ == "__main__":
    main()
