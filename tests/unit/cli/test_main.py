"""The `gear` command itself: what it refuses before a subcommand runs."""

from pathlib import Path

import pytest

from deepspeed_gear.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["ingest", "data", ""], "argument 2 of gear ingest"),
        (["ingest", "", "data"], "argument 1 of gear ingest"),
        (["export", "data", "", "--format", "npz"], "argument 2 of gear export"),
        (["split", "data", "", "--nodes", "2"], "argument 2 of gear split"),
        (["inspect", ""], "argument 1 of gear inspect"),
        (["init", "data", "--out", ""], "argument 3 of gear init"),
        (["init", "data", "--out="], "--out of gear init"),
        (["clean", "--prefix", ""], "argument 2 of gear clean"),
    ],
)
def test_an_empty_argument_is_no_folder(
    arguments: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as that of an unset variable of the shell; `Path("")` would be the current folder."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert f"{named} must not be empty" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
