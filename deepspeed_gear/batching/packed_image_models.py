"""Inputs of models of text and images of transformers, for packs: pixels, grids and positions.

A place of an image has three positions, of time, height and width, which count on from the text
before it. The model's own function gives those of one trajectory, so the function is called for
each trajectory of a pack that has images. A fourth row, before these, has the step of each place
in its trajectory; the model derives its masks from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from deepspeed_gear.batching.pack_masks import MaskMod
from deepspeed_gear.batching.pack_rows import PackMedia, PackShape
from deepspeed_gear.batching.packed_models import PackedModel
from deepspeed_gear.errors import ConfigError, DataError

_AXES: Final = 3
#: Options of a model's config with the token of a place, and its number in `mm_token_type_ids`.
_KINDS: Final = {"image_token_id": 1, "video_token_id": 2}
#: The media column of the rows of each kind, and that of their grids.
_GRIDS: Final = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}
_TOKENS: Final = dict(zip(_GRIDS, _KINDS, strict=True))
_SECONDS: Final = "second_per_grid_ts"  # of videos, for positions alone


def image_inputs(
    packed: PackedModel,
    tokens: torch.Tensor,
    shape: PackShape,
    media: PackMedia | None,
    ids: Sequence[int],
) -> dict[str, Any]:
    """Return the positions of a pack, and what its places need of media.

    Args:
        packed: The model.
        tokens: The token of each place. [1, N], int64.
        shape: The pack's.
        media: Media of the pack, whose columns have the names of the model's arguments, such as
            `pixel_values` and `image_grid_thw`; None: the table has none.
        ids: Ids of the trajectories, for errors.
    Returns:
        `position_ids`, [4, 1, N], and the rows of the media columns, place after place.
    Raises:
        ConfigError: There are places of images, but no field of the role media.
        DataError: The places of images of a trajectory are not those that its grids need.
    """
    words = tokens[0].cpu().numpy()
    kinds = np.zeros(len(words), np.int64)
    for option, kind in _KINDS.items():
        kinds[words == getattr(packed.config, option, None)] = kind
    kinds[shape.num_tokens :] = 0  # padding may be any token
    if media is None and kinds.any():
        rule = f"must have a field of a column of the role media for the images of {packed.name}"
        remedy = "add such a column with media columns (docs/how-to/media.md)"
        raise ConfigError("gear.fields", rule, None, remedy)
    # Text has its step in all rows.
    positions = np.tile(shape.positions(), (1 + _AXES, 1))
    given: dict[str, Any] = {}
    if media is not None:
        arguments = inspect.signature(packed.inner.forward).parameters
        for name, rows in media.per_place().items():
            # The positions below stand for the seconds of videos.
            if name in arguments and name != _SECONDS and len(rows):
                given[name] = rows
        _place_images(positions, packed, words, kinds, shape, media, ids)
    return {"position_ids": torch.from_numpy(positions).to(tokens.device)[:, None], **given}


def dummy_inputs(
    packed: PackedModel,
    tokens: torch.Tensor,
    shape: PackShape,
    media: PackMedia,
    mask_mod: MaskMod,
) -> dict[str, Any]:
    """Return a dummy item of each kind of media that a pack has none of.

    Args:
        packed: The model.
        tokens: The token of each place. [1, N], int64.
        shape: The pack's.
        media: Media of the pack.
        mask_mod: Mask function of the pack.
    Returns:
        Pixels of zeros for one place and their grid, for each kind that is missing, and
        `input_ids`, which have the token of that kind at a place of padding, or else at the last
        place of a trajectory, which predicts nothing. Empty if no kind is missing.
    Raises:
        DataError: The pack has too few such places.
    """
    arguments = inspect.signature(packed.inner.forward).parameters
    missing = [
        name
        for name, grid in _GRIDS.items()
        if {name, grid} <= media.columns.keys() & arguments.keys() and not len(media.columns[name])
    ]
    if not missing:
        return {}
    places = _unused_places(shape, mask_mod, tokens.device)
    merge = packed.config.vision_config.spatial_merge_size
    given: dict[str, Any] = {"input_ids": tokens.clone()}
    for name in missing:
        place = next(places, None)
        if place is None:
            rule = f"must have a place without a loss for a dummy of {name}"
            remedy = f"keep trajectories {len(missing)} steps below gear.pack.tokens"
            raise DataError("micro.model_inputs", rule, None, remedy)
        given["input_ids"][0, place] = getattr(packed.config, _TOKENS[name])
        pixels = media.columns[name]
        given[name] = pixels.new_zeros(merge**2, *pixels.shape[1:])
        grids = media.columns[_GRIDS[name]]
        given[_GRIDS[name]] = grids.new_tensor([[1, merge, merge]])
    return given


def _unused_places(shape: PackShape, mask_mod: MaskMod, device: torch.device) -> Iterator[int]:
    """Yield the places of padding, then those that end a trajectory and that no other one sees."""
    yield from range(shape.num_tokens, shape.rows)
    places = torch.arange(shape.rows, device=device)
    for end in reversed(shape.ends.tolist()):
        if int(mask_mod(0, 0, places, places[end - 1]).sum()) == 1:
            yield end - 1


def _place_images(
    positions: np.ndarray,
    packed: PackedModel,
    words: np.ndarray,
    kinds: np.ndarray,
    shape: PackShape,
    media: PackMedia,
    ids: Sequence[int],
) -> None:
    """Set the positions of trajectories that have images. `positions`: [4, N]."""
    item_of = np.full(len(words), -1)
    item_of[media.place.cpu().numpy()] = media.item.numpy()
    for number, trajectory_id in enumerate(ids):
        places = shape.places(number)
        items = item_of[places]
        items = items[items >= 0]
        if not kinds[places].any() and not len(items):
            continue
        grids = _grids(media, items)
        name = f"micro.model_inputs: trajectory {trajectory_id}"
        _check_places(packed, name, kinds[places], grids)
        rows = _positions_of(packed, name, words[places], kinds[places], grids)
        own = slice(shape.starts[number], shape.ends[number])
        shared = len(places) - (own.stop - own.start)
        is_within = shared and kinds[places[shared]] and item_of[places[shared]] < 0
        if is_within and kinds[places[shared]] == kinds[places[shared - 1]]:
            rule = f"must not leave another trajectory within an image, at step {shared}"
            remedy = 'keep the tokens that the processor puts after images, or "prefix": "own"'
            raise DataError(name, rule, None, remedy)
        positions[1:, own] = rows[:, shared:]


def _grids(media: PackMedia, items: np.ndarray) -> dict[str, torch.Tensor]:
    """Return what positions need of the items of a trajectory: grids, and seconds of video."""
    grids = {}
    for name in (*_GRIDS.values(), _SECONDS):
        if name in media.columns:
            parts = torch.split(media.columns[name].cpu(), media.counts[name].tolist())
            of_items = [parts[item] for item in items.tolist() if len(parts[item])]
            if of_items:
                grids[name] = torch.cat(of_items)
    return grids


def _check_places(
    packed: PackedModel, name: str, kinds: np.ndarray, grids: Mapping[str, torch.Tensor]
) -> None:
    """Raise unless a trajectory has as many places of images and of videos as its grids need."""
    merged = packed.config.vision_config.spatial_merge_size**2
    for kind, column in zip(_KINDS.values(), _GRIDS.values(), strict=True):
        needed = int(grids[column].prod(1).sum()) // merged if column in grids else 0
        count = int((kinds == kind).sum())
        if count != needed:
            rule = f"must have {needed} places of the token that {column} needs"
            remedy = (
                "name each item at the first of its places, keep whole trajectories below "
                "gear.pack.tokens, and sample no such token in responses"
            )
            raise DataError(name, rule, count, remedy)


def _positions_of(
    packed: PackedModel,
    name: str,
    tokens: np.ndarray,
    kinds: np.ndarray,
    grids: Mapping[str, torch.Tensor],
) -> np.ndarray:
    """Return the three positions of each place of one trajectory. [3, steps], int64."""
    model: Any = packed.inner
    if not hasattr(model, "get_rope_index"):
        model = model.model
    try:
        positions, _ = model.get_rope_index(
            input_ids=torch.from_numpy(tokens)[None],
            mm_token_type_ids=torch.from_numpy(kinds)[None],
            **grids,
        )
    # It takes the next grid for each run of places, without a check.
    except (StopIteration, RuntimeError, IndexError) as error:
        remedy = "keep the tokens that the processor puts between images"
        rule = "must have a run of places of its own for each image"
        raise DataError(name, rule, f"{error}" or type(error).__name__, remedy) from error
    rows: np.ndarray = positions[:, 0].numpy()
    return rows
