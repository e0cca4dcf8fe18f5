"""TransitionBuffer: it samples what the environments have done, and stores each
observation once.
"""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import prefix

from deepspeed_gear import Column, ConfigError, DataError, TransitionBuffer
from deepspeed_gear.data.stored_values import as_stored

gymnasium = pytest.importorskip("gymnasium", reason="its environments are recorded")
SPACE = gymnasium.spaces.Box(-1e6, 1e6, (3,), np.float32)
ACTIONS = gymnasium.spaces.Discrete(5)
SMALL = {"timeout_s": 20.0, "shared_memory": {"prefix": prefix()}}
Key = tuple[Any, ...]


class Recorder(gymnasium.Env[Any, Any]):
    """Ends its episodes after 1 to 40 steps, in either way, and records each transition."""

    observation_space = SPACE
    action_space = ACTIONS

    def __init__(self, number: int) -> None:
        self.number = number
        self.episode = -1
        self.random = np.random.default_rng(number)
        self.record: list[Key] = []

    def _observe(self) -> np.ndarray:
        return np.array([self.number, self.episode, self.at], np.float32)

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.episode = self.episode + 1
        self.at = 0
        self.length = int(self.random.integers(1, 41))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        before = self._observe()
        reward = float(self.random.integers(100)) / 4
        self.at += 1
        ends = self.at >= self.length
        is_failure = self.episode % 2 == 0
        flags = ends and is_failure, ends and not is_failure
        self.record.append(key(before, self._observe(), action, reward, *flags))
        return self._observe(), reward, *flags, {}


def key(before: Any, after: Any, action: Any, reward: Any, terminated: Any, truncated: Any) -> Key:
    ends = bool(terminated), bool(truncated)
    return (
        *np.ravel(before).tolist(),
        *np.ravel(after).tolist(),
        int(action),
        float(reward),
        *ends,
    )


def buffer(size: int = 20_000, **options: Any) -> TransitionBuffer:
    return TransitionBuffer(
        size, SPACE, ACTIONS, **{**SMALL, "fields": {"truncated": {}}, "batch_size": 512, **options}
    )


def sampled(buffer: TransitionBuffer, batches: int) -> set[Key]:
    found = set()
    for _ in range(batches):
        data = buffer.sample(512)
        assert data.dones.shape == data.rewards.shape == data.actions.shape == (512, 1)
        ones = (one[:, 0] for one in (data.actions, data.rewards, data.dones))
        rows = data.observations, data.next_observations, *ones, data.batch["truncated"]
        lists = [one.tolist() for one in rows]
        found |= {key(*row) for row in zip(*lists, strict=True)}
    return found


def count(
    held: TransitionBuffer, steps: int, reward: float = 0.0, ends: bool = False, gap: int = 1
) -> None:
    """Add the transitions of one environment whose observations are the numbers of the steps."""
    for step in range(0, gap * steps, gap):
        row = np.full(3, step, np.float32)
        held.add(row, row + 1, 0, reward, ends and step == steps - 1, False)


def act_in_one(buffer: TransitionBuffer, env: Recorder, steps: int, resets: int = 0) -> None:
    """Act without an axis of environments; the program also resets every `resets` steps."""
    observation, _ = env.reset()
    for step in range(1, steps + 1):
        action = ACTIONS.sample()
        following, *done, _ = env.step(action)
        buffer.add(observation, following, action, *done)
        observation = following
        if any(done[1:]) or (resets and step % resets == 0):
            observation, _ = env.reset()


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_sampled_transitions_are_those_of_the_environments(mode: str) -> None:
    how = gymnasium.vector.AutoresetMode[mode.upper()]
    envs = gymnasium.vector.SyncVectorEnv(
        [lambda i=i: Recorder(i) for i in range(3)], autoreset_mode=how
    )
    with buffer(n_envs=envs) as held:
        observation, _ = envs.reset()
        for _ in range(150):
            action = envs.action_space.sample()
            following, reward, terminated, truncated, infos = envs.step(action)
            ended = terminated | truncated
            after = following.copy()
            for i in np.flatnonzero(ended) if mode == "same_step" else ():
                after[i] = infos["final_obs"][i]
            held.add(observation, after, action, reward, terminated, truncated)
            observation = following
            if mode == "disabled" and ended.any():
                observation, _ = envs.reset(options={"reset_mask": ended})
        record = {one for env in envs.envs for one in env.record}
        assert len(held) == sum(len(env.record) for env in envs.envs) == len(record)
        assert sampled(held, 12) == record


