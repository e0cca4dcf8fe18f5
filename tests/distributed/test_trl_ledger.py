"""TRL's trainer on the prompts of a ledger: two ranks train, and this process is the worker."""

import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gear_support import ROOT, prefix, shared_files
from process_support import call_on_ranks

from deepspeed_gear import Column, DatasetWriter, PolicyBoard, RolloutWorker, Schema
from deepspeed_gear.errors import GearError

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="trl is not installed"),
    pytest.mark.timeout(3600),
]
SIZE = 4  # responses of a group
GROUPS = 6  # of a rollout batch
STEPS = 4  # two rollout batches of two epochs
SAVED = 3  # inside the second one
LETTERS = 26
# What each rank returns of a run: its log, the versions that it has published, books and weights.
Run = tuple[list[dict[str, float]], list[int], dict[str, Any], np.ndarray]


def response(draws: np.random.Generator, prompt: np.ndarray) -> dict[str, Any]:
    """Return the columns of a random response to a prompt."""
    own = draws.integers(2, LETTERS, draws.integers(1, 9), dtype=np.int32)
    before = np.zeros(len(prompt), np.float32)
    return {
        "tokens": np.append(prompt, own),
        "loss_mask": np.append(before, np.ones(len(own))) > 0,
        "old_logp": np.append(before, np.full(len(own), -np.log(LETTERS))).astype(np.float32),
        "reward": np.float32((own % 5 == 0).mean()),
    }


def work(config: Path, stop: threading.Event) -> None:
    """Commit random responses to what can be leased, in one run after the other."""
    draws = np.random.default_rng(0)
    while not stop.wait(0.05):
        if not config.exists():
            continue
        try:
            with RolloutWorker.attach(config) as worker:
                while not stop.is_set():
                    for lease in worker.lease(2, timeout_s=0.1):
                        prompt = lease.prompt["tokens"]
                        lease.commit([response(draws, prompt) for _ in range(SIZE)])
        except (GearError, json.JSONDecodeError):
            continue  # the run has not begun, or it has ended


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Run]]]:
    """Train on two ranks; what each one returns, by run."""
    out = tmp_path_factory.mktemp("trl_ledger")
    draws = np.random.default_rng(1)
    with DatasetWriter(out / "prompts", Schema([Column("tokens", "int32", role="token")])) as data:
        for _ in range(10):
            data.add({"tokens": draws.integers(2, LETTERS, 5, dtype=np.int32)})
    stop = threading.Event()
    worker = threading.Thread(target=work, args=(out / "run" / "gear_config.json", stop))
    worker.start()
    try:
        yield call_on_ranks(2, train_all, out, timeout_s=3600.0, HF_HUB_OFFLINE="1")
    finally:
        stop.set()
        worker.join()
    assert shared_files(prefix()) == []


def test_ranks_train_what_workers_have_committed(ran: list[dict[str, Run]]) -> None:
    (log, versions, books, weights), (_, others, _, same) = (one["whole"] for one in ran)
    assert versions == others == [0, 1]
    assert (weights == same).all()
    assert [entry["step"] for entry in log] == [1, 2, 3, 4]
    assert 0 < log[0]["reward"] < 1
    assert log[0]["kl"] == pytest.approx(0, abs=1e-5)  # the reference is the same model
    assert log[1]["kl"] > 1e-6
    assert books["version"] + (books["training"] > 0) == 2
    assert books["trained"] + books["training"] == 2 * GROUPS


