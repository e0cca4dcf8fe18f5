"""TD3 on Pendulum whose replay, networks and optimizers live on one device; a step can be one CUDA graph.

    python examples/td3_device.py                           on the GPU, or on the CPU where there is none
    python examples/td3_device.py --compile --cudagraphs    compiled, and captured in CUDA graphs
    python examples/td3_device.py --buffer prioritized      priorities are updated inside the same step
    python examples/td3_device.py --all                     all combinations, and a table of turns per second

The last line is the result as JSON. The loop and the capture are in device_loop.py.

Source: Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", ICML 2018.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from device_loop import ACTION, EPSILON, LARGEST, OBSERVATION, Feed, main
from torch import Tensor, nn

from deepspeed_gear import DeviceReplay

GAMMA, TARGET_STEP, LEARNING_RATE, HIDDEN = 0.99, 0.005, 1e-3, 256
EXPLORATION, SMOOTHING, CLIP = (
    0.1,
    0.2,
    0.5,
)  # deviations of noise as parts of the largest action, and a limit
DELAY = 2  # critic steps for each step of the actor


def network(inputs: int, outputs: int) -> nn.Sequential:
    first, second = nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(HIDDEN, outputs))


class TD3:
    """An actor, two critics and their targets, which learn from a replay on their device."""

    def __init__(self, replay: DeviceReplay, feed: Feed) -> None:
        self.replay, self.feed, self.batch = replay, feed, replay.new_batch()
        device, is_cuda = replay.device, replay.device.type == "cuda"
        self.action = torch.zeros(len(feed.seen), ACTION, device=device)
        self.actor = nn.Sequential(network(OBSERVATION, ACTION), nn.Tanh()).to(device)
        self.critics = nn.ModuleList(network(OBSERVATION + ACTION, 1) for _ in range(2)).to(device)
        self.targets = copy.deepcopy(nn.ModuleList([self.actor, self.critics]))
        self.critic_optimizer, self.actor_optimizer = (
            torch.optim.Adam(module.parameters(), LEARNING_RATE, capturable=is_cuda)
            for module in (self.critics, self.actor)
        )
        self.updates = (self.learn_both, self.learn_critics)

    def kind_of(self, turn: int) -> int:
        return min(turn % DELAY, 1)

    @torch.no_grad()
    def act(self) -> None:
        noise = torch.randn_like(self.action) * EXPLORATION * LARGEST
        self.action.copy_((self.actor(self.feed.seen) * LARGEST + noise).clamp(-LARGEST, LARGEST))

    def learn_critics(self) -> None:
        """Add the newest transitions, draw, step the critics, and report the errors as priorities."""
        batch = self.batch
        self.replay.add_transitions_(self.feed.row, {"observation": self.feed.following})
        self.replay.sample_(batch)
        critic_targets, weight = self.critic_targets(batch), batch.is_weight
        errors = [
            v - critic_targets for v in self.values(self.critics, batch["observation"], batch["action"])
        ]
        self.critic_optimizer.zero_grad()
        sum((weight * error.square()).mean() for error in errors).backward()
        self.critic_optimizer.step()
        if batch.importance is not None:
            self.replay.update_priorities_(batch, sum(e.detach().abs() for e in errors) / 2 + EPSILON)

    def learn_both(self) -> None:
        """The same, and step the actor and the targets."""
        self.learn_critics()
        observation = self.batch["observation"]
        self.actor_optimizer.zero_grad()
        value = self.values(self.critics[:1], observation, self.actor(observation) * LARGEST)[0]
        (-value.mean()).backward()
        self.actor_optimizer.step()
        with torch.no_grad():
            slow, fast = self.targets.parameters(), [*self.actor.parameters(), *self.critics.parameters()]
            torch._foreach_lerp_(list(slow), fast, TARGET_STEP)

    def values(self, critics: Any, observation: Tensor, action: Tensor) -> list[Tensor]:
        return [critic(torch.cat([observation, action], 1)).squeeze(1) for critic in critics]

    @torch.no_grad()
    def critic_targets(self, batch: Any) -> Tensor:
        """Return the critics' targets: the smaller target value of a smoothed action. [B]."""
        actor, critics = self.targets
        following, noise = batch["next_observation"], torch.randn_like(batch["action"])
        noise = (noise * SMOOTHING).clamp(-CLIP, CLIP) * LARGEST
        action = (actor(following) * LARGEST + noise).clamp(-LARGEST, LARGEST)
        value = torch.stack(self.values(critics, following, action)).amin(0)
        return batch["reward"] + GAMMA * (1 - batch["terminated"].float()) * value  # truncation bootstraps


if __name__ == "__main__":
    main(__doc__, TD3)
