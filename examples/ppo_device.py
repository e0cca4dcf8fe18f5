"""PPO on CartPole whose roll-outs, networks and optimizer live on one device; its parts can be CUDA
graphs.

    python examples/ppo_device.py                         # on the GPU if there is one
    python examples/ppo_device.py --compile --cudagraphs  # compiled, in CUDA graphs
    python examples/ppo_device.py --all                   # all of them, in turns per second
    python examples/ppo_device.py --envs 4096 --rollout 24    # minibatches of 24,576 steps

A roll-out is a trajectory of T steps of each environment. The table holds one roll-out: adding the
next one evicts it. The sampler `epoch` draws minibatches without replacement: each epoch has every
step once, in an order of its own.

The last line is the result as JSON. Environments and capture are in device_loop.py.

Sources: Schulman et al., "Proximal Policy Optimization Algorithms", 2017, equations 7 and 9;
Schulman et al., "High-Dimensional Continuous Control Using Generalized Advantage Estimation", ICLR
2016, equation 16.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from device_loop import Captured, Clock, Environments, arguments, result, run
from torch import Tensor, nn

from deepspeed_gear import DeviceReplay

# TRACE: lambda of generalized advantage estimation
GAMMA = 0.99
TRACE = 0.95
CLIP = 0.2
STEPS = 128  # of a roll-out
MINIBATCHES = 4  # of an epoch
EPOCHS = 4
LEARNING_RATE = 2.5e-3
VALUE_PART = 0.5
ENTROPY_PART = 0.01
LARGEST_GRADIENT = 0.5
HIDDEN = 64
COLUMNS = ("observation", "action", "log_probability", "advantage", "value")


def section(envs: Environments, args: argparse.Namespace) -> dict[str, Any]:
    """Return the `gear` section: one roll-out, every step once in each epoch."""
    columns: dict[str, dict[str, Any]] = {name: {"dtype": "float32"} for name in COLUMNS}
    columns["observation"] = {"dtype": "float32", "shape": list(envs.shape), "role": "observation"}
    columns["action"] = {"dtype": "int64", "role": "action"}
    table = {"placement": "device", "remove": "fifo", "schema": {"columns": columns}}
    table |= {
        "capacity_steps": envs.num * args.rollout,
        "max_length": args.rollout,
        "capacity_trajectories": envs.num,
    }
    options: dict[str, Any] = {"sampler": {"kind": "epoch", "unit": "step"}}
    options |= {
        "fields": {name: {} for name in COLUMNS},
        "batch_size": envs.num * args.rollout // MINIBATCHES,
    }
    return {"seed": args.seed, "tables": {"main": table}, **options}


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    first = nn.Linear(inputs, HIDDEN)
    second = nn.Linear(HIDDEN, HIDDEN)
    last = nn.Linear(HIDDEN, outputs)
    for layer, own in ((first, 2**0.5), (second, 2**0.5), (last, gain)):
        nn.init.orthogonal_(layer.weight, own)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Act and learn; return the returns of the last episodes and of a test, and turns
    per second.
    """
    torch.manual_seed(args.seed)
    envs = Environments("CartPole-v1", args.envs, args.seed, args.device)
    actor = network(envs.shape[0], envs.num_actions, 0.01).to(args.device)
    critic = network(envs.shape[0], 1, 1.0).to(args.device)
    parameters = [*actor.parameters(), *critic.parameters()]
    rate = torch.tensor(
        LEARNING_RATE, device=args.device
    )  # a tensor: a graph reads its value of each replay
    on_gpu = args.device.type == "cuda"
    optimizer = torch.optim.Adam(parameters, rate, eps=1e-5, capturable=on_gpu)
    shape = (envs.num, args.rollout)
    at = {"device": args.device}
    rollout = {name: torch.zeros(shape, **at) for name in COLUMNS}
    rollout["observation"] = torch.zeros(*shape, *envs.shape, **at)
    rollout["action"] = torch.zeros(shape, dtype=torch.int64, **at)
    error = torch.zeros(shape, **at)
    goes_on = torch.zeros(shape, **at)
    step = torch.zeros(1, dtype=torch.int64, **at)
    last_loss = torch.zeros((), **at)

    @torch.no_grad()
    def act() -> None:
        """Draw an action of each environment, and write the columns that are known before it is
        done.
        """
        log_probabilities = actor(envs.seen).log_softmax(1)
        noise = (
            -torch.empty_like(log_probabilities).exponential_().log()
        )  # Gumbel: the largest sum is a draw
        envs.action.copy_((log_probabilities + noise).argmax(1))
        chosen = log_probabilities.gather(1, envs.action.unsqueeze(1)).squeeze(1)
        columns = {"observation": envs.seen, "action": envs.action, "log_probability": chosen}
        write({**columns, "value": critic(envs.seen).squeeze(1)}, rollout)

    @torch.no_grad()
    def observe() -> None:
        """Write the error of the value, and whether the episode goes on, after the environments'
        step.
        """
        value = rollout["value"].index_select(1, step).squeeze(1)
        later = GAMMA * critic(envs.following).squeeze(1) * (~envs.row["terminated"]).float()
        ended = (
            envs.row["terminated"] | envs.row["truncated"]
        )  # truncation bootstraps, and ends the trace
        write({"error": envs.row["reward"] + later - value, "goes_on": (~ended).float()}, more)
        step.add_(1).remainder_(args.rollout)

    def write(columns: dict[str, Tensor], to: dict[str, Tensor]) -> None:
        for name, values in columns.items():
            to[name].index_copy_(1, step, values.unsqueeze(1))

    @torch.no_grad()
    def add() -> None:
        """Compute the advantages of the roll-out, and add it to the table."""
        advantage = torch.zeros(envs.num, **at)
        for t in reversed(range(args.rollout)):
            advantage = error[:, t] + GAMMA * TRACE * goes_on[:, t] * advantage
            rollout["advantage"][:, t] = advantage
        rollout["value"] += rollout["advantage"]  # what the critic learns
        replay.add_(rollout)

    def learn() -> None:
        """Draw a minibatch and step both networks."""
        replay.sample_(batch)
        log_probabilities = actor(batch["observation"]).log_softmax(1)
        chosen = log_probabilities.gather(1, batch["action"].unsqueeze(1)).squeeze(1)
        ratio = (chosen - batch["log_probability"]).exp()
        advantage = batch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(1).mean()
        value_loss = (critic(batch["observation"]).squeeze(1) - batch["value"]).square().mean() / 2
        loss = VALUE_PART * value_loss - gain - ENTROPY_PART * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
        optimizer.step()
        last_loss.copy_(loss.detach())

    more = {"error": error, "goes_on": goes_on}
    with DeviceReplay(section(envs, args), args.device) as replay:
        batch = replay.new_batch()
        how = args.compile, args.cudagraphs
        act_, observe_, add_, learn_ = (Captured(each, *how) for each in (act, observe, add, learn))
        clock = Clock(args.device, (Captured.WARM_UP + 1) * args.rollout)
        for turn in clock.turns(args.steps):
            act_()
            envs.fetch()  # the only wait of the host in a turn
            envs.step()
            observe_()
            if (turn + 1) % args.rollout == 0:
                rate.fill_(LEARNING_RATE * (1 - turn / args.steps))
                add_()
                for _ in range(EPOCHS * MINIBATCHES):
                    learn_()
        replay.check()
        test = envs.evaluate(lambda seen: actor(seen).argmax(1))
        return result(args, envs, clock, test=test, loss=last_loss.item(), held=replay.num_steps)


if __name__ == "__main__":
    parser = arguments(__doc__, steps=16_000, envs=8)
    parser.add_argument("--rollout", type=int, default=STEPS, help="its steps (%(default)s)")
    run(parser, train)
