"""Packing planners of other systems, read out of their wheels at run time; nothing of theirs is
kept here.

A planner splits a batch over ranks, and then each rank makes its packs; what ranks agree on by
collectives is computed in one process. Only functions that need neither a GPU nor process groups
are loaded.
"""

from __future__ import annotations

import ast
import bisect
import copy
import heapq
import itertools
import math
import typing
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

Parts = list[list[int]]  # the trajectories of each rank, or of each pack
Plan = list[Parts]  # the packs of each rank


class Peer(NamedTuple):
    """A planner: `split` gives each rank its trajectories, `pack` makes the packs of all ranks of
    them.
    """

    name: str
    split: Callable[[list[int], int], Parts]
    pack: Callable[[list[int], Parts, int], Plan]


def load_names(wheel: Path, member: str, names: Sequence[str], **given: Any) -> SimpleNamespace:
    """Load some functions and classes of a module in a wheel, without the rest of it and its
    imports.

    Args:
        wheel: File of the wheel.
        member: End of the module's path in it.
        names: Of its top-level functions and classes.
        **given: What they use besides the standard library and NumPy.
    """
    with zipfile.ZipFile(wheel) as archive:
        path = next(name for name in archive.namelist() if name.endswith(member))
        tree = ast.parse(archive.read(path))
    found = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names
    ]
    missing = set(names) - {node.name for node in found}
    if missing:
        raise SystemExit(f"{wheel} has no {', '.join(sorted(missing))} in {member}")
    for node in found:
        # Annotations name types that are not imported; a decorator that compiles would be another
        # package.
        node.decorator_list = [d for d in node.decorator_list if ast.unparse(d) == "dataclass"]
    modules = (bisect, copy, heapq, itertools, math)
    space: dict[str, Any] = {module.__name__: module for module in modules}
    space |= {name: getattr(typing, name) for name in ("Any", "Callable", "List", "Tuple")}
    space |= {"np": np, "torch": torch, **given}
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module(future + list(found), []), str(wheel), "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def load_peers(folder: Path) -> list[Peer]:
    """Return the planners whose wheels lie in a folder."""
    loaders = {"verl": _verl, "areal": _areal, "openrlhf": _openrlhf, "trl": _trl}
    peers = []
    for prefix, load in loaders.items():
        for wheel in sorted(folder.glob(f"{prefix}-*.whl")):
            peers.append(load(wheel, wheel.name.split("-")[1]))
    return peers


def _verl(wheel: Path, version: str) -> Peer:
    """Split by cost with equal counts; then as few packs as all ranks can keep within
    the budget.
    """
    names = ("calculate_workload", "ceildiv", "get_seqlen_balanced_partitions", "karmarkar_karp")
    verl = load_names(wheel, "verl/utils/seqlen_balancing.py", names)

    def costs(lengths: list[int]) -> list[int]:
        return list(verl.calculate_workload(torch.tensor(lengths)).tolist())

    def split(lengths: list[int], width: int) -> Parts:
        return list(verl.get_seqlen_balanced_partitions(costs(lengths), width, equal_size=True))

    def pack(lengths: list[int], parts: Parts, tokens: int) -> Plan:
        own = [[lengths[i] for i in part] for part in parts]
        own_costs = [costs(values) for values in own]
        count = max(min(len(values), verl.ceildiv(sum(values), tokens)) for values in own)
        while True:
            made = [
                verl.get_seqlen_balanced_partitions(cost, count, equal_size=False)
                for cost in own_costs
            ]
            if all(
                sum(values[i] for i in pack) <= tokens
                for values, packs in zip(own, made, strict=True)
                for pack in packs
            ):
                break
            count += 1
        for cost, packs in zip(own_costs, made, strict=True):
            packs.sort(key=lambda pack: (sum(cost[i] for i in pack), pack[0]), reverse=True)
            packs[:] = packs[::2][::-1] + packs[1::2]  # the cheapest ones at both ends
        return _globally(made, parts)

    return Peer(f"verl {version}", split, pack)


