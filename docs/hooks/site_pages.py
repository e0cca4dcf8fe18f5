"""Assemble the pages of the site: docs/, and copies of the files of the checkout that it links to.

python docs/hooks/site_pages.py build/pages

A part of a page between `<!-- tabs -->` and `<!-- /tabs -->` becomes tabs, one for each line that
is bold as a whole; in the repository it reads as one part after the other.

A page links to `../../examples/ppo.py`, as it reads in the repository. The site holds that file as
`repository/examples/ppo.py`, and a Markdown file as a page. A notebook becomes a page with its
stored outputs. The folder that is written needs nothing else than a generator that reads
mkdocs.yml.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

import notebooks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
COPIES = "repository"
LEFT_OUT = {"hooks"}  # folders of docs/ that are no pages
_TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- /tabs -->\n", re.DOTALL | re.MULTILINE)
_TAB = re.compile(r"^\*\*(.+)\*\*\n", re.MULTILINE)
_COMMENT = re.compile(r"^<!-- .*?-->\n", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s#]+)([^)\s]*\))")


def target_of(source: Path, link: str) -> Path | None:
    """Return the file that a relative link names, or None if the checkout has no such file."""
    target = Path(os.path.normpath(source.parent / link))
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def place_of(file: Path) -> Path:
    """Return the path of a file of the checkout below the assembled folder."""
    if file.suffix == ".ipynb":
        file = file.with_suffix(".md")
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS)
    return COPIES / file.relative_to(ROOT)


def page(source: Path, text: str) -> str:
    """Return the text of a page whose links lead to places of the site."""
    here = place_of(source).parent

    def moved(link: re.Match[str]) -> str:
        target = target_of(source, link[2])
        if target is None:
            return link[0]
        return link[1] + os.path.relpath(place_of(target), here) + link[3]

    text = _TABS.sub(lambda part: content_tabs(part[1]), text)
    return _LINK.sub(moved, text)


def content_tabs(part: str) -> str:
    """Return a part of a page as content tabs, which its bold lines name."""
    _, *named = _TAB.split(_COMMENT.sub("", part))
    tabs = []
    for title, text in zip(named[::2], named[1::2], strict=True):
        tabs.append(f'=== "{title}"\n\n{textwrap.indent(text.strip(), "    ")}\n')
    return "\n".join([*tabs, ""])


def text_of(source: Path, folder: Path) -> str:
    """Return a file as Markdown; pictures of a notebook are written to the folder of its page."""
    if source.suffix == ".md":
        return source.read_text(encoding="utf-8")

    def write(name: str, picture: bytes) -> None:
        (folder / name).write_bytes(picture)

    return notebooks.page(notebooks.read(source), source.stem, write)


def assemble(folder: Path) -> None:
    """Write all pages, pictures and linked files below a folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    waiting = [
        file
        for file in sorted(DOCS.rglob("*"))
        if file.is_file() and file.relative_to(DOCS).parts[0] not in LEFT_OUT
    ]
    known = set(waiting)
    while waiting:
        source = waiting.pop()
        path = folder / place_of(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix not in (".md", ".ipynb"):
            shutil.copyfile(source, path)
            continue
        text = text_of(source, path.parent)
        path.write_text(page(source, text), encoding="utf-8")
        for _, link, _ in _LINK.findall(text):
            target = target_of(source, link)
            if target is not None and target not in known:
                known.add(target)
                waiting.append(target)


if __name__ == "__main__":
    assemble(Path(sys.argv[1]))
