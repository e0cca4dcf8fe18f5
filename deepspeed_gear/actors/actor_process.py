"""The process of one actor: its loop of act, step and reset in environments (`final_obs`)."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepspeed_gear.actors.policy_board import PolicyBoard
from deepspeed_gear.config.schedules import imported
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.errors import ConfigError, DataError, StoreError, StoreGoneError
from deepspeed_gear.schema import Schema
from deepspeed_gear.writer.trajectory_writer import TrajectoryWriter

Act = Callable[[Any], Any]  # observations of all environments -> actions, or columns by name
_LAST = 100  # episodes whose mean return is reported


@dataclass(frozen=True)
class ActorJob:
    """Arguments of an actor process, read from its standard input."""

    index: int
    count: int  # of all actors
    env: Any
    num_envs: int
    policy: Any
    attach: Mapping[str, Any]  # arguments of `TrajectoryWriter.attach`
    board: str | None  # name of the policy board
    seed: int  # seed of its first environment


@dataclass(frozen=True)
class Actor:
    """An actor's number, environments and policy board, passed to the `policy` function."""

    index: int
    count: int  # of all actors
    seed: int  # seed of its first environment
    envs: Any  # its gymnasium vector environment
    board: PolicyBoard | None  # with the learners' newest policy; None without one


class Stopped(BaseException):
    """Raised inside an actor to end it."""


class ActorColumns:
    """Assigns the values that gymnasium returns to a table's columns, by their roles."""

    def __init__(self, schema: Schema) -> None:
        of_role = {
            role: [column.name for column in schema if column.role == role]
            for role in ("observation", "action", "reward", "terminated", "truncated")
        }
        for role in ("observation", "action"):
            if not of_role[role]:
                raise DataError(
                    "schema",
                    f"must have a column of role {role!r}",
                    schema.names,
                    "give the table a schema that has one, or name the role in it",
                )
        self.observations = of_role["observation"]
        self.action = of_role["action"][0]
        self._nested = self.observations[0].partition(".")[0]  # the name that nests `observation.a`
        self._others = [
            (role, of_role[role][0]) for role in ("reward", "truncated") if of_role[role]
        ]
        self._terminated = (of_role["terminated"] or ["terminated"])[0]

    def state(self, observation: Any) -> dict[str, Any]:
        """Return the columns of an observation: an array, a dictionary, or nested columns."""
        if isinstance(observation, Mapping):
            flat = flatten("the observation", observation, frozenset(self.observations))
            if flat.keys() >= set(self.observations):
                return {name: flat[name] for name in self.observations}
        if isinstance(observation, (Mapping, tuple)):
            return {self._nested: observation}
        return {self.observations[0]: observation}

    def final_states(self, final: Any, ended: np.ndarray) -> dict[str, Any]:
        """Return the columns of the last observations of episodes, for autoreset "same_step"."""
        if isinstance(final, (Mapping, tuple)):
            return self.state(final)
        rows = [self.state(one) if ends else None for one, ends in zip(final, ended, strict=True)]
        columns = next(row for row in rows if row is not None)
        return {name: [None if row is None else row[name] for row in rows] for name in columns}

    def ends(self, reward: Any, terminated: Any, truncated: Any) -> dict[str, Any]:
        """Return the columns of a step's reward and end flags."""
        given = {"reward": reward, "truncated": truncated}
        columns = {name: given[role] for role, name in self._others}
        return {"truncated": truncated, **columns, self._terminated: terminated}


def gymnasium_module() -> Any:
    """Return the module gymnasium; raise ConfigError if it is missing or older than 1.0."""
    remedy = "pip install 'deepspeed_gear[examples]'"
    with ConfigError.on(
        "gymnasium", "must be installed to start actors", ImportError, remedy=remedy
    ):
        import gymnasium
    if int(gymnasium.__version__.split(".")[0]) < 1:
        raise ConfigError("gymnasium", "must be 1.0 or newer", gymnasium.__version__, remedy)
    return gymnasium


