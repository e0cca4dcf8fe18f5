"""Short forms of the examples, as a user starts them; but for those of Hopper and CleanRL."""

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gear_support import ROOT, prefix, shared_files, wait_until
from hopper_batches import hopper_data
from process_support import environment, run_ranks
from warm_python import PIPE, WarmProcess, run_warm

from deepspeed_gear import Dataset

pytest.importorskip("gymnasium", reason="the examples act in its environments")
EXAMPLES = ROOT / "examples"
CONFIGS = ROOT / "configs"
LONG = pytest.mark.skipif(
    os.environ.get("GEAR_LONG_TESTS") != "1", reason="long: GEAR_LONG_TESTS=1"
)


def own(config: str, folder: Path, change: Callable[[dict[str, Any]], object] = dict) -> str:
    """Copy a config with a change, so that its stores have this test's prefix; return
    where it is.
    """
    made = json.loads((CONFIGS / config).read_text())
    made["gear"]["shared_memory"] = {"prefix": prefix()}
    change(made)
    path = folder / config
    path.write_text(json.dumps(made))
    return str(path)


def result_of(program: str, ranks: int, *arguments: str) -> dict[str, Any]:
    """Run an example's ranks; the last line of the first one is the result."""
    output = run_ranks(EXAMPLES / program, ranks, *arguments)[0]
    assert shared_files(prefix()) == []
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "cartpole"
    done = run_warm(str(EXAMPLES / "cartpole_data.py"), str(path), env=environment())
    assert done.returncode == 0, done.stderr
    return path


def test_the_time_limit_is_no_failure(cartpole: Path) -> None:
    dataset = Dataset.open(cartpole)
    last = dataset.first_rows + dataset.lengths - 1
    assert len(dataset.lengths) == 57
    assert dataset.lengths.sum() == 26_964
    assert (dataset.columns["terminated"][last] == (dataset.lengths < 500)).all()
    assert (dataset.columns["truncated"][last] == (dataset.lengths == 500)).all()
    assert dataset.columns["terminated"].sum() == 42
    assert dataset.columns["truncated"].sum() == 15


def test_priorities_concentrate_on_two_ranks(cartpole: Path, tmp_path: Path) -> None:
    config = str(CONFIGS / "cartpole_dqn.json")
    steps = 100
    options = [
        "--config",
        config,
        "--data",
        str(cartpole),
        "--steps",
        str(steps),
        "--out",
        str(tmp_path),
    ]
    result = result_of("cartpole_dqn.py", 2, *options)
    assert (result["ranks"], result["steps"]) == (2, steps)
    # Uniform would be a share of 0.1 for the top tenth, and an effective sample size of all steps.
    assert result["top_tenth"] > 0.2
    assert result["effective"] < 0.85
    curves = json.loads((tmp_path / "result.json").read_text())["curves"]
    assert curves["top_tenth"][0][1] == pytest.approx(0.1, abs=1e-3)
    assert curves["loss"][-1][1] < curves["loss"][0][1]
    assert (tmp_path / "curves.png").stat().st_size > 0


def test_ddp_workers_with_one_prioritized_buffer() -> None:
    result = result_of("ddp_prioritized.py", 4, "--steps", "24")
    workers = 4
    assert (result["workers"], result["added"], result["trajectories"]) == (workers, 6, 6 * workers)
    assert result["return"] >= 1
    promises = Path(__file__).parent / "programs" / "ddp_example.py"
    run_ranks(promises, workers, str(EXAMPLES / "ddp_prioritized.py"), "24")


