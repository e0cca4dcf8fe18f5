"""TransitionBuffer: a replay of single transitions with the calls of CleanRL and
Stable-Baselines3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.context import LOG
from deepspeed_gear.data.trajectory_checks import as_stored
from deepspeed_gear.errors import ConfigError, DataError, StoreError
from deepspeed_gear.public_names import PublicNames
from deepspeed_gear.replay.replay import Replay
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.writer.autoreset import Autoreset, resolve

LONGEST = (
    128  # steps of a trajectory, where no field reads others: rows for it are reserved and freed
)
MARGIN = 32  # one of so many transitions is held besides: free rows may be scattered
FIRST_CHECK = 256  # gaps before the log may have a warning
MOST_GAPS = 1 / 8  # of the transitions, without a warning
FIRST_RESETS = 8  # episodes before the log may have a warning of the autoreset mode


class TransitionSamples(NamedTuple):
    """Sampled transitions, by the names of Stable-Baselines3.

    [B, *shape] each, and [B, 1] for a column without a shape. The tensors are those of `batch`, and
    are overwritten with it: see Batch.

    Attributes:
        observations: Before the actions.
        actions: Of the environments, or of the program.
        next_observations: After the actions; with `n_step`, after its last step.
        dones: 1 where the episode terminated, 0 elsewhere: also where it was truncated. float32.
        rewards: The rewards; with `n_step`, the n-step returns. float32.
        discounts: With `n_step`, of the value of the next observation: gamma^k, 0 where `dones` is
            1. None without it. float32.
        batch: The batch, with its own names, ids and weights.
    """

    observations: torch.Tensor
    actions: torch.Tensor
    next_observations: torch.Tensor
    dones: torch.Tensor
    rewards: torch.Tensor
    discounts: torch.Tensor | None
    batch: Batch


class _Rows(NamedTuple):
    """The form of one argument of `add`: a row of a column for each environment."""

    argument: str
    column: Column
    shape: tuple[int, ...]  # [N, *shape]
    others: tuple[tuple[int, ...], ...]  # shapes that are admitted too

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
                remedy = (
                    "give the spaces of one environment: single_observation_space, "
                    "single_action_space"
                )
                rule = f"must have shape {list(self.shape)}"
                raise DataError(self.argument, rule, list(rows.shape), remedy)
            rows = rows.reshape(self.shape)
        if rows.dtype == self.column.numpy_dtype:
            return rows
        if rows.dtype.kind == "f" and self.column.is_floating:
            return rows.astype(self.column.numpy_dtype)  # the writer refuses what overflows
        return as_stored(rows, self.column, "the transition", len(rows))


_OF_EPISODES = (  # go on where an episode is stored in parts
    Column("timestep", "int32", (), "timestep"),
    Column("return_to_go", "float32", (), "return_to_go", late=True),
)


class TransitionBuffer(ProcessBound, PublicNames):
    """Stores transitions of one or many environments, and samples them one by one; each observation
    once.

    The next observation of a transition is the stored observation of the next one; only the last
    one of a trajectory is stored besides. So the transitions of an environment are added in order.
    Where an observation is not the next observation of the transition before it, as after a reset
    by the program, a trajectory ends and another begins.

    One process and one thread. A transition can be sampled as soon as it is added. `replay` saves,
    loads, takes priorities and has statistics.

    Args:
        buffer_size: Transitions: at least so many are held, where a trajectory has 16 on average.
            Whole trajectories are evicted, the oldest first, when rows are needed, so up to 1/32 of
            `buffer_size` and (N + 1) * max_length more are held.
        observation_space: Of one environment: Box, Discrete, MultiDiscrete or MultiBinary.
        action_space: Of one environment, as its observations'.
        device: Of the samples.
        n_envs: N; or the environment, whose number and autoreset mode are read.
        autoreset: As `Replay.vector_writer`; with a number it must be given. With "next_step" the
            step that resets an environment is no transition and is left out; with "same_step"
            `next_obs` holds the last observation where an episode was truncated.
        table: More options of the table, such as `max_length`, the steps of the longest trajectory.
            A longer episode is stored in parts, at whose ends n-step returns and windows end. By
            default 128; where a field reads other steps than a transition's (frame stacks, time
            steps), the environment's `spec.max_episode_steps`, or without one as many as fit; and
            at most `buffer_size` / (N + 1).
        **options: More options of the `gear` section: `batch_size` (256 by default), `seed`,
            `sampler`, `n_step`, `fields`, ...
    Raises:
        ConfigError, DataError, SchemaError: An option, a space or the autoreset mode does not suit.
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
        columns = [
            _column("observation", observation_space, "T+1"),
            _column("action", action_space, "T"),
            Column("reward", "float32", (), "reward"),
            Column("terminated", "bool", (), "terminated"),
            Column(
                "truncated", "bool"
            ),  # the environment's own: the store would mark other ends too
        ]
        self._forms = [_Rows.of(column.name, column, self.num_envs) for column in columns]
        self._next_form = self._forms[0]._replace(argument="next_obs")
        fields = arguments.mapping("fields", options.get("fields", {}))
        derived = {
            of.get("derived", name) for name, of in fields.items() if isinstance(of, Mapping)
        }
        columns += [column for column in _OF_EPISODES if column.name in derived]
        most = getattr(getattr(n_envs, "spec", None), "max_episode_steps", None)
        section = _section(buffer_size, self.num_envs, table or {}, options, most)
        self.replay = Replay(section, schemas={"main": Schema(columns)}, device=device)
        # "same_step" is "disabled" here: an episode's first observation comes with its first
        # transition.
        self._resets_itself = mode == "next_step"
        own: Autoreset = "next_step" if self._resets_itself else "disabled"
        self._writer = self.replay.vector_writer(self.num_envs, own)
        self._begins_anew = (
            False  # after an error, which may have come before or after the step was taken
        )
        self._num_gaps = self._num_equal = self._num_resets = 0
        #: Environments whose transition before this one may have an overwritten `obs`; None: none.
        #: [N], bool.
        self._suspects: np.ndarray | None = None

    def add(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, terminated: Any, truncated: Any
    ) -> None:
        """Add a transition of every environment.

        Args:
            obs: Observations that were acted on. [N, *shape]; all arguments also without N if N is
                1.
            next_obs: Observations that followed; where an episode ends, its last one. [N, *shape].
            action: Actions. [N, *shape], also [N, 1] where they have no shape.
            reward: [N].
            terminated: Which episodes have ended by themselves. [N], bool.
            truncated: Which episodes were cut off; their next observation still has a value. [N],
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
            whole = {"observation": next_obs, **done_by}
            if not self._begins_anew and self._writer.take_after(obs, whole):
                self._clear(begins)
                return
            # They are not in the stored form, or trajectories begin.
            observation, *others = self._forms
            before = observation.read(obs)
            after = self._next_form.read(next_obs)
            given = {form.column.name: form.read(done_by[form.column.name]) for form in others}
            columns: dict[str, Any] = {"observation": after, **given}
            if not self._begins_anew and self._writer.take_after(before, columns):
                self._clear(begins)
                return
            address = _address(obs)
            self._begin(before, after, address is not None and address == _address(next_obs))
            self._writer.step(publish=True, **columns)
        except StoreError:
            self._begins_anew = True
            raise

    def _begin(self, observations: np.ndarray, following: np.ndarray, is_one_memory: bool) -> None:
        """Begin trajectories where episodes have ended, or where observations do not follow the
        last ones. `is_one_memory`: observations and those that follow them were given in the same
        memory.
        """
        writer = self._writer
        differs = self._differ(observations, writer.last_states("observation"))
        ended = writer.waits
        fresh = ~writer.has_begun
        if self._begins_anew:
            begins = np.ones(self.num_envs, bool)
        else:
            begins = differs | fresh if self._resets_itself else differs | ended
            num_resets = int((differs & ended & ~fresh).sum()) if self._resets_itself else 0
            gaps = differs & ~ended
            self._check_overwritten(gaps & is_one_memory, ended)
            num_equal = (
                int((gaps & ~self._differ(observations, following)).sum()) if gaps.any() else 0
            )
            self._note(int(gaps.sum()), num_equal, num_resets)
        if begins.any():
            writer.reset(begins, observation=observations)
        self._begins_anew = False

    def _differ(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.asarray((one != other).reshape(self.num_envs, -1).any(axis=1))

    def _clear(self, begins: np.ndarray | None) -> None:
        """Clear the suspects that go on from their last observation; of `begins`
        nothing is known.
        """
        if self._suspects is not None and begins is not None:
            self._suspects &= begins

    def _check_overwritten(self, suspects: np.ndarray, begins: np.ndarray) -> None:
        """Raise where two transitions in a row begin at what was not the next observation before,
        each in the memory of its own next observation. A program that resets may do so once. First
        transitions of episodes, `begins`, are passed over: nothing is known of their observations.
        """
        before = np.zeros_like(suspects) if self._suspects is None else self._suspects
        self._suspects = suspects | (before & begins)
        if (before & suspects).any():
            environment = int(np.argmax(before & suspects))
            rule = (
                "must be what the policy got, but it is the memory of next_obs, which step "
                "has overwritten"
            )
            remedy = "the environment returns one array again and again: keep obs = next_obs.copy()"
            raise DataError(f"obs of environment {environment}", rule, None, remedy)

    def _note(self, num_gaps: int, num_equal: int, num_resets: int) -> None:
        """Log, once, resets that do not begin at last states, and gaps: each stores an observation
        twice.
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
                "should be "
                f"its last next_obs, in the step that resets it, got another one after "
                f"{self._num_resets} "
                "episodes: give the environment as n_envs, or its own autoreset mode"
            )
        if gaps < FIRST_CHECK <= self._num_gaps and self._num_gaps > MOST_GAPS * added:
            cause = ""
            if self._num_equal > self._num_gaps / 2:
                cause = (
                    f". In {self._num_equal} of them obs equals next_obs: if the environment "
                    f"overwrites the "
                    "array that it has returned, keep obs = next_obs.copy()"
                )
            LOG.warning(
                "gear: TransitionBuffer: obs should be the next_obs of the environment's "
                "transition before "
                f"it, unless an episode begins, got {self._num_gaps} others in {added} "
                f"transitions; each "
                "begins a trajectory, and fewer transitions are held: add them in order, with "
                "obs as the "
                f"policy gets them{cause}"
            )

    def sample(self, batch_size: int | None = None) -> TransitionSamples:
        """Return a batch of transitions.

        Args:
            batch_size: B, as it was given to the constructor: the batches of a buffer have one
                size.
        Raises:
            ConfigError: Another size.
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
        names = ("observation", "action", "next_observation")
        before, action, after = (
            batch[n] if batch[n].dim() > 1 else batch[n].unsqueeze(1) for n in names
        )
        done, reward = done.unsqueeze(1), reward.unsqueeze(1)
        return TransitionSamples(before, action, after, done, reward, discounts, batch)

    def __len__(self) -> int:
        """Return the number of transitions that the buffer holds."""
        return self.replay.num_steps

    def __repr__(self) -> str:
        return f"TransitionBuffer({self.num_envs} environments, {self.replay!r})"

    def close(self) -> None:
        """Close the replay; safe to call twice."""
        self.replay.close()


def _address(value: Any) -> int | None:
    """Return where a value lies that a program can overwrite; None of numbers."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    return id(value) if isinstance(value, list) else None


