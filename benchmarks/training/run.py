"""Train and collect from nodes, this project and Reverb in turns; write results/nodes.json and its
page.

    bash benchmarks/nodes.sh [--quick] [--rate RATE]      writes nothing with --quick

Each node is a namespace of this machine with a link of a limited rate, and has a rank of every
system. All ranks of a system train the same model on batches of whole trajectories; systems and
their ways take turns.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from support.nodes import Nodes, nodes, why_no_nodes
from support.report import Disturbance, Row, document, write_json
from peers import limit
from peers.environments import ROOT, interpreters
from peers.orders import Child, streams
from speed import work

from training.gear import write as write_dataset
from training.model import BYTES, MODES
from training.table import tables, write

COLLECTION = "collection"  # a point without a model
PORTS = {"gear": 29500, "reverb": 29600}
Systems = dict[str, "Ranks"]


class Sizes(NamedTuple):
    """What is trained and collected."""

    count: int = 1_800
    batch: int = 1024  # of each rank
    num_nodes: tuple[int, ...] = (1, 2, 3)
    collected: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    turns: int = 5
    turn_s: float = 1.0


QUICK = Sizes(count=120, batch=32, num_nodes=(1, 2), collected=(32, 64), turns=2, turn_s=0.1)


class Rank(Child):
    """A system's process in a node; takes orders as those of the comparison of speed."""

    def __init__(
        self, run: Nodes, rank: int, system: str, python: Path | str, *arguments: str
    ) -> None:
        environment = {**run.of_rank(rank, run.count, PORTS[system]), "TF_CPP_MIN_LOG_LEVEL": "3"}
        environment["PYTHONPATH"] += f":{ROOT / 'benchmarks'}"
        command = [python, "-m", "training.rank", system, *arguments]
        self.process = run.open(rank, *command, env=environment, text=True, **streams())


class Ranks:
    """All ranks of a system, which get the same order at once."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self._pool = ThreadPoolExecutor(len(ranks))

    def order(self, do: str, **options: Any) -> list[Row]:
        """Return every rank's answer; raise RuntimeError if one failed."""
        answers = list(self._pool.map(lambda rank: rank.order(do, **options), self.ranks))
        failed = [answer["left out"] for answer in answers if "left out" in answer]
        if failed:
            raise RuntimeError(f"{do}: {failed[0]}; PEERS_VERBOSE=1 shows more")
        return answers

    def turn(self, **options: Any) -> Row:
        """Train or collect; the time is that of the last rank."""
        found = self.order("turn", **options)
        return {
            **found[0],
            "s": max(one["s"] for one in found),
            "cpu_s": sum(one["cpu_s"] for one in found),
        }


def measured(
    systems: Systems, points: list[str], sizes: Sizes, batch: int, modes: int
) -> Iterator[Row]:
    """Open so many ways of each system and time them in turns; yield a row of each at
    each point.
    """
    ways: list[tuple[Ranks, Row]] = []
    for name, ranks in systems.items():
        for mode in MODES[name][:modes]:
            opened = ranks.order("open", mode=mode, batch=batch)
            others = float(np.mean([one.pop("others") for one in opened]))
            ways.append(
                (
                    ranks,
                    {"system": name, "mode": mode, "fresh": True, "others": others, **opened[0]},
                )
            )
    if points != [COLLECTION]:  # what training takes without any data
        ways.append((ways[0][0], {**ways[0][1], "fresh": False, "others": 0.0}))
    for point in points:
        asked = [{"mode": way["mode"], "fresh": way["fresh"], "point": point} for _, way in ways]
        for (ranks, _), what in zip(ways, asked, strict=True):  # also a warm-up
            steps = 1
            while (once := ranks.turn(**what, steps=steps)["s"]) < sizes.turn_s / 4:
                steps *= 4
            what["steps"] = max(2, round(steps * sizes.turn_s / once))
        turns: list[list[Row]] = [[] for _ in ways]
        for _ in range(sizes.turns):
            for (ranks, _), what, found in zip(ways, asked, turns, strict=True):
                found.append(ranks.turn(**what))
        for (ranks, way), what, found in zip(ways, asked, turns, strict=True):
            size = what["steps"] * len(ranks.ranks) * batch * BYTES
            rates = np.percentile([size / one["s"] / 1e6 for one in found], (50, 25, 75)).tolist()
            cpu = float(np.median([one["cpu_s"] for one in found])) / size * 1e9
            row = {
                "point": point,
                "nodes": len(ranks.ranks),
                "B": batch,
                **way,
                "steps": what["steps"],
            }
            row |= {"mb_per_s": rates[0], "quartiles": rates[1:], "cpu_s_per_gb": cpu}
            yield {**row, "loss": found[-1]["loss"]}
    for ranks, way in ways:
        if way["fresh"]:
            ranks.order("close", mode=way["mode"])


def on_nodes(systems: Systems, sizes: Sizes, count: int) -> Iterator[Row]:
    """Train on these nodes, and collect on a single one."""
    if count > 1:
        seconds = min(systems["gear"].order("network", size=1 << 26)[0]["s"] for _ in range(3))
        yield {"point": "network", "nodes": count, "mb_per_s": (1 << 26) / seconds / 1e6}
    yield from measured(systems, ["data", "compute"], sizes, sizes.batch, 1 if count == 1 else 3)
    for batch in sizes.collected if count == 1 else ():
        yield from measured(systems, [COLLECTION], sizes, batch, 1)
        copied = limit.windows(sizes.count * work.EPISODE, batch, work.EPISODE)  # 61 bytes a step
        rate = 61 * work.EPISODE * batch / copied.block(sizes.turn_s)["us"]
        yield {"point": COLLECTION, "nodes": 1, "B": batch, "system": "limit", "mb_per_s": rate}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--rate", default="10gbit", help="of what each node sends, as tc takes it")
    options = parser.parse_args()
    pythons, absent = interpreters(PORTS)
    reason = why_no_nodes() or absent.get("reverb")
    if reason:
        sys.exit(f"nodes.sh: cannot run on this machine: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("nodes.sh: ended"))  # takes the nodes down
    disturbance = Disturbance()
    rows = []
    sizes = QUICK if options.quick else Sizes()
    with tempfile.TemporaryDirectory(prefix="gear-nodes-") as name:
        arguments = str(Path(name) / "set"), str(sizes.count)
        write_dataset(Path(arguments[0]), sizes.count)
        for count in sizes.num_nodes:
            with nodes(count) as run:  # ranks end with their nodes
                run.limit_rate(options.rate)
                systems = {}
                for system, python in pythons.items():
                    ranks = [Rank(run, rank, system, python, *arguments) for rank in range(count)]
                    systems[system] = Ranks(ranks)
                for row in on_nodes(systems, sizes, count):
                    rows.append(row)
                    print(row, file=sys.stderr, flush=True)
    content = document(disturbance, rows, rate=options.rate, command="bash benchmarks/nodes.sh")
    print(tables(content))
    if not options.quick:
        result = ROOT / "benchmarks" / "results" / "nodes.json"
        write_json(result, content)
        write(result)


if __name__ == "__main__":
    main()
