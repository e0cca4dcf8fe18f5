"""The `gear` command itself: what it refuses before a subcommand runs."""

from pathlib import Path

import numpy as np
import pytest

from deepspeed_gear import Dataset
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
        (["ingest", "data", "out", "--mask="], "--mask of gear ingest"),
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


@pytest.mark.parametrize("given", [["--columns", ""], ["--columns="]])
def test_an_empty_list_of_columns_is_none_of_them(tmp_path: Path, given: list[str]) -> None:
    row = np.arange(4)
    flags = {"terminals": row == 3, "timeouts": row == 9}
    np.savez(tmp_path / "a.npz", obs=row, acts=row, rewards=row, extra=row, **flags)
    assert main(["ingest", str(tmp_path / "a.npz"), str(tmp_path / "out"), *given]) == 0
    assert "extra" not in Dataset.open(tmp_path / "out").schema.names
