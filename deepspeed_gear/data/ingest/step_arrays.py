"""Arrays of steps, divided into episodes by flags and limits; the observation after each step.

The base of the readers of D4RL, npz, pickles, robomimic and RLlib.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

import deepspeed_gear.arguments as arguments
import deepspeed_gear.data.ingest.last_rows as last_rows
from deepspeed_gear.data.array_values import as_array
from deepspeed_gear.data.ingest.agents import Agents
from deepspeed_gear.data.ingest.decoding.hdf5_arrays import block_rows
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.source_columns import (
    FLAGS,
    LEAVE_OUT,
    column_name,
    convert,
    make_column,
    stored_dtype,
)
from deepspeed_gear.data.ingest.source_names import FLAG_KINDS, KEYS, ROW_FLAGS, meaning
from deepspeed_gear.data.ingest.step_blocks import (
    BlockRows,
    EpisodeBounds,
    Int64,
    RowsByName,
    episode_blocks,
    episode_name,
)
from deepspeed_gear.data.ingest.step_order import check_order
from deepspeed_gear.data.trajectory_block import TrajectoryBlock
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Rows

_STATES = ("next_observation", "final_observation")
# For each environment or trajectory: its name for errors ("" if there is only one), its arrays by
# key, and whether they are one whole episode.
Streams = Iterator[tuple[str, dict[str, Any], bool]]


def _kind(name: str) -> str:
    return name.split(".")[0]


class Steps:
    """Steps of one environment in order, and where its episodes end.

    Attributes:
        terminated, truncated: Flags of each step. [T], bool.
        ends: Row after the last one of each episode.
        is_open: Whether the last row has no end flag.
        has_cause: Whether flags, or a limit, separate terminal states from time limits.
        has_next: Whether there are next observations.
        is_shifted: Whether these equal the next rows bit for bit, inside all episodes.
        resets: Whether those of ended steps, terminal ones included, equal the first rows of the
            next episodes.
        only_limits: Whether terminal flags mark the ends that the limit makes, and no others.
    """

    def __init__(
        self, reader: ArrayReader, name: str, arrays: Mapping[str, Any], is_whole: bool
    ) -> None:
        """Check the arrays and find the ends of episodes.

        Args:
            arrays: By key; a part of a dict has a key such as "obs/position".
            is_whole: The steps are one episode, not those of an environment that resets itself.

        The option `episode_length` of the reader ends an episode, by a time limit, after that many
        steps.
        """
        where = self.where = f"{reader.path}: {name}: " if name else f"{reader.path}: "
        self._is_whole = is_whole
        self._has_last_row = reader.last_step != last_rows.TRANSITION
        # By kind, or kind and part, such as "observation.position". Those of observations may have
        # a row more than steps.
        self.arrays: dict[str, Any] = {}
        self.keys: dict[str, str] = {}  # key in the source of each array
        self.left_out: list[str] = []  # keys of single values and of Python objects
        for key, array in arrays.items():
            judged = reader.judged(key)
            kind, *rest = judged
            name = column_name(*judged)
            column = column_name("observation", *rest) if kind in _STATES else name
            if key == "episode_returns" or (name not in KEYS and not reader.keep(column)):
                continue
            if kind not in KEYS and (not array.ndim or array.dtype.kind == "O"):
                self.left_out.append(key)
                continue
            if array.dtype.kind == "O":  # refused before its rows, which may be huge, are read
                stored_dtype(f"{where}{key}", array.dtype)
            if name in self.keys:
                raise DataError(
                    f"{where}column {name}", "must come from one key only", None, LEAVE_OUT
                )
            self.keys[name] = key
            self.arrays[name] = array
        self.states = [name for name in self.arrays if _kind(name) == "observation"]
        self._check_rows(sorted(arrays))
        self._find_ends(reader.options.get("episode_length"), arrays.get("episode_returns"))
        if reader.options.get("last_step") is None:
            self._check_limit(reader.options.get("episode_length"))
        check_order(reader, self.where, self.arrays, self.ends)
        if self._has_last_row:
            self._move_flags()
        for name, array in self.arrays.items():
            if last_rows.is_moved(reader.last_step, name):
                rows = np.asarray(array[()])
                self.arrays[name] = np.concatenate([rows[1:], rows[-1:]])
        self._compare_next()

    def _check_rows(self, found: list[str]) -> None:
        """Set `length`; raise DataError unless every array has a row per step."""
        source = self.where.rstrip(": ")
        rows = {n: a for n, a in self.arrays.items() if n not in FLAG_KINDS}
        action = next((name for name in rows if _kind(name) == "action"), "")
        if not action or not self.states:
            raise DataError(
                source,
                "must have observations and actions",
                found,
                "docs/how-to/formats.md has the known names; name arrays of other names with "
                "--rename KEY=observation and --rename KEY=action",
            )
        for name, array in rows.items():
            if not array.ndim:
                raise DataError(
                    f"{self.where}{self.keys[name]}",
                    "must be an array with a row per step",
                    remedy="store one value for each step",
                )
        steps = "reward" if "reward" in rows else action
        self.length = len(rows[steps])
        for name, array in rows.items():
            where = f"{self.where}{self.keys[name]}"
            more = len(array) - self.length
            if more != 0 and not (more == 1 and name in self.states):
                remedy = LEAVE_OUT if _kind(name) not in KEYS else "the source is incomplete"
                raise DataError(
                    where,
                    f"must have {self.length} rows as {self.keys[steps]} has",
                    len(array),
                    remedy,
                )
            if name == "reward" and array.shape not in ((self.length,), (self.length, 1)):
                raise DataError(
                    where,
                    "must be one value per step",
                    list(array.shape),
                    "store one number for each step",
                )
        if not self.length:
            raise DataError(source, "must hold at least one step", 0, "the data set is empty")
        for kind in _STATES:
            names = {f"{kind}{name.removeprefix('observation')}": name for name in self.states}
            given = [name for name in rows if _kind(name) == kind]
            if given and set(given) != set(names):
                raise DataError(
                    source,
                    f"must have next and final observations of the parts {self.states}",
                    given,
                    "give them for all parts of the observation, or for none",
                )
            for name in given:
                shape = [self.length, *rows[names[name]].shape[1:]]
                if list(rows[name].shape) != shape:
                    raise DataError(
                        f"{self.where}{self.keys[name]}",
                        f"must have the shape of {self.keys[names[name]]}, {shape}",
                        list(rows[name].shape),
                        "store them with the shape of the observations",
                    )

    def _find_ends(self, limit: int | None, returns: Any) -> None:
        given: dict[str, Any] = {
            kind: self._flag(kind) for kind in FLAG_KINDS if kind in self.arrays
        }
        if "start" in given:  # recordings of Stable-Baselines are of whole episodes
            start = given.pop("start")
            is_complete = returns is not None and returns.shape == (np.count_nonzero(start),)
            given["done"] = given.get("done", False) | np.append(start[1:], is_complete)
        causes = [n for n in self.arrays if n == "truncated" or self.keys[n] == "is_terminal"]
        if limit is not None and causes:
            raise DataError(
                f"{self.where}{self.keys[causes[0]]}",
                "must not be in the source with --episode-length",
                None,
                "leave it out",
            )
        if not (self._is_whole or limit is not None or given.keys() & {"truncated", "done"}):
            raise DataError(
                f"{self.where}timeouts",
                "must be in the source",
                sorted(given),
                "--episode-length N ends an episode after N steps; --rename KEY=dones names a flag "
                "of any end; add an array of zeros if no episode ends by a time limit; --format "
                "ogbench reads an npz file whose terminals mark the last row of a trajectory, "
                "which holds only an observation",
            )
        if self.keys.get("terminated") == "is_terminal" and "done" in given:
            inside = given["terminated"] & ~given["done"]
            if inside[:-1].any():
                raise DataError(
                    f"{self.where}is_terminal",
                    "must be set at the last row of an episode only",
                    f"row {int(np.argmax(inside))}",
                    "correct is_terminal, or is_last and is_first of this row",
                )
        no_flag = np.zeros(self.length, np.bool_)
        ends = np.logical_or.reduce([no_flag, *given.values()])
        done = given.get("done", no_flag)
        truncated = given.get("truncated", no_flag)
        self._flagged = np.flatnonzero(ends) + 1  # rows after those with an end flag
        if limit is not None:
            # `first` is the first row of each row's episode by the flags; a limit divides it. With
            # an end at row 0 and limit 2, rows 0, 1, 2, 3 are steps 1, 1, 2, 1 of their episodes.
            row = np.arange(self.length)
            first = np.maximum.accumulate(np.where(np.append(True, ends[:-1]), row, 0))
            truncated = (row - first + 1) % (limit + int(self._has_last_row)) == 0
            ends |= truncated
        self.only_limits = bool((given.get("terminated", ~truncated) == truncated).all())
        self.has_cause = limit is not None or not done.any() or len(given) > 1
        self.terminated = given.get("terminated", done & ~truncated)
        self.truncated = given.get("truncated", ends & ~self.terminated)
        self.ends = np.flatnonzero(np.append(ends[:-1], True)) + 1
        self.is_open = not (self.terminated[-1] or self.truncated[-1])

    def _check_limit(self, limit: int | None) -> None:
        """Refuse arrays that have limit + 1 rows for each episode of a limit.

        Flags after every limit + 1 rows show it; without flags, the number of rows does.
        """
        if limit is None or self._has_last_row:
            return
        if self.arrays.keys().isdisjoint(FLAG_KINDS):
            has_last_rows = bool(self.length % (limit + 1) == 0 and self.length % limit)
        else:
            has_last_rows = bool((np.diff(self._flagged, prepend=0) == limit + 1).all())
            has_last_rows &= len(self._flagged) > 0
        # Flags of terminal states alone would make all these limits terminal.
        rename = f"--rename {self.keys['terminated']}=dones " if "terminated" in self.arrays else ""
        if has_last_rows:
            raise DataError(
                f"{self.where}--episode-length {limit}",
                f"must come with --last-step where a source has {limit + 1} rows for each episode",
                f"{self.length} rows",
                f"{rename}--last-step action: a row has the action and the reward of the step "
                f"before it (DrQ-v2, ExORL, V-D4RL); {rename}--last-step observation: the last row "
                "holds only an observation (RLDS, OGBench); --last-step transition: each row is a "
                "step",
            )

    def _move_flags(self) -> None:
        """Move the flags of last rows, which hold only an observation, to the steps before them."""
        lengths = np.diff(self.ends, prepend=0)
        last = self.ends[lengths > 1] - 1
        for name in ("terminated", "truncated"):
            flags = np.array(getattr(self, name))  # those of a source stay as they are
            flags[last - 1] = flags[last]
            flags[last] = False
            setattr(self, name, flags)

    def _flag(self, kind: str) -> NDArray[np.bool_]:
        rows = np.asarray(self.arrays[kind][()])
        where = f"{self.where}{self.keys[kind]}"
        if not rows.ndim:  # of the last step
            rows = np.append(np.zeros(self.length - 1, rows.dtype), rows)
        if rows.shape not in ((self.length,), (self.length, 1)):
            raise DataError(
                where,
                f"must have one value for each of {self.length} steps",
                list(rows.shape),
                "store one flag for each step",
            )
        return convert(where, rows, FLAGS[0])

    def end_rewards(self) -> tuple[bool, bool]:
        """Return whether first, and last, rows of episodes have rewards other than 0."""
        if "reward" not in self.arrays:
            return False, False
        rewards = np.asarray(self.arrays["reward"][()]).reshape(-1)
        starts = np.append(0, self.ends[:-1])
        return bool(rewards[starts].any()), bool(rewards[self.ends - 1].any())

    def _compare_next(self) -> None:
        """Set `is_shifted` and `resets` in one pass over observations and next observations."""
        self.has_next = any(_kind(name) == "next_observation" for name in self.arrays)
        # A state that follows a terminal one is that of a reset, so only data with an inner
        # termination show whether next observations at ends are those of resets.
        inner = self.ends[self.ends < self.length] - 1
        self.is_shifted = self.has_next
        self.resets = self.has_next and bool(self.terminated[inner].any())
        ends = np.zeros(self.length, np.bool_)
        ends[self.ends - 1] = True
        flags = self.terminated | self.truncated
        for name in self.states if self.has_next else ():
            if f"final_{name}" in self.arrays:
                rows = np.array(self.arrays[f"next_{name}"][: self.length])
                rows[flags] = self.arrays[f"final_{name}"][: self.length][flags]
                self.arrays[f"next_{name}"] = rows
            here = self.arrays[name]
            following = self.arrays[f"next_{name}"]
            self.is_shifted &= here.dtype == following.dtype
            step = block_rows(here)
            for low in range(0, self.length - 1 if self.is_shifted else 0, step):
                high = min(low + step, self.length - 1)
                after = here[low + 1 : high + 1]
                other = following[low:high]
                is_end = ends[low:high]
                self.is_shifted &= after[~is_end].tobytes() == other[~is_end].tobytes()
                self.resets &= after[is_end].tobytes() == other[is_end].tobytes()
                if not self.is_shifted:
                    break
        self.resets &= self.is_shifted

    def bounds(self, has_own_next: bool) -> EpisodeBounds:
        """Return the bounds of all episodes.

        The last step of an episode that does not terminate is left out where the observation after
        it is unknown. A last row that holds only an observation is no step.

        Args:
            has_own_next: Next observations are columns of their own, so all steps are kept.
        """
        high = self.ends
        is_kept = np.full(len(high), not self._has_last_row)
        if not has_own_next:
            is_known = np.logical_or.reduce([*self._after(self.states[0], high).values()])
            is_kept &= self.terminated[high - 1] | is_known
        return EpisodeBounds(np.append(0, high[:-1]), high - ~is_kept, high)

    def _after(self, name: str, high: Int64) -> dict[tuple[str, int], NDArray[np.bool_]]:
        """Return where the observation after the steps `high - 1` is, if it is known.

        Where an environment resets itself, next observations at ends, and the row T of T+1 rows
        after an end, may be those of the next episode.

        Returns:
            Which of the observations are in row `high + shift` of an array, by its name and the
            shift. Each is in one of them at most.
        """
        is_end = self.terminated[high - 1] | self.truncated[high - 1]
        is_final = is_end & (f"final_{name}" in self.arrays)
        is_next = ~is_final & self.has_next & ~(is_end & self.resets)
        is_given = (high == self.length) & (self.length < len(self.arrays[name]))
        is_given &= self._is_whole | ~is_end
        return {
            (f"final_{name}", -1): is_final,
            (f"next_{name}", -1): is_next,
            (name, 0): is_given & ~is_final & ~is_next,
        }

    def rows(self, column: Column, places: BlockRows) -> NDArray[Any]:
        """Return a column's rows of the episodes of a block."""
        if column.name in ("terminated", "truncated"):
            return places.step_rows(getattr(self, column.name))
        array = self.arrays[column.name]
        if column.rows == "T":
            return places.step_rows(array)
        states = places.state_rows(array)
        bounds = places.bounds
        is_whole = bounds.end == bounds.high  # the row after the last step is not of the episode
        if not is_whole.any():
            return states
        for (key, shift), is_there in self._after(column.name, bounds.high).items():
            chosen = np.flatnonzero(is_there & is_whole)
            if not len(chosen):
                continue
            begin = places.first if shift else places.end
            following = np.asarray(self.arrays[key][begin : places.end + 1 + shift])
            states = states.astype(np.result_type(states, following), copy=False)
            states[places.final_rows[chosen]] = following[bounds.high[chosen] + shift - begin]
        return states


