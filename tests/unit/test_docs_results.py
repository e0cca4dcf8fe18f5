"""Pages agree with the files of results: what has run where, and the tables of tutorials.

The numbers themselves: test_docs_numbers.py.
"""

import json
import re
import subprocess
from pathlib import Path
from types import ModuleType
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


@pytest.fixture
def gpu_pages(load: Any) -> ModuleType:
    """The module that writes the pages from the results of a GPU."""
    return load("gpu_pages")


def test_pages_say_whether_the_kernels_have_changed(
    pages: dict[str, str], commits: dict[str, str], gpu_pages: ModuleType, checkout: Path
) -> None:
    """Beside each claim, since the runs that it names: `python benchmarks/gpu_results.py`."""
    ran = gpu_pages.runs()
    assert {commit: {digest} for commit, digest in commits.items()}.items() <= ran.items()
    digest = CudaOp().source_digest()
    for name in pages:
        text = (checkout / name).read_text(encoding="utf-8")
        assert gpu_pages.marked(text, ran, digest) == text, name
        if "H100" in text:
            assert gpu_pages.MARK.search(text), f"{name} must have a mark beside its claim"
        assert "\n<!-- since" not in re.sub(r"\n +", "\n", text), f"{name}: HTML, no sentence"


def test_a_sentence_is_there_exactly_when_no_run_had_the_sources(gpu_pages: ModuleType) -> None:
    ran = {"00000000": {"old"}, "11111111": {"new"}}
    text = "It passed. <!-- since 00000000{} -->{}<!-- end since -->"
    stale = text.format("", gpu_pages.CHANGED)
    assert gpu_pages.marked(text.format("", ""), ran, "new") == stale
    assert gpu_pages.marked(stale, ran, "old") == text.format("", "")
    both = text.format(" 11111111", gpu_pages.CHANGED)
    assert gpu_pages.marked(both, ran, "new") == text.format(" 11111111", "")
    with pytest.raises(KeyError):
        gpu_pages.marked(text.format(" 22222222", ""), ran, "new")


def test_a_recorded_digest_is_that_of_its_commit(
    checkout: Path, commits: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the clone has the commit."""
    for commit, digest in commits.items():
        archive = ["git", "archive", "--format=tar", commit, "ops/csrc"]
        found = subprocess.run(archive, cwd=checkout, capture_output=True)
        if found.returncode != 0:
            pytest.skip(f"{commit} is not in this clone")
        folder = tmp_path / commit
        folder.mkdir()
        subprocess.run(["tar", "-x", "-C", str(folder)], input=found.stdout, check=True)
        op = CudaOp()
        monkeypatch.setattr(op, "csrc", folder / "ops" / "csrc")
        assert op.source_digest() == digest


def test_the_tables_of_a_gpu_are_those_of_the_results(
    checkout: Path, gpu_pages: ModuleType
) -> None:
    text = (checkout / gpu_pages.PAGE).read_text(encoding="utf-8")
    tables = {gpu_pages.BEGIN: gpu_pages.peers_table(), gpu_pages.AGENTS: gpu_pages.agents_table()}
    ran = gpu_pages.runs()
    for begin, table in tables.items():
        shown = text.split(begin)[1].split(gpu_pages.END)[0]
        assert shown == gpu_pages.marked(table, ran, CudaOp().source_digest())


def test_the_page_of_a_gpu_names_the_card(checkout: Path) -> None:
    document = results(checkout, "gpu")
    assert document["device"]["name"] in read(checkout, "docs/how-to/gpu-figures.md")


# ---- the comparison with others ------------------------------------------------------------------


def test_the_changelog_counts_the_other_systems(checkout: Path) -> None:
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
