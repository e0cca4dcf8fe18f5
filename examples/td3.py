"""TD3 on Pendulum in one file and one process; its buffer is a NumPy ring (`Plain`) or gear (`Gear`).

    python examples/td3.py --buffer gear
    python examples/td3.py --buffer plain

`--buffer both` (the default) runs one after the other. The last line is the result as JSON.

Source: Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", ICML 2018.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from deepspeed_gear import Replay

GAMMA, TARGET_STEP, LEARNING_RATE = 0.99, 0.005, 1e-3
EXPLORATION, SMOOTHING, CLIP = (
    0.1,
    0.2,
    0.5,
)  # deviations of noise as parts of the largest action, and a limit
DELAY = 2  # critic steps for each step of the actor
CAPACITY, BATCH = 100_000, 256
COLUMNS = {
    "observation": {"dtype": "float32", "shape": [3], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "float32", "shape": [1], "role": "action"},
    "reward": {"dtype": "float32", "role": "reward"},
    "terminated": {"dtype": "bool", "role": "terminated"},
    "truncated": {"dtype": "bool", "role": "truncated"},
}


class Plain:
    """The usual ring buffer: it keeps each observation twice, and one process uses it."""

    def __init__(self, observation: np.ndarray, seed: int) -> None:
        shapes = {"observation": 3, "next_observation": 3, "action": 1, "reward": (), "terminated": ()}
        self.rows = {
            name: np.zeros((CAPACITY, *np.atleast_1d(s).astype(int)), np.float32)
            for name, s in shapes.items()
        }
        self.random, self.count, self.observation = np.random.default_rng(seed), 0, observation

    def add(self, observation: np.ndarray, final: np.ndarray, **done: np.ndarray) -> None:
        at = (self.count + np.arange(len(observation))) % CAPACITY
        del done["truncated"]
        for name, rows in {"observation": self.observation, "next_observation": final, **done}.items():
            self.rows[name][at] = rows
        self.count, self.observation = self.count + len(observation), observation

    def sample(self) -> dict[str, Tensor]:
        at = self.random.integers(0, min(self.count, CAPACITY), BATCH)
        return {name: torch.from_numpy(rows[at]) for name, rows in self.rows.items()}


class Gear:
    """The same with gear: any process may add or sample, and observations are kept once."""

    def __init__(self, observation: np.ndarray, seed: int) -> None:
        table = {"capacity_steps": CAPACITY, "remove": "fifo", "schema": {"columns": COLUMNS}}
        following = {"column": "observation", "offset": 1}
        fields = {"next_observation": following, **{name: {} for name in COLUMNS if name != "truncated"}}
        sampler = {"kind": "uniform", "unit": "step"}
        options = {"tables": {"main": table}, "sampler": sampler, "fields": fields, "batch_size": BATCH}
        self.replay = Replay({"seed": seed, **options})
        self.steps = self.replay.writer().vector_writer(len(observation), "same_step")
        self.steps.reset(observation=observation)
        self.sample = self.replay.sample

    def add(self, observation: np.ndarray, final: np.ndarray, **done: np.ndarray) -> None:
        self.steps.step(final={"observation": final}, observation=observation, **done)


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs)
    )


class TD3(nn.Module):
    """An actor, two critics and their targets."""

    def __init__(self, observation: int, action: int, largest: float) -> None:
        super().__init__()
        self.actor = nn.Sequential(network(observation, action), nn.Tanh())
        self.critics = nn.ModuleList(network(observation + action, 1) for _ in range(2))
        self.targets = copy.deepcopy(nn.ModuleList([self.actor, self.critics]))
        self.largest = largest
        self.optimizers = [
            torch.optim.Adam(m.parameters(), LEARNING_RATE) for m in (self.critics, self.actor)
        ]

    def values(self, critics: Any, observation: Tensor, action: Tensor) -> list[Tensor]:
        return [critic(torch.cat([observation, action], 1)).squeeze(1) for critic in critics]

    def critic_targets(self, batch: Any) -> Tensor:
        """Return the critics' targets: the smaller target value of a smoothed action. [B]."""
        actor, critics = self.targets
        following, noise = batch["next_observation"], torch.randn_like(batch["action"])
        noise = (noise * SMOOTHING).clamp(-CLIP, CLIP) * self.largest
        action = (actor(following) * self.largest + noise).clamp(-self.largest, self.largest)
        value = torch.stack(self.values(critics, following, action)).amin(0)
        return batch["reward"] + GAMMA * (1 - batch["terminated"].float()) * value

    def learn(self, batch: Any, step: int) -> None:
        with torch.no_grad():
            critic_targets = self.critic_targets(batch)
        found = self.values(self.critics, batch["observation"], batch["action"])
        self._descend(0, sum(F.mse_loss(value, critic_targets) for value in found))
        if step % DELAY:
            return
        action = self.actor(batch["observation"]) * self.largest
        self._descend(1, -self.values(self.critics[:1], batch["observation"], action)[0].mean())
        with torch.no_grad():
            slow, fast = self.targets.parameters(), [*self.actor.parameters(), *self.critics.parameters()]
            torch._foreach_lerp_(list(slow), fast, TARGET_STEP)

    def _descend(self, which: int, loss: Any) -> None:
        self.optimizers[which].zero_grad()
        loss.backward()
        self.optimizers[which].step()


