"""Train a double DQN on CartPole data with prioritized replay, on any number of ranks.

    python examples/cartpole_data.py data/cartpole
    deepspeed --num_gpus 2 examples/cartpole_dqn.py --config configs/cartpole_dqn.json

The last line of rank 0 is the result as JSON.

Sources: Schaul et al., "Prioritized Experience Replay", ICLR 2016; van Hasselt et al., "Deep
Reinforcement Learning with Double Q-learning", AAAI 2016; Kumar et al., "Conservative Q-Learning
for Offline Reinforcement Learning", NeurIPS 2020.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path

import deepspeed
import gymnasium
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cartpole_plot import plot_curves
from torch import Tensor, nn
from tqdm import tqdm

import deepspeed_gear
from deepspeed_gear import Batch, Replay

TARGET_STEP = 0.01  # how far the target network moves towards the trained one in a step
CONSERVATIVE = 0.3  # weight of the term that keeps Q down where the data hold no action
EPSILON = 1e-3  # added to priorities, so that an item without an error can be drawn again
EPISODES = 20
FIRST_SEED = 1000
NEAR_FAILURE = 50  # steps
MEASURE_EVERY = 50  # steps


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", default="configs/cartpole_dqn.json", help="a ds_config with a gear section"
    )
    parser.add_argument("--data", help="folder of the data set (default: the config's)")
    parser.add_argument(
        "--alpha", type=float, help="exponent of the priorities (default: the config's)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and of replay")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the schedule's)")
    parser.add_argument("--evaluate-every", type=int, default=100, metavar="STEPS")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/cartpole"), help="folder of curves and results"
    )
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    return parser.parse_args()


def q_network() -> nn.Module:
    """Return a network from an observation to the value of each of the two actions."""
    return nn.Sequential(
        nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)
    )


def losses_of(
    engine: deepspeed.DeepSpeedEngine, target: nn.Module, batch: Batch
) -> tuple[Tensor, Tensor]:
    """Return the loss and the TD error of each sample. [B] and [B].

    In a double DQN the trained network chooses the next action and the target network values it.
    The data hold one action of two in each state: the conservative term, log(sum(exp(Q))) -
    Q(action), keeps the value of the other one from being arbitrary.
    """
    with torch.no_grad():
        chosen = engine.module(batch["next_observation"]).argmax(1, keepdim=True)
        value = target(batch["next_observation"]).gather(1, chosen).squeeze(1)
        expected = (
            batch["return_n"] + batch["discount"] * value
        )  # the discount is 0 after a failure
    q = engine(batch["observation"])
    taken = q.gather(1, batch["action"][:, None]).squeeze(1)
    loss = F.huber_loss(taken, expected, reduction="none") + CONSERVATIVE * (q.logsumexp(1) - taken)
    return loss, (taken - expected).detach()


@torch.no_grad()
def move(target: nn.Module, module: nn.Module) -> None:
    torch._foreach_lerp_(list(target.parameters()), list(module.parameters()), TARGET_STEP)


class Concentration:
    """Measures the concentration of the probabilities of all steps."""

    def __init__(self, replay: Replay, alpha: float) -> None:
        self.replay = replay
        self.alpha = alpha
        data = replay.datasets["main"]
        self.ids = np.repeat(np.arange(len(data.lengths)), data.lengths)
        self.steps = np.concatenate([np.arange(length) for length in data.lengths])
        failed = data.columns["terminated"][data.first_rows + data.lengths - 1]
        left = data.lengths[self.ids] - self.steps
        self.near_failure = torch.from_numpy(failed[self.ids] & (left <= NEAR_FAILURE))

    def __call__(self) -> dict[str, float]:
        """Return shares of the probability, and the effective sample size as a part of
        all steps.
        """
        mass = self.replay.priorities(self.ids, self.steps).double() ** self.alpha
        probability = mass / mass.sum()
        return {
            "top_tenth": float(probability.topk(len(mass) // 10).values.sum()),
            "near_failure": float(probability[self.near_failure].sum()),
            "effective": float(1 / probability.square().sum() / len(mass)),
        }


def mean_return(model: nn.Module, replay: Replay) -> float:
    """Return the mean return of all episodes, which are divided among the ranks."""
    device = next(model.parameters()).device
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for seed in range(FIRST_SEED + dist.get_rank(), FIRST_SEED + EPISODES, dist.get_world_size()):
        world = gymnasium.make("CartPole-v1")
        over = False
        observation, _ = world.reset(seed=seed)
        while not over:
            with torch.inference_mode():
                normal = replay.normalize("observation", torch.from_numpy(observation).to(device))
                q = model(normal)
            observation, reward, terminated, truncated, _ = world.step(int(q.argmax()))
            total += float(reward)
            over = terminated or truncated
    dist.all_reduce(total)
    return float(total) / EPISODES


def main() -> None:
    args = arguments()
    config = json.loads(Path(args.config).read_text())
    gear = config["gear"]
    gear["seed"] = args.seed
    gear["data"]["path"] = args.data or gear["data"]["path"]
    gear["sampler"]["alpha"] = gear["sampler"]["alpha"] if args.alpha is None else args.alpha
    steps = args.steps or config["scheduler"]["params"]["total_num_steps"]
    torch.manual_seed(args.seed)
    model = q_network()
    target = copy.deepcopy(model)
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    target.to(engine.device)
    is_first = dist.get_rank() == 0
    world = dist.get_world_size()
    concentration = Concentration(engine.gear, gear["sampler"]["alpha"])

    curves: dict[str, list[tuple[int, float]]] = {"loss": [], "return": []}
    curves["return"].append((0, mean_return(target, engine.gear)))
    curves.update({name: [(0, value)] for name, value in concentration().items()})
    bar = tqdm(total=steps, disable=not is_first, unit="step", mininterval=1.0)
    recent = torch.zeros(1, device=engine.device)
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        batch = engine.gear_sample()
        losses, td = losses_of(engine, target, batch)
        loss = (batch.is_weight * losses).mean()
        engine.backward(loss)
        engine.step()
        engine.gear_update_priorities(batch, td.abs() + EPSILON)
        move(target, engine.module)

        recent += loss.detach()
        if step % args.evaluate_every == 0 or step == steps:
            curves["return"].append((step, mean_return(target, engine.gear)))
        if step % MEASURE_EVERY == 0:
            dist.all_reduce(recent)
            curves["loss"].append((step, float(recent) / MEASURE_EVERY / world))
            recent.zero_()
            for name, value in concentration().items():
                curves[name].append((step, value))
            bar.set_postfix({name: f"{curve[-1][1]:.3g}" for name, curve in curves.items()})
        bar.update()
    bar.close()
    seconds = time.perf_counter() - begin

    if is_first:
        result = {
            "return_before": round(curves["return"][0][1], 1),
            "return_after": round(curves["return"][-1][1], 1),
            "seconds_train": round(seconds, 1),
            "ranks": world,
            **{name: round(value, 3) for name, value in concentration().items()},
            "steps": steps,
            "seed": args.seed,
        }
        args.out.mkdir(parents=True, exist_ok=True)
        plot_curves({f"ranks: {world}": curves}, args.out / "curves.png")
        (args.out / "result.json").write_text(json.dumps({**result, "curves": curves}))
        print(json.dumps(result), flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
