"""Fill a column of stored responses by a forward pass: this package, and TransferQueue in its
environment.

    python benchmarks/fill_column.py [--responses 2048] [--tokens 512] [--repeats 5] [--rounds 3]

Both read the tokens of the responses that lack the column, in packs of at most 32,768 tokens, and
write a value per token back. The forward pass itself is a constant: only the data path is timed.
TransferQueue has no packing: its sequences are concatenated in their order. It is timed with a read
and a write for every 64 responses, about a pack, and with one of each for all. Printed: medians,
and times over this package's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

PACK = 32_768
COLUMNS = {
    "tokens": {"dtype": "int32", "role": "token"},
    "loss_mask": {"dtype": "bool", "role": "loss_mask"},
    "ref_logp": {"dtype": "float32", "late": True},
}
System = tuple[
    Callable[[], None], Callable[[], int], Callable[[], None]
]  # add all, fill all, close


def responses(count: int, mean: int) -> list[np.ndarray]:
    lengths = np.random.default_rng(0).integers(mean // 2, 3 * mean // 2, count)
    return [np.arange(1, length + 1, dtype=np.int32) for length in lengths]


def gear(rows: list[np.ndarray]) -> System:
    from deepspeed_gear import Replay

    sizes = {"capacity_steps": 2 * sum(map(len, rows)), "capacity_trajectories": len(rows)}
    section = {
        "tables": {"main": {**sizes, "max_length": PACK, "schema": {"columns": COLUMNS}}},
        "sampler": {"kind": "fifo"},
        "fields": {"tokens": {}, "loss_mask": {}},
        "pack": {"tokens": PACK, "pad": {"multiple": 128}},
        "batch": {"trajectories": 32},
    }
    replay = Replay(section)

    def add() -> None:
        replay.clear()
        for row in rows:
            replay.add({"tokens": row, "loss_mask": np.ones(len(row), bool)})

    def fill() -> int:
        count = 0
        for micro in replay.forward("ref_logp", tokens=PACK):
            micro.fill(ref_logp=torch.full(micro["tokens"].shape, -1.0))
            count += micro.num_tokens
        return count

    return add, fill, replay.close


def transfer_queue(rows: list[np.ndarray], batch: int) -> System:
    import transfer_queue as tq
    from peers.tq import jagged, start
    from tensordict import TensorDict

    (client, close) = start()
    held = list[Any]()
    turns = list[int]()

    def add() -> None:
        while held:
            client.clear_samples(held.pop())
        tokens = jagged([torch.from_numpy(row) for row in rows])
        masks = jagged([torch.ones(len(row), dtype=torch.bool) for row in rows])
        fields = TensorDict({"tokens": tokens, "loss_mask": masks}, len(rows))
        tq.kv_batch_put(
            keys=[str(number) for number in range(len(rows))], partition_id="train", fields=fields
        )

    def fill() -> int:
        count = 0
        for first in range(0, len(rows), batch):
            size = min(batch, len(rows) - first)
            meta = client.get_meta(["tokens"], size, "train", task_name=f"reference {len(turns)}")
            packs = [list[torch.Tensor]()]
            filled = list[torch.Tensor]()
            for sequence in client.get_data(meta)["tokens"].unbind():
                if sum(map(len, packs[-1])) + len(sequence) > PACK:
                    packs.append([])
                packs[-1].append(sequence)
            for pack in packs:
                values = torch.full((len(torch.cat(pack)),), -1.0)
                filled += values.split([len(one) for one in pack])
                count += len(values)
            client.put(TensorDict({"ref_logp": jagged(filled)}, len(filled)), metadata=meta)
            held.append(meta)
        turns.append(count)
        return count

    return add, fill, close


def copies(rows: list[np.ndarray]) -> System:
    tokens = np.concatenate(rows)
    total = sum(map(len, rows))
    flags = np.ones(total, bool)
    column = np.zeros(total, np.float32)
    wide = np.zeros((2, PACK), np.int64)
    masks = np.zeros((2, PACK), bool)

    def fill() -> int:
        mask = flags.copy()  # of all, which the loss weights come from
        for first in range(0, total, PACK):
            at = slice(first, first + PACK)
            size = min(PACK, total - first)
            for out in wide:  # tokens, and targets
                out[:size] = tokens[at]
            masks[0, :size] = flags[at]
            masks[1, :size] = mask[at]
            column[at] = np.full(size, -1.0, np.float32)
        return total

    return lambda: None, fill, lambda: None


def measure(system: str, options: argparse.Namespace) -> tuple[float, float]:
    rows = responses(options.responses, options.tokens)
    times = []
    if system == "tq":
        add, fill, close = transfer_queue(rows, options.batch or len(rows))
    else:
        add, fill, close = gear(rows) if system == "gear" else copies(rows)
    for _ in range(options.repeats + 1):
        add()
        begin = time.perf_counter()
        count = fill()
        times.append(time.perf_counter() - begin)
    close()
    return median(times[1:]), count / median(times[1:])  # the first one warms up


def main() -> None:
    sizes = {"responses": 2048, "tokens": 512, "repeats": 5, "rounds": 3, "batch": 0}
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--system", choices=["gear", "copies", "tq"])
    options = parser.parse_args()
    if options.system:
        print(*measure(options.system, options), flush=True)
        return
    from peers.environments import interpreters

    peer = interpreters(["tq"])[0]["tq"]
    here = sys.executable
    best = dict[str, tuple[float, float]]()
    systems = {"gear": (here, 0), "copies": (here, 0), "tq": (peer, 64), "tq at once": (peer, 0)}
    for _ in range(options.rounds):
        for name, (python, batch) in systems.items():
            own = ["--system", name.split()[0], "--batch", str(batch)]
            command = [str(python), __file__, *sys.argv[1:], *own]
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            seconds, speed = map(float, run.stdout.split()[-2:])
            best[name] = min(best.get(name, (seconds, speed)), (seconds, speed))
    for name, (seconds, speed) in best.items():
        times = seconds / best["gear"][0]
        print(f"{name}: {seconds * 1e3:.1f} ms, {speed:,.0f} tokens/s, {times:.1f}", flush=True)


if __name__ == "__main__":
    main()
