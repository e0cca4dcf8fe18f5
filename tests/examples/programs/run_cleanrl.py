"""Run a program of CleanRL with a gymnasium newer than its own 0.29: run_cleanrl.py PROGRAM
OPTION...

Vector environments reset within the last step of an episode, and give its last observation as
`final_observation`, as those of 0.29 do.
"""

import runpy
import sys
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode


class AsOf029(gymnasium.vector.SyncVectorEnv):
    """Vector environments whose infos have the form of gymnasium 0.29."""

    def __init__(self, functions: Any) -> None:
        super().__init__(functions, autoreset_mode=AutoresetMode.SAME_STEP)

    def step(self, actions: Any) -> Any:
        *step, infos = super().step(actions)
        infos.pop("final_info", None)  # only printed
        if "final_obs" in infos:
            infos["final_observation"] = infos["final_obs"]
        return *step, infos


gymnasium.vector.SyncVectorEnv = AsOf029
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
