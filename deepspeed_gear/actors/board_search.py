"""Search of this node's shared memory for the policy board of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deepspeed_gear.errors import StoreError
from deepspeed_gear.store.memory_layout import RunIdentity, read_header
from deepspeed_gear.store.shared_memory import SHM, is_held, opened
from deepspeed_gear.writer.store_search import RUN_VARIABLE, NamedStore, named_stores

BOARD = "policy_board"  # key of a board in the meaning of its layout
PUBLISHER = 0  # its peer index; readers have the next ones
_MARK = "-board."  # between the prefix and the digits of a file's name
CREATE = "call PolicyBoard.create(engine.module, engine.gear) in the ranks"


def board_file(prefix: str) -> str:
    """Return a new name for the file of a board."""
    return f"{prefix}{_MARK}{os.urandom(16).hex()}"


class RunBoard(NamedTuple):
    """A run's board whose publisher is attached."""

    file: str  # its name in /dev/shm
    run: RunIdentity

    def __str__(self) -> str:
        return f"run {self.run} ({SHM / self.file})"


def run_boards(prefix: str | None) -> list[RunBoard]:
    """Return the boards of this node's runs that have a publisher.

    Args:
        prefix: Prefix of their files' names; None: any.
    """
    boards = []
    for path, fd in opened(prefix):
        if _MARK not in path.name or not is_held(fd, PUBLISHER, 1):
            continue
        try:
            layout, run = read_header(fd, str(path))
        except StoreError:  # of another version
            continue
        if layout.meaning.get(BOARD, {}).get("of_run"):
            boards.append(RunBoard(path.name, run))
    return boards


@dataclass
class BoardSearch:
    """Search for the only board that a process may mean.

    Attributes:
        prefix: Prefix of the board's file; None: any.
        names: Names and ids that the run must have.
        section: The process's `gear` section, where it has one. Boards of runs whose stores have
            other options are not candidates.
        others: Of the latest search, the boards that do not match, with the reasons.
    """

    prefix: str | None
    names: list[str]
    section: Mapping[str, Any] | None = None
    others: list[str] = field(default_factory=list)

    def find(self) -> str | None:
        """Return the name of the board's file; None if there is none now.

        Raises:
            StoreError: Several boards match.
        """
        self.others = []
        boards = []
        stores = None
        for board in run_boards(self.prefix):
            if stores is None:
                stores = [] if self.section is None else named_stores(self.prefix)[0]
            reasons = self._reasons_against(board, stores)
            if reasons:
                self.others.append(f"{board}: {', '.join(reasons)}")
            else:
                boards.append(board)
        if len(boards) > 1:
            rule = "must be named where there are several"
            remedy = f"give run or set {RUN_VARIABLE} to a run's name or id"
            raise StoreError("the policy board's run", rule, "; ".join(map(str, boards)), remedy)
        return boards[0].file if boards else None

    def _reasons_against(self, board: RunBoard, stores: list[NamedStore]) -> list[str]:
        """Return why a board does not match; empty if it matches."""
        for name in self.names:
            if name not in (board.run.id, board.run.name):
                return [f"its run is not {name}"]
        if self.section is None:
            return []
        tables = self.section.get("tables", {})
        own = [one for one in stores if one.run.id == board.run.id and one.table in tables]
        return [text for store in own for text in store.differences(self.section)]

    def error(self, wait_s: float) -> StoreError:
        """Return the error that no board matched within `wait_s` seconds."""
        of = [] if self.section is None else ["of this config"]
        of += [f"of run {name}" for name in self.names]
        rule = ", ".join(["must be the board of a run", *of, f"within {wait_s:g} s"])
        remedy = CREATE
        if self.others:
            remedy += f"; found within {wait_s:g} s: {'; '.join(self.others)}"
        return StoreError(f"{SHM}/{self.prefix or '*'}{_MARK}*", rule, None, remedy)
