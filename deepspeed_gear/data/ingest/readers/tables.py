"""Reader of tables: a row is an episode, a step or a conversation, which the columns show.

They are Parquet, Arrow, CSV and JSON files, or tables of a program.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import deepspeed_gear.arguments as arguments
import deepspeed_gear.data.ingest.last_rows as last_rows
from deepspeed_gear.data.ingest.column_facts import STEP_NAMES, ColumnFacts
from deepspeed_gear.data.ingest.message_masks import is_messages
from deepspeed_gear.data.ingest.preferences import divide
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.row_images import RowImages
from deepspeed_gear.data.ingest.row_values import numeric, plain, plain_bytes
from deepspeed_gear.data.ingest.source_columns import (
    SCALARS,
    column_name,
    end_episode,
)
from deepspeed_gear.data.ingest.source_names import FLAG_KINDS, KINDS, ROW_FLAGS
from deepspeed_gear.data.ingest.step_order import check_order
from deepspeed_gear.data.ingest.table_agents import TableAgents, divided, has_agents
from deepspeed_gear.data.ingest.table_blocks import (
    Block,
    file_blocks,
    object_blocks,
    table_files,
    table_form,
)
from deepspeed_gear.data.ingest.token_rows import COLUMNS, NAMES, TokenRows, has_tokens
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.errors import DataError, known_names

_ENDS = {"done": "terminated"}  # a table's column `done` is taken for terminal states
_USUAL = {key: name for key, kind in KINDS.items() if (name := _ENDS.get(kind, kind)) in STEP_NAMES}
_FLAGS = ("terminated", "truncated")
_MEASURES = ("tokens", "action", *SCALARS)  # the first one of them gives the number of steps
_EPISODE_IDS = ("episode_index", "episode_id", "episode")


class TableReader(Reader):
    """Reads tables of episodes, of steps or of conversations; the columns show which.

    - A conversation per row: token ids, messages, or a text that is tokenized (`token_rows`).
    - A step per row: rows repeat the episode's id, or the reward (without one the action) is one
      value. An episode is the rows with one id, or up to an end flag.
    - An episode per row: lists of a value per step, or of T + 1 observations.

    Roles follow the usual names. Texts, objects, and ragged lists become opaque columns. Where
    there is a column of terminations, an episode whose last step has no flag is truncated. A column
    `done` beside one of time limits is also set at time limits, as Gym's was: such a step does not
    terminate.
    """

    format = "table"
    takes: ClassVar[tuple[str, ...]] = (
        "episode_id",
        "tokenize",
        "images",
        "schema",
        "last_step",
        "episode_length",
    )  # and "rows", of `open_rows` alone
    early_roles = ("reward", "terminated", "truncated")

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return bool(table_files(path))

    def open(self) -> None:
        """Find out what a row is, and the columns.

        Cost: one pass over the source, or none with a schema; one more for columns of uneven
        shapes.
        """
        self._tokenize = dict(self.options.get("tokenize") or {})
        self._images = RowImages(self.options.get("images") or (), self.select)
        self._id: str | None = None
        self._nulls = set[str]()  # columns that are null in every row
        self._label = ""  # column of KTO's labels
        self._agents: TableAgents | None = None
        if (schema := self.options.get("schema")) is not None:
            self.has_schema = True
            names = ("length",) if schema.role("reward") is None else ("length", "return")
            self.columns = tuple(column for column in schema if column.name not in names)
            return
        files = [] if "rows" in self.options else self._source_files()
        self._file_bytes = sum(file.stat().st_size for file in files)
        # JSON is parsed by Python, which holds the interpreter's lock.
        is_json = "json" in map(table_form, files)
        self.reads_ahead = bool(files) and not is_json and not self._tokenize
        self._find_layout()
        facts, uneven = self._facts_of_columns()
        self._add_notes(facts, uneven)
        order = (*COLUMNS,) if self._row == "conversation" else STEP_NAMES
        heads = {one.name: one.name.split(".")[0] for one in facts}
        facts.sort(key=lambda one: (*order, heads[one.name]).index(heads[one.name]))
        self.columns = tuple(one.column(self._num_trajectories) for one in facts)
        roles = {column.role for column in self.columns}
        roles.update((self.options.get("role") or {}).values())
        if self._row != "conversation" and roles.isdisjoint(("observation", "action")):
            self.notes.append(
                "no column is an observation or an action: --rename COLUMN=observation and "
                "--rename COLUMN=action name them"
            )
        if "rows" not in self.options:
            wide = sum(column.max_bytes for column in self.columns) * self._num_trajectories
            self.expansion.check(
                f"{self.path}: columns of texts and objects",
                wide,
                self._file_bytes + self._images.num_bytes,
            )
        self.counted = tuple(
            c.name for c in self.columns if c.name in _EPISODE_IDS and c.rows == "1"
        )
        self.description.update(
            rows=self._row, trajectories=self._num_trajectories, steps=self.num_steps
        )

    def _find_layout(self) -> None:
        """Find out by the first rows, and flags in all, what rows, agents and last rows are."""
        blocks = self._given_blocks(True)
        given = next((block for block in blocks if any(map(len, block.values()))), None)
        if given is None:
            raise DataError(str(self.path), "must hold at least one row", 0, "the table is empty")
        known = (*_EPISODE_IDS, *NAMES)
        self.names.compare(given, known)
        parts = divided(given)
        if has_agents(parts, self.names.name):
            self._agents = TableAgents(str(self.path))
            self.names.compare([name.replace("/", ".") for name in parts], known)
            first = self._agents.shown(self._named(parts))
        else:
            first = self._named(given)
        self._row = self._what_a_row_is(first)
        # Of conversations, parts that looked like agents are other columns: names are judged anew.
        if self._row == "conversation" and self._agents is not None:
            self._agents = None
            self.names.compare(given, known)
            self._names = self._named(given).keys()
        self._row_flags = {*ROW_FLAGS} & first.keys() if self._row != "conversation" else set()
        self._find_last_step()
        self._check_limit(first)
        by_id = f", an episode is the rows of one {self._id}" if self._id else ""
        self.notes.append(f"read as a table with one {self._row} per row{by_id}")

    def _facts_of_columns(self) -> tuple[list[ColumnFacts], set[str]]:
        """Return the facts of each kept column, and the columns without a common shape.

        Passes are repeated while one finds images after the first row, or an uneven column, which
        was read as numbers up to there.
        """
        uneven: set[str] = set()
        while True:
            self._images.begin_pass()
            facts = self._facts(uneven)
            if self._images.is_late:
                continue
            more = {
                one.name
                for one in facts
                if one.is_uneven or one.lacks_numbers(self._num_trajectories)
            }
            if not more:
                return facts, uneven
            uneven |= more

    def _add_notes(self, facts: list[ColumnFacts], uneven: set[str]) -> None:
        if self._agents is not None:
            self.description.update(agents=self._agents.agents.names)
            self.notes.append(self._agents.agents.note)
        self.note("each pair of answers is a group, with the rewards 1 and 0", self.numbers_groups)
        self.note("{} of an answer (KTO) is its reward, 1 or 0", self._label)
        self.note("{} episodes of one row have no step: left out", self._num_empty)
        if images := [one.name for one in facts if one.name in self._images.names]:
            self.note("images, stored as files: {}", images)
            self.description.update(images=images)
        self.note("null in every row, left out: {}", sorted(self._nulls))
        self.note("kept as JSON, without one shape in all rows: {}", sorted(uneven))

    def _source_files(self) -> list[Path]:
        """Return the files of the source; DataError if there is none."""
        files = table_files(self.path)
        if not files:
            raise DataError(
                str(self.path),
                "must be named .parquet, .arrow, .feather, .csv, .jsonl or .json, or be a folder "
                "of such files",
                remedy="rename the file, or name its format with --format",
            )
        return files

    def _check_limit(self, first: Block) -> None:
        """Check `episode_length`, which is for end flags that do not state why an episode ended."""
        limit = self.options.get("episode_length")
        kinds = {KINDS.get(name) for name in first}
        is_any_end = "done" in kinds and kinds.isdisjoint(_FLAGS)
        has_unclear_ends = self._row != "conversation" and is_any_end
        if limit is not None:
            arguments.count("episode_length", limit)
            if not has_unclear_ends:
                raise DataError(
                    f"{self.path}: --episode-length",
                    "must be for episodes whose only end flags are of either cause (dones, "
                    "is_last)",
                    sorted(first),
                    "leave it out, or name the flags with --rename COLUMN=dones",
                )
        self.note(last_rows.ENDS_TERMINATE, limit is None and has_unclear_ends)

    def _find_last_step(self) -> None:
        """Set what the last row of an episode holds, where flags mark rows.

        Cost: one pass over the source where there are such flags.
        """
        self._per_row: set[str] = set()
        self._num_empty = 0
        if (given := self.options.get("last_step")) is not None:
            self._last_step = last_rows.check_last_step(given)
            if not self._row_flags:
                raise DataError(
                    f"{self.path}: --last-step",
                    f"must be for a source with one of {', '.join(ROW_FLAGS)}",
                    given,
                    "leave it out, or give a column one of these names with --rename",
                )
        if not self._row_flags:
            return
        at_first = at_last = False
        others = set[str]()
        for label, row in self._episodes_of_rows():
            rows = last_rows.num_rows(f"{self.path}: {label}", row)
            rewarded = last_rows.end_rewards(row)
            at_first |= rewarded[0]
            at_last |= rewarded[1]
            per_row = {name for name, value in row.items() if last_rows.is_per_row(value, rows)}
            self._per_row |= per_row
            others |= row.keys() - per_row
        self._per_row -= others
        if given is None:
            self._last_step = last_rows.last_step(self.path, at_first, at_last)
        self.notes.append(last_rows.NOTES[self._last_step])

    def _episodes_of_rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the label and the columns, by the usual names, of each episode with row flags."""
        for label, given in self._episodes():
            names = ((name, self._judged(name)) for name in given)
            yield label, {judged: given[name] for name, judged in names}

    def _episodes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the label and the columns of each episode, with one column for all agents."""
        if self._agents is not None:
            self._agents.start_pass()
        for label, row in self._of_steps() if self._row == "step" else self._rows(False):
            yield label, row if self._agents is None else self._agents.joined(label, row)

    def _judged(self, name: str) -> str:
        return name if name in self._row_flags else usual_name(name, self._names)

    def _facts(self, uneven: set[str]) -> list[ColumnFacts]:
        """Return the facts of each kept column over all trajectories, and count these."""
        known: dict[str, ColumnFacts | None] = {}
        number = self.num_steps = 0
        first = ""
        for label, arrays, length in self._trajectories():
            number += 1
            self.num_steps += length
            first = first or f"{self.path}: {label}"
            for name, value in arrays.items():
                where = f"{self.path}: {label}: {name}"
                if name not in known:
                    is_kept = name in STEP_NAMES or name in COLUMNS or self.select(name)
                    known[name] = (
                        ColumnFacts(where, name, self._row, name in uneven) if is_kept else None
                    )
                    if (facts := known[name]) is not None and number > 1:
                        facts.lack(first)
                if (facts := known[name]) is not None:
                    if "rows" not in self.options and (
                        name in uneven or not isinstance(value, np.ndarray)
                    ):
                        self.expansion.check(where, plain_bytes(value), self._file_bytes)
                    facts.add(where, value, length)
            for name in known.keys() - arrays.keys():
                if (facts := known[name]) is not None:
                    facts.lack(f"{self.path}: {label}")
        self._num_trajectories = number
        return [facts for facts in known.values() if facts is not None]

    def _named(self, block: Block) -> Block:
        """Return a block by the names that the user gives."""
        mark = "/" if self._agents is not None else "."  # between a name and its agent
        return {self.names.name(name.replace(mark, ".")): rows for name, rows in block.items()}

    def _blocks(self, is_nested: bool) -> Iterator[Block]:
        return map(self._named, self._given_blocks(is_nested))

    def _given_blocks(self, is_nested: bool) -> Iterator[Block]:
        if "rows" in self.options:
            yield from object_blocks(self.options["rows"], str(self.path), is_nested)
            return
        for file in table_files(self.path):
            self.file = file
            yield from file_blocks([file], self.expansion, is_nested)

    def _what_a_row_is(self, first: Block) -> str:
        """Return "conversation", "step" or "episode", and set the column of episode ids."""
        self._names = first.keys()
        usual = {usual_name(name, first): rows for name, rows in first.items()}
        any_end = {usual_name(name, first) for name in {"done", "dones"} & first.keys()}
        self._done_is_any_end = "terminated" in any_end and "truncated" in usual
        has_steps = not {"observation", "action"}.isdisjoint(name.split(".")[0] for name in usual)
        if not has_steps:
            # A pair of answers whose tokens are unknown is refused before it is taken for a table.
            row = {name: rows[0] for name, rows in first.items() if len(rows)}
            divide(f"{self.path}: row 0", row, [*self._tokenize])
        has_chats = any(is_messages(rows[0]) for rows in first.values() if len(rows))
        if has_tokens(first) or ((self._tokenize or has_chats) and not has_steps):
            return "conversation"
        self._id = self.options.get("episode_id")
        if self._id is not None:
            if self._id not in first:
                raise DataError(
                    f"{self.path}: --episode-id",
                    "must name a column of the source",
                    self._id,
                    known_names(self._id, first),
                )
            return "step"
        self._id = next((name for name in _EPISODE_IDS if name in first), None)
        ids = [] if self._id is None else [str(one) for one in first[self._id]]
        flags = [first[name] for name in ROW_FLAGS if name in first]
        measures = [*flags, *(usual[name] for name in ("reward", "action") if name in usual)]
        measured = next((one for rows in measures[:1] for one in rows if one is not None), ())
        is_single = isinstance(measured, (bool, int, float, np.generic))
        has_null = self._id is not None and any(one is None for one in first[self._id])
        # Steps repeat the id of their episode. Where too few ids show that, or one is null (which
        # is refused later), a flag, reward or action of one value does.
        if len({*ids}) < len(ids) or (is_single and (len(ids) < 2 or has_null)):
            return "step"
        self._id = None
        return "episode"

    def _rows(self, is_nested: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        number = 0
        file = None
        self._nulls = set()
        named = set[str]()
        for block in self._blocks(is_nested):
            if self.file != file:
                number = 0
                file = self.file
            named |= {
                name for name, rows in block.items() if any(value is not None for value in rows)
            }
            self._nulls = (self._nulls | block.keys()) - named
            at = "" if file in (None, self.path) else f"{file.relative_to(self.path)}: "
            for values in zip(*block.values(), strict=True):
                row = zip(block, values, strict=True)
                yield f"{at}row {number}", {name: value for name, value in row if value is not None}
                number += 1

    def _trajectories(self) -> Iterator[tuple[str, dict[str, Any], int]]:
        """Yield each trajectory: its label, its columns under their usual names, and its steps."""
        is_chat = self._row == "conversation"
        self._num_empty = 0
        rows = self._conversations() if is_chat else None
        for label, given in rows or self._episodes():
            where = f"{self.path}: {label}"
            row = given
            if self._row_flags:
                usual = {self._judged(name): value for name, value in given.items()}
                steps = last_rows.steps_of_rows(where, usual, self._last_step, self._per_row)
                if steps is None:
                    self._num_empty += 1
                    continue
                row = steps
            arrays: dict[str, Any] = {}
            for name, value in row.items():
                column = column_name(*name.split(".")) if is_chat else usual_name(name, self._names)
                if column in arrays:
                    raise DataError(
                        f"{where}: {column}", "must come from one key only", name, "rename one"
                    )
                array = numeric(value)
                arrays[column] = value if array is None else array
            length = _num_steps(where, arrays)
            if not is_chat:
                check_order(self, f"{where}: ", arrays)
                limit = self.options.get("episode_length")
                if limit is not None and length > limit:
                    raise DataError(
                        f"{where}: --episode-length {limit}",
                        "must be at least the steps of every episode",
                        length,
                        "give the time limit of the environment",
                    )
                _set_flags(arrays, length, self._done_is_any_end, length == limit)
            yield label, arrays, length

    def _conversations(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the label and the columns of each conversation; a pair of answers has two."""
        make = TokenRows(self._tokenize)
        for label, given in self._rows(True):
            where = f"{self.path}: {label}"
            loaded = self._images.loaded(where, given, self.file)
            for side, row in make(where, loaded):
                yield f"{label}: {side}" if side else label, self._images.packed(row)
        self.numbers_groups = make.num_pairs > 0
        self._label = make.label

    def _of_steps(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the label and the columns of each episode of a table of steps."""
        parts: list[Block] = []
        last = None
        seen = set()
        for ids, block in self._by_id() if self._id is not None else self._by_flags():
            # Runs of equal ids; an episode may continue in the next block.
            bounds = sorted({0, *(i for i in range(1, len(ids)) if ids[i] != ids[i - 1]), len(ids)})
            for low, high in pairwise(bounds):
                if parts and ids[low] != last:
                    yield f"episode {last}", self._joined(parts)
                    parts = []
                if not parts and ids[low] in seen:
                    raise DataError(
                        f"{self.path}: {self._id}",
                        f"must have the rows of episode {ids[low]} after each other",
                        None,
                        "sort the table by it",
                    )
                last = ids[low]
                seen.add(last)
                parts.append({name: rows[low:high] for name, rows in block.items()})
        if parts:
            yield f"episode {last}", self._joined(parts)

    def _by_id(self) -> Iterator[tuple[list[Any], Block]]:
        """Yield blocks of steps with the id of each row's episode, from the column of ids."""
        num_rows = 0
        for block in self._blocks(False):
            ids = list(block.get(self._id or "", (None,)))
            for number, one in enumerate(ids, num_rows):
                if one is None or not isinstance(one, Hashable) or one != one:  # NaN
                    raise DataError(
                        f"{self.path}: row {number}: {self._id}",
                        "must be a number or a text",
                        "null" if one is None else one,
                        "fill the column in every row",
                    )
            num_rows += len(ids)
            yield ids, block

    def _by_flags(self) -> Iterator[tuple[list[Any], Block]]:
        """Yield blocks of steps with the number of each row's episode, by end and start flags."""
        is_after_end = True  # the first row of all begins episode 0
        number = -1  # of the episode of the last row
        for block in self._blocks(False):
            with DataError.on(
                str(self.path),
                "must have an end flag in every row",
                ValueError,
                TypeError,
                remedy="name it with --role COLUMN=terminated, and fill it in every row",
            ):
                flagged = block if self._agents is None else self._agents.with_flags(block)
                flags = [
                    np.asarray(b, bool)
                    for name, b in flagged.items()
                    if usual_name(name, ()) in _FLAGS
                ]
                num_rows = len(next(iter(block.values())))
                starts = np.asarray(flagged.get("is_first", np.zeros(num_rows)), bool)
            if not flags and "is_first" not in flagged:
                raise DataError(
                    str(self.path),
                    "must have a column of episode ids, or of end flags, with one step per row",
                    ", ".join(block),
                    "name it with --episode-id",
                )
            # With end flags [0, 1, 0] and starts [0, 0, 1], after a row of episode 4 without an end
            # flag, `begins` is [0, 0, 1] and the numbers are [4, 4, 5].
            is_end = np.zeros(num_rows, bool)
            for rows in flags:
                is_end |= rows.any(tuple(range(1, rows.ndim)))
            begins = np.append(is_after_end, is_end[:-1]) | starts
            numbers = (number + np.cumsum(begins)).tolist()
            if num_rows:
                is_after_end = bool(is_end[-1])
                number = numbers[-1]
            yield numbers, block

    def _joined(self, parts: list[Block]) -> dict[str, Any]:
        """Join the rows of an episode; its id, and a text that all steps have, become one value."""
        joined: dict[str, Any] = {}
        for name in parts[0]:
            rows = [part.get(name, []) for part in parts]
            if name == self._id:
                joined[name] = rows[0][0]
            elif all(
                isinstance(one, np.ndarray) and one.shape[1:] == rows[0].shape[1:] for one in rows
            ):
                joined[name] = np.concatenate(rows)
            else:
                values = [*chain.from_iterable(rows)]
                is_one = all(isinstance(value, str) and value == values[0] for value in values)
                joined[name] = values[0] if is_one else values
        return joined

    def episodes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if (schema := self.options.get("schema")) is not None:
            for label, row in self._rows(True):
                yield label, dict(flatten(f"{self.path}: {label}", row, {*schema.names}))
            return
        for label, arrays, _ in self._trajectories():
            opaque = {c.name: plain(label, arrays.get(c.name)) for c in self.columns if c.is_opaque}
            yield label, {column.name: arrays.get(column.name) for column in self.columns} | opaque


def has_meaning(name: str) -> bool:
    """Return whether a table needs a column, by its usual name, to find episodes and their ends."""
    is_needed = name in STEP_NAMES or name in KINDS or name in _EPISODE_IDS or name in COLUMNS
    return is_needed or KINDS.get(name.split(".")[0]) in ("reward", *FLAG_KINDS)


def usual_name(name: str, names: Any) -> str:
    """Return the usual name of a column.

    `obs.pos` is `observation.pos`, unless the table has a column of that name as well.
    """
    head, *rest = name.split(".")
    usual = ".".join((_USUAL.get(head, head), *rest))
    # An end of either cause beside one of terminal states, such as `done` beside `terminations`.
    is_beside = KINDS.get(name) == "done" and "terminated" in {KINDS.get(other) for other in names}
    return column_name(*(name if usual in names or is_beside else usual).split("."))


def _num_steps(where: str, arrays: dict[str, Any]) -> int:
    """Return the steps of a trajectory.

    They are the rows of its tokens, actions, rewards or flags, else of any list.
    """
    heads = [(name.split(".")[0], name) for name in arrays]
    measures = [name for measure in _MEASURES for head, name in heads if head == measure]
    for name in chain(measures, [name for head, name in heads if head != "observation"], arrays):
        if isinstance(arrays[name], np.ndarray) and arrays[name].ndim:
            return len(arrays[name])
    raise DataError(
        where,
        "must have a column with a value per step",
        ", ".join(arrays),
        "name a text to make tokens of with --tokenize COLUMN=module:function",
    )


def _set_flags(
    arrays: dict[str, Any], length: int, done_is_any_end: bool, is_at_limit: bool
) -> None:
    """Give flags a row per step, and mark an episode without a flag at its end as truncated.

    With `done_is_any_end`, "done" is also set at time limits: such a step does not terminate. No
    more does the last step of an episode that has as many steps as the time limit.
    """
    for name in SCALARS:
        value = arrays.get(name)
        if isinstance(value, np.ndarray) and value.shape == (length, 1):
            arrays[name] = value.reshape(length)
        elif name != "reward" and isinstance(value, np.ndarray) and not value.ndim and length:
            arrays[name] = np.append(np.zeros(length - 1, value.dtype), value)
    flags = {name: arrays[name] for name in _FLAGS if name in arrays}
    if "terminated" not in flags or any(
        getattr(rows, "shape", 0) != (length,) for rows in flags.values()
    ):
        return  # `ColumnFacts` names what is malformed
    truncated = arrays.setdefault("truncated", np.zeros(length, bool))
    if done_is_any_end:
        arrays["terminated"] = (flags["terminated"] != 0) & (truncated == 0)
    if is_at_limit:
        arrays["terminated"] = np.array(arrays["terminated"])  # rows of a program stay as they are
        arrays["terminated"][-1] = False
    end_episode(arrays)
