"""Gradients of a world's ranks in one launch: of packed micro batches, and what frameworks divide by.

The last argument is a task: `packed` and `divisors`, the cases of packed_gradients.py and of
gradient_divisor.py, and `out`, the folder of each rank's results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import gradient_divisor
import packed_gradients
import torch
import torch.distributed as dist

if __name__ == "__main__":
    task = json.loads(sys.argv[-1])
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    found = {
        "packed": packed_gradients.outcomes(task["packed"]),
        "divisors": dict(gradient_divisor.outcomes(task["divisors"])),
    }
    (Path(task["out"]) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
