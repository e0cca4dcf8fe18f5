"""Write the results into docs/performance-appendix.md, so that its tables are what the JSON files say.

python benchmarks/tables.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support import ROOT

RESULTS = Path(__file__).resolve().parent / "results"
TARGET = ROOT / "docs" / "performance-appendix.md"
Rows = list[dict[str, Any]]


def _table(rows: Rows, columns: Sequence[tuple[str, str, str]]) -> str:
    """Format rows by columns of title, key and format; an absent value is an empty cell."""
    lines = [[title for title, _, _ in columns], ["---"] * len(columns)]
    lines += [[_cell(row.get(key), form) for _, key, form in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any, form: str) -> str:
    if value is None:
        return ""
    return {True: "yes", False: "**no**"}[value] if isinstance(value, bool) else format(value, form)


def _where(name: str) -> str:
    document = json.loads((RESULTS / f"{name}.json").read_text())
    machine, meanwhile, versions = document["machine"], document["disturbance"], document["versions"]
    commit = document["commit"][:12] + document["commit"][40:]  # "+": with changes
    return (
        f"`{document['command']}`, {document['date']}, commit {commit}, {machine['cpu']}, "
        f"{machine['cores']} cores, torch {versions['torch']}. Meanwhile other processes used "
        f"{meanwhile['other_cores']} cores."
    )


def one_thread(rows: Rows) -> str:
    """Return milliseconds and ratios of the op, of sample() and of torch's gather."""
    lines = []
    for op in (row for row in rows if row["what"] == "op"):
        same = {r["what"]: r for r in rows if all(r[k] == op[k] for k in ("workload", "window", "B"))}
        sample = same["sample"]
        more = {"sample_ms": sample["ms"], "sample_ratio": sample["ratio"], "above": sample["above_op_us"]}
        lines.append({**op, **more, "torch": same["index_select"]["ratio"]})
    columns = [("workload", "workload", ""), ("window", "window", ""), ("B", "B", ",d")]
    columns += [("limit ms", "limit_ms", ".4f"), ("op ms", "ms", ".4f"), ("op / limit", "ratio", ".2f")]
    columns += [("bound", "bound", "g"), ("holds", "holds", ""), ("sample() ms", "sample_ms", ".4f")]
    columns += [("sample() / limit", "sample_ratio", ".2f"), ("sample() - op, us", "above", ".0f")]
    return _table(lines, [*columns, ("index_select / limit", "torch", ".2f")])


def fixed_cost(rows: Rows) -> str:
    """Return the parts of a sample that are not the op, and other calls."""
    columns = [("part", "part", ""), ("warm, us", "warm_us", ".1f"), ("cold, us", "cold_us", ",.0f")]
    parts = _table([row for row in rows if "part" in row], columns)
    columns = [
        ("call", "call", ""),
        ("us", "us", ",.0f"),
        ("bound, us", "bound", ",.0f"),
        ("holds", "holds", ""),
    ]
    return f"{parts}\n\n{_table([row for row in rows if 'call' in row], columns)}"


def at_once(rows: Rows) -> str:
    """Return the rates of two ranks, and the spread with busy cores."""
    case = [("workload", "workload", ""), ("window", "window", ""), ("B of a rank", "B", ",d")]
    ranks = [("limit ms", "limit_ms", ".3f"), ("sample() ms", "ms", ".3f")]
    ranks += [("rate / limit's rate", "rate_ratio", ".2f"), (">= 0.9", "holds", "")]
    busy = [("median ms", "ms", ".3f"), ("p99 ms", "p99_ms", ".2f"), ("p99 / median", "tail", ".1f")]
    busy += [("memcpy's p99 / median", "limit_tail", ".1f"), ("<= 10", "holds", "")]
    first = _table([row for row in rows if row["what"] == "two_ranks"], [*case, *ranks])
    second = _table([row for row in rows if row["what"] == "busy"], [*case, *busy])
    return f"Two ranks at once:\n\n{first}\n\nOne rank, every core busy with other processes:\n\n{second}"


