"""Random words of samples whose numbers have gaps: they are those that the ops make for every
number.
"""

from typing import Any

import numpy as np
import pytest
import torch
from store_support import priority_rule, stream_spec

from deepspeed_gear.ops.philox import below, philox, word
from deepspeed_gear.ops.records import RandomPurpose, Resolution
from deepspeed_gear.sampling.mass_rules import AnchorRule

LENGTHS = [1, 2, 7, 33, 5, 12, 1, 30]


@pytest.mark.parametrize("most", [1, 2, 1000, 2**32 - 1])
def test_below_is_exact(most: int) -> None:
    random = np.random.default_rng(0)
    quarters = random.integers(0, 2**32, (4, 300), np.uint64)
    quarters[:, :2] = (0, 2**32 - 1)
    quarters[2:, 2] = 2**32 - 1
    totals = random.integers(most // 2 + 1, most + 1, 300)
    words = [
        sum(int(q) << 32 * place for place, q in enumerate(reversed(word))) for word in quarters.T
    ]
    found = below(tuple(quarters), totals)
    assert found.tolist() == [
        word * total >> 128 for word, total in zip(words, totals.tolist(), strict=True)
    ]
    assert found.dtype == np.int64


def test_a_single_word_is_that_of_the_arrays() -> None:
    numbers = np.array([0, 1, 2**32 - 1, 2**32, 2**63 + 12345], np.uint64)
    for seed, stream in ((0, 0), (7, 5), (2**64 - 1, 2**32 - 1)):
        purpose = RandomPurpose.COORDINATE
        quarters = philox(seed, numbers, stream, np.array([[purpose]], np.uint64))
        for at, number in enumerate(numbers.tolist()):
            whole = 0
            for quarter in quarters:
                whole = whole << 32 | int(quarter[0, at])
            assert word(seed, number, stream, purpose) == whole


def test_purposes_and_streams_have_words_of_their_own() -> None:
    numbers = np.arange(100, dtype=np.uint64)
    purposes = np.array([[RandomPurpose.ANCHOR], [RandomPurpose.GOAL]], np.uint64)
    drawn = [philox(3, numbers, stream, purposes)[0] for stream in (0, 1)]
    assert len(np.unique(drawn)) == 400


ANCHORS = {
    "all": AnchorRule(),
    "start": AnchorRule(most=1),
    "end": AnchorRule(most=1, from_end=1),
    "every 3": AnchorRule(stride=3),
    "fits": AnchorRule.bounded([(-2, 3, 0), (1, 2, 1)], 0, 0),
    "from the end": AnchorRule(first=1, trim=2, stride=4, most=3, from_end=1),
}
RULES = {
    "trajectory": {"unit": "trajectory"},
    "by length": {"unit": "trajectory", "by_length": True},
    "step": {"unit": "step"},
    "weighted trajectory": {"unit": "trajectory", "weight": ("task", 3)},
    "weighted step": {"unit": "step", "weight": ("task", 3)},
    "prioritized trajectory": {
        "unit": "trajectory",
        "kind": "random",
        "priorities": priority_rule(),
    },
    "prioritized step": {"unit": "step", "kind": "random", "priorities": priority_rule()},
}


@pytest.mark.parametrize("anchors", ANCHORS)
@pytest.mark.parametrize("rule", RULES)
def test_samples_of_any_numbers_are_those_of_the_whole(
    scenes: Any, rule: str, anchors: str
) -> None:
    """A node resolves its own samples of a global batch: what they are does not depend on the
    others.
    """
    spec = stream_spec(**RULES[rule], anchors=ANCHORS[anchors], seed=2**40 + 5)
    scene = scenes(spec, lengths=LENGTHS)
    (stream,) = scene.streams
    masses = stream.masses
    first = 2**32 - 40
    count = 200
    with scene.table.lock:
        stream.state.ask(0)
        masses.apply(0)
        assert masses.total > 0
        coordinates = torch.empty(count, dtype=torch.int64)
        scene.ops.draw_(coordinates, spec.seed, spec.random_key, first, masses.total)
        whole = torch.empty(count, 8, dtype=torch.int64)
        masses.resolve(whole, coordinates, first)
        own = np.nonzero(np.random.default_rng(1).random(count) < 0.3)[0]
        found = torch.empty(len(own), 8, dtype=torch.int64)
        masses.resolve_numbered(found, coordinates[own], own + first)
    assert torch.equal(found, whole[own])
    assert (whole[:, Resolution.SAMPLE_NUMBER] == first + torch.arange(count)).all()
    assert len(whole[:, Resolution.SLOT].unique()) > 2
    assert (whole[:, Resolution.MASS] > 0).all()
