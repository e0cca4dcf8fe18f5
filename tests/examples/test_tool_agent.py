"""The agent with a calculator: its turns, what it generates, and a short form of the training."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import ROOT, prefix, shared_files
from process_support import environment
from warm_python import run_warm

from deepspeed_gear import trajectories_from_turns

pytest.importorskip("transformers", reason="the model is one of transformers")
EXAMPLES = ROOT / "examples"
QUESTION = "12+34+56?"


@pytest.fixture
def calculator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.manual_seed(1)
    return importlib.import_module("calculator")


@pytest.fixture
def tool_agent(calculator: ModuleType) -> ModuleType:
    return importlib.import_module("tool_agent")


def test_calls_are_one_trajectory_and_the_answer_another_one(
    calculator: ModuleType, tool_agent: ModuleType
) -> None:
    agent = tool_agent.Agent(QUESTION)
    for output in calculator.right_outputs(QUESTION):
        agent.step(calculator.ids(output), np.full(len(output), -1.0))
    assert (agent.context, agent.reward) == (None, 1.0)
    made = [
        (calculator.text_of(one["tokens"]), "".join(map(str, one["loss_mask"].astype(int))))
        for one in trajectories_from_turns(agent.turns)
    ]
    assert made == [
        ("12+34+56?12+34!046=046+56!", "00000000011111100001111111"),
        ("12+34+56?102=102.", "00000000000001111"),
    ]


@pytest.mark.parametrize(
    "outputs", [["12+34"], ["1+34!"], ["102."], ["12+34!", "046+56!", "103."], ["12+34!"] * 3]
)
def test_a_rollout_ends_without_a_reward(
    calculator: ModuleType, tool_agent: ModuleType, outputs: list[str]
) -> None:
    agent = tool_agent.Agent(QUESTION)
    for output in outputs:
        agent.step(calculator.ids(output), np.zeros(len(output)))
    assert agent.context is None
    assert agent.reward == float(outputs == ["102."])


def test_log_probabilities_are_those_of_each_prompt_alone(calculator: ModuleType) -> None:
    """Prompts of other lengths in the same batch have no effect."""
    model = calculator.policy()
    prompts = [calculator.ids(text) for text in (QUESTION, QUESTION + "102=", "1", "12+34")] * 3
    for prompt, (output, logp) in zip(prompts, calculator.generate(model, prompts), strict=True):
        assert 0 < len(output) == len(logp) <= calculator.MOST_OUTPUT
        assert not any(mark in calculator.text_of(output[:-1]) for mark in "!.")
        tokens = torch.tensor([[*prompt, *output]])
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        wanted = torch.log_softmax(logits, 1).gather(1, torch.from_numpy(output)[:, None])[:, 0]
        assert logp == pytest.approx(wanted.numpy(), abs=1e-5)


def short_form(folder: Path, *options: str, **group: Any) -> dict[str, Any]:
    config = json.loads((ROOT / "configs" / "tool_agent.json").read_text())
    config["gear"]["shared_memory"] = {"prefix": prefix()}
    table = config["gear"]["tables"]["rollouts"]
    table["group"].update(group)
    table["prompts"]["data"] = str(folder / "questions")
    path = folder / "tool_agent.json"
    path.write_text(json.dumps(config))
    command = [str(EXAMPLES / "tool_agent.py"), "--config", str(path), *options]
    done = run_warm(*command, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert shared_files(prefix()) == []
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_groups_of_rollouts_are_trained(tmp_path: Path) -> None:
    """Without a warm start no rollout is right, so groups of equal rewards are taken, too."""
    result = short_form(tmp_path, "--iterations", "1", "--warm-accuracy", "0", where={})
    assert result["right_before"] == 0
    assert 8 * 32 <= result["trajectories"] <= result["turns"]


@pytest.mark.skipif(os.environ.get("GEAR_LONG_TESTS") != "1", reason="long: GEAR_LONG_TESTS=1")
def test_the_agent_learns(tmp_path: Path) -> None:
    result = short_form(tmp_path, "--seed", "1")
    assert result["right_after"] > 0.7 > 0.5 > result["right_before"]
    assert result["turns"] > 1.2 * result["trajectories"]