def test_a_reset_by_the_program_begins_a_trajectory_and_loses_nothing() -> None:
    env = Recorder(0)
    with buffer(n_envs=env) as held:
        act_in_one(held, env, 200, resets=7)
        assert len(held) == 200
        assert sampled(held, 10) == set(env.record)
        assert len(held.replay) > sum(1 for one in env.record if one[-1] or one[-2])


@pytest.mark.parametrize(
    ("mode", "steps", "wanted"),
    [
        # The step that resets is left out, but not the one after a reset by the program.
        (
            "next_step",
            [(0, 1, 0, 1), (1, 0, 0, 0), (2, 2, 1, 0), (7, 3, 0, 0)],
            [(0, 1), (2, 2), (7, 3)],
        ),
        # After a termination the next observation may be of the next episode: CleanRL's programs
        # replace it by the last one only where an episode was truncated.
        ("same_step", [(0, 1, 1, 0), (1, 2, 0, 0)], [(0, 1), (1, 2)]),
    ],
)
def test_what_the_modes_leave_out(
    mode: Any, steps: list[tuple[int, ...]], wanted: list[Any]
) -> None:
    with buffer(autoreset=mode) as held:
        for state, reward, *ends in steps:
            row = np.full(3, state, np.float32)
            held.add(row, row + 1, 0, reward, *map(bool, ends))
        assert len(held) == len(wanted)
        assert len(held.replay) == len(wanted)
        assert {(one[0], one[3], one[7]) for one in sampled(held, 1)} == {
            (s, s + 1, r) for s, r in wanted
        }


