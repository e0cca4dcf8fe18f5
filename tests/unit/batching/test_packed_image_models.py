"""Models of text and images: packs give the logits and gradients of each trajectory alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from packed_families import kernels, places  # noqa: E402
from packed_images import (  # noqa: E402
    BEGIN,
    END,
    FAMILIES,
    IMAGE,
    MERGED,
    PATCH,
    VIDEO,
    add_group,
    gear_section,
    media,
    prompt,
    tiny,
)
from rollout_support import micros as micros_of  # noqa: E402
from rollout_support import ranks_of, seen_by  # noqa: E402

from deepspeed_gear import Media, Replay  # noqa: E402
from deepspeed_gear.batching.micro_batch import MicroBatch  # noqa: E402
from deepspeed_gear.errors import ConfigError, DataError  # noqa: E402

ATTENTIONS = ("sdpa", "eager", "flex_attention", "flash_attention_2")
PROMPTS = ([(4, 6)], [], [(2, 2), (8, 4)], [(4, 6), (4, 6), (2, 6)])


def add_groups(replay: Replay) -> None:
    for number, images in enumerate(PROMPTS):
        add_group(replay, number, *prompt(images, number))


def micros(replay: Replay) -> Iterator[MicroBatch]:
    """Yield the micro batches of the next rollout batch."""
    for step in replay.rollout():
        yield from step


def alone(model: Any, micro: MicroBatch) -> list[torch.Tensor]:
    """Return the logits of each trajectory alone, with the positions that the model computes."""
    ids = micro.group.tolist()
    found = []
    for number, at in zip(ids, places(micro), strict=True):
        tokens = micro["tokens"][:, at]
        # Groups come in the order in which they were added.
        _, named = prompt(PROMPTS[number], number)
        given: dict[str, Any] = {}
        for name in ("pixel_values", "image_grid_thw"):
            parts = [torch.as_tensor(item.columns[name]) for item in named.values()]
            if parts:
                given[name] = torch.cat(parts)
        if given:
            given["mm_token_type_ids"] = (tokens == IMAGE).int()
        found.append(model(input_ids=tokens, use_cache=False, **given).logits[0])
    return found


@pytest.mark.parametrize("prefix", ["own", "share", "one trajectory"])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packs_of_images_give_what_each_trajectory_gives_alone(
    family: str, attention: str, prefix: str
) -> None:
    if prefix == "share" and attention.startswith("flash"):
        pytest.skip("prefixes are shared by masks")
    try:
        model = tiny(family, attention)
    except ValueError:
        pytest.skip("the model does not offer this attention")
    config = gear_section(prefix if prefix == "share" else "own", len(PROMPTS))
    if prefix == "one trajectory":
        config["pack"]["max_trajectories"] = 1
    with Replay(config) as replay:
        add_groups(replay)
        count = 0
        for micro in micros(replay):
            # Compiling flex attention takes long.
            with torch.no_grad(), kernels(model), torch.compiler.set_stance("force_eager"):
                wanted = alone(model, micro)
                inputs = micro.model_inputs(model)
                packed = model(**inputs).logits[0]
                # The steps alone are not enough.
                other = model(**{**inputs, "position_ids": micro.position_ids}).logits[0]
            if prefix != "one trajectory":
                assert (other - packed).abs().max() > 1e-2
            for at, expected in zip(places(micro), wanted, strict=True):
                assert (packed[at] - expected).abs().max() < 1e-4 * expected.abs().max()
                count += 1
    assert count == 2 * len(PROMPTS)


def loss_of(micro: MicroBatch, logits: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return the weighted loss of some places of a pack, given their logits."""
    loss = torch.nn.functional.cross_entropy(logits, micro.targets[0, at], reduction="none")
    return (loss * micro.weight[0, at]).sum()


