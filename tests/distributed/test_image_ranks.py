"""A model of text and images on two ranks, of which one has an image and the other has none."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from process_support import call_with_engines

pytest.importorskip("transformers", reason="the model is transformers' Qwen2-VL")

from packed_images import IMAGE, gear_section, prompt, tiny
from trainers import EngineTrainer, ModuleTrainer, Weights

from deepspeed_gear import Media, Replay
from deepspeed_gear.frameworks.engine_place import place_of
from deepspeed_gear.frameworks.gradient_divisor import gradient_divisor

ROWS = 64
KINDS = ("zero0", "zero1", "zero2", "zero3", "ddp", "fsdp1", "fsdp2")


def trainer_of(kind: str) -> EngineTrainer | ModuleTrainer:
    """Return the trainer of a kind; the layers of images are a unit of FSDP of their own."""
    if not kind.startswith("zero"):
        return ModuleTrainer(lambda _: tiny("qwen2_vl"), ("model", ["visual"]), kind)
    config = {"data_types": {"grad_accum_dtype": "fp32"}}
    return EngineTrainer(lambda _: tiny("qwen2_vl"), {"zero": int(kind[4]), "config": config})


def trajectories() -> Iterator[tuple[int, list[int], dict[int, Media], list[int]]]:
    """Yield the group, prompt, images and response of four trajectories; one has an image."""
    for number, images in enumerate(([(4, 6)], [], [], [])):
        tokens, named = prompt(images, number)
        tokens += list(range(20, 25 if images else 34))  # so that packs are equally long
        yield number // 2, tokens, named, list(range(10 + number, 13 + 3 * number))


def wanted(model: Any) -> Weights:
    """Return the gradient of the mean over all loss tokens, of one trajectory at a time."""
    sums = []
    count = 0
    for _, tokens, named, response in trajectories():
        ids = torch.tensor([[*tokens, *response]])
        given: dict[str, Any] = {}
        for name in ("pixel_values", "image_grid_thw") if named else ():
            parts = [torch.as_tensor(item.columns[name]) for item in named.values()]
            given[name] = torch.cat(parts)
        kinds = (ids == IMAGE).int()
        logits = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **given).logits
        losses = F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
        sums.append(losses[len(tokens) - 1 :].sum())
        count += len(response)
    (torch.stack(sums).sum() / count).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def train(kind: str, multiple: int) -> tuple[int, float]:
    """Train one step by SGD with rate 1.

    Returns:
        Images of this rank's packs that are no dummies, and the error of the gradient as part of
        the largest one.
    """
    trainer = trainer_of(kind)
    before = trainer.weights()
    reference = tiny("qwen2_vl")
    reference.load_state_dict({**reference.state_dict(), **before})
    config = gear_section(groups=2)
    config["tables"]["main"]["max_length"] = ROWS
    config |= {"pack": {"tokens": ROWS, "pad": {"multiple": multiple}}, "timeout_s": 60.0}
    config["sampler"] |= {"kind": "fifo"}
    place = place_of(trainer.trained) if isinstance(trainer, EngineTrainer) else None
    images = 0
    with Replay(config, place=place) as replay:
        if dist.get_rank() == 0:
            for group, tokens, named, response in trajectories():
                mask = [False] * len(tokens) + [True] * len(response)
                row = {"tokens": [*tokens, *response], "loss_mask": mask, "image": named}
                replay.add({**row, "prompt": group})
        dist.barrier()
        replay.gradient_divisor = gradient_divisor(trainer.trained)
        rollout = replay.rollout()
        for micro in rollout.forward("logp"):  # without gradients, by the same layers
            with torch.no_grad():
                logits = trainer.trained(**micro.model_inputs(trainer.trained)).logits
            micro.fill(logp=logits[0, :, 0])
        for step in rollout:
            assert len(step) == 1
            for micro in step:
                inputs = micro.model_inputs(trainer.trained)
                images += int(inputs["pixel_values"].any())

                def value(micro: Any = micro, inputs: dict[str, Any] = inputs) -> torch.Tensor:
                    logits = trainer.trained(**inputs).logits[0]
                    return micro.sum(F.cross_entropy(logits, micro.targets[0], reduction="none"))

                trainer.backward(value, True)
            trainer.step()
    after = trainer.weights()
    trainer.close()
    gradients = wanted(reference)
    most = max(float(gradient.abs().max()) for gradient in gradients.values())
    errors = [
        float((before[name] - after[name] - gradient).abs().max())
        for name, gradient in gradients.items()
    ]
    assert any("visual" in name and gradients[name].any() for name in gradients)
    return images, max(errors) / most


def train_all(kind: str) -> list[tuple[int, float]]:
    """Train with padding, and without."""
    return [train(kind, multiple) for multiple in (8, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_images_goes_on(kind: str) -> None:
    """The gradient is that of one process."""
    ranks = call_with_engines(2, train_all, kind, timeout_s=120.0)
    for found in zip(*ranks, strict=True):
        assert sorted(images for images, _ in found) == [0, 1]
        assert max(error for _, error in found) < 2e-6