def memory(rows: Rows) -> str:
    """Return the bounds of memory."""
    plain = ("what", "value", "bound", "holds")
    for row in rows:
        row["more"] = ", ".join(f"{key} {value}" for key, value in row.items() if key not in plain)
    columns = [("what", "what", ""), ("value", "value", ".3g"), ("bound", "bound", "g")]
    return _table(rows, [*columns, ("holds", "holds", ""), ("more", "more", "")])


def starvation(rows: Rows) -> str:
    """Return the chi-square tests."""
    columns = [("what", "what", ""), ("items", "items", ",d"), ("draws an item", "draws_per_item", "g")]
    columns += [("chi2", "chi2", ",.0f"), ("p", "p", ".3g"), ("smallest count", "smallest", "d")]
    columns += [("typical smallest", "smallest_expected", "d"), ("largest", "largest", "d")]
    return _table(rows, [*columns, ("never drawn", "starved", ",d"), ("holds", "holds", "")])


def determinism(rows: Rows) -> str:
    """Return how many variants gave the same batches."""
    lines = []
    for sampler in dict.fromkeys(row["sampler"] for row in rows):
        mine = [row for row in rows if row["sampler"] == sampler]
        digests = [
            next(r["digest"] for r in mine if r["seed"] == s)[:8] for s in sorted({r["seed"] for r in mine})
        ]
        holding = sum(row["equal"] for row in mine)
        lines.append(
            {"sampler": sampler, "digests": ", ".join(digests), "checks": len(mine), "hold": holding}
        )
    columns = [("sampler", "sampler", ""), ("sha256 by seed", "digests", ""), ("checks", "checks", "d")]
    return _table(lines, [*columns, ("hold", "hold", "d")])


def selection(rows: Rows) -> str:
    """Return the times of prioritized and uniform batches, and how they grow with the number of items."""
    of = {what: [row for row in rows if row["what"] == what] for what in {row["what"] for row in rows}}
    case = [("sampler", "sampler", ""), ("B", "B", ",d")]
    judged = [("judged", "judged", ".2f"), ("bound", "bound", ".3g"), ("holds", "holds", "")]
    batch = [("system", "system", ""), *case, ("ms", "ms", ".3f"), ("limit ms", "limit_ms", ".3f")]
    batch += [("ms / limit", "ratio", ".2f"), ("ms / gear's", "times_as_long_as_gear", ".2f")]
    ranks = [*case, ("ranks", "ranks", "d"), ("batches/s of all", "batches_per_s", ",.0f")]
    ranks += [("limit ms", "limit_ms", ".4f"), ("ms", "ms", ".4f"), *judged[1:]]
    memory = [("sampler", "sampler", ""), ("store bytes", "store_bytes", ",.0f")]
    memory += [("payload bytes", "payload_bytes", ",.0f"), ("store / payload", "judged", ".2f"), *judged[1:]]
    updates = {row["items"]: row["us"] for row in of["update"]}
    growth = [{**row, "update_us": updates[row["items"]]} for row in of["draw"]]
    grown = [("items", "items", ",d"), ("us a draw", "us", ".3f"), ("us an update", "update_us", ".3f")]
    grown += [("draw / first draw", "judged", ".2f"), *judged[1:]]
    top = [("k", "B", ",d"), ("items", "items", ",d"), ("ms", "ms", ".2f"), *judged[1:]]
    parts = {
        "One thread (cpprb is judged by gear's time over its own):": _table(of["batch"], [*batch, *judged]),
        "Ranks at once on one store (bound: ms over the batches of all):": _table(of.get("ranks", []), ranks),
        "Memory:": _table(of["memory"], memory),
        "Growth, batches of 4,096:": _table(growth, grown),
        "The highest priorities:": _table(of["top_k"], top),
    }
    return "\n\n".join(f"{title}\n\n{table}" for title, table in parts.items())


