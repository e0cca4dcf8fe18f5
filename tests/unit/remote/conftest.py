"""What every test of remote writers must leave: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gear_support import shared_files
from remote_support import STARTED, section


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()
    assert shared_files(section()["shared_memory"]["prefix"]) == []
