"""The code of pages: its blocks, and a runner of a page.

`python page_support.py PAGE...` runs pages, each in a fork of this process, in an empty folder, as
rank 0 of 1; it prints a JSON object: the output of each page that failed. CONTRIBUTING.md explains
the comments that a page may contain.
"""

import faulthandler
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gear_support import ROOT, prefix
from process_support import exit_status, free_port, in_child, remove_buffers

HOW_TO = ROOT / "docs" / "how-to"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGE_TIMEOUT_S = 120
_PART = re.compile(
    r"^<!-- (?P<kind>python|file|replace|compile only)(?:: "
    r"(?P<value>[^\n]*?))?(?P<hidden>\n.*?)?\s*-->$"
    r"|^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, or Python in a comment.

    Attributes:
        line: Of its first line of text, from 1.
        replaced: Texts that are replaced when it runs.
        file: The file that the page says it is; Python is then imported and not run.
        not_run: Why it is compiled only, or "".
        hidden: Whether it stands in a comment.
    """

    page: Path
    line: int
    language: str
    text: str
    file: str = ""
    not_run: str = ""
    replaced: tuple[tuple[str, str], ...] = ()
    hidden: bool = False

    @property
    def name(self) -> str:
        """Page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> str:
        """The text as it is run."""
        text = self.text
        for old, new in self.replaced:
            assert old in text, f"{self.name} must have {old!r}, which a comment replaces"
            text = text.replace(old, new)
        return text

    def compile(self) -> Any:
        """Compile Python; lines in tracebacks are those of the page."""
        return compile("\n" * (self.line - 1) + self.runs, str(self.page), "exec")


def blocks(page: Path, language: str | None = None) -> Iterator[Block]:
    """Yield the blocks of a page in their order, or those of a language."""
    source = page.read_text(encoding="utf-8")
    notes: dict[str, str] = {}
    replaced: list[tuple[str, str]] = []
    for part in _PART.finditer(source):
        kind = part["kind"]
        hidden = part["hidden"]
        if kind == "replace":
            old, new = part["value"].split(" -> ")
            replaced.append((old, new))
            continue
        if kind in ("file", "compile only"):
            assert part["value"], f"{page}: <!-- {kind}: ... --> must have a value"
            notes[kind] = part["value"]
            continue
        start = part.start("hidden") + 1 if kind else part.start("text")
        line = source.count("\n", 0, start) + 1
        if kind:
            block = Block(page, line, "python", (hidden or "")[1:] + "\n", hidden=True)
        else:
            options = notes.pop("file", ""), notes.pop("compile only", "")
            block = Block(page, line, part["language"], part["text"], *options, tuple(replaced))
            replaced.clear()
        if language in (None, block.language):
            yield block


def page_code(page: str, holds: str) -> str:
    """Return the block of Python on a how-to page that holds a text."""
    shown = [block.text for block in blocks(HOW_TO / page, "python") if not block.hidden]
    (code,) = [text for text in shown if holds in text]
    return code


def run_program(page: str, holds: str, arguments: list[str], **helpers: Any) -> None:
    """Run a program of a page on a rank, as a launcher does; it imports its helpers
    from `my_task`.
    """
    sys.modules["my_task"] = my_task = ModuleType("my_task")
    my_task.__dict__.update(helpers)
    sys.argv = ["train.py", f"--local_rank={os.environ['LOCAL_RANK']}", *arguments]
    exec(compile(page_code(page, holds), "train.py", "exec"), {"__name__": "__main__"})


def page_json(page: str) -> list[Any]:
    """Return the blocks of JSON on a how-to page."""
    return [json.loads(block.text) for block in blocks(HOW_TO / page, "json")]


def merged(first: Any, second: Any) -> Any:
    """Return a JSON value with the entries of another."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {**first, **{key: merged(first.get(key), value) for key, value in second.items()}}
    return second


def gear_section(value: dict[str, Any]) -> dict[str, Any] | None:
    """Return the gear section of a JSON block, with tables where it has none.

    It is under "gear", the whole block, or a sampler. None: the block has none.
    """
    from deepspeed_gear.config import GearConfig

    section = value.get("gear", {"sampler": value} if "kind" in value else value)
    if not set(section) & set(GearConfig.model_fields):
        return None
    if {"data", "tables"} & set(section):
        return dict(section)
    if section.get("sampler", {}).get("of", {}).get("unit") == "group":
        return None  # without its tables of groups it is no section: the page uses it
    tables = section.get("sampler", {}).get("shares", ["main"])
    return {**section, "tables": {name: {"capacity_steps": 1000} for name in tables}}


def run_page(page: Path) -> None:
    """Check the JSON of a page and run its Python, in this process's folder."""
    import numpy as np
    import torch

    import deepspeed_gear
    from deepspeed_gear.config import parse

    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(place, MASTER_PORT=str(free_port()))
    sys.path.insert(0, os.getcwd())
    for block in blocks(page, "python"):
        if block.file:
            Path(block.file).write_text(block.runs)
    configs: dict[str, Any] = {}  # by file, or by line
    for block in blocks(page, "json"):
        name = block.file or str(block.line)
        configs[name] = merged(configs.get(name), json.loads(block.runs))
    for name, value in configs.items():
        section = gear_section(value)
        if section is not None:
            parse(section)
        if "gear" in value:  # actors write to this run, and to no other of this machine
            value["gear"].setdefault("shared_memory", {"prefix": prefix()})
        if not name.isdigit():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(json.dumps(value))
    known = {"__name__": "__main__", "np": np, "torch": torch, "deepspeed_gear": deepspeed_gear}
    known["configs"] = list(configs.values())
    torch.manual_seed(0)
    for block in blocks(page, "python"):
        if not (block.file or block.not_run):
            exec(block.compile(), known)


def failures(pages: list[Path]) -> dict[str, str]:
    """Run pages in forks; return the output of those that failed."""
    outputs = {}
    for page in pages:
        with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "output", "w+") as output:

            def action(page: Path = page, folder: str = folder, output: Any = output) -> None:
                (Path(folder) / "page").mkdir()
                os.chdir(Path(folder) / "page")
                for stream in (1, 2):
                    os.dup2(output.fileno(), stream)
                faulthandler.dump_traceback_later(PAGE_TIMEOUT_S, exit=True)
                try:
                    run_page(page)
                finally:
                    sys.stdout.flush()
                    remove_buffers(os.environ.get("MASTER_PORT", "none"))

            if exit_status(in_child(action)):
                output.seek(0)
                outputs[str(page)] = output.read()[-6000:]
    return outputs


if __name__ == "__main__":
    import deepspeed_gear.engine.attach  # noqa: F401 - once, before the forks
    from deepspeed_gear.ops.backends import load_backend

    load_backend("cpu")
    print("\n" + json.dumps(failures([Path(argument) for argument in sys.argv[1:]])))