def scale(rows: Rows) -> str:
    """Return the time of a plan by its parts, the bytes of nodes, and the predicted exchanges."""
    size = [("nodes", "nodes", ",d"), ("samples", "samples", ",d")]
    time = [("plan ms", "plan_ms", ".2f"), ("warm ms", "warm_ms", ".2f")]
    time += [("us a sample", "us_a_sample", ".3f"), ("bound ms", "bound_ms", "g"), ("holds", "holds", "")]
    sent = [("a node, bytes", "node_bytes", ",.0f"), ("busiest node", "node_most_bytes", ",.0f")]
    sent += [("a pair, bytes", "link_bytes", ",.0f"), ("busiest pair", "link_most_bytes", ",.0f")]
    sent += [("sent, most / mean", "sent_imbalance", ".2f"), ("received", "received_imbalance", ".2f")]
    several = [row for row in rows if row["nodes"] > 1]
    lines = [
        {**row, **{f"{each['gbit']:g} {key}": each[key] for each in row["exchange"] for key in each}}
        for row in several
    ]
    speeds = [f"{each['gbit']:g}" for each in rows[-1]["exchange"]]
    wire = [
        (f"{speed} Gbit/s, {key}, ms", f"{speed} {key}_ms", ".2f")
        for speed in speeds
        for key in ("least", "most")
    ]
    last = [{"part": part, "ms": ms} for part, ms in rows[-1]["parts_ms"].items()]
    parts = {
        "": _table(rows, [*size, *time]),
        f"Parts at {rows[-1]['nodes']:,} nodes:": _table(last, [("part", "part", ""), ("ms", "ms", ".2f")]),
        "What is sent for a global batch:": _table(several, [*size, *sent]),
        "Predicted time of a selection's exchanges:": _table(lines, [*size, *wire]),
    }
    return "\n\n".join(f"{title}\n\n{table}".lstrip() for title, table in parts.items())


def exchange(rows: Rows) -> str:
    """Return what a replay over several nodes costs."""
    of = {what: [row for row in rows if row["what"] == what] for what in {row["what"] for row in rows}}
    case = [("workload", "workload", ""), ("window", "window", ""), ("B of a rank", "B", ",d")]
    judged = [("judged", "judged", ".3g"), ("bound", "bound", ",.3g"), ("holds", "holds", "")]
    carried = [
        *case,
        ("bytes", "bytes", ",.0f"),
        ("selection ms", "cut_ms", ".2f"),
        ("rows ms", "carry_ms", ".2f"),
    ]
    carried += [("of it messages ms", "swap_ms", ".2f"), ("all_to_all_single ms", "bare_ms", ".2f")]
    carried += [("isend, irecv ms", "pairs_ms", ".2f"), ("rows MB/s", "mb_per_s", ",.1f")]
    spread = [("least", "least", ".2f"), ("most", "most", ".2f")]
    carried += [("all_to_all_single MB/s", "bare_mb_per_s", ",.1f"), *spread, *judged]
    owned = [
        ("system", "system", ""),
        ("B of a rank", "B", ",d"),
        ("batches/s of all", "batches_per_s", ",.0f"),
    ]
    owned += [("in step", "in_step_per_s", ",.0f"), *spread, *judged, ("exchanges", "num_exchanges", ".1f")]
    owned += [("selection ms", "cut_ms", ".2f"), ("of it exchanges ms", "exchanges_ms", ".2f")]
    counted = [*case, ("rows needed", "needed", ",.0f"), ("remote samples", "remote", ",.0f")]
    counted += [("sent", "sent", ",.0f"), ("on the wire", "wire", ",.0f"), ("bound", "bound", ",.0f")]
    counted += judged[2:]
    items = [("items", "items", ",d"), ("sent", "sent", ",.0f"), ("sent / first sent", "judged", ".3f")]
    kinds = [key for key in of["messages"][0] if key.endswith(" ms")]
    sent = [("nodes", "nodes", "d"), ("bytes", "bytes", ",d"), *((kind, kind, ".3f") for kind in kinds)]
    trained = [("prefetch", "prefetch", "d"), ("step ms", "step_ms", ".1f"), ("wait ms", "wait_ms", ".2f")]
    trained += [("sample ms", "sample_ms", ".1f"), ("B of a rank", "batch", ".0f"), *judged]
    grown = [("nodes", "nodes", "d"), ("B of a rank", "B", ",d"), ("batch ms", "sample_ms", ".2f")]
    grown += [("plan ms", "plan_ms", ".2f"), ("predicted ms", "predicted_ms", ".2f")]
    grown += [("a node sent", "sent", ",.0f"), ("predicted", "predicted_sent", ",.0f")]
    parts = {
        "Rows of a batch against bare messages of as many bytes (judged: all_to_all_single ms / rows ms):": (
            _table(of["bandwidth"], carried)
        ),
        "Prioritized batches with updates (judged: batches/s over those of one owner):": (
            _table(of["prioritized"], owned)
        ),
        "Bytes of a global batch, sent by all nodes:": _table(of["bytes"], counted),
        "Bytes of a prioritized selection without the rows:": _table(of["selection"], [*items, *judged[1:]]),
        "Messages to every other node:": _table(of["messages"], sent),
        "Batches of windows of 20 steps, and what benchmarks/scale.py predicts:": _table(of["growth"], grown),
        "Training (judged: wait / step):": _table(of["training"], trained),
    }
    return "\n\n".join(f"{title}\n\n{table}" for title, table in parts.items())


