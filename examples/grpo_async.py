"""GRPO with rollouts apart: two ranks train while two rollout workers generate. The task of
examples/grpo.py.

    python examples/grpo_async.py --seed 0

starts the ranks, and the first rank the workers (examples/rollout_worker.py); it prints the
commands of one more, on this node or another machine, to be started by hand. `deepspeed --num_gpus
2 examples/grpo_async.py` starts the same ranks. The last line is the result as JSON.

Workers lease prompts of the table's ledger, and commit groups; no group is older than `--max-lag`
rollout batches. After each batch the first rank publishes the weights on the policy board. Any
process may be killed:

- a worker that is killed is started again, and its prompts are leased by others;
- after the ranks, `--resume` goes on from the latest checkpoint (`--save-every`) of the same
  `--out`. Each prompt is trained once relative to its weights. Workers end with the ranks.

Validation is outside of all that: its prompts are held out of the ledger's data set, and the ranks
answer them, each a share, with the most likely tokens of the weights that they train.

    python examples/grpo_async.py --compare --latency 0.5 --iterations 60

runs examples/grpo.py, and then this program for the same time of training. A batch of 256 responses
takes half a second longer in both, as of a larger model on other devices. The result has the
trained tokens per second of both, their ratio, and what both have learned in that time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from common import quiet_start
from grpo import RANKS, TEST_SEED, TESTS, Speed, accuracy, train, warm_start
from grpo_model import Problems, policy, sample
from launched import is_rank, launch, run
from torch import Tensor

import deepspeed_gear
from deepspeed_gear import Column, DatasetWriter, MicroBatch, PolicyBoard, Schema

PROGRAM = Path(__file__)
NEVER = 10**6  # iterations
GOAL = 0.9
POLL_S = 0.01  # between looks for a rollout batch


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", default="configs/grpo_async.json", help="a ds_config with a gear section"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights, prompts, samples and replay"
    )
    parser.add_argument("--iterations", type=int, default=500, help="rollout batches at most")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of training at most")
    parser.add_argument("--evaluate-every", type=int, default=10, metavar="ITERATIONS")
    parser.add_argument(
        "--warm-accuracy", type=float, default=0.3, help="where the warm start ends"
    )
    parser.add_argument(
        "--goal", type=float, default=GOAL, help="accuracy of the validation that ends it"
    )
    parser.add_argument("--workers", type=int, default=2, help="rollout workers that it starts")
    parser.add_argument("--max-lag", type=int, help="rollout batches (default: the config's)")
    parser.add_argument(
        "--latency", type=float, default=0.0, help="seconds added to a batch of responses"
    )
    parser.add_argument("--save-every", type=int, default=20, metavar="ITERATIONS")
    parser.add_argument(
        "--resume", action="store_true", help="go on from the latest checkpoint of --out"
    )
    parser.add_argument("--compare", action="store_true", help="run examples/grpo.py as well")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/grpo_async"), help="folder of all files"
    )
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    return parser.parse_args()


class Workers:
    """The rollout workers that this process has started; one that is killed is started again."""

    def __init__(self, count: int, config: Path, latency_s: float, seed: int) -> None:
        self._command = [
            sys.executable,
            str(PROGRAM.with_name("rollout_worker.py")),
            str(config),
        ]
        print(how_to_add(self._command), file=sys.stderr, flush=True)
        self._command += ["--latency", str(latency_s)]
        self._seed = 1000 * seed
        self._processes = list[subprocess.Popen[bytes]]()
        for _ in range(count):
            self._processes.append(self._start())
        self.num_killed = 0

    def __enter__(self) -> Workers:
        return self

    def _start(self) -> subprocess.Popen[bytes]:
        self._seed += 1  # a new one draws other samples
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*self._command, "--seed", str(self._seed)], env=environment)

    def check(self) -> None:
        """Start those again that were killed; RuntimeError: one has failed."""
        for index, process in enumerate(self._processes):
            status = process.poll()
            if status is not None and status >= 0:
                raise RuntimeError(f"rollout worker {index} has ended with status {status}")
            if status is not None:
                self.num_killed += 1
                self._processes[index] = self._start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()


def how_to_add(command: list[str]) -> str:
    """Return the commands of one more worker, of this node and of another machine."""
    config = command[-1]
    keys = "--tls-cert cert.pem --tls-key key.pem"
    gateway = f"gear serve --config {config} --token-file token --host 0.0.0.0 --port 4711 {keys}"
    remote = f"--gateway grpc+tls://{socket.gethostname()}:4711 --token-file token --ca cert.pem"
    return (
        f"another worker here: {' '.join(command)} --seed 1\n"
        f"on another machine, with {config}, token and cert.pem: {' '.join(command)} {remote}\n"
        f"    through a gateway here: {gateway}"
    )


def write_prompts(folder: Path, problems: Problems) -> None:
    """Write all problems but those of the validation as a data set, if it is not there."""
    if folder.exists():
        return
    held_out = {tuple(prompt) for prompt in problems.draw(TESTS, TEST_SEED).tolist()}
    with DatasetWriter(folder, Schema([Column("tokens", "uint8", role="token")])) as writer:
        for prompt in problems.all().tolist():
            if tuple(prompt) not in held_out:
                writer.add({"tokens": np.array(prompt, np.uint8)})


def validate(model: torch.nn.Module, problems: Problems) -> float:
    """Return the part of validation prompts whose most likely response is right. Collective."""
    prompts = problems.draw(TESTS, TEST_SEED)[dist.get_rank() :: dist.get_world_size()]
    responses, _ = sample(model, prompts, None)
    right = problems.rewards(prompts, responses).sum()
    dist.all_reduce(right)
    return float(right) / TESTS


def wait_for_rollouts(replay: Any, workers: Workers | None) -> float:
    """Wait for the groups of the next rollout batch; return the seconds. Collective."""
    begin = time.perf_counter()
    while not replay.can_sample():
        if workers is not None:
            workers.check()
        time.sleep(POLL_S)
    return time.perf_counter() - begin


def is_over(here: bool) -> bool:
    """Return whether the time of any rank is over: the same on all. Collective."""
    over = torch.tensor(float(here))
    dist.all_reduce(over, dist.ReduceOp.MAX)
    return bool(over)


def lag_of(newest: int, micro: MicroBatch) -> Tensor:
    """Return how many rollout batches the weights of each token lack of the newest ones. [1, N]."""
    return newest - micro["version"]


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the ds_config of this run."""
    config: dict[str, Any] = json.loads(Path(args.config).read_text())
    config["gear"]["seed"] = args.seed
    prompts = config["gear"]["tables"]["rollouts"]["prompts"]
    prompts["data"] = str((args.out / "prompts").resolve())
    if args.max_lag is not None:
        prompts["max_lag"] = args.max_lag
    return config


