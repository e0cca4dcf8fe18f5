"""MkDocs hook: links of pages to files outside of docs/ lead to copies of these files in the site.

A page links to `../../examples/ppo.py`, as it reads in the repository. The site holds that file as
`repository/examples/ppo.py`, a Markdown file as a page.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
COPIES = "repository"
_LINK = re.compile(r"(\]\()([^)\s#]+)([^)\s]*\))")


def source_of(page: str) -> Path:
    """Return the file of a page of the site."""
    return ROOT / page.removeprefix(f"{COPIES}/") if page.startswith(f"{COPIES}/") else DOCS / page


def target_of(source: Path, link: str) -> Path | None:
    """Return the file that a relative link names; None: it names none of the checkout."""
    target = Path(os.path.normpath(source.parent / link))
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def page_of(file: Path) -> str:
    """Return where the site holds a file."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    return f"{COPIES}/{file.relative_to(ROOT).as_posix()}"


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside of docs/ that pages link to, and those that these link to."""
    waiting = [file.src_uri for file in files if file.src_uri.endswith(".md")]
    while waiting:
        source = source_of(waiting.pop())
        for _, link, _ in _LINK.findall(source.read_text(encoding="utf-8")):
            target = target_of(source, link)
            if target is None or files.get_file_from_path(page_of(target)) is not None:
                continue
            files.append(File.generated(config, page_of(target), abs_src_path=str(target)))
            if target.suffix == ".md":
                waiting.append(page_of(target))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Make links out of docs/, and those of copied pages, lead to places of the site."""
    here = page.file.src_uri
    source = source_of(here)

    def moved(link: re.Match[str]) -> str:
        target = target_of(source, link[2])
        if target is None:
            return link[0]
        return link[1] + os.path.relpath(page_of(target), Path(here).parent) + link[3]

    return _LINK.sub(moved, markdown)
