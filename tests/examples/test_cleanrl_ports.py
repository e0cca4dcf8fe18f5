"""DQN, SAC and TD3 with TransitionBuffer: this project's programs, and those of a checkout of
CleanRL.

CleanRL's code is not part of this repository. Its ports are applied to a checkout of it:
`GEAR_CLEANRL=FOLDER pytest tests/examples/test_cleanrl_ports.py`.
"""

import difflib
import importlib.util
import json
import math
import os
import re
from pathlib import Path

import pytest
from gear_support import ROOT
from process_support import environment
from warm_python import run_warm

pytest.importorskip("gymnasium", reason="the programs act in its environments")
FOLDER = os.environ.get("GEAR_CLEANRL")
STEPS = 400
PROGRAMS = ("dqn", "sac_continuous_action", "td3_continuous_action")
MOST_LINES = 5
PAGE = ROOT / "docs" / "how-to" / "transition-buffer.md"

#: Text before and after, each in one place of a program.
PORT = (
    (
        "from cleanrl_utils.buffers import ReplayBuffer",
        "from deepspeed_gear import TransitionBuffer",
    ),
    ("ReplayBuffer(", "TransitionBuffer("),
    (
        "handle_timeout_termination=False",
        'batch_size=args.batch_size,\n        autoreset="same_step"',
    ),
    ("terminations, infos)", "terminations, truncations)"),
)


def port(program: str) -> str:
    """Return CleanRL's program with TransitionBuffer in place of its ReplayBuffer."""
    for before, after in PORT:
        assert program.count(before) == 1, before
        program = program.replace(before, after)
    return program


def num_changed(before: str, after: str) -> int:
    """Return how many lines were changed, added or removed."""
    blocks = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    edits = [code for code in blocks.get_opcodes() if code[0] != "equal"]
    return sum(max(end - begin, new_end - new_begin) for _, begin, end, new_begin, new_end in edits)


def run(program: Path, *options: str, cwd: Path) -> str:
    """Run a program; return what it printed."""
    done = run_warm(str(program), *options, env=environment(), cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", ["dqn", "sac", "td3"])
def test_the_projects_own_programs_run(program: str, tmp_path: Path) -> None:
    options = ["--steps", str(STEPS), "--random-steps", str(STEPS - 50)]
    result = json.loads(
        run(ROOT / "examples" / f"{program}.py", *options, cwd=tmp_path).splitlines()[-1]
    )
    results = [result["plain"], result["gear"]] if program == "td3" else [result]
    assert all(math.isfinite(one["return"]) for one in results)


@pytest.mark.skipif(
    importlib.util.find_spec("tyro") is None, reason="CleanRL needs tyro: pip install tyro"
)
@pytest.mark.skipif(not FOLDER, reason="GEAR_CLEANRL names no checkout of CleanRL")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_port_of_cleanrl_changes_at_most_5_lines_and_runs(program: str, tmp_path: Path) -> None:
    before = (Path(str(FOLDER)) / "cleanrl" / f"{program}.py").read_text()
    after = port(before)
    assert num_changed(before, after) <= MOST_LINES
    ported = tmp_path / f"{program}.py"
    ported.write_text(after)
    options = ["--total-timesteps", str(STEPS), "--learning-starts", "150", "--buffer-size", "2000"]
    options += ["--batch-size", "32"] + ([] if program == "dqn" else ["--env-id", "Pendulum-v1"])
    printed = run(
        ROOT / "tests/examples/programs/run_cleanrl.py", str(ported), *options, cwd=tmp_path
    )
    assert "SPS:" in printed, "it has learnt"


# In the form of CleanRL's programs, with a buffer of its own.
RING = """
from cleanrl_utils.buffers import ReplayBuffer

def main(args, envs, device):
    rb = ReplayBuffer(
        args.buffer_size,
        device,
        handle_timeout_termination=False,
    )
    rb.add(obs, real_next_obs, actions, rewards, terminations, infos)
"""


def test_a_port_changes_what_the_page_says() -> None:
    after = port(RING)
    assert num_changed(RING, after) == MOST_LINES
    assert 'device,\n        batch_size=args.batch_size,\n        autoreset="same_step",\n' in after
    _, section = PAGE.read_text().split("## From CleanRL or Stable-Baselines3\n")
    rows = re.findall(r"^\|(.*)\| `(.*)` \|$", section.split("\n## ")[0], re.M)
    lines = [line.strip(" ,") for _, new in PORT[:-1] for line in new.splitlines()]
    assert sorted(new for _, new in rows if "rb.add" not in new) == sorted(lines)
    assert [new for _, new in rows if "rb.add" in new] == ["rb.add(..., terminations, truncations)"]
