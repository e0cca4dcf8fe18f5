"""Just-in-time builds: one per node under a lock, loaded once per process, owners checked first.

Ranks are serialised by a lock on a file beside the build folder. The kernel releases it when its
process ends: a killed build blocks no later one. torch's own `lock` file, which would, is removed
with the folder of an unfinished build. Loading a library runs its code: owners and modes are
checked before.
"""

from __future__ import annotations

import fcntl
import grp
import importlib.util
import json
import os
import pwd
import shutil
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from torch._appdirs import user_cache_dir

from deepspeed_gear.errors import BuildError
from deepspeed_gear.timeouts import wait_until

BUILD_TIMEOUT_S = 600.0
Loaded = TypeVar("Loaded", ModuleType, ModuleType | None)
_FINISHED = "gear_finished.json"
_POLL_S = 0.05
_PACKAGE = Path(__file__).resolve().parent
_loaded: dict[str, ModuleType] = {}
_threads = threading.RLock()


def load_once(name: str, load: Callable[[], Loaded]) -> ModuleType | Loaded:
    """Return the process's one copy of a native op. Thread safe; None and errors are not kept.

    A second copy in a process would abort it.
    """
    with _threads:
        if name in _loaded:
            return _loaded[name]
        module = load()
        if module is not None:
            _loaded[name] = module
        return module


def loaded(name: str) -> ModuleType | None:
    """Return a native op if this process has loaded it."""
    return _loaded.get(name)


@contextmanager
def build_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock of a build in a shared folder; the kernel releases it if the process dies.

    The file holds the name of the last holder.

    Raises:
        BuildError: Another process still builds after `timeout_s`, or the file cannot be locked.
    """

    def try_lock() -> bool:
        try:
            # lockf, not flock: a child that the holder forks, such as a data loader, does not
            # inherit the lock and cannot keep it.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    remedy = "set TORCH_EXTENSIONS_DIR to a folder on a local disk that this user can write"
    with BuildError.on(str(path), "cannot be locked for a build", OSError, remedy=remedy):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        with BuildError.on(str(path), "cannot be locked for a build", OSError, remedy=remedy):
            is_held = wait_until(try_lock, timeout_s, _POLL_S)
        if not is_held:
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "an unknown process"
            rule = f"is still held by {holder} after {timeout_s:g} s of waiting for its build"
            remedy = "end that process if it hangs, or prebuild with DS_BUILD_GEAR=1 pip install ."
            raise BuildError(str(path), rule, remedy=remedy)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)


def build_folder(name: str) -> Path:
    """Return the build folder that torch uses for an extension; only its parent is made."""
    from torch.utils.cpp_extension import _get_build_directory

    remedy = "set TORCH_EXTENSIONS_DIR to a folder that this user can write"
    with BuildError.on(
        "the folder of torch's extensions", "cannot be made", OSError, remedy=remedy
    ):
        return Path(_get_build_directory("", False)) / name


def built_library(name: str) -> Path | None:
    """Return the library of a finished build, of the recorded size; None where there is none.

    It searches the folders in which torch may build, without the module of torch that names one of
    them: that imports setuptools, and takes longer than loading the library.
    """
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given is not None:
        roots = [Path(given)]
    else:
        # A folder for each Python and accelerator; a hash in the name separates their builds.
        caches: str = user_cache_dir("torch_extensions")  # type: ignore[no-untyped-call]
        roots = [*Path(caches).resolve().glob("py*")]
    for root in roots:
        library = root / name / f"{name}.so"
        with suppress(OSError, ValueError, KeyError):
            num_bytes: int = json.loads((root / name / _FINISHED).read_text())["bytes"]
            if library.stat().st_size == num_bytes:
                return library
    return None


def build_or_import(name: str, build: Callable[[], ModuleType], timeout_s: float) -> ModuleType:
    """Import a finished build, or `build` it in torch's folder of that name.

    Other processes of the node wait for the build. `name` must hold a hash of everything that the
    build depends on.
    """
    folder = build_folder(name)
    failure = folder.with_suffix(".failed")
    check_folders(folder)
    asked_at = time.time_ns()
    with build_lock(folder.with_suffix(".lock"), timeout_s):
        if (module := import_built(name)) is not None:
            return module
        # After a failed build, the ranks that waited for it would each fail in the same way.
        with suppress(OSError):
            if failure.stat().st_mtime_ns > asked_at:
                raise BuildError(name, failure.read_text(), remedy="correct that, and start again")
        # A build that never finished is renamed: a compiler that outlived its killed parent writes
        # there, not here.
        dead = folder.with_suffix(f".dead-{os.getpid()}")
        with suppress(FileNotFoundError):
            folder.rename(dead)
            shutil.rmtree(dead, ignore_errors=True)
        folder.mkdir(mode=0o755, exist_ok=True)
        _say(f"building the native op {name} in {folder} (once; other processes wait)")
        started = time.monotonic()
        try:
            module = build()
        except BuildError as error:
            failure.write_text(f"failed to build in another process: {error}")
            raise
        failure.unlink(missing_ok=True)
        library = folder / f"{name}.so"
        library.chmod(library.stat().st_mode & 0o755)  # with any umask: see `check_owner`
        (folder / _FINISHED).write_text(json.dumps({"bytes": library.stat().st_size}))
        _say(f"built {name} in {time.monotonic() - started:.0f} s")
        return module


def import_built(name: str) -> ModuleType | None:
    """Import a finished build; None where there is none."""
    library = built_library(name)
    return None if library is None else import_file(name, library)


def import_file(name: str, path: Path) -> ModuleType:
    """Import an extension module from its file, unless another user may have written it."""
    check_library(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    remedy = "remove it, to have it built again"
    with BuildError.on(str(path), "cannot be loaded", ImportError, remedy=remedy):
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def _say(text: str) -> None:
    print(f"gear: {text}", file=sys.stderr, flush=True)


def check_library(path: Path) -> None:
    """Check owners and modes of a library and its folders, before it is loaded."""
    if path.resolve().parent == _PACKAGE:
        # The owner of the package may write it: this user runs the package's code already.
        check_owner(path, {os.stat(__file__).st_uid})
        return
    check_owner(path)
    check_folders(path.parent)


def check_folders(folder: Path) -> None:
    """Check a build folder, where it exists, and the extensions folder that it lies in."""
    check_owner(folder.parent)
    if folder.exists() or folder.is_symlink():
        check_owner(folder)


def check_owner(path: Path, owners: Collection[int] = ()) -> None:
    """Raise BuildError if another user may write a file or folder.

    Root, this user and `owners` may. A folder with the sticky bit, such as /tmp, may be writable by
    all: nothing of this user can be replaced there. So may be what the user's private group can
    write (its name is the user's, and it has no other members), which is what a umask of 0002 is
    for.
    """
    with BuildError.on(str(path), "must be readable", OSError, remedy="remove it, and build again"):
        status = os.stat(path)
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
        mode = oct(stat.S_IMODE(status.st_mode))
        raise BuildError(str(path), rule, mode, f"chmod go-w {path}, or {mine}")


def _is_private(group: int, user: int) -> bool:
    """Return whether a group has a user's name and no other members."""
    try:
        owner = pwd.getpwuid(user)
        members = grp.getgrgid(group)
    except KeyError:
        return False
    is_named = owner.pw_gid == group and members.gr_name == owner.pw_name
    return is_named and set(members.gr_mem) <= {owner.pw_name}
