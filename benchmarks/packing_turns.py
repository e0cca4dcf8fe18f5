"""Places that shared prefixes save on the turns of agents whose reasoning is removed from their
context: `"prefix": "share"` of `gear.pack`.

    python benchmarks/packing_turns.py --json benchmarks/results/packing_turns.json

A group of 8 rollouts of one prompt of 600 tokens. In each turn an agent writes 400 tokens of
reasoning and an answer of 80, and gets a tool result of 250; the next prompt has all of these but
the reasoning. So each turn begins a trajectory. Nothing is trained: places are counted, without
padding, and they are the same in every run. `own` and `share` are those without and with sharing,
`prompt_once` those with the prompt of the group as the only shared prefix, and `ideal` has each
token once for each different context. `pairs` are the pairs of places that causal attention has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from support.report import Report, Row, print_rows

from deepspeed_gear import Replay, Turn, trajectories_from_turns

MEMBERS = 8
PROMPT = 600
REASONING = 400
ANSWER = 80
RESULT = 250
WORDS = 50_000
TURNS = (5, 10, 20, 40)
TOKENS = 1 << 16


def rollout(prompt: list[int], num_turns: int, words: np.random.Generator) -> list[Turn]:
    """Return the turns of one rollout."""

    def ids(count: int) -> list[int]:
        return [*map(int, words.integers(0, WORDS, count))]

    turns = []
    context = prompt
    for _ in range(num_turns):
        answer = ids(ANSWER)
        turns.append(Turn(context, ids(REASONING) + answer))
        context = context + answer + ids(RESULT)
    return turns


def section(prefix: str, num_turns: int, tokens: int) -> dict[str, Any]:
    """Return a gear section whose batch is one group."""
    columns = {
        "tokens": {"dtype": "int32", "role": "token"},
        "loss_mask": {"dtype": "bool", "role": "loss_mask"},
        "prompt": {"dtype": "int64", "rows": "1"},
    }
    most = PROMPT + num_turns * (ANSWER + RESULT) + REASONING
    count = MEMBERS * num_turns
    table = {
        "capacity_steps": count * most,
        "max_length": most,
        "schema": {"columns": columns},
        "group": {"column": "prompt", "size": count},
    }
    return {
        "tables": {"main": table},
        "sampler": {"kind": "epoch", "unit": "group"},
        "pack": {"tokens": tokens, "pad": {"multiple": 128}, "prefix": prefix},
        "batch": {"groups": 1},
    }


def count_places(num_turns: int) -> Row:
    """Return the places of a group's packs, without and with shared prefixes."""
    words = np.random.default_rng(num_turns)
    prompt = [*map(int, words.integers(0, WORDS, PROMPT))]
    rows = [
        row
        for _ in range(MEMBERS)
        for row in trajectories_from_turns(rollout(prompt, num_turns, words), {"prompt": 0})
    ]
    found: Row = {"what": "turns", "turns": num_turns, "trajectories": len(rows)}
    tokens = sum(len(row["tokens"]) for row in rows)
    found["prompt_once"] = tokens - (len(rows) - 1) * (PROMPT - 1)
    found["ideal"] = PROMPT + len(rows) * (REASONING + 2 * ANSWER + RESULT)
    found["ideal"] -= MEMBERS * (ANSWER + RESULT)  # of the last turn, which no prompt repeats
    for prefix in ("own", "share"):
        with Replay(section(prefix, num_turns, TOKENS)) as replay:
            for row in rows:
                replay.add(row)
            step = replay.step()
            places = 0
            pairs = 0
            for micro in step:
                places += micro.num_tokens
                pairs += int((micro.position_ids[0, : micro.num_tokens] + 1).sum())
            found |= {prefix: places, f"{prefix}_pairs": pairs, f"{prefix}_packs": len(step)}
    return found


def main() -> None:
    """Run from the command line."""
    report = Report(__doc__)
    rows = [count_places(turns) for turns in (TURNS[:1] if report.options.quick else TURNS)]
    for row in rows:
        row["saved"] = 1 - row["share"] / row["own"]
    print_rows(rows, "turns trajectories own prompt_once share ideal saved own_packs share_packs")
    report.write(rows)


if __name__ == "__main__":
    main()