def ingest(rows: Rows) -> str:
    """Return how fast trajectories, steps and actions come, and what that costs who samples."""
    of = {what: [row for row in rows if row["what"] == what] for what in {row["what"] for row in rows}}
    judged = [("judged", "judged", ",.3g"), ("bound", "bound", ",g"), ("holds", "holds", "")]
    added = [("bytes", "bytes", ",d"), ("added/s", "adds_per_s", ",.0f"), ("MB/s", "mb_per_s", ",.0f")]
    added += [("memcpy/s", "memcpys_per_s", ",.0f"), *judged]
    stepped = [("system", "system", ""), ("steps/s", "steps_per_s", ",.0f"), *judged]
    paired = [
        ("writers / one", "times_one", ".2f"),
        ("memcpy loops / one", "memcpy_times_one", ".2f"),
        *judged,
    ]
    read = [("us alone", "quiet_us", ".0f"), ("us beside a writer", "busy_us", ".0f"), *judged]
    asked = [("simulators", "simulators", "d"), ("actions/s", "actions_per_s", ",.0f")]
    asked += [("round us", "round_us", ".0f"), ("wait us", "wait_us_median", ".0f"), *judged]
    parts = {
        "Whole trajectories (judged: added/s over memcpy/s):": _table(of["add"], added),
        "Steps of 8 environments at once:": _table(of["steps"], stepped),
        "Two writers at once (judged: the two ratios):": _table(of["two writers"], paired),
        "sample() of 256 windows of 20 steps (judged: beside a writer / alone):": _table(of["reader"], read),
        "Simulators that ask a policy in another process for actions:": _table(of["inference"], asked),
    }
    return "\n\n".join(f"{title}\n\n{table}" for title, table in parts.items())


def adding(rows: Rows) -> str:
    """Return how long a step takes to be added."""
    case = [("case", "case", ""), ("system", "system", ""), ("us a step", "step_us", ".1f")]
    alone = [*case, ("x NumPy ring", "x_ring", ".2f"), ("steps/s", "steps_per_s", ",.0f")]
    judged = [("bound, us", "bound", ".0f"), ("holds", "holds", "")]
    parts = {
        "Steps alone:": _table([row for row in rows if "x_ring" in row], [*alone, *judged]),
        "Steps and batches of one process, in turns:": _table(
            [row for row in rows if "sample_us" in row], [*case, ("us a batch", "sample_us", ".0f")]
        ),
    }
    return "\n\n".join(f"{title}\n\n{table}" for title, table in parts.items())


