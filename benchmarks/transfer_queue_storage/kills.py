"""What is left of the values in TransferQueue after processes were killed (SIGKILL).

It runs in the environment of TransferQueue. This project's backend runs on two nodes of Ray on this
machine: half of the samples lie on the other one and go through its actor. Writers on both nodes
and the actors of both are killed while samples are put. Then a whole job is killed, and another one
reads its values after a load of a checkpoint that has no values. Of TransferQueue's own backend one
of two storage units is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "10",  # of their client, after which a unit is lost
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "1",
}

import ray
import torch
import transfer_queue as tq
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict

from deepspeed_gear.integrations.transfer_queue import NAMESPACE, gear_backend

PARTITION = "train"
LENGTH = 3000
SAVED = "saved"


def fields(numbers: list[int]) -> TensorDict:
    """Make two fields of samples: a tensor and a ragged one, from which a mixture would show."""
    tokens = torch.tensor(numbers)[:, None].expand(-1, LENGTH).contiguous()
    rows = [torch.full((1 + number % 50,), float(number)) for number in numbers]
    ragged = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return TensorDict({"tokens": tokens, "log_probs": ragged}, len(numbers))


def is_whole(numbers: list[int], found: TensorDict) -> bool:
    expected = fields(numbers)
    return all(
        torch.equal(one, other)
        for name in ("tokens", "log_probs")
        for one, other in zip(found[name].unbind(), expected[name].unbind(), strict=True)
    )


class Writer:
    """Puts samples until it is killed; a sample is written to its report after its put returned."""

    def __init__(self, report: str, first: int) -> None:
        self._report = report
        self._first = first

    def pid(self) -> int:
        tq.init()
        return os.getpid()

    def run(self) -> None:
        with open(self._report, "a") as report:
            for first in range(self._first, self._first + 100_000, 4):
                numbers = [*range(first, first + 4)]
                keys = [str(number) for number in numbers]
                tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields(numbers))
                report.write("".join(f"{number}\n" for number in numbers))
                report.flush()


def lost(numbers: list[int]) -> int:
    """Return how many samples cannot be read, or not as they were put."""
    count = 0
    for first in range(0, len(numbers), 64):
        part = numbers[first : first + 64]
        try:
            found = tq.kv_batch_get(keys=[str(n) for n in part], partition_id=PARTITION)
            count += 0 if is_whole(part, found) else len(part)
        except Exception as error:
            print(f"  {len(part)} samples: {type(error).__name__}: {str(error)[:100]}", flush=True)
            count += len(part)
    return count


def ours(rounds: int) -> dict[str, Any]:
    random.seed(0)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    cluster.add_node(num_cpus=4)
    ray.init(address=cluster.address, log_to_driver=False)
    tq.init({"backend": gear_backend()})
    nodes = sorted(node["NodeID"] for node in ray.nodes())
    reports = []
    kills = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            place = NodeAffinitySchedulingStrategy(nodes[number % 2], soft=False)
            report = Path(folder) / str(number)
            options = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": place}
            make = ray.remote(Writer).options(**options)
            writer = make.remote(str(report), number * 100_000)
            pid = ray.get(writer.pid.remote())
            done = writer.run.remote()
            while not report.exists() or report.stat().st_size < 200:
                time.sleep(0.01)
            for unit in range(2):
                time.sleep(random.uniform(0, 0.3))
                actor = ray.get_actor(f"GearStorage#{unit}", namespace=NAMESPACE)
                os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
                kills += 1
            time.sleep(random.uniform(0, 0.3))
            os.kill(pid, signal.SIGKILL)
            kills += 1
            ray.wait([done])
            reports += [int(line) for line in report.read_text().split()]
    count = lost(reports)
    manager = tq.get_client().storage_manager
    folders = [Path(one) for one in manager._units.folders]
    tq.get_client().clear_partition(PARTITION)
    left = sum(len([*(one / "segments").iterdir()]) for one in folders)
    tq.close()
    ray.shutdown()
    cluster.shutdown()
    return {
        "backend": "this project's, two nodes",
        "killed": f"{kills} times: a writer, and the storage actors of both nodes",
        "samples": len(reports),
        "lost": count,
        "segments_left": left,
        "folders_left": sum(one.exists() for one in folders),
    }


def job(folder: Path) -> None:
    """Put samples, save a checkpoint without their values, and stay."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init({"backend": gear_backend(path=folder / "values")})
    numbers = [*range(64)]
    tq.kv_batch_put(
        keys=[str(number) for number in numbers], partition_id=PARTITION, fields=fields(numbers)
    )
    tq.save_checkpoint(folder / "saved", include_storage=False)
    print(SAVED, flush=True)
    time.sleep(600)


def whole_job() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--job", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            while running.stdout.readline().strip() != SAVED:
                assert running.poll() is None
            running.send_signal(signal.SIGKILL)
        saved_bytes = sum(one.stat().st_size for one in Path(folder, "saved").rglob("*"))
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        tq.init({"backend": gear_backend(path=Path(folder) / "values", resume=True)})
        tq.load_checkpoint(Path(folder) / "saved")
        numbers = [*range(64)]
        count = lost(numbers)
        tq.close()
        ray.shutdown()
    return {
        "backend": "this project's, in a folder on the disk",
        "killed": "the whole job; another one loads a checkpoint without values",
        "samples": len(numbers),
        "lost": count,
        "checkpoint_bytes": saved_bytes,
    }


def theirs() -> dict[str, Any]:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    tq.init()
    numbers = [*range(64)]
    keys = [str(number) for number in numbers]
    tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=fields(numbers))
    units = tq.interface._TQ_STORAGE["SimpleStorage"]
    ray.kill(next(iter(units.values())))
    time.sleep(1)
    # Samples lie on the units in turns.
    count = lost(numbers[::2]) + lost(numbers[1::2])
    tq.close()
    ray.shutdown()
    return {
        "backend": "TransferQueue's SimpleStorage, two units",
        "killed": "one storage unit",
        "samples": len(numbers),
        "lost": count,
    }


def main() -> None:
    if "--job" in sys.argv:
        job(Path(sys.argv[-1]))
        return
    rounds = 2 if "--quick" in sys.argv else 4
    print(json.dumps(ours(rounds)), flush=True)
    print(json.dumps(whole_job()), flush=True)
    print(json.dumps(theirs()), flush=True)


if __name__ == "__main__":
    main()
