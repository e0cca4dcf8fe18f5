"""Outcomes: what other ranks and nodes read and raise of an error."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_gear.errors import (
    ConfigError,
    EmptyTableError,
    GearError,
    LostNodeError,
    NotReadyError,
    PeerError,
    StoreError,
    StoreFullError,
)
from deepspeed_gear.outcome import Outcome


@given(st.text(max_size=40), st.integers(3, 12))
def test_words(text: str, count: int) -> None:
    outcome = Outcome(2, text)
    words = outcome.words(count)
    assert words.shape == (count,)
    found = Outcome.read(words)
    assert found.kind == 2
    room = 8 * (count - 2)
    if len(text.encode()) <= room:
        assert found == outcome
    else:
        whole = text.encode()[:room].decode(errors="ignore")
        assert found.text.startswith(whole)
        assert len(found.text) <= len(whole) + 1, "at most half a character is lost"


def test_texts_name_types_of_others() -> None:
    assert Outcome.of(ValueError("no")).text == "ValueError: no"
    error = ConfigError("gear.seed", "must be given", None)
    assert Outcome.of(error).text == str(error)


@pytest.mark.parametrize(
    ("made", "relayed", "own"),
    [
        (ValueError, PeerError, PeerError),
        (ConfigError, PeerError, PeerError),
        (LostNodeError, PeerError, PeerError),
        (StoreFullError, PeerError, StoreError),
        (NotReadyError, NotReadyError, NotReadyError),
        (EmptyTableError, NotReadyError, EmptyTableError),
    ],
)
def test_types(
    made: Callable[..., Exception], relayed: type[GearError], own: type[GearError]
) -> None:
    error = made("x", "must be y") if issubclass(made, GearError) else made("x")  # type: ignore[arg-type]
    outcome = Outcome.read(Outcome.of(error).words(16))
    assert type(outcome.error("rank 1")) is relayed
    assert type(outcome.error("the first rank", is_own=True)) is own
    assert "[raised on rank 1]" in str(outcome.error("rank 1"))
