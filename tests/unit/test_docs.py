"""Links between pages lead somewhere, and the README stays short."""

import ast
import builtins
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest
from gear_support import load_script

import deepspeed_gear
from deepspeed_gear import errors

MOST_README_LINES = 110


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


def build_site(checkout: Path, folder: Path, pages: Path) -> Path:
    """Build a site of assembled pages with the options of mkdocs.yml; return its folder."""
    options = (checkout / "mkdocs.yml").read_text(encoding="utf-8")
    moved = (
        ("docs_dir: build/pages", f"docs_dir: {pages}"),
        ("[.]", f"[{checkout}]"),
        ("[docs/hooks/", f"[{checkout}/docs/hooks/"),
    )
    for old, new in moved:
        assert old in options
        options = options.replace(old, new)
    (folder / "mkdocs.yml").write_text(options, encoding="utf-8")
    site = folder / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stderr
    return site


@pytest.mark.timeout(1200)  # a browser opens every page
def test_the_site_and_the_api_reference_build(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links lead to files of the site, the API reference has each public name, and no element
    leaves its page, if there is a Chromium to look with.
    """
    monkeypatch.syspath_prepend(str(checkout / "docs" / "hooks"))
    site_pages = importlib.import_module("site_pages")
    site_pages.assemble(tmp_path / "pages")
    build_site(checkout, tmp_path, tmp_path / "pages")
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
    start = (site / "index.html").read_text(encoding="utf-8")
    tabs = [
        re.sub(r"<.*?>", "", label)
        for label in re.findall(r"<label for=[^>]*>(.*?)</label>", start)
    ]
    assert {"Offline", "Online", "Language models"} <= set(tabs)
    assert (site / "repository" / "examples" / "ppo.py").exists()
    assert (site / "repository" / "CHANGELOG" / "index.html").exists()
    assert not list(site.rglob("*newcomer*"))
    look = importlib.import_module("look")
    browser = look.chromium()
    if browser is None:
        return
    wide = site / "wide" / "index.html"
    wide.parent.mkdir()
    wide.write_text("<article><div style='width:1300px'>wide</div></article>", encoding="utf-8")
    found = [(row["page"], row["width"]) for row in look.overflows(site, browser)]
    assert found == [("/wide", 1280), ("/wide", 390)]


def test_sections_of_public_docstrings_are_read_as_sections(checkout: Path) -> None:
    """Returns, raises and the like are sections of the API reference, not text of a paragraph."""
    griffe = pytest.importorskip("griffe")
    extension = checkout / "docs" / "hooks" / "docstring_sections.py"
    package = griffe.load(
        "deepspeed_gear",
        search_paths=[checkout],
        allow_inspection=False,
        extensions=griffe.load_extensions(str(extension)),
        docstring_parser="google",
        docstring_options={"returns_multiple_items": False, "returns_named_value": False},
    )
    kinds = {"Args": "parameters", "Attributes": "attributes", "Returns": "returns"}
    kinds |= {"Yields": "yields", "Raises": "raises"}
    wrong = []
    seen = 0
    waiting = [package[name] for name in deepspeed_gear.__all__]
    while waiting:
        thing = waiting.pop()
        thing = thing.final_target if thing.is_alias else thing
        if thing.is_class:
            waiting += [own for own in thing.members.values() if not own.name.startswith("_")]
        if thing.docstring is None:
            continue
        parsed = [section.kind.value for section in thing.docstring.parsed]
        for title in re.findall(r"^(\w+):$", thing.docstring.value, re.MULTILINE):
            seen += 1
            if title in kinds and kinds[title] not in parsed:
                wrong.append(f"{thing.path}: {title}")
    assert seen > 100
    assert wrong == []
    sections = package["batching.batch.Batch.__getitem__"].docstring.parsed
    assert [section.kind.value for section in sections] == ["text", "parameters", "raises", "text"]
    assert sections[-1].value.startswith("Cost: ")


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
    "normalizer.json gear/whole.json features.json dataset_info.json result.json stage-A.json "
    "runner.py combined_replay.py jsonl_episodes.py".split()
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


def members_of_classes(package: Path) -> dict[str, set[str]]:
    """Return methods, fields and attributes of each class of the package, inherited ones too."""
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            own = members.setdefault(node.name, set())
            bases.setdefault(node.name, set()).update(
                name.id
                for base in node.bases
                for name in ast.walk(base)
                if isinstance(name, ast.Name)
            )
            for child in ast.walk(node):
                if isinstance(child, ast.FunctionDef):
                    own.add(child.name)
                elif isinstance(child, ast.Attribute):
                    own.add(child.attr)
                elif isinstance(child, ast.Name):
                    own.add(child.id)
    for _ in range(5):  # more than any class has bases above one another
        for name, above in bases.items():
            members[name].update(*(members.get(base, set()) for base in above))
    return members


# Of other libraries that have a class of this name.
METHODS_OF_OTHERS = {"TrajectoryWriter.append"}


def test_methods_that_pages_name_are_there(checkout: Path) -> None:
    """`Class.name` in backticks is a method or an attribute of a class of the package, if it has
    such a class.
    """
    members = members_of_classes(checkout / "deepspeed_gear")
    listed = subprocess.check_output(["git", "ls-files", "docs", "*.md"], cwd=checkout, text=True)
    lost = []
    for page in listed.split():
        if not page.endswith(".md") or page == "CHANGELOG.md":
            continue
        text = re.sub(r"^```.*?^```", "", (checkout / page).read_text(), flags=re.M | re.DOTALL)
        for owner, name in re.findall(r"`([A-Z]\w+)\.([a-z_]\w*)", text):
            known = f"{owner}.{name}" in METHODS_OF_OTHERS or owner not in members
            if not known and name not in members[owner]:
                lost.append(f"{page}: {owner}.{name}")
    assert lost == []


# Of other libraries, of the kernel and of CUDA, and a function of mathematics.
NAMES_OF_OTHERS = set(
    "MADV_WILLNEED coalesce_grad_reduction cuMemcpyBatchAsync custom_op do_put find_class log32 "
    "nvvm round_robin_gradients set_gradient_accumulation_boundary set_requires_gradient_sync".split()
)


def test_names_of_the_design_are_there(checkout: Path) -> None:
    """Each name in backticks is a name, a value or a file of the sources."""
    listed = subprocess.check_output(["git", "ls-files"], cwd=checkout, text=True).split()
    pages = [
        name for name in listed if re.match(r"docs/(design/|glossary)|benchmarks/README", name)
    ]
    kinds = (".py", ".h", ".cuh", ".cpp", ".cu", ".c", ".sh", ".toml", ".yml")
    sources = [name for name in listed if name.endswith(kinds) and not name.startswith("docs/")]
    known = {Path(name).stem for name in listed} | NAMES_OF_OTHERS
    for name in sources:
        known.update(re.findall(r"\w+", (checkout / name).read_text(encoding="utf-8")))
    lost = []
    for page in pages:
        text = re.sub(r"^```.*?^```", "", (checkout / page).read_text(), flags=re.M | re.DOTALL)
        for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\([^`\n]*\))?`", text):
            words = [word for word in name.split(".") if len(word) > 3 and not word.isdigit()]
            lost += [f"{page}: {name}" for word in words if word not in known]
    assert lost == []


def test_the_map_of_files_is_current(checkout: Path) -> None:
    pages = load_script(checkout / "docs" / "hooks" / "file_map.py").render()
    for name, text in pages.items():
        committed = (checkout / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert committed == text, f"{name}: run python docs/hooks/file_map.py docs/reference"
        unnamed = [line for line in text.splitlines() if line.endswith("|  |")]
        assert unnamed == [], "a file begins with a sentence that names what it decides"
