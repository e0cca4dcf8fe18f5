"""PPO on CartPole: the roll-out buffer is a table, and its sampler visits every step once per
epoch.

    python examples/ppo.py --seed 0

starts two ranks. Each acts in its own environments and adds its roll-outs to the one table; a
global batch has steps of all. The last line is the result as JSON.

Sources: Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equations 7 and 9;
Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", ICLR
2016, equation 16.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from launched import is_rank, launch
from play import mean_return
from torch import Tensor, nn
from torch.distributions import Categorical
from tqdm import tqdm

import deepspeed_gear
from deepspeed_gear import Batch

# of a roll-out: all environments of all ranks together
RANKS = 2
STEPS = 1024
ENVS = 8  # of each rank
COLUMNS = ("observation", "action", "log_probability", "reward", "terminated", "truncated", "value")
CLIP = 0.2
VALUE_PART = 0.5
EPOCHS = 10
GOAL = 475.0
SEED = 1000
TEST_SEED = 2000


class ActorCritic(nn.Module):
    """Logits of the actions, and the value of an observation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.critic = nn.Sequential(
            nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
        )
        self.policy = nn.Linear(64, 2)
        nn.init.orthogonal_(self.policy.weight, 0.01)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(self.body(observation)), self.critic(observation).squeeze(-1)


class Player:
    """Acts in environments and returns roll-outs of a fixed number of steps."""

    def __init__(self, model: ActorCritic, num_steps: int, seed: int, device: torch.device) -> None:
        self.model = model
        self.num_steps = num_steps
        self.device = device
        make = lambda: gymnasium.make("CartPole-v1")  # noqa: E731
        self.envs = SyncVectorEnv([make] * ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
        self.observation, _ = self.envs.reset(seed=seed)
        self.random = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def play(self) -> list[tuple[dict[str, np.ndarray], np.ndarray]]:
        """Act with the model as it is; return a roll-out per environment, and the values after its
        steps.
        """
        rows: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        finals = np.zeros((ENVS, self.num_steps), np.float32)
        for at in range(self.num_steps):
            logits, value = self._ask(self.observation)
            action = torch.multinomial(logits.softmax(1), 1, generator=self.random)
            probability = logits.log_softmax(1).gather(1, action).squeeze(1)
            following, *results, info = self.envs.step(action.squeeze(1).numpy())
            for env in np.nonzero(results[2])[0]:  # the time limit is no failure
                finals[env, at] = float(self._ask(info["final_obs"][env])[1])
            kept = self.observation, action.squeeze(1), probability, *results, value
            for name, row in zip(COLUMNS, kept, strict=True):
                rows[name].append(row)
            self.observation = following
        after = self._ask(self.observation)[1].numpy()
        rows["value"].append(np.where(results[2], finals[:, -1], after))
        columns = {name: np.stack(kept, 1) for name, kept in rows.items()}
        return [
            ({name: column[env] for name, column in columns.items()}, finals[env])
            for env in range(ENVS)
        ]

    def _ask(self, observation: np.ndarray) -> tuple[Tensor, Tensor]:
        logits, value = self.model(torch.from_numpy(observation).to(self.device))
        return logits.cpu(), value.cpu()


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Return the clipped loss of the policy, and that of the values."""
    logits, value = model(batch["observation"])
    ratio = (Categorical(logits=logits).log_prob(batch["action"]) - batch["log_probability"]).exp()
    # of a window, at its step
    advantage = batch["advantage"][:, 0]
    target = batch["value_target"][:, 0]
    advantage = advantage / (advantage.std() + 1e-6)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    return VALUE_PART * F.mse_loss(value, target) - gain.mean()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", default="configs/ppo.json", help="a ds_config with a gear section"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=150, help="roll-outs at most")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    args = parser.parse_args()
    config = json.loads(Path(args.config).read_text())
    config["gear"]["seed"] = args.seed
    torch.manual_seed(args.seed)
    model = ActorCritic()
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    replay = engine.gear
    player = Player(model, STEPS // (ENVS * ranks), args.seed + 1000 * rank, engine.device)
    policy = lambda observation: model(observation)[0]  # noqa: E731
    batches = EPOCHS * STEPS // engine.train_batch_size()

    curve = [(0.0, mean_return(policy, SEED, engine.device))]
    begin = time.perf_counter()
    for update in tqdm(
        range(1, args.updates + 1), disable=rank > 0, unit="update", mininterval=5.0
    ):
        for rollout, values in player.play():
            replay.add(rollout, split_by_flags=True, final={"value": values})
        dist.barrier()  # the epochs go over the roll-outs of all ranks
        for _ in range(batches):
            engine.backward(loss_of(engine, engine.gear_sample()))
            engine.step()
        dist.barrier()
        if rank == 0:
            replay.clear()
        dist.barrier()
        if update % 10 == 0 or update == args.updates:
            curve.append((time.perf_counter() - begin, mean_return(policy, SEED, engine.device)))
            if min(mean for _, mean in curve[-2:]) >= GOAL:
                break
    after = mean_return(policy, TEST_SEED, engine.device)
    result = {
        "return_before": round(curve[0][1], 1),
        "return_after": round(after, 1),
        "seconds": round(time.perf_counter() - begin, 1),
        "seed": args.seed,
        "ranks": ranks,
        "updates": update,
        "env_steps": update * STEPS,
    }
    if rank == 0:
        print(json.dumps(result), flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    if not is_rank():
        sys.exit(launch(__file__, RANKS))
    main()
