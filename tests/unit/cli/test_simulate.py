"""`gear simulate`: pace, lag and waste of rollout workers, against what can be computed by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gear_support import run_command
from ledger_support import ledger_section, write_prompts

from deepspeed_gear import ConfigError
from deepspeed_gear.cli import simulate as command
from deepspeed_gear.cli.simulate import RULES, Pace, lengths_of, read_spec, simulate
from deepspeed_gear.config import parse


@pytest.fixture
def section(tmp_path: Path) -> dict[str, Any]:
    return ledger_section(write_prompts(tmp_path / "prompts", 3), {"max_lag": 2}, groups=4)


def test_equal_lengths_take_as_long_as_computed(section: dict[str, Any]) -> None:
    """Responses of 100 tokens in 0.5 s, two of 8 places a prompt; a batch of 4 prompts trains for
    0.8 s.
    """
    spec, size = read_spec(parse(section))
    assert (spec.groups, size) == (4, 2)
    steady = replace(spec, max_lag=0)
    one = simulate(steady, lambda _: np.full(2, 100), Pace(0.005, 1e-3, 2, 4), 10)
    assert one.tokens_per_s == pytest.approx(800 / (0.5 + 0.8))  # on policy: one after the other
    assert (one.largest_lag, one.dropped, one.length_bias) == (0, 0, 0)
    assert one.learner_idle == pytest.approx(0.5 / 1.3)
    both = simulate(
        replace(spec, max_lag=1), lambda _: np.full(2, 100), Pace(0.005, 1e-3, 2, 4), 10
    )
    assert both.tokens_per_s == pytest.approx(8000 / (0.5 + 10 * 0.8))  # generation is hidden
    assert both.largest_lag == 1


def test_rules_under_heavy_tails(section: dict[str, Any]) -> None:
    spec, size = read_spec(parse(section))
    lengths = lengths_of("lognormal:300,1.2", 0, size)
    pace = Pace(0.01, 2e-4, 2, 6)
    assert lengths_of("lognormal:300,90", 0, 99)(3).min() >= 1
    found = [
        simulate(replace(spec, order=order, late=late), lengths, pace, 200) for order, late in RULES
    ]
    lease, completion, drop = found
    assert [one.largest_lag for one in found] == [2, 2, 2]
    assert (lease.dropped, completion.dropped) == (0, 0)
    assert abs(lease.length_bias) < 0.02
    assert drop.dropped > 0.05
    assert drop.length_bias < -0.1
    assert drop.tokens_per_s > 1.2 * lease.tokens_per_s


def test_the_command(
    section: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    lengths = tmp_path / "lengths.txt"
    path.write_text(json.dumps({"gear": section}))
    lengths.write_text("10\n20\n400\n")
    given = [str(path), "--lengths", str(lengths), "--batches", "5"]
    assert run_command(command, *given) == 0
    assert "lease       wait (config)" in capsys.readouterr().out
    assert run_command(command, *given, "--json") == 0
    assert [one["order"] for one in json.loads(capsys.readouterr().out)] == [
        "lease",
        *["completion"] * 2,
    ]
    for more, match in (
        (["--latency", "0"], "--latency must be positive"),
        (["--latency", "nan"], "--latency must be positive and finite"),
        (["--lengths", "lognormal:-3,1"], "a median above 0"),
        (["--lengths", "lognormal:3"], "two"),
    ):
        with pytest.raises(ConfigError, match=match):
            run_command(command, *given, *more)
    del section["tables"]["main"]["prompts"]
    path.write_text(json.dumps({"gear": section}))
    with pytest.raises(ConfigError, match="a table with prompts"):
        run_command(command, *given)
