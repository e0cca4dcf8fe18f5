"""Train a Decision Transformer on Hopper data with a `gear` section, on any number of ranks.

    gear ingest examples/data/hopper_expert.hdf5 data/hopper
    deepspeed --num_gpus 2 examples/hopper.py --config configs/hopper.json

It saves after every evaluation, keeps the weights of the best one, and continues from the newest save with
--resume. Rank 0 writes progress and a summary to stderr; its last line of stdout is the result as JSON.
"sample_share" is the part of the training loop's time, without evaluations, that the host spends in
`gear_sample()`; "sample_us" is the mean time of a call.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from common import masked_mean, quiet_start, shorten_history, squared_error
from decision_transformer import DecisionTransformer
from deepspeed.accelerator import get_accelerator
from evaluate import MAX_STEPS, episodes_of
from plot import plot_curves
from torch import Tensor, nn

import deepspeed_gear

EPISODES, FIRST_SEED = 5, 1000
LOSS_EVERY, PRINT_EVERY = 50, 250  # steps
AVERAGE = 0.998  # of the weights, over steps: the average is evaluated
BEST = "best"  # tag of the checkpoint with the weights of the best evaluation


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
    parser.add_argument("--resume", action="store_true", help="continue from the newest save in --out")
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
        self.context = config["gear"]["fields"]["return_to_go"]["length"]
        self.normalizer, self.device = engine.gear.normalizer, engine.device

    def episodes(self, model: nn.Module, target: float) -> tuple[float, float]:
        """Return the mean return and the mean number of steps of all episodes, on every rank."""
        rank, world = dist.get_rank(), dist.get_world_size()
        seeds = list(range(FIRST_SEED, FIRST_SEED + EPISODES))[rank::world]
        here = copy.deepcopy(model).cpu()
        mine = episodes_of(here, target, seeds, self.context, self.normalizer)
        sums = [sum(values) for values in zip((0.0, 0), *mine, strict=True)]
        total = torch.tensor(sums, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        mean_return, mean_steps = (total / EPISODES).tolist()
        return mean_return, mean_steps


@dataclass
class Record:
    """What a run has reached, which its checkpoints carry.

    Args:
        loss: Mean loss by step.
        returns: Mean return of each evaluation by step, the first before training.
        lengths: Mean number of steps of the episodes of each evaluation.
        seconds: Of training, evaluations included.
    """

    loss: list[tuple[int, float]] = field(default_factory=list)
    returns: list[tuple[int, float]] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def best(self) -> tuple[int, float]:
        """Step and return of the best evaluation after the first one."""
        return max(self.returns[1:], key=lambda one: one[1])


def train(
    engine: deepspeed.DeepSpeedEngine,
    average: nn.Module,
    record: Record,
    steps: int,
    every: int,
    evaluate: Callable[[], None],
) -> dict[str, float]:
    """Train up to a number of optimizer steps; return the time of `gear_sample()` in the loop.

    Args:
        engine: Of the model.
        average: Average of the model's weights, which is evaluated.
        record: Gets the losses and the seconds.
        steps: Optimizer steps, with those before a resume.
        every: Steps between two evaluations.
        evaluate: Evaluates and saves; also after the last step.
    """
    engine.gear.progress()  # the first period begins here
    recent, sampling_s, evaluating_s, begin_s = [], 0.0, 0.0, now()
    first, before_s = engine.global_steps, record.seconds
    for step in range(first + 1, steps + 1):
        asked_s = time.perf_counter()
        batch = engine.gear_sample()
        sampling_s += time.perf_counter() - asked_s
        real = batch.mask["action"]
        loss = masked_mean(squared_error(engine(batch, real), batch["action"]), real)
        engine.backward(loss)
        engine.step()
        update_average(average.parameters(), engine.module.parameters(), step)
        recent.append(loss.detach())
        if step % LOSS_EVERY == 0:
            record.loss.append((step, float(torch.stack(recent).mean())))
            recent.clear()
        if step % PRINT_EVERY == 0:
            log_line(f"step {step} of {steps}: loss {record.loss[-1][1]:.4f}; {engine.gear.progress()}")
        if step % every == 0 or step == steps:
            trained_s = now()
            record.seconds = before_s + trained_s - begin_s
            evaluate()
            engine.gear.progress()  # the next period begins after the evaluation
            evaluating_s += now() - trained_s
    loop_s, count = now() - begin_s - evaluating_s, max(1, steps - first)
    share, call_us = sampling_s / loop_s, sampling_s / count * 1e6
    return {"sample_share": round(share, 5), "sample_us": round(call_us, 2)}


def log_line(text: str) -> None:
    """Write a line to stderr, on the first rank."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def summary(record: Record, result: dict[str, Any], target: float, out: Path) -> str:
    """Return what was learnt, and where it lies."""
    before, after, data = result["return_before"], result["return_after"], result["data_return"]
    steps_before, steps_after = result["episode_steps"]
    compared = "" if data is None else f"; mean of the data set: {data:.0f}"
    end = "does not fall" if steps_after == MAX_STEPS else f"falls after {steps_after:.0f}"
    every = ", ".join(f"{value:.0f}" for _, value in record.returns[1:])
    return (
        f"return (mean of {EPISODES} episodes, asked for {target:.0f}): {before:.0f} before training; after "
        f"{result['seconds_train']:.0f} s {result['return_best']:.0f} at the best evaluation, of step "
        f"{result['best_step']}, and {after:.0f} at the last{compared}\n"
        f"the return varies from one evaluation to the next: {every}\n"
        f"behaviour: untrained, the hopper falls after {steps_before:.0f} of {MAX_STEPS} steps; trained, it "
        f"{end}\n"
        f"curves: {out / 'curves.png'}\n"
        f"best weights: {out / 'checkpoint' / BEST}\n"
        f"checkpoint: {out / 'checkpoint' / result['checkpoint']}"
    )


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
    with quiet_start():
        engine, *_ = deepspeed_gear.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
    average.to(engine.device)
    engine.gear.transform = shorten_history
    episodes, out, record = Evaluation(engine, config).episodes, args.out.resolve(), Record()
    folder, steps = str(out / "checkpoint"), args.steps or config["scheduler"]["params"]["total_num_steps"]

    def evaluate() -> None:
        """Evaluate the average of the weights and record it; save after training has begun."""
        step = engine.global_steps
        value, length = episodes(average, args.target[0])
        record.returns.append((step, value))
        record.lengths.append(length)
        log_line(f"step {step} of {steps}: return {value:.0f}" if step else f"step 0: return {value:.0f}")
        if step:
            state = {"average": average.state_dict(), "record": asdict(record)}
            engine.save_checkpoint(folder, f"global_step{step}", state)
            if record.best[0] == step:
                engine.save_checkpoint(folder, BEST, state, save_latest=False)

    if args.resume and Path(folder, "latest").exists():
        _, state = engine.load_checkpoint(folder)
        average.load_state_dict(state["average"])
        record = Record(**state["record"])
        log_line(f"continuing after step {engine.global_steps}")
    else:
        evaluate()
    waits = train(engine, average, record, steps, args.evaluate_every, evaluate)

    (best_step, best), (last_step, after) = record.best, record.returns[-1]
    others = {f"{target:.0f}": episodes(average, target)[0] for target in args.target[1:]}
    known = engine.gear.datasets["main"].statistics
    if dist.get_rank() == 0:
        result = {
            "return_before": round(record.returns[0][1], 1),
            "return_best": round(best, 1),
            "best_step": best_step,
            "return_after": round(after, 1),
            "data_return": round(float(known["return"].mean), 1) if "return" in known else None,
            "episode_steps": [round(record.lengths[0], 1), round(record.lengths[-1], 1)],
            "seconds_train": round(record.seconds, 1),
            **waits,
            "device": str(engine.device),
            "ranks": dist.get_world_size(),
            "returns": {f"{args.target[0]:.0f}": after, **others},
            "steps": last_step,
            "seed": args.seed,
            "checkpoint": f"global_step{last_step}",
        }
        curves = {"loss": record.loss, "return": record.returns}
        plot_curves({"run": curves}, args.target[0], out / "curves.png")
        (out / "result.json").write_text(json.dumps({**result, "curves": curves}))
        log_line(summary(record, result, args.target[0], out))
        print(json.dumps(result), flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