class ArrayReader(Reader):
    """Base of formats whose arrays have rows for the steps of one or more environments."""

    takes: ClassVar[tuple[str, ...]] = ("episode_length", "last_step")
    early_roles = ("observation", "action", "reward", "terminated", "truncated")
    last_step = last_rows.TRANSITION  # what the last row of an episode holds
    _num_bytes = 0  # of the arrays that were made so far

    def judged(self, key: str) -> tuple[str, ...]:
        """Return the kind of a key's array (`KINDS`) or its name, and the parts of a dict below."""
        return meaning(self.names.name(key.replace("/", ".")))

    def kind(self, key: str) -> str:
        """Return the kind of a key's array, or its name where it has none."""
        return self.judged(key)[0]

    @abstractmethod
    def _streams(self) -> Streams:
        """Yield the steps of each environment or trajectory, in the same order in every call."""

    def _steps(self) -> Iterator[Steps]:
        for name, arrays, is_whole in self._streams():
            yield Steps(self, name, self._agents.joined(name, arrays, self.judged), is_whole)

    def _as_array(self, where: str, value: Any, file_bytes: int) -> NDArray[Any]:
        """Convert nested lists to an array; those of a pickle may contain one list many times.

        Texts and lists of unequal lengths become an array of Python objects, which is left out or
        refused later.
        """
        # The size if all lists are as long as the first ones; 64 is the most dimensions of NumPy.
        size = 8
        part = value
        for _ in range(64):
            if not isinstance(part, (list, tuple)) or not part:
                break
            size *= len(part)
            part = part[0]
        self._num_bytes += size * int(getattr(part, "size", 1))
        self.expansion.check(where, self._num_bytes, file_bytes)
        try:
            return as_array(value)
        except ValueError:
            return np.empty(len(value), object)

    def _describe(self) -> None:
        """Set the attributes of an open reader.

        Cost: one pass over flags, observations and next observations.
        """
        self.keep = cache(self.select)
        self._agents = Agents(str(self.path))
        if (limit := self.options.get("episode_length")) is not None:
            arguments.count("episode_length", limit)
        keys = {key.replace("/", "."): None for _, arrays, _ in self._streams() for key in arrays}
        self.names.compare(keys)
        has_row_flags = not {self.names.name(key) for key in keys}.isdisjoint(ROW_FLAGS)
        if (given := self.options.get("last_step")) is not None:
            self.last_step = last_rows.check_last_step(given)
        elif has_row_flags:
            rewarded = [steps.end_rewards() for steps in self._steps()]
            at_first = any(first for first, _ in rewarded)
            at_last = any(last for _, last in rewarded)
            self.last_step = last_rows.last_step(self.path, at_first, at_last)
        if has_row_flags or self.last_step != last_rows.TRANSITION:
            self.notes.append(last_rows.NOTES[self.last_step])
        first: Steps | None = None
        pairs = []
        is_shifted = True
        num_open = 0
        num_resets = 0
        has_cause = True
        only_limits = limit is not None
        num_terminal = 0
        for steps in self._steps():
            first = first or steps
            for name in sorted(steps.arrays.keys() ^ first.arrays.keys()):
                if name not in FLAG_KINDS and _kind(name) not in _STATES:
                    raise DataError(
                        f"{steps.where}{name}", "must be in every trajectory", None, LEAVE_OUT
                    )
            if steps.has_next != first.has_next:
                raise DataError(
                    str(self.path),
                    "must have next observations in all trajectories or in none",
                    remedy="ingest the two kinds into data sets of their own",
                )
            is_shifted &= steps.is_shifted
            has_cause &= steps.has_cause
            num_open += steps.is_open
            num_resets += steps.resets
            only_limits &= steps.only_limits
            num_terminal += int(steps.terminated.sum())
            bounds = steps.bounds(False)
            pairs.append((bounds.high - bounds.low, bounds.lengths))
        if first is None:
            raise DataError(
                str(self.path), "must hold at least one step", 0, "the data set is empty"
            )
        if only_limits and num_terminal:
            key = first.keys["terminated"]
            raise DataError(
                f"{self.path}: {key}",
                f"must not mark all ends after {limit} steps and no others: these are time limits",
                f"{num_terminal} such ends",
                f"--rename {key}=dones names flags of any end; --last-step observation (or "
                "--format ogbench) is for trajectories whose last row holds only an observation",
            )
        self._has_own_next = first.has_next and not is_shifted
        has_last_row = self.last_step != last_rows.TRANSITION
        lengths, kept = np.concatenate(pairs, axis=1)
        kept = lengths if self._has_own_next and not has_last_row else kept
        self.num_steps = int(kept.sum())
        num_empty = int((kept == 0).sum()) if has_last_row else 0
        num_short = 0 if has_last_row else int((kept < lengths).sum())
        self.columns = tuple(self._columns_of(first))
        self._has_final_row = any(column.rows == "T+1" for column in self.columns)
        episodes = int(np.count_nonzero(kept))
        self.description.update(episodes=episodes, steps=self.num_steps, shifted=is_shifted)
        agents = self._agents.names
        if agents:
            self.description.update(agents=agents)
        self.note("{}", self._agents.note)
        self.note("{}: not arrays of numbers with a row per step, left out", first.left_out)
        self.note("{} episodes have no end flag: kept as truncated episodes", num_open)
        self.note(
            "next observations at ends are those of the next episodes: not used there", num_resets
        )
        self.note(
            "next observations are not the shifted observations: stored as columns",
            self._has_own_next,
        )
        self.note(
            "the last step of {} episodes that do not terminate is left out, as the observation "
            "after it is missing",
            num_short,
        )
        self.note("{} episodes of one row have no step: left out", num_empty)
        self.note(last_rows.ENDS_TERMINATE, not has_cause)

    def _columns_of(self, steps: Steps) -> Iterator[Column]:
        kinds = ["observation", *_STATES[: int(self._has_own_next)], "action", "reward"]
        names = [name for name in steps.arrays if name not in FLAG_KINDS]
        others = [name for name in names if _kind(name) not in (*kinds, *_STATES)]
        of_kinds = [name for kind in kinds for name in names if _kind(name) == kind]
        for name in (*of_kinds, "", *others):
            if not name:  # both flags, before other columns
                yield from FLAGS
                continue
            array = steps.arrays[name]
            where = f"{self.path}: {steps.keys[name]}"
            rows: Rows = "T+1" if name in steps.states and not self._has_own_next else "T"
            role = _kind(name).removeprefix("next_") if name in of_kinds else "other"
            yield make_column(where, name, array.dtype, array.shape[1:], role, rows)

    def episodes(self) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
        for block in self.blocks():
            for one in block.divided():
                yield one.name_of(0), one.arrays

    def blocks(self) -> Iterator[TrajectoryBlock]:
        """Yield the episodes in order, in blocks of about 2 MiB."""
        if type(self).episodes is not ArrayReader.episodes:  # of a class from outside
            yield from super().blocks()
            return
        number = 0
        row_bytes = sum(column.row_bytes for column in self.columns)
        for steps in self._steps():
            bounds = steps.bounds(self._has_own_next)
            bounds = bounds[bounds.lengths > 0]
            yield from episode_blocks(
                bounds, row_bytes, number, partial(self._read, steps), partial(self._block, steps)
            )
            number += len(bounds)

    def _read(self, steps: Steps, bounds: EpisodeBounds) -> RowsByName:
        places = BlockRows(bounds, self._has_final_row)
        return {column.name: steps.rows(column, places) for column in self.columns}

    def _block(
        self, steps: Steps, bounds: EpisodeBounds, number: int, rows: RowsByName
    ) -> TrajectoryBlock:
        arrays = {}
        for column in self.columns:
            key = steps.keys.get(column.name, column.name)
            where = f"{self.path}: {key}, {episode_name(number)}"
            arrays[column.name] = convert(where, rows[column.name], column)
        block = TrajectoryBlock(
            partial(episode_name, number),
            bounds.lengths,
            arrays,
            {column.name: column.rows for column in self.columns},
            self._has_final_row,
        )
        last = block.last_steps
        is_open = ~(arrays["terminated"][last] | arrays["truncated"][last])
        if is_open.any():
            arrays["truncated"] = arrays["truncated"].copy()
            arrays["truncated"][last[is_open]] = True
        return block
