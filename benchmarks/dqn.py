"""How long a DQN trains on CartPole with a TransitionBuffer, beside one with a NumPy ring.

    python benchmarks/dqn.py [--seeds 0 1 2] [--steps 12000] [--json F] [--quick]

Both trainings of a seed run in this process, one thread, in turns of 500 steps of the environment,
so that other work on the machine disturbs both. The program is the same but for its buffer: it adds
what gymnasium returns, and trains on 128 transitions every fourth step. A row is a training: its
seconds, the microseconds of a mean add and sample, and the return of its last ten episodes, which
shows that both learn. The ratio is the median over pairs of neighbouring turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np
import torch
from support.report import Report, Row, print_rows, say
from support.plain_ring import PlainRing
from torch import nn

from deepspeed_gear import TransitionBuffer

CAPACITY = 10_000
BATCH = 128
TURN_STEPS = 500
LEARNING_STARTS = 1_000
TRAIN_EVERY = 4
TARGET_EVERY = 500
EXPLORATION_STEPS = 4_000
DISCOUNT = 0.99


def network() -> nn.Module:
    """Return the value network: 4 numbers to the values of 2 actions."""
    layers = (nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 2))
    return nn.Sequential(*layers)


class Training:
    """A DQN that learns CartPole-v1, some steps at a time.

    Args:
        is_ours: Whether the buffer is a TransitionBuffer; else it is a ring of NumPy arrays.
        seed: Of the network, the environment, the exploration and the draws.
    """

    def __init__(self, is_ours: bool, seed: int) -> None:
        torch.manual_seed(seed)
        self._random = np.random.default_rng(seed)
        self._env = gymnasium.make("CartPole-v1")
        self._values = network()
        self._target = network()
        self._target.load_state_dict(self._values.state_dict())
        self._optimizer = torch.optim.Adam(self._values.parameters(), 1e-3)
        self._buffer: Any = PlainRing(CAPACITY, 4, BATCH, seed)
        if is_ours:
            spaces = self._env.observation_space, self._env.action_space
            self._buffer = TransitionBuffer(
                CAPACITY, *spaces, n_envs=self._env, batch_size=BATCH, seed=seed
            )
        self._obs, _ = self._env.reset(seed=seed)
        self._step = 0
        self._samples = 0
        self._episode_return = 0.0
        self._add_s = 0.0
        self._sample_s = 0.0
        self.turns_s: list[float] = []  # of each call of `run`
        self.returns: list[float] = []  # of each episode that has ended

    def run(self, steps: int) -> None:
        """Take steps in the environment, and train between them."""
        begun = perf_counter()
        for _ in range(steps):
            self._act()
            if self._step > LEARNING_STARTS and self._step % TRAIN_EVERY == 0:
                self._learn()
            if self._step % TARGET_EVERY == 0:
                self._target.load_state_dict(self._values.state_dict())
            self._step += 1
        self.turns_s.append(perf_counter() - begun)

    def _act(self) -> None:
        explored = max(0.05, 1 - self._step / EXPLORATION_STEPS)
        if self._random.random() < explored:
            action = int(self._random.integers(2))
        else:
            action = int(self._values(torch.from_numpy(self._obs)).argmax())
        next_obs, reward, terminated, truncated, _ = self._env.step(action)
        begun = perf_counter()
        self._buffer.add(self._obs, next_obs, action, reward, terminated, truncated)
        self._add_s += perf_counter() - begun
        self._episode_return += float(reward)
        self._obs = next_obs
        if terminated or truncated:
            self._obs, _ = self._env.reset()
            self.returns.append(self._episode_return)
            self._episode_return = 0.0

    def _learn(self) -> None:
        begun = perf_counter()
        batch = self._buffer.sample()
        actions = batch.actions.long()
        dones = batch.dones.float()
        self._sample_s += perf_counter() - begun
        self._samples += 1
        with torch.no_grad():
            following = self._target(batch.next_observations).max(1, keepdim=True)[0]
            target = batch.rewards + DISCOUNT * following * (1 - dones)
        loss = (target - self._values(batch.observations).gather(1, actions)).square().mean()
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def row(self) -> Row:
        """Return what was measured."""
        return {
            "seconds": sum(self.turns_s),
            "add_us": self._add_s / max(1, self._step) * 1e6,
            "sample_us": self._sample_s / max(1, self._samples) * 1e6,
            "last_return": float(np.mean(self.returns[-10:])) if self.returns else None,
        }

    def close(self) -> None:
        """Release the buffer and the environment."""
        self._buffer.close()
        self._env.close()


def trainings(seed: int, steps: int) -> Iterator[Row]:
    """Train with both buffers in turns; yield a row of each."""
    both = {"numpy ring": Training(False, seed), "gear, TransitionBuffer": Training(True, seed)}
    for turn in range(steps // TURN_STEPS):
        # Each is the first in turns.
        for training in both.values() if turn % 2 else reversed(both.values()):
            training.run(TURN_STEPS)
    ring_s = np.array(both["numpy ring"].turns_s)
    for name, training in both.items():
        ratio = float(np.median(np.array(training.turns_s) / ring_s))
        yield {"seed": seed, "system": name, **training.row(), "x_ring": ratio}
        training.close()


def main() -> None:
    """Run from the command line."""
    report = Report(
        __doc__,
        seeds=((0, 1, 2), "a training of each buffer for each"),
        steps=(12_000, "of the environment, in each training"),
    )
    torch.set_num_threads(1)
    seeds = report.options.seeds[:1] if report.options.quick else report.options.seeds
    steps = 2 * TURN_STEPS + LEARNING_STARTS if report.options.quick else report.options.steps
    rows = []
    for seed in seeds:
        rows += trainings(seed, steps)
        say(f"seed {seed}")
    print_rows(rows)
    report.write(rows)


if __name__ == "__main__":
    main()
