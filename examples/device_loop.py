"""Parts of the *_device.py programs: environments in tensors of a device, capture, clock, command
line.

Environments run on the host; the table, the networks and the optimizers live on one device. What a
program does there (act, learn) uses only fixed tensors and never waits, so that it can be compiled
(`--compile`), captured in a CUDA graph (`--cudagraphs`), both, or neither.

The style follows LeanRL (github.com/pytorch-labs/LeanRL), which is based on CleanRL.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

EPSILON = 1e-3  # added to priorities, so that an item without an error can be drawn again
TEST_EPISODES = 20
TEST_SEED = 10_000
SAMPLERS = {
    "uniform": {"kind": "uniform", "unit": "step"},
    "prioritized": {"kind": "prioritized", "unit": "step", "alpha": 0.6, "beta": 0.4},
}


class Environments:
    """Environments of one kind on the host, and their newest step in fixed tensors of the device.

    Attributes:
        seen: Observation that the next action is chosen by. [E, *observation], float32.
        action: The next action, which the program writes. [E] int64, or [E, *action] float32.
        row: Columns of the newest transition. [E, ...] each.
        following: The observation after it: of an episode that ends its own last one. As `seen`.
        returns: Of the episodes that ended, in their order.
        num_actions: Of discrete actions; 0 for others.
        largest: Bound of continuous actions.
    """

    def __init__(self, name: str, num: int, seed: int, device: torch.device) -> None:
        make = [lambda: gymnasium.make(name)] * num
        self.name = name
        self.num = num
        self.device = device
        self._envs = SyncVectorEnv(make, autoreset_mode=AutoresetMode.SAME_STEP)
        actions = self._envs.single_action_space
        self.shape = self._envs.single_observation_space.shape
        self.num_actions = int(getattr(actions, "n", 0))
        self.largest = 0.0 if self.num_actions else float(actions.high.max())
        kind = torch.int64 if self.num_actions else torch.float32
        self.action = torch.zeros(num, *actions.shape, dtype=kind, device=device)
        flag = {"dtype": torch.bool}
        number = {"dtype": torch.float32}
        shapes = {"observation": (self.shape, number), "reward": ((), number)}
        shapes |= {"terminated": ((), flag), "truncated": ((), flag)}
        shapes |= {"following": (self.shape, number), "seen": (self.shape, number)}
        pin = device.type == "cuda"
        self._host = {
            n: torch.zeros(num, *shape, pin_memory=pin, **of) for n, (shape, of) in shapes.items()
        }
        self._there = {n: values.to(device, copy=True) for n, values in self._host.items()}
        self.seen = self._there["seen"]
        self.following = self._there["following"]
        columns = ("observation", "reward", "terminated", "truncated")
        self.row = {
            "action": torch.zeros_like(self.action),
            **{name: self._there[name] for name in columns},
        }
        self.returns = list[float]()
        self._totals = np.zeros(num)
        self._observation, _ = self._envs.reset(seed=seed)
        self._write(seen=self._observation)

    def act_at_random(self) -> None:
        """Write a uniform `action`."""
        if self.num_actions:
            self.action.random_(0, self.num_actions)
        else:
            self.action.uniform_(-self.largest, self.largest)

    def fetch(self) -> None:
        """Copy `action` to the host, after the work queued on the device: the only wait
        of a turn.
        """
        self._chosen = self.action.cpu().numpy()

    def step(self) -> None:
        """Step with the fetched action; write `row`, `following`, `seen` after the work queued
        there.
        """
        before = self._observation
        self._observation, reward, terminated, truncated, infos = self._envs.step(self._chosen)
        following = self._observation.copy()
        self._totals += reward
        for env in np.nonzero(terminated | truncated)[0]:
            following[env] = infos["final_obs"][env]
            self.returns.append(float(self._totals[env]))
            self._totals[env] = 0.0
        self.row["action"].copy_(self.action)
        ends = {"terminated": terminated, "truncated": truncated}
        rows = {"observation": before, "following": following, "seen": self._observation}
        self._write(reward=reward, **ends, **rows)

    def _write(self, **values: np.ndarray) -> None:
        for (
            name,
            value,
        ) in values.items():  # pinned memory: `fetch` has waited for the previous copies
            self._host[name].copy_(torch.from_numpy(value))
            self._there[name].copy_(self._host[name], non_blocking=True)

    @torch.no_grad()
    def evaluate(self, policy: Callable[[Tensor], Tensor]) -> float:
        """Return the mean return of an episode each of other environments, without exploration."""
        other = Environments(self.name, TEST_EPISODES, TEST_SEED, self.device)
        total = torch.zeros(TEST_EPISODES)
        goes_on = torch.ones(TEST_EPISODES, dtype=torch.bool)
        while bool(goes_on.any()):
            other.action.copy_(policy(other.seen))
            other.fetch()
            other.step()
            total += other.row["reward"].cpu() * goes_on
            goes_on &= ~(other.row["terminated"] | other.row["truncated"]).cpu()
        return round(float(total.mean()), 1)


def transitions(
    envs: Environments, capacity: int, batch: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Return the `gear` section of a ring of transitions in the memory of the device."""
    shape = list(envs.action.shape[1:])
    kind = str(envs.action.dtype).removeprefix("torch.")
    columns = {
        "observation": {
            "dtype": "float32",
            "shape": list(envs.shape),
            "role": "observation",
            "rows": "T+1",
        },
        "action": {"dtype": kind, "shape": shape, "role": "action"},
        "reward": {"dtype": "float32", "role": "reward"},
        "terminated": {"dtype": "bool", "role": "terminated"},
        "truncated": {"dtype": "bool", "role": "truncated"},
    }
    table = {"placement": "device", "remove": "fifo", "schema": {"columns": columns}}
    table |= {"capacity_steps": capacity, "max_length": 1, "capacity_trajectories": capacity}
    following = {"column": "observation", "offset": 1}
    fields = {
        "next_observation": following,
        **{name: {} for name in columns if name != "truncated"},
    }
    options = {"sampler": SAMPLERS[args.buffer], "fields": fields, "batch_size": batch}
    return {"seed": args.seed, "tables": {"main": table}, **options}


