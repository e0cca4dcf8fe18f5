"""Masks of packs within windows and chunks, beside those of each trajectory alone."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_gear.batching.micro_batch import MicroBatch, pack_of_tokens
from deepspeed_gear.batching.pack_masks import attention_mask, within_chunk, within_window
from deepspeed_gear.batching.pack_rows import PackShape
from deepspeed_gear.batching.packing_plan import Prefixes


def places(shape: PackShape) -> list[np.ndarray]:
    """Return the places of each trajectory, those of its shared prefix first."""
    every = []
    for number, (start, end) in enumerate(zip(shape.starts, shape.ends, strict=True)):
        begin = 0
        steps = 0
        if shape.prefixes is not None:
            begin = shape.starts[shape.prefixes.leader[number]]
            steps = shape.prefixes.steps[number]
        every.append(np.append(np.arange(begin, begin + steps), np.arange(start, end)))
    return every


@st.composite
def packs(draw: Any) -> MicroBatch:
    """Return a pack of trajectories that share prefixes with the first of their group."""
    lengths = []
    leaders = []
    steps = []
    for size in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)):
        leader = len(lengths)
        prefix = draw(st.integers(0, 12))
        for member in range(size):
            lengths.append(prefix + draw(st.integers(1, 9)))
            leaders.append(leader)
            steps.append(prefix if member else 0)
    prefixes = Prefixes(np.array(steps), np.array(leaders))
    rows = sum(lengths) - sum(steps) + draw(st.integers(0, 9))
    shape = PackShape(np.array(lengths), rows, 0, rows, prefixes)
    return pack_of_tokens(
        torch.zeros(1, rows, dtype=torch.int64), shape, "tokens", torch.device("cpu")
    )


@given(packs(), st.integers(1, 20))
@settings(max_examples=60)
def test_windows_and_chunks_are_of_steps_of_the_trajectory(micro: MicroBatch, size: int) -> None:
    """At every place of a trajectory; a place of padding attends to itself at least."""
    shape = micro.pack_shape
    window = within_window(micro.mask_mod, micro.position_ids, size)
    chunk = within_chunk(micro.mask_mod, micro.position_ids, size)
    like = torch.empty(0)
    narrow = attention_mask(window, shape.rows, "sdpa", like)[0, 0].numpy()
    blocks = attention_mask(chunk, shape.rows, "sdpa", like)[0, 0].numpy()
    for mask, is_chunk in ((narrow, False), (blocks, True)):
        wanted = np.zeros_like(mask)
        for every in places(shape):
            for step, place in enumerate(every):
                first = step // size * size if is_chunk else max(0, step - size + 1)
                wanted[place, every[first : step + 1]] = True
        assert (mask[: shape.num_tokens] == wanted[: shape.num_tokens]).all()
        assert not mask[shape.num_tokens :, : shape.num_tokens].any()
        assert mask.diagonal().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_attention_has_the_same_mask(dtype: torch.dtype) -> None:
    """Blocks of flex attention without a place that is attended to are left out."""
    lengths = np.array([300, 280, 290])
    prefixes = Prefixes(np.array([0, 260, 260]), np.array([0, 0, 0]))
    shape = PackShape(lengths, 384, 0, 384, prefixes)
    micro = pack_of_tokens(
        torch.zeros(1, 384, dtype=torch.int64), shape, "tokens", torch.device("cpu")
    )
    window = within_window(micro.mask_mod, micro.position_ids, 64)
    like = torch.empty(0, dtype=dtype)
    mask = attention_mask(window, 384, "sdpa", like)
    added = attention_mask(window, 384, "eager", like)
    assert added.dtype == dtype
    assert torch.equal(added == 0, mask)
    assert bool((added[~mask] == torch.finfo(dtype).min).all())
    blocks = attention_mask(window, 384, "flex_attention", like)
    held = mask.view(3, 128, 3, 128).any(3).any(1)
    assert torch.equal(blocks.to_dense()[0, 0].bool(), held)
    assert not held[2, 0]
    assert torch.equal(micro.block_mask, attention_mask(micro.mask_mod, 384, "sdpa", like))
    assert micro.block_mask[0, 0, 349, :260].all()