def _column(role: str, space: Any, rows: Any) -> Column:
    shape = getattr(space, "shape", None)
    dtype = getattr(space, "dtype", None)
    if shape is None or dtype is None:
        remedy = "give a Replay a column for each part, and write with its vector_writer"
        rule = "must be Box, Discrete, MultiDiscrete or MultiBinary"
        raise ConfigError(f"{role}_space", rule, type(space).__name__, remedy)
    return Column(role, np.dtype(dtype).name, tuple(shape), role, rows)


def _reads_other_steps(field: tuple[str, Any]) -> bool:
    """Return whether a field reads other steps than a transition's own and its next observation."""
    name, options = field
    if not isinstance(options, Mapping):
        return False  # the config refuses it
    column = options.get("column", name)
    offset = options.get("offset", 0)
    is_next = column == "observation" and offset in (1, "n_step")
    derived = name in ("timestep", "return_to_go") or options.get("derived") is not None
    return derived or options.get("length") is not None or not (offset == 0 or is_next)


def _section(
    buffer_size: int,
    num_envs: int,
    table: Mapping[str, Any],
    options: dict[str, Any],
    most_steps: int | None,
) -> dict[str, Any]:
    """Return a buffer's `gear` section; `most_steps` of an episode, None where they are not known.

    Rows for the longest trajectory of each environment are reserved while it grows. These come on
    top of `buffer_size`, and those that an eviction may free in excess.
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
            "observation": {},
            "action": {},
            "reward": {},
            "terminated": {"as": "float32"},
            "next_observation": {"column": "observation", "offset": next_offset},
            **fields,
        },
    }
