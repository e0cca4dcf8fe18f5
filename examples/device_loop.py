"""The loop of td3_device.py and sac_device.py: environments on the host, everything else on one device.

A turn is one action in every environment and one step of learning. The learner's step (add the newest
transitions, draw, losses, optimizers, priorities) uses only fixed tensors of the device, so it can be
compiled (`--compile`), captured in a CUDA graph (`--cudagraphs`), both, or neither.

The style follows LeanRL (github.com/pytorch-labs/LeanRL), which is based on CleanRL.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from deepspeed_gear import DeviceReplay

OBSERVATION, ACTION, LARGEST = 3, 1, 2.0  # of Pendulum-v1
CAPACITY, BATCH, BURN_IN = 100_000, 256, 20  # turns that are not timed: they compile and capture
EPSILON = 1e-3  # added to priorities, so that an item without an error can be drawn again
COLUMNS = {
    "observation": {"dtype": "float32", "shape": [OBSERVATION], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "float32", "shape": [ACTION], "role": "action"},
    "reward": {"dtype": "float32", "role": "reward"},
    "terminated": {"dtype": "bool", "role": "terminated"},
    "truncated": {"dtype": "bool", "role": "truncated"},
}
SAMPLERS = {
    "uniform": {"kind": "uniform", "unit": "step"},
    "prioritized": {"kind": "prioritized", "unit": "step", "alpha": 0.6, "beta": 0.4},
}


def section(buffer: str, seed: int) -> dict[str, Any]:
    """Return the `gear` section: a ring of transitions in the memory of the device."""
    table = {"placement": "device", "remove": "fifo", "schema": {"columns": COLUMNS}}
    table |= {"capacity_steps": CAPACITY, "max_length": 1, "capacity_trajectories": CAPACITY}
    following = {"column": "observation", "offset": 1}
    fields = {"next_observation": following, **{name: {} for name in COLUMNS if name != "truncated"}}
    options = {"sampler": SAMPLERS[buffer], "fields": fields, "batch_size": BATCH}
    return {"seed": seed, "tables": {"main": table}, **options}


class Learner(Protocol):
    """Interface of an algorithm to the loop. Its functions never wait and use only fixed tensors."""

    action: Tensor  # the next action. [envs, 1]
    updates: Sequence[Callable[[], None]]  # the kinds of a step of learning

    def act(self) -> None:
        """Write `action`."""
        ...

    def kind_of(self, turn: int) -> int:
        """Return the index in `updates` of this turn's."""
        ...


class Feed:
    """Outputs of the environments, in tensors of the device with fixed addresses.

    Attributes:
        seen: Observation for the next action. [envs, 3].
        row: Columns of the transition that is added next. [envs, ...] each.
        following: The observation after it: of a truncated episode its own last one. [envs, 3].
    """

    def __init__(self, envs: int, device: torch.device) -> None:
        pin = device.type == "cuda"
        shapes = {"seen": (OBSERVATION,), "observation": (OBSERVATION,), "following": (OBSERVATION,)}
        shapes |= {"reward": (), "terminated": (), "truncated": ()}
        self._host = {
            name: torch.zeros(envs, *shape, dtype=self._dtype(name), pin_memory=pin)
            for name, shape in shapes.items()
        }
        self._device = {name: values.to(device, copy=True) for name, values in self._host.items()}
        self.seen, self.following = self._device["seen"], self._device["following"]
        action = torch.zeros(envs, ACTION, device=device)
        self.row = {"action": action, **{name: self._device[name] for name in COLUMNS if name != "action"}}

    @staticmethod
    def _dtype(name: str) -> torch.dtype:
        return torch.bool if name in ("terminated", "truncated") else torch.float32

    def write(self, action: Tensor | None, **values: np.ndarray) -> None:
        """Copy to the device, after the work queued there. The previous copies must be done."""
        if action is not None:
            self.row["action"].copy_(action)
        for name, value in values.items():
            self._host[name].copy_(torch.from_numpy(np.asarray(value)))
            self._device[name].copy_(self._host[name], non_blocking=True)