@pytest.mark.parametrize("num_envs", [1, 6])
def test_it_holds_its_size_and_evicts_the_oldest(num_envs: int) -> None:
    size = 600
    random = np.random.default_rng(1)
    with buffer(size, n_envs=num_envs, autoreset="same_step") as held:
        longest = held.replay.config.tables["main"].max_length
        assert longest == min(128, size // (num_envs + 1))
        left = random.integers(10, 60, num_envs)
        most = size + size // 32 + (num_envs + 1) * longest
        at = np.zeros((num_envs, 3), np.float32)
        number = 0
        for _ in range(4 * size // num_envs):
            left -= 1
            ends = left == 0
            number += num_envs
            held.add(
                at,
                at + 1,
                [0] * num_envs,
                np.arange(number - num_envs, number),
                ends,
                ~ends & False,
            )
            at = np.where(ends[:, None], at + 5, at + 1)
            left = np.where(ends, 40, left)
            assert min(number, size) <= len(held) <= most
        oldest = min(one[7] for one in sampled(held, 4))
        assert number - most - longest * num_envs <= oldest <= number - size


def test_many_environments_fill_a_buffer_before_it_evicts() -> None:
    """Parts of equal lengths leave no rows near a writer's latest one; those after the newest are
    free.
    """
    with buffer(20_000, n_envs=64, autoreset="same_step") as held:
        at = np.zeros((64, 3), np.float32)
        none = np.zeros(64, bool)
        for step in range(1, 1000):
            held.add(at, at + 1, none, none, none, none)
            at = at + 1
            assert min(64 * step, 20_000) <= len(held)


def test_observations_take_about_half_of_the_bytes_of_two_rings() -> None:
    size = 50_000
    frame = gymnasium.spaces.Box(0, 255, (8, 8), np.uint8)
    with TransitionBuffer(size, frame, ACTIONS, autoreset="disabled", **SMALL) as held:
        stored = held.replay.store().columns["observation"]
        assert size < len(stored) < 1.12 * size  # for all but what short episodes need: a row in 16
        assert stored.nbytes < 0.56 * (2 * size * 64)


def test_a_long_episode_is_stored_in_parts_that_are_not_marked() -> None:
    with buffer(autoreset="disabled", table={"max_length": 10}) as held:
        count(held, 95)
        assert len(held) == 95
        assert len(held.replay) == 10
        found = sampled(held, 4)
        assert {one[0] for one in found} == set(range(95))
        assert all(one[3] == one[0] + 1 and not one[-1] for one in found)


def test_n_step_returns_have_discounts() -> None:
    options = {"n_step": {"n": 3, "gamma": 0.5}, "batch_size": 64}
    with buffer(autoreset="disabled", **options) as held:
        count(held, 5, reward=1.0, ends=True)
        data = held.sample()
    first = data.observations[:, 0]
    after = (first + 3).clamp(max=5)
    assert torch.equal(data.next_observations[:, 0], after)
    assert torch.equal(data.dones[:, 0], (first >= 2).float())
    assert data.discounts is not None
    assert torch.equal(data.discounts[:, 0], torch.where(first >= 2, 0.0, 0.125))
    assert torch.equal(data.rewards[:, 0], 2 - 0.5 ** (after - first - 1))


def test_priorities_are_reported_by_the_batch() -> None:
    sampler = {"kind": "prioritized", "alpha": 1.0, "beta": 0.0}
    with buffer(autoreset="disabled", sampler=sampler) as held:
        count(held, 10)
        data = held.sample()
        held.replay.update_priorities(data.batch, (data.observations[:, 0] == 4).float())
        assert {one[0] for one in sampled(held, 1)} == {4}


GIVEN = {
    "gymnasium": lambda number: (int(number), float(number), False, False),
    "numpy scalars": lambda number: (
        np.int64(number), np.float32(number), np.bool_(False), np.False_),
    "arrays without axes": lambda number: (
        np.array(number), np.array(number, np.float32), np.array(False), False),
    "one environment's arrays": lambda number: (
        np.array([number], np.int32), np.array([number], np.float64), *np.zeros((2, 1), bool)),
    "tensors": lambda number: (
        torch.tensor(number), torch.tensor([float(number)]), *torch.zeros((2, 1), dtype=bool)),
}  # fmt: skip


@pytest.mark.parametrize("form", GIVEN)
def test_values_as_environments_give_them_take_one_native_call(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("left to Python")

    monkeypatch.setattr(TransitionBuffer, "_begin", refuse)
    with buffer(100, n_envs=1, autoreset="disabled", fields={}, batch_size=64) as added:
        for number in range(4):
            rows = np.full((2, 3), [[number], [number + 1]], np.float32)
            added.add(rows[0], rows[1], *GIVEN[form](number))
        data = added.sample()
        assert (data.actions == data.observations[:, :1]).all()
        assert (data.rewards == data.observations[:, :1]).all()
        assert len(added) == len(set(data.actions[:, 0].tolist())) == 4


NUMBERS = [0, 1, 2, -1, 127, 128, 255, 256, 2**15, 2**16, 2**24 + 1, 2**31, 2**53 + 1, 2**63 - 1,
           2**63, -(2**63), 2**64, 0.5, 3.0, -7.0, 1e30, 1e300, float("inf"), float("nan"), True,
           False, np.int8(-3), np.uint8(200), np.uint64(2**64 - 1), np.uint16(9), np.float16(0.1),
           np.float32(0.1), np.float64(0.1), np.bool_(True), np.array(7), np.array(2.5)]  # fmt: skip
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_become_the_stored_dtype_as_arrays_do(dtype: str) -> None:
    space = SimpleNamespace(shape=(), dtype=np.dtype(dtype))
    options: dict[str, Any] = {"n_envs": 1, "autoreset": "disabled", "batch_size": 512}
    with TransitionBuffer(200, SPACE, space, **SMALL, **options) as added:
        stored = []
        for value in NUMBERS:
            number = len(stored)
            rows = np.full((2, 3), [[number], [number + 1]], np.float32)
            column = Column("action", dtype)
            try:
                expected = as_stored(np.asarray([value]), column, "the transition", 1)
                if not np.isfinite(expected).all():
                    raise DataError("action", "must be finite")
            except DataError:
                with pytest.raises(DataError, match="action"):
                    added.add(rows[0], rows[1], value, 0.0, False, False)
                continue
            added.add(rows[0], rows[1], value, 0.0, False, False)
            stored.append(expected[0])
        assert len(stored) > 3
        data = added.sample()
        for observation, action in zip(data.observations, data.actions, strict=True):
            expected = stored[int(observation[0])]
            # A field of float64 has float32 in a batch.
            assert action[0].item() == (np.float32(expected) if dtype == "float64" else expected)


def test_a_tensor_that_is_a_view_of_negated_values_is_stored_negated() -> None:
    observation = torch.tensor([[1.0 + 2.0j, 3.0 + 4.0j, 5.0 + 6.0j]]).conj().imag
    packed = torch._neg_view(torch.tensor([[2.0, 4.0, 6.0]]))  # the same values in plain memory
    with buffer(100, n_envs=1, autoreset="disabled", fields={}, batch_size=8) as added:
        added.add(packed, observation, 0, 0.0, False, False)
        added.add(observation, packed, 0, 0.0, False, False)
        data = added.sample()
        expected = torch.tensor([-2.0, -4.0, -6.0])
        assert (data.observations == expected).all()
        assert (data.next_observations == expected).all()


def test_a_saved_buffer_goes_on(tmp_path: Path) -> None:
    env = Recorder(0)
    with buffer(autoreset="disabled") as saved:
        act_in_one(saved, env, 100)
        saved.replay.save(tmp_path)
        with buffer(autoreset="disabled") as loaded:
            act_in_one(loaded, Recorder(9), 10)
            loaded.replay.load(tmp_path)
            assert len(loaded) == 100
            assert torch.equal(loaded.sample().observations, saved.sample().observations)
            act_in_one(loaded, env, 50)
            assert sampled(loaded, 8) == set(env.record)


def test_a_refused_transition_changes_nothing() -> None:
    """Neither at an end of the trajectory nor after it."""
    with buffer(autoreset="disabled") as held:
        row = np.zeros(3, np.float32)
        good = (row, row + 1, 0, 1.0, False, False)
        held.add(*good)
        wrong = [
            (row + 1, row[:2], 0, 1.0, False, False),
            (row + 1, row + np.nan, 0, 1.0, False, False),
            (row + 1, row, 0.5, 1.0, False, False),
            (row + 1, row, 0, np.inf, False, False),
            (row + 1, row, 0, 1.0, 2, False),
            (row + 9, row + np.nan, 0, 1.0, False, False),  # another trajectory
        ]
        for given in wrong:
            with pytest.raises(DataError):
                held.add(*given)
        held.add(row + 1, row + 2, 0, 2.0, False, False)
        held.add(row + 2, row + 3, 0, 3.0, False, False)
        assert {(one[0], one[3], one[7]) for one in sampled(held, 1)} == {
            (0, 1, 1),
            (1, 2, 2),
            (2, 3, 3),
        }


def test_infos_in_the_place_of_truncations_and_another_batch_size_are_refused() -> None:
    row = np.zeros(3, np.float32)
    with buffer(autoreset="disabled") as held:
        for infos in ({}, [{}]):
            with pytest.raises(DataError, match="truncations, in the place of infos"):
                held.add(row, row, 0, 1.0, False, infos)
        with pytest.raises(ConfigError, match=r"must be 512.*got 256"):
            held.sample(256)


def test_wrong_options_are_named() -> None:
    given = {"buffer_size": 100, "observation_space": SPACE, "action_space": ACTIONS, **SMALL}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"autoreset": None}, "autoreset must be given"),
        ({"handle_timeout_termination": False}, "is not an option"),
        ({"tables": {}}, "tables must be left out"),
        ({"observation_space": gymnasium.spaces.Text(3)}, "observation_space must be Box, Discr"),
        (
            {"observation_space": gymnasium.spaces.Dict(x=gymnasium.spaces.Text(3))},
            "observation_space: x must be Box, Discrete.*, got 'Text'",
        ),
        ({"observation_space": gymnasium.spaces.Dict()}, "observation_space must have at least"),
        (
            {"action_space": gymnasium.spaces.Dict({"a.b": SPACE})},
            "action_space must have names without dots as keys, got 'a.b'",
        ),
        ({"buffer_size": 0}, "at least 1"),
    ]
    for options, text in wrong:
        with pytest.raises((ConfigError, DataError), match=text):
            TransitionBuffer(**{"autoreset": "disabled", **given, **options})


