"""Rollout workers of the examples: what they generate and commit, and training beside them."""

import importlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import ROOT, prefix, shared_files, wait_until
from process_support import Ranks, environment, run_ranks
from remote_support import serving, write_run
from warm_python import PIPE, WarmProcess

from deepspeed_gear import (
    Column,
    DatasetWriter,
    PolicyBoard,
    Replay,
    RolloutWorker,
    Schema,
    StoreError,
)

pytest.importorskip("transformers", reason="the models are those of transformers")
EXAMPLES = ROOT / "examples"
CONFIG = ROOT / "configs" / "grpo_async.json"
SERVER = Path(__file__).parent / "programs" / "completion_server.py"
EOS = 12
LONG = pytest.mark.skipif(
    os.environ.get("GEAR_LONG_TESTS") != "1", reason="long: GEAR_LONG_TESTS=1"
)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.manual_seed(1)
    return importlib.import_module("grpo_model")


@pytest.fixture
def worker_module(task: ModuleType) -> ModuleType:
    return importlib.import_module("rollout_worker")


@pytest.fixture
def board(task: ModuleType) -> Iterator[PolicyBoard]:
    with PolicyBoard.create(task.policy(), prefix=prefix()) as board:
        yield board


def log_probabilities(model: Any, prompt: list[int], response: list[int]) -> list[float]:
    """Return those of a response, all at once and without a cache."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0]
    logp = torch.log_softmax(logits, 1)[len(prompt) - 1 : -1]
    return logp.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


def section(folder: Path, **prompts: Any) -> dict[str, Any]:
    """Return the example's table with groups of 2, and two of them in a rollout batch, of a few
    prompts.
    """
    with DatasetWriter(
        folder / "prompts", Schema([Column("tokens", "uint8", role="token")])
    ) as writer:
        for prompt in ([1, 2, 10, 3, 4, 11], [5, 6, 10, 7, 8, 11], [9] * 13):
            writer.add({"tokens": np.array(prompt, np.uint8)})
    gear: dict[str, Any] = json.loads(CONFIG.read_text())["gear"]
    table = gear["tables"]["rollouts"]
    table["group"] = {"column": "prompt_id", "size": 2}
    table["prompts"] |= {"data": str(folder / "prompts"), "max_lag": 1, **prompts}
    gear["rollout"] = {"groups": 2}
    return {**gear, "shared_memory": {"prefix": prefix()}}


# ---- generation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_continuous_batches_are_what_each_prompt_generates_alone(
    task: ModuleType, worker_module: ModuleType, temperature: float
) -> None:
    draw = random.Random(0)
    most = 9
    prompts = [[draw.randrange(14) for _ in range(draw.randint(1, 9))] for _ in range(12)]
    model = task.policy()
    generation = worker_module.Generation(model, places=7, max_tokens=most, temperature=temperature)
    waiting = list(enumerate(prompts))
    done = []
    widest = 0
    while waiting or generation.free < 7:
        while waiting and generation.free >= 2:
            generation.start(*waiting.pop(0), size=2)
        done += generation.step()
        widest = max(widest, generation._mask.size(1))
    assert sorted(response.key for response in done) == sorted([*range(12), *range(12)])
    keys = [response.key for response in done]
    assert keys != sorted(keys) or temperature == 0  # they end in any order
    assert widest <= max(map(len, prompts)) + most  # columns without tokens leave
    for response in done:
        prompt = prompts[response.key]
        tokens = response.tokens
        assert response.has_ended == (tokens[-1] == EOS)
        assert EOS not in tokens[:-1]
        assert len(tokens) == most or response.has_ended
        assert response.logp == pytest.approx(log_probabilities(model, prompt, tokens), abs=1e-5)
        for length in range(len(tokens) if temperature == 0 else 0):
            with torch.no_grad():
                logits = model(
                    input_ids=torch.tensor([prompt + tokens[:length]]), use_cache=False
                ).logits
            assert tokens[length] == logits[0, -1].argmax()


def test_a_temperature_is_that_of_the_log_probabilities(
    task: ModuleType, worker_module: ModuleType
) -> None:
    model = task.policy()
    generation = worker_module.Generation(model, places=2, max_tokens=1, temperature=0.5)
    generation.start(0, [1, 2], 2)
    with torch.no_grad():
        expected = torch.log_softmax(model(input_ids=torch.tensor([[1, 2]])).logits[0, -1] / 0.5, 0)
    for response in generation.step():
        assert response.logp == pytest.approx([expected[response.tokens[0]].item()], abs=1e-5)


def test_weights_change_between_two_steps(
    task: ModuleType, worker_module: ModuleType, board: PolicyBoard
) -> None:
    reader = PolicyBoard.attach(name=board.name)
    generation = worker_module.Generation(
        task.policy(), board=reader, places=64, max_tokens=3, seed=1
    )
    generation.start(0, [1, 2], 64)
    first = generation.step()
    board.publish(task.policy(), 5)
    rest = generation.step() + generation.step()
    assert {tuple(response.versions) for response in first} == {
        (1,)
    }  # those that have ended at once
    assert {tuple(response.versions) for response in rest} >= {(1, 5), (1, 5, 5)}
    reader.close()


# ---- the worker ----------------------------------------------------------------------------------


def test_a_worker_commits_groups_and_drops_prompts(
    task: ModuleType, worker_module: ModuleType, board: PolicyBoard, tmp_path: Path
) -> None:
    """Three prompts, one of them too long; a group with an endless response is dropped if it is
    asked to.
    """
    model = task.policy()
    reader = PolicyBoard.attach(name=board.name)
    options = {"size": 2, "max_prompt": 12, "heartbeat_s": 0.0}
    with Replay(section(tmp_path)) as replay, replay.rollout_worker() as leases:
        generation = worker_module.Generation(model, board=reader, places=4, max_tokens=4)
        worker = worker_module.Worker(
            leases, generation, lambda prompt, tokens: len(tokens), **options
        )
        while worker.num_groups < 4:
            worker.turn()
        assert leases.lease(timeout_s=0) == []  # max_lag admits none
        rollout = replay.rollout()
        for step in rollout:
            for micro in step:
                trained = micro.loss_mask
                version = micro["version"]
                logp = micro["logp"]
                assert (version[trained] == 1).all()
                assert (logp[trained] < 0).all()
                assert (version[~trained] == 0).all()
        books = replay.statistics()["prompts"]["rollouts"]
        assert (books["trained"], books["waiting"], list(books["dropped"])) == (
            2,
            2,
            ["prompt too long"],
        )

        strict = worker_module.Worker(
            leases, generation, lambda *_: 0.0, drop_truncated=True, **options
        )
        board.publish(model, 2)
        while (
            strict.num_groups
            + replay.statistics()["prompts"]["rollouts"]["dropped"].get("too long", 0)
            < 2
        ):
            strict.turn()
        assert generation.free == 4
    reader.close()


def test_a_worker_generates_by_a_server(
    task: ModuleType, worker_module: ModuleType, board: PolicyBoard, tmp_path: Path
) -> None:
    """Log-probabilities are those of the board's weights: the server gets them before
    it answers.
    """
    http = importlib.import_module("http_generation")
    served = tmp_path / "served"
    task.policy().save_pretrained(served)  # what the server begins with
    newest = task.policy()
    reader = PolicyBoard.attach(name=board.name)
    board.publish(newest)
    parts = {
        "model": task.policy(),
        "board": reader,
        "folder": served,
        "places": 4,
        "max_tokens": 4,
    }
    with WarmProcess([str(SERVER), str(served)], environment(), PIPE, None, cwd=ROOT) as server:
        try:
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            vllm, sglang = (
                http.HttpGeneration(url, kind, **parts) for kind in (http.VLLM, http.SGLANG)
            )
            with Replay(section(tmp_path)) as replay, replay.rollout_worker() as leases:
                worker = worker_module.Worker(leases, vllm, lambda *_: 0.0, size=2, max_prompt=12)
                while worker.num_groups < 4:
                    worker.turn()
                for group in replay.read(replay.rollout().trajectory_id.tolist()):
                    begin = group["loss_mask"].tolist().index(True)
                    prompt = group["tokens"][:begin].tolist()
                    tokens = group["tokens"][begin:].tolist()
                    expected = log_probabilities(newest, prompt, tokens)
                    assert group["logp"][begin:].tolist() == pytest.approx(expected, abs=1e-5)
                    assert group["version"].tolist() == [0] * begin + [2] * len(tokens)
            newest = task.policy()
            board.publish(newest)
            sglang.refresh()
            sglang.start(7, [1, 2], 2)
            sglang.start(8, [3], 2)
            assert sglang.free == 0
            sglang.cancel(8)
            found: list[Any] = []
            while len(found) < 2:
                found += sglang.step()
            for one in found:
                assert (one.key, one.versions) == (7, [3] * len(one.tokens))
                assert one.logp == pytest.approx(
                    log_probabilities(newest, [1, 2], one.tokens), abs=1e-5
                )
            assert sglang._post("/calls", {}) == [
                "/pause?mode=keep",
                "/collective_rpc",
                "/reset_prefix_cache?reset_running_requests=true",
                "/resume",
                "/pause_generation",
                "/update_weights_from_disk",
                "/continue_generation",
                "/calls",
            ]
            vllm.close()
            sglang.close()
        finally:
            server.kill()
    reader.close()


# ---- training beside them ------------------------------------------------------------------------


@pytest.fixture
def grpo(tmp_path: Path) -> list[str]:
    """Arguments of short runs."""
    config = json.loads(CONFIG.read_text())
    config["gear"]["shared_memory"] = {"prefix": prefix()}
    config["gear"]["rollout"]["groups"] = 4
    config["gear"]["tables"]["rollouts"]["group"].pop(
        "where"
    )  # so few right answers make few such groups
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options = [
        "--out",
        str(tmp_path),
        "--warm-accuracy",
        "0",
        "--goal",
        "2",
        "--evaluate-every",
        "2",
    ]
    return [
        "--config",
        str(path),
        *options,
        "--workers",
        "1",
        "--max-lag",
        "1",
        "--save-every",
        "1",
    ]


def check_result(output: str, iterations: int) -> None:
    found = json.loads(output.splitlines()[-1])
    assert (found["ranks"], found["iterations"]) == (2, iterations)
    assert found["prompts"]["trained"] == 4 * iterations
    assert found["largest_lag"] <= 1
    assert shared_files(prefix()) == []


def test_grpo_trains_beside_a_worker(grpo: list[str]) -> None:
    check_result(run_ranks(EXAMPLES / "grpo_async.py", 2, *grpo, "--iterations", "3")[0], 3)


@LONG
def test_grpo_goes_on_after_a_kill_of_all_ranks(grpo: list[str], tmp_path: Path) -> None:
    ranks = Ranks(EXAMPLES / "grpo_async.py", 2, *grpo)
    latest = tmp_path / "checkpoints" / "latest"
    wait_until(latest.exists, "a checkpoint")
    ranks.kill()
    wait_until(lambda: shared_files(prefix()) == [], "the end of the worker")
    trained = int(latest.read_text().removeprefix("global_step")) // 4  # 2 epochs of 2 minibatches
    again = [*grpo, "--resume", "--iterations", str(trained + 2)]
    check_result(run_ranks(EXAMPLES / "grpo_async.py", 2, *again)[0], trained + 2)


def test_workers_here_and_on_other_machines_need_the_config_only(
    task: ModuleType,
    worker_module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The program runs with each of the two lines that grpo_async.py prints."""
    config, token = write_run(tmp_path, section(tmp_path))
    command = [sys.executable, "rollout_worker.py", str(config)]
    text = importlib.import_module("grpo_async").how_to_add(command)
    here, there, gateway = (line.partition(": ")[2].split() for line in text.splitlines())
    assert gateway[:4] == ["gear", "serve", "--config", str(config)]
    ended = dict[str, int]()

    def turn(worker: Any) -> None:
        """Commit two groups, then end as when the run ends."""
        if worker.num_groups >= 2:
            raise StoreError("the run", "must go on", None, "the test ends")
        turns(worker)
        ended[type(worker._worker).__name__] = worker.num_groups

    turns = worker_module.Worker.turn
    monkeypatch.setattr(worker_module.Worker, "turn", turn)
    with (
        Replay(config) as replay,
        PolicyBoard.create(task.policy(), replay) as board,
        serving(str(config)) as server,
    ):
        at = there.index("--gateway")
        assert there[at + 2 :] == ["--token-file", "token", "--ca", "cert.pem"]
        remote = [*there[2:at], "--gateway", server.url, "--token-file", str(token)]
        for version, words in enumerate((here[2:], remote), 1):
            monkeypatch.setattr(sys, "argv", ["rollout_worker.py", *words])
            worker_module.main()
            for step in replay.rollout():
                for micro in step:
                    assert micro["version"][micro.loss_mask].max() <= version
            board.publish(task.policy())
    assert sorted(ended) == ["RemoteRolloutWorker", "RolloutWorker"]
    assert capfd.readouterr().out.count("groups; the run must go on") == 2


