"""Two ranks whose devices compute priorities late: the batches of early ones, and errors on both.

late_ranks.py SECTION
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replay_support import late_updates_of

from deepspeed_gear import Replay
from deepspeed_gear.batching.transfer.cuda_streams import HostEvent
from deepspeed_gear.errors import DataError, PeerError

dist.init_process_group("gloo")
rank = dist.get_rank()
random.seed(rank)


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on a device."""

    is_cpu, is_cuda = False, True


class Later:
    """Memory of the host to which values come after some time."""

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, HostEvent]:
        event = HostEvent()
        threading.Timer(random.random() * 0.02, event.finish).start()
        return values.as_subclass(torch.Tensor).clone(), event

    def give_back(self, host: torch.Tensor) -> None: ...


def run(section: dict[str, Any], is_late: bool) -> list[list[int]]:
    found = []
    with Replay(section) as replay:
        late_updates_of(replay)._blocks = Later()
        for turn in range(20):
            batch = replay.sample()
            found.append(batch.sample_number.tolist() + batch.trajectory_id.tolist())
            values = (batch.sample_number % 13 + 1).float() * (batch.anchor + 1)
            if (turn + rank) % 5 != 4:  # no process has to report
                replay.update_priorities(batch, values.as_subclass(Elsewhere) if is_late else values)
    dist.barrier()
    return found


for options in json.loads(sys.argv[1]):
    assert run(options, True) == run(options, False), options

with Replay(json.loads(sys.argv[1])[0]) as replay:
    late_updates_of(replay)._blocks = Later()
    batch = replay.sample()
    values = torch.full((batch.num_samples,), torch.nan if rank == 1 else 1.0)
    replay.update_priorities(batch, values.as_subclass(Elsewhere))
    wrong = pytest.raises(DataError if rank == 1 else PeerError, match="priority 0 must be finite")
    with tempfile.TemporaryDirectory() as folder, wrong:
        replay.save(folder)
    replay.sample()
dist.barrier()
print("done", flush=True)
dist.destroy_process_group()
