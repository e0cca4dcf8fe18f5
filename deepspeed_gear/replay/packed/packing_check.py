"""Check of a model's packing: a pack of random tokens against each trajectory alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.micro_batch import MicroBatch, pack_of_tokens
from deepspeed_gear.batching.pack_rows import PackShape
from deepspeed_gear.batching.packed_models import ONE_EACH, PackedModel
from deepspeed_gear.batching.prefixes import Prefixes
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.replay.packed.rollout_context import PackSettings

_EXACT = 1e-4  # relative difference admitted in float32
_ROUNDED = 3e-2  # in 16 bits


def check_packing(
    model: Any, attention: str | None, tolerance: float | None, settings: PackSettings
) -> float:
    """Compare the logits of a pack with those of each trajectory; see `Replay.check_packing`."""
    if settings.place.sequence_world > 1:
        rule = "must have whole trajectories"
        remedy = "check the model with one rank per sequence"
        raise ConfigError("check_packing", rule, settings.place.sequence_world, remedy)
    packed_model = PackedModel(model)
    kinds = packed_model.layer_kinds - {"full_attention"}
    if attention is not None and settings.pack.prefix == "share" and kinds:
        names = ", ".join(sorted(kinds))
        rule = f"its layers ({names}) need masks of their own, which no name of an attention has"
        packed_model.refuse(rule, 'give the model, or leave "prefix" of gear.pack out')
    micro = _pack(packed_model.config.get_text_config().vocab_size, settings)
    inputs = micro.model_inputs(attention or model)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # without dropout
    try:
        with torch.no_grad():
            logits = model(**inputs).logits[0]
            if tolerance is None:
                is_exact = {logits.dtype, next(model.parameters()).dtype} == {torch.float32}
                tolerance = _EXACT if is_exact else _ROUNDED
            most = 0.0
            places = torch.arange(len(logits), device=logits.device)
            for begin, end in zip(micro.pack_shape.starts, micro.cu_seqlens[1:], strict=False):
                at = micro.mask_mod(0, 0, end - 1, places).nonzero()[:, 0]
                alone = (
                    model(input_ids=inputs["input_ids"][:, at], use_cache=False).logits[0].float()
                )
                apart = (logits[at].float() - alone).square().mean().sqrt()
                most = max(most, float(apart / alone.square().mean().sqrt()))
                if not most <= tolerance:
                    rule = (
                        f"must give the {len(at)} tokens from place {begin} on their logits alone"
                    )
                    name = f"check_packing: a pack of {packed_model.name}"
                    given = f"a relative difference of {most:.1e} (tolerance {tolerance:.1e})"
                    raise ConfigError(name, rule, given, ONE_EACH)
    finally:
        for module, mode in modes:  # parents come before their children
            module.train(mode)
    return most


def _pack(vocabulary: int, settings: PackSettings) -> MicroBatch:
    """Return a pack of random tokens as long as a micro batch.

    Its trajectories are halves of the rest, down to one token: 8 rows have 4, 2, 1 and padding.
    """
    rows = settings.pack.room
    pack = settings.pack
    rest = rows - rows // 8
    most = pack.max_trajectories or rows
    lengths: list[int] = []
    while rest and len(lengths) < most:
        lengths.append(-(-rest // 2))
        rest -= lengths[-1]
    if pack.pad.to == "multiple" and pack.pad.multiple == 1:
        rows = sum(lengths)
    tokens = torch.randint(vocabulary, (1, rows), generator=torch.Generator().manual_seed(0))
    steps = np.array(lengths, np.int64)
    prefixes = None
    if pack.prefix == "share":
        prefixes = _branches(steps)
        steps = steps + prefixes.steps
    shape = PackShape(steps, rows, 0, rows, prefixes)
    return pack_of_tokens(tokens, shape, settings.field_by_role.get("token"), settings.device)


def _branches(places: np.ndarray) -> Prefixes:
    """Return prefixes of trajectories with so many places: two of three leave the one before them.

    They leave after half of its places: for [8, 4, 2, 1], steps is [0, 4, 6, 0] and leader
    [0, 0, 1, 3].
    """
    leader = np.arange(len(places))
    steps = np.zeros(len(places), np.int64)
    for i, before in enumerate(places[:-1].tolist(), 1):
        if i % 3 and before > 1:
            leader[i] = i - 1
            steps[i] = steps[i - 1] + before // 2
    return Prefixes(steps, leader)