def test_a_worker_in_an_actor_of_ray(
    task: ModuleType, worker_module: ModuleType, board: PolicyBoard, tmp_path: Path
) -> None:
    """It attaches to the node's store and board; what it leased comes back when the actor is
    killed.
    """
    ray = pytest.importorskip("ray", reason="it is no dependency")
    config = section(tmp_path)
    examples = str(EXAMPLES)

    class Rollouts:
        def __init__(self, board: str) -> None:
            sys.path.insert(0, examples)
            module, task = (
                importlib.import_module(name) for name in ("rollout_worker", "grpo_model")
            )
            reader = PolicyBoard.attach(name=board)
            generation = module.Generation(task.policy(), board=reader, places=4, max_tokens=4)
            self.leases = RolloutWorker.attach(config)
            self.worker = module.Worker(self.leases, generation, task.reward, size=2, max_prompt=12)

        def run(self, groups: int) -> int:
            while self.worker.num_groups < groups:
                self.worker.turn()
            return int(self.worker.num_groups)

        def hold(self) -> list[int]:
            return [lease.number for lease in self.leases.lease(2)]

    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets have short names
    ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, _temp_dir=folder)
    try:
        with Replay(config) as replay:
            actor = ray.remote(Rollouts).options(max_concurrency=1).remote(board.name)
            assert ray.get(actor.run.remote(4)) >= 4
            for step in replay.rollout():
                assert all((micro["version"][micro.loss_mask] == 1).all() for micro in step)
            held = ray.get(actor.hold.remote())
            ray.kill(actor)
            wait_until(
                lambda: not replay.statistics()["prompts"]["rollouts"]["leased"], "the return"
            )
            with replay.rollout_worker() as leases:
                again = leases.lease(2)
                assert [(lease.number, lease.attempt) for lease in again] == [
                    (number, 2) for number in held
                ]
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
