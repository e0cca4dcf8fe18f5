"""The batches of the Hopper job are the same wherever its table lies, and whatever way they take."""

from __future__ import annotations

from pathlib import Path

import pytest
from hopper_support import digests, hopper_data

BATCHES = 60


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hopper_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def expected(data: Path) -> list[str]:
    return digests("hopper.json", "cpu", data, BATCHES)


def test_no_two_batches_are_equal(data: Path, expected: list[str]) -> None:
    assert len(set(expected)) == BATCHES
    assert not set(expected) & set(digests("hopper.json", "cpu", data, BATCHES, seed=1))


@pytest.mark.parametrize("way", ["direct", "copies", "staged", None])
def test_every_way_and_a_table_in_the_memory_of_a_device_give_them(
    data: Path, expected: list[str], way: str | None
) -> None:
    if way is None:
        assert digests("hopper_device.json", "cpu", data, BATCHES) == expected
    else:
        assert digests("hopper.json", "cpu", data, BATCHES, transfer={"way": way}) == expected
