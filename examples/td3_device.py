"""TD3 on Pendulum whose replay, networks and optimizers live on one device; a step can be one CUDA
graph.

    python examples/td3_device.py                         # on the GPU if there is one
    python examples/td3_device.py --compile --cudagraphs  # compiled, in CUDA graphs
    python examples/td3_device.py --buffer prioritized    # updates priorities in the step
    python examples/td3_device.py --all                   # all of them, in turns per second

The last line is the result as JSON. Environments and capture are in device_loop.py.

Source: Fujimoto et al., "Addressing Function Approximation Error in Actor-Critic Methods", ICML
2018.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
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
# deviations of noise and a limit, in largest actions
EXPLORATION = 0.1
SMOOTHING = 0.2
CLIP = 0.5
DELAY = 2  # critic steps for each step of the actor


def network(inputs: int, outputs: int, *last: nn.Module) -> nn.Sequential:
    first = nn.Linear(inputs, HIDDEN)
    second = nn.Linear(HIDDEN, HIDDEN)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(HIDDEN, outputs), *last)


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
    actor = network(inputs, outputs, nn.Tanh()).to(args.device)
    critics = nn.ModuleList(network(inputs + outputs, 1) for _ in range(2)).to(args.device)
    targets = copy.deepcopy(nn.ModuleList([actor, critics]))
    on_gpu = args.device.type == "cuda"
    critic_optimizer, actor_optimizer = (
        torch.optim.Adam(module.parameters(), LEARNING_RATE, capturable=on_gpu)
        for module in (critics, actor)
    )
    last_loss = torch.zeros((), device=args.device)

    @torch.no_grad()
    def act() -> None:
        noise = torch.randn_like(envs.action) * EXPLORATION * largest
        envs.action.copy_((actor(envs.seen) * largest + noise).clamp(-largest, largest))

    @torch.no_grad()
    def critic_goals() -> Tensor:
        """Return what the critics aim at: the smaller target value of a smoothed action. [B]."""
        target_actor, target_critics = targets
        following = batch["next_observation"]
        noise = torch.randn_like(batch["action"])
        noise = (noise * SMOOTHING).clamp(-CLIP, CLIP) * largest
        action = (target_actor(following) * largest + noise).clamp(-largest, largest)
        value = torch.stack(values_of(target_critics, following, action)).amin(0)
        return (
            batch["reward"] + GAMMA * (1 - batch["terminated"].float()) * value
        )  # truncation bootstraps

    def add() -> None:
        replay.add_transitions_(envs.row, {"observation": envs.following})

    def learn_critics() -> None:
        """Add the newest transitions, draw, step the critics, and report the errors as
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

    def learn_both() -> None:
        """The same, and step the actor and the targets."""
        learn_critics()
        observation = batch["observation"]
        value = values_of(critics[:1], observation, actor(observation) * largest)[0]
        actor_optimizer.zero_grad()
        (-value.mean()).backward()
        actor_optimizer.step()
        with torch.no_grad():
            fast = [*actor.parameters(), *critics.parameters()]
            torch._foreach_lerp_(list(targets.parameters()), fast, TARGET_STEP)

    with DeviceReplay(transitions(envs, CAPACITY, BATCH, args), args.device) as replay:
        batch = replay.new_batch()
        clock = act_and_learn(args, envs, act, [learn_both, *[learn_critics] * (DELAY - 1)], add)
        replay.check()
        numbers = {
            "test": envs.evaluate(lambda seen: actor(seen) * largest),
            "loss": last_loss.item(),
        }
        return result(args, envs, clock, **numbers, held=replay.num_steps)


if __name__ == "__main__":
    parser = arguments(__doc__, steps=8000)
    parser.add_argument("--random-steps", type=int, default=1000, help="before learning begins")
    parser.add_argument("--buffer", choices=list(SAMPLERS), default="uniform")
    run(parser, train)
