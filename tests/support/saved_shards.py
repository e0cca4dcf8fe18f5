"""Divides the files of a table that one store has saved into shards, as several nodes save them."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.checkpoint import reshard, save_folders
from deepspeed_gear.checkpoint.save_folders import MANIFEST
from deepspeed_gear.checkpoint.table_files import file_of, open_rows, read_table
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.schema import Schema


def into_shards(folder: Path, count: int, by_rows: bool) -> dict[str, Any]:
    """Replace a saved table with a capacity by shards of it; return the state that names them.

    Beside its folder lies the position, where the table was not copied from there. `by_rows`: its
    items are steps with priorities.
    """
    digests = {}
    found = read_table(folder)
    open_rows(found)
    whole = found.whole
    manifest = found.manifests[0]
    assert whole.slots is not None
    room = [(len(whole.slots), int(whole.slots[:, Slot.NUM_ROWS].sum()))] * count
    division = reshard.divide("main", whole, room, by_rows)
    for index in range(count):
        part = folder / f"shard-{index}"
        chosen = division.chosen(index)
        part.mkdir()
        records = whole.slots[chosen]
        np.save(part / "slots.npy", reshard.packed(records))
        np.save(part / "numbers.npy", np.arange(len(chosen)))
        order = reshard.in_rows(records)
        rows = [
            np.arange(first, first + n)
            for first, n in records[order][:, [Slot.FIRST_ROW, Slot.NUM_ROWS]].tolist()
        ]
        for column in Schema.from_json(manifest["schema"]):
            data = np.concatenate(found.columns[0][column.name])
            is_single = column.rows == "1"
            chosen_rows = chosen if is_single else np.concatenate([np.empty(0, np.int64), *rows])
            np.save(part / file_of(column.name, None if is_single else "000000"), data[chosen_rows])
        for name, content in whole.streams.items():
            by_step = len(content.get("priorities", content.get("draws", chosen))) > len(
                whole.slots
            )
            items = reshard.items_of(whole.slots, chosen) if by_step else None
            for key, array in reshard.part_of(whole, name, division, index, items).items():
                np.save(part / f"stream.{name}.{key}.npy", array)
        next_id = reshard.next_id_of(whole.next_id, index, count)
        files = {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in part.glob("*.npy")
        }
        segments = {"000000": {"rows": int(records[:, Slot.NUM_ROWS].sum())}}
        own = {"next_id": next_id, "shard": {"index": index, "count": count}, "files": files}
        own["segments"] = segments
        content = json.dumps({**manifest, **own}).encode()
        (part / MANIFEST).write_bytes(content)
        digests[f"{part.name}/{MANIFEST}"] = hashlib.sha256(content).hexdigest()
    for path in folder.glob("*.npy"):
        path.unlink()
    (folder / MANIFEST).unlink()
    if not (folder.parent / save_folders.POSITION).exists():
        return {}
    state = save_folders.read_position(folder.parent)
    state["save"]["tables"][folder.name] = digests
    save_folders.write_position(folder.parent, state)
    return state