PARALLEL = {
    "tensor": (2, 1),
    "pipeline": (2, 1),
    "sequence": (2, 1),
    "expert": (2, 2),
}  # ranks, replicas


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hopper_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("mode", PARALLEL)
def test_an_example_of_a_parallelism_learns(mode: str, hopper: Path, tmp_path: Path) -> None:
    (ranks, replicas) = PARALLEL[mode]
    steps = 12
    # A few steps see no warm-up.
    config = own(
        f"{mode}_parallel.json",
        tmp_path,
        lambda c: c["scheduler"]["params"].update(warmup_num_steps=2),
    )
    options = ["--config", config, "--data", str(hopper), "--steps", str(steps)]
    output = "".join(run_ranks(EXAMPLES / f"{mode}_parallel.py", ranks, *options))
    (line,) = [line for line in output.splitlines() if line.startswith('{"loss_before"')]
    result = json.loads(line)
    assert set(result) >= {"loss_before", "loss_after", "ranks", "seconds", "steps", "replicas"}
    assert (result["ranks"], result["replicas"], result["steps"]) == (ranks, replicas, steps)
    assert result["loss_after"] < 0.8 * result["loss_before"]
    assert shared_files(prefix()) == []
    assert len((EXAMPLES / f"{mode}_parallel.py").read_text().splitlines()) <= 150


def test_grpo_trains_whole_groups_on_two_ranks(tmp_path: Path) -> None:
    # So few right answers as here make few groups that teach.
    config = own("grpo.json", tmp_path, lambda c: c["gear"]["rollout"].update(groups=16))
    options = ["--iterations", "2", "--evaluate-every", "2", "--out", str(tmp_path), "--seed", "3"]
    found = result_of("grpo.py", 2, *options, "--config", config, "--warm-accuracy", "0.005")
    assert (found["ranks"], found["iterations"], found["seed"]) == (2, 2, 3)
    assert found["fill"] > 0.9
    assert len(json.loads((tmp_path / "result.json").read_text())["curve"]) == 2


def test_a_curriculum_trains_in_both_orders(tmp_path: Path) -> None:
    def change(made: dict[str, Any]) -> None:
        made["gear"]["tables"]["rollouts"]["prompts"]["data"] = str(tmp_path / "prompts")

    config = own("curriculum.json", tmp_path, change)
    options = ("--config", config, "--batches", "2", "--pool", "300", "--warm-accuracy", "0.1")
    found = result_of("curriculum.py", 1, *options)
    for sampler in ("epoch", "prioritized"):
        assert 0 <= found[sampler]["accuracy"] <= 1
        assert 0 < found[sampler]["mixed"] <= 1


def test_demonstrations_and_groups_in_one_batch(tmp_path: Path) -> None:
    def change(made: dict[str, Any]) -> None:
        made["gear"]["tables"]["demonstrations"]["data"] = str(tmp_path / "demonstrations")

    config = own("sft_and_grpo.json", tmp_path, change)
    options = ("--config", config, "--batches", "3", "--demonstrations", "60")
    found = result_of("sft_and_grpo.py", 1, *options)
    assert set(found) == {"before", "demonstrations", "grpo", "both"}
    assert all(0 <= accuracy <= 1 for accuracy in found.values())
    assert len((EXAMPLES / "sft_and_grpo.py").read_text().splitlines()) <= 150


def test_grpo_with_pictures() -> None:
    found = result_of("vision_grpo.py", 1, "--iterations", "2")
    assert set(found) == {"reward_first", "reward_last", "accuracy", "iterations"}
    assert 0 <= found["accuracy"] <= 1
    assert len((EXAMPLES / "vision_grpo.py").read_text().splitlines()) <= 150


def test_packed_and_padded_episodes_train_the_same_model() -> None:
    found = result_of("packed_sequences.py", 1, "--steps", "3")
    assert found["packed"]["losses"] == pytest.approx(found["padded"]["losses"], rel=1e-5)
    assert found["packed"]["losses"][-1] < found["packed"]["losses"][0]
    assert found["padded"]["fill"] < 0.5 < 0.9 < found["packed"]["fill"]


@pytest.mark.parametrize("name", ["distillation", "router_replay"])
def test_an_example_of_a_job_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 150