def act_in(job: ActorJob, stop: threading.Event) -> dict[str, Any]:
    """Act until `stop` is set or the run has ended; return statistics of the actor."""

    def check() -> None:
        if stop.is_set():
            raise Stopped

    begin = time.monotonic()
    if isinstance(job.env, str) and ":" not in job.env:
        envs = gymnasium_module().make_vec(job.env, num_envs=job.num_envs)
    else:
        envs = imported(job.env, "env")(job.num_envs)
    returns = deque[float](maxlen=_LAST)
    num_episodes = 0
    num_steps = 0
    writer = None
    board = None
    try:
        board = None if job.board is None else PolicyBoard.attach(name=job.board)
        act: Act = imported(job.policy, "policy")(
            Actor(job.index, job.count, job.seed, envs, board)
        )
        writer = TrajectoryWriter.attach(**job.attach, check=check)
        for num_steps, ended in _steps(writer, envs, act, job.seed):  # noqa: B007
            returns.extend(ended)
            num_episodes += len(ended)
            check()
    except Stopped:
        pass
    except StoreError as error:
        gone = isinstance(error, StoreGoneError) and job.attach.get("name") is not None
        if writer.parts[0].has_living_rank if writer is not None else not gone:
            raise  # the run has not ended
    finally:
        envs.close()
        # The last process to detach from a store or a board removes it.
        for attached in (writer, board):
            if attached is not None:
                attached.close()
    return {
        "steps": num_steps,
        "episodes": num_episodes,
        "mean_return": float(np.mean(returns)) if returns else None,
        "seconds": round(time.monotonic() - begin, 3),
        "waited_s": 0.0 if writer is None else round(writer.waited_s, 3),
    }


def _steps(
    writer: TrajectoryWriter, envs: Any, act: Act, seed: int
) -> Iterator[tuple[int, list[float]]]:
    """Take steps without end; yield the number of steps, and the returns of episodes that end."""
    names = ActorColumns(writer.schema)
    vector = writer.vector_writer(envs)
    mode = vector.autoreset
    sums = np.zeros(vector.num_envs)
    observation, _ = envs.reset(seed=seed)
    vector.reset(**names.state(observation))
    while True:
        result = act(observation)
        columns = dict(result) if isinstance(result, Mapping) else {names.action: result}
        observation, reward, terminated, truncated, info = envs.step(columns[names.action])
        ended = terminated | truncated
        final = None
        if mode == "same_step" and ended.any():
            final = names.final_states(info["final_obs"], ended)
        sums += reward
        ends = names.ends(reward, terminated, truncated)
        vector.step(final=final, **columns, **names.state(observation), **ends)
        if mode == "disabled" and ended.any():
            observation, _ = envs.reset(options={"reset_mask": ended})
            vector.reset(ended, **names.state(observation))
        yield vector.num_steps, sums[ended].tolist()
        sums[ended] = 0.0


def main() -> None:
    """Read a job from stdin, run it, and write its result to stdout as a line of JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops actors through stdin
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a policy's prints must not be read as the report
    source = sys.stdin.buffer
    stop = threading.Event()
    ended = threading.Event()

    def end(*_: Any) -> None:
        ended.set()
        stop.set()

    def listen() -> None:
        source.read(1)  # when the parent writes a byte or ends
        stop.set()

    signal.signal(signal.SIGTERM, end)  # detaches first
    try:
        sys.path[:] = pickle.load(source)
        job: ActorJob = pickle.load(source)
        threading.Thread(target=listen, daemon=True).start()
        import torch

        torch.set_num_threads(1)  # actors share cores with learners
        result = act_in(job, stop)
        if ended.is_set():
            result = {"error": "SIGTERM has ended it"}
    except BaseException:
        result = {"error": traceback.format_exc()}
    report.write(json.dumps(result) + "\n")
    report.close()
    sys.stderr.flush()
    os._exit(1 if "error" in result else 0)  # the listening thread still reads


if __name__ == "__main__":
    main()
