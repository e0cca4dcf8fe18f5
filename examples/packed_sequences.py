"""Train a sequence model on ragged episodes twice: padded to the longest one, and packed.

    python examples/packed_sequences.py --steps 10

The episodes of examples/data/hopper_medium.hdf5 have 288 to 1,000 steps, 432 on average. Both runs
train the same model on the same episodes in the same order; the last line is the result as JSON,
with the trained steps per second and the part of the places that hold a step.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_gear import Replay
from deepspeed_gear.cli.main import main as gear

DATA = Path(__file__).parent / "data" / "hopper_medium.hdf5"
# steps; episodes of an optimizer step
LONGEST = 1000
EPISODES = 8
WIDTH = 64
LAYERS = 2
HEADS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.after = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        parts = (
            self.qkv(self.before(x))
            .view(batch, length, 3, HEADS, WIDTH // HEADS)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=mask is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.after(x))


class Cloner(nn.Module):
    """Predicts each action from the observations until then."""

    def __init__(self) -> None:
        super().__init__()
        self.observation = nn.Linear(11, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.action = nn.Linear(WIDTH, 3)

    def forward(
        self, observation: Tensor, position_ids: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        x = self.observation(observation) + self.places(position_ids)
        for block in self.blocks:
            x = block(x, mask)
        actions: Tensor = self.action(x)
        return actions


def padded(data: str, steps: int, seed: int) -> dict[str, Any]:
    """Train on windows as long as the longest episode."""
    window = {"length": LONGEST, "align": "left"}
    section = {
        "data": data,
        "seed": seed,
        "sampler": {"kind": "epoch", "anchors": "start"},
        "fields": {"observation": {**window, "normalize": "mean_std"}, "action": window},
        "batch_size": EPISODES,
        "gradient_accumulation_steps": EPISODES // 2,
    }
    model, optimizer = made(seed)
    counted = 0
    places = 0
    losses = []
    with Replay(section) as replay:
        begin = time.perf_counter()
        for _ in range(steps):
            batches = [replay.sample().clone() for _ in range(EPISODES // 2)]
            total = sum(int(batch.mask["action"].sum()) for batch in batches)
            loss = 0.0
            for batch in batches:
                real = batch.mask["action"]
                position = torch.arange(LONGEST).expand_as(real)
                error = (model(batch["observation"], position) - batch["action"]).square().mean(-1)
                part = (error * real).sum() / total
                part.backward()
                loss += float(part.detach())
                places += real.numel()
            counted += total
            losses.append(loss)
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - begin
    return {
        "steps_per_s": round(counted / seconds),
        "fill": round(counted / places, 3),
        "losses": losses,
    }


def packed(data: str, steps: int, seed: int) -> dict[str, Any]:
    """Train on packs."""
    section = {
        "data": data,
        "seed": seed,
        "sampler": {"kind": "epoch"},
        "fields": {"observation": {"normalize": "mean_std"}, "action": {}},
        "pack": {"tokens": 1024, "cost": [6 * WIDTH, 1], "pad": {"multiple": 64}},
        "batch": {"trajectories": EPISODES},
    }
    model, optimizer = made(seed)
    losses = []
    with Replay(section) as replay:
        begin = time.perf_counter()
        for _ in range(steps):
            loss = 0.0
            for micro in replay.step():
                found = model(micro["observation"], micro.position_ids, micro.block_mask)
                part = micro.sum((found - micro["action"]).square().mean(-1))
                part.backward()
                loss += float(part.detach())
            losses.append(loss)
            optimizer.step()
            optimizer.zero_grad()
        seconds = time.perf_counter() - begin
        metrics = replay.take_metrics()
    counted = metrics["step_tokens"] * steps
    return {
        "steps_per_s": round(counted / seconds),
        "fill": round(metrics["step_fill"], 3),
        "losses": losses,
    }


def made(seed: int) -> tuple[Cloner, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Cloner()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of each run")
    parser.add_argument("--seed", type=int, default=0, help="of weights and of replay")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = str(Path(folder) / "hopper")
        gear(["ingest", "--quiet", str(DATA), data])
        runs = {
            "padded": padded(data, args.steps, args.seed),
            "packed": packed(data, args.steps, args.seed),
        }
    ratio = runs["packed"]["steps_per_s"] / runs["padded"]["steps_per_s"]
    print(json.dumps({"steps": args.steps, "ratio": round(ratio, 2), **runs}))


if __name__ == "__main__":
    main()
