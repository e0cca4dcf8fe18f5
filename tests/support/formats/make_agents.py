"""Record mini_agents.npz: an environment of PettingZoo with three agents and random actions.

    pip install 'pettingzoo[mpe]==1.24.3'
    python tests/support/formats/make_agents.py

The environment is simple_tag: two adversaries observe 12 values each, the agent that they chase
observes 10. Every value is as `step` of the parallel form has returned it.
"""

from collections import defaultdict
from pathlib import Path

import numpy as np
from pettingzoo.mpe import simple_tag_v3

KINDS = ("observations", "rewards", "terminations", "truncations")


def main() -> None:
    """Record two episodes of 12 steps."""
    env = simple_tag_v3.parallel_env(num_good=1, num_adversaries=2, num_obstacles=1, max_cycles=12)
    rows: defaultdict[str, list[object]] = defaultdict(list)
    for episode in range(2):
        observations, _ = env.reset(seed=episode)
        for number, agent in enumerate(env.possible_agents):
            env.action_space(agent).seed(10 * episode + number)
        while env.agents:
            agents = list(env.agents)
            actions = {agent: env.action_space(agent).sample() for agent in agents}
            following, rewards, terminations, truncations, _ = env.step(actions)
            parts = observations, rewards, terminations, truncations
            for agent in agents:
                for kind, values in zip(KINDS, parts, strict=True):
                    rows[f"{kind}/{agent}"].append(values[agent])
                rows[f"actions/{agent}"].append(actions[agent])
                rows[f"next_observations/{agent}"].append(following[agent])
            observations = following
    path = Path(__file__).with_name("mini_agents.npz")
    np.savez_compressed(path, **{key: np.array(values) for key, values in rows.items()})


if __name__ == "__main__":
    main()
