"""SAC on Pendulum whose replay, networks and optimizers live on one device; a step can be one CUDA
graph.

    python examples/sac_device.py                         # on the GPU if there is one
    python examples/sac_device.py --compile --cudagraphs  # compiled, in CUDA graphs
    python examples/sac_device.py --buffer prioritized    # updates priorities in the step
    python examples/sac_device.py --all                   # all of them, in turns per second

The last line is the result as JSON. Environments and capture are in device_loop.py.

Source: Haarnoja et al., "Soft Actor-Critic Algorithms and Applications", arXiv:1812.05905, with the
temperature of its section 5.
"""

from __future__ import annotations

import argparse
import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from device_loop import (
    EPSILON,
    SAMPLERS,
    Environments,
    act_and_learn,
    arguments,
    result,
    run,
    transitions,
)
from torch import Tensor, nn

from deepspeed_gear import DeviceReplay

GAMMA = 0.99
TARGET_STEP = 0.005
LEARNING_RATE = 1e-3
HIDDEN = 256
CAPACITY = 100_000
BATCH = 256
LEAST_LOG_STD = -5.0
MOST_LOG_STD = 2.0


def network(inputs: int, outputs: int) -> nn.Sequential:
    first = nn.Linear(inputs, HIDDEN)
    second = nn.Linear(HIDDEN, HIDDEN)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(HIDDEN, outputs))


def values_of(critics: Any, observation: Tensor, action: Tensor) -> list[Tensor]:
    return [critic(torch.cat([observation, action], 1)).squeeze(1) for critic in critics]


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Act and learn; return the returns of the last episodes and of a test, and turns
    per second.
    """
    torch.manual_seed(args.seed)
    envs = Environments("Pendulum-v1", args.envs, args.seed, args.device)
    inputs = envs.shape[0]
    outputs = envs.action.shape[1]
    largest = envs.largest
    entropy = -float(outputs)  # what the temperature aims at
    actor = network(inputs, 2 * outputs).to(args.device)
    critics = nn.ModuleList(network(inputs + outputs, 1) for _ in range(2)).to(args.device)
    targets = copy.deepcopy(critics)
    log_temperature = torch.zeros((), device=args.device, requires_grad=True)
    on_gpu = args.device.type == "cuda"
    critic_optimizer, actor_optimizer, temperature_optimizer = (
        torch.optim.Adam(parameters, LEARNING_RATE, capturable=on_gpu)
        for parameters in (critics.parameters(), actor.parameters(), [log_temperature])
    )
    last_loss = torch.zeros((), device=args.device)

    @torch.no_grad()
    def act() -> None:
        envs.action.copy_(draw(envs.seen)[0])

    def draw(observation: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions and return them with their log densities. [B, A] and [B]."""
        mean, log_std = actor(observation).chunk(2, 1)
        middle = (MOST_LOG_STD + LEAST_LOG_STD) / 2
        reach = (MOST_LOG_STD - LEAST_LOG_STD) / 2
        log_std = middle + reach * torch.tanh(log_std)
        noise = torch.randn_like(mean)
        raw = mean + log_std.exp() * noise
        log_density = -noise.square() / 2 - log_std - math.log(2 * math.pi) / 2
        squashed = 2 * (math.log(2) - raw - F.softplus(-2 * raw)) + math.log(
            largest
        )  # log of tanh's slope
        return torch.tanh(raw) * largest, (log_density - squashed).sum(1)

    @torch.no_grad()
    def critic_goals() -> Tensor:
        """Return what the critics aim at: the smaller target value, and the entropy's part. [B]."""
        action, log_density = draw(batch["next_observation"])
        value = torch.stack(values_of(targets, batch["next_observation"], action)).amin(0)
        soft = value - log_temperature.exp() * log_density
        return (
            batch["reward"] + GAMMA * (1 - batch["terminated"].float()) * soft
        )  # truncation bootstraps

    def add() -> None:
        replay.add_transitions_(envs.row, {"observation": envs.following})

    def learn() -> None:
        """Add the newest transitions, draw, step all networks, and report the errors as
        priorities.
        """
        add()
        replay.sample_(batch)
        goals = critic_goals()
        errors = [
            value - goals for value in values_of(critics, batch["observation"], batch["action"])
        ]
        loss = torch.stack([batch.is_weight * error.square() for error in errors]).mean(1).sum()
        critic_optimizer.zero_grad()
        loss.backward()
        critic_optimizer.step()
        last_loss.copy_(loss.detach())
        if batch.importance is not None:
            replay.update_priorities_(batch, torch.stack(errors).detach().abs().mean(0) + EPSILON)
        learn_actor(batch["observation"])
        with torch.no_grad():
            torch._foreach_lerp_(
                list(targets.parameters()), list(critics.parameters()), TARGET_STEP
            )

    def learn_actor(observation: Tensor) -> None:
        action, log_density = draw(observation)
        value = torch.stack(values_of(critics, observation, action)).amin(0)
        actor_optimizer.zero_grad()
        (log_temperature.detach().exp() * log_density - value).mean().backward()
        actor_optimizer.step()
        temperature_optimizer.zero_grad()
        (-log_temperature.exp() * (log_density.detach() + entropy).mean()).backward()
        temperature_optimizer.step()

    with DeviceReplay(transitions(envs, CAPACITY, BATCH, args), args.device) as replay:
        batch = replay.new_batch()
        clock = act_and_learn(args, envs, act, [learn], add)
        replay.check()
        test = envs.evaluate(lambda seen: torch.tanh(actor(seen).chunk(2, 1)[0]) * largest)
        return result(args, envs, clock, test=test, loss=last_loss.item(), held=replay.num_steps)


if __name__ == "__main__":
    parser = arguments(__doc__, steps=8000)
    parser.add_argument("--random-steps", type=int, default=500, help="before learning begins")
    parser.add_argument("--buffer", choices=list(SAMPLERS), default="uniform")
    run(parser, train)
