"""What pages say about measurements is what the files of results say."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deepspeed_gear.ops.native_op import CudaOp

Row = dict[str, Any]


def results(checkout: Path, name: str) -> Row:
    found: Row = json.loads((checkout / "benchmarks" / "results" / f"{name}.json").read_text())
    return found


def read(checkout: Path, name: str) -> str:
    """Return the text of a page with the breaks of its lines as spaces."""
    return re.sub(r"\s+", " ", (checkout / name).read_text(encoding="utf-8"))


@pytest.fixture
def pages(checkout: Path) -> dict[str, str]:
    """All pages, by name."""
    names = subprocess.check_output(["git", "ls-files", "*.md"], cwd=checkout, text=True).split()
    return {name: read(checkout, name) for name in names}


# ---- what has run on a GPU -----------------------------------------------------------------------

# Claims that a record of gpu_stages.json or gpu.json contradicts.
CONTRADICTED = [
    r"no figure of a gpu",
    r"lack of a gpu",
    r"without a figure of a gpu",
    r"it has not run yet",
    r"\*\*not run yet",
    r"never (been )?run on a gpu",
]


@pytest.fixture
def commits(checkout: Path) -> dict[str, str]:
    """The commits that a GPU has run, and the digest of the kernel sources of each."""
    figures = results(checkout, "gpu")
    stages = results(checkout, "gpu_stages")
    found = {run["commit"][:8]: run["kernel_sources"] for run in stages["runs"]}
    assert found[figures["commit"][:8]] == figures["kernel_sources"]
    return found


def test_claims_of_a_gpu_name_the_commit_that_ran(
    pages: dict[str, str], commits: dict[str, str]
) -> None:
    claiming = {name for name, text in pages.items() if "H100" in text}
    assert {"README.md", "docs/how-to/gpu.md", "docs/design/0014-kernel-costs.md"} <= claiming
    assert [name for name in claiming if not any(commit in pages[name] for commit in commits)] == []
    for pattern in CONTRADICTED:
        wrong = [name for name, text in pages.items() if re.search(pattern, text, re.IGNORECASE)]
        assert wrong == [], pattern


def test_pages_say_whether_the_kernels_have_changed(
    pages: dict[str, str], commits: dict[str, str]
) -> None:
    """Since the last run on a GPU. Another run replaces the results, and then the sentences."""
    changed = CudaOp().source_digest() not in commits.values()
    for name in ("README.md", "docs/how-to/gpu.md"):
        assert ("kernel sources have changed since" in pages[name]) == changed, name


def test_the_figures_of_a_gpu_are_those_of_the_results(checkout: Path) -> None:
    document = results(checkout, "gpu")
    by_name = {(row["figure"], row["case"], row["what"]): row for row in document["rows"]}

    def of(figure: str, case: str, what: str = "gear") -> Row:
        """Return the row of a figure whose case begins so."""
        same = (row for key, row in by_name.items() if (key[0], key[2]) == (figure, what))
        (found,) = (row for row in same if row["case"].startswith(case))
        return found

    def us(figure: str, *cases: str, form: str = ".1f") -> str:
        """Return the times of several cases; from 100 us on they are shown without a fraction."""
        times = [of(figure, case)["us"] for case in cases]
        return ", ".join(format(time, ".0f" if time >= 100 else form) for time in times)

    one, three = (of("gather", f"{n} column(s), B=131072") for n in (1, 3))
    small_one, small_three = (of("gather", f"{n} column(s), B=4096") for n in (1, 3))
    index = [
        of("gather", row["case"], "torch.index_select")["us"] / row["us"]
        for row in (one, three, small_one, small_three)
    ]
    rows = ("table of 1024 MiB, rows of 256 B", "table of 1024 MiB, rows of 4096 B")
    rows += ("table of 1024 MiB, rows of 65536 B",)
    kernel = [of("host table", case, "zero-copy") for case in rows]
    growth = max(
        row["growth"]
        for key, row in by_name.items()
        if key[0] == "training step beside" and row["what"] == "zero-copy"
    )
    transitions = ("16 transitions", "256 transitions", "1024 transitions")
    environments = ("64 environments", "4096 environments")
    rates = ", ".join(f"{row['gb_per_s']:.1f}" for row in kernel)
    shares = ", ".join(f"{row['fraction']:.2f}" for row in kernel)
    cells = [
        f"{one['us']:.0f} us, {one['of_card']:.2f} of the card's bandwidth; ",
        f"; {three['us']:.0f} us, {three['of_card']:.2f} | 0.85 |",
        f"| the same, beside a copy of as many bytes | {one['fraction']:.2f}; "
        f"{three['fraction']:.2f}",
        f"{small_one['fraction']:.2f}; {small_three['fraction']:.2f} of a copy",
        "{:.0f} and {:.0f} times as long as the large gather, {:.0f} and {:.0f} as the small".format(
            *index
        ),
        f"| draw 1,024 of 2^24 | {us('draw', '1024')} us",
        f"| update 1,024 of 2^24 | {us('update', '1024')} us",
        f"| sample and update, B = 256 | {us('sample and update', 'B=256')} us",
        f"| add 16, 256, 1,024 transitions | {us('add', *transitions)} us",
        f"| the same, with sample and update | {us('add, sample and update', *transitions)} us",
        f"| add a step of 64, of 4,096 environments | {us('add_steps', *environments)} us",
        f"| the same, with sample and update | "
        f"{us('add_steps, sample and update', *environments)} us",
        f"{of('n-step returns', 'n')['us']:.2f}; {of('returns-to-go', '64')['us']:.1f} us",
        f"by kernel | {rates} GB/s: {shares} |",
        f"at most {growth:.1%} longer",
    ]
    text = read(checkout, "docs/how-to/gpu-figures.md")
    assert [cell for cell in cells if cell not in text] == []
    assert document["device"]["name"] in text
    chosen = [
        f"| {one['us']:.0f}; {three['us']:.0f} us |",
        "takes {:.0f} and {:.0f} times as long".format(*index[:2]),
        f"| {small_one['us']:.1f}; {small_three['us']:.1f} us |",
        "| {:.0f} and {:.0f} times as long".format(*index[2:]),
        f"| {us('sample and update', 'B=256')} us |",
    ]
    text = read(checkout, "docs/how-to/gpu.md")
    assert [cell for cell in chosen if cell not in text] == []
    slowest, fastest = (choose(row["gb_per_s"] for row in kernel) for choose in (min, max))
    rates_of_pages = f"{slowest:.0f} to {fastest:.0f} GB/s"
    for name in ("docs/how-to/transfer.md", "docs/design/0009-devices.md"):
        assert rates_of_pages in read(checkout, name), name


# ---- figures of this project and of others -------------------------------------------------------


def one_of(rows: list[Row], **wanted: Any) -> Row:
    """Return the row with these values."""
    (found,) = (row for row in rows if all(row.get(key) == value for key, value in wanted.items()))
    return found


def test_the_figures_of_this_project_are_those_of_the_results(checkout: Path) -> None:
    gather = results(checkout, "gather")["rows"]
    select = results(checkout, "select")["rows"]
    packing = results(checkout, "packing")["rows"]
    ingest = results(checkout, "ingest")["rows"]
    lean = results(checkout, "lean")["rows"]
    exchange = results(checkout, "exchange")["rows"]

    def ms(window: str, what: str, form: str) -> str:
        return (
            format(one_of(gather, workload="W1", window=window, what=what, B=512)["ms"], form)
            + " ms"
        )

    def batch(system: str, sampler: str, size: int, form: str) -> str:
        row = one_of(select, what="batch", system=system, sampler=sampler, B=size)
        return format(row["ms"], form) + " ms"

    def plan(planner: str, count: int, form: str, imbalance: str) -> str:
        row = one_of(packing, what="plan", workload="log-normal", planner=planner, n=count)
        return f"{planner.split()[0]} {row['ms']:{form}} ms, {row['imbalance']:{imbalance}}"

    def added(size: int) -> str:
        return f"| {one_of(ingest, what='add', bytes=size)['ratio']:.2f} of `memcpy`'s rate"

    steps = [
        one_of(lean, algorithm=name, system="gear", flags="")["steps_per_cpu_s"]
        for name in ("dqn", "c51", "td3", "sac", "ppo")
    ]
    exchanged = one_of(exchange, what="prioritized", system="one owner, RPC")["batches_per_s"]
    cells = [
        f"61 bytes) | {ms('whole', 'op', '.2f')}",
        f"`index_select` {ms('whole', 'index_select', '.2f')}",
        f"of the same | {ms('whole', 'sample', '.2f')}",
        f"windows of 20 steps | {ms('20', 'op', '.3f')}",
        f"`index_select` {ms('20', 'index_select', '.3f')}",
        f"of the same | {ms('20', 'sample', '.3f')}",
        f"with its update | {batch('gear', 'prioritized', 256, '.3f')}",
        f"cpprb {batch('cpprb', 'prioritized', 256, '.3f')}",
        f"prioritized batch of 4,096 | {batch('gear', 'prioritized', 4096, '.2f')}",
        f"cpprb {batch('cpprb', 'prioritized', 4096, '.2f')}",
        f"uniform batch of 256 | {batch('gear', 'uniform', 256, '.3f')}",
        plan("AReaL 1.0.4", 1024, ".1f", ".1%"),
        plan("verl 0.9.1", 1024, ".0f", ".1%"),
        plan("AReaL 1.0.4", 4096, ".0f", ".1%"),
        plan("verl 0.9.1", 4096, ".0f", ".1%"),
        f"trajectory of 1.2 MB {added(1_220_000)}",
        f"trajectory of 61 KB {added(61_000)}",
        "a CPU second | "
        + ", ".join(f"{rate:,.0f}" for rate in (*steps[:-1], round(steps[-1], -1))),
        f"one owner with RPC {exchanged:.0f}",
    ]
    text = read(checkout, "docs/performance.md")
    assert [cell for cell in cells if cell not in text] == []


def test_the_packing_plans_are_those_of_the_results(checkout: Path) -> None:
    rows = results(checkout, "packing")["rows"]
    plans = {
        name: one_of(rows, what="plan", workload="log-normal", planner=planner, n=4096)
        for name, planner in (("gear", "gear"), ("AReaL", "AReaL 1.0.4"), ("verl", "verl 0.9.1"))
    }
    gear = plans.pop("gear")
    wanted = f"{gear['ms']:.2f} ms, K {gear['k'][0]}, {gear['imbalance']:.2%} | "
    wanted += "; ".join(
        f"{name} {row['ms']:.0f} ms, {row['imbalance']:.1%}" for name, row in plans.items()
    )
    wanted += f", K {plans['verl']['k'][0]} |"
    assert wanted in read(checkout, "docs/performance.md")


def test_prose_beside_the_comparison_repeats_its_numbers(checkout: Path) -> None:
    us = one_of(
        results(checkout, "peers")["rows"], work="goals by hindsight, B = 256", system="gear"
    )["us"]
    assert f"Of the {us:.0f} us above" in read(checkout, "docs/comparison.md")
    counted = "nine other systems and with NumPy arrays"  # beside this project and the C loop
    assert len(results(checkout, "peers")["systems"]) == 9 + 3
    assert counted in read(checkout, "CHANGELOG.md")


def test_the_device_agents_beside_their_peers_are_those_of_the_results(checkout: Path) -> None:
    rows = results(checkout, "lean")["rows"]

    def cell(algorithm: str, system: str, flags: str) -> str:
        same = {"algorithm": algorithm, "system": system, "flags": flags}
        measured = [row for row in rows if same.items() <= row.items()]
        if algorithm == "ppo":
            measured = [row for row in measured if row["envs"] == 4]
        if not measured:
            return ""
        rate = measured[0]["steps_per_cpu_s"]
        return f"{rate:.0f}" if rate < 1000 else f"{round(rate, -1):,.0f}"

    pages = {
        "gpu.md": [("gear", ""), ("LeanRL", ""), ("CleanRL", "")],
        "gpu-agents.md": [
            (system, flags) for system in ("gear", "LeanRL") for flags in ("", "--compile")
        ]
        + [("CleanRL", "")],
    }
    headers = {"gpu.md": "| this project | LeanRL", "gpu-agents.md": "| these | `--compile`"}
    for page, columns in pages.items():
        shown = table(checkout, f"docs/how-to/{page}", headers[page])
        wanted = [
            [cell(name, system, flags) for system, flags in columns]
            for name in ("dqn", "c51", "td3", "sac", "ppo")
        ]
        assert [row[1:] for row in shown] == wanted, page


# ---- returns of the tutorials --------------------------------------------------------------------


def table(checkout: Path, name: str, header: str) -> list[list[str]]:
    """Return the cells of the table of a page whose header begins so."""
    _, _, below = (checkout / name).read_text(encoding="utf-8").partition(f"\n| {header}")
    assert below, header
    lines = below.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_readme_has_the_returns_of_the_tutorials(checkout: Path) -> None:
    text = read(checkout, "README.md")
    hopper = table(checkout, "docs/tutorials/decision-transformer.md", "seed | before training |")
    before = hopper[0][1]
    last = [f"{int(row[-1]):,}" for row in hopper]
    assert f"the return from {before} to {last[0]} (seeds 1 and 2: {last[1]} and {last[2]})" in text


@pytest.mark.parametrize("page", ["README.md", "docs/how-to/language-models.md"])
def test_pages_have_the_accuracies_of_the_recorded_runs(checkout: Path, page: str) -> None:
    runs = json.loads((checkout / "docs" / "figures" / "grpo.json").read_text())
    before = sorted(run["accuracy_before"] for run in runs)
    after = sorted(run["accuracy_after"] for run in runs)
    text = read(checkout, page)
    assert re.search(f"from {100 * before[0]:.0f} to {before[-1]:.0%} right answers", text)
    assert f"to {100 * after[0]:.0f} to {after[-1]:.0%}" in text
