"""The data set of these tests; each leaves nothing behind."""

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from gear_support import prefix, shared_files, write_dataset
from replay_support import LENGTHS


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "d", LENGTHS)


@pytest.fixture(scope="module", autouse=True)
def collections_are_short() -> Iterator[None]:
    """The collection after each test visits what the tests have made, and not the modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    assert shared_files(prefix()) == []
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []
