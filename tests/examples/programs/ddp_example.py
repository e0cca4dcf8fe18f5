"""What examples/ddp_prioritized.py promises, seen from inside its workers: ddp_example.py EXAMPLE
STEPS.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gear_support import load_script

example = load_script(Path(sys.argv[1]))
dist.init_process_group("gloo")
workers = dist.get_world_size()
steps = int(sys.argv[2])
result, q, batch = example.train(steps, seed=3)
parts: list[Any] = [None] * workers
items = list(zip(batch.trajectory_id.tolist(), batch.anchor.tolist(), strict=True))
products = (batch.is_weight.double() * batch.probability).tolist()
dist.all_gather_object(
    parts, (result, batch.sample_number.tolist(), items, products, batch.is_weight.max().item())
)

added = sum(part[0]["added"] for part in parts)
assert {part[0]["trajectories"] for part in parts} == {added}  # len() is of all workers
numbers = sorted(number for part in parts for number in part[1])
assert numbers == list(
    range((steps - 1) * 256, steps * 256)
)  # each has its part of one global batch
ids = {item[0] for item in parts[0][2]}
assert max(ids) >= added // 2, "a worker draws what others have added"
flat = [product for part in parts for product in part[3]]
assert max(flat) < min(flat) * (
    1 + 1e-5
)  # beta has reached 1: weight ~ 1 / probability over all workers
assert max(part[4] for part in parts) == 1.0  # and the largest weight of the global batch is 1
weights = torch.cat([parameter.detach().flatten() for parameter in q.parameters()])
same = weights.clone()
dist.broadcast(same, 0)
assert torch.equal(same, weights)
dist.barrier()
dist.destroy_process_group()
