"""`gear ingest` and `gear export` stopped by a full disk or Ctrl-C: one line of error, and nothing
left.
"""

import errno
import os
import resource
import signal
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gear_support import write_dataset
from process_support import exit_status, in_child

from deepspeed_gear import Dataset, DatasetWriter
from deepspeed_gear.cli.main import main
from deepspeed_gear.data.export import FORMATS
from deepspeed_gear.data.ingest.readers.hdf5 import D4rlReader

Maker = Callable[..., Any]


def kept_below(num_bytes: int, arguments: list[str], errors: Path) -> int:
    """Run `gear` in a process whose files take no more bytes; return its exit status."""

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
        sys.stderr = errors.open("w")
        status = main(arguments)
        sys.stderr.close()
        os._exit(status)

    return exit_status(in_child(run))


@pytest.mark.parametrize("what", ["ingest", *FORMATS])
def test_a_full_disk_is_one_error_and_leaves_nothing(
    tmp_path: Path, d4rl: Maker, what: str
) -> None:
    """Where the writes fail first, and where only the last ones do; a failure of HDF5 ends no
    process.
    """
    lengths = [400, 300, 500]
    d4rl(tmp_path / "a.hdf5", lengths)
    source = (
        str(write_dataset(tmp_path / "set", lengths))
        if what != "ingest"
        else str(tmp_path / "a.hdf5")
    )
    dest = str(tmp_path / "out")
    errors = tmp_path / "errors"
    arguments = ["ingest", source, dest, "--quiet"]
    if what != "ingest":
        columns = "code" if what == "minari" else "*"
        arguments = ["export", source, dest, "--format", what, "--columns", columns]
    before = sorted([*os.listdir(tmp_path), "errors"])
    for num_bytes in (700, 5000):
        assert kept_below(num_bytes, arguments, errors) == 2
        text = errors.read_text()
        assert text.startswith(f"gear: error: {dest} must be writable, got ")
        assert os.strerror(errno.EFBIG) in text
        assert text.count("\n") == 1
        assert sorted(os.listdir(tmp_path)) == before
    assert main(arguments) == 0


def swallow_interrupt() -> None:
    """Receive SIGINT in a callback of a weak reference, where Python ignores it, and wait for
    another one.
    """

    def interrupt(_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)

    thing = {1}
    reference = weakref.ref(thing, interrupt)
    del thing
    assert reference() is None
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.01)


@pytest.mark.parametrize("place", ["open", "episodes"])
@pytest.mark.parametrize("stop", [lambda: os.kill(os.getpid(), signal.SIGINT), swallow_interrupt])
def test_ctrl_c_says_that_nothing_was_kept(
    tmp_path: Path,
    d4rl: Maker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    place: str,
    stop: Callable[[], None],
) -> None:
    d4rl(tmp_path / "a.hdf5")
    reader = getattr(D4rlReader, place)
    source = str(tmp_path / "a.hdf5")
    dest = str(tmp_path / "out")

    def stopped(self: D4rlReader) -> Any:
        stop()
        return reader(self)

    with monkeypatch.context() as patched:
        patched.setattr(D4rlReader, place, stopped)
        hook = sys.unraisablehook
        assert main(["ingest", source, source, dest, "--quiet"]) == 130
        assert sys.unraisablehook is hook
    assert capsys.readouterr().err == "gear: interrupted, nothing was kept\n"
    assert os.listdir(tmp_path) == ["a.hdf5"]


def test_a_second_ctrl_c_does_not_stop_the_removal(
    tmp_path: Path, d4rl: Maker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    d4rl(tmp_path / "a.hdf5")
    discard = DatasetWriter.discard

    def interrupted(self: DatasetWriter, block: Any, **_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted_discard(self: DatasetWriter) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        discard(self)

    with monkeypatch.context() as patched:
        patched.setattr(DatasetWriter, "add_block", interrupted)
        patched.setattr(DatasetWriter, "discard", interrupted_discard)
        arguments = ["ingest", str(tmp_path / "a.hdf5"), str(tmp_path / "out"), "--quiet"]
        assert main(arguments) == 130
    assert capsys.readouterr().err == "gear: interrupted, nothing was kept\n"
    assert os.listdir(tmp_path) == ["a.hdf5"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_after_the_last_rename_says_that_it_is_complete(
    tmp_path: Path, d4rl: Maker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    d4rl(tmp_path / "a.hdf5")
    dest = str(tmp_path / "out")

    def stopped(self: Dataset) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Dataset, "__len__", stopped)
        assert main(["ingest", str(tmp_path / "a.hdf5"), dest, "--quiet"]) == 130
    assert capsys.readouterr().err == f"gear: interrupted, {dest} is complete\n"
    assert len(Dataset.open(dest)) == 3