def train(kind: type[Plain] | type[Gear], args: argparse.Namespace) -> dict[str, Any]:
    """Act and learn; return the last episodes' mean return, steps per second, and CPU time in the buffer."""
    torch.manual_seed(args.seed)
    random = np.random.default_rng(args.seed)
    mode = AutoresetMode.SAME_STEP
    envs = SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * args.envs, autoreset_mode=mode)
    largest = float(envs.single_action_space.high[0])
    agent = TD3(3, 1, largest)
    observation, _ = envs.reset(seed=args.seed)
    buffer = kind(observation, args.seed)
    returns, total, in_buffer = [], np.zeros(args.envs), 0.0
    begin = time.perf_counter()
    for step in range(1, args.steps + 1):
        if step <= args.random_steps:
            action = random.uniform(-largest, largest, (args.envs, 1)).astype(np.float32)
        else:
            with torch.no_grad():
                action = agent.actor(torch.from_numpy(observation)).numpy() * largest
            noise = random.normal(0, EXPLORATION * largest, action.shape)
            action = (action + noise).clip(-largest, largest).astype(np.float32)
        observation, reward, terminated, truncated, infos = envs.step(action)
        final = observation.copy()
        total += reward
        for env in np.nonzero(terminated | truncated)[0]:
            final[env] = infos["final_obs"][env]
            returns.append(total[env])
            total[env] = 0.0
        added = time.thread_time()
        buffer.add(
            observation,
            final,
            action=action,
            reward=reward.astype(np.float32),
            terminated=terminated,
            truncated=truncated,
        )
        in_buffer += time.thread_time() - added
        if step > args.random_steps:
            drawn = time.thread_time()
            batch = buffer.sample()
            in_buffer += time.thread_time() - drawn
            agent.learn(batch, step)
    seconds = time.perf_counter() - begin
    return {
        "return": round(float(np.mean(returns[-10:])), 1),
        "steps_per_s": round(args.steps / seconds, 1),
        "buffer_us_per_step": round(in_buffer / args.steps * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--buffer", choices=["plain", "gear", "both"], default="both")
    parser.add_argument("--steps", type=int, default=10_000, help="of each environment")
    parser.add_argument("--random-steps", type=int, default=1000, help="before learning begins")
    parser.add_argument("--envs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {"plain": Plain, "gear": Gear}
    names = list(kinds) if args.buffer == "both" else [args.buffer]
    print(json.dumps({name: train(kinds[name], args) for name in names} | {"seed": args.seed}), flush=True)


if __name__ == "__main__":
    main()
