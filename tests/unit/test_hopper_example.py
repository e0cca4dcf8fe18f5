"""What the Hopper example hides of other libraries' messages, and what it does not."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from types import ModuleType

import pytest
from gear_support import ROOT

EARLY = "Attempting to get learning rate from scheduler before it has started"


def start(common: ModuleType) -> None:
    """Log, warn, print and raise where an engine is made."""
    with common.quiet_start():
        for text in (EARLY, "another"):
            logging.getLogger("DeepSpeed").warning(text)
        for text in (
            "`torch.distributed.all_gather_into_tensor` is deprecated.",
            "`torch.jit` is deprecated",
        ):
            warnings.warn(text, FutureWarning, stacklevel=1)
        print("an op was built")
        print("an error", file=sys.stderr)
        raise ValueError("mine")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_quiet_start_hides_known_warnings_only(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("RANK", str(rank))
    common, logger = importlib.import_module("common"), logging.getLogger("DeepSpeed")
    monkeypatch.setattr(logger, "filters", list(logger.filters))
    logged: list[str] = []
    monkeypatch.setattr(logger, "handle", lambda r: logged.append(r.msg) if logger.filter(r) else None)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="mine"):
            start(common)
    assert logged == ["another"]
    assert [str(warning.message) for warning in warned] == ["`torch.jit` is deprecated"]
    printed = capsys.readouterr()
    assert printed.out == ("an op was built\n" if rank == 0 else "")
    assert printed.err == "an error\n"
