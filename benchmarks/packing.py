"""Packing: plans of this planner and of other systems, and the time of a micro batch
(packing_micro.py).

    pip download --no-deps -d wheels verl==0.9.1 openrlhf==0.11.2 areal==1.0.4 trl==1.16.0
    python benchmarks/packing.py --wheels wheels --json F [--quick]

K is the number of micro batches of a rank, `least` a lower bound (tokens / budget, or trajectories
of more than half a budget; and what ranks they go to). `imbalance` is what the slowest rank of each
micro step costs, summed, / the mean over the ranks, minus 1: so a smaller K cannot hide slower
steps. A trajectory of l tokens costs 24576 l + l^2, a transformer of hidden size 4,096. `ms` is CPU
time of one thread, the least of several turns: of the whole plan, and of one rank, where a system
splits the batch first and its ranks then pack their own parts (without the collectives by which
they agree on K; here every rank makes the whole plan, with none). Peers are read out of the wheels
in `--wheels`; without it this planner is measured alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from support import ROOT
from support.report import Report, Row, print_rows
from packing_micro import measure_micro
from packing_peers import Peer, Plan, load_peers

from deepspeed_gear.batching.packing_plan import PackBudget, plan_packs
from deepspeed_gear.ops import load_backend

LINEAR = 24576
QUADRATIC = 1
TOKENS = 16384
SEEDS = 3
GEAR = "gear"
TURNS = 30
PEER_TURNS = 3
T = TypeVar("T")


class Workload(NamedTuple):
    """Batches of lengths, one for each seed."""

    name: str
    width: int
    batches: Sequence[list[int]]
    tokens: int = TOKENS


class Bounds(NamedTuple):
    """What is required of this planner."""

    above_least: int  # of K
    imbalance: float
    ms: float


BOUNDS = {("log-normal", 8): Bounds(1, 0.002, 1.0), ("log-normal", 64): Bounds(0, 0.005, 5.0)}


def log_normal(random: np.random.Generator, count: int) -> np.ndarray:
    """Return lengths of groups of 8 responses, 3.1k tokens on average, to prompts of 100 to 600
    tokens.
    """
    prompts = random.integers(100, 600, count // 8).repeat(8)
    responses = np.exp(random.normal(7.6, 0.9, count)).astype(int) + 1
    return np.minimum(prompts + responses, 12288)


def bimodal(random: np.random.Generator, count: int) -> np.ndarray:
    """Return 70% short answers and 30% long ones."""
    is_short = random.random(count) < 0.7
    return np.where(is_short, random.integers(200, 800, count), random.integers(8000, 12000, count))


def one_giant(random: np.random.Generator, count: int) -> np.ndarray:
    """Return a trajectory of the whole budget among short ones."""
    return np.append(TOKENS, random.integers(100, 1000, count - 1))


def gsm8k(count: int) -> np.ndarray:
    """Return bytes of prompts with each of 4 solutions (examples/data/SOURCES.md)."""
    lengths = np.load(ROOT / "examples" / "data" / "gsm8k_lengths.npy").astype(int)
    return (lengths[:, :1] + lengths[:, 1:]).reshape(-1)[:count]


def workloads(quick: bool) -> list[Workload]:
    """Return what is planned: of the bounds first, then real lengths, then other distributions."""
    sizes = ((256, 8),) if quick else ((1024, 8), (4096, 64))
    drawn: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
        "log-normal": log_normal,
        "budget = longest": log_normal,
        "uniform": lambda random, count: random.integers(100, TOKENS, count),
        "bimodal": bimodal,
        "all equal": lambda random, count: np.full(count, 3000),
        "one giant": one_giant,
        "many tiny": lambda random, count: random.integers(10, 60, 8 * count),
    }
    found = []
    for name, draw in drawn.items():
        for count, width in sizes:
            batches = [draw(np.random.default_rng(seed), count).tolist() for seed in range(SEEDS)]
            tokens = max(map(max, batches)) if name == "budget = longest" else TOKENS
            found.append(Workload(name, width, batches, tokens))
        if name == "log-normal":
            for _, width in sizes:
                found.append(Workload("GSM8K", width, [gsm8k(512 if quick else 5248).tolist()]))
    return found


def costs(lengths: Sequence[int]) -> np.ndarray:
    """Return what trajectories cost. [n], int64."""
    tokens = np.asarray(lengths)
    return LINEAR * tokens + QUADRATIC * tokens * tokens


def least_micro(lengths: list[int], tokens: int, width: int) -> int:
    """Return a lower bound of K."""
    packs = max(-(-sum(lengths) // tokens), sum(length > tokens // 2 for length in lengths))
    return -(-packs // width)


def judge(plan: Plan, lengths: list[int], tokens: int) -> Row:
    """Judge a plan: every trajectory once, K, balance, what it breaks."""
    width = len(plan)
    num_micro_steps = max(map(len, plan))
    packed = sorted(i for packs in plan for pack in packs for i in pack)
    cost = costs(lengths)
    token = np.asarray(lengths)
    of_pack = np.zeros((2, width, num_micro_steps))
    for rank, packs in enumerate(plan):
        for micro, pack in enumerate(packs):
            of_pack[:, rank, micro] = cost[pack].sum(), token[pack].sum()
    mean = cost.sum() / width
    return {
        "k": num_micro_steps,
        "imbalance": float(of_pack[0].max(axis=0).sum() / mean - 1),
        "rank_imbalance": float(of_pack[0].sum(axis=1).max() / mean - 1),
        "over": int((of_pack[1] > tokens).sum()),
        "empty": int((of_pack[1] == 0).sum()),
        "complete": packed == list(range(len(lengths))),
    }


def timed(turns: int, call: Callable[[], T]) -> tuple[float, T]:
    """Return the milliseconds of the fastest of some calls, and what the last one returned."""
    best = float("inf")
    for _ in range(turns):
        begin = thread_time()
        found = call()
        best = min(best, thread_time() - begin)
    return 1e3 * best, found


def plan_gear(lengths: list[int], tokens: int, width: int, turns: int) -> Row:
    """Plan and judge by this planner."""
    ops = load_backend().on_host()
    values = torch.tensor(lengths)
    budget = PackBudget(tokens, LINEAR, QUADRATIC)
    ms, plan = timed(turns, lambda: plan_packs(values, budget, width, ops))
    packs = [[pack.tolist() for pack in plan.packs(rank)] for rank in range(width)]
    return {**judge(packs, lengths, tokens), "ms": ms, "rank_ms": ms}


def plan_peer(peer: Peer, lengths: list[int], tokens: int, width: int, turns: int) -> Row:
    """Plan and judge by a peer; a plan that it refuses to make is an error."""
    try:
        split_ms, parts = timed(turns, lambda: peer.split(lengths, width))
        pack_ms, plan = timed(turns, lambda: peer.pack(lengths, parts, tokens))
    except (AssertionError, RuntimeError, ValueError, IndexError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:80]}
    shared = any(parts)  # else the planner takes all trajectories in one go
    return {
        **judge(plan, lengths, tokens),
        "ms": split_ms + pack_ms,
        "rank_ms": split_ms + pack_ms / (width if shared else 1),
    }


def measure(workload: Workload, peers: Sequence[Peer], quick: bool) -> list[Row]:
    """Return a row for each planner: K of each seed, the mean of the rest."""
    turns, peer_turns = (1, 1) if quick else (TURNS, PEER_TURNS)
    given = workload.tokens, workload.width
    found: dict[str, list[Row]] = {
        GEAR: [plan_gear(lengths, *given, turns) for lengths in workload.batches]
    }
    for peer in peers:
        found[peer.name] = [
            plan_peer(peer, lengths, *given, peer_turns) for lengths in workload.batches
        ]
    case = {
        "workload": workload.name,
        "n": len(workload.batches[0]),
        "width": workload.width,
        "least": [least_micro(lengths, *given) for lengths in workload.batches],
        "fill": float(np.mean([sum(x) / workload.tokens for x in workload.batches])),
    }
    rows = []
    for name, plans in found.items():
        row = {"what": "plan", **case, "planner": name}
        errors = [plan["error"] for plan in plans if "error" in plan]
        if errors:
            rows.append({**row, "error": errors[0]})
            continue
        row["k"] = [plan["k"] for plan in plans]
        row["fill"] = case["fill"] / (float(np.mean(row["k"])) * workload.width)
        row |= {
            key: float(np.mean([plan[key] for plan in plans]))
            for key in ("imbalance", "rank_imbalance", "ms", "rank_ms")
        }
        row["most_imbalance"] = max(plan["imbalance"] for plan in plans)
        row |= {key: sum(plan[key] for plan in plans) for key in ("over", "empty")}
        row["complete"] = all(plan["complete"] for plan in plans)
        rows.append(row)
    fair = [row for row in rows if "k" in row and row["over"] == 0 and row["complete"]]
    for row in fair:
        row["fewest"] = row["k"] == min((other["k"] for other in fair), key=sum)
        row["most_even"] = row["imbalance"] <= min(other["imbalance"] for other in fair) + 1e-9
    return rows


def bounds(rows: list[Row]) -> list[Row]:
    """Compare this planner with what is required of it."""
    found = []
    for row in rows:
        bound = BOUNDS.get((row["workload"], row["width"]))
        if row["planner"] != GEAR or bound is None:
            continue
        same = [
            r
            for r in rows
            if all(r[key] == row[key] for key in ("workload", "n", "width")) and "k" in r
        ]
        above_peers = max(
            k - min(other["k"][seed] for other in same) for seed, k in enumerate(row["k"])
        )
        above_least = max(k - least for k, least in zip(row["k"], row["least"], strict=True))
        judged = {
            "K above the lower bound": (above_least, bound.above_least),
            "K above the best peer": (above_peers, 0),
            "imbalance": (row["most_imbalance"], bound.imbalance),
            "ms": (row["ms"], bound.ms),
        }
        for figure, (value, most) in judged.items():
            case = {key: row[key] for key in ("workload", "n", "width")}
            found.append(
                {
                    "what": "bound",
                    **case,
                    "figure": figure,
                    "judged": value,
                    "bound": most,
                    "holds": value <= most,
                }
            )
    return found


def main() -> None:
    """Run from the command line."""
    report = Report(__doc__, wheels=(Path, "folder with wheels of verl, OpenRLHF, AReaL, TRL"))
    quick = report.options.quick
    wheels = report.options.wheels
    torch.set_num_threads(1)
    peers = load_peers(wheels) if wheels else []
    plans = [row for workload in workloads(quick) for row in measure(workload, peers, quick)]
    columns = (
        "workload n width planner least k imbalance over empty ms rank_ms fewest most_even error"
    )
    print_rows(plans, columns)
    print()
    judged = bounds(plans)
    print_rows(judged, "workload n width figure judged bound holds")
    print()
    micro = measure_micro(quick)
    print_rows(micro, "case micro_batches limit_us op_us op_ratio bound micro_us over_us")
    report.write([*plans, *judged, *micro])


if __name__ == "__main__":
    main()
