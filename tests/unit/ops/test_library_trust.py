"""Libraries and folders that another user could write are not loaded from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepspeed_gear.errors import BuildError
from deepspeed_gear.ops import jit

OTHER = 54_321  # a user and a group that no machine has
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def chain(folder: Path) -> Path:
    """Make an extensions folder with a build; return the library."""
    library = folder / "extensions" / "gear_0" / "gear_0.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"")
    for path in (library, library.parent, library.parent.parent):
        path.chmod(0o755)
    return library


def test_what_only_this_user_and_root_can_write_is_loaded(tmp_path: Path) -> None:
    library = chain(tmp_path)
    jit.check_library(library)
    library.parent.parent.chmod(0o1777)  # as /tmp: nothing of this user can be replaced in it
    jit.check_library(library)
    jit.check_folders(library.parent.parent / "not_there")


PLACES = pytest.mark.parametrize("up", [0, 1, 2], ids=["library", "build folder", "extensions folder"])


@pytest.mark.parametrize("mode", [0o757, 0o777, 0o722])
@PLACES
def test_what_others_can_write_is_refused(tmp_path: Path, up: int, mode: int) -> None:
    library = chain(tmp_path)
    path = [library, *library.parents][up]
    path.chmod(mode)
    text = rf"{path} must not be writable by group or others: .*, got '{oct(mode)}'; chmod go-w {path}, or"
    with pytest.raises(BuildError, match=text):
        jit.import_file("gear_0", library)


@AS_ROOT
@PLACES
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, up: int) -> None:
    library = chain(tmp_path)
    path = [library, *library.parents][up]
    os.chown(path, OTHER, -1)
    with pytest.raises(BuildError, match=rf"{path} must belong to user 0 or root: .*, got 'user {OTHER}'"):
        jit.import_file("gear_0", library)


@AS_ROOT
def test_only_a_private_group_may_write(tmp_path: Path) -> None:
    library = chain(tmp_path)
    library.chmod(0o775)
    jit.check_library(library)  # the group root of user root
    os.chown(library, -1, OTHER)
    with pytest.raises(BuildError, match=r"must not be writable by group or others"):
        jit.check_library(library)


@AS_ROOT
def test_a_prebuilt_library_belongs_to_who_installed_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "_PACKAGE", tmp_path)
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "trust.py"))
    for name in ("trust.py", "gear_op.so"):
        (tmp_path / name).touch(0o644)
        os.chown(tmp_path / name, OTHER, OTHER)
    jit.check_library(tmp_path / "gear_op.so")
    os.chown(tmp_path / "trust.py", 0, 0)
    with pytest.raises(BuildError, match="must belong to user 0 or root"):
        jit.check_library(tmp_path / "gear_op.so")
    os.chown(tmp_path / "gear_op.so", 0, 0)
    (tmp_path / "gear_op.so").chmod(0o666)
    with pytest.raises(BuildError, match="must not be writable by group or others"):
        jit.check_library(tmp_path / "gear_op.so")
