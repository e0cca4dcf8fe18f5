"""One replay by its config, on any number of ranks and nodes: what each of its micro
batches holds.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from batch_records import priorities
from replay_support import streams_of

from deepspeed_gear import Batch, Replay
from deepspeed_gear.config import parse

BATCH = 24
WINDOWS: dict[str, dict[str, Any]] = {
    "observation": {"offset": -3, "length": 4},
    "action": {},
    "return_to_go": {"offset": -1, "length": 3, "align": "right", "pad": "edge"},
    "late": {"column": "code", "offset": 3, "length": 2, "pad": "edge"},
    "task": {},
    "timestep": {"offset": -1, "length": 3},
}
FOLLOWING: dict[str, dict[str, Any]] = {
    "observation": {},
    "next": {"column": "observation", "offset": "n_step"},
    "action": {},
}
GOALS: dict[str, dict[str, Any]] = {"code": {"hindsight": "code"}, "action": {}}


def prioritized(unit: str, **options: Any) -> dict[str, Any]:
    return {"kind": "prioritized", "unit": unit, "alpha": 0.6, "beta": 0.4, **options}


def cases(data: Path, other: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of all cases by name; `data` has an evaluation split."""

    def case(kind: str = "uniform", unit: str = "step", **options: Any) -> dict[str, Any]:
        return {
            "data": str(data),
            "sampler": {"kind": kind, "unit": unit},
            "fields": WINDOWS,
            **options,
        }

    def estimated(**options: Any) -> dict[str, Any]:
        window = {"offset": -2, "length": 5}
        advantage = {"value": "reward", "next_value": "reward", "gamma": 0.9, **options}
        return case(fields={"advantage": window, "value_target": window}, advantage=advantage)

    mixed = {
        "tables": {"a": {"data": str(data)}, "b": {"data": {"path": str(other), "load": "mmap"}}},
        "fields": WINDOWS,
    }
    shares = {"kind": "mixture", "shares": {"a": 0.3, "b": 0.7}}
    return {
        "uniform": case(),
        "over_devices": case(exchange="device"),
        "priorities_over_devices": case(
            sampler=prioritized("step"),
            fields=FOLLOWING,
            n_step={"n": 3, "gamma": 0.9},
            exchange="device",
        ),
        "mixture_over_devices": {
            **mixed,
            "sampler": {**shares, "of": {"unit": "step"}},
            "exchange": "device",
        },
        "trajectories": case(unit="trajectory", prefetch=2),
        "stratified": case(sampler={"kind": "uniform", "unit": "step", "stratified": True}),
        "mapped": case(data={"path": str(data), "load": "mmap", "split": {"eval": 0.3}}),
        "length": case("length", "trajectory"),
        "weighted": case(sampler={"kind": "weighted", "unit": "step", "weight": "task"}),
        "epoch": case("epoch", prefetch=1),
        "short_epochs": case("epoch", "trajectory", count_draws=True),
        "dropped_tail": case(sampler={"kind": "epoch", "unit": "trajectory", "tail": "drop"}),
        "prioritized": case(sampler=prioritized("step")),
        "prioritized_table": case(sampler=prioritized("trajectory", normalize="table")),
        "prioritized_plain": case(sampler=prioritized("step", normalize=None), prefetch=2),
        "top_k": case("top_k"),
        "top_k_trajectories": case("top_k", "trajectory"),
        "fifo": case("fifo"),
        "lifo": case("lifo"),
        "recent": case(sampler={"kind": "recent", "unit": "step", "newest": 150}),
        "recent_column": case(
            sampler={"kind": "recent", "unit": "step", "within": {"column": "task", "distance": 2}}
        ),
        "n_step": case(fields=FOLLOWING, n_step={"n": 3, "gamma": 0.9}),
        "gae": estimated(kind="gae", lam=0.9),
        "vtrace": estimated(
            kind="vtrace", log_prob="reward", behaviour_log_prob="reward", c_bar=0.75
        ),
        "hindsight": case(fields=GOALS, hindsight={"strategy": "future", "fraction": 0.8}),
        "mixture": {**mixed, "sampler": {**shares, "of": prioritized("step")}, "prefetch": 1},
        "verified": case(verify_every=2, prefetch=1),
        "replicated": case(data={"path": str(data), "replicate": True, "split": {"eval": 0.3}}),
        "replicated_prioritized": case(
            data={"path": str(data), "replicate": True}, sampler=prioritized("step"), prefetch=1
        ),
    }


def run_case(section: dict[str, Any], steps: int, accumulation: int) -> dict[str, Any]:
    """Take some global batches and a pass over the split; return digests by sample number."""
    sizes = {"batch_size": BATCH, "gradient_accumulation_steps": accumulation}
    config = parse({"seed": 5, "timeout_s": 60.0, **section, **sizes})
    found: dict[str, Any] = {"train": [], "eval": {}, "digest": None}
    with Replay(config) as replay:
        reports = config.item_sampler.kind in ("prioritized", "top_k")
        for step in range(steps):
            seen: dict[str, str] = {}
            for _ in range(accumulation):
                batch = replay.sample()
                seen.update(digests(batch))
                if reports:
                    replay.update_priorities(batch, priorities(batch))
            if reports and step == 2:
                by_id(replay)
            found["train"].append(seen)
        found["digest"] = replay.metrics.digest
        for split in (name for name in streams_of(replay) if name != "train"):
            found["eval"]["batches"] = replay.num_batches(split)
            batches: Iterable[Batch] = replay.iterator(split)
            found["eval"].update({key: d for batch in batches for key, d in digests(batch).items()})
    return found


def by_id(replay: Replay) -> None:
    """Report some priorities by id, the same on every rank."""
    if len(replay.config.sampled_tables) > 1:
        return
    ids = torch.arange(0, 30, 3)
    steps = None if replay.config.item_sampler.unit == "trajectory" else torch.zeros_like(ids)
    replay.set_priorities(ids, 5.0 + ids.double(), steps)


def digests(batch: Batch, with_ids: bool = True) -> dict[str, str]:
    """Return a digest of everything about each sample, by table and sample number."""
    parts = [batch[name] for name in sorted(batch)] + [
        batch.mask[name] for name in sorted(batch.mask)
    ]
    known = ("anchor", "num_steps", "is_weight", "probability", "epoch", "valid", "goal_step")
    parts += [getattr(batch, name) for name in (*known, *(["trajectory_id"] if with_ids else []))]
    rows = [part.contiguous().reshape(batch.num_samples, -1).numpy() for part in parts]
    found = {}
    for i, (table, number) in enumerate(
        zip(batch.source.tolist(), batch.sample_number.tolist(), strict=True)
    ):
        seen = hashlib.blake2b(digest_size=6)
        for row in rows:
            seen.update(np.ascontiguousarray(row[i]).tobytes())
        found[f"{table}:{number}"] = seen.hexdigest()
    return found


def together(of_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all ranks saw as if it were one rank's."""
    train = [
        {k: d for seen in step for k, d in seen.items()}
        for step in zip(*(r["train"] for r in of_ranks), strict=True)
    ]
    evaluated = {key: d for rank in of_ranks for key, d in rank["eval"].items()}
    return {"train": train, "eval": evaluated, "digest": of_ranks[0]["digest"]}