def main() -> None:
    args = arguments()
    deepspeed.init_distributed()
    torch.set_num_threads(1)
    problems = Problems()
    is_first = dist.get_rank() == 0
    begin = time.perf_counter()
    config = config_of(args)
    path = args.out / "ds_config.json"
    if is_first:
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(config, indent=1))
        write_prompts(args.out / "prompts", problems)
    torch.manual_seed(args.seed)
    model = policy()
    if not args.resume:
        warm_start(model, problems, args.seed, args.warm_accuracy)
    dist.barrier()
    with quiet_start():
        engine, *_ = deepspeed_gear.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
    if args.resume and engine.load_checkpoint(str(args.out / "checkpoints"))[0] is None:
        raise SystemExit(f"{args.out / 'checkpoints'} has no checkpoint: start without --resume")
    replay = engine.gear
    books = replay.statistics()["prompts"]["rollouts"]
    curve = [(books["version"], 0.0, validate(engine.module, problems))]
    speed = Speed()
    lags = list[float]()
    waited_s = 0.0
    workers = None
    iteration = books["version"]
    with ExitStack() as stack:
        newest = books["version"] + 1  # the board counts from 1
        board = stack.enter_context(PolicyBoard.create(engine.module, replay, version=newest))
        if replay.is_node_leader:
            workers = stack.enter_context(Workers(args.workers, path, args.latency, args.seed))
        for iteration in range(books["version"] + 1, args.iterations + 1):
            waited_s += wait_for_rollouts(replay, workers)
            means = train(engine, lag=partial(lag_of, iteration))
            board.publish(engine.module, iteration + 1)
            speed.add(means["tokens"])
            lags.append(means["lag"])
            if iteration % args.evaluate_every == 0:
                curve.append(
                    (iteration, time.perf_counter() - begin, validate(engine.module, problems))
                )
                if is_first:
                    text = f"iteration {iteration}: accuracy {curve[-1][2]:.3f}, "
                    text += f"clipped {means['clipped']:.3f}"
                    print(f"{text}, lag {means['lag']:.2f}, {curve[-1][1]:.0f} s", file=sys.stderr)
                if curve[-1][2] >= args.goal:
                    break
            if iteration % args.save_every == 0:
                engine.save_checkpoint(str(args.out / "checkpoints"))
            if is_over(speed.seconds >= args.seconds):
                break
    if curve[-1][0] != iteration:
        curve.append((iteration, time.perf_counter() - begin, validate(engine.module, problems)))
    sampled = accuracy(engine.module, problems, TEST_SEED)
    if is_first:
        books = replay.statistics()["prompts"]["rollouts"]
        result = {
            "greedy_before": round(curve[0][2], 3),
            "greedy_after": round(curve[-1][2], 3),
            "accuracy_after": round(sampled, 3),
            "iterations": curve[-1][0],
            "seconds": round(curve[-1][1], 1),
            "waited_s": round(waited_s, 1),
            **speed.report(),
            "mean_lag": round(float(np.mean(lags or [0.0])), 2),
            "largest_lag": books["largest_lag"],
            "prompts": {
                name: books[name] for name in ("issued", "trained", "dropped", "leases_returned")
            },
            "workers_killed": workers.num_killed,
            "seed": args.seed,
            "ranks": dist.get_world_size(),
        }
        (args.out / "result.json").write_text(json.dumps({**result, "curve": curve}, indent=1))
        print(json.dumps(result), flush=True)
    engine.destroy()
    dist.destroy_process_group()


