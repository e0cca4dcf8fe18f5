"""Train an agent that calls a calculator, with GRPO: its turns become members of a group.

    python examples/tool_agent.py --seed 0

A question is "12+34+56?". The agent calls the calculator with "12+34!", gets "046=", calls it with
"046+56!" and gets "102=". Each of these turns continues the one before, so they are one trajectory
whose loss mask has two pieces. Then the context is edited: the last prompt is "12+34+56?102=",
without the calls. It begins another trajectory, and the agent answers "102.". A rollout has one or
two trajectories, which all get its reward: 1 for the right answer, else 0. An output that is no
call ends it. The last line is the result as JSON.

Source: Shao et al., "DeepSeekMath", 2024 (GRPO).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import calculator
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import quiet_start
from torch import Tensor, nn

import deepspeed_gear
from deepspeed_gear import MicroBatch, RolloutWorker, Turn, trajectories_from_turns

MEMBERS = 8  # rollouts of each question
MOST_TURNS = 3


class Agent:
    """One rollout: its turns, and the context of the next one; None at its end."""

    def __init__(self, question: str) -> None:
        self.question = question
        self.context: list[int] | None = calculator.ids(question)
        self.turns: list[Turn] = []
        self.reward = 0.0

    def step(self, output: Any, logp: Any) -> None:
        """Add a turn, with the ids as they were generated, and run the tool that it calls."""
        self.turns.append(Turn(self.context, output, logp))
        result = calculator.calculate(calculator.text_of(output))
        if result is None or len(self.turns) == MOST_TURNS:
            self.reward = float(calculator.text_of(output) == calculator.answer(self.question))
            self.context = None
        elif len(self.turns) == 1:
            self.context = [*self.context, *output, *calculator.ids(result)]
        else:
            self.context = calculator.ids(self.question + result)  # an edited context


def run(model: nn.Module, questions: list[str]) -> list[Agent]:
    """Run a rollout of each question to its end."""
    agents = [Agent(question) for question in questions]
    while going := [agent for agent in agents if agent.context is not None]:
        outputs = calculator.generate(model, [agent.context for agent in going])
        for agent, (output, logp) in zip(going, outputs, strict=True):
            agent.step(output, logp)
    return agents


def accuracy(model: nn.Module, words: random.Random) -> float:
    agents = run(model, [calculator.draw_question(words) for _ in range(300)])
    return float(np.mean([agent.reward for agent in agents]))


def warm_start(model: nn.Module, words: random.Random, wanted: float) -> None:
    """Learn from right rollouts until a part of the sampled ones is right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    while accuracy(model, words) < wanted:
        for _ in range(20):
            agents = [Agent(calculator.draw_question(words)) for _ in range(64)]
            for agent in agents:
                for output in calculator.right_outputs(agent.question):
                    agent.step(calculator.ids(output), np.zeros(len(output)))
            rows = [row for agent in agents for row in trajectories_from_turns(agent.turns)]
            calculator.imitate(model, optimizer, rows)


def work(worker: RolloutWorker, model: nn.Module) -> np.ndarray:
    """Lease questions, and commit a group for each; count turns and trajectories. [2]."""
    leases = worker.lease(32, timeout_s=0)
    questions = [calculator.text_of(lease.prompt["tokens"]) for lease in leases]
    agents = run(model, [one for one in questions for _ in range(MEMBERS)])
    members = [trajectories_from_turns(agent.turns, {"reward": agent.reward}) for agent in agents]
    for number, lease in enumerate(leases):
        lease.commit(members[number * MEMBERS :][:MEMBERS])  # all trajectories, or none
    return np.array([sum(len(agent.turns) for agent in agents), sum(map(len, members))])


def loss_of(engine: Any, micro: MicroBatch) -> Tensor:
    logits = engine(**micro.model_inputs(engine)).logits[0].float()
    logp = -F.cross_entropy(logits, micro.targets[0], reduction="none")[None]
    ratio = torch.exp(logp - micro["logp"])
    advantage = micro["advantage"]
    return micro.sum(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/tool_agent.json", help="a ds_config")
    parser.add_argument("--seed", type=int, default=0, help="of weights, questions and samples")
    parser.add_argument("--iterations", type=int, default=25, help="rollout batches")
    parser.add_argument("--warm-accuracy", type=float, default=0.2, help="where RL begins")
    args = parser.parse_args()
    config = json.loads(Path(args.config).read_text())
    config["gear"]["seed"] = args.seed
    torch.manual_seed(args.seed)
    words = random.Random(args.seed)
    path = config["gear"]["tables"]["rollouts"]["prompts"]["data"]
    calculator.write_questions(path, words, 5000)
    model = calculator.policy()
    warm_start(model, words, args.warm_accuracy)
    with quiet_start():
        engine, *_ = deepspeed_gear.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
    before = accuracy(engine.module, words)
    worker = engine.gear.rollout_worker()  # elsewhere: RolloutWorker.attach(config)
    counts = np.zeros(2, np.int64)
    for iteration in range(1, args.iterations + 1):
        while not engine.gear.can_sample():
            counts += work(worker, engine.module)
        rollout = engine.gear_rollout()
        rollout.advantages("grpo")
        for step in rollout:
            for micro in step:
                engine.backward(loss_of(engine, micro))
            engine.step()
        if iteration % 5 == 0:
            print(f"batch {iteration}: {accuracy(engine.module, words):.0%} right", file=sys.stderr)
    result = {"right_before": before, "right_after": accuracy(engine.module, words)}
    turns, trajectories = counts.tolist()
    print(json.dumps({**result, "turns": turns, "trajectories": trajectories}), flush=True)
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
