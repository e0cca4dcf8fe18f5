"""The pages on extensions: a sampler and an ingest format outside of the package, as they are
printed.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from page_support import HOW_TO, blocks, page_json

from deepspeed_gear import ConfigError, DataError, Replay, TrajectoryWriter
from deepspeed_gear.cli.main import main
from deepspeed_gear.config import parse
from deepspeed_gear.config.resume_options import shared_options
from deepspeed_gear.data.ingest import ingest

MOST_LINES = 60


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Both modules of the pages, importable."""
    pages = {"combined_replay": "add-a-sampler.md", "jsonl_episodes": "add-an-ingest-format.md"}
    for name, page in pages.items():
        source = next(block.text for block in blocks(HOW_TO / page, "python") if not block.hidden)
        assert len(source.splitlines()) <= MOST_LINES
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in pages:
        sys.modules.pop(name, None)


def section(**options: Any) -> dict[str, Any]:
    sampler = page_json("add-a-sampler.md")[0]["sampler"]
    sampler["options"] |= options
    columns = {"code": {"dtype": "int64"}}
    table = {"capacity_steps": 400, "schema": {"columns": columns}, "writers": 1}
    return {"batch_size": 16, "sampler": sampler, "tables": {"main": table}}


@pytest.mark.usefixtures("modules")
def test_the_sampler_of_the_page() -> None:
    with Replay(section()) as replay, TrajectoryWriter.attach(section()) as writer:
        for number in range(30):
            (replay if number % 2 else writer).add({"code": np.arange(5) + 5 * number})
            newest = 5 * number + 4
            assert replay.sample()["code"][:4].tolist() == [
                newest,
                newest - 1,
                newest - 2,
                newest - 3,
            ]
        counts = torch.bincount(
            torch.cat([replay.sample()["code"][4:].clone() for _ in range(300)]), minlength=150
        )
        assert counts.min() > 0
        assert counts.max() < 100  # 24 on average, where draws are uniform


@pytest.mark.usefixtures("modules")
def test_its_options_are_checked_and_enter_the_digest() -> None:
    assert shared_options(parse(section())) != shared_options(parse(section(newest=5)))
    with pytest.raises(ConfigError, match=r"gear\.sampler\.options\.newest"):
        parse(section(newest=0))
    with pytest.raises(ConfigError, match=r"gear\.sampler\.options\.age"):
        parse(section(age=1))
    wrong = section()
    rules = {"Missing": "what can be imported", "CombinedOptions": "a class with a pydantic model"}
    for name, rule in rules.items():
        wrong["sampler"]["kind"] = f"combined_replay:{name}"
        with pytest.raises(ConfigError, match=f"must name {rule}"):
            parse(wrong)


def test_the_ingest_format_of_the_page(
    modules: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = modules / "episodes.jsonl"
    format = "jsonl_episodes:JsonlReader"
    lines = [
        {
            "observation": [[i, t] for t in range(i + 2)],
            "action": [1] * (i + 1),
            "reward": [0.5] * (i + 1),
        }
        for i in range(4)
    ]
    rows = [json.dumps({**line, "terminated": i % 2 == 0}) + "\n" for i, line in enumerate(lines)]
    source.write_text("".join(rows))
    dataset = ingest([source], modules / "set", format=format)
    assert dataset.lengths.tolist() == [1, 2, 3, 4]
    found = dataset.trajectory(3)
    assert found["observation"].tolist() == lines[3]["observation"]
    assert found["truncated"].tolist() == [False, False, False, True]
    # The command finds the module in its working directory; a reader may record as little as this
    # one.
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if entry not in ("", str(modules))]
    )
    monkeypatch.chdir(modules)
    sys.modules.pop("jsonl_episodes")
    assert main(["ingest", source.name, "of-command", "--format", format, "--quiet"]) == 0
    assert main(["inspect", "of-command"]) == 0
    assert re.search(r"^  source +episodes\.jsonl \(jsonl\)$", capsys.readouterr().out, re.M)
    source.write_text(source.read_text().replace("[3, 4]]", "]").replace(", ]", "]"))
    with pytest.raises(
        DataError, match=r"jsonl: line 4 must have an observation after the last step"
    ):
        ingest([source], modules / "set", format=format, overwrite=True)
    with monkeypatch.context() as patch:
        patch.setattr(
            sys.modules["jsonl_episodes"].JsonlReader, "episodes", lambda self: [("episode 0", {})]
        )
        with pytest.raises(
            DataError, match=r"episode 0: column observation must be in every trajectory"
        ):
            ingest([source], modules / "set", format=format, overwrite=True)
    for name, text in {
        "csv": "must be one of auto, .*table, or module:Class",
        "json:JSONDecoder": "subclass of Reader",
        "absent_module:Reader": "must name what can be imported",
    }.items():
        with pytest.raises((ConfigError, DataError), match=text):
            ingest([source], modules / "other", format=name)