def _areal(wheel: Path, version: str) -> Peer:
    """Split by tokens with equal counts; first-fit decreasing, again until all ranks have as many
    packs.
    """
    names = ("_ffd_allocate", "ffd_allocate", "balanced_greedy_partition")
    areal = load_names(wheel, "areal/utils/seqpack.py", names)

    def pack(lengths: list[int], parts: Parts, tokens: int) -> Plan:
        own = [[lengths[i] for i in part] for part in parts]
        count = 1
        while True:
            made = [
                sorted(sorted(pack) for pack in areal.ffd_allocate(values, tokens, count))
                for values in own
            ]
            most = max(map(len, made))
            if all(len(packs) == most for packs in made):
                return _globally(made, parts)
            count = most

    return Peer(f"AReaL {version}", areal.balanced_greedy_partition, pack)


def _openrlhf(wheel: Path, version: str) -> Peer:
    """Split by alternating long and short; the first-fit count of the fullest rank, balanced by
    tokens.
    """
    names = ("karmarkar_karp", "get_seqlen_balanced_partitions", "get_minimum_num_micro_batch_size")
    balancing = load_names(wheel, "openrlhf/utils/seqlen_balancing.py", names)
    plain = {
        "split_experience_batch": lambda item: [item],
        "make_experience_batch": lambda items: items,
    }
    experience = load_names(
        wheel, "openrlhf/trainer/ppo_utils/experience.py", ("balance_experiences",), **plain
    )

    def split(lengths: list[int], width: int) -> Parts:
        ds = SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1)
        actor = SimpleNamespace(num_nodes=1, num_gpus_per_node=width)
        items = [SimpleNamespace(total_length=length, index=i) for i, length in enumerate(lengths)]
        found = experience.balance_experiences(items, SimpleNamespace(actor=actor, ds=ds))
        return [[item.index for item in part] for part in found]

    def pack(lengths: list[int], parts: Parts, tokens: int) -> Plan:
        own = [[lengths[i] for i in part] for part in parts]
        count = max(
            balancing.get_minimum_num_micro_batch_size(values, tokens, 1, 1) for values in own
        )
        made = [
            balancing.get_seqlen_balanced_partitions(values, count, equal_size=False)
            for values in own
        ]
        return _globally(made, parts)

    return Peer(f"OpenRLHF {version}", split, pack)


def _trl(wheel: Path, version: str) -> Peer:
    """In the order of arrival: into the cheapest row of the micro step, until none has room."""
    batchers = load_names(
        wheel,
        "trl/experimental/async_distillation/async_distillation_trainer.py",
        ("TokenBudgetBatcher",),
        RolloutQueueDataset=object,
    )

    def pack(lengths: list[int], parts: Parts, tokens: int) -> Plan:
        width = len(parts)

        def samples() -> Iterator[dict[str, Any]]:
            for i, length in enumerate(lengths):
                yield {"input_ids": range(length), "index": i}
            for _ in range(
                width
            ):  # it never ends: these push out the last step, and are not trained
                yield {"input_ids": range(tokens), "index": -1}
            yield {"input_ids": range(1), "index": -1}

        steps = list(batchers.TokenBudgetBatcher(samples(), width, tokens, {}))
        made = [[[s["index"] for s in row if s["index"] >= 0] for row in step] for step in steps]
        made = [step for step in made if any(step)]
        return [[step[rank] for step in made] for rank in range(width)]

    return Peer(f"TRL {version}", lambda lengths, width: [[] for _ in range(width)], pack)


def _globally(made: Plan, parts: Parts) -> Plan:
    """Return packs of a rank's own indices as packs of those of the batch."""
    return [
        [[part[i] for i in pack] for pack in packs] for packs, part in zip(made, parts, strict=True)
    ]
