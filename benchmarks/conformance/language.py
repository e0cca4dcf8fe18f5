"""Cases of language models: loss weights of packs, groups of responses."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from peers.interface import Pack

from conformance.check import System, case

LENGTHS = np.array([40, 3, 17, 64, 9, 28, 5, 33])


@case(
    "inclusionAI/AReaL#1730", "1, 2 or 8 micro batches: every token has the same weight in the loss"
)
def weights_for_any_number_of_micro_batches(system: System) -> None:
    for tokens in (256, 128, 64):
        found = system.token_weights(LENGTHS, tokens)
        assert np.allclose(found, LENGTHS / LENGTHS.sum(), rtol=1e-5), (
            f"packs of {tokens}: {found.round(4).tolist()}"
        )


@case("volcengine/verl#5072", "the mean is over all tokens, not of the means of micro batches")
def the_mean_over_all_tokens(system: System) -> None:
    found = system.token_weights(np.array([60, 4, 4, 4]), 64)
    assert np.allclose(found / found.sum(), np.array([60, 4, 4, 4]) / 72, rtol=1e-5), (
        f"weights {found.tolist()}"
    )


@case("huggingface/trl#6804", "a response's baseline is that of its own group")
def advantages_by_group(system: System) -> None:
    rewards = np.array([1.0, 0.0, 5.0, 7.0, 1.0, 0.0])
    groups = np.array([0, 0, 1, 1, 2, 2])
    found = system.advantages(rewards, groups)
    assert np.allclose(found, [0.5, -0.5, -1.0, 1.0, 0.5, -0.5]), f"got {found.tolist()}"


@case(
    "NVIDIA-NeMo/RL#3238",
    "a group that lacks a member is not trained, and does not hold up the others",
)
def a_member_that_never_comes(system: System) -> None:
    assert system.incomplete_group(), "the batch has other groups"


def check_packs(packs: list[Pack]) -> list[int]:
    """Fail unless each sequence of each pack stands alone; return the sequences."""
    found = []
    for pack in packs:
        assert pack.bounds[0] == 0, f"bounds {pack.bounds.tolist()}"
        assert pack.bounds[-1] == len(pack.number), (
            f"bounds {pack.bounds.tolist()} of {len(pack.number)}"
        )
        for first, last in pairwise(pack.bounds.tolist()):
            numbers = set(pack.number[first:last].tolist())
            assert len(numbers) == 1, f"the sequences {sorted(numbers)} attend to each other"
            positions = pack.position[first:last]
            if numbers != {-1}:
                assert (positions == np.arange(last - first)).all(), (
                    f"positions {positions.tolist()}"
                )
                assert last - first == LENGTHS[min(numbers)], (
                    f"{last - first} tokens of sequence {numbers}"
                )
                found += sorted(numbers)
    return found


@case(
    "huggingface/trl#1230",
    "no token of a pack attends to another sequence; positions begin anew in each",
)
def sequences_of_a_pack_stand_alone(system: System) -> None:
    found = check_packs(system.packs(LENGTHS, 128)[0])
    assert sorted(found) == list(range(len(LENGTHS))), f"packs hold the sequences {sorted(found)}"


@case(
    "THUDM/slime#1838", "two ranks get equally many micro batches; each sequence is in one of them"
)
def equally_many_micro_batches(system: System) -> None:
    ranks = system.packs(LENGTHS, 64, ranks=2)
    assert len({len(packs) for packs in ranks}) == 1, (
        f"{[len(packs) for packs in ranks]} micro batches"
    )
    found = sorted(check_packs([pack for packs in ranks for pack in packs]))
    assert found == list(range(len(LENGTHS))), f"packs hold the sequences {found}"
