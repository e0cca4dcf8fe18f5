"""torchrun: a node that is lost costs only what came after the latest checkpoint."""

import contextlib
import json
import os
import signal
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from batch_records import alone, priorities, record, samples_of
from engine_parts import Model
from gear_support import config_of
from page_support import run_program
from process_support import CALL, environment, free_port, write_call
from warm_python import WarmProcess

from deepspeed_gear import Batch

STEPS = 8
BATCH = 12
DIES_AT = 3

# torchrun. The second agent joins when the first has opened the rendezvous.
AGENT = """
import socket, sys, time
from torch.distributed import run
name, port = sys.argv[1], int(sys.argv[2])
while name == "second" and socket.socket().connect_ex(("127.0.0.1", port)) != 0:
    time.sleep(0.05)
run.main(sys.argv[3:])
"""


@pytest.mark.timeout(300)
def test_the_page_continues_on_the_ranks_that_are_left(dataset: Path, tmp_path: Path) -> None:
    """Two agents of a rank each; the second is killed with its rank. The first converts, and goes
    on.
    """
    sampler = {"kind": "prioritized", "unit": "step"}
    gear = config_of(
        dataset, fields={"observation": {"length": 4}, "action": {}}, sampler=sampler, seed=3
    )
    gear = {**gear, "timeout_s": 20.0, "prefetch": 2}
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1},
        "gear": gear,
    }
    file = tmp_path / "ds_config.json"
    port = free_port()
    file.write_text(json.dumps(config))
    call = write_call(tmp_path, run_page, tmp_path, [str(file), str(tmp_path), str(STEPS)])
    command = [
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "2",
        "--rdzv-backend",
        "c10d",
    ]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "gear"]
    # How long the first waits for the second, at the start and after its end.
    command += ["--rdzv-conf", "last_call_timeout=6,keep_alive_interval=1"]
    command += [str(CALL), call]
    with contextlib.ExitStack() as stack:
        agents = []
        for name in ("first", "second"):
            log = stack.enter_context((tmp_path / f"{name}.log").open("w"))
            env = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", AGENT=name)
            start = ["-c", AGENT, name, str(port), *command]
            agent = WarmProcess(start, env, log, log, start_new_session=True)
            stack.callback(end, agent)
            agents.append(agent)
        status = agents[0].wait()
    assert status == 0, (tmp_path / "first.log").read_text()
    assert agents[1].returncode == -signal.SIGKILL
    wanted = samples_of(alone({**gear, "batch_size": BATCH}, STEPS)).tolist()
    first = seen(tmp_path, 0)
    second = seen(tmp_path, 1)
    assert sorted(first) == list(range(DIES_AT)), "it was lost in the fourth step"
    assert sorted(second) == list(range(DIES_AT, STEPS))
    assert all(batches[step] == wanted[step] for batches in (first, second) for step in batches)


def run_page(folder: Path, arguments: list[str]) -> None:
    """Run train.py of change-ranks.md, and append the samples of each micro batch to a file of this
    attempt.

    A rank of the second agent kills this agent and itself in the fourth step, as where a node is
    lost.
    """
    name = f"seen-{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}"

    def loss_of(engine: Any, batch: Batch) -> Any:
        if engine.global_steps == DIES_AT and os.environ["AGENT"] == "second":
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        loss = engine(batch)
        with (folder / name).open("a") as seen:
            seen.write(json.dumps([engine.global_steps, samples_of(record(batch)).tolist()]) + "\n")
        engine.gear_update_priorities(batch, priorities(batch))
        return loss

    run_program(
        "change-ranks.md",
        "load_universal",
        arguments,
        loss_of=loss_of,
        make_model=lambda: Model(12),
    )


def end(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent, if it is still there; its ranks end with it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()


def seen(folder: Path, attempt: int) -> dict[int, list[Any]]:
    """Return the global batch of each step of which all ranks have seen their parts."""
    batches = defaultdict(list)
    for file in folder.glob(f"seen-{attempt}.*"):
        for line in file.read_text().splitlines():
            step, samples = json.loads(line)
            batches[step] += samples
    return {step: sorted(samples) for step, samples in batches.items() if len(samples) == BATCH}
