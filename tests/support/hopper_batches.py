"""What the tests of the Hopper job share: its batches, as the configs of the repository
give them.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from batch_records import record
from gear_support import ROOT, load_script, prefix

from deepspeed_gear import DeviceReplay, Replay
from deepspeed_gear.data.ingest import ingest

WORDS = ("trajectory_id", "anchor", "sample_number", "is_weight", "valid")


def hopper_data(folder: Path) -> Path:
    """Make the data set of the configs."""
    path = folder / "hopper"
    ingest([ROOT / "examples" / "data" / "hopper_expert.hdf5"], path)
    return path


def digests(config: str, device: str, data: Path, count: int, **options: Any) -> list[str]:
    """Return a digest of each of the first batches: all fields, masks and what describes the
    samples.

    They are those of a config of the repository, with the transform of its example.
    """
    whole = json.loads((ROOT / "configs" / config).read_text())
    section = {**whole["gear"], "batch_size": whole["train_batch_size"], **options}
    section["shared_memory"] = {"prefix": prefix()}
    table = section.get("tables", {}).get("main")
    (section if table is None else table)["data"]["path"] = str(data)
    replay = Replay(section, device=device) if table is None else DeviceReplay(section, device)
    replay.transform = load_script(ROOT / "examples" / "common.py").shorten_history
    with replay:
        return [_digest(replay.sample(), device) for _ in range(count)]


def _digest(batch: Any, device: str) -> str:
    assert {batch[name].device.type for name in batch} == {torch.device(device).type}
    digest = hashlib.sha256()
    for name, array in sorted(record(batch, WORDS).items()):
        digest.update(name.encode() + array.tobytes())
    return digest.hexdigest()