@pytest.mark.parametrize("prefix", ["own", "share"])
def test_gradients_are_those_of_each_trajectory_alone(prefix: str) -> None:
    """Of the layers of images, too; in double precision."""
    model = tiny("qwen2_vl").double()
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = [[torch.zeros_like(parameter) for parameter in parameters] for _ in range(2)]
    with Replay(gear_section(prefix, len(PROMPTS))) as replay:
        add_groups(replay)
        for micro in micros(replay):
            logits = model(**micro.model_inputs(model)).logits[0]
            losses = [loss_of(micro, logits, torch.arange(len(logits))), torch.zeros(())]
            owners = micro.sequence[0]
            every = zip(alone(model, micro), places(micro), strict=True)
            for number, (of_one, at) in enumerate(every):
                own = owners[at] == number
                losses[1] = losses[1] + loss_of(micro, of_one[own], at[own])
            for sums, loss in zip(found, losses, strict=True):
                for total, grad in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
                    total += grad
    for name, packed, wanted in zip(names, *found, strict=True):
        assert (packed - wanted).abs().max() <= 2e-6 * wanted.abs().max(), name
    of_images = [grad for name, grad in zip(names, found[0], strict=True) if "visual" in name]
    assert all(grad.abs().max() > 0 for grad in of_images)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_with_windows_share_images(family: str, attention: str) -> None:
    """A window counts the steps of the trajectory, not the positions of an image's places."""
    layers = ["full_attention", "sliding_attention"]
    windows = {"use_sliding_window": True, "sliding_window": 7, "layer_types": layers}
    model = tiny(family, attention, **windows)
    with Replay(gear_section("share", len(PROMPTS))) as replay, torch.no_grad():
        add_groups(replay)
        for micro in micros(replay):
            inputs = micro.model_inputs(model)
            packed = model(**inputs).logits[0]
            full = inputs["attention_mask"]["full_attention"]
            other = model(**{**inputs, "attention_mask": full}).logits[0]
            assert (other - packed).abs().max() > 1e-2
            for at, expected in zip(places(micro), alone(model, micro), strict=True):
                assert (packed[at] - expected).abs().max() < 2e-6 * expected.abs().max()


def gradients(model: Any, micro: MicroBatch, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the gradient of each parameter by a pack's loss, None where there is none."""
    logits = model(**inputs).logits[0]
    loss = loss_of(micro, logits, torch.arange(len(logits)))
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True))


