"""`gear preview CONFIG`: the batches of every rank of a run, without starting it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_gear.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed_gear.replay.rank_preview import Preview

_AXES = {"dp": "data", "tp": "tensor", "pp": "pipe", "sp": "sequence"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `gear preview`."""
    parser.description = (
        "Show what each rank of a run gets: fields, shapes, bytes, padding and first ids; the rows that "
        "travel between nodes; and the digests of the first global batches, which a run with "
        "gear.verify_every writes to its log. One process, no GPU."
    )
    parser.add_argument("config", metavar="CONFIG", help="a ds_config with a gear section, or the section")
    for option, axis in _AXES.items():
        parser.add_argument(f"--{option}", type=_count, default=1, metavar="N", help=f"{axis} ranks")
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="nodes, with equally many ranks")
    parser.add_argument("--batches", type=_count, default=3, metavar="N", help="global batches to draw")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def run(args: argparse.Namespace) -> int:
    """Print the table or JSON.

    Raises:
        ConfigError: The config is wrong, or has no batch size.
        DataError: A data set is missing or broken.
    """
    from deepspeed_gear.config import batch_sizes, parse
    from deepspeed_gear.replay.rank_preview import preview

    whole = _load(Path(args.config))
    config = parse(whole.get("gear", whole))
    worlds = {axis: getattr(args, option) for option, axis in _AXES.items()}
    if "gear" in whole:
        micro, accumulation = _sizes(whole, worlds["data"])
    else:
        micro, accumulation = batch_sizes(config, worlds["data"])[0], config.gradient_accumulation_steps
    found = preview(config, micro, accumulation, worlds, args.nodes, args.batches)
    print(json.dumps(as_json(found), indent=1) if args.json else format_table(found))
    return 0


def _load(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError("CONFIG", "must be a readable file", str(path), str(error.strerror)) from error
    except ValueError as error:
        raise ConfigError(f"CONFIG {path}", "must be JSON", None, str(error)) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"CONFIG {path}", "must be a JSON object", type(loaded).__name__)
    return loaded


def _sizes(config: dict[str, Any], replicas: int) -> tuple[int, int]:
    """Return micro batch and accumulation of a ds_config, from any two of its three sizes.

    Raises:
        ConfigError: They are too few, or do not agree.
    """
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    steps = config.get("gradient_accumulation_steps")
    if micro is None:
        if batch is None:
            raise ConfigError("train_micro_batch_size_per_gpu", "or train_batch_size must be given")
        micro = batch // replicas // (steps or 1)
    if steps is None:
        steps = 1 if batch is None else batch // replicas // micro
    if micro < 1 or steps < 1 or batch not in (None, micro * steps * replicas):
        raise ConfigError(
            "train_batch_size",
            f"must be micro batch * accumulation * replicas ({micro} * {steps} * {replicas})",
            batch,
            "give train_micro_batch_size_per_gpu and gradient_accumulation_steps instead",
        )
    return micro, steps


def as_json(found: Preview) -> dict[str, Any]:
    """Return a preview, JSON-able."""
    axes = ("pipe", "data", "sequence", "tensor")
    return {
        "global_batch": found.info.global_batch,
        "micro": found.info.micro,
        "accumulation": found.info.accumulation,
        "ranks": [
            {
                "rank": rank.rank,
                "node": rank.node,
                **dict(zip(axes, rank.place.coordinates, strict=True)),
                "fields": {name: list(shape) for name, shape in rank.shapes.items()},
                "bytes": rank.num_bytes,
                "padding": rank.padding,
                "ids": rank.ids,
            }
            for rank in found.ranks
        ],
        "traffic": found.traffic.tolist(),
        "digests": [f"{digest % (1 << 64):016x}" for digest in found.digests],
    }


def format_table(found: Preview) -> str:
    """Return the text that `gear preview` prints."""
    from deepspeed_gear.cli.inspect import grid_of

    rows = []
    for rank in found.ranks:
        shapes = ", ".join(f"{name}{list(shape)}" for name, shape in rank.shapes.items()) or "nothing"
        ids = " ".join(map(str, rank.ids)) or "-"
        size = f"{rank.num_bytes:,}"
        rows.append(
            [str(rank.rank), str(rank.node), str(rank.place), shapes, ids, size, f"{rank.padding:.0%}"]
        )
    heads = ["rank", "node", "place", "fields of a micro batch", "first ids", "bytes", "padding"]
    lines = [str(found.info), "", *grid_of(heads, rows, num_left=5), ""]
    nodes = range(len(found.traffic))
    pairs = [(a, b, int(found.traffic[a, b])) for a in nodes for b in nodes if found.traffic[a, b]]
    if len(found.traffic) > 1:
        sent = [f"  node {a} -> node {b}  {size:,} bytes" for a, b, size in pairs] or ["  none"]
        lines += ["Rows between nodes for the first global batch:", *sent, ""]
    lines += [
        f"global batch {number}: digest {digest % (1 << 64):016x}"
        for number, digest in enumerate(found.digests)
    ]
    return "\n".join(lines)
