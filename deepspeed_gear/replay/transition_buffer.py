"""TransitionBuffer: single transitions, with the calls of CleanRL and Stable-Baselines3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.data.stored_values import as_stored
from deepspeed_gear.errors import ConfigError, DataError, StoreError
from deepspeed_gear.log import LOG
from deepspeed_gear.public_names import PublicNames
from deepspeed_gear.replay.replay import Replay
from deepspeed_gear.replay.transition_spaces import (
    nested_fields,
    space_columns,
    space_fields,
    space_parts,
)
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.writer.autoreset_modes import Autoreset, resolve

# Steps of a trajectory, where no field reads other steps: rows for all of them are reserved, and
# those left over are freed at its end.
LONGEST = 128
MARGIN = 32  # one of so many transitions is added to the capacity, as free rows may be scattered
FIRST_CHECK = 256  # gaps before the log may have a warning of them
MOST_GAPS = 1 / 8  # share of transitions after a gap that gives no warning
FIRST_RESETS = 8  # episodes before the log may have a warning of the autoreset mode


class TransitionSamples(NamedTuple):
    """Sampled transitions, with the names of Stable-Baselines3.

    [B, *shape] each, and [B, 1] for a column without a shape. For a `Dict` space it is a dict of
    such tensors, for a `Tuple` space a tuple, nested as the space is. The tensors belong to `batch`
    and are overwritten with it: see Batch.

    Attributes:
        observations: Observations before the actions.
        actions: The actions.
        next_observations: Observations after the actions; with `n_step`, after the last of n steps.
        dones: 1 where the episode terminated; 0 elsewhere, even where it was truncated. float32.
        rewards: The rewards; with `n_step`, the n-step returns. float32.
        discounts: With `n_step`, the factor of the next observation's value: gamma^k, and 0 where
            `dones` is 1. None without `n_step`. float32.
        batch: The batch, with its own names, ids and weights.
    """

    observations: Any
    actions: Any
    next_observations: Any
    dones: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor | None
    batch: Batch


class _Rows(NamedTuple):
    """The form of one argument of `add`: a row of a column for each environment."""

    argument: str
    column: Column
    shape: tuple[int, ...]  # [N, *shape]
    others: tuple[tuple[int, ...], ...]  # other shapes that are admitted

    @classmethod
    def of(cls, argument: str, column: Column, num_envs: int) -> _Rows:
        others = [column.shape] if num_envs == 1 else []
        if not column.shape:
            others.append((num_envs, 1))
        return cls(argument, column, (num_envs, *column.shape), tuple(others))

    def read(self, value: Any) -> np.ndarray:
        """Return a value as rows of the stored dtype. [N, *shape]."""
        flags = value if isinstance(value, list) else [value]
        if self.argument == "truncated" and any(isinstance(flag, Mapping) for flag in flags):
            remedy = "give the environment's truncations, in the place of infos"
            raise DataError(
                self.argument, "must be a flag of each environment", type(value).__name__, remedy
            )
        rows = value if isinstance(value, np.ndarray) else arguments.array(self.argument, value)
        if rows.shape != self.shape:
            if rows.shape not in self.others:
                spaces = "single_observation_space, single_action_space"
                remedy = f"give the spaces of one environment: {spaces}"
                rule = f"must have shape {list(self.shape)}"
                raise DataError(self.argument, rule, list(rows.shape), remedy)
            rows = rows.reshape(self.shape)
        if rows.dtype == self.column.numpy_dtype:
            return rows
        if rows.dtype.kind == "f" and self.column.is_floating:
            with np.errstate(over="ignore"):  # the writer refuses what overflows
                return rows.astype(self.column.numpy_dtype)
        return as_stored(rows, self.column, "the transition", len(rows))


# Columns for fields of whole episodes, which continue where an episode is stored in parts.
_OF_EPISODES = (
    Column("timestep", "int32", (), "timestep"),
    Column("return_to_go", "float32", (), "return_to_go", late=True),
)


class TransitionBuffer(ProcessBound, PublicNames):
    """Replay buffer of single transitions from one or many environments.

    Each observation is stored once: the next observation of a transition is the observation of the
    following one, and only the last one of a trajectory is stored besides. So the transitions of an
    environment must be added in order. If an observation is not the next observation of the
    transition before it, as after a reset by the program, a new trajectory begins.

    One process and one thread. A transition can be sampled as soon as it is added. Use `replay` to
    save and load, to report priorities and for statistics.

    Args:
        buffer_size: Number of transitions. At least so many are held if trajectories have 16 on
            average. Whole trajectories are evicted, the oldest first, when rows are needed; so up
            to 1/32 of `buffer_size` and (N + 1) * max_length more are held.
        observation_space: Space of one environment: Box, Discrete, MultiDiscrete or MultiBinary, or
            a Dict or Tuple of them, nested to any depth. Each part is a column of its own:
            `observation.camera`, `observation.joints.0`.
        action_space: Space of one environment, of the same kinds.
        device: Device of the samples.
        n_envs: Number of environments, N; or the environment itself, whose number and autoreset
            mode are read.
        autoreset: As `Replay.vector_writer`; required if `n_envs` is a number. With "next_step" the
            step that resets an environment is no transition and is left out; with "same_step"
            `next_obs` has the last observation where an episode was truncated.
        table: More options of the table, such as `max_length`, the steps of the longest trajectory.
            A longer episode is stored in parts, at whose ends n-step returns and windows end. The
            default is 128; if a field reads other steps than a transition's (frame stacks, time
            steps), it is the environment's `spec.max_episode_steps`, or without one as many as fit.
            It is at most `buffer_size` / (N + 1).
        **options: More options of the `gear` section: `batch_size` (256 by default), `seed`,
            `sampler`, `n_step`, `fields`, ...
    Raises:
        ConfigError, DataError, SchemaError: An option, a space or the autoreset mode does not fit.
        StoreError, BuildError: As `Replay`.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: torch.device | str = "cpu",
        n_envs: Any = 1,
        autoreset: Autoreset | None = None,
        table: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        buffer_size = arguments.count("buffer_size", buffer_size)
        self.num_envs, mode = resolve(n_envs, autoreset)
        states = [*space_columns("observation", observation_space, "T+1")]
        actions = [*space_columns("action", action_space, "T")]
        self._spaces = {"observation": observation_space, "action": action_space}
        self._fields = {
            "observation": space_fields("observation", observation_space),
            "action": space_fields("action", action_space),
            "next_observation": space_fields("next_observation", observation_space),
        }
        columns = [
            *states,
            *actions,
            Column("reward", "float32", (), "reward"),
            Column("terminated", "bool", (), "terminated"),
            # Without the role: the store would also mark the ends of parts as truncated.
            Column("truncated", "bool"),
        ]
        forms = [_Rows.of(column.name, column, self.num_envs) for column in columns]
        self._state_forms = forms[: len(states)]
        self._next_forms = [
            form._replace(argument=form.argument.replace("observation", "next_obs", 1))
            for form in self._state_forms
        ]
        self._other_forms = forms[len(states) :]
        # Only steps of one column of observations are taken and compared by one native call.
        self._is_plain = [column.name for column in (*states, *actions)] == [
            "observation",
            "action",
        ]
        fields = arguments.mapping("fields", options.get("fields", {}))
        derived = {
            of.get("derived", name) for name, of in fields.items() if isinstance(of, Mapping)
        }
        columns += [column for column in _OF_EPISODES if column.name in derived]
        most = getattr(getattr(n_envs, "spec", None), "max_episode_steps", None)
        names = [column.name for column in (*states, *actions)]
        section = _section(buffer_size, self.num_envs, table or {}, options, names, most)
        self.replay = Replay(section, schemas={"main": Schema(columns)}, device=device)
        # "same_step" is "disabled" for the writer: the first observation of an episode comes with
        # its first transition.
        self._resets_itself = mode == "next_step"
        own: Autoreset = "next_step" if self._resets_itself else "disabled"
        self._writer = self.replay.vector_writer(self.num_envs, own)
        # Set by an error, which may have come before or after the step was taken: the next
        # transitions begin trajectories.
        self._begins_anew = False
        self._num_gaps = self._num_equal = self._num_resets = 0
        # Environments whose transition before may have an overwritten `obs`; None: none. [N], bool.
        self._suspects: np.ndarray | None = None

    def add(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, terminated: Any, truncated: Any
    ) -> None:
        """Add a transition of every environment.

        Args:
            obs: Observations before the actions. [N, *shape]; if N is 1, all arguments may also
                come without this axis. For a Dict or Tuple space the parts, nested as it is, as
                environments return them.
            next_obs: Observations after the actions; at the end of an episode, its last one.
                [N, *shape].
            action: Actions. [N, *shape]; those without a shape also as [N, 1].
            reward: Rewards. [N].
            terminated: Which episodes ended in a terminal state. [N], bool.
            truncated: Which episodes were cut off: the next observation still has a value. [N],
                bool.
        Raises:
            DataError: An argument does not fit its space, or is not finite; or `obs` is the memory
                of `next_obs`, which the environment has overwritten. Nothing was added.
            StoreFullError, NotReadyError: As `VectorWriter.step`; the next transitions begin
                trajectories.
        """
        done_by = {
            "action": action,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
        }
        if self._suspects is not None and not self._suspects.any():
            self._suspects = None
        begins = None if self._suspects is None else self._writer.waits
        try:
            is_plain = self._is_plain and not self._begins_anew
            whole = {"observation": next_obs, **done_by}
            if is_plain and self._writer.take_after(obs, whole):
                self._clear(begins)
                return
            # Arguments are not in the stored form, or a trajectory begins: convert and try again.
            observation_space = self._spaces["observation"]
            parts = space_parts("observation", "obs", observation_space, obs)
            next_parts = space_parts("observation", "next_obs", observation_space, next_obs)
            given = {**done_by, **space_parts("action", "action", self._spaces["action"], action)}
            before = {f.column.name: f.read(parts[f.column.name]) for f in self._state_forms}
            after = {f.column.name: f.read(next_parts[f.column.name]) for f in self._next_forms}
            others = {f.column.name: f.read(given[f.column.name]) for f in self._other_forms}
            columns: dict[str, Any] = {**after, **others}
            if is_plain and self._writer.take_after(before["observation"], columns):
                self._clear(begins)
                return
            addresses = ((_address(parts[name]), _address(next_parts[name])) for name in parts)
            is_one_memory = any(one is not None and one == other for one, other in addresses)
            self._begin(before, after, is_one_memory)
            self._writer.step(publish=True, **columns)
        except StoreError:
            self._begins_anew = True
            raise

    def _begin(
        self,
        observations: Mapping[str, np.ndarray],
        following: Mapping[str, np.ndarray],
        is_one_memory: bool,
    ) -> None:
        """Begin trajectories after ended episodes, and where observations do not follow the last.

        Args:
            observations: Observations of this transition, by column. [N, *shape] each.
            following: Observations after it, by column. [N, *shape] each.
            is_one_memory: Whether both were given in the same memory.
        """
        writer = self._writer
        last = {name: writer.last_states(name) for name in observations}
        differs = self._differ(observations, last)
        ended = writer.waits
        fresh = ~writer.has_begun
        if self._begins_anew:
            begins = np.ones(self.num_envs, bool)
        else:
            begins = differs | fresh if self._resets_itself else differs | ended
            num_resets = int((differs & ended & ~fresh).sum()) if self._resets_itself else 0
            gaps = differs & ~ended
            self._check_overwritten(gaps & is_one_memory, ended)
            num_equal = 0
            if gaps.any():
                num_equal = int((gaps & ~self._differ(observations, following)).sum())
            self._note(int(gaps.sum()), num_equal, num_resets)
        if begins.any():
            writer.reset(begins, **observations)
        self._begins_anew = False

    def _differ(self, one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the environments for which any column differs. [N], bool."""
        differs = np.zeros(self.num_envs, bool)
        for name, rows in one.items():
            differs |= (rows != other[name]).reshape(self.num_envs, -1).any(axis=1)
        return differs

    def _clear(self, begins: np.ndarray | None) -> None:
        """Clear the suspects that continue their trajectory; those of `begins` stay suspect."""
        if self._suspects is not None and begins is not None:
            self._suspects &= begins

    def _check_overwritten(self, suspects: np.ndarray, begins: np.ndarray) -> None:
        """Raise a DataError if the environment has overwritten `obs` in two transitions in a row.

        A suspect transition does not follow the one before, and has its observations before and
        after in one memory. A program that resets may cause one, but not two in a row. The first
        transitions of episodes, `begins`, show nothing and are skipped.
        """
        before = np.zeros_like(suspects) if self._suspects is None else self._suspects
        self._suspects = suspects | (before & begins)
        if (before & suspects).any():
            environment = int(np.argmax(before & suspects))
            rule = (
                "must be the policy's input, but it shares the memory of next_obs, which step has "
                "overwritten"
            )
            remedy = "the environment returns one array again and again: keep obs = next_obs.copy()"
            raise DataError(f"obs of environment {environment}", rule, None, remedy)

    def _note(self, num_gaps: int, num_equal: int, num_resets: int) -> None:
        """Count gaps and resets, and log one warning each if there are many.

        Args:
            num_gaps: Transitions that do not follow the one before in an episode; each stores an
                observation twice.
            num_equal: Those of them whose `obs` equals `next_obs`.
            num_resets: Episodes that do not begin at the last state, with "next_step".
        """
        gaps = self._num_gaps
        resets = self._num_resets
        added = self._writer.num_steps
        self._num_gaps = gaps + num_gaps
        self._num_resets = resets + num_resets
        self._num_equal += num_equal
        are_most = self._num_resets > self._writer.num_trajectories / 2
        if resets < FIRST_RESETS <= self._num_resets and are_most:
            LOG.warning(
                'gear: TransitionBuffer: autoreset "next_step": obs after the end of an episode '
                "should be its last next_obs, in the step that resets it, got another one after "
                f"{self._num_resets} episodes: give the environment as n_envs, or its own "
                "autoreset mode"
            )
        if gaps < FIRST_CHECK <= self._num_gaps and self._num_gaps > MOST_GAPS * added:
            cause = ""
            if self._num_equal > self._num_gaps / 2:
                cause = (
                    f". In {self._num_equal} of them obs equals next_obs: if the environment "
                    "overwrites the array that it has returned, keep obs = next_obs.copy()"
                )
            LOG.warning(
                "gear: TransitionBuffer: obs should be the next_obs of the environment's "
                f"transition before it, unless an episode begins, got {self._num_gaps} others in "
                f"{added} transitions; each begins a trajectory, and fewer transitions are held: "
                f"add them in order, with obs as the policy gets them{cause}"
            )

    def sample(self, batch_size: int | None = None) -> TransitionSamples:
        """Return a batch of transitions.

        Args:
            batch_size: B; all batches have the size that the constructor got.
        Raises:
            ConfigError: `batch_size` is another one.
            StoreError, NotReadyError: As `Replay.sample`.
        """
        size = self.replay.batch_info.micro
        if batch_size is not None and batch_size != size:
            remedy = "give batch_size to TransitionBuffer"
            raise ConfigError("batch_size", f"must be {size}, the buffer's", batch_size, remedy)
        batch = self.replay.sample()
        if self.replay.config.n_step is None:
            reward = batch["reward"]
            done = batch["terminated"]
            discounts = None
        else:
            reward = batch["return_n"]
            discount = batch["discount"]
            done = (discount == 0).float()
            discounts = discount.unsqueeze(1)
        return TransitionSamples(
            observations=nested_fields(batch, self._fields["observation"]),
            actions=nested_fields(batch, self._fields["action"]),
            next_observations=nested_fields(batch, self._fields["next_observation"]),
            dones=done.unsqueeze(1),
            rewards=reward.unsqueeze(1),
            discounts=discounts,
            batch=batch,
        )

    def __len__(self) -> int:
        """Return the number of transitions that the buffer holds."""
        return self.replay.num_steps

    def __repr__(self) -> str:
        return f"TransitionBuffer({self.num_envs} environments, {self.replay!r})"

    def close(self) -> None:
        """Close the replay; safe to call twice."""
        self.replay.close()


def _address(value: Any) -> int | None:
    """Return the address of a value that a program can overwrite; None for numbers."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    return id(value) if isinstance(value, list) else None


def _reads_other_steps(field: tuple[str, Any]) -> bool:
    """Return whether a field reads other steps than a transition's own and its next observation."""
    name, options = field
    if not isinstance(options, Mapping):
        return False  # the config refuses it
    column = options.get("column", name)
    offset = options.get("offset", 0)
    is_next = str(column).split(".")[0] == "observation" and offset in (1, "n_step")
    derived = name in ("timestep", "return_to_go") or options.get("derived") is not None
    return derived or options.get("length") is not None or not (offset == 0 or is_next)


def _section(
    buffer_size: int,
    num_envs: int,
    table: Mapping[str, Any],
    options: dict[str, Any],
    names: Sequence[str],
    most_steps: int | None,
) -> dict[str, Any]:
    """Return a buffer's `gear` section.

    The capacity is `buffer_size`, the margin for scattered rows, the rows that are reserved for the
    growing trajectory of each environment, and those of one that an eviction may free in excess.

    Args:
        names: Names of the columns of observations and actions.
        most_steps: Steps of the longest episode; None if unknown.
    """
    for name in ("tables", "data"):
        if name in options:
            remedy = "the buffer has one table: give its options in table"
            raise ConfigError(name, "must be left out", None, remedy)
    fields = arguments.mapping("fields", options.get("fields", {}))
    longest = most_steps if any(map(_reads_other_steps, fields.items())) else LONGEST
    default = max(1, min(longest or buffer_size, buffer_size // (num_envs + 1)))
    given = arguments.mapping("table", table).get("max_length", default)
    longest = arguments.count("table.max_length", given)
    sampler = arguments.mapping("sampler", options.get("sampler", {}))
    capacity = buffer_size + buffer_size // MARGIN + (num_envs + 1) * longest
    next_offset = "n_step" if options.get("n_step") is not None else 1
    return {
        "batch_size": 256,
        **options,
        "tables": {
            "main": {"capacity_steps": capacity, "remove": "fifo", **table, "max_length": longest}
        },
        "sampler": {"kind": "uniform", "unit": "step", **sampler},
        "fields": {
            **{name: {} for name in names},
            "reward": {},
            "terminated": {"as": "float32"},
            **{
                f"next_{name}": {"column": name, "offset": next_offset}
                for name in names
                if name.split(".")[0] == "observation"
            },
            **fields,
        },
    }
