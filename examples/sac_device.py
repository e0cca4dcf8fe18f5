"""SAC on Pendulum whose replay, networks and optimizers live on one device; a step can be one CUDA graph.

    python examples/sac_device.py                           on the GPU, or on the CPU where there is none
    python examples/sac_device.py --compile --cudagraphs    compiled, and captured in CUDA graphs
    python examples/sac_device.py --buffer prioritized      priorities are updated inside the same step
    python examples/sac_device.py --all                     all combinations, and a table of turns per second

The last line is the result as JSON. The loop and the capture are in device_loop.py.

Source: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv:1812.05905, with the
temperature of its section 5.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from device_loop import ACTION, EPSILON, LARGEST, OBSERVATION, Feed, main
from torch import Tensor, nn

from deepspeed_gear import DeviceReplay

GAMMA, TARGET_STEP, LEARNING_RATE, HIDDEN = 0.99, 0.005, 1e-3, 256
LEAST_LOG_STD, MOST_LOG_STD = -5.0, 2.0
ENTROPY = -float(ACTION)  # what the temperature aims at


def network(inputs: int, outputs: int) -> nn.Sequential:
    first, second = nn.Linear(inputs, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(HIDDEN, outputs))


class SAC:
    """An actor, two critics with targets and a temperature, which learn from a replay on their device."""

    def __init__(self, replay: DeviceReplay, feed: Feed) -> None:
        self.replay, self.feed, self.batch = replay, feed, replay.new_batch()
        device, is_cuda = replay.device, replay.device.type == "cuda"
        self.action = torch.zeros(len(feed.seen), ACTION, device=device)
        self.actor = network(OBSERVATION, 2 * ACTION).to(device)
        self.critics = nn.ModuleList(network(OBSERVATION + ACTION, 1) for _ in range(2)).to(device)
        self.targets = copy.deepcopy(self.critics)
        self.log_temperature = torch.zeros((), device=device, requires_grad=True)
        self.critic_optimizer, self.actor_optimizer, self.temperature_optimizer = (
            torch.optim.Adam(parameters, LEARNING_RATE, capturable=is_cuda)
            for parameters in (self.critics.parameters(), self.actor.parameters(), [self.log_temperature])
        )
        self.updates = (self.learn,)

    def kind_of(self, turn: int) -> int:
        return 0

    @torch.no_grad()
    def act(self) -> None:
        self.action.copy_(self.draw(self.feed.seen)[0])

    def draw(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions and return them with their log densities. [B, 1] and [B]."""
        mean, log_std = self.actor(observation).chunk(2, 1)
        middle, reach = (MOST_LOG_STD + LEAST_LOG_STD) / 2, (MOST_LOG_STD - LEAST_LOG_STD) / 2
        log_std, noise = middle + reach * torch.tanh(log_std), torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        log_density = -noise.square() / 2 - log_std - math.log(2 * math.pi) / 2
        squashed = 2 * (math.log(2) - raw - F.softplus(-2 * raw)) + math.log(LARGEST)  # log of tanh's slope
        return torch.tanh(raw) * LARGEST, (log_density - squashed).sum(1)

    def learn(self) -> None:
        """Add the newest transitions, draw, step all networks, and report the errors as priorities."""
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
        self.learn_actor(batch["observation"])
        with torch.no_grad():
            slow, fast = list(self.targets.parameters()), list(self.critics.parameters())
            torch._foreach_lerp_(slow, fast, TARGET_STEP)

    def learn_actor(self, observation: Tensor) -> None:
        action, log_density = self.draw(observation)
        value = torch.stack(self.values(self.critics, observation, action)).amin(0)
        self.actor_optimizer.zero_grad()
        (self.log_temperature.detach().exp() * log_density - value).mean().backward()
        self.actor_optimizer.step()
        self.temperature_optimizer.zero_grad()
        (-self.log_temperature.exp() * (log_density.detach() + ENTROPY).mean()).backward()
        self.temperature_optimizer.step()

    def values(self, critics: Any, observation: Tensor, action: Tensor) -> list[Tensor]:
        return [critic(torch.cat([observation, action], 1)).squeeze(1) for critic in critics]

    @torch.no_grad()
    def critic_targets(self, batch: Any) -> Tensor:
        """Return the critics' targets: the smaller target value, and the entropy's part. [B]."""
        action, log_density = self.draw(batch["next_observation"])
        value = torch.stack(self.values(self.targets, batch["next_observation"], action)).amin(0)
        soft = value - self.log_temperature.exp() * log_density
        return batch["reward"] + GAMMA * (1 - batch["terminated"].float()) * soft  # truncation bootstraps


if __name__ == "__main__":
    main(__doc__, SAC)
