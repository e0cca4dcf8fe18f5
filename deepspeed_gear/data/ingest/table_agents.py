"""Columns by agent in tables: `rewards/agent_0`, or a struct of rewards by agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from deepspeed_gear.data.ingest.agents import NAMES_AGENTS, AgentRows, Agents
from deepspeed_gear.data.ingest.row_values import null_place, numeric
from deepspeed_gear.data.ingest.source_names import FLAG_KINDS, KINDS, meaning
from deepspeed_gear.data.ingest.table_blocks import Block
from deepspeed_gear.errors import DataError

_FILL = "store 0, or false, while an agent does not act"


def divided(block: Block) -> Block:
    """Return a block whose structs of a known meaning are columns: `rewards` by agent."""
    result: Block = {}
    for name, rows in block.items():
        first = next((row for row in rows if row is not None), None)
        if KINDS.get(name) in NAMES_AGENTS and isinstance(first, Mapping):
            result.update(
                {f"{name}.{part}": [(row or {}).get(part) for row in rows] for part in first}
            )
        else:
            result[name] = rows
    return result


def has_agents(names: Iterable[str], judged: Callable[[str], str]) -> bool:
    """Return whether columns are rewards or flags by agent.

    Parts of a struct are agents only where there is no column of that kind by itself: beside
    `reward`, the columns `reward.speed` and `reward.cost` are its terms.

    Args:
        names: The names of the source.
        judged: Returns the name by which a dotted name is judged.
    """
    own = set[str]()
    by_agent = set[str]()
    is_certain = False
    for name in names:
        kind, *parts = meaning(judged(name.replace("/", ".")))
        if kind in NAMES_AGENTS:
            (by_agent if parts else own).add(kind)
            is_certain |= bool(parts) and "/" in name
    return is_certain or bool(by_agent - own)


class TableAgents:
    """The agents of a table, whose columns by agent become one column for all.

    Attributes:
        agents: Their names, and the rules (`Agents`).
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.agents = Agents(where)
        self.start_pass()

    def start_pass(self) -> None:
        """Start a pass over the rows of the table."""
        self._rows = Agents(self._where, goes_on=True)

    def shown(self, block: Block) -> Block:
        """Return a block with the names of the joined columns, and the rows of one agent in each.

        It shows what the rows of the table are.
        """
        shown: Block = {}
        for name, rows in block.items():
            head, *parts = name.split(".")
            shown.setdefault(head if parts and head in KINDS else name, rows)
        return shown

    def with_flags(self, block: Block) -> Block:
        """Return a block of steps with the flags of the episode that follow from those of agents.

        An episode may go on in the next block, with agents that have ended in this one.
        """
        flags = {
            name: np.asarray(rows, bool).reshape(len(rows), -1)[:, 0]
            for name, rows in block.items()
            if KINDS.get(name.split(".")[0]) in FLAG_KINDS
        }
        return {**block, **self._rows.joined("", flags, meaning)} if flags else block

    def joined(self, label: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of an episode by dotted name, with one for all agents."""
        arrays: dict[str, Any] = {}
        kept = dict[str, Any]()
        for name, value in row.items():
            array = numeric(value)
            head, *parts = name.split(".")
            if array is None and parts and KINDS.get(head) in NAMES_AGENTS:
                place = null_place(value)
                if place is not None:
                    raise DataError(
                        f"{self._where}: {label}: {name}{place}", "must not be null", None, _FILL
                    )
            if array is None:
                kept[name] = value
                array = np.empty(0, object)
            arrays[name] = array
        result = {}
        for name, rows in self.agents.joined(label, arrays, meaning).items():
            result[name.replace("/", ".")] = (
                rows[()] if isinstance(rows, AgentRows) else kept.get(name, rows)
            )
        return result
