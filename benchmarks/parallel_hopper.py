"""The Hopper example data-, tensor- and pipeline-parallel on two ranks: the same losses, the same return.

    gear ingest examples/data/hopper_expert.hdf5 data/hopper
    python benchmarks/parallel_hopper.py [--steps N] [--json F] [--figure F.png] [--quick]

Config, model, loss and evaluation are those of `examples/hopper.py`. All three begin with the same weights
and divide the same global batches of 128 into the same two micro batches: one on each replica (dp2), or
    one
after the other on the one replica (tp2, pp2). So they compute the same numbers up to the order of sums.
What is evaluated is the average of the weights over steps, gathered into the plain model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support import ROOT
from support.ranks import free_port
from support.report import Disturbance, document, print_table, write_json

sys.path.insert(0, str(ROOT / "examples"))
MODES = ("dp2", "tp2", "pp2")
RANKS, MICRO, TARGET, QUICK_STEPS, CURVE_STEPS = 2, 64, 3600.0, 10, 50


def config_of(mode: str, steps: int, seed: int) -> dict[str, Any]:
    """Return the Hopper example's config, changed as the mode needs."""
    configs = ROOT / "configs"
    config = json.loads((configs / "hopper.json").read_text())
    for name in ("train_batch_size", "tensorboard"):
        del config[name]
    config["train_micro_batch_size_per_gpu"] = MICRO
    config["gradient_accumulation_steps"] = 1 if mode == "dp2" else 2
    config["scheduler"]["params"]["total_num_steps"] = steps
    config["scheduler"]["params"]["warmup_num_steps"] = min(100, steps // 2)
    config["gear"]["seed"] = seed
    if mode == "tp2":
        known = json.loads((configs / "tensor_parallel.json").read_text())
        config["tensor_parallel"] = known["tensor_parallel"]
    elif mode == "pp2":
        known = json.loads((configs / "pipeline_parallel.json").read_text())
        config["gear"]["pipeline"] = known["gear"]["pipeline"]
    return config


def engine_of(mode: str, config: dict[str, Any], plain: Any) -> Any:
    """Return an engine with the weights of a plain model."""
    import copy

    from pipeline_parallel import pipeline

    import deepspeed_gear

    model = pipeline(config, seed=0) if mode == "pp2" else copy.deepcopy(plain)
    if mode == "pp2":  # its layers have the plain model's names; each stage takes its own
        model.load_state_dict(plain.layers.state_dict(), strict=False)
    return deepspeed_gear.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def whole_weights(engine: Any, weights: list[Any], is_pipeline: bool) -> dict[str, Any]:
    """Return the plain model's state, made of values of this engine's parameters. Collective."""
    import torch.distributed as dist
    from deepspeed.module_inject.layers import GatherReplacedLayerParams

    parameters = list(engine.module.parameters())
    kept = [parameter.data for parameter in parameters]
    for parameter, value in zip(parameters, weights, strict=True):
        parameter.data = value.clone()
    mine = {}
    for path, module in engine.module.named_modules():
        own = list(module.parameters(recurse=False))
        if own:
            with GatherReplacedLayerParams(own, module):
                for name, parameter in module.named_parameters(path, recurse=False):
                    mine[name] = parameter.detach().clone()
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.data = value
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return {f"layers.{n}" if is_pipeline else n: value for part in found for n, value in part.items()}


def loss_of_step(engine: Any) -> Any:
    """Make one optimizer step; return this rank's mean loss, or in a pipeline the whole one."""
    import torch
    from common import masked_mean, squared_error

    if hasattr(engine, "gear_batches"):
        return engine.train_batch(data_iter=engine.gear_iterator())
    losses = []
    for _ in range(engine.gradient_accumulation_steps()):
        batch = engine.gear_sample()
        real = batch.mask["action"]
        loss = masked_mean(squared_error(engine(batch, real), batch["action"]), real)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def worker(options: argparse.Namespace) -> None:
    """Train one mode as a rank; rank 0 writes what came out."""
    import torch
    import torch.distributed as dist
    from common import ACTION, OBSERVATION, shorten_history
    from decision_transformer import DecisionTransformer
    from hopper import Evaluation, update_average

    config = config_of(options.mode, options.steps, options.seed)
    torch.manual_seed(options.seed)
    plain = DecisionTransformer(OBSERVATION, ACTION, config["gear"]["fields"]["action"]["length"])
    engine = engine_of(options.mode, config, plain)
    engine.gear.transform = shorten_history
    evaluate = Evaluation(engine, config).episodes
    before = evaluate(plain, TARGET)[0]
    average = [parameter.detach().clone() for parameter in engine.module.parameters()]
    losses, begin = [], time.perf_counter()
    for step in range(1, options.steps + 1):
        losses.append(loss_of_step(engine).detach().reshape(()))
        update_average(average, engine.module.parameters(), step)
    seconds = time.perf_counter() - begin
    curve = torch.stack(losses).double()
    dist.all_reduce(curve)
    plain.load_state_dict(whole_weights(engine, average, options.mode == "pp2"))
    after = evaluate(plain, TARGET)[0]
    row = {
        "mode": options.mode,
        "steps": options.steps,
        "seed": options.seed,
        "return_before": round(before, 1),
        "return_after": round(after, 1),
        "seconds_train": round(seconds, 1),
        "losses": [float(f"{loss:.8g}") for loss in curve / dist.get_world_size()],
    }
    if dist.get_rank() == 0:
        Path(options.worker).write_text(json.dumps(row))
    engine.destroy()
    dist.destroy_process_group()


def run(mode: str, steps: int, seed: int) -> dict[str, Any]:
    """Train one mode under DeepSpeed's launcher."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        program = [__file__, "--worker", str(out), "--mode", mode, "--steps", str(steps), "--seed", str(seed)]
        launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(RANKS)]
        try:
            subprocess.run([*launcher, "--master_port", str(port), *program], check=True, cwd=ROOT)
        finally:
            for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
                left.unlink(missing_ok=True)
        return json.loads(out.read_text())


def compare(rows: list[dict[str, Any]]) -> None:
    """Add how far each mode's losses are from those of dp2: largest relative difference up to a step."""
    for row in rows:
        apart = [abs(a - b) / b for a, b in zip(row["losses"], rows[0]["losses"], strict=True)]
        for steps in (10, 100, 1000):
            row[f"apart_{steps}"] = float(f"{max(apart[:steps]):.2g}")
        last = row["losses"][-CURVE_STEPS:]
        row["loss_after"] = round(sum(last) / len(last), 5)


def curve_of(losses: list[float]) -> tuple[list[int], list[float]]:
    """Return means over some steps."""
    parts = [losses[i : i + CURVE_STEPS] for i in range(0, len(losses), CURVE_STEPS)]
    return [i * CURVE_STEPS + len(part) for i, part in enumerate(parts)], [sum(p) / len(p) for p in parts]


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the losses on top of each other, how far they are apart, and the returns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    for row, width, style in zip(rows, (5, 2.5, 1), ("-", "-", "--"), strict=True):
        color = ("lightgray", "tab:orange", "black")[rows.index(row)]
        left.semilogy(*curve_of(row["losses"]), style, label=row["mode"], linewidth=width, color=color)
        if row is not rows[0]:
            apart = [abs(a - b) / b for a, b in zip(row["losses"], rows[0]["losses"], strict=True)]
            middle.loglog(*curve_of(apart), style, label=f"{row['mode']} from dp2", color=color)
    left.set(xlabel="step", ylabel="squared error of actions", title="loss")
    middle.set(xlabel="step", ylabel="relative difference", title="losses apart")
    names = [row["mode"] for row in rows]
    bars = right.bar(names, [row["return_after"] for row in rows], color=["lightgray", "tab:orange", "black"])
    right.bar_label(bars, fmt="%.0f")
    right.axhline(TARGET, linestyle="--", linewidth=1, color="gray", label=f"asked for: {TARGET:.0f}")
    right.set(ylabel="return", title="mean return of 5 episodes", ylim=(0, 1.25 * TARGET))
    right.legend(loc="upper right")
    left.legend()
    middle.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps of each mode")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of replay")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--figure", type=Path, help="draw the curves into this file")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    disturbance = Disturbance()
    steps = QUICK_STEPS if options.quick else options.steps
    rows = [run(mode, steps, options.seed) for mode in MODES]
    compare(rows)
    columns = (
        "mode",
        "return_before",
        "return_after",
        "loss_after",
        "apart_10",
        "apart_100",
        "seconds_train",
    )
    print_table(columns, [[row[name] for name in columns] for row in rows])
    if options.figure is not None:
        plot(rows, options.figure)
    if options.json is not None:
        write_json(options.json, document(disturbance, rows))


if __name__ == "__main__":
    main()
