"""TD3 on Pendulum in one file and one process; its buffer is a NumPy ring or a TransitionBuffer.

    python examples/td3.py --buffer gear
    python examples/td3.py --buffer plain

`--buffer both` (the default) runs one after the other. The last line is the result as JSON.

Source: Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", ICML
2018.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn

from deepspeed_gear import TransitionBuffer

GAMMA = 0.99
TARGET_STEP = 0.005
LEARNING_RATE = 1e-3
# deviations of noise as parts of the largest action, and a limit
EXPLORATION = 0.1
SMOOTHING = 0.2
CLIP = 0.5
DELAY = 2  # critic steps for each step of the actor
CAPACITY = 100_000
BATCH = 256


class Plain:
    """The usual ring buffer, with the calls of TransitionBuffer: it keeps each
    observation twice.
    """

    def __init__(
        self, size: int, space: Any, actions: Any, *, n_envs: Any, batch_size: int, seed: int
    ) -> None:
        del n_envs
        shapes = {
            "observations": space.shape,
            "next_observations": space.shape,
            "actions": actions.shape,
        }
        shapes |= {"rewards": (1,), "dones": (1,)}
        self.rows = {name: np.zeros((size, *shape), np.float32) for name, shape in shapes.items()}
        self.random = np.random.default_rng(seed)
        self.size = size
        self.count = 0
        self.batch_size = batch_size

    def add(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, terminated: Any, truncated: Any
    ) -> None:
        del truncated
        at = (self.count + np.arange(len(obs))) % self.size
        given = obs, next_obs, action, reward[:, None], terminated[:, None]
        for rows, values in zip(self.rows.values(), given, strict=True):
            rows[at] = values
        self.count += len(obs)

    def sample(self) -> SimpleNamespace:
        at = self.random.integers(0, min(self.count, self.size), self.batch_size)
        return SimpleNamespace(
            **{name: torch.from_numpy(rows[at]) for name, rows in self.rows.items()}
        )

    def close(self) -> None:
        self.rows.clear()


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
        return [critic(torch.cat([observation, action], 1)) for critic in critics]

    def critic_targets(self, data: Any) -> Tensor:
        """Return the critics' targets: the smaller target value of a smoothed action. [B, 1]."""
        actor, critics = self.targets
        following = data.next_observations
        noise = torch.randn_like(data.actions)
        noise = (noise * SMOOTHING).clamp(-CLIP, CLIP) * self.largest
        action = (actor(following) * self.largest + noise).clamp(-self.largest, self.largest)
        value = torch.stack(self.values(critics, following, action)).amin(0)
        return data.rewards + GAMMA * (1 - data.dones) * value

    def learn(self, data: Any, step: int) -> None:
        with torch.no_grad():
            critic_targets = self.critic_targets(data)
        found = self.values(self.critics, data.observations, data.actions)
        self._descend(0, sum(F.mse_loss(value, critic_targets) for value in found))
        if step % DELAY:
            return
        action = self.actor(data.observations) * self.largest
        self._descend(1, -self.values(self.critics[:1], data.observations, action)[0].mean())
        with torch.no_grad():
            slow = self.targets.parameters()
            fast = [*self.actor.parameters(), *self.critics.parameters()]
            torch._foreach_lerp_(list(slow), fast, TARGET_STEP)

    def _descend(self, which: int, loss: Any) -> None:
        self.optimizers[which].zero_grad()
        loss.backward()
        self.optimizers[which].step()


def train(kind: type[Plain] | type[TransitionBuffer], args: argparse.Namespace) -> dict[str, Any]:
    """Act and learn; return the last episodes' mean return, steps per second, and CPU time in the
    buffer.
    """
    torch.manual_seed(args.seed)
    random = np.random.default_rng(args.seed)
    mode = AutoresetMode.SAME_STEP
    envs = SyncVectorEnv([lambda: gymnasium.make("Pendulum-v1")] * args.envs, autoreset_mode=mode)
    largest = float(envs.single_action_space.high[0])
    agent = TD3(3, 1, largest)
    observation, _ = envs.reset(seed=args.seed)
    spaces = envs.single_observation_space, envs.single_action_space
    buffer = kind(CAPACITY, *spaces, n_envs=envs, batch_size=BATCH, seed=args.seed)
    returns = []
    total = np.zeros(args.envs)
    in_buffer = 0.0
    begin = time.perf_counter()
    for step in range(1, args.steps + 1):
        if step <= args.random_steps:
            action = random.uniform(-largest, largest, (args.envs, 1)).astype(np.float32)
        else:
            with torch.no_grad():
                action = agent.actor(torch.from_numpy(observation)).numpy() * largest
            noise = random.normal(0, EXPLORATION * largest, action.shape)
            action = (action + noise).clip(-largest, largest).astype(np.float32)
        following, reward, terminated, truncated, infos = envs.step(action)
        final = following.copy()
        total += reward
        for env in np.nonzero(terminated | truncated)[0]:
            final[env] = infos["final_obs"][env]
            returns.append(total[env])
            total[env] = 0.0
        added = time.thread_time()
        buffer.add(observation, final, action, reward, terminated, truncated)
        in_buffer += time.thread_time() - added
        observation = following
        if step > args.random_steps:
            drawn = time.thread_time()
            data = buffer.sample()
            in_buffer += time.thread_time() - drawn
            agent.learn(data, step)
    seconds = time.perf_counter() - begin
    buffer.close()
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
    kinds = {"plain": Plain, "gear": TransitionBuffer}
    names = list(kinds) if args.buffer == "both" else [args.buffer]
    print(
        json.dumps({name: train(kinds[name], args) for name in names} | {"seed": args.seed}),
        flush=True,
    )


if __name__ == "__main__":
    main()
