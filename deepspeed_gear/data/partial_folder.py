"""The folder DEST.partial, in which a data set or export is made before it is renamed to DEST."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from deepspeed_gear.data.dataset_files import SCHEMA_FILE
from deepspeed_gear.errors import DataError, GearError, undo_on_error
from deepspeed_gear.file_system import swap_names, sync
from deepspeed_gear.liveness import hold, release

_LOCK_FILE = ".gear-partial"
_PARTIAL = ".partial"
_REPLACED = ".replaced"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_dataset(path: Path) -> bool:
    """Return whether a path is a data set or an empty folder."""
    return (path / SCHEMA_FILE).is_file() or (path.is_dir() and not any(path.iterdir()))


def check_destination(
    dest: Path,
    overwrite: bool,
    may_replace: Callable[[Path], bool] = is_dataset,
    rule: str = "must be a gear data set",
    instead: str = "overwrite it (--overwrite) or append to it (--append)",
) -> None:
    """Raise DataError if `dest` exists, unless it may be overwritten.

    Args:
        may_replace: Returns whether the content at `dest` is of a kind that may be replaced; a
            symbolic link never is.
        rule: The rule that content of another kind breaks.
        instead: Remedies other than choosing another place.
    """
    if not os.path.lexists(dest):
        return
    if not overwrite:
        raise DataError(str(dest), "must not exist yet", None, f"choose another place, {instead}")
    if dest.is_symlink() or not may_replace(dest):
        raise DataError(str(dest), f"{rule} to be overwritten", None, "choose another place")


class PartialFolder:
    """The folder DEST.partial, locked by this process, in which the new DEST is made.

    `made` is the path of the new DEST while it is incomplete. A process that is killed leaves the
    folder; the next process that writes to the same DEST empties it.
    """

    def __init__(self, dest: Path) -> None:
        folder = dest.with_name(dest.name + _PARTIAL)
        self._dest = dest
        self._folder = folder
        self.made = folder / "made"
        lock_file = folder / _LOCK_FILE
        replaced = folder / _REPLACED
        with writing(dest):
            # The lock file marks the folder as one of ours; anything else with its name stays.
            is_empty = folder.is_dir() and not any(folder.iterdir())
            if folder.exists() and not is_empty and not lock_file.is_file():
                raise DataError(
                    str(folder),
                    "must not exist, or be what an interrupted ingest left",
                    None,
                    "move it away",
                )
            folder.mkdir(parents=True, exist_ok=True)
            with undo_on_error(lambda: None if any(folder.iterdir()) else folder.rmdir()):
                self._lock = hold(os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                release(self._lock)
                raise DataError(
                    str(folder),
                    "must have one writer at a time",
                    None,
                    "wait for the other ingest",
                ) from None
            # A process was killed between the two renames of `publish`: its old DEST is here.
            if replaced.exists() and not dest.exists():
                replaced.rename(dest)
            for entry in folder.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry != lock_file:
                    entry.unlink()

    def publish(self) -> None:
        """Move what was made to DEST, and an old DEST into this folder, where `discard` removes it.

        If the process is killed or the machine fails, DEST is the old one or the new one. Only
        where the file system cannot swap the names of folders is there a moment without either; the
        next writer to DEST then moves the old one back.
        """
        if not self._dest.is_dir() or not swap_names(self.made, self._dest):
            if self._dest.is_dir():
                self._dest.rename(self._folder / _REPLACED)
            self.made.rename(self._dest)
        sync(self._dest.parent)

    def discard(self) -> None:
        """Remove the folder with everything left in it, and release the lock."""
        # The lock file goes last, with the folder: it shows the next writer whose folder this is.
        for path in (self.made, self._folder / _REPLACED, self._folder):
            shutil.rmtree(path, ignore_errors=True)
        release(self._lock)


@contextlib.contextmanager
def writing(dest: Path) -> Iterator[None]:
    """Raise errors of the file system as DataErrors that name `dest`."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # h5py raises either, without a number
        text = str(error)
        number = getattr(error, "errno", None)
        is_full = number in _FULL or any(os.strerror(one) in text for one in _FULL)
        if isinstance(error, GearError) or not (is_full or isinstance(error, OSError)):
            raise
        remedy = "free some space" if is_full else "check the path and its permissions"
        cause = os.strerror(errno.ENOSPC) if is_full else getattr(error, "strerror", None) or text
        raise DataError(str(dest), "must be writable", cause, remedy) from error