def compare(args: argparse.Namespace) -> int:
    """Run the synchronous program, and this one for the same time of training; print
    both results.
    """
    common = {"--seed": args.seed, "--latency": args.latency, "--warm-accuracy": args.warm_accuracy}
    common |= {"--goal": math.inf, "--evaluate-every": NEVER}
    own = {
        "--config": args.config,
        "--out": args.out,
        "--workers": args.workers,
        "--save-every": NEVER,
    }
    own |= {} if args.max_lag is None else {"--max-lag": args.max_lag}
    status, line = run(
        str(PROGRAM.with_name("grpo.py")), RANKS, *words(common | {"--iterations": args.iterations})
    )
    if status != 0:
        return status
    synchronous = json.loads(line)
    own |= {"--seconds": synchronous["train_s"], "--iterations": NEVER}
    status, line = run(str(PROGRAM), RANKS, *words(common | own))
    if status != 0:
        return status
    asynchronous = json.loads(line)
    ratio = asynchronous["tokens_per_s"] / synchronous["tokens_per_s"]
    both = {"synchronous": synchronous, "asynchronous": asynchronous}
    print(
        json.dumps({"tokens_per_s_ratio": round(ratio, 2), "latency_s": args.latency, **both}),
        flush=True,
    )
    return 0


def words(options: Mapping[str, object]) -> list[str]:
    """Return options as the words of a command line."""
    return [str(word) for pair in options.items() for word in pair]


if __name__ == "__main__":
    if is_rank():
        sys.exit(main())
    given = arguments()
    sys.exit(compare(given) if given.compare else launch(__file__, RANKS))
