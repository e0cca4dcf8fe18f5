"""Checks of owner and mode of the library files that this process loads.

Loading a library runs its code. A user who can write in its folder can therefore run code as this user.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Collection
from pathlib import Path

from deepspeed_gear.errors import BuildError

_PACKAGE = Path(__file__).resolve().parent


def check_library(path: Path) -> None:
    """Check a library before it is loaded, and the folders from which it could be replaced.

    Args:
        path: Of a build, in its folder in torch's extensions folder; or of the package's prebuilt library,
            whose folder holds the package's own code.
    Raises:
        BuildError: Another user than root may have written it.
    """
    if path.resolve().parent == _PACKAGE:
        check_owner(path, {os.stat(__file__).st_uid})  # the owner of the package could have put code there
        return
    check_owner(path)
    check_folders(path.parent)


def check_folders(folder: Path) -> None:
    """Check a build folder, where it exists, and the extensions folder that it lies in.

    Raises:
        BuildError: Another user than root may have put something there.
    """
    check_owner(folder.parent)
    if folder.exists() or folder.is_symlink():
        check_owner(folder)


def check_owner(path: Path, owners: Collection[int] = ()) -> None:
    """Check that no other user may write a file or folder.

    A folder with the sticky bit, as /tmp, may be writable by all: nothing of this user can be replaced there.
    So may be what the user's private group can write (its name is the user's, and it has no other members),
    which is what a umask of 0002 is for.

    Args:
        path: Of the file or folder.
        owners: User ids that may own it, besides root and this user.
    Raises:
        BuildError: Another user may write it, or it is missing.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise BuildError(
            str(path), "must be readable", error.strerror, "remove it, and build again"
        ) from error
    mine = "set TORCH_EXTENSIONS_DIR to a folder that only this user can write"
    if status.st_uid not in {0, os.geteuid(), *owners}:
        rule = f"must belong to user {os.geteuid()} or root: its code would run in this process"
        raise BuildError(str(path), rule, f"user {status.st_uid}", f"remove it, or {mine}")
    writers = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if writers & stat.S_IWGRP and _is_private(status.st_gid, status.st_uid):
        writers &= ~stat.S_IWGRP
    if stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX:
        writers = 0
    if writers:
        rule = "must not be writable by group or others: its code would run in this process"
        raise BuildError(str(path), rule, oct(stat.S_IMODE(status.st_mode)), f"chmod go-w {path}, or {mine}")


def _is_private(group: int, user: int) -> bool:
    """Return whether a group is the private one of a user."""
    try:
        owner, found = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return owner.pw_gid == group and found.gr_name == owner.pw_name and set(found.gr_mem) <= {owner.pw_name}
