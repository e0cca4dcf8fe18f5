"""DQN on CartPole whose replay, networks and optimizer live on one device; a step can be one CUDA
graph.

    python examples/dqn_device.py                         # on the GPU if there is one
    python examples/dqn_device.py --compile --cudagraphs  # compiled, in CUDA graphs
    python examples/dqn_device.py --buffer prioritized    # updates priorities in the step
    python examples/dqn_device.py --all                   # all of them, in turns per second

The last line is the result as JSON. Environments and capture are in device_loop.py.

Sources: Mnih et al., "Human-level control through deep reinforcement learning", Nature 518, 2015;
van Hasselt et al., "Deep Reinforcement Learning with Double Q-learning", AAAI 2016.
"""

from __future__ import annotations

import argparse
import copy
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
TARGET_STEP = 0.02
LEARNING_RATE = 1e-3
HIDDEN = (120, 84)
CAPACITY = 10_000
BATCH = 128
# the probability of a random action, and when it is reached
EXPLORES_AT_LAST = 0.05
EXPLORING_PART = 0.2


def network(inputs: int, outputs: int) -> nn.Sequential:
    first, second = HIDDEN
    layers = nn.Linear(inputs, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(second, outputs))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Act and learn; return the returns of the last episodes and of a test, and turns
    per second.
    """
    torch.manual_seed(args.seed)
    envs = Environments("CartPole-v1", args.envs, args.seed, args.device)
    values = network(envs.shape[0], envs.num_actions).to(args.device)
    targets = copy.deepcopy(values)
    on_gpu = args.device.type == "cuda"
    optimizer = torch.optim.Adam(values.parameters(), LEARNING_RATE, capturable=on_gpu)
    turn_on_device = torch.zeros((), device=args.device)
    last_loss = torch.zeros((), device=args.device)
    exploring_turns = max(1.0, EXPLORING_PART * args.steps)

    @torch.no_grad()
    def act() -> None:
        """Write the action of the highest value, or a random one with a probability that falls."""
        explores_with = (1 - turn_on_device.add_(1) / exploring_turns).clamp_min(EXPLORES_AT_LAST)
        explores = torch.rand(envs.num, device=args.device) < explores_with
        random = torch.randint_like(envs.action, envs.num_actions)
        envs.action.copy_(torch.where(explores, random, best(envs.seen)))

    def best(observation: Tensor) -> Tensor:
        return values(observation).argmax(1)

    def add() -> None:
        replay.add_transitions_(envs.row, {"observation": envs.following})

    def learn() -> None:
        """Add the newest transitions, draw, step the network, and report the errors as
        priorities.
        """
        add()
        replay.sample_(batch)
        with torch.no_grad():
            following = batch["next_observation"]
            value = targets(following).gather(1, best(following).unsqueeze(1)).squeeze(1)
            goes_on = 1 - batch["terminated"].float()  # truncation bootstraps
            goal = batch["reward"] + GAMMA * goes_on * value
        chosen = values(batch["observation"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        loss = (batch.is_weight * F.smooth_l1_loss(chosen, goal, reduction="none")).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last_loss.copy_(loss.detach())
        if batch.importance is not None:
            replay.update_priorities_(batch, (chosen.detach() - goal).abs() + EPSILON)
        with torch.no_grad():
            torch._foreach_lerp_(list(targets.parameters()), list(values.parameters()), TARGET_STEP)

    with DeviceReplay(transitions(envs, CAPACITY, BATCH, args), args.device) as replay:
        batch = replay.new_batch()
        clock = act_and_learn(args, envs, act, [learn], add)
        replay.check()
        numbers = {"test": envs.evaluate(best), "loss": last_loss.item(), "held": replay.num_steps}
        return result(args, envs, clock, **numbers)


if __name__ == "__main__":
    parser = arguments(__doc__, steps=15_000, envs=4)
    parser.add_argument("--random-steps", type=int, default=500, help="before learning begins")
    parser.add_argument("--buffer", choices=list(SAMPLERS), default="uniform")
    run(parser, train)