@pytest.mark.parametrize(("prefix", "multiple"), [("own", 16), ("own", 1), ("share", 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_packs_of_text_have_dummies_of_images_on_several_ranks(
    family: str, prefix: str, multiple: int
) -> None:
    """At padding, or at a last place: what the loss depends on does not change, to the bit.

    Experts sum the gradients of all their places, a dummy's 0 included, in another order.
    """
    model = tiny(family)
    config = gear_section(prefix, 2)
    config["pack"]["pad"]["multiple"] = multiple
    with Replay(config) as replay:
        for number in range(2):
            add_group(replay, number, [5, 6 + number, 9], {})
        rollout = replay.rollout()
        for place in ranks_of(2):
            (micro,) = micros_of(seen_by(rollout, place))
            assert micro.num_trajectories == 2
            assert (micro["tokens"].shape[1] > micro.num_tokens) == (multiple == 16)
            inputs = micro.model_inputs(model)
            assert inputs["pixel_values"].shape == inputs["pixel_values_videos"].shape == (4, PATCH)
            assert inputs["image_grid_thw"].tolist() == inputs["video_grid_thw"].tolist()
            is_dummy = inputs["input_ids"] != micro["tokens"]
            assert inputs["input_ids"][is_dummy].sort().values.tolist() == [IMAGE, VIDEO]
            assert not (is_dummy & micro.loss_mask).any()
            plain = {
                name: value
                for name, value in inputs.items()
                if "pixel" not in name and "grid" not in name
            }
            wanted = gradients(model, micro, {**plain, "input_ids": micro["tokens"]})
            for name, found in gradients(model, micro, inputs).items():
                if "visual" in name:
                    assert wanted[name] is None
                    assert found is not None
                    assert not found.any()
                elif family == "qwen3_vl_moe":
                    assert (found - wanted[name]).abs().max() < 2e-6 * wanted[name].abs().max()
                else:
                    assert torch.equal(found, wanted[name]), name
        for step in rollout:  # one rank
            for micro in step:
                assert "pixel_values" not in micro.model_inputs(model)


def test_a_pack_without_a_place_for_dummies_is_refused() -> None:
    config = gear_section()
    config["pack"]["pad"]["multiple"] = 1
    with Replay(config) as replay:
        add_group(replay, 0, [5, 6, 9], {})
        (micro,) = micros_of(seen_by(replay.rollout(), ranks_of(2)[0]))
        text = "a place without a loss for a dummy of pixel_values_videos; keep .* 2 steps below"
        with pytest.raises(DataError, match=text):
            micro.model_inputs(tiny("qwen2_vl"))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_videos(family: str) -> None:
    """A video of two frames, whose places are one run, or one run for each frame (Qwen3-VL)."""
    model = tiny(family)
    clip = media(3, 4, 4, "video")
    seconds = {"second_per_grid_ts": [2.0]} if family == "qwen2_5_vl" else {}
    clip = Media(**clip.columns, **seconds)
    of_frame = [VIDEO] * (4 * 4 // MERGED)
    frames = [*of_frame, *of_frame]
    if family == "qwen3_vl":
        frames = [*of_frame, END, 9, BEGIN, *of_frame]
    tokens = [5, BEGIN, *frames, END, 8]
    with Replay(gear_section()) as replay:
        add_group(replay, 0, tokens, {2: clip})
        micro = next(each := micros(replay))
        packed = model(**micro.model_inputs(model)).logits[0]
        for at in places(micro):
            ids = micro["tokens"][:, at]
            wanted = model(
                input_ids=ids,
                use_cache=False,
                mm_token_type_ids=2 * (ids == VIDEO).int(),
                pixel_values_videos=torch.as_tensor(clip.columns["pixel_values_videos"]),
                video_grid_thw=torch.tensor(clip.columns["video_grid_thw"]),
                **{name: torch.tensor(value) for name, value in seconds.items()},
            ).logits[0]
            assert (packed[at] - wanted).abs().max() < 1e-4 * wanted.abs().max()
        each.close()


@pytest.mark.parametrize(
    ("tokens", "named", "error", "text"),
    [
        ([5, BEGIN, *[IMAGE] * 5, END], {2: (4, 6)}, DataError, "must have 6 places .* got 5"),
        ([5, BEGIN, END, 6, 7, 8], {2: (4, 6)}, DataError, "must have 6 places .* got 0"),
        ([5, *[IMAGE] * 2, END], {}, DataError, "must have 0 places of the token that image_grid"),
        (
            [5, BEGIN, *[IMAGE] * 2, END],
            {2: (2, 2), 3: (2, 2)},
            DataError,
            "must have a run of places of its own for each image.*between images",
        ),
    ],
)
def test_places_that_are_not_those_of_the_images_are_refused(
    tokens: list[int], named: dict[int, tuple[int, int]], error: type[Exception], text: str
) -> None:
    model = tiny("qwen2_vl")
    with Replay(gear_section()) as replay:
        items = {step: media(step, *size) for step, size in named.items()}
        add_group(replay, 0, [*tokens, 9], items)
        with pytest.raises(error, match=f"micro.model_inputs: trajectory 0.*{text}"):
            next(micros(replay)).model_inputs(model)


CONTEXT = [5, BEGIN, *[IMAGE] * 6, END, 7]


def add_branches(replay: Replay, *each: tuple[list[int], list[int]]) -> None:
    """Add a group of trajectories of a context, with an image at step 2, and an output."""
    for context, output in each:
        mask = [False] * len(context) + [True] * len(output)
        row = {"tokens": [*context, *output], "loss_mask": mask, "prompt": 0}
        replay.add({**row, "image": {2: media(0, 4, 6)}})


@pytest.mark.parametrize("family", FAMILIES)
def test_branches_share_an_image_and_a_part_of_an_output(family: str) -> None:
    model = tiny(family)
    with Replay(gear_section("share", groups=1)) as replay:
        add_branches(replay, (CONTEXT, [10, 11, 12]), ([*CONTEXT, 10, 11, 8, 9], [13, 14]))
        micro = next(each := micros(replay))
        assert micro.pack_shape.prefixes is not None
        assert micro.pack_shape.prefixes.steps.tolist() == [0, len(CONTEXT) + 1]
        with torch.no_grad():
            packed = model(**micro.model_inputs(model)).logits[0]
            for at in places(micro):
                ids = micro["tokens"][:, at]
                image = {n: torch.as_tensor(v) for n, v in media(0, 4, 6).columns.items()}
                kinds = (ids == IMAGE).int()
                wanted = model(
                    input_ids=ids, use_cache=False, mm_token_type_ids=kinds, **image
                ).logits[0]
                assert (packed[at] - wanted).abs().max() < 1e-4 * wanted.abs().max()
        each.close()


def test_a_branch_within_an_image_is_refused() -> None:
    """The image has no token after it, and a step is not shared whose next token differs."""
    with Replay(gear_section("share", groups=1)) as replay:
        add_branches(replay, (CONTEXT[:8], [10]), ([*CONTEXT[:8], 9], [11, 12]))
        micro = next(each := micros(replay))
        text = "trajectory 1 must not leave another trajectory within an image, at step 7; keep"
        with pytest.raises(DataError, match=text):
            micro.model_inputs(tiny("qwen2_vl"))
        each.close()


def test_images_without_a_column_of_media_are_refused() -> None:
    config = gear_section()
    table = config["tables"]["main"]
    del table["media"], table["schema"]["columns"]["image"], config["fields"]["image"]
    with Replay(config) as replay:
        for member in range(2):
            tokens = [5, BEGIN, IMAGE, END, 9 + member]
            replay.add({"tokens": tokens, "loss_mask": [0, 0, 0, 0, 1], "prompt": 0})
        micro = next(each := micros(replay))
        with pytest.raises(ConfigError, match=r"gear.fields must have a field .* role media"):
            micro.model_inputs(tiny("qwen2_vl"))
        each.close()
