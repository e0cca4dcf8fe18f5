"""`gear preview`: show the batches of a run without starting it.

Shows the fields, shapes, bytes and padding on each rank; the rows that travel between nodes; the
digests of the first global batches, which a run with gear.verify_every writes to its log; and the
steps by which a replay is made. Equal ranks and nodes share a line. For packed batches it shows the
sizes of batches, packs and tables, and with --lengths the packs. It needs one process and no GPU.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deepspeed_gear.cli import Options, grid_of, grouped
from deepspeed_gear.errors import show_bytes

if TYPE_CHECKING:
    from deepspeed_gear.replay.preview import Preview

_AXES = {"dp": "data", "tp": "tensor", "pp": "pipe", "sp": "sequence"}
_PLACE = ("pipe", "data", "sequence", "tensor")
_WIDTH = 110


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text}")
    return int(text)


OPTIONS: Options = {
    "CONFIG": "a ds_config with a gear section, or the section",
    **{
        f"--{option} N": (f"{axis} ranks", {"type": _count, "default": 1})
        for option, axis in _AXES.items()
    },
    "--nodes N": ("nodes, with equally many ranks", {"type": _count, "default": 1}),
    "--batches N": ("global batches to draw", {"type": _count, "default": 3}),
    "--lengths FILE": "with gear.pack: plan the packs of trajectories of these lengths: one a "
    "line, or .npy",
    "--json": "print JSON, of each rank and each two nodes",
}


def run(args: argparse.Namespace) -> int:
    """Print the batches of every rank, or the packs of packed batches."""
    from deepspeed_gear.config import batch_sizes, expand, gear_config, parse
    from deepspeed_gear.replay.packed.pack_preview import (
        format_pack_preview,
        format_rollout_preview,
        pack_preview,
        read_lengths,
        rollout_preview,
    )
    from deepspeed_gear.replay.preview import preview

    section, sizes = gear_config.read(args.config)
    config = parse(section)
    if section.get("recipe") is not None and not args.json:
        written = json.dumps(expand(section), indent=1)
        print(f"With the recipe {section['recipe']} the section is\n{written}\n")
    worlds = {axis: getattr(args, option) for option, axis in _AXES.items()}
    if args.lengths is not None:
        packs = pack_preview(
            config, read_lengths(Path(args.lengths)), worlds["data"], worlds["sequence"]
        )
        lines = format_pack_preview(packs, worlds["data"])
        print(json.dumps(packs, indent=1) if args.json else "\n".join(lines))
        return 0
    if config.pack is not None:
        packed = rollout_preview(config, worlds["data"], worlds["sequence"], worlds["pipe"])
        print(
            json.dumps(packed, indent=1) if args.json else "\n".join(format_rollout_preview(packed))
        )
        return 0
    micro, accumulation = batch_sizes(config, sizes, worlds["data"])
    drawn = preview(config, micro, accumulation, worlds, args.nodes, args.batches)
    lines = [str(drawn.info), *_steps(drawn), "", *_groups_of_ranks(drawn)]
    lines += _groups_of_nodes(drawn)
    for number, digest in enumerate(drawn.digests):
        lines.append(f"global batch {number}: digest {digest % (1 << 64):016x}")
    print(json.dumps(as_json(drawn), indent=1) if args.json else "\n".join(lines))
    return 0


def as_json(drawn: Preview) -> dict[str, Any]:
    """Return a preview as JSON values, with an entry for each rank."""
    ranks = []
    for rank in drawn.ranks:
        place = dict(zip(_PLACE, rank.place.coordinates, strict=True))
        fields = {name: list(shape) for name, shape in rank.shapes.items()}
        rows = {"bytes": rank.num_bytes, "padding": rank.padding, "ids": rank.ids}
        ranks.append({"rank": rank.rank, "node": rank.node, **place, "fields": fields, **rows})
    return {
        "global_batch": drawn.info.global_batch,
        "micro": drawn.info.micro,
        "accumulation": drawn.info.accumulation,
        "steps": drawn.steps,
        "ranks": ranks,
        "traffic": drawn.traffic.tolist(),
        "digests": [f"{digest % (1 << 64):016x}" for digest in drawn.digests],
    }


def _steps(drawn: Preview) -> list[str]:
    """Return the line of the steps by which a replay is made."""
    line = f"made in {len(drawn.steps)} steps: {' -> '.join(drawn.steps)}"
    return textwrap.wrap(line, _WIDTH, subsequent_indent="  ")


def _groups_of_ranks(drawn: Preview) -> list[str]:
    lines = []
    for ranks in grouped(drawn.ranks, lambda rank: (*rank.shapes.items(), rank.num_bytes)):
        shares = [f"{share:.1%}" for share in sorted(rank.padding for rank in ranks)]
        padding = shares[0] if shares[0] == shares[-1] else f"{shares[0]} to {shares[-1]}"
        numbers = [rank.rank for rank in ranks]
        shown = (
            f"ranks {_spans(numbers)} ({len(numbers)})"
            if len(numbers) > 1
            else f"rank {numbers[0]}"
        )
        fields = (
            ", ".join(f"{name}{list(shape)}" for name, shape in ranks[0].shapes.items())
            or "nothing"
        )
        worlds = dict(zip(_PLACE, ranks[0].place.worlds, strict=True))
        places = dict(
            zip(_PLACE, zip(*(rank.place.coordinates for rank in ranks), strict=True), strict=True)
        )
        axes = [axis for axis in _PLACE if worlds[axis] > 1 or axis == "data"]
        spans = [f"{axis} {_spans(set(places[axis]))} of {worlds[axis]}" for axis in axes]
        lines.append(f"{shown}: {', '.join(spans)}")
        lines += textwrap.wrap(fields, _WIDTH, initial_indent="  ", subsequent_indent="  ")
        if ranks[0].shapes:
            size = show_bytes(ranks[0].num_bytes)
            lines.append(f"  {size} a micro batch; padding {padding} of the rows")
    return [*lines, ""]


def _groups_of_nodes(drawn: Preview) -> list[str]:
    """Return a table with one row for all nodes whose ranks get the same numbers of bytes."""
    sizes: dict[int, list[int]] = {}
    for rank in drawn.ranks:
        sizes.setdefault(rank.node, []).append(rank.num_bytes)
    exchanges = len(sizes) > 1
    title = "Micro batches of a node's ranks"
    heads = ["nodes", "ranks each", "size each", "most of a rank"]
    if exchanges:
        title += ", and rows that nodes send and receive for the first global batch"
        heads += ["sent", "most of a node", "received", "most of a node"]
    rows = []
    for nodes in grouped(sizes, lambda node: tuple(sizes[node])):
        equal = sizes[nodes[0]]
        row = [_spans(nodes), str(len(equal)), show_bytes(sum(equal)), show_bytes(max(equal))]
        for axis in (1, 0) if exchanges else ():
            of_nodes = drawn.traffic.sum(axis)[nodes]
            most = int(of_nodes.argmax())
            node = f" (node {nodes[most]})" if of_nodes[most] else ""
            row += [show_bytes(of_nodes.sum()), f"{show_bytes(of_nodes[most])}{node}"]
        rows.append(row)
    lines = [f"{title}:", *grid_of(heads, rows), ""]
    if exchanges:
        a, b = np.unravel_index(int(drawn.traffic.argmax()), drawn.traffic.shape)
        most = int(drawn.traffic[a, b])
        text = f", at most {show_bytes(most)} from node {a} to node {b}" if most else ""
        lines += [f"Rows between all nodes: {show_bytes(drawn.traffic.sum())}{text}.", ""]
    return lines


def _spans(numbers: Iterable[int]) -> str:
    """Format numbers with consecutive ones joined: "0-7, 12"."""
    runs = grouped(enumerate(sorted(numbers)), lambda place: place[1] - place[0])
    return ", ".join(
        f"{run[0][1]}" if len(run) == 1 else f"{run[0][1]}-{run[-1][1]}" for run in runs
    )
