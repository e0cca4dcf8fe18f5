"""Fixtures of the tests of several ranks."""

from pathlib import Path

import pytest
from gear_support import lengths_of, write_dataset


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of 40 trajectories of 1 to 29 steps."""
    return write_dataset(
        tmp_path_factory.mktemp("data") / "set", lengths_of(40), split={"eval": 0.3}
    )
