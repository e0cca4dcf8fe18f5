"""The multi-agent transformer: what it computes; short runs of it and of IQL."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from gear_support import ROOT, prefix, shared_files
from page_scenes import write_hopper
from process_support import run_ranks

from deepspeed_gear import Dataset
from deepspeed_gear.data.ingest import ingest

pytest.importorskip("mujoco", reason="the examples evaluate in MuJoCo")
pytest.importorskip("gymnasium", reason="likewise")
Load = Callable[[str], ModuleType]
STATES = "mp_rank_00_model_states.pt"  # of a checkpoint


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(ROOT / "examples")
    torch.manual_seed(0)
    return importlib.import_module


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "hopper"
    write_hopper(str(path))
    return path


@pytest.mark.parametrize("name", ["mat", "iql"])
def test_a_short_run(name: str, hopper: Path, tmp_path: Path, load: Load) -> None:
    """It saves and draws; test_hopper_output.py resumes such a run. The transformer has three
    agents.
    """
    data = tmp_path / "data"
    if name == "mat":
        load("mamujoco").divide(str(hopper), str(data))
    else:
        ingest([ROOT / "examples" / "data" / "hopper_medium.hdf5"], data)
    config = json.loads((ROOT / "configs" / f"{name}.json").read_text())
    config |= {
        "train_batch_size": 16,
        "gear": {**config["gear"], "shared_memory": {"prefix": prefix()}},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = [
        "--config",
        str(tmp_path / "config.json"),
        "--data",
        str(data),
        "--out",
        str(tmp_path),
    ]
    options += ["--steps", "4", "--evaluate-every", "2", "--seed", "3"]
    output = run_ranks(ROOT / "examples" / f"{name}.py", 1, *options)[0]
    assert shared_files(prefix()) == []
    result = json.loads((tmp_path / "result.json").read_text())
    saves = tmp_path / "checkpoint"
    assert json.loads(output.splitlines()[-1]).items() <= result.items()
    assert result.get("agents") == (3 if name == "mat" else None)
    assert all(
        (saves / tag / "gear/normalizer.json").is_file() for tag in ("global_step2", "global_step4")
    )
    best = torch.load(saves / "best" / STATES, weights_only=False)
    assert best["global_steps"] == result["best_step"]
    if (
        name == "iql"
    ):  # the targets follow the critics by a part; the schedule begins after two steps
        files = (saves / f"global_step{step}" / STATES for step in (2, 4))
        before, after = (torch.load(file, weights_only=False)["module"] for file in files)
        critic = "critics.0.0.weight"
        target = "targets.0.0.weight"
        assert torch.equal(before[target], before[critic])
        moved = (after[target] - before[target]).abs().max()
        assert 0 < moved < 0.1 * (after[critic] - before[critic]).abs().max()
    returns = dict(result["curves"]["return"])
    assert list(returns) == [0, 2, 4]
    assert result["return_best"] == round(max(returns[2], returns[4]), 1)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_data_of_three_agents_are_those_of_one(hopper: Path, tmp_path: Path, load: Load) -> None:
    mamujoco = load("mamujoco")
    one = Dataset.open(hopper)
    three = mamujoco.divide(str(hopper), str(tmp_path / "three"))
    assert len(three) == len(one) == 40
    for number in (0, 39):
        whole = one.trajectory(number)
        divided = three.trajectory(number)
        assert np.array_equal(divided["action"].squeeze(2), whole["action"])
        for name in ("reward", "terminated", "truncated"):
            assert np.array_equal(divided[name], whole[name])
        local = divided["observation"]
        assert local.shape == (6 + number, 3, 9)
        seen = whole["observation"]
        for agent, (joint, beside) in enumerate([(2, [3]), (3, [4, 2]), (4, [3])]):
            torso = seen[:, [0, 1, 5, 6, 7]]
            expected = np.hstack([seen[:, [joint, joint + 6, *beside]], torso])
            width = expected.shape[1]
            assert np.array_equal(local[:, agent, :width], expected)
            assert (local[:, agent, width:] == 0).all()


def test_agents_observe_what_mamujoco_shows_them(load: Load) -> None:
    reason = "gymnasium-robotics has the environments"
    robotics = pytest.importorskip("gymnasium_robotics", reason=reason)
    world = robotics.mamujoco_v1.parallel_env("Hopper", "3x1")
    mamujoco = load("mamujoco")
    seen, _ = world.reset(seed=0)
    for _ in range(5):
        local = mamujoco.local_observations(world.state())
        for agent, values in enumerate(seen.values()):
            assert np.array_equal(local[agent, : len(values)], values)
        actions = {name: world.action_space(name).sample() for name in world.agents}
        joined = np.concatenate(list(actions.values()))
        assert np.array_equal(world.map_local_actions_to_global_action(actions), joined)
        seen, *_ = world.step(actions)


def test_an_action_depends_on_those_of_the_agents_before(load: Load) -> None:
    model = load("mat").MAT(agents=3, observation_size=9, action_size=2)
    observation = torch.randn(5, 3, 9)
    action = torch.rand(5, 3, 2) - 0.5
    encoded = model.encode(observation)
    means = model.decode(encoded, action)
    for changed in range(3):
        other = action.clone()
        other[:, changed] += 0.3
        differs = (model.decode(encoded, other) != means).any(-1).all(0)
        assert differs.tolist() == [agent > changed for agent in range(3)]
    seen = observation.clone()
    seen[:, 2] += 1
    assert (model.decode(model.encode(seen), action) != means).any(-1).all(), (
        "all agents' observations"
    )
    normal = torch.distributions.Normal(means, model.log_std.exp())
    expected = normal.log_prob(action).sum((1, 2))
    assert torch.allclose(model(observation, action), expected, rtol=1e-5)
    acted = model.act(observation).view(5, 3, 2)
    assert torch.allclose(model.decode(encoded, acted), acted, atol=1e-6), (
        "one pass with these finds them"
    )
