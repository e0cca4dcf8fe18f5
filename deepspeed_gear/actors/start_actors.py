"""start_actors: processes that act in gymnasium's environments, their start, end and failures."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed_gear.liveness as liveness
from deepspeed_gear.actors.actor_process import ActorJob, gymnasium_module
from deepspeed_gear.actors.policy_board import PolicyBoard
from deepspeed_gear.errors import ConfigError, PeerError
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.writer.store_search import RUN_VARIABLE

if TYPE_CHECKING:
    from deepspeed_gear.replay.replay import Replay

_GRACE_S = 10.0  # for an actor to end its step
_COMMAND = [sys.executable, "-c", "from deepspeed_gear.actors.actor_process import main; main()"]
_OF_RANKS = (
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE "
    "MASTER_ADDR MASTER_PORT"
)


class Actors(ProcessBound):
    """Running actor processes. To end them, leave the `with` block or call `stop`.

    They also end when this process ends, and when the run to whose store they write has ended.

    Thread safety: one thread.

    Args:
        jobs: One job for each actor.
        run: Name or id of the run; the value of GEAR_RUN in the actors, which a policy uses when
            it attaches to a store itself. None: this process's GEAR_RUN.
    """

    def __init__(self, jobs: list[ActorJob], run: str | None = None) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._finalizer = weakref.finalize(self, _kill, self._processes)
        self.results: list[dict[str, Any]] = []  # by actor, once it was stopped
        path = [entry or os.getcwd() for entry in sys.path]
        pipe = subprocess.PIPE
        work = [pickle.dumps(path) + _pickled(job) for job in jobs]
        environment = {
            name: value for name, value in os.environ.items() if name not in _OF_RANKS.split()
        }
        environment["PYTHONPATH"] = os.pathsep.join(path)
        environment.setdefault("OMP_NUM_THREADS", "1")
        if run is not None:
            environment[RUN_VARIABLE] = run
        for message in work:
            process = subprocess.Popen(_COMMAND, stdin=pipe, stdout=pipe, env=environment)
            self._processes.append(process)
            assert process.stdin is not None
            liveness.hold(process.stdin.fileno())  # its end is that of this process
            _send(process, message)

    @property
    def pids(self) -> list[int]:
        """Process ids of the actors that run."""
        return [process.pid for process in self._processes]

    def check(self) -> None:
        """Raise if an actor has failed. Cheap enough to call in every step.

        Raises:
            PeerError: An actor has failed; the message has its report. The other actors are ended.
        """
        for index, process in enumerate(self._processes):
            if process.poll() is not None and (failure := self._failure(index)):
                self._finalizer()
                raise failure

    def stop(self) -> list[dict[str, Any]]:
        """End all actors after their current step.

        Returns:
            A dictionary for each actor: its number `actor`, `steps`, `episodes`, `mean_return` of
            its last 100 episodes (None without one), `seconds` that it has run, and `waited_s`,
            the seconds that its writer has waited.

        Raises:
            PeerError: An actor has failed.
        """
        for process in self._processes:
            _send(process, b"\n", last=True)
        until = time.monotonic() + _GRACE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        failures = [self._failure(index) for index in range(len(self._processes))]
        self._finalizer()
        for failure in filter(None, failures):
            raise failure
        return self.results

    def _failure(self, index: int) -> PeerError | None:
        """Return the error of an actor that has ended; None if it ended without one."""
        if any(result["actor"] == index for result in self.results):
            return None
        process = self._processes[index]
        status = process.wait()
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
        report = dict[str, Any]()
        with contextlib.suppress(ValueError):
            report = dict(json.loads(lines[-1])) if lines else {}
        if status == 0 and "error" not in report:
            self.results.append({"actor": index, **report})
            return None
        text = report.get(
            "error", f"exit status {status}; its output, if any, is in this program's stderr"
        )
        return PeerError(
            f"actor {index}",
            f"must run until it is stopped, but failed:\n{text}",
            remedy="correct the cause, and start the actors again",
        )

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            self.stop()
        else:
            self._finalizer()  # so that the error of the block is raised, not one of an actor


def start_actors(
    env: Any,
    policy: Any,
    replay: Replay | str | Path | Mapping[str, Any],
    *,
    table: str | None = None,
    num_actors: int = 1,
    num_envs: int = 1,
    board: PolicyBoard | None = None,
    seed: int = 0,
) -> Actors:
    """Start actor processes on this node.

    Each actor is a new process (not a fork). It makes its vector environment, attaches to the table
    as a writer, and calls `policy` once with an `Actor`. The function that `policy` returns is then
    called for every step with the observations of all environments. It returns their actions, or a
    mapping from column names to values, which may have further columns of the table.

    Args:
        env: Name in gymnasium's registry; or a function, or its name as "module:function", that
            takes the number of environments and returns a vector environment. With options:
            `functools.partial(gymnasium.make_vec, "CartPole-v1", max_episode_steps=100)`.
        policy: A function, or "module:function". The actors must be able to import it, so it cannot
            be defined in the main module of a script.
        replay: In a rank, its replay: the actors add only to its run. In other processes, the
            config, as in `TrajectoryWriter.attach`; if several runs exist, the config or GEAR_RUN
            must name one.
        table: Name of the table; None: the sampled one, or the only one that takes writers.
        num_actors: Number of processes; at most the table's `writers`.
        num_envs: Number of environments in each actor.
        board: Board with the learners' newest policy; it is passed to `policy` in the `Actor`.
        seed: Environment j of actor i gets the seed `seed + i * num_envs + j`, if the vector
            environment gives each of its environments a seed of its own.

    Returns:
        The running actors, a context manager.

    Raises:
        ConfigError: gymnasium is missing, the table admits fewer writers than `num_actors`, or
            `policy` or `env` cannot be sent to the actors.
    """
    gymnasium_module()
    run = None
    attach: dict[str, Any] = {"config": replay, "table": table}
    if not isinstance(replay, str | Path | Mapping):
        store = replay.store(table)
        run = replay.run
        if store.spec.num_writers < num_actors:
            option = f"gear.tables.{store.spec.name}.writers"
            raise ConfigError(
                option,
                f"must admit {num_actors} actors",
                store.spec.num_writers,
                f"set it to at least {num_actors}",
            )
        attach = {"name": store.memory.path.name}
    name = None if board is None else board.name
    # With 2 actors of 3 environments and seed 5: 5, 6, 7 and 8, 9, 10. gymnasium counts on from the
    # seed of the first one.
    jobs = [
        ActorJob(i, num_actors, env, num_envs, policy, attach, name, seed + i * num_envs)
        for i in range(num_actors)
    ]
    return Actors(jobs, run)


def _pickled(job: ActorJob) -> bytes:
    for name, given in (("policy", job.policy), ("env", job.env)):
        if getattr(given, "__module__", None) == "__main__":
            remedy = (
                f"put it into a module of its own, or give "
                f'"module:{getattr(given, "__name__", "name")}"'
            )
            raise ConfigError(
                name, "must be importable by actors", "a function of the main script", remedy
            )
    kinds = pickle.PicklingError, AttributeError, TypeError
    remedy = 'give a function of a module, or "module:function"'
    with ConfigError.on("policy and env", "must be picklable", *kinds, remedy=remedy):
        return pickle.dumps(job)


def _send(process: subprocess.Popen[bytes], words: bytes, last: bool = False) -> None:
    """Write to an actor, which may have ended: `_failure` finds why."""
    pipe = process.stdin
    with contextlib.suppress(OSError):
        if pipe is not None and not pipe.closed:
            pipe.write(words)
            pipe.flush()
            if last:
                liveness.forget(pipe.fileno())
                pipe.close()


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """Kill the processes that still run, and close all pipes."""
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None and not pipe.closed:
                liveness.forget(pipe.fileno())
                with contextlib.suppress(OSError):  # a buffered message to an actor that has ended
                    pipe.close()
    processes.clear()