class Captured:
    """A function that is called repeatedly; compiled on request, and a CUDA graph after three
    calls.

    The first calls run on a side stream, as a capture requires: they allocate all that is allocated
    once. The capture itself runs nothing, so it is replayed at once: every call is one call of the
    function.
    """

    WARM_UP = 3

    def __init__(self, function: Callable[[], None], compiles: bool, captures: bool) -> None:
        self._function = torch.compile(function) if compiles else function
        self._captures = captures
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self._captures:
            self._function()
        elif self._graph is not None:
            self._graph.replay()
        elif self._calls < self.WARM_UP:
            stream = torch.cuda.Stream()
            current = torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                self._function()
            current.wait_stream(stream)
        else:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._function()
            self._graph.replay()
        self._calls += 1


class Clock:
    """Counts turns, each a step of all environments, and times those after the first ones.

    Args:
        first: Turns that are not timed: they act at random, compile and capture.
    """

    def __init__(self, device: torch.device, first: int) -> None:
        self._is_cuda = device.type == "cuda"
        self._first = first
        self.per_s: float | None = None

    def turns(self, num: int) -> Iterator[int]:
        """Count to `num`; set `per_s`, which is None if no turn was timed."""
        begin = 0.0
        for turn in range(num):
            if turn == self._first:
                begin = self._now()
            yield turn
        if num > self._first:
            self.per_s = round((num - self._first) / (self._now() - begin), 1)

    def _now(self) -> float:
        if self._is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


def act_and_learn(
    args: argparse.Namespace,
    envs: Environments,
    act: Callable[[], None],
    learns: Sequence[Callable[[], None]],
    add: Callable[[], None],
) -> Clock:
    """Step the environments, first at random; learn in each later turn, by each function of
    `learns` in turn.

    Args:
        act: Writes the actions.
        learns: Each begins with what `add` does.
        add: Adds the newest steps, before there is something to learn from.
    """
    act_, *learns_ = (Captured(each, args.compile, args.cudagraphs) for each in (act, *learns))
    clock = Clock(args.device, args.random_steps + 20)
    for turn in clock.turns(args.steps):
        if turn < args.random_steps:
            envs.act_at_random()
        else:
            act_()
        envs.fetch()  # the only wait of the host in a turn
        if turn > args.random_steps:
            learns_[
                turn % len(learns_)
            ]()  # the device learns while the host steps the environments
        elif turn > 0:
            add()
        envs.step()
    return clock


def result(
    args: argparse.Namespace, envs: Environments, clock: Clock, **numbers: float
) -> dict[str, Any]:
    """Return what a program prints: its numbers, the last episodes, turns per second, and its
    options.

    Raises:
        FloatingPointError: A number is NaN or infinite.
    """
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{name} must be finite, got {value}: the training has diverged"
            )
    device = "cpu" if envs.device.type == "cpu" else torch.cuda.get_device_name(envs.device)
    last = round(float(np.mean(envs.returns[-10:])), 1) if envs.returns else None
    options = {name: value for name, value in vars(args).items() if name not in ("device", "all")}
    return {"return": last, **numbers, "turns_per_s": clock.per_s, **options, "device": device}


def arguments(description: str | None, steps: int, envs: int = 1) -> argparse.ArgumentParser:
    """Return the options that all programs have, with a program's defaults."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=form)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", default=here, help="of table and networks (default here: %(default)s)"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile acting and learning")
    parser.add_argument("--cudagraphs", action="store_true", help="capture both in CUDA graphs")
    parser.add_argument(
        "--all", action="store_true", help="all combinations of the two, and a table"
    )
    parser.add_argument(
        "--steps", type=int, default=steps, help="of each environment (%(default)s)"
    )
    parser.add_argument("--envs", type=int, default=envs, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def run(
    parser: argparse.ArgumentParser, train: Callable[[argparse.Namespace], dict[str, Any]]
) -> None:
    """Read the command line, train, and print the result as JSON; with --all for all
    combinations.
    """
    args = parser.parse_args()
    device = args.device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device must be cpu where torch sees no GPU, got {args.device}")
    if args.cudagraphs and device.type != "cuda":
        parser.error("--cudagraphs needs a CUDA device; leave it out, or give --device cuda")
    if device.type == "cpu":
        torch.set_num_threads(1)
    elif device.index is not None:
        torch.cuda.set_device(device)  # streams and graphs are of the current device
    if not args.all:
        print(json.dumps(train(args)), flush=True)
        return
    graphs = (False, True) if device.type == "cuda" else (False,)
    results = []
    print("compile  cudagraphs   turns/s   return", flush=True)
    for args.cudagraphs in graphs:
        for args.compile in (False, True):
            torch._dynamo.reset()
            results.append(row := train(args))
            flags = f"{row['compile']!s:7}  {row['cudagraphs']!s:10}"
            print(f"{flags}  {row['turns_per_s']!s:>8}  {row['return']!s:>7}", flush=True)
    if device.type != "cuda":
        print("left out: --cudagraphs, which needs a CUDA device", file=sys.stderr)
    print(json.dumps(results), flush=True)