def packing(rows: Rows) -> str:
    """Return the plans of all planners, what is required of ours, and the time of a micro batch."""
    of = {what: [row for row in rows if row["what"] == what] for what in {row["what"] for row in rows}}
    for row in of["plan"]:
        row["ks"], row["leasts"] = (", ".join(map(str, row.get(key) or ())) for key in ("k", "least"))
        row["broken"] = row.get("error") or ", ".join(f"{row[k]} {k}" for k in ("over", "empty") if row[k])
    case = [("workload", "workload", ""), ("N", "n", ",d"), ("ranks", "width", "d")]
    plans = [*case, ("planner", "planner", ""), ("least K", "leasts", ""), ("K", "ks", "")]
    plans += [("imbalance", "imbalance", ".2%"), ("fill", "fill", ".1%"), ("ms", "ms", ".2f")]
    plans += [("ms of a rank", "rank_ms", ".2f"), ("packs that are", "broken", "")]
    required = [*case, ("figure", "figure", ""), ("judged", "judged", ".4g"), ("bound", "bound", "g")]
    micro = [("fields", "case", ""), ("memcpy us", "limit_us", ".0f"), ("op us", "op_us", ".0f")]
    micro += [("op / memcpy", "op_ratio", ".2f"), ("bound", "bound", "g"), ("holds", "holds", "")]
    micro += [("micro batch us", "micro_us", ".0f"), ("less the op us", "over_us", ".0f")]
    micro += [("bound us", "over_bound", ".0f"), ("holds ", "over_holds", "")]
    parts = {
        "Plans, means of three seeds (least K: a lower bound of each seed):": _table(of["plan"], plans),
        "What is required of this planner:": _table(of["bound"], [*required, ("holds", "holds", "")]),
        "A micro batch of 16,384 tokens:": _table(of["micro"], micro),
    }
    return "\n\n".join(f"{title}\n\n{table}" for title, table in parts.items())


def lean(rows: Rows) -> str:
    """Return steps per second of the device examples and of their peers' programs."""
    case = [("algorithm", "algorithm", ""), ("system", "system", ""), ("environment", "env", "")]
    case += [("envs", "envs", "d"), ("flags", "flags", "")]
    speed = [
        ("steps / CPU s", "steps_per_cpu_s", ",.0f"),
        ("least", "least", ",.0f"),
        ("most", "most", ",.0f"),
    ]
    speed += [("steps / s", "steps_per_s", ",.0f")]
    return _table(rows, [*case, *speed])


TABLES: dict[str, tuple[str, Callable[[Rows], str]]] = {
    "one thread": ("gather", one_thread),
    "fixed cost": ("fixed_cost", fixed_cost),
    "at once": ("gather", at_once),
    "memory": ("memory", memory),
    "starvation": ("starvation", starvation),
    "determinism": ("determinism", determinism),
    "select": ("select", selection),
    "scale": ("scale", scale),
    "exchange": ("exchange", exchange),
    "ingest": ("ingest", ingest),
    "adding": ("adding", adding),
    "packing": ("packing", packing),
    "lean": ("lean", lean),
}


def fill(text: str) -> str:
    """Return a page with the tables between its marks `<!-- name -->` and `<!-- / -->` made anew."""
    for name, (file, make) in TABLES.items():
        begin, end = f"<!-- {name} -->\n", "<!-- / -->"
        if text.count(begin) != 1:
            raise ValueError(f"{TARGET} must have one place for {name!r}, has {text.count(begin)}")
        before, behind = text.split(begin)
        rows = json.loads((RESULTS / f"{file}.json").read_text())["rows"]
        block = f"{_where(file)}\n\n{make(rows)}\n"
        text = before + begin + block + behind[behind.index(end) :]
    return text


def main() -> None:
    """Run from the command line; with --check the exit code is 1 if the page is out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    before = TARGET.read_text()
    after = fill(before)
    if options.check:
        sys.exit(0 if after == before else f"{TARGET} is not what the results say; run benchmarks/tables.py")
    TARGET.write_text(after)


if __name__ == "__main__":
    main()
