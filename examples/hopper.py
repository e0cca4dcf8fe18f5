"""Train a Decision Transformer on Hopper data with a `gear` section, on any number of ranks.

    gear ingest examples/data/hopper_expert.hdf5 data/hopper
    deepspeed --num_gpus 2 examples/hopper.py --config configs/hopper.json

The last line of rank 0 is the result as JSON. "sample_share" is the part of the training loop's time, without
evaluations, that the host spends in `gear_sample()`; "sample_us" is the mean time of a call.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterable
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from common import masked_mean, shorten_history, squared_error
from decision_transformer import DecisionTransformer
from deepspeed.accelerator import get_accelerator
from evaluate import returns_of
from plot import plot_curves
from torch import Tensor, nn
from tqdm import tqdm

import deepspeed_gear

EPISODES, FIRST_SEED = 5, 1000
AVERAGE = 0.998  # of the weights, over steps: the average is evaluated


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/hopper.json", help="a ds_config with a gear section")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of replay")
    parser.add_argument("--steps", type=int, help="optimizer steps (default: the schedule's)")
    parser.add_argument("--target", type=float, nargs="+", default=[3600.0], help="returns to ask for")
    parser.add_argument("--behaviour-cloning", action="store_true", help="hide the return from the model")
    parser.add_argument("--evaluate-every", type=int, default=1000, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("runs/hopper"), help="folder of curves and results")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    return parser.parse_args()


@torch.no_grad()
def update_average(average: Iterable[Tensor], current: Iterable[Tensor], step: int) -> None:
    """Move the averaged weights towards the current ones; faster at the beginning."""
    towards = 1 - min(AVERAGE, step / (step + 10))
    torch._foreach_lerp_(list(average), list(current), towards)


def now() -> float:
    """Return the time after all queued work of the device is done."""
    get_accelerator().synchronize()
    return time.perf_counter()


class Evaluation:
    """Episodes divided among the ranks. They run on the host, alike on any machine."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, config: dict) -> None:
        fields, known = config["gear"]["fields"], engine.gear.datasets["main"].statistics["observation"]
        self.context, self.scale = fields["return_to_go"]["length"], fields["return_to_go"]["scale"]
        self.mean, self.std, self.device = known.mean, known.std, engine.device

    def __call__(self, model: nn.Module, target: float) -> float:
        """Return the mean return of all episodes, on every rank."""
        rank, world = dist.get_rank(), dist.get_world_size()
        seeds = list(range(FIRST_SEED, FIRST_SEED + EPISODES))[rank::world]
        here = copy.deepcopy(model).cpu()
        mine = returns_of(here, target, seeds, self.context, self.mean, self.std, self.scale)
        total = torch.tensor([sum(mine)], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / EPISODES


def train(
    engine: deepspeed.DeepSpeedEngine,
    average: nn.Module,
    evaluate: Evaluation,
    args: argparse.Namespace,
    steps: int,
) -> tuple[dict[str, list[tuple[int, float]]], dict[str, float]]:
    """Train; return the curves of loss and return, and the time of `gear_sample()` in the loop."""
    curves: dict[str, list[tuple[int, float]]] = {"loss": [], "return": []}
    bar = tqdm(total=steps, disable=dist.get_rank() != 0, unit="step", mininterval=1.0)
    recent, sampling_s, evaluating_s, begin_s = [], 0.0, 0.0, now()
    for step in range(1, steps + 1):
        asked_s = time.perf_counter()
        batch = engine.gear_sample()
        sampling_s += time.perf_counter() - asked_s
        real = batch.mask["action"]
        loss = masked_mean(squared_error(engine(batch, real), batch["action"]), real)
        engine.backward(loss)
        engine.step()
        update_average(average.parameters(), engine.module.parameters(), step)
        recent.append(loss.detach())
        if step % 50 == 0:
            curves["loss"].append((step, float(torch.stack(recent).mean())))
            recent.clear()
            bar.set_postfix(
                loss=f"{curves['loss'][-1][1]:.4f}", **{"return": f"{last(curves['return']):.0f}"}
            )
        if step % args.evaluate_every == 0 and step < steps:
            trained_s = now()
            curves["return"].append((step, evaluate(average, args.target[0])))
            evaluating_s += now() - trained_s
        bar.update()
    loop_s = now() - begin_s - evaluating_s
    bar.close()
    share, call_us = sampling_s / loop_s, sampling_s / steps * 1e6
    return curves, {"sample_share": round(share, 5), "sample_us": round(call_us, 2)}


def last(curve: list[tuple[int, float]]) -> float:
    return curve[-1][1] if curve else float("nan")


def main() -> None:
    args = arguments()
    config = json.loads(Path(args.config).read_text())
    config["gear"]["seed"] = args.seed
    torch.manual_seed(args.seed)
    fields = config["gear"]["fields"]
    model = DecisionTransformer(
        observation_size=11,
        action_size=3,
        context=fields["action"]["length"],
        has_goal="goal" in fields,
        sees_return=not args.behaviour_cloning,
    )
    average = copy.deepcopy(model)
    engine, *_ = deepspeed_gear.initialize(model=model, model_parameters=model.parameters(), config=config)
    average.to(engine.device)
    engine.gear.transform = shorten_history
    evaluate = Evaluation(engine, config)
    before = evaluate(average, args.target[0])

    steps = args.steps or config["scheduler"]["params"]["total_num_steps"]
    begin = time.perf_counter()
    curves, waits = train(engine, average, evaluate, args, steps)
    seconds = time.perf_counter() - begin

    returns = {f"{target:.0f}": evaluate(average, target) for target in args.target}
    after = next(iter(returns.values()))
    curves["return"] = [(0, before), *curves["return"], (steps, after)]
    if dist.get_rank() == 0:
        result = {
            "return_before": round(before, 1),
            "return_after": round(after, 1),
            "seconds_train": round(seconds, 1),
            **waits,
            "device": str(engine.device),
            "ranks": dist.get_world_size(),
            "returns": {target: round(value, 1) for target, value in returns.items()},
            "steps": steps,
            "seed": args.seed,
        }
        args.out.mkdir(parents=True, exist_ok=True)
        plot_curves({"run": curves}, args.target[0], args.out / "curves.png")
        (args.out / "result.json").write_text(json.dumps({**result, "curves": curves}))
        print(json.dumps(result), flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
