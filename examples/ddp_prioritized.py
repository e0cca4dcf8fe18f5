"""One prioritized replay buffer for the workers of plain DDP, without DeepSpeed and without a
server.

    torchrun --nproc_per_node 4 examples/ddp_prioritized.py --steps 1500

Every worker plays CartPole and adds its episodes to the one buffer, draws its part of each global
batch from the one distribution over all of them, and reports the priorities of its samples. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepspeed_gear import Batch, Replay

COLUMNS = {
    "observation": {"dtype": "float32", "shape": [4], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "int64", "role": "action"},
    "reward": {"dtype": "float32", "role": "reward"},
    "terminated": {"dtype": "bool", "role": "terminated"},
    "truncated": {"dtype": "bool", "role": "truncated"},
}


def config_of(steps: int, seed: int) -> dict[str, Any]:
    beta = {"linear": [0.4, 1.0, steps - 1]}  # of the global batch: the same on all workers
    return {
        "seed": seed,
        "tables": {"main": {"capacity_steps": 600_000, "schema": {"columns": COLUMNS}}},
        "sampler": {"kind": "prioritized", "unit": "step", "alpha": 0.6, "beta": beta},
        "fields": {
            "observation": {},
            "next_observation": {"column": "observation", "offset": "n_step"},
            "action": {},
        },
        "n_step": {"n": 3, "gamma": 0.99},
        "batch_size": 256,  # of all workers together
    }


def play(
    env: gymnasium.Env, q: nn.Module, epsilon: float, random: np.random.Generator
) -> dict[str, Any]:
    """Return an episode as columns."""
    observations = [env.reset(seed=int(random.integers(2**31)))[0]]
    actions = []
    rewards = []
    ended = truncated = False
    while not (ended or truncated):
        with torch.no_grad():
            action = int(q(torch.from_numpy(observations[-1])).argmax())
        action = int(random.integers(2)) if random.random() < epsilon else action
        observation, reward, ended, truncated, _ = env.step(action)
        observations.append(observation)
        actions.append(action)
        rewards.append(float(reward))
    last = np.arange(len(actions)) == len(actions) - 1
    flags = {"terminated": last & ended, "truncated": last & truncated}
    return {"observation": np.stack(observations), "action": actions, "reward": rewards, **flags}


def td_errors(q: nn.Module, online: nn.Module, target: nn.Module, batch: Batch) -> torch.Tensor:
    """Double Q-learning. [B]."""
    value = q(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
    with torch.no_grad():
        best = online(batch["next_observation"]).argmax(1, keepdim=True)
        after = target(batch["next_observation"]).gather(1, best)[:, 0]
    return value - batch["return_n"] - batch["discount"] * after


def train(steps: int, seed: int) -> tuple[dict[str, Any], nn.Module, Batch]:
    """Train on all workers; return the result, the network and the last batch of this one."""
    rank = dist.get_rank()
    workers = dist.get_world_size()
    torch.manual_seed(seed)
    random = np.random.default_rng([seed, rank])
    env = gymnasium.make("CartPole-v1")
    online = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))
    q = DistributedDataParallel(online)
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(q.parameters(), lr=1e-3)
    with Replay(config_of(steps, seed)) as replay:
        returns: list[float] = []
        for step in range(steps):
            if step % 4 == 0:
                episode = play(env, online, max(0.05, 1 - 2 * step / steps), random)
                replay.add(episode)
                returns.append(sum(episode["reward"]))
            if step == 0:
                dist.barrier()  # the first batch draws from the first episodes of all workers
            batch = replay.sample()  # this worker's part of the global batch
            td = td_errors(q, online, target, batch)
            optimizer.zero_grad()
            (
                batch.is_weight * F.huber_loss(td, torch.zeros_like(td), reduction="none")
            ).mean().backward()
            optimizer.step()
            replay.update_priorities(batch, td.abs() + 1e-3)
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.lerp_(fast, 0.02)
        dist.barrier()
        result = {"workers": workers, "added": len(returns)}
        result["trajectories"] = len(replay)  # in the store of this node: those of its workers
        result["return"] = float(np.mean(returns[-10:]))
        return result, q, batch.clone()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    found = train(options.steps, options.seed)[0]
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
