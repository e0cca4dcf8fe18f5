"""Links between pages lead somewhere, and the README stays short."""

import builtins
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import deepspeed_gear
from deepspeed_gear import errors

MOST_README_LINES = 190


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M):
        text = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
        found.add(text.replace(" ", "-"))
    return found | set(re.findall(r'<a (?:id|name)="([^"]+)"', page.read_text(encoding="utf-8")))


def test_links_lead_somewhere(checkout: Path) -> None:
    pages = subprocess.check_output(["git", "ls-files", "*.md"], cwd=checkout, text=True).split()
    assert len(pages) > 20
    broken = []
    for page in pages:
        folder = (checkout / page).parent
        for target in re.findall(r"\]\(([^)\s]+)\)", (checkout / page).read_text(encoding="utf-8")):
            if target.startswith("http"):
                continue
            path, _, anchor = target.partition("#")
            file = (folder / path).resolve() if path else checkout / page
            if not file.exists():
                broken.append(f"{page}: {target}")
            elif anchor and file.suffix == ".md" and anchor not in anchors(file):
                broken.append(f"{page}: {target} (no such heading)")
    assert broken == []


def test_the_site_and_the_api_reference_build(checkout: Path, tmp_path: Path) -> None:
    """Links lead to files of the site; the API reference has each public name."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    built = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "site" / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    missing = [
        name
        for name in deepspeed_gear.__all__
        if not re.search(rf'id="deepspeed_gear\.([\w.]+\.)?{name}"', page)
    ]
    assert missing == []
    site = tmp_path / "site"
    links = [
        (page, link)
        for page in site.rglob("*.html")
        for link in links_of(page)
        if page.stem != "404"
    ]
    assert len(links) > 1000
    dead = [(page, link) for page, link in links if not (page.parent / link).resolve().exists()]
    assert dead == []
    assert (site / "repository" / "examples" / "ppo.py").exists()
    assert (site / "repository" / "CHANGELOG" / "index.html").exists()
    assert not list(site.rglob("*newcomer*"))


def links_of(page: Path) -> list[str]:
    """Return the paths of a page's relative links and images."""
    found = re.findall(r'(?:href|src)="([^"#?]+)', page.read_text(encoding="utf-8"))
    return [unquote(link) for link in found if not re.match(r"[a-z]+:|/", link)]


def test_the_readme_is_short(checkout: Path) -> None:
    text = (checkout / "README.md").read_text(encoding="utf-8")
    shown = re.sub(r"<!--.*?-->\n", "", text, flags=re.DOTALL)
    assert len(shown.splitlines()) <= MOST_README_LINES


def test_errors_that_the_changelog_names_are_there(checkout: Path) -> None:
    named = set(
        re.findall(r"\b[A-Z]\w*Error\b", (checkout / "CHANGELOG.md").read_text(encoding="utf-8"))
    )
    assert len(named) > 5
    assert [
        name for name in named if not hasattr(errors, name) and not hasattr(builtins, name)
    ] == []
    public = {name for name in vars(errors) if name.endswith("Error")}
    assert public <= set(deepspeed_gear.__all__)


# What programs write, or others have.
NOT_OURS = set(
    "schema.json stats.json position.json manifest.json metadata.json ds_config.json "
    "normalizer.json "
    "gear/whole.json features.json dataset_info.json "
    "result.json stage-A.json runner.py combined_replay.py jsonl_episodes.py".split()
)


def test_files_that_pages_name_are_there(checkout: Path) -> None:
    """A path in backticks is one of the checkout, or its end."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=checkout, text=True).split()
    ends = {"/".join(name.split("/")[at:]) for name in listed for at in range(name.count("/") + 1)}
    pages = [checkout / name for name in listed if name.endswith(".md") and name != "CHANGELOG.md"]
    lost = [
        f"{page.relative_to(checkout)}: {name}"
        for page in pages
        for name in re.findall(
            r"`([\w./-]+\.(?:py|h|cpp|cu|sh|json|md))`", page.read_text(encoding="utf-8")
        )
        if name not in ends | NOT_OURS
    ]
    assert lost == []
