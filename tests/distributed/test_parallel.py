"""Every kind of parallelism: who gets what, and the same samples everywhere."""

import functools
from pathlib import Path

import pytest
from gear_support import prefix, shared_files
from parallel_checks import MODES, TOGETHER, check_modes
from process_support import call_with_engines

pytestmark = pytest.mark.timeout(600)  # of several launches, each with a limit of its own


@pytest.mark.parametrize("modes", TOGETHER, ids=" then ".join)
def test_every_rank_gets_its_part_of_the_same_batches(
    modes: list[str], dataset: Path, tmp_path: Path
) -> None:
    call = functools.partial(call_with_engines, MODES[modes[0]][0], timeout_s=400.0)
    check_modes(call, dataset, tmp_path, modes)
    assert shared_files(prefix()) == []


def test_every_mode_is_run() -> None:
    assert sorted(mode for modes in TOGETHER for mode in modes) == sorted(MODES)
    assert all(len({MODES[mode][0] for mode in modes}) == 1 for modes in TOGETHER)
