"""Rollouts of a language model: groups of responses are added, selected and packed; a column is
filled.

A token's number is its place among all tokens of the data, and its log-probability follows from its
number, so every token of a micro batch can be checked. The "reference model" is a formula of the
tokens, whose time does not count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from peers.interface import Array, Rows, System

MEMBERS = 8  # responses of a group
PROMPT = (100, 600)  # tokens
LONGEST = 4096  # tokens of a response
BUDGET = 16384  # tokens of a micro batch
CHECKED = 2  # steps that are compared with the data before the first turn
PARTS = ("add", "select", "pack", "fill", "train")


class Micro(NamedTuple):
    """A micro batch as NumPy arrays, without padding. S sequences, N tokens, M of which have a
    value.
    """

    tokens: Array  # [N]
    first: Array  # [S], the first token of each sequence
    reward: Array  # [S]
    of: Array  # [M], the tokens that the values below belong to
    loss_mask: Array  # [M]
    logp: Array  # [M]
    ref_logp: Array  # [M]


class Rollouts(ABC):
    """A system that holds groups of responses. What a micro batch is, is up to the system."""

    @abstractmethod
    def add(self, number: int, group: list[Rows]) -> None:
        """Add a group by its number: tokens, loss_mask, logp, reward of each response."""

    @abstractmethod
    def select(self) -> Any:
        """Return the next groups of a step, each of them whole, which no later step has."""

    @abstractmethod
    def pack(self, step: Any) -> Iterable[Any]:
        """Yield micro batches of at most BUDGET tokens, to be filled: what a causal model needs.

        Tokens as int64, their places in their sequences, and where the sequences begin and end.
        """

    @abstractmethod
    def tokens(self, micro: Any) -> Array:
        """Return the tokens whose log-probabilities `fill` takes."""

    @abstractmethod
    def fill(self, micro: Any, values: Array) -> None:
        """Set the reference log-probabilities of a micro batch."""

    def filled(self, step: Any) -> None:  # noqa: B027  (most need none)
        """Store what was filled."""

    @abstractmethod
    def train(self, step: Any) -> Iterator[Any]:
        """Yield micro batches of all columns and what was filled, with `targets`; then release the
        step.
        """

    @abstractmethod
    def micro(self, found: Any) -> Micro:
        """Return one of these micro batches to be checked."""

    @abstractmethod
    def close(self) -> None:
        """End it."""


def budget_packs(lengths: list[int]) -> Iterator[list[int]]:
    """Yield which sequences a micro batch has: in their order, until the next one would exceed the
    budget.
    """
    pack: list[int] = []
    left = BUDGET
    for at, length in enumerate(lengths):
        if length > left:
            yield pack
            pack = []
            left = BUDGET
        pack.append(at)
        left -= length
    yield pack


def log_probability(number: Array) -> Array:
    """Return the log-probability of tokens by number: exact in float32. [n] -> [n]."""
    return -(number + 1).astype(np.float32) * np.float32(2**-23)


class Data:
    """Responses: prompts of 100 to 600 tokens, log-normal answers of 400 tokens on average."""

    def __init__(self, num_groups: int) -> None:
        random = np.random.default_rng(3)
        prompts = np.repeat(random.integers(*PROMPT, num_groups), MEMBERS)
        answers = np.exp(random.normal(np.log(400) - 0.32, 0.8, len(prompts))).astype(np.int64)
        self.begins = np.cumsum([0, *(prompts + np.clip(answers, 1, LONGEST))])
        self.prompts = prompts
        self.rewards = random.random(len(prompts), np.float32)
        self.num_tokens = int(self.begins[-1])
        responses = [self._response(at) for at in range(len(prompts))]
        self.groups = [responses[at : at + MEMBERS] for at in range(0, len(responses), MEMBERS)]

    def _response(self, at: int) -> Rows:
        number = np.arange(self.begins[at], self.begins[at + 1])
        return {
            "tokens": number.astype(np.int32),
            "loss_mask": np.arange(len(number)) >= self.prompts[at],
            "logp": log_probability(number),
            "reward": self.rewards[at],
        }

    def check(self, step: list[Micro], num_groups: int) -> None:
        """Raise unless a step has so many groups, each whole, and each token once, with its own
        values.
        """
        responses = self._response_of(np.concatenate([micro.first for micro in step]))
        groups, members = np.unique(responses // MEMBERS, return_counts=True)
        assert len(groups) == num_groups, "another number of groups"
        assert (members == MEMBERS).all(), "a group is not whole"
        tokens = np.concatenate([micro.tokens for micro in step])
        expected = [np.arange(self.begins[at], self.begins[at + 1]) for at in np.sort(responses)]
        assert np.array_equal(np.sort(tokens), np.concatenate(expected)), (
            "tokens are lost or come twice"
        )
        for micro in step:
            assert len(micro.tokens) <= BUDGET, "a micro batch over its budget"
            assert (micro.reward == self.rewards[self._response_of(micro.first)]).all(), (
                "rewards of others"
            )
            # A system whose values lie where their token is predicted has none of first tokens.
            missing = np.setdiff1d(micro.tokens, micro.of)
            assert len(micro.of) + len(missing) == len(micro.tokens), "values that come twice"
            assert np.isin(missing, micro.first).all(), "values are lost"
            of = self._response_of(micro.of)
            is_answer = micro.of - self.begins[of] >= self.prompts[of]
            assert (micro.loss_mask == is_answer).all(), "the loss mask of other tokens"
            assert (micro.logp == log_probability(micro.of)).all(), (
                "log-probabilities of other tokens"
            )
            assert (micro.ref_logp == 2 * micro.logp).all(), "filled values of other tokens"

    def _response_of(self, tokens: Array) -> Array:
        return np.searchsorted(self.begins, tokens, "right") - 1


class RolloutJob:
    """Groups that are held; in a turn a step of them is selected, packed, filled, packed again,
    replaced.
    """

    def __init__(self, system: System, options: dict[str, Any]) -> None:
        self.data = Data(options["groups"])
        self.size = options["step"]
        self.bytes = 0
        self.added = 0
        self.system: Rollouts = system.own["rollouts"](self.data.num_tokens, **options)
        self._add(options["groups"])
        for _ in range(CHECKED):
            found: list[Micro] = []
            self._turn(found)
            self.data.check(found, self.size)

    def _add(self, count: int) -> float:
        begun = perf_counter()
        for _ in range(count):
            self.system.add(self.added, self.data.groups[self.added % len(self.data.groups)])
            self.added += 1
        return perf_counter() - begun

    def _turn(self, checked: list[Micro] | None = None) -> dict[str, float]:
        spent = dict.fromkeys(PARTS, 0.0)
        system = self.system
        begun = perf_counter()
        step = system.select()
        spent["select"] += perf_counter() - begun
        for micro in _timed(system.pack(step), spent, "pack"):
            values = 2 * log_probability(system.tokens(micro))
            begun = perf_counter()
            system.fill(micro, values)
            spent["fill"] += perf_counter() - begun
        begun = perf_counter()
        system.filled(step)
        spent["fill"] += perf_counter() - begun
        for micro in _timed(system.train(step), spent, "train"):
            if checked is not None:
                checked.append(system.micro(micro))
        spent["add"] = self._add(self.size)
        return spent

    def block(self, seconds: float) -> dict[str, Any]:
        """Run one turn, however long it takes; return its time, us, the seconds of its parts, and
        tokens.
        """
        parts = self._turn()
        num_tokens = (
            self.data.num_tokens * self.size // len(self.data.groups)
        )  # of a step on average
        return {"us": sum(parts.values()) * 1e6, "parts": parts, "tokens": num_tokens}

    def close(self) -> None:
        self.system.close()


def _timed(micros: Iterable[Any], spent: dict[str, float], part: str) -> Iterator[Any]:
    """Yield the micro batches; add the time of making them to a part."""
    iterator = iter(micros)
    while True:
        begun = perf_counter()
        micro = next(iterator, None)
        spent[part] += perf_counter() - begun
        if micro is None:
            return
        yield micro