def result_of_warm(program: str, *arguments: str) -> dict[str, Any]:
    """Run an example of one process; its last line is the result."""
    done = run_warm(str(EXAMPLES / program), *arguments, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_distillation_of_two_teachers() -> None:
    result = result_of_warm("distillation.py", "--steps", "8")
    first = result["first"]
    last = result["last"]
    assert last["loss"] < 0.6 * first["loss"]
    assert last["whole"] < 0.6 * first["whole"]
    for values in (first, last):  # tokens beyond the top ones count as one, which loses divergence
        assert 0.6 * values["whole"] < values["loss"] <= values["whole"]
    assert result["largest_error"] <= 2e-3  # of float16
    fewest, most = result["values"]
    assert 1 <= fewest < most < 16, "the supports differ by token"


def test_replayed_experts_make_log_probabilities_agree() -> None:
    first = result_of_warm("router_replay.py", "--steps", "2")["first"]
    assert first["other_experts"] > 0.01
    assert first["replayed"] < 0.5 * first["own_choices"]


def test_online(tmp_path: Path) -> None:
    options = ["--steps", "30", "--evaluate-every", "15", "--out", str(tmp_path), "--seed", "3"]
    result = result_of("online.py", 2, *options, "--config", own("online.json", tmp_path))
    assert set(result) >= {
        "return_before",
        "return_after",
        "seconds",
        "seed",
        "env_steps",
        "batches",
    }
    assert (result["ranks"], result["actors"], result["batches"], result["seed"]) == (2, 2, 30, 3)
    assert result["env_steps"] >= 2000  # what the table's rate asks for before the first batch
    assert len(json.loads((tmp_path / "result.json").read_text())["curves"]["return"]) == 3


@LONG
def test_ppo(tmp_path: Path) -> None:
    """It starts its two ranks itself."""
    options = ["--config", own("ppo.json", tmp_path), "--updates", "2"]
    done = run_warm(str(EXAMPLES / "ppo.py"), *options, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["ranks"], result["updates"], result["env_steps"]) == (2, 2, 2048)
    assert result["return_after"] > 0


def test_ranks_and_actors_end_with_the_launcher(tmp_path: Path) -> None:
    """However early SIGTERM comes; the reapers remove what killed processes leave."""
    command = [
        str(EXAMPLES / "online.py"),
        "--config",
        own("online.json", tmp_path),
        "--steps",
        "100000",
    ]
    with WarmProcess(command, environment(), PIPE, PIPE, cwd=ROOT) as process:
        wait_until(lambda: len(shared_files(prefix())) == 2, "a store and a board")
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode != 0
    wait_until(lambda: shared_files(prefix()) == [], "the end of all")


SHORT = ("--device", "cpu", "--steps", "240", "--random-steps", "205", "--envs", "2", "--seed", "3")


@pytest.mark.parametrize(
    ("program", "options"),
    [("td3", ()), pytest.param("dqn", ("--compile",), marks=LONG)],
    ids=["td3", "dqn compiled"],
)
def test_an_example_of_a_device_acts_and_learns(program: str, options: tuple[str, ...]) -> None:
    """tests/unit/test_learning_examples.py compares compiled and plain steps of all, without
    inductor.
    """
    buffer = "prioritized" if program == "td3" else "uniform"
    command = [str(EXAMPLES / f"{program}_device.py"), *SHORT, "--buffer", buffer, *options]
    run = run_warm(*command, env=environment(), cwd=ROOT)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    low, high = (0, 501) if program == "dqn" else (-2000, 0)
    assert low < result.pop("return") < high  # of one episode in each environment at least
    assert low < result.pop("test") < high
    assert math.isfinite(result.pop("loss"))
    assert result.pop("turns_per_s") > 0
    flags = {"compile": "--compile" in options, "cudagraphs": False, "buffer": buffer}
    sizes = {"steps": 240, "random_steps": 205, "envs": 2, "held": 2 * 239}
    assert result == {"device": "cpu", "seed": 3, **flags, **sizes}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_graphs_without_a_gpu_are_refused() -> None:
    run = run_warm(str(EXAMPLES / "ppo_device.py"), "--cudagraphs", env=environment(), cwd=ROOT)
    assert run.returncode == 2
    assert "--cudagraphs needs a CUDA device" in run.stderr
