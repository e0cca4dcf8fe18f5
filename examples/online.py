"""Learn CartPole while actors write: a double DQN with prioritized replay on two ranks and two
actors.

    python examples/online.py --seed 0

starts the ranks; so does `deepspeed --num_gpus 2 examples/online.py`. The last line is the result
as JSON.

Sources: van Hasselt et al., "Deep Reinforcement Learning with Double Q-learning", AAAI 2016; Schaul
et al., "Prioritized Experience Replay", ICLR 2016; Horgan et al., "Distributed Prioritized
Experience Replay", ICLR 2018.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launched import is_rank, launch
from online_actor import q_network
from play import mean_return
from torch import Tensor, nn
from tqdm import tqdm

import deepspeed_gear
from deepspeed_gear import Batch, PolicyBoard, start_actors
from deepspeed_gear.actors.start_actors import Actors

# environments of each actor
RANKS = 2
ACTORS = 2
ENVS = 8
TARGET_STEP = 0.01  # how far the target network moves towards the trained one in a step
PUBLISH_EVERY = 10  # steps
EPSILON = 1e-3  # added to priorities, so that an item without an error can be drawn again
GOAL = 475.0  # mean return; two evaluations in a row that reach it are enough
# of evaluations; of the last one, whose episodes did not end the training
SEED = 1000
TEST_SEED = 2000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", default="configs/online.json", help="a ds_config with a gear section"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, replay and environments")
    parser.add_argument("--steps", type=int, default=20_000, help="optimizer steps at most")
    parser.add_argument("--evaluate-every", type=int, default=250, metavar="STEPS")
    parser.add_argument("--out", type=Path, help="folder of the curve and the result")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    return parser.parse_args()


def losses_of(
    engine: deepspeed.DeepSpeedEngine, target: nn.Module, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Return the loss and the TD error of each sample. [B] and [B].

    In a double DQN the trained network chooses the next action and the target network values it.
    """
    with torch.no_grad():
        chosen = engine.module(batch["next_observation"]).argmax(1, keepdim=True)
        value = target(batch["next_observation"]).gather(1, chosen).squeeze(1)
        expected = (
            batch["return_n"] + batch["discount"] * value
        )  # the discount is 0 after a failure
    taken = engine(batch["observation"]).gather(1, batch["action"][:, None]).squeeze(1)
    return F.huber_loss(taken, expected, reduction="none"), (taken - expected).detach()


@torch.no_grad()
def move(target: nn.Module, module: nn.Module) -> None:
    torch._foreach_lerp_(list(target.parameters()), list(module.parameters()), TARGET_STEP)


def main() -> None:
    args = arguments()
    config = json.loads(Path(args.config).read_text())
    config["gear"]["seed"] = args.seed
    torch.manual_seed(args.seed)
    q = q_network()
    target = copy.deepcopy(q)
    engine, *_ = deepspeed_gear.initialize(model=q, model_parameters=q.parameters(), config=config)
    target.to(engine.device)
    replay = engine.gear
    is_first = dist.get_rank() == 0
    actors = None
    curve = [(0.0, mean_return(target, SEED, engine.device))]
    begin = time.perf_counter()
    with ExitStack() as stack:
        board = stack.enter_context(PolicyBoard.create(q, replay))  # one of each node
        if replay.is_node_leader:
            started = start_actors(
                "CartPole-v1",
                "online_actor:epsilon_greedy",
                replay,
                num_actors=ACTORS,
                num_envs=ENVS,
                board=board,
                seed=args.seed + 1000 * replay.node,
            )
            actors = stack.enter_context(started)
        bar = stack.enter_context(
            tqdm(total=args.steps, disable=not is_first, unit="step", mininterval=5.0)
        )
        for step in range(1, args.steps + 1):
            batch = (
                engine.gear_sample()
            )  # waits for the actors while the rate limiter blocks samples
            losses, td = losses_of(engine, target, batch)
            engine.backward((batch.is_weight * losses).mean())
            engine.step()
            engine.gear_update_priorities(batch, td.abs() + EPSILON)
            move(target, engine.module)
            if step % PUBLISH_EVERY == 0:
                board.publish(engine.module)
                if actors is not None:
                    actors.check()
            if step % args.evaluate_every == 0:
                curve.append(
                    (time.perf_counter() - begin, mean_return(target, SEED, engine.device))
                )
                bar.set_postfix({"return": f"{curve[-1][1]:.0f}", "steps": replay.num_steps})
                if min(mean for _, mean in curve[-2:]) >= GOAL:
                    break
            bar.update()
    seconds = time.perf_counter() - begin
    after = mean_return(target, TEST_SEED, engine.device)
    if is_first:
        report(args, curve, actors, step, seconds, after)
    engine.destroy()
    dist.destroy_process_group()


def report(
    args: argparse.Namespace,
    curve: list[tuple[float, float]],
    actors: Actors | None,
    step: int,
    seconds: float,
    after: float,
) -> None:
    """Print the result as JSON, and save it."""
    assert actors is not None
    env_steps, waited, acted = (
        sum(done[name] for done in actors.results) for name in ("steps", "waited_s", "seconds")
    )
    result = {
        "return_before": round(curve[0][1], 1),
        "return_after": round(after, 1),
        "seconds": round(seconds, 1),
        "seed": args.seed,
        "ranks": dist.get_world_size(),
        "actors": len(actors.results),
        "batches": step,
        "env_steps": env_steps,
        "env_steps_per_s": round(env_steps / seconds),
        "actors_wait": round(waited / acted, 2),  # for learners, part of their time
    }
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "result.json").write_text(json.dumps({**result, "curves": {"return": curve}}))
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    if not is_rank():
        sys.exit(launch(__file__, RANKS))
    main()
