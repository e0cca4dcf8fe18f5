"""Kinds of parallelism, and what an engine's ranks must have seen of each, on however
many nodes.
"""

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batch_records import Arrays, alone
from gear_support import STEP, config_of
from parallel_engines import KNOWN, train_modes

from deepspeed_gear.config import parse
from deepspeed_gear.replay.preview import preview

WINDOW = 4
FIELDS: dict[str, dict[str, Any]] = {
    "observation": {"offset": -3, "length": WINDOW},
    "action": {},
    "code": {},
    "late": {"column": "code", "offset": -1, "length": WINDOW, "align": "right", "pad": "edge"},
    "position": {"length": WINDOW},
}
ENDS = {
    "inputs": ["observation", "code"],
    "labels": ["action", "code", "trajectory_id", "mask.action", "is_weight"],
}
MODES = {  # what the program makes: ranks, replicas
    "zero:0x2": (2, 2),
    "zero:1x2": (2, 2),
    "zero:2x2": (2, 2),
    "zero:3x4": (4, 4),
    "hpz:2": (2, 2),
    "megatron:2x2": (4, 2),
    "tensor:2": (2, 1),
    "tensor:2x2": (4, 2),
    "tp_model_init:2": (2, 1),
    "pipe:2": (2, 1),
    "pipe:3": (3, 1),
    "pipe:2x2": (4, 2),
    "pipe:2x1x2": (4, 1),
    "ulysses:2x2": (4, 2),
    "mesh:2x2": (4, 2),
    "expert:2": (2, 2),
}
# Those that can follow each other in one process: DeepSpeed keeps groups of the last engine in
# globals.
TOGETHER = [
    [
        "zero:0x2",
        "zero:1x2",
        "zero:2x2",
        "expert:2",
        "hpz:2",
        "pipe:2",
        "tensor:2",
        "tp_model_init:2",
    ],
    ["zero:3x4", "pipe:2x2", "pipe:2x1x2", "megatron:2x2", "ulysses:2x2", "tensor:2x2"],
    ["mesh:2x2"],
    ["pipe:3"],
]
BATCH = 12
STEPS = 12
ROW_BYTES = {"observation": 12, "action": 8, "code": 8, "late": 8, "position": 8}
UNIFORM = {"kind": "uniform", "unit": "step"}
PRIORITIZED = {"kind": "prioritized", "unit": "step", "alpha": 0.7, "beta": 0.5}
CASES = {
    "uniform": {"accumulation": 3, "gear": {"sampler": UNIFORM, "prefetch": 1, "verify_every": 6}},
    "prioritized": {"accumulation": 1, "gear": {"sampler": PRIORITIZED, "verify_every": 5}},
}


def section(data: Path) -> dict[str, Any]:
    return config_of(data, fields=FIELDS, pipeline=ENDS, seed=3, timeout_s=60.0)


def check_modes(
    call: Callable[..., list[Any]], dataset: Path, out: Path, modes: Sequence[str]
) -> None:
    """Train engines on the ranks of `call`, which must see their parts of one process's batches."""
    replicas = {mode: MODES[mode][1] for mode in modes}
    found = call(train_modes, replicas, section(dataset), CASES, STEPS, out)
    for case, whole in batches_alone(dataset).items():
        digest = digest_of(dataset, case, whole)
        for mode in modes:
            check_case([rank[mode][case] for rank in found], case, whole, replicas[mode], digest)


@functools.cache
def batches_alone(dataset: Path) -> dict[str, Arrays]:
    """Return the global batches of one process without an engine, by case."""
    return {
        name: alone({**section(dataset), **case["gear"], "batch_size": BATCH}, STEPS, KNOWN)
        for name, case in CASES.items()
    }


def wanted_fields(report: dict[str, Any], stages: int) -> set[str]:
    """Return the fields that a place needs."""
    stage = report["coordinates"]["pipe"]
    if stages == 1:
        return set(FIELDS)
    names = (ENDS["inputs"] if stage == 0 else []) + (ENDS["labels"] if stage == stages - 1 else [])
    return {name.removeprefix("mask.") for name in names} & set(FIELDS)


def rows_of(seen: Arrays, name: str, part: int, parts: int) -> int:
    """Count the real rows of a field that a rank reads, from ids and anchors alone."""
    field = FIELDS[name]
    length = field.get("length", 1)
    begin = seen["anchor"] + field.get("offset", 0)
    rows = seen["num_steps"] + (name == "observation")
    first = np.clip(begin, 0, rows)
    last = np.clip(begin + length, 0, rows)
    place = np.where(field.get("align") == "right", length - (last - first), first - begin)
    low = part * length // parts
    high = (part + 1) * length // parts
    if "length" not in field:
        low = 0
        high = 1
    return int(
        np.clip(np.minimum(place + last - first, high) - np.maximum(place, low), 0, None).sum()
    )