class Captured:
    """A function that is called repeatedly; on request a CUDA graph after three calls.

    The first calls run on a side stream, as a capture requires: they allocate all that is allocated once. The
    capture itself runs nothing, so it is replayed at once: every call is one call of the function.
    """

    WARM_UP = 3

    def __init__(self, function: Callable[[], None], compiles: bool, captures: bool) -> None:
        self._function = torch.compile(function) if compiles else function
        self._captures, self._calls = captures, 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self._captures:
            self._function()
        elif self._graph is not None:
            self._graph.replay()
        elif self._calls < self.WARM_UP:
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
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


def train(make: Callable[[DeviceReplay, Feed], Learner], args: argparse.Namespace) -> dict[str, Any]:
    """Act and learn; return the mean return of the last ten episodes and the turns per second."""
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    mode = AutoresetMode.SAME_STEP
    envs = SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * args.envs, autoreset_mode=mode)
    observation, _ = envs.reset(seed=args.seed)
    returns, total = [], np.zeros(args.envs)
    feed = Feed(args.envs, device)
    feed.write(None, seen=observation)
    begin, first_timed = time.perf_counter(), args.random_steps + BURN_IN
    with DeviceReplay(section(args.buffer, args.seed), device) as replay:
        learner = make(replay, feed)
        how = args.compile, args.cudagraphs
        act, updates = Captured(learner.act, *how), [Captured(update, *how) for update in learner.updates]
        for turn in range(args.steps):
            if turn == first_timed:
                _wait(device)
                begin = time.perf_counter()
            is_random = turn < args.random_steps
            if is_random:
                learner.action.uniform_(-LARGEST, LARGEST)
            else:
                act()
            action = learner.action.cpu().numpy()  # the only wait of the host in a turn
            if is_random and turn > 0:
                replay.add_transitions_(feed.row, {"observation": feed.following})
            elif turn > 0:
                updates[learner.kind_of(turn)]()  # the device learns while the host steps the environments
            before = observation
            observation, reward, terminated, truncated, infos = envs.step(action)
            following = observation.copy()
            total += reward
            for env in np.nonzero(terminated | truncated)[0]:
                following[env] = infos["final_obs"][env]
                returns.append(total[env])
                total[env] = 0.0
            ends = {"terminated": terminated, "truncated": truncated}
            rows = {"observation": before, "following": following, "seen": observation}
            feed.write(learner.action, reward=reward, **ends, **rows)
        _wait(device)
        seconds, timed = time.perf_counter() - begin, args.steps - first_timed
        replay.check()
    return {
        "return": round(float(np.mean(returns[-10:])), 1) if returns else None,
        "steps_per_s": round(timed / seconds, 1) if timed > 0 else None,
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "compile": args.compile,
        "cudagraphs": args.cudagraphs,
        "buffer": args.buffer,
        "seed": args.seed,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(description: str | None, make: Callable[[DeviceReplay, Feed], Learner]) -> None:
    """Read the command line, train, and print the result as JSON."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", default=here, help="of the replay and of the networks (default here: %(default)s)"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile acting and learning")
    parser.add_argument("--cudagraphs", action="store_true", help="capture both in CUDA graphs")
    parser.add_argument("--all", action="store_true", help="all combinations of the two, and a table")
    parser.add_argument("--buffer", choices=list(SAMPLERS), default="uniform")
    parser.add_argument("--steps", type=int, default=10_000, help="of each environment")
    parser.add_argument("--random-steps", type=int, default=500, help="before learning begins")
    parser.add_argument("--envs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device must be cpu where torch sees no GPU, got {args.device}")
    if args.cudagraphs and device.type != "cuda":
        parser.error("--cudagraphs needs a CUDA device; leave it out, or give --device cuda")
    if device.type == "cpu":
        torch.set_num_threads(1)
    elif device.index is not None:
        torch.cuda.set_device(device)  # streams and graphs are of the current device
    if not args.all:
        print(json.dumps(train(make, args)), flush=True)
        return
    graphs = (False, True) if device.type == "cuda" else (False,)
    results = []
    print("compile  cudagraphs   steps/s   return", flush=True)
    for args.cudagraphs in graphs:
        for args.compile in (False, True):
            torch._dynamo.reset()
            results.append(result := train(make, args))
            flags = f"{result['compile']!s:7}  {result['cudagraphs']!s:10}"
            print(f"{flags}  {result['steps_per_s']!s:>8}  {result['return']!s:>7}", flush=True)
    if device.type != "cuda":
        print("left out: --cudagraphs, which needs a CUDA device", file=sys.stderr)
    print(json.dumps(results), flush=True)
