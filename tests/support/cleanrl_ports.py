"""Ports of CleanRL's DQN, SAC and TD3 to TransitionBuffer: which part of which lines changes.

CleanRL's code is not part of this repository. The ports are applied to a checkout of it:
`GEAR_CLEANRL=FOLDER pytest tests/examples/test_cleanrl_ports.py`.
"""

from __future__ import annotations

import difflib

from gear_support import ROOT

PROGRAMS = ("dqn", "sac_continuous_action", "td3_continuous_action")
MOST_LINES = 5
PAGE = ROOT / "docs" / "how-to" / "transition-buffer.md"

#: Text before and after, each in one line of a program. A line that ends with \n is added before the text.
PORT = (
    ("from cleanrl_utils.buffers import ReplayBuffer", "from deepspeed_gear import TransitionBuffer"),
    ("ReplayBuffer(", "TransitionBuffer("),
    ("handle_timeout_termination=False", 'autoreset="same_step"'),
    ("handle_timeout_termination=False", "batch_size=args.batch_size,\n"),
    ("terminations, infos)", "terminations, truncations)"),
)


def port(program: str) -> str:
    """Return CleanRL's program with TransitionBuffer in place of its ReplayBuffer.

    Raises:
        ValueError: A text is not in exactly one line, so the program is not as this port knows it.
    """
    lines = program.splitlines(keepends=True)
    found = list(lines)
    for before, after in reversed(PORT):  # the line that is added stands before the one that it names
        at = [number for number, line in enumerate(found) if before in line]
        if len(at) != 1:
            raise ValueError(f"{before!r} is in {len(at)} lines")
        line = found[at[0]]
        if after.endswith("\n"):
            indent = line[: len(line) - len(line.lstrip())]
            found.insert(at[0], indent + after)
        else:
            found[at[0]] = line.replace(before, after)
    return "".join(found)


def num_changed(before: str, after: str) -> int:
    """Return how many lines were changed, added or removed."""
    blocks = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    edits = [code for code in blocks.get_opcodes() if code[0] != "equal"]
    return sum(max(end - begin, new_end - new_begin) for _, begin, end, new_begin, new_end in edits)