def test_a_run_resumes_inside_a_rollout_batch(ran: list[dict[str, Run]]) -> None:
    """The books, the responses and the weights continue; nothing is trained twice."""
    whole = ran[0]["whole"]
    log, versions, books, weights = ran[0]["rest"]
    assert versions == [1]
    assert log[-1]["loss"] == pytest.approx(whole[0][-1]["loss"], rel=1e-3, abs=1e-6)
    assert np.abs(weights - whole[3]).max() < 1e-4 * np.abs(whole[3]).max()
    assert books["trained"] + books["training"] == 2 * GROUPS


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_trl(scale: str) -> None:
    from deepspeed_gear.integrations.trl_ledger import scaled_advantages

    rewards = torch.rand(12, generator=torch.Generator().manual_seed(0))
    grouped = rewards.view(-1, SIZE)
    wanted = (grouped - grouped.mean(1, keepdim=True)).double()
    groups = np.arange(12) // SIZE
    deviation = {"group": grouped.std(1, keepdim=True), "batch": rewards.std(), "none": None}[scale]
    divided = wanted if deviation is None else wanted / (deviation + 1e-4)
    found = scaled_advantages(wanted.flatten().numpy(), rewards.numpy(), groups, scale)
    np.testing.assert_allclose(found, divided.flatten().numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"use_vllm": True}, "GRPOConfig.use_vllm"),
        ({"max_steps": -1}, "GRPOConfig.max_steps"),
        ({"tools": [print]}, "LedgerGRPOTrainer.tools"),
        ({"train_dataset": [1]}, "LedgerGRPOTrainer.train_dataset"),
        ({"prompts": None}, "gear.tables.rollouts"),
    ],
)
def test_what_belongs_to_generation_is_refused(options: dict[str, Any], name: str) -> None:
    from types import SimpleNamespace

    from deepspeed_gear.integrations.trl_ledger import LedgerGRPOTrainer

    table = {} if "prompts" in options else {"prompts": {}}
    config = SimpleNamespace(config={"gear": {"tables": {"rollouts": table}}})
    args = {"use_vllm": False, "max_steps": 3, "hf_deepspeed_config": config}
    args |= {key: value for key, value in options.items() if key in args}
    given = {key: value for key, value in options.items() if key in ("tools", "train_dataset")}
    with pytest.raises(GearError, match=rf"^{name} must"):
        LedgerGRPOTrainer("model", SimpleNamespace(**args), **given)


# ---- on each rank --------------------------------------------------------------------------------


def train_all(out: Path) -> dict[str, Run]:
    """Train a whole run, and the rest of it from a checkpoint."""
    sys.path.insert(0, str(ROOT / "examples"))
    import trl_grpo

    trl_grpo.use_gloo()
    if dist.get_rank() == 0:
        trl_grpo.save_model(out / "model")
    dist.barrier()
    return {
        "whole": train(trl_grpo, out, None),
        "rest": train(trl_grpo, out, f"checkpoint-{SAVED}"),
    }


def train(example: Any, out: Path, resume: str | None) -> Run:
    """Train by SGD."""
    from trl import GRPOConfig

    from deepspeed_gear.integrations.trl_ledger import LedgerGRPOTrainer

    config = example.ds_config(256)
    prompts = {"data": str(out / "prompts"), "max_lag": 1}
    config["gear"]["tables"]["rollouts"] |= {"prompts": prompts, "writers": 2}
    config["gear"]["shared_memory"] = {"prefix": prefix()}
    args = GRPOConfig(
        str(out / "run"),
        deepspeed=config,
        max_steps=STEPS,
        save_steps=SAVED,
        logging_steps=1,
        learning_rate=0.1,
        optim="sgd",
        max_grad_norm=0.0,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        beta=0.1,
        num_iterations=2,
        per_device_train_batch_size=SIZE * GROUPS // 2,
        num_generations=SIZE,
        max_completion_length=24,
    )
    versions: list[int] = []
    boards: list[PolicyBoard] = []

    def publish(model: torch.nn.Module, version: int) -> None:
        versions.append(version)
        if boards:
            boards[0].publish(model, version + 1)
        else:
            replay = trainer.deepspeed.gear
            boards.append(PolicyBoard.create(model, replay, version=version + 1))

    trainer = LedgerGRPOTrainer(str(out / "model"), args, publish)
    trainer.train(resume_from_checkpoint=resume and str(out / "run" / resume))
    books = trainer.deepspeed.gear.statistics()["prompts"]["rollouts"]
    weights = torch.cat([one.detach().flatten() for one in trainer.deepspeed.module.parameters()])
    assert boards[0].version == versions[-1] + 1
    dist.barrier()  # no rank reads the board any more
    boards[0].close()
    trainer.deepspeed.destroy()
    log = [entry for entry in trainer.state.log_history if "entropy" in entry]
    return log, versions, dict(books), weights.numpy()