def digest_of(dataset: Path, case: str, whole: Arrays) -> tuple[int, int]:
    """Return the last digest that a run logs; a preview, which knows no priorities, must show the
    same.
    """
    every = CASES[case]["gear"]["verify_every"]
    last = (STEPS - 1) // every * every
    rows = np.stack([whole["trajectory_id"][last], whole["anchor"][last]], axis=1)
    digest = int.from_bytes(
        hashlib.blake2b(rows.tobytes(), digest_size=8).digest(), "little", signed=True
    )
    if case == "uniform":
        gear = {**section(dataset), **CASES[case]["gear"]}
        shown = preview(parse(gear), BATCH, 1, {}, 1, last + 1)
        assert shown.digests[last] == digest
    return last, digest


def check_case(
    found: list[tuple[dict[str, Any], Arrays]],
    case: str,
    whole: Arrays,
    replicas: int,
    digest: tuple[int, int],
) -> None:
    places = [tuple(report["coordinates"].values()) for report, _ in found]
    assert len(set(places)) == len(places)
    worlds = {
        axis: 1 + max(r["coordinates"][axis] for r, _ in found)
        for axis in found[0][0]["coordinates"]
    }
    assert worlds["data"] == replicas
    assert math.prod(worlds.values()) == len(found)
    by_replica: dict[int, list[Arrays]] = defaultdict(list)
    for report, seen in found:
        assert report["global_batch"] == BATCH
        fields = wanted_fields(report, worlds["pipe"])
        assert report["reads"] == bool(fields) == bool(seen)
        if not seen:
            continue
        by_replica[report["coordinates"]["data"]].append(seen)
        assert fields == set(FIELDS) & set(seen)
        part = report["coordinates"]["sequence"]
        parts = worlds["sequence"]
        check_values(seen, whole, fields, part, parts)
        samples = STEPS * BATCH // replicas
        length = {name: FIELDS[name].get("length", parts) // parts for name in fields}
        size = sum(samples * length[name] * ROW_BYTES[name] for name in fields)
        real = sum(rows_of(seen, name, part, parts) for name in fields)
        if case == "prioritized":  # the other one prefetches
            assert report["bytes"] * STEPS == pytest.approx(size), report
            assert report["padding"] == pytest.approx(
                1 - real / (samples * sum(length.values()))
            ), report
    for seen_by_replica in by_replica.values():
        for seen in seen_by_replica[1:]:
            for name in ("sample_number", "trajectory_id", "anchor", "is_weight"):
                assert (seen[name] == seen_by_replica[0][name]).all(), name
    numbers = np.concatenate([part[0]["sample_number"] for part in by_replica.values()], axis=1)
    assert (np.sort(numbers, axis=1) == whole["sample_number"]).all()
    if case == "prioritized":
        assert sum(report["reports"] for report, _ in found) == replicas
        applied = {report["node"]: report["applied"] for report, _ in found}
        assert sum(applied.values()) == (STEPS - 1) * BATCH, (
            "each sample once, by the node that holds it"
        )
    digests = {tuple(report["digest"]) for report, seen in found if seen}
    assert digests == {digest}


def check_values(seen: Arrays, whole: Arrays, fields: set[str], part: int, parts: int) -> None:
    """Check that a rank's samples are those of these numbers, and its windows the right parts."""
    place = (
        seen["sample_number"] - whole["sample_number"][:, :1]
    )  # in the global batch, which is in order
    rows = np.arange(len(place))[:, None]
    assert (whole["sample_number"][rows, place] == seen["sample_number"]).all()
    for name in ("trajectory_id", "anchor", "is_weight", "num_steps"):
        assert (whole[name][rows, place] == seen[name]).all(), name
    for field in fields:
        for name in (field, f"mask.{field}"):
            wanted = whole[name][rows, place]
            if "length" in FIELDS[field]:
                size = WINDOW // parts
                wanted = wanted[:, :, part * size : (part + 1) * size]
            assert seen[name].dtype == wanted.dtype
            assert seen[name].shape == wanted.shape, name
            assert seen[name].tobytes() == np.ascontiguousarray(wanted).tobytes(), name
    if "code" in fields:
        assert (seen["code"] == seen["trajectory_id"] * STEP + seen["anchor"]).all()