def test_transitions_out_of_order_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with buffer(autoreset="disabled") as held, caplog.at_level(logging.WARNING, "deepspeed_gear"):
        count(held, 600, gap=2)
        assert len(held) == 600
    assert sum("should be the next_obs" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("kind", ["array", "rows of a buffer", "tensor", "list", "vector"])
def test_an_environment_that_overwrites_its_observation_is_named(kind: str) -> None:
    """It returns one array again and again, so that `obs` is `next_obs` when the transition is
    added.
    """
    num_envs = 2 if kind == "vector" else 1
    whole = np.zeros((4, 3), np.float32)
    state: Any = {
        "list": [0.0] * 3,
        "tensor": torch.zeros(3),
        "vector": np.zeros((2, 3), np.float32),
    }.get(kind, whole[0])

    def add(held: TransitionBuffer, ends: bool = False) -> None:
        for index in range(len(state)):
            state[index] += 1
        next_obs = whole[0] if kind == "rows of a buffer" else state
        none = [False] * num_envs
        held.add(state, next_obs, [0] * num_envs, [0.0] * num_envs, [ends] * num_envs, none)

    with buffer(autoreset="disabled", n_envs=num_envs) as held:
        add(held)
        add(held, ends=True)  # a program that resets may have one gap
        add(held)
        for _ in range(2):  # nothing is added
            with pytest.raises(
                DataError, match=r"obs of environment 0 .* next_obs.*; .*\.copy\(\)"
            ):
                add(held)
        assert len(held) == 3 * num_envs


def test_equal_observations_in_one_array_are_stored() -> None:
    """Also where the program resets into a state that the next step does not leave."""
    states = np.arange(12, dtype=np.float32).reshape(4, 3)
    with buffer(autoreset="disabled") as held:
        for index in (0, 0, 1, 1, 1, 2, 2, 0, 0):
            held.add(states[index], states[index], 0, 0.0, False, False)
        held.add(states[3], states[3], 0, 0.0, True, False)
        for _ in range(3):  # episodes of one step, in a row
            held.add(states[1], states[1], 0, 0.0, True, False)
        assert len(held) == 13


def test_copies_of_an_overwritten_observation_are_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with buffer(autoreset="disabled") as held, caplog.at_level(logging.WARNING, "deepspeed_gear"):
        for step in range(300):
            state = np.full(3, step, np.float32)
            held.add(state, state.copy(), 0, 0.0, False, False)
    (text,) = [record.getMessage() for record in caplog.records]
    assert "of them obs equals next_obs: if the environment overwrites the array" in text


# ---- autoreset modes that are not the environment's ----------------------------------------------


class Walk:
    """Two environments that count steps from a first state in [0, `spread`); an episode has 5
    steps.
    """

    def __init__(self, mode: str, spread: float = 1.0, moves: bool = True) -> None:
        self.mode = mode
        self.spread = spread
        self.moves = moves
        self.random = np.random.default_rng(0)
        self.states = self.first()
        self.steps = np.array([0, 2])

    def first(self) -> np.ndarray:
        return self.spread * self.random.random(2)

    def observe(self) -> np.ndarray:
        return np.repeat(self.states, 3).reshape(2, 3).astype(np.float32)

    def step(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the next observations, the last ones of episodes that end, rewards and
        truncations.
        """
        resets = self.steps == 5
        self.steps = np.where(resets, 0, self.steps + 1)
        self.states = np.where(resets, self.first(), self.states + self.moves)
        final = self.observe()
        ended = self.steps == 5
        rewards = np.where(resets, 0, self.random.random(2))
        if self.mode == "same_step":
            self.states = np.where(ended, self.first(), self.states)
            self.steps[ended] = 0
        return self.observe(), final, rewards, ended


FORGOTTEN = "last observations of all 8 truncated episodes"


@pytest.mark.parametrize(
    ("walk", "given", "passes_final", "warning"),
    [
        (Walk("same_step"), "same_step", True, None),
        (Walk("next_step"), "next_step", False, None),
        (Walk("same_step"), "same_step", False, FORGOTTEN),
        (Walk("same_step"), "disabled", False, FORGOTTEN),
        (Walk("next_step"), "same_step", False, FORGOTTEN),
        (Walk("next_step"), "disabled", False, FORGOTTEN),
        (Walk("same_step"), "next_step", False, "rewards that vary"),
        (Walk("same_step"), "next_step", True, "obs after the end of an epi"),
        (Walk("same_step", spread=0.0), "same_step", False, None),  # episodes end where they begin
        (Walk("same_step", spread=0.0, moves=False), "same_step", False, None),
    ],
)
def test_resets_that_do_not_suit_the_mode_are_logged_once(
    walk: Walk,
    given: Any,
    passes_final: bool,
    warning: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        buffer(n_envs=2, autoreset=given) as held,
        caplog.at_level(logging.WARNING, "deepspeed_gear"),
    ):
        obs = walk.observe()
        no = np.zeros(2, bool)
        for _ in range(150):
            following, final, rewards, ended = walk.step()
            after = final if passes_final else following
            held.add(obs, after, np.zeros(2, np.int64), rewards, no, ended)
            obs = following
    logged = [record.getMessage() for record in caplog.records if "gear" in record.getMessage()]
    assert len(logged) == (warning is not None), logged
    assert warning is None or warning in logged[0]


def test_a_vector_writer_checks_final_observations(caplog: pytest.LogCaptureFixture) -> None:
    walk = Walk("same_step")
    with buffer(autoreset="disabled") as held, caplog.at_level(logging.WARNING, "deepspeed_gear"):
        writer = held.replay.vector_writer(2, "same_step")
        writer.reset(observation=walk.observe())
        for _ in range(60):
            following, _, rewards, ended = walk.step()
            flags = {"terminated": np.zeros(2, bool), "truncated": ended}
            more = {"action": np.zeros(2, np.int64), "reward": rewards.astype(np.float32)}
            writer.step(final={"observation": following}, observation=following, **flags, **more)
    (record,) = caplog.records
    assert FORGOTTEN in record.getMessage()


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({"number": {"column": "action", "as": "float32"}}, 128),
        ({"next": {"column": "observation", "offset": 1, "scale": 0.5}}, 128),
        ({"stack": {"column": "observation", "offset": -3, "length": 4}}, 10_000 // 3),
        ({"timestep": {}}, 10_000 // 3),
        ({"last_action": {"column": "action", "offset": -1}}, 10_000 // 3),
    ],
    ids=str,
)
def test_windows_reach_over_whole_episodes(fields: dict[str, Any], longest: int) -> None:
    with buffer(10_000, n_envs=2, autoreset="disabled", fields=fields) as held:
        assert held.replay.config.tables["main"].max_length == longest


def test_time_steps_and_returns_of_episodes_longer_than_max_length() -> None:
    env = Recorder(0)
    fields = {"timestep": {}, "return_to_go": {}}
    with buffer(n_envs=1, autoreset="disabled", fields=fields, table={"max_length": 7}) as held:
        act_in_one(held, env, 400)
        to_go: dict[tuple[float, float], float] = {}
        for _, episode, at, *_, reward, terminated, truncated in reversed(env.record):
            ended = terminated or truncated
            to_go[episode, at] = reward + (0.0 if ended else to_go.get((episode, at + 1), np.nan))
        batch = held.sample().batch
        seen = set()
        for (_, episode, at), time, value in zip(
            batch["observation"].tolist(), batch["timestep"], batch["return_to_go"], strict=True
        ):
            assert (time, value) == (at, to_go[episode, at])
            seen.add(at)
        assert max(seen) > 14


def test_frame_stacks_of_a_long_episode_have_no_gap() -> None:
    env = Recorder(0)
    env.spec = type("Spec", (), {"max_episode_steps": 400})()
    stack = {"stack": {"column": "observation", "offset": -3, "length": 4}}
    with buffer(2_000, n_envs=env, autoreset="disabled", fields=stack) as held:
        assert held.replay.config.tables["main"].max_length == 400
        count(held, 400, ends=True)
        batch = held.sample().batch
        steps = batch["observation"][:, 0]
        frames = batch["stack"][..., 0]
        wanted = torch.clamp(steps[:, None] + torch.arange(-3, 1), min=0)
        assert (frames == wanted).all()
        assert (batch.mask["stack"].sum(1) == torch.clamp(steps + 1, max=4)).all()
