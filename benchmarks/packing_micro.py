"""What a packed micro batch costs: the op against a loop of memcpy, and everything around the op.

The rows are those of the micro batches of real steps. `limit` copies the same rows of the same
columns by memcpy, a piece for each trajectory and column, into buffers that are used again. `op` is
`pack_` into the same buffers; both take turns over all packs, which are more than a core's caches
hold. Tokens become int64 and are written twice, as inputs and as targets, which no memcpy does.
`micro` is the next micro batch of a step as a program takes it, from the packing plan's list to its
tensors, which lie in new memory; `over_us` is `micro` less the op.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from support.limit import library
from support.report import Row

from deepspeed_gear import Replay
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.packed.rollout_columns import RolloutColumns

TOKENS = 16384
STEPS = 8
TURNS = 6
GATHER_BOUND = 1.15
OVER_BOUND_US = 200.0


@dataclass(frozen=True)
class Case:
    """A table and the fields of its packs.

    Args:
        name: In the results.
        columns: Of the schema.
        fields: Of `gear.fields`.
        longest: Steps of a trajectory at most.
        made: Returns a trajectory of so many steps.
    """

    name: str
    columns: dict[str, dict[str, Any]]
    fields: Sequence[str]
    longest: int
    made: Callable[[np.random.Generator, int], dict[str, Any]]


def _response(random: np.random.Generator, length: int) -> dict[str, Any]:
    return {
        "tokens": random.integers(0, 150_000, length).astype(np.int32),
        "loss_mask": np.arange(length) >= min(300, length // 2),
        "logp": -random.random(length, np.float32),
        "value": random.random(length, np.float32),
        "reward": np.float32(random.random()),
    }


def _episode(random: np.random.Generator, length: int) -> dict[str, Any]:
    return {
        "observation": random.standard_normal((length, 11), np.float32),
        "action": random.standard_normal((length, 3), np.float32),
        "reward": random.standard_normal(length, np.float32),
    }


CASES = (
    Case(
        "tokens, log-probabilities, values",
        {
            "tokens": {"dtype": "int32", "role": "token"},
            "loss_mask": {"dtype": "bool", "role": "loss_mask"},
            "logp": {"dtype": "float32"},
            "value": {"dtype": "float32"},
            "reward": {"dtype": "float32", "rows": "1"},
        },
        ("tokens", "logp", "value", "reward"),
        12288,
        _response,
    ),
    Case(
        "observations, actions, rewards",
        {
            "observation": {"dtype": "float32", "shape": [11], "role": "observation"},
            "action": {"dtype": "float32", "shape": [3], "role": "action"},
            "reward": {"dtype": "float32", "role": "reward"},
        },
        ("observation", "action", "reward"),
        1000,
        _episode,
    ),
)


def measure_micro(quick: bool) -> list[Row]:
    """Return a row for each case."""
    return [_measure(case, quick) for case in CASES]


def _measure(case: Case, quick: bool) -> Row:
    random = np.random.default_rng(0)
    count = 64 if quick else 1200
    mean = 7.6 if case.longest > 1000 else 6.0
    lengths = np.minimum(np.exp(random.normal(mean, 0.9, count)).astype(int) + 2, case.longest)
    if case.longest <= 1000 and not quick:
        lengths = np.tile(lengths, 4)
    table = {
        "capacity_steps": int(lengths.sum()),
        "capacity_trajectories": len(lengths),
        "max_length": case.longest,
        "schema": {"columns": case.columns},
    }
    config = {
        "tables": {"main": table},
        "sampler": {"kind": "epoch"},
        "pack": {"tokens": TOKENS, "cost": [24576, 1], "pad": {"multiple": 128}},
        "batch": {"trajectories": 16 if quick else 128},
        "fields": {name: {} for name in case.fields},
    }
    with Replay(config) as replay:
        for length in lengths.tolist():
            replay.add(case.made(random, length))
        micro: list[float] = []
        packs: list[_Pack] = []
        for _ in range(2 if quick else STEPS):
            rollout = replay.rollout()
            for step in rollout:
                begin = perf_counter_ns()
                for _batch in step:
                    micro.append((perf_counter_ns() - begin) / 1e3)
                    begin = perf_counter_ns()
                packs += [
                    _Pack(rollout.batch_columns, pack, shape.rows)
                    for pack, shape in zip(step.packs.indices, step.packs.shapes, strict=True)
                ]
        ops, limits = _ops_and_limits(packs)
    ratio = float(np.median(ops / limits))
    over = float(np.median(np.array(micro) - ops))
    row = {
        "what": "micro",
        "case": case.name,
        "micro_batches": len(micro),
        "limit_us": float(np.median(limits)),
        "op_us": float(np.median(ops)),
        "op_ratio": ratio,
        "micro_us": float(np.median(micro)),
        "over_us": over,
        "over_bound": OVER_BOUND_US,
        "over_holds": over <= OVER_BOUND_US,
    }
    if "tokens" not in case.fields:  # else the op converts
        row |= {"bound": GATHER_BOUND, "holds": ratio <= GATHER_BOUND}
    return row


class _Pack:
    """A pack that is gathered again and again into the same buffers, by the op or by memcpy.

    Args:
        columns: Those of the rollout batch.
        pack: Its trajectories. [S], int64.
        rows: N.
    """

    def __init__(self, columns: RolloutColumns, pack: np.ndarray, rows: int) -> None:
        part = columns.tables[0]
        lengths = columns.trajectories.lengths[pack]
        self._gatherer = part.gatherer
        self.outs = part.gatherer.outputs(rows, rows)
        self._resolutions = part.rows[torch.from_numpy(columns.trajectories.row[pack])].contiguous()
        self._places = torch.from_numpy(np.cumsum(lengths) - lengths)
        self._arrays = [
            np.ascontiguousarray(v) for v in _pieces(columns, self._resolutions.numpy(), self.outs)
        ]
        self._pointers = [ctypes.c_void_p(values.ctypes.data) for values in self._arrays]
        self._count = ctypes.c_int64(len(self._arrays[0]))
        self._copy = library("limit").CopyPieces

    def op(self) -> None:
        self._gatherer.gather(self.outs, self._resolutions, self._places, 0)

    def limit(self) -> None:
        self._copy(self._count, *self._pointers)


def _ops_and_limits(packs: Sequence[_Pack]) -> tuple[np.ndarray, np.ndarray]:
    """Return the microseconds of op and memcpy of each pack, medians of turns over all packs.
    [packs].
    """
    times = np.empty((2, TURNS, len(packs)))
    for turn in range(TURNS):
        for which in (turn % 2, 1 - turn % 2):
            for number, pack in enumerate(packs):
                run = pack.limit if which else pack.op
                begin = perf_counter_ns()
                run()
                times[which, turn, number] = (perf_counter_ns() - begin) / 1e3
    found: np.ndarray = np.median(times, axis=1)
    return found[0], found[1]


def _pieces(
    columns: RolloutColumns, records: np.ndarray, outs: dict[str, torch.Tensor]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the source, target and bytes of each piece that memcpy copies. [pieces] each."""
    gatherer = columns.tables[0].gatherer
    found: list[list[np.ndarray]] = [[], [], []]
    steps = records[:, Resolution.NUM_STEPS]
    before = np.cumsum(steps) - steps
    for field, column in zip(gatherer.fields, gatherer._group.columns, strict=True):
        row_bytes = column[0].numel() * column.element_size()
        found[0].append(column.data_ptr() + records[:, Resolution.FIRST_ROW] * row_bytes)
        found[1].append(outs[field.name].data_ptr() + before * row_bytes)
        found[2].append(steps * row_bytes)
    first, second, third = (np.concatenate(values) for values in found)
    return first.astype(np.uint64), second.astype(np.uint64), third.astype(np.int64)
