"""C51 on CartPole in the manner of Rainbow: distributional, double, prioritized, n-step; all on one
device.

    python examples/c51_device.py                         # on the GPU if there is one
    python examples/c51_device.py --compile --cudagraphs  # compiled, in CUDA graphs
    python examples/c51_device.py --all                   # all of them, in turns per second

The episode of each environment grows in the table step by step, and n-step returns are computed
while a batch is gathered. Returns of the newest steps have fewer than n, and bootstrap from the
newest observation.

The last line is the result as JSON. Environments and capture are in device_loop.py.

Sources: Bellemare et al., "A Distributional Perspective on Reinforcement Learning", ICML 2017;
Hessel et al., "Rainbow: Combining Improvements in Deep Reinforcement Learning", AAAI 2018.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from device_loop import EPSILON, Environments, act_and_learn, arguments, result, run
from torch import Tensor, nn

from deepspeed_gear import DeviceReplay

GAMMA = 0.99
N_STEP = 3
TARGET_STEP = 0.02
LEARNING_RATE = 5e-4
HIDDEN = (120, 84)
# of the distribution of returns
ATOMS = 51
LEAST = 0.0
MOST = 100.0
# the longest episode
CAPACITY = 10_000
LONGEST = 500
BATCH = 128
# the probability of a random action, and when it is reached
EXPLORES_AT_LAST = 0.05
EXPLORING_PART = 0.2


def section(envs: Environments, args: argparse.Namespace) -> dict[str, Any]:
    """Return the `gear` section: episodes that grow, steps by priority, n-step returns."""
    columns = {
        "observation": {
            "dtype": "float32",
            "shape": list(envs.shape),
            "role": "observation",
            "rows": "T+1",
        },
        "action": {"dtype": "int64", "role": "action"},
        "reward": {"dtype": "float32", "role": "reward"},
        "terminated": {"dtype": "bool", "role": "terminated"},
    }
    table = {"placement": "device", "remove": "fifo", "schema": {"columns": columns}}
    capacity = max(CAPACITY, 3 * LONGEST * envs.num)
    table |= {"capacity_steps": capacity, "num_envs": envs.num, "max_length": LONGEST}
    beta = {"linear": [0.4, 1.0, args.steps]}
    fields = {
        "observation": {},
        "action": {},
        "bootstrap": {"column": "observation", "offset": "n_step"},
    }
    return {
        "seed": args.seed,
        "tables": {"main": table},
        "sampler": {"kind": "prioritized", "unit": "step", "alpha": 0.5, "beta": beta},
        "n_step": {
            "n": N_STEP,
            "gamma": GAMMA,
        },  # adds return_n, and discount: gamma^k, 0 at a terminal step
        "fields": fields,
        "batch_size": BATCH,
    }


class Distribution(nn.Module):
    """Logits of the distribution of returns of each action. [B, ...] -> [B, actions, atoms]."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        first, second = HIDDEN
        layers = nn.Linear(inputs, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()
        self.layers = nn.Sequential(*layers, nn.Linear(second, actions * ATOMS))
        self.actions = actions

    def forward(self, observation: Tensor) -> Tensor:
        return self.layers(observation).unflatten(1, (self.actions, ATOMS))


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Act and learn; return the returns of the last episodes and of a test, and turns
    per second.
    """
    torch.manual_seed(args.seed)
    envs = Environments("CartPole-v1", args.envs, args.seed, args.device)
    network = Distribution(envs.shape[0], envs.num_actions).to(args.device)
    targets = copy.deepcopy(network)
    atoms = torch.linspace(LEAST, MOST, ATOMS, device=args.device)
    samples = torch.arange(BATCH, device=args.device)
    on_gpu = args.device.type == "cuda"
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE, capturable=on_gpu)
    turn_on_device = torch.zeros((), device=args.device)
    last_loss = torch.zeros((), device=args.device)
    exploring_turns = max(1.0, EXPLORING_PART * args.steps)

    @torch.no_grad()
    def act() -> None:
        """Write the action of the highest mean return, or a random one with a probability that
        falls.
        """
        explores_with = (1 - turn_on_device.add_(1) / exploring_turns).clamp_min(EXPLORES_AT_LAST)
        explores = torch.rand(envs.num, device=args.device) < explores_with
        random = torch.randint_like(envs.action, envs.num_actions)
        envs.action.copy_(torch.where(explores, random, best(envs.seen)))

    def best(observation: Tensor) -> Tensor:
        return (network(observation).softmax(2) * atoms).sum(2).argmax(1)

    @torch.no_grad()
    def goal() -> Tensor:
        """Return the target distribution of the n-step return, projected on the atoms.
        [B, atoms].
        """
        following = batch["bootstrap"]
        masses = targets(following)[samples, best(following)].softmax(1)
        moved = batch["return_n"].unsqueeze(1) + batch["discount"].unsqueeze(1) * atoms
        at = (
            (moved.clamp(LEAST, MOST) - LEAST) * (ATOMS - 1) / (MOST - LEAST)
        )  # in numbers of atoms
        lower = at.long()
        upper_part = at.frac()
        goals = torch.zeros_like(masses).scatter_add_(1, lower, masses * (1 - upper_part))
        return goals.scatter_add_(1, (lower + 1).clamp_max(ATOMS - 1), masses * upper_part)

    def add() -> None:
        replay.add_steps_(envs.row, {"observation": envs.following})

    def learn() -> None:
        """Add the newest steps, draw, step the network, and report the cross entropies as
        priorities.
        """
        add()
        replay.sample_(batch)
        log_masses = network(batch["observation"])[samples, batch["action"]].log_softmax(1)
        errors = -(goal() * log_masses).sum(1)
        loss = (batch.is_weight * errors).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last_loss.copy_(loss.detach())
        replay.update_priorities_(batch, errors.detach() + EPSILON)
        with torch.no_grad():
            torch._foreach_lerp_(
                list(targets.parameters()), list(network.parameters()), TARGET_STEP
            )

    with DeviceReplay(section(envs, args), args.device) as replay:
        batch = replay.new_batch()
        clock = act_and_learn(args, envs, act, [learn], add)
        replay.check()
        numbers = {"test": envs.evaluate(best), "loss": last_loss.item(), "held": replay.num_steps}
        return result(args, envs, clock, **numbers)


if __name__ == "__main__":
    parser = arguments(__doc__, steps=15_000, envs=4)
    parser.add_argument("--random-steps", type=int, default=500, help="before learning begins")
    run(parser, train)
