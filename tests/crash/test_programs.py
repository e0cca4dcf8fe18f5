"""Programs that are killed, stopped or go on for long; the long forms are commands of their own."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from process_support import environment
from warm_python import run_warm

LONG = bool(os.environ.get("GEAR_LONG_TESTS"))
MARK = str(os.getpid())
pytestmark = pytest.mark.timeout(3600 if LONG else 900)


def run(program: str, *arguments: Any, **env: str) -> Any:
    """Run a program, for as long as the test may take; return what it prints last."""
    path = Path(__file__).parent / "programs" / program
    found = run_warm(str(path), *map(str, arguments), env=environment(**env), timeout_s=3500.0)
    assert found.returncode == 0, found.stdout + found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("what", "kills"), [("replay", 400 if LONG else 6), ("engine", 200 if LONG else 3)]
)
def test_no_kill_loses_a_checkpoint(what: str, kills: int, tmp_path: Path) -> None:
    found = run("save_kills.py", what, "--folder", tmp_path, "--kills", kills)
    assert (found["kills"], found["lost"]) == (kills, 0)
    assert found.get("loaded", 1) > 0


@pytest.mark.timeout(3600 if LONG else 300)
def test_no_bit_that_changes_on_the_disk_loses_a_later_save(tmp_path: Path) -> None:
    kills = 300 if LONG else 4
    found = run("save_kills.py", "replay", "--flips", "--folder", tmp_path, "--kills", kills)
    assert (found["kills"], found["lost"]) == (kills, 0)
    assert not LONG or found["flips"] > found["refused"] > 0


def test_random_kills_while_saves_are_loaded() -> None:
    """The long form is a command of CONTRIBUTING.md."""
    result = run("soak_kills.py", "--minutes", 2 if LONG else 0.1, "--seed", 7)
    assert result["failures"] == result["left_in_shm"] == []
    assert sum(result["kills"].values()) > 0


def test_pickles_of_a_grammar_give_arrays_or_an_error() -> None:
    """The long form is a command of CONTRIBUTING.md."""
    found = run("fuzz_pickles.py", "--programs", 200_000 if LONG else 3000, "--seed", 1)
    assert found["arrays"] > found["programs"] // 20
    assert found["refused"] > found["programs"] // 20


@pytest.mark.timeout(3600 if LONG else 300)
def test_random_arrow_files_are_read_or_refused() -> None:
    """The long form is a command of CONTRIBUTING.md."""
    pytest.importorskip("pyarrow")
    result = run("fuzz_arrow.py", "--files", 5000 if LONG else 60, "--seed", 1)
    assert result["wrong"] == []
    assert result["counts"].keys() == {"read", "refused", "too large", "not made"}


def test_a_run_that_goes_on_does_not_grow() -> None:
    result = run("soak.py", "--seconds", 120 if LONG else 0, GEAR_SOAK=MARK)
    assert result["wrong"] == 0
    assert result["grown"] == result["left"] == []
    assert result["attached"] > 4, "writers attach anew"
    assert result["added"] > 1_000, "every extent is used again and again"


def test_stopped_writers_end_nothing() -> None:
    stops = 100 if LONG else 4
    result = run("torn.py", "--seconds", 0, "--stop", stops, GEAR_TORN=MARK)
    assert result["wrong"] == result["lost_rows"] == result["used_slots"] == 0
    assert result["stops"] == stops
    assert result["writers"] == 4, "no writer has ended"


@pytest.mark.parametrize(
    ("remove", "kill"), [("fifo", True), ("uniform", True), *[("fifo", False)] * LONG]
)
def test_no_batch_is_torn(remove: str, kill: bool) -> None:
    least = ["--least-added", 1_200, "--least-sampled", 10_000]
    arguments = ["--seconds", 60 if LONG else 0, *least, *["--kill", "--least-killed", 12] * kill]
    result = run("torn.py", *arguments, GEAR_TORN=MARK, GEAR_TORN_REMOVE=remove)
    assert result["wrong"] == result["lost_rows"] == result["used_slots"] == 0
    assert result["samples"] >= 10_000
    assert result["added"] > 1_000, "every extent is used again and again"
    assert not kill or result["writers"] > 12
    assert not list(Path("/dev/shm").glob(f"geartorn{MARK}*"))
