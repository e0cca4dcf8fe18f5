"""Every block of code in README and docs: JSON parses, configs are valid, Python runs, commands
exist.
"""

import argparse
import json
import re
from pathlib import Path

import pytest
from page_support import PAGES, ROOT, blocks
from process_support import environment
from warm_python import run_warm

from deepspeed_gear.cli.main import build_parser

pytestmark = pytest.mark.timeout(1800)  # the first test runs all pages, and may build the native op
BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = [
    page
    for page in PAGES
    if any(b.page == page and b.language in ("python", "json") for b in BLOCKS)
]


def test_no_block_is_left_out() -> None:
    """A fence that the parser does not see, or of a language that it does not know, would not be
    checked.
    """
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        seen = sum(block.page == page for block in BLOCKS)
        assert 2 * seen == len(re.findall(r"^\s*```", text, re.M)) + 2 * text.count(
            "<!-- python\n"
        ), page
    assert {block.language for block in BLOCKS} <= {"", "python", "json", "bash"}
    assert len(RUN) > 20


def test_python_compiles() -> None:
    for block in BLOCKS:
        if block.language == "python":
            block.compile()


@pytest.fixture(scope="module")
def failed(request: pytest.FixtureRequest) -> dict[str, str]:
    """Run the pages of the chosen tests in one process, which imports once; return outputs of
    failures.
    """
    chosen = [
        item.callspec.params["page"]
        for item in request.session.items
        if "failed" in item.fixturenames
    ]
    program = str(ROOT / "tests" / "support" / "page_support.py")
    ran = run_warm(program, *map(str, chosen), env=environment(), timeout_s=1780)
    assert ran.returncode == 0, ran.stderr
    outputs: dict[str, str] = json.loads(ran.stdout.splitlines()[-1])
    return outputs


@pytest.mark.parametrize("page", RUN, ids=[str(page.relative_to(ROOT)) for page in RUN])
def test_page_runs(page: Path, failed: dict[str, str]) -> None:
    """Its JSON is valid; its Python runs, block after block in one namespace."""
    if str(page) in failed:
        pytest.fail(failed[str(page)], pytrace=False)


def options_of(name: str) -> set[str]:
    """Return the options of a subcommand; of `gear` itself for an option in its place."""
    parser = build_parser(name)
    if not name.startswith("-"):
        (action,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        assert name in action.choices, f"gear {name}"
        parser = action.choices[name]
    return set(parser._option_string_actions)


def test_commands_exist() -> None:
    """Subcommands and options of `gear`, in blocks and in backticks."""
    shells = [block.text.replace("\\\n", " ") for block in BLOCKS if block.language in ("", "bash")]
    lines = [line for text in shells for line in re.findall(r"^(?:\$ )?gear (.*)", text, re.M)]
    lines += [line for page in PAGES for line in re.findall(r"`gear ([^`\n]*)`", page.read_text())]
    assert len(lines) > 30
    for line in lines:
        options = re.findall(r"(?<![\w-])--?[a-z][\w-]*", line.partition(" #")[0])
        assert set(options) <= options_of(line.split()[0]), line
